"""The interactive page in Chromium: heads on a text, and the words of it that a head connects."""

import copy
import dataclasses
import functools
import json
import re

import numpy as np
import pytest
import torch
from helpers import pages
from helpers.pages import HOSTILE
from helpers.stories import PERIOD, REPEATED, SOME
from playwright.sync_api import expect

from headlens.heads import ALL_NAMES
from headlens.page import frame_data, run_data
from headlens.recording import record
from headlens.snapshot_data import from_codes
from headlens.whole_text import Text, TextRecorder

STEPS = (0, 40, 80)
LENGTH = 48  # tokens of a window
TOKENS = [",", "\n", *(f" {a}{b}" for a in "bdfglmst" for b in ("ad", "en", "ip", "or", "ull"))]
WINDOWS = torch.randint(len(TOKENS), (4, LENGTH), generator=torch.Generator().manual_seed(3))
# Of L1 H0, at each step (window, query, key, weight, norm of the value): the strongest first.
NEAR, FAR = (2, 20, 17, 0.5, 4.0), (0, 45, 2, 0.9, 1.5)
CELLS = {
    40: [NEAR, FAR, (1, 40, 39, 0.8, 1.0), (3, 9, 3, 0.6, 1.0), (0, 12, 8, 0.3, 1.0)],
    80: [(1, 30, 20, 0.95, 2.0), (2, 5, 4, 0.7, 1.0), (0, 10, 7, 0.4, 1.0), NEAR, FAR],
}
CELLS[80][3:] = [(3, 44, 43, 0.3, 1.0), (0, 46, 41, 0.2, 1.0)]


def on_target(size, key_of, weight=0.8):
    """Returns a map with this weight on a key of each query, the rest equal on all keys."""
    weights = torch.ones(size, size).tril()
    weights /= weights.sum(-1, keepdim=True)
    for query in range(1, size):
        if (key := key_of(query)) is not None and key >= 0:
            weights[query] *= 1 - weight
            weights[query, key] += weight
    return weights


def attention_of(ids, step):
    """Returns the maps and the norms of the values of both layers of three heads, for one text."""
    size, windows = len(ids), [tuple(window) for window in WINDOWS.tolist()]
    window = windows.index(tuple(ids)) if tuple(ids) in windows else None
    is_repeated = window is None and size == len(REPEATED.tokens)
    back = lambda k: on_target(size, lambda q: q - k)  # noqa: E731
    equal = on_target(size, lambda _: None)
    induction = on_target(size, lambda q: q - PERIOD + 1 if q > PERIOD and is_repeated else None)
    resting, norms = on_target(size, lambda _: 0, 0.9), torch.linspace(0.5, 0.6, size)
    norms = norms.repeat(2, 3, 1)
    for at, query, key, weight, norm in CELLS.get(step, []):
        if at == window:
            resting[query] *= (1 - weight) / (1 - resting[query, key])
            resting[query, key] = weight
            norms[1, 0, key] = norm
    maps = [
        [back(1), back(3), induction],
        [resting, back(1) if window is not None else equal, equal],
    ]
    if step == 0:
        maps = [[equal] * 3] * 2
    return torch.stack([torch.stack(layer) for layer in maps]), norms


def text_run(text=True, tokens=TOKENS, name="on text", shift=0, prompts=(SOME, REPEATED)):
    """Returns a run that is measured on the windows. shift: of the heads in each layer."""

    def token_bytes(number):
        found = re.fullmatch(r"((?:<0x..>)+)", tokens[number])
        return bytes.fromhex(re.sub("<0x|>", "", found[1])) if found else tokens[number].encode()

    windows = Text(WINDOWS % len(tokens), token_bytes)
    rows, snapshots = {}, []
    for step in STEPS:

        def attend(ids, capture, step=step):
            known = [n for n in range(4) if (WINDOWS[n] % len(tokens)).tolist() == ids]
            ids = WINDOWS[known[0]].tolist() if known else ids
            maps, norms = (part.roll(shift, 1) for part in attention_of(ids, step))
            for layer in range(2):
                capture(layer, maps[layer], maps[layer].log(), norms[layer])
            return torch.zeros(len(ids), pages.VOCABULARY)

        run = pages.capturing(attend)
        on_text = TextRecorder(windows).run(run) if text else None
        data = record(run, prompts, step, on_text, name, pages.text_of)
        rows[step] = data.row
        snapshots.append(data)
    return pages.PageRun(run_data(snapshots), {}, rows, {}, snapshots)


