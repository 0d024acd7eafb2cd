"""Reads and writes tokenizers as tokenizer.json, the format of Hugging Face's `tokenizers`.

    write: to_json(tokenizer)                  AutoTokenizer reads the file; the ids are equal
    read:  read_tokenizer(folder)              tokenizer.json, or vocab.json and merges.txt
           load_tokenizer("runs/NAME")         the value of data.tokenizer

Only byte-level BPE as in the GPT-2 family is read: without a normalizer, with one of the PATTERNS,
and with ids in the order of the merges. tiktoken merges the neighbours whose *token* has the
smallest id, tokenizers the neighbours that are the first *pair* in the list of merges. Both give
the same ids if each token is the result of exactly one pair, which is compared here.
"""

import functools
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from clearhead.errors import DataError, message_of
from clearhead.files import parse_json, read_bounded, read_json, read_object
from clearhead.tokens import END_OF_TEXT, MAX_VOCABULARY, VOCABULARIES
from clearhead.tokens.tokenizer import BYTES, CHARACTERS, PATTERNS, Tokenizer, get_tokenizer

TOKENIZER = "tokenizer.json"
MAX_BYTES = 2**26  # of a file
MAX_TOKEN_BYTES = 2**10

# ---------------------------------------------------------------------------------------- writing


def stored(tokenizer: Tokenizer, setting: str) -> bytes | None:
    """Returns the content of the tokenizer.json of a run; None if the value of data.tokenizer is
    the name of a built-in tokenizer. A directory may contain a tokenizer that is equal to one."""
    return None if setting in VOCABULARIES else to_json(tokenizer)


@functools.lru_cache(maxsize=4)
def to_json(tokenizer: Tokenizer) -> bytes:
    """Returns the content of tokenizer.json. The same tokenizer has the same file everywhere."""
    of_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    is_gpt2 = tokenizer.pattern == "gpt2"  # ByteLevel has this pattern
    pre_tokenizer = of_bytes | {"use_regex": is_gpt2}
    if not is_gpt2:
        pre_tokenizer = {
            "type": "Sequence",
            "pretokenizers": [_split(tokenizer.pattern), pre_tokenizer],
        }
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = sorted(tokenizer.special.items(), key=lambda item: item[1])
    # tokenizers gives an added token that is not in the vocabulary another id than its own.
    ids = {_text(token): number for token, number in tokenizer.ranks.items()} | tokenizer.special
    merges = [list(map(_text, pair)) for pair in merges_of(tokenizer.ranks)]
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": name, **flags, "special": True} for name, number in special
        ],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": of_bytes | {"use_regex": True},
        "decoder": of_bytes | {"use_regex": True},
        "model": {
            "type": "BPE",
            **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix")),
            "end_of_word_suffix": None,
            **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
            "vocab": dict(sorted(ids.items(), key=lambda item: item[1])),
            "merges": merges,
        },
    }
    return json.dumps(content, ensure_ascii=False, indent=1).encode()


def _split(pattern: str) -> dict:
    of_pattern = {"type": "Split", "pattern": {"Regex": PATTERNS[pattern]}}
    return of_pattern | {"behavior": "Isolated", "invert": False}


