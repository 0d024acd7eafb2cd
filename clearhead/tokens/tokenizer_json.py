"""Reads and writes tokenizers as tokenizer.json, the format of Hugging Face's `tokenizers`.

    write: to_json(tokenizer)                  AutoTokenizer reads the file; the ids are equal
    read:  read_tokenizer(folder)              tokenizer.json, or vocab.json and merges.txt
           load_tokenizer("runs/NAME")         the value of data.tokenizer

Only byte-level BPE as in the GPT-2 family is read: without a normalizer, with one of the PATTERNS,
and with ids in the order of the merges. A file that would give other ids in `tokenizers` or
transformers is refused. tiktoken merges the neighbours whose *token* has the smallest id,
`tokenizers` those that are the first *pair* in the list of merges. Both give the same ids if each
token is the result of exactly one pair, which is compared here.
"""

import functools
import itertools
import json
from bisect import bisect
from collections.abc import Mapping, Sequence
from pathlib import Path

from clearhead.errors import DataError, message_of
from clearhead.files import parse_json, read_bounded, read_json, read_object
from clearhead.tokens import END_OF_TEXT, MAX_VOCABULARY, VOCABULARIES
from clearhead.tokens.tokenizer import BYTES, CHARACTERS, PATTERNS, Tokenizer, get_tokenizer

TOKENIZER = "tokenizer.json"
MAX_BYTES = 2**26  # of a file
MAX_TOKEN_BYTES, MAX_SPECIAL = 2**10, 2**7  # bytes of a token of text, and of a special token
CONFIG = "tokenizer_config.json"
ADDING = ("SpecialToken", "BertProcessing", "RobertaProcessing")  # post-processors that add tokens
# Settings in tokenizer_config.json that add something to a text, or change it.
CHANGES = ("add_bos_token", "add_eos_token", "add_prefix_space", "do_lower_case")
CHANGES += ("split_special_tokens",)

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
    pairs = tokenizer.merges or merges_of(tokenizer.ranks)
    # A key that `tokenizers` ignores. A file without it has END_OF_TEXT.
    end = {"eos_token": tokenizer.end} if tokenizer.end != END_OF_TEXT else {}
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
            "merges": [list(map(_text, pair)) for pair in pairs],
            **end,
        },
    }
    return json.dumps(content, ensure_ascii=False, indent=1).encode()


def _split(pattern: str) -> dict:
    of_pattern = {"type": "Split", "pattern": {"Regex": PATTERNS[pattern]}}
    return of_pattern | {"behavior": "Isolated", "invert": False}


def merges_of(
    ranks: Mapping[bytes, int], lengths: Mapping[bytes, int] | None = None
) -> list[tuple[bytes, bytes]]:
    """Returns the pair of tokens that is merged to each token, in the order of the ids. lengths: of
    each token, the bytes of the left one; None: searched, which takes long for long tokens. Raises
    ValueError if the bytes of a token are not merged in this way."""
    tokens = sorted(ranks, key=lambda token: (len(token) > 1, ranks[token]))
    numbers = {token: number for number, token in enumerate(tokens)}
    pairs = [(number, number) for number in range(256)]  # of each token; of a byte, itself
    merged: dict[tuple[int, int], int] = {}  # pair -> token
    for number, token in enumerate(tokens[256:], 256):
        places = [lengths[token]] if lengths else range(1, len(token))
        for at in places:
            pair = numbers.get(token[:at], number), numbers.get(token[at:], number)
            if max(pair) < number and _stay_two(*pair, pairs, merged):
                pairs.append(pair)
                merged[pair] = number
                break
        else:
            raise ValueError(f"the token {_text(token)!r:.40} does not result from its bytes")
    return [(tokens[left], tokens[right]) for left, right in pairs[256:]]


def _stay_two(left: int, right: int, pairs: list, merged: dict) -> bool:
    """Returns whether the text of two tokens is encoded as these two, with the merges so far: no
    merge across their boundary comes before their own merges at it (`is_valid_token_pair` of the
    crate `bpe`). Tokens are numbered in the order of the merges, after the bytes."""
    limit = len(pairs)
    while merged.get((left, right), limit) >= limit:
        if left < 256 > right:  # both are bytes
            return True
        if left > right:
            limit, left = left, pairs[left][1]
        else:
            limit, right = right + 1, pairs[right][0]
    return False


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
    others, eos = _added_tokens(folder)
    if file.is_file():
        return from_json(read_bounded(file, MAX_BYTES), others, eos)
    if not ids.is_file() or not merges.is_file():
        return None
    lines = read_bounded(merges, MAX_BYTES).decode().splitlines()
    pairs = [line for line in lines if line and not line.startswith("#version")]
    model = {"vocab": read_json(ids, MAX_BYTES), "merges": pairs}
    others += (_added_token(END_OF_TEXT, None, True),) * (END_OF_TEXT in model["vocab"])
    content = {"model": model, "pre_tokenizer": {"type": "ByteLevel"}}
    return from_json(json.dumps(content).encode(), others, eos)


AddedToken = tuple[str, int | None, bool, bool]  # text, id, is it special, does it change the text


def _added_token(token: object, number: object, special: bool = False) -> AddedToken:
    token = token if isinstance(token, dict) else {"content": token}
    if not isinstance(text := token.get("content"), str) or isinstance(number, dict | list):
        raise ValueError("has an added token without a text or an id")
    changes = any(token.get(flag) for flag in ("single_word", "lstrip", "rstrip"))
    return text, number, special or bool(token.get("special")), changes


