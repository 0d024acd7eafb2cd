"""docs/tutorial.ipynb: it runs, and the outputs in the repository are complete.

PYTHONPATH=.:tests python tests/scripts/test_tutorial.py   # runs it and rewrites its outputs
"""

import ast
import base64
import io
import itertools
import os
import re
import tempfile
from pathlib import Path

import nbformat
from helpers import NO_NETWORK, REPOSITORY
from nbclient import NotebookClient
from PIL import Image
from playwright.sync_api import expect

NOTEBOOK = REPOSITORY / "docs" / "tutorial.ipynb"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def execute(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Runs all cells in a copy of the repository in `folder`. Raises at the first error."""
    for path in REPOSITORY.iterdir():
        if path.name not in ("docs", "runs") and not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    (folder / "docs").mkdir()
    env = {"IPYTHONDIR": folder / "ipython", "JUPYTER_RUNTIME_DIR": folder / "jupyter"}
    env = {name: str(value) for name, value in (env | {"PYTHONPATH": NO_NETWORK}).items()}
    resources = {"metadata": {"path": str(folder / "docs")}}
    client = NotebookClient(notebook, timeout=300, record_timing=False, resources=resources)
    client.execute(env=os.environ | env)


def outputs(notebook: nbformat.NotebookNode) -> list[list]:
    """The outputs of each code cell: (kind, content). Kinds: text, image (PNG), page (HTML)."""
    cells = []
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        found = []
        for output in cell.outputs:
            data = output.get("data", {})
            if "image/png" in data:
                found.append(("image", data["image/png"]))
            elif "<iframe" in data.get("text/html", ""):
                found.append(("page", data["text/html"]))
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


def test_it_runs(tmp_path):
    """With fewer training steps and fewer windows in the evaluation; answers to exercises too."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    stored = outputs(notebook)
    for long, short in (("STEPS = 600", "STEPS = 8"), (" stride=8", " stride=64")):
        (cell,) = (c for c in notebook.cells if c.cell_type == "code" and long in c.source)
        cell.source = cell.source.replace(long, short)
    execute(notebook, tmp_path)
    for name in ("tutorial", "tutorial-no-mask"):
        assert (tmp_path / "runs" / name / "report.html").is_file()
    now = outputs(notebook)
    for cell, before in zip(now, stored, strict=True):
        assert [kind for kind, _ in cell] == [kind for kind, _ in before]
    texts = [content for kind, content in itertools.chain(*now) if kind == "text"]
    assert any(text.startswith("The bell") for text in texts)
    assert any(re.search(r"bits_per_byte +\d\.\d{4}\n", text) for text in texts)


def test_every_setting_is_explained():
    """Each KEY=VALUE of a command has a row in a table, or is explained as `KEY=VALUE`."""
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    nodes = [n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Constant)]
    strings = [n.value for n in nodes if isinstance(n.value, str)]
    used = {key for text in strings for key in re.findall(r"(?<![\w.])([a-z][\w.]*)=(?!\")", text)}
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (.+?) \|", prose, re.MULTILINE))
    assert len(used) > 25
    assert {key for key in used if f"`{key}=" not in prose} <= set(rows) <= used
    for key, value in rows.items():
        if re.fullmatch(r"`[a-z0-9/.-]+`", value):  # others are variables or have blanks
            assert f"{key}={value[1:-1]}" in code, key


def test_its_outputs_are_complete_and_name_no_machine():
    assert NOTEBOOK.stat().st_size < 600_000
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata == METADATA
    assert all(cell.metadata == {} for cell in notebook.cells)
    stored = outputs(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(stored) + 1))
    assert all(stored)
    for kind, content in itertools.chain(*stored):
        if kind == "image":
            Image.open(io.BytesIO(base64.b64decode(content))).verify()
    sources = [("source", cell.source) for cell in notebook.cells]
    for kind, text in [*sources, *itertools.chain(*stored)]:
        before = r"(?<![\w.+/])" if kind in ("image", "page") else r"(?<![\w.])"  # / is in base64
        assert not re.search(before + "/(home|root|Users|tmp|work|mnt|var)/", text)
        assert "\x1b" not in text


def test_the_stored_page_works_in_a_browser(opened, tmp_path):
    """As the notebook stores it, in a frame and without network; it shows the last step."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (page,) = [content for kind, content in itertools.chain(*outputs(notebook)) if kind == "page"]
    (tmp_path / "cell.html").write_text(f"<!doctype html>{page}", encoding="utf-8")
    frame = opened(tmp_path / "cell.html").frame_locator("iframe")
    expect(frame.locator("#step-number")).to_have_text(re.compile("600"))
    expect(frame.locator("#grid .head")).to_have_count(8)
    frame.locator("#grid .head").first.click()
    expect(frame.locator("#detail-title")).to_be_visible()


def rewrite() -> None:
    """Runs the complete notebook and writes it with its outputs and without its metadata."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        execute(notebook, Path(folder))
    notebook.metadata = METADATA
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number:02d}", {}
        if cell.cell_type == "code":
            texts = [o for o in cell.outputs if o.output_type == "stream"]
            for output in texts[1:]:  # the output of a command arrives in many pieces
                texts[0].text += output.text
            cell.outputs = [o for o in cell.outputs if o not in texts[1:]]
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    rewrite()
