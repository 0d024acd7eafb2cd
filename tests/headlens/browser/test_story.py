"""The first screen of the page in Chromium: it plays once, its heads can be switched off, a token
shows what it attends to, and all heads are one click away."""

import dataclasses
import io
import math
import re

import numpy as np
import pytest
from helpers import pages
from helpers.pages import HOSTILE, STEPS, a_run, prompt, second_run
from helpers.stories import PERIOD, PLANTED, REPEATED, SOME, a_story, story_run
from PIL import Image
from playwright.sync_api import expect

from headlens import run_data
from headlens.story import story

COPIES = "#view=story&prompt=1"
# Reads the headlines in the order in which they appear.
WATCH = """addEventListener("DOMContentLoaded", () => {
  window.headlines = [];
  new MutationObserver(() => headlines.push(document.querySelector("#story-headline").textContent))
    .observe(document.querySelector("#story-headline"), { childList: true });
});"""
# The number of pixels with a line.
DRAWN = """node => {
  const { width, height } = node;
  const copy = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(node, 0, 0);
  const { data } = copy.getImageData(0, 0, width, height);
  let count = 0;
  for (let n = 3; n < data.length; n += 4) count += data[n] > 40;
  return count;
}"""


INSIDE = """node => [...node.querySelectorAll("[data-token]")].every((span) =>
  !span.offsetWidth || span.getBoundingClientRect().right <= innerWidth)"""


def told(run, number):
    """Returns what headlens/story.py tells about a prompt of a run."""
    last, steps = run.snapshots[-1], [one.step for one in run.snapshots]
    return story(last, steps, list(run.rows.values()), {})["prompts"][number]


def headline(lens):
    return lens.locator("#story-headline")


def reading(lens):
    """Returns the sentence about the query token."""
    return lens.locator("#story-reading").inner_text()


def token(lens, number):
    return lens.locator(f"#story-tokens [data-token='{number}']")


def chance(lens, number):
    """Returns the probability that a token is drawn with."""
    return token(lens, number).evaluate("node => Number(node.style.getPropertyValue('--p'))")


def still(lens):
    """Waits until nothing moves: two pictures are equal."""
    lens.wait_for_function("""() => new Promise((done) => {
      const picture = () => document.querySelector("#story-lines").toDataURL() +
        document.querySelector("#story-tokens").innerHTML;
      const before = picture();
      setTimeout(() => done(picture() === before), 150);
    })""")


