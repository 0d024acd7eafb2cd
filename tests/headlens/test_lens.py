"""The lens: steps of snapshots, files, and that training is unchanged, bit for bit."""

import csv
import dataclasses
import functools
import io
import itertools
import json
import math
import os
import re
import signal
import time

import numpy as np
import pytest
import torch
from helpers.loops import uniform_attention
from helpers.models import tiny_model
from helpers.pages import GivenModel, a_run, read, unpacked
from helpers.runs import assert_same, rows, weights
from helpers.tally import trials
from hypothesis import given
from hypothesis import strategies as st

from data import get_tokenizer
from headlens import (
    DEFAULT_PROMPTS,
    KINDS,
    STATISTICS,
    Lens,
    LensConfig,
    read_snapshot,
    snapshot_bytes,
    write_snapshot,
)
from headlens.drawing import heads_image
from headlens.heads import ALL_NAMES, COLUMNS
from headlens.heatmap import png_of
from headlens.history import read_history
from headlens.lens import MAX_FILES, MAX_IMAGES
from headlens.render import draw_snapshot
from train import fit

BYTE = get_tokenizer("byte")


def lens_on(*prompts, context_length=1024, vocabulary=range(256), **changes):
    return Lens(
        BYTE,
        LensConfig(prompts=list(prompts), **changes),
        context_length=context_length,
        vocabulary=vocabulary,
        run_name="a run",
    )


def model_at(step):
    """Returns a model of two layers of two heads. Weights depend on step and prompt."""

    def capture_attention(token_ids, capture):
        num_tokens = len(token_ids)
        generator = torch.Generator().manual_seed(1000 * step + num_tokens)
        future = torch.ones(num_tokens, num_tokens).triu(1).bool()
        for layer in (0, 1):
            scores = torch.randn(1, 2, num_tokens, num_tokens, generator=generator)
            scores = (3 * scores).masked_fill(future, float("-inf"))
            capture(layer, scores[0].softmax(-1), scores[0])

    return GivenModel(capture_attention)


def taken(lens, model, step, max_steps, folder, **options):
    """Takes the snapshot of a step of a run."""
    lens.folder, lens.max_steps = folder, max_steps
    return lens.snapshot(model, step, **options)


def due(lens, step, max_steps):
    lens.max_steps = max_steps
    return lens.due(step)


def watched(lens, folder, max_steps, first_step=0):
    """Takes all snapshots of a run. Returns {step: Snapshot}."""
    return {
        step: taken(lens, model_at(step), step, max_steps, folder)
        for step in range(first_step, max_steps + 1)
        if due(lens, step, max_steps)
    }


def names(folder, pattern="*"):
    return sorted(path.name for path in folder.glob(pattern))


def steps_of(path):
    """Returns the steps whose weights are on a page."""
    (run,) = read(path)
    return [frame["step"] for frame in run["frames"]]


def test_snapshots_without_a_number_of_steps(tmp_path):
    """The number of steps of a training may be unknown."""
    lens = lens_on("x")
    lens.folder = tmp_path
    for step in (0, 40, 80):
        assert lens.snapshot(model_at(step), step).pages
    assert steps_of(tmp_path / "page.html") == [0, 40, 80]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("every", -1), ("max_tokens", 1), ("repeat_length", 1), ("prompts", "a b")],
        *[("max_percent", 0), ("max_percent", 101), ("max_percent", math.nan)],
        *[("prompts", ["The fox", path]) for path in ("my.txtt", "data/my.txt", r"C:\data\my")],
    ],
)
def test_settings_of_the_library_that_do_not_fit(key, value):
    with pytest.raises(ValueError, match=key):
        LensConfig(**{key: value})


