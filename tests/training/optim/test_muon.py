"""Muon: its rule, what it is for, left out, clipped, saved, shared out among ranks.

Trainings by several ranks with it: test_ranks.py.
"""

import json
import math
import os

import pytest
import torch
from helpers.ranks import ended, free_port, started
from helpers.runs import assert_same, rows, stop_behind, weights
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

from errors import ConfigError
from model import GPT, ModelConfig
from scripts import plan
from training import checkpoint, memory, muon, speed
from training.command import compose
from training.fitting import matrices_of
from training.guard import Guard
from training.muon import newton_schulz
from training.optim import OptimizerConfig, build_optimizer
from training.parallel import Parallel

CPU = torch.device("cpu")
SHAPE = ModelConfig(61, context_length=16, emb_dim=16, num_heads=2, num_layers=2, dropout=0.0)
MUON = ("optimizer=muon", "optimizer.lr=1e-3")


def tiny() -> GPT:
    torch.manual_seed(0)
    return GPT(SHAPE)


def built(model: torch.nn.Module, dtype: torch.dtype = torch.float32, **settings) -> muon.Muon:
    """Muon in fp32, whatever this machine multiplies fast in."""
    optimizer = build_optimizer(model, OptimizerConfig(name="muon", **settings))
    optimizer.dtype = dtype
    return optimizer


def give_gradients(model: torch.nn.Module, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = scale * torch.randn(p.shape, generator=generator)


def everything(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Parameters and state."""
    found = {}
    for name, p in model.named_parameters():
        kept = {key: value.clone() for key, value in optimizer.state[p].items()}
        found |= {name: p.detach().clone()} | {f"{key}.{name}": v for key, v in kept.items()}
    return found


# -------------------------------------------------------------------------------------- the rule


def orthogonalized(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """The iteration as it is published, on one matrix in double precision."""
    x = matrix.double()
    x = x.T if x.shape[0] > x.shape[1] else x
    x = x / x.norm()
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_are_muon_by_the_formula(nesterov):
    """Jordan's rule with Liu's scale, arXiv:2502.16982 equation 4, and the EMA of torch's."""
    model = tiny()
    optimizer = built(
        model, lr=1e-3, matrix_lr=0.02, weight_decay=0.3, momentum=0.9, nesterov=nesterov
    )
    named = dict(model.named_parameters())
    mine = {name: p for name, p in named.items() if any(p is m for m in matrices_of(model))}
    expected = {name: p.detach().double() for name, p in mine.items()}
    average = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in mine.items()}
    for seed in range(3):
        give_gradients(model, seed)
        for name, p in mine.items():
            g = p.grad.double()
            average[name] = 0.9 * average[name] + 0.1 * g
            update = 0.9 * average[name] + 0.1 * g if nesterov else average[name]
            expected[name] *= 1 - 0.02 * 0.3
            rate = 0.02 * 0.2 * math.sqrt(max(p.shape))
            expected[name] -= rate * orthogonalized(update, 5)
        optimizer.step()
    for name, p in mine.items():
        torch.testing.assert_close(p.detach().double(), expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="older than torch 2.9")
def test_steps_are_those_of_torchs_own():
    model, other = tiny(), tiny()
    optimizer = built(model, torch.bfloat16, lr=1e-2, weight_decay=0.1)
    mine, theirs = matrices_of(model), matrices_of(other)
    oracle = torch.optim.Muon(
        theirs, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw", ns_steps=5
    )
    for seed in range(3):
        give_gradients(model, seed)
        give_gradients(other, seed)
        optimizer.step()
        oracle.step()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-4)  # of steps of 2e-3: bf16's rounding
        kept = [o.state[p]["momentum_buffer"] for o, p in ((optimizer, a), (oracle, b))]
        torch.testing.assert_close(*kept)


