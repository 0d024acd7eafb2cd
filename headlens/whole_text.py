"""Heads on whole text: statistics over windows of a text, and the cells where a head moves most.

What a head does on a few prompts is not always what it does on a text. So heads are measured on
windows of the user's own text (`TextRecorder`), with standard errors.

A cell is a key token k of a query token q in a window. A head *moves* the residual stream at q by
A[q, k] |W_O v[k]|, attention weight times the norm of the value vector after the output projection.
The first token and the query token itself do not count here: many heads rest their attention there.
A head *connects* q with the k that it moves most, if its weight is at least LINKED.

Shapes: N windows, T tokens, H heads, L layers, M = len(statistics.MEASURED).
"""

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .capturing import Captured, LayerAttention, Visit
from .config import refuse_path
from .connected import Words
from .prompts import token_texts
from .snapshot_data import CONTEXTS, Contexts, stack_layers, to_codes
from .statistics import HeadStatistics, ratio_of_sums, uniform_values
from .tokens import LensTokenizer

MAX_TOKENS = 256  # of a window
MAX_WINDOWS = 32
CELLS_AT_ONCE = 2**19  # of one head: 8 windows of 256 tokens
LINKED = 0.2  # attention weight
STRETCH = 16  # query tokens, of which the one that the head moves most can be shown


