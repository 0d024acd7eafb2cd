"""scripts/benchmark.py: that all contenders compute the same, take turns and are counted right.

No speed is asserted; needs no network. The checkouts
are made of known_checkouts.py: small models with the interfaces of the real ones.
"""

import dataclasses
import json
import platform
import subprocess
import sys
from statistics import median
from types import SimpleNamespace

import pytest
import torch
from helpers import REPOSITORY
from helpers.checkouts import LLMS, NANOGPT
from helpers.refusals import check_refusal

from model import GPT, ModelConfig
from scripts import agreement, benchmark, ceilings, contenders, turns
from scripts.contenders import Disagreement, OurContender, Ours, Row
from training.optim import OptimizerConfig
from training.parallel import ParallelConfig, start

TINY = (
    "model=gpt2-nano",
    "model.vocab_size=257",
    "model.context_length=16",
    "model.emb_dim=16",
    "model.num_heads=2",
    "model.num_layers=2",
    "batch_size=2",
    "length=12",
    "device=cpu",
    "precision=fp32",
    "compile=false",
    "rounds=2",
    "steps=2",
    "warmup=0",
    "settle=1",
    "ceiling_seconds=0.0001",
)


@pytest.fixture
def nanogpt(tmp_path):
    """nanogpt(was, now) -> a checkout in which one piece of the code reads otherwise."""

    def make(was="", now=""):
        assert was in NANOGPT
        folder = tmp_path / "checkouts" / "nano"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.py").write_text(NANOGPT.replace(was, now) if was else NANOGPT)
        return folder

    return make


@pytest.fixture
def llms(tmp_path):
    folder = tmp_path / "checkouts" / "book"
    chapter = folder / "ch04" / "01_main-chapter-code"
    chapter.mkdir(parents=True)
    (chapter / "gpt.py").write_text(LLMS)
    return folder


@pytest.fixture
def bench(in_process, tmp_path, monkeypatch):
    """bench(*arguments) -> (exit code, out, err), with small products for ceilings."""
    monkeypatch.setattr(ceilings, "SQUARES", {"cpu": (16, 32)})
    monkeypatch.setattr(ceilings, "COPIED", {"cpu": 2**16})

    def run(*arguments):
        return in_process(benchmark.main, tmp_path, *TINY, *arguments)

    return run


@pytest.fixture
def parallel():
    return start(ParallelConfig(strategy="single"), "cpu", "fp32", 0)


def tiny(**changes) -> GPT:
    torch.manual_seed(1)
    return GPT(ModelConfig(61, 16, 16, 2, 2, dropout=0.0, **changes))


