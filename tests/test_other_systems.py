"""Windows and macOS, as far as Linux can pretend: commands without what Windows lacks, and the
choice of device, precision and memory layout on MPS."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import REPOSITORY, TIMEOUT, TINY
from helpers.models import random_ids, tiny_model
from helpers.ranks import environment
from helpers.refusals import printed_keys, refused
from helpers.settings import settings
from helpers.windows import ENVIRONMENT
from torch.overrides import TorchFunctionMode

import generate
from attention import sdpa
from clearhead.checkpoint.run_directory import lock_directory
from clearhead.distributed import device
from clearhead.distributed.strategy import Strategy
from clearhead.errors import ConfigError, RunDirectoryError
from clearhead.inference.cache import KVCache
from clearhead.run.build import build_run
from scripts import evaluate
from train import fit

PROMPT = "“Ça va?” 東京 🦊 —"
TEXT = "".join(f"Line {n}: {PROMPT} said the fox, ναί.\n" for n in range(200))


def test_commands_without_what_windows_lacks(tmp_path):
    """trainer.keep=1: the resumed run removes the checkpoint from which it resumes."""
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    small = [*TINY, "trainer.eval_every=4", "trainer.keep=1", f'trainer.sample_prompt="{PROMPT}"']
    tokens = ["data=shards", "data.path=tokens", "data.tokenizer=gpt2", "model.vocab_size=50257"]
    tokens += ["data.max_length=32", "model.emb_dim=8", "trainer.batch_size=1"]
    commands = [
        ["train.py", *small, "data.path=text.txt", "name=a", "lens=default", "lens.every=4"],
        ["train.py", "trainer.resume=runs/a", "trainer.max_steps=6", "lens=off"],
        ["generate.py", "checkpoint=runs/a", f"prompt={PROMPT}", "max_new_tokens=4"],
        ["scripts.evaluate", "checkpoint=runs/a", "data.path=text.txt", "device=cpu"],
        ["scripts.prepare_data", "data.path=text.txt", "out=tokens", "workers=1"],
        ["train.py", *small, *tokens, "name=b"],
    ]
    done = subprocess.run(
        [sys.executable, REPOSITORY / "tests" / "helpers" / "windows.py", json.dumps(commands)],
        env=environment(HOME=tmp_path, TMPDIR=tmp_path, **ENVIRONMENT),
        cwd=tmp_path,
        capture_output=True,
        encoding="cp1252",
        timeout=TIMEOUT,
    )
    codes = [int(line[5:]) for line in done.stdout.splitlines() if line.startswith("exit ")]
    assert codes == [0] * len(commands), done.stdout + done.stderr
    # Two in each training, for the sample and the command to generate text. cp1252 has no 東京.
    assert done.stdout.count("“Ça va?” ?? ? —") == 2 * 3 + 1
    for run, last in (("a", 6), ("b", 4)):
        folder = tmp_path / "runs" / run
        assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step_{last:08d}"]
        samples = (folder / "samples.jsonl").read_bytes().splitlines()
        assert all(PROMPT.encode() in sample for sample in samples)
        assert len(samples) == 1 + (run == "a")
    assert b"\r\r" not in (tmp_path / "runs" / "a" / "attention" / "heads.csv").read_bytes()


# ------------------------------------------------------------------ what Windows does otherwise


def test_a_locked_directory_whose_lock_file_cannot_be_read(tmp_path, monkeypatch):
    def denied(path, *rest, **options):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    for name in ("read_text", "write_text"):
        monkeypatch.setattr(Path, name, denied)
    refusal = refused(RunDirectoryError, "name", tmp_path.name, exit_code=2)
    with lock_directory(tmp_path), refusal:
        lock_directory(tmp_path)


def test_links_where_a_link_to_a_folder_cannot_be_replaced(make_run, monkeypatch):
    """Windows with developer mode, which allows links."""
    replace = os.replace

    def replace_no_folder(source, target):
        if os.path.isdir(target):
            raise PermissionError(errno.EACCES, "Access is denied", str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_no_folder)
    run = make_run("name=a", "trainer.save_every=2")
    fit(run)
    assert (run.directory / "checkpoints" / "last").readlink() == Path("step_00000004")


# ------------------------------------------------------------------------------------- MPS


@pytest.fixture
def mps(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("chosen", ["auto", "mps"])
def test_half_precision_on_mps_is_refused(mps, tmp_path, in_process, chosen):
    for precision in ("bf16", "fp16"):
        config = settings(*TINY, f"trainer.device={chosen}", f"trainer.precision={precision}")
        with refused(ConfigError, "trainer.precision", precision, exit_code=2):
            build_run(config)
        options = ("checkpoint=none", f"device={chosen}", f"precision={precision}")
        for main, more in ((generate.main, ()), (evaluate.main, ("data.path=none",))):
            code, _, err = in_process(main, tmp_path, *options, *more)
            assert (code, printed_keys(err)) == (2, ["precision"])


def test_automatic_precision_on_mps_is_fp32(mps):
    assert device.check("auto", "auto") == device.check("mps", "fp32") == []
    assert device.best_device() == "mps"
    assert device.best_dtype(torch.device("mps")) == torch.float32


def test_clocks_are_read_after_the_work_on_mps(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.mps, "synchronize", lambda: calls.append("mps"))
    for kind in ("cpu", "mps"):
        Strategy(torch.device(kind), torch.float32).synchronize()
    assert calls == ["mps"]


class Pretended(TorchFunctionMode):
    """All tensors are on the CPU, but say that they are on a device of this kind. Records whether
    the inputs of PyTorch's attention are contiguous."""

    def __init__(self, kind):
        super().__init__()
        self.device, self.found = torch.device(kind), []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function == torch.Tensor.device.__get__:
            return self.device
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        if function is F.scaled_dot_product_attention:
            self.found += [x.is_contiguous() for x in args[:3]]
        return function(*args, **kwargs)


@pytest.mark.parametrize(("kind", "expected"), [("mps", {True}), ("cpu", {False, True})])
def test_attention_has_contiguous_inputs_on_mps(kind, expected):
    """On a CPU, nothing is copied."""
    model, ids = tiny_model().eval(), random_ids()
    with torch.no_grad(), Pretended(kind) as pretended:
        model(ids)
        cache = KVCache(16)
        cache.read_prompts(model, [[1, 2, 3], [4, 5]])
        cache.read_token(model, ids[:, :1])
        queries, keys, values = torch.ones(3, 2, 4, 6, 5).transpose(-1, -2)
        sdpa(queries[:, :, -2:], keys, values)
    assert set(pretended.found) == expected
    assert len(pretended.found) == 3 * (3 * model.config.num_layers + 1)
