"""The door: command line and configs/ in, checked settings out, or every problem named.

    @command
    def main(settings: Settings): ...

Hydra composes the YAML files of configs/ with the overrides; training/config/schema.py checks the
values. Names are checked first and without loading torch, so a mistyped key is answered at once.

Exit codes: 0 done; 2 bad configuration; 3 bad data or checkpoint; 4 failed while running; 130
and 143 stopped by Ctrl-C and SIGTERM.
"""

import atexit
import contextlib
import dataclasses
import difflib
import functools
import gc
import inspect
import itertools
import json
import math
import os
import random
import re
import shlex
import sys
import tempfile
import time
import traceback
import typing
from collections.abc import Callable
from pathlib import Path

from errors import (
    DEBUG,
    NO_VALUE,
    ClearheadError,
    ConfigError,
    Problem,
    exit_code_of,
    format_error,
    refuse,
    shorten,
    show,
)
from training.config.schema import (
    CONFIGS,
    GROUPS,
    REPOSITORY,
    Settings,
    build,
    build_launch,
    fill,
    names_a_run,
    unknown_key,
)

if typing.TYPE_CHECKING:
    from omegaconf import DictConfig

    from training.reporting.sweep import Plan

# Settings whose value is free text: taken as typed, commas, brackets, digits and all.
FREE_TEXT = {
    "name",
    "data.path",
    "data.val_path",
    "data.text_key",
    "trainer.sample_prompt",
    "trainer.resume",
    "trainer.init_from",
    "wandb.entity",
    "wandb.project",
    "wandb.name",
    "wandb.group",
    "wandb.job_type",
    "wandb.notes",
}
# Of these every character counts; a reference to another setting would be no text.
PROMPTS = ("trainer.sample_prompt", "lens.prompts")
WAIT_FOR_RANK_0 = 10  # seconds
MOST_OVERRIDES = 1000
BLANKS = "write key=value without blanks, or with quotes around it: 'key=some words'"
# Of Hydra's own settings those that a multirun has a use for. The others would do nothing, or run
# code (callbacks, the factories of a logging configuration), or write secrets down (env_set).
OF_SWEEPS = ("hydra.sweep", "hydra.sweeper", "hydra.launcher")
# Where a sweeper would take its values from, too, unchecked; the last one names code.
ELSEWHERE = tuple(
    f"hydra.sweeper.{key}" for key in ("params", "search_space", "custom_search_space")
)
VALUES_ELSEWHERE = (
    "values stand elsewhere",
    "give them on the command line, such as optimizer.lr=1e-3,3e-4",
)
HYDRA_NOTES = ("overrides", "runtime", "mode", "searchpath")  # on a composition
NOT_HYDRAS = (
    "is Hydra's own and not for use here",
    "leave it out; a sweep (-m) has hydra.sweep, hydra.sweeper and hydra.launcher",
)


# ---------------------------------------------------------------------- overrides -> settings


def compose(
    overrides: list[str], config_dir: str | None = None, sweeping: bool = False
) -> Settings:
    """The settings that configs/ and these overrides make.

    sweeping: for a job of a multirun, where some of Hydra's own settings mean something.
    Raises ConfigError listing every problem.
    """
    return _composed(overrides, config_dir, sweeping)[0]


