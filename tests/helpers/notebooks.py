"""Functions that run notebooks of docs/ and read their outputs."""

import itertools
import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from helpers import NO_NETWORK, REPOSITORY, TIMEOUT


def replace(notebook: nbformat.NotebookNode, before: str, after: str) -> None:
    """Replaces a text that exactly one code cell contains."""
    (cell,) = (c for c in notebook.cells if c.cell_type == "code" and before in c.source)
    cell.source = cell.source.replace(before, after)


def execute(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Runs all cells in a copy of the repository in `folder`. Raises at the first error."""
    for path in REPOSITORY.iterdir():
        if path.name not in ("docs", "runs") and not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    (folder / "docs").mkdir()
    env = {"IPYTHONDIR": folder / "ipython", "JUPYTER_RUNTIME_DIR": folder / "jupyter"}
    env = {name: str(value) for name, value in (env | {"PYTHONPATH": NO_NETWORK}).items()}
    resources = {"metadata": {"path": str(folder / "docs")}}
    limits = {"timeout": TIMEOUT, "startup_timeout": TIMEOUT}
    client = NotebookClient(notebook, **limits, record_timing=False, resources=resources)
    client.execute(env=os.environ | env)


def outputs(notebook: nbformat.NotebookNode) -> list[list]:
    """The outputs of each code cell: (kind, content). Kinds: text, image (PNG, or in HTML), page
    (HTML)."""
    cells = []
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        found = []
        for output in cell.outputs:
            data = output.get("data", {})
            html = data.get("text/html", "")
            if "image/png" in data:
                found.append(("image", data["image/png"]))
            elif html:
                found.append(("page" if "<iframe" in html[:20] else "image", html))
            else:  # printed text, or the value of the last line
                found.append(("text", data["text/plain"] if data else output.text))
        groups = itertools.groupby(found, lambda item: item[0])
        joined = [(kind, [content for _, content in group]) for kind, group in groups]
        cells.append(
            [
                (kind, content)
                for kind, contents in joined
                for content in (["".join(contents)] if kind == "text" else contents)
            ]
        )
    return cells
