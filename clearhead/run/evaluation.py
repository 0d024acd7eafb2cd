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
from clearhead.reporting.comparison import standard_error
from clearhead.reporting.console import Report
from clearhead.tokens.windows import evenly_spaced_windows
from model import GPT

# The validation at the end of a run uses this fraction of the number of training windows. A forward
# pass takes about two fifths of the time of a step, so this is 2 % of the time of the training.
FINAL_FRACTION = 0.05
PARTS = 32  # of the text in this validation
READ_AT_ONCE = 1024  # windows


class Validation:
    """Computes validation metrics on a fixed set of windows.

    dataset: has batch(windows) -> (input_ids, target_ids), both (B, T); negative targets are
    ignored. token_lengths: the bytes of text of each token id; None: measure the accuracy. The
    accuracy is also measured if all targets are end-of-text tokens.
    """

    def __init__(self, dataset, windows: np.ndarray, token_lengths: np.ndarray | None):
        self.dataset, self.windows, self.token_lengths = dataset, windows, token_lengths
        self.bytes_per_token = None
        if token_lengths is not None:
            num_bytes = num_targets = 0
            for first in range(0, len(windows), READ_AT_ONCE):
                _, targets = dataset.batch(windows[first : first + READ_AT_ONCE])
                lengths = token_lengths[targets[targets >= 0].numpy()]
                num_bytes, num_targets = num_bytes + int(lengths.sum()), num_targets + len(lengths)
            self.bytes_per_token = num_bytes / num_targets or None

    def run(
        self,
        model: torch.nn.Module,
        strategy: Strategy,
        batch_size: int,
        report: Report = lambda done, total: None,
    ) -> dict[str, float]:
        """Returns the mean loss in nats over all targets, and bits per byte or the accuracy. Each
        rank evaluates some windows; all return the same. batch_size: windows per forward pass.
        report: called after each pass with the numbers of finished and of all windows."""
        (sums,) = self._sums(model, strategy, batch_size, report, [self.windows])
        return {f"val/{name}": value for name, value in self._metrics(*sums).items()}

    def run_in_parts(
        self,
        model: torch.nn.Module,
        strategy: Strategy,
        batch_size: int,
        report: Report = lambda done, total: None,
    ) -> dict:
        """Returns the metrics of `run` without "val/", and

        windows     their number
        loss_error  the standard error of the loss over `parts`; None for a single part
        parts       the metrics of each of at most PARTS parts of the text: neighbouring
                    windows are in one part, because their losses are not independent
        """
        parts = np.array_split(self.windows, min(PARTS, len(self.windows)))
        sums = self._sums(model, strategy, batch_size, report, parts)
        of_parts = [self._metrics(*of_part) for of_part in sums if of_part[2] > 0]
        found = self._metrics(*map(sum, zip(*sums, strict=True)))
        error = standard_error([of_part["loss"] for of_part in of_parts])
        return found | {"windows": len(self.windows), "loss_error": error, "parts": of_parts}

    def _sums(
        self,
        model: torch.nn.Module,
        strategy: Strategy,
        batch_size: int,
        report: Report,
        parts: list[np.ndarray],
    ) -> list[list[float]]:
        """Returns for each part: sum of the losses, number of right predictions and of targets."""
        sums, done = [], 0  # done: windows of finished parts
        with strategy.inference(model):
            for part in parts:
                total, right, count = 0.0, 0, 0
                local = part[strategy.rank :: strategy.world_size]
                most = -(-len(part) // strategy.world_size)  # largest number of windows on a rank
                for first in range(0, most, batch_size):
                    windows = local[first : first + batch_size]
                    # All ranks must call a sharded model the same number of times: a rank without
                    # windows processes a window whose result is ignored.
                    counts = len(windows) > 0
                    input_ids, target_ids = self.dataset.batch(windows if counts else part[:1])
                    targets = counts * int((target_ids >= 0).sum())
                    input_ids, target_ids = strategy.to_device(input_ids, target_ids)  # (B, T)
                    _, loss = model(input_ids, target_ids)
                    # Without targets, the loss is NaN.
                    total, count = total + (loss * targets if targets else 0), count + targets
                    if self.bytes_per_token is None:
                        logits, _ = model(input_ids)  # (B, T, V)
                        right += counts * int((logits.argmax(-1) == target_ids).sum())
                    of_part = min((first + batch_size) * strategy.world_size, len(part))
                    report(done + of_part, len(self.windows))
                done += len(part)
                sums.append((total, right, count))
        strategy.synchronize()
        return [strategy.all_reduce_sum(float(total), *counts) for total, *counts in sums]

    def _metrics(self, total: float, right: float, count: float) -> dict[str, float]:
        if self.bytes_per_token is None:
            return {"loss": total / count, "accuracy": right / count}
        return text_metrics(total / count, self.bytes_per_token)


@dataclass
class Evaluator:
    """Validates the model and samples text from it."""

    config: Config
    strategy: Strategy
    validation: Validation | None  # None without validation data
    tokenizer: tiktoken.Encoding
    batch_size: int  # windows per forward pass on this rank
    final: dict | None = None  # the result of `validate_at_end`

    def validate(self, model: GPT, step: int, report: Report) -> dict[str, float]:
        """Returns validation metrics; {} without validation data. Raises DivergedError on all ranks
        if the loss is NaN or inf."""
        if self.validation is None:
            return {}
        row = self.validation.run(model, self.strategy, self.batch_size, report)
        self._check(row["val/loss"], step)
        return row

    def validate_at_end(self, model: GPT, step: int, report: Report) -> dict:
        """Returns the content of validation.json: the metrics at the last step on more windows,
        see Validation.run_in_parts. Raises DivergedError as `validate` does.

        The number of windows depends on the number of training windows and not on a measured time,
        so that equal runs have equal results.
        """
        trainer, dataset = self.config.trainer, self.validation.dataset
        limit = max(trainer.eval_windows, int(FINAL_FRACTION * step * trainer.batch_size))
        windows = evenly_spaced_windows(dataset, limit)
        validation = Validation(dataset, windows, self.validation.token_lengths)
        found = validation.run_in_parts(model, self.strategy, self.batch_size, report)
        self._check(found["loss"], step)
        self.final = {"step": step} | found
        return self.final

    def summary(self) -> list[str]:
        """Returns a line about the last validation, for the end of a run."""
        if self.final is None:
            return []
        error = self.final["loss_error"]
        text = f"{self.final['loss']:.4f}" + ("" if error is None else f" ± {error:.4f}")
        return [f"final validation {text}  ({self.final['windows']:,} windows)"]

    def _check(self, loss: float, step: int) -> None:
        if not math.isfinite(loss):
            reason = f"the validation loss is {loss} at step {step}"
            rate = self.config.optimizer.lr
            raise DivergedError("optimizer.lr", rate, reason, DIVERGENCE_HINT)

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
