"""Trains GPT-2 on a text and logs the attention of its heads.

    python train.py model=gpt2-small
    python train.py model=gpt2-nano data.path=my.txt trainer.max_steps=500
    python train.py --help

This file contains the training loop. clearhead/run/build.py builds its components (data loader,
model, optimizer, checkpointer, ...). A run writes all its files to runs/<name>/. In a notebook:

    from clearhead.config import compose
    from clearhead.run.build import build_run
    fit(build_run(compose(["model=gpt2-nano"])))
"""

import time
from typing import TYPE_CHECKING

from clearhead.config.application import hydra_main
from clearhead.errors import never_fail
from clearhead.run.signals import StopRequested, StopSignals, exit_on_stop_signals

if TYPE_CHECKING:  # at run time, torch is imported only after the settings were checked
    from torch import Tensor

    from clearhead.config.schema import Config
    from clearhead.run.build import Run


def fit(run: "Run") -> dict | None:
    """Trains until trainer.max_steps or trainer.max_minutes. Evaluates, logs and saves at the
    intervals in the settings.

    Returns the contents of summary.json, None on ranks other than 0. Raises a ClearheadError when
    training fails, and SystemExit after a stop signal. In a notebook, an interrupt saves a
    checkpoint and raises KeyboardInterrupt.
    """
    state = run.state
    started = time.perf_counter()
    with run, run.translate_errors():  # `run` closes its components, also after an error
        try:
            run.metrics.start(state.losses)  # after a resume: the losses that are not logged yet
            if state.row is not None:  # a new run, or one that was stopped during an evaluation
                complete_step(run)
            else:
                run.repeat_end()
            while state.step < run.stop.last_step:
                loss, grad_norm = train_step(run)
                run.metrics.add(loss, grad_norm)
                run.check_limits()
                state.row = log_row(run) if run.is_due("log") else {}
                complete_step(run)
            run.stop.check()
        except StopRequested:  # on all ranks at the same point
            stop(run)
        return run.finish(time.perf_counter() - started)


def train_step(run: "Run") -> tuple["Tensor", "Tensor"]:
    """Runs one optimizer step: forward and backward for each micro-batch of this rank, then update.

    Returns the mean loss in nats per token and the gradient norm as scalar tensors on the device:
    the step does not synchronize with a GPU.
    """
    config, strategy, state = run.config, run.strategy, run.state
    strategy.reseed(config.seed, state.step)  # dropout depends on (seed, step, rank) only
    micro_batches = next(run.batches)  # each: ((input_ids, target_ids), number of targets)
    run.stop.start_step(sum(count for _, count in micro_batches))
    mean_loss = 0.0
    for number, (tensors, count) in enumerate(micro_batches, start=1):
        run.stop.check()
        input_ids, target_ids = strategy.to_device(*tensors)  # (B, T)
        with strategy.no_sync(number < len(micro_batches)):  # the last micro-batch syncs gradients
            with strategy.autocast():
                _, loss = run.trained_model(input_ids, target_ids)
            # All targets of the step have equal weight. world_size cancels the average over ranks.
            loss = loss * (count * strategy.world_size / run.stop.num_targets())
            strategy.backward(loss)
        mean_loss = mean_loss + loss.detach()
    for group in run.optimizer.param_groups:
        group["lr"] = run.learning_rate(group["peak_lr"])
    # Clips the gradients; skips the step if one is NaN or inf.
    clip, nonfinite = config.trainer.grad_clip, run.metrics.nonfinite
    grad_norm = strategy.update(run.model, run.optimizer, clip, nonfinite)
    state.step += 1
    state.tokens += run.metrics.tokens_per_step
    if strategy.device.type == "cpu":  # on a GPU this would synchronize, so log_row does it
        run.metrics.check_skipped(state)
    return mean_loss, grad_norm


