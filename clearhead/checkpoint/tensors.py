"""The tensors of a checkpoint: collects and loads parameters and optimizer state (safetensors).

Before a tensor is used, its name, shape and type are checked. A tensor with NaN or inf is refused.
No pickle is loaded.
"""

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from clearhead.checkpoint.format import MODEL, State, Tensors, load_state, read_error
from clearhead.compute.optimizers import state_keys
from clearhead.config.schema import ModelSettings
from clearhead.config.validation import validate
from clearhead.errors import CheckpointError, DamagedCheckpointError, Problem, message_of
from clearhead.files import open_regular
from model import GPT, ModelConfig, model_without_values

if TYPE_CHECKING:
    from clearhead.parallel.strategy import Strategy

SAVED_SETTINGS_HINT = "use the model settings of the checkpoint"


def collect(
    model: GPT,
    optimizer: torch.optim.Optimizer,
    strategy: "Strategy",
    copy: bool,
    pin: bool = False,
) -> Tensors:
    """Returns the parameters and the optimizer state on the CPU, by their names in the files.

    On all ranks; rank 0 gets tensors, the others None. copy: copies tensors that are already on the
    CPU, so that training does not change them. pin: copies to pinned memory, to which a GPU copies
    several times faster. torch keeps freed pinned memory, so only the first call allocates it.
    """

    def whole(tensor: torch.Tensor) -> torch.Tensor | None:
        tensor = tensor.detach()
        if hasattr(tensor, "full_tensor"):  # sharded; all devices hold all of it for a moment
            tensor = tensor.full_tensor()
        if not strategy.is_rank_0:
            return None
        return _pinned_copy(tensor) if pin else tensor.to("cpu", copy=copy).contiguous()

    # Not torch.distributed.checkpoint.state_dict: it makes a step with an optimizer without state.
    model_tensors, optimizer_tensors = {}, {}
    for name, parameter in model.named_parameters():
        model_tensors[name] = whole(parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            optimizer_tensors[f"{key}.{name}"] = whole(torch.as_tensor(value))
    if pin:
        torch.cuda.synchronize()  # waits for the copies
    return model_tensors, optimizer_tensors


def _pinned_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Starts to copy a tensor to pinned memory, to pageable memory if no more can be pinned."""
    shape, dtype = tensor.shape, tensor.dtype
    try:
        copy = torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError:  # Windows' Linux (WSL) pins only a part of its memory
        copy = torch.empty(shape, dtype=dtype)
    return copy.copy_(tensor, non_blocking=True)


def load_model(folder: Path) -> tuple[GPT, State]:
    """Returns the model, in eval mode, and the state of a checkpoint from `find_checkpoint`."""
    state = load_state(folder)
    settings, problems = validate(ModelSettings, state.settings["model"])
    if problems or settings.vocab_size is None:
        key, _, reason, _ = [*problems, Problem("vocab_size", None, "must be a number", "")][0]
        reason = f"invalid model settings ({key}: {reason})"
        raise _checkpoint_error(folder, reason)
    file, config = folder / MODEL, ModelConfig(**settings.model_dump())
    return model_from_tensors(config, read_tensors(file), file), state


def model_from_tensors(config: ModelConfig, tensors: dict[str, torch.Tensor], file: Path) -> GPT:
    """Returns a model in eval mode with these tensors, by the names of GPT's parameters.

    Raises CheckpointError naming the first tensor that is missing, unknown or has a wrong shape.
    Memory is allocated only after this check, so invalid settings cannot allocate too much.
    """
    for name, rows in (
        ("token_emb.weight", config.vocab_size),
        ("pos_emb.weight", config.context_length),
    ):
        _check_tensor(name, (rows, config.emb_dim), tensors, file)
    numbers = (re.match(r"blocks\.(\d{1,8})\.", name) for name in tensors)
    layers = 1 + max((int(number[1]) for number in numbers if number), default=-1)
    if layers != config.num_layers:
        reason = f"contains {layers} layers, the settings require {config.num_layers}"
        raise _checkpoint_error(file, reason, SAVED_SETTINGS_HINT)
    model = model_without_values(config)
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
    file: Path,
    read: dict[str, torch.Tensor],
    model: GPT,
    optimizer: torch.optim.Optimizer,
    strategy: "Strategy",
) -> None:
    """Restores the optimizer state. On all ranks; rank 0 has the tensors `read` from the file.

    Raises CheckpointError for the state of another optimizer.
    """
    tensors = strategy.on_rank_0(lambda: by_parameter(file, read, model)) or {}
    keys = strategy.broadcast({name: list(state) for name, state in tensors.items()})
    # A fused optimizer has its step counters on the device, any other on the CPU.
    of_steps = next(model.parameters()).device if optimizer.defaults.get("fused") else "cpu"
    needed = {p: state_keys(group) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if name not in keys:
            continue
        if (found := set(keys[name])) != needed[parameter]:
            reason = f"unknown optimizer state of {name}: {', '.join(sorted(found))}"
            raise _checkpoint_error(file, reason)
        like = {"step": torch.empty((), device=of_steps)}
        optimizer.state[parameter] = {
            key: strategy.scatter(tensors.get(name, {}).get(key), like.get(key, parameter))
            for key in keys[name]
        }


def by_parameter(
    file: Path, read: dict[str, torch.Tensor], model: GPT
) -> dict[str, dict[str, torch.Tensor]]:
    """Returns the optimizer state read from a file: parameter name -> key -> tensor.

    Raises CheckpointError if it does not match the model, DamagedCheckpointError for a negative
    step or second moment, which would result in NaN.
    """
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    state: dict[str, dict[str, torch.Tensor]] = {}
    for full_name, value in read.items():
        key, _, name = full_name.partition(".")
        if name not in shapes:
            raise _checkpoint_error(file, f"unknown tensor {full_name:.80}")
        shape = torch.Size() if key == "step" else shapes[name]
        _check_tensor(full_name, shape, {full_name: value}, file)
        if key in ("step", "exp_avg_sq") and value.min() < 0:
            raise DamagedCheckpointError(file, f"{full_name} is negative")
        state.setdefault(name, {})[key] = value
    return state


def _checkpoint_error(
    file: Path, reason: str, hint: str = "use another checkpoint"
) -> CheckpointError:
    return CheckpointError("checkpoint", file, reason, hint)


def _check_tensor(
    name: str, shape: tuple[int, ...], tensors: dict[str, torch.Tensor], file: Path
) -> None:
    if name not in tensors:
        raise _checkpoint_error(file, f"{name} is missing")
    tensor = tensors[name]
    if tensor.shape != tuple(shape):
        reason = f"{name} has shape {tuple(tensor.shape)}, the model requires {tuple(shape)}"
        raise _checkpoint_error(file, reason, SAVED_SETTINGS_HINT)
    # 8-bit floats are refused: for some of these types, torch cannot compare values.
    if not tensor.is_floating_point() or tensor.element_size() == 1:
        raise _checkpoint_error(file, f"{name} has the type {tensor.dtype}")
    if not all_finite(tensor):
        raise _checkpoint_error(file, f"{name} contains NaN or inf")


def all_finite(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor has no NaN or inf."""
    # aminmax propagates NaN, and needs one pass and no copy, unlike isfinite().all().
    return tensor.numel() == 0 or all(map(math.isfinite, map(float, tensor.aminmax())))


def pickle_error(file: Path, besides: str = "") -> CheckpointError:
    """Returns the error for a file that is a pickle."""
    hint = "convert it to safetensors if you trust its source"
    return _checkpoint_error(file, f"is a pickle, which can execute code{besides}", hint)


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Returns all tensors of a safetensors file. Raises CheckpointError for any other file."""
    try:
        with open_regular(file) as opened:
            first = opened.read(8)
        # A zip file, as written by torch.save, or a pickle. A safetensors file starts with the
        # length of its header in eight bytes.
        if first[:4] == b"PK\3\4" or (first[:1] == b"\x80" and any(first[4:])):
            raise pickle_error(file)
        return load_file(file)
    except OSError as error:
        raise read_error(file, error) from error
    except SafetensorError as error:
        reason = f"not a valid safetensors file ({message_of(error)})"
        raise DamagedCheckpointError(file, reason) from error
