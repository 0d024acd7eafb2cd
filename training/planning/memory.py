"""How much memory a training step needs on each device, by formula: nothing is allocated.

    from training.planning.memory import estimate, largest_micro_batch
    estimate(ModelConfig(), windows=8, length=1024).total        # bytes

Needs nothing. Used by scripts/plan.py before a machine is rented and where memory is chosen or has
run out. Tests compare the formulas with what autograd keeps; docs/scaling.md holds
their sum against measured peaks.

What is alive is followed through four moments of a step, and the largest is the peak. With
`accumulating`, the step is the second of several micro-batches: the first left gradients behind.

    loss            the forward has come to the head, and computes loss and gradient in pieces
    head            the backward begins, with the gradient of the head: all that was kept is there
    last block      the backward is in the last block, the first that it comes to
    end             all gradients are there, and the embedding's two parts are being added

Between the last two, activations go and gradients come, both evenly, so that the peak is at one
of the two ends. The optimizer's step (fused, in place) needs no more than `end`.

Shapes: B windows of a micro-batch, T tokens of a window, C emb_dim, H heads, L layers,
V vocabulary, P parameters. c is the bytes of a number in the products: 4 in fp32, 2 in bf16 and
fp16.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Protocol

# Of the loss (training/ops/cross_entropy.py):
LOGITS_AT_ONCE = 2**28  # enough to keep a GPU busy; half a gigabyte in bf16
CACHED = 2**19  # on a CPU, between two products
USABLE = 0.92  # of a device's memory; what is left is for fragments and for others
# What the heap cannot use again, as a share of all that is allocated. On a CPU, training keeps
# freed memory (training/distributed/device.py) and the heap has holes: 10 to 36 % in the runs that
# were measured, 20 % on average (docs/scaling.md). For the caching allocator of a GPU 5 % is
# assumed: not measured yet.
SLACK = {"cpu": 0.20, "cuda": 0.05}
# The process without a model. On a CPU the libraries and a small text, measured; on a GPU the
# context and the workspaces of cuBLAS, assumed.
LIBRARIES = {"cpu": 0.37e9, "cuda": 0.6e9}
# The buffers of NCCL on a GPU, where there are several ranks: assumed.
NCCL = 0.6e9


class Model(Protocol):
    """What of model.ModelConfig is asked for."""

    vocab_size: int
    context_length: int
    emb_dim: int
    num_heads: int
    num_layers: int
    dropout: float
    qkv_bias: bool
    attention: str


@dataclass(frozen=True)
class Memory:
    """Bytes on one device at the peak of a step, by part."""

    weights: float  # fp32 parameters; with FSDP this rank's share
    gradients: float
    optimizer: float  # AdamW's two moments, Muon's one, fp32
    casts: float  # copies of the weights in the precision of the products
    gathered: float  # FSDP: parameters of other ranks, as long as they are computed with
    activations: float  # what forward keeps for backward, without the logits
    logits: float  # of a piece of the positions, and the head's gradient from them
    working: float  # what lives for a moment: gradients on their way, buffers of collectives
    slack: float  # what the allocator holds and cannot use
    libraries: float  # the process without a model
    moment: str  # when: loss | head | last block | end

    @property
    def total(self) -> float:
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """The parts by name, in bytes."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "moment"}


# ------------------------------------------------------------------------------- parameters


def block_matrices(model: Model) -> int:
    """Numbers in the six matrices of one block: four of (C, C), two of (C, 4 C)."""
    return 12 * model.emb_dim**2


def block_parameters(model: Model) -> int:
    """Parameters of one block: those of its six matrices, the biases, two norms of 2 C."""
    c = model.emb_dim
    return block_matrices(model) + (3 if model.qkv_bias else 0) * c + 6 * c + 4 * c


def root_parameters(model: Model) -> int:
    """Parameters outside the blocks: (V, C) tokens, (context, C) positions, the last norm."""
    return (model.vocab_size + model.context_length + 2) * model.emb_dim


def num_parameters(model: Model) -> int:
    return model.num_layers * block_parameters(model) + root_parameters(model)


def oversized(model: Model) -> str:
    """The setting of a ModelConfig that is furthest above its default, that of GPT-2 small."""
    keys = ("vocab_size", "context_length", "emb_dim", "num_layers")
    return max(keys, key=lambda key: getattr(model, key) / getattr(type(model), key))


def width(precision: str) -> int:
    """Bytes of a number in the products. precision: fp32 | bf16 | fp16."""
    return {"fp32": 4, "bf16": 2, "fp16": 2}[precision]


# ------------------------------------------------------------------------------ activations


