"""Compares the tokenizers gpt2, byte and bpe on texts, without training a model.

    python -m benchmarks.tokenizers texts=[english.txt,hindi.txt] out=tokenizers.json

For each text: its tokens and used ids with each tokenizer (bpe: trained on the first nine tenths,
as in a run), the time and peak memory of scripts.train_tokenizer, and the speed of encoding with
gigatoken, tiktoken and Hugging Face's tokenizers, alternating, on the start of the text.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import tokenizers
from pydantic import Field, FilePath

from benchmarks.timing import interleave
from clearhead.config.command_line import OutFile, ScriptConfig, settings_command, write_out
from clearhead.config.schema import Positive, VocabSize
from clearhead.files import REPOSITORY
from clearhead.output.machine import machine
from clearhead.tokens.encoding import StreamEncoder
from clearhead.tokens.tokenizer_json import read_tokenizer, to_json
from clearhead.tokens.tokenizers import Tokenizer, get_tokenizer
from clearhead.tokens.training import Sample, train_tokenizer

# In a small process: a new process begins with the peak memory of the one that starts it.
PEAK_MEMORY = """import resource, subprocess, sys
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"""
PART = 2**20  # characters; Hugging Face's tokenizers are slow for longer texts


class BenchmarkConfig(ScriptConfig):
    """python -m benchmarks.tokenizers texts=[FILE,...] [KEY=VALUE ...]"""

    texts: list[FilePath] = Field(description="text files in UTF-8")
    vocab_size: VocabSize | None = Field(None, description="of bpe; null: that of the text")
    megabytes: Positive = Field(20, description="MB of each text that are encoded")
    repeats: Positive = Field(3, description="measurements of each speed")
    out: OutFile = Field("", description="JSON file for the results")


@settings_command(BenchmarkConfig)
def main(settings: BenchmarkConfig) -> None:
    rows = []
    for path in settings.texts:
        with path.open("rb") as file:
            start = file.read(settings.megabytes * 10**6)
        start = start.decode(errors="ignore")  # without a part of a character at the end
        row = {"text": path.name, "bytes": path.stat().st_size}
        trained, cost = training(path, settings.vocab_size)
        row |= counts(start, settings.vocab_size) | cost
        row["mb_per_second"] = speed(start, trained, settings.repeats)
        rows.append(row)
        print(json.dumps(row), flush=True)
    if settings.out:
        write_out(settings.out, {"machine": machine(), "texts": rows})


def counts(start: str, vocab_size: int | None) -> dict:
    """Returns, by tokenizer, the number of ids, the ids that the text uses, and bytes per token."""
    text = start.encode()
    sample = Sample()
    sample.add(text[: len(text) * 9 // 10])
    found = {}
    for name in ("gpt2", "byte", "bpe"):
        own = name == "bpe"
        tokenizer = train_tokenizer(sample, vocab_size) if own else get_tokenizer(name)
        ids = np.concatenate(list(StreamEncoder(tokenizer).encode([text])))
        found[name] = {
            "ids": tokenizer.n_vocab,
            "used_ids": len(np.unique(ids)),
            "bytes_per_token": round(len(text) / len(ids), 3),
        }
    return found


def training(path: Path, vocab_size: int | None) -> tuple[Tokenizer, dict]:
    """Returns a tokenizer, and the seconds and peak memory of the command that trains it."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "tokenizer"
        command = [sys.executable, "-m", "scripts.train_tokenizer", f"data.path={path.resolve()}"]
        command += [f"out={out}", f"vocab_size={vocab_size or 'null'}"]
        command = [sys.executable, "-c", PEAK_MEMORY, *command]
        started = time.perf_counter()
        peak = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, check=True).stdout
        seconds = time.perf_counter() - started
        unit = 1 if sys.platform == "darwin" else 1024
        cost = {"seconds": round(seconds, 1), "peak_mb": round(int(peak) * unit / 1e6)}
        return read_tokenizer(out), {f"training_{key}": value for key, value in cost.items()}


def speed(text: str, tokenizer: Tokenizer, repeats: int) -> dict[str, float]:
    """Returns the median MB/s of each library with the trained tokenizer."""
    theirs = tokenizers.Tokenizer.from_str(to_json(tokenizer).decode())
    parts = [text[start : start + PART] for start in range(0, len(text), PART)]

    def seconds(encode) -> float:
        started = time.perf_counter()
        for part in parts:
            encode(part)
        return time.perf_counter() - started

    work = {
        "gigatoken": lambda part: list(StreamEncoder(tokenizer).encode([part.encode()])),
        "tiktoken": lambda part: tokenizer.encode_to_numpy(part),
        "tokenizers": lambda part: theirs.encode(part).ids,
    }
    calls = {name: (lambda e=encode: seconds(e)) for name, encode in work.items()}
    found, size = interleave(calls, repeats), len(text.encode()) / 1e6
    return {name: round(size / median(times), 2) for name, times in found.items()}


if __name__ == "__main__":
    main()
