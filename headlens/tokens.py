"""What the lens needs of a tokenizer, from one like tiktoken's or from one of transformers.

tokens = lens_tokenizer(tokenizer)
tokens.encode("The bell")  # [464, 8966]
tokens.token_bytes(8966)  # b" bell"
"""

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")  # of SentencePiece: one byte


@dataclass(frozen=True)
class LensTokenizer:
    """A tokenizer with the same functions for each kind of tokenizer."""

    # ids of a text; a special token that is written in it is its id
    encode: Callable[[str], list[int]]
    token_bytes: Callable[[int], bytes]  # bytes of a token; KeyError if the id is unknown
    num_ids: int  # ids are below
    bos: int  # the token at the start of a text, see lens_tokenizer
    special: frozenset[int]  # ids of special tokens
    prefix: tuple[int, ...] = ()  # ids that the tokenizer puts in front of a text, such as (bos,)

    def encode_text(self, text: str) -> list[int]:
        """Returns the ids of a text with the prefix."""
        return [*self.prefix, *self.encode(text)]


def lens_tokenizer(tokenizer: Any) -> LensTokenizer:
    """Returns the functions of a tokenizer.

    tokenizer: with the methods of tiktoken's encodings; or a fast tokenizer of transformers,
    whose `bos` is its bos_token, else its eos_token, else 0. Raises TypeError for another object.
    """
    if isinstance(tokenizer, LensTokenizer):
        return tokenizer
    if hasattr(tokenizer, "decode_single_token_bytes"):
        return LensTokenizer(
            functools.partial(tokenizer.encode, allowed_special="all"),
            tokenizer.decode_single_token_bytes,
            tokenizer.n_vocab,
            tokenizer.eot_token,
            frozenset(tokenizer.encode_single_token(s) for s in tokenizer.special_tokens_set),
        )
    if not hasattr(tokenizer, "backend_tokenizer"):
        reason = "is neither like tiktoken's nor a fast tokenizer of transformers"
        name = type(tokenizer).__name__
        raise TypeError(f"tokenizer: {name} {reason}; pass one of these, or a LensTokenizer")
    bos = next((i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id) if i is not None), 0)
    before = tokenizer("a").input_ids
    own = tokenizer("a", add_special_tokens=False).input_ids
    count = next((n for n in range(len(before)) if before[n : n + len(own)] == own), 0)
    return LensTokenizer(
        # verbose: it warns of texts that are longer than the context
        lambda text: tokenizer(text, add_special_tokens=False, verbose=False).input_ids,
        _token_bytes(tokenizer),
        len(tokenizer),
        bos,
        frozenset(tokenizer.all_special_ids),
        tuple(before[:count]),
    )


def _token_bytes(tokenizer: Any) -> Callable[[int], bytes]:
    """Returns token_bytes of a fast tokenizer of transformers."""
    added = {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}
    decoder = tokenizer.backend_tokenizer.decoder
    is_byte_level = "ByteLevel" in str(json.loads(decoder.__getstate__()) if decoder else "")

    def token_bytes(token_id: int) -> bytes:
        if token_id in added:
            return added[token_id].encode()
        token = tokenizer.backend_tokenizer.id_to_token(token_id)
        if token is None:
            raise KeyError(token_id)
        if is_byte_level:
            return bytes(map(byte_of().__getitem__, token))
        if BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(token[3:5])
        return token.replace("▁", " ").encode()  # SentencePiece's sign for a space

    return token_bytes


@functools.cache
def byte_of() -> dict[str, int]:
    """Returns the byte of each character of byte-level BPE (Radford et al. 2019): printable Latin-1
    characters are their own byte, the others follow from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    signs = [*map(chr, printable), *(chr(0x100 + n) for n in range(len(others)))]
    return dict(zip(signs, printable + others, strict=True))
