"""Whether captured attention weights are what the model computes with: prove.

Two passes of a text, one as it is and one captured, and three comparisons:

    rows     the weights of each query are in [0, 1], and with the share of a learned sink sum to 1
    product  weights times values are what the attention function returned
    output   each attention module returns the same in both passes, and so does the model

In the second pass each attention module passes on what it returned in the first. So the input of
each layer is the same in both, rounding does not add up over layers, and routers of experts choose
the same. Two numbers are the same if they differ by less than the square root of the precision of
their type: 3.5e-4 in fp32, 0.03 in fp16, 0.09 in bf16, relative to the vector of a token. The
largest difference of one token counts: a wrong mask may affect only the tokens after a window.

The proof is about code and not about weights, so a model is proved once. It is proved again for a
text more than twice as long, which may be the first that is longer than a window.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


@dataclass
class Proof:
    """What was compared, for people."""

    sentence: str  # "maps verified: they reproduce the model's output within 1e-6"
    is_verified: bool


@dataclass
class Call:
    """What one call of an attention function computed."""

    weights: Tensor  # fp32 (B, H, T, T)
    scores: Tensor | None = None  # fp32 (B, H, T, T)
    value_norms: Tensor | None = None  # fp32 (B, H, T)
    number: int = -1  # of the layer
    dtype: torch.dtype = torch.float32  # in which the weights were computed
    # of models of transformers with AttentionInterface:
    module: nn.Module | None = None
    values: Tensor | None = None  # (B, G, T, D), where G divides H
    output: Tensor | None = None  # (B, T, H, D)
    sink: Tensor | None = None  # (B, H, T): the share of a learned sink


Receive = Callable[[Call], None]
_PROVED: weakref.WeakKeyDictionary[nn.Module, tuple[Any, int, Proof]] = weakref.WeakKeyDictionary()


def prove(
    model: nn.Module,
    key: Any,
    tokens: int,
    run: Callable[[Receive], Any],
    own: Callable[[], Any] | None,
) -> Proof | None:
    """Returns the proof of a model, or None for a text of one token, which proves nothing.

    key: by which way it is captured; another way needs another proof. run: captures a text of
    `tokens` tokens, and returns the output of the model, (1, T, ...), or None. own: runs the model
    on the same text as it is; None if that is not known.

    Raises ValueError if the weights are not what the model computes with.
    """
    known = _PROVED.get(model)
    if known and known[0] == key and tokens <= 2 * known[1]:
        return known[2]
    if tokens < 2:
        return None
    comparison = _Comparison()
    with _without_edits(model):
        with comparison, comparison.hooks(model, comparison.record):
            output = _first(run(comparison.check))
        with comparison.hooks(model, comparison.compare):
            found = _first(own()) if own and output is not None else None
    proof = comparison.result(type(model).__name__, output, found)
    _PROVED[model] = key, tokens, proof
    return proof


class _Comparison(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.unused: Tensor | None = None  # weights that were not multiplied by values yet
        self.faults: list[str] = []
        self.largest = 0.0  # relative difference
        self.is_finite = True
        self.called: Call | None = None  # whose module has not returned yet
        self.expected: list[tuple[Call, Tensor]] = []  # what each attention module returned
        self.has_sink, self.has_product = False, True

    def check(self, call: Call) -> None:
        """Checks the rows, and weights times values."""
        weights, layer = call.weights, call.number
        if self.called:
            self.faults.append(f"an attention module computes several maps in layer {layer - 1}")
        sums = weights.sum(-1) + (0 if call.sink is None else call.sink)
        rounding = _rounding(call.dtype)
        self.has_sink |= call.sink is not None and float(call.sink.max()) > rounding
        low, high = float(sums.min()), float(sums.max())
        if max(1 - low, high - 1) > rounding or weights.min() < 0:
            self.faults.append(f"weights of layer {layer} sum to {low:.4g} to {high:.4g}, not to 1")
        self.is_finite &= not sums.isnan().any()
        if call.output is None or call.values is None:
            self._not_used()
            self.unused = weights
            return
        groups = weights.shape[1] // call.values.shape[1]
        values = call.values.float().repeat_interleave(groups, 1)
        with torch.autocast(weights.device.type, enabled=False):
            product = (weights @ values).transpose(1, 2)  # (B, T, H, D)
        what = f"weights times values of layer {layer} differ from its attention output"
        self._same(product, call.output, what)
        self.called = call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notices that a model that hands over no values multiplies the weights by some."""
        if self.unused is not None and func in (torch.matmul, Tensor.matmul, Tensor.__matmul__):
            same_shape = args[0].shape == self.unused.shape
            if same_shape and torch.equal(args[0], self.unused.to(args[0].dtype)):
                self.unused = None
        return func(*args, **(kwargs or {}))

    def _not_used(self) -> None:
        self.has_product &= self.unused is None

    def record(self, module: nn.Module, _: Any, output: Any) -> None:
        """Records what an attention module returns, after `check`."""
        if self.called and module is self.called.module:
            self.expected.append((self.called, _first(output)))
            self.called = None

    def compare(self, module: nn.Module, _: Any, output: Any) -> Any:
        """Compares what an attention module returns, and replaces it by what `record` saw."""
        if not self.expected or module is not self.expected[0][0].module:
            return None
        call, expected = self.expected.pop(0)
        found = _first(output)
        what = "its eager attention is not what it computes: the attention output of layer"
        self._same(expected, found, f"{what} {call.number} differs")
        return (expected, *output[1:]) if isinstance(output, tuple) else expected

    @contextlib.contextmanager
    def hooks(self, model: nn.Module, hook: Callable) -> Iterator[None]:
        hooks = [module.register_forward_hook(hook) for module in model.modules()]
        try:
            yield
        finally:
            for each in hooks:
                each.remove()

    def _same(self, output: Tensor, expected: Tensor, what: str) -> None:
        """Notes the largest difference of a token, relative to its norm, and if it is a fault."""
        if output.shape != expected.shape:
            self.faults.append(f"{what} in its shape, {(*output.shape,)} and {(*expected.shape,)}")
            return
        a, b = (each.flatten(2).float() for each in (output, expected))  # (B, T, N)
        norms = b.norm(dim=-1)
        difference = (a - b).norm(dim=-1) / norms.clamp(min=max(1e-3 * float(norms.max()), 1e-30))
        largest = float(difference.max())
        self.is_finite &= largest < float("inf")  # False for NaN
        self.largest = max(self.largest, largest)
        if largest > _rounding(expected.dtype):
            token = int(difference.amax(0).argmax())
            self.faults.append(f"{what} by {largest:.2g} of its norm, at token {token}")

    def result(self, name: str, output: Tensor | None, own: Tensor | None) -> Proof:
        """Compares the output of the model. Raises ValueError for the first fault."""
        self._not_used()
        can_compare = False
        if output is not None and own is not None and output.shape == own.shape:
            can_compare = True
            self._same(output, own, "its attention is not what it computes: its output differs")
        if not self.is_finite:
            return Proof("maps not verified: numbers of the model are not finite", False)
        if self.faults:
            raise ValueError(f"{name}: the weights are not those of the model: {self.faults[0]}")
        rows = "rows sum to 1" + self.has_sink * " with what goes to a learned sink"
        within = f"within {max(self.largest, 1e-7):.0e}".replace("e-0", "e-")
        if can_compare and self.has_product:
            return Proof(f"maps verified: they reproduce the model's output {within}; {rows}", True)
        if can_compare:
            rest = f"{rows}, and the output is the model's {within}"
            return Proof(f"maps checked: {rest}; weights times values: not checked", False)
        return Proof(f"maps checked: {rows}; the model's output: not checked", False)


def _rounding(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps ** 0.5


def _first(output: Any) -> Any:
    """Returns the first tensor of what a module returned: the logits, or the last hidden state."""
    if isinstance(output, Tensor) or output is None:
        return output
    if isinstance(logits := getattr(output, "logits", None), Tensor):
        return logits
    values = output.values() if isinstance(output, dict) else output
    return next((each for each in values if isinstance(each, Tensor)), None)


@contextlib.contextmanager
def _without_edits(model: nn.Module) -> Iterator[None]:
    """Runs the model without the hooks of this package, which switch heads off or record."""
    names = ("_forward_pre_hooks", "_forward_hooks")
    before = [(module, name, vars(module)[name]) for module in model.modules() for name in names]
    package = __name__.partition(".")[0]
    try:
        for module, name, hooks in before:
            kept = {
                n: h
                for n, h in hooks.items()
                if not str(getattr(h, "__module__", "")).startswith(package)
            }
            vars(module)[name] = type(hooks)(kept)
        yield
    finally:
        for module, name, hooks in before:
            vars(module)[name] = hooks
