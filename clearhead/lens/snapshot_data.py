"""A snapshot as data: one file, step_XXXXXXXX.npz, from which pages and images are made.

    data = read_snapshot(Path("runs/first/attention/step_00000040.npz"))
    data.codes[0][1, 2]  # attention weights of layer 1, head 2 on the first prompt, as bytes

The file has numpy arrays and is read without pickle:

    weights_0, weights_1, ...   for each prompt uint8 (L, H, t (t + 1) / 2), see probe.to_codes: the
                                lower triangle of the weights row by row, t tokens shown
    norms_0, norms_1, ...       for each prompt uint8 (L, H, t), round(255 sqrt(norm / largest)):
                                norms of the value vectors, see probe.py; absent if unknown
    json                        the other fields of SnapshotData as UTF-8 text, uint8

Shapes: L layers, H heads, T tokens of a prompt.
"""

import dataclasses
import io
import json
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .history import Row, atomic_write, json_values, row_of, row_values
from .predictions import MOST_LIKELY, Predictions
from .probe import Frame, Prompt, token_texts

FORMAT = 2
MAX_BYTES, MAX_JSON_BYTES = 2**30, 2**25  # uncompressed; a JSON object takes 30 times its bytes


@dataclass
class SnapshotData:
    """All heads of a model on a few prompts, at one step."""

    run: str  # name of the run
    prompts: list[Prompt]
    row: Row  # the step, and the statistics as means over the prompts
    # {"statistics": [{key: [one per head]} per prompt], "largest_norms": ..., "predictions": ...}:
    # the details of a frame of the page, described in page/index.html
    details: dict
    codes: list[np.ndarray]
    norms: list[np.ndarray] = field(default_factory=list)
    ablation: dict | None = None  # the loss without each head, see ablation.py

    @property
    def step(self) -> int:
        return self.row.step

    @property
    def of_prompts(self) -> list[dict[str, np.ndarray]]:
        """The statistics on each prompt, (L, H)."""
        shape = self.codes[0].shape[:2]
        return [
            {key: np.array(values, np.float32).reshape(shape) for key, values in found.items()}
            for found in self.details["statistics"]
        ]


def snapshot_data(
    run: str,
    prompts: Sequence[Prompt],
    frame: Frame,
    token_bytes: Callable[[int], bytes] | None = None,
) -> SnapshotData:
    """Returns the data of a snapshot.

    token_bytes(id): the bytes of a token, for predictions, which are omitted without it.
    """
    details: dict = {
        "statistics": [
            {key: json_values(value.ravel()) for key, value in of_prompt.items()}
            for of_prompt in frame.of_prompts
        ]
    }
    if frame.predictions and token_bytes:
        details["predictions"] = _predictions(prompts, frame, token_bytes)
    norms = []
    if frame.value_norms:
        largest = [norms.max(-1, keepdims=True) + 1e-9 for norms in frame.value_norms]  # (L, H, 1)
        scaled = [n / most for n, most in zip(frame.value_norms, largest, strict=True)]
        norms = [(255 * np.sqrt(n)).round().astype(np.uint8) for n in scaled]
        details["largest_norms"] = [json_values(most.ravel()) for most in largest]
    return SnapshotData(run, list(prompts), frame.row, details, frame.codes, norms)


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
        "ablation": data.ablation,
    }
    arrays: dict[str, Any] = {"json": np.frombuffer(json.dumps(values).encode(), np.uint8)}
    for key, of_prompts in (("weights", data.codes), ("norms", data.norms)):
        arrays |= {f"{key}_{number}": array for number, array in enumerate(of_prompts)}
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def write_snapshot(path: Path, data: SnapshotData) -> None:
    """Writes a snapshot file atomically."""
    atomic_write(path, snapshot_bytes(data))


def read_snapshot(path: Path) -> SnapshotData:
    """Reads a snapshot file. Raises ValueError for any other file, also of another format."""
    try:
        if not path.is_file():  # opening a FIFO would wait for a writer
            raise ValueError("not a file")
        with np.load(path, allow_pickle=False) as arrays:
            sizes = {part.filename: part.file_size for part in arrays.zip.infolist()}
            if sum(sizes.values()) > MAX_BYTES or sizes.get("json.npy", 0) > MAX_JSON_BYTES:
                raise ValueError("is too large")
            values = json.loads(arrays["json"].tobytes())
            if values["format"] != FORMAT:
                raise ValueError(f"format {values['format']}, not {FORMAT}")
            prompts = [Prompt(**prompt) for prompt in values["prompts"]]
            row = row_of(values["row"])
            codes = [arrays[f"weights_{number}"] for number in range(len(prompts))]
            norms = [arrays[key] for key in arrays.files if key.startswith("norms_")]
        for prompt, of_prompt in zip(prompts, codes, strict=True):
            triangle = prompt.shown * (prompt.shown + 1) // 2
            if (of_prompt.dtype, of_prompt.shape) != (np.uint8, (*row.names.shape, triangle)):
                raise ValueError("weights of another type or shape")
    except (
        *(OSError, ValueError, LookupError, TypeError, AttributeError, EOFError),
        *(StopIteration, RecursionError, zipfile.BadZipFile, zlib.error),
    ) as error:
        raise ValueError(f"{path} is not a snapshot of this lens: {error}") from error
    return SnapshotData(
        values["run"], prompts, row, values["details"], codes, norms, values["ablation"]
    )


def _predictions(
    prompts: Sequence[Prompt], frame: Frame, token_bytes: Callable[[int], bytes]
) -> dict:
    """Returns losses and most likely tokens of the shown positions; tokens as indices of texts."""
    ids = np.unique([i for of in frame.predictions for p in of for i in p.token_ids.ravel()])

    def values(found: Predictions, count: int, most: int) -> dict:
        return {
            "losses": json_values(found.losses[:count]),
            "tokens": np.searchsorted(ids, found.token_ids[:count, :most]).tolist(),
            "probabilities": json_values(found.probabilities[:count, :most]),
        }

    return {
        "tokens": token_texts(ids.tolist(), token_bytes),
        "of_prompts": [
            values(final, prompt.shown, MOST_LIKELY)
            | {"layers": [values(reading, prompt.shown, most=1) for reading in readings]}
            for (*readings, final), prompt in zip(frame.predictions, prompts, strict=True)
        ],
    }
