"""Images of attention heads: of a step, of the time-lapse, and figures.

    draw_panel(codes, prompt, step, heads, uniform, path)  # a PNG for a dashboard
    write_animation(path, prompt, codes, steps, heads)     # an animated WebP
    png = draw_figure(read_snapshot(path))                 # a PNG for a paper

All of them consist of the same parts: a title, the grid of all heads, enlarged heads with tokens.
Pillow draws an image in a few milliseconds; training waits until it is written.

Shapes: L layers, H heads, T tokens of the prompt.
"""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import PIL.WebPImagePlugin  # noqa: F401  so that Pillow does not import all of its plugins
from PIL import Image, ImageDraw, ImageFont

from .fonts import DrawnText, drawn, font_of
from .heads import clearest_prompts, head_table, most_significant
from .heatmap import (
    ACCENT_INDEX,
    INK,
    MASKED_INDEX,
    PALE_INK,
    WHITE,
    colour_bar,
    fitted,
    in_colour,
    png_of,
    tile,
)
from .history import atomic_write, evenly_spaced
from .prompts import Prompt, clipped, plain_text
from .rounding import formatted
from .snapshot_data import SnapshotData
from .statistics import STATISTICS

PANEL = (920, 600)  # pixels; twice the size of a panel of W&B
FRAME = (900, 800)  # pixels of the animation, at most
FRAME_TOP = 132  # pixels above the heatmaps of a frame
FIGURE = 1600  # pixels of an enlarged head and, if the heads are large enough, of all heads
HEAD = (80, 400)  # pixels of a heatmap in a figure of all heads: least, most
LARGEST = 4096  # pixels of a figure of all heads
MARGIN = 40  # pixels around a figure
LINE = 0.85  # size of a font / height of the rows into which it fits, with descenders
GAP = 6  # pixels between two heatmaps, at most
TICKS = (0, 0.01, 0.1, 0.25, 0.5, 1)  # of the colour bar
MAX_STEPS = 24  # of the animation
MAX_BYTES = 1_500_000
MILLISECONDS, LAST_MILLISECONDS = 350, 2500  # how long each step and the last step are shown
AXES = "row: query token, column: key token"


def caption(prompt: Prompt, step: int) -> str:
    """Returns the caption of an image on a dashboard: "step 400 · prompt: “She sat on the …”"."""
    return f"step {step:,} · prompt: {title_of(prompt, 80)}"


