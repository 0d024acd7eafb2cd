"""tokens/synthetic.py: sequences with predictable targets. Their settings: tests/test_data.py."""

import itertools

import numpy as np
import pytest
import torch
from helpers.refusals import refused
from helpers.runs import rows

from clearhead.config.schema import DataConfig
from clearhead.errors import ConfigError
from clearhead.tokens.synthetic import BOS, IGNORED, SYMBOLS, CycleWalks, RepeatedSequences
from train import fit

LONGEST = 2 * len(SYMBOLS)  # longer sequences have more positions than symbols


def windows_of(kind, length, count):
    """(input ids, target ids) of the first windows, as lists."""
    ids, targets = kind(length).batch(np.arange(count))
    return zip(ids.tolist(), targets.tolist(), strict=True)


@pytest.mark.parametrize("kind", [CycleWalks, RepeatedSequences])
@pytest.mark.parametrize("length", [16, 63, LONGEST])  # 16: the shortest that is accepted
def test_windows_are_bos_and_symbols_and_ask_for_something(kind, length):
    ids, targets = kind(length).batch(np.arange(1000))
    assert ids.shape == targets.shape == (1000, length)
    assert ids.dtype == targets.dtype == torch.int64
    assert (ids[:, 0] == BOS).all()
    assert set(ids[:, 1:].unique().tolist()) == set(SYMBOLS.tolist())
    kept = targets != IGNORED  # these targets are the next inputs
    assert torch.equal(targets[:, :-1][kept[:, :-1]], ids[:, 1:][kept[:, :-1]])
    assert kept.any(-1).all()  # the mean loss of a window without a target would be NaN
    again = kind(length).batch(np.array([999, 5]))  # a window depends only on its index
    assert torch.equal(torch.stack(again), torch.stack([ids, targets])[:, [999, 5]])
    assert len(ids.unique(dim=0)) == 1000


@pytest.mark.parametrize("length", [16, 64, LONGEST])
def test_exactly_the_steps_seen_before_are_asked_for(length):
    """A target counts if it is a step of the cycle that occurred earlier in the window. It does not
    count if the same jump occurs twice by chance."""
    asked_for = jumped_twice = 0
    for ids, targets in windows_of(CycleWalks, length, 400):
        seen, follows = set(), {}
        for place in range(1, length):
            here, target = ids[place], targets[place]
            if target != IGNORED:
                asked_for += 1
                assert (here, target) in seen
                assert follows.setdefault(here, target) == target
            if place < length - 1:
                step = (here, ids[place + 1])
                jumped_twice += target == IGNORED and step in seen
                seen.add(step)
        assert len(set(follows.values())) == len(follows)
    assert asked_for > 400 * length / 8
    assert jumped_twice < 0.003 * asked_for


def test_share_of_jumps_and_size_of_cycles():
    """One step in twenty is a jump, which may reach the next symbol of the cycle by chance."""
    sizes = [len(set(ids[1:])) for ids, _ in windows_of(CycleWalks, 64, 400)]
    assert (min(sizes), max(sizes)) == (4, 31)
    assert np.mean(sizes) == pytest.approx(17.5, abs=1)
    steps = left = expected = 0
    for ids, targets in windows_of(CycleWalks, LONGEST, 1000):
        size = len(set(ids[1:]))
        if size > 12:  # in a small cycle, every step occurs at some time
            continue
        follows = {here: t for here, t in zip(ids, targets, strict=True) if t != IGNORED}
        pairs = list(itertools.pairwise(ids[1:]))
        steps += len(pairs)
        left += sum(follows.get(here, after) != after for here, after in pairs)
        expected += len(pairs) * 0.05 * (1 - 1 / size)
    assert left / steps == pytest.approx(expected / steps, abs=0.006)


def test_a_symbol_does_not_tell_what_comes_next():
    """Each window has another cycle."""
    ids, targets = CycleWalks(64).batch(np.arange(600))
    for symbol in SYMBOLS.tolist():
        found = targets[(ids == symbol) & (targets != IGNORED)]
        assert torch.bincount(found).max() < 0.15 * len(found)


@pytest.mark.parametrize("length", [8, 64, LONGEST])
def test_validation_repeats_each_sequence_once(length):
    half = length // 2
    for row, targets in windows_of(RepeatedSequences, length, 100):
        first, second = row[1 : half + 1], row[half + 1 :]
        assert len(set(first)) == half
        assert second == first[:-1]  # the last symbol is only a target
        assert targets == [IGNORED] * (half + 1) + first[1:]


def test_another_tokenizer_and_short_windows_are_refused():
    values = {"path": None, "tokenizer": "byte", "max_length": 64, "synthetic": "induction"}
    for changes in ({"tokenizer": "gpt2"}, {"max_length": 15}):
        with refused(ConfigError, "data.synthetic", exit_code=2):
            DataConfig.with_defaults(**values | changes)


def test_a_run_logs_its_accuracy(make_run):
    lengths = ("model.context_length=64", "data.max_length=64", "trainer.max_steps=2")
    run = make_run("experiment=induction", "data.path=null", "lens.every=1", *lengths)
    fit(run)
    first, _, last = rows(run.directory)
    assert all(0 <= row["val/accuracy"] < 0.2 for row in (first, last))
    assert "val/bits_per_byte" not in last
    assert "attention_layers/induction/L01" in last
