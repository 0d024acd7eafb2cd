"""benchmarks/training: equivalence check, interleaved timing, and the figures made from them.

No speed is asserted. The checkouts are small models with the interfaces of the real ones.
"""

import json

import pytest
import torch
from helpers.checkouts import LLMS, NANOGPT
from helpers.models import random_ids, tiny_model
from helpers.refusals import printed_keys, refused

from benchmarks import equivalence, interleaved, roofline, settings, training
from benchmarks.implementations import NanoGPT, Ours, Variant
from benchmarks.runner import NotEquivalent, OurRunner, pad_vocabulary
from errors import ConfigError
from model import GPT, ModelConfig
from tokens.mixture import order_of
from train import train_step
from training.distributed.build import build_strategy
from training.distributed.launch import ParallelConfig
from training.optim.optimizers import OptimizerConfig

TINY = ["model=gpt2-nano", "model.vocab_size=257", "model.context_length=16", "model.emb_dim=16"]
TINY += ["model.num_heads=2", "model.num_layers=2", "batch_size=2", "length=12", "device=cpu"]
TINY += ["precision=fp32", "compile=false", "rounds=2", "steps=2", "warmup=0", "settle=1"]
TINY += ["roofline_seconds=0.0001"]


@pytest.fixture
def nanogpt(tmp_path):
    """nanogpt(was, now) -> a checkout of it in which one piece of the code is replaced."""

    def make(was="class GPT(", now="class GPT("):
        assert was in NANOGPT
        folder = tmp_path / "checkouts" / "nano"
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(NANOGPT.replace(was, now))
        return str(folder)

    return make


@pytest.fixture
def bench(in_process, tmp_path, monkeypatch):
    """bench(*arguments) -> (exit code, out, err), with a roofline of small products."""
    monkeypatch.setattr(roofline, "SQUARES", {"cpu": (16, 32)})
    monkeypatch.setattr(roofline, "COPY_BYTES", {"cpu": 2**16})
    return lambda *arguments: in_process(training.main, tmp_path, *TINY, *arguments)


@pytest.fixture
def strategy():
    return build_strategy(ParallelConfig.with_defaults(strategy="single"), "cpu", "fp32", 0)


def batch(seed=0):
    ids = random_ids(T=12, seed=seed)
    return ids[:, :-1], ids[:, 1:]


def test_all_implementations_in_both_tables(bench, nanogpt, tmp_path):
    chapter = tmp_path / "book" / "ch04" / "01_main-chapter-code"
    chapter.mkdir(parents=True)
    (chapter / "gpt.py").write_text(LLMS)
    code, shown, err = bench("out=r.json", f"nanogpt={nanogpt()}", "llms_from_scratch=book")
    assert (code, err) == (0, "")

    results = json.loads((tmp_path / "r.json").read_text())
    assert results["command"].startswith("python -m benchmarks.training model=gpt2-nano ")
    flops = 6 * (12 * 2 * 16**2 + 257 * 16) + 6 * 2 * 16 * (12 + 1)
    assert results["flops_per_token"] == flops
    names = {"ours", "transformers", "nanogpt", "llms_from_scratch"}
    assert results["equivalence"].keys() == results["projects"].keys() == names
    losses = {each["loss"] for each in results["equivalence"].values()}
    assert max(losses) - min(losses) < 1e-4

    shipped, equalised = (results["tables"][name]["rows"] for name in ("shipped", "equalised"))
    assert {row["project"] for row in shipped} == names
    keys = ("fused_adamw", "freed_memory_kept", "vocabulary_padded")
    options = {row["name"]: [row[key] for key in keys] for row in equalised}
    there, switched_on = list(options), "nanoGPT, all switched on"
    assert there == ["ours", "transformers", "nanoGPT", switched_on, "LLMs-from-scratch"]
    assert results["tables"]["equalised"]["order"] == [there, there[::-1]]
    assert options["ours"] == [True, True, False]
    assert options["nanoGPT"] == [False, False, False]
    assert options[switched_on] == [True, True, True]
    for row in shipped + equalised:
        assert [len(each) for each in row["step_seconds"]["all"]] == [2, 2]
        assert row["tokens_per_second"] == pytest.approx(24 / row["step_seconds"]["median"])
        peak = results["roofline"]["products"][row["precision"]]["best"]
        assert row["share_of_best"] == pytest.approx(row["tokens_per_second"] * flops / peak)
        assert f"\n  {row['name']} " in shown


