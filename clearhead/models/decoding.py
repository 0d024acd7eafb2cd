"""Text generation: autoregressive sampling from a model with a key-value cache.

    for tokens in generate(model, [prompt_ids, other_ids], 100, Sampling(temperature=0.8)):
        ...  # a list with one token id for each prompt; None for a text that has ended

The model computes all positions of a prompt once, and then one position for each new token
(`KVCache`): in causal attention a token never attends to later tokens, so its keys and values do
not change when tokens are appended. When a text is longer than the window, its oldest tokens are
dropped from the context (`context_start`). Needs torch, model.py and attention.py.

Shapes: B rows of a batch, T positions, S key positions, H heads, D head_dim, V vocabulary.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention import causal_attn_scores, fused_attention, sdpa
from model import GPT

# When the window is full, 1 / DROPPED_PART of it is dropped. The positions of all other tokens then
# change, so the model has to compute the context again. This is expensive and must not happen for
# each token. (When one text of a batch drops tokens, the contexts of all texts are computed again.)
DROPPED_PART = 4
# Without cuDNN, PyTorch's first choice on Hopper and Blackwell: it plans its kernel again for every
# number of keys, which takes seconds per text.
FOR_ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


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


class KVCache:
    """Stores the keys and values of several texts, one row each. Rows may have different lengths.

        cache = KVCache(capacity=1024)
        logits = cache.read_prompts(model, [[464, 9058], [383]])  # (2, 1, V), for the last tokens
        logits = cache.read_token(model, token_ids)               # token_ids (2, 1) -> (2, 1, V)

    The token at position p of a row is at index p. After its last token a row has padding: a mask
    excludes it from attention, and later tokens overwrite it.

    capacity: the largest number of tokens of a row. compiler: a function that compiles
    `read_token`, for example torch.compile. Each step then computes attention over `capacity` keys,
    so that no shape changes. The first call allocates the memory; later calls with the same number
    of rows reuse it, because CUDA graphs need fixed addresses.

    For a model whose kernel declares other scores (attention.SCORES), `is_used` is false after
    `read_prompts`: nothing is stored, and each token needs `read_prompts` again.
    """

    def __init__(self, capacity: int, compiler: Callable | None = None):
        self.capacity = capacity
        self.is_static = compiler is not None
        if compiler is not None:
            self.read_token = compiler(self.read_token)
        self.keys: dict[int, Tensor] = {}  # by layer, (B, H, capacity, D)
        self.values: dict[int, Tensor] = {}
        self.lengths = torch.empty(0)  # (B,)
        self.is_used = True

    def read_prompts(self, model: GPT, prompts: list[list[int]]) -> Tensor:
        """Stores one prompt in each row, replacing what the rows contained.

        Returns the logits of the last token of each prompt, (B, 1, V). Raises ValueError when a
        prompt is longer than the capacity.
        """
        device = model.token_emb.weight.device
        lengths = [len(prompt) for prompt in prompts]
        self.longest, self.is_ragged = max(lengths), min(lengths) < max(lengths)
        if self.longest > self.capacity:
            raise ValueError(f"{self.longest} tokens do not fit into a cache of {self.capacity}")
        # All layers have the same kernel.
        self.is_used = model.blocks[0].attn.attn_scores is causal_attn_scores
        if len(self.lengths) != len(lengths):
            self.lengths = self._fixed(torch.zeros(len(lengths), dtype=torch.long, device=device))
            self.rows = torch.arange(len(lengths), device=device)  # (B,)
        self.lengths.copy_(torch.tensor(lengths))
        padded = [prompt + [0] * (self.longest - len(prompt)) for prompt in prompts]
        input_ids = torch.tensor(padded, device=device)  # (B, T)
        store = self._store if self.is_used else None
        logits, _ = model(input_ids, layer_kernel=store, logits_at=self.lengths - 1)
        return logits

    def read_token(self, model: GPT, token_ids: Tensor) -> Tensor:
        """Appends one token to each row, token_ids (B, 1), and returns its logits, (B, 1, V).

        Raises ValueError when the cache is full (not checked if `compiler` is given).
        """
        num_keys = self.capacity
        if not self.is_static:
            if self.longest >= self.capacity:
                raise ValueError(f"the cache is full: it has room for {self.capacity} tokens")
            self.longest += 1
            num_keys = self.longest
        # The rows, heads and positions of the new tokens. All rows have num_keys tokens: no mask.
        index, mask = (slice(None), slice(None), num_keys - 1), None
        if self.is_static or self.is_ragged:
            index = (self.rows, slice(None), self.lengths)
            indices = torch.arange(num_keys, device=token_ids.device)  # (S,)
            mask = (indices <= self.lengths[:, None])[:, None, None]  # (B, 1, 1, S)

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, _: float) -> Tensor:
            """Stores keys and values of the new tokens, (B, H, 1, D); attends within each row."""
            all_keys, all_values = self.keys[layer], self.values[layer]  # (B, H, capacity, D)
            all_keys[index] = keys[:, :, 0].to(all_keys.dtype)
            all_values[index] = values[:, :, 0].to(all_values.dtype)
            context_vec = fused_attention(
                queries.to(all_keys.dtype),
                all_keys[:, :, :num_keys],
                all_values[:, :, :num_keys],
                attn_mask=mask,
            )
            return context_vec.to(queries.dtype)

        backends = contextlib.nullcontext() if self.is_static else sdpa_kernel(FOR_ANY_LENGTH)
        with backends:
            logits, _ = model(token_ids, layer_kernel=attend, positions=self.lengths[:, None])
        self.lengths += 1
        return logits

    def _store(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, dropout_p: float
    ) -> Tensor:
        """Stores the keys and values of the prompts; attends within each prompt."""
        if layer not in self.keys or self.keys[layer].shape[0] != len(keys):
            shape = (*keys.shape[:2], self.capacity, keys.shape[3])
            # fp32 on a CPU: there, PyTorch's attention of one bf16 query is several times slower.
            # Not with autocast, which would convert the cache in every step.
            slow = keys.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
            dtype = torch.float32 if slow else keys.dtype
            self.keys[layer] = self._fixed(keys.new_zeros(shape, dtype=dtype))
            self.values[layer] = self._fixed(values.new_zeros(shape, dtype=dtype))
        self.keys[layer][:, :, : keys.shape[2]] = keys
        self.values[layer][:, :, : keys.shape[2]] = values
        return sdpa(queries, keys, values)

    def _fixed(self, tensor: Tensor) -> Tensor:
        """Returns the tensor, marked for torch.compile as one whose address does not change:
        otherwise a step that writes to it is not recorded as a CUDA graph."""
        if self.is_static:
            torch._dynamo.mark_static_address(tensor, guard=False)
        return tensor


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
