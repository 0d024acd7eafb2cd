"""tokens/tokenizer.py, training: merges of a plain implementation, ids as those of `tokenizers`."""

import itertools
import os
import random
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import regex
import tokenizers
from helpers.refusals import refused
from helpers.tally import trials
from helpers.texts import FRAGMENTS, mixes
from hypothesis import example, given

from clearhead.errors import DataError
from clearhead.files import REPOSITORY
from clearhead.tokens import END_OF_TEXT
from clearhead.tokens.encoding import StreamEncoder, concatenate, utf8_blocks
from clearhead.tokens.tokenizer import (
    LONGEST_TOKEN,
    PATTERNS,
    TRAINED_PATTERN,
    Sample,
    default_vocab_size,
    train_tokenizer,
)
from clearhead.tokens.tokenizer_json import to_json

TEXT = """Zwei Boote liegen im Hafen; das größere heißt „Möwe“, das kleinere „Möwchen“.
二隻の船が港にある。大きい船は鷗、小さい船は小鷗。नाव में दो लोग हैं, और नाव में पानी है।
قاربان في الميناء، والقارب الكبير هو النورس. เรือสองลำ เรือใหญ่ เรือเล็ก It's 12, we'll go.
"""


def sample_of(*texts: str, limit: int = 10**6) -> Sample:
    sample = Sample(limit)
    for text in texts:
        sample.add(text.encode())
    return sample


def plain_tokens(texts: list[str], most: int) -> list[bytes]:
    """The definition: characters that occur twice, with their beginnings, the most frequent first;
    then merges of characters (Sennrich et al. 2016), counting all pairs again after each. A tie
    goes to the pair whose parts are older; the oldest are the characters, in their order."""
    counts = Counter("".join(texts))
    repeated = [c for c in sorted(counts, key=lambda c: (-counts[c], c)) if counts[c] > 1]
    parts_of = (c.encode()[:end] for c in repeated for end in range(2, len(c.encode()) + 1))
    found = [*dict.fromkeys(parts_of)]
    known = {*repeated, *map(chr, range(128))}
    ages = {character: n for n, character in enumerate(sorted(known))}
    pieces = [p for text in texts for p in regex.findall(PATTERNS[TRAINED_PATTERN], text)]
    of_known = regex.compile(f"[{regex.escape(''.join(known))}]+")  # a rare character divides them
    words = Counter(word for piece in pieces for word in of_known.findall(piece))
    split = {word: list(word) for word in words}
    while len(found) < most:
        pairs = Counter()
        for word, parts in split.items():
            for pair in itertools.pairwise(parts):
                pairs[pair] += words[word]
        if not (often := [pair for pair in pairs if pairs[pair] > 1]):
            break
        best = min(often, key=lambda pair: (-pairs[pair], ages[pair[0]], ages[pair[1]]))
        new = "".join(best)
        found.append(new.encode())
        ages[new] = len(ages)
        for parts in split.values():
            at = 0
            while at < len(parts) - 1:
                if (parts[at], parts[at + 1]) == best:
                    parts[at : at + 2] = [new]
                at += 1
    return found


def test_tokens_are_those_of_the_definition():
    for texts in ([TEXT], ["aaa aaaa aaaaa" * 3, "=" * 30, "=" * 30], ["", "x"]):
        tokenizer = train_tokenizer(sample_of(*texts))
        words = sorted(tokenizer.ranks, key=tokenizer.ranks.get)
        assert words[:256] == [bytes([byte]) for byte in range(256)]
        assert words[256:] == plain_tokens(texts, 300)
        assert tokenizer.eot_token == tokenizer.n_vocab - 1


def test_a_phrase_that_is_repeated_is_not_one_token():
    tokenizer = train_tokenizer(sample_of(*["=" * 1000, "本日は晴天なり" * 30] * 9))
    longest = max(len(word.decode("utf-8", "ignore")) for word in tokenizer.ranks)
    assert LONGEST_TOKEN // 4 < longest <= LONGEST_TOKEN


THAI = """เรือสองลำจอดอยู่ในท่าเรือ เรือใหญ่กว่าชื่อ นางนวล เรือเล็กกว่าชื่อ ลูกนางนวล
ลมพัดมาจากทะเล คนเฝ้าประภาคารจุดไฟทุกคืน แล้วจดชื่อเรือทุกลำที่ผ่านไปในสมุดเล่มใหญ่
"""


