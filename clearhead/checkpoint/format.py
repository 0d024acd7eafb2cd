"""Checkpoint format: the files of a checkpoint, their checksums and the fields of state.json.

    runs/NAME/checkpoints/step_00000100/      one checkpoint: the state after optimizer step 100
        model.safetensors                     parameters
        optimizer.safetensors                 optimizer state
        state.json                            step, settings, losses, counters: class `State`
        tokenizer.json                        the tokenizer, unless data.tokenizer is gpt2 or byte
        SHA256SUMS                            checksums of these files: sha256sum -c SHA256SUMS
    runs/NAME/checkpoints/last, best          relative links to the newest checkpoint and to the one
                                              with the lowest validation loss

model.safetensors has one fp32 tensor for each entry of GPT.named_parameters(), with the same name
and shape. The output head is not stored: it is token_emb.weight. optimizer.safetensors has tensors
named KEY.PARAMETER, such as exp_avg.token_emb.weight. KEY is a key of optimizer.state_dict():
step (a scalar), exp_avg and exp_avg_sq for AdamW, momentum_buffer for Muon. If a parameter has no
tensor in this file, its optimizer state starts empty. state.json is UTF-8 and may contain NaN and
Infinity, which Python's json reads. Random states and the data position are not stored: they
are functions of seed, step and rank. No file is a pickle.

`remove_optimizer` removes optimizer.safetensors and its line of SHA256SUMS from a checkpoint. All
commands can then use it, except that no run can resume from it.

saving.py writes the files to step_00000100.part, flushes them to disk (fsync) and renames the
directory, so a checkpoint is complete or absent. Only rank 0 reads and writes. The files do not
depend on the number of ranks or on the parallel strategy, so a run can resume with another number
of ranks or another strategy. Values are checked when they are read, because anybody may have edited
the files.
"""

import hashlib
import json
import math
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NotRequired, Self

import torch
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, with_config
from safetensors.torch import save_file
from typing_extensions import TypedDict

from clearhead.checkpoint.run_directory import OPTIMIZER
from clearhead.config.schema import TrainerConfig
from clearhead.errors import CheckpointError, DamagedCheckpointError, Problem, message_of
from clearhead.files import atomic_write, fsync, open_regular, read_bounded, read_json
from clearhead.tokens.token_stream import StoredChecksums
from clearhead.tokens.tokenizer_json import TOKENIZER

FORMAT = 4  # increased when the files change; formats that are not in READABLE are refused
READABLE = (3, FORMAT)  # 3: `data` has a list of checksums for each file, and there is no `minutes`
MODEL, STATE = "model.safetensors", "state.json"
FILES, WITHOUT_OPTIMIZER = (MODEL, OPTIMIZER, STATE), (MODEL, STATE)
CHECKSUMS = "SHA256SUMS"
MODEL_FILES = (MODEL, STATE, TOKENIZER, CHECKSUMS)  # enough for inference; TOKENIZER is optional
MAX_STATE_BYTES, MAX_CHECKSUMS_BYTES = 2**26, 2**12  # larger files are refused
CHECKPOINT_NAME = re.compile(r"step_(\d{8,})")  # directory name of a complete checkpoint

# Types of values in state.json. The square of a Number is finite.
StoredCount = Annotated[int, Field(strict=True, ge=0, le=2**53)]
Number = Annotated[float, Field(strict=True, ge=-1e100, le=1e100)]

# (Model tensors, optimizer tensors). On rank 0, each maps a name in the file to a tensor. On the
# other ranks, each maps the same names to None.
Tensors = tuple[dict[str, torch.Tensor | None], dict[str, torch.Tensor | None]]


def read_error(file: Path, error: OSError) -> CheckpointError:
    """Returns the error for a file that cannot be read."""
    if isinstance(error, FileNotFoundError):
        return DamagedCheckpointError(file, "file not found")
    if isinstance(error, PermissionError):  # not damaged: do not fall back to an older checkpoint
        hint = "change the owner or mode of the file"
        return CheckpointError("checkpoint", file, f"cannot be read ({error.strerror})", hint)
    return DamagedCheckpointError(file, f"cannot be read ({error.strerror or error})")


def _require_nan_or_inf(loss: float) -> float:
    if math.isfinite(loss):  # `Number` has already accepted finite losses up to 1e100
        raise ValueError("is too large")
    return loss


# A loss in state.json: a number up to 1e100, NaN or inf. The loss of a skipped step may be NaN.
Loss = Number | Annotated[float, Field(strict=True), AfterValidator(_require_nan_or_inf)]
Id = Annotated[str, Field(pattern=r"^[\w.-]{1,128}$")]


