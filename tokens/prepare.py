"""Texts -> a folder of shards, by all cores, restartable, shared by machines.

The texts are divided into tasks, each of which makes its own shards (most make one) without
knowing of the others. What the tasks are depends on the texts alone, so the outcome does not depend
on the number of workers or machines. A finished task leaves a record; an interrupted one is done
again. When every record is there, they become the manifest.

    DIR/shard_00000_00.bin, ...        the shards (tokens/shards.py)
    DIR/preparing/00000.json, ...      a record of each task
    DIR/manifest.json                  when it is complete
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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, NonNegativeInt

from errors import DataError, PreparationError
from files import atomic_write, read_json, remove_temporary_files
from tokens.encoding import StreamEncoder
from tokens.paths import HUB, translate_read_errors
from tokens.readers import FilePart, encode_part, split_file
from tokens.shards import (
    HEADER_BYTES,
    MANIFEST,
    MANIFEST_LIMIT,
    ShardEntry,
    ShardWriter,
    write_manifest,
)

MIN_TASK_BYTES = 2**24  # bytes of text
MIN_TASKS = 32  # of a large text, so that many workers are busy to the end


@dataclass(frozen=True)
class PrepareSettings:
    """What is done with the texts."""

    tokenizer: str
    endoftext: str
    engine: str
    shard_tokens: int
    text_key: str


@dataclass(frozen=True)
class Task:
    """File parts that are written to shards of their own."""

    number: int
    parts: tuple[FilePart, ...]
    fingerprint: str  # of the files when they were split

    @property
    def size(self) -> int:
        """Bytes to read, about; rows of a hub data set count as none."""
        return sum(part.size for part in self.parts)


class TaskRecord(BaseModel):
    """What a finished task leaves."""

    model_config = ConfigDict(strict=True)

    plan: str  # what it belongs to
    fingerprint: str  # the fingerprint of its texts
    text_bytes: NonNegativeInt
    shards: list[ShardEntry]


def hash_of(values: list) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def fingerprint_of(parts: Iterable[FilePart]) -> str:
    """Changes when a text does."""
    texts = []
    for part in parts:
        changed = None
        if part.format != "hub":
            with translate_read_errors(part.path, OSError):
                state = os.stat(part.path)
            changed = [state.st_size, state.st_mtime_ns]
        texts.append([os.path.basename(part.path), part.start, part.stop, changed])
    return hash_of(texts)


def make_tasks(files: list[str], text_key: str, shard_tokens: int) -> list[Task]:
    """Divides files among tasks of about equal size, in order.

    A task is at most about one shard; large files are divided.
    """
    total = sum(os.path.getsize(file) for file in files if not file.startswith(HUB))
    most = min(max(MIN_TASK_BYTES, total // MIN_TASKS), 4 * shard_tokens)
    groups: list[list[FilePart]] = [[]]
    size = 0  # of the last one
    for part in itertools.chain.from_iterable(split_file(file, most, text_key) for file in files):
        if groups[-1] and (size + part.size > most or part.format == "hub"):
            groups.append([])
            size = 0
        groups[-1].append(part)
        size += part.size
    return [Task(n, tuple(parts), fingerprint_of(parts)) for n, parts in enumerate(groups)]


# --------------------------------------------------------------------------------------- all tasks


class Preparation:
    """The preparation of a folder of shards. part=(i, n): `own` are the i-th of n parts of the
    tasks."""

    def __init__(
        self, files: list[str], folder: Path, settings: PrepareSettings, part: tuple[int, int]
    ):
        self.folder = folder
        self.settings = settings
        self.part, self.parts = part
        self.tasks = make_tasks(files, settings.text_key, settings.shard_tokens)
        self.assigned = [task for task in self.tasks if task.number % self.parts == self.part - 1]
        # The same names of texts and the same settings are the same preparation. Each task checks
        # whether its texts have changed.
        names = [os.path.basename(file) for file in files]
        values = [settings.tokenizer, settings.endoftext, settings.shard_tokens, settings.text_key]
        self.plan = hash_of([names, values])

    def start(self) -> None:
        """Makes the folder. Raises DataError when it holds other token files."""
        preparing = self.folder / "preparing"
        cause = None
        if not preparing.exists() and any(self.folder.glob("*.bin")):
            cause = "holds token files of another origin"
        elif any(record.plan != self.plan for record in self._records().values()):
            cause = "its preparation was begun with other texts or settings"
        elif (self.folder / MANIFEST).exists() and self.unfinished(self.tasks):
            cause = "its texts have changed since, or its token files are damaged"
        if cause:
            fix = "give another out=, or delete the folder to begin again"
            raise DataError("out", self.folder, cause, fix)
        preparing.mkdir(parents=True, exist_ok=True)

    def _records(self) -> dict[int, TaskRecord]:
        """The record of each finished task; one that cannot be read, or whose shards are not there
        in full size, is none."""
        records = {}
        for path in (self.folder / "preparing").glob("[0-9]*.json"):
            with contextlib.suppress(OSError, ValueError):
                values = read_json(path, MANIFEST_LIMIT)
                record = TaskRecord.model_validate(values)
                sizes = [(self.folder / shard.file).stat().st_size for shard in record.shards]
                if sizes == [HEADER_BYTES + 2 * shard.tokens for shard in record.shards]:
                    records[int(path.stem)] = record
        return records

    def unfinished(self, tasks: list[Task]) -> list[Task]:
        """Those that have no record, or one of other texts."""
        done = {number: record.fingerprint for number, record in self._records().items()}
        return [task for task in tasks if done.get(task.number) != fingerprint_of(task.parts)]

    def run(self, tasks: list[Task], workers: int, progress: Callable[[int], None]) -> None:
        """Runs those of these tasks that are unfinished, in `workers` processes; calls
        progress(bytes read) after each."""
        name = f"lock-{self.part}-of-{self.parts}"  # a lock ends with the process
        try:
            lock = FileLock(self.folder / "preparing" / name, timeout=0)
            with self._translate_write_errors(), lock:
                tasks = self.unfinished(tasks)  # another process may have had the lock before
                work = functools.partial(
                    run_task, folder=self.folder, settings=self.settings, plan=self.plan
                )
                if workers == 1 or len(tasks) <= 1:
                    for task in tasks:
                        progress(work(task))
                else:
                    _run_in_processes(work, tasks, workers, progress)
        except Timeout:
            cause = "is being prepared by another process"
            raise DataError("out", self.folder, cause, "wait for it, or stop it") from None

    @contextlib.contextmanager
    def _translate_write_errors(self) -> Iterator[None]:
        """Makes a PreparationError of the system's errors; those of reading are a DataError."""
        try:
            yield
        except Timeout:  # of a lock
            raise
        except OSError as error:
            cause = f"cannot be written ({error.strerror or error})"
            fix = "make room, then rerun the same command"
            raise PreparationError("out", self.folder, cause, fix) from error

    def finish(self) -> dict | None:
        """Writes the manifest when all tasks of all parts are done; its values, or None."""
        if self.unfinished(self.tasks):
            return None
        known = self._records()
        records = [known[task.number] for task in self.tasks]
        shards = [shard for record in records for shard in record.shards]
        if not shards:
            raise DataError("out", self.folder, "no text in any of the files", "check data.path")
        with self._translate_write_errors(), FileLock(self.folder / "preparing" / "lock"):
            remove_temporary_files(self.folder)
            found = set(self.folder.glob("shard_[0-9]*_[0-9]*.bin"))
            for path in found - {self.folder / shard.file for shard in shards}:
                path.unlink(missing_ok=True)  # of texts before a change
            return write_manifest(
                self.folder,
                shards,
                self.settings.tokenizer,
                endoftext=self.settings.endoftext,
                text_bytes=sum(record.text_bytes for record in records),
            )


