"""models/huggingface.py compared with the transformers library, with a tiny random GPT-2 and
without a network."""

import json
import shutil

import pytest
import torch
from helpers.models import random_ids, tiny_model
from helpers.refusals import refused
from helpers.runs import assert_same
from safetensors.torch import load_file, save_file

from clearhead.errors import CheckpointError
from clearhead.models.huggingface import from_hf, model_config, to_hf
from clearhead.models.pretrained import load_pretrained
from clearhead.tokens.tokenizer import get_tokenizer
from clearhead.tokens.tokenizer_json import to_json
from model import ModelConfig

VOCAB_SIZE = 61
IDS = random_ids(2, 17, vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def theirs():
    import transformers  # not at the top: the import takes seconds

    config = transformers.GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_positions=32,
        n_embd=24,
        n_head=3,
        n_layer=2,
        bos_token_id=VOCAB_SIZE - 1,
        eos_token_id=VOCAB_SIZE - 1,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():  # large weights, so that differences are visible
        for parameter in model.parameters():
            parameter.add_(0.25 * torch.randn(parameter.shape))
    return model


@pytest.fixture(scope="module")
def folder(theirs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    theirs.save_pretrained(folder)
    return folder


@pytest.fixture
def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.fixture
def place(folder, tmp_path):
    """place(settings, weights) -> a new Hugging Face directory; weights=None: without weights."""

    def make(settings=(), weights=None):
        new = tmp_path / str(len(list(tmp_path.iterdir())))
        new.mkdir()
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (new / "config.json").write_text(json.dumps(config | dict(settings)), encoding="utf-8")
        if weights is not None:
            save_file(weights, new / "model.safetensors")
        return new

    return make


def assert_same_weights(a, b):
    assert_same(dict(a.named_parameters()), dict(b.named_parameters()))


def refusal(folder, file):
    """Checks that loading a directory is refused with an error about `file`; returns the reason."""
    with refused(CheckpointError, "checkpoint", folder / file) as caught:
        from_hf(folder)
    return caught.value.reason


def test_logits_loss_and_attention_weights_are_theirs(theirs, folder, tmp_path):
    with torch.no_grad():
        expected = theirs(IDS, labels=IDS, output_attentions=True)
    assert expected.logits.std() > 0.5  # not nearly constant
    for kernel in ("sdpa", "explicit"):
        ours = from_hf(folder, attention=kernel)
        with torch.no_grad():
            torch.testing.assert_close(ours(IDS)[0], expected.logits, atol=1e-4, rtol=0)
            _, loss = ours(IDS[:, :-1], IDS[:, 1:])
        torch.testing.assert_close(loss, expected.loss, atol=1e-5, rtol=0)
    for layer, weights in zip(expected.attentions, ours.attn_weights(IDS), strict=True):
        torch.testing.assert_close(weights, layer, atol=1e-5, rtol=0)
    assert ours.config == ModelConfig(VOCAB_SIZE, 32, 24, 3, 2, 0.1, attention="explicit")
    to_hf(ours, tmp_path)  # written again, it is equal bit for bit
    before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path))
    assert_same(after, before)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["eos_token_id"] is None  # no tokenizer has this vocabulary


