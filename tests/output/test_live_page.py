"""Pages that follow runs (scripts/view.py) in Chromium: runs that grow, are killed and resume."""

import itertools
import json
import shutil
import signal
from pathlib import Path

import pytest
from helpers import TEXT, TIMEOUT, TINY, pages
from helpers.live import RUN, GrowingRun, live_command, serving
from helpers.runs import train_in
from playwright.sync_api import expect

from headlens import KINDS, read_snapshot, write_snapshot

ports = itertools.count(8200, 30)


@pytest.fixture
def growing(tmp_path, finished):
    return GrowingRun(finished, tmp_path / "runs" / "first")


@pytest.fixture
def live(tmp_path):
    with serving(tmp_path / "runs", next(ports)) as started:
        yield started


@pytest.fixture
def visit(window, live):
    """visit("run/first/") -> a page of the server. Fails when a script failed or was refused. view:
    the link to all heads, or ""."""
    opened, wrong = [], []

    def visit_page(path, view="#view=all", **options):
        page = window(**options).new_page()
        opened.append(page)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text))
        page.goto(f"{live.address}{path}{'' if '#' in path else view}")
        return page

    yield visit_page
    for page in opened:
        page.close()
    # The browser writes a line for each request without an answer.
    assert [text for text in wrong if "Failed to load resource" not in text] == []


UNTIL = """async (seconds) => {
  for (const end = Date.now() + 1000 * seconds; !(CONDITION);) {
    if (Date.now() > end) throw new Error("waited too long");
    await new Promise((done) => setTimeout(done, 20));
  }
}"""  # not wait_for_function: the policy of the page forbids its eval


def wait_until(page, condition):
    page.evaluate(UNTIL.replace("CONDITION", condition), TIMEOUT)


def shows_steps(lens, *steps):
    """Waits until the page has exactly these steps."""
    shown = "window.lens.runs[0].frames.map((frame) => frame.step).join()"
    wait_until(lens, f"{shown} === '{','.join(map(str, steps))}'")


def shown_step(lens):
    return int(lens.locator("#step-number").inner_text().removeprefix("step "))


def test_a_page_fills_with_the_first_snapshot_and_follows_the_run(growing, visit):
    lens = visit("run/first/", view="")
    expect(lens.locator("#error")).to_be_visible()
    expect(lens.locator("#app")).to_be_hidden()
    for tab in ("losses", "heads"):  # they can be changed before the first snapshot
        lens.get_by_role("tab", name=tab).click()
    expect(lens.locator("#error")).to_be_visible()
    growing.add(0)
    pages.ready(lens)
    expect(lens.locator("#story")).to_be_visible()
    lens.locator("#show-all").click()
    expect(lens.locator("#error")).to_be_hidden()
    expect(lens.locator("#time")).to_be_hidden()  # one step
    pages.tile(lens, 1, 0).click()
    lens.locator("#prompt").select_option("1")
    growing.add(1)
    shows_steps(lens, 0, 1)
    expect(lens.locator("#time")).to_be_visible()
    growing.add(2, 3)
    shows_steps(lens, 0, 1, 2, 3)
    assert shown_step(lens) == 3
    assert [pages.state(lens, key) for key in ("layer", "head", "prompt")] == [1, 0, 1]
    assert pages.state(lens, "frame") == int(lens.locator("#step").get_attribute("max")) == 3
    points = "() => window.lens.runs[0].curves['validation loss'].length"
    assert lens.evaluate(points) == 2
    expect(lens.locator("#curves")).to_contain_text("validation")


@pytest.fixture
def named(tmp_path, finished):
    """A growing run whose heads get names: a tiny model has none after four steps."""
    copy = Path(shutil.copytree(finished, tmp_path / "named", symlinks=True))
    path = copy / "attention" / "statistics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        for head in range(min(row["step"], 2)):
            row["names"][1][head] = 1 + [*KINDS].index("previous_token")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return GrowingRun(copy, tmp_path / "runs" / "first")


