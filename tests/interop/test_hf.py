"""training/hf.py against the oracle: tiny random GPT-2 models of the transformers library.

Nothing is fetched: the models are built from a configuration and written to a temporary folder.
"""

import dataclasses
import json
import math
import os
import shutil
import zipfile

import pytest
import torch
from safetensors.torch import load_file, save_file

from errors import CheckpointError
from model import GPT, ModelConfig
from training.command import compose
from training.hf import from_hf, hf_tensors, load_any, load_reader, to_hf
from training.resume import preset_like

VOCAB_SIZE = 61


@pytest.fixture(scope="module")
def transformers():
    """Imported here and not above: it takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        import transformers

        assert os.environ["HF_HUB_OFFLINE"] == "1"
        yield transformers


def oracle(transformers, seed=0, **changes):
    """Their GPT-2, with weights wide enough for a difference to show."""
    settings = {
        "vocab_size": VOCAB_SIZE,
        "n_positions": 32,
        "n_embd": 24,
        "n_head": 3,
        "n_layer": 2,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "bos_token_id": VOCAB_SIZE - 1,
        "eos_token_id": VOCAB_SIZE - 1,
        "attn_implementation": "eager",
    }
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings | changes))
    fill(theirs, seed)
    return theirs.eval()


def fill(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = "ln_" in name or "norm" in name
            parameter.copy_(0.25 * noise + (1.0 if is_norm and "weight" in name else 0.0))


def our_model(seed=3, **changes):
    settings = {
        "vocab_size": VOCAB_SIZE,
        "context_length": 32,
        "emb_dim": 24,
        "num_heads": 3,
        "num_layers": 2,
        "dropout": 0.0,
    }
    model = GPT(ModelConfig(**settings | changes))
    fill(model, seed)
    return model.eval()


def random_ids(B=2, T=17):
    return torch.randint(VOCAB_SIZE, (B, T), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def theirs(transformers):
    return oracle(transformers)


@pytest.fixture(scope="module")
def folder(theirs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    theirs.save_pretrained(folder)
    return folder


@pytest.fixture
def copy(folder, tmp_path):
    """A copy of the folder, to be changed: edit(settings, tensors) -> the changed folder."""

    def edit(settings=(), tensors=lambda tensors: None):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config |= dict(settings)
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        weights = load_file(folder / "model.safetensors")
        tensors(weights)
        save_file(weights, tmp_path / "model.safetensors")
        return tmp_path

    return edit


def assert_same_weights(a, b):
    a, b = dict(a.named_parameters()), dict(b.named_parameters())
    assert list(a) == list(b)
    assert all(torch.equal(a[name], b[name]) for name in a)


# --- From theirs to ours -------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["sdpa", "explicit"])
def test_logits_are_theirs(theirs, folder, kernel):
    ours = from_hf(folder, attention=kernel)
    assert not ours.training
    with torch.no_grad():
        expected = theirs(random_ids()).logits
        logits, _ = ours(random_ids())
    assert expected.std() > 0.5  # there is something to compare
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_attention_weights_are_theirs(theirs, folder):
    with torch.no_grad():
        expected = theirs(random_ids(), output_attentions=True).attentions
    assert len(expected) == 2
    for ours, layer in zip(from_hf(folder).attn_weights(random_ids()), expected, strict=True):
        assert layer.shape == (2, 3, 17, 17)
        torch.testing.assert_close(ours, layer, atol=1e-5, rtol=0)


def test_loss_is_theirs(theirs, folder):
    ids = random_ids()
    _, loss = from_hf(folder)(ids[:, :-1], ids[:, 1:])
    torch.testing.assert_close(loss, theirs(ids, labels=ids).loss, atol=1e-5, rtol=0)


def test_settings_are_read(folder, copy):
    assert load_any(folder)[1] is None
    assert from_hf(folder).config == ModelConfig(VOCAB_SIZE, 32, 24, 3, 2, 0.0)
    assert from_hf(copy({"resid_pdrop": 0.3})).config.dropout == 0.3


def test_with_and_without_prefix(folder, copy):
    def remove_prefix(tensors):
        assert any(name.startswith("transformer.") for name in tensors)
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)

    assert_same_weights(from_hf(copy(tensors=remove_prefix)), from_hf(folder))


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_old_mask_buffers_and_a_second_head_are_left_out(folder, copy, prefix):
    def as_old_versions_wrote(tensors):
        for name in list(tensors):
            tensors[prefix + name.removeprefix("transformer.")] = tensors.pop(name)
        for layer in range(2):
            mask = torch.ones(32, 32, dtype=torch.uint8).tril().view(1, 1, 32, 32)
            tensors[f"{prefix}h.{layer}.attn.bias"] = mask
            tensors[f"{prefix}h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
        tensors["lm_head.weight"] = tensors[f"{prefix}wte.weight"].clone()

    assert_same_weights(from_hf(copy(tensors=as_old_versions_wrote)), from_hf(folder))


def test_bf16_files_load_as_fp32(folder, copy):
    def to_bf16(tensors):
        for name in tensors:
            tensors[name] = tensors[name].bfloat16()

    loaded = from_hf(copy(tensors=to_bf16))
    for name, parameter in from_hf(folder).named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter.bfloat16().float())


# --- Other files that hold weights ---------------------------------------------------------------


def in_shards(folder, into, files=3):
    """The directory's weights in so many files with an index; returns the weight_map."""
    weights = load_file(folder / "model.safetensors")
    places = {}
    for number in range(files):
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        part = {key: weights[key] for key in sorted(weights)[number::files]}
        save_file(part, into / name)
        places |= dict.fromkeys(part, name)
    shutil.copy(folder / "config.json", into)
    index(into, places)
    return places


