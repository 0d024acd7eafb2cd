"""report.html: what it says and draws, read back from a real browser, and what is behind it."""

import json
import math
import os
import shutil
import subprocess
import sys

import pytest
from helpers import REPOSITORY

from training import report
from training.chart import log_ticks, round_ticks, smooth, thin, tick_text
from training.report import sample_page, write_report

NAN = math.nan
HOSTILE = "</script><img src=x onerror=alert(1)><script>alert(2)</script>\"'&lt;__CSP__"


@pytest.fixture
def run(tmp_path):
    """run(rows, samples=..., config=...) -> a run's directory."""

    def make(rows=(), samples=(), config="", name="first"):
        folder = tmp_path / name
        folder.mkdir()
        for file, lines in (("metrics.jsonl", rows), ("samples.jsonl", samples)):
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (folder / file).write_text(text, encoding="utf-8")
        (folder / "config.yaml").write_text(config, encoding="utf-8")
        return folder

    return make


def row(step, loss, **more):
    common = {"train/learning_rate": 1e-3, "train/grad_norm": 1.5, "train/tokens": 100 * step}
    return {"step": step, "train/loss": loss, "train/tokens_per_second": 10.0 + step, **common} | {
        key.replace("_", "/", 1): value for key, value in more.items()
    }


ROWS = [
    {"step": 0, "val/loss": 10.0, "val/bits_per_byte": 4.0},
    row(10, 8.0, val_loss=7.0, val_bits_per_byte=3.0),
    row(20, 6.0),
    row(30, 5.0, val_loss=7.5, val_bits_per_byte=3.25),
]


def figures(page):
    titles = page.locator("figure h3").all_inner_texts()
    return dict(zip(titles, page.locator("figure").all(), strict=True))


def drawn(plot, name):
    """The points of a line as a reader would measure them: from its path and the axes."""
    d = plot.locator(f"path[data-name='{name}']").get_attribute("d").replace("M", "L")
    x0, x1, y0, y1 = (float(plot.get_attribute(f"data-{key}")) for key in ("x0", "x1", "y0", "y1"))
    pairs = [tuple(map(float, pair.split())) for pair in d.replace("h0", "").split("L")[1:]]
    return [(x0 + x / 100 * (x1 - x0), y1 - y / 100 * (y1 - y0)) for x, y in pairs]


def near(points):
    return [pytest.approx(point, abs=0.01) for point in points]


# ------------------------------------------------------------------------------- in the browser


def test_the_charts_say_what_was_logged(run, opened):
    config = "model:\n  max_steps: 5\ntrainer:\n  lr: 1\n  max_steps: 300\nlens:\n  max_steps: 7\n"
    page = opened(write_report(run(ROWS, config=config)))
    assert page.locator("h1").inner_text() == "first"
    assert "after step 30 of 300" in page.locator("header").inner_text()
    facts = page.locator(".facts > div").all_inner_texts()
    assert [fact.split("\n") for fact in facts] == [
        ["Training loss", "5.0000", "at step 30"],
        ["Best validation loss", "7.0000", "at step 10"],
        ["Bits per byte", "3.000", "at step 10"],
        ["Tokens seen", "3,000"],
        ["Tokens per second", "30", "median"],
    ]
    found = figures(page)
    assert list(found) == [
        "Loss nats per token",
        "Validation bits per byte",
        "Learning rate",
        "Throughput tokens per second",
        "Gradient norm before clipping",
    ]
    loss = found["Loss nats per token"].locator(".plot.linear")
    assert loss.locator("path").count() == 2
    assert drawn(loss, "training") == near([(10, 8), (20, 6), (30, 5)])
    assert drawn(loss, "validation") == near([(0, 10), (10, 7), (30, 7.5)])
    assert loss.locator("circle.validation").count() == 3
    speed = found["Throughput tokens per second"].locator(".plot")
    assert drawn(speed, "throughput") == near([(10, 20), (20, 30), (30, 40)])


def test_ticks_stand_where_their_values_are(run, opened):
    page = opened(write_report(run(ROWS)))
    plot = page.locator(".plot.linear").first
    box = plot.locator(".area").bounding_box()
    low, high = (float(plot.get_attribute(f"data-{key}")) for key in ("y0", "y1"))
    ticks = plot.locator("text.y")
    assert ticks.all_text_contents() == ["5", "6", "7", "8", "9", "10"]
    for tick in ticks.all():
        middle = tick.bounding_box()
        height = (middle["y"] + middle["height"] / 2 - box["y"]) / box["height"]
        assert high - height * (high - low) == pytest.approx(float(tick.text_content()), abs=0.1)


