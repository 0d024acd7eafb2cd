"""The forward pass in JavaScript (headlens/page/gpt.js) in Chromium, compared with PyTorch."""

import base64
import copy
import itertools
from dataclasses import asdict

import numpy as np
import pytest
import torch
from helpers import REPOSITORY

from headlens.ablation import edited_contexts, removal
from headlens.assemble import join_modules
from headlens.capturing import output_projections
from model import GPT, ModelConfig

SETUP = """
const bytesOf = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
const arrayOf = (text) => new Float32Array(bytesOf(text).buffer);
window.build = ({ config, tensors, means }) => {
  window.tensors = new Map(Object.entries(tensors).map(([name, text]) => [name, arrayOf(text)]));
  window.gpt = new Gpt(config, window.tensors, arrayOf(means));
};
window.plain = (reading) =>
  ({ ...reading, codes: [...reading.codes], norms: [...reading.norms] });
window.waitLess = () => { // the clock runs fast: every piece of work is a long one
  let time = 0;
  performance.now = () => { time += 100; return time; };
};
"""
READ = "async ([ids, off]) => plain(await gpt.read(ids, off))"
PARTS = "async (given) => gpt.parts(...given)"


def a_model(layers=2, heads=2, width=16, vocabulary=37, limit=24, qkv_bias=True, seed=0):
    """A model with random parameters, large enough that attention is far from uniform."""
    sizes = {"emb_dim": width, "num_heads": heads, "num_layers": layers}
    config = ModelConfig(vocabulary, limit, dropout=0.0, qkv_bias=qkv_bias, **sizes)
    model, generator = GPT(config).eval(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 1.5 / width**0.5 if parameter.ndim == 2 else 0.3
            centre = 1 if name.endswith("norm.weight") else 0
            parameter.copy_(centre + scale * torch.randn(parameter.shape, generator=generator))
    means = 0.5 * torch.randn(layers, width, generator=generator)
    return model, means


def some_ids(model, count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (count,), generator=generator).tolist()


@pytest.fixture
def javascript(opened, tmp_path):
    """javascript(model, means) -> a page in which `gpt` is this model."""

    def build(model, means):
        script = join_modules(REPOSITORY / "headlens/page/gpt.js") + SETUP
        path = tmp_path / "page.html"
        path.write_text(f'<script type="module">{script}</script>', encoding="utf-8")
        page = opened(path)

        def text(tensor):
            return base64.b64encode(tensor.detach().numpy().astype("<f4").tobytes()).decode()

        tensors = {name: text(tensor) for name, tensor in model.state_dict().items()}
        given = {"config": asdict(model.config), "tensors": tensors, "means": text(means)}
        page.evaluate("(given) => build(given)", given)
        return page

    return build


def switched_off(model, means, off):
    heads = model.config.num_heads
    edit = removal([divmod(index, heads) for index in off], means.unflatten(1, (heads, -1)))
    return edited_contexts(output_projections(model), edit)


@torch.no_grad()
def expected(model, means, ids, off=()):
    """Returns PyTorch's logits (T, V), the codes before they are rounded, (L H, T (T + 1) / 2),
    and value norms, (L H, T)."""
    codes, norms = [], []

    def visit(_, weights, __, value_norms):
        codes.append(255 * weights[0][:, *torch.tril_indices(len(ids), len(ids))].sqrt())
        norms.append(value_norms[0])

    with switched_off(model, means, off):
        logits = model.capture_attention(torch.tensor([ids]), visit)
    return logits[0], torch.cat(codes).numpy(), torch.cat(norms).numpy()


def assert_reading(reading, model, means, ids, off=()):
    logits, codes, norms = expected(model, means, ids, off)
    log_probabilities = logits.log_softmax(-1)
    np.testing.assert_allclose(np.reshape(reading["codes"], codes.shape), codes, atol=0.51)
    largest = norms.max(-1)
    np.testing.assert_allclose(reading["largest_norms"], largest, rtol=1e-5)
    of_norms = 255 * np.sqrt(norms / largest[:, None])
    np.testing.assert_allclose(np.reshape(reading["norms"], norms.shape), of_norms, atol=0.51)
    losses = -log_probabilities[range(len(ids) - 1), ids[1:]]
    np.testing.assert_allclose(reading["losses"], losses, atol=1e-4)
    for found, rows, most in (
        (reading["likely"], log_probabilities, 5),
        ({k: [v] for k, v in reading["next"].items()}, log_probabilities[-1:], 40),
    ):
        values, indices = rows.topk(min(most, rows.shape[1]))
        assert found["ids"] == indices.tolist()
        np.testing.assert_allclose(np.log(found["probabilities"]), values, atol=1e-4)


@torch.no_grad()
def all_pairs(model, means, ids, off, layer, head, query, key):
    """Returns the score, the mean score of the row, and the value of each pair of sources, {(source
    of the query, source of the key): value}, in float64 and loop by loop."""
    model, means = copy.deepcopy(model).double(), means.double()
    contexts, mlps, scores = [], [], []
    edited = switched_off(model, means, off)  # which may run the model
    for block in model.blocks:
        block.attn.out_proj.register_forward_hook(lambda _, x, __: contexts.append(x[0][0]))
        block.mlp.register_forward_hook(lambda _, __, out: mlps.append(out[0]))
    with edited:
        model.capture_attention(torch.tensor([ids]), lambda *given: scores.append(given[2][0]))
    attn, norm = model.blocks[layer].attn, model.blocks[layer].attn_norm
    width = attn.head_dim
    rows = slice(head * width, (head + 1) * width)

    def projected(position, module):
        """Returns the part of each source in the query or key at a position."""
        parts = {("token",): model.token_emb.weight[ids[position]]}
        parts["position",] = model.pos_emb.weight[position]
        parts["biases",] = torch.zeros(model.config.emb_dim)
        for of, block in enumerate(model.blocks[:layer]):
            for one in range(attn.num_heads):
                columns = slice(one * width, (one + 1) * width)
                weight = block.attn.out_proj.weight[:, columns]
                parts["head", of, one] = weight @ contexts[of][position, columns]
            parts["mlp", of] = mlps[of][position]
            parts["biases",] = parts["biases",] + block.attn.out_proj.bias
        deviation = (sum(parts.values()).var(correction=0) + norm.eps).sqrt()
        found = {}
        for source, part in parts.items():
            part = (part - part.mean()) / deviation * norm.weight
            part = part + norm.bias if source == ("biases",) else part
            found[source] = module.weight[rows] @ part
            if source == ("biases",) and module.bias is not None:
                found[source] = found[source] + module.bias[rows]
        return found

    queries = projected(query, attn.W_query)
    keys = [projected(position, attn.W_key) for position in range(query + 1)]
    pairs = {}
    for one, other in itertools.product(queries, keys[0]):
        mean = sum(of[other] for of in keys) / len(keys)
        pairs[one, other] = float(queries[one] @ (keys[key][other] - mean)) / width**0.5
    row = scores[layer][head, query, : query + 1]
    return float(row[key]), float(row.mean()), pairs


def assert_parts(found, *given):
    score, mean, pairs = all_pairs(*given)
    assert (found["score"], found["mean"]) == pytest.approx((score, mean), abs=1e-4)
    assert sum(pairs.values()) == pytest.approx(score - mean, abs=1e-5)
    sources = [tuple(source.values()) for source in found["sources"]]
    model, layer = given[0], given[4]
    expected = [("token",), ("position",)]
    for of in range(layer):
        expected += [("head", of, head) for head in range(model.config.num_heads)] + [("mlp", of)]
    assert sources == [*expected, ("biases",)]
    largest = sorted(map(abs, pairs.values()), reverse=True)[:20]
    assert len({(n, m) for n, m, _ in found["pairs"]}) == len(largest)
    for (n, m, value), size in zip(found["pairs"], largest, strict=True):
        assert value == pytest.approx(pairs[sources[n], sources[m]], abs=1e-5)
        assert abs(value) == pytest.approx(size, abs=1e-5)


@pytest.mark.parametrize(
    "sizes",
    [
        {"layers": 1, "heads": 1, "width": 6, "vocabulary": 3, "qkv_bias": False},
        {"layers": 4, "heads": 4, "width": 32, "vocabulary": 65},
        {"layers": 3, "heads": 2, "width": 10, "vocabulary": 50, "qkv_bias": False, "seed": 2},
    ],
    ids=str,
)
def test_attention_and_predictions_are_those_of_pytorch(javascript, sizes):
    model, means = a_model(**sizes)
    page = javascript(model, means)
    for off in ([], [0], [*range(sizes["layers"] * sizes["heads"])][1::2]):
        for count in (23, 1):
            ids = some_ids(model, count)
            assert_reading(page.evaluate(READ, [ids, off]), model, means, ids, off)


def test_a_text_that_grows_changes_and_gets_shorter(javascript):
    model, means = a_model()
    page = javascript(model, means)
    ids, other = some_ids(model, 24), some_ids(model, 24, seed=5)
    texts = [ids[: n + 1] for n in range(24)]  # letter by letter
    texts += [ids[:10], ids[:9] + other[9:], ids[:9] + other[9:20] + ids[20:], ids[:3], other]
    for text in texts:
        assert_reading(page.evaluate(READ, [text, []]), model, means, text)
    assert_reading(page.evaluate(READ, [other, [1, 2]]), model, means, other, [1, 2])
    assert_reading(page.evaluate(READ, [other, [2]]), model, means, other, [2])
    in_place = """async (ids) => {
      await gpt.read(ids, []);
      ids[2] = 0;
      return plain(await gpt.read(ids, []));
    }"""
    assert_reading(page.evaluate(in_place, ids), model, means, [*ids[:2], 0, *ids[3:]])


def test_known_positions_are_not_computed_again(javascript):
    model, means = a_model()
    page = javascript(model, means)
    ids = some_ids(model, 20)
    page.evaluate(READ, [ids[:12], [1]])
    page.evaluate("() => tensors.get('pos_emb.weight').fill(NaN, 0, 16 * 12)")
    assert_reading(page.evaluate(READ, [ids, [1]]), model, means, ids, [1])
    assert_reading(page.evaluate(READ, [ids[:7], [1]]), model, means, ids[:7], [1])


def test_calls_at_the_same_time(javascript):
    """The first call gives way to the page after each piece of work; the others wait for it."""
    model, means = a_model()
    page = javascript(model, means)
    ids, other = some_ids(model, 24), some_ids(model, 20, seed=5)
    script = """async ([ids, other, part]) => {
      waitLess();
      const [one, two, parts, three] = await Promise.all([gpt.read(ids, []),
        gpt.read(other, [1]), gpt.parts(...part), gpt.read(ids, [])]);
      return [plain(one), plain(two), parts, plain(three)];
    }"""
    part = [ids, [2], 1, 0, 20, 3]
    one, two, parts, three = page.evaluate(script, [ids, other, part])
    assert_reading(one, model, means, ids)
    assert_reading(two, model, means, other, [1])
    assert_reading(three, model, means, ids)
    assert_parts(parts, model, means, *part)


def test_a_call_that_is_stopped(javascript):
    """It ends with the reason of its signal, and the calls after it are right."""
    model, means = a_model()
    page = javascript(model, means)
    ids, other = some_ids(model, 24), some_ids(model, 20, seed=5)
    script = """async ([ids, other]) => {
      waitLess();
      const stop = new AbortController();
      const calls = [gpt.read(ids, [], stop.signal), gpt.read(other, [], stop.signal),
        gpt.read(ids, [])];
      setTimeout(() => stop.abort("newer text"));
      const [one, two, three] = await Promise.allSettled(calls);
      const [four] = await Promise.allSettled([gpt.read(ids, [], AbortSignal.abort("too late"))]);
      return [one.reason, two.reason, four.reason, plain(three.value)];
    }"""
    *reasons, reading = page.evaluate(script, [ids, other])
    assert reasons == ["newer text", "newer text", "too late"]
    assert_reading(reading, model, means, ids)


def test_most_likely_text(javascript):
    """100 tokens, each the most likely one after those before it."""
    model, means = a_model(layers=3, width=24, vocabulary=61, limit=104, seed=3)
    page = javascript(model, means)
    ids = some_ids(model, 4)
    script = """async (ids) => {
      for (let n = 0; n < 100; n++) ids.push((await gpt.read(ids, [])).next.ids[0]);
      return ids;
    }"""
    found = page.evaluate(script, ids)
    with torch.no_grad():
        for _ in range(100):
            ids.append(int(model(torch.tensor([ids]))[0][0, -1].argmax()))
    assert found == ids
    assert len(set(ids)) > 10


@pytest.mark.parametrize("qkv_bias", [False, True])
def test_parts_of_a_score(javascript, qkv_bias):
    model, means = a_model(layers=3, heads=2, width=16, qkv_bias=qkv_bias)
    page = javascript(model, means)
    ids = some_ids(model, 24)
    for off in ([], [1, 2]):
        for place in ((0, 1, 5, 5), (1, 0, 23, 4), (2, 1, 20, 0), (2, 0, 0, 0)):
            given = (ids, off, *place)
            assert_parts(page.evaluate(PARTS, given), model, means, *given)
