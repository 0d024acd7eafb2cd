"""What a run prints, records and times: console, tracker (metrics.jsonl, W&B), report."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from clearhead.errors import best_effort
from clearhead.output.console import Console
from clearhead.output.report import write_report
from clearhead.output.tracker import Tracker
from headlens import Snapshot, formatted

MAX_NAMED = 3  # heads in one line
MAX_SHARE = 0.01  # of the time of a run: reports that are written while it trains


@dataclass
class RunLog:
    """The output of a run. Ranks other than 0 print and write nothing."""

    directory: Path  # the run directory
    console: Console
    tracker: Tracker
    exclude: Callable[[float], None]  # called with the seconds of work that is not training
    debug: bool  # whether errors of a report end the run
    seconds: dict[str, float] = field(default_factory=dict)  # of validation, samples, ...
    started: float = field(default_factory=time.perf_counter)

    @contextlib.contextmanager
    def timed(self, work: str) -> Iterator[None]:
        """Adds the duration of the context to the seconds of this work."""
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        self.seconds[work] = self.seconds.get(work, 0.0) + seconds
        self.exclude(seconds)

    def validation(self, step: int, row: dict[str, float]) -> None:
        """Prints validation metrics."""
        text = f"step {step}  validation loss {row['val/loss']:.4f}"
        if "val/accuracy" in row:
            text += f"  accuracy {formatted(row['val/accuracy'])}"
        if "val/bits_per_byte" in row:
            text += f"  {row['val/bits_per_byte']:.3f} bits per byte"
        self.console.print(text)

    def sample(self, row: dict) -> None:
        """Prints a text sample, a row of samples.jsonl."""
        self.console.print(f"step {row['step']}  sample: {' '.join(row['text'].split())}")

    def first_heads(self, step: int, snapshot: Snapshot | None) -> None:
        """Prints the heads of each name that no head had before, one line for each name."""
        for name, heads in (snapshot.first_heads if snapshot else {}).items():
            listed = ", ".join(f"L{layer} H{head}" for layer, head in heads[:MAX_NAMED])
            if len(heads) > MAX_NAMED:
                listed += f" and {len(heads) - MAX_NAMED} more"
            width = len(str(self.console.max_steps or 10_000))
            self.console.print(f"step {step:>{width}}  new name: {name} {listed}")

    def write_report(self, is_training: bool = False) -> None:
        """Writes report.html, on rank 0. is_training: while the run trains, at most one percent of
        its time is for reports, so it is written less often if it takes long."""
        if not self.console.is_rank_0:
            return
        elapsed = time.perf_counter() - self.started
        if is_training and self.seconds.get("report", 0) > MAX_SHARE * elapsed:
            return
        with self.timed("report"), best_effort("report.html: could not be written", self.debug):
            write_report(self.directory, is_training)
