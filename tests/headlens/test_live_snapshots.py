"""The steps that a page of a growing run shows."""

from helpers.stories import a_story

from headlens.finding import opening
from headlens.heatmap import png_of_head
from headlens.live_snapshots import PICTURE, LiveSnapshots, steadily_spaced
from headlens.snapshot_data import write_snapshot


def test_the_picture_of_a_run_is_of_the_prompt_that_shows_the_head(tmp_path):
    last = a_story().snapshots[-1]
    write_snapshot(tmp_path / "step_00000120.npz", last)
    head = opening(last)
    assert head["prompt"] == 1
    codes = last.codes[1][head["layer"], head["head"]]
    assert LiveSnapshots(tmp_path).picture() == png_of_head(codes, PICTURE)


def test_shown_steps_stay_while_a_run_grows():
    before = []
    for count in range(1, 200):
        found = steadily_spaced(list(range(count)), 8)
        assert found[0] == 0
        assert found[-1] == count - 1
        assert len(found) <= 8
        assert len(found) == count or len(found) >= 4
        step = found[1] - found[0] if len(found) > 2 else 1
        assert found[:-1] == list(range(0, count - 1, step))
        if len(before) > 2 and before[1] == found[1]:
            assert set(before[:-1]) <= set(found)
        before = found
