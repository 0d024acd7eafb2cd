"""The attention weights of a model: capture(model, input_ids).

    captured = capture(model, tokenizer("The bell rang twice.").input_ids)
    captured.layers[3].weights  # (B, H, T, T)

The model is our GPT, a decoder of transformers (5.5 or newer), or any module with a function that
yields the weights of its layers. It may train with a fused kernel, which does not store the
weights. capture runs the model once, without dropout and gradients, and leaves everything as it
was: the training mode of each submodule, the random state and the attention implementation.

Shapes: B batch, T tokens, H heads (query heads, with grouped keys), D head_dim, C width of the
residual stream, V vocabulary.
"""

import contextlib
import contextvars
import inspect
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


@dataclass
class LayerAttention:
    """The attention of one layer."""

    weights: Tensor  # fp32 (B, H, T, T), rows are queries
    scores: Tensor | None = None  # the same before the softmax, -inf where masked
    # fp32 (B, H, T): |W_O v|, the norm of the vector that each key token adds to the residual
    # stream per unit of weight (Kobayashi et al. 2020, Attention is Not Only a Weight).
    value_norms: Tensor | None = None
    number: int = -1  # of the layer in the model, from 0: hybrids also have layers of other kinds


@dataclass
class Captured:
    """The attention of all layers that have attention weights."""

    layers: list[LayerAttention] = field(default_factory=list)  # empty with `visit`
    logits: Tensor | None = None  # of the model (B, T, V); None if it returns none
    # The layers of a hybrid without attention weights: {number: what it is, "linear attention"}.
    others: dict[int, str] = field(default_factory=dict)


Visit = Callable[[int, LayerAttention], None]
Receive = Callable[[LayerAttention], None]
# (weights, values) of each layer; its return value is the logits of the model, or None
Yielded = Generator[tuple[Tensor, Tensor | None], None, Tensor | None]
AttentionFunction = Callable[[nn.Module, Tensor], Yielded]


def capture(
    model: nn.Module,
    input_ids: Tensor | Sequence[int],
    visit: Visit | None = None,
    attention: AttentionFunction | None = None,
    logits: bool = True,
) -> Captured:
    """Runs a model on token ids, (B, T) or (T,), and returns the attention of its layers.

    visit(layer, LayerAttention) is called for layer 0, 1, ... while the model runs, and nothing is
    kept: the weights of one layer are in memory at a time. The weights of all layers of GPT-2 small
    at 1,024 tokens are 576 MiB.

    attention(model, input_ids) is needed for other modules than those above. It yields for each
    layer the weights, (B, H, T, T), and the values after the output projection, W_O v, (B, H, T,
    C), or None. It may return the logits, (B, T, V).

    logits: False saves the time of the output layer, where the model can do without.

    DistributedDataParallel and torch.compile are unwrapped, and the model runs without compilation.
    With FSDP, all ranks must call it; only our GPT gathers its parameters.

    Raises TypeError for a module that needs `attention`, and ValueError for a model without causal
    attention in each layer, and for token ids or positions that the model does not have.
    """
    model = unwrapped(model)
    device = next((parameter.device for parameter in model.parameters()), None)
    ids = torch.atleast_2d(torch.as_tensor(input_ids, device=device))
    if not ids.numel():
        raise ValueError("input_ids: no token")
    is_ours = not attention and hasattr(model, "capture_attention")
    if not attention:
        _check_ids(ids, model)
    result, count = Captured(), 0

    def receive(attended: LayerAttention) -> None:
        nonlocal count
        attended.number = max(attended.number, count)
        if not is_ours:
            _check(attended.weights, ids, model)
        if visit:
            with torch.autocast(ids.device.type, enabled=False):
                visit(count, attended)
        else:
            result.layers.append(attended)
        count += 1

    with unchanged(model, ids.device):
        if attention:
            found = _of_generator(attention(model, ids), receive)
        elif is_ours:
            options = {} if logits else {"logits_at": ids.new_zeros(len(ids))}
            found = cast(Any, model).capture_attention(
                ids, lambda _, *tensors: receive(LayerAttention(*tensors)), **options
            )
        elif hasattr(model, "set_attn_implementation"):
            found, result.others = _of_transformers(cast(Any, model), ids, receive, logits)
        else:
            raise TypeError(f"{type(model).__name__} is not a model of transformers; {ADVICE}")
    if not count:
        advice = EAGER if attention else ADVICE
        raise ValueError(f"{type(model).__name__}: no attention weights of any layer; {advice}")
    result.logits = found if logits else None
    return result


