"""python -m scripts.attention_ladder: what it prints, against published figures.

Steps 1 to 5 and the output of step 8 use the sentence and seeds of S. Raschka, Build a Large
Language Model (From Scratch), chapter 3, which prints the figures below.
"""

import itertools
import re
import subprocess
import sys

import pytest
from helpers import REPOSITORY

WORDS = ["The", "old", "ferry", "bell", "rang", "twice"]


def run(*arguments):
    command = [sys.executable, "-m", "scripts.attention_ladder", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def steps():
    """The printed text of each step, by its number; 0 is what comes before step 1."""
    done = run()
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    pieces = re.split(r"^Step (\d+): ", done.stdout, flags=re.MULTILINE)
    return dict(zip([0, *map(int, pieces[1::2])], pieces[0::2], strict=True))


def table(text, name):
    """The rows under `name (shape)`: a list of (label, printed numbers)."""
    found = re.search(rf"^{re.escape(name)} \([\d, ]+\)\n(.+?)\n\n", text, re.MULTILINE | re.DOTALL)
    assert found is not None, name
    rows = [line.split() for line in found[1].splitlines()]
    return [(row[0], row[1:]) for row in rows if len(row) > 1 and re.match(r"-?[\di]", row[1])]


def numbers(text, name):
    return [printed for _, printed in table(text, name)]


def test_there_are_eight_steps_each_with_a_reason_and_a_formula(steps):
    assert list(steps) == list(range(9))
    for number in range(1, 9):
        title, why, formula = steps[number].split("\n\n")[:3]
        assert len(title) > 10
        assert why.endswith(".")
        assert formula.startswith("    ")
        assert "=" in formula


def test_the_input_is_the_six_words(steps):
    rows = table(steps[0], "x, the six words")
    assert [label for label, _ in rows] == WORDS
    assert rows[0][1] == ["0.4300", "0.1500", "0.8900"]
    assert rows[5][1] == ["0.0500", "0.8000", "0.5500"]


def test_scores_and_context_vector_of_one_query(steps):
    assert table(steps[1], "attn_scores") == [
        ("old", ["0.9544", "1.4950", "1.4754", "0.8434", "0.7070", "1.0865"])
    ]
    assert table(steps[2], "attn_weights") == [
        ("old", ["0.1385", "0.2379", "0.2333", "0.1240", "0.1082", "0.1581"])
    ]
    assert "sum of the weights: 1.0000" in steps[2]
    assert table(steps[2], "context_vec") == [("old", ["0.4419", "0.6515", "0.5683"])]


def test_all_queries_at_once(steps):
    assert numbers(steps[3], "attn_weights")[1] == numbers(steps[2], "attn_weights")[0]
    assert numbers(steps[3], "context_vec") == [
        ["0.4421", "0.5931", "0.5790"],
        ["0.4419", "0.6515", "0.5683"],
        ["0.4431", "0.6496", "0.5671"],
        ["0.4304", "0.6298", "0.5510"],
        ["0.4671", "0.5910", "0.5266"],
        ["0.4177", "0.6503", "0.5645"],
    ]


def test_trainable_matrices(steps):
    assert table(steps[4], "queries")[1] == ("old", ["0.4306", "1.4551"])
    assert numbers(steps[4], "attn_weights")[1] == [
        "0.1500",
        "0.2264",
        "0.2199",
        "0.1311",
        "0.0906",
        "0.1820",
    ]
    assert numbers(steps[4], "context_vec") == [
        ["0.2996", "0.8053"],
        ["0.3061", "0.8210"],
        ["0.3058", "0.8203"],
        ["0.2948", "0.7939"],
        ["0.2927", "0.7891"],
        ["0.2990", "0.8040"],
    ]


def test_the_causal_mask(steps):
    for t, row in enumerate(numbers(steps[5], "attn_scores")):
        assert [number == "-inf" for number in row] == [s > t for s in range(6)]
    attn_weights = numbers(steps[5], "attn_weights")
    for t, row in enumerate(attn_weights):
        assert [number == "0.0000" for number in row] == [s > t for s in range(6)]
        assert sum(map(float, row)) == pytest.approx(1, abs=5e-4)
    # The last query sees everything: its row is that of step 4.
    assert attn_weights[5] == numbers(steps[4], "attn_weights")[5]
    assert numbers(steps[5], "sum of each row") == [["1.0000"]] * 6
    assert "the same as attention.causal_attn_weights: True" in steps[5]


def test_dropout_drops_or_doubles(steps):
    before = itertools.chain(*numbers(steps[5], "attn_weights"))
    after = list(itertools.chain(*numbers(steps[6], "attn_weights")))
    for old, new in zip(before, after, strict=True):
        assert new == "0.0000" or float(new) == pytest.approx(2 * float(old), abs=2e-4)
    assert 15 < after.count("0.0000") < 36  # 15 are masked; of the other 21, some are dropped


def test_loop_and_viewed_heads_are_equal(steps):
    from_loop = numbers(steps[7], "context_vec, from the loop")
    viewed = numbers(steps[7], "context_vec, from one matrix viewed as heads")
    assert len(from_loop) == 6
    assert len(from_loop[0]) == 4
    assert from_loop == viewed
    assert "both are equal: True" in steps[7]
    two_heads = numbers(steps[7], "attn_weights, one matrix for each head")
    assert len(two_heads) == 12
    assert two_heads[:6] != two_heads[6:]


def test_the_real_module_ends_with_the_published_figures(steps):
    one_copy = [
        ["0.3190", "0.4858"],
        ["0.2943", "0.3897"],
        ["0.2856", "0.3593"],
        ["0.2693", "0.3873"],
        ["0.2639", "0.3928"],
        ["0.2575", "0.4028"],
    ]
    assert numbers(steps[8], "output") == one_copy + one_copy
    assert [label for label, _ in table(steps[8], "output")] == WORDS + WORDS


def test_both_scales_are_shown(steps):
    """The first row is what a published tutorial prints, the second what the definition gives."""
    assert numbers(steps[8], "divided by sqrt(d_out), as in the tutorial") == [
        ["-0.2962", "-0.2681", "0.1179", "0.1136", "0.0953", "-0.4015"]
    ]
    assert numbers(steps[8], "divided by sqrt(head_dim), as the definition says") == [
        ["-0.2804", "-0.2545", "0.1131", "0.1270", "0.0898", "-0.4088"]
    ]


def test_help():
    done = run("--help")
    assert done.returncode == 0
    assert "python -m scripts.attention_ladder" in done.stdout
    assert "Step 1" not in done.stdout


def test_an_unknown_option_is_refused():
    done = run("--steps=3")
    assert done.returncode == 2
    assert "--steps=3" in done.stderr
    assert done.stdout == ""
