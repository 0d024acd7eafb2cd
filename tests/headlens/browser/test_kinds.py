"""The page in Chromium: what it shows of each kind of head, all of which is data."""

import dataclasses
import re

import pytest
import torch
from helpers import pages
from helpers.loops import targets

from data import get_tokenizer
from headlens import STATISTICS, Lens, LensConfig, write_page
from headlens.heads import KINDS, NAMES, title_of

BYTE = get_tokenizer("byte")
TEXT = "The bell rang.\nTam, who heard the bell, ran."  # has targets of all kinds


def planted(token_ids, kind, share=0.9):
    """Returns weights (T, T), most of them on the targets of a kind of head."""
    size = len(token_ids)
    weights = torch.ones(size, size).tril() / torch.arange(1, size + 1)[:, None]
    found = targets(token_ids, [BYTE.decode([token]) for token in token_ids])
    for query, keys in enumerate(found["offset", 3] if kind == "offset" else found[kind]):
        if keys:
            weights[query] *= 1 - share
            weights[query, keys] += share / len(keys)
    return weights


def inspected(kind):
    """Returns the data of a model with one head, which attends to the targets of a kind."""
    letters, settings = range(ord("a"), ord("z") + 1), LensConfig(prompts=[TEXT])
    lens = Lens(BYTE, settings, context_length=64, vocabulary=letters)
    return lens.inspect(pages.PlantedModel(lambda token_ids: [planted(token_ids, kind)]))[0]


@pytest.mark.parametrize("kind", NAMES)
def test_title_letter_colour_and_example_of_a_head(opened, tmp_path, kind):
    """The example has a row with the target on which the weight is most above uniform attention."""
    data = inspected(kind)
    write_page(tmp_path / "page.html", [data])
    for theme, colour in zip(("light", "dark"), KINDS[kind].colours, strict=True):
        page = opened(tmp_path / "page.html", f"#theme={theme}&head=0.0")
        pages.ready(page)
        tag = page.locator(".head .tag")
        assert tag.text_content() == KINDS[kind].letter
        rgb = list(bytes.fromhex(colour.removeprefix("#")))
        assert pages.colour_of(tag, "backgroundColor").tolist() == rgb
        assert pages.colour_of(page.locator("#detail-name"), "color").tolist() == rgb
        title = title_of(kind, 3).replace(" ", "-")
        assert title in page.locator("#detail-name").inner_text()
    for button in page.locator("#finding button").all():
        button.click()  # shows the row of the example
    text = page.locator("#finding").inner_text()
    at = r"\((\d+)\) it attends to (.*?), with weight (\d\.\d+)"
    query, example, weight = re.search(at, text, re.DOTALL).groups()
    assert pages.readout(page)[0][1] == int(query)  # the row of the example is marked
    prompt = data.prompts[pages.state(page, "prompt")]
    weights = planted(prompt.token_ids, kind)[int(query)].tolist()
    assert float(weight) == pytest.approx(max(weights), abs=0.01)
    (key,) = re.findall(r"\((\d+)\)", example)
    assert weights[int(key)] == max(weights)


def test_all_that_the_page_says_about_a_kind_is_in_its_fields(opened, tmp_path, monkeypatch):
    """So a new kind, with other texts, needs no change of the page."""
    planted_kind = dataclasses.replace(
        KINDS["separator"],
        letter="X",
        colours=("#123456", "#abcdef"),
        meaning="Planted meaning.",
        target="planted targets",
    )
    monkeypatch.setitem(KINDS, "separator", planted_kind)
    title = dataclasses.replace(STATISTICS["separator"], title="planted title")
    monkeypatch.setitem(STATISTICS, "separator", title)
    data = inspected("separator")
    group = {"name": "separator", "heads": 1, "loss_change": 1.0, "loss_change_error": 0.1}
    single = {"layer": 0, "head": 0, "loss_change": 1.0, "loss_change_error": 0.1}
    no_accuracy = {"accuracy_without": None}
    data.ablation = {
        **{"step": 0, "windows": 2, "targets": 9, "loss": 1, "accuracy": None},
        **{"heads": [single | no_accuracy], "groups": [group | no_accuracy]},
    }
    write_page(tmp_path / "page.html", [data])
    page = opened(tmp_path / "page.html", "#theme=light&head=0.0")
    pages.ready(page)
    for part, texts in {
        "#names": ["planted-title head"],
        "#detail-name": ["planted-title head"],
        "#finding": ["planted-title head", "planted targets"],
        "#groups": ["planted-title head", "Planted meaning."],
    }.items():
        shown = page.locator(part).inner_text()
        assert [text for text in texts if text not in shown] == [], part
    assert page.locator(".head .tag").text_content() == "X"
    assert pages.colour_of(page.locator("#detail-name"), "color").tolist() == [0x12, 0x34, 0x56]
