"""Checkpoints: what a run needs to go on, as safetensors and JSON. No pickle, read or written.

    runs/<name>/checkpoints/step_00000100/model.safetensors      parameters, by the model's names
                                          optimizer.safetensors  moments, momentum
                                          state.json             step, settings, best loss, ...
                                          SHA256SUMS             of the three: sha256sum -c
    runs/<name>/checkpoints/last, best                           links to two of them

How they come to be there whole or not at all: training/checkpoint/saver.py. Here is what they hold,
how it is checked and read. The main rank writes and reads; the files are the same whatever the
number of ranks and the way they share the model, so any other may go on from them.
"""

import hashlib
import json
import math
import re
import types
import typing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from errors import CheckpointError, DamagedCheckpointError, message_of
from files import open_regular, read_bounded, read_json, sync
from training.optim.nonfinite import LossSpikes

if TYPE_CHECKING:
    pass

FORMAT = 3  # of state.json; raised when an older reader would misunderstand
SUMMED_SINCE = 3  # the format
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
FILES = (MODEL, OPTIMIZER, STATE)
SUMS = "SHA256SUMS"
OF_MODEL = (MODEL, STATE, SUMS)  # what makes a model, without the moments
LARGEST_STATE, LARGEST_SUMS = 2**28, 2**12  # bytes
LARGEST_INT, LARGEST_FLOAT = 2**53, 1e100  # in a state; a float's square is finite
NAME = re.compile(r"step_(\d{8,})")  # of a checkpoint that was written completely

Tensors = tuple[dict[str, torch.Tensor | None], dict[str, torch.Tensor | None]]


def unreadable(file: Path, error: OSError) -> CheckpointError:
    if isinstance(error, FileNotFoundError):
        return DamagedCheckpointError(file, "is missing")
    if isinstance(error, PermissionError):  # an older one would not be allowed either
        cause = f"may not be read ({error.strerror})"
        return CheckpointError("checkpoint", file, cause, "change its owner or mode")
    return DamagedCheckpointError(file, f"is unreadable ({error.strerror or error})")


@dataclass
class Scaler:
    """The loss scale of fp16, as torch.amp.GradScaler.state_dict() has it."""

    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    _growth_tracker: int


@dataclass
class State:
    """Where a run stands, besides its tensors."""

    step: int  # optimizer steps done
    settings: dict  # the resolved configuration
    tokens: int = 0  # tokens trained on
    val_loss: float | None = None  # nats per token, at this step
    best_loss: float | None = None
    best_step: int | None = None
    wandb_id: str | None = None
    scaler: dict | None = None  # Scaler, with fp16
    data: list | None = None  # checksums of the tokens: (file, of each block)
    losses: list | None = None  # of the steps since the last line of the log
    skipped: int = 0  # steps left out because their gradient was no number
    skipped_in_a_row: int = 0  # of them, up to this step
    spikes: dict = field(default_factory=dict)  # LossSpikes, see training/optim/nonfinite.py
    format: int = FORMAT


