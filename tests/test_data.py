"""data.py: windows and data sets, each against its plain definition; what is held back to
validate on; refusals.

Needs no network and no files.
"""

import functools
import itertools
import json
import random
import shlex
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch
from helpers.refusals import check_refusal
from hypothesis import example, given, settings
from hypothesis import strategies as st

import data
from data import (
    DataConfig,
    DocumentWindows,
    GPTDatasetV1,
    Loaded,
    MixedDataset,
    WindowOrder,
    check_unchanged,
    create_dataloader,
    encode_text,
    evenly,
    get_tokenizer,
    load_datasets,
    load_stream,
    order_of,
)
from errors import DataError
from synthetic import IGNORED, CycleWalks, RepeatedSequences
from tokens import END_OF_TEXT
from tokens.prepare import Preparation, Recipe
from tokens.shards import ShardWriter
from tokens.stream import BLOCK_BYTES, TokenStream

many = settings(max_examples=150, deadline=None, derandomize=True)
some = settings(max_examples=50, deadline=None, derandomize=True)

FRAGMENTS = [
    *" \n\r\t\x0b\x0c\x1c\x1d\x1e\x1f\x85\u00a0\u2028\u2029\u3000\u200b\ufeff\0",
    *("  ", "\r\n", "\n\n\n", "\n ", " \n", " \u00a0 "),
    *("the", "Naïve", "don't", "we'll", "I'M", "'s", "'", "x'", "1234", "½", "...", "_", "e\u0301"),
    *("日本語", "Ελλάδα", "שלום", "नमस्ते", "🙂", "👩‍👩‍👧", "🇳🇱"),
    *(END_OF_TEXT, "<|endof", "text|>"),
]
mixes = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=40).map("".join)

