"""A web page as one self-contained file, from a folder of HTML, CSS and JavaScript modules.

    html = assemble_html(Path("headlens/page/index.html"), {"__CONSTANT__": "1"})

The HTML file links its style sheet and its script in the usual way:

    <link rel="stylesheet" href="style.css">
    <script type="module" src="main.js"></script>

so a browser can also load the folder from a local web server. Each link becomes the content of its
file, without indentation and without comments that fill whole lines. A script is joined with all
modules that it imports.
"""

import base64
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

STYLE = re.compile(r'<link rel="stylesheet" href="([\w.-]+)">')
SCRIPT = re.compile(r'<script type="module" src="([\w.-]+)"></script>')
IMPORT = re.compile(r'^import \{[^}]*\} from "(\.[\w./-]+)";\n', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?function|const|let|class)", re.MULTILINE)
# Comments and indentation of scripts and style sheets: only the sources have them.
STYLE_COMMENT = re.compile(r" */\*.*?\*/", re.DOTALL)
UNNEEDED = re.compile(r"^ *(?:/\*.*?\*/\n|//[^\n]*\n)|^ +|\n(?=\n)", re.MULTILINE | re.DOTALL)


def assemble_html(page: Path, constants: Mapping[str, str]) -> str:
    """Returns the HTML of `page` with its style sheets and scripts inlined.

    constants: {name in a script: its value}. __CSP__ becomes a Content-Security-Policy that allows
    only these style sheets and scripts, and forbids network requests.
    """
    folder, hashes = page.parent, {"script": "", "style": ""}

    def inline(opening: str, kind: str, text: str) -> str:
        text = f"\n{UNNEEDED.sub('', text).lstrip()}"
        found = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind] += f" 'sha256-{found}'"
        return f"<{opening}>{text}</{kind}>"

    def style(found: re.Match) -> str:
        text = (folder / found[1]).read_text(encoding="utf-8")
        return inline("style", "style", STYLE_COMMENT.sub("", text))

    def script(found: re.Match) -> str:
        text = join_modules(folder / found[1])
        for name, value in constants.items():
            text = text.replace(name, value)
        return inline('script type="module"', "script", text)

    html = re.sub(r"^ +", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    html = SCRIPT.sub(script, STYLE.sub(style, html))
    allowed = "; ".join(f"{kind}-src{of_kind}" for kind, of_kind in hashes.items())
    rest = "img-src data:; base-uri 'none'; form-action 'none'"
    return html.replace("__CSP__", f"default-src 'none'; {allowed}; {rest}")


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
