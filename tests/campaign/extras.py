"""Tests with packages that neither training nor other tests need. `make extras` installs them in a
separate environment. Tests whose package is missing are skipped.

    python -m pytest tests/campaign/extras.py
"""

import json

import pytest
from helpers import TINY

import train

pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
OPTUNA = ["-m", *TINY, "data.path=text.txt", "hydra/sweeper=optuna"]
SEARCH = [*OPTUNA, "hydra/sweeper/sampler=random", "hydra.sweeper.sampler.seed=3"]
SEARCH += ["hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1"]


def search(in_process, folder, *arguments):
    """Runs a sweep with Optuna. Returns (exit code, results.json, results of Optuna)."""
    code, _, err = in_process(train.main, folder, *SEARCH, *arguments)
    (path,) = (folder / "runs" / "multirun").iterdir()
    assert (path / "results.json").is_file(), err
    found = json.loads((path / "results.json").read_text())
    return code, found, (path / "optimization_results.yaml").read_text()


def test_optuna_samples_from_an_interval_and_receives_the_loss_at_the_end(
    in_process, tmp_path, text_file
):
    varied = ["optimizer.lr=tag(log, interval(1e-4,1e-1))", "trainer.warmup_steps=choice(1,2)"]
    code, found, said = search(in_process, tmp_path, *varied)
    assert code == 0
    losses = {}
    for row in found["rows"]:
        assert 1e-4 <= row["settings"]["optimizer.lr"] <= 1e-1
        assert row["settings"].get("trainer.warmup_steps", 1) in (1, 2)
        for loss in row["values"]:
            losses[loss] = row["settings"]["optimizer.lr"]
    assert len(losses) == 3
    assert f"best_value: {min(losses)}" in said
    assert f"optimizer.lr: {losses[min(losses)]}" in said


def test_a_trial_that_fails_does_not_end_the_search(in_process, tmp_path, text_file, monkeypatch):
    real, begun = train.fit, []

    def fit(run):
        begun.append(run.config.optimizer.lr)
        if len(begun) % 2:
            raise RuntimeError("broken")
        real(run)

    monkeypatch.setattr(train, "fit", fit)
    code, found, said = search(in_process, tmp_path, "optimizer.lr=interval(1e-3,1e-2)")
    assert code == 4
    assert [job["exit_code"] for job in found["jobs"]] == [4, 0, 4]
    assert f"optimizer.lr: {begun[1]}" in said
