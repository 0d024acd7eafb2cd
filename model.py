"""GPT-2: embeddings, pre-norm transformer blocks, a head tied to the embedding, the loss.

Reads from top to bottom. Needs torch and attention.py, nothing else, so the two files can be
copied into any project. `GPT(ModelConfig())` is GPT-2 small, 124,439,808 parameters.

    x = token_emb[ids] + pos_emb[0..T-1]
    L times:  x = x + attention(norm(x));  x = x + mlp(norm(x))
    logits = norm(x) @ token_emb^T

Shapes: B batch, T query positions, S key positions, C emb_dim, H heads, D head_dim,
V vocabulary, L layers.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attention import KERNELS, MultiHeadAttention


@dataclass
class ModelConfig:
    """The shape of a GPT. The defaults are GPT-2 small (Radford et al. 2019)."""

    vocab_size: int = 50257  # V
    context_length: int = 1024  # the longest sequence; one learned position vector for each
    emb_dim: int = 768  # C
    num_heads: int = 12  # H
    num_layers: int = 12  # L
    dropout: float = 0.1  # on embeddings, attention weights and both residual branches
    qkv_bias: bool = True
    attention: str = "sdpa"  # which kernel computes attention; the weights fit all of them

    def problems(self) -> list[tuple[str, object, str, str]]:
        """The problems, as (key, value, reason, hint); empty when there are none."""
        found = []
        for key in ("vocab_size", "context_length", "emb_dim", "num_heads", "num_layers"):
            if getattr(self, key) < 1:
                found.append((key, getattr(self, key), "must be at least 1", "use 1 or more"))
        if not found and self.emb_dim % self.num_heads != 0:
            # Outwards from what was asked for, but not for ever; 1 divides everything.
            asked = min(self.num_heads, self.emb_dim)
            tries = (asked + way * far for far in range(10_000) for way in (-1, 1))
            nearest = next((h for h in tries if h >= 1 and self.emb_dim % h == 0), 1)
            cause = f"emb_dim={self.emb_dim} cannot be split into {self.num_heads} equal heads"
            fix = f"use a divisor of {self.emb_dim}, such as {nearest}"
            found.append(("num_heads", self.num_heads, cause, fix))
        if not 0.0 <= self.dropout < 1.0:
            found.append(("dropout", self.dropout, "is a probability below 1", "use 0 to 0.99"))
        if self.attention not in KERNELS:
            cause = "no such attention kernel"
            found.append(("attention", self.attention, cause, f"use one of {', '.join(KERNELS)}"))
        if self.attention == "flex" and self.dropout > 0.0:
            cause = "FlexAttention has no dropout on the weights"
            found.append(
                ("attention", "flex", cause, "set model.dropout=0 or use model.attention=sdpa")
            )
        return found

    def __post_init__(self):
        found = self.problems()
        if found:
            raise ValueError("\n".join(f"{k}={v}: {cause}; {fix}" for k, v, cause, fix in found))


def gelu(x: Tensor) -> Tensor:
    """x times the share of a normal distribution below x, roughly (Hendrycks and Gimpel 2016).

    By tanh, x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3): GPT-2 was trained with
    this form, not with erf's.
    """
    if torch.compiler.is_compiling():
        # The same, as (1 + tanh(u)) / 2 = sigmoid(2 u), which compiles to a third of the time on a
        # CPU. Only then: step by step its parts would be rounded.
        return x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))
    return F.gelu(x, approximate="tanh")


class MLP(nn.Module):
    """Two matrices with a nonlinearity between, applied to every position on its own."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.fc = nn.Linear(config.emb_dim, 4 * config.emb_dim)
        self.out_proj = nn.Linear(4 * config.emb_dim, config.emb_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)  # (B, T, 4 C)
        x = gelu(x)
        return self.out_proj(x)  # (B, T, C)


