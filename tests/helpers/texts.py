"""Texts of all formats, their tokens by one call of tiktoken, and shards made of them."""

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

from clearhead.errors import ClearheadError
from clearhead.tokens import END_OF_TEXT
from clearhead.tokens.prepare import Preparation, PrepareSettings, run_task
from clearhead.tokens.shards import HEADER_BYTES, open_shards
from clearhead.tokens.sources import find_files, token_files
from clearhead.tokens.tokenizer import get_tokenizer

FRAGMENTS = [
    *" \n\r\t\x0b\x1c\x85\u00a0\u2028\u3000\u200b\ufeff",
    *("  ", "\r\n", "\n\n\n", "\n ", " \n", "the", "Naïve", "don't", "we'll", "'s", "'", "1234"),
    *("日本語", "Ελλάδα", "שלום", "नमस्ते", "🙂", "👩‍👩‍👧", "e\u0301", "a" * 40, " " * 40),
    *(END_OF_TEXT, "<|endof", "text|>"),
]
mixes = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=40).map("".join)
rows = st.sampled_from(["jsonl", "jsonl.gz", "jsonl.zst", "ndjson", "parquet"])
# A text file is one document, not empty and without a zero byte. Other files have 0 to 5 documents.
a_text = mixes.map(lambda text: [text.replace("\0", "") or "x"])
sources = st.tuples(st.sampled_from(["txt", "txt.gz", "txt.zst"]), a_text)
sources |= st.tuples(rows, st.lists(mixes, max_size=5))
collections = st.lists(sources, min_size=1, max_size=5)


def write_source(path: Path, texts: list[str]) -> Path:
    """Writes documents to a file. Its extension selects format and compression."""
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
    """Writes content to a file, compressed according to its extension."""
    raw = content.encode() if isinstance(content, str) else content
    if path.suffix.lower() == ".gz":
        raw = gzip.compress(raw, 1, mtime=0)
    if path.suffix.lower() == ".zst":
        raw = pyarrow.compress(raw, "zstd", asbytes=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)
    return path


def write_collection(folder: Path, collection: list[tuple[str, list[str]]]) -> Path:
    """Writes the files of a collection to two subfolders of a folder."""
    for number, (kind, texts) in enumerate(collection):
        write_source(folder / f"{number % 2}" / f"{number:02d}.{kind}", texts)
    return folder


def in_order(collection: list) -> list:
    """Returns a collection in the order in which its two subfolders are read."""
    return [*collection[::2], *collection[1::2]]


def encode_at_once(text: str, tokenizer: str = "gpt2") -> np.ndarray:
    """Returns the ids of a text by one call of tiktoken."""
    return np.array(get_tokenizer(tokenizer).encode(text, allowed_special="all"), np.uint16)


def expected_ids(collection: list, tokenizer: str = "gpt2") -> list[int]:
    """Returns the ids of all documents, one tiktoken call each, each after an end-of-text token."""
    end_of_text, ids = get_tokenizer(tokenizer).eot_token, []
    for kind, texts in collection:
        for text in texts:
            text = text.removeprefix("\ufeff") if "txt" in kind else text
            own = encode_at_once(text, tokenizer).tolist()
            ids += own if own[:1] in ([], [end_of_text]) else [end_of_text, *own]
    return ids


def numbers_in(error: ClearheadError) -> set[int]:
    """Returns the decimal and hexadecimal numbers in the reason of an error."""
    found = re.findall(r"(?<![\w-])(?:0x[0-9a-f]+|\d[\d,]*)", error.reason)
    return {int(number.replace(",", ""), 0) for number in found}


def peak_memory(function: Callable[[], object]) -> tuple[object, int]:
    """Calls a function. Returns its result and the peak of the memory that Python allocated."""
    tracemalloc.start()
    try:
        return function(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def varied_text(size: int, seed: int = 0) -> str:
    """Returns `size` random characters, including end-of-text tokens."""
    characters = "etaoinshrdlu αβγδε あいうえお 0123 .,\n" * 20
    return "".join(random.Random(seed).choices([*characters, END_OF_TEXT], k=size))


def preparation(path: object, folder: Path, **changes) -> Preparation:
    values = {"tokenizer": "gpt2", "text_key": "text", "shard_tokens": 10**8}
    settings = PrepareSettings(**values | changes)
    path = [str(p) for p in path] if isinstance(path, list) else str(path)
    return Preparation(find_files(path), folder, settings)


def prepare(path: object, folder: Path, workers: int = 1, **changes) -> dict:
    """Prepares a folder of shards. Returns the manifest."""
    made = preparation(path, folder, **changes)
    made.start()
    return made.run(workers, lambda done, total: None)


def prepare_half(path: object, folder: Path, first: int = 0, **changes) -> None:
    """Runs every second task, as a preparation that is interrupted. first: 0 or 1."""
    made = preparation(path, folder, **changes)
    made.start()
    for task in made.tasks[first::2]:
        run_task(task, folder, made.settings, made.plan)


def files_of(folder: Path) -> dict[str, bytes]:
    """Returns the content of all files in a folder, except the records of a preparation."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    files = [path for path in files if path.parent.name != "preparing"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def ids_of(folder: Path) -> list[int]:
    """Returns the ids of all shards in the order of the manifest, read with NumPy only."""
    shards = json.loads((folder / "manifest.json").read_text())["shards"]
    raw = [(folder / shard["file"]).read_bytes()[HEADER_BYTES:] for shard in shards]
    return np.frombuffer(b"".join(raw), "<u2").tolist()


def check_manifest(folder: Path, manifest: dict, tokenizer: str, shard_tokens: int) -> None:
    """Checks that the manifest matches the shards, and that there are no other files."""
    assert json.loads((folder / "manifest.json").read_text()) == manifest
    end_of_text = get_tokenizer(tokenizer).eot_token
    assert (manifest["tokenizer"], manifest["vocab_size"]) == (tokenizer, end_of_text + 1)
    stream = open_shards(token_files(str(folder)), get_tokenizer(tokenizer))["train"]
    assert manifest["tokens"] == len(stream) == sum(s["tokens"] for s in manifest["shards"])
    starts = np.flatnonzero(np.array(ids_of(folder)) == end_of_text)
    assert stream.document_starts().tolist() == starts.tolist()
    assert manifest["documents"] == len(starts) == sum(s["documents"] for s in manifest["shards"])
    assert all(1 <= shard["tokens"] <= shard_tokens for shard in manifest["shards"])
    named = {shard["file"] for shard in manifest["shards"]}
    assert {path.name for path in folder.iterdir()} == named | {"manifest.json", "preparing"}


def finished_shards(folder: Path) -> dict[str, tuple]:
    """Returns the inode and time of all shards of complete tasks; rewriting would change them."""
    records = [json.loads(path.read_text()) for path in folder.glob("preparing/[0-9]*.json")]
    return {s["file"]: _state(folder / s["file"]) for record in records for s in record["shards"]}


def _state(path: Path) -> tuple:
    stat = path.stat()
    return stat.st_ino, stat.st_mtime_ns


def check_kept(folder: Path, before: dict[str, tuple]) -> None:
    """Checks that complete shards were not written again."""
    assert {file: _state(folder / file) for file in before} == before
