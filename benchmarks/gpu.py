"""Checks and measurements on one GPU, in one table and one JSON file: `make gpu-check`.

    python -m benchmarks.gpu nanogpt=../nanoGPT
    python -m benchmarks.gpu rows=[comparison,generation]
    python -m benchmarks.gpu device=cpu model=gpt2-nano batch_size=4 length=32

The rows are in the order of their importance. Each ends as pass, fail or skipped, with the reason,
and runs in separate processes, so that a crash or a hang loses one row only. All share a cache of
compiled code. The text is the sample story, repeated.

A training passes if its loss falls (LOSS_FALLS) and, on a GPU, its peak memory is that of
scripts.plan (MEMORY), both without the CUDA context and the buffers of NCCL. A resumed training and
one with a process group must also have the losses of the training that they repeat (SAME_LOSSES).
On a GPU these are not equal bit for bit, because some sums depend on the order of threads.
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
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from safetensors.torch import load_file

from benchmarks.timing import origin
from clearhead.config.command_line import (
    InFolder,
    OutFile,
    ScriptConfig,
    settings_command,
    write_out,
)
from clearhead.config.schema import AboveZero, Name, Positive
from clearhead.config.stored import settings_of
from clearhead.errors import ClearheadError, message_of, refuse
from clearhead.files import REPOSITORY, read_json, read_rows
from clearhead.parallel import device
from clearhead.tokens.tokenizer import get_tokenizer
from scripts import plan

STEPS = 20  # of a training; the second half is timed
TRAIN = """data=shards data.path={folder} data.max_length={length} data.val_fraction=0
    model.dropout=0 optimizer.lr=6e-4 optimizer.schedule=constant trainer.warmup_steps=4
    trainer.batch_size={batch_size} trainer.micro_batch_size=auto trainer.device={device}
    trainer.log_every=5 trainer.eval_every=0 trainer.sample_tokens=0 trainer.save_every=0
    model={model} runs_dir={folder} lens=off wandb=off"""
TORCHRUN = "-m torch.distributed.run --standalone --nproc_per_node=1"
LOSS_FALLS = 0.5  # nats from the first logged loss to the last; with random tokens about 0.1
MEMORY = 0.1  # largest difference from the plan, as a fraction of it
SAME_LOSSES = {"resume": 2e-3, "ddp": 1e-2, "fsdp": 1e-2}  # largest relative differences
ROW_SECONDS, LEAST_SECONDS = 300, 20  # a program that takes longer fails; needed to start one
END_SECONDS = 45  # from SIGTERM to SIGKILL; torchrun waits 30 s for its processes
COLUMNS = {"tokens_per_second": ",.0f", "mfu": ".2f", "peak_gb": ".1f", "planned_gb": ".1f"}
HEADER = """| row | result | tokens/s | MFU | peak GB | planned GB | seconds | note |
|---|---|---:|---:|---:|---:|---:|---|"""
ROWS = ("compiled", "eager", "fp16", "resume", "ddp", "fsdp", "tests", "comparison", "generation")


class GpuBenchmark(ScriptConfig):
    """python -m benchmarks.gpu [KEY=VALUE ...]"""

    rows: list[Name] = Field(list(ROWS), description="rows to run, in the order of the default")
    minutes: AboveZero = Field(9, description="rows that do not fit into this time are skipped")
    model: Name = Field("gpt2-small", description="model group of train.py")
    batch_size: Positive = Field(64, description="windows per step")
    length: Positive = Field(1024, description="tokens per window")
    nanogpt: InFolder | None = Field(None, description="folder of a checkout of nanoGPT")
    device: Literal["cuda", "cpu"] = Field("cuda", description="cpu: to check this file, eager")
    commit: str = Field("", description="commit of a copy without .git")
    out: OutFile = Field("gpu.json", description="JSON file for the results")


class Skipped(Exception):
    """The row cannot be run; the text is the reason."""


@settings_command(GpuBenchmark)
def main(settings: GpuBenchmark) -> None:
    unknown = [name for name in settings.rows if name not in ROWS]
    refuse([("rows", name, "no such row", f"use some of {', '.join(ROWS)}") for name in unknown])
    refuse(device.check(settings.device))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also ends the program of a row
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        check = Check(settings, Path(folder))
        for name in (name for name in ROWS if name in settings.rows):
            print(f"{name} ...", file=sys.stderr, flush=True)
            rows.append(check.row(name))
            print(as_text(rows[-1]), file=sys.stderr, flush=True)
            write_out(settings.out, check.origin | {"rows": rows})  # an interrupt loses one row
    print("\n".join([HEADER, *map(as_text, rows)]))
    if failed := [row["name"] for row in rows if row["result"] == "fail"]:
        raise ClearheadError("rows", ", ".join(failed), "failed", f"see {settings.out}")


class Check:
    """The rows, and what they share: the text, the runs, the compiled code and the time."""

    def __init__(self, settings: GpuBenchmark, folder: Path):
        self.settings, self.folder = settings, folder
        self.runs: dict[str, Path] = {}  # of the trainings that have ended
        self.end = time.monotonic() + 60 * settings.minutes
        self.on_gpu, where = settings.device == "cuda", torch.device(settings.device)
        bf16 = not self.on_gpu or torch.cuda.is_bf16_supported(including_emulation=False)
        self.precision = "bf16" if bf16 else "fp16"
        self.origin = origin("benchmarks.gpu", where, ("triton", "transformers"))
        self.origin["commit"] = settings.commit or self.origin["commit"]
        story = (REPOSITORY / "corpus/sample.txt").read_text(encoding="utf-8")
        tokens = np.array(get_tokenizer("gpt2").encode(story), dtype=np.uint16)
        size = STEPS * settings.batch_size * settings.length + 1
        np.resize(tokens, size).tofile(folder / "train.bin")  # repeated, in nanoGPT's format

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

    def run(self, arguments: str, parts: int = 1) -> None:
        """Runs Python in the folder of the repository, at most `parts` times ROW_SECONDS."""
        left, over = self.end - time.monotonic(), f"minutes={self.settings.minutes:g} are over"
        if left < LEAST_SECONDS:
            raise Skipped(over)
        self.commands.append(f"python {arguments}")
        environment = {"TORCHINDUCTOR_CACHE_DIR": str(self.folder / "compiled")}
        environment["CHECK_DEVICE"] = self.settings.device  # for tests/campaign/gpu.py
        limit = min(parts * ROW_SECONDS, left)
        exit_code, output = run_python(arguments, self.folder / "output.txt", limit, environment)
        self.output += output
        if exit_code is None:
            text = f"stopped after {limit:.0f} s"
            raise Skipped(f"{text}: {over}") if limit == left else RuntimeError(text)
        if exit_code:
            lines = [line for line in output.splitlines() if line.strip(" =-")]
            raise RuntimeError(f"exit code {exit_code}: {lines[-1] if lines else ''}")

    # --------------------------------------------------------------------------- trainings

    def train(self, name: str, program: str = "train.py", **values: object) -> dict:
        """Trains as run `name` and returns its figures. values: of `overrides`."""
        settings = self.overrides(**values)
        self.run(f"{program} {shlex.join(settings)} name={name}")
        self.runs[name] = self.folder / name
        return self.figures(name, settings)

    def overrides(self, parallel="single", **trainer) -> list[str]:
        """Returns the settings of a training. trainer: settings of this group."""
        values = self.settings.model_dump() | {"folder": self.folder}
        of_rows = {"precision": self.precision, "compile": self.on_gpu, "max_steps": STEPS}
        more = [f"trainer.{key}={value}" for key, value in (of_rows | trainer).items()]
        return [f"parallel={parallel}", *shlex.split(TRAIN.format(**values)), *more]

    def plan(self, settings: list[str], micro_batch_size: int) -> dict[str, float]:
        """Returns the peak memory that scripts.plan estimates, in bytes."""
        kind = "h100" if self.on_gpu else "cpu"  # all GPUs have the same estimate
        more = [f"trainer.micro_batch_size={micro_batch_size}", f"kind={kind}"]
        return plan.make_plan(*plan.composed([*settings, *more]))["memory"]

    def figures(self, name: str, settings: list[str]) -> dict:
        """Returns losses, speed and memory of a run, and what is wrong with them."""
        rows = read_rows(self.runs[name] / "metrics.jsonl")
        trainer = settings_of(self.runs[name])["trainer"]
        memory = self.plan(settings, trainer["micro_batch_size"])
        planned = (memory["total"] - self.on_gpu * memory["libraries"]) / 1e9
        peak = read_json(self.runs[name] / "summary.json")["peak_memory_gb"]
        losses, problems = [row["train/loss"] for row in rows], []
        if not losses[-1] < losses[0] - LOSS_FALLS:
            problems.append(f"the loss does not fall by {LOSS_FALLS}")
        if self.on_gpu and planned > 2 and abs(peak / planned - 1) > MEMORY:
            problems.append(f"peak memory differs by {peak / planned - 1:+.0%}")
        note = f"loss {losses[0]:.2f} to {losses[-1]:.2f}; {trainer['batch_size']} windows"
        note += f", {trainer['micro_batch_size']} at a time"
        found = {"losses": losses, "peak_gb": peak, "planned_gb": planned, "note": note}
        for key in ("tokens_per_second", "mfu"):
            if f"train/{key}" in rows[-1]:  # no MFU for an unknown device
                found[key] = median(row[f"train/{key}"] for row in rows[len(rows) // 2 :])
        return found | {"problems": problems}

    def compare(self, name: str, other: str, found: dict) -> dict:
        """Adds the differences of run `name` from another one to its figures."""
        runs = self.runs[name], self.runs[other]
        own, others = (read_rows(run / "metrics.jsonl", "train/loss") for run in runs)
        pairs = [(a["train/loss"], b["train/loss"]) for a, b in zip(own, others, strict=True)]
        loss = max(abs(a - b) / max(b, 1e-9) for a, b in pairs)
        own, others = (load_file(run / "checkpoints/last/model.safetensors") for run in runs)
        weight = max(float((own[key] - others[key]).abs().max()) for key in others)
        found["note"] += f"; losses of row {other} within {loss:.1e}, weights within {weight:.1e}"
        if not loss <= SAME_LOSSES[name]:
            found["problems"].append(f"losses of row {other} differ by {loss:.1e}")
        return found | {"loss_difference": loss, "weight_difference": weight}

    def ended(self, *names: str) -> str:
        """Returns the first of these rows that has trained."""
        if name := next(filter(self.runs.get, names), None):
            return name
        raise Skipped(f"needs row {' or '.join(names)}")

    # -------------------------------------------------------------------------------- rows

    def compiled(self) -> dict:
        if not self.on_gpu:
            raise Skipped("only on a GPU")
        return self.train("compiled")

    def eager(self) -> dict:
        return self.train("eager", compile=False)

    def fp16(self) -> dict:
        if not self.on_gpu or self.precision == "fp16":
            raise Skipped("only on a GPU with bf16; all rows are in fp16 on one without")
        return self.train("fp16", compile=False, precision="fp16")

    def resume(self) -> dict:
        """Half of the steps, then the rest in another process."""
        other = self.ended("eager")
        self.train("resume", compile=False, max_steps=STEPS // 2)
        return self.compare("resume", other, self.train("resume", compile=False))

    def ddp(self, name: str = "ddp") -> dict:
        """One rank with NCCL, on a CPU with gloo."""
        other = self.ended("compiled", "eager")
        return self.compare(name, other, self.train(name, f"{TORCHRUN} train.py", parallel=name))

    def fsdp(self) -> dict:
        return self.ddp("fsdp")

    def tests(self) -> dict:
        if not importlib.util.find_spec("pytest"):
            raise Skipped("pytest is not installed")
        command = "-m pytest tests/campaign/gpu.py"
        if importlib.util.find_spec("xdist"):
            command += f" -n {max(1, min(8, (os.cpu_count() or 1) // 2))}"
        self.run(command)
        return {"note": self.output.strip().rpartition("\n")[2]}

    def comparison(self) -> dict:
        """A quarter of the batch: transformers stores the logits of all tokens in fp32."""
        nanogpt = self.settings.nanogpt
        values: dict = {"compile": self.on_gpu, "length": self.settings.length}
        values |= {"batch_size": max(1, self.settings.batch_size // 4)}
        values |= {"nanogpt": nanogpt.absolute()} if nanogpt else {}
        return self.tables("training", **values)

    def generation(self) -> dict:
        return self.tables("generate")

    def tables(self, name: str, **values: object) -> dict:
        """Runs another benchmark. Returns the rows of its tables."""
        if not importlib.util.find_spec("transformers"):
            raise Skipped("transformers is not installed")
        out = self.folder / "out.json"
        values |= {"model": self.settings.model, "device": self.settings.device, "out": out}
        words = [f"{key}={value}" for key, value in values.items()]
        self.run(f"-m benchmarks.{name} rounds=3 {shlex.join(words)}", parts=2)
        tables = read_json(out)["tables"].items()
        return {
            "figures": [r | {"name": f"{n}, {r['name']}"} for n, t in tables for r in t["rows"]]
        }


def run_python(
    arguments: str, file: Path, limit: float, environment: dict[str, str]
) -> tuple[int | None, str]:
    """Runs Python, at most `limit` seconds. Returns its exit code, None if it was stopped at the
    limit, and its output. file: for the output, because a pipe would stay open as long as a process
    that the program has started."""
    with file.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *shlex.split(arguments)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=REPOSITORY,
            env=os.environ | environment,
            start_new_session=True,  # so that signals reach all its processes
        )
        exit_code = None
        try:
            exit_code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
        finally:
            if process.poll() is None:  # it ignores SIGTERM, or this program is interrupted
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return exit_code, file.read_text(encoding="utf-8", errors="replace")


def as_text(row: dict) -> str:
    """Returns a row as lines of a Markdown table: its own, and one for each of its `figures`."""
    lines, empty = [], {"result": "", "seconds": "", "note": ""}
    for found in [row, *(figure | empty for figure in row.get("figures", []))]:
        cells = [f"{found[key]:{form}}" if key in found else "" for key, form in COLUMNS.items()]
        cells = [found["name"], found["result"], *cells, str(found["seconds"]), found["note"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
