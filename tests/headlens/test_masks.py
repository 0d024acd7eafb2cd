"""Statistics, names and sentences of models whose masks hide keys, or whose rows have a sink."""

import io
import json
import math

import numpy as np
import pytest
import torch
from helpers.foreign import GROUPED, byte_level_tokenizer, foreign_model
from helpers.loops import by_loops

from headlens import Lens, LensConfig, read_snapshot, run_data, snapshot_bytes
from headlens.finding import Heads
from headlens.heads import ALL_NAMES, head_table
from headlens.lens import dashboard_name
from headlens.matching import directions
from headlens.snapshot_data import to_codes
from headlens.statistics import HeadStatistics, by_layer, chances_of, positional

TOKENIZER = byte_level_tokenizer()
RANDOM = np.random.default_rng(0)
WORDS = "The fox rang. bell, came 12 twice and nobody naïve 345 Là-bas, but it was so"
TEXT = " ".join(RANDOM.choice(WORDS.split(), 600))
SIZE = 8  # of windows and chunks, in tokens
SMALL = GROUPED | {"vocab_size": 320, "num_hidden_layers": 2}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
WINDOWS = {"sliding_window": SIZE, "layer_types": ["sliding_attention", "full_attention"]}
CHUNKS = {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]}
MODELS = {
    "gpt_oss": SMALL | EXPERTS | WINDOWS,
    "mistral": SMALL | {"sliding_window": SIZE},
    "gemma3_text": SMALL | WINDOWS,
    "llama4_text": SMALL | EXPERTS | CHUNKS | {"attention_chunk_size": SIZE},
}


def sees(family, layer):
    """Returns whether query q can see key k <= q in a layer, by the definitions of the models."""
    if family == "llama4_text":
        return lambda q, k: layer == 1 or q // SIZE == k // SIZE
    return lambda q, k: (layer == 1 and family != "mistral") or q - k < SIZE


def inspected(family, seed=0, scale=0.3, text=TEXT):
    """Returns the data of a snapshot of a random model, its lens and the model."""
    model = foreign_model(family, "eager", **MODELS[family])
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, scale)
        elif name.endswith("sinks"):
            torch.nn.init.normal_(parameter, 0, 2)
        elif name.endswith("bias"):  # of queries and keys, it makes heads positional
            torch.nn.init.zeros_(parameter)
    lens = Lens(TOKENIZER, LensConfig(prompts=[TEXT]), context_length=40, text=text)
    return lens.inspect(model)[0], lens, model


@pytest.mark.parametrize("family", MODELS)
def test_statistics_by_plain_loops(family):
    """On a window of a text and on each prompt, of the heads and of uniform attention."""
    window = torch.tensor([TOKENIZER(TEXT).input_ids[:40]])
    data, lens, model = inspected(family, text=window)
    has_sink = family == "gpt_oss"

    def check(found, uniform, token_ids, tokens, period):
        with torch.no_grad():
            weights = model(torch.tensor([token_ids]), output_attentions=True).attentions
        for layer, of_layer in enumerate(weights):
            see = sees(family, layer)
            mask = [[see(q, k) and k <= q for k in range(len(tokens))] for q in range(len(tokens))]
            assert ((of_layer[0] > 0) <= torch.tensor(mask)).all()
            even = [[visible / sum(row) for visible in row] for row in mask]
            chances = by_loops(even, token_ids, tokens, period, see)
            for head, a in enumerate(of_layer[0].tolist()):
                expected = by_loops(a, token_ids, tokens, period, see, has_sink)
                known = {k for k, of in found.items() if np.isfinite(of[layer, head])}
                assert expected.keys() == known - {"positional", "largest_logit"}
                if period is not None:  # on a prompt, it is that with the best value on the text
                    del expected["offset"]
                for key, value in expected.items():
                    assert found[key][layer, head] == pytest.approx(value, abs=6e-5), key
            for key, value in chances.items():
                assert by_layer(uniform[key])[-1 if layer else 0] == pytest.approx(value, abs=2e-6)

    check(data.row.values, data.uniform, window[0].tolist(), lens.text.tokens[0], None)
    for prompt, found in zip(data.prompts, data.of_prompts, strict=True):
        check(found, prompt.uniform, prompt.token_ids, prompt.tokens, prompt.period)


def test_a_snapshot_keeps_its_chances_when_the_lens_inspects_a_model_with_another_mask():
    data, lens, _ = inspected("mistral")
    before = [dict(prompt.uniform) for prompt in data.prompts]
    other, _ = lens.inspect(foreign_model("llama", vocab_size=320))
    assert [prompt.uniform for prompt in data.prompts] == before
    assert [prompt.uniform for prompt in other.prompts] != before