def index(folder, places):
    content = json.dumps({"metadata": {"total_size": 1}, "weight_map": places})
    (folder / "model.safetensors.index.json").write_text(content)


def test_weights_in_shards(folder, tmp_path):
    in_shards(folder, tmp_path)
    assert_same_weights(from_hf(tmp_path), from_hf(folder))


def test_shards_that_transformers_wrote(transformers, theirs, folder, tmp_path):
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    assert not (tmp_path / "model.safetensors").exists()
    assert_same_weights(from_hf(tmp_path), from_hf(folder))


BAD_MAPS = {
    "none": (lambda places: None, "has no weight_map"),
    "a list": (list, "has no weight_map"),
    "numbers": (lambda places: dict.fromkeys(places, 1), "has no weight_map"),
    "above": (
        lambda places: places | {"x": "../model.safetensors"},
        r"names '\.\./model\.safetensors', which is no safetensors file beside it",
    ),
    "anywhere": (lambda places: places | {"x": "/etc/passwd"}, "which is no safetensors file"),
    "a pickle": (lambda places: places | {"x": "pytorch_model.bin"}, "which is no safetensors"),
    "gone": (lambda places: places | {"x": "model-9.safetensors"}, "model-9.safetensors: is miss"),
    "more than there is": (
        lambda places: places | {"x": min(places.values())},
        "x is in none of its files",
    ),
    "a second time": (
        lambda places: places | {"x": "again.safetensors"},
        "is in two of its files",
    ),
    "nothing": (lambda places: {}, "is missing"),
}


@pytest.mark.parametrize("what", BAD_MAPS)
def test_an_index_that_is_none(folder, tmp_path, what):
    change, message = BAD_MAPS[what]
    places = in_shards(folder, tmp_path)
    shutil.copy(tmp_path / min(places.values()), tmp_path / "again.safetensors")
    index(tmp_path, change(places))
    assert_refused(tmp_path, message)


