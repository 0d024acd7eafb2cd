"""The learning-rate schedule: warmup, then constant, cosine, or warmup-stable-decay (wsd).

A plain function of the step: it has no state to save and can be plotted without training.
"""

import math

from training.config.schema import OptimizerConfig


def learning_rate(
    step: int,
    config: OptimizerConfig,
    warmup_steps: int,
    max_steps: int,
    peak: float | None = None,
) -> float:
    """The learning rate of optimizer step `step`, 0 <= step < max_steps.

    peak: lr of a group of parameters; None means config.lr. Rises linearly to lr over warmup_steps.
    Then, with r = min_lr_ratio and u in 0..1 the share of the remaining steps done:
      cosine    lr (r + (1 - r) (1 + cos(pi u)) / 2)             (Loshchilov and Hutter 2017)
      wsd       lr, then linearly to r lr over the last decay_fraction of all steps
                                                                 (Hu et al. 2024)
      constant  lr
    """
    lr = config.lr if peak is None else peak
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if config.schedule == "constant":
        return lr
    if config.schedule == "cosine":
        start = warmup_steps
    else:
        start = max(warmup_steps, round(max_steps * (1 - config.decay_fraction)) - 1)
    if step < start:
        return lr
    # From lr at step `start` to exactly r lr at the last step, max_steps - 1.
    done = min(1.0, (step - start) / max(1, max_steps - 1 - start))
    fall = (1 + math.cos(math.pi * done)) / 2 if config.schedule == "cosine" else 1 - done
    return lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * fall)
