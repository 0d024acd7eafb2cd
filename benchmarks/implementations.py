"""The implementations that benchmarks/training.py compares: clearhead and other projects.

    Variant          a row of a table: an implementation and the options it runs with
    variants         the rows of both tables
    Implementation   a project's model with our weights, its loss, optimizer and training step

transformers is used where it is installed, nanoGPT from a checkout whose folder the user names;
its model.py runs unchanged.

Shapes: B batch, T query positions, V vocabulary.
"""

import contextlib
import copy
import ctypes
import dataclasses
import importlib.util
import io
import platform
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
import torch.nn as nn
from torch import Tensor

from interop.huggingface import hf_tensors, to_hf
from model import GPT
from training.config.schema import OptimizerConfig
from training.distributed.device import best_dtype, keep_freed_memory
from training.distributed.strategy import Strategy
from training.optim.optimizers import NonFiniteCheck, build_optimizer
from training.reporting.machine import git

MAX_GRAD_NORM = 1.0


@dataclass(frozen=True)
class Variant:
    """A row of a table: an implementation and the options it runs with."""

    name: str
    implementation: str  # ours | nanogpt | transformers
    dtype: torch.dtype  # of matrix products; all else is fp32
    compiled: bool = False
    switched_on: bool = False  # fused AdamW, kept freed memory: what ours has and others have not

    @property
    def keeps_memory(self) -> bool:
        """Whether, on a CPU, freed memory is not returned to the system."""
        return self.switched_on or self.implementation == "ours"


def variants(device: str, dtype: torch.dtype, compiles: bool) -> dict[str, list[Variant]]:
    """The rows of both tables. device: cpu | cuda | mps.

    As shipped: ours eager as in short runs and compiled as in long ones; nanoGPT on a CPU with
    --device=cpu --compile=False, as its README says, which is fp32; transformers as its Trainer
    runs by default, and with bf16=True.
    """
    fp32 = torch.float32
    defaults = (dtype, compiles) if device == "cuda" else (fp32, False)
    shipped = [Variant("ours", "ours", dtype)]
    if compiles:
        shipped.append(Variant("ours, compiled", "ours", dtype, compiled=True))
    shipped.append(Variant("nanoGPT", "nanogpt", *defaults))
    shipped.append(Variant("transformers", "transformers", fp32))
    if dtype == torch.bfloat16:
        shipped.append(Variant("transformers, bf16=True", "transformers", dtype))
    equalised = [
        Variant("ours", "ours", dtype, compiles),
        Variant("nanoGPT", "nanogpt", dtype, compiles),
        Variant("nanoGPT, all switched on", "nanogpt", dtype, compiles, switched_on=True),
        Variant("transformers", "transformers", dtype, compiles),
    ]
    return {"shipped": shipped, "equalised": equalised}