def _composed(
    overrides: list[str], config_dir: str | None, sweeping: bool
) -> tuple[Settings, "DictConfig"]:
    """The settings, and Hydra's own beside them."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    register_resolvers()
    if len(overrides) > MOST_OVERRIDES:
        cause, fix = f"has {len(overrides):,} settings", "put them in a file, see --config-dir"
        raise ConfigError([("command line", NO_VALUE, cause, fix)])
    search, folders = [], [CONFIGS]
    if config_dir is not None:  # a folder of the user's own, beside configs/
        check_config_dir(config_dir)
        place = _escaped(f"file://{os.path.abspath(config_dir)}")
        search, folders = [f"hydra.searchpath=[{place}]"], [CONFIGS, Path(config_dir)]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        tree = _shipped()
        good, problems = check_names(overrides, tree, folders, sweeping)
        try:
            texts = search + [text for _, text in good]
            config = hydra_compose("config", texts, return_hydra_config=True)
            problems += changes_of_hydra(tree.hydra, config.hydra)
            ours = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
            values = OmegaConf.to_container(ours, resolve=True)
        except _errors_of_composing() as error:
            problems.append(_problem_of_composing(error, overrides, config_dir))
            raise ConfigError(problems) from error
    # First what was touched: most mistakes are found there, before torch is loaded.
    touched = {key.split(".")[0] for key, _ in good}
    if "experiment" in touched:
        touched = set(GROUPS)
    if touched & {"model", "data"}:
        touched |= {"model", "data"}
    _, more = build(values, set() if names_a_run(values) else touched)
    if not problems and not more:
        settings, more = _built(values, [key for key, _ in good])
    refuse(problems + more)
    return settings, config.hydra


def _built(values: dict, keys: list[str]) -> tuple[Settings | None, list[Problem]]:
    """Settings from composed values and the keys of the overrides; see build and build_launch."""
    from omegaconf import OmegaConf

    if not names_a_run(values):
        return build(values)
    tree = _shipped()
    ours = OmegaConf.masked_copy(tree, [key for key in tree if key != "hydra"])
    return build_launch(values, keys, OmegaConf.to_container(ours, resolve=True))


@functools.cache
def _shipped() -> "DictConfig":
    """The configuration without overrides, Hydra's own settings with it; not to be changed."""
    from hydra import compose as hydra_compose

    return hydra_compose("config", return_hydra_config=True)


def check_sweep(overrides: list[str], config_dir: str | None) -> "Plan":
    """Checks every value that a multirun will try, before its first job starts; what it is to do.

    Each swept value is composed with the first of the others; of an interval, from which a sweeper
    draws, its two ends. Raises ConfigError with all problems.
    """
    problems: list[Problem] = []
    variants: dict[str, list[str]] = {}  # for each key, the overrides it stands for
    intervals = []
    for text in overrides:
        key, values, is_interval = _values(text, problems)
        variants.pop(key, None)  # of a key that is given twice the last one counts
        variants[key] = values
        intervals += [(key, text.partition("=")[2])] * is_interval
    for key, values in variants.items():
        if key.startswith(("hydra.", "hydra/")) and len(values) > 1:
            cause = "how to sweep is said once"
            problems.append((key, NO_VALUE, cause, "give one value"))
    count = math.prod(map(len, variants.values()))
    draws = variants.get("hydra/sweeper", ["hydra/sweeper=basic"]) != ["hydra/sweeper=basic"]
    if count > MOST_OVERRIDES and not draws:
        fix = "sweep over fewer, or let a sweeper draw: hydra/sweeper=optuna"
        refuse([*problems, ("command line", NO_VALUE, f"stands for {count:,} runs", fix)])
    names = variants.get("name", [])
    if names and count > len(names):
        fix = "leave it out, or give a name for each value; wandb.group=NAME holds them together"
        cause = "several runs cannot share one directory"
        problems += [("name", name.partition("=")[2], cause, fix) for name in names]
    first, composed = [values[0] for values in variants.values()], None
    for place, values in enumerate(variants.values()):
        for value in values if len(values) > 1 or place == 0 else []:
            tried = [*first[:place], value, *first[place + 1 :]]
            try:
                composed = _composed(tried, config_dir, sweeping=True)
            except ConfigError as error:
                problems += [problem for problem in error.problems if problem not in problems]
    if composed is None and not problems:  # `python train.py -m`: a sweep of one job
        composed = _composed(first, config_dir, sweeping=True)
    refuse(problems)
    hydra = composed[1]
    from training.distributed.launch import check_environment

    refuse(check_environment())
    refuse(_check_sweeper(hydra, intervals))
    from training.reporting.sweep import Plan

    swept = [key for key, values in variants.items() if len(values) > 1]
    searches = hydra.sweeper.get("n_trials")
    return Plan(
        keys=[key for key in swept if not key.startswith("hydra")],
        count=count if searches is None else searches,
        folder=Path(hydra.sweep.dir),
        is_chosen="hydra.sweep.dir" in variants,
    )


