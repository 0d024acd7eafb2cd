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

from .ablation import check_heads, edited_contexts, known_projections
from .capturing import LayerAttention, capture, unchanged, unwrapped
from .observing import hooked
from .projections import Projection, device_of, is_close


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
        pairs = zip(*np.unravel_index(order, self.values.shape), strict=True)
        return [[int(i), int(j), float(self.values[i, j])] for i, j in pairs]


class _Stop(Exception):
    """Ends a run of the model after the layer whose scores are asked for."""


class _Refused(ValueError):
    """A reason why the scores of a model have no exact parts."""


def score_parts(
    model: nn.Module,
    ids: Tensor | Sequence[int],
    layer: int,
    head: int,
    query: int,
    key: int,
) -> ScoreParts:
    """Returns the exact parts of the attention score of one head, from a query to a key position.

    model: one whose attention modules call F.scaled_dot_product_attention, or do with the setting
    "sdpa" of transformers; it does not change. ids: of one text, (T,). With a head that is switched
    off by `edited_contexts`, its part is what the mean writes.

    The parts are computed in fp32, and compared with the score of the model. Raises ValueError for
    a position, layer or head that does not exist, for a key that the query does not attend to, and
    for a model whose scores are not such a sum: without a norm directly before the attention, with
    a norm after it, or with soft caps or position biases.
    """
    model = unwrapped(model)
    projections, ids = known_projections(model), torch.as_tensor(ids)
    if ids.dim() != 1:
        raise ValueError(f"ids: the parts are those of one text, (T,), not {tuple(ids.shape)}")
    check_heads([(layer, head)], projections)
    for name, position, count in (("query", query, len(ids)), ("key", key, query + 1)):
        if not 0 <= position < count:
            raise ValueError(f"{name} {position}: it must be 0 to {count - 1}")
    run, device = _Run(model, projections, layer), device_of(model)
    try:
        with torch.autocast(device.type, enabled=False):
            run.record(ids)
            with unchanged(model, device):
                return run.parts(head, query, key)
    except _Refused as error:
        reason = f"its attention scores have no exact parts: {error}"
        raise ValueError(f"{type(model).__name__}: {reason}") from error


