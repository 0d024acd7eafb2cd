"""The lens's prompts, and the attention weights and statistics of every head on them.

capture_attention(token_ids, capture) is the caller's function. It runs the model on T token ids
without dropout and gradients and calls, for each layer in order,

    capture(layer, attn_weights, attn_scores)     both (1, H, T, T) or (H, T, T), rows are queries

attn_scores (before the softmax, -inf where masked) may be omitted. Each layer is reduced on its
device to eight numbers a head and one byte a cell before the next one runs, so that the weights of
all layers are never in memory together: for GPT-2 small at 1,024 tokens they would take 576 MiB.

Shapes: L layers, H heads, T tokens, P period of the repeated sequence.
"""

import re
import unicodedata
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .history import Row
from .statistics import STATISTICS, measure, uniform_attention

MAX_SHOWN = 256  # tokens that pages and pictures show at most; statistics use all tokens

CaptureAttention = Callable[[list[int], Callable[..., None]], object]


@dataclass
class Prompt:
    """A prompt and its tokens."""

    name: str  # short; used in file names and dashboard keys
    text: str
    token_ids: list[int]
    tokens: list[str]  # the text of each token; incomplete UTF-8 as <0xE2>
    truncated: bool = False  # whether the text has more tokens than are used, or shown
    period: int = 0  # P, when the prompt is [BOS] + R + R with R of P tokens

    @property
    def shown(self) -> int:
        """Number of tokens that pages and pictures show: the first ones."""
        return min(len(self.token_ids), MAX_SHOWN)


@dataclass
class Frame:
    """The attention of every head at one step."""

    row: Row  # the step and the statistics, each the mean over prompts
    codes: list[np.ndarray]  # for each prompt uint8 (L, H, t (t + 1) / 2), t tokens shown


def make_prompt(
    number: int, text: str, encode: Callable, token_bytes: Callable, limit: int
) -> Prompt:
    """A text as a prompt of at most `limit` tokens, named after its number and first words.

    encode(text) returns token ids, token_bytes(id) the bytes of a token.
    Raises ValueError when the text has no tokens.
    """
    # A lone surrogate, as a terminal may pass one, becomes the replacement character.
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    token_ids = list(encode(text))
    if not token_ids:
        raise ValueError(f"a prompt without tokens: {text!r}")
    kept = token_ids[:limit]
    truncated = len(token_ids) > min(limit, MAX_SHOWN)
    return Prompt(f"{number}-{_slug(text)}", text, kept, token_texts(kept, token_bytes), truncated)


def repeated_prompt(
    number: int, vocabulary: Sequence[int], bos: int, token_bytes: Callable, period: int
) -> Prompt | None:
    """[BOS] + R + R: `period` random tokens of the vocabulary, written twice.

    The tokens of R are distinct if the vocabulary is large enough. The sequence depends on the
    vocabulary and the period only. None when the period is below two or the vocabulary is empty.
    """
    tokens = np.asarray(vocabulary)
    tokens = tokens[tokens != bos]
    if period < 2 or not len(tokens):
        return None
    drawn = np.random.default_rng(0).choice(tokens, period, replace=len(tokens) < period)
    token_ids = [bos, *drawn.tolist(), *drawn.tolist()]
    text = f"{period} random tokens, written twice"
    texts = token_texts(token_ids, token_bytes)
    return Prompt(f"{number}-repeated", text, token_ids, texts, period=period)


def probe(capture_attention: CaptureAttention, prompts: Sequence[Prompt], step: int) -> Frame:
    """Runs the model on every prompt and records every head, one layer at a time."""
    codes, statistics = [], []
    for prompt in prompts:
        layers: list[tuple[Tensor, Tensor]] = []

        def capture(layer, attn_weights, attn_scores=None, prompt=prompt, out=layers):
            attn_weights = _heads(attn_weights)  # (H, T, T)
            scores = None if attn_scores is None else _heads(attn_scores)
            # The lower triangle, row by row: query 0 with key 0, query 1 with keys 0 and 1, ...
            q, k = torch.tril_indices(prompt.shown, prompt.shown, device=attn_weights.device)
            out.append(
                (to_codes(attn_weights[:, q, k]), measure(attn_weights, scores, prompt.period))
            )

        capture_attention(prompt.token_ids, capture)
        codes.append(torch.stack([code for code, _ in layers]).cpu().numpy())
        statistics.append(torch.stack([row for _, row in layers], 1).cpu().numpy())  # (S, L, H)
    return Frame(Row(step, _mean(np.stack(statistics))), codes)


def uniform_values(prompts: Sequence[Prompt]) -> dict[str, float | None]:
    """The value of each statistic on these prompts for uniform attention; None if undefined."""
    rows = [
        measure(uniform_attention(len(p.token_ids)), None, p.period).numpy()[..., None]
        for p in prompts
    ]
    mean = {key: float(value.item()) for key, value in _mean(np.stack(rows)).items()}
    return {key: None if np.isnan(value) else value for key, value in mean.items()}


def to_codes(attn_weights: Tensor) -> Tensor:
    """Weights as bytes, round(255 sqrt(w)): the error is at most 1/255, and less for small w."""
    return (attn_weights.sqrt() * 255).round().to(torch.uint8)


def from_codes(codes: np.ndarray) -> np.ndarray:
    """The inverse of to_codes: (code / 255)^2, fp32."""
    return (codes.astype(np.float32) / 255) ** 2


def triangle_to_square(codes: np.ndarray) -> np.ndarray:
    """Lower triangles (..., T (T + 1) / 2) as squares (..., T, T), zero above the diagonal."""
    num_tokens = int((2 * codes.shape[-1]) ** 0.5)
    square = np.zeros((*codes.shape[:-1], num_tokens, num_tokens), codes.dtype)
    square[..., *np.tril_indices(num_tokens)] = codes
    return square


def token_texts(token_ids: Sequence[int], token_bytes: Callable[[int], bytes]) -> list[str]:
    """The text of each token; bytes that are not whole UTF-8 characters as <0xE2>.

    An id without bytes (a vocabulary may be padded for speed) becomes <id NUMBER>.
    """
    texts = []
    for token in token_ids:
        try:
            raw = token_bytes(token)
        except (KeyError, OverflowError):
            texts.append(f"<id {token}>")
            continue
        try:
            texts.append(raw.decode("utf-8"))
        except UnicodeDecodeError:
            texts.append("".join(f"<0x{byte:02X}>" for byte in raw))
    return texts


def _heads(attn: Tensor) -> Tensor:
    """(1, H, T, T) or (H, T, T), a tensor or an array, as an fp32 tensor (H, T, T)."""
    attn = torch.as_tensor(attn).detach().float()
    return attn[0] if attn.dim() == 4 else attn


def _mean(values: np.ndarray) -> dict[str, np.ndarray]:
    """(prompts, S, L, H) -> {statistic: (L, H)}, the mean over prompts on which it is defined."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # defined on no prompt: nan
        return dict(zip(STATISTICS, np.nanmean(values, axis=0), strict=True))


def _slug(text: str, words: int = 4) -> str:
    """The first words of a text as a file name: "Où est-ce, là?" -> "ou-est-ce-la"."""
    plain = unicodedata.normalize("NFKD", text.lower()).encode("ascii", "ignore").decode()
    return "-".join(re.findall(r"[a-z0-9]+", plain)[:words])[:40] or "prompt"
