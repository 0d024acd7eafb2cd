"""scripts/export_gguf.py: the file is read back. tests/campaign/exported.py runs it."""

import functools
import json
import sys

import gguf
import numpy as np
import pytest
from helpers.refusals import printed_keys
from helpers.runs import models_to_export, run_command

from clearhead.models.pretrained import load_pretrained
from scripts import export_hf
from scripts.export_gguf import main

END = "<|endoftext|>"
# folder: the name of its pattern in llama.cpp, number of ids, trained positions
SOURCES = {
    "gpt2": ("gpt-2", 50257, 48),
    "bytes": ("gpt-2", 260, 24),
    "runs/bpe": ("qwen35", 280, 32),
}
# Our module: its name in llama.cpp.
MODULES = {
    "attn_norm": "attn_norm",
    "attn.out_proj": "attn_output",
    "mlp_norm": "ffn_norm",
    "mlp.fc": "ffn_up",
    "mlp.out_proj": "ffn_down",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the models of SOURCES."""
    return models_to_export(tmp_path_factory.mktemp("gguf"))


@pytest.fixture(scope="module")
def read(home):
    """read(source) -> the GGUF file of a model. Reading GPT-2's vocabulary takes seconds."""

    @functools.cache
    def read(source):
        out = home / source / "model.gguf"
        assert run_command(main, home, f"checkpoint={source}", f"out={out}")[0] == 0
        return gguf.GGUFReader(out)

    return read


@pytest.mark.parametrize("source", SOURCES)
def test_weights_and_sizes(home, read, source):
    reader, model = read(source), load_pretrained(home / source).model
    window, weights = SOURCES[source][2], model.state_dict()
    expected = {
        "token_embd.weight": weights["token_emb.weight"],
        "position_embd.weight": weights["pos_emb.weight"][:window],
    }
    for kind in ("weight", "bias"):
        expected[f"output_norm.{kind}"] = weights[f"final_norm.{kind}"]
        for layer, (ours, theirs) in ((a, b) for a in range(2) for b in MODULES.items()):
            expected[f"blk.{layer}.{theirs}.{kind}"] = weights[f"blocks.{layer}.{ours}.{kind}"]
        for layer in range(2):
            parts = [
                weights.get(f"blocks.{layer}.attn.W_{which}.{kind}", np.zeros(model.config.emb_dim))
                for which in ("query", "key", "value")
            ]
            expected[f"blk.{layer}.attn_qkv.{kind}"] = np.concatenate(parts)
    found = {tensor.name: tensor.data for tensor in reader.tensors}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], value, name)
    sizes = ("embedding_length", "feed_forward_length", "block_count", "attention.head_count")
    c = model.config
    assert [reader.fields[f"gpt2.{key}"].contents() for key in ("context_length", *sizes)] == [
        *(window, c.emb_dim, 4 * c.emb_dim, c.num_layers, c.num_heads)
    ]
    epsilon = reader.fields["gpt2.attention.layer_norm_epsilon"].contents()
    assert epsilon == pytest.approx(model.final_norm.eps)


@pytest.mark.parametrize("source", SOURCES)
def test_tokenizer(home, read, source, tmp_path):
    reader = read(source)
    pattern, size, _ = SOURCES[source]
    out = tmp_path / "hf"
    assert run_command(export_hf.main, home, f"checkpoint={source}", f"out={out}")[0] == 0
    expected = json.loads((out / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    vocabulary, merges = expected["vocab"], expected["merges"] or [[END, END]]
    found = {
        key.removeprefix("tokenizer.ggml."): field.contents()
        for key, field in reader.fields.items()
        if key.startswith("tokenizer")
    }
    tokens, types = found.pop("tokens"), found.pop("token_type")
    assert len({*tokens}) == len(types) == size
    assert tokens[: len(vocabulary)] == sorted(vocabulary, key=vocabulary.get)
    assert types == [3 if t == END else 1 if t in vocabulary else 5 for t in tokens]
    ends = dict.fromkeys(("bos", "eos", "padding"), vocabulary[END])
    assert found == {
        "model": "gpt2",
        "pre": pattern,
        "merges": [" ".join(pair) for pair in merges],
        "add_bos_token": False,
        **{f"{name}_token_id": number for name, number in ends.items()},
    }


def test_problems_leave_no_file(in_process, home, tmp_path, monkeypatch):
    run = functools.partial(in_process, main, home)
    out = f"out={tmp_path / 'a.gguf'}"
    for code, keys, *arguments in (
        (2, ["out"], "checkpoint=bytes", f"out={tmp_path / 'a.bin'}"),
        (2, ["out"], "checkpoint=bytes", f"out={tmp_path / 'b' / 'a.gguf'}"),
        (3, ["checkpoint"], "checkpoint=nowhere", out),
    ):
        found, _, err = run(*arguments)
        assert (found, printed_keys(err)) == (code, keys), arguments

    def full(self, **_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", full)
    code, _, err = run("checkpoint=bytes", out)
    assert (code, printed_keys(err)) == (2, ["out"])
    monkeypatch.setitem(sys.modules, "gguf", None)
    code, _, err = run("checkpoint=bytes", out)
    assert (code, printed_keys(err)) == (2, ["out"])
    assert "pip install gguf" in err
    assert [*tmp_path.iterdir()] == []
