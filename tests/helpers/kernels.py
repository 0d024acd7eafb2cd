"""A kernel with other scores than the causal ones."""

import torch

from attention import KERNELS, SCORES, causal_attn_scores

WIDTH = 4  # keys to which a query attends


def window_scores(queries, keys):
    attn_scores = causal_attn_scores(queries, keys)
    old = keys.shape[-2] - queries.shape[-2] - WIDTH
    far = torch.ones_like(attn_scores, dtype=torch.bool).tril(old)
    return attn_scores.masked_fill(far, float("-inf"))


def window(queries, keys, values, dropout_p=0.0):
    return window_scores(queries, keys).softmax(-1).to(values.dtype) @ values


def add_window(monkeypatch, declared=True):
    """Adds the kernel "window" for one test. declared: with its scores."""
    monkeypatch.setitem(KERNELS, "window", window)
    if declared:
        monkeypatch.setitem(SCORES, "window", window_scores)
