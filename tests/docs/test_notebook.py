"""docs/notebook.ipynb: all cells run, the resumed run continues, and the archive is complete."""

import json
import tarfile

import nbformat
from helpers import REPOSITORY
from helpers.notebooks import execute, outputs, replace
from helpers.runs import rows
from helpers.tally import in_campaign

NOTEBOOK = REPOSITORY / "docs" / "notebook.ipynb"
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


def test_it_is_stored_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert NOTEBOOK.stat().st_size < 60_000
    assert all(cell.metadata == {} for cell in notebook.cells)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