MADE_UP_PATTERN = (  # of the kind that GPT-4's encoding has
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
MADE_UP_MERGES = ["12", "123", "34", "1234", "th", "the", " t", "(a", "'M", "..", "...", " \n"]


@functools.cache
def larger_encoding(last_id: int) -> tiktoken.Encoding:
    """A made-up vocabulary: the bytes, a few merges that GPT-2's pattern would allow in other
    places, and an end-of-text token as `last_id`."""
    words = [*(bytes([byte]) for byte in range(256)), *(merge.encode() for merge in MADE_UP_MERGES)]
    return tiktoken.Encoding(
        "larger",
        pat_str=MADE_UP_PATTERN,
        mergeable_ranks={word: rank for rank, word in enumerate(words)},
        special_tokens={END_OF_TEXT: last_id},
    )


ENCODINGS = {
    "byte": get_tokenizer("byte"),
    "gpt2": get_tokenizer("gpt2"),
    "65536 ids": larger_encoding(2**16 - 1),
    "65537 ids": larger_encoding(2**16),
    "200001 ids": larger_encoding(200_000),
}
# GPT-2's own takes a fifth of a second to begin with; test_encoding.py has it under hypothesis.
encodings = st.sampled_from([name for name in ENCODINGS if name != "gpt2"])


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def byte_config(path: object, **changes) -> DataConfig:
    """Settings for a tiny text, one token a byte."""
    path = [str(p) for p in path] if isinstance(path, list) else str(path)
    values = {"tokenizer": "byte", "max_length": 4, "val_fraction": 0.0} | changes
    return DataConfig(path=path, **values)


def refusal(config: DataConfig) -> DataError:
    """The error that these settings end with."""
    assert config.problems() == []
    with pytest.raises(DataError) as caught:
        load_datasets(config)
    return caught.value


def stream_of(ids, cuts=(), dtype=np.uint16, vocab_size: int = 257) -> TokenStream:
    """Ids in one array, or in several, cut at these places; the last id ends a text."""
    arrays = np.split(np.array(ids, dtype), sorted(cuts))
    return TokenStream(arrays, vocab_size, vocab_size - 1)


def ids_of(dataset: GPTDatasetV1) -> list[int]:
    """All the ids that windows are cut from."""
    return np.concatenate(dataset.tokens.arrays).tolist()


def pairs_of(dataset) -> list[tuple[list[int], list[int]]]:
    """All windows as (input ids, target ids)."""
    input_ids, target_ids = dataset.batch(np.arange(len(dataset)))
    assert input_ids.dtype == target_ids.dtype == torch.int64
    return list(zip(input_ids.tolist(), target_ids.tolist(), strict=True))


# -------------------------------------------------------------------------------------- windows


def classic_windows(text: str, tokenizer, max_length: int, stride: int) -> list[tuple]:
    """The classic implementation: two lists, filled window by window."""
    token_ids = tokenizer.encode(text, allowed_special={"<|endoftext|>"}, disallowed_special=())
    input_ids, target_ids = [], []
    for i in range(0, len(token_ids) - max_length, stride):
        input_ids.append(torch.tensor(token_ids[i : i + max_length]))
        target_ids.append(torch.tensor(token_ids[i + 1 : i + max_length + 1]))
    return list(zip(input_ids, target_ids, strict=True))


@many
@given(mixes, encodings, st.integers(1, 12), st.integers(1, 15))
@example("1234 12345 the(a THE'Mm.. ...\n", "200001 ids", 1, 1)
def test_dataset_equals_the_classic_one(text, name, max_length, stride):
    check_against_the_classic_one(text, ENCODINGS[name], max_length, stride)


@pytest.mark.parametrize(("max_length", "stride"), [(1, 1), (9, 4), (256, 256), (20, 50)])
def test_dataset_of_gpt2_tokens_equals_the_classic_one(max_length, stride):
    text = "".join(random.Random(max_length).choices(FRAGMENTS, k=1000))
    check_against_the_classic_one(text, ENCODINGS["gpt2"], max_length, stride)


def check_against_the_classic_one(text, tokenizer, max_length, stride):
    expected = classic_windows(text, tokenizer, max_length, stride)
    if not expected:
        with pytest.raises(DataError):
            GPTDatasetV1(text, tokenizer, max_length, stride)
        return
    dataset = GPTDatasetV1(text, tokenizer, max_length, stride)
    assert len(dataset) == len(expected)
    for index, (input_ids, target_ids) in enumerate(expected):
        for window in (dataset[index], dataset[index - len(expected)]):
            assert window[0].dtype == window[1].dtype == torch.int64
            assert torch.equal(window[0], input_ids)
            assert torch.equal(window[1], target_ids)
    for index in (len(expected), -len(expected) - 1):
        with pytest.raises(IndexError):
            dataset[index]


@pytest.mark.parametrize("name", ENCODINGS)
def test_lone_surrogates_are_replaced_as_by_tiktoken(name):
    text = "ab\ud800c \ude42\ud83d d \ud83d\ude42 e"
    tokenizer = ENCODINGS[name]
    assert encode_text(text, tokenizer).tolist() == tokenizer.encode(text)


@pytest.mark.parametrize("name", ["gpt2", "200001 ids"])
def test_a_long_text_without_blanks_has_the_ids_of_one_call(name):
    """The made-up pattern keeps "(a" together, where GPT-2's always cuts: it must not be encoded
    in pieces that are right for GPT-2 only."""
    text = "x" + "(a" * 300_000
    tokenizer = ENCODINGS[name]
    assert encode_text(text, tokenizer).tolist() == tokenizer.encode(text)


@pytest.mark.parametrize(
    ("endoftext", "ids"), [("token", [97, 256, 98]), ("text", [*b"a<|endoftext|>b"])]
)
def test_end_of_text_written_in_a_text(endoftext, ids):
    text = f"a{END_OF_TEXT}b"
    assert encode_text(text, ENCODINGS["byte"], endoftext).tolist() == ids
    larger = ENCODINGS["200001 ids"]
    allowed = {END_OF_TEXT} if endoftext == "token" else set()
    expected = larger.encode(text, allowed_special=allowed, disallowed_special=())
    assert encode_text(text, larger, endoftext).tolist() == expected


def test_dataset_can_be_iterated_over():
    dataset = GPTDatasetV1("abcdefg", get_tokenizer("byte"), max_length=2, stride=2)
    read = [(bytes(x.tolist()), bytes(y.tolist())) for x, y in dataset]
    assert read == [(b"ab", b"bc"), (b"cd", b"de"), (b"ef", b"fg")]


@some
@given(st.integers(1, 9), st.integers(1, 9), st.sets(st.integers(0, 100), max_size=5), st.data())
def test_batch_equals_stacked_items_however_the_stream_is_stored(max_length, stride, cuts, draw):
    dataset = GPTDatasetV1.from_stream(stream_of(range(100), cuts), max_length, stride)
    windows = draw.draw(st.lists(st.integers(0, len(dataset) - 1), min_size=1, max_size=8))
    input_ids, target_ids = dataset.batch(np.array(windows))
    assert input_ids.dtype == target_ids.dtype == torch.int64
    assert input_ids.tolist() == [list(range(w * stride, w * stride + max_length)) for w in windows]
    assert torch.equal(target_ids, input_ids + 1)
    assert torch.equal(input_ids, torch.stack([dataset[w][0] for w in windows]))
    assert torch.equal(target_ids, torch.stack([dataset[w][1] for w in windows]))


def test_from_stream_keeps_the_stream():
    stream = stream_of(range(10))
    assert GPTDatasetV1.from_stream(stream, 4, 4).tokens is stream


def test_a_worker_process_reads_the_same_windows():
    text = "One bell rang, then two, then three; nobody came down to the ferry. " * 3
    alone = create_dataloader(text, 2, 8, 8, shuffle=False)
    helped = create_dataloader(text, 2, 8, 8, shuffle=False, num_workers=1)
    for mine, theirs in zip(alone, helped, strict=True):
        assert torch.equal(mine[0], theirs[0])
        assert torch.equal(mine[1], theirs[1])


def memory_of(make) -> tuple[object, int, int]:
    """(what make() returns, bytes that stay, most bytes on the way)."""
    tracemalloc.start()
    try:
        made = make()
        stays, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return made, stays, peak


def test_ids_cost_two_bytes_a_token_whatever_the_stride():
    tokenizer = get_tokenizer("gpt2")
    encode_text("the tables of the tokenizer are made once", tokenizer)
    text = "the of and to in is you that " * 500_000
    dataset, stays, peak = memory_of(lambda: GPTDatasetV1(text, tokenizer, 256, stride=1))
    count = len(dataset.tokens)
    assert count == 4_000_001  # a blank at the end
    assert len(dataset) == count - 256
    assert stays <= 2 * count + 2_000_000
    assert peak <= 2 * count + 4_000_000


def test_windows_within_documents_cost_sixteen_bytes_a_document():
    documents = 200_000
    stream = stream_of([256, 1, 2, 3, 4] * documents)
    dataset, stays, _ = memory_of(lambda: DocumentWindows.from_stream(stream, 4, 4))
    assert len(dataset) == 2 * documents - 1
    assert stays <= 16 * documents + 100_000


def test_loading_one_long_document_costs_two_bytes_a_token(tmp_path):
    """The search for a document to begin the validation with looks at a little at a time."""
    path = write(tmp_path / "long.txt", b"x y z 123\n" * 1_000_000)
    config = byte_config(path, val_fraction=0.1)
    loaded, stays, peak = memory_of(lambda: load_datasets(config))
    count = len(loaded.train.tokens) + len(loaded.val.tokens)
    assert count == 10_000_001
    assert stays <= 2.25 * count + 2_000_000  # a growing array is made an eighth larger
    assert peak <= 2.25 * count + 8_000_000


@pytest.mark.parametrize("name", ENCODINGS)
def test_ids_take_two_bytes_where_they_fit(name):
    tokenizer = ENCODINGS[name]
    dtype, torch_dtype = np.uint16, torch.int16
    if tokenizer.n_vocab > 2**16:
        dtype, torch_dtype = np.uint32, torch.int32
    text = f"the 1234{END_OF_TEXT}\n"
    ids = tokenizer.encode(text, allowed_special={END_OF_TEXT})
    assert tokenizer.eot_token in ids
    dataset = GPTDatasetV1(text, tokenizer, len(ids) - 1, 1)
    assert dataset.tokens.dtype == dtype
    assert (dataset.tokens.vocab_size, dataset.tokens.end_of_text) == (
        tokenizer.n_vocab,
        tokenizer.eot_token,
    )
    (gathered,) = dataset.gather(np.array([0]))
    assert gathered.dtype == torch_dtype
    assert [(x.tolist(), y.tolist()) for x, y in dataset] == [(ids[:-1], ids[1:])]


def test_gathered_windows_are_two_bytes_a_token_and_expand_to_any_id():
    dataset = GPTDatasetV1.from_stream(stream_of(range(2**16), vocab_size=2**16), 2**15 - 1, 2**15)
    (gathered,) = dataset.gather(np.array([1, 0]))
    assert gathered.element_size() == 2
    assert gathered.shape == (2, 2**15)
    input_ids, target_ids = dataset.expand(gathered)
    assert input_ids.dtype == target_ids.dtype == torch.int64
    both = torch.cat([input_ids, target_ids[:, -1:]], dim=1)
    assert torch.equal(both, torch.stack([torch.arange(2**15, 2**16), torch.arange(2**15)]))


def test_four_byte_ids_expand_to_any_id():
    ids = [0, 1, 65_535, 65_536, 200_000, 2**31, 2**32 - 1]
    stream = stream_of(ids, dtype=np.uint32, vocab_size=2**32)
    dataset = GPTDatasetV1.from_stream(stream, len(ids) - 1, 1)
    assert pairs_of(dataset) == [(ids[:-1], ids[1:])]


def test_common_tokens_are_the_commonest():
    dataset = GPTDatasetV1.from_stream(stream_of([7, 7, 7, 3, 9, 9, 3, 9, 9, 5], cuts=[4]), 2, 2)
    assert dataset.common_tokens().tolist() == [9, 7, 3, 5]
    assert dataset.common_tokens(2).tolist() == [9, 7]


def test_text_shorter_than_a_window_is_refused():
    tokenizer = get_tokenizer("byte")
    for text in ("", "abcde"):
        with pytest.raises(DataError) as caught:
            GPTDatasetV1(text, tokenizer, max_length=5, stride=1)
        cause = f"needs 6 tokens (one more, to predict) and there are {len(text)} to train on"
        check_refusal(caught.value, "data.max_length=5", cause, "use a longer text or a smaller")
    dataset = GPTDatasetV1("abcdef", tokenizer, max_length=5, stride=1)
    assert [(x.tolist(), y.tolist()) for x, y in dataset] == [([*b"abcde"], [*b"bcdef"])]


@pytest.mark.parametrize("kind", [GPTDatasetV1, DocumentWindows])
@pytest.mark.parametrize(("max_length", "stride"), [(0, 1), (1, 0), (-1, 1), (1, -1)])
def test_windows_that_cannot_be_are_refused(max_length, stride, kind):
    with pytest.raises(ValueError, match=f"max_length={max_length} and stride={stride}"):
        kind("some text", get_tokenizer("byte"), max_length, stride)


# ---------------------------------------------------------------------- windows within documents

END = 9  # the end-of-text token of the streams below


def windows_within_documents(documents, max_length, stride) -> list[tuple[list[int], list[int]]]:
    """The plain definition: each document by itself, with the next one's first token to predict;
    a window every `stride` tokens until one has reached the document's end."""
    windows = []
    for number, document in enumerate(documents):
        is_last = number == len(documents) - 1
        input_ids, target_ids = document, document[1:] + ([] if is_last else [END])
        for start in range(0, len(target_ids), stride):
            inputs = input_ids[start : start + max_length]
            targets = target_ids[start : start + max_length]
            inputs += [END] * (max_length - len(inputs))
            targets += [IGNORED] * (max_length - len(targets))
            windows.append((inputs, targets))
            if start + max_length >= len(target_ids):
                break
    return windows


@st.composite
def document_lists(draw) -> list[list[int]]:
    """Documents, each beginning with END; the first may be the rest of one that was cut."""
    texts = draw(st.lists(st.lists(st.integers(0, 8), max_size=13), min_size=1, max_size=8))
    documents = [[END, *text] for text in texts]
    if len(documents[0]) > 1 and draw(st.booleans()):
        documents[0] = documents[0][1:]
    return documents


def document_windows(documents, max_length, stride, cuts=()) -> DocumentWindows:
    ids = list(itertools.chain(*documents))
    cuts = [min(cut, len(ids)) for cut in cuts]
    return DocumentWindows.from_stream(stream_of(ids, cuts, vocab_size=10), max_length, stride)


@many
@given(
    document_lists(),
    st.integers(1, 6),
    st.integers(1, 6),
    st.sets(st.integers(0, 100), max_size=4),
)
@example([[END, 1, 2, 3], [END, 1, 2], [END, 1, 2, 3, 4]], 4, 4, ())  # targets: 4, 3, 4
@example([[END, 1, 2, 3, 4], [END, 1, 2, 3, 4]], 4, 2, ())
@example([[END], [END], [END]], 1, 1, ())
def test_windows_within_documents_equal_the_plain_definition(documents, max_length, stride, cuts):
    stride = min(stride, max_length)
    if sum(map(len, documents)) <= max_length:
        with pytest.raises(DataError, match=r"data\.max_length="):
            document_windows(documents, max_length, stride)
        return
    expected = windows_within_documents(documents, max_length, stride)
    dataset = document_windows(documents, max_length, stride, cuts)
    assert len(dataset) == len(expected)
    assert pairs_of(dataset) == expected
    assert [(x.tolist(), y.tolist()) for x, y in dataset] == expected
    backwards = dataset.batch(np.arange(len(dataset))[::-1])[1].tolist()
    assert backwards == [targets for _, targets in expected][::-1]


@some
@given(document_lists(), st.integers(1, 4), st.integers(1, 9))
@example([[END, 1, 2, 3, 4, 5], [END, 1]], 4, 8)
@example([[END, 1, 2, 3, 4, 5]], 4, 8)
def test_windows_within_documents_with_gaps_between_them(documents, max_length, gap):
    """None begins behind its document's last target, where nothing could be asked for."""
    if sum(map(len, documents)) <= max_length:
        return
    stride = max_length + gap
    expected = windows_within_documents(documents, max_length, stride)
    dataset = document_windows(documents, max_length, stride)
    assert pairs_of(dataset) == expected


@many
@given(document_lists(), st.integers(1, 6), st.sets(st.integers(0, 100), max_size=4))
def test_every_token_within_documents_is_predicted_once(documents, max_length, cuts):
    """By its place in the text, from what precedes it in its document and nothing else."""
    if sum(map(len, documents)) <= max_length:
        return
    dataset = document_windows(documents, max_length, max_length, cuts)
    predicted = []
    for input_ids, target_ids in pairs_of(dataset):
        counted = [target for target in target_ids if target != IGNORED]
        assert counted  # a window without a target would have no mean loss
        assert target_ids == counted + [IGNORED] * (max_length - len(counted))
        assert input_ids[1 : len(counted)] == counted[:-1]
        assert END not in input_ids[1 : len(counted)]  # the next document is not looked into
        assert set(input_ids[len(counted) :]) <= {END, *counted[-1:]}
        predicted += counted
    # Each document's first token is the last one to be predicted from the document before.
    assert predicted == list(itertools.chain(*documents))[1:]


@pytest.mark.parametrize(
    ("length", "windows"),
    [
        (1, [([END, END], [END, IGNORED])]),
        (2, [([END, 1], [1, END])]),
        (3, [([END, 1], [1, 2]), ([2, END], [END, IGNORED])]),
        (4, [([END, 1], [1, 2]), ([2, 3], [3, END])]),
    ],
)
def test_windows_of_documents_of_each_length(length, windows):
    """In words: before the last document, which is of two tokens."""
    dataset = document_windows([[END, 1, 2, 3][:length], [END, 5]], 2, 2)
    assert pairs_of(dataset) == [*windows, ([END, 5], [5, IGNORED])]


def test_windows_within_documents_are_two_bytes_a_token():
    dataset = document_windows([[END, 1, 2], [END, 3]], 4, 4)
    (gathered,) = dataset.gather(np.arange(2))
    assert gathered.dtype == torch.int16
    assert gathered.shape == (2, 5)
    assert pairs_of(dataset)[0] == ([END, 1, 2, END], [1, 2, END, IGNORED])


def test_windows_within_documents_know_where_those_of_a_shard_begin():
    """By the shard's own list of documents, without a search."""
    ids = np.array([END, 1, 2, END, 3, END], np.uint16)
    calls = []

    def starts():
        calls.append(1)
        return np.array([0, 3, 5])

    stream = TokenStream([ids], 10, END, starts=[starts])
    dataset = DocumentWindows.from_stream(stream, 4, 4)
    assert calls
    assert pairs_of(dataset) == windows_within_documents([[END, 1, 2], [END, 3], [END]], 4, 4)


# ---------------------------------------------------------------------------- several data sets


def datasets_of(sizes: list[int], kind=GPTDatasetV1) -> list[GPTDatasetV1]:
    """Data sets of so many windows, no two windows alike."""
    made = []
    for number, size in enumerate(sizes):
        ids = [1000 * number + i for i in range(2 * size + 1)]
        made.append(kind.from_stream(stream_of(ids, vocab_size=50257), 2, 2))
    return made


@some
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.data())
def test_mixed_dataset_is_the_concatenation(sizes, draw):
    datasets = datasets_of(sizes)
    assert [len(dataset) for dataset in datasets] == sizes
    mixed = MixedDataset(datasets, [1.0] * len(sizes))
    expected = list(itertools.chain(*(pairs_of(dataset) for dataset in datasets)))
    assert len(mixed) == len(expected)
    assert pairs_of(mixed) == expected
    windows = draw.draw(st.lists(st.integers(0, len(mixed) - 1), min_size=1, max_size=9))
    input_ids, target_ids = mixed.batch(np.array(windows))
    assert list(zip(input_ids.tolist(), target_ids.tolist(), strict=True)) == [
        expected[window] for window in windows
    ]
    (gathered,) = mixed.gather(np.array(windows))
    assert gathered.element_size() == 2


