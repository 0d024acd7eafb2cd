"""Converts text files to a folder of shards, with many processes; can be resumed.

The text is divided into tasks. Each task writes its own shards (usually one), independently of
other tasks. The division depends only on the files and settings, so the shards do not depend on the
number of workers. A finished task writes a record. An interrupted task is repeated. When all tasks
have a record, the manifest is written.

    DIR/shard_00000_00.bin, ...        the shards (tokens/shards.py), named by task and number
    DIR/preparing/00000.json, ...      the record of each finished task
    DIR/tokenizer.json                 a copy, unless data.tokenizer is gpt2 or byte
    DIR/manifest.json                  written last
"""

import contextlib
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, NonNegativeInt

from clearhead.errors import DataError, PreparationError
from clearhead.files import atomic_write, read_json, remove_temporary_files
from clearhead.tokens.encoding import StreamEncoder
from clearhead.tokens.readers import NO_TEXT, documents, encode_part, format_of, split_file
from clearhead.tokens.shards import (
    HEADER_BYTES,
    MANIFEST,
    MANIFEST_VERSION,
    ShardEntry,
    ShardWriter,
    write_manifest,
)
from clearhead.tokens.text_files import FilePart, translate_read_errors
from clearhead.tokens.tokenizer_json import TOKENIZER, load_tokenizer, stored

MIN_TASK_BYTES = 2**22  # of text
MIN_TASKS = 128  # for a large text, so that all workers are busy until the end


@dataclass(frozen=True)
class PrepareSettings:
    """The settings of a preparation; see scripts/prepare_data.py."""

    tokenizer: str  # gpt2 | byte | the path of a stored one
    shard_tokens: int
    text_key: str | list[str]
    encoding: str = "utf-8"
    trim: bool = True


@dataclass(frozen=True)
class Task:
    """The file parts that one task converts to shards."""

    number: int
    parts: tuple[FilePart, ...]
    fingerprint: str  # of the files when they were split


class TaskRecord(BaseModel):
    """The record of a finished task, stored as JSON."""

    model_config = ConfigDict(strict=True)

    plan: str  # Preparation.plan
    fingerprint: str  # of the files
    empty_documents: NonNegativeInt = 0
    trimmed: dict[str, NonNegativeInt] = {}  # gutenberg.between_markers
    shards: list[ShardEntry]


def hash_of(values: list) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def fingerprint_of(parts: Iterable[FilePart]) -> str:
    """Returns a hash of the files' names, sizes and modification times, and of the byte ranges."""
    values = []
    for part in parts:
        changed = None
        if format_of(part.path).is_file:
            with translate_read_errors(part.path, OSError):
                state = os.stat(part.path)
            changed = [state.st_size, state.st_mtime_ns]
        values.append([os.path.basename(part.path), part.start, part.stop, changed])
    return hash_of(values)


