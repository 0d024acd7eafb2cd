"""show: the page of a run in a notebook."""

import html
import re

import pytest
from helpers import pages

from headlens import show


def test_the_page_has_the_snapshots_of_a_run(finished, tmp_path, monkeypatch):
    monkeypatch.setattr("headlens.render.SMALL_FRAMES", 3)
    for place in (finished, finished / "attention", str(finished)):
        content = show(place, height=500).data
        (source,) = re.findall('srcdoc="([^"]*)"', content)
        (tmp_path / "page.html").write_text(html.unescape(source), encoding="utf-8")
        (shown,) = pages.read(tmp_path / "page.html")
        (expected,) = pages.read(finished / "run.html")
        assert [frame["step"] for frame in shown["frames"]] == [0, 2, 4]
        every = {frame["step"]: frame for frame in expected["frames"]}
        assert shown["frames"] == [every[step] for step in (0, 2, 4)]
        assert shown["removed"] == expected["removed"]
        assert "500px" in content


def test_the_page_can_be_used_in_a_notebook(finished, tmp_path, window):
    host = tmp_path / "notebook.html"
    host.write_text(f"<!doctype html><p>a cell</p>{show(finished).data}", encoding="utf-8")
    page = window().new_page()
    page.goto(host.as_uri())
    frame = page.frames[1]
    pages.ready(frame)
    frame.locator("#show-all").click()
    pages.tile(frame, 1, 1).click()
    assert pages.state(frame, "head") == 1
    page.close()


def test_a_folder_without_snapshots_is_refused(tmp_path):
    for place in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ValueError, match=place.name):
            show(place)
