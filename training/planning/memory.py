"""How much memory a training step needs on each device, by formula: nothing is allocated.

    job = Job(config, "single", world_size=1, precision="bf16", device="cuda", compiled=True)
    sum(estimate(job, windows=8).values())        # bytes

Tests compare the formulas with what autograd keeps and what is allocated; docs/planning.md compares
the totals with measured peaks. Terms below one or two percent of the total are omitted: biases,
the statistics of norms, gradients of single matrices.

Shapes: B windows of a micro-batch, T tokens of a window, C emb_dim, H heads, L layers,
V vocabulary, P parameters. c is the bytes of a number in the matrix products: 4 in fp32, 2 in bf16
and fp16.
"""

from collections.abc import Callable
from dataclasses import dataclass

from training.config.schema import Config, ModelSettings

LOGITS_AT_ONCE = 2**28  # as in training/ops/cross_entropy.py, which needs torch
USABLE = 0.92  # of a device's memory; the rest is left for fragments and other programs
# Memory that the allocator holds and cannot use, as a fraction of all that is allocated. On a CPU,
# training keeps freed memory (training/distributed/device.py): 10 to 28 % in measured runs, 20 % on
# average (docs/planning.md). For the caching allocator of a GPU 5 % is assumed, not measured.
SLACK = {"cpu": 0.20, "cuda": 0.05}
# The process without a model. On a CPU the libraries and a small text, measured; on a GPU the
# context and the workspaces of cuBLAS, assumed.
LIBRARIES = {"cpu": 0.37e9, "cuda": 0.6e9}
NCCL = 0.6e9  # its buffers on a GPU when there are several ranks: assumed
# What an estimate is made of.
PARTS = {
    "weights": "fp32",
    "gradients": "fp32",
    "optimizer": "moments, fp32",
    "casts": "of the weights, in the precision of the products",
    "gathered": "weights of other ranks, while they are needed",
    "activations": "kept by forward for backward",
    "logits": "of the cross-entropy, a piece at a time",
    "working": "gradients in flight, buffers of collectives",
    "slack": "lost by the allocator",
    "libraries": "the process without a model",
}


@dataclass(frozen=True)
class Job:
    """A training run: all that its memory depends on, apart from the micro-batch."""

    config: Config
    strategy: str  # single | ddp | fsdp
    world_size: int
    precision: str  # fp32 | bf16 | fp16
    device: str  # cpu | cuda | mps
    compiled: bool  # the model, with FSDP its blocks

    @property
    def c(self) -> int:
        """Bytes of a number in the matrix products."""
        return {"fp32": 4, "bf16": 2, "fp16": 2}[self.precision]

    @property
    def sharded(self) -> bool:
        return self.strategy == "fsdp"

    @property
    def windows_per_rank(self) -> int:
        """Windows of a step on one device."""
        return self.config.trainer.batch_size // self.world_size


def estimate(job: Job, windows: int) -> dict[str, float]:
    """Bytes on one device, by part, at the peak of a step with micro-batches of `windows`.

    Three moments of a step are compared; the largest sum is the peak. At the end of the forward the
    loss and its gradient are computed in pieces. When the backward reaches the last block, all
    activations are there, and the head's gradient. At its end all gradients are there, and the two
    parts of the embedding's are being added. The optimizer's step (fused, in place) needs no more.

    Gradients are None after a step and grow in the backward. Before it they exist with DDP, whose
    buckets they are views of, and in all micro-batches but the first: with DDP in addition to the
    buckets. FSDP reduces in the last micro-batch only; until then every rank holds all of them
    unsharded.
    """
    model, kind = job.config.model, "cpu" if job.device == "cpu" else "cuda"
    positions = windows * job.config.data.max_length  # B T
    parameters, share = 4 * num_parameters(model), 1 / job.world_size if job.sharded else 1
    embedding = 4 * model.vocab_size * model.emb_dim  # and the head
    before = parameters * ((windows < job.windows_per_rank) + (job.strategy == "ddp"))
    kept = activations(job, windows)
    at_loss = {"gradients": before, "casts": casts(job), "activations": kept}
    at_loss["logits"] = head(job, positions)
    # In the MLP the gradients of the residual stream, of the branch, after and before GELU.
    in_flight = (4 + 9 * job.c) * positions * model.emb_dim
    at_last_block = at_loss | {"logits": 0, "working": embedding + in_flight}
    if job.config.trainer.activation_checkpointing:
        at_last_block |= {"casts": 0, "activations": kept + block_activations(job, windows)}
    at_end = {"gradients": before or parameters * share, "working": embedding}
    parts = dict.fromkeys(PARTS, 0.0)
    parts |= {"weights": parameters * share, "optimizer": optimizer_state(job) * share}
    parts["gathered"] = gathered_parameters(job)
    parts |= max(at_loss, at_last_block, at_end, key=lambda moment: sum(moment.values()))
    parts["slack"] = SLACK[kind] * sum(parts.values())
    parts["libraries"] = LIBRARIES[kind] + NCCL * (job.device == "cuda" and job.world_size > 1)
    return parts


