"""The digits of numbers: the rule, and the table that the page applies."""

import json
import math
from pathlib import Path

import pytest

import headlens
from headlens import formatted, rounded
from headlens.assemble import join_modules
from headlens.rounding import (
    DIGITS,
    formatted_change,
    formatted_loss,
    formatted_mean,
    formatted_weight,
)

TEXT = Path(headlens.__file__).parent / "page" / "text.js"
SIZES = [0, 1e-12, 0.0000499, 0.00005, 0.0001, 0.0048, 0.00499, 0.005, 0.00501, 0.0999, 0.1, 0.125]
SIZES += [0.375, 0.995, 1, 1.005, 2.675, 9.994, 9.996, 10, 12.25, 12.35, 99.94, 99.96, 100, 250.5]
SIZES += [math.exp(0.1 * n - 12) for n in range(190)]
VALUES = [sign * size for size in SIZES for sign in (1, -1)]


@pytest.mark.parametrize(
    ("value", "unsigned", "signed", "loss"),
    [
        (0.42, "0.42", "+0.42", "0.42"),
        (0.15, "0.15", "+0.15", "0.15"),
        (12.34, "12.3", "+12.3", "12.34"),
        (250.5, "251", "+251", "250.50"),
        (-1.5, "−1.50", "−1.50", "−1.50"),
        (0.0048, "<0.01", "0", "0.0048"),
        (-0.0048, ">−0.01", "0", "−0.0048"),
        (0.00001, "<0.01", "0", "<0.0001"),
        (-0.00001, ">−0.01", "0", ">−0.0001"),
        (0.0, "0", "0", "0"),
        (-0.0, "0", "0", "0"),
        (math.nan, "–", "–", "–"),
        (math.inf, "–", "–", "–"),
        (None, "–", "–", "–"),
    ],
)
def test_rule(value, unsigned, signed, loss):
    assert formatted(value) == unsigned
    assert formatted(value, signed=True) == signed
    assert formatted_loss(value) == loss


def test_change_and_its_error_have_the_same_decimals():
    assert formatted_change(1.3333, 0.0222) == "+1.33 ± 0.02"
    assert formatted_change(-0.0123, 0.00456) == "−0.0123 ± 0.0046"
    assert formatted_change(1.3333, 0.001) == "+1.33 ± <0.01"
    assert formatted_change(-0.00001, 0.0004) == "0 ± 0.0004"
    assert formatted_change(0.5, None) == "+0.50"


def test_values_of_a_diverged_run():
    for value in (1e25, -1e100, 1.7e308):
        assert float(rounded(value, 4).replace("−", "-")) == value
    assert formatted_change(0.5, math.inf) == formatted_change(0.5, math.nan) == "+0.50 ± –"


def test_no_rounded_value_is_a_zero_with_decimals():
    for value in VALUES:
        for text in (formatted(value), formatted(value, True), formatted_loss(value, True)):
            assert float(text.strip("<>").replace("−", "-")) != 0 or text == "0", (value, text)


def test_a_weight_has_only_the_digits_of_its_byte():
    """As many as the interval of weights with the same byte allows."""
    for code in range(256):
        text = formatted_weight((code / 255) ** 2)
        unit = 10.0 ** -len(text.split(".")[1])
        interval = ((code + 0.5) ** 2 - max(code - 0.5, 0) ** 2) / 255**2
        assert unit / 10 < interval / 1.0001 <= unit, text
        assert text.startswith("<") == ((code / 255) ** 2 < unit / 2)


def test_a_mean_and_its_error_have_the_same_decimals():
    assert formatted_mean(0.6174, 0.0312) == "0.62 ± 0.03"
    assert formatted_mean(0.6174, 0.0041) == "0.617 ± 0.004"
    assert formatted_mean(0.6174, None) == "0.62"


def test_the_page_applies_the_table(opened, tmp_path):
    page = tmp_path / "page.html"
    script = join_modules(TEXT).replace("__DIGITS__", json.dumps(DIGITS))
    page.write_text(f"<!doctype html><meta charset='utf-8'><script>{script}</script>")
    values = [*VALUES, math.inf, None]
    found = opened(page).evaluate(
        """([values, kinds]) => values.map((value) => kinds.map((kind) =>
          [format(value, false, kind), format(value, true, kind)]))""",
        [values, [*DIGITS]],
    )
    for value, texts in zip(values, found, strict=True):
        wanted = [[formatted(value, signed, kind) for signed in (False, True)] for kind in DIGITS]
        assert texts == wanted, value
