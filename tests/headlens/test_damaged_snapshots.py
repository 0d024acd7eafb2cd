"""Snapshots and rows that are damaged, of another program or hostile: the others are shown."""

import io
import json
import os
import pickle
import zipfile

import numpy as np
import pytest
from helpers.pages import STEPS, removals
from helpers.refusals import SPECIAL_FILES
from helpers.stories import a_story

from headlens import folder_page, last_snapshot, read_snapshot, show, snapshot_bytes
from headlens.heads import ALL_NAMES, PLACES
from headlens.history import BELOW, MAX_LINE, History, Row, read_history
from headlens.live_snapshots import LiveSnapshots
from headlens.matching import read_runs
from headlens.snapshot_data import write_snapshot

SOME = 10**400
# Of the directory of a zip file, up to the flag for encryption.
ENTRY = b"PK\1\2\x14\3\x14\0\0"


def members():
    """Returns the content of the last snapshot of a run of 2 layers with 3 heads, by name."""
    file = io.BytesIO(snapshot_bytes(a_story().snapshots[-1]))
    with zipfile.ZipFile(file) as whole:
        return {name: whole.read(name) for name in whole.namelist()}


def zipped(content):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as written:
        for name, data in content.items():
            written.writestr(name, data)
    return file.getvalue()


def array(shape, descr="|u1", data=b""):
    """Returns a .npy file with this header."""
    file = io.BytesIO()
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + data


def pickled():
    class Attack:
        def __reduce__(self):
            return os.mkdir, ("unpickled",)

    return array((2, 3, 36), "|O") + pickle.dumps(Attack())


def changed(*path_and_value):
    """Returns the content of the snapshot with another value in its JSON."""
    *path, last, value = path_and_value
    content = members()
    values = json.loads(content["json.npy"][128:])
    place = values
    for key in path:
        place = place[key]
    place[last] = value
    text = json.dumps(values).encode()
    return zipped(content | {"json.npy": array((len(text),), data=text)})


def model_of(others):
    return {"others": others, "proof": None}


