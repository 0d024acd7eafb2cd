"""The lens: when it looks, what it leaves on disk, and that it disturbs nothing."""

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
from helpers import TINY
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
from training.command import compose

BYTE = get_tokenizer("byte")


def lens_on(*prompts, context_length=1024, **changes):
    return Lens(
        LensConfig(prompts=list(prompts), **changes),
        BYTE.encode_ordinary,
        BYTE.decode_single_token_bytes,
        context_length,
        vocabulary=range(256),
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


def watched(lens, folder, last_step, first_step=0, run_name="a run"):
    """The looks of a whole run: {step: Look}."""
    return {
        step: lens.look(model_at(step), step, last_step, folder, run_name)
        for step in range(first_step, last_step + 1)
        if lens.due(step, last_step)
    }


def names(folder, pattern="*"):
    return sorted(path.name for path in folder.glob(pattern))


# ------------------------------------------------------------------------------------ settings


def problems(**changes):
    return [(key, fix) for key, _, _, fix in LensConfig(**changes).problems()]


def test_settings_that_do_not_fit_are_named_with_a_way_out():
    assert LensConfig().problems() == []
    assert problems(every=-1) == [("every", "use 0 for no lens")]
    assert problems(max_tokens=1) == problems(max_tokens=1025) == [("max_tokens", "use 64 or so")]
    assert problems(frames=1) == problems(frames=201) == [("frames", "use 24 or so")]
    assert problems(layers=[0, -1]) == [("layers", "use 0 or more")]
    assert problems(prompts=["ok", " "]) == [("prompts", "give it some words")]
    assert [key for key, _ in problems(prompts=[], repeated=0)] == ["prompts"]
    assert problems(prompts=[], repeated=0, every=0) == []
    assert problems(prompts=[]) == []


def test_no_more_prompts_and_pictures_than_a_page_and_a_dashboard_can_show():
    assert problems(prompts=["a b"] * 20) == []
    for many in (["a b"] * 21, [""] * 10_000):
        ((key, fix),) = problems(prompts=many)
        assert key == "prompts"
        assert "20" in fix
    most = {"prompts": ["a b"] * 8, "repeated": 24}  # nine pictures, and of each layer nine
    assert problems(**most, layers=list(range(48))) == []
    assert [key for key, _ in problems(**most, layers=list(range(49)))] == ["layers"]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("lens.prompts=['']", "lens.prompts='': an empty prompt; give it some words"),
        ("lens.max_tokens=1", "lens.max_tokens=1: the lens looks at 2 to 1024 tokens; use 64 "),
        ("lens.layers=[99]", "lens.layers=99: the model has layers 0 to 11; leave it out"),
        ("lens.layers=[-1]", "lens.layers=-1: layers count from 0; use 0 or more"),
        ("lens.frames=1", "lens.frames=1: a time-lapse has from 2 to 200 steps; use 24 "),
    ],
)
def test_refused_at_the_door_in_one_line(override, line):
    with pytest.raises(ConfigError) as caught:
        compose([override])
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_layer_is_checked_against_the_model_chosen():
    assert compose(["model=gpt2-medium", "lens.layers=[23]"]).lens.layers == [23]
    with pytest.raises(ConfigError, match="the model has layers 0 to 3"):
        compose(["model=gpt2-nano", "lens.layers=[0,4]"])


def test_the_prompts_and_the_repeated_sequence():
    lens = lens_on("She sat on the bank.", "::", max_tokens=9)
    assert [p.name for p in lens.prompts] == ["1-she-sat-on-the", "2-prompt", "3-repeated"]
    assert [len(p.token_ids) for p in lens.prompts] == [9, 2, 9]
    assert [p.period for p in lens.prompts] == [0, 0, 4]
    assert len(lens_on("abcdefgh", context_length=3).prompts[0].tokens) == 3
    assert len(lens_on("x", repeated=0).prompts) == 1
    assert lens_on("x", repeated=31, max_tokens=64).prompts[-1].period == 31
    assert lens_on("x", repeated=31, max_tokens=20).prompts[-1].period == 9
    assert len(lens_on("x", max_tokens=4).prompts) == 1
    nothing_to_draw_from = Lens(
        LensConfig(prompts=["x"]), BYTE.encode_ordinary, BYTE.decode_single_token_bytes, 64
    )
    assert len(nothing_to_draw_from.prompts) == 1


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(ValueError, match="without tokens"):
        Lens(LensConfig(prompts=["x"]), lambda text: [], BYTE.decode_single_token_bytes, 64)


