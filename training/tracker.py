"""Where the numbers go: metrics.jsonl in the run's directory always, Weights & Biases as asked.

The only file that knows wandb. A tracker takes one row of metrics for each step, and with it what
the lens saw, and sends both to the same places under the same keys. Some things go to W&B alone:
the statistics of every head, which stand in attention/statistics.jsonl, their histograms, and the
table of heads, which is attention/heads.csv.

Whatever becomes of W&B, the run goes on and metrics.jsonl is complete; a line on stderr tells. W&B
works in a network, and in a process of its own, which may be gone or stand still. So each call has
a time to come back in, and the run waits no longer: START_SECONDS for the server at the start,
FINISH_SECONDS at the end, and ANSWER_SECONDS more where W&B's own process stands still, which it
does once, since it is then ended.
"""

import contextlib
import json
import logging
import math
import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from training.rows import RowFile

if TYPE_CHECKING:
    from lens import Look

FILES_AT_MOST = 950  # of one run on W&B, which becomes slow beyond a thousand
START_SECONDS = 20  # for the server to answer; the run is recorded offline after that
ANSWER_SECONDS = 30  # for W&B's own process to start, or to answer; it is left out after that
FINISH_SECONDS = 60  # for the last uploads; WANDB_FINISH_TIMEOUT=600 gives a slow line longer
END_SECONDS = 5  # for W&B's own process to end, before it is made to
# The parts of W&B's own process that carry data, as its log names them.
CARRIERS = ("filestream:", "runfiles:", "runupserter:", "writer:", "fileTransfer:", "sender:")
MODES = ("auto", "online", "offline", "disabled")


@dataclass
class WandbConfig:
    """The run as Weights & Biases shows it."""

    mode: str = "auto"  # auto (online with an API key, else offline) | online | offline | disabled
    project: str = "clearhead"
    name: str | None = None  # null: the run's name
    group: str | None = None
    tags: list[str] = field(default_factory=list)

    def problems(self) -> list[tuple[str, object, str, str]]:
        """What does not fit: (key, value, cause, fix) for each problem; empty when all is well."""
        found = []
        if self.mode not in MODES:
            found.append(("mode", self.mode, "no such mode", f"use one of {', '.join(MODES)}"))
        if not self.project:
            found.append(("project", self.project, "needs a name", "use wandb.project=clearhead"))
        return found


class Tracker:
    """Writes metrics.jsonl and feeds a W&B run; made on the main rank.

    settings: the whole resolved configuration as plain values, shown on the dashboard.
    run_id: the id of the W&B run to continue, or None for a new one.
    """

    def __init__(
        self, config: WandbConfig, folder: Path, settings: dict, run_id: str | None = None
    ):
        self.folder = folder
        self.files_left = FILES_AT_MOST - _files_logged(folder / "metrics.jsonl")
        self.rows = RowFile(folder / "metrics.jsonl")
        self.run = _start_wandb(config, folder, settings, run_id)
        # Hidden: a thousand curves would bury the others. A panel of one's own can show any.
        self._wandb(lambda run: run.define_metric("attention_heads/*", hidden=True))

    @property
    def run_id(self) -> str | None:
        """The W&B run's id, to be continued after a resume; None when W&B is off."""
        return self.run.id if self.run else None

    def where(self) -> str | None:
        """What to open or do to see the dashboard."""
        if self.run is None:
            return None
        if self.run.offline:
            return (
                f"offline; to upload it: wandb sync {_recorded_in(self.run).parent}/offline-run-*"
            )
        return self.run.url

    def log(self, metrics: dict[str, float], step: int, look: "Look | None" = None) -> None:
        """One row: the metrics of one step, and what the lens saw (files in the run's directory).

        Call it once for each step, in order: W&B drops a row that comes later for an earlier step.
        """
        if look:
            metrics = metrics | look.metrics
        files = look.pictures | look.pages if look else {}
        row = {"step": step} | {key: _finite_or_text(value) for key, value in metrics.items()}
        row |= {key: str(path.relative_to(self.folder)) for key, path in files.items()}
        self.rows.append(row)

        media = self._media(look) if look and self.run else {}
        self._wandb(lambda run: run.log(metrics | media, step=step))

    def _media(self, look: "Look") -> dict[str, object]:
        """A look in W&B's types. What fails is left out, and named; it is on disk all the same."""
        import wandb

        media = dict(look.heads)
        media |= {key: wandb.Histogram(values) for key, values in look.histograms.items()}
        pictures, pages = look.pictures, look.pages
        if len(pictures) + len(pages) > self.files_left:
            # A run made longer and longer: the time-lapse has what matters, and comes rarely.
            pictures = {}
            pages = {key: path for key, path in pages.items() if key == "attention/timelapse"}
        self.files_left -= len(pictures) + len(pages)
        try:
            media |= {key: wandb.Image(str(path)) for key, path in pictures.items()}
            # inject=False: by default W&B would add a stylesheet from its server to the page.
            media |= {key: wandb.Html(str(path), inject=False) for key, path in pages.items()}
            for key, (columns, rows) in look.tables.items():
                media[key] = wandb.Table(columns=list(columns), data=[list(row) for row in rows])
        except Exception as error:
            print(f"W&B: a picture or page was left out ({_one_line(error)})", file=sys.stderr)
        return media

    def summary(self, values: dict[str, float]) -> None:
        """What the run came to, shown in the dashboard's table of runs."""
        self._wandb(lambda run: run.summary.update(values))

    def sync(self) -> None:
        """Waits until the disk has the rows so far."""
        self.rows.sync()

    def finish(self, exit_code: int = 0) -> None:
        """Closes both; W&B marks the run as failed when the code is not 0."""
        self.rows.close()
        run = self.run
        self._wandb(lambda run: run.finish(exit_code=exit_code), seconds=_finish_seconds(run))
        if self.run is not None:  # else its end was seen to when it was left out
            _end_service(END_SECONDS)
            if found := _first_error(run):
                _left_out(NotRecorded(found), run)
        self.run = None

    def _wandb(self, action: Callable, seconds: float | None = None) -> None:
        """Does something with the W&B run; when it fails, says so once and goes on without."""
        run = self.run
        if run is None:
            return
        try:
            _within(seconds or ANSWER_SECONDS, lambda: action(run))
        except Exception as error:
            self.run = None
            _left_out(_cause(error), run)
            _end_service(0 if isinstance(error, NoAnswer) else END_SECONDS)
        except BaseException:  # a second Ctrl-C: nothing of W&B may wait at exit
            self.run = None
            _end_service(0)
            raise


