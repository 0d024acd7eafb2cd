"""Images that the page saves: SVG and PNG, of one head and of all heads."""

import base64
import io
import json
import re
from xml.etree import ElementTree

import numpy as np
from helpers import pages
from helpers.pages import HOSTILE, VIRIDIS, a_run
from PIL import Image

SVG = "{http://www.w3.org/2000/svg}"


def saved(lens, what):
    pages.option(lens, "save-image").click()
    with lens.expect_download() as download:
        lens.locator(f"[data-figure='{what}']").click()
    assert not lens.locator("#save").is_visible()
    return download.value.path().read_bytes()


def heatmaps(drawing):
    """Returns {title: (T, T, 3)} of the heatmaps of an SVG, of the centres of the cells."""
    found = {}
    for image in drawing.iter(f"{SVG}image"):
        data = base64.b64decode(image.get("href").partition(",")[2])
        found[image.find(f"{SVG}title").text] = np.asarray(Image.open(io.BytesIO(data)))[..., :3]
    return found


def assert_shows(found, weights):
    """Checks the cells on and below the diagonal of a heatmap."""
    size = len(weights)
    centres = ((np.arange(size) + 0.5) * len(found) / size).astype(int)
    cells = found[np.ix_(centres, centres)].astype(int)
    expected = VIRIDIS[np.rint(255 * np.sqrt(weights)).astype(int)]
    assert np.abs(cells - expected)[np.tril_indices(size)].max() <= 3
    assert cells[0, -1].min() > 200  # light, as in the light theme


def test_images_of_one_head_and_of_all_heads(shown):
    """White and with the weights of the page, also in the dark theme, which stays."""
    lens = shown(fragment="#head=0.2", color_scheme="dark")
    weights = a_run().weights[120][0]
    one = ElementTree.fromstring(saved(lens, "head.svg"))
    ((title, found),) = heatmaps(one).items()
    assert title == "L0 H2"
    assert_shows(found, weights[0, 2])
    texts = [text.text for text in one.iter(f"{SVG}text")]
    assert [texts.count(word) for word in ("She", "␣river", "⏎", "120")] == [2, 2, 2, 0]
    name = json.loads(pages.unpacked(a_run().data["heads_at"]))[-1]["titles"][2]
    assert name
    assert any(re.search(rf"L0 H2 {name}.*\b120\b", text) for text in texts)

    all_heads = heatmaps(ElementTree.fromstring(saved(lens, "grid.svg")))
    assert [*all_heads] == [f"L{layer} H{head}" for layer in range(2) for head in range(3)]
    for found, expected in zip(all_heads.values(), weights.reshape(6, 12, 12), strict=True):
        assert_shows(found, expected)

    pixels = np.asarray(Image.open(io.BytesIO(saved(lens, "head.png"))).convert("RGB"))
    assert pixels.shape[:2] == (2 * int(one.get("height")), 2 * int(one.get("width")))
    assert (pixels[[0, -1]] == 255).all()
    place = one.find(f"{SVG}image")
    x, y, size = (2 * round(float(place.get(key))) for key in ("x", "y", "width"))
    assert_shows(pixels[y : y + size, x : x + size], weights[0, 2])
    assert lens.locator("html").get_attribute("data-theme") == "dark"


def test_image_of_one_head_has_all_labels_and_the_copies(shown):
    long = pages.prompt("long", [f"w{n}" for n in range(120)])
    copies = pages.prompt("copies", ["<bos>", *2 * [f"c{n}" for n in range(40)]], period=40)
    lens = shown(a_run("labels", 1, 1, (long, copies), (0,), (0,)), fragment="#head=0.0")
    for number, of in enumerate((long, copies)):
        lens.locator("#prompt").select_option(str(number))
        drawing = ElementTree.fromstring(saved(lens, "head.svg"))
        texts = [text.text for text in drawing.iter(f"{SVG}text")]
        assert [texts.count(token) for token in of.tokens] == [
            2 * of.tokens.count(token) for token in of.tokens
        ]
        assert [texts.count(f"copy {copy}") for copy in (1, 2)] == 2 * [2 * number]
        assert len([*drawing.iter(f"{SVG}path")]) - len(drawing.findall(f"{SVG}g/{SVG}path")) == (
            number  # where copy 2 begins
        )


def test_hostile_names_in_an_image(shown):
    run = a_run(HOSTILE, prompts=(pages.prompt("x", [HOSTILE, "\x00\ufffe", "\u202e]]>"]),))
    lens = shown(run, fragment="#head=0.0")
    drawing = ElementTree.fromstring(saved(lens, "head.svg"))  # well-formed
    assert not [*drawing.iter(f"{SVG}script")]
