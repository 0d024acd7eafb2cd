"""A web page as one self-contained file, from a folder of HTML, CSS and JavaScript modules.

    html = assemble_html(Path("headlens/page/index.html"))
    policy = content_security_policy(html.encode())

The HTML file links its style sheet and its script in the usual way:

    <link rel="stylesheet" href="style.css">
    <script type="module" src="main.js"></script>

so a browser can also load the folder from a local web server. `assemble` replaces each link with
the content of its file, without indentation and without comments that fill whole lines. A script is
joined with all modules that it imports. __DIGITS__ in a script becomes the table of rounding.py.
"""

import base64
import hashlib
import json
import re
from pathlib import Path

from .rounding import DIGITS

STYLE = re.compile(r'<link rel="stylesheet" href="([\w.-]+)">')
SCRIPT = re.compile(r'<script type="module" src="([\w.-]+)"></script>')
IMPORT = re.compile(r'^import \{[^}]*\} from "(\.[\w./-]+)";\n', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?function|const|let|class)", re.MULTILINE)
# Comments and indentation of scripts and style sheets: only the sources have them.
STYLE_COMMENT = re.compile(r" */\*.*?\*/", re.DOTALL)
UNNEEDED = re.compile(r"^ *(?:/\*.*?\*/\n|//[^\n]*\n)|^ +|\n(?=\n)", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(rb"<!--|<(script|style)\b([^>]*)>")


def assemble_html(page: Path) -> str:
    """Returns the HTML of `page` with its style sheets and scripts inlined."""
    folder = page.parent

    def style(found: re.Match) -> str:
        text = STYLE_COMMENT.sub("", (folder / found[1]).read_text(encoding="utf-8"))
        return f"<style>\n{UNNEEDED.sub('', text)}</style>"

    def script(found: re.Match) -> str:
        text = UNNEEDED.sub("", join_modules(folder / found[1])).lstrip()
        text = text.replace("__DIGITS__", json.dumps(DIGITS))
        return f'<script type="module">\n{text}</script>'

    html = re.sub(r"^ +", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return SCRIPT.sub(script, STYLE.sub(style, html))


def join_modules(main: Path) -> str:
    """Joins a JavaScript module and all modules that it imports, imported modules first.

    An import must be `import { name, name } from "./file.js";` or have another relative path, and
    `export` must precede a declaration. The modules share one scope: a name that is declared twice
    is a SyntaxError in the browser. Raises ValueError if modules import each other or use another
    syntax.
    """
    joined: dict[Path, str] = {}

    def add(path: Path, importers: tuple[Path, ...] = ()) -> None:
        if path in importers:
            raise ValueError(f"{path} and {importers[-1]} import each other")
        if path in joined:
            return
        text = path.read_text(encoding="utf-8")
        for name in IMPORT.findall(text):
            add(path.parent / name, (*importers, path))
        joined[path] = EXPORT.sub("", IMPORT.sub("", text)).strip()
        if re.search(r"^(import|export)\b", joined[path], re.MULTILINE):
            raise ValueError(f"{path}: unsupported form of import or export")

    add(main)
    return "\n\n".join(f"// {path.name}\n\n{text}" for path, text in joined.items()) + "\n"


def content_security_policy(*pages: bytes) -> str:
    """Returns a Content-Security-Policy that allows only the scripts and styles of these pages.

    The policy lists them by their SHA-256 hashes and forbids network requests. Pass two pages if
    the first contains the second in an iframe, which inherits the policy of the outer page.
    """
    blocks = [block for page in pages for block in inline_blocks(page)]
    hashes = {
        kind: " ".join(_sha256(text) for found, text in blocks if found == kind) or "'none'"
        for kind in ("script", "style")
    }
    rules = [
        "default-src 'none'",
        f"script-src {hashes['script']}",
        f"style-src {hashes['style']}",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    return "; ".join(rules)


def inline_blocks(page: bytes) -> list[tuple[str, bytes]]:
    """Returns ("script" or "style", text) of each inline block. Blocks of data are skipped."""
    blocks, position = [], 0
    while found := BLOCK.search(page, position):
        # find() skips megabytes of data faster than a regular expression.
        end = page.find(b"</" + found[1] + b">" if found[1] else b"-->", found.end())
        end = position = end if end >= 0 else len(page)
        is_data = b"type=" in (found[2] or b"") and b"module" not in found[2]
        if found[1] and not is_data:
            blocks.append((found[1].decode(), page[found.end() : end]))
    return blocks


def _sha256(text: bytes) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"
