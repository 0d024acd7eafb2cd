"""Tokenizers, file readers, token files, datasets of windows, and the sampler.

    tokenizers.py        GPT-2's tokenizer and a byte tokenizer
    encoding.py          tokenizes texts of any length; gigatoken_engine.py: its fast engine
    paths.py             finds the files of data.path
    readers.py           reads documents from text, JSON lines, Parquet and Hugging Face datasets
    stream.py            token ids of many files as one long array
    shards.py            token files (the formats of llm.c and nanoGPT) and their manifest
    prepare.py           writes token files with many processes and machines
    windows.py           base class of datasets (data.py), and mixtures of datasets
    sampler.py           selects the windows of each step
    synthetic.py         generated sequences for the induction experiment

In a stream of tokens every document starts with the end-of-text token, as in the files of llm.c and
modded-nanogpt. So the end-of-text tokens are the document boundaries in every format.
"""

from typing import Literal

END_OF_TEXT = "<|endoftext|>"
TokenizerName = Literal["gpt2", "byte"]
VOCABULARIES = {"gpt2": 50257, "byte": 257}  # token ids of each tokenizer
