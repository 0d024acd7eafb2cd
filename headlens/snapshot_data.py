"""A snapshot as data: one file, step_XXXXXXXX.npz, from which pages and images are made.

    data = read_snapshot(Path("runs/first/attention/step_00000040.npz"))
    data.codes[0][1, 2]  # attention weights of layer 1, head 2 on the first prompt, as bytes

The file has numpy arrays. It is read without pickle, and an array only if its header has the type
and shape that follow from `json`:

    weights_0, weights_1, ...   for each prompt uint8 (L, H, t (t + 1) / 2), round(255 sqrt(w)): the
                                lower triangle of the weights row by row, t tokens shown
    norms_0, norms_1, ...       for each prompt uint8 (L, H, t), round(255 sqrt(norm / largest)):
                                norms of the value vectors, see capturing.py; absent if unknown
    visible_0, visible_1, ...   for each prompt uint8 (L, t (t + 1) / 2): 1 if the query can see the
                                key, else 0; absent if all earlier keys are visible
    cells, cell_weights         those of Contexts; absent without a text
    json                        the other fields of SnapshotData as UTF-8 text, uint8

Shapes: L layers with attention, H heads, T tokens of a prompt.
"""

import dataclasses
import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import torch
from torch import Tensor

from .ablation import COLUMNS, is_estimate
from .heads import KINDS, NAMES
from .history import MAX_LAYERS, Row, atomic_write, row_of, row_values
from .prompts import Prompt
from .schema import COUNT, FLAG, NUMBER, OPTIONAL, TEXT, check, index, note
from .statistics import STATISTICS, Chance, chances_of

