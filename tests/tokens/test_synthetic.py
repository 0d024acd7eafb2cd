"""synthetic.py: sequences whose targets can be known; nothing else is asked for."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from helpers.refusals import refused
from helpers.runs import rows
from helpers.settings import settings

from data import DataConfig
from errors import ConfigError
from synthetic import BOS, IGNORED, SYMBOLS, CycleWalks, RepeatedSequences
from training.command import compose

LONGEST = 2 * len(SYMBOLS)  # above it there are more positions than symbols
both = pytest.mark.parametrize("kind", [CycleWalks, RepeatedSequences])


def windows_of(kind, length, count):
    """(input ids, target ids) of the first windows, as lists."""
    ids, targets = kind(length).batch(np.arange(count))
    return zip(ids.tolist(), targets.tolist(), strict=True)


def cycle_of(ids):
    """{symbol: successor} of a walk that visits each symbol often."""
    follows = {}
    for (here, after), _ in Counter(itertools.pairwise(ids[1:])).most_common():
        follows.setdefault(here, after)
    return follows


@both
def test_a_window_is_a_function_of_its_number_alone(kind):
    data = kind(32)
    numbers = np.array([5, 0, 999, 5, 123])
    ids, targets = data.batch(numbers)
    assert ids.shape == targets.shape == (5, 32)
    assert ids.dtype == targets.dtype == torch.int64
    for place, number in enumerate(numbers):
        np.random.seed(place)
        alone_ids, alone_targets = kind(32).batch(np.array([number]))
        assert torch.equal(alone_ids[0], ids[place])
        assert torch.equal(alone_targets[0], targets[place])
    assert len({tuple(row) for row in ids.tolist()}) == 4
    last_ids, _ = data.batch(np.array([len(data) - 1]))
    assert last_ids[0, 0] == BOS


@both
def test_windows_are_bos_and_symbols_and_ask_for_something(kind):
    """A batch without a target would have a mean loss of NaN."""
    accepted = (
        DataConfig(tokenizer="byte", synthetic="induction", max_length=n) for n in range(65)
    )
    shortest = next(config.max_length for config in accepted if not config.problems())
    for length in (shortest, 63, 64, LONGEST):
        ids, targets = kind(length).batch(np.arange(1000))
        assert ids.shape == targets.shape == (1000, length)
        assert (ids[:, 0] == BOS).all()
        assert set(ids[:, 1:].unique().tolist()) == set(SYMBOLS.tolist())
        kept = targets != IGNORED
        assert set(targets[kept].tolist()) <= set(SYMBOLS.tolist())
        # A target is the next input.
        assert torch.equal(targets[:, :-1][kept[:, :-1]], ids[:, 1:][kept[:, :-1]])
        assert kept.any(-1).all()
    assert sorted(CycleWalks(64).common_tokens()) == sorted(SYMBOLS)
    assert len(SYMBOLS) == 62


@pytest.mark.parametrize("length", [16, 64, LONGEST])
def test_exactly_the_steps_seen_before_are_asked_for(length):
    """A target counts when the same step was made earlier in the window, and is one along the
    cycle: not when by chance the same jump is made twice."""
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
    sizes = [len(set(ids[1:])) for ids, _ in windows_of(CycleWalks, 64, 400)]
    assert (min(sizes), max(sizes)) == (4, 31)
    assert np.mean(sizes) == pytest.approx(17.5, abs=1)
    steps = left = expected = 0
    for ids, _ in windows_of(CycleWalks, LONGEST, 1000):
        follows = cycle_of(ids)
        if len(follows) > 12:
            continue
        pairs = list(itertools.pairwise(ids[1:]))
        steps += len(pairs)
        left += sum(follows[here] != after for here, after in pairs)
        # A jump may land on the successor by chance: one in K.
        expected += len(pairs) * 0.05 * (1 - 1 / len(follows))
    assert steps > 10_000
    assert left / steps == pytest.approx(expected / steps, abs=0.006)


def test_neither_symbol_nor_position_tells_what_comes_next():
    ids, targets = CycleWalks(64).batch(np.arange(600))
    counts = np.bincount(ids[:, 1:].flatten().numpy(), minlength=256)[SYMBOLS]
    assert counts.min() > 0.7 * counts.mean()
    assert counts.max() < 1.3 * counts.mean()
    answers = {}
    for here, target in zip(ids.flatten().tolist(), targets.flatten().tolist(), strict=True):
        if target != IGNORED:
            answers.setdefault(here, []).append(target)
    for found in answers.values():  # the cycle is another in each window
        assert max(np.bincount(found)) < 0.15 * len(found)


@pytest.mark.parametrize("length", [8, 64, LONGEST])
def test_validation_repeats_each_sequence_once(length):
    half = length // 2
    for row, targets in windows_of(RepeatedSequences, length, 100):
        first, second = row[1 : half + 1], row[half + 1 :]
        assert len(set(first)) == half
        assert second == first[:-1]  # the last one is a target only
        assert targets[: half + 1] == [IGNORED] * (half + 1)
        assert targets[half + 1 :] == first[1:]


def test_no_training_window_is_a_repeated_sequence():
    """Which validation uses, and training never has."""
    walks, _ = CycleWalks(64).batch(np.arange(3000))
    twice = (walks[:, 1:32] == walks[:, 33:]).all(-1).nonzero().flatten().tolist()
    assert not [window for window in twice if len(set(walks[window, 1:33].tolist())) == 32]


def test_settings_of_the_experiment():
    found = compose(["experiment=induction"])
    assert (found.data.synthetic, found.data.path) == ("induction", None)
    assert (found.model.num_layers, found.model.context_length) == (2, 64)
    induction = ("model=gpt2-small", "data=induction", "data.path=null")
    settings(*induction, f"data.max_length={LONGEST}")
    for key, value, named in [
        ("path", "x.txt", "path"),
        ("tokenizer", "gpt2", "synthetic"),
        ("max_length", 4, "synthetic"),
        ("max_length", 256, "synthetic"),  # needs more symbols than there are
        ("synthetic", "copy", "synthetic"),
    ]:
        with refused(ConfigError, f"data.{named}"):
            settings(*induction, f"data.{key}={value}")


def test_a_run_logs_its_accuracy(trainer):
    lengths = ("model.context_length=64", "data.max_length=64", "trainer.max_steps=2")
    lens = ("lens=induction", "lens.every=1")
    run = trainer("experiment=induction", "data.path=null", *lengths, *lens)
    assert [prompt.name for prompt in run.lens.prompts] == ["1-repeated"]
    run.train()
    log = rows(run.folder)
    assert [row["step"] for row in log] == [0, 1, 2]
    assert all(0 <= row["val/accuracy"] < 0.2 for row in (log[0], log[2]))
    assert all(np.isfinite(row["val/loss"]) for row in (log[0], log[2]))
    assert not [key for row in log for key in row if "bits_per_byte" in key]
    assert "attention_layers/induction/L01" in log[2]
    assert (run.folder / "attention" / "timelapse.html").is_file()
