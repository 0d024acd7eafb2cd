"""Evaluation while training: the validation loss and samples of text.

Bits per byte compare models with different tokenizers; where only some targets can be predicted
(synthetic sequences mark the others as ignored) the accuracy on those says more.

Shapes: B batch, T positions, V vocabulary.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import tiktoken
import torch

from errors import AGAINST_DIVERGENCE, DivergedError
from inference.decoding import Sampling, generate
from model import GPT
from training.distributed.strategy import Strategy

if TYPE_CHECKING:
    from training.config.schema import Config


class Validation:
    """The loss on some windows of a data set, always the same ones.

    dataset: anything with batch(windows) -> (input_ids, target_ids), both (B, T); negative targets
    do not count. bytes_per_token(token ids): the mean number of bytes of text in a token; None
    where accuracy is measured instead.
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
            self.bytes_per_token = bytes_per_token(targets[targets >= 0].numpy())

    def run(
        self, model: torch.nn.Module, strategy: Strategy, batch_size: int
    ) -> tuple[float, float | None]:
        """(mean loss in nats over all targets, accuracy or None), the same on all ranks, which
        share the windows. batch_size: windows at a time."""
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
        return total / count, (right / count if self.bytes_per_token is None else None)

    def metrics(self, loss: float, accuracy: float | None) -> dict[str, float]:
        """The metrics of the log. loss: in nats per token."""
        if accuracy is not None:
            return {"val/loss": loss, "val/accuracy": accuracy}
        return {"val/loss": loss, "val/bits_per_byte": loss / math.log(2) / self.bytes_per_token}


class Evaluator:
    """Validates the model and samples text from it.

    validation: None without validation data. batch_size: windows at a time on this rank.
    describe_checkpoint() says which checkpoint is intact.
    """

    def __init__(
        self,
        config: "Config",
        strategy: Strategy,
        validation: Validation | None,
        tokenizer: tiktoken.Encoding,
        batch_size: int,
        describe_checkpoint: Callable[[], str],
    ):
        self.config = config
        self.strategy = strategy
        self.validation = validation
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.describe_checkpoint = describe_checkpoint
        self.last_sample = ""

    def validate(self, model: GPT, step: int) -> dict[str, float]:
        """Validation metrics; empty without validation data.

        Raises DivergedError on all ranks when the loss is NaN or inf.
        """
        if self.validation is None:
            return {}
        loss, accuracy = self.validation.run(model, self.strategy, self.batch_size)
        if not math.isfinite(loss):
            raise DivergedError(
                "optimizer.lr",
                self.config.optimizer.lr,
                f"the validation loss is {loss} at step {step}",
                f"{AGAINST_DIVERGENCE}; {self.describe_checkpoint()}",
            )
        return self.validation.metrics(loss, accuracy)

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
                known=tokenizer.n_vocab,
            )
            new_ids = [token for (token,) in steps]
        self.last_sample = prompt + tokenizer.decode(new_ids)
        return {"step": step, "prompt": prompt, "text": self.last_sample}