def _values(text: str, problems: list[Problem]) -> tuple[str, list[str], bool]:
    """(The key of an override, the overrides that it stands for, whether it is an interval of which
    these are the ends). Adds to the problems those that composing would not find."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(text)
        key = override.key_or_group
        if override.is_interval_sweep():
            ends = override.value()
            return key, [f"{key}={ends.start}", f"{key}={ends.end}"], True
        choices = override.sweep_string_iterator() if override.is_sweep_override() else []
        choices = list(itertools.islice(choices, MOST_OVERRIDES + 1))
    except (HydraException, TypeError, ValueError, RecursionError, AssertionError):
        return text, [text], False  # no override at all, named by compose
    if len(choices) > MOST_OVERRIDES:
        cause = f"stands for more than {MOST_OVERRIDES:,} runs"
        problems.append((key, NO_VALUE, cause, "sweep over fewer"))
        choices = choices[:1]
    twice = [choice for place, choice in enumerate(choices) if choice in choices[:place]]
    for choice in dict.fromkeys(twice):
        problems.append((key, choice, "stands there twice", "give each value once"))
    return key, [f"{key}={choice}" for choice in choices] or [text], False


def _check_sweeper(hydra: "DictConfig", intervals: list[tuple[str, str]]) -> list[Problem]:
    """What does not fit the way a sweep chooses its values."""
    from training.distributed.launch import rank_count

    sweeper, launcher = (hydra.runtime.choices[f"hydra/{what}"] for what in ("sweeper", "launcher"))
    ranks = rank_count()
    problems = []
    if launcher != "basic":
        cause = "the jobs of a sweep run one after the other, in this process"
        fix = "leave it out; to share them out over machines, see docs/sweeps.md"
        problems.append(("hydra/launcher", launcher, cause, fix))
    if sweeper == "basic":
        fix = "give values, such as 1e-3,3e-4, or add hydra/sweeper=optuna"
        problems += [
            (key, text, "an interval is no list of values", fix) for key, text in intervals
        ]
    if ranks > 1:
        cause = "a sweep (-m) runs its jobs in one process"
        fix = "start it without torchrun; to train one job on several ranks, leave out -m"
        problems.append(("WORLD_SIZE", ranks, cause, fix))
    direction = hydra.sweeper.get("direction", "minimize")
    if (direction := getattr(direction, "name", direction)) != "minimize":  # Optuna's own type
        cause = "the loss is what is searched by, and the lowest is the best"
        problems.append(("hydra.sweeper.direction", direction, cause, "leave it out"))
    if "WANDB_RUN_ID" in os.environ:
        cause = "all jobs would be that one run of W&B's"
        fix = "unset it, or leave out -m: an agent's trial is one run"
        problems.append(("WANDB_RUN_ID", os.environ["WANDB_RUN_ID"], cause, fix))
    for key in ELSEWHERE:  # in a file
        if hydra.sweeper.get(key.rpartition(".")[2]) is not None:
            problems.append((key, NO_VALUE, *VALUES_ELSEWHERE))
    return problems


def register_resolvers() -> None:
    """`${repository:}` in a YAML file is the folder of this repository. `${oc.env:}` is none of a
    setting's: what it fetches would be written down with the run."""
    from omegaconf import OmegaConf

    def refuse_environment(*_) -> None:
        raise ValueError("settings are written down, and the environment holds secrets")

    OmegaConf.register_new_resolver("oc.env", refuse_environment, replace=True)
    if not OmegaConf.has_resolver("repository"):
        OmegaConf.register_new_resolver("repository", lambda: str(REPOSITORY))


def check_config_dir(config_dir: str) -> None:
    """Raises ConfigError with every problem of the user's own YAML files, before Hydra reads
    them."""
    from training.config.yaml_check import check_folder

    if not os.path.isdir(config_dir):
        fix = "check the path"
        raise ConfigError([("--config-dir", config_dir, "no such folder", fix)])
    refuse(check_folder(Path(config_dir), CONFIGS))