def as_old_versions_wrote(weights, prefix):
    """Adds masks and the tied head, as old versions of transformers did."""
    old = {prefix + name.removeprefix("transformer."): value for name, value in weights.items()}
    for layer in range(2):
        mask = torch.ones(32, 32, dtype=torch.bool if layer else torch.uint8).tril()
        old[f"{prefix}h.{layer}.attn.bias"] = mask.view(1, 1, 32, 32)
        old[f"{prefix}h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    return old | {"lm_head.weight": old[f"{prefix}wte.weight"]}


def test_other_names_and_precisions(folder, place, weights):
    expected = from_hf(folder)
    for prefix in ("transformer.", ""):
        old = as_old_versions_wrote(weights, prefix)
        new = place(weights={name: value.clone() for name, value in old.items()})
        assert_same_weights(from_hf(new), expected)
    in_bf16 = from_hf(place(weights={name: value.bfloat16() for name, value in weights.items()}))
    for name, parameter in expected.named_parameters():
        assert torch.equal(in_bf16.get_parameter(name), parameter.bfloat16().float())


def test_shards(theirs, folder, tmp_path):
    """Shards written by transformers, and an invalid index."""
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    assert_same_weights(from_hf(tmp_path), from_hf(folder))
    for change, refused_file in (
        ({"x": "../model.safetensors"}, index.name),
        ({"x": "a\0.safetensors", "y": "\ud800.safetensors"}, index.name),
        ({"x": "model-9.safetensors"}, "model-9.safetensors"),  # which is missing
    ):
        index.write_text(json.dumps({"weight_map": places | change}))
        refusal(tmp_path, refused_file)


def test_tokenizer_and_window_of_a_directory(folder, tmp_path):
    to_hf(tiny_model(vocab_size=257, context_length=32), tmp_path)
    pretrained = load_pretrained(
        tmp_path
    )  # by its vocabulary size the byte tokenizer, with all positions
    assert (pretrained.tokenizer.name, pretrained.window, pretrained.state) == ("byte", 32, None)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())

    def with_key(value):
        file.write_text(json.dumps(config | {"clearhead": value}))
        return load_pretrained(tmp_path, "trainer.init_from")

    pretrained = with_key({"tokenizer": "byte", "window": 20})
    assert (pretrained.tokenizer.name, pretrained.window) == ("byte", 20)
    for value in ({"tokenizer": "gpt3", "window": 20}, {"tokenizer": "byte", "window": 33}):
        with refused(CheckpointError, "trainer.init_from", tmp_path):
            with_key(value)
            raise AssertionError(value)
    with refused(CheckpointError, "checkpoint", folder):  # fewer ids than the tokenizer has
        load_pretrained(folder)


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory):
    """A directory with GPT-2's vocabulary and the tokenizer files of openai-community/gpt2."""
    import transformers

    folder = tmp_path_factory.mktemp("with_tokenizer")
    to_hf(tiny_model(vocab_size=50260), folder)  # the matrix is padded
    model = json.loads(to_json(get_tokenizer("gpt2")))["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    merges = ["#version: 0.2", *map(" ".join, model["merges"])]
    (folder / "merges.txt").write_text("\n".join(merges), encoding="utf-8")
    transformers.GPT2Tokenizer.from_pretrained(folder).save_pretrained(folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    content["added_tokens"][0] |= {"normalized": True}
    file.write_text(json.dumps(content), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 1024}', encoding="utf-8")
    return folder


def test_the_usual_tokenizer_files_are_accepted(with_tokenizer, tmp_path):
    import transformers

    new = shutil.copytree(with_tokenizer, tmp_path / "all")
    assert load_pretrained(new).tokenizer.name == "gpt2"
    (new / "tokenizer.json").unlink()
    assert load_pretrained(new).tokenizer.name == "gpt2"  # of vocab.json and merges.txt
    for name in ("GPT2Tokenizer", "GPT2TokenizerFast"):
        new = shutil.copytree(with_tokenizer, tmp_path / name)
        for file in ("vocab.json", "merges.txt", "tokenizer.json"):
            (new / file).unlink()
        getattr(transformers, name).from_pretrained(with_tokenizer).save_pretrained(new)
        assert load_pretrained(new).tokenizer.name == "gpt2"


def test_defaults_of_config_json(folder, place, weights):
    """Those of transformers; its other names of the same GELU."""
    new = place({"activation_function": "gelu_pytorch_tanh"}, weights)
    assert_same_weights(from_hf(new), from_hf(folder))
    (new / "config.json").write_text('{"model_type": "gpt2"}', encoding="utf-8")
    assert model_config(new / "config.json") == ModelConfig()


def test_models_that_compute_something_else_and_bad_sizes(place, weights):
    for key, value in (
        ("activation_function", "gelu"),
        ("scale_attn_by_inverse_layer_idx", True),
        ("n_inner", 50),
        ("n_head", 3.5),
    ):
        assert key in refusal(place({key: value}, weights), "config.json")
    refusal(place({"n_embd": 0}, weights), "config.json")


def test_tensors_that_do_not_fit(place, weights):
    c_attn = "transformer.h.0.attn.c_attn.weight"
    cases = {
        "h.1.ln_2.bias": ({}, {"transformer.h.1.ln_2.bias": None}),  # missing
        "h.1.attn.rotary": ({}, {"transformer.h.1.attn.rotary": torch.zeros(2)}),  # unknown
        "pos_emb.weight": ({"n_positions": 64}, {}),
        "W_query.weight": ({}, {c_attn: weights[c_attn].T.contiguous()}),
        # transformers does not tie an output layer that differs, whatever config.json says
        "lm_head.weight": ({}, {"lm_head.weight": weights["transformer.wte.weight"] + 1}),
    }
    for name, (config, changes) in cases.items():
        tensors = {k: v for k, v in (weights | changes).items() if v is not None}
        assert name in refusal(place(config, tensors), "model.safetensors")


def test_damaged_and_missing_files(place, weights):
    new = place(weights=weights)
    file, config = new / "model.safetensors", new / "config.json"
    whole = file.read_bytes()
    for left in (1000, -100):
        file.write_bytes(whole[:left])
        refusal(new, file.name)
    file.unlink()
    refusal(new, file.name)
    for text in ("", "[]"):
        config.write_text(text, encoding="utf-8")
        refusal(new, config.name)
    config.unlink()
    refusal(new, config.name)
