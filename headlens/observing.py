"""The attention of a running model: observe.

    numbers, others = observe(model, ids, lambda: model(ids), receive)

Nothing of the model is replaced. While it runs, torch shows the calls of its functions
(torch.overrides.TorchFunctionMode), of which two kinds have the attention weights:

    F.scaled_dot_product_attention(q, k, v, ...)  the weights are computed again, from its arguments
    weights @ v                                   matmul, bmm or einsum after a softmax over keys

So scales, masks, biases, soft caps, sinks and grouped keys are those of the model, whatever its
modules are called.

Shapes: B batch, T tokens, H query heads, G heads of keys and values, D head_dim of the values.
"""

import collections
import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)
MINUS = (torch.sub, torch.subtract, Tensor.sub, Tensor.__sub__)
PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.einsum)
JOINED = ("weights", "scores", "values", "output", "sink")
MASKED = -5e3  # smaller scores are masked: masks add -1e4 or less, scores are far from it


@dataclass
class AttentionCall:
    """What one layer computed."""

    weights: Tensor  # fp32 (B, H, T, T)
    values: Tensor  # (B, G, T, D), where G divides H
    output: Tensor  # (B, H, T, D): weights times values, as the model computed it
    scores: Tensor | None = None  # fp32 (B, H, T, T), -inf where masked
    sink: Tensor | None = None  # (B, H, T): the share of a learned sink
    value_norms: Tensor | None = None  # fp32 (B, H, T)
    module: nn.Module | None = None  # that is running
    number: int = -1  # of the layer


Receive = Callable[[AttentionCall], None]


def observe(
    model: nn.Module, ids: Tensor, run: Callable[[], Any], receive: Receive
) -> tuple[Any, dict[int, str]]:
    """Runs a model and passes the attention of each layer on, in order.

    run(): runs the model on ids (B, T). Returns what it returned, and the layers without attention,
    {number: what they are}. Heads that one layer computes one by one are one call. Raises
    ValueError for a module that computes two maps for the same heads.
    """
    layers = _Layers(model, receive)
    with hooked(model, layers.enter, layers.leave):
        with _Functions((*ids.shape,), layers.add):
            output = run()
        layers.send()
    return output, layers.others()


