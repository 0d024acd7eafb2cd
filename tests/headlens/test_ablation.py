"""Removed heads: the changes of the loss equal a plain loop with hooks."""

import copy
import csv
import functools
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.foreign import foreign_model
from helpers.models import random_ids, tiny_model, with_changed_inputs

from clearhead.models.head_removal import ablate_heads
from clearhead.run import lens_runner
from clearhead.tokens.windows import IGNORED, WindowDataset
from headlens import head_removal, read_snapshot
from headlens.ablation import COLUMNS
from headlens.ablation import mean_contexts as head_means
from train import fit

HEADS = [(layer, head) for layer in (0, 1) for head in range(4)]
SMALL = {"num_hidden_layers": 2, "vocab_size": 23, "attention_dropout": 0.0}
GROUPS = {"both layers": [(0, 1), (1, 0), (1, 3)], "one head": [(1, 2)]}


class Windows(WindowDataset):
    """Five random windows of nine tokens; some of the targets are ignored."""

    def __len__(self):
        return 5

    def batch(self, windows):
        ids = random_ids(B=5, T=10)[windows]
        targets = ids[:, 1:].clone()
        for row, window in enumerate(windows.tolist()):
            targets[row, window : 2 * window] = IGNORED  # another number in each window
        return ids[:, :-1], targets


IDS, TARGETS = Windows().batch(np.arange(5))


