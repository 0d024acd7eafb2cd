"""data.py: windows and data sets, each against its plain definition, and what is validated on."""

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
from helpers.refusals import refused
from helpers.tally import CAMPAIGN
from helpers.texts import FRAGMENTS, mixes, peak_memory, prepare
from hypothesis import example, given, settings
from hypothesis import strategies as st

import data
from data import (
    DataConfig,
    DocumentWindows,
    GPTDatasetV1,
    MixedDataset,
    WindowOrder,
    check_unchanged,
    create_dataloader,
    encode_text,
    evenly,
    get_tokenizer,
    load_datasets,
    order_of,
)
from errors import DataError
from synthetic import IGNORED, CycleWalks
from tokens import END_OF_TEXT
from tokens.shards import ShardWriter
from tokens.stream import TokenStream

some = settings(max_examples=200 if CAMPAIGN else 25, deadline=None, derandomize=True)

PATTERN = (  # of the kind that GPT-4's encoding has
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
MERGES = ["12", "123", "34", "1234", "th", "the", " t", "(a", "'M", "..", "...", " \n"]


def larger_encoding(last_id: int) -> tiktoken.Encoding:
    """A made-up vocabulary: the bytes, a few merges that GPT-2's pattern would allow in other
    places, and an end-of-text token as `last_id`."""
    words = [*(bytes([byte]) for byte in range(256)), *(merge.encode() for merge in MERGES)]
    return tiktoken.Encoding(
        "larger",
        pat_str=PATTERN,
        mergeable_ranks={word: rank for rank, word in enumerate(words)},
        special_tokens={END_OF_TEXT: last_id},
    )


BYTE = get_tokenizer("byte")
ENCODINGS = {
    "byte": BYTE,
    "gpt2": get_tokenizer("gpt2"),
    "65536 ids": larger_encoding(2**16 - 1),
    "65537 ids": larger_encoding(2**16),
    "200001 ids": larger_encoding(200_000),
}
# GPT-2's own takes a fifth of a second to begin with; test_encoding.py has it under hypothesis.
encodings = st.sampled_from([name for name in ENCODINGS if name != "gpt2"])
cuts = st.sets(st.integers(0, 100), max_size=5)  # where a stream is cut into arrays


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_all(folder: Path, *texts: str) -> list[Path]:
    return [write(folder / f"{n}.txt", text) for n, text in enumerate(texts)]


def load(path: object, **changes) -> data.Loaded:
    """A tiny text with these settings, one token per byte."""
    path = [str(p) for p in path] if isinstance(path, list) else str(path)
    values = {"tokenizer": "byte", "max_length": 4, "val_fraction": 0.0} | changes
    config = DataConfig(path=path, **values)
    assert config.problems() == []
    return load_datasets(config)


def load_refused(key: str, value: object, path: object, **changes) -> str:
    """The hint."""
    with refused(DataError, key, value, exit_code=3) as caught:
        load(path, **changes)
    return caught.value.hint


def stream_of(ids, cuts=(), dtype=np.uint16, vocab_size: int = 257) -> TokenStream:
    """Ids in one array, or in several, cut at these places; the last id ends a text."""
    arrays = np.split(np.array(ids, dtype), sorted(cuts))
    return TokenStream(arrays, vocab_size, vocab_size - 1)


def ids_of(dataset: GPTDatasetV1) -> list[int]:
    """All the ids that windows are cut from."""
    return np.concatenate(dataset.tokens.arrays).tolist()


def pairs_of(dataset, windows=None) -> list[tuple[list[int], list[int]]]:
    """All windows, or these, as (input ids, target ids)."""
    input_ids, target_ids = dataset.batch(np.arange(len(dataset)) if windows is None else windows)
    assert input_ids.dtype == target_ids.dtype == torch.int64
    return as_pairs(zip(input_ids, target_ids, strict=True))


def as_pairs(windows) -> list[tuple[list[int], list[int]]]:
    return [(input_ids.tolist(), target_ids.tolist()) for input_ids, target_ids in windows]


# -------------------------------------------------------------------------------------- windows


def classic_windows(text: str, tokenizer, max_length: int, stride: int) -> list[tuple]:
    """The classic implementation: two lists, filled window by window."""
    token_ids = tokenizer.encode(text, allowed_special={"<|endoftext|>"}, disallowed_special=())
    input_ids, target_ids = [], []
    for i in range(0, len(token_ids) - max_length, stride):
        input_ids.append(torch.tensor(token_ids[i : i + max_length]))
        target_ids.append(torch.tensor(token_ids[i + 1 : i + max_length + 1]))
    return as_pairs(zip(input_ids, target_ids, strict=True))


def check_against_the_classic_one(text, tokenizer, max_length, stride):
    expected = classic_windows(text, tokenizer, max_length, stride)
    if not expected:
        with refused(DataError, "data.max_length", max_length):
            GPTDatasetV1(text, tokenizer, max_length, stride)
        return
    dataset = GPTDatasetV1(text, tokenizer, max_length, stride)
    assert len(dataset) == len(expected)
    assert as_pairs(dataset) == pairs_of(dataset) == expected
    assert as_pairs(dataset[n] for n in range(-len(expected), 0)) == expected
    assert {ids.dtype for ids in dataset[-1]} == {torch.int64}
    for index in (len(expected), -len(expected) - 1):
        with pytest.raises(IndexError):
            dataset[index]


@some
@given(mixes, encodings, st.integers(1, 12), st.integers(1, 15))
@example("1234 12345 the(a THE'Mm.. ...\n", "200001 ids", 1, 1)
@example("abcdef", "byte", 5, 1)  # one window
@example("abcde", "byte", 5, 1)  # none
@example("", "byte", 5, 1)
def test_dataset_equals_the_classic_one(text, name, max_length, stride):
    check_against_the_classic_one(text, ENCODINGS[name], max_length, stride)


def test_dataset_of_gpt2_tokens_equals_the_classic_one():
    for max_length, stride in [(1, 1), (9, 4), (20, 50)]:
        text = "".join(random.Random(max_length).choices(FRAGMENTS, k=200))
        check_against_the_classic_one(text, ENCODINGS["gpt2"], max_length, stride)


@pytest.mark.parametrize("name", ENCODINGS)
def test_ids_are_those_of_tiktoken_in_two_bytes_where_they_fit(name):
    tokenizer = ENCODINGS[name]
    # Lone surrogates are replaced. The made-up pattern keeps "(a" together, where GPT-2's always
    # cuts: a long text must not be encoded in pieces that are right for GPT-2 only.
    for text in ("ab\ud800c \ude42\ud83d d \ud83d\ude42 e", "x" + "(a" * 100_000):
        assert encode_text(text, tokenizer).tolist() == tokenizer.encode(text)
    text = f"the 1234{END_OF_TEXT}\n"
    for endoftext, allowed in [("text", set()), ("token", {END_OF_TEXT})]:
        ids = tokenizer.encode(text, allowed_special=allowed, disallowed_special=())
        assert encode_text(text, tokenizer, endoftext).tolist() == ids
        assert (tokenizer.eot_token in ids) == (endoftext == "token")
    dataset = GPTDatasetV1(text, tokenizer, len(ids) - 1, 1)
    fits = tokenizer.n_vocab <= 2**16
    assert dataset.tokens.dtype == (np.uint16 if fits else np.uint32)
    assert dataset.tokens.vocab_size == tokenizer.n_vocab
    assert dataset.tokens.end_of_text == tokenizer.eot_token
    (gathered,) = dataset.gather(np.array([0]))
    assert gathered.dtype == (torch.int16 if fits else torch.int32)
    assert as_pairs(dataset) == [(ids[:-1], ids[1:])]


@some
@given(st.integers(1, 9), st.integers(1, 9), cuts, st.data())
def test_batch_equals_stacked_items_however_the_stream_is_stored(max_length, stride, cuts, draw):
    stream = stream_of(range(100), cuts)
    dataset = GPTDatasetV1.from_stream(stream, max_length, stride)
    assert dataset.tokens is stream
    windows = draw.draw(st.lists(st.integers(0, len(dataset) - 1), min_size=1, max_size=8))
    ids = [list(range(window * stride, window * stride + max_length + 1)) for window in windows]
    expected = [(of_window[:-1], of_window[1:]) for of_window in ids]
    assert pairs_of(dataset, np.array(windows)) == expected
    assert as_pairs(dataset[window] for window in windows) == expected


def test_gathered_windows_are_as_they_are_stored_and_expand_to_any_id():
    dataset = GPTDatasetV1.from_stream(stream_of(range(2**16), vocab_size=2**16), 2**15 - 1, 2**15)
    (gathered,) = dataset.gather(np.array([1, 0]))
    assert gathered.element_size() == 2
    input_ids, target_ids = dataset.expand(gathered)
    both = torch.cat([input_ids, target_ids[:, -1:]], dim=1)
    assert torch.equal(both, torch.stack([torch.arange(2**15, 2**16), torch.arange(2**15)]))
    ids = [0, 1, 65_535, 65_536, 200_000, 2**31, 2**32 - 1]
    stream = stream_of(ids, dtype=np.uint32, vocab_size=2**32)
    assert pairs_of(GPTDatasetV1.from_stream(stream, len(ids) - 1, 1)) == [(ids[:-1], ids[1:])]


def test_memory_of_windows(tmp_path):
    """Two bytes per token whatever the stride; sixteen bytes per document."""
    encode_text("the tables of the tokenizer are made once", ENCODINGS["gpt2"])
    text = "the of and to in is you that " * 500_000
    dataset, peak = peak_memory(lambda: GPTDatasetV1(text, ENCODINGS["gpt2"], 256, stride=1))
    count = len(dataset.tokens)
    assert count == 4_000_001  # a blank at the end
    assert peak <= 2 * count + 4_000_000
    # The search for the start of a document reads little at a time.
    path = write(tmp_path / "long.txt", b"x y z 123\n" * 1_000_000)
    loaded, peak = peak_memory(lambda: load(path, val_fraction=0.1))
    count = len(loaded.train.tokens) + len(loaded.val.tokens)
    assert peak <= 2.25 * count + 8_000_000  # a growing array is made an eighth larger

    documents = 200_000
    stream = stream_of([256, 1, 2, 3, 4] * documents)
    tracemalloc.start()
    dataset = DocumentWindows.from_stream(stream, 4, 4)
    stays, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(dataset) == 2 * documents - 1
    assert stays <= 16 * documents + 100_000


def test_common_tokens_are_the_commonest():
    dataset = GPTDatasetV1.from_stream(stream_of([7, 7, 7, 3, 9, 9, 3, 9, 9, 5], cuts=[4]), 2, 2)
    assert dataset.common_tokens().tolist() == [9, 7, 3, 5]
    assert dataset.common_tokens(2).tolist() == [9, 7]
    other = GPTDatasetV1.from_stream(stream_of([4, 4, 4, 7, 7, 2]), 2, 2)
    mixed = MixedDataset([dataset, other], [0.9, 0.1])
    assert set(mixed.common_tokens(4).tolist()) == {9, 7, 4}
    assert set(mixed.common_tokens().tolist()) == {2, 3, 4, 5, 7, 9}


def test_windows_without_length_or_stride_are_refused():
    for kind in (GPTDatasetV1, DocumentWindows):
        for max_length, stride in [(0, 1), (1, 0), (-1, 1), (1, -1)]:
            with pytest.raises(ValueError):  # noqa: PT011
                kind("some text", BYTE, max_length, stride)


# ---------------------------------------------------------------------- windows within documents

END = 9  # the end-of-text token of the streams below


def windows_within_documents(documents, max_length, stride, end=END) -> list[tuple]:
    """The plain definition: each document by itself, with the next one's first token to predict;
    a window every `stride` tokens until one has reached the document's end."""
    windows = []
    for number, document in enumerate(documents):
        is_last = number == len(documents) - 1
        input_ids, target_ids = document, document[1:] + ([] if is_last else [end])
        for start in range(0, len(target_ids), stride):
            inputs = input_ids[start : start + max_length]
            targets = target_ids[start : start + max_length]
            inputs += [end] * (max_length - len(inputs))
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


@settings(some, max_examples=300 if CAMPAIGN else 50)
@given(document_lists(), st.integers(1, 6), st.integers(1, 12), cuts)
@example([[END, 1, 2, 3], [END, 1, 2], [END, 1, 2, 3, 4]], 4, 4, ())  # targets: 4, 3, 4
@example([[END], [END], [END]], 1, 1, ())
@example([[END, 1, 2, 3, 4, 5], [END, 1]], 4, 12, ())  # with a gap between windows
@example([[END, 1, 2, 3, 4, 5]], 4, 12, ())
def test_windows_within_documents_equal_the_plain_definition(documents, max_length, stride, cuts):
    if sum(map(len, documents)) <= max_length:
        with refused(DataError, "data.max_length", max_length):
            document_windows(documents, max_length, stride)
        return
    expected = windows_within_documents(documents, max_length, stride)
    dataset = document_windows(documents, max_length, stride, cuts)
    assert len(dataset) == len(expected)
    assert pairs_of(dataset) == as_pairs(dataset) == expected
    assert pairs_of(dataset, np.arange(len(dataset))[::-1]) == expected[::-1]


def test_windows_within_documents_begin_where_a_shard_says():
    """By the shard's own list of documents: here there is no end-of-text token to search for."""
    ids = np.array([5, 1, 2, 5, 3, 5], np.uint16)
    stream = TokenStream([ids], 10, END, starts=[lambda: np.array([0, 3, 5])])
    dataset = DocumentWindows.from_stream(stream, 4, 4)
    assert [input_ids[0] for input_ids, _ in pairs_of(dataset)] == [5, 5]
    assert pairs_of(dataset)[1] == ([5, 3, 5, END], [3, 5, IGNORED, IGNORED])


# ---------------------------------------------------------------------------- several data sets


def datasets_of(sizes: list[int]) -> list[GPTDatasetV1]:
    """Data sets with so many windows, no two windows alike."""
    made = []
    for number, size in enumerate(sizes):
        ids = [1000 * number + i for i in range(2 * size + 1)]
        made.append(GPTDatasetV1.from_stream(stream_of(ids, vocab_size=50257), 2, 2))
    return made


@some
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.data())
def test_mixed_dataset_is_the_concatenation(sizes, draw):
    datasets = datasets_of(sizes)
    assert [len(dataset) for dataset in datasets] == sizes
    mixed = MixedDataset(datasets, [1.0] * len(sizes))
    expected = list(itertools.chain(*(pairs_of(dataset) for dataset in datasets)))
    assert pairs_of(mixed) == expected
    windows = draw.draw(st.lists(st.integers(0, len(mixed) - 1), min_size=1, max_size=9))
    assert pairs_of(mixed, np.array(windows)) == [expected[window] for window in windows]
    (gathered,) = mixed.gather(np.array(windows))
    assert gathered.element_size() == 2


