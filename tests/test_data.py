"""data.py: windows, datasets and the validation split, each compared with a plain definition."""

import itertools

import numpy as np
import pytest
import torch
from helpers.refusals import refused
from helpers.tally import trials
from helpers.texts import mixes, prepare, write_packed, write_source
from hypothesis import example, given
from hypothesis import strategies as st

import data
from clearhead.errors import ConfigError, DataError
from clearhead.tokens import END_OF_TEXT
from clearhead.tokens.token_stream import TokenStream, check_checksums
from clearhead.tokens.windows import (
    IGNORED,
    MixedDataset,
    evenly_spaced_windows,
    mixture,
    window_order,
)
from data import (
    DataConfig,
    DocumentWindows,
    GPTDatasetV1,
    ShiftedWindows,
    create_dataloader,
    get_tokenizer,
    load_datasets,
)

some = trials(25, 200)

BYTE = get_tokenizer("byte")
GPT2 = get_tokenizer("gpt2")
cuts = st.sets(st.integers(0, 100), max_size=5)  # positions where a stream is split into arrays


def load(path: object, **changes) -> data.LoadedData:
    """The data settings for a tiny text, with one token per byte."""
    path = [str(p) for p in path] if isinstance(path, list) else str(path)
    values = {"tokenizer": "byte", "max_length": 4, "val_fraction": 0.0} | changes
    config = DataConfig.with_defaults(path=path, **values)
    return load_datasets(config, get_tokenizer(config.tokenizer))


def stream_of(ids, cuts=(), dtype=np.uint16, vocab_size: int = 257) -> TokenStream:
    """A stream of these ids, split into arrays at `cuts`; the last id is the end-of-text token."""
    arrays = np.split(np.array(ids, dtype), sorted(cuts))
    return TokenStream(arrays, vocab_size, vocab_size - 1)


def ids_of(dataset: GPTDatasetV1) -> list[int]:
    """All ids of the stream of a dataset."""
    return np.concatenate(dataset.tokens.arrays).tolist()


def pairs_of(dataset, windows=None) -> list[tuple[list[int], list[int]]]:
    """All windows of a dataset, or the given ones, as (input ids, target ids)."""
    input_ids, target_ids = dataset.batch(np.arange(len(dataset)) if windows is None else windows)
    assert input_ids.dtype == target_ids.dtype == torch.int64
    return as_pairs(zip(input_ids, target_ids, strict=True))


def as_pairs(windows) -> list[tuple[list[int], list[int]]]:
    return [(input_ids.tolist(), target_ids.tolist()) for input_ids, target_ids in windows]


def classic_windows(text: str, tokenizer, max_length: int, stride: int) -> list[tuple]:
    """The implementation of the book: two lists, filled window by window."""
    token_ids = tokenizer.encode(text, allowed_special={"<|endoftext|>"}, disallowed_special=())
    input_ids, target_ids = [], []
    for i in range(0, len(token_ids) - max_length, stride):
        input_ids.append(torch.tensor(token_ids[i : i + max_length]))
        target_ids.append(torch.tensor(token_ids[i + 1 : i + max_length + 1]))
    return as_pairs(zip(input_ids, target_ids, strict=True))


@some
@given(mixes, st.integers(1, 12), st.integers(1, 15))
@example("abcdef", 5, 1)  # one window
@example("abcde", 5, 1)  # none
def test_dataset_equals_the_classic_one(text, max_length, stride):
    for tokenizer in (BYTE, GPT2):
        expected = classic_windows(text, tokenizer, max_length, stride)
        if not expected:
            with refused(DataError, "data.max_length", max_length):
                GPTDatasetV1(text, tokenizer, max_length, stride)
            continue
        dataset = GPTDatasetV1(text, tokenizer, max_length, stride)
        assert as_pairs(dataset) == pairs_of(dataset) == expected
        assert as_pairs(dataset[n] for n in range(-len(expected), 0)) == expected
        assert as_pairs(zip(dataset.input_ids, dataset.target_ids, strict=True)) == expected
        for index in (len(expected), -len(expected) - 1):
            with pytest.raises(IndexError):
                dataset[index]


