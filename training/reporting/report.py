"""report.html of a run: curves, samples, attention page and settings in one file.

    write_report(Path("runs/first"))

It is made from the files in the run's directory, those that are there, and can be written at any
time. The sources are in report_page/. The page fetches nothing and has the attention page in a
sandboxed frame, so it can be sent as one file.
"""

import re
import time
from html import escape
from pathlib import Path
from urllib.parse import quote

from errors import visible
from files import atomic_write, read_bounded, read_rows
from lens.assemble import assemble, content_security_policy
from training.checkpoint.run_directory import settings_of
from training.reporting.charts import Chart, Points, figure, finite, points_of

PAGE = Path(__file__).parent / "report_page"
# What else a run's directory may have: pattern, description.
FILES = (
    ("metrics.jsonl", "losses, learning rate, speed, statistics of layers; a line for each step"),
    ("samples.jsonl", "what the model wrote after each validation; a line for each"),
    ("config.yaml", "all settings of the run, with default values"),
    ("attention/timelapse.html", "the attention of every head over the whole run, interactive"),
    ("attention/step_*.html", "the attention of every head at one step, interactive"),
    ("attention/heads.csv", "every head ranked by each statistic"),
    ("attention/statistics.jsonl", "the statistics of every head; a line for each snapshot"),
    ("attention/step_*.png", "pictures of every head, one for each prompt and snapshot"),
    ("checkpoints/last", "the newest checkpoint: safetensors and JSON"),
    ("checkpoints/best", "the checkpoint with the lowest validation loss"),
    ("checkpoints/step_*", "all checkpoints"),
    ("wandb", "the record for Weights & Biases; wandb sync uploads it"),
)

CHARTS = (
    Chart("Loss", "nats per token", ("train/loss", "val/loss"), log=True, wide=True),
    Chart("Validation", "bits per byte", ("val/bits_per_byte",)),
    Chart("Validation accuracy", "share of targets", ("val/accuracy",)),
    Chart("Learning rate", "", ("train/learning_rate",), from_zero=True),
    Chart("Throughput", "tokens per second", ("train/tokens_per_second",), from_zero=True),
    Chart("Gradient norm", "before clipping", ("train/grad_norm",), from_zero=True, log=True),
)

MAX_CONFIG, MAX_PAGE = 2**20, 2**30  # bytes that are read
MAX_SAMPLE = 10_000  # characters of a sample on a page of its own


def write_report(folder: Path) -> Path:
    """Writes folder/report.html from the files in a run's directory; returns its path."""
    rows, samples = read_rows(folder / "metrics.jsonl"), read_rows(folder / "samples.jsonl")
    config = read(folder / "config.yaml", MAX_CONFIG).decode("utf-8", "replace")
    template, attention = assemble(PAGE / "index.html").encode(), attention_page(folder)
    embedded = read(attention, MAX_PAGE) if attention else b""
    parts = {
        "CSP": content_security_policy(template, embedded),
        "NAME": escape(folder.resolve().name),
        "STATE": f"Written {time.strftime('%Y-%m-%d %H:%M')}, {progress(folder, rows)}",
        "FACTS": facts(rows),
        "CHARTS": charts(rows),
        "SAMPLES": samples_section(samples),
        "ATTENTION": attention_section(folder, attention, embedded),
        "SETTINGS": settings_section(config),
        "FILES": files_section(folder),
    }

    def part(found: re.Match) -> bytes:
        value = parts[found[1].decode()]
        # replace: a sample may have half of a surrogate pair, which has no UTF-8.
        return value if isinstance(value, bytes) else value.encode("utf-8", "replace")

    # One pass over the template: placeholders in the parts are not replaced. Bytes, because the
    # attention page has megabytes and text takes two or four times as many.
    report = folder / "report.html"
    atomic_write(report, re.sub(rb"__([A-Z]+)__", part, template))
    return report


