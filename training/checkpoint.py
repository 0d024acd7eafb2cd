"""Checkpoints: what a run needs to go on, as safetensors and JSON. No pickle, read or written.

    runs/<name>/checkpoints/step_00000100/model.safetensors      parameters, by the model's names
                                          optimizer.safetensors  moments
                                          state.json             step, settings, best loss, ...
    runs/<name>/checkpoints/last, best                           links to two of them

A checkpoint is written under another name and renamed when complete, so a folder called
step_... is always whole. The main rank writes and reads; the files are the same whatever the
number of ranks and the way they share the model, so any other may go on from them.
"""

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from model import GPT, ModelConfig

if TYPE_CHECKING:
    from training.parallel import Parallel

FORMAT = 2  # of state.json; raised when an older reader would misunderstand


Tensors = tuple[dict[str, torch.Tensor | None], dict[str, torch.Tensor | None]]


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; says which, why, and what to do. Commands exit with 3."""

    exit_code = 3


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
    scaler: dict | None = None  # fp16's loss scale
    data: list | None = None  # checksums of the tokens: (file, of each block)
    format: int = FORMAT


def open_run(name: str | None, model_name: str, runs: Path = Path("runs")) -> Path:
    """The run's directory, made if need be: runs/<name>, by default named after date and model."""
    from datetime import datetime

    if name is not None:
        folder = runs / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    stem = f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{model_name}"
    for number in range(1, 10_000):  # several may start within a second
        folder = runs / (stem if number == 1 else f"{stem}_{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise CheckpointError(f"name={stem}: thousands of runs have this name; give another with name=")


def save(run: Path, tensors: Tensors, state: State, keep: int, is_best: bool = False) -> Path:
    """Writes the checkpoint of this step, points `last` (and `best`) at it, prunes older ones.

    tensors: of model and optimizer, as `collect` gives them.
    """
    folder = run / "checkpoints" / f"step_{state.step:08d}"
    if not folder.exists():
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        of_model, of_optimizer = tensors
        save_file(of_model, part / "model.safetensors", {"format": "pt"})
        save_file(of_optimizer, part / "optimizer.safetensors")
        (part / "state.json").write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
        os.replace(part, folder)
    _point(folder.parent / "last", folder.name)
    if is_best:
        _point(folder.parent / "best", folder.name)
    _prune(folder.parent, keep)
    return folder


def _point(link: Path, target: str) -> None:
    """Makes `link` a relative link to its neighbour `target`, at one stroke."""
    fresh = link.with_name(link.name + ".part")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    os.replace(fresh, link)


def run_of(folder: Path) -> Path | None:
    """The run's directory that a checkpoint stands in; None for one that was copied elsewhere."""
    return folder.parent.parent if folder.parent.name == "checkpoints" else None


def newest_step(run: Path) -> int:
    """The step of a run's newest whole checkpoint, 0 when there is none."""
    names = [path.name for path in (run / "checkpoints").glob("step_*")]
    return max((int(n[5:]) for n in names if re.fullmatch(r"step_\d+", n)), default=0)


def _prune(checkpoints: Path, keep: int) -> None:
    best = (checkpoints / "best").resolve()
    whole = sorted(p for p in checkpoints.glob("step_*") if re.fullmatch(r"step_\d+", p.name))
    for old in whole[:-keep]:
        if old.resolve() != best:
            shutil.rmtree(old)


def collect(model: GPT, optimizer: torch.optim.Optimizer, parallel: "Parallel") -> Tensors:
    """The parameters, and the optimizer's state, both under the parameters' names, on the CPU.

    On all ranks; only the main one gets the tensors, the others None in their places.
    """
    of_model, of_optimizer = {}, {}
    for name, parameter in model.named_parameters():
        of_model[name] = parallel.gather(parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            of_optimizer[f"{key}.{name}"] = parallel.gather(torch.as_tensor(value))
    return of_model, of_optimizer


def find(path: str | Path, key: str = "checkpoint") -> Path:
    """The checkpoint that a path means: itself, or the last one of a run's directory.

    Raises CheckpointError, naming the setting `key`, when there is none.
    """
    path = Path(path)
    for folder in (path, path / "checkpoints" / "last"):
        if (folder / "state.json").is_file() and (folder / "model.safetensors").is_file():
            return folder.resolve()
    if not path.exists():
        raise CheckpointError(f"{key}={path}: no such directory; give a run or a checkpoint")
    fix = "give runs/NAME or runs/NAME/checkpoints/step_..."
    raise CheckpointError(f"{key}={path}: holds no checkpoint; {fix}")


def load_state(folder: Path) -> State:
    """Reads state.json. Raises CheckpointError when it is damaged or of a newer format."""
    file = folder / "state.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        if values["format"] > FORMAT:
            fix = "update this repository"
            raise CheckpointError(f"checkpoint={file}: of newer format {values['format']}; {fix}")
        return State(**values)
    except (OSError, ValueError, TypeError, KeyError) as error:
        if isinstance(error, CheckpointError):
            raise
        cause = " ".join(str(error).split())
        raise CheckpointError(
            f"checkpoint={file}: unreadable ({cause}); use another one"
        ) from error


def load_model(folder: Path, device: str | torch.device = "cpu") -> tuple[GPT, State]:
    """The model of a checkpoint, in eval mode, and its state."""
    state = load_state(folder)
    try:
        config = ModelConfig(**state.settings["model"])
    except (KeyError, TypeError, ValueError) as error:
        cause = " ".join(str(error).split())
        raise CheckpointError(
            f"checkpoint={folder}: its model settings do not fit ({cause}); use another one"
        ) from error
    model = empty_model(config, device)
    load_parameters(folder, model)
    return model.eval(), state


def empty_model(config: ModelConfig, device: str | torch.device = "cpu") -> GPT:
    """A model whose parameters are allocated but not initialised, to be loaded into."""
    with torch.device("meta"):
        model = GPT(config)
    return model.to_empty(device=device)


def load_parameters(folder: Path, model: GPT) -> None:
    """Copies the parameters of a checkpoint into the model.

    Raises CheckpointError naming the first tensor that is missing, unknown or of another shape.
    """
    file = folder / "model.safetensors"
    copy_into(dict(model.named_parameters()), read_tensors(file), file)


def load_optimizer(
    folder: Path, model: GPT, optimizer: torch.optim.Optimizer, parallel: "Parallel"
) -> None:
    """Restores the optimizer's state. On all ranks; the main one reads."""
    tensors = parallel.on_main(lambda: read_optimizer(folder, model)) or {}
    keys = parallel.share({name: list(of_one) for name, of_one in tensors.items()})
    # A fused optimizer counts its steps on the device, any other on the host.
    of_steps = next(model.parameters()).device if optimizer.defaults.get("fused") else "cpu"
    for name, parameter in model.named_parameters():
        like = {"step": torch.empty((), device=of_steps)}
        optimizer.state[parameter] = {
            key: parallel.scatter(tensors.get(name, {}).get(key), like.get(key, parameter))
            for key in keys.get(name, [])
        }


def read_optimizer(folder: Path, model: GPT) -> dict[str, dict[str, torch.Tensor]]:
    """The optimizer's state of a checkpoint: for each parameter's name, tensors by key.

    Raises CheckpointError when it does not fit the model.
    """
    file = folder / "optimizer.safetensors"
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    state: dict[str, dict[str, torch.Tensor]] = {}
    for full_name, value in read_tensors(file).items():
        key, _, name = full_name.partition(".")
        if key == "random":  # of format 1: what is drawn follows from seed, step and rank now
            continue
        if name not in shapes:
            raise CheckpointError(f"checkpoint={file}: unknown tensor {full_name}; use another one")
        if value.shape != (wanted := torch.Size() if key == "step" else shapes[name]):
            raise CheckpointError(
                f"checkpoint={file}: {full_name} has shape {tuple(value.shape)}, not "
                f"{tuple(wanted)}; use the settings that it was saved with"
            )
        state.setdefault(name, {})[key] = value
    return state


def copy_into(
    parameters: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor], file: Path
) -> None:
    """Copies `tensors` into the parameters of the same names, which must be all of them."""
    for name, parameter in parameters.items():
        if name not in tensors:
            raise CheckpointError(f"checkpoint={file}: {name} is missing; use another one")
        if tensors[name].shape != parameter.shape:
            raise CheckpointError(
                f"checkpoint={file}: {name} has shape {tuple(tensors[name].shape)}, the model "
                f"needs {tuple(parameter.shape)}; use the model settings that it was saved with"
            )
    if extra := tensors.keys() - parameters.keys():
        raise CheckpointError(f"checkpoint={file}: unknown tensor {min(extra)}; use another one")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file. Raises CheckpointError when it is damaged."""
    try:
        return load_file(file)
    except (SafetensorError, OSError, ValueError) as error:
        cause = " ".join(str(error).split())
        raise CheckpointError(
            f"checkpoint={file}: unreadable ({cause}); use another one"
        ) from error