def test_the_cursor_reads_the_values(run, opened):
    page = opened(write_report(run(ROWS)))
    figure = page.locator("figure").first
    plot, readout = figure.locator(".plot.linear"), figure.locator(".readout")
    at_rest = ["step 30", "training 5", "validation 7.5"]
    assert readout.locator("span").all_inner_texts() == at_rest
    box = plot.locator(".area").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.64, box["y"] + 50)  # nearest is step 20
    said = ["step 20", "training 6", "validation 7 at step 10"]
    assert readout.locator("span").all_inner_texts() == said
    cursor = plot.locator(".cursor").bounding_box()
    assert cursor["x"] == pytest.approx(box["x"] + box["width"] * 20 / 30, abs=1.5)
    page.mouse.move(box["x"] + box["width"] * 0.49, box["y"] + 50)
    assert readout.locator("span").first.inner_text() == "step 10"
    page.mouse.move(5, 5)
    assert readout.locator("span").all_inner_texts() == at_rest
    plot.focus()
    page.keyboard.press("ArrowLeft")  # the first press shows where it stands
    page.keyboard.press("Home")
    assert readout.locator("span").all_inner_texts()[0] == "step 0"


def test_the_scale_can_be_logarithmic(run, opened):
    page = opened(write_report(run([row(1, 1.0), row(2, 10.0), row(3, 100.0)])))
    figure = page.locator("figure").first
    figure.get_by_label("logarithmic").check()
    assert not figure.locator(".plot.linear").is_visible()
    plot = figure.locator(".plot.log")
    assert plot.is_visible()
    heights = [box.split()[1] for box in plot.locator("path").get_attribute("d")[1:].split("L")]
    top, middle, bottom = map(float, reversed(heights))
    assert middle == pytest.approx((top + bottom) / 2, abs=0.02)


def test_hostile_text_stays_text(run, opened):
    samples = [
        {"step": 1, "prompt": "old", "text": "old news"},
        {"step": 2, "prompt": HOSTILE, "text": f"{HOSTILE}\n{HOSTILE}\u2028\ud800\x00\u202eend"},
        {"step": 3, "prompt": 7, "text": None},
    ]
    rows = [ROWS[1] | {HOSTILE: HOSTILE, "attention/heatmap/x": "x.png"}]
    page = opened(write_report(run(rows, samples, f"name: {HOSTILE}\n", name="<img src=x>&amp;")))
    assert page.locator("h1").inner_text() == "<img src=x>&amp;"
    assert page.title() == "<img src=x>&amp; · clearhead"
    articles = page.locator(".samples article")
    assert [text.split("\n")[0] for text in articles.all_inner_texts()] == [
        "step 3",
        "step 2",
        "step 1",
    ]
    second = articles.nth(1)
    assert second.locator(".prompt").text_content() == HOSTILE
    assert second.locator("p").text_content().startswith(f"{HOSTILE}\n{HOSTILE}\u2028?")
    assert articles.nth(2).locator("p").text_content() == "old news"
    page.locator("summary").click()
    assert page.locator("details pre").text_content() == f"name: {HOSTILE}\n"
    assert page.locator("img").count() == 0


def test_a_sample_on_a_page_of_its_own(tmp_path, opened):
    """As a dashboard shows it: hostile text stays text, an endless one ends."""
    path = tmp_path / "sample.html"
    text = f"{HOSTILE}\n{HOSTILE}\x1b[31m\ud800\u202e" + "x" * 20_000
    path.write_text(sample_page({"step": 1200, "prompt": HOSTILE, "text": text}), encoding="utf-8")
    assert path.stat().st_size < 20_000
    page = opened(path)
    assert page.locator("h3").inner_text() == "step 1,200"
    assert page.locator(".prompt").text_content() == HOSTILE
    shown = page.locator("p").text_content()
    assert shown.startswith(f"{HOSTILE}\n{HOSTILE}\\x1b[31m\\ud800\\u202exxx")
    assert shown.endswith("xxx…")
    assert page.locator("img, script").count() == 0
    width = "document.documentElement.scrollWidth - innerWidth"
    assert page.evaluate(width) == 0  # long words are broken