def read(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes; empty where there is none."""
    try:
        return read_bounded(path, limit)
    except OSError:
        return b""


# ------------------------------------------------------------------------------------- numbers


def progress(folder: Path, rows: list[dict]) -> str:
    """The last step that was logged, and of how many if the settings are there."""
    if not rows:
        return "before the first step was logged"
    try:
        max_steps = f" of {int(settings_of(folder)['trainer']['max_steps']):,}"
    except (KeyError, TypeError, ValueError):
        max_steps = ""
    return f"after step {rows[-1]['step']:,}{max_steps}"


def facts(rows: list[dict]) -> str:
    """The most important numbers: last training loss, best validation, tokens, speed."""
    train, val = finite(points_of(rows, "train/loss")), finite(points_of(rows, "val/loss"))
    shown = []
    if train:
        shown.append(("Training loss", f"{train[-1][1]:.4f}", f"at step {train[-1][0]:,}"))
    if val:
        step, loss = min(val, key=lambda point: point[1])
        shown.append(("Best validation loss", f"{loss:.4f}", f"at step {step:,}"))
        for key, name, form in (
            ("val/bits_per_byte", "Bits per byte", ".3f"),
            ("val/accuracy", "Accuracy", ".1%"),
        ):
            there = dict(finite(points_of(rows, key)))
            if step in there:
                shown.append((name, format(there[step], form), f"at step {step:,}"))
    if tokens := finite(points_of(rows, "train/tokens")):
        shown.append(("Tokens seen", f"{tokens[-1][1]:,.0f}", ""))
    if (speed := median(points_of(rows, "train/tokens_per_second"))) is not None:
        shown.append(("Tokens per second", f"{speed:,.0f}", "median"))
    if (share := median(points_of(rows, "train/mfu"))) is not None:
        shown.append(("FLOPs utilisation", f"{share:.1%}", "median"))
    tiles = "".join(
        f"<div><dt>{name}</dt><dd>{value}<small>{more}</small></dd></div>"
        for name, value, more in shown
    )
    return f'<dl class="facts">{tiles}</dl>' if shown else ""


def median(points: Points) -> float | None:
    values = sorted(value for _, value in finite(points))
    return values[len(values) // 2] if values else None


def charts(rows: list[dict]) -> str:
    """The charts of the metrics that were logged."""
    drawn = "".join(figure(chart, rows) for chart in CHARTS)
    return f'<div class="charts">{drawn}</div>' if drawn else "<p>No metrics yet.</p>"


# ------------------------------------------------------------------------- samples, attention


def samples_section(samples: list[dict]) -> str:
    """All samples, newest first."""
    if not samples:
        return "<p>No samples yet.</p>"
    articles = [sample_article(row) for row in reversed(samples)]
    return (
        '<p class="quiet">The prompt is <span class="prompt">bold</span>; the model wrote the '
        "rest.</p>"
        '<div class="samples" tabindex="0" role="region" aria-label="Samples, newest first">'
        f"{''.join(articles)}</div>"
    )


def sample_article(row: dict, longest: int | None = None) -> str:
    """A row of samples.jsonl with its prompt in bold. longest: the most characters shown."""
    prompt, text = str(row.get("prompt", "")), str(row.get("text", ""))
    if not text.startswith(prompt):
        prompt = ""
    if longest and len(text) > longest:
        prompt, text = prompt[:longest], f"{text[:longest]}…"
    start = f'<span class="prompt">{escape(prompt)}</span>' if prompt else ""
    body = f"<p>{start}{escape(text[len(prompt) :])}</p>"
    return f"<article><h3>step {row['step']:,}</h3>{body}</article>"


def sample_page(row: dict) -> str:
    """One sample as a page for the W&B dashboard, without scripts."""
    template = (PAGE / "sample.html").read_text(encoding="utf-8")
    return template.replace("__SAMPLE__", visible(sample_article(row, MAX_SAMPLE)))


def attention_page(folder: Path) -> Path | None:
    """The time-lapse, or the page of the newest step."""
    timelapse = folder / "attention" / "timelapse.html"
    steps = sorted((folder / "attention").glob("step_*.html"))
    return timelapse if timelapse.is_file() else steps[-1] if steps else None


def attention_section(folder: Path, page: Path | None, embedded: bytes) -> bytes | str:
    """The attention page in a frame that may run its own script and nothing else."""
    if not embedded:
        pictures = sorted((folder / "attention").glob("step_*.png"))
        newest = [p for p in pictures if p.name[:13] == pictures[-1].name[:13]]
        links = ", ".join(link(folder, picture) for picture in newest)
        return f"<p>No interactive page yet.{f' Newest pictures: {links}.' if links else ''}</p>"
    where = quote(page.relative_to(folder).as_posix())
    start = (
        f'<p class="quiet">Every head of every layer. <a href="{where}">Open it on its own page</a>'
        "; below, drag the lower right corner for more height.</p>"
        '<div class="embedded"><iframe sandbox="allow-scripts" title="Attention of every head" '
        'srcdoc="'
    )
    content = embedded.replace(b"&", b"&amp;").replace(b'"', b"&quot;")
    return start.encode() + content + b'"></iframe></div>'


def settings_section(config: str) -> str:
    """config.yaml, folded."""
    if not config.strip():
        return "<p>No config.yaml yet.</p>"
    return f"<details><summary>config.yaml</summary><pre>{escape(config)}</pre></details>"


def files_section(folder: Path) -> str:
    """A table of the files in the directory; several of a kind are one row."""
    lines = []
    for pattern, about in FILES:
        found = sorted(folder.glob(pattern))
        if not found:
            continue
        is_folder = any(path.is_dir() for path in found)
        size = "" if is_folder else bytes_text(sum(path.stat().st_size for path in found))
        name = link(folder, found[0]) if len(found) == 1 else several(folder, found)
        lines.append(f'<tr><td>{name}<td>{about}<td class="size">{size}')
    return f"<table>{''.join(lines)}</table>"


def several(folder: Path, paths: list[Path]) -> str:
    """The number of files and a link to the newest."""
    return f"{len(paths):,} files, the newest {link(folder, paths[-1])}"


def link(folder: Path, path: Path) -> str:
    where = path.relative_to(folder).as_posix()
    return f'<a href="{quote(where)}">{escape(where)}</a>'


def bytes_text(count: int) -> str:
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
