"""models/foreign.py: models of any architecture, without pickle and without code of others; the
checkpoints of a training in the order of their steps."""

import json
import sys

import pytest
import torch
from helpers.foreign import byte_level_tokenizer, foreign_model, sentencepiece_tokenizer
from helpers.refusals import refused

from clearhead.errors import CheckpointError
from clearhead.models.foreign import load_any, series, series_name


@pytest.fixture
def folder(tmp_path):
    """A folder with a model of Llama and its tokenizer."""
    foreign_model("llama", vocab_size=400).save_pretrained(tmp_path / "llama")
    sentencepiece_tokenizer().save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_and_its_tokenizer(folder, dtype):
    """In one file, and in half precision and in shards; always fp32 in memory."""
    expected = foreign_model("llama", vocab_size=400).to(dtype)
    if dtype == torch.bfloat16:
        (folder / "model.safetensors").unlink()
        expected.save_pretrained(folder, max_shard_size="20KB")
        assert len([*folder.glob("model-*")]) > 1
    loaded = load_any(str(folder))
    assert not loaded.model.training
    for ours, theirs in zip(loaded.model.parameters(), expected.parameters(), strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs.float())
    assert loaded.tokenizer("The fox").input_ids == sentencepiece_tokenizer()("The fox").input_ids
    assert (loaded.window, loaded.state, loaded.folder) == (64, None, folder)


@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention", "unknown"])
def test_the_attention_of_a_config_is_not_used(folder, name):
    expected = load_any(str(folder)).model.config._attn_implementation
    content = json.loads((folder / "config.json").read_text())
    keys = ("attn_implementation", "_attn_implementation")
    (folder / "config.json").write_text(json.dumps(content | dict.fromkeys(keys, name)))
    assert load_any(str(folder)).model.config._attn_implementation == expected


def test_a_gpt2_that_model_py_does_not_compute_is_loaded_through_transformers(tmp_path):
    model = foreign_model("gpt2", vocab_size=320, activation_function="relu")
    model.save_pretrained(tmp_path)
    with refused(CheckpointError, "tokenizer"):  # transformers makes an empty one
        load_any(str(tmp_path))
    byte_level_tokenizer().save_pretrained(tmp_path)
    assert type(load_any(str(tmp_path)).model) is type(model)


def test_without_transformers_the_error_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with refused(CheckpointError, "compare", str(folder)) as caught:
        load_any(str(folder), "compare")
    assert "transformers" in caught.value.hint


def test_a_tokenizer_from_another_folder(folder, tmp_path):
    byte_level_tokenizer().save_pretrained(tmp_path / "other")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with refused(CheckpointError, "tokenizer"):
        load_any(str(folder))
    loaded = load_any(str(folder), tokenizer=str(tmp_path / "other"))
    assert loaded.tokenizer("The fox").input_ids == byte_level_tokenizer()("The fox").input_ids
    with refused(CheckpointError, "tokenizer", str(tmp_path)):
        load_any(str(folder), tokenizer=str(tmp_path))


def test_a_tokenizer_that_does_not_know_the_bytes_of_its_tokens_is_refused(folder, tmp_path):
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "vocab.json").write_text('{"a</w>": 0, "<unk>": 1}')
    (slow / "merges.txt").write_text("#version: 0.2\n")
    (slow / "tokenizer_config.json").write_text('{"tokenizer_class": "CTRLTokenizer"}')
    with refused(CheckpointError, "tokenizer", str(slow)) as caught:
        load_any(str(folder), tokenizer=str(slow))
    assert "CTRLTokenizer" in str(caught.value)


# A pickle file that calls pytest.fail("unpickled") when it is loaded.
EVIL = b"cpytest\nfail\n(Vunpickled\ntR."


def test_nothing_is_unpickled_or_executed(folder):
    (folder / "pytorch_model.bin").write_bytes(EVIL)
    load_any(str(folder))  # it has model.safetensors
    (folder / "model.safetensors").unlink()
    with refused(CheckpointError, "checkpoint", str(folder)):
        load_any(str(folder))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "code.Mine"}}
    config["auto_map"]["AutoConfig"] = "code.Config"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text("import pytest\npytest.fail('executed')\n")
    with refused(CheckpointError, "checkpoint", str(folder)):
        load_any(str(folder))


def test_missing_weights_damaged_files_and_adapters_are_refused(folder):
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file)
    for change in ("missing", "damaged", "adapter"):
        if change == "missing":
            kept = {name: value for name, value in tensors.items() if "q_proj" not in name}
            save_file(kept, file, {"format": "pt"})
        elif change == "damaged":
            file.write_bytes(file.read_bytes()[:1000])
        else:
            save_file(tensors, file, {"format": "pt"})
            (folder / "adapter_config.json").write_text("{}")
        with refused(CheckpointError, "checkpoint", str(folder)) as caught:
            load_any(str(folder))
        assert "\n" not in str(caught.value)


def make(folder, step=None):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    if step is not None:
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))


def test_checkpoints_are_sorted_by_step(tmp_path):
    out = tmp_path / "out"
    for name in ("checkpoint-1000", "checkpoint-20", "checkpoint-300"):
        make(out / name)
    make(out / "checkpoint-best", step=250)
    (out / "checkpoint-999").mkdir()  # empty
    found = series(f"{out}/checkpoint-*")
    assert [step for step, _ in found] == [20, 250, 300, 1000]
    assert found[1][1] == str(out / "checkpoint-best")
    olmo = ["hub:some/model@step20-tokens4B", "hub:some/model@stage1-step10-tokens5B"]
    found = series(f"{olmo[0]},{olmo[1].partition('@')[2]}")
    assert found == [(10, olmo[1]), (20, olmo[0])]
    assert series_name(f"{out}/checkpoint-*") == "out"
    assert series_name("runs/first/checkpoints/step_*") == "first"
    assert series_name("hub:some/model@step*") == "hub:some/model"


def test_folders_without_a_step_and_no_folders_are_refused(tmp_path):
    with refused(CheckpointError, "checkpoints"):
        series(f"{tmp_path}/checkpoint-*")
    make(tmp_path / "final")
    with refused(CheckpointError, "checkpoints"):
        series(f"{tmp_path}/fin*")
    make(tmp_path / "checkpoint-3", step="many")
    with refused(CheckpointError, "checkpoints"):
        series(f"{tmp_path}/checkpoint-*")
