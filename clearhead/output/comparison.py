"""Comparison of runs: reads run directories and groups the runs into rows.

    rows = summarize([read(folder, "val/loss") for folder in folders], "val/loss")

Runs that differ only in their seed share a row; the row with the best metric is first. Rows with
different texts or tokenizers are apart, because their losses are not comparable. Used by sweeps
(reporting/sweep.py) and scripts/compare.py, which show the rows as tables (comparison_table.py) and
as a chart (comparison_plot.py). Reads run.json, metrics.jsonl and validation.json.
"""

import functools
import glob
import itertools
import json
import math
import os
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType

import yaml

from clearhead.checkpoint.run_directory import (
    VALIDATION_JSON,
    final_validation,
    settings_of,
    summarized_step,
)
from clearhead.config.automatic import automatic_warmup
from clearhead.config.stored import SETTINGS_JSON
from clearhead.config.yaml_files import CONFIGS, flat
from clearhead.errors import as_yaml, sanitize
from clearhead.files import last_values, read_object, read_rows
from clearhead.output.charts import minimum_before_rise, number
from clearhead.tokens import VOCABULARIES

# Settings and groups that do not change what a run learns, or only by rounding. The kernel does if
# it computes other scores.
NOT_LEARNING = {"name", "debug", "runs_dir", "parallel", "lens", "wandb", "data.verify"}
NOT_LEARNING |= {"model.attention"} | {
    f"trainer.{key}"
    for key in (
        *("patience", "micro_batch_size", "compile", "device", "activation_checkpointing"),
        *("profile", "eval_every", "eval_windows", "log_every", "save_every", "keep", "threads"),
        *("sample_prompt", "sample_tokens", "on_nonfinite", "max_skips", "resume"),
    )
}
# If all of these differ between rows, the table has one column for them.
SHAPE = ("model.num_layers", "model.num_heads", "model.emb_dim")
CHECKSUM = "data.checksum"  # of the tokens, from run.json
HIGHER_IS_BETTER = ("val/accuracy", "train/tokens_per_second", "train/mfu")  # others: lower

Points = list[tuple[int, float]]  # (tokens so far, metric)


@dataclass
class ComparedRun:
    folder: Path
    settings: dict[str, object]  # by dotted name
    metrics: dict[str, object]  # last value of each metric and of step, without step 0
    points: Points  # includes step 0; empty if there is no value after step 0
    is_finished: bool
    # Of a finished run, from validation.json: the metric on more windows than the last point, its
    # values on the parts of the text, and the number of windows.
    final: float | None = None
    parts: list[float] = field(default_factory=list)
    windows: int = 0
    lowest: float | None = None  # lowest value, if the validation loss has risen since

    @property
    def value(self) -> float:
        """Returns the last value of the metric."""
        return self.points[-1][1] if self.final is None else self.final

    @property
    def seed_and_values(self) -> tuple:
        """Returns what equals that of another run with the same settings if it is a repetition."""
        return self.settings.get("seed"), self.points, self.final

    @property
    def model(self) -> str:
        """Returns the name of the file in configs/model with this shape, or the shape."""
        shape = [self.settings.get(key) for key in SHAPE]
        text = "{} layers, {} heads, width {}".format(*shape)
        return next((name for name, known in models().items() if known == shape), text)

    @property
    def values(self) -> dict[str, object]:
        """Returns metrics, settings and the names of model and optimizer."""
        groups = {"model": self.model, "optimizer": self.settings.get("optimizer.name")}
        return self.metrics | self.settings | groups


@dataclass
class ComparisonRow:
    """The runs that differ at most in their seed."""

    text: str  # settings of text and tokenizer
    settings: dict[str, object]  # other settings in which any runs differ
    model: str
    runs: list[str]
    seeds: list[object]
    unfinished: list[str]
    tokens: int  # maximum over the runs
    curves: list[Points]
    values: list[float]  # last value of each run
    mean: float  # of values; NaN if any value is NaN
    tokens_to_target: list[int | None]  # of each run; empty without a target
    parts: list[list[float]] = field(default_factory=list)  # of each run, see ComparedRun
    windows: list[int] = field(default_factory=list)  # of each run; 0: unknown
    # Lowest value of each run; None: the validation loss has not risen since.
    lowest: list[float | None] = field(default_factory=list)
    windows_error: float | None = None  # standard error of the mean over the parts of the text
    repeated: list[str] = field(default_factory=list)  # equal to one of `runs`; not counted
    difference: "Difference | None" = None  # from the first row of the table


@dataclass
class Difference:
    """Mean of the differences between the values of two rows, paired by seed.

    The standard error has two parts: of the seeds, and of the parts of the validation text.
    """

    mean: float
    standard_error: float
    p: float  # two-sided, of the paired t-test
    pairs: int


