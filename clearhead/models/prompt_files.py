"""Prompts from files: `prompt=@FILE` and `prompts=FILE` of generate.py."""

import json
import os
from pathlib import Path

from clearhead.errors import ConfigError, Problem, message_of, refuse
from clearhead.files import read_bounded

MAX_PROMPT_BYTES = 2**28  # of a file


def prompt_of(text: str) -> str:
    """Returns the prompt for a text of the command line: @FILE is the file's content without its
    last line break, @@ a literal @."""
    if not text.startswith("@"):
        return text
    if text.startswith("@@"):
        return text[1:]
    content = read_text("prompt", text, text[1:], "; a prompt that starts with @ is written @@...")
    return content.removesuffix("\n").removesuffix("\r")


def read_prompts(path: str) -> list[str]:
    """Returns the prompts in a file: its lines without the blank ones, or, in a file .jsonl, the
    values of the key prompt. Raises ConfigError."""
    prompts = []
    for number, line in enumerate(read_text("prompts", path, path).split("\n"), start=1):
        if not line.strip():
            continue
        prompt = line.removesuffix("\r")
        if path.lower().endswith(".jsonl"):
            try:
                prompt = json.loads(line)["prompt"]
                prompt.encode()  # a text, without half of a character
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                reason = f"line {number} has no text with the key prompt"
                refuse([("prompts", path, reason, 'write {"prompt": "TEXT"} in each line')])
        prompts.append(prompt)
    if not prompts:
        refuse([("prompts", path, "contains no prompt", "write one in each line")])
    return prompts


def read_text(key: str, value: str, path: str, hint: str = "") -> str:
    """Returns the content of a UTF-8 file. Raises ConfigError with this key and value."""
    try:
        content = read_bounded(Path(os.path.expanduser(path)), MAX_PROMPT_BYTES)
        return content.decode("utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: not in UTF-8, or no path
        reason = getattr(error, "strerror", None) or message_of(error)
        hint = f"give a text file in UTF-8{hint}"
        raise ConfigError([Problem(key, value, f"cannot be read ({reason})", hint)]) from error
