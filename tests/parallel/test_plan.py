"""scripts.plan: hand-computed values, measured utilisation, the command."""

import functools
import json
import re
import shlex
import typing
from statistics import median

import numpy as np
import pytest
from helpers.refusals import printed_keys, refused

from clearhead.config.yaml_files import REPOSITORY
from clearhead.errors import ConfigError
from clearhead.parallel.hardware import KINDS, MEASURED_UTILISATION, peak_named
from scripts import plan

XL = ("model=gpt2-xl", "data=text", "model.dropout=0", "trainer.batch_size=512", "data.path=any")


@functools.cache
def figures(*arguments) -> dict:
    return plan.make_plan(*plan.composed(list(arguments)))


def test_hand_computed_time_and_cost():
    """9.80 GFLOP per token (6 x (48 x 12 x 1600^2 + 50,257 x 1600) + 6 x 48 x 1600 x 1025);
    8 devices at half of 989 TFLOP/s: 403,500 tokens per second, 6.88 hours for 10^10 tokens."""
    given = (*XL, "parallel=ddp", "devices=8", "tokens=10e9", "utilisation=0.5", "price=2")
    found = figures(*given)
    assert found["flops_per_token"] == pytest.approx(9.802e9, rel=1e-3)
    assert found["tokens_per_second"] == pytest.approx(403_500, rel=1e-3)
    assert found["cost"] == pytest.approx(6.884 * 8 * 2, rel=1e-3)
    fp32 = figures(*given, "trainer.precision=fp32")["tokens_per_second"]
    assert fp32 / found["tokens_per_second"] == pytest.approx(67 / 989)


def test_tokens_of_the_data_and_epochs(tmp_path):
    ids = np.arange(1000, dtype=np.uint16)
    given = ("model=gpt2-nano", "data=shards", f"data.path={tmp_path}", "tokens=5000")
    assert figures(*given)["tokens_of_data"] is None  # there are no files yet
    ids.tofile(tmp_path / "train.bin")
    given += ("data.val_fraction=0.2",)
    assert figures(*given)["tokens_of_data"] == 800
    assert "6.25 epochs" in plan.text_of(plan.composed([*given])[0], figures(*given))
    ids.tofile(tmp_path / "val.bin")
    assert figures(*given, "seed=1")["tokens_of_data"] == 1000


def test_a_vocabulary_that_is_not_trained_yet(tmp_path):
    """Its size follows from the size of the text; that of a dataset on the hub is not known."""
    (tmp_path / "my.txt").write_text("boat " * 1000)
    own = ("data=text", "data.tokenizer=bpe")
    small, large, given, known = (
        figures(*own, *more)["parameters"]
        for more in (
            (f"data.path={tmp_path}/my.txt",),
            (f"data.path={tmp_path}/my.txt", "data.vocab_size=4096"),
            ("data.path=hub:some/texts", "data.vocab_size=4096"),
            ("data.path=hub:some/texts", "model.vocab_size=2048"),
        )
    )
    assert small == known < large == given
    with refused(ConfigError, "data.vocab_size"):
        figures(*own, "data.path=hub:some/texts")


def test_measured_utilisation_follows_from_the_results():
    """Recomputes each stored value from the results: gpt2-small, windows of 256 tokens."""
    per_token = figures("model=gpt2-small", "data.max_length=256")["flops_per_token"]
    file = REPOSITORY / "benchmarks" / "results" / "2026-11-21-base-cpu.json"
    runs = {run["name"]: run for run in json.loads(file.read_text())["runs"]}
    cpu = KINDS["cpu"].peak
    for precision, name, peak in (("bf16", "keep", cpu.half), ("fp32", "fp32", cpu.fp32)):
        reached = median(runs[name]["tokens_per_second"]) * per_token / peak
        assert MEASURED_UTILISATION["cpu", precision] == pytest.approx(reached, abs=0.005)


def test_the_source_of_the_utilisation():
    def shown(*arguments):
        found = figures("data.max_length=256", *arguments)
        return found["utilisation"], "assumed" in found["utilisation_source"]

    assert shown() == (0.4, True)
    assert shown("kind=cpu") == (MEASURED_UTILISATION["cpu", "bf16"], False)
    assert shown("kind=cpu", "utilisation=0.2") == (0.2, False)
    assert shown("trainer.activation_checkpointing=true") == (pytest.approx(0.3), True)