class Implementation:
    """A project's model with our weights and its optimizer, with the options of a variant.

    step() is one optimizer step, as in the projects' own training scripts, which differ only in
    names. weights: ours, with the vocabulary size that the project trains.
    """

    version = ""  # or the commit

    def __init__(self, variant: Variant, weights: GPT, config: OptimizerConfig, strategy: Strategy):
        self.variant, self.weights, self.steps = variant, weights, 0
        self.strategy = dataclasses.replace(strategy, dtype=variant.dtype)
        self.model = self.build().to(strategy.device).train()
        self.fast_model = self.compile()
        self.optimizer = self.build_optimizer(config)
        if variant.switched_on:
            keys = ("params", "lr", "betas", "eps", "weight_decay")
            groups = [{key: g[key] for key in keys} for g in self.optimizer.param_groups]
            self.optimizer = torch.optim.AdamW(groups, fused=True)

    def build(self) -> nn.Module:
        """Its model with a copy of the weights, without dropout."""
        raise NotImplementedError

    def compile(self) -> nn.Module:
        return torch.compile(self.model) if self.variant.compiled else self.model

    def build_optimizer(self, config: OptimizerConfig) -> torch.optim.Optimizer:
        """AdamW as the project constructs it, with weight decay for matrices only."""
        raise NotImplementedError

    def loss(self, input_ids: Tensor, target_ids: Tensor) -> Tensor:
        """Mean cross-entropy. input_ids, target_ids: (B, T)."""
        return self.fast_model(input_ids, target_ids)[1]

    def step(self, input_ids: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
        """One optimizer step. Returns loss and gradient norm, both still on the device."""
        return self.backward(input_ids, target_ids), self.update()

    def backward(self, input_ids: Tensor, target_ids: Tensor) -> Tensor:
        with self.strategy.autocast():
            loss = self.loss(input_ids, target_ids)
        loss.backward()
        return loss.detach()

    def update(self) -> Tensor:
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return norm


class Ours(Implementation):
    """This repository: the parts of train.py, in the order of its training step."""

    def build(self) -> GPT:
        return copy.deepcopy(self.weights)

    def compile(self) -> nn.Module:
        return self.strategy.wrap(self.model, self.variant.compiled)

    def build_optimizer(self, config: OptimizerConfig) -> torch.optim.Optimizer:
        self.check = NonFiniteCheck(10, self.strategy.device)
        return build_optimizer(self.model, config, best_dtype(self.strategy.device))

    def backward(self, input_ids: Tensor, target_ids: Tensor) -> Tensor:
        self.strategy.reseed(0, self.steps)
        with self.strategy.no_sync(more_to_come=False):
            with self.strategy.autocast():
                loss = self.loss(input_ids, target_ids)
            self.strategy.backward(loss)
        return loss.detach()

    def update(self) -> Tensor:
        norm = self.strategy.update(self.model, self.optimizer, MAX_GRAD_NORM, self.check)
        if self.strategy.device.type == "cpu":  # as in train.py
            self.check.read()
        self.steps += 1
        return norm


class Transformers(Implementation):
    """GPT2LMHeadModel of Hugging Face transformers, with the defaults of its Trainer."""

    def build(self) -> nn.Module:
        self.version = version("transformers")
        return transformers_model(self.weights, use_cache=False)  # as the Trainer sets it

    def loss(self, input_ids: Tensor, target_ids: Tensor) -> Tensor:
        # Without shift_labels it shifts the labels by one and drops the last target of each window.
        output = self.fast_model(input_ids=input_ids, labels=target_ids, shift_labels=target_ids)
        return output.loss

    def build_optimizer(self, config: OptimizerConfig) -> torch.optim.Optimizer:
        from transformers import TrainingArguments

        matrices = [p for p in self.model.parameters() if p.dim() >= 2]
        vectors = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        default = str(TrainingArguments.__dataclass_fields__["optim"].default)
        fused = default.endswith("adamw_torch_fused")
        values = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
        return torch.optim.AdamW(groups, **values, fused=fused)


def transformers_model(weights: GPT, use_cache: bool) -> nn.Module:
    """transformers' model with a copy of our weights, on the CPU, in eval mode."""
    import transformers

    transformers.logging.set_verbosity_error()  # warns of special tokens outside a vocabulary
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        to_hf(weights, folder)
        return transformers.GPT2LMHeadModel.from_pretrained(folder, use_cache=use_cache)


class NanoGPT(Implementation):
    """github.com/karpathy/nanoGPT, from a checkout in `folder`."""

    def __init__(self, folder: Path, variant: Variant, weights: GPT, *args):
        # An own module name: our model.py has the same file name.
        spec = importlib.util.spec_from_file_location("_nanogpt_model", folder / "model.py")
        self.module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = self.module  # dataclasses need it there
        spec.loader.exec_module(self.module)
        self.version = git(folder, "rev-parse", "--short", "HEAD")
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its size
            super().__init__(variant, pad_vocabulary(weights), *args)  # as in its train.py

    def build(self) -> nn.Module:
        config = self.weights.config
        shape = self.module.GPTConfig(
            block_size=config.context_length,
            vocab_size=config.vocab_size,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            n_embd=config.emb_dim,
            dropout=0.0,
            bias=True,
        )
        transposed = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
        tensors = {  # Hugging Face's names, with Linear instead of Conv1D
            name: value.T if name.endswith(transposed) else value
            for name, value in hf_tensors(self.weights).items()
        }
        model = self.module.GPT(shape)
        model.load_state_dict(tensors, strict=False)  # buffers stay, and the tied head is not there
        return model

    def build_optimizer(self, config: OptimizerConfig) -> torch.optim.Optimizer:
        values = (config.weight_decay, config.lr, tuple(config.betas), self.strategy.device.type)
        optimizer = self.model.configure_optimizers(*values)
        for group in optimizer.param_groups:
            group["eps"] = config.eps
        return optimizer


def pad_vocabulary(weights: GPT) -> GPT:
    """A copy whose vocabulary is a multiple of 64; the added embedding rows are zero."""
    padded = -(-weights.config.vocab_size // 64) * 64
    larger = GPT(dataclasses.replace(weights.config, vocab_size=padded))
    tensors = weights.state_dict()
    rows = tensors["token_emb.weight"]  # (V, C)
    tensors["token_emb.weight"] = nn.functional.pad(rows, (0, 0, 0, padded - len(rows)))
    larger.load_state_dict(tensors)
    return larger


def set_freed_memory(keep: bool, device: torch.device) -> None:
    """Whether glibc keeps freed memory, as our training does on a CPU, or returns it.

    glibc adapts two thresholds to what a program frees, until one of them is set. Returning sets
    them to their adapted values: 32 MiB for memory with its own mapping, 64 MiB for returning the
    end of the heap. nanoGPT's steps then had as many page faults as in a process of their own, or
    up to a fifth fewer; with 128 KiB, where glibc starts, they had twice as many.
    """
    if device.type != "cpu" or sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return
    if keep:
        keep_freed_memory()
        return
    libc = ctypes.CDLL(None)
    m_trim_threshold, m_mmap_threshold, m_mmap_max = -1, -3, -4  # malloc.h
    libc.mallopt(m_mmap_max, 65536)
    libc.mallopt(m_mmap_threshold, 32 * 2**20)
    libc.mallopt(m_trim_threshold, 64 * 2**20)
    libc.malloc_trim(0)  # no variant uses what another one has kept
