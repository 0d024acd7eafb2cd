"""Memory of a training step, estimated by formulas without allocating anything; and what follows:
the check before a run, the micro-batch size, and the error when memory runs out.

    job = Job(config, "single", world_size=1, precision="bf16", device="cuda", compiled=True)
    sum(estimate(job, windows=8).values())        # bytes

Tests compare the formulas with the tensors that autograd saves and with allocated memory;
docs/results.md compares totals with measured peaks. Terms below one or two percent of the total
are omitted: biases, statistics of norms, gradients of single matrices.

Shapes: B windows per micro-batch, T tokens per window, C emb_dim, H heads, L layers, V vocabulary,
P parameters. c: bytes per element in matrix products, 4 in fp32, 2 in bf16 and fp16.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from clearhead.compute.cross_entropy import rows_at_once
from clearhead.compute.specialize import MAX_UNFUSED_LENGTH
from clearhead.config.schema import Config, ModelSettings
from clearhead.errors import OutOfMemoryError
from clearhead.parallel.hardware import available_memory, memory_of
from clearhead.parallel.strategy import Strategy
from model import GPT, ModelConfig, model_without_values

USABLE = 0.92  # fraction of the memory; the rest is for fragmentation and other programs
# Memory that the allocator holds without use, as a fraction of the allocated memory. On a CPU,
# training keeps freed memory (hardware.py): 10 to 28 % in measured runs, 20 % on
# average (docs/results.md). The 5 % of the caching GPU allocator are assumed, not measured.
SLACK = {"cpu": 0.20, "cuda": 0.05}
# Memory of a process without a model. CPU: libraries and a small text file, measured with a torch
# build for the CPU; a build for CUDA needs 0.3 GB more. GPU: CUDA context and cuBLAS workspaces,
# assumed.
LIBRARIES = {"cpu": 0.37e9, "cuda": 0.6e9}
NCCL = 0.6e9  # buffers of NCCL on a GPU with several ranks, assumed
# Parts of an estimate.
PARTS = {
    "weights": "fp32",
    "gradients": "fp32",
    "optimizer": "moments, fp32",
    "casts": "of the weights, in the precision of the products",
    "gathered": "weights of other ranks, while they are in use",
    "activations": "saved by forward for backward",
    "logits": "of the cross-entropy, in chunks",
    "working": "temporary gradients, buffers of collectives",
    "slack": "unused memory of the allocator",
    "libraries": "the process without a model",
}


@dataclass(frozen=True)
class Job:
    """The properties of a training run that determine its memory, except the micro-batch."""

    config: Config
    strategy: str  # single | ddp | fsdp
    world_size: int
    precision: str  # fp32 | bf16 | fp16
    device: str  # cpu | cuda | mps
    compiled: bool  # the model; with FSDP, its blocks

    @classmethod
    def of(cls, config: Config, strategy: Strategy, compiled: bool) -> "Job":
        device = strategy.device.type
        return cls(config, strategy.name, strategy.world_size, strategy.precision, device, compiled)

    @property
    def c(self) -> int:
        """Bytes per element in matrix products."""
        return {"fp32": 4, "bf16": 2, "fp16": 2}[self.precision]

    @functools.cached_property
    def parameters(self) -> int:
        """P, the number of parameters."""
        return meta_model(self.config.model).num_parameters()

    @functools.cached_property
    def block_matrices(self) -> int:
        """Number of elements of the matrices of all blocks."""
        blocks = meta_model(self.config.model).blocks
        return sum(p.numel() for p in blocks.parameters() if p.dim() == 2)

    @functools.cached_property
    def root_parameters(self) -> int:
        """Number of parameters outside blocks: embeddings and last norm."""
        blocks = meta_model(self.config.model).blocks
        return self.parameters - sum(p.numel() for p in blocks.parameters())

    @property
    def sharded(self) -> bool:
        return self.strategy == "fsdp"

    @property
    def windows_per_rank(self) -> int:
        """Windows per step on one device."""
        return self.config.trainer.batch_size // self.world_size


def estimate(job: Job, windows: int) -> dict[str, float]:
    """Returns the bytes per part on a device at the peak of a step, with `windows` per micro-batch.

    The peak is the largest of three moments. (1) End of forward: the loss and its gradient are
    computed in chunks. (2) Backward reaches the last block: all activations and the gradient of the
    head exist. (3) End of backward: all gradients exist, and both parts of the embedding gradient
    are added. The optimizer step (fused, in place) does not need more.

    Gradients are None after a step. The first backward of a step allocates them. DDP always
    holds buckets of the same size: with one micro-batch, the gradients are views of them; with
    several, they need memory in addition to the buckets. FSDP reduces gradients in the last
    micro-batch only; until then every rank holds all of them unsharded.
    """
    model, kind = job.config.model, "cpu" if job.device == "cpu" else "cuda"
    positions = windows * job.config.data.max_length  # B T
    parameters, share = 4 * job.parameters, 1 / job.world_size if job.sharded else 1
    embedding = 4 * model.vocab_size * model.emb_dim  # and the head
    before = parameters * ((windows < job.windows_per_rank) + (job.strategy == "ddp"))
    kept = activations(job, windows)
    at_loss = {"gradients": before, "casts": casts(job), "activations": kept}
    at_loss["logits"] = head(job, positions)
    # Gradients in the MLP: of the residual stream, of the branch, after and before GELU.
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
    """Returns whether a step with `windows` per micro-batch fits into `memory` bytes."""
    return sum(estimate(job, windows).values()) <= USABLE * memory


# ------------------------------------------------------------------------------- parameters


def meta_model(settings: ModelSettings) -> GPT:
    """Returns the model on the meta device, without memory for its parameters."""
    return model_without_values(ModelConfig(**settings.model_dump()))


def optimizer_state(job: Job) -> int:
    """Returns the bytes of the moments on all ranks together: two in fp32 per parameter; with Muon,
    one for the matrices of the blocks."""
    of_muon = job.block_matrices if job.config.optimizer.name == "muon" else 0
    return 8 * job.parameters - 4 * of_muon


def casts(job: Job) -> int:
    """Returns the bytes of the copies of matrices in the precision of the products. Autocast casts
    each matrix once per forward and keeps the copies that backward needs. FSDP gathers blocks in
    that precision, without copies."""
    if job.precision == "fp32":
        return 0
    model = job.config.model
    of_blocks = 0 if job.sharded else job.block_matrices
    return 2 * (of_blocks + model.vocab_size * model.emb_dim)


def gathered_parameters(job: Job) -> int:
    """Returns the bytes of gathered parameters with FSDP: the root (embeddings, last norm) in fp32,
    and two blocks, the one in use and the next one with its receive buffer."""
    if not job.sharded:
        return 0
    return 4 * job.root_parameters + 3 * job.c * job.block_matrices // job.config.model.num_layers


# -------------------------------------------------------------------------------- activations


def block_activations(job: Job, windows: int) -> float:
    """Returns the bytes that the forward of a block saves for backward, without copies of weights.

    Bytes per position and channel (B T C elements):

        4       input of the first norm: the residual stream, always fp32
        c x 3   normalized input, cast for each of the three matrices separately; in fp32 or if
                compiled, one shared tensor
        c x 3   queries, keys, values
        c       outputs of the heads, input of the output matrix
        4       input of the second norm
        c       normalized input of the MLP
        4 c x 2 before and after GELU
        1 x 2   masks of both dropouts

    A kernel that stores the attention weights (B H T T elements) saves the softmax in fp32, the
    dropout mask and, with dropout or reduced precision, the copy of the softmax that is multiplied
    by the values. On a CPU, sdpa saves the weights with dropout and for short sequences in bf16,
    and with dropout also the weights after dropout (compute/specialize.py).
    """
    model, c, length = job.config.model, job.c, job.config.data.max_length
    has_dropout = model.dropout > 0
    inputs = 1 if job.precision == "fp32" or job.compiled else 3
    per_channel = 8 + (inputs + 13) * c + 2 * has_dropout
    per_weight = 0  # a fused kernel
    if model.attention == "sdpa" and job.device == "cpu":
        if has_dropout:
            per_weight = 2 * c
        elif job.precision == "bf16" and length <= MAX_UNFUSED_LENGTH:
            per_weight = c
    elif model.attention not in ("sdpa", "flex"):
        mask = 4 if job.device == "cpu" and not job.compiled else 1
        is_copied = has_dropout or job.precision != "fp32"
        per_weight = 4 + mask * has_dropout + c * is_copied
    positions = windows * length
    return positions * (per_channel * model.emb_dim + per_weight * model.num_heads * length)


def activations(job: Job, windows: int) -> float:
    """Returns the bytes that forward saves for backward, without logits and copies of weights.
    These are the activations of L blocks (activation checkpointing: only the fp32 input of each,
    Chen et al. 2016), the dropout mask of the embeddings and the input of the last norm."""
    model = job.config.model
    channels = windows * job.config.data.max_length * model.emb_dim  # B T C
    checkpointing = job.config.trainer.activation_checkpointing
    of_block = 4 * channels if checkpointing else block_activations(job, windows)
    return model.num_layers * of_block + (4 + (model.dropout > 0)) * channels


def head(job: Job, positions: int) -> int:
    """Returns the bytes of logits and gradients of the head during the computation of the loss.

    The loss is computed in chunks of n positions (compute/cross_entropy.py). The logits, c n V
    bytes, are overwritten by their gradient. After that, the gradient of the matrix needs c V C,
    and with several chunks their sum needs 4 V C. The input of the head, its cast and its gradient,
    which is joined from the chunks, exist during the whole computation.
    """
    model, c = job.config.model, job.c
    n = min(positions, rows_at_once(model.vocab_size))
    of_matrix = c + 4 * (n < positions)  # bytes per element
    in_chunk = c * n * model.vocab_size + of_matrix * model.vocab_size * model.emb_dim
    return in_chunk + (4 + 3 * c) * positions * model.emb_dim


# ----------------------------------------------------------------------------- micro-batches


def largest_micro_batch(windows_per_rank: int, fits: Callable[[int], bool]) -> int | None:
    """Returns the largest divisor of windows_per_rank for which fits(windows) holds. Divisors give
    micro-batches of equal size. None if not even one window fits."""
    sizes = range(windows_per_rank, 0, -1)
    return next((n for n in sizes if windows_per_rank % n == 0 and fits(n)), None)


def find_micro_batch(config: Config, strategy: Strategy, compiled: bool) -> int:
    """Returns the value of trainer.micro_batch_size=auto: the largest divisor of the windows per
    rank whose estimate fits on all ranks; 1 if none fits."""
    job, limit = Job.of(config, strategy, compiled), memory_of(strategy.device)
    if strategy.device.type == "cuda":
        limit += LIBRARIES["cuda"]  # in the estimate, and no longer free
    found = largest_micro_batch(job.windows_per_rank, lambda n: fits(job, n, limit)) or 1
    return -strategy.all_reduce_max(-found)


# --------------------------------------------------------------------------------- too little


def check_memory(config: Config, strategy: Strategy) -> list[tuple]:
    """Returns a problem (key, value, reason, hint) if weights, gradients and moments need more
    memory than the device has; on a CPU, also if a step does; on a GPU, if the copy of a checkpoint
    needs more memory than the machine has. Allocates nothing.

    Without this check, the system would kill the process without a message. A step that does not
    fit on a GPU raises `out_of_memory_error`.
    """
    trainer, limit = config.trainer, memory_of(strategy.device)
    # It is not known yet whether compile=auto compiles. A compiled step needs less memory.
    job = Job.of(config, strategy, trainer.compile is not False)
    asked = trainer.micro_batch_size
    windows = 1 if asked == "auto" else min(job.windows_per_rank, asked or job.windows_per_rank)
    parts, has = estimate(job, windows), f"{strategy.device} has {limit / 1e9:,.1f} GB"
    states, total = 2 * parts["weights"] + parts["optimizer"], sum(parts.values())
    parameters = f"{job.parameters:,} parameters"
    if states > limit:
        reason = f"weights, gradients and moments need {states / 1e9:,.1f} GB, and {has} free"
        return [("model", parameters, reason, "use a smaller model, such as model=gpt2-nano")]
    if strategy.device.type == "cpu":
        if total - parts["slack"] <= limit:  # the slack of the allocator is uncertain
            return []
        tokens = f"{windows} windows of {config.data.max_length} tokens"
        reason = f"a step with {tokens} needs about {total / 1e9:,.1f} GB, and {has}"
        hint = _hint(config, strategy, lambda n: n < windows and fits(job, n, limit))
        key = "trainer.batch_size" if asked is None else "trainer.micro_batch_size"
        return [(key, trainer.batch_size if asked is None else asked, reason, hint)]
    # A free notebook has a GPU of 16 GB and 13 GB of main memory: GPT-2 large fits on the GPU, and
    # its first checkpoint would end the process.
    copy, available = 12 * job.parameters, available_memory()
    if strategy.is_rank_0 and 0 < available < copy:
        reason = f"a checkpoint needs {copy / 1e9:,.1f} GB of main memory, "
        reason += f"and {available / 1e9:,.1f} GB are available"
        hint = "use a machine with more main memory, or a smaller model"
        return [("model", parameters, reason, hint)]
    return []


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error of torch means that memory ran out, on any device."""
    words = ("out of memory", "ALLOC_FAILED", "can't allocate memory")
    said = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    return said or isinstance(error, torch.OutOfMemoryError | MemoryError)


def out_of_memory_error(
    config: Config, strategy: Strategy, windows: int, intact: str
) -> OutOfMemoryError:
    """Returns the error of a step that ran out of memory, with a hint that keeps the batch size.

    windows: size of the micro-batch that did not fit. intact: text about the newest checkpoint.
    """
    tokens = f"{windows} windows of {config.data.max_length} tokens"
    reason = f"{tokens} do not fit into the memory of {strategy.device}"
    hint = _hint(config, strategy, lambda smaller: smaller <= windows // 2)
    return OutOfMemoryError("trainer.micro_batch_size", windows, reason, f"{hint}; {intact}")


def _hint(config: Config, strategy: Strategy, fits: Callable[[int], bool]) -> str:
    """Returns a hint: the largest micro-batch size for which fits(windows) holds, or a setting."""
    per_rank = config.trainer.batch_size // strategy.world_size
    if smaller := largest_micro_batch(per_rank, fits):
        return f"use trainer.micro_batch_size={smaller}, which keeps the batch size"
    if not config.trainer.activation_checkpointing:
        return "use trainer.activation_checkpointing=true, which needs far less memory"
    return "use parallel=fsdp on more devices, a smaller data.max_length or a smaller model"
