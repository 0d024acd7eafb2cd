"""The tables of a comparison of runs, in Markdown that is readable in a terminal.

    print(tables(rows, "val/loss"))

`rows` are those of reporting/comparison.py. The columns of a table are the settings that differ
between its rows.
"""

import math
import statistics
from collections.abc import Mapping, Sequence

from clearhead.errors import as_yaml, sanitize
from clearhead.output.comparison import CHECKSUM, SHAPE, ComparisonRow, automatic, by_text
from headlens import rounded

COMPARABLE = """\
Values in different tables are not comparable. Bits per byte are comparable between tokenizers: add
metric=val/bits_per_byte"""


def tables(rows: list[ComparisonRow], metric: str) -> str:
    """Returns a Markdown table, readable in a terminal, for each text and tokenizer."""
    parts = [f"## {group[0].text}\n\n{table(group, metric)}" for group in by_text(rows)]
    if len(parts) > 1 and not metric.endswith("/bits_per_byte"):
        parts.append(COMPARABLE)
    return "\n\n".join(parts)


def table(rows: list[ComparisonRow], metric: str) -> str:
    lines = []
    for row, settings in zip(rows, shown(rows), strict=True):
        has_range = len(row.runs) > 1 and not math.isnan(row.mean)
        cells = {"run": label(row)} | {name: as_yaml(value) for name, value in settings.items()}
        cells |= {"tokens": f"{row.tokens:,}", metric: f"{row.mean:.4f}"}
        cells["windows"] = ""
        if row.windows_error is not None:
            counts = dict.fromkeys(f"{n:,}" for n in (min(row.windows), max(row.windows)))
            cells["windows"] = f"{'–'.join(counts)} (± {row.windows_error:.4f})"
        cells["min–max"] = f"{min(row.values):.4f}–{max(row.values):.4f}" if has_range else ""
        risen = [lowest for lowest in row.lowest if lowest is not None]
        runs = f" ({len(risen)} of {len(row.runs)})" if len(row.runs) > 1 else ""
        cells["lowest"] = f"{statistics.fmean(risen):.4f}{runs}" if risen else ""
        delta = row.difference
        cells["difference from the first row"] = ""
        if delta:
            text = f"{rounded(delta.mean, 4, signed=True)} ± {rounded(delta.standard_error, 4)}"
            cells["difference from the first row"] = f"{text}, p = {delta.p:.1g}"
        if row.tokens_to_target:
            reached = [tokens for tokens in row.tokens_to_target if tokens is not None]
            mean = f"{round(statistics.fmean(reached)):,}" if reached else "never"
            cells["tokens to target"] = f"{mean} ({len(reached)} of {len(row.runs)})"
        lines.append(cells)
    return markdown_table(lines)


def markdown_table(lines: Sequence[Mapping[str, str]]) -> str:
    """Returns a table with a column for each key; columns without any text are omitted."""
    columns = []
    for name in lines[0]:
        texts = [name, *(cells[name] for cells in lines)]
        texts = [sanitize(text.replace("|", "\\|"), keep="") for text in texts]
        width = max(map(len, texts))
        head, *body = (text.ljust(width) for text in texts)
        if any(cells[name] for cells in lines):
            columns.append([head, "-" * width, *body])
    return "\n".join(f"| {' | '.join(texts)} |" for texts in zip(*columns, strict=True))


def label(row: ComparisonRow) -> str:
    """Returns the first run of a row, how many others and unfinished ones it has, and repeated
    ones."""
    text = row.runs[0]
    if others := len(row.runs) - 1:
        text += f" + {others} run{'s' * (others > 1)}"
    text += f" ({len(row.unfinished)} unfinished)" if row.unfinished else ""
    return text + (f" (repeated: {', '.join(row.repeated)})" if row.repeated else "")


def shown(rows: list[ComparisonRow]) -> list[dict[str, object]]:
    """Returns the columns of each row: the settings that differ between these rows. Automatic
    values have no column, and `model` replaces several settings of SHAPE."""
    all_settings = [row.settings for row in rows]
    names = [n for n in all_settings[0] if any(s[n] != all_settings[0][n] for s in all_settings)]
    hidden = {n for n in names if all(s[n] == automatic(s).get(n, ...) for s in all_settings)}
    if any(name.startswith("data.") and name != CHECKSUM for name in names):
        hidden.add(CHECKSUM)  # follows from these
    has_model = set(SHAPE) <= set(names)
    if has_model:
        hidden.update(SHAPE)
    return [
        ({"model": row.model} if has_model else {})
        | {name: row.settings[name] for name in names if name not in hidden}
        for row in rows
    ]
