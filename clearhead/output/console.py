"""Progress of training (on stdout) and of scripts (on stderr): a progress bar on a terminal, plain
lines elsewhere.

A run that does not print on a terminal has one line for each validation, for its first step, for a
new name of heads, and at least one for a tenth of its steps. Text samples are printed on a terminal
and in a notebook.
"""

import collections
import contextlib
import datetime
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

from rich.console import Console as RichConsole
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from clearhead.errors import sanitize
from headlens import formatted

if TYPE_CHECKING:
    from headlens import Snapshot

LINE_SECONDS = 10  # between two lines about the same work
# Of the steps of a run, where there is no progress bar. More than the distance of ten validations.
MAX_WITHOUT_LINE = 0.101
IN_NOTEBOOK = "JPY_PARENT_PID"  # a variable that Jupyter sets
Report = Callable[[int, int], None]  # called with the number of finished and of all parts


class Console:
    """Prints on rank 0, and nothing on other ranks."""

    def __init__(self, is_rank_0: bool, first_step: int, max_steps: int | None):
        """max_steps: of the run; None if only its time is limited."""
        self.is_rank_0 = is_rank_0
        self.max_steps = max_steps
        # (completed fraction of the run, time) of the last lines; the time left is estimated from
        # the speed since the first.
        self.marks = collections.deque(maxlen=20)
        self.done, self.printed = 0.0, None  # completed fractions: now, and at the last line
        self.shown = ""  # loss, learning rate, speed and time left, at the last logged step
        self.rich = rich_console(highlight=False, soft_wrap=True)
        self.bar = None
        if is_rank_0 and self.rich.is_terminal:
            columns = (BarColumn(24), TaskProgressColumn(), TextColumn("{task.description}"))
            self.bar = Progress(*columns, console=self.rich, transient=True)
            self.task = self.bar.add_task("", total=1, completed=first_step / (max_steps or 1e9))
            self.bar.start()

    def step(
        self,
        step: int,
        loss: float,
        learning_rate: float,
        tokens_per_second: float,
        progress: float | None = None,
    ) -> None:
        """Prints progress: loss in nats per token, learning rate, speed, time left. The first line
        has no time left: the first step also compiles the model and allocates memory.

        progress: the completed fraction of the run; None: that of its steps.
        """
        now = time.monotonic()
        self.done = done = step / (self.max_steps or math.inf) if progress is None else progress
        shown = f"loss {loss:.4f}  lr {learning_rate:.2e}  {tokens_per_second:,.0f} tok/s"
        if self.marks and done > (before := self.marks[0])[0]:
            left = (now - before[1]) / (done - before[0]) * (1 - done)
            shown += f"  {duration(left)} left"
        self.marks.append((done, now))
        self.shown = f"  {shown}"
        line = self._at(step) + self.shown
        if self.bar:
            self.bar.update(self.task, completed=done, description=line)
        elif self.printed is None or done - self.printed > MAX_WITHOUT_LINE:
            self.printed = done
            self.print(line)

    def validation(self, step: int, row: dict[str, float]) -> None:
        """Prints the validation metrics of a step; without a progress bar also those of `step`, if
        they have no line of their own."""
        text = f"{self._at(step)}  validation loss {row['val/loss']:.4f}"
        if "val/accuracy" in row:
            text += f"  accuracy {formatted(row['val/accuracy'])}"
        if "val/bits_per_byte" in row:
            text += f"  {row['val/bits_per_byte']:.3f} bits per byte"
        if not self.bar and self.printed != self.done:
            text += self.shown
            self.printed = self.done if step else None  # the first step has a line too
        self.print(text)

    def sample(self, row: dict) -> None:
        """Prints a text sample, a row of samples.jsonl, on a terminal and in a notebook."""
        if self.bar or IN_NOTEBOOK in os.environ:
            self.print(f"{self._at(row['step'])}  sample: {' '.join(row['text'].split())}")

    def _at(self, step: int) -> str:
        """Returns the start of a line about a step."""
        if last := self.max_steps:
            return f"step {step:>{len(str(last))}}/{last}"
        return f"step {step:>5} ({self.done:4.0%})"

    def new_names(self, step: int, snapshot: "Snapshot | None") -> None:
        """Prints the heads of each name that no head had before, one line for each name."""
        width = len(str(self.max_steps or 10_000))
        for text in snapshot.new_names if snapshot else []:
            self.print(f"step {step:>{width}}  new name: {text}")

    def print(self, text: str = "") -> None:
        """Prints a line, above the progress bar if there is one. Does not interpret rich markup,
        and escapes control characters: a sample may contain any characters."""
        if self.is_rank_0:
            self.rich.print(sanitize(text.replace("\r", "")), markup=False)
            sys.stdout.flush()

    def close(self) -> None:
        if self.bar:
            self.bar.stop()


@contextlib.contextmanager
def progress(what: str) -> Iterator[Report]:
    """Yields report(done, total), which shows on stderr how much is done. what: the parts."""
    console = rich_console(stderr=True)
    if not console.is_terminal:
        yield _report_lines(what)
        return
    columns = (TextColumn(what), BarColumn(24), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _report_lines(what: str) -> Report:
    last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        if done < total and time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            print(f"{what}: {done:,} of {total:,}", file=sys.stderr, flush=True)

    return report


def in_thread(function: Callable) -> Future:
    """Calls a function in a daemon thread: signals, such as Ctrl-C, are handled during the call,
    and the process can end if it never returns."""
    future = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # also SystemExit: wandb.teardown() calls sys.exit
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return future


def rich_console(stderr: bool = False, **options) -> RichConsole:
    """Returns a rich console. It ignores FORCE_COLOR, which would write control codes to a file or
    a pipe, terminals that cannot redraw a line (TERM=dumb, and Jupyter's for `!python`, which keeps
    each redraw of a bar), and COLUMNS=0, with which it would print nothing."""
    can_redraw = (sys.stderr if stderr else sys.stdout).isatty() and IN_NOTEBOOK not in os.environ
    terminal = None if can_redraw and os.environ.get("TERM") not in ("dumb", "unknown") else False
    console = RichConsole(stderr=stderr, force_terminal=terminal, force_jupyter=False, **options)
    if not console.width:
        console.width = 80
    return console


def duration(seconds: float) -> str:
    """Formats seconds: 3725 -> 1:02:05."""
    return str(datetime.timedelta(seconds=round(seconds)))
