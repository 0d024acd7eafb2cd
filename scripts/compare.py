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
from training.errors import words

VARIES = ("seed", "name")  # between runs of one row
# Of what a run may change when it goes on, what makes it learn otherwise all the same.
LEARNING = ("seed", "data.path", "trainer.max_steps", "trainer.init_from")


@dataclass
class CompareConfig:
    """python -m scripts.compare runs='runs/*' [target=LOSS] [KEY=VALUE ...]

    A table of runs: one row for each setting that differs, seeds together, the lowest metric first.
    """

    runs: str | list[str] = field(
        default="runs/*", metadata={"help": "run directories: a pattern, or [A,B,...]"}
    )
    metric: str = field(default="val/loss", metadata={"help": "what of metrics.jsonl to compare"})
    target: float | None = field(
        default=None, metadata={"help": "also the tokens until a row of the log is no higher"}
    )
    out: str = field(default="", metadata={"help": "a JSON file to write the figures to"})
    debug: bool = field(default=False, metadata={"help": "true: errors with their traceback"})

    def problems(self) -> list[Problem]:
        """What does not fit: (key, value, cause, fix) for each problem; empty when all is well."""
        above = Path(self.out).parent
        if self.out and (Path(self.out).is_dir() or not above.is_dir()):
            cause = "is a folder" if Path(self.out).is_dir() else f"{above} is no folder"
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
            "settings": {
                k: bare(k, v) for k, v in runs[0].settings.items() if k not in (*names, *VARIES)
            },
            "rows": rows,
        }
        write(Path(settings.out), written)
        print(f"written to {settings.out}", file=sys.stderr)


def write(path: Path, written: dict) -> None:
    try:
        text = json.dumps(without_nan(written), indent=1, default=str)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        refuse([("out", str(path), error.strerror or str(error), "write it elsewhere")])


def without_nan(value: object) -> object:
    """JSON knows no nan: null."""
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def bare(key: str, value: object) -> object:
    """Of the machine's folders, names alone."""
    return Path(value).name if key.endswith("path") and isinstance(value, str) else value


def found(settings: CompareConfig) -> list[Run]:
    """The runs that have the metric; a line on stderr for each of the others."""
    patterns = [settings.runs] if isinstance(settings.runs, str) else settings.runs
    runs, metrics = [], set()
    for pattern in patterns:
        folders = sorted(folder for folder in map(Path, glob.glob(pattern)) if folder.is_dir())
        if not folders:
            print(f"{pattern}: no such folder", file=sys.stderr)
        for folder in folders:
            try:
                run, names = read(folder, settings.metric)
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                print(f"{folder}: left out, is no run ({words(error)})", file=sys.stderr)
                continue
            metrics |= names
            if run.points:
                runs.append(run)
            else:
                print(
                    f"{folder}: left out, has no {settings.metric} after its start", file=sys.stderr
                )
    if runs:
        return runs
    if metrics:
        fix = f"use one of {', '.join(sorted(metrics))}"
        refuse([("metric", settings.metric, "none of the runs has it", fix)])
    value = settings.runs if isinstance(settings.runs, str) else f"[{','.join(patterns)}]"
    refuse([("runs", value, "no run's directory", "use runs='runs/*' where training has been")])


def read(folder: Path, metric: str) -> tuple[Run, set[str]]:
    """A run, and the names of all that its log has. ValueError and others where it is none."""
    import yaml

    from training.chart import number
    from training.report import read_rows, read_text
    from training.resume import FREE_TO_CHANGE

    try:
        config = yaml.safe_load(read_text(folder / "config.yaml"))
    except yaml.YAMLError:
        config = None
    if not isinstance(config, dict):
        raise ValueError("config.yaml is missing or damaged")
    settings = {
        name: value
        for name, value in flat(config).items()
        if name in LEARNING or not FREE_TO_CHANGE & {name, name.split(".")[0]}
    }
    points, names = [], set()
    of_a_step = config["trainer"]["batch_size"] * config["data"]["max_length"]
    for row in (rows := read_rows(folder / "metrics.jsonl")):
        if row["step"] == 0:
            continue  # nothing was learned yet
        names |= row.keys() - {"step"}
        if metric in row:
            points.append((row["step"] * of_a_step, number(row[metric])))
    last = rows[-1]["step"] if rows else 0
    return Run(folder.name, settings, points, config["trainer"]["max_steps"], last), names


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
        spread = "some are nan" if math.isnan(row["mean"]) else spread
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
