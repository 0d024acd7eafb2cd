"""Generation speed of clearhead and transformers, in one process.

    python -m benchmarks.generate model=gpt2-small batch_sizes=[1,8]

Both generate greedily from the same weights and prompts: transformers with generate(), clearhead as
generate.py does. First all tokens have to be equal in fp32; otherwise nothing is timed (exit code
4). Then their runs are interleaved: A B C, then C B A. A figure is the median of tokens per second,
a ratio the median of the ratios within each round.
"""

from typing import Annotated

from pydantic import Field

from training.config.command_line import OutFile, ScriptConfig, settings_command
from training.config.schema import Device, Name, Positive


class GenerationBenchmark(ScriptConfig):
    """python -m benchmarks.generate [model=NAME] [KEY=VALUE ...]"""

    model: Name = Field("gpt2-small", description="as in training")
    batch_sizes: Annotated[list[Positive], Field(min_length=1)] = Field(
        [1, 8], description="texts at once, one table each"
    )
    prompt_tokens: Positive = Field(64, description="tokens per prompt")
    num_tokens: Positive = Field(64, description="new tokens per text")
    rounds: Positive = Field(5, description="runs of each implementation")
    device: Device = Field("auto", description="auto | cpu | cuda | mps")
    out: OutFile = Field("", description="a JSON file for everything measured")


@settings_command(GenerationBenchmark)
def main(settings: GenerationBenchmark) -> None:
    from benchmarks.generation import compare  # imports torch

    compare(settings)


if __name__ == "__main__":
    main()
