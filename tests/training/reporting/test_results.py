"""training/results: what several runs came to, as a table and a picture."""

import io
import math

import pytest
from PIL import Image

from training import results


def row(settings, *values, curves=None):
    """A row of the table whose curves end in these values."""
    return {
        "settings": settings,
        "runs": [f"run{n}" for n in range(len(values))],
        "table": 0,
        "unfinished": [],
        "values": list(values),
        "mean": sum(values) / len(values),
        "curves": curves or [[(100, 5.0), (200, value)] for value in values],
        "tokens": 200,
    }


def colours_of(picture, skip=("#ffffff", results.GRID, results.INK)):
    """The colours that much of a picture is in, as #rrggbb."""
    with Image.open(io.BytesIO(picture)) as image:
        assert image.format == "PNG"
        found = image.convert("RGB").getcolors(2**24)
    named = {"#{:02x}{:02x}{:02x}".format(*colour): count for count, colour in found}
    return {name for name, count in named.items() if count > 40 and name not in skip}


def drawn(rows, names, monkeypatch):
    """The figure that draw() saves."""
    from matplotlib.figure import Figure

    figures, save = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *a, **o: (figures.append(figure), save(figure, *a, **o))
    )
    results.draw(rows, names, "val/loss")
    return figures[0]


def test_a_colour_for_each_setting_and_a_line_for_each_seed(monkeypatch):
    rows = [row({"optimizer.name": name}, 2.0 + n, 2.1 + n) for n, name in enumerate("abc")]
    (axis,) = drawn(rows, ["optimizer.name"], monkeypatch).axes
    colours = [line.get_color() for line in axis.get_lines()]
    assert colours == [colour for colour in results.KINDS[:3] for _ in range(2)]
    assert [list(line.get_ydata()) for line in axis.get_lines()][:2] == [[5.0, 2.0], [5.0, 2.1]]
    (legend,) = axis.figure.legends
    assert legend.get_title().get_text() == "optimizer"
    assert [t.get_text() for t in legend.get_texts()] == ["a:  2.0500", "b:  3.0500", "c:  4.0500"]
    assert set(results.KINDS[:3]) <= colours_of(results.draw(rows, ["optimizer.name"], "val/loss"))


def test_a_number_that_was_varied_has_a_panel_of_its_own(monkeypatch):
    names = ["optimizer.name", "optimizer.lr"]
    rows = [
        row({"optimizer.name": name, "optimizer.lr": lr}, 3 * lr, 4 * lr)
        for lr in (1.0, 0.01, 0.1)
        for name in ("adamw", "muon")
    ]
    curves, ends = drawn(rows, names, monkeypatch).axes
    assert ends.get_xscale() == "log"
    assert [tick.get_text() for tick in ends.get_xticklabels()] == ["0.01", "0.1", "1"]
    means = [line for line in ends.get_lines() if line.get_linestyle() != "None"]
    assert [list(line.get_xdata()) for line in means] == [[0.01, 0.1, 1.0]] * 2
    assert [line.get_label() for line in means] == ["mean, adamw", "mean, muon"]
    points = [list(line.get_ydata()) for line in ends.get_lines() if line not in means]
    assert points[0] == pytest.approx([0.03, 0.04])
    assert len(curves.get_lines()) == 12
    few = [row({"lr": lr}, 1.0) for lr in (1, 2, 3)]
    assert drawn(few, ["lr"], monkeypatch).axes[1].get_xscale() == "linear"


def test_what_went_wrong_is_a_cross_and_no_reason_to_see_nothing_of_the_rest(monkeypatch):
    rows = [
        row({"lr": 0.1}, 2.0),
        row({"lr": 0.3}, math.nan, curves=[[(100, 5.0), (200, math.nan)]]),
        row({"lr": 0.9}, 1e30),
    ]
    curves, ends = drawn(rows, ["lr"], monkeypatch).axes
    assert curves.get_ylim()[1] < 8
    crosses = [line for line in ends.get_lines() if line.get_marker() == "x"]
    assert [list(line.get_xdata()) for line in crosses] == [[0.3], [0.9]]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "rows",
    [
        [row({}, 2.0)],
        [row({}, math.nan, curves=[[(100, math.nan)]])],
        [row({"lr": 0.0}, 2.0), row({"lr": -1.0}, 2.0)],
        [row({"lr": 1e-3}, 2.0), row({"lr": None}, 2.0)],
        [row({"flag": True}, 2.0), row({"flag": False}, 3.0)],
        [row({"path": "x" * 500 + "$\\frac{1}$_"}, 2.0), row({"path": "_\x1b\n字"}, 2.0)],
        [row({"n": n}, float(n)) for n in range(60)],
        [row({"of": f"kind {n}"}, float(n)) for n in range(30)],
    ],
    ids=["one", "nan", "no log", "null", "flag", "long", "sixty numbers", "thirty kinds"],
)
def test_whatever_was_varied_can_be_drawn(rows, monkeypatch):
    figure = drawn(rows, list(rows[0]["settings"]), monkeypatch)
    (legend,) = figure.legends
    assert 1 <= len(legend.get_texts()) <= results.IN_LEGEND + 1
    # The axes have their room, however long the legend's words are.
    assert figure.axes[0].get_position().width > 0.3


def test_json_knows_no_infinity():
    kept = results.as_json({"a": [math.inf, -math.inf, math.nan, 1.5], "b": (2,)})
    assert b"Infinity" not in kept
    assert b"NaN" not in kept
    assert results.without_nan({"a": (math.inf, 1.5)}) == {"a": [None, 1.5]}


def test_whatever_stands_in_a_value_it_is_one_cell():
    table = results.table([row({"path": "a|b\nc\x1b[31m"}, 1.0)], ["path"], "val/loss")
    assert table.splitlines()[2].startswith("| a\\|b\\nc\\x1b[31m |")
