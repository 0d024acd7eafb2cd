"""JavaScript modules of the page in a browser, without the page."""

from pathlib import Path

from headlens.assemble import join_modules
from headlens.page import CONSTANTS
from helpers import REPOSITORY


def module_page(opened, folder: Path, module: str, *names: str):
    """Returns an empty page in which these exports of a module are variables."""
    script = join_modules(REPOSITORY / "headlens/page" / module)
    for name, value in CONSTANTS.items():
        script = script.replace(name, value)
    script += f"Object.assign(window, {{ {', '.join(names)} }});"
    path = folder / f"{module}.html"
    html = f'<!doctype html><meta charset="utf-8"><script type="module">{script}</script>'
    path.write_text(html, encoding="utf-8")
    return opened(path)