@functools.cache
@torch.enable_grad()
def trained(kind):
    """Returns a small model that has learned to repeat eight tokens."""
    model = (
        tiny_model(std=None, context_length=16) if kind == "ours" else foreign_model(kind, **SMALL)
    )
    generator = torch.Generator().manual_seed(2)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(200):
        ids = torch.randint(23, (32, 8), generator=generator).repeat(1, 2)
        loss = F.cross_entropy(logits_of(model, ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval().requires_grad_(False)


def logits_of(model, ids):
    output = model(ids)
    return output.logits if hasattr(output, "logits") else output[0]


def projections_of(model):
    """Returns the output projection of each layer, by name."""
    ends = ("attn.out_proj", "attn.o_proj", "attention.dense", "attn.c_proj")
    return [module for name, module in model.named_modules() if name.endswith(ends)]


def run_with_hooks(model, change):
    """Returns logits (B, T, V). change(layer, context) replaces the input of an output projection,
    (B, T, H * D)."""
    return with_changed_inputs(projections_of(model), change, lambda: logits_of(model, IDS))


def measured(logits):
    """Returns the loss of each target (N,), its window (N,) and the accuracy."""
    counted = TARGETS != IGNORED
    losses = F.cross_entropy(logits[counted], TARGETS[counted], reduction="none")
    return losses, counted.nonzero()[:, 0], (logits.argmax(-1) == TARGETS)[counted].double().mean()


def mean_contexts(model):
    """Returns the mean input of each output projection, (H * D,)."""
    means = {}

    def record(layer, context):
        means[layer] = context.mean((0, 1))
        return context

    run_with_hooks(model, record)
    return means


def test_mean_contexts_are_those_of_all_tokens():
    texts = [IDS[0, :4].tolist(), IDS[1].tolist()]
    model, seen = trained("llama"), {0: [], 1: []}
    for text in texts:
        with_changed_inputs(
            projections_of(model),
            lambda layer, context: seen[layer].append(context[0]) or context,
            lambda text=text: logits_of(model, torch.tensor([text])),
        )
    for layer, found in enumerate(head_means(model, texts)):
        torch.testing.assert_close(found.flatten(), torch.cat(seen[layer]).mean(0))


def mixed(model, heads, part):
    """Runs with the context of `heads` moved by `part` of the way to its mean."""
    means = mean_contexts(model)

    def change(layer, context):
        for of_layer, head in heads:
            if of_layer == layer:
                size = context.shape[-1] // 4
                columns = slice(head * size, (head + 1) * size)
                context[..., columns] += part * (means[layer][columns] - context[..., columns])
        return context

    return run_with_hooks(model, change)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["ours", "llama", "gpt_neox"])
def test_changes_equal_a_loop_with_hooks(kind, monkeypatch):
    monkeypatch.setattr("headlens.ablation.TOKENS_AT_ONCE", 20)  # so that several passes are needed
    model = trained(kind)
    result = head_removal(model, IDS, GROUPS, targets=TARGETS, accuracy=True)
    losses, windows, accuracy = measured(mixed(model, [], 1))
    assert (result["method"], result["windows"], result["targets"]) == ("exact", 5, len(losses))
    assert result["loss"] == pytest.approx(float(losses.mean()), abs=1e-5)
    assert result["accuracy"] == pytest.approx(float(accuracy), abs=1e-4)
    assert [(row["layer"], row["head"]) for row in result["heads"]] == HEADS
    assert [(row["name"], row["heads"]) for row in result["groups"]] == [
        ("both layers", 3),
        ("one head", 1),
    ]
    removed = [[head] for head in HEADS] + list(GROUPS.values())
    for heads, row in zip(removed, result["heads"] + result["groups"], strict=True):
        without, _, accuracy = measured(mixed(model, heads, 1))
        change = without - losses
        assert row["loss_change"] == pytest.approx(float(change.mean()), abs=1e-5)
        # The standard error of a ratio estimate: residuals of the sums of the windows.
        sums = [float((change - change.mean())[windows == window].sum()) for window in range(5)]
        error = math.sqrt(5 / 4 * sum(s**2 for s in sums)) / len(losses)
        assert row["loss_change_error"] == pytest.approx(error, abs=1e-5)
        assert row["accuracy_without"] == pytest.approx(float(accuracy), abs=1e-4)
    assert max(abs(row["loss_change"]) for row in result["heads"]) > 0.01


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_a_removed_head_is_one_whose_weights_are_zero_and_whose_mean_is_in_the_bias(kind):
    model, ids = trained(kind), IDS.repeat(1, 2)  # of which the second copy is predicted
    without = head_removal(model, ids)["heads"]
    means = {}
    with_changed_inputs(
        projections_of(model),
        lambda layer, context: means.setdefault(layer, context.mean((0, 1))) * 0 + context,
        lambda: logits_of(model, ids),
    )

    def loss(model):
        return float(F.cross_entropy(logits_of(model, ids)[:, :-1].mT, ids[:, 1:]))

    for row in without:
        edited = copy.deepcopy(model)
        projection = projections_of(edited)[row["layer"]]
        columns = slice(8 * row["head"], 8 * row["head"] + 8)
        written = projection.weight[:, columns] @ means[row["layer"]][columns]
        bias = written if projection.bias is None else projection.bias + written
        projection.bias = torch.nn.Parameter(bias)
        projection.weight[:, columns] = 0
        assert row["loss_change"] == pytest.approx(loss(edited) - loss(model), abs=1e-4)
    assert max(row["loss_change"] for row in without) > 0.01


@pytest.mark.parametrize("kind", ["ours", "llama", "gpt_neox"])
def test_an_estimate_is_the_slope_of_the_loss_on_the_way_to_the_mean(kind):
    model = trained(kind)
    result = head_removal(model, IDS, GROUPS, targets=TARGETS, estimate=True)
    assert result["method"] == "estimate"
    removed = [[head] for head in HEADS] + list(GROUPS.values())
    for heads, row in zip(removed, result["heads"] + result["groups"], strict=True):
        (ahead, windows, _), (back, *_) = (measured(mixed(model, heads, p)) for p in (0.01, -0.01))
        slope = (ahead - back).double() / 0.02
        assert row["loss_change"] == pytest.approx(float(slope.mean()), abs=2e-3)
        sums = [float((slope - slope.mean())[windows == window].sum()) for window in range(5)]
        error = math.sqrt(5 / 4 * sum(s**2 for s in sums)) / len(slope)
        assert row["loss_change_error"] == pytest.approx(error, abs=5e-3)
        assert row["accuracy_without"] is None
    assert max(abs(row["loss_change"]) for row in result["heads"]) > 0.02
    model.requires_grad_(True)
    assert head_removal(model, IDS, GROUPS, targets=TARGETS, estimate=True) == result
    assert all(parameter.grad is None for parameter in model.parameters())
    model.requires_grad_(False)


def test_changes_are_in_fp32_also_in_a_run_in_bf16():
    model = tiny_model().eval()
    expected = ablate_heads(model, GROUPS, Windows(), True, math.inf)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert ablate_heads(model, GROUPS, Windows(), True, math.inf) == expected


def test_model_gradients_and_random_state_do_not_change():
    model = tiny_model(dropout=0.1).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    text = ablate_heads(model, GROUPS, Windows(), False)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert text["accuracy"] is None  # of text it is of no interest


@pytest.mark.parametrize(
    ("small", "batch_size", "is_measured"),
    [(0, 66, False), (0, 67, True), (lens_runner.SMALL, 66, True)],
)
def test_results_of_a_run(make_run, monkeypatch, small, batch_size, is_measured):
    """Measured: 2 heads of layer 0 and 2 of layer 1 need four passes of 2 windows. This is at most
    one percent of three passes of all trained windows, or the model is small."""
    monkeypatch.setattr(lens_runner, "SMALL", small)
    options = ("lens=default", "lens.prompts=[abcd]", "lens.repeat_length=0", "lens.every=4")
    options += ("data.val_fraction=0.03", "trainer.eval_every=0")
    run = make_run(*options, "trainer.max_steps=4", f"trainer.batch_size={batch_size}")
    assert len(run.evaluator.validation.dataset) == 2
    fit(run)
    folder = run.directory / "attention"
    assert (folder / "ablation.json").exists() == is_measured
    if not is_measured:
        return
    result = json.loads((folder / "ablation.json").read_text())
    assert result["step"] == 4
    with open(folder / "heads.csv", newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert list(table[0])[-2:] == list(COLUMNS[:2])  # the data is text, so without accuracy
    changes = {(row["layer"], row["head"]): row["loss_change"] for row in result["heads"]}
    found = {(int(row["layer"]), int(row["head"])): float(row["loss_change"]) for row in table}
    assert found == changes
    assert read_snapshot(folder / "step_00000004.npz").ablation == result


class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(23, 8)
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, ids):
        x = self.embedding(ids)
        mask = torch.ones(ids.shape[1], ids.shape[1]).triu(1).bool()
        return self.attention(x, x, x, attn_mask=mask)[0]


def test_heads_that_cannot_be_removed_are_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"^[^\n]+MultiheadAttention[^\n]+$"):
        head_removal(Own(), random_ids())
    with pytest.raises(TypeError, match=r"^Linear [^\n]+$"):  # what capture says
        head_removal(torch.nn.Linear(3, 3), random_ids())


def test_a_head_that_a_group_has_twice_is_removed_once():
    for estimate in (False, True):
        groups = {"once": [(0, 1)], "twice": [(0, 1), (0, 1)]}
        found = head_removal(tiny_model(), random_ids(), groups, estimate=estimate)["groups"]
        assert found[0]["loss_change"] == found[1]["loss_change"]


@pytest.mark.parametrize("windows", [[[0, 10**6]], [[0], [1]], [], [[-1, 1]]])
def test_windows_without_a_next_token_or_of_another_vocabulary_are_refused(windows):
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        head_removal(tiny_model(), windows)


@pytest.mark.parametrize("head", [(7, 0), (0, 4), (0, -1)])
def test_heads_that_a_model_does_not_have_are_refused(head):
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        head_removal(tiny_model(), random_ids(), {"some": [head]})
