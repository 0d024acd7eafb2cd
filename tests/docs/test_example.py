"""docs/example/play.html, the published page: it is of the present version and names no machine."""

import json
import re

import pytest
import yaml
from helpers import REPOSITORY
from playwright.sync_api import expect

from headlens import page_html

EXAMPLE = REPOSITORY / "docs" / "example" / "play.html"
PICTURES = sorted(p for p in (REPOSITORY / "docs").iterdir() if p.suffix in (".png", ".webp"))
PAGES = ("README.md", "headlens/README.md", "headlens/docs/*.md", "docs/*.md", "benchmarks/**/*.md")


def data_in(page: str) -> dict:
    found = re.search(r'json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


@pytest.fixture(scope="module")
def data():
    return data_in(EXAMPLE.read_text("utf-8"))


def test_it_has_the_data_of_the_present_page(data):
    assert data["version"] == data_in(page_html([], "a page"))["version"]
    assert len(data["runs"]) == 1
    assert data["runs"][0]["story"]
    assert EXAMPLE.stat().st_size < 3_000_000


def test_it_names_no_machine(data):
    text = EXAMPLE.read_text("utf-8")
    assert not re.search(
        r"(?<![\w.+/])/(home|root|Users|tmp|work|mnt|var)/", text
    )  # / is in base64
    assert dict(data["training"]["environment"])["system"] in ("Linux", "Darwin", "Windows")
    settings = yaml.safe_load(data["training"]["settings"])
    assert (settings["runs_dir"], settings["seed"]) == ("runs", 2)


def test_it_works_in_a_browser(opened):
    page = opened(EXAMPLE)
    expect(page.locator("#story-headline")).not_to_be_empty()
    page.locator("#show-all").click()
    expect(page.locator("#grid .head")).to_have_count(8)
    page.locator("#typed").fill("XqZ7kPwXqZ")  # what the README says about it
    page.locator("#show-story").click()
    expect(page.locator("#story-headline")).to_contain_text("“7”")
    page.locator("#story-cards [data-name='previous_token'] .switch").click()
    expect(page.locator("#story-headline")).to_contain_text("not “7”")


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_every_picture_is_shown_and_small(picture):
    assert picture.stat().st_size < 300_000
    texts = [path.read_text("utf-8") for pattern in PAGES for path in REPOSITORY.glob(pattern)]
    assert any(re.search(rf"!\[[^]]+\]\([^)]*{re.escape(picture.name)}\)", text) for text in texts)
