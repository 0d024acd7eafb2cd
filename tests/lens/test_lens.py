"""The lens: at which steps it looks, which files it writes, and that training is unchanged."""

import base64
import csv
import hashlib
import itertools
import json
import re
import signal
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from helpers import TEXT, TINY
from helpers.refusals import refused
from helpers.runs import assert_same, rows, weights
from helpers.settings import settings as run_settings
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from data import get_tokenizer
from errors import ConfigError
from lens import MOST_FILES, Lens, LensConfig
from lens.history import COLUMNS, Row
from lens.page import END, START, frame_data, page, read, run_data, unpacked
from lens.probe import Frame, Prompt, from_codes, triangle_to_square
from lens.statistics import STATISTICS

BYTE = get_tokenizer("byte")


def lens_on(*prompts, context_length=1024, vocabulary=range(256), **changes):
    return Lens(
        LensConfig(prompts=list(prompts), **changes),
        BYTE.encode_ordinary,
        BYTE.decode_single_token_bytes,
        context_length,
        vocabulary=vocabulary,
        bos=256,
    )


def model_at(step, num_layers=2, num_heads=2):
    """A look_into whose weights depend on the step and the prompt alone."""

    def look_into(token_ids, capture):
        generator = torch.Generator().manual_seed(1000 * step + len(token_ids))
        num_tokens = len(token_ids)
        future = torch.ones(num_tokens, num_tokens).triu(1).bool()
        for layer in range(num_layers):
            scores = torch.randn(1, num_heads, num_tokens, num_tokens, generator=generator)
            scores = (3 * scores).masked_fill(future, float("-inf"))
            capture(layer, scores.softmax(-1), scores)

    return look_into


def watched(lens, folder, last_step, first_step=0):
    """The looks of a whole run: {step: Look}."""
    return {
        step: lens.look(model_at(step), step, last_step, folder, "a run")
        for step in range(first_step, last_step + 1)
        if lens.due(step, last_step)
    }


def names(folder, pattern="*"):
    return sorted(path.name for path in folder.glob(pattern))


def steps_of(path):
    """The steps whose weights a page has."""
    (run,) = read(path)
    return [frame["step"] for frame in run["frames"]]


