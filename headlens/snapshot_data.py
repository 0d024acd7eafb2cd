"""A snapshot as data: one file, step_XXXXXXXX.npz, from which pages and images are made.

    data = read_snapshot(Path("runs/first/attention/step_00000040.npz"))
    data.codes[0][1, 2]  # attention weights of layer 1, head 2 on the first prompt, as bytes

The file has numpy arrays and is read without pickle:

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from .history import Row, atomic_write, row_of, row_values
from .prompts import Prompt

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
        """The token ids of the prompts. A page shows the snapshots that have the same."""
        return [prompt.token_ids for prompt in self.prompts]

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
    return sorted(folder.glob("step_*.npz"))


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
        with np.load(path, allow_pickle=False) as arrays:
            parts = {part.filename: part.file_size for part in arrays.zip.infolist()}
            if sum(parts.values()) > MAX_BYTES or parts.get("json.npy", 0) > MAX_JSON_BYTES:
                raise ValueError("is too large")
            values = json.loads(arrays["json"].tobytes())
            if values["format"] != FORMAT:
                raise ValueError(f"format {values['format']}, not {FORMAT}")
            prompts = [Prompt(**prompt) for prompt in values["prompts"]]
            row = row_of(values["row"])
            codes = [arrays[f"weights_{number}"] for number in range(len(prompts))]
            norms = [arrays[key] for key in arrays.files if key.startswith("norms_")]
            contexts = None
            if found := values.get("contexts"):
                cells = arrays["cells"], arrays["cell_weights"]
                contexts = Contexts(found["text_name"], found["tokens"], *cells, found.get("pairs"))
        for prompt, of_prompt in zip(prompts, codes, strict=True):
            triangle = prompt.shown * (prompt.shown + 1) // 2
            if (of_prompt.dtype, of_prompt.shape) != (np.uint8, (*row.names.shape, triangle)):
                raise ValueError("weights of another type or shape")
        rest = {key: values[key] for key in ("run", "details", "uniform", "ablation")}
        if (rest["ablation"] or {}).get("method") == "estimate":  # of earlier versions
            rest["ablation"] = None
    except Exception as error:  # many classes, as of numpy, zlib and json
        raise ValueError(f"{path} is not a snapshot of this lens: {error}") from error
    return SnapshotData(
        prompts=prompts, row=row, codes=codes, norms=norms, contexts=contexts, **rest
    )


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