def changes_of_hydra(shipped: "DictConfig", composed: "DictConfig") -> list[Problem]:
    """A problem for each of Hydra's own settings that a file has changed and should not."""
    from omegaconf import OmegaConf

    before, now = (OmegaConf.to_container(c, resolve=False) for c in (shipped, composed))
    for settings in (before, now):
        for name in HYDRA_NOTES:
            settings.pop(name, None)
        for name in ("name", "override_dirname", "id", "num", "config_name"):
            settings["job"].pop(name, None)
    problems = []
    for name in before.keys() | now.keys():
        if f"hydra.{name}" not in OF_SWEEPS and before.get(name) != now.get(name):
            problems.append((f"hydra.{name}", NO_VALUE, *NOT_HYDRAS))
    return sorted(problems)


def _errors_of_composing() -> tuple[type[Exception], ...]:
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    return HydraException, OmegaConfBaseException, YAMLError, OSError, ValueError, RecursionError


def _problem_of_composing(error: Exception, overrides: list[str], folder: str | None) -> Problem:
    """What Hydra or OmegaConf says, with the setting that it is about where that is known."""
    said = getattr(error, "problem", None) or str(error).strip() or type(error).__name__
    cause = said.splitlines()[0].rstrip(".")
    guilty = getattr(error, "full_key", None)
    for text in overrides:
        key, _, value = text.partition("=")
        if key.lstrip("+") == guilty or quoted(text) in str(error):
            return (key.lstrip("+"), value, cause, "see --help")
    if folder is not None:
        return ("--config-dir", folder, cause, "mend its files, or see --help")
    return ("command line", " ".join(overrides), cause, "see --help")


def quoted(text: str) -> str:
    """An override whose value is free text, quoted for Hydra's grammar; any other as it is.

    Left alone: what is quoted already, a list, a reference ${...}, and null, true and false.
    """
    key, equals, value = text.partition("=")
    name = key.lstrip("+")
    whole = (("'", "'"), ('"', '"'), ("[", "]"), ("${", "}"))
    plain = value in ("", "null", "true", "false") or any(
        value.startswith(a) and value.endswith(b) for a, b in whole
    )
    if not equals or name not in FREE_TEXT | {"lens.prompts"} or plain:
        return text
    if name in PROMPTS:  # OmegaConf's way to write a "${" that is no reference
        value = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return f"{key}=[{_escaped(value)}]" if name == "lens.prompts" else f"{key}={_escaped(value)}"


