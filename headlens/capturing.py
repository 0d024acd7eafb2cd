"""The attention weights of a model: capture(model, input_ids).

    captured = capture(model, tokenizer("The bell rang twice.").input_ids)
    captured.layers[3].weights  # (B, H, T, T)

The model is our GPT, a decoder of transformers, or any other module with causal self-attention by
torch's functions. It may train with a fused kernel, which does not store the weights. capture runs
the model once, without dropout and gradients, observes its attention (observing.py), and leaves
everything as it was, see `unchanged`. At the first capture of a model, it also proves that the
weights are what the model computes with, see proof.py.

Shapes: B batch, T tokens, H heads (query heads, with grouped keys), D head_dim, C width of the
residual stream, V vocabulary.
"""

import contextlib
import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from .observing import AttentionCall, Receive, observe
from .projections import Projection, device_of, found_projections
from .proof import Proof, first_tensor, prove, without_edits


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
    values: Tensor | None = None  # (B, G, T, D), where G divides H, before the output projection


@dataclass
class Captured:
    """The attention of all layers that have attention weights."""

    layers: list[LayerAttention] = field(default_factory=list)  # empty with `visit`
    logits: Tensor | None = None  # of the model (B, T, V); None if it returns none
    # The layers of a hybrid without attention weights: {number: what it is, "linear attention"}.
    others: dict[int, str] = field(default_factory=dict)
    proof: Proof | None = None  # that the weights are the model's; None for a single token


Visit = Callable[[int, LayerAttention], None]


def capture(
    model: nn.Module,
    input_ids: Tensor | Sequence[int] | Mapping[str, Any],
    visit: Visit | None = None,
    logits: bool = True,
    attention_mask: Tensor | None = None,
) -> Captured:
    """Runs a model on token ids, (B, T) or (T,), and returns the attention of its layers.

    visit(n, LayerAttention) is called for the layers with attention, n = 0, 1, ..., while the model
    runs, and nothing is kept: without padding, the weights of one layer are in memory at a time.
    The weights of all layers of GPT-2 small at 1,024 tokens are 576 MiB.

    logits: False saves the time of the output layer, where the model can do without.

    attention_mask: 0 at padding, (B, T). input_ids may also be what a tokenizer of transformers
    returns, a dict with both. The model reads each text without padding.

    DistributedDataParallel and torch.compile are unwrapped, and the model runs without compilation.
    With FSDP, all ranks must call it; only our GPT gathers its parameters.

    Raises ValueError for a model without causal attention, for weights that are not those that the
    model computes with (proof.py), and for token ids or positions that the model does not have.
    Raises TypeError for what is no token ids, and for a model that needs more than these.
    """
    model = unwrapped(model)
    ids, mask = inputs_of(model, input_ids, attention_mask)
    if mask is not None:
        rows = zip(ids, mask, strict=True)
        return _padded([capture(model, row[own], logits=logits) for row, own in rows], mask, visit)
    projections = [] if hasattr(model, "capture_attention") else output_projections(model)
    result, count = Captured(), 0

    def receive(call: AttentionCall) -> None:
        nonlocal count
        norms = projections[count].value_norms(call.values) if projections else call.value_norms
        attended = LayerAttention(call.weights, call.scores, norms, call.number, call.values)
        if visit:
            with torch.autocast(ids.device.type, enabled=False):
                visit(count, attended)
        else:
            result.layers.append(attended)
        count += 1

    with unchanged(model, ids.device):
        result.proof = _proof(model, ids[:1])
        output, result.others = _run(model, ids, receive, logits)
    if not count:
        raise ValueError(f"{type(model).__name__}: {UNSEEN}")
    output = first_tensor(output)
    if logits and output is not None and output.shape[:2] == ids.shape:
        result.logits = output
    return result


UNSEEN = (
    "no attention weights: it has no softmax attention over all tokens, or computes it in a kernel"
    " that torch does not show"
)


