"""Prompts that are not given: lens.prompts=null and trainer.sample_prompt=null.

They are passages of the validation text (headlens/passages.py), so that a model sees text
of the language and kind that it is trained on. The config of the run stores them, and a resumed run
keeps them.
"""

import re

import numpy as np

from clearhead.tokens.tokenizer import Tokenizer
from clearhead.tokens.windows import MixedDataset, WindowDataset
from data import GPTDatasetV1
from headlens import DEFAULT_PROMPTS, beginning, text_prompts

EXCERPTS, EXCERPT_TOKENS = 8, 4096


def choose_prompts(dataset: WindowDataset, tokenizer: Tokenizer, most: int) -> dict[str, object]:
    """Returns prompts of at most `most` tokens for the lens, and a prompt for text samples.

    dataset: the validation data, without them the training data. If these contain no text, the lens
    uses its English sentences, and a sample starts with an empty prompt. Raises DataError if token
    files have invalid ids.
    """
    found = text_prompts(dataset_excerpts(dataset, tokenizer), tokenizer, most)
    return {
        "lens.prompts": found or [*DEFAULT_PROMPTS],
        "trainer.sample_prompt": beginning(found[0]) if found else "",
    }


def dataset_excerpts(dataset: WindowDataset, tokenizer: Tokenizer) -> list[str]:
    """Returns parts of the text of a dataset, each of one document."""
    texts = []
    for ids in _tokens_of(dataset, EXCERPTS):
        documents = np.split(ids, np.flatnonzero(ids == tokenizer.eot_token))
        for number, document in enumerate(documents):
            kept = document[document != tokenizer.eot_token].tolist()
            text = tokenizer.decode_bytes(kept).decode("utf-8", "ignore")
            # The first document of an excerpt may begin inside a word.
            texts.append(text if number else re.sub(r"\A\S{,40}(?=\s)", "", text))
    return texts


def _tokens_of(dataset: WindowDataset, most: int) -> list[np.ndarray]:
    """Returns the ids of at most `most` excerpts of a dataset."""
    if isinstance(dataset, MixedDataset):
        parts = dataset.datasets[:: -(-len(dataset.datasets) // most)]
        return [ids for part in parts for ids in _tokens_of(part, most // len(parts))]
    if isinstance(dataset, GPTDatasetV1):
        tokens = dataset.tokens
        size, count = min(len(tokens), EXCERPT_TOKENS), min(most, -(-len(tokens) // EXCERPT_TOKENS))
        starts = np.linspace(0, len(tokens) - size, count).astype(np.int64)
        return [*tokens.gather(starts, size)]
    return [*dataset.batch(np.arange(most))[0].numpy()]  # generated sequences
