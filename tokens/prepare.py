"""Texts -> a folder of shards, by all cores, restartable, shared out over machines.

The texts are divided into tasks, each of which makes shards of its own (most make one) without
knowing of the others. What the tasks are depends on the texts alone, not on workers or machines,
so neither does the outcome. A finished task leaves a record; one that was interrupted is done
again. When every record is there, they become the manifest.

    DIR/shard_00000_00.bin, shard_00000_00.documents, ...   the shards (tokens/shards.py)
    DIR/preparing/plan.json, 00000.json, ...                while it goes on
    DIR/manifest.json                                       when it is complete
"""

import contextlib
import functools
import hashlib
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import numpy as np

from errors import DataError, PreparationError
from files import NO_LOCKS, atomic_write, lock, read_json
from tokens.encoding import StreamEncoder
from tokens.shards import (
    HEADER_BYTES,
    MANIFEST,
    MANIFEST_LIMIT,
    ShardEntry,
    ShardWriter,
    documents_file,
    shard_entries,
    write_manifest,
)
from tokens.sources import COMPRESSED, HUB, Part, encode_part, hub_data, kind_of, row_groups

SMALLEST_TASK = 2**24  # bytes of text
FEWEST_TASKS = 32  # of a large text, so that many workers are busy to the end


@dataclass(frozen=True)
class Recipe:
    """What is done with the texts."""

    tokenizer: str
    endoftext: str
    engine: str
    check_every: int
    shard_tokens: int

    def settings(self) -> list:
        """What the outcome depends on."""
        return [self.tokenizer, self.endoftext, self.shard_tokens]


@dataclass(frozen=True)
class Task:
    """Texts that become shards by themselves."""

    number: int
    parts: tuple[Part, ...]
    size: int  # bytes to read, about; rows of a hub data set count as none

    def fingerprint(self, recipe: Recipe) -> str:
        """Changes when a text does, or what is done with it."""
        texts = []
        for part in self.parts:
            changed = None
            if part.kind != "hub":
                try:
                    state = os.stat(part.path)
                except OSError as error:
                    cause = f"cannot be read any more ({error.strerror})"
                    raise DataError("data.path", part.path, cause, "put it back") from error
                changed = [state.st_size, state.st_mtime_ns]
            name = os.path.basename(part.path)
            texts.append([name, part.start, part.stop, part.text_key, changed])
        return _hash([recipe.settings(), texts])


