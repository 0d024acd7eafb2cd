"""scripts/benchmark_generate: it refuses to time what differs, and its figures add up."""

import json

import pytest
import torch

from scripts import benchmark_generate
from training import device

SMALL = ["model=gpt2-nano", "batch_sizes=[1,2]", "prompt_tokens=5", "num_tokens=4", "rounds=2"]


@pytest.fixture
def run(in_process, tmp_path, monkeypatch):
    monkeypatch.setattr(device, "best_dtype", lambda _: torch.bfloat16)
    return lambda *arguments: in_process(
        benchmark_generate.main, tmp_path, *SMALL, "device=cpu", *arguments
    )


def test_a_table_for_each_size(run, tmp_path):
    code, out, err = run("out=figures.json")
    assert (code, err) == (0, "")
    assert out.startswith("1 text at once, 4 tokens after 5 each\n")
    results = json.loads((tmp_path / "figures.json").read_text())
    assert list(results["tables"]) == ["1", "2"]
    for texts, table in results["tables"].items():
        kinds = [
            f"{who}, {how}" for how in ("fp32", "bf16") for who in ("transformers", "clearhead")
        ]
        assert [row["name"] for row in table] == kinds
        for row in table:
            assert len(row["seconds"]) == 2
            a, b = (int(texts) * 4 / seconds for seconds in row["seconds"])
            assert row["tokens_per_second"] == pytest.approx((a + b) / 2)
            pairs = zip(table[0]["seconds"], row["seconds"], strict=True)
            assert row["ratio"] == pytest.approx(sum(x / y for x, y in pairs) / 2)
            assert f"{row['name']:<22}{row['tokens_per_second']:>10.1f}" in out


def test_what_differs_is_not_timed(run, monkeypatch, tmp_path):
    def wrong(*_):
        return lambda prompts: [[0] * 4 for _ in prompts]

    monkeypatch.setattr(benchmark_generate, "of_ours", wrong)
    code, out, err = run("out=figures.json")
    assert (code, out) == (4, "")
    assert err == "generation: ours and transformers' fp32 tokens differ; no figure\n"
    assert not (tmp_path / "figures.json").exists()


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("num_tokens=252", "num_tokens=252: with prompt_tokens=5 the text has 257 tokens"),
        ("num_tokens=0", "num_tokens=0: must be at least 1"),
        ("batch_sizes=[]", "batch_sizes=[]: must be at least 1"),
        ("model=gpt3", "model=gpt3: no such model"),
        (
            "out=nowhere/figures.json",
            "out=nowhere/figures.json: is no file in a folder that exists",
        ),
    ],
)
def test_what_does_not_fit_is_refused(run, argument, says):
    code, out, err = run(argument)
    assert (code, out) == (2, "")
    assert err.startswith(says)


def test_figures_that_cannot_be_kept_were_told(run, monkeypatch):
    """A disk that is full after minutes of measuring."""
    import durable

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable, "write_whole", full)
    code, out, err = run("out=figures.json", "batch_sizes=[1]", "rounds=1")
    assert code == 2
    assert out.startswith("1 text at once")
    assert err == "out=figures.json: No space left on device; write it elsewhere\n"
