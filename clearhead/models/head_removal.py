"""Removes attention heads of a model on windows of a dataset and measures the loss, see
headlens/ablation.py."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from clearhead.tokens.windows import WindowDataset, evenly_spaced_windows
from headlens import head_removal

TOKENS = 64  # per window of a text


def ablate_heads(
    model: Any,
    groups: Mapping[str, Sequence[tuple[int, int]]],
    dataset: WindowDataset | Tensor,
    is_synthetic: bool,
    max_tokens: float = math.inf,
    estimate: bool = False,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> dict | None:
    """Returns the result of head_removal on 8 to 32 evenly spaced windows of a dataset, or of token
    ids (B, T); None if the forward passes without each head have more than max_tokens tokens.

    A small model, with up to 30 million parameters, has 32 windows. Only the first TOKENS tokens of
    a window of text are used. The accuracy is measured on synthetic data. In fp32, also within
    autocast.
    """
    most = min(32, max(8, 10**9 // sum(p.numel() for p in model.parameters())))
    if isinstance(dataset, Tensor):
        input_ids, targets = dataset[evenly_spaced_windows(dataset, most)], None
    else:
        input_ids, targets = dataset.batch(evenly_spaced_windows(dataset, most))
    if not is_synthetic:
        input_ids, targets = (t if t is None else t[:, :TOKENS] for t in (input_ids, targets))
    if max_tokens < math.inf:
        config = model.config
        if config.num_layers * config.num_heads * input_ids.numel() > max_tokens:
            return None
    options = {"targets": targets, "accuracy": is_synthetic}
    return head_removal(model, input_ids, groups, **options, estimate=estimate, report=report)