def test_which_rows_are_compiled(bench, nanogpt, tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or model)
    who = ("implementations=ours,nanogpt", f"nanogpt={nanogpt()}", "compile=true", "out=c.json")
    assert bench(*who, "roofline_seconds=0")[::2] == (0, "")
    tables = json.loads((tmp_path / "c.json").read_text())["tables"]
    rows = [[(r["name"], r["compiled"]) for r in tables[name]["rows"]] for name in tables]
    # nanoGPT is not compiled on a CPU, as its README says.
    assert rows[0] == [("ours", False), ("ours, compiled", True), ("nanoGPT", False)]
    assert rows[1] == [("ours", True), ("nanoGPT", True), ("nanoGPT, all switched on", True)]
    assert len(compiled) == 2 + 2 + 1 + 1  # our two blocks, twice; nanoGPT as a whole


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
    project, weights = NanoGPT(nanogpt(*FAULTS[fault])), tiny_model(std=None)
    with refused(NotEquivalent, "implementations", "nanogpt"):
        equivalence.check_implementations(
            [project], weights, batch(), OptimizerConfig.with_defaults(), strategy, 0
        )


def test_another_computation_is_not_timed(bench, nanogpt, monkeypatch):
    monkeypatch.setattr(interleaved, "measure", None)
    other = f"nanogpt={nanogpt(*FAULTS['not causal'])}"
    code, _, err = bench("implementations=ours,nanogpt", other)
    assert (code, printed_keys(err)) == (4, ["implementations"])


def test_the_first_step_of_a_row_is_checked(strategy):
    expected = equivalence.reference(tiny_model(std=None), batch(), strategy, pad=False)
    variant = Variant("ours", "ours", torch.bfloat16, compiled=True)
    loss, norm = expected
    equivalence.check_first_step(variant, loss, norm, expected)
    for wrong in ((loss * 1.01, norm), (loss, norm * 1.05), (loss, float("nan"))):
        with refused(NotEquivalent, "implementations", "ours"):
            equivalence.check_first_step(variant, *wrong, expected)


def test_padding_the_vocabulary_keeps_the_logits():
    weights = tiny_model()
    larger = pad_vocabulary(weights)
    assert larger.config.vocab_size == 64
    inputs, _ = batch()
    with torch.no_grad():
        logits, more = weights(inputs)[0], larger(inputs)[0]
    torch.testing.assert_close(more[..., :23], logits)
    assert more[..., 23:].count_nonzero() == 0


def test_our_step_is_that_of_training_bit_for_bit(make_run):
    run = make_run("optimizer.schedule=constant", "trainer.warmup_steps=0", "model.dropout=0")
    config, train_set = run.config, run.data.train
    order = order_of(train_set, config.trainer.batch_size, config.seed)
    variant = Variant("ours", "ours", torch.float32)
    ours = OurRunner(variant, Ours(), run.model, config.optimizer, run.strategy, config.seed)
    for step in range(3):
        inputs, targets = train_set.batch(order.windows(step))
        expected = train_step(run)
        assert tuple(map(float, ours.step(inputs, targets))) == tuple(map(float, expected))
    for own, trained in zip(ours.model.parameters(), run.model.parameters(), strict=True):
        assert torch.equal(own, trained)


