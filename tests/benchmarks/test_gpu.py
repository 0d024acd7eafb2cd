"""benchmarks/gpu: results of rows on a CPU. A row that fails or hangs loses no other row."""

import contextlib
import io
import json
import shlex

import pytest
import torch
from helpers.refusals import printed_keys
from hydra.core.hydra_config import HydraConfig
from safetensors.torch import save_file

import train
from benchmarks import gpu
from benchmarks.gpu import Check, GpuBenchmark, Skipped

SMALL = ("device=cpu", "model=gpt2-nano", "batch_size=2", "length=16")


@pytest.fixture
def run(in_process, tmp_path, monkeypatch):
    """run(*arguments, **rows) -> (exit code, lines of the table, printed keys, gpu.json). Each row
    is a function that gets the Check."""

    def run_rows(*arguments, **rows):
        monkeypatch.setattr(gpu, "ROWS", tuple(rows))
        for name, row in rows.items():
            monkeypatch.setattr(Check, name, row, raising=False)
        given = (*SMALL, f"rows=[{','.join(rows)}]", *arguments)
        code, out, err = in_process(gpu.main, tmp_path, *given)
        errors = "\n".join(line for line in err.splitlines() if line.startswith("rows="))
        results = json.loads((tmp_path / "gpu.json").read_text())
        return code, out.splitlines()[2:], printed_keys(errors), results

    return run_rows


def program(text):
    return lambda check: check.run(f"-c '{text}'")


def skipped(check):
    raise Skipped("no such device")


def test_a_row_that_fails_or_hangs_loses_no_other_row(run, monkeypatch):
    monkeypatch.setattr(gpu, "ROW_SECONDS", 1)
    monkeypatch.setattr(gpu, "END_SECONDS", 0.2)
    ignores = 'import signal, time; signal.signal(15, signal.SIG_IGN); print("hm", flush=True); '
    code, table, keys, results = run(
        "commit=abc",
        exits=program("print(6); print(7); raise SystemExit(3)"),
        hangs=program(ignores + "time.sleep(600)"),
        raises=lambda check: check.no_such_attribute,
        skips=skipped,
        differs=lambda check: {"mfu": 0.5, "note": "1", "problems": ["2"]},
        measures=lambda check: {"figures": [{"name": "ours", "tokens_per_second": 2.0}]},
    )
    assert (code, keys) == (4, ["rows"])
    assert results["commit"] == "abc"
    assert {"processor", "torch"} <= results.keys()
    found = {row["name"]: row for row in results["rows"]}
    expected = ["fail", "fail", "fail", "skipped", "fail", "pass"]
    assert [row["result"] for row in found.values()] == expected
    assert (found["exits"]["output"], found["hangs"]["output"]) == ("6\n7\n", "hm\n")
    assert "3" in found["exits"]["note"]
    assert found["skips"]["note"] == "no such device"
    assert found["differs"]["mfu"] == 0.5
    assert [line.count(" | ") for line in table] == [7] * 7
    assert " 2 " in table[-1]


@pytest.mark.parametrize("least", [20, 0.1])
def test_rows_without_time_are_not_started_or_are_stopped(run, monkeypatch, tmp_path, least):
    monkeypatch.setattr(gpu, "LEAST_SECONDS", least)
    row = program(f'import time; open("{tmp_path}/started", "w"); time.sleep(600)')
    code, _, keys, results = run("minutes=0.05", first=row, second=row)
    assert (code, keys) == (0, [])
    assert [row["result"] for row in results["rows"]] == ["skipped", "skipped"]
    assert (tmp_path / "started").exists() == (least < 1)


def test_an_unknown_row_is_refused(in_process, tmp_path):
    code, _, err = in_process(gpu.main, tmp_path, *SMALL, "rows=[eager,quick]")
    assert (code, printed_keys(err)) == (2, ["rows"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A Check that has run real rows, and the rows."""
    settings = GpuBenchmark(device="cpu", model="gpt2-nano", batch_size=2, length=16)
    check = Check(settings, tmp_path_factory.mktemp("check"))
    names = ("compiled", "eager", "fp16", "resume")
    with pytest.MonkeyPatch.context() as patch:

        def train_in_this_process(arguments, *_):
            patch.setattr("sys.argv", shlex.split(arguments))
            with contextlib.redirect_stdout(io.StringIO()) as output:
                train.main()
            HydraConfig.instance().cfg = None  # as in a process that has not run a command
            return 0, output.getvalue()

        patch.setattr(gpu, "run_python", train_in_this_process)
        patch.setattr(gpu, "LOSS_FALLS", 0.2)  # a smaller model, few tokens
        return check, {name: check.row(name) for name in names}


def test_trainings_on_a_cpu(trained):
    _, rows = trained
    results = {name: row["result"] for name, row in rows.items()}
    names = ("eager", "resume")
    assert results == dict.fromkeys(rows, "skipped") | dict.fromkeys(names, "pass"), rows
    assert len(rows["eager"]["losses"]) == 4
    assert all(rows[name]["tokens_per_second"] > 0 for name in names)
    assert rows["resume"]["loss_difference"] == rows["resume"]["weight_difference"] == 0
    assert len(rows["resume"]["commands"]) == 2


def test_what_makes_a_training_fail(trained, monkeypatch):
    check, _ = trained
    settings = check.overrides(compile=False)
    monkeypatch.setattr(gpu, "LOSS_FALLS", 0.2)
    good = check.figures("eager", settings)
    assert not good["problems"]
    parts = {"total": 1e9 * good["peak_gb"] * 10, "libraries": 0}
    monkeypatch.setattr(check, "on_gpu", True)
    monkeypatch.setattr(check, "plan", lambda *_: parts)
    assert len(check.figures("eager", settings)["problems"]) == 1
    monkeypatch.setattr(gpu, "LOSS_FALLS", 9)
    assert len(check.figures("eager", settings)["problems"]) == 2


@pytest.mark.parametrize(("loss", "weight"), [(8.0, 1.0), (8.01, 1.0), (8.1, 1.0), (8.0, 2.0)])
def test_a_resumed_training_must_have_the_same_losses(trained, tmp_path, loss, weight):
    check, _ = trained
    for name, *values in (("eager", 8.0, 1.0), ("resume", loss, weight)):
        folder = check.runs[name] = tmp_path / name
        (folder / "checkpoints/last").mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(f'{{"step": 5, "train/loss": {values[0]}}}\n')
        save_file({"w": torch.ones(2) * values[1]}, folder / "checkpoints/last/model.safetensors")
    found = check.compare("resume", "eager", {"note": "", "problems": []})
    assert len(found["problems"]) == (loss == 8.1)
    assert found["loss_difference"] == pytest.approx(loss / 8 - 1)
    assert found["weight_difference"] == weight - 1