def as_bin(folder, into, weights=None, **options):
    """The directory with a pytorch_model.bin instead of safetensors."""
    weights = weights or load_file(folder / "model.safetensors")
    shutil.copy(folder / "config.json", into)
    torch.save(weights, into / "pytorch_model.bin", **options)
    return into


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "as before torch 1.6"])
@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_an_old_file_of_weights(folder, tmp_path, is_zip, prefix):
    """Also with the masks and the second head that such files have."""
    weights = {
        prefix + name.removeprefix("transformer."): value
        for name, value in load_file(folder / "model.safetensors").items()
    }
    for layer in range(2):
        mask = torch.ones(32, 32, dtype=torch.bool if layer else torch.uint8).tril()
        weights[f"{prefix}h.{layer}.attn.bias"] = mask.view(1, 1, 32, 32)
        weights[f"{prefix}h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    weights["lm_head.weight"] = weights[f"{prefix}wte.weight"]  # one storage, as torch saves it
    as_bin(folder, tmp_path, weights, _use_new_zipfile_serialization=is_zip)
    assert_same_weights(from_hf(tmp_path), from_hf(folder))


def test_parameters_and_half_precision_in_an_old_file(folder, tmp_path):
    weights = {
        name: torch.nn.Parameter(value.half())
        for name, value in load_file(folder / "model.safetensors").items()
    }
    loaded = from_hf(as_bin(folder, tmp_path, weights))
    for name, parameter in from_hf(folder).named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter.half().float())


def test_safetensors_are_taken_where_there_are_both(folder, copy):
    place = copy()
    (place / "pytorch_model.bin").write_bytes(b"not even looked at")
    assert_same_weights(from_hf(place), from_hf(folder))


def huge(rows=10**6, columns=10**6):
    """A shape of terabytes on a storage of four bytes."""
    return torch.zeros(1).expand(rows, columns)


NOT_WEIGHTS = {
    "a list": ([torch.zeros(1)], "holds no weights by name"),
    "nested": ({"model": {"a": torch.zeros(1)}}, "under 'model' is no plain tensor"),
    "a number": ({"a": 1}, "under 'a' is no plain tensor"),
    "a number's name": ({1: torch.zeros(1)}, "under 1 is no plain tensor"),
    "integers": ({"a": torch.zeros(1, dtype=torch.int64)}, "under 'a' is no plain tensor"),
    "complex": ({"a": torch.zeros(1, dtype=torch.complex64)}, "under 'a' is no plain tensor"),
    "sparse": ({"a": torch.eye(3).to_sparse()}, "under 'a' is no plain tensor"),
    "on no device": ({"a": torch.zeros(1, device="meta")}, "under 'a' is no plain tensor"),
    "huge": ({"a": huge()}, "under 'a' is no plain tensor"),
    "overlapping": ({"a": torch.arange(5.0).as_strided((3, 3), (1, 1))}, "under 'a' is no plain"),
}


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "old"])
@pytest.mark.parametrize("what", NOT_WEIGHTS)
def test_what_else_an_old_file_may_hold(folder, tmp_path, what, is_zip):
    values, message = NOT_WEIGHTS[what]
    torch.save(values, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip)
    shutil.copy(folder / "config.json", tmp_path)
    assert_refused(tmp_path, message)


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "old"])
@pytest.mark.parametrize("left", [0, 2, 100, 5000, -100])
def test_an_old_file_cut_short(folder, tmp_path, left, is_zip):
    place = as_bin(folder, tmp_path, _use_new_zipfile_serialization=is_zip)
    file = place / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:left])
    assert_refused(place, r"pytorch_model\.bin: is (unreadable|a pickle)")


def test_a_storage_that_claims_more_than_the_file_has(folder, tmp_path):
    """The shape of a tensor is data like any other: a thousand times as many rows."""
    torch.save({"a": torch.zeros(40, 3)}, tmp_path / "pytorch_model.bin")
    shutil.copy(folder / "config.json", tmp_path)
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(file.read_bytes())
    packed = zipfile.ZipFile(file)
    parts = {name: packed.read(name) for name in packed.namelist()}
    (name,) = [name for name in parts if name.endswith("data.pkl")]
    assert parts[name].count(b"K(K\x03\x86") == 1  # the tuple (40, 3)
    parts[name] = parts[name].replace(b"K(K\x03\x86", b"M\xff\xffK\x03\x86")
    with zipfile.ZipFile(file, "w") as changed:
        for name, content in parts.items():
            changed.writestr(name, content)
    assert_refused(tmp_path, r"pytorch_model\.bin: ")


