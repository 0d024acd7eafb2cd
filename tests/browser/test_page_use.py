"""The interactive page in a real browser: links, keys, odd windows, and what it refuses."""

import base64
import html
import json
import re
import zlib

import numpy as np
import pytest
from helpers.pages import (
    HOSTILE,
    PROMPTS,
    VIRIDIS,
    a_run,
    assert_drawn,
    cell,
    grid_order,
    pixels,
    prompt,
    ranked,
    readout_query,
    ready,
    second_run,
    state,
    thumbnails,
    tile,
    tint,
)
from playwright.sync_api import expect

from lens.page import END, START, page
from lens.statistics import STATISTICS

# ------------------------------------------------------------------------------ the link


def test_a_link_restores_the_view(shown):
    lens = shown()
    lens.locator("#prompt").select_option("2")
    lens.locator("#step").fill("1")
    tile(lens, 1, 2).click()
    lens.locator("#text [data-token='5']").click()
    lens.locator("#sort").select_option("distance")
    lens.locator("#direction").click()
    lens.locator("#filter-statistic").select_option("entropy")
    lens.locator("#filter-value").fill("30")
    lens.locator("#scale").select_option("linear")
    lens.locator("#first-column").check()
    lens.locator("#compare").select_option("step:80")
    lens.locator("#show label").nth(1).click()
    lens.locator("#theme").click()
    expect(lens).to_have_url(re.compile("theme=dark"))
    fragment = lens.evaluate("location.hash")
    again = shown(fragment=fragment)
    wanted, found = (p.evaluate("({ ...window.lens.state })") for p in (lens, again))
    assert found.pop("threshold") == pytest.approx(wanted.pop("threshold"), rel=1e-3)
    assert found == wanted
    assert None not in wanted.values()
    assert grid_order(again) == grid_order(lens)
    for old, new in zip(
        *(pixels(p.locator("canvas.pixels:visible")) for p in (lens, again)), strict=True
    ):
        assert (old == new).all()
    for part in ("#readout", "#text", "#values", "#count", "#compare-note", "#step-number"):
        assert again.locator(part).inner_text() == lens.locator(part).inner_text()


def test_a_link_of_two_runs_restores_that_they_are_not_compared(shown):
    lens = shown(a_run(), second_run())
    lens.locator("#compare").select_option("off")
    lens.locator("#scale").select_option("linear")
    expect(lens).to_have_url(re.compile("scale=linear"))
    fragment = lens.evaluate("location.hash")
    assert state(shown(a_run(), second_run(), fragment=fragment), "compare") == "off"


GO_TO = """hash => new Promise((done) => {
  addEventListener("hashchange", () => done({ ...lens.state }), { once: true });
  location.hash = hash;
})"""


def test_a_changed_address_is_followed(shown):
    lens = shown()
    lens.evaluate(GO_TO, "#head=1.0&prompt=1&step=40")
    expect(lens.locator("#detail-title")).to_have_text("L1 H0")
    expect(lens.locator("#step-number")).to_have_text("step 40")
    assert_drawn(thumbnails(lens, a_run()), np.sqrt(a_run().weights[40][1]), tint(lens))


def test_a_link_is_followed_while_the_page_replaces_its_own_address(shown):
    lens = shown()
    change = "location.hash = '#head=1.0&step=40'; history.replaceState(null, '', '#head=0.0')"
    lens.evaluate(change)  # the event comes after both
    expect(lens.locator("#detail-title")).to_have_text("L1 H0")


def test_values_of_a_link_that_make_no_sense_are_ignored(shown):
    lens = shown()
    usual = lens.evaluate("({ ...window.lens.state })")
    for bad in (
        "prompt=3",
        "prompt=-1",
        "prompt=1.5",
        "prompt=x",
        "step=41",
        "step=",
        "step=constructor",
        "head=2.0",
        "head=0.3",
        "head=1",
        "head=-1.0",
        "head=.",
        "query=12",
        "query=-1",
        "query=NaN",
        "sort=nothing",
        "sort=-__proto__",
        "filter=entropy",
        "filter=entropy:x",
        "filter=entropy:1e999",
        "filter=nothing:0.5",
        "scale=cubic",
        "first=1",
        "compare=run",
        "compare=step:41",
        "compare=constructor",
        "show=c",
        "theme=%00",
        "%",
        "&&==&",
        HOSTILE,
    ):
        assert lens.evaluate(GO_TO, f"#{bad}") == usual, bad
    found = lens.evaluate(GO_TO, "#prompt=99&step=zz&scale=linear&head=1.1")
    assert found == usual | {"scale": "linear", "layer": 1, "head": 1}  # the rest still counts


