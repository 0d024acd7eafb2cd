"""Pages of runs with known weights, and functions that read these pages in a browser."""

import base64
import copy
import dataclasses
import functools
import json
import re
import zlib
from dataclasses import dataclass, field

import matplotlib
import numpy as np
import torch

from headlens import SnapshotData, capture, run_data
from headlens.assemble import join_modules
from headlens.page import CONSTANTS
from headlens.prompts import Prompt
from headlens.recording import predict, record
from helpers import REPOSITORY
from helpers.loops import uniform_attention

START, END = '<script type="application/json" id="data">', "</script>"  # of the data of a page
HOSTILE = "</script><img src=x onerror=alert(1)><script>alert(2)</script>\"'&lt;__CSP__"
WORDS = ["She", " sat", " on", " the", "\n", " bank", " of", " a", " river", ",", " ", " far"]


class Given(Prompt):
    __hash__ = object.__hash__  # so that a_run can cache its results


def prompt(name, tokens, period=0):
    ids, symbols = list(range(len(tokens))), max(period, 2)
    if period:
        ids[period + 1 :] = ids[1 : period + 1]
    return Given(name, "".join(tokens), ids, tokens, period=period, num_symbols=symbols)


PROMPTS = (
    prompt("1-she-sat-on-the", WORDS),
    prompt("2-once", ["Once", " upon", " a", " time"]),
    prompt("3-repeated", ["<|endoftext|>", *2 * [" oak", " lamp", " grey", " rope"]], period=4),
)
STEPS = (0, 40, 80, 120)  # with weights
HEBREW = ["של", "ום", " עול", "ם", ",", " אני", " קורא", "."]
VOCABULARY = 300  # ids; the text of the id 3 is "<3>"
HISTORY = (0, 20, 40, 60, 80, 100, 120)  # with statistics


class Attention(torch.nn.Module):
    """Shows weights, (B, H, T, T), to the lens: those of a softmax, multiplied by values."""

    def forward(self, weights, scores=None):
        future = torch.ones(weights.shape[-2:]).triu(1).bool()
        scores = weights.log().clamp(min=-200) if scores is None else scores
        shares = scores.masked_fill(future, -torch.inf).softmax(-1)
        return shares @ torch.zeros(*weights.shape[:-1], 1)


class PlantedModel(torch.nn.Module):
    """A model with known attention: layers(token_ids) returns the weights of each layer, (H, T, T),
    or (T, T) of one head, on a text."""

    def __init__(self, layers):
        super().__init__()
        self.layers, self.attention = layers, Attention()

    def forward(self, input_ids):
        texts = [self.layers(row) for row in input_ids.tolist()]
        for of_texts in zip(*texts, strict=True):
            weights = torch.stack(of_texts)
            self.attention(weights if weights.dim() == 4 else weights[:, None])


class GivenModel(torch.nn.Module):
    """A model with known attention: attend(token_ids, capture) calls capture(layer, weights,
    scores, value_norms) with tensors of one text, (H, T, T), and may return logits."""

    def __init__(self, attend):
        super().__init__()
        self.attend, self.known = attend, {}  # what it captured of a text, which it reads once
        self.attention = Attention()

    def read(self, token_ids):
        """Returns {layer: its tensors} and the logits of a text."""
        if token_ids not in self.known:
            layers = {}
            logits = self.attend(list(token_ids), lambda n, *tensors: layers.update({n: tensors}))
            self.known[token_ids] = layers, logits
        return self.known[token_ids]

    def capture_attention(self, input_ids, callback):
        # The texts of tests do not end with the id 0, which pads the shorter texts of a batch.
        ends = [max([0, *row.nonzero().flatten().tolist()]) + 1 for row in input_ids]
        rows = zip(input_ids.tolist(), ends, strict=True)
        found, logits = zip(*(self.read((*row[:end],)) for row, end in rows), strict=True)
        size = input_ids.shape[1]
        for layer in found[0]:
            sizes = ((size, size), (size, size), (size,))  # as in LayerAttention
            of_texts = [(*of_text[layer], None, None)[:3] for of_text in found]
            weights, scores, norms = map(stacked, zip(*of_texts, strict=True), sizes)
            callback(layer, weights, scores, norms)
            self.attention(weights, scores)
        return stacked(logits, (size, None))

    def forward(self, input_ids):
        """Returns nothing: its logits have nothing to do with its attention."""