def write(folder: Path, tensors: Tensors, state: dict) -> None:
    """Writes a checkpoint into an empty folder, and waits until the disk has it."""
    of_model, of_optimizer = tensors
    save_file(of_model, folder / MODEL, {"format": "pt"})
    save_file(of_optimizer, folder / OPTIMIZER)
    (folder / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
    for name in (MODEL, OPTIMIZER):  # which the library makes for its user's eyes alone
        (folder / name).chmod((folder / STATE).stat().st_mode)
    lines = [f"{checksum(folder / name)}  {name}\n" for name in FILES]
    (folder / SUMS).write_text("".join(lines), encoding="ascii")
    for name in (*FILES, SUMS):
        sync(folder / name)
    sync(folder)


def checksum(file: Path) -> str:
    with open_regular(file) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def verify(folder: Path, names: tuple[str, ...] = FILES) -> None:
    """Compares files of a checkpoint with their checksums.

    Raises DamagedCheckpointError when one is missing or is not what was written. Checkpoints of
    formats before 3 have no checksums; their content is checked when it is read.
    """
    sums = _read_sums(folder)
    if sums is None:
        if load_state(folder).format >= SUMMED_SINCE:
            raise DamagedCheckpointError(folder / SUMS, "is missing")
        return

    def differs(name: str) -> bool:
        return checksum(folder / name) != sums[name]

    try:
        with ThreadPoolExecutor(len(names)) as threads:  # hashing leaves Python to others
            for name, wrong in zip(names, threads.map(differs, names), strict=True):
                if wrong:
                    raise DamagedCheckpointError(folder / name, f"is not what {SUMS} says")
    except OSError as error:
        raise unreadable(Path(error.filename or folder), error) from error


def _read_sums(folder: Path) -> dict[str, str] | None:
    """The checksums of a checkpoint's files; None when there are none."""
    file = folder / SUMS
    try:
        raw = read_bounded(file, LARGEST_SUMS)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(file, error) from error
    lines = "".join(rf"([0-9a-f]{{64}})  {re.escape(name)}\n" for name in FILES)
    found = re.fullmatch(lines.encode(), raw)
    if not found:
        raise DamagedCheckpointError(file, "is damaged")
    return {name: value.decode() for name, value in zip(FILES, found.groups(), strict=True)}


def load_state(folder: Path) -> State:
    """Reads state.json. Raises CheckpointError when it is damaged or of a newer format."""
    file = folder / STATE
    try:
        values = read_json(file, LARGEST_STATE)
        newer = isinstance(values, dict) and values.get("format")
        if isinstance(newer, int) and newer > FORMAT:
            fix = "update this repository"
            raise CheckpointError("checkpoint", file, f"of newer format {newer}", fix)
        state = typed(State, values)
        _check_values(state)
        if (found := NAME.fullmatch(folder.name)) and state.step != int(found[1]):
            raise ValueError(f"step is {state.step}")
        return state
    except CheckpointError:
        raise
    except OSError as error:
        raise unreadable(file, error) from error
    except (ValueError, TypeError) as error:
        raise DamagedCheckpointError(file, f"is unreadable ({message_of(error)})") from error


def _check_values(state: State) -> None:
    """Raises TypeError or ValueError, naming the field, for values that no run writes."""

    def need(fits: bool, name: str) -> None:
        if not fits:
            raise ValueError(f"wrong value of {name}")

    for loss in state.losses or []:
        # Those of skipped steps are not finite; of the others the squares are needed.
        skipped = type(loss) is float and not math.isfinite(loss)
        need(skipped or (type(loss) in (int, float) and abs(loss) <= LARGEST_FLOAT), "losses")
    for pair in state.data or []:
        is_pair = isinstance(pair, list) and [type(value) for value in pair] == [str, list]
        need(is_pair and all(isinstance(block, str) for block in pair[1]), "data")
    need(not state.wandb_id or re.fullmatch(r"[\w-]{1,128}", state.wandb_id), "wandb_id")
    need(typed(LossSpikes, state.spikes, "spikes.").variance >= 0, "spikes.variance")
    if state.scaler:
        typed(Scaler, state.scaler, "scaler.")
    lens, trainer = state.settings.get("lens", {}), state.settings.get("trainer")
    for group, values in {"lens": lens, "trainer": trainer}.items():
        need(isinstance(values, dict), f"settings.{group}")
    for group in ("model", "data"):
        need(isinstance(state.settings.get(group), dict), f"settings.{group}")
    # The settings that a run takes from its checkpoint.
    taken = [("trainer", "warmup_steps", 0), ("trainer", "eval_every", 0), ("lens", "every", 0)]
    taken += [("trainer", "eval_windows", 1), ("trainer", "log_every", 1)]
    for group, key, least in taken:
        value = (lens if group == "lens" else trainer).get(key)
        fits = value is None or (type(value) is int and least <= value <= LARGEST_INT)
        need(fits, f"settings.{group}.{key}")


def typed(schema: type, values: object, prefix: str = ""):
    """An instance of a dataclass from plain values of the right types, all of them known.

    Whole numbers are not negative. Raises TypeError, naming prefix + field.
    """
    if not isinstance(values, dict):
        raise TypeError("it is not a JSON object")
    hints = typing.get_type_hints(schema)
    if unknown := values.keys() - hints.keys():
        raise TypeError(f"{prefix}{min(unknown)} is unknown")
    for place in fields(schema):
        if place.name not in values:
            if place.default is MISSING and place.default_factory is MISSING:
                raise TypeError(f"{prefix}{place.name} is missing")
            continue
        value, hint = values[place.name], hints[place.name]
        allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        fits = type(value) in allowed or (type(value) is int and float in allowed)
        if type(value) is int:
            fits &= 0 <= value <= LARGEST_INT
        elif type(value) is float:
            fits &= abs(value) <= LARGEST_FLOAT  # not for NaN either
        if not fits:
            raise TypeError(f"{prefix}{place.name} is {value!r:.40}")
    return schema(**values)
