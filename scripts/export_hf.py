"""Exports a trained model to a folder that transformers loads.

    python -m scripts.export_hf checkpoint=runs/NAME out=DIR

`checkpoint` is a run directory, a checkpoint, a Hugging Face GPT-2 directory or hub:NAME. The run
may still be training. The folder is written atomically: under a temporary name, then renamed.
"""

from safetensors import SafetensorError

from clearhead.config.command_line import OutFolder, ScriptConfig, new_folder, settings_command
from clearhead.config.schema import Checkpoint
from clearhead.errors import message_of, sanitize


class ExportConfig(ScriptConfig):
    """python -m scripts.export_hf checkpoint=runs/NAME out=DIR"""

    checkpoint: Checkpoint
    out: OutFolder


@settings_command(ExportConfig)
def main(settings: ExportConfig) -> None:
    from clearhead.models import export, pretrained

    model = pretrained.load_pretrained(settings.checkpoint)
    with new_folder(settings.out) as folder:
        try:
            export.write(model, folder)
        except SafetensorError as error:  # also for a full disk
            raise OSError(message_of(error)) from error
    load = f"transformers.pipeline('text-generation', model={settings.out!r})"
    print(sanitize(f"exported {model.folder} to {settings.out}; load with: {load}"))


if __name__ == "__main__":
    main()