def stacked(tensors, sizes):
    """Returns tensors of texts as one of a batch; the last dimensions are padded to these sizes."""
    if tensors[0] is None:
        return None
    padded = []
    for tensor in tensors:
        shape = tensor.shape[len(tensor.shape) - len(sizes) :]
        missing = [0 if size is None else size - n for size, n in zip(sizes, shape, strict=True)]
        ends = [end for more in reversed(missing) for end in (0, more)]
        padded.append(torch.nn.functional.pad(tensor, ends))
    return torch.stack(padded)


def capturing(attend):
    """Returns the argument `capture` of `record` for a GivenModel."""
    return functools.partial(capture, GivenModel(attend))


def snapshot_of(name, prompt, row, codes):
    """Returns a snapshot with one prompt from its statistics and weights."""
    values = [{key: value.ravel().tolist() for key, value in row.values.items()}]

    def attend(token_ids, capture):
        capture(0, uniform_attention(len(token_ids)))

    found = record(capturing(attend), [prompt], 0)
    return SnapshotData(
        name, found.prompts, row, {"statistics": values}, [codes], [], found.uniform
    )


@dataclass
class PageRun:
    """The data of a run for the page, and the weights and statistics behind it."""

    data: dict
    weights: dict  # step -> for each prompt fp32 (L, H, T, T)
    rows: dict  # step -> Row
    frames: dict  # step -> SnapshotData
    snapshots: list  # those of the steps with weights
    value_norms: dict = field(default_factory=dict)  # step -> for each prompt (L, H, T)
    predictions: dict = field(default_factory=dict)  # step -> for each prompt


@functools.cache
def a_run(
    name="first",
    layers=2,
    heads=3,
    prompts=PROMPTS,
    steps=STEPS,
    history=HISTORY,
    seed=0,
    sharp=1,
):
    """Returns a run of random heads whose attention becomes sharper with each step. sharp: the
    attention scores are multiplied by this number."""
    weights, rows, snapshots, of_steps, norms, predictions = {}, {}, [], {}, {}, {}
    for step in history:
        draw = torch.Generator().manual_seed(1000 * seed + step)
        more = torch.Generator().manual_seed(2000 * seed + step)
        weights[step], norms[step], predictions[step] = [], [], []

        def capture_attention(token_ids, capture, step=step, draw=draw, more=more):
            size = len(token_ids)
            scores = (
                torch.randn(layers, heads, size, size, generator=draw) * sharp * (1 + step / 40)
            )
            scores = scores.masked_fill(torch.ones(size, size).triu(1).bool(), -torch.inf)
            value_norms = torch.rand(layers, heads, size, generator=more)
            for layer in range(layers):
                capture(layer, scores[layer].softmax(-1), scores[layer], value_norms[layer])
            logits = torch.randn(size, VOCABULARY, generator=more) * (1 + step / 40)
            weights[step].append(scores.softmax(-1).numpy())
            norms[step].append(value_norms.numpy())
            predictions[step].append(predict(logits, token_ids))
            return logits

        frame = record(
            capturing(capture_attention), prompts, step, run_name=name, token_bytes=text_of
        )
        if (layers, heads) == (2, 3):  # a head without a value
            frame.row.values["largest_logit"][1, 2] = np.nan
        rows[step], of_steps[step] = frame.row, frame
        if step in steps:
            snapshots.append(frame)
    curves = {"training loss": [(step, 5 - step / 40) for step in range(0, 121, 10)]}
    data = run_data(snapshots, list(rows.values()), curves) | {"stage": 80}
    return PageRun(data, weights, rows, of_steps, snapshots, norms, predictions)


