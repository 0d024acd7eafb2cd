"""Prompts of the lens, and the attention weights and statistics of all heads on these prompts.

The caller provides the function capture_attention(token_ids, capture). It runs the model on T token
ids without dropout and gradients and calls, for each layer in order,

    capture(layer, attn_weights, attn_scores, value_norms, logits)

attn_weights: (1, H, T, T) or (H, T, T), rows are queries. The others are optional: attn_scores, the
same shape, before the softmax, -inf where masked; value_norms, (1, H, T) or (H, T), the norm of
the vector that each key token adds to the residual stream per unit of weight, |W_O v|; logits,
(1, T, V) or (T, V), what the output layer predicts from the input of this layer. If the function
returns the logits of the model, its predictions are recorded too.

Each layer is reduced on its device to the statistics and one byte per weight before the next layer
runs, so the weights of only one layer are in memory. The weights of all layers of GPT-2 small at
1,024 tokens are 576 MiB.

Shapes: L layers, H heads, T tokens, P period of the repeated sequence.
"""

import codecs
import contextlib
import functools
import re
import unicodedata
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from .heads import names_of
from .history import Row
from .predictions import Predictions, predict
from .statistics import STATISTICS, measure, positional, uniform_attention

MAX_SHOWN = 256  # maximum number of tokens on pages and images; statistics use all tokens
PARTS = "¹²³⁴"  # a character has at most four bytes
BYTES_OF_TOKEN = re.compile(r"(<0x[0-9A-F]{2}>)+")
MIN_COMPARED = 8  # tokens; `positional` ignores shorter prompts

CaptureAttention = Callable[[list[int], Callable[..., None]], Tensor | None]


@dataclass
class Prompt:
    """A prompt and its tokens."""

    name: str  # short; used in file names and dashboard keys
    text: str
    token_ids: list[int]
    tokens: list[str]  # the text of each token; bytes of incomplete UTF-8 as <0xE2>
    truncated: bool = False  # whether the text has more tokens than are used or shown
    period: int = 0  # P, if the prompt is [BOS] + R + R, where R has P tokens; otherwise 0
    num_symbols: int = 0  # number of tokens that R is drawn from

    @functools.cached_property
    def labels(self) -> list[str]:
        """The tokens for axes: see labels_of."""
        return labels_of(self.tokens)

    @property
    def shown(self) -> int:
        """Number of leading tokens that pages and images show."""
        return min(len(self.token_ids), MAX_SHOWN)

    @functools.cached_property
    def separators(self) -> Tensor:
        """Which tokens are separators, bool (T,)."""
        return torch.tensor([is_separator(token) for token in self.tokens])


@dataclass
class Frame:
    """The attention of every head at one step."""

    row: Row  # the step and the statistics, averaged over prompts
    codes: list[np.ndarray]  # for each prompt uint8 (L, H, t (t + 1) / 2), t tokens shown
    of_prompts: list[dict[str, np.ndarray]]  # statistics of each prompt, (L, H)
    # For each prompt, what is predicted from the input of each layer (with the logit lens) and, the
    # last item, by the model; [] if unknown.
    predictions: list[list[Predictions]] = field(default_factory=list)
    # For each prompt fp32 (L, H, t), see value_norms above; [] if unknown.
    value_norms: list[np.ndarray] = field(default_factory=list)


def make_prompt(
    number: int, text: str, encode: Callable, token_bytes: Callable, limit: int
) -> Prompt:
    """Returns the prompt of a text, truncated to `limit` tokens, named by number and first words.

    encode(text) returns token ids, token_bytes(id) the bytes of a token.
    Raises ValueError if the text has no tokens.
    """
    # A terminal may pass a lone surrogate; it becomes the replacement character.
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
    """Returns the prompt [BOS] + R + R, where R is `period` random tokens of the vocabulary.

    The tokens of R are distinct if the vocabulary is large enough. The sequence depends only on the
    vocabulary and the period. Returns None if the period is below 2 or the vocabulary is empty.
    """
    tokens = np.asarray(vocabulary)
    tokens = tokens[tokens != bos]
    if period < 2 or not len(tokens):
        return None
    drawn = np.random.default_rng(0).choice(tokens, period, replace=len(tokens) < period)
    token_ids = [bos, *drawn.tolist(), *drawn.tolist()]
    text = f"{period} random tokens, written twice"
    texts = token_texts(token_ids, token_bytes)
    name, num_symbols = f"{number}-repeated", len(vocabulary)
    return Prompt(name, text, token_ids, texts, period=period, num_symbols=num_symbols)