def bar(lens, number, p):
    """Returns the height in pixels of the bar below a token of a text, with a probability."""
    token(lens, number).evaluate("(node, p) => node.style.setProperty('--p', p)", p)
    image = Image.open(io.BytesIO(token(lens, number).screenshot())).convert("RGB")
    background = image.getpixel((0, image.height - 1))  # a bar is narrower than its token
    column = [image.getpixel((image.width // 2, y)) for y in range(image.height - 10, image.height)]
    return sum(pixel != background for pixel in column)


@pytest.fixture
def stills(shown):
    """stills(run, fragment) -> the first screen without motion."""
    return lambda run=None, fragment=COPIES, **options: shown(
        run or a_story(), fragment=fragment, reduced_motion="reduce", **options
    )


def test_it_plays_once_and_stops_at_the_end(write, opened):
    run = a_story()
    lens = opened(write(run), before=WATCH)
    pages.ready(lens)
    play = lens.locator("#story-play")
    expect(play).to_have_attribute("aria-label", "pause")
    expect(play).to_have_attribute("aria-label", "play")
    lines = [frame["headline"] for frame in told(run, 0)["frames"]]
    wanted = [line for n, line in enumerate(lines) if n == 0 or line != lines[n - 1]]
    seen = lens.evaluate("headlines")
    assert [line for n, line in enumerate(seen) if n == 0 or line != seen[n - 1]] == wanted
    assert pages.state(lens, "frame") == len(STEPS) - 1
    still(lens)
    assert pages.state(lens, "frame") == len(STEPS) - 1
    play.click()  # again from the beginning
    expect(headline(lens)).to_have_text(lines[0])
    play.click()
    expect(play).to_have_attribute("aria-label", "play")


def test_no_motion_where_the_system_asks_for_none(write, opened):
    lens = opened(write(a_story()), reduced_motion="reduce")
    pages.ready(lens)
    assert pages.state(lens, "frame") == len(STEPS) - 1
    expect(lens.locator("#story-play")).to_have_attribute("aria-label", "play")
    expect(headline(lens)).to_have_text(told(a_story(), 0)["frames"][-1]["headline"])


def test_time_line(stills):
    run = a_story()
    lens, one = stills(), told(run, 1)
    assert lens.locator("#story-births i").count() == len(one["births"])
    for number, frame in enumerate(one["frames"]):
        lens.locator("#story-step").fill(str(number))
        expect(headline(lens)).to_have_text(frame["headline"])
        assert frame["line"] in lens.locator("#story-line").inner_text()
        assert f"{STEPS[number]}" in lens.locator("#story-now").inner_text()
        losses = run.frames[STEPS[number]].details["predictions"]["of_prompts"][1]["losses"]
        for at in range(PERIOD + 2, 2 * PERIOD + 1):
            assert chance(lens, at) == pytest.approx(math.exp(-losses[at - 1]), abs=1e-3)
        future = lens.locator("#story-births i.future").count()
        assert future == sum(birth["step"] > STEPS[number] for birth in one["births"])
    lens.locator("#story-step").focus()
    lens.keyboard.press("ArrowLeft")
    assert pages.state(lens, "frame") == len(STEPS) - 2


def test_heads_can_be_switched_off(stills):
    lens, card = stills(), told(a_story(), 1)["cards"][0]
    switch = lens.get_by_role("switch").first
    drawn = lens.locator("#story-lines").evaluate(DRAWN)
    assert drawn > 500
    arc, reading = told(a_story(), 1)["arc"], lens.locator("#story-reading")
    expect(reading).to_contain_text(arc)
    assert chance(lens, PERIOD + 2) > 0.9
    before = headline(lens).inner_text()
    lens.locator("#story-step").fill("0")
    switch.click()
    # The heads of the last step were switched off.
    assert pages.state(lens, "frame") == len(STEPS) - 1
    expect(switch).to_have_attribute("aria-checked", "false")
    expect(headline(lens)).to_have_text(card["without"]["headline"])
    expect(lens.locator("#story-line")).to_contain_text(f"step {STEPS[-1]}")
    assert chance(lens, PERIOD + 2) == pytest.approx(0.05, abs=1e-3)
    assert lens.locator("#story-lines").evaluate(DRAWN) == 0
    expect(reading).not_to_contain_text(arc)  # it is not drawn
    expect(lens).to_have_url(re.compile("off="))
    address, others = lens.url, lens.get_by_role("switch").nth(1)
    others.click()  # one name at a time: no other was measured
    expect(switch).to_have_attribute("aria-checked", "true")
    expect(others).to_have_attribute("aria-checked", "false")
    expect(lens).not_to_have_url(address)  # it follows the switch
    again = stills(fragment=lens.evaluate("location.hash") + "&view=story")
    expect(headline(again)).to_have_text(headline(lens).inner_text())
    others.focus()
    lens.keyboard.press("Space")
    expect(headline(lens)).to_have_text(before)
    assert lens.locator("#story-lines").evaluate(DRAWN) > 500


def test_without_heads_the_other_heads_attend_as_they_do_then(stills):
    run = story_run(PLANTED)
    last = run.snapshots[-1]
    size = len(REPEATED.tokens)
    elsewhere = [0 if key else 255 for query in range(size) for key in range(query + 1)]
    last.details["without"]["previous_token"]["attention"] = {
        "induction": {"codes": [[], elsewhere], "values": [None, 0.25]}
    }
    page = run_data(run.snapshots, list(run.rows.values()))
    lens = stills(dataclasses.replace(run, data=page))
    token(lens, PERIOD + 3).click()
    assert "“d”" in reading(lens)
    lens.locator("article[data-name='previous_token'] .switch").click()
    assert "“○” 100" in reading(lens)
    lens.keyboard.press("Escape")
    assert "25" in reading(lens)  # of the attention of the induction head
    lens.locator("#story-step").fill("0")
    assert lens.get_by_role("switch", checked=False).count() == 0


def test_no_heads_are_off_at_another_step_or_after_all_heads(stills):
    lens = stills(fragment=f"{COPIES}&step=0&off=induction")
    wanted = told(a_story(), 1)["frames"]
    expect(headline(lens)).to_have_text(wanted[0]["headline"])
    lens.get_by_role("switch").first.click()
    lens.locator("#show-all").click()
    lens.keyboard.press(",")  # the step before
    expect(lens.locator("#message")).to_be_hidden()
    lens.locator("#show-story").click()
    expect(headline(lens)).to_have_text(wanted[-2]["headline"])


def test_a_kept_card_whose_heads_are_switched_off_shows_those_of_the_others(stills):
    lens = stills(fragment="#view=story")
    first = lens.locator("#story-cards article").first
    first.locator("canvas").click()
    first.locator(".switch").click()
    headline(lens).hover()
    still(lens)
    assert lens.locator("#story-lines").evaluate(DRAWN) > 0


def test_nothing_below_the_headline_moves(stills):
    lens = stills(viewport={"width": 560, "height": 800})
    picture = lens.locator("#story-picture")
    places = set()
    for number in range(len(STEPS)):
        lens.locator("#story-step").fill(str(number))
        places.add(picture.bounding_box()["y"])
    lens.get_by_role("switch").first.click()
    lens.evaluate("scrollTo(0, 0)")
    places.add(picture.bounding_box()["y"])
    assert len(places) == 1


def test_the_picture_is_in_sight_where_heads_are_switched_off_on_a_phone(stills):
    lens = stills(viewport={"width": 390, "height": 800})
    lens.get_by_role("switch").last.scroll_into_view_if_needed()
    lens.get_by_role("switch").last.click()
    expect(token(lens, PERIOD + 2)).to_be_in_viewport()


def test_a_token_shows_what_it_attends_to(stills):
    lens, query = stills(), PERIOD + 3
    everything = lens.locator("#story-lines").evaluate(DRAWN)
    token(lens, query).hover()
    reading = lens.locator("#story-reading")
    # Of PLANTED: induction to the token after the first "c", then the token before, then itself.
    expect(reading).to_contain_text(re.compile(r"“c”.*“d” \d+.*“b” \d+.*“c” \d+"))
    weights = a_story().frames[STEPS[-1]].codes[1][1, 1]
    row = weights[query * (query + 1) // 2 :][: query + 1]
    expect(reading).to_contain_text(f"{(row.max() / 255) ** 2:.0%}"[:-1])
    assert 0 < lens.locator("#story-lines").evaluate(DRAWN) < everything / 2
    headline(lens).hover()
    assert lens.locator("#story-lines").evaluate(DRAWN) == everything
    tokens = lens.locator("#story-tokens")
    tokens.focus()
    lens.keyboard.press("ArrowRight")
    first = told(a_story(), 1)["query"]
    assert pages.state(lens, "query") == first + 1
    expect(token(lens, first + 1)).to_have_class(re.compile("query"))
    lens.keyboard.press("ArrowUp")  # the same token of the first copy
    assert pages.state(lens, "query") == first + 1 - PERIOD


def test_a_click_keeps_what_pointing_shows(stills):
    lens = stills()
    lines = lens.locator("#story-lines")
    token(lens, PERIOD + 3).hover()
    shown, drawn = reading(lens), lines.evaluate(DRAWN)
    token(lens, PERIOD + 3).click()
    for other in (headline(lens), token(lens, PERIOD + 5)):
        other.hover()
        assert reading(lens).startswith(shown[:-1])
        assert lines.evaluate(DRAWN) == drawn
    token(lens, PERIOD + 5).click()
    assert reading(lens) != shown
    headline(lens).hover()
    lens.keyboard.press("Escape")
    assert lines.evaluate(DRAWN) > 2 * drawn
    token(lens, PERIOD).hover()  # what comes next is random
    assert "expects" not in reading(lens)


def test_cards_are_dim_before_a_head_has_the_name(stills):
    lens, one = stills(), told(a_story(), 1)
    notes = lens.locator("#story-cards p > span")
    effects = lens.locator("#story-cards .effect")
    for number, step in enumerate(STEPS):
        lens.locator("#story-step").fill(str(number))
        early = [step < card["since"] for card in one["cards"]]
        found = lens.locator("#story-cards article").evaluate_all(
            "all => all.map((node) => node.classList.contains('early'))"
        )
        assert found == early
        wanted = [
            card["early" if e else "note"] for card, e in zip(one["cards"], early, strict=True)
        ]
        assert notes.all_text_contents() == wanted
        assert effects.first.is_visible() == (step == STEPS[-1])  # it is about the last step


def test_a_name_at_the_time_line_shows_its_step_and_its_lines(stills):
    lens, one = stills(), told(a_story(), 1)
    for at, birth in enumerate(sorted(one["births"], key=lambda birth: birth["step"])):
        (card,) = (card for card in one["cards"] if card["name"] == birth["name"])
        for node in (lens.locator("#story-names button"), lens.locator("#story-births i")):
            lens.locator("#story-step").fill("0")
            node.nth(at).click()
            assert STEPS[pages.state(lens, "frame")] == birth["step"]
            assert card["lines"] in lens.locator("#story-line").inner_text()


def test_a_click_keeps_a_card(stills):
    lens, one = stills(), told(a_story(), 1)
    second = lens.locator("#story-cards article").nth(1)
    for node in (second.locator("h3 button"), second.locator("canvas")):
        node.click()
        headline(lens).hover()
        expect(second.locator("h3 button")).to_have_attribute("aria-pressed", "true")
        expect(lens.locator("#story-line")).to_contain_text(one["cards"][1]["lines"])
        node.click()
        headline(lens).hover()
        expect(lens.locator("#story-line")).to_contain_text(one["cards"][0]["lines"])


def test_all_heads_open_at_the_top(stills):
    lens = stills(viewport={"width": 460, "height": 500})
    lens.locator("#show-all").click()  # below the window
    expect(lens.locator("#grid")).to_be_visible()
    lens.wait_for_function("() => scrollY === 0")


def test_another_prompt_under_a_resting_pointer(stills):
    """It has fewer tokens and cards than the one before."""
    lens = stills()
    token(lens, 2 * PERIOD).hover()
    lens.keyboard.press("p")
    expect(lens.locator("#story-tokens [data-token]")).to_have_count(len(SOME.tokens))
    before = lens.locator("#story-reading").inner_text()
    lens.locator("#story-cards button").last.focus()
    lens.keyboard.press("p")
    lens.keyboard.press("p")
    expect(lens.locator("#story-reading")).to_have_text(before)
    for key in "vd":  # they change what only the screen of all heads shows
        lens.keyboard.press(key)
    assert [pages.state(lens, key) for key in ("map", "compare")] == ["weights", "off"]


def test_a_card_under_the_pointer_or_with_the_focus_lights_its_heads(stills):
    lens = stills()
    line = lens.locator("#story-line")
    usual = line.inner_text()
    card = lens.locator("#story-cards article").nth(1)
    for light, leave in (
        (card.hover, headline(lens).hover),
        (card.locator("h3 button").focus, lens.locator("#story-play").focus),
    ):
        light()
        expect(line).to_contain_text("L0 H2")
        leave()
        expect(line).to_have_text(usual)


def test_a_text_shows_the_next_tokens_and_grey_what_it_has_not_read(stills):
    lens, one = stills(fragment="#view=story"), told(a_story(), 0)
    expected = lens.locator("#story-next li")
    assert expected.count() == 6  # the right one is not among the five most likely
    expect(expected.last).to_have_class("right")
    expect(expected.last).to_contain_text(f"{100 / 20:.0f}")
    token(lens, one["query"]).hover()
    assert token(lens, one["query"] + 1).evaluate("node => node.className").split() == [
        "known",
        "after",
    ]
    token(lens, 2).click()
    assert pages.state(lens, "query") == 2
    assert lens.locator("#story-tokens .after").count() == len(SOME.tokens) - 3
    expect(lens.locator("#story-next")).to_contain_text("One two,")
    lens.locator("#story-prompt").select_option("1")
    expect(lens.locator("#story-next")).to_be_hidden()
    assert lens.locator("#story-tokens .row").count() == 2


def test_bars_below_a_text_say_what_its_colours_say(stills):
    lens = stills(fragment="#view=story&step=120")
    query = told(a_story(), 0)["query"]
    sizes = [bar(lens, 2, p) for p in (0, 0.5, 1)]
    assert sizes == sorted(set(sizes))
    assert 0 < sizes[0] < 3
    # No bar where nothing predicts the token, and none for a token that has not been read.
    assert bar(lens, 0, 1) == 0
    assert bar(lens, query + 1, 1) > 0
    token(lens, query).click()
    assert bar(lens, query + 1, 1) == 0


def test_the_time_line_is_in_the_window(stills):
    lens = stills(viewport={"width": 900, "height": 800})
    for number in (0, 1):
        lens.locator("#story-prompt").select_option(str(number))
        still(lens)
        box = lens.locator("#story-time").bounding_box()
        assert box["y"] + box["height"] <= 800


def test_names_at_the_time_line_have_the_colours_of_their_cards(stills):
    lens = stills()
    colour = "node => getComputedStyle(node).color"
    cards = lens.locator("#story-cards h3").evaluate_all(f"all => all.map({colour})")
    names = lens.locator("#story-names button").evaluate_all(f"all => all.map({colour})")
    assert len(names) == len(cards) == len(set(cards))
    assert set(names) == set(cards)


def test_all_heads_are_one_click_away_and_the_story_too(stills):
    lens = stills()
    card = told(a_story(), 1)["cards"][0]
    lens.locator("#story-cards p button").first.click()
    expect(lens.locator("#story")).to_be_hidden()
    head = divmod(card["heads"][0], 3)
    expect(lens.locator("#detail-title")).to_have_text("L{} H{}".format(*head))
    assert pages.state(lens, "prompt") == 1
    expect(lens).to_have_url(re.compile(r"head=\d"))
    again = stills(fragment=lens.evaluate("location.hash") + "&view=all")
    expect(again.locator("#detail-title")).to_have_text("L{} H{}".format(*head))
    lens.locator("#show-story").click()
    expect(headline(lens)).to_be_visible()
    expect(lens.locator("#grid")).to_be_hidden()
    lens.locator("#show-all").click()
    expect(lens.locator("#grid")).to_be_visible()
    assert pages.go_to(lens, "head=1.2")["view"] == "all"


def test_pages_of_two_runs_and_of_short_prompts_open_all_heads(shown):
    lens = shown(a_run(), second_run(), fragment="#view=story")
    expect(lens.locator("#grid")).to_be_visible()
    expect(lens.locator("#show-story")).to_be_hidden()
    few = story_run(
        {}, STEPS[-1:], repeated=prompt("2-few", ["<bos>", "a"]), text=prompt("1-few", ["a", "b"])
    )
    lens = shown(few, fragment="#view=story")
    expect(lens.locator("#grid")).to_be_visible()


def diverged():
    """Returns a run whose last step has no finite loss and weights of 0."""
    run = story_run(PLANTED, (0, 40))
    last = run.snapshots[-1]
    last.codes = [np.zeros_like(codes) for codes in last.codes]
    last.row.losses = [np.full_like(losses, np.nan) for losses in last.row.losses]
    for one in last.details["predictions"]["of_prompts"]:
        one["losses"] = [None] * len(one["losses"])
        one["probabilities"] = [[None] * len(row) for row in one["probabilities"]]
    from headlens import run_data

    run.data = run_data(run.snapshots, [one.row for one in run.snapshots])
    return run


def text_run(tokens):
    text = prompt("1-text", tokens)
    text.token_ids = [n % 20 for n in range(len(tokens))]
    return story_run({(0, 2): ("previous_token", 0), (1, 1): ("separator", 0)}, (0, 40), text=text)


def repeated_run(words):
    repeated = prompt("2-repeated", ["<bos>", *2 * words], period=len(words))
    repeated.token_ids = [0, *2 * [1 + n % 19 for n in range(len(words))]]
    return story_run({(0, 2): ("previous_token", 0)}, (0, 40), repeated=repeated)


RUNS = {
    "no names": lambda: a_run(),
    "one step": lambda: story_run(PLANTED, (120,)),
    "hostile": lambda: text_run([HOSTILE, "\u202eab", "\n", *[" x"] * 60]),
    "hebrew": lambda: text_run(list("שלום עולם, הנה פעמון. שמענו את הפעמון.")),
    "bytes": lambda: text_run([f"<0x{byte:02X}>" for byte in "鐘が鳴った。鐘の音".encode()]),
    "200 tokens": lambda: repeated_run([chr(97 + n % 26) for n in range(100)]),
    "words": lambda: repeated_run([" oak", " internationalization", "\n"] * 8),
    "600 heads": lambda: a_run(layers=25, heads=24, steps=(0, 120), history=(0, 120)),
    "diverged": diverged,
}


@pytest.mark.parametrize("name", RUNS)
def test_nothing_overflows_in_any_window(stills, name):
    run = RUNS[name]()
    for number in range(min(2, len(run.data["prompts"]))):
        lens = stills(run, f"#view=story&prompt={number}")
        for width, height in ((1400, 900), (460, 860), (460, 420)):
            lens.set_viewport_size({"width": width, "height": height})
            still(lens)
            expect(headline(lens)).not_to_be_empty()
            over = lens.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert over <= 0, (name, number, width)
            inside = lens.locator("#story-tokens").evaluate(INSIDE)
            assert inside, (name, number, width)
    assert lens.locator("#story-time").is_visible() == (name != "one step")


def test_the_picture_is_first_in_a_panel_of_a_dashboard(shown):
    """A frame of 460 x 420 pixels shows the headline and the whole picture of copying."""
    lens = shown(a_story(), fragment=COPIES, frame=(460, 420))
    boxes = [lens.locator(part).bounding_box() for part in ("#story-headline", "#story-tokens")]
    assert all(box["y"] >= 0 and box["y"] + box["height"] <= 420 for box in boxes)


def test_joined_letters_stay_joined_where_their_bytes_are_tokens(stills):
    text = "مرحبا بالعالم"
    lens = stills(text_run([f"<0x{byte:02X}>" for byte in text.encode()]), "#view=story")
    widths = lens.locator("#story-tokens").evaluate(
        """node => {
          const width = () => {
            const range = document.createRange();
            range.selectNodeContents(node);
            return range.getBoundingClientRect().width;
          };
          const ofTokens = width();
          node.textContent = node.textContent;
          return [ofTokens, width()];
        }"""
    )
    assert widths[0] == pytest.approx(widths[1], abs=2)


def test_the_part_that_fits_is_named(stills):
    lens = stills(RUNS["200 tokens"](), viewport={"width": 460, "height": 860})
    shown = lens.locator("#story-tokens [data-token]:visible").count()
    assert 40 < shown < 100
    assert f"first {(shown - 1) // 2} of 100" in lens.locator("#story-reading").inner_text()


def test_text_of_users_is_text(stills):
    lens = stills(RUNS["hostile"](), "#view=story")
    assert lens.locator("#story img").count() == 0
    expect(token(lens, 0)).to_have_text(HOSTILE)
    assert "\u202e" not in lens.locator("#story-tokens").inner_text()
    assert REPEATED.period == PERIOD
