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
import multiprocessing.connection
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
from tokens.paths import kind_of
from tokens.tasks import Recipe, Task, TaskRecord, hash_of, make_tasks, run_task


class Preparation:
    """The preparation of a folder of shards."""

    def __init__(self, files: list[str], folder: Path, recipe: Recipe):
        self.folder = folder
        self.recipe = recipe
        for file in files:  # an error now, not after hours
            if kind_of(file) == "text" and os.path.isfile(file) and not os.path.getsize(file):
                fix = "leave it out, or give a text of some length"
                raise DataError("data.path", file, "the file is empty", fix)
        self.tasks = make_tasks(files, recipe.text_key, recipe.shard_tokens)
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
        elif (self.folder / MANIFEST).exists() and self.unfinished():
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

    def share(self, part: int = 1, parts: int = 1) -> list[Task]:
        """The tasks of this part."""
        return [task for task in self.tasks if task.number % parts == part - 1]

    def unfinished(self, part: int = 1, parts: int = 1) -> list[Task]:
        """The tasks of this part that have no record, or one of other texts."""
        made_of = {number: record.made_of for number, record in self._records().items()}
        return [
            task
            for task in self.share(part, parts)
            if made_of.get(task.number) != task.fingerprint()
        ]

    def run(
        self,
        tasks: list[Task],
        workers: int,
        progress: Callable[[int], None],
        part: tuple[int, int] = (1, 1),
    ) -> None:
        """Runs these tasks in `workers` processes; calls progress(bytes of text) after each."""
        name = f"lock-{part[0]}-of-{part[1]}"  # a lock ends with the process, however that ends
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
        if self.unfinished():
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
        # Ctrl-C reaches all processes. Only this one handles it: the workers inherit the blocked
        # signal.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        futures = [pool.submit(work, task) for task in tasks]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        for future in as_completed(futures):
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
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends the worker when the main process has ended, for example by SIGKILL."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
