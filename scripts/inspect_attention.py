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
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from clearhead.config.command_line import OutFile, ScriptConfig, settings_command, write_out
from clearhead.config.schema import (
    Checkpoint,
    DataConfig,
    Device,
    Encoding,
    LensSettings,
    MaxTokens,
    Names,
    RepeatLength,
    Settings,
    Text,
    Threads,
)
from clearhead.config.stored import data_settings
from clearhead.errors import (
    NO_VALUE,
    CheckpointError,
    ClearheadError,
    Problem,
    refuse,
    sanitize,
)
from headlens import LensConfig

if TYPE_CHECKING:
    import torch

    from clearhead.models.foreign import ForeignModel
    from clearhead.models.pretrained import PretrainedModel
    from clearhead.tokens.windows import WindowDataset
    from data import LoadedData
    from headlens import Lens, SnapshotData

    Model = PretrainedModel | ForeignModel

Steps = Sequence[tuple[int | None, str]]  # (step, path) of checkpoints of one training
TEXT_BYTES = 2**20  # of the text on which heads of other models than ours are measured


class MeasuredText(Settings):
    """The text on which heads are measured."""

    path: Names | None = Field(
        None,
        description="text or token files on which heads are measured and removed; null: the "
        "validation data of the run",
    )
    encoding: Encoding | None = Field(
        None, description="encoding of text files, such as cp1252; null: as in the run"
    )


class InspectConfig(ScriptConfig):
    """python -m scripts.inspect_attention checkpoint=runs/NAME [text="..."] [KEY=VALUE ...]"""

    free_text = ("text",)

    checkpoint: Checkpoint | None = Field(
        None, description="run (last checkpoint), checkpoint, Hugging Face directory or hub:NAME"
    )
    checkpoints: str = Field(
        "",
        description="checkpoints of one training, for a time-lapse: a pattern such as "
        "'out/checkpoint-*', hub:NAME@REVISION,REVISION or hub:NAME@PATTERN",
    )
    tokenizer: str = Field(
        "",
        description="directory or hub:NAME of the tokenizer, for a model of transformers without "
        "one",
    )
    text: Text | list[Text] = Field(
        "",
        description='prompt; several: \'["one","two"]\'; empty: the prompts of the run, or '
        "passages of data.path, or three sentences",
    )
    out: OutFile = Field(
        "attention.html",
        pattern=r"(?i)(\.html|\.npz)$",
        description="HTML file to write, or .npz for the data alone",
    )
    max_tokens: MaxTokens | None = Field(
        None,
        description="longer prompts are truncated, also to the training window; null: as in the "
        "run, or 64",
    )
    repeat_length: RepeatLength | None = Field(
        None,
        description="number of random tokens that an extra prompt repeats; 0: none; null: as in "
        "the run, or 24",
    )
    ablation: Literal["exact", "estimate"] | None = Field(
        None,
        description="measure the loss without each head; exact: with a forward pass for each; "
        "estimate: to first order, with two forward passes and one backward pass; null: do not",
    )
    data: MeasuredText = Field(default_factory=MeasuredText)
    device: Device = Field("auto", description="auto | cpu | cuda | mps")
    threads: Threads = None

    @property
    def texts(self) -> list[str]:
        return [text for text in ([self.text] if isinstance(self.text, str) else self.text) if text]

    @property
    def is_data(self) -> bool:
        return self.out.lower().endswith(".npz")


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
                hint = "give a text, or no repeat_length"
                refuse([("text", "", "no prompt is left", hint)] * (not lens.prompts))
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


def conflicts(settings: InspectConfig) -> list[Problem]:
    """Returns the problems of settings that exclude each other."""
    if not settings.checkpoints:
        hint = "set checkpoint= or checkpoints="
        needed = [Problem("checkpoint", NO_VALUE, "is missing", hint)]
        return needed * (not settings.checkpoint)
    reason, hint = "not possible with checkpoints=", "use it for a single checkpoint"
    keys = ("checkpoint", "ablation")
    given = {key: value for key in keys if (value := getattr(settings, key))}
    found = [Problem(key, value, reason, hint) for key, value in given.items()]
    one = Problem("out", settings.out, "an .npz file has one step", "use .html")
    return found + [one] * settings.is_data


