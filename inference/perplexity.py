"""How well a model predicts a text: the rule of sliding windows, and the figures that follow.

    windows = Windows(tokens, Rule(max_length=1024, stride=512))
    figures = evaluate(model, windows, token_sizes, batch_size=8)

A window gives the model up to `max_length` tokens to read and each next token to predict; the next
window begins `stride` tokens later, the last one where it ends with the text. A token is scored
once, in the first window that predicts it: after max_length - stride + 1 to max_length tokens, or
after all that there are.

Shapes: B windows of a batch, T positions of the longest one, C emb_dim, N scored positions.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from model import GPT
from tokens.stream import TokenStream
from tokens.synthetic import IGNORED


@dataclass(frozen=True)
class Rule:
    """Which tokens are scored, and with how much context."""

    max_length: int
    stride: int
    within_documents: bool = False

    def __str__(self) -> str:
        least = self.max_length - self.stride + 1
        context = f"{least:,} to {self.max_length:,} tokens" if self.stride > 1 else f"{least:,}"
        of = "document" if self.within_documents else "text"
        return (
            f"windows of {self.max_length:,} tokens, {self.stride:,} apart; each token of a {of} "
            f"is scored once, after {context}, or after all that the {of} has before it"
        )


class Windows:
    """The windows of a rule over a stream of tokens, in order, and what each of them scores.

    Needs memory for a few numbers per document with within_documents, and for nothing otherwise.
    """

    def __init__(self, tokens: TokenStream, rule: Rule):
        self.tokens, self.rule = tokens, rule
        starts = np.zeros(1, np.int64)
        if rule.within_documents and len(tokens):
            starts = tokens.document_starts()
        targets = np.diff(starts, append=len(tokens)) - 1  # of each document: all but its first
        self.starts, self.targets = starts[targets > 0], targets[targets > 0]
        more = -(-np.maximum(0, self.targets - rule.max_length) // rule.stride)
        self.ends = np.cumsum(1 + more)  # of each document, the number of windows up to its end
        self.num_targets = int(self.targets.sum())

    def __len__(self) -> int:
        return int(self.ends[-1]) if self.num_targets else 0

    def batch(self, windows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Windows (B,) -> input_ids (B, T), target_ids (B, T), int64; IGNORED where not scored.

        A window shorter than the longest of the batch is padded at its end, which no scored
        position attends to.
        """
        rule = self.rule
        document = np.searchsorted(self.ends, windows, side="right")
        number = windows - np.where(document > 0, self.ends[document - 1], 0)  # within the document
        targets = self.targets[document]
        stop = np.minimum(number * rule.stride + rule.max_length, targets)  # scored up to here
        scored = np.where(number > 0, (number - 1) * rule.stride + rule.max_length, 0)  # before
        begin = np.maximum(0, stop - rule.max_length)
        size = (stop - begin).max()  # T
        ids = self.tokens.gather(self.starts[document] + begin, int(size) + 1).astype(np.int64)
        place = begin[:, None] + np.arange(size)  # (B, T), of a target within the document
        counts = (place >= scored[:, None]) & (place < stop[:, None])
        target_ids = np.where(counts, ids[:, 1:], IGNORED)
        input_ids = np.where(place < stop[:, None], ids[:, :-1], self.tokens.end_of_text)
        return torch.from_numpy(input_ids), torch.from_numpy(target_ids)


def evaluate(
    model: GPT,
    windows: Windows,
    token_sizes: np.ndarray,
    batch_size: int,
    show_progress: Callable[[int, float], None] = lambda num_tokens, nats: None,
) -> dict[str, float | int | str | None]:
    """The figures of a model in eval mode: tokens, bytes, loss (nats per token), perplexity,
    bits_per_byte, and the SHA-256 of the scored tokens (uint16, little-endian).

    token_sizes: the bytes of text of each token. show_progress(tokens, nats) is called after each
    batch with the sums so far.
    """
    device = model.token_emb.weight.device
    counts = np.zeros(len(token_sizes), np.int64)  # how often each token was scored
    digest, nats = hashlib.sha256(), 0.0
    for first in range(0, len(windows), batch_size):
        numbers = np.arange(first, min(first + batch_size, len(windows)))
        input_ids, target_ids = windows.batch(numbers)  # (B, T)
        scored = target_ids != IGNORED  # (B, T)
        targets = target_ids[scored]  # (N,), in the order of the text
        counts += np.bincount(targets.numpy(), minlength=len(counts))
        digest.update(targets.numpy().astype("<u2").tobytes())
        x = model.hidden_states(input_ids.to(device))[scored.to(device)]  # (N, C)
        loss = model.head_loss(x, model.token_emb.weight, targets.to(device))
        nats += float(loss) * len(targets)
        show_progress(int(counts.sum()), nats)
    num_tokens, num_bytes = int(counts.sum()), int(counts @ token_sizes)
    return {
        "tokens": num_tokens,
        "bytes": num_bytes,
        "loss": nats / num_tokens,
        "perplexity": perplexity(nats / num_tokens),
        "bits_per_byte": nats / math.log(2) / num_bytes if num_bytes else None,
        "sha256": digest.hexdigest(),
    }


def perplexity(loss: float) -> float | None:
    """e^loss; None where that exceeds the largest float."""
    return math.exp(loss) if loss < 700 else None
