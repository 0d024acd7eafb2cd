"""Which settings were better? A table of some runs, from their directories.

    python train.py -m optimizer=adamw,muon optimizer.lr=3e-3,1e-2 seed=0,1,2
    python -m scripts.compare runs='runs/*' target=1.9

Runs that differ by their seed alone stand in one row. The settings in which any two runs differ
make the columns; the best row comes first. Reads config.yaml and metrics.jsonl, changes nothing.
"""

import datetime
import glob
import json
import math
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

from scripts.benchmark_data import machine
from training.command import settings_command
from training.config import Problem, refuse

VARIES = ("seed", "name")  # between runs of one row
NOT_LEARNING = ("debug", "wandb", "lens")  # groups and settings that change no weight


@dataclass
class CompareConfig:
    """python -m scripts.compare runs='runs/*' [target=LOSS] [KEY=VALUE ...]"""

    runs: str | list[str] = field(
        default="runs/*", metadata={"help": "run directories: a pattern, or [A,B,...]"}
    )
    metric: str = field(default="val/loss", metadata={"help": "what of metrics.jsonl to compare"})
    target: float | None = field(
        default=None, metadata={"help": "also the tokens until the metric is no higher than this"}
    )
    out: str = field(default="", metadata={"help": "a JSON file to write the figures to"})
    debug: bool = field(default=False, metadata={"help": "true: errors with their traceback"})

    def problems(self) -> list[Problem]:
        """What does not fit: (key, value, cause, fix) for each problem; empty when all is well."""
        if self.out and not Path(self.out).parent.is_dir():
            cause = f"{Path(self.out).parent} is no folder"
            return [("out", self.out, cause, "give a file in a folder that exists")]
        return []


@dataclass
class Run:
    """One run: its settings by dotted name, and how the metric went."""

    name: str
    settings: dict[str, object]
    points: list[tuple[int, float]]  # (tokens so far, metric)
    max_steps: int
    step: int  # the last one

    def tokens_to(self, target: float) -> int | None:
        return next((tokens for tokens, value in self.points if value <= target), None)


@settings_command(CompareConfig)
def main(settings: CompareConfig) -> None:
    runs = found(settings)
    names = differing(runs)
    rows = [summary(group, names, settings.target) for group in grouped(runs, names)]
    rows.sort(key=lambda row: (math.isnan(row["mean"]), row["mean"]))
    print(table(rows, names, settings))
    if settings.out:
        written = {
            "date": datetime.date.today().isoformat(),
            **machine(("torch",)),
            "metric": settings.metric,
            "target": settings.target,
            "settings": {k: bare(k, v) for k, v in runs[0].settings.items() if k not in names},
            "rows": rows,
        }
        Path(settings.out).write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def bare(key: str, value: object) -> object:
    """Of the machine's folders, names alone."""
    return Path(value).name if key.endswith("path") and isinstance(value, str) else value


def found(settings: CompareConfig) -> list[Run]:
    """The runs that have the metric; a line on stderr for each of the others."""
    patterns = [settings.runs] if isinstance(settings.runs, str) else settings.runs
    folders = sorted({path for pattern in patterns for path in glob.glob(pattern)})
    folders = [folder for folder in map(Path, folders) if (folder / "config.yaml").is_file()]
    runs = [read(folder, settings.metric) for folder in folders]
    for run in runs:
        if not run.points:
            print(f"{run.name}: left out, has no {settings.metric} yet", file=sys.stderr)
    if not any(run.points for run in runs):
        cause = f"no run with {settings.metric}" if runs else "no run's directory"
        value = settings.runs if isinstance(settings.runs, str) else f"[{','.join(patterns)}]"
        refuse([("runs", value, cause, "use runs='runs/*' where training has been")])
    return [run for run in runs if run.points]


def read(folder: Path, metric: str) -> Run:
    import yaml

    from training.chart import number
    from training.report import read_rows, read_text

    config = yaml.safe_load(read_text(folder / "config.yaml"))
    settings = {k: v for k, v in flat(config).items() if k.split(".")[0] not in NOT_LEARNING}
    tokens, points = 0, []
    for row in (rows := read_rows(folder / "metrics.jsonl")):
        tokens = row.get("train/tokens", tokens)
        if metric in row and row["step"] > 0:
            points.append((tokens, number(row[metric])))
    last = rows[-1]["step"] if rows else 0
    return Run(folder.name, settings, points, config["trainer"]["max_steps"], last)


def flat(tree: dict, prefix: str = "") -> dict[str, object]:
    """Settings by dotted name; lists as they are."""
    leaves: dict[str, object] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        leaves |= flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return leaves


def differing(runs: list[Run]) -> list[str]:
    """The settings in which any two runs differ, in the order of config.yaml."""
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in VARIES)
    return [n for n in names if any(run.settings.get(n) != runs[0].settings.get(n) for run in runs)]


def grouped(runs: list[Run], names: list[str]) -> list[list[Run]]:
    """Those that differ by their seed alone together."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(json.dumps([run.settings.get(n) for n in names]), []).append(run)
    return list(groups.values())


def summary(group: list[Run], names: list[str], target: float | None) -> dict:
    """What a row says: of the metric's last values mean, least and most; nan where any is."""
    last = [run.points[-1][1] for run in group]
    row = {
        "settings": {name: group[0].settings.get(name) for name in names},
        "runs": [run.name for run in group],
        "seeds": [run.settings.get("seed") for run in group],
        "unfinished": [run.name for run in group if run.step < run.max_steps],
        "tokens": max(run.points[-1][0] for run in group),
        "curves": [run.points for run in group],
        "values": last,
        "mean": statistics.fmean(last),
    }
    if target is not None:
        row["tokens_to_target"] = [run.tokens_to(target) for run in group]
    return row


def table(rows: list[dict], names: list[str], settings: CompareConfig) -> str:
    """As Markdown, to be read in a terminal too."""
    head = [
        *(heading(name, names) for name in names),
        "runs",
        "tokens",
        settings.metric,
        "least–most",
    ]
    if settings.target is not None:
        head.append(f"tokens to {settings.target:g}")
    lines = [head]
    for row in rows:
        cells = [shown(value) for value in row["settings"].values()]
        unfinished = f" ({len(row['unfinished'])} unfinished)" if row["unfinished"] else ""
        spread = f"{min(row['values']):.4f}–{max(row['values']):.4f}"
        cells += [f"{len(row['runs'])}{unfinished}", f"{row['tokens']:,}", f"{row['mean']:.4f}"]
        cells.append(spread if len(row["runs"]) > 1 else "")
        if settings.target is not None:
            cells.append(told_tokens(row["tokens_to_target"]))
        lines.append(cells)
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in (head, rule, *lines[1:])
    )


def heading(name: str, names: list[str]) -> str:
    """The shortest that says which setting it is."""
    first, last = name.split(".")[0], name.split(".")[-1]
    if last == "name":  # optimizer.name is which optimizer
        return first
    return name if sum(other.split(".")[-1] == last for other in names) > 1 else last


def shown(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def told_tokens(counts: list[int | None]) -> str:
    """The mean of those that came so far, and how many did."""
    reached = [count for count in counts if count is not None]
    if not reached:
        return "never"
    of = f" ({len(reached)} of {len(counts)})" if len(reached) < len(counts) else ""
    return f"{round(statistics.fmean(reached)):,}{of}"


if __name__ == "__main__":
    main()
