"""Cross-entropy and its gradient in one Triton kernel, for cross_entropy.py on a GPU.

Without it, softmax and gradient of a chunk of logits read and write each value up to eight times,
compiled three times. The kernel reads a row twice and writes it once. Like log_softmax in fp32, it
subtracts the maximum of the row.

Shapes: n positions, V vocabulary, W columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS_AT_ONCE, WARPS = 8192, 16  # the fastest of 18 combinations on an H100


@triton.jit
def _cross_entropy(
    logits,  # (n, W), contiguous
    target_ids,  # (n,)
    losses,  # (n,)
    vocabulary,  # V
    num_columns: tl.constexpr,  # W
    WANTS_GRAD: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # n W may be above 2^31
    logits += row * num_columns
    target = tl.load(target_ids + row)
    counts = target >= 0
    of_target = tl.load(logits + tl.maximum(target, 0)).to(tl.float32)
    # Over the vocabulary: the maximum, and the sum of exp(logit - maximum) (Milakov and Gimelshein
    # 2018, Online normalizer calculation for softmax). A mask of num_columns, a multiple of 64,
    # allows loads of 16 bytes.
    maximum = tl.full([], -float("inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for start in range(0, num_columns, AT_ONCE):
        columns = start + tl.arange(0, AT_ONCE)
        x = tl.load(logits + columns, mask=columns < num_columns, other=-float("inf"))
        x = tl.where(columns < vocabulary, x.to(tl.float32), -float("inf"))
        larger = tl.maximum(maximum, tl.max(x))
        total = total * tl.exp(maximum - larger) + tl.sum(tl.exp(x - larger))
        maximum = larger
    loss = maximum + tl.log(total) - of_target
    tl.store(losses + row, tl.where(counts, loss, 0.0))
    if WANTS_GRAD:
        scale = tl.where(counts, 1.0 / total, 0.0)
        for start in range(0, num_columns, AT_ONCE):
            columns = start + tl.arange(0, AT_ONCE)
            x = tl.load(logits + columns, mask=columns < num_columns, other=-float("inf"))
            x = tl.where(columns < vocabulary, x.to(tl.float32), -float("inf"))
            grad = tl.exp(x - maximum) * scale - ((columns == target) & counts)
            tl.store(logits + columns, grad, mask=columns < num_columns)


def cross_entropy(logits: Tensor, target_ids: Tensor, vocabulary: int, wants_grad: bool) -> Tensor:
    """Returns the cross-entropy per position, (n,) in fp32, 0 for ignored targets.

    logits (n, W): columns after the vocabulary are ignored. target_ids (n,). wants_grad: also
    overwrite the logits by their gradient, softmax - onehot, 0 for ignored targets.
    """
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    options = {"WANTS_GRAD": wants_grad, "AT_ONCE": COLUMNS_AT_ONCE, "num_warps": WARPS}
    _cross_entropy[(len(logits),)](
        logits, target_ids, losses, vocabulary, logits.shape[1], **options
    )
    return losses