def test_the_link_is_copied(shown):
    lens = shown(fragment="#head=1.1", permissions=["clipboard-read", "clipboard-write"])
    lens.keyboard.press("s")
    lens.locator("#copy-link").click()
    expect(lens.locator("#message")).to_have_text("The link is copied.")
    link = lens.evaluate("navigator.clipboard.readText()")
    assert link.startswith("file://")
    assert link.endswith("page.html#head=1.1&scale=linear")


# ------------------------------------------------------------------------------ keyboard


PRESSED = [  # from a view, a key and what it changes
    ("head=0.1", "ArrowRight", "head", 2),
    ("head=0.1", "ArrowLeft", "head", 0),
    ("head=0.1", "ArrowDown", "layer", 1),
    ("head=1.1", "ArrowUp", "layer", 0),
    ("head=0.1", "ArrowUp", "layer", 0),  # at the edge it stays
    ("head=0.1", "Escape", "layer", None),
    ("step=120", ",", "frame", 2),
    ("step=120", "[", "frame", 2),
    ("step=40", ".", "frame", 2),
    ("step=40", "]", "frame", 2),
    ("step=120", ".", "frame", 3),
    ("prompt=0", "p", "prompt", 1),
    ("prompt=2", "p", "prompt", 0),
    ("head=0.1", "Shift+ArrowUp", "query", 10),
    ("head=0.1&query=5", "Shift+ArrowDown", "query", 6),
    ("scale=sqrt", "s", "scale", "linear"),
    ("scale=linear", "s", "scale", "sqrt"),
    ("first=shown", "h", "hideFirst", True),
    ("first=hidden", "h", "hideFirst", False),
    ("compare=off", "d", "compare", "step:0"),
    ("compare=step:40", "d", "compare", "off"),
    ("compare=off", "d", "compare", "step:40"),  # what was compared with last
    ("theme=light", "t", "theme", "dark"),
    ("theme=dark", "t", "theme", "light"),
]


def test_every_key_does_what_the_help_says(shown):
    lens = shown()
    for number, (fragment, key, what, value) in enumerate(PRESSED):
        lens.evaluate(GO_TO, f"#{fragment}&number={number}")
        lens.keyboard.press(key)
        assert state(lens, what) == value, (fragment, key)


def test_the_help_lists_the_keys(shown):
    lens = shown()
    lens.keyboard.press("?")
    keys = " ".join(lens.locator("#help kbd").all_inner_texts())
    assert keys == "← → ↑ ↓ Enter Esc , . Space p Shift ← → ↑ ↓ s h d t ?"
    assert lens.locator("#help dt[id^='about-']").count() == len(STATISTICS)
    lens.keyboard.press("h")  # not while the help is open
    assert state(lens, "hideFirst") is False
    lens.keyboard.press("Escape")
    assert not lens.locator("#help").is_visible()


def test_space_plays_and_arrows_go_through_the_grid(shown):
    lens = shown(fragment="#step=80")
    tile(lens, 0, 0).focus()
    lens.keyboard.press("ArrowRight")
    lens.keyboard.press("ArrowDown")
    expect(tile(lens, 1, 1)).to_be_focused()
    assert state(lens, "layer") is None  # only in focus
    lens.locator("#speed").select_option("10")
    tile(lens, 1, 1).focus()
    lens.keyboard.press("Space")
    expect(lens.locator("#step-number")).to_have_text("step 120")
    expect(lens.locator("#play")).to_have_attribute("aria-label", "play")
    lens.keyboard.press("Enter")
    assert lens.locator("#detail-title").inner_text() == "L1 H1"
    lens.keyboard.press("Escape")
    expect(tile(lens, 1, 1)).to_be_focused()


def test_arrows_follow_the_sorted_order(shown):
    lens = shown(fragment="#sort=-entropy")
    order = ranked(a_run().rows[120].values["entropy"], descending=True)
    tile(lens, *order[0]).click()
    lens.keyboard.press("ArrowRight")
    assert (state(lens, "layer"), state(lens, "head")) == order[1]
    lens.locator("#next-head").click()
    assert (state(lens, "layer"), state(lens, "head")) == order[2]


