"""tokens/overlap.py: how much of the validation text is also in the training text."""

import random
import re
from pathlib import Path

import numpy as np
import pytest

from clearhead.config.schema import DataConfig
from clearhead.files import REPOSITORY
from clearhead.tokens import END_OF_TEXT, overlap
from clearhead.tokens.token_stream import TokenStream
from clearhead.tokens.tokenizer import get_tokenizer
from data import GPTDatasetV1, load_datasets

CHANCE = random.Random(0)
WORDS = ["".join(CHANCE.choices("etaoinshrdlu", k=CHANCE.randint(2, 9))) for _ in range(3000)]
SIGNS = [chr(CHANCE.randint(0x4E00, 0x5E00)) for _ in range(800)]


def words(count: int) -> str:
    return " ".join(CHANCE.choices(WORDS, k=count))


def lines(count: int) -> str:
    return "".join(words(CHANCE.randint(3, 12)) + "\n" for _ in range(count))


def shuffled(texts: list[str]) -> list[str]:
    return CHANCE.sample(texts, len(texts))


def found(train: str, val: str, tokenizer: str) -> int:
    """The percent of the result; 0 if there is none."""
    tokens, end = get_tokenizer(tokenizer), f"{END_OF_TEXT}"
    parts = [
        GPTDatasetV1(
            TokenStream(
                [np.array(tokens.encode(end + text, allowed_special="all"), np.uint16)],
                tokens.n_vocab,
                tokens.eot_token,
            ),
            tokens,
            8,
            8,
        )
        for text in (train, val)
    ]
    return percent(overlap.overlap(*parts, tokens.byte_lengths))


def percent(result: str | None) -> int:
    return int(re.search(r"\d+", result)[0]) if result else 0


LONG, OTHER, PART = lines(600), lines(600), lines(150)
RECORDS = [words(40) for _ in range(150)]
SHORT = [words(4) for _ in range(700)]
ROW = "".join(CHANCE.choices(SIGNS, k=4000))
CASES = {
    "another text": (LONG, OTHER, 0, 0),
    "a copy": (LONG + OTHER, OTHER, 99, 100),
    "a copy in other surroundings": (LONG + "Once: " + PART + OTHER, "x " + PART, 93, 100),
    "a quarter": (LONG + PART, lines(450) + PART, 18, 32),
    "without a line break": (words(3000) + " " + " ".join(RECORDS), " ".join(RECORDS), 95, 100),
    "Chinese characters": (ROW[:99] + ROW, ROW, 97, 100),
    "other Chinese characters": (ROW, "".join(CHANCE.choices(SIGNS, k=4000)), 0, 0),
    "records in another order": (
        END_OF_TEXT.join(shuffled(RECORDS)),
        END_OF_TEXT.join(RECORDS),
        97,
        100,
    ),
    "records that are shorter than a piece": (
        END_OF_TEXT.join([*shuffled(SHORT), "end"]),
        END_OF_TEXT.join([*SHORT, "end"]),
        90,
        100,
    ),
    "speakers and headings": (
        "".join(f"FIRST CITIZEN:\n{words(14)}\n\n" for _ in range(300)),
        "".join(f"FIRST CITIZEN:\n{words(14)}\n\n" for _ in range(300)),
        0,
        0,
    ),
    "a single piece": (
        LONG + "the same words, here and there, and nothing else than these words\n",
        OTHER + "the same words, here and there, and nothing else than these words\n",
        0,
        0,
    ),
}


@pytest.mark.parametrize("tokenizer", ["gpt2", "byte"])
@pytest.mark.parametrize("case", CASES)
def test_fraction_of_a_text_that_is_in_another(case, tokenizer):
    train, val, least, most = CASES[case]
    assert least <= found(train, val, tokenizer) <= most


def test_the_sample_text_has_no_note():
    text = (REPOSITORY / "corpus" / "sample.txt").read_text(encoding="utf-8")
    start = len(text) * 9 // 10
    assert found(text[:start], text[start:], "gpt2") == 0


def test_of_more_tokens_than_are_read_some_are_compared(monkeypatch):
    text = lines(3000)
    val = "".join(re.findall("(?:.*\n){3}", text)[::15])  # everywhere in the text
    monkeypatch.setattr(overlap, "BLOCK", 2**11)
    monkeypatch.setattr(overlap, "MAX_READ", 2**14)
    read, blocks = [], TokenStream.blocks

    def counted(stream, *arguments):
        for ids in blocks(stream, *arguments):
            read.append(len(ids))
            yield ids

    monkeypatch.setattr(TokenStream, "blocks", counted)
    assert 3 < found(text, val, "byte") < 30
    assert sum(read) < 2**15


@pytest.mark.parametrize("path", ["text.txt", "tokens"])
def test_sources_of_a_mixture_are_compared_with_all_training_tokens(tmp_path: Path, path):
    """Also of token files, which are memory-mapped."""
    from helpers.texts import prepare, write_source

    a, b = lines(300), lines(300)
    for name, text in (("a", a + b), ("b", lines(300))):
        write_source(tmp_path / name / "text.txt", [text])
        prepare(str(tmp_path / name / "text.txt"), tmp_path / name / "tokens", tokenizer="byte")
    val = write_source(tmp_path / "val.txt", [b])
    sources = [str(tmp_path / name / path) for name in "ba"]
    values = {"tokenizer": "byte", "max_length": 8, "weights": [0.5, 0.5]}
    tokens = get_tokenizer("byte")
    for options, least, most in (({"val_path": str(val)}, 97, 100), ({"val_fraction": 0.1}, 0, 0)):
        data = load_datasets(DataConfig.with_defaults(path=sources, **values | options), tokens)
        result = overlap.overlap(data.train, data.val, tokens.byte_lengths)
        assert least <= percent(result) <= most
