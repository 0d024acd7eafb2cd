"""Removes attention heads of a GPT and measures the loss (headlens/ablation.py).

Shapes: B windows, T positions, N targets, C emb_dim, V vocabulary, H heads, D head_dim.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from attention import MultiHeadAttention
from clearhead.tokens.windows import WindowDataset, evenly_spaced_windows
from headlens import ablate
from model import GPT

TOKENS = 64  # per window of a text
ROWS = 4096  # of the output layer at a time: two thirds of the CPU time of all rows at once


def ablate_heads(
    model: GPT,
    groups: Mapping[str, Sequence[tuple[int, int]]],
    dataset: WindowDataset,
    is_synthetic: bool,
    max_tokens: float = math.inf,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> dict | None:
    """Returns the result of `ablate` on 8 to 32 evenly spaced windows of a dataset; None if the
    forward passes without each head have more than max_tokens tokens. A head of layer l counts as
    (L - l) / L of a pass, as the layers before it are not computed again.

    A small model, with up to 30 million parameters, has 32 windows. Only the first TOKENS tokens of
    a window of text are used. The accuracy is measured on synthetic data. Restores the mode of the
    model, and changes neither gradients nor random state. In fp32, also within autocast.
    """
    limit = min(32, max(8, 10**9 // model.num_parameters()))
    batch = dataset.batch(evenly_spaced_windows(dataset, limit))
    device = model.token_emb.weight.device
    input_ids, target_ids = (
        (ids if is_synthetic else ids[:, :TOKENS]).to(device) for ids in batch
    )  # (B, T)
    passes = model.config.num_heads * (model.config.num_layers + 1) / 2
    if passes * input_ids.numel() > max_tokens:
        return None
    was_training = model.training
    model.eval()
    try:
        edited = EditedModel(model, input_ids, target_ids, is_synthetic)
        with torch.autocast(device.type, enabled=False):
            return ablate(edited, edited.windows, groups, report)
    finally:
        model.train(was_training)


class EditedModel:
    """A GPT in eval mode on fixed windows. A call is the function `run` of headlens/ablation.py.

    input_ids and target_ids (B, T); negative targets are ignored. accuracy: whether a call also
    returns which targets have the largest logit. The first call stores the input of each block, so
    that a later call starts at the first layer that changes.
    """

    def __init__(self, model: GPT, input_ids: Tensor, target_ids: Tensor, accuracy: bool = False):
        self.model = model
        self.input_ids = input_ids
        self.counted = target_ids >= 0  # (B, T)
        self.target_ids = target_ids[self.counted]  # (N,)
        self.windows = self.counted.nonzero()[:, 0]  # (N,): the window of each target
        self.accuracy = accuracy
        self.inputs: list[Tensor] = []  # of each block, (B, T, C)

    def __call__(
        self, edit: Callable[[int, Tensor], Tensor], first_layer: int
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the loss of each target (N,), and whether it has the largest logit (N,)."""
        model, stores = self.model, not self.inputs
        if stores:
            positions = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
            x = model.token_emb(self.input_ids) + model.pos_emb(positions)  # (B, T, C)
        else:
            x = self.inputs[first_layer]
        for layer, block in enumerate(model.blocks[first_layer:], start=first_layer):
            if stores:
                self.inputs.append(x.detach())
            attn = cast(MultiHeadAttention, block.attn)

            def kernel(queries, keys, values, _, layer=layer, kernel=attn.kernel):
                return edit(layer, kernel(queries, keys, values, 0.0))  # (B, H, T, D)

            x = block(x, kernel)
        x = model.final_norm(x[self.counted])  # (N, C)
        # In parts of the vocabulary, so that the logits stay in the cache of a CPU.
        weight = model.token_emb.weight  # (V, C)
        # Also with autocast, a sum of exponentials is in fp32.
        parts = [F.linear(x, rows).to(x.dtype).logsumexp(-1) for rows in weight.split(ROWS)]
        losses = torch.stack(parts).logsumexp(0) - (x * weight[self.target_ids]).sum(-1)
        if not self.accuracy:
            return losses, None
        return losses, model.logits(x).argmax(-1) == self.target_ids
