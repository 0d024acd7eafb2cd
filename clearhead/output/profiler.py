"""Profile of a few early training steps by torch.profiler (trainer.profile=true).

    profile/table.txt       phases and operators by total time, operators by self time
    profile/trace.json.gz   timeline of all operators, for https://ui.perfetto.dev

    with profiler.step():
        with profiler.phase("forward"):
            ...

Profiling does not change any results. The logged speed of these steps includes its overhead.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import profile, record_function, schedule

from clearhead.errors import best_effort
from clearhead.files import atomic_write, make_folder

SKIPPED, WARMUP, PROFILED = 3, 1, 3  # steps
ROWS = 30  # of each table
logger = logging.getLogger(__name__)


class Profiler:
    """Profiles the fifth to the seventh step and writes the files to `directory`."""

    def __init__(self, enabled: bool, directory: Path, device: torch.device):
        self.directory, self.device = directory, device
        self.torch_profiler: profile | None = None
        if enabled:
            # Without this, torch.profiler logs to stderr.
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")
            steps = schedule(wait=SKIPPED, warmup=WARMUP, active=PROFILED, repeat=1)
            self.torch_profiler = profile(schedule=steps, record_shapes=True)
            self.torch_profiler.start()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Returns a context for a complete training step."""
        yield
        if self.torch_profiler:
            self.torch_profiler.step()
            if self.torch_profiler.step_num == SKIPPED + WARMUP + PROFILED:
                self.close()

    def phase(self, name: str) -> contextlib.AbstractContextManager:
        """Returns a context for a part of a step: a row of the table and a range of the trace."""
        return record_function(name) if self.torch_profiler else contextlib.nullcontext()

    def close(self) -> None:
        """Stops profiling and writes the files, with fewer steps if the run ended early."""
        torch_profiler, self.torch_profiler = self.torch_profiler, None
        if torch_profiler:
            torch_profiler.stop()
            if (steps := torch_profiler.step_num - SKIPPED - WARMUP) > 0:
                self._write(torch_profiler, steps)
            else:
                logger.warning(
                    "trainer.profile: no profile, because the run had fewer than 5 steps"
                )

    def _write(self, torch_profiler: profile, steps: int) -> None:
        averages = torch_profiler.key_averages(group_by_input_shape=True)
        clock = "cuda_time_total" if self.device.type == "cuda" else "cpu_time_total"
        tables = [
            f"{steps} steps on {self.device}; times are sums over these steps",
            torch_profiler.key_averages().table(sort_by=clock, row_limit=ROWS),
            averages.table(sort_by=f"self_{clock}", row_limit=ROWS),
        ]
        with best_effort("trainer.profile: files could not be written"):  # such as a full disk
            make_folder(self.directory)
            atomic_write(self.directory / "table.txt", "\n".join(tables).encode())
            torch_profiler.export_chrome_trace(str(self.directory / "trace.json.gz"))
