"""GPT-2: embeddings, pre-norm transformer blocks, a head tied to the embedding, the loss.

Reads from top to bottom. Needs only torch and attention.py, so the two files can be copied into
another project. `GPT(ModelConfig())` is GPT-2 small, 124,439,808 parameters.

    x = token_emb[ids] + pos_emb[0..T-1]
    L times:  x = x + attention(norm(x));  x = x + mlp(norm(x))
    logits = norm(x) @ token_emb^T

Shapes: B batch, T positions, C emb_dim, H heads, D head_dim, V vocabulary, L layers.
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

from attention import KERNELS, AttentionKernel, MultiHeadAttention, causal_attn_scores

# An attention kernel (attention.py) that also gets the index of the layer that calls it:
# layer_kernel(layer, queries, keys, values, dropout_p) -> context_vec.
LayerKernel = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
# Receives the attention of one layer: callback(layer, attn_weights, attn_scores), both
# (B, H, T, T) in fp32.
AttentionCallback = Callable[[int, Tensor, Tensor], None]


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

    def __post_init__(self):
        sizes = ("vocab_size", "context_length", "emb_dim", "num_heads", "num_layers")
        if any(getattr(self, key) < 1 for key in sizes) or self.emb_dim % self.num_heads:
            raise ValueError(f"{self}: sizes must be at least 1, emb_dim a multiple of num_heads")
        if self.attention not in KERNELS or not 0 <= self.dropout < 1:
            raise ValueError(f"{self}: attention must be one of {list(KERNELS)}, dropout below 1")
        if self.attention == "flex" and self.dropout > 0:
            raise ValueError("FlexAttention has no dropout on the weights: use dropout=0")


def gelu(x: Tensor) -> Tensor:
    """x times the normal distribution function of x, in the tanh approximation that GPT-2 was
    trained with (Hendrycks and Gimpel 2016).

    x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3).
    """
    if torch.compiler.is_compiling():
        # (1 + tanh(u)) / 2 = sigmoid(2 u): when compiled for a CPU, this takes a third of the time.
        # Only then, because eager operations would round each intermediate result.
        return x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))
    return F.gelu(x, approximate="tanh")


class MLP(nn.Module):
    """Two linear layers with a GELU between them, applied to each position separately."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.fc = nn.Linear(config.emb_dim, 4 * config.emb_dim)
        self.out_proj = nn.Linear(4 * config.emb_dim, config.emb_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)  # (B, T, 4 C)
        x = gelu(x)
        return self.out_proj(x)  # (B, T, C)


class Block(nn.Module):
    """Attention moves information between positions, then the MLP works on each. Both are added to
    the residual stream x.

    Pre-norm: the input of each branch is normalised, the residual stream itself never is.
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

    def forward(self, x: Tensor, kernel: AttentionKernel | None = None) -> Tensor:
        """x (B, T, C) -> (B, T, C). kernel: see MultiHeadAttention.forward."""
        x = x + self.dropout(self.attn(self.attn_norm(x), kernel))
        x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return x


def head_loss(x: Tensor, weight: Tensor, target_ids: Tensor) -> Tensor:
    """The mean cross-entropy in nats per token, (): x (N, C), weight (V, C), target_ids (N,).

    Targets of -100 do not count.
    """
    logits = F.linear(x, weight)  # (N, V)
    # In fp32 whatever the model runs in: a sum over 50,257 terms loses too much in bf16.
    return F.cross_entropy(logits.float(), target_ids)


class GPT(nn.Module):
    """The whole model. There is no separate head matrix: the head *is* the token embedding."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        # Keep only the input of each block for backward and compute the rest again there: a third
        # more work in far less memory (Chen et al. 2016).
        self.activation_checkpointing = False
        self.head_loss = head_loss  # training may set another implementation, with less memory
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
                std = residual_std if name.endswith("out_proj") else 0.02
                nn.init.normal_(module.weight, std=std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()

    def forward(
        self,
        input_ids: Tensor,
        target_ids: Tensor | None = None,
        layer_kernel: LayerKernel | None = None,
        positions: Tensor | None = None,
        logits_at: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """input_ids (B, T) -> (logits (B, T, V), None), or with target_ids (B, T) -> (None, loss).

        The loss is the mean cross-entropy in nats per token, see `head_loss`. For `layer_kernel`,
        `positions` and the limit on T see `hidden_states`. logits_at (B,): the index of one token
        in each row; the logits are computed for these only, (B, 1, V).
        """
        x = self.hidden_states(input_ids, layer_kernel, positions)  # (B, T, C)
        if target_ids is not None:
            x, target_ids = x.flatten(0, 1), target_ids.flatten()  # (B T, C), (B T,)
            return None, self.head_loss(x, self.token_emb.weight, target_ids)
        if logits_at is not None:
            rows = torch.arange(len(x), device=x.device)  # (B,)
            x = x[rows, logits_at][:, None]  # (B, 1, C)
        return self.logits(x), None

    def hidden_states(
        self,
        input_ids: Tensor,
        layer_kernel: LayerKernel | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """input_ids (B, T) -> the input of the head, (B, T, C).

        layer_kernel: replaces the attention kernel of every layer, see LayerKernel. positions (T,)
        or (B, T): the position of each token; 0 to T - 1 by default. Raises ValueError when T
        exceeds the context length.
        """
        num_tokens = input_ids.shape[1]
        if num_tokens > self.config.context_length:
            raise ValueError(
                f"{num_tokens} tokens do not fit into context_length={self.config.context_length}"
            )
        if positions is None:
            positions = torch.arange(num_tokens, device=input_ids.device)  # (T,)
        x = self.dropout(self.token_emb(input_ids) + self.pos_emb(positions))  # (B, T, C)
        for layer, block in enumerate(self.blocks):
            kernel = functools.partial(layer_kernel, layer) if layer_kernel else None
            if self.activation_checkpointing and self.training:
                x = checkpoint(block, x, kernel, use_reentrant=False)
            else:
                x = block(x, kernel)
        return self.final_norm(x)

    def logits(self, x: Tensor) -> Tensor:
        """x (B, T, C) -> (B, T, V), the scores of all tokens of the vocabulary as the next one."""
        return F.linear(x, self.token_emb.weight)

    @torch.no_grad()
    def capture_attention(self, input_ids: Tensor, callback: AttentionCallback) -> None:
        """Calls callback(layer, attn_weights, attn_scores), both (B, H, T, T) in fp32, for each
        layer sequentially, on input_ids (B, T).

        Without dropout, gradients or random numbers; the mode is restored. The tensors of one layer
        are freed before the next layer unless the callee keeps them. Goes through forward, whose
        hooks gather the parameters of a sharded model.
        """

        def capturing(layer: int, queries: Tensor, keys: Tensor, values: Tensor, _) -> Tensor:
            attn_scores = causal_attn_scores(queries, keys)  # (B, H, T, T)
            attn_weights = attn_scores.softmax(dim=-1)  # (B, H, T, T)
            callback(layer, attn_weights, attn_scores)
            return attn_weights.to(values.dtype) @ values  # (B, H, T, D)

        was_training = self.training
        self.eval()
        try:
            first = input_ids.new_zeros(len(input_ids))  # the logits are not needed
            self(input_ids, layer_kernel=capturing, logits_at=first)
        finally:
            self.train(was_training)

    def attn_weights(self, input_ids: Tensor) -> list[Tensor]:
        """The attention weights of all layers on input_ids (B, T): L of (B, H, T, T), fp32, CPU."""
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