@pytest.mark.parametrize("shape", [(3, 6, 6), (2, 5, 20), (2, 20, 5)])
def test_all_directions_become_alike(shape):
    torch.manual_seed(1)
    given = torch.randn(shape) * torch.tensor([1e-3, 1.0, 1e3])[: shape[0], None, None]
    u, _, v = torch.linalg.svd(given, full_matrices=False)
    spread = torch.linspace(0.01, 1, min(shape[1:]))
    done = newton_schulz(u * spread @ v, 5)
    assert all(0.6 < float(s) < 1.21 for s in torch.linalg.svdvals(done).flatten())
    torch.testing.assert_close(newton_schulz(given, 5)[1], newton_schulz(given[1:2], 5)[0])
    assert torch.equal(newton_schulz(torch.zeros(shape), 5), torch.zeros(shape))


def test_updates_are_as_large_as_adamws():
    """What lets one learning rate serve both: the root mean square of a step is about 0.2 lr."""
    torch.manual_seed(0)
    layers = torch.nn.Module()
    layers.blocks = torch.nn.ModuleList([torch.nn.Linear(64, 64), torch.nn.Linear(64, 256)])
    before = [p.detach().clone() for p in matrices_of(layers)]
    give_gradients(layers, 0)
    built(layers, lr=1e-2, weight_decay=0).step()
    for p, old in zip(matrices_of(layers), before, strict=True):
        assert 0.1e-2 < float((p.detach() - old).square().mean().sqrt()) < 0.3e-2


def test_matrices_together_or_one_by_one(monkeypatch):
    def stepped(numbers):
        monkeypatch.setattr(muon, "TOGETHER", numbers)
        model = tiny()
        optimizer = built(model)
        give_gradients(model, 0)
        optimizer.step()
        return everything(model, optimizer)

    one, all_of_them = stepped(1), stepped(10**9)
    for name, value in one.items():
        torch.testing.assert_close(value, all_of_them[name])


# ------------------------------------------------------------------------------ who has which


def test_every_parameter_has_one_optimizer():
    model = tiny()
    optimizer = built(model, lr=1e-3, matrix_lr=2e-3, weight_decay=0.3)
    name_of = {p: name for name, p in model.named_parameters()}
    looked_up, vectors, matrices = (
        [name_of[p] for p in group["params"]] for group in optimizer.param_groups
    )
    assert sorted(looked_up + vectors + matrices) == sorted(name_of.values())
    assert looked_up == ["token_emb.weight", "pos_emb.weight"]
    kinds = ("W_query", "W_key", "W_value", "out_proj")
    of_block = [f"attn.{kind}.weight" for kind in kinds] + ["mlp.fc.weight", "mlp.out_proj.weight"]
    assert sorted(matrices) == sorted(f"blocks.{n}.{name}" for n in range(2) for name in of_block)
    assert all(name.endswith(("bias", "norm.weight")) for name in vectors)
    found = [(g["weight_decay"], g["lr"], g["peak_lr"]) for g in optimizer.param_groups]
    assert found == [(0.3, 1e-3, 1e-3), (0, 1e-3, 1e-3), (0.3, 2e-3, 2e-3)]
    give_gradients(model, 0)
    optimizer.step()
    for p, name in name_of.items():
        kept = {"momentum_buffer"} if name in matrices else {"step", "exp_avg", "exp_avg_sq"}
        assert optimizer.state[p].keys() == kept


def test_what_is_2d_elsewhere_or_has_more_dimensions_is_adamws():
    model = tiny()
    model.head = torch.nn.Linear(16, 61)
    model.blocks[0].table = torch.nn.Parameter(torch.zeros(2, 3, 4))
    model.blocks[1].frozen = torch.nn.Parameter(torch.zeros(3, 3), requires_grad=False)
    first, _, matrices = built(model).param_groups
    for parameter in (model.head.weight, model.blocks[0].table):
        assert any(parameter is p for p in first["params"])
    assert len(matrices["params"]) == 12
    with pytest.raises(ValueError, match=r"Muon takes matrices, not shape \(3,\)"):
        muon.Muon([], {"params": [torch.nn.Parameter(torch.zeros(3))]}, torch.float32)


