"""Evaluation during training: validation metrics and text samples.

For text the metric is bits per byte, which is comparable between tokenizers. For synthetic
sequences it is the accuracy on the predictable targets; all other targets are ignored.

Shapes: B batch, T positions, V vocabulary.
"""

import math
from dataclasses import dataclass

import numpy as np
import tiktoken
import torch

from clearhead.config.schema import Config
from clearhead.distributed.strategy import Strategy
from clearhead.errors import DIVERGENCE_HINT, DivergedError
from clearhead.inference.decoding import Sampling, generate
from clearhead.inference.perplexity import text_metrics
from model import GPT


class Validation:
    """Computes validation metrics on a fixed set of windows.

    dataset: has batch(windows) -> (input_ids, target_ids), both (B, T); negative targets are
    ignored. token_lengths: the bytes of text of each token id; None: measure the accuracy. The
    accuracy is also measured if all targets are end-of-text tokens.
    """

    def __init__(self, dataset, windows: np.ndarray, token_lengths: np.ndarray | None):
        self.dataset = dataset
        self.windows = windows
        self.bytes_per_token = None
        if token_lengths is not None:
            _, targets = dataset.batch(windows)
            lengths = token_lengths[targets[targets >= 0].numpy()]
            self.bytes_per_token = float(lengths.mean()) or None

    def run(self, model: torch.nn.Module, strategy: Strategy, batch_size: int) -> dict[str, float]:
        """Returns the mean loss in nats over all targets, and bits per byte or the accuracy. Each
        rank evaluates some windows; all return the same. batch_size: windows per forward pass."""
        total, right, count = 0.0, 0, 0
        local = self.windows[strategy.rank :: strategy.world_size]
        most = -(-len(self.windows) // strategy.world_size)  # largest number of windows on a rank
        with strategy.inference(model):
            for first in range(0, most, batch_size):
                windows = local[first : first + batch_size]
                # All ranks must call a sharded model the same number of times: a rank without
                # windows processes a window whose result is ignored.
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
        metrics = text_metrics(loss, self.bytes_per_token)
        return {f"val/{name}": value for name, value in metrics.items()}


@dataclass
class Evaluator:
    """Validates the model and samples text from it."""

    config: Config
    strategy: Strategy
    validation: Validation | None  # None without validation data
    tokenizer: tiktoken.Encoding
    batch_size: int  # windows per forward pass on this rank

    def validate(self, model: GPT, step: int) -> dict[str, float]:
        """Returns validation metrics; {} without validation data. Raises DivergedError on all ranks
        if the loss is NaN or inf."""
        if self.validation is None:
            return {}
        row = self.validation.run(model, self.strategy, self.batch_size)
        if not math.isfinite(loss := row["val/loss"]):
            reason = f"the validation loss is {loss} at step {step}"
            rate = self.config.optimizer.lr
            raise DivergedError("optimizer.lr", rate, reason, DIVERGENCE_HINT)
        return row

    def sample(self, model: GPT, step: int) -> dict:
        """Continues trainer.sample_prompt with the same random numbers at every step, so that
        samples are comparable. Returns the row of samples.jsonl."""
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