def test_mixed_dataset_of_windows_within_documents():
    one = document_windows([[END, 1], [END, 2, 3, 4]], 3, 3)
    other = document_windows([[END, 5, 6, 7]], 3, 3)
    assert pairs_of(MixedDataset([one, other], [0.5, 0.5])) == pairs_of(one) + pairs_of(other)


def test_common_tokens_of_a_mixture_are_of_each():
    one = GPTDatasetV1.from_stream(stream_of([7, 7, 7, 3, 3, 1]), 2, 2)
    other = GPTDatasetV1.from_stream(stream_of([9, 9, 9, 7, 7, 2]), 2, 2)
    mixed = MixedDataset([one, other], [0.9, 0.1])
    assert set(mixed.common_tokens(4).tolist()) == {7, 3, 9}
    assert set(mixed.common_tokens().tolist()) == {1, 2, 3, 7, 9}


def test_order_of_a_data_set():
    (dataset,) = datasets_of([9])
    mixed = MixedDataset(datasets_of([3, 6]), [0.7, 0.3])
    for step in range(3):
        alone = order_of(dataset, 4, 5).windows(step).tolist()
        assert alone == WindowOrder(9, 4, 5).windows(step).tolist()
        together = order_of(mixed, 4, 5).windows(step).tolist()
        assert together == WindowOrder([3, 6], 4, 5, [0.7, 0.3]).windows(step).tolist()
    walks = CycleWalks(32)
    expected = WindowOrder(len(walks), 4, 5).windows(1).tolist()
    assert order_of(walks, 4, 5).windows(1).tolist() == expected


