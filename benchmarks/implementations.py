"""The implementations that benchmarks/training.py compares: clearhead and other projects.

    Variant          a row of a table: an implementation and the options it runs with
    variants         the rows of both tables
    Implementation   a project's model, loss and optimizer, and our weights under its names

transformers is used where it is installed, nanoGPT from a checkout whose folder the user names;
its model.py runs unchanged. benchmarks/runner.py makes the steps.

Shapes: B batch, T query positions, V vocabulary.
"""

import contextlib
import dataclasses
import importlib.util
import io
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
from torch import Tensor

from errors import ClearheadError, message_of
from interop.huggingface import hf_tensors
from model import GPT, ModelConfig
from training.config.schema import OptimizerConfig
from training.distributed.device import DTYPES
from training.optim.optimizers import build_optimizer
from training.reporting.machine import git

HINT = "check its version, or leave it out"


class NotEquivalent(ClearheadError):
    """An implementation that computes something else; its speed would mean nothing."""


@dataclass(frozen=True)
class Variant:
    """A row of a table: an implementation and the options it runs with."""

    name: str
    implementation: str  # its key
    dtype: torch.dtype  # of matrix products; all else is fp32
    compiled: bool = False
    keeps_memory: bool = False  # on a CPU, freed memory is not returned to the system
    fused: bool = False  # fused AdamW, although the project does not ask for it

    @property
    def precision(self) -> str:
        """`dtype` as the settings name it."""
        return next(name for name, dtype in DTYPES.items() if dtype == self.dtype)


def variants(device: str, dtype: torch.dtype, compiles: bool) -> dict[str, list[Variant]]:
    """The rows of both tables. device: cpu | cuda | mps.

    As shipped: ours eager as in short runs and compiled as in long ones; nanoGPT on a CPU with
    --device=cpu --compile=False, as its README says, which is fp32; transformers as its Trainer
    runs by default, and with bf16=True.
    """
    fp32 = torch.float32
    defaults = (dtype, compiles) if device == "cuda" else (fp32, False)
    shipped = [Variant("ours", "ours", dtype, keeps_memory=True)]
    if compiles:
        shipped.append(Variant("ours, compiled", "ours", dtype, True, keeps_memory=True))
    shipped.append(Variant("nanoGPT", "nanogpt", *defaults))
    shipped.append(Variant("transformers", "transformers", fp32))
    if dtype == torch.bfloat16:
        shipped.append(Variant("transformers, bf16=True", "transformers", dtype))
    every = {"keeps_memory": True, "fused": device != "mps"}
    equalised = [
        Variant("ours", "ours", dtype, compiles, keeps_memory=True),
        Variant("nanoGPT", "nanogpt", dtype, compiles),
        Variant("nanoGPT, all switched on", "nanogpt", dtype, compiles, **every),
        Variant("transformers", "transformers", dtype, compiles),
    ]
    return {"shipped": shipped, "equalised": equalised}