class Block(nn.Module):
    """Attention moves information between positions; the MLP works on each. Both only *add* to x.

    Pre-norm: what each branch reads is normalised, the residual stream itself never is.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.attn_norm = nn.LayerNorm(config.emb_dim, eps=1e-5)
        self.attn = MultiHeadAttention(
            d_in=config.emb_dim,
            d_out=config.emb_dim,
            context_length=config.context_length,
            dropout=config.dropout,
            num_heads=config.num_heads,
            qkv_bias=config.qkv_bias,
            attention=config.attention,
        )
        self.mlp_norm = nn.LayerNorm(config.emb_dim, eps=1e-5)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, capture: Callable | None = None, remember: Callable | None = None
    ) -> Tensor:
        """x (B, T, C) -> (B, T, C). `capture` and `remember`: see MultiHeadAttention."""
        x = x + self.dropout(self.attn(self.attn_norm(x), capture, remember))
        x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return x


class Cache:
    """The keys and values of what a model has read, so that each further token is read by itself.

        cache = Cache(room=1024)
        cache.begin([5, 3])                         # two prompts, of five tokens and of three
        logits, _ = model(prompt_ids, cache=cache)  # (2, 5), padded at the right -> (2, 1, V)
        logits, _ = model(next_ids, cache=cache)    # (2, 1), and so on while there is room

    A token changes nothing about the keys and values before it: causal attention never looks ahead.
    So what was computed once stays right, and a step costs one position instead of all.

    room: how many positions a row may come to. Position p of a row stands at index p, whatever the
    other rows have; beyond its end a row has garbage, which a mask hides and later tokens replace.
    static: every step looks at the whole room, so that its shapes never change, as compiled code
    wants; else at as much as the longest row has. Memory is taken by the first reading, in its
    type and on its device, and used again by those that `begin` later with as many rows: CUDA
    graphs know addresses.
    """

    def __init__(self, room: int, static: bool = False):
        self.room = room
        self.static = static
        self.keys: dict[int, Tensor] = {}  # by layer, (B, H, room, D)
        self.values: dict[int, Tensor] = {}
        self.lengths = torch.empty(0)

    def begin(self, lengths: list[int], device: torch.device | None = None) -> None:
        """Forgets what was read: the next forward pass reads a prompt for each row."""
        if max(lengths) > self.room:
            raise ValueError(f"{max(lengths)} tokens do not fit into a cache of {self.room}")
        self.reading = True
        self.longest = max(lengths)
        self.is_even = min(lengths) == self.longest
        if len(self.lengths) != len(lengths):
            zeros = torch.zeros(len(lengths), dtype=torch.long, device=device)
            self.lengths = self.lasting(zeros)  # (B,)
            self.rows = torch.arange(len(lengths), device=device)  # (B,)
        self.lengths.copy_(torch.tensor(lengths))

    def lasting(self, tensor: Tensor) -> Tensor:
        """A tensor that steps write to. Without being told that it stays where it is, torch's
        compiler makes no CUDA graph of such a step."""
        if self.static:
            torch._dynamo.mark_static_address(tensor, guard=False)
        return tensor

    def enter(self, num_tokens: int) -> Tensor:
        """Makes ready for the next T tokens of each row: their positions, (T,) or (B, 1)."""
        if self.reading:
            return torch.arange(num_tokens, device=self.lengths.device)
        if num_tokens != 1:
            raise ValueError(f"after its prompt a row is read token by token, not {num_tokens}")
        if not self.static:
            if self.longest >= self.room:
                raise ValueError(f"the cache is full: it has room for {self.room} tokens")
            self.longest += 1
        self.seen = self.room if self.static else self.longest
        self.mask = None
        if self.static or not self.is_even:
            slots = torch.arange(self.seen, device=self.lengths.device)  # (S,)
            self.mask = (slots <= self.lengths[:, None])[:, None, None]  # (B, 1, 1, S)
        return self.lengths[:, None]

    def remember(
        self, layer: int, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Keeps keys and values (B, H, T, D) of a layer; returns what a query may look at."""
        if self.reading:
            if layer not in self.keys or self.keys[layer].shape[0] != len(keys):
                shape = (*keys.shape[:2], self.room, keys.shape[3])
                self.keys[layer] = self.lasting(keys.new_zeros(shape))
                self.values[layer] = self.lasting(keys.new_zeros(shape))
            self.keys[layer][:, :, : keys.shape[2]] = keys
            self.values[layer][:, :, : keys.shape[2]] = values
            return None
        self.keys[layer][self.rows, :, self.lengths] = keys[:, :, 0]
        self.values[layer][self.rows, :, self.lengths] = values[:, :, 0]
        kept = slice(0, self.seen)
        return self.keys[layer][:, :, kept], self.values[layer][:, :, kept], self.mask

    def leave(self, x: Tensor) -> Tensor:
        """x (B, T, C) -> of each row the last token that is its own, (B, 1, C)."""
        if self.reading:
            self.reading = False
            return x[self.rows, self.lengths - 1][:, None]
        self.lengths += 1
        return x


def head_loss(x: Tensor, weight: Tensor, target_ids: Tensor) -> Tensor:
    """The mean cross-entropy in nats per token, (): x (N, C), weight (V, C), target_ids (N,).

    Targets of -100 do not count. Training puts a form in its place that needs less memory
    (training/ops/cross_entropy.py).
    """
    logits = F.linear(x, weight)  # (N, V)
    # In fp32 whatever the model runs in: a sum over 50,257 terms loses too much in bf16.
    return F.cross_entropy(logits.float(), target_ids)


