"""Evaluation during training: validation metrics and text samples.

For text the metric is bits per byte, which is comparable between tokenizers. For synthetic
sequences it is the accuracy on the predictable targets; all other targets are ignored.

Shapes: B batch, T positions, V vocabulary.
"""

import codecs
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from clearhead.config.schema import Config
from clearhead.errors import DIVERGENCE_HINT, DivergedError
from clearhead.models.decoding import Sampling, generate
from clearhead.models.perplexity import text_metrics
from clearhead.output.comparison import standard_error
from clearhead.parallel.strategy import Strategy
from clearhead.tokens.tokenizer import Tokenizer
from clearhead.tokens.windows import WindowDataset, evenly_spaced_windows
from model import GPT

# The validation at the end of a run uses this fraction of the number of training windows. A forward
# pass takes about two fifths of the time of a step, so this is 2 % of the time of the training.
FINAL_FRACTION = 0.05
PARTS = 32  # of the text in this validation
METRICS = ("loss", "perplexity", "bits_per_byte", "accuracy")


@dataclass
class Validation:
    """Computes validation metrics on windows of a dataset.

    dataset: has batch(windows) -> (input_ids, target_ids), both (B, T); negative targets are
    ignored. token_lengths: the bytes of text of each token id; None: measure the accuracy.
    batch_size: windows per forward pass on this rank.
    """

    dataset: WindowDataset
    token_lengths: np.ndarray | None
    strategy: Strategy
    batch_size: int

    def run(
        self,
        model: torch.nn.Module,
        windows: np.ndarray,
        num_parts: int = 1,
    ) -> dict:
        """Returns the metrics, and their error if the windows are evaluated in several parts. Each
        rank evaluates some windows; all return the same.

        loss, perplexity   of the mean over all targets, in nats
        bits_per_byte      for text; otherwise `accuracy` replaces both
        windows            their number
        loss_error         the standard error of the loss over `parts`; None for a single part
        parts              the metrics of each of at most num_parts parts: neighbouring windows are
                           in one part, because their losses are not independent
        """
        parts = np.array_split(windows, min(num_parts, len(windows)))
        with self.strategy.inference(model):
            sums = [self._sums(model, part) for part in parts]
        self.strategy.synchronize()
        sums = [self.strategy.all_reduce_sum(float(loss), *counts) for loss, *counts in sums]
        total = [sum(column) for column in zip(*sums, strict=True)]
        of_parts = [self._metrics(of_part, total) for of_part in sums if of_part[1] > 0]
        error = standard_error([of_part["loss"] for of_part in of_parts])
        about = {"windows": len(windows), "loss_error": error, "parts": of_parts}
        return self._metrics(total, total) | about

    def _sums(
        self, model: torch.nn.Module, part: np.ndarray
    ) -> tuple[Tensor | float, int, int, int]:
        """Returns of the windows of this rank: the sum of the losses, and the numbers of targets,
        of their bytes, and of right predictions."""
        rank, ranks = self.strategy.rank, self.strategy.world_size
        loss_sum, num_targets, num_bytes, right = 0.0, 0, 0, 0
        local = part[rank::ranks]
        most = -(-len(part) // ranks)  # largest number of windows on a rank
        for first in range(0, most, self.batch_size):
            windows = local[first : first + self.batch_size]
            # All ranks must call a sharded model the same number of times: a rank without windows
            # processes a window whose result is ignored.
            counts = len(windows) > 0
            input_ids, target_ids = self.dataset.batch(windows if counts else part[:1])
            targets = target_ids[target_ids >= 0].numpy() if counts else np.zeros(0, int)
            input_ids, target_ids = self.strategy.to_device(input_ids, target_ids)  # (B, T)
            _, loss = model(input_ids, target_ids)
            if len(targets):  # otherwise the loss is NaN
                loss_sum, num_targets = loss_sum + loss * len(targets), num_targets + len(targets)
            if self.token_lengths is None:
                logits, _ = model(input_ids)  # (B, T, V)
                right += counts * int((logits.argmax(-1) == target_ids).sum())
            else:
                num_bytes += int(self.token_lengths[targets].sum())
        return loss_sum, num_targets, num_bytes, right

    def _metrics(self, of_part: list[float], of_all: list[float]) -> dict[str, float]:
        """Returns the metrics of sums. The bytes per token are those of all windows."""
        loss_sum, num_targets, _, right = of_part
        if self.token_lengths is None:
            return {"loss": loss_sum / num_targets, "accuracy": right / num_targets}
        found = text_metrics(loss_sum / num_targets, of_all[2] / of_all[1])
        return {name: value for name, value in found.items() if value is not None}


@dataclass
class Evaluator:
    """Validates the model and samples text from it."""

    config: Config
    strategy: Strategy
    validation: Validation | None  # None without validation data
    tokenizer: Tokenizer
    batch_size: int  # windows per forward pass on this rank
    final: dict | None = None  # content of validation.json: the metrics after the last step

    def validate(self, model: GPT, step: int, is_last: bool) -> dict[str, float]:
        """Returns validation metrics; {} without validation data. After the last step it also
        evaluates more windows (`final`). Raises DivergedError on all ranks if the loss is NaN or
        inf.

        The number of windows depends on the number of training windows and not on a measured time,
        so that equal runs have equal results.
        """
        if self.validation is None:
            return {}
        trainer, dataset = self.config.trainer, self.validation.dataset
        windows, found = evenly_spaced_windows(dataset, trainer.eval_windows), None
        if is_last:
            limit = max(trainer.eval_windows, int(FINAL_FRACTION * step * trainer.batch_size))
            more = evenly_spaced_windows(dataset, limit)
            found = self.validation.run(model, more, PARTS)
            self._check(found["loss"], step)
            self.final = {"step": step} | found
        if found is None or found["windows"] > len(windows):
            found = self.validation.run(model, windows)
            self._check(found["loss"], step)
        return {f"val/{name}": found[name] for name in METRICS if name in found}

    def _check(self, loss: float, step: int) -> None:
        if not math.isfinite(loss):
            reason = f"the validation loss is {loss} at step {step}"
            rate = self.config.optimizer.lr
            raise DivergedError("optimizer.lr", rate, reason, DIVERGENCE_HINT)

    def sample(self, model: GPT, step: int) -> dict:
        """Continues trainer.sample_prompt with the same random numbers at every step, so that
        samples are comparable. Returns the row of samples.jsonl."""
        prompt, tokenizer = self.config.trainer.sample_prompt or "", self.tokenizer
        prompt_ids = tokenizer.encode(prompt, allowed_special="all") or [tokenizer.eot_token]
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
        # Without an incomplete character at the end.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return {
            "step": step,
            "prompt": prompt,
            "text": prompt + decoder.decode(tokenizer.decode_bytes(new_ids)),
        }
