"""Optimizer steps of an implementation: what benchmarks/training.py times.

Runner       the model and optimizer of a project; step() is one whole optimizer step
OurRunner    the same with the parts that train.py is made of
"""

import copy
import ctypes
import dataclasses
import platform
import sys

import torch
import torch.nn as nn
from torch import Tensor

from benchmarks.implementations import Implementation, Variant, load_weights
from model import GPT
from training.distributed.device import best_dtype, keep_freed_memory
from training.distributed.strategy import Strategy
from training.optim.nonfinite import NonFiniteCheck
from training.optim.optimizers import OptimizerConfig, build_optimizer

MAX_GRAD_NORM = 1.0
Batch = tuple[Tensor, Tensor]  # input_ids (B, T), target_ids (B, T)


class Runner:
    """A project's model and optimizer with the options of a variant.

    The step is that of the projects' own training scripts, which differ only in names.
    """

    def __init__(
        self,
        variant: Variant,
        implementation: Implementation,
        weights: GPT,
        optimizer: OptimizerConfig,
        strategy: Strategy,
    ):
        self.variant, self.implementation = variant, implementation
        self.steps = 0
        self.strategy = dataclasses.replace(strategy, dtype=variant.dtype)
        self.set_up(implementation.prepare(weights), optimizer)
        if variant.fused:
            keys = ("params", "lr", "betas", "eps", "weight_decay")
            groups = [{key: g[key] for key in keys} for g in self.optimizer.param_groups]
            self.optimizer = torch.optim.AdamW(groups, fused=True)

    def set_up(self, weights: GPT, optimizer: OptimizerConfig) -> None:
        self.model = load_weights(self.implementation, weights).to(self.strategy.device).train()
        self.optimizer = self.implementation.optimizer(self.model, optimizer)
        self.fast_model = torch.compile(self.model) if self.variant.compiled else self.model

    def step(self, input_ids: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
        """One optimizer step. Returns loss and gradient norm, both still on the device."""
        with self.strategy.autocast():
            loss = self.implementation.loss(self.fast_model, input_ids, target_ids)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return loss.detach(), norm


class OurRunner(Runner):
    """The parts of train.py, in the order of its training step."""

    def set_up(self, weights: GPT, optimizer: OptimizerConfig) -> None:
        self.model = self.strategy.prepare_model(weights.config, lambda: copy.deepcopy(weights))
        self.fast_model = self.strategy.wrap(self.model, self.variant.compiled)
        muon_dtype = best_dtype(self.strategy.device)
        self.optimizer = build_optimizer(self.model, optimizer, muon_dtype)
        self.check = NonFiniteCheck(10, self.strategy.device)

    def step(self, input_ids: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
        self.strategy.reseed(0, self.steps)
        with self.strategy.no_sync(more_to_come=False):
            with self.strategy.autocast():
                _, loss = self.fast_model(input_ids, target_ids)
            self.strategy.backward(loss)
        norm = self.strategy.update(self.model, self.optimizer, MAX_GRAD_NORM, self.check)
        if self.strategy.device.type == "cpu":  # as in train.py
            self.check.read()
        self.steps += 1
        return loss.detach(), norm


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
