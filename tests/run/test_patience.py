"""trainer.patience: a run ends when its validation loss does not become lower any more."""

import pytest
from helpers.ranks import check_same_bytes

import scripts.compare
from train import fit

LOSSES = {0: 5.0, 2: 3.0, 4: 2.0, 6: 2.5, 8: 2.4}
OVERFITTED = ("trainer.max_steps=20", "trainer.eval_every=2", "optimizer.schedule=cosine")


@pytest.fixture
def overfit(make_run):
    """Returns a function that trains a run whose validation loss is lowest at step 4."""

    def train(*arguments, losses=LOSSES, rest=2.6):
        run = make_run(*OVERFITTED, *arguments)
        run.evaluator.validate = lambda _, step, *__: {"val/loss": losses.get(step, rest)}
        return run, fit(run)

    return train


@pytest.mark.parametrize(("patience", "steps"), [(1, 7), (2, 9), (8, 20), ("null", 20)])
def test_the_run_ends_after_patience_validations_without_a_lower_loss(
    overfit, tmp_path, patience, steps
):
    run, summary = overfit("name=early", f"trainer.patience={patience}")
    folder = tmp_path / "runs" / "early"
    assert (summary["steps"], run.state.best_step) == (steps, 4)
    assert (folder / "checkpoints" / "best").resolve().name == "step_00000004"
    assert (folder / "checkpoints" / "last").resolve().name == f"step_{steps:08}"


def test_the_same_command_does_not_train_a_run_that_has_ended_early(overfit, tmp_path):
    overfit("name=early", "trainer.patience=1")
    folder = tmp_path / "runs" / "early"
    for more in ((), ("trainer.max_steps=30",)):
        run, _ = overfit("name=early", "trainer.patience=1", *more)
        assert (run.was_finished, run.state.step) == (True, 7)
    run, _ = overfit("name=early", "trainer.patience=2")
    assert run.state.step == 9
    run, _ = overfit("name=early", "trainer.patience=null")
    assert run.state.step == 20
    # As if it had never ended early.
    overfit("name=plain")
    check_same_bytes(folder, tmp_path / "runs" / "plain")


@pytest.mark.parametrize("last_loss", [2.6, 1.9])  # of the validation after the last step
def test_a_run_that_was_killed_after_it_ended_early_has_no_step_left(overfit, tmp_path, last_loss):
    early = ("name=early", "trainer.patience=1")
    overfit(*early, losses=LOSSES | {7: last_loss})
    for _ in range(2):
        (tmp_path / "runs" / "early" / "summary.json").unlink()
        run, summary = overfit(*early, losses=LOSSES | {7: last_loss})
        assert (summary["steps"], run.was_finished) == (7, False)
    assert overfit(*early)[0].was_finished


def test_a_resumed_run_counts_its_own_validations(overfit):
    losses = {0: 5.0, 8: 2.0, 10: 2.1, 11: 1.9, 12: 1.8, 13: 1.95, 14: 1.96}
    overfit("name=run", "trainer.max_steps=10", "trainer.eval_every=8", losses=losses)
    run, _ = overfit("name=run", "trainer.eval_every=1", "trainer.patience=2", losses=losses)
    assert run.state.step == 15  # validations 13 and 14 are not lower than 12


def test_a_sweep_minimises_the_lowest_loss(overfit):
    assert overfit("trainer.patience=1")[0].objective() == 2.0
    assert overfit("trainer.patience=null")[0].objective() == 2.6


@pytest.mark.parametrize(("windows", "steps"), [(8, 20), (50 * 8 + 1, 51)])
def test_validations_are_at_most_one_epoch_apart(make_run, tmp_path, windows, steps):
    (tmp_path / "long.txt").write_text("abcdefgh" * (windows * 32 // 8) + "a")
    data = (f"data.path={tmp_path / 'long.txt'}", f"data.val_path={tmp_path / 'long.txt'}")
    longer = (*data, "trainer.max_steps=2000", "trainer.eval_every=null", "name=run")
    run = make_run(*longer, "trainer.patience=3")
    assert run.config.trainer.eval_every == steps
    assert make_run(*longer, "name=plain").config.trainer.eval_every == 200
    given = make_run(*longer, "trainer.patience=3", "trainer.eval_every=77", "name=given")
    assert given.config.trainer.eval_every == 77


@pytest.mark.parametrize(("rest", "has_risen"), [(2.6, True), (2.01, False)])
def test_the_best_weights_are_shown_and_used_if_the_loss_has_risen(
    overfit, in_process, tmp_path, capsys, rest, has_risen
):
    """In the printed command that generates text, and in the table of runs."""
    _, summary = overfit("name=run", rest=rest)
    assert (summary["best_val_loss"], summary["best_step"]) == (2.0, 4)
    commands = [line for line in capsys.readouterr().out.splitlines() if "checkpoint=" in line]
    assert ("checkpoints/best" in commands[-1]) == has_risen
    code, out, _ = in_process(scripts.compare.main, tmp_path)
    assert (code, f"{rest:.4f}" in out, "2.0000" in out) == (0, True, has_risen)
