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

import difflib
import hashlib
import json
import math
import os
import re
import sys
import types
import typing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from errors import CheckpointError, DamagedCheckpointError, message_of
from files import open_regular, read_bounded, read_json, sync
from model import GPT, ModelConfig
from training.optim.nonfinite import LossSpikes
from training.optim.optimizers import STATE as KEPT
from training.optim.optimizers import state_keys

if TYPE_CHECKING:
    from training.distributed.strategy import Strategy

FORMAT = 3  # of state.json; raised when an older reader would misunderstand
SUMMED_SINCE = 3  # the format
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
FILES = (MODEL, OPTIMIZER, STATE)
SUMS = "SHA256SUMS"
OF_MODEL = (MODEL, STATE, SUMS)  # what makes a model, without the moments
LARGEST_STATE, LARGEST_SUMS = 2**28, 2**12  # bytes
LARGEST_INT, LARGEST_FLOAT = 2**53, 1e100  # in a state; a float's square is finite
NAME = re.compile(r"step_\d{8,}")  # of a checkpoint that is whole

Tensors = tuple[dict[str, torch.Tensor | None], dict[str, torch.Tensor | None]]


def _unreadable(file: Path, error: OSError) -> CheckpointError:
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


# ---------------------------------------------------------------------------------------- writing


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


def collect(
    model: GPT, optimizer: torch.optim.Optimizer, parallel: "Strategy", copy: bool
) -> Tensors:
    """The parameters, and the optimizer's state, both under the parameters' names, on the CPU.

    On all ranks; only the main one gets the tensors, the others None in their places. copy: also
    where they are on the CPU already, so that they stay what they are while training goes on.
    """
    of_model, of_optimizer = {}, {}
    for name, parameter in model.named_parameters():
        of_model[name] = parallel.gather(parameter, copy)
        for key, value in optimizer.state.get(parameter, {}).items():
            of_optimizer[f"{key}.{name}"] = parallel.gather(torch.as_tensor(value), copy)
    return of_model, of_optimizer


def checksum(file: Path) -> str:
    with open_regular(file) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


# ---------------------------------------------------------------------------------------- finding


def run_of(folder: Path) -> Path | None:
    """The run's directory that a checkpoint stands in; None for one that was copied elsewhere."""
    return folder.parent.parent if folder.parent.name == "checkpoints" else None


def list_checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run that were written to the end, the newest first."""
    found = [p for p in (run / "checkpoints").glob("step_*") if NAME.fullmatch(p.name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def newest_step(run: Path) -> int:
    """The step of a run's newest whole checkpoint, 0 when there is none."""
    return max((step_of(folder) for folder in list_checkpoints(run)), default=0)


def is_checkpoint(path: Path) -> bool:
    """Whether a path names a checkpoint, damaged or not, and not a run."""
    return (path / STATE).is_file() or bool(NAME.fullmatch(path.resolve().name))


def has_checkpoint(run: Path) -> bool:
    """Whether a run has, or had, a checkpoint."""
    return bool(list_checkpoints(run)) or (run / "checkpoints" / "last").is_symlink()


