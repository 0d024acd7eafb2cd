"""What the model predicts at each position of a prompt.

    predictions = predict(logits, token_ids)

Shapes: T tokens of the prompt, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

MOST_LIKELY = 5  # tokens recorded for each position


@dataclass
class Predictions:
    """Predictions of the next token at each position of a prompt."""

    losses: np.ndarray  # fp32 (T - 1): -ln p(next token), in nats, of positions 0 to T - 2
    token_ids: np.ndarray  # int64 (T, 5): the most likely next tokens, the most likely first
    probabilities: np.ndarray  # fp32 (T, 5)


def predict(logits: Tensor, token_ids: Sequence[int]) -> Predictions:
    """Returns the predictions at all positions. logits: (T, V) or (1, T, V)."""
    logits = logits.detach().reshape(len(token_ids), -1)
    log_probabilities = logits.float().log_softmax(-1)  # (T, V)
    following = torch.tensor(token_ids[1:], dtype=torch.int64, device=logits.device)
    losses = -log_probabilities[:-1].gather(-1, following[:, None])[:, 0]
    most = log_probabilities.topk(min(MOST_LIKELY, logits.shape[-1]))
    return Predictions(
        losses.cpu().numpy(), most.indices.cpu().numpy(), most.values.exp().cpu().numpy()
    )
