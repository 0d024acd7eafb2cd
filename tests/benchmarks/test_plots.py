"""scripts/plots: the pictures of docs/benchmarks.md."""

import pytest
from helpers import REPOSITORY
from PIL import Image

from scripts import plots


def test_the_figures_that_are_kept_can_be_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["plots", f"out={tmp_path}"])
    plots.main()
    drawn = {path.name for path in tmp_path.iterdir()}
    page = (REPOSITORY / "docs" / "benchmarks.md").read_text()
    assert drawn == {"benchmarks-speed.png", "benchmarks-muon.png"}
    for name in drawn:
        assert f"]({name})" in page
        for path in (tmp_path / name, REPOSITORY / "docs" / name):
            assert path.stat().st_size < 300_000
            with Image.open(path) as picture:
                assert len(picture.convert("RGB").getcolors(2**24)) > 20
                assert picture.width > 600


def test_a_folder_without_figures_is_said_to_be_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["plots", f"results={tmp_path}", f"out={tmp_path}"])
    with pytest.raises(SystemExit) as end:
        plots.main()
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith(f"results={tmp_path}: has no DATE-others-cpu.json; ")
