"""scripts/export_hf.py: transformers loads the exported files, with equal logits and token ids."""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from helpers import REPOSITORY
from helpers.models import tiny_model
from helpers.refusals import printed_keys
from helpers.runs import change_state, rows, run_command, train_in
from helpers.tally import trials
from helpers.texts import FRAGMENTS
from hypothesis import example, given
from hypothesis import strategies as st

from clearhead.models import export
from clearhead.models.decoding import Sampling
from clearhead.models.decoding import generate as decode
from clearhead.models.huggingface import to_hf
from clearhead.models.pretrained import load_pretrained
from scripts.export_hf import main

FILES = {"config.json", "generation_config.json", "model.safetensors", "README.md"}
FILES |= {"tokenizer.json", "tokenizer_config.json"}
SOURCES = {"words": "gpt2", "bytes": "runs/one"}  # name of the export -> the exported model


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a run and a Hugging Face directory, exported to `bytes` and `words`. The run
    has no biases, and trains half of its positions. The directory has GPT-2's vocabulary."""
    folder = tmp_path_factory.mktemp("export")
    train_in(folder, "name=one", "model.context_length=64", "model.qkv_bias=false")
    to_hf(tiny_model(vocab_size=50257, context_length=48), folder / "gpt2")
    for out, source in SOURCES.items():
        assert run_command(main, folder, f"checkpoint={source}", f"out={out}")[0] == 0
    return folder


@pytest.fixture
def run(in_process, home):
    """run(*arguments) -> (exit code, out, err), in `home`, in this process."""
    return functools.partial(in_process, main, home)


characters = st.characters(exclude_categories=["Cs"])
mixes = st.lists(st.sampled_from(FRAGMENTS) | st.text(characters, max_size=4), max_size=20)


@pytest.mark.parametrize("name", SOURCES)
def test_ids_are_tiktokens(home, name, tmp_path):
    import transformers

    theirs = transformers.AutoTokenizer.from_pretrained(home / name)
    ours = load_pretrained(home / name).tokenizer
    assert len(theirs) == ours.n_vocab
    assert theirs.eos_token_id == theirs.bos_token_id == ours.eot_token
    assert theirs("a<|endoftext|>b")["input_ids"].count(ours.eot_token) == 1
    theirs.save_pretrained(shutil.copytree(home / name, tmp_path / name))
    assert load_pretrained(tmp_path / name).tokenizer is ours

    @trials(15, 150)
    @example(["It's", " we'll", "  DON'T", "\t\t\n \n", "1234½", "_" * 9, "\x00\x7f\xad"])
    @example(["<|endoftext|>", " <|endoftext|> <|endoftext|", "<|endoftext|>\n"])
    @given(mixes)
    def check(parts):
        text = "".join(parts)
        ids = ours.encode(text, allowed_special="all")
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == text

    check()


@pytest.mark.parametrize("name", SOURCES)
def test_pipeline_generates_our_tokens(home, name):
    import transformers

    generate = transformers.pipeline("text-generation", model=str(home / name), device="cpu")
    (found,) = generate("The quick fox", max_new_tokens=5, do_sample=False)
    pretrained = load_pretrained(home / SOURCES[name])
    ids = pretrained.tokenizer.encode("The quick fox")
    tokens = [token for (token,) in decode(pretrained.model, [ids], 5, Sampling(temperature=0))]
    assert found["generated_text"] == "The quick fox" + pretrained.tokenizer.decode(tokens)
    assert generate.tokenizer.model_max_length == pretrained.window


