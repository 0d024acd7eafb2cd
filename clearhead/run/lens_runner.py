"""Attention snapshots during training, on rank 0, with FSDP on all ranks; their errors do not end
the run. Prompts of snapshots and text samples, if none are given."""

import contextlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from clearhead.config.automatic import expected_steps
from clearhead.config.schema import Config
from clearhead.errors import best_effort
from clearhead.models.head_removal import ablate_heads
from clearhead.parallel.strategy import Strategy
from clearhead.run.signals import StopRequested
from clearhead.run.stop import Stop
from clearhead.tokens.tokenizer import Tokenizer
from clearhead.tokens.windows import MixedDataset, WindowDataset, evenly_spaced_windows
from data import GPTDatasetV1, LoadedData
from headlens import DEFAULT_PROMPTS, Lens, Snapshot, beginning, text_prompts
from model import GPT

# Heads are measured on this many windows of this many tokens.
MIN_WINDOWS, MAX_WINDOWS = 4, 32
MIN_TOKENS, MAX_TOKENS = 64, 256
MANY_WINDOWS = 8  # before they become longer
SMALL = 5e10  # tokens x parameters of an exact ablation, seconds on a CPU
EXCERPTS, EXCERPT_TOKENS = 8, 4096  # of a dataset, in which prompts are searched


@dataclass
class LensRunner:
    """Takes attention snapshots of the model of a training run."""

    lens: Lens | None  # None if it is off
    strategy: Strategy
    debug: bool  # whether an error ends the run
    # (model, heads by name, trained steps) -> the loss without each head, see
    # models/head_removal.py; None: off
    ablate: Callable[[GPT, dict[str, list[tuple[int, int]]], int], dict] | None
    alone: Callable[[], contextlib.AbstractContextManager]  # Stop.alone
    errors: list[Exception] = field(default_factory=list)  # of the last snapshot

    def is_due(self, step: int, last_step: int) -> bool:
        if self.lens is None:
            return False
        lens = self.lens
        lens.max_steps = last_step
        if lens.config.max_percent is None or not lens.is_planned(step):
            return lens.is_planned(step)
        return bool(self.strategy.broadcast(lens.has_time(step)))  # clocks of ranks differ

    def snapshot(self, model: GPT, step: int) -> Snapshot | None:
        """Takes an attention snapshot: statistics and images. Returns None after an error, and when
        a signal stops the run.

        Rank 0 does this alone, but all ranks run a model that is sharded over them."""
        is_sharded = self.strategy.name == "fsdp"
        if not (is_sharded or self.strategy.is_rank_0):
            return None

        def ablate(groups: dict[str, list[tuple[int, int]]]) -> dict | None:
            with best_effort("lens.ablation: failed", self.debug):
                return self.ablate(model, groups, step)
            return None  # after an error

        what = f"lens: the snapshot of step {step} failed"
        with (
            contextlib.suppress(StopRequested),  # maybe on rank 0 only
            contextlib.nullcontext() if is_sharded else self.alone(),
            best_effort(what, self.debug, self.strategy.label) as self.errors,
            self.strategy.inference(model),
        ):
            return self.lens.snapshot(
                model,
                step,
                ablate=ablate if self.ablate else None,
                write=self.strategy.is_rank_0,
            )
        return None

    def summary(self) -> list[str]:
        """Returns lines about the heads, for the end of a run."""
        if self.lens is None:
            return []
        lines = [f"attention heads  {text}" for text in self.lens.most_significant_heads()]
        names = {row["name"] for row in self.lens.table} - {"", "uniform"}
        if self.lens.table and not names - {"positional"}:
            some = " except positional" * bool(names)
            lines.append(f"attention heads  no head has a name yet{some}")
        lines += [f"attention heads  {text}" for text in self.lens.skipped_snapshots()]
        return lines + [f"removed heads    {t}" for t in self.lens.most_important_heads()]


def build_lens(
    config: Config,
    strategy: Strategy,
    data: LoadedData,
    tokenizer: Tokenizer,
    directory: Path,
    notes: list[str],
    stop: Stop,
) -> LensRunner:
    """Builds the lens. An error on any rank turns it off, as during training."""
    lens = None
    if config.lens.every != 0:
        what = "lens: attention logging is off for the rest of this run"
        with best_effort(what, config.debug, strategy.label):
            lens = Lens(
                tokenizer,
                config.lens,
                context_length=config.data.max_length,
                max_steps=expected_steps(config.trainer),
                folder=directory / "attention",
                run_name=directory.name,
                text=text_windows(config, data.val or data.train),
                text_name=text_name(bool(config.data.synthetic), bool(data.val)),
                vocabulary=data.train.common_tokens(),
                has_page=False,
            )
        if strategy.all_reduce_max(lens is None):
            lens = None
    ablate = None
    if lens and data.val and config.lens.ablation != "off":
        if strategy.name == "fsdp":
            notes.append("lens.ablation: no effect with FSDP")
        else:
            ablate = build_ablation(config, strategy, data.val)
    return LensRunner(lens, strategy, config.debug, ablate, stop.alone)


