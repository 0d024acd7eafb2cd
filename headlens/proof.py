"""Whether captured attention weights are what the model computes with: prove.

A short text is captured and checked, before anything is shown:

    rows     the weights of each query are in [0, 1], and with the share of a learned sink sum to 1
    product  weights times values are what the attention of the layer returned
    output   the model returns the same as without the capture, if the capture changes how it runs

Two vectors of a token are the same if they differ by less than the square root of the precision of
their type: 3.5e-4 in fp32, 0.03 in fp16 and TF32, 0.09 in bf16, relative to their norm. The largest
difference of one token counts: a wrong mask may affect only the tokens after a window. Of outputs
in fp16 and bf16, the median counts: with rounding, a router may choose other experts for a token.

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

from .observing import AttentionCall, Receive


@dataclass
class Proof:
    """What was compared, for people."""

    sentence: str  # "maps verified: they reproduce the model's output within 1e-6"
    is_verified: bool


_PROVED: weakref.WeakKeyDictionary[nn.Module, tuple[Any, int, Proof]] = weakref.WeakKeyDictionary()


def prove(
    model: nn.Module,
    key: Any,
    tokens: int,
    run: Callable[[Receive], Any],
    own: Callable[[], Any] | None,
) -> Proof | None:
    """Returns the proof of a model, or None for a text of one token, which proves nothing.

    key: its kernel of attention; another one needs another proof. run: captures a text of `tokens`
    tokens, and returns the output of the model. own: runs the model on the same text as it is; None
    if the capture does not change how it runs.

    Raises ValueError if the weights are not what the model computes with, or not causal.
    """
    known = _PROVED.get(model)
    if known and known[0] == key and tokens <= 2 * known[1]:
        return known[2]
    if tokens < 2:
        return None
    checks = _Checks(type(model).__name__)
    with without_edits(model):
        output = first_tensor(run(checks.of_call))
        expected = first_tensor(own()) if own else output
    proof = checks.result(output, expected, is_compared=own is None)
    if checks.is_finite:
        _PROVED[model] = key, tokens, proof
    return proof


class _Checks:
    """What the checks of a text have found."""

    def __init__(self, name: str) -> None:
        self.name = name  # of the model
        self.faults: list[str] = []
        self.largest = 0.0  # relative difference
        self.is_finite, self.has_sink = True, False

    def of_call(self, call: AttentionCall) -> None:
        """Checks the rows of a layer, and weights times values."""
        weights, layer = call.weights, call.number
        future = weights.triu(1) > 0
        if future.any():
            token, what = int(future.nonzero()[0, 2]), "the lens needs causal attention"
            raise ValueError(f"{self.name}: token {token} attends to future tokens; {what}")
        sums = weights.sum(-1) + (0 if call.sink is None else call.sink.float())
        self.has_sink |= call.sink is not None
        self.is_finite &= not sums.isnan().any()
        rounding, low, high = _rounding(call.output.dtype), float(sums.min()), float(sums.max())
        if 1 - low > rounding or high - 1 > rounding or weights.min() < 0:
            self.faults.append(f"weights of layer {layer} sum to {low:.4g} to {high:.4g}, not to 1")
        values = call.values.float()
        values = values.repeat_interleave(weights.shape[1] // values.shape[1], 1)  # (B, H, T, D)
        what = f"weights times values of layer {layer} differ from its attention output"
        self._same(_of_tokens(weights @ values), _of_tokens(call.output), what)

    def result(self, output: Any, expected: Any, is_compared: bool) -> Proof:
        """Compares the output of the model. Raises ValueError for the first fault. is_compared: if
        the capture does not change how the model runs."""
        if not is_compared and getattr(output, "shape", 0) == getattr(expected, "shape", 1):
            what = "the output with the captured attention differs from the model's own output"
            self._same(output, expected, what, is_typical=output.dtype.itemsize < 4)
            is_compared = True
        if not self.is_finite:
            return Proof("maps not verified: numbers of the model are not finite", False)
        if self.faults:
            reason = f"the weights are not those of the model: {self.faults[0]}"
            raise ValueError(f"{self.name}: {reason}")
        if not is_compared:
            return Proof("maps not verified: the model returns no output to compare", False)
        rows = "rows and a learned sink sum to 1" if self.has_sink else "rows sum to 1"
        if not self.largest:  # it multiplies them itself
            return Proof(f"maps verified: the model multiplies them by its values; {rows}", True)
        within = f"within {self.largest:.0e}".replace("e-0", "e-")
        return Proof(f"maps verified: they reproduce the model's output {within}; {rows}", True)

    def _same(self, found: Tensor, expected: Tensor, what: str, is_typical: bool = False) -> None:
        """Notes the largest difference of a token, relative to its norm, and if it is a fault.
        found, expected: (B, T, N). is_typical: the median token instead."""
        a, b = (each.flatten(2).float() for each in (found, expected))
        norms = b.norm(dim=-1)
        difference = (a - b).norm(dim=-1) / norms.clamp(min=max(1e-3 * float(norms.max()), 1e-30))
        largest = float(difference.median() if is_typical else difference.max())
        self.is_finite &= largest == largest  # False for NaN
        self.largest = max(self.largest, largest)
        if largest > _rounding(expected.dtype):
            token = int(difference.amax(0).argmax())
            self.faults.append(f"{what} by {largest:.2g} of its norm, at token {token}")


def _of_tokens(contexts: Tensor) -> Tensor:
    """(B, H, T, D) -> (B, T, H D)."""
    return contexts.transpose(1, 2).flatten(2)


def _rounding(dtype: torch.dtype) -> float:
    has_tf32 = torch.get_float32_matmul_precision() != "highest"
    products = torch.float16 if has_tf32 else torch.float32  # TF32 has the precision of fp16
    return max(torch.finfo(dtype).eps, torch.finfo(products).eps) ** 0.5


def first_tensor(output: Any) -> Any:
    """Returns the first tensor of what a module returned: the logits, or the last hidden state."""
    if isinstance(output, Tensor) or output is None:
        return output
    if isinstance(logits := getattr(output, "logits", None), Tensor):
        return logits
    values = output.values() if isinstance(output, dict) else output
    return next((each for each in values if isinstance(each, Tensor)), None)


@contextlib.contextmanager
def without_edits(model: nn.Module) -> Iterator[None]:
    """Runs the model without the hooks of this package, which switch heads off or record."""
    names = ("_forward_pre_hooks", "_forward_hooks")
    before = [vars(module)[name] for module in model.modules() for name in names]
    removed: list[tuple[dict, int, Any]] = []
    package = __name__.partition(".")[0]
    try:
        for hooks in before:
            for number, hook in [*hooks.items()]:
                if str(getattr(hook, "__module__", "")).startswith(package):
                    removed.append((hooks, number, hooks.pop(number)))
        yield
    finally:
        for hooks, number, hook in removed:
            hooks[number] = hook
