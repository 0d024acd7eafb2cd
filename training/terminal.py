"""What may be shown on a terminal: texts, prompts and paths come from anywhere."""

import re

# Control characters (a terminal obeys them: title, clipboard, colours, cursor), what reverses the
# direction of the text after it, and half surrogate pairs, which are no characters at all.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def visible(text: str, keep: str = "\n\t") -> str:
    """The text with what a terminal would obey written out, such as \\x1b; `keep` stays."""

    def written_out(found: re.Match) -> str:
        character = found[0]
        if character in keep:
            return character
        code = ord(character)
        return _SHORT.get(character) or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")

    return _UNSAFE.sub(written_out, text)