def test_order_of_a_data_set():
    (single,), walks = datasets_of([9]), CycleWalks(32)
    mixed = MixedDataset(datasets_of([3, 6]), [0.7, 0.3])
    for dataset, order in [
        (single, WindowOrder(9, 4, 5)),
        (mixed, WindowOrder([3, 6], 4, 5, [0.7, 0.3])),
        (walks, WindowOrder(len(walks), 4, 5)),
    ]:
        for step in range(3):
            assert (order_of(dataset, 4, 5).windows(step) == order.windows(step)).all()


@some
@given(st.integers(2, 300), st.integers(2, 320))
def test_evenly_spread_windows(size, most):
    (dataset,) = datasets_of([size])
    windows = evenly(dataset, most)
    assert windows.dtype == np.int64
    assert len(windows) == min(size, most)
    assert (windows[0], windows[-1]) == (0, size - 1)
    gaps = np.diff(windows)
    assert gaps.min() >= 1
    assert gaps.max() - gaps.min() <= 1
    assert evenly(dataset, 1).tolist() == [0]


def test_evenly_spread_windows_of_a_mixture():
    for sizes, weights, most, expected in [
        ([100, 100], [0.5, 0.5], 4, [0, 99, 100, 199]),
        ([5, 5], [3.0, 1.0], 4, [0, 2, 4, 5]),
        ([100, 2, 1], [0.1, 0.4, 0.5], 10, [0, 100, 101, 102]),  # no more than a source has
        ([3, 100], [0.999, 0.001], 4, [0, 1, 2, 3]),  # at least one of each
        ([9, 9, 9, 9], [1.0, 1.0, 1.0, 1.0], 6, [0, 9, 18, 26, 27, 35]),  # at most six
    ]:
        assert evenly(MixedDataset(datasets_of(sizes), weights), most).tolist() == expected


