"""The settings of a run as a starting point: `from=RUN` for a new run like it, and
`trainer.resume=PATH` for the run itself.

Stored settings are plain values that the schema checks. They are never interpolated or executed.
"""

from collections.abc import Collection, Sequence
from pathlib import Path

from clearhead.config.schema import GROUPS, Config, WandbConfig, is_tokenizer, known_settings
from clearhead.config.validation import validate
from clearhead.config.yaml_files import flat, nested
from clearhead.errors import NO_VALUE, CheckpointError, Problem, format_problem, refuse
from clearhead.files import read_object
from clearhead.tokens import TRAINED, VOCABULARIES

SETTINGS_JSON = "run.json"  # in a run directory
# These settings belong to one start of a run and are never those of an earlier start.
OF_THE_MACHINE = ("debug", "parallel", "trainer.device")
OF_THE_LAUNCH = (*OF_THE_MACHINE, "name", "runs_dir", "trainer.resume")
# Settings of earlier versions that changed what is trained, with the only value that is still
# supported.
DROPPED = {
    "data.endoftext": "token",
    "data.token_dtype": "uint16",
    "optimizer.nesterov": True,
    "optimizer.ns_steps": 5,
    "trainer.schedule_steps": None,
}
# Settings that were added later and change what is read, with the value of all earlier runs.
ADDED = {"data.trim": False, "data.shift": False}
PROMPTS = ("lens.prompts", "trainer.sample_prompt")  # passages of the text, unless they are given


def config_from(values: dict, overrides: Sequence[str]) -> Config:
    """Returns the config for composed values. Raises ConfigError with all problems.

    overrides: the command line, which has priority over the settings of another run.
    """
    source, resume = values.pop("from", None), flat(values).get("trainer.resume")
    run = resume if names_run(resume) else source
    config, problems = validate(Config, values, rules=run is None)
    refuse(problems)
    if not is_tokenizer(name := config.data.tokenizer):
        reason, hint = "no such tokenizer or directory", "use gpt2, byte, bpe or a directory"
        refuse([Problem("data.tokenizer", name, reason, hint)])
    if run is None:
        return _with_vocabulary(config)
    if source is not None and run == resume:
        reason, hint = "names a second run", "remove it, or remove from"
        refuse([Problem("trainer.resume", resume, reason, hint)])
    given = [text.partition("=")[0].lstrip("+~").partition("@")[0] for text in overrides]
    known = {*known_settings()} - {"experiment"}
    reason, hint = f"sets several groups, as the run {run} does", "give single settings or groups"
    others = [key for key in given if key not in known and not key.startswith("hydra")]
    refuse([Problem(key, NO_VALUE, reason, hint) for key in others])
    config = with_settings_of(Path(run), config, given, is_new=run != resume)
    return _with_vocabulary(config)


def _with_vocabulary(config: Config) -> Config:
    """Returns the config with the size of the vocabulary, if the tokenizer is not read from a file
    or trained."""
    size = config.model.vocab_size or VOCABULARIES.get(config.data.tokenizer)
    return config.with_values({"model.vocab_size": size})


def names_run(resume: object) -> bool:
    """Returns whether trainer.resume is the path of a run or checkpoint."""
    return isinstance(resume, str) and resume not in ("auto", "must")


def settings_of(run: Path) -> dict | None:
    """Returns all settings of a run; None if run.json is missing or invalid."""
    settings = read_object(run / SETTINGS_JSON).get("settings")
    return settings if isinstance(settings, dict) else None


def data_settings(settings: dict) -> dict:
    """Returns the settings of data with which a run was trained. settings: all of the run."""
    before = {key.removeprefix("data."): value for key, value in ADDED.items()}
    return before | settings["data"]