def test_the_prompt_is_read_by_arrows(shown):
    lens = shown(fragment="#head=0.1&query=5")
    lens.locator("#text").focus()
    lens.keyboard.press("ArrowLeft")
    assert (state(lens, "query"), state(lens, "head")) == (4, 1)
    assert readout_query(lens) == '"⏎" (4)'
    lens.keyboard.press("Shift+ArrowLeft")
    assert lens.locator("#readout").inner_text().startswith('"⏎" (4) looks at " the" (3): ')


def test_keys_that_a_field_needs_are_left_to_it(shown):
    lens = shown(a_run(), a_run("other", seed=2))
    lens.locator("#prompt").focus()
    lens.keyboard.press("s")
    assert state(lens, "scale") == "sqrt"
    lens.locator("#step").focus()
    lens.keyboard.press("ArrowLeft")
    assert state(lens, "frame") == 2
    lens.locator("#first-column").focus()
    lens.keyboard.press("Space")
    assert state(lens, "hideFirst") is True
    assert lens.locator("#play").get_attribute("aria-label") == "play"


def test_every_control_is_reached_by_tab_and_shows_it(shown):
    difference = second_run().rows[120].values["entropy"] - a_run().rows[120].values["entropy"]
    layer, head = ranked(difference, descending=False)[0]  # which the filter leaves out
    view = f"#head={layer}.{head}&sort=-entropy&filter=entropy:0"
    lens = shown(a_run(), second_run(), fragment=view)
    assert tile(lens, layer, head).is_hidden()
    controls = lens.locator("main button:not(.head, .chart button), main select, main input")
    wanted = {
        id
        for id in controls.evaluate_all("all => all.map((node) => node.id)")
        if id and lens.locator(f"#{id}").is_visible()
    }
    assert {"play", "step", "prompt", "filter-value", "compare-file", "close"} <= wanted
    reached = set()
    active = """() => {
      const node = document.activeElement;
      const shown = node.closest("label.file, .segments label") ?? node;
      const style = getComputedStyle(shown);
      return [node.id || node.className, style.outlineStyle !== "none" && style.outlineWidth];
    }"""
    for _ in range(60):
        lens.keyboard.press("Tab")
        name, outline = lens.evaluate(active)
        if name:
            assert outline not in (False, "0px"), name
        reached.add(name)
    assert wanted <= reached
    assert any(name.startswith("head") for name in reached), "one of the heads that are left"


def test_the_grid_keeps_a_tab_stop_when_heads_are_left_out(shown):
    lens = shown(fragment="#sort=-entropy")
    tile(lens, *ranked(a_run().rows[120].values["entropy"], descending=False)[0]).click()
    stop = lens.locator(".head[tabindex='0']:visible")
    assert stop.get_attribute("aria-pressed") == "true"
    lens.locator("#filter-statistic").select_option("entropy")
    lens.locator("#filter-value").fill("40")
    assert stop.count() == 1
    assert stop.get_attribute("aria-pressed") == "false"


# ------------------------------------------------------------------------------ small windows


def test_it_fits_a_phone(shown):
    run = a_run("2026-11-21_gpt2-12x768" * 4, 12, 12)
    lens = shown(run, viewport={"width": 360, "height": 740})
    lens.locator("#options").click()
    assert lens.locator("#scale").is_visible()
    for fragment in ("prompt=0", "head=3.7&compare=step:0", "sort=-entropy&head=3.7"):
        lens.evaluate(GO_TO, f"#{fragment}")
        assert lens.evaluate("document.documentElement.scrollWidth") == 360
        read = "all => all.map((node) => node.getBoundingClientRect().toJSON())"
        boxes = lens.locator(".head:visible, main canvas:visible").evaluate_all(read)
        assert len(boxes) > 2 * 144
        assert min(box["left"] for box in boxes) >= 0
        assert max(box["right"] for box in boxes) <= 360
        assert min(box["width"] for box in boxes) >= 20
    lens.locator("#options").click()
    assert not lens.locator("#scale").is_visible()


def test_a_tap_reads_a_cell(shown):
    lens = shown(a_run(), viewport={"width": 360, "height": 740}, has_touch=True)
    tile(lens, 1, 0).tap()
    assert lens.locator("#detail-title").inner_text() == "L1 H0"
    expect(lens.locator("#map")).to_be_in_viewport(ratio=0.9)
    lens.touchscreen.tap(*cell(lens, 9, 4))
    said = lens.locator("#readout").inner_text()
    assert said.startswith('"," (9) looks at "⏎" (4): ')
    assert state(lens, "query") == 9


