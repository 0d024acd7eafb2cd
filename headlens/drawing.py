"""Images of attention heads: of a step, of the clearest head, and figures.

    image = heads_image(read_snapshot(path), prompt=0)  # all heads on a prompt
    image = largest_image(read_snapshot(path))          # the clearest head, with its tokens
    png = draw_figure(read_snapshot(path))              # a PNG for a paper

All of them consist of the same parts: a title, the grid of all heads, an enlarged head with tokens.
Pillow draws an image in a few milliseconds; training waits until it is written.

Shapes: L layers, H heads, T tokens of the prompt.
"""

import math
import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from . import finding
from .fonts import DrawnText, drawn, font_of
from .heads import KINDS
from .heads import title_of as title_of_name
from .heatmap import ACCENT_INDEX, INK, PALE_INK, WHITE, colour_bar, fitted, png_of, tile
from .history import head_name
from .prompts import Prompt, clipped
from .rounding import formatted
from .snapshot_data import SnapshotData, triangle_to_square

HEADS = (900, 900)  # pixels of an image of all heads, at most
HEADS_TOP = 132  # pixels above its heatmaps
LARGEST = (600, 690)  # pixels of the image of the clearest head; a panel of W&B shows it at half
LARGEST_TOP = 134  # pixels above its head: the same at each step, also with fewer lines of text
LARGEST_LINE = 54  # characters of its text
LARGEST_TOKENS = 24  # that it shows, so that they are legible at half of the size
FIGURE = 1600  # pixels of an enlarged head and, if the heads are large enough, of all heads
HEAD = (80, 400)  # pixels of a heatmap in a figure of all heads: least, most
LARGEST_FIGURE = 4096  # pixels of a figure of all heads
MARGIN = 40  # pixels around a figure
LINE = 0.85  # size of a font / height of the rows into which it fits, with descenders
GAP = 6  # pixels between two heatmaps, at most
TICKS = (0, 0.01, 0.1, 0.25, 0.5, 1)  # of the colour bar
AXES = "row: query token, column: key token"


