"""Checkpoint format and integrity checks: safetensors and JSON. No pickle is read or written.

    runs/<name>/checkpoints/step_00000100/model.safetensors      parameters, by the model's names
                                          optimizer.safetensors  moments, momentum
                                          state.json             step, settings, best loss, ...
                                          SHA256SUMS             of the three: sha256sum -c
    runs/<name>/checkpoints/last, best                           links to two of them

Each checkpoint is written to a temporary name and renamed (saver.py), so it is complete or absent.
Rank 0 writes and reads. The files do not depend on the number of ranks or the distributed strategy:
any other may resume from them.
"""

import hashlib
import json
import math
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NotRequired, Self

import torch
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, with_config
from safetensors.torch import save_file
from typing_extensions import TypedDict

from errors import CheckpointError, DamagedCheckpointError, message_of
from files import fsync, open_regular, read_bounded, read_json
from training.config.other_names import rename_stored
from training.optim.loss_spikes import Count, LossSpikes, Number

FORMAT = 3  # of state.json; raised when an older reader would misunderstand
FIRST_FORMAT_WITH_CHECKSUMS = 3  # the format
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
FILES = (MODEL, OPTIMIZER, STATE)
CHECKSUMS = "SHA256SUMS"
MODEL_FILES = (MODEL, STATE, CHECKSUMS)  # what makes a model, without the moments
MAX_STATE_BYTES, MAX_CHECKSUMS_BYTES = 2**28, 2**12  # bytes
CHECKPOINT_NAME = re.compile(r"step_(\d{8,})")  # of a checkpoint that was written completely

Tensors = tuple[dict[str, torch.Tensor | None], dict[str, torch.Tensor | None]]


def read_error(file: Path, error: OSError) -> CheckpointError:
    if isinstance(error, FileNotFoundError):
        return DamagedCheckpointError(file, "is missing")
    if isinstance(error, PermissionError):  # an older one would not be allowed either
        cause = f"may not be read ({error.strerror})"
        return CheckpointError("checkpoint", file, cause, "change its owner or mode")
    return DamagedCheckpointError(file, f"is unreadable ({error.strerror or error})")


def _require_nan_or_inf(loss: float) -> float:
    # A finite loss is a Number; one that comes here is beyond the largest Number.
    if math.isfinite(loss):
        raise ValueError("is too large")
    return loss


# Types of the values in state.json, which may have been changed by anybody. Losses of skipped steps
# may be NaN or inf.
Loss = Number | Annotated[float, Field(strict=True), AfterValidator(_require_nan_or_inf)]
Id = Annotated[str, Field(pattern=r"^[\w-]{1,128}$")]


# The loss scale of fp16, as torch.amp.GradScaler.state_dict() has it.
class GradScalerState(TypedDict):
    scale: Number
    growth_factor: Number
    backoff_factor: Number
    growth_interval: Count
    _growth_tracker: Count


@with_config(ConfigDict(extra="allow"))
class StoredTrainerSettings(TypedDict, total=False):
    """The settings of the trainer that a resumed run takes from its checkpoint."""

    warmup_steps: Count | None
    eval_every: Count | None
    eval_windows: Annotated[Count, Field(ge=1)] | None
    log_every: Annotated[Count, Field(ge=1)] | None


@with_config(ConfigDict(extra="allow"))
class StoredLensSettings(TypedDict, total=False):
    every: Count | None


@with_config(ConfigDict(extra="allow"))
class StoredSettings(TypedDict):
    """The settings of the run; their other values are checked when they are used."""

    model: dict
    data: dict
    trainer: StoredTrainerSettings
    lens: NotRequired[StoredLensSettings]


@dataclass
class State:
    """The state of a run, besides its tensors: state.json."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    step: Count  # optimizer steps done
    settings: StoredSettings  # the resolved configuration
    tokens: Count = 0  # tokens trained on
    val_loss: Number | None = None  # nats per token, at this step
    best_loss: Number | None = None
    best_step: Count | None = None
    wandb_id: Id | None = None
    scaler: GradScalerState | None = None  # with fp16
    data: list[tuple[str, list[str]]] | None = None  # (file, checksum of each block) of the tokens
    losses: list[Loss] | None = None  # of the steps since the last row of the log
    skipped: Count = 0  # steps skipped because the loss or gradient was not finite
    skipped_in_a_row: Count = 0  # of them, up to this step
    spikes: LossSpikes = field(default_factory=LossSpikes)
    format: Count = FORMAT

    @classmethod
    def from_values(cls, values: object) -> Self:
        """A state from plain values. Raises ValueError, naming the first wrong field."""
        try:
            state = TypeAdapter(cls).validate_python(values)
            rename_stored(state.settings)
            return state
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"][:3])) or "it"
            raise ValueError(f"{name}: {first['msg']}") from None


def write(folder: Path, tensors: Tensors, state: dict) -> None:
    """Writes a checkpoint into an empty folder, and waits until the disk has it."""
    model_tensors, optimizer_tensors = tensors
    save_file(model_tensors, folder / MODEL, {"format": "pt"})
    save_file(optimizer_tensors, folder / OPTIMIZER)
    (folder / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
    for name in (MODEL, OPTIMIZER):  # the library makes them readable for their owner only
        (folder / name).chmod((folder / STATE).stat().st_mode)
    (folder / CHECKSUMS).write_text("".join(_checksum_line(folder / name) for name in FILES))
    for name in (*FILES, CHECKSUMS):
        fsync(folder / name)
    fsync(folder)


def checksum(file: Path) -> str:
    with open_regular(file) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _checksum_line(file: Path) -> str:
    return f"{checksum(file)}  {file.name}\n"


def verify(folder: Path, names: tuple[str, ...] = FILES) -> None:
    """Compares files of a checkpoint with their checksums.

    Raises DamagedCheckpointError when one is missing or is not what was written. Checkpoints of
    formats before 3 have no checksums; their content is checked when it is read.
    """
    file = folder / CHECKSUMS
    try:
        sums = read_bounded(file, MAX_CHECKSUMS_BYTES)
        with ThreadPoolExecutor(len(names)) as threads:  # hashing releases the GIL
            lines = list(threads.map(lambda name: _checksum_line(folder / name), names))
    except OSError as error:
        missing_sums = isinstance(error, FileNotFoundError) and not file.exists()
        if missing_sums and load_state(folder).format < FIRST_FORMAT_WITH_CHECKSUMS:
            return
        raise read_error(Path(error.filename or folder), error) from error
    known = sums.splitlines(keepends=True)
    for name, line in zip(names, lines, strict=True):
        if len(known) != len(FILES) or line.encode() != known[FILES.index(name)]:
            raise DamagedCheckpointError(folder / name, f"is not what {CHECKSUMS} says")


def load_state(folder: Path) -> State:
    """Reads state.json. Raises CheckpointError when it is damaged or of a newer format."""
    file = folder / STATE
    try:
        values = read_json(file, MAX_STATE_BYTES)
        newer = isinstance(values, dict) and values.get("format")
        if isinstance(newer, int) and newer > FORMAT:
            fix = "update this repository"
            raise CheckpointError("checkpoint", file, f"of newer format {newer}", fix)
        state = State.from_values(values)
        if (found := CHECKPOINT_NAME.fullmatch(folder.name)) and state.step != int(found[1]):
            raise ValueError(f"step is {state.step}")
        return state
    except CheckpointError:
        raise
    except OSError as error:
        raise read_error(file, error) from error
    except (ValueError, TypeError) as error:
        raise DamagedCheckpointError(file, f"is unreadable ({message_of(error)})") from error