def batch(seed=0):
    ids = torch.randint(61, (2, 13), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


# -------------------------------------------------------------------------------- all of it


def test_everybody_in_both_tables(bench, nanogpt, llms, tmp_path):
    out = ("out=result.json", f"nanogpt={nanogpt()}", f"llms_from_scratch={llms}")
    code, shown, err = bench(*out)
    assert (code, err) == (0, "")
    assert max(map(len, shown.splitlines())) <= 100
    assert "number of parameters" not in shown  # what contenders print is theirs

    text = (tmp_path / "result.json").read_text()
    assert str(tmp_path) not in text
    results = json.loads(text)
    assert results["command"].startswith("python -m scripts.benchmark model=gpt2-nano ")
    assert results["command"].endswith("nanogpt=nano llms_from_scratch=book")
    assert results["torch"] == torch.__version__
    assert {"commit", "uncommitted_changes", "processor", "cores", "threads"} <= results.keys()
    assert results["flops_per_token"] == tiny_flops(12)

    names = {"ours", "transformers", "nanogpt", "llms_from_scratch"}
    assert results["agreement"].keys() == results["projects"].keys() == names
    assert results["agreement"]["nanogpt"]["own_gelu"] == "erf"
    assert results["agreement"]["llms_from_scratch"]["own_gelu"] is None
    first = {each["loss"] for each in results["agreement"].values()}
    assert max(first) - min(first) < 1e-4

    shipped, equalised = (results["tables"][name]["rows"] for name in ("shipped", "equalised"))
    assert {row["project"] for row in shipped} == names
    assert [row["name"] for row in equalised] == [
        *("ours", "transformers", "nanoGPT", "nanoGPT, all switched on", "LLMs-from-scratch"),
    ]
    assert {row["precision"] for row in equalised} == {"fp32"}
    by_name = {row["name"]: row for row in equalised}
    assert by_name["ours"]["fused_adamw"]
    assert by_name["ours"]["freed_memory_kept"]
    assert not by_name["nanoGPT"]["fused_adamw"]
    more = by_name["nanoGPT, all switched on"]
    assert more["fused_adamw"]
    assert more["freed_memory_kept"]
    assert more["vocabulary_padded"]
    for rows in (shipped, equalised):
        for row in rows:
            steps = row["step_seconds"]
            assert [len(turn) for turn in steps["all"]] == [2, 2]
            assert row["tokens_per_second"] == pytest.approx(24 / steps["median"])
            peak = results["ceilings"]["products"][row["precision"]]["best"]
            share = row["tokens_per_second"] * results["flops_per_token"] / peak
            assert row["share_of_best"] == pytest.approx(share)
            assert row["page_faults_per_step"] >= 0
            assert row["times_as_fast_as"].keys() == {r["name"] for r in rows} - {row["name"]}
            assert f"\n  {row['name']} " in shown
    there = [row["name"] for row in equalised]
    assert results["tables"]["equalised"]["turns"] == [there, there[::-1]]
    for title in benchmark.TABLES.values():
        assert title in shown


def tiny_flops(length):
    return 6 * (12 * 2 * 16**2 + 257 * 16) + 6 * 2 * 16 * (length + 1)


def test_one_at_a_time_and_ours_alone(bench, tmp_path, monkeypatch):
    alive = []
    freed = turns.Entry.free

    def free(entry):
        alive.append(len(entry.turns))
        freed(entry)

    monkeypatch.setattr(turns.Entry, "free", free)
    more = ("contenders=ours", "one_at_a_time=true", "table=equalised", "out=one.json")
    code, shown, err = bench(*more, "ceiling_seconds=0")
    assert (code, err) == (0, "")
    assert alive == [2]
    results = json.loads((tmp_path / "one.json").read_text())
    assert list(results["tables"]) == ["equalised"]
    assert results["tables"]["equalised"]["turns"] == "one after the other"
    assert results["ceilings"] is None
    assert "of best" not in shown


def test_who_is_compiled(bench, nanogpt, tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or model)
    who = ("contenders=ours,nanogpt", f"nanogpt={nanogpt()}", "compile=true", "out=c.json")
    assert bench(*who, "ceiling_seconds=0")[::2] == (0, "")
    tables = json.loads((tmp_path / "c.json").read_text())["tables"]
    rows = [(r["name"], r["compiled"]) for name in tables for r in tables[name]["rows"]]
    assert rows == [
        ("ours", False),
        ("ours, compiled", True),
        ("nanoGPT", False),  # on a CPU, as its README says
        ("ours", True),
        ("nanoGPT", True),
        ("nanoGPT, all switched on", True),
    ]
    # Ours has its two blocks compiled each time, nanoGPT the whole.
    assert len(compiled) == 2 + 2 + 1 + 1


def test_as_shipped_on_a_gpu(nanogpt):
    project = contenders.NanoGPT(str(nanogpt()))
    (row,) = project.shipped("cuda", torch.bfloat16, True, 50257)
    assert (row.dtype, row.compiled, row.padded, row.tf32) == (torch.bfloat16, True, True, True)
    (row,) = project.shipped("cpu", torch.bfloat16, True, 257)
    assert (row.dtype, row.compiled, row.padded, row.kept) == (torch.float32, False, False, False)
    eager, compiled = Ours().shipped("cuda", torch.bfloat16, True, 50257)
    assert (eager.compiled, compiled.compiled, eager.kept) == (False, True, False)


# -------------------------------------------------------------------------------- agreement

FAULTS = {
    "looks ahead": ("is_causal=True", "is_causal=False"),
    "a key is a query": ("q, k, v = (self.split", "k, q, v = (self.split"),
    "no second norm": ("self.mlp(self.ln_2(x))", "self.mlp(x)"),
    "a bias is lost": (
        "return self.c_proj(x.transpose(1, 2).flatten(2))",
        "return F.linear(x.transpose(1, 2).flatten(2), self.c_proj.weight)",
    ),
    "targets shifted": ("targets.flatten()", "targets.roll(1, 1).flatten()"),
    "other positions": ("t.wpe(torch.arange(", "t.wpe(1 + torch.arange("),
    "all of it decays": ('"weight_decay": 0.0', '"weight_decay": weight_decay'),
    "another optimizer": ("torch.optim.AdamW", "torch.optim.Adam"),
    "other betas": ("betas=betas", "betas=(0.9, 0.999)"),
    "no head of its own": ("self.transformer.wte.weight = self.lm_head.weight", "pass"),
    "no such parameter": ("bias=c.bias)\n        self.gelu", "bias=False)\n        self.gelu"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_another_computation_is_found(nanogpt, parallel, fault, monkeypatch):
    monkeypatch.setattr(agreement.gc, "collect", lambda: 0)  # most of the time it takes
    project = contenders.NanoGPT(str(nanogpt(*FAULTS[fault])))
    with pytest.raises(Disagreement, match=r"contenders=nanogpt: .*; check the checkout"):
        agreement.check_projects([project], tiny(), batch(), OptimizerConfig(), parallel, 0)


def test_another_computation_is_never_timed(bench, nanogpt, monkeypatch):
    monkeypatch.setattr(turns, "measure", None)
    folder = nanogpt(*FAULTS["looks ahead"])
    code, _, err = bench("contenders=ours,nanogpt", f"nanogpt={folder}")
    assert code == 4
    check_refusal(err, "contenders=nanogpt", "not the same computation", "check the checkout")


def test_one_weight_that_is_off_is_found(nanogpt, parallel):
    class Off(contenders.NanoGPT):
        def tensors(self, weights):
            theirs = super().tensors(weights)
            name = "transformer.h.1.mlp.c_fc.weight"
            off = theirs[name].clone()
            off[3, 5] += 0.5
            return theirs | {name: off}

    check = (tiny(), batch(), OptimizerConfig(), parallel, 0)
    folder = str(nanogpt())
    assert agreement.check_projects([contenders.NanoGPT(folder)], *check).keys() == {
        "ours",
        "nanogpt",
    }
    with pytest.raises(Disagreement, match=r"nanogpt: not the same computation: the norm"):
        agreement.check_projects([Off(folder)], *check)


def test_the_first_step_of_a_row_is_checked(parallel):
    weights = tiny()
    expected = agreement.reference(weights, batch(), parallel, pad=False)
    row = Row("ours", "ours", torch.bfloat16, compiled=True)
    agreement.check_first_step(row, *expected, expected)
    loss, norm = expected
    with pytest.raises(Disagreement, match=r"first loss in bf16, compiled is"):
        agreement.check_first_step(row, loss * 1.01, norm, expected)
    with pytest.raises(Disagreement, match="first norm of the gradient in bf16, compiled is nan"):
        agreement.check_first_step(row, loss, float("nan"), expected)


def test_a_padded_vocabulary_changes_nothing_but_the_sum():
    weights = tiny()
    larger = contenders.padded(weights)
    assert larger.config.vocab_size == 64
    inputs, _ = batch()
    with torch.no_grad():
        logits, more = weights(inputs)[0], larger(inputs)[0]
    torch.testing.assert_close(more[..., :61], logits)
    assert more[..., 61:].count_nonzero() == 0


def test_ours_takes_the_step_of_the_trainer(trainer):
    """Bit for bit, in three steps: what is timed is what trains."""
    constant = ("optimizer.schedule=constant", "trainer.warmup_steps=0", "model.dropout=0")
    run = trainer(*constant)
    settings = run.settings
    row = Row("ours", "ours", torch.float32)
    ours = OurContender(row, Ours(), run.model, settings.optimizer, run.parallel, settings.seed)
    for step in range(3):
        ((inputs, targets, _, _),) = list(run.feed.batches(step))
        expected = run.step()
        assert tuple(map(float, ours.step(inputs, targets))) == tuple(map(float, expected))
    for own, trained in zip(ours.model.parameters(), run.model.parameters(), strict=True):
        assert torch.equal(own, trained)


# ------------------------------------------------------------------------------ turns, figures


def test_turns_go_forth_and_back():
    assert turns.order(3, 4) == [[0, 1, 2], [2, 1, 0], [0, 1, 2], [2, 1, 0]]
    assert turns.order(1, 2) == [[0], [0]]


def test_contenders_take_turns_on_the_same_batches(parallel):
    taken = []

    class Recorder(OurContender):
        def step(self, input_ids, target_ids):
            taken.append((self.row.name, int(input_ids[0, 0])))
            return super().step(input_ids, target_ids)

    weights, batches = tiny(), [batch(seed) for seed in (1, 2, 3)]
    expected = {False: agreement.reference(weights, batches[0], parallel, pad=False)}
    rows = [Row(name, "ours", torch.float32) for name in "AB"]

    def make(row):
        return Recorder(row, Ours(), weights, OptimizerConfig(), parallel, 0)

    kind = {"rounds": 2, "steps": 2, "warmup": 1, "one_at_a_time": False, "settle": 1}
    turns.measure(rows, make, batches, expected, parallel, **kind)
    # The first and the warm-up of each, then turns of three steps of which one does not count.
    assert "".join(name for name, _ in taken) == "AABB" + "AAABBB" + "BBBAAA"
    tokens = [int(inputs[0, 0]) for inputs, _ in batches]
    assert len(set(tokens)) == 3
    for name in "AB":
        seen = [token for who, token in taken if who == name]
        assert seen == [tokens[n % 3] for n in range(8)]


def test_ratios_are_of_the_same_round():
    """The machine is twice as slow in the second round, which no ratio shows."""
    ours = [[1.0, 1.0, 9.0], [2.0, 2.0, 2.0], [1.0, 1.0, 1.0]]
    theirs = [[2.0, 2.0, 2.0], [4.0, 4.0, 4.0], [3.0, 3.0, 0.1]]
    assert turns.ratio(ours, theirs) == {"median": 2.0, "least": 2.0, "most": 3.0}
    assert turns.ratio(theirs, ours)["median"] == 0.5


def test_medians_and_quartiles():
    found = turns.spread([[1.0, 2.0], [3.0, 4.0], [100.0]])
    assert found == {"median": 3.0, "lower_quartile": 2.0, "upper_quartile": 4.0}
    assert turns.spread([[2.0]])["upper_quartile"] == 2.0


def test_figures_of_given_times():
    def entry(name, *times):
        row = Row(name, name, torch.bfloat16, kept=name == "ours")
        measured = {"first_seconds": 3.0, "loss": 5.0, "norm": 1.0, "fused": True, "peak": 0}
        measured["faults"] = 12
        return SimpleNamespace(row=row, turns=list(times), **measured)

    products = {"bf16": {"best_tokens_per_second": 1000.0, "own_tokens_per_second": 500.0}}
    entries = [entry("ours", [0.5, 0.5], [0.5, 0.5]), entry("them", [1.0, 1.0], [2.0, 2.0])]
    ours, them = turns.table(entries, 100, 7.0, {"products": products})
    assert ours["tokens_per_second"] == 200
    assert ours["flops_per_second"] == 1400
    assert ours["page_faults_per_step"] == 3
    assert (ours["share_of_best"], ours["share_of_own"]) == (0.2, 0.4)
    assert ours["times_as_fast_as"] == {"them": {"median": 3.0, "least": 2.0, "most": 4.0}}
    assert them["times_as_fast_as"]["ours"]["median"] == median([0.5, 0.25])
    shown = benchmark.told_table("shipped", [ours, them])
    assert "3.00 (2.00-4.00)" in shown
    assert "ours is" in shown


def test_the_products_of_a_step_are_all_its_flops():
    """As GPT.flops_per_token counts them, which has one more key of each row on the diagonal."""
    config = ModelConfig(61, 16, 32, 4, 3, dropout=0.0)
    total = 0.0
    for shape, times, _ in ceilings.step_products(config, 2, 12):
        total += times * ceilings.flops(shape)
    diagonal = 6 * 3 * 32
    assert total + 2 * 12 * diagonal == 2 * 12 * GPT(config).flops_per_token(12)


def test_ceilings_are_consistent(monkeypatch):
    monkeypatch.setattr(ceilings, "SQUARES", {"cpu": (16,)})
    monkeypatch.setattr(ceilings, "COPIED", {"cpu": 2**16})
    monkeypatch.setattr(ceilings, "least_seconds", lambda *_: 1e-6)
    found = ceilings.ceilings(tiny(), 2, 12, ["bf16"], torch.device("cpu"), 0.1)
    products = found["products"]["bf16"]
    assert products["rates"]["16 x 16 x 16"] == pytest.approx(2 * 16**3 / 1e-6)
    assert products["best"] == max(products["rates"].values())
    assert products["own"] < products["best"]
    assert found["copy"] == pytest.approx(2 * 2**16 / 1e-6)


FAULTS_OF_TURNS = """
import torch
from scripts.turns import freed_memory, page_faults

def in_a_turn(kept):
    with freed_memory(kept, "cpu"):
        counts = []
        for _ in range(6):  # 64 MiB; where the heap cannot grow in place, it takes more than one
            before = page_faults()
            torch.ones(2**24)
            counts.append(page_faults() - before)
    return counts

before, kept, after = map(in_a_turn, (False, True, False))
print(before[-1], kept[-1], after[0])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_kept_for_those_who_keep_it():
    """In a process of its own: in this one there is free memory between other things."""
    command = [sys.executable, "-c", FAULTS_OF_TURNS]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    before, kept, after = map(int, done.stdout.split())
    assert kept < before / 10
    assert after > before / 2  # what was kept was given back before the next turn


# ---------------------------------------------------------------------------------- refusals

REFUSED = [
    ("modle=gpt2-small", "modle=gpt2-small", "no such setting", "did you mean model?"),
    ("batchsize=4", "batchsize=4", "no such setting", "did you mean batch_size?"),
    ("model.num_heads=5", "model.num_heads=5", "cannot be split", "use a divisor"),
    ("model=gpt2-smal", "model=gpt2-smal", "no such model", "did you mean model=gpt2-small?"),
    ("model.dropout=0.1", "model.dropout=0.1", "all train without dropout", "leave it out"),
    ("optimizer.schedule=wsd", "optimizer.schedule=wsd", "plays no part", "lr, weight_decay"),
    ("length=17", "length=17", "reads at most 16 tokens", "use length=16 or less"),
    ("rounds=0", "rounds=0", "must be at least 1", "use 1 or more"),
    ("table=all", "table=all", "no such choice", "both, shipped, equalised"),
    ("precision=fp16", "precision=fp16", "no such choice", "auto, fp32, bf16"),
    ("nanogpt=nowhere", "nanogpt=nowhere", "no folder", "a checkout of nanoGPT"),
    ("llms_from_scratch=.", "llms_from_scratch=.", "there is no ch05", "of LLMs-from-scratch"),
    ("contenders=nanogtp", "contenders=nanogtp", "there is no nanogtp", "did you mean nanogpt?"),
    ("contenders=nanogpt", "contenders=nanogpt", "is no package", "give nanogpt=FOLDER"),
    ("out=no/such/file.json", "out=no/such/file.json", "no such folder", "make it"),
]


@pytest.mark.parametrize(("argument", "key", "cause", "fix"), REFUSED, ids=[r[0] for r in REFUSED])
def test_mistakes_are_answered_in_one_line(bench, argument, key, cause, fix):
    code, out, err = bench(argument)
    assert (code, out) == (2, "")
    check_refusal(err, key, cause, fix)


@pytest.mark.parametrize(
    ("text", "cause"),
    [("class GPT: pass", "model.py has no GPTConfig"), ("import no_such", "cannot be imported")],
)
def test_a_file_that_is_no_nanogpt(bench, tmp_path, text, cause):
    (tmp_path / "model.py").write_text(text)
    code, out, err = bench(f"nanogpt={tmp_path}")
    assert (code, out) == (2, "")
    check_refusal(err, f"nanogpt={tmp_path}", cause, "name the folder of a checkout of nanoGPT")


def test_help_names_every_setting(in_process, tmp_path):
    code, out, err = in_process(benchmark.main, tmp_path, "--help")
    assert (code, err) == (0, "")
    for field in dataclasses.fields(benchmark.BenchmarkConfig):
        assert f"  {field.name} " in out
