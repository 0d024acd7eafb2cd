"""The interactive page in Chromium: links, keys, small windows, invalid data and security."""

import html
import mimetypes
import re

import numpy as np
import pytest
from helpers import REPOSITORY, pages
from helpers.pages import END, HOSTILE, PROMPTS, START, a_run
from playwright.sync_api import expect

from clearhead.output.report import write_run_page
from headlens.page import CONSTANTS, page_html

SOURCES = REPOSITORY / "headlens" / "page"


def test_link_restores_the_view(shown):
    lens = shown()
    lens.locator("#prompt").select_option("2")
    lens.locator("#step").fill("1")
    pages.tile(lens, 1, 2).click()
    lens.locator("#text [data-token='5']").click()
    pages.option(lens, "sort").select_option("distance")
    pages.option(lens, "direction").click()
    pages.option(lens, "kind").select_option("valued")
    pages.option(lens, "compare").select_option("step:80")
    lens.locator("#show label").nth(1).click()
    pages.option(lens, "theme").click()
    expect(lens).to_have_url(re.compile("theme=dark"))
    again = shown(fragment=lens.evaluate("location.hash"))
    wanted, found = (p.evaluate("({ ...window.lens.state })") for p in (lens, again))
    assert found == wanted
    assert None not in wanted.values()
    assert pages.grid_order(again) == pages.grid_order(lens)
    maps = [pages.pixels(p.locator("canvas.pixels:visible")) for p in (lens, again)]
    for old, new in zip(*maps, strict=True):
        assert (old == new).all()


# Invalid values for each part of a link, and texts that are not links.
BAD_LINKS = """prompt=3 prompt=-1 prompt=1.5 prompt=x step=41 step= step=constructor head=2.0
head=0.3 head=1 head=-1.0 head=. query=12 query=NaN sort=nothing sort=-__proto__
compare=run
compare=step:41 compare=constructor show=c theme=%00
map=x % &&==&"""


def test_changed_address_is_followed(shown):
    lens = shown()
    usual = lens.evaluate("({ ...window.lens.state })")
    for bad in [*BAD_LINKS.split(), HOSTILE]:
        assert pages.go_to(lens, bad) == usual, bad
    found = pages.go_to(lens, "prompt=99&step=zz&map=valued&head=1.1")
    assert found == usual | {"map": "valued", "layer": 1, "head": 1}  # valid parts are used
    pages.go_to(lens, "head=1.0&prompt=1&step=40")
    expect(lens.locator("#detail-title")).to_have_text("L1 H0")
    expect(lens.locator("#step-number")).to_contain_text("40")
    pages.assert_drawn(lens, np.sqrt(a_run().weights[40][1]))


PRESSED = [  # view, key, what it changes, new value
    ("head=0.1", "ArrowRight", "head", 2),
    ("head=0.1", "ArrowLeft", "head", 0),
    ("head=0.1", "ArrowDown", "layer", 1),
    ("head=0.1", "ArrowUp", "layer", 0),  # no change at the edge
    ("head=0.1", "Escape", "layer", None),
    ("step=120", ",", "frame", 2),
    ("step=40", ".", "frame", 2),
    ("prompt=2", "p", "prompt", 0),
    ("head=0.1", "Shift+ArrowUp", "query", 10),
    ("head=0.1&query=5", "Shift+ArrowDown", "query", 6),
    ("compare=off", "d", "compare", "step:0"),
    ("theme=light", "t", "theme", "dark"),
    ("map=weights", "v", "map", "valued"),
]


def assert_keys_work(lens):
    for fragment, key, what, value in PRESSED:
        pages.go_to(lens, fragment)
        lens.keyboard.press(key)
        assert pages.state(lens, what) == value, (fragment, key)


