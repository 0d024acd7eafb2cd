"""Checks and measurements on the GPUs of one machine: `make gpus-check`. See gpu.py.

python -m benchmarks.gpus device=cpu model=gpt2-nano large=gpt2-nano batch_size=4 length=32
"""

import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from typing import ClassVar

import torch
from pydantic import Field

from benchmarks import gpu
from benchmarks.gpu import EAGER, Check, GpuBenchmark, run_rows
from clearhead.config.command_line import OutFile, settings_command
from clearhead.config.schema import Name, Positive
from clearhead.errors import refuse
from clearhead.files import read_rows
from clearhead.parallel import device

SAME_LOSSES, SAME_LOSSES_OF_MUON = 1e-3, 1e-2  # largest relative differences
SPEED = 0.93  # least tokens/s of DDP, as a fraction of those of one rank times their number
PARTS = 4  # micro-batches of a step
VALIDATION = 12_000  # windows of each rank, 10 seconds or more
STOP_SECONDS, LOST_SECONDS = 10, 90  # most after SIGTERM, and after a rank has stopped
TIMEOUT = 20  # parallel.timeout in the row sigstop
ROWS = ["topology", "same_losses", "scaling", "large", "micro_batches", "muon", "sigterm"]
ROWS += ["sigkill", "sigstop", "variants"]


class GpusBenchmark(GpuBenchmark):
    """python -m benchmarks.gpus [KEY=VALUE ...]"""

    rows: list[Name] = Field(ROWS, description="rows to run, in the order of the default")
    ranks: Positive | None = Field(None, description="number of ranks; null: one for each GPU")
    out: OutFile = Field("gpus.json", description="JSON file for the results")


