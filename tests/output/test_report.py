"""The tabs of losses, samples and settings: their values in a browser, and the functions that
compute them."""

import json
import math
import re
import shlex

import pytest
from helpers.pages import CONTRASTS, HOSTILE, ready
from helpers.refusals import SPECIAL_FILES, time_limit
from helpers.runs import train_in
from playwright.sync_api import expect

from clearhead.output.charts import smooth, thin
from clearhead.output.report import sample_page, training_data, write_run_page

NAN = math.nan


@pytest.fixture
def run(tmp_path):
    """run(rows, samples=..., config=...) -> a run directory."""

    def make(rows=(), samples=(), config="", name="first"):
        folder = tmp_path / name
        folder.mkdir()
        for file, lines in (("metrics.jsonl", rows), ("samples.jsonl", samples)):
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (folder / file).write_text(text, encoding="utf-8")
        (folder / "config.yaml").write_text(config, encoding="utf-8")
        return folder

    return make


@pytest.fixture
def page_of(opened):
    """page_of(folder, state="finished") -> the opened page of a run directory."""

    def make(folder, state="finished"):
        page = opened(write_run_page(folder, state))
        ready(page)
        return page

    return make


def row(step, loss, **more):
    rates = {"train/tokens_per_second": 10.0 + step, "train/learning_rate": 1e-3}
    return {"step": step, "train/loss": loss, "train/tokens": 100 * step} | rates | more


def validation(loss, bits):
    return {"val/loss": loss, "val/bits_per_byte": bits}


ROWS = [
    {"step": 0} | validation(10.0, 4.0),
    row(10, 8.0) | validation(7.0, 3.0),
    row(20, 6.0),
    row(30, 5.0, **{"train/grad_norm": 1.5}) | validation(7.5, 3.25),
]
FINAL = {"step": 10, "windows": 1900, "loss": 7.25, "loss_error": 0.125, "bits_per_byte": 3.5}


def numbers(texts):
    return [re.findall(r"\d[\d,.]*", text) for text in texts]


def facts(page):
    """Returns {name: numbers in its value and its note}."""
    names = page.locator(".facts dt").all_inner_texts()
    return dict(zip(names, numbers(page.locator(".facts dd").all_inner_texts()), strict=True))


def drawn(plot, name):
    """Returns the points of a line, computed from its path and the ticks of the axes."""
    d = plot.locator(f"path[data-name='{name}']").get_attribute("d").replace("M", "L")
    pairs = [tuple(map(float, pair.split())) for pair in d.replace("h0", "").split("L")[1:]]
    across, down = scale(plot, "x"), scale(plot, "y")
    return [(across(x), down(y)) for x, y in pairs]


def scale(plot, axis):
    """Returns a function from a position on an axis, in percent, to the value."""
    ticks = plot.locator(f"text.{axis}").all()
    (p0, v0), *_, (p1, v1) = (
        (float(tick.get_attribute(axis).rstrip("%")), float(tick.text_content())) for tick in ticks
    )
    return lambda place: v0 + (place - p0) / (p1 - p0) * (v1 - v0)


def near(points):
    return [pytest.approx(point, abs=0.01) for point in points]


def test_charts_show_the_logged_values(run, page_of):
    page = page_of(run([*ROWS[:2], {"step": 15, "train/tokens": 1500}, *ROWS[2:]]))
    figures = page.locator("figure:visible")
    assert figures.count() == 5  # loss, bits per byte, learning rate, speed, gradient norm
    loss = figures.nth(0).locator("svg.plot")
    assert drawn(loss, "training") == near([(10, 8), (20, 6), (30, 5)])
    assert drawn(loss, "validation") == near([(0, 10), (10, 7), (30, 7.5)])
    assert loss.locator("circle.validation").count() == 3
    speed = figures.nth(3).locator("svg.plot")
    assert drawn(speed, "throughput") == near([(10, 20), (20, 30), (30, 40)])
    spans = figures.nth(0).locator(".readout span")
    assert numbers(spans.all_inner_texts()) == [["30"], ["5.0000"], ["7.5000"]]
    loss.scroll_into_view_if_needed()
    box = loss.locator(".area").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.64, box["y"] + 50)
    at_20 = [["20"], ["6.0000"], ["7.0000", "10"]]  # 7 at step 10
    assert numbers(spans.all_inner_texts()) == at_20
    page.mouse.move(0, 0)
    loss.focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert numbers(spans.all_inner_texts()) == at_20
    page.keyboard.press("Home")
    assert numbers(spans.first.all_inner_texts()) == [["0"]]