def test_sources_run_without_being_assembled(window):
    """As on a local web server of a developer: each module imports what it uses."""
    tab, wrong = window().new_page(), []
    tab.on("pageerror", lambda error: wrong.append(error))
    whole = page_html([a_run().data], "x")
    begin = whole.index(START) + len(START)
    data = whole[begin : whole.index(END, begin)]

    def serve(route):
        path = SOURCES / route.request.url.split("/")[-1].split("#")[0]
        body = path.read_text(encoding="utf-8").replace("__DATA__", data)
        for constant, value in CONSTANTS.items():
            body = body.replace(constant, value)
        route.fulfill(body=body, content_type=mimetypes.guess_type(path)[0])

    tab.route("http://lens.test/**", serve)
    tab.goto("http://lens.test/index.html")
    pages.ready(tab)
    tab.evaluate(pages.DECODE_ALL)
    assert_keys_work(tab)
    pages.go_to(tab, "head=0.1")
    tab.locator("#show-help").click()
    tab.keyboard.press("Escape")
    tab.close()
    assert wrong == []


def test_keyboard_reaches_heads_tokens_and_steps(shown):
    lens = shown()
    assert_keys_work(lens)
    order = pages.ranked(a_run().rows[120].values["entropy"], descending=True)
    pages.go_to(lens, "sort=-entropy")  # when sorted, arrows follow the order
    pages.tile(lens, *order[0]).click()
    lens.keyboard.press("ArrowRight")
    assert (pages.state(lens, "layer"), pages.state(lens, "head")) == order[1]

    pages.go_to(lens, "head=0.1&query=5")
    lens.locator("#text").focus()  # here arrows select a token
    lens.keyboard.press("ArrowLeft")
    assert (pages.state(lens, "query"), pages.state(lens, "head")) == (4, 1)
    assert pages.readout(lens)[0] == ("⏎", 4)

    pages.go_to(lens, "step=80")
    pages.tile(lens, 0, 0).focus()
    lens.keyboard.press("ArrowRight")
    lens.keyboard.press("ArrowDown")
    expect(pages.tile(lens, 1, 1)).to_be_focused()
    assert pages.state(lens, "layer") is None  # focused, not enlarged
    play = lens.locator("#play").get_attribute("aria-label")
    pages.tile(lens, 1, 0).focus()
    lens.keyboard.press("Space")  # enlarges the head
    expect(lens.locator("#detail-title")).to_have_text("L1 H0")
    assert pages.state(lens, "frame") == 2
    lens.keyboard.press("Space")  # the head is enlarged: plays
    expect(lens.locator("#step-number")).to_contain_text("120")
    expect(lens.locator("#play")).to_have_attribute("aria-label", play)
    pages.tile(lens, 1, 1).focus()
    lens.keyboard.press("Enter")
    assert lens.locator("#detail-title").inner_text() == "L1 H1"
    lens.locator("#prompt").focus()  # keys that a field needs are not shortcuts
    lens.keyboard.press("v")
    assert pages.state(lens, "map") == "weights"


ACTIVE = """() => {
  const node = document.activeElement;
  const shown = node.closest(".segments label") ?? node;
  const style = getComputedStyle(shown);
  return [node.id || node.className, style.outlineStyle !== "none" && style.outlineWidth];
}"""


def test_every_control_is_reached_by_tab(shown):
    lens = shown(a_run(), pages.second_run(), fragment="#head=0.1&sort=-entropy")
    pages.option(lens, "compare")  # opens the options
    controls = lens.locator("main button:not(.head, .chart button), main select, main input")
    ids = set(controls.evaluate_all("all => all.map((node) => node.id)")) - {""}
    wanted = {id for id in ids if lens.locator(f"#{id}").is_visible()}
    assert {"play", "step", "prompt", "direction", "compare", "close"} <= wanted
    reached = set()
    for _ in range(60):
        lens.keyboard.press("Tab")
        name, outline = lens.evaluate(ACTIVE)
        if name:
            assert outline not in (False, "0px"), name
        reached.add(name)
    assert wanted <= reached
    assert any(name.startswith("head") for name in reached)  # one of the remaining heads


