"""What a person sees while training: a progress bar on a terminal, plain lines elsewhere."""

import collections
import sys
import time

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from errors import visible


class Console:
    """Prints on the main rank; does nothing on the others."""

    def __init__(self, is_main: bool, first_step: int, max_steps: int):
        self.is_main = is_main
        self.max_steps = max_steps
        # (step, time) of the last lines: how long is left goes by how fast it goes now.
        self.marks = collections.deque([(first_step, time.monotonic())], maxlen=20)
        self.rich = rich_console(highlight=False, soft_wrap=True)
        self.bar = None
        if is_main and self.rich.is_terminal:
            columns = (BarColumn(24), TaskProgressColumn(), TextColumn("{task.description}"))
            self.bar = Progress(*columns, console=self.rich, transient=True)
            self.task = self.bar.add_task("", total=max_steps, completed=first_step)
            self.bar.start()

    def step(self, step: int, loss: float, learning_rate: float, tokens_per_second: float) -> None:
        """One line of progress: loss in nats per token, learning rate, speed, time left."""
        since, started = self.marks[0]
        now = time.monotonic()
        left = (now - started) / (step - since) * (self.max_steps - step)
        self.marks.append((step, now))
        line = (
            f"step {step:>{len(str(self.max_steps))}}/{self.max_steps}  loss {loss:.4f}  "
            f"lr {learning_rate:.2e}  {tokens_per_second:,.0f} tok/s  {duration(left)} left"
        )
        if self.bar:
            self.bar.update(self.task, completed=step, description=line)
        else:
            self.print(line)

    def print(self, text: str = "") -> None:
        """A line of its own, above the bar where there is one. The text is never read as markup,
        and what a terminal would obey in it is written out: samples may hold anything."""
        if self.is_main:
            self.rich.print(visible(text.replace("\r", "")), markup=False)
            sys.stdout.flush()

    def close(self) -> None:
        if self.bar:
            self.bar.stop()


def rich_console(**options) -> RichConsole:
    """A rich console on stdout, which is a terminal only if it is one: by FORCE_COLOR alone, a file
    or a pipe would be filled with a bar's control codes."""
    return RichConsole(force_terminal=None if sys.stdout.isatty() else False, **options)


def duration(seconds: float) -> str:
    """3725 -> 1:02:05; 65 -> 1:05."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