def _as_typed(override: str) -> str:
    """An override of a job of a sweep, as a run of its own takes it: there free text is taken as
    typed, and here it was read by Hydra's grammar."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_override(override)
    value = parsed.value()
    if parsed.key_or_group not in FREE_TEXT or not isinstance(value, str):
        return override
    key = override.partition("=")[0]
    typed = f"{key}={value}"
    return typed if quoted(typed) != typed else f"{key}={_escaped(value)}"


def _escaped(text: str) -> str:
    """In quotes, for Hydra, which reads a backslash before a quotation mark only."""
    text = re.sub(r"(\\*)\"", r'\1\1\\"', text)
    return '"' + re.sub(r"(\\+)\Z", r"\1\1", text) + '"'


def check_names(
    overrides: list[str], tree: "DictConfig", folders: list[Path], sweeping: bool = False
) -> tuple[list[tuple[str, str]], list[Problem]]:
    """Sorts overrides into (key, text) that name something, and problems for those that do not.

    tree is the configuration without overrides, folders hold the groups' files. Hydra by itself
    stops at the first problem, lets `+anything=1` in, and does not look below `hydra.`.
    """
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    from training.config.yaml_check import NO_CODE, check_reference

    keys = list(_dotted(tree))
    groups = {path.name for path in CONFIGS.iterdir() if path.is_dir()}
    visible = [key for key in keys if not key.startswith("hydra.")] + sorted(groups)
    parser = OverridesParser.create()
    good, problems = [], []
    for typed in overrides:
        text = typed if sweeping else quoted(typed)
        try:
            override = parser.parse_override(text)
        except (HydraException, ValueError, RecursionError):
            fix = f"quote the value, {_quoting(text)}" if "=" in text else meant(text, "data.path")
            if text.partition("=")[2].startswith("["):
                fix = "write a list without blanks, [a,b], or with quotes around it: 'key=[a, b]'"
            problems.append(
                (
                    text if text.strip() else repr(text),
                    NO_VALUE,
                    "is not of the form key=value",
                    fix,
                )
            )
            continue
        key = override.key_or_group
        if override.is_sweep_override():
            cause = "several values for one run"
            fix = f"-m trains once for each; a text with a comma is quoted, {_quoting(text)}"
            if key in keys and OmegaConf.is_list(OmegaConf.select(tree, key)):
                several = shlex.quote(f"{key}=[{text.partition('=')[2]}]")
                fix = f"a list has brackets: {several}"
            if sweeping:  # glob(*)
                cause, fix = "a pattern is no list of values", "name the values, with commas"
            problems.append((text, NO_VALUE, cause, fix))
            continue
        value = typed.partition("=")[2]
        is_text = key in PROMPTS and text != typed
        if _calls_code(override):
            problems.append((key, value, *NO_CODE))
        elif not is_text and (found := check_reference(text)):
            problems.append((key, value, *found))
        elif override.package is not None:
            cause = "settings stay in their place"
            problems.append((f"{key}@{override.package}", value, cause, f"use {key}={value}"))
        elif override.is_delete():
            fix = f"to change it, give {key}=VALUE"
            problems.append(("~" + key, NO_VALUE, "settings cannot be deleted", fix))
        elif key in groups:
            choices = sorted(p.stem for folder in folders for p in (folder / key).glob("*.yaml"))
            value = override.get_value_element_as_str()
            if value in choices or (key, value) == ("experiment", "null"):
                good.append((key, text.lstrip("+")))
            else:
                problems.append(_unknown_choice(key, value, choices))
        elif key.startswith(("hydra/", "hydra.")):
            of_sweeps = key.replace("/", ".").startswith(OF_SWEEPS)
            if not of_sweeps:
                problems.append((key, value, *NOT_HYDRAS))
            elif not sweeping:
                problems.append((key, value, "is of a sweep, and this is one run", "add -m"))
            elif key.startswith("hydra/"):
                choices = GlobalHydra.instance().config_loader().get_group_options(key)
                if value in choices:
                    good.append((key, text))
                else:
                    problems.append(_unknown_choice(key, value, choices))
            elif key.startswith(ELSEWHERE):
                problems.append((key, value, *VALUES_ELSEWHERE))
            elif key.startswith("hydra.sweep.") and key not in keys:
                problems.append(unknown_key(key, value, [k for k in keys if "hydra.sweep." in k]))
            else:
                good.append((key, text))
        elif key in keys:
            good.append((key, text.lstrip("+")))
        else:
            problems.append(unknown_key(key, value, visible))
    return good, problems


def _calls_code(override) -> bool:
    """Whether a key, or one inside the value, is one that Hydra's instantiation obeys."""
    from training.config.yaml_check import CALLS_CODE

    def inside(value: object) -> bool:
        if isinstance(value, dict):
            return any(str(key) in CALLS_CODE for key in value) or any(map(inside, value.values()))
        return isinstance(value, list) and any(map(inside, value))

    parts = re.split(r"[./]", override.key_or_group)
    return not CALLS_CODE.isdisjoint(parts) or inside(override.value())


def meant(text: str, key: str) -> str:
    """The fix for an argument that is no setting: the name of something that is there may be the
    value of `key`."""
    there = key and os.path.exists(text)
    return f"did you mean {shlex.quote(f'{key}={text}')}?" if there else BLANKS


