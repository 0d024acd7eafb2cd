"""The page in Chromium: what it shows of each kind of head, all of which is data."""

import re

import pytest
import torch
from helpers import pages
from helpers.loops import targets

from data import get_tokenizer
from headlens import Lens, LensConfig, write_page
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


@pytest.mark.parametrize("kind", NAMES)
def test_title_letter_colour_and_example_of_a_head(opened, tmp_path, kind):
    """The example has a row with the target on which the weight is most above uniform attention."""

    def attention(model, input_ids):
        yield torch.stack([planted(row, kind) for row in input_ids.tolist()])[:, None], None

    letters, settings = range(ord("a"), ord("z") + 1), LensConfig(prompts=[TEXT])
    lens = Lens(BYTE, settings, context_length=64, vocabulary=letters, attention=attention)
    data, _ = lens.inspect(torch.nn.Identity())
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
    assert all(part in example for part in re.split(r"{\w+}", KINDS[kind].example))
    assert pages.readout(page)[0][1] == int(query)  # the row of the example is marked
    prompt = data.prompts[pages.state(page, "prompt")]
    weights = planted(prompt.token_ids, kind)[int(query)].tolist()
    assert float(weight) == pytest.approx(max(weights), abs=0.01)
    keys = re.findall(r"\((\d+)\)", example)
    assert bool(keys) == ("{key}" in KINDS[kind].example)
    assert all(weights[int(key)] == max(weights) for key in keys)
