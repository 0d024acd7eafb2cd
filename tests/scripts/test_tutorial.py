"""docs/tutorial.ipynb: it runs, and the outputs in the repository are complete.

PYTHONPATH=.:tests python tests/scripts/test_tutorial.py   # runs it and rewrites its outputs
"""

import base64
import io
import itertools
import re
import tempfile
from pathlib import Path

import nbformat
from helpers import REPOSITORY
from helpers.notebooks import execute, outputs, replace
from PIL import Image
from playwright.sync_api import expect

NOTEBOOK = REPOSITORY / "docs" / "tutorial.ipynb"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def explanations(cells):
    """The lines with the code of the ladder's steps, and their titles."""
    texts = "".join(content for kind, content in itertools.chain(*cells) if kind == "text")
    return re.findall(r"^(?:Step \d+: |Mistake \d: |\|).*", texts, re.MULTILINE)


def test_it_runs(tmp_path):
    """With fewer steps, windows in the evaluation and generated texts; answers to exercises too."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    stored = outputs(notebook)
    replace(notebook, "STEPS = 600", "STEPS = 8")
    replace(notebook, " stride=8", " stride=64")
    replace(notebook, "for temperature in (0.1, 2):", "for temperature in (2,):")
    execute(notebook, tmp_path)
    for name in ("tutorial", "tutorial-no-mask"):
        assert (tmp_path / "runs" / name / "report.html").is_file()
    now = outputs(notebook)
    for cell, before in zip(now, stored, strict=True):
        assert [kind for kind, _ in cell] == [kind for kind, _ in before]
    assert explanations(now) == explanations(stored) != []
    texts = [content for kind, content in itertools.chain(*now) if kind == "text"]
    assert any(text.startswith("The bell") for text in texts)
    assert any(re.search(r"bits_per_byte +\d\.\d{4}\n", text) for text in texts)


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
    page = f'<!doctype html><meta charset="utf-8">{page}'  # notebooks are UTF-8
    (tmp_path / "cell.html").write_text(page, encoding="utf-8")
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
