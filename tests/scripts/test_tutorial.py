"""docs/tutorial.ipynb: it runs, and the outputs in the repository are complete.

PYTHONPATH=.:tests python tests/scripts/test_tutorial.py   # runs it and rewrites its outputs
"""

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
    place = {"metadata": {"path": str(folder / "docs")}}
    client = NotebookClient(notebook, timeout=300, record_timing=False, resources=place)
    client.execute(env=os.environ | env)


def outputs(notebook: nbformat.NotebookNode) -> list[list]:
    """What each cell of code shows: (kind, text or PNG)."""
    shown = []
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        found = []
        for kind, group in itertools.groupby(cell.outputs, lambda output: output.output_type):
            if kind == "stream":
                found.append(("text", "".join(output.text for output in group)))
            else:
                found += [("picture", output.data["image/png"]) for output in group]
        shown.append(found)
    return shown


def test_it_runs(tmp_path):
    """With fewer steps of training and fewer windows to evaluate."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    kept = outputs(notebook)
    for long, short in (("STEPS = 600", "STEPS = 8"), (" stride=8", " stride=64")):
        (cell,) = (cell for cell in notebook.cells if long in cell.source)
        cell.source = cell.source.replace(long, short)
    execute(notebook, tmp_path)
    assert (tmp_path / "runs" / "tutorial" / "attention" / "timelapse.html").is_file()
    now = outputs(notebook)
    for cell, before in zip(now, kept, strict=True):
        assert [kind for kind, _ in cell] == [kind for kind, _ in before]
    *_, sample, figures = ("".join(text) for (_, text), *_ in now)
    assert sample.startswith("The bell")
    assert re.search(r"bits_per_byte +\d\.\d{4}\n", figures)


def test_its_outputs_are_complete_and_name_no_machine():
    assert NOTEBOOK.stat().st_size < 300_000
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata == METADATA
    assert all(cell.metadata == {} for cell in notebook.cells)
    shown = outputs(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(shown) + 1))
    assert all(shown)
    for kind, content in itertools.chain(*shown):
        if kind == "picture":
            Image.open(io.BytesIO(base64.b64decode(content))).verify()
    for text in [cell.source for cell in notebook.cells] + [c for cell in shown for _, c in cell]:
        assert not re.search(r"(?<![\w.])/(home|root|Users|tmp|work|mnt|var)/", text)
        assert "\x1b" not in text


def make_anew() -> None:
    """Writes the notebook with the outputs of a whole run and without its metadata."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        execute(notebook, Path(folder))
    notebook.metadata = METADATA
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number:02d}", {}
        if cell.cell_type == "code":
            texts = [o for o in cell.outputs if o.output_type == "stream"]
            for output in texts[1:]:  # a run comes in many pieces
                texts[0].text += output.text
            cell.outputs = [o for o in cell.outputs if o not in texts[1:]]
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    make_anew()
