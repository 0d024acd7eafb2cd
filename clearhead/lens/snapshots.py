"""Attention snapshots: Lens.snapshot records all heads at a step and writes data, images and pages.

Lens.inspect records a model without a training run.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .ablation import COLUMNS, Ablate, removal_lines
from .config import DEFAULT_PROMPTS, LensConfig
from .heads import (
    ALL_NAMES,
    KINDS,
    NAMES,
    as_csv,
    clearest,
    clearest_prompts,
    counts_of_names,
    head_table,
    heads_by_name,
    most_significant,
    title_of,
)
from .heatmap import fitted, rgb
from .history import History, Row, atomic_write, evenly_spaced
from .page import MAX_HISTORY
from .panel import caption
from .probe import CaptureAttention, make_prompt, probe, repeated_prompt, uniform_values
from .render import draw_snapshot, draw_timelapse, heatmap_key
from .rounding import formatted
from .snapshot_data import SnapshotData, snapshot_data, write_snapshot
from .stages import stage_step
from .statistics import STATISTICS

MAX_FILES = 900  # images and pages that a run logs; dashboards become slow with more than 1,000
MAX_THUMBNAILS = 100  # part of MAX_FILES: heatmaps in the table of heads
THUMBNAIL = 128  # pixels


@dataclass
class Snapshot:
    """The results of one snapshot, by their keys on a dashboard."""

    # Statistics: the mean over the heads of each layer, and for those that name heads the largest
    # of all heads.
    metrics: dict[str, float]
    heads: dict[str, float]  # statistics of each head; dashboards hide them by default
    histograms: dict[str, np.ndarray]  # values of each statistic, all heads
    images: dict[str, Path] = field(default_factory=dict)  # PNG or WebP
    captions: dict[str, str] = field(default_factory=dict)  # of images
    pages: dict[str, Path] = field(default_factory=dict)  # HTML
    # Rows with the same keys. A cell may be an image, uint8 (height, width, 3).
    tables: dict[str, list[dict]] = field(default_factory=dict)
    # (layer, head) of all heads of each name that no head had before in this run, see heads_by_name
    first_heads: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    # At the last step, curves of each statistic: (steps, for each layer the mean over its heads at
    # each step).
    charts: dict[str, tuple[list[int], dict[str, list[float]]]] = field(default_factory=dict)


class Lens:
    """Takes attention snapshots on a fixed set of prompts and writes images and pages.

    encode(text) returns token ids, token_bytes(id) the bytes of a token (KeyError if unknown). The
    repeated sequence starts with `bos`; its other tokens are drawn from `vocabulary`. An empty
    vocabulary disables the repeated sequence.
    """

    def __init__(
        self,
        config: LensConfig,
        encode: Callable[[str], list[int]],
        token_bytes: Callable[[int], bytes],
        context_length: int,
        vocabulary: Sequence[int] = (),
        bos: int = 0,
    ):
        self.config = config
        limit = min(config.max_tokens, context_length)
        texts = DEFAULT_PROMPTS if config.prompts is None else config.prompts
        self.prompts = [
            make_prompt(number, text, encode, token_bytes, limit)
            for number, text in enumerate(texts, start=1)
        ]
        if config.repeat_length and len(vocabulary):
            number = len(self.prompts) + 1
            period = min(config.repeat_length, (limit - 1) // 2)
            repeated = repeated_prompt(number, vocabulary, bos, token_bytes, period)
            self.prompts += [repeated] if repeated else []
        self.token_bytes = token_bytes
        self.history: History | None = None  # created at the first snapshot
        self.table: list[dict] = []  # all heads, the most significant first; set at the end
        self.last: SnapshotData | None = None  # of the last step

    def due(self, step: int, max_steps: int) -> bool:
        """Whether this step has a snapshot: each multiple of the interval (also 0) and the last."""
        every = self.config.interval(max_steps)
        return every > 0 and bool(self.prompts) and (step % every == 0 or step == max_steps)

    def draws(self, step: int, max_steps: int) -> bool:
        """Whether the snapshot at this step has images and a page; in a long run only some have."""
        return step % self._drawn_every(max_steps) == 0 or step == max_steps

    def snapshot(
        self,
        capture_attention: CaptureAttention,
        step: int,
        max_steps: int,
        folder: Path,
        run_name: str = "",
        write: bool = True,
        curves: Callable[[], dict[str, list]] = dict,
        ablate: Ablate | None = None,
        dashboard: bool = True,
    ) -> Snapshot | None:
        """Runs the model on all prompts and writes statistics, images and pages to `folder`.

        capture_attention: see probe.py. run_name: the name of the run on the pages. With
        write=False it only runs the model and returns None: for ranks other than 0 with FSDP.
        curves(): losses of the training for the time-lapse, {name: [(step, value)]}.
        ablate: receives the heads of each name at the last step; returns the result of ablation.py.
        dashboard: whether a dashboard shows this snapshot. Otherwise there is no page of this step,
        because the time-lapse has it, and only the last step has the smaller images.
        """
        frame = probe(capture_attention, self.prompts, step)
        if not write:
            return None
        if self.history is None:
            _remove_from(folder, step)
            self.history = History(folder / "statistics.jsonl", step)
        self.history.add(frame.row)
        snapshot, is_last = _dashboard_values(frame.row), step == max_steps
        snapshot.first_heads = self._first_heads(self.history.rows)
        data = snapshot_data(run_name, self.prompts, frame, self.token_bytes)
        if is_last:
            self.table, self.last = head_table(self.history.rows, self._uniform()), data
            found = ablate(heads_by_name(self.table)) if ablate else None
            if found and math.isfinite(found["loss"]):  # else the model has diverged
                data.ablation = {"step": step} | found
                self._add_ablation(data.ablation, folder)
            atomic_write(folder / "heads.csv", as_csv(self.table).encode())
            snapshot.tables["attention/table"] = self._with_thumbnails(data)
            snapshot.charts = _charts(self.history)
        if self.draws(step, max_steps):
            write_snapshot(folder / f"step_{step:08d}.npz", data)
            shown = draw_snapshot(data, folder, panels=dashboard or is_last, viewer=dashboard)
            snapshot.images, snapshot.pages = shown
            snapshot.captions = {heatmap_key(p): caption(p, step) for p in self.prompts}
            if self._timelapse_is_due(step, max_steps, dashboard):
                rows, frames = self.history.rows, self.config.frames
                images, pages = draw_timelapse(folder, rows, frames, curves(), is_last)
                snapshot.images |= images
                snapshot.pages |= pages
        return snapshot

    def inspect(
        self,
        capture_attention: CaptureAttention,
        step: int,
        run_name: str,
        ablate: Ablate | None = None,
    ) -> tuple[SnapshotData, list[str]]:
        """Returns the data of one step, and a line for each name of heads with the most significant
        heads and, in parentheses, the value for uniform attention. Writes no files.
        ablate: as in `snapshot`.
        """
        frame, uniform = probe(capture_attention, self.prompts, step), self._uniform()
        data = snapshot_data(run_name, self.prompts, frame, self.token_bytes)
        table = head_table([frame.row], uniform)
        lines = [_line(key, table, uniform[key]) for key in KINDS]
        if ablate and (found := ablate(heads_by_name(table))):
            data.ablation = {"step": step} | found
        return data, [line for line in lines if line]

    def most_significant_heads(self) -> list[str]:
        """Returns the number of heads with a name, and a line for the clearest head of each name,
        for example "previous token L5 H1: mean weight 0.83 on the token before (since step 400)".
        Empty before the last snapshot and without a name.
        """
        stage = stage_step(self.prompts, self.history.rows) if self.history else None
        copies = f"the loss on the repeated sequence drops at step {stage}"
        lines = [copies] * (stage is not None)
        rows = clearest(self.table)
        lines += [counts_of_names(self.table)] * bool(rows)
        for row in rows:
            name, place = row["name"], f"L{row['layer']} H{row['head']}"
            value, target = formatted(row[name]), KINDS[name].target
            # The value of a positional head is not a weight.
            what = f"mean weight {value} on" if name in NAMES else f"value {value}, depends on"
            since = f"(since step {row['since_step']})"
            lines.append(f"{title_of(name)} {place}: {what} {target} {since}")
        return lines

    def most_important_heads(self) -> list[str]:
        """Returns `most_important_heads` at the last step. Empty before."""
        return most_important_heads(self.last) if self.last else []

    def _uniform(self) -> dict[str, float | None]:
        return uniform_values(self.prompts)

    def _first_heads(self, rows: Sequence[Row]) -> dict[str, list[tuple[int, int]]]:
        """Returns the heads of the last row by name, of the names that no row before has."""
        *before, last = rows
        named = heads_by_name(head_table([last], self._uniform()))

        def is_known(name: str) -> bool:
            number = ALL_NAMES.index(name)
            return any((row.names == number).any() for row in before)

        return {name: heads for name, heads in named.items() if not is_known(name)}

    def _add_ablation(self, found: dict, folder: Path) -> None:
        """Writes ablation.json and adds the results to the table."""
        text = json.dumps(found, indent=1) + "\n"
        atomic_write(folder / "ablation.json", text.encode())
        results = {(row["layer"], row["head"]): row for row in found["heads"]}
        for row in self.table:
            result = results[row["layer"], row["head"]]
            known = COLUMNS if result["accuracy_without"] is not None else COLUMNS[:2]
            row |= {key: result[key] for key in known}

    def _drawn_every(self, max_steps: int) -> int:
        """Returns the steps between snapshots with images, so that MAX_FILES is not exceeded."""
        files = len(self.prompts) + 1
        # The first and the last snapshot always have images.
        drawn = max(2, (MAX_FILES - MAX_THUMBNAILS) // files)
        every = max(1, self.config.interval(max_steps))
        return every * max(1, math.ceil(max_steps / every / (drawn - 1)))

    def _timelapse_is_due(self, step: int, max_steps: int, dashboard: bool) -> bool:
        """Whether another quarter of the run was completed since the last images. Without the pages
        of single steps for a dashboard also at the 1st, 2nd, 4th, 8th ... snapshot."""
        count = len(self.history.rows) if self.history else 0
        if not dashboard and count & (count - 1) == 0:
            return True
        before = max(0, step - self._drawn_every(max_steps))
        return step == max_steps or 4 * step // max_steps > 4 * before // max_steps

    def _with_thumbnails(self, data: SnapshotData) -> list[dict]:
        """Returns the table with a heatmap of the first heads, on the prompt where each is most
        significant."""
        prompts = clearest_prompts(data.of_prompts, [uniform_values([p]) for p in self.prompts])
        rows = []
        for row in self.table:
            layer, head = row["layer"], row["head"]
            codes = data.codes[prompts[layer, head]][layer, head]
            image = rgb(fitted(codes, THUMBNAIL)) if row["rank"] <= MAX_THUMBNAILS else None
            rows.append({"heatmap": image} | row)
        return rows


def clearest_prompt(data: SnapshotData, head: tuple[int, int] | None = None) -> int:
    """Returns the index of the prompt on which a head, (layer, head), is most significant; without
    one, the most significant head."""
    table = head_table([data.row], uniform_values(data.prompts))
    row = (most_significant(table) or table)[0]
    prompts = clearest_prompts(data.of_prompts, [uniform_values([p]) for p in data.prompts])
    return int(prompts[head or (row["layer"], row["head"])])


def most_important_heads(data: SnapshotData) -> list[str]:
    """Describes the head, and the name of several heads, that the model needs most. Empty without
    ablation."""
    if not data.ablation:
        return []

    def head_name(layer: int, head: int) -> str:
        return title_of(ALL_NAMES[data.row.names[layer, head]]) or "no name"

    return removal_lines(data.ablation, head_name)


def _line(key: str, table: Sequence[dict], uniform: float | None) -> str:
    """Returns the heads of a name with their values, or why no head has it; "" if the statistic is
    undefined, or without a positional head. uniform: the value for uniform attention."""
    named = [row for row in table if row["name"] == key]
    if uniform is None or any(row[key] is None for row in table):
        return ""
    what = f"{title_of(key)} ({formatted(uniform)})"
    if named:
        values = [f"L{row['layer']} H{row['head']} {formatted(row[key])}" for row in named[:5]]
        return f"{what:<24} {'   '.join(values)}"
    if key not in NAMES:
        return ""
    row = max(table, key=lambda row: row[key])
    is_above = (row[key] - uniform) / (1 - uniform) >= KINDS[key].named_from
    # A mean above the limit: either another name fits better, or one prompt is below the limit.
    where = " on every prompt" if is_above and row["name"] not in NAMES else ""
    other = f" ({title_of(row['name'])})" if is_above and row["name"] in NAMES else ""
    largest = f"L{row['layer']} H{row['head']} {formatted(row[key])}{other}"
    return f"{what:<24} no head{where}; largest mean: {largest}"


def _dashboard_values(row: Row) -> Snapshot:
    """Returns the statistics of a row by dashboard key, without non-finite statistics.

    The part of a key before the first slash is a section of the dashboard. Images and pages are in
    the section "attention"; curves are in other sections, so that the images are easy to find.
    """
    metrics, heads, histograms = {}, {}, {}
    for key, values in row.values.items():
        if not np.isfinite(values).all():
            continue
        histograms[f"attention_histograms/{key}"] = values.ravel()
        if key in KINDS:
            metrics[f"attention_best/{key}"] = float(values.max())
        for layer, of_heads in enumerate(values):
            metrics[f"attention_layers/{key}/L{layer:02d}"] = float(of_heads.mean())
            for head, value in enumerate(of_heads):
                heads[f"attention_heads/{key}/L{layer:02d}H{head:02d}"] = float(value)
    return Snapshot(metrics, heads, histograms)


def _charts(history: History) -> dict[str, tuple[list[int], dict[str, list[float]]]]:
    """Returns the curves of each statistic by dashboard key, as Snapshot.charts."""
    rows, charts = evenly_spaced(history.rows, MAX_HISTORY), {}
    for key in STATISTICS:
        defined = [row for row in rows if np.isfinite(row.values[key]).all()]
        if defined:
            means = np.stack([row.values[key].mean(1) for row in defined], axis=1)  # (L, steps)
            lines = {f"L{layer:02d}": line.tolist() for layer, line in enumerate(means)}
            charts[f"attention_statistics/{key}"] = ([row.step for row in defined], lines)
    return charts


def _remove_from(folder: Path, step: int) -> None:
    """Removes images and pages of `step` and later steps, which a resumed run repeats."""
    for path in folder.glob("step_*"):
        if path.name[5:13].isdigit() and int(path.name[5:13]) >= step:
            path.unlink()
    if not any(folder.glob("step_*")):
        for name in ("timelapse.html", "timelapse.webp", "heads.csv", "ablation.json"):
            (folder / name).unlink(missing_ok=True)
