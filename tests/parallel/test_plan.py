"""scripts.plan: hand-computed values, measured utilisation, the command."""

import functools
import json
import re
import shlex
from statistics import median

import pytest
from helpers import REPOSITORY
from helpers.refusals import printed_keys, refused

from clearhead.errors import ConfigError
from scripts import plan

XL = ("model=gpt2-xl", "data=text", "model.dropout=0", "trainer.batch_size=512", "data.path=any")


@functools.cache
def figures(*arguments) -> dict:
    return plan.make_plan(*plan.composed(list(arguments)))


def test_hand_computed_time():
    """9.80 GFLOP per token (6 x (48 x 12 x 1600^2 + 50,257 x 1600) + 6 x 48 x 1600 x 1025);
    8 devices at half of 989 TFLOP/s: 403,500 tokens per second, 6.88 hours for 10^10 tokens."""
    given = (*XL, "parallel=ddp", "devices=8", "tokens=10e9", "utilisation=0.5")
    found = figures(*given)
    assert found["flops_per_token"] == pytest.approx(9.802e9, rel=1e-3)
    assert found["tokens_per_second"] == pytest.approx(403_500, rel=1e-3)
    assert found["seconds"] == pytest.approx(6.884 * 3600, rel=1e-3)
    fp32 = figures(*given, "trainer.precision=fp32")["tokens_per_second"]
    assert fp32 / found["tokens_per_second"] == pytest.approx(67 / 989)


def test_a_vocabulary_that_is_not_trained_yet_has_the_given_size():
    own = ("data=text", "data.tokenizer=bpe", "data.path=any")
    small, large = (figures(*own, f"data.vocab_size={n}")["parameters"] for n in (1024, 4096))
    assert large - small == (4096 - 1024) * 768
    with refused(ConfigError, "data.vocab_size"):
        figures(*own)


def test_the_plan_for_a_cpu_predicts_the_measured_speed():
    """gpt2-small, windows of 256 tokens."""
    file = REPOSITORY / "benchmarks" / "results" / "2026-11-21-base-cpu.json"
    runs = {run["name"]: run for run in json.loads(file.read_text())["runs"]}
    for precision, name in (("bf16", "keep"), ("fp32", "fp32")):
        measured = median(runs[name]["tokens_per_second"])
        chosen = ("kind=cpu", "data.max_length=256", f"trainer.precision={precision}")
        assert figures(*chosen)["tokens_per_second"] == pytest.approx(measured, rel=0.014)


def test_the_source_of_the_utilisation():
    def shown(*arguments):
        found = figures("data.max_length=256", *arguments)
        return found["utilisation"], len(found["bounds"])

    assert shown() == (0.4, 2)  # a range
    assert shown("kind=cpu", "trainer.precision=bf16") == (0.36, 1)
    assert shown("kind=cpu", "utilisation=0.2") == (0.2, 1)
    assert shown("trainer.activation_checkpointing=true") == (pytest.approx(0.3), 2)


def test_the_plan_for_an_h100_predicts_the_measured_speed():
    file = REPOSITORY / "benchmarks" / "results" / "2026-11-27-gpu-check-h100.json"
    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    given = ("data=shards", "data.path=any", "model.dropout=0", "tokens=1e9")
    given += ("trainer.batch_size=64", "trainer.micro_batch_size=64")
    found = figures(*given)
    assert found["tokens_per_second"] == pytest.approx(rows["compiled"]["tokens_per_second"], 2e-3)
    assert found["bounds"] == (1,)
    others = ("trainer.compile=false", "model.dropout=0.1", "kind=h200", "data.max_length=512")
    for other in (*others, "model.num_layers=24", "devices=2", "trainer.precision=fp16"):
        assert len(figures(*given, other)["bounds"]) == 2, other


