"""Tokenizes texts of any size to token files that training maps into memory.

    python -m scripts.prepare_data data.path=corpus/sample.txt out=tokens-sample
    python -m scripts.prepare_data data.path='web/*.jsonl.gz' out=web
    python train.py data=shards data.path=web

Reads text, JSON lines, CSV and Parquet. Writes shards in the format of llm.c, and a manifest
(docs/data.md). Uses all cores and little memory. To resume, rerun the same command.
"""

import shlex
import sys
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from clearhead.config.command_line import ScriptConfig, settings_command
from clearhead.config.schema import Count, Name, Positive, is_tokenizer, rejected
from clearhead.errors import ConfigError, sanitize
from clearhead.files import script_path
from clearhead.output.console import progress
from clearhead.tokens import TRAINED
from clearhead.tokens.encoding import available_cores
from clearhead.tokens.gutenberg import notes_about_trimmed
from clearhead.tokens.prepare import Preparation, PrepareSettings
from scripts.train_tokenizer import SourceConfig


class PreparedConfig(SourceConfig):
    """The texts, and how they are tokenized."""

    tokenizer: Name = Field(
        "gpt2",
        description="gpt2 | byte | a directory with tokenizer.json (scripts.train_tokenizer)",
    )

    @field_validator("tokenizer")
    @classmethod
    def _is_stored(cls, name: str) -> str:
        if name == TRAINED or not is_tokenizer(name):
            raise rejected(
                "is not trained here" if name == TRAINED else "no such tokenizer or directory",
                "use gpt2, byte, or the directory that python -m scripts.train_tokenizer writes",
            )
        return name


class PrepareConfig(ScriptConfig):
    """python -m scripts.prepare_data data.path=TEXTS out=DIR [KEY=VALUE ...]"""

    data: PreparedConfig
    out: Name = Field(description="folder for the token files")
    workers: Annotated[Count, Field(le=1024)] = Field(0, description="processes; 0: one per core")
    shard_tokens: Annotated[Positive, Field(lt=2**31)] = Field(
        100_000_000, description="maximum tokens per file"
    )


@settings_command(PrepareConfig)
def main(settings: PrepareConfig) -> None:
    data = settings.data
    prepare_settings = PrepareSettings(
        shard_tokens=settings.shard_tokens, **data.model_dump(exclude={"path"})
    )
    files = data.files()
    preparation = Preparation(files, Path(settings.out), prepare_settings)
    try:
        preparation.start()
    except OSError as error:
        reason = f"cannot be written ({error.strerror})"
        raise ConfigError([("out", settings.out, reason, "use another folder")]) from error
    tasks = len(preparation.tasks)
    if done := tasks - len(preparation.unfinished()):
        print(f"{done} of {tasks} tasks are already complete")
    try:
        with progress("tasks") as report_progress:
            manifest = preparation.run(settings.workers or available_cores(), report_progress)
    except KeyboardInterrupt:
        print("stopped; to resume, rerun the same command", file=sys.stderr)
        raise
    report(manifest, settings)
    for note in notes_about_trimmed(data.path, preparation.trimmed):
        print(note)


def report(manifest: dict, settings: PrepareConfig) -> None:
    """Prints the number of tokens and documents, and the command that trains on them."""
    counted = "{tokens:,} tokens and {documents:,} documents".format(**manifest)
    empty = manifest["empty_documents"]
    skipped = f"; {empty:,} empty texts skipped" if empty else ""
    print(sanitize(f"{counted} in {settings.out}{skipped}", keep=""))
    name = settings.data.tokenizer
    tokenizer = "" if name == "gpt2" else f" {shlex.quote(f'data.tokenizer={name}')}"
    path = shlex.quote(f"data.path={settings.out}")
    command = f"python {shlex.quote(script_path('train.py'))} data=shards {path}{tokenizer}"
    print(sanitize(f"train on them: {command}", keep=""))


if __name__ == "__main__":
    main()
