"""Data for the charts of a run's page, from the rows of metrics.jsonl. headlens/page/training.js
draws the charts."""

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

from headlens import formatted, rounded


class Chart(NamedTuple):
    """A chart of the page. lines: {metric: its name}."""

    title: str
    unit: str
    lines: dict[str, str]
    text: Callable[[float], str]  # a value at the cursor
    from_zero: bool = True
    scale: float = 1.0  # values are drawn times this number
    sign: str = ""  # after the numbers of the axis


OF_LOSS = {"train/loss": "training", "smoothed": "smoothed", "val/loss": "validation"}
BITS, ACCURACY = {"val/bits_per_byte": "validation"}, {"val/accuracy": "validation"}
RATE, SPEED = {"train/learning_rate": "learning rate"}, {"train/tokens_per_second": "throughput"}
GRADIENT = {"train/grad_norm": "gradient norm"}
CHARTS = (
    Chart("loss", "nats per token", OF_LOSS, lambda value: rounded(value, 4), from_zero=False),
    Chart("validation", "bits per byte", BITS, lambda value: rounded(value, 3), from_zero=False),
    Chart("validation accuracy", "of targets", ACCURACY, "{:.1%}".format, scale=100, sign="%"),
    Chart("learning rate", "", RATE, "{:.3g}".format),
    Chart("throughput", "tokens per second", SPEED, "{:,.0f} tokens/s".format),
    Chart("gradient norm", "before clipping", GRADIENT, formatted),
)
KEYS = tuple(key for chart in CHARTS for key in chart.lines if "/" in key)
CURVES = {  # those under the time line of the heads
    "train/loss": "training loss",
    "val/loss": "validation loss",
    "val/accuracy": "validation accuracy",
}
MAX_POINTS = 300  # of a curve under the time line
POINTS_PER_LINE = 600  # a chart has about as many pixels
SMOOTH_FROM = 60  # with fewer points, smoothing is not necessary
# A validation loss has risen if it is more than this fraction and this much above its minimum.
RISE, RISE_NATS = 0.01, 0.01

Points = list[tuple[int, float]]  # (step, value), ordered by step; NaN is a gap in the line


def number(value: object) -> float:
    """Returns a metric as a number that can be drawn; NaN for anything else, such as "inf"."""
    try:
        return value if -1e100 < (value := float(value)) < 1e100 else math.nan
    except (TypeError, ValueError, OverflowError):
        return math.nan


def points_of(rows: list[dict], key: str) -> Points:
    return [(row["step"], number(row[key])) for row in rows if key in row]


def finite(points: Points) -> Points:
    return [point for point in points if not math.isnan(point[1])]


def minimum_before_rise(points: Points) -> tuple[int, float] | None:
    """Returns the lowest point of a validation loss that has risen since; None if it has not. The
    loss of step 0, before training, does not count."""
    points = finite([point for point in points if point[0] > 0])
    lowest = min(points, key=lambda point: point[1], default=None)
    if lowest is None or points[-1][1] <= lowest[1] + max(RISE * lowest[1], RISE_NATS):
        return None
    return lowest


def is_falling(points: Points) -> bool:
    """Returns whether a validation loss was still falling at the end: of at least three validations
    after step 0, the last is lower than the one a tenth of the run before, by more than a rise."""
    points = finite([point for point in points if point[0] > 0])
    earlier = [loss for step, loss in points if step <= 0.9 * points[-1][0]]
    if len(points) < 3 or not earlier:
        return False
    return points[-1][1] < earlier[-1] - max(RISE * earlier[-1], RISE_NATS)


def charts(rows: list[dict], windows: str = "") -> list[dict]:
    """Returns the charts that have values, as texts and points: {"title", "unit", "sign",
    "from_zero", "lines"}.

    A line is {"name", "kind": training or validation, "thin", "points": [[step, value, text]]}; the
    value None is a gap, of a value that is NaN or inf. A training loss with many points is thin,
    and has a line "smoothed". windows: of a validation during the training, in words.
    """
    found = {key: points_of(rows, key) for key in KEYS}
    if len(found["train/loss"]) >= SMOOTH_FROM:
        found["smoothed"] = smooth(found["train/loss"])
    shown = []
    for chart in CHARTS:

        def point(step: int, value: float, chart: Chart = chart) -> list:
            drawn = None if math.isnan(value) else float(f"{value * chart.scale:.6g}")
            return [step, drawn, "" if drawn is None else chart.text(value)]

        lines = [
            {
                "name": name,
                "kind": "validation" if key.startswith("val/") else "training",
                "thin": key == "train/loss" and "smoothed" in found,
                "points": [point(*each) for each in thin(found[key])],
            }
            for key, name in chart.lines.items()
            if found.get(key)
        ]
        if not lines:
            continue
        has_windows = windows and len(lines) > 1 and found["val/loss"]
        unit = f"{chart.unit}; validation {windows}" if has_windows else chart.unit
        values = {"title": chart.title, "unit": unit, "sign": chart.sign, "lines": lines}
        shown.append(values | {"from_zero": chart.from_zero})
    return shown


def curves(rows: list[dict]) -> dict[str, Points]:
    """Returns the curves under the time line of the heads. rows: of metrics.jsonl."""
    found = {}
    for key, name in CURVES.items():
        points = points_of(rows, key)
        is_smoothed = key == "train/loss" and len(points) >= SMOOTH_FROM
        if known := thin(finite(smooth(points) if is_smoothed else points), MAX_POINTS):
            title = name + " (smoothed)" * is_smoothed
            found[title] = [(at, round(value, 4)) for at, value in known]
    return found


def smooth(points: Points) -> Points:
    """Returns a centred moving average, which has no lag. Windows are smaller at both ends.

    Gaps stay gaps, and the averages of other points ignore them.
    """
    known = [not math.isnan(value) for _, value in points]
    values = [value if is_known else 0 for (_, value), is_known in zip(points, known, strict=True)]
    sums, counts = [0, *itertools.accumulate(values)], [0, *itertools.accumulate(known)]
    smoothed = []
    for i, (step, _) in enumerate(points):
        half = min(i, len(points) // SMOOTH_FROM)
        start, end = i - half, min(i + half + 1, len(points))
        mean = (sums[end] - sums[start]) / max(1, counts[end] - counts[start])
        smoothed.append((step, mean if known[i] else math.nan))
    return smoothed


def thin(points: Points, limit: int = POINTS_PER_LINE) -> Points:
    """Returns about `limit` points: the lowest, the highest and the first gap of each interval, so
    that spikes stay visible."""
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
