"""Hybrids: layers with attention between layers of other kinds. Everything that people read has the
number of a layer in the model."""

import csv
import dataclasses
import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.foreign import byte_level_tokenizer, foreign_model
from helpers.loops import uniform_attention
from helpers.pages import HYBRID, PROOF, PlantedModel, a_hybrid, a_run, read, removal, removals
from PIL import Image, ImageDraw

from headlens import (
    Lens,
    LensConfig,
    capture,
    draw_figure,
    read_snapshot,
    run_data,
    snapshot_bytes,
)
from headlens import lens as lens_module
from headlens.drawing import heads_image
from headlens.finding import between_layers, plain, removed_heads, statuses, subject
from headlens.history import read_history, row_of, row_values
from headlens.matching import read_runs
from headlens.snapshot_data import write_snapshot
from headlens.story import story
from scripts.inspect_attention import main

TOKENIZER = byte_level_tokenizer()
TEXT = "The bell rang twice, and nobody came. " * 20


def a_lens(folder, **options):
    config = LensConfig(prompts=["The bell rang twice."], repeat_length=6)
    return Lens(TOKENIZER, config, context_length=48, folder=folder, **options)


def removed(groups):
    """The result of removing each head of a model with two layers of four heads."""
    places = [*np.ndindex(2, 4)]
    heads = [removal(n / 10, layer=i, head=j) for n, (i, j) in enumerate(places)]
    return removals(groups=[]) | {"heads": heads}


@pytest.mark.parametrize("text", [None, TEXT])
def test_a_snapshot_of_a_hybrid(tmp_path, text):
    """Its layers are 1 and 2 of three."""
    model, lens = foreign_model("qwen3_next", vocab_size=320), a_lens(tmp_path, text=text)
    found = lens.snapshot(model, 0, ablate=removed)
    (row,) = read_history(tmp_path / "statistics.jsonl")
    data = read_snapshot(tmp_path / "step_00000000.npz")
    assert row.layers == data.row.layers == [1, 2]
    assert [*data.others] == [0]
    assert data.codes[0].shape[:2] == (2, 4)
    with open(tmp_path / "heads.csv", newline="") as file:
        table = [*csv.DictReader(file)]
    assert sorted(int(of["layer"]) for of in table) == [1] * 4 + [2] * 4
    assert {of["layer"] for of in found.tables["attention/table"]} == {1, 2}
    assert not {"place"} & (table[0].keys() | found.tables["attention/table"][0].keys())
    heads = json.loads((tmp_path / "ablation.json").read_text())["heads"]
    changes = {(of["layer"], of["head"]): of["loss_change"] for of in heads}
    assert changes == {(1 + i, j): (4 * i + j) / 10 for i, j in np.ndindex(2, 4)}
    written = {(int(of["layer"]), int(of["head"])): float(of["loss_change"]) for of in table}
    assert written == changes
    keys = {key.rpartition("/")[2][:3] for key in (*found.metrics, *found.heads) if "/L" in key}
    keys |= {key for _, lines in found.charts.values() for key in lines}
    assert keys == {"L01", "L02"}
    assert "L2 H3" in " ".join(lens.most_important_heads())
    second = found.metrics["attention_layers/entropy/L02"]
    assert second == pytest.approx(row.values["entropy"][1].mean(), abs=1e-3)


def test_the_proof_of_the_maps_is_in_the_snapshot(monkeypatch, tmp_path):
    def proven(*arguments, **options):
        found = capture(*arguments, **options)
        found.proof = SimpleNamespace(sentence=PROOF, is_verified=True)
        return found

    monkeypatch.setattr(lens_module, "capture", proven)
    data, _ = a_lens(tmp_path).inspect(foreign_model("llama", vocab_size=320))
    assert data.proof == PROOF
    (tmp_path / "a.npz").write_bytes(snapshot_bytes(data))
    assert run_data([read_snapshot(tmp_path / "a.npz")])["proof"] == PROOF


