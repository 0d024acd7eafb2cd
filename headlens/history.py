"""Statistics of every head at all snapshots of a run, statistics.jsonl, and the step at which the
model learns to copy.

attention/statistics.jsonl has one line for each snapshot:

    {"step": 40, "entropy": [[one number for each head] for each layer], "distance": ..., ...,
     "errors": {"first_token": [[one number for each head] for each layer], ...},
     "losses": [[one number for each position] for each prompt],
     "names": [[one index in heads.ALL_NAMES for each head] for each layer],
     "places": [[one index in heads.PLACES for each head] for each layer],
     "offsets": [[the best number of tokens back for each head] for each layer],
     "layers": [number of each layer in the model]}

Shapes: L layers with attention, H heads, T tokens of a prompt.
"""

import json
import math
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .prompts import Prompt
from .schema import COUNT, OPTIONAL, check, index, note
from .statistics import OFFSETS, STATISTICS

# The indices of a row are below these. heads.py, which imports this file, has the names ("", the
# statistics of targets, "positional", "uniform") and the places.
BELOW = {"names": 3 + sum(of.of == "targets" for of in STATISTICS.values()), "places": 3}
BELOW |= {"offsets": OFFSETS[-1] + 1}
MAX_FILE, MAX_LINE = 2**28, 2**22  # bytes that are read
MAX_LAYERS = 10_000  # of a model


def head_name(layer: int, head: int) -> str:
    """Returns what people call a head. layer: its number in the model."""
    return f"L{layer} H{head}"


@dataclass
class Row:
    """The statistics of every head at one step."""

    step: int
    # By statistic an fp32 array (L, H), on the text, or without one the mean over prompts. NaN:
    # undefined.
    values: dict[str, np.ndarray]
    # For each prompt the loss at each position in nats, fp32 (T - 1); [] if unknown.
    losses: list[np.ndarray] = field(default_factory=list)
    # Standard errors over windows of the text, as `values`; {} without a text.
    errors: dict[str, np.ndarray] = field(default_factory=dict)
    names: np.ndarray = field(init=False)  # int (L, H): indices in heads.ALL_NAMES; 0: no name
    places: np.ndarray = field(init=False)  # int (L, H): indices in heads.PLACES
    offsets: np.ndarray = field(init=False)  # int (L, H): the best number of tokens back, "offset"
    # The number of each layer in the model: in a hybrid, layers of other kinds are between them.
    layers: list[int] = field(init=False)

    def __post_init__(self):
        shape = next(iter(self.values.values())).shape
        self.layers = [*range(shape[0])]
        self.names, self.places, self.offsets = (np.zeros(shape, np.int64) for _ in range(3))

    def head_name(self, index: int) -> str:
        """Returns what people call a head. index: layer * H + head."""
        layer, head = divmod(index, self.names.shape[1])
        return head_name(self.layers[layer], head)


class History:
    """All rows of a run, including rows from before it was resumed.

    A resumed run repeats `step` (its first snapshot) and later steps, so their rows are removed.
    """

    def __init__(self, file: Path, step: int):
        self.file = file
        self.rows = [row for row in read_history(file) if row.step < step]
        self.pending = b""  # not written yet; may start in the middle of a line
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(file, "".join(_line(row) for row in self.rows).encode())

    def add(self, row: Row) -> None:
        """Writes the rows that an earlier call could not write, and then this row."""
        line = _line(row)
        # Others are not of this model.
        self.rows[:] = [of for of in self.rows if of.names.shape == row.names.shape]
        self.rows.append(row_of(json.loads(line)))  # rounded, as a resumed run reads it
        self.pending += line.encode()
        with open(self.file, "ab", buffering=0) as file:
            while self.pending:  # on a nearly full disk only a part is written
                self.pending = self.pending[file.write(self.pending) :]


def atomic_write(path: Path, content: bytes) -> None:
    """Writes a file atomically: to a unique temporary name, which is then renamed."""
    part = path.with_name(f"{path.name}.part-{secrets.token_hex(8)}")
    try:
        part.write_bytes(content)
        os.replace(part, path)
    except BaseException:  # including KeyboardInterrupt
        part.unlink(missing_ok=True)
        raise


def evenly_spaced(items: list, most: int) -> list:
    """Returns at most `most` items, evenly spaced, including the first and the last item."""
    if len(items) <= most:
        return items
    indices = np.linspace(0, len(items) - 1, max(most, 1)).round().astype(int)
    return [items[index] for index in indices]


def json_values(values: np.ndarray, decimals: int = 4) -> list:
    """Returns values for JSON: rounded, NaN and inf as None."""
    numbers = values.astype(np.float64).round(decimals).astype(object)
    numbers[~np.isfinite(values)] = None
    return numbers.tolist()