def test_the_micro_batch():
    base = ("model=gpt2-xl", "data=text", "trainer.batch_size=64", "data.path=any")
    largest = figures(*base)["micro_batch_size"]
    assert largest in (2, 4, 8, 16, 32)
    for micro, fits in (("auto", True), (largest, True), (2 * largest, False)):
        found = figures(*base, f"trainer.micro_batch_size={micro}")
        assert (found["largest_micro_batch"], found["fits"]) == (largest, fits)
    small = figures("model=gpt2-xl", "data=text", "data.path=any", "kind=l4", "devices=2")
    assert (small["largest_micro_batch"], small["fits"]) == (None, False)
    assert figures(*base, "trainer.micro_batch_size=3")["micro_batches"] == 22


def test_values_that_depend_on_settings():
    assert figures("trainer.max_steps=10", "trainer.batch_size=4")["tokens"] == 10 * 4 * 256
    assert figures("tokens=5e6", "trainer.max_steps=10")["tokens"] == 5e6
    one, two = figures(), figures("devices=2")
    assert (one["strategy"], two["strategy"], one["precision"]) == ("single", "ddp", "bf16")
    # 120 steps of 512 tokens are too few for compilation; ten billion tokens are enough.
    assert not one["compiled"]
    assert figures("tokens=10e9")["compiled"]


def test_the_estimate_in_the_docs_is_the_output(in_process, tmp_path):
    page = (REPOSITORY / "docs" / "training.md").read_text("utf-8")
    shown = re.search(r"^\$ python -m scripts\.plan (.*)\n((?:.*\n)*?)```", page, re.MULTILINE)
    given = (*shlex.split(shown[1]), "out=plan.json")
    assert in_process(plan.main, tmp_path, *given) == (0, shown[2], "")
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["seconds"] == pytest.approx(10e9 / found["tokens_per_second"])
    parts = found["memory"]
    assert parts.pop("total") == pytest.approx(sum(parts.values()))


# The key of each problem is that of the first argument.
MISTAKES = ["devices=0", "devices=some", "kind=h10", "device=64", "tokens=nan"]
MISTAKES += ["out=no/such/plan.json", "--frobnicate"]
MISTAKES += ["utilisation=0", "utilisation=40"]


def test_invalid_settings(in_process, tmp_path):
    for arguments in MISTAKES:
        key = arguments.partition("=")[0]
        code, out, err = in_process(plan.main, tmp_path, *arguments.split())
        assert (code, out, printed_keys(err)) == (2, "", [key]), arguments
    with pytest.raises(ConfigError) as caught:
        plan.composed(["devices=0", "kind=abacus", "model.num_heads=5"])
    keys = [problem.key for problem in caught.value.problems]
    assert keys == ["devices", "kind", "model.num_heads"]
    # Settings that train.py would reject.
    with refused(ConfigError, "trainer.batch_size", 512):
        figures("trainer.batch_size=512", "devices=3")


def test_each_kind_of_card_and_another_memory():
    medium = ("model=gpt2-medium", "data=text", "data.path=any", "trainer.batch_size=8")
    for kind in plan.KINDS:
        rate = figures(f"kind={kind}")["tokens_per_second"]
        assert rate is None if kind == "apple" else rate > 0
    assert [figures(f"kind={kind}")["precision"] for kind in ("t4", "apple")] == ["fp16", "fp32"]
    sizes = {memory: figures(*medium, f"memory={memory}") for memory in (6, 12, 24)}
    assert [found["fits"] for found in sizes.values()] == [False, True, True]
    assert sizes[12]["largest_micro_batch"] < sizes[24]["largest_micro_batch"] == 8


def test_a_plan_of_generated_data_and_of_an_unknown_gpu():
    """A GPU of which only the memory is given has no speed."""
    induction, unknown = (figures(text, "tokens=1e9") for text in ("data=induction", "memory=12"))
    assert induction["tokens_per_second"] > 0
    assert unknown["tokens_per_second"] is None
    assert unknown["device_memory"] == 12e9