def test_both_rates_follow_one_schedule(trainer):
    settings = ("optimizer=muon", "optimizer.lr=0.01", "optimizer.matrix_lr=0.04")
    run = trainer(*settings, "trainer.warmup_steps=2", "trainer.max_steps=4")
    used = []
    for _ in range(4):
        run.step()
        used.append([group["lr"] for group in run.optimizer.param_groups])
    assert used == [pytest.approx([r, r, 4 * r]) for r in (0.005, 0.01, 0.01, 0.001)]
    alike = trainer("optimizer=muon", "optimizer.lr=0.02")
    assert {group["peak_lr"] for group in alike.optimizer.param_groups} == {0.02}


# --------------------------------------------------------------------- clipped and left out


def test_gradients_are_divided_for_both_halves():
    model, other = tiny(), tiny()
    divided, plain = built(model), built(other)
    for seed in range(2):
        give_gradients(model, seed, scale=8.0)
        divided.grad_scale, divided.found_inf = torch.tensor(8.0), torch.tensor(0.0)
        divided.step()
        give_gradients(other, seed)
        plain.step()
    mine, theirs = everything(model, divided), everything(other, plain)
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value)


@pytest.mark.parametrize("spoilt", [math.nan, math.inf])
def test_a_step_that_is_left_out_changes_no_bit_of_either_half(spoilt):
    model, other = tiny(), tiny()
    optimizer, untroubled = built(model), built(other)
    for seed, found in ((0, 0.0), (1, 1.0), (2, 0.0)):
        give_gradients(model, seed, spoilt if found else 1.0)
        before = everything(model, optimizer)
        optimizer.grad_scale = torch.tensor(spoilt if found else 1.0)
        optimizer.found_inf = torch.tensor(found)
        optimizer.step()
        after = everything(model, optimizer)
        if found:
            assert_same(after, before)
        else:
            give_gradients(other, seed)
            untroubled.step()
    assert_same(after, everything(other, untroubled))


def test_a_first_step_that_is_left_out_leaves_no_momentum():
    model = tiny()
    optimizer = built(model)
    before = weights_of(model)
    give_gradients(model, 0, math.nan)
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert_same(weights_of(model), before)
    for p in matrices_of(model):
        assert not optimizer.state[p]["momentum_buffer"].any()


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("fused", [True, False])
def test_the_loops_own_update_clips_and_leaves_out(fused):
    """Not fused: as on Apple's GPUs, where the host looks."""
    parallel, guard = Parallel(CPU, torch.float32), Guard(9, CPU)
    model = tiny()
    optimizer = built(model)
    optimizer.defaults["fused"] = fused
    for group in optimizer.param_groups:
        group["fused"] = fused
    expected = tiny()
    by_hand = built(expected)
    for seed, scale in ((0, 100.0), (1, math.nan), (2, 1e-4)):
        give_gradients(model, seed, scale)
        norm = parallel.update(model, optimizer, 0.5, guard)
        if math.isfinite(scale):
            give_gradients(expected, seed, scale * min(1.0, 0.5 / float(norm)))
            by_hand.step()
    mine, theirs = everything(model, optimizer), everything(expected, by_hand)
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-4, atol=1e-6)
    assert all(p.grad is None for p in model.parameters())


# ------------------------------------------------------------------------------------ in a run


def test_a_resumed_run_equals_an_uninterrupted_one(trainer):
    """Bit for bit, dropout, a step that is left out and all."""
    settings = (*MUON, "model.dropout=0.2", "trainer.max_steps=6", "optimizer.matrix_lr=2e-3")
    whole = trainer("name=whole", *settings)
    whole.train()
    half = trainer("name=half", *settings, "trainer.save_every=3")
    stop_behind(half, 3)
    rest = trainer("name=half", *settings, "trainer.save_every=3")
    assert rest.state.step == 3
    rest.train()
    assert_same(weights(rest), weights(whole))
    ends = [run.folder / "checkpoints" / "last" for run in (rest, whole)]
    for file in (checkpoint.MODEL, checkpoint.OPTIMIZER):
        assert (ends[0] / file).read_bytes() == (ends[1] / file).read_bytes()
    assert rows(whole.folder)[-1]["train/loss"] < rows(whole.folder)[1]["train/loss"]
    saved = load_file(ends[0] / checkpoint.OPTIMIZER)
    keys = {name.partition(".")[0] for name in saved if ".W_query.weight" in name}
    assert keys == {"momentum_buffer"}
    assert {f"{key}.token_emb.weight" for key in ("step", "exp_avg", "exp_avg_sq")} <= saved.keys()
    assert not any(name.startswith("momentum_buffer.token_emb") for name in saved)


