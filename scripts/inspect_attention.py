"""Writes an interactive page of all attention heads of a model on any text.

    python -m scripts.inspect_attention checkpoint=runs/NAME text="The bell rang twice."
    python -m scripts.inspect_attention checkpoint=DIR compare=runs/NAME out=two.html
    python -m scripts.inspect_attention checkpoint=runs/NAME ablation=exact
    python -m scripts.inspect_attention checkpoint=runs/NAME figure=head.pdf layer=1 head=2
    python -m scripts.inspect_attention checkpoint=hub:gpt2 out=gpt2.npz   # for compare_heads

`checkpoint` is a run directory, a checkpoint, a Hugging Face GPT-2 directory or hub:NAME. The page
is the same as in training (docs/lens.md), with the prompts of the run, so heads have the same names
as there. `text` replaces all prompts except the repeated sequence. The command also prints the most
significant heads of each name. With ablation=exact it also measures the loss without each head, on
the validation data of the run or on data.path. With figure= and without out=, it writes no page.
"""

import functools
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

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
from clearhead.errors import ClearheadError, Problem, refuse, sanitize
from clearhead.lens.config import LensConfig

if TYPE_CHECKING:
    import torch

    from clearhead.interop.pretrained import PretrainedModel
    from clearhead.lens.snapshot_data import SnapshotData
    from clearhead.lens.snapshots import Lens
    from clearhead.tokens.tokenizers import Tokenizer
    from clearhead.tokens.windows import WindowDataset


class AblationText(ScriptGroup):
    """The text for ablation."""

    path: Paths | None = Field(
        None, description="text or token files for ablation; null: the validation data of the run"
    )