def test_steps_are_interleaved_on_the_same_batches(strategy):
    assert interleaved.order(3, 4) == [[0, 1, 2], [2, 1, 0], [0, 1, 2], [2, 1, 0]]
    taken = []

    class Recorder(OurRunner):
        def step(self, input_ids, target_ids):
            taken.append((self.variant.name, input_ids.tolist()))
            return super().step(input_ids, target_ids)

    weights, batches = tiny_model(std=None), [batch(seed) for seed in (1, 2, 3)]
    expected = {False: equivalence.reference(weights, batches[0], strategy, pad=False)}
    rows = [Variant(name, "ours", torch.float32) for name in "AB"]

    def make(variant):
        return Recorder(variant, Ours(), weights, OptimizerConfig.with_defaults(), strategy, 0)

    kind = {"rounds": 2, "steps": 2, "warmup": 1, "settle": 1}
    interleaved.measure(rows, make, batches, expected, strategy, **kind)
    # The first step and one warm-up step of each, then rounds of three steps, the first untimed.
    assert "".join(name for name, _ in taken) == "AABB" + "AAABBB" + "BBBAAA"
    for name in "AB":
        seen = [tokens for who, tokens in taken if who == name]
        assert seen == [batches[n % 3][0].tolist() for n in range(8)]


def test_ratios_medians_and_quartiles():
    # The machine is half as fast in the second round, which no ratio shows.
    ours = [[1.0, 1.0, 9.0], [2.0, 2.0, 2.0], [1.0, 1.0, 1.0]]
    theirs = [[2.0, 2.0, 2.0], [4.0, 4.0, 4.0], [3.0, 3.0, 0.1]]
    assert interleaved.speedup(ours, theirs) == {"median": 2.0, "least": 2.0, "most": 3.0}
    found = interleaved.spread([[1.0, 2.0], [3.0, 4.0], [100.0]])
    assert found == {"median": 3.0, "lower_quartile": 2.0, "upper_quartile": 4.0}


def test_the_roofline(monkeypatch):
    """The products of a step are all its FLOPs, as GPT.flops_per_token counts them, which has one
    more key of each row on the diagonal."""
    config = ModelConfig(61, 16, 32, 4, 3, dropout=0.0)
    products = roofline.step_products(config, 2, 12)
    total = sum(times * roofline.flops(shape) for shape, times, _ in products)
    diagonal = 6 * 3 * 32
    assert total + 2 * 12 * diagonal == 2 * 12 * GPT(config).flops_per_token(12)

    monkeypatch.setattr(roofline, "SQUARES", {"cpu": (16,)})
    monkeypatch.setattr(roofline, "COPY_BYTES", {"cpu": 2**16})
    monkeypatch.setattr(roofline, "least_seconds", lambda *_: 1e-6)
    found = roofline.measure_roofline(tiny_model(), 2, 12, ["bf16"], torch.device("cpu"), 0.1)
    assert found["products"]["bf16"]["rates"]["16 x 16 x 16"] == pytest.approx(2 * 16**3 / 1e-6)
    assert found["copy"] == pytest.approx(2 * 2**16 / 1e-6)


def test_settings_that_are_refused(bench, tmp_path):
    arguments = "modle=gpt2-small model.num_heads=5 model=gpt2-smal model.dropout=0.1"
    arguments += " optimizer.schedule=wsd length=17 rounds=0 table=all precision=fp16"
    arguments += " nanogpt=nowhere llms_from_scratch=. implementations=nanogtp"
    arguments += " implementations=nanogpt out=no/such/file.json"
    for argument in arguments.split():
        key, _, value = argument.partition("=")
        with refused(ConfigError, key, value):
            settings.composed([*TINY, argument])
    code, out, err = bench("rounds=0")
    assert (code, out, printed_keys(err)) == (2, "", ["rounds"])
    for text in ("class GPT: pass", "import no_such"):
        (tmp_path / "model.py").write_text(text)
        with refused(ConfigError, "nanogpt", tmp_path):
            NanoGPT(str(tmp_path))