# --------------------------------------------------------------------- settings -> text -> stream


def test_every_document_begins_with_the_end_of_text_token(tmp_path):
    files = write_all(tmp_path, "one", "two", "six")
    expected = [256, *b"one", 256, *b"two", 256, *b"six"]
    tokens = load(files).train.tokens
    assert tokens.document_starts().tolist() == [0, 4, 8]
    assert ids_of(load(files).train) == expected
    assert ids_of(load(files[::-1]).train) == expected[8:] + expected[4:8] + expected[:4]

    lines = "".join(json.dumps({"text": f"t{n}", "body": f"body {n}"}) + "\n" for n in range(2))
    path = write(tmp_path / "a.jsonl", lines)
    assert ids_of(load(path).train) == [256, *b"t0", 256, *b"t1"]
    assert ids_of(load(path, text_key="body").train) == [256, *b"body 0", 256, *b"body 1"]

    path = write(tmp_path / "a.txt", f"ab{END_OF_TEXT}c")
    assert ids_of(load(path, endoftext="token").train) == [256, *b"ab", 256, *b"c"]
    assert ids_of(load(path, endoftext="text").train) == [256, *b"ab<|endoftext|>c"]


def test_windows_are_cut_as_the_settings_say(tmp_path):
    documents = [[256, *b"abcdefghi"], [256, *b"jk"]]
    path = write(tmp_path / "a.txt", END_OF_TEXT.join(["abcdefghi", "jk"]))
    ids = documents[0] + documents[1]
    plain, within = (load(path, stride=3, within_documents=x).train for x in (False, True))
    assert pairs_of(plain) == [(ids[i : i + 4], ids[i + 1 : i + 5]) for i in range(0, 9, 3)]
    assert pairs_of(within) == windows_within_documents(documents, 4, 3, end=256)