def test_options_neither_resize_the_grid_nor_cut_the_charts(shown):
    run = a_run("deep", 6, 6, PROMPTS[:1], (0, 120), (0, 120))
    lens = shown(run, fragment="#head=none", viewport={"width": 1400, "height": 700})
    size = lambda: pages.tile(lens, 0, 0).bounding_box()["width"]  # noqa: E731
    outside = """() => [...document.querySelectorAll(".chart canvas")].filter((canvas) => {
      const [inner, outer] = [canvas, canvas.closest("#side")]
        .map((node) => node.getBoundingClientRect());
      const chart = canvas.closest(".chart").getBoundingClientRect();
      return inner.width > chart.width + 1 || inner.right > outer.right + 1;
    }).length"""
    before = size()
    for _ in range(2):
        lens.locator("#options").click()
        assert size() == before
        assert lens.evaluate(outside) == 0
    lens.locator("#options").click()
    lens.set_viewport_size({"width": 1000, "height": 600})
    assert lens.evaluate(outside) == 0


def test_small_window_with_touch(shown):
    """Everything fits or scrolls, and is large enough for a finger."""
    run = a_run("2026-11-21_gpt2-12x768" * 4, 12, 16, PROMPTS[:1], (0, 120), (0, 120))
    small = {"width": 360, "height": 740}
    lens = shown(run, fragment="#head=none", viewport=small, has_touch=True)
    pages.tile(lens, 1, 0).tap()
    assert lens.locator("#detail-title").inner_text() == "L1 H0"
    expect(lens.locator("#map")).to_be_in_viewport(ratio=0.9)
    lens.touchscreen.tap(*pages.cell(lens, 9, 4))
    assert pages.readout(lens)[:2] == ((",", 9), ("⏎", 4))
    assert pages.state(lens, "query") == 9
    pages.tile(lens, 0, 15).tap()  # the grid scrolls
    assert lens.locator("#detail-title").inner_text() == "L0 H15"
    lens.locator("#options").click()
    targets = "button, select, label:has(input), input:not(label *)"
    read = """all => all.filter((node) => node.checkVisibility({ visibilityProperty: true }))
      .map((node) => [node.id || node.className, node.offsetWidth, node.offsetHeight])"""
    found = lens.locator(f"main :is({targets})").evaluate_all(read)
    assert len(found) > 192 + 15
    assert [entry for entry in found if min(entry[1:]) < 24] == []
    for fragment in ("prompt=0", "head=3.7&compare=step:0", "sort=-entropy&head=3.7"):
        pages.go_to(lens, fragment)
        assert lens.evaluate("document.documentElement.scrollWidth") == 360


@pytest.mark.parametrize(("layers", "heads", "ratio"), [(12, 12, 1), (24, 16, 2)])
def test_thumbnails_of_long_prompts_are_not_scaled(shown, layers, heads, ratio):
    """A browser that scales an image down can hide one bright weight in a row."""
    run = a_run("long", layers, heads, (pages.prompt("1-long", ["a"] * 130),), (0,), (0,))
    lens = shown(run, device_scale_factor=ratio)
    read = "all => all.map((c) => [c.width, c.getBoundingClientRect().width * devicePixelRatio])"
    sizes = lens.locator(".head canvas").evaluate_all(read)
    assert len(sizes) == layers * heads
    assert all(drawn == pytest.approx(shown_size, abs=0.02) for drawn, shown_size in sizes)


def test_panel_of_a_deep_model_shows_the_enlarged_head_next_to_the_grid(shown):
    lens = shown(a_run("deep", 24, 16, PROMPTS[:1], (0,), (0,)), frame=(600, 420))
    pages.tile(lens, 3, 4).click()
    for shown_part in (pages.tile(lens, 23, 15), lens.locator("#map")):
        expect(shown_part).to_be_in_viewport(ratio=1)
    assert lens.locator("#map").bounding_box()["width"] >= 150