def merges_of(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Returns the pair of tokens that is merged to each token, in the order of the ids."""
    return [_pair(ranks, token) for token in sorted(ranks, key=ranks.get) if len(token) > 1]


def _pair(ranks: Mapping[bytes, int], token: bytes) -> tuple[bytes, bytes]:
    """Merges the bytes of a token as in a text until two parts are left. Raises ValueError if the
    last merge of a text that is this token is not this token."""
    parts = [token[at : at + 1] for at in range(len(token))]
    while len(parts) > 2:
        of_pairs = [ranks.get(a + b, math.inf) for a, b in itertools.pairwise(parts)]
        lowest = min(of_pairs)
        if lowest >= ranks[token]:
            raise ValueError(f"the token {_text(token)!r:.40} does not result from its bytes")
        at = of_pairs.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def _text(token: bytes) -> str:
    return "".join(CHARACTERS[byte] for byte in token)


# ---------------------------------------------------------------------------------------- reading


def load_tokenizer(source: str) -> Tokenizer:
    """Returns the tokenizer of data.tokenizer: gpt2, byte, or the path of a run, a checkpoint, a
    folder of token files or a Hugging Face directory. Raises DataError."""
    if source in VOCABULARIES:
        return get_tokenizer(source)
    path = Path(source).expanduser()
    folder = path.parent if path.name == TOKENIZER else path
    hint = "use gpt2, byte, bpe (trained on your text), or a directory with a tokenizer.json"
    try:
        found = read_tokenizer(folder)
    except (OSError, ValueError) as error:
        raise DataError("data.tokenizer", source, message_of(error), hint) from error
    if found is None:
        reason = f"there is no {TOKENIZER}" if folder.is_dir() else "no such tokenizer or directory"
        raise DataError("data.tokenizer", source, reason, hint)
    return found


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """Returns the tokenizer of a directory, None if it has no files of one. Raises OSError, and
    ValueError if they are damaged or not those of byte-level BPE."""
    file, ids, merges = (folder / name for name in (TOKENIZER, "vocab.json", "merges.txt"))
    if file.is_file():
        return from_json(read_bounded(file, MAX_BYTES), *_added_tokens(folder))
    if not ids.is_file() or not merges.is_file():
        return None
    lines = read_bounded(merges, MAX_BYTES).decode().splitlines()
    pairs = [line for line in lines if line and not line.startswith("#version")]
    content = {"model": {"vocab": read_json(ids, MAX_BYTES), "merges": pairs}}
    return _from_values(content, *_added_tokens(folder))


def _added_tokens(folder: Path) -> tuple[tuple, str | None]:
    """Returns the tokens that other files add to a vocabulary, as (text, id, whether it is special)
    each, and the end-of-text token."""
    settings = read_object(folder / "tokenizer_config.json")
    added = [(*pair, False) for pair in read_object(folder / "added_tokens.json").items()]
    decoder, eos = (settings.get(key) for key in ("added_tokens_decoder", "eos_token"))
    for number, token in (decoder if isinstance(decoder, dict) else {}).items():
        if isinstance(token, dict) and number.isdecimal():
            added.append((token.get("content"), int(number), bool(token.get("special"))))
    eos = eos.get("content") if isinstance(eos, dict) else eos
    if not all(isinstance(text, str) and type(number) is int for text, number, _ in added):
        raise ValueError("has an added token without a text or an id")
    return tuple(added), eos if isinstance(eos, str) else None


@functools.lru_cache(maxsize=4)
def from_json(content: bytes, others: tuple = (), eos: str | None = None) -> Tokenizer:
    """Returns the tokenizer for the content of a tokenizer.json. others: more added tokens, as
    _added_tokens returns them. eos: its end-of-text token, if it is not <|endoftext|>. Raises
    ValueError."""
    return _from_values(parse_json(content), others, eos)


def _from_values(content: object, others: tuple, eos: str | None) -> Tokenizer:
    try:
        model, added = content["model"], content.get("added_tokens") or []
        added = [(token["content"], token["id"], token.get("special")) for token in added]
        added += others
        if (kind := model.get("type", "BPE")) != "BPE":
            raise ValueError(f"is a {kind:.40} tokenizer, not byte-level BPE")
        if normalizer := content.get("normalizer"):
            raise ValueError(f"changes the text before it is encoded ({normalizer['type']:.40})")
        affixes = ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
        if any(model.get(key) for key in affixes):
            raise ValueError("is not byte-level BPE")
        known = {END_OF_TEXT, eos, *(token for token, _, is_special in added if is_special)}
        for token, *_ in added:
            if token not in known:
                raise ValueError(f"has an added token for text, {token!r:.40}")
        pattern = _pattern(content.get("pre_tokenizer"))
        ids = model["vocab"] | {token: number for token, number, _ in added}
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        return build_tokenizer(ids, [(left, right) for left, right in pairs], pattern, eos)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"is damaged ({type(error).__name__}: {message_of(error)})") from error


def _pattern(pre_tokenizer: dict | None) -> str:
    """Returns the name of the pattern of a pre-tokenizer. A vocabulary without one is GPT-2's."""
    parts = [pre_tokenizer or {"type": "ByteLevel"}]
    if parts[0]["type"] == "Sequence":
        parts = parts[0]["pretokenizers"]
    *splits, last = parts
    if last["type"] != "ByteLevel" or last.get("add_prefix_space"):
        raise ValueError("is not byte-level BPE, or adds a space before the text")
    if not splits and last.get("use_regex", True):
        return "gpt2"
    name = next((name for name in PATTERNS if splits == [_split(name)]), None)
    if name is None or last.get("use_regex", True):
        raise ValueError("splits the text with another pattern than GPT-2 or Qwen 3.5")
    return name


def build_tokenizer(
    ids: dict[str, int], pairs: Sequence[Sequence[str]], pattern: str, eos: str | None = None
) -> Tokenizer:
    """Returns the tokenizer with these ids and merges, after all checks."""
    if len(ids) > MAX_VOCABULARY:
        raise ValueError(f"has {len(ids):,} ids; at most {MAX_VOCABULARY:,} fit into 16 bits")
    if not all(type(number) is int for number in ids.values()):
        raise ValueError("is damaged (an id is not a number)")
    if sorted(ids.values()) != [*range(len(ids))]:
        raise ValueError(f"has ids that are not the numbers from 0 to {len(ids) - 1:,}")
    if missing := [byte for byte in range(256) if CHARACTERS[byte] not in ids]:
        raise ValueError(f"is not byte-level BPE: no token for the byte 0x{missing[0]:02X}")
    if longest := [a for a, b in pairs if len(a) + len(b) > MAX_TOKEN_BYTES]:
        raise ValueError(f"has a token of more than {MAX_TOKEN_BYTES:,} bytes, {longest[0]:.20}...")
    tokens = [*CHARACTERS, *(left + right for left, right in pairs)]
    if unknown := [token for token in tokens if not BYTES.keys() >= {*token} or token not in ids]:
        raise ValueError(f"is not byte-level BPE: the token {unknown[0]!r:.40}")
    numbers = [ids[token] for token in tokens[256:]]
    if any(a >= b for a, b in itertools.pairwise(numbers)):
        raise ValueError("has ids that are not in the order of the merges")
    ranks = {_bytes(token): ids[token] for token in tokens}
    if merges_of(ranks) != [(_bytes(left), _bytes(right)) for left, right in pairs]:
        raise ValueError("has merges that are not those of byte-level BPE")
    special = {name: number for name, number in ids.items() if _bytes(name) not in ranks}
    if END_OF_TEXT not in special:
        if eos not in special:
            raise ValueError(f"has no token {END_OF_TEXT}")
        special[END_OF_TEXT] = special.pop(eos)
    return _named(Tokenizer(ranks, pattern, special))


def _bytes(token: str) -> bytes | None:
    """Returns the bytes of a token; None if it has characters that are not those of bytes."""
    return bytes(map(BYTES.get, token)) if BYTES.keys() >= {*token} else None


def _named(tokenizer: Tokenizer) -> Tokenizer:
    """Returns the built-in tokenizer if it is equal to this one."""
    for name, size in VOCABULARIES.items():
        if tokenizer.n_vocab == size and tokenizer.checksum == get_tokenizer(name).checksum:
            return get_tokenizer(name)
    return tokenizer
