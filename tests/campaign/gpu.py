"""Checks on a CUDA GPU that no test on a CPU can make; `make gpu-check` runs those of gradients.
Without a GPU, they are skipped.

    CHECK_DEVICE=cuda python -m pytest tests/campaign/gpu.py
    CHECK_DEVICE=cpu python -m pytest tests/campaign/gpu.py    # checks this file without a GPU
"""

import os

import pytest
import torch
import torch.nn.functional as F
from helpers import REPOSITORY
from helpers.models import PROMPTS, generated_ids, random_ids, tiny_model
from helpers.ranks import COMPARABLE, check_same_losses, check_same_tensors, last, write_texts
from helpers.runs import assert_same, weights

from attention import KERNELS
from clearhead.compute import cross_entropy
from clearhead.compute.optimizers import build_optimizer
from clearhead.compute.specialize import specialize_for_generation
from clearhead.config.schema import OptimizerConfig
from clearhead.models.decoding import KVCache
from clearhead.parallel import device
from model import head_loss as plain_loss
from train import train_step

DEVICE = os.environ.get("CHECK_DEVICE", "cuda")  # without it, conftest.py hides all GPUs
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cuda" and not torch.cuda.is_available(), reason="this machine has no CUDA GPU"
    ),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]
# Largest norm of an error, relative to the norm of the result in fp64. The unit roundoffs are
# 6e-8, 5e-4 and 4e-3; sums over hundreds of terms are in fp32.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
# On a CPU, the compiler of torch 2.13 fails for flex.
BACKEND = "inductor" if DEVICE == "cuda" else "aot_eager"
each_dtype = pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda dtype: str(dtype)[6:])
eager_and_compiled = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


@pytest.fixture(autouse=True)
def no_compiled_code():
    torch.compiler.reset()


@pytest.fixture
def run_on_device(make_run, monkeypatch):
    """run_on_device(*overrides) -> a Run of the tiny model on the device."""
    if DEVICE == "cpu":  # training in fp16 is refused on a CPU, but works
        monkeypatch.setattr(device, "check", lambda *_: [])
    return lambda *more: make_run(f"trainer.device={DEVICE}", "model.dropout=0", *more)


@pytest.fixture
def run_program(command):
    """run_program(program, *arguments), which fails if the exit code is not 0."""

    def run(program, *arguments):
        done = command(program, *map(str, arguments), **os.environ)
        assert done.returncode == 0, done.stdout + done.stderr

    return run


def check_close(found, expected, tolerance):
    for ours, right in zip(found, expected, strict=True):
        assert ours.device.type == DEVICE
        error = (ours.detach().cpu().double() - right.detach()).norm() / right.norm()
        assert error < tolerance, float(error)


def random_tensors(*shapes):
    """Random tensors in fp64 on the CPU."""
    random = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=random, dtype=torch.double) for shape in shapes]


# ------------------------------------------------------------------------------------- kernels


@eager_and_compiled
@each_dtype
def test_loss_and_gradients_equal_those_in_fp64(dtype, compiled, monkeypatch):
    """Several chunks; a quarter of the targets is ignored."""
    N, C, V = 300, 64, 1000
    monkeypatch.setattr(cross_entropy, "LOGITS_AT_ONCE", 128 * V)
    exact = [tensor.requires_grad_() for tensor in random_tensors((N, C), (V, C))]
    targets = torch.randint(V, (N,), generator=torch.Generator().manual_seed(1))
    targets[::4] = -100
    logits = exact[0] @ exact[1].t()
    expected = F.cross_entropy(logits, targets, ignore_index=-100)
    ours = [x.detach().to(DEVICE, torch.float32).requires_grad_() for x in exact]
    head_loss = cross_entropy.head_loss
    if compiled:
        head_loss = torch.compile(head_loss, backend=BACKEND, dynamic=False)
    with torch.autocast(DEVICE, dtype=dtype, enabled=dtype != torch.float32):
        loss = head_loss(*ours, targets.to(DEVICE))
    assert loss.dtype == torch.float32
    found = (loss, *torch.autograd.grad(loss, ours))
    check_close(found, (expected, *torch.autograd.grad(expected, exact)), TOLERANCES[dtype])
    with torch.no_grad():
        plain = plain_loss(*ours, targets.to(DEVICE))
    check_close([plain], [expected], TOLERANCES[torch.float32])


