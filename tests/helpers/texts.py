"""Texts of every kind, their tokens by single calls of tiktoken, and shards made of them."""

import gzip
import json
import random
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
from hypothesis import strategies as st

from errors import ClearheadError
from tokens import END_OF_TEXT
from tokens.paths import find_files
from tokens.prepare import Preparation, PrepareSettings
from tokens.shards import HEADER_BYTES, open_shards
from tokens.tokenizers import TOKENIZERS, get_tokenizer

FRAGMENTS = [
    *" \n\r\t\x0b\x1c\x85\u00a0\u2028\u3000\u200b\ufeff",
    *("  ", "\r\n", "\n\n\n", "\n ", " \n", "the", "Naïve", "don't", "we'll", "'s", "'", "1234"),
    *("日本語", "Ελλάδα", "שלום", "नमस्ते", "🙂", "👩‍👩‍👧", "e\u0301", "a" * 40, " " * 40),
    *(END_OF_TEXT, "<|endof", "text|>"),
]
mixes = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=40).map("".join)
rows = st.sampled_from(["jsonl", "jsonl.gz", "jsonl.zst", "ndjson", "parquet"])
# A text file is one document, neither empty nor with a zero byte; the others hold any number.
a_text = mixes.map(lambda text: [text.replace("\0", "") or "x"])
sources = st.tuples(st.sampled_from(["txt", "txt.gz", "txt.zst"]), a_text)
sources |= st.tuples(rows, st.lists(mixes, max_size=5))
collections = st.lists(sources, min_size=1, max_size=5)


def write_source(path: Path, texts: list[str]) -> Path:
    """A file of these documents, of the kind and compression that its name says."""
    if path.name.endswith(".parquet"):
        path.parent.mkdir(parents=True, exist_ok=True)
        table = pyarrow.table({"text": pyarrow.array(texts, pyarrow.string())})
        pyarrow.parquet.write_table(table, path, row_group_size=2)
        return path
    content = "".join(texts)
    if path.name.split(".")[1] in ("jsonl", "ndjson"):
        content = "".join(json.dumps({"n": n, "text": t}) + "\n" for n, t in enumerate(texts))
    return write_packed(path, content)


def write_packed(path: Path, content: str | bytes = "text") -> Path:
    """A file with this content, compressed as its name says."""
    raw = content.encode() if isinstance(content, str) else content
    if path.suffix.lower() == ".gz":
        raw = gzip.compress(raw, 1, mtime=0)
    if path.suffix.lower() == ".zst":
        raw = pyarrow.compress(raw, "zstd", asbytes=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)
    return path


def write_collection(folder: Path, collection: list[tuple[str, list[str]]]) -> Path:
    """A folder of files, whose sorted order is that of the list."""
    for number, (kind, texts) in enumerate(collection):
        write_source(folder / f"{number % 2}" / f"{number:02d}.{kind}", texts)
    return folder


def in_order(collection: list) -> list:
    """The order in which a folder of two folders is read."""
    return [*collection[::2], *collection[1::2]]


def encode_at_once(text: str, tokenizer: str = "gpt2", endoftext: str = "token") -> np.ndarray:
    """The ids of a text by a single call of tiktoken."""
    special = {END_OF_TEXT} if endoftext == "token" else set()
    encode = get_tokenizer(tokenizer).encode
    return np.array(encode(text, allowed_special=special, disallowed_special=()), np.uint16)


def expected_ids(collection: list, tokenizer: str = "gpt2", endoftext: str = "token") -> list[int]:
    """One call of tiktoken for each document, each behind an end-of-text token."""
    end_of_text, ids = get_tokenizer(tokenizer).eot_token, []
    for kind, texts in collection:
        for text in texts:
            text = text.removeprefix("\ufeff") if "txt" in kind else text
            own = encode_at_once(text, tokenizer, endoftext).tolist()
            ids += own if own[:1] in ([], [end_of_text]) else [end_of_text, *own]
    return ids


def numbers_in(error: ClearheadError) -> set[int]:
    """The numbers that the reason of an error names, decimal or hexadecimal."""
    found = re.findall(r"(?<![\w-])(?:0x[0-9a-f]+|\d[\d,]*)", error.reason)
    return {int(number.replace(",", ""), 0) for number in found}


def peak_memory(function: Callable[[], object]) -> tuple[object, int]:
    """What the function returns, and the most bytes that Python had at once for it."""
    tracemalloc.start()
    try:
        return function(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def varied_text(size: int, seed: int = 0) -> str:
    """So many made-up characters, among them ends of documents; no two stretches alike."""
    characters = "etaoinshrdlu αβγδε あいうえお 0123 .,\n" * 20
    return "".join(random.Random(seed).choices([*characters, END_OF_TEXT], k=size))


def preparation(path: object, folder: Path, i: int = 1, n: int = 1, **changes) -> Preparation:
    values = {"tokenizer": "gpt2", "endoftext": "token", "engine": "gigatoken", "text_key": "text"}
    settings = PrepareSettings(**values | {"shard_tokens": 10**8} | changes)
    path = [str(p) for p in path] if isinstance(path, list) else str(path)
    return Preparation(find_files(path), folder, settings, (i, n))


def prepare(path: object, folder: Path, i: int = 1, n: int = 1, workers: int = 1, **changes):
    """What the command does with part=i/n: the manifest; None while other parts are missing."""
    made = preparation(path, folder, i, n, **changes)
    made.start()
    made.run(made.unfinished(made.assigned), workers, lambda count: None)
    return made.finish()


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file under a folder, but for the records of a preparation."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    files = [path for path in files if path.parent.name != "preparing"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def ids_of(folder: Path) -> list[int]:
    """The ids of all shards, in the manifest's order, read without any code of ours."""
    shards = json.loads((folder / "manifest.json").read_text())["shards"]
    raw = [(folder / shard["file"]).read_bytes()[HEADER_BYTES:] for shard in shards]
    return np.frombuffer(b"".join(raw), "<u2").tolist()


def check_manifest(folder: Path, manifest: dict, tokenizer: str, shard_tokens: int) -> None:
    """It says what is there, and nothing else is."""
    assert json.loads((folder / "manifest.json").read_text()) == manifest
    end_of_text = TOKENIZERS[tokenizer] - 1
    assert (manifest["tokenizer"], manifest["vocab_size"]) == (tokenizer, end_of_text + 1)
    stream = open_shards(str(folder), tokenizer, verify=True)["train"]
    assert manifest["tokens"] == len(stream) == sum(s["tokens"] for s in manifest["shards"])
    starts = np.flatnonzero(np.array(ids_of(folder)) == end_of_text)
    assert stream.document_starts().tolist() == starts.tolist()
    assert manifest["documents"] == len(starts) == sum(s["documents"] for s in manifest["shards"])
    assert all(1 <= shard["tokens"] <= shard_tokens for shard in manifest["shards"])
    named = {shard["file"] for shard in manifest["shards"]}
    assert {path.name for path in folder.iterdir()} == named | {"manifest.json", "preparing"}


def finished_shards(folder: Path) -> dict[str, tuple]:
    """The shards of all tasks that left a record, and what would change if they were made again."""
    records = [json.loads(path.read_text()) for path in folder.glob("preparing/[0-9]*.json")]
    return {s["file"]: _state(folder / s["file"]) for record in records for s in record["shards"]}


def _state(path: Path) -> tuple:
    stat = path.stat()
    return stat.st_ino, stat.st_mtime_ns


def check_kept(folder: Path, before: dict[str, tuple]) -> None:
    """Finished shards are the very same files."""
    assert {file: _state(folder / file) for file in before} == before
