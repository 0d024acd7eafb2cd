"""The story of a run: which prompt and cards it has, when its sentences change, and what the model
predicts without the heads of a card."""

import copy
import dataclasses
import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.foreign import foreign_model
from helpers.models import tiny_model, with_changed_inputs
from helpers.pages import prompt, text_of
from helpers.stories import PERIOD, REPEATED, SOME, a_story, story_run

from headlens import Lens, LensConfig, capture
from headlens.prompts import Prompt
from headlens.recording import record, record_without
from headlens.snapshot_data import Contexts
from headlens.story import MAX_CARDS, MAX_CHARACTERS, story, unit_of

ALL_STEPS = (0, 20, 40, 60, 80, 100, 120)
NAMES = ("diagonal", "previous_token", "induction", "segment_start")
PLANTED = dict(
    zip([(0, 0), (0, 2), (1, 1), (1, 2)], zip(NAMES, (40, 40, 80, 100), strict=True), strict=True)
)


def told(run, snapshots=None, **changes):
    """Returns the story of a run. changes: of its last snapshot."""
    snapshots = snapshots or run.snapshots
    last = dataclasses.replace(snapshots[-1], **changes)
    return story(last, [one.step for one in snapshots], list(run.rows.values()), {})


@functools.cache
def a_run():
    return story_run(PLANTED, ALL_STEPS)


def test_it_opens_with_a_text_unless_the_data_are_repeated_sequences():
    run = a_run()
    assert told(run)["opening"] == 0
    windows = [["<bos>", *2 * list("abcdef")], ["<bos>", *2 * list("ghijkl")]]
    cells, codes = np.zeros((2, 3, 2, 5, 3), np.int16), np.zeros((2, 3, 2, 5), np.uint8)
    for tokens, opening in ((windows, 1), ([SOME.tokens], 0)):
        contexts = Contexts("your text", tokens, cells, codes)
        assert told(run, contexts=contexts)["opening"] == opening
    # A model that has not learned to copy has little to show there.
    never = story_run({(0, 2): ("previous_token", 40)}, (0, 40))
    contexts = Contexts("your text", windows, cells, codes)
    assert told(never, contexts=contexts)["opening"] == 0


def test_no_story_without_a_prompt_of_three_tokens():
    run = a_run()
    few = [dataclasses.replace(p, tokens=p.tokens[:2]) for p in run.snapshots[-1].prompts]
    assert told(run, prompts=few) is None
    one = told(run, prompts=[few[0], run.snapshots[-1].prompts[1]])
    assert (one["opening"], one["prompts"][0]) == (1, None)


def test_cards_are_the_most_telling_names_on_each_prompt():
    of_text, of_copies = told(a_run())["prompts"]
    assert (of_text["layout"], of_copies["layout"]) == ("text", "lines")
    names = [[card["name"] for card in one["cards"]] for one in (of_text, of_copies)]
    # On random letters, segment_start is undefined. Induction holds on the repeated sequence alone.
    assert names == [
        ["segment_start", "previous_token", "diagonal"],
        ["induction", "previous_token", "diagonal"],
    ]
    assert [card["heads"] for card in of_copies["cards"]] == [[4], [2], [0]]
    assert [birth["step"] for birth in of_copies["births"]] == [80, 40, 40]
    assert "80" in of_copies["cards"][0]["early"]
    assert all(len(one["cards"]) <= MAX_CARDS for one in (of_text, of_copies))


def test_several_heads_of_a_name_are_one_card():
    both = {(0, 0): ("previous_token", 0), (1, 1): ("previous_token", 40)}
    run = story_run(both, (0, 40))
    (card,) = told(run)["prompts"][0]["cards"]
    assert sorted(card["heads"]) == [0, 4]
    assert [frame["named"] for frame in told(run)["prompts"][0]["frames"]] == [[1], [2]]


def test_a_run_without_a_name_shows_its_nearest_head():
    for one in told(story_run({}, (0, 40)))["prompts"]:
        (card,) = one["cards"]
        assert (card["name"], len(card["heads"]), card["without"]) == ("", 1, None)
        assert one["births"] == []