@many
@given(st.integers(1, 300), st.integers(1, 320))
def test_evenly_spread_windows(size, most):
    (dataset,) = datasets_of([size])
    windows = evenly(dataset, most)
    assert windows.dtype == np.int64
    assert len(windows) == min(size, most)
    assert windows[0] == 0
    if len(windows) > 1:
        assert windows[-1] == size - 1
        gaps = np.diff(windows)
        assert gaps.min() >= 1
        assert gaps.max() - gaps.min() <= 1


@pytest.mark.parametrize(
    ("sizes", "weights", "most", "expected"),
    [
        ([100, 100], [0.5, 0.5], 4, [0, 99, 100, 199]),
        ([5, 5], [3.0, 1.0], 4, [0, 2, 4, 5]),
        ([100, 2, 1], [0.1, 0.4, 0.5], 10, [0, 100, 101, 102]),  # no source has more than it has
        ([3, 100], [0.999, 0.001], 4, [0, 1, 2, 3]),  # but each has one
    ],
)
def test_evenly_spread_windows_of_a_mixture(sizes, weights, most, expected):
    mixed = MixedDataset(datasets_of(sizes), weights)
    assert evenly(mixed, most).tolist() == expected


@some
@given(st.lists(st.sampled_from([0.1, 0.25, 1.0, 3.0]), min_size=2, max_size=6), st.integers(6, 40))
@example([1.0, 1.0, 1.0, 1.0], 6)
def test_evenly_spread_windows_of_a_mixture_are_at_most_so_many(weights, most):
    mixed = MixedDataset(datasets_of([100] * len(weights)), weights)
    windows = evenly(mixed, most)
    assert len(set(windows.tolist())) == len(windows)
    assert set(np.searchsorted(mixed.ends, windows, side="right")) == set(range(len(weights)))
    assert len(windows) <= most


# --------------------------------------------------------------------- settings -> text -> stream


def test_every_document_begins_with_the_end_of_text_token(tmp_path):
    files = [write(tmp_path / f"{name}.txt", name) for name in ("one", "two", "six")]
    tokens = load_stream(byte_config(files), [str(file) for file in files])["train"]
    expected = [256, *b"one", 256, *b"two", 256, *b"six"]
    assert np.concatenate(tokens.arrays).tolist() == expected
    assert tokens.document_starts().tolist() == [0, 4, 8]
    assert ids_of(load_datasets(byte_config(files)).train) == expected
    alone = load_datasets(byte_config(files[1], max_length=3)).train
    assert ids_of(alone) == [256, *b"two"]


def test_documents_of_json_lines(tmp_path):
    lines = "".join(json.dumps({"text": f"t{n}", "body": f"body {n}"}) + "\n" for n in range(2))
    path = write(tmp_path / "a.jsonl", lines)
    assert ids_of(load_datasets(byte_config(path)).train) == [256, *b"t0", 256, *b"t1"]
    other = load_datasets(byte_config(path, text_key="body")).train
    assert ids_of(other) == [256, *b"body 0", 256, *b"body 1"]


@pytest.mark.parametrize(("endoftext", "number"), [("token", 1), ("text", 13)])
def test_end_of_text_written_in_a_file(endoftext, number, tmp_path):
    path = write(tmp_path / "a.txt", f"ab{END_OF_TEXT}c")
    ids = ids_of(load_datasets(byte_config(path, endoftext=endoftext)).train)
    assert len(ids) == 1 + 3 + number
    assert ids.count(256) == (2 if endoftext == "token" else 1)


@pytest.mark.parametrize("within_documents", [False, True])
def test_windows_are_cut_as_the_settings_say(within_documents, tmp_path):
    path = write(tmp_path / "a.txt", END_OF_TEXT.join(["abcdefghi", "jk"]))
    loaded = load_datasets(byte_config(path, stride=3, within_documents=within_documents))
    documents = [[256, *b"abcdefghi"], [256, *b"jk"]]
    assert type(loaded.train) is (DocumentWindows if within_documents else GPTDatasetV1)
    assert (loaded.train.max_length, loaded.train.stride) == (4, 3)
    first_inputs = [input_ids[0] for input_ids, _ in pairs_of(loaded.train)]
    if within_documents:
        assert first_inputs == [256, *b"cf", 256]
        assert pairs_of(loaded.train)[-1] == ([256, *b"jk", 256], [*b"jk", -100, -100])
    else:
        ids = list(itertools.chain(*documents))
        assert first_inputs == ids[0 : len(ids) - 4 : 3]


def test_synthetic_sequences_need_no_text():
    config = DataConfig(tokenizer="byte", max_length=32, synthetic="induction")
    loaded = load_datasets(config)
    assert isinstance(loaded.train, CycleWalks)
    assert isinstance(loaded.val, RepeatedSequences)
    assert loaded.train.max_length == loaded.val.max_length == 32
    assert (loaded.checksums, loaded.notes) == ([], [])


# ------------------------------------------------------------------------- what to validate on

INSIDE = "the validation part begins inside a document, as the documents are long"


def split_of(ids: list[int], val_fraction: float) -> tuple[int, list[str]]:
    """The plain definition: (where the validation part begins, what the user is told)."""
    wished = len(ids) - int(len(ids) * val_fraction)
    reach = int(len(ids) * val_fraction) // 2
    starts = [place for place in range(1, len(ids)) if ids[place] == 256]
    near = [(abs(place - wished), place) for place in starts if abs(place - wished) <= reach]
    if near:
        return min(near)[1], []
    return wished, [INSIDE] if starts else []


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("texts")


