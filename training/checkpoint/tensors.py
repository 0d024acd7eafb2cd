"""The tensors of a checkpoint: parameters and optimizer state, saved and loaded as safetensors.

Nothing is unpickled. Every tensor is checked for its name, shape, type and finite values before
it is used.
"""

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from errors import CheckpointError, DamagedCheckpointError, message_of
from files import open_regular
from model import GPT, ModelConfig
from training.checkpoint.format import MODEL, OPTIMIZER, State, Tensors, load_state, read_error
from training.config.schema import ModelSettings, validate
from training.optim.optimizers import STATE as OPTIMIZER_STATE
from training.optim.optimizers import state_keys

if TYPE_CHECKING:
    from training.distributed.strategy import Strategy

SAVED_SETTINGS_HINT = "use the model settings that it was saved with"


def collect(
    model: GPT, optimizer: torch.optim.Optimizer, strategy: "Strategy", copy: bool
) -> Tensors:
    """The parameters, and the optimizer's state, both under the parameters' names, on the CPU.

    On all ranks; rank 0 gets the tensors, the others None in their places. copy: also where they
    are on the CPU already, so that training does not change them.
    """
    model_tensors, optimizer_tensors = {}, {}
    for name, parameter in model.named_parameters():
        model_tensors[name] = strategy.gather(parameter, copy)
        for key, value in optimizer.state.get(parameter, {}).items():
            optimizer_tensors[f"{key}.{name}"] = strategy.gather(torch.as_tensor(value), copy)
    return model_tensors, optimizer_tensors


def load_model(folder: Path) -> tuple[GPT, State]:
    """The model of a checkpoint that `find_checkpoint` has found, in eval mode, and its state."""
    state = load_state(folder)
    settings, problems = validate(ModelSettings, state.settings["model"])
    if problems:
        reason = f"its model settings do not fit ({problems[0].key}: {problems[0].reason})"
        raise _checkpoint_error(folder, reason)
    return load_parameters(folder, ModelConfig(**settings.model_dump())), state


def load_parameters(folder: Path, config: ModelConfig) -> GPT:
    """A model of this shape, in eval mode, with the parameters of a checkpoint."""
    file = folder / MODEL
    return model_from_tensors(config, read_tensors(file), file)


def model_from_tensors(config: ModelConfig, tensors: dict[str, torch.Tensor], file: Path) -> GPT:
    """A model in eval mode with these tensors, by our names.

    Raises CheckpointError naming the first tensor that is missing, unknown or of another shape.
    Whatever size the settings claim, no more is allocated than the tensors have.
    """
    for name, rows in (
        ("token_emb.weight", config.vocab_size),
        ("pos_emb.weight", config.context_length),
    ):
        _check_tensor(name, (rows, config.emb_dim), tensors, file)
    numbers = (re.match(r"blocks\.(\d{1,8})\.", name) for name in tensors)
    layers = 1 + max((int(number[1]) for number in numbers if number), default=-1)
    if layers != config.num_layers:
        reason = f"has {layers} layers, the model needs {config.num_layers}"
        raise _checkpoint_error(file, reason, SAVED_SETTINGS_HINT)
    with torch.device("meta"):
        model = GPT(config)
    for name, parameter in model.named_parameters():
        _check_tensor(name, parameter.shape, tensors, file)
    if extra := tensors.keys() - dict(model.named_parameters()).keys():
        raise _checkpoint_error(file, f"unknown tensor {min(extra):.80}")
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[name])
    return model.eval()


