"""Checks and measurements on one GPU, in one table and one JSON file: `make gpu-check`.

    python -m benchmarks.gpu rows=[compiled,profile]
    python -m benchmarks.gpu device=cpu model=gpt2-nano large=gpt2-nano batch_size=4 length=32

The rows are in the order of their importance. Each ends as pass, fail or skipped, with the reason,
and runs in separate processes, which are all killed at its end, so that a crash or a hang loses one
row only. All share a cache of compiled code. The text is the sample story, repeated.

A training passes if its loss falls (LOSS_FALLS) and, on a GPU, its peak memory is that of
scripts.plan (MEMORY), both without the CUDA context and the buffers of NCCL. Trainings of the same
steps must have the same losses (SAME_LOSSES). On a GPU these are not equal bit for bit, because
some sums depend on the order of threads.
"""

import contextlib
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from benchmarks.timing import origin
from clearhead.config.command_line import OutFile, ScriptConfig, settings_command, write_out
from clearhead.config.schema import AboveZero, Name, Positive
from clearhead.config.stored import settings_of
from clearhead.errors import ClearheadError, message_of, refuse
from clearhead.files import REPOSITORY, read_json, read_rows
from clearhead.parallel import device
from clearhead.tokens.tokenizer import get_tokenizer
from scripts import plan

TORCHRUN = "-m torch.distributed.run --standalone"
STEPS = 40  # of most trainings; the second half gives the speed
TRAIN = """model={model} parallel=single data=shards data.path={folder}/train.bin
    data.max_length={length} data.val_fraction=0 model.dropout=0 optimizer.lr=6e-4
    optimizer.schedule=constant trainer.warmup_steps=4 trainer.max_steps={steps}
    trainer.batch_size={batch_size} trainer.micro_batch_size=auto trainer.device={device}
    trainer.precision={precision} trainer.compile={compile} trainer.log_every={log_every}
    trainer.eval_every=0 trainer.sample_tokens=0 trainer.save_every=0 runs_dir={folder}
    lens=off wandb=off"""
EAGER = "trainer.compile=false"
LOSS_FALLS = 0.5  # nats from the first logged loss to the last; with random tokens about 0.1
MEMORY = 0.1  # largest difference from the plan, as a fraction of it
SAME_LOSSES = {"resume": 2e-3, "ddp": 1e-2, "fsdp": 1e-2}  # largest relative differences
FSDP_SPEED = 0.95  # least tokens/s of one rank, as a fraction of those of DDP
ROW_SECONDS, LEAST_SECONDS = 200, 20  # a program that takes longer fails; needed to start one
COLUMNS = {"tokens_per_second": ",.0f", "mfu": ".2f", "peak_gb": ".1f", "planned_gb": ".1f"}
HEADER = """| row | result | tokens/s | MFU | peak GB | planned GB | seconds | note |
|---|---|---:|---:|---:|---:|---:|---|"""
ROWS = ["gradients", "compiled", "profile", "dropout", "fsdp", "resume", "large", "fp16"]
ROWS += ["generation", "variants"]


class GpuBenchmark(ScriptConfig):
    """python -m benchmarks.gpu [KEY=VALUE ...]"""

    rows: list[Name] = Field(ROWS, description="rows to run, in the order of the default")
    minutes: AboveZero = Field(9, description="rows that do not fit into this time are skipped")
    model: Name = Field("gpt2-small", description="model group of train.py")
    large: Name = Field("gpt2-xl", description="model group of the row large")
    batch_size: Positive = Field(64, description="windows per step on a device")
    length: Positive = Field(1024, description="tokens per window")
    device: Literal["cuda", "cpu"] = Field("cuda", description="cpu: to check this program, eager")
    commit: str = Field("", description="commit of a copy without .git")
    out: OutFile = Field("gpu.json", description="JSON file for the results")


class Skipped(Exception):
    """The row cannot be run; the text is the reason."""