def test_headlines_change_when_names_appear_and_when_copying_is_learned():
    of_text, of_copies = told(a_run())["prompts"]
    for one, changes in ((of_copies, {40, 60, 80}), (of_text, {40, 60, 100, 120})):
        lines = [frame["headline"] for frame in one["frames"]]
        steps = {step for n, step in enumerate(ALL_STEPS) if n and lines[n] != lines[n - 1]}
        assert steps == changes
    # The same names without the drop of the loss say something else.
    run = a_run()
    rows = [copy.deepcopy(row) for row in run.rows.values()]
    for row in rows:
        row.losses[1][:] = np.log(20)
    steps = [row.step for row in rows]
    before = of_copies["frames"][-1]
    after = story(run.snapshots[-1], steps, rows, {})["prompts"][1]["frames"][-1]
    assert before["headline"] != after["headline"]
    assert "100" in before["line"]
    assert "5" in after["line"]


def test_a_diverged_step_says_so():
    run = a_run()
    rows = [copy.deepcopy(row) for row in run.rows.values()]
    rows[-1].losses = [np.full_like(losses, np.nan) for losses in rows[-1].losses]
    for before, one in zip(
        told(run)["prompts"],
        story(run.snapshots[-1], [row.step for row in rows], rows, {})["prompts"],
        strict=True,
    ):
        wanted = [frame["headline"] for frame in before["frames"]]
        found = [frame["headline"] for frame in one["frames"]]
        assert found[:-1] == wanted[:-1]
        assert found[-1] not in wanted
        assert all(np.isfinite(point).all() for point in one["curve"]["points"])
        assert one["pace"][-1] == 1


def test_it_goes_slowly_where_predictions_change():
    pace = told(a_run())["prompts"][1]["pace"]
    parts = dict(zip(ALL_STEPS[1:], np.diff(pace), strict=True))
    assert (pace[0], pace[-1]) == (0, 1)
    assert parts[80] > 4 * max(part for step, part in parts.items() if step != 80)


def test_curve_is_the_loss_that_the_layout_is_about():
    run = a_run()
    curves = {
        "training loss": [(0, 3.0), (120, 1.0)],
        "validation loss": [(0, 3.1), (60, np.nan), (120, 1.1)],
    }
    last, steps, rows = run.snapshots[-1], list(ALL_STEPS), list(run.rows.values())
    of_text, of_copies = (one["curve"] for one in story(last, steps, rows, curves)["prompts"])
    assert [list(point) for point in of_text["points"]] == [[0, 3.1], [120, 1.1]]
    assert [step for step, _ in of_copies["points"]] == steps
    assert of_copies["points"][0][1] == pytest.approx(np.log(20), abs=1e-3)
    assert of_copies["points"][-1][1] < 0.01
    # A few points would make a curve with corners.
    curves["training loss (smoothed)"] = [(step, 3 - step / 60) for step in range(0, 121, 5)]
    of_text = story(last, steps, rows, curves)["prompts"][0]["curve"]
    assert [list(point) for point in of_text["points"]] == [
        list(point) for point in curves["training loss (smoothed)"]
    ]


def test_the_last_line_of_the_repeated_sequence_is_explained():
    of_text, of_copies = (one["arc"] for one in told(a_run())["prompts"])
    assert of_text == ""
    last, first = REPEATED.tokens[2 * PERIOD], REPEATED.tokens[PERIOD + 1]
    assert f"“{last}”" in of_copies
    assert f"“{first}”" in of_copies
    without_induction = story_run({(0, 2): ("previous_token", 40)}, (0, 40))
    assert told(without_induction)["prompts"][1]["arc"] == ""