def test_a_model_has_one_validation_loss(run, page_of):
    """That of the validation at the end; if it has risen since, the lowest. It says its windows."""
    folder = run(ROWS)
    settings = {"trainer": {"max_steps": 300, "eval_windows": 200}}
    (folder / "run.json").write_text(json.dumps({"settings": settings}))
    starts = [{"step": 0, "parameters": 402_976}, {"step": 20, "parameters": "many"}]
    (folder / "starts.jsonl").write_text("\n".join(map(json.dumps, starts)))
    page = page_of(folder, "stopped")
    state = page.locator("#live").inner_text()
    assert "402,976" in state
    assert numbers([state])[0][-2:] == ["30", "300"]
    assert facts(page) == {
        "lowest validation loss": ["7.0000", "10,", "200"],
        "bits per byte": ["3.000"],
        "training loss": ["5.0000"],
        "parameters": ["402,976"],
        "tokens trained on": ["3,000"],
        "tokens per second": ["30"],
        "training time": ["0", "01", "40"],  # 3000 tokens at 30 tokens/s
    }
    result = page.locator(".result").inner_text()
    assert numbers([result]) == [["7.0000", "3.000", "10", "10.0000"]]

    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, ROWS[:2])))
    page = page_of(folder)
    assert facts(page)["validation loss"] == ["7.0000", "10,", "200"]
    (folder / "validation.json").write_text(json.dumps(FINAL))
    page = page_of(folder)
    assert facts(page)["validation loss"] == ["7.2500", "0.1250", "1,900"]
    assert facts(page)["bits per byte"] == ["3.500"]
    result = page.locator(".result").inner_text()
    assert numbers([result]) == [["7.2500", "3.500", "10", "10.0000."]]


def test_text_with_markup_is_shown_as_text(run, page_of, opened, tmp_path):
    text = f"{HOSTILE}\n{HOSTILE}\u2028\ud800\x00\u202eend"
    samples = [{"step": n, "prompt": HOSTILE, "text": text} for n in (1, 2)]
    rows = [ROWS[1] | {HOSTILE: HOSTILE, "attention/heads": ["x.png"]}]
    folder = run(rows, samples, f"name: {HOSTILE}\u202e\n", name="<img src=x>&amp;\x1b")
    start = {"step": 0, "command": f"python train.py {shlex.quote(HOSTILE)}", "device": HOSTILE}
    (folder / "starts.jsonl").write_text(json.dumps(start))
    page = page_of(folder)
    assert page.locator("h1").inner_text() == "<img src=x>&amp;\\x1b"
    articles = page.locator(".samples article")
    assert numbers(articles.locator("h3").all_inner_texts()) == [["1"], ["2"]]
    assert articles.first.locator("b").text_content() == HOSTILE
    shown = articles.first.locator("p").text_content()
    assert shown.startswith(f"{HOSTILE}\n{HOSTILE}\u2028\\ud800\\x00\\u202eend")
    page.get_by_role("tab", name="settings").click()
    assert page.locator("#tab-settings pre").text_content() == f"name: {HOSTILE}\\u202e\n"
    assert HOSTILE.split()[0] in page.locator(".environment").text_content()
    assert page.locator("img").count() == 0

    path = tmp_path / "sample.html"
    text = f"{HOSTILE}\n{HOSTILE}\x1b[31m\ud800\u202exxx"
    path.write_text(sample_page({"step": 1200, "prompt": HOSTILE, "text": text}), encoding="utf-8")
    page = opened(path)
    assert page.locator("b").text_content() == HOSTILE
    assert (
        f"{HOSTILE}\n{HOSTILE}\\x1b[31m\\ud800\\u202exxx" in page.locator("p").last.text_content()
    )
    assert page.locator("img, script").count() == 0


def test_samples_of_newlines_stay_low():
    shown = sample_page({"step": 1, "prompt": "a", "text": "a b\n\n \n\n  c\nd\n\n\n"})
    assert shown.count("</b> b\n\n  c\nd</p>") == 1