# The state of the fp16 loss scaler: torch.amp.GradScaler.state_dict().
class GradScalerState(TypedDict):
    scale: Number
    growth_factor: Number
    backoff_factor: Number
    growth_interval: StoredCount
    _growth_tracker: StoredCount


@with_config(ConfigDict(extra="allow"))
class StoredSettings(TypedDict):
    """The settings of the run."""

    model: dict
    data: dict
    trainer: dict
    lens: NotRequired[dict]


@dataclass
class State:
    """The contents of state.json: the state of a run without the tensors. Other fields, of an
    older version, are ignored."""

    step: StoredCount  # number of optimizer steps; equals the number in the directory name
    settings: StoredSettings  # all settings of the run, checked when they are used
    tokens: StoredCount = 0  # number of tokens trained on
    val_loss: Number | None = None  # last validation loss, in nats per token
    val_step: StoredCount | None = None  # its step
    best_loss: Number | None = None  # lowest validation loss of the run
    best_step: StoredCount | None = None  # step of the lowest validation loss
    worse_validations: StoredCount = 0  # number of consecutive validations without a lower loss
    minutes: Number = 0.0  # of trainer.max_minutes that are used
    ended_early: bool = False  # whether the run ended at this step because of trainer.patience
    wandb_id: Id | None = None  # id of the W&B run, which a resumed run continues
    scaler: GradScalerState | None = None  # None unless trainer.precision=fp16
    data: StoredChecksums | None = None  # of the tokens
    losses: list[Loss] | None = None  # of each step since the last row of metrics.jsonl
    # Training metrics of this step that are logged after its evaluation; None: it is logged. Then a
    # resumed run does not repeat the evaluation.
    row: dict[str, StoredCount | Loss] | None = None
    skipped: StoredCount = 0  # number of steps skipped because the gradient was NaN or inf
    skipped_in_a_row: StoredCount = 0  # number of consecutive skipped steps up to this step
    format: StoredCount = FORMAT  # version of the checkpoint format

    @classmethod
    def from_values(cls, values: object) -> Self:
        """Builds a state from field values. Raises ValueError for the first invalid field."""
        try:
            return TypeAdapter(cls).validate_python(values)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"][:3])) or "state"
            raise ValueError(f"{name}: {first['msg']}") from None

    def should_stop_early(self, trainer: TrainerConfig) -> bool:
        return trainer.patience is not None and self.worse_validations >= trainer.patience

    def has_ended(self, trainer: TrainerConfig) -> bool:
        """Returns whether no step is left with these settings."""
        ended_early = self.ended_early and self.should_stop_early(trainer)
        steps = trainer.max_steps
        if steps is None and not trainer.max_minutes:  # it followed from trainer.save_at_words
            steps = self.settings["trainer"].get("max_steps")
        all_steps = isinstance(steps, int) and self.step >= steps
        return ended_early or all_steps or self.used_time(trainer) >= 1

    def exceeded_limits(self, trainer: TrainerConfig) -> list[Problem]:
        """Returns a problem for each limit that is below what was trained already. A run without
        these steps or minutes would have had a lower learning rate at its end."""
        return [
            Problem(key, limit, "the run has used more already", f"use {math.ceil(used)} or more")
            for key, limit, used in (
                ("trainer.max_steps", trainer.max_steps, self.step),
                ("trainer.max_minutes", trainer.max_minutes, self.minutes),
            )
            if limit is not None and used > limit
        ]

    def used_time(self, trainer: TrainerConfig) -> float:
        """Returns the used fraction of trainer.max_minutes, 0 without a limit."""
        return self.minutes / trainer.max_minutes if trainer.max_minutes else 0.0