def log_row(run: "Run") -> dict[str, float]:
    """Returns the training metrics since the last logged row. Synchronizes with the device."""
    rate = run.optimizer.param_groups[0]["lr"]
    row, step = run.metrics.row(run.state, rate), run.state.step
    loss, speed = row["train/loss"], row["train/tokens_per_second"]
    run.log.console.step(step, loss, rate, speed, run.stop.progress(step))
    run.report_speed()
    return row


def complete_step(run: "Run") -> None:
    """Evaluates, logs and saves after a step, or before the first one. The last step is also saved
    before its validation, which may take long. A run that is stopped here repeats this when it is
    resumed."""
    state = run.state
    with run.metrics.paused():
        if 0 < state.step == run.stop.last_step:
            save(run)
        with run.stop.checked_before_each_pass(run.model):
            row = evaluate_and_log(run, state.row)
        state.row = None  # logged
        if state.step > 0:
            save_if_due(run, row.get("val/loss"))


def evaluate_and_log(run: "Run", row: dict[str, float]) -> dict[str, float]:
    """Runs validation, a text sample and an attention snapshot when they are due, and logs them.

    row: the training metrics of this step, or {} if none are due. Returns it with the validation
    metrics added.
    """
    step = run.state.step
    sample = snapshot = None
    evaluation_due = step == 0 or run.is_due("eval")
    snapshot_due = run.lens.is_due(step, run.stop.last_step)
    if evaluation_due or snapshot_due:
        run.strategy.synchronize()  # so that the times below exclude pending training work
    if evaluation_due:
        row |= run.evaluate()
        if run.config.trainer.sample_tokens > 0 and step > 0:
            sample = run.sample()
    if snapshot_due:
        with run.log.timed("attention snapshots"):
            snapshot = run.lens.snapshot(run.model, step)
        run.strategy.wait_for_rank_0()  # it writes the images
        run.stop.check()
        run.log.console.new_names(step, snapshot)
    if row or snapshot_due or sample:  # equal on all ranks
        row["train/tokens"] = run.state.tokens
        with run.log.timed("logging"), run.strategy.raise_on_all_ranks():
            run.log.log(row, step, snapshot, sample, is_last=step == run.stop.last_step)
    return row


def save_if_due(run: "Run", val_loss: float | None) -> None:
    """Saves a checkpoint every trainer.save_every steps, and when val_loss, the validation loss of
    this step or None, is the lowest so far."""
    state, due = run.state, run.is_due("save")
    if not due and val_loss is None:
        return
    run.metrics.check_skipped(state)
    if state.skipped_in_a_row and state.step < run.stop.last_step:
        return  # keep the checkpoint from before the skipped steps
    every = run.interval("eval")
    is_best = val_loss is not None and run.checkpointer.update_best(state, val_loss, every)
    if is_best:
        run.log.tracker.summary({"best_val_loss": state.best_loss, "best_step": state.best_step})
    if is_best or due:
        save(run)


def save(run: "Run") -> None:
    """Starts to save a checkpoint of this step. A thread writes it while training continues."""
    state = run.state
    is_saved = run.checkpointer.wait(state) == state.step
    run.metrics.store(state)
    run.log.tracker.sync()  # the log is flushed to disk before the checkpoint
    if is_saved:
        run.checkpointer.complete(state)
    else:
        is_last = state.step == run.stop.last_step or run.stop.is_stopped
        run.checkpointer.save(state, is_last)


def stop(run: "Run") -> None:
    """Saves a checkpoint of the last complete step and exits with the exit code of the signal."""
    if run.state.step > 0:
        save(run)
        run.checkpointer.finish(run.state)
    run.exit()


@hydra_main
def main(config: "Config") -> float:
    """Trains with the given settings. Returns the value that a sweep minimises."""
    from clearhead.run.build import build_run

    with StopSignals() as signals:
        run = build_run(config, signals)
        fit(run)
        return run.objective()


if __name__ == "__main__":
    exit_on_stop_signals()
    never_fail()
    main()
