"""A snapshot as data: one file, step_XXXXXXXX.npz, from which pages and images are made.

    data = read_snapshot(Path("runs/first/attention/step_00000040.npz"))
    data.codes[0][1, 2]  # attention weights of layer 1, head 2 on the first prompt, as bytes

The file has numpy arrays. It is read without pickle, and an array only if its header has the type
and shape that follow from `json`:

    weights_0, weights_1, ...   for each prompt uint8 (L, H, t (t + 1) / 2), round(255 sqrt(w)): the
                                lower triangle of the weights row by row, t tokens shown
    norms_0, norms_1, ...       for each prompt uint8 (L, H, t), round(255 sqrt(norm / largest)):
                                norms of the value vectors, see capturing.py; absent if unknown
    cells, cell_weights         those of Contexts; absent without a text
    json                        the other fields of SnapshotData as UTF-8 text, uint8

Shapes: L layers, H heads, T tokens of a prompt.
"""

import dataclasses
import io
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
from torch import Tensor

from .ablation import COLUMNS
from .heads import KINDS
from .history import Row, atomic_write, row_of, row_values
from .prompts import Prompt
from .schema import COUNT, FLAG, NUMBER, OPTIONAL, TEXT, Value, check, index, items, note
from .statistics import STATISTICS

FORMAT = 3
CONTEXTS = 5  # cells that a head moves most, and cells at random
UNIFORM = dict.fromkeys(
    STATISTICS, OPTIONAL
)  # the kind, see schema.py, of their values for uniform attention
MAX_BYTES, MAX_JSON_BYTES = 2**30, 2**25  # uncompressed; a JSON object takes 30 times its bytes


@dataclass
class Contexts:
    """Cells of each head in windows of a text, see whole_text.py."""

    text_name: str  # "the validation text"
    tokens: list[list[str]]  # of each window
    # int16 (L, H, 2, CONTEXTS, 3): window, query and key, -1 if there are fewer cells. First those
    # that the head moves most, then those of query tokens at random.
    cells: np.ndarray
    codes: np.ndarray  # their weights as bytes, uint8 (L, H, 2, CONTEXTS)
    pairs: dict | None = None  # that each head connects, see connected.Words.pairs


@dataclass
class SnapshotData:
    """All heads of a model on a few prompts, at one step."""

    run: str  # name of the run
    prompts: list[Prompt]
    row: Row  # the step, and the statistics on the text; without a text, means over the prompts
    # {"statistics": [{key: [one per head]} per prompt], "largest_norms": ..., "predictions": ...}:
    # the details of a frame of the page, described in page/index.html
    details: dict
    codes: list[np.ndarray]
    norms: list[np.ndarray]
    uniform: dict[str, float | None]  # the statistics of the row for uniform attention
    contexts: Contexts | None = None
    ablation: dict | None = None  # the loss without each head, see ablation.py

    @property
    def step(self) -> int:
        return self.row.step

    @property
    def token_ids(self) -> list[list[int]]:
        """The token ids of the prompts."""
        return [prompt.token_ids for prompt in self.prompts]

    @property
    def subject(self) -> tuple:
        """What a page is about: it shows the snapshots that have the same."""
        return self.row.names.shape, self.token_ids

    @property
    def of_prompts(self) -> list[dict[str, np.ndarray]]:
        """The statistics on each prompt, (L, H)."""
        shape = self.codes[0].shape[:2]
        return [
            {key: np.array(values, np.float32).reshape(shape) for key, values in found.items()}
            for found in self.details["statistics"]
        ]


def snapshot_files(folder: Path) -> list[Path]:
    """Returns the snapshots of a run in the order of their steps. folder: runs/NAME/attention."""
    return sorted(folder.glob(f"step_{'[0-9]' * 8}.npz"))


def step_of(path: Path) -> int:
    """Returns the step in the name of a snapshot of a run."""
    return int(path.stem.removeprefix("step_"))


def snapshot_of(path: Path) -> SnapshotData | None:
    """Returns a snapshot of a run. Prints a line on stderr and returns None for a file that cannot
    be read, has the step of another name, or is a link: all others of the run can be shown."""
    try:
        if path.is_symlink() or (data := read_snapshot(path)).step != step_of(path):
            raise ValueError(f"{path} is a link or has the data of another step")
        return data
    except ValueError as error:
        return note(f"{error}; it is not shown; remove it, or copy it again")


