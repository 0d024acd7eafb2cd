"""How well a model predicts a text: loss, perplexity, bits per byte.

    python -m scripts.evaluate checkpoint=runs/NAME data.path=my.txt
    python -m scripts.evaluate checkpoint=DIR data.path=tokens stride=128 out=figures.json

`checkpoint` is a run, one of its checkpoints, a Hugging Face GPT-2 directory or hub:NAME;
`data.path` what training reads: texts, or a folder of token files.

The rule. A text is its tokens behind an end-of-text token, as in training. A window gives the model
`max_length` of them to read, and each next one to predict; the next window begins `stride` tokens
later, the last one where it ends with the text. A token is scored once, in the first window that
predicts it: behind max_length - stride + 1 to max_length tokens, or behind all there are. A small
stride costs more windows and shows the model with more context. With stride=max_length these are
the windows of training's validation, and of lm-eval's rolling perplexity (docs/models.md).

Shapes: B windows of a batch, T positions of the longest one, C emb_dim, N scored positions.
"""

import hashlib
import math
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from errors import CheckpointError, ConfigError, DataError, Problem, refuse, visible
from training.config.command_line import settings_command, write_out
from training.config.schema import fill

if TYPE_CHECKING:
    import numpy as np
    import torch

    from interop.huggingface import Reader
    from tokens.stream import TokenStream
    from training.distributed.strategy import Strategy

TELL_EVERY = 10  # seconds
OF_RUN = ("text_key", "endoftext", "val_fraction")  # settings of its data that a run may lend


@dataclass
class TextConfig:
    """Which text, and how it is read."""

    path: str | list[str] = field(
        metadata={"help": "a text or token file, a folder, a glob, a list of these"}
    )
    within_documents: bool = field(
        default=False, metadata={"help": "true: each document by itself, end-of-text not scored"}
    )
    val_fraction: float | None = field(
        default=None, metadata={"help": "where split=val and train part; null: the run's own"}
    )
    text_key: str | None = field(
        default=None, metadata={"help": "where JSON and Parquet have the text; null: the run's own"}
    )
    endoftext: str | None = field(
        default=None, metadata={"help": "<|endoftext|> in a text: token | text; null: the run's"}
    )

    def problems(self) -> list[Problem]:
        """The problems, as (key, value, reason, hint); empty when there are none."""
        found = []
        if not self.path:
            found.append(("path", self.path, "no text given", "set data.path=FILE"))
        if self.val_fraction is not None and not 0 < self.val_fraction < 1:
            cause = "is a share of the text, between 0 and 1"
            found.append(("val_fraction", self.val_fraction, cause, "use 0.1"))
        if self.endoftext not in (None, "token", "text"):
            found.append(("endoftext", self.endoftext, "no such choice", "use token or text"))
        return found


@dataclass
class EvaluateConfig:
    """python -m scripts.evaluate checkpoint=runs/NAME data.path=FILE [KEY=VALUE ...]"""

    checkpoint: str = field(
        metadata={"help": "a run (its last checkpoint), a checkpoint, a directory, hub:NAME"}
    )
    data: TextConfig
    split: str = field(
        default="auto",
        metadata={"help": "val | train, as a run splits it; auto: files named val, else all"},
    )
    max_length: int | None = field(
        default=None, metadata={"help": "tokens that a window reads; null: as many as in training"}
    )
    stride: int | None = field(
        default=None, metadata={"help": "from window to window; null: max_length, no overlap"}
    )
    words: int = field(
        default=0, metadata={"help": "words of the text as others count: perplexity per word, too"}
    )
    batch_size: int = field(default=8, metadata={"help": "windows at once"})
    precision: str = field(
        default="fp32", metadata={"help": "fp32 | bf16 | fp16 | auto (what training would take)"}
    )
    device: str = field(default="auto", metadata={"help": "auto | cpu | cuda | mps"})
    out: str = field(default="", metadata={"help": "a JSON file to write the figures to"})
    debug: bool = field(default=False, metadata={"help": "true: errors with their traceback"})

    def problems(self) -> list[Problem]:
        """The problems, as (key, value, reason, hint); empty when there are none."""
        found = []
        if not self.checkpoint:
            found.append(("checkpoint", "", "is empty", "give a run or a checkpoint"))
        if self.split not in ("auto", "val", "train"):
            found.append(("split", self.split, "no such part", "use auto, val or train"))
        for key in ("max_length", "stride", "batch_size"):
            if (value := getattr(self, key)) is not None and value < 1:
                found.append((key, value, "must be at least 1", f"leave {key}= out"))
        if not found and self.max_length and self.stride and self.stride > self.max_length:
            found.append(_skips(self.stride, self.max_length))
        if self.words < 0:
            found.append(("words", self.words, "must not be negative", "leave words= out"))
        if self.precision not in ("auto", "fp32", "bf16", "fp16"):
            fix = "use fp32, bf16, fp16 or auto"
            found.append(("precision", self.precision, "no such precision", fix))
        if self.device not in ("auto", "cpu", "cuda", "mps"):
            found.append(("device", self.device, "no such device", "use auto, cpu, cuda or mps"))
        out = Path(self.out)
        if self.out and (out.is_dir() or not out.parent.is_dir()):
            cause = "is a folder" if out.is_dir() else f"{out.parent} is no folder"
            found.append(("out", self.out, cause, "give a file in a folder that exists"))
        return found