def draw_panel(
    codes: np.ndarray,
    prompt: Prompt,
    step: int,
    heads: Sequence[Mapping],
    uniform: Mapping,
    path: Path,
) -> None:
    """Writes a PNG for a panel of a dashboard, which shows it at half of its size: all heads on
    the left, the first of `heads` enlarged on the right and, if there is room, the second one below
    the grid.

    codes: uint8 (L, H, T (T + 1) / 2). heads: rows of heads.head_table. uniform: the statistics for
    uniform attention on this prompt.
    """
    num_layers, num_heads, _ = codes.shape
    image, draw = _canvas(*PANEL)
    font, bold = font_of(20), font_of(26, "Bold")
    draw.text((16, 10), f"step {step:,}", INK, bold)
    after = 32 + bold.getlength(f"step {step:,}")
    fit_title(prompt, PANEL[0] - after - 8, 20).draw(draw, after, 15, PALE_INK, "la")

    left, top = _left(font, num_layers), 80
    pitch = max(2, min((420 - left) // num_heads, (PANEL[1] - 12 - top) // num_layers))
    right, bottom = left + num_heads * pitch + 24, top + num_layers * pitch + 12
    rooms = [(right, 48, PANEL[0] - 16, PANEL[1] - 10), (left, bottom, right - 24, PANEL[1] - 10)]
    if not heads:
        draw.text((right, 150), "no head has a name\non this prompt", PALE_INK, font_of(24))
    # The lines above an enlarged head need 52 of these pixels.
    fitting = [room for room in rooms if room[3] - room[1] >= 200]
    enlarged = list(zip(heads, fitting, strict=False))
    _draw_grid(image, (left, top), codes, pitch, font, [row for row, _ in enlarged])
    for row, (x, y, end, lowest) in enlarged:
        draw.text((x, y), _name_of(row), INK, font_of(20, "Bold"))
        value = f"{formatted(row[row['name']])} (chance {formatted(uniform[row['name']])})"
        draw.text((x, y + 24), value, INK, font)
        width, size = end - x, min(end - x, lowest - y - 52)
        size -= max(0, _label_end(prompt, size, 16) - width)
        _draw_head(image, (x, y + 52), codes[row["layer"], row["head"]], prompt, size, 16)
    atomic_write(path, png_of(image, compress_level=1))


def draw_figure(
    data: SnapshotData, head: tuple[int, int] | None = None, prompt: int | None = None
) -> bytes:
    """Returns a figure of a snapshot as a PNG: all heads, or one head with its tokens.

    head: (layer, head); None for all heads. prompt: its index; None: the one on which the head, or
    the most significant of all heads, is clearest.
    """
    if prompt is None:
        prompt = _clearest_prompt(data, head)
    codes, shown = data.codes[prompt], data.prompts[prompt]
    heads = _all_heads(codes, shown) if head is None else _one_head(codes[head], shown)
    what = "all heads" if head is None else f"L{head[0]} H{head[1]}"
    title = f"{data.run}, {what}, step {data.step:,}"
    width = max(heads.width, 1240)  # of the colour bar and its texts
    room = width - 2 * MARGIN
    bold = font_of(min(44, int(44 * room / font_of(44, "Bold").getlength(title))), "Bold")
    image, draw = _canvas(width, 140 + heads.height + 150)
    draw.text((MARGIN, 28), title, INK, bold)
    fit_title(shown, room, 32).draw(draw, MARGIN, 88, PALE_INK, "la")
    image.paste(heads, (0, 140))
    _draw_colour_bar(image, (MARGIN, 140 + heads.height + 40))
    return png_of(image)


def _all_heads(codes: np.ndarray, prompt: Prompt) -> Image.Image:
    """Returns all heads as a part of a figure."""
    num_layers, num_heads, _ = codes.shape
    font, longest = font_of(36), max(num_layers, num_heads)
    size = min(max(FIGURE // longest, HEAD[0]), HEAD[1])
    pitch = GAP + _whole_cells(prompt, size, most=LARGEST // longest)
    corner = _left(font, num_layers), 60
    image, _ = _canvas(corner[0] + num_heads * pitch + MARGIN, corner[1] + num_layers * pitch)
    _draw_grid(image, corner, codes, pitch, font, [])
    return image


def _one_head(codes: np.ndarray, prompt: Prompt) -> Image.Image:
    """Returns an enlarged head as a part of a figure."""
    size = _whole_cells(prompt, FIGURE, most=FIGURE)
    width = max(size, _label_end(prompt, size, 40))
    image, _ = _canvas(MARGIN + width + MARGIN, 10 + size)
    _draw_head(image, (MARGIN, 10), codes, prompt, size, 40)
    return image


def _clearest_prompt(data: SnapshotData, head: tuple[int, int] | None) -> int:
    """Returns the index of the prompt on which a head, or the most significant one, is clearest."""
    table = head_table([data.row], data.uniform)
    row = (most_significant(table) or table)[0]
    prompts = clearest_prompts(data.of_prompts, [prompt.uniform for prompt in data.prompts])
    return int(prompts[head or (row["layer"], row["head"])])


def write_animation(
    path: Path,
    prompt: Prompt,
    codes: Sequence[np.ndarray],
    steps: Sequence[int],
    heads: Sequence[Sequence[dict]],
) -> None:
    """Writes an animated WebP of all heads, with a frame for each step, at most MAX_STEPS; fewer if
    it would exceed MAX_BYTES. The first frame is the last step, so a viewer that does not animate
    shows the end of the run.

    codes: for each step uint8 (L, H, T (T + 1) / 2). heads: for each step the rows of
    heads.head_table that are named and outlined.
    """
    frames = evenly_spaced(list(zip(codes, steps, heads, strict=True)), MAX_STEPS)
    images = [_frame(maps, step, named, prompt, steps[-1]) for maps, step, named in frames]
    while True:
        file = io.BytesIO()
        durations = [LAST_MILLISECONDS] + [MILLISECONDS] * (len(images) - 1)
        options = {"save_all": True, "duration": durations, "quality": 60, "method": 1}
        images[-1].save(file, "WEBP", append_images=images[:-1], **options)
        if file.tell() <= MAX_BYTES or len(images) <= 2:
            break
        images = evenly_spaced(images, max(2, len(images) * MAX_BYTES // file.tell()))
    atomic_write(path, file.getvalue())


def _frame(
    codes: np.ndarray, step: int, heads: Sequence[dict], prompt: Prompt, last_step: int
) -> Image.Image:
    """Returns the image of one step, with a progress bar."""
    num_layers, num_heads, _ = codes.shape
    font = font_of(20)
    left = _left(font, num_layers)
    room = (FRAME[0] - left - 12) // num_heads, (FRAME[1] - FRAME_TOP - 12) // num_layers
    pitch = max(2, min(room))
    width = max(640, left + num_heads * pitch + 12)
    image, draw = _canvas(width, FRAME_TOP + num_layers * pitch + 12)
    draw.rectangle((0, 0, width, 3), MASKED_INDEX)
    draw.rectangle((0, 0, step * width // max(1, last_step), 3), ACCENT_INDEX)
    draw.text((16, 8), f"step {step:,}", INK, font_of(28, "Bold"))
    draw.text((width - 16, 18), AXES, PALE_INK, font_of(17), anchor="ra")
    names = [_name_of(row) for row in heads]
    while font.getlength(" · ".join(names)) > width - 32:
        names.pop()
    draw.text((16, 46), " · ".join(names) or "no head has a clear pattern yet", INK, font)
    fit_title(prompt, width - 24, 17).draw(draw, 16, 74, PALE_INK, "la")
    _draw_grid(image, (left, FRAME_TOP), codes, pitch, font, heads)
    return in_colour(image).convert("RGB")


# ------------------------------------------------------------------------------ parts of images


def _canvas(width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    """Returns a white image of indices of colours, and what draws on it."""
    image = Image.new("L", (width, height), WHITE)
    return image, ImageDraw.Draw(image)


def _left(font: ImageFont.FreeTypeFont, num_layers: int) -> int:
    """Returns the pixels on the left of a grid, with the numbers of layers."""
    return round(font.getlength(f"L{num_layers - 1}")) + 24


def _whole_cells(prompt: Prompt, size: int, most: int) -> int:
    """Returns the size of a heatmap of about `size` pixels whose cells are equally large, if it has
    at most `most` pixels."""
    return min(prompt.shown * max(1, size // prompt.shown), most)


def _name_of(row: Mapping) -> str:
    """Returns the place and the name of a head: "L1 H3 induction"."""
    return f"L{row['layer']} H{row['head']} {STATISTICS[row['name']].title}"


def _draw_grid(
    image: Image.Image,
    corner: tuple[int, int],
    codes: np.ndarray,
    pitch: int,
    font: ImageFont.FreeTypeFont,
    outlined: Sequence[Mapping],
) -> None:
    """Draws all heads, uint8 (L, H, T (T + 1) / 2), a row for each layer, with the numbers of heads
    above and of layers on the left, as many as fit, and a frame around some heads.

    corner: (x, y) of the first heatmap. pitch: pixels from one head to the next. outlined: rows of
    heads.head_table.
    """
    (left, top), (num_layers, num_heads), draw = corner, codes.shape[:2], ImageDraw.Draw(image)
    gap = min(GAP, max(1, pitch // 10))
    size = pitch - gap
    image.paste(Image.fromarray(tile(codes, size, gap)), corner)
    widest = font.getlength(f"H{num_heads - 1}") + 6
    for head in range(0, num_heads, math.ceil(widest / pitch)):
        x = left + head * pitch + size / 2
        draw.text((x, top - 5), f"H{head}", INK, font, anchor="md")
    for layer in range(0, num_layers, math.ceil((font.size + 2) / pitch)):
        y = top + layer * pitch + size / 2
        draw.text((left - 8, y), f"L{layer}", INK, font, anchor="rm")
    for row in outlined:
        x, y = left + row["head"] * pitch - 2, top + row["layer"] * pitch - 2
        draw.rectangle((x, y, x + size + 3, y + size + 3), outline=ACCENT_INDEX, width=2)


def _draw_head(
    image: Image.Image,
    corner: tuple[int, int],
    codes: np.ndarray,
    prompt: Prompt,
    size: int,
    largest: int,
) -> None:
    """Draws a head, uint8 (T (T + 1) / 2), of `size` pixels, with its tokens.

    A token is in the masked half, next to the diagonal: right of its row and above its column. If
    the rows are too low to be legible, every second, third, ... token is written. largest: height
    of the tokens in pixels; at least half of it.
    """
    draw = ImageDraw.Draw(image)
    image.paste(Image.fromarray(fitted(codes, size)), corner)
    for text, x, y in _labels(prompt, size, largest):
        text.draw(draw, corner[0] + x, corner[1] + y, INK, "lm")


def _label_end(prompt: Prompt, size: int, largest: int) -> int:
    """Returns where the tokens of a heatmap of `size` pixels end, in pixels from its left."""
    labels = _labels(prompt, size, largest)
    return math.ceil(max((x + text.length for text, x, _ in labels), default=0))


def _labels(prompt: Prompt, size: int, largest: int) -> list[tuple[DrawnText, float, float]]:
    """Returns (text, x, y) of each token that is written."""
    cell = size / prompt.shown
    every = math.ceil(largest / 2 / LINE / cell)
    height = max(1, min(largest, int(LINE * every * cell)))
    texts = {
        n: drawn(clipped(prompt.labels[n], 12), height)
        for n in range(every - 1, prompt.shown, every)
    }
    # Also a text of several rows ends with its row: below are weights.
    return [(text, (n + 1) * cell + 3, (n + 1 - every / 2) * cell) for n, text in texts.items()]


def _draw_colour_bar(image: Image.Image, corner: tuple[int, int]) -> None:
    """Draws the scale of the colours. It is that of the square root of the weight."""
    (x, y), width, height = corner, 600, 24
    draw, font = ImageDraw.Draw(image), font_of(26)
    image.paste(Image.fromarray(colour_bar(width, height)), corner)
    for tick in TICKS:
        at = x + width * math.sqrt(tick)
        draw.line((at, y + height, at, y + height + 8), INK, 2)
        draw.text((at, y + height + 10), f"{tick:g}", INK, font, anchor="ma")
    draw.text((x + width + 30, y - 6), "attention weight", INK, font)
    draw.text((x + width + 30, y + 28), AXES, PALE_INK, font)


# --------------------------------------------------------------------------------------- texts


def title_of(prompt: Prompt, fits: int) -> str:
    """Returns the prompt in about `fits` characters, with a note if the prompt is truncated."""
    note = f"  (first {prompt.shown} tokens)" if prompt.truncated else ""
    text = plain_text(prompt.tokens[: prompt.shown]) if prompt.truncated else prompt.text
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    most = max(4, fits - len(note))
    if len(text) > most:  # ends with a word, if there are spaces between words
        end = text.rfind(" ", most // 2, most - 1)
        text = f"{text[: end if end > 0 else most - 2]} …"
    return (f"“{text}”" if not prompt.period else text) + note


def fit_title(prompt: Prompt, width: float, size: int) -> DrawnText:
    """Returns the title of a prompt, at most about `width` pixels wide. It has a note if the
    installed fonts lack some of its characters."""
    fits = round(2 * width / size)
    for _ in range(3):
        text = title_of(prompt, fits)
        title = drawn(text, size)
        if title.has_codes:
            title = drawn(f"{text}  (no font for some characters)", size)
        if title.length <= width:
            break
        fits = int(min(fits, len(text)) * width / title.length)
    return title
