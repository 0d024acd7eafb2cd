"""Writes an interactive page of all attention heads of a model on any text.

    python -m scripts.inspect_attention checkpoint=runs/NAME text="The bell rang twice."
    python -m scripts.inspect_attention checkpoint=DIR compare=runs/NAME out=two.html
    python -m scripts.inspect_attention checkpoint=runs/NAME ablation=exact
    python -m scripts.inspect_attention checkpoint=runs/NAME figure=head.pdf layer=1 head=2
    python -m scripts.inspect_attention checkpoint=hub:gpt2 out=gpt2.npz   # for compare_heads
    python -m scripts.inspect_attention checkpoints='out/checkpoint-*' text="The bell rang twice."

`checkpoint` is a run directory, a checkpoint, a Hugging Face directory or hub:NAME. Other models
than GPT-2 need the package transformers. The page is the same as in training (docs/lens.md), with
the prompts of the run, so heads have the same names as there. `text` replaces all prompts except
the repeated sequence. The command also prints the most significant heads of each name. With
ablation=exact it also measures the loss without each head, on the validation data of the run or on
data.path. With figure= and without out=, it writes no page.

`checkpoints` is a pattern of checkpoints of one training, of transformers' Trainer or of a run, or
hub:NAME@REVISION,REVISION or hub:NAME@PATTERN. The page is a time-lapse of them.
"""

import functools
import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator

from clearhead.config.command_line import (
    OutFile,
    ScriptConfig,
    ScriptGroup,
    settings_command,
    write_out,
)
from clearhead.config.schema import (
    Checkpoint,
    Count,
    DataConfig,
    Device,
    LensSettings,
    Paths,
    Positive,
    Text,
    Threads,
    rejected,
)
from clearhead.errors import NO_VALUE, CheckpointError, ClearheadError, Problem, refuse, sanitize
from clearhead.lens.config import LensConfig

if TYPE_CHECKING:
    import torch

    from clearhead.interop.foreign import ForeignModel
    from clearhead.interop.pretrained import PretrainedModel
    from clearhead.lens.snapshot_data import SnapshotData
    from clearhead.lens.snapshots import Lens
    from clearhead.tokens.windows import WindowDataset
    from data import LoadedData

    Model = PretrainedModel | ForeignModel

TEXT_BYTES = 2**20  # of the text on which heads of other models than ours are measured


class AblationText(ScriptGroup):
    """The text on which heads are measured."""

    path: Paths | None = Field(
        None,
        description="text or token files on which heads are measured and removed; null: the "
        "validation data of the run",
    )


class InspectConfig(ScriptConfig):
    """python -m scripts.inspect_attention checkpoint=runs/NAME [text="..."] [KEY=VALUE ...]"""

    lists_in_quotes = ("text",)

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
    out: OutFile | None = Field(
        None,
        pattern=r"(?i)(\.html|\.npz|^)$",
        description="HTML file to write, or .npz for the data alone; null: attention.html, but "
        "none with figure=",
    )
    compare: str = Field("", description="second model, shown next to the first")
    max_tokens: Annotated[Positive, Field(ge=2, le=1024)] | None = Field(
        None,
        description="longer prompts are truncated, also to the training window; null: as in the "
        "run, or 64",
    )
    repeat_length: Annotated[Count, Field(le=127)] | None = Field(
        None,
        description="number of random tokens that an extra prompt repeats; 0: none; null: as in "
        "the run, or 24",
    )
    figure: OutFile = Field(
        "",
        pattern=r"(?i)(\.pdf|\.svg|\.png|^)$",
        description="also draw the heatmaps: a .pdf, .svg or .png file",
    )
    prompt: Positive | None = Field(
        None,
        description="number of the prompt in the figure; null: text=, or the prompt on which the "
        "head (without layer= and head=, the most significant one) is clearest",
    )
    layer: Count | None = Field(None, description="layer of the only head in the figure")
    head: Count | None = Field(None, description="the only head in the figure; null: all heads")
    logit_lens: bool = Field(
        False, description="also record what the output layer predicts from each layer's input"
    )
    ablation: Literal["exact", "estimate"] | None = Field(
        None, description="measure the loss without each head: exact | estimate; null: do not"
    )
    data: AblationText = Field(default_factory=AblationText)
    device: Device = Field("auto", description="auto | cpu | cuda | mps")
    threads: Threads = None

    @field_validator("repeat_length")
    @classmethod
    def _repeats(cls, repeat_length: int | None) -> int | None:
        if repeat_length == 1:
            raise rejected("must be 0, or from 2 to 127", "use 24")
        return repeat_length

    @property
    def texts(self) -> list[str]:
        return [text for text in ([self.text] if isinstance(self.text, str) else self.text) if text]