def _run_in_processes(
    work: Callable[[Task], int], tasks: list[Task], workers: int, progress: Callable[[int], None]
) -> None:
    context = multiprocessing.get_context("spawn")  # fork and threads do not go together
    with ProcessPoolExecutor(min(workers, len(tasks)), context, _init_worker) as pool:
        try:
            for future in as_completed([pool.submit(work, task) for task in tasks]):
                progress(future.result())  # raises what the task raised
        except BrokenProcessPool as error:
            cause = "a worker was killed, out of memory perhaps"
            raise PreparationError("workers", workers, cause, "use fewer") from error
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _init_worker() -> None:
    """Ctrl-C reaches all processes, and only the main one handles it. When that has ended, for
    example by SIGKILL, the worker ends."""

    def end_with_parent() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()


# ---------------------------------------------------------------------------------------- one task


def run_task(task: Task, folder: Path, settings: PrepareSettings, plan: str) -> int:
    """Makes the shards of a task and leaves its record; returns the bytes that were read."""
    encoder = StreamEncoder(settings.tokenizer, settings.endoftext, settings.engine)
    record_file = folder / "preparing" / f"{task.number:05d}.json"
    record_file.unlink(missing_ok=True)  # it would tell of other shards
    for path in folder.glob(f"shard_{task.number:05d}_*.bin*"):
        path.unlink(missing_ok=True)  # of a run that was interrupted
    shards: list[ShardEntry] = []
    writer: ShardWriter | None = None
    try:
        for ids in itertools.chain.from_iterable(encode_part(p, encoder) for p in task.parts):
            while len(ids):
                if writer is None:
                    name = f"shard_{task.number:05d}_{len(shards):02d}.bin"
                    writer = ShardWriter(folder / name, encoder.tokenizer.eot_token)
                room = settings.shard_tokens - writer.tokens
                writer.append(ids[:room])
                ids = ids[room:]
                if writer.tokens == settings.shard_tokens:
                    shards.append(writer.close())
                    writer = None
        if writer:
            shards.append(writer.close())
    finally:
        if writer:
            writer.discard()
    text_bytes = encoder.text_bytes
    record = TaskRecord(
        plan=plan, fingerprint=task.fingerprint, text_bytes=text_bytes, shards=shards
    )
    atomic_write(record_file, record.model_dump_json().encode())
    return task.size or text_bytes  # the size of a hub data set is unknown