def dropped_settings(stored: dict, run: object, given: Collection[str] = ()) -> list[Problem]:
    """Returns a problem for each setting in DROPPED with which a run was trained.

    stored: its settings, flat. given: keys and groups on the command line, which replace them.
    """
    reason = f"{run} was trained with this value, which is not supported any more"
    return [
        Problem(key, stored[key], reason, "use the version that trained it")
        for key, supported in DROPPED.items()
        if stored.get(key, supported) != supported and not is_of(key, given)
    ]


def with_settings_of(path: Path, config: Config, given: list[str], is_new: bool) -> Config:
    """Returns the settings of a run, overridden by the command line.

    path: a run directory, or one of its checkpoints. config: the defaults, with the settings on the
    command line, whose keys and groups are `given`. is_new: for a new run, not for the run itself.
    Stored settings that the schema does not have are ignored, if nothing else is trained without
    them (DROPPED). Raises CheckpointError for invalid stored settings, ConfigError for invalid
    overrides.
    """
    key = "from" if is_new else "trainer.resume"
    in_run = path.resolve().parent.name == "checkpoints" and not (path / SETTINGS_JSON).exists()
    run = path.absolute().parent.parent if in_run else path
    if (stored := settings_of(run)) is None:
        reason = f"contains no run (no valid {SETTINGS_JSON})"
        raise CheckpointError(key, path, reason, "give the directory of a run")
    known = ADDED | flat(stored)
    if known.get("wandb.mode") == "auto":  # then WANDB_MODE decides at each start
        del known["wandb.mode"]
    if broken := sorted(GROUPS.keys() & known.keys()):
        reason = f"its stored {broken[0]} must be a group of settings"
        raise CheckpointError(key, path, reason, "use another run")
    refuse(dropped_settings(known, path, given))
    composed = flat(config.model_dump())
    merged = composed | {
        name: value
        for name, value in known.items()
        if name in composed and not is_of(name, OF_THE_LAUNCH)
    }
    merged |= _of_new_run(merged, run, given) if is_new else _of_this_run(config, run)
    own = _given_values(composed, given)
    result, problems = validate(Config, nested(merged | own))
    if problems and not any(problem.key in own for problem in problems):
        reason = format_problem(problems[0]._replace(hint=""))
        hint = f"give another {problems[0].key}, or use another run"
        raise CheckpointError(key, path, reason, hint)
    refuse(problems)
    return result


def _of_new_run(stored: dict, run: Path, given: list[str]) -> dict:
    """Returns the settings in which a new run differs from the run whose settings it uses."""
    own = {}
    has_copy = stored["data.tokenizer"] not in (*VOCABULARIES, TRAINED)
    if has_copy:
        own["data.tokenizer"] = str(run)
    groups = {key.partition(".")[0] for key in given}
    if "data" in groups:  # prompts are passages of the text, and so is a trained vocabulary
        own |= {key: None for key in PROMPTS if stored[key]}
        if stored["data.tokenizer"] == TRAINED or is_of("data.tokenizer", given):
            own["model.vocab_size"] = None
    return own


def _of_this_run(config: Config, run: Path) -> dict:
    """Returns the name and place of a run that is resumed by its path."""
    folder = run if run.name not in ("", "..") else run.resolve()
    if config.name not in (None, folder.name):
        hint = f"remove it; for a new run with these settings: from={run}"
        refuse([Problem("name", config.name, f"trainer.resume names the run {run}", hint)])
    return {"name": folder.name, "runs_dir": str(folder.parent)}


def _given_values(composed: dict, given: list[str]) -> dict:
    """Returns the values of the settings and groups on the command line. wandb=online is meant for
    the mode only."""
    defaults = flat({"wandb": WandbConfig.with_defaults().model_dump()})
    named = {key: value for key, value in composed.items() if is_of(key, given)}
    return {
        key: value
        for key, value in named.items()
        if key in given or key == "wandb.mode" or value != defaults.get(key, ...)
    }


def is_of(key: str, names: Collection[str]) -> bool:
    """Returns whether `names` contains this setting or its group."""
    return key in names or key.partition(".")[0] in names
