"""Exports a trained model to a folder that transformers loads.

    python -m scripts.export_hf checkpoint=runs/NAME out=DIR

`checkpoint` is a run directory, a checkpoint, a Hugging Face GPT-2 directory or hub:NAME. The run
may still be training. The folder is written atomically: under a temporary name, then renamed.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

from pydantic import Field, field_validator
from safetensors import SafetensorError

from clearhead.config.command_line import ScriptConfig, settings_command
from clearhead.config.schema import Checkpoint, Name, rejected
from clearhead.errors import message_of, refuse, sanitize
from clearhead.files import fsync, make_folder, rename, temporary_name


class ExportConfig(ScriptConfig):
    """python -m scripts.export_hf checkpoint=runs/NAME out=DIR"""

    checkpoint: Checkpoint
    out: Name = Field(description="folder to write; must be empty or not exist")

    @field_validator("out")
    @classmethod
    def _is_free(cls, out: str) -> str:
        path = Path(out)
        if path.is_symlink() or (path.exists() and not (path.is_dir() and not any(path.iterdir()))):
            raise rejected("already exists", "use a folder that does not exist")
        return out


@settings_command(ExportConfig)
def main(settings: ExportConfig) -> None:
    from clearhead.interop import export, pretrained

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # to remove the temporary folder
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
        reason = f"cannot be written ({getattr(error, 'strerror', None) or message_of(error)})"
        refuse([("out", settings.out, reason, "free disk space, or use another folder")])
    finally:
        shutil.rmtree(part, ignore_errors=True)
    load = f"transformers.pipeline('text-generation', model={settings.out!r})"
    print(sanitize(f"exported {model.folder} to {settings.out}; load with: {load}"))


if __name__ == "__main__":
    main()