FORMAT = 3
CONTEXTS = 5  # cells that a head moves most, and cells at random
DETAILS = ("statistics", "largest_norms", "predictions", "without", "model")
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
    # the details of a frame of the page, described in page/index.html. And "model": {"others":
    # {number of a layer without attention weights: what it is}, "proof": how it is known that the
    # weights are those of the model, or None}
    details: dict
    codes: list[np.ndarray]
    norms: list[np.ndarray]
    uniform: dict[str, Chance]  # the statistics of the row for uniform attention
    contexts: Contexts | None = None
    ablation: dict | None = None  # the loss without each head, see ablation.py
    # Of each prompt whether a query can see a key, bool (L, t (t + 1) / 2); [] if it always can.
    visible: list[np.ndarray] = field(default_factory=list)

    @property
    def step(self) -> int:
        return self.row.step

    @property
    def measured(self) -> dict:
        """`ablation` if it is not an estimate, {} otherwise."""
        exact = self.ablation and not is_estimate(self.ablation)
        return self.ablation if self.ablation and exact else {}

    @property
    def token_ids(self) -> list[list[int]]:
        """The token ids of the prompts."""
        return [prompt.token_ids for prompt in self.prompts]

    @property
    def subject(self) -> tuple:
        """What a page is about: it shows the snapshots that have the same."""
        return self.row.layers, self.row.names.shape, self.token_ids

    @property
    def proof(self) -> str:
        """How it is known that the weights are those of the model, "" if that is unknown."""
        return self.details.get("model", {}).get("proof") or ""

    @property
    def others(self) -> dict[int, str]:
        """What the layers without attention weights are, by their number: "linear attention"."""
        found = self.details.get("model", {}).get("others", {})
        return {int(number): kind for number, kind in found.items()}

    def chances(self, number: int) -> np.ndarray:
        """Returns uniform attention on a prompt in each layer, fp32 (L, t (t + 1) / 2)."""
        layers, _, cells = self.codes[number].shape
        visible = self.visible[number] if self.visible else np.ones((1, cells), bool)
        return np.broadcast_to(chances_of(visible), (layers, cells))

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
    visible = [of_prompt.astype(np.uint8) for of_prompt in data.visible]
    for key, of_prompts in (("weights", data.codes), ("norms", data.norms), ("visible", visible)):
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
    prompts, row = [_prompt(prompt) for prompt in values["prompts"]], row_of(values["row"])
    if row.losses and [1 + len(of) for of in row.losses] != [len(p.token_ids) for p in prompts]:
        raise ValueError("the losses have another length")
    shape, contexts, details = row.names.shape, None, values["details"]
    details = values["details"] = {key: details[key] for key in DETAILS if details.get(key)}
    undefined = dict.fromkeys(STATISTICS, [None] * math.prod(shape))  # those of later versions
    details["statistics"] = [undefined | of for of in details["statistics"]]
    values["uniform"] = dict.fromkeys(STATISTICS) | values["uniform"]
    _check_fields(values, prompts, *shape)
    codes = [_array(file, f"weights_{n}", *shape, _cells(p)) for n, p in enumerate(prompts)]
    with_norms = prompts if "largest_norms" in details else []
    norms = [_array(file, f"norms_{n}", *shape, p.shown) for n, p in enumerate(with_norms)]
    masked = prompts if "visible_0.npy" in file.namelist() else []
    visible = [_array(file, f"visible_{n}", shape[0], _cells(p)) > 0 for n, p in enumerate(masked)]
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
        prompts=prompts,
        row=row,
        codes=codes,
        norms=norms,
        contexts=contexts,
        visible=visible,
        **rest,
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
    prompt = Prompt(**values)
    count = len(prompt.token_ids)
    check(TEXT, [prompt.name, prompt.text], 2)
    check(TEXT, prompt.tokens, count or 1)
    check(index(2**63), prompt.token_ids, count)
    check(FLAG, prompt.truncated)
    check(index((count + 1) // 2), prompt.period)
    check(COUNT, prompt.num_symbols - bool(prompt.period))  # R is drawn from one token or more
    if not re.fullmatch(r"[^/\\\0]{1,100}", prompt.name):  # a part of the names of images
        raise ValueError("the name of a prompt cannot be a part of a file name")
    return prompt


def _cells(prompt: Prompt) -> int:
    return prompt.shown * (prompt.shown + 1) // 2


def _check_fields(values: dict, prompts: list[Prompt], layers: int, heads: int) -> None:
    """Raises an exception of any class if a field has another type, length or range. _prompt and
    row_of check those of prompts and of the row."""
    many, of_all, details = len(prompts), layers * heads, values["details"]
    check(TEXT, values["run"])
    for chances in (values["uniform"], *(prompt.uniform for prompt in prompts)):
        for chance in [chances[key] for key in NAMES] + [*chances.values()]:
            check(OPTIONAL, chance, *[layers] * isinstance(chance, list))
    of_prompts = [[of[key] for key in STATISTICS] for of in details["statistics"]]
    check(OPTIONAL, of_prompts, many, len(STATISTICS), of_all)
    if "largest_norms" in details:
        check(OPTIONAL, details["largest_norms"], many, of_all)
    if model := details.get("model"):
        kinds = model["others"]
        check(index(MAX_LAYERS), [*map(int, kinds)], len(kinds))
        check(TEXT, [*kinds.values(), model["proof"] or ""], len(kinds) + 1)
    if "predictions" in details:
        _check_predictions(details["predictions"], prompts)
    without = details.get("without", {})
    for found in without.values():
        _check_predictions(found, prompts)
    names = {*without}
    if ablation := values["ablation"]:
        of_heads, groups = ablation["heads"], ablation["groups"]
        if [(of["layer"], of["head"]) for of in of_heads] != [*np.ndindex(layers, heads)]:
            raise ValueError("the removed heads are others than those of the model")
        results = [[of[key] for key in COLUMNS] for of in [*of_heads, *groups]]
        check(OPTIONAL, results, len(results), len(COLUMNS))
        check(NUMBER, [ablation["loss"], *(of[0] for of in results)], 1 + len(results))
        check(OPTIONAL, ablation["accuracy"])
        check(COUNT, [ablation[key] for key in ("step", "windows", "targets")], 3)
        check(COUNT, [group["heads"] for group in groups], len(groups))
        names |= {group["name"] for group in groups}
    if not names <= KINDS.keys():
        raise ValueError("unknown name of heads")
    if contexts := values.get("contexts"):
        check(TEXT, contexts["text_name"])
        for window in contexts["tokens"]:
            check(TEXT, window, len(window))
        if contexts.get("pairs"):
            _check_pairs(contexts["pairs"], of_all)


def _check_predictions(found: dict, prompts: list[Prompt]) -> None:
    texts, likely = found["tokens"], len(found["of_prompts"][0]["tokens"][0])
    check(TEXT, texts, len(texts))
    for of, prompt in zip(found["of_prompts"], prompts, strict=True):
        check(OPTIONAL, of["losses"], min(prompt.shown, len(prompt.token_ids) - 1))
        check(index(len(texts)), of["tokens"], prompt.shown, likely)
        check(OPTIONAL, of["probabilities"], prompt.shown, likely)
    for drawn in (found.get("attention") or {}).values():
        check(OPTIONAL, drawn["values"], len(prompts))
        for codes, prompt in zip(drawn["codes"], prompts, strict=True):
            check(index(256), codes, _cells(prompt))


def _check_pairs(pairs: dict, of_all: int) -> None:
    texts, of_heads = pairs["texts"], pairs["of_heads"]
    check(TEXT, texts, len(texts))
    check(COUNT, [pairs["queries"], *(of["links"] for of in of_heads)], 1 + of_all)
    keys = [key for of in of_heads for key in of["keys"]]
    if {type(of["keys"]) for of in of_heads} | {type(key[-1]) for key in keys} != {list}:
        raise ValueError("the pairs are no lists")
    found = [pair for *pair, _ in keys] + [pair for *_, queries in keys for pair in queries]
    check(index(len(texts)), [text for text, _ in found], len(found))
    check(COUNT, [count for _, count in found], len(found))


def stack_layers(layers: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Returns tensors of all layers as one. Raises ValueError if their numbers of heads differ."""
    if len({layer.shape for layer in layers}) > 1:
        raise ValueError("the layers have different numbers of heads; the lens needs equal numbers")
    return torch.stack([*layers], dim)


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
