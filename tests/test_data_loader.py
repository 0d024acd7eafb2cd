"""training/feed.py: micro-batches, gathered in advance; training/evaluation.py: what is averaged.

tests/tokens/test_sampler.py has the order of windows with any number of ranks.
"""

import functools
import itertools
import math
import threading

import numpy as np
import pytest
import torch
from helpers.tally import trials
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from data import DocumentWindows, GPTDatasetV1, MixedDataset
from tokens.sampler import WindowOrder
from tokens.stream import TokenStream
from tokens.synthetic import IGNORED, CycleWalks
from tokens.tokenizers import bytes_per_token, get_tokenizer
from training.distributed.strategy import Strategy
from training.evaluation import Validation
from training.feed import Feed

some = trials(15, 100)

CPU = Strategy(torch.device("cpu"), torch.float32)
AT_MOST = 20  # seconds until a thread that does not answer is a failure
END = 256  # the byte tokenizer's end-of-text token
bytes_of = functools.partial(bytes_per_token, get_tokenizer("byte"))


class Rank:
    """One of several ranks. elsewhere: what the other ranks add to every sum."""

    def __init__(self, rank: int = 0, world_size: int = 1, elsewhere: int = 0):
        self.rank, self.world_size, self.elsewhere = rank, world_size, elsewhere
        self.pinned_by: set[str] = set()
        self.sent_by: set[str] = set()

    def pinned(self, *tensors):
        self.pinned_by.add(threading.current_thread().name)
        return [tensor.clone() for tensor in tensors]

    def to_device(self, *tensors):
        self.sent_by.add(threading.current_thread().name)
        return list(tensors)

    def sum(self, *values):
        return [value + self.elsewhere for value in values]


class Numbers:
    """Window w is the number w, two targets, the second of which counts in `both` alone."""

    def __init__(self, both=()):
        self.both = list(both)
        self.gathered: list[list[int]] = []

    def gather(self, windows):
        self.gathered.append(windows.tolist())
        return (torch.from_numpy(windows.astype(np.int16)),)

    def expand(self, numbers):
        inputs = torch.stack([numbers, numbers], dim=1).long()
        targets = inputs.clone()
        targets[~torch.isin(inputs[:, 0], torch.tensor(self.both)), 1] = IGNORED
        return inputs, targets

    def num_targets(self, numbers):
        return len(numbers) + sum(number in self.both for number in numbers.tolist())


def read(feed: Feed, step: int) -> list[list[int]]:
    """The windows of each micro-batch."""
    return [input_ids[:, 0].tolist() for input_ids, _, _, _ in feed.batches(step)]


@pytest.mark.parametrize("rank", [0, 1])
def test_micro_batches_are_the_ranks_share_in_its_order_and_announce_more(rank):
    order = WindowOrder(100, 12, 0)
    for micro_batch_size, sizes in [(None, [6]), (100, [6]), (3, [3, 3]), (4, [4, 2])]:
        ours = Rank(rank, 2)
        feed = Feed(Numbers(), order, micro_batch_size, ours)
        batches = read(feed, 1000)
        assert [len(batch) for batch in batches] == sizes
        assert [*itertools.chain(*batches)] == order.windows(1000, rank, 2).tolist()
        announced = [more_to_come for *_, more_to_come in feed.batches(3)]
        assert announced == [True] * (len(sizes) - 1) + [False]
        main = threading.current_thread().name
        assert ours.sent_by == {main}
        assert ours.pinned_by
        assert main not in ours.pinned_by


def test_weights_are_of_the_targets_of_all_ranks():
    """Their sum over the ranks is the number of ranks, as the ranks' sums are averaged."""
    order = WindowOrder(4, 4, 0)
    both = order.windows(0).tolist()[::2]  # the first of each rank's two windows
    for rank in range(2):
        feed = Feed(Numbers(both), order, 1, Rank(rank, 2, elsewhere=3))
        assert [weight for _, _, weight, _ in feed.batches(0)] == [2 * 2 / 6, 2 * 1 / 6]


def documents_of(lengths: list[int]) -> DocumentWindows:
    """Windows of five within documents with these numbers of letters."""
    ids = [id for n, k in enumerate(lengths) for id in (END, *range(97 + n, 97 + n + k))]
    stream = TokenStream([np.array(ids, np.uint16)], 257, END)
    return DocumentWindows.from_stream(stream, 5, 5)


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
    order = WindowOrder(min(12, len(dataset)), 12, 0)
    expected_inputs, expected_targets = dataset.batch(order.windows(2))
    num_targets = dataset.num_targets(*dataset.gather(order.windows(2)))
    assert num_targets == int((expected_targets != IGNORED).sum())
    ((input_ids, target_ids, weight, more_to_come),) = Feed(dataset, order, None, CPU).batches(2)
    assert torch.equal(input_ids, expected_inputs)
    assert torch.equal(target_ids, expected_targets)
    assert (weight, more_to_come) == (1.0, False)


