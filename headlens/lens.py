"""Attention snapshots: Lens.snapshot records all heads at a step and writes data, images and a
page.

Lens.inspect records a model without a training run.
"""

import functools
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import finding
from .ablation import COLUMNS, Ablate
from .capturing import capture, unwrapped
from .config import DEFAULT_PROMPTS, LensConfig
from .finding import counts_of_names, events, head_line, removal_lines
from .heads import ALL_NAMES, KINDS, as_csv, clearest, head_table, heads_by_name, title_of_head
from .heatmap import fitted, rgb
from .history import History, Row, atomic_write, copying_step, evenly_spaced
from .page import MAX_HISTORY
from .passages import excerpts, text_prompts
from .prompts import make_prompt, repeated_prompt
from .recording import record, record_without
from .render import draw_snapshot, folder_page
from .snapshot_data import SnapshotData, write_snapshot
from .statistics import STATISTICS
from .tokens import lens_tokenizer
from .whole_text import Text, TextRecorder, windows_of

MAX_FILES = 900  # images and pages that a run logs; dashboards become slow with more than 1,000
MAX_IMAGES = 50  # of a step, at the end with heatmaps in the table of heads
THUMBNAIL = 128  # pixels
# Keys of the statistics of layers and heads; a dashboard becomes slow with 10,000 in a project. All
# other keys of a run are fewer than 100.
MAX_KEYS = 1900
MAX_SYMBOLS = 256  # tokens that the repeated sequence is drawn from


@dataclass
class Snapshot:
    """The results of one snapshot, by their keys on a dashboard."""

    # Statistics: the mean over the heads of each layer, and for those that name heads the largest
    # of all heads and the number of heads with the name.
    metrics: dict[str, float]
    # Statistics of each head, {} in models with many heads; dashboards hide them by default.
    heads: dict[str, float] = field(repr=False)
    histograms: dict[str, np.ndarray] = field(repr=False)  # values of each statistic, all heads
    # PNG; of several prompts, in their order, under one key.
    images: dict[str, list[Path]] = field(default_factory=dict)
    captions: dict[str, list[str]] = field(default_factory=dict)  # of images, by the same keys
    pages: dict[str, Path] = field(default_factory=dict)  # HTML
    # Rows with the same keys. A cell may be an image, uint8 (height, width, 3).
    tables: dict[str, list[dict]] = field(default_factory=dict, repr=False)
    # Of each name that no head had before in this run: "L0 H1: previous-token head"
    new_names: list[str] = field(default_factory=list)
    # At the last step, curves of each statistic: (steps, for each layer the mean over its heads at
    # each step).
    charts: dict[str, tuple[list[int], dict[str, list[float]]]] = field(
        default_factory=dict, repr=False
    )