def test_resizing_lays_out_anew(shown):
    lens = shown(fragment="#head=0.0", viewport={"width": 1280, "height": 800})
    wide = lens.locator("#app.wide")
    expect(wide).to_have_count(1)
    lens.set_viewport_size({"width": 500, "height": 400})  # a panel of a dashboard
    expect(wide).to_have_count(0)
    assert lens.evaluate("document.documentElement.scrollWidth") == 500


# ------------------------------------------------------------------------------ frames


def test_it_works_in_a_sandboxed_frame(tmp_path, write, opened):
    """As Weights & Biases shows it: no address of its own, no storage, no network."""
    text = html.escape(write(a_run()).read_text(encoding="utf-8"))
    host = tmp_path / "host.html"
    frame = f'<iframe sandbox="allow-scripts" width="600" height="420" srcdoc="{text}"></iframe>'
    host.write_text(f"<!doctype html><meta charset=utf-8>{frame}", encoding="utf-8")
    outside = opened(host)
    lens = outside.frame_locator("iframe")
    ready(lens)
    assert lens.locator(".head").count() == 6
    lens.locator(".head").nth(4).click()
    weights = np.sqrt(a_run().weights[120][0][1, 1])
    assert_drawn(pixels(lens.locator("#map"))[0], weights, [238, 238, 235])
    lens.locator("#copy-link").click()
    field = lens.locator("#link-text")
    assert field.is_visible()
    assert field.input_value() == "#head=1.1"
    chosen = field.evaluate("field => field.value.slice(field.selectionStart, field.selectionEnd)")
    assert chosen == "#head=1.1"
    field.fill("#head=0.2&prompt=1")
    field.press("Enter")
    expect(lens.locator("#detail-title")).to_have_text("L0 H2")
    lens.locator("#link-close").click()
    assert not field.is_visible()
    lens.locator("#step").fill("0")
    expect(lens.locator("#step-number")).to_have_text("step 0")


# ------------------------------------------------------------------------------ safety


def test_hostile_text_stays_text(shown):
    tokens = [HOSTILE, "\u202ertl", "\x00\x1b", "\u2028", "", "x" * 300, "<0xE2>", "\ud83d\ude00"]
    tokens[-1] = tokens[-1].encode("utf-16", "surrogatepass").decode("utf-16")
    run = a_run(
        HOSTILE, prompts=(prompt(HOSTILE, tokens), PROMPTS[2]), steps=(0, 40), history=(0, 40)
    )
    lens = shown(run, run, title=HOSTILE, fragment="#head=0.0&query=0")
    assert lens.title() == HOSTILE
    assert HOSTILE in lens.locator("#what").inner_text()
    assert HOSTILE in lens.locator("#compare-note").inner_text()
    assert lens.locator("#text [data-token='0']").text_content().startswith("</script><img src=x")
    assert HOSTILE[:30] in lens.locator("#readout").inner_text()
    lens.keyboard.press("?")
    lens.keyboard.press("Escape")
    assert lens.locator("#prompt option").first.inner_text().startswith(f"1: {HOSTILE[:40]}")
    lens.mouse.move(*cell(lens, 7, 1, size=len(tokens)))
    assert "\u202e" not in lens.locator("#readout").inner_text()  # it would turn the sentence
    lens.locator("#copy-link").click()
    assert lens.locator("img").count() == 0
    assert lens.locator("script").count() == 2


def test_nothing_but_the_page_s_own_script_can_run(write, browser):
    """The policy holds where the escaping would not."""
    path = write(a_run())
    text = path.read_text(encoding="utf-8")
    slipped = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title=1\">"
    assert "<main" in text
    path.write_text(text.replace("<main", f"{slipped}<main", 1), encoding="utf-8")
    lens = browser.new_page()
    said = []
    lens.on("console", lambda message: said.append(message.text))
    lens.goto(path.as_uri())
    ready(lens)
    assert lens.title() == "attention"
    assert [text for text in said if "script-src" in text and "inline" in text]
    fetched = "fetch('data:text/plain,x').then(() => 'fetched', () => 'refused')"
    assert lens.evaluate(fetched) == "refused"
    lens.close()


# ------------------------------------------------------------------------------ odd sizes


def test_one_layer_one_head_one_token(shown):
    one = prompt("1-hi", ["Hi"])
    lens = shown(a_run("one", 1, 1, (one,), (5,), (5,)), fragment="#head=0.0")
    (found,) = pixels(lens.locator("#map"))
    assert found.shape == (1, 1, 3)
    assert np.abs(found[0, 0] - VIRIDIS[255]).max() <= 3
    assert lens.locator("#readout").inner_text() == '"Hi" (0) looks most at "Hi" (0): 1.000'
    for key in ("s", "h", "d", "t", "p", ".", ",", "Space", "ArrowRight", "Shift+ArrowDown"):
        lens.keyboard.press(key)
    assert lens.locator(".head").count() == 1


