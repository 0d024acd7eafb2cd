"""Generate text from a model, token by token.

    for tokens in generate(model, [prompt_ids, other_ids], 100, Sampling(temperature=0.8)):
        ...                                # one token for each prompt, None where it has ended

A prompt is read once; each further token costs one position (inference/cache.py). A text that
exceeds the window continues with a part of what was read (`first_read`). Needs torch, model.py and
inference/cache.py.

Shapes: B batch, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from inference.cache import KVCache
from model import GPT

# When the window is full, one quarter of it is dropped at once: the rest is read again, at new
# positions, so this should not happen for each token. (All texts of a batch are read again whenever
# one of them drops tokens.)
DROPPED_PART = 4


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn from the model's distribution.

    temperature divides the logits: below 1 likely tokens become likelier, 0 takes the likeliest.
    top_k keeps the k likeliest. top_p keeps, of these, the smallest set whose probability reaches p
    (nucleus sampling, Holtzman et al. 2020). seed: the draws of row b depend on the seed and b
    only, not on the other rows.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def generators(self, rows: int, first: int = 0) -> list[torch.Generator]:
        """One random generator for each row, the first row having the number `first`."""
        apart = 0x9E3779B97F4A7C15  # large, so that neighbouring seeds have no row in common
        seeds = ((self.seed + row * apart) % 2**63 for row in range(first, first + rows))
        return [torch.Generator().manual_seed(seed) for seed in seeds]


def first_read(length: int, window: int) -> int:
    """The index of the first token that is read to continue a text of `length` tokens.

    0 while the text fits the window. Then a quarter of the window is dropped whenever it is full,
    so that between three quarters and all of the window are read.
    """
    step = max(window // DROPPED_PART, 1)
    return -(-max(length - window, 0) // step) * step


def draw(logits: Tensor, sampling: Sampling, generators: list[torch.Generator]) -> list[int]:
    """One token for each row of logits (B, V). Drawn on the CPU, so that a seed gives the same text
    on every device, as far as the logits are the same."""
    if sampling.temperature == 0:
        return logits.argmax(-1).tolist()
    ids = None
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        # Sorted by id, not by rank: two nearly equal logits may change ranks on another device.
        ids = logits.topk(sampling.top_k).indices.sort().values  # (B, k)
        logits = logits.gather(-1, ids)
    logits = logits.cpu().double() / sampling.temperature  # in this order: MPS has no doubles
    probabilities = torch.softmax(logits, dim=-1)  # (B, k or V)
    if sampling.top_p is not None and sampling.top_p < 1:
        ranked = probabilities.sort(dim=-1, descending=True, stable=True)
        before = ranked.values.cumsum(-1) - ranked.values  # the probability of all higher ranks
        excluded = torch.zeros_like(probabilities, dtype=torch.bool)
        excluded.scatter_(-1, ranked.indices, before >= sampling.top_p)
        probabilities = probabilities.masked_fill(excluded, 0)
    # Inverse transform sampling: the first token whose cumulative probability exceeds a uniform.
    uniform = torch.cat([torch.rand(1, generator=g, dtype=torch.double) for g in generators])
    cumulative = probabilities.cumsum(-1)  # (B, k or V)
    places = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
    # Where rounding gave the very end, take the last token with a probability above 0.
    last = probabilities.shape[-1] - 1 - (probabilities > 0).flip(-1).int().argmax(-1, keepdim=True)
    places = torch.minimum(places, last)
    return (places if ids is None else ids.cpu().gather(-1, places)).flatten().tolist()


@torch.no_grad()
def generate(
    model: GPT,
    prompts: list[list[int]],
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    window: int | None = None,
    end: int | None = None,
    known: int | None = None,
    first: int = 0,
    cache: KVCache | None = None,
) -> Iterator[list[int | None]]:
    """Continues prompts, lists of token ids of any lengths, by up to max_new_tokens tokens each.

    Yields a list of B after each step: the new token of each prompt, None for one that has ended.
    A text ends after the token `end`; generation stops when all have ended.

    window: how many tokens are read at most, by default the context length (see `first_read`).
    known: the number of ids that the tokenizer has; higher ids are never drawn. first: the number
    of the first row, for its random draws. cache: a cache with room for the window, such as a
    compiled one, to use again for other texts. Goes through forward, as sharded models need; the
    mode is restored. Raises ValueError when a prompt is empty.
    """
    if not all(prompts):
        raise ValueError("an empty prompt has no token to begin with")
    window = min(window or model.config.context_length, model.config.context_length)
    cache = cache or KVCache(min(window, max(map(len, prompts)) + max_new_tokens))
    texts = [list(prompt) for prompt in prompts]
    ended = [False] * len(texts)
    generators = sampling.generators(len(texts), first)
    was_training = model.training
    model.eval()
    try:
        starts = None
        for _ in range(max_new_tokens):
            previous, starts = starts, [first_read(len(text), window) for text in texts]
            if starts == previous:
                last = [[text[-1]] for text in texts]
                token_ids = torch.tensor(last, device=model.token_emb.weight.device)  # (B, 1)
                logits = cache.read_token(model, token_ids)  # (B, 1, V)
            else:  # the prompts, or the part of each text that is read again
                parts = [text[start:] for text, start in zip(texts, starts, strict=True)]
                logits = cache.read_prompts(model, parts)  # (B, 1, V)
            tokens = draw(logits[:, -1, :known].float(), sampling, generators)
            for text, token in zip(texts, tokens, strict=True):
                text.append(token)
            yield [None if over else token for token, over in zip(tokens, ended, strict=True)]
            ended = [over or token == end for token, over in zip(tokens, ended, strict=True)]
            if all(ended):
                return
    finally:
        model.train(was_training)