def test_files_and_what_we_read_back(home):
    for name in SOURCES:
        assert {file.name for file in (home / name).iterdir()} == FILES
    weights = [home / name / "model.safetensors" for name in ("gpt2", "words")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    theirs, ours = load_pretrained(home / "bytes"), load_pretrained(home / "runs" / "one")
    assert (theirs.tokenizer.name, theirs.window) == (ours.tokenizer.name, ours.window)
    assert (theirs.window, theirs.model.config.context_length) == (32, 64)
    assert theirs.model.config.qkv_bias  # zeros, as GPT-2 always has some
    config = json.loads((home / "bytes" / "config.json").read_text())
    assert config["n_ctx"] == config["n_positions"]  # llama.cpp requires it


def test_card_has_the_figures_of_the_run(home):
    _, head, body = (home / "bytes" / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(head)["library_name"] == "transformers"
    last = [row for row in rows(home / "runs/one") if "val/loss" in row][-1]
    rows_of_table = [line.split("|") for line in body.splitlines() if line.startswith("|")]
    values = {value.strip() for _, _, value, _ in rows_of_table}
    assert {f"{last['val/loss']:.4g}", "4", "1,024"} <= values


def test_examples_run(home, capsys):
    """The examples of the model card and of docs/checkpoints.md."""
    docs = (REPOSITORY / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    card = (home / "bytes" / "README.md").read_text(encoding="utf-8")
    for text, place in ((card, "PATH/OF/THIS/FOLDER"), (docs, "my-model")):
        blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        (code,) = [block for block in blocks if f'model="{place}"' in block]
        folder = home / ("bytes" if text is card else "words")
        exec(code.replace(place, str(folder)))
        assert capsys.readouterr().out.startswith("The")


def test_no_text_of_the_run_is_exported(home, tmp_path, run):
    """The settings of the run are an attacker's."""
    source = shutil.copytree(home / "runs" / "one", tmp_path / "one", symlinks=True)
    folder = (source / "checkpoints" / "last").resolve()
    settings = json.loads((folder / "state.json").read_text())["settings"]
    settings |= {"name": "EVIL"}
    settings["trainer"] |= {"init_from": "hub:EVIL\nlicense: EVIL", "batch_size": "EVIL"}
    change_state(folder, settings=settings)
    made = tmp_path / "made"
    made.mkdir()  # an existing empty folder is accepted
    code, _, err = run(f"checkpoint={folder}", f"out={made}/")
    assert (code, err) == (0, "")
    assert not any(b"EVIL" in file.read_bytes() for file in made.iterdir())


def test_bad_arguments_change_nothing(run, home, tmp_path):
    (home / "link").symlink_to(tmp_path)
    outs = ["", "gpt2", "text.txt", "link", "text.txt/a/b", "a\x1b[31m"]
    before = sorted(home.rglob("*"))
    for code, keys, *arguments in (
        *((2, ["out"], "checkpoint=runs/one", f"out={out}") for out in outs),
        (2, ["qkv", "checkpoint", "out"], "checkpoint=", "out=.", "qkv=1"),
        (3, ["checkpoint"], "checkpoint=nowhere", "out=new"),
    ):
        found, told, err = run(*arguments)
        assert (found, told, printed_keys(err)) == (code, "", keys), arguments
        assert "\x1b" not in err
        assert sorted(home.rglob("*")) == before


def test_stopped_halfway_leaves_nothing(run, tmp_path, monkeypatch):
    for code in (143, 2):

        def model_card(*_, code=code):
            assert len(list(tmp_path.glob("out.part-*/*"))) >= 5
            if code == 143:
                os.kill(os.getpid(), signal.SIGTERM)
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(export, "model_card", model_card)
        found, _, err = run("checkpoint=runs/one", f"out={tmp_path / 'out'}")
        assert (found, printed_keys(err)) == (code, ["out"] if code == 2 else [])
        assert list(tmp_path.iterdir()) == []


KILLED = """
import sys
from clearhead.config.command_line import new_folder
with new_folder(sys.argv[1]) as folder:
    (folder / "half").write_text("")
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_the_next_command_removes_what_a_killed_one_left(run, tmp_path):
    other = tmp_path / f"out2.part-{'0' * 16}"  # of another name
    other.mkdir()
    command = [sys.executable, "-c", KILLED, str(tmp_path / "out")]
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": REPOSITORY}
    with subprocess.Popen(command, **options) as killed:
        assert (Path(killed.stdout.readline().strip()) / "half").exists()
        killed.kill()
    assert run("checkpoint=runs/one", f"out={tmp_path / 'out'}")[0] == 0
    assert {*tmp_path.iterdir()} == {other, tmp_path / "out"}
    assert {file.name for file in (tmp_path / "out").iterdir()} == FILES


def test_padded_batches(home):
    """As without padding: right for logits and classes, left for continuations (`generate` warns of
    the other side). docs of GPT-2 in transformers: pad on the right."""
    import transformers

    folder, texts = home / "bytes", ["The quick brown fox", "The", "a" * 90]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    assert batch["input_ids"].shape == (3, load_pretrained(folder).window)
    for kind in ("CausalLM", "SequenceClassification"):
        model = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(folder).eval()
        logits = model(**tokenizer(texts[:2], padding=True, return_tensors="pt")).logits
        for row, text in zip(logits, texts, strict=False):
            (alone,) = model(**tokenizer(text, return_tensors="pt")).logits
            torch.testing.assert_close(row[: len(alone)], alone)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    left = tokenizer(texts[:2], padding=True, padding_side="left", return_tensors="pt")
    options = {"max_new_tokens": 5, "do_sample": False}
    for row, text in zip(model.generate(**left, **options), texts, strict=False):
        (alone,) = model.generate(**tokenizer(text, return_tensors="pt"), **options)
        assert row[-5:].tolist() == alone[-5:].tolist()