def as_label(token):
    return token.replace(" ", "␣").replace("\n", "⏎")


def text_of(token):
    return f"<{token}>".encode()


CHANGES = (0.0004, 1.25, -0.3, 0.002, 2.5, 0.05)  # of the loss without each of six heads


def removal(change, accuracy=None, **more):
    """Returns the result of a removed head or group. more: its place or name, and `error`."""
    error = more.pop("error", abs(change) / 10)
    return more | {
        "loss_change": change,
        "loss_change_error": error,
        "accuracy_without": accuracy,
    }


def removals(groups=(), changes=CHANGES):
    """Returns the results of removed heads at step 120, in two layers of three heads."""
    heads = zip(np.ndindex(2, 3), changes, strict=True)
    return {
        "step": 120,
        "windows": 8,
        "targets": 512,
        "loss": 0.5,
        "accuracy": 0.75,
        "heads": [removal(c, (n + 1) / 10, layer=i, head=j) for n, ((i, j), c) in enumerate(heads)],
        "groups": list(groups),
    }


HYBRID = (3, 5)  # numbers of its layers with attention
OTHER_LAYERS = dict.fromkeys("012", "linear attention") | {"4": "mamba", "6": "mamba", "7": "moe"}
PROOF = "maps verified: they reproduce the model's output within 1e-6"


@functools.cache
def a_hybrid():
    """Returns a_run as a hybrid with eight layers, two with attention, and a proof of its maps."""
    run, model = a_run(), {"others": OTHER_LAYERS, "proof": PROOF}
    snapshots = [
        dataclasses.replace(of, row=copy.copy(of.row), details=of.details | {"model": model})
        for of in run.snapshots
    ]
    for snapshot in snapshots:
        snapshot.row.layers = [*HYBRID]
    history = [snapshot.row for snapshot in snapshots]
    return dataclasses.replace(run, data=run_data(snapshots, history), snapshots=snapshots)


second_run = functools.partial(a_run, "second", seed=7)


# Returns nothing, because sending the weights to Python takes seconds.
DECODE_ALL = """async () => { await Promise.all(window.lens.runs.slice(0, 2).flatMap((run, of) =>
  run.frames.map((_, frame) => window.lens.decode(of, frame)))); }"""


def ready(lens):
    lens.locator("html[data-ready='1']").wait_for()


def state(lens, key):
    return lens.evaluate("key => window.lens.state[key]", key)


def option(lens, name):
    """Returns a control of the options, which are opened if they are hidden."""
    if lens.locator("#controls").is_hidden():
        lens.locator("#options").click()
    return lens.locator(f"#{name}")


def tile(lens, layer, head):
    return lens.locator(f".head[data-layer='{layer}'][data-head='{head}']")


VIRIDIS = matplotlib.colormaps["viridis"](np.arange(256), bytes=True)[:, :3].astype(int)
READ_PIXELS = """all => all.map((canvas) => { // or images
  const { naturalWidth: width = canvas.width, naturalHeight: height = canvas.height } = canvas;
  const copy = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  const { data } = copy.getImageData(0, 0, width, height);
  let text = "";
  for (const byte of data) text += String.fromCharCode(byte);
  return [width, height, btoa(text)];
})"""
READ_WEIGHTS = """async ([run, frame, places]) => {
  await lens.decode(run, frame);
  return places.map((place) => lens.weight(run, frame, ...place));
}"""


def pixels(canvases):
    """Returns the pixels of each canvas or image, (height, width, 4)."""
    return [
        np.frombuffer(base64.b64decode(data), np.uint8).reshape(high, wide, 4).astype(int)
        for wide, high, data in canvases.evaluate_all(READ_PIXELS)
    ]


