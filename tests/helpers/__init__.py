"""Constants and functions that tests of several folders share."""

from pathlib import Path

TIMEOUT = 1800  # seconds that a test waits at most, so that only a process that hangs reaches it
REPOSITORY = Path(__file__).resolve().parents[2]
NO_NETWORK = REPOSITORY / "tests" / "no_network"  # on PYTHONPATH: blocks connections
FOLDERS = (".", "clearhead", "scripts", "benchmarks")
SOURCES = sorted(
    path
    for folder in FOLDERS
    for path in REPOSITORY.joinpath(folder).glob("**/*.py" if folder == "clearhead" else "*.py")
)

# Settings of a run that takes a second: two layers of two heads over bytes.
TINY = (
    "model=gpt2-nano",
    "model.vocab_size=257",
    "model.context_length=32",
    "model.emb_dim=32",
    "model.num_heads=2",
    "model.num_layers=2",
    "data.tokenizer=byte",
    "data.max_length=32",
    "trainer.max_steps=4",
    "trainer.batch_size=8",
    "trainer.warmup_steps=2",
    "trainer.eval_every=2",
    "trainer.eval_windows=8",
    "trainer.sample_tokens=8",
    "trainer.precision=fp32",
    "trainer.device=cpu",
    "lens=off",
    "wandb=off",
)

TEXT = "".join(
    f"Line {n}: the quick fox number {n * 7 % 13} jumps over the dog.\n" for n in range(60)
)