@dataclass
class _Recorder:
    """What is recorded of the layers on one prompt."""

    prompt: Prompt
    codes: list[Tensor] = field(default_factory=list)  # of each layer (H, t (t + 1) / 2)
    statistics: list[Tensor] = field(default_factory=list)  # (S, H)
    value_norms: list[Tensor] = field(default_factory=list)  # (H, t)
    predictions: list[Predictions] = field(default_factory=list)

    def capture(self, layer, attn_weights, attn_scores=None, value_norms=None, logits=None) -> None:
        prompt, attn_weights = self.prompt, _heads(attn_weights, 3)  # (H, T, T)
        scores = None if attn_scores is None else _heads(attn_scores, 3)
        # The lower triangle, row by row: query 0 with key 0, query 1 with keys 0 and 1, ...
        q, k = torch.tril_indices(prompt.shown, prompt.shown, device=attn_weights.device)
        self.codes.append(to_codes(attn_weights[:, q, k]))
        self.statistics.append(measure(attn_weights, scores, prompt.period, prompt.separators))
        if value_norms is not None:
            self.value_norms.append(_heads(value_norms, 2)[:, : prompt.shown])
        if logits is not None:
            self.predictions.append(predict(logits, prompt.token_ids))


def probe(capture_attention: CaptureAttention, prompts: Sequence[Prompt], step: int) -> Frame:
    """Runs the model on all prompts and records weights and statistics, layer by layer."""
    recorders = [_Recorder(prompt) for prompt in prompts]
    for recorder in recorders:
        logits = capture_attention(recorder.prompt.token_ids, recorder.capture)
        if logits is not None:
            recorder.predictions.append(predict(logits, recorder.prompt.token_ids))
    codes = [torch.stack(r.codes).cpu().numpy() for r in recorders]
    statistics = [torch.stack(r.statistics, 1).cpu().numpy() for r in recorders]  # (S, L, H)
    norms = [torch.stack(r.value_norms).cpu().numpy() for r in recorders if r.value_norms]
    predictions = [r.predictions for r in recorders if r.predictions]
    of_prompts = [dict(zip(STATISTICS, values, strict=True)) for values in statistics]
    values = _mean(np.stack(statistics))
    values["positional"] = _positional(codes, prompts, values["positional"])
    row = Row(step, values, [readings[-1].losses for readings in predictions])
    row.names = names_of(of_prompts, [uniform_values([prompt]) for prompt in prompts], values)
    return Frame(row, codes, of_prompts, predictions, norms)


def uniform_values(prompts: Sequence[Prompt]) -> dict[str, float | None]:
    """Returns each statistic for uniform attention on these prompts; None if it is undefined."""
    rows = [
        measure(uniform_attention(len(p.token_ids)), None, p.period, p.separators).numpy()
        for p in prompts
    ]
    mean = {key: float(value.item()) for key, value in _mean(np.stack(rows)[..., None]).items()}
    if len(_compared(prompts)) > 1:
        mean["positional"] = 0.0
    return {key: None if np.isnan(value) else value for key, value in mean.items()}


def to_codes(attn_weights: Tensor) -> Tensor:
    """Returns weights as bytes, round(255 sqrt(w)). The error is at most 1/255."""
    return (attn_weights.sqrt() * 255).round().to(torch.uint8)


def from_codes(codes: np.ndarray) -> np.ndarray:
    """Returns the weights of codes, the inverse of to_codes: (code / 255)^2, fp32."""
    return (codes.astype(np.float32) / 255) ** 2


def triangle_to_square(codes: np.ndarray) -> np.ndarray:
    """Returns lower triangles (..., T (T + 1) / 2) as (..., T, T), zero above the diagonal."""
    num_tokens = int((2 * codes.shape[-1]) ** 0.5)
    square = np.zeros((*codes.shape[:-1], num_tokens, num_tokens), codes.dtype)
    square[..., *np.tril_indices(num_tokens)] = codes
    return square