def last_snapshot(folder: Path) -> SnapshotData | None:
    """Returns the last snapshot of a run that can be read."""
    return next(filter(None, map(snapshot_of, snapshot_files(folder)[::-1])), None)


def snapshot_bytes(data: SnapshotData) -> bytes:
    """Returns the content of a snapshot file."""
    values = {
        "format": FORMAT,
        "run": data.run,
        "prompts": [dataclasses.asdict(prompt) for prompt in data.prompts],
        "row": row_values(data.row),
        "details": data.details,
        "uniform": data.uniform,
        "ablation": data.ablation,
    }
    if contexts := data.contexts:
        keys = ("text_name", "tokens", "pairs")
        values["contexts"] = {key: getattr(contexts, key) for key in keys}
    arrays: dict[str, Any] = {"json": np.frombuffer(json.dumps(values).encode(), np.uint8)}
    for key, of_prompts in (("weights", data.codes), ("norms", data.norms)):
        arrays |= {f"{key}_{number}": array for number, array in enumerate(of_prompts)}
    if contexts:
        arrays |= {"cells": contexts.cells, "cell_weights": contexts.codes}
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def write_snapshot(path: Path, data: SnapshotData) -> None:
    """Writes a snapshot file atomically."""
    atomic_write(path, snapshot_bytes(data))


def read_snapshot(path: str | Path) -> SnapshotData:
    """Reads a snapshot file. Raises ValueError for any other file, also of another format."""
    path = Path(path)
    try:
        # Opening a FIFO would wait for a writer, and the directory in a file may be as large as it.
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            raise ValueError(f"not a file of at most {MAX_BYTES:,} bytes")
        with ZipFile(path) as file:
            sizes = {part.filename: part.file_size for part in file.infolist()}
            if sum(sizes.values()) > MAX_BYTES or sizes["json.npy"] > MAX_JSON_BYTES:
                raise ValueError("is too large")
            return _read(file)
    except Exception as error:  # many classes, as of numpy, zlib and json
        raise ValueError(f"{path} is not a snapshot of this lens: {error}") from error


def _read(file: ZipFile) -> SnapshotData:
    values = json.loads(_array(file, "json").tobytes())
    if values["format"] != FORMAT:
        raise ValueError(f"format {values['format']}, not {FORMAT}")
    if (values["ablation"] or {}).get("method") == "estimate":  # of earlier versions
        values["ablation"] = None
    prompts, row = [_prompt(prompt) for prompt in values["prompts"]], row_of(values["row"])
    shape, contexts = row.names.shape, None
    check([values], _kind(prompts, *shape), "json")
    names = [group["name"] for group in (values["ablation"] or {}).get("groups", ())]
    if not {*names, *values["details"].get("without", ())} <= KINDS.keys():
        raise ValueError("unknown name of heads")
    codes = [_array(file, f"weights_{n}", *shape, _cells(p)) for n, p in enumerate(prompts)]
    with_norms = prompts if values["details"].get("largest_norms") else []
    norms = [_array(file, f"norms_{n}", *shape, p.shown) for n, p in enumerate(with_norms)]
    if found := values.get("contexts"):
        cells = _array(file, "cells", *shape, 2, CONTEXTS, 3, dtype=np.int16)
        lengths = np.array([len(window) for window in found["tokens"]])
        window, query, key = np.moveaxis(cells[cells[..., 0] >= 0], -1, 0)
        if not ((key >= 0) & (key <= query) & (query < lengths[window])).all():
            raise ValueError("cells are out of range")
        weights = _array(file, "cell_weights", *shape, 2, CONTEXTS)
        contexts = Contexts(found["text_name"], found["tokens"], cells, weights, found.get("pairs"))
    rest = {key: values[key] for key in ("run", "details", "uniform", "ablation")}
    return SnapshotData(
        prompts=prompts, row=row, codes=codes, norms=norms, contexts=contexts, **rest
    )


