"""The chunked loss, compared with the plain version in model.py."""

import os
import subprocess
import sys

import pytest
import torch
from helpers import REPOSITORY

from clearhead.compute import cross_entropy as module
from clearhead.compute.cross_entropy import head_loss
from model import head_loss as plain

N, C, V = 40, 16, 37


@pytest.fixture(params=["at once", "in pieces"], autouse=True)
def sizes(request, monkeypatch):
    """Sets chunks so small that all loops run several times, the last time with fewer rows."""
    if request.param == "in pieces":
        monkeypatch.setattr(module, "LOGITS_AT_ONCE", 7 * V)
        monkeypatch.setattr(module, "CACHED", 2 * V)


def inputs(n=N):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, C, generator=generator)
    weight = torch.randn(V, C, generator=generator)
    target_ids = torch.randint(0, V, (n,), generator=generator)
    return x.requires_grad_(), weight.requires_grad_(), target_ids


def run(loss_function, x, weight, target_ids, factor=1.0):
    """(loss, gradient of x, gradient of weight)."""
    x.grad = weight.grad = None
    loss = loss_function(x, weight, target_ids)
    (factor * loss).backward()
    return loss.detach(), x.grad, weight.grad


def test_fp16_is_as_precise_as_its_digits_and_does_not_overflow():
    args = inputs()
    right = run(plain, *args)
    with torch.autocast("cpu", dtype=torch.float16):
        got = run(head_loss, *args)
    torch.testing.assert_close(got, right, rtol=5e-3, atol=1e-4)
    x, weight = (3000 * args[0].abs()).detach(), torch.zeros(V, C)
    same = torch.zeros(N, dtype=torch.int64)  # the sum of their gradients overflows fp16
    with torch.autocast("cpu", dtype=torch.float16):
        grad_weight = run(head_loss, x.requires_grad_(), weight.requires_grad_(), same)[-1]
    assert grad_weight.isfinite().all()


def test_the_softmax_of_bf16_logits_is_in_fp32():
    """The logits are small integers, which are exact in bf16."""
    x, weight, target_ids = inputs()
    args = [tensor.detach().round().requires_grad_() for tensor in (x, weight)]
    exact = run(plain, *args, target_ids)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(run(head_loss, *args, target_ids)[0], exact)


def test_loss_and_gradients_equal_the_plain_version():
    args = inputs()
    for factor in (1.0, 0.25):
        torch.testing.assert_close(run(head_loss, *args, factor), run(plain, *args, factor))
    x, weight, _ = args
    loss = head_loss(*args)
    first = torch.autograd.grad(loss, (x, weight), retain_graph=True)  # a second backward
    torch.testing.assert_close(torch.autograd.grad(loss, (x, weight)), first, rtol=0, atol=0)
    with torch.no_grad():
        loss = head_loss(*args)
    assert loss.grad_fn is None
    torch.testing.assert_close(loss, plain(*args).detach())


def test_ignored_targets():
    x, weight, target_ids = inputs()
    target_ids[::3] = -100
    got = run(head_loss, x, weight, target_ids)
    torch.testing.assert_close(got, run(plain, x, weight, target_ids))
    assert (got[1][::3] == 0).all()
    assert (got[1][1::3] != 0).all()
    assert head_loss(x, weight, target_ids.fill_(-100)).isnan()  # no targets at all


def test_bf16_is_as_precise_as_the_plain_version():
    """Compared with fp32, the errors are as small as with autocast, also summed over 92 chunks."""
    args = inputs(16 * N)
    exact = run(plain, *args)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = run(head_loss, *args), run(plain, *args)
    for of_ours, of_theirs, right in zip(ours, theirs, exact, strict=True):
        assert of_ours.dtype == right.dtype
        error, allowed = (of_ours - right).norm(), (of_theirs - right).norm()
        assert error <= 1.2 * allowed + 1e-4 * right.norm()


def test_an_infinite_input_makes_loss_and_gradients_nonfinite():
    """NonFiniteCheck then skips the step."""
    x, weight, target_ids = inputs()
    with torch.no_grad():
        x[5, 0] = float("inf")
    loss, _, grad_weight = run(head_loss, x, weight, target_ids)
    assert not loss.isfinite()
    assert not grad_weight.isfinite().all()


@pytest.mark.parametrize("sizes", ["in pieces"], indirect=True)
def test_the_compiled_loss_is_the_same():
    """The complete function is traced, as on a GPU."""
    args = inputs()
    compiled = torch.compile(head_loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(compiled, *args), run(plain, *args))


@pytest.mark.parametrize("sizes", ["at once"], indirect=True)
def test_the_kernel_of_a_gpu_computes_the_same():
    """On the CPU, by Triton's interpreter, which needs a separate process."""
    pytest.importorskip("triton")  # not a part of torch for CPUs
    program = REPOSITORY / "tests" / "compute" / "interpret_kernel.py"
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