# ------------------------------------------------------------------------- what to validate on


def split_of(ids: list[int], val_fraction: float) -> tuple[int, int]:
    """The plain definition: (where the validation part begins, how many notes there are: one when
    it begins inside a document of several)."""
    wished = len(ids) - int(len(ids) * val_fraction)
    reach = int(len(ids) * val_fraction) // 2
    starts = [place for place in range(1, len(ids)) if ids[place] == 256]
    near = [(abs(place - wished), place) for place in starts if abs(place - wished) <= reach]
    if near:
        return min(near)[1], 0
    return wished, bool(starts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("texts")


@settings(some, max_examples=300 if CAMPAIGN else 60)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=9),
    st.sampled_from([0.05, 0.1, 0.25, 0.5, 0.9]),
    st.integers(1, 3),
    st.none() | st.integers(1, 5),
)
@example([99], 0.1, 3, None)
@example([50, 48], 0.1, 3, 1)
@example([60, 26, 11], 0.1, 11, None)  # one window, of the document nearest to what is wished for
@example([83, 15], 0.1, 4, None)  # the nearest document is too far: inside one
@example([19, 19, 19, 19], 0.5, 1, None)
@example([10, 75, 4, 10], 0.2, 3, 1)  # two are as near: the first
@example([39], 0.125, 4, None)  # one window to validate on, none, one to train on
@example([39], 0.01, 4, None)
@example([39], 0.875, 4, None)
@example([3], 0.1, 4, None)  # four and five tokens for windows of four
@example([4], 0.5, 4, None)
def test_validation_is_the_end_of_the_text(folder, lengths, val_fraction, max_length, stride):
    lengths[0] = max(1, lengths[0])
    texts = ["".join(chr(97 + (n + i) % 26) for i in range(k)) for n, k in enumerate(lengths)]
    path = write(folder / "a.txt", END_OF_TEXT.join(texts))
    ids = list(itertools.chain(*([256, *text.encode()] for text in texts)))
    place, notes = split_of(ids, val_fraction)
    options = {"max_length": max_length, "stride": stride, "val_fraction": val_fraction}
    for key, value, size in [
        ("data.path", path, len(ids)),
        ("data.val_fraction", val_fraction, len(ids) - place),
        ("data.max_length", max_length, place),
    ]:
        if size <= max_length:
            load_refused(key, value, path, **options)
            return
    loaded = load(path, **options)
    assert ids_of(loaded.train) == ids[:place]
    assert ids_of(loaded.val) == ids[place:]
    assert len(loaded.notes) == notes
    assert (loaded.train.max_length, loaded.train.stride) == (max_length, stride or max_length)
    # Each validation token is predicted once, whatever the stride.
    predicted = list(itertools.chain(*(targets for _, targets in pairs_of(loaded.val))))
    assert predicted == ids[place + 1 :][: len(predicted)]
    assert len(ids) - place - 1 - len(predicted) < max_length


