"""How the statistics of every head went, step after step: on disk as they come, as a table at last.

attention/statistics.jsonl holds one line for each look:

    {"step": 40, "entropy": [[one number a head] for each layer], "distance": ..., ...}

Shapes: L layers, H heads.
"""

import contextlib
import csv
import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .statistics import STATISTICS

KINDS = ("previous_token", "induction", "duplicate_token", "first_token")  # that heads are called
LONGEST_LINE = 2**22  # bytes; 2,000 heads have some 200,000
COLUMNS = ("statistic", "rank", "layer", "head", "value", "at_start", "halfway_step")


@dataclass
class Row:
    """The statistics of every head at one step."""

    step: int
    values: dict[str, np.ndarray]  # for each statistic fp32 (L, H); nan where it is not defined


class History:
    """All rows of a run, those of its earlier parts included.

    A run that goes on from a checkpoint may repeat steps: what stands in the file from `step` on
    belongs to an attempt that was cut off, and is dropped.
    """

    def __init__(self, file: Path, step: int):
        self.file = file
        self.rows = [row for row in _read(file) if row.step < step]
        file.parent.mkdir(parents=True, exist_ok=True)
        whole = file.with_suffix(".tmp")
        whole.unlink(missing_ok=True)  # a link would be followed
        whole.write_text("".join(_line(row) for row in self.rows), encoding="utf-8")
        os.replace(whole, file)

    def add(self, row: Row) -> None:
        line = _line(row)
        self.rows.append(_parsed(line))  # as a run that goes on will read it
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(line)

    def thinned(self, most: int) -> list[Row]:
        """At most so many rows, evenly spread, the first and the last among them."""
        return evenly_spread(self.rows, most)

    def table(self) -> list[tuple]:
        """Every head ranked by each statistic, highest first; see COLUMNS.

        halfway_step is the first look at which the head had gone half of the way from its value at
        the start to its last: for a statistic that begins near zero, half of its final value.
        """
        found = []
        for key in STATISTICS:
            course = np.stack([row.values[key] for row in self.rows])  # (looks, L, H)
            start, last = course[0], course[-1]
            half = (start + last) / 2
            arrived = np.where(last >= start, course >= half, course <= half).argmax(0)  # (L, H)
            order = np.argsort(-last, axis=None, kind="stable")
            order = [index for index in order if not np.isnan(last.flat[index])]
            for rank, index in enumerate(order, start=1):
                layer, head = np.unravel_index(index, last.shape)
                value, at_start = (round(float(x[layer, head]), 4) for x in (last, start))
                step = self.rows[arrived[layer, head]].step
                found.append((key, rank, int(layer), int(head), value, at_start, step))
        return found

    def write_table(self, path: Path) -> list[tuple]:
        """The table as CSV; returns it."""
        rows = self.table()
        path.unlink(missing_ok=True)  # a link would be followed
        with open(path, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([COLUMNS, *rows])
        return rows


def strongest(row: Row, most: int = 5) -> dict[str, list[tuple[int, int, float]]]:
    """For each kind of head the strongest: {key: [(layer, head, value), ...]}, highest first."""
    found = {}
    for key in KINDS:
        values = row.values[key]
        if not np.isnan(values).any():
            places = [np.unravel_index(i, values.shape) for i in np.argsort(-values, axis=None)]
            found[key] = [
                (int(layer), int(head), float(values[layer, head])) for layer, head in places[:most]
            ]
    return found


def evenly_spread(items: list, most: int) -> list:
    """At most so many of the items, evenly spread, the first and the last among them."""
    if len(items) <= most:
        return items
    places = np.linspace(0, len(items) - 1, max(most, 1)).round().astype(int)
    return [items[place] for place in places]


def plain(values: np.ndarray) -> list:
    """Numbers of four decimals for JSON, which has no nan and no infinity: null."""
    numbers = values.astype(np.float64).round(4).astype(object)
    numbers[~np.isfinite(values)] = None
    return numbers.tolist()


def _line(row: Row) -> str:
    values = {key: plain(value) for key, value in row.values.items()}
    return json.dumps({"step": row.step, **values}) + "\n"


def _parsed(line: str | bytes) -> Row:
    values = json.loads(line)
    return Row(values["step"], {key: np.array(values[key], np.float32) for key in STATISTICS})


def _read(file: Path) -> list[Row]:
    if not file.is_file():  # a FIFO would wait for a writer
        return []
    rows = []
    with open(file, "rb") as lines:
        while line := lines.readline(LONGEST_LINE):
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                rows.append(_parsed(line))  # else it is damaged
    return rows