@functools.cache
def a_text_run():
    return text_run()


READ = """lists => lists.map((list) => [...list.querySelectorAll("li")].map((item) => {
  const [line, key, query] = ["bdi", "mark", "u"].map((name) => item.querySelector(name));
  const token = ({ title }) => title.match(/token (.*), position (\\d+)/).slice(1);
  return { line: line.textContent, weight: item.querySelector(".number").textContent,
    key: token(key), query: token(query), parts: [key.textContent, query.textContent] };
}))"""


def shown_contexts(lens):
    """Returns the lines of each list: {line, weight, key: (label, position), query, parts: their
    texts}."""
    return lens.locator("#contexts ol").evaluate_all(READ)


def assert_cells(lines, cells, tokens=TOKENS):
    """Checks tokens, positions and weights of lines. cells: (window, query, key, weight)."""
    assert len(lines) == len(cells)
    for line, (window, query, key, weight) in zip(lines, cells, strict=True):
        words = [tokens[token] for token in WINDOWS[window].tolist()]
        assert line["query"] == [pages.as_label(words[query]), str(query)]
        assert line["key"] == [pages.as_label(words[key]), str(key)]
        assert float(line["weight"].lstrip("<")) == pytest.approx(weight, abs=0.011)
        text = line["line"]
        first = text.index(words[key].replace("\n", "⏎"))
        assert words[query].replace("\n", "⏎") in text[first:]
        between = "".join(words[key : query + 1]).replace("\n", "⏎")
        assert (between in text) == ("…" not in text[1:-1])  # else it omits tokens


def test_contexts_of_a_head_at_each_step(shown):
    lens = shown(a_text_run(), fragment="#head=1.0")
    for frame in (1, 2):
        lens.locator("#step").fill(str(frame))
        contexts = a_text_run().snapshots[frame].contexts
        cells, weights = contexts.cells[1, 0].tolist(), from_codes(contexts.codes[1, 0])
        for lines, *of_list in zip(shown_contexts(lens), cells, weights, strict=True):
            assert_cells(lines, [(*cell, weight) for cell, weight in zip(*of_list, strict=True)])
    rest = np.mean([attention_of(w, 80)[0][1, 0, 1:, 0].mean() for w in WINDOWS.tolist()])
    rest += np.mean([attention_of(w, 80)[0][1, 0].diagonal()[1:].mean() for w in WINDOWS.tolist()])
    (percent,) = re.findall(r"(\d+) %", lens.locator("#contexts .note").inner_text())
    assert int(percent) == pytest.approx(100 * rest, abs=0.6)


def test_query_and_key_are_marked_in_different_ways(shown):
    """Not only by colour: a box, which is stronger for a larger weight, and a line."""
    lens = shown(a_text_run(), fragment="#head=1.0&step=40")
    style = "(all, what) => all.map((node) => getComputedStyle(node)[what])"
    keys, queries = (lens.locator(f"#contexts li {name}") for name in ("mark", "u"))
    assert {*keys.evaluate_all(style, "outlineStyle")} == {"solid"}
    assert {*keys.evaluate_all(style, "textDecorationLine")} == {"none"}
    assert {*queries.evaluate_all(style, "textDecorationLine")} == {"underline"}
    assert {*queries.evaluate_all(style, "outlineStyle")} == {"none"}
    lens.emulate_media(media="print")
    assert {*keys.evaluate_all(style, "printColorAdjust")} == {"exact"}
    lens.emulate_media(media="screen")
    colours = keys.evaluate_all(style, "backgroundColor")
    alphas = [float(re.findall(r"[\d.]+", colour)[3]) for colour in colours[:5]]
    weights = [cell[3] for cell in CELLS[40]]
    assert np.argsort(alphas).tolist() == np.argsort(weights).tolist()
    for theme in ("light", "dark"):
        pages.go_to(lens, f"head=1.0&step=40&theme={theme}")
        found = lens.evaluate(pages.CONTRASTS)
        assert any(name == "MARK" for _, name, _, _ in found)
        assert [entry for entry in found if entry[3] < entry[2]] == []