def test_a_page_that_followed_a_run_equals_one_that_is_opened_at_its_end(named, visit):
    named.add(0)
    lens = visit("run/first/#head=1.1")
    pages.ready(lens)
    for step in (1, 2, 3, 4):
        named.add(step)
        shows_steps(lens, *range(step + 1))
    other = visit("run/first/#head=1.1")
    pages.ready(other)
    texts = []
    for page in (lens, other):
        page.evaluate(pages.DECODE_ALL)
        page.evaluate("() => window.lens.update()")
        bar = page.locator("#live").inner_text()
        texts.append([bar, page.locator("#app").inner_text()])
        texts[-1] += [canvas.tolist() for canvas in pages.pixels(page.locator("canvas:visible"))]
        texts[-1] += page.locator("#compare option").all_inner_texts()
        texts[-1] += page.locator("#marks i").evaluate_all("all => all.map((one) => one.title)")
    assert len(texts[0]) > 4
    assert "step 2" in texts[0][-1]
    is_same = texts[0] == texts[1]
    assert is_same
    lens.locator("#play").click()  # a listener that is there twice would stop it at once
    wait_until(lens, "window.lens.state.frame === 2")


def test_steps_that_the_user_has_chosen_stay(growing, visit):
    """The shown one, and the one that it is compared with."""
    growing.add(0, 1, 2)
    lens = visit("run/first/#compare=step:1&head=0.0")
    pages.ready(lens)
    lens.locator("#step").fill("1")
    expect(lens.locator("#step-number")).to_have_text("step 1")
    growing.add(3)
    shows_steps(lens, 0, 1, 2, 3)
    assert shown_step(lens) == 1
    lens.locator("#step").fill("3")  # at the end, the page follows again, also if it is not shown
    lens.get_by_role("tab", name="losses").click()
    growing.add(4)
    shows_steps(lens, 0, 1, 2, 3, 4)
    lens.get_by_role("tab", name="heads").click()
    expect(lens.locator("#step-number")).to_have_text("step 4")
    widths = lens.locator("canvas:visible").evaluate_all("all => all.map((one) => one.clientWidth)")
    assert len(widths) > 4
    assert min(widths) > 10
    expect(lens.locator("#compare-note")).to_contain_text("A: step 1. B: step 4.")


def test_steps_of_a_resumed_run_are_replaced(growing, visit):
    growing.add(0, 1, 2, 3)
    lens = visit("run/first/")
    pages.ready(lens)
    growing.remove_from(2)
    shows_steps(lens, 0, 1)
    assert shown_step(lens) == 1
    other = read_snapshot(growing.folder / "attention" / "step_00000000.npz")
    other.row.step = 2
    path = growing.folder / "attention" / "step_00000002.npz"
    growing.add(2)
    shows_steps(lens, 0, 1, 2)
    is_first = """() => { const [first, , last] = window.lens.runs[0].frames;
      return JSON.stringify(last.facts) === JSON.stringify(first.facts); }"""
    lens.evaluate(pages.DECODE_ALL)
    assert not lens.evaluate(is_first)
    write_snapshot(path, other)  # the same step again, with another content
    growing.add(3)
    shows_steps(lens, 0, 1, 2, 3)
    lens.evaluate(pages.DECODE_ALL)
    assert lens.evaluate(is_first)


def test_the_story_ends_before_new_steps_are_shown(growing, visit):
    growing.add(0, 1, 2)
    lens = visit("run/first/", view="")
    pages.ready(lens)
    play = lens.locator("#story-play")
    expect(play).to_have_attribute("aria-label", "pause")
    growing.add(3, 4)
    shows_steps(lens, 0, 1, 2)
    expect(play).to_have_attribute("aria-label", "play")
    shows_steps(lens, 0, 1, 2, 3, 4)