ADVICE = "pass attention=, a function that yields (weights, values) of each layer"
EAGER = "attention= yields none: models of transformers return weights with eager attention only"


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the module inside torch.compile, DistributedDataParallel and DataParallel."""
    while True:
        if isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        elif isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        else:
            return model


@contextlib.contextmanager
def unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Runs the model in eval mode, without gradients and compilation; restores its modes and the
    random state."""
    modes = [(module, module.training) for module in model.modules()]
    devices = [device] if device.type == "cuda" else []
    eager = contextlib.nullcontext()
    if "torch._dynamo" in sys.modules:  # else nothing is compiled, and its import takes a second
        eager = torch.compiler.set_stance("force_eager")
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices), eager:
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _check_ids(ids: Tensor, model: nn.Module) -> None:
    """Raises ValueError for token ids that a model does not have, and for positions without a
    learned embedding. On a GPU, they would be an error from which the process cannot recover."""
    config = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    name, most = type(model).__name__, int(ids.max())
    if most >= (size := getattr(config, "vocab_size", None) or most + 1):
        raise ValueError(f"{name}: token id {most}, but vocab_size is {size}; use its tokenizer")
    limit = getattr(config, "max_position_embeddings", None)
    rotates = any(hasattr(config, key) for key in ("rope_parameters", "rope_theta"))  # any position
    if limit and ids.shape[1] > limit and not rotates:
        reason = f"{ids.shape[1]} tokens, but max_position_embeddings is {limit}"
        raise ValueError(f"{name}: {reason}; give fewer tokens (Lens: a smaller context_length)")


def _check(weights: Tensor, ids: Tensor, model: nn.Module) -> None:
    """Raises ValueError for weights of another shape, or of future tokens."""
    name, (batch, tokens) = type(model).__name__, ids.shape
    if weights.dim() != 4 or weights.shape[0] != batch or weights.shape[2:] != (tokens, tokens):
        expected = f"({batch}, heads, {tokens}, {tokens})"
        raise ValueError(f"{name}: weights of shape {tuple(weights.shape)}, not {expected}")
    if (weights.triu(1) > 0).any():
        raise ValueError(f"{name} attends to future tokens; the lens needs causal attention")


def _of_generator(layers: Yielded, receive: Receive) -> Tensor | None:
    """Passes the layers of a generator on. Returns its return value, the logits."""
    while True:
        try:
            weights, values = next(layers)
        except StopIteration as end:
            return end.value
        norms = None if values is None else values.float().norm(dim=-1)
        receive(LayerAttention(weights.float(), value_norms=norms))


# -------------------------------------------------------------------------- models of transformers
# Each attention module of transformers calls the function that has the name of its config's
# attention implementation. CAPTURE is the name of `_capturing`, which calls the model's own eager
# attention. So soft caps, sinks, sliding windows, grouped keys and scales are those of the model.

CAPTURE = "clearhead_capture"
OPTIONS = {"use_cache": False, "return_dict": True}
RECEIVER: contextvars.ContextVar[Callable] = contextvars.ContextVar("receiver")


def _of_transformers(
    model: Any, ids: Tensor, receive: Receive, all_logits: bool
) -> tuple[Tensor | None, dict[int, str]]:
    """Runs a model of transformers and passes its layers on. Returns its logits, and its other
    layers."""
    name, config, numbers = type(model).__name__, model.config.get_text_config(), []
    if getattr(model.config, "is_encoder_decoder", False):
        raise TypeError(f"{name} is not a decoder; {ADVICE}")
    options: dict[str, Any] = dict(OPTIONS)
    if not all_logits and "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = 1
    options["attention_mask"] = torch.ones_like(ids)  # without it, some models warn of padding

    def receive_from(
        module: nn.Module, weights: Tensor, scores: Tensor | None, values: Tensor
    ) -> None:
        numbers.append(getattr(module, "layer_idx", len(numbers)))
        norms = value_norms(module, values, weights.shape[1])
        receive(LayerAttention(weights.float(), scores, norms, numbers[-1]))

    with attention_function(model, CAPTURE, _capturing, receive_from):
        output = model(input_ids=ids, **options)
        if not numbers:  # a model without AttentionInterface, such as GPT-Neo or BLOOM
            again = model(input_ids=ids, output_attentions=True, **options)
            for weights in getattr(again, "attentions", None) or ():
                numbers.append(len(numbers))
                receive(LayerAttention(weights.float()))
    kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    others = {n: kind.replace("_", " ") for n, kind in enumerate(kinds) if n not in numbers}
    if not all(others.values()):
        found = f"attention weights of {len(numbers)} of {config.num_hidden_layers} layers"
        raise ValueError(f"{name}: transformers gives {found}; {ADVICE}")
    return getattr(output, "logits", None), others


