"""The parts of an attention score: score_parts(model, ids, layer, head, query, key).

    parts = score_parts(model, ids, layer=1, head=2, query=40, key=17)
    parts.score - parts.mean                 # how far the score is above the mean of its row
    i, j, value = parts.largest()[0]         # the largest part of this difference
    parts.sources[i], parts.sources[j]       # what wrote the query, what wrote the key

The input of a layer is a sum: of the embeddings of token and position, and of what each earlier
head, each earlier MLP and the biases wrote. The norm before the attention is linear once its scale
is fixed at the value for this token, and the projections to queries and keys, with their rotary
positions, are linear. So the score q . k * scale is a sum over pairs: what wrote the query, what
wrote the key (Elhage et al. 2021, A Mathematical Framework for Transformer Circuits). Softmax does
not change if a number is added to all scores of a row, so the values are relative to its mean.

Shapes: T tokens, C width of the residual stream, H heads, D head_dim, S sources.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from .ablation import Head, edited_contexts, removal
from .capturing import LayerAttention, capture, output_projections, unchanged, unwrapped
from .projections import Projection, device_of

AT_ONCE = 2**23  # numbers of parts, (n, T, C), in one call of the attention module: 32 MiB


@dataclass
class ScoreParts:
    """An attention score as a sum over pairs of sources."""

    score: float  # q . k * scale: the score before the softmax
    mean: float  # of the scores of the query token with all keys that it can attend to
    # The sources, in this order: {"kind": "token"}, {"kind": "position"} if it has an embedding,
    # for each earlier layer {"kind": "head", "layer", "head"} and {"kind": "mlp", "layer"}, and
    # {"kind": "biases"}: of output projections, norms, queries and keys. The layers of a hybrid
    # without attention weights, and an MLP before them, are one: {"kind": "layers before L3"}.
    sources: list[dict]
    # (S, S): [i, j] is the part that source i wrote into the query and source j into the key,
    # relative to its mean over the keys. The sum of all is score - mean.
    values: np.ndarray

    def largest(self, count: int = 20) -> list[list]:
        """Returns the pairs of the largest absolute values: [i, j, value], the largest first."""
        order = np.argsort(-np.abs(self.values), axis=None, kind="stable")[:count]
        rows, columns = np.unravel_index(order, self.values.shape)
        return [
            [int(i), int(j), float(self.values[i, j])] for i, j in zip(rows, columns, strict=True)
        ]


def score_parts(
    model: nn.Module,
    ids: Tensor | Sequence[int],
    layer: int,
    head: int,
    query: int,
    key: int,
    off: Sequence[Head] = (),
    means: Sequence[Tensor] | None = None,
) -> ScoreParts:
    """Returns the exact parts of the attention score of one head, from a query to a key position.

    model: our GPT or a decoder of transformers; it does not change. ids: of one text, (T,). off:
    heads (layer, head) that are switched off: their context vector is replaced at all positions by
    `means`, (H, D) for each layer, as in ablation.py. What the mean writes is then their part.

    The parts are computed in fp32, and compared with the score of the model. Raises TypeError for a
    model whose attention modules are not known. Raises ValueError for a position, layer or head
    that does not exist, for a key that the query does not attend to, and for a model whose scores
    are not such a sum: without a norm directly before the attention, with a norm after it, or with
    soft caps or position biases.
    """
    model = unwrapped(model)
    name, projections = type(model).__name__, output_projections(model)
    if not projections:
        raise TypeError(f"{name}: the inputs of the output projections of its heads are not found")
    ids = torch.as_tensor(ids)
    if ids.dim() != 1:
        raise ValueError(f"ids: the parts are those of one text, (T,), not {tuple(ids.shape)}")
    if not 0 <= layer < len(projections):
        raise ValueError(f"layer {layer}: {name} has the layers 0 to {len(projections) - 1}")
    if not 0 <= query < len(ids):
        raise ValueError(f"query {query}: the text has the positions 0 to {len(ids) - 1}")
    if not 0 <= key <= query:
        raise ValueError(f"key {key}: query {query} attends to the keys 0 to {query}")
    run = _Run(model, projections, layer)
    edited = contextlib.nullcontext()
    if off:
        if means is None:
            raise ValueError("off: heads that are switched off need means")
        if not all(0 <= n < len(projections) and 0 <= m < len(means[n]) for n, m in off):
            raise ValueError(f"off: {name} does not have all of the heads {list(off)}")
        edited = edited_contexts(projections, removal(off, means))
    device = device_of(model)
    with torch.autocast(device.type, enabled=False):
        with edited, run.recorded(), contextlib.suppress(_Stop):
            capture(model, ids, run.visit, logits=False)
        with unchanged(model, device):
            return run.parts(head, query, key)


class _Stop(Exception):
    """Ends a run of the model after the layer whose scores are asked for."""


class _Run:
    """What one run of a model tells about the layers up to the one whose scores are asked for."""

    def __init__(self, model: nn.Module, projections: Sequence[Projection], layer: int):
        self.model, self.projections, self.layer = model, projections, layer
        self.name = type(model).__name__
        self.scores: Tensor | None = None  # of the layer, (H, T, T)
        self.numbers: list[int] = []  # of each layer, in the model
        self.start: Tensor | None = None  # input of the first layer of any kind, (T, C)
        self.embedded: list[Tensor] = []  # outputs of the embeddings, (T, C)
        self.inputs: list[Tensor] = []  # of the norm before the attention of each layer, (T, C)
        self.contexts: list[Tensor] = []  # of all heads of each layer before, (T, H D)
        # the modules called since the last attention, their inputs and outputs, (1, T, C)
        self.called: list[tuple[nn.Module, Tensor, Tensor]] = []

    def visit(self, layer: int, attention: LayerAttention) -> None:
        self.numbers.append(attention.number)
        if layer == self.layer:
            self.scores = None if attention.scores is None else attention.scores[0]
            raise _Stop

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Records a run of the model."""
        hooks = [module.register_forward_hook(self._left) for module in self.model.modules()]
        for module in {of.attention for of in self.projections[: self.layer + 1]}:
            hooks.append(module.register_forward_pre_hook(self._attends, with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _left(self, module: nn.Module, given: tuple, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        if len(self.inputs) > self.layer or not (given and isinstance(output, Tensor)):
            return
        if any(module is of.module for of in self.projections):
            self.contexts.append(given[0][0].float())
        elif isinstance(module, nn.Embedding) and not self.inputs:
            self.embedded.append(output.reshape(-1, output.shape[-1]).float())
        else:
            if self.start is None and self.embedded and given[0].shape[-1:] == output.shape[-1:]:
                self.start = given[0][0].float()
            self.called.append((module, given[0], output))

    def _attends(self, module: nn.Module, arguments: tuple, options: dict) -> None:
        """Records the input of the norm before an attention module."""
        layer = len(self.inputs)
        if layer > self.layer:
            return  # the model runs twice
        hidden = options["hidden_states"] if "hidden_states" in options else arguments[0]
        norms = [
            (of, given)
            for of, given, output in self.called
            if output is hidden and "norm" in type(of).__name__.lower()
        ]
        if not norms:
            raise self._refused("no norm is directly before the attention")
        self.norm, given = norms[-1]
        self.dtype = given.dtype
        x = given[0].float()
        if layer and self.projections[layer - 1].factor is None:
            raise self._refused("what an attention writes is not its output times a constant")
        self.inputs.append(x)
        self.attention, self.arguments, self.options = module, arguments, options
        self.called.clear()

    def _refused(self, reason: str) -> ValueError:
        return ValueError(f"{self.name}: its attention scores have no exact parts: {reason}")

    def _is_rounding(self, difference: Tensor, x: Tensor) -> bool:
        """Returns whether two sums of the size of x differ only by the rounding of the model."""
        return bool(difference.norm() <= 8 * torch.finfo(self.dtype).eps * x.norm())

    def written(self) -> Iterator[tuple[dict, Tensor]]:
        """Yields the sources and what they wrote, (T, C); the sum is the input of the norm."""
        token, *positions = self.embedded
        first, rest = self.inputs[0], self.start
        if rest is None or not self.numbers[0]:
            rest = first
        if positions and self._is_rounding(token + sum(positions) - rest, rest):
            yield {"kind": "token"}, token
            yield {"kind": "position"}, rest - token
        else:  # an embedding may be scaled
            yield {"kind": "token"}, rest
        if self.numbers[0]:
            yield {"kind": f"layers before L{self.numbers[0]}"}, first - rest
        biases = torch.zeros_like(rest)
        for layer in range(self.layer):
            projection, rest = self.projections[layer], self.inputs[layer + 1] - self.inputs[layer]
            factor = cast(float, projection.factor)  # `_attends` refuses None
            weight, bias = (factor * t for t in projection.matrix(torch.float32))
            contexts = self.contexts[layer].chunk(projection.num_heads, -1)
            columns = weight.chunk(projection.num_heads)
            for head, (context, of_head) in enumerate(zip(contexts, columns, strict=True)):
                part = context @ of_head
                rest = rest - part
                yield {"kind": "head", "layer": layer, "head": head}, part
            number, following = self.numbers[layer : layer + 2]
            is_mlp = following == number + 1
            between = {"kind": "mlp", "layer": layer}, {"kind": f"layers before L{following}"}
            yield between[not is_mlp], rest - bias
            biases = biases + bias
        yield {"kind": "biases"}, biases

    def parts(self, head: int, query: int, key: int) -> ScoreParts:
        """Returns the parts of a score, after `recorded`."""
        if self.scores is None:
            raise self._refused("they are not known")
        if not 0 <= head < len(self.scores):
            raise ValueError(f"head {head}: a layer has the heads 0 to {len(self.scores) - 1}")
        row = self.scores[head, query]
        seen = row.isfinite()  # the keys that the query attends to, (T,)
        if not seen[key]:
            raise ValueError(f"key {key}: query {query} has no score for it (sliding window, NaN)")
        x = self.inputs[-1]
        linear, bias = self._frozen(functools.partial(_fp32, self.norm), x)
        sources: list[dict] = []
        queries, relative = [], []  # of the sources, (S, D)
        with self._projecting(head, query) as project:
            whole, keys, scale = project((linear(x) + bias)[None])  # (1, D), (1, T, D)
            of_zero, keys_of_zero, _ = project(torch.zeros_like(x)[None])
            for batch in _batches(self.written(), max(1, AT_ONCE // x.numel())):
                sources += [source for source, _ in batch]
                hidden = torch.stack([linear(part) for _, part in batch])  # (n, T, C)
                if sources[-1]["kind"] == "biases":
                    hidden[-1] += bias
                of_parts, keys_of_parts, _ = project(hidden)
                queries.append(of_parts)
                relative.append(_relative(keys_of_parts, key, seen))
        # What zeros give is the part of the biases of queries and keys.
        queries, relative = torch.cat(queries), torch.cat(relative)
        queries[:-1] -= of_zero
        relative[:-1] -= _relative(keys_of_zero, key, seen)
        values = queries @ relative.T * scale
        scores = (keys[0, seen] @ whole[0]) * scale
        score, mean = float(keys[0, key] @ whole[0] * scale), float(scores.mean())
        largest = 1 + float(row[seen].abs().max())
        rounding = 1e-3 if self.dtype in (torch.float32, torch.float64) else 0.1
        if (scores - row[seen]).abs().max() > rounding * largest:
            raise self._refused("they are not q . k times a constant (soft cap, position biases)")
        largest = max(largest, float(values.abs().max()))
        if abs(float(values.sum()) - (score - mean)) > 1e-3 * largest:
            raise self._refused("queries or keys are not linear in their input")
        return ScoreParts(score, mean, sources, values.cpu().double().numpy())

    def _frozen(
        self, norm: Callable[[Tensor], Tensor], x: Tensor
    ) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        """Returns a norm with its scale fixed at that of each vector of x, (..., C), as a linear
        function, and its bias, (..., 1, C)."""
        bias = norm(torch.zeros_like(x[..., :1, :]))
        ones = torch.ones_like(bias)
        removes_mean = bool((norm(ones) - bias).abs().max() < 1e-4)
        balanced = ones.clone()
        balanced[..., -1] = 1 - x.shape[-1]  # mean 0
        gain = (norm(balanced) - bias) / balanced  # times a constant

        def without_scale(part: Tensor) -> Tensor:
            return gain * (part - part.mean(-1, keepdim=True) if removes_mean else part)

        normed, unscaled = norm(x) - bias, without_scale(x)
        scale = (normed * unscaled).sum(-1, keepdim=True) / unscaled.square().sum(-1, keepdim=True)
        if not torch.allclose(unscaled * scale, normed, 1e-3, 1e-3):
            raise self._refused("a norm is not linear with a fixed scale")
        return lambda part: without_scale(part) * scale, bias

    @contextlib.contextmanager
    def _projecting(self, head: int, query: int) -> Iterator[Callable]:
        """Yields a function of inputs of the attention module, (n, T, C). It returns the queries of
        the head at a position, (n, D), its keys, (n, T, D), and the scale of the scores. Norms of
        queries and keys have the scale that they have in the first call."""
        received: list[tuple[Tensor, Tensor, float]] = []
        frozen: dict[nn.Module, tuple] = {}
        arguments, options = list(self.arguments), dict(self.options)

        def receive(queries: Tensor, keys: Tensor, scale: float | None) -> None:
            group = head * keys.shape[1] // queries.shape[1]  # of heads that share keys
            scale = scale or queries.shape[-1] ** -0.5
            received.append((queries[:, head, query], keys[:, group], scale))

        def kernel(queries: Tensor, keys: Tensor, values: Tensor, _: float) -> Tensor:
            receive(queries, keys, None)
            return values

        def freeze(norm: nn.Module, given: tuple, output: Tensor) -> Tensor:
            if norm not in frozen:
                frozen[norm] = self._frozen(norm.forward, given[0])
            linear, bias = frozen[norm]
            return linear(given[0]) + bias

        def project(hidden: Tensor) -> tuple[Tensor, Tensor, float]:
            if "hidden_states" in options:
                options["hidden_states"] = hidden
            else:
                arguments[0] = hidden
            try:
                _fp32(self.attention, *arguments, **options)
            except ValueError as error:  # of sdpa, such as no soft caps
                raise self._refused(str(error)) from error
            if not received:
                raise self._refused("its queries and keys are not known")
            return received.pop()

        config = getattr(self.attention, "config", None)
        before = getattr(config, "_attn_implementation", None)
        if hasattr(self.model, "capture_attention"):
            arguments[1:] = [kernel]
        with contextlib.ExitStack() as stack:
            for module in self.attention.modules():
                if "norm" in type(module).__name__.lower() and not list(module.children()):
                    stack.callback(module.register_forward_hook(freeze).remove)
            if config and before:  # of transformers: sdpa shows queries and keys
                config._attn_implementation = "sdpa"
                stack.callback(setattr, config, "_attn_implementation", before)
            stack.enter_context(_Asked(receive))
            yield project


class _Asked(TorchFunctionMode):
    """Passes queries and keys of F.scaled_dot_product_attention on, and does not compute it."""

    def __init__(self, receive: Callable):
        super().__init__()
        self.receive = receive

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, key, value = args[:3]
        self.receive(query, key, (kwargs or {}).get("scale"))
        return value.new_zeros(*query.shape[:-1], value.shape[-1])


def _relative(keys: Tensor, key: int, seen: Tensor) -> Tensor:
    """(n, T, D) -> the key at a position minus the mean of those that the query attends to."""
    return keys[:, key] - keys[:, seen].mean(1)


def _fp32(module: nn.Module, *arguments: Any, **options: Any) -> Any:
    """Calls a module with its parameters in fp32. The module does not change."""
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    state = {name: t.float() for name, t in tensors.items() if t.is_floating_point()}
    return functional_call(module, state, arguments, options)


def _batches(items: Iterator, size: int) -> Iterator[list]:
    while batch := list(itertools.islice(items, size)):
        yield batch
