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
import os
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .capturing import Captured, LayerAttention, Visit
from .connected import Words
from .prompts import token_texts
from .snapshot_data import CONTEXTS, Contexts
from .statistics import HeadStatistics, ratio_of_sums, uniform_on
from .tokens import LensTokenizer

MAX_TOKENS = 256  # of a window
MAX_WINDOWS = 32
CELLS_AT_ONCE = 2**19  # of one head: 8 windows of 256 tokens
LINKED = 0.2  # attention weight
STRETCH = 16  # query tokens, of which the one that the head moves most can be shown


def windows_of(text: str, tokenizer: LensTokenizer, context_length: int) -> Tensor:
    """Returns evenly spaced windows of a text, (N, T), each with the prefix of the tokenizer.
    Raises ValueError for a text of less than 16 tokens, and for the path of a file."""
    if len(text) < 256 and os.path.isfile(text):
        raise ValueError(f"text={text!r} is the path of a file; give its text, Path.read_text()")
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
        self, token_ids: Tensor, token_bytes: Callable[[int], bytes], name: str = "your text"
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

    def batches(self) -> list[tuple[int, HeadStatistics]]:
        """Returns (number of the first window, some windows) for a few windows at a time."""
        count, length = self.token_ids.shape
        size = max(1, CELLS_AT_ONCE // length**2)
        parts = [slice(first, first + size) for first in range(0, count, size)]
        return [(p.start, HeadStatistics(self.token_ids[p], self.tokens[p])) for p in parts]

    @functools.cached_property
    def words(self) -> Words:
        return Words(self.tokens)

    @functools.cached_property
    def counts(self) -> np.ndarray:
        """The number of query tokens of which each statistic is a mean, (N, M)."""
        return np.concatenate([windows.counts() for _, windows in self.batches()])

    @functools.cached_property
    def uniform(self) -> dict[str, float | None]:
        """Each statistic for uniform attention; None if it is undefined."""
        return uniform_on([windows for _, windows in self.batches()])


class TextRecorder:
    """Measures all heads on a text. After `run`:

    means, errors: (M, L, H). contexts: the cells where each head moves most.
    """

    def __init__(self, text: Text):
        self.text = text
        self.sums: list[list[Tensor]] = []  # for each batch and layer (b, M, H)
        # For each batch and layer (b, H, S, 4): move, query, key and weight of each stretch.
        self.moves: list[list[Tensor]] = []
        # For each batch and layer int16 (b, H, T): the key token of each query token, or -1.
        self.linked: list[list[Tensor]] = []
        # For each random query and layer (H, 2): key and weight.
        self.at_random: dict[tuple[int, int], list[Tensor]] = {}

    def run(self, capture: Callable[..., Captured]) -> "TextRecorder":
        """Runs the model on all windows."""
        for first, windows in self.text.batches():
            self.sums.append([])
            self.moves.append([])
            self.linked.append([])
            capture(windows.token_ids, self._visitor(first, windows))
        sums = [torch.stack(of_layers, dim=2).cpu().numpy() for of_layers in self.sums]
        self.means, self.errors = ratio_of_sums(np.concatenate(sums), self.text.counts)
        return self

    def _visitor(self, first: int, windows: HeadStatistics) -> Visit:
        """Returns what to do with each layer of some windows. first: the number of the first."""
        last = first + len(windows.token_ids)
        here = [(w, q) for w, q in self.text.random_queries if first <= w < last]

        def visit(_: int, attention: LayerAttention) -> None:
            nonlocal windows
            weights = attention.weights
            windows = windows.to(weights.device)
            self.sums[-1].append(windows.sums(weights, attention.scores))
            move, key = _largest_moves(weights, attention.value_norms)  # (b, H, T) each
            weight = weights.gather(-1, key[..., None])[..., 0]  # (b, H, T)
            self.moves[-1].append(_of_stretches(move, key, weight))
            is_linked = (weight >= LINKED) & (move > 0)
            self.linked[-1].append(torch.where(is_linked, key, -1).to(torch.int16))
            for window, query in here:
                found = [of[window - first, :, query] for of in (key, weight)]
                self.at_random.setdefault((window, query), []).append(torch.stack(found, -1))

        return visit

    @functools.cached_property
    def contexts(self) -> Contexts:
        """The cells where each head moves most, those of some query tokens at random, and the pairs
        of words that each head connects most often."""
        moves = [torch.stack(of_layers, dim=2).cpu().numpy() for of_layers in self.moves]
        found = np.concatenate(moves)  # (N, H, L, S, 4)
        windows, num_heads, num_layers, stretches, _ = found.shape
        found = found.transpose(2, 1, 0, 3, 4).reshape(num_layers, num_heads, -1, 4)
        window = np.repeat(np.arange(windows), stretches)
        cells = np.full((num_layers, num_heads, 2, CONTEXTS, 3), -1, np.int16)
        weights = np.zeros((num_layers, num_heads, 2, CONTEXTS), np.float32)
        for layer, head in np.ndindex(num_layers, num_heads):
            of_head = found[layer, head]
            for n, at in enumerate(self._most_different(of_head, window)):
                cells[layer, head, 0, n] = window[at], *of_head[at, 1:3]
                weights[layer, head, 0, n] = of_head[at, 3]
        for n, (place, of_layers) in enumerate(self.at_random.items()):
            of_heads = torch.stack(of_layers).cpu().numpy()  # (L, H, 2)
            cells[:, :, 1, n, :2] = place
            cells[:, :, 1, n, 2] = of_heads[..., 0]
            weights[:, :, 1, n] = of_heads[..., 1]
        codes = (np.sqrt(np.nan_to_num(weights)) * 255).round().astype(np.uint8)
        linked = [torch.stack(of_layers, dim=2).cpu().numpy() for of_layers in self.linked]
        pairs = self.text.words.pairs(np.concatenate(linked).transpose(2, 1, 0, 3))
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
