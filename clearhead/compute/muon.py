"""Muon for the matrices of the blocks and AdamW for all other parameters, as one optimizer.

Muon orthogonalizes the momentum of a matrix before it updates the weights, so that all directions
change by the same amount, even those with small gradients (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/). With the scale of Liu et al. 2025 (arXiv:2502.16982),
updates have the size of AdamW's, and both optimizers use the same learning rate and weight decay.

torch.optim.Muon computes the same. This version updates matrices of one shape together, and
distributes the orthogonalization over the ranks of DDP and FSDP. It clips gradients and skips steps
on the device, as fused AdamW does, so that the host does not wait.

Shapes: N matrices in a batch, M of them on a rank, (rows, columns) each; R ranks.
"""

import inspect
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic; maximal slope at zero (Jordan)
STEPS = 5  # of Newton-Schulz
EPSILON = 1e-7
ADAMW_RMS = 0.2  # root mean square of AdamW's updates (Liu et al. 2025, section 2.2)
MAX_ELEMENTS = 2**23  # of the matrices that a rank updates at once
MAX_SHARED = 8  # ranks of DDP that share a batch: 24 bytes per element are 1.6 GB


class AdamW(torch.optim.AdamW):
    """torch's AdamW, but it does not import the compiler (torch._dynamo), which takes a second.

    torch decorates these methods so that torch.compile skips them, and the decorators import the
    compiler. This class has the undecorated methods.
    """

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))


class Muon(AdamW):
    """AdamW for some groups of parameters and Muon for groups of matrices.

    groups: the groups of AdamW; `adamw`: its settings. matrices: the groups of Muon, each
    {"params": [...], "lr", "weight_decay", "momentum"}; their parameters are 2-D. dtype:
    of the matrix products in newton_schulz. ranks: R, of the default process group; more than 1
    with DDP or FSDP.

    found_inf and grad_scale, () or None, mean the same as in torch's GradScaler. found_inf=1 skips
    the step; gradients are first divided by grad_scale. Fused AdamW and Muon read both.
    """

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    def __init__(
        self,
        groups: list[dict],
        matrices: list[dict],
        dtype: torch.dtype,
        ranks: int = 1,
        **adamw: Any,
    ):
        super().__init__([*groups, *matrices], **adamw)
        self.dtype, self.ranks = dtype, ranks
        for parameter in (p for group in matrices for p in group["params"]):
            if parameter.dim() != 2:
                raise ValueError(f"Muon takes matrices, not shape {tuple(parameter.shape)}")

    @torch.no_grad()
    def step(self, closure=None):
        groups = self.param_groups
        self.param_groups = [group for group in groups if "momentum" not in group]
        try:
            loss = super().step(closure)
        finally:
            self.param_groups = groups
        for group in [group for group in groups if "momentum" in group]:
            trained = [p for p in group["params"] if p.grad is not None]
            for batch in _batches(trained, self.ranks):
                self._update(batch, group)
        return loss

    def _update(self, parameters: list[Tensor], group: dict) -> None:
        """Muon's step for N matrices of one shape.

        With momentum m, learning rate lr, weight decay w, gradient G, momentum buffer B, matrix W:
            B <- m B + (1 - m) G
            U =  m B + (1 - m) G                                          (Nesterov momentum)
            W <- (1 - lr w) W - lr 0.2 sqrt(max(rows, columns)) newton_schulz(U)
        """
        for p in parameters:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        skip = self.found_inf
        if skip is not None and skip.device.type == "cpu":  # reading it does not wait for a device
            if skip:
                return
            skip = None
        weights = [_local(p) for p in parameters]
        averages = [_local(self.state[p]["momentum_buffer"]) for p in parameters]
        lr, momentum, like = group["lr"], group["momentum"], parameters[0]

        grads = torch.stack([_local(p.grad) for p in parameters])  # (N, rows, columns)
        if self.grad_scale is not None:
            grads /= self.grad_scale
        before, average = torch.stack(weights), torch.stack(averages)
        averaged = average.lerp(grads, 1 - momentum)
        update = grads.lerp_(averaged, momentum).to(self.dtype)
        update = _orthogonalized(update, like, self.ranks)
        rate = lr * ADAMW_RMS * math.sqrt(max(like.shape))
        after = (before * (1 - lr * group["weight_decay"])).sub_(update, alpha=rate)
        if skip is not None:
            # torch.where, not a product with zero: NaN times zero is NaN.
            averaged = torch.where(skip > 0, average, averaged)
            after = torch.where(skip > 0, before, after)
        torch._foreach_copy_(averages, averaged.unbind())
        torch._foreach_copy_(weights, after.unbind())


