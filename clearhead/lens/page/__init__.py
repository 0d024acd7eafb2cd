"""The interactive page of attention heads: one self-contained HTML file.

    data = run_data("my run", prompts, [frame_data(frame, token_bytes)], [frame.row])
    html = page([data], title="my run")

lens/assemble.py joins index.html, style.css and the JavaScript modules of this folder. The data is
JSON in a block that the browser does not execute; weights are one byte each, then compressed. The
Content-Security-Policy of the page forbids other scripts and all network requests. `read` returns
the data of a page; the time-lapse reuses the data of single-step pages. The data format is
described at the top of index.html.
"""

import base64
import functools
import html
import json
import zlib
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path

import numpy as np

from ..assemble import assemble, content_security_policy
from ..heads import ALL_NAMES, NAMED_FROM, NAMES, title_of
from ..history import Row, evenly_spaced, json_values
from ..predictions import MOST_LIKELY, Predictions
from ..probe import Frame, Prompt, token_texts, uniform_values
from ..statistics import STATISTICS

VERSION = 2
VERSIONS = (1, VERSION)  # pages of version 1 have the same weights, but no details
MAX_UNPACKED = 2**28  # bytes; a limit for invalid pages
MAX_HISTORY = 60  # maximum number of steps in the charts, in addition to the steps of the frames
START, END = '<script type="application/json" id="data">', "</script>"


def run_data(
    name: str,
    prompts: Sequence[Prompt],
    frames: Sequence[dict],
    history: Sequence[Row],
    curves: Mapping[str, list] | None = None,
    stage: int | None = None,
    ablation: dict | None = None,
) -> dict:
    """Returns the data of one run.

    frames: from `frame_data`. history: the statistics of all snapshots. curves: losses and
    accuracies of the training, {name: [(step, value)]}. stage: the step from which the loss on the
    repeated sequence is low. ablation: the loss without each head, the result of ablation.py.
    """
    uniform = uniform_values(prompts)
    layers, heads = history[0].values["entropy"].shape
    return {
        "name": name,
        "layers": layers,
        "heads": heads,
        "prompts": [
            {
                "name": prompt.name,
                "text": prompt.text,
                "tokens": prompt.tokens[: prompt.shown],
                "truncated": prompt.truncated,
                "period": prompt.period,
                "uniform": uniform_values([prompt]),
            }
            for prompt in prompts
        ],
        "statistics": [
            {
                "key": key,
                "title": s.title,
                "description": s.description,
                "uniform": uniform[key],
                "is_name": key in NAMES,
                "named_from": NAMED_FROM.get(key),
            }
            for key, s in STATISTICS.items()
        ],
        "names": [{"key": name, "title": title_of(name)} for name in ALL_NAMES],
        "history": _history(history, {frame["step"] for frame in frames}),
        "curves": dict(curves or {}),
        "stage": stage,
        "frames": list(frames),
        "ablation": ablation,
    }


def frame_data(frame: Frame, token_bytes: Callable[[int], bytes] | None = None) -> dict:
    """Returns the attention and predictions of one step.

    token_bytes(id): the bytes of a token, for predictions, which are omitted without it.
    """
    details: dict = {
        "statistics": [
            {key: json_values(value.ravel()) for key, value in of_prompt.items()}
            for of_prompt in frame.of_prompts
        ]
    }
    if frame.predictions and token_bytes:
        details["predictions"] = _predictions(frame, token_bytes)
    data = {"step": frame.row.step, "weights": _packed(_bytes(frame.codes))}
    if frame.value_norms:
        largest = [norms.max(-1, keepdims=True) + 1e-9 for norms in frame.value_norms]  # (L, H, 1)
        scaled = [n / most for n, most in zip(frame.value_norms, largest, strict=True)]
        data["norms"] = _packed(_bytes([(255 * np.sqrt(n)).round().astype("u1") for n in scaled]))
        details["largest_norms"] = [json_values(most.ravel()) for most in largest]
    data["details"] = _packed(json.dumps(details).encode())
    return data