@pytest.mark.parametrize("older", [False, True], ids=["", "a checkpoint that names none"])
def test_another_optimizer_is_another_run_unless_asked_for(trainer, older):
    run = trainer("name=a")
    run.train()
    if older:
        for folder in checkpoint.whole_ones(run.folder):
            state = json.loads((folder / "state.json").read_text())
            for key in ("name", "matrix_lr", "momentum", "nesterov", "ns_steps"):
                del state["settings"]["optimizer"][key]
            state["format"] = 2
            (folder / "state.json").write_text(json.dumps(state))
            (folder / checkpoint.SUMS).unlink()
    more = ("name=a", "trainer.max_steps=6")
    with pytest.raises(ConfigError, match=r"optimizer\.name=muon: runs/a was trained with adamw; "):
        trainer(*more, "optimizer=muon")
    again = trainer(*more, "optimizer=muon", "trainer.resume_override=true")
    state = again.optimizer.state
    assert not any(state[p] for p in matrices_of(again.model))
    assert float(state[again.model.token_emb.weight]["step"]) == 4
    again.train()
    assert again.state.step == 6
    with pytest.raises(ConfigError, match=r"optimizer\.name=adamw: runs/a was trained with muon; "):
        trainer(*more[:1], "trainer.max_steps=8")


def test_what_no_optimizer_keeps_is_refused(trainer):
    run = trainer("name=a", *MUON)
    run.train()
    folder = run.folder / "checkpoints" / "last"
    tensors = load_file(folder / checkpoint.OPTIMIZER)
    name = "blocks.0.mlp.fc.weight"
    tensors[f"exp_avg.{name}"] = tensors[f"momentum_buffer.{name}"].clone()
    checkpoint.save_file(tensors, folder / checkpoint.OPTIMIZER)
    says = r"optimizer\.safetensors: of blocks\.0\.mlp\.fc\.weight it has exp_avg, momentum_buffer"
    with pytest.raises(checkpoint.CheckpointError, match=says):
        checkpoint.load_optimizer(folder, run.model, run.optimizer, run.parallel)


# ------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("optimizer=moun", "optimizer=moun: no such optimizer; use one of adamw, muon"),
        ("optimizer.name=sgd", "optimizer.name=sgd: no such optimizer; use one of adamw, muon"),
        ("optimizer.matrix_lr=0", "optimizer.matrix_lr=0.0: must be a positive number; use 1e-3"),
        ("optimizer.momentum=1", "optimizer.momentum=1.0: is a number from 0 to below 1; use 0.95"),
        ("optimizer.ns_steps=0", "optimizer.ns_steps=0: must be from 1 to 20; use 5"),
        ("optimizer.ns_steps=21", "optimizer.ns_steps=21: must be from 1 to 20; use 5"),
        ("optimizer.nesterov=5", "optimizer.nesterov=5: must be true or false; such as true"),
    ],
)
def test_mistakes_are_named(typed, says):
    with pytest.raises(ConfigError) as caught:
        compose([typed])
    assert str(caught.value).startswith(says)


def test_settings_reach_the_optimizer():
    config = compose(
        ["optimizer=muon", "optimizer.momentum=0.8", "optimizer.ns_steps=3", "experiment=laptop"]
    ).optimizer
    assert (config.name, config.lr, config.matrix_lr) == ("muon", 2e-3, None)
    group = built(tiny(), momentum=config.momentum, ns_steps=config.ns_steps).param_groups[-1]
    assert (group["momentum"], group["ns_steps"], group["nesterov"]) == (0.8, 3, True)


# ------------------------------------------------------------------------- memory and speed


def test_memory_of_its_state_is_what_is_estimated():
    model = tiny()
    optimizer = built(model)
    give_gradients(model, 0)
    optimizer.step()
    kept = [v for p in model.parameters() for key, v in optimizer.state[p].items() if key != "step"]
    estimated = memory.estimate(SHAPE, 1, 16, optimizer="muon", device="cpu")
    assert estimated.optimizer == sum(value.numel() * value.element_size() for value in kept)
    shared = memory.estimate(
        SHAPE, 1, 16, optimizer="muon", device="cpu", strategy="fsdp", world_size=4
    )
    assert shared.optimizer == estimated.optimizer / 4