def heads_image(data: SnapshotData, prompt: int, named: Sequence[Mapping] = ()) -> Image.Image:
    """Returns the image of all heads on a prompt. Its size depends on the layers and heads alone.

    named: rows of heads.head_table, whose heads are named and outlined.
    """
    num_layers, num_heads = data.row.names.shape
    font = font_of(20)
    left, others = _left(font, data), _height_of_others(font, data)
    tall = HEADS[1] - HEADS_TOP - 12 - others
    pitch = max(2, min((HEADS[0] - left - 12) // num_heads, tall // num_layers))
    width = max(640, left + num_heads * pitch + 12)
    image, draw = _canvas(width, HEADS_TOP + others + num_layers * pitch + 12)
    draw.text((16, 8), f"step {data.step:,}", INK, font_of(28, "Bold"))
    draw.text((width - 16, 18), AXES, PALE_INK, font_of(17), anchor="ra")
    names = [_name_of(row) for row in named]
    while font.getlength(" · ".join(names)) > width - 32:
        names.pop()
    draw.text((16, 46), " · ".join(names) or "no head has a clear pattern yet", INK, font)
    fit_title(data.prompts[prompt], width - 24, 17).draw(draw, 16, 74, PALE_INK, "la")
    _draw_grid(image, (left, HEADS_TOP), data, prompt, pitch, font, named)
    return image


def largest_image(data: SnapshotData) -> tuple[Image.Image, str]:
    """Returns the image of the clearest head and its caption. It has the tokens around the example
    of the head, which is outlined."""
    of = finding.Heads(data)
    row, title, number = of.first, _name_of(of.first), of.shown_prompt(of.first)
    prompt, cell = data.prompts[number], of.cells[number][of.index(row)]
    meaning = "The clearest head; no head has a name yet."
    if row["name"] in KINDS:
        meaning = KINDS[row["name"]].meaning.partition(". ")[0].rstrip(".") + "."
    kept = _tokens_around(cell.query, cell.key, prompt.shown)
    weights = triangle_to_square(data.codes[number][row["place"]])[np.ix_(kept, kept)]
    labels = [prompt.labels[n] for n in kept]
    (width, height), (image, draw) = LARGEST, _canvas(*LARGEST)
    font, y = font_of(20), 48
    draw.text((16, 10), title, INK, font_of(26, "Bold"))
    draw.text((width - 16, 14), f"step {data.step:,}", INK, font_of(22), anchor="ra")
    for line in textwrap.wrap(meaning, LARGEST_LINE)[:2]:
        draw.text((16, y), line, INK, font)
        y += 26
    if cell.is_name:
        draw.rectangle((16, y + 4, 32, y + 20), outline=ACCENT_INDEX, width=3)
        query, key = (clipped(prompt.labels[at], 12) for at in (cell.query, cell.key))
        weight = formatted(cell.weight)
        # Each part alone: a right-to-left token would reverse the sentence.
        x = 42
        for part in ("“", query, "” attends to “", key, f"” (weight {weight})"):
            text = drawn(part, 20)
            text.draw(draw, x, y, INK, "la")
            x += text.length
    y, room = LARGEST_TOP, min(width - 32, height - LARGEST_TOP - 36)
    size = room - max(0, _label_end(labels, room, 20) - (width - 24))
    _draw_head(image, (16, y), weights[np.tril_indices(len(kept))], labels, size, 20)
    pixels = size / len(kept)
    for n in np.flatnonzero(np.diff(kept) > 1) + 1:  # tokens are skipped here
        at = round(n * pixels)
        draw.line((16, y + at, 16 + at, y + at), WHITE, 2)
        draw.line((16 + at, y + at, 16 + at, y + size), WHITE, 2)
    if cell.is_name:
        top, x = (round(kept.index(at) * pixels) for at in (cell.query, cell.key))
        box = (14 + x, y + top - 2, 17 + x + round(pixels), y + top + round(pixels) + 1)
        draw.rectangle(box, outline=ACCENT_INDEX, width=3)
    of_all = f" · {len(kept)} of {prompt.shown} tokens" * (len(kept) < prompt.shown)
    draw.text((16, height - 30), AXES + of_all, PALE_INK, font_of(17))
    said = finding.plain(finding.sentence(of, row))
    return image, f"step {data.step:,} · {title} · {said} · prompt: {title_of(prompt, 60)}"


def _tokens_around(query: int, key: int, shown: int) -> list[int]:
    """Returns the indices of at most LARGEST_TOKENS tokens: around the query token and, if it is
    not near, around the key token."""
    places = [query] if query - key < LARGEST_TOKENS // 2 else [key, query]
    size = min(shown, LARGEST_TOKENS // len(places))
    starts = [min(max(0, place - size // 2), shown - size) for place in places]
    return sorted({n for start in starts for n in range(start, start + size)})


def draw_figure(
    data: SnapshotData, head: tuple[int, int] | None = None, prompt: int | None = None
) -> bytes:
    """Returns a figure of a snapshot as a PNG: all heads, or one head with its tokens.

    head: (number of the layer in the model, head); None for all heads. prompt: its index; None: the
    one on which the head, or the clearest of all heads, does what its name says, or the first text.
    Raises ValueError for a layer without attention weights.
    """
    layers = data.row.layers
    if head and head[0] not in layers:
        raise ValueError(f"head={head}: the layers with attention weights are {layers}")
    if prompt is None:
        of = finding.Heads(data)
        rows = [row for row in of.table if (row["layer"], row["head"]) == head]
        prompt = of.shown_prompt([*rows, of.first][0])
    shown = data.prompts[prompt]
    if head:
        codes = data.codes[prompt][layers.index(head[0]), head[1]]
        heads, what = _one_head(codes, shown), head_name(*head)
    else:
        heads, what = _all_heads(data, prompt), "all heads"
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


def _all_heads(data: SnapshotData, prompt: int) -> Image.Image:
    """Returns all heads as a part of a figure."""
    num_layers, num_heads = data.row.names.shape
    font, longest = font_of(36), max(num_layers, num_heads)
    size = min(max(FIGURE // longest, HEAD[0]), HEAD[1])
    pitch = GAP + _whole_cells(data.prompts[prompt], size, most=LARGEST_FIGURE // longest)
    corner, tall = (_left(font, data), 60), num_layers * pitch + _height_of_others(font, data)
    image, _ = _canvas(corner[0] + num_heads * pitch + MARGIN, corner[1] + tall)
    _draw_grid(image, corner, data, prompt, pitch, font, [])
    return image


def _one_head(codes: np.ndarray, prompt: Prompt) -> Image.Image:
    """Returns an enlarged head as a part of a figure."""
    size = _whole_cells(prompt, FIGURE, most=FIGURE)
    labels = prompt.labels[: prompt.shown]
    width = max(size, _label_end(labels, size, 40))
    image, _ = _canvas(MARGIN + width + MARGIN, 10 + size)
    _draw_head(image, (MARGIN, 10), codes, labels, size, 40)
    return image


# ------------------------------------------------------------------------------ parts of images


def _canvas(width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    """Returns a white image of indices of colours, and what draws on it."""
    image = Image.new("L", (width, height), WHITE)
    return image, ImageDraw.Draw(image)


def _left(font: ImageFont.FreeTypeFont, data: SnapshotData) -> int:
    """Returns the pixels on the left of a grid, with the numbers of layers."""
    return round(font.getlength(f"L{data.row.layers[-1]}")) + 24


def _height_of_others(font: ImageFont.FreeTypeFont, data: SnapshotData) -> int:
    """Returns the pixels of the lines of a grid about layers without attention weights."""
    return round(font.size * len([*filter(None, finding.between_layers(data))]))


def _whole_cells(prompt: Prompt, size: int, most: int) -> int:
    """Returns the size of a heatmap of about `size` pixels whose cells are equally large, if it has
    at most `most` pixels."""
    return min(prompt.shown * max(1, size // prompt.shown), most)


def _name_of(row: Mapping) -> str:
    """Returns the place and the name of a head: "L1 H3 induction"."""
    title = title_of_name(row["name"], row["tokens_back"])
    return f"{head_name(row['layer'], row['head'])} {title}".rstrip()


def _draw_grid(
    image: Image.Image,
    corner: tuple[int, int],
    data: SnapshotData,
    prompt: int,
    pitch: int,
    font: ImageFont.FreeTypeFont,
    outlined: Sequence[Mapping],
) -> None:
    """Draws all heads on a prompt, a row for each layer, with the numbers of heads above and of
    layers on the left, as many as fit, a frame around some heads, and a line about the layers
    without attention weights between them.

    corner: (x, y) of the first heatmap. pitch: pixels from one head to the next. outlined: rows of
    heads.head_table.
    """
    (left, y), (num_layers, num_heads), draw = corner, data.row.names.shape, ImageDraw.Draw(image)
    gap, others = min(GAP, max(1, pitch // 10)), finding.between_layers(data)
    size, every = pitch - gap, math.ceil((font.size + 2) / pitch)
    widest = font.getlength(f"H{num_heads - 1}") + 6
    for head in range(0, num_heads, math.ceil(widest / pitch)):
        x = left + head * pitch + size / 2
        draw.text((x, y - 5), f"H{head}", INK, font, anchor="md")
    tops = []
    for layer in range(num_layers + 1):
        if others[layer]:
            line = drawn(clipped(others[layer], 60), round(0.8 * font.size))
            line.draw(draw, left, y + font.size / 2 - gap / 2, PALE_INK, "lm")
            y += round(font.size)
        if layer < num_layers:
            heads = tile(data.codes[prompt][layer : layer + 1], size, gap)
            image.paste(Image.fromarray(heads), (left, y))
            if layer % every == 0:
                label = f"L{data.row.layers[layer]}"
                draw.text((left - 8, y + size / 2), label, INK, font, anchor="rm")
        tops.append(y)
        y += pitch
    for row in outlined:
        layer, head = row["place"]
        x, y = left + head * pitch - 2, tops[layer] - 2
        draw.rectangle((x, y, x + size + 3, y + size + 3), outline=ACCENT_INDEX, width=2)


def _draw_head(
    image: Image.Image,
    corner: tuple[int, int],
    codes: np.ndarray,
    labels: Sequence[str],
    size: int,
    largest: int,
) -> None:
    """Draws a head, uint8 (T (T + 1) / 2), of `size` pixels, with its tokens.

    labels: of its tokens. A token is in the masked half, next to the diagonal: right of its row and
    above its column. If the rows are too low to be legible, every second, third, ... token is
    written. largest: height of the tokens in pixels; at least half of it.
    """
    draw = ImageDraw.Draw(image)
    image.paste(Image.fromarray(fitted(codes, size)), corner)
    for text, x, y in _placed(labels, size, largest):
        text.draw(draw, corner[0] + x, corner[1] + y, INK, "lm")


def _label_end(labels: Sequence[str], size: int, largest: int) -> int:
    """Returns where the tokens of a heatmap of `size` pixels end, in pixels from its left."""
    placed = _placed(labels, size, largest)
    return math.ceil(max((x + text.length for text, x, _ in placed), default=0))


def _placed(labels: Sequence[str], size: int, largest: int) -> list[tuple[DrawnText, float, float]]:
    """Returns (text, x, y) of each token that is written."""
    cell = size / len(labels)
    every = math.ceil(largest / 2 / LINE / cell)
    height = max(1, min(largest, int(LINE * every * cell)))
    numbers = range(every - 1, len(labels), every)
    texts = {n: drawn(clipped(labels[n], 12), height) for n in numbers}
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
    text = clipped(prompt.title, max(4, fits - len(note)))
    return (text if prompt.period else f"“{text}”") + note


def fit_title(prompt: Prompt, width: float, size: int) -> DrawnText:
    """Returns the title of a prompt, at most about `width` pixels wide."""
    fits = round(2 * width / size)
    while (title := drawn(text := title_of(prompt, fits), size)).length > width and fits > 4:
        fits = int(min(fits - 1, len(text) * width / title.length))
    return title
