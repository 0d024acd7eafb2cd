"""Trains a tokenizer on texts of any size: a byte-level BPE vocabulary of their language.

    python -m scripts.train_tokenizer data.path=TEXTS vocab_size=16384 out=my-tokenizer
    python -m scripts.prepare_data data.path=TEXTS out=my-tokens data.tokenizer=my-tokenizer
    python train.py data=shards data.path=my-tokens data.tokenizer=my-tokenizer

For a text that fits into memory, one command is enough: python train.py data.tokenizer=bpe.

Reads the texts completely and trains on evenly spaced parts of them, at most 16 MB in all. The same
texts and settings give the same files. Writes tokenizer.json and tokenizer_config.json,
which AutoTokenizer of transformers reads too.
"""

import functools
import itertools
from collections import Counter

from pydantic import Field

from clearhead.config.command_line import (
    OutFolder,
    ScriptConfig,
    new_folder,
    settings_command,
)
from clearhead.config.schema import Encoding, Names, Settings, VocabSize
from clearhead.errors import DataError, sanitize
from clearhead.output.console import in_thread, progress
from clearhead.tokens.gutenberg import notes_about_trimmed
from clearhead.tokens.readers import NO_TEXT, documents, split_file
from clearhead.tokens.sources import find_files
from clearhead.tokens.tokenizer import Sample, train_tokenizer

PART_BYTES = 2**24  # progress is shown after each part


class SourceConfig(Settings):
    """The texts."""

    path: Names = Field(
        description="file, folder, glob pattern, a list of these, or hub:NAME:CONFIG:SPLIT"
    )
    text_key: Names = Field(
        "text", description="JSON field or column that has the text, or a list of several"
    )
    encoding: Encoding = Field("utf-8", description="of text files, such as cp1252")
    trim: bool = Field(True, description="skip the licence in a book of Project Gutenberg")

    def files(self) -> list[str]:
        """Returns the files of `path`. Prints notes about them. Raises DataError."""
        files = find_files(self.path, notes := [])
        print(*notes, sep="\n", end="\n" * bool(notes))
        return files


class TokenizerConfig(ScriptConfig):
    """python -m scripts.train_tokenizer data.path=TEXTS out=DIR [KEY=VALUE ...]"""

    data: SourceConfig
    out: OutFolder
    vocab_size: VocabSize | None = Field(
        None, description="number of ids; null: about twice the square root of the bytes of text"
    )


@settings_command(TokenizerConfig)
def main(settings: TokenizerConfig) -> None:
    from clearhead.models.export import write_tokenizer

    data = settings.data
    files = data.files()
    options = data.model_dump(exclude={"path"})
    parts = [part for file in files for part in split_file(file, PART_BYTES, **options)]
    sample, trimmed = Sample(), Counter()
    with progress("parts read") as report:
        for done, part in enumerate(parts, start=1):
            for block in itertools.chain.from_iterable(documents(part, trimmed)):
                sample.add(block)
            report(done, len(parts))
    if not sample.text_bytes:
        raise DataError("data.path", data.path, *NO_TEXT)
    for note in notes_about_trimmed(data.path, trimmed):
        print(note)
    print(f"training on {sample.size:,} of {sample.text_bytes:,} bytes ...", flush=True)
    try:
        train = functools.partial(train_tokenizer, sample, settings.vocab_size)
        tokenizer = in_thread(train).result()  # Ctrl-C ends it
    except DataError as error:
        error.key = "vocab_size"
        raise
    with new_folder(settings.out) as folder:
        write_tokenizer(tokenizer, folder)
    print(
        sanitize(f"{tokenizer.n_vocab:,} ids in {settings.out}; use data.tokenizer={settings.out}")
    )


if __name__ == "__main__":
    main()