# ---------------------------------------------------------------------------------------- when


def test_due_at_the_start_at_each_interval_and_at_the_end():
    lens = lens_on("x", every=40)
    assert [step for step in range(101) if lens.due(step, 100)] == [0, 40, 80, 100]
    for last_step, looks in ((120, [0, 40, 80, 120]), (2000, [*range(0, 2001, 100)])):
        left_open = lens_on("x")
        assert [s for s in range(last_step + 1) if left_open.due(s, last_step)] == looks
    assert LensConfig().interval(10**6) == 1000
    off = lens_on("x", every=0)
    assert not any(off.due(step, 100) for step in range(101))
    nothing = lens_on(repeated=0, every=1)
    assert not any(nothing.due(step, 100) for step in range(101))


def test_every_look_of_a_short_run_is_drawn_and_few_of_a_long_one():
    lens = lens_on("x", "y", "z", every=40)
    assert all(lens.draws(step, 4000) for step in [*range(0, 4001, 40)])
    drawn = [step for step in range(0, 400_001, 40) if lens.draws(step, 400_000)]
    assert 100 < len(drawn) <= MOST_FILES / 5 + 2
    assert (drawn[0], drawn[-1]) == (0, 400_000)
    assert len(set(np.diff(drawn)[:-1])) == 1


def test_time_lapses_come_at_each_quarter_of_the_run():
    lens = lens_on("x", every=10)
    looks = [step for step in range(0, 101) if lens.due(step, 100)]
    assert [s for s in looks if s and lens._is_milestone(s, 100)] == [30, 50, 80, 100]
    assert lens._is_milestone(100, 100)


@settings(max_examples=300, deadline=None)
@given(
    last_step=st.integers(1, 10**7),
    every=st.integers(1, 10**5),
    prompts=st.integers(1, 20),
    layers=st.integers(0, 20),
    repeated=st.sampled_from([0, 24]),
)
def test_no_run_has_more_files_than_a_dashboard_bears(last_step, every, prompts, layers, repeated):
    lens = Lens.__new__(Lens)
    lens.config = LensConfig(every=every, layers=list(range(layers)), repeated=repeated)
    lens.prompts = [None] * (prompts + bool(repeated))
    between = lens._drawn_every(last_step)
    assert between % every == 0
    drawn = [*range(0, last_step + 1, between)]
    assert all(lens.draws(step, last_step) for step in (*drawn[:3], last_step))
    drawn += [last_step] * (drawn[-1] != last_step)
    files = len(drawn) * (len(lens.prompts) * (1 + layers) + 1)
    milestones = [step for step in drawn if step > 0 and lens._is_milestone(step, last_step)]
    assert milestones[-1] == last_step
    assert len(milestones) <= 5
    assert files <= MOST_FILES
    assert files + len(milestones) + 1 <= 950  # and the table: as many as the tracker sends


# --------------------------------------------------------------------------------- what is left


def test_a_look_leaves_pictures_a_page_and_a_line_of_numbers(tmp_path):
    folder = tmp_path / "attention"
    lens = lens_on("the bank", "<b>$x$ & \u202e\x00 ß 漢字</b>", every=7, layers=[1])
    look = lens.look(model_at(7), 7, 100, folder, run_name="mine")
    slugs = ["1-the-bank", "2-b-x-b", "3-repeated"]
    assert list(look.pictures) == [
        f"attention/{kind}/{slug}" for slug in slugs for kind in ("heatmap", "layer/L01")
    ]
    assert look.pages == {"attention/viewer": folder / "step_00000007.html"}
    assert look.tables == {}
    assert names(folder) == sorted(
        ["statistics.jsonl", "step_00000007.html"]
        + [f"step_00000007_{slug}{end}.png" for slug in slugs for end in ("", "_L01")]
    )
    for path in look.pictures.values():
        assert min(Image.open(path).size) > 200

    (run,) = read(folder / "step_00000007.html")
    assert run["name"] == "mine"
    assert (run["layers"], run["heads"]) == (2, 2)
    assert [p["text"] for p in run["prompts"]] == [p.text for p in lens.prompts]
    assert [frame["step"] for frame in run["frames"]] == [7]
    history = json.loads(unpacked(run["history"]))
    assert history["steps"] == [7]
    (line,) = (folder / "statistics.jsonl").read_text().splitlines()
    for key, value in json.loads(line).items():
        if key != "step":
            assert history["values"][key] == [list(itertools.chain(*value))]


