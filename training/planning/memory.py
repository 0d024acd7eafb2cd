"""How much memory a training step needs on each device, by formula: nothing is allocated.

    from training.planning.memory import estimate
    estimate(ModelConfig(), windows=8, length=1024).total        # bytes

Tests compare the formulas with what autograd keeps and what is allocated; docs/scaling.md compares
the totals with measured peaks.

What is alive is followed through four moments of a step, and the largest sum is the peak. With
`accumulating`, the step is the second of several micro-batches: the first left gradients behind.

    loss            the forward has reached the head, and computes loss and gradient in pieces
    head            the backward begins with the gradient of the head: all activations are there
    last block      the backward is in the last block, the first that it reaches
    end             all gradients are there, and the two parts of the embedding's are being added

Between the last two, activations are freed and gradients are allocated, both evenly, so the peak
is at one of the two ends. The optimizer's step (fused, in place) needs no more than `end`.

Shapes: B windows of a micro-batch, T tokens of a window, C emb_dim, H heads, L layers,
V vocabulary, P parameters. c is the bytes of a number in the matrix products: 4 in fp32, 2 in bf16
and fp16.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from training.ops.piece_sizes import CACHED, LOGITS_AT_ONCE

if TYPE_CHECKING:
    from model import ModelConfig
    from training.config.schema import ModelSettings

    Model = ModelConfig | ModelSettings

USABLE = 0.92  # of a device's memory; the rest is left for fragments and other programs
# Memory that the allocator holds and cannot use, as a share of all that is allocated. On a CPU,
# training keeps freed memory (training/distributed/device.py): 10 to 36 % in measured runs, 20 % on
# average (docs/scaling.md). For the caching allocator of a GPU 5 % is assumed, not measured.
SLACK = {"cpu": 0.20, "cuda": 0.05}
# The process without a model. On a CPU the libraries and a small text, measured; on a GPU the
# context and the workspaces of cuBLAS, assumed.
LIBRARIES = {"cpu": 0.37e9, "cuda": 0.6e9}
# The buffers of NCCL on a GPU when there are several ranks: assumed.
NCCL = 0.6e9
# Fields of Memory that differ between the moments of a step.
PARTS = ("gradients", "casts", "gathered", "activations", "logits", "working")


@dataclass(frozen=True)
class Step:
    """A training step on one device: all that its memory depends on."""

    model: "Model"
    windows: int  # B, of one micro-batch on this device
    length: int  # T
    precision: str = "bf16"  # fp32 | bf16 | fp16
    strategy: str = "single"  # single | ddp | fsdp
    world_size: int = 1
    accumulating: bool = False  # whether a step has several micro-batches
    activation_checkpointing: bool = False
    reshard_after_forward: bool = True
    device: str = "cuda"  # cpu | cuda
    compiled: bool = False  # the model, with FSDP its blocks
    optimizer: str = "adamw"  # adamw | muon

    @property
    def c(self) -> int:
        """Bytes of a number in the matrix products."""
        return {"fp32": 4, "bf16": 2, "fp16": 2}[self.precision]

    @property
    def sharded(self) -> bool:
        return self.strategy == "fsdp"

    @property
    def shards(self) -> int:
        """Ranks that share the parameters, gradients and moments."""
        return self.world_size if self.sharded else 1

    @property
    def positions(self) -> int:
        """B T."""
        return self.windows * self.length

    @property
    def channels(self) -> int:
        """B T C."""
        return self.positions * self.model.emb_dim

    @property
    def writes_weights(self) -> bool:
        """Whether attention forms its (B, H, T, T) weights. PyTorch's fused kernel for CPUs does
        not support dropout; its general one, which does, forms them."""
        if self.model.attention == "sdpa":
            return self.device == "cpu" and self.model.dropout > 0
        return self.model.attention != "flex"


@dataclass(frozen=True)
class Memory:
    """Bytes on one device at the peak of a step, by part."""

    weights: float  # fp32 parameters; with FSDP this rank's shard
    gradients: float
    optimizer: float  # AdamW's two moments, Muon's one, fp32
    casts: float  # copies of the weights in the precision of the matrix products
    gathered: float  # FSDP: parameters of other ranks while they are used
    activations: float  # what forward keeps for backward, without the logits
    logits: float  # of a piece of the positions, and the head's gradient from them
    working: float  # temporary: gradients of activations, buffers of collectives
    slack: float  # what the allocator holds and cannot use
    libraries: float  # the process without a model
    moment: str  # of the peak: loss | head | last block | end

    @property
    def total(self) -> float:
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """The parts by name, in bytes."""
        return {name: value for name, value in asdict(self).items() if name != "moment"}


def estimate(model: "Model", windows: int, length: int, **options) -> Memory:
    """The peak of a training step on one device. options: the other fields of Step."""
    step = Step(model, windows, length, **options)
    weights, moments = weights_and_moments(step)
    moment, parts = max(_peaks(step).items(), key=lambda item: sum(item[1]))
    kind = "cpu" if step.device == "cpu" else "cuda"
    return Memory(
        weights=weights,
        optimizer=moments,
        slack=SLACK[kind] * (weights + moments + sum(parts)),
        libraries=LIBRARIES[kind] + NCCL * (step.device == "cuda" and step.world_size > 1),
        moment=moment,
        **dict(zip(PARTS, parts, strict=True)),
    )


def _peaks(step: Step) -> dict[str, tuple[float, ...]]:
    """For each moment of a step, the bytes of the PARTS, which come and go.

    Gradients are None after a step and grow in the backward. Before it they exist with DDP, whose
    buckets they are views of, and when accumulating: with DDP in addition to the buckets, as only
    the last micro-batch makes views of them. FSDP reduces in the last micro-batch only; until then
    every rank holds all of them unsharded.
    """
    of_parameters = 4 * num_parameters(step.model)
    before = of_parameters * (step.accumulating + (step.strategy == "ddp"))
    of_blocks, of_head, again = casts(step)
    root, in_flight = gathered_parameters(step)
    kept, recomputed, for_backward = activations(step), 0, of_blocks
    if step.activation_checkpointing:
        recomputed, for_backward = block_activations(step), 0
    logits, gradients_of_head = head(step)
    in_block, at_end = working_of_block(step), working_at_end(step, before > 0)
    all_gathered = root + in_flight
    return {
        "loss": (before, of_blocks + of_head, root, kept, logits, 0),
        "head": (before, for_backward, root, kept, 0, gradients_of_head),
        "last block": (before, for_backward + again, all_gathered, kept + recomputed, 0, in_block),
        "end": (before or of_parameters / step.shards, again, all_gathered, 0, 0, at_end),
    }


# ------------------------------------------------------------------------------- parameters


def block_matrices(model: "Model") -> int:
    """Numbers in the six matrices of one block: four of (C, C), two of (C, 4 C)."""
    return 12 * model.emb_dim**2


def block_parameters(model: "Model") -> int:
    """Parameters of one block: those of its six matrices, the biases, two norms of 2 C."""
    return block_matrices(model) + (13 if model.qkv_bias else 10) * model.emb_dim


def root_parameters(model: "Model") -> int:
    """Parameters outside the blocks: (V, C) tokens, (context, C) positions, the last norm."""
    return (model.vocab_size + model.context_length + 2) * model.emb_dim


def num_parameters(model: "Model") -> int:
    return model.num_layers * block_parameters(model) + root_parameters(model)


def weights_and_moments(step: Step) -> tuple[float, float]:
    """Bytes of (weights, the optimizer's moments), which are there all the time.

    4 P and 8 P; of the blocks' matrices 4 with Muon, which updates few of them at a time. With
    FSDP each rank's shard of them (ZeRO, Rajbhandari et al. 2020, section 3.1).
    """
    share = num_parameters(step.model) / step.shards
    weights, moments = 4 * share, 8 * share
    if step.optimizer == "muon":
        moments -= 4 * block_matrices(step.model) * step.model.num_layers / step.shards
    return weights, moments


def casts(step: Step) -> tuple[float, float, float]:
    """Bytes of weights in the precision of the products: (of all blocks, of the head, of one block
    whose forward is computed again in the backward).

    Autocast casts each weight once per forward. The copies that backward needs live until it has
    used them. FSDP gathers blocks that are cast already.
    """
    if step.precision == "fp32":
        return 0, 0, 0
    # Norms and positions take no part in matrix products.
    matrices = block_parameters(step.model) - 4 * step.model.emb_dim
    of_block = 0 if step.sharded else 2 * matrices
    of_head = 2 * step.model.vocab_size * step.model.emb_dim
    again = of_block if step.activation_checkpointing else 0
    return step.model.num_layers * of_block, of_head, again


def gathered_parameters(step: Step) -> tuple[float, float]:
    """FSDP: bytes of other ranks' parameters, (for the whole step, while a block is computed).

    The root (embeddings, last norm) in fp32 from its first use to its last, and all blocks without
    reshard_after_forward; else two blocks, one computed and one in flight, and that one's receive
    buffer.
    """
    if not step.sharded:
        return 0, 0
    root, block = 4 * root_parameters(step.model), step.c * block_parameters(step.model)
    if step.reshard_after_forward:
        return root, 3 * block
    return root + step.model.num_layers * block, 0


# -------------------------------------------------------------------------------- activations


def block_activations(step: Step) -> float:
    """Bytes that one block's forward keeps for its backward, copies of weights not counted.

    Per position and channel, B T C numbers:

        4       input of the first norm: the residual stream, always fp32
        c x 3   the normalised input, cast for each of the three matrices by itself; in fp32, and
                compiled, one tensor that all three share
        c x 3   queries, keys, values
        c       the heads' results, input of the output matrix
        4       input of the second norm
        c       the normalised input of the MLP
        4 c x 2 before and after GELU
        mask x 2  dropout of both branches: 1 byte on a GPU and compiled, c on a CPU

    and 16 B T for the norms' means and deviations. Fused attention also keeps 4 B H T sums. What
    writes the weights out keeps for each the softmax's result in fp32, with dropout its mask, and
    what is multiplied by the values; sdpa with dropout on a CPU is one of these and computes in
    fp32 whatever the inputs are.
    """
    model, c, heads = step.model, step.c, step.windows * step.model.num_heads
    casts_of_input = 1 if step.precision == "fp32" or step.compiled else 3
    of_attention, of_heads = c, 4 * heads * step.length
    if step.writes_weights and model.attention == "sdpa":
        of_attention, of_heads = 4, (4 + 4 + 4) * heads * step.length**2
    elif step.writes_weights:
        mask = (1 if step.device == "cuda" else 4) if model.dropout > 0 else 0
        multiplied = 0 if step.precision == "fp32" and model.dropout == 0 else c
        # And the causal mask, bool.
        of_heads = (4 + mask + multiplied) * heads * step.length**2 + step.length**2
    per_channel = 4 + casts_of_input * c + 3 * of_attention + c + 4 + c + 8 * c
    if model.dropout > 0:
        per_channel += 2 * (1 if step.device == "cuda" or step.compiled else c)
    return per_channel * step.channels + 16 * step.positions + of_heads


def activations(step: Step) -> float:
    """Bytes that a forward keeps for backward, without the logits and copies of weights.

    L blocks, of which checkpointing keeps the fp32 inputs alone (Chen et al. 2016); around them
    the dropout mask of the embeddings, the last norm's input, and the ids.
    """
    of_block = 4 * step.channels if step.activation_checkpointing else block_activations(step)
    mask = 1 if step.device == "cuda" or step.compiled else 4  # of the residual stream, fp32
    around = (4 + (mask if step.model.dropout > 0 else 0)) * step.channels
    return step.model.num_layers * of_block + around + 16 * step.positions + 8 * step.length


# ------------------------------------------------------------- the head, and temporary tensors


def head(step: Step) -> tuple[float, float]:
    """Bytes of (logits and the head's gradients while the loss is computed, the gradients of the
    head's matrix and of its input when they are scaled in the backward).

    A piece of n positions at a time (training/ops/cross_entropy.py): logits c n V, which become
    their gradient. On a GPU also their log-softmax, 4 n V, compiled c n V; on a CPU that of a few
    rows, and in autocast their copy in fp32. Then what the head reads, and its gradient. The
    gradient of the matrix from one piece has c V C bytes, the sum over several 4 V C.
    """
    c, vocab_size = step.c, step.model.vocab_size
    matrix = vocab_size * step.model.emb_dim
    at_once = LOGITS_AT_ONCE // vocab_size  # positions of a piece
    logits = min(step.positions, at_once) * vocab_size
    of_sum = 4 * matrix if step.positions > at_once else 0
    if step.device == "cpu":
        in_fp32 = (8 if step.precision != "fp32" else 4) * min(logits, CACHED)
    else:  # FSDP compiles blocks only
        in_fp32 = (c if step.compiled and not step.sharded else 4) * logits
    at_loss = c * logits + max(in_fp32, c * matrix) + of_sum + (4 + 2 * c) * step.channels
    return at_loss, (of_sum or c * matrix) + 4 * matrix + (c + 4) * step.channels


def working_of_block(step: Step) -> float:
    """Bytes that the backward of the last block holds besides what forward kept.

    In the MLP the gradients of the residual stream (4), of the branch (c), after and before GELU
    (4 c each); in attention that forms its weights three (B, H, T, T) in fp32. The larger of both,
    the gradient of the largest matrix, 4 C^2, as it is computed and as it is kept, and the head's
    gradient, 4 V C, which waits for the embedding's. FSDP: the block's gradients in the precision
    of the products and two fp32 buffers of the reduction.
    """
    model, c = step.model, step.c
    of_mlp = (4 + 9 * c) * step.channels
    of_attention = 12 * step.windows * model.num_heads * step.length**2 * step.writes_weights
    of_matrix = 4 * model.emb_dim**2 * (c + 4 if step.precision != "fp32" else 4)
    reduced = (c + 4 + 4) * block_parameters(model) if step.sharded else 0
    return 4 * model.vocab_size * model.emb_dim + max(of_mlp, of_attention) + of_matrix + reduced


def working_at_end(step: Step, has_gradients: bool) -> float:
    """Bytes of the two parts of the tied embedding's gradient, of which one may be a gradient that
    is counted already; FSDP: the root's gradient and its buffer."""
    needed = 4 * step.model.vocab_size * step.model.emb_dim * (2 if has_gradients else 1)
    return max(needed, 8 * root_parameters(step.model)) if step.sharded else needed


# ----------------------------------------------------------------------------- micro-batches


def largest_micro_batch(share: int, fits: Callable[[int], bool]) -> int | None:
    """The largest divisor of `share`, a device's windows per step, for which fits(windows) holds.

    A divisor, so that all micro-batches have one size. None when not even one window fits.
    """
    divisors = (n for n in range(share, 0, -1) if share % n == 0)
    return next((n for n in divisors if fits(n)), None)
