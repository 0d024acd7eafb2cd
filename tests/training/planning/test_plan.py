"""The plan of a run: arithmetic by hand, predictions against measured runs, the command."""

import dataclasses
import functools
import json

import pytest
from helpers.refusals import printed_keys, refused

from errors import ConfigError
from scripts import plan
from training.planning.devices import KINDS

XL = ["model=gpt2-xl", "data=text", "model.dropout=0", "trainer.batch_size=512", "data.path=any"]
TOLERANCE = 0.35  # of tokens per second: another day the machine is a fifth faster or slower


@functools.cache
def job(*arguments) -> plan.Job:
    return plan.job_of(*plan.composed(list(arguments)))


def test_hand_computed_all_reduce():
    """gpt2-small on one machine of 8: 2 x 7/8 x 4 bytes x 124,439,808 from each device, over 450
    GB/s of which 80 % are assumed to be reached: 2.42 ms, and 20 buckets that wait 80 us each."""
    fast = plan.speed(job("trainer.batch_size=8", "devices=8"), 0.4)
    assert fast.communication == {
        "all-reduce": (871_078_656.0, pytest.approx(0.00242 + 20 * 80e-6, rel=0.01))
    }


def test_hand_computed_gathering_and_scattering():
    """gpt2-xl over 64: blocks of 12 x 1600^2 + 13 x 1600 in bf16, twice; the root of 51,283 x 1600
    in fp32; one reduction of everything in fp32; 63/64 of it all."""
    blocks, root = 48 * 30_740_800, 82_052_800
    over_64 = job(*XL, "parallel=fsdp", "devices=64")
    sharded = plan.speed(over_64, 0.4).communication
    assert sharded["all-gather"][0] == pytest.approx(63 / 64 * (2 * 2 * blocks + 4 * root))
    assert sharded["reduce-scatter"][0] == pytest.approx(63 / 64 * 4 * (blocks + root))
    kept = plan.speed(dataclasses.replace(over_64, reshard=False), 0.4).communication
    assert kept["all-gather"][0] == pytest.approx(63 / 64 * (2 * blocks + 4 * root))


def test_one_device_sends_nothing_and_computes_the_formula():
    """9.80 GFLOP a token (6 x (48 x 12 x 1600^2 + 50,257 x 1600) + 6 x 48 x 1600 x 1025), 524,288
    tokens a step at 40 % of 989 TFLOP/s: 13.0 s."""
    alone = job(*XL, "trainer.compile=false")
    assert plan.flops_per_token(alone) == pytest.approx(9.802e9, rel=1e-3)
    fast = plan.speed(alone, 0.4)
    assert fast.communication == {}
    assert fast.compute == pytest.approx(12.99, rel=0.01)
    # Recomputing adds the forward of the blocks, nearly a third.
    again = plan.speed(dataclasses.replace(alone, checkpointing=True), 0.4)
    assert 1.30 < again.compute / fast.compute < 1.34


def test_a_ring_over_machines_uses_all_their_ports():
    def bus(**changes):
        return plan.bus(dataclasses.replace(job(*XL), **changes))

    assert bus(devices=8) == pytest.approx(0.8 * 450e9)
    assert bus(devices=16) == pytest.approx(0.8 * 400e9)
    assert bus(devices=16, per_machine=1) == pytest.approx(0.8 * 50e9)
    assert bus(devices=16, kind=KINDS["l4"]) == pytest.approx(0.8 * 16e9)