def text_name(is_synthetic: bool, has_validation: bool) -> str:
    """Returns what pages call the text on which heads are measured, for any reader."""
    part = "validation" if has_validation else "training"
    return f"the {part} {'sequences' if is_synthetic else 'text'}"


def text_windows(config: Config, dataset: WindowDataset) -> torch.Tensor:
    """Returns the windows on which heads are measured, (N, T).

    At each snapshot they have at most one percent of the tokens that are trained until the next
    one. They are counted and not timed, so that equal runs measure the same. There are at least
    MIN_WINDOWS windows, of at least MIN_TOKENS tokens; those of synthetic data are complete, as
    only their second half repeats symbols.
    """
    trainer, longest = config.trainer, min(config.data.max_length, MAX_TOKENS)
    shortest = longest if config.data.synthetic else min(MIN_TOKENS, longest)
    max_steps = expected_steps(trainer)
    steps = min(config.lens.interval(max_steps), max_steps)
    budget = int(0.01 * steps * trainer.batch_size * config.data.max_length)
    length = min(max(budget // MANY_WINDOWS, shortest), longest)
    count = min(max(budget // length, MIN_WINDOWS), MAX_WINDOWS)
    return some_windows(dataset, count, length)


def some_windows(dataset: WindowDataset, count: int, length: int) -> torch.Tensor:
    """Returns the first `length` token ids of evenly spaced windows, (N, T)."""
    input_ids, _ = dataset.batch(evenly_spaced_windows(dataset, count))
    return input_ids[:, :length]


def build_ablation(config: Config, strategy: Strategy, dataset: WindowDataset) -> Callable:
    """Returns the function that removes heads at the last step: (model, heads by name, trained
    steps) -> results.

    lens.ablation=auto depends on counted tokens and not on a measured time, so that equal runs have
    equal results. It measures small models, and others if this is at most one percent of the
    computation of a rank.
    """
    per_step = config.trainer.batch_size * config.data.max_length / strategy.world_size
    # The backward pass takes as long as two forward passes. Exact ablation is in fp32, which takes
    # two to three times as long as bf16.
    passes = 3 if strategy.dtype == torch.float32 else 1
    synthetic = bool(config.data.synthetic)

    def ablate(model: GPT, groups: dict[str, list[tuple[int, int]]], steps: int) -> dict | None:
        auto = max(0.01 * passes * per_step * steps, SMALL / model.num_parameters())
        max_tokens = auto if config.lens.ablation == "auto" else math.inf
        return ablate_heads(
            model, groups, dataset=dataset, is_synthetic=synthetic, max_tokens=max_tokens
        )

    return ablate


# ------------------------------------------------------------------------------------- prompts


def choose_prompts(dataset: WindowDataset, tokenizer: Tokenizer, most: int) -> dict[str, object]:
    """Returns values for lens.prompts and trainer.sample_prompt: passages of at most `most` tokens
    of a dataset, so that a model sees text of the kind that it is trained on.

    dataset: the validation data, without them the training data. If these contain no text, the lens
    uses its English sentences, and a sample starts with an empty prompt. Raises DataError if token
    files have invalid ids.
    """
    found = text_prompts(dataset_excerpts(dataset, tokenizer), tokenizer, most)
    return {
        "lens.prompts": found or [*DEFAULT_PROMPTS],
        "trainer.sample_prompt": beginning(found[0]) if found else "",
    }


def dataset_excerpts(dataset: WindowDataset, tokenizer: Tokenizer) -> list[str]:
    """Returns parts of the text of a dataset, each of one document."""
    texts = []
    for ids in _tokens_of(dataset, EXCERPTS):
        documents = np.split(ids, np.flatnonzero(ids == tokenizer.eot_token))
        for number, document in enumerate(documents):
            kept = document[document != tokenizer.eot_token].tolist()
            text = tokenizer.decode_bytes(kept).decode("utf-8", "ignore")
            # The first document of an excerpt may begin inside a word.
            texts.append(text if number else re.sub(r"\A\S{,40}(?=\s)", "", text))
    return texts


def _tokens_of(dataset: WindowDataset, most: int) -> list[np.ndarray]:
    """Returns the ids of at most `most` excerpts of a dataset."""
    if isinstance(dataset, MixedDataset):
        parts = dataset.datasets[:: -(-len(dataset.datasets) // most)]
        return [ids for part in parts for ids in _tokens_of(part, most // len(parts))]
    if isinstance(dataset, GPTDatasetV1):
        tokens = dataset.tokens
        size, count = min(len(tokens), EXCERPT_TOKENS), min(most, -(-len(tokens) // EXCERPT_TOKENS))
        starts = np.linspace(0, len(tokens) - size, count).astype(np.int64)
        return [*tokens.gather(starts, size)]
    return [*dataset.batch(np.arange(most))[0].numpy()]  # generated sequences
