"""The digits of numbers, one rule for the page, the report, images and printed tables.

    rounded(0.0031, 2)  ->  "<0.01"        formatted(12.34)         ->  "12.3"
    rounded(0.0031, 2, signed=True)  ->  "0"    formatted_loss(0.00481)  ->  "0.0048"

- The number of decimals is in DIGITS, by kind of number and size. The page applies the same table.
- A value that these decimals would round to 0 is "<0.01" ("<0.0001"), and a change is "0". Only an
  exact 0 is "0". So there is no "-0.00".
- The minus is U+2212, as wide as the plus.

The losses of a run in the console, in the report and in comparisons keep four decimals, because
runs are compared by them.
"""

import math
from decimal import ROUND_HALF_UP, Context, Decimal

# JavaScript's toFixed rounds a tie away from zero, Python's format to an even digit.
EXACT = Context(prec=400, rounding=ROUND_HALF_UP)  # digits, also of the largest float
MINUS = "\u2212"
UNKNOWN = "\u2013"  # of a value that is undefined

# {kind of number: [(from this size on, decimals)]}, the largest first.
DIGITS: dict[str, list[tuple[float, int]]] = {
    "value": [(100, 0), (10, 1), (0, 2)],  # a statistic or an accuracy
    "loss": [(0.1, 2), (0, 4)],  # also a change of a loss
    "error": [(0.01, 2), (0, 3)],  # the standard error of a mean, and this mean
    "chance": [(0.1, 2), (0.01, 3), (0, 4)],  # the probability of a token
    "percent": [(1, 0), (0, 1)],  # a probability or a weight in percent
    # A weight w of a heatmap is one of an interval of weights with the same byte, round(255
    # sqrt(w)), of length 2 sqrt(w) / 255. The unit of the last digit is not smaller than this.
    "weight": [((127.5 * 10**-n) ** 2, n - 1) for n in (3, 4, 5)] + [(0, 5)],
}


def decimals(value: float, kind: str) -> int:
    """Returns the number of decimals of a value. kind: a key of DIGITS."""
    return next((count for size, count in DIGITS[kind] if abs(value) >= size), 0)


def rounded(value: float, digits: int, signed: bool = False) -> str:
    """Returns a value with this number of decimals; a dash if it is NaN or inf. signed: the value
    is a change."""
    if not math.isfinite(value):
        return UNKNOWN
    unit = Decimal(1).scaleb(-digits)
    size = Decimal(abs(float(value))).quantize(unit, context=EXACT)
    if size:
        return f"{MINUS if value < 0 else '+' if signed else ''}{size:f}"
    if signed or not value:
        return "0"
    return f">{MINUS}{unit:f}" if value < 0 else f"<{unit:f}"


def formatted(value: float | None, signed: bool = False, kind: str = "value") -> str:
    """Returns a number as text; a dash if it is undefined. kind: a key of DIGITS."""
    return UNKNOWN if value is None else rounded(value, decimals(value, kind), signed)


def formatted_loss(value: float | None, signed: bool = False) -> str:
    """Returns a loss, or with `signed` the change of a loss; a dash if it is undefined."""
    return formatted(value, signed, "loss")


def formatted_change(change: float, error: float | None) -> str:
    """Returns the change of a loss with its standard error, if it is known: "+1.33 ± 0.02"."""
    text = formatted_loss(change, signed=True)
    return text if error is None else f"{text} ± {rounded(error, decimals(change, 'loss'))}"


def formatted_mean(value: float, error: float | None) -> str:
    """Returns a mean on a text with its standard error: "0.62 ± 0.03", "0.617 ± 0.004"."""
    if error is None:
        return formatted(value)
    digits = decimals(error, "error")
    return f"{rounded(value, digits)} ± {rounded(error, digits)}"


def formatted_weight(weight: float) -> str:
    """Returns the weight of a byte of a heatmap. That of the byte 0 is not 0, but small."""
    return formatted(weight or 1e-9, kind="weight")