def _skips(stride: int, max_length: int) -> Problem:
    cause = f"windows of max_length={max_length} would leave tokens between them out"
    return ("stride", stride, cause, f"use at most {max_length}")


@dataclass(frozen=True)
class Rule:
    """Which tokens are scored, and behind how much."""

    max_length: int
    stride: int
    within_documents: bool = False

    def __str__(self) -> str:
        least = self.max_length - self.stride + 1
        behind = f"{least:,} to {self.max_length:,} tokens" if self.stride > 1 else f"{least:,}"
        of = "document" if self.within_documents else "text"
        return (
            f"windows of {self.max_length:,} tokens, {self.stride:,} apart; each token of a {of} "
            f"is scored once, behind {behind}, or all that the {of} has before it"
        )


@settings_command(EvaluateConfig)
def main(settings: EvaluateConfig) -> None:
    from interop.huggingface import load_reader
    from training.distributed import device
    from training.distributed.launch import ParallelConfig
    from training.distributed.strategy import build_strategy

    refuse(device.check(settings.device, settings.precision))
    reader = load_reader(settings.checkpoint)
    rule = rule_for(settings, reader)
    tokens, what = read(settings, reader)
    windows = Windows(tokens, rule)
    if not windows.num_targets:
        cause = f"{len(tokens)} tokens ({what}), and to score one takes two"
        raise DataError("data.path", settings.data.path, cause, "use a longer text")
    single = ParallelConfig("single")
    parallel = build_strategy(single, settings.device, settings.precision, seed=0)
    with Progress(windows.num_targets) as progress:
        figures = evaluate(reader, windows, parallel, settings.batch_size, progress)
    if not math.isfinite(figures["loss"]):
        cause, fix = "its loss is no finite number", "use another one, or precision=fp32"
        raise CheckpointError("checkpoint", settings.checkpoint, cause, fix)
    if settings.words:
        loss_of_word = figures["loss"] * figures["tokens"] / settings.words
        figures |= {"words": settings.words, "word_perplexity": perplexity(loss_of_word)}
    show(figures, rule, reader, settings.checkpoint, what, parallel.precision)
    if settings.out:
        write(figures, rule, reader, settings, what, parallel)


def rule_for(settings: EvaluateConfig, reader: "Reader") -> Rule:
    """The rule that was asked for, by default the windows of training; ConfigError when the model
    does not reach so far."""
    max_length, most = settings.max_length or reader.window, reader.model.config.context_length
    if max_length > most:
        cause = f"the model reads {most} tokens at most"
        raise ConfigError([("max_length", max_length, cause, f"use at most {most}")])
    stride = settings.stride or max_length
    if stride > max_length:
        raise ConfigError([_skips(stride, max_length)])
    if max_length > reader.window:
        cause = f"the model was trained on windows of {reader.window}"
        print(f"note: max_length={max_length}: {cause}, and knows no more", file=sys.stderr)
    return Rule(max_length, stride, settings.data.within_documents)


# -------------------------------------------------------------------------------------- the text


