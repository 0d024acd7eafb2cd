"""Training speed of clearhead, transformers and nanoGPT: the same model, data and mathematics.

    python -m benchmarks.training model=gpt2-small batch_size=4 length=256 nanogpt=../nanoGPT

Whole optimizer steps (forward, backward, clipping, AdamW) in one process, on the same random
tokens, from the same weights, without dropout. First each implementation has to compute the same
loss, gradient norm and update as ours; otherwise the command ends with exit code 4. Then their
steps are interleaved: A B C, then C B A, and so on.

Two tables. As shipped: each as its own project runs it on this device by default. Equalised: all in
the same precision and compiled. The rows: benchmarks/implementations.py.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from training.config.command_line import OutFile, ScriptConfig, settings_command
from training.config.schema import Device, Name, Positive, rejected


class TrainingBenchmark(ScriptConfig):
    """python -m benchmarks.training [model=NAME] [nanogpt=FOLDER] [KEY=VALUE ...]"""

    model: Name = Field("gpt2-small", description="as in training")
    batch_size: Positive = Field(4, description="windows per step")
    length: Positive = Field(256, description="tokens per window")
    nanogpt: str = Field("", description="the folder of a checkout of nanoGPT")
    device: Device = Field("auto", description="auto | cpu | cuda | mps")
    precision: Literal["auto", "fp32", "bf16"] = Field("auto", description="auto | fp32 | bf16")
    compile: bool = Field(True, description="false: nothing is compiled")
    rounds: Positive = Field(5, description="in each, every row of a table runs some steps")
    steps: Positive = Field(3, description="timed steps of a round")
    out: OutFile = Field("", description="a JSON file for everything measured")

    @field_validator("nanogpt")
    @classmethod
    def _is_a_checkout(cls, folder: str) -> str:
        if folder and not (Path(folder) / "model.py").is_file():
            raise rejected("has no file model.py", "name the folder of a checkout of nanoGPT")
        return folder


@settings_command(TrainingBenchmark)
def main(settings: TrainingBenchmark) -> None:
    from benchmarks.comparison import compare  # imports torch

    compare(settings)


if __name__ == "__main__":
    main()