def test_the_largest_gpt2_fits(shown):
    run = a_run("xl", 48, 25, (PROMPTS[1],), (0,), (0,))
    lens = shown(run)
    assert lens.locator("button.head").count() == 1200
    assert_drawn(thumbnails(lens, run), np.sqrt(run.weights[0][0]), tint(lens))
    assert lens.evaluate("document.documentElement.scrollWidth") <= 1280


def test_it_says_how_long_it_took(shown):
    lens = shown()
    assert lens.evaluate("window.lens.timing.ready") > 0
    assert lens.evaluate("window.lens.redraw()") >= 0


# ------------------------------------------------------------------------------ at bad times

DISTURB_DECODING = """
const inflated = Response.prototype.arrayBuffer;
Response.prototype.arrayBuffer = async function () {
  const bytes = await inflated.call(this);
  dispatchEvent(new Event("resize"));
  for (const key of ["t", "s", "d", ".", "ArrowRight", "ArrowDown"]) {
    const how = { key, shiftKey: key === "ArrowDown", bubbles: true };
    document.body.dispatchEvent(new KeyboardEvent("keydown", how));
  }
  const head = document.querySelector(".head");
  if (head?.checkVisibility()) head.dispatchEvent(new Event("pointerover", { bubbles: true }));
  return bytes;
};"""


def test_nothing_breaks_while_the_first_weights_are_decoded(write, opened):
    lens = opened(write(a_run()), "#head=0.1&step=0", before=DISTURB_DECODING)
    ready(lens)
    assert not lens.locator("#error").is_visible()
    assert lens.locator("#detail-title").inner_text()


def test_nothing_breaks_while_another_step_is_decoded(write, opened):
    lens = opened(write(a_run()), before="window.requestIdleCallback = () => {};")
    ready(lens)
    lens.evaluate("""() => {
      lens.update({ frame: 0 });
      dispatchEvent(new Event("resize"));
      document.getElementById("theme").click();
      document.querySelector(".head").dispatchEvent(new Event("pointerover", { bubbles: true }));
    }""")
    expect(lens.locator("#step-number")).to_have_text("step 0")
    assert_drawn(thumbnails(lens, a_run()), np.sqrt(a_run().weights[0][0]), tint(lens))


def damaged(change):
    data = json.loads(json.dumps(a_run().data))
    change(data)
    return page([data], "damaged")


def cut(data, key):
    data[key] = data[key][: len(data[key]) // 2]


def too_short(data):
    raw = zlib.decompress(base64.b64decode(data["frames"][-1]["weights"]))
    data["frames"][-1]["weights"] = base64.b64encode(zlib.compress(raw[:-1])).decode()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda d: cut(d["frames"][-1], "weights"),
            "The weights of step 120 of first are damaged.",
        ),
        (too_short, "The weights of step 120 of first are damaged."),
        (lambda d: cut(d, "history"), "The statistics of first are damaged."),
        (lambda d: d.pop("layers"), "This is not a page of the attention lens: layers or heads"),
        (lambda d: d.update(frames=[]), "This is not a page of the attention lens: it has no weig"),
    ],
    ids=["weights", "too-short", "history", "layers", "frames"],
)
def test_broken_data_is_one_readable_line(tmp_path, opened, change, said):
    path = tmp_path / "page.html"
    path.write_text(damaged(change), encoding="utf-8")
    lens = opened(path)
    error = lens.locator("#error")
    expect(error).to_be_visible()
    assert error.inner_text().startswith(said)
    assert "\n" not in error.inner_text()
    assert not lens.locator("#app").is_visible()


def test_a_page_cut_off_while_it_was_written_says_so(write, opened):
    path = write(a_run())
    text = path.read_text(encoding="utf-8")
    data, rest = text.index(START) + len(START), text.index(END, text.index(START))
    path.write_text(text[: data + 500] + text[rest:], encoding="utf-8")
    lens = opened(path)
    expect(lens.locator("#error")).to_have_text(re.compile("its data block is not JSON"))


def test_an_old_browser_is_told_so(write, opened):
    lens = opened(write(a_run()), before="delete window.DecompressionStream;")
    expect(lens.locator("#error")).to_have_text(re.compile("This browser is too old"))