def read(settings: EvaluateConfig, reader: "Reader") -> tuple["TokenStream", str]:
    """The tokens of data.path, or of its part, in the checkpoint's own; and what they are called.

    Raises DataError when they cannot be read, or split.
    """
    from data import DataConfig, load_stream, split_tokens

    own = reader.state.settings["data"] if reader.state else {}
    asked = {key: getattr(settings.data, key) for key in OF_RUN}
    values = {key: own[key] for key in OF_RUN if key in own}
    values |= {key: value for key, value in asked.items() if value is not None}
    values |= {"path": settings.data.path, "tokenizer": reader.tokenizer_name, "max_length": 1}
    config, problems = fill(DataConfig, values, "data.")
    refuse(problems)
    notes: list[str] = []
    try:
        streams = load_stream(config, config.path, notes)
    except DataError as error:
        if error.key != "data.tokenizer":
            raise
        cause = f"holds the tokens of another tokenizer than the checkpoint's, {config.tokenizer}"
        fix = f"prepare the text with data.tokenizer={config.tokenizer}, or give the text itself"
        raise DataError("data.path", config.path, cause, fix) from error
    tokens, what = streams["train"], "all of it"
    if settings.split == "auto":
        if "val" in streams:
            tokens, what = streams["val"], "the files named val"
    elif "val" in streams:
        tokens, what = streams[settings.split], f"its {settings.split} files"
    else:
        held_back = len(tokens) * config.val_fraction
        if held_back < 4:
            cause = f"{held_back:.0f} of {len(tokens)} tokens would be held back"
            fix = "use a longer text, a larger data.val_fraction, or split=auto for all of it"
            raise DataError("split", settings.split, cause, fix)
        parts = split_tokens(config, config.path, tokens, notes)
        tokens = parts[settings.split == "val"]
        what = f"its {settings.split} part, data.val_fraction={config.val_fraction:g}"
    for note in notes:
        print(visible(f"note: {note}"), file=sys.stderr)
    return tokens, what