def read(folder: Path, metric: str) -> ComparedRun:
    """Reads a run directory. Raises ValueError for any other directory, and for files with values
    of a wrong type."""
    settings = flat(settings_of(folder) or {})
    stored = read_object(folder / SETTINGS_JSON)
    settings[CHECKSUM] = stored.get("data")
    # The name of a trained tokenizer has a checksum. It has the size of the vocabulary.
    if isinstance(name := stored.get("tokenizer"), str):
        settings["data.tokenizer"] = name
    max_steps = settings.get("trainer.max_steps", ...)
    if type(max_steps) not in (int, NoneType):
        raise ValueError("run.json is missing or damaged")
    log, points = folder / "metrics.jsonl", []
    rows = read_rows(log, metric, "train/tokens")
    for row in rows:
        tokens = row.get("train/tokens")
        if metric in row and type(tokens) is int and 0 <= tokens < 2**63:
            points.append((tokens, number(row[metric])))
    if points and points[-1][0] == 0:  # only step 0
        points = []
    metrics = last_values(log) if rows else {}
    last = rows[-1]["step"] if rows else -1
    is_finished = last == summarized_step(folder) or (max_steps is not None and last >= max_steps)
    run = ComparedRun(folder, settings, metrics, points, is_finished)
    if metric.startswith("val/") and metric not in HIGHER_IS_BETTER:
        _, run.lowest = minimum_before_rise(points) or (0, None)
    final, name = final_validation(folder, last), metric.removeprefix("val/")
    if metric.startswith("val/") and name in final:
        try:
            run.final, run.windows = number(final[name]), int(final["windows"])
            run.parts = [number(part[name]) for part in final["parts"]]
        except (TypeError, KeyError, OverflowError) as error:
            raise ValueError(f"{VALIDATION_JSON} is damaged") from error
    return run


def runs_of_sweep(folder: Path) -> list[Path]:
    """Returns the run directories of the jobs of a sweep; [] if `folder` is not a sweep's."""
    runs = [read_object(path).get("run") for path in sorted(folder.glob("*/result.json"))]
    return [Path(run) for run in runs if isinstance(run, str)]


def matching_paths(pattern: str) -> list[Path]:
    """Returns the paths that a pattern matches. The directory of a sweep stands for its runs."""
    # The name of a directory may contain characters such as * or [.
    found = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern))
    return [run for path in map(Path, found) for run in runs_of_sweep(path) or [path]]


@functools.cache
def models() -> dict[str, list[object]]:
    """Returns the values of SHAPE of each file in configs/model."""
    paths = sorted((CONFIGS / "model").glob("*.yaml"))
    files = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in paths}
    keys = [key.removeprefix("model.") for key in SHAPE]
    return {
        name: [(files["gpt2-small"] | values)[key] for key in keys]
        for name, values in files.items()
    }


def differing(runs: list[ComparedRun], swept: Collection[str] = ()) -> list[str]:
    """Returns the settings that differ between the runs, except name and seed. Includes settings
    that do not change what a run learns only if they or their group are in `swept`."""
    from attention import SCORES

    equal, hidden = shared(runs), NOT_LEARNING
    if SCORES.keys() & {run.settings.get("model.attention") for run in runs}:
        hidden = hidden - {"model.attention"}
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in equal)
    keys = {name: {name, name.partition(".")[0]} for name in names if name not in ("seed", "name")}
    return [name for name, of in keys.items() if of & set(swept) or not of & hidden]


def shared(runs: list[ComparedRun]) -> dict[str, object]:
    """Returns the settings that are equal in all runs."""
    return {
        name: value
        for name, value in runs[0].settings.items()
        if all(name in run.settings and run.settings[name] == value for run in runs)
    }


def data_settings(run: ComparedRun, metric: str) -> dict[str, object]:
    """Returns the settings of text and tokenizer for a metric. Values of runs are comparable if
    these are equal. Bits per byte do not depend on the tokenizer."""
    has_own = metric.startswith("val/") and run.settings.get("data.val_path")
    names = ["data.val_path"] if has_own else ["data.path", "data.synthetic"]
    if not metric.endswith("/bits_per_byte"):
        names += ["data.tokenizer"] if has_own else ["data.tokenizer", CHECKSUM]
    return {name: run.settings.get(name) for name in names}