def make_tasks(files: list[str], shard_tokens: int, **options) -> list[Task]:
    """Divides files into tasks of similar size, in order.

    Large files are split and small ones combined. A task has at most about one shard of tokens.
    options: text_key, encoding, trim and special.
    """
    total = sum(os.path.getsize(file) for file in files if format_of(file).is_file)
    task_bytes = min(max(MIN_TASK_BYTES, total // MIN_TASKS), 4 * shard_tokens)
    groups: list[list[FilePart]] = [[]]
    size = 0  # of the last group
    for part in itertools.chain.from_iterable(split_file(f, task_bytes, **options) for f in files):
        if groups[-1] and (size + part.size > task_bytes or not format_of(part.path).is_file):
            groups.append([])
            size = 0
        groups[-1].append(part)
        size += part.size
    return [Task(n, tuple(parts), fingerprint_of(parts)) for n, parts in enumerate(groups)]


# --------------------------------------------------------------------------------------- all tasks


class Preparation:
    """The preparation of a folder of shards."""

    def __init__(self, files: list[str], folder: Path, settings: PrepareSettings):
        self.folder = folder
        self.settings = settings
        options = {key: getattr(settings, key) for key in ("text_key", "encoding", "trim")}
        self.tokenizer = load_tokenizer(settings.tokenizer)
        options["special"] = self.tokenizer.special_bytes
        self.tasks = make_tasks(files, settings.shard_tokens, **options)
        # Identifies a preparation by file names and settings. Changed files are detected per task.
        names = [os.path.basename(file) for file in files]
        values = [settings.shard_tokens, settings.text_key, settings.encoding]
        values += [True] * settings.trim  # as before there was this setting, if it is false
        self.plan = hash_of([MANIFEST_VERSION, self.tokenizer.name, names, values])

    def start(self) -> None:
        """Creates the folder. Raises DataError when it contains other token files, or if the first
        document of a file cannot be read."""
        preparing, unfinished = self.folder / "preparing", self.unfinished()
        reason = None
        if not preparing.exists() and any(self.folder.glob("*.bin")):
            reason = "contains other token files"
        elif any(record.plan != self.plan for record in self._records().values()):
            reason = "contains a preparation of other files or with other settings"
        elif (self.folder / MANIFEST).exists() and unfinished:
            reason = "the text files have changed, or the token files are damaged"
        if reason:
            hint = "use another out=, or delete the folder; training reads several: data.path=[A,B]"
            raise DataError("out", self.folder, reason, hint)
        for part in itertools.chain(*(task.parts for task in unfinished)):
            if part.start == 0 and format_of(part.path).is_file:  # not after hours of other files
                for blocks in itertools.islice(documents(part), 1):
                    next(iter(blocks), None)
        preparing.mkdir(parents=True, exist_ok=True)
        if content := stored(self.tokenizer, self.settings.tokenizer):
            atomic_write(self.folder / TOKENIZER, content)

    def _records(self) -> dict[int, TaskRecord]:
        """Returns valid records by task number. A record's shards must exist and be complete."""
        records = {}
        for path in (self.folder / "preparing").glob("[0-9]*.json"):
            with contextlib.suppress(OSError, ValueError):
                values = read_json(path)
                record = TaskRecord.model_validate(values)
                sizes = [(self.folder / shard.file).stat().st_size for shard in record.shards]
                if sizes == [HEADER_BYTES + 2 * shard.tokens for shard in record.shards]:
                    records[int(path.stem)] = record
        return records

    def unfinished(self) -> list[Task]:
        """Returns the tasks that have no record, or whose files have changed since."""
        done = {number: record.fingerprint for number, record in self._records().items()}
        return [task for task in self.tasks if done.get(task.number) != fingerprint_of(task.parts)]

    def run(self, workers: int, report: Callable[[int, int], None]) -> dict:
        """Runs the unfinished tasks, writes the manifest and returns it. Calls report(tasks done,
        all) after each task. Raises DataError, and PreparationError in place of OSError."""
        try:
            # The system releases the lock if the process dies.
            with FileLock(self.folder / "preparing" / "lock", timeout=0):
                work = functools.partial(
                    run_task, folder=self.folder, settings=self.settings, plan=self.plan
                )
                _run_tasks(work, self.unfinished(), workers, report)
                return self._finish()
        except Timeout as error:
            reason = "another process is preparing this folder"
            raise DataError("out", self.folder, reason, "wait for it or stop it") from error
        except OSError as error:  # read errors are DataError already
            reason = f"cannot be written ({error.strerror or error})"
            hint = "check disk space and permissions, then rerun the same command"
            raise PreparationError("out", self.folder, reason, hint) from error

    def _finish(self) -> dict:
        """Writes the manifest and returns it."""
        if changed := self.unfinished():
            path, reason = changed[0].parts[0].path, "changed while it was tokenized"
            raise DataError("data.path", path, reason, "rerun the same command")
        known = self._records()
        records = [known[task.number] for task in self.tasks]
        shards = [shard for record in records for shard in record.shards]
        self.trimmed = sum((Counter(record.trimmed) for record in records), Counter())
        if not shards:
            raise DataError("out", self.folder, *NO_TEXT)
        remove_temporary_files(self.folder)
        found = set(self.folder.glob("shard_[0-9]*_[0-9]*.bin"))
        for path in found - {self.folder / shard.file for shard in shards}:
            path.unlink(missing_ok=True)  # written before the text files changed
        empty_documents = sum(record.empty_documents for record in records)
        return write_manifest(self.folder, shards, self.tokenizer, empty_documents)


def _run_tasks(
    work: Callable[[Task], None],
    tasks: list[Task],
    workers: int,
    report: Callable[[int, int], None],
) -> None:
    if workers == 1 or len(tasks) <= 1:
        for done, task in enumerate(tasks, start=1):
            work(task)
            report(done, len(tasks))
        return
    context = multiprocessing.get_context("spawn")  # fork is unsafe with threads
    with ProcessPoolExecutor(min(workers, len(tasks)), context, _init_worker) as pool:
        try:
            with _sigint_blocked():  # also in the workers, which this starts
                futures = [pool.submit(work, task) for task in tasks]
            for done, future in enumerate(as_completed(futures), start=1):
                future.result()  # raises the error of the task
                report(done, len(tasks))
        except BrokenProcessPool as error:
            reason = "a worker process was killed, possibly because the memory was full"
            raise PreparationError("workers", workers, reason, "use fewer workers") from error
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()
            raise


@contextlib.contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Delays SIGINT (Ctrl-C) until the end. A process that is started meanwhile never gets it, not
    even while it imports modules: its parent handles it."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _init_worker() -> None:
    """Ends the worker when the parent has ended, for example by SIGKILL."""

    def end_with_parent() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


# ---------------------------------------------------------------------------------------- one task


def run_task(task: Task, folder: Path, settings: PrepareSettings, plan: str) -> None:
    """Writes the shards of a task, then its record."""
    tokenizer = load_tokenizer(settings.tokenizer)
    encoder = StreamEncoder(tokenizer)
    record_file = folder / "preparing" / f"{task.number:05d}.json"
    record_file.unlink(missing_ok=True)  # an old record would describe the old shards
    for path in folder.glob(f"shard_{task.number:05d}_*.bin*"):
        path.unlink(missing_ok=True)  # from an interrupted preparation
    shards: list[ShardEntry] = []
    writer: ShardWriter | None = None
    try:
        for ids in itertools.chain.from_iterable(encode_part(p, encoder) for p in task.parts):
            while len(ids):
                if writer is None:
                    name = f"shard_{task.number:05d}_{len(shards):02d}.bin"
                    writer = ShardWriter(folder / name, tokenizer.eot_token)
                room = settings.shard_tokens - writer.tokens
                writer.append(ids[:room])
                ids = ids[room:]
                if writer.tokens == settings.shard_tokens:
                    shards.append(writer.close())
                    writer = None
        if writer:
            shards.append(writer.close())
    except BaseException:
        for shard in shards:
            (folder / shard.file).unlink(missing_ok=True)
        raise
    finally:
        if writer:
            writer.discard()
    record = TaskRecord(
        plan=plan,
        fingerprint=task.fingerprint,
        empty_documents=encoder.empty_documents,
        trimmed=encoder.trimmed,
        shards=shards,
    )
    atomic_write(record_file, record.model_dump_json().encode())
