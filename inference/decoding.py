"""Text from a model, token by token: which tokens it reads, and which one it takes.

    for tokens in generate(model, [prompt_ids, other_ids], 100, Sampling(temperature=0.8)):
        ...                                # one token for each prompt, None where it has ended

A prompt is read once; each further token costs one position, since the keys and values of those
before it are kept (`Cache` in model.py). Beyond its window a model reads on with a part of what it
has read (`first_read`). Needs torch and model.py.

Shapes: B batch, V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from model import GPT, Cache

# Of a full window so much is left behind at once: all that stays is read again, at positions that
# have moved, and so this is done once in a quarter of a window, not for each token. (Of several
# texts all are read again whenever one of them moves on.)
LEFT_BEHIND = 4


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn from what the model holds likely.

    temperature divides the logits: below 1 the likely ones become likelier, 0 takes the likeliest.
    top_k keeps the k likeliest. top_p keeps, of these, the fewest that are together at least so
    likely (nucleus sampling, Holtzman et al. 2020). seed is the start of the random draws: that of
    row b depends on the seed and b alone, whatever stands in the other rows.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def generators(self, rows: int, first: int = 0) -> list[torch.Generator]:
        """The source of chance of each row, from number `first` on."""
        apart = 0x9E3779B97F4A7C15  # far: neighbouring seeds share no row
        seeds = ((self.seed + row * apart) % 2**63 for row in range(first, first + rows))
        return [torch.Generator().manual_seed(seed) for seed in seeds]


def first_read(length: int, window: int) -> int:
    """The first token that is read to continue a text of so many tokens.

    All are while they fit the window. Then the text moves on by a quarter of the window whenever
    that is full, so that from three quarters to all of it are read.
    """
    step = max(window // LEFT_BEHIND, 1)
    return -(-max(length - window, 0) // step) * step


def draw(logits: Tensor, sampling: Sampling, generators: list[torch.Generator]) -> list[int]:
    """A token for each row of logits (B, V), drawn on the CPU: a seed gives the same text wherever
    the model runs, as far as its logits are the same."""
    if sampling.temperature == 0:
        return logits.argmax(-1).tolist()
    ids = None
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        # By id, not by rank: two that are nearly equal may change ranks elsewhere.
        ids = logits.topk(sampling.top_k).indices.sort().values  # (B, k)
        logits = logits.gather(-1, ids)
    logits = logits.cpu().double() / sampling.temperature  # in this order: MPS has no doubles
    probabilities = torch.softmax(logits, dim=-1)  # (B, k or V)
    if sampling.top_p is not None and sampling.top_p < 1:
        ranked = probabilities.sort(dim=-1, descending=True, stable=True)
        before = ranked.values.cumsum(-1) - ranked.values  # how likely all that rank higher are
        left_out = torch.zeros_like(probabilities, dtype=torch.bool)
        left_out.scatter_(-1, ranked.indices, before >= sampling.top_p)
        probabilities = probabilities.masked_fill(left_out, 0)
    # The inverse of the distribution function, at a random height.
    heights = torch.cat([torch.rand(1, generator=g, dtype=torch.double) for g in generators])
    reached = probabilities.cumsum(-1)  # (B, k or V)
    places = torch.searchsorted(reached, heights[:, None] * reached[:, -1:], right=True)
    # A height that rounding put at the very top belongs to the last that is possible at all.
    last = probabilities.shape[-1] - 1 - (probabilities > 0).flip(-1).int().argmax(-1, keepdim=True)
    places = torch.minimum(places, last)
    return (places if ids is None else ids.cpu().gather(-1, places)).flatten().tolist()


@torch.no_grad()
def generate(
    model: GPT,
    prompts: list[list[int]],
    num_tokens: int,
    sampling: Sampling = Sampling(),
    window: int | None = None,
    end: int | None = None,
    known: int | None = None,
    first: int = 0,
    step: Callable | None = None,
    cache: Cache | None = None,
) -> Iterator[list[int | None]]:
    """Continues prompts, lists of token ids of any lengths, by at most num_tokens tokens each.

    Yields a list of B after each step: the new token of each prompt, None for one that has ended,
    which it has after the token `end`; stops when all have.

    window: how many tokens are read at most, by default the context length (see `first_read`).
    known: how many ids stand for something; those above are never drawn. first: the number of the
    first row, for its random draws. step and cache: what reads a token in the model's place, such
    as torch.compile made of it, and a static cache with room for the window, to be used again for
    as many texts as often as one likes; any other shape would be compiled anew. Goes through
    forward, as sharded models want; the mode is restored. Raises ValueError when a prompt is empty.
    """
    if not all(prompts):
        raise ValueError("an empty prompt has no token to begin with")
    window = min(window or model.config.context_length, model.config.context_length)
    device = model.token_emb.weight.device
    texts = [list(prompt) for prompt in prompts]
    ended = [False] * len(texts)
    generators = sampling.generators(len(texts), first)
    step = model if step is None else step
    cache = cache or Cache(min(window, max(map(len, texts)) + num_tokens))
    was_training = model.training
    model.eval()
    try:
        starts = None
        for _ in range(num_tokens):
            now = [first_read(len(text), window) for text in texts]
            if now == starts:
                last = torch.tensor([[text[-1]] for text in texts], device=device)
                logits, _ = step(last, cache=cache)  # (B, 1, V)
            else:  # the prompts, or what of a text is read again
                starts, parts = now, [text[n:] for text, n in zip(texts, now, strict=True)]
                cache.begin([len(part) for part in parts], device)
                padded = [part + [0] * (cache.longest - len(part)) for part in parts]
                logits, _ = model(torch.tensor(padded, device=device), cache=cache)
            tokens = draw(logits[:, -1, :known].float(), sampling, generators)
            for row, token in enumerate(tokens):
                texts[row].append(token)
            yield [None if over else token for token, over in zip(tokens, ended, strict=True)]
            ended = [over or token == end for token, over in zip(tokens, ended, strict=True)]
            if all(ended):
                return
    finally:
        model.train(was_training)
