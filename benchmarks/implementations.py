"""The implementations that benchmarks/training.py compares: clearhead and other projects.

transformers is included if it is installed. nanoGPT is included if the user gives the folder of a
checkout; its model.py runs unchanged. Shapes: B batch, T query positions, V vocabulary.
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

from clearhead.compute.optimizers import NonFiniteCheck, build_optimizer
from clearhead.config.schema import OptimizerConfig
from clearhead.models.huggingface import hf_tensors, to_hf
from clearhead.parallel.device import best_wide_dtype
from clearhead.parallel.hardware import git, keep_freed_memory
from clearhead.parallel.strategy import Strategy
from model import GPT

MAX_GRAD_NORM = 1.0


@dataclass(frozen=True)
class Variant:
    """A row of a table: an implementation and its options."""

    name: str
    implementation: str  # ours | nanogpt | transformers
    dtype: torch.dtype  # of matrix products; everything else is fp32
    compiled: bool = False
    switched_on: bool = False  # with fused AdamW and kept freed memory, as in ours

    @property
    def keeps_memory(self) -> bool:
        """Whether glibc keeps freed memory (CPU only)."""
        return self.switched_on or self.implementation == "ours"


def variants(device: str, dtype: torch.dtype, compiles: bool) -> dict[str, list[Variant]]:
    """Returns the rows of both tables. device: cpu | cuda | mps.

    As shipped: ours eager, as in short runs, and compiled, as in long runs; nanoGPT on a CPU with
    --device=cpu --compile=False (fp32), as its README recommends; transformers with the defaults of
    its Trainer, and with bf16=True.
    """
    fp32 = torch.float32
    defaults = (dtype, compiles) if device == "cuda" else (fp32, False)
    shipped = [
        Variant("ours", "ours", dtype),
        *[Variant("ours, compiled", "ours", dtype, compiled=True)] * compiles,
        Variant("nanoGPT", "nanogpt", *defaults),
        Variant("transformers", "transformers", fp32),
        *[Variant("transformers, bf16=True", "transformers", dtype)] * (dtype == torch.bfloat16),
    ]
    equalised = [
        Variant("ours", "ours", dtype, compiles),
        Variant("nanoGPT", "nanogpt", dtype, compiles),
        Variant("nanoGPT, all switched on", "nanogpt", dtype, compiles, switched_on=True),
        Variant("transformers", "transformers", dtype, compiles),
    ]
    return {"shipped": shipped, "equalised": equalised}


class Implementation:
    """A project's model with our weights and its optimizer, with the options of a variant. weights:
    with the vocabulary size of the project."""

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
        """Returns the project's model with a copy of the weights, without dropout."""
        raise NotImplementedError

    def compile(self) -> nn.Module:
        return torch.compile(self.model) if self.variant.compiled else self.model

    def build_optimizer(self, config: OptimizerConfig) -> torch.optim.Optimizer:
        """Returns AdamW as the project creates it, with weight decay only for matrices."""
        raise NotImplementedError

    def loss(self, input_ids: Tensor, target_ids: Tensor) -> Tensor:
        """Returns the mean cross-entropy. input_ids, target_ids: (B, T)."""
        return self.fast_model(input_ids, target_ids)[1]

    def step(self, input_ids: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Runs one optimizer step, as in the training scripts of the projects, which differ only in
        names. Returns loss and gradient norm as tensors on the device."""
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
    """This repository: the calls of the training step of train.py, in the same order."""

    def build(self) -> GPT:
        return copy.deepcopy(self.weights)

    def compile(self) -> nn.Module:
        return self.strategy.wrap(self.model, self.variant.compiled)

    def build_optimizer(self, config: OptimizerConfig) -> torch.optim.Optimizer:
        self.check = NonFiniteCheck(10, self.strategy.device)
        return build_optimizer(self.model, config, best_wide_dtype(self.strategy.device))

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
        groups = [{"params": matrices, "weight_decay": config.weight_decay}]
        groups += [{"params": vectors, "weight_decay": 0.0}]
        default = str(TrainingArguments.__dataclass_fields__["optim"].default)
        fused = default.endswith("adamw_torch_fused")
        values = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
        return torch.optim.AdamW(groups, **values, fused=fused)


def transformers_model(weights: GPT, use_cache: bool) -> nn.Module:
    """Returns GPT2LMHeadModel with a copy of our weights, on the CPU, in eval mode."""
    import transformers

    transformers.logging.set_verbosity_error()  # no warning about special tokens
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        to_hf(weights, folder)
        return transformers.GPT2LMHeadModel.from_pretrained(folder, use_cache=use_cache)


class NanoGPT(Implementation):
    """github.com/karpathy/nanoGPT, from a checkout in `folder`."""

    def __init__(self, folder: Path, variant: Variant, weights: GPT, *args):
        # A different module name, because our model.py has the same file name.
        spec = importlib.util.spec_from_file_location("_nanogpt_model", folder / "model.py")
        self.module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = self.module  # required by dataclasses
        spec.loader.exec_module(self.module)
        self.version = git(folder, "rev-parse", "--short", "HEAD")
        with contextlib.redirect_stdout(io.StringIO()):  # it prints the number of parameters
            super().__init__(variant, pad_vocabulary(weights), *args)  # as in its train.py

    def build(self) -> nn.Module:
        c = self.weights.config
        sizes = {"block_size": c.context_length, "vocab_size": c.vocab_size, "n_embd": c.emb_dim}
        sizes |= {"n_layer": c.num_layers, "n_head": c.num_heads}
        shape = self.module.GPTConfig(**sizes, dropout=0.0, bias=True)
        transposed = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
        tensors = {  # names as in Hugging Face, but Linear instead of Conv1D
            name: value.T if name.endswith(transposed) else value
            for name, value in hf_tensors(self.weights).items()
        }
        model = self.module.GPT(shape)
        model.load_state_dict(tensors, strict=False)  # buffers and the tied head are not in tensors
        return model

    def build_optimizer(self, config: OptimizerConfig) -> torch.optim.Optimizer:
        values = (config.weight_decay, config.lr, tuple(config.betas), self.strategy.device.type)
        optimizer = self.model.configure_optimizers(*values)
        for group in optimizer.param_groups:
            group["eps"] = config.eps
        return optimizer


def pad_vocabulary(weights: GPT) -> GPT:
    """Returns a copy with a vocabulary size that is a multiple of 64. Added rows are zero."""
    padded = -(-weights.config.vocab_size // 64) * 64
    larger = GPT(dataclasses.replace(weights.config, vocab_size=padded))
    tensors = weights.state_dict()
    rows = tensors["token_emb.weight"]  # (V, C)
    tensors["token_emb.weight"] = nn.functional.pad(rows, (0, 0, 0, padded - len(rows)))
    larger.load_state_dict(tensors)
    return larger


def set_freed_memory(keep: bool, device: torch.device) -> None:
    """Sets whether glibc keeps freed memory, as in our training on a CPU, or returns it.

    glibc adapts its thresholds to the program until one of them is set. keep=False sets the values
    that it reaches, 32 MiB and 64 MiB: a step of nanoGPT then has as many page faults as in a
    separate process, or up to a fifth fewer; with the initial 128 KiB, twice as many.
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
    libc.malloc_trim(0)  # memory that another variant has kept