@pytest.mark.parametrize(
    ("tokens", "unit"),
    [
        (["A", " ", "b"], "letter"),
        (["The", " bell"], "token"),
        (["<0xE8>", "<0xAA>", "<0x9E>"], "token"),
        (["語", "の"], "character"),
        (["4", "8"], "character"),
        (["ש", "ל"], "letter"),
    ],
)
def test_words_depend_on_the_tokenizer(tokens, unit):
    assert unit_of(Prompt("1", "", [0] * len(tokens), tokens)) == unit
    assert unit_of(Prompt("1", "", [0] * 3, ["<|endoftext|>", *tokens[:2]])) == unit


def test_a_long_passage_shows_its_beginning_and_says_so():
    long = prompt("1-long", [" word"] * 100)
    long.token_ids = [n % 20 for n in long.token_ids]
    run = story_run({(0, 2): ("previous_token", 0)}, (0, 40), text=long)
    one = told(run)["prompts"][0]
    shown = one["shown"]
    assert 0 <= MAX_CHARACTERS - 5 * shown < 5
    assert str(shown) in one["note"]
    assert 0 < one["query"] < shown - 1
    assert told(a_run())["prompts"][0]["note"] == ""


# ------------------------------------------------------------------------------ heads switched off

PROMPTS = [prompt("1-a", list("abcdefg")), prompt("2-b", list("hijk"))]
GROUPS = {"induction": [(0, 1), (1, 0)], "previous_token": [(1, 2), (1, 3)]}


def losses_without(model, projections, group):
    """Returns the losses on each prompt from plain forward passes in which the context vector of
    each head of a group is its mean over all tokens of the prompts."""
    ids = [torch.tensor([p.token_ids]) for p in PROMPTS]
    contexts = [[] for _ in projections]

    @torch.no_grad()
    def run(change):
        outputs = with_changed_inputs(projections, change, lambda: [model(one) for one in ids])
        logits = [output[0] if isinstance(output, tuple) else output.logits for output in outputs]
        return [
            F.cross_entropy(x[0, :-1], one[0, 1:], reduction="none")
            for x, one in zip(logits, ids, strict=True)
        ]

    def collect(layer, context):
        contexts[layer].append(context[0])
        return context

    run(collect)

    def remove(layer, context):
        size = context.shape[-1] // 4
        for _, head in (place for place in group if place[0] == layer):
            columns = slice(head * size, (head + 1) * size)
            context[..., columns] = torch.cat(contexts[layer])[:, columns].mean(0)
        return context

    return run(remove)


@pytest.mark.parametrize("kind", ["ours", "gpt2", "gpt_neo"])
def test_predictions_without_heads_are_those_of_a_forward_pass(kind, monkeypatch):
    if kind == "ours":
        model = tiny_model().eval()
        projections = [block.attn.out_proj for block in model.blocks]
    else:
        model = foreign_model(kind).eval()
        attentions = [block.attn for block in model.transformer.h]
        projections = [
            attn.c_proj if kind == "gpt2" else attn.attention.out_proj for attn in attentions
        ]
    model.train()
    monkeypatch.setattr("headlens.recording.MAX_DRAWN", 1)  # of the heads of a name
    run = functools.partial(capture, model)
    offsets = np.full((len(projections), 4), 2)
    found = record_without(model, PROMPTS, GROUPS, offsets, text_of)
    assert model.training
    assert list(found) == list(GROUPS)
    model.eval()
    for name, group in GROUPS.items():
        for number, wanted in enumerate(losses_without(model, projections, group)):
            one = found[name]["of_prompts"][number]
            assert one["losses"] == pytest.approx(wanted.tolist(), abs=2e-4)
            assert len(one["tokens"]) == len(PROMPTS[number].tokens)
    assert found["previous_token"]["of_prompts"] != found["induction"]["of_prompts"]
    # Heads attend as always without heads of their layer, and not without those of a layer before.
    usual = record(run, PROMPTS, 0)
    without_induction, without_previous = (
        found[name]["attention"]["previous_token"] for name in GROUPS
    )
    for number, values in enumerate(usual.of_prompts):
        value = pytest.approx(values["previous_token"][1, 2:].mean(), abs=1e-4)
        assert without_previous["values"][number] == value
        assert without_induction["values"][number] != value
        codes = usual.codes[number][1, 2].tolist()
        assert without_previous["codes"][number] == codes
        assert len(without_induction["codes"][number]) == len(codes)
    # The repeated sequence alone defines it.
    assert found["induction"]["attention"]["induction"]["values"] == [None, None]
    monkeypatch.setattr("headlens.recording.MAX_CELLS", 100)  # a larger snapshot cannot be read
    small = record_without(model, PROMPTS, GROUPS, offsets, text_of)
    assert small == {name: one | {"attention": {}} for name, one in found.items()}


