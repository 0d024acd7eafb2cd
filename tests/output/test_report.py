"""report.html: the values and charts in a browser, and the functions that compute them."""

import base64
import copy
import dataclasses
import io
import json
import math
import re
import shutil

import matplotlib
import numpy as np
import pytest
from helpers.pages import HOSTILE, snapshot_of
from helpers.refusals import SPECIAL_FILES, time_limit
from PIL import Image

from clearhead.output import report
from clearhead.output.charts import smooth, thin
from clearhead.output.report import sample_page, write_report
from headlens.heads import ALL_NAMES
from headlens.history import History, Row
from headlens.prompts import Prompt
from headlens.render import draw_snapshot, draw_timelapse
from headlens.snapshot_data import write_snapshot
from headlens.statistics import STATISTICS

NAN = math.nan


@pytest.fixture
def run(tmp_path):
    """run(rows, samples=..., config=...) -> a run directory."""

    def make(rows=(), samples=(), config="", name="first"):
        folder = tmp_path / name
        (folder / "attention").mkdir(parents=True)
        for file, lines in (("metrics.jsonl", rows), ("samples.jsonl", samples)):
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (folder / file).write_text(text, encoding="utf-8")
        (folder / "config.yaml").write_text(config, encoding="utf-8")
        return folder

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


def numbers(texts):
    return [re.findall(r"\d[\d,.]*", text) for text in texts]


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


def test_figures_and_charts_show_the_logged_values(run, opened):
    folder = run([*ROWS[:2], {"step": 15, "train/tokens": 1500}, *ROWS[2:]])
    (folder / "run.json").write_text(json.dumps({"settings": {"trainer": {"max_steps": 300}}}))
    starts = [{"step": 0, "parameters": 402_976}, {"step": 20, "parameters": "many"}]
    (folder / "starts.jsonl").write_text("\n".join(map(json.dumps, starts)))
    final = {"step": 30, "windows": 1900, "loss": 7.25, "loss_error": 0.125}
    (folder / "validation.json").write_text(json.dumps(final))
    opened_page = opened(write_report(folder))
    assert opened_page.locator("h1").inner_text() == "first"
    assert numbers([opened_page.locator("header p.quiet").inner_text()])[0][-2:] == ["30", "300"]
    tiles = opened_page.locator(".facts dd").all_inner_texts()
    # e^7; 1000 tokens at each of 20, 30 and 40 tokens per second
    expected = [["5.0000", "30"], ["7.0000", "10"], ["1,096.63", "10"], ["3.000", "10"]]
    expected += [
        ["7.2500", "0.1250", "1,900"],
        ["402,976"],
        ["3,000"],
        ["0", "01", "48"],
        ["30"],
    ]
    assert numbers(tiles) == expected
    figures = opened_page.locator("figure")
    assert figures.count() == 5  # loss, bits per byte, learning rate, speed, gradient norm
    loss = figures.nth(0).locator(".plot")
    assert drawn(loss, "training") == near([(10, 8), (20, 6), (30, 5)])
    assert drawn(loss, "validation") == near([(0, 10), (10, 7), (30, 7.5)])
    points = [c.get_attribute("cx") for c in loss.locator("circle.validation").all()]
    assert len(points) == 3
    lowest = [c.get_attribute("cx") for c in loss.locator("circle.lowest").all()]
    assert lowest == points[1:2]  # the loss rises since step 10
    assert not figures.nth(3).locator("circle.lowest").count()
    assert loss.locator("text.y").first.get_attribute("y") == "100%"  # the lowest at the bottom
    speed = figures.nth(3).locator(".plot")
    assert drawn(speed, "throughput") == near([(10, 20), (20, 30), (30, 40)])
    spans = figures.nth(0).locator(".readout span")  # the values of the nearest step
    assert numbers(spans.all_inner_texts()) == [["30"], ["5.0000"], ["7.5000"]]
    loss.scroll_into_view_if_needed()
    box = loss.locator(".area").bounding_box()
    opened_page.mouse.move(box["x"] + box["width"] * 0.64, box["y"] + 50)
    assert numbers(spans.all_inner_texts()) == [
        ["20"],
        ["6.0000"],
        ["7.0000", "10"],
    ]  # 7 at step 10
    # The lowest loss, its bits per byte, its step, the loss of the first validation and its step,
    # the step since which the loss rises.
    (found,) = numbers([opened_page.locator(".result").inner_text()])
    assert found == ["7.0000", "3.000", "10", "10.0000", "0", "10"]
    # Without a rise: the loss at the end, its windows.
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, ROWS[:2])))
    (folder / "validation.json").write_text(json.dumps(final | {"step": 10}))
    (found,) = numbers([opened(write_report(folder)).locator(".result").inner_text()])
    assert found[:4] == ["7.2500", "1,900", "10", "10.0000"]


