"""The plan of a run: its arithmetic by hand, its figures against measured ones, its words."""

import dataclasses
import functools
import json
import time
from statistics import median

import pytest
from helpers import REPOSITORY

from errors import ConfigError
from scripts import plan
from training import memory, parallel
from training.command import compose
from training.hardware import KINDS

XL = ["model=gpt2-xl", "data=text", "model.dropout=0", "trainer.batch_size=512", "data.path=any"]
TOLERANCE = 0.35  # of tokens per second: another day the machine is a fifth faster or slower


@functools.cache
def job(*arguments) -> plan.Job:
    return plan.job_of(*plan.composed(list(arguments)))


def told(in_process, tmp_path, *arguments) -> str:
    code, out, err = in_process(plan.main, tmp_path, *arguments)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 100
    return out


# ------------------------------------------------------------------------------- arithmetic


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
    sharded = plan.speed(job(*XL, "parallel=fsdp", "devices=64"), 0.4).communication
    blocks, root = 48 * 30_740_800, 82_052_800
    assert blocks + root == 1_557_611_200
    assert sharded["all-gather"][0] == pytest.approx(63 / 64 * (2 * 2 * blocks + 4 * root))
    assert sharded["reduce-scatter"][0] == pytest.approx(63 / 64 * 4 * 1_557_611_200)
    kept = ["parallel.reshard_after_forward=false"]
    kept = plan.speed(job(*XL, "parallel=fsdp", "devices=64", *kept), 0.4).communication
    assert kept["all-gather"][0] == pytest.approx(63 / 64 * (2 * blocks + 4 * root))


def test_one_device_sends_nothing_and_computes_the_formula():
    """9.80 GFLOP a token (6 x (48 x 12 x 1600^2 + 50,257 x 1600) + 6 x 48 x 1600 x 1025), 524,288
    tokens a step at 40 % of 989 TFLOP/s: 13.0 s."""
    alone = job(*XL, "trainer.compile=false")
    assert plan.flops_per_token(alone) == pytest.approx(9.802e9, rel=1e-3)
    fast = plan.speed(alone, 0.4)
    assert (fast.communication, fast.exposed) == ({}, 0)
    assert fast.compute == pytest.approx(12.99, rel=0.01)
    assert fast.mfu == pytest.approx(0.4, rel=0.01)
    # Recomputing adds the forward of the blocks, nearly a third.
    again = plan.speed(dataclasses.replace(alone, checkpointing=True), 0.4)
    assert 1.30 < again.compute / fast.compute < 1.34


def test_a_ring_over_machines_uses_all_their_ports():
    """8 x 50 GB/s, unless the links inside are slower."""

    def bus(**changes):
        return plan.bus(dataclasses.replace(job(*XL), **changes))

    assert bus(devices=8) == pytest.approx(0.8 * 450e9)
    assert bus(devices=16) == pytest.approx(0.8 * 400e9)
    assert bus(devices=16, per_machine=1) == pytest.approx(0.8 * 50e9)
    assert bus(devices=16, kind=KINDS["l4"]) == pytest.approx(0.8 * 16e9)


def test_more_devices_never_cost_less_and_never_hide_everything():
    """At a fixed batch, devices are added until each has one window: always less efficient."""
    for strategy in ("ddp", "fsdp"):
        efficiency = []
        for devices in (2, 8, 64, 512):
            micro = 512 // devices
            change = {"strategy": strategy, "devices": devices, "micro": micro}
            fast = plan.speed(dataclasses.replace(job(*XL), **change), 0.5)
            total = sum(seconds for _, seconds in fast.communication.values())
            assert 0 < fast.exposed <= total * (1 + 1e-9)
            efficiency.append(fast.tokens_per_second / devices)
        assert efficiency == sorted(efficiency, reverse=True)


def test_on_a_cpu_nothing_hides():
    fast = plan.speed(job("kind=cpu", "devices=2", "trainer.batch_size=4"), 0.4)
    assert fast.exposed == fast.communication["all-reduce"][1]


# ---------------------------------------------------------------------------------- measured


def of_training():
    """(kind, run) of every measured training run, read here once more in its own way."""
    for path in sorted((REPOSITORY / "benchmarks" / "results").glob("*.json")):
        results = json.loads(path.read_text())
        for run in results.get("runs", []) if isinstance(results, dict) else []:
            if "settings" in run and run.get("tokens_per_second"):
                kind = run.get("kind", results.get("kind"))
                if kind is None and run.get("devices", results.get("devices", 1)) == 1:
                    kind = "cpu"
                if kind and "replaced" not in run["settings"]:
                    yield kind, run


