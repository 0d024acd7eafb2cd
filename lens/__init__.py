"""The lens: statistics, heatmaps and an interactive page of a model's attention heads.

It imports nothing from outside this folder, so the folder can be copied into another project. All
it needs is a function that runs the model and passes on each layer's attention weights:

    def capture_attention(token_ids, capture):  # of a transformers model with eager attention
        output = model(torch.tensor([token_ids]), output_attentions=True)
        for layer, attn_weights in enumerate(output.attentions):
            capture(layer, attn_weights)

    lens = Lens(LensConfig(), tokenizer.encode, token_bytes, context_length=1024)
    snapshot = lens.snapshot(capture_attention, step=100, max_steps=1000, folder=Path("attention"))

In reading order: statistics.py (one number for each head), probe.py (prompts; running the model),
history.py (statistics over the steps), heatmap.py (PNG pictures), page/ and assemble.py (the
interactive page). torch, numpy and matplotlib are imported at the first snapshot.
"""

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from .history import Row
    from .probe import Frame

# A word whose sense depends on its context ("bank"), a verb that agrees with a distant noun
# ("letters ... were"), a name that occurs again and has to be completed.
DEFAULT_PROMPTS = (
    "She sat on the bank of the river, far from the bank in the market where her money was.",
    "The letters that the keeper of the light had hidden in the old mill were found at last.",
    "Wenna rang the bell for Tam, and Tam looked at the river. Then Wenna rang the bell for",
)
MOST_FILES = 900  # pictures and pages of a run: dashboards become slow beyond a thousand
# Every page holds all prompts: with GPT-2 small and 64 tokens, a prompt takes 0.13 MB of a page and
# 3 MB of a time-lapse of 24 steps.
MOST_PROMPTS = 20
MOST_HISTORY = 60  # steps in the charts of a page