class Lens:
    """Takes attention snapshots of a model, on fixed prompts and on a text, and writes images and a
    page.

    tokenizer: of tiktoken, of transformers, or with their methods, see tokens.py. context_length:
    of the model, in tokens. max_steps: of the training. text: a text on which heads are measured,
    and of which three passages are the default prompts; or windows of its token ids, (N, T).
    Without it heads are measured on the prompts alone. text_name: what pages call it. vocabulary:
    the ids of which the repeated sequence consists, [] for no repeated sequence; by default the
    most frequent of the text, or all.
    has_page: False if the caller makes the page, see render.folder_page.
    """

    def __init__(
        self,
        tokenizer: Any,
        config: LensConfig | None = None,
        *,
        context_length: int,
        max_steps: int = 0,
        folder: str | Path = "attention",
        run_name: str = "",
        text: str | Tensor | None = None,
        text_name: str = "the text",
        vocabulary: Sequence[int] | None = None,
        has_page: bool = True,
    ):
        self.config = config or LensConfig()
        self.tokenizer = tokens = lens_tokenizer(tokenizer)
        self.max_steps, self.folder = max_steps, Path(folder)
        self.run_name = run_name
        self.has_page = has_page
        if not isinstance(text, str | Tensor | None):
            raise TypeError(f"text: {type(text).__name__} is not a str; use Path.read_text()")
        limit = min(self.config.max_tokens, context_length)
        texts = self.config.prompts
        if texts is None:
            most = limit - len(tokens.prefix)
            found = text_prompts(excerpts(text), tokens, most) if isinstance(text, str) else []
            texts = found or DEFAULT_PROMPTS
        self.prompts = [make_prompt(n, prompt, tokens, limit) for n, prompt in enumerate(texts, 1)]
        windows = windows_of(text, tokens, context_length) if isinstance(text, str) else text
        self.text = None if windows is None else Text(windows, tokens.token_bytes, text_name)
        if vocabulary is None:
            ids = range(tokens.num_ids) if windows is None else frequent(windows)
            vocabulary = [token for token in ids if token not in tokens.special]
        period = min(self.config.repeat_length, (limit - 1) // 2)
        number, token_bytes = len(self.prompts) + 1, tokens.token_bytes
        repeated = repeated_prompt(number, vocabulary, tokens.bos, token_bytes, period)
        self.prompts += [repeated] if repeated else []
        self.history: History | None = None  # created at the first snapshot
        self.table: list[dict] = []  # all heads, the most significant first; set at the end
        self.last: SnapshotData | None = None  # of the last step
        self.rows: Sequence[Row] = ()  # of the training until then
        self.taken: tuple[int, bool] | None = None  # the newest step, whether it is the last one
        self.started = 0.0  # the first snapshot of this process, in seconds
        self.durations: list[float] = []  # of the snapshots of this process, in seconds
        self.skipped: set[int] = set()  # steps without a snapshot because of max_percent

    def due(self, step: int) -> bool:
        """Whether to take a snapshot at this step: each multiple of the interval (also 0) for which
        there is time, and the last. False after its snapshot."""
        return self.is_planned(step) and self.has_time(step)

    def is_planned(self, step: int) -> bool:
        """Whether `due` without config.max_percent."""
        every = self.config.interval(self.max_steps)
        is_last = step == self.max_steps
        if not every or not self.prompts or self.taken == (step, is_last):
            return False
        return step % every == 0 or is_last

    def has_time(self, step: int) -> bool:
        """Whether config.max_percent allows a snapshot at this step, and after it the last one.

        The time since the first snapshot of this process counts, so equal runs may skip others."""
        percent, spent = self.config.max_percent, sum(self.durations)
        if percent is None or not self.durations or step == self.max_steps:
            return True
        both = 2 * spent / len(self.durations)  # this snapshot and the last one
        if 100 * (spent + both) <= percent * (time.perf_counter() - self.started):
            return True
        self.skipped.add(step)
        return False

    def draws(self, step: int) -> bool:
        """Whether the snapshot at this step has images. In a long run only some have, so that
        MAX_FILES is not exceeded; the first and the last always have."""
        drawn = max(2, (MAX_FILES - MAX_IMAGES) // (len(self.prompts) + 2))  # images, page
        every = max(1, self.config.interval(self.max_steps))
        every *= max(1, math.ceil(self.max_steps / every / (drawn - 1)))
        return step % every == 0 or step == self.max_steps

    def snapshot(
        self,
        model: Any,
        step: int,
        curves: Callable[[], dict[str, list]] = dict,
        ablate: Ablate | None = None,
        write: bool = True,
    ) -> Snapshot | None:
        """Runs the model on the prompts and the text and writes statistics, images and the page.

        curves(): losses of the training for the page, {name: [(step, value)]}.
        ablate: receives the heads of each name at the last step, as for head_removal.
        With write=False it only runs the model and returns None: for ranks other than 0 with FSDP.
        """
        started = time.perf_counter()
        self.started = self.started or started
        # A training that is stopped early has a second snapshot of this step, as its last one.
        is_again, self.taken = self.taken and self.taken[0] == step, (step, step == self.max_steps)
        if write and (self.history is None or is_again):
            _remove_from(self.folder, step)
            self.history = History(self.folder / "statistics.jsonl", step)
        rows = self.history.rows if self.history else []  # with those before the run was resumed
        run_name = self.run_name or self.folder.resolve().parent.name
        data = self._record(model, step, run_name, rows[-1] if rows else None)
        if not (write and self.history):
            return None
        self.history.add(data.row)
        snapshot, is_last = _dashboard_values(data.row), step == self.max_steps
        found = events(rows)
        known = {event["key"] for event in found if event["step"] < step}
        new = [e for e in found if e["step"] == step and e["key"] not in known]
        snapshot.new_names = [event["text"] for event in new]
        if is_last:
            self._finish(model, data, rows, ablate)
            if data.ablation:
                numbers = data.row.layers
                heads = [of | {"layer": numbers[of["layer"]]} for of in data.ablation["heads"]]
                text = json.dumps(data.ablation | {"heads": heads}, indent=1) + "\n"
                atomic_write(self.folder / "ablation.json", text.encode())
            atomic_write(self.folder / "heads.csv", as_csv(self.table).encode())
            snapshot.tables["attention/table"] = self._with_thumbnails(data)
            snapshot.charts = _charts(rows)
        if self.draws(step):
            write_snapshot(self.folder / f"step_{step:08d}.npz", data)
            snapshot.images, snapshot.captions = draw_snapshot(data, self.folder)
            is_power = len(rows) & (len(rows) - 1) == 0  # 1, 2, 4, 8, ... rows
            if self.has_page and (step >= self.max_steps or is_power):
                path = self.folder / "page.html"
                page = folder_page(self.folder, run_name, curves())
                atomic_write(path, page.encode())
                snapshot.pages = {"attention/page": path}
        self.skipped.discard(step)
        self.durations.append(time.perf_counter() - started)
        return snapshot

    def inspect(
        self,
        model: Any,
        step: int = 0,
        ablate: Ablate | None = None,
        before: Row | None = None,
    ) -> tuple[SnapshotData, list[str]]:
        """Returns the data of one step, and lines about it: `most_significant_heads`, or that no
        head has a name, and whether the maps are verified. Writes no files.

        ablate: as in `snapshot`. before: data.row of an earlier step of the same training, whose
        names heads keep if they are still nearly clear.
        """
        data = self._record(model, step, self.run_name or type(unwrapped(model)).__name__, before)
        self._finish(model, data, [], ablate)
        lines = self.most_significant_heads() or [counts_of_names(self.table)]
        return data, [*lines, data.proof]

    def _record(self, model: Any, step: int, run_name: str, before: Row | None) -> SnapshotData:
        """Returns the data of a step. before: as for `record`."""
        run = functools.partial(capture, model)
        run_text = functools.partial(run, logits=False)
        on_text = TextRecorder(self.text).run(run_text) if self.text else None
        token_bytes = self.tokenizer.token_bytes
        return record(run, self.prompts, step, on_text, run_name, token_bytes, before)

    def _finish(
        self, model: Any, data: SnapshotData, rows: Sequence[Row], ablate: Ablate | None
    ) -> None:
        """Makes the table of heads, and adds what the model loses and predicts without them. rows:
        of the training; [] without one."""
        self.table, self.last = head_table(rows or [data.row], data.uniform), data
        self.rows = rows
        groups = heads_by_name(self.table)
        found = ablate(groups) if ablate else None
        if found and math.isfinite(found["loss"]):  # else the model has diverged
            data.ablation = {"step": data.step} | found
            results = {(row["layer"], row["head"]): row for row in found["heads"]}
            for row in self.table:
                result = results[row["place"]]
                known = COLUMNS if result["accuracy_without"] is not None else COLUMNS[:2]
                row |= {key: result[key] for key in known}
        # With FSDP, every rank would have to run the model.
        is_sharded = any(hasattr(parameter, "full_tensor") for parameter in model.parameters())
        if self.config.ablation == "off" or not groups or is_sharded:
            return
        if "predictions" in data.details:
            more = groups, data.row.offsets, self.tokenizer.token_bytes
            found = record_without(unwrapped(model), self.prompts, *more)
            data.details |= {"without": found} if found else {}

    def most_significant_heads(self) -> list[str]:
        """Returns the number of heads with a name, and a line for the clearest head of each name,
        for example "L5 H1 previous token: mean weight 0.83 on the token before (since step 400)".
        Empty before the last snapshot and without a name.
        """
        rows, stage = clearest(self.table), copying_step(self.prompts, self.rows)
        copies = f"the loss on the repeated sequence drops at step {stage}"
        lines = [copies] * (stage is not None) + [counts_of_names(self.table)] * bool(rows)
        return lines + [head_line(row, has_steps=bool(self.rows)) for row in rows]

    def skipped_snapshots(self) -> list[str]:
        """Returns a line if snapshots of this process were skipped because of config.max_percent,
        otherwise none."""
        if not (count := len(self.skipped)):
            return []
        of = f"{count} of {count + len(self.durations)} snapshots"
        return [f"{of} were skipped to stay within {self.config.max_percent:g} % of the time"]

    def most_important_heads(self) -> list[str]:
        """Describes the head, and the name of several heads, that the model needs most, in the last
        snapshot of a training or of `inspect`. Empty without ablation."""
        last = self.last
        return removal_lines(last.ablation, last.row) if last and last.ablation else []

    def _with_thumbnails(self, data: SnapshotData) -> list[dict]:
        """Returns the table with a heatmap of the first heads, each on the prompt that shows it."""
        of = finding.Heads(data)
        rows, most = [], MAX_IMAGES - len(data.prompts) - 1  # the clearest head
        for row in self.table:
            codes = data.codes[of.shown_prompt(row)][row["place"]]
            image = rgb(fitted(codes, THUMBNAIL)) if row["rank"] <= most else None
            shown = {dashboard_name(k) if k in STATISTICS else k: v for k, v in row.items()}
            del shown["place"]
            rows.append({"heatmap": image} | shown | {"name": title_of_head(row)})
        return rows


def dashboard_name(statistic: str) -> str:
    """Returns the name of a statistic in keys of a dashboard: its title, "previous_token"."""
    return STATISTICS[statistic].title.replace(" ", "_")


def _dashboard_values(row: Row) -> Snapshot:
    """Returns the statistics of a row by dashboard key, without non-finite statistics.

    The part of a key before the first slash is a section of the dashboard. Images and pages are in
    the section "attention"; curves are in other sections, so that the images are easy to find. The
    statistics of single heads have keys only in models with few heads, and those of layers in
    models with few layers, see MAX_KEYS; statistics.jsonl always has them.
    """
    (num_layers, num_heads), metrics, heads, histograms = row.names.shape, {}, {}, {}
    known = {key: values for key, values in row.values.items() if np.isfinite(values).all()}
    with_layers = len(known) * num_layers <= MAX_KEYS
    with_heads = len(known) * num_layers * (1 + num_heads) <= MAX_KEYS
    for key in KINDS:
        count = int((row.names == ALL_NAMES.index(key)).sum())
        metrics[f"attention_names/{dashboard_name(key)}"] = count
    for key, values in known.items():
        name = dashboard_name(key)
        histograms[f"attention_histograms/{name}"] = values.ravel()
        if key in KINDS:
            metrics[f"attention_best/{name}"] = float(values.max())
        for layer, of_heads in zip(row.layers, values, strict=True) if with_layers else ():
            metrics[f"attention_layers/{name}/L{layer:02d}"] = float(of_heads.mean())
            for head, value in enumerate(of_heads if with_heads else []):
                heads[f"attention_heads/{name}/L{layer:02d}H{head:02d}"] = float(value)
    return Snapshot(metrics, heads, histograms)


def _charts(history: list[Row]) -> dict[str, tuple[list[int], dict[str, list[float]]]]:
    """Returns the curves of each statistic by dashboard key, as Snapshot.charts."""
    rows, charts = evenly_spaced(history, MAX_HISTORY), {}
    for key in STATISTICS:
        defined = [row for row in rows if np.isfinite(row.values[key]).all()]
        if defined:
            means = np.stack([row.values[key].mean(1) for row in defined], axis=1)  # (L, steps)
            pairs = zip(rows[-1].layers, means.tolist(), strict=True)
            lines = {f"L{layer:02d}": line for layer, line in pairs}
            steps = [row.step for row in defined]
            charts[f"attention_statistics/{dashboard_name(key)}"] = steps, lines
    return charts


def _remove_from(folder: Path, step: int) -> None:
    """Removes images and pages of `step` and later steps, which a resumed run repeats."""
    for path in folder.glob("step_*"):
        if path.name[5:13].isdigit() and int(path.name[5:13]) >= step:
            path.unlink()
    if not any(folder.glob("step_*")):
        for name in ("page.html", "heads.csv", "ablation.json"):
            (folder / name).unlink(missing_ok=True)


def frequent(windows: Tensor) -> list[int]:
    """Returns the most frequent token ids of a text, at most MAX_SYMBOLS."""
    ids, counts = torch.unique(windows, return_counts=True)
    return sorted(ids[counts.argsort(descending=True, stable=True)[:MAX_SYMBOLS]].tolist())