# --- Sizes ---------------------------------------------------------------------------------------

# What config.json says of the four published models: (n_layer, n_head, n_embd); all have
# n_positions = n_ctx = 1024 and vocab_size = 50257 (https://huggingface.co/openai-community).
PUBLISHED = {
    "gpt2-small": (12, 12, 768, 124_439_808),
    "gpt2-medium": (24, 16, 1024, 354_823_168),
    "gpt2-large": (36, 20, 1280, 774_030_080),
    "gpt2-xl": (48, 25, 1600, 1_557_611_200),
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_have_the_published_shapes(transformers, preset):
    """Every tensor of transformers' model of that size, by name and shape; no memory is taken."""
    layers, heads, width, parameters = PUBLISHED[preset]
    settings = compose([f"model={preset}"]).model
    with torch.device("meta"):
        ours = GPT(settings)
        shape = transformers.GPT2Config(n_layer=layers, n_head=heads, n_embd=width)
        theirs = transformers.GPT2LMHeadModel(shape)
    assert (shape.vocab_size, shape.n_positions) == (50257, 1024)
    assert settings.num_heads == heads
    assert ours.num_parameters() == parameters == theirs.num_parameters()
    wanted = {name: value.shape for name, value in theirs.named_parameters()}
    assert {name: value.shape for name, value in hf_tensors(ours, "meta").items()} == wanted
    assert preset_like(settings) == preset
    assert preset_like(dataclasses.replace(settings, context_length=64)) == preset
    assert preset_like(dataclasses.replace(settings, num_layers=5)) is None


# --- From ours to theirs -------------------------------------------------------------------------


@pytest.mark.parametrize("qkv_bias", [True, False])
def test_transformers_loads_what_we_write(transformers, tmp_path, qkv_bias):
    ours = our_model(qkv_bias=qkv_bias)
    to_hf(ours, tmp_path / "new" / "folder")
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "new" / "folder", attn_implementation="eager", output_loading_info=True
    )
    assert type(theirs).__name__ == "GPT2LMHeadModel"
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        expected, _ = ours(random_ids())
        logits = theirs.eval()(random_ids()).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_there_and_back_is_bitwise_the_same(tmp_path):
    ours = our_model(dropout=0.1)
    to_hf(ours, tmp_path)
    back = from_hf(tmp_path)
    assert back.config == ours.config
    assert_same_weights(back, ours)


def test_there_and_back_from_theirs(theirs, folder, tmp_path):
    to_hf(from_hf(folder), tmp_path)
    before = load_file(folder / "model.safetensors")
    after = load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_without_biases_the_same_function_comes_back(tmp_path):
    ours = our_model(qkv_bias=False)
    to_hf(ours, tmp_path)
    back = from_hf(tmp_path)
    assert back.blocks[0].attn.W_query.bias.count_nonzero() == 0
    torch.testing.assert_close(back(random_ids())[0], ours(random_ids())[0])


# --- What reads and writes text ------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_bytes(tmp_path_factory):
    """A Hugging Face directory of a model over bytes."""
    folder = tmp_path_factory.mktemp("bytes")
    to_hf(our_model(vocab_size=257, num_layers=1), folder)
    return folder


def with_key(folder, tmp_path, value):
    """A copy of the directory, whose config.json has our key."""
    shutil.copytree(folder, tmp_path / "copy")
    file = tmp_path / "copy" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"clearhead": value}))
    return tmp_path / "copy"


def test_weights_alone_have_the_usual_tokenizer_and_all_positions(of_bytes):
    reader = load_reader(of_bytes)
    assert (reader.tokenizer_name, reader.window, reader.state) == ("byte", 32, None)
    assert reader.tokenizer.n_vocab == 257
    assert_same_weights(reader.model, from_hf(of_bytes))