def test_heads_that_are_switched_off_are_on_again_when_the_run_is_resumed(named, visit):
    """Only the last step of a run has predictions without heads."""
    path = named.finished / "attention" / "step_00000004.npz"
    last = read_snapshot(path)
    last.details["without"] = {"previous_token": last.details["predictions"]}
    write_snapshot(path, last)
    named.add(*range(5))
    lens = visit("run/first/", "#view=story&prompt=0")
    pages.ready(lens)
    lens.locator("#story-cards .switch").click()
    expect(lens.locator("#story-cards .off")).to_have_count(1)
    named.remove_from(3)
    named.add(3)
    shows_steps(lens, 0, 1, 2, 3)
    expect(lens.locator("#story-cards article")).to_have_count(1)
    expect(lens.locator("#story-cards .off, #story-cards .switch")).to_have_count(0)
    expect(lens.locator("#story-line")).to_contain_text("step 3")


def test_a_stopped_server_and_a_removed_run_are_named(tmp_path, growing, window):
    growing.add(0, 1)
    page = window().new_page()
    lost = page.locator("#live b")
    with live_command(tmp_path / "runs", next(ports)) as address:
        page.goto(f"{address}run/first/#view=all")
        pages.ready(page)
        expect(lost).to_be_hidden()
    expect(lost).to_have_text("not connected")
    pages.tile(page, 0, 1).click()  # the page can still be used
    assert pages.state(page, "head") == 1
    growing.add(2)
    with live_command(tmp_path / "runs", int(address[:-1].rpartition(":")[2])) as again:
        assert again == address
        shows_steps(page, 0, 1, 2)
        expect(lost).to_be_hidden()
        growing.folder.rename(tmp_path / "moved")
        expect(lost).to_have_text("this run was removed")
        (tmp_path / "moved").rename(growing.folder)
        expect(lost).to_be_hidden()
    page.close()


def test_other_prompts_load_the_page_again(growing, visit, tmp_path_factory):
    growing.add(0, 1)
    lens = visit("run/first/#head=1.1")
    pages.ready(lens)
    growing.remove_from(0)
    folder = tmp_path_factory.mktemp("other")
    changed = [*RUN, "lens.prompts=[the bird]", "lens.repeat_length=0"]
    growing.finished = train_in(folder, "name=first", *changed)
    growing.add(0)
    expect(lens.locator("#prompt option")).to_have_count(1)
    pages.ready(lens)
    assert [pages.state(lens, key) for key in ("layer", "head")] == [1, 1]


def test_a_run_without_attention_has_no_heads(tmp_path, visit):
    train_in(tmp_path, "name=plain", "lens=off")
    page = visit("run/plain/")
    expect(page.locator("#error")).to_be_hidden()
    assert page.get_by_role("tab").all_inner_texts() == ["runs", "losses and samples", "settings"]
    expect(page.locator("#tab-training figure").first).to_be_visible()
    expect(page.locator("#live")).to_contain_text("finished")


def test_the_list_changes_with_the_runs(tmp_path, growing, visit, finished):
    page = visit("")
    rows = page.locator("#runs li")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("stopped")
    growing.add(0, 1, 2)
    expect(rows.locator("path.validation")).to_have_count(1)
    expect(rows).to_contain_text("step 2 of 4")
    shutil.copytree(finished, tmp_path / "runs" / "<b>second", symlinks=True)
    expect(rows).to_have_count(2)
    expect(page.locator("#runs")).to_contain_text("<b>second")
    picture = rows.first.locator("img")
    picture.evaluate("image => image.decode()")
    assert picture.evaluate("image => image.naturalWidth") > 1
    page.get_by_role("link", name="<b>second", exact=True).click()
    pages.ready(page)
    expect(page.locator("#name")).to_have_text("<b>second")
    page.get_by_role("tab", name="runs").click()  # the list is also a tab of each run
    expect(rows).to_have_count(2)
    shutil.rmtree(growing.folder)
    expect(rows).to_have_count(1)
    page.get_by_role("link", name="<b>second", exact=True).click()
    expect(page.locator("#tab-heads")).to_be_visible()


