"""docs/tutorial.ipynb: it has the published figures, it runs, its stored outputs are complete.

PYTHONPATH=.:tests python tests/docs/test_tutorial.py   # runs it and rewrites its outputs
"""

import base64
import contextlib
import io
import itertools
import re
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest
import test_attention
import torch
from helpers import REPOSITORY
from helpers.notebooks import execute, outputs, replace
from PIL import Image
from playwright.sync_api import expect

from attention import KERNELS, MultiHeadAttention

NOTEBOOK = REPOSITORY / "docs" / "tutorial.ipynb"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


@pytest.fixture(scope="module")
def by_hand():
    """Runs sections 1 to 4 in this process. Returns their names, and the text that each code cell
    prints."""
    cells, names, printed = nbformat.read(NOTEBOOK, as_version=4).cells, {}, []
    first, path = next(n for n, c in enumerate(cells) if c.source.startswith("## 5. ")), [*sys.path]
    with contextlib.chdir(REPOSITORY), torch.random.fork_rng():
        for cell in (cell for cell in cells[:first] if cell.cell_type == "code"):
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(cell.source, names)
            printed.append(output.getvalue())
    names["plt"].close("all")
    sys.path[:] = path
    return names, printed


def numbers(by_hand, name):
    """The rows of all printed matrices with this name, without the labels of the rows."""
    matrix, text = rf"^{re.escape(name)} \([\d, ]+\)\n(.+?)\n\n", "".join(by_hand[1])
    lines = "\n".join(re.findall(matrix, text, re.MULTILINE | re.DOTALL)).splitlines()
    rows = [line.split(maxsplit=1)[1] for line in lines]
    return [" ".join(row.split()) for row in rows if re.fullmatch(r"[-\d. ]+", row)]


def test_sections_1_to_4_print_the_stored_outputs(by_hand):
    stored = outputs(nbformat.read(NOTEBOOK, as_version=4))
    texts = ["".join(text for kind, text in cell if kind == "text") for cell in stored]
    assert by_hand[1] == texts[: len(by_hand[1])]
    equal = re.findall(r"equal.*: (True|False)$", "".join(texts), re.MULTILINE)
    assert equal == ["True"] * 5  # one head, weight split, its queries, index notation, block


def test_published_figures(by_hand):
    book = test_attention
    simple, causal = numbers(by_hand, "attn_scores"), numbers(by_hand, "attn_weights")
    assert simple[1] == book.SIMPLE_SCORES
    assert causal[1] == book.SIMPLE_WEIGHTS
    assert numbers(by_hand, "context_vec")[:6] == book.SIMPLE_CONTEXT
    assert numbers(by_hand, "without the mask") == book.WITHOUT_MASK
    for t in range(6):
        assert simple[6 + t].split()[: t + 1] == book.CAUSAL_SCORES[t].split()
        assert causal[6 + t].split() == book.CAUSAL_WEIGHTS[t].split() + ["0.0000"] * (5 - t)
    assert numbers(by_hand, "wrapper(x)[0]") == book.WRAPPER
    assert numbers(by_hand, "MultiHeadAttention(...)(x)[0]") == book.FIGURES
    name = "MultiHeadAttention(6, 6, 5, 0.0, num_heads=2)(x)[0, 1]"
    assert numbers(by_hand, name) == [book.DIVIDED_BY_D_OUT, book.DIVIDED_BY_HEAD_DIM]


def test_mistakes_are_shown_next_to_the_right_figures(by_hand):
    names, book = by_hand[0], test_attention
    for t, word in ((1, "old"), (5, "twice")):
        pairs = numbers(by_hand, f"weights of {word}")
        right = book.rounded(names["right"][0, 1, [t]])[0] + " 1.0000"
        assert pairs[1::2] == [right] * 4
        assert all(wrong != right for wrong in pairs[::2]) or t == 5  # of 3, the last row is right
        assert numbers(by_hand, f"context_vec of {word}, both heads")[1::2] == [book.WRAPPER[t]] * 2
    wrong, right = numbers(by_hand, "context_vec of The, both heads")
    assert (wrong[:15], wrong == right, right) == (right[:15], False, book.WRAPPER[0])


WEIGHTS = ("scale_of_all_heads", "softmax_over_queries", "mask_not_assigned", "roles_exchanged")


@pytest.mark.parametrize("mistake", [*WEIGHTS, "wrapper_scale", "view_without_transpose"])
def test_the_named_test_finds_the_mistake(by_hand, mistake, monkeypatch):
    """The test that the notebook names passes, and fails with the mistake."""
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    (place,) = (n for n, cell in enumerate(cells) if f"def {mistake}(" in cell.source)
    (name,) = re.findall(r"Found by `(\w+)`", cells[place - 1].source)
    check = getattr(test_attention, name)
    arguments = [] if mistake in WEIGHTS else ["per_head"]
    check(*arguments)
    wrong = by_hand[0][mistake]
    if mistake in WEIGHTS:
        monkeypatch.setattr(test_attention, "causal_attn_weights", wrong)
    elif mistake == "wrapper_scale":
        monkeypatch.setitem(KERNELS, "per_head", wrong)
    else:

        def split_heads(module, x):
            B, T, _ = x.shape
            return x.view(B, module.num_heads, T, module.head_dim)

        x = torch.arange(48.0).view(2, 6, 4)
        split = by_hand[0]["split"]
        assert torch.equal(wrong(x), split_heads(split, x))
        monkeypatch.setattr(MultiHeadAttention, "split_heads", split_heads)
    with pytest.raises(AssertionError):
        check(*arguments)


def test_it_runs(tmp_path):
    """With fewer steps and windows in the evaluation; the answers to the exercises too."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    stored = outputs(notebook)
    replace(notebook, "STEPS = 600", "STEPS = 8")
    replace(notebook, " stride=8", " stride=64")
    execute(notebook, tmp_path)
    for name in ("tutorial", "tutorial-no-mask"):
        assert (tmp_path / "runs" / name / "checkpoints/last/model.safetensors").is_file()
    now = outputs(notebook)
    for cell, before in zip(now, stored, strict=True):
        assert [kind for kind, _ in cell] == [kind for kind, _ in before]
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
    """As the notebook stores it, in a frame and without network; it plays until the last step."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (page,) = [content for kind, content in itertools.chain(*outputs(notebook)) if kind == "page"]
    page = f'<!doctype html><meta charset="utf-8">{page}'  # notebooks are UTF-8
    (tmp_path / "cell.html").write_text(page, encoding="utf-8")
    frame = opened(tmp_path / "cell.html").frame_locator("iframe")
    expect(frame.locator("#story-now")).to_contain_text("step 600")
    frame.locator("#show-all").click()
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
            for html in (o.data for o in cell.outputs if "text/html" in o.get("data", {})):
                html["text/html"] = html["text/html"].replace("\n", "&#10;")  # one line of JSON
            texts = [o for o in cell.outputs if o.output_type == "stream"]
            for output in texts[1:]:  # the output of a command arrives in many pieces
                texts[0].text += output.text
            cell.outputs = [o for o in cell.outputs if o not in texts[1:]]
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    rewrite()
