"""Heads on whole text: statistics by plain loops, planted heads, random models, contexts."""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.loops import targets
from helpers.models import tiny_model
from helpers.pages import PlantedModel

from clearhead.config import compose
from clearhead.run.lens_runner import text_windows
from data import get_tokenizer, load_datasets
from headlens import Lens, LensConfig, capture, lens_tokenizer, read_snapshot, write_snapshot
from headlens.connected import Words
from headlens.heads import NAMES, PLACES, head_table
from headlens.recording import record
from headlens.snapshot_data import CONTEXTS, from_codes
from headlens.whole_text import Text, TextRecorder, windows_of

BYTE = get_tokenizer("byte")
STORY = next((Path(__file__).parents[2] / "corpus").glob("*.txt")).read_text(encoding="utf-8")


def text_of(windows):
    return Text(torch.as_tensor(windows), BYTE.decode_single_token_bytes)


def story(count=6, length=40):
    """Returns windows of the letters of a text."""
    ids = torch.tensor(BYTE.encode_ordinary(STORY)[: count * length])
    return ids.reshape(count, length)


def shuffled(windows, seed=0):
    order = torch.randperm(windows.numel(), generator=torch.Generator().manual_seed(seed))
    return windows.flatten()[order].reshape(windows.shape)


def targets_in(window):
    """Returns the targets of all query tokens of a window, by plain loops."""
    return targets(window, [BYTE.decode([token]) for token in window])


def measured(model, windows):
    run = functools.partial(capture, model)
    prompts = Lens(BYTE, LensConfig(), context_length=64).prompts
    return record(run, prompts, 0, TextRecorder(text_of(windows)).run(run))


def model_of_letters(seed, sharpness=1.0, **shape):
    shape = {"vocab_size": 257, "context_length": 64, "emb_dim": 32, "num_heads": 4} | shape
    model = tiny_model(seed, std=None, **shape)
    with torch.no_grad():
        for block in model.blocks:
            for matrix in (block.attn.W_query, block.attn.W_key):
                matrix.weight.mul_(sharpness)
    return model.eval()


def test_statistics_and_errors_by_plain_loops(monkeypatch):
    """Also in several batches of windows, and with a window without separators."""
    monkeypatch.setattr("headlens.whole_text.CELLS_AT_ONCE", 2 * 40 * 40)
    model, windows = model_of_letters(1, sharpness=8), story(5)
    windows[2] = torch.arange(97, 97 + 40) % 26 + 97
    data = measured(model, windows)
    assert data.row.errors.keys() == set(NAMES)
    found = {}  # key: for each window (sum over queries (L, H), queries)
    with torch.no_grad():
        for window in windows:
            weights = torch.stack([layer[0] for layer in model.attn_weights(window[None])])
            for key, of_queries in targets_in(window.tolist()).items():
                cells = [(q, keys) for q, keys in enumerate(of_queries) if keys]
                sums = sum((weights[:, :, q, keys].sum(-1) for q, keys in cells), torch.zeros(()))
                found.setdefault(key, []).append((sums.numpy(), len(cells)))

    def mean_and_error(parts):
        """The mean over all queries. Its error: windows are independent, queries are not."""
        sums = np.stack([np.broadcast_to(s, (2, 4)) for s, _ in parts]).astype(float)
        counts = np.array([n for _, n in parts], float)[:, None, None]
        mean = sums.sum(0) / counts.sum()
        apart = sums - counts * mean
        return mean, np.sqrt((apart**2).sum(0) * 5 / 4) / counts.sum()

    offsets = {key: mean_and_error(found.pop(key)) for key in list(found) if key[0] == "offset"}
    for key, parts in found.items():
        mean, error = mean_and_error(parts)
        np.testing.assert_allclose(data.row.values[key], mean, atol=1e-5, err_msg=key)
        np.testing.assert_allclose(data.row.errors[key], error, atol=1e-5, err_msg=key)
    for place in np.ndindex(2, 4):
        best = max(offsets, key=lambda of: offsets[of][0][place])
        assert data.row.offsets[place] == best[1]
        for values, wanted in zip((data.row.values, data.row.errors), offsets[best], strict=True):
            assert values["offset"][place] == pytest.approx(wanted[place], abs=1e-5)
    for key in found:
        of_windows = [targets_in(window)[key] for window in windows.tolist()]
        chances = [
            len(keys) / (q + 1) for queries in of_windows for q, keys in enumerate(queries) if keys
        ]
        assert data.uniform[key] == pytest.approx(np.mean(chances), abs=1e-5), key