def test_text_with_markup_is_escaped(run, opened, tmp_path):
    text = f"{HOSTILE}\n{HOSTILE}\u2028\ud800\x00\u202eend"
    samples = [{"step": n, "prompt": HOSTILE, "text": text} for n in (1, 2)]
    rows = [ROWS[1] | {HOSTILE: HOSTILE, "attention/heads": ["x.png"]}]
    folder = run(rows, samples, f"name: {HOSTILE}\u202e\n", name="<img src=x>&amp;\x1b")
    opened_page = opened(write_report(folder))
    assert opened_page.locator("h1").inner_text() == "<img src=x>&amp;\\x1b"
    articles = opened_page.locator(".samples article")
    assert numbers(articles.locator("h3").all_inner_texts()) == [["2"], ["1"]]
    newest = articles.first
    assert newest.locator(".prompt").text_content() == HOSTILE
    shown = newest.locator("p").text_content()
    assert shown.startswith(f"{HOSTILE}\n{HOSTILE}\u2028\\ud800\\x00\\u202eend")
    assert opened_page.locator("details pre").text_content() == f"name: {HOSTILE}\\u202e\n"
    assert opened_page.locator("img").count() == 0

    path = tmp_path / "sample.html"
    text = f"{HOSTILE}\n{HOSTILE}\x1b[31m\ud800\u202exxx"
    path.write_text(sample_page({"step": 1200, "prompt": HOSTILE, "text": text}), encoding="utf-8")
    opened_page = opened(path)
    assert opened_page.locator(".prompt").text_content() == HOSTILE
    shown = opened_page.locator("p").text_content()
    assert shown.startswith(f"{HOSTILE}\n{HOSTILE}\\x1b[31m\\ud800\\u202exxx")
    assert opened_page.locator("img, script").count() == 0


def test_samples_of_newlines_stay_low():
    shown = sample_page({"step": 1, "prompt": "a", "text": "a b\n\n \n\n  c\nd\n\n\n"})
    assert shown.count("</span> b\n\n  c\nd</p>") == 1


def snapshot(step, heads, values=None, names=None, ablation=None):
    """Returns a snapshot of one layer, all weights with code 180. values: {statistic: [one per
    head]}. names: of the heads."""
    prompt = Prompt("1-a", "a b", [0, 1], ["a", HOSTILE])
    zeros = {key: np.zeros((1, heads), np.float32) for key in STATISTICS}
    row = Row(step, zeros | {key: np.float32([v]) for key, v in (values or {}).items()})
    row.names = np.array([[ALL_NAMES.index(name) for name in names or [""] * heads]])
    data = snapshot_of("first", prompt, row, np.full((1, heads, 3), 180, np.uint8))
    return dataclasses.replace(data, ablation=ablation)


def write_all(folder, *snapshots):
    """Writes the files of snapshots into a run directory."""
    history = History(folder / "attention" / "statistics.jsonl", 0)
    for data in snapshots:
        history.add(data.row)
        write_snapshot(folder / "attention" / f"step_{data.step:08d}.npz", data)
        draw_snapshot(data, folder / "attention")
    draw_timelapse(folder / "attention", history.rows, 24)


def test_attention_page_runs_in_a_sandboxed_frame(run, opened):
    folder = run(ROWS)
    write_all(folder, *(snapshot(step, 4) for step in (0, 20, 40)))
    path = write_report(folder)
    shutil.rmtree(folder / "attention")  # the report is complete by itself
    opened_page = opened(path)
    inside = opened_page.frame_locator("iframe")
    inside.locator("html[data-ready='1']").wait_for()
    assert inside.locator(".head").count() == 4
    assert opened_page.locator("iframe").get_attribute("sandbox") == "allow-scripts"
    assert opened_page.locator("p a[href='attention/timelapse.html']").count() == 1


def test_order_of_the_sections_and_controls_of_the_attention_page(run, opened):
    """First the result, then the attention page, with the controls of steps and prompts only."""
    folder = run(ROWS, [{"step": 10, "prompt": "a", "text": "a b"}], "name: first\n")
    snapshots = [snapshot(step, 4) for step in (0, 20, 40)]
    write_all(folder, *snapshots)
    draw_timelapse(folder / "attention", [data.row for data in snapshots], 24)
    alone = opened(folder / "attention" / "timelapse.html")
    alone.locator("html[data-ready='1']").wait_for()
    assert alone.locator("#show-help").is_visible()
    opened_page = opened(write_report(folder))
    places = [".result", "iframe", ".facts", ".plot >> nth=0", ".samples", "details"]
    tops = [opened_page.locator(place).bounding_box()["y"] for place in places]
    assert tops == sorted(tops)
    assert tops[1] < 500
    inside = opened_page.frame_locator("iframe")
    inside.locator("html[data-ready='1']").wait_for()
    shown = inside.locator("#bar").locator("button, select, input").locator("visible=true")
    assert shown.evaluate_all("all => all.map((node) => node.id)") == ["play", "step", "prompt"]
    assert inside.locator("#controls").is_hidden()
    inside.locator("#step").fill("0")
    assert inside.locator("#step-number").inner_text() == "step 0"


