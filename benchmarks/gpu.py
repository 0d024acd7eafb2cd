"""The tests and measurements on one GPU, in one table and one JSON file: `make gpu-check`.

    python -m benchmarks.gpu nanogpt=../nanoGPT
    python -m benchmarks.gpu device=cpu models=[gpt2-nano] batch_size=4 length=32

Every row is one of COMMANDS, in a separate process, so a crash does not lose the other rows. The
peak memory of a training is compared with the estimate of scripts.plan, both without the CUDA
context and the buffers of NCCL.
"""

import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np
from pydantic import DirectoryPath, Field

from benchmarks.timing import origin
from clearhead.checkpoint.run_directory import settings_of
from clearhead.config.command_line import OutFile, ScriptConfig, settings_command, write_out
from clearhead.config.schema import Name, Positive
from clearhead.config.yaml_files import REPOSITORY
from clearhead.distributed import device
from clearhead.errors import ClearheadError, refuse
from clearhead.files import read_json, read_rows
from scripts import plan

STEPS = 30  # of a training; the second half is timed
TRAIN = f"""train.py model={{model}} data=shards data.path={{folder}} data.max_length={{length}}
    data.val_fraction=0 model.dropout=0 trainer.batch_size={{batch_size}} trainer.max_steps={STEPS}
    trainer.device={{device}} trainer.precision=bf16 trainer.compile={{compile}} lens=off wandb=off
    trainer.micro_batch_size=auto trainer.eval_every=0 trainer.sample_tokens=0 trainer.save_every=0
    trainer.log_every=5 runs_dir={{folder}} name=run parallel="""
TORCHRUN = "-m torch.distributed.run --standalone --nproc_per_node=1"
COMMANDS = {  # arguments of Python; on a GPU, ddp and fsdp use NCCL, generation uses CUDA graphs
    "tests": "-m pytest tests/campaign/gpu.py",
    "single": f"{TRAIN}single",
    "ddp": f"{TORCHRUN} {TRAIN}ddp",
    "fsdp": f"{TORCHRUN} {TRAIN}fsdp",
    # A quarter of the batch: transformers stores the logits of all tokens in fp32.
    "comparison": """-m benchmarks.training model={model} batch_size={quarter} length={length}
        precision=bf16 compile={compile} device={device} out={folder}/out.json {nanogpt}""",
    "generation": "-m benchmarks.generate model={model} device={device} out={folder}/out.json",
}
COLUMNS = {"tokens_per_second": ",.0f", "mfu": ".2f", "peak_gb": ".1f", "estimated_gb": ".1f"}
HEADER = "| row | tokens/s | MFU | peak memory, GB | estimated, GB |\n|---|---:|---:|---:|---:|"


class GpuBenchmark(ScriptConfig):
    """python -m benchmarks.gpu [KEY=VALUE ...]"""

    models: list[Name] = Field(["gpt2-small", "gpt2-xl"], description="row single: all models")
    batch_size: Positive = Field(64, description="windows per step")
    length: Positive = Field(1024, description="tokens per window")
    nanogpt: DirectoryPath | None = Field(None, description="folder of a checkout of nanoGPT")
    device: Literal["cuda", "cpu"] = Field("cuda", description="cpu: to check this file, eager")
    out: OutFile = Field("gpu.json", description="JSON file for the results")


@settings_command(GpuBenchmark)
def main(settings: GpuBenchmark) -> None:
    refuse(device.check(settings.device, "bf16"))
    where, rows = device.prepare(settings.device, seed=0), []
    results = origin("benchmarks.gpu", where, ("triton", "transformers")) | {"rows": rows}
    for kind in COMMANDS:
        for model in settings.models if kind == "single" else settings.models[:1]:
            print(f"{kind} {model} ...", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory() as folder:
                rows.append(run_row(settings, kind, model, Path(folder)))
            write_out(settings.out, results)  # after each row: an interrupt does not lose it
    print(text_table(rows))
    if failed := [row["name"] for row in rows if row["exit_code"]]:
        raise ClearheadError("rows", ", ".join(failed), "failed", f"see {settings.out}")


def run_row(settings: GpuBenchmark, kind: str, model: str, folder: Path) -> dict:
    """Runs the command of a row. Returns its exit code, the end of its output, and its figures."""
    values = settings.model_dump() | {"model": model, "folder": folder}
    values["compile"] = str(settings.device == "cuda").lower()
    values["quarter"] = max(1, settings.batch_size // 4)
    values["nanogpt"] = f"nanogpt={settings.nanogpt.absolute()}" if settings.nanogpt else ""
    command = shlex.split(COMMANDS[kind].format(**values))
    size = STEPS * settings.batch_size * settings.length + 1
    tokens = np.random.default_rng(0).integers(50257, size=size, dtype=np.uint16)
    tokens.tofile(folder / "train.bin")  # in nanoGPT's format
    words = ["timeout", "--kill-after=60", "1800", sys.executable, *command]  # seconds
    environment, started = os.environ | {"CHECK_DEVICE": settings.device}, time.monotonic()
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(words, cwd=REPOSITORY, env=environment, **streams)
    row = {"name": f"{kind} {model}", "command": shlex.join(["python", *command]), "figures": []}
    row |= {"exit_code": done.returncode, "output": done.stdout[-4000:]}
    row["seconds"] = round(time.monotonic() - started, 1)
    if done.returncode == 0 and (folder / "out.json").exists():
        row["figures"] = of_tables(read_json(folder / "out.json")["tables"])
    elif done.returncode == 0 and "train.py" in command:
        row["figures"] = of_training(folder / "run", command[command.index("train.py") + 1 :])
    return row


def of_tables(tables: dict[str, dict]) -> list[dict]:
    """Returns the rows of the tables of another benchmark."""
    return [row | {"name": f"{n}, {row['name']}"} for n, t in tables.items() for row in t["rows"]]


def of_training(run: Path, settings: list[str]) -> list[dict]:
    """Returns speed and peak memory of a run, and the estimated memory."""
    rows = read_rows(run / "metrics.jsonl")
    micro = settings_of(run)["trainer"]["micro_batch_size"]
    kind = "cpu" if "trainer.device=cpu" in settings else "h100"  # all GPUs: the same estimate
    settings = [*settings, f"trainer.micro_batch_size={micro}", f"kind={kind}"]
    memory = plan.make_plan(*plan.composed(settings))["memory"]
    estimated = memory["total"] - (memory["libraries"] if kind == "h100" else 0)
    found = {"name": f"micro-batches of {micro}", "estimated_gb": estimated / 1e9}
    for key in {"tokens_per_second", "mfu"} & {name.removeprefix("train/") for name in rows[-1]}:
        found[key] = median(row[f"train/{key}"] for row in rows[len(rows) // 2 :])
    return [found | {"peak_gb": read_json(run / "summary.json")["peak_memory_gb"]}]


def text_table(rows: list[dict]) -> str:
    """Returns the figures of all rows as Markdown; of a row without figures, its last line."""
    text = HEADER
    for row in rows:
        last = row["output"].strip().rpartition("\n")[2]
        for found in row["figures"] or [{"name": f"exit code {row['exit_code']}: {last}"}]:
            cells = [f"{found[key]:{f}}" if key in found else "" for key, f in COLUMNS.items()]
            text += f"\n| {row['name']}: {found['name']} | {' | '.join(cells)} |"
    return text


if __name__ == "__main__":
    main()