@eager_and_compiled
@each_dtype
@pytest.mark.parametrize("name", KERNELS)
def test_attention_equals_that_in_fp64(name, dtype, compiled):
    """With all queries and their gradients, and with the last three queries."""
    kernel = KERNELS[name]
    if compiled:  # training has fixed shapes
        kernel = torch.compile(kernel, backend=BACKEND, dynamic=False)
    B, H, T, S, D = 2, 3, 3, 256, 64
    queries, keys, values, grad = exact = random_tensors(*[(B, H, S, D)] * 4)
    ours = [x.to(DEVICE, dtype) for x in exact]
    with torch.no_grad():
        mask = torch.ones(T, S, dtype=torch.bool).tril(S - T)
        last_queries = F.scaled_dot_product_attention(
            queries[:, :, -T:], keys, values, attn_mask=mask
        )
        found = kernel(ours[0][:, :, -T:], *ours[1:3])
        assert found.dtype == dtype
        check_close([found], [last_queries], TOLERANCES[dtype])
    for tensors in (exact, ours):
        for tensor in tensors[:3]:
            tensor.requires_grad_()
    expected = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    found = kernel(*ours[:3])
    check_close([found], [expected], TOLERANCES[dtype])
    expected_grads = torch.autograd.grad(expected, exact[:3], grad)
    check_close(torch.autograd.grad(found, ours[:3], ours[3]), expected_grads, TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [64, 704, 1024])
def test_gradients_of_the_chosen_attention_equal_those_in_fp64(length, dtype):
    """Of the backend that torch chooses, with scores of about -120: with a mask, cuDNN's gradients
    of 64 and 704 tokens are NaN then (PyTorch issue 196678)."""
    exact = random_tensors(*[(2, 3, length, 64)] * 4)
    exact[0][..., 0], exact[1][..., 0] = 1, -960  # divided by 8, the root of the head's width
    ours = [x.to(DEVICE, dtype).requires_grad_() for x in exact]
    found = KERNELS["sdpa"](*ours[:3])
    grads = torch.autograd.grad(found, ours[:3], ours[3].detach())
    exact = [x.detach().cpu().double().requires_grad_() for x in ours]  # rounded in the same way
    expected = F.scaled_dot_product_attention(*exact[:3], is_causal=True)
    expected_grads = torch.autograd.grad(expected, exact[:3], exact[3].detach())
    check_close([found], [expected], TOLERANCES[dtype])
    assert all(grad.isfinite().all() for grad in grads)
    # Not of the first channel: the sum that is its gradient cancels, and its terms are large.
    rest = [[grad[..., 1:] for grad in each] for each in (grads, expected_grads)]
    check_close(*rest, TOLERANCES[dtype])


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_fused_optimizers_equal_those_in_fp64(name):
    """Five steps; gradients are divided in the kernel, and the fourth step is skipped."""
    config = OptimizerConfig.with_defaults(name=name, lr=0.01)
    models = [tiny_model().double(), tiny_model().to(DEVICE)]
    dtypes = (torch.double, torch.float32)
    optimizers = [build_optimizer(m, config, d) for m, d in zip(models, dtypes, strict=True)]
    before = [p.clone() for p in models[0].parameters()]
    assert all(optimizer.defaults["fused"] for optimizer in optimizers)
    shapes = [tuple(parameter.shape) for parameter in models[0].parameters()]
    random = iter(random_tensors(*shapes * 5))
    for step in range(5):
        grads = [next(random) for _ in shapes]
        for model, optimizer in zip(models, optimizers, strict=True):
            like = next(model.parameters())
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter.grad = grad.to(parameter) * (float("nan") if step == 3 else 1)
            optimizer.grad_scale = torch.full((), 1.0 + step, device=like.device)
            optimizer.found_inf = torch.full((), float(step == 3), device=like.device)
            optimizer.step()
    exact, ours = ([p.detach() for p in model.parameters()] for model in models)
    assert not any(torch.equal(p, first) for p, first in zip(exact, before, strict=True))
    check_close(ours, exact, TOLERANCES[torch.float32])