class GPT(nn.Module):
    """The whole model. There is no separate head matrix: the head *is* the token embedding."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        # Keep only each block's input for backward, and compute the rest again there: a third
        # more work in far less memory (Chen et al. 2016).
        self.activation_checkpointing = False
        self.head_loss = head_loss
        self.token_emb = nn.Embedding(config.vocab_size, config.emb_dim)
        self.pos_emb = nn.Embedding(config.context_length, config.emb_dim)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.emb_dim, eps=1e-5)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """GPT-2's initialisation.

        token_emb, pos_emb, W_query, W_key, W_value, mlp.fc    normal(0, 0.02)
        attn.out_proj, mlp.out_proj                            normal(0, 0.02 / sqrt(2 L))
        biases                                                 0
        norms                                                  weight 1, bias 0

        Each of the 2 L branches adds its output to the residual stream; the smaller deviation
        keeps the sum's variance from growing with depth (Radford et al. 2019, section 2.3).
        """
        residual_std = 0.02 / math.sqrt(2 * self.config.num_layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(
                    module.weight, std=residual_std if name.endswith("out_proj") else 0.02
                )
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()

    def hidden_states(
        self,
        input_ids: Tensor,
        capture: Callable[[int, Tensor, Tensor], None] | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """input_ids (B, T) -> what the head reads, (B, T, C).

        With `capture`, capture(layer, attn_weights, attn_scores), both (B, H, T, T) in fp32, is
        called for each layer in turn; one layer's are alive at a time unless the callee keeps them.
        With `cache`, of each row's last token alone, (B, 1, C). Raises ValueError when T exceeds
        the context length.
        """
        num_tokens = input_ids.shape[1]
        if num_tokens > self.config.context_length:
            raise ValueError(
                f"{num_tokens} tokens do not fit into context_length={self.config.context_length}"
            )
        if cache is None:
            positions = torch.arange(num_tokens, device=input_ids.device)
        else:
            positions = cache.enter(num_tokens)
        x = self.dropout(self.token_emb(input_ids) + self.pos_emb(positions))  # (B, T, C)
        for layer, block in enumerate(self.blocks):
            if self.activation_checkpointing and self.training:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(
                    x,
                    functools.partial(capture, layer) if capture else None,
                    functools.partial(cache.remember, layer) if cache else None,
                )
        if cache is not None:
            x = cache.leave(x)  # (B, 1, C)
        return self.final_norm(x)

    def forward(
        self,
        input_ids: Tensor,
        target_ids: Tensor | None = None,
        capture: Callable[[int, Tensor, Tensor], None] | None = None,
        last_only: bool = False,
        cache: Cache | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """input_ids (B, T) -> (logits (B, T, V), None), or with target_ids (B, T) -> (None, loss).

        The loss is the mean cross-entropy in nats per token, see `head_loss`. For `capture` and
        the limit on T see `hidden_states`. With last_only, the logits are those of the last
        position alone, (B, 1, V): who needs no others need not pay for the largest matrix. With
        `cache` they are those of each row's last token, and the cache has read the row so far.
        """
        x = self.hidden_states(input_ids, capture, cache)  # (B, T, C)
        if target_ids is not None:
            x, target_ids = x.flatten(0, 1), target_ids.flatten()  # (B T, C), (B T,)
            return None, self.head_loss(x, self.token_emb.weight, target_ids)
        if last_only:
            x = x[:, -1:]  # (B, 1, C)
        return self.logits(x), None

    def logits(self, x: Tensor) -> Tensor:
        """x (B, T, C) -> (B, T, V): how well each token of the vocabulary would follow."""
        return F.linear(x, self.token_emb.weight)

    @torch.no_grad()
    def capture_attention(
        self, input_ids: Tensor, capture: Callable[[int, Tensor, Tensor], None]
    ) -> None:
        """Runs input_ids (B, T) and passes each layer's attention to `capture`: see hidden_states.

        Without dropout, gradients or any random state; the mode is restored. Goes through forward,
        so that the hooks of a sharded model gather its parameters.
        """
        was_training = self.training
        self.eval()
        try:
            self(input_ids, capture=capture, last_only=True)
        finally:
            self.train(was_training)

    def attn_weights(self, input_ids: Tensor) -> list[Tensor]:
        """Every layer's attention weights on input_ids (B, T): L of (B, H, T, T), fp32, CPU."""
        layers: list[Tensor] = []
        self.capture_attention(input_ids, lambda _, weights, __: layers.append(weights.cpu()))
        return layers

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, num_tokens: int) -> float:
        """FLOPs to train on one token of a window of T tokens, forward and backward.

        6 (12 L C^2 + V C) + 6 L C (T + 1): two per multiply-add, three passes; causal attention
        counts the half that is needed. No embedding look-ups, no padding, no recomputation.
        """
        c = self.config
        matrices = 12 * c.num_layers * c.emb_dim**2 + c.vocab_size * c.emb_dim
        return 6 * matrices + 6 * c.num_layers * c.emb_dim * (num_tokens + 1)