def _added_tokens(folder: Path) -> tuple[tuple[AddedToken, ...], str | None]:
    """Returns the tokens that other files add to a vocabulary, with the id None if it has one
    already, and the end-of-text token."""
    settings = read_object(folder / "special_tokens_map.json") | read_object(folder / CONFIG)
    if changes := [key for key in CHANGES if settings.get(key)]:
        raise ValueError(f"adds to a text or changes it ({changes[0]} in {CONFIG})")
    items = read_object(folder / "added_tokens.json").items()
    added = [_added_token(text, number) for text, number in items]
    decoder = settings.get("added_tokens_decoder")
    for number, token in (decoder if isinstance(decoder, dict) else {}).items():
        if isinstance(token, dict) and number.isdecimal():
            added.append(_added_token(token, int(number)))
    names = ("_token", "_special_tokens")  # bos_token, additional_special_tokens, ...
    named = {key: value for key, value in settings.items() if key.endswith(names) and value}
    for value in named.values():
        values = value if isinstance(value, list) else [value]
        added += [_added_token(token, None, special=True) for token in values]
    return tuple(added), _added_token(named.get("eos_token", ""), None)[0] or None


@functools.lru_cache(maxsize=4)
def from_json(
    content: bytes, others: tuple[AddedToken, ...] = (), eos: str | None = None
) -> Tokenizer:
    """Returns the tokenizer for the content of a tokenizer.json. others: more added tokens. eos:
    its end-of-text token, if it is not <|endoftext|>. Raises ValueError."""
    values = parse_json(content)
    try:
        model, added = values["model"], values.get("added_tokens") or []
        added = [*(_added_token(token, token["id"]) for token in added), *others]
        if (kind := model.get("type", "BPE")) != "BPE":
            raise ValueError(f"is a {kind:.40} tokenizer, not byte-level BPE")
        if normalizer := values.get("normalizer"):
            raise ValueError(f"changes the text before it is encoded ({normalizer['type']:.40})")
        affixes = ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
        if any(model.get(key) for key in affixes):
            raise ValueError("is not byte-level BPE")
        if model.get("dropout"):
            raise ValueError("has random ids (dropout)")
        if any(part in str(values.get("post_processor")) for part in ADDING):
            raise ValueError("adds tokens to a text (post_processor)")
        ids = dict(model["vocab"])
        ids |= {token: number for token, number, *_ in added if number is not None}
        eos = model.get("eos_token", eos)
        end = END_OF_TEXT if END_OF_TEXT in ids else eos
        special = {token for token, _, is_special, _ in added if is_special or token == end}
        for token, _, _, changes in added:
            if token not in special:
                raise ValueError(f"has an added token for text, {token!r:.40}")
            if changes:
                raise ValueError(f"has a token that changes the text next to it, {token!r:.40}")
        pattern = _pattern(values.get("pre_tokenizer"))
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        pairs = [(left, right) for left, right in pairs]
        return build_tokenizer(ids, pairs, pattern, special, end)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"is damaged ({type(error).__name__}: {message_of(error)})") from error


def _pattern(pre_tokenizer: dict | None) -> str:
    """Returns the name of the pattern of a pre-tokenizer."""
    parts = [pre_tokenizer or {"type": "none"}]
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
    ids: dict[str, int], pairs: Sequence[Sequence[str]], pattern: str, special: set, end: str | None
) -> Tokenizer:
    """Returns the tokenizer with these ids, merges and special tokens, after all checks."""
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
    if end not in special & ids.keys():
        raise ValueError(f"has no token {END_OF_TEXT}, and {CONFIG} names no eos_token")
    if unequal := special ^ (ids.keys() - {*tokens}):
        reason = "has a token that is neither special nor merged, or both, or has no id"
        raise ValueError(f"{reason}: {min(unequal)!r:.40}")
    _check_special(special)
    ranks = {_bytes(token): ids[token] for token in tokens}
    merges = [(_bytes(left), _bytes(right)) for left, right in pairs]
    try:
        merges_of(ranks, {left + right: len(left) for left, right in merges})
    except ValueError as error:
        raise ValueError("has merges that are not those of byte-level BPE") from error
    tokenizer = Tokenizer(ranks, pattern, {name: ids[name] for name in special}, end=end)
    tokenizer.merges = merges
    return _named(tokenizer)


def _check_special(names: set[str]) -> None:
    """Raises ValueError if special tokens are empty, long, or overlap. If a special token contains
    another, or its end is the start of one, the ids depend on where encoding starts."""
    ordered = sorted(names)
    for name in ordered:
        if not 0 < len(name.encode()) <= MAX_SPECIAL:
            raise ValueError(f"has a special token of 0 or over {MAX_SPECIAL} bytes: {name!r:.40}")
        for at in range(len(name)):
            rest = name[at:]
            place = bisect(ordered, rest)  # ordered[place - 1] <= rest < ordered[place]
            contains = at and place and rest.startswith(ordered[place - 1])
            if contains or any(other.startswith(rest) for other in ordered[place : place + 1]):
                raise ValueError(f"has special tokens that overlap, such as {name!r:.40}")


def _bytes(token: str) -> bytes:
    return bytes(BYTES[character] for character in token)


def _named(tokenizer: Tokenizer) -> Tokenizer:
    """Returns the built-in tokenizer if it is equal to this one."""
    for name, size in VOCABULARIES.items():
        if tokenizer.n_vocab == size and tokenizer.checksum == get_tokenizer(name).checksum:
            return get_tokenizer(name)
    return tokenizer
