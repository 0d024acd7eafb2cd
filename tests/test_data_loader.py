"""data.py: training batches, reading ahead, micro-batches; run/evaluation.py: the mean loss.

The order of windows for any number of ranks: tests/tokens/test_sampler.py.
"""

import itertools
import math
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from helpers import TIMEOUT
from helpers.tally import trials
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from clearhead.parallel.strategy import Strategy
from clearhead.run.evaluation import Validation
from clearhead.tokens.sampler import WindowOrder
from clearhead.tokens.synthetic import CycleWalks
from clearhead.tokens.token_stream import TokenStream
from clearhead.tokens.tokenizer import get_tokenizer
from clearhead.tokens.windows import IGNORED, MixedDataset, window_order
from data import DocumentWindows, GPTDatasetV1, read_ahead, split_batch, training_batches

some = trials(8, 100)

CPU = Strategy(torch.device("cpu"), torch.float32)
END = 256  # the byte tokenizer's end-of-text token
LENGTHS = get_tokenizer("byte").byte_lengths


class Numbers:
    """A dataset whose window w contains the number w."""

    phases = 1

    def __init__(self, size: int = 100):
        self.size = size
        self.read: list[list[int]] = []

    def __len__(self):
        return self.size

    def __getitem__(self, windows):
        return self.batch(windows)

    def batch(self, windows):
        self.read.append(windows.tolist())
        return torch.from_numpy(windows), torch.zeros(len(windows))


def numbers(batches: Iterator, steps: int) -> list[list[int]]:
    """The windows of the next batches of a dataset of Numbers."""
    return [batch[0].tolist() for batch in itertools.islice(batches, steps)]


@some
@given(st.integers(0, 10**9), st.sampled_from([1, 2, 3, 6]), st.integers(0, 5))
def test_batches_are_each_ranks_part_of_every_step_from_any_step_on(first_step, world_size, seed):
    order, steps = WindowOrder(100, 12, seed), range(first_step, first_step + 3)
    state = torch.get_rng_state()
    for rank in range(world_size):
        batches = training_batches(Numbers(), 12, seed, first_step, rank, world_size)
        expected = [order.windows(step, rank, world_size).tolist() for step in steps]
        assert numbers(batches, 3) == expected
    assert torch.equal(torch.get_rng_state(), state)


def test_the_next_batch_is_read_while_this_one_is_used():
    """Batch 1 is read after batch 0 was returned and before it is requested."""
    proceed, is_ready = threading.Event(), threading.Event()

    class Slow(Numbers):
        def batch(self, windows):
            if self.read:
                assert proceed.wait(TIMEOUT)
                is_ready.set()
            return super().batch(windows)

    dataset, order = Slow(), WindowOrder(100, 4, 0)
    num_threads = torch.get_num_threads()
    batches = training_batches(dataset, 4, 0)
    assert numbers(batches, 1) == [order.windows(0).tolist()]
    proceed.set()
    assert is_ready.wait(TIMEOUT)
    assert numbers(batches, 2) == [order.windows(step).tolist() for step in (1, 2)]
    assert dataset.read[:3] == [order.windows(step).tolist() for step in range(3)]
    assert torch.get_num_threads() == num_threads


def test_reading_ahead_ends_with_the_batches_and_raises_their_errors():
    assert list(read_ahead(iter("abc"))) == ["a", "b", "c"]
    batches = read_ahead(map({"a": 1}.__getitem__, "ab"))
    assert next(batches) == 1
    with pytest.raises(KeyError):
        next(batches)


def documents_of(lengths: list[int]) -> DocumentWindows:
    """Windows of five tokens within documents with these numbers of letters."""
    ids = [id for n, k in enumerate(lengths) for id in (END, *range(97 + n, 97 + n + k))]
    stream = TokenStream([np.array(ids, np.uint16)], 257, END)
    return DocumentWindows(stream, None, 5, 5)