def test_names_say_where_they_hold(shown):
    """On text and prompts, or only on one of them; outlined letters if not on the text."""
    lens = shown(a_text_run())
    page = pages.colour_of(lens.locator("body"), "backgroundColor")
    expected = {  # head: (name, whether it holds everywhere, whether its letter is outlined)
        (0, 0): ("previous_token", True, False),
        (0, 1): ("offset", True, False),
        (0, 2): ("induction", False, True),
        (1, 0): ("first_token", True, False),
        (1, 1): ("previous_token", False, False),
    }
    for place, (name, is_everywhere, is_outlined) in expected.items():
        tag = pages.tile(lens, *place).locator(".tag")
        assert f"kind-{name}" in tag.get_attribute("class")
        assert (pages.colour_of(tag, "backgroundColor") == page).all() == is_outlined
        where = lens.locator("#detail-name small")
        pages.tile(lens, *place).click()
        assert (where.inner_text() == "") == is_everywhere
        text = where.inner_text()
        assert text in lens.locator("#finding").inner_text()
        assert text in pages.tile(lens, *place).get_attribute("aria-label")
    names = lens.locator("#names [data-name='previous_token']")
    assert re.findall(r"\d+", names.inner_text()) == ["2"]
    assert lens.locator("#hollow").is_visible()
    pages.go_to(lens, "step=0")  # no head has a name
    assert lens.locator("#hollow").is_hidden()
    assert shown(text_run(text=False)).locator("#hollow").is_hidden()


def test_head_that_has_its_name_on_the_text_only_is_shown_there(shown):
    """On a prompt that is a text."""
    run = a_text_run()
    last = copy.deepcopy(run.snapshots[-1])
    last.row.names[1, 2], last.row.names[0, 2] = ALL_NAMES.index("induction"), 0
    last.row.places[:] = 0
    last.row.places[1, 2] = 1  # on the text only
    data = run_data([*run.snapshots[:-1], last])
    lens = shown(dataclasses.replace(run, data=data), fragment="#prompt=1")
    lens.locator("#names [data-name='induction']").click()
    assert [pages.state(lens, key) for key in ("layer", "head", "prompt")] == [1, 2, 0]
    expect(lens.locator("#message")).to_be_visible()  # the prompt does not change silently


def test_statistics_are_those_of_the_text(shown):
    lens, run = shown(a_text_run(), fragment="#head=0.2&prompt=1"), a_text_run()
    title = {s["key"]: s["title"] for s in run.data["statistics"]}["induction"]
    values = run.rows[80].values["induction"]
    text = pages.statistics_of(lens)[title]
    assert float(re.match(r"[\d.]+", text)[0]) == pytest.approx(values[0, 2], abs=0.0051)
    assert "±" in text
    chart = lens.locator(".chart[data-statistic='induction'] .value").inner_text()
    assert float(chart.split()[-1]) == pytest.approx(values[0, 2], abs=0.0051)
    pages.option(lens, "sort").select_option("induction")
    assert pages.state(lens, "prompt") == 1
    assert pages.grid_order(lens) == pages.ranked(values, descending=True)


def test_contexts_of_the_shown_side_and_of_one_head(shown):
    second = text_run(name="shifted", shift=1)  # L1 H1 is what L1 H0 is
    lens = shown(a_text_run(), second, fragment="#head=1.1&step=40&show=b")
    planted = [cell[:4] for cell in CELLS[40]]
    assert_cells(shown_contexts(lens)[0], planted)
    pages.go_to(lens, "head=1.0&step=40&show=a")
    assert_cells(shown_contexts(lens)[0], planted)
    pages.go_to(lens, "head=none")
    assert lens.locator("#contexts").is_hidden()


def test_page_without_a_text_has_no_contexts_and_errors(shown):
    """Also a second run without one: only the side with a text has contexts."""
    without = text_run(text=False, name="without")
    lens = shown(without, fragment="#head=0.0")
    assert lens.locator("#contexts").is_hidden()
    assert lens.locator("#detail-name small").inner_text() == ""
    assert "±" not in lens.locator("#side").inner_text()
    lens = shown(a_text_run(), without, fragment="#head=1.0&show=a")
    assert lens.locator("#contexts").is_visible()
    lens.locator("#show label").nth(1).click()
    assert lens.locator("#contexts").is_hidden()