@pytest.mark.parametrize("size", [(1400, 900), (700, 900), (360, 640)])
def test_nothing_of_the_list_sticks_out(tmp_path, growing, visit, size):
    growing.add(0, 1, 2, 3, 4)
    shutil.copytree(growing.folder, tmp_path / "runs" / ("long name " * 20).strip())
    page = visit("", viewport={"width": size[0], "height": size[1]})
    rows = page.locator("#runs li")
    expect(rows).to_have_count(2)
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    outside = """row => [...row.querySelectorAll("*")].filter((node) => {
      const [inner, outer] = [node, row].map((one) => one.getBoundingClientRect());
      return inner.right > outer.right + 1 || inner.left < outer.left - 1;
    }).length"""
    assert [row.evaluate(outside) for row in rows.all()] == [0, 0]


def test_losses_and_samples_follow_the_run(growing, visit):
    page = visit("run/first/#tab=training")
    expect(page.locator(".result")).to_contain_text("No loss")
    growing.add(0, 1, 2)
    loss = page.locator("#tab-training figure").first
    expect(loss.locator("circle.validation")).to_have_count(2)
    expect(page.locator("#live")).to_contain_text("step 2 of 4")
    growing.add(3, 4)
    expect(loss.locator("circle.validation")).to_have_count(3)
    page.get_by_role("tab", name="heads").click()  # drawn for the first time
    page.locator(".head").first.wait_for(state="attached")
    shows_steps(page, 0, 1, 2, 3, 4)
    page.get_by_role("tab", name="settings").click()
    expect(page.locator("#tab-settings pre")).to_contain_text("emb_dim")


def test_a_page_follows_a_training_that_is_killed_and_resumed(tmp_path, server, visit):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    settings = [*TINY, "name=first", "data.path=text.txt", *RUN, "lens.every=50"]
    settings += ["trainer.eval_every=500", "trainer.save_every=125", "trainer.log_every=10"]
    training = server.start(tmp_path, *settings, "trainer.max_steps=5000")
    page = visit("")
    page.get_by_role("link", name="first", exact=True).click()
    pages.ready(page)
    bar = page.locator("#live")
    expect(bar).to_contain_text("running")
    page.locator("#show-all").click()
    pages.tile(page, 1, 1).click()

    def at_least(step):
        last, end = (
            "window.lens.runs[0].frames.at(-1).step",
            "window.lens.runs[0].frames.length - 1",
        )
        wait_until(page, f"{last} >= {step} && window.lens.state.frame === {end}")

    at_least(300)
    training.send(signal.SIGKILL)
    training.wait()
    expect(bar).to_contain_text("stopped")
    last = page.evaluate("() => window.lens.runs[0].frames.at(-1).step")
    assert 300 <= last < 5000
    end = last + 200
    server.start(tmp_path, *settings, f"trainer.max_steps={end}").wait()
    expect(bar).to_contain_text("finished")
    at_least(end)
    steps = page.evaluate("() => window.lens.runs[0].frames.map((frame) => frame.step)")
    files = sorted((tmp_path / "runs" / "first" / "attention").glob("*.npz"))
    written = [int(path.stem[5:]) for path in files]
    assert (steps[0], steps[-1]) == (0, end)
    assert {*steps} <= {*written}
    assert [pages.state(page, key) for key in ("layer", "head")] == [1, 1]
    page.evaluate(pages.DECODE_ALL)
    expect(page.locator("#subject")).to_contain_text(f"step {end:,}")
    rows = (tmp_path / "runs" / "first" / "metrics.jsonl").read_text().splitlines()
    losses = [row["val/loss"] for row in map(json.loads, rows) if "val/loss" in row]
    shown = "window.lens.runs[0].curves['validation loss'].map((at) => at[1])"
    wait_until(page, f"{shown}.length === {len(losses)}")  # read less often than the state
    assert page.evaluate(shown) == [round(loss, 4) for loss in losses]