def test_the_numbers_of_a_look_have_the_dashboards_names(tmp_path):
    look = lens_on("the bank").look(model_at(7), 7, 100, tmp_path)
    line = json.loads((tmp_path / "statistics.jsonl").read_text())
    assert set(look.metrics) == {f"attention_layers/{k}/L0{n}" for k in STATISTICS for n in (0, 1)}
    assert len(look.heads) == len(STATISTICS) * 4
    assert set(look.histograms) == {f"attention_histograms/{key}" for key in STATISTICS}
    for key in STATISTICS:
        assert look.heads[f"attention_heads/{key}/L01H00"] == pytest.approx(
            line[key][1][0], abs=1e-4
        )
        mean = look.metrics[f"attention_layers/{key}/L01"]
        assert mean == pytest.approx(sum(line[key][1]) / 2, abs=1e-4)
        assert sorted(look.histograms[f"attention_histograms/{key}"]) == pytest.approx(
            sorted(itertools.chain(*line[key])), abs=1e-4
        )


def test_what_no_prompt_can_tell_has_no_number(tmp_path):
    look = lens_on("the bank", repeated=0).look(model_at(0), 0, 100, tmp_path)
    everything = [*look.metrics, *look.heads, *look.histograms]
    assert not [key for key in everything if "induction" in key or "duplicate" in key]
    assert np.isfinite([*look.metrics.values(), *look.heads.values()]).all()


def test_write_false_looks_and_leaves_nothing(tmp_path):
    lens, seen = lens_on("the bank"), []

    def look_into(token_ids, capture):
        seen.append(token_ids)
        model_at(0)(token_ids, capture)

    assert lens.look(look_into, 100, 100, tmp_path / "attention", write=False) is None
    assert seen == [prompt.token_ids for prompt in lens.prompts]
    assert list(tmp_path.iterdir()) == []


def test_the_end_leaves_a_table_of_all_heads(tmp_path):
    lens = lens_on("the bank", every=10)
    looks = watched(lens, tmp_path, 40)
    assert [step for step, look in looks.items() if look.tables] == [40]
    columns, rows = looks[40].tables["attention/table"]
    with open(tmp_path / "heads.csv", newline="", encoding="utf-8") as file:
        written = list(csv.reader(file))
    assert tuple(written[0]) == tuple(columns) == COLUMNS
    assert written[1:] == [[str(value) for value in row] for row in rows]
    assert len(rows) == len(STATISTICS) * 4
    found = lens.findings()
    assert all(
        re.fullmatch(r"[\w ]+ L\d H\d: \d\.\d\d \(halfway there at step \d+\)", f) for f in found
    )
    strong = {row[0]: row[4] for row in rows if row[1] == 1}
    assert len(found) == sum(
        strong[key] >= 0.25
        for key in ("previous_token", "induction", "duplicate_token", "first_token")
    )
    assert lens_on("x").findings() == []


def test_a_time_lapse_leaves_out_what_is_no_page(tmp_path):
    lens = lens_on("the bank", every=10)
    watched(lens, tmp_path, 30)
    (tmp_path / "step_00000010.html").write_text("of another program")
    lens._write_timelapse(tmp_path, "")
    (run,) = read(tmp_path / "timelapse.html")
    assert [frame["step"] for frame in run["frames"]] == [0, 20, 30]


