"""Tokenizers, file readers, token files, datasets of windows, and the sampler.

    tokenizer.py       byte-level BPE: GPT-2's tokenizer, bytes, and one trained on a text
    tokenizer_json.py  stored tokenizers: tokenizer.json
    encoding.py        tokenizes texts of any length
    readers.py          formats: reads documents from files, in parts, and tokenizes them
    text_files.py       opens files; plain text and its encodings
    records.py          texts in JSON, CSV, Parquet and Hugging Face datasets
    gutenberg.py       the text of a book of Project Gutenberg, without header and licence
    overlap.py         how much of the validation text is also in the training text
    token_stream.py    token ids of many files as one long array
    shards.py          token files (the formats of llm.c and nanoGPT) and their manifest
    prepare.py         writes token files with many processes
    sources.py         the files of data.path, their tokens, and the validation part
    windows.py         base class of datasets (data.py), and mixtures of datasets
    sampler.py         selects the windows of each step
    synthetic.py       generated sequences for the induction experiment

In a stream of tokens every document starts with the end-of-text token, as in the files of llm.c and
modded-nanogpt. So the end-of-text tokens are the document boundaries in every format.
"""

END_OF_TEXT = "<|endoftext|>"
VOCABULARIES = {"gpt2": 50257, "byte": 257}  # number of ids of the built-in tokenizers
TRAINED = "bpe"  # data.tokenizer: byte-level BPE, trained on the training text
MAX_VOCABULARY = 2**16  # token files have 16 bits for each id
HUB = "hub:"  # a path hub:NAME is a dataset or a model on the Hugging Face hub
MIXTURE_BLOCK = 1000  # windows of a mixture among which each source has exactly its share