def row_values(row: Row) -> dict:
    """Returns a row for JSON: a line of statistics.jsonl."""
    values = {key: json_values(value) for key, value in row.values.items()}
    errors = {key: json_values(value) for key, value in row.errors.items()}
    losses = [json_values(of_prompt) for of_prompt in row.losses]
    found = {"step": row.step, **values, "errors": errors, "losses": losses, "layers": row.layers}
    return found | {key: getattr(row, key).tolist() for key in BELOW}


def row_of(values: dict) -> Row:
    """Returns the row of `row_values`; statistics that it lacks, as of an earlier version, are NaN.
    Raises an exception of any class for another value."""
    layers, heads = np.shape(values[next(iter(STATISTICS))])
    values = {key: [[None] * heads] * layers for key in STATISTICS} | values
    errors = {key: of for key, of in values["errors"].items() if key in STATISTICS}
    for of_heads in [*(values[key] for key in STATISTICS), *errors.values()]:
        check(OPTIONAL, of_heads, layers or 1, heads or 1)
    for key, below in BELOW.items():
        check(index(below), values[key], layers, heads)
    for losses in values["losses"]:
        check(OPTIONAL, losses, len(losses))
    check(COUNT, values["step"])
    numbers = values.get("layers") or [*range(layers)]  # earlier versions had no hybrids
    check(index(MAX_LAYERS), numbers, layers)
    if sorted({*numbers}) != numbers:
        raise ValueError("the layers are not in their order")
    found = {key: np.array(values[key], np.float32) for key in STATISTICS}
    losses = [np.array(of_prompt, np.float32) for of_prompt in values["losses"]]
    errors = {key: np.array(of_heads, np.float32) for key, of_heads in errors.items()}
    row = Row(values["step"], found, losses, errors)
    for key in BELOW:
        setattr(row, key, np.array(values[key], np.int64))
    row.layers = numbers
    return row


def read_history(file: Path) -> list[Row]:
    """Returns the rows of statistics.jsonl; [] without the file. Prints a line on stderr if lines
    are damaged, which are skipped; the last one may be incomplete."""
    if not file.is_file():  # opening a FIFO would wait for a writer
        return []
    rows, damaged = [], 0
    with open(file, "rb") as lines:
        while line := lines.readline(MAX_LINE):  # pieces of a longer line are not valid JSON
            if lines.tell() > MAX_FILE:
                note(f"{file}: only its first {len(rows):,} rows are used, because it is too large")
                break
            try:
                rows.append(row_of(json.loads(line)))
            except Exception:
                damaged += line.endswith(b"\n") or len(line) == MAX_LINE
    if damaged:
        note(f"{file}: skipped {damaged:,} damaged lines; the others are used")
    return rows


def _line(row: Row) -> str:
    return json.dumps(row_values(row)) + "\n"


def copying_step(prompts: Sequence[Prompt], history: Sequence[Row]) -> int | None:
    """Returns the step at which the model has learned to copy, or None: the first step with a low
    loss on the repeated sequence.

    In the second copy of [BOS] + R + R, each token can be predicted by copying. The loss there
    falls from about ln K, K being the number of tokens that R is drawn from, to almost 0 when
    induction heads form (Olsson et al. 2022, In-context Learning and Induction Heads: a phase
    change).
    """
    shape = [len(prompt.token_ids) - 1 for prompt in prompts]
    rows = [row for row in history if [len(losses) for losses in row.losses] == shape]
    for number, prompt in enumerate(prompts):
        if prompt.period:
            losses = [second_copy(row.losses[number], prompt.period).mean() for row in rows]
            first = copying_begins(losses, prompt.num_symbols)
            return None if first is None else rows[first].step
    return None


def copying_begins(losses: Sequence[float | np.ndarray], num_symbols: int) -> int | None:
    """Returns the index of the first snapshot after the drop, or None if there is no clear drop.

    losses: the mean loss on the second copy at each snapshot, in nats. num_symbols: K. The losses
    are fitted by two constants, one before and one after a snapshot, with the least squared error.
    The drop is clear if it is at least ln(K) / 4 and the second constant is below ln(K) / 2.
    """
    values = np.asarray(losses, np.float64)
    if len(values) < 2 or not np.isfinite(values).all():
        return None
    splits = range(1, len(values))
    errors = [values[:n].var() * n + values[n:].var() * (len(values) - n) for n in splits]
    first = 1 + int(np.argmin(errors))
    before, after = values[:first].mean(), values[first:].mean()
    is_clear = before - after >= math.log(num_symbols) / 4 and after < math.log(num_symbols) / 2
    return first if is_clear else None


def second_copy(losses: np.ndarray, period: int) -> np.ndarray:
    """Returns the losses of the second copy of a repeated sequence. losses: (T - 1,). Without its
    first token, which is not predictable."""
    return losses[period + 1 : 2 * period]