@contextlib.contextmanager
def hooked(model: nn.Module, enter: Callable, leave: Callable) -> Iterator[None]:
    """Calls enter(module, arguments, options) and leave(module, arguments, output) around the calls
    of all modules."""
    hooks = []
    for module in model.modules():
        hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        hooks.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Functions(TorchFunctionMode):
    """Passes on the attention of the functions that torch calls. shape: (B, T)."""

    def __init__(self, shape: tuple[int, ...], receive: Receive):
        super().__init__()
        self.shape, self.receive = shape, receive
        self.shares = torch.empty(0)  # the output of the last softmax
        self.scores: Tensor | None = None  # its input, if it is over the last dimension
        self.weights: list[Tensor] = []  # its output, and what was made of it
        self.moved = self.shares, self.shares  # the output and the first operand of a subtraction

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:  # of nn.MultiheadAttention: calls the others
            return self._inside(func, args, kwargs)
        output = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            self._fused(output, *args, **kwargs)
        elif func in SOFTMAX:
            given, tokens = args[0] if args else kwargs["input"], self.shape[1]
            if given.dim() > 2 and given.shape[-2] == tokens <= given.shape[-1] <= tokens + 1:
                if given is self.moved[0]:  # the maximum of each row is subtracted first
                    given = self.moved[1]
                dim = args[1] if args[1:] else kwargs.get("dim")
                self.scores = given if dim in (-1, given.dim() - 1) else None
                self.shares, self.weights = output, [output]
        elif func in MINUS and getattr([*args, *kwargs.values()][1], "shape", (0,))[-1:] == (1,):
            self.moved = output, args[0]
        elif self.weights:
            if func in PRODUCTS:
                self._product(func, (*args, *kwargs.values()), output)
            if isinstance(output, Tensor) and any(self._is_weights(each) for each in args):
                self.weights.append(output)  # in another type, without a sink, after dropout
        return output

    def _inside(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Calls a Python function of torch so that this mode sees the functions that it calls."""
        functions: Any = F
        original = functions.has_torch_function
        functions.has_torch_function = lambda _: False
        try:
            with self:
                return func(*args, **kwargs)
        finally:
            functions.has_torch_function = original

    def _is_weights(self, given: Any) -> bool:
        return any(given is each for each in self.weights)

    def _fused(
        self,
        output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        """Receives the arguments of F.scaled_dot_product_attention. Its scores are computed in fp32
        from queries and keys of the precision that it has, as fused kernels do."""
        tokens = self.shape[1]
        if query.shape[-2] != tokens or key.shape[-2] != tokens:
            return  # such as attention to another text
        device, dtype = query.device.type, query.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        if attn_mask is not None and attn_mask.dim() == query.dim() == 3:
            attn_mask = self._by_head(attn_mask.expand(len(query), -1, -1))
        with torch.autocast(device, enabled=False):
            query, key, value = (self._by_head(_wide(t.to(dtype))) for t in (query, key, value))
            scores = fused_scores(query, key, attn_mask, is_causal, scale)
            weights = scores.softmax(-1).nan_to_num(0.0)  # no key is visible for some padding
        self._send(weights, scores, value, output)

    def _product(self, func: Any, args: Sequence[Any], output: Tensor) -> None:
        """Receives the operands of a product, if they are weights and values."""
        tokens, operands = self.shape[1], [*args[func is torch.einsum :]]
        operands = [*operands[0]] if isinstance(operands[0], list | tuple) else operands
        if not self._is_weights(operands[0]) or operands[0].shape[-2:] != (tokens, tokens):
            return
        weights, values = operands[:2]
        if self._is_weights(values):  # a product of weights
            return
        if func is torch.einsum:
            found = _as_matmul(args[0], values, output)
            if found is None:
                return
            values, output = found
        sink = scores = None
        if self.scores is not None:
            scores, shares = self._by_head(self.scores), self._by_head(self.shares)
            sink = shares[..., -1] if shares.shape[-1] > tokens else None
            scores = scores[..., :tokens]
        self.weights = []
        weights, values = self._by_head(weights), self._by_head(values)
        self._send(weights, scores, values, output, sink)

    def _send(
        self,
        weights: Tensor,
        scores: Tensor | None,
        values: Tensor,
        output: Tensor,
        sink: Tensor | None = None,
    ) -> None:
        if scores is not None:
            scores = F.threshold(scores.float(), MASKED, float("-inf"))
        output = self._by_head(output)
        self.receive(AttentionCall(weights.float(), values, output, scores, sink))

    def _by_head(self, given: Tensor) -> Tensor:
        """(B, H, ..), (B H, ..), (B, G, H / G, ..) or (B, ..) -> (B, H, ..)."""
        return given.reshape(self.shape[0], -1, *given.shape[-2:])


def fused_scores(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    """Returns the scores of F.scaled_dot_product_attention, (B, H, T, T). query (B, H, T, D), key
    (B, G, T, D)."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    if mask is None:
        return scores
    return scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, float("-inf"))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def _as_matmul(equation: str, values: Tensor, output: Tensor) -> tuple[Tensor, Tensor] | None:
    """Returns the second operand and the output of an einsum of weights and values with the
    dimensions in the order of a matmul: "bhqk,bkhd->bqhd" as "bhqk,bhkd->bhqd". None for an einsum
    of other operands."""
    given, _, result = equation.replace(" ", "").partition("->")
    weights, of_values = given.split(",")
    *batch, query, key = weights
    width = "".join(label for label in of_values if label not in weights)
    if len(width) != 1 or {*of_values} - {*batch} != {key, width} or {query, width} - {*result}:
        return None
    shared = "".join(label for label in batch if label in of_values)
    values = torch.einsum(f"{of_values}->{shared}{key}{width}", values)
    return values, torch.einsum(f"{result}->{''.join(batch)}{query}{width}", output)


@dataclass(eq=False)
class _Running:
    """A module that is running, and its first argument."""

    module: nn.Module
    given: Any


