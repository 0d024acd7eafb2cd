"""Measures the speed of tokenization and of the data loader on this machine.

    python -m benchmarks.data text=big.txt out=data.json

Tokenization: one call of tiktoken and `scripts.prepare_data` (text file to shards), alternating, on
the start of the text. Data loader: a shard of 100 million tokens in the page cache.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from pydantic import Field, FilePath

from clearhead.config.command_line import OutFile, ScriptConfig, settings_command, write_out
from clearhead.config.schema import DataConfig, Positive
from clearhead.config.yaml_files import REPOSITORY
from clearhead.output.machine import machine
from clearhead.tokens.shards import ShardWriter
from clearhead.tokens.tokenizers import get_tokenizer

BATCH, LENGTH, BATCHES = 64, 1024, 10_000


class BenchmarkConfig(ScriptConfig):
    """python -m benchmarks.data text=FILE [KEY=VALUE ...]"""

    text: FilePath = Field(description="plain text file of about 1 GB")
    megabytes: Positive = Field(400, description="size of the part to tokenize")
    repeats: Positive = Field(3, description="measurements of each speed")
    out: OutFile = Field("", description="JSON file for the results")


@settings_command(BenchmarkConfig)
def main(settings: BenchmarkConfig) -> None:
    results: dict = {"machine": machine(), "text_megabytes": os.path.getsize(settings.text) / 1e6}
    with tempfile.TemporaryDirectory() as folder:
        results["tokenizing"] = tokenizing(settings, Path(folder))
        results["loader"] = loader(Path(folder))
    print(json.dumps(results, indent=1))
    if settings.out:
        write_out(settings.out, results)


def tokenizing(settings: BenchmarkConfig, folder: Path) -> dict:
    """Returns MB/s of one call of tiktoken and of prepare_data on all cores, alternating."""
    with open(settings.text, "rb") as file:
        text = file.read(settings.megabytes * 10**6).decode(errors="ignore")
    path, size = folder / "sample.txt", len(text.encode()) / 1e6
    path.write_text(text, encoding="utf-8", newline="")
    encode = get_tokenizer("gpt2").encode_to_numpy  # about 1.5 times as fast as encode()
    one_call, file_to_shards = [], []
    for turn in range(settings.repeats):
        started = time.perf_counter()
        encode(text, disallowed_special=())
        one_call.append(size / (time.perf_counter() - started))
        started = time.perf_counter()
        out = folder / f"sample-{turn}"
        command = [sys.executable, "-m", "scripts.prepare_data", f"data.path={path}", f"out={out}"]
        subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, check=True)
        file_to_shards.append(size / (time.perf_counter() - started))
    return {
        "megabytes": size,
        "tiktoken_one_call": one_call,
        "prepare_data": file_to_shards,
        "times_as_fast": median(file_to_shards) / median(one_call),
    }


def loader(folder: Path) -> dict:
    """Returns tokens/s for 10,000 batches of 64 windows of 1,024 tokens, read as in training."""
    from data import load_datasets, training_batches

    shard = folder / "loader" / "shard.bin"
    shard.parent.mkdir()
    writer = ShardWriter(shard, 50256)
    random = np.random.default_rng(0)
    for _ in range(100):
        writer.append(random.integers(0, 50256, 1_000_000, np.uint16))
    writer.close()
    config = DataConfig.with_defaults(path=str(shard), max_length=LENGTH, val_fraction=0.0)
    dataset = load_datasets(
        config, get_tokenizer("gpt2")
    ).train  # reads it into the page cache to verify it
    batches = training_batches(dataset, BATCH, seed=0)
    started = time.perf_counter()
    for _ in range(BATCHES):
        next(batches)
    return {"tokens_per_second": BATCH * LENGTH * BATCHES / (time.perf_counter() - started)}


if __name__ == "__main__":
    main()
