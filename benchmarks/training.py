"""Training speed of clearhead, transformers and nanoGPT: the same model, data and mathematics.

    python -m benchmarks.training model=gpt2-small batch_size=4 length=256 nanogpt=../nanoGPT

Measures complete optimizer steps (forward, backward, clipping, AdamW) in one process, with the same
random tokens and weights, without dropout. First an equivalence check compares loss, gradient norm
and update of each implementation with ours. If they differ, the command exits with code 4. Then the
steps are interleaved: A B C, then C B A, and so on.

There are two tables. As shipped: each project with its default settings on this device. Equalised:
all in the same precision and compiled. benchmarks/implementations.py defines the rows.
"""

from benchmarks.settings import TrainingBenchmark
from clearhead.config.command_line import settings_command


@settings_command(TrainingBenchmark)
def main(settings: TrainingBenchmark) -> None:
    from benchmarks.comparison import compare  # imports torch

    compare(settings)


if __name__ == "__main__":
    main()