def test_an_export_names_its_tokenizer_and_window(of_bytes, tmp_path):
    reader = load_reader(with_key(of_bytes, tmp_path, {"tokenizer": "byte", "window": 20}))
    assert (reader.tokenizer_name, reader.window) == ("byte", 20)


@pytest.mark.parametrize(
    "value",
    [
        *({"tokenizer": "gpt3", "window": 20}, {"tokenizer": ["byte"], "window": 20}),
        *({"tokenizer": "byte", "window": w} for w in (0, 33, -1, "20", True, 2.0, None)),
        *({}, [], "byte", None, 1),
    ],
    ids=repr,
)
def test_what_an_export_names_is_checked(of_bytes, tmp_path, value):
    folder = with_key(of_bytes, tmp_path, value)
    with pytest.raises(CheckpointError, match=r"its config\.json names") as caught:
        load_reader(folder, "trainer.init_from")
    assert str(caught.value).startswith(f"trainer.init_from={folder}: ")


def test_fewer_ids_than_the_tokenizer_has(folder):
    with pytest.raises(CheckpointError, match="has 61 token ids, and the gpt2 tokenizer 50257; "):
        load_reader(folder)


# --- What cannot be loaded -----------------------------------------------------------------------


def assert_refused(folder, message):
    """One line that names the file, the cause and the way out."""
    with pytest.raises(CheckpointError, match=message) as caught:
        from_hf(folder)
    text = str(caught.value)
    assert text.startswith(f"checkpoint={folder}")
    assert "; " in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("activation_function", "gelu"),
        ("activation_function", "relu"),
        ("model_type", "gpt_neo"),
        ("layer_norm_epsilon", 1e-6),
        ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True),
        ("tie_word_embeddings", False),
        ("n_inner", 50),
    ],
)
def test_models_that_compute_something_else_are_refused(copy, key, value):
    assert_refused(copy({key: value}), f"{key} is ")


def test_missing_tensor(copy):
    folder = copy(tensors=lambda tensors: tensors.pop("transformer.h.1.ln_2.bias"))
    assert_refused(folder, r"h\.1\.ln_2\.bias is missing")


def test_extra_tensor(copy):
    def add(tensors):
        tensors["transformer.h.1.attn.rotary"] = torch.zeros(2)

    assert_refused(copy(tensors=add), r"unknown tensor h\.1\.attn\.rotary")


def test_more_layers_than_the_configuration_says(copy):
    assert_refused(copy({"n_layer": 1}), r"unknown tensor h\.1\.")
    assert_refused(copy({"n_layer": 3}), r"h\.2\..* is missing")


def test_wrong_shape(copy):
    assert_refused(copy({"n_positions": 64}), r"pos_emb.weight has shape \(32, 24\).*\(64, 24\)")

    def untransposed(tensors):
        name = "transformer.h.0.attn.c_attn.weight"
        tensors[name] = tensors[name].T.contiguous()

    assert_refused(copy(tensors=untransposed), "W_query.weight has shape")


@pytest.mark.parametrize("left", [0, 5, 1000, -100])
def test_truncated_file(copy, left):
    folder = copy()
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    assert_refused(folder, "unreadable")


def test_missing_files(copy):
    folder = copy()
    (folder / "model.safetensors").unlink()
    assert_refused(folder, "model.safetensors: is missing")
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        load_any(folder)
    assert_refused(folder, "config.json: unreadable")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"model_type": "gpt2"}', '{"n_inner": 96}', '{"n_embd": "24"}']
)
def test_broken_configuration(copy, text):
    folder = copy()
    (folder / "config.json").write_text(text, encoding="utf-8")
    assert_refused(folder, "config.json: ")


@pytest.mark.parametrize("key", ["vocab_size", "n_positions", "n_embd", "n_head", "n_layer"])
@pytest.mark.parametrize("value", [0, -1, "12", None, 12.0, True, math.nan])
def test_sizes_that_are_none(copy, key, value):
    assert_refused(copy({key: value}), "config.json: ")