def _run(
    model: Any, ids: Tensor, receive: Receive, all_logits: bool = True
) -> tuple[Any, dict[int, str]]:
    """Runs a model with an attention that torch shows. Returns what `observe` returns."""
    if not hasattr(model, "capture_attention"):
        has_head = hasattr(model, "base_model") and not all_logits
        part = model.base_model if has_head else model  # without its large output layer
        with visible_attention(model):
            arguments = arguments_of(part, ids, all_logits)
            return observe(model, ids, lambda: part(**arguments), receive)
    norms: list[Tensor] = []  # of the layer that is running

    def with_norms(call: AttentionCall) -> None:
        call.value_norms = norms.pop()
        receive(call)

    keep = lambda *given: norms.append(given[-1])  # noqa: E731
    options = {} if all_logits else {"logits_at": ids.new_zeros(len(ids))}
    run = functools.partial(model.capture_attention, ids, keep, **options)
    return observe(model, ids, run, with_norms)


def _proof(model: Any, ids: Tensor) -> Proof | None:
    """Returns the proof of a model on a text, (1, T)."""
    kernel = getattr(getattr(model, "config", None), "_attn_implementation", None)
    is_own = kernel in VISIBLE and not hasattr(model, "capture_attention")

    def run(receive: Receive) -> Any:
        try:
            return _run(model, ids, receive)[0]
        except torch.OutOfMemoryError:
            raise
        except (TypeError, RuntimeError, IndexError, KeyError, AttributeError) as error:
            name, reason = type(model).__name__, f"{type(error).__name__}: {error}".splitlines()[0]
            raise TypeError(f"{name} does not run on token ids alone ({reason})") from error

    own = None if is_own else lambda: model(**arguments_of(model, ids))
    return prove(model, kernel, ids.shape[1], run, own)


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
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
SMALL = 2**16  # numbers of a buffer that is restored if it changes in place


@contextlib.contextmanager
def unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Runs the model in eval mode, without gradients and compilation. Restores the random state,
    and the attributes, hooks and small buffers of its modules: the training mode, and what depends
    on the texts it has seen, as the frequencies of some rotary positions. Other threads wait: the
    random state and the switch of the compiler are those of the process."""
    with _LOCK:
        devices = [device] if device.type == "cuda" else []
        before = [(each, {**vars(each)}, {**each._buffers}) for each in model.modules()]
        hooks = [vars(each)[name] for each, *_ in before for name in HOOKS]
        registered = [{**each} for each in hooks]  # transformers adds some that record outputs
        buffers = [buffer for *_, own in before for buffer in own.values() if buffer is not None]
        small = [each for each in buffers if each.numel() <= SMALL and not each.is_inference()]
        copies = [(buffer, buffer._version, buffer.clone()) for buffer in small]
        try:
            model.eval()
            with torch.no_grad(), torch.random.fork_rng(devices), contextlib.ExitStack() as stack:
                # Else nothing is compiled, and the import of the compiler takes seconds.
                if "torch._dynamo" in sys.modules:
                    stack.enter_context(torch.compiler.set_stance("force_eager"))
                yield
        finally:
            for module, attributes, own in before:
                for added in vars(module).keys() - attributes.keys():
                    del vars(module)[added]
                vars(module).update(attributes)
                module._buffers.clear()
                module._buffers.update(own)
            for now, own in zip(hooks, registered, strict=True):
                now.clear()
                now.update(own)
            for buffer, version, copy in copies:
                if buffer._version != version:
                    with torch.no_grad():
                        buffer.copy_(copy)


VISIBLE = (None, "eager", "sdpa")  # attention implementations of transformers that torch shows


def arguments_of(model: nn.Module, ids: Tensor, all_logits: bool = True) -> dict[str, Any]:
    """Returns the arguments with which a model runs. all_logits: False if the logits do not
    matter."""
    known = inspect.signature(model.forward).parameters
    if not hasattr(model, "set_attn_implementation"):
        arguments = {next(iter(known)): ids}
        # nanoGPT and others return the logits of all tokens only with targets.
        return arguments | ({"targets": ids} if all_logits and "targets" in known else {})
    mask = torch.ones_like(ids)  # without it, some models warn of padding
    return {"input_ids": ids, "attention_mask": mask, "use_cache": False, "return_dict": True}


@contextlib.contextmanager
def visible_attention(model: Any) -> Iterator[None]:
    """Makes a model of transformers with a kernel that torch does not show, such as flash
    attention, run with sdpa, or if it does not support that, with eager attention."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    before = [(c, getattr(c, "_attn_implementation", None)) for c in configs.values()]
    try:
        for config, kernel in before:
            if kernel not in VISIBLE:
                has_sdpa = getattr(model, "_supports_sdpa", False)
                config._attn_implementation = "sdpa" if has_sdpa else "eager"
        yield
    finally:
        for config, kernel in before:
            if kernel not in VISIBLE:
                config._attn_implementation = kernel


