"""benchmarks/generate: only equal tokens are timed; results."""

import functools
import json

import pytest
import torch
from helpers.refusals import printed_keys

from benchmarks import generate
from clearhead.parallel import device

SMALL = "model=gpt2-nano batch_sizes=[2] prompt_tokens=[5,3] max_new_tokens=[2] rounds=2"


@pytest.fixture
def run(in_process, tmp_path, monkeypatch):
    monkeypatch.setattr(device, "best_dtype", lambda _: torch.bfloat16)
    return functools.partial(in_process, generate.main, tmp_path, *SMALL.split(), "device=cpu")


def test_a_table_for_each_combination(run, tmp_path):
    code, out, err = run("out=figures.json")
    assert (code, err) == (0, "")
    tables = json.loads((tmp_path / "figures.json").read_text())["tables"]
    sizes = [(2, 5, 2), (2, 3, 2)]
    assert [*tables] == ["{} x {} + {} tokens".format(*size) for size in sizes]
    tables = [*tables.values()]
    kinds = [f"{who}, {how}" for how in ("fp32", "bf16") for who in ("transformers", "clearhead")]
    for (texts, _, count), table in zip(sizes, tables, strict=True):
        rows = table["rows"]
        assert [row["name"] for row in rows] == kinds
        for row in rows:
            assert row["tokens_per_second"] == pytest.approx(
                texts * count * 2 / sum(row["seconds"])
            )
            of_theirs = rows[0 if "fp32" in row["name"] else 2]["seconds"]
            pairs = zip(of_theirs, row["seconds"], strict=True)
            assert row["ratio"]["median"] == pytest.approx(sum(x / y for x, y in pairs) / 2)
            assert f"{row['name']:<22}{row['tokens_per_second']:>10.1f}" in out


def test_different_tokens_are_not_timed(run, monkeypatch, tmp_path):
    """One wrong token among the last ones is found."""
    right = generate.by_clearhead

    def wrong(*arguments):
        generate_ids = right(*arguments)

        def with_another_token(*arguments):
            ids = generate_ids(*arguments)
            ids[-1][-1] += 1
            return ids

        return with_another_token

    monkeypatch.setattr(generate, "by_clearhead", wrong)
    code, out, err = run("out=figures.json")
    assert (code, out, printed_keys(err)) == (4, "", ["generation"])
    assert not (tmp_path / "figures.json").exists()
