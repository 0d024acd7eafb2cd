"""Every attention head of a trained model on any text, as one interactive page.

    python -m scripts.inspect_attention checkpoint=runs/NAME text="The bell rang twice."
    python -m scripts.inspect_attention checkpoint=DIR compare=runs/NAME out=two.html

`checkpoint` is a run, one of its checkpoints, a Hugging Face GPT-2 directory or hub:NAME. The
page is the one that training makes (docs/lens.md); the strongest heads of each kind are printed.
The repeated sequence is drawn from the whole vocabulary; in training, from frequent tokens.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, field_validator

from errors import refuse, visible
from training.config.command_line import ScriptConfig, settings_command
from training.config.schema import Count, Device, Name, Positive, rejected

if TYPE_CHECKING:
    from lens import LensConfig


class InspectConfig(ScriptConfig):
    """python -m scripts.inspect_attention checkpoint=runs/NAME [text="..."] [KEY=VALUE ...]"""

    checkpoint: Name = Field(
        description="a run (its last checkpoint), a checkpoint, a directory, hub:NAME"
    )
    text: str = Field("", description="the prompt to show; empty: three sentences")
    out: str = Field("attention.html", description="the page to write")
    compare: str = Field("", description="a second model, side by side")
    max_tokens: Annotated[Positive, Field(ge=2, le=1024)] = Field(
        64, description="longer texts are truncated, and marked"
    )
    repeated: Annotated[Count, Field(le=127)] = Field(
        24, description="length of a random token sequence shown twice; 0: none"
    )
    device: Device = Field("auto", description="auto | cpu | cuda | mps")

    @field_validator("text")
    @classmethod
    def _not_blank(cls, text: str) -> str:
        if text and not text.strip():
            raise rejected("is an empty prompt", "give it some words")
        return text

    @field_validator("out")
    @classmethod
    def _is_a_page(cls, out: str) -> str:
        if not out.endswith(".html"):
            raise rejected("must be a page", "use a name that ends in .html")
        above = next((p for p in Path(out).parents if p.exists()), Path("."))
        if Path(out).is_dir() or not above.is_dir():
            raise rejected("cannot be written there", "give the name of a file")
        return out

    @field_validator("repeated")
    @classmethod
    def _repeats(cls, repeated: int) -> int:
        if repeated == 1:
            raise rejected("must be 0, or from 2 to 127", "use 24")
        return repeated


def lens_config(text: str, max_tokens: int, repeated: int) -> "LensConfig":
    """The settings of the lens: its own prompts when there is no text."""
    from lens import LensConfig

    prompts = {"prompts": [text]} if text else {}
    return LensConfig(max_tokens=max_tokens, repeated=repeated, **prompts)


@settings_command(InspectConfig)
def main(settings: InspectConfig) -> None:
    from lens.page import page
    from training.distributed.device import check, prepare

    refuse(check(settings.device))
    device = prepare(settings.device, seed=0)
    runs = []
    for key in ("checkpoint", "compare"):
        if path := getattr(settings, key):
            runs.append(inspect(path, key, settings, device))
    out = Path(settings.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    names = " and ".join(run["name"] for run in runs)
    out.write_text(page(runs, title=f"attention of {names}"), encoding="utf-8")
    print(visible(f"open {out} in a browser ({out.stat().st_size / 1e6:.1f} MB)"))


def inspect(path: str, key: str, settings: InspectConfig, device) -> dict:
    """One model's data for the page; prints its strongest heads of each kind."""
    import torch

    from interop.pretrained import load_pretrained
    from lens import Lens
    from lens.history import strongest
    from lens.page import frame_data, run_data
    from lens.probe import probe, uniform_values
    from lens.statistics import STATISTICS
    from tokens.synthetic import SYMBOLS

    reader = load_pretrained(path, key)
    model, tokenizer, state = reader.model.to(device), reader.tokenizer, reader.state
    is_synthetic = bool(state and state.settings["data"].get("synthetic"))
    lens = Lens(
        lens_config(settings.text, settings.max_tokens, settings.repeated),
        encode=tokenizer.encode_ordinary,
        token_bytes=tokenizer.decode_single_token_bytes,
        context_length=reader.window,
        vocabulary=SYMBOLS if is_synthetic else range(tokenizer.n_vocab),
        bos=tokenizer.eot_token,
    )

    def capture_attention(token_ids, capture) -> None:
        model.capture_attention(torch.tensor([token_ids], device=device), capture)

    frame = probe(capture_attention, lens.prompts, step=state.step if state else 0)
    print(visible(f"{path}: strongest heads (in brackets: uniform attention)"))
    uniform = uniform_values(lens.prompts)
    for key, heads in strongest(frame.row).items():
        kind = f"{STATISTICS[key].title} ({uniform[key]:.2f})"
        print(f"  {kind:<24}", "   ".join(f"L{la} H{h} {value:.2f}" for la, h, value in heads))
    name = Path(path).resolve().name
    return run_data(name, lens.prompts, [frame_data(frame)], [frame.row])


if __name__ == "__main__":
    main()