def test_digits_and_units_of_the_readouts(run, opened):
    more = {"train/tokens_per_second": 4334.587, "train/grad_norm": 0.00123, "val/accuracy": 0.1234}
    more |= {"train/learning_rate": 0.000123456}
    opened_page = opened(write_report(run([row(10, 0.00001, **more)])))
    texts = opened_page.locator(".readout").all_inner_texts()
    wanted = {
        "training": "<0.0001",
        "validation": "12.3%",
        "learning rate": "0.000123",
        "throughput": "4,335 tokens/s",
        "gradient norm": "<0.01",
    }
    for text, (name, value) in zip(texts, wanted.items(), strict=True):
        assert text.endswith(f"{name} {value}"), text
    assert opened_page.locator(".facts dd").first.inner_text().startswith("<0.0001")
    ticks = opened_page.locator(".plot").nth(1).locator("text.y").all_text_contents()
    assert all(re.fullmatch(r"[\d.]+%", tick) for tick in ticks)


def change(value, error=None, **more):
    return {"loss_change": value, "loss_change_error": error, "accuracy_without": None} | more


def head_files(folder):
    """Writes three snapshots of five heads. The steps 20 and 40 give heads names."""
    previous = "previous_token"
    ablation = {"step": 40, "method": "exact"}
    ablation["heads"] = [
        change(0.125, 0.0625, layer=0, head=1),
        change(-0.00001, layer=0, head=2),
    ]
    ablation["groups"] = [change(2, 0.5, name=previous, heads=2)]
    values = {previous: [0.1, 0.0, 0.2, 0.53, 0.1], "first_token": [0.0, 0.0, 0.875, 0.0, 0.0]}
    names = ["", "", "", previous, "uniform"]
    steps = []
    for step, of_first in ((0, 0.0), (20, 0.5), (40, 0.96)):
        values[previous][1] = of_first
        names[1:3] = [previous if step else "", "first_token" if step == 40 else ""]
        removed = ablation if step == 40 else None
        steps.append(snapshot(step, 5, copy.deepcopy(values), list(names), removed))
    write_all(folder, *steps)


def test_heads_are_shown_with_their_names_images_and_curves(run, opened):
    folder = run(ROWS)
    head_files(folder)
    opened_page = opened(write_report(folder))
    cards = opened_page.locator(".heads article")
    titles = [
        re.findall(r"L\d H\d|step \d+", text) for text in cards.locator("h3").all_inner_texts()
    ]
    assert titles == [["L0 H1", "step 20"], ["L0 H2", "step 40"]]  # the first head of each name
    counts = opened_page.locator(".result").inner_text().split(";")[-1]
    assert re.findall(r"\d+", counts) == ["3", "5", "2", "1"]
    counts = opened_page.locator(".attention > p").last.inner_text()
    assert re.findall(r"\d+", counts) == ["1"]  # a uniform head has no card
    facts = cards.nth(0).locator("p").nth(1).inner_text()
    changes = ["+0.13", "0.06", "+2.00", "0.50"]  # without this head, without both
    assert re.findall(r"[+\d.]+\d|L\d H\d", facts) == ["0.96", "0.92", *changes, "L0 H3"]
    facts = cards.nth(1).locator("p").nth(1).inner_text()
    assert re.findall(r"[-+\d.]+\d", facts) == ["0.88", "0.75"]  # no change
    assert opened_page.locator(".heads :text('alert')").count() == 0
    path = cards.nth(0).locator("path.training").get_attribute("d")
    assert path == "M0.00 100.00L50.00 50.00L100.00 4.00"  # 0, 0.5 and 0.96 at steps 0, 20, 40
    data = cards.nth(0).locator("img").get_attribute("src").partition("base64,")[2]
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGBA"))
    code_180 = [255 * part for part in matplotlib.colormaps["viridis"](180)[:3]]
    assert pixels[-1, 0].tolist() == pytest.approx([*code_180, 255], abs=2)
    assert pixels[0, -1, 3] == 0  # above the diagonal


