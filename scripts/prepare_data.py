"""Texts of any size -> token files that training maps into memory.

    python -m scripts.prepare_data data.path=corpus/sample.txt out=tokens-sample
    python -m scripts.prepare_data data.path='web/*.jsonl.gz' out=web part=3/16
    python train.py data=shards data.path=web

Text, JSON lines and Parquet become shards in llm.c's layout and a manifest (docs/data.md). All
cores work, memory stays flat, and after a stop the same command resumes.
"""

import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator
from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar

from errors import ConfigError, visible
from training.config.command_line import ScriptConfig, settings_command
from training.config.schema import Count, Name, Paths, Positive, rejected
from training.reporting.console import rich_console


class SourceConfig(BaseModel):
    """Which texts, and how they are tokenized."""

    model_config = ConfigDict(extra="forbid")

    path: Paths = Field(
        description="a file, a folder, a glob, a list of these, or hub:NAME:CONFIG:SPLIT"
    )
    tokenizer: Literal["gpt2", "byte"] = Field("gpt2", description="gpt2 | byte")
    text_key: Name = Field("text", description="field or column of JSON and Parquet with the text")
    endoftext: Literal["token", "text"] = Field(
        "token", description="how <|endoftext|> in a text is read: token | text"
    )


class PrepareConfig(ScriptConfig):
    """python -m scripts.prepare_data data.path=TEXTS out=DIR [KEY=VALUE ...]"""

    data: SourceConfig
    out: Name = Field(description="the folder of the token files")
    part: Name = Field("1/1", description="i/n: the i-th of n machines that share the work")
    workers: Annotated[Count, Field(le=1024)] = Field(0, description="processes; 0: one per core")
    shard_tokens: Annotated[Positive, Field(lt=2**31)] = Field(
        100_000_000, description="most tokens in a file"
    )
    engine: Literal["auto", "gigatoken", "tiktoken"] = Field(
        "auto", description="auto | gigatoken | tiktoken (slower)"
    )

    @field_validator("out")
    @classmethod
    def _is_no_file(cls, out: str) -> str:
        if os.path.exists(out) and not os.path.isdir(out):
            raise rejected("is a file", "give a folder")
        return out

    @field_validator("part")
    @classmethod
    def _is_a_part(cls, part: str) -> str:
        numbers = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", part)
        if not numbers or not 1 <= int(numbers[1]) <= int(numbers[2]):
            raise rejected("must be i/n, with i from 1 to n", "such as part=1/4")
        return part


@settings_command(PrepareConfig)
def main(settings: PrepareConfig) -> None:
    from tokens.paths import find_files
    from tokens.prepare import Preparation, Recipe

    data = settings.data
    recipe = Recipe(data.tokenizer, data.endoftext, settings.engine, settings.shard_tokens)
    folder = Path(settings.out)
    preparation = Preparation(find_files(data.path), folder, data.text_key, recipe)
    try:
        complete = not preparation.begin()
    except OSError as error:
        cause = f"cannot be written ({error.strerror})"
        raise ConfigError([("out", settings.out, cause, "give another folder")]) from error
    if complete:
        print(visible(f"{folder} is complete already", keep=""))
        report(preparation.finish(), settings)
        return
    part = tuple(map(int, settings.part.split("/")))
    tasks = preparation.unfinished(*part)
    mine = preparation.share(*part)
    if len(tasks) < len(mine):
        print(f"resuming: {len(mine) - len(tasks)} of {len(mine)} tasks were done before")
    if tasks:
        workers = settings.workers or cores()
        started = time.perf_counter()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the workers end, too
        with Progress(sum(task.size for task in tasks)) as progress:
            try:
                preparation.run(tasks, workers, progress.show, part)
            except KeyboardInterrupt:
                print("stopped; to resume, rerun the same command", file=sys.stderr)
                raise
        seconds = time.perf_counter() - started
        print(
            f"{progress.done / 1e6:,.1f} MB of text in {seconds:,.1f} s: "
            f"{progress.done / seconds / 1e6:,.1f} MB/s"
        )
    manifest = preparation.finish()
    if manifest is None:
        left = len(preparation.unfinished())
        print(f"part {settings.part} is done; {left} tasks of other parts are not yet")
        return
    report(manifest, settings)


def report(manifest: dict, settings: PrepareConfig) -> None:
    """Says what there is now, and how to train on it."""
    shards = manifest["shards"]
    counts = {noun: sum(s[f"{noun}s"] for s in shards) for noun in ("token", "document")}
    counts["shard"] = len(shards)
    words = [f"{n:,} {noun}{'' if n == 1 else 's'}" for noun, n in counts.items()]
    print(visible(f"{', '.join(words)} in {settings.out}", keep=""))
    name = settings.data.tokenizer
    tokenizer = "" if name == "gpt2" else f" data.tokenizer={name}"
    path = shlex.quote(f"data.path={settings.out}")
    print(visible(f"train on them: python train.py data=shards {path}{tokenizer}", keep=""))


def cores() -> int:
    """How many this process may use, where the system tells; else how many there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Progress:
    """Megabytes, speed and time left: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, total: int):
        self.total, self.done, self.told = total, 0, time.monotonic()
        self.bar = None
        console = rich_console()
        if console.is_terminal:
            columns = (
                BarColumn(32),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
            )
            self.bar = Bar(*columns, console=console, transient=True)
            self.task = self.bar.add_task("", total=total or None)
        self.started = self.told

    def __enter__(self) -> "Progress":
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *_) -> None:
        if self.bar:
            self.bar.stop()

    def show(self, done: int) -> None:
        """So many bytes of text so far; of compressed files more come than were announced."""
        self.done, now = done, time.monotonic()
        if self.bar:
            self.bar.update(self.task, completed=done, total=max(self.total, done) or None)
        elif now - self.told >= 10:
            self.told = now
            speed = done / (now - self.started)
            left = max(0, self.total - done) / speed if speed else 0
            print(
                f"{done / 1e6:,.0f} MB of {self.total / 1e6:,.0f}, {speed / 1e6:,.1f} MB/s, "
                f"about {left:,.0f} s left",
                flush=True,
            )


if __name__ == "__main__":
    main()
