"""A trained model as a folder that transformers loads without this code.

    config.json, model.safetensors    by interop/huggingface.py, which reads them back
    generation_config.json            the tokens that begin and end a text
    tokenizer.json, tokenizer_config.json; for GPT-2's also vocab.json, merges.txt
    README.md                         the model card, with the run's figures

The files are text and safetensors only, and have no paths of this machine.
"""

import json
from pathlib import Path

from interop.huggingface import to_hf
from interop.model_card import model_card
from interop.pretrained import PretrainedModel
from tokens import END_OF_TEXT
from tokens.tokenizers import vocabulary_files


def write(pretrained: PretrainedModel, folder: Path, bits_per_byte: float | None = None) -> None:
    """Writes all files into an empty folder. bits_per_byte: a figure for the model card."""
    end_of_text = pretrained.tokenizer.eot_token
    to_hf(pretrained.model, folder, pretrained.tokenizer_name, pretrained.window)
    ends = {f"{name}_token_id": end_of_text for name in ("bos", "eos", "pad")}
    write_json(folder / "generation_config.json", ends)
    write_tokenizer(pretrained, folder)
    (folder / "README.md").write_text(model_card(pretrained, bits_per_byte), encoding="utf-8")


def write_json(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_tokenizer(pretrained: PretrainedModel, folder: Path) -> None:
    """Writes the files from which AutoTokenizer makes a tokenizer with the same ids as ours.

    It reads <|endoftext|> in a text as the token, as data.endoftext=token does.
    """
    if pretrained.tokenizer_name == "gpt2":
        merges_file, ids_file = vocabulary_files()
        (folder / "merges.txt").write_bytes(merges_file.read_bytes())
        (folder / "vocab.json").write_bytes(ids_file.read_bytes())
        ids = json.loads(ids_file.read_text(encoding="utf-8"))
        lines = merges_file.read_text(encoding="utf-8").splitlines()
        merges = [line.split(" ") for line in lines[1:]]  # without the version
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
        # Words, if there are merges, which never cross the end of a word.
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
    """A printable letter for each byte, as GPT-2 has it: printable bytes of Latin-1 are themselves,
    the others are letters from U+0100 on."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (chr(256 + number) for number in range(256))
    return [chr(byte) if byte in visible else next(others) for byte in range(256)]