def test_the_plan_of_the_documentation(in_process, tmp_path):
    arguments = "model=gpt2-xl data=text trainer.batch_size=512 parallel=fsdp devices=64 kind=h100"
    arguments += " tokens=10e9 out=plan.json"
    code, out, err = in_process(plan.main, tmp_path, *arguments.split())
    assert (code, err) == (0, "")
    found = json.loads((tmp_path / "plan.json").read_text())
    whole = [found[key] for key in ("parameters", "devices", "tokens", "largest_micro_batch")]
    assert whole == [1_557_611_200, 64, 10e9, 8]
    assert f"{found['parameters']:,}" in out
    hours = 10e9 / found["tokens_per_second"] / 3600
    assert found["cost"] == pytest.approx(hours * 64 * 2.5)
    parts = found["memory"]
    assert parts.pop("total") == pytest.approx(sum(parts.values()))


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
    assert in_process(plan.main, tmp_path, *shlex.split(shown[1])) == (0, shown[2], "")


# The key of each problem is that of the first argument.
MISTAKES = ["devices=0", "devices=some", "kind=h10", "device=64", "tokens=nan", "price=-1"]
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


def test_the_memory_of_a_card_can_be_given():
    medium = ("model=gpt2-medium", "data=text", "data.path=any", "trainer.batch_size=8")
    sizes = {memory: figures(*medium, f"memory={memory}") for memory in (6, 12, 24)}
    assert [plan["fits"] for plan in sizes.values()] == [False, True, True]
    assert sizes[12]["largest_micro_batch"] < sizes[24]["largest_micro_batch"] == 8


def test_device_types():
    assert typing.get_args(plan.PlanConfig.model_fields["kind"].annotation) == tuple(KINDS)


# Names that drivers report; bf16 (T4, V100: fp16) and fp32 in TFLOP/s from data sheets.
PEAKS = [
    ("NVIDIA GB300", 2500, 80),
    ("NVIDIA GB200", 2500, 80),
    ("NVIDIA B300 SXM6 AC", 2250, 75),
    ("NVIDIA B200", 2250, 75),
    ("NVIDIA H200", 989, 67),
    ("NVIDIA H200 NVL", 835, 60),
    ("NVIDIA GH200 480GB", 989, 67),
    ("NVIDIA GH200 144G HBM3e", 989, 67),
    ("NVIDIA H100 80GB HBM3", 989, 67),
    ("NVIDIA H100 NVL", 835, 60),
    ("NVIDIA H100 PCIe", 756, 51),
    ("NVIDIA H20", 148, 44),
    ("NVIDIA A100-SXM4-80GB", 312, 19.5),
    ("NVIDIA A100-SXM4-40GB", 312, 19.5),
    ("NVIDIA A100-PCIE-40GB", 312, 19.5),
    ("NVIDIA A100 80GB PCIe", 312, 19.5),
    ("NVIDIA A10", 125, 31.2),
    ("NVIDIA A10G", 70, 35),
    ("NVIDIA RTX A6000", 154.8, 38.7),
    ("NVIDIA GeForce RTX 3090", 71, 35.6),
    ("NVIDIA L40S", 362, 91.6),
    ("NVIDIA L4", 121, 30.3),
    ("NVIDIA RTX 6000 Ada Generation", 364, 91.1),
    ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
    ("NVIDIA GeForce RTX 5090", 209.5, 104.8),
    ("Tesla T4", 65, 8.1),
    ("Tesla V100-SXM2-32GB", 125, 15.7),
    ("Tesla V100-PCIE-16GB", 112, 14),
    ("Tesla V100S-PCIE-32GB", 130, 16.4),
]
OTHERS = ["NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU"]
OTHERS += ["NVIDIA GeForce RTX 5090 D", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce GTX 1080"]
OTHERS += ["NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A100-SXM4-40GB MIG 3g.20gb"]
OTHERS += ["NVIDIA L40", "NVIDIA H100", "AMD Instinct MI300X", "GRID A100X-40C", ""]


def test_peaks_of_the_names_that_drivers_report():
    """None for a part of a GPU, and for a slower GPU with a similar name."""
    for name, half, fp32 in PEAKS:
        assert peak_named(name) == pytest.approx((half * 1e12, fp32 * 1e12)), name
    assert [name for name in OTHERS if peak_named(name)] == []
