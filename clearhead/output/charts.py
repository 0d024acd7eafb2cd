"""Data for the charts of report.html and of attention pages, from the rows of metrics.jsonl.

    json.dumps(chart_data(rows))

report_page/main.js draws the charts.
"""

import itertools
import math

KEYS = (
    "train/loss",
    "val/loss",
    "val/bits_per_byte",
    "val/accuracy",
    "train/learning_rate",
    "train/tokens_per_second",
    "train/grad_norm",
)
CURVES = {  # those on an attention page
    "train/loss": "training loss",
    "val/loss": "validation loss",
    "val/accuracy": "validation accuracy",
}
MAX_POINTS = 300  # of a curve on an attention page
POINTS_PER_LINE = 1000  # a screen cannot show more
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


def chart_data(rows: list[dict]) -> dict:
    """Returns {"steps": [first, last], "lines": {metric: [(step, value), ...]}}; None is a gap. A
    training loss with many points also has a line "smoothed"."""
    lines = {key: points_of(rows, key) for key in KEYS}
    if len(lines["train/loss"]) >= SMOOTH_FROM:
        lines["smoothed"] = smooth(lines["train/loss"])
    return {
        "steps": [row["step"] for row in (rows[:1] + rows[-1:])],
        "lines": {
            key: [(step, None if math.isnan(v) else float(f"{v:.6g}")) for step, v in thin(points)]
            for key, points in lines.items()
            if points
        },
    }


def curves(rows: list[dict]) -> dict[str, Points]:
    """Returns the curves that the attention page shows. rows: of metrics.jsonl."""
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