def test_models_without_a_known_output_projection_have_no_switch():
    class Other(torch.nn.Module):
        pass

    assert record_without(Other(), PROMPTS, GROUPS, np.zeros((1, 1)), text_of) is None


class Letters:
    """A tokenizer of 23 letters."""

    n_vocab, eot_token = 23, 22

    special_tokens_set = frozenset()

    def encode(self, text, allowed_special):
        return [ord(c) - 97 for c in text]

    def decode_single_token_bytes(self, token):
        return bytes([97 + token])


@pytest.mark.parametrize("ablation", ["auto", "off"])
def test_the_lens_records_the_last_step_without_each_name(tmp_path, monkeypatch, ablation):
    config = LensConfig(prompts=["abcdefg", "hijk"], repeat_length=4, every=1, ablation=ablation)
    lens = Lens(Letters(), config, context_length=12, max_steps=1, folder=tmp_path / "attention")
    monkeypatch.setattr("headlens.heads.MIN_ERRORS", 0)  # a few tokens give no names
    model = tiny_model(std=1.0)
    lens.snapshot(model, 0)
    lens.snapshot(model, 1)
    without = lens.last.details.get("without", {})
    named = {row["name"] for row in lens.table} - {"", "uniform"}
    assert named
    assert set(without) == (named if ablation == "auto" else set())


def test_effect_of_a_switched_off_card():
    run = a_story()
    last = run.snapshots[-1]
    one = told(run)["prompts"][1]
    card = one["cards"][0]
    # Without the heads, all 20 tokens have the same probability.
    assert "5" in card["effect"]
    assert "5" in card["without"]["line"]
    assert card["without"]["headline"] not in [frame["headline"] for frame in one["frames"]]
    details = {key: value for key, value in last.details.items() if key != "without"}
    assert told(run, details=details)["prompts"][1]["cards"][0]["without"] is None
    assert PERIOD == 6


def test_sentences_count_all_heads_with_a_name_also_those_that_lose_it():
    run = story_run({(0, 2): ("previous_token", 80)}, (0, 40, 80))
    rows = [copy.deepcopy(row) for row in run.rows.values()]
    number = rows[2].names[0, 2]
    rows[1].names[0, :2] = number
    frames = story(run.snapshots[-1], [0, 40, 80], rows, {})["prompts"][0]["frames"]
    assert [frame["named"] for frame in frames] == [[0], [2], [1]]
    assert [frame["headline"].lower().count("two heads") for frame in frames] == [0, 1, 0]
    # A name that no head has at the end has no card, but then it is not true that none has a job.
    none = story_run({}, (0, 40, 80))
    rows = [copy.deepcopy(row) for row in none.rows.values()]
    for row in rows:
        row.losses[0][:] = 1.0 if row.step else 5.0
    rows[1].names[0, 0] = number
    frames = story(none.snapshots[-1], [0, 40, 80], rows, {})["prompts"][0]["frames"]
    assert frames[2]["headline"].startswith(frames[1]["headline"])
    assert frames[2]["headline"] != frames[1]["headline"]


def test_rows_after_the_last_frame_do_not_change_the_cards():
    run = a_story()
    later = copy.deepcopy(run.snapshots[-1].row)
    later.step += 1
    later.names[:] = 0
    steps, rows = [one.step for one in run.snapshots], list(run.rows.values())
    assert story(run.snapshots[-1], steps, [*rows, later], {}) == told(run)


