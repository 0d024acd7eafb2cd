"""Tasks: what a preparation consists of, and how one of them becomes shards.

The texts are divided into tasks, each of which makes shards of its own (most make one) without
knowing of the others. What the tasks are depends on the texts alone, not on workers or machines.
"""

import hashlib
import itertools
import json
import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, NonNegativeInt

from files import atomic_write
from tokens.encoding import StreamEncoder
from tokens.manifest import ShardEntry
from tokens.paths import HUB, unreadable
from tokens.readers import Part, divide, encode_part
from tokens.shards import ShardWriter

SMALLEST_TASK = 2**24  # bytes of text
FEWEST_TASKS = 32  # of a large text, so that many workers are busy to the end


@dataclass(frozen=True)
class Recipe:
    """What is done with the texts."""

    tokenizer: str
    endoftext: str
    engine: str
    shard_tokens: int
    text_key: str

    def settings(self) -> list:
        """What the outcome depends on."""
        return [self.tokenizer, self.endoftext, self.shard_tokens, self.text_key]


@dataclass(frozen=True)
class Task:
    """Texts that become shards by themselves."""

    number: int
    parts: tuple[Part, ...]
    size: int  # bytes to read, about; rows of a hub data set count as none

    def fingerprint(self) -> str:
        """Changes when a text does."""
        texts = []
        for part in self.parts:
            changed = None
            if part.kind != "hub":
                try:
                    state = os.stat(part.path)
                except OSError as error:
                    raise unreadable(part.path, error) from error
                changed = [state.st_size, state.st_mtime_ns]
            texts.append([os.path.basename(part.path), part.start, part.stop, changed])
        return hash_of(texts)


class TaskRecord(BaseModel):
    """What a finished task leaves."""

    model_config = ConfigDict(strict=True)

    plan: str  # what it belongs to
    made_of: str  # the fingerprint of its texts
    text_bytes: NonNegativeInt
    shards: list[ShardEntry]


def hash_of(values: list) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def make_tasks(files: list[str], text_key: str, shard_tokens: int) -> list[Task]:
    """Divides files among tasks of about equal size, in order.

    A task is at most about one shard; large files are divided.
    """
    total = sum(os.path.getsize(file) for file in files if not file.startswith(HUB))
    most = min(max(SMALLEST_TASK, total // FEWEST_TASKS), 4 * shard_tokens)
    tasks: list[Task] = []
    parts: list[Part] = []
    size = 0
    for part in itertools.chain.from_iterable(divide(file, most, text_key) for file in files):
        if parts and (size + part.size > most or part.kind == "hub"):
            tasks.append(Task(len(tasks), tuple(parts), size))
            parts, size = [], 0
        parts.append(part)
        size += part.size
    return [*tasks, Task(len(tasks), tuple(parts), size)]


# ------------------------------------------------------------------------------------- one task


def run_task(task: Task, folder: Path, recipe: Recipe, plan: str) -> int:
    """Makes the shards of a task and leaves its record; returns the bytes of its text."""
    encoder = StreamEncoder(recipe.tokenizer, recipe.endoftext, recipe.engine)
    record_file = folder / "preparing" / f"{task.number:05d}.json"
    record_file.unlink(missing_ok=True)  # it would tell of other shards
    for path in folder.glob(f"shard_{task.number:05d}_*.bin*"):
        path.unlink(missing_ok=True)  # of a run that was interrupted
    made_of = task.fingerprint()
    shards: list[ShardEntry] = []
    writer: ShardWriter | None = None
    try:
        for ids in itertools.chain.from_iterable(encode_part(p, encoder) for p in task.parts):
            while len(ids):
                if writer is None:
                    name = f"shard_{task.number:05d}_{len(shards):02d}.bin"
                    writer = ShardWriter(folder / name, encoder.tokenizer.eot_token)
                room = recipe.shard_tokens - writer.tokens
                writer.append(ids[:room])
                ids = ids[room:]
                if writer.tokens == recipe.shard_tokens:
                    shards.append(writer.close())
                    writer = None
        if writer:
            shards.append(writer.close())
    finally:
        if writer:
            writer.abandon()
    record = TaskRecord(plan=plan, made_of=made_of, text_bytes=encoder.text_bytes, shards=shards)
    atomic_write(record_file, record.model_dump_json().encode())
    return encoder.text_bytes
