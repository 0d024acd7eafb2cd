"""benchmarks/gpu: results of rows on a CPU. A row that fails or hangs loses no other row."""

import json

import pytest
from helpers.refusals import printed_keys
from helpers.runs import rows

from benchmarks import gpu
from benchmarks.gpu import Check, GpuBenchmark, Skipped
from benchmarks.ranks import profile

SMALL = ("device=cpu", "model=gpt2-nano", "batch_size=2", "length=16")


@pytest.fixture
def run(in_process, tmp_path, monkeypatch):
    """run(*arguments, **rows) -> (exit code, lines of the table, printed keys, gpu.json). Each row
    is a function that gets the Check."""

    def run_rows(*arguments, **rows):
        monkeypatch.setattr(gpu, "ROWS", [*rows])
        monkeypatch.setattr(GpuBenchmark.model_fields["rows"], "default", [*rows])
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


def is_gone(pid):
    """Whether the process has ended; nothing waits for that of another session."""
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def skipped(check):
    raise Skipped("no such device")


def test_a_row_that_fails_or_hangs_loses_no_other_row(run, monkeypatch):
    monkeypatch.setattr(gpu, "ROW_SECONDS", 1)
    starts = (
        "import os, time; pid = os.fork(); pid or os.setsid(); print(os.getpid(), flush=True); "
    )
    code, table, keys, results = run(
        "commit=abc",
        exits=program("print(6); print(7); raise SystemExit(3)"),
        hangs=program(starts + "time.sleep(600)"),
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
    assert found["exits"]["output"] == "6\n7\n"
    pids = found["hangs"]["output"].split()
    assert len(pids) == 2
    for pid in pids:  # also of the process in another session
        assert is_gone(int(pid))
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
    code, _, err = in_process(gpu.main, tmp_path, *SMALL, "rows=[compiled,quick]")
    assert (code, printed_keys(err)) == (2, ["rows"])


@pytest.fixture
def check(tmp_path):
    settings = GpuBenchmark(device="cpu", model="gpt2-nano", batch_size=2, length=16)
    return Check(settings, tmp_path)


def test_what_makes_a_training_fail(check, trained, monkeypatch):
    check.runs["run"] = trained
    parts = {"total": 4e9, "libraries": 0}
    monkeypatch.setattr(check, "plan", lambda *_: parts)
    good = check.figures("run", [], falls=None)
    assert not good["problems"]
    assert good["tokens_per_second"] > 0
    assert good["losses"] == [row["train/loss"] for row in rows(check.runs["run"])[1:]]
    monkeypatch.setattr(check, "on_gpu", True)
    assert good["peak_gb"] < 3
    assert len(check.figures("run", [], falls=None)["problems"]) == 1
    assert len(check.figures("run", [], falls=9)["problems"]) == 2


@pytest.mark.parametrize("loss", [8.0, 8.01, 8.1])
def test_losses_of_the_same_steps_are_compared(check, tmp_path, loss):
    for name, lines in (("one", [(5, 8.0), (10, 7.0)]), ("other", [(5, loss)])):
        folder = check.runs[name] = tmp_path / name
        folder.mkdir()
        text = "".join(f'{{"step": {step}, "train/loss": {value}}}\n' for step, value in lines)
        (folder / "metrics.jsonl").write_text(text)
    found = check.compare("other", "one", 2e-3, {"note": "", "problems": []})
    assert found["loss_difference"] == pytest.approx(loss / 8 - 1)
    assert len(found["problems"]) == (loss == 8.1)
    with pytest.raises(Skipped):
        check.compare("other", "missing", 2e-3, {})


def kernel(name, start, milliseconds, cat="kernel"):
    return {"ph": "X", "cat": cat, "name": name, "ts": start * 1e3, "dur": milliseconds * 1e3}


def test_a_profile_by_class_of_kernel():
    """Of three steps: communication from 4 to 8 overlaps with a product from 2 to 5."""
    found = profile(
        [
            kernel("nvjet_tst_128x256_64x4_TNT", 2, 3),
            kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)", 4, 4),
            kernel("triton_poi_fused__scaled_dot_product_cudnn_attention_transpose_7", 8, 1),
            kernel("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", 11, 6),
            kernel("_cross_entropy_0", 17, 2),
            kernel("at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", 19, 1),
            kernel("Memcpy HtoD (Pinned -> Device)", 20, 1, "gpu_memcpy"),
            kernel("cudaStreamSynchronize", 1, 9, "cuda_runtime"),
            kernel("ProfilerStep#3", 0, 30, "user_annotation"),
            {"ph": "i", "name": "Iteration Start", "ts": 0},
        ]
    )
    milliseconds = {name: 3 * ms for name, ms in found["ms"].items()}
    names = ("communication", "products", "norms and elementwise", "attention", "loss")
    expected = dict(zip((*names, "optimizer", "copies"), (4, 3, 1, 6, 2, 1, 1), strict=True))
    assert milliseconds == pytest.approx(expected)
    assert 3 * found["exposed_ms"] == pytest.approx(3)  # from 5 to 8
    assert 3 * found["idle_ms"] == pytest.approx(2)  # from 9 to 11
    assert 3 * found["kernels"] == pytest.approx(7)
    assert 3 * found["synchronisations"] == pytest.approx(1)
    assert found["sent"] == pytest.approx({"allreduce": 1 / 3})
