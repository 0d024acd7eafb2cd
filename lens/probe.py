"""The prompts that the lens looks at, and what it sees: every head's weights and statistics.

The model is asked through a function look_into(token_ids, capture), which runs it on T token ids
without dropout and gradients and calls, for each layer in turn,

    capture(layer, attn_weights, attn_scores)     both (1, H, T, T) or (H, T, T), rows are queries

where attn_scores (before the softmax, -inf where masked) may be left out. Each layer is reduced on
its device at once to eight numbers and one byte a cell, so that all layers' weights never stand
side by side: at 1,024 tokens GPT-2 small's would take 576 MiB.

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
from .statistics import STATISTICS, evenly, measure

SHOWN = 256  # pages and pictures show at most so many tokens; statistics take in all

LookInto = Callable[[list[int], Callable[..., None]], object]


@dataclass
class Prompt:
    """A prompt as the model reads it."""

    name: str  # short, fit for a file name and a dashboard key
    text: str
    token_ids: list[int]
    tokens: list[str]  # what each id stands for, as text; bytes that are none as <0xE2>
    cropped: bool = False  # whether the text had more tokens than are looked at, or shown
    period: int = 0  # P, when the prompt is [BOS] + R + R with R of P tokens

    @property
    def shown(self) -> int:
        """How many of its tokens pages and pictures show; causal rows stay whole when cut."""
        return min(len(self.token_ids), SHOWN)


@dataclass
class Frame:
    """Every head at one step."""

    row: Row  # its step, and the statistics: of each the mean over prompts
    codes: list[np.ndarray]  # for each prompt uint8 (L, H, t (t + 1) / 2), t tokens shown


def make_prompt(
    number: int, text: str, encode: Callable, token_bytes: Callable, limit: int
) -> Prompt:
    """The prompt of a text, cropped to `limit` tokens; named after its number and first words.

    encode(text) gives token ids, token_bytes(id) the bytes that an id stands for.
    Raises ValueError when the text has no tokens.
    """
    # Half a character, as a terminal may pass one, is no text: shown as what it is, unreadable.
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    token_ids = list(encode(text))
    if not token_ids:
        raise ValueError(f"a prompt without tokens: {text!r}")
    kept = token_ids[:limit]
    cropped = len(token_ids) > min(limit, SHOWN)
    return Prompt(f"{number}-{_slug(text)}", text, kept, token_texts(kept, token_bytes), cropped)


def repeated_prompt(
    number: int, vocabulary: Sequence[int], bos: int, token_bytes: Callable, period: int
) -> Prompt | None:
    """[BOS] + R + R: `period` random tokens of the vocabulary, written twice.

    R has no token twice where the vocabulary is large enough. The same sequence at every step of
    every run with that vocabulary. None when the period is below two or the vocabulary empty.
    """
    vocabulary = np.asarray(vocabulary)
    vocabulary = vocabulary[vocabulary != bos]
    if period < 2 or not len(vocabulary):
        return None
    drawn = np.random.default_rng(0).choice(vocabulary, period, replace=len(vocabulary) < period)
    token_ids = [bos, *drawn.tolist(), *drawn.tolist()]
    tokens = token_texts(token_ids, token_bytes)
    text = f"{period} random tokens, written twice"
    return Prompt(f"{number}-repeated", text, token_ids, tokens, period=period)


def probe(look_into: LookInto, prompts: Sequence[Prompt], step: int) -> Frame:
    """Looks at every head on every prompt, one prompt and one layer at a time."""
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

        look_into(prompt.token_ids, capture)
        codes.append(torch.stack([code for code, _ in layers]).cpu().numpy())
        statistics.append(torch.stack([row for _, row in layers], 1).cpu().numpy())  # (S, L, H)
    return Frame(Row(step, _mean(np.stack(statistics))), codes)


def uniform_values(prompts: Sequence[Prompt]) -> dict[str, float | None]:
    """What each statistic comes to on these prompts when every token looks back evenly."""
    rows = [measure(evenly(len(p.token_ids)), None, p.period).numpy()[..., None] for p in prompts]
    mean = {key: float(value.item()) for key, value in _mean(np.stack(rows)).items()}
    return {key: None if np.isnan(value) else value for key, value in mean.items()}


def to_codes(attn_weights: Tensor) -> Tensor:
    """Weights as bytes on a square-root scale, round(255 sqrt(w)): within 1/255 of w and closer
    for small weights, which a linear scale would show as nothing."""
    return (attn_weights.sqrt() * 255).round().to(torch.uint8)


def from_codes(codes: np.ndarray) -> np.ndarray:
    """The weights that bytes stand for: (code / 255)^2, fp32."""
    return (codes.astype(np.float32) / 255) ** 2


def triangle_to_square(codes: np.ndarray) -> np.ndarray:
    """Lower triangles (..., T (T + 1) / 2) as squares (..., T, T), zero above the diagonal."""
    num_tokens = int((2 * codes.shape[-1]) ** 0.5)
    square = np.zeros((*codes.shape[:-1], num_tokens, num_tokens), codes.dtype)
    square[..., *np.tril_indices(num_tokens)] = codes
    return square


def token_texts(token_ids: Sequence[int], token_bytes: Callable[[int], bytes]) -> list[str]:
    """What each id stands for. A token may be a part of a character only: its bytes, as <0xE2>.

    An id that stands for nothing (a vocabulary padded for speed has some) is shown as a number.
    """
    texts = []
    for token in token_ids:
        try:
            raw = token_bytes(token)
            texts.append(raw.decode("utf-8"))
        except UnicodeDecodeError:
            texts.append("".join(f"<0x{byte:02X}>" for byte in raw))
        except (KeyError, OverflowError):
            texts.append(f"<id {token}>")
    return texts


def _heads(attn: Tensor) -> Tensor:
    """(1, H, T, T) or (H, T, T), a tensor or an array, as an fp32 tensor (H, T, T)."""
    attn = torch.as_tensor(attn).detach().float()
    return attn[0] if attn.dim() == 4 else attn


def _mean(values: np.ndarray) -> dict[str, np.ndarray]:
    """(prompts, S, L, H) -> for each statistic the mean over the prompts on which it is defined."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # defined on none of them: stays nan
        return dict(zip(STATISTICS, np.nanmean(values, axis=0), strict=True))


def _slug(text: str, words: int = 4) -> str:
    """The first words of a text as a file name: "Où est-ce, là?" -> "ou-est-ce-la"."""
    plain = unicodedata.normalize("NFKD", text.lower()).encode("ascii", "ignore").decode()
    return "-".join(re.findall(r"[a-z0-9]+", plain)[:words])[:40] or "prompt"