@many
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=9),
    st.sampled_from([0.05, 0.1, 0.25, 0.5, 0.9]),
    st.integers(1, 3),
    st.none() | st.integers(1, 5),
)
@example([99], 0.1, 3, None)
@example([90, 8], 0.1, 3, None)
@example([50, 48], 0.1, 3, None)
@example([19, 19, 19, 19], 0.5, 1, None)
@example([10, 75, 4, 10], 0.2, 3, 1)  # two are as near: the first
def test_validation_is_the_end_of_the_text(folder, lengths, val_fraction, max_length, stride):
    lengths[0] = max(1, lengths[0])
    texts = ["".join(chr(97 + (n + i) % 26) for i in range(k)) for n, k in enumerate(lengths)]
    path = write(folder / "a.txt", END_OF_TEXT.join(texts))
    ids = list(itertools.chain(*([256, *text.encode()] for text in texts)))
    config = byte_config(path, max_length=max_length, stride=stride, val_fraction=val_fraction)
    place, notes = split_of(ids, val_fraction)
    parts = {
        f"data.path={path}": len(ids),
        f"data.val_fraction={val_fraction}": len(ids) - place,
        f"data.max_length={max_length}": place,
    }
    for key, size in parts.items():
        if size <= max_length:
            error = refusal(config)
            check_refusal(error, key, f"{size}", "use a longer text")
            return
    loaded = load_datasets(config)
    assert ids_of(loaded.train) == ids[:place]
    assert ids_of(loaded.val) == ids[place:]
    assert loaded.notes == notes
    assert (loaded.train.max_length, loaded.train.stride) == (max_length, stride or max_length)
    assert (loaded.val.max_length, loaded.val.stride) == (max_length, max_length)
    predicted = list(itertools.chain(*(targets for _, targets in pairs_of(loaded.val))))
    assert predicted == ids[place + 1 :][: len(predicted)]  # each once, whatever the stride
    assert len(ids) - place - 1 - len(predicted) < max_length


@pytest.mark.parametrize("within_documents", [False, True])
def test_validation_by_document(within_documents, tmp_path):
    """In words: 100 tokens, ten of them wished for, the nearest document begins at 88."""
    texts = ["a" * 60, "b" * 26, "c" * 11]
    files = [write(tmp_path / f"{n}.txt", text) for n, text in enumerate(texts)]
    loaded = load_datasets(
        byte_config(files, val_fraction=0.1, within_documents=within_documents, max_length=11)
    )
    assert ids_of(loaded.train) == [256, *b"a" * 60, 256, *b"b" * 26]
    assert ids_of(loaded.val) == [256, *b"c" * 11]
    assert pairs_of(loaded.val) == [([256, *b"c" * 10], [*b"c" * 11])]
    assert loaded.notes == []


def test_validation_inside_a_document(tmp_path):
    """In words: the nearest beginning is 6 away, and half of what is wished for is 5."""
    texts = ["a" * 83, "b" * 15]
    files = [write(tmp_path / f"{n}.txt", text) for n, text in enumerate(texts)]
    loaded = load_datasets(byte_config(files, val_fraction=0.1))
    assert ids_of(loaded.train) == [256, *b"a" * 83, 256, *b"b" * 5]
    assert ids_of(loaded.val) == [*b"b" * 10]
    assert loaded.notes == [INSIDE]


def test_validation_inside_the_only_document_needs_no_note(tmp_path):
    loaded = load_datasets(byte_config(write(tmp_path / "a.txt", "x" * 99), val_fraction=0.1))
    assert ids_of(loaded.val) == [*b"x" * 10]
    assert loaded.notes == []


def test_no_validation_at_zero(tmp_path):
    loaded = load_datasets(byte_config(write(tmp_path / "a.txt", "ten bytes."), val_fraction=0.0))
    assert isinstance(loaded, Loaded)
    assert loaded.val is None
    assert ids_of(loaded.train) == [256, *b"ten bytes."]


@pytest.mark.parametrize("val_fraction", [0.0, 0.5])
def test_validation_on_a_text_of_its_own(val_fraction, tmp_path):
    path = write(tmp_path / "a.txt", "to be trained on")
    files = [write(tmp_path / "val" / name, f"is {name}") for name in ("b.txt", "c.txt")]
    config = byte_config(
        path, val_fraction=val_fraction, val_path=str(tmp_path / "val"), stride=1, max_length=6
    )
    loaded = load_datasets(config)
    assert ids_of(loaded.train) == [256, *b"to be trained on"]
    assert ids_of(loaded.val) == [256, *b"is b.txt", 256, *b"is c.txt"]
    assert loaded.val.stride == 6
    assert loaded.notes == []
    in_turn = [str(file) for file in reversed(files)]
    loaded = load_datasets(byte_config(path, val_path=in_turn, within_documents=True))
    assert ids_of(loaded.val) == [256, *b"is c.txt", 256, *b"is b.txt"]
    assert type(loaded.val) is DocumentWindows
    alone = [load_datasets(byte_config(p)).checksums for p in (path, in_turn)]
    assert loaded.checksums == alone[0] + alone[1]  # both are to stay what they were


@pytest.mark.parametrize("content", [b"abc", b"\xef\xbb\xbf"], ids=["short", "a mark alone"])
def test_validation_text_shorter_than_a_window_is_refused(content, tmp_path):
    path = write(tmp_path / "a.txt", "to be trained on")
    val_path = write(tmp_path / "val.txt", content)
    error = refusal(byte_config(path, val_path=str(val_path)))
    check_refusal(error, f"data.val_path={val_path}", "a window needs 5", "use a longer text")


# ------------------------------------------------------------------ small texts: clear refusals


@pytest.mark.parametrize("within_documents", [False, True])
@pytest.mark.parametrize("max_length", [1, 4, 17])
def test_a_text_of_about_one_window_without_validation(max_length, within_documents, tmp_path):
    """A window of T needs T + 1 tokens: a text of T bytes, as the end-of-text token precedes it."""
    configs = {
        size: byte_config(
            write(tmp_path / f"{size}.txt", "x" * size),
            max_length=max_length,
            within_documents=within_documents,
        )
        for size in (max_length - 1, max_length, max_length + 1)
        if size > 0
    }
    if max_length > 1:
        cause = f"needs {max_length + 1} tokens (one more, to predict) and there are {max_length}"
        fix = "use a longer text or a smaller data.max_length"
        error = refusal(configs[max_length - 1])
        check_refusal(error, f"data.max_length={max_length}", cause, fix)
    one_window = ([256, *b"x" * (max_length - 1)], [*b"x" * max_length])
    assert pairs_of(load_datasets(configs[max_length]).train) == [one_window]
    # One more: no second window, but where windows are filled up.
    assert len(load_datasets(configs[max_length + 1]).train) == 1 + (
        within_documents or max_length == 1
    )


@pytest.mark.parametrize("val_fraction", [0.1, 0.5])
def test_a_text_of_about_one_window_with_validation(val_fraction, tmp_path):
    fix = "use a longer text, or data.max_length=3 data.val_fraction=0 to train on all of it in one"
    path = write(tmp_path / "less.txt", "abc")  # four tokens: one too few
    config = byte_config(path, val_fraction=val_fraction)
    check_refusal(refusal(config), f"data.path={path}", "4 tokens, and a window needs 5", fix)
    # As it says:
    assert len(load_datasets(byte_config(path, max_length=3)).train) == 1
    for name, text in (("exact", "abcd"), ("more", "abcde")):
        path = write(tmp_path / f"{name}.txt", text)
        size = len(text) + 1
        error = refusal(byte_config(path, val_fraction=val_fraction))
        cause = f"leaves {int(size * val_fraction)} of {size} tokens for validation, and a window"
        fix = "use a longer text, a larger data.val_fraction (0 for none) or a smaller data.max_l"
        check_refusal(error, f"data.val_fraction={val_fraction}", cause, fix)
        assert len(load_datasets(byte_config(path, val_fraction=0.0)).train) == 1


