"""python -m scripts.attention_ladder: its output, compared with published values; its heatmaps.

Steps 1 to 5 and the first output of step 8 use the inputs and seeds of S. Raschka, Build a Large
Language Model (From Scratch), chapter 3, which prints the values below. The row with the wrong
scale is printed by the tutorial "Writing GPT2 from Scratch - Attention", section "Weight split
code".
"""

import itertools
import re

import numpy as np
import pytest
import torch

from scripts.attention_ladder import SHADES, WORDS, main


@pytest.fixture
def steps(in_process, tmp_path):
    """The printed text of each step, by its number; 0: before step 1."""
    with torch.random.fork_rng():
        code, out, err = in_process(main, tmp_path)
    assert (code, err) == (0, "")
    assert not any(tmp_path.iterdir())
    pieces = re.split(r"^Step (\d+): ", out, flags=re.MULTILINE)
    return dict(zip([0, *map(int, pieces[1::2])], pieces[0::2], strict=True))


def numbers(text, name):
    """The printed numbers of each row of the table `name (shape)`, without the row's label."""
    found = re.search(rf"^{re.escape(name)} \([\d, ]+\)\n(.+?)\n\n", text, re.MULTILINE | re.DOTALL)
    assert found is not None, name
    rows = [line.split() for line in found[1].splitlines()]
    return [row[1:] for row in rows if len(row) > 1 and re.match(r"-?[\di]", row[1])]


def published(text):
    return [row.split() for row in text.split("/")]


SCORES = published("0.9544 1.4950 1.4754 0.8434 0.7070 1.0865")
WEIGHTS = published("0.1385 0.2379 0.2333 0.1240 0.1082 0.1581")
CONTEXT = published(
    "0.4421 0.5931 0.5790 / 0.4419 0.6515 0.5683 / 0.4431 0.6496 0.5671 /"
    "0.4304 0.6298 0.5510 / 0.4671 0.5910 0.5266 / 0.4177 0.6503 0.5645"
)
TRAINABLE_SCORES = published("1.2705 1.8524 1.8111 1.0795 0.5577 1.5440")
TRAINABLE_WEIGHTS = published("0.1500 0.2264 0.2199 0.1311 0.0906 0.1820")
OUTPUT = published(
    "0.3190 0.4858 / 0.2943 0.3897 / 0.2856 0.3593 /0.2693 0.3873 / 0.2639 0.3928 / 0.2575 0.4028"
)
BY_D_OUT = published("-0.2962 -0.2681 0.1179 0.1136 0.0953 -0.4015")
BY_HEAD_DIM = published("-0.2804 -0.2545 0.1131 0.1270 0.0898 -0.4088")


def test_published_figures(steps):
    assert list(steps) == list(range(10))
    assert numbers(steps[1], "attn_scores") == SCORES
    assert numbers(steps[2], "attn_weights") == WEIGHTS
    assert numbers(steps[2], "context_vec") == [CONTEXT[1]]
    assert numbers(steps[3], "attn_weights")[1] == WEIGHTS[0]
    assert numbers(steps[3], "context_vec") == CONTEXT
    assert numbers(steps[4], "queries")[1] == ["0.4306", "1.4551"]
    before = numbers(steps[4], "attn_scores, before scaling")[1]
    after = numbers(steps[4], "attn_scores, divided by sqrt(2)")[1]
    assert before == TRAINABLE_SCORES[0]
    assert [float(b) / 2**0.5 for b in before] == pytest.approx([*map(float, after)], abs=1e-4)
    assert numbers(steps[4], "attn_weights")[1] == TRAINABLE_WEIGHTS[0]
    assert numbers(steps[8], "output") == OUTPUT + OUTPUT
    assert numbers(steps[8], "divided by sqrt(d_out)") == BY_D_OUT
    assert numbers(steps[8], "divided by sqrt(head_dim)") == BY_HEAD_DIM


def test_mask_dropout_and_heads(steps):
    attn_weights = numbers(steps[5], "attn_weights")
    for t, row in enumerate(attn_weights):
        assert [number == "0.0000" for number in row] == [s > t for s in range(6)]
        assert sum(map(float, row)) == pytest.approx(1, abs=5e-4)

    after = list(itertools.chain(*numbers(steps[6], "attn_weights")))
    for old, new in zip(itertools.chain(*attn_weights), after, strict=True):
        assert new == "0.0000" or float(new) == pytest.approx(2 * float(old), abs=2e-4)
    assert 15 < after.count("0.0000") < 36  # 15 are masked; of the other 21, some are dropped

    from_loop = numbers(steps[7], "context_vec, from the loop")
    assert from_loop == numbers(steps[7], "context_vec, from one matrix")


def test_shapes_at_the_split_into_heads(steps):
    found = re.findall(r"^    .+?\(([\d, ]+)\) +\(([THDS, *]+)\)", steps[7], re.MULTILINE)
    assert [name for _, name in found[:3]] == ["T, H * D", "T, H, D", "H, T, D"]
    assert [name for _, name in found[-3:]] == ["H, T, D", "T, H, D", "T, H * D"]
    for shape, name in found:
        assert eval(shape) == eval(name, {"T": 6, "S": 6, "H": 2, "D": 2}), name


def test_heatmaps_of_trained_heads(steps):
    """In both heads the weight is on the token before."""
    after = steps[9].split("\nafter training\n")[1]
    rows = [next(line for line in after.splitlines() if line.startswith(f"{w:<6}")) for w in WORDS]
    levels = np.zeros((2, 6, 6))
    for t, row in enumerate(rows):
        for head, start in enumerate((6, 44)):
            cells = row[start : start + 36].rstrip()
            assert len(cells) == 6 * (t + 1)
            levels[head, t, : t + 1] = [SHADES.index(cell) / 8 for cell in cells[::6]]
    assert (levels[:, range(1, 6), range(5)] >= 0.75).all()
    assert (levels[:, 1:].argmax(-1) == range(5)).all()
