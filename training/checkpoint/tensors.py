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
from training.checkpoint.format import (
    MODEL,
    OPTIMIZER,
    State,
    Tensors,
    load_state,
    unreadable,
)
from training.config.schema import ModelSettings, validate
from training.optim.optimizers import STATE as KEPT
from training.optim.optimizers import state_keys

if TYPE_CHECKING:
    from training.distributed.strategy import Strategy


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


def load_model(folder: Path, device: str | torch.device = "cpu") -> tuple[GPT, State]:
    """The model of a checkpoint that `find` has found, in eval mode, and its state."""
    state = load_state(folder)
    settings, problems = validate(ModelSettings, state.settings["model"])
    if problems:
        reason = f"its model settings do not fit ({problems[0].key}: {problems[0].reason})"
        raise CheckpointError("checkpoint", folder, reason, "use another one")
    file, config = folder / MODEL, ModelConfig(**settings.model_dump())
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
    """Restores the optimizer's state. On all ranks; rank 0 reads.

    The state that another optimizer kept for a parameter is skipped, and its moments start at zero:
    resuming with another optimizer is allowed only on request (trainer.resume_override).

    Raises CheckpointError for a state that no optimizer has, DamagedCheckpointError for a negative
    number of steps or second moment, which would lead to NaN.
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
        raise unreadable(file, error) from error
    except SafetensorError as error:
        raise DamagedCheckpointError(file, f"is unreadable ({message_of(error)})") from error