def test_every_measured_training_run_is_predicted():
    """Once as the plan does it, from the nearest measured run, which may be this one; and without
    it, from the others or from what is assumed."""
    read = {kind: list(plan.measurements(kind)) for kind in KINDS}
    expected = list(of_training())
    assert len(expected) >= 5
    assert sum(map(len, read.values())) == len(expected)
    for kind, run in expected:
        rate = median(run["tokens_per_second"])
        this = next(m for m in read[kind] if m.tokens_per_second == rate)
        for known in (read[kind], [m for m in read[kind] if m is not this]):
            share, _ = plan.utilisation(this.job, known)
            predicted = plan.speed(this.job, share).tokens_per_second
            assert predicted == pytest.approx(rate, rel=TOLERANCE), (run, share)


def test_results_of_gpus_are_read_too(tmp_path):
    runs = [
        {
            "settings": "model=gpt2-xl data=text data.path=x trainer.batch_size=64 parallel=fsdp",
            "devices": 8,
            "kind": "h100",
            "tokens_per_second": [90_000, 100_000, 101_000],
        },
        {"settings": "model=gpt2-xl, with another kernel", "tokens_per_second": [1]},
        {"settings": "something else"},
        "no run",
    ]
    (tmp_path / "gpu.json").write_text(json.dumps({"runs": runs}))
    (tmp_path / "other.json").write_text(json.dumps([1, 2]))
    assert list(plan.measurements("b200", tmp_path)) == []
    (found,) = plan.measurements("h100", tmp_path)
    assert found.tokens_per_second == 100_000
    assert (found.job.devices, found.job.strategy, found.job.batch) == (8, "fsdp", 64)
    share, source = plan.utilisation(found.job, [found])
    assert source.startswith("measured: ")
    assert "gpu.json" in source
    assert plan.speed(found.job, share).tokens_per_second == pytest.approx(100_000)
    # Another precision, or a model of another size, is no measurement of this one.
    assert plan.utilisation(dataclasses.replace(found.job, precision="fp32"), [found])[
        1
    ].startswith("assumed: ")
    small = job("data=text", "data.path=any", "trainer.batch_size=64", "devices=8")
    assert plan.utilisation(small, [found])[1].startswith("assumed: ")


# ------------------------------------------------------------------------------- the command


def test_the_plan_of_the_documentation(in_process, tmp_path):
    out = told(
        in_process,
        tmp_path,
        *("model=gpt2-xl", "data=text", "trainer.batch_size=512", "parallel=fsdp"),
        *("devices=64", "kind=h100", "tokens=10e9", "out=plan.json"),
    )
    for words in (
        "1,557,611,200 parameters: 48 layers of 25 heads, 1600 wide",
        "9.8 GFLOP to train on a token",
        "64 x H100, 8 in a machine: fsdp, bf16, compiled",
        "H100 has 80 GB: fits",
        "the largest micro-batch that fits: 8",
        "hidden: ",
        "MFU ",
        "for 10 B tokens, 19,100 steps",
        "at $2.50 for an hour of a device",
        "assumed: 50% of the products' peak; not measured yet",
    ):
        assert words in out
    figures = json.loads((tmp_path / "plan.json").read_text())
    hours = 10e9 / figures["tokens_per_second"] / 3600
    assert figures["cost"] == pytest.approx(hours * 64 * 2.5)
    parts = figures["memory"]
    parts.pop("moment")
    assert parts.pop("total") == pytest.approx(sum(parts.values()))


def test_what_does_not_fit_is_told_with_what_would(in_process, tmp_path):
    out = told(in_process, tmp_path, *XL[:2], "data.path=any", "kind=l4", "devices=2")
    assert "L4 has 24 GB: does NOT fit" in out
    assert "not even one window at a time fits" in out
    assert "    parallel=fsdp: " in out
    assert "tokens a second" not in out
    tight = ("model=gpt2-xl", "data=text", "data.path=any", "trainer.batch_size=32")
    tight += ("trainer.compile=false", "trainer.micro_batch_size=32")
    out = told(in_process, tmp_path, *tight)
    assert "does NOT fit" in out
    for line in out.partition("what would fit:")[2].partition("\n\n")[0].strip().splitlines():
        if line.strip().startswith("kind="):
            continue
        settings, _, gigabytes = line.strip().rpartition(": ")
        changed = [text for text in settings.split() if "micro_batch" in text]
        kept = tight if not changed else tight[:-1]
        assert job(*kept, *settings.split()).fits()
        assert float(gigabytes.removesuffix(" GB")) <= 80