@pytest.mark.parametrize(
    "dataset",
    [
        GPTDatasetV1("a text of some length " * 9, get_tokenizer("byte"), 5, 3),
        MixedDataset([documents_of([3, 9, 0, 1, 4]), documents_of([2, 30])], [0.5, 0.5]),
        CycleWalks(16),
    ],
    ids=["plain", "documents", "walks"],
)
def test_batches_are_those_of_the_data_set_and_their_targets_are_counted(dataset):
    expected_inputs, expected_targets = dataset.batch(window_order(dataset, 12, 0).windows(2))
    batch = next(training_batches(dataset, 12, 0, first_step=2))
    input_ids, target_ids = batch
    assert torch.equal(input_ids, expected_inputs)
    assert torch.equal(target_ids, expected_targets)
    assert all(part.is_contiguous() for part in batch)  # otherwise pinning it is useless
    parts = split_batch(batch, 5)
    assert [len(tensors[0]) for tensors, _ in parts] == [5, 5, 2]
    for ((inputs, targets), count), first in zip(parts, (0, 5, 10), strict=True):
        assert torch.equal(inputs, expected_inputs[first : first + 5])
        assert torch.equal(targets, expected_targets[first : first + 5])
        assert count == int((targets != IGNORED).sum())
    ((whole, _),) = split_batch(batch, None)
    assert [*map(len, whole)] == [12, 12]


class Table(torch.nn.Module):
    """A bigram model: (input_ids, target_ids) -> (logits, mean loss of targets not IGNORED)."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = torch.nn.Parameter(torch.randn(257, 257, generator=generator))

    def forward(self, input_ids, target_ids=None):
        logits = self.table[input_ids]
        if target_ids is None:
            return logits, None
        return logits, cross_entropy(logits.flatten(0, 1), target_ids.flatten())


@some
@given(st.lists(st.integers(0, 20), min_size=2, max_size=9), st.integers(1, 9), st.data())
def test_every_target_counts_the_same(lengths, batch_size, draw):
    """It is the mean over all targets, independent of padding and batch size. During evaluation the
    model is in eval mode without gradients; afterwards its mode is restored."""
    dataset, model = documents_of([*lengths, 5]), Table()
    dataset = MixedDataset([dataset, documents_of([2, 9])], [0.5, 0.5])
    some_windows = st.lists(st.integers(0, len(dataset) - 1), min_size=1, max_size=12)
    windows = np.array(draw.draw(some_windows))
    input_ids, target_ids = dataset.batch(windows)
    with torch.no_grad():
        logits, expected = model(input_ids, target_ids)
    modes = set()
    model.register_forward_pre_hook(
        lambda module, _: modes.add((module.training, torch.is_grad_enabled()))
    )
    for bytes_per, has_accuracy in [(np.full(257, 2), False), (None, True)]:
        model.train(has_accuracy)
        validation = Validation(dataset, bytes_per, CPU, batch_size)
        for num_parts in (1, 5):
            metrics = validation.run(model, windows, num_parts)
            assert metrics["loss"] == pytest.approx(float(expected), rel=1e-5)
            assert ("accuracy" in metrics) == has_accuracy
        assert model.training == has_accuracy
    assert modes == {(False, False)}
    counted = target_ids != IGNORED
    right = (logits.argmax(-1) == target_ids)[counted]
    assert metrics["accuracy"] == pytest.approx(float(right.float().mean()))


def test_bits_per_byte_where_targets_are_ignored():
    """A model for which all ids have the same probability: the loss is log 257 nats."""
    dataset = documents_of([3, 11, 1, 4])
    num_targets = 3 + 11 + 1 + 4 + 3  # and an end-of-text token after each document except the last
    model = Table()
    torch.nn.init.zeros_(model.table)
    for batch_size in (1, 3, 100):
        found = Validation(dataset, LENGTHS, CPU, batch_size).run(model, np.arange(len(dataset)))
        assert {key: found[key] for key in ("loss", "perplexity", "bits_per_byte")} == {
            "loss": pytest.approx(math.log(257), rel=1e-6),
            "perplexity": pytest.approx(257, rel=1e-6),
            "bits_per_byte": pytest.approx(math.log2(257) * num_targets / 19, rel=1e-6),
        }


def test_targets_without_bytes_have_no_bits_per_byte():
    """End-of-text tokens have 0 bytes."""
    dataset = documents_of([0] * 12)
    metrics = Validation(dataset, LENGTHS, CPU, 2).run(Table(), np.arange(len(dataset)))
    assert "loss" in metrics
    assert "bits_per_byte" not in metrics
