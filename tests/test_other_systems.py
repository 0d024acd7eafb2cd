"""Windows and macOS, as far as Linux can pretend: commands without what Windows lacks, and the
choice of device, precision and memory layout on MPS."""

import json
import os
import subprocess
import sys

from helpers import NO_NETWORK, REPOSITORY, TINY
from helpers.windows import ENVIRONMENT

PROMPT = "“Ça va?” 東京 🦊 —"
TEXT = "".join(f"Line {n}: {PROMPT} said the fox, ναί.\n" for n in range(200))


def test_commands_without_what_windows_lacks(tmp_path):
    """trainer.keep=1: the resumed run removes the checkpoint from which it resumes."""
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    small = [*TINY, "trainer.eval_every=4", "trainer.keep=1", f'trainer.sample_prompt="{PROMPT}"']
    tokens = ["data=shards", "data.path=tokens", "data.tokenizer=gpt2", "model.vocab_size=50257"]
    tokens += ["data.max_length=32", "model.emb_dim=8", "trainer.batch_size=1"]
    commands = [
        ["train.py", *small, "data.path=text.txt", "name=a", "lens=default", "lens.every=4"],
        ["train.py", "trainer.resume=runs/a", "trainer.max_steps=6", "lens=off"],
        ["generate.py", "checkpoint=runs/a", f"prompt={PROMPT}", "max_new_tokens=4"],
        ["scripts.evaluate", "checkpoint=runs/a", "data.path=text.txt", "device=cpu"],
        ["scripts.prepare_data", "data.path=text.txt", "out=tokens", "workers=1"],
        ["train.py", *small, *tokens, "name=b"],
    ]
    home = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, REPOSITORY / "tests" / "helpers" / "windows.py", json.dumps(commands)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(NO_NETWORK), **home, **ENVIRONMENT},
        cwd=tmp_path,
        capture_output=True,
        encoding="cp1252",
        timeout=120,
    )
    codes = [int(line[5:]) for line in done.stdout.splitlines() if line.startswith("exit ")]
    assert codes == [0] * len(commands), done.stdout + done.stderr
    # Two in each training, for the sample and the command to generate text. cp1252 has no 東京.
    assert done.stdout.count("“Ça va?” ?? ? —") == 2 * 3 + 1
    for run, last in (("a", 6), ("b", 4)):
        folder = tmp_path / "runs" / run
        assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step_{last:08d}"]
        samples = (folder / "samples.jsonl").read_bytes().splitlines()
        assert all(PROMPT.encode() in sample for sample in samples)
        assert len(samples) == 1 + (run == "a")
    assert b"\r\r" not in (tmp_path / "runs" / "a" / "attention" / "heads.csv").read_bytes()
