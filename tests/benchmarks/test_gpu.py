"""benchmarks/gpu: a table of several commands on a CPU. A command that fails loses no other row."""

import json

import pytest
from helpers.refusals import printed_keys

from benchmarks import gpu

SMALL = ("device=cpu", "models=[gpt2-nano]", "batch_size=2", "length=16")


@pytest.fixture
def run(in_process, tmp_path, monkeypatch):
    """run(**commands) -> (exit code, lines of the table, printed keys, rows of gpu.json)."""

    def run_rows(**commands):
        monkeypatch.setattr(gpu, "COMMANDS", commands)
        code, out, err = in_process(gpu.main, tmp_path, *SMALL)
        table = out.splitlines()[2:]
        return code, table, printed_keys(err), json.loads((tmp_path / "gpu.json").read_text())

    return run_rows


BENCHMARK = """import json, sys
rows = [{"name": "clearhead", "tokens_per_second": 2.0}]
with open(sys.argv[1] + "/out.json", "w") as file:
    json.dump({"tables": {"1 x 2": {"rows": rows}}}, file)
"""


def test_a_command_that_fails_loses_no_other_row(run, tmp_path):
    (tmp_path / "benchmark.py").write_text(BENCHMARK)
    code, table, keys, results = run(
        tests="-c 'print(6); print(7); raise SystemExit(3)'",
        comparison=f"{tmp_path}/benchmark.py {{folder}}",
        generation="-c 'import time'",
    )
    assert (code, keys[-1]) == (4, "rows")
    assert {"commit", "processor", "torch"} <= results.keys()
    failed, measured, empty = results["rows"]
    assert [row["exit_code"] for row in results["rows"]] == [3, 0, 0]
    assert measured["figures"] == [{"name": "1 x 2, clearhead", "tokens_per_second": 2.0}]
    assert failed["output"] == "6\n7\n"
    assert failed["figures"] == empty["figures"] == []
    assert [line.count(" | ") for line in table] == [4, 4, 4]
