"""Reads a text of the user: attention, losses and next tokens, also with heads switched off.

    reader = Reader(model, tokenizer, prompts=[[5, 9, 2]], limit=64)
    reading = reader.read("The ferry bell", off=[3])  # without head 3
    reading.losses  # of each token but the first, in nats

A head that is off has its mean context vector over all tokens of the prompts, see ablation.py.

Shapes: L layers, H heads, T tokens, V vocabulary.
"""

import contextlib
import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .ablation import Head, edited_contexts, known_projections, mean_contexts, removal
from .capturing import Captured, LayerAttention, Visit, capture, unwrapped
from .history import json_values
from .parts import ScoreParts, score_parts
from .prompts import MAX_SHOWN, Prompt, labels_of, make_prompt, signs_of, texts_of, token_texts
from .recording import Recorder, predict, scaled
from .snapshot_data import stack_layers
from .tokens import lens_tokenizer

NEXT = 40  # most likely tokens after the text
DECIMALS = 6  # of probabilities: the page draws from them


@dataclass
class Likely:
    """Tokens with their labels and probabilities, the most likely first: lists of these, or for
    each position a list of these."""

    ids: list
    labels: list
    probabilities: list


@dataclass
class Reading:
    """What a model does on a text. Numbers that are not finite are None."""

    ids: list[int]
    tokens: list[str]  # tokens, texts, labels and signs: see prompts.py
    texts: list[str]
    labels: list[str]
    signs: str
    prefix: int  # number of leading tokens that the tokenizer puts in front of a text
    special: list[int]  # ids of special tokens, which end a text
    truncated: bool  # whether the text has more tokens
    # uint8 (L, H, T (T + 1) / 2): round(255 sqrt(w)), the lower triangle of the weights row by row
    codes: np.ndarray
    norms: np.ndarray | None  # uint8 (L, H, T): norms of the value vectors, as in a snapshot
    largest_norms: list[float] | None  # of each head
    losses: list[float]  # of positions 0 to T - 2, in nats
    likely: Likely  # 5 tokens for each position
    next: Likely  # at most 40 tokens after the last position


class Reader:
    """Reads texts with a model that `capture` supports.

    tokenizer: see lens_tokenizer. prompts: token ids of the texts over which the context vector of
    a head that is off is the mean. limit: maximum number of tokens of a text; MOST if it is larger.
    check: called before each layer. It may raise, which ends the call.
    """

    MOST = MAX_SHOWN  # tokens of a text

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        prompts: Sequence[Sequence[int]],
        limit: int,
        check: Callable[[], None] = lambda: None,
    ):
        self.model, self.tokenizer = unwrapped(model), lens_tokenizer(tokenizer)
        self.prompts, self.limit, self.check = prompts, min(limit, self.MOST), check

    def read(
        self,
        text: str | None = None,
        ids: Sequence[int] | None = None,
        off: Collection[int] = (),
    ) -> Reading:
        """Reads a text, which is cut at `limit` tokens, or token ids.

        off: heads that are off, layer * H + head. Raises ValueError for a text without tokens, too
        many ids, ids or heads that the model does not have, and for heads that cannot be off.
        """
        prompt, before = self._prompt(text, ids), self.tokenizer.prefix
        recorder = Recorder(prompt)
        self.check()
        with self._without([*off]):
            logits = self._capture(prompt.token_ids, lambda _, of: recorder.add(of, row=0)).logits
        if logits is None:
            raise ValueError("the model predicts no tokens")
        everywhere = predict(logits[0], prompt.token_ids)
        after = predict(logits[0, -1:], prompt.token_ids[-1:], NEXT)
        norms, largest = None, None
        if recorder.value_norms:
            (norms,), (largest,) = scaled([torch.stack(recorder.value_norms).cpu().numpy()])
        return Reading(
            prompt.token_ids,
            prompt.tokens,
            texts_of(prompt.tokens),
            prompt.labels,
            signs_of(prompt.tokens),
            len(before) if (*prompt.token_ids[: len(before)],) == before else 0,
            sorted(self.tokenizer.special),
            prompt.truncated,
            stack_layers(recorder.codes).cpu().numpy(),
            norms,
            largest,
            json_values(everywhere.losses),
            Likely(*self._likely(everywhere.token_ids, everywhere.probabilities)),
            Likely(*(of[0] for of in self._likely(after.token_ids, after.probabilities))),
        )

    def parts(
        self,
        ids: Sequence[int],
        layer: int,
        head: int,
        query: int,
        key: int,
        off: Collection[int] = (),
    ) -> ScoreParts:
        """Returns the parts of an attention score. Raises as `read`, and as score_parts."""
        ids = self._prompt(None, ids).token_ids
        self.check()
        with self._without(off):
            return score_parts(self.model, ids, layer, head, query, key)

    def _prompt(self, text: str | None, ids: Sequence[int] | None) -> Prompt:
        if (text is None) == (ids is None):
            raise ValueError("give either text or ids")
        if text is not None:
            return make_prompt(1, text, self.tokenizer, self.limit)
        ids = [*(ids or ())]
        if not 1 <= len(ids) <= self.limit:
            raise ValueError(f"{len(ids)} tokens; give 1 to {self.limit}")
        return Prompt("", "", ids, token_texts(ids, self.tokenizer.token_bytes))

    def _capture(self, ids: Sequence[int] | Tensor, visit: Visit) -> Captured:
        def checked(layer: int, attention: LayerAttention) -> None:
            self.check()
            visit(layer, attention)

        return capture(self.model, ids, checked)

    def _without(self, off: Collection[int]) -> contextlib.AbstractContextManager:
        """Switches heads off while the model runs."""
        if not off:
            return contextlib.nullcontext()
        return edited_contexts(
            known_projections(self.model), removal(self._heads(off), self._means)
        )

    def _heads(self, off: Collection[int]) -> list[Head]:
        """Returns (layer, head) of each head that is off."""
        heads = len(self._means[0])
        count = heads * len(self._means)
        for index in off:
            if not 0 <= index < count:
                raise ValueError(f"head {index}; the model has heads 0 to {count - 1}")
        return [divmod(index, heads) for index in off]

    @functools.cached_property
    def _means(self) -> list[Tensor]:
        """The mean context vectors, (H, D) for each layer."""
        if not self.prompts:
            raise ValueError("without prompts, heads cannot be switched off")
        return mean_contexts(self.model, self.prompts, self._capture)

    def _likely(self, ids: np.ndarray, probabilities: np.ndarray) -> tuple[list, list, list]:
        """Returns (ids, labels, probabilities) as lists. ids and probabilities: (T, N)."""
        known = np.unique(ids).tolist()
        texts = token_texts(known, self.tokenizer.token_bytes)
        label = dict(zip(known, (labels_of([text])[0] for text in texts), strict=True))
        labels = [[label[token] for token in row] for row in ids.tolist()]
        return ids.tolist(), labels, json_values(probabilities, DECIMALS)