def codes_of(run: dict, frame: dict) -> list[np.ndarray]:
    """Returns the codes of each prompt at one step, as in Frame.codes, from the data of a run.

    Raises ValueError, TypeError or LookupError for data that `page` did not write.
    """
    layers, heads = run["layers"], run["heads"]
    lengths = [len(prompt["tokens"]) for prompt in run["prompts"]]
    sizes = [layers * heads * length * (length + 1) // 2 for length in lengths]
    codes = np.frombuffer(unpacked(frame["weights"]), np.uint8)
    if len(codes) != sum(sizes):
        raise ValueError(f"{len(codes)} weights instead of {sum(sizes)}")
    parts = np.split(codes, np.cumsum(sizes)[:-1])
    return [part.reshape(layers, heads, -1) for part in parts]


def _predictions(frame: Frame, token_bytes: Callable[[int], bytes]) -> dict:
    """Returns losses and most likely tokens of the shown positions; tokens as indices of texts."""
    shown = [int((2 * codes.shape[-1]) ** 0.5) for codes in frame.codes]
    ids = np.unique([i for of in frame.predictions for p in of for i in p.token_ids.ravel()])

    def values(found: Predictions, count: int, most: int) -> dict:
        return {
            "losses": json_values(found.losses[:count]),
            "tokens": np.searchsorted(ids, found.token_ids[:count, :most]).tolist(),
            "probabilities": json_values(found.probabilities[:count, :most]),
        }

    return {
        "tokens": token_texts(ids.tolist(), token_bytes),
        "of_prompts": [
            values(final, count, MOST_LIKELY)
            | {"layers": [values(reading, count, most=1) for reading in readings]}
            for (*readings, final), count in zip(frame.predictions, shown, strict=True)
        ],
    }


def _history(rows: Sequence[Row], steps: set[int]) -> str:
    """Returns statistics and losses at some steps, and names of all heads at all steps, packed.

    steps: these are included.
    """
    kept = {row.step for row in evenly_spaced(list(rows), MAX_HISTORY)} | steps
    charted = [row for row in rows if row.step in kept]
    values = {key: [json_values(row.values[key].ravel()) for row in charted] for key in STATISTICS}
    history = {
        "steps": [row.step for row in charted],
        "values": values,
        "losses": [[json_values(losses) for losses in row.losses] for row in charted],
        "name_steps": [row.step for row in rows],
        "names": [row.names.ravel().tolist() for row in rows],
    }
    return _packed(json.dumps(history).encode())


def page(runs: Sequence[dict], title: str) -> str:
    """Returns the page as HTML, for one run or for two runs to compare."""
    data = json.dumps({"version": VERSION, "runs": list(runs)})
    for character in "<>&":  # so that no text can end the data block
        data = data.replace(character, f"\\u{ord(character):04x}")
    before, after = _template()
    return before.replace("__TITLE__", html.escape(title)) + data + after


def read(path: Path, versions: Container[int] = VERSIONS) -> list[dict]:
    """Returns the runs of a file that `page` wrote. Raises ValueError for any other file, also for
    a page of another version."""
    text = path.read_text(encoding="utf-8")
    _, found, rest = text.partition(START + "{")
    if not found:
        raise ValueError(f"{path} is not a page of the lens")
    data = json.loads("{" + rest[: rest.index(END)])
    if data.get("version") not in versions or "runs" not in data:
        raise ValueError(f"{path} is not a page of the lens")
    return data["runs"]


def _bytes(arrays: Sequence[np.ndarray]) -> bytes:
    return b"".join(array.tobytes() for array in arrays)


def _packed(raw: bytes) -> str:
    return base64.b64encode(zlib.compress(raw, 6)).decode()


def unpacked(text: str) -> bytes:
    """Returns packed bytes of a page. Raises ValueError if they are invalid."""
    unpack = zlib.decompressobj()
    try:
        raw = unpack.decompress(base64.b64decode(text), MAX_UNPACKED)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not unpack.eof:
        raise ValueError("incomplete or too large")
    return raw


@functools.cache
def _template() -> tuple[str, str]:
    """Returns the HTML before the data and after the data, without a title."""
    html = assemble(Path(__file__).parent / "index.html")
    html = html.replace("__CSP__", content_security_policy(html.encode()))
    before, after = html.split("__DATA__")
    return before, after
