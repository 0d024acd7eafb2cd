"""FSDP: every rank holds a shard of each parameter, gradient and moment (FSDP2 of PyTorch)."""

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from clearhead.parallel.ddp import DDP
from model import GPT


@dataclass
class FSDP(DDP):
    """Fully sharded data parallelism."""

    reshard_after_forward: bool = True
    name: ClassVar[str] = "fsdp"
    compiles_blocks: ClassVar[bool] = True  # parameters are gathered between blocks

    def shard(self, model: GPT) -> GPT:
        """Shards a model on the meta device, before memory for its parameters is allocated.

        The matrices of a block are gathered in the precision of matrix products, which halves the
        bytes to send. Embeddings and last norm are gathered in fp32 for the complete step, so the
        residual stream is in fp32, as in a single process.
        """
        fp32 = {"reduce_dtype": torch.float32, "cast_forward_inputs": False}
        mesh = init_device_mesh(self.device.type, (self.world_size,))
        for block in model.blocks:
            fully_shard(
                [block.attn, block.mlp],  # gathered together
                mesh=mesh,
                reshard_after_forward=self.reshard_after_forward,
                mp_policy=MixedPrecisionPolicy(param_dtype=self.dtype, **fp32),
            )
        # The warning is about in-place changes of module outputs; this model has none.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        return fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**fp32))

    def _wrap(self, model: GPT) -> torch.nn.Module:
        return model

    def no_sync(self, more_to_come: bool) -> contextlib.AbstractContextManager:
        self.wrapped.set_requires_gradient_sync(not more_to_come)
        if not self.reshard_after_forward:  # gather once per step, not per micro-batch
            self.wrapped.set_reshard_after_backward(not more_to_come)
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def inference(self, model: torch.nn.Module) -> Iterator[None]:
        try:
            with super().inference(model):
                yield
        finally:
            # After a forward without backward, the gathered parameters would become outdated.
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def total_norm(self, model: torch.nn.Module) -> Tensor:
        grads = [p.grad for p in model.parameters() if p.grad is not None]  # else it is frozen
        return torch.nn.utils.get_total_norm(grads).full_tensor()

    def scatter(self, whole: Tensor | None, like: Tensor) -> Tensor:
        if not isinstance(like, DTensor):
            return super().scatter(whole, like)
        on = {"device": like.device, "dtype": like.dtype}
        whole = whole.to(**on) if self.is_rank_0 else torch.empty(like.shape, **on)
        return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=0)