@pytest.mark.parametrize("probability", [0.02, 0.021, 0.9])
def test_what_changes_without_heads_is_said_for_both_directions(probability):
    run = copy.deepcopy(a_story())
    last = run.snapshots[-1]
    for losses in last.row.losses:
        losses[:] = -np.log(0.02)
    for without in last.details["without"].values():
        for one in without["of_prompts"]:
            one["losses"] = [-np.log(probability)] * len(one["losses"])
    sentences = {
        card["without"]["headline"].partition(", ")[2]
        for one in story(last, [last.step], [last.row], {})["prompts"]
        for card in one["cards"]
    }
    assert {"90" in sentence for sentence in sentences} == {probability == 0.9}


def test_the_heads_that_the_model_needs_lead_if_the_first_ones_change_nothing():
    run = copy.deepcopy(a_run())
    last, usual = run.snapshots[-1], told(a_run())["prompts"][0]
    assert usual["cards"][0]["name"] == "segment_start"  # without each name, all is the same
    last.details["without"]["previous_token"]["of_prompts"][0]["losses"] = [9.0] * 7
    one = told(run)["prompts"][0]
    names = [card["name"] for card in one["cards"]]
    assert names == ["previous_token", "segment_start", "diagonal"]
    assert one["frames"][-1]["about"] == "previous_token"
    # At earlier steps it was not measured: the newest name is told.
    assert [frame["about"] for frame in one["frames"][:-1]] == [
        frame["about"] for frame in usual["frames"][:-1]
    ]


@pytest.mark.parametrize("change", [0.9, 0.5])
def test_a_head_that_causes_most_of_the_change_alone_is_named(change):
    run = story_run({(0, head): ("previous_token", 40) for head in (1, 2)}, (0, 40))
    group = {"name": "previous_token", "heads": 2, "loss_change": 1.0, "loss_change_error": 0.1}
    heads = [{"loss_change": change * (head == 2)} for head in range(6)]
    one = told(run, ablation={"groups": [group], "heads": heads})["prompts"][0]
    assert ("mostly L0\u00a0H2" in one["cards"][0]["effect"]) == (change > 0.8)


def test_random_tokens_say_why_they_are_there_if_copying_was_not_learned():
    run = story_run({(0, 2): ("previous_token", 40)}, (0, 40))
    frames = told(run)["prompts"][1]["frames"]
    assert "twice" in frames[-1]["headline"]
    assert "twice" not in told(a_run())["prompts"][1]["frames"][-1]["headline"]


def test_with_and_without_heads_are_compared_on_the_same_tokens():
    run = copy.deepcopy(a_story())
    last = run.snapshots[-1]
    (losses, _), shown = last.row.losses, 4
    losses[:shown], losses[shown:] = -np.log(0.4), -np.log(0.9)  # only the first ones are shown
    for without in last.details["without"].values():
        without["of_prompts"][0]["losses"] = [-np.log(0.4)] * shown
    headline = told(run)["prompts"][0]["cards"][0]["without"]["headline"]
    assert "40" not in headline


def test_a_name_of_the_repeated_sequence_says_nothing_about_a_text():
    stages = {(1, 1): ("induction", 40), (0, 2): ("previous_token", 80)}
    of_text, of_copies = told(story_run(stages, (0, 40, 80)), None)["prompts"]
    assert of_text["frames"][0]["headline"] == of_text["frames"][1]["headline"]
    assert of_copies["frames"][0]["headline"] != of_copies["frames"][1]["headline"]
    assert len(of_text["cards"]) == 2


def test_attention_without_a_model_has_no_sentence_about_predictions():
    run = copy.deepcopy(a_story())
    last = run.snapshots[-1]
    last.row.losses, last.row.step = [], 0
    del last.details["without"]
    usual = told(a_story())["prompts"]
    for one, other in zip(story(last, [0], [last.row], {})["prompts"], usual, strict=True):
        (frame,) = one["frames"]
        assert frame["line"] == ""
        assert frame["headline"] not in [of_step["headline"] for of_step in other["frames"]]
        assert frame["marked"] in frame["headline"]
        assert len(one["key_to_picture"]) < len(other["key_to_picture"])
