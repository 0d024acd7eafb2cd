"""Loss and perplexity of a model on a text, computed with a sliding window.

    windows = ScoredWindows(tokens, max_length=1024, stride=512)
    results = evaluate(model, windows, token_lengths, batch_size=8)

In each window the model reads up to `max_length` tokens and predicts the next token at each
position. Each window starts `stride` tokens after the previous one; the last window starts earlier
if necessary, so that it ends at the end of the text. Windows overlap, but each token is scored only
in the first window that predicts it. Its context then has max_length - stride + 1 to max_length
tokens; near the start of the text, the context is all previous tokens.

Shapes: B windows of a batch, T positions of the longest window, C emb_dim, N scored positions.
"""

import math
from collections.abc import Callable

import numpy as np
import torch

from clearhead.tokens.token_stream import TokenStream
from clearhead.tokens.windows import IGNORED
from model import GPT


class ScoredWindows:
    """All windows over a stream of tokens, in order, with the positions that each one scores.

    within_documents: each document is evaluated as a separate text. It then stores a few numbers
    for each document, otherwise nothing.
    """

    def __init__(
        self, tokens: TokenStream, max_length: int, stride: int, within_documents: bool = False
    ):
        self.tokens, self.max_length, self.stride = tokens, max_length, stride
        starts = np.zeros(1, np.int64)
        if within_documents and len(tokens):
            starts = tokens.document_starts()
        targets = np.diff(starts, append=len(tokens)) - 1  # each document's tokens except the first
        self.starts, self.targets = starts[targets > 0], targets[targets > 0]
        more = -(-np.maximum(0, self.targets - self.max_length) // self.stride)
        self.ends = np.cumsum(1 + more)  # number of windows up to the end of each document
        self.num_targets = int(self.targets.sum())

    def __len__(self) -> int:
        return int(self.ends[-1]) if self.num_targets else 0

    def batch(self, windows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Window numbers (B,) -> input_ids (B, T), target_ids (B, T), int64.

        Targets that are not scored are IGNORED. Windows shorter than the longest one of the batch
        are padded at the end; causal attention keeps scored positions from attending to padding.
        """
        document = np.searchsorted(self.ends, windows, side="right")
        number = windows - np.where(document > 0, self.ends[document - 1], 0)  # within the document
        targets = self.targets[document]
        # Positions in the document: the window is start..stop, and it scores first..stop.
        stop = np.minimum(number * self.stride + self.max_length, targets)
        first = np.where(number > 0, (number - 1) * self.stride + self.max_length, 0)
        start = np.maximum(0, stop - self.max_length)
        size = (stop - start).max()  # T
        ids = self.tokens.gather(self.starts[document] + start, int(size) + 1).astype(np.int64)
        position = start[:, None] + np.arange(size)  # (B, T), in the document
        is_scored = (position >= first[:, None]) & (position < stop[:, None])
        target_ids = np.where(is_scored, ids[:, 1:], IGNORED)
        input_ids = np.where(position < stop[:, None], ids[:, :-1], self.tokens.end_of_text)
        return torch.from_numpy(input_ids), torch.from_numpy(target_ids)


def evaluate(
    model: GPT,
    windows: ScoredWindows,
    token_lengths: np.ndarray,
    batch_size: int,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, float | int | None]:
    """Evaluates a model; the caller sets eval mode.

    Returns tokens, bytes, and the values of text_metrics. token_lengths: the bytes of text of each
    token id. report: called after each batch with the numbers of finished and of all windows.
    """
    device = model.token_emb.weight.device
    num_tokens, num_bytes, nats = 0, 0, 0.0
    for first in range(0, len(windows), batch_size):
        numbers = np.arange(first, min(first + batch_size, len(windows)))
        input_ids, target_ids = windows.batch(numbers)  # (B, T)
        scored = target_ids != IGNORED  # (B, T)
        targets = target_ids[scored]  # (N,), in text order
        x = model.hidden_states(input_ids.to(device))[scored.to(device)]  # (N, C)
        nats += float(model.head_loss(x, model.token_emb.weight, targets.to(device))) * len(targets)
        num_tokens += len(targets)
        num_bytes += int(token_lengths[targets.numpy()].sum())
        report(int(numbers[-1]) + 1, len(windows))
    found = {"tokens": num_tokens, "bytes": num_bytes}
    return found | text_metrics(nats / num_tokens, num_bytes / num_tokens)


def text_metrics(loss: float, bytes_per_token: float) -> dict[str, float | None]:
    """Returns loss, perplexity and bits per byte (None if the tokens have no bytes).

    loss: in nats per token. The perplexity is at most exp(700), because exp(710) is not a float.
    """
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700)),
        "bits_per_byte": loss / math.log(2) / bytes_per_token if bytes_per_token else None,
    }
