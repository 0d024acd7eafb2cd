"""lens_tokenizer: exact bytes of the tokens of tiktoken, of ours and of transformers."""

import pytest
import tiktoken
from helpers.foreign import WORDS, byte_level_tokenizer, sentencepiece_tokenizer

from clearhead.tokens.tokenizer import Tokenizer
from data import get_tokenizer
from headlens import lens_tokenizer

TEXTS = [WORDS, "The fox", "naïve 😀 ☃\x00\x7f\xad", "  two  spaces ", "<0xE2> <s> <|endoftext|>"]


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_tokens_have_the_bytes_of_the_text(text):
    tokenizer = byte_level_tokenizer()
    tokens = lens_tokenizer(tokenizer)
    ids = tokens.encode(text)
    assert b"".join(map(tokens.token_bytes, ids)) == text.encode()
    assert max(ids) < tokens.num_ids == len(tokenizer)


def test_each_byte_of_a_byte_level_tokenizer():
    """Each of the 256 bytes is a token, also those that are not in UTF-8."""
    tokens = lens_tokenizer(byte_level_tokenizer())
    found = [tokens.token_bytes(i) for i in range(tokens.num_ids)]
    assert {token for token in found if len(token) == 1} == {bytes([byte]) for byte in range(256)}


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_tokens_have_the_bytes_of_the_text(text):
    """After the space that SentencePiece puts in front of a text."""
    tokens = lens_tokenizer(sentencepiece_tokenizer())
    found = [tokens.token_bytes(i) for i in tokens.encode(text)]
    joined = b"".join(found)
    assert joined == text.encode() or joined == b" " + text.encode()


def test_sentencepiece_bytes_and_spaces():
    tokenizer = sentencepiece_tokenizer()
    tokens = lens_tokenizer(tokenizer)
    found = [tokens.token_bytes(i) for i in tokens.encode("bell ☃")]
    assert found[-3:] == [b"\xe2", b"\x98", b"\x83"]
    assert b" bell" in found
    assert tokens.token_bytes(1) == b"<s>"


def test_special_tokens():
    pieces, tokens = sentencepiece_tokenizer(), lens_tokenizer(sentencepiece_tokenizer())
    assert tokens.bos == pieces.bos_token_id == 1
    assert tokens.special == {0, 1, 2}
    assert tokens.prefix == (1,)
    assert tokens.encode("The")[0] != 1
    tokens = lens_tokenizer(byte_level_tokenizer())
    assert (tokens.bos, tokens.special, tokens.prefix) == (0, {0}, ())
    assert tokens.token_bytes(0) == b"<|endoftext|>"
    assert lens_tokenizer(byte_level_tokenizer(eos_token="<|endoftext|>")).bos == 0
    added = byte_level_tokenizer(eos_token="Ġ end")
    assert lens_tokenizer(added).token_bytes(added.eos_token_id) == "Ġ end".encode()


def test_unknown_ids():
    for tokenizer in (byte_level_tokenizer(), sentencepiece_tokenizer(), get_tokenizer("byte")):
        tokens = lens_tokenizer(tokenizer)
        for unknown in (tokens.num_ids, 10**6):
            with pytest.raises(KeyError):
                tokens.token_bytes(unknown)


def test_ours_and_tiktokens():
    ours = get_tokenizer("gpt2")
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"Th": 256}
    theirs = tiktoken.Encoding(
        "small", pat_str=r"\S+|\s", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 257}
    )
    chat = Tokenizer(ranks, "gpt2", {"</s>": 257, "<user>": 258}, end="</s>")
    for tokenizer, end in ((ours, 50256), (theirs, 257), (chat, 257)):
        tokens, special = lens_tokenizer(tokenizer), tokenizer.special_tokens_set
        found = tokens.encode("The ".join(["", *special, ""]))
        assert tokens.special == {*map(tokenizer.encode_single_token, special)} < {*found}
        assert b"".join(map(tokens.token_bytes, tokens.encode(WORDS))) == WORDS.encode()
        assert (tokens.bos, tokens.num_ids) == (end, tokenizer.n_vocab)
    assert lens_tokenizer(tokens) is tokens


def test_another_object_is_refused():
    with pytest.raises(TypeError, match="str"):
        lens_tokenizer("gpt2")
