"""report.html of a run: attention page, losses, samples and settings in one file.

    write_report(Path("runs/first"))

It is created from the files in the run directory, can be created at any time, and omits what is
missing. The sources of the page are in report_page/. The page loads nothing from elsewhere and
contains the attention page in a sandboxed frame, so it can be sent as one file.
"""

import base64
import itertools
import json
import math
import re
import statistics
import time
from html import escape
from pathlib import Path
from urllib.parse import quote

from clearhead.checkpoint.run_directory import attention_page, final_validation
from clearhead.config.stored import settings_of
from clearhead.config.yaml_files import flat
from clearhead.errors import sanitize
from clearhead.files import atomic_write, read_bounded, read_rows
from clearhead.output.charts import (
    KEYS,
    Points,
    chart_data,
    finite,
    minimum_before_rise,
    number,
    points_of,
)
from clearhead.output.console import duration
from headlens import (
    assemble_html,
    content_security_policy,
    formatted,
    heads_section,
    rounded,
)

PAGE = Path(__file__).parent / "report_page"
MAX_CONFIG, MAX_PANEL, MAX_PAGE = 2**20, 2**22, 2**30  # bytes; larger files are ignored


def write_report(folder: Path, is_training: bool = False) -> Path:
    """Writes folder/report.html from the files in a run directory; returns its path. is_training:
    whether the run will write it again."""
    rows = read_rows(folder / "metrics.jsonl", *KEYS, "train/tokens", "train/mfu")
    samples = read_rows(folder / "samples.jsonl", "prompt", "text")
    config = read(folder / "config.yaml", MAX_CONFIG).decode("utf-8", "replace")
    template, attention = assemble_html(PAGE / "index.html").encode(), attention_page(folder)
    embedded = read(attention, MAX_PAGE) if attention else b""
    final = final_validation(folder, rows[-1]["step"] if rows else -1)
    heads, cards = heads_section(folder / "attention")
    parts = {
        "CSP": content_security_policy(template, embedded),
        "NAME": escape(sanitize(folder.resolve().name)),
        "STATE": f"Written {time.strftime('%Y-%m-%d %H:%M')}, {progress(folder, rows)}"
        + "; the run was still training: reload this page for newer results" * is_training,
        "RESULT": result(rows, final, heads),
        "FACTS": facts(rows, read_rows(folder / "starts.jsonl"), final),
        "HEADS": cards,
        "CHARTS": json.dumps(chart_data(rows)),
        "SAMPLES": "".join(map(sample_article, reversed(samples))),
        "ATTENTION": attention_section(folder, attention, embedded),
        "SETTINGS": escape(sanitize(config)),
    }

    def part(found: re.Match) -> bytes:
        value = parts[found[1].decode()]
        # replace: a sample may contain lone surrogates, which UTF-8 cannot encode.
        return value if isinstance(value, bytes) else value.encode("utf-8", "replace")

    # One pass over the template, so that placeholders in the parts are not replaced. In bytes,
    # because the attention page has megabytes, and a str takes two or four times as much memory.
    report = folder / "report.html"
    atomic_write(report, re.sub(rb"__([A-Z]+)__", part, template))
    return report


def read(path: Path, limit: int) -> bytes:
    """Returns the content of a regular file of at most `limit` bytes; b"" without one."""
    try:
        return read_bounded(path, limit)
    except OSError:
        return b""


def progress(folder: Path, rows: list[dict]) -> str:
    """Returns the last logged step and the number of steps, in words."""
    if not rows:
        return "before the first step was logged"
    max_steps = flat(settings_of(folder) or {}).get("trainer.max_steps")
    of = f" of {max_steps:,}" if isinstance(max_steps, int) else ""
    return f"after step {rows[-1]['step']:,}{of}"


def result(rows: list[dict], final: dict, heads: str) -> str:
    """Returns the loss at the end, or the lowest one if it has risen since, and what the heads are,
    in one sentence; "" without both."""
    parts, losses = [], finite(points_of(rows, "val/loss"))
    if lowest := minimum_before_rise(losses):
        bits = dict(points_of(rows, "val/bits_per_byte")).get(lowest[0], math.nan)
        parts = [loss_at("lowest validation", losses[0], lowest, bits), risen_since(lowest[0])]
    elif losses:
        step, loss = losses[-1]
        # The validation at the end has more windows than those during training.
        at_end, bits, windows = (number(final.get(k)) for k in ("loss", "bits_per_byte", "windows"))
        last = step, loss if math.isnan(at_end) else at_end
        parts = [loss_at("validation", losses[0], last, bits, windows)]
    elif training := finite(points_of(rows, "train/loss")):
        parts = [loss_at("training", training[0], training[-1])]
    text = "; ".join(filter(None, [*parts, heads]))
    return f"{text[0].upper()}{text[1:]}." if text else ""


def loss_at(
    name: str,
    first: tuple[int, float],
    point: tuple[int, float],
    bits_per_byte: float = math.nan,
    windows: float = math.nan,
) -> str:
    """Returns a sentence about the loss at a point (step, loss), compared with the first one."""
    text = f"the {name} loss is {rounded(point[1], 4)} nats per token"
    text += "" if math.isnan(bits_per_byte) else f" ({bits_per_byte:.3f} bits per byte)"
    text += "" if math.isnan(windows) else f" on {windows:,.0f} windows"
    text += f" after {point[0]:,} steps"
    if first[1] > point[1]:
        text += f", down from {rounded(first[1], 4)} at step {first[0]:,}"
    return text


