"""What works with packages that neither training nor the tests need: `make extras` installs them in
an environment of their own. Without one of them its tests are left out.

    python -m pytest tests/campaign/extras.py
"""

import json

import pytest
from helpers import TINY

import train


@pytest.fixture
def optuna():
    return pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")


SEARCH = (
    "-m",
    *TINY,
    "hydra/sweeper=optuna",
    "hydra/sweeper/sampler=random",
    "hydra.sweeper.sampler.seed=3",
    "trainer.max_skips=1",
)


def search(in_process, folder, *arguments):
    """(exit code, out, err, the results, what Optuna has found) of a sweep that searches."""
    code, out, err = in_process(train.main, folder, *SEARCH, "data.path=text.txt", *arguments)
    (path,) = (folder / "multirun").iterdir()
    assert (path / "results.json").is_file(), err
    found = json.loads((path / "results.json").read_text())
    return code, out, err, found, (path / "optimization_results.yaml").read_text()


def test_optuna_draws_from_an_interval_and_is_told_the_best_loss(
    optuna, in_process, tmp_path, text_file
):
    code, out, err, found, said = search(
        in_process,
        tmp_path,
        "hydra.sweeper.n_trials=3",
        "optimizer.lr=tag(log, interval(1e-4,1e-1))",
        "trainer.warmup_steps=choice(1,2)",
    )
    assert code == 0, err
    assert "job 3 of 3: optimizer.lr=" in out
    losses = {}
    for row in found["rows"]:
        assert 1e-4 <= row["settings"]["optimizer.lr"] <= 1e-1
        assert row["settings"]["trainer.warmup_steps"] in (1, 2)
        for curve in row["curves"]:
            losses[min(loss for _, loss in curve)] = row["settings"]["optimizer.lr"]
    assert len(losses) == 3
    assert f"best_value: {min(losses)}" in said
    assert f"optimizer.lr: {losses[min(losses)]}" in said


def test_a_trial_that_fails_does_not_end_the_search(
    optuna, in_process, tmp_path, text_file, monkeypatch
):
    real, begun = train.Trainer.train, []

    def trains(trainer):
        begun.append(trainer.settings.optimizer.lr)
        if len(begun) % 2:
            raise RuntimeError("broken")
        real(trainer)

    monkeypatch.setattr(train.Trainer, "train", trains)
    code, _, err, found, said = search(
        in_process, tmp_path, "hydra.sweeper.n_trials=3", "optimizer.lr=interval(1e-3,1e-2)"
    )
    assert code == 4
    assert [job["exit_code"] for job in found["jobs"]] == [4, 0, 4]
    assert f"optimizer.lr: {begun[1]}" in said
    assert "2 of 3 jobs failed:\n" in err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["optimizer.lr=interval(-1,1e-2)"], "optimizer.lr=-1"),
        (["seed=1,2", "hydra.sweeper.n_trials=many"], "hydra.sweeper.n_trials=many: "),
        (["seed=1,2", "hydra.sweeper.direction=up"], "hydra.*direction"),
        (["seed=1,2", "hydra/sweeper/sampler=best"], "hydra/sweeper/sampler=best: no such"),
    ],
)
def test_what_cannot_be_searched_is_refused(
    optuna, in_process, tmp_path, text_file, arguments, line
):
    code, out, err = in_process(
        train.main, tmp_path, "-m", *TINY, "data.path=text.txt", "hydra/sweeper=optuna", *arguments
    )
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert not (tmp_path / "runs").exists()


def test_ranks_do_not_search(optuna, in_process, tmp_path, text_file, monkeypatch):
    for key, value in {"WORLD_SIZE": 2, "RANK": 0, "MASTER_ADDR": "here", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(key, str(value))
    code, _, err = in_process(train.main, tmp_path, *SEARCH, "data.path=text.txt", "seed=1,2")
    assert code == 2
    assert err.startswith("hydra/sweeper=optuna: each of the 2 ranks would draw values of its own")
