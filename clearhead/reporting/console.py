"""Progress of training on stdout: a progress bar on a terminal, plain lines elsewhere."""

import collections
import datetime
import os
import sys
import time

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from clearhead.errors import sanitize


class Console:
    """Prints on rank 0, and nothing on other ranks."""

    def __init__(self, is_rank_0: bool, first_step: int, max_steps: int):
        self.is_rank_0 = is_rank_0
        self.max_steps = max_steps
        # (step, time) of the last lines; the time left is estimated from the speed since the first.
        self.marks = collections.deque([(first_step, time.monotonic())], maxlen=20)
        self.rich = rich_console(highlight=False, soft_wrap=True)
        self.bar = None
        if is_rank_0 and self.rich.is_terminal:
            columns = (BarColumn(24), TaskProgressColumn(), TextColumn("{task.description}"))
            self.bar = Progress(*columns, console=self.rich, transient=True)
            self.task = self.bar.add_task("", total=max_steps, completed=first_step)
            self.bar.start()

    def step(self, step: int, loss: float, learning_rate: float, tokens_per_second: float) -> None:
        """Prints progress: loss in nats per token, learning rate, speed, time left."""
        since, started = self.marks[0]
        now = time.monotonic()
        left = (now - started) / (step - since) * (self.max_steps - step)
        self.marks.append((step, now))
        line = (
            f"step {step:>{len(str(self.max_steps))}}/{self.max_steps}  loss {loss:.4f}  "
            f"lr {learning_rate:.2e}  {tokens_per_second:,.0f} tok/s  {duration(left)} left"
        )
        if self.bar:
            self.bar.update(self.task, completed=step, total=self.max_steps, description=line)
        else:
            self.print(line)

    def print(self, text: str = "") -> None:
        """Prints a line, above the progress bar if there is one. Does not interpret rich markup,
        and escapes control characters: a sample may contain any characters."""
        if self.is_rank_0:
            self.rich.print(sanitize(text.replace("\r", "")), markup=False)
            sys.stdout.flush()

    def close(self) -> None:
        if self.bar:
            self.bar.stop()


def rich_console(**options) -> RichConsole:
    """Returns a rich console on stdout. It ignores FORCE_COLOR, which would write control codes to
    a file or a pipe, and Jupyter's terminal for `!python`, which keeps each redraw of a bar."""
    terminal = None if sys.stdout.isatty() and "JPY_PARENT_PID" not in os.environ else False
    return RichConsole(force_terminal=terminal, force_jupyter=False, **options)


def duration(seconds: float) -> str:
    """Formats seconds: 3725 -> 1:02:05."""
    return str(datetime.timedelta(seconds=round(seconds)))
