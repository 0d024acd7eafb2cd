"""The tokens of a run: reads data.path and data.val_path, and divides training from validation.

    tokens = load_tokens(config.data, get_tokenizer("gpt2"))
    tokens.train[0], tokens.val[0]  # TokenStream; of a mixture, one for each source

data.py makes windows of them.
"""

import itertools
import os
from dataclasses import dataclass, field

from clearhead.config.schema import DataConfig
from clearhead.errors import DataError, sanitize
from clearhead.tokens.encoding import StreamEncoder, concatenate
from clearhead.tokens.paths import find_files, notes_about_repeated
from clearhead.tokens.readers import FilePart, encode_part
from clearhead.tokens.shards import files_by_name, is_shards, open_shards
from clearhead.tokens.token_stream import Checksums, TokenStream
from clearhead.tokens.tokenizer import Tokenizer


@dataclass
class LoadedTokens:
    """The tokens of a run. No token is in both parts."""

    train: list[TokenStream] = field(default_factory=list)  # of each source
    val: list[TokenStream] = field(default_factory=list)  # of each source, of data.val_path, or []
    checksums: Checksums = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # messages for the user


def load_tokens(config: DataConfig, tokenizer: Tokenizer) -> LoadedTokens:
    """Returns the tokens of data.path and data.val_path. Raises DataError.

    Without data.val_path or token files named val, the last part of each source (about
    data.val_fraction of it) is the validation data. There is none if val_fraction is 0.
    """
    loaded, is_mixture = LoadedTokens(), config.weights and isinstance(config.path, list)
    sources, key = (config.path if is_mixture else [config.path]), "data.path"
    for source in sources:
        streams = load_streams(config, source, tokenizer, loaded.notes)
        loaded.checksums += itertools.chain(*(s.checksums() for s in streams.values()))
        train, val = streams["train"], streams.get("val")
        if config.val_path or config.val_fraction == 0:
            val = None
        elif val is None:
            train, val = split_tokens(config, train, tokenizer, loaded.notes)
        else:
            names = ", ".join(os.path.basename(name) for name, _ in val.names[:3])
            reason = f"validation uses the files named val ({names}) and ignores data.val_fraction"
            loaded.notes.append(sanitize(f"data.path={source}: {reason}", keep=""))
        loaded.train.append(train)
        loaded.val += [] if val is None else [val]
    if config.val_path:
        sources, key = [config.val_path], "data.val_path"
        try:
            streams = load_streams(config, config.val_path, tokenizer, loaded.notes)
        except DataError as error:
            error.key = error.key.replace("data.path", key)
            raise
        loaded.val = [streams.get("val", streams["train"])]
        loaded.checksums += loaded.val[0].checksums()
    for source, val in zip(sources, loaded.val, strict=False):  # no validation data, or of each
        if len(val) <= config.max_length:
            reason = f"{len(val)} validation tokens, but a window needs {config.max_length + 1}"
            hint = "use a longer text, a smaller data.max_length, or another data.val_fraction"
            raise DataError(key, source, reason, f"{hint} (0: no validation)")
    val_files = files_by_name(config.val_path) if config.val_path else {}
    val_files = val_files.get("val") or val_files.get("train", [])
    loaded.notes += notes_about_repeated(files_by_name(config.path)["train"], val_files)
    return loaded


def load_streams(
    config: DataConfig, path: str | list[str], tokenizer: Tokenizer, notes: list[str]
) -> dict[str, TokenStream]:
    """Returns {"train": stream}; also "val" if some, not all, token files are named val. Appends
    notes about skipped files and texts."""
    if is_shards(path):
        return open_shards(path, tokenizer, config.verify, config.token_dtype)
    files = find_files(path, notes)
    encoder = StreamEncoder(tokenizer, config.endoftext)
    options = {"text_key": config.text_key, "encoding": config.encoding}
    parts = [FilePart(file, **options) for file in files]
    tokens = concatenate(itertools.chain.from_iterable(encode_part(p, encoder) for p in parts))
    if not len(tokens):
        raise DataError("data.path", path, "the files contain no text", "use other files")
    if encoder.empty_documents:
        notes.append(f"data.path: {encoder.empty_documents:,} empty texts skipped")
    return {"train": TokenStream([tokens], tokenizer.n_vocab, tokenizer.eot_token)}


def split_tokens(
    config: DataConfig, tokens: TokenStream, tokenizer: Tokenizer, notes: list[str]
) -> tuple[TokenStream, TokenStream]:
    """Splits a stream into training tokens and validation tokens, if possible between documents.
    Positions are measured in bytes, so the validation text is the same with every tokenizer."""
    fractions = (config.val_fraction, config.val_fraction / 2)
    target, latest = tokens.split_positions(fractions, tokenizer.byte_lengths)
    position = tokens.first_document_start(target, latest)
    if position is None:
        position = target
        if tokens.first_document_start(1, 10**8) is not None:
            notes.append("the validation data starts inside a document (the documents are long)")
    return tokens.split(position)