class _Layers:
    """Finds the layer of each attention, and passes it on."""

    def __init__(self, model: nn.Module, receive: Receive):
        self.model, self.receive = model, receive
        self.stack: list[_Running] = []  # from the outermost to the innermost
        self.heads: list[AttentionCall] = []  # of a layer that computes them one by one
        self.last = _Running(model, None)  # the module of the last attention
        self.numbers: list[int] = []
        self.list: nn.ModuleList | None = None  # of the layers
        self.places: dict[nn.Module, list[tuple[nn.ModuleList, int]]] = {}
        for module in model.modules():
            if isinstance(module, nn.ModuleList):
                for number, layer in enumerate(module):
                    self.places.setdefault(layer, []).append((module, number))
        self.calls: collections.Counter[nn.Module] = collections.Counter()  # of layers
        self.attended: set[nn.Module] = set()  # modules that contain attention

    def enter(self, module: nn.Module, arguments: tuple, options: dict) -> None:
        given = next((x for x in (*arguments, *options.values()) if isinstance(x, Tensor)), None)
        self.stack.append(_Running(module, given))

    def leave(self, module: nn.Module, *_: Any) -> None:
        if self.stack and self.stack[-1].module is module:  # else an earlier hook raised an error
            self.stack.pop()

    def add(self, call: AttentionCall) -> None:
        """Receives an attention of the module that is running."""
        now = self.stack[-1] if self.stack else _Running(self.model, None)
        call.module, single = now.module, call.weights.shape[1] == 1
        is_same = now is self.last or (now.given is not None and now.given is self.last.given)
        if single and is_same and self.heads:
            self.heads.append(call)
            self.attended.update(of.module for of in self.stack)
            return
        if now is self.last and now.given is not None:
            name = type(now.module).__name__
            advice = "put the attention of each layer into a separate module"
            raise ValueError(f"{name} computes two attention maps in one call; {advice}")
        self.send()
        self.last = now
        self.heads = [call]
        call.number = self._number()
        if not single:
            self.send()

    def send(self) -> None:
        """Passes a layer on."""
        calls, self.heads = self.heads, []
        if len(calls) > 1:
            parts = {key: [getattr(of, key) for of in calls] for key in JOINED}
            joined = {key: torch.cat(of, 1) for key, of in parts.items() if of[0] is not None}
            calls = [AttentionCall(**joined, number=calls[0].number, module=calls[0].module)]
        for call in calls:
            self.receive(call)

    def _number(self) -> int:
        """Returns the number of the layer that is running: its place in a list of modules. A layer
        that runs several times has several places, or else new numbers."""
        number = len(self.numbers)
        self.attended.update(of.module for of in self.stack)
        layer = next((of.module for of in self.stack if of.module in self.places), None)
        if layer is not None:
            places = self.places[layer]
            self.list, number = places[min(self.calls[layer], len(places) - 1)]
            self.calls[layer] += 1
        if number in self.numbers:
            number = max(self.numbers) + 1
        self.numbers.append(number)
        return number

    def others(self) -> dict[int, str]:
        """Returns the layers without attention, {number: what it is}."""
        if self.list is None:
            return {}
        config = getattr(self.model, "config", None)
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        found = (getattr(config, key, None) for key in ("layer_types", "layers_block_type"))
        kinds = next((each for each in found if each and len(each) == len(self.list)), None)
        missing = [n for n, each in enumerate(self.list) if each not in self.attended]
        if kinds:
            return {n: kinds[n].replace("_", " ") for n in missing}
        with_attention = (self.list[n] for n in self.numbers if n < len(self.list))
        used = {type(part) for layer in with_attention for part in layer.children()}
        return {n: _kind(self.list[n], used, type(self.model).__name__) for n in missing}


def _kind(layer: nn.Module, used: set[type], model: str) -> str:
    """Returns what a layer without attention is, from the name of the class of the first part that
    no layer with attention has: "mamba mixer"."""
    part = next((each for each in layer.children() if type(each) not in used), layer)
    words = re.findall("[A-Z][a-z0-9]*", type(part).__name__)
    family = re.findall("[A-Z][a-z0-9]*", model)
    while len(words) > 1 and words[:1] == family[:1]:
        words, family = words[1:], family[1:]
    return " ".join(words).lower() or "other"
