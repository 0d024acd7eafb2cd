"""How well a model predicts a text: loss, perplexity, bits per byte.

    python -m scripts.evaluate checkpoint=runs/NAME data.path=my.txt
    python -m scripts.evaluate checkpoint=DIR data.path=tokens stride=128 out=figures.json

`checkpoint` is a run, one of its checkpoints, a Hugging Face GPT-2 directory or hub:NAME;
`data.path` what training reads: texts, or a folder of token files.

A text is its tokens after an end-of-text token, as in training. Each token is scored once, by the
rule of inference/perplexity.py. A small stride takes more windows and gives the model more context.
With stride=max_length these are the windows of training's validation, and of lm-eval's rolling
perplexity (docs/models.md).
"""

import math
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from errors import CheckpointError, ConfigError, DataError, Problem, refuse, visible
from training.config.command_line import OutFile, ScriptConfig, settings_command, write_out
from training.config.schema import (
    AboveZero,
    Count,
    DataConfig,
    Device,
    Name,
    ParallelConfig,
    Paths,
    Positive,
    Precision,
    rejected,
)
from training.reporting.console import duration
from training.reporting.machine import machine

if TYPE_CHECKING:
    from inference.perplexity import Rule
    from interop.pretrained import PretrainedModel
    from tokens.stream import TokenStream
    from training.distributed.strategy import Strategy

PROGRESS_EVERY = 10  # seconds
FROM_RUN = ("text_key", "endoftext", "val_fraction")  # data settings that default to the run's


class TextConfig(BaseModel):
    """Which text, and how it is read."""

    model_config = ConfigDict(extra="forbid")

    path: Paths = Field(description="a text or token file, a folder, a glob, a list of these")
    within_documents: bool = Field(
        False, description="true: each document by itself, end-of-text not scored"
    )
    val_fraction: Annotated[AboveZero, Field(lt=1)] | None = Field(
        None, description="where split=val and train part; null: the run's own"
    )
    text_key: Name | None = Field(
        None, description="field or column of JSON and Parquet with the text; null: the run's own"
    )
    endoftext: Literal["token", "text"] | None = Field(
        None, description="how <|endoftext|> in a text is read: token | text; null: the run's own"
    )


class EvaluateConfig(ScriptConfig):
    """python -m scripts.evaluate checkpoint=runs/NAME data.path=FILE [KEY=VALUE ...]"""

    checkpoint: Name = Field(
        description="a run (its last checkpoint), a checkpoint, a directory, hub:NAME"
    )
    data: TextConfig
    split: Literal["auto", "val", "train"] = Field(
        "auto", description="val | train, as a run splits it; auto: files named val, else all"
    )
    max_length: Positive | None = Field(
        None, description="tokens that a window reads; null: as many as in training"
    )
    stride: Positive | None = Field(
        None, description="tokens from window to window; null: max_length, no overlap"
    )
    words: Count = Field(0, description="words of the text; with it, perplexity per word too")
    batch_size: Positive = Field(8, description="windows at once")
    precision: Precision = Field(
        "fp32", description="fp32 | bf16 | fp16 | auto (what training would take)"
    )
    device: Device = Field("auto", description="auto | cpu | cuda | mps")
    out: OutFile = Field("", description="a JSON file for the figures")

    @field_validator("stride")
    @classmethod
    def _skips_nothing(cls, stride: int | None, info: ValidationInfo) -> int | None:
        max_length = info.data.get("max_length")
        if stride and max_length and stride > max_length:
            _, _, reason, hint = _skips(stride, max_length)
            raise rejected(reason, hint)
        return stride


def _skips(stride: int, max_length: int) -> Problem:
    reason = f"windows of max_length={max_length} would skip the tokens between them"
    return ("stride", stride, reason, f"use at most {max_length}")


@settings_command(EvaluateConfig)
def main(settings: EvaluateConfig) -> None:
    from inference.perplexity import Rule, Windows, evaluate, perplexity
    from interop.pretrained import load_pretrained
    from tokens.encoding import token_sizes
    from training.distributed import device
    from training.distributed.build import build_strategy

    refuse(device.check(settings.device, settings.precision))
    pretrained = load_pretrained(settings.checkpoint)
    rule = Rule(*window_sizes(settings, pretrained), settings.data.within_documents)
    tokens, what = read(settings, pretrained)
    windows = Windows(tokens, rule)
    if not windows.num_targets:
        reason = f"{len(tokens)} tokens ({what}), and to score one takes two"
        raise DataError("data.path", settings.data.path, reason, "use a longer text")
    single = ParallelConfig.with_defaults(strategy="single")
    strategy = build_strategy(single, settings.device, settings.precision, seed=0)
    model = pretrained.model.to(strategy.device)
    strategy.wrap(model, compiled=False)  # the fastest operations for this device
    sizes = token_sizes(pretrained.tokenizer_name).copy()
    sizes[pretrained.tokenizer.eot_token] = 0  # it is not part of the text
    with Progress(windows.num_targets) as progress, strategy.inference(model):
        figures = evaluate(model, windows, sizes, settings.batch_size, progress.show)
    if not math.isfinite(figures["loss"]):
        hint = "use another one, or precision=fp32"
        raise CheckpointError("checkpoint", settings.checkpoint, "its loss is NaN or inf", hint)
    if settings.words:
        loss_of_word = figures["loss"] * figures["tokens"] / settings.words
        figures |= {"words": settings.words, "word_perplexity": perplexity(loss_of_word)}
    step = f", step {pretrained.state.step}" if pretrained.state else ""
    print(visible(f"{settings.checkpoint}{step}, in {strategy.precision}, on {what}"))
    print(f"{rule}\n")
    print_figures(figures)
    if settings.out:
        write_out(settings.out, report(figures, rule, pretrained, settings, what, strategy))
        print(visible(f"written to {settings.out}"), file=sys.stderr)