def load_data(trained: "Model", settings: InspectConfig) -> "LoadedData | None":
    """Returns the data on which heads are measured and removed: of data.path, or of the run. None
    for a model of transformers, see text_of. Raises DataError or ConfigError."""
    from clearhead.models.pretrained import PretrainedModel
    from data import load_datasets

    if settings.ablation and not (trained.state or settings.data.path):
        reason = "a model without a run needs a text for ablation"
        refuse([Problem("data.path", None, reason, "set data.path=FILE")])
    if not isinstance(trained, PretrainedModel):
        return None
    if not (trained.state or settings.data.path):
        return None
    stored = data_settings(trained.state.settings) if trained.state else {}
    values = {key: value for key, value in stored.items() if key in DataConfig.model_fields}
    values["max_length"] = trained.window
    if path := settings.data.path:
        values |= {"path": path, "synthetic": None, "val_path": None, "val_fraction": 0.0}
        values |= {"weights": None}
        values |= {"encoding": settings.data.encoding} if settings.data.encoding else {}
    try:
        return load_datasets(DataConfig.with_defaults(**values), trained.tokenizer)
    except ClearheadError:
        if settings.data.path or settings.ablation:
            raise
        print("heads are measured on the prompts, as the data of the run cannot be read")
        return None


def text_of(path: str | list[str], encoding: str) -> str:
    """Returns the beginning of the texts of data.path. Raises DataError."""
    from clearhead.tokens.readers import documents, split_file
    from clearhead.tokens.sources import find_files

    files = find_files(path)
    parts = (part for file in files for part in split_file(file, TEXT_BYTES, encoding=encoding))
    read = bytearray()
    texts = (itertools.chain(text, [b"\n"]) for part in parts for text in documents(part))
    for block in itertools.chain.from_iterable(texts):
        read += block
        if len(read) >= TEXT_BYTES:
            break
    return bytes(read[:TEXT_BYTES]).decode("utf-8", "ignore")


def prompts_of(
    trained: "Model", settings: InspectConfig, loaded: "LoadedData | None"
) -> LensConfig:
    """Returns the settings of the lens, with the prompts of text=, of the run, or passages of the
    data."""
    stored = dict(trained.state.settings.get("lens", {})) if trained.state else {}
    keys = ("prompts", "max_tokens", "repeat_length")
    known = {key: stored[key] for key in keys if key in stored}
    values = LensSettings.with_defaults(**known).model_dump()
    prompts = settings.texts or values.pop("prompts")  # passages of a text may look like paths
    config = LensConfig(**values | {"prompts": None})
    config.prompts = prompts
    for key in keys[1:]:
        if (value := getattr(settings, key)) is not None:
            setattr(config, key, value)
    if loaded and config.prompts is None:
        from clearhead.run.lens_runner import choose_prompts

        most = min(config.max_tokens, trained.window)
        chosen = choose_prompts(loaded.val or loaded.train, trained.tokenizer, most)
        config.prompts = chosen["lens.prompts"]
    return config


def lens_of(
    trained: "Model", settings: InspectConfig
) -> tuple["Lens", "WindowDataset | torch.Tensor | None"]:
    """Returns the lens of a model, and the windows on which heads are removed. The tokens of the
    repeated sequence are frequent ones of the data of the run, or any that the lens chooses."""
    from clearhead.run.lens_runner import MAX_TOKENS, MAX_WINDOWS, some_windows, text_name
    from headlens import Lens

    loaded = load_data(trained, settings)
    count = getattr(trained.tokenizer, "n_vocab", None)
    vocabulary = None if count is None else range(count)
    if loaded and trained.state:
        vocabulary = loaded.train.common_tokens().tolist()
    dataset, text, name = loaded and (loaded.val or loaded.train), None, "the text"
    if loaded:
        text = some_windows(dataset, MAX_WINDOWS, MAX_TOKENS)
        name = text_name(is_synthetic(trained, settings), bool(loaded.val))
    elif settings.data.path:
        text = text_of(settings.data.path, settings.data.encoding or "utf-8")
    try:
        lens = Lens(
            trained.tokenizer,
            prompts_of(trained, settings, loaded),
            context_length=trained.window,
            text=text,
            text_name=name,
            vocabulary=vocabulary,
        )
    except ValueError as error:  # the text is too short
        refuse([Problem("data.path", settings.data.path, str(error), "give a longer text")])
    return lens, dataset or (lens.text and lens.text.token_ids)


def is_synthetic(trained: "Model", settings: InspectConfig) -> bool:
    """Returns whether heads are measured on generated sequences instead of a text."""
    if settings.data.path or not trained.state:
        return False
    return bool(trained.state.settings["data"].get("synthetic"))


if __name__ == "__main__":
    main()
