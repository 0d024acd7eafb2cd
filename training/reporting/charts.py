"""The data of the charts in report.html, from the rows of metrics.jsonl.

    json.dumps(charts(rows))

main.js of report_page/ draws it.
"""

import math
from dataclasses import dataclass

import numpy as np

POINTS_PER_LINE = 1000  # a screen shows no more
SMOOTH_FROM = 60  # points; below that a line is readable as it is

Points = list[tuple[int, float]]  # (step, value) in the order of steps; NaN is a gap


@dataclass
class Chart:
    title: str
    unit: str
    keys: tuple[str, ...]
    from_zero: bool = True


CHARTS = (
    Chart("Loss", "nats per token", ("train/loss", "val/loss"), from_zero=False),
    Chart("Validation", "bits per byte", ("val/bits_per_byte",), from_zero=False),
    Chart("Validation accuracy", "share of targets", ("val/accuracy",), from_zero=False),
    Chart("Learning rate", "", ("train/learning_rate",)),
    Chart("Throughput", "tokens per second", ("train/tokens_per_second",)),
    Chart("Gradient norm", "before clipping", ("train/grad_norm",)),
)


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


def charts(rows: list[dict]) -> list[dict]:
    """The charts of the metrics that were logged: their lines, and how many values are not finite.

    A line has its CSS classes and points [step, value], where null is a gap.
    """
    drawn = []
    for chart in CHARTS:
        metrics = {key: points for key in chart.keys if (points := points_of(rows, key))}
        if metrics:
            lines = [
                line for key, points in metrics.items() for line in lines_of(chart, key, points)
            ]
            gaps = sum(len(points) - len(finite(points)) for points in metrics.values())
            # steps: of the run, so that all charts have the same axis
            steps = (rows[0]["step"], rows[-1]["step"])
            drawn.append(vars(chart) | {"lines": lines, "gaps": gaps, "steps": steps})
    return drawn


def lines_of(chart: Chart, key: str, points: Points) -> list[dict]:
    """A metric as lines: itself, and smoothed if it is a training loss with many points."""
    classes = "validation" if key.startswith("val/") else "training"
    lines = [(classes if len(chart.keys) > 1 else chart.title.lower(), classes, points)]
    if key == "train/loss" and len(points) >= SMOOTH_FROM:
        lines = [("training", "training thin", points), ("smoothed", "training", smooth(points))]
    return [
        {"name": name, "classes": classes, "points": [(s, _json(v)) for s, v in thin(points)]}
        for name, classes, points in lines
        if finite(points)
    ]


def _json(value: float) -> float | None:
    return None if math.isnan(value) else float(f"{value:.6g}")


def smooth(points: Points) -> Points:
    """The mean of a centred window around each point, so without lag; shorter at the ends.

    Values that are not finite stay gaps and do not count in their neighbours' windows.
    """
    steps, values = zip(*points, strict=True)
    known = ~np.isnan(values)
    sums = np.cumsum([0, *np.where(known, values, 0)])
    counts = np.cumsum([0, *known])
    place = np.arange(len(points))
    half = np.minimum(place, len(points) // SMOOTH_FROM)
    start, end = place - half, np.minimum(place + half + 1, len(points))
    means = (sums[end] - sums[start]) / np.maximum(1, counts[end] - counts[start])
    return list(zip(steps, np.where(known, means, np.nan).tolist(), strict=True))


def thin(points: Points, limit: int = POINTS_PER_LINE) -> Points:
    """At most `limit` points and some gaps: the lowest and highest of each interval, so that spikes
    stay, and its first gap."""
    if len(points) <= limit:
        return points
    kept = {points[0], points[-1]}
    size = math.ceil(2 * len(points) / (limit - 2))
    for start in range(0, len(points), size):
        interval = points[start : start + size]
        kept.update([point for point in interval if math.isnan(point[1])][:1])
        if known := finite(interval):
            kept |= {min(known, key=lambda point: point[1]), max(known, key=lambda point: point[1])}
    return sorted(kept)