def write(folder: Path, tensors: Tensors, state: dict, tokenizer: bytes | None = None) -> None:
    """Writes the files of a checkpoint into an empty directory and flushes them to disk."""
    model_tensors, optimizer_tensors = tensors
    save_file(model_tensors, folder / MODEL, {"format": "pt"})
    save_file(optimizer_tensors, folder / OPTIMIZER)
    (folder / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
    for name in (MODEL, OPTIMIZER):  # save_file makes files readable by the owner only
        (folder / name).chmod((folder / STATE).stat().st_mode)
    names = FILES
    if tokenizer:
        (folder / TOKENIZER).write_bytes(tokenizer)
        names += (TOKENIZER,)
    (folder / CHECKSUMS).write_bytes("".join(_checksum_line(folder / n) for n in names).encode())
    for name in (*names, CHECKSUMS):
        fsync(folder / name)
    fsync(folder)


def replace_state(folder: Path, state: dict) -> None:
    """Replaces state.json of a complete checkpoint.

    SHA256SUMS lists the checksums of both versions meanwhile: if the process is killed, the
    checkpoint is valid, and `drop_old_checksum` is left to do. Raises OSError.
    """
    content = json.dumps(state, indent=1).encode()
    lines = read_bounded(folder / CHECKSUMS, MAX_CHECKSUMS_BYTES).splitlines(keepends=True)
    fresh = f"{hashlib.sha256(content).hexdigest()}  {STATE}\n".encode()
    atomic_write(folder / CHECKSUMS, [*lines, fresh])
    atomic_write(folder / STATE, content)
    drop_old_checksum(folder)


def drop_old_checksum(folder: Path) -> None:
    """Removes the checksum of a state that was replaced from SHA256SUMS. Raises OSError."""
    lines = read_bounded(folder / CHECKSUMS, MAX_CHECKSUMS_BYTES).splitlines(keepends=True)
    of_state = [line for line in lines if line.endswith(f"  {STATE}\n".encode())]
    if len(of_state) > 1:
        now = _checksum_line(folder / STATE).encode()
        kept = [line for line in lines if line == now or line not in of_state]
        atomic_write(folder / CHECKSUMS, kept)


def checksum(file: Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal digits."""
    with open_regular(file) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _checksum_line(file: Path) -> str:
    return f"{checksum(file)}  {file.name}\n"


def verify(folder: Path, names: tuple[str, ...] = FILES) -> None:
    """Compares files of a checkpoint with their checksums.

    Raises DamagedCheckpointError when a file is missing or its checksum differs, and
    CheckpointError for an optimizer state that `remove_optimizer` has removed.
    """
    file = folder / CHECKSUMS
    try:
        content = read_bounded(file, MAX_CHECKSUMS_BYTES)
        expected = content.splitlines(keepends=True)
        listed = [line.decode("ascii", "replace")[66:-1] for line in expected]
        optional = {TOKENIZER} & {*listed}
        names += tuple(optional)
        is_valid = {*listed} in ({*of, *optional} for of in (FILES, WITHOUT_OPTIMIZER))
        if OPTIMIZER in names and is_valid and OPTIMIZER not in listed:
            hint = f"to train a new run from its weights: trainer.init_from={folder}"
            raise CheckpointError("checkpoint", folder, "its optimizer state was removed", hint)
        with ThreadPoolExecutor(len(names)) as threads:  # hashing releases the GIL
            lines = list(threads.map(lambda name: _checksum_line(folder / name), names))
    except OSError as error:
        raise read_error(Path(error.filename or folder), error) from error
    for name, line in zip(names, lines, strict=True):
        if not is_valid or line.encode() not in expected:
            raise DamagedCheckpointError(folder / name, f"checksum mismatch with {CHECKSUMS}")


def remove_optimizer(folder: Path) -> None:
    """Removes the optimizer state of a checkpoint. Raises OSError.

    SHA256SUMS is written first: if the process is killed in between, the checkpoint is valid.
    """
    lines = read_bounded(folder / CHECKSUMS, MAX_CHECKSUMS_BYTES).splitlines(keepends=True)
    kept = [line for line in lines if not line.endswith(f"  {OPTIMIZER}\n".encode())]
    atomic_write(folder / CHECKSUMS, kept)
    (folder / OPTIMIZER).unlink(missing_ok=True)
    fsync(folder)


def load_state(folder: Path) -> State:
    """Reads state.json. Raises CheckpointError if it is damaged or has another format."""
    file = folder / STATE
    try:
        values = read_json(file, MAX_STATE_BYTES)
        version = values.get("format") if isinstance(values, dict) else None
        if type(version) is int and version not in READABLE:
            reason = f"format {version} instead of format {FORMAT} of this code"
            raise CheckpointError("checkpoint", file, reason, "use the version that wrote it")
        state = State.from_values(values)
        if (found := CHECKPOINT_NAME.fullmatch(folder.name)) and state.step != int(found[1]):
            raise ValueError(f"step is {state.step}, but the directory is {folder.name}")
        return state
    except CheckpointError:
        raise
    except OSError as error:
        raise read_error(file, error) from error
    except (ValueError, TypeError) as error:
        raise DamagedCheckpointError(file, f"invalid contents ({message_of(error)})") from error
