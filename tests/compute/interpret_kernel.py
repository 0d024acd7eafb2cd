"""Compares compute/cross_entropy_kernel.py with PyTorch in fp64; run with TRITON_INTERPRET=1.

47 columns after the vocabulary, a third of the targets ignored, and large logits.
"""

import torch
from torch.nn.functional import cross_entropy

from clearhead.compute import cross_entropy_kernel as kernel

kernel.COLUMNS_AT_ONCE = 32
N, V, W = 9, 81, 128
random = torch.Generator().manual_seed(0)
targets = torch.randint(V, (N,), generator=random)
targets[::3] = -100
for dtype in (torch.float32, torch.bfloat16):
    logits = (30 * torch.randn(N, W, generator=random)).to(dtype)
    exact = logits[:, :V].double().requires_grad_()
    expected = cross_entropy(exact, targets, reduction="none")
    expected.sum().backward()
    found = kernel.cross_entropy(logits.clone(), targets, V, wants_grad=False)
    torch.testing.assert_close(found.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    assert torch.equal(kernel.cross_entropy(logits, targets, V, wants_grad=True), found)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(logits[:, :V].double(), exact.grad, rtol=eps, atol=2 * eps)
    assert (logits[:, V:] == 0).all()
