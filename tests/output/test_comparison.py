"""reporting/comparison.py, comparison_table.py and comparison_plot.py: several runs as a table and
a plot."""

import json
import math
import statistics

import pytest
from matplotlib.figure import Figure
from scipy import stats

from clearhead.files import as_json
from clearhead.output import comparison
from clearhead.output.comparison_plot import COLOURS, plot
from clearhead.output.comparison_table import table


def row(settings, *values, first=5.0, text="data.path=a.txt"):
    """Returns a row of the table. Its curves start at `first` and end at `values`."""
    return comparison.ComparisonRow(
        text,
        settings,
        model="",
        runs=[f"run{n}" for n in range(len(values))],
        seeds=[*range(len(values))],
        unfinished=[],
        tokens=200,
        curves=[[(100, first), (200, value)] for value in values],
        values=list(values),
        mean=sum(values) / len(values),
        tokens_to_target=[],
    )


@pytest.fixture
def drawn(monkeypatch):
    """drawn(rows) -> the matplotlib figure that plot() saves."""
    figures, save = [], Figure.savefig

    def savefig(figure, *arguments, **options):
        figures.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)

    def draw(rows):
        assert plot(rows, "val/loss").startswith(b"\x89PNG")
        return figures.pop()

    return draw


def test_a_colour_for_each_setting_and_a_line_for_each_seed(drawn):
    rows = [row({"optimizer.name": name}, 2.0 + n, 2.1 + n) for n, name in enumerate("abc")]
    figure = drawn(rows)
    lines = figure.axes[0].get_lines()
    colours = [line.get_color() for line in lines]
    assert colours[0::2] == colours[1::2]
    assert len(set(colours)) == 3
    assert [list(line.get_ydata()) for line in lines][:2] == [[5.0, 2.0], [5.0, 2.1]]
    legend = figure.axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == [
        "2.0500 run0 + 1 run: optimizer.name=a",
        "3.0500 run0 + 1 run: optimizer.name=b",
        "4.0500 run0 + 1 run: optimizer.name=c",
    ]


def test_a_chart_for_each_text(drawn):
    figure = drawn([row({}, 2.0, text=text) for text in ("a.txt", "b.txt", "b.txt")])
    assert [axis.get_title(loc="left") for axis in figure.axes] == ["a.txt", "b.txt"]
    assert [len(axis.get_lines()) for axis in figure.axes] == [1, 2]


def test_a_diverged_run_does_not_set_the_scale(drawn):
    ends = {0.1: 2.0, 0.3: math.nan, 0.9: 1e30}
    for axis in drawn([row({"lr": lr}, end) for lr, end in ends.items()]).axes:
        assert axis.get_ylim()[1] < 8


def test_the_start_does_not_set_the_scale(drawn):
    """Step 0 is drawn; the first value after it determines the scale."""
    rows = [row({}, 2.0, first=3.0)]
    rows[0].curves[0].insert(0, (0, 11.0))
    (axis,) = drawn(rows).axes
    assert axis.get_lines()[0].get_ydata()[0] == 11.0
    assert axis.get_ylim()[1] == 4.5


def test_a_metric_that_rises_is_drawn_completely(drawn):
    rows = [row({"lr": n}, end, first=0.02) for n, end in enumerate((0.01, 0.8, 0.9))]
    (axis,) = drawn(rows).axes
    assert axis.get_ylim()[1] > 0.9


@pytest.mark.filterwarnings("error")
def test_any_settings_can_be_drawn(drawn):
    for rows in (
        [row({}, math.nan, first=math.nan)],
        [row({"lr": 0.0}, 2.0), row({"lr": -1.0}, 2.0)],
        [row({"path": "x" * 500 + "$\\frac{1}$_"}, 2.0), row({"path": "_\x1b\n字"}, 2.0)],
        [row({"of": f"kind {n}"}, float(n)) for n in range(15)],
    ):
        figure = drawn(rows)
        legend = figure.axes[0].get_legend()
        colours = {line.get_color() for line in figure.axes[0].get_lines()}
        assert len(colours) == min(len(rows), COLOURS + 1), rows
        assert 1 <= len(legend.get_texts()) <= COLOURS, rows
        assert figure.axes[0].get_position().width > 0.3, rows  # whatever the legend's width


def test_values_are_valid_json_and_one_cell_of_the_table():
    value = {"a": [math.inf, -math.inf, math.nan, 1.5], "b": (2,)}
    assert json.loads(as_json(value)) == {"a": [None, None, None, 1.5], "b": [2]}
    rows = [row({"path": path}, 1.0) for path in ("a|b\nc\x1b[31m", "b")]
    assert table(rows, "val/loss").splitlines()[2].startswith("| run0 | a\\|b\\nc\\x1b[31m |")


def test_rows_are_compared_by_paired_seeds():
    """Differences 0.1, 0.2, 0.3: mean 0.2, standard error 0.1 / sqrt(3)."""
    best, other = row({"lr": 1}, 2.0, 1.0, 3.0), row({"lr": 2}, 3.3, 2.1, 1.2)
    other.seeds = [2, 0, 1]
    found = comparison.difference(other, best, of_text=False)
    assert (found.mean, found.pairs) == (pytest.approx(0.2), 3)
    assert found.standard_error == pytest.approx(0.1 / math.sqrt(3))
    assert found.p == pytest.approx(0.0742, abs=1e-4)  # t = 2 sqrt(3) with 2 degrees of freedom


@pytest.mark.parametrize(
    ("seeds", "values"),
    [([0, 1, 7], [1.0, 2.0, 3.0]), ([0, 1, 1], [1.0, 2.0, 3.0]), ([0, 1, 2], [1.0, 2.0, math.nan])],
)
def test_rows_without_three_pairs_of_finite_values_are_not_compared(seeds, values):
    other = row({"lr": 2}, *values)
    other.seeds = seeds
    assert comparison.difference(other, row({"lr": 1}, 1.0, 2.0, 3.5), of_text=False) is None


def test_the_error_of_a_difference_includes_that_of_the_windows():
    """The runs are validated on the same parts of the text. Differences 0.1, 0.2, 0.3 of the seeds;
    on the parts, on average over the seeds, 0, 0.1, 0.2, 0.5."""
    best, other = row({"lr": 1}, 2.0, 1.0, 3.0), row({"lr": 2}, 2.1, 1.2, 3.3)
    best.parts = [[1.0, 2.0, 5.0, 0.0], [1.0, 1.0, 1.0, 1.0], [3.0, 3.0, 3.0, 3.0]]
    of_parts = [[-0.1, 0.0, 0.1, 0.4], [0.0, 0.1, 0.2, 0.5], [0.1, 0.2, 0.3, 0.6]]
    other.parts = [
        [a + b for a, b in zip(*of_run, strict=True)]
        for of_run in zip(best.parts, of_parts, strict=True)
    ]
    found = comparison.difference(other, best, of_text=True)
    of_seeds, of_windows = 0.1**2 / 3, statistics.variance([0, 0.1, 0.2, 0.5]) / 4
    error = math.sqrt(of_seeds + of_windows)
    assert (found.mean, found.standard_error) == (pytest.approx(0.2), pytest.approx(error))
    freedom = error**4 / (of_seeds**2 / 2 + of_windows**2 / 3)  # Welch and Satterthwaite
    assert found.p == pytest.approx(2 * stats.t.sf(found.mean / error, freedom))
    other.parts[1] = []  # this run has not ended
    assert comparison.difference(other, best, of_text=True) is None