def test_some_samples_from_first_to_last_are_shown_and_others_on_demand(run, page_of):
    page = page_of(run(ROWS, [{"step": n, "prompt": "a", "text": f"a {n}"} for n in range(1, 8)]))
    shown = page.locator(".samples article:visible h3")
    assert numbers(shown.all_inner_texts()) == [["1"], ["3"], ["5"], ["7"]]
    page.locator("#tab-training summary").click()
    steps = [int(step) for (step,) in numbers(shown.all_inner_texts())]
    assert sorted(steps) == [*range(1, 8)]


@pytest.mark.parametrize("count", range(1, 6))
def test_the_first_and_the_last_sample_are_always_shown(run, count):
    rows = [{"step": n, "prompt": "a", "text": "a"} for n in range(count)]
    samples = training_data(run(ROWS, rows), ROWS)["samples"]
    shown = [number for number, found in enumerate(samples) if found["is_shown"]]
    assert [shown[0], shown[-1]] == [0, count - 1]
    assert len(shown) == min(count, 4)


def test_the_tabs_are_chosen_by_pointer_keyboard_and_address(finished, opened):
    page = opened(finished / "run.html")
    ready(page)
    tab = lambda name: page.get_by_role("tab", name=name)  # noqa: E731
    names = page.get_by_role("tab").all_inner_texts()
    assert names == ["heads", "losses and samples", "settings"]
    expect(page.locator("#tab-heads")).to_be_visible()
    expect(page.locator("#tab-training")).to_be_hidden()
    tab("losses").click()
    expect(tab("losses")).to_have_attribute("aria-selected", "true")
    expect(page.locator("#tab-training")).to_be_visible()
    expect(page.locator("#tab-heads")).to_be_hidden()
    page.keyboard.press("ArrowRight")
    expect(tab("settings")).to_be_focused()
    expect(page.locator("#tab-settings")).to_be_visible()
    page.reload()  # the address remembers the tab
    ready(page)
    expect(page.locator("#tab-settings")).to_be_visible()
    tab("settings").focus()
    page.keyboard.press("Home")
    page.locator(".head").first.wait_for(state="attached")
    expect(page.locator("#tab-heads")).to_be_visible()
    expect(page.locator("#tab-settings")).to_be_hidden()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_can_be_read_and_fit(run, opened, theme):
    samples = [{"step": n, "prompt": "a", "text": f"a {'word' * 90}"} for n in range(1, 7)]
    folder = run(ROWS, samples, f"name: {'long' * 90}\n")
    path = write_run_page(folder, "finished")
    for width in (1400, 460, 320):
        size = {"width": width, "height": 800}
        page = opened(path, color_scheme=theme, viewport=size)
        ready(page)
        for tab in ("losses", "settings"):
            page.get_by_role("tab", name=tab).click()
            found = page.evaluate(CONTRASTS)
            assert len(found) > 10
            assert [entry for entry in found if entry[3] < entry[2]] == []
            assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_settings_of_a_run(tmp_path, opened):
    folder = train_in(tmp_path, "name=first", "lens=off")
    page = opened(folder / "run.html")
    ready(page)
    assert page.get_by_role("tab").all_inner_texts() == ["losses and samples", "settings"]
    page.get_by_role("tab", name="settings").click()
    command = page.locator(".command code").inner_text()
    assert command.startswith("python train.py from=")
    names = page.locator(".environment dt").all_inner_texts()
    assert {"command", "commit", "device", "torch"} <= {*names}
    assert page.locator("#tab-settings pre").text_content() == (folder / "config.yaml").read_text()
    page.get_by_role("button", name="copy").click()
    expect(page.locator("#message")).to_contain_text("ommand")


def test_digits_and_units_of_the_readouts(run, page_of):
    more = {"train/tokens_per_second": 4334.587, "train/grad_norm": 0.00123, "val/accuracy": 0.1234}
    more |= {"train/learning_rate": 0.000123456}
    page = page_of(run([row(10, 0.00001, **more)]))
    texts = page.locator(".readout").all_inner_texts()
    wanted = {
        "training": "<0.0001",
        "validation": "12.3%",
        "learning rate": "0.000123",
        "throughput": "4,335 tokens/s",
        "gradient norm": "<0.01",
    }
    for text, (name, value) in zip(texts, wanted.items(), strict=True):
        assert text.endswith(f"{name} {value}"), text
    assert page.locator(".facts dd").first.inner_text().startswith("<0.0001")
    ticks = page.locator("svg.plot").nth(1).locator("text.y").all_text_contents()
    assert all(re.fullmatch(r"[\d.]+%", tick) for tick in ticks)