def test_more_devices_never_cost_less_and_never_hide_everything():
    """At a fixed batch, devices are added until each has one window: always less efficient."""
    efficiency = []
    for devices in (2, 8, 64, 512):
        change = {"strategy": "fsdp", "devices": devices, "micro": 512 // devices}
        fast = plan.speed(dataclasses.replace(job(*XL), **change), 0.5)
        total = sum(seconds for _, seconds in fast.communication.values())
        assert 0 < fast.exposed <= total * (1 + 1e-9)
        efficiency.append(fast.tokens_per_second / devices)
    assert efficiency == sorted(efficiency, reverse=True)


def test_every_measured_training_run_is_predicted():
    """Once as the plan does it, from the nearest measured run, which may be this one; and without
    it, from the others or from what is assumed."""
    by_kind = [list(plan.measurements(kind)) for kind in KINDS]
    assert sum(map(len, by_kind)) >= 5
    for this, alike in ((run, runs) for runs in by_kind for run in runs):
        for known in (alike, [other for other in alike if other is not this]):
            share, _ = plan.utilisation(this.job, known)
            predicted = plan.speed(this.job, share).tokens_per_second
            assert predicted == pytest.approx(this.tokens_per_second, rel=TOLERANCE), this


def test_results_of_gpus_are_read_too(tmp_path):
    given = "model=gpt2-xl data=text data.path=x trainer.batch_size=64 parallel=fsdp"
    run = {"settings": given, "devices": 8, "kind": "h100", "tokens_per_second": [9e4, 1e5, 2e5]}
    other = {"settings": "something else", "tokens_per_second": [1]}
    (tmp_path / "gpu.json").write_text(json.dumps({"runs": [run, other, "no run"]}))
    (tmp_path / "other.json").write_text("[1, 2]")
    assert list(plan.measurements("b200", tmp_path)) == []
    (found,) = plan.measurements("h100", tmp_path)
    assert found.tokens_per_second == 1e5
    assert (found.job.devices, found.job.strategy, found.job.batch) == (8, "fsdp", 64)
    share, source = plan.utilisation(found.job, [found])
    assert "gpu.json" in source
    assert plan.speed(found.job, share).tokens_per_second == pytest.approx(1e5)
    other = dataclasses.replace(found.job, precision="fp32")
    assert "gpu.json" not in plan.utilisation(other, [found])[1]


def test_the_plan_of_the_documentation(in_process, tmp_path):
    arguments = "model=gpt2-xl data=text trainer.batch_size=512 parallel=fsdp devices=64 kind=h100"
    arguments += " tokens=10e9 out=plan.json"
    code, out, err = in_process(plan.main, tmp_path, *arguments.split())
    assert (code, err) == (0, "")
    figures = json.loads((tmp_path / "plan.json").read_text())
    found = [figures[key] for key in ("parameters", "devices", "tokens", "largest_micro_batch")]
    assert found == [1_557_611_200, 64, 10e9, 8]
    assert figures["flops_per_token"] == pytest.approx(9.8e9, rel=0.01)
    assert f"{figures['parameters']:,}" in out
    hours = 10e9 / figures["tokens_per_second"] / 3600
    assert figures["cost"] == pytest.approx(hours * 64 * 2.5)
    parts = figures["memory"]
    parts.pop("moment")
    assert parts.pop("total") == pytest.approx(sum(parts.values()))


def test_advice_for_a_run_that_does_not_fit(in_process, tmp_path):
    base = ["model=gpt2-xl", "data=text", "data.path=any", "trainer.compile=false"]
    tight = [*base, "trainer.batch_size=32", "trainer.micro_batch_size=32"]
    for given, memory in (([*base, "kind=l4", "devices=2"], 24), (tight, 80)):
        assert in_process(plan.main, tmp_path, *given, "out=plan.json")[::2] == (0, "")
        figures = json.loads((tmp_path / "plan.json").read_text())
        advice = [text for text in figures["advice"] if not text.startswith("kind=")]
        assert not figures["fits"]
        assert advice
        for changes, _, needs in (text.partition(": ") for text in advice):
            assert job(*given, *changes.split()).fits(), changes
            assert float(needs.removesuffix(" GB")) <= memory


def test_the_micro_batch():
    base = ("model=gpt2-xl", "data=text", "trainer.batch_size=64", "data.path=any")
    largest = job(*base).micro
    assert largest in (2, 4, 8, 16, 32)
    assert job(*base).fits()
    assert not job(*base).fits(2 * largest)
    assert job(*base, "trainer.micro_batch_size=auto").micro == largest
    assert job(*base, "trainer.micro_batch_size=3").micro_batches == 22


def test_what_follows_from_the_settings():
    assert job("trainer.max_steps=10", "trainer.batch_size=4").tokens == 10 * 4 * 256
    assert job("tokens=5e6", "trainer.max_steps=10").tokens == 5e6
    assert (job().strategy, job("devices=2").strategy, job().precision) == ("single", "ddp", "bf16")
    # 120 steps of 512 tokens are too few to compile for; ten billion tokens are not.
    assert not job().compiled
    assert job("tokens=10e9").compiled


# The key is that of the first argument.
MISTAKES = ["devices=0", "devices=some", "kind=h10", "device=64", "tokens=nan", "price=-1"]
MISTAKES += ["out=no/such/plan.json", "--frobnicate", "trainer.precision=fp16 kind=cpu"]


def test_mistakes(in_process, tmp_path):
    for arguments in MISTAKES:
        key = arguments.partition("=")[0]
        code, out, err = in_process(plan.main, tmp_path, *arguments.split())
        assert (code, out, printed_keys(err)) == (2, "", [key]), arguments
    with pytest.raises(ConfigError) as caught:
        plan.composed(["devices=0", "kind=abacus", "model.num_heads=5"])
    keys = [problem.key for problem in caught.value.problems]
    assert keys == ["devices", "kind", "model.num_heads"]
    # What training would refuse.
    with refused(ConfigError, "trainer.batch_size", 512):
        job("trainer.batch_size=512", "devices=3")


def test_kinds_are_plausible():
    """A wrong digit in the table would change these ratios."""
    for kind in KINDS.values():
        assert 2 <= kind.flops / kind.fp32 <= 30
        assert 2 <= kind.bandwidth / kind.memory <= 60
        assert kind.network <= kind.link