def newton_schulz(matrices: Tensor) -> Tensor:
    """Maps each of the matrices U S V^T, (N, rows, columns), to approximately U V^T.

    Each step maps every singular value s to a s + b s^3 + c s^5. STEPS steps map values from 0.002
    to 1 into the interval 0.68 to 1.21; more steps do not move them closer to 1 (Jordan et al.).
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]  # then x x^T is smaller for the transpose
    x = matrices.mT if is_tall else matrices
    # The Frobenius norm is at least as large as the largest singular value.
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPSILON)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def _batches(parameters: list[Tensor], ranks: int) -> Iterator[list[Tensor]]:
    """Yields parameters of one shape, equal lists on all ranks; at most MAX_ELEMENTS per rank, with
    DDP times the number of ranks that share them."""
    of_shape: dict[tuple, list[Tensor]] = {}
    for parameter in parameters:
        of_shape.setdefault(tuple(parameter.shape), []).append(parameter)
    for same in of_shape.values():
        # With DDP, each rank holds all matrices of the batch.
        parts = ranks if _is_sharded(same[0]) else min(ranks, MAX_SHARED)
        most = max(1, MAX_ELEMENTS * parts // same[0].numel())
        for start in range(0, len(same), most):
            yield same[start : start + most]


# -------------------------------------------------------------------------------- several ranks


def _is_sharded(tensor: Tensor) -> bool:
    """Returns whether it is a DTensor of FSDP, of which this rank holds some rows."""
    return hasattr(tensor, "to_local")


def _local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of the tensor."""
    return tensor.to_local() if _is_sharded(tensor) else tensor


def _orthogonalized(update: Tensor, like: Tensor, ranks: int) -> Tensor:
    """Computes newton_schulz of N matrices, M of them on each of R ranks.

    like: one of the N parameters. With DDP, every rank has N complete matrices and receives the
    results of the others, so parameters stay equal on all ranks. With FSDP, it holds some rows,
    (N, local rows, columns): it receives M complete matrices and sends their rows back.
    """
    if ranks == 1:
        return newton_schulz(update)
    from torch.distributed import all_gather, all_to_all_single, get_rank

    number, mine, columns = update.shape
    each, part = -(-number // ranks), -(-like.shape[0] // ranks)  # M, rows per rank
    # Zero padding makes shards equally large. Only the last ranks have it, so rows stay in order.
    if not _is_sharded(like):
        padded = F.pad(update, (0, 0, 0, 0, 0, each * ranks - number))
        done = newton_schulz(padded[get_rank() * each :][:each])
        all_gather([*padded.split(each)], done.contiguous())
        return padded[:number]

    def exchange(parts: Tensor) -> Tensor:  # the i-th part of rank j becomes the j-th of rank i
        received = torch.empty_like(parts)
        all_to_all_single(received, parts)
        return received

    padded = F.pad(update, (0, 0, 0, part - mine, 0, each * ranks - number))
    received = exchange(padded.view(ranks, each, part, columns))  # (R, M, part, columns)
    whole = received.transpose(0, 1).reshape(each, ranks * part, columns)[:, : like.shape[0]]
    done = F.pad(newton_schulz(whole), (0, 0, 0, ranks * part - like.shape[0]))
    parts = done.reshape(each, ranks, part, columns).transpose(0, 1).contiguous()
    return exchange(parts).view(each * ranks, part, columns)[:number, :mine]
