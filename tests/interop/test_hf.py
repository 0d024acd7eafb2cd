"""training/hf.py against the transformers library, with tiny random GPT-2 models.

Nothing is fetched: the models are built from a configuration and written to a temporary folder.
"""

import dataclasses
import itertools
import json
import math
import shutil
import zipfile

import pytest
import torch
from helpers.models import random_ids
from helpers.refusals import refused
from helpers.settings import settings
from safetensors.torch import load_file, save_file

from errors import CheckpointError
from model import GPT, ModelConfig
from training.hf import from_hf, hf_tensors, load_any, load_reader, to_hf
from training.resume import preset_like

VOCAB_SIZE = 61
IDS = random_ids(2, 17, vocab_size=VOCAB_SIZE)


def fill(model, seed):
    """Weights large enough for a difference to show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = "ln_" in name or "norm" in name
            parameter.copy_(0.25 * noise + (1.0 if is_norm and "weight" in name else 0.0))
    return model.eval()


def our_model(**changes):
    return fill(GPT(ModelConfig(**{"vocab_size": VOCAB_SIZE} | SHAPE | changes)), seed=3)


SHAPE = {"context_length": 32, "emb_dim": 24, "num_heads": 3, "num_layers": 2, "dropout": 0.0}


@pytest.fixture(scope="module")
def theirs():
    import transformers  # here, and not above: it takes seconds

    config = transformers.GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_positions=32,
        n_embd=24,
        n_head=3,
        n_layer=2,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=VOCAB_SIZE - 1,
        eos_token_id=VOCAB_SIZE - 1,
        attn_implementation="eager",
    )
    return fill(transformers.GPT2LMHeadModel(config), seed=0)


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
    """place(settings, weights) -> a new directory; weights: safetensors, None for no file."""
    numbers = itertools.count()

    def make(settings=(), weights=None):
        new = tmp_path / str(next(numbers))
        new.mkdir()
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (new / "config.json").write_text(json.dumps(config | dict(settings)), encoding="utf-8")
        if weights is not None:
            save_file(weights, new / "model.safetensors")
        return new

    return make


def assert_same_weights(a, b):
    a, b = dict(a.named_parameters()), dict(b.named_parameters())
    assert list(a) == list(b)
    assert all(torch.equal(a[name], b[name]) for name in a)


def refusal(folder, what, file=""):
    """Loads a directory, which has to be refused by a file's name; the reason."""
    with refused(CheckpointError, "checkpoint") as caught:
        from_hf(folder)
        raise AssertionError(f"{what} is not refused")
    assert str(caught.value.value).startswith(str(folder / file)), what
    return caught.value.reason


# --- From theirs to ours -------------------------------------------------------------------------


def test_logits_loss_and_attention_weights_are_theirs(theirs, folder, tmp_path):
    with torch.no_grad():
        expected = theirs(IDS, labels=IDS, output_attentions=True)
    assert expected.logits.std() > 0.5  # there is something to compare
    for kernel in ("sdpa", "explicit"):
        ours = from_hf(folder, attention=kernel)
        assert not ours.training
        with torch.no_grad():
            torch.testing.assert_close(ours(IDS)[0], expected.logits, atol=1e-4, rtol=0)
            _, loss = ours(IDS[:, :-1], IDS[:, 1:])
        torch.testing.assert_close(loss, expected.loss, atol=1e-5, rtol=0)
    for layer, weights in zip(expected.attentions, ours.attn_weights(IDS), strict=True):
        assert layer.shape == (2, 3, 17, 17)
        torch.testing.assert_close(weights, layer, atol=1e-5, rtol=0)
    to_hf(ours, tmp_path)  # and back, bit for bit
    before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_settings_are_read(folder, place, weights):
    assert load_any(folder)[1] is None
    assert from_hf(folder).config == ModelConfig(VOCAB_SIZE, 32, 24, 3, 2, 0.0)
    assert from_hf(place({"resid_pdrop": 0.3}, weights)).config.dropout == 0.3


