"""A trained model as a folder that the transformers library loads, to be used or published.

    python -m scripts.export_hf checkpoint=runs/NAME out=DIR

`checkpoint` is a run, one of its checkpoints, a Hugging Face GPT-2 directory or hub:NAME. A run may
be training meanwhile. The folder is atomic: written under a temporary name, then renamed.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

from pydantic import Field, field_validator
from safetensors import SafetensorError

from errors import message_of, refuse, sanitize
from files import fsync, make_folder, rename, temporary_name
from training.config.command_line import ScriptConfig, settings_command
from training.config.schema import Checkpoint, Name, rejected


class ExportConfig(ScriptConfig):
    """python -m scripts.export_hf checkpoint=runs/NAME out=DIR"""

    checkpoint: Checkpoint
    out: Name = Field(description="the folder to make; it may exist if it is empty")

    @field_validator("out")
    @classmethod
    def _is_free(cls, out: str) -> str:
        path = Path(out)
        if path.is_symlink() or (path.exists() and not (path.is_dir() and not any(path.iterdir()))):
            raise rejected("exists already", "give a folder that does not exist yet")
        return out


@settings_command(ExportConfig)
def main(settings: ExportConfig) -> None:
    from interop import export, pretrained

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is half made goes, too
    model = pretrained.load_pretrained(settings.checkpoint)
    out = Path(os.path.abspath(settings.out))
    part = temporary_name(out)
    try:
        make_folder(part)
        export.write(model, part)
        for file in (*part.iterdir(), part):
            fsync(file)
        rename(part, out)
    except (OSError, SafetensorError) as error:
        cause = f"cannot be written ({getattr(error, 'strerror', None) or message_of(error)})"
        refuse([("out", settings.out, cause, "make room, or give another folder")])
    finally:
        shutil.rmtree(part, ignore_errors=True)
    load = f"transformers.pipeline('text-generation', model={settings.out!r})"
    print(sanitize(f"written from {model.folder}; load it: {load}"))


if __name__ == "__main__":
    main()