class NoTracker:
    """The tracker of the other ranks: takes everything and does nothing."""

    run_id = None

    def where(self) -> None: ...

    def log(self, metrics, step, look=None) -> None: ...

    def summary(self, values) -> None: ...

    def sync(self) -> None: ...

    def finish(self, exit_code: int = 0) -> None: ...


def last_wandb_id(folder: Path) -> str | None:
    """The id of the run's last W&B run, None when there was none: wandb names its folders
    run-DATE-ID and offline-run-DATE-ID."""
    folders = list((folder / "wandb").glob("*run-*-*"))
    # Not "offline-": sorted by date, then, whichever way they were recorded.
    names = sorted(folder.name.removeprefix("offline-") for folder in folders)
    return names[-1].split("-", 2)[2] if names else None


def _files_logged(metrics: Path) -> int:
    """How many pictures and pages the rows so far name: a run that goes on has logged them."""
    if not metrics.exists():
        return 0
    return len(re.findall(r'": "attention/', metrics.read_text(encoding="utf-8")))


def _finite_or_text(value: float) -> float | str:
    """JSON has no NaN and no infinity; a reader should see them all the same."""
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def _start_wandb(config: WandbConfig, folder: Path, settings: dict, run_id: str | None):
    """The W&B run, or None. What goes wrong there is a line on stderr, never a lost run."""
    mode = os.environ.get("WANDB_MODE", "auto") if config.mode == "auto" else config.mode
    if mode == "disabled":
        return None
    # Else W&B reports on itself to its makers, for offline runs too, and is waited for at exit.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ["WANDB_SILENT"] = "true"  # what is to be said is said here
    logging.raiseExceptions = False  # else each line of its log is a traceback on a full disk
    try:
        import wandb

        options = {
            "project": config.project,
            "name": config.name or folder.name,
            "group": config.group,
            "tags": config.tags,
            "dir": str(folder),
            "config": settings,
            "id": run_id,
            "resume": "allow" if run_id else None,
            "settings": wandb.Settings(
                console="off",
                x_service_wait=ANSWER_SECONDS,
                disable_git=True,
                save_code=False,
                init_timeout=START_SECONDS,
                finish_timeout=_finish_timeout(),
                finish_timeout_raises=True,
            ),
        }

        def start(mode: str, seconds: float):
            with _on_its_own():
                return _within(seconds, lambda: wandb.init(mode=mode, **options))

        if mode != "offline":
            try:
                if wandb.login(prompt=False, verify=False):
                    return start("online", START_SECONDS + 2 * ANSWER_SECONDS)
                print(
                    "W&B: no API key found, so this run is recorded offline "
                    "(wandb login, then wandb sync; wandb=off for none)",
                    file=sys.stderr,
                )
            except NoAnswer:
                raise
            except Exception as error:
                cause = _one_line(error)
                print(f"W&B: not reached ({cause}); recorded offline instead", file=sys.stderr)
        return start("offline", 2 * ANSWER_SECONDS)
    except Exception as error:
        _left_out(error)
        _end_service(0 if isinstance(error, NoAnswer) else END_SECONDS)
        return None
    except BaseException:
        _end_service(0)
        raise


class NoAnswer(Exception):
    """A call of W&B's has not come back in time."""