STAND_IN = """<!doctype html><!-- the data: <script type="application/json"> and a <style> -->
<meta http-equiv="Content-Security-Policy" content="{policy}"><title>a</title>
<style>p {{ color: rgb(1, 2, 3); }} /* & "quoted" */</style><p></p>
<script type="application/json" id="data">["\\u003c/script\\u003e&amp;\\"é"]</script>
<script>
"use strict"; // < & "quoted"
document.querySelector("p").textContent = JSON.parse(document.getElementById("data").textContent);
</script>"""


def stand_in(folder, name):
    """An attention page as small as can be, with a policy of its own."""
    blocks = dict(report.inline_blocks(STAND_IN.replace("{{", "{").replace("}}", "}").encode()))
    policy = "; ".join(
        ["default-src 'none'", *(f"{k}-src {report.sha256(v)}" for k, v in blocks.items())]
    )
    path = folder / "attention" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(STAND_IN.format(policy=policy), encoding="utf-8")
    return path


def test_the_attention_page_runs_in_its_frame(run, opened):
    folder = run(ROWS)
    stand_in(folder, "timelapse.html")
    path = write_report(folder)
    shutil.rmtree(folder / "attention")  # the report is complete alone
    page = opened(path)
    frame = page.frame_locator("iframe")
    assert frame.locator("p").inner_text() == '</script>&amp;"é'
    assert frame.locator("p").evaluate("p => getComputedStyle(p).color") == "rgb(1, 2, 3)"
    assert page.locator("iframe").get_attribute("sandbox") == "allow-scripts"
    link = page.get_by_role("link", name="on its own page")
    assert link.get_attribute("href") == "attention/timelapse.html"
    assert page.locator("iframe").bounding_box()["height"] > 800


def test_nothing_but_the_known_scripts_can_run(run, browser):
    """The policy holds where the escaping would not: a script that slipped in does nothing."""
    path = write_report(run(ROWS))
    slipped = "<script>document.title = 'taken'</script><p style='color: red'>x</p>"
    path.write_text(path.read_text().replace("<main>", f"<main>{slipped}"))
    page = browser.new_page()
    page.goto(path.as_uri())
    assert page.title() == "first · clearhead"
    red = page.locator("main p").first.evaluate("p => getComputedStyle(p).color")
    assert red != "rgb(255, 0, 0)"
    page.close()


def test_without_a_timelapse_the_newest_step_is_shown(run, opened):
    folder = run(ROWS)
    for step in (0, 40, 20):
        stand_in(folder, f"step_{step:08d}.html")
    page = opened(write_report(folder))
    link = page.get_by_role("link", name="on its own page")
    assert link.get_attribute("href") == "attention/step_00000040.html"
    assert page.frame_locator("iframe").locator("p").inner_text()
    assert "3 files, the newest" in page.locator("table").inner_text()


def test_the_real_attention_page(run, opened):
    np = pytest.importorskip("numpy")
    from lens.history import Row
    from lens.page import frame_data, page, run_data
    from lens.probe import Frame, Prompt
    from lens.statistics import STATISTICS

    prompt = Prompt("1-a", "a b", [0, 1], ["a", HOSTILE])
    row = Row(0, {key: np.zeros((1, 2), np.float32) for key in STATISTICS})
    frame = Frame(row, [np.full((1, 2, 3), 180, np.uint8)])
    folder = run(ROWS)
    (folder / "attention").mkdir()
    text = page([run_data("first", [prompt], [frame_data(frame)], [row])], title="first")
    (folder / "attention" / "timelapse.html").write_text(text, encoding="utf-8")
    opened_page = opened(write_report(folder))
    frame = opened_page.frame_locator("iframe")
    frame.locator("html[data-ready='1']").wait_for()
    assert frame.locator(".head").count() == 2


def test_what_is_missing_is_said(tmp_path, opened):
    page = opened(write_report(tmp_path))
    text = page.locator("main").inner_text()
    for words in (
        "No metrics yet.",
        "No samples yet.",
        "No interactive page yet.",
        "No config.yaml yet.",
    ):
        assert words in text
    assert "before the first step was logged" in page.locator("header").inner_text()
    assert page.locator("figure, .facts, iframe, details").count() == 0