FIRST = ("details", "predictions", "of_prompts", 0)
KINDS = {
    "truncated": lambda: zipped(members())[:-100],
    "encrypted": lambda: zipped(members()).replace(ENTRY, ENTRY[:-1] + b"\1"),
    "a huge shape": lambda: zipped(members() | {"weights_0.npy": array((2, 3, 10**12))}),
    "a huge JSON": lambda: zipped(members() | {"json.npy": array((10**12,))}),
    "another type": lambda: zipped(members() | {"weights_0.npy": array((2, 3, 36), "<f4")}),
    "another shape": lambda: zipped(members() | {"weights_0.npy": array((2, 36), data=bytes(72))}),
    "a pickle": lambda: zipped(members() | {"weights_0.npy": pickled()}),
    "no weights": lambda: zipped({"json.npy": members()["json.npy"]}),
    "not UTF-8": lambda: zipped(members() | {"json.npy": array((2,), data=b"\xff\xfe")}),
    "deep JSON": lambda: zipped(members() | {"json.npy": array((10**5,), data=b"[" * 10**5)}),
    "run": lambda: changed("run", 5),
    "other prompts": lambda: changed("prompts", []),
    "a path as name": lambda: changed("prompts", 0, "name", "x/../../../y"),
    "token ids": lambda: changed("prompts", 0, "token_ids", ["a"] * 8),
    "period": lambda: changed("prompts", 1, "period", 10**9),
    "no symbols": lambda: changed("prompts", 1, "num_symbols", 0),
    "a lone surrogate": lambda: changed("prompts", 0, "text", "\ud800"),
    "step": lambda: changed("row", "step", SOME),
    "the step of another file": lambda: changed("row", "step", 7),
    "inf": lambda: changed("row", "entropy", [[1e400] * 3] * 2),
    "NaN": lambda: changed("row", "entropy", [[float("nan")] * 3] * 2),
    "ragged": lambda: changed("row", "entropy", [[0, 0, 0], [0]]),
    "texts": lambda: changed("row", "entropy", [["0"] * 3] * 2),
    "an unknown name": lambda: changed("row", "names", [[99] * 3] * 2),
    "losses": lambda: changed("row", "losses", [[1.0]]),
    "no uniform of a prompt": lambda: changed("prompts", 0, "uniform", {}),
    "nothing without heads": lambda: changed("details", "without", {"induction": None}),
    "details": lambda: changed("details", None),
    "statistics": lambda: changed("details", "statistics", 0, "entropy", [0]),
    "likely tokens": lambda: changed(*FIRST, "tokens", [[999] * 5] * 8),
    "probabilities": lambda: changed(*FIRST, "probabilities", [["x"] * 5] * 8),
    "uniform": lambda: changed("uniform", "entropy", "x"),
    "removed heads": lambda: changed("ablation", {"heads": "x", "groups": []}),
    "no step of a removal": lambda: changed(
        "ablation", {key: value for key, value in removals().items() if key != "step"}
    ),
    "windows": lambda: changed("contexts", {"text_name": "", "tokens": "abc"}),
    "too few layers": lambda: changed("row", "layers", [3]),
    "a huge layer": lambda: changed("row", "layers", [3, SOME]),
    "the same layer twice": lambda: changed("row", "layers", [3, 3]),
    "other layers": lambda: changed("details", "model", {"others": ["conv"], "proof": None}),
    "a number of another layer": lambda: changed("details", "model", model_of({"-1": "conv"})),
    "what another layer is": lambda: changed("details", "model", model_of({"7": ["conv"]})),
    "the proof": lambda: changed("details", "model", {"others": {}, "proof": ["verified"]}),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with snapshots and their statistics."""
    monkeypatch.chdir(tmp_path)
    for data in a_story().snapshots:
        write_snapshot(tmp_path / f"step_{data.step:08d}.npz", data)
    return tmp_path


def check_others_are_shown(folder, capsys):
    live, steps = LiveSnapshots(folder), [data.step for data in a_story().snapshots]
    frames = json.loads(live.data())["runs"][0]["frames"]
    assert [frame["step"] for frame in frames] == steps[:-1]
    assert live.picture()
    with pytest.raises(FileNotFoundError):
        live.frame(steps[-1])
    assert last_snapshot(folder).step == steps[-2]
    folder_page(folder, "")
    show(folder)
    read_runs([folder])
    assert capsys.readouterr().err.count("\n") == 1  # read several times, printed once
    assert not (folder / "unpickled").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_snapshot_is_skipped_with_one_line(folder, capsys, kind):
    path = max(folder.glob("*.npz"))
    assert read_snapshot(path).step == last_snapshot(folder).step
    path.write_bytes(KINDS[kind]())
    if kind != "the step of another file":
        with pytest.raises(ValueError, match=path.name):
            read_snapshot(path)
    check_others_are_shown(folder, capsys)


SHOWN = {
    "errors of one statistic": lambda: changed("row", "errors", {"diagonal": [[0.0] * 3] * 2}),
    "nothing without heads": lambda: changed("details", "without", None),
    "a field of the page": lambda: changed("details", "contexts", "x"),
}


@pytest.mark.parametrize("kind", SHOWN)
def test_a_snapshot_with_other_fields_is_shown_without_them(folder, capsys, kind):
    max(folder.glob("*.npz")).write_bytes(SHOWN[kind]())
    assert len(json.loads(LiveSnapshots(folder).data())["runs"][0]["frames"]) == len(STEPS)
    folder_page(folder, "")
    assert "contexts" not in last_snapshot(folder).details
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kind", [*SPECIAL_FILES, "link", "folder"])
def test_something_else_in_place_of_a_snapshot_is_skipped(folder, capsys, kind):
    path = max(folder.glob("*.npz"))
    path.rename("moved")
    if kind == "link":
        path.symlink_to("moved")
    elif kind == "folder":
        path.mkdir()
    else:
        SPECIAL_FILES[kind](path)
    check_others_are_shown(folder, capsys)


ROWS = {
    "list": lambda row: [row],
    "errors": lambda row: row | {"errors": []},
    "a huge number": lambda row: row | {"entropy": [[SOME] * 3] * 2},
    "step": lambda row: row | {"step": "7"},
    "names": lambda row: row | {"names": [[-1] * 3] * 2},
    "layers": lambda row: row | {"layers": [1, 0]},
    "texts": lambda row: row | {"entropy": [["0"] * 3] * 2},
    "a long line": lambda row: row | {"more": "x" * MAX_LINE},
}


@pytest.mark.parametrize("kind", ROWS)
def test_a_damaged_row_is_skipped_with_one_line(tmp_path, capsys, kind):
    file = tmp_path / "statistics.jsonl"
    first, second, *_ = [data.row for data in a_story().snapshots]
    history = History(file, 0)
    history.add(first)
    row = json.loads(file.read_text())
    with open(file, "a") as out:
        out.write(json.dumps(ROWS[kind](row)) + "\n")
    history.add(second)
    assert [row.step for row in read_history(file)] == [first.step, second.step]
    assert str(file) in capsys.readouterr().err
    with open(file, "a") as out:
        out.write('{"step": 1')  # is being written
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[::3]))
    assert len(read_history(file)) == 1
    assert capsys.readouterr().err == ""


def test_the_number_of_names_and_places():
    assert (len(ALL_NAMES), len(PLACES)) == (BELOW["names"], BELOW["places"])


def test_statistics_of_many_bytes_are_not_read_into_memory(tmp_path, monkeypatch, capsys):
    file = tmp_path / "statistics.jsonl"
    History(file, 0).add(a_story().snapshots[0].row)
    os.truncate(file, 2**35)  # without blocks on the disk
    monkeypatch.setattr("headlens.history.MAX_FILE", 2**26)
    assert len(read_history(file)) == 1
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_rows_of_another_model_are_not_used(folder):
    file = folder / "statistics.jsonl"
    first, second, *_ = (data.row for data in a_story().snapshots)
    History(file, 0).add(Row(0, {key: of[:1] for key, of in first.values.items()}))  # one layer
    assert json.loads(LiveSnapshots(folder).data())["runs"][0]["layers"] == 2
    resumed = History(file, second.step)
    resumed.add(second)
    assert [row.step for row in resumed.rows] == [second.step]
