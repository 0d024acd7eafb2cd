"""Sizes of the pieces in which cross_entropy.py computes the loss; the memory estimate, which does
without torch, reads them too."""

LOGITS_AT_ONCE = 2**28  # enough to keep a GPU busy; half a gigabyte in bf16
CACHED = 2**19  # logits that stay in a CPU's cache between two matrix products
