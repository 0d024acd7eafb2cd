"""The door: command line and configs/ in, checked settings out, or every problem named.

    @command
    def main(settings: Settings): ...

Hydra composes the YAML files of configs/ with the overrides. Then each group is checked by the
dataclass that stands beside the code it configures. Names are checked without loading torch, so
a mistyped key is answered at once.

A problem is a tuple (key, value, cause, fix) and is shown as the line `key=value: cause; fix`.
Exit codes: 0 done; 2 bad configuration; 3 bad data or checkpoint; 4 failed while running; 130
and 143 stopped by Ctrl-C and SIGTERM.
"""

import dataclasses
import difflib
import importlib
import math
import os
import re
import sys
import traceback
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

if typing.TYPE_CHECKING:
    from data import DataConfig
    from lens import LensConfig
    from model import ModelConfig
    from training.optim import OptimizerConfig
    from training.tracker import WandbConfig

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIGS = REPOSITORY / "configs"

Problem = tuple[str, object, str, str]  # (key, value, cause, fix)
NO_VALUE = object()  # the value of a problem that has none

# Settings whose value is free text: taken as typed, commas, brackets, digits and all.
FREE_TEXT = {
    "name",
    "data.path",
    "trainer.sample_prompt",
    "trainer.resume",
    "trainer.init_from",
    "wandb.project",
    "wandb.name",
    "wandb.group",
}
# Hydra's own settings that take any key.
HYDRA_FREE = ("hydra.job.env_set", "hydra.sweeper", "hydra.launcher", "hydra.callbacks")


class ConfigError(ValueError):
    """Settings that cannot be used: one line for each problem. Commands exit with 2."""

    exit_code = 2

    def __init__(self, problems: list[Problem]):
        self.problems = problems
        super().__init__("\n".join(describe(problem) for problem in problems))


def describe(problem: Problem) -> str:
    key, value, cause, fix = problem
    what = key if value is NO_VALUE else f"{key}={_shown(value)}"
    return f"{what}: {cause}; {fix}"


@dataclass
class TrainerConfig:
    """The loop: how long, in what portions, how often it looks up, and on what it runs."""

    max_steps: int = 120  # optimizer steps
    batch_size: int = 2  # windows per optimizer step, over all ranks
    micro_batch_size: int | None = None  # windows at once on a device; null: the whole share
    warmup_steps: int | None = (
        None  # the learning rate rises; null: a tenth of the run, at most 2000
    )
    grad_clip: float = 1.0  # largest norm of the gradient; 0: no clipping
    eval_every: int = 40  # steps between validations; 0: only at the start and the end
    eval_windows: int = 100  # at most so many validation windows, the same each time
    log_every: int = 1  # steps between lines in the log
    save_every: int = 500  # steps between checkpoints, besides the best and last; 0: only those
    keep: int = 1  # how many of the newest checkpoints stay, besides the best
    precision: str = "auto"  # auto | fp32 | bf16 | fp16
    compile: str | bool = "auto"  # auto | true | false
    device: str = "auto"  # auto | cpu | cuda | mps
    resume: str | bool = "auto"  # auto | must | false | the directory of a run or checkpoint
    init_from: str | None = None  # weights to start from: a checkpoint or Hugging Face directory
    sample_prompt: str = "The"  # what the sample text at each validation continues
    sample_tokens: int = 40  # its length; 0: no samples

    def problems(self) -> list[Problem]:
        """What does not fit: (key, value, cause, fix) for each problem; empty when all is well."""
        found = []
        for key in ("max_steps", "batch_size", "eval_windows", "log_every", "keep"):
            if getattr(self, key) < 1:
                found.append(
                    (key, getattr(self, key), "must be at least 1", f"set {key}=1 or more")
                )
        for key in ("warmup_steps", "eval_every", "save_every", "sample_tokens"):
            if (getattr(self, key) or 0) < 0:
                found.append((key, getattr(self, key), "must not be negative", "use 0 or more"))
        if not 0 <= self.grad_clip < math.inf:
            found.append(
                ("grad_clip", self.grad_clip, "must not be negative", "use 1.0, or 0 for none")
            )
        micro, batch = self.micro_batch_size, self.batch_size
        if micro is not None and not 1 <= micro <= max(1, batch):
            cause = f"must be from 1 to batch_size={batch}"
            found.append(("micro_batch_size", micro, cause, "use a part of the batch, or null"))
        if (self.warmup_steps or 0) > self.max_steps > 0:
            cause = f"the run ends after max_steps={self.max_steps}"
            found.append(("warmup_steps", self.warmup_steps, cause, "use fewer"))
        choices = {
            "precision": ("auto", "fp32", "bf16", "fp16"),
            "compile": ("auto", True, False),
            "device": ("auto", "cpu", "cuda", "mps"),
        }
        for key, allowed in choices.items():
            if (value := getattr(self, key)) not in allowed:
                names = ", ".join(str(choice).lower() for choice in allowed)
                found.append((key, value, "no such choice", f"use one of {names}"))
        if self.resume is True or self.resume == "":
            found.append(
                ("resume", self.resume, "no such choice", "use auto, must, false or a path")
            )
        return found


