"""The interactive page of attention heads: one self-contained HTML file.

    html = page([run_data("my run", prompts, [frame_data(frame)], [frame.row])], title="my run")

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
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..assemble import assemble, content_security_policy
from ..history import Row, json_values
from ..probe import Frame, Prompt, uniform_values
from ..statistics import STATISTICS

START, END = '<script type="application/json" id="data">', "</script>"


def run_data(
    name: str, prompts: Sequence[Prompt], frames: Sequence[dict], history: Sequence[Row]
) -> dict:
    """Returns the data of one run. frames: from `frame_data`; history: the rows for the charts."""
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
            }
            for prompt in prompts
        ],
        "statistics": [
            {"key": key, "title": s.title, "description": s.description, "uniform": uniform[key]}
            for key, s in STATISTICS.items()
        ],
        "history": _history(history),
        "frames": list(frames),
    }


def frame_data(frame: Frame) -> dict:
    """Returns the weights of one step: base64 of the zlib-compressed codes of all prompts."""
    codes = b"".join(code.tobytes() for code in frame.codes)
    return {"step": frame.row.step, "weights": _packed(codes)}


def codes_of(frame: dict, prompts: Sequence[Prompt], shape: tuple[int, int]) -> list[np.ndarray]:
    """Returns the codes of each prompt in the data of one step. shape: (layers, heads)."""
    codes = np.frombuffer(zlib.decompress(base64.b64decode(frame["weights"])), np.uint8)
    cells = [prompt.shown * (prompt.shown + 1) // 2 for prompt in prompts]
    parts = np.split(codes, np.cumsum(cells)[:-1] * shape[0] * shape[1])
    return [part.reshape(*shape, -1) for part in parts]


def _history(history: Sequence[Row]) -> str:
    """Returns {"steps": [...], "values": {statistic: [L * H numbers for each step]}}, packed."""
    values = {key: [json_values(row.values[key].ravel()) for row in history] for key in STATISTICS}
    return _packed(json.dumps({"steps": [row.step for row in history], "values": values}).encode())


def page(runs: Sequence[dict], title: str) -> str:
    """Returns the page as HTML, for one run or for two runs to compare."""
    data = json.dumps({"version": 1, "runs": list(runs)})
    for character in "<>&":  # so that no text can end the data block
        data = data.replace(character, f"\\u{ord(character):04x}")
    before, after = _template()
    return before.replace("__TITLE__", html.escape(title)) + data + after


def read(path: Path) -> list[dict]:
    """Returns the runs of a file that `page` wrote. Raises ValueError for any other file."""
    text = path.read_text(encoding="utf-8")
    _, found, rest = text.partition(START + "{")
    if not found:
        raise ValueError(f"{path} is not a page of the lens")
    data = json.loads("{" + rest[: rest.index(END)])
    if "runs" not in data:
        raise ValueError(f"{path} is not a page of the lens")
    return data["runs"]


def _packed(raw: bytes) -> str:
    return base64.b64encode(zlib.compress(raw, 6)).decode()


@functools.cache
def _template() -> tuple[str, str]:
    """Returns the HTML before the data and after the data, without a title."""
    html = assemble(Path(__file__).parent / "index.html")
    html = html.replace("__CSP__", content_security_policy(html.encode()))
    before, after = html.split("__DATA__")
    return before, after
