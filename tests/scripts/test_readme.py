"""Examples, files and links in README.md and docs/. Their commands: test_commands.py."""

import itertools
import json
import re
import shlex
from pathlib import Path

import torch
from helpers import REPOSITORY

import train
from clearhead.lens import read_snapshot


def blocks(page, language=r"\w*") -> list[str]:
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


ARCHITECTURE = "docs/architecture.md"
LINES = "\n".join(blocks("README.md")).splitlines()


def test_answers_to_mistakes_are_those_shown(in_process, tmp_path):
    shown = [(a, b) for a, b in itertools.pairwise(LINES) if a.startswith("$ ")]
    assert len(shown) >= 2
    for line, answer in shown:
        words = shlex.split(line.removeprefix("$ python train.py"))
        assert in_process(train.main, tmp_path, *words)[2] == answer + "\n"


def test_files_that_pages_name_exist():
    text = "".join((REPOSITORY / page).read_text("utf-8") for page in ("README.md", ARCHITECTURE))
    names = re.findall(r"`([\w/]+(?:\.(?:py|js|css|html|toml)|/))`", text)
    assert len(names) > 50
    for name in names:
        written_by_a_run = name == "report.html" or name.startswith("attention/")
        assert written_by_a_run or (REPOSITORY / name).exists(), name


def headings(page: Path) -> set[str]:
    """Returns the anchors of the headings of a Markdown page, as on GitHub."""
    prose = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in found}


def test_targets_of_links_exist():
    docs = (REPOSITORY / "docs").glob("*.[mi][dp]*")
    results = (REPOSITORY / "benchmarks" / "results").glob("*.md")
    for page in [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *docs, *results]:
        text = page.read_text("utf-8")
        if page.suffix == ".ipynb":
            text = "".join(itertools.chain(*(cell["source"] for cell in json.loads(text)["cells"])))
        for target in re.findall(r"\]\(((?!http)[^)]+)\)", text):
            name, _, anchor = target.partition("#")
            linked = page.parent / name if name else page
            assert linked.exists(), (page.name, target)
            assert not anchor or anchor in headings(linked), (page.name, target)


def test_the_python_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names, quick = {}, ["wandb=off", "lens=off", "model.num_layers=2", "model.emb_dim=16"]
    (code,) = (code for code in blocks("docs/models.md", "python") if "build_run" in code)
    exec(code.replace("max_steps=20", f'max_steps=2", *{quick}, "debug=true'), names)
    assert names["run"].state.step == 2
    assert [layer.shape[:2] for layer in names["layers"]] == [(1, 4)] * 2


def test_the_lens_with_another_model(tmp_path, monkeypatch):
    """The programs of the pages, with a tiny transformers model and a byte tokenizer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    class Tokenizer:
        vocab_size, bos_token_id = 256, 256
        encode = staticmethod(lambda text: list(text.encode()))
        decode = staticmethod(lambda ids: "".join(map(chr, ids)))

    torch.manual_seed(0)
    shape = GPT2Config(vocab_size=257, n_positions=48, n_embd=16, n_layer=2, n_head=2)
    shape._attn_implementation = "eager"
    monkeypatch.chdir(tmp_path)
    names = {"model": GPT2LMHeadModel(shape).eval(), "tokenizer": Tokenizer}
    for code in blocks("docs/lens-own-model.md", "python") + blocks("README.md", "python"):
        exec(code, names)
    assert (tmp_path / "attention" / "timelapse.html").is_file()
    assert (tmp_path / "attention.html").is_file()
    snapshots = [read_snapshot(path) for path in sorted((tmp_path / "attention").glob("*.npz"))]
    assert [snapshot.step for snapshot in snapshots] == [0, 50, 100]
    assert [prompt.period for prompt in snapshots[-1].prompts] == [0, 23]