def _array(file: ZipFile, key: str, *shape: int, dtype: type = np.uint8) -> np.ndarray:
    """Reads an array; without a shape, of one dimension. Raises ValueError, before its data is
    read, if it has another type, shape or size."""
    part = file.getinfo(f"{key}.npy")
    with file.open(part) as content:
        np.lib.format.read_magic(content)
        header = np.lib.format.read_array_header_1_0(content)
        size = part.file_size - content.tell()
        shape = shape or (size,)
        if header != (shape, False, dtype) or size != math.prod(shape) * header[2].itemsize:
            raise ValueError(f"{key} has another type, shape or size")
        return np.frombuffer(bytearray(content.read()), dtype).reshape(shape)


def _prompt(values: dict) -> Prompt:
    count = len(values["token_ids"]) or 1
    kind = {"name": TEXT, "text": TEXT, "token_ids": items(index(2**63), count)}
    kind |= {"tokens": items(TEXT, count), "truncated": FLAG, "period": index((count + 1) // 2)}
    kind |= {"num_symbols": Value((int,), bool(values["period"]), 2**53)}
    check([values], kind | {"uniform": values["uniform"] and UNIFORM}, "prompt")
    if not re.fullmatch(r"[^/\\\0]{1,100}", values["name"]):  # a part of the names of images
        raise ValueError("the name of a prompt cannot be a part of a file name")
    return Prompt(**values)


def _cells(prompt: Prompt) -> int:
    return prompt.shown * (prompt.shown + 1) // 2


def _kind(prompts: list[Prompt], layers: int, heads: int) -> dict:
    """Returns the kind of `json`, see schema.py, except for what _prompt and row_of check."""
    many, of_all = len(prompts), layers * heads
    of_heads = items(OPTIONAL, of_all)
    losses = [items(OPTIONAL, len(p.token_ids) - 1) for p in prompts]
    codes = [items(index(256), _cells(p)) for p in prompts]
    drawn = {"codes": codes, "values": items(OPTIONAL, many)}
    without = dict.fromkeys(COLUMNS, OPTIONAL) | {COLUMNS[0]: NUMBER}

    def predictions(found: dict) -> dict:
        count, likely = len(found["tokens"]), len(found["of_prompts"][0]["tokens"][0])
        of_prompts = [
            {
                "losses": items(OPTIONAL, min(p.shown, len(p.token_ids) - 1)),
                "tokens": items(index(count), p.shown, likely),
                "probabilities": items(OPTIONAL, p.shown, likely),
            }
            for p in prompts
        ]
        attention = {f"{name}?": drawn for name in KINDS}
        return {"tokens": items(TEXT, count), "of_prompts": of_prompts, "attention?": attention}

    def pairs(found: dict) -> dict:
        pair = [index(len(found["texts"])), COUNT]
        of_head = {"links": COUNT, "keys": items([*pair, items(pair, None)], None)}
        texts = items(TEXT, None)
        return {"queries": COUNT, "texts": texts, "of_heads": items(of_head, of_all)}

    return {
        "run": TEXT,
        "prompts": items({}, many or 1),
        "row": {"losses": lambda found: found and losses},
        "uniform": UNIFORM,
        "details": {
            "statistics": items(dict.fromkeys(STATISTICS, of_heads), many),
            "largest_norms?": items(of_heads, many),
            "predictions?": predictions,
            "without?": {f"{name}?": predictions for name in KINDS},
        },
        "ablation?": {
            "windows": COUNT,
            "targets": COUNT,
            "loss": NUMBER,
            "heads": items({"layer": index(layers), "head": index(heads)} | without, of_all),
            "groups": items({"name": TEXT, "heads": COUNT} | without, None),
        },
        "contexts?": {"text_name": TEXT, "tokens": items(TEXT, None, None), "pairs?": pairs},
    }


def to_codes(attn_weights: Tensor) -> Tensor:
    """Returns weights as bytes, round(255 sqrt(w)). The error is at most 1/255."""
    return (attn_weights.sqrt() * 255).round().byte()


def from_codes(codes: np.ndarray) -> np.ndarray:
    """Returns the weights of codes, the inverse of to_codes: (code / 255)^2, fp32."""
    return (codes.astype(np.float32) / 255) ** 2


def triangle_to_square(codes: np.ndarray) -> np.ndarray:
    """Returns lower triangles (..., T (T + 1) / 2) as (..., T, T), zero above the diagonal."""
    num_tokens = int((2 * codes.shape[-1]) ** 0.5)
    square = np.zeros((*codes.shape[:-1], num_tokens, num_tokens), codes.dtype)
    square[..., *np.tril_indices(num_tokens)] = codes
    return square