def find(
    path: str | Path,
    key: str = "checkpoint",
    names: tuple[str, ...] = (STATE, MODEL),
    warn: typing.Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> Path:
    """The checkpoint that a path means: itself, or the newest usable one of a run's directory.

    names: the files that are wanted of it; they are read once, to compare their checksums. Of a
    run, a damaged checkpoint is passed over for the one before, with a warning; one that is named
    is refused. Raises CheckpointError, naming the setting `key`, when there is none.
    """
    path = Path(path)
    if is_checkpoint(path):
        folder = path.resolve()  # once: `last` may lead to another one a moment later
        try:
            verify(folder, names)
        except DamagedCheckpointError:
            if path.resolve() == folder:
                raise
            return find(path, key, names, warn)  # pruned meanwhile
        return folder
    damage, last = None, path / "checkpoints" / "last"
    if last.is_symlink() and not last.exists():
        damage = DamagedCheckpointError(last, "what it leads to is gone")
    for folder in list_checkpoints(path):
        try:
            verify(folder, names)
        except DamagedCheckpointError as error:
            if not os.path.lexists(folder):  # pruned by the run, which is training
                return find(path, key, names, warn)
            damage = damage or error
            continue
        if damage:
            warn(f"{damage.without_hint}; going on from {folder.name}, the one before")
        return folder.resolve()
    if damage:
        raise damage
    if not path.exists() and not path.is_symlink():
        fix = (
            f"did you mean {near}?" if (near := nearest_run(path)) else "give a run or a checkpoint"
        )
        raise CheckpointError(key, path, "no such directory", fix)
    fix = "give runs/NAME or runs/NAME/checkpoints/step_..."
    if (path / "last").exists():
        fix = f"did you mean {path / 'last'}?"
    raise CheckpointError(key, path, "holds no checkpoint", fix)


def nearest_run(path: Path) -> Path | None:
    """The run that somebody may mean by a path that is none: its name alone, or nearly right."""
    runs = {folder.name: folder for folder in Path("runs").glob("*/") if folder.is_dir()}
    near = difflib.get_close_matches(path.name, runs, n=1, cutoff=0.7)
    return runs[near[0]] if near else None


# ---------------------------------------------------------------------------------------- reading


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
        raise _unreadable(Path(error.filename or folder), error) from error


def _read_sums(folder: Path) -> dict[str, str] | None:
    """The checksums of a checkpoint's files; None when there are none."""
    file = folder / SUMS
    try:
        raw = read_bounded(file, LARGEST_SUMS)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(file, error) from error
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
        if NAME.fullmatch(folder.name) and state.step != step_of(folder):
            raise ValueError(f"step is {state.step}")
        return state
    except CheckpointError:
        raise
    except OSError as error:
        raise _unreadable(file, error) from error
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


def load_model(folder: Path, device: str | torch.device = "cpu") -> tuple[GPT, State]:
    """The model of a checkpoint that `find` has found, in eval mode, and its state."""
    state = load_state(folder)
    try:
        config = typed(ModelConfig, state.settings["model"])
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            "checkpoint",
            folder,
            f"its model settings do not fit ({message_of(error)})",
            "use another",
        ) from error
    file = folder / MODEL
    return model_of(config, read_tensors(file), file, device), state


def model_of(
    config: ModelConfig,
    tensors: dict[str, torch.Tensor],
    file: Path,
    device: str | torch.device = "cpu",
) -> GPT:
    """A model in eval mode with these tensors, by our names; CheckpointError when they do not fit.

    Whatever size the settings claim, no more is allocated than the tensors have.
    """
    outside = {
        "token_emb.weight": (config.vocab_size, config.emb_dim),
        "pos_emb.weight": (config.context_length, config.emb_dim),
    }
    for name, shape in outside.items():
        _check_tensor(name, shape, tensors, file)
    numbers = (re.match(r"blocks\.(\d{1,8})\.", name) for name in tensors)
    layers = 1 + max((int(number[1]) for number in numbers if number), default=-1)
    if layers != config.num_layers:
        raise CheckpointError(
            "checkpoint",
            file,
            f"has {layers} layers, the model needs {config.num_layers}",
            "use the model settings that it was saved with",
        )
    model = empty_model(config, device)
    copy_into(dict(model.named_parameters()), tensors, file)
    return model.eval()


def empty_model(config: ModelConfig, device: str | torch.device = "cpu") -> GPT:
    """A model whose parameters are allocated but not initialised, to be loaded into."""
    with torch.device("meta"):
        model = GPT(config)
    return model.to_empty(device=device)


def load_parameters(folder: Path, model: GPT) -> None:
    """Copies the parameters of a checkpoint into the model.

    Raises CheckpointError naming the first tensor that is missing, unknown or of another shape.
    """
    file = folder / MODEL
    copy_into(dict(model.named_parameters()), read_tensors(file), file)


