"""`make gpu-check` and `make gpus-check` on a CPU: each row runs its programs.

Speeds and times are not checked. CAMPAIGN=1 adds the rows in which torchrun waits 30 seconds.
Programs that need no torchrun run in forks of one process.
"""

import json
import shlex

import pytest
from helpers import REPOSITORY
from helpers.tally import CAMPAIGN

from benchmarks import gpu, gpus

SMALL = ["device=cpu", "model=gpt2-nano", "large=gpt2-nano", "batch_size=4", "length=16"]
FORKED = """
import runpy, sys
sys.argv = {words}
runpy.run_path("{file}", run_name="__main__")
"""


@pytest.fixture
def dry_run(in_process, tmp_path, server, monkeypatch):
    """dry_run(main, *arguments) -> the rows by name."""
    really_run = gpu.Check.run

    def run(self, program, strategy="single", ranks=None, act=None, **variables):
        words = shlex.split(program.replace("-m benchmarks.ranks", "benchmarks/ranks.py"))
        if act or not words[0].endswith(".py"):
            return really_run(self, program, strategy, ranks, act, **variables)
        count = 1 if strategy == "single" else self.ranks
        code = FORKED.format(words=words, file=REPOSITORY / words[0])
        server.run_ranks(tmp_path, code=code, codes=[0] * count, faults=[None] * count, **variables)
        return 0

    monkeypatch.setattr(gpu.Check, "run", run)
    monkeypatch.setattr(gpu, "STEPS", 8)
    more = "model.emb_dim=32 model.num_layers=2 model.num_heads=2 optimizer.lr=1e-2"
    monkeypatch.setattr(gpu, "TRAIN", f"{gpu.TRAIN} {more}")
    monkeypatch.setattr(gpu, "FSDP_SPEED", 0)
    for name, value in {"SPEED": 0, "STOP_SECONDS": 1e9, "LOST_SECONDS": 1e9}.items():
        monkeypatch.setattr(gpus, name, value)
    monkeypatch.setattr(gpus, "VALIDATION", 400)
    few = dict([*gpus.ChecksOfRanks.variants_of.items()][:1])
    monkeypatch.setattr(gpus.ChecksOfRanks, "variants_of", few)

    def run_rows(main, *arguments):
        given = (*SMALL, "minutes=60", "out=out.json", *arguments)
        code, out, err = in_process(main, tmp_path, *given)
        results = json.loads((tmp_path / "out.json").read_text())
        found = {row["name"]: row for row in results["rows"]}
        failed = {name: row["note"] for name, row in found.items() if row["result"] == "fail"}
        assert (code, failed) == (0, {}), err
        assert len(out.splitlines()) >= 2 + len(found)
        return found

    return run_rows


def test_rows_of_one_device(dry_run):
    found = dry_run(gpu.main)
    assert [name for name, row in found.items() if row["result"] == "skipped"] == ["fp16"]
    assert [*found] == gpu.ROWS
    assert found["resume"]["loss_difference"] == 0
    assert found["fsdp"]["loss_difference"] < 1e-5
    assert found["profile"]["ms"]["products"] > 0
    assert len(found["variants"]["figures"]) == 3


def test_rows_of_two_ranks(dry_run):
    rows = [name for name in gpus.ROWS if CAMPAIGN or name not in ("sigkill", "sigstop")]
    found = dry_run(gpus.main, f"rows=[{','.join(rows)}]")
    assert [*found] == rows
    assert {row["result"] for row in found.values()} == {"pass"}
    for name in ("same_losses", "muon"):
        for figures in found[name]["figures"][1:]:
            assert figures["loss_difference"] < 1e-5
    sent = [figures["sent"] for figures in found["micro_batches"]["figures"]]
    assert sent[0]["allreduce"] > 0
    assert sent[1]["allgather"] > sent[1]["reducescatter"] > 0