def fits(job: Job, windows: int, memory: float) -> bool:
    """Whether a step with micro-batches of `windows` fits into the memory of a device, in bytes."""
    return sum(estimate(job, windows).values()) <= USABLE * memory


# ------------------------------------------------------------------------------- parameters


def block_matrices(model: ModelSettings) -> int:
    """Numbers in the six matrices of one block: four of (C, C), two of (C, 4 C)."""
    return 12 * model.emb_dim**2


def root_parameters(model: ModelSettings) -> int:
    """Parameters outside the blocks: (V, C) tokens, (context, C) positions, the last norm."""
    return (model.vocab_size + model.context_length + 2) * model.emb_dim


def num_parameters(model: ModelSettings) -> int:
    """P. A block has biases and two norms of 2 C besides its matrices."""
    vectors = (13 if model.qkv_bias else 10) * model.emb_dim
    return model.num_layers * (block_matrices(model) + vectors) + root_parameters(model)


def optimizer_state(job: Job) -> int:
    """Bytes of the optimizer's moments on all ranks together: two in fp32 for each parameter, with
    Muon one for those in the matrices of the blocks."""
    model = job.config.model
    of_muon = block_matrices(model) * model.num_layers if job.config.optimizer.name == "muon" else 0
    return 8 * num_parameters(model) - 4 * of_muon


def casts(job: Job) -> int:
    """Bytes of the matrices in the precision of the products.

    Autocast casts each once per forward. The copies that backward needs live until it has used
    them. FSDP gathers blocks that are cast already.
    """
    if job.precision == "fp32":
        return 0
    model = job.config.model
    of_blocks = 0 if job.sharded else block_matrices(model) * model.num_layers
    return 2 * (of_blocks + model.vocab_size * model.emb_dim)


def gathered_parameters(job: Job) -> int:
    """FSDP: bytes of parameters of other ranks.

    The root (embeddings, last norm) in fp32 from its first use to its last, and all blocks without
    reshard_after_forward; else two blocks, one computed and one in flight, and that one's receive
    buffer.
    """
    if not job.sharded:
        return 0
    model = job.config.model
    blocks = 3 if job.config.parallel.reshard_after_forward else model.num_layers
    return 4 * root_parameters(model) + blocks * job.c * block_matrices(model)


# -------------------------------------------------------------------------------- activations


def block_activations(job: Job, windows: int) -> float:
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
        1 x 2   the masks of both dropouts

    A kernel that writes the attention weights keeps for each, B H T T numbers, the softmax's result
    in fp32, the mask of its dropout, and what is multiplied by the values, unless that is the
    softmax's result. On a CPU sdpa with dropout is one of these (training/ops/cpu.py).
    """
    model, c, length = job.config.model, job.c, job.config.data.max_length
    has_dropout = model.dropout > 0
    inputs = 1 if job.precision == "fp32" or job.compiled else 3
    per_channel = 8 + (inputs + 13) * c + 2 * has_dropout
    fused = model.attention == "flex" or (
        model.attention == "sdpa" and not (job.device == "cpu" and has_dropout)
    )
    is_copied = has_dropout or job.precision != "fp32"
    mask = 4 if job.device == "cpu" and model.attention != "sdpa" and not job.compiled else 1
    per_weight = 0 if fused else 4 + mask * has_dropout + c * is_copied
    positions = windows * length
    return positions * (per_channel * model.emb_dim + per_weight * model.num_heads * length)


def activations(job: Job, windows: int) -> float:
    """Bytes that a forward keeps for backward, without the logits and copies of weights.

    L blocks, of which checkpointing keeps the fp32 inputs alone (Chen et al. 2016); around them
    the dropout mask of the embeddings and the last norm's input.
    """
    model = job.config.model
    channels = windows * job.config.data.max_length * model.emb_dim  # B T C
    checkpointing = job.config.trainer.activation_checkpointing
    of_block = 4 * channels if checkpointing else block_activations(job, windows)
    return model.num_layers * of_block + (4 + (model.dropout > 0)) * channels


def head(job: Job, positions: int) -> int:
    """Bytes of logits and the head's gradients while the loss is computed.

    A piece of n positions at a time (training/ops/cross_entropy.py): logits c n V, which become
    their gradient. On a GPU also their log-softmax, 4 n V, compiled c n V; on a CPU that of a few
    rows only. Then the gradient of the matrix, c V C. What the head reads, and its gradient.
    """
    model, c = job.config.model, job.c
    logits = min(positions, LOGITS_AT_ONCE // model.vocab_size) * model.vocab_size
    log_softmax = 0
    if job.device != "cpu":  # FSDP compiles blocks only
        log_softmax = (c if job.compiled and not job.sharded else 4) * logits
    of_matrix = c * model.vocab_size * model.emb_dim
    return c * logits + max(log_softmax, of_matrix) + (4 + 2 * c) * positions * model.emb_dim


# ----------------------------------------------------------------------------- micro-batches


def largest_micro_batch(share: int, fits: Callable[[int], bool]) -> int | None:
    """The largest divisor of `share`, a device's windows per step, for which fits(windows) holds.

    A divisor, so that all micro-batches have one size. None when not even one window fits.
    """
    return next((n for n in range(share, 0, -1) if share % n == 0 and fits(n)), None)