class ChecksOfRanks(Check):
    variants_of: ClassVar = {
        f"DDP with buckets of {size} MB": ("ddp", {"BUCKET_MB": f"{size}"}) for size in (100, 250)
    }

    def topology(self) -> dict:
        if shutil.which("nvidia-smi"):
            self.output = subprocess.check_output(["nvidia-smi", "topo", "-m"], text=True)
        megabytes = 512 if self.on_gpu else 8
        found = self.of_ranks("all_reduce", f"{self.settings.device} {megabytes}", "ddp")
        return found | {"note": f"all-reduce of {megabytes} MB: {found['gb_per_second']:.2f} GB/s"}

    def same_losses(self) -> dict:
        """Of the same global batch. A small learning rate, which does not amplify rounding."""
        more = f"{self.same_batch} optimizer.lr=1e-4 {EAGER}"
        runs = {"single": self.train("single", more, falls=None)}
        for name in ("ddp", "fsdp"):
            found = self.train(name, more, name, falls=None)
            runs[name] = self.compare(name, "single", SAME_LOSSES, found)
        return together(runs)

    def scaling(self) -> dict:
        one, all_ranks = self.steps(), self.steps("ddp")
        share = all_ranks["tokens_per_second"] / self.ranks / one["tokens_per_second"]
        sent = all_ranks["ms"].get("communication", 0)
        note = f"{share:.2f} of {self.ranks} x single; communication {sent:.1f} ms"
        note += f", of which {all_ranks['exposed_ms']:.1f} ms while nothing is computed"
        problems = [f"less than {SPEED} of {self.ranks} x single"] * (share < SPEED)
        figures = [one | {"name": "single"}]
        return all_ranks | {"note": note, "problems": problems, "figures": figures}

    def large(self) -> dict:
        windows = f"trainer.batch_size={8 * self.ranks} trainer.micro_batch_size=8"
        return self.train("large", f"model={self.settings.large} {windows}", "fsdp", falls=0)

    def micro_batches(self) -> dict:
        """Gradients are exchanged in the last micro-batch of a step only. DDP: one all-reduce of
        each bucket of 25 MB, and a few of scalars. FSDP gathers parameters in each micro-batch."""
        windows, problems, found = max(1, self.settings.batch_size // PARTS), [], {}
        for name in ("ddp", "fsdp"):
            found[name] = self.steps(name, f"trainer.micro_batch_size={windows} {EAGER}")
            sent = found[name]["sent"]
            found[name]["note"] = ", ".join(f"{number:.1f} {kind}" for kind, number in sent.items())
        ddp, fsdp = found["ddp"]["sent"], found["fsdp"]["sent"]
        if ddp["allreduce"] > 4 * found["ddp"]["parameters"] / 25e6 + 2 * PARTS:
            problems.append("DDP reduces gradients too often")
        if PARTS * fsdp["reducescatter"] > fsdp["allgather"]:
            problems.append("FSDP reduces gradients too often")
        return together(found) | {"problems": problems}

    def muon(self) -> dict:
        more = f"optimizer=muon {self.same_batch} {EAGER}"
        ddp = self.train("muon-ddp", more, "ddp", falls=None)
        fsdp = self.train("muon-fsdp", more, "fsdp", falls=None)
        fsdp = self.compare("muon-fsdp", "muon-ddp", SAME_LOSSES_OF_MUON, fsdp)
        return together({"ddp": ddp, "fsdp": fsdp})

    def sigterm(self) -> dict:
        """In a step; then, resumed by half of the ranks, in a validation; finished by one."""
        many = VALIDATION * self.ranks
        self.write_tokens("val.bin", many)
        more = f"parallel=fsdp data.val_path={self.folder}/val.bin trainer.eval_windows=1"
        in_step = self.signal_at("sigterm", signal.SIGTERM, lambda step: step >= 3, more)
        more += f" trainer.eval_every=3 trainer.eval_windows={many} trainer.resume=must"
        # Rows of steps with a validation are written after it, which is a second after this row.
        before, half = (lambda step: step % 3 == 2), max(1, self.ranks // 2)
        in_validation = self.signal_at("sigterm", signal.SIGTERM, before, more, half, pause=1)
        last = self.starts("sigterm")[-1] + 4
        more += f" trainer.eval_every=0 trainer.eval_windows=1 trainer.max_steps={last} {EAGER}"
        found = self.train("sigterm", f"{self.same_batch} {more} parallel=single", falls=None)
        _, second, third = starts = self.starts("sigterm")
        note = f"SIGTERM: {in_step:.1f} s in a step, {in_validation:.1f} s in a validation"
        found["note"] = f"{note}; the starts were at steps {starts}"
        is_late = max(in_step, in_validation) > STOP_SECONDS
        found["problems"] += [f"over {STOP_SECONDS} s"] * is_late
        found["problems"] += ["steps are lost"] * (not 3 <= second < third)
        return found

    def sigkill(self) -> dict:
        """One rank dies; torchrun starts all again, and they resume."""
        more = f"parallel=ddp trainer.save_every={gpu.STEPS // 4} trainer.max_steps={gpu.STEPS}"
        is_half = lambda step: step >= gpu.STEPS // 2  # noqa: E731
        self.signal_at("sigkill", signal.SIGKILL, is_half, more, PET_MAX_RESTARTS="1")
        starts, done = self.starts("sigkill"), self.logged("sigkill")
        ok = (self.exit_code, len(starts), done) == (0, 2, gpu.STEPS)
        problems = [] if ok else [f"exit code {self.exit_code}, {len(starts)} starts, step {done}"]
        return {"note": f"the starts were at steps {starts}", "problems": problems}

    def sigstop(self) -> dict:
        """A rank hangs: the others end with an error, and torchrun kills it."""
        more = f"parallel=ddp parallel.timeout={TIMEOUT}"
        seconds = self.signal_at("sigstop", signal.SIGSTOP, lambda step: step >= 3, more)
        problems = [f"over {LOST_SECONDS} s"] * (seconds > LOST_SECONDS)
        problems += ["exit code 0"] * (self.exit_code == 0)
        problems += [f"{len(self.left)} processes are left"] * bool(self.left)
        return {"note": f"ended {seconds:.1f} s after SIGSTOP", "problems": problems}

    # ------------------------------------------------------------------------------- parts

    @property
    def same_batch(self) -> str:
        """The batch of one device, for any number of ranks."""
        return f"trainer.batch_size={self.settings.batch_size // self.ranks * self.ranks}"

    def starts(self, name: str) -> list[int]:
        """Returns the step of each start of a run."""
        return [row["step"] for row in read_rows(self.folder / name / "starts.jsonl")]

    def logged(self, name: str) -> int:
        """Returns the last step that a run has logged."""
        return max([row["step"] for row in read_rows(self.folder / name / "metrics.jsonl")] or [0])

    def signal_at(
        self,
        name: str,
        number: int,
        when: Callable[[int], bool],
        more: str,
        ranks: int = 0,
        pause: float = 0,
        **variables: str,
    ) -> float:
        """Trains, and sends a signal `pause` seconds after a logged step for which `when` is true:
        SIGTERM to torchrun, others to the last rank. Returns the seconds until torchrun ends."""
        ranks, count, sent = ranks or self.ranks, len(self.starts(name)), []

        def act(process: subprocess.Popen) -> None:
            end = min(self.end, time.monotonic() + gpu.ROW_SECONDS)
            while True:
                start, step = self.starts(name)[count:], self.logged(name)
                if start and step > start[0] and when(step):
                    break
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError("the step for the signal was not reached")
                time.sleep(0.05)
            time.sleep(pause)
            target = process.pid
            if number != signal.SIGTERM:  # the first process of a rank is the rank
                target = self.processes(f"RANK={ranks - 1}")[0]
            os.kill(target, number)
            sent.append(time.monotonic())

        more = f"{self.same_batch} {EAGER} trainer.log_every=1 trainer.max_steps=100000 {more}"
        program = f"train.py {shlex.join(self.overrides(more))} name={name}"
        self.exit_code = self.run(program, "ddp", ranks, act, **variables)
        return time.monotonic() - sent[0]


def together(runs: dict[str, dict]) -> dict:
    """Returns the figures of several runs as a row."""
    problems = [f"{name}: {p}" for name, found in runs.items() for p in found.pop("problems", [])]
    return {"problems": problems, "figures": [found | {"name": n} for n, found in runs.items()]}


@settings_command(GpusBenchmark)
def main(settings: GpusBenchmark) -> None:
    refuse(device.check(settings.device))
    ranks = settings.ranks or (torch.cuda.device_count() if settings.device == "cuda" else 2)
    if ranks < 2:
        refuse([("ranks", ranks, "these are checks of several ranks", "use make gpu-check")])
    if settings.batch_size < ranks:
        refuse(
            [("batch_size", settings.batch_size, "is below the number of ranks", f"use {ranks}")]
        )
    run_rows(ChecksOfRanks, settings, ranks)


if __name__ == "__main__":
    main()
