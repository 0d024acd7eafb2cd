"""Evaluation while training: the validation loss and samples of text.

Bits per byte compare models with different tokenizers; where only some targets can be predicted
(synthetic sequences mark the others as ignored) the accuracy on those says more.

Shapes: B batch, T positions, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import tiktoken
import torch

from errors import DIVERGENCE_HINT, DivergedError
from inference.decoding import Sampling, generate
from model import GPT
from training.distributed.strategy import Strategy

if TYPE_CHECKING:
    from training.config.schema import Config


class Validation:
    """The loss on some windows of a data set, always the same ones.

    dataset: anything with batch(windows) -> (input_ids, target_ids), both (B, T); negative targets
    do not count. bytes_per_token(token ids): the mean number of bytes of text in a token; None
    where accuracy is measured instead, as it is where all targets are end-of-text tokens.
    """

    def __init__(
        self,
        dataset,
        windows: np.ndarray,
        bytes_per_token: Callable[[np.ndarray], float] | None,
    ):
        self.dataset = dataset
        self.windows = windows
        self.bytes_per_token = None
        if bytes_per_token:
            _, targets = dataset.batch(windows)
            self.bytes_per_token = bytes_per_token(targets[targets >= 0].numpy()) or None

    def run(self, model: torch.nn.Module, strategy: Strategy, batch_size: int) -> dict[str, float]:
        """The metrics of the log: the mean loss in nats over all targets, and bits per byte or the
        accuracy. The same on all ranks, which share the windows. batch_size: windows at a time."""
        total, right, count = 0.0, 0, 0
        mine = self.windows[strategy.rank :: strategy.world_size]
        most = -(-len(self.windows) // strategy.world_size)  # of the rank that has most
        with strategy.inference(model):
            for first in range(0, most, batch_size):
                windows = mine[first : first + batch_size]
                # A sharded model runs on all ranks or on none: a rank without windows runs one
                # that does not count.
                counts = len(windows) > 0
                input_ids, target_ids = self.dataset.batch(windows if counts else self.windows[:1])
                targets = counts * int((target_ids >= 0).sum())
                input_ids, target_ids = strategy.to_device(input_ids, target_ids)  # (B, T)
                _, loss = model(input_ids, target_ids)
                total, count = total + loss * targets, count + targets
                if self.bytes_per_token is None:
                    logits, _ = model(input_ids)  # (B, T, V)
                    right += counts * int((logits.argmax(-1) == target_ids).sum())
        strategy.synchronize()
        total, right, count = strategy.all_reduce_sum(float(total), right, count)
        loss = total / count
        if self.bytes_per_token is None:
            return {"val/loss": loss, "val/accuracy": right / count}
        return {"val/loss": loss, "val/bits_per_byte": loss / math.log(2) / self.bytes_per_token}


@dataclass
class Evaluator:
    """Validates the model and samples text from it."""

    config: "Config"
    strategy: Strategy
    validation: Validation | None  # None without validation data
    tokenizer: tiktoken.Encoding
    batch_size: int  # windows at a time on this rank

    def validate(self, model: GPT, step: int) -> dict[str, float]:
        """Validation metrics; empty without validation data.

        Raises DivergedError on all ranks when the loss is NaN or inf.
        """
        if self.validation is None:
            return {}
        row = self.validation.run(model, self.strategy, self.batch_size)
        if not math.isfinite(loss := row["val/loss"]):
            reason = f"the validation loss is {loss} at step {step}"
            rate = self.config.optimizer.lr
            raise DivergedError("optimizer.lr", rate, reason, DIVERGENCE_HINT)
        return row

    def sample(self, model: GPT, step: int) -> dict:
        """Continues trainer.sample_prompt, with the same random numbers at every step so that
        samples can be compared. Returns the row of samples.jsonl."""
        prompt, tokenizer = self.config.trainer.sample_prompt, self.tokenizer
        prompt_ids = tokenizer.encode_ordinary(prompt) or [tokenizer.eot_token]
        with self.strategy.inference(model):
            steps = generate(
                model,
                [prompt_ids],
                self.config.trainer.sample_tokens,
                Sampling(temperature=0.8, top_k=50, seed=self.config.seed),
                window=self.config.data.max_length,
                vocab_size=tokenizer.n_vocab,
            )
            new_ids = [token for (token,) in steps]
        return {"step": step, "prompt": prompt, "text": prompt + tokenizer.decode(new_ids)}