@pytest.mark.parametrize("size", [None, 300, 400])
def test_a_token_has_whole_characters_or_the_beginning_of_one(size):
    """Also with characters that are rare, or occur once. All tokens occur in the text."""
    text = THAI * 20 + TEXT * 3 + "港鷗😀"
    tokenizer = train_tokenizer(sample_of(text), size)
    beginnings = {c.encode()[:end] for c in text for end in range(1, len(c.encode()) + 1)}
    for word in tokenizer.ranks:
        if len(word) > 1 and word not in beginnings:
            assert word.decode() in text
    ids = tokenizer.encode(THAI)
    assert len(ids) < len(THAI)
    assert size or all(tokenizer.decode([number]) in THAI for number in ids)


def test_a_text_without_spaces_is_no_single_piece():
    """A megabyte of DNA would take hours: the time for a piece is quadratic in its length."""
    sample = Sample()
    sample.blocks = ["".join(random.Random(0).choices("ACGT", k=2**20)).encode()]
    assert train_tokenizer(sample, 280).n_vocab == 280


@pytest.fixture(scope="module")
def trained():
    draw = random.Random(0)
    text = "".join(draw.choices(FRAGMENTS, k=4000)) + TEXT * 5
    return train_tokenizer(sample_of(text))


TRAIN = """import sys
from clearhead.tokens.tokenizer_json import to_json
from clearhead.tokens.tokenizer import Sample, train_tokenizer
sample = Sample()
for _ in range(9):
    sample.add(sys.stdin.buffer.read())
    sys.stdin.seek(0)
sys.stdout.buffer.write(to_json(train_tokenizer(sample, 400)))
"""


def test_the_same_text_has_the_same_file(tmp_path):
    """In another process, with another number of threads."""
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    expected = to_json(train_tokenizer(sample_of(*[TEXT] * 9), 400))
    env = os.environ | {"PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "3"}
    with open(tmp_path / "text.txt", "rb") as text:
        command = [sys.executable, "-c", TRAIN]
        found = subprocess.check_output(command, stdin=text, env=env, cwd=REPOSITORY)
    same = found == expected  # both are long
    assert same
    assert train_tokenizer(sample_of(TEXT * 9), 401).n_vocab == 401


@trials(50, 1000)
@given(mixes)
@example("’s 're 'LL x's\n\n \r\n\t. .\n\n")
@example("क्षि कि 한국어 각 가\u0301 ก็ ที่ 👩‍👩‍👧 1234567 ½ ٣ ³")
def test_ids_are_those_of_tokenizers_and_tiktoken(trained, text):
    theirs = tokenizers.Tokenizer.from_str(to_json(trained).decode())
    expected = theirs.encode(text).ids
    assert trained.encode(text, allowed_special="all") == expected
    assert trained.decode(expected) == text
    found = concatenate(StreamEncoder(trained, chunk_bytes=40).encode(utf8_blocks(text, 7)))
    assert found.tolist() == expected
    assert trained.byte_lengths[expected].sum() == len(text.replace(END_OF_TEXT, "").encode())


def test_end_of_text_is_not_part_of_the_text():
    with_ends, without = (sample_of(f"{end}".join([TEXT] * 9)) for end in (END_OF_TEXT, ""))
    assert not any(b"endof" in word for word in train_tokenizer(with_ends).ranks)
    assert with_ends.text_bytes > without.text_bytes


def test_the_size_of_a_vocabulary():
    sizes = [default_vocab_size(size) for size in (0, 1, 10**5, 10**6, 10**7, 10**8, 10**12)]
    assert sizes == sorted(sizes)
    assert sizes[0] >= 258
    assert sizes[-1] <= 2**16
    short = train_tokenizer(sample_of(TEXT))  # has fewer pairs than the default size
    assert 258 < short.n_vocab < default_vocab_size(len(TEXT))
    assert train_tokenizer(sample_of(TEXT), short.n_vocab).name == short.name
    with refused(DataError, "data.vocab_size", short.n_vocab + 1, exit_code=3) as caught:
        train_tokenizer(sample_of(TEXT), short.n_vocab + 1)
    assert str(short.n_vocab) in caught.value.hint
    assert train_tokenizer(sample_of(TEXT), 258).n_vocab == 258


def test_a_sample_is_bounded_and_evenly_spaced():
    sample, size, blocks = Sample(limit=100_000), 1000, 5000
    for number in range(blocks):
        sample.add(b"%04d" % number * (size // 4))
        assert sample.size == sum(map(len, sample.blocks)) <= 100_000
    assert sample.text_bytes == size * blocks
    kept = np.array([int(block[:4]) for block in sample.blocks])
    assert len({*np.diff(kept)}) == 1
    assert kept[0] == 0
    assert blocks - kept[-1] <= np.diff(kept)[0]
    assert sample.size > 50_000
    complete = sample_of(TEXT, TEXT)
    assert b"".join(complete.blocks).decode() == TEXT * 2
