"""scripts/plots: the pictures of docs/benchmarks.md."""

from helpers import REPOSITORY
from PIL import Image

from benchmarks import plots


def test_the_figures_in_the_repository_are_drawn(in_process, tmp_path):
    assert in_process(plots.main, tmp_path, f"out={tmp_path}")[0] == 0
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
