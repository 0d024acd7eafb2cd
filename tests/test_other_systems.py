"""Windows and macOS: locks and links; device, precision and memory layout on MPS."""

import errno
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import TINY
from helpers.models import random_ids, tiny_model
from helpers.refusals import printed_keys, refused
from helpers.settings import settings
from torch.overrides import TorchFunctionMode

import generate
from attention import sdpa
from clearhead.checkpoint.run_directory import lock_directory
from clearhead.errors import ConfigError, RunDirectoryError
from clearhead.models.decoding import KVCache
from clearhead.parallel import device
from clearhead.run.build import build_run
from scripts import evaluate
from train import fit


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


@pytest.fixture
def mps(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("chosen", ["auto", "mps"])
def test_half_precision_on_mps_is_refused_and_automatic_is_fp32(mps, tmp_path, in_process, chosen):
    for precision in ("bf16", "fp16"):
        config = settings(*TINY, f"trainer.device={chosen}", f"trainer.precision={precision}")
        with refused(ConfigError, "trainer.precision", precision, exit_code=2):
            build_run(config)
        options = ("checkpoint=none", f"device={chosen}", f"precision={precision}")
        for main, more in ((generate.main, ()), (evaluate.main, ("data.path=any",))):
            code, _, err = in_process(main, tmp_path, *options, *more)
            assert (code, printed_keys(err)) == (2, ["precision"])
    assert device.check(chosen, "auto") == []
    assert device.best_dtype(torch.device("mps")) == torch.float32


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
