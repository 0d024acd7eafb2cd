"""The interactive page of attention heads: one HTML file that needs nothing else.

    html = page([run_data("my run", prompts, [frame_data(frame)], [frame.row])], title="my run")

index.html, style.css and the JavaScript modules of this folder are assembled into one file
(lens/assemble.py), with the data as JSON in a block that no browser executes; weights are one byte
a cell, compressed. The page's Content-Security-Policy lets no other script run and nothing be
fetched. `read` takes the data out again, so pages are also the record of a run: the time-lapse is
made of the pages of single steps. The data format is described at the top of index.html.
"""

import base64
import functools
import html
import json
import zlib
from collections.abc import Sequence
from pathlib import Path

from ..assemble import assemble, content_security_policy
from ..history import Row, json_values
from ..probe import Frame, Prompt, uniform_values
from ..statistics import STATISTICS

START, END = '<script type="application/json" id="data">', "</script>"


def run_data(
    name: str, prompts: Sequence[Prompt], frames: Sequence[dict], history: Sequence[Row]
) -> dict:
    """One run's data: frames from `frame_data`, and the rows that the charts show."""
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
    """One step's weights: base64 of zlib of the codes, prompt by prompt, layer by layer."""
    codes = b"".join(code.tobytes() for code in frame.codes)
    return {"step": frame.row.step, "weights": _packed(codes)}


def _history(history: Sequence[Row]) -> str:
    """{"steps": [...], "values": {statistic: for each step L * H numbers}}, packed."""
    values = {key: [json_values(row.values[key].ravel()) for row in history] for key in STATISTICS}
    return _packed(json.dumps({"steps": [row.step for row in history], "values": values}).encode())


def page(runs: Sequence[dict], title: str) -> str:
    """The page as HTML, for one run or for two to compare."""
    data = json.dumps({"version": 1, "runs": list(runs)})
    for character in "<>&":  # no text can end the data block
        data = data.replace(character, f"\\u{ord(character):04x}")
    before, after = _template()
    return before.replace("__TITLE__", html.escape(title)) + data + after


def read(path: Path) -> list[dict]:
    """The runs of a page written by `page`. Raises ValueError when it is no such page."""
    text = path.read_text(encoding="utf-8")
    _, found, rest = text.partition(START + "{")
    if not found:
        raise ValueError(f"{path} is not a page of the lens")
    data = json.loads("{" + rest[: rest.index(END)])
    if "runs" not in data:
        raise ValueError(f"{path} is not a page of the lens")
    return data["runs"]


def unpacked(data: str) -> bytes:
    """The bytes of a frame's "weights" or the JSON of a run's "history"."""
    return zlib.decompress(base64.b64decode(data))


def _packed(raw: bytes) -> str:
    return base64.b64encode(zlib.compress(raw, 6)).decode()


@functools.cache
def _template() -> tuple[str, str]:
    """The page without its title: what is before the data and what is after it."""
    html = assemble(Path(__file__).parent / "index.html")
    html = html.replace("__CSP__", content_security_policy(html.encode()))
    before, after = html.split("__DATA__")
    return before, after