def test_panel_of_a_dashboard_shows_the_grid_and_an_enlarged_head(shown):
    """As a panel of a dashboard: the whole grid below one line; an enlarged head on top of it."""
    long = pages.prompt("1-long", ["a"] * 40)
    run = a_run("low", 12, 12, (long,), steps=(0, 120))
    lens = shown(run, frame=(460, 300))
    assert lens.locator("#bar").bounding_box()["height"] < 45
    expect(pages.tile(lens, 11, 11)).to_be_in_viewport(ratio=1)
    # Each pixel shows the largest of several weights.
    size = lens.locator(".head canvas").first.evaluate("canvas => canvas.width")
    assert 10 < size < 40
    pixels, place = np.zeros((12, 12, size, size)), np.arange(40) * size // 40
    np.maximum.at(pixels, (..., place[:, None], place), np.sqrt(run.weights[120][0]))
    pages.assert_drawn(lens, pixels)
    pages.tile(lens, 1, 2).click()
    expect(lens.locator("#map")).to_be_in_viewport(ratio=1)
    expect(lens.locator("#readout")).to_be_in_viewport(ratio=1)
    expect(lens.locator(".plot").first).to_be_in_viewport(ratio=1)  # also its colour bar
    lens.page.keyboard.press("Escape")
    pages.tile(lens, 3, 4).click()
    assert lens.locator("#detail-title").inner_text() == "L3 H4"
    lens.page.keyboard.press("Escape")
    assert lens.evaluate("document.documentElement.scrollWidth") == 460
    lens.locator("#options").click()
    expect(lens.locator("#kind")).to_be_in_viewport(ratio=1)
    pages.option(lens, "kind").select_option("valued")
    assert pages.state(lens, "map") == "valued"
    assert lens.locator(".head canvas").first.evaluate("canvas => canvas.width") == size
    # The enlarged head is also on top of sorted heads.
    lens.page.locator("iframe").evaluate("node => { node.width = 800; node.height = 450; }")
    pages.option(lens, "sort").select_option("entropy")
    lens.locator("#options").click()
    pages.tile(lens, 1, 1).click()
    expect(lens.locator("#map")).to_be_in_viewport(ratio=1)


def test_page_works_in_a_sandboxed_frame(tmp_path, write, opened):
    """As in Weights & Biases: no origin, no storage, no network."""
    text = html.escape(write(a_run()).read_text(encoding="utf-8"))
    host = tmp_path / "host.html"
    frame = f'<iframe sandbox="allow-scripts" width="600" height="420" srcdoc="{text}"></iframe>'
    host.write_text(f"<!doctype html><meta charset=utf-8>{frame}", encoding="utf-8")
    lens = opened(host).frame_locator("iframe")
    pages.ready(lens)
    assert lens.locator(".head").count() == 6
    lens.locator("#show-all").click()
    lens.locator(".head").nth(4).click()
    pages.assert_drawn(lens, np.sqrt(a_run().weights[120][0][1, 1]), "#map")


def test_print_of_the_dark_theme(shown):
    """Dark on light, with all of the right column, the grid and the enlarged head on one page, and
    every canvas: each is a separate image, so a canvas over another one must be transparent."""
    deep = a_run("deep", 12, 12)
    lens = shown(deep, fragment="#head=1.1&theme=dark", viewport={"width": 1400, "height": 500})
    inside = "node => node.scrollHeight - node.clientHeight"
    height = "node => node.getBoundingClientRect().height"
    assert lens.locator("#side").evaluate(inside) > 100
    dark, grid = pages.tint(lens), lens.locator("#grid").evaluate(height)
    count = lens.locator("canvas").locator("visible=true").count()
    printed = lens.pdf(format="A4")
    # The transparency of an image is another image. Full Chromium also writes /SMask /None.
    masks = len(re.findall(rb"/SMask \d+ 0 R", printed))
    assert masks > 0
    assert printed.count(b"/Subtype /Image") - masks >= count
    lens.evaluate("() => dispatchEvent(new Event('beforeprint'))")
    assert min(pages.tint(lens)) > max(dark)
    lens.emulate_media(media="print")
    lens.set_viewport_size({"width": 718, "height": 1046})  # A4 with margins of 1 cm
    assert lens.locator("#side").evaluate(inside) <= 1
    assert lens.locator("#play").is_hidden()
    bottom = "node => node.getBoundingClientRect().bottom + scrollY"
    assert lens.locator("#map").evaluate(bottom) < 1046
    assert lens.locator("#grid").evaluate(height) > 0.4 * grid
    lens.evaluate("() => dispatchEvent(new Event('afterprint'))")
    assert pages.tint(lens) == dark


