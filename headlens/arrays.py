"""Attention weights that you have as arrays: from a cache, another library or another framework.

    show(weights, tokens)  # in a notebook
    write_page("attention.html", from_arrays(weights, tokens))

Shapes: L layers, H heads, T tokens.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .capturing import Captured, LayerAttention, Visit
from .prompts import Prompt, spaced, token_texts
from .proof import Proof
from .recording import record
from .snapshot_data import SnapshotData
from .tokens import byte_of

ROUNDING = 0.02  # of the sum of a row of bf16 weights
GIVEN = Proof("maps not verified: they were given as arrays", is_verified=False)


def from_arrays(
    weights: Any,
    tokens: Sequence[str],
    steps: Sequence[int] | None = None,
    name: str = "attention",
    has_sink: bool = False,
) -> list[SnapshotData]:
    """Returns the snapshots of attention weights on one text, one for each step.

    weights: (L, H, T, T), rows are queries, of numpy, torch or what numpy can convert; or (H, T, T)
    of one layer; or a tuple of the layers, as `attentions` of transformers. A batch dimension of
    size 1 may be in front of H. A list of these are the weights at several steps; a list of single
    layers are layers, unless there are steps. tokens: the text
    of each token; pieces of a tokenizer, such as "Ġbell" and "▁bell", are texts too. steps: their
    numbers, by default 0, 1, ... name: what the page calls the model. has_sink: whether rows may
    sum to less than 1, because the rest goes to a learned sink.

    Raises ValueError for scores, NaN, weights after dropout, attention to future tokens, and other
    shapes, and TypeError for tokens that are not texts.
    """
    if isinstance(tokens, str) or not all(isinstance(token, str) for token in tokens):
        raise TypeError("tokens: expected a list with the text of each token, ['The', ' bell']")
    texts = _texts(tokens)
    ids = {text: n for n, text in enumerate(dict.fromkeys(texts))}
    prompt = Prompt("1-text", "".join(spaced(texts)), [ids[text] for text in texts], texts)
    half = len(texts) // 2
    if half > 1 and texts[1 : half + 1] == texts[half + 1 :]:  # [BOS] + R + R
        prompt.period, prompt.num_symbols = half, len({*texts[1:]})
    many = [_tensor(of) for of in (weights if isinstance(weights, list) else [weights])]
    if steps is None and many[1:] and all(of.dim() == 3 or of.shape[:1] == (1,) for of in many):
        many = [_stacked(many, "layers")]
    steps = range(len(many)) if steps is None else steps
    if not many or [*steps] != sorted({*steps}) or len(steps) != len(many):
        raise ValueError(f"steps={[*steps]}: expected {len(many)} numbers in ascending order")
    found: list[SnapshotData] = []
    many = _stacked([_layers(of, len(texts), has_sink) for of in many], "steps")
    for step, layers in zip(steps, many, strict=True):

        def capture(_: Tensor, visit: Visit, layers: Tensor = layers) -> Captured:
            for n, of_layer in enumerate(layers):
                visit(n, LayerAttention(of_layer[None], number=n))
            return Captured(proof=GIVEN)

        before = found[-1].row if found else None
        found.append(record(capture, [prompt], int(step), run_name=name, before=before))
    return found


def _texts(tokens: Sequence[str]) -> list[str]:
    """Returns the text of each token. Pieces of byte-level BPE and of SentencePiece have signs for
    spaces: "Ġbell", "▁bell"."""
    if not any("Ġ" in token for token in tokens):
        return [token.replace("▁", " ") for token in tokens]
    known = byte_of()
    raw = [bytes(map(known.__getitem__, t)) if {*t} <= {*known} else t.encode() for t in tokens]
    return token_texts(range(len(raw)), raw.__getitem__)


def _layers(weights: Tensor, num_tokens: int, has_sink: bool) -> Tensor:
    """Returns the weights of one step, fp32 (L, H, T, T). Raises ValueError if they are none."""
    given = tuple(weights.shape)
    if weights.dim() == 3:
        weights = weights[None]
    if weights.dim() == 5 and weights.shape[1] == 1:
        weights = weights[:, 0]
    if weights.dim() != 4 or weights.shape[2:] != (num_tokens, num_tokens) or not weights.numel():
        expected = f"(layers, heads, {num_tokens}, {num_tokens}) for {num_tokens} tokens"
        raise ValueError(f"weights of shape {given}: expected {expected}")
    if (is_nan := weights.isnan().flatten(2).any(-1)).any():
        layer, head = is_nan.nonzero()[0].tolist()
        raise ValueError(f"weights: NaN in layer {layer}, head {head}")
    if (least := float(weights.min())) < 0:
        reason = "are these scores? expected weights, after the softmax"
        raise ValueError(f"weights from {least:.3g} to {float(weights.max()):.3g}: {reason}")
    lowest, highest = (float(sums) for sums in weights.sum(-1).aminmax())
    if highest > 1 + ROUNDING or (lowest < 1 - ROUNDING and not has_sink):
        advice = "after dropout? call model.eval() first; with a learned sink, give has_sink=True"
        if (weights.sum(-2) - 1).abs().max() <= ROUNDING:
            advice = "columns do; rows are queries: transpose the last two dimensions"
        raise ValueError(f"rows of weights sum to {lowest:.3g} to {highest:.3g}, not 1: {advice}")
    if weights.triu(1).max() > 1e-6:
        raise ValueError("weights attend to future tokens: the lens shows causal attention")
    return weights if has_sink else weights / weights.sum(-1, keepdim=True)  # bf16 rounds


def _tensor(weights: Any) -> Tensor:
    if isinstance(weights, tuple):
        return _stacked([_tensor(layer) for layer in weights], "layers")
    if isinstance(weights, Tensor):
        return weights.detach().float().cpu()
    if weights is None:
        raise ValueError("weights: None; transformers returns none with sdpa: use capture")
    try:
        return torch.from_numpy(np.array(weights, np.float32))
    except (TypeError, ValueError):
        kind = type(weights).__name__
        raise TypeError(f"weights: expected an array of numbers, not {kind}") from None


def _stacked(weights: list[Tensor], what: str) -> Tensor:
    """Returns the weights of layers or steps as one tensor."""
    shapes = [*dict.fromkeys(tuple(of.shape) for of in weights)]
    if len(shapes) != 1:
        raise ValueError(f"{what} of shapes {shapes}: expected {what} of one shape")
    return torch.stack(weights)
