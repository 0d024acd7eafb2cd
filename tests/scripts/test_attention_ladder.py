"""python -m scripts.attention_ladder: its output, compared with published values; its mistakes.

Steps 3 to 12 use the inputs and seeds of S. Raschka, Build a Large Language Model (From Scratch),
chapter 3, which prints the values below. The row with the wrong scale is printed by the tutorial
"Writing GPT2 from Scratch - Attention", section "Weight split code".
"""

import importlib
import itertools
import re
from pathlib import Path

import pytest
import torch

from attention import KERNELS
from data import get_tokenizer
from scripts.attention_ladder import main
from scripts.ladder.mistakes import MISTAKES, wrapper_scale
from scripts.ladder.vectors import INPUTS, TEXT


@pytest.fixture
def steps(in_process, tmp_path):
    """The printed text of each step, by its number; 0: before step 1."""
    with torch.random.fork_rng():
        code, out, err = in_process(main, tmp_path)
    assert (code, err) == (0, "")
    assert not any(tmp_path.iterdir())
    assert max(map(len, out.splitlines())) <= 100
    pieces = re.split(r"^Step (\d+): ", out, flags=re.MULTILINE)
    return dict(zip([0, *map(int, pieces[1::2])], pieces[0::2], strict=True))


def numbers(text, name):
    """The printed numbers of each row of the table `name (shape)`, without the row's label."""
    found = re.search(rf"^{re.escape(name)} \([\d, ]+\)\n(.+?)\n\n", text, re.MULTILINE | re.DOTALL)
    assert found is not None, name
    rows = [line.split() for line in found[1].splitlines()]
    return [row[1:] for row in rows if len(row) > 1 and re.match(r"-?[\di]", row[1])]


def lower(rows):
    """The numbers on the diagonal and below."""
    return [row[: t + 1] for t, row in enumerate(rows)]


def published(text):
    return [row.split() for row in text.split("/")]


SCORES = published("0.9544 1.4950 1.4754 0.8434 0.7070 1.0865")
WEIGHTS = published("0.1385 0.2379 0.2333 0.1240 0.1082 0.1581")
CONTEXT = published(
    "0.4421 0.5931 0.5790 / 0.4419 0.6515 0.5683 / 0.4431 0.6496 0.5671 /"
    "0.4304 0.6298 0.5510 / 0.4671 0.5910 0.5266 / 0.4177 0.6503 0.5645"
)
CAUSAL_SCORES = published(
    "0.2899 / 0.4656 0.1723 / 0.4594 0.1703 0.1731 / 0.2642 0.1024 0.1036 0.0186 /"
    "0.2183 0.0874 0.0882 0.0177 0.0786 / 0.3408 0.1270 0.1290 0.0198 0.1290 0.0078"
)
WITHOUT_MASK = published(
    "0.1921 0.1646 0.1652 0.1550 0.1721 0.1510 / 0.2041 0.1659 0.1662 0.1496 0.1665 0.1477 /"
    "0.2036 0.1659 0.1662 0.1498 0.1664 0.1480 / 0.1869 0.1667 0.1668 0.1571 0.1661 0.1564 /"
    "0.1830 0.1669 0.1670 0.1588 0.1658 0.1585 / 0.1935 0.1663 0.1666 0.1542 0.1666 0.1529"
)
CAUSAL_WEIGHTS = published(
    "1.0000 / 0.5517 0.4483 / 0.3800 0.3097 0.3103 / 0.2758 0.2460 0.2462 0.2319 /"
    "0.2175 0.1983 0.1984 0.1888 0.1971 / 0.1935 0.1663 0.1666 0.1542 0.1666 0.1529"
)
WRAPPER = published(
    "-0.4519 0.2216 0.4772 0.1063 / -0.5874 0.0058 0.5891 0.3257 / -0.6300 -0.0632 0.6202 0.3860 /"
    "-0.5675 -0.0843 0.5478 0.3589 / -0.5526 -0.0981 0.5321 0.3428 / -0.5299 -0.1081 0.5077 0.3493"
)
OUTPUT = published(
    "0.3190 0.4858 / 0.2943 0.3897 / 0.2856 0.3593 / 0.2693 0.3873 / 0.2639 0.3928 / 0.2575 0.4028"
)
BY_D_OUT = published("-0.2962 -0.2681 0.1179 0.1136 0.0953 -0.4015")
BY_HEAD_DIM = published("-0.2804 -0.2545 0.1131 0.1270 0.0898 -0.4088")


def test_tokens_windows_and_vectors(steps):
    tokenizer = get_tokenizer("gpt2")
    ids = tokenizer.encode(TEXT)
    pieces = [tokenizer.decode([i]) for i in ids]
    found = re.findall(r"^ +(\d+)  '(.+)'$", steps[1], re.MULTILINE)
    assert found == [(str(i), piece) for i, piece in zip(ids, pieces, strict=True)]

    rows = re.findall(r"^(?:input|target) +('.+')$", steps[2], re.MULTILINE)
    shown = [re.findall(r"'(.+?)'", row) for row in rows]
    assert shown == [pieces[0:6], pieces[1:7], pieces[6:12], pieces[7:13]]
    batch = [int(i) for i in re.findall(r"\d+", steps[2].split("tensor(")[1])]
    assert batch == ids[:12]

    tokens, positions, both = (
        [[float(number) for number in row] for row in numbers(steps[3], name)]
        for name in ("token_emb(input_ids[0])", "pos_emb(positions)", "x[0], the sum")
    )
    assert both == INPUTS
    for token, position, row in zip(tokens, positions, INPUTS, strict=True):
        assert [t + p for t, p in zip(token, position, strict=True)] == pytest.approx(row, abs=2e-4)


