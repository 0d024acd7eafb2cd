"""An animated WebP of all heads on one prompt, with a frame for each recorded step.

Browsers and the image panel of W&B show it. The first frame is the last step, so a viewer that
does not animate shows the end of the run.

Shapes: L layers, H heads, T tokens of the prompt.
"""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import PIL.WebPImagePlugin  # noqa: F401  so that Pillow does not import all of its plugins
from PIL import Image, ImageDraw

from .fonts import font_of
from .heatmap import (
    ACCENT_INDEX,
    INK,
    MASKED_INDEX,
    PALE_INK,
    WHITE,
    fit_title,
    in_colour,
    paste_grid,
)
from .history import atomic_write, evenly_spaced
from .prompts import Prompt
from .statistics import STATISTICS

SIZE = (900, 800)  # pixels, at most
MAX_STEPS = 24
MAX_BYTES = 1_500_000
MILLISECONDS, LAST_MILLISECONDS = 350, 2500  # how long each step and the last step are shown
TOP = 132  # pixels above the heatmaps


def write_animation(
    path: Path,
    prompt: Prompt,
    codes: Sequence[np.ndarray],
    steps: Sequence[int],
    heads: Sequence[Sequence[dict]],
) -> None:
    """Writes the animation of at most MAX_STEPS steps; fewer if it would exceed MAX_BYTES.

    codes: for each step uint8 (L, H, T (T + 1) / 2). heads: for each step the rows of
    heads.head_table that are named and outlined.
    """
    frames = evenly_spaced(list(zip(codes, steps, heads, strict=True)), MAX_STEPS)
    images = [_frame(maps, step, named, prompt, steps[-1]) for maps, step, named in frames]
    while True:
        file = io.BytesIO()
        durations = [LAST_MILLISECONDS] + [MILLISECONDS] * (len(images) - 1)
        images[-1].save(
            file,
            "WEBP",
            save_all=True,
            append_images=images[:-1],
            duration=durations,
            quality=60,
            method=1,
        )
        if file.tell() <= MAX_BYTES or len(images) <= 2:
            break
        images = evenly_spaced(images, max(2, len(images) * MAX_BYTES // file.tell()))
    atomic_write(path, file.getvalue())


def _frame(
    codes: np.ndarray, step: int, heads: Sequence[dict], prompt: Prompt, last_step: int
) -> Image.Image:
    """Returns the image of one step, with a progress bar."""
    num_layers, num_heads, _ = codes.shape
    font, bold, small = font_of(20), font_of(28, "Bold"), font_of(17)
    left = round(font.getlength(f"L{num_layers - 1}")) + 24
    room = (SIZE[0] - left - 12) // num_heads, (SIZE[1] - TOP - 12) // num_layers
    pitch = max(2, min(room))
    width = max(640, left + num_heads * pitch + 12)
    image = Image.new("L", (width, TOP + num_layers * pitch + 12), WHITE)
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 0, width, 3), MASKED_INDEX)
    draw.rectangle((0, 0, step * width // max(1, last_step), 3), ACCENT_INDEX)
    draw.text((16, 8), f"step {step:,}", INK, bold)
    draw.text((width - 16, 18), "row: query token, column: key token", PALE_INK, small, anchor="ra")
    names = [f"L{row['layer']} H{row['head']} {STATISTICS[row['name']].title}" for row in heads]
    while font.getlength(" · ".join(names)) > width - 32:
        names.pop()
    draw.text((16, 46), " · ".join(names) or "no head has a clear pattern yet", INK, font)
    fit_title(prompt, width - 24, 17).draw(draw, 16, 74, PALE_INK, "la")
    paste_grid(image, (left, TOP), codes, pitch, font, heads)
    return in_colour(image).convert("RGB")