def risen_since(step: int) -> str:
    """Returns what a user should know about a validation loss that has risen since this step."""
    helps = "more text helps, maybe also a smaller model or dropout"
    repeated = f"if the text was read several times, {helps}"
    return f"the validation loss has risen since step {step:,} ({repeated})"


def facts(rows: list[dict], starts: list[dict], final: dict) -> str:
    """Returns the main results as HTML: loss, perplexity, parameters, tokens, duration, speed."""

    def known(key: str) -> Points:
        return finite(points_of(rows, key))

    shown = []
    if train := known("train/loss"):
        shown.append(("Training loss", rounded(train[-1][1], 4), f"at step {train[-1][0]:,}"))
    if val := known("val/loss"):
        step, loss = min(val, key=lambda point: point[1])
        bits, accuracy = (dict(known(f"val/{name}")) for name in ("bits_per_byte", "accuracy"))
        best = f"during training, at step {step:,}"
        shown.append(("Best validation loss", rounded(loss, 4), best))
        if 0 <= loss < 100:
            shown.append(("Perplexity", f"{math.exp(loss):,.2f}", f"at step {step:,}"))
        if step in bits:
            shown.append(("Bits per byte", f"{bits[step]:.3f}", f"at step {step:,}"))
        if step in accuracy:
            shown.append(("Accuracy", formatted(accuracy[step]), f"at step {step:,}"))
    if not math.isnan(loss := number(final.get("loss"))):
        error = number(final.get("loss_error"))
        error = "on " if math.isnan(error) else f"± {rounded(error, 4)} on "
        windows = f"{error}{number(final.get('windows')):,.0f} windows"
        if not math.isnan(bits := number(final.get("bits_per_byte"))):
            windows += f"; {bits:.3f} bits per byte"
        shown.append(("Validation at the end", rounded(loss, 4), windows))
    for _, parameters in finite(points_of(starts, "parameters"))[-1:]:
        shown.append(("Parameters", f"{parameters:,.0f}", ""))
    tokens, speeds = known("train/tokens"), known("train/tokens_per_second")
    if tokens:
        shown.append(("Tokens trained on", f"{tokens[-1][1]:,.0f}", ""))
    if speeds:
        shown.append(("Training time", training_time(tokens, dict(speeds)), "steps only"))
        median = statistics.median(value for _, value in speeds)
        shown.append(("Tokens per second", f"{median:,.0f}", "median"))
    if shares := [value for _, value in known("train/mfu")]:
        shown.append(("FLOPs utilisation", f"{statistics.median(shares):.1%}", "median"))
    return "".join(
        f"<div><dt>{name}</dt><dd>{value}<small>{more}</small></dd></div>"
        for name, value, more in shown
    )


def training_time(tokens: Points, speeds: dict[int, float]) -> str:
    """Returns the time of all training steps. tokens: in total, at each step with a row; rows of
    validations and attention snapshots have no speed."""
    known = [(step, count) for step, count in tokens if speeds.get(step, 0) > 0]
    seconds = sum(
        (after - before) / speeds[step]
        for (_, before), (step, after) in itertools.pairwise([(0, 0.0), *known])
    )
    return duration(min(seconds, 1e9))


def sample_article(row: dict) -> str:
    """Returns a row of samples.jsonl as HTML, with the prompt in bold."""
    prompt, text = (sanitize(str(row.get(key, ""))) for key in ("prompt", "text"))
    if not text.startswith(prompt):
        prompt = ""
    text = re.sub(r"\n\s*\n\s*\n", "\n\n", text[len(prompt) :].rstrip())  # no tall empty box
    body = f'<p><span class="prompt">{escape(prompt)}</span>{escape(text)}</p>'
    return f"<article><h3>step {row['step']:,}</h3>{body}</article>"


def sample_page(row: dict) -> str:
    """Returns one sample as a page without scripts, for the W&B dashboard."""
    template = (PAGE / "sample.html").read_text(encoding="utf-8")
    return template.replace("__SAMPLE__", sample_article(row))


def attention_section(folder: Path, page: Path | None, embedded: bytes) -> bytes | str:
    """Returns the attention page in a sandboxed frame, in which only its own script runs. Images
    replace it in print, and until the browser draws it."""
    if not embedded:
        return ""
    where = quote(page.relative_to(folder).as_posix())
    start = (
        f'<p class="quiet">All heads of all layers. <a href="{where}" target="_top">Open the '
        "attention page</a>, or drag the lower right corner to change its height.</p>"
        '<div class="embedded"><iframe sandbox="allow-scripts" title="Attention of all heads" '
        'srcdoc="'
    )
    # style.css of the page: a report shows the controls of steps and prompts only.
    embedded = embedded.replace(b'<html lang="en">', b'<html lang="en" class="in-report">', 1)
    content = embedded.replace(b"&", b"&amp;").replace(b'"', b"&quot;")
    images = "".join(map(image, newest_images(folder / "attention")))
    return start.encode() + content + f'"></iframe><div class="still">{images}</div></div>'.encode()


def newest_images(folder: Path) -> list[Path]:
    """Returns the images of the newest snapshot, one for each prompt."""
    paths = sorted(folder.glob("step_*.png"))
    return [path for path in paths if path.name[:13] == paths[-1].name[:13]]


def image(path: Path) -> str:
    """Returns a PNG as HTML; "" if it is missing, too large or not a PNG."""
    content = read(path, MAX_PANEL)
    if not content.startswith(b"\x89PNG"):
        return ""
    data = base64.b64encode(content).decode()
    return f'<img src="data:image/png;base64,{data}" alt="Attention of all heads">'
