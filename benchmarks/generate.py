"""Generation speed of clearhead and transformers, in one process.

    python -m benchmarks.generate model=gpt2-small batch_sizes=[1,8]

Both generate greedily from the same weights and prompts: transformers with generate(), clearhead as
generate.py does. First all tokens have to be equal in fp32; otherwise nothing is timed (exit code
4). Then their runs are interleaved: A B C, then C B A. A figure is the median of tokens per second,
a ratio the median of the ratios within each round.
"""

from benchmarks.settings import GenerationBenchmark
from training.config.command_line import settings_command


@settings_command(GenerationBenchmark)
def main(settings: GenerationBenchmark) -> None:
    from benchmarks.generation import compare  # imports torch

    compare(settings)


if __name__ == "__main__":
    main()
