"""Generation speed of clearhead and transformers, in one process.

    python -m benchmarks.generate model=gpt2-small batch_sizes=[1,8]    # 2 tables
    python -m benchmarks.generate prompt_tokens=[32,512] max_new_tokens=[24,256]    # 8 tables

Both decode greedily with the same weights and prompts: transformers with generate(), clearhead with
the code of generate.py. First all tokens in fp32 are compared. If they differ, the command exits
with code 4. Then the runs are interleaved: A B C, then C B A. The speed is the median of tokens per
second, reading the prompt included; the speedup is the median of the ratios to transformers in the
same precision within each round, with the smallest and the largest one.
"""

from benchmarks.settings import GenerationBenchmark
from clearhead.config.command_line import settings_command


@settings_command(GenerationBenchmark)
def main(settings: GenerationBenchmark) -> None:
    from benchmarks.generation import compare  # imports torch

    compare(settings)


if __name__ == "__main__":
    main()