def test_the_plan_counts_its_products():
    """As many as are made, on every device with DDP, a share of them with FSDP."""
    settings = ("model=gpt2-nano", "trainer.batch_size=8")
    job = plan.job_of(*plan.composed([*settings, "optimizer=muon"]))
    c = job.model.emb_dim
    with FlopCounterMode(display=False) as counter:
        for shape in [(4, c, c), (1, 4 * c, c), (1, c, 4 * c)]:
            newton_schulz(torch.ones(shape), 5)
    assert speed.muon_flops(job) == job.model.num_layers * counter.get_total_flops()
    seconds = {}
    for name in ("adamw", "muon"):
        for way in ("ddp", "fsdp"):
            more = [f"optimizer={name}", f"parallel={way}", "devices=8"]
            job = plan.job_of(*plan.composed([*settings, *more]))
            seconds[name, way] = plan.speed(job, 0.4).optimizer
    products = speed.muon_flops(job) / (job.kind.flops * 0.4)
    assert seconds["muon", "ddp"] - seconds["adamw", "ddp"] == pytest.approx(products)
    assert seconds["muon", "fsdp"] - seconds["adamw", "fsdp"] == pytest.approx(products / 8)


# ---------------------------------------------------------------------------- among ranks

RANKS = 3
ODD = [(8, 8)] * 4 + [(10, 4)] * 2 + [(4, 10)] * 2 + [(2, 9), (9, 3)]


def odd_matrices() -> torch.nn.Module:
    torch.manual_seed(0)
    module = torch.nn.Module()
    module.blocks = torch.nn.ParameterList(torch.randn(shape) for shape in ODD)
    return module


def as_a_rank(rank: int, port: int) -> None:
    """Three steps with matrices in shares that divide neither rows nor numbers evenly, and one
    that is left out, against whole ones."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))

    def share(tensor):
        return distribute_tensor(tensor.detach(), mesh, [Shard(0)])

    whole, shared = odd_matrices(), odd_matrices()
    shared.blocks = torch.nn.ParameterList(torch.nn.Parameter(share(p)) for p in whole.blocks)
    groups = [{"params": list(m.blocks), "lr": 0.1, "weight_decay": 0.1} for m in (whole, shared)]
    more = {"momentum": 0.9, "nesterov": True, "ns_steps": 5}
    optimizers = [muon.Muon([], group | more, torch.float32) for group in groups]
    for seed in range(4):
        give_gradients(whole, seed)
        for p, q in zip(whole.blocks, shared.blocks, strict=True):
            q.grad = share(p.grad)
        for optimizer in optimizers:
            optimizer.found_inf = torch.tensor(float(seed == 2))
            optimizer.grad_scale = torch.tensor(2.0)
            optimizer.step()
    for p, q in zip(whole.blocks, shared.blocks, strict=True):
        torch.testing.assert_close(q.detach().full_tensor(), p.detach(), rtol=1e-4, atol=1e-5)
        kept = optimizers[1].state[q]["momentum_buffer"]
        assert kept.to_local().shape == q.to_local().shape
        torch.testing.assert_close(
            kept.full_tensor(), optimizers[0].state[p]["momentum_buffer"], rtol=1e-5, atol=1e-6
        )
    print("alike", flush=True)
    dist.barrier()
    # Not through Python's end: there torch at times aborts with "terminate called without an active
    # exception", when all is done.
    os._exit(0)


def test_matrices_in_shares_are_updated_as_whole_ones(tmp_path):
    port = free_port()
    with started(tmp_path) as start:
        ranks = [
            start("-c", f"import test_muon; test_muon.as_a_rank({rank}, {port})")
            for rank in range(RANKS)
        ]
        assert [ended(process) for process in ranks] == [0] * RANKS, ranks[0].log.read_text()
    assert all(process.log.read_text().endswith("alike\n") for process in ranks)
