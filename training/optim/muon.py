"""Muon for the matrices of the blocks, AdamW for all else, as one optimizer.

Muon makes the momentum of a matrix nearly orthogonal before it is added: all directions move
alike, however small their gradients are (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/). Scaled as Liu et al. 2025 do (arXiv:2502.16982), its
updates are as large as AdamW's, so that one learning rate and weight decay serve both.

torch.optim.Muon computes the same; a test compares the two. Here matrices of
a shape go together, the ranks of FSDP share them out, and a step is clipped and left out on the
device as the fused AdamW does it, so that the host need not wait to see.

Shapes: N matrices of a batch, M of them on a rank, (rows, columns) each; R ranks.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic: as steep at zero as it may be (Jordan)
EPSILON = 1e-7
LIKE_ADAMW = 0.2  # the root mean square of AdamW's updates (Liu et al. 2025, section 2.2)
TOGETHER = 2**23  # numbers of matrices that are updated at once, on a rank


class Muon(torch.optim.AdamW):
    """AdamW over groups of parameters, and Muon over one of matrices.

    groups: AdamW's, with its settings in `adamw`. matrices: Muon's group, {"params": [...], "lr",
    "weight_decay", "momentum", "nesterov", "ns_steps"}; its parameters are 2-D. dtype: what the
    iteration multiplies in.

    found_inf and grad_scale, () or None, are torch's own means of leaving a step out (1.) and of
    dividing the gradients first. Only fused AdamW knows them; then they hold for both halves.
    """

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    def __init__(self, groups: list[dict], matrices: dict, dtype: torch.dtype, **adamw):
        super().__init__([*groups, matrices], **adamw)
        self.dtype = dtype
        for parameter in self.param_groups[-1]["params"]:
            if parameter.dim() != 2:
                raise ValueError(f"Muon takes matrices, not shape {tuple(parameter.shape)}")

    @torch.no_grad()
    def step(self, closure=None):
        *others, matrices = groups = self.param_groups
        self.param_groups = others
        try:
            loss = super().step(closure)
        finally:
            self.param_groups = groups
        for some in _batches([p for p in matrices["params"] if p.grad is not None]):
            self._update(some, matrices)
        return loss

    def _update(self, parameters: list[Tensor], group: dict) -> None:
        """Muon's step for N matrices of one shape.

        With momentum m, learning rate lr and weight decay w, for gradient G, average B, matrix W:
            B <- m B + (1 - m) G
            U =  m B + (1 - m) G with Nesterov's momentum, else B
            W <- (1 - lr w) W - lr 0.2 sqrt(max(rows, columns)) newton_schulz(U)
        """
        for p in parameters:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        leave_out = self.found_inf
        if leave_out is not None and leave_out.device.type == "cpu":  # which knows already
            if leave_out:
                return
            leave_out = None
        weights = [_here(p) for p in parameters]
        averages = [_here(self.state[p]["momentum_buffer"]) for p in parameters]
        lr, momentum, like = group["lr"], group["momentum"], parameters[0]

        grads = torch.stack([_here(p.grad) for p in parameters])  # (N, rows, columns)
        if self.grad_scale is not None:
            grads /= self.grad_scale
        before, average = torch.stack(weights), torch.stack(averages)
        averaged = average.lerp(grads, 1 - momentum)
        update = grads.lerp_(averaged, momentum) if group["nesterov"] else averaged
        update = _orthogonalized(update.to(self.dtype), like, group["ns_steps"])
        rate = lr * LIKE_ADAMW * math.sqrt(max(like.shape))
        after = (before * (1 - lr * group["weight_decay"])).sub_(update, alpha=rate)
        if leave_out is not None:
            # Chosen, not multiplied by zero: what is no number would stay none.
            averaged = torch.where(leave_out > 0, average, averaged)
            after = torch.where(leave_out > 0, before, after)
        torch._foreach_copy_(averages, averaged.unbind())
        torch._foreach_copy_(weights, after.unbind())


def newton_schulz(matrices: Tensor, steps: int) -> Tensor:
    """U S V^T -> about U V^T for each of some matrices, (..., rows, columns).

    Each step maps every singular value s to a s + b s^3 + c s^5. Five of them bring all from 0.002
    to 1 to 0.68 to 1.21; more would not come nearer to one, and need not (Jordan et al.).
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]  # the smaller of both products, then
    x = matrices.mT if is_tall else matrices
    # No singular value is above the Frobenius norm.
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPSILON)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def _batches(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Those of one shape together, as many as fit; the same on all ranks."""
    of_shape: dict[tuple, list[Tensor]] = {}
    for parameter in parameters:
        of_shape.setdefault(tuple(parameter.shape), []).append(parameter)
    for same in of_shape.values():
        most = max(1, TOGETHER * _ranks(same[0]) // same[0].numel())
        for start in range(0, len(same), most):
            yield same[start : start + most]


# ------------------------------------------------------------------- matrices in shares (FSDP)


def _is_shared_out(tensor: Tensor) -> bool:
    """Whether a rank has some of its rows only: a DTensor, which nobody else need know of."""
    return hasattr(tensor, "to_local")


def _ranks(tensor: Tensor) -> int:
    return tensor.device_mesh.size() if _is_shared_out(tensor) else 1


def _here(tensor: Tensor) -> Tensor:
    """What this rank has of it."""
    return tensor.to_local() if _is_shared_out(tensor) else tensor


def _orthogonalized(update: Tensor, like: Tensor, steps: int) -> Tensor:
    """newton_schulz of N matrices, of which each rank has its rows, (N, rows here, columns).

    like: a parameter of their shape. Every rank gets M of the matrices whole, and gives all their
    rows back: two exchanges, each of 1 / R of the numbers, instead of R times the work.
    """
    if not _is_shared_out(like):
        return newton_schulz(update, steps)
    from torch.distributed import all_to_all_single

    (number, mine, columns), ranks = update.shape, _ranks(like)
    each, part = -(-number // ranks), -(-like.shape[0] // ranks)  # M, rows on a rank

    def exchange(parts: Tensor) -> Tensor:  # what is the i-th of rank j, rank i has as its j-th
        received = torch.empty_like(parts)
        all_to_all_single(received, parts, group=like.device_mesh.get_group())
        return received

    # Zeros up to equal shares; the first ranks have theirs full, so that rows stay in order.
    padded = F.pad(update, (0, 0, 0, part - mine, 0, each * ranks - number))
    received = exchange(padded.view(ranks, each, part, columns))  # (R, M, part, columns)
    whole = received.transpose(0, 1).reshape(each, ranks * part, columns)[:, : like.shape[0]]
    done = F.pad(newton_schulz(whole, steps), (0, 0, 0, ranks * part - like.shape[0]))
    parts = done.reshape(each, ranks, part, columns).transpose(0, 1).contiguous()
    return exchange(parts).view(each * ranks, part, columns)[:number, :mine]
