"""Line charts of a run's metrics as SVG for report.html.

    figure(Chart("Loss", "nats per token", ("train/loss", "val/loss")), rows)

rows are those of metrics.jsonl. Sizes inside a plot are percentages, so it fits any width while its
text keeps its size; style.css of report_page/ gives the colours for light and dark, main.js shows
values at the cursor. A finished picture of a plotting library could not do that.
"""

import math
from dataclasses import dataclass

POINTS_PER_LINE = 1000  # a screen shows no more
SMOOTH_FROM = 60  # points; below that a line is readable as it is
DENSE_FROM = 300  # points; from there on a noisy line is drawn finer
MARKERS_UP_TO = 60  # points; above that the markers would hide the line

Points = list[tuple[int, float]]  # (step, value) in the order of steps; nan is a gap


@dataclass
class Line:
    name: str
    classes: str  # training or validation: the colour; thin: the line behind a smoothed one
    points: Points  # at most about POINTS_PER_LINE


@dataclass
class Chart:
    """One chart: its title, its metrics, its vertical axis."""

    title: str
    unit: str
    keys: tuple[str, ...]
    from_zero: bool = False
    wide: bool = False


def number(value: object) -> float:
    """A metric as a number that can be drawn; NaN for "nan", "inf" and all else that cannot."""
    try:
        return value if -1e100 < (value := float(value)) < 1e100 else math.nan
    except (TypeError, ValueError, OverflowError):
        return math.nan


def points_of(rows: list[dict], key: str) -> Points:
    return [(row["step"], number(row[key])) for row in rows if key in row]


def finite(points: Points) -> Points:
    return [point for point in points if not math.isnan(point[1])]


def figure(chart: Chart, rows: list[dict]) -> str:
    """A chart with its title and the values at the cursor; "" without values."""
    metrics = {key: points for key in chart.keys if (points := points_of(rows, key))}
    if not metrics:
        return ""
    broken = sum(len(points) - len(finite(points)) for points in metrics.values())
    lines = [line for key in metrics for line in lines_of(chart, key, metrics[key])]
    note = f'<p class="note">{gaps(broken)}</p>' if broken else ""
    unit = f' <span class="unit">{chart.unit}</span>' if chart.unit else ""
    wide, body = ' class="wide"' if chart.wide else "", ""
    if lines:
        body = f'<div class="readout" aria-live="polite">{last_values(lines)}</div>'
        steps = (rows[0]["step"], rows[-1]["step"])  # of the run: the same axis in all charts
        body += plot(chart, lines, steps)
    caption = f"<figcaption><h3>{chart.title}{unit}</h3></figcaption>"
    return f"<figure{wide}>{caption}{body}{note}</figure>\n"


def lines_of(chart: Chart, key: str, points: Points) -> list[Line]:
    """A metric as lines: itself, and smoothed if it is a training loss with many points."""
    drawn = thin(points)
    if not finite(drawn):
        return []
    if key.startswith("val/"):
        return [Line("validation", "validation", drawn)]
    if key != "train/loss":
        dense = " dense" if len(points) > DENSE_FROM else ""
        return [Line(chart.title.lower(), f"training{dense}", drawn)]
    if len(points) < SMOOTH_FROM:
        return [Line("training", "training", drawn)]
    smoothed = Line("smoothed", "training", thin(smooth(points)))
    return [Line("training", "training thin", drawn), smoothed]


def smooth(points: Points) -> Points:
    """The mean of a centred window around each point, so without lag; shorter at the ends.

    Values that are not finite stay gaps and do not count in their neighbours' windows.
    """
    sums, counts = [0.0], [0]
    for _, value in points:
        drawable = not math.isnan(value)
        sums.append(sums[-1] + (value if drawable else 0))
        counts.append(counts[-1] + drawable)
    last, widest = len(points) - 1, len(points) // SMOOTH_FROM
    smoothed = []
    for i, (step, value) in enumerate(points):
        half = min(widest, i)
        start, end = i - half, min(i + half, last) + 1
        mean = math.nan if math.isnan(value) else sums[end] - sums[start]
        smoothed.append((step, mean / max(1, counts[end] - counts[start])))
    return smoothed


