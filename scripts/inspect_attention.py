"""Writes an interactive page of all attention heads of a model on any text.

    python -m scripts.inspect_attention checkpoint=runs/NAME text="The bell rang twice."
    python -m scripts.inspect_attention checkpoint=DIR compare=runs/NAME out=two.html
    python -m scripts.inspect_attention checkpoint=runs/NAME ablation=exact
    python -m scripts.inspect_attention checkpoint=runs/NAME figure=head.pdf layer=1 head=2

`checkpoint` is a run directory, a checkpoint, a Hugging Face GPT-2 directory or hub:NAME. The page
is the same as in training (docs/lens.md). The command also prints the most significant heads of
each name. The repeated sequence uses the complete vocabulary; in training it uses only frequent
tokens. With ablation=exact it also measures the loss without each head, on the validation data of
the run or on data.path.
"""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator

from errors import Problem, refuse, sanitize
from lens.config import LensConfig
from training.config.command_line import (
    OutFile,
    ScriptConfig,
    ScriptGroup,
    settings_command,
    write_out,
)
from training.config.schema import (
    Checkpoint,
    Count,
    DataConfig,
    Device,
    Paths,
    Positive,
    rejected,
)

if TYPE_CHECKING:
    import torch

    from interop.pretrained import PretrainedModel
    from tokens.windows import WindowDataset


class TextConfig(ScriptGroup):
    """The text for ablation."""

    path: Paths | None = Field(
        None, description="text or token files for ablation; null: the validation data of the run"
    )


class InspectConfig(ScriptConfig):
    """python -m scripts.inspect_attention checkpoint=runs/NAME [text="..."] [KEY=VALUE ...]"""

    checkpoint: Checkpoint
    text: str = Field("", description="prompt; empty: three default prompts")
    out: OutFile = Field("attention.html", description="HTML file to write")
    compare: str = Field("", description="second model, shown next to the first")
    max_tokens: Annotated[Positive, Field(ge=2, le=1024)] = Field(
        64, description="longer prompts are truncated"
    )
    repeat_length: Annotated[Count, Field(le=127)] = Field(
        24, description="number of random tokens that an extra prompt repeats; 0: none"
    )
    figure: OutFile = Field(
        "",
        pattern=r"(?i)(\.pdf|\.svg|\.png|^)$",
        description="also draw the heatmaps: a .pdf, .svg or .png file",
    )
    prompt: Positive = Field(1, description="number of the prompt in the figure")
    layer: Count | None = Field(None, description="layer of the only head in the figure")
    head: Count | None = Field(None, description="the only head in the figure; null: all heads")
    logit_lens: bool = Field(
        False, description="also record what the output layer predicts from each layer's input"
    )
    ablation: Literal["exact", "estimate"] | None = Field(
        None, description="measure the loss without each head: exact | estimate; null: do not"
    )
    data: TextConfig = Field(default_factory=TextConfig)
    device: Device = Field("auto", description="auto | cpu | cuda | mps")

    @field_validator("repeat_length")
    @classmethod
    def _repeats(cls, repeat_length: int) -> int:
        if repeat_length == 1:
            raise rejected("must be 0, or from 2 to 127", "use 24")
        return repeat_length


@settings_command(InspectConfig)
def main(settings: InspectConfig) -> None:
    from lens.page import page
    from training.distributed.device import check, prepare

    refuse(check(settings.device))
    device = prepare(settings.device, seed=0)
    given = {"checkpoint": settings.checkpoint, "compare": settings.compare}
    runs = [inspect(path, key, settings, device) for key, path in given.items() if path]
    names = " and ".join(run["name"] for run in runs)
    if settings.figure:
        draw(runs[0], settings)
    write_out(settings.out, page(runs, title=f"attention of {names}").encode())
    print(sanitize(f"open {settings.out} in a browser"))


def draw(run: dict, settings: InspectConfig) -> None:
    """Writes the figure of all heads or of one head."""
    from lens.figure import draw_figure

    limits = {"prompt": len(run["prompts"]) + 1, "layer": run["layers"], "head": run["heads"]}
    problems = []
    for key, limit in limits.items():
        value = getattr(settings, key)
        if value is not None and value >= limit:
            problems.append(Problem(key, value, f"the last is {limit - 1}", "give another number"))
    if (settings.layer is None) != (settings.head is None):
        key = "layer" if settings.layer is None else "head"
        problems.append(Problem(key, None, "one head has a layer and a head", "give both numbers"))
    refuse(problems)
    place = None if settings.head is None else (settings.layer, settings.head)
    kind = Path(settings.figure).suffix[1:].lower()
    content = draw_figure(run, kind, settings.prompt - 1, place)
    write_out(settings.figure, content, "figure")
    print(sanitize(f"wrote {settings.figure}"))


def inspect(path: str, key: str, settings: InspectConfig, device: "torch.device") -> dict:
    """Returns the data of one model for the page. Prints its most significant heads."""
    import torch

    from inference.ablation import ablate_heads
    from interop.pretrained import load_pretrained
    from lens.snapshots import Lens
    from tokens.synthetic import SYMBOLS

    trained = load_pretrained(path, key)
    model, tokenizer, state = trained.model.to(device), trained.tokenizer, trained.state
    is_synthetic = bool(state and state.settings["data"].get("synthetic"))
    config = LensConfig(max_tokens=settings.max_tokens, repeat_length=settings.repeat_length)
    if settings.text:
        config.prompts = [settings.text]
    lens = Lens(
        config,
        encode=tokenizer.encode_ordinary,
        token_bytes=tokenizer.decode_single_token_bytes,
        context_length=trained.window,
        vocabulary=SYMBOLS.tolist() if is_synthetic else range(tokenizer.n_vocab),
        bos=tokenizer.eot_token,
    )

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
    data, lines = lens.page_data(capture_attention, step, Path(path).resolve().name, ablate)
    print(sanitize(f"{path}: most significant heads (in parentheses: uniform attention)"))
    print("\n".join(f"  {line}" for line in lines))
    for line in lens.most_important_heads():
        print(f"without {line}")
    return data


def ablation_data(trained: "PretrainedModel", settings: InspectConfig) -> "WindowDataset":
    """Returns the windows on which heads are removed. Raises DataError or ConfigError."""
    from data import load_datasets

    values = dict(trained.state.settings["data"]) if trained.state else {}
    if path := settings.data.path:
        values |= {"path": path, "synthetic": None, "val_path": None, "val_fraction": 0.0}
        values["weights"] = None
    elif not trained.state:
        reason = "a model without a run needs a text for ablation"
        refuse([Problem("data.path", None, reason, "set data.path=FILE")])
    values |= {"tokenizer": trained.tokenizer_name, "max_length": trained.window}
    loaded = load_datasets(DataConfig.with_defaults(**values))
    return loaded.val or loaded.train


if __name__ == "__main__":
    main()