class Check:
    """The rows, and what they share: the text, the runs, the compiled code and the time."""

    # Variants of compiled steps: strategy, and variables for torch and for ranks.py.
    variants_of: ClassVar = {
        "attention without cuDNN": ("single", {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}),
        "DDP with buckets of 100 MB": ("ddp", {"BUCKET_MB": "100"}),
        "max-autotune": ("single", {"TORCHINDUCTOR_MAX_AUTOTUNE": "1"}),
    }

    def __init__(self, settings: GpuBenchmark, folder: Path, ranks: int = 1):
        self.settings, self.folder, self.ranks = settings, folder, ranks
        self.output_file = folder / "output.txt"  # of the program that runs
        self.runs: dict[str, Path] = {}  # of the trainings that have ended
        self.end = time.monotonic() + 60 * settings.minutes
        self.on_gpu, where = settings.device == "cuda", torch.device(settings.device)
        bf16 = self.on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
        self.precision = "bf16" if bf16 else "fp16" if self.on_gpu else "fp32"
        self.origin = origin(type(self).__module__, where, ("triton", "transformers"))
        self.origin["commit"] = settings.commit or self.origin["commit"]
        self.origin |= {"cudnn": torch.backends.cudnn.version(), "ranks": ranks}
        self.write_tokens("train.bin", STEPS * ranks * settings.batch_size)

    def write_tokens(self, name: str, windows: int) -> None:
        """Writes the sample story, repeated, in nanoGPT's format."""
        story = (REPOSITORY / "corpus/sample.txt").read_text(encoding="utf-8")
        tokens = np.array(get_tokenizer("gpt2").encode(story), dtype=np.uint16)
        np.resize(tokens, windows * self.settings.length + 1).tofile(self.folder / name)

    def row(self, name: str) -> dict:
        """Runs a row. Returns its result, figures, commands and the end of their output."""
        started, self.commands, self.output = time.monotonic(), [], ""
        row = {"name": name, "result": "pass", "note": ""}
        try:
            row |= getattr(self, name)()
            if problems := row.pop("problems", []):
                row |= {"result": "fail", "note": "; ".join([*problems, row["note"]])}
        except Skipped as reason:
            row |= {"result": "skipped", "note": str(reason)}
        except Exception as error:  # also one of this program; the other rows are run
            row |= {"result": "fail", "note": message_of(error)}
        row["seconds"] = round(time.monotonic() - started, 1)
        return row | {"commands": self.commands, "output": self.output[-8000:]}

    # ---------------------------------------------------------------------------- programs

    def run(
        self,
        program: str,
        strategy: str = "single",
        ranks: int | None = None,
        act: Callable[[subprocess.Popen], None] | None = None,
        **variables: str,
    ) -> int:
        """Runs a Python program in the folder of the repository, with torchrun unless the strategy
        is single, at most ROW_SECONDS. Then kills its processes.

        act: called with the process that was started. With it, returns the exit code; without it,
        raises RuntimeError if the program fails.
        """
        left, over = self.end - time.monotonic(), f"minutes={self.settings.minutes:g} are over"
        if left < LEAST_SECONDS:
            raise Skipped(over)
        if strategy != "single":
            program = f"{TORCHRUN} --nproc_per_node={ranks or self.ranks} {program}"
        names = "".join(f"{name}={value} " for name, value in variables.items())
        self.commands.append(f"{names}python {program}")
        variables |= {"TORCHINDUCTOR_CACHE_DIR": str(self.folder / "compiled")}
        variables |= {"CHECK_DEVICE": self.settings.device, "CHECK_ROW": str(self.folder)}
        limit = min(ROW_SECONDS, left)
        # A file, because a pipe would stay open as long as a process that the program has started.
        with self.output_file.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *shlex.split(program)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=REPOSITORY,
                env=os.environ | variables,
                start_new_session=True,  # without the Ctrl-C of a terminal
            )
        try:
            if act:
                act(process)
            exit_code = process.wait(limit)
            self.left = self.processes()
        except subprocess.TimeoutExpired:
            text = f"stopped after {limit:.0f} s"
            raise (Skipped(f"{text}: {over}") if limit == left else RuntimeError(text)) from None
        finally:
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.kill()
            process.wait()
            text = self.output_file.read_text(encoding="utf-8", errors="replace")
            self.output += text
        if exit_code and not act:
            lines = [line for line in text.splitlines() if line.strip(" =-")]
            raise RuntimeError(f"exit code {exit_code}: {lines[-1] if lines else ''}")
        return exit_code

    def processes(self, *variables: str) -> list[int]:
        """Returns the processes of the program with these variables. torchrun gives each rank a
        session, so processes are found by their environment."""
        wanted, found = {f"CHECK_ROW={self.folder}", *variables}, []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # the process has ended, or is of another user
                if wanted <= {*(entry / "environ").read_text(errors="replace").split("\0")}:
                    found.append(int(entry.name))
        return sorted(found)

    def of_ranks(self, program: str, arguments: str, strategy: str, **variables: str) -> dict:
        """Runs a program of ranks.py and returns its results."""
        out = self.folder / "out.json"
        self.run(f"-m benchmarks.ranks {program} {out} {arguments}", strategy, **variables)
        return read_json(out)

    def steps(self, strategy: str = "single", more: str = "", **variables: str) -> dict:
        """Returns speed and profile of training steps, see ranks.py; with `batch_size` windows on
        each rank."""
        windows = self.settings.batch_size * (1 if strategy == "single" else self.ranks)
        more = f"parallel={strategy} trainer.batch_size={windows} {more}"
        return self.of_ranks("steps", shlex.join(self.overrides(more)), strategy, **variables)

    # --------------------------------------------------------------------------- trainings

    def overrides(self, more: str = "") -> list[str]:
        """Returns the settings of a training. more: others, which may repeat settings."""
        values = self.settings.model_dump() | {"folder": self.folder, "precision": self.precision}
        values |= {"compile": self.on_gpu, "steps": STEPS, "log_every": STEPS // 2}
        return shlex.split(f"{TRAIN.format(**values)} {more}")

    def train(
        self, name: str, more: str = "", strategy: str = "single", falls: float | None = LOSS_FALLS
    ) -> dict:
        """Trains as run `name` and returns its figures. falls: least fall of the loss, in nats."""
        settings = self.overrides(f"parallel={strategy} {more}")
        self.run(f"train.py {shlex.join(settings)} name={name}", strategy)
        self.runs[name] = self.folder / name
        return self.figures(name, settings, falls)

    def plan(self, settings: list[str], micro_batch_size: int, ranks: int) -> dict[str, float]:
        """Returns the peak memory that scripts.plan estimates, in bytes."""
        kind = "h100" if self.on_gpu else "cpu"  # all GPUs have the same estimate
        more = [f"trainer.micro_batch_size={micro_batch_size}", f"kind={kind}", f"devices={ranks}"]
        return plan.make_plan(*plan.composed([*settings, *more]))["memory"]

    def figures(self, name: str, settings: list[str], falls: float | None) -> dict:
        """Returns losses, speed and memory of a run, and what is wrong with them."""
        logged = ("train/loss", "train/tokens_per_second", "train/mfu")
        rows = read_rows(self.runs[name] / "metrics.jsonl", *logged)
        stored = settings_of(self.runs[name])
        trainer, single = stored["trainer"], stored["parallel"]["strategy"] == "single"
        memory = self.plan(settings, trainer["micro_batch_size"], 1 if single else self.ranks)
        planned = (memory["total"] - self.on_gpu * memory["libraries"]) / 1e9
        peak = read_json(self.runs[name] / "summary.json")["peak_memory_gb"]
        losses, problems = [row["train/loss"] for row in rows], []
        if falls is not None and not losses[-1] < losses[0] - falls:
            problems.append(f"the loss does not fall by {falls}")
        if self.on_gpu and planned > 2 and abs(peak / planned - 1) > MEMORY:
            problems.append(f"peak memory differs by {peak / planned - 1:+.0%}")
        note = f"loss {losses[0]:.2f} to {losses[-1]:.2f}; {trainer['batch_size']} windows"
        note += f", {trainer['micro_batch_size']} at a time"
        found = {"losses": losses, "peak_gb": peak, "planned_gb": planned, "note": note}
        for key in logged[1:]:
            if key in rows[-1]:  # no MFU for an unknown device
                found[key[6:]] = median(row[key] for row in rows[len(rows) // 2 :])
        return found | {"problems": problems}

    def compare(self, name: str, other: str, limit: float, found: dict) -> dict:
        """Adds the largest difference of the losses of run `name` from those of the same steps of
        another run to its figures."""
        if other not in self.runs:
            raise Skipped(f"needs row {other}")
        own, others = (
            {row["step"]: row["train/loss"] for row in read_rows(path, "train/loss")}
            for path in (self.runs[run] / "metrics.jsonl" for run in (name, other))
        )
        loss = max(abs(own[step] / others[step] - 1) for step in own)
        found["note"] += f"; losses of row {other} within {loss:.1e}"
        if not loss <= limit:
            found["problems"].append(f"losses of row {other} differ by {loss:.1e}")
        return found | {"loss_difference": loss}

    # -------------------------------------------------------------------------------- rows

    def gradients(self) -> dict:
        if not importlib.util.find_spec("pytest"):
            raise Skipped("pytest is not installed")
        self.run("-m pytest tests/campaign/gpu.py -k gradients")
        return {"note": self.output.strip().rpartition("\n")[2]}

    def compiled(self) -> dict:
        return self.train("compiled", f"trainer.max_steps={5 * STEPS // 2}")

    def profile(self) -> dict:
        found = self.steps()
        ms = ", ".join(f"{name} {of_class:.1f}" for name, of_class in found["ms"].items())
        found["note"] = f"ms: {ms}, idle {found['idle_ms']:.1f}; {found['kernels']:.0f} kernels"
        if self.on_gpu and found["synchronisations"]:
            found["problems"] = [f"{found['synchronisations']:.0f} synchronisations per step"]
        return found

    def dropout(self) -> dict:
        return self.train("dropout", "model.dropout=0.1")

    def fsdp(self) -> dict:
        """DDP and FSDP with one rank, with NCCL."""
        found = {}
        for name in ("ddp", "fsdp"):
            figures = self.train(name, strategy=name)
            found[name] = self.compare(name, "compiled", SAME_LOSSES[name], figures)
        ratio = found["fsdp"]["tokens_per_second"] / found["ddp"]["tokens_per_second"]
        problems = [problem for figures in found.values() for problem in figures.pop("problems")]
        if ratio < FSDP_SPEED:
            problems.append(f"FSDP has {ratio:.2f} of the tokens/s of DDP")
        return found["fsdp"] | {"problems": problems, "figures": [found["ddp"] | {"name": "ddp"}]}

    def resume(self) -> dict:
        """Half of the steps, then the rest in another process, eager."""
        self.train("resume", f"{EAGER} trainer.max_steps={STEPS // 2}", falls=None)
        return self.compare(
            "resume", "compiled", SAME_LOSSES["resume"], self.train("resume", EAGER)
        )

    def large(self) -> dict:
        steps = "trainer.batch_size=8 trainer.max_steps=6 trainer.log_every=1"
        return self.train("large", f"model={self.settings.large} {steps} {EAGER}", falls=0)

    def fp16(self) -> dict:
        if self.precision != "bf16":
            raise Skipped("only on a GPU with bf16; all rows are in fp16 on one without")
        return self.train("fp16", f"trainer.precision=fp16 {EAGER}")

    def generation(self) -> dict:
        if not importlib.util.find_spec("transformers"):
            raise Skipped("transformers is not installed")
        out = self.folder / "out.json"
        values = f"model={self.settings.model} device={self.settings.device} out={out}"
        self.run(f"-m benchmarks.generate rounds=3 {values}")
        tables = read_json(out)["tables"].items()
        return {
            "figures": [r | {"name": f"{n}, {r['name']}"} for n, t in tables for r in t["rows"]]
        }

    def variants(self) -> dict:
        """As many as there is time for."""
        found = []
        for name, (strategy, variables) in self.variants_of.items():
            try:
                found.append(self.steps(strategy, **variables) | {"name": name})
            except Skipped:
                if not found:
                    raise
        return {"figures": found}


def run_rows(kind: type[Check], settings: GpuBenchmark, ranks: int = 1) -> None:
    """Runs the rows of the settings, writes their results to `out`, and prints them."""
    known = type(settings).model_fields["rows"].default
    unknown = [name for name in settings.rows if name not in known]
    refuse([("rows", name, "no such row", f"use some of {', '.join(known)}") for name in unknown])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also kills the program of a row
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        check = kind(settings, Path(folder), ranks)
        for name in (name for name in known if name in settings.rows):
            print(f"{name} ...", file=sys.stderr, flush=True)
            rows.append(check.row(name))
            print(as_text(rows[-1]), file=sys.stderr, flush=True)
            write_out(settings.out, check.origin | {"rows": rows})  # an interrupt loses one row
    print("\n".join([HEADER, *map(as_text, rows)]))
    if failed := [row["name"] for row in rows if row["result"] == "fail"]:
        raise ClearheadError("rows", ", ".join(failed), "failed", f"see {settings.out}")


def as_text(row: dict) -> str:
    """Returns a row as lines of a Markdown table: its own, and one for each of its `figures`."""
    lines, empty = [], {"result": "", "seconds": "", "note": ""}
    for found in [row, *(empty | figure for figure in row.get("figures", []))]:
        cells = [f"{found[key]:{form}}" if key in found else "" for key, form in COLUMNS.items()]
        cells = [found["name"], found["result"], *cells, str(found["seconds"]), found["note"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


@settings_command(GpuBenchmark)
def main(settings: GpuBenchmark) -> None:
    refuse(device.check(settings.device))
    run_rows(Check, settings)


if __name__ == "__main__":
    main()
