"""The interactive page: page.html filled with what the lens saw; one file that needs nothing else.

    html = page([run_data("my run", prompts, [frame_data(frame)], [frame.row])], title="my run")

Its data is JSON in a block that no browser executes; weights are one byte a cell, compressed. The
page says of itself (Content-Security-Policy) that no script but its own may run and that nothing
may be fetched. `read` takes the data out again, so pages are also the record of a run: the
time-lapse is made of the pages of single steps. The format is described at the top of page.html.
"""

import base64
import functools
import hashlib
import html
import json
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

from .history import Row, plain
from .probe import Frame, Prompt, uniform_values
from .statistics import STATISTICS

START, END = '<script type="application/json" id="data">', "</script>"


def run_data(
    name: str, prompts: Sequence[Prompt], frames: Sequence[dict], history: Sequence[Row]
) -> dict:
    """What the page needs of one run: frames as of `frame_data`, statistics of as many steps."""
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
                "cropped": prompt.cropped,
                "period": prompt.period,
            }
            for prompt in prompts
        ],
        "statistics": [
            {"key": key, "title": kind.title, "about": kind.about, "uniform": uniform[key]}
            for key, kind in STATISTICS.items()
        ],
        "history": _history(history),
        "frames": list(frames),
    }


def frame_data(frame: Frame) -> dict:
    """The weights of one step: base64 of zlib of the codes, prompt by prompt, layer by layer."""
    codes = b"".join(code.tobytes() for code in frame.codes)
    return {"step": frame.row.step, "weights": _packed(codes)}


def _history(history: Sequence[Row]) -> str:
    """{"steps": [...], "values": {statistic: for each step L * H numbers}}, packed."""
    values = {key: [plain(row.values[key].ravel()) for row in history] for key in STATISTICS}
    return _packed(json.dumps({"steps": [row.step for row in history], "values": values}).encode())


def page(runs: Sequence[dict], title: str) -> str:
    """The page as HTML: one run, or two to compare."""
    data = json.dumps({"version": 1, "runs": list(runs)})
    for character in "<>&":  # so that no text can end the block it stands in
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
    """The bytes of a frame's "weights", the JSON of a run's "history"."""
    return zlib.decompress(base64.b64decode(data))


def _packed(raw: bytes) -> str:
    return base64.b64encode(zlib.compress(raw, 6)).decode()


@functools.cache
def _template() -> tuple[str, str]:
    """page.html with its security policy filled in, what stands before the data and after it.

    The policy names the script and the style by their hashes, so nothing else can run.
    """
    text = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    hashes = {
        kind: base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
        for kind, part in (("script", script), ("style", style))
    }
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src 'sha256-{hashes['script']}'",
            f"style-src 'sha256-{hashes['style']}'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    before, after = text.replace("__CSP__", policy).split("__DATA__")
    return before, after