@dataclass
class Settings:
    """Everything a training run is told. The order is that of configs/config.yaml."""

    seed: int
    name: str | None  # the run's directory is runs/<name>; null: date, time and model
    debug: bool  # true: errors come with their traceback
    parallel: str  # auto | single
    model: "ModelConfig"
    data: "DataConfig"
    optimizer: "OptimizerConfig"
    trainer: TrainerConfig
    lens: "LensConfig"
    wandb: "WandbConfig"


# Where each group's dataclass lives. Loaded when needed: model and data bring torch along.
GROUPS = {
    "model": ("model", "ModelConfig"),
    "data": ("data", "DataConfig"),
    "optimizer": ("training.optim", "OptimizerConfig"),
    "trainer": ("training.config", "TrainerConfig"),
    "lens": ("lens", "LensConfig"),
    "wandb": ("training.tracker", "WandbConfig"),
}
PLAIN = {"seed": int, "name": str | None, "debug": bool, "parallel": str}


# ------------------------------------------------------------------- values -> typed dataclasses


def fill(schema: type, values: dict, prefix: str = "") -> tuple[object | None, list[Problem]]:
    """An instance of the dataclass `schema` from plain values, or None, and every problem found.

    Fields that are absent keep their defaults; the dataclass's own `problems()` is asked last.
    """
    hints = typing.get_type_hints(schema)
    merged = {}  # the defaults, then what was given
    for field in dataclasses.fields(schema):
        if field.default is not dataclasses.MISSING:
            merged[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            merged[field.name] = field.default_factory()
    found = []
    for key, value in values.items():
        if key not in hints:
            found.append(unknown_key(prefix + key, value, [prefix + name for name in hints]))
            continue
        try:
            merged[key] = coerce(value, hints[key])
        except TypeError as error:
            fix = f"such as {_shown(merged[key])}" if key in merged else "see --help"
            found.append((prefix + key, value, str(error), fix))
            merged.setdefault(key, value)
    missing = [name for name in hints if name not in merged]
    found += [
        (prefix + name, NO_VALUE, "missing", f"give it as {prefix}{name}=...") for name in missing
    ]
    if not missing:
        named = {problem[0] for problem in found}
        # Asked of a look-alike: an instance with problems may refuse to exist.
        for key, *rest in schema.problems(types.SimpleNamespace(**merged)):
            if prefix + key not in named:
                found.append((prefix + key, *rest))
    return (None if found else schema(**merged)), found


def coerce(value: object, hint: object) -> object:
    """The value as the type that the dataclass asks for; TypeError says what it should be."""
    if isinstance(hint, types.UnionType):
        choices = typing.get_args(hint)
        for choice in sorted(choices, key=lambda choice: choice is not type(value)):
            try:
                return coerce(value, choice)
            except TypeError:
                continue
        raise TypeError(f"must be {_name(hint)}")
    if value is None and hint is type(None):
        return None
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and not isinstance(value, bool):
        if isinstance(value, int):
            return value
        if isinstance(value, float) and value.is_integer():
            return int(value)  # 1e5 steps
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if hint is str and isinstance(value, str | int | float):
        return str(value)
    if typing.get_origin(hint) is list and isinstance(value, list | tuple):
        return [coerce(item, typing.get_args(hint)[0]) for item in value]
    raise TypeError(f"must be {_name(hint)}")


def _name(hint: object) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if isinstance(hint, types.UnionType):
        return " or ".join(_name(choice) for choice in typing.get_args(hint))
    if hint is type(None):
        return "null"
    if typing.get_origin(hint) is list:
        return f"a list of {_name(typing.get_args(hint)[0]).removeprefix('a ')}s"
    return names[hint]


def unknown_key(key: str, value: object, known: list[str]) -> Problem:
    """The problem of a key that does not exist, with the nearest one that does."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.7)
    if not near:  # the right word in the wrong group, or without one
        last = key.rsplit(".", 1)[-1]
        by_last = {name.rsplit(".", 1)[-1]: name for name in reversed(known)}
        near = [by_last[hit] for hit in difflib.get_close_matches(last, by_last, n=1, cutoff=0.7)]
    if near:
        return (key, value, "no such setting", f"did you mean {near[0]}?")
    group = key.rpartition(".")[0]
    there = [name.removeprefix(group + ".") for name in known if name.startswith(group + ".")]
    fix = f"{group} has {', '.join(there)}" if group and there else "--help lists all settings"
    return (key, value, "no such setting", fix)


# ----------------------------------------------------------------- command line -> plain values


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
    search = [f"hydra.searchpath=[file://{os.path.abspath(config_dir)}]"] if config_dir else []
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        good, problems = check_names(overrides, search)
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
    if problems or more:
        raise ConfigError(problems + more)
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
    first = [values[0] for values in variants]
    for place, values in enumerate(variants):
        for value in values if len(values) > 1 or place == 0 else []:
            try:
                compose([*first[:place], value, *first[place + 1 :]], config_dir)
            except ConfigError as error:
                problems += [problem for problem in error.problems if problem not in problems]
    if problems:
        raise ConfigError(problems)


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
    if not equals or key.lstrip("+") not in FREE_TEXT or plain:
        return text
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{key}="{escaped}"'


def check_names(
    overrides: list[str], search: list[str]
) -> tuple[list[tuple[str, str]], list[Problem]]:
    """Sorts overrides into (key, text) that name something, and problems for those that do not.

    Hydra by itself stops at the first, lets `+anything=1` in, and does not look below `hydra.`.
    """
    from hydra import compose as hydra_compose
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    tree = hydra_compose("config", search, return_hydra_config=True)
    keys = list(_dotted(tree))
    groups = {path.name for path in CONFIGS.iterdir() if path.is_dir()}
    visible = [key for key in keys if not key.startswith("hydra.")] + sorted(groups)
    parser = OverridesParser.create()
    good, problems = [], []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException:
            fix = f"quote the value, {_quoting(text)}" if "=" in text else "see --help"
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
            wrong = [choice for choice in value.split(",") if not _has_choice(key, choice, search)]
            if wrong:
                problems.append(_unknown_choice(key, wrong[0]))
            else:
                good.append((key, text.lstrip("+")))
        elif key.startswith("hydra/") or key.startswith(HYDRA_FREE) or key in keys:
            good.append((key, text.lstrip("+")))
        elif key.startswith("hydra."):
            problems.append(unknown_key(key, value, [k for k in keys if k.startswith("hydra.")]))
        else:
            problems.append(unknown_key(key, value, visible))
    return good, problems


def _quoting(text: str) -> str:
    key, _, value = text.partition("=")
    return f"""'{key}="{value}"'"""


def _dotted(tree, prefix: str = ""):
    """Every key of a nested configuration, with dots, mappings too."""
    from omegaconf import DictConfig

    for key in tree:
        node = tree._get_node(key)
        yield prefix + str(key)
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_interpolation():
            yield from _dotted(node, f"{prefix}{key}.")


def _choices(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def _has_choice(group: str, choice: str, search: list[str]) -> bool:
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.object_type import ObjectType

    loader = GlobalHydra.instance().config_loader()
    if search:  # a folder of the user's, given with --config-dir
        folder = search[0].split("file://")[1].rstrip("]")
        if os.path.isfile(os.path.join(folder, group, f"{choice}.yaml")):
            return True
    return choice in loader.get_group_options(group, ObjectType.CONFIG)


def _unknown_choice(group: str, choice: str) -> Problem:
    choices = _choices(group)
    near = difflib.get_close_matches(choice, choices, n=1, cutoff=0.6)
    fix = f"did you mean {group}={near[0]}?" if near else f"use one of {', '.join(choices)}"
    return (group, choice, f"no such {group}", fix)


def build(values: dict, touched: set[str] | None = None) -> tuple[Settings | None, list[Problem]]:
    """Typed settings from the composed plain values, and every problem found.

    With `touched`, only those groups are checked and no settings returned: the others are as
    shipped, and some of them would load torch.
    """
    parts, problems = {}, []
    for key, value in values.items():
        if key in PLAIN:
            try:
                parts[key] = coerce(value, PLAIN[key])
            except TypeError as error:
                problems.append((key, value, str(error), "see configs/config.yaml"))
        elif key in GROUPS:
            if touched is None or key in touched:
                module, name = GROUPS[key]
                if not isinstance(value, dict):
                    problems.append((key, value, "is a group of settings", f"use {key}.NAME=VALUE"))
                    continue
                schema = getattr(importlib.import_module(module), name)
                parts[key], found = fill(schema, value, f"{key}.")
                problems += found
        else:
            problems.append(unknown_key(key, value, [*PLAIN, *GROUPS]))
    name = parts.get("name")
    if name is not None and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.=,+-]*", name):
        cause = "becomes the folder runs/<name>"
        problems.append(("name", name, cause, "use letters, digits and . _ - only"))
    if not 0 <= (seed := parts.get("seed", 0)) < 2**63:
        problems.append(("seed", seed, "must be from 0 to 2^63 - 1", "use seed=0"))
    if (parallel := parts.get("parallel", "auto")) not in ("auto", "single"):
        problems.append(("parallel", parallel, "no such choice", "use auto or single"))
    problems += cross_problems(parts)
    return (Settings(**parts) if not problems and touched is None else None), problems


def cross_problems(parts: dict) -> list[Problem]:
    """What does not fit together across groups."""
    from_data, from_model = parts.get("data"), parts.get("model")
    if from_data is None or from_model is None:
        return []
    from data import TOKENIZERS

    found = []
    if from_data.max_length > from_model.context_length:
        cause = f"the model reads at most model.context_length={from_model.context_length} tokens"
        fix = f"use data.max_length={from_model.context_length} or less"
        found.append(("data.max_length", from_data.max_length, cause, fix))
    needed = TOKENIZERS[from_data.tokenizer]
    if from_model.vocab_size < needed:
        cause = f"data.tokenizer={from_data.tokenizer} has {needed} ids"
        found.append(("model.vocab_size", from_model.vocab_size, cause, f"use {needed} or more"))
    return found


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
                _hydra_main(run)
                return
            if args.multirun:
                check_sweep(args.overrides, args.config_dir)
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
            if problems:
                raise ConfigError(problems)
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
                for field in dataclasses.fields(schema):
                    required = field.default is dataclasses.MISSING
                    default = "required" if required else _shown(field.default)
                    print(f"  {field.name:<14} {field.metadata['help']}  [{default}]")
                return
            with errors_in_one_line(debug="debug=true" in arguments):
                run(parse(schema, arguments))

        main.__doc__ = schema.__doc__
        return main

    return decorate


def parse(schema: type, arguments: list[str]) -> object:
    """key=value arguments as an instance of the dataclass; ConfigError lists every problem."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser, values, problems = OverridesParser.create(), {}, []
    free_text = {name for name, hint in typing.get_type_hints(schema).items() if hint is str}
    for text in arguments:
        key, equals, raw = text.partition("=")
        if not equals or not re.fullmatch(r"\w+", key):
            problems.append((text, NO_VALUE, "is not of the form key=value", "see --help"))
            continue
        if key in free_text:  # taken as typed: a prompt may hold anything, and blanks count
            values[key] = raw
            continue
        try:
            value = parser.parse_override(text).value()
            values[key] = value if isinstance(value, int | float | None) else raw
        except HydraException:
            values[key] = raw  # of the wrong type, then
    settings, more = fill(schema, values)
    if problems or more:
        raise ConfigError(problems + more)
    return settings


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


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
        elif os.environ.get("RANK", "0") == "0" and not isinstance(error, KeyboardInterrupt):
            print(_one_line(error), file=sys.stderr)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 4))


def _one_line(error: BaseException) -> str:
    if hasattr(error, "exit_code"):  # ours: worded for the user
        return str(error)
    text = " ".join(str(error).split()) or "no further word"
    return f"{type(error).__name__}: {text}; run again with debug=true for the traceback"