def test_validation_on_a_text_of_its_own(tmp_path):
    path = write(tmp_path / "a.txt", "to be trained on")
    files = write_all(tmp_path / "val", "is zero", "is one")
    expected = [[256, *b"is zero"], [256, *b"is one"]]
    for val_fraction in (0.0, 0.5):
        options = {"val_fraction": val_fraction, "val_path": str(tmp_path / "val")}
        loaded = load(path, stride=1, max_length=6, **options)
        assert ids_of(loaded.train) == [256, *b"to be trained on"]
        assert ids_of(loaded.val) == expected[0] + expected[1]
        assert loaded.val.stride == 6
        assert loaded.notes == []
    in_turn = [str(file) for file in reversed(files)]
    loaded = load(path, val_path=in_turn, within_documents=True)
    assert ids_of(loaded.val) == expected[1] + expected[0]
    assert type(loaded.val) is DocumentWindows
    # Both are to stay what they were.
    assert loaded.checksums == load(path).checksums + load(in_turn).checksums


def test_too_short_texts_are_refused(tmp_path):
    path = write(tmp_path / "a.txt", "to be trained on")
    short, mark = write(tmp_path / "short.txt", "abc"), write(tmp_path / "mark.txt", "\ufeff")
    for val_path in (short, mark):
        load_refused("data.val_path", val_path, path, val_path=str(val_path))
    for text in (short, mark):
        load_refused("data.max_length", 4, text)
        load_refused("data.max_length", 4, text, within_documents=True)
    load_refused("data.val_fraction", 0.1, mark, val_fraction=0.1)
    # The hint has settings with which it can be used.
    assert "data.max_length=3 data.val_fraction=0 " in load_refused(
        "data.path", short, short, val_fraction=0.1
    )
    loaded = load(short, max_length=3)
    assert pairs_of(loaded.train) == [([256, *b"ab"], [*b"abc"])]
    assert loaded.val is None


