"""Exported models in other programs: TransformerLens, and llama.cpp in the package xllamacpp. Tests
whose package is missing are skipped.

    python -m pytest tests/campaign/exported.py
"""

import itertools
import json
import re
import urllib.request

import pytest
import torch
from helpers import REPOSITORY
from helpers.models import generated_ids
from helpers.runs import models_to_export, run_command
from helpers.texts import FRAGMENTS

from clearhead.models.pretrained import load_pretrained
from scripts import export_gguf, export_hf

SOURCES = ["gpt2", "bytes", "runs/bpe"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return models_to_export(tmp_path_factory.mktemp("exported"))


@pytest.mark.parametrize("source", SOURCES)
def test_llama_cpp(home, tmp_path, source):
    """The ids of a text and the greedy tokens are equal, until the trained positions are full."""
    xllamacpp = pytest.importorskip("xllamacpp")
    out = tmp_path / "model.gguf"
    assert run_command(export_gguf.main, home, f"checkpoint={source}", f"out={out}")[0] == 0
    parameters = xllamacpp.CommonParams()
    parameters.model.path, parameters.n_parallel = str(out), 1
    server = xllamacpp.Server(parameters)

    def until_end(ids):
        return list(itertools.takewhile(lambda token: token != ours.tokenizer.eot_token, ids))

    def post(path, **content):
        headers = {"Content-Type": "application/json"}
        data = json.dumps(content).encode()
        request = urllib.request.Request(server.listening_address + path, data, headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)

    ours = load_pretrained(home / source)
    for text in [*FRAGMENTS, "".join(FRAGMENTS), "The quick fox", "a<|endoftext|>b"]:
        ids = ours.tokenizer.encode(text, allowed_special="all")
        options = {"add_special": True, "parse_special": True}
        assert post("/tokenize", content=text, **options)["tokens"] == ids, text
    for prompt in ("The", "Li", "<|endoftext|>"):
        ids = ours.tokenizer.encode(prompt, allowed_special="all")
        new = ours.window - len(ids)
        options = {"n_predict": new, "temperature": 0, "return_tokens": True}
        found = post("/completion", prompt=prompt, **options)["tokens"]
        (expected,) = generated_ids(ours.model, [ids], new)
        assert until_end(found) == until_end(expected)


@pytest.mark.parametrize("source", SOURCES)
def test_transformer_lens(home, tmp_path, source):
    """The example of docs/checkpoints.md."""
    pytest.importorskip("transformer_lens")
    folder = tmp_path / "my-model"
    assert run_command(export_hf.main, home, f"checkpoint={source}", f"out={folder}")[0] == 0
    docs = (REPOSITORY / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", docs, re.DOTALL)
    (example,) = [block for block in blocks if "transformer_lens" in block]
    found: dict = {}
    exec(example.replace("my-model", str(folder)), found)
    ours = load_pretrained(home / source)
    ids = torch.tensor([ours.tokenizer.encode("The ferry bell")])
    with torch.no_grad():
        torch.testing.assert_close(found["logits"], ours.model(ids)[0])
    for layer, weights in enumerate(ours.model.attn_weights(ids)):
        torch.testing.assert_close(found["cache"]["pattern", layer], weights)
