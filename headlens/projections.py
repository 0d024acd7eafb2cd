"""The output projections of the attention of a model, found by running it: found_projections.

The module that is running when the attention weights are known is the attention module. Its output
projection is the linear module that receives weights times values. So no names are needed.

Shapes: B batch, T tokens, H query heads, D head_dim of the values, C width of the residual stream.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .observing import AttentionCall, hooked

EMPTY = torch.empty(0)
IDS = [0, 1, 1, 0, 1]  # a run with these token ids, which every model has, tells what is linear
Found = list["Projection"]


@dataclass
class Projection:
    """The output projection of the attention of one layer."""

    module: nn.Module  # its input, (B, T, H D), is the contexts of all heads
    attention: nn.Module  # the module that computes the attention weights
    num_heads: int
    # The residual stream receives the output of the projection times this constant. None if it
    # receives something else: with a norm behind it, for example.
    factor: float | None
    is_sum: bool  # whether a context is weights times values, without a norm or a gate behind it
    given: Tensor  # an input of the module, (1, T, H D)
    options: tuple[tuple, dict]  # further arguments of the module
    is_transposed: bool | None  # whether its weight is (C, H D), Conv1D's is not; None: no weight

    @torch.no_grad()
    def matrix(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns the matrix of the projection, (H D, C), and its bias, (C,)."""
        weight, bias = (getattr(self.module, name, None) for name in ("weight", "bias"))
        if self.is_transposed is not None and weight is not None and not weight.is_meta:
            matrix = weight.T if self.is_transposed else weight
            bias = matrix.new_zeros(matrix.shape[1]) if bias is None else bias
            return matrix.to(dtype), bias.to(dtype)
        # A module around others, as of LoRA, a quantised or an offloaded weight: what the module
        # does to each unit vector, without hooks, which may be edits of contexts.
        like, (arguments, options) = self.given, self.options
        unit = torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)[None]
        bias = self.module.forward(torch.zeros_like(unit[:, :1]), *arguments, **options)
        matrix = self.module.forward(unit, *arguments, **options) - bias
        return matrix[0].to(dtype), bias[0, 0].to(dtype)

    def value_norms(self, values: Tensor) -> Tensor | None:
        """Returns the norm of the vector that each value adds to the residual stream per unit of
        weight, |W_O v|, fp32 (B, H, T). None if what it adds is not a constant times W_O v.

        values: (B, G, T, D), where G divides H: consecutive query heads share values.
        """
        if self.factor is None or not self.is_sum:
            return None
        values = values.repeat_interleave(self.num_heads // values.shape[1], 1)  # (B, H, T, D)
        weight = self.matrix(values.dtype)[0].unflatten(0, (self.num_heads, -1))  # (H, D, C)
        # |W v|^2 = v^T (W^T W) v does not need the vectors W v, (B, H, T, C).
        squares = ((values @ (weight @ weight.mT)).float() * values.float()).sum(-1)
        return abs(self.factor) * squares.clamp(min=0).sqrt()


def device_of(model: nn.Module) -> torch.device:
    """Returns the device of the weights of a model that are not offloaded."""
    devices = (parameter.device for parameter in model.parameters() if not parameter.is_meta)
    return next(devices, torch.device("cpu"))


def found_projections(model: nn.Module, run: Callable) -> Found:
    """Returns the output projection of each layer with attention, in the order in which they run;
    empty if that of a layer is not found. run(ids, receive): runs the model, see `observe`."""
    return _Finder(model).found(run)


@dataclass(eq=False)
class _Call:
    """A call of a module."""

    module: nn.Module
    parent: "_Call | None"
    arguments: tuple
    options: dict
    given: Tensor = EMPTY  # the first tensor of numbers among them
    output: Tensor = EMPTY  # the first one of its output
    calls: list["_Call"] = field(default_factory=list)  # of modules, by this module

    def inside(self) -> Iterator["_Call"]:
        """Yields all calls within this one, in the order of their ends."""
        for call in self.calls:
            yield from call.inside()
            yield call


class _Finder:
    """Records a run of a model."""

    def __init__(self, model: nn.Module):
        self.model, self.root = model, _Call(model, None, (), {})
        self.running = [self.root]  # from the outermost to the innermost
        self.layers: list[tuple[_Call, AttentionCall]] = []  # what is running, and its attention

    def found(self, run: Callable) -> Found:
        with hooked(self.model, self._enter, self._leave):
            run(torch.tensor([IDS], device=device_of(self.model)), self._receive)
        calls, found, attentions = [*self.root.inside()], [], []
        for running, of in self.layers:
            called = [c for c in calls if c.module is of.module and c not in attentions]
            attentions.append(called[0] if called else running)
        for attention, (_, of) in zip(attentions, self.layers, strict=True):
            if not (projection := _projection(calls, attention, of)):
                return []
            found.append(projection)
        return found

    def _enter(self, module: nn.Module, arguments: tuple, options: dict) -> None:
        given = _first((*arguments, *options.values()))
        self.running.append(_Call(module, self.running[-1], arguments, options, given))

    def _leave(self, module: nn.Module, arguments: tuple, output: Any) -> None:
        call = self.running.pop()
        outputs = output if isinstance(output, tuple) else (output,)
        call.output = _first(outputs)
        self.running[-1].calls.append(call)

    def _receive(self, call: AttentionCall) -> None:
        self.layers.append((self.running[-1], call))


def _first(values: Sequence[Any]) -> Tensor:
    """Returns a copy of the first tensor of numbers: a model may add to it in place."""
    tensors = [t for t in values if isinstance(t, Tensor) and t.is_floating_point()]
    return tensors[0].detach().clone() if tensors else EMPTY


def _projection(
    calls: Sequence[_Call], attention: _Call, observed: AttentionCall
) -> Projection | None:
    """Returns the output projection of an attention module: the linear module that receives weights
    times values. With a norm or a gate between, it is the one that the attention module calls last.
    """
    num_heads, contexts = observed.weights.shape[1], observed.output.transpose(1, 2).flatten(2)

    def is_projection(call: _Call) -> bool:
        x, (*rest,) = call.given, call.arguments[1:]
        if x.shape != contexts.shape or not call.arguments or call.output.dim() != 3:
            return False
        adds = any(isinstance(each, Tensor) for each in rest)
        is_input = _is_same(x, attention.given) or _is_same(x, call.output)  # of a gate; of dropout
        if adds or is_input:
            return False
        zero, twice = (call.module(x * n, *rest, **call.options) for n in (0, 2))
        return isinstance(zero, Tensor) and is_close(twice + zero, 2 * call.output)

    found = [call for call in calls if is_close(call.given, contexts) and is_projection(call)]
    if not (is_sum := bool(found)):
        shape = attention.output.shape  # of nothing, if no module was running
        writes = [call for call in attention.inside() if call.output.shape == shape]
        found = [call for call in writes if is_projection(call)]
        # Contexts in another order, of heads that are not next to each other, are not supported.
        if not found or is_close(_sorted(found[-1].given), _sorted(contexts)):
            return None
    call = found[-1]  # one around others, such as LoRA's, ends last
    return Projection(
        module=call.module,
        attention=attention.module,
        num_heads=num_heads,
        factor=_factor(attention, call),
        is_sum=is_sum,
        given=call.given,
        options=(call.arguments[1:], call.options),
        is_transposed=_is_transposed(call),
    )


def _is_transposed(call: _Call) -> bool | None:
    """Returns whether a module is x W^T + b; False if it is x W + b, None if it is neither."""
    x, names = call.given, {name for name, _ in call.module.named_parameters()}
    weight, bias = (getattr(call.module, name, None) for name in ("weight", "bias"))
    if weight is None or not names <= {"weight", "bias"} or weight.is_meta:
        return None
    for is_transposed, matrix in ((True, weight.T), (False, weight)):
        fits = matrix.dtype == x.dtype and matrix.shape[0] == x.shape[-1]
        if fits and is_close(x @ matrix + (0 if bias is None else bias), call.output):
            return is_transposed
    return None


def _factor(attention: _Call, projection: _Call) -> float | None:
    """Returns the constant a of x + a output, or x + a output + b MLP with any b, where x is the
    input of a module that contains the attention and output that of the projection."""
    wrote, within, outer = projection.output, attention, attention.parent
    while outer:
        later = [call.given for call in outer.calls[outer.calls.index(within) + 1 :]]
        outputs = [call.output for call in outer.calls]
        x, outputs, sums = (
            [each.view_as(wrote) for each in found if each.numel() == wrote.numel()]
            for found in ([outer.given], outputs, [*later, outer.output])
        )
        for y in sums if x else ():
            others = [other for other in outputs if not _is_same(other, y)]
            for other in (None, *others):
                if (factor := _share(y - x[0], wrote, other, y)) is not None:
                    return factor
        within, outer = outer, outer.parent
    return None


def _share(change: Tensor, wrote: Tensor, other: Tensor | None, like: Tensor) -> float | None:
    """Returns a, where a change is a wrote, or a wrote + b other; None if it is not."""
    # Some tokens are much larger than others; a padding token may be 0.
    size = like.float().norm(dim=-1, keepdim=True).clamp(min=1e-30)
    parts = [part for part in (change, wrote, other) if part is not None]
    target, *columns = ((part.float() / size).flatten().cpu().double() for part in parts)
    matrix = torch.stack(columns, -1)
    found = torch.linalg.lstsq(matrix, target).solution
    rest, own = (matrix @ found - target).norm(), (columns[0] * found[0]).norm()
    eps = torch.finfo(like.dtype).eps
    if not rest < min(0.1 * float(own), 4 * eps * size.numel() ** 0.5):
        return None
    factor = float(found[0])
    return 1.0 if abs(factor - 1) < 8 * eps else factor


def _sorted(numbers: Tensor) -> Tensor:
    return numbers.float().sort(-1).values


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def is_close(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors differ only by rounding."""
    if a.shape != b.shape:
        return False
    eps = max(torch.finfo(t.dtype).eps for t in (a, b))
    return bool((a.float() - b.float()).norm() <= 8 * eps * b.float().norm())
