"""Text generation: autoregressive sampling from a model with a key-value cache.

    for tokens in generate(model, [prompt_ids, other_ids], 100, Sampling(temperature=0.8)):
        ...  # a list with one token id for each prompt; None for a text that has ended

The model computes all positions of a prompt once, and then one position for each new token
(models/cache.py). When a text is longer than the window, its oldest tokens are dropped from the
context (`context_start`). Needs torch, model.py and models/cache.py.

Shapes: B batch, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.models.cache import KVCache
from model import GPT

# When the window is full, 1 / DROPPED_PART of it is dropped. The positions of all other tokens then
# change, so the model has to compute the context again. This is expensive and must not happen for
# each token. (When one text of a batch drops tokens, the contexts of all texts are computed again.)
DROPPED_PART = 4


@dataclass(frozen=True)
class Sampling:
    """Settings for sampling the next token from the model's distribution.

    temperature: divides the logits. Below 1, likely tokens become more likely; 0: greedy decoding.
    top_k: keeps only the k most likely tokens.
    top_p: of these, keeps the smallest set of most likely tokens with a total probability of at
    least p (nucleus sampling, Holtzman et al. 2020).
    seed: the random numbers of row b depend only on the seed and on b, not on the other rows.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def generators(self, rows: int, first_row: int = 0) -> list[torch.Generator]:
        """Returns one random generator for each of the rows first_row, first_row + 1, ..."""
        stride = 0x9E3779B97F4A7C15  # large: seed 0, row 1 must not equal seed 1, row 0
        seeds = ((self.seed + (first_row + i) * stride) % 2**63 for i in range(rows))
        return [torch.Generator().manual_seed(seed) for seed in seeds]


def context_start(length: int, window: int) -> int:
    """Returns the index of the first token of the context for a text of `length` tokens.

    It is 0 while the text fits into the window. After that, a quarter of the window is dropped each
    time the window is full, so the context has between 3/4 and all of the window's tokens.
    """
    step = max(window // DROPPED_PART, 1)
    return -(-max(length - window, 0) // step) * step


def sample(logits: Tensor, sampling: Sampling, generators: list[torch.Generator]) -> list[int]:
    """Samples one token id for each row of logits (B, V).

    Samples on the CPU, so that a seed gives the same text on every device if the logits are equal.
    Raises FloatingPointError if a logit is NaN or inf.
    """
    if sampling.temperature == 0:
        best = logits.argmax(-1, keepdim=True)  # (B, 1); of a NaN, if there is one
        _check_finite(logits.gather(-1, best))
        return best.flatten().tolist()
    ids = None
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        # Sorted by id and not by logit: on another device two close logits may swap their order.
        ids = logits.topk(sampling.top_k).indices.sort().values  # (B, k)
        logits = logits.gather(-1, ids)
    logits = logits.cpu().double() / sampling.temperature  # in this order: MPS has no doubles
    probabilities = torch.softmax(logits, dim=-1)  # (B, k or V)
    if sampling.top_p is not None and sampling.top_p < 1:
        ranked = probabilities.sort(dim=-1, descending=True, stable=True)
        before = ranked.values.cumsum(-1) - ranked.values  # total probability of more likely ids
        excluded = torch.zeros_like(probabilities, dtype=torch.bool)
        excluded.scatter_(-1, ranked.indices, before >= sampling.top_p)
        probabilities = probabilities.masked_fill(excluded, 0)
    # Inverse transform sampling: the first index whose cumulative probability is above a uniform
    # random number times the total. This product is less than the total also after rounding, as the
    # number is at most 1 - 2^-53: so the id at the index has a probability above 0.
    uniform = torch.cat([torch.rand(1, generator=g, dtype=torch.double) for g in generators])
    cumulative = probabilities.cumsum(-1)  # (B, k or V)
    _check_finite(cumulative[:, -1])
    indices = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
    return (indices if ids is None else ids.cpu().gather(-1, indices)).flatten().tolist()


def _check_finite(values: Tensor) -> None:
    if not values.isfinite().all():
        raise FloatingPointError("the logits are NaN or inf")


@torch.no_grad()
def generate(
    model: GPT,
    prompts: list[list[int]],
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    window: int | None = None,
    end_token: int | None = None,
    vocab_size: int | None = None,
    first_row: int = 0,
    cache: KVCache | None = None,
) -> Iterator[list[int | None]]:
    """Generates up to max_new_tokens tokens for each of B prompts (lists of token ids).

    Prompts may have different lengths. Yields a list of length B after each step: the new token of
    each text, or None if the text has ended. A text ends with end_token; generation stops when all
    texts have ended. Runs the model in eval mode and restores the previous mode. Calls
    model.forward, as sharded models require. Raises ValueError when a prompt is empty.

    window: largest number of tokens in the context; default: the model's context length.
    vocab_size: number of ids of the tokenizer; ids at or above it are never sampled.
    first_row: row number of the first prompt for `Sampling.seed`.
    cache: a KVCache with a capacity of at least the window, for example a compiled cache that is
    used for several calls.
    """
    if not all(prompts):
        raise ValueError("a prompt is empty; give at least one token")
    window = min(window or model.config.context_length, model.config.context_length)
    cache = cache or KVCache(min(window, max(map(len, prompts)) + max_new_tokens))
    texts = [list(prompt) for prompt in prompts]
    ended = [False] * len(texts)
    generators = sampling.generators(len(texts), first_row)
    was_training = model.training
    model.eval()
    try:
        starts = None
        for _ in range(max_new_tokens):
            previous, starts = starts, [context_start(len(text), window) for text in texts]
            if starts == previous and cache.is_used:
                last = [[text[-1]] for text in texts]
                token_ids = torch.tensor(last, device=model.token_emb.weight.device)  # (B, 1)
                logits = cache.read_token(model, token_ids)  # (B, 1, V)
            else:  # at the first step, when tokens are dropped, and for other attention scores
                parts = [text[start:] for text, start in zip(texts, starts, strict=True)]
                logits = cache.read_prompts(model, parts)  # (B, 1, V)
            tokens = sample(logits[:, -1, :vocab_size].float(), sampling, generators)
            for text, token in zip(texts, tokens, strict=True):
                text.append(token)
            yield [None if done else token for token, done in zip(tokens, ended, strict=True)]
            ended = [done or token == end_token for token, done in zip(tokens, ended, strict=True)]
            if all(ended):
                return
    finally:
        model.train(was_training)
