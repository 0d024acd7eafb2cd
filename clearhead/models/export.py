"""Exports a trained model to a folder that transformers loads without this repository.

    config.json, model.safetensors    written by huggingface.py
    generation_config.json            ids of the start, end and padding tokens
    tokenizer.json, tokenizer_config.json    the tokenizer

The files contain no pickle and no text of the run.
"""

from pathlib import Path

from clearhead.models.huggingface import to_hf, write_json
from clearhead.models.pretrained import PretrainedModel
from clearhead.tokens.tokenizer import Tokenizer
from clearhead.tokens.tokenizer_json import TOKENIZER, to_json


def write(pretrained: PretrainedModel, folder: Path) -> None:
    """Writes all files into an empty folder."""
    end_of_text = pretrained.tokenizer.eot_token
    to_hf(pretrained.model, folder, pretrained.tokenizer, pretrained.window)
    ends = {f"{name}_token_id": end_of_text for name in ("bos", "eos", "pad")}
    write_json(folder / "generation_config.json", ends)
    write_tokenizer(pretrained.tokenizer, folder, pretrained.window)


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