def test_published_figures(steps):
    assert list(steps) == list(range(16))
    assert numbers(steps[4], "attn_scores of old") == SCORES
    assert numbers(steps[4], "attn_weights of old") == WEIGHTS
    assert numbers(steps[4], "context_vec of old") == [CONTEXT[1]]
    assert numbers(steps[4], "attn_scores")[1] == SCORES[0]
    assert numbers(steps[4], "context_vec") == CONTEXT
    assert lower(numbers(steps[6], "attn_scores")) == CAUSAL_SCORES
    assert numbers(steps[8], "attn_weights without the mask") == WITHOUT_MASK
    assert lower(numbers(steps[8], "attn_weights")) == CAUSAL_WEIGHTS
    assert numbers(steps[11], "wrapper(x)[0]") == WRAPPER
    assert numbers(steps[12], "MultiHeadAttention(...)(x)[0]") == OUTPUT
    published_row = numbers(steps[15], "MultiHeadAttention(6, 6, 5, 0.0, num_heads=2)(x)[0, 1]")
    assert published_row == BY_D_OUT + BY_HEAD_DIM


def test_scale_mask_and_dropout(steps):
    before, after = numbers(steps[6], "attn_scores"), numbers(steps[6], "attn_scores / sqrt(D)")
    for old, new in zip(itertools.chain(*before), itertools.chain(*after), strict=True):
        assert float(old) / 2**0.5 == pytest.approx(float(new), abs=1e-4)
    masked = numbers(steps[7], "masked_scores")
    for t, (row, scaled) in enumerate(zip(masked, after, strict=True)):
        assert row == [*scaled[: t + 1], *["-inf"] * (5 - t)]

    attn_weights = numbers(steps[8], "attn_weights")
    for t, row in enumerate(attn_weights):
        assert [number == "0.0000" for number in row] == [s > t for s in range(6)]
    dropped = list(itertools.chain(*numbers(steps[9], "attn_weights after dropout with p = 0.5")))
    for old, new in zip(itertools.chain(*attn_weights), dropped, strict=True):
        assert new == "0.0000" or float(new) == pytest.approx(2 * float(old), abs=2e-4)
    assert 15 < dropped.count("0.0000") < 36  # 15 are masked; of the other 21, some are dropped


def test_each_form_of_attention_is_equal_to_the_one_before(steps):
    """One head, the weight split, index notation, and a block of the model."""
    found = [re.findall(r": (True|False)$", text, re.MULTILINE) for text in steps.values()]
    assert [(n, result) for n, result in enumerate(found) if result] == [
        (10, ["True"]), (12, ["True", "True"]), (13, ["True"]), (14, ["True"]),
    ]  # fmt: skip
    shapes = re.findall(r"^\S.+? \(([\d, ]+)\) \(([BTHD, *]+)\)", steps[12], re.MULTILINE)
    assert [name for _, name in shapes] == ["B, T, H * D", "B, T, H, D", "B, H, T, D"]
    for shape, name in shapes:
        assert eval(shape) == eval(name, {"B": 2, "T": 6, "H": 2, "D": 2}), name


def test_mistakes_are_shown_beside_the_right_figures(steps):
    parts = re.split(r"^Mistake \d: ", steps[15], flags=re.MULTILINE)[1:]
    weights = numbers(steps[13], "attn_weights[0], a matrix for each head")[6:]  # of head 1
    for part, (mistake, test) in zip(parts, MISTAKES.items(), strict=True):
        assert test in part
        is_wrapper = mistake is wrapper_scale
        figures, right = ("context_vec", WRAPPER) if is_wrapper else ("attn_weights", weights)
        heads = "both heads" if is_wrapper else "head 1"
        rows = {
            t: numbers(part, f"{figures} of {w}, {heads}") for t, w in ((1, "old"), (5, "twice"))
        }
        for t, row in rows.items():
            assert row[1][: len(right[t])] == right[t]
        assert rows[1][0] != rows[1][1]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_the_named_test_finds_the_mistake(mistake, monkeypatch):
    """The test passes, and fails if the function that it checks is replaced by the mistake."""
    path, name = MISTAKES[mistake].split("::")
    module = importlib.import_module(Path(path).stem)
    arguments = ["per_head"] if mistake is wrapper_scale else []
    getattr(module, name)(*arguments)
    if mistake is wrapper_scale:
        monkeypatch.setitem(KERNELS, "per_head", mistake)
    else:
        monkeypatch.setattr(module, "causal_attn_weights", mistake)
    with pytest.raises(AssertionError):
        getattr(module, name)(*arguments)
