"""The lens: what shows attention while a model learns.

It imports nothing from outside this folder, so the folder can be copied beside another model. It
needs a function that runs the model and hands over each layer's attention weights, and no more:

    def look_into(token_ids, capture):  # of a transformers model with eager attention
        output = model(torch.tensor([token_ids]), output_attentions=True)
        for layer, attn_weights in enumerate(output.attentions):
            capture(layer, attn_weights)

    lens = Lens(LensConfig(), tokenizer.encode, token_bytes, context_length=1024)
    look = lens.look(look_into, step=100, last_step=1000, folder=Path("attention"))

In reading order: statistics.py (what a head does, as numbers), probe.py (prompts, and one look at
the model), history.py (the numbers over the steps), heatmap.py (pictures), page/ with assemble.py
(the interactive page). The heavy parts are loaded at the first look.
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

# One whose word sense depends on its context ("bank"), one whose verb agrees with a noun far
# away ("letters ... were"), one in which a name comes back and is to be completed.
DEFAULT_PROMPTS = (
    "She sat on the bank of the river, far from the bank in the market where her money was.",
    "The letters that the keeper of the light had hidden in the old mill were found at last.",
    "Wenna rang the bell for Tam, and Tam looked at the river. Then Wenna rang the bell for",
)
MOST_FILES = 900  # pictures and pages of a run; dashboards become slow beyond a thousand
# Every page holds all prompts: with GPT-2 small and 64 tokens, a prompt takes 0.13 MB of a page and
# 3 MB of a time-lapse of 24 steps.
MOST_PROMPTS = 20
MOST_HISTORY = 60  # steps in the charts of a page


@dataclass
class LensConfig:
    """What the lens looks at, and how often."""

    # steps between looks, besides start and end; 0: never; null: a twentieth of the run, 40 to 1000
    every: int | None = None
    prompts: list[str] = field(default_factory=lambda: list(DEFAULT_PROMPTS))  # at most 20
    repeated: int = 24  # besides, so many random tokens written twice, for induction heads; 0: none
    max_tokens: int = 64  # longer prompts are cropped, and marked as such
    layers: list[int] = field(default_factory=list)  # of these also a large picture each
    frames: int = 24  # at most so many steps in the time-lapse

    def problems(self) -> list[tuple[str, object, str, str]]:
        """The problems, as (key, value, reason, hint); empty when there are none."""
        found = []
        if self.every is not None and self.every < 0:
            found.append(("every", self.every, "must not be negative", "use 0 for no lens"))
        if not 2 <= self.max_tokens <= 1024:
            cause = "the lens looks at 2 to 1024 tokens"
            found.append(("max_tokens", self.max_tokens, cause, "use 64 or so"))
        if not 2 <= self.frames <= 200:
            cause = "a time-lapse has from 2 to 200 steps"
            found.append(("frames", self.frames, cause, "use 24 or so"))
        if not 0 <= self.repeated <= 127 or self.repeated == 1:
            found.append(("repeated", self.repeated, "is from 2 to 127, or 0", "use 24 or so"))
        too_short = 2 <= self.max_tokens < 5  # for a token twice and the start
        if self.every != 0 and not self.prompts and (self.repeated == 0 or too_short):
            fix = "give a prompt, or use lens=off"
            found.append(("prompts", "[]", "nothing to look at", fix))
        for layer in self.layers:
            if layer < 0:
                found.append(("layers", layer, "layers count from 0", "use 0 or more"))
        if len(self.prompts) > MOST_PROMPTS:
            cause = "each page holds all prompts, and browsers have to load it"
            value = f"({len(self.prompts)} prompts)"
            found.append(("prompts", value, cause, f"use at most {MOST_PROMPTS}"))
            return found
        pictures = (len(self.prompts) + (self.repeated > 0)) * (1 + len(self.layers))
        if 2 * (pictures + 1) > MOST_FILES:  # with their pages, at the start and at the end
            cause = f"{pictures} pictures at each step, and a run may have {MOST_FILES} files"
            found.append(("layers", self.layers, cause, "use fewer layers or lens.prompts"))
        for prompt in self.prompts:
            if not prompt.strip():
                found.append(("prompts", repr(prompt), "an empty prompt", "give it some words"))
        return found

    def interval(self, last_step: int) -> int:
        """Steps between looks in a run of so many; 0: never. Left open, it keeps them cheap."""
        return min(max(last_step // 20, 40), 1000) if self.every is None else self.every


@dataclass
class Look:
    """What one look came to, under the names that a dashboard gives them."""

    metrics: dict[str, float]  # the mean over each layer's heads
    heads: dict[str, float]  # every head by itself: many, so dashboards hide them at first
    histograms: dict[str, "np.ndarray"]  # of all heads, for each statistic
    pictures: dict[str, Path] = field(default_factory=dict)  # PNG
    pages: dict[str, Path] = field(default_factory=dict)  # HTML
    tables: dict[str, tuple[Sequence, Sequence]] = field(default_factory=dict)  # columns, rows


class Lens:
    """Looks at a fixed set of prompts, the same at every step, and shows what it sees.

    encode(text) gives token ids, token_bytes(id) the bytes that an id stands for (KeyError when
    none). The repeated sequence is drawn from `vocabulary` and begins with `bos`; without a
    vocabulary there is none.
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
        self.table: list[tuple] = []  # every head ranked by each statistic, at the end

    def due(self, step: int, last_step: int) -> bool:
        """Whether to look after this many steps: at the start, at each interval and at the end."""
        every = self.config.interval(last_step)
        return every > 0 and bool(self.prompts) and (step % every == 0 or step == last_step)

    def draws(self, step: int, last_step: int) -> bool:
        """Whether a look becomes pictures and a page: each one, unless a long run has too many."""
        return step % self._drawn_every(last_step) == 0 or step == last_step

    def look(
        self,
        look_into: Callable[[list[int], Callable], object],
        step: int,
        last_step: int,
        folder: Path,
        run_name: str = "",
        write: bool = True,
    ) -> Look | None:
        """Looks at every head on every prompt; writes what there is to see into `folder`.

        look_into: see probe.py. run_name is what the pages call the run. write=False looks and
        returns None: for the ranks of a sharded model that must take part in running it and have
        nothing to write.
        """
        from .history import COLUMNS, History
        from .probe import probe

        frame = probe(look_into, self.prompts, step)
        if not write:
            return None
        if self.history is None:
            _drop_from(folder, step)
            self.history = History(folder / "statistics.jsonl", step)
        self.history.add(frame.row)
        look = _numbers(frame.row)
        if self.draws(step, last_step):
            self._draw(frame, folder, run_name, look)
            if step > 0 and self._is_milestone(step, last_step):
                look.pages["attention/timelapse"] = self._write_timelapse(folder, run_name)
        if step == last_step:
            self.table = self.history.write_table(folder / "heads.csv")
            look.tables["attention/table"] = (COLUMNS, self.table)
        return look

    def findings(self) -> list[str]:
        """The heads that became something: "induction L5 H1: 0.83 (halfway there at step 400)".

        One for each kind of which a head shows a quarter or more.
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

    def _drawn_every(self, last_step: int) -> int:
        """Steps between drawn looks: a multiple of their interval that keeps to MOST_FILES."""
        files = len(self.prompts) * (1 + len(self.config.layers)) + 1
        looks = max(2, MOST_FILES // files)  # the start and the end among them
        every = max(1, self.config.interval(last_step))
        return every * max(1, math.ceil(last_step / every / (looks - 1)))

    def _is_milestone(self, step: int, last_step: int) -> bool:
        """Whether a quarter of the run was completed since the last drawn look, or all of it."""
        before = max(0, step - self._drawn_every(last_step))
        return step == last_step or 4 * step // last_step > 4 * before // last_step

    def _draw(self, frame: "Frame", folder: Path, run_name: str, look: Look) -> None:
        from .heatmap import draw_grid, draw_layer
        from .page import frame_data

        step = frame.row.step
        for prompt, codes in zip(self.prompts, frame.codes, strict=True):
            path = folder / f"step_{step:08d}_{prompt.name}.png"
            draw_grid(codes, prompt, step, path)
            look.pictures[f"attention/heatmap/{prompt.name}"] = path
            for layer in self.config.layers:
                path = folder / f"step_{step:08d}_{prompt.name}_L{layer:02d}.png"
                draw_layer(codes[layer], prompt, step, layer, path)
                look.pictures[f"attention/layer/L{layer:02d}/{prompt.name}"] = path
        path = folder / f"step_{step:08d}.html"
        self._write_page(path, [frame_data(frame)], [frame.row], run_name)
        look.pages["attention/viewer"] = path

    def _write_timelapse(self, folder: Path, run_name: str) -> Path:
        """The page of many steps, made of the pages of single steps that show the same prompts."""
        from .history import evenly_spread
        from .page import read

        tokens = [prompt.tokens[: prompt.shown] for prompt in self.prompts]
        frames = []
        pages = sorted(path for path in folder.glob("step_*.html") if path.is_file())
        for path in evenly_spread(pages, self.config.frames):
            with contextlib.suppress(ValueError, KeyError):  # a page of another version
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
        whole = path.with_suffix(".tmp")  # a page is complete or absent: time-lapses read them
        whole.unlink(missing_ok=True)  # a link would be followed
        whole.write_text(page([data], title=f"{run_name}: {path.stem}"), encoding="utf-8")
        os.replace(whole, path)


def _numbers(row: "Row") -> Look:
    """The row's numbers under their dashboard keys; what is not defined is left out.

    Dashboards make a section of everything before the first slash. The pictures and pages are in
    "attention"; the many curves have sections of their own, or nobody would find the pictures.
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
    return Look(metrics, heads, histograms)


def _drop_from(folder: Path, step: int) -> None:
    """Removes pictures and pages of `step` and later: of an attempt that was cut off."""
    for path in folder.glob("step_*"):
        if path.name[5:13].isdigit() and int(path.name[5:13]) >= step:
            path.unlink()
    if not any(folder.glob("step_*")):
        for name in ("timelapse.html", "heads.csv"):
            (folder / name).unlink(missing_ok=True)