def test_images_replace_the_attention_page_in_print(run, opened):
    folder = run(ROWS)
    head_files(folder)
    opened_page = opened(write_report(folder))
    frame, images = opened_page.locator("iframe"), opened_page.locator(".still img")
    assert images.count() == 2  # of step 40: the clearest head, and all heads on a prompt
    middle = "node => { node.scrollIntoView(); const box = node.getBoundingClientRect();"
    middle += " return document.elementFromPoint(box.x + box.width / 2, box.y + 9).localName; }"
    assert frame.evaluate(middle) == "iframe"  # the images are behind the frame
    bottoms = [node.bounding_box() for node in (frame, opened_page.locator(".still"))]
    assert len({box["y"] + box["height"] for box in bottoms}) == 1
    texts = opened_page.locator(".attention > p")  # a link to the page, and notes about the heads
    opened_page.emulate_media(media="print")
    assert not frame.is_visible()
    assert [text.is_visible() for text in texts.all()] == [False, True]
    assert images.first.is_visible()


def test_heads_without_names(run):
    folder = run(ROWS)
    values = {"previous_token": [0.6, 0.55]}  # uniform: 0.5
    write_all(folder, snapshot(40, 2, values, ["uniform", ""]))
    shown = write_report(folder).read_text()
    text = re.search(r'class="result">(.*?)</p>', shown)[1]
    assert re.findall(r"\d+", text)[-1] == "2"  # heads without a name
    text = re.search(r'</div></div><p class="quiet">(.*?)</p>', shown)[1]
    assert re.findall(r"[\d.]*\d", text) == ["1", "0.25", "0.4", "0.20"]
    assert "<article>" not in shown
    values |= {"positional": [0, 0.31]}
    write_all(folder, snapshot(40, 2, values, ["", "positional"]))
    (card,) = re.findall("<article>(.*?)</article>", write_report(folder).read_text())
    # Without its significance, which is of other statistics.
    assert re.findall(r"\d\.\d+", card.partition("<svg")[0]) == ["0.31"]


def test_missing_and_empty_files_and_a_single_point(run, tmp_path, opened):
    (tmp_path / "bare").mkdir()
    for folder in (tmp_path / "bare", run()):
        opened_page = opened(write_report(folder))
        assert opened_page.locator("figure, .facts div, iframe, article").count() == 0
    opened_page = opened(write_report(run([{"step": 0, "val/loss": 10.8}], name="second")))
    assert opened_page.locator(".plot circle").count() == 1


def test_values_that_are_not_finite_are_gaps(run, opened):
    losses = [9.0, 8.0, "nan", 7.0, "inf", "-inf", 6.0, 5.0, NAN, 10**400]
    rows = [row(step, loss) | validation("nan", 1.0) for step, loss in enumerate(losses)]
    figure = opened(write_report(run(rows))).locator("figure").first
    line = figure.locator(".plot path")
    assert line.count() == 1  # no point of the validation loss is finite
    d = line.get_attribute("d")
    assert d.count("M") == 3
    assert re.search(r"M[\d. ]+h0M", d)  # 7.0 is alone
    assert drawn(figure, "training") == near([(0, 9), (1, 8), (3, 7), (6, 6), (7, 5)])
    assert figure.locator(".note").count() == 1


def test_only_regular_files_of_limited_size_are_read(run, monkeypatch):
    folder = run(config="name: long\n")
    assert "name: long" in write_report(folder).read_text()
    monkeypatch.setattr(report, "MAX_CONFIG", 10)
    assert "name: long" not in write_report(folder).read_text()
    of_heads = ("statistics.jsonl", "timelapse.html", "step_00000000_1-a.png")
    of_heads = [f"attention/{name}" for name in of_heads]
    for make in SPECIAL_FILES.values():
        for name in ("run.json", "metrics.jsonl", "samples.jsonl", "config.yaml", *of_heads):
            make(folder / name)
        with time_limit():
            assert write_report(folder).stat().st_size < 100_000


def test_ticks(run, opened):
    for number, losses in enumerate(([0.0, 97.0], [3.0, 3.0], [0.0003, 0.0006], [-2e6, 5e6])):
        rows = [row(1000 * step, loss) for step, loss in enumerate(losses)]
        plot = opened(write_report(run(rows, name=str(number)))).locator(".plot").first
        ticks = [tick.text_content() for tick in plot.locator("text.y").all()]
        expected = {
            0: ["0", "20", "40", "60", "80", "100"],
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
    thinned = thin(points)
    finite = [point for point in thinned if not math.isnan(point[1])]
    assert 900 < len(finite) <= 1000
    assert {(33_333, 99.0), (44_444, -99.0)} <= set(finite) <= set(points)
    assert (thinned[0], thinned[-1]) == (points[0], points[-1])
    assert [step for step, _ in thinned] == sorted({step for step, _ in thinned})
    assert any(math.isnan(value) for _, value in thinned)
    assert thin(points[:1000]) == points[:1000]


def test_smoothing_has_no_lag():
    line = [(step, 2.0 * step) for step in range(600)]
    assert smooth(line)[:-10] == near(line[:-10])
    noisy = [(step, 5.0 + (-1) ** step) for step in range(600)]
    assert all(abs(value - 5) < 0.11 for _, value in smooth(noisy)[10:])
