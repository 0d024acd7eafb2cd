"""A trained model as a folder that transformers, and what builds on it, loads without this code.

    config.json, model.safetensors    by interop/huggingface.py, which reads them back
    generation_config.json            the tokens that begin and end a text
    tokenizer.json, tokenizer_config.json; for GPT-2's also vocab.json, merges.txt
    README.md                         what it is, with the run's figures: a model card

Only files of text and safetensors; nothing of the run's folders or of this machine is in them.
"""

import json
import math
import re
from pathlib import Path

from interop import hub
from interop.huggingface import to_hf
from interop.pretrained import PretrainedModel
from tokens import END_OF_TEXT
from tokens.tokenizers import vocabulary_files
from training.checkpoint.listing import run_of

LONGEST = 200  # characters of a setting that a card shows

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

It has learned {window} positions{of}: a prompt and what follows it should have no more tokens than
that together. Its tokenizer is {tokenizer}.{biases} Written by clearhead's `scripts.export_hf`.

| | |
|---|---|
{rows}
"""
TOKENIZER_WORDS = {
    "gpt2": "GPT-2's byte-pair encoding",
    "byte": "one of plain bytes: an id for each of the 256, and one for the end of a text",
}


def write(pretrained: PretrainedModel, folder: Path, bits_per_byte: float | None = None) -> None:
    """Writes all of it into an empty folder. bits_per_byte: a figure for the model card."""
    end_of_text = pretrained.tokenizer.eot_token
    to_hf(pretrained.model, folder, pretrained.tokenizer_name, pretrained.window)
    ends = {f"{name}_token_id": end_of_text for name in ("bos", "eos", "pad")}
    write_json(folder / "generation_config.json", ends)
    write_tokenizer(pretrained, folder)
    (folder / "README.md").write_text(model_card(pretrained, bits_per_byte), encoding="utf-8")


def write_json(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# -------------------------------------------------------------------------------- the tokenizer


def write_tokenizer(pretrained: PretrainedModel, folder: Path) -> None:
    """Files from which AutoTokenizer makes a tokenizer with the ids of ours.

    It takes <|endoftext|> written in a text for the token, as data.endoftext=token does.
    """
    if pretrained.tokenizer_name == "gpt2":
        merges_file, ids_file = vocabulary_files()
        (folder / "merges.txt").write_bytes(merges_file.read_bytes())
        (folder / "vocab.json").write_bytes(ids_file.read_bytes())
        ids = json.loads(ids_file.read_text(encoding="utf-8"))
        lines = merges_file.read_text(encoding="utf-8").splitlines()
        merges = [line.split(" ") for line in lines[1:]]  # behind the version
        kind = "GPT2Tokenizer"
    else:
        ids = {letter: byte for byte, letter in enumerate(byte_letters())}
        merges, kind = [], "PreTrainedTokenizerFast"
    end_of_text = pretrained.tokenizer.eot_token
    spaces = {"add_prefix_space": False, "trim_offsets": True, "type": "ByteLevel"}
    special = ("single_word", "lstrip", "rstrip", "normalized")
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": end_of_text, "content": END_OF_TEXT, "special": True}
            | dict.fromkeys(special, False)
        ],
        "normalizer": None,
        # Into words, where there are merges to be kept within them.
        "pre_tokenizer": spaces | {"use_regex": bool(merges)},
        "post_processor": spaces | {"use_regex": False},
        "decoder": spaces | {"use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": ids,
            "merges": merges,
        },
    }
    write_json(folder / "tokenizer.json", content)
    settings = {
        "tokenizer_class": kind,
        "model_max_length": pretrained.window,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
    }
    write_json(folder / "tokenizer_config.json", settings)


def byte_letters() -> list[str]:
    """A visible letter for each byte, in GPT-2's way: printable ones of Latin-1 stand for
    themselves, the others for letters from U+0100 on."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (chr(256 + number) for number in range(256))
    return [chr(byte) if byte in visible else next(others) for byte in range(256)]


# ------------------------------------------------------------------------------- the model card


def model_card(pretrained: PretrainedModel, bits_per_byte: float | None = None) -> str:
    """What the model is, in Markdown. Whatever comes from files is escaped or left out."""
    model, config, state = pretrained.model, pretrained.model.config, pretrained.state
    settings = state.settings if state else {}
    source = settings.get("trainer", {}).get("init_from")
    name = str(source).removeprefix("hub:")
    of_hub = hub.is_named(source) and hub.NAME.fullmatch(name)
    start = f", which began with the weights of {escaped(bare(source))}" if source else ""
    of = f" of {config.context_length:,}" if pretrained.window < config.context_length else ""
    biases = "" if config.qkv_bias else " It has no biases of queries, keys and values: zeros here."
    rows = figures(pretrained, bits_per_byte)
    run = state and run_of(pretrained.folder)
    return CARD.format(
        base=f'base_model: "{name}"\n' if of_hub else "",
        new=max(1, min(40, pretrained.window - 8)),
        title=escaped(run.name if run else "GPT-2"),
        parameters=f"{model.num_parameters():,}",
        layers=config.num_layers,
        heads=config.num_heads,
        width=config.emb_dim,
        start=start,
        trained=f"Trained for {state.step:,} steps." if state else "Weights alone, as imported.",
        window=f"{pretrained.window:,}",
        of=of,
        tokenizer=TOKENIZER_WORDS[pretrained.tokenizer_name],
        biases=biases,
        rows="\n".join(f"| {key} | {value} |" for key, value in rows.items()),
    )


def figures(pretrained: PretrainedModel, bits_per_byte: float | None) -> dict[str, str]:
    """What is known of the model, by name, ready for Markdown."""
    config, state = pretrained.model.config, pretrained.state
    found: dict[str, object] = {
        "vocabulary": config.vocab_size,
        "context length": config.context_length,
        "learned positions": pretrained.window,
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
            for key in keys if isinstance(values, dict) else ():
                value = values.get(key)
                is_place = key in ("path", "init_from")
                found[f"`{group}.{key}`"] = bare(value) if is_place else value
    return {key: text for key, value in found.items() if (text := shown(value))}


def bare(value: object) -> object:
    """Of the machine's files and folders, names alone; the hub's names as they are."""
    if isinstance(value, list):
        return [bare(item) for item in value]
    if isinstance(value, str) and not hub.is_named(value):
        return Path(value).name
    return value


def shown(value: object) -> str:
    """A figure or a text for a card; nothing for what is neither."""
    if isinstance(value, list):
        return ", ".join(filter(None, map(shown, value[:8])))
    if type(value) is int:
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else ""
    return escaped(value) if isinstance(value, str) else ""


def escaped(text: object) -> str:
    """A text that Markdown shows as it is, on one line: all but letters, digits and the like as
    references to characters, and the point of "www.", which would begin a link; of what cannot be
    seen, a mark that it was there."""
    text = str(text)[:LONGEST]
    text = "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
    return re.sub(r"(?i)[^\w ,()/.\ufffd-]|_|(?<=www)\.", lambda found: f"&#{ord(found[0])};", text)