class InspectConfig(ScriptConfig):
    """python -m scripts.inspect_attention checkpoint=runs/NAME [text="..."] [KEY=VALUE ...]"""

    lists_in_quotes = ("text",)

    checkpoint: Checkpoint
    text: Text | list[Text] = Field(
        "",
        description='prompt; several: \'["one","two"]\'; empty: the prompts of the run, or three '
        "sentences",
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
    from clearhead.interop.pretrained import load_pretrained
    from clearhead.lens.heatmap import grid_url
    from clearhead.lens.page import page, run_data
    from clearhead.lens.snapshot_data import snapshot_bytes
    from clearhead.run.lens_runner import lens_of

    refuse(check(settings.device))
    out = settings.out if settings.out or settings.figure else "attention.html"
    is_data = out is not None and out.lower().endswith(".npz")
    if is_data and settings.compare:
        refuse([Problem("compare", settings.compare, "an .npz file has one model", "use .html")])
    device = prepare(settings.device, seed=0, threads=settings.threads)
    runs, settled = [], None
    for key in ("checkpoint", "compare"):
        if path := getattr(settings, key):
            trained = load_pretrained(path, key)
            settled = settled or prompts_of(trained, settings)
            config, vocabulary, tokenizer = settled
            if trained.tokenizer.name != tokenizer.name:
                vocabulary = range(trained.tokenizer.n_vocab)
            lens = lens_of(config, trained.tokenizer, trained.window, vocabulary)
            if not lens.prompts:
                hint = "give a text, or no repeat_length"
                refuse([Problem("text", "", "no prompt is left", hint)])
            for prompt in lens.prompts[: len(settings.texts)] if not runs else ():
                if prompt.truncated:
                    shown = f"only its first {len(prompt.token_ids)} tokens are used"
                    print(f"text: {shown} (max_tokens=, training window)", file=sys.stderr)
            if not runs:
                check_figure(settings, lens, trained)
            runs.append(inspect(path, trained, lens, settings, device))
            if settings.figure and len(runs) == 1:
                draw(runs[0], settings)
    if is_data:
        write_out(out, snapshot_bytes(runs[0]))
    elif out:
        datas = [run_data([run]) for run in runs]
        if settings.texts:
            datas[0]["opening_prompt"] = 0
        title = f"attention of {' and '.join(run.run for run in runs)}"
        write_out(out, page(datas, title, grid_url(runs[0].codes[0])).encode())
        print(sanitize(f"open {out} in a browser"))


def prompts_of(
    trained: "PretrainedModel", settings: InspectConfig
) -> tuple[LensConfig, Sequence[int], "Tokenizer"]:
    """Returns the prompts, those of the run unless settings replace them; the tokens of which the
    repeated sequence consists; and their tokenizer."""
    from data import load_datasets

    stored = dict(trained.state.settings.get("lens", {})) if trained.state else {}
    keys = ("prompts", "max_tokens", "repeat_length")
    known = {key: stored[key] for key in keys if key in stored}
    config = LensConfig(**LensSettings.with_defaults(**known).model_dump())
    config.prompts = settings.texts or config.prompts
    for key in keys[1:]:
        if (value := getattr(settings, key)) is not None:
            setattr(config, key, value)
    vocabulary: Sequence[int] = range(trained.tokenizer.n_vocab)
    if trained.state and config.repeat_length:
        try:
            loaded = load_datasets(data_config(trained), trained.tokenizer)
            vocabulary = loaded.train.common_tokens().tolist()
        except ClearheadError:
            print("repeated sequence: of all tokens, as the data of the run cannot be read")
    return config, vocabulary, trained.tokenizer


def check_figure(settings: InspectConfig, lens: "Lens", trained: "PretrainedModel") -> None:
    """Raises ConfigError for a prompt or a head that does not exist."""
    config = trained.model.config
    limits = {"prompt": len(lens.prompts) + 1, "layer": config.num_layers, "head": config.num_heads}
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
    path: str,
    trained: "PretrainedModel",
    lens: "Lens",
    settings: InspectConfig,
    device: "torch.device",
) -> "SnapshotData":
    """Returns the data of one model. Prints its most significant heads."""
    import torch

    from clearhead.inference.ablation import ablate_heads
    from clearhead.lens.snapshots import most_important_heads
    from clearhead.reporting.console import progress

    model, state = trained.model.to(device), trained.state
    is_synthetic = bool(state and state.settings["data"].get("synthetic"))

    def capture_attention(token_ids: list[int], capture: Callable) -> torch.Tensor:
        input_ids = torch.tensor([token_ids], device=device)
        return model.capture_attention(input_ids, capture, settings.logit_lens)

    step = state.step if state else 0
    ablate = None
    if settings.ablation:
        ablate = functools.partial(
            ablate_heads,
            model,
            dataset=ablation_data(trained, settings),
            is_synthetic=is_synthetic and not settings.data.path,
            max_tokens=math.inf if settings.ablation == "exact" else 0,
        )
    with progress("passes without heads") as report:
        ablate = ablate and functools.partial(ablate, report=report)
        data, lines = lens.inspect(capture_attention, step, Path(path).resolve().name, ablate)
    print(sanitize(f"{path}: most significant heads (in parentheses: uniform attention)"))
    print("\n".join(f"  {line}" for line in lines))
    if settings.ablation:
        print("largest increases of the loss:")
        print("\n".join(f"  without {line}" for line in most_important_heads(data)))
    return data


def ablation_data(trained: "PretrainedModel", settings: InspectConfig) -> "WindowDataset":
    """Returns the windows on which heads are removed. Raises DataError or ConfigError."""
    from data import load_datasets

    changes = {}
    if path := settings.data.path:
        changes = {"path": path, "synthetic": None, "val_path": None, "val_fraction": 0.0}
        changes["weights"] = None
    elif not trained.state:
        reason = "a model without a run needs a text for ablation"
        refuse([Problem("data.path", None, reason, "set data.path=FILE")])
    loaded = load_datasets(data_config(trained, **changes), trained.tokenizer)
    return loaded.val or loaded.train


def data_config(trained: "PretrainedModel", **changes: object) -> DataConfig:
    """Returns the data settings of a run, or default settings. Raises ConfigError."""
    values = dict(trained.state.settings["data"]) if trained.state else {}
    values |= changes | {"max_length": trained.window}
    return DataConfig.with_defaults(**values)


if __name__ == "__main__":
    main()