def token_texts(token_ids: Sequence[int], token_bytes: Callable[[int], bytes]) -> list[str]:
    """Returns the text of each token. A byte of an incomplete UTF-8 character becomes <0xE2>.

    An id that the tokenizer does not know (vocabularies may be padded) becomes <id NUMBER>.
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


def labels_of(tokens: Sequence[str]) -> list[str]:
    """Returns the tokens with characters in place of their bytes. Each of the tokens that share a
    character has it, with the number of the part: 語¹, 語², 語³. Bytes of no character stay."""
    labels, first = [*tokens], 0
    while first < len(tokens):
        owners: list[int] = []  # the token of each byte
        decoder, found, text, n = codecs.getincrementaldecoder("utf-8")(), "", "", first
        with contextlib.suppress(UnicodeDecodeError):
            while n < len(tokens) and BYTES_OF_TOKEN.fullmatch(tokens[n]):
                own = bytes_of(tokens[n])
                found, owners, n = found + decoder.decode(own), owners + [n] * len(own), n + 1
                if not decoder.getstate()[0]:  # the character is complete
                    text = found if n - first > 1 else ""  # one token is a text such as <0x41>
                    break
        if text:
            labels[first:n] = [""] * (n - first)
        at = 0
        for character in text:
            parts = sorted({*owners[at : at + len(character.encode())]})
            for part, owner in enumerate(parts):
                labels[owner] += character + (PARTS[part] if len(parts) > 1 else "")
            at += len(character.encode())
        for each in range(first, n if text else first):
            labels[each] = _with_marks_first(labels[each])
        first = n if text else first + 1
    return labels


def _with_marks_first(label: str) -> str:
    """Returns a label with the numbers of parts after combining marks, which belong to a letter."""
    shown, numbers = "", ""
    for character in label:
        if character in PARTS:
            numbers += character
            continue
        if not unicodedata.category(character).startswith("M"):
            shown, numbers = shown + numbers, ""
        shown += character
    return shown + numbers


def plain_text(tokens: Sequence[str]) -> str:
    """Returns the text of tokens, without bytes of incomplete characters."""
    return b"".join(map(bytes_of, tokens)).decode("utf-8", "ignore")


def bytes_of(token: str) -> bytes:
    """Returns the bytes of the text of a token, see token_texts."""
    if BYTES_OF_TOKEN.fullmatch(token):
        return bytes.fromhex(token.replace("<0x", "").replace(">", ""))
    return token.encode()


def is_separator(token: str) -> bool:
    """Whether a token is punctuation or white space, such as a space between letters."""
    punctuation = (unicodedata.category(character).startswith("P") for character in token.strip())
    return token != "" and all(punctuation)


def _compared(prompts: Sequence[Prompt]) -> list[int]:
    """Returns the indices of the prompts that `positional` compares."""
    return [number for number, p in enumerate(prompts) if len(p.token_ids) >= MIN_COMPARED]


def _positional(
    codes: Sequence[np.ndarray], prompts: Sequence[Prompt], undefined: np.ndarray
) -> np.ndarray:
    """Returns the statistic `positional`, (L, H), from the first tokens of all prompts."""
    numbers = _compared(prompts)
    if len(numbers) < 2:
        return undefined
    num_tokens = min(prompts[number].shown for number in numbers)
    first = num_tokens * (num_tokens + 1) // 2
    return positional([from_codes(codes[number][..., :first]) for number in numbers])


def _heads(values: Tensor, dim: int) -> Tensor:
    """Returns values, (1, H, ...) or (H, ...), as an fp32 tensor of `dim` dimensions (H, ...)."""
    values = torch.as_tensor(values).detach().float()
    return values[0] if values.dim() > dim else values


def _mean(values: np.ndarray) -> dict[str, np.ndarray]:
    """Returns {statistic: (L, H)} from (prompts, S, L, H): means over prompts, without NaN."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # undefined on all prompts: NaN
        return dict(zip(STATISTICS, np.nanmean(values, axis=0), strict=True))


def _slug(text: str) -> str:
    """Returns the first words of a text as a file name: "Où est-ce, là?" -> "ou-est-ce-la"."""
    plain = unicodedata.normalize("NFKD", text.lower()).encode("ascii", "ignore").decode()
    return "-".join(re.findall(r"[a-z0-9]+", plain)[:4])[:40] or "prompt"