def _hash(values: list) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def make_tasks(files: list[str], text_key: str, shard_tokens: int) -> list[Task]:
    """Divides files among tasks of about equal size, in order.

    A task is at most about one shard; large texts, JSON lines and Parquet files are divided, what
    is compressed is not.
    """
    sizes = {file: 0 if file.startswith(HUB) else os.path.getsize(file) for file in files}
    most = min(max(SMALLEST_TASK, sum(sizes.values()) // FEWEST_TASKS), 4 * shard_tokens)
    tasks: list[Task] = []
    parts: list[Part] = []
    size = 0
    for file in files:
        for part, part_size in _divided(file, sizes[file], text_key, most):
            if parts and (size + part_size > most or part.kind == "hub"):
                tasks.append(Task(len(tasks), tuple(parts), size))
                parts, size = [], 0
            parts.append(part)
            size += part_size
    return [*tasks, Task(len(tasks), tuple(parts), size)]


def _divided(file: str, size: int, text_key: str, most: int) -> Iterator[tuple[Part, int]]:
    """The parts of a file, and their sizes."""
    kind = kind_of(file)
    if kind == "hub":
        count = hub_data(file).num_shards
        for number in range(count):
            yield Part(file, number, count, text_key), 0
    elif kind == "parquet":
        groups = row_groups(file)
        first = size = 0
        for number, group_size in enumerate(groups):
            size += group_size
            if size >= most or number == len(groups) - 1:
                yield Part(file, first, number + 1, text_key), size
                first, size = number + 1, 0
    elif size <= most or file.endswith(COMPRESSED):
        yield Part(file, text_key=text_key), size
    else:
        bounds = np.linspace(0, size, -(-size // most) + 1).astype(np.int64).tolist()
        for start, stop in itertools.pairwise(bounds):
            end = None if stop == size else stop
            yield Part(file, start, end, text_key), stop - start


# ------------------------------------------------------------------------------------- one task


def run_task(task: Task, folder: Path, recipe: Recipe, progress: Callable[[int], None]) -> int:
    """Makes the shards of a task and leaves its record; returns the bytes of its text.

    progress(bytes of text so far) is called now and then.
    """
    encoder = StreamEncoder(
        recipe.tokenizer, recipe.endoftext, recipe.engine, check_every=recipe.check_every
    )
    _record(folder, task.number).unlink(missing_ok=True)  # it would tell of other shards
    for path, number in shard_files(folder):
        if number == task.number:
            path.unlink(missing_ok=True)  # of a run that was interrupted
    made_of = task.fingerprint(recipe)
    entries: list[ShardEntry] = []
    writer: ShardWriter | None = None
    try:
        arrays = itertools.chain.from_iterable(encode_part(part, encoder) for part in task.parts)
        for number, ids in enumerate(arrays):
            if number % 64 == 0:
                progress(encoder.text_bytes)
            while len(ids):
                if writer is None:
                    name = f"shard_{task.number:05d}_{len(entries):02d}.bin"
                    writer = ShardWriter(folder / name, encoder.tokenizer.eot_token)
                room = recipe.shard_tokens - writer.tokens
                writer.append(ids[:room])
                ids = ids[room:]
                if writer.tokens == recipe.shard_tokens:
                    entries.append(writer.close())
                    writer = None
        if writer is not None:
            entries.append(writer.close())
            writer = None
    finally:
        if writer is not None:
            writer.abandon()
    progress(encoder.text_bytes)
    record = {
        "made_of": made_of,
        "text_bytes": encoder.text_bytes,
        "shards": [asdict(entry) for entry in entries],
    }
    atomic_write(_record(folder, task.number), json.dumps(record).encode())
    return encoder.text_bytes


def shard_files(folder: Path) -> Iterator[tuple[Path, int]]:
    """Our shards in a folder and what was to become one, each with its task's number; no other
    file, however alike its name: the texts may be in the same folder."""
    ours = re.compile(r"shard_(\d{5,})_\d{2,}\.(?:bin|documents)(?:\.part-[0-9a-f]{16})?")
    for path in sorted(folder.iterdir()):
        if found := ours.fullmatch(path.name):
            yield path, int(found[1])


def _record(folder: Path, number: int) -> Path:
    return folder / "preparing" / f"{number:05d}.json"


# ------------------------------------------------------------------------------------- all tasks


class Preparation:
    """A folder of shards in the making."""

    def __init__(self, files: list[str], folder: Path, text_key: str, recipe: Recipe):
        self.folder = folder
        self.recipe = recipe
        for file in files:  # rather now than after hours
            if kind_of(file) == "text" and os.path.isfile(file) and not os.path.getsize(file):
                fix = "leave it out, or give a text of some length"
                raise DataError("data.path", file, "the file is empty", fix)
        self.tasks = make_tasks(files, text_key, recipe.shard_tokens)
        # The same texts by name and the same settings: the same preparation. Whether a text has
        # changed since, each task sees for itself.
        names = [os.path.basename(file) for file in files]
        self.plan = _hash([names, text_key, recipe.settings()])

    def begin(self) -> bool:
        """Takes possession of the folder; False when all is done already.

        Raises DataError when the folder holds something else.
        """
        fix = "give another out=, or delete the folder to begin anew"
        if manifest := self._manifest():
            if manifest.get("made_of") != self._made_of():
                cause = "holds the token files of other (or changed) texts, or of other settings"
                for key in ("tokenizer", "endoftext"):
                    if manifest.get(key, value := getattr(self.recipe, key)) != value:
                        cause = f"holds token files made with data.{key}={manifest[key]}"
                raise DataError("out", self.folder, cause, fix)
            entries = self._entries(manifest, self.folder / MANIFEST)
            if missing := [entry.file for entry in entries if not self._whole(entry)]:
                cause = f"{missing[0]} or its .documents is not whole any more"
                raise DataError("out", self.folder, cause, "delete the folder to begin anew")
            self._clear_away(manifest)
            return False
        plan = self.folder / "preparing" / "plan.json"
        if not plan.exists() and any(self.folder.glob("*.bin")):
            raise DataError("out", self.folder, "holds token files of another origin", fix)
        if (self.folder / "__init__.py").exists():  # such as tokens/, which is ours
            raise DataError("out", self.folder, "holds source code", "give another out=")
        plan.parent.mkdir(parents=True, exist_ok=True)
        if not plan.exists():
            atomic_write(plan, json.dumps({"plan": self.plan}).encode())
        if self._read(plan, {"plan": str})["plan"] != self.plan:
            if any(plan.parent.glob("[0-9]*.json")):
                cause = "its preparation was begun with other texts or settings"
                raise DataError("out", self.folder, cause, fix)
            with self._locked(1, 1):  # nobody is at it, and nothing was done: by a mistake, perhaps
                atomic_write(plan, json.dumps({"plan": self.plan}).encode())
        return True

    def _manifest(self) -> dict | None:
        """The manifest, once it is there."""
        try:
            manifest = read_json(self.folder / MANIFEST, MANIFEST_LIMIT)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self._useless(self.folder / MANIFEST, _cannot_be_read(error)) from error
        except ValueError:
            return {"made_of": None}  # of something else
        return manifest if isinstance(manifest, dict) and manifest else {"made_of": None}

    def _read(self, path: Path, kinds: dict[str, type]) -> dict:
        """A JSON object of the preparation with these fields; DataError names what is wrong.

        Raises FileNotFoundError when there is no such file.
        """
        try:
            values = read_json(path, MANIFEST_LIMIT)
        except FileNotFoundError:
            raise
        except (OSError, ValueError) as error:
            raise self._useless(path, _cannot_be_read(error)) from error
        if not isinstance(values, dict):
            raise self._useless(path, "is not a JSON object")
        for key, kind in kinds.items():
            if type(values.get(key)) is not kind or (kind is int and values[key] < 0):
                raise self._useless(path, f"has no valid value under {key!r}")
        return values

    def _entries(self, values: dict, path: Path) -> list[ShardEntry]:
        """The shards that a record or the manifest lists."""
        try:
            return shard_entries(values.get("shards"))
        except ValueError as error:
            raise self._useless(path, f"has no valid 'shards': {error}") from error

    def _useless(self, path: Path, cause: str) -> DataError:
        fix = "delete the folder to begin again"
        return DataError("out", self.folder, f"{path.relative_to(self.folder)} {cause}", fix)

    def _made_of(self) -> str:
        """What the shards are made of, down to the times at which the texts were changed."""
        return _hash([task.fingerprint(self.recipe) for task in self.tasks])

    def unfinished(self, part: int = 1, parts: int = 1) -> list[Task]:
        """The tasks of this part that have no record, or not all their shards."""
        return [task for task in self.share(part, parts) if not self._finished(task)]

    def share(self, part: int, parts: int) -> list[Task]:
        """The tasks of this part."""
        return [task for task in self.tasks if task.number % parts == part - 1]

    def _finished(self, task: Task) -> bool:
        if not _record(self.folder, task.number).exists():
            return False
        record, entries = self._read_record(task)
        return record["made_of"] == task.fingerprint(self.recipe) and all(map(self._whole, entries))

    def _read_record(self, task: Task) -> tuple[dict, list[ShardEntry]]:
        path = _record(self.folder, task.number)
        record = self._read(path, {"made_of": str, "text_bytes": int, "shards": list})
        return record, self._entries(record, path)

    def _whole(self, entry: ShardEntry) -> bool:
        """Whether a shard and its documents are there, as long as they should be."""
        shard = self.folder / entry.file
        sizes = {
            shard: HEADER_BYTES + 2 * entry.tokens,
            documents_file(shard): 4 * entry.documents,
        }
        return all(path.exists() and path.stat().st_size == size for path, size in sizes.items())

    def run(
        self,
        tasks: list[Task],
        workers: int,
        progress: Callable[[int], None],
        part: tuple[int, int] = (1, 1),
    ) -> None:
        """Does these tasks with so many processes; progress(bytes of text so far) now and then."""
        with self._locked(*part):
            tasks = [task for task in tasks if not self._finished(task)]
            if self._manifest() or not tasks:
                return  # another process has done it all meanwhile
            try:
                if workers == 1 or len(tasks) == 1:
                    self._run_here(tasks, progress)
                else:
                    self._run_in_processes(tasks, workers, progress)
            except OSError as error:  # of reading, the reader makes a DataError
                cause = f"cannot be written ({error.strerror or error})"
                fix = "make room, and the same command goes on"
                raise PreparationError("out", self.folder, cause, fix) from error

    @contextlib.contextmanager
    def _locked(self, part: int, parts: int) -> Iterator[None]:
        """Refuses when another process does this part, or shares the tasks out otherwise.

        The system gives a lock back when its process ends, in whatever way.
        """

        def locked(path: Path) -> IO:
            try:
                return lock(path)
            except BlockingIOError:
                cause = "is being prepared by another process"
                fix = "wait for it, or stop it"
                raise DataError("out", self.folder, cause, fix) from None
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    cause = f"cannot be written ({error.strerror})"
                    fix = "make room, or give another folder"
                    raise PreparationError("out", self.folder, cause, fix) from error
                cause = f"its file system has no locks ({error.strerror})"
                raise DataError("out", self.folder, cause, "give another folder") from error

        folder = self.folder / "preparing"
        folder.mkdir(exist_ok=True)  # who has finished has cleared it away
        with locked(folder / f"lock-{part}-of-{parts}"):
            for other in folder.glob("lock-*"):
                if not other.name.endswith(f"-of-{parts}"):
                    locked(other).close()
            yield

    def _run_here(self, tasks: list[Task], progress: Callable[[int], None]) -> None:
        before = 0
        for task in tasks:
            report = functools.partial(lambda before, count: progress(before + count), before)
            before += run_task(task, self.folder, self.recipe, report)

    def _run_in_processes(
        self, tasks: list[Task], workers: int, progress: Callable[[int], None]
    ) -> None:
        context = multiprocessing.get_context("spawn")  # fork and threads do not go together
        counts = context.RawArray("q", len(tasks))  # bytes of text so far, of each task
        pool = ProcessPoolExecutor(
            min(workers, len(tasks)), context, _begin_worker, (counts, self.folder, self.recipe)
        )
        try:
            # Ctrl-C reaches all processes; it is for this one to answer it, even while the workers
            # are being started, which inherit what is blocked here.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                waiting = {pool.submit(_work, place, task) for place, task in enumerate(tasks)}
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            while waiting:
                done, waiting = wait(waiting, timeout=0.2, return_when=FIRST_EXCEPTION)
                progress(sum(counts))
                for future in done:
                    future.result()  # raises what the task raised
        except BrokenProcessPool as error:
            cause = "a worker was killed, out of memory perhaps"
            raise PreparationError("workers", workers, cause, "use fewer") from error
        except BaseException:
            for process in (pool._processes or {}).values():
                process.terminate()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def finish(self) -> dict | None:
        """Writes the manifest when all tasks of all parts are done; its values, or None."""
        try:
            manifest = self._complete()
        except FileNotFoundError:  # what another part clears away that has just finished, too
            manifest = None
        manifest = manifest or self._manifest()
        if manifest:
            self._clear_away(manifest)
        return manifest

    def _complete(self) -> dict | None:
        if not all(map(self._finished, self.tasks)):
            return None
        records = [self._read_record(task) for task in self.tasks]
        entries = [entry for _, listed in records for entry in listed]
        if not entries:
            raise DataError("out", self.folder, "no text in any of the files", "check data.path")
        return write_manifest(
            self.folder,
            entries,
            tokenizer=self.recipe.tokenizer,
            endoftext=self.recipe.endoftext,
            text_bytes=sum(record["text_bytes"] for record, _ in records),
            made_of=self._made_of(),
        )

    def _clear_away(self, manifest: dict) -> None:
        """Removes what the making left, of texts that have changed since perhaps."""
        ours = {Path(shard["file"]).stem for shard in manifest["shards"]}
        for path, _ in shard_files(self.folder):
            if path.name.split(".")[0] not in ours or ".part-" in path.name:
                path.unlink(missing_ok=True)
        for path in self.folder.glob(f"{MANIFEST}.part-*"):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.folder / "preparing", ignore_errors=True)


def _cannot_be_read(error: OSError | ValueError) -> str:
    return f"cannot be read ({getattr(error, 'strerror', None) or error})"


# --------------------------------------------------------------------------------- in a worker

_worker: dict = {}


def _begin_worker(counts, folder: Path, recipe: Recipe) -> None:
    _worker.update(counts=counts, folder=folder, recipe=recipe)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Leaves when the main process is gone, killed perhaps: nobody waits for the shards."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _work(place: int, task: Task) -> None:
    def progress(count: int) -> None:
        _worker["counts"][place] = count

    run_task(task, _worker["folder"], _worker["recipe"], progress)
