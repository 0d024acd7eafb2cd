"""Counts the faults that tests inject, for benchmarks/results/faults.md (`make campaign`).

CAMPAIGN_LOG=campaign.jsonl python -m pytest ...
python tests/helpers/tally.py campaign.jsonl benchmarks/results/reliability.json
"""

import json
import os
import platform
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from datetime import date
from pathlib import Path

CAMPAIGN = os.environ.get("CAMPAIGN") == "1"


def in_campaign(test: Callable) -> Callable | None:
    """Returns the test in a campaign, otherwise None. For slow tests that have a fast variant."""
    return test if CAMPAIGN else None


def campaign(variable: str, few: int, many: int) -> int:
    """Returns the number of trials: `few` in `make test`, `many` in a campaign."""
    return int(os.environ.get(variable, many if CAMPAIGN else few))


def trials(few: int, many: int) -> Callable:
    """Returns settings of a hypothesis test: number of examples, the same examples in each run, on
    any machine."""
    from hypothesis import HealthCheck, settings

    slow = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    return settings(max_examples=many if CAMPAIGN else few, derandomize=True, **slow)


def tally(fault: str, number: int = 1, **measurements: float) -> None:
    """Appends a count of a type of fault to the file CAMPAIGN_LOG, if this variable is set.

    measurements: of these trials, such as seconds=1.5. The summary has the largest of each.
    """
    if log := os.environ.get("CAMPAIGN_LOG"):
        with open(log, "a", encoding="utf-8") as file:
            file.write(json.dumps({"fault": fault, "number": number} | measurements) + "\n")


def summary(lines: list[str]) -> dict[str, dict[str, float]]:
    """Returns for each type of fault the trials that passed and the largest of each measurement."""
    found = defaultdict(lambda: {"passed": 0})
    for row in map(json.loads, lines):
        of_fault = found[row.pop("fault")]
        of_fault["passed"] += row.pop("number", 0)
        for key, value in row.items():
            of_fault[f"largest_{key}"] = max(value, of_fault.get(f"largest_{key}", value))
    return dict(sorted(found.items()))


def main(log: Path, result: Path) -> None:
    import numpy
    import torch

    commit = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    report = {
        "command": "make campaign",
        "date": f"{date.today()}",
        "commit": subprocess.run(commit, capture_output=True, text=True).stdout.strip(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "faults": summary(log.read_text(encoding="utf-8").splitlines()),
    }
    result.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