def colour_of(locator, what):
    """Returns a colour of an element, such as its backgroundColor, (3,)."""
    text = locator.evaluate(f"node => getComputedStyle(node).{what}")
    return np.array(re.findall(r"\d+", text)[:3], float)


def contrast(pixels, page):
    """Returns the largest contrast of colours (..., 3) to the colour of the page."""

    def light(rgb):
        part = np.asarray(rgb) / 255
        linear = np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)
        return linear @ (0.2126, 0.7152, 0.0722)

    pair = np.stack(np.broadcast_arrays(light(pixels), light(page)))
    return ((pair.max(0) + 0.05) / (pair.min(0) + 0.05)).max()


def tint(lens):
    """Returns the colour of masked cells."""
    html = lens.locator("html")
    pair = html.evaluate("node => getComputedStyle(node).getPropertyValue('--tint')")
    hexes = dict(zip(("light", "dark"), re.findall("#(......)", pair), strict=True))
    return list(bytes.fromhex(hexes[html.get_attribute("data-theme")]))


def colours(lens, canvases, shape):
    """Returns the pixels of these canvases without alpha, (*shape, 3)."""
    return np.stack(pixels(lens.locator(canvases)))[..., :3].reshape(*shape, 3)


def assert_drawn(lens, part, of=".head canvas", within=3):
    """Checks that canvases show `part` (..., T, T), 0 to 1; other cells have the masked colour."""
    found = colours(lens, of, part.shape)
    below = np.tril(np.ones(part.shape[-2:], bool))
    wanted = VIRIDIS[np.rint(255 * part).astype(int)]
    assert np.abs(found - wanted)[..., below, :].max() <= within
    assert (found[..., ~below, :] == tint(lens)).all()


def assert_difference(lens, difference, of=".head canvas"):
    """Checks a difference: orange where B has more weight, blue where less; stronger if larger."""
    found = colours(lens, of, difference.shape)
    below = np.tril(np.ones(difference.shape[-2:], bool))
    assert (found[..., ~below, :] == tint(lens)).all()
    found, difference = found[..., below, :], difference[..., below]
    redder = found[..., 0] - found[..., 2]
    assert (redder[difference > 0.02] > 0).all()
    assert (redder[difference < -0.02] < 0).all()
    assert (found[difference == 0] == 250).all()
    for sign in (-1, 1):
        clear = sign * difference > 0.03  # larger than the rounding to bytes
        if clear.any():
            size, light = sign * difference[clear], found[clear].sum(-1)
            assert np.corrcoef(size, light)[0, 1] < -0.8


def assert_weights(lens, run, number=0):
    """Checks all weights of all steps, to the precision of a byte. number: 1 for the second run."""
    for frame, step in enumerate(STEPS):
        of_prompts = run.weights[step]
        places = [[n, *place] for n, w in enumerate(of_prompts) for place in np.ndindex(w.shape)]
        found = lens.evaluate(READ_WEIGHTS, [number, frame, places])
        true = np.concatenate([weights.ravel() for weights in of_prompts])
        assert np.abs(found - true).max() <= 1 / 255


def cell(lens, query, key, canvas="#map", size=len(WORDS)):
    """Returns the window coordinates of the centre of a cell of an enlarged heatmap."""
    box = lens.locator(canvas).bounding_box()
    side = box["width"] / size
    return box["x"] + (key + 0.5) * side, box["y"] + (query + 0.5) * side


def grid_order(lens):
    read = "all => all.map(({ dataset }) => [Number(dataset.layer), Number(dataset.head)])"
    return [tuple(place) for place in lens.locator(".head:visible").evaluate_all(read)]


def ranked(values, descending):
    """Returns all (layer, head) sorted by value; heads without a value are last."""
    places = [place for place in np.ndindex(values.shape) if not np.isnan(values[place])]
    places.sort(key=lambda place: round(float(values[place]), 4), reverse=descending)
    return places + [place for place in np.ndindex(values.shape) if np.isnan(values[place])]