@settings_command(InspectConfig)
def main(settings: InspectConfig) -> None:
    from clearhead.distributed.device import check, prepare
    from clearhead.interop.foreign import load_any
    from clearhead.lens.page import run_data
    from clearhead.lens.snapshot_data import snapshot_bytes

    refuse(check(settings.device) + conflicts(settings))
    out = settings.out if settings.out or settings.figure else "attention.html"
    device = prepare(settings.device, seed=0, threads=settings.threads)
    if settings.checkpoints:
        write_page(out, [timelapse(settings, device)], settings)
        return
    runs, settled = [], None
    for key in ("checkpoint", "compare"):
        if path := getattr(settings, key):
            trained = load_any(path, key, settings.tokenizer)
            loaded = load_data(trained, settings)
            settled = settled or prompts_of(trained, settings, loaded)
            lens, dataset = lens_of(trained, settings, loaded, settled)
            lens.run_name = Path(path).resolve().name
            if not runs:
                check_prompts(settings, lens)
                check_figure(settings, lens, trained)
            runs.append(inspect(key, path, trained, lens, dataset, settings, device))
            if settings.figure and len(runs) == 1:
                draw(runs[0], settings)
    if out is not None and out.lower().endswith(".npz"):
        write_out(out, snapshot_bytes(runs[0]))
    elif out:
        write_page(out, [(run, run_data([run])) for run in runs], settings)


def conflicts(settings: InspectConfig) -> list[Problem]:
    """Returns the problems of settings that exclude each other."""
    if not settings.checkpoints:
        hint = "set checkpoint= or checkpoints="
        needed = [Problem("checkpoint", NO_VALUE, "is missing", hint)]
        is_data = (settings.out or "").lower().endswith(".npz")
        one = Problem("compare", settings.compare, "an .npz file has one model", "use .html")
        return needed * (not settings.checkpoint) + [one] * (is_data and bool(settings.compare))
    found = []
    for key in ("checkpoint", "compare", "figure", "ablation"):
        if value := getattr(settings, key):
            hint = "use it for a single checkpoint"
            found.append(Problem(key, value, "not possible with checkpoints=", hint))
    if (settings.out or "").lower().endswith(".npz"):
        found.append(Problem("out", settings.out, "an .npz file has one step", "use .html"))
    return found


def timelapse(settings: InspectConfig, device: "torch.device") -> "tuple[SnapshotData, dict]":
    """Returns the last step and the data of a page with all checkpoints of a training. One model is
    in memory at a time. Prints the most significant heads of the last step."""
    from clearhead.interop.foreign import load_any, series, series_name
    from clearhead.lens.history import evenly_spaced
    from clearhead.lens.page import run_data
    from clearhead.reporting.console import progress

    key, pattern = "checkpoints", settings.checkpoints
    found = series(pattern, key)
    lens, frames, rows, lines = None, [], [], []
    with progress("checkpoints") as report:
        for number, (step, path) in enumerate(found, start=1):
            trained = load_any(path, key, settings.tokenizer)
            if lens is None:
                loaded = load_data(trained, settings)
                settled = prompts_of(trained, settings, loaded)
                lens, _ = lens_of(trained, settings, loaded, settled)
                lens.run_name = series_name(pattern)
                check_prompts(settings, lens)
                shown = evenly_spaced(found, lens.config.frames)
            data, lines = inspected(key, path, lens, trained.model.to(device), step)
            del trained  # before the next one is loaded
            rows.append(data.row)
            if data.row.names.shape != rows[0].names.shape:
                reason = "has other numbers of layers or heads than the first"
                raise CheckpointError(key, path, reason, "give checkpoints of one training")
            if (step, path) in shown:
                frames.append(data)
            report(number, len(found))
    print_heads(f"{found[-1][1]}, step {found[-1][0]}", lines)
    return frames[-1], run_data(frames, rows, losses(found[-1][1]))


def losses(path: str) -> dict[str, list]:
    """Returns the losses of a training until a checkpoint, for the page."""
    from clearhead.checkpoint.listing import run_directory_of
    from clearhead.files import read_rows
    from clearhead.interop.foreign import curves_of
    from clearhead.reporting.charts import CURVES, curves

    run = run_directory_of(Path(path).absolute())
    return curves([*read_rows(run / "metrics.jsonl", *CURVES)]) if run else curves_of(path)