def as_old_versions_wrote(weights, prefix):
    """With masks as buffers and the head a second time."""
    old = {prefix + name.removeprefix("transformer."): value for name, value in weights.items()}
    for layer in range(2):
        mask = torch.ones(32, 32, dtype=torch.bool if layer else torch.uint8).tril()
        old[f"{prefix}h.{layer}.attn.bias"] = mask.view(1, 1, 32, 32)
        old[f"{prefix}h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    return old | {"lm_head.weight": old[f"{prefix}wte.weight"]}


def test_other_names_and_precisions(folder, place, weights):
    expected = from_hf(folder)
    for prefix, is_zip in (("transformer.", True), ("", False), ("", True)):
        old = as_old_versions_wrote(weights, prefix)
        new = place(weights={name: value.clone() for name, value in old.items()})
        assert_same_weights(from_hf(new), expected)
        new = place()  # the same as a pytorch_model.bin; before torch 1.6 that was no zip file
        torch.save(old, new / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip)
        assert_same_weights(from_hf(new), expected)
    in_bf16 = from_hf(place(weights={name: value.bfloat16() for name, value in weights.items()}))
    new = place()
    halves = {name: torch.nn.Parameter(value.half()) for name, value in weights.items()}
    torch.save(halves, new / "pytorch_model.bin")
    in_fp16 = from_hf(new)
    new = place(weights=weights)
    (new / "pytorch_model.bin").write_bytes(b"not read where there is the other")
    assert_same_weights(from_hf(new), expected)
    for name, parameter in expected.named_parameters():
        assert torch.equal(in_bf16.get_parameter(name), parameter.bfloat16().float())
        assert torch.equal(in_fp16.get_parameter(name), parameter.half().float())


BAD_MAPS = {
    "none": lambda places: None,
    "numbers": lambda places: dict.fromkeys(places, 1),
    "in another folder": lambda places: places | {"x": "../model.safetensors"},
    "absolute": lambda places: places | {"x": "/etc/passwd"},
    "a pickle": lambda places: places | {"x": "pytorch_model.bin"},
    "a missing file": lambda places: places | {"x": "model-9.safetensors"},
    "a missing tensor": lambda places: places | {"x": min(places.values())},
    "a tensor twice": lambda places: places | {min(places): "again.safetensors"},
    "nothing": lambda places: {},
}


def test_shards(theirs, folder, tmp_path):
    """As transformers writes them, and with a bad index."""
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert not (tmp_path / "model.safetensors").exists()
    index = tmp_path / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    assert len(set(places.values())) > 2
    assert_same_weights(from_hf(tmp_path), from_hf(folder))
    shutil.copy(tmp_path / places[min(places)], tmp_path / "again.safetensors")
    for what, change in BAD_MAPS.items():
        index.write_text(json.dumps({"weight_map": change(places)}))
        refusal(tmp_path, what, "model-9" if what == "a missing file" else index.name)


# What a pytorch_model.bin may hold besides weights by name. The huge one is a shape of terabytes on
# a storage of four bytes.
NOT_WEIGHTS = {
    "a list": [torch.zeros(1)],
    "nested": {"model": {"a": torch.zeros(1)}},
    "a number as name": {1: torch.zeros(1)},
    "integers": {"a": torch.zeros(1, dtype=torch.int64)},
    "sparse": {"a": torch.eye(3).to_sparse()},
    "on no device": {"a": torch.zeros(1, device="meta")},
    "huge": {"a": torch.zeros(1).expand(10**6, 10**6)},
    "overlapping": {"a": torch.arange(5.0).as_strided((3, 3), (1, 1))},
}


def test_bad_old_files(place, weights):
    new = place()
    file = new / "pytorch_model.bin"
    for is_zip in (True, False):
        for what, values in NOT_WEIGHTS.items():
            torch.save(values, file, _use_new_zipfile_serialization=is_zip)
            name = repr(next(iter(values))) if isinstance(values, dict) else ""
            assert name in refusal(new, what), what  # for it, not for what is missing
        torch.save(weights, file, _use_new_zipfile_serialization=is_zip)
        whole = file.read_bytes()
        for left in (0, 2, 100, 5000, -100):
            file.write_bytes(whole[:left])
            refusal(new, f"{left} bytes")
    # The shape of a tensor is data like any other: here of more rows than its storage has.
    torch.save({"a": torch.zeros(40, 3)}, file)
    packed = zipfile.ZipFile(file)
    parts = {name: packed.read(name) for name in packed.namelist()}
    (name,) = [name for name in parts if name.endswith("data.pkl")]
    assert parts[name].count(b"K(K\x03\x86") == 1  # the tuple (40, 3)
    parts[name] = parts[name].replace(b"K(K\x03\x86", b"M\xff\xffK\x03\x86")
    with zipfile.ZipFile(file, "w") as changed:
        for name, content in parts.items():
            changed.writestr(name, content)
    refusal(new, "a shape larger than its storage")


# --- Sizes ---------------------------------------------------------------------------------------

# What config.json says of the four published models: (n_layer, n_head, n_embd); all have
# n_positions = n_ctx = 1024 and vocab_size = 50257 (https://huggingface.co/openai-community).
PUBLISHED = {
    "gpt2-small": (12, 12, 768, 124_439_808),
    "gpt2-medium": (24, 16, 1024, 354_823_168),
    "gpt2-large": (36, 20, 1280, 774_030_080),
    "gpt2-xl": (48, 25, 1600, 1_557_611_200),
}


def test_presets_have_the_published_shapes():
    """Every tensor of transformers' model of that size, by name and shape; no memory is taken."""
    import transformers

    for preset, (layers, heads, width, parameters) in PUBLISHED.items():
        model = settings("data.path=none", f"model={preset}").model
        with torch.device("meta"):
            ours = GPT(model)
            shape = transformers.GPT2Config(n_layer=layers, n_head=heads, n_embd=width)
            theirs = transformers.GPT2LMHeadModel(shape)
        assert (shape.vocab_size, shape.n_positions) == (50257, 1024)
        assert model.num_heads == heads
        assert ours.num_parameters() == parameters == theirs.num_parameters()
        wanted = {name: value.shape for name, value in theirs.named_parameters()}
        assert {name: v.shape for name, v in hf_tensors(ours, "meta").items()} == wanted
        assert preset_like(model) == preset
        assert preset_like(dataclasses.replace(model, context_length=64)) == preset
        assert preset_like(dataclasses.replace(model, num_layers=5)) is None


# --- From ours to theirs -------------------------------------------------------------------------


@pytest.mark.parametrize("qkv_bias", [True, False])
def test_transformers_and_we_load_what_we_write(tmp_path, qkv_bias):
    import transformers

    ours = our_model(qkv_bias=qkv_bias, dropout=0.1)
    folder = tmp_path / "new" / "folder"
    to_hf(ours, folder)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    assert type(theirs).__name__ == "GPT2LMHeadModel"
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        expected, _ = ours(IDS)
        logits = theirs.eval()(IDS).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    back = from_hf(folder)
    if qkv_bias:
        assert back.config == ours.config
        assert_same_weights(back, ours)
    else:
        assert back.blocks[0].attn.W_query.bias.count_nonzero() == 0
        torch.testing.assert_close(back(IDS)[0], expected)


# --- What reads and writes text ------------------------------------------------------------------


BAD_READERS = [
    *({"tokenizer": "gpt3", "window": 20}, {"tokenizer": ["byte"], "window": 20}),
    *({"tokenizer": "byte", "window": w} for w in (0, 33, "20", True, None)),
    *({}, [], None),
]


def test_tokenizer_and_window_of_a_directory(folder, tmp_path):
    to_hf(our_model(vocab_size=257, num_layers=1), tmp_path)
    reader = load_reader(tmp_path)  # byte-level by its vocabulary, with all positions
    assert (reader.tokenizer_name, reader.window, reader.state) == ("byte", 32, None)
    assert reader.tokenizer.n_vocab == 257
    assert_same_weights(reader.model, from_hf(tmp_path))
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())

    def with_key(value):
        file.write_text(json.dumps(config | {"clearhead": value}))
        return load_reader(tmp_path, "trainer.init_from")

    reader = with_key({"tokenizer": "byte", "window": 20})
    assert (reader.tokenizer_name, reader.window) == ("byte", 20)
    for value in BAD_READERS:
        with refused(CheckpointError, "trainer.init_from", tmp_path):
            with_key(value)
            raise AssertionError(value)
    with refused(CheckpointError, "checkpoint", folder):  # fewer ids than the tokenizer has
        load_reader(folder)