def test_the_pairs_that_a_head_connects_most_often(shown):
    """At the shown step."""
    lens, pairs = shown(a_text_run(), fragment="#head=1.1"), {}
    for snapshot in a_text_run().snapshots:
        pairs[snapshot.step] = snapshot.contexts.pairs
    rows = lens.locator("#pairs tbody tr")
    for frame, step in ((2, 80), (1, 40)):
        lens.locator("#step").fill(str(frame))
        (texts, head) = pairs[step]["texts"], pairs[step]["of_heads"][4]
        assert len(head["keys"]) > 3
        found = [" ".join(row.split()) for row in rows.all_inner_texts()]
        assert found == [
            " ".join([texts[key], str(count), *(f"{texts[q]} {n}" for q, n in queries)])
            for key, count, queries in head["keys"]
        ]
        numbers = re.findall(r"(\d+) ", lens.locator("#pairs h4 span").inner_text())
        assert numbers == [str(head["links"]), str(pairs[step]["queries"])]


def test_snapshots_without_pairs_have_lines(shown):
    run = a_text_run()
    contexts = [dataclasses.replace(s.contexts, pairs=None) for s in run.snapshots]
    older = [
        dataclasses.replace(snapshot, contexts=found)
        for snapshot, found in zip(run.snapshots, contexts, strict=True)
    ]
    lens = shown(dataclasses.replace(run, data=run_data(older)), fragment="#head=1.0")
    assert lens.locator("#contexts ol").count() == 2
    assert lens.locator("#pairs").count() == 0


def test_hostile_and_partial_tokens(shown):
    """They stay text."""
    tokens = [*TOKENS]
    near = WINDOWS[NEAR[0]].tolist()
    tokens[near[NEAR[1]]] = HOSTILE
    tokens[near[NEAR[2]]] = "\u202ertl"
    far = WINDOWS[FAR[0]].tolist()
    tokens[far[FAR[2]]], tokens[far[FAR[2] + 1]] = "<0xC3>", "<0xA9>"
    assert len({near[NEAR[1]], near[NEAR[2]], far[FAR[2]], far[FAR[2] + 1]}) == 4
    lens = shown(text_run(tokens=tokens), fragment="#head=1.0&step=40")
    (first, second, *_), _ = shown_contexts(lens)
    assert first["parts"] == ["·rtl", HOSTILE]
    assert second["parts"][0] == "é"
    assert second["key"][0] == "é¹"
    assert lens.locator("img").count() == 0
    assert "é¹" in lens.locator("#contexts .note").inner_text()


def test_lines_of_a_text_from_right_to_left(shown):
    lens = shown(text_run(tokens=pages.HEBREW * 8), fragment="#head=1.0&step=40")
    read = "all => all.map((node) => node.getBoundingClientRect().right)"
    keys, queries = (lens.locator(f"#contexts li {name}") for name in ("mark", "u"))
    near = 0  # on one line of the page: the key token, which comes first, is on the right
    assert keys.evaluate_all(read)[near] > queries.evaluate_all(read)[near]


@pytest.mark.parametrize("width", [460, 900, 1400])
def test_nothing_is_wider_than_the_window(shown, width):
    """In a wide one, the pairs are next to the first list."""
    size = {"width": width, "height": 900}
    lens = shown(a_text_run(), fragment="#head=1.0&step=40", viewport=size)
    assert lens.evaluate("document.documentElement.scrollWidth") == width
    read = "all => all.map((node) => node.getBoundingClientRect().top)"
    tops = lens.locator("#contexts h4").evaluate_all(read)
    assert (abs(tops[0] - tops[1]) < 30) == (width == 1400)
    lines = lens.locator("#contexts li bdi").evaluate_all(
        "all => all.map((node) => node.getBoundingClientRect().right)"
    )
    assert max(lines) <= width


def test_cells_that_do_not_exist_are_not_shown(shown):
    run = a_text_run()
    frames = [frame_data(snapshot) for snapshot in run.snapshots]
    details = json.loads(pages.unpacked(frames[-1]["details"]))
    details["contexts"][3][0] = [[99, 5, 3, 200, 0, 9], [0, 3, 5, 200, 0, 9], [0, 99, 5, 200, 0, 9]]
    frames[-1]["details"] = pages.packed(details)
    changed = dataclasses.replace(run, data=run.data | {"frames": frames})
    lens = shown(changed, fragment="#head=1.0")
    assert lens.locator("#contexts li mark").count() == 5  # those at random