def test_validation_shorter_than_a_window_is_refused(tmp_path):
    path = write(tmp_path / "a.txt", "x" * 39)
    # Forty tokens. Five of them are one window, four are none.
    assert len(load_datasets(byte_config(path, val_fraction=0.125)).val) == 1
    for val_fraction, num_val in ((0.1, 4), (0.01, 0)):
        error = refusal(byte_config(path, val_fraction=val_fraction))
        cause = f"leaves {num_val} of 40 tokens for validation, and a window needs 5"
        fix = "use a longer text, a larger data.val_fraction (0 for none) or a smaller data.max_l"
        check_refusal(error, f"data.val_fraction={val_fraction}", cause, fix)


def test_training_part_shorter_than_a_window_is_refused(tmp_path):
    path = write(tmp_path / "a.txt", "x" * 39)
    assert len(load_datasets(byte_config(path, val_fraction=0.875)).train) == 1
    error = refusal(byte_config(path, val_fraction=0.9))
    check_refusal(error, "data.max_length=4", "there are 4 to train on", "use a longer text")


@pytest.mark.parametrize("val_fraction", [0.0, 0.1])
def test_a_text_of_a_byte_order_mark_alone_is_refused(val_fraction, tmp_path):
    error = refusal(byte_config(write(tmp_path / "a.txt", "\ufeff"), val_fraction=val_fraction))
    key = f"data.val_fraction={val_fraction}" if val_fraction else "data.max_length=4"
    check_refusal(error, key, " 0 ", "use a longer text")


# ------------------------------------------------------------------------------------- mixtures


def test_a_mixture_of_texts(tmp_path):
    """Each source is split by itself."""
    files = [write(tmp_path / "a.txt", "a" * 99), write(tmp_path / "b.txt", "b" * 39)]
    config = byte_config(files, weights=[0.7, 0.3], val_fraction=0.25)
    loaded = load_datasets(config)
    alone = [load_datasets(byte_config(file, val_fraction=0.25)) for file in files]
    for mixed, parts in (
        (loaded.train, [source.train for source in alone]),
        (loaded.val, [source.val for source in alone]),
    ):
        assert isinstance(mixed, MixedDataset)
        assert mixed.weights == [0.7, 0.3]
        assert mixed.sizes == [len(part) for part in parts]
        assert pairs_of(mixed) == pairs_of(parts[0]) + pairs_of(parts[1])
    assert loaded.checksums == alone[0].checksums + alone[1].checksums
    without = load_datasets(byte_config(files, weights=[0.7, 0.3]))
    assert without.val is None
    order = order_of(loaded.train, 20, 0).windows(0)
    assert (order < loaded.train.sizes[0]).sum() == 14


def test_notes_of_a_mixture_are_those_of_its_sources(tmp_path):
    long_documents = [write(tmp_path / "a" / f"{n}.txt", "a" * 80) for n in range(2)]
    single = write(tmp_path / "b.txt", "b" * 99)
    config = byte_config([long_documents[0].parent, single], weights=[1.0, 1.0], val_fraction=0.1)
    assert load_datasets(config).notes == [INSIDE]


def test_entries_without_weights_are_one_text(tmp_path):
    files = [write(tmp_path / f"{n}.txt", letter * 5) for n, letter in enumerate("ba")]
    loaded = load_datasets(byte_config(files))
    assert type(loaded.train) is GPTDatasetV1
    assert ids_of(loaded.train) == [256, *b"bbbbb", 256, *b"aaaaa"]


def test_a_large_text_is_better_prepared(tmp_path, monkeypatch, capsys):
    text = write(tmp_path / "a.txt", "a" * 49)
    tokens = token_file(tmp_path / "a.bin", b"a" * 60)
    monkeypatch.setattr(data, "LARGE", 50)
    load_datasets(byte_config(text))
    assert capsys.readouterr().err == ""
    write(text, "a" * 51)
    load_datasets(byte_config(text))
    command = f"python -m scripts.prepare_data data.path={text} out=DIR\n"
    assert capsys.readouterr().err.endswith(f"once and for all: {command}")
    apart = write(tmp_path / "it's apart.txt", "a" * 51)
    load_datasets(byte_config(apart))
    assert f"data.path={apart}" in shlex.split(capsys.readouterr().err)
    load_datasets(byte_config(tokens))  # that is what was done
    assert capsys.readouterr().err == ""


def test_a_single_weighted_path_is_that_path(tmp_path, monkeypatch):
    """And not its letters, one after the other."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a", "the text that is named")
    write(tmp_path / "data.txt", "the text that is meant")
    for path in ("a", "data.txt"):
        config = byte_config(path, weights=[1.0])
        assert config.problems() == []
        expected = load_datasets(byte_config(path)).train
        assert pairs_of(load_datasets(config).train) == pairs_of(expected)


def test_validation_of_a_mixture_on_a_text_of_its_own(tmp_path):
    """On each of its windows once, however many sources there are."""
    files = [write(tmp_path / f"{n}.txt", letter * 20) for n, letter in enumerate("abc")]
    val_path = write(tmp_path / "val.txt", "not of any of the sources")
    loaded = load_datasets(
        byte_config(files, weights=[0.5, 0.3, 0.2], val_fraction=0.1, val_path=str(val_path))
    )
    alone = load_datasets(byte_config(files[0], val_path=str(val_path)))
    assert loaded.train.sizes == [5, 5, 5]
    assert pairs_of(loaded.val) == pairs_of(alone.val)


# ---------------------------------------------------------------------------------- token files


def token_file(path: Path, text: bytes) -> Path:
    """One token a byte, plain, as nanoGPT writes them."""
    return write(path, np.frombuffer(text, np.uint8).astype("<u2").tobytes())


def shard(path: Path, text: bytes) -> Path:
    """One token a byte behind a header, as llm.c writes them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(path, 256)
    writer.append(np.array([256, *text], np.uint16))
    writer.close()
    return path


@pytest.mark.parametrize("count", [0, 4])
def test_a_file_named_val_shorter_than_a_window_is_refused(count, tmp_path):
    token_file(tmp_path / "train.bin", b"to be trained on")
    writer = ShardWriter(tmp_path / "val.bin", 256)
    writer.append(np.arange(count, dtype=np.uint16))
    writer.close()
    message = str(refusal(byte_config(tmp_path, val_fraction=0.1)))
    assert f"{count} " in message
    assert "needs 5" in message
    assert "to train on" not in message
    assert "to validate on" in message or "val.bin" in message


@pytest.mark.parametrize("val_fraction", [0.1, 0.5])
def test_files_named_val_are_to_validate_on(val_fraction, tmp_path):
    token_file(tmp_path / "nano" / "train.bin", b"to be trained on")
    token_file(tmp_path / "nano" / "val.bin", b"to validate on")
    loaded = load_datasets(byte_config(tmp_path / "nano", val_fraction=val_fraction))
    assert ids_of(loaded.train) == [*b"to be trained on"]
    assert ids_of(loaded.val) == [*b"to validate on"]
    shard(tmp_path / "llmc" / "web_train_000002.bin", b"second")
    shard(tmp_path / "llmc" / "web_train_000001.bin", b"first")
    shard(tmp_path / "llmc" / "web_val_000000.bin", b"held back")
    loaded = load_datasets(byte_config(tmp_path / "llmc", val_fraction=val_fraction, stride=1))
    assert ids_of(loaded.train) == [256, *b"first", 256, *b"second"]
    assert ids_of(loaded.val) == [256, *b"held back"]
    assert (loaded.train.stride, loaded.val.stride) == (1, 4)
    assert "validating on the files named val (web_val_000000.bin)" in loaded.notes[0]
    names = [name for name, _ in loaded.checksums]
    assert names == ["web_train_000001.bin", "web_train_000002.bin", "web_val_000000.bin"]