def test_empty_files_and_a_single_point(run, opened):
    page = opened(write_report(run()))
    assert "No metrics yet." in page.locator("main").inner_text()
    page = opened(write_report(run([{"step": 0, "val/loss": 10.8}], name="second")))
    assert page.locator(".plot.linear circle").count() == 1


def test_what_is_not_finite_is_a_gap_and_counted(run, opened):
    losses = [9.0, 8.0, "nan", 7.0, "inf", "-inf", 6.0, 5.0, NAN, 10**400]
    rows = [row(step, loss, val_loss="nan") for step, loss in enumerate(losses)]
    page = opened(write_report(run(rows)))
    figure = page.locator("figure").first
    line = figure.locator(".plot.linear path")
    assert line.count() == 1  # of the validation there is nothing to draw
    d = line.get_attribute("d")
    assert d.count("M") == 3
    assert d.count("h0") == 1  # 7.0 stands alone
    assert line.get_attribute("data-points") == "0:9 1:8 3:7 6:6 7:5"
    assert "15 values are not finite" in figure.inner_text()
    only_nan = [{"step": 1, "train/loss": "nan"}]
    page = opened(write_report(run(only_nan, name="second")))
    assert "One value is not finite" in page.locator("figure").inner_text()


def test_it_fits_a_phone(run, opened):
    samples = [{"step": 1, "prompt": "The", "text": "The " + "x" * 500}]
    folder = run(ROWS, samples, f"data:\n  path: {'/long' * 60}\n", name="n" * 100)
    stand_in(folder, "timelapse.html")
    page = opened(write_report(folder), viewport={"width": 360, "height": 700})
    page.locator("summary").click()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    overflow = "box => box.scrollWidth - box.clientWidth"
    assert page.locator(".samples").evaluate(overflow) == 0


# ------------------------------------------------------------------------------ without a browser


def test_lines_that_are_no_rows_are_left_out(run):
    folder = run()
    rows = ['{"step": 2, "text": "a\u2028b"}', '{"step": "x"}', '{"step": 1}', '{"no": 1}']
    lines = [*rows, "", "7", "[]", "null"]
    cut_off = '{"step": 3, "text": "é'.encode()[:-1]
    (folder / "metrics.jsonl").write_bytes("\n".join(lines).encode() + b"\n" + cut_off)
    found = report.read_rows(folder / "metrics.jsonl")
    assert found == [{"step": 1}, {"step": 2, "text": "a\u2028b"}]


def test_a_figure_of_zero_is_shown(run):
    tiles = report.facts([row(1, 2.0, train_mfu=0.0) | {"train/tokens_per_second": 0.0}])
    assert ">0.0%<" in tiles
    assert ">0<" in tiles


def test_a_long_run_stays_small(run):
    rows = [row(step, 3 + step % 7) for step in range(100_000)]
    rows[77_777]["train/loss"] = 1234.5
    path = write_report(run(rows))
    assert path.stat().st_size < 600_000
    assert " 77777:1234.5 " in path.read_text()  # the spike is still there


def test_it_is_written_whole_or_not_at_all(run, monkeypatch):
    folder = run(ROWS)
    path = write_report(folder)
    assert path == folder / "report.html"
    before = path.read_bytes()

    def full(*_):
        raise OSError("no space left on device")

    (folder / "samples.jsonl").write_text('{"step": 40, "text": "more"}\n')
    files = sorted(folder.iterdir())
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        write_report(folder)
    assert path.read_bytes() == before
    assert sorted(folder.iterdir()) == files


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_only_regular_files_are_read(run, make):
    """A FIFO has no writer, and a device has no end."""
    folder = run()
    (folder / "attention").mkdir()
    for name in ("metrics.jsonl", "samples.jsonl", "config.yaml", "attention/step_00000000.html"):
        (folder / name).unlink(missing_ok=True)
        make(folder / name)
    assert write_report(folder).stat().st_size < 100_000


def test_settings_beyond_the_limit_are_not_shown(run, monkeypatch):
    folder = run(config="name: long\n")
    assert "name: long" in write_report(folder).read_text()
    monkeypatch.setattr(report, "MAX_CONFIG", 10)
    assert "name: long" not in write_report(folder).read_text()


