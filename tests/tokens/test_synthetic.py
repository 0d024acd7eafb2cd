"""Sequences with a known answer: what is asked for can be known, and nothing else is."""

import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data import DataConfig, WindowOrder
from errors import ConfigError
from synthetic import BOS, IGNORED, JUMP, SYMBOLS, CycleWalks, RepeatedSequences, _draws
from training.command import compose

LONGEST = 2 * len(SYMBOLS)  # from here on there are more places than symbols


def lists(batch):
    return [tensor.tolist() for tensor in batch]


def cycle_of(window, length):
    """The cycle of a window of walks: {symbol: successor}, from its definition."""
    order, rest = _draws(np.array([window]), "walk", length)
    size = 4 + int(rest[0, 0] * (length // 2 - 4))  # from 4 to T / 2 - 1
    symbols = SYMBOLS[order[0, :size]].tolist()
    return dict(zip(symbols, symbols[1:] + symbols[:1], strict=True))


@pytest.mark.parametrize("kind", [CycleWalks, RepeatedSequences])
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


@pytest.mark.parametrize("kind", [CycleWalks, RepeatedSequences])
@pytest.mark.parametrize("length", [8, 9, 63, 64, LONGEST])
def test_every_window_begins_with_bos_and_goes_on_in_symbols(kind, length):
    ids, targets = kind(length).batch(np.arange(50))
    assert ids.shape == targets.shape == (50, length)
    assert (ids[:, 0] == BOS).all()
    assert set(ids[:, 1:].unique().tolist()) <= set(SYMBOLS.tolist())
    kept = targets != IGNORED
    assert set(targets[kept].tolist()) <= set(SYMBOLS.tolist())
    # A target is the next input, as everywhere.
    assert torch.equal(targets[:, :-1][kept[:, :-1]], ids[:, 1:][kept[:, :-1]])


@settings(max_examples=60, deadline=None)
@given(window=st.integers(0, 2**31 - 1), length=st.integers(8, LONGEST))
def test_exactly_the_steps_seen_before_are_asked_for(window, length):
    """By hand: a target counts when this very step along the cycle was made earlier."""
    (ids,), (targets,) = lists(CycleWalks(length).batch(np.array([window])))
    follows = cycle_of(window, length)
    assert set(ids[1:]) <= set(follows)
    seen = set()
    for place in range(length):
        here, asked = ids[place], targets[place]
        if asked != IGNORED:
            assert place > 0
            assert follows[here] == asked
            assert here in seen
        elif 0 < place < length - 1:
            assert not (here in seen and ids[place + 1] == follows[here])
        if 0 < place < length - 1 and ids[place + 1] == follows[here]:
            seen.add(here)


def test_what_is_asked_for_stands_in_the_window():
    """To who finds the places where the symbol stood before, the answer is always shown."""
    for ids, targets in zip(*lists(CycleWalks(64).batch(np.arange(100))), strict=True):
        for place, asked in enumerate(targets):
            if asked != IGNORED:
                pairs = set(itertools.pairwise(ids[: place + 1]))
                assert (ids[place], asked) in pairs


@pytest.mark.parametrize("length", [None, 16, 64])
def test_every_window_asks_for_something(length):
    """A batch without a single target has no mean loss: nan, which would end the run.

    None: the shortest windows that the door lets in.
    """
    length = length or next(
        n
        for n in range(1, 65)
        if not DataConfig(tokenizer="byte", synthetic="induction", max_length=n).problems()
    )
    for kind, windows in ((CycleWalks, 3000), (RepeatedSequences, 50)):
        _, targets = kind(length).batch(np.arange(windows))
        assert (targets != IGNORED).any(-1).all()


def test_as_many_steps_leave_the_cycle_as_said():
    ids, _ = CycleWalks(64).batch(np.arange(400))
    steps = left = 0
    sizes = []
    for window, row in enumerate(ids.tolist()):
        follows = cycle_of(window, 64)
        sizes.append(len(follows))
        for here, after in itertools.pairwise(row[1:]):
            steps += 1
            left += follows[here] != after
    # A jump may land on the successor by chance: one in K.
    expected = JUMP * (1 - np.mean([1 / size for size in sizes]))
    assert left / steps == pytest.approx(expected, abs=0.01)
    assert min(sizes) == 4
    assert max(sizes) == 31
    assert np.mean(sizes) == pytest.approx(17.5, abs=1)


def test_neither_symbol_nor_position_tells_what_comes_next():
    ids, targets = CycleWalks(64).batch(np.arange(600))
    counts = np.bincount(ids[:, 1:].flatten().numpy(), minlength=256)[SYMBOLS]
    assert counts.min() > 0.7 * counts.mean()
    assert counts.max() < 1.3 * counts.mean()
    answers = {}
    for here, asked in zip(ids.flatten().tolist(), targets.flatten().tolist(), strict=True):
        if asked != IGNORED:
            answers.setdefault(here, []).append(asked)
    for found in answers.values():  # the cycle is another in each window
        assert max(np.bincount(found)) < 0.15 * len(found)


@pytest.mark.parametrize("length", [8, 64, LONGEST])
def test_validation_repeats_each_sequence_once(length):
    half = length // 2
    ids, targets = RepeatedSequences(length).batch(np.arange(100))
    for row, asked in zip(ids.tolist(), targets.tolist(), strict=True):
        first, second = row[1 : half + 1], row[half + 1 :]
        assert len(set(first)) == half
        assert second == first[:-1]  # the last one is a target only
        assert asked[: half + 1] == [IGNORED] * (half + 1)
        assert asked[half + 1 :] == first[1:]


def test_no_training_window_is_a_sequence_written_twice():
    """What is validated on is of a kind that training never shows."""
    walks, _ = CycleWalks(64).batch(np.arange(3000))
    twice = (walks[:, 1:32] == walks[:, 33:]).all(-1).nonzero().flatten().tolist()
    assert not [window for window in twice if len(set(walks[window, 1:33].tolist())) == 32]


def test_there_are_more_windows_than_any_run_asks_for():
    data = CycleWalks(64)
    order = WindowOrder(len(data), 64, seed=0)
    seen = np.concatenate([order.windows(step) for step in range(50)])
    assert len(set(seen.tolist())) == len(seen)
    assert (data.batch(np.array([len(data) - 1]))[0][:, 0] == BOS).all()


def test_common_tokens_are_the_symbols():
    assert sorted(CycleWalks(64).common_tokens()) == sorted(SYMBOLS)
    assert len(SYMBOLS) == 62
    assert BOS not in SYMBOLS


# ------------------------------------------------------------------------------------ in a run


@pytest.mark.parametrize(
    ("override", "begins", "says"),
    [
        ("data.path=x.txt", "data.path=x.txt: ", "data.synthetic makes its own sequences"),
        ("data.tokenizer=gpt2", "data.", "data.tokenizer=byte"),
        ("data.max_length=4", "data.", "data.max_length"),
        ("data.synthetic=copy", "data.synthetic=copy: ", "use null or induction"),
    ],
)
def test_refused_in_one_line(override, begins, says):
    with pytest.raises(ConfigError) as caught:
        compose(["model=gpt2-small", "data=induction", override])
    (line,) = str(caught.value).splitlines()
    assert line.startswith(begins)
    assert says in line


def test_windows_that_would_need_more_symbols_than_there_are_are_refused():
    compose(["model=gpt2-small", "data=induction", f"data.max_length={LONGEST}"])
    with pytest.raises(ConfigError, match=r"data\.max_length"):
        compose(["model=gpt2-small", "data=induction", "data.max_length=256"])


def test_the_experiment_composes():
    settings = compose(["experiment=induction"])
    assert settings.data.synthetic == "induction"
    assert settings.data.path is None
    assert (settings.model.num_layers, settings.model.context_length) == (2, 64)


INDUCTION = ("experiment=induction", "data.path=null", "model.context_length=64")
INDUCTION += ("data.max_length=64", "trainer.max_steps=2", "name=induction")


def test_a_run_says_how_much_is_right(trainer, tmp_path):
    run = trainer(*INDUCTION, "lens=induction", "lens.every=1")
    assert [prompt.name for prompt in run.lens.prompts] == ["1-repeated"]
    run.train()
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(0 <= row["val/accuracy"] < 0.2 for row in (rows[0], rows[2]))
    assert all(np.isfinite(row["val/loss"]) for row in (rows[0], rows[2]))
    assert not [key for row in rows for key in row if "bits_per_byte" in key]
    assert "attention_layers/induction/L01" in rows[2]
    assert (run.folder / "attention" / "timelapse.html").is_file()


def test_accuracy_counts_the_asked_targets_alone(trainer, monkeypatch):
    """A model that always knows: 100 %; one that copies its input: 0 %."""
    run = trainer(*INDUCTION, "trainer.eval_windows=20")

    def answering(answer):
        def forward(input_ids, target_ids=None, capture=None):
            logits = torch.nn.functional.one_hot(answer(input_ids), 257).float() * 50
            if target_ids is None:
                return logits, None
            return None, torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), target_ids.flatten()
            )

        return forward

    def knows(ids):
        """From the second copy on: what followed this symbol in the first."""
        answers = torch.zeros_like(ids)
        answers[:, 33:] = ids[:, 2:33]
        return answers

    monkeypatch.setattr(run.model, "forward", answering(knows))
    assert run.validate()["val/accuracy"] == 1
    monkeypatch.setattr(run.model, "forward", answering(lambda ids: ids))
    assert run.validate()["val/accuracy"] == 0