def windows_of(text: str, tokenizer: LensTokenizer, context_length: int) -> Tensor:
    """Returns evenly spaced windows of a text, (N, T), each with the prefix of the tokenizer.
    Raises ValueError for a text of less than 16 tokens, and for the path of a file."""
    refuse_path("text", text)
    token_ids, prefix = tokenizer.encode(text), list(tokenizer.prefix)
    length = min(context_length - len(prefix), MAX_TOKENS, len(token_ids) // 2)
    if length < 8:
        reason = f"heads need at least 16 tokens, and this text has {len(token_ids)}"
        raise ValueError(f"text={text[:40]!r}: {reason}")
    count = min(MAX_WINDOWS, len(token_ids) // length)
    starts = np.linspace(0, len(token_ids) - length, count).astype(int)
    return torch.tensor([[*prefix, *token_ids[start : start + length]] for start in starts])


class Text:
    """Windows of a text, on which heads are measured.

    token_ids: (N, T), T at least 3. token_bytes(id): the bytes of a token. name: what pages call
    the text.
    """

    def __init__(
        self, token_ids: Tensor, token_bytes: Callable[[int], bytes], name: str = "the text"
    ):
        self.token_ids, self.name = token_ids, name
        ids = np.unique(token_ids).tolist()
        known = dict(zip(ids, token_texts(ids, token_bytes), strict=True))
        self.tokens = [[known[token] for token in window] for window in token_ids.tolist()]
        # Five query tokens at random: the same at all steps and for all heads.
        random = np.random.default_rng(0)
        shape = len(token_ids), token_ids.shape[1] - 2
        drawn = random.choice(np.prod(shape), min(CONTEXTS, np.prod(shape)), replace=False)
        windows, queries = np.unravel_index(np.sort(drawn), shape)
        self.random_queries = list(zip(windows.tolist(), (queries + 2).tolist(), strict=True))

    def batches(self) -> list[HeadStatistics]:
        """Returns the windows, a few at a time."""
        count, length = self.token_ids.shape
        size = max(1, CELLS_AT_ONCE // length**2)
        parts = [slice(first, first + size) for first in range(0, count, size)]
        return [HeadStatistics(self.token_ids[p], self.tokens[p]) for p in parts]

    @functools.cached_property
    def words(self) -> Words:
        return Words(self.tokens)


class TextRecorder:
    """Measures all heads on a text. After `run`:

    means, errors: (M, L, H). uniform: the statistics of uniform attention. contexts: the cells
    where each head moves most.
    """

    def __init__(self, text: Text):
        self.text = text

    def run(self, capture: Callable[..., Captured]) -> "TextRecorder":
        """Runs the model on all windows."""
        batches = []
        for windows in self.text.batches():
            layers: list[tuple[Tensor, ...]] = []
            capture(windows.token_ids, _visitor(windows, layers))
            kinds = zip(*layers, strict=True)
            found = [stack_layers(of_layers, dim=2).cpu().numpy() for of_layers in kinds]
            batches.append((*windows.expected(), *found))
        found = (np.concatenate(kind) for kind in zip(*batches, strict=True))
        counts, uniform, sums, *self.found = found
        self.uniform = uniform_values(uniform, counts)
        self.means, self.errors = ratio_of_sums(sums, counts)
        return self

    @functools.cached_property
    def contexts(self) -> Contexts:
        """The cells where each head moves most, those of some query tokens at random, and the pairs
        of words that each head connects most often."""
        # See _visitor: (N, H, L, S, 4), and (N, H, L, T) each.
        moves, keys, weights, linked = self.found
        windows, num_heads, num_layers, stretches, _ = moves.shape
        moves = moves.transpose(2, 1, 0, 3, 4).reshape(num_layers, num_heads, -1, 4)
        window = np.repeat(np.arange(windows), stretches)
        cells = np.full((num_layers, num_heads, 2, CONTEXTS, 3), -1, np.int16)
        codes = np.zeros((num_layers, num_heads, 2, CONTEXTS), np.uint8)
        for layer, head in np.ndindex(num_layers, num_heads):
            of_head = moves[layer, head]
            for n, at in enumerate(self._most_different(of_head, window)):
                cells[layer, head, 0, n] = window[at], *of_head[at, 1:3]
                codes[layer, head, 0, n] = round(255 * np.sqrt(of_head[at, 3]))
        for n, (at, query) in enumerate(self.text.random_queries):
            cells[:, :, 1, n, :2] = at, query
            cells[:, :, 1, n, 2] = keys[at, :, :, query].T
            codes[:, :, 1, n] = weights[at, :, :, query].T
        keys = np.where(linked, keys, -1)
        pairs = self.text.words.pairs(keys.transpose(2, 1, 0, 3))
        return Contexts(self.text.name, self.text.tokens, cells, codes, pairs)

    def _most_different(self, moves: np.ndarray, window: np.ndarray) -> list[int]:
        """Returns the indices of the largest moves, (n, 4), of one head, of which no two have the
        same key token in the same window, or the same pair of tokens."""
        chosen: list[int] = []
        seen: set = set()
        for at in np.argsort(-moves[:, 0], kind="stable"):
            move, query, key, _ = moves[at]
            if not move > 0 or len(chosen) == CONTEXTS:  # or NaN, if the model has diverged
                break
            tokens = self.text.tokens[window[at]]
            pair, place = (tokens[int(query)], tokens[int(key)]), (window[at], key)
            if pair not in seen and place not in seen:
                seen |= {pair, place}
                chosen.append(int(at))
        return chosen


def _visitor(windows: HeadStatistics, layers: list[tuple[Tensor, ...]]) -> Visit:
    """Returns what appends to `layers` what is recorded of each layer on some windows: the sums of
    statistics, (b, M, H), the largest moves (b, H, S, 4), and of each query token, (b, H, T), the
    key token that the head moves most, its weight as a byte, and whether the head connects them."""

    def visit(_: int, attention: LayerAttention) -> None:
        weights = attention.weights
        move, key = _largest_moves(weights, attention.value_norms)  # (b, H, T) each
        weight = weights.gather(-1, key[..., None])[..., 0]
        sums, moves = windows.sums(weights, attention.scores), _of_stretches(move, key, weight)
        is_linked = (weight >= LINKED) & (move > 0)
        layers.append((sums, moves, key.to(torch.int16), to_codes(weight), is_linked))

    return visit


def _largest_moves(weights: Tensor, value_norms: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns for each query token the largest move by one key token, and this key token, (B, H, T)
    each. Without value norms, a move is a weight."""
    moves = weights if value_norms is None else weights * value_norms[:, :, None].float()
    others = torch.ones(weights.shape[-2:], device=weights.device).tril(-1)
    others[:, 0] = 0
    return (moves * others).max(-1)


def _of_stretches(move: Tensor, key: Tensor, weight: Tensor) -> Tensor:
    """Returns (move, query, key, weight) of the query token with the largest move in each stretch
    of STRETCH tokens. (B, H, T) each -> (B, H, S, 4)."""
    padding = -move.shape[-1] % STRETCH
    padded = torch.nn.functional.pad(move, (0, padding), value=-1.0)
    largest, within = padded.unflatten(-1, (-1, STRETCH)).max(-1)  # (B, H, S)
    starts = torch.arange(largest.shape[-1], device=move.device) * STRETCH
    query = within + starts
    parts = [largest, query, key.gather(-1, query), weight.gather(-1, query)]
    return torch.stack([part.float() for part in parts], dim=-1)
