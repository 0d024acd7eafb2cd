"""Attention snapshots: Lens.snapshot records all heads at a step and writes images and pages."""

import contextlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .ablation import COLUMNS, Ablate, most_important, removal
from .animation import write_animation
from .config import LensConfig
from .heads import (
    NAMED_FROM,
    NAMES,
    as_csv,
    head_table,
    heads_by_name,
    most_significant,
    significances,
    title_of,
)
from .heatmap import draw_grid, draw_panel, fitted, rgb
from .history import History, Row, atomic_write, evenly_spaced
from .page import MAX_HISTORY, VERSION, codes_of, frame_data, page, read, run_data
from .predictions import loss_of_copy
from .probe import CaptureAttention, Frame, make_prompt, probe, repeated_prompt, uniform_values
from .stages import stage_begins
from .statistics import STATISTICS

MAX_FILES = 900  # images and pages that a run logs; dashboards become slow with more than 1,000
MAX_THUMBNAILS = 100  # part of MAX_FILES: heatmaps in the table of heads
THUMBNAIL = 128  # pixels


@dataclass
class Snapshot:
    """The results of one snapshot, by their keys on a dashboard."""

    metrics: dict[str, float]  # statistics, averaged over the heads of each layer
    heads: dict[str, float]  # statistics of each head; dashboards hide them by default
    histograms: dict[str, np.ndarray]  # values of each statistic, all heads
    images: dict[str, Path] = field(default_factory=dict)  # PNG or WebP
    pages: dict[str, Path] = field(default_factory=dict)  # HTML
    # Rows with the same keys. A cell may be an image, uint8 (height, width, 3).
    tables: dict[str, list[dict]] = field(default_factory=dict)
    # Curves of a statistic: (steps, for each layer the mean over its heads at each step).
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
        self.prompts = [
            make_prompt(number, text, encode, token_bytes, limit)
            for number, text in enumerate(config.prompts, start=1)
        ]
        if config.repeat_length and len(vocabulary):
            number = len(self.prompts) + 1
            period = min(config.repeat_length, (limit - 1) // 2)
            repeated = repeated_prompt(number, vocabulary, bos, token_bytes, period)
            self.prompts += [repeated] if repeated else []
        self.token_bytes = token_bytes
        self.num_symbols = len(vocabulary)  # of the repeated sequence
        self.uniform = [uniform_values([prompt]) for prompt in self.prompts]
        self.history: History | None = None  # created at the first snapshot
        self.table: list[dict] = []  # all heads, the most significant first; set at the end
        self.stage: int | None = None  # first step with a low loss on the repeated sequence
        self.ablation: dict | None = None  # the loss without each head; set at the end
        self.clearest = np.zeros((0, 0), int)  # see clearest_prompt

    @property
    def _rows(self) -> list[Row]:
        """The statistics of all snapshots so far."""
        return self.history.rows if self.history else []

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
    ) -> Snapshot | None:
        """Runs the model on all prompts and writes statistics, images and pages to `folder`.

        capture_attention: see probe.py. run_name: the name of the run on the pages. With
        write=False it only runs the model and returns None: for ranks other than 0 with FSDP.
        curves(): losses of the training for the time-lapse, {name: [(step, value)]}.
        ablate: receives the heads of each name at the last step; returns the result of ablation.py.
        """
        frame = probe(capture_attention, self.prompts, step)
        if not write:
            return None
        if self.history is None:
            _remove_from(folder, step)
            self.history = History(folder / "statistics.jsonl", step)
        self.history.add(frame.row)
        self.stage = self._stage_begins()
        snapshot = _dashboard_values(frame.row)
        if step == max_steps:
            self.table = head_table(self.history.rows, uniform_values(self.prompts))
            if ablate:
                self._add_ablation(ablate(heads_by_name(self.table)), step, folder)
            atomic_write(folder / "heads.csv", as_csv(self.table))
            snapshot.tables["attention/table"] = self._with_thumbnails(frame)
        if self.draws(step, max_steps):
            self._draw(frame, folder, run_name, snapshot)
            if step > 0 and self._quarter_is_complete(step, max_steps):
                snapshot.charts = _charts(self.history)
                self._write_timelapse(folder, run_name, snapshot, curves(), step == max_steps)
        return snapshot

    def page_data(
        self,
        capture_attention: CaptureAttention,
        step: int,
        run_name: str,
        ablate: Ablate | None = None,
    ) -> tuple[dict, list[str]]:
        """Returns the data of a page for one step, and a line for each name of heads with the most
        significant heads and, in parentheses, the value for uniform attention. Writes no files.
        ablate: as in `snapshot`.
        """
        frame = probe(capture_attention, self.prompts, step)
        uniform = uniform_values(self.prompts)
        table = self.table = head_table([frame.row], uniform)
        self.clearest = self._clearest_prompts(frame)
        lines = [_line(key, table, uniform[key]) for key in (*NAMES, "positional")]
        found = ablate(heads_by_name(table)) if ablate else None
        self.ablation = {"step": step} | found if found else None
        frames = [frame_data(frame, self.token_bytes)]
        data = run_data(run_name, self.prompts, frames, [frame.row], ablation=self.ablation)
        return data, [line for line in lines if line]

    def clearest_prompt(self, head: tuple[int, int] | None) -> int:
        """Returns the index of the prompt on which a head, (layer, head), is most significant;
        without one, the most significant head. Needs `page_data`."""
        row = (most_significant(self.table) or self.table)[0]
        return int(self.clearest[head or (row["layer"], row["head"])])

    def most_significant_heads(self) -> list[str]:
        """Returns the most significant head of each name, for example "induction L5 H1: 0.83
        (since step 400)". Empty before the last snapshot.
        """
        copies = f"the loss on the repeated sequence drops at step {self.stage}"
        return [copies] * (self.stage is not None) + [
            f"{title_of(name := row['name'])} L{row['layer']} H{row['head']}: "
            f"{row[name]:.2f} (since step {row['since_step']})"
            for row in most_significant(self.table)
        ]

    def most_important_heads(self) -> list[str]:
        """Describes the head, and the name of several heads, that the model needs most."""
        if not self.ablation:
            return []
        names = {(row["layer"], row["head"]): row["name"] for row in self.table}
        lines = []
        if first := most_important(self.ablation["heads"]):
            layer, head = first["layer"], first["head"]
            name = title_of(names[layer, head]) or "no name"
            lines.append(removal(f"L{layer} H{head} ({name})", first))
        if first := most_important(row for row in self.ablation["groups"] if row["heads"] > 1):
            lines.append(removal(f"all {first['heads']} {title_of(first['name'])} heads", first))
        lines = lines or ["any head: the loss increases by less than two standard errors"]
        is_estimate = self.ablation["method"] == "estimate"
        return [line + " (first-order estimate)" * is_estimate for line in lines]

    def _add_ablation(self, found: dict | None, step: int, folder: Path) -> None:
        """Writes ablation.json and adds the results to the table. None: after an error."""
        if found is None:
            return
        self.ablation = {"step": step} | found
        atomic_write(folder / "ablation.json", json.dumps(self.ablation, indent=1) + "\n")
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

    def _quarter_is_complete(self, step: int, max_steps: int) -> bool:
        """Whether another quarter of the run was completed since the last images."""
        before = max(0, step - self._drawn_every(max_steps))
        return step == max_steps or 4 * step // max_steps > 4 * before // max_steps

    def _draw(self, frame: Frame, folder: Path, run_name: str, snapshot: Snapshot) -> None:
        step = frame.row.step
        for number, (prompt, codes) in enumerate(zip(self.prompts, frame.codes, strict=True)):
            path = folder / f"step_{step:08d}_{prompt.name}.png"
            draw_grid(codes, prompt, step, path)
            path = path.with_stem(f"{path.stem}_panel")
            row, uniform = Row(step, frame.of_prompts[number]), self.uniform[number]
            row.names = frame.row.names
            # Without names of statistics that this prompt does not have, such as induction.
            heads = [
                head
                for head in most_significant(head_table([row], uniform))
                if head[head["name"]] is not None
            ]
            draw_panel(codes, prompt, step, heads, uniform, path)
            snapshot.images[f"attention/heatmap/{prompt.name}"] = path
        path = folder / f"step_{step:08d}.html"
        frames = [frame_data(frame, self.token_bytes)]
        data = run_data(run_name, self.prompts, frames, [frame.row], ablation=self.ablation)
        self._write_page(path, data)
        snapshot.pages["attention/viewer"] = path

    def _with_thumbnails(self, frame: Frame) -> list[dict]:
        """Returns the table with a heatmap of the first heads, on the prompt where each is most
        significant."""
        prompts = self._clearest_prompts(frame)
        rows = []
        for row in self.table:
            layer, head = row["layer"], row["head"]
            codes = frame.codes[prompts[layer, head]][layer, head]
            image = rgb(fitted(codes, THUMBNAIL)) if row["rank"] <= MAX_THUMBNAILS else None
            rows.append({"heatmap": image} | row)
        return rows

    def _clearest_prompts(self, frame: Frame) -> np.ndarray:
        """Returns the index of the prompt on which each head is most significant, (L, H)."""
        found = [
            significances(values, uniform)  # (names, L, H)
            for values, uniform in zip(frame.of_prompts, self.uniform, strict=True)
        ]
        return np.nan_to_num(found, nan=-np.inf).max(1).argmax(0)

    def _stage_begins(self) -> int | None:
        """Returns the first step with a low loss on the repeated sequence, see stages.py."""
        rows = [row for row in self._rows if len(row.losses) == len(self.prompts)]
        for number, prompt in enumerate(self.prompts):
            if prompt.period:
                losses = [loss_of_copy(row.losses[number], prompt.period) for row in rows]
                first = stage_begins(losses, self.num_symbols)
                return None if first is None else rows[first].step
        return None

    def _write_timelapse(
        self,
        folder: Path,
        run_name: str,
        snapshot: Snapshot,
        curves: dict[str, list],
        is_last: bool,
    ) -> None:
        """Writes the time-lapse from the pages of single steps that have the same prompts. At the
        last step, also writes it as an animated image."""
        tokens = [prompt.tokens[: prompt.shown] for prompt in self.prompts]
        frames = []
        pages = sorted(path for path in folder.glob("step_*.html") if path.is_file())
        for path in evenly_spaced(pages, self.config.frames):
            with contextlib.suppress(ValueError, KeyError):  # not a page, or of another version
                (run,) = read(path, [VERSION])
                if [prompt["tokens"] for prompt in run["prompts"]] == tokens:
                    frames += run["frames"]
        path = folder / "timelapse.html"
        rows = self._rows
        data = run_data(run_name, self.prompts, frames, rows, curves, self.stage, self.ablation)
        self._write_page(path, data)
        snapshot.pages["attention/timelapse"] = path
        if is_last:
            path = folder / "timelapse.webp"
            self._animate(path, data)
            snapshot.images["attention/animation"] = path

    def _animate(self, path: Path, data: dict) -> None:
        """Writes the animation of the repeated sequence or, without it, of the first prompt.

        data: of the time-lapse.
        """
        number = next((n for n, prompt in enumerate(self.prompts) if prompt.period), 0)
        codes = [codes_of(data, frame)[number] for frame in data["frames"]]
        uniform, rows = uniform_values(self.prompts), {row.step: row for row in self._rows}
        steps = [frame["step"] for frame in data["frames"]]
        heads = [
            most_significant(head_table([rows[step]], uniform))[:3] if step in rows else []
            for step in steps
        ]
        write_animation(path, self.prompts[number], codes, steps, heads)

    def _write_page(self, path: Path, data: dict) -> None:
        # Atomic, because the time-lapse is made from these pages.
        atomic_write(path, page([data], title=f"{data['name']}: {path.stem}"))


def _line(key: str, table: Sequence[dict], uniform: float | None) -> str:
    """Returns the heads of a name with their values, or why no head has it; "" if the statistic is
    undefined, or without a positional head. uniform: the value for uniform attention."""
    named = [row for row in table if row["name"] == key]
    if uniform is None or any(row[key] is None for row in table):
        return ""
    what = f"{title_of(key)} ({uniform:.2f})"
    if named:
        values = [f"L{row['layer']} H{row['head']} {row[key]:.2f}" for row in named[:5]]
        return f"{what:<24} {'   '.join(values)}"
    if key not in NAMES:
        return ""
    row = max(table, key=lambda row: row[key])
    is_above = (row[key] - uniform) / (1 - uniform) >= NAMED_FROM[key]
    # A mean above the limit: either another name fits better, or one prompt is below the limit.
    where = " on every prompt" if is_above and row["name"] not in NAMES else ""
    other = f" ({title_of(row['name'])})" if is_above and row["name"] in NAMES else ""
    largest = f"L{row['layer']} H{row['head']} {row[key]:.2f}{other}"
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
