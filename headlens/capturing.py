"""The attention weights of a model: capture(model, input_ids).

    captured = capture(model, tokenizer("The bell rang twice.").input_ids)
    captured.layers[3].weights  # (B, H, T, T)

The model is our GPT, a decoder of transformers (5.5 or newer), or any module with a function that
yields the weights of its layers. It may train with a fused kernel, which does not store the
weights. capture runs the model once, without dropout and gradients, and leaves everything as it
was, see `unchanged`. At the first capture of a model, it also compares the weights with what the
model computes, see proof.py.

Shapes: B batch, T tokens, H heads (query heads, with grouped keys), D head_dim, C width of the
residual stream, V vocabulary.
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from . import foreign
from .proof import Call, Proof, Receive, prove


@dataclass
class LayerAttention:
    """The attention of one layer."""

    # fp32 (B, H, T, T), rows are queries. A row sums to 1, or to less if the model has a learned
    # sink, which gets the rest. The row of a padding token is 0.
    weights: Tensor
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
    proof: Proof | None = None  # that the weights are the model's; None for a single token


Visit = Callable[[int, LayerAttention], None]
# (weights, values) of each layer; its return value is the logits of the model, or None
Yielded = Generator[tuple[Tensor, Tensor | None], None, Tensor | None]
AttentionFunction = Callable[[nn.Module, Tensor], Yielded]


def capture(
    model: nn.Module,
    input_ids: Tensor | Sequence[int] | Mapping[str, Any],
    visit: Visit | None = None,
    attention: AttentionFunction | None = None,
    logits: bool = True,
    attention_mask: Tensor | None = None,
) -> Captured:
    """Runs a model on token ids, (B, T) or (T,), and returns the attention of its layers.

    visit(n, LayerAttention) is called for the layers with attention, n = 0, 1, ..., while the model
    runs, and nothing is kept: the weights of one layer are in memory at a time. The weights of all
    layers of GPT-2 small at 1,024 tokens are 576 MiB.

    attention(model, input_ids) is needed for other modules than those above. It yields for each
    layer the weights, (B, H, T, T), and the values after the output projection, W_O v, (B, H, T,
    C), or None. It may return the logits, (B, T, V).

    logits: False saves the time of the output layer, where the model can do without.

    attention_mask: 0 at padding, (B, T), for a model of transformers. input_ids may also be what a
    tokenizer of transformers returns, a dict with both. Positions then count the tokens of a text.

    DistributedDataParallel and torch.compile are unwrapped, and the model runs without compilation.
    With FSDP, all ranks must call it; only our GPT gathers its parameters.

    Raises TypeError for a module that needs `attention`, and ValueError for a model without causal
    attention, for weights that are not those that the model computes with (proof.py), and for token
    ids or positions that the model does not have.
    """
    model = unwrapped(model)
    ids, mask = _inputs(model, input_ids, attention_mask)
    if not attention:
        _check_ids(ids, model)
    way, result, count = _way(model, attention), Captured(), 0

    def receive(call: Call) -> None:
        nonlocal count
        attended = LayerAttention(call.weights, call.scores, call.value_norms, call.number)
        if call.number < 0:
            attended.number = count
        if call.module is not None:
            values = cast(Tensor, call.values)
            attended.value_norms = value_norms(call.module, values, call.weights.shape[1])
        if mask is not None:
            padding = ~mask[:, None, :, None].to(call.weights.device)
            attended.weights = attended.weights.masked_fill(padding, 0)
            if attended.scores is not None:
                attended.scores = attended.scores.masked_fill(padding, float("-inf"))
        _check(attended.weights, ids, model)
        if visit:
            with torch.autocast(ids.device.type, enabled=False):
                visit(count, attended)
        else:
            result.layers.append(attended)
        count += 1

    def checked(check: Receive) -> Receive:
        def both(call: Call) -> None:
            _check(call.weights, text, model)
            check(call)

        return both

    with unchanged(model, ids.device):
        text = ids[:1] if mask is None else ids[:1, mask[0]]
        text = ids if attention else text  # a function may know only these ids
        result.proof = prove(
            model,
            (
                getattr(attention, "__code__", type(attention)),
                getattr(getattr(model, "config", None), "_attn_implementation", None),
            ),
            text.shape[1],
            lambda check: way.run(text, None, checked(check), True)[0],
            lambda: way.own(text),
        )
        found, result.others = way.run(ids, mask, receive, logits)
    if not count:
        advice = EAGER if attention else foreign.ADVICE
        raise ValueError(f"{type(model).__name__}: no attention weights of any layer; {advice}")
    if logits:
        result.logits = found if isinstance(found, Tensor) else getattr(found, "logits", None)
    return result


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


_LOCK = threading.RLock()
SMALL = 2**16  # numbers of a buffer that is restored if it changes in place


@contextlib.contextmanager
def unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Runs the model in eval mode, without gradients and compilation. Restores the random state,
    and the attributes and buffers of its modules: the training mode, and what depends on the texts
    it has seen, as the frequencies of some rotary positions. Other threads wait: the random state
    and the switch of the compiler are those of the process."""
    with _LOCK:
        devices = [device] if device.type == "cuda" else []
        eager = contextlib.nullcontext()
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and its import takes seconds
            eager = torch.compiler.set_stance("force_eager")
        before = [(each, {**vars(each)}, {**each._buffers}) for each in model.modules()]
        buffers = [buffer for *_, own in before for buffer in own.values() if buffer is not None]
        small = [each for each in buffers if each.numel() <= SMALL and not each.is_inference()]
        copies = [(buffer, buffer._version, buffer.clone()) for buffer in small]
        try:
            model.eval()
            with torch.no_grad(), torch.random.fork_rng(devices), eager:
                yield
        finally:
            for module, attributes, own in before:
                for added in vars(module).keys() - attributes.keys():
                    del vars(module)[added]
                vars(module).update(attributes)
                module._buffers.clear()
                module._buffers.update(own)
            for buffer, version, copy in copies:
                if buffer._version != version:
                    with torch.no_grad():
                        buffer.copy_(copy)