def logged_steps(folder):
    lines = (folder / "statistics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


# ------------------------------------------------------------------------------------ settings


def test_settings_that_do_not_fit():
    def keys(**changes):
        return [key for key, *_ in LensConfig(**changes).problems()]

    most = {"prompts": ["a b"] * 8, "repeated": 24}  # nine pictures, and of each layer nine
    for changes in (
        {},
        {"prompts": []},
        {"prompts": [], "repeated": 0, "every": 0},
        {"prompts": ["a b"] * 20},
        most | {"layers": list(range(48))},
    ):
        assert keys(**changes) == [], changes
    for key, changes in (
        ("every", {"every": -1}),
        *(("max_tokens", {"max_tokens": number}) for number in (1, 1025)),
        *(("frames", {"frames": number}) for number in (1, 201)),
        ("repeated", {"repeated": 1}),
        ("layers", {"layers": [0, -1]}),
        ("layers", most | {"layers": list(range(49))}),
        ("prompts", {"prompts": ["ok", " "]}),
        ("prompts", {"prompts": [], "repeated": 0}),
        ("prompts", {"prompts": ["a b"] * 21}),
        ("prompts", {"prompts": [""] * 10_000}),
    ):
        assert keys(**changes) == [key], changes


def test_a_run_refuses_them():
    """And layers that its model does not have."""
    on = ("data.path=none", "lens=default")
    assert run_settings(*on, "model=gpt2-medium", "lens.layers=[23]").lens.layers == [23]
    for key, value, override in (
        ("lens.prompts", "''", "lens.prompts=['']"),
        ("lens.max_tokens", 1, "lens.max_tokens=1"),
        ("lens.layers", 99, "lens.layers=[99]"),
        ("lens.layers", 4, "lens.layers=[0,4]"),
    ):
        with refused(ConfigError, key, value, exit_code=2):
            run_settings(*on, "model=gpt2-nano", override)


def test_prompts():
    lens = lens_on("She sat on the bank.", "::", max_tokens=9)
    assert [p.name for p in lens.prompts] == ["1-she-sat-on-the", "2-prompt", "3-repeated"]
    assert [len(p.token_ids) for p in lens.prompts] == [9, 2, 9]
    assert [p.period for p in lens.prompts] == [0, 0, 4]
    assert len(lens_on("abcdefgh", context_length=3).prompts[0].tokens) == 3
    assert lens_on("x", repeated=31, max_tokens=64).prompts[-1].period == 31
    assert lens_on("x", repeated=31, max_tokens=20).prompts[-1].period == 9
    for without in ({"repeated": 0}, {"max_tokens": 4}, {"vocabulary": []}):
        assert len(lens_on("x", **without).prompts) == 1
    with pytest.raises(ValueError):  # noqa: PT011  a prompt without tokens
        Lens(LensConfig(prompts=["x"]), lambda text: [], BYTE.decode_single_token_bytes, 64)


# ---------------------------------------------------------------------------------------- when


def test_steps_of_looks():
    lens = lens_on("x", every=40)
    assert [step for step in range(101) if lens.due(step, 100)] == [0, 40, 80, 100]
    for last_step, looks in ((120, [0, 40, 80, 120]), (2000, [*range(0, 2001, 100)])):
        usual = lens_on("x")
        assert [s for s in range(last_step + 1) if usual.due(s, last_step)] == looks
    assert LensConfig().interval(10**6) == 1000
    for nothing in (lens_on("x", every=0), lens_on(repeated=0, every=1)):
        assert not any(nothing.due(step, 100) for step in range(101))


@settings(max_examples=50, deadline=None)
@given(
    looks=st.integers(1, 2000),
    every=st.integers(1, 10**5),
    rest=st.floats(0, 1),
    prompts=st.integers(1, 20),
    layers=st.integers(0, 20),
    repeated=st.sampled_from([0, 24]),
)
def test_number_of_files_is_limited(looks, every, rest, prompts, layers, repeated):
    """All looks of a short run are drawn; of a long one evenly spread ones."""
    changes = {"every": every, "layers": list(range(layers)), "repeated": repeated}
    lens = lens_on(*["x"] * prompts, **changes)
    files = len(lens.prompts) * (1 + layers) + 1
    last_step = every * looks + int(rest * (every - 1))
    steps = sorted({*range(0, last_step + 1, every), last_step})
    drawn = [step for step in steps if lens.draws(step, last_step)]
    assert len(drawn) * files <= MOST_FILES
    assert (drawn[0], drawn[-1]) == (0, last_step)
    assert len({*np.diff(drawn[:-1])}) <= 1
    if (len(steps) + 1) * files <= MOST_FILES:
        assert drawn == steps


# ------------------------------------------------------------------------------- what is written


def test_files_and_numbers_of_a_look(tmp_path):
    folder = tmp_path / "attention"
    lens = lens_on("the bank", "<b>$x$ & \u202e\x00 ß 漢字</b>", every=7, layers=[1], max_tokens=9)
    look = lens.look(model_at(7), 7, 100, folder, run_name="mine")
    slugs = ["1-the-bank", "2-b-x-b", "3-repeated"]
    kinds = ("heatmap", "layer/L01")
    assert list(look.pictures) == [f"attention/{kind}/{slug}" for slug in slugs for kind in kinds]
    assert look.pages == {"attention/viewer": folder / "step_00000007.html"}
    assert look.tables == {}
    pictures = [f"step_00000007_{slug}{end}.png" for slug in slugs for end in ("", "_L01")]
    assert names(folder) == sorted(["statistics.jsonl", "step_00000007.html", *pictures])
    for path in look.pictures.values():
        assert min(Image.open(path).size) > 200

    (run,) = read(folder / "step_00000007.html")
    assert (run["name"], run["layers"], run["heads"]) == ("mine", 2, 2)
    assert [p["text"] for p in run["prompts"]] == [p.text for p in lens.prompts]
    assert steps_of(folder / "step_00000007.html") == [7]
    history = json.loads(unpacked(run["history"]))
    assert history["steps"] == [7]
    (line,) = (folder / "statistics.jsonl").read_text().splitlines()
    line = json.loads(line)
    assert line.pop("step") == 7
    assert set(look.metrics) == {f"attention_layers/{k}/L0{n}" for k in STATISTICS for n in (0, 1)}
    assert len(look.heads) == len(STATISTICS) * 4
    assert set(look.histograms) == {f"attention_histograms/{key}" for key in STATISTICS}
    for key, values in line.items():  # the same numbers everywhere
        of_heads = [*itertools.chain(*values)]
        assert history["values"][key] == [of_heads]
        head = look.heads[f"attention_heads/{key}/L01H00"]
        assert head == pytest.approx(values[1][0], abs=1e-4)
        mean = look.metrics[f"attention_layers/{key}/L01"]
        assert mean == pytest.approx(sum(values[1]) / 2, abs=1e-4)
        histogram = sorted(look.histograms[f"attention_histograms/{key}"])
        assert histogram == pytest.approx(sorted(of_heads), abs=1e-4)

    raw = np.frombuffer(unpacked(run["frames"][0]["weights"]), np.uint8)
    for prompt in lens.prompts:  # the bytes of the page are the weights of the model
        layers = []
        model_at(7)(prompt.token_ids, lambda _, weights, __, out=layers: out.append(weights))
        num_tokens = len(prompt.token_ids)
        count = 2 * 2 * num_tokens * (num_tokens + 1) // 2
        here, raw = raw[:count].reshape(2, 2, -1), raw[count:]
        shown = triangle_to_square(from_codes(here))
        assert np.abs(shown - torch.cat(layers).numpy()).max() <= 1 / 255
    assert not len(raw)


def test_undefined_and_infinite_values_are_left_out(tmp_path):
    look = lens_on("the bank", repeated=0).look(model_at(0), 0, 100, tmp_path / "a")
    everything = [*look.metrics, *look.heads, *look.histograms]
    assert not [key for key in everything if "induction" in key or "duplicate" in key]
    assert np.isfinite([*look.metrics.values(), *look.heads.values()]).all()

    def diverged(token_ids, capture):
        weights = torch.eye(len(token_ids)).expand(2, -1, -1)
        capture(0, weights, torch.full((2, *weights.shape[1:]), torch.inf))

    lens = lens_on("the bank", every=10)
    lens.look(diverged, 0, 10, tmp_path)
    look = lens.look(diverged, 10, 10, tmp_path)
    assert not [key for key in look.metrics if "largest_logit" in key]
    for line in (tmp_path / "statistics.jsonl").read_text().splitlines():
        assert json.loads(line, parse_constant=pytest.fail)["largest_logit"] == [[None, None]]
    (run,) = read(tmp_path / "timelapse.html")
    json.loads(unpacked(run["history"]), parse_constant=pytest.fail)


def test_look_without_writing(tmp_path):
    lens, seen = lens_on("the bank"), []

    def look_into(token_ids, capture):
        seen.append(token_ids)
        model_at(0)(token_ids, capture)

    assert lens.look(look_into, 100, 100, tmp_path / "attention", write=False) is None
    assert seen == [prompt.token_ids for prompt in lens.prompts]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("frames", [2, 5, 24])
def test_time_lapse_and_table_of_a_run(tmp_path, frames):
    lens = lens_on("the bank", every=10, frames=frames, max_tokens=9)
    assert lens.findings() == []
    looks = watched(lens, tmp_path, 100)
    with_one = [step for step, look in looks.items() if "attention/timelapse" in look.pages]
    assert with_one == [30, 50, 80, 100]  # after each quarter
    (run,) = read(tmp_path / "timelapse.html")
    steps = steps_of(tmp_path / "timelapse.html")
    assert len(steps) == min(frames, 11)
    assert steps == sorted(set(steps))
    assert (steps[0], steps[-1]) == (0, 100)
    assert json.loads(unpacked(run["history"]))["steps"] == list(range(0, 101, 10))
    for frame in run["frames"]:
        (alone,) = read(tmp_path / f"step_{frame['step']:08d}.html")
        assert alone["frames"] == [frame]
        assert alone["prompts"] == run["prompts"]

    assert [step for step, look in looks.items() if look.tables] == [100]
    columns, table = looks[100].tables["attention/table"]
    with open(tmp_path / "heads.csv", newline="", encoding="utf-8") as file:
        written = list(csv.reader(file))
    assert tuple(written[0]) == tuple(columns) == COLUMNS
    assert written[1:] == [[str(value) for value in row] for row in table]
    assert len(table) == len(STATISTICS) * 4
    kinds = ("previous_token", "induction", "duplicate_token", "first_token")
    strong = [row for row in table if row[0] in kinds and row[1] == 1 and row[4] >= 0.25]
    assert len(lens.findings()) == len(strong)
    for found, row in zip(lens.findings(), strong, strict=True):
        assert {f"L{row[2]}", f"H{row[3]}:", f"{row[4]:.2f}"} <= set(found.split())


def test_time_lapse_has_only_pages_of_the_same_prompts(tmp_path):
    watched(lens_on("the bank", every=10), tmp_path, 20)
    (tmp_path / "step_00000010.html").write_text("of another program")
    looks = watched(lens_on("the bank", every=10), tmp_path, 30, first_step=21)
    assert "attention/timelapse" in looks[30].pages
    assert steps_of(tmp_path / "timelapse.html") == [0, 20, 30]
    watched(lens_on("the bank and more", every=10), tmp_path, 50, first_step=31)
    assert steps_of(tmp_path / "timelapse.html") == [40, 50]
    (run,) = read(tmp_path / "timelapse.html")
    assert json.loads(unpacked(run["history"]))["steps"] == [0, 10, 20, 30, 40, 50]


def test_resume_drops_files_after_the_checkpoint(tmp_path):
    watched(lens_on("the bank", every=10), tmp_path, 60)
    assert len(names(tmp_path, "step_*.html")) == 7
    keep = tmp_path / "step_by_step.txt"
    keep.write_text("not the lens's")
    watched(lens_on("the bank", every=10), tmp_path, 40, first_step=31)
    steps = [0, 10, 20, 30, 40]
    assert names(tmp_path, "step_*.html") == [f"step_{s:08d}.html" for s in steps]
    assert {name[:13] for name in names(tmp_path, "*.png")} == {f"step_{s:08d}" for s in steps}
    assert logged_steps(tmp_path) == steps
    assert keep.exists()
    assert steps_of(tmp_path / "timelapse.html") == steps


def test_looks_between_the_drawn_ones_are_numbers_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("lens.MOST_FILES", 12)  # of one prompt and a page: at most six looks
    looks = watched(lens_on("the bank", every=1, repeated=0), tmp_path, 20)
    assert [step for step, look in looks.items() if look.pictures] == [0, 4, 8, 12, 16, 20]
    assert len(names(tmp_path, "step_*")) == 12
    lapses = [step for step, look in looks.items() if "attention/timelapse" in look.pages]
    assert lapses == [8, 12, 16, 20]
    assert logged_steps(tmp_path) == list(range(21))
    assert all(look.metrics for look in looks.values())


def test_pages_are_written_atomically(tmp_path, monkeypatch):
    lens = lens_on("the bank")
    lens.look(model_at(0), 0, 100, tmp_path)
    monkeypatch.setattr("os.replace", raises(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        lens.look(model_at(40), 40, 100, tmp_path)
    assert names(tmp_path, "*.html") == ["step_00000000.html"]


# ------------------------------------------------------------------------------------ the page

HOSTILE = "</script><img src=x onerror=alert(1)><!--<script>&amp;\u2028'\"\\__DATA____CSP__"


@pytest.fixture(scope="module")
def hostile_page():
    prompt = Prompt("1-x", HOSTILE, [0, 1], [HOSTILE, "</SCRIPT >"])
    values = {key: np.zeros((1, 1), np.float32) for key in STATISTICS}
    frame = Frame(Row(0, values), [np.array([[[255, 0, 255]]], np.uint8)])
    return page([run_data(HOSTILE, [prompt], [frame_data(frame)], [frame.row])], HOSTILE)


class Elements(HTMLParser):
    """Tags as a browser would find them, with the text of scripts and styles."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.inside = [], {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] in ("script", "style", "title"):
            self.inside.setdefault(len(self.tags) - 1, data)

    def of(self, kind):
        """(attributes, text) of each element."""
        tags = enumerate(self.tags)
        return [(attrs, self.inside.get(n, "")) for n, (tag, attrs) in tags if tag == kind]


def test_text_cannot_end_the_element_it_stands_in(hostile_page, tmp_path):
    assert "onerror=alert(1)>" not in hostile_page
    assert "<img" not in hostile_page
    found = Elements(hostile_page)
    kinds = [attrs.get("type") for attrs, _ in found.of("script")]
    assert kinds == ["application/json", None]  # the data, which nothing executes, and our own
    assert not found.of("img")
    ((_, title),) = found.of("title")
    assert title == HOSTILE
    (tmp_path / "page.html").write_text(hostile_page, encoding="utf-8")
    (run,) = read(tmp_path / "page.html")
    assert run["name"] == run["prompts"][0]["text"] == HOSTILE
    assert run["prompts"][0]["tokens"] == [HOSTILE, "</SCRIPT >"]


def test_policy_allows_our_own_script_and_style_alone(hostile_page):
    found = Elements(hostile_page)
    policy = "Content-Security-Policy"
    metas = [attrs for attrs, _ in found.of("meta") if attrs.get("http-equiv") == policy]
    rules = dict(rule.strip().split(" ", 1) for rule in metas[0]["content"].split(";"))

    def sha256(text):
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    ((_, script),) = [pair for pair in found.of("script") if "type" not in pair[0]]
    ((_, style),) = found.of("style")
    assert len(script) > 10_000
    assert rules == {
        "default-src": "'none'",
        "script-src": sha256(script),
        "style-src": sha256(style),
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    for tag, attrs in found.tags:  # a policy by hashes forbids these; and they would be lost
        assert not [name for name in attrs if name.startswith("on") or name == "style"], tag
    assert not re.search(r"https?://(?!www\.w3\.org)", script + style)


def test_other_and_truncated_pages_are_refused(hostile_page, tmp_path):
    path = tmp_path / "page.html"
    begin = hostile_page.index(START)
    end = hostile_page.index(END, begin)
    cuts = [*range(begin, end, (end - begin) // 20), end + 1]
    contents = ["", "<!doctype html><p>something else</p>"]
    for data in ('{"version": 1, "runs": [', "{}", '{"version": 1}', "__DATA__"):
        contents.append(START + data + END)
    contents = [text.encode() for text in [*contents, *(hostile_page[:cut] for cut in cuts)]]
    for content in (*contents, b"\xff\xfe\x00 no text at all"):
        path.write_bytes(content)
        with pytest.raises(ValueError):  # noqa: PT011
            read(path)


# -------------------------------------------------------------------------------- in training


def result(run):
    """The losses and the weights after a run."""
    run.train()
    losses = [row["train/loss"] for row in rows(run.folder) if "train/loss" in row]
    return losses, weights(run)


DROPOUT = "model.dropout=0.1"


def watched_run(trainer, *overrides):
    # One short prompt and few tokens: a look of them takes a tenth of the usual time.
    short = ("lens.prompts=[the bank]", "lens.repeated=3")
    return trainer(DROPOUT, "lens=default", "lens.every=1", *short, *overrides)


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """result() of a run without the lens."""
    from train import Trainer

    folder = tmp_path_factory.mktemp("without")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run = Trainer(run_settings(*TINY, "data.path=text.txt", DROPOUT, "name=without"))
        found = result(run)
        run.close(0)
    assert not (folder / "runs" / "without" / "attention").exists()
    return found


def assert_unchanged(run, without):
    losses, found = result(run)
    assert losses == without[0]
    assert_same(found, without[1])


def test_training_is_bit_exact_with_the_lens(trainer, without, tmp_path):
    """Dropout on; the model that is looked into is not the one that may be compiled."""
    run = watched_run(trainer, "name=with", "lens.layers=[1]")
    run.fast_model = lambda *batch: run.model(*batch)  # nothing to look into
    assert_unchanged(run, without)
    assert run.lens is not None
    folder = tmp_path / "runs" / "with" / "attention"
    assert len(names(folder, "*.png")) == 5 * 2 * 2
    assert names(folder, "*.html") == [f"step_{s:08d}.html" for s in range(5)] + ["timelapse.html"]
    assert {"heads.csv", "statistics.jsonl"} <= set(names(folder))
    log = rows(folder.parent)
    assert all("attention_layers/entropy/L01" in row for row in log)
    assert log[0]["attention_layers/entropy/L00"] == pytest.approx(1, abs=0.01)
    assert log[0]["attention/viewer"] == "attention/step_00000000.html"


def raises(error):
    def fails(*_, **__):
        raise error

    return fails


FAILURES = {
    "construction": ("lens.probe.make_prompt", ValueError("a prompt\nwithout tokens")),
    "probing": ("lens.probe.measure", RuntimeError("out of\nmemory")),
    "drawing": ("lens.heatmap.draw_grid", OSError("no space\nleft")),
    "page": ("lens.page.page", KeyError("runs")),
    "numbers": ("lens.history.History.add", OSError("no space left")),
    "timelapse": ("lens.page.read", PermissionError("not allowed")),
    "table": ("lens.history.History.write_table", PermissionError("not allowed")),
}


@pytest.mark.parametrize("where", FAILURES)
def test_training_goes_on_when_the_lens_fails(trainer, without, monkeypatch, capsys, where):
    target, error = FAILURES[where]
    monkeypatch.setattr(target, raises(error))
    run = watched_run(trainer)
    assert_unchanged(run, without)
    assert run.state.step == 4
    assert run.lens is None
    cause = " ".join(f"{type(error).__name__}: {error}".split())
    warnings = [line for line in capsys.readouterr().err.splitlines() if "lens" in line]
    assert len(warnings) == 1
    assert cause in warnings[0]


def test_debug_shows_why_the_lens_fails(trainer, monkeypatch):
    monkeypatch.setattr("lens.heatmap.draw_grid", raises(OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        watched_run(trainer, "debug=true").train()


def test_resumed_run_has_the_same_pages(trainer, tmp_path):
    watched_run(trainer, "name=whole").train()
    stopped = watched_run(trainer, "name=halves")
    stopped.signals.received = signal.SIGTERM
    with pytest.raises(SystemExit):
        stopped.train()
    assert stopped.state.step == 1
    stopped.tracker.finish()
    # An attempt that went further than the checkpoint before it was killed.
    folder = tmp_path / "runs" / "halves" / "attention"
    (folder / "step_00000003.html").write_text("half a page")
    (folder / "step_00000003_1-the-bank.png").write_text("half a picture")
    with open(folder / "statistics.jsonl", "a") as file:
        file.write('{"step": 3, "entropy": [[')
    watched_run(trainer, "name=halves").train()
    whole = tmp_path / "runs" / "whole" / "attention"
    assert names(folder) == names(whole)
    for name in ("statistics.jsonl", "heads.csv"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()
    (one,), (other,) = read(whole / "timelapse.html"), read(folder / "timelapse.html")
    assert one["frames"] == other["frames"]
    assert one["history"] == other["history"]


def test_resume_with_other_prompts_is_reported(trainer, capsys):
    def said(steps, prompts):
        run = ("name=changed", f"trainer.max_steps={steps}", f"lens.prompts=[{prompts}]")
        watched_run(trainer, *run).train()
        return [line for line in capsys.readouterr().out.splitlines() if "lens.prompts" in line]

    said(2, "one,two")
    assert said(3, "one,two") == []
    assert len(said(4, "three")) == 1