@dataclass
class LensConfig:
    """The settings of the lens: prompts, and how often a snapshot is taken."""

    # steps between snapshots; there is one at the start and at the end too; 0: none at all;
    # null: a twentieth of the run, 40 to 1000
    every: int | None = None
    prompts: list[str] = field(default_factory=lambda: list(DEFAULT_PROMPTS))  # at most 20
    repeated: int = 24  # one more prompt: this many random tokens, twice; 0: none
    max_tokens: int = 64  # longer prompts are truncated, and marked as such
    layers: list[int] = field(default_factory=list)  # layers that also get a large picture
    frames: int = 24  # most steps in the time-lapse

    def interval(self, max_steps: int) -> int:
        """Steps between snapshots in a run of `max_steps`; 0: no snapshots."""
        return min(max(max_steps // 20, 40), 1000) if self.every is None else self.every


@dataclass
class Snapshot:
    """The results of one snapshot, under their names on a dashboard."""

    metrics: dict[str, float]  # statistics, the mean over each layer's heads
    heads: dict[str, float]  # statistics of each head: many, so dashboards hide them at first
    histograms: dict[str, "np.ndarray"]  # for each statistic its values for all heads
    pictures: dict[str, Path] = field(default_factory=dict)  # PNG
    pages: dict[str, Path] = field(default_factory=dict)  # HTML
    tables: dict[str, tuple[Sequence, Sequence]] = field(default_factory=dict)  # columns, rows


class Lens:
    """Takes attention snapshots on a fixed set of prompts and writes pictures and pages.

    encode(text) returns token ids, token_bytes(id) the bytes of a token (KeyError if it has none).
    The repeated sequence is drawn from `vocabulary` and begins with `bos`; without a vocabulary
    there is none.
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
        from .probe import make_prompt, repeated_prompt

        self.config = config
        limit = min(config.max_tokens, context_length)
        self.prompts = [
            make_prompt(number, text, encode, token_bytes, limit)
            for number, text in enumerate(config.prompts, start=1)
        ]
        if config.repeated and len(vocabulary):
            number = len(self.prompts) + 1
            period = min(config.repeated, (limit - 1) // 2)
            repeated = repeated_prompt(number, vocabulary, bos, token_bytes, period)
            self.prompts += [repeated] if repeated else []
        self.history = None
        self.table: list[tuple] = []  # all heads ranked by each statistic; set at the end

    def due(self, step: int, max_steps: int) -> bool:
        """Whether to take a snapshot at this step: at the start, each interval and the end."""
        every = self.config.interval(max_steps)
        return every > 0 and bool(self.prompts) and (step % every == 0 or step == max_steps)

    def draws(self, step: int, max_steps: int) -> bool:
        """Whether the snapshot at this step has pictures and a page: all, unless too many."""
        return step % self._drawn_every(max_steps) == 0 or step == max_steps

    def snapshot(
        self,
        capture_attention: Callable[[list[int], Callable], object],
        step: int,
        max_steps: int,
        folder: Path,
        run_name: str = "",
        write: bool = True,
    ) -> Snapshot | None:
        """Runs the model on every prompt; writes statistics, pictures and pages into `folder`.

        capture_attention: see probe.py. run_name is the run's name on the pages. write=False only
        runs the model and returns None: for ranks other than 0 of a sharded model.
        """
        from .history import COLUMNS, History
        from .probe import probe

        frame = probe(capture_attention, self.prompts, step)
        if not write:
            return None
        if self.history is None:
            _drop_from(folder, step)
            self.history = History(folder / "statistics.jsonl", step)
        self.history.add(frame.row)
        snapshot = _numbers(frame.row)
        if self.draws(step, max_steps):
            self._draw(frame, folder, run_name, snapshot)
            if step > 0 and self._is_milestone(step, max_steps):
                snapshot.pages["attention/timelapse"] = self._write_timelapse(folder, run_name)
        if step == max_steps:
            self.table = self.history.write_table(folder / "heads.csv")
            snapshot.tables["attention/table"] = (COLUMNS, self.table)
        return snapshot

    def findings(self) -> list[str]:
        """The strongest head of each kind, if its value is 0.25 or more:
        "induction L5 H1: 0.83 (halfway there at step 400)". Empty before the last snapshot.
        """
        from .history import KINDS
        from .statistics import STATISTICS

        found = []
        for key, rank, layer, head, value, _, step in self.table:
            if rank == 1 and key in KINDS and value >= 0.25:
                title = STATISTICS[key].title
                found.append(
                    f"{title} L{layer} H{head}: {value:.2f} (halfway there at step {step})"
                )
        return found

    def _drawn_every(self, max_steps: int) -> int:
        """Steps between snapshots with pictures: a multiple of the interval, for MOST_FILES."""
        files = len(self.prompts) * (1 + len(self.config.layers)) + 1
        drawn = max(2, MOST_FILES // files)  # including those at the start and the end
        every = max(1, self.config.interval(max_steps))
        return every * max(1, math.ceil(max_steps / every / (drawn - 1)))

    def _is_milestone(self, step: int, max_steps: int) -> bool:
        """Whether a quarter of the run, or all of it, was completed since the last pictures."""
        before = max(0, step - self._drawn_every(max_steps))
        return step == max_steps or 4 * step // max_steps > 4 * before // max_steps

    def _draw(self, frame: "Frame", folder: Path, run_name: str, snapshot: Snapshot) -> None:
        from .heatmap import draw_grid, draw_layer
        from .page import frame_data

        step = frame.row.step
        for prompt, codes in zip(self.prompts, frame.codes, strict=True):
            path = folder / f"step_{step:08d}_{prompt.name}.png"
            draw_grid(codes, prompt, step, path)
            snapshot.pictures[f"attention/heatmap/{prompt.name}"] = path
            for layer in self.config.layers:
                path = folder / f"step_{step:08d}_{prompt.name}_L{layer:02d}.png"
                draw_layer(codes[layer], prompt, step, layer, path)
                snapshot.pictures[f"attention/layer/L{layer:02d}/{prompt.name}"] = path
        path = folder / f"step_{step:08d}.html"
        self._write_page(path, [frame_data(frame)], [frame.row], run_name)
        snapshot.pages["attention/viewer"] = path

    def _write_timelapse(self, folder: Path, run_name: str) -> Path:
        """Writes one page of many steps from the pages of single steps with the same prompts."""
        from .history import evenly_spaced
        from .page import read

        tokens = [prompt.tokens[: prompt.shown] for prompt in self.prompts]
        frames = []
        pages = sorted(path for path in folder.glob("step_*.html") if path.is_file())
        for path in evenly_spaced(pages, self.config.frames):
            with contextlib.suppress(ValueError, KeyError):  # not a page of this version
                (run,) = read(path)
                if [prompt["tokens"] for prompt in run["prompts"]] == tokens:
                    frames += run["frames"]
        path = folder / "timelapse.html"
        self._write_page(path, frames, self.history.thinned(MOST_HISTORY), run_name)
        return path

    def _write_page(
        self, path: Path, frames: list[dict], history: "list[Row]", run_name: str
    ) -> None:
        from .page import page, run_data

        data = run_data(run_name, self.prompts, frames, history)
        temporary = path.with_suffix(".tmp")  # atomic: time-lapses read pages
        temporary.unlink(missing_ok=True)  # a link would be followed
        temporary.write_text(page([data], title=f"{run_name}: {path.stem}"), encoding="utf-8")
        os.replace(temporary, path)


def _numbers(row: "Row") -> Snapshot:
    """The row's numbers under their dashboard keys; undefined statistics are omitted.

    The part of a key before the first slash is a section of the dashboard. Pictures and pages are
    in "attention"; the many curves have other sections, so that the pictures are easy to find.
    """
    import numpy as np

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


def _drop_from(folder: Path, step: int) -> None:
    """Removes pictures and pages of `step` and later: the run was resumed before them."""
    for path in folder.glob("step_*"):
        if path.name[5:13].isdigit() and int(path.name[5:13]) >= step:
            path.unlink()
    if not any(folder.glob("step_*")):
        for name in ("timelapse.html", "heads.csv"):
            (folder / name).unlink(missing_ok=True)