def test_the_import_is_light():
    code = "import sys, training.report; print(*sys.modules)"
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    ours = {"training", "training.report"}
    assert {name.split(".")[0] for name in done.stdout.split()} - {"training", "durable"} <= (
        set(sys.stdlib_module_names) | {"__main__"}
    )
    assert ours <= set(done.stdout.split())


def test_files_are_listed_with_what_they_are(run):
    folder = run(ROWS)
    for name in ("attention/step_00000000_1-a.png", "attention/step_00000040_1-a%3F#.png"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x" * 1500)
    text = write_report(folder).read_text()
    assert '<a href="attention/step_00000040_1-a%253F%23.png">' in text
    assert '2 files, the newest <a href="attention/step_00000040' in text
    assert "3.0 kB" in text
    assert "checkpoints/best" not in text  # there is none


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 97, [0, 20, 40, 60, 80, 100]),
        (0, 100, [0, 20, 40, 60, 80, 100]),
        (4.8, 10.81, [4, 6, 8, 10, 12]),
        (0, 0.002, [0, 0.0005, 0.001, 0.0015, 0.002]),
        (-3, 2, [-3, -2, -1, 0, 1, 2]),
        (3, 3, [1, 2, 3, 4, 5]),
        (0, 0, [-0.6, -0.4, -0.2, 0, 0.2, 0.4, 0.6]),
        (1e15, 1e15 + 1, [4e14, 6e14, 8e14, 1e15, 1.2e15, 1.4e15, 1.6e15]),
    ],
)
def test_round_ticks(low, high, ticks):
    assert round_ticks(low, high) == pytest.approx(ticks)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.5, 2000, [1, 10, 100, 1000]),
        (1.5, 60, [2, 5, 10, 20, 50]),
        (2.4, 11.8, [3, 4, 6, 8, 10]),
        (3.02, 3.58, [3.1, 3.2, 3.3, 3.4, 3.5]),
        (1e-30, 1, [10.0**power for power in range(-30, 1, 4)]),
    ],
)
def test_log_ticks(low, high, ticks):
    assert log_ticks(low, high) == pytest.approx(ticks)


@pytest.mark.parametrize(
    ("value", "largest", "text"),
    [
        (0, 10, "0"),
        (0.1 + 0.2, 1, "0.3"),
        (12000, 20000, "12,000"),
        (500_000, 2e6, "0.5M"),
        (0, 2e6, "0"),
        (2e9, 2e9, "2G"),
        (0.0005, 0.002, "0.0005"),
        (0.0003, 0.0006, "3e-4"),
        (1.5e-5, 2e-5, "1.5e-5"),
        (1e15, 2e15, "1e15"),
    ],
)
def test_tick_text(value, largest, text):
    assert tick_text(value, largest) == text


def test_thinning_keeps_spikes_ends_and_gaps():
    points = [(step, float(step % 10)) for step in range(100_000)]
    points[33_333], points[44_444] = (33_333, 99.0), (44_444, -99.0)
    points[50_000:51_000] = [(step, NAN) for step in range(50_000, 51_000)]
    thinned = thin(points)
    finite = [point for point in thinned if not math.isnan(point[1])]
    assert 900 < len(finite) <= 1000
    assert {(33_333, 99.0), (44_444, -99.0)} <= set(finite)
    assert (thinned[0], thinned[-1]) == (points[0], points[-1])
    assert [step for step, _ in thinned] == sorted({step for step, _ in thinned})
    assert any(math.isnan(value) and 50_000 <= step < 51_000 for step, value in thinned)
    assert all(point in points for point in finite[::50])
    assert thin(points[:1000]) == points[:1000]
    points[-1] = (99_999, NAN)
    assert points[-2] in thin(points)


def test_thinning_is_bounded_when_every_second_value_is_a_gap():
    points = [(step, NAN if step % 2 else 1.0) for step in range(50_000)]
    assert len(thin(points)) < 1600


def test_smoothing_has_no_lag_and_keeps_gaps():
    line = [(step, 2.0 * step) for step in range(600)]
    smoothed = smooth(line)
    assert smoothed[:-10] == near(line[:-10])
    noisy = [(step, 5.0 + (-1) ** step) for step in range(600)]
    assert all(abs(value - 5) < 0.11 for _, value in smooth(noisy)[10:])
    noisy[300] = (300, NAN)
    smoothed = [value for _, value in smooth(noisy)]
    assert [i for i, value in enumerate(smoothed) if math.isnan(value)] == [300]