@pytest.mark.parametrize("frames", [2, 3, 5, 24])
def test_a_time_lapse_is_made_of_the_pages_of_its_steps(tmp_path, frames):
    lens = lens_on("the bank", every=10, frames=frames, max_tokens=9)
    looks = watched(lens, tmp_path, 100)
    with_one = [step for step, look in looks.items() if "attention/timelapse" in look.pages]
    assert with_one == [30, 50, 80, 100]
    (run,) = read(tmp_path / "timelapse.html")
    steps = [frame["step"] for frame in run["frames"]]
    assert len(steps) == min(frames, 11)
    assert steps == sorted(set(steps))
    assert (steps[0], steps[-1]) == (0, 100)
    assert json.loads(unpacked(run["history"]))["steps"] == list(range(0, 101, 10))
    for frame in run["frames"]:
        (alone,) = read(tmp_path / f"step_{frame['step']:08d}.html")
        assert alone["frames"] == [frame]
        assert alone["prompts"] == run["prompts"]


def test_the_bytes_of_a_page_are_the_weights_of_the_model(tmp_path):
    lens = lens_on("the bank", "at", max_tokens=9, every=3)
    lens.look(model_at(3), 3, 100, tmp_path)
    (run,) = read(tmp_path / "step_00000003.html")
    raw = np.frombuffer(unpacked(run["frames"][0]["weights"]), np.uint8)
    for prompt in lens.prompts:
        layers = []
        model_at(3)(prompt.token_ids, lambda _, weights, __, out=layers: out.append(weights))
        num_tokens = len(prompt.token_ids)
        count = 2 * 2 * num_tokens * (num_tokens + 1) // 2
        here, raw = raw[:count].reshape(2, 2, -1), raw[count:]
        shown = triangle_to_square(from_codes(here))
        assert np.abs(shown - torch.cat(layers).numpy()).max() <= 1 / 255
    assert not len(raw)


def test_a_time_lapse_leaves_out_pages_that_show_other_prompts(tmp_path):
    watched(lens_on("the bank", every=10), tmp_path, 20)
    changed = lens_on("the bank and more", every=10)
    looks = watched(changed, tmp_path, 40, first_step=21)
    assert "attention/timelapse" in looks[40].pages
    (run,) = read(tmp_path / "timelapse.html")
    assert [frame["step"] for frame in run["frames"]] == [30, 40]
    assert json.loads(unpacked(run["history"]))["steps"] == [0, 10, 20, 30, 40]


def test_a_run_that_goes_on_drops_what_was_seen_after_its_checkpoint(tmp_path):
    watched(lens_on("the bank", every=10), tmp_path, 60)
    assert len(names(tmp_path, "step_*.html")) == 7
    keep = tmp_path / "step_by_step.txt"
    keep.write_text("not the lens's")
    watched(lens_on("the bank", every=10), tmp_path, 40, first_step=31)
    assert names(tmp_path, "step_*.html") == [f"step_{s:08d}.html" for s in (0, 10, 20, 30, 40)]
    assert {name[:13] for name in names(tmp_path, "step_*.png")} == {
        f"step_{s:08d}" for s in (0, 10, 20, 30, 40)
    }
    lines = (tmp_path / "statistics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 10, 20, 30, 40]
    assert keep.exists()
    (run,) = read(tmp_path / "timelapse.html")
    assert [frame["step"] for frame in run["frames"]] == [0, 10, 20, 30, 40]


def test_looks_between_the_drawn_ones_are_numbers_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("lens.MOST_FILES", 12)  # of one prompt and a page: at most six looks
    lens = lens_on("the bank", every=1, repeated=0)
    looks = watched(lens, tmp_path, 20)
    drawn = [step for step, look in looks.items() if look.pictures]
    assert drawn == [0, 4, 8, 12, 16, 20]
    assert len(names(tmp_path, "step_*")) == 12
    assert [s for s, look in looks.items() if "attention/timelapse" in look.pages] == [
        8,
        12,
        16,
        20,
    ]
    assert len((tmp_path / "statistics.jsonl").read_text().splitlines()) == 21
    assert all(look.metrics for look in looks.values())


def test_no_half_written_page_is_ever_in_place(tmp_path, monkeypatch):
    lens = lens_on("the bank")
    lens.look(model_at(0), 0, 100, tmp_path)

    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="disk full"):
        lens.look(model_at(40), 40, 100, tmp_path)
    assert names(tmp_path, "*.html") == ["step_00000000.html"]


# ------------------------------------------------------------------------------------ the page

