"""A trained model as a folder that the transformers library loads, to be used or published.

    python -m scripts.export_hf checkpoint=runs/NAME out=DIR

`checkpoint` is a run, one of its checkpoints, a Hugging Face GPT-2 directory or hub:NAME. A run may
be training meanwhile. The folder is there whole or not at all.
"""

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, field_validator

from errors import message_of, refuse, visible
from training.config.command_line import ScriptConfig, settings_command
from training.config.schema import Name, rejected

if TYPE_CHECKING:
    from interop.pretrained import PretrainedModel


class ExportConfig(ScriptConfig):
    """python -m scripts.export_hf checkpoint=runs/NAME out=DIR"""

    checkpoint: Name = Field(
        description="a run (its last checkpoint), a checkpoint, a directory, hub:NAME"
    )
    out: str = Field(description="the folder to make; it may exist if it is empty")

    @field_validator("out")
    @classmethod
    def _can_be_made(cls, out: str) -> str:
        if reason := not_to_be_made(out):
            raise rejected(reason, "give a folder that does not exist yet")
        return out


def not_to_be_made(out: str) -> str:
    """Why a folder of that name cannot be made; empty when it can."""
    if not out:
        return "is empty"
    if os.path.islink(out.rstrip("/")):
        return "is a link"
    if os.path.isdir(out):
        if os.path.samefile(out, "."):
            return "is where you stand"
        try:
            return "holds something already" if os.listdir(out) else ""
        except OSError as error:
            return f"may not be looked into ({error.strerror})"
    if os.path.exists(out):
        return "is a file"
    above = Path(os.path.abspath(out)).parent
    while not os.path.lexists(above):
        above = above.parent
    if not os.path.isdir(above):
        return f"{above} is no folder"
    return "" if os.access(above, os.W_OK | os.X_OK) else f"nothing may be written to {above}"


@settings_command(ExportConfig)
def main(settings: ExportConfig) -> None:
    from safetensors import SafetensorError

    from files import make_folder, rename, sync, temporary_name
    from interop import export
    from interop.pretrained import load_pretrained

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is half made goes, too
    pretrained = load_pretrained(settings.checkpoint)
    out = Path(os.path.abspath(settings.out))
    part = temporary_name(out)
    try:
        make_folder(part)
        export.write(pretrained, part, bits_per_byte(pretrained))
        for file in part.iterdir():
            sync(file)
        sync(part)
        rename(part, out)
    except (OSError, SafetensorError) as error:
        cause = f"cannot be written ({getattr(error, 'strerror', None) or message_of(error)})"
        refuse([("out", settings.out, cause, "make room, or give another folder")])
    finally:
        shutil.rmtree(part, ignore_errors=True)
    size = sum(file.stat().st_size for file in out.iterdir())
    print(visible(f"{settings.out}: {len(list(out.iterdir()))} files, {size / 1e6:,.1f} MB"))
    where = f"from {pretrained.folder.name}, " if pretrained.state else ""
    print(
        f"{where}{pretrained.model.num_parameters():,} parameters, {pretrained.window:,} positions"
    )
    load = f"transformers.pipeline('text-generation', model={str(settings.out)!r})"
    print(visible(f"load it: {load}; README.md there says more"))


def bits_per_byte(pretrained: "PretrainedModel") -> float | None:
    """The validation figure of the checkpoint's step, if the log of its run has it."""
    from training.checkpoint.listing import run_of
    from training.reporting.report import read_rows

    state, run = pretrained.state, run_of(pretrained.folder)
    if state is None or run is None:
        return None
    for row in read_rows(run / "metrics.jsonl"):
        if row["step"] == state.step and "val/bits_per_byte" in row:
            return row["val/bits_per_byte"]
    return None


if __name__ == "__main__":
    main()