class _Run:
    """What one run of a model tells about the layers up to the one whose scores are asked for."""

    def __init__(self, model: nn.Module, projections: Sequence[Projection], layer: int):
        self.model, self.projections, self.layer = model, projections, layer
        self.scores: Tensor | None = None  # of the layer, (H, T, T)
        self.numbers: list[int] = []  # of each layer, in the model
        self.start: Tensor | None = None  # input of the first layer of any kind, (T, C)
        self.embedded: list[Tensor] = []  # outputs of the embeddings, (T, C)
        self.inputs: list[Tensor] = []  # of the norm before the attention of each layer, (T, C)
        self.contexts: list[Tensor] = []  # of the heads of each layer before, (H, T, D)
        # the norms called since the last attention, their inputs and outputs, (1, T, C)
        self.norms: list[tuple[nn.Module, Tensor, Tensor]] = []

    def record(self, ids: Tensor) -> None:
        """Runs the model on the ids of a text, (T,)."""

        def visit(layer: int, attention: LayerAttention) -> None:
            self.numbers.append(attention.number)
            if layer == self.layer:
                self.scores = None if attention.scores is None else attention.scores[0]
                raise _Stop

        def keep(_: int, context: Tensor) -> Tensor:
            self.contexts.append(context[0].float())
            return context

        with (
            contextlib.suppress(_Stop),
            edited_contexts(self.projections, keep),
            hooked(self.model, self._enter, self._leave),
        ):
            capture(self.model, ids, visit, logits=False)

    def _leave(self, module: nn.Module, given: tuple, output: Any) -> None:
        if len(self.inputs) > self.layer or not (given and isinstance(output, Tensor)):
            return
        if isinstance(module, nn.Embedding) and not self.inputs:
            self.embedded.append(output.reshape(-1, output.shape[-1]).float())
        elif self.start is None and self.embedded and given[0].shape[-1:] == output.shape[-1:]:
            self.start = given[0][0].float()
        if _is_norm(module):
            self.norms.append((module, given[0], output))

    def _enter(self, module: nn.Module, arguments: tuple, options: dict) -> None:
        """Records the input of the norm before an attention module."""
        layer = len(self.inputs)
        if layer > self.layer or module is not self.projections[layer].attention:
            return
        given = [*arguments, *options.values()]
        found = [each for each in self.norms if any(each[2] is one for one in given)]
        if not found:
            reason = 'a module with "norm" in the name of its class'
            raise _Refused(f"the input of an attention module is not the output of {reason}")
        if layer and self.projections[layer - 1].factor is None:
            raise _Refused("what an attention writes is not its output times a constant")
        self.norm, x, self.normed = found[-1]
        self.dtype = x.dtype
        self.inputs.append(x[0].float())
        self.attention, self.arguments, self.options = module, arguments, options
        self.norms.clear()

    def sources(self) -> Iterator[tuple[dict, Tensor]]:
        """Yields the sources and what they wrote, (T, C); the sum is the input of the norm."""
        first = self.inputs[0]
        start = first if self.start is None or not self.numbers[0] else self.start
        if start.shape != first.shape:
            raise _Refused("the norm before the attention reads more than the residual stream")
        embedded = [each for each in self.embedded if each.shape == start.shape]
        if len(embedded) > 1 and is_close(torch.stack(embedded).sum(0).to(self.dtype), start):
            yield {"kind": "token"}, embedded[0]
            yield {"kind": "position"}, start - embedded[0]
        else:  # an embedding may be scaled
            yield {"kind": "token"}, start
        if self.numbers[0]:
            yield {"kind": f"layers before L{self.numbers[0]}"}, first - start
        biases = torch.zeros_like(first)
        for layer in range(self.layer):
            projection, rest = self.projections[layer], self.inputs[layer + 1] - self.inputs[layer]
            factor = cast(float, projection.factor)  # `_enter` refuses None
            weight, bias = (factor * t for t in projection.matrix(torch.float32))
            for head, of_head in enumerate(weight.chunk(projection.num_heads)):
                part = self.contexts[layer][head] @ of_head
                rest = rest - part
                yield {"kind": "head", "layer": layer, "head": head}, part
            number, following = self.numbers[layer : layer + 2]
            others = {"kind": f"layers before L{following}"}
            mlp = {"kind": "mlp", "layer": layer}
            yield mlp if following == number + 1 else others, rest - bias
            biases = biases + bias
        yield {"kind": "biases"}, biases

    def parts(self, head: int, query: int, key: int) -> ScoreParts:
        """Returns the parts of a score, after `record`."""
        if self.scores is None:
            raise _Refused("they are not known")
        row = self.scores[head, query]
        seen = row.isfinite()  # the keys that the query attends to, (T,)
        if not seen[key]:
            raise ValueError(f"key {key}: query {query} has no score for it (sliding window, NaN)")
        sources, queries, keys = [], [], []
        with self._projecting(head, query) as project:
            of_query, of_keys, scale = project(self.inputs[-1])  # (D,), (T, D)
            # What zeros give is the part of the biases of norms, queries and keys.
            no_query, no_keys, _ = project(torch.zeros_like(self.inputs[-1]))
            for source, part in self.sources():
                without = source["kind"] != "biases"
                of_part, keys_of_part, _ = project(part)
                keys_of_part = keys_of_part - without * no_keys
                sources.append(source)
                queries.append(of_part - without * no_query)
                keys.append(keys_of_part[key] - keys_of_part[seen].mean(0))
        values = torch.stack(queries) @ torch.stack(keys).T * scale
        scores = of_keys @ of_query * scale
        score, mean = float(scores[key]), float(scores[seen].mean())
        largest = 1 + float(row[seen].abs().max())
        rounding = 1e-3 if self.dtype in (torch.float32, torch.float64) else 0.1
        if (scores - row)[seen].abs().max() > rounding * largest:
            raise _Refused("they are not q . k times a constant (soft cap, position biases)")
        largest = max(largest, float(values.abs().max()))
        if abs(float(values.sum()) - (score - mean)) > 1e-3 * largest:
            raise _Refused("queries or keys are not linear in their input")
        return ScoreParts(score, mean, sources, values.cpu().double().numpy())

    @contextlib.contextmanager
    def _projecting(self, head: int, query: int) -> Iterator[Callable]:
        """Yields a function of inputs of the norm before the attention, (T, C). It returns the
        query of the head at a position, (D,), its keys, (T, D), and the scale of the scores. Norms,
        also of queries and keys, have the scale that they have in the first call."""
        norm, attention, asked = _in_fp32(self.norm), _in_fp32(self.attention), _Asked()
        frozen: list[tuple] = []  # the norms, in the order of their calls
        turns = itertools.count()

        def freeze(norm: nn.Module, given: tuple, _: Tensor) -> Tensor:
            if (turn := next(turns)) == len(frozen):
                frozen.append(_frozen(norm.forward, given[0]))
            linear, bias = frozen[turn]
            return linear(given[0]) + bias

        def project(x: Tensor) -> tuple[Tensor, Tensor, float]:
            nonlocal turns
            turns = itertools.count()
            hidden = norm(x[None])
            arguments = [hidden if each is self.normed else each for each in self.arguments]
            options = {k: hidden if v is self.normed else v for k, v in self.options.items()}
            if hasattr(self.model, "capture_attention"):  # ours, with any kernel
                arguments[1:] = [lambda q, k, v, _: F.scaled_dot_product_attention(q, k, v)]
            try:
                with asked:
                    attention(*arguments, **options)
            except _Refused:
                raise
            except Exception as error:
                reason = f"{type(error).__name__}: {error}".split(". ")[0].split("\n")[0]
                raise _Refused(f"its attention does not run alone with sdpa ({reason})") from error
            if not asked.received:
                raise _Refused("its attention does not call F.scaled_dot_product_attention")
            queries, keys, scale = asked.received.pop()
            group = head * keys.shape[1] // queries.shape[1]  # of heads that share keys
            return queries[0, head, query], keys[0, group], scale or queries.shape[-1] ** -0.5

        config = getattr(self.attention, "config", None)
        before = getattr(config, "_attn_implementation", None)
        with contextlib.ExitStack() as stack:
            for module in (self.norm, *filter(_is_norm, self.attention.modules())):
                stack.callback(module.register_forward_hook(freeze).remove)
            if config and before:  # of transformers
                config._attn_implementation = "sdpa"
                stack.callback(setattr, config, "_attn_implementation", before)
            yield project


class _Asked(TorchFunctionMode):
    """Keeps queries, keys and scale of F.scaled_dot_product_attention, and does not compute it."""

    def __init__(self) -> None:
        super().__init__()
        self.received: list[tuple[Tensor, Tensor, float | None]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._receive(*args, **(kwargs or {}))

    def _receive(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any) -> Any:
        self.received.append((query, key, options.get("scale")))
        return value.new_zeros(*query.shape[:-1], value.shape[-1])


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and not [*module.children()]


def _frozen(norm: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Callable, Tensor]:
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
        raise _Refused("a norm is not linear with a fixed scale")
    return lambda part: without_scale(part) * scale, bias


def _in_fp32(module: nn.Module) -> Callable:
    """Returns a module as a function, with its parameters in fp32. The module does not change."""
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    state = {name: t.float() for name, t in tensors.items() if t.is_floating_point()}
    return lambda *arguments, **options: functional_call(module, state, arguments, options)