# ------------------------------------------------------------------------------------- mixtures


def test_a_mixture_of_texts(tmp_path):
    """Each source is split by itself; a text to validate on is used once."""
    files = write_all(tmp_path, "a" * 99, "b" * 39)
    loaded = load(files, weights=[0.7, 0.3], val_fraction=0.25)
    alone = [load(file, val_fraction=0.25) for file in files]
    for mixed, parts in (
        (loaded.train, [source.train for source in alone]),
        (loaded.val, [source.val for source in alone]),
    ):
        assert mixed.weights == [0.7, 0.3]
        assert mixed.sizes == [len(part) for part in parts]
        assert pairs_of(mixed) == pairs_of(parts[0]) + pairs_of(parts[1])
    assert loaded.checksums == alone[0].checksums + alone[1].checksums
    assert load(files, weights=[0.7, 0.3]).val is None
    order = order_of(loaded.train, 20, 0).windows(0)
    assert (order < loaded.train.sizes[0]).sum() == 14

    val_path = str(write(tmp_path / "val.txt", "not of any of the sources"))
    loaded = load(files, weights=[0.5, 0.5], val_fraction=0.1, val_path=val_path)
    assert pairs_of(loaded.val) == pairs_of(load(files[0], val_path=val_path).val)


def test_a_large_text_is_better_prepared(tmp_path, monkeypatch, capsys):
    """A note has the command that does it, quoted for a shell."""
    monkeypatch.setattr(data, "LARGE", 50)
    for name in ("a.txt", "it's apart.txt"):
        path = write(tmp_path / name, "a" * 49)
        load(path)
        assert capsys.readouterr().err == ""
        load(write(path, "a" * 51))
        said = shlex.split(capsys.readouterr().err)
        assert said[-5:] == ["python", "-m", "scripts.prepare_data", f"data.path={path}", "out=DIR"]
    load(token_file(tmp_path / "a.bin", b"a" * 60))
    assert capsys.readouterr().err == ""


def test_a_single_weighted_path_is_that_path(tmp_path, monkeypatch):
    """And not its letters, one after the other."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a", "the text that is named")
    assert pairs_of(load("a", weights=[1.0]).train) == pairs_of(load("a").train)


# ---------------------------------------------------------------------------------- token files


def token_file(path: Path, text: bytes) -> Path:
    """One token per byte, plain, as nanoGPT writes them."""
    return write(path, np.frombuffer(text, np.uint8).astype("<u2").tobytes())


def shard(path: Path, text: bytes) -> Path:
    """One token per byte after a header, as llm.c writes them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(path, 256)
    writer.append(np.array([256, *text], np.uint16))
    writer.close()
    return path


def test_files_named_val_are_to_validate_on(tmp_path):
    token_file(tmp_path / "nano" / "train.bin", b"to be trained on")
    token_file(tmp_path / "nano" / "val.bin", b"to validate on")
    shard(tmp_path / "llmc" / "web_train_000002.bin", b"second")
    shard(tmp_path / "llmc" / "web_train_000001.bin", b"first")
    shard(tmp_path / "llmc" / "web_val_000000.bin", b"held back")
    loaded = load(tmp_path / "nano", val_fraction=0.1)
    assert ids_of(loaded.train) == [*b"to be trained on"]
    assert ids_of(loaded.val) == [*b"to validate on"]
    loaded = load(tmp_path / "llmc", val_fraction=0.5, stride=1)
    assert ids_of(loaded.train) == [256, *b"first", 256, *b"second"]
    assert ids_of(loaded.val) == [256, *b"held back"]
    assert (loaded.train.stride, loaded.val.stride) == (1, 4)
    assert "web_val_000000.bin" in loaded.notes[0]
    names = [name for name, _ in loaded.checksums]
    assert names == ["web_train_000001.bin", "web_train_000002.bin", "web_val_000000.bin"]
    loaded = load(tmp_path / "nano", val_fraction=0.0)  # nothing is held back
    assert loaded.val is None
    assert ids_of(loaded.train) == [*b"to be trained on"]
    for text in (b"", b"abc"):  # too short for a window
        shard(tmp_path / "nano" / "val.bin", text)
        with pytest.raises(DataError):
            load(tmp_path / "nano", val_fraction=0.1)


