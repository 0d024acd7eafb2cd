"""benchmarks/training: equivalence check, interleaved timing, results.

No speed is asserted. The checkout is a small model with the interface of the real one.
"""

import functools
import itertools
import json
from statistics import median

import pytest
import torch
from helpers.checkouts import NANOGPT
from helpers.models import random_ids, tiny_model
from helpers.refusals import printed_keys, refused

from benchmarks import training
from benchmarks.equivalence import (
    NotEquivalent,
    check_implementations,
)
from benchmarks.implementations import NanoGPT, Ours, Variant
from benchmarks.timing import interleave, origin, speedup
from clearhead.config import compose
from clearhead.config.schema import OptimizerConfig, ParallelConfig
from clearhead.parallel.device import build_strategy
from clearhead.tokens.windows import window_order
from data import load_datasets
from train import train_step

TINY = ["model=gpt2-nano", "batch_size=2", "length=12", "device=cpu", "precision=fp32"]
TINY += ["compile=false", "rounds=2", "steps=1"]
OPTIMIZER = OptimizerConfig.with_defaults()


@pytest.fixture
def nanogpt(tmp_path):
    """Returns nanogpt(was, now), which writes a checkout with one change of the code."""

    def make(was="class GPT(", now="class GPT("):
        assert was in NANOGPT
        folder = tmp_path / "checkouts" / "nano"
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(NANOGPT.replace(was, now))
        return folder

    return make


SMALL = ["data.tokenizer=byte", "model.vocab_size=320", "model.emb_dim=32", "model.num_heads=2"]


@pytest.fixture
def bench(in_process, tmp_path, monkeypatch):
    """Returns bench(*arguments), which returns (exit code, out, err). Its models are small."""
    monkeypatch.setattr(training, "compose", lambda given: compose([*given, *SMALL]))
    return lambda *arguments: in_process(training.main, tmp_path, *TINY, *arguments)


@pytest.fixture
def strategy():
    return build_strategy(ParallelConfig.with_defaults(strategy="single"), "cpu", "fp32", 0)


def batch(seed=0):
    ids = random_ids(T=12, seed=seed)
    return ids[:, :-1], ids[:, 1:]


def test_all_implementations_in_both_tables(bench, nanogpt, tmp_path):
    code, shown, err = bench("out=r.json", f"nanogpt={nanogpt()}")
    assert (code, err) == (0, "")
    results = json.loads((tmp_path / "r.json").read_text())
    assert results["command"].startswith("python -m benchmarks.training model=gpt2-nano ")
    assert {"commit", "processor", "torch"} <= results.keys()
    names = {"ours", "transformers", "nanogpt"}
    assert results["equivalence"].keys() == names
    losses = {each["loss"] for each in results["equivalence"].values()}
    assert max(losses) - min(losses) < 1e-4

    shipped, equalised = (results["tables"][name]["rows"] for name in ("shipped", "equalised"))
    assert {row["project"] for row in shipped} == names
    keys = ("fused_adamw", "freed_memory_kept")
    options = {row["name"]: [row[key] for key in keys] for row in equalised}
    switched_on = "nanoGPT, all switched on"
    assert options.keys() == {"ours", "transformers", "nanoGPT", switched_on}
    assert options["ours"] == options[switched_on] == [True, True]
    assert options["nanoGPT"] == [False, False]
    for row in shipped + equalised:
        assert len(row["step_seconds"]) == 2
        assert row["tokens_per_second"] == pytest.approx(24 / median(row["step_seconds"]))
        assert row["first_loss"] == pytest.approx(shipped[0]["first_loss"], rel=2e-3)
        assert f"\n  {row['name']} " in shown


FAULTS = {
    "not causal": ("is_causal=True", "is_causal=False"),
    "no second norm": ("self.mlp(self.ln_2(x))", "self.mlp(x)"),
    "a bias missing": (
        "return self.c_proj(x.transpose(1, 2).flatten(2))",
        "return F.linear(x.transpose(1, 2).flatten(2), self.c_proj.weight)",
    ),
    "targets shifted": ("targets.flatten()", "targets.roll(1, 1).flatten()"),
    "vectors decay": ('"weight_decay": 0.0', '"weight_decay": weight_decay'),
    "untied head": ("self.transformer.wte.weight = self.lm_head.weight", "pass"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_another_computation_is_refused(nanogpt, strategy, fault):
    kinds = {"ours": Ours, "nanogpt": functools.partial(NanoGPT, nanogpt(*FAULTS[fault]))}
    with refused(NotEquivalent, "implementations", "nanogpt"):
        check_implementations(kinds, tiny_model(std=None), batch(), OPTIMIZER, strategy)


def test_another_computation_is_not_timed(bench, nanogpt, monkeypatch):
    monkeypatch.setattr(training, "interleave", None)
    code, _, err = bench(f"nanogpt={nanogpt(*FAULTS['not causal'])}")
    assert (code, printed_keys(err)) == (4, ["implementations"])


def test_our_step_is_that_of_training_bit_for_bit(make_run):
    run = make_run("optimizer.schedule=constant", "trainer.warmup_steps=0", "model.dropout=0")
    config, train_set = run.config, load_datasets(run.config.data, run.evaluator.tokenizer).train
    order = window_order(train_set, config.trainer.batch_size, config.seed)
    variant = Variant("ours", "ours", torch.float32)
    ours = Ours(variant, run.model, config.optimizer, run.strategy)
    for step in range(3):
        inputs, targets = train_set.batch(order.windows(step))
        expected = train_step(run)
        assert tuple(map(float, ours.step(inputs, targets))) == tuple(map(float, expected))
    for own, trained in zip(ours.model.parameters(), run.model.parameters(), strict=True):
        assert torch.equal(own, trained)


def test_calls_are_interleaved_and_ratios_are_those_of_a_round(monkeypatch):
    """With `before`, the first call of a turn is not timed: it may compile."""
    taken, clock = [], itertools.count()
    monkeypatch.setattr("benchmarks.timing.time.perf_counter", lambda: next(clock))
    work = {name: functools.partial(taken.append, name) for name in "AB"}
    assert interleave(work, 3, torch.device("cpu"), calls=2) == {"A": [0.5] * 3, "B": [0.5] * 3}
    assert "".join(taken) == "AABB" + "BBAA" + "AABB"
    # The machine is slower in the second round; the ratios do not change.
    found = speedup([1.0, 2.0, 1.0], [2.0, 4.0, 3.0])
    assert found == {"median": 2.0, "least": 2.0, "most": 3.0}
    taken.clear()
    interleave(work, 1, torch.device("cpu"), before=lambda name: taken.append(name.lower()))
    assert "".join(taken) == "aAAbBB"


def test_results_without_git_do_not_name_a_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = origin("benchmarks.gpu", torch.device("cpu"), ())
    assert (found["commit"], found["uncommitted_changes"]) == ("", None)
