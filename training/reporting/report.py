"""runs/<name>/report.html: a whole run on one page, for whoever has no Weights & Biases account.

    write_report(Path("runs/first"))

Reads what the run has written into its directory and nothing else, so it can be called at any time:
what is not there yet is said to be missing. The page stands in report.html beside this file. It
fetches nothing, and holds the attention page in a sandboxed frame, so it is complete when it is
sent alone. Only the standard library is used.
"""

import contextlib
import html
import json
import re
import time
from html import escape
from pathlib import Path
from urllib.parse import quote

from errors import visible
from files import atomic_write, read_bounded, read_lines
from lens.assemble import content_security_policy
from training.reporting.charts import Chart, Points, figure, finite, points_of

TEMPLATE = Path(__file__).with_suffix(".html")
# What a run's directory may hold, and what it is.
FILES = (
    ("report.html", "this page"),
    ("metrics.jsonl", "losses, learning rate, speed, statistics of layers; a line for each step"),
    ("samples.jsonl", "what the model wrote after each validation; a line for each"),
    ("config.yaml", "all settings of the run, defaults and all"),
    ("attention/timelapse.html", "the attention of every head over the whole run, interactive"),
    ("attention/step_*.html", "the attention of every head at one step, interactive"),
    ("attention/heads.csv", "every head ranked by each statistic"),
    ("attention/statistics.jsonl", "the statistics of every head; a line for each look"),
    ("attention/step_*.png", "pictures of every head, one for each prompt and look"),
    ("checkpoints/last", "the newest checkpoint: safetensors and JSON"),
    ("checkpoints/best", "the checkpoint with the lowest validation loss"),
    ("checkpoints/step_*", "the checkpoints themselves"),
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
LONGEST_SAMPLE = 10_000  # characters of one on a page of its own
SAMPLE_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>sample</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ margin: 1rem; max-width: 42rem; font: 1rem/1.5 system-ui, sans-serif; }}
h3 {{ margin: 0; font-size: .8125rem; font-weight: normal; opacity: .7; }}
p {{ margin: .25rem 0; white-space: pre-wrap; overflow-wrap: anywhere; }}
.prompt {{ font-weight: 650; }}
</style>
{article}
</html>
"""


def write_report(folder: Path) -> Path:
    """Writes folder/report.html from what is in the run's directory; returns where it is."""
    rows, samples = read_rows(folder / "metrics.jsonl"), read_rows(folder / "samples.jsonl")
    config = read(folder / "config.yaml", MAX_CONFIG).decode("utf-8", "replace")
    template, page = TEMPLATE.read_bytes(), attention_page(folder)
    embedded = read(page, MAX_PAGE) if page else b""
    report = folder / "report.html"
    parts = {
        "CSP": content_security_policy(template, embedded),
        "NAME": escape(folder.resolve().name),
        "STATE": f"Written {time.strftime('%Y-%m-%d %H:%M')}, {state(rows, config)}",
        "FACTS": facts(rows),
        "CHARTS": charts(rows),
        "SAMPLES": samples_section(samples),
        "ATTENTION": attention_section(folder, page, embedded),
        "SETTINGS": settings_section(config),
        "FILES": files_section(folder),
    }
    # One pass over the template alone: what a part says is never read as a placeholder. Bytes,
    # because the attention page has megabytes of them and as text each would be two or four.
    atomic_write(
        report,
        re.sub(rb"__([A-Z]+)__", lambda found: as_bytes(parts[found[1].decode()]), template),
    )
    return report


def as_bytes(part: str | bytes) -> bytes:
    """UTF-8. A sample may hold half of a surrogate pair, which has none."""
    return part if isinstance(part, bytes) else part.encode("utf-8", "replace")


# ------------------------------------------------------------------------------------- reading


