"""How well a model predicts a text: the rule of sliding windows, and the figures that follow.

    windows = ScoredWindows(tokens, Rule(max_length=1024, stride=512))
    figures = evaluate(model, windows, token_sizes, batch_size=8)

A window gives the model up to `max_length` tokens to read and each next token to predict; the next
window begins `stride` tokens later, the last one where it ends with the text. A token is scored
once, in the first window that predicts it: after max_length - stride + 1 to max_length tokens, or
after all that there are.

Shapes: B windows of a batch, T positions of the longest one, C emb_dim, N scored positions.
"""

import math
import sys
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from model import GPT
from tokens.stream import TokenStream
from tokens.windows import IGNORED


@dataclass(frozen=True)
class Rule:
    """Which tokens are scored, and with how much context."""

    max_length: int
    stride: int
    within_documents: bool = False


class ScoredWindows:
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
    model: GPT, windows: ScoredWindows, token_sizes: np.ndarray, batch_size: int
) -> dict[str, float | int | None]:
    """The figures of a model in eval mode: tokens, bytes, loss (nats per token), perplexity and
    bits_per_byte. Shows its progress where stderr is a terminal.

    token_sizes: the bytes of text of each token.
    """
    device = model.token_emb.weight.device
    num_tokens, num_bytes, nats = 0, 0, 0.0
    batches = track(
        range(0, len(windows), batch_size),
        "evaluating",
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    for first in batches:
        numbers = np.arange(first, min(first + batch_size, len(windows)))
        input_ids, target_ids = windows.batch(numbers)  # (B, T)
        scored = target_ids != IGNORED  # (B, T)
        targets = target_ids[scored]  # (N,), in the order of the text
        x = model.hidden_states(input_ids.to(device))[scored.to(device)]  # (N, C)
        nats += float(model.head_loss(x, model.token_emb.weight, targets.to(device))) * len(targets)
        num_tokens += len(targets)
        num_bytes += int(token_sizes[targets.numpy()].sum())
    loss = nats / num_tokens
    return {
        "tokens": num_tokens,
        "bytes": num_bytes,
        "loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else None,  # above the largest float
        "bits_per_byte": nats / math.log(2) / num_bytes if num_bytes else None,
    }
