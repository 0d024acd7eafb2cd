"""Text -> tokens: everything before windows.

    tokenizers.py  GPT-2's tokenizer and the one of plain bytes
    encoding.py    a text of any length -> the ids that one call on all of it would give;
                   gigatoken_engine.py: its fast engine
    paths.py       which files data.path names
    readers.py     text, JSON lines, Parquet and hub data sets -> documents; parts of large files
    stream.py      token ids of many files as one long array
    shards.py      token files: llm.c's layout and nanoGPT's, and their manifest
    prepare.py     texts -> a folder of shards, by many processes and machines
    windows.py     windows of a stream of tokens, and mixtures of them
    sampler.py     which windows each step trains on
    synthetic.py   sequences made on the spot

In a stream of tokens every document begins with the end-of-text token, as in the files of llm.c
and modded-nanogpt. So that token is where documents divide, wherever the tokens come from.
"""

END_OF_TEXT = "<|endoftext|>"