@some
@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 5), cuts)
def test_shifted_windows_start_at_one_phase_in_each_epoch(more, max_length, stride, cuts):
    """In each epoch, all windows of a random phase are read once."""
    ids = np.arange(more + max_length)
    dataset = ShiftedWindows(stream_of(ids, {c % len(ids) for c in cuts}), None, max_length, stride)
    n = len(dataset)
    assert n == max(1, min(len(range(phase, more, stride)) for phase in range(stride)))
    epochs, phases = 20 * stride, set()
    windows = window_order(dataset, epochs * n, seed=more).windows(0)
    for epoch in windows.reshape(epochs, n):
        starts = sorted(input_ids[0] for input_ids, _ in pairs_of(dataset, epoch))
        assert starts == [*range(starts[0], starts[0] + n * stride, stride)]
        phases.add(starts[0])
    assert phases == {*range(min(stride, more))}
    # Those of a mixture are the same windows.
    other = GPTDatasetV1(stream_of([0] * len(ids)), None, max_length, stride)
    mixed = MixedDataset([other, dataset], [1.0, 1.0])
    windows = window_order(mixed, 1000, seed=more).windows(0)
    found = pairs_of(mixed, windows[windows >= len(other)])
    assert len(found) == 500
    for input_ids, target_ids in found:
        assert [*input_ids, target_ids[-1]] == [*range(input_ids[0], input_ids[0] + max_length + 1)]


class Characters:
    """A tokenizer of another library: the ids are code points."""

    def encode(self, text, allowed_special):
        assert allowed_special == {"<|endoftext|>"}
        return [ord(character) for character in text]


def test_any_tokenizer_with_encode():
    ids = [*map(ord, "a \U0001f600 b")]  # the emoji is above 16 bits
    assert pairs_of(GPTDatasetV1("a \U0001f600 b", Characters(), 4, 1)) == [(ids[:4], ids[1:])]


END = 9  # the end-of-text token of the streams below


def windows_within_documents(documents, max_length, stride) -> list[tuple]:
    """The plain definition. Of each document, with the first token of the next document as last
    target: windows every `stride` tokens, until one contains the last target."""
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
    """Documents that start with END; the first one may be the end of a document, without END."""
    texts = draw(st.lists(st.lists(st.integers(0, 8), max_size=13), min_size=1, max_size=8))
    documents = [[END, *text] for text in texts]
    if len(documents[0]) > 1 and draw(st.booleans()):
        documents[0] = documents[0][1:]
    return documents


def document_windows(documents, max_length, stride, cuts=()) -> DocumentWindows:
    ids = list(itertools.chain(*documents))
    cuts = [min(cut, len(ids)) for cut in cuts]
    return DocumentWindows(stream_of(ids, cuts, vocab_size=10), None, max_length, stride)


@trials(50, 300)
@given(document_lists(), st.integers(1, 6), st.integers(1, 12), cuts)
@example([[END, 1, 2, 3], [END, 1, 2], [END, 1, 2, 3, 4]], 4, 4, ())  # targets: 4, 3, 4
@example([[END], [END], [END]], 1, 1, ())
@example([[END, 1, 2, 3, 4, 5], [END, 1]], 4, 12, ())  # with a gap between windows
def test_windows_within_documents_equal_the_plain_definition(documents, max_length, stride, cuts):
    if sum(map(len, documents)) <= max_length:
        with refused(DataError, "data.max_length", max_length):
            document_windows(documents, max_length, stride)
    else:
        expected = windows_within_documents(documents, max_length, stride)
        dataset = document_windows(documents, max_length, stride, cuts)
        assert pairs_of(dataset) == as_pairs(dataset) == expected
        assert pairs_of(dataset, np.arange(len(dataset))[::-1]) == expected[::-1]


def datasets_of(sizes: list[int]) -> list[GPTDatasetV1]:
    """Datasets with these numbers of windows; all windows are different."""
    ids = [range(1000 * n, 1000 * n + 2 * size + 1) for n, size in enumerate(sizes)]
    return [GPTDatasetV1(stream_of(own, vocab_size=50257), None, 2, 2) for own in ids]


@some
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.data())
def test_mixed_dataset_is_the_concatenation(sizes, draw):
    datasets = datasets_of(sizes)
    mixed = MixedDataset(datasets, [1.0] * len(sizes))
    expected = list(itertools.chain(*(pairs_of(dataset) for dataset in datasets)))
    windows = draw.draw(st.lists(st.integers(0, len(mixed) - 1), min_size=1, max_size=9))
    assert pairs_of(mixed, np.array(windows)) == [expected[window] for window in windows]


def test_evenly_spread_windows():
    for sizes, weights, most, expected in [
        ([10], [1.0], 4, [0, 3, 6, 9]),
        ([3], [1.0], 4, [0, 1, 2]),
        ([100, 100], [0.5, 0.5], 4, [0, 99, 100, 199]),
        ([5, 5], [3.0, 1.0], 4, [0, 2, 4, 5]),
        ([100, 2, 1], [0.1, 0.4, 0.5], 10, [0, 100, 101, 102]),  # at most all windows of a source
        ([3, 100], [0.999, 0.001], 4, [0, 1, 2, 3]),  # at least one of each
        ([9, 9, 9, 9], [1.0, 1.0, 1.0, 1.0], 6, [0, 9, 18, 26, 27, 35]),  # at most six
    ]:
        dataset = mixture(datasets_of(sizes), weights)
        assert evenly_spaced_windows(dataset, most).tolist() == expected


