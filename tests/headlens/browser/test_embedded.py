"""The engine of a page with a model (embedded.js) in Chromium: it computes what PyTorch does."""

import base64
import functools

import numpy as np
import pytest
import torch
from helpers.pages import module_page
from helpers.runs import train_in

from clearhead.models.pretrained import load_pretrained
from clearhead.output.play import packed_model
from headlens import read_snapshot
from headlens.ablation import edited_contexts
from headlens.capturing import capture, output_projections
from headlens.prompts import labels_of, make_prompt, signs_of, texts_of, token_texts
from headlens.recording import record
from headlens.tokens import lens_tokenizer

TEXT = "the fox 語 jumps\n"
READ = """async (options) => {
  const reading = await engine.read(options);
  const text = (bytes) => btoa(String.fromCharCode(...bytes));
  return { ...reading, codes: text(reading.codes), norms: text(reading.norms) };
}"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that was trained on 24 of 32 positions, with checkpoints of steps 2, 4 and 6."""
    settings = ("lens=default", "lens.every=2", "data.max_length=24", "trainer.max_steps=6")
    settings += ("trainer.save_every=2", "trainer.keep=3", "optimizer.lr=0.1")
    return train_in(tmp_path_factory.mktemp("play"), "name=play", *settings)


@pytest.fixture
def page(run, opened, tmp_path):
    page = module_page(opened, tmp_path, "embedded.js", "embeddedEngine")
    page.evaluate("(model) => { window.engine = embeddedEngine(model); }", packed_model(run))
    return page


def means_of(model, run):
    """Returns the mean of each input of an output projection over the tokens of the prompts."""
    inputs = [[] for _ in model.blocks]
    hooks = [
        block.attn.out_proj.register_forward_pre_hook(lambda _, given, n=n: inputs[n].extend(given))
        for n, block in enumerate(model.blocks)
    ]
    last = sorted((run / "attention").glob("step_*.npz"))[-1]
    for ids in read_snapshot(last).token_ids:
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return [torch.cat([x[0] for x in of_layer]).mean(0) for of_layer in inputs]


def expected(run, step, text, off):
    """Returns (prompt, snapshot of this prompt alone, probabilities after its last token)."""
    found = load_pretrained(run / "checkpoints" / f"step_{step:08d}")
    tokenizer, model = lens_tokenizer(found.tokenizer), found.model
    prompt, means = make_prompt(1, text, tokenizer, 24), means_of(model, run)
    heads = model.config.num_heads

    def edit(layer, context):
        context = context.clone()
        for head in (index % heads for index in off if index // heads == layer):
            context[:, head] = means[layer].unflatten(0, (heads, -1))[head]
        return context

    with edited_contexts(output_projections(model), edit):
        run_model = functools.partial(capture, model)
        data = record(run_model, [prompt], step, token_bytes=tokenizer.token_bytes)
        with torch.no_grad():
            logits = model(torch.tensor([prompt.token_ids]))[0][0, -1]
    return prompt, data, logits.softmax(-1).numpy(), tokenizer


def as_bytes(text):
    return np.frombuffer(base64.b64decode(text), np.uint8).astype(int)


@pytest.mark.parametrize(("step", "off"), [(2, []), (6, []), (6, [0]), (4, [1, 2])])
def test_a_reading_is_that_of_the_model(page, run, step, off):
    assert page.evaluate("[engine.steps, engine.limit]") == [[2, 4, 6], 24]
    prompt, data, chances, tokenizer = expected(run, step, TEXT, off)
    found = page.evaluate(READ, {"text": TEXT, "step": step, "off": off})
    assert (found["ids"], found["step"]) == (prompt.token_ids, step)
    assert (found["tokens"], found["labels"]) == (prompt.tokens, prompt.labels)
    assert (found["texts"], found["signs"]) == (texts_of(prompt.tokens), signs_of(prompt.tokens))
    assert not found["truncated"]
    assert np.abs(as_bytes(found["codes"]) - data.codes[0].ravel()).max() <= 1
    assert np.abs(as_bytes(found["norms"]) - data.norms[0].ravel()).max() <= 1
    assert found["largest_norms"] == pytest.approx(data.details["largest_norms"][0], abs=1e-3)
    assert found["losses"] == pytest.approx(data.row.losses[0].tolist(), abs=1e-3)
    after = found["next"]
    assert after["probabilities"] == pytest.approx(chances[after["ids"]].tolist(), abs=1e-4)
    assert sorted(after["probabilities"], reverse=True) == after["probabilities"]
    assert len(after["ids"]) == 40
    assert min(after["probabilities"]) >= np.sort(chances)[-40] - 1e-4
    texts = token_texts(after["ids"], tokenizer.token_bytes)
    assert after["labels"] == [labels_of([text])[0] for text in texts]
    likely = data.details["predictions"]["of_prompts"][0]["probabilities"]
    for of_page, wanted in zip(found["likely"]["probabilities"], likely, strict=True):
        assert of_page == pytest.approx(wanted, abs=1e-3)
    assert [*map(len, found["likely"]["labels"])] == [5] * len(found["ids"])


def test_heads_that_are_off_change_the_reading(page):
    losses = [
        page.evaluate(READ, {"text": TEXT, "step": 6, "off": off})["losses"] for off in ([], [0])
    ]
    assert np.abs(np.subtract(*losses)).max() > 1e-3


def test_long_and_empty_texts(page):
    found = page.evaluate(READ, {"text": "ab" * 20, "step": 6})
    assert found["ids"] == [97, 98] * 12
    assert found["truncated"]
    ids = {"ids": [97, 98], "step": 6}
    assert page.evaluate(READ, ids) == page.evaluate(READ, {"text": "ab", "step": 6})
    code = "() => engine.read({ text: '', step: 6 }).catch((error) => error.message)"
    assert len(page.evaluate(code).splitlines()) == 1


def test_parts_sum_to_the_score(page):
    options = {"ids": [116, 104, 101, 32, 102], "step": 6, "layer": 1, "head": 1}
    parts = page.evaluate("(o) => engine.parts(o)", options | {"query": 4, "key": 2})
    assert {source["kind"] for source in parts["sources"]} >= {"token", "position", "head", "mlp"}
    total = sum(value for _, _, value in parts["pairs"])
    assert abs(total - (parts["score"] - parts["mean"])) < 0.2 * max(abs(total), 0.1)


def test_damaged_weights_are_an_error_for_users(run, opened, tmp_path):
    page = module_page(opened, tmp_path, "embedded.js", "embeddedEngine")
    model = packed_model(run)
    model["checkpoints"][0]["weights"] = model["checkpoints"][0]["weights"][:200]
    page.evaluate("(model) => { window.engine = embeddedEngine(model); }", model)
    code = "() => engine.read({ text: 'a', step: 2 }).catch((error) => error.message)"
    assert "damaged" in page.evaluate(code)
