"""Texts -> a folder of shards, by all cores, restartable, shared by machines.

The texts are divided into tasks (tokens/tasks.py). A finished task leaves a record; an interrupted
one is done again. When every record is there, they become the manifest. The outcome does not
depend on the number of workers or machines.

    DIR/shard_00000_00.bin, ...        the shards (tokens/shards.py)
    DIR/preparing/00000.json, ...      a record of each task
    DIR/manifest.json                  when it is complete
"""

import contextlib
import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from filelock import FileLock, Timeout

from errors import DataError, PreparationError
from files import clear, read_json
from tokens.manifest import MANIFEST, MANIFEST_LIMIT, write_manifest
from tokens.tasks import Recipe, Task, TaskRecord, hash_of, make_tasks, run_task


class Preparation:
    """The preparation of a folder of shards. part=(i, n): `own` are the i-th of n parts of the
    tasks."""

    def __init__(self, files: list[str], folder: Path, recipe: Recipe, part: tuple[int, int]):
        self.folder = folder
        self.recipe = recipe
        self.part, self.parts = part
        self.tasks = make_tasks(files, recipe.text_key, recipe.shard_tokens)
        self.own = [task for task in self.tasks if task.number % self.parts == self.part - 1]
        # The same names of texts and the same settings are the same preparation. Each task checks
        # whether its texts have changed.
        names = [os.path.basename(file) for file in files]
        self.plan = hash_of([names, recipe.settings()])

    def begin(self) -> None:
        """Makes the folder. Raises DataError when it holds other token files."""
        preparing = self.folder / "preparing"
        cause = None
        if not preparing.exists() and any(self.folder.glob("*.bin")):
            cause = "holds token files of another origin"
        elif any(record.plan != self.plan for record in self._records().values()):
            cause = "its preparation was begun with other texts or settings"
        elif (self.folder / MANIFEST).exists() and self.unfinished(self.tasks):
            cause = "holds the token files of texts that have changed since"
        if cause:
            fix = "give another out=, or delete the folder to begin again"
            raise DataError("out", self.folder, cause, fix)
        preparing.mkdir(parents=True, exist_ok=True)

    def _records(self) -> dict[int, TaskRecord]:
        """The record of each finished task; one that cannot be read is none."""
        records = {}
        for path in (self.folder / "preparing").glob("[0-9]*.json"):
            with contextlib.suppress(OSError, ValueError):
                values = read_json(path, MANIFEST_LIMIT)
                records[int(path.stem)] = TaskRecord.model_validate(values)
        return records

    def unfinished(self, tasks: list[Task]) -> list[Task]:
        """Those that have no record, or one of other texts."""
        made_of = {number: record.made_of for number, record in self._records().items()}
        return [task for task in tasks if made_of.get(task.number) != task.fingerprint()]

    def run(self, tasks: list[Task], workers: int, progress: Callable[[int], None]) -> None:
        """Runs these tasks in `workers` processes; calls progress(bytes of text) after each."""
        name = f"lock-{self.part}-of-{self.parts}"  # a lock ends with the process
        try:
            with FileLock(self.folder / "preparing" / name, timeout=0):
                work = functools.partial(
                    run_task, folder=self.folder, recipe=self.recipe, plan=self.plan
                )
                if workers == 1 or len(tasks) == 1:
                    for task in tasks:
                        progress(work(task))
                else:
                    _run_in_processes(work, tasks, workers, progress)
        except Timeout:
            cause = "is being prepared by another process"
            raise DataError("out", self.folder, cause, "wait for it, or stop it") from None
        except OSError as error:  # of reading, the reader makes a DataError
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
        with FileLock(self.folder / "preparing" / "lock"):
            clear(self.folder)
            return write_manifest(
                self.folder,
                shards,
                self.recipe.tokenizer,
                endoftext=self.recipe.endoftext,
                text_bytes=sum(record.text_bytes for record in records),
            )


def _run_in_processes(
    work: Callable[[Task], int], tasks: list[Task], workers: int, progress: Callable[[int], None]
) -> None:
    context = multiprocessing.get_context("spawn")  # fork and threads do not go together
    pool = ProcessPoolExecutor(min(workers, len(tasks)), context, _begin_worker)
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
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_worker() -> None:
    """Ctrl-C reaches all processes, and only the main one handles it. When that has ended, for
    example by SIGKILL, the worker ends."""

    def end_with_parent() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
