"""docs/notebook.ipynb: all cells run, the resumed run continues, and the archive is complete.
docs/copying.ipynb: all cells run."""

import itertools
import json
import tarfile

import nbformat
import pytest
from helpers import REPOSITORY
from helpers.notebooks import execute, outputs, replace
from helpers.runs import rows
from helpers.tally import in_campaign

NOTEBOOK, COPYING = (REPOSITORY / "docs" / f"{name}.ipynb" for name in ("notebook", "copying"))
SHORT = "model.num_layers=1 lens.prompts=[The] lens.repeat_length=0 lens.ablation=off"


@in_campaign
def test_it_runs(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    # The packages are installed, and tests have no network.
    replace(notebook, "%pip install -q -r requirements-extra.txt", "")
    replace(notebook, "STEPS = 250", "STEPS = 4")
    replace(notebook, 'LOG = "', f'LOG = "{SHORT} ')
    replace(notebook, "max_new_tokens=300", "max_new_tokens=8")
    execute(notebook, tmp_path)
    cells = outputs(notebook)
    assert [[kind for kind, _ in cell] for cell in cells] == [
        ["text"],  # the folder
        ["text"],  # versions
        ["text"],  # training
        ["image", "text"],  # loss
        ["image", "text"],  # animated heatmaps, names of heads
        ["page"],
        ["text", "image", "text"],  # resumed, loss
        ["text"],  # generated text
        ["text", "page"],  # a sentence
        ["text"],  # archive
    ]
    for text in (content for cell in cells for kind, content in cell if kind == "text"):
        assert "\x1b" not in text  # no progress bar

    run = tmp_path / "runs" / "notebook"
    starts = [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]
    assert [start["step"] for start in starts] == [0, 4]
    assert [row["step"] for row in rows(run) if "val/loss" in row] == [0, 4, 8]
    ((_, generated),) = cells[7]
    assert generated.strip().startswith("The ferry bell")
    assert len(generated.strip()) > len("The ferry bell")
    with tarfile.open(tmp_path / "runs" / "notebook.tar.gz") as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    assert (tmp_path / "unpacked/notebook/checkpoints/last/model.safetensors").is_file()


def test_a_llama_that_copies(tmp_path):
    """docs/copying.ipynb in three steps: its own induction scores are those of the lens."""
    notebook = nbformat.read(COPYING, as_version=4)
    replace(notebook, "import os\n", "import os, sys\nsys.path.insert(0, '..')\n")
    replace(notebook, "STEPS, BATCH = 500, 32", "STEPS, BATCH = 3, 2")
    execute(notebook, tmp_path)
    cells = outputs(notebook)
    assert [kind for kind, _ in itertools.chain(*cells)].count("page") == 1
    ((_, table),) = cells[-1]
    scores = [[float(value) for value in line.split()[2:]] for line in table.splitlines()[1:]]
    assert len(scores) == 8
    assert all(own > 0.01 for own, _ in scores)
    assert [own for own, _ in scores] == pytest.approx([lens for _, lens in scores], abs=1e-3)


@pytest.mark.parametrize("path", [NOTEBOOK, COPYING], ids=lambda path: path.stem)
def test_it_is_stored_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size < 60_000
    assert all(cell.metadata == {} for cell in notebook.cells)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
