"""Writes an interactive page of all attention heads of a model on any text.

    python -m scripts.inspect_attention checkpoint=runs/NAME text="The bell rang twice."
    python -m scripts.inspect_attention checkpoint=DIR compare=runs/NAME out=two.html
    python -m scripts.inspect_attention checkpoint=runs/NAME ablation=exact
    python -m scripts.inspect_attention checkpoint=hub:gpt2 out=gpt2.npz   # for compare_heads
    python -m scripts.inspect_attention checkpoints='out/checkpoint-*' text="The bell rang twice."

`checkpoint` is a run directory, a checkpoint, a Hugging Face directory or hub:NAME. Other models
than GPT-2 need the package transformers. The page is the same as in training, with
the prompts of the run, so heads have the same names as there. `text` replaces all prompts except
the repeated sequence. The command also prints the most significant heads of each name. With
ablation=exact it also measures the loss without each head, on the validation data of the run or on
data.path.

`checkpoints` is a pattern of checkpoints of one training, of transformers' Trainer or of a run, or
hub:NAME@REVISION,REVISION or hub:NAME@PATTERN. The page is a time-lapse of them.
"""

import functools
import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.config.command_line import settings_command, write_out
from clearhead.errors import CheckpointError, refuse, sanitize
from scripts._inspection import (
    InspectConfig,
    check_prompts,
    conflicts,
    is_synthetic,
    lens_of,
    load_data,
    prompts_of,
)

if TYPE_CHECKING:
    import torch

    from clearhead.models.foreign import ForeignModel
    from clearhead.models.pretrained import PretrainedModel
    from clearhead.tokens.windows import WindowDataset
    from headlens import Lens, SnapshotData

    Model = PretrainedModel | ForeignModel


@settings_command(InspectConfig)
def main(settings: InspectConfig) -> None:
    from clearhead.models.foreign import load_any
    from clearhead.parallel.device import check, prepare
    from headlens import run_data, snapshot_bytes

    refuse(check(settings.device) + conflicts(settings))
    device = prepare(settings.device, seed=0, threads=settings.threads)
    if settings.checkpoints:
        write_page(settings.out, [timelapse(settings, device)])
        return
    runs, prompts = [], None
    for key in ("checkpoint", "compare"):
        if path := getattr(settings, key):
            trained = load_any(path, key, settings.tokenizer)
            loaded = load_data(trained, settings)
            prompts = prompts or prompts_of(trained, settings, loaded)
            lens, dataset = lens_of(trained, settings, loaded, prompts)
            lens.run_name = Path(path).resolve().name
            if not runs:
                check_prompts(settings, lens)
            runs.append(inspect(key, path, trained, lens, dataset, settings, device))
    if settings.is_data:
        write_out(settings.out, snapshot_bytes(runs[0]))
    else:
        first = 0 if settings.texts else None  # the prompt with which the page opens
        write_page(settings.out, [run_data([run], opening_prompt=first) for run in runs])


def timelapse(settings: InspectConfig, device: "torch.device") -> dict:
    """Returns the data of a page with all checkpoints of a training. One model is in memory at a
    time. Prints the most significant heads of the last step."""
    from clearhead.models.foreign import load_any, series, series_name
    from clearhead.output.console import progress
    from headlens import FRAMES, run_data

    key, pattern = "checkpoints", settings.checkpoints
    found = series(pattern, key)
    lens, frames, rows, lines = None, [], [], []
    with progress("checkpoints") as report:
        for number, (step, path) in enumerate(found, start=1):
            trained = load_any(path, key, settings.tokenizer)
            if lens is None:
                loaded = load_data(trained, settings)
                prompts = prompts_of(trained, settings, loaded)
                lens, _ = lens_of(trained, settings, loaded, prompts)
                lens.run_name = series_name(pattern)
                check_prompts(settings, lens)
                count = min(len(found), FRAMES)
            shown = [round(n * (len(found) - 1) / max(count - 1, 1)) for n in range(count)]
            before = rows[-1] if rows else None
            model = trained.model.to(device)
            data, lines = inspected(key, path, lens, model, step, before=before)
            del trained, model  # before the next one is loaded
            rows.append(data.row)
            if data.row.names.shape != rows[0].names.shape:
                reason = "has other numbers of layers or heads than the first"
                raise CheckpointError(key, path, reason, "give checkpoints of one training")
            if number - 1 in shown:
                frames.append(data)
            report(number, len(found))
    print_heads(f"{found[-1][1]}, step {found[-1][0]}", lines)
    opening_prompt = 0 if settings.texts else None
    curves = losses(found[-1][1])
    return run_data(frames, rows, curves, opening_prompt=opening_prompt)


def losses(path: str) -> dict[str, list]:
    """Returns the losses of a training until a checkpoint, for the page."""
    from clearhead.checkpoint.listing import run_directory_of
    from clearhead.files import read_rows
    from clearhead.models.foreign import curves_of
    from clearhead.output.charts import CURVES, curves

    run = run_directory_of(Path(path).absolute())
    return curves([*read_rows(run / "metrics.jsonl", *CURVES)]) if run else curves_of(path)


def write_page(out: str, runs: Sequence[dict]) -> None:
    """Writes the page of one or several models. runs: their data."""
    from headlens import page_html

    title = f"attention of {' and '.join(data['name'] for data in runs)}"
    write_out(out, page_html(runs, title).encode())
    print(sanitize(f"open {out} in a browser"))


def inspect(
    key: str,
    path: str,
    trained: "Model",
    lens: "Lens",
    dataset: "WindowDataset | None",
    settings: InspectConfig,
    device: "torch.device",
) -> "SnapshotData":
    """Returns the data of one model. Prints its most significant heads."""
    from clearhead.models.head_removal import ablate_heads
    from clearhead.output.console import progress

    step, ablate = trained.state.step if trained.state else 0, None
    model = trained.model.to(device)
    with progress("passes without heads") if settings.ablation else nullcontext() as report:
        if settings.ablation:
            ablate = functools.partial(
                ablate_heads,
                model,
                dataset=dataset,
                is_synthetic=is_synthetic(trained, settings),
                max_tokens=math.inf if settings.ablation == "exact" else 0,
                report=report,
            )
        data, lines = inspected(key, path, lens, model, step, ablate)
    print_heads(path, lines)
    if settings.ablation:
        print("largest increases of the loss:")
        print("\n".join(f"  {line}" for line in lens.most_important_heads()))
    return data


def inspected(
    key: str, path: str, lens: "Lens", model: Any, step: int, ablate: Any = None, before: Any = None
) -> tuple["SnapshotData", list[str]]:
    """Returns Lens.inspect. Raises CheckpointError for a model without known attention."""
    try:
        return lens.inspect(model, step, ablate, before)
    except (TypeError, ValueError) as error:
        hint = "use a decoder with attention in each layer"
        raise CheckpointError(key, path, str(error).splitlines()[0], hint) from error


def print_heads(what: str, lines: Sequence[str]) -> None:
    print(sanitize(f"{what}: clearest heads"))
    print("\n".join(f"  {line}" for line in lines))


if __name__ == "__main__":
    main()
