"""Key-value cache: for a new token the model computes one position instead of all positions.

    cache = KVCache(capacity=1024)
    logits = cache.read_prompts(model, [[464, 9058], [383]])  # (2, 1, V), for the last tokens
    logits = cache.read_token(model, token_ids)               # token_ids (2, 1) -> (2, 1, V)

In causal attention a token never attends to later tokens, so its keys and values do not change when
tokens are appended. Needs torch, model.py and attention.py.

Shapes: B rows, T positions, S key positions, H heads, D head_dim, V vocabulary.
"""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention import causal_attn_scores, fused_attention, sdpa
from model import GPT

# Without cuDNN, PyTorch's first choice on Hopper and Blackwell: it plans its kernel again for every
# number of keys, which takes seconds per text.
FOR_ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class KVCache:
    """Stores the keys and values of several texts, one row each. Rows may have different lengths.

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