def test_shards_in_a_list_are_read_in_its_order(tmp_path):
    """And windows reach from one into the next."""
    texts = {"c.bin": b"first", "a.bin": b"x", "b.bin": b"then the last"}
    files = [shard(tmp_path / name, text) for name, text in texts.items()]
    ids = list(itertools.chain(*([256, *text] for text in texts.values())))
    loaded = load(files, stride=1, max_length=7)
    expected = [(ids[i : i + 7], ids[i + 1 : i + 8]) for i in range(len(ids) - 7)]
    assert pairs_of(loaded.train) == expected
    mixed = load([files[2], files[0]], weights=[0.5, 0.5]).train
    assert pairs_of(mixed) == pairs_of(load(files[2]).train) + pairs_of(load(files[0]).train)


@pytest.mark.parametrize(("tokenizer", "shard_tokens"), [("byte", 1000), ("gpt2", 400)])
def test_shards_give_the_windows_of_the_text(tokenizer, shard_tokens, tmp_path):
    for n in range(3):
        words = [f"{n}{i} don't 1234 日本語 {'word ' * (i * 7 % 23)}" for i in range(12)]
        documents = END_OF_TEXT.join(" ".join(words[first:]) for first in range(12))
        write(tmp_path / "texts" / f"{n}.txt", documents)
    texts, shards = tmp_path / "texts", tmp_path / "shards"
    manifest = prepare(texts, shards, tokenizer=tokenizer, shard_tokens=shard_tokens)
    assert len(manifest["shards"]) > 10
    values = {"tokenizer": tokenizer, "max_length": 60, "stride": 25, "val_fraction": 0.1}
    for within in (False, True):
        of_text, of_shards = (
            load(path, within_documents=within, **values) for path in (texts, shards)
        )
        assert len(of_shards.train.tokens.arrays) > 10
        for one, other in ((of_text.train, of_shards.train), (of_text.val, of_shards.val)):
            assert len(one) > 5
            assert pairs_of(one) == pairs_of(other)
            starts, others = one.tokens.document_starts(), other.tokens.document_starts()
            assert starts.tolist() == others.tolist()
        assert of_text.notes == of_shards.notes == []


# --------------------------------------------------------------------------------- other tokens

A, B = ("a.bin", ["1", "2", "3"]), ("b.bin", ["4"])


def test_other_tokens_than_those_of_a_checkpoint_are_refused():
    """The reason has the file and the byte, or both files."""
    for now, told in [
        ([("a.bin", ["x", "2", "3"]), B], "a.bin 0"),
        ([("a.bin", ["1", "2", "x"]), B], f"a.bin {2**23}"),
        ([("a.bin", ["1", "2"]), B], f"a.bin {2**23}"),
        ([A, ("b.bin", ["4", "5"])], f"b.bin {2**22}"),
        ([("a.bin", ["1", "2", ""]), ("b.bin", ["x"])], "b.bin 0"),
        ([A, ("c.bin", ["4"])], "b.bin c.bin"),
        ([A], "b.bin"),
        ([A, B, ("c.bin", [])], "c.bin"),
        ([B, A], "a.bin b.bin"),
    ]:
        with refused(DataError, "data.path", "shards", exit_code=3) as caught:
            check_unchanged([A, B], now, "shards")
        assert set(told.split()) <= set(caught.value.reason.split()), now


def test_the_same_tokens_are_no_change():
    lists = json.loads(json.dumps([A, B]))  # as a checkpoint has them
    not_read = [("a.bin", ["1", "", "3"]), ("b.bin", [""])]
    for now in ([A, B], lists, not_read):
        check_unchanged([A, B], now, "shards")
        check_unchanged(now, [A, B], "shards")


