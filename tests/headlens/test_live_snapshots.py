"""The steps that a page of a growing run shows."""

from headlens.live_snapshots import steadily_spaced


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
