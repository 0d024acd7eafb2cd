"""Texts -> a folder of shards, by all cores, restartable, shared by machines.

The texts are divided into tasks (tokens/tasks.py). A finished task leaves a record; an interrupted
one is done again. When every record is there, they become the manifest. The outcome does not
depend on the number of workers or machines.

    DIR/shard_00000_00.bin, shard_00000_00.documents, ...   the shards (tokens/shards.py)
    DIR/preparing/plan.json, 00000.json, ...                until it is complete
    DIR/manifest.json                                       when it is complete
"""

import contextlib
import functools
import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from filelock import FileLock, Timeout

from errors import DataError, PreparationError
from files import atomic_write, read_json
from tokens.manifest import MANIFEST, MANIFEST_LIMIT, ShardEntry, shard_entries, write_manifest
from tokens.paths import kind_of
from tokens.shards import HEADER_BYTES, documents_file
from tokens.tasks import Recipe, Task, hash_of, make_tasks, record_file, run_task, shard_files


class Preparation:
    """The preparation of a folder of shards."""

    def __init__(self, files: list[str], folder: Path, text_key: str, recipe: Recipe):
        self.folder = folder
        self.recipe = recipe
        for file in files:  # an error now, not after hours
            if kind_of(file) == "text" and os.path.isfile(file) and not os.path.getsize(file):
                fix = "leave it out, or give a text of some length"
                raise DataError("data.path", file, "the file is empty", fix)
        self.tasks = make_tasks(files, text_key, recipe.shard_tokens)
        # The same names of texts and the same settings are the same preparation. Each task checks
        # whether its texts have changed.
        names = [os.path.basename(file) for file in files]
        self.plan = hash_of([names, text_key, recipe.settings()])

    def begin(self) -> bool:
        """Starts or resumes the preparation in the folder; False when it is complete.

        Raises DataError when the folder holds something else.
        """
        fix = "give another out=, or delete the folder to begin again"
        if manifest := self._manifest():
            if manifest.get("made_of") != self._made_of():
                cause = "holds the token files of other (or changed) texts, or of other settings"
                for key in ("tokenizer", "endoftext"):
                    if manifest.get(key, value := getattr(self.recipe, key)) != value:
                        cause = f"holds token files made with data.{key}={manifest[key]}"
                raise DataError("out", self.folder, cause, fix)
            entries = self._entries(manifest, self.folder / MANIFEST)
            if missing := [entry.file for entry in entries if not self._whole(entry)]:
                cause = f"{missing[0]} or its .documents is missing or truncated"
                raise DataError("out", self.folder, cause, "delete the folder to begin again")
            self._clear_away(manifest)
            return False
        if (self.folder / "__init__.py").exists():  # such as tokens/, which is ours
            raise DataError("out", self.folder, "holds source code", "give another out=")
        try:
            self._write_plan()
        except (DataError, FileNotFoundError):
            if not self._manifest():
                raise
            return self.begin()  # another process has finished meanwhile
        return True

    def _write_plan(self) -> None:
        """Writes what is to be prepared; DataError when other texts or settings were begun."""
        fix = "give another out=, or delete the folder to begin again"
        plan = self.folder / "preparing" / "plan.json"
        if not plan.exists() and any(self.folder.glob("*.bin")):
            raise DataError("out", self.folder, "holds token files of another origin", fix)
        plan.parent.mkdir(parents=True, exist_ok=True)
        if not plan.exists():
            atomic_write(plan, json.dumps({"plan": self.plan}).encode())
        if self._read(plan, {"plan": str})["plan"] != self.plan:
            if any(plan.parent.glob("[0-9]*.json")):
                cause = "its preparation was begun with other texts or settings"
                raise DataError("out", self.folder, cause, fix)
            with self._locked(1, 1):  # nobody works on it and nothing is done: plan it again
                atomic_write(plan, json.dumps({"plan": self.plan}).encode())

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
        return hash_of([task.fingerprint(self.recipe) for task in self.tasks])

    def unfinished(self, part: int = 1, parts: int = 1) -> list[Task]:
        """The tasks of this part that have no record, or not all their shards."""
        return [task for task in self.share(part, parts) if not self._finished(task)]

    def share(self, part: int, parts: int) -> list[Task]:
        """The tasks of this part."""
        return [task for task in self.tasks if task.number % parts == part - 1]

    def _finished(self, task: Task) -> bool:
        try:
            record, entries = self._read_record(task)
        except FileNotFoundError:
            return False
        return record["made_of"] == task.fingerprint(self.recipe) and all(map(self._whole, entries))

    def _read_record(self, task: Task) -> tuple[dict, list[ShardEntry]]:
        path = record_file(self.folder, task.number)
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
        """Runs these tasks in `workers` processes; calls progress(bytes of text so far)."""
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
                fix = "make room, then rerun the same command"
                raise PreparationError("out", self.folder, cause, fix) from error

    @contextlib.contextmanager
    def _locked(self, part: int, parts: int) -> Iterator[None]:
        """Refuses when another process does this part, or divides the tasks otherwise."""
        with self._lock(f"lock-{part}-of-{parts}"):
            for other in (self.folder / "preparing").glob("lock-*"):
                if not other.name.endswith(f"-of-{parts}"):
                    with self._lock(other.name):
                        pass
            yield

    def _lock(self, name: str) -> contextlib.AbstractContextManager:
        """A lock that ends with the process, in whatever way that ends."""
        path = self.folder / "preparing" / name
        while True:
            try:
                return FileLock(path, timeout=0).acquire()  # makes the folder if need be
            except Timeout:
                cause = "is being prepared by another process"
                raise DataError("out", self.folder, cause, "wait for it, or stop it") from None
            except OSError as error:
                if isinstance(error, FileNotFoundError) and self._manifest():
                    continue  # another process has finished meanwhile and removed the folder
                cause = f"cannot be locked ({error.strerror})"
                fix = "make room, or give a folder on another file system"
                raise PreparationError("out", self.folder, cause, fix) from error

    def _run_here(self, tasks: list[Task], progress: Callable[[int], None]) -> None:
        before = 0
        for task in tasks:
            report = functools.partial(lambda before, count: progress(before + count), before)
            before += run_task(task, self.folder, self.recipe, report)

    def _run_in_processes(
        self, tasks: list[Task], workers: int, progress: Callable[[int], None]
    ) -> None:
        others = set(multiprocessing.active_children())
        context = multiprocessing.get_context("spawn")  # fork and threads do not go together
        counts = context.RawArray("q", len(tasks))  # bytes of text so far, of each task
        pool = ProcessPoolExecutor(
            min(workers, len(tasks)), context, _begin_worker, (counts, self.folder, self.recipe)
        )
        try:
            # Ctrl-C reaches all processes. Only this one handles it: the workers inherit the
            # blocked signal.
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
            for process in set(multiprocessing.active_children()) - others:
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
        """Removes the files of the preparation, and shards of texts that have changed since."""
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
    """Ends the worker when the main process has ended, for example by SIGKILL."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _work(place: int, task: Task) -> None:
    def progress(count: int) -> None:
        _worker["counts"][place] = count

    run_task(task, _worker["folder"], _worker["recipe"], progress)