def load_optimizer(
    folder: Path, model: GPT, optimizer: torch.optim.Optimizer, parallel: "Strategy"
) -> None:
    """Restores the optimizer's state. On all ranks; the main one reads.

    What another optimizer has kept of a parameter is left out, and its moments begin anew: who goes
    on with another one has asked for that.

    Raises CheckpointError for what none keeps, DamagedCheckpointError for a negative number of
    steps or second moment, which would become NaN.
    """

    def read() -> dict[str, dict[str, torch.Tensor]]:
        tensors = read_optimizer(folder, model)
        for name, of_one in tensors.items():
            for key in of_one.keys() & {"step", "exp_avg_sq"}:
                if of_one[key].min() < 0:
                    raise DamagedCheckpointError(folder / OPTIMIZER, f"{key}.{name} is negative")
        return tensors

    tensors = parallel.on_rank_0(read) or {}
    keys = parallel.broadcast({name: list(of_one) for name, of_one in tensors.items()})
    # A fused optimizer counts its steps on the device, any other on the host.
    of_steps = next(model.parameters()).device if optimizer.defaults.get("fused") else "cpu"
    needed = {p: state_keys(group) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if name not in keys or (found := set(keys[name])) != needed[parameter]:
            if name in keys and found not in KEPT.values():
                cause = f"of {name} it has {', '.join(sorted(found))}, as no optimizer keeps it"
                raise CheckpointError("checkpoint", folder / OPTIMIZER, cause, "use another one")
            continue
        like = {"step": torch.empty((), device=of_steps)}
        optimizer.state[parameter] = {
            key: parallel.scatter(tensors.get(name, {}).get(key), like.get(key, parameter))
            for key in keys[name]
        }


def read_optimizer(folder: Path, model: GPT) -> dict[str, dict[str, torch.Tensor]]:
    """The optimizer's state of a checkpoint: for each parameter's name, tensors by key.

    Raises CheckpointError when it does not fit the model.
    """
    file = folder / OPTIMIZER
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    state: dict[str, dict[str, torch.Tensor]] = {}
    for full_name, value in read_tensors(file).items():
        key, _, name = full_name.partition(".")
        if key == "random":  # of format 1: what is drawn follows from seed, step and rank now
            continue
        if name not in shapes:
            raise CheckpointError(
                "checkpoint", file, f"unknown tensor {full_name:.80}", "use another one"
            )
        wanted = torch.Size() if key == "step" else shapes[name]
        _check_tensor(full_name, wanted, {full_name: value}, file)
        state.setdefault(name, {})[key] = value
    return state


def copy_into(
    parameters: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor], file: Path
) -> None:
    """Copies `tensors` into the parameters of the same names, which must be all of them."""
    for name, parameter in parameters.items():
        _check_tensor(name, parameter.shape, tensors, file)
    if extra := tensors.keys() - parameters.keys():
        raise CheckpointError(
            "checkpoint", file, f"unknown tensor {min(extra):.80}", "use another one"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def _check_tensor(
    name: str, shape: tuple[int, ...], tensors: dict[str, torch.Tensor], file: Path
) -> None:
    if name not in tensors:
        raise CheckpointError("checkpoint", file, f"{name} is missing", "use another one")
    tensor = tensors[name]
    if tensor.shape != tuple(shape):
        raise CheckpointError(
            "checkpoint",
            file,
            f"{name} has shape {tuple(tensor.shape)}, the model needs {tuple(shape)}",
            "use the model settings that it was saved with",
        )
    # Numbers of eight bits: torch cannot compare all kinds of them.
    if not tensor.is_floating_point() or tensor.element_size() == 1:
        raise CheckpointError("checkpoint", file, f"{name} is of {tensor.dtype}", "use another one")
    if not all_finite(tensor):
        cause = f"{name} holds what is no finite number"
        raise CheckpointError("checkpoint", file, cause, "use another one")


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether all of it are finite numbers."""
    # Extremes keep NaN, and finding them takes one pass without a copy.
    return tensor.numel() == 0 or all(map(math.isfinite, map(float, tensor.aminmax())))


def is_pickle(file: Path, besides: str = "") -> CheckpointError:
    """The refusal of a file that is one."""
    fix = "convert it to safetensors where its maker is trusted"
    return CheckpointError("checkpoint", file, f"is a pickle, which could run code{besides}", fix)


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file. Raises CheckpointError when it is none."""
    try:
        with open_regular(file) as opened:
            first = opened.read(8)
        # A zip, as torch.save makes, or pickle's own first bytes; a safetensors file begins with
        # a small number of eight bytes.
        if first[:4] == b"PK\3\4" or (first[:1] == b"\x80" and any(first[4:])):
            raise is_pickle(file)
        return load_file(file)
    except OSError as error:
        raise _unreadable(file, error) from error
    except SafetensorError as error:
        raise DamagedCheckpointError(file, f"is unreadable ({message_of(error)})") from error
