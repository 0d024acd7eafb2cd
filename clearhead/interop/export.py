"""Exports a trained model to a folder that transformers loads without this repository.

    config.json, model.safetensors    written by interop/huggingface.py
    generation_config.json            ids of the start, end and padding tokens
    vocab.json, merges.txt, tokenizer_config.json    a tokenizer with the same ids
    README.md                         the model card: size, training and loss of the model

The files contain no pickle and no text of the run.
"""

from pathlib import Path

from clearhead.interop.huggingface import to_hf, vocabulary, write_json
from clearhead.interop.pretrained import PretrainedModel
from clearhead.tokens import END_OF_TEXT

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
    to_hf(pretrained.model, folder, pretrained.tokenizer_name, pretrained.window)
    ends = {f"{name}_token_id": end_of_text for name in ("bos", "eos", "pad")}
    write_json(folder / "generation_config.json", ends)
    write_tokenizer(pretrained, folder)
    (folder / "README.md").write_text(model_card(pretrained), encoding="utf-8")


def write_tokenizer(pretrained: PretrainedModel, folder: Path) -> None:
    """Writes files from which AutoTokenizer loads a tokenizer with the same ids.

    The byte tokenizer is exported as GPT-2's tokenizer without merges. The exported tokenizers
    encode the characters <|endoftext|> as the end-of-text token, as data.endoftext=token does.
    """
    ids, merges = vocabulary(pretrained.tokenizer_name)
    write_json(folder / "vocab.json", ids)
    lines = "".join(f"{line}\n" for line in ["#version: 0.2", *merges])
    (folder / "merges.txt").write_text(lines, encoding="utf-8")
    settings = {
        "tokenizer_class": "GPT2Tokenizer",
        "model_max_length": pretrained.window,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT),
    }
    write_json(folder / "tokenizer_config.json", settings)


def model_card(pretrained: PretrainedModel) -> str:
    """Returns the model card: numbers only, and no text of the run, which may be a stranger's."""
    values: dict[str, float | None] = {"parameters": pretrained.model.num_parameters()}
    if state := pretrained.state:
        values |= {"steps": state.step, "tokens trained on": state.tokens}
        values["validation loss (nats per token)"] = state.val_loss
    return CARD.format(
        new=max(1, min(40, pretrained.window - 8)),
        window=pretrained.window,
        tokenizer=TOKENIZER_DESCRIPTIONS[pretrained.tokenizer_name],
        rows="\n".join(
            f"| {key} | {value:{',' if type(value) is int else '.4g'}} |"
            for key, value in values.items()
            if value is not None
        ),
    )
