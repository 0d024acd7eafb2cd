"""Exports a trained model to a folder that transformers loads without this repository.

    config.json, model.safetensors    written by huggingface.py
    generation_config.json            ids of the start, end and padding tokens
    tokenizer.json, tokenizer_config.json    the tokenizer
    README.md                         the model card: size, training and loss of the model

The files contain no pickle and no text of the run.
"""

from pathlib import Path

from clearhead.models.huggingface import to_hf, write_json
from clearhead.models.pretrained import PretrainedModel
from clearhead.tokens.tokenizer import Tokenizer
from clearhead.tokens.tokenizer_json import TOKENIZER, to_json

CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- gpt2
- clearhead
---

# GPT-2, trained with clearhead

```python
from transformers import pipeline

generate = pipeline("text-generation", model="PATH/OF/THIS/FOLDER")
print(generate("The", max_new_tokens={new})[0]["generated_text"])
```

It was trained on windows of {window:,} tokens: a prompt and its continuation together should not be
longer. Its tokenizer is {tokenizer}.

| | |
|---|---|
{rows}
"""
TOKENIZER_DESCRIPTIONS = {
    "gpt2": "GPT-2's byte-pair encoding",
    "byte": "a byte tokenizer: 256 ids, and one for the end of a text",
}


def write(pretrained: PretrainedModel, folder: Path) -> None:
    """Writes all files into an empty folder."""
    end_of_text = pretrained.tokenizer.eot_token
    to_hf(pretrained.model, folder, pretrained.tokenizer, pretrained.window)
    ends = {f"{name}_token_id": end_of_text for name in ("bos", "eos", "pad")}
    write_json(folder / "generation_config.json", ends)
    write_tokenizer(pretrained.tokenizer, folder, pretrained.window)
    (folder / "README.md").write_text(model_card(pretrained), encoding="utf-8")


def write_tokenizer(tokenizer: Tokenizer, folder: Path, window: int | None = None) -> None:
    """Writes files from which AutoTokenizer loads a tokenizer with the same ids.

    window: number of tokens that a model with it can read. A batch is padded with the end-of-text
    token on the right, as the documentation of GPT-2 in transformers advises.
    """
    (folder / TOKENIZER).write_bytes(to_json(tokenizer))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # GPT2Tokenizer has GPT-2's pattern only
        "clean_up_tokenization_spaces": False,
        "padding_side": "right",
        **dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), tokenizer.end),
    }
    settings |= {"model_max_length": window} if window else {}
    write_json(folder / "tokenizer_config.json", settings)


def model_card(pretrained: PretrainedModel) -> str:
    """Returns the model card: numbers only, and no text of the run, which may be a stranger's."""
    values: dict[str, float | None] = {"parameters": pretrained.model.num_parameters()}
    if state := pretrained.state:
        values |= {"steps": state.step, "tokens trained on": state.tokens}
        if state.val_step == state.step:
            values["validation loss (nats per token)"] = state.val_loss
    return CARD.format(
        new=max(1, min(40, pretrained.window - 8)),
        window=pretrained.window,
        tokenizer=TOKENIZER_DESCRIPTIONS.get(
            pretrained.tokenizer.name, f"byte-level BPE with {pretrained.tokenizer.n_vocab:,} ids"
        ),
        rows="\n".join(
            f"| {key} | {value:{',' if type(value) is int else '.4g'}} |"
            for key, value in values.items()
            if value is not None
        ),
    )