def test_a_changed_text_or_shard_is_noticed(tmp_path):
    path = write(tmp_path / "a.txt", "the text that was trained on")
    before = load(path).checksums
    elsewhere = write(tmp_path / "moved" / "b.txt", path.read_bytes())
    check_unchanged(before, load(elsewhere).checksums, elsewhere)
    check_unchanged(before, load(path, val_fraction=0.5).checksums, path)
    write(path, "the text that is trained on")
    with refused(DataError, "data.path", path):
        check_unchanged(before, load(path).checksums, path)

    train = token_file(tmp_path / "shards" / "train.bin", b"x" * 3_000_000)
    folder = train.parent
    token_file(folder / "val.bin", b"held back")
    before = load(folder).checksums
    assert [(name, len(blocks)) for name, blocks in before] == [("train.bin", 2), ("val.bin", 1)]
    token_file(train, b"x" * 2_500_000 + b"y" + b"x" * 499_999)
    with refused(DataError, "data.path", folder):
        check_unchanged(before, load(folder).checksums, folder)


# ------------------------------------------------------------------------------------- settings


def problems(**changes) -> list[tuple[str, object]]:
    found = DataConfig(**{"path": "a.txt"} | changes).problems()
    assert all(reason and hint for _, _, reason, hint in found)
    return [(key, value) for key, value, _, _ in found]


def test_problems_name_their_keys():
    assert problems() == problems(path=["a.txt"], stride=1, val_fraction=0.0, verify=False) == []
    bad = {
        "path": [None, "", []],
        "tokenizer": ["words"],
        "max_length": [0],
        "stride": [0],
        "val_fraction": [-0.1, 1.0, float("nan")],
        "endoftext": ["keep"],
        "verify": ["maybe", None],
        "weights": [[], [1.0, 2.0], [0.0], [-1.0], [float("nan")], [float("inf")]],
        "synthetic": ["words"],
    }
    for key, value in [(key, value) for key, values in bad.items() for value in values]:
        assert problems(**{key: value}) == [(key, value)]
    all_at_once = {key: bad[key][0] for key in ("path", "max_length", "stride", "endoftext")}
    assert problems(**all_at_once) == list(all_at_once.items())
    two = ["a", "b"]
    # A wrong number, not positive, or a proportion that repeats after too many windows.
    wrong = [[0.5], [0.5, 0.3, 0.2], [1.0, 0.0], [1.0, -0.5], [1.0, 0.333333], [1.0, 100_000.0]]
    for weights in wrong:
        assert problems(path=two, weights=weights) == [("weights", weights)]
    for weights in ([0.7, 0.3], [1, 2], [1.0, 99_999.0], [123456.0, 123456.0]):
        assert problems(path=two, weights=weights) == []
    assert problems(path=["a"], weights=[0.123456]) == []


def test_problems_of_synthetic_sequences():
    """They need no text, and bytes."""
    values = {"path": None, "tokenizer": "byte", "max_length": 64, "synthetic": "induction"}
    for changes, keys in [
        ({}, []),
        ({"path": "a.txt"}, ["path"]),
        ({"tokenizer": "gpt2"}, ["synthetic"]),
        ({"max_length": 15}, ["synthetic"]),
        ({"max_length": 125}, ["synthetic"]),
        ({"weights": [1.0]}, ["weights"]),
    ]:
        assert [key for key, _ in problems(**values | changes)] == keys, changes


# ------------------------------------------------------------------------------------ dataloader

NUMBERS = " ".join(str(i % 10) for i in range(101))  # 101 tokens: "0", " 1", " 2", ...


def read_all(**options) -> list[tuple[list[int], list[int]]]:
    batches = create_dataloader(NUMBERS, **options)
    return list(itertools.chain(*(as_pairs(zip(*batch, strict=True)) for batch in batches)))


def test_dataloader_has_the_classic_windows():
    options = {"batch_size": 4, "max_length": 9, "stride": 7}
    expected = classic_windows(NUMBERS, ENCODINGS["gpt2"], 9, 7)
    assert len(expected) == 14
    torch.manual_seed(0)
    assert len(read_all(**options)) == 12
    shuffled = read_all(drop_last=False, **options)
    assert shuffled != expected
    assert sorted(shuffled) == sorted(expected)
    in_order = {"shuffle": False, **options}
    assert read_all(**in_order) == expected[:12]
    assert read_all(num_workers=1, drop_last=False, **in_order) == expected
    sizes = [len(x) for x, _ in create_dataloader(NUMBERS, drop_last=False, **options)]
    assert sizes == [4, 4, 4, 2]
    with refused(DataError, "batch_size", 15):  # no whole batch
        create_dataloader(NUMBERS, **options | {"batch_size": 15})
    with refused(DataError, "data.max_length", 256):
        create_dataloader(NUMBERS)