def read(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes; nothing where there is none."""
    try:
        return read_bounded(path, limit)
    except OSError:
        return b""


def read_rows(path: Path) -> list[dict]:
    """The rows of a .jsonl file, sorted by step; none where it is missing or cannot be read.

    Lines that are truncated, too long or not a row are skipped. Limits: files.read_lines.
    """
    rows = []
    with contextlib.suppress(OSError):
        for line in read_lines(path):
            try:
                row = json.loads(line.decode("utf-8", "replace"))
            except (ValueError, RecursionError):
                continue
            step = row.get("step") if isinstance(row, dict) else None
            if type(step) is int and 0 <= step < 2**53:
                rows.append(row)
    return sorted(rows, key=lambda row: row["step"])


# ---------------------------------------------------------------------------------- the numbers


def state(rows: list[dict], config: str) -> str:
    """How far the run has come."""
    if not rows:
        return "before the first step was logged"
    found = re.search(r"^trainer:\n(?: .*\n)*?  max_steps: (\d+)$", config, re.MULTILINE)
    whole = f" of {int(found[1]):,}" if found else ""
    return f"after step {rows[-1]['step']:,}{whole}"


def facts(rows: list[dict]) -> str:
    """The few numbers that are asked for first."""
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


# ----------------------------------------------------------------------------------- the charts


def charts(rows: list[dict]) -> str:
    drawn = "".join(figure(chart, rows) for chart in CHARTS)
    return f'<div class="charts">{drawn}</div>' if drawn else "<p>No metrics yet.</p>"


# ----------------------------------------------------------------------- samples, attention, files


def samples_section(samples: list[dict]) -> str:
    """Every sample with its prompt set apart from what the model wrote, newest first."""
    if not samples:
        return "<p>No samples yet.</p>"
    articles = [sample_article(row) for row in reversed(samples)]
    return (
        '<p class="quiet">The prompt is set in <span class="prompt">bold</span>; the rest is what '
        "the model wrote.</p>"
        '<div class="samples" tabindex="0" role="region" aria-label="Samples, newest first">'
        f"{''.join(articles)}</div>"
    )


def sample_article(row: dict, longest: int | None = None) -> str:
    """A row of samples.jsonl, its prompt set apart. longest: characters that are shown at most."""
    prompt, text = str(row.get("prompt", "")), str(row.get("text", ""))
    if not text.startswith(prompt):
        prompt = ""
    if longest and len(text) > longest:
        prompt, text = prompt[:longest], f"{text[:longest]}…"
    start = f'<span class="prompt">{escape(prompt)}</span>' if prompt else ""
    body = f"<p>{start}{escape(text[len(prompt) :])}</p>"
    return f"<article><h3>step {row['step']:,}</h3>{body}</article>"


def sample_page(row: dict) -> str:
    """One sample as a page of its own, for a dashboard's frame. It loads and runs nothing."""
    return SAMPLE_PAGE.format(article=visible(sample_article(row, LONGEST_SAMPLE)))


def attention_page(folder: Path) -> Path | None:
    """The time-lapse, or else the newest step's page."""
    timelapse = folder / "attention" / "timelapse.html"
    steps = sorted((folder / "attention").glob("step_*.html"))
    return timelapse if timelapse.is_file() else steps[-1] if steps else None


def attention_section(folder: Path, page: Path | None, embedded: bytes) -> bytes | str:
    """The attention page in a frame that may run its script and do nothing else."""
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
    if not config.strip():
        return "<p>No config.yaml yet.</p>"
    return f"<details><summary>config.yaml</summary><pre>{escape(config)}</pre></details>"


def files_section(folder: Path) -> str:
    """What is in the directory and what each file is; several of a kind are one line."""
    lines = []
    for pattern, about in FILES:
        found = sorted(folder.glob(pattern))
        if pattern == "report.html":
            size, name = "", "report.html"
        elif not found:
            continue
        else:
            size = "" if any(p.is_dir() for p in found) else bytes_text(sum_of_sizes(found))
            name = link(folder, found[0]) if len(found) == 1 else several(folder, found)
        lines.append(f'<tr><td>{name}<td>{about}<td class="size">{size}')
    return f"<table>{''.join(lines)}</table>"


def sum_of_sizes(paths: list[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def several(folder: Path, paths: list[Path]) -> str:
    """Many files of a kind: how many, and the newest."""
    return f"{len(paths):,} files, the newest {link(folder, paths[-1])}"


def link(folder: Path, path: Path) -> str:
    where = path.relative_to(folder).as_posix()
    return f'<a href="{quote(where)}">{html.escape(where)}</a>'


def bytes_text(count: int) -> str:
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