def _quoting(text: str) -> str:
    key, _, value = text.partition("=")
    if key == "lens.prompts":
        return """'lens.prompts=["one","another"]'"""
    return shlex.quote(f'{key}="{shorten(value)}"')


def _dotted(tree, prefix: str = ""):
    """Every key of a nested configuration, with dots, mappings too."""
    from omegaconf import DictConfig

    for key in tree:
        node = tree._get_node(key)
        yield prefix + str(key)
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_interpolation():
            yield from _dotted(node, f"{prefix}{key}.")


def _unknown_choice(group: str, choice: str, choices: list[str]) -> Problem:
    if (group, choice) == ("hydra/sweeper", "optuna"):
        return (group, choice, "is not installed", "pip install hydra-optuna-sweeper")
    near = difflib.get_close_matches(choice, choices, n=1, cutoff=0.8)
    fix = f"did you mean {group}={near[0]}?" if near else f"use one of {', '.join(choices)}"
    return (group, choice, f"no such {group}", fix)


# ------------------------------------------------------------------------------------- commands


def begin_quickly() -> None:
    """For a process that is one command. Nothing of what it loads is garbage, and at its end all of
    it is: to look for some, again and again, is a quarter of the time that a mistake in `model` or
    `data` takes to be answered. A run looks for it again (`command`)."""
    gc.disable()
    atexit.register(gc.freeze)


def command(run: Callable[[Settings], None]) -> Callable[[], None]:
    """Makes run(settings) a command of Hydra's: overrides, --help, --cfg, --multirun and all.

    A single run is composed here; Hydra's own machinery is started for everything else only, so
    no rank of a distributed run makes directories or log files that nobody asked for.
    """

    def begin(settings: Settings) -> None:
        gc.enable()
        run(settings)

    def main() -> None:
        from hydra._internal.utils import get_args_parser

        parser = get_args_parser()
        parser.error, parser.allow_abbrev = _refuse_options, False
        with errors_in_one_line(debug="debug=true" in sys.argv):
            args, unknown = parser.parse_known_intermixed_args()
            if unknown:
                raise ConfigError([_unknown_option(text) for text in unknown])
            check_options(args)
            # Hydra itself wants its options first.
            options = [text for text in sys.argv[1:] if text not in args.overrides]
            sys.argv[1:] = options + args.overrides
            if args.help or args.hydra_help or args.shell_completion or args.info:
                if args.overrides and not args.shell_completion:
                    compose(args.overrides, args.config_dir)
                elif args.config_dir is not None:
                    check_config_dir(args.config_dir)
                if os.environ.get("RANK", "0") == "0":
                    _hydra_main(begin)
                return
            if args.multirun:
                _sweep(begin, args.overrides, check_sweep(args.overrides, args.config_dir))
                return
            settings = compose(args.overrides, args.config_dir)
            if args.cfg:
                sys.argv[1:] = [quoted(argument) for argument in sys.argv[1:]]
                _hydra_main(begin)
            else:
                begin(settings)

    main.__doc__ = run.__doc__
    return main


def check_options(args) -> None:
    """Raises ConfigError for options of Hydra's that are not ours, or do nothing together."""
    for option in ("config_path", "config_name", "experimental_rerun"):
        if getattr(args, option) is not None:
            fix = "add your own files with --config-dir"
            flag = "--" + option.replace("_", "-")
            raise ConfigError([(flag, getattr(args, option), "is not supported", fix)])
    modes = ("run", "cfg", "multirun", "shell_completion", "info", "help", "hydra_help")
    given = ["--" + mode.replace("_", "-") for mode in modes if getattr(args, mode)]
    if len(given) > 1:
        cause = "are not for use together"
        raise ConfigError([(" ".join(given), NO_VALUE, cause, f"use {given[0]} alone")])
    for option in ("package", "resolve"):
        if getattr(args, option) and not args.cfg:
            raise ConfigError([("--" + option, NO_VALUE, "is for --cfg", "add --cfg job")])