class Windows:
    """The windows of a rule over a stream of tokens, in order, and what each of them scores.

    Needs memory for a few numbers a document with within_documents, and for nothing otherwise.
    """

    def __init__(self, tokens: "TokenStream", rule: Rule):
        import numpy as np

        self.tokens, self.rule = tokens, rule
        starts = np.zeros(1, np.int64)
        if rule.within_documents and len(tokens):
            starts = tokens.document_starts()
        targets = np.diff(starts, append=len(tokens)) - 1  # of each document: all but its first
        self.starts, self.targets = starts[targets > 0], targets[targets > 0]
        more = -(-np.maximum(0, self.targets - rule.max_length) // rule.stride)
        self.last_window = np.cumsum(1 + more)  # and one: of each document
        self.num_targets = int(self.targets.sum())

    def __len__(self) -> int:
        return int(self.last_window[-1]) if self.num_targets else 0

    def batch(self, windows: "np.ndarray") -> tuple["torch.Tensor", "torch.Tensor"]:
        """Windows (B,) -> input_ids (B, T), target_ids (B, T), int64; IGNORED what is not scored.

        A window shorter than the batch's longest is filled up behind its end, where nothing that
        is scored looks.
        """
        import numpy as np
        import torch

        from tokens.synthetic import IGNORED

        rule = self.rule
        document = np.searchsorted(self.last_window, windows, side="right")
        number = windows - np.where(document > 0, self.last_window[document - 1], 0)  # in it
        targets = self.targets[document]
        stop = np.minimum(number * rule.stride + rule.max_length, targets)  # scored up to here
        scored = np.where(number > 0, (number - 1) * rule.stride + rule.max_length, 0)  # before
        begin = np.maximum(0, stop - rule.max_length)
        size = (stop - begin).max()  # T
        ids = self.tokens.gather(self.starts[document] + begin, int(size) + 1).astype(np.int64)
        place = begin[:, None] + np.arange(size)  # (B, T), of a target among the document's
        counts = (place >= scored[:, None]) & (place < stop[:, None])
        target_ids = np.where(counts, ids[:, 1:], IGNORED)
        input_ids = np.where(place < stop[:, None], ids[:, :-1], self.tokens.end_of_text)
        return torch.from_numpy(input_ids), torch.from_numpy(target_ids)


# --------------------------------------------------------------------------------------- scoring


def evaluate(
    reader: "Reader",
    windows: Windows,
    parallel: "Strategy",
    batch_size: int,
    progress: "Progress | None" = None,
) -> dict[str, float | int | str]:
    """The figures: tokens, bytes, loss (nats per token), perplexity, bits_per_byte, and the
    SHA-256 of the scored tokens (uint16, little-endian) that they are of.
    """
    import numpy as np

    from tokens.encoding import token_sizes
    from tokens.synthetic import IGNORED

    model = reader.model.to(parallel.device)
    parallel.wrap(model, compiled=False)  # the fastest operations for this device
    times = np.zeros(reader.tokenizer.n_vocab, np.int64)  # that a token was scored
    digest, total = hashlib.sha256(), 0.0  # nats
    with parallel.inference(model):
        for first in range(0, len(windows), batch_size):
            here = np.arange(first, min(first + batch_size, len(windows)))
            input_ids, target_ids = windows.batch(here)  # (B, T)
            scored = target_ids != IGNORED  # (B, T)
            targets = target_ids[scored].numpy()  # (N,), in the order of the text
            times += np.bincount(targets, minlength=len(times))
            digest.update(targets.astype("<u2").tobytes())
            input_ids, target_ids, scored = parallel.to_device(input_ids, target_ids, scored)
            x = model.hidden_states(input_ids)[scored]  # (N, C): the head is for what is scored
            loss = model.head_loss(x, model.token_emb.weight, target_ids[scored])
            total += float(loss) * len(targets)
            if progress:
                progress.show(int(times.sum()), total)
    sizes = token_sizes(reader.tokenizer_name).copy()
    sizes[reader.tokenizer.eot_token] = 0  # it stands for no text
    count, num_bytes = int(times.sum()), int(times @ sizes)
    bits = total / math.log(2)
    return {
        "tokens": count,
        "bytes": num_bytes,
        "loss": total / count,
        "perplexity": perplexity(total / count),
        "bits_per_byte": bits / num_bytes if num_bytes else None,
        "sha256": digest.hexdigest(),
    }


def perplexity(loss: float) -> float | None:
    """e^loss; None beyond the largest number."""
    return math.exp(loss) if loss < 700 else None


class Progress:
    """How far it is, now and then, on stderr; on a terminal in one line that goes away again."""

    def __init__(self, total: int):
        self.total = total
        self.started = self.told = time.monotonic()
        self.on_terminal = sys.stderr.isatty()
        self.every = 0.5 if self.on_terminal else TELL_EVERY

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_) -> None:
        if self.on_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def show(self, done: int, nats: float) -> None:
        """So many tokens so far, and their loss together."""
        from training.reporting.console import duration

        now = time.monotonic()
        if now - self.told < self.every:
            return
        self.told = now
        left = (now - self.started) / done * (self.total - done)
        line = f"{done:,} of {self.total:,} tokens, loss {nats / done:.4f}, {duration(left)} left"
        start, end = ("\r\x1b[K", "") if self.on_terminal else ("", "\n")
        print(start + line, end=end, file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------- what is told


def show(
    figures: dict, rule: Rule, reader: "Reader", checkpoint: str, what: str, precision: str
) -> None:
    """Prints the figures, and by what rule they are so."""
    step = f", step {reader.state.step}" if reader.state else ""
    print(visible(f"{checkpoint}{step}, in {precision}, on {what}"))
    print(f"{rule}\n")
    lines = [
        ("tokens scored", f"{figures['tokens']:,}"),
        ("bytes of text", f"{figures['bytes']:,}"),
        ("loss", f"{figures['loss']:.4f} nats per token"),
        ("perplexity", _shown(figures["perplexity"])),
        ("bits per byte", _shown(figures["bits_per_byte"])),
    ]
    if "words" in figures:
        lines.append(("word perplexity", _shown(figures["word_perplexity"])))
    for name, value in lines:
        print(f"{name:<16} {value}")


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"


def write(
    figures: dict,
    rule: Rule,
    reader: "Reader",
    settings: EvaluateConfig,
    what: str,
    parallel: "Strategy",
) -> None:
    """The figures as JSON, with all that they depend on."""
    from training.reporting.machine import machine

    written = {
        "checkpoint": settings.checkpoint,
        "step": reader.state.step if reader.state else None,
        "parameters": reader.model.num_parameters(),
        "tokenizer": reader.tokenizer_name,
        "path": settings.data.path,
        "part": what,
        "rule": {**asdict(rule), "words": str(rule)},
        **figures,
        "precision": parallel.precision,
        "device": str(parallel.device),
        **machine(("torch", "numpy", "tiktoken")),
    }
    write_out(settings.out, written)
    print(visible(f"written to {settings.out}"), file=sys.stderr)


if __name__ == "__main__":
    main()
