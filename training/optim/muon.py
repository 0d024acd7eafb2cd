"""Muon for the matrices of the blocks and AdamW for all other parameters, as one optimizer.

Muon makes the momentum of a matrix nearly orthogonal before it is added, so that all directions
move by the same amount, however small their gradients (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/). Scaled as in Liu et al. 2025 (arXiv:2502.16982), its
updates are as large as AdamW's, and one learning rate and weight decay serve both.

torch.optim.Muon computes the same; a test compares the two. Here matrices of one shape are updated
together, the ranks of FSDP divide them among themselves, and a step is clipped and skipped on the
device, as in fused AdamW, so that the host does not wait for it.

Shapes: N matrices of a batch, M of them on a rank, (rows, columns) each; R ranks.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic: as steep at zero as possible (Jordan)
EPSILON = 1e-7
LIKE_ADAMW = 0.2  # root mean square of AdamW's updates (Liu et al. 2025, section 2.2)
TOGETHER = 2**23  # elements of the matrices that a rank updates at once


class Muon(torch.optim.AdamW):
    """AdamW over groups of parameters, and Muon over one group of matrices.

    groups: AdamW's, with its settings in `adamw`. matrices: Muon's group, {"params": [...], "lr",
    "weight_decay", "momentum", "nesterov", "ns_steps"}; its parameters are 2-D. dtype: of the
    iteration's matrix products.

    found_inf and grad_scale, () or None, are what torch's GradScaler sets: to skip a step (1.) and
    to divide the gradients first. Fused AdamW reads them, and here Muon does too.
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
        for batch in _batches([p for p in matrices["params"] if p.grad is not None]):
            self._update(batch, matrices)
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
        skip = self.found_inf
        if skip is not None and skip.device.type == "cpu":  # the host can read it without waiting
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
        update = grads.lerp_(averaged, momentum) if group["nesterov"] else averaged
        update = _orthogonalized(update.to(self.dtype), like, group["ns_steps"])
        rate = lr * LIKE_ADAMW * math.sqrt(max(like.shape))
        after = (before * (1 - lr * group["weight_decay"])).sub_(update, alpha=rate)
        if skip is not None:
            # Selected, not multiplied by zero: NaN times zero is NaN.
            averaged = torch.where(skip > 0, average, averaged)
            after = torch.where(skip > 0, before, after)
        torch._foreach_copy_(averages, averaged.unbind())
        torch._foreach_copy_(weights, after.unbind())


def newton_schulz(matrices: Tensor, steps: int) -> Tensor:
    """U S V^T -> approximately U V^T for each matrix, (..., rows, columns).

    Each step maps every singular value s to a s + b s^3 + c s^5. Five steps bring all between 0.002
    and 1 to between 0.68 and 1.21; more steps would not bring them closer to one (Jordan et al.).
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]  # then the smaller of both products
    x = matrices.mT if is_tall else matrices
    # No singular value is above the Frobenius norm.
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPSILON)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def _batches(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of parameters of one shape, of at most TOGETHER elements; the same on all ranks."""
    of_shape: dict[tuple, list[Tensor]] = {}
    for parameter in parameters:
        of_shape.setdefault(tuple(parameter.shape), []).append(parameter)
    for same in of_shape.values():
        most = max(1, TOGETHER * _ranks(same[0]) // same[0].numel())
        for start in range(0, len(same), most):
            yield same[start : start + most]


# ----------------------------------------------------------------------- sharded matrices (FSDP)


def _is_sharded(tensor: Tensor) -> bool:
    """Whether this rank holds some of its rows only: whether it is a DTensor."""
    return hasattr(tensor, "to_local")


def _ranks(tensor: Tensor) -> int:
    return tensor.device_mesh.size() if _is_sharded(tensor) else 1


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of it."""
    return tensor.to_local() if _is_sharded(tensor) else tensor


def _orthogonalized(update: Tensor, like: Tensor, steps: int) -> Tensor:
    """newton_schulz of N matrices, of which each rank holds some rows, (N, rows here, columns).

    like: a parameter of their shape. Every rank receives M whole matrices and sends their rows
    back: two all-to-all exchanges instead of R times the computation.
    """
    if not _is_sharded(like):
        return newton_schulz(update, steps)
    from torch.distributed import all_to_all_single

    (number, mine, columns), ranks = update.shape, _ranks(like)
    each, part = -(-number // ranks), -(-like.shape[0] // ranks)  # M, rows on a rank

    def exchange(parts: Tensor) -> Tensor:  # the i-th part of rank j becomes the j-th of rank i
        received = torch.empty_like(parts)
        all_to_all_single(received, parts, group=like.device_mesh.get_group())
        return received

    # Padded with zeros to equal shards; the first ranks' are full, so rows stay in order.
    padded = F.pad(update, (0, 0, 0, part - mine, 0, each * ranks - number))
    received = exchange(padded.view(ranks, each, part, columns))  # (R, M, part, columns)
    whole = received.transpose(0, 1).reshape(each, ranks * part, columns)[:, : like.shape[0]]
    done = F.pad(newton_schulz(whole, steps), (0, 0, 0, ranks * part - like.shape[0]))
    parts = done.reshape(each, ranks, part, columns).transpose(0, 1).contiguous()
    return exchange(parts).view(each * ranks, part, columns)[:number, :mine]
