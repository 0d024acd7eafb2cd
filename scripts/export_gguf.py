"""Exports a trained model to a GGUF file, which llama.cpp and Ollama run.

    python -m scripts.export_gguf checkpoint=runs/NAME out=FILE.gguf

`checkpoint` is a run directory, a checkpoint, a Hugging Face GPT-2 directory or hub:NAME. The run
may still be training. The file is written atomically. Needs the package gguf.
"""

from pathlib import Path

from pydantic import Field

from clearhead.config.command_line import (
    OutFile,
    ScriptConfig,
    refuse_unwritable,
    settings_command,
)
from clearhead.config.schema import Checkpoint
from clearhead.errors import refuse, sanitize
from clearhead.files import atomic_file


class ExportConfig(ScriptConfig):
    """python -m scripts.export_gguf checkpoint=runs/NAME out=FILE.gguf"""

    checkpoint: Checkpoint
    out: OutFile = Field(pattern=r"(?i)\.gguf$", description="GGUF file to write")


@settings_command(ExportConfig)
def main(settings: ExportConfig) -> None:
    from clearhead.models import gguf_file, pretrained

    model = pretrained.load_pretrained(settings.checkpoint)
    try:
        with refuse_unwritable(settings.out), atomic_file(Path(settings.out)) as part:
            gguf_file.write(model, part)
    except ImportError:
        refuse([("out", settings.out, "GGUF files require the package gguf", "pip install gguf")])
    print(sanitize(f"exported {model.folder} to {settings.out}"))


if __name__ == "__main__":
    main()