def summarize(
    runs: list[ComparedRun], metric: str, target: float | None = None, swept: Collection[str] = ()
) -> list[ComparisonRow]:
    """Returns one row per group of runs that differ only in their seed; omits runs without the
    metric, and runs that repeat another one exactly. Rows are sorted by text and tokenizer, and
    then by the metric, best first."""
    names, sign = differing(runs, swept), -1 if metric in HIGHER_IS_BETTER else 1
    groups: dict[str, list[ComparedRun]] = {}
    repeated: dict[str, list[str]] = {}
    for run in filter(lambda run: run.points, runs):
        text = data_settings(run, metric)
        settings = {name: run.settings.get(name) for name in names if name not in text}
        key = json.dumps([text, settings])
        group = groups.setdefault(key, [])
        if run.seed_and_values in [other.seed_and_values for other in group]:
            repeated.setdefault(key, []).append(run.folder.name)
        else:
            group.append(run)
    rows, texts = [], [json.loads(key)[0] for key in groups]
    for key, group in groups.items():
        text, settings = json.loads(key)
        last = [run.value for run in group]
        reached = [] if target is None else [tokens_to(target, run.points, sign) for run in group]
        row = ComparisonRow(
            text=text_title(text, texts),
            settings=settings,
            model=group[0].model,
            runs=[run.folder.name for run in group],
            seeds=[run.settings.get("seed") for run in group],
            unfinished=[run.folder.name for run in group if not run.is_finished],
            repeated=repeated.get(key, []),
            tokens=max(run.points[-1][0] for run in group),
            curves=[run.points for run in group],
            values=last,
            mean=statistics.fmean(last),
            tokens_to_target=reached,
            parts=[run.parts for run in group],
            windows=[run.windows for run in group],
            lowest=[run.lowest for run in group],
        )
        row.windows_error = standard_error(means_of_parts(row.parts))
        rows.append(row)
    rows.sort(key=lambda row: (row.text, math.isnan(row.mean), sign * row.mean))
    for first, *others in by_text(rows):
        for row in others:
            row.difference = difference(row, first, metric.startswith("val/"))
    return rows


def difference(row: ComparisonRow, first: ComparisonRow, of_text: bool) -> Difference | None:
    """Compares two rows by the paired t-test, over the seeds that each row has exactly once. None
    if there are fewer than three such seeds, if a value is NaN or infinite, or if the values on the
    parts of the text are not known.

    of_text: whether the runs were validated on the same text. Then its error does not become
    smaller with more seeds: it is that of the differences on the parts of the text, and the degrees
    of freedom are those of Welch and Satterthwaite.
    """
    once = [seed for seed in row.seeds if row.seeds.count(seed) == first.seeds.count(seed) == 1]
    runs = [[r.seeds.index(seed) for seed in once] for r in (row, first)]
    pairs = [[r.values[n] for n in ns] for r, ns in zip((row, first), runs, strict=True)]
    samples = [[a - b for a, b in zip(*pairs, strict=True)]]
    if len(once) < 3 or not all(map(math.isfinite, samples[0])):
        return None
    if of_text:
        parts = [[r.parts[n] for n in ns] for r, ns in zip((row, first), runs, strict=True)]
        means = [means_of_parts(of_row) for of_row in parts]
        if min(map(len, means)) < 2 or len(means[0]) != len(means[1]):
            return None
        samples.append([a - b for a, b in zip(*means, strict=True)])
    from scipy.special import stdtr  # Student's t distribution; importing scipy.stats takes seconds

    variances = [(standard_error(sample) ** 2, len(sample) - 1) for sample in samples]
    total = sum(variance for variance, _ in variances)
    freedom = total**2 / (sum(variance**2 / df for variance, df in variances) or math.inf)
    mean, error = statistics.fmean(samples[0]), math.sqrt(total)
    p_value = 2 * stdtr(max(freedom, 1), -abs(mean) / (error or 1e-300))
    return Difference(mean, error, float(p_value), len(once))


def means_of_parts(runs: list[list[float]]) -> list[float]:
    """Returns for each part of the text the mean over the runs; [] if the runs have different
    numbers of parts or a value is not finite."""
    if len(set(map(len, runs))) != 1 or not all(math.isfinite(x) for run in runs for x in run):
        return []
    return [statistics.fmean(of_part) for of_part in zip(*runs, strict=True)]


def standard_error(values: Sequence[float]) -> float | None:
    """Returns the standard error of the mean of independent values; None for a single value or
    values that are not finite."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    return statistics.stdev(values) / math.sqrt(len(values))


def tokens_to(target: float, points: Points, sign: int) -> int | None:
    """Returns the tokens until the metric first was at or below the target (sign -1: at or above);
    None if never."""
    return next((tokens for tokens, value in points if sign * value <= sign * target), None)


def pairs(settings: dict[str, object]) -> str:
    return sanitize(", ".join(f"{key}={as_yaml(v)}" for key, v in settings.items()), keep="")


def text_title(text: dict[str, object], texts: list[dict]) -> str:
    """Returns the settings of a text; its checksum only if another text has these settings."""
    same = [each for each in texts if each | {CHECKSUM: 0} == text | {CHECKSUM: 0}]
    names = text.keys() - ({CHECKSUM} if all(each == text for each in same) else set())
    return pairs({name: value for name, value in text.items() if name in names and value})


def by_text(rows: list[ComparisonRow]) -> list[list[ComparisonRow]]:
    """Returns the rows in one list for each text and tokenizer."""
    return [list(group) for _, group in itertools.groupby(rows, key=lambda row: row.text)]


def automatic(settings: dict[str, object]) -> dict[str, object]:
    """Returns the values that follow from other settings."""
    steps = settings.get("trainer.max_steps")
    return {
        "trainer.warmup_steps": automatic_warmup(steps) if steps else None,
        "model.vocab_size": VOCABULARIES.get(str(settings.get("data.tokenizer"))),
    }
