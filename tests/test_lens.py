"""The lens: what it looks at, what it draws, and that it disturbs nothing."""

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from data import get_tokenizer
from lens import Lens, LensConfig
from lens.heatmap import COLOUR_MAP, _colour, _label, _tile, draw_grid, sharpest_head


def causal_weights(num_layers, num_heads, num_tokens, seed=0):
    scores = np.random.default_rng(seed).normal(
        size=(num_layers, num_heads, num_tokens, num_tokens)
    )
    scores = np.where(np.tril(np.ones((num_tokens, num_tokens), bool)), scores * 3, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def lens_on(*prompts, max_tokens=64, context_length=1024, **settings):
    tokenizer = get_tokenizer("byte")
    config = LensConfig(prompts=list(prompts), max_tokens=max_tokens, **settings)
    return Lens(config, tokenizer.encode_ordinary, tokenizer.decode, context_length)


def test_prompts_are_named_tokenised_and_cropped():
    lens = lens_on("She sat on the bank, again.", "::", max_tokens=5)
    first, second = lens.prompts
    assert first.name == "1-she-sat-on-the"
    assert first.tokens == list("She s")
    assert first.cropped
    assert second.name == "2-prompt"
    assert not second.cropped
    assert len(lens_on("abcdefgh", context_length=3).prompts[0].tokens) == 3


def test_due_at_the_start_at_each_interval_and_at_the_end():
    lens = lens_on("x", every=40)
    assert [step for step in range(101) if lens.due(step, 100)] == [0, 40, 80, 100]
    off = lens_on("x", every=0)
    assert not any(off.due(step, 100) for step in range(101))


def test_every_prompt_becomes_a_picture_of_every_head(tmp_path):
    lens = lens_on("the bank", "<b>$x$ & \u202e\x00 ß 漢字</b>")
    asked = []

    def attn_weights_of(token_ids):
        asked.append(token_ids)
        return causal_weights(3, 2, len(token_ids))

    pictures = lens.look(attn_weights_of, 7, tmp_path / "attention")
    assert asked == [prompt.token_ids for prompt in lens.prompts]
    assert list(pictures) == [f"attention/heatmap/{p.name}" for p in lens.prompts]
    for path in pictures.values():
        assert path.name.startswith("step_00000007_")
        assert min(imread(path).shape[:2]) > 300


def test_a_prompt_of_one_token_is_drawn_too(tmp_path):
    lens = lens_on("x")
    pictures = lens.look(lambda ids: causal_weights(2, 2, len(ids)), 0, tmp_path)
    assert len(pictures) == 1


def test_the_grid_shows_every_cell_of_every_head(tmp_path):
    """Each weight can be read back from the picture's pixels, heads where their labels say."""
    lens = lens_on("abcdef")
    weights = causal_weights(3, 4, 6)
    path = tmp_path / "grid.png"
    draw_grid(weights, lens.prompts[0], 0, path)
    pixels = (imread(path)[..., :3] * 255).round().astype(np.uint8)
    scale, gap, left, top = round(250 / 6), 8, 46, 92
    colours = _colour(weights)
    for layer in range(3):
        for head in range(4):
            y = top + layer * (6 * scale + gap)
            x = left + head * (6 * scale + gap)
            for query in range(6):
                for key in range(6):
                    centre = pixels[y + query * scale + scale // 2, x + key * scale + scale // 2]
                    assert np.abs(centre.astype(int) - colours[layer, head, query, key]).max() <= 2


def test_colours_are_a_square_root_scale_with_the_future_in_grey():
    import matplotlib

    table = matplotlib.colormaps[COLOUR_MAP](np.linspace(0, 1, 256))[:, :3] * 255
    weights = np.array([[1.0, 0.0], [0.25, 0.75]])
    colours = _colour(weights)
    assert tuple(colours[0, 1]) == (238, 238, 238)
    assert colours[1, 0] == pytest.approx(table[127], abs=1)
    assert colours[0, 0] == pytest.approx(table[255], abs=1)


def test_tiles_stand_layers_down_and_heads_across():
    colours = np.zeros((2, 3, 1, 1, 3), np.uint8)
    colours[1, 2] = 9
    canvas = _tile(colours, scale=2, gap=1)
    assert canvas.shape == (2 * 3 - 1, 3 * 3 - 1, 3)
    assert (canvas[3:5, 6:8] == 9).all()
    assert (canvas[2] == 255).all()


def test_sharpest_head_leaves_the_first_token_out():
    weights = np.zeros((2, 2, 4, 4))
    weights[..., 0] = 1.0  # all heads rest on the first token ...
    weights[1, 0, 1:] = np.eye(4)[1:]  # ... but one looks at itself
    assert sharpest_head(weights) == (1, 0)


@pytest.mark.parametrize(
    ("token", "label"),
    [(" the", "the"), ("\n", "\\n"), ("  ", "␣␣"), ("\x00a", "·a"), ("x" * 30, "x" * 11 + "…")],
)
def test_labels_show_odd_tokens(token, label):
    assert _label(token) == label


def test_looking_changes_nothing_in_training(trainer, tmp_path):
    """With and without the lens: the same losses and the same weights, dropout on."""

    def losses(*overrides):
        run = trainer("model.dropout=0.1", *overrides)
        run.train()
        return run.train_loss, run.model.state_dict()

    loss, weights = losses("name=without")
    seen_loss, seen_weights = losses("name=with", "lens=default", "lens.every=1")
    assert len(list((tmp_path / "runs" / "with" / "attention").glob("*.png"))) == 5 * 3
    assert loss == seen_loss
    for name, value in weights.items():
        assert torch.equal(value, seen_weights[name])


def test_a_failing_lens_warns_once_and_training_goes_on(trainer, monkeypatch, capsys):
    def broken(*_):
        raise OSError("no space\nleft")

    monkeypatch.setattr("lens.heatmap.draw_grid", broken)
    run = trainer("lens=default", "lens.every=1")
    run.train()
    assert run.state.step == 4
    warnings = [line for line in capsys.readouterr().err.splitlines() if "lens" in line]
    assert warnings == ["lens: failed and is off from here on (OSError: no space left)"]
