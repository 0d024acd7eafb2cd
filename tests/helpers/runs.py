"""Training runs of tests: functions that create, read and change them."""

import contextlib
import hashlib
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from helpers import TEXT, TINY
from helpers.models import tiny_model


def train_in(folder: Path, *overrides: str) -> Path:
    """Trains a tiny run to its end, on text.txt in this folder. Returns the run directory."""
    from clearhead.run.build import build_run
    from helpers.settings import settings
    from train import fit

    text = folder / "text.txt"
    if not text.exists():
        text.write_text(TEXT, encoding="utf-8")
    with contextlib.chdir(folder):
        run = build_run(settings(*TINY, "data.path=text.txt", *overrides))
        fit(run)
    return folder / run.directory


def models_to_export(folder: Path) -> Path:
    """Writes a model with each kind of vocabulary: gpt2, bytes (with ids that are not used, and
    untrained positions) and runs/bpe (without biases of queries, keys and values)."""
    from clearhead.models.huggingface import to_hf
    from clearhead.tokens.tokenizer import get_tokenizer

    to_hf(tiny_model(vocab_size=50257, context_length=48), folder / "gpt2")
    model = tiny_model(vocab_size=260, context_length=48)
    to_hf(model, folder / "bytes", get_tokenizer("byte"), window=24)
    vocabulary = ["data.tokenizer=bpe", "data.vocab_size=280", "model.vocab_size=null"]
    train_in(folder, *vocabulary, "name=bpe", "model.context_length=64", "model.qkv_bias=false")
    return folder


def wandb_records(file: Path) -> list[dict]:
    """Returns the records of an offline run of W&B, run-ID.wandb, also of a killed one."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [json.loads(line) for line in lines]


def copy_run(run: Path) -> Path:
    """Copies a run directory to runs/ in the current directory. Returns the copy."""
    return Path(shutil.copytree(run, Path("runs") / run.name, symlinks=True))


def run_command(main: Callable, folder: Path, *arguments: object) -> tuple[int, str, str]:
    """Runs a command in a folder, in this process. Returns (exit code, out, err)."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(folder):
        patch.setattr("sys.argv", ["train.py", *map(str, arguments)])
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main()
            except SystemExit as stopped:
                code = stopped.code
    return code, out.getvalue(), err.getvalue()


def rows(folder: Path) -> list[dict]:
    """Returns the rows of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def repeatable_rows(folder: Path) -> list[dict]:
    """Returns the rows of metrics.jsonl without the speed, which differs between runs."""
    found = rows(folder)
    for row in found:
        row.pop("train/tokens_per_second", None)
    return found


def contents(folder: Path) -> dict[str, str]:
    """Returns {path: SHA-256} of all files in a folder, except lock files. Folders: ""."""
    found = {}
    for path in folder.rglob("*"):
        if path.name != ".lock":
            digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
            found[str(path.relative_to(folder))] = digest
    return found


def changed_paths(folder: Path, before: dict[str, str]) -> list[str]:
    """Returns the paths whose contents differ from `before`."""
    now = contents(folder)
    return sorted(key for key in now.keys() | before.keys() if now.get(key) != before.get(key))


def weights(run) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in run.model.state_dict().items()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Checks that tensors are equal, bit for bit."""
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def train_past_checkpoint(run, step: int) -> None:
    """Trains to a checkpoint at this step and one more step, which is lost. Then changes the state
    of torch's random generator."""
    from train import evaluate_and_log, log_row, save, train_step

    evaluate_and_log(run, {})
    run.metrics.start()
    while run.state.step < step:
        run.metrics.add(*train_step(run))
        if run.is_due("log"):
            log_row(run)
    save(run)
    run.checkpointer.finish(run.state)
    train_step(run)
    torch.manual_seed(12345)


def write_checksums(folder: Path) -> None:
    """Writes the correct checksums of the files of a checkpoint."""
    from clearhead.checkpoint import format as checkpoint

    sums = [f"{checkpoint.checksum(folder / name)}  {name}\n" for name in checkpoint.FILES]
    (folder / checkpoint.CHECKSUMS).write_text("".join(sums))


def change_state(folder: Path, **values: object) -> None:
    """Changes state.json of a checkpoint and its checksum. A key with dots is a nested key."""
    file = folder / "state.json"
    state = json.loads(file.read_text())
    for key, value in values.items():
        *groups, name = key.split(".")
        place = state
        for group in groups:
            place = place[group]
        place[name] = value
    file.write_text(json.dumps(state))
    write_checksums(folder)


def change_tensors(file: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Calls change(tensors) and writes the changed tensors to the safetensors file."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def damage(file: Path, how: str) -> None:
    """Flips a bit, removes the last byte, appends a byte, or removes the file."""
    raw = bytearray(file.read_bytes())
    if how == "flip":
        raw[len(raw) // 2] ^= 4
    elif how == "cut":
        del raw[-1:]
    elif how == "grow":
        raw += b"\n"
    file.write_bytes(raw)
    if how == "remove":
        file.unlink()