def test_hostile_text_stays_text(shown):
    tokens = [HOSTILE, "\u202ertl", "\x00\x1b", "\u2028", "", "x" * 300, "<0xE2>", "😀"]
    prompts = (pages.prompt(HOSTILE, tokens), PROMPTS[2])
    run = a_run(HOSTILE, prompts=prompts, steps=(0, 40), history=(0, 40))
    lens = shown(run, run, title=HOSTILE, fragment="#head=0.0&query=0")
    assert lens.title() == HOSTILE
    for part in ("#subject", "#compare-note"):
        assert HOSTILE in lens.locator(part).inner_text()
    assert lens.locator("#prose").text_content().startswith("</script><img src=x")
    assert HOSTILE[:20] in lens.locator("#readout").inner_text()
    lens.keyboard.press("?")
    lens.keyboard.press("Escape")
    assert HOSTILE[:40] in lens.locator("#prompt option").first.inner_text()
    lens.mouse.move(*pages.cell(lens, 7, 1, size=len(tokens)))
    assert "\u202e" not in lens.locator("#readout").inner_text()  # it would reverse the text
    assert lens.locator("img").count() == 0
    assert lens.locator("script").count() == 2


def test_policy_refuses_other_scripts_and_styles(tmp_path, write, browser):
    """The Content-Security-Policy blocks scripts that were not escaped, also in run.html."""
    planted = "<script>document.title = 'taken'</script><p id=planted style='color: red'>x</p>"
    planted += "<base href='https://lens.test/'><img id=image src='http://127.0.0.1:9/x'>"
    for path in (write(a_run()), write_run_page(tmp_path, "finished")):
        text = path.read_text(encoding="utf-8")
        assert "<main" in text
        path.write_text(text.replace("<main", f"{planted}<main", 1), encoding="utf-8")
        lens, failed = browser.new_page(), {}
        lens.on("requestfailed", lambda one, into=failed: into.update({one.url: one.failure}))
        lens.goto(path.as_uri())
        assert lens.title() != "taken"
        color = lens.locator("#planted").evaluate("p => getComputedStyle(p).color")
        assert color != "rgb(255, 0, 0)"
        fetched = "fetch('data:text/plain,x').then(() => 'fetched', () => 'refused')"
        assert lens.evaluate(fetched) == "refused"
        assert lens.evaluate("document.baseURI") == path.as_uri()
        assert failed["http://127.0.0.1:9/x"] == "csp"
        lens.close()


def test_step_whose_weights_are_not_decoded_yet(write, opened):
    before = "window.requestIdleCallback = () => {};"
    lens = opened(write(a_run()), "#head=none", before=before)
    pages.ready(lens)
    lens.evaluate("""() => {
      lens.update({ frame: 0 });
      dispatchEvent(new Event("resize"));
    }""")
    expect(lens.locator("#step-number")).to_have_text(re.compile(r"\b0$"))
    pages.assert_drawn(lens, np.sqrt(a_run().weights[0][0]))


def test_damaged_pages(tmp_path, opened):
    """Each shows an error of one line and nothing else."""
    whole = page_html([a_run().data], "x")
    begin = whole.index(START) + len(START)
    texts = {
        "truncated": whole[: begin + 500] + whole[whole.index(END, begin) :],
        "another version": whole.replace('"version":', '"version":1', 1),
    }
    path = tmp_path / "page.html"
    for what, text in texts.items():
        path.write_text(text, encoding="utf-8")
        lens = opened(path)
        error = lens.locator("#error")
        expect(error, what).to_be_visible()
        assert len(error.inner_text().splitlines()) == 1, what
        assert not lens.locator("#app").is_visible(), what