def split_of(ids: list[int], val_fraction: float) -> tuple[int, int]:
    """The plain definition: (first position of the validation data, number of notes). There is a
    note if it is inside a document and the text has several documents."""
    sizes = [0, *itertools.accumulate(number != 256 for number in ids)]  # bytes before a position
    wanted, latest = (sizes[-1] - int(sizes[-1] * val_fraction / n) for n in (1, 2))
    starts = [place for place in range(1, len(ids)) if ids[place] == 256]
    if later := [place for place in starts if wanted <= sizes[place] < latest]:
        return later[0], 0
    return sizes.index(wanted), bool(starts)


@trials(50, 300)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=9),
    st.sampled_from([0.05, 0.1, 0.25, 0.5, 0.9]),
    st.integers(1, 3),
    st.none() | st.integers(1, 5),
)
@example([60, 29, 11], 0.2, 9, None)  # one window; starts at the next document
@example([83, 15], 0.2, 4, None)  # the only other document starts too early: inside a document
@example([10, 75, 4, 10], 0.2, 3, 1)  # two documents: the first one
@example([39], 0.125, 4, None)  # one validation window, no note, one training window
@example([3], 0.1, 4, None)  # four and five tokens for windows of four
def test_validation_is_the_end_of_the_text(
    tmp_path_factory, lengths, val_fraction, max_length, stride
):
    lengths[0] = max(1, lengths[0])
    texts = ["".join(chr(97 + (n + i) % 26) for i in range(k)) for n, k in enumerate(lengths)]
    path = tmp_path_factory.getbasetemp() / "validation" / "a.txt"
    write_source(path, [END_OF_TEXT.join(texts)])
    ids = list(itertools.chain(*([256, *text.encode()] for text in texts)))
    place, notes = split_of(ids, val_fraction)
    options = {"max_length": max_length, "stride": stride, "val_fraction": val_fraction}
    sizes = [
        ("data.path", path, len(ids) - place),
        ("data.max_length", max_length, place),
    ]
    if bad := [(key, value) for key, value, size in sizes if size <= max_length]:
        with refused(DataError, *bad[0], exit_code=3):
            load(path, **options)
    else:
        loaded = load(path, **options)
        assert type(loaded.train) is type(loaded.val) is GPTDatasetV1
        assert ids_of(loaded.train) == ids[:place]
        assert ids_of(loaded.val) == ids[place:]
        assert len(loaded.notes) == notes
        assert (loaded.train.max_length, loaded.train.stride) == (max_length, stride or max_length)
        # Each validation token is predicted once, for every stride.
        predicted = list(itertools.chain(*(targets for _, targets in pairs_of(loaded.val))))
        assert predicted == ids[place + 1 :][: len(predicted)]
        assert len(ids) - place - 1 - len(predicted) < max_length


def test_validation_on_a_separate_text(tmp_path):
    path = write_source(tmp_path / "a.txt", ["to be trained on"])
    files = [write_source(tmp_path / "val" / f"{n}.txt", [f"is no. {n}"]) for n in range(2)]
    loaded = load(path, stride=1, max_length=6, val_fraction=0.5, val_path=str(tmp_path / "val"))
    assert ids_of(loaded.train) == [256, *b"to be trained on"]
    assert ids_of(loaded.val) == [256, *b"is no. 0", 256, *b"is no. 1"]
    assert loaded.val.stride == 6
    in_reverse = [str(file) for file in reversed(files)]
    loaded = load(path, val_path=in_reverse, within_documents=True)
    assert ids_of(loaded.val) == [256, *b"is no. 1", 256, *b"is no. 0"]
    assert type(loaded.val) is DocumentWindows
    # Neither may change.
    assert loaded.checksums == load(path).checksums + load(in_reverse).checksums
    short = write_source(tmp_path / "short.txt", ["abc"])
    with refused(DataError, "data.val_path", short, exit_code=3):
        load(path, val_path=str(short))


def test_only_training_windows_are_shifted(tmp_path):
    path = write_source(tmp_path / "a.txt", ["a long text, of which a part is held back"])
    plain, shifted = (load(path, val_fraction=0.5, shift=shift) for shift in (False, True))
    assert pairs_of(plain.val) == pairs_of(shifted.val)
    assert type(shifted.train) is ShiftedWindows
    with refused(ConfigError, "data.within_documents", exit_code=2):
        load(path, shift=True, within_documents=True)