def test_missing_and_empty_files_and_a_single_point(run, tmp_path, page_of):
    (tmp_path / "bare").mkdir()
    for folder in (tmp_path / "bare", run()):
        page = page_of(folder)
        assert page.locator("figure:visible, .facts div, article").count() == 0
        assert page.locator(".result").inner_text()
    page = page_of(run([{"step": 0, "val/loss": 10.8}], name="second"))
    assert page.locator("svg.plot > circle").count() == 1


def test_values_that_are_not_finite_are_gaps(run, page_of):
    losses = [9.0, 8.0, "nan", 7.0, "inf", "-inf", 6.0, 5.0, NAN, 10**400]
    rows = [row(step, loss) | validation("nan", 1.0) for step, loss in enumerate(losses)]
    figure = page_of(run(rows)).locator("figure:visible").first
    line = figure.locator(".plot path")
    assert line.count() == 1  # no point of the validation loss is finite
    d = line.get_attribute("d")
    assert d.count("M") == 3
    assert re.search(r"M[\d. ]+h0M", d)  # 7.0 is alone
    assert drawn(figure, "training") == near([(0, 9), (1, 8), (3, 7), (6, 6), (7, 5)])
    assert "NaN" in figure.inner_text()


def test_only_regular_files_of_limited_size_are_read(run, monkeypatch):
    folder = run(config="name: long\n")
    (folder / "attention").mkdir()
    assert "name: long" in write_run_page(folder, "finished").read_text()
    monkeypatch.setattr("clearhead.output.report.MAX_CONFIG", 10)
    assert "name: long" not in write_run_page(folder, "finished").read_text()
    for make in SPECIAL_FILES.values():
        for name in ("run.json", "metrics.jsonl", "samples.jsonl", "config.yaml"):
            make(folder / name)
        make(folder / "attention" / "statistics.jsonl")
        with time_limit():
            assert write_run_page(folder, "finished").stat().st_size < 300_000


def test_ticks(run, page_of):
    for number, losses in enumerate(([0.0, 97.0], [3.0, 3.0], [0.0003, 0.0006], [-2e6, 5e6])):
        rows = [row(1000 * step, loss) for step, loss in enumerate(losses)]
        plot = page_of(run(rows, name=str(number))).locator("svg.plot").first
        ticks = [tick.text_content() for tick in plot.locator("text.y").all()]
        expected = {
            0: ["0", "50", "100"],
            1: ["3", "4"],
            2: ["0.0003", "0.0004", "0.0005", "0.0006"],
            3: ["-2M", "0", "2M", "4M", "6M"],
        }
        assert ticks == expected[number]
        assert [t.text_content() for t in plot.locator("text.x").all()][-1] == "1K"


def test_thinning_keeps_spikes_ends_and_gaps():
    points = [(step, float(step % 10)) for step in range(100_000)]
    points[33_333], points[44_444] = (33_333, 99.0), (44_444, -99.0)
    points[50_000:51_000] = [(step, NAN) for step in range(50_000, 51_000)]
    thinned = thin(points, 1000)
    finite = [point for point in thinned if not math.isnan(point[1])]
    assert 900 < len(finite) <= 1000
    assert {(33_333, 99.0), (44_444, -99.0)} <= set(finite) <= set(points)
    assert (thinned[0], thinned[-1]) == (points[0], points[-1])
    assert [step for step, _ in thinned] == sorted({step for step, _ in thinned})
    assert any(math.isnan(value) for _, value in thinned)
    assert thin(points[:1000], 1000) == points[:1000]


def test_smoothing_has_no_lag():
    line = [(step, 2.0 * step) for step in range(600)]
    assert smooth(line)[:-10] == near(line[:-10])
    noisy = [(step, 5.0 + (-1) ** step) for step in range(600)]
    assert all(abs(value - 5) < 0.11 for _, value in smooth(noisy)[10:])