def test_the_micro_batch(in_process, tmp_path):
    base = ("model=gpt2-xl", "data=text", "trainer.batch_size=64", "data.path=any")
    largest = job(*base).largest()
    assert 1 < largest < 64
    assert 64 % largest == 0
    assert job(*base).micro == job(*base, "trainer.micro_batch_size=auto").micro == largest
    assert not job(*base).fits(2 * largest)
    out = told(in_process, tmp_path, *base)
    assert f"give trainer.micro_batch_size={largest}, or training takes 64" in out
    given = job(*base, "trainer.micro_batch_size=3")
    assert (given.micro, given.micro_batches) == (3, 22)


def test_the_run_is_as_long_as_the_settings_say():
    assert job("trainer.max_steps=10", "trainer.batch_size=4").tokens == 10 * 4 * 256
    assert job("tokens=5e6", "trainer.max_steps=10").tokens == 5e6
    assert job("data.max_length=128").length == 128
    assert job("data=text").length == 1024


def test_auto_is_what_training_would_choose():
    assert job().strategy == "single"
    assert job("devices=2").strategy == "ddp"
    assert job().precision == "bf16"
    # 120 steps of 512 tokens are too few to compile for; ten billion tokens are not.
    assert not job().compiled
    assert job("tokens=10e9").compiled
    assert not job("tokens=10e9", "trainer.compile=false").compiled


REFUSED = [
    (("devices=0",), "devices=0: must be at least 1; use 1 or more"),
    (("kind=h10",), "kind=h10: no such kind of device; did you mean kind=h100?"),
    (("device=64",), "device=64: no such setting; did you mean devices?"),
    (("modle=gpt2-xl",), "modle=gpt2-xl: no such setting; did you mean model?"),
    (("tokens=0",), "tokens=0.0: must be more than 0; use 10e9 or so"),
    (("tokens=many",), "tokens=many: must be a number or null; see --help"),
    (("price=-1",), "price=-1.0: must not be negative; use 2.5 or so"),
    (("out=no/such/plan.json",), "out=no/such/plan.json: no such folder; make it, or name another"),
    (("--frobnicate",), "--frobnicate: no such option; see --help"),
    (("kind=cpu", "trainer.precision=fp16"), "trainer.precision=fp16: half precision needs a GPU"),
    (("trainer.device=cpu",), "trainer.device=cpu: kind=h100 is none; use trainer.device=auto"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=lambda x: str(x)[:40])
def test_mistakes_are_answered_in_one_line(in_process, tmp_path, arguments, message):
    code, out, err = in_process(plan.main, tmp_path, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_mistakes_of_both_kinds_are_named_at_once():
    with pytest.raises(ConfigError) as refused:
        plan.composed(["devices=0", "kind=abacus", "model.num_heads=5"])
    assert [key for key, *_ in refused.value.problems] == ["devices", "kind", "model.num_heads"]


@pytest.mark.parametrize("settings", ["trainer.batch_size=512", "parallel=single"])
def test_what_training_would_refuse_is_refused_in_its_words(settings, monkeypatch):
    with pytest.raises(ConfigError) as refused:
        job("trainer.batch_size=6", settings, "devices=3")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    settings = compose(["trainer.batch_size=6", settings])
    by_training = parallel.check(settings.parallel, "cpu", settings.trainer.batch_size)
    assert refused.value.problems == by_training != []


def test_a_run_that_is_resumed_is_planned_with_its_own_settings(trainer):
    run = trainer("name=b")
    run.train()
    settings, _ = plan.composed(["trainer.resume=runs/b", "trainer.max_steps=500"])
    assert settings.model == run.settings.model
    assert (settings.trainer.batch_size, settings.trainer.max_steps) == (8, 500)


def test_help_is_there_at_once(command):
    started = time.perf_counter()
    done = command("scripts.plan", "--help")
    assert done.returncode == 0
    assert time.perf_counter() - started < 5  # torch alone takes longer on a busy machine
    for field in dataclasses.fields(plan.PlanConfig):
        assert f"  {field.name} " in done.stdout
    assert "python train.py --help" in done.stdout


def test_kinds_are_plausible():
    """A digit too many or too few in a table shows in its ratios."""
    for kind in KINDS.values():
        assert 2 <= kind.flops / kind.fp32 <= 30
        assert 2 <= kind.bandwidth / kind.memory <= 60
        assert kind.network <= kind.link
    assert memory.SLACK.keys() == memory.LIBRARIES.keys() == {"cpu", "cuda"}