def thin(points: Points, limit: int = POINTS_PER_LINE) -> Points:
    """At most `limit` points: the lowest and highest of each interval, so that spikes stay; and one
    gap of each interval that has any."""
    if len(points) <= limit:
        return points
    size = math.ceil(len(points) / ((limit - 3) // 2))
    kept = {0, len(points) - 1}
    for start in range(0, len(points), size):
        interval = range(start, min(start + size, len(points)))
        drawable = [i for i in interval if not math.isnan(points[i][1])]
        if drawable:
            kept.add(min(drawable, key=lambda i: points[i][1]))
            kept.add(max(drawable, key=lambda i: points[i][1]))
        if len(drawable) < len(interval):
            kept.add(next(i for i in interval if math.isnan(points[i][1])))
    kept.update(drawable[-1:])  # the end of a line is read as the last value
    return [points[i] for i in sorted(kept)]


def round_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` multiples of 1, 2 or 5 times a power of ten, from below low to above high."""
    if high - low < 1e-9 * max(abs(low), abs(high), 1e-90):
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def tick_text(value: float, largest: float) -> str:
    """A tick of an axis whose largest tick is given: 0.25, 12,000, 1.5M, 3e-4."""
    for size, letter in ((1e9, "G"), (1e6, "M")):
        if size <= largest < 1e12:
            return f"{value / size:.10g}{letter if value else ''}"
    if value and (largest < 1e-3 or largest >= 1e12):
        mantissa, exponent = f"{value:.4e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:,.10g}"


def plot(chart: Chart, lines: list[Line], steps: tuple[int, int]) -> str:
    """The SVG: ticks, lines, markers. All positions are percentages of the plot."""
    values = [value for line in lines for _, value in finite(line.points)]
    x0, x1 = steps[0], max(steps[1], steps[0] + 1)
    y_ticks = round_ticks(min(0, *values) if chart.from_zero else min(values), max(values))
    y0, y1 = y_ticks[0], y_ticks[-1]

    def across(step: float) -> float:
        return 100 * (step - x0) / (x1 - x0)

    def down(value: float) -> float:
        return 100 * (y1 - value) / (y1 - y0)

    x_ticks = [t for t in round_ticks(x0, x1, min(6, x1 - x0)) if x0 <= t <= x1]
    label = f"{chart.title} {chart.unit}, {', '.join(line.name for line in lines)}, over steps"
    return (
        '<svg class="plot" role="img" tabindex="0" '
        f'aria-label="{label}" data-x0="{x0}" data-x1="{x1}" data-y0="{y0!r}" data-y1="{y1!r}">'
        '<rect class="area" width="100%" height="100%"/>'
        + "".join(
            f'<line class="grid" x2="100%" y1="{down(t):.2f}%" y2="{down(t):.2f}%"/>'
            f'<text class="y" y="{down(t):.2f}%" dx="-8" dy=".35em" text-anchor="end">'
            f"{tick_text(t, max(map(abs, y_ticks)))}</text>"
            for t in y_ticks
        )
        + '<line class="axis" x2="100%" y1="100%" y2="100%"/><g>'
        + "".join(
            f'<text class="x" x="{across(t):.2f}%" y="100%" dy="1.5em" text-anchor="middle">'
            f"{tick_text(t, x1)}</text>"
            for t in x_ticks
        )
        + '</g><text x="100%" y="100%" dy="3em" text-anchor="end">step</text>'
        '<svg class="lines" viewBox="0 0 100 100" preserveAspectRatio="none">'
        + "".join(path(line, across, down) for line in lines)
        + "</svg>"
        + "".join(markers(line, across, down) for line in lines)
        + "</svg>\n"
    )


def path(line: Line, across, down) -> str:
    """A line with a break at each gap, and its values for the cursor."""
    drawn, pen = [], "M"
    points = line.points
    for i, (step, value) in enumerate(points):
        if math.isnan(value):
            pen = "M"
            continue
        drawn.append(f"{pen}{across(step):.2f} {down(value):.2f}")
        # A point between two gaps: a line of length 0, which the round cap makes a dot.
        if pen == "M" and (i + 1 == len(points) or math.isnan(points[i + 1][1])):
            drawn.append("h0")
        pen = "L"
    numbers = " ".join(f"{step}:{value:.6g}" for step, value in finite(points))
    return (
        f'<path class="{line.classes}" data-name="{line.name}" data-points="{numbers}" '
        f'd="{"".join(drawn)}"/>'
    )


def markers(line: Line, across, down) -> str:
    if "validation" not in line.classes or len(line.points) > MARKERS_UP_TO:
        return ""
    return "".join(
        f'<circle class="{line.classes}" r="3.5" cx="{across(step):.2f}%" cy="{down(value):.2f}%"/>'
        for step, value in finite(line.points)
    )


def last_values(lines: list[Line]) -> str:
    """The last value of each line, shown without a cursor."""
    newest = max(step for line in lines for step, _ in finite(line.points))
    spans = [f'<span class="step">step {newest:,}</span>']
    for line in lines:
        step, value = finite(line.points)[-1]
        when = "" if step == newest else f" at step {step:,}"
        spans.append(f'<span class="{line.classes}">{line.name} {value:.6g}{when}</span>')
    return "".join(spans)


def gaps(count: int) -> str:
    what = "One value is" if count == 1 else f"{count:,} values are"
    return f"{what} not finite (NaN or inf) and not drawn."
