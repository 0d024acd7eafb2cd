"""The model card of an exported model: README.md in Markdown."""

import math
import re
from pathlib import Path

from interop import hub
from interop.pretrained import PretrainedModel
from training.checkpoint.listing import run_of

LONGEST = 200  # characters of a setting that the card shows

CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- gpt2
- clearhead
{base}---

# {title}

A GPT-2 of {parameters} parameters: {layers} layers of {heads} heads, {width} wide{start}. {trained}

```python
from transformers import pipeline

generate = pipeline("text-generation", model="PATH/OF/THIS/FOLDER")
print(generate("The", max_new_tokens={new})[0]["generated_text"])
```

It was trained on {window} positions{of}: a prompt and its continuation should not exceed that many
tokens together. Its tokenizer is {tokenizer}.{biases} Written by clearhead's `scripts.export_hf`.

| | |
|---|---|
{rows}
"""
TOKENIZER_WORDS = {
    "gpt2": "GPT-2's byte-pair encoding",
    "byte": "of bytes: 256 ids, and one for the end of a text",
}


def model_card(pretrained: PretrainedModel, bits_per_byte: float | None = None) -> str:
    """The card in Markdown. Values from the run's files are escaped or omitted.

    bits_per_byte: the validation figure of the checkpoint's step, if known.
    """
    model, config, state = pretrained.model, pretrained.model.config, pretrained.state
    settings = state.settings if state else {}
    source = settings.get("trainer", {}).get("init_from")
    name = str(source).removeprefix("hub:")
    of_hub = hub.is_named(source) and hub.NAME.fullmatch(name)
    start = f", initialised with the weights of {escaped(bare(source))}" if source else ""
    of = f" of {config.context_length:,}" if pretrained.window < config.context_length else ""
    biases = "" if config.qkv_bias else " Its queries, keys and values have no biases: zeros here."
    rows = figures(pretrained, bits_per_byte)
    run = run_of(pretrained.folder) if state else None
    return CARD.format(
        base=f'base_model: "{name}"\n' if of_hub else "",
        new=max(1, min(40, pretrained.window - 8)),
        title=escaped(run.name if run else "GPT-2"),
        parameters=f"{model.num_parameters():,}",
        layers=config.num_layers,
        heads=config.num_heads,
        width=config.emb_dim,
        start=start,
        trained=f"Trained for {state.step:,} steps." if state else "Imported weights.",
        window=f"{pretrained.window:,}",
        of=of,
        tokenizer=TOKENIZER_WORDS[pretrained.tokenizer_name],
        biases=biases,
        rows="\n".join(f"| {key} | {value} |" for key, value in rows.items()),
    )


def figures(pretrained: PretrainedModel, bits_per_byte: float | None) -> dict[str, str]:
    """The rows of the card's table: figures of the model and its training, escaped."""
    config, state = pretrained.model.config, pretrained.state
    found: dict[str, object] = {
        "vocabulary": config.vocab_size,
        "context length": config.context_length,
        "trained positions": pretrained.window,
    }
    if state:
        found |= {"steps": state.step, "tokens trained on": state.tokens}
        found["validation loss (nats per token)"] = state.val_loss
        found["bits per byte"] = bits_per_byte
        wanted = {
            "data": ("path", "synthetic", "tokenizer", "max_length"),
            "optimizer": ("name", "lr", "weight_decay", "schedule"),
            "trainer": ("batch_size", "warmup_steps", "max_steps", "init_from"),
            "model": ("dropout",),
        }
        for group, keys in wanted.items():
            values = state.settings.get(group)
            values = values if isinstance(values, dict) else {}
            for key in keys:
                value = values.get(key)
                is_place = key in ("path", "init_from")
                found[f"`{group}.{key}`"] = bare(value) if is_place else value
    return {key: text for key, value in found.items() if (text := shown(value))}


def bare(value: object) -> object:
    """Paths of this machine without their folders; names of the hub unchanged."""
    if isinstance(value, list):
        return [bare(item) for item in value]
    if isinstance(value, str) and not hub.is_named(value):
        return Path(value).name
    return value


def shown(value: object) -> str:
    """A number or a text for the card; empty for other values."""
    if isinstance(value, list):
        return ", ".join(filter(None, map(shown, value[:8])))
    if type(value) is int:
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else ""
    return escaped(value) if isinstance(value, str) else ""


def escaped(text: object) -> str:
    """A text that Markdown shows literally, on one line. Other characters than letters, digits and
    a few signs become character references, also the dot of "www.", which would begin a link.
    Unprintable characters become U+FFFD."""
    text = str(text)[:LONGEST]
    text = "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
    return re.sub(r"(?i)[^\w ,()/.\ufffd-]|_|(?<=www)\.", lambda found: f"&#{ord(found[0])};", text)