@pytest.mark.parametrize("scale", [0.02, 0.1])
@pytest.mark.parametrize("family", MODELS)
def test_random_models_have_no_names(family, scale):
    """Also those whose attention is nearly uniform on the visible keys."""
    for seed in range(3):
        data, *_ = inspected(family, seed, scale)
        assert {ALL_NAMES[number] for number in data.row.names.flat} <= {"", "uniform"}


def test_rows_without_weight_do_not_count():
    """All of the weight can be in the sink, or a row is of padding."""
    weights = torch.eye(9).roll(-1, 1).tril().repeat(3, 1, 1)  # to the token before
    weights[0] = 0
    weights[1, 5:] = 0
    text = HeadStatistics(torch.arange(9)[None], [["a"] * 9])
    sums = text.sums(weights[None], None)
    assert not sums[:, : len(text.targets[0])].isnan().any()
    values = dict(
        zip(("entropy", "distance", "learned_sink"), sums[0, -4:-1].tolist(), strict=True)
    )
    assert values == {
        "entropy": [0, 0, 0],
        "distance": pytest.approx([0, 1, 1]),
        "learned_sink": pytest.approx([1, 5 / 9, 1 / 9]),
    }


def test_heads_that_use_a_sink_are_neither_positional_nor_alike():
    """Only the keys that a head attends to say what it does, not how much the sink gets."""
    q, k = np.tril_indices(20)
    visible = (q - k < SIZE)[None]
    chances = chances_of(visible)
    even = chances[:, None] * np.linspace(0, 1, 3, dtype=np.float32)[:, None]
    assert positional([even, even], [chances] * 2) == pytest.approx(0, abs=1e-6)
    assert not np.any(directions([to_codes(torch.from_numpy(even)).numpy()], [chances])[0])
    before = np.where(q - k == 1, np.float32(1), 0)[None, None]
    assert positional([before, before], [chances] * 2).item() > 0.6


def test_examples_are_visible_and_have_the_chance_of_their_layer():
    data, *_ = inspected("gemma3_text")
    for name in ("", "first_token", "duplicate_token", "separator", "positional"):
        data.row.names[:] = ALL_NAMES.index(name)
        for cells in Heads(data).cells:
            for index, cell in enumerate(cells):
                layer, see = index // 4, sees("gemma3_text", index // 4)
                assert see(cell.query, cell.key), (name, layer)
                keys = sum(see(cell.query, key) for key in range(cell.query + 1))
                assert cell.chance == pytest.approx(1 / keys)


def test_files_of_models_with_masks_and_of_earlier_versions_are_read(tmp_path):
    data, *_ = inspected("gemma3_text")
    path = tmp_path / "step_00000000.npz"
    path.write_bytes(snapshot_bytes(data))
    again = read_snapshot(path)
    assert again.uniform == data.uniform
    assert all(map(np.array_equal, again.visible, data.visible))
    arrays = dict(np.load(path))
    values = json.loads(arrays.pop("json").tobytes())
    of_prompts = [prompt["uniform"] for prompt in values["prompts"]]
    for of in (values["uniform"], *of_prompts, values["row"], *values["details"]["statistics"]):
        del of["learned_sink"]
    for of in (values["uniform"], *of_prompts):
        of |= {key: 0.5 for key, value in of.items() if value is not None}
    old = {key: array for key, array in arrays.items() if not key.startswith("visible")}
    file = io.BytesIO()
    np.savez(file, **old, json=np.frombuffer(json.dumps(values).encode(), np.uint8))
    path.write_bytes(file.getvalue())
    old = read_snapshot(path)
    assert np.isnan(old.row.values["learned_sink"]).all()
    assert Heads(old).chance("diagonal", 7) == 0.5
    np.testing.assert_allclose(old.chances(0)[1, :3], [1, 1 / 2, 1 / 2])
    assert run_data([old])["statistics"]


@pytest.mark.parametrize("family", ["gpt_oss", "mistral"])
def test_only_models_with_a_learned_sink_have_its_statistic(family, tmp_path):
    data, lens, model = inspected(family)
    lens.folder = tmp_path
    metrics = lens.snapshot(model, 0).metrics
    has_sink, shares = family == "gpt_oss", data.row.values["learned_sink"]
    assert np.isfinite(shares).all() == has_sink
    keys = {statistic["key"] for statistic in run_data([data])["statistics"]}
    assert ("learned_sink" in keys) == has_sink
    assert ("learned_sink" in head_table([data.row], data.uniform)[0]) == has_sink
    key = f"attention_layers/{dashboard_name('learned_sink')}/L01"
    assert metrics.get(key, math.nan) == pytest.approx(shares[1].mean(), nan_ok=True)
