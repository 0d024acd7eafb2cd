"""Everything that rewrites a GPT for a device. model.py and attention.py are the plain versions.

    specialize                  for training and evaluation: cross_entropy.py, cpu.py, and
                                compiled blocks. The model can still be trained, saved and sharded.
    specialize_for_generation   for fast generation: reduced precision, packed_weights.py.

Results equal those of model.py up to rounding. Two rewrites are elsewhere because they do not
change the model: DDP and the compilation of the complete model (parallel/strategy.py), and the
compiled decoding step (models/cache.py).
"""

import torch

from attention import sdpa
from clearhead.compute import cpu
from clearhead.compute.cross_entropy import head_loss
from clearhead.compute.packed_weights import pack_weights
from model import GPT


def specialize(model: GPT, device: torch.device, compile_blocks: bool = False) -> None:
    """Rewrites a model in place for training and evaluation on a device.

    The loss no longer stores the logits of the complete batch. On a CPU, attention and dropout are
    faster ones. compile_blocks: compiles each block; the blocks share compiled code.
    """
    model.head_loss = head_loss
    if device.type == "cpu":
        for module in (model, *model.blocks):
            module.dropout = cpu.Dropout(module.dropout.p).train(module.training)
        for block in model.blocks:
            if block.attn.kernel is sdpa:
                block.attn.kernel = cpu.attention
    if compile_blocks:
        for block in model.blocks:
            block.compile()


def specialize_for_generation(
    model: GPT, dtype: torch.dtype, rows: int = 1, to_compile: bool = False
) -> GPT:
    """Rewrites a model in place for generating `rows` texts at once in `dtype`, and returns it.

    The model cannot be trained, saved or copied any more. In place, so that a large model is not in
    memory twice. to_compile: changes only the dtype, because torch.compile rejects packed weights.
    """
    model.to(dtype).eval().requires_grad_(False)
    if model.token_emb.weight.device.type == "cpu" and not to_compile:
        pack_weights(model, rows)
        model.forward = torch.inference_mode()(model.forward)  # 2 to 4 % faster
    return model