GO_TO = """hash => new Promise((done) => {
  addEventListener("hashchange", () => done({ ...lens.state }), { once: true });
  window.visits = (window.visits ?? 0) + 1; // otherwise the same link is no change
  location.hash = `${hash}&visit=${visits}`;
})"""


def go_to(lens, fragment):
    """Follows a link within the page. Returns the new state."""
    return lens.evaluate(GO_TO, f"#{fragment}")


def readout(lens):
    """Returns (token, position) of the query and of the key, and the weights, of the readout."""
    text = lens.locator("#readout").inner_text().replace("␣", " ")
    query, key = re.findall(r'"(.*?)" \((\d+)\)', text, re.DOTALL)
    weights = [float(n.replace("−", "-")) for n in re.findall(r"[+−]?\d\.\d+", text)]
    return (query[0], int(query[1])), (key[0], int(key[1])), weights


def statistics_of(lens):
    """Returns the statistics of the enlarged head, without the values for uniform attention:
    {title: text}."""
    texts = lens.locator("#values > div").locator("visible=true").all_inner_texts()
    return dict(text.partition(", chance")[0].split("\n") for text in texts)


def read(path):
    """Returns the runs of a page."""
    text = path.read_text(encoding="utf-8")
    begin = text.index(START) + len(START)
    return json.loads(text[begin : text.index(END, begin)])["runs"]


def packed(value) -> str:
    """Returns JSON in the form of the "history" of a run."""
    return base64.b64encode(zlib.compress(json.dumps(value).encode())).decode()


def unpacked(data: str) -> bytes:
    """Returns the bytes of the "weights" of a frame, or the JSON of the "history" of a run."""
    return zlib.decompress(base64.b64decode(data))


WATCH_TEXT = """() => {
  window.written = [];
  const write = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y, ...more) {
    const at = this.getTransform().transformPoint({ x, y });
    const chart = this.canvas.closest(".chart")?.dataset.statistic;
    const map = this.canvas.previousElementSibling?.id;
    written.push({ text, x: at.x, y: at.y, where: chart ?? map });
    return write.call(this, text, x, y, ...more);
  };
}"""

CONTRASTS = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => rgb.slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, n) => sum + c * [0.2126, 0.7152, 0.0722][n], 0);
  const ratio = (one, two) => {
    const [low, high] = [light(one), light(two)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const over = ([r, g, b, a = 1], below) => [r, g, b].map((c, n) => a * c + (1 - a) * below[n]);
  const behind = (node) => {
    const colour = parse(getComputedStyle(node).backgroundColor);
    if ((colour[3] ?? 1) === 1) return colour;
    return over(colour, node.parentElement ? behind(node.parentElement) : [255, 255, 255]);
  };
  const found = [];
  for (const node of document.querySelectorAll("body *:not(option, optgroup, :disabled)")) {
    if (!node.checkVisibility({ visibilityProperty: true })) continue;
    const style = getComputedStyle(node);
    const name = node.id || node.className || node.tagName;
    if ([...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim())) {
      const below = behind(node);
      found.push(["text", name, 4.5, ratio(over(parse(style.color), below), below)]);
    }
    const bordered = "button:not(.quiet, .head, .chart *), select, .file, .segments label";
    if (node.matches(bordered)) {
      const around = behind(node.parentElement);
      found.push(["border", name, 3, ratio(parse(style.borderTopColor), around)]);
    }
  }
  return found;
}"""


def module_page(opened, folder, module, *names):
    """Returns an empty page in which these exports of a module of the page are variables."""
    script = join_modules(REPOSITORY / "headlens/page" / module)
    for name, value in CONSTANTS.items():
        script = script.replace(name, value)
    script += f"Object.assign(window, {{ {', '.join(names)} }});"
    path = folder / f"{module}.html"
    html = f'<!doctype html><meta charset="utf-8"><script type="module">{script}</script>'
    path.write_text(html, encoding="utf-8")
    return opened(path)
