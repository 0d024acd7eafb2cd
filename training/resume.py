"""How a run begins: new, from a checkpoint of its own or another's, or from given weights.

Nothing here changes anything on disk. What does not fit comes back as a list of problems, each
(key, value, cause, fix), and the caller refuses it (see training/config.py).
"""

import contextlib
import json
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from model import GPT
from training import checkpoint
from training.hf import load_any

if TYPE_CHECKING:
    from training.config import Problem, Settings

# What may differ between a run and its continuation without changing what is computed.
FREE_TO_CHANGE = {
    "name",
    "debug",
    "parallel",
    "lens",
    "wandb",
    "model.attention",
    "data.path",  # what is there is compared by its checksums
    "data.val_path",
    "data.verify",
    "trainer.max_steps",
    "trainer.micro_batch_size",
    "trainer.activation_checkpointing",
    "trainer.eval_every",
    "trainer.eval_windows",
    "trainer.log_every",
    "trainer.save_every",
    "trainer.keep",
    "trainer.compile",
    "trainer.device",
    "trainer.resume",
    "trainer.init_from",
    "trainer.sample_prompt",
    "trainer.sample_tokens",
}


def find_checkpoint(settings: "Settings") -> tuple[Path | None, list["Problem"]]:
    """The checkpoint to go on from, None for a new run, and what is wrong with the wish.

    trainer.resume=auto: go on when runs/<name> has a checkpoint. must: it has to have one.
    false: it must not. A path: that one. Raises CheckpointError when it cannot be read.
    """
    resume, name = settings.trainer.resume, settings.name or name_before_restart()
    last = Path("runs") / name / "checkpoints" / "last" if name else None
    if last and last.is_symlink() and was_cut_off(last.parent.parent):
        resume = "auto"
    if resume not in ("auto", "must", False):
        found = checkpoint.find(resume, "trainer.resume")
        if last and last.is_symlink() and checkpoint.run_of(found) != last.parent.parent.resolve():
            fix = "leave trainer.resume out to go on with it, or give a new name"
            return None, [("name", name, f"runs/{name} holds a run of its own", fix)]
        return found, going_back(found, settings)
    if last is None or not last.is_symlink():
        if resume == "must":
            fix = "give the name= of a run that has a checkpoint, or trainer.resume=auto"
            return None, [("trainer.resume", "must", "there is nothing to resume", fix)]
        return None, []
    if resume is False:
        fix = "give another name, or trainer.resume=auto to go on"
        return None, [("name", name, f"runs/{name} holds a run", fix)]
    return checkpoint.find(last, "name"), []


MARK = "launch.json"  # in a run's directory: what started it
_opened: list[Path] = []  # the runs of this process; a multirun has several


def _launch() -> dict[str, str]:
    """What tells this start of a run from any other, and stays when it is started anew.

    torchrun starts its processes again when one has died: with the same parent, which began at
    the same time. Slurm starts a job again that it has put back into the queue.
    """
    found = {}
    if job := os.environ.get("TORCHELASTIC_RUN_ID"):
        agent = os.getppid()
        began = ""
        with contextlib.suppress(OSError):  # not everywhere; clock ticks since boot
            began = Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[19]
        found["torchrun"] = f"{job} {socket.gethostname()} {agent} {began} {len(_opened)}"
    if job := os.environ.get("SLURM_JOB_ID"):
        found["slurm"] = job
    return found


def mark_launch(folder: Path) -> None:
    """Notes in a run's directory what has started it."""
    if launch := _launch():
        (folder / MARK).write_text(json.dumps(launch), encoding="utf-8")
    _opened.append(folder)


def was_cut_off(run: Path, by_slurm: bool = True) -> bool:
    """Whether this very start made the run before, so that it has to go on, whatever the settings
    say: they were fulfilled then."""
    try:
        before = json.loads((run / MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    now = _launch()
    requeued = by_slurm and os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    keys = {"torchrun", "slurm"} if requeued else {"torchrun"}
    return any(before.get(key) == now[key] for key in keys & now.keys())


def name_before_restart() -> str | None:
    """The name of the run that this one was before torchrun started the processes anew.

    For runs without a name of their own, which is chosen by the clock.
    """
    runs = (mark.parent for mark in Path("runs").glob(f"*/{MARK}"))
    return next((run.name for run in runs if was_cut_off(run, by_slurm=False)), None)


def going_back(found: Path, settings: "Settings") -> list["Problem"]:
    """The problem of going on, in place, from a checkpoint that is not its run's newest.

    It would overwrite what the run did since.
    """
    run = checkpoint.run_of(found)
    if run is None or (settings.name and settings.name != run.name):
        return []
    newest = checkpoint.newest_step(run)
    if checkpoint.load_state(found).step >= newest:
        return []
    cause = f"{run} has gone on to step {newest}"
    fix = "give name=NEW to branch off there, or resume the run itself"
    return [("trainer.resume", settings.trainer.resume, cause, fix)]


def changed_settings(saved: dict, now: dict, run: Path) -> list["Problem"]:
    """A problem for each setting that would make the continuation another run."""
    problems = []
    for group, values in now.items():
        if group in FREE_TO_CHANGE:
            continue
        if not isinstance(values, dict):
            pairs = [(group, values, saved.get(group))]
        else:
            before = saved.get(group, {})
            # A setting that the checkpoint does not know came later, and left things as they were.
            known = {key: value for key, value in values.items() if key in before}
            pairs = [(f"{group}.{key}", value, before[key]) for key, value in known.items()]
        for key, value, before in pairs:
            if key not in FREE_TO_CHANGE and value != before:
                cause = f"{run} was trained with {before}"
                fix = f"use {key}={before}, or another name= for a new run"
                problems.append((key, value, cause, fix))
    return problems


def initial_weights(settings: "Settings") -> tuple[GPT | None, list["Problem"]]:
    """A model with the weights of trainer.init_from, and what does not fit the settings.

    Dropout and the kernel are this run's choice; the weights fit all of them.
    """
    source = settings.trainer.init_from
    model, _ = load_any(source, "trainer.init_from")
    problems = []
    for key in ("vocab_size", "context_length", "emb_dim", "num_heads", "num_layers", "qkv_bias"):
        have, want = getattr(model.config, key), getattr(settings.model, key)
        if have != want:
            cause = f"the weights of trainer.init_from={source} have {have}"
            problems.append((f"model.{key}", want, cause, f"use model.{key}={have}"))
    if problems:
        return None, problems
    fresh = checkpoint.empty_model(settings.model)
    fresh.load_state_dict(model.state_dict())
    return fresh, []
