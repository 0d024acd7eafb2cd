"""Writes an interactive page of all attention heads of a model on any text.

    python -m scripts.inspect_attention checkpoint=runs/NAME text="The bell rang twice."
    python -m scripts.inspect_attention checkpoint=runs/NAME ablation=exact
    python -m scripts.inspect_attention checkpoint=hub:gpt2 out=gpt2.npz   # for compare_heads
    python -m scripts.inspect_attention checkpoints='out/checkpoint-*' text="The bell rang twice."

`checkpoint` is a run directory, a checkpoint, a Hugging Face directory or hub:NAME. Other models
than GPT-2 need the package transformers. The page is the same as in training, with
the prompts of the run, so heads have the same names as there. `text` replaces all prompts except
the repeated sequence. The command also prints the most significant heads of each name. With
ablation=exact it also measures the loss without each head, on the validation data of the run or on
data.path; ablation=estimate is faster and less reliable.

`checkpoints` is a pattern of checkpoints of one training, of transformers' Trainer or of a run, or
hub:NAME@REVISION,REVISION or hub:NAME@PATTERN. The page is a time-lapse of them.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clearhead.config.command_line import settings_command, write_out
from clearhead.errors import CheckpointError, refuse, sanitize
from scripts._inspection import (
    InspectConfig,
    check_prompts,
    conflicts,
    is_synthetic,
    lens_of,
)

if TYPE_CHECKING:
    import torch

    from headlens import SnapshotData

Steps = Sequence[tuple[int | None, str]]  # (step, path) of checkpoints of one training


@settings_command(InspectConfig)
def main(settings: InspectConfig) -> None:
    from clearhead.models.foreign import series, series_name
    from clearhead.parallel.device import check, prepare
    from headlens import page_html, snapshot_bytes

    refuse(check(settings.device) + conflicts(settings))
    device = prepare(settings.device, seed=0, threads=settings.threads)
    if pattern := settings.checkpoints:
        found = inspect("checkpoints", series_name(pattern), series(pattern), settings, device)
    else:
        path = settings.checkpoint
        found = inspect("checkpoint", Path(path).resolve().name, [(None, path)], settings, device)
    data, page, _ = found
    if settings.is_data:
        write_out(settings.out, snapshot_bytes(data))
        return
    write_out(settings.out, page_html([page], f"attention of {page['name']}").encode())
    print(sanitize(f"open {settings.out} in a browser"))


def inspect(
    key: str, name: str, found: Steps, settings: InspectConfig, device: "torch.device"
) -> "tuple[SnapshotData, dict, int]":
    """Returns the last step of a model or of the checkpoints of a training, the data of its page,
    and its window, in tokens. Prints its most significant heads. One model is in memory at a time.

    key: the setting that names it."""
    from clearhead.models.foreign import load_any
    from clearhead.models.head_removal import ablate_heads
    from clearhead.output.console import progress
    from headlens import FRAMES, run_data

    lens, ablate = None, None
    frames, rows, lines = [], [], []
    count = min(len(found), FRAMES)
    shown = {round(n * (len(found) - 1) / max(count - 1, 1)) for n in range(count)}
    with progress("passes without heads" if settings.ablation else "checkpoints") as report:
        for number, (step, path) in enumerate(found):
            trained = load_any(path, key, settings.tokenizer)
            if lens is None:
                lens, dataset = lens_of(trained, settings)
                lens.run_name, window = name, trained.window
                check_prompts(settings, lens)
            model = trained.model.to(device)
            if settings.ablation:
                ablate = functools.partial(
                    ablate_heads,
                    model,
                    dataset=dataset,
                    is_synthetic=is_synthetic(trained, settings),
                    estimate=settings.ablation == "estimate",
                    report=report,
                )
            if step is None:
                step = trained.state.step if trained.state else 0
            try:
                data, lines = lens.inspect(model, step, ablate, rows[-1] if rows else None)
            except (TypeError, ValueError) as error:
                hint, reason = "use a decoder with attention weights", str(error)
                raise CheckpointError(key, path, reason.splitlines()[0], hint) from error
            del trained, model  # before the next one is loaded
            rows.append(data.row)
            if data.row.names.shape != rows[0].names.shape:
                reason = "has other numbers of layers or heads than the first"
                raise CheckpointError(key, path, reason, "give checkpoints of one training")
            if number in shown:
                frames.append(data)
            if settings.checkpoints:
                report(number + 1, len(found))
    of_step = f", step {step}" if step else ""  # of a foreign model it is not known
    print(sanitize(f"{path}{of_step}: clearest heads"))
    print(*(f"  {line}" for line in lines), sep="\n")
    if settings.ablation:
        print("largest increases of the loss:")
        print(*(f"  {line}" for line in lens.most_important_heads()), sep="\n")
    curves = losses(path) if settings.checkpoints else {}
    first = 0 if settings.texts else None  # the prompt with which the page opens
    return frames[-1], run_data(frames, rows, curves, opening_prompt=first), window


def losses(path: str) -> dict[str, list]:
    """Returns the losses of a training until a checkpoint, for the page."""
    from clearhead.checkpoint.listing import run_directory_of
    from clearhead.files import read_rows
    from clearhead.models.foreign import curves_of
    from clearhead.output.charts import CURVES, curves

    run = run_directory_of(Path(path).absolute())
    return curves([*read_rows(run / "metrics.jsonl", *CURVES)]) if run else curves_of(path)


if __name__ == "__main__":
    main()