def window_sizes(settings: EvaluateConfig, pretrained: "PretrainedModel") -> tuple[int, int]:
    """max_length and stride of the windows, by default those of training. Raises ConfigError when
    max_length exceeds the model's context."""
    max_length = settings.max_length or pretrained.window
    if max_length > (most := pretrained.model.config.context_length):
        reason = f"the model reads {most} tokens at most"
        raise ConfigError([("max_length", max_length, reason, f"use at most {most}")])
    stride = settings.stride or max_length
    if stride > max_length:
        raise ConfigError([_skips(stride, max_length)])
    if max_length > pretrained.window:
        reason = f"the model was trained on windows of {pretrained.window} only"
        print(f"note: max_length={max_length}: {reason}", file=sys.stderr)
    return max_length, stride


def read(settings: EvaluateConfig, pretrained: "PretrainedModel") -> tuple["TokenStream", str]:
    """The tokens of data.path, or of its part, by the checkpoint's tokenizer; and a description.

    Raises DataError when they cannot be read or split.
    """
    from data import load_stream, split_tokens

    own = pretrained.state.settings["data"] if pretrained.state else {}
    given = {key: getattr(settings.data, key) for key in FROM_RUN}
    values = {key: own[key] for key in FROM_RUN if key in own}
    values |= {key: value for key, value in given.items() if value is not None}
    values |= {"path": settings.data.path, "tokenizer": pretrained.tokenizer_name, "max_length": 1}
    config = DataConfig.with_defaults(**values)
    notes: list[str] = []
    try:
        streams = load_stream(config, config.path, notes)
    except DataError as error:
        if error.key != "data.tokenizer":
            raise
        reason = f"holds the tokens of another tokenizer than the checkpoint's, {config.tokenizer}"
        hint = f"prepare the text with data.tokenizer={config.tokenizer}, or give the text itself"
        raise DataError("data.path", config.path, reason, hint) from error
    split, tokens, what = settings.split, streams["train"], "all of it"
    if split == "auto" and "val" in streams:
        tokens, what = streams["val"], "the files named val"
    elif split != "auto" and "val" in streams:
        tokens, what = streams[split], f"its {split} files"
    elif split != "auto":
        held_back = len(tokens) * config.val_fraction
        if held_back < 4:
            reason = f"{held_back:.0f} of {len(tokens)} tokens would be held back"
            hint = "use a longer text, a larger data.val_fraction, or split=auto for all of it"
            raise DataError("split", split, reason, hint)
        tokens = split_tokens(config, config.path, tokens, notes)[split == "val"]
        what = f"its {split} part, data.val_fraction={config.val_fraction:g}"
    for note in notes:
        print(visible(f"note: {note}"), file=sys.stderr)
    return tokens, what


class Progress:
    """Progress on stderr: on a terminal one line that is removed at the end, else a line now and
    then."""

    def __init__(self, total: int):
        self.total = total
        self.started = self.shown = time.monotonic()
        self.on_terminal = sys.stderr.isatty()
        self.every = 0.5 if self.on_terminal else PROGRESS_EVERY

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_) -> None:
        if self.on_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def show(self, done: int, nats: float) -> None:
        """done: tokens so far. nats: the sum of their losses."""
        now = time.monotonic()
        if now - self.shown < self.every:
            return
        self.shown = now
        left = (now - self.started) / done * (self.total - done)
        line = f"{done:,} of {self.total:,} tokens, loss {nats / done:.4f}, {duration(left)} left"
        start, end = ("\r\x1b[K", "") if self.on_terminal else ("", "\n")
        print(start + line, end=end, file=sys.stderr, flush=True)


def print_figures(figures: dict) -> None:
    show = lambda value: "none" if value is None else f"{value:.4f}"  # noqa: E731
    lines = [
        ("tokens scored", f"{figures['tokens']:,}"),
        ("bytes of text", f"{figures['bytes']:,}"),
        ("loss", f"{figures['loss']:.4f} nats per token"),
        ("perplexity", show(figures["perplexity"])),
        ("bits per byte", show(figures["bits_per_byte"])),
    ]
    if "words" in figures:
        lines.append(("word perplexity", show(figures["word_perplexity"])))
    for name, value in lines:
        print(f"{name:<16} {value}")


def report(
    figures: dict,
    rule: "Rule",
    pretrained: "PretrainedModel",
    settings: EvaluateConfig,
    what: str,
    strategy: "Strategy",
) -> dict:
    """The figures with all that they depend on, for out=."""
    return {
        "checkpoint": settings.checkpoint,
        "step": pretrained.state.step if pretrained.state else None,
        "parameters": pretrained.model.num_parameters(),
        "tokenizer": pretrained.tokenizer_name,
        "path": settings.data.path,
        "part": what,
        "rule": {**asdict(rule), "words": str(rule)},
        **figures,
        "precision": strategy.precision,
        "device": str(strategy.device),
        **machine(("torch", "numpy", "tiktoken")),
    }


if __name__ == "__main__":
    main()