def block_activations(
    model: Model,
    windows: int,
    length: int,
    precision: str = "bf16",
    device: str = "cuda",
    compiled: bool = False,
) -> float:
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
        mask x 2  dropout of both branches: 1 byte on a GPU and compiled, c as CPUs do it

    and 16 B T for the norms' means and deviations. Fused attention keeps 4 B H T sums besides. What
    writes the weights out keeps numbers by B H T T, see `_pairs`; one of these is sdpa with
    dropout on a CPU, which computes in fp32 whatever the inputs are.
    """
    c, dropout = width(precision), model.dropout > 0
    places = windows * length * model.emb_dim
    casts_of_input = 1 if precision == "fp32" or compiled else 3
    written_out = writes_weights(model, device)
    of_attention = 4 if written_out and model.attention == "sdpa" else c
    per_place = 4 + casts_of_input * c + 3 * of_attention + c + 4 + c + 8 * c
    if dropout:
        per_place += 2 * (1 if device == "cuda" or compiled else c)
    heads = windows * model.num_heads
    if written_out:
        of_heads = _pairs(model, precision, device) * heads * length**2
        of_heads += length**2 if model.attention != "sdpa" else 0  # the mask, bool
    else:
        of_heads = 4 * heads * length
    return per_place * places + 16 * windows * length + of_heads


def writes_weights(model: Model, device: str) -> bool:
    """Whether attention forms its (B, H, T, T) weights. PyTorch's fused kernel for CPUs knows no
    dropout, and the general one does."""
    if model.attention == "sdpa":
        return device == "cpu" and model.dropout > 0
    return model.attention != "flex"


def _pairs(model: Model, precision: str, device: str) -> float:
    """Bytes kept for each pair of positions, where the weights are formed.

    The softmax's result in fp32. With dropout its mask, and the dropped weights. The formula's
    kernels cast them to the products' precision; sdpa stays in fp32.
    """
    mask = 1 if device == "cuda" else 4
    if model.attention == "sdpa":
        return 4 + 4 + 4
    dropped = 0 if precision == "fp32" and model.dropout == 0 else width(precision)
    return 4 + (mask if model.dropout > 0 else 0) + dropped


def activations(
    model: Model,
    windows: int,
    length: int,
    precision: str = "bf16",
    device: str = "cuda",
    compiled: bool = False,
    activation_checkpointing: bool = False,
) -> float:
    """Bytes that a forward keeps for backward, without the logits and copies of weights.

    L blocks, of which checkpointing keeps the fp32 inputs alone (Chen et al. 2016); around them
    the dropout mask of the embeddings, the last norm's input, and the ids.
    """
    positions = windows * length
    places = positions * model.emb_dim
    shape = (windows, length, precision, device, compiled)
    a_block = 4 * places if activation_checkpointing else block_activations(model, *shape)
    mask = 0 if model.dropout == 0 else 1 if device == "cuda" or compiled else 4
    around = (4 + mask) * places + 8 * positions  # the residual stream is fp32, and so its mask
    ids = 8 * positions + 8 * length
    return model.num_layers * a_block + around + ids


# --------------------------------------------------------------------------------- the peak


def estimate(
    model: Model,
    windows: int,
    length: int,
    *,
    precision: str = "bf16",
    strategy: str = "single",
    world_size: int = 1,
    accumulating: bool = False,
    activation_checkpointing: bool = False,
    reshard_after_forward: bool = True,
    device: str = "cuda",
    compiled: bool = False,
    optimizer: str = "adamw",
) -> Memory:
    """The peak of a training step on one device.

    windows: B, of one micro-batch on this device. length: T. precision: fp32 | bf16 | fp16.
    strategy: single | ddp | fsdp, over world_size ranks. accumulating: whether a step has several
    micro-batches. device: cpu | cuda. compiled: the model, or with FSDP its blocks. optimizer: by
    its name, adamw | muon.

    Weights, gradients, moments: 4 P, 4 P, 8 P bytes (of the blocks' matrices 4 with Muon, which
    updates few of them at once and needs little else), with FSDP each rank its share of them (ZeRO,
    Rajbhandari et al. 2020, section 3.1, there with fp16 gradients). What is there when:

    gradients   Set to None after a step, so they grow during the backward. Before it they are there
                with DDP, whose buckets they are views of, and when accumulating: with DDP beside
                the buckets, as only the last micro-batch makes views of them; FSDP reduces at
                the last micro-batch alone, and until then every rank holds all of them unsharded.
    casts       Autocast casts each weight once in a forward and forgets it at its end; those that
                backward needs live until it has come past. FSDP gathers blocks cast already.
    logits      A piece of them at a time (training/ops/cross_entropy.py), c n V, which become their
                gradient;
                on a GPU their log-softmax besides, 4 n V, compiled c n V. Of the weight's gradient
                a piece's part, c V C, and, with several pieces, their sum in fp32.
    gathered    FSDP's root (embeddings, last norm) in fp32 from its first use to its last; two
                blocks, one computed and one on its way, and that one's receive buffer.
    working     The tied embedding's gradient comes in two parts of 4 V C, the head's waiting for
                the look-up's. FSDP: a block's gradients in the products' precision and two
                fp32 buffers of the reduction; the root's gradient and its buffer, 4 bytes each.
    """
    c, v_c = width(precision), model.vocab_size * model.emb_dim
    layers, block, root = model.num_layers, block_parameters(model), root_parameters(model)
    everything = num_parameters(model)
    positions = windows * length
    sharded, autocast = strategy == "fsdp", precision != "fp32"
    share = everything / world_size if sharded else everything
    shape = (windows, length, precision, device, compiled)

    weights, moments = 4 * share, 8 * share
    if optimizer == "muon":
        moments -= 4 * block_matrices(model) * layers * share / everything
    kept = activations(model, *shape, activation_checkpointing)
    # Gradients that are there before the backward.
    before = 4 * everything * (accumulating + (strategy == "ddp"))
    # Norms and positions take no part in products.
    of_block = 0 if sharded or not autocast else 2 * (block - 4 * model.emb_dim)
    of_head = 2 * v_c if autocast else 0
    all_casts = layers * of_block + of_head
    for_backward = 0 if activation_checkpointing else layers * of_block
    gathered = 4 * root + (0 if reshard_after_forward else layers * c * block) if sharded else 0
    in_flight = 3 * c * block if sharded and reshard_after_forward else 0

    piece = min(positions, LOGITS_AT_ONCE // model.vocab_size)
    logits = piece * model.vocab_size
    if device == "cpu":  # the log-softmax of a few rows, and a copy of theirs in fp32 before it
        in_fp32 = (8 if autocast else 4) * min(logits, CACHED)
    else:  # FSDP compiles blocks only
        in_fp32 = (c if compiled and not sharded else 4) * logits
    of_part = c * v_c
    of_sum = 4 * v_c if piece < positions else 0
    at_loss = c * logits + max(in_fp32, of_part)
    at_loss += of_sum + (4 + 2 * c) * positions * model.emb_dim  # what the head reads, its gradient
    at_head = (of_sum or of_part) + 4 * v_c + (c + 4) * positions * model.emb_dim

    again = block_activations(model, *shape) if activation_checkpointing else 0
    cast_again = of_block if activation_checkpointing else 0
    in_block = _working_of_block(model, windows, length, precision, device)
    reduced = (c + 4 + 4) * block if sharded else 0
    at_end = 8 * v_c if before else 4 * v_c
    if sharded:
        at_end = max(at_end, 8 * root)
    end_gradients = before or 4 * share

    peaks = {
        "loss": (before, all_casts, gathered, kept, at_loss, 0),
        "head": (before, for_backward, gathered, kept, 0, at_head),
        "last block": (
            before,
            for_backward + cast_again,
            gathered + in_flight,
            kept + again,
            0,
            4 * v_c + in_block + reduced,
        ),
        "end": (end_gradients, cast_again, gathered + in_flight, 0, 0, at_end),
    }
    moment, parts = max(peaks.items(), key=lambda item: sum(item[1]))
    slack = SLACK["cpu" if device == "cpu" else "cuda"] * (weights + moments + sum(parts))
    libraries = LIBRARIES["cpu" if device == "cpu" else "cuda"]
    if device == "cuda" and world_size > 1:
        libraries += NCCL
    gradients, casts, gathered, kept, logits, working = parts
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=moments,
        casts=casts,
        gathered=gathered,
        activations=kept,
        logits=logits,
        working=working,
        slack=slack,
        libraries=libraries,
        moment=moment,
    )


def _working_of_block(
    model: Model, windows: int, length: int, precision: str, device: str
) -> float:
    """Bytes that a block's backward holds besides what forward kept.

    In the MLP the gradients of the residual stream (4), of the branch (c), after and before GELU
    (4 c each); in attention that forms its weights three (B, H, T, T) in fp32. The larger, and the
    gradient of the largest matrix, 4 C^2, as it is computed and as it is kept.
    """
    c = width(precision)
    of_mlp = (4 + 9 * c) * windows * length * model.emb_dim
    pairs = windows * model.num_heads * length**2
    of_attention = 12 * pairs if writes_weights(model, device) else 0
    of_matrix = 4 * model.emb_dim**2 * (4 if precision == "fp32" else c + 4)
    return max(of_mlp, of_attention) + of_matrix


# ----------------------------------------------------------------------------- micro-batches


def largest_micro_batch(share: int, fits: Callable[[int], bool]) -> int | None:
    """The largest divisor of `share`, a device's windows in a step, for which fits(windows) holds.

    A divisor, so that all micro-batches are of one size. None when not even one window fits.
    """
    divisors = (n for n in range(share, 0, -1) if share % n == 0)
    return next((n for n in divisors if fits(n)), None)


def smaller_micro_batch(
    batch_size: int, world_size: int = 1, micro_batch_size: int | str | None = None
) -> int | None:
    """A micro-batch to try when memory has run out; the steps stay the same, the batch is kept.

    batch_size: windows in a step, over all ranks. micro_batch_size: as it is set now; None and
    "auto" stand for the whole share. The largest divisor of the share that is at most half of the
    present one; None when that is one window already.
    """
    share = batch_size // world_size
    present = micro_batch_size if isinstance(micro_batch_size, int) else share
    return largest_micro_batch(share, lambda windows: windows <= present // 2)
