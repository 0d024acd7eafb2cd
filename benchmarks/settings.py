"""Settings of benchmarks/training.py and benchmarks/generate.py."""

from typing import Annotated, Literal

from pydantic import DirectoryPath, Field

from clearhead.config.command_line import OutFile, ScriptConfig
from clearhead.config.schema import Device, Name, Positive

Counts = Annotated[list[Positive], Field(min_length=1)]


class TrainingBenchmark(ScriptConfig):
    """python -m benchmarks.training [model=NAME] [nanogpt=FOLDER] [KEY=VALUE ...]"""

    model: Name = Field("gpt2-small", description="model group of train.py")
    batch_size: Positive = Field(4, description="windows per step")
    length: Positive = Field(256, description="tokens per window")
    nanogpt: DirectoryPath | None = Field(None, description="folder of a checkout of nanoGPT")
    device: Device = Field("auto", description="auto | cpu | cuda | mps")
    precision: Literal["auto", "fp32", "bf16"] = Field("auto", description="auto | fp32 | bf16")
    compile: bool = Field(True, description="false: do not use torch.compile")
    rounds: Positive = Field(5, description="measurements of each row of a table")
    steps: Positive = Field(3, description="timed steps per measurement")
    out: OutFile = Field("", description="JSON file for the results")


class GenerationBenchmark(ScriptConfig):
    """python -m benchmarks.generate [model=NAME] [KEY=VALUE ...]"""

    model: Name = Field("gpt2-small", description="model group of train.py")
    batch_sizes: Counts = Field([1, 8], description="numbers of texts generated at once")
    prompt_tokens: Counts = Field([64], description="tokens per prompt")
    max_new_tokens: Counts = Field([64], description="new tokens per prompt")
    rounds: Positive = Field(5, description="measurements of each implementation")
    device: Device = Field("auto", description="auto | cpu | cuda | mps")
    out: OutFile = Field("", description="JSON file for the results")