def test_prompts_without_white_space_that_are_no_paths():
    prompts = ["...", "</s>", "3.14", "1/2+1/4=", "U.S.", "<s>a/b</s>", "彼は言った。", "fox"]
    assert LensConfig(prompts=prompts).prompts == prompts


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test moves."""
    now = {"seconds": 100.0}
    monkeypatch.setattr(time, "perf_counter", lambda: now["seconds"])
    return now


def test_snapshots_take_at_most_the_given_share_of_the_time(tmp_path, clock):
    """A step takes 1 s, a snapshot 2 s."""

    def slow(model):
        def capture_attention(token_ids, capture):
            clock["seconds"] += 2
            model.attend(token_ids, capture)

        return GivenModel(capture_attention)

    def run(percent, steps, first_step=0):
        lens = lens_on("the bank", repeat_length=0, every=10, ablation="off", max_percent=percent)
        found, before = [], clock["seconds"]
        for step in range(first_step, steps + 1):
            clock["seconds"] += step > first_step
            if due(lens, step, steps):
                taken(lens, slow(model_at(step)), step, steps, tmp_path)
                found.append(step)
        share, lines = 2 * len(found) / (clock["seconds"] - before), lens.skipped_snapshots()
        return found, share, [int(number) for line in lines for number in line.split()[:3:2]]

    planned = [*range(0, 201, 10)]
    assert run(None, 200)[::2] == (planned, [])
    found, share, numbers = run(5, 200)
    assert {0, 200} < {*found} < {*planned}
    assert 0.03 < share <= 0.05  # as many as there is time for
    assert numbers == [21 - len(found), 21]
    assert run(0.1, 200)[0] == [0, 200]
    assert run(0.1, 200, first_step=5)[0] == [10, 200]  # of a run that is resumed


@pytest.mark.filterwarnings("error")
def test_a_model_that_has_diverged_has_no_names_and_no_contexts():
    tokenizer, model = get_tokenizer("byte"), tiny_model(vocab_size=257, context_length=64)
    model.token_emb.weight.data.fill_(math.nan)
    for text in (None, "Tam heard the bell, and the bell heard Tam. " * 30):
        lens = Lens(tokenizer, context_length=64, folder="unused", text=text)
        data, _ = lens.inspect(model)
        assert (data.row.names == 0).all()
        assert not text or (data.contexts.cells[:, :, 0] == -1).all()


def test_arguments_of_the_library_that_do_not_fit(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("The bell rang. " * 40)
    wrong = [str(path), "too short", f"{path}t", "data/text"]
    for error, text in ((TypeError, path), *((ValueError, text) for text in wrong)):
        with pytest.raises(error, match="text"):
            Lens(get_tokenizer("byte"), context_length=64, folder="unused", text=text)


def test_prompts_of_the_library():
    """Passages of the text, in its language; English sentences without a text."""
    tokenizer, text = get_tokenizer("byte"), "Die Glocke läutete. Tam hörte die Glocke. " * 9
    options = {"context_length": 64, "folder": "unused"}
    prompts = Lens(tokenizer, text=text, **options).prompts
    texts = [prompt.text for prompt in prompts if not prompt.period]
    assert texts
    assert all(each in text and len(each.encode()) <= 64 for each in texts)
    one = LensConfig(prompts=["One."])
    assert Lens(tokenizer, one, text=text, **options).prompts[0].text == "One."
    windows = torch.tensor([tokenizer.encode_ordinary(text)[:64]])
    for other in (None, windows):
        without = Lens(tokenizer, text=other, **options).prompts
        assert [prompt.text for prompt in without[:3]] == [*DEFAULT_PROMPTS]


def test_prompts():
    lens = lens_on("She sat on the bank.", "::", max_tokens=9)
    assert [len(p.token_ids) for p in lens.prompts] == [9, 2, 9]
    assert [p.period for p in lens.prompts] == [0, 0, 4]
    assert lens_on("x", repeat_length=31, max_tokens=20).prompts[-1].period == 9
    for without in ({"repeat_length": 0}, {"max_tokens": 4}, {"vocabulary": []}):
        assert len(lens_on("x", **without).prompts) == 1


def test_steps_of_snapshots():
    usual = [(None, 120, [0, 40, 80, 120]), (None, 2000, [*range(0, 2001, 100)])]
    for every, max_steps, snapshots in [(40, 100, [0, 40, 80, 100]), *usual]:
        lens = lens_on("x", every=every)
        assert [s for s in range(max_steps + 1) if due(lens, s, max_steps)] == snapshots


@trials(50, 500)
@given(
    snapshots=st.integers(1, 2000),
    every=st.integers(1, 10**5),
    rest=st.floats(0, 1),
    prompts=st.integers(1, 20),
    repeat_length=st.sampled_from([0, 24]),
)
def test_number_of_files_is_limited(snapshots, every, rest, prompts, repeat_length):
    """A short run draws all snapshots. A long run draws snapshots at equal intervals."""
    lens = lens_on(*["x"] * prompts, every=every, repeat_length=repeat_length)
    files = len(lens.prompts) + 2
    max_steps = every * snapshots + int(rest * (every - 1))
    steps = sorted({*range(0, max_steps + 1, every), max_steps})
    lens.max_steps = max_steps
    drawn = [step for step in steps if lens.draws(step)]
    assert len(drawn) * files <= MAX_FILES
    assert (drawn[0], drawn[-1]) == (0, max_steps)
    assert len({*np.diff(drawn[:-1])}) <= 1
    if (len(steps) + 1) * files <= MAX_FILES - MAX_IMAGES:
        assert drawn == steps


def test_files_and_numbers_of_a_snapshot(tmp_path):
    folder = tmp_path / "attention"
    lens = lens_on("the bank", "<b>\n$x$ & \u202e\x00 ß 漢字</b>", every=7, max_tokens=9)
    snapshot = taken(lens, model_at(7), 7, 100, folder)
    slugs = ["1-the-bank", "2-b-x-b", "3-repeated"]
    assert taken(lens, model_at(7), 7, 100, tmp_path / "other", write=False) is None
    assert list(tmp_path.iterdir()) == [folder]
    assert snapshot.pages == {"attention/page": folder / "page.html"}
    pictures = [f"step_00000007_{slug}.png" for slug in slugs]
    # The keys do not depend on the prompts.
    assert {key: [path.name for path in paths] for key, paths in snapshot.images.items()} == {
        "attention/heads": pictures,
        "attention/largest": ["step_00000007.png"],
    }
    pictures.append("step_00000007.png")
    assert names(folder) == sorted(
        ["statistics.jsonl", "page.html", "step_00000007.npz", *pictures]
    )

    (run,) = read(folder / "page.html")
    assert (run["name"], run["layers"], run["heads"]) == ("a run", 2, 2)
    history = json.loads(unpacked(run["history"]))
    assert history["steps"] == [7]
    line = json.loads((folder / "statistics.jsonl").read_text())
    assert (line.pop("step"), line.pop("losses")) == (7, [])
    assert line.pop("errors") == {}
    assert line.pop("learned_sink") == [[None, None]] * 2  # and no key: the model has none
    for key in ("names", "places", "offsets"):
        assert np.shape(line.pop(key)) == (2, 2)
    assert line.pop("layers") == [0, 1]
    shown = {key: {"diagonal": "self"}.get(key, key) for key in line}
    assert {*shown, "learned_sink"} == {*STATISTICS}
    layers = {f"attention_layers/{key}/L0{n}" for key in shown.values() for n in (0, 1)}
    kinds = {f"attention_{what}/{shown[key]}" for key in KINDS for what in ("best", "names")}
    assert set(snapshot.metrics) == layers | kinds
    found = {key: len(captions) for key, captions in snapshot.captions.items()}
    assert found == {"attention/heads": 3, "attention/largest": 1}
    assert all("7" in caption for captions in snapshot.captions.values() for caption in captions)
    assert "the bank" in snapshot.captions["attention/heads"][0]
    for key, values in line.items():  # the same values in all outputs
        assert history["values"][key] == [values[0] + values[1]]
        head = snapshot.heads[f"attention_heads/{shown[key]}/L01H00"]
        assert head == pytest.approx(values[1][0], abs=1e-4)
        mean = snapshot.metrics[f"attention_layers/{shown[key]}/L01"]
        assert mean == pytest.approx(sum(values[1]) / 2, abs=1e-4)
        if key in KINDS:
            best = snapshot.metrics[f"attention_best/{shown[key]}"]
            assert best == pytest.approx(max(values[0] + values[1]), abs=1e-4)


def test_undefined_and_infinite_values_are_omitted(tmp_path):
    def diverged(token_ids, capture):
        weights = torch.eye(len(token_ids)).expand(2, -1, -1)
        capture(0, weights, torch.full((2, *weights.shape[1:]), torch.inf))

    snapshot = taken(lens_on("the bank"), GivenModel(diverged), 0, 10, tmp_path)
    assert not [key for key in snapshot.metrics if "largest_logit" in key]
    assert np.isfinite([*snapshot.metrics.values(), *snapshot.heads.values()]).all()
    line = json.loads((tmp_path / "statistics.jsonl").read_text(), parse_constant=pytest.fail)
    assert line["largest_logit"] == [[None, None]]


def test_page_and_table_of_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr("headlens.render.SMALL_FRAMES", 5)
    lens = lens_on("the bank", every=10, max_tokens=9)
    snapshots = watched(lens, tmp_path, 100)
    with_one = [step for step, snapshot in snapshots.items() if "attention/page" in snapshot.pages]
    assert with_one == [0, 10, 30, 70, 100]  # the first, second, fourth, eighth and last
    (run,) = read(tmp_path / "page.html")
    steps = steps_of(tmp_path / "page.html")
    assert steps == sorted(set(steps))
    assert (len(steps), steps[0], steps[-1]) == (5, 0, 100)
    assert json.loads(unpacked(run["history"]))["steps"] == list(range(0, 101, 10))

    assert [step for step, snapshot in snapshots.items() if snapshot.tables] == [100]
    table = snapshots[100].tables["attention/table"]
    assert (tmp_path / "heads.csv").is_file()
    assert {(row["layer"], row["head"]) for row in table} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    for row in table:
        shown = ["self" if key == "diagonal" else key for key in COLUMNS if key != "learned_sink"]
        assert [*row] == ["heatmap", *shown]
    kinds = {row["name"] for row in lens.table} & {*KINDS}
    assert len(lens.most_significant_heads()) == len(kinds) + bool(kinds)


def test_a_model_that_has_diverged_has_no_ablation(tmp_path):
    lens = lens_on("the bank")
    taken(lens, model_at(9), 10, 10, tmp_path, ablate=lambda groups: {"loss": math.nan})
    assert lens.most_important_heads() == []


def test_only_a_head_with_a_name_on_every_prompt_is_named_in_images_and_counted(tmp_path):
    lens = lens_on("aaaaaa", "bbbbbb", repeat_length=0, every=10)
    previous = torch.eye(6)[[0, 0, 1, 2, 3, 4]]
    only_b = {ord("a"): uniform_attention(6)[0], ord("b"): previous}
    for step, of_first in ((10, only_b), (20, dict.fromkeys(only_b, previous))):

        def capture_attention(ids, capture, of_first=of_first):
            capture(0, torch.stack([of_first[ids[0]], uniform_attention(6)[0]]))

        snapshot = taken(lens, GivenModel(capture_attention), step, 30, tmp_path)
        (caption,) = snapshot.captions["attention/largest"]
        assert ("previous token" in caption) == (step == 20)
        assert snapshot.metrics["attention_names/previous_token"] == (step == 20)
        data = read_snapshot(tmp_path / f"step_{step:08d}.npz")
        without = png_of(heads_image(data, 1), compress_level=1)
        is_without = snapshot.images["attention/heads"][1].read_bytes() == without
        assert is_without == (step == 10)


def test_a_large_model_has_few_keys(tmp_path):
    """Statistics of single heads have keys only if there are few, those of layers almost always.
    The file has all of them."""

    def uniform(token_ids, capture, shape):
        weights = uniform_attention(len(token_ids)).expand(shape[1], -1, -1)
        for layer in range(shape[0]):
            capture(layer, weights, weights)

    for shape in ((4, 4), (12, 12), (25, 24), (48, 25), (199, 1), (400, 1)):
        lens = lens_on("the bank", "of the river", repeat_length=4)
        model = GivenModel(functools.partial(uniform, shape=shape))
        snapshot = taken(lens, model, 10, 10, tmp_path / str(shape))
        groups = (snapshot.metrics, snapshot.heads, snapshot.histograms, snapshot.images)
        groups += (snapshot.pages, snapshot.tables, snapshot.charts)
        assert sum(map(len, groups)) < 2000 - 60  # of training, validation and the tables of charts
        assert bool(snapshot.heads) == (shape in ((4, 4), (12, 12)))
        has_layers = any(key.startswith("attention_layers/") for key in snapshot.metrics)
        assert has_layers == (shape[0] < 150)
        images = [path for paths in snapshot.images.values() for path in paths]
        cells = [cell for row in snapshot.tables["attention/table"] for cell in row.values()]
        images += [cell for cell in cells if isinstance(cell, np.ndarray)]
        assert len(images) == min(50, shape[0] * shape[1] + 4)  # heads, prompts, the clearest
        (line,) = (tmp_path / str(shape) / "statistics.jsonl").read_text().splitlines()
        assert np.shape(json.loads(line)["entropy"]) == shape


def test_a_page_has_only_steps_of_the_same_prompts(tmp_path):
    watched(lens_on("the bank", every=10), tmp_path, 20)
    path = tmp_path / "step_00000010.npz"
    other_version = read_snapshot(path)
    other_version.prompts[0].uniform["entropy"] = 0.9
    write_snapshot(path, other_version)
    watched(lens_on("the bank", every=10), tmp_path, 30, first_step=21)
    assert steps_of(tmp_path / "page.html") == [0, 10, 20, 30]
    watched(lens_on("the bank and more", every=10), tmp_path, 50, first_step=31)
    assert steps_of(tmp_path / "page.html") == [40, 50]
    (run,) = read(tmp_path / "page.html")
    assert json.loads(unpacked(run["history"]))["steps"] == [0, 10, 20, 30, 40, 50]


def test_data_of_a_snapshot(tmp_path):
    path = tmp_path / "step_00000080.npz"
    data = a_run().snapshots[2]
    write_snapshot(path, data)
    found = read_snapshot(path)
    assert (found.run, found.step) == ("first", 80)
    assert [vars(prompt) for prompt in found.prompts] == [
        {name: vars(p)[name] for name in vars(found.prompts[0])} for p in data.prompts
    ]
    assert found.details == data.details
    for one, other in ((found.codes, data.codes), (found.norms, data.norms)):
        for of_prompt, wanted in zip(one, other, strict=True):
            np.testing.assert_array_equal(of_prompt, wanted)
    for key, values in data.row.values.items():
        np.testing.assert_allclose(found.row.values[key], values, atol=5e-5)


def test_resume_drops_files_after_the_checkpoint(tmp_path):
    watched(lens_on("the bank", every=10), tmp_path, 60)
    watched(lens_on("the bank", every=10), tmp_path, 40, first_step=31)
    steps = [0, 10, 20, 30, 40]
    assert names(tmp_path, "step_*.npz") == [f"step_{s:08d}.npz" for s in steps]
    assert {name[:13] for name in names(tmp_path, "*.png")} == {f"step_{s:08d}" for s in steps}
    lines = (tmp_path / "statistics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == steps
    assert steps_of(tmp_path / "page.html") == steps


def test_a_name_that_is_nearly_clear_stays_also_when_a_run_is_resumed(tmp_path, monkeypatch):
    """A head gets its name at a significance of 0.25 and keeps it down to 0.19. The files of a
    resumed run are the same as those of one that was never stopped."""
    monkeypatch.setattr("headlens.heads.MIN_ERRORS", 0)  # of a few tokens
    shares = {0: 0.22, 10: 0.3, 20: 0.22, 30: 0.2, 40: 0.1, 50: 0.22}
    names_at = ["", "previous_token", "previous_token", "previous_token", "uniform", ""]

    def take(folder, steps):
        lens = lens_on("the bank of a river", every=10, repeat_length=0)
        for step in steps:

            def attend(token_ids, capture, share=shares[step]):
                size = len(token_ids)
                weights = torch.ones(size, size).tril() / torch.arange(1, size + 1)[:, None]
                previous = torch.diag(torch.ones(size - 1), -1)
                weights[1:] = (1 - share) * weights[1:] + share * previous[1:]
                capture(0, weights[None], None)

            snapshot = taken(lens, GivenModel(attend), step, 50, folder)
        return lens, snapshot

    take(tmp_path / "whole", shares)
    for first in (20, 30, 40):
        folder = tmp_path / str(first)
        take(folder, [step for step in shares if step < first])
        take(folder, [step for step in shares if step >= first])
        for name in ("statistics.jsonl", "heads.csv"):
            assert (folder / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    rows = read_history(tmp_path / "whole" / "statistics.jsonl")
    assert [ALL_NAMES[row.names.item()] for row in rows] == names_at
    (run,) = read(tmp_path / "whole" / "page.html")
    of_frames = json.loads(unpacked(run["heads_at"]))
    assert [ALL_NAMES[heads["names"][0]] for heads in of_frames] == names_at
    assert re.findall(r"step (\d+)", of_frames[-1]["findings"][0]) == ["30"]
    files = sorted((tmp_path / "whole").glob("*.npz"))
    assert [ALL_NAMES[read_snapshot(file).row.names.item()] for file in files] == names_at
    (head,) = csv.DictReader((tmp_path / "whole" / "heads.csv").read_text().splitlines())
    assert head["name"] == ""
    lens, snapshot = take(tmp_path / "short", [0, 10, 20, 30])
    assert snapshot.new_names == []  # it is not new at step 30
    assert lens.history.rows[-1].names.item() == ALL_NAMES.index("previous_token")


def test_a_name_is_new_when_the_first_head_has_it(tmp_path):
    lens, new = lens_on("the bank of a river", every=10, repeat_length=0), []
    for step in (0, 10, 20):

        def attend(token_ids, capture, count=step // 10):
            weights = torch.eye(len(token_ids)).roll(-1, 1).tril()  # to the token before
            weights[0, 0] = 1
            uniform = torch.ones_like(weights).tril()
            uniform /= uniform.sum(-1, keepdim=True)
            capture(0, torch.stack([weights] * count + [uniform] * (2 - count)), None)

        new.append(taken(lens, GivenModel(attend), step, 50, tmp_path).new_names)
    assert [len(names) for names in new] == [0, 1, 0]


def fails(*_, **__):
    raise OSError("two\nlines")


@pytest.mark.parametrize("kind", ["npz", "png", "html", "csv"])
def test_files_are_written_atomically(tmp_path, monkeypatch, kind):
    lens, replace = lens_on("the bank"), os.replace
    taken(lens, model_at(0), 0, 100, tmp_path)
    before = names(tmp_path, f"*.{kind}")
    failing = lambda part, path: (fails if path.suffix == f".{kind}" else replace)(part, path)  # noqa: E731
    monkeypatch.setattr("os.replace", failing)
    with pytest.raises(OSError):  # noqa: PT011
        taken(lens, model_at(100), 100, 100, tmp_path)
    assert names(tmp_path, f"*.{kind}") == before
    assert names(tmp_path, "*.part-*") == []


def test_a_row_that_was_not_written_is_written_with_the_next(tmp_path, monkeypatch):
    lens = lens_on("the bank", every=10)
    watched(lens, tmp_path, 100, first_step=90)
    with monkeypatch.context() as patch:
        patch.setattr("headlens.history.open", fails, raising=False)
        with pytest.raises(OSError):  # noqa: PT011
            taken(lens, model_at(110), 110, 200, tmp_path)
    taken(lens, model_at(120), 120, 200, tmp_path)
    assert [row.step for row in read_history(tmp_path / "statistics.jsonl")] == [90, 100, 110, 120]


def test_other_and_truncated_files_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "step_00000000.npz"
    whole = snapshot_bytes(a_run().snapshots[0])
    wrong = [whole[:cut] for cut in range(0, len(whole), len(whole) // 20)]
    changed = [{"format": 0}, {"row": {}}]
    with np.load(io.BytesIO(whole)) as arrays:
        arrays = dict(arrays)
    for change in changed:
        values = json.loads(arrays["json"].tobytes()) | change
        file = io.BytesIO()
        text = np.frombuffer(json.dumps(values).encode(), np.uint8)
        np.savez(file, **arrays | {"json": text})
        wrong.append(file.getvalue())
    file = io.BytesIO()
    np.savez(file, **arrays | {"weights_0": arrays["weights_0"].astype(np.float32)})
    wrong.append(file.getvalue())
    file = io.BytesIO()
    np.savez(file, json=np.array([{"format": 1}], dtype=object))  # pickled
    for content in (*wrong, file.getvalue(), b"of another program"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="step_00000000"):
            read_snapshot(path)
    path.write_bytes(whole)
    read_snapshot(path)
    for limit in ("MAX_BYTES", "MAX_JSON_BYTES"):
        with monkeypatch.context() as patch:
            patch.setattr(f"headlens.snapshot_data.{limit}", 1000)
            with pytest.raises(ValueError, match="step_00000000"):
                read_snapshot(path)


def watched_run(make_run, *overrides):
    # One short prompt with few tokens makes a snapshot ten times faster.
    short = ("lens.prompts=[the bank]", "lens.repeat_length=3")
    lens = ("lens=default", "lens.every=1", "lens.ablation=exact")
    return make_run("model.dropout=0.1", *lens, *short, *overrides)


def result(run):
    """Trains a run. Returns its losses and final weights."""
    fit(run)
    return [row.get("train/loss") for row in rows(run.directory)], weights(run)


def test_training_is_bit_exact_with_the_lens_also_when_it_fails(make_run, tmp_path, monkeypatch):
    """With dropout. Snapshots do not use the model that may be compiled."""
    losses, expected = result(make_run("model.dropout=0.1", "name=without"))
    for name in ("with", "failing"):
        run = watched_run(make_run, f"name={name}")
        run.trained_model = lambda *batch, model=run.model: model(*batch)  # not a module
        if name == "failing":
            monkeypatch.setattr("headlens.lens.draw_snapshot", None)  # raises TypeError
        found_losses, found = result(run)
        assert found_losses == losses
        assert_same(found, expected)
    folder = tmp_path / "runs" / "with" / "attention"
    assert len(names(folder, "*.png")) == 5 * 3
    assert names(folder, "*.html") == []  # run.html has the heads
    log = rows(folder.parent)
    assert all("attention_layers/entropy/L01" in row for row in log)
    assert log[0]["attention_layers/entropy/L00"] == pytest.approx(1, abs=0.01)
    assert log[0]["attention/largest"] == ["attention/step_00000000.png"]


def test_a_run_with_little_time_for_snapshots_has_the_same_weights(make_run, capsys):
    """The first and the last snapshot are always taken; the summary says how many were skipped."""
    losses, expected = result(watched_run(make_run, "name=all"))
    run = watched_run(make_run, "name=few", "lens.max_percent=1e-9")
    capsys.readouterr()
    found_losses, found = result(run)
    assert found_losses == losses
    assert_same(found, expected)
    assert names(run.directory / "attention", "*.npz") == ["step_00000000.npz", "step_00000004.npz"]
    assert len(re.findall(r"\b3 of 5 snapshots\b", capsys.readouterr().out)) == 1


@pytest.mark.parametrize("of_rank_0", [False, True])
def test_rank_0_decides_for_all_ranks_whether_there_is_time(make_run, of_rank_0):
    """Their clocks differ, and all ranks run the model for a snapshot."""
    asked = []

    class OnAnotherRank:
        def broadcast(self, value):
            asked.append(value)
            return of_rank_0

    run = watched_run(make_run, "lens.every=2", f"lens.max_percent={1e-9 if of_rank_0 else 100}")
    lens = dataclasses.replace(run.lens, strategy=OnAnotherRank())
    lens.lens.started, lens.lens.durations = -1e9, [1.0]
    assert [lens.is_due(step, 100) for step in (1, 2)] == [False, of_rank_0]
    assert asked == [not of_rank_0]


def test_an_error_costs_its_snapshots_only_and_is_one_line(make_run, monkeypatch, capsys):
    run, calls = watched_run(make_run, "name=passing"), itertools.count()
    monkeypatch.setattr(
        "headlens.lens.draw_snapshot",
        lambda *inputs: fails() if next(calls) in (1, 2) else draw_snapshot(*inputs),
    )
    fit(run)
    folder = run.directory / "attention"
    log = rows(run.directory)
    assert [row["step"] for row in log if "attention/heads" in row] == [0, 3, 4]
    assert (folder / "heads.csv").exists()
    lines = capsys.readouterr().err.splitlines()
    assert [re.search(r"step (\d)", line)[1] for line in lines] == ["1", "2"]


def test_resumed_run_has_the_same_pages(make_run, tmp_path):
    fit(watched_run(make_run, "name=whole"))
    stopped = watched_run(make_run, "name=halves")
    stopped.stop.signals.received = signal.SIGTERM
    with pytest.raises(SystemExit):
        fit(stopped)
    folder = tmp_path / "runs" / "halves" / "attention"
    fit(watched_run(make_run, "name=halves"))
    whole = tmp_path / "runs" / "whole" / "attention"
    assert names(folder) == names(whole)
    for name in ("statistics.jsonl", "heads.csv", "ablation.json"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()
    (one,), (other,) = read(whole.parent / "run.html"), read(folder.parent / "run.html")
    assert one["frames"] == other["frames"]
