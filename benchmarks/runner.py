"""Optimizer steps of an implementation: what benchmarks/training.py times.

Runner       the model and optimizer of a project; step() is one whole optimizer step
OurRunner    the same with the parts that train.py is made of
make_runner  the one that fits a variant
"""

import copy
import dataclasses

import torch
import torch.nn as nn
from torch import Tensor

from benchmarks.implementations import Implementation, Variant
from errors import ClearheadError, message_of
from model import GPT
from training.distributed.device import best_dtype
from training.distributed.strategy import Strategy
from training.optim.nonfinite import NonFiniteCheck
from training.optim.optimizers import OptimizerConfig, build_optimizer

MAX_GRAD_NORM = 1.0
SETTINGS = ("lr", "betas", "eps", "weight_decay")  # of a parameter group of AdamW
HINT = "check the checkout, or leave it out of implementations="
Batch = tuple[Tensor, Tensor]  # input_ids (B, T), target_ids (B, T)


class NotEquivalent(ClearheadError):
    """An implementation that computes something else; its speed would mean nothing."""


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
        seed: int,
    ):
        self.variant, self.implementation, self.seed = variant, implementation, seed
        self.steps = 0
        self.strategy = dataclasses.replace(strategy, dtype=variant.dtype)
        self.set_up(pad_vocabulary(weights) if variant.padded else weights, optimizer)
        for group in self.optimizer.param_groups:
            group["eps"] = optimizer.eps
        if variant.fused:
            keys = ("params", *SETTINGS)
            groups = [{key: g[key] for key in keys} for g in self.optimizer.param_groups]
            self.optimizer = torch.optim.AdamW(groups, fused=True)

    def set_up(self, weights: GPT, optimizer: OptimizerConfig) -> None:
        self.model = self.implementation.build(weights.config)
        load_weights(self.implementation, self.model, weights)
        self.model.to(self.strategy.device).train()
        self.optimizer = self.implementation.optimizer(self.model, optimizer)
        self.fast_model = torch.compile(self.model) if self.variant.compiled else self.model

    def step(self, input_ids: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
        """One optimizer step. Returns loss and gradient norm, both still on the device."""
        scaler = self.strategy.scaler  # scales in fp16 only
        with self.strategy.autocast():
            loss = self.implementation.loss(self.fast_model, input_ids, target_ids)
        scaler.scale(loss).backward()
        scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        scaler.step(self.optimizer)
        scaler.update()
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
        self.strategy.reseed(self.seed, self.steps)
        with self.strategy.no_sync(more_to_come=False):
            with self.strategy.autocast():
                _, loss = self.fast_model(input_ids, target_ids)
            self.strategy.backward(loss)
        norm = self.strategy.update(self.model, self.optimizer, MAX_GRAD_NORM, self.check)
        if self.strategy.device.type == "cpu":  # as in train.py
            self.check.read()
        self.steps += 1
        return loss.detach(), norm


def make_runner(variant: Variant, implementation: Implementation, *setup) -> Runner:
    """setup: weights, optimizer config, strategy, seed."""
    kind = OurRunner if implementation.key == "ours" else Runner
    return kind(variant, implementation, *setup)


def load_weights(implementation: Implementation, model: nn.Module, weights: GPT) -> None:
    """Copies our weights into another project's model; NotEquivalent if its parameters differ."""
    theirs = implementation.convert(weights)
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


def pad_vocabulary(weights: GPT) -> GPT:
    """A copy whose vocabulary is a multiple of 64; the added embedding rows are zero."""
    padded = -(-weights.config.vocab_size // 64) * 64
    larger = GPT(dataclasses.replace(weights.config, vocab_size=padded))
    tensors = weights.state_dict()
    rows = tensors["token_emb.weight"]  # (V, C)
    zeros = rows.new_zeros(padded - len(rows), rows.shape[1])
    larger.load_state_dict(tensors | {"token_emb.weight": torch.cat([rows, zeros])})
    return larger