class NotRecorded(Exception):
    """W&B has not kept everything that it was given."""


class _Worker:
    """A thread that makes calls for others, who need not wait for them to the end."""

    def __init__(self):
        self.calls = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            action, outcome = self.calls.get()
            try:
                outcome.put((action(), None))
            except BaseException as error:  # wandb.teardown() leaves through sys.exit
                outcome.put((None, error))


_worker: list[_Worker] = []  # the one that is free; a new one takes the place of one that is stuck


def _within(seconds: float, action: Callable):
    """What action() returns or raises; NoAnswer when that takes longer. It then goes on unheard."""
    worker, outcome = _worker.pop() if _worker else _Worker(), queue.SimpleQueue()
    worker.calls.put((action, outcome))
    try:
        result, error = outcome.get(timeout=seconds)
    except queue.Empty:
        raise NoAnswer(f"no answer within {seconds:g} s") from None
    _worker.append(worker)
    if error is not None:
        ours = isinstance(error, Exception)  # what would end Python ends W&B's part alone
        raise error if ours else RuntimeError(f"{type(error).__name__} {error}")
    return result


def _finish_timeout() -> float:
    """For how long W&B tries to upload the rest at the end, in seconds."""
    return float(os.environ.get("WANDB_FINISH_TIMEOUT") or FINISH_SECONDS)


def _finish_seconds(run) -> float:
    """How long finish() may take: the uploads, of which an offline run has none, and an answer."""
    return ANSWER_SECONDS + (0 if run is None or run.offline else _finish_timeout())


def _end_service(seconds: float) -> None:
    """Ends W&B's own process, which has so many seconds for it, and then none: without this it
    is waited for when Python exits, however long that takes."""
    if "wandb" not in sys.modules:
        return
    import wandb

    service = _service()
    if service and not seconds:
        service.kill()
    with contextlib.suppress(Exception):
        _within(seconds or END_SECONDS, wandb.teardown)
    if service:
        service.kill()
        service.wait()


def _service() -> subprocess.Popen | None:
    """W&B's own process. The library has no name for it that is made for others."""
    from wandb.sdk import wandb_setup

    found = wandb_setup._singleton
    for name in ("_connection", "_proc", "_process"):
        found = getattr(found, name, None)
    return found


@contextlib.contextmanager
def _on_its_own():
    """A process that is started meanwhile has neither stdout nor stderr of ours: W&B's would show
    traces of its stack, and hold the pipe to `tee` open if it outlived us."""
    sys.stdout.flush()
    sys.stderr.flush()
    ours, nowhere = {number: os.dup(number) for number in (1, 2)}, os.open(os.devnull, os.O_WRONLY)
    try:
        for number in ours:
            os.dup2(nowhere, number)
        yield
    finally:
        for number, was in ours.items():
            os.dup2(was, number)
            os.close(was)
        os.close(nowhere)


def _recorded_in(run) -> Path:
    """The folder of a W&B run: below the run's own, or a temporary one if that failed."""
    return Path(run.dir).parent


def _first_error(run) -> str | None:
    """What went wrong in W&B's own process, by its log: it gives up on a server that refuses and
    on a disk that is full, and says nothing of it to anyone."""
    try:
        lines = (_recorded_in(run) / "logs" / "debug-internal.log").read_bytes().splitlines()
    except OSError as error:
        return str(error)
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            return "its log breaks off"
        level, message, task, cause = (
            str(entry.get(key, "")) if isinstance(entry, dict) else ""
            for key in ("level", "msg", "task", "error")
        )
        lost = message.startswith(CARRIERS) or "UploadTask" in task
        if level.startswith("ERROR") and lost:
            return f"{message} {cause}"
    return None


def _cause(error: Exception) -> Exception:
    """The error, or what is behind it when W&B's own process is gone."""
    service = _service()
    if service and not isinstance(error, NoAnswer | TimeoutError):
        with contextlib.suppress(subprocess.TimeoutExpired):  # its connection ends before it does
            return RuntimeError(f"its process ended with code {service.wait(1)}")
    return error


def _left_out(error: Exception, run=None) -> None:
    """The one line about it, with what to do when the run is on disk."""
    cause, on_disk = _one_line(error), "metrics are in metrics.jsonl"
    if isinstance(error, TimeoutError):
        cause = f"the server did not take it within {_finish_timeout():g} s"
    if isinstance(error, NotRecorded | TimeoutError) and not run.offline:
        later = f"wandb sync --include-online {_recorded_in(run)}"
        what = f"not all was uploaded ({cause}); to do it later: {later}"
    elif isinstance(error, NotRecorded):
        what = f"its record has gaps, {on_disk} ({cause})"
    else:
        what = f"left out, {on_disk} ({cause})"
    print(f"W&B: {what}", file=sys.stderr)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())[:300] or type(error).__name__
    return text.partition(" Consider increasing the init_timeout")[0]