HOSTILE = "</script><img src=x onerror=alert(1)><!--<script>&amp;\u2028'\"\\__DATA____CSP__"


def hostile_page(title=HOSTILE):
    prompt = Prompt("1-x", HOSTILE, [0, 1], [HOSTILE, "</SCRIPT >"])
    values = {key: np.zeros((1, 1), np.float32) for key in STATISTICS}
    frame = Frame(Row(0, values), [np.array([[[255, 0, 255]]], np.uint8)])
    return page([run_data(HOSTILE, [prompt], [frame_data(frame)], [frame.row])], title)


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

    def of(self, tag):
        return [
            (attrs, self.inside.get(n, ""))
            for n, (name, attrs) in enumerate(self.tags)
            if name == tag
        ]


def test_no_text_can_end_the_block_it_stands_in(tmp_path):
    text = hostile_page()
    assert "onerror=alert(1)>" not in text
    assert "<img" not in text
    found = Elements(text)
    kinds = [attrs.get("type") for attrs, _ in found.of("script")]
    assert kinds == ["application/json", None]  # the data, which nothing executes, and our own
    assert not found.of("img")
    ((_, title),) = found.of("title")
    assert title == HOSTILE
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    (run,) = read(tmp_path / "page.html")
    assert run["name"] == run["prompts"][0]["text"] == HOSTILE
    assert run["prompts"][0]["tokens"] == [HOSTILE, "</SCRIPT >"]


def test_the_policy_allows_our_own_script_and_style_and_nothing_else():
    found = Elements(hostile_page())
    (policy,) = [
        attrs["content"]
        for attrs, _ in found.of("meta")
        if attrs.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"

    def sha256(text):
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    ((_, script),) = [pair for pair in found.of("script") if "type" not in pair[0]]
    ((_, style),) = found.of("style")
    assert len(script) > 10_000
    assert rules["script-src"] == sha256(script)
    assert rules["style-src"] == sha256(style)
    assert rules["img-src"] == "data:"
    assert set(rules) == {
        "default-src",
        "script-src",
        "style-src",
        "img-src",
        "base-uri",
        "form-action",
    }
    for tag, attrs in found.tags:  # a policy by hashes forbids these; and they would be lost
        assert not [name for name in attrs if name.startswith("on")], tag
        assert "style" not in attrs, tag
    assert not re.search(r"https?://(?!www\.w3\.org)", script + style)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<!doctype html><p>something else</p>",
        START + '{"version": 1, "runs": [',
        START + '{"version": 1, "runs": [' + END,
        START + "{}" + END,
        START + '{"version": 1}' + END,
        START + "__DATA__" + END,
    ],
)
def test_what_is_no_page_of_the_lens_is_refused(tmp_path, text):
    path = tmp_path / "page.html"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError):  # noqa: PT011
        read(path)


