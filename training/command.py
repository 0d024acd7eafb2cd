"""The door: command line and configs/ in, checked settings out, or every problem named.

    @command
    def main(settings: Settings): ...

Hydra composes the YAML files of configs/ with the overrides; training/config.py checks the
values. Names are checked first and without loading torch, so a mistyped key is answered at once.

Exit codes: 0 done; 2 bad configuration; 3 bad data or checkpoint; 4 failed while running; 130
and 143 stopped by Ctrl-C and SIGTERM.
"""

import dataclasses
import difflib
import os
import re
import sys
import tempfile
import time
import traceback
import typing
from collections.abc import Callable
from pathlib import Path

from training.config import (
    CONFIGS,
    GROUPS,
    NO_VALUE,
    REPOSITORY,
    ConfigError,
    Problem,
    Settings,
    build,
    fill,
    refuse,
    shown,
    unknown_key,
)
from training.errors import one_line

if typing.TYPE_CHECKING:
    from omegaconf import DictConfig

# Settings whose value is free text: taken as typed, commas, brackets, digits and all.
FREE_TEXT = {
    "name",
    "data.path",
    "data.val_path",
    "data.text_key",
    "trainer.sample_prompt",
    "trainer.resume",
    "trainer.init_from",
    "wandb.project",
    "wandb.name",
    "wandb.group",
}
WAIT_FOR_RANK_0 = 10  # seconds
BLANKS = "write key=value without blanks, or with quotes around it: 'key=some words'"
# Hydra's own settings that take any key.
HYDRA_FREE = ("hydra.job.env_set", "hydra.sweeper", "hydra.launcher", "hydra.callbacks")


# ---------------------------------------------------------------------- overrides -> settings


def compose(overrides: list[str], config_dir: str | None = None) -> Settings:
    """The settings that configs/ and these overrides make.

    Raises ConfigError listing every problem.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    register_resolvers()
    if config_dir and not os.path.isdir(config_dir):
        raise ConfigError([("--config-dir", config_dir, "no such folder", "check the path")])
    overrides = [quoted(text) for text in overrides]
    # A folder of the user's own, beside configs/.
    search = [f"hydra.searchpath=[file://{os.path.abspath(config_dir)}]"] if config_dir else []
    folders = [CONFIGS, Path(config_dir)] if config_dir else [CONFIGS]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        tree = hydra_compose("config", search, return_hydra_config=True)
        good, problems = check_names(overrides, tree, folders)
        try:
            config = hydra_compose("config", search + [text for _, text in good])
            values = OmegaConf.to_container(config, resolve=True)
        except (HydraException, OmegaConfBaseException) as error:
            cause = str(error).strip().splitlines()[0].rstrip(".")
            problems.append(("command line", " ".join(overrides), cause, "see --help"))
            raise ConfigError(problems) from error
    # First what was touched: most mistakes are found there, before torch is loaded.
    touched = {key.split(".")[0] for key, _ in good}
    if "experiment" in touched:
        touched = set(GROUPS)
    if touched & {"model", "data"}:
        touched |= {"model", "data"}
    _, more = build(values, touched)
    if not problems and not more:
        settings, more = build(values)
    refuse(problems + more)
    return settings


def check_sweep(overrides: list[str], config_dir: str | None) -> None:
    """Checks every value that a multirun will try, before its first job starts.

    Each swept value is composed with the first of the others. Raises ConfigError with all problems.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    variants: list[list[str]] = []  # for each override, the overrides it stands for
    for text in overrides:
        try:
            override = OverridesParser.create().parse_override(text)
            choices = list(override.sweep_string_iterator()) if override.is_sweep_override() else []
        except (HydraException, TypeError, ValueError):
            choices = []  # no override at all, named by compose; or an interval, which has no list
        variants.append([f"{override.key_or_group}={c}" for c in choices] or [text])
    problems: list[Problem] = []
    fixed_name = [v[0] for v in variants if v[0].lstrip("+").startswith("name=") and len(v) == 1]
    if fixed_name and any(len(values) > 1 for values in variants):
        fix = "leave it out, or give a name for each value; wandb.group=NAME holds them together"
        problems.append((fixed_name[0], NO_VALUE, "several runs cannot share one directory", fix))
    first = [values[0] for values in variants]
    for place, values in enumerate(variants):
        for value in values if len(values) > 1 or place == 0 else []:
            try:
                compose([*first[:place], value, *first[place + 1 :]], config_dir)
            except ConfigError as error:
                problems += [problem for problem in error.problems if problem not in problems]
    refuse(problems)