def write_page(
    out: str, runs: "Sequence[tuple[SnapshotData, dict]]", settings: InspectConfig
) -> None:
    """Writes the page of one or several models. runs: the last step of each, and its data."""
    from clearhead.lens.heatmap import grid_url
    from clearhead.lens.page import page

    datas = [data for _, data in runs]
    if settings.texts:
        datas[0]["opening_prompt"] = 0
    title = f"attention of {' and '.join(data['name'] for data in datas)}"
    write_out(out, page(datas, title, grid_url(runs[0][0].codes[0])).encode())
    print(sanitize(f"open {out} in a browser"))


def prompts_of(
    trained: "Model", settings: InspectConfig, loaded: "LoadedData | None"
) -> tuple[LensConfig, Sequence[int] | None, Any]:
    """Returns the prompts: of text=, of the run, or passages of the data; the tokens of which the
    repeated sequence consists, the frequent ones of the data; and their tokenizer."""
    stored = dict(trained.state.settings.get("lens", {})) if trained.state else {}
    keys = ("prompts", "max_tokens", "repeat_length")
    known = {key: stored[key] for key in keys if key in stored}
    config = LensConfig(**LensSettings.with_defaults(**known).model_dump())
    config.prompts = settings.texts or config.prompts
    config.logit_lens = settings.logit_lens
    for key in keys[1:]:
        if (value := getattr(settings, key)) is not None:
            setattr(config, key, value)
    if loaded and config.prompts is None:
        from clearhead.run.prompts import choose_prompts

        most = min(config.max_tokens, trained.window)
        chosen = choose_prompts(loaded.val or loaded.train, trained.tokenizer, most)
        config.prompts = chosen["lens.prompts"]
    vocabulary = all_ids(trained)
    if loaded and trained.state:
        vocabulary = loaded.train.common_tokens().tolist()
    return config, vocabulary, trained.tokenizer


def all_ids(trained: "Model") -> Sequence[int] | None:
    """Returns all token ids; None lets the lens choose them."""
    return range(trained.tokenizer.n_vocab) if hasattr(trained.tokenizer, "n_vocab") else None


def lens_of(
    trained: "Model",
    settings: InspectConfig,
    loaded: "LoadedData | None",
    settled: tuple[LensConfig, Sequence[int] | None, Any],
) -> tuple["Lens", "WindowDataset | None"]:
    """Returns the lens of a model, and the windows on which heads are removed."""
    from clearhead.lens.snapshots import Lens
    from clearhead.lens.text import MAX_TOKENS, MAX_WINDOWS
    from clearhead.run.lens_runner import some_windows, text_name

    config, vocabulary, tokenizer = settled
    if getattr(trained.tokenizer, "name", None) != getattr(tokenizer, "name", None):
        vocabulary = all_ids(trained)
    dataset, text = loaded and (loaded.val or loaded.train), None
    if dataset:
        text = some_windows(dataset, MAX_WINDOWS, MAX_TOKENS)
    elif settings.data.path:
        text = text_of(settings.data.path)
    try:
        lens = Lens(
            trained.tokenizer,
            config,
            context_length=trained.window,
            text=text,
            text_name=text_name(is_synthetic(trained, settings)),
            vocabulary=vocabulary,
        )
    except ValueError as error:  # the text is too short
        refuse([Problem("data.path", settings.data.path, str(error), "give a longer text")])
    return lens, dataset


def is_synthetic(trained: "Model", settings: InspectConfig) -> bool:
    """Returns whether heads are measured on generated sequences instead of a text."""
    if settings.data.path or not trained.state:
        return False
    return bool(trained.state.settings["data"].get("synthetic"))


def text_of(path: str | list[str]) -> str:
    """Returns the beginning of the texts of data.path. Raises DataError."""
    from clearhead.tokens.paths import find_files
    from clearhead.tokens.readers import documents, split_file

    parts = (part for file in find_files(path) for part in split_file(file, TEXT_BYTES))
    read = bytearray()
    texts = (itertools.chain(text, [b"\n"]) for part in parts for text in documents(part))
    for block in itertools.chain.from_iterable(texts):
        read += block
        if len(read) >= TEXT_BYTES:
            break
    return bytes(read[:TEXT_BYTES]).decode("utf-8", "ignore")


def check_prompts(settings: InspectConfig, lens: "Lens") -> None:
    """Raises ConfigError without a prompt. Prints which texts are truncated."""
    if not lens.prompts:
        hint = "give a text, or no repeat_length"
        refuse([Problem("text", "", "no prompt is left", hint)])
    for prompt in lens.prompts[: len(settings.texts)]:
        if prompt.truncated:
            shown = f"only its first {len(prompt.token_ids)} tokens are used"
            print(f"text: {shown} (max_tokens=, training window)", file=sys.stderr)