# --- What cannot be loaded -----------------------------------------------------------------------


def test_models_that_compute_something_else(place, weights):
    for key, value in (
        ("activation_function", "gelu"),
        ("activation_function", "relu"),
        ("model_type", "gpt_neo"),
        ("layer_norm_epsilon", 1e-6),
        ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True),
        ("tie_word_embeddings", False),
        ("n_inner", 50),
    ):
        new = place({key: value}, weights)
        assert key in refusal(new, key, "config.json")


def test_tensors_that_do_not_fit(place, weights):
    def untransposed(name):
        return {name: weights[name].T.contiguous()}

    cases = {
        "h.1.ln_2.bias": ({}, {"transformer.h.1.ln_2.bias": None}),  # missing
        "h.1.attn.rotary": ({}, {"transformer.h.1.attn.rotary": torch.zeros(2)}),  # unknown
        "h.1.": ({"n_layer": 1}, {}),
        "h.2.": ({"n_layer": 3}, {}),
        "pos_emb.weight": ({"n_positions": 64}, {}),
        "W_query.weight": ({}, untransposed("transformer.h.0.attn.c_attn.weight")),
    }
    for name, (config, changes) in cases.items():
        tensors = {k: v for k, v in (weights | changes).items() if v is not None}
        new = place(config, tensors)
        assert name in refusal(new, name)


def test_damaged_and_missing_files(place, weights):
    new = place(weights=weights)
    file, config = new / "model.safetensors", new / "config.json"
    whole = file.read_bytes()
    for left in (0, 5, 1000, -100):
        file.write_bytes(whole[:left])
        refusal(new, f"{left} bytes", "model.safetensors")
    file.unlink()
    refusal(new, "no weights", "model.safetensors")
    for text in ("", "{", "[]", "null", '{"model_type": "gpt2"}', '{"n_embd": "24"}'):
        config.write_text(text, encoding="utf-8")
        refusal(new, text, "config.json")
    config.unlink()
    refusal(new, "no configuration", "config.json")
    with refused(CheckpointError, "checkpoint", new):
        load_any(new)


def test_bad_sizes(place, weights):
    sizes = ("vocab_size", "n_positions", "n_embd", "n_head", "n_layer")
    for key, value in [
        *((key, value) for key in sizes for value in (0, 12.0)),
        *(("n_layer", value) for value in (-1, "12", None, True, math.nan)),
    ]:
        new = place({key: value}, weights)
        refusal(new, f"{key}={value}", "config.json")