@contextlib.contextmanager
def attention_function(
    model: nn.Module, name: str, function: Callable, receiver: Callable
) -> Iterator[None]:
    """Makes all attention modules of a model of transformers call a function, which is registered
    under a name. receiver: what the function finds in RECEIVER."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, AttentionMaskInterface()["eager"])
    token = RECEIVER.set(receiver)
    configs = _configs(model)
    before = [each._attn_implementation for each in configs]
    try:
        for each in configs:
            each._attn_implementation = name
        yield
    finally:
        for each, implementation in zip(configs, before, strict=True):
            each._attn_implementation = implementation
        RECEIVER.reset(token)


def _capturing(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any):
    """An attention function of transformers: the model's own eager attention, captured."""
    for each in type(module).__mro__:
        if eager := getattr(sys.modules.get(each.__module__), "eager_attention_forward", None):
            with _SoftmaxInput() as softmax:
                output, weights = eager(module, query, key, value, mask, **options)
            RECEIVER.get()(module, weights, softmax.scores(weights), value)
            return output, weights
    raise ValueError(f"{type(module).__name__} has no eager attention; {ADVICE}")


class _SoftmaxInput(TorchFunctionMode):
    """Records the argument of softmax: the scores, with soft cap and mask."""

    found: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.softmax, torch.softmax, Tensor.softmax):
            self.found = args[0]
        return func(*args, **(kwargs or {}))

    def scores(self, weights: Tensor) -> Tensor | None:
        """Returns the scores, fp32, -inf where masked, without that of a learned sink, which is one
        more column. None if they have another shape than the weights."""
        if self.found is None:
            return None
        found = self.found[..., : self.found.shape[-1] - (self.found.shape[-1] > weights.shape[-1])]
        if found.shape != weights.shape:
            return None
        masked = found < torch.finfo(found.dtype).min / 2  # the mask is added
        return found.float().masked_fill(masked, float("-inf"))


def _configs(model: nn.Module) -> list[Any]:
    """Returns the configs of a model and its parts, each after those that contain it: setting an
    attention implementation also sets that of the configs inside."""
    found: dict[int, Any] = {}

    def add(config: Any) -> None:
        if config is not None and hasattr(config, "_attn_implementation"):
            found.pop(id(config), None)
            found[id(config)] = config
            for key in getattr(config, "sub_configs", ()):
                add(getattr(config, key, None))

    for module in model.modules():
        add(getattr(module, "config", None))
    return list(found.values())


def output_projection(module: nn.Module) -> nn.Module | None:
    """Returns the output projection of an attention module; None if it is not found."""
    found = (getattr(module, name, None) for name in ("o_proj", "out_proj", "c_proj", "dense"))
    return next((projection for projection in found if isinstance(projection, nn.Module)), None)


def value_norms(module: nn.Module, values: Tensor, num_heads: int) -> Tensor | None:
    """Returns |W_O v|, fp32 (B, H, T), of an attention module of transformers.

    values: (B, G, T, D), where G divides H: consecutive query heads share values. None if the
    output projection is not found. A gate between attention and projection is not included.
    """
    projection = output_projection(module)
    values = values.repeat_interleave(num_heads // values.shape[1], 1)  # (B, H, T, D)
    head_dim = values.shape[-1]
    if projection is None:
        return None
    weight = cast(Tensor, projection.weight)
    if type(projection) is nn.Linear:
        weight = weight.T  # (H D, C), as Conv1D's
    elif type(projection).__name__ != "Conv1D":  # such as LoRA's: what it does to each unit vector
        unit = torch.eye(num_heads * head_dim, dtype=values.dtype, device=values.device)
        weight = projection(unit) - projection(torch.zeros_like(unit[:1]))
    if weight.shape[0] != num_heads * head_dim:
        return None
    weight = weight.unflatten(0, (num_heads, head_dim)).to(values.dtype)  # (H, D, C)
    # |W v|^2 = v^T (W^T W) v does not need the vectors W v, (B, H, T, C).
    squares = ((values @ (weight @ weight.mT)).float() * values.float()).sum(-1)
    return squares.clamp(min=0).sqrt()