class Implementation:
    """A project: its model and how its own training script uses it."""

    key: str

    def prepare(self, weights: GPT) -> GPT:
        """Our weights with the vocabulary size that the project trains."""
        return weights

    def build(self, config: ModelConfig) -> nn.Module:
        """Its model of this shape, without dropout."""
        raise NotImplementedError

    def convert(self, weights: GPT) -> dict[str, Tensor]:
        """Our weights under its names and in its layout, for load_state_dict."""
        raise NotImplementedError

    def loss(self, model: nn.Module, input_ids: Tensor, target_ids: Tensor) -> Tensor:
        """Mean cross-entropy. input_ids, target_ids: (B, T)."""
        return model(input_ids, target_ids)[1]

    def optimizer(self, model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
        """AdamW as the project constructs it, with weight decay for matrices only."""
        raise NotImplementedError

    def source(self) -> str:
        """The version or commit of the project."""
        return ""


class Ours(Implementation):
    """This repository."""

    key = "ours"

    def build(self, config: ModelConfig) -> GPT:
        return GPT(config)

    def convert(self, weights: GPT) -> dict[str, Tensor]:
        return weights.state_dict()

    def optimizer(self, model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
        return build_optimizer(model, config)


class Transformers(Implementation):
    """GPT2LMHeadModel of Hugging Face transformers, with the defaults of its Trainer."""

    key = "transformers"

    def __init__(self):
        import transformers

        transformers.logging.set_verbosity_error()  # warns of special tokens outside a vocabulary
        self.library = transformers
        fields = transformers.TrainingArguments.__dataclass_fields__
        self.fused = str(fields["optim"].default).endswith("adamw_torch_fused")

    def build(self, config: ModelConfig) -> nn.Module:
        shape = self.library.GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.context_length,
            n_embd=config.emb_dim,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,  # as the Trainer sets it
        )
        return self.library.GPT2LMHeadModel(shape)

    def convert(self, weights: GPT) -> dict[str, Tensor]:
        theirs = hf_tensors(weights)
        return theirs | {"lm_head.weight": theirs["transformer.wte.weight"]}

    def loss(self, model: nn.Module, input_ids: Tensor, target_ids: Tensor) -> Tensor:
        # Without shift_labels it shifts the labels by one and drops the last target of each window.
        return model(input_ids=input_ids, labels=target_ids, shift_labels=target_ids).loss

    def optimizer(self, model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        vectors = [p for p in model.parameters() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        values = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
        return torch.optim.AdamW(groups, **values, fused=self.fused)

    def source(self) -> str:
        return self.library.__version__


class NanoGPT(Implementation):
    """github.com/karpathy/nanoGPT, from a checkout."""

    key = "nanogpt"
    transposed = ("c_attn.weight", "c_proj.weight", "c_fc.weight")

    def __init__(self, folder: str):
        self.folder = Path(folder)
        # An own module name: our model.py has the same file name.
        spec = importlib.util.spec_from_file_location("_nanogpt_model", self.folder / "model.py")
        self.module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = self.module  # dataclasses need it there
        spec.loader.exec_module(self.module)

    def prepare(self, weights: GPT) -> GPT:
        """A copy whose vocabulary is a multiple of 64, as in its train.py; the added embedding
        rows are zero."""
        padded = -(-weights.config.vocab_size // 64) * 64
        larger = GPT(dataclasses.replace(weights.config, vocab_size=padded))
        tensors = weights.state_dict()
        rows = tensors["token_emb.weight"]  # (V, C)
        zeros = rows.new_zeros(padded - len(rows), rows.shape[1])
        larger.load_state_dict(tensors | {"token_emb.weight": torch.cat([rows, zeros])})
        return larger

    def build(self, config: ModelConfig) -> nn.Module:
        shape = self.module.GPTConfig(
            block_size=config.context_length,
            vocab_size=config.vocab_size,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            n_embd=config.emb_dim,
            dropout=0.0,
            bias=True,
        )
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its size
            return self.module.GPT(shape)

    def convert(self, weights: GPT) -> dict[str, Tensor]:
        theirs = {  # Hugging Face's names, with Linear instead of Conv1D
            name: value.T if name.endswith(self.transposed) else value
            for name, value in hf_tensors(weights).items()
        }
        return theirs | {"lm_head.weight": theirs["transformer.wte.weight"]}

    def optimizer(self, model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
        device = next(model.parameters()).device.type
        values = (config.weight_decay, config.lr, tuple(config.betas), device)
        with contextlib.redirect_stdout(io.StringIO()):
            optimizer = model.configure_optimizers(*values)
        for group in optimizer.param_groups:
            group["eps"] = config.eps
        return optimizer

    def source(self) -> str:
        return git(self.folder, "rev-parse", "--short", "HEAD")


def load_weights(implementation: Implementation, weights: GPT) -> nn.Module:
    """A project's model with a copy of our weights; NotEquivalent if its parameters differ."""
    model, theirs = implementation.build(weights.config), implementation.convert(weights)
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if different := sorted(own ^ theirs.keys()):
        name = different[0]
        reason = f"has {'a' if name in own else 'no'} parameter {name}, unlike GPT-2"
        raise NotEquivalent("implementations", implementation.key, reason, HINT)
    try:
        model.load_state_dict(theirs, strict=False)  # buffers, such as masks, stay
    except RuntimeError as error:
        reason = f"parameters have other shapes ({message_of(error)})"
        raise NotEquivalent("implementations", implementation.key, reason, HINT) from error
    return model
