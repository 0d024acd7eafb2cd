"""The digits of numbers, one rule for the page, the report, images and printed tables.

    rounded(0.0031, 2)  ->  "<0.01"        formatted(12.34)         ->  "12.3"
    rounded(0.0031, 2, signed=True)  ->  "0"    formatted_loss(0.00481)  ->  "0.0048"

- A statistic, a weight or an accuracy has two decimals; from 10 on one, from 100 on none.
- A loss of the lens, or the change of a loss, has two decimals; below 0.1 four.
- A value that these decimals would round to 0 is "<0.01" ("<0.0001"), and a change is "0". Only an
  exact 0 is "0". So there is no "-0.00".
- The minus is U+2212, as wide as the plus.

The losses of a run in the console, in the report and in comparisons keep four decimals, because
runs are compared by them. page/text.js has the same rule, and tests compare the two.
"""

import math
from decimal import ROUND_HALF_UP, Context, Decimal

# JavaScript's toFixed rounds a tie away from zero, Python's format to an even digit.
EXACT = Context(prec=400, rounding=ROUND_HALF_UP)  # digits, also of the largest float
MINUS = "\u2212"
UNKNOWN = "\u2013"  # of a value that is undefined


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


def formatted(value: float | None, signed: bool = False) -> str:
    """Returns a value of a statistic, a weight or an accuracy; a dash if it is undefined."""
    if value is None:
        return UNKNOWN
    size = abs(value)
    return rounded(value, 0 if size >= 100 else 1 if size >= 10 else 2, signed)


def loss_digits(value: float) -> int:
    """Returns the number of decimals of a loss or of its change."""
    return 4 if abs(value) < 0.1 else 2


def formatted_loss(value: float | None, signed: bool = False) -> str:
    """Returns a loss, or with `signed` the change of a loss; a dash if it is undefined."""
    if value is None:
        return UNKNOWN
    return rounded(value, loss_digits(value), signed)


def formatted_change(change: float, error: float | None) -> str:
    """Returns the change of a loss with its standard error, if it is known: "+1.33 ± 0.02"."""
    text = formatted_loss(change, signed=True)
    return text if error is None else f"{text} ± {rounded(error, loss_digits(change))}"


def formatted_mean(value: float, error: float | None) -> str:
    """Returns a mean on a text with its standard error: "0.62 ± 0.03", "0.617 ± 0.004"."""
    if error is None:
        return formatted(value)
    digits = 3 if error < 0.01 else 2
    return f"{rounded(value, digits)} ± {rounded(error, digits)}"


def formatted_weight(weight: float) -> str:
    """Returns the weight of a byte of a heatmap. That of the byte 0 is not 0, but small."""
    interval = max(2 * weight**0.5 / 255, 1 / 510**2)  # of weights with the same byte
    return rounded(weight or 1e-9, math.floor(-math.log10(interval)))