_KNOWN: weakref.WeakKeyDictionary[nn.Module, tuple[list, list[Projection]]]
_KNOWN = weakref.WeakKeyDictionary()


def output_projections(model: nn.Module) -> list[Projection]:
    """Returns the output projection of each layer with attention, in the order in which they run.
    Empty for a model that `capture` does not support, or if that of a layer is not found.

    Runs the model once, and again when its modules or weights have changed.
    """
    weights = [p for p in model.parameters() if not (p.is_meta or p.is_inference())]
    # With other weights, a learned factor of the residual stream is another one.
    state = [*((p.device, p.dtype, p._version) for p in weights), *map(id, model.modules())]
    if model in _KNOWN and _KNOWN[model][0] == state:
        return _KNOWN[model][1]
    run, device = functools.partial(_run, model, all_logits=False), device_of(model)
    try:
        with (
            without_edits(model),
            unchanged(model, device),
            torch.autocast(device.type, enabled=False),
        ):
            found = found_projections(model, run)
    except Exception:  # not supported; the run that the caller wants says why
        return []
    if found:
        _KNOWN[model] = state, found
    return found


def inputs_of(model: nn.Module, input_ids: Any, mask: Any) -> tuple[Tensor, Tensor | None]:
    """Returns token ids (B, T) on the device of the model, and which are not padding, (B, T), or
    None. Raises ValueError and TypeError for what is no token ids of the model."""
    if isinstance(input_ids, Mapping):  # what a tokenizer of transformers returns
        mask = input_ids.get("attention_mask") if mask is None else mask
        input_ids = input_ids["input_ids"]
    try:
        ids = torch.atleast_2d(torch.as_tensor(input_ids))
        mask = None if mask is None else torch.atleast_2d(torch.as_tensor(mask)) > 0
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
    if mask is None or mask.all():
        _check_ids(ids, model)  # before they are on a GPU, where the answer takes time
        return ids.to(device_of(model)), None
    return ids, mask


def _padded(texts: Sequence[Captured], mask: Tensor, visit: Visit | None) -> Captured:
    """Returns what was captured of each text alone, (1, ...), as a batch with padding, (B, ...)."""
    result = Captured(others=texts[0].others, proof=texts[0].proof)

    def placed(parts: Sequence[Tensor | None], dims: Sequence[int], fill: float) -> Tensor | None:
        """Puts the tokens of each text, in these dimensions, where it is not padding."""
        whole: Tensor | None = None
        for part, own in zip(parts, mask, strict=True):
            if part is None:
                return None
            places = own.nonzero()[:, 0].to(part.device)
            for dim in dims:
                shape = [*part.shape]
                shape[dim] = len(own)
                part = part.new_full(shape, fill).index_copy(dim, places, part)
            whole = part if whole is None else torch.cat([whole, part])
        return whole

    for n, layers in enumerate(zip(*(text.layers for text in texts), strict=True)):
        joined = LayerAttention(
            cast(Tensor, placed([each.weights for each in layers], (2, 3), 0.0)),
            placed([each.scores for each in layers], (2, 3), float("-inf")),
            placed([each.value_norms for each in layers], (2,), 0.0),
            layers[0].number,
        )
        if visit:
            visit(n, joined)
        else:
            result.layers.append(joined)
    result.logits = placed([text.logits for text in texts], (1,), 0.0)
    return result


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
