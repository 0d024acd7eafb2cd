"""GPT-2: token and position embeddings, transformer blocks, output layer and loss.

The file is in reading order. It needs only torch and attention.py, so you can copy the two files
into another project. `GPT(ModelConfig())` is GPT-2 small, with 124,439,808 parameters. Before
training, and for generation, clearhead/compute/specialize.py replaces the loss and some
operations of a model by faster ones for its device, with the same results up to rounding.

    x = token_emb[ids] + pos_emb[0..T-1]
    L times:  x = x + attention(norm(x));  x = x + mlp(norm(x))
    logits = norm(x) @ token_emb^T                   (the output layer is the token embedding)

Shapes: B batch, T positions, C emb_dim, H heads, D head_dim, V vocabulary, L layers.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from attention import KERNELS, NO_DROPOUT, AttentionKernel, MultiHeadAttention

# An attention kernel (attention.py) that also gets the index of the layer that calls it:
# layer_kernel(layer, queries, keys, values, dropout_p) -> context_vec.
LayerKernel = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
# callback(layer, attn_weights, attn_scores, value_norms) receives the attention of one layer:
# (B, H, T, T), (B, H, T, T) and (B, H, T).
AttentionCallback = Callable[[int, Tensor, Tensor, Tensor], None]


@dataclass
class ModelConfig:
    """The sizes and options of a GPT. The defaults are GPT-2 small (Radford et al. 2019)."""

    vocab_size: int = 50257  # V
    context_length: int = 1024  # maximum number of tokens; each position has a learned vector
    emb_dim: int = 768  # C
    num_heads: int = 12  # H
    num_layers: int = 12  # L
    dropout: float = 0.1  # of embeddings, attention weights, and the outputs of attention and MLP
    qkv_bias: bool = True  # biases of the query, key and value projections
    attention: str = "sdpa"  # name of the attention kernel; all kernels use the same parameters

    def __post_init__(self):
        sizes = ("vocab_size", "context_length", "emb_dim", "num_heads", "num_layers")
        if any(getattr(self, key) < 1 for key in sizes) or self.emb_dim % self.num_heads:
            raise ValueError(f"{self}: sizes must be at least 1, emb_dim a multiple of num_heads")
        if self.attention not in KERNELS or not 0 <= self.dropout < 1:
            raise ValueError(f"{self}: attention must be one of {list(KERNELS)}, dropout below 1")
        if self.attention in NO_DROPOUT and self.dropout > 0:
            raise ValueError(f"attention={self.attention!r} has no dropout; use dropout=0")


def gelu(x: Tensor) -> Tensor:
    """Computes GELU (Hendrycks and Gimpel 2016) with the tanh approximation, as GPT-2 does.

    x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3).
    """
    if torch.compiler.is_compiling():
        # (1 + tanh(u)) / 2 = sigmoid(2 u), which takes a third of the time when compiled for a CPU.
        # Without compilation, bf16 would round the result of every operation, so F.gelu is used.
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
    """A transformer block: x = x + attention(norm(x)), then x = x + mlp(norm(x)).

    Attention moves information between positions. The MLP processes each position separately.
    The sum x is called the residual stream, and the two added terms are its branches. Pre-norm: the
    input of each branch is normalised; the residual stream itself is not.
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
        """x (B, T, C) -> (B, T, C). kernel: replaces the attention kernel in this call."""
        x = x + self.dropout(self.attn(self.attn_norm(x), kernel))
        x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return x


def head_loss(x: Tensor, weight: Tensor, target_ids: Tensor) -> Tensor:
    """Computes the logits, then the mean cross-entropy in nats per token, a scalar.

    x (N, C), weight (V, C), target_ids (N,). A target of -100 is ignored.
    """
    logits = F.linear(x, weight)  # (N, V)
    # Always in fp32: in bf16, the sum of 50,257 terms would be too inaccurate.
    return F.cross_entropy(logits.float(), target_ids)