def _unknown_option(text: str) -> Problem:
    key, equals, _ = text.partition("=")
    fix = f"settings have no dashes: {text.lstrip('-')}" if equals else "see --help"
    return (key, NO_VALUE, "no such option", fix)


def _refuse_options(message: str) -> None:
    raise ConfigError([("command line", NO_VALUE, message, "see --help")])


def _hydra_main(run: Callable[[Settings], None]) -> None:
    def task(config) -> None:
        with errors_in_one_line(debug=config.debug is True):
            run(_settings_of(config))

    _hydra(task)


def _hydra(task: Callable[["DictConfig"], object]) -> None:
    import hydra

    register_resolvers()
    hydra.main(config_path=str(CONFIGS), config_name="config", version_base="1.3")(task)()


def _settings_of(config: "DictConfig") -> Settings:
    """Of a composition of Hydra's; ConfigError lists every problem."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    keys = [text.partition("=")[0].lstrip("+") for text in HydraConfig.get().overrides.task]
    settings, problems = _built(OmegaConf.to_container(config, resolve=True), keys)
    refuse(problems)
    return settings


def _sweep(run: Callable[[Settings], None], overrides: list[str], plan: "Plan") -> None:
    """The jobs of a multirun, one after the other, and what came out of them."""
    from hydra.core.hydra_config import HydraConfig

    from training.distributed.launch import launch_command
    from training.reporting.sweep import Sweep
    from training.signals import handled, raise_exit

    options = [text for text in sys.argv[1:] if text not in overrides]
    sweep = Sweep(plan, [*launch_command(), sys.argv[0]], options, overrides)

    def task(config) -> float:
        hydra = HydraConfig.get()
        with sweep.job(hydra.job.num, list(map(_as_typed, hydra.overrides.task))) as job:
            try:
                settings = _settings_of(config)
                sweep.settle(job, settings)
                run(settings)
            except Exception as error:
                if config.debug is True:
                    traceback.print_exception(error)
                raise
        return sweep.objective(job)

    # Else Hydra tells what goes wrong in a sweeper by a traceback of its own.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    arguments = sys.argv[:]
    with handled(raise_exit), tempfile.TemporaryDirectory() as unseen:
        sweep.begin()
        # Hydra's record of the sweep is the main rank's.
        folder = str(sweep.folder) if sweep.is_main else unseen
        sys.argv.append(f"hydra.sweep.dir={_escaped(folder)}")
        random.seed(0)  # of shuffle(1,2,3): the same order on all ranks, and when it is begun again
        try:
            _hydra(task)
        except SystemExit as stopped:
            if stopped.code in (130, 143):  # perhaps between two jobs
                sweep.stopped = stopped.code
        except Exception as error:
            if not sweep.jobs:
                cause = f"cannot be used ({format_error(error)})"
                fix = "see its documentation"
                raise ConfigError([("hydra/sweeper", NO_VALUE, cause, fix)]) from error
            sweep.lost = f"hydra/sweeper: {format_error(error)}"
        finally:
            sys.argv[:] = arguments
    sweep.conclude()
    if sweep.exit_code:
        sys.exit(sweep.exit_code)


def settings_command(schema: type) -> Callable:
    """Makes run(settings) a command whose settings are one dataclass: key=value and --help.

    For commands without groups. The dataclass's docstring is the usage line, and each field's
    metadata["help"] says what it is.
    """

    def decorate(run: Callable) -> Callable[[], None]:
        def main() -> None:
            arguments = sys.argv[1:]
            if any(argument in ("-h", "--help") for argument in arguments):
                show_help(schema)
                return
            with errors_in_one_line(debug="debug=true" in arguments), enough_said():
                run(parse(schema, arguments))

        main.__doc__ = schema.__doc__
        return main

    return decorate


@contextlib.contextmanager
def enough_said():
    """What reads the output, such as `| head`, has seen enough: no error, and the end."""
    try:
        yield
        if sys.stdout:
            sys.stdout.flush()
    except BrokenPipeError:
        # Nor can what is left be written at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_out(path: str, content: bytes | dict, key: str = "out") -> None:
    """Writes what a command was asked to write, whole or not at all; a dict as JSON. ConfigError
    when that cannot be done: what was printed is not lost with it."""
    from files import atomic_write

    if isinstance(content, dict):
        content = (json.dumps(content, indent=1) + "\n").encode()
    try:
        atomic_write(Path(path), content)
    except OSError as error:
        refuse([(key, str(path), error.strerror or str(error), "write it elsewhere")])


def show_help(schema: type) -> None:
    """What a command takes: its usage line, and each setting with its default."""
    print(inspect.cleandoc(schema.__doc__), end="\n\n")
    settings = _flat(schema)
    width = max(map(len, settings))
    for name, field in settings.items():
        required = field.default is dataclasses.MISSING
        default = "required" if required else show(field.default)
        print(f"  {name:<{width}} {field.metadata['help']}  [{default}]")


def _flat(schema: type) -> dict[str, dataclasses.Field]:
    """The settings of a dataclass by name; a field that is a dataclass is a group, NAME.KEY."""
    flat = {}
    for field in dataclasses.fields(schema):
        if dataclasses.is_dataclass(field.type):
            flat |= {f"{field.name}.{name}": inner for name, inner in _flat(field.type).items()}
        else:
            flat[field.name] = field
    return flat


def parse(schema: type, arguments: list[str]) -> object:
    """key=value arguments as an instance of the dataclass; ConfigError lists every problem."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser, values, problems = OverridesParser.create(), {}, []
    known = _flat(schema)
    free_text = {name for name, field in known.items() if field.type in (str, str | list[str])}
    for text in arguments:
        key, equals, raw = text.partition("=")
        if key.startswith("--") and equals:
            problems.append(_unknown_option(text))
            continue
        if not equals or not re.fullmatch(r"[\w.]+", key):
            likely = next((key for key in ("checkpoint", "data.path", "runs") if key in known), "")
            problems.append((text, NO_VALUE, "is not of the form key=value", meant(text, likely)))
            continue
        if key not in known:
            problems.append(unknown_key(key, raw, list(known)))
            continue
        is_list = known[key].type is not str and raw.startswith("[") and raw.endswith("]")
        if key in free_text and not is_list:
            # Taken as typed: a prompt may hold anything, and blanks count.
            values[key] = raw
            continue
        try:
            value = parser.parse_override(text).value()
            values[key] = value if isinstance(value, int | float | list | None) else raw
        except (HydraException, ValueError, RecursionError):
            values[key] = raw  # of the wrong type, then
    for field in dataclasses.fields(schema):
        if dataclasses.is_dataclass(field.type):
            prefix = f"{field.name}."
            names = [name for name in values if name.startswith(prefix)]
            group = {name.removeprefix(prefix): values.pop(name) for name in names}
            filled, more = fill(field.type, group, prefix)
            problems += more
            values[field.name] = filled or object.__new__(field.type)  # so that the rest is checked
    settings, more = fill(schema, values)
    refuse(problems + more)
    return settings


class errors_in_one_line:
    """Turns an exception into its one line on stderr and its exit code; debug: the traceback."""

    def __init__(self, debug: bool = False):
        self.debug = debug

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind, error, trace) -> bool:
        if error is None or isinstance(error, SystemExit):
            return False
        if self.debug:
            traceback.print_exception(error)
        elif not isinstance(error, KeyboardInterrupt):
            self.tell(error)
        sys.exit(exit_code_of(error))

    def tell(self, error: BaseException) -> None:
        """Prints it on rank 0; on other ranks only what that rank alone knows."""
        rank = os.environ.get("RANK", "0")
        expected = isinstance(error, ClearheadError)
        if rank != "0" and expected:  # most likely rank 0 has it too; torchrun ends all ranks soon
            time.sleep(WAIT_FOR_RANK_0)
        if rank == "0":
            print(format_error(error, DEBUG), file=sys.stderr)
        elif not expected or error.of_one_rank:
            print(f"rank {rank}: {format_error(error, DEBUG)}", file=sys.stderr)