def register_resolvers() -> None:
    """`${repository:}` in a YAML file is the folder of this repository."""
    from omegaconf import OmegaConf

    if not OmegaConf.has_resolver("repository"):
        OmegaConf.register_new_resolver("repository", lambda: str(REPOSITORY))


def quoted(text: str) -> str:
    """An override whose value is free text, quoted for Hydra's grammar; any other as it is.

    Left alone: what is quoted already, a list, a reference ${...}, and null, true and false.
    """
    key, equals, value = text.partition("=")
    whole = (("'", "'"), ('"', '"'), ("[", "]"), ("${", "}"))
    plain = value in ("", "null", "true", "false") or any(
        value.startswith(a) and value.endswith(b) for a, b in whole
    )
    if not equals or key.lstrip("+") not in FREE_TEXT | {"lens.prompts"} or plain:
        return text
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{key}=["{escaped}"]' if "prompts" in key else f'{key}="{escaped}"'


def check_names(
    overrides: list[str], tree: "DictConfig", folders: list[Path]
) -> tuple[list[tuple[str, str]], list[Problem]]:
    """Sorts overrides into (key, text) that name something, and problems for those that do not.

    tree is the configuration without overrides, folders hold the groups' files. Hydra by itself
    stops at the first problem, lets `+anything=1` in, and does not look below `hydra.`.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    keys = list(_dotted(tree))
    groups = {path.name for path in CONFIGS.iterdir() if path.is_dir()}
    visible = [key for key in keys if not key.startswith("hydra.")] + sorted(groups)
    parser = OverridesParser.create()
    good, problems = [], []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException:
            fix = f"quote the value, {_quoting(text)}" if "=" in text else BLANKS
            problems.append((text, NO_VALUE, "is not of the form key=value", fix))
            continue
        if override.is_sweep_override():
            fix = f"-m trains once for each; a text with a comma is quoted, {_quoting(text)}"
            problems.append((text, NO_VALUE, "several values for one run", fix))
            continue
        key, value = override.key_or_group, override.get_value_element_as_str()
        if override.is_delete():
            fix = f"to change it, give {key}=VALUE"
            problems.append(("~" + key, NO_VALUE, "settings cannot be deleted", fix))
        elif key in groups:
            choices = sorted(p.stem for folder in folders for p in (folder / key).glob("*.yaml"))
            if value in choices or (key, value) == ("experiment", "null"):
                good.append((key, text.lstrip("+")))
            else:
                problems.append(_unknown_choice(key, value, choices))
        elif key.startswith("hydra/") or key.startswith(HYDRA_FREE) or key in keys:
            good.append((key, text.lstrip("+")))
        elif key.startswith("hydra."):
            problems.append(unknown_key(key, value, [k for k in keys if k.startswith("hydra.")]))
        else:
            problems.append(unknown_key(key, value, visible))
    return good, problems


def _quoting(text: str) -> str:
    key, _, value = text.partition("=")
    if key == "lens.prompts":
        return """'lens.prompts=["one","another"]'"""
    return f"""'{key}="{value}"'"""


def _dotted(tree, prefix: str = ""):
    """Every key of a nested configuration, with dots, mappings too."""
    from omegaconf import DictConfig

    for key in tree:
        node = tree._get_node(key)
        yield prefix + str(key)
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_interpolation():
            yield from _dotted(node, f"{prefix}{key}.")


def _unknown_choice(group: str, choice: str, choices: list[str]) -> Problem:
    near = difflib.get_close_matches(choice, choices, n=1, cutoff=0.8)
    fix = f"did you mean {group}={near[0]}?" if near else f"use one of {', '.join(choices)}"
    return (group, choice, f"no such {group}", fix)


# ------------------------------------------------------------------------------------- commands


def command(run: Callable[[Settings], None]) -> Callable[[], None]:
    """Makes run(settings) a command of Hydra's: overrides, --help, --cfg, --multirun and all.

    A single run is composed here; Hydra's own machinery is started for everything else only, so
    no rank of a distributed run makes directories or log files that nobody asked for.
    """

    def main() -> None:
        from hydra._internal.utils import get_args_parser

        parser = get_args_parser()
        args, unknown = parser.parse_known_args()
        with errors_in_one_line(debug="debug=true" in args.overrides):
            if unknown:
                raise ConfigError([(unknown[0], NO_VALUE, "no such option", "see --help")])
            for option in ("config_path", "config_name", "experimental_rerun"):
                if getattr(args, option):
                    flag = "--" + option.replace("_", "-")
                    fix = "add your own files with --config-dir"
                    raise ConfigError([(flag, getattr(args, option), "is not supported", fix)])
            if args.help or args.hydra_help or args.shell_completion or args.info:
                if os.environ.get("RANK", "0") == "0":
                    _hydra_main(run)
                return
            if args.multirun:
                check_sweep(args.overrides, args.config_dir)
                with tempfile.TemporaryDirectory() as unseen:
                    if os.environ.get("RANK", "0") != "0":  # Hydra's record is the main rank's
                        sys.argv.append(f"hydra.sweep.dir={unseen}")
                    _hydra_main(run)
                return
            settings = compose(args.overrides, args.config_dir)
            if args.cfg:
                sys.argv[1:] = [quoted(argument) for argument in sys.argv[1:]]
                _hydra_main(run)
            else:
                run(settings)

    main.__doc__ = run.__doc__
    return main


def _hydra_main(run: Callable[[Settings], None]) -> None:
    import hydra
    from omegaconf import OmegaConf

    register_resolvers()

    def task(config) -> None:
        settings, problems = build(OmegaConf.to_container(config, resolve=True))
        with errors_in_one_line(debug=config.debug is True):
            refuse(problems)
            run(settings)

    hydra.main(config_path=str(CONFIGS), config_name="config", version_base="1.3")(task)()


def settings_command(schema: type) -> Callable:
    """Makes run(settings) a command whose settings are one dataclass: key=value and --help.

    For commands without groups. The dataclass's docstring is the usage line, and each field's
    metadata["help"] says what it is.
    """

    def decorate(run: Callable) -> Callable[[], None]:
        def main() -> None:
            arguments = sys.argv[1:]
            if any(argument in ("-h", "--help") for argument in arguments):
                print(schema.__doc__, end="\n\n")
                for name, field in _flat(schema).items():
                    required = field.default is dataclasses.MISSING
                    default = "required" if required else shown(field.default)
                    print(f"  {name:<14} {field.metadata['help']}  [{default}]")
                return
            with errors_in_one_line(debug="debug=true" in arguments):
                run(parse(schema, arguments))

        main.__doc__ = schema.__doc__
        return main

    return decorate


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
        if not equals or not re.fullmatch(r"[\w.]+", key):
            problems.append((text, NO_VALUE, "is not of the form key=value", BLANKS))
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
        except HydraException:
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
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 4))

    def tell(self, error: BaseException) -> None:
        """On rank 0; on others what is this rank's own affair."""
        rank, line = os.environ.get("RANK", "0"), one_line(error)
        if not (expected := hasattr(error, "exit_code")):
            line += "; run again with debug=true for the traceback"
        if rank == "0":
            print(line, file=sys.stderr)
            return
        if expected:  # most likely rank 0 has it too; torchrun ends all ranks when one has ended
            time.sleep(WAIT_FOR_RANK_0)
        if getattr(error, "of_one_rank", not expected):
            print(f"rank {rank}: {line}", file=sys.stderr)