def load_data(trained: "Model", settings: InspectConfig) -> "LoadedData | None":
    """Returns the data on which heads are measured and removed: of data.path, or of the run. None
    for a model of transformers, see text_of. Raises DataError or ConfigError."""
    from clearhead.interop.pretrained import PretrainedModel
    from data import load_datasets

    if not isinstance(trained, PretrainedModel):
        if settings.ablation:
            reason = "heads of this architecture cannot be removed"
            refuse([Problem("ablation", settings.ablation, reason, "use a GPT-2, or no ablation")])
        return None
    changes = {}
    if path := settings.data.path:
        changes = {"path": path, "synthetic": None, "val_path": None, "val_fraction": 0.0}
        changes["weights"] = None
    elif not trained.state:
        if settings.ablation:
            reason = "a model without a run needs a text for ablation"
            refuse([Problem("data.path", None, reason, "set data.path=FILE")])
        return None
    try:
        return load_datasets(data_config(trained, **changes), trained.tokenizer)
    except ClearheadError:
        if settings.data.path or settings.ablation:
            raise
        print("heads are measured on the prompts, as the data of the run cannot be read")
        return None


def check_figure(settings: InspectConfig, lens: "Lens", trained: "Model") -> None:
    """Raises ConfigError for a prompt or a head that does not exist."""
    layers, heads = trained.sizes
    limits = {"prompt": len(lens.prompts) + 1, "layer": layers, "head": heads}
    problems = []
    for key, limit in limits.items():
        value = getattr(settings, key)
        if value is not None and value >= limit:
            problems.append(Problem(key, value, f"the last is {limit - 1}", "give another number"))
    if (settings.layer is None) != (settings.head is None):
        key = "layer" if settings.layer is None else "head"
        problems.append(Problem(key, None, "one head has a layer and a head", "give both numbers"))
    refuse(problems)


def draw(data: "SnapshotData", settings: InspectConfig) -> None:
    """Writes the figure of all heads or of one head."""
    from clearhead.lens.figure import draw_figure
    from clearhead.lens.snapshots import clearest_prompt

    place = None if settings.head is None else (settings.layer, settings.head)
    prompt = settings.prompt or (1 if settings.texts else clearest_prompt(data, place) + 1)
    kind = Path(settings.figure).suffix[1:].lower()
    write_out(settings.figure, draw_figure(data, kind, prompt - 1, place), "figure")
    print(sanitize(f"wrote {settings.figure}"))


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
    from clearhead.inference.ablation import ablate_heads
    from clearhead.lens.snapshots import most_important_heads
    from clearhead.reporting.console import progress

    model = trained.model.to(device)
    step = trained.state.step if trained.state else 0
    ablate = None
    if settings.ablation:
        ablate = functools.partial(
            ablate_heads,
            model,
            dataset=dataset,
            is_synthetic=is_synthetic(trained, settings),
            max_tokens=math.inf if settings.ablation == "exact" else 0,
        )
    with progress("passes without heads") as report:
        ablate = ablate and functools.partial(ablate, report=report)
        data, lines = inspected(key, path, lens, model, step, ablate)
    print_heads(path, lines)
    if settings.ablation:
        print("largest increases of the loss:")
        print("\n".join(f"  without {line}" for line in most_important_heads(data)))
    return data


def inspected(
    key: str, path: str, lens: "Lens", model: Any, step: int, ablate: Any = None
) -> tuple["SnapshotData", list[str]]:
    """Returns Lens.inspect. Raises CheckpointError for a model without known attention."""
    try:
        return lens.inspect(model, step, ablate)
    except (TypeError, ValueError) as error:
        hint = "use a decoder with attention in each layer"
        raise CheckpointError(key, path, str(error).splitlines()[0], hint) from error


def print_heads(what: str, lines: Sequence[str]) -> None:
    print(sanitize(f"{what}: most significant heads (in parentheses: uniform attention)"))
    print("\n".join(f"  {line}" for line in lines))


def data_config(trained: "PretrainedModel", **changes: object) -> DataConfig:
    """Returns the data settings of a run, or default settings. Raises ConfigError."""
    values = dict(trained.state.settings["data"]) if trained.state else {}
    values |= changes | {"max_length": trained.window}
    return DataConfig.with_defaults(**values)


if __name__ == "__main__":
    main()