def planted(input_ids, kinds, share=0.6):
    """Returns weights (B, H, T, T): each head gives `share` of its weight evenly to the targets of
    its kind, or to itself without a target, and the rest evenly to all tokens."""
    batch, size = input_ids.shape
    uniform = torch.ones(size, size).tril() / torch.arange(1, size + 1)[:, None]
    weights = (1 - share) * uniform.repeat(batch, len(kinds), 1, 1)
    for n, window in enumerate(input_ids.tolist()):
        of_kinds = targets_in(window)
        for head, kind in enumerate(kinds):
            for q, keys in enumerate(of_kinds[kind]):
                keys = keys or [q]
                weights[n, head, q, keys] += share / len(keys)
    return weights


PLANTED = [name for name in NAMES if name != "offset"] + [("offset", 3), ("offset", 8)]


def test_planted_heads_are_found():
    layers = lambda ids: [planted(torch.tensor([ids]), k)[0] for k in (PLANTED, PLANTED[::-1])]  # noqa: E731
    data = measured(PlantedModel(layers), story())
    table = head_table([data.row], data.uniform)
    found = {(row["layer"], row["head"]): (row["name"], row["tokens_back"]) for row in table}
    for layer, kinds in enumerate((PLANTED, PLANTED[::-1])):
        for head, kind in enumerate(kinds):
            wanted = kind if kind[0] == "offset" else (kind, None)
            assert found[layer, head] == wanted
    assert {row["holds_on"] for row in table if row["name"] == "previous_token"} == {PLACES[0]}


@pytest.mark.parametrize(("order", "count"), [("text", 8), ("text", 4), ("shuffled", 8)])
def test_random_models_have_no_names(order, count):
    """Fifty models, half of them with sharp attention. `first_token`, `diagonal` and the others of
    NAMES say what a head has learned; a random one has learned nothing."""
    windows = story(count, 64) if order == "text" else shuffled(story(count, 64))
    named = []
    for seed in range(50):
        model = model_of_letters(seed, sharpness=1 if seed % 2 else 16)
        data = measured(model, windows)
        table = head_table([data.row], data.uniform)
        named += [(seed, row) for row in table if row["name"] in NAMES]
    assert named == []