def load_optimizer(
    folder: Path, model: GPT, optimizer: torch.optim.Optimizer, strategy: "Strategy"
) -> None:
    """Restores the optimizer's state. On all ranks; rank 0 reads.

    The state that another optimizer kept for a parameter is skipped, and its moments start at zero:
    resuming with another optimizer is allowed only on request (trainer.resume_override). Raises
    CheckpointError for a state that no optimizer has.
    """
    tensors = strategy.on_rank_0(lambda: read_optimizer(folder / OPTIMIZER, model)) or {}
    keys = strategy.broadcast({name: list(of_one) for name, of_one in tensors.items()})
    # A fused optimizer counts its steps on the device, any other on the host.
    of_steps = next(model.parameters()).device if optimizer.defaults.get("fused") else "cpu"
    needed = {p: state_keys(group) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if name not in keys or (found := set(keys[name])) != needed[parameter]:
            if name in keys and found not in OPTIMIZER_STATE.values():
                reason = f"of {name} it has {', '.join(sorted(found))}, as no optimizer keeps it"
                raise _checkpoint_error(folder / OPTIMIZER, reason)
            continue
        like = {"step": torch.empty((), device=of_steps)}
        optimizer.state[parameter] = {
            key: strategy.scatter(tensors.get(name, {}).get(key), like.get(key, parameter))
            for key in keys[name]
        }


def read_optimizer(file: Path, model: GPT) -> dict[str, dict[str, torch.Tensor]]:
    """The optimizer's state of a checkpoint: for each parameter's name, tensors by key.

    Raises CheckpointError when it does not fit the model, DamagedCheckpointError for a negative
    number of steps or second moment, which would lead to NaN.
    """
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    state: dict[str, dict[str, torch.Tensor]] = {}
    for full_name, value in read_tensors(file).items():
        key, _, name = full_name.partition(".")
        if key == "random":  # of format 1: what is drawn follows from seed, step and rank now
            continue
        if name not in shapes:
            raise _checkpoint_error(file, f"unknown tensor {full_name:.80}")
        shape = torch.Size() if key == "step" else shapes[name]
        _check_tensor(full_name, shape, {full_name: value}, file)
        if key in ("step", "exp_avg_sq") and value.min() < 0:
            raise DamagedCheckpointError(file, f"{full_name} is negative")
        state.setdefault(name, {})[key] = value
    return state


def _checkpoint_error(file: Path, reason: str, hint: str = "use another one") -> CheckpointError:
    return CheckpointError("checkpoint", file, reason, hint)


def _check_tensor(
    name: str, shape: tuple[int, ...], tensors: dict[str, torch.Tensor], file: Path
) -> None:
    if name not in tensors:
        raise _checkpoint_error(file, f"{name} is missing")
    tensor = tensors[name]
    if tensor.shape != tuple(shape):
        reason = f"{name} has shape {tuple(tensor.shape)}, the model needs {tuple(shape)}"
        raise _checkpoint_error(file, reason, SAVED_SETTINGS_HINT)
    # 8-bit floats: torch cannot compare all of their types.
    if not tensor.is_floating_point() or tensor.element_size() == 1:
        raise _checkpoint_error(file, f"{name} is of {tensor.dtype}")
    if not all_finite(tensor):
        raise _checkpoint_error(file, f"{name} has NaN or inf")


def all_finite(tensor: torch.Tensor) -> bool:
    # Extremes keep NaN, and finding them takes one pass without a copy.
    return tensor.numel() == 0 or all(map(math.isfinite, map(float, tensor.aminmax())))


def pickle_error(file: Path, besides: str = "") -> CheckpointError:
    """The error of a file that is one."""
    hint = "convert it to safetensors where its maker is trusted"
    return _checkpoint_error(file, f"is a pickle, which could run code{besides}", hint)


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file. Raises CheckpointError when it is none."""
    try:
        with open_regular(file) as opened:
            first = opened.read(8)
        # A zip, as torch.save makes, or the first bytes of a pickle; a safetensors file begins
        # with a small number of eight bytes.
        if first[:4] == b"PK\3\4" or (first[:1] == b"\x80" and any(first[4:])):
            raise pickle_error(file)
        return load_file(file)
    except OSError as error:
        raise read_error(file, error) from error
    except SafetensorError as error:
        raise DamagedCheckpointError(file, f"is unreadable ({message_of(error)})") from error
