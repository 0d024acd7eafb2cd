"""What a resumed run may change, and the command that resumes a run."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig

from attention import SCORES
from clearhead.checkpoint.format import State
from clearhead.config.application import is_in_sweep, override
from clearhead.config.schema import Config
from clearhead.config.stored import OF_THE_LAUNCH, OF_THE_MACHINE, is_of
from clearhead.config.yaml_files import flat
from clearhead.errors import Problem, as_yaml, shorten
from clearhead.parallel.launch import launch_command
from clearhead.tokens import TRAINED, VOCABULARIES

# A resumed run keeps these settings and groups, which determine its weights, its optimizer state
# and the order of its data. All others may be changed. The tokens are compared by checksum.
FIXED = {"seed", "data", "optimizer.name", "trainer.batch_size"}
FIXED |= {
    f"model.{key}"
    for key in ("vocab_size", "context_length", "emb_dim", "num_layers", "num_heads", "qkv_bias")
}


def longer(config: Config, state: State) -> str:
    """Returns the settings with which a finished run trains further."""
    trainer, changes = config.trainer, []
    if trainer.max_steps and state.step >= trainer.max_steps:
        changes.append(f"trainer.max_steps above {state.step}")
    if state.used_time(trainer) >= 1:
        changes.append(f"trainer.max_minutes above {state.minutes:g}")
    if state.should_stop_early(trainer):
        changes.append("a larger trainer.patience, or trainer.patience=null")
    return " and ".join(changes)


def changed_settings(saved: dict, now: dict, run: object) -> list[Problem]:
    """Returns a problem for each setting that must not differ from the saved one."""
    saved, now = flat(saved), flat(now)  # flat also accepts flat settings
    # A setting that is not in the checkpoint was added later; it is not compared.
    changed = {key: value for key, value in now.items() if value != saved.get(key, value)}
    kernels = {saved.get("model.attention"), now.get("model.attention")}
    fixed = FIXED | ({"model.attention"} if kernels & SCORES.keys() else set())
    changed = {
        key: value
        for key, value in changed.items()
        if is_of(key, fixed) and key not in ("data.path", "data.val_path")
    }
    if not {s.get("data.tokenizer") for s in (saved, now)} & {*VOCABULARIES, TRAINED}:
        changed.pop("data.tokenizer", None)  # of two directories, the tokenizers are compared
    if "data.tokenizer" in changed or now.get("model.vocab_size") is None:
        changed.pop("model.vocab_size", None)  # it follows
    other = "or start a new run with another name"
    return [
        Problem(key, value, f"{run} was trained with {before}", f"use {key}={before}, {other}")
        for key, value, before in ((k, v, as_yaml(saved[k])) for k, v in changed.items())
    ]


def other_changes(saved: dict, config: Config) -> list[str]:
    """Returns a text for each setting that a resumed run has changed, except for its machine."""
    saved, ignored = flat(saved), (*OF_THE_LAUNCH, "data.path", "data.val_path")
    return [
        f"{key}={shorten(as_yaml(value))} (was {shorten(as_yaml(saved[key]))})"
        for key, value in flat(config.model_dump()).items()
        if value not in ("auto", saved.get(key, value)) and not is_of(key, ignored)
    ]


def resume_command(directory: Path, changes: Sequence[str] = ()) -> str:
    """Returns how to resume a run after it stopped: "resume with: COMMAND", for a job of a sweep
    how to resume the sweep, and in a notebook or a program of the user the expression.

    The command contains the settings of this machine; the others are in the run directory. changes:
    further overrides, not for a sweep.
    """
    overrides = [override("trainer.resume", directory), *changes]
    if is_in_sweep():
        folder = shlex.quote(f"hydra.sweep.dir={HydraConfig.get().sweep.dir}")
        return f"rerun the same command with {folder}"
    if Path(sys.argv[0]).stem != "train":
        return f"resume with: fit(build_run(compose({overrides})))"
    of_machine = ("config-dir=", *OF_THE_MACHINE)
    kept = [t for t in sys.argv[1:] if "=" not in t or t.lstrip("+-").startswith(of_machine)]
    command = [*launch_command(), sys.argv[0], *kept, *overrides]
    return f"resume with: {shlex.join(command)}"