# ------------------------------------------------------------------------------------ training


def test_an_overflow_in_fp16_skips_the_step_and_lowers_the_scale(run_on_device):
    run = run_on_device("trainer.precision=fp16")
    train_step(run)
    scaler, before = run.strategy.scaler, weights(run)
    skipped, scale = run.metrics.nonfinite.read()[0], 2.0**100
    scaler.load_state_dict(scaler.state_dict() | {"scale": scale})
    train_step(run)
    assert_same(weights(run), before)
    assert run.metrics.nonfinite.read()[0] == skipped + 1
    assert scaler.get_scale() == scale / 2
    scaler.load_state_dict(scaler.state_dict() | {"scale": 1.0})
    train_step(run)
    assert run.metrics.nonfinite.read()[0] == skipped + 1
    assert not torch.equal(weights(run)["pos_emb.weight"], before["pos_emb.weight"])


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 5e-3)])
def test_compiled_steps_equal_eager_steps(run_on_device, precision, tolerance):
    """Loss and gradient norm of four steps."""
    steps = []
    for compiled in ("false", "true"):
        run = run_on_device(f"trainer.precision={precision}", f"trainer.compile={compiled}")
        steps.append([torch.stack(train_step(run)).tolist() for _ in range(4)])
    eager, compiled = map(torch.tensor, steps)
    torch.testing.assert_close(compiled, eager, rtol=tolerance, atol=0)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_rank_trains_as_a_single_process(run_program, tmp_path, strategy):
    """With NCCL; with micro-batches, clipping, validation, attention snapshots, checkpoints."""
    write_texts(tmp_path)
    settings = [*COMPARABLE, f"trainer.device={DEVICE}", "lens=often", "lens.every=4"]
    run_program("train.py", *settings, "name=single")
    torchrun = ("torch.distributed.run", "--standalone", "--nproc_per_node=1")
    parallel = (f"parallel={strategy}", f"name={strategy}")
    run_program(*torchrun, REPOSITORY / "train.py", *settings, *parallel)
    single, other = (tmp_path / "runs" / name for name in ("single", strategy))
    check_same_losses(other, single)
    check_same_tensors(last(other), last(single))
    assert (other / "run.html").is_file()


# ------------------------------------------------------------------------------------ decoding


def decoding_model(dtype, compiler):
    """A model with a context of 12 tokens, as generate.py prepares it, and its cache."""
    model = tiny_model().to(DEVICE).requires_grad_(False)
    specialize_for_generation(model, dtype, len(PROMPTS), to_compile=compiler is not None)
    return model, KVCache(12, compiler)


def test_compiled_decoding_generates_the_tokens_of_eager_decoding():
    """In fp32. On a GPU every decoding step is a CUDA graph."""
    compiler = device.compiled_step(True, torch.device(DEVICE), 1)
    expected = generated_ids(tiny_model(), PROMPTS, 40)
    for chosen in (None, compiler):
        model, cache = decoding_model(torch.float32, chosen)
        assert generated_ids(model, PROMPTS, 40, cache=cache) == expected
        assert generated_ids(model, PROMPTS, 40, cache=cache) == expected  # replays the graphs
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


def test_compiled_decoding_in_bf16_has_the_logits_of_fp32():
    """The tokens may differ where two logits are nearly equal."""
    compiler = device.compiled_step(True, torch.device(DEVICE), 1)
    logits = {}
    for dtype, chosen in ((torch.float32, None), (torch.bfloat16, compiler)):
        model, cache = decoding_model(dtype, chosen)
        tokens = random_ids(B=len(PROMPTS), T=8).to(DEVICE)
        with torch.no_grad():
            cache.read_prompts(model, [prompt[:3] for prompt in PROMPTS])
            steps = [cache.read_token(model, column[:, None]).clone() for column in tokens.t()]
        logits[dtype] = torch.stack(steps)
    expected = logits[torch.float32].double().cpu()
    check_close([logits[torch.bfloat16]], [expected], TOLERANCES[torch.bfloat16])
