"""Examples, files and links in README.md and docs/. Their commands: test_commands.py."""

import itertools
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from helpers import REPOSITORY
from helpers.foreign import WORDS, byte_level_tokenizer, foreign_model

import train
from headlens import read_snapshot
from headlens.trainer import LensCallback


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
        written_by_a_run = name in ("run.html", "play.html") or name.startswith("attention/")
        assert written_by_a_run or (REPOSITORY / name).exists(), name


def headings(page: Path) -> set[str]:
    """Returns the anchors of the headings of a Markdown page, as on GitHub."""
    prose = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in found}


def test_targets_of_links_exist():
    folders = (REPOSITORY / "docs", REPOSITORY / "headlens", REPOSITORY / "headlens/docs")
    docs = [page for folder in folders for page in folder.glob("*.[mi][dp]*")]
    results = (REPOSITORY / "benchmarks").rglob("*.md")
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
    (code,) = (code for code in blocks("docs/checkpoints.md", "python") if "build_run" in code)
    exec(code.replace("max_steps=20", f'max_steps=2", *{quick}, "debug=true'), names)
    assert names["run"].state.step == 2
    assert [layer.shape[:2] for layer in names["layers"]] == [(1, 4)] * 2


# Packages of other trainers: folder of the snapshots, code that takes them and code that does not.
RECIPES = {
    "trl": ("sft/attention", "[LensCallback(text=validation_text)]", "[]"),
    "lightning": ("attention", "[Snapshots()]", "[]"),
    "accelerate": ("own", "lens.due(step)", "False"),
}


@pytest.mark.parametrize("package", RECIPES)
def test_a_recipe_for_another_trainer_gives_the_same_weights(tmp_path, monkeypatch, package):
    pytest.importorskip(package)
    folder, with_lens, without = RECIPES[package]
    tokenizer = byte_level_tokenizer(bos_token="<|endoftext|>", eos_token="<|endoftext|>")
    names = {"tokenizer": tokenizer, "validation_text": WORDS * 8, "LensCallback": LensCallback}
    ids, weights = torch.tensor(tokenizer(WORDS * 8).input_ids).unfold(0, 24, 8), []
    if package == "trl":
        lora = pytest.importorskip("peft").LoraConfig(r=4, lora_dropout=0.1, task_type="CAUSAL_LM")
        dataset = pytest.importorskip("datasets").Dataset.from_list([{"text": WORDS}] * 8)
        tokenizer.pad_token = tokenizer.eos_token
        names |= {"peft_config": lora, "dataset": dataset}
    pages = blocks("headlens/docs/your-model.md", "python")
    (code,) = (each for each in pages if re.search(rf"(import|from) {package}\b", each))
    for place, given in (("with", code), ("without", code.replace(with_lens, without))):
        (tmp_path / place).mkdir()
        monkeypatch.chdir(tmp_path / place)
        torch.manual_seed(0)
        model = foreign_model("gpt2", vocab_size=len(tokenizer)).train()
        own = {"model": model, "batches": torch.utils.data.DataLoader(ids, batch_size=4)}
        own["optimizer"] = torch.optim.AdamW(model.parameters(), 1e-2)
        if package == "lightning":
            own["module"] = lightning_module(model)
        exec(given, names | own)
        weights.append(model.state_dict())
    assert weights[0].keys() == weights[1].keys()
    assert all(map(torch.equal, *(each.values() for each in weights)))
    changed = foreign_model("gpt2", vocab_size=len(tokenizer)).state_dict().values()
    assert package == "trl" or not all(map(torch.equal, weights[0].values(), changed))
    files = sorted((tmp_path / "with" / folder).glob("*.npz"))
    assert [read_snapshot(path).step for path in files] == [0, 3]
    assert (tmp_path / "with" / folder / "page.html").is_file()
    assert not (tmp_path / "without" / folder / "page.html").exists()


def lightning_module(model):
    import lightning  # pyrefly: ignore[missing-import]

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch):
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-2)

    return Module()


def test_the_lens_with_another_model(tmp_path, monkeypatch):
    """The programs of the page, with a tiny model of transformers. Of the loggers, only W&B is
    installed."""
    import wandb
    from transformers import Trainer, TrainingArguments

    tokenizer, model = byte_level_tokenizer(), foreign_model("gpt2", vocab_size=320)
    ids = torch.tensor(tokenizer(WORDS * 8).input_ids).unfold(0, 24, 8)
    rows = [{"input_ids": window, "labels": window} for window in ids]
    options = {"max_steps": 3, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    options["save_strategy"] = "no"
    trainer = Trainer(model, TrainingArguments("theirs", **options), None, rows)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def train_step(model):
        model(input_ids=ids[:4], labels=ids[:4]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    monkeypatch.chdir(tmp_path)
    wandb.init(mode="offline", dir=tmp_path)
    names = {"model": model, "tokenizer": tokenizer, "validation_text": WORDS * 8, "wandb": wandb}
    names |= {"trainer": trainer, "train_step": train_step, "texts": [WORDS * 4] * 4}
    names["load"] = lambda step: model
    pages = ("headlens/docs/your-model.md", "headlens/README.md", "README.md")
    for code in itertools.chain(*(blocks(page, "python") for page in pages)):
        if any(re.search(rf"(import|from) {package}\b", code) for package in RECIPES):
            continue
        exec(code, names)
        if "wandb" in code:
            names["on_snapshot"](names["lens"].snapshot(model, 100), 100)
    summary = dict(wandb.run.summary)
    wandb.finish()
    assert summary["attention/page"]["_type"] == "html-file"
    assert (tmp_path / "attention.html").is_file()
    for folder, expected in (("attention", [0, 50, 100]), ("theirs/attention", [0, 3])):
        assert (tmp_path / folder / "page.html").is_file()
        snapshots = [read_snapshot(path) for path in sorted((tmp_path / folder).glob("*.npz"))]
        assert [snapshot.step for snapshot in snapshots] == expected
    assert [layer.weights.shape for layer in names["captured"].layers] == [(1, 4, 4, 4)] * 3