def test_an_earlier_snapshot_and_row_have_all_layers():
    data = a_run().snapshots[-1]
    values = row_values(data.row)
    del values["layers"]
    assert row_of(values).layers == [0, 1]
    old = dataclasses.replace(data, details={k: v for k, v in data.details.items() if k != "model"})
    page = run_data([old])
    assert (page["numbers"], page["between"], page["proof"]) == ([0, 1], ["", "", ""], "")


def test_sentences_name_layers_by_their_number():
    run = a_hybrid()
    row, data = run.snapshots[-1].row, run.snapshots[-1]
    assert [row.head_name(n) for n in (0, 2, 3)] == ["L3 H0", "L3 H2", "L5 H0"]
    (status,) = statuses([row], [row.step])
    found = removals(groups=[])
    told = story(data, [row.step])
    texts = [*status["findings"], *map(plain, removed_heads(found, row)["findings"])]
    texts += [card["places"] for prompt in told["prompts"] for card in prompt["cards"]]
    texts.append(" ".join(map(plain, [subject(data, status, None)])))
    assert not [text for text in texts if "L0" in text or "L1" in text]
    assert sum("L5" in text for text in texts) >= 6
    assert "2 layers with attention" in texts[-1]


def test_what_is_between_layers_with_attention():
    assert between_layers(a_hybrid().snapshots[0]) == [
        "layers 0 to 2: linear attention, no weights",
        "layer 4: mamba, no weights",
        "layers 6 and 7: 1 mamba, 1 moe, no weights",
    ]


def test_images_have_the_other_layers_at_their_place(monkeypatch):
    drawn, draw_text = {}, ImageDraw.ImageDraw.text

    def text(self, place, text, *rest, **more):
        drawn[text] = place[1]
        return draw_text(self, place, text, *rest, **more)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", text)
    data, other = a_hybrid().snapshots[-1], a_run().snapshots[-1]
    for make in (lambda of: heads_image(of, 0), draw_figure):
        drawn.clear()
        make(data)
        lines = between_layers(data)
        order = [lines[0], "L3", lines[1], "L5", lines[2]]
        assert sorted(order, key=drawn.__getitem__) == order
        drawn.clear()
        make(other)
        assert {"L0", "L1"} <= drawn.keys()
    figures = [draw_figure(*of) for of in ((data, (5, 1)), (other, (1, 1)), (data, (3, 1)))]
    below = [np.asarray(Image.open(io.BytesIO(png)))[140:] for png in figures]  # without the title
    assert np.array_equal(below[0], below[1])
    assert not np.array_equal(below[0], below[2])
    with pytest.raises(ValueError, match="3, 5"):
        draw_figure(data, (1, 1))


def test_runs_with_attention_in_other_layers_are_not_matched(tmp_path):
    paths = [tmp_path / name for name in ("a.npz", "b.npz")]
    for path, run in zip(paths, (a_run(), a_hybrid()), strict=True):
        write_snapshot(path, run.snapshots[-1])
    with pytest.raises(ValueError, match="3, 5"):
        read_runs(paths)
    assert [of.layers for of in read_runs([paths[1]] * 2)] == [[*HYBRID]] * 2


@pytest.mark.parametrize("text", [None, TEXT])
def test_layers_with_different_numbers_of_heads_are_refused_with_one_line(tmp_path, text):
    layers = lambda ids: [uniform_attention(len(ids)).expand(n, -1, -1) for n in (2, 3)]  # noqa: E731
    with pytest.raises(ValueError, match="heads") as refused:
        a_lens(tmp_path, text=text).inspect(PlantedModel(layers))
    assert len(str(refused.value).splitlines()) == 1


def test_the_page_of_a_saved_hybrid(in_process, tmp_path):
    model = foreign_model("qwen3_next", vocab_size=320)
    for part in (model, TOKENIZER):
        part.save_pretrained(tmp_path / "hybrid")
    text = "text=The bell rang twice."
    code, _, err = in_process(main, tmp_path, "checkpoint=hybrid", text, "out=a.html")
    assert (code, err) == (0, "")
    (run,) = read(tmp_path / "a.html")
    assert (run["layers"], run["numbers"]) == (2, [1, 2])
    assert run["between"][0].startswith("layer 0: ")
    assert run["between"][1:] == ["", ""]