def test_a_mixture_of_texts(tmp_path):
    """Each source is split separately; data.val_path is used once. A weight that would select no
    window of 1,000 is refused."""
    texts = ("a" * 99, "b" * 39)
    files = [write_source(tmp_path / f"{text[0]}.txt", [text]) for text in texts]
    loaded = load(files, weights=[0.7, 0.3], val_fraction=0.25)
    alone = [load(file, val_fraction=0.25) for file in files]
    for mixed, parts in (
        (loaded.train, [source.train for source in alone]),
        (loaded.val, [source.val for source in alone]),
    ):
        assert (mixed.weights, mixed.sizes) == ([0.7, 0.3], [len(part) for part in parts])
        assert pairs_of(mixed) == pairs_of(parts[0]) + pairs_of(parts[1])
    assert loaded.checksums == alone[0].checksums + alone[1].checksums
    order = window_order(loaded.train, 1000, 0).windows(0)
    assert (order < loaded.train.sizes[0]).sum() == 700
    with refused(ConfigError, "data.weights", exit_code=2):
        load(files, weights=[1.0, 1000.0])
    prepare(files[1], tmp_path / "b", tokenizer="byte")
    mixed = load([files[0], tmp_path / "b"], weights=[0.7, 0.3], val_fraction=0.25)
    assert pairs_of(mixed.train) == pairs_of(loaded.train)  # a text and token files
    val_path = str(write_source(tmp_path / "val.txt", ["not of any of the sources"]))
    loaded = load(files, weights=[0.5, 0.5], val_fraction=0.1, val_path=val_path)
    assert pairs_of(loaded.val) == pairs_of(load(files[0], val_path=val_path).val)


def test_files_named_val_are_to_validate_on(tmp_path):
    """For each val_fraction except 0, which means no validation. If all files are named val, or
    only other words contain it, the last part is used."""
    texts = {"train_2": b"second", "train_1": b"the first", "val_0": b"held back"}
    for name, text in texts.items():  # one token per byte, in nanoGPT's format
        write_packed(tmp_path / f"web_{name}.bin", np.array([*text], "<u2").tobytes())
    loaded = load(tmp_path, val_fraction=0.5, stride=1)
    assert ids_of(loaded.train) == [*b"the first", *b"second"]
    assert ids_of(loaded.val) == [*b"held back"]
    assert (loaded.train.stride, loaded.val.stride) == (1, 4)
    names = [name for name, _ in loaded.checksums]
    assert names == ["web_train_1.bin", "web_train_2.bin", "web_val_0.bin"]
    assert len(loaded.notes) == 1
    assert load(tmp_path, val_fraction=0.0).val is None
    for names, val in (
        (("a", "b.val", "c-val-2", "validation_3"), [1, 2, 3]),
        (("fineweb_val_000000", "val"), []),
        (("arrival", "interval_1", "valley"), []),
    ):
        for n, name in enumerate(names):
            write_packed(tmp_path / names[0] / f"{name}.bin", np.full(9, n, "<u2").tobytes())
        loaded = load(tmp_path / names[0], val_fraction=0.3)
        assert len(loaded.notes) == bool(val)
        assert not val or ids_of(loaded.val)[::9] == val


def test_other_tokens_than_those_of_a_checkpoint_or_of_rank_0_are_refused():
    """The reason contains the file, or the files of which one has more."""
    a, b = ("a.bin", "1"), ("b.bin", "4")
    for now, names in [
        ([a, ("b.bin", "x")], ["b.bin"]),
        ([a, ("c.bin", "4")], ["b.bin", "c.bin"]),
        ([a], ["b.bin"]),
        ([b, a], []),
    ]:
        with refused(DataError, "data.path", "shards", exit_code=3) as caught:
            check_checksums([a, b], now, "shards", "rank 0", "copy it")
        assert all(name in caught.value.reason for name in names), now
    # Version 3 stored a checksum for each 4 MiB. Of a file with several, no other is known.
    for before in ([a, b], [("a.bin", ["1"]), ("b.bin", ["4"])]):
        check_checksums(before, [a, b], "shards", "the checkpoint", "copy it")
    with refused(DataError, "data.path", "shards", exit_code=3):
        check_checksums([("a.bin", ["1", "2"]), b], [a, b], "shards", "the checkpoint", "copy it")


def test_dataloader_has_the_classic_windows():
    text = " ".join(str(i % 10) for i in range(101))  # 101 tokens: "0", " 1", " 2", ...
    options = {"batch_size": 4, "max_length": 9, "stride": 7}

    def read(**more) -> list[tuple[list[int], list[int]]]:
        batches = create_dataloader(text, **options, **more)
        return list(itertools.chain(*(as_pairs(zip(*batch, strict=True)) for batch in batches)))

    expected = classic_windows(text, GPT2, 9, 7)
    assert len(expected) == 14
    torch.manual_seed(0)
    assert len(read()) == 12
    shuffled = read(drop_last=False)
    assert shuffled != expected
    assert sorted(shuffled) == sorted(expected)
    assert read(shuffle=False) == expected[:12]
    with refused(DataError, "batch_size", 15):  # there is no full batch
        create_dataloader(text, **options | {"batch_size": 15})