def test_files_named_val_are_left_out_where_nothing_is_held_back(tmp_path):
    token_file(tmp_path / "train.bin", b"to be trained on")
    token_file(tmp_path / "val.bin", b"to validate on")
    loaded = load_datasets(byte_config(tmp_path, val_fraction=0.0))
    assert loaded.val is None
    assert ids_of(loaded.train) == [*b"to be trained on"]


def test_validation_on_token_files_of_their_own(tmp_path):
    token_file(tmp_path / "train.bin", b"to be trained on")
    token_file(tmp_path / "val.bin", b"not these")
    other = token_file(tmp_path / "other" / "held.bin", b"but these")
    loaded = load_datasets(byte_config(tmp_path, val_path=str(other), val_fraction=0.1))
    assert ids_of(loaded.train) == [*b"to be trained on"]
    assert ids_of(loaded.val) == [*b"but these"]


def test_token_files_without_one_for_validation_are_split(tmp_path):
    path = token_file(tmp_path / "train.bin", b"x" * 90 + b"y" * 10)
    loaded = load_datasets(byte_config(path, val_fraction=0.1))
    assert ids_of(loaded.train) == [*b"x" * 90]
    assert ids_of(loaded.val) == [*b"y" * 10]


def test_shards_in_a_list_are_read_in_its_order(tmp_path):
    """And windows reach from one into the next."""
    texts = {"c.bin": b"first", "a.bin": b"x", "b.bin": b"then the last"}
    files = [shard(tmp_path / name, text) for name, text in texts.items()]
    ids = list(itertools.chain(*([256, *text] for text in texts.values())))
    loaded = load_datasets(byte_config(files, stride=1, max_length=7))
    expected = [(ids[i : i + 7], ids[i + 1 : i + 8]) for i in range(len(ids) - 7)]
    assert pairs_of(loaded.train) == expected
    assert len(loaded.train.tokens.arrays) == 3
    mixed = load_datasets(byte_config([files[2], files[0]], weights=[0.5, 0.5]))
    assert pairs_of(mixed.train) == [
        *pairs_of(load_datasets(byte_config(files[2])).train),
        *pairs_of(load_datasets(byte_config(files[0])).train),
    ]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Three texts of several documents each."""
    folder = tmp_path_factory.mktemp("texts")
    for name in "abc":
        documents = [
            " ".join(
                f"{name}{n} don't 1234 日本語 {'word ' * (n * 7 % 23)}" for n in range(first, 12)
            )
            for first in range(12)
        ]
        write(folder / f"{name}.txt", END_OF_TEXT.join(documents))
    return folder


def prepared(texts: Path, folder: Path, tokenizer: str, shard_tokens: int) -> Path:
    recipe = Recipe(tokenizer, "token", "tiktoken", 512, shard_tokens)
    files = sorted(map(str, texts.glob("*.txt")))
    preparation = Preparation(files, folder, "text", recipe)
    assert preparation.begin()
    preparation.run(preparation.unfinished(), 1, lambda count: None)
    manifest = preparation.finish()
    assert len(manifest["shards"]) > 10
    return folder


@pytest.mark.parametrize("within_documents", [False, True])
@pytest.mark.parametrize(("tokenizer", "shard_tokens"), [("byte", 1000), ("gpt2", 400)])
def test_shards_give_the_windows_of_the_text(
    tokenizer, shard_tokens, within_documents, texts, tmp_path
):
    folder = prepared(texts, tmp_path / "shards", tokenizer, shard_tokens)
    values = {"tokenizer": tokenizer, "max_length": 60, "stride": 25, "val_fraction": 0.1}
    values["within_documents"] = within_documents
    of_text, of_shards = (load_datasets(byte_config(path, **values)) for path in (texts, folder))
    assert len(of_text.train.tokens.arrays) == 1
    assert len(of_shards.train.tokens.arrays) > 10
    for one, other in ((of_text.train, of_shards.train), (of_text.val, of_shards.val)):
        assert len(one) > 5
        assert type(one) is type(other) is (DocumentWindows if within_documents else GPTDatasetV1)
        assert pairs_of(one) == pairs_of(other)
        starts, others = one.tokens.document_starts(), other.tokens.document_starts()
        assert starts.tolist() == others.tolist()
    assert of_text.notes == of_shards.notes == []
    for step in range(3):
        windows = order_of(of_text.train, 8, 0).windows(step)
        assert windows.tolist() == order_of(of_shards.train, 8, 0).windows(step).tolist()


# --------------------------------------------------------------------------------- other tokens


FIX = "restore the data, or give another name= for a new run"
BEFORE = [("a.bin", ["1", "2", "3"]), ("b.bin", ["4"])]


@pytest.mark.parametrize(
    ("now", "cause"),
    [
        (
            [("a.bin", ["x", "2", "3"]), ("b.bin", ["4"])],
            "a.bin is another from byte 0 on than the one that the checkpoint was trained on",
        ),
        ([("a.bin", ["1", "2", "x"]), ("b.bin", ["4"])], f"a.bin is another from byte {2**23} on"),
        ([("a.bin", ["1", "2", "3"]), ("b.bin", ["x"])], "b.bin is another from byte 0 on"),
        ([("a.bin", ["1", "2"]), ("b.bin", ["4"])], f"a.bin is another from byte {2**23} on"),
        ([("a.bin", ["1", "2", "3"]), ("b.bin", ["4", "5"])], f"from byte {BLOCK_BYTES} on"),
        ([("a.bin", ["1", "2", ""]), ("b.bin", ["x"])], "b.bin is another from byte 0 on"),
        (
            [("a.bin", ["1", "2", "3"]), ("c.bin", ["4"])],
            "the checkpoint was trained on b.bin where there is c.bin now",
        ),
        (BEFORE[:1], "trained on b.bin where there is none now"),
        ([*BEFORE, ("c.bin", [])], "trained on none where there is c.bin now"),
        ([BEFORE[1], BEFORE[0]], "trained on a.bin where there is b.bin now"),
    ],
)
def test_other_tokens_than_a_checkpoints_are_refused(now, cause):
    with pytest.raises(DataError) as caught:
        check_unchanged(BEFORE, now, "shards")
    check_refusal(caught.value, "data.path=shards", cause, FIX)


@pytest.mark.parametrize(
    "now",
    [
        BEFORE,
        json.loads(json.dumps(BEFORE)),  # as a checkpoint keeps them: lists
        [("a.bin", ["1", "", "3"]), ("b.bin", [""])],  # not read: not compared
    ],
)
def test_the_same_tokens_are_no_change(now):
    check_unchanged(BEFORE, now, "shards")
    check_unchanged(now, BEFORE, "shards")


def test_a_changed_text_is_noticed(tmp_path):
    path = write(tmp_path / "a.txt", "the text that was trained on")
    before = load_datasets(byte_config(path)).checksums
    elsewhere = write(tmp_path / "moved" / "b.txt", path.read_bytes())
    check_unchanged(before, load_datasets(byte_config(elsewhere)).checksums, elsewhere)
    split = load_datasets(byte_config(path, val_fraction=0.5)).checksums
    check_unchanged(before, split, path)  # what is held back is of the same text
    write(path, "the text that is trained on")
    with pytest.raises(DataError) as caught:
        check_unchanged(before, load_datasets(byte_config(path)).checksums, path)
    check_refusal(caught.value, f"data.path={path}", "is another from byte 0 on", FIX)


def test_a_changed_shard_is_noticed(tmp_path):
    train = token_file(tmp_path / "train.bin", b"x" * 3_000_000)
    token_file(tmp_path / "val.bin", b"held back")
    before = load_datasets(byte_config(tmp_path)).checksums
    assert [(name, len(blocks)) for name, blocks in before] == [("train.bin", 2), ("val.bin", 1)]
    token_file(train, b"x" * 2_500_000 + b"y" + b"x" * 499_999)
    with pytest.raises(DataError) as caught:
        check_unchanged(before, load_datasets(byte_config(tmp_path)).checksums, tmp_path)
    cause = f"train.bin is another from byte {BLOCK_BYTES} on"
    check_refusal(caught.value, f"data.path={tmp_path}", cause, FIX)


# ------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("path", None), ("path", ""), ("path", [])),
        *(("tokenizer", "words"), ("max_length", 0), ("stride", 0), ("endoftext", "keep")),
        *(("val_fraction", -0.1), ("val_fraction", 1.0), ("val_fraction", float("nan"))),
        *(("verify", "maybe"), ("verify", None), ("synthetic", "words")),
        *(("weights", []), ("weights", [1.0, 2.0])),
        *(("weights", [0.0]), ("weights", [-1.0])),
        *(("weights", [float("nan")]), ("weights", [float("inf")])),
    ],
)
def test_settings_name_each_problem(key, value):
    assert DataConfig(path="a.txt").problems() == []
    assert DataConfig(path=["a.txt"], stride=1, val_fraction=0.0, verify=False).problems() == []
    found = DataConfig(**({"path": "a.txt"} | {key: value})).problems()
    assert [problem[:2] for problem in found] == [(key, value)]
    _, _, cause, fix = found[0]
    assert cause
    assert fix


def test_settings_name_all_problems_at_once():
    values = {
        "path": None,
        "tokenizer": "words",
        "max_length": 0,
        "stride": 0,
        "val_fraction": 2.0,
        "endoftext": "keep",
        "verify": "maybe",
        "weights": [1.0],
    }
    assert [problem[:2] for problem in DataConfig(**values).problems()] == list(values.items())


@pytest.mark.parametrize(
    ("path", "weights", "cause", "fix"),
    [
        (["a", "b"], [0.5], "data.path has 2 entries", "one weight for each"),
        (["a", "b"], [0.5, 0.3, 0.2], "data.path has 2 entries", "one weight for each"),
        ("a", [0.5, 0.5], "data.path has 1 entries", "one weight for each"),
        (["a", "b"], [1.0, 0.0], "must be more than 0", "leave the entry out of data.path"),
        (["a", "b"], [1.0, -0.5], "must be more than 0", "leave the entry out of data.path"),
        (["a", "b"], [1.0, 0.333333], "repeats after more than 100,000", "of fewer digits"),
        (["a", "b"], [1.0, 100_000.0], "repeats after more than 100,000", "of fewer digits"),
    ],
)
def test_weights_that_do_not_fit_are_problems(path, weights, cause, fix):
    ((key, value, told_cause, told_fix),) = DataConfig(path=path, weights=weights).problems()
    assert (key, value) == ("weights", weights)
    assert cause in told_cause
    assert fix in told_fix


@pytest.mark.parametrize(
    ("path", "weights"),
    [
        (["a"], [0.123456]),
        (["a", "b"], [0.7, 0.3]),
        (["a", "b", "c"], [1, 2, 3]),
        (["a", "b"], [1.0, 99_999.0]),
        (["a", "b"], [123456.0, 123456.0]),
    ],
)
def test_weights_that_fit_are_no_problem(path, weights):
    assert DataConfig(path=path, weights=weights).problems() == []


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({}, None),
        ({"path": "a.txt"}, "path"),
        ({"tokenizer": "gpt2"}, "synthetic"),
        ({"max_length": 15}, "synthetic"),
        ({"max_length": 125}, "synthetic"),
        ({"weights": [1.0]}, "weights"),
    ],
)
def test_synthetic_sequences_take_no_text_and_bytes_only(changes, key):
    values = {"tokenizer": "byte", "max_length": 64, "synthetic": "induction"} | changes
    assert [problem[0] for problem in DataConfig(**values).problems()] == ([key] if key else [])


# ------------------------------------------------------------------------------------ dataloader

NUMBERS = " ".join(str(i % 10) for i in range(101))  # 101 tokens: "0", " 1", " 2", ...


def read_all(loader) -> list[tuple[list[int], list[int]]]:
    """All windows of a loader as (input ids, target ids)."""
    return [
        pair
        for input_ids, target_ids in loader
        for pair in zip(input_ids.tolist(), target_ids.tolist(), strict=True)
    ]


@pytest.mark.parametrize(("drop_last", "batch_sizes"), [(True, [4, 4, 4]), (False, [4, 4, 4, 2])])
@pytest.mark.parametrize("shuffle", [True, False])
def test_dataloader_shapes(shuffle, drop_last, batch_sizes):
    loader = create_dataloader(
        NUMBERS, batch_size=4, max_length=9, stride=7, shuffle=shuffle, drop_last=drop_last
    )  # windows start at 0, 7, ..., 91: 14
    batches = list(loader)
    assert len(loader) == len(batches) == len(batch_sizes)
    for (input_ids, target_ids), batch_size in zip(batches, batch_sizes, strict=True):
        assert input_ids.shape == target_ids.shape == (batch_size, 9)
        assert input_ids.dtype == target_ids.dtype == torch.int64
        assert torch.equal(input_ids[:, 1:], target_ids[:, :-1])


def test_dataloader_in_order():
    loader = create_dataloader(
        NUMBERS, batch_size=3, max_length=5, stride=2, shuffle=False, drop_last=False
    )
    expected = classic_windows(NUMBERS, get_tokenizer("gpt2"), 5, 2)
    assert read_all(loader) == [(x.tolist(), y.tolist()) for x, y in expected]


def test_dataloader_shuffled():
    options = {"batch_size": 3, "max_length": 5, "stride": 1, "drop_last": False}
    in_order = read_all(create_dataloader(NUMBERS, shuffle=False, **options))
    torch.manual_seed(0)
    shuffled = read_all(create_dataloader(NUMBERS, shuffle=True, **options))
    assert shuffled != in_order
    assert sorted(shuffled) == sorted(in_order)


def test_dataloader_of_a_text_that_is_too_short():
    with pytest.raises(DataError, match=r"data\.max_length=256: a window needs 257 tokens"):
        create_dataloader(NUMBERS)


def test_dataloader_without_a_whole_batch_is_refused():
    options = {"batch_size": 15, "max_length": 9, "stride": 7}  # 14 windows
    with pytest.raises(DataError) as caught:
        create_dataloader(NUMBERS, **options)
    cause = "the text has 14 windows, and drop_last would leave no batch at all"
    check_refusal(caught.value, "batch_size=15", cause, "a smaller batch_size or drop_last=False")
    assert len(read_all(create_dataloader(NUMBERS, drop_last=False, **options))) == 14