@dataclass
class _Way:
    """How a model is captured."""

    run: Callable  # (ids, mask, receive, all_logits) -> (the output of the model, other layers)
    own: Callable[[Tensor], Any]  # ids -> the output of the model as it is


def _way(model: Any, attention: AttentionFunction | None) -> _Way:
    if attention:

        def own(ids: Tensor) -> Any:
            with contextlib.suppress(Exception):  # it may need more than token ids
                return model(ids)

        return _Way(
            lambda ids, _, receive, __: (_of_generator(attention(model, ids), receive), {}), own
        )
    if hasattr(model, "capture_attention"):

        def run(ids: Tensor, _: Any, receive: Receive, all_logits: bool) -> tuple[Tensor, dict]:
            options = {} if all_logits else {"logits_at": ids.new_zeros(len(ids))}
            callback = lambda _, *tensors: receive(Call(*tensors))  # noqa: E731
            return model.capture_attention(ids, callback, **options), {}

        return _Way(run, model)
    if hasattr(model, "set_attn_implementation"):
        return _Way(
            functools.partial(foreign.run, model),
            lambda ids: model(**foreign.inputs_of(model, ids, None)),
        )
    raise TypeError(f"{type(model).__name__} is not a model of transformers; {foreign.ADVICE}")


def _inputs(model: nn.Module, input_ids: Any, mask: Any) -> tuple[Tensor, Tensor | None]:
    """Returns token ids (B, T) on the device of the model, and which are not padding, (B, T), or
    None. Raises ValueError and TypeError for what is no token ids."""
    if isinstance(input_ids, Mapping):  # what a tokenizer of transformers returns
        mask = input_ids.get("attention_mask") if mask is None else mask
        input_ids = input_ids["input_ids"]
    devices = (parameter.device for parameter in model.parameters())
    device = next((each for each in devices if each.type != "meta"), None)  # meta: is offloaded
    try:
        ids = torch.atleast_2d(torch.as_tensor(input_ids, device=device))
        mask = None if mask is None else torch.atleast_2d(torch.as_tensor(mask, device=device)) > 0
    except (TypeError, ValueError, RuntimeError):  # strings, rows of several lengths
        given = f"{type(input_ids).__name__}, which is no tensor of numbers"
        advice = "give token ids, (B, T) or (T,): tokenizer(text).input_ids"
        raise TypeError(f"input_ids: {given}; {advice}") from None
    if not ids.numel():
        raise ValueError("input_ids: no token")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"input_ids: {ids.dtype} numbers; token ids are integers")
    if ids.dim() > 2:
        raise ValueError(f"input_ids: shape {tuple(ids.shape)}; (B, T) or (T,) is expected")
    if mask is not None and mask.shape != ids.shape:
        raise ValueError(f"attention_mask: shape {(*mask.shape,)}, but input_ids {(*ids.shape,)}")
    return ids, None if mask is None or mask.all() else mask


def _check_ids(ids: Tensor, model: nn.Module) -> None:
    """Raises ValueError for token ids that a model does not have, and for positions without a
    learned embedding. On a GPU, they would be an error from which the process cannot recover."""
    config = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    name, most = type(model).__name__, int(ids.max())
    if (least := int(ids.min())) < 0:
        raise ValueError(f"{name}: token id {least}; token ids are not negative")
    if most >= (size := getattr(config, "vocab_size", None) or most + 1):
        raise ValueError(f"{name}: token id {most}, but vocab_size is {size}; use its tokenizer")
    limit = getattr(config, "max_position_embeddings", None)
    rotates = any(hasattr(config, key) for key in ("rope_parameters", "rope_theta"))  # any position
    if limit and 0 < limit < ids.shape[1] and not rotates:
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
        rest = (1 - weights.float().sum(-1)).clamp(min=0)  # it may have a learned sink
        receive(Call(weights.float(), value_norms=norms, dtype=weights.dtype, sink=rest))


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
    if type(projection) is nn.Linear and not weight.is_meta:
        weight = weight.T  # (H D, C), as Conv1D's
    elif type(projection).__name__ != "Conv1D" or weight.is_meta:
        # LoRA's, or offloaded: what it does to each unit vector
        unit = torch.eye(num_heads * head_dim, dtype=values.dtype, device=values.device)
        weight = projection(unit) - projection(torch.zeros_like(unit[:1]))
    if weight.shape[0] != num_heads * head_dim:
        return None
    weight = weight.unflatten(0, (num_heads, head_dim)).to(values.dtype)  # (H, D, C)
    # |W v|^2 = v^T (W^T W) v does not need the vectors W v, (B, H, T, C).
    squares = ((values @ (weight @ weight.mT)).float() * values.float()).sum(-1)
    return squares.clamp(min=0).sqrt()
