"""What a run says of itself on the console, at its beginning and at its end."""

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from train import Trainer


def introduce(run: "Trainer") -> None:
    """What is trained, on what, where it is kept; and what else there is to know."""
    settings, out = run.settings, run.console
    val_windows = len(run.val_set) if run.val_set else 0
    used = len(run.validation.windows) if run.validation else 0
    some = f" ({used:,} of them each time)" if used < val_windows else ""
    out.print(
        f"{run.model.num_parameters():,} parameters {run.parallel.describe()}"
        f"{', compiled' if run.compiled else ''}"
        f"{', activation checkpointing' if settings.trainer.activation_checkpointing else ''}"
    )
    out.print(
        f"{len(run.train_set):,} windows of {settings.data.max_length} tokens to train on, "
        f"{val_windows:,} to validate{some}; {settings.trainer.batch_size} a step"
        f"{division(run)}"
    )
    for note in (*run.data.notes, *run.notes):
        out.print(f"note: {note}")
    out.print(f"run directory: {run.folder}")
    if where := run.tracker.where():
        out.print(f"W&B: {where}")
    if run.state.step >= settings.trainer.max_steps:
        more = "a larger trainer.max_steps goes on"
        out.print(f"finished already, after step {run.state.step}; {more}")
    elif run.state.step > 0:
        out.print(f"resumed after step {run.state.step}")
    for key in ("prompts", "repeated", "max_tokens") if run.saved else ():
        value = getattr(settings.lens, key)
        if run.lens and (before := run.lens_before.get(key, value)) != value:
            what = "the lens looks at something else than before: its curves join the two"
            out.print(f"lens.{key}: {what}; it was {before}")


def division(run: "Trainer") -> str:
    """How a step's windows are shared out: ", 4 x 2 on each of 2 ranks"; nothing if not."""
    ranks, size = run.parallel.world_size, run.micro_batch_size
    share = run.settings.trainer.batch_size // ranks
    if ranks == 1 and size == share:
        return ""
    times = f"{-(-share // size)} x {size}" if size < share else f"{share}"
    if share % size:
        times = f"{share} in portions of at most {size}"
    return f", {times} on each of {ranks} ranks" if ranks > 1 else f", {times}"


def conclude(run: "Trainer", seconds: float) -> None:
    """The last words: losses, a sample, and what to open. seconds: that training took."""
    out, state = run.console, run.state
    out.print()
    if run.train_loss is not None:
        out.print(f"training loss    {run.train_loss:.4f}  (step {state.step})")
    if state.val_loss is not None:
        best = ""
        if state.best_loss is not None:
            best = f"; best {state.best_loss:.4f} at step {state.best_step}"
        out.print(f"validation loss  {state.val_loss:.4f}{best}")
    if run.last_sample:
        out.print(f"\n{run.last_sample}\n")
    out.print(f"run directory    {run.folder}")
    if run.parallel.is_rank_0 and run.saver.written:
        waited = f"training waited {run.seconds_saving:.1f} s of {seconds:.0f} s"
        out.print(f"checkpoints      {run.saver.written} written in the background; {waited}")
    for finding in run.lens.findings() if run.lens else ():
        out.print(f"heads            {finding}")
    if (timelapse := run.folder / "attention" / "timelapse.html").is_file():
        share = f"  (looking took {run.seconds_watching:.1f} s of {seconds:.0f} s)"
        out.print(f"watch the heads  {timelapse}{share if run.seconds_watching else ''}")
    out.print(f"report           {run.folder / 'report.html'}")
    if run.uploaded:
        out.print(f"model for W&B    {run.uploaded}")
    if run.settings.trainer.profile and (table := run.folder / "profile" / "step.txt").is_file():
        out.print(f"profile          {table}")
    prompt = f"prompt={run.settings.trainer.sample_prompt}"
    command = shlex.join(["python", "generate.py", f"checkpoint={run.folder}", prompt])
    out.print(f"more text        {command}")
    if where := run.tracker.where():
        out.print(f"W&B              {where}")
