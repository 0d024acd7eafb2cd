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
from .heads import ALL_NAMES
from .history import Row, atomic_write, row_of, row_values
from .prompts import Prompt
from .schema import COUNT, NUMBER, Kind, check, indices, note, numbers, texts
from .statistics import STATISTICS

FORMAT = 3
CONTEXTS = 5  # cells that a head moves most, and cells at random
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


def step_of(path: Path) -> int:
    """Returns the step in the name of a snapshot of a run; -1 for another name."""
    found = re.fullmatch(r"step_([0-9]{1,15})\.npz", path.name)
    return int(found[1]) if found else -1


def snapshot_files(folder: Path) -> list[Path]:
    """Returns the snapshots of a run in the order of their steps. folder: runs/NAME/attention."""
    return sorted((path for path in folder.glob("step_*.npz") if step_of(path) >= 0), key=step_of)


def snapshot_of(path: Path) -> SnapshotData | None:
    """Returns a snapshot of a run. Prints a line on stderr and returns None for a file that cannot
    be read, has the step of another name, or is a link: all others of the run can be shown."""
    try:
        if path.is_symlink():
            raise ValueError(f"{path} is a link")
        data = read_snapshot(path)
        if data.step != step_of(path):
            raise ValueError(f"{path} has the data of step {data.step}")
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
        if not path.is_file():  # opening a FIFO would wait for a writer
            raise ValueError("not a file")
        if path.stat().st_size > MAX_BYTES:  # its directory may be as large
            raise ValueError("is too large")
        with ZipFile(path) as file:
            sizes = {part.filename: part.file_size for part in file.infolist()}
            if sum(sizes.values()) > MAX_BYTES or sizes["json.npy"] > MAX_JSON_BYTES:
                raise ValueError("is too large")
            return _read(file)
    except Exception as error:  # many classes, as of numpy, zlib and json
        raise ValueError(f"{path} is not a snapshot of this lens: {error}") from error


def _read(file: ZipFile) -> SnapshotData:
    values = json.loads(_array(file, "json").tobytes().decode())
    if values["format"] != FORMAT:
        raise ValueError(f"format {values['format']}, not {FORMAT}")
    prompts = [_prompt(prompt) for prompt in values["prompts"]]
    row = row_of(values["row"])
    if (values["ablation"] or {}).get("method") == "estimate":  # of earlier versions
        values["ablation"] = None
    _check(values, row, prompts)
    shape, contexts = row.names.shape, None
    codes = [_array(file, f"weights_{n}", *shape, _cells(p)) for n, p in enumerate(prompts)]
    with_norms = prompts if "largest_norms" in values["details"] else []
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
    read, if its header is not that of numpy for this type and shape, or its data has another size.
    """
    part, of_item = file.getinfo(f"{key}.npy"), np.dtype(dtype)
    with file.open(part) as content:
        start = content.read(10)
        header = start[:8] + content.read(int.from_bytes(start[8:], "little")).rstrip()
        size = part.file_size - content.tell()
        shape = shape or (size,)
        found = f"{{'descr': {of_item.str!r}, 'fortran_order': False, 'shape': {shape}, }}"
        if header != b"\x93NUMPY\1\0" + found.encode():
            raise ValueError(f"{key} has another type or shape")
        if size != math.prod(shape) * of_item.itemsize:
            raise ValueError(f"{key} has another size")
        return np.frombuffer(bytearray(content.read()), dtype).reshape(shape)


def _cells(prompt: Prompt) -> int:
    return prompt.shown * (prompt.shown + 1) // 2


def _prompt(values: dict) -> Prompt:
    count = len(values["token_ids"])
    kind = {"name": texts(), "text": texts(), "token_ids": indices(2**63, count)}
    kind |= {"tokens": texts(count), "truncated": Kind((bool,)), "uniform": {}}
    kind |= {"period": indices(max(1, (count + 1) // 2)), "num_symbols": COUNT}
    check(values, kind, "prompt")
    prompt = Prompt(**values)
    check(prompt.uniform, dict.fromkeys(prompt.uniform and STATISTICS, numbers()), "uniform")
    "".join([prompt.name, prompt.text, *prompt.tokens]).encode()  # raises for lone surrogates
    is_name = re.fullmatch(r"[^/\\\0]{1,100}", prompt.name)  # a part of the names of images
    if not (count and is_name and bool(prompt.num_symbols) >= bool(prompt.period)):
        raise ValueError("a prompt is out of range")
    return prompt


def _check(values: dict, row: Row, prompts: list[Prompt]) -> None:
    """Raises ValueError if a value beside `row` and `prompts` has another type, length or range."""
    (layers, heads), of_all, many = row.names.shape, row.names.size, len(prompts)
    following = [len(prompt.token_ids) - 1 for prompt in prompts]
    if not prompts or [len(losses) for losses in row.losses] not in ([], following):
        raise ValueError("row.losses has another length")

    def predictions(found: dict) -> dict:
        count, likely = len(found["tokens"]), len(found["of_prompts"][0]["tokens"][0])
        of_prompts = [
            {
                "losses": numbers(min(p.shown, len(p.token_ids) - 1)),
                "tokens": indices(count, p.shown, likely),
                "probabilities": numbers(p.shown, likely),
            }
            for p in prompts
        ]
        return {"tokens": texts(count), "of_prompts": of_prompts}

    def without(found: dict) -> dict:
        codes, values = [indices(256, _cells(p)) for p in prompts], numbers(many)
        drawn = {n: {"codes": codes, "values": values} for n in found.get("attention") or ()}
        return predictions(found) | ({"attention": drawn} if drawn else {})

    details, removed, about = values["details"], values["ablation"], values.get("contexts")
    kinds: dict[str, Any] = {"statistics": [dict.fromkeys(STATISTICS, numbers(of_all))] * many}
    if "largest_norms" in details:
        kinds["largest_norms"] = numbers(many, of_all)
    if "predictions" in details:
        kinds["predictions"] = predictions(details["predictions"])
    if "without" in details:
        kinds["without"] = {name: without(found) for name, found in details["without"].items()}
    kinds = {"run": texts(), "uniform": dict.fromkeys(STATISTICS, numbers()), "details": kinds}
    if removed:
        result = dict.fromkeys(COLUMNS, numbers()) | {COLUMNS[0]: NUMBER}
        place = {"layer": indices(layers), "head": indices(heads)}
        groups = [{"name": texts(), "heads": COUNT} | result] * len(removed["groups"])
        kinds["ablation"] = {"windows": COUNT, "targets": COUNT, "loss": NUMBER}
        kinds["ablation"] |= {"heads": [place | result] * of_all, "groups": groups}
    if about:
        kinds["contexts"] = {"text_name": texts(), "tokens": texts(None, None)}
    check(values, kinds, "json")
    groups = removed["groups"] if removed else []
    if not {*details.get("without", ()), *(group["name"] for group in groups)} <= {*ALL_NAMES}:
        raise ValueError("unknown name of heads")
    if pairs := (about or {}).get("pairs"):
        pair = [indices(len(pairs["texts"])), COUNT]
        of_heads = [
            {"links": COUNT, "keys": [[*pair, [pair] * len(found)] for *_, found in each["keys"]]}
            for each in pairs["of_heads"]
        ]
        check(pairs, {"queries": COUNT, "texts": texts(None), "of_heads": of_heads}, "pairs")
        if len(of_heads) != of_all:
            raise ValueError("pairs has another length")


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