def test_contexts_are_the_largest_moves_and_some_at_random(tmp_path):
    """Apart from the first token and the query token itself."""
    model, windows = model_of_letters(3, sharpness=20), story(7)
    data = measured(model, windows)
    write_snapshot(tmp_path / "step_00000000.npz", data)
    contexts = read_snapshot(tmp_path / "step_00000000.npz").contexts
    assert contexts.tokens == [[BYTE.decode([t]) for t in window] for window in windows.tolist()]
    weights, norms = [], []
    for layer in capture(model, windows).layers:
        weights.append(layer.weights.numpy())
        norms.append(layer.value_norms.numpy())
    weights = np.stack(weights, 1)  # (N, L, H, T, T)
    moves = weights * np.stack(norms, 1)[..., None, :]
    q, k = np.indices(moves.shape[-2:])
    moves[..., (k == 0) | (k >= q)] = 0
    random_queries = set()
    for layer, head in np.ndindex(2, 4):
        most, random = contexts.cells[layer, head].tolist()
        codes = contexts.codes[layer, head]
        for cells, of_cells in ((most, codes[0]), (random, codes[1])):
            assert len(cells) == CONTEXTS
            for (window, query, key), code in zip(cells, of_cells, strict=True):
                move = moves[window, layer, head, query]
                assert 0 < key < query
                assert move[key] == pytest.approx(move.max(), rel=1e-5)
                shown = from_codes(np.array(code))
                assert shown == pytest.approx(weights[window, layer, head, query, key], abs=1 / 255)
        of_head = moves[:, layer, head]
        assert of_head[tuple(most[0])] == pytest.approx(of_head.max(), rel=1e-5)
        values = [of_head[tuple(cell)] for cell in most]
        assert values == sorted(values, reverse=True)
        tokens = [tuple(windows[w, [q, k]].tolist()) for w, q, k in most]
        assert len(set(tokens)) == len({(w, k) for w, _, k in most}) == CONTEXTS
        random_queries.add(tuple((w, q) for w, q, _ in random))
    assert len(random_queries) == 1  # the same for all heads
    # Each query token is connected with the key token that the head moves most, if the weight is
    # large. Moves to the first token and to the query token itself are 0 here.
    keys = moves.argmax(-1)  # (N, L, H, T)
    weight = np.take_along_axis(weights, keys[..., None], -1)[..., 0]
    linked = np.where((moves.max(-1) > 0) & (weight >= 0.2), keys, -1)
    assert (linked >= 0).any((0, 3)).all()
    assert contexts.pairs == Words(contexts.tokens).pairs(linked.transpose(1, 2, 0, 3))
    again = measured(model_of_letters(4), windows).contexts.cells[0, 0, 1, :, :2]
    assert again.tolist() == contexts.cells[0, 0, 1, :, :2].tolist()  # and for all models


def test_a_text_with_few_tokens_has_fewer_contexts():
    data = measured(model_of_letters(0), story(1, 4))
    cells = data.contexts.cells
    assert (cells[..., 0, :, 0].max(), cells[..., 0, 2:, 0].max()) == (0, -1)
    assert np.isnan(data.row.errors["previous_token"]).all()  # one window has no error
    assert not set(data.row.names.ravel()) & set(range(1, len(NAMES) + 1))  # so it names no head


def test_windows_of_a_text():
    tokens = lens_tokenizer(BYTE)
    windows = windows_of(STORY, tokens, context_length=50)
    assert windows.shape == (32, 50)
    assert BYTE.decode(windows[0].tolist()) == STORY[:50]
    assert BYTE.decode(windows[-1].tolist()) == STORY[-50:]
    assert windows_of("ab" * 40, tokens, context_length=1024).shape == (2, 40)
    with pytest.raises(ValueError, match="15"):
        windows_of("a" * 15, tokens, context_length=1024)


@pytest.mark.parametrize(
    ("changes", "shape"),
    [
        ({}, (4, 64)),  # 40 steps of 2 x 256 tokens until the next snapshot: 1 % are 204 tokens
        ({"trainer.max_steps": 2000}, (8, 64)),  # 100 steps: 512 tokens
        ({"trainer.max_steps": 2000, "trainer.batch_size": 16}, (16, 256)),
        ({"trainer.max_steps": 2000, "trainer.batch_size": 64}, (30, 256)),  # all that there are
        ({"data.max_length": 16}, (4, 16)),
        ({"lens.every": 1}, (4, 64)),
        ({"data.val_fraction": 0.02}, (1, 64)),  # one window is all that there is
    ],
)
def test_the_windows_have_one_percent_of_the_trained_tokens(changes, shape):
    changes = {"trainer.max_steps": 120, "data.val_fraction": 0.5} | changes
    config = compose([f"{key}={value}" for key, value in changes.items()])
    data = load_datasets(config.data, get_tokenizer("gpt2"))
    windows = text_windows(config, data.val)
    assert windows.shape == shape
    known, _ = data.val.batch(np.array([0, len(data.val) - 1]))
    assert torch.equal(windows[[0, -1]], known[:, : shape[1]])  # evenly spaced