class Table(torch.nn.Module):
    """A bigram model: (input_ids, target_ids) -> (logits, mean loss over targets that count)."""

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
@given(
    st.lists(st.integers(0, 20), min_size=4, max_size=9),
    st.integers(1, 12),
    st.none() | st.integers(1, 6),
    st.integers(0, 5),
)
@example([5, 1, 1, 12], 12, 1, 0)
def test_micro_batches_add_up_to_the_loss_of_the_whole_batch(
    lengths, batch_size, micro_batch_size, step
):
    """Loss and gradients: every target counts the same, in padded windows or not."""
    dataset, model = documents_of([*lengths, 5]), Table()
    order = WindowOrder(len(dataset), batch_size, 0)
    _, expected = model(*dataset.batch(order.windows(step)))
    expected.backward()
    expected = float(expected.detach())
    expected_gradient, model.table.grad = model.table.grad, None
    total, weight_sum = 0.0, 0.0
    feed = Feed(dataset, order, micro_batch_size, CPU)
    for input_ids, target_ids, weight, _ in feed.batches(step):
        _, loss = model(input_ids, target_ids)
        (loss * weight).backward()
        total, weight_sum = total + float(loss.detach()) * weight, weight_sum + weight
    assert weight_sum == pytest.approx(1)
    assert total == pytest.approx(expected, rel=1e-5)
    assert torch.allclose(model.table.grad, expected_gradient, atol=1e-6)


def test_the_next_step_is_gathered_while_this_one_is_computed():
    """Step 1 is blocked until all of step 0 was read, so step 0 does not wait for it; then it is
    gathered without being asked for."""
    order = WindowOrder(100, 4, 0)
    next_windows = order.windows(1).tolist()
    may_go_on, is_ready = threading.Event(), threading.Event()

    class Slow(Numbers):
        def gather(self, windows):
            if windows.tolist() == next_windows:
                assert may_go_on.wait(AT_MOST)
                is_ready.set()
            return super().gather(windows)

    feed = Feed(Slow(), order, None, Rank())
    assert read(feed, 0) == [order.windows(0).tolist()]
    may_go_on.set()
    assert is_ready.wait(AT_MOST)
    assert read(feed, 1) == [next_windows]
    read(feed, 2)
    assert feed.dataset.gathered[:3] == [order.windows(step).tolist() for step in range(3)]


@some
@given(st.lists(st.integers(0, 5) | st.integers(0, 10**9), max_size=12), st.integers(1, 4))
def test_any_step_may_follow_any_other(steps, micro_batch_size):
    order = WindowOrder([7, 9], 4, 0, [0.7, 0.3])
    feed = Feed(Numbers(), order, micro_batch_size, Rank())
    for step in steps:
        begun = feed.batches(step)  # may be left in the middle
        next(begun)
        begun.close()
        assert [*itertools.chain(*read(feed, step))] == order.windows(step).tolist()


@some
@given(st.lists(st.integers(0, 20), min_size=2, max_size=9), st.integers(1, 9), st.data())
def test_every_target_counts_the_same(lengths, batch_size, draw):
    """The mean over all targets at once, however windows are padded and batched. The model is in
    evaluation mode and without gradients meanwhile, and in its own mode afterwards."""
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
    for bytes_per, has_accuracy in [(bytes_of, False), (None, True)]:
        model.train(has_accuracy)
        loss, accuracy = Validation(dataset, windows, bytes_per).run(model, CPU, batch_size)
        assert float(loss) == pytest.approx(float(expected), rel=1e-5)
        assert (accuracy is not None) == has_accuracy
        assert model.training == has_accuracy
    assert modes == {(False, False)}
    counted = target_ids != IGNORED
    right = (logits.argmax(-1) == target_ids)[counted]
    assert accuracy == pytest.approx(float(right.float().mean()))


def test_bits_per_byte_where_targets_are_ignored():
    """A model that gives all ids the same probability: log 257 nats per target."""
    dataset = documents_of([3, 11, 1, 4])
    num_targets = 3 + 11 + 1 + 4 + 3  # and an end-of-text token after each but the last
    model = Table()
    torch.nn.init.zeros_(model.table)
    validation = Validation(dataset, np.arange(len(dataset)), bytes_of)
    assert validation.bytes_per_token == pytest.approx(19 / num_targets)
    for batch_size in (1, 3, 100):
        loss, accuracy = validation.run(model, CPU, batch_size)
        assert validation.metrics(float(loss), accuracy) == {
            "val/loss": pytest.approx(math.log(257), rel=1e-6),
            "val/bits_per_byte": pytest.approx(math.log2(257) * num_targets / 19, rel=1e-6),
        }