def test_a_page_cut_anywhere_is_refused(tmp_path):
    text = hostile_page()
    data = text.index(START)
    end = text.index(END, data)
    path = tmp_path / "page.html"
    for cut in [*range(data, end, (end - data) // 20), end + 1]:
        path.write_bytes(text[:cut].encode("utf-8"))
        with pytest.raises(ValueError):  # noqa: PT011
            read(path)
    path.write_bytes(b"\xff\xfe\x00 no text at all")
    with pytest.raises(ValueError):  # noqa: PT011
        read(path)


# -------------------------------------------------------------------------------- in training


def final(run):
    run.train()
    weights = {name: value.clone() for name, value in run.model.state_dict().items()}
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    return losses, weights


@pytest.fixture
def without(trainer):
    """(losses, weights) of a run without the lens."""
    return final(trainer("model.dropout=0.1", "name=without"))


def watched_run(trainer, *overrides):
    return trainer("model.dropout=0.1", "lens=default", "lens.every=1", *overrides)


def assert_same(a, b):
    assert a[0] == b[0]
    assert a[1].keys() == b[1].keys()
    for name, value in a[1].items():
        assert torch.equal(value, b[1][name]), name


def test_looking_changes_nothing_in_training(trainer, without, tmp_path):
    """With and without the lens: the same losses and the same weights, dropout on."""
    run = watched_run(trainer, "name=with", "lens.layers=[1]")
    assert_same(final(run), without)
    folder = tmp_path / "runs" / "with" / "attention"
    assert len(names(folder, "*.png")) == 5 * 4 * 2
    assert names(folder, "*.html") == [f"step_{s:08d}.html" for s in range(5)] + ["timelapse.html"]
    assert {"heads.csv", "statistics.jsonl"} <= set(names(folder))
    rows = [json.loads(x) for x in (folder.parent / "metrics.jsonl").read_text().splitlines()]
    assert all("attention_layers/entropy/L01" in row for row in rows)
    assert rows[0]["attention_layers/entropy/L00"] == pytest.approx(1, abs=0.01)
    assert rows[0]["attention/viewer"] == "attention/step_00000000.html"


def broken(error):
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
def test_a_lens_that_fails_says_so_once_and_training_goes_on(
    trainer, without, monkeypatch, capsys, where
):
    target, error = FAILURES[where]
    monkeypatch.setattr(target, broken(error))
    run = watched_run(trainer)
    assert_same(final(run), without)
    assert run.state.step == 4
    assert run.lens is None
    warnings = [line for line in capsys.readouterr().err.splitlines() if "lens" in line]
    cause = " ".join(f"{type(error).__name__}: {error}".split())
    assert warnings == [f"lens: failed and is off from here on ({cause})"]


def test_with_debug_a_lens_that_fails_is_not_hidden(trainer, monkeypatch):
    monkeypatch.setattr("lens.heatmap.draw_grid", broken(OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        watched_run(trainer, "debug=true").train()


def test_a_resumed_run_has_the_pages_of_one_that_never_stopped(trainer, tmp_path):
    run = watched_run(trainer, "name=whole")
    run.train()
    stopped = watched_run(trainer, "name=halves")
    stopped.signals.received = signal.SIGTERM
    with pytest.raises(SystemExit):
        stopped.train()
    assert stopped.state.step == 1
    stopped.tracker.finish()
    # An attempt that went further than the checkpoint before it was killed.
    folder = tmp_path / "runs" / "halves" / "attention"
    (folder / "step_00000003.html").write_text("half a page")
    (folder / "step_00000003_1-she-sat-on-the.png").write_text("half a picture")
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


def test_it_looks_at_the_module_itself_and_not_at_what_may_be_compiled(trainer, without):
    run = watched_run(trainer)
    run.fast_model = lambda *batch: run.model(*batch)  # nothing to look into
    assert_same(final(run), without)
    assert run.lens is not None


def test_no_lens_leaves_no_folder(trainer, tmp_path):
    run = trainer("name=off")
    run.train()
    assert "lens=off" in TINY
    assert not (tmp_path / "runs" / "off" / "attention").exists()


def test_a_run_that_goes_on_with_other_prompts_says_so(trainer, capsys):
    settings = ("name=changed", "lens=default", "lens.every=2")
    trainer(*settings, "lens.prompts=[one,two]").train()
    capsys.readouterr()
    trainer(*settings, "lens.prompts=[one,two]", "trainer.max_steps=6").train()
    assert "something else than before" not in capsys.readouterr().out
    trainer(*settings, "lens.prompts=[three]", "trainer.max_steps=8").train()
    said = [line for line in capsys.readouterr().out.splitlines() if "than before" in line]
    assert len(said) == 1
    assert said[0].startswith("lens.prompts: the lens looks at something else")
    assert "one" in said[0]


def test_infinite_scores_leave_the_record_readable(tmp_path):
    """A run that diverges is the one to look at: its pages must open."""
    lens = lens_on("the bank", every=10)

    def look_into(token_ids, capture):
        weights = torch.eye(len(token_ids)).expand(2, -1, -1)
        capture(0, weights, torch.full((2, *weights.shape[1:]), torch.inf))

    lens.look(look_into, 0, 10, tmp_path)
    look = lens.look(look_into, 10, 10, tmp_path)
    assert not [key for key in look.metrics if "largest_logit" in key]
    for line in (tmp_path / "statistics.jsonl").read_text().splitlines():
        assert json.loads(line, parse_constant=pytest.fail)["largest_logit"] == [[None, None]]
    (run,) = read(tmp_path / "timelapse.html")
    json.loads(unpacked(run["history"]), parse_constant=pytest.fail)
