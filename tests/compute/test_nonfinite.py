"""NaN and inf: skipped steps, the end of a run."""

import math
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
from helpers.ranks import values
from helpers.refusals import refused
from helpers.runs import assert_same, rows, train_past_checkpoint, weights

from clearhead.checkpoint import listing
from clearhead.compute.optimizers import NonFiniteCheck
from clearhead.errors import DivergedError
from train import fit, train_step

CPU = torch.device("cpu")
NAN, INF = math.nan, math.inf
Counts = namedtuple("Counts", "skipped in_a_row halted_for")  # what NonFiniteCheck.read returns


def found_inf(check, norms, scale=1.0):
    return [float(check.found_inf(torch.tensor(norm), torch.tensor(scale))) for norm in norms]


def test_nonfinite_gradients_are_skipped_and_counted():
    check = NonFiniteCheck(3, CPU)
    assert found_inf(check, [1.0, NAN, 2.0, INF, -INF, 0.0, 1e38]) == [0, 1, 0, 1, 1, 0, 0]
    assert check.read() == Counts(skipped=3, in_a_row=0, halted_for=0)
    check.restore(skipped=7, in_a_row=2)  # counting continues from a checkpoint
    found_inf(check, [NAN])
    assert check.read() == Counts(skipped=8, in_a_row=3, halted_for=1)


def test_too_many_in_a_row_halt_and_every_later_step_is_skipped():
    check = NonFiniteCheck(3, CPU)
    assert found_inf(check, [NAN, NAN, 1.0, NAN, NAN, NAN, 1.0, 1.0]) == [1, 1, 0, 1, 1, 1, 1, 1]
    # Three halted steps: the one that reached the limit and two after it.
    assert check.read() == Counts(skipped=7, in_a_row=0, halted_for=3)


def test_an_overflow_of_fp16_does_not_count_while_the_scale_can_fall():
    check = NonFiniteCheck(2, CPU)
    assert found_inf(check, [INF] * 9, scale=2.0) == [1] * 9
    assert check.read() == Counts(skipped=9, in_a_row=0, halted_for=0)
    assert found_inf(check, [INF, INF]) == [1, 1]
    assert check.read() == Counts(skipped=11, in_a_row=2, halted_for=1)


def spoil(run, steps, how=lambda loss: loss * NAN):
    """Replaces the loss of these steps (from 0) by how(loss)."""
    model = run.trained_model

    def forward(*arguments):
        logits, loss = model(*arguments)
        return logits, how(loss) if run.state.step in steps else loss

    run.trained_model = forward


LOOP = ("name=a", "trainer.max_steps=6", "trainer.eval_every=0")


@pytest.mark.parametrize(
    "how",
    [lambda loss: loss + INF, lambda loss: loss + (0 * loss).sqrt() * 0],
    ids=["the loss alone", "its gradient alone"],
)
def test_a_skipped_step_changes_nothing(make_run, how):
    run = make_run(*LOOP)
    spoil(run, {2}, how)
    for _ in range(2):
        train_step(run)
    before = weights(run)
    states = run.optimizer.state.values()
    moments = [state["exp_avg"].clone() for state in states]
    train_step(run)
    assert_same(weights(run), before)
    for state, moment in zip(states, moments, strict=True):
        assert torch.equal(state["exp_avg"], moment)
        assert float(state["step"]) == 2
    train_step(run)
    assert not torch.equal(before["token_emb.weight"], run.model.token_emb.weight)
    assert run.metrics.nonfinite.read() == Counts(skipped=1, in_a_row=0, halted_for=0)


def test_the_log_of_a_resumed_run_counts_the_steps_before_the_checkpoint(make_run):
    """This includes a skipped step."""
    settings = (*LOOP, "trainer.log_every=4")
    whole, half = make_run(*settings, "name=whole"), make_run(*settings)
    for run in (whole, half):
        spoil(run, {1, 2})
    fit(whole)
    train_past_checkpoint(half, 3)
    rest = make_run(*settings)
    assert rest.state.skipped == 2
    assert rest.metrics.nonfinite.read() == Counts(skipped=2, in_a_row=2, halted_for=0)
    fit(rest)
    assert rows(rest.directory)[-1]["train/skipped_steps"] == 2
    for key in ("train/loss", "train/tokens"):
        assert values(rest.directory, key) == values(whole.directory, key)


def test_too_many_skipped_steps_end_the_run_and_keep_the_checkpoint_before_them(make_run):
    settings = (*LOOP, "trainer.max_steps=16", "trainer.save_every=2", "trainer.keep=1")
    run = make_run(*settings)
    spoil(run, range(5, 99))
    with refused(DivergedError, "optimizer.lr", exit_code=4):
        fit(run)
    assert run.state.step - run.metrics.nonfinite.read()[0] == 5  # none of them was skipped
    assert listing.find_checkpoint(run.directory).name == "step_00000004"
    again = make_run(*settings, "optimizer.lr=1e-5")
    assert again.state.step == 4
    assert again.metrics.nonfinite.read() == Counts(skipped=0, in_a_row=0, halted_for=0)


@pytest.mark.parametrize(
    ("device", "precision", "loss", "named"),
    [
        ("cuda", "bf16", 2.0, True),
        ("cuda", "bf16", NAN, False),
        ("cuda", "fp32", 2.0, False),
        ("cpu", "bf16", 2.0, False),
    ],
)
def test_nan_gradients_of_a_finite_loss_name_cudnn(make_run, device, precision, loss, named):
    """Only where torch may use its attention: in half precision on a GPU."""
    run = make_run()
    uses = {"device": torch.device(device), "precision": precision}
    run.metrics.strategy = SimpleNamespace(all_reduce_mean=lambda losses: [loss], **uses)
    for _ in range(10):
        run.metrics.nonfinite.found_inf(torch.tensor(NAN), torch.tensor(1.0))
    with refused(DivergedError, "optimizer.lr") as caught:
        run.metrics.row(run.state, 0.1)
    assert ("TORCH_CUDNN_SDPA_DEPRIORITIZED=1" in caught.value.hint) == named


def test_fp16_overflows_halve_the_scale_and_skip_the_step(make_run):
    """Uses the loss scaler on a CPU in fp32; the code is the same on a GPU."""
    run = make_run("trainer.eval_every=0", "trainer.max_steps=12")
    run.strategy.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    spoil(run, range(99), lambda loss: loss * 64)
    before = weights(run)
    train_step(run)
    assert_same(weights(run), before)
    for _ in range(11):
        train_step(run)
    skipped, in_a_row, halted = run.metrics.nonfinite.read()
    assert 2 < skipped < 12
    assert (in_a_row, halted) == (0, 0)
    assert run.strategy.scaler.get_scale() == 2.0 ** (127 - skipped)
    assert float(run.optimizer.state[run.model.pos_emb.weight]["step"]) == 12 - skipped
