"""Text -> tokens: everything before windows.

    tokenizers.py  GPT-2's tokenizer and the one of plain bytes
    encoding.py    a text of any length -> the ids that one call on all of it would give
    sources.py     text, JSON lines and Parquet, plain or compressed -> documents
    stream.py      token ids of many files as one long array
    shards.py      token files: llm.c's layout, nanoGPT's, the manifest; read and written
    prepare.py     texts -> a folder of shards, by many processes and machines

In a stream of tokens every document begins with the end-of-text token, as in the files of llm.c
and modded-nanogpt. So that token is where documents part, wherever the tokens come from.
"""

END_OF_TEXT = "<|endoftext|>"
SHARD_MAGIC = 20240520  # llm.c's: how a token file begins