class GPT(nn.Module):
    """The complete model. Its output layer uses the weights of the token embedding."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        # True: store only the input of each block and compute its activations again in backward.
        # A third more computation, far less memory (Chen et al. 2016).
        self.activation_checkpointing = False
        self.head_loss = head_loss  # `specialize` replaces it by one that needs less memory
        self.token_emb = nn.Embedding(config.vocab_size, config.emb_dim)
        self.pos_emb = nn.Embedding(config.context_length, config.emb_dim)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.emb_dim, eps=1e-5)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self, normal_: Callable[..., object] = nn.init.normal_) -> None:
        """Initialises all parameters as GPT-2 does. normal_(parameter, std=...) draws values.

        token_emb, pos_emb, W_query, W_key, W_value, mlp.fc    normal(0, 0.02)
        attn.out_proj, mlp.out_proj                            normal(0, 0.02 / sqrt(2 L))
        biases                                                 0
        norms                                                  weight 1, bias 0

        Each of the 2 L branches adds its output to the residual stream. The factor 1 / sqrt(2 L)
        keeps the variance of the sum from growing with L (Radford et al. 2019, section 2.3).
        """
        residual_std = 0.02 / math.sqrt(2 * self.config.num_layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                std = residual_std if name.endswith("out_proj") else 0.02
                normal_(module.weight, std=std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                normal_(module.weight, std=0.02)
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

        The loss is the mean cross-entropy in nats per token. logits_at (B,): the index of one token
        in each row; logits are then computed only for these tokens, (B, 1, V). `layer_kernel`,
        `positions` and the maximum of T: see `hidden_states`.
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
        """input_ids (B, T) -> the input of the output layer, (B, T, C).

        layer_kernel: replaces the attention kernel of every layer, see LayerKernel. positions (T,)
        or (B, T): the position of each token; 0 to T - 1 by default. Raises ValueError when T is
        greater than context_length.
        """
        num_tokens = input_ids.shape[1]
        if num_tokens > self.config.context_length:
            raise ValueError(
                f"{num_tokens} tokens are more than context_length={self.config.context_length}"
            )
        if positions is None:
            positions = torch.arange(num_tokens, device=input_ids.device)  # (T,)
        x = self.dropout(self.token_emb(input_ids) + self.pos_emb(positions))  # (B, T, C)
        for layer, block in enumerate(self.blocks):
            kernel = None if layer_kernel is None else functools.partial(layer_kernel, layer)
            if self.activation_checkpointing and self.training:
                x = checkpoint(block, x, kernel, use_reentrant=False)
            else:
                x = block(x, kernel)
        return self.final_norm(x)

    def logits(self, x: Tensor) -> Tensor:
        """x (B, T, C) -> logits (B, T, V), a score for each token of the vocabulary."""
        return F.linear(x, self.token_emb.weight)

    @torch.no_grad()
    def capture_attention(
        self,
        input_ids: Tensor,
        callback: AttentionCallback,
        logits_at: Tensor | None = None,
    ) -> Tensor:
        """Runs the model on input_ids (B, T), passes the attention of each layer to a callback, and
        returns the logits (B, T, V).

        callback(layer, attn_weights, attn_scores, value_norms) is called for layer 0, 1, ... The
        tensors, (B, H, T, T) twice and (B, H, T), are fp32 and are freed before the next layer
        unless the callback stores them. logits_at: see `forward`. The model is in eval mode during
        the call. With FSDP, the hooks of self(...) gather the sharded parameters.
        """

        def capturing(layer: int, queries: Tensor, keys: Tensor, values: Tensor, _) -> Tensor:
            attn = cast(MultiHeadAttention, self.blocks[layer].attn)
            attn_scores = attn.attn_scores(queries, keys)  # (B, H, T, T)
            attn_weights = attn_scores.softmax(dim=-1)  # (B, H, T, T)
            value_norms = attn.value_norms(values)  # (B, H, T)
            callback(layer, attn_weights, attn_scores, value_norms)
            return attn_weights.to(values.dtype) @ values  # (B, H, T, D)

        was_training = self.training
        self.eval()
        try:
            logits, _ = self(input_ids, layer_kernel=capturing, logits_at=logits_at)
            return logits
        finally:
            self.train(was_training)

    def attn_weights(self, input_ids: Tensor) -> list[Tensor]:
        """Returns one tensor of attention weights per layer, (B, H, T, T) each, on the CPU."""
        layers: list[Tensor] = []
        self.capture_attention(input_ids, lambda _, weights, *__: layers.append(weights.cpu()))
        return layers

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, num_tokens: int) -> float:
        """Returns the FLOPs of training, forward and backward, per token of a window of T tokens.

        6 (12 L C^2 + V C) + 6 L C (T + 1). The factor 6 is two FLOPs for each multiply-add, times
        three: the backward pass costs twice as much as the forward pass. Only the unmasked half of
        the attention matrix is counted. Embedding look-ups, padding and recomputation are not
        counted.
        """
        c = self.config
        matrices = 12 * c.num_layers * c.emb_dim**2 + c.vocab_size * c.emb_dim
        return 6 * matrices + 6 * c.num_layers * c.emb_dim * (num_tokens + 1)


def model_without_values(config: ModelConfig) -> GPT:
    """Returns a model on the meta device: parameters with names and shapes, but without memory."""
    with torch.device("meta"), _SkipNormal():
        return GPT(config)


class _SkipNormal(TorchFunctionMode):
    """Skips normal_: on the meta device, it imports torch's compiler, which takes seconds."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (nn.init.normal_, Tensor.normal_):
            return None
        return func(*args, **(kwargs or {}))
