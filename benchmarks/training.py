"""Training speed of clearhead, transformers and nanoGPT: the same model, data and mathematics.

    python -m benchmarks.training model=gpt2-small batch_size=4 length=256 nanogpt=../nanoGPT

Whole optimizer steps (forward, backward, clipping, AdamW) in one process, on the same random
tokens, from the same weights, without dropout. First each implementation has to compute the same
loss, gradient norm and update as ours; otherwise the command ends with exit code 4. Then their
steps are interleaved: A B C, then C B A, and so on.

Two tables. As shipped: each as its own project runs it on this device by default. Equalised: all in
the same precision and compiled. The rows: benchmarks/implementations.py.
"""

from benchmarks.settings import TrainingBenchmark
from training.config.command_line import settings_command


@settings_command(TrainingBenchmark)
def main(settings: TrainingBenchmark) -> None:
    from benchmarks.comparison import compare  # imports torch

    compare(settings)


if __name__ == "__main__":
    main()
