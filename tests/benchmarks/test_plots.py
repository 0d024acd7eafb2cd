"""benchmarks/plots: the plot of docs/results.md."""

from helpers import REPOSITORY
from PIL import Image

from benchmarks import plots


def test_the_results_in_the_repository_are_plotted(in_process, tmp_path):
    assert in_process(plots.main, tmp_path, "out=drawn.png")[0] == 0
    assert "](benchmarks-speed.png)" in (REPOSITORY / "docs" / "results.md").read_text()
    for path in (tmp_path / "drawn.png", REPOSITORY / "docs" / "benchmarks-speed.png"):
        assert path.stat().st_size < 300_000
        with Image.open(path) as picture:
            assert len(picture.convert("RGB").getcolors(2**24)) > 20
            assert picture.width > 600
