"""Every attention head of a trained model on any text, as one interactive page.

    python -m scripts.inspect_attention checkpoint=runs/NAME text="The bell rang twice."
    python -m scripts.inspect_attention checkpoint=DIR compare=runs/NAME out=two.html

`checkpoint` is a run, one of its checkpoints, a Hugging Face GPT-2 directory or hub:NAME. The
page is the one that training makes (docs/lens.md); the strongest heads of each kind are printed.
The repeated sequence is drawn from the whole vocabulary; in training, from frequent tokens.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, field_validator

from errors import refuse, visible
from lens.config import LensConfig
from training.config.command_line import ScriptConfig, settings_command
from training.config.schema import Count, Device, Name, Positive, rejected

if TYPE_CHECKING:
    import torch


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


def inspect(path: str, key: str, settings: InspectConfig, device: "torch.device") -> dict:
    """One model's data for the page; prints its strongest heads of each kind."""
    import torch

    from interop.pretrained import load_pretrained
    from lens.snapshots import Lens
    from tokens.synthetic import SYMBOLS

    trained = load_pretrained(path, key)
    model, tokenizer, state = trained.model.to(device), trained.tokenizer, trained.state
    is_synthetic = bool(state and state.settings["data"].get("synthetic"))
    config = LensConfig(max_tokens=settings.max_tokens, repeated=settings.repeated)
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

    def capture_attention(token_ids: list[int], capture: Callable) -> None:
        model.capture_attention(torch.tensor([token_ids], device=device), capture)

    step = state.step if state else 0
    data, strongest = lens.page_data(capture_attention, step, Path(path).resolve().name)
    print(visible(f"{path}: strongest heads (in brackets: uniform attention)"))
    print("\n".join(f"  {line}" for line in strongest))
    return data


if __name__ == "__main__":
    main()
