"""Every command in README.md and docs/ runs, in short settings, on texts made for it.

The commands are read from the fenced blocks, and from what stands in `backticks`. Each goes by the
first rule of RULES that knows it; one that no rule knows is a failure, so a new page may need a
line here, and a new command of a known program needs none. All run in one folder, in the order of
the pages, where the names that the pages use exist: my.txt, runs/NAME, DIR and the rest.
"""

import importlib
import io
import itertools
import re
import shlex
import shutil
from collections.abc import Callable

import pytest
import torch
from helpers import REPOSITORY, TEXT, TINY
from helpers.texts import prepare, write_source
from helpers.trainings import ForkServer

from model import GPT, ModelConfig
from training.command import check_sweep, compose
from training.hf import to_hf

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
PROGRAMS = ["python", "torchrun", "make", "pip", "wandb", "sbatch", "lm_eval", "jupyter", "git"]

# What makes a training short, whatever it was. Values of the command are overridden.
SHORT = [setting for setting in TINY if not setting.startswith(("model=", "lens=", "wandb="))]
SHORT += ["trainer.max_steps=2", "trainer.batch_size=2", "trainer.micro_batch_size=2"]
SHORT += ["trainer.warmup_steps=1", "trainer.eval_windows=2", "trainer.sample_tokens=2"]
SHORT += ["trainer.compile=false", "data.val_fraction=0.2", "wandb.mode=disabled"]
NO_LENS = "lens.every=0"  # where the command is not about it

# Names of pages that are no names of files, and what stands for them here.
STANDS_FOR = {
    r"hub:[\w/-]+": "path/to/gpt2",
    r"(?<==)[BTPD](?=\s|$)": "2",
    r"trainer\.precision=2": "trainer.precision=fp32",
    r"model\.dropout=2": "model.dropout=0",
    r"\s\.\.\.(?=\s|$)": "",
    r"lens\.layers=\[0,11\]": "lens.layers=[0,1]",
}


def commands() -> dict[str, str]:
    """command line -> the page that it stands on first, in the order of the pages."""
    found = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        variables = {}
        for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
            if assigned := re.fullmatch(r"([A-Z_]+)=\"(.*)\"", line):
                variables[assigned[1]] = assigned[2]
            for name, value in variables.items():
                line = line.replace(f"${name}", value)
            words = shlex.split(line.removeprefix("$ "), comments=True) if _is_command(line) else []
            if words:
                found.setdefault(shlex.join(words), page.name)
        prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
        for line in re.findall(r"`([^`\n]+)`", prose):
            if _is_command(line) and len(words := shlex.split(line)) > 1:
                found.setdefault(shlex.join(words), page.name)
    return found


def _is_command(line: str) -> bool:
    """Also one behind settings of its environment: NAME=value python ..."""
    return re.match(rf"(\$ )?([A-Z_]+=\S+ )*({'|'.join(PROGRAMS)})\s", line) is not None


# --------------------------------------------------------------------------------- how to run them


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The folder in which everything runs, with all that the pages name."""
    folder = tmp_path_factory.mktemp("commands")
    texts = ("my", "big", "tinyshakespeare", "wikitext-2", "books/a", "books/b")
    for name in (f"{text}.txt" for text in texts):
        write_source(folder / name, [TEXT])
    write_source(folder / "corpus" / "sample.txt", [TEXT])
    write_source(folder / "web" / "a.jsonl.gz", TEXT.splitlines())
    write_source(folder / "fineweb" / "a.parquet", TEXT.splitlines())
    for name in ("books", "code"):
        prepare(folder / "my.txt", folder / name, tokenizer="byte")
    torch.manual_seed(1)
    to_hf(GPT(ModelConfig(257, 32, 32, 2, 2, dropout=0.0)), folder / "path" / "to" / "gpt2")
    return folder


@pytest.fixture(scope="module")
def server(home):
    with ForkServer(home) as server:
        run = server.run(home, "model=gpt2-nano", "data.path=my.txt", *SHORT, "name=NAME", NO_LENS)
        assert run.code == 0, run.said
        (home / "runs" / "tutorial").symlink_to("NAME")
        shutil.copytree(home / "runs" / "NAME" / "checkpoints" / "last", home / "mine")
        yield server


@pytest.fixture
def runners(home, server, in_process):
    """Who runs a command: name -> run(words, more), more being what makes it short."""

    def train(words, more):
        if words[0] == "-m":
            check_sweep([*words[1:], *more], None)
            words = one_swept(words)
        asks = words == ["--help"]
        training = server.run(home, *words, *([] if asks else more))
        assert training.code == 0, training.said
        assert ("run directory" in training.said) != asks

    def script(words, more):
        module, *arguments = words
        if module == "scripts.export_hf":  # which never writes into a folder that holds something
            for out in (word[4:] for word in arguments if word.startswith("out=")):
                shutil.rmtree(home / out, ignore_errors=True)
        code, _, err = in_process(importlib.import_module(module).main, home, *arguments, *more)
        assert code == 0, err

    return {"train": train, "script": script}


def one_swept(words: list[str]) -> list[str]:
    """A sweep of two runs: of its first setting with several values two are left, of the others
    one."""
    left, keep = [], 2
    for word in words:
        key, _, value = word.partition("=")
        if "," in value and not value.startswith("["):
            word, keep = f"{key}={','.join(value.split(',')[:keep])}", 1
        left.append(word)
    return left


def train(words: list[str]) -> list[str]:
    """What makes a training short."""
    return SHORT if any(word.startswith("lens") for word in words) else [*SHORT, NO_LENS]


def checked_only(words: list[str]) -> None:
    """torchrun, sbatch: the options are torchrun's, and training knows all settings."""
    from torch.distributed.run import get_args_parser

    if words[0] == "torchrun":
        arguments = get_args_parser().parse_args(words[1:])
        script, overrides = arguments.training_script, arguments.training_script_args
        assert script == "train.py"
    else:
        at = words.index("scripts/slurm.sh")
        overrides = words[at + 1 :]
    if overrides[:1] == ["-m"]:
        check_sweep(overrides[1:], None)
    else:
        compose(overrides)


def in_makefile(words: list[str]) -> None:
    targets = re.findall(r"^(\w+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert words[1] in targets


def files_exist(words: list[str]) -> None:
    for before, word in itertools.pairwise(words):
        if before == "-r":
            assert (REPOSITORY / word).is_file()


# -------------------------------------------------------------------------------------- the rules

NOT_RUN = "not run: "
# (what the command begins with, how it is run or why not, what makes it short). Of training, and of
# a script that has a line, every command is run.
RULES: list[tuple[str, str | Callable, list[str]]] = [
    (r"python train.py (modle=|model.num_heads=5$)", NOT_RUN + "refused; see test_readme.py", []),
    (r"python train.py .*optuna", NOT_RUN + "see campaign_extras.py", []),
    (r"python train.py", "train", []),
    (r"python generate.py", "generate", ["max_new_tokens=3"]),
    (r"python -m scripts.prepare_data", "script", ["data.tokenizer=byte", "workers=1"]),
    (r"python -m scripts.inspect_attention", "script", ["max_tokens=16", "repeated=0"]),
    (r"python -m scripts.evaluate", "script", ["max_length=16", "stride=8"]),
    (r"python -m scripts.(export_hf|compare|plan|attention_ladder)", "script", []),
    (r"python -m scripts.plots", "script", ["out=."]),
    (r"python -m scripts.benchmark ", NOT_RUN + "needs other projects' code, and minutes", []),
    (r"python -m scripts.benchmark_data", NOT_RUN + "measures for a minute", []),
    (r"python -m scripts.benchmark_generate", NOT_RUN + "see test_benchmark_generate.py", []),
    (r"python tests/mutations.py", NOT_RUN + "takes hours", []),
    (r"torchrun|sbatch", checked_only, []),
    (r"make", in_makefile, []),
    (r"pip install -r", files_exist, []),
    (r"pip install", NOT_RUN + "needs the network", []),
    (r"wandb", NOT_RUN + "needs an account", []),
    (r"lm_eval", NOT_RUN + "see campaign_lm_eval.py", []),
]
COMMANDS = commands()


def rule(line: str) -> tuple[str | Callable, list[str]]:
    for start, how, more in RULES:
        if re.match(rf"([A-Z_]+=\S+ )*{start}", line):
            return how, more
    raise AssertionError(f"{COMMANDS[line]}: no rule of this file knows how to run: {line}")


@pytest.mark.parametrize("line", [pytest.param(c, id=f"{p}-{c[:60]}") for c, p in COMMANDS.items()])
def test_it_runs(line, home, runners, monkeypatch):
    how, more = rule(line)
    for name, here in STANDS_FOR.items():
        line = re.sub(name, here, line)
    words = shlex.split(line)
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    if callable(how):
        how(words)
    elif how == "train":
        runners["train"](words[2:], train(words))
    elif how == "generate":
        monkeypatch.setattr("sys.stdin", io.StringIO("The bell\n"))  # of interactive=true
        runners["script"](["generate", *words[2:]], more)
    elif how == "script":
        runners["script"](words[2:], more)
    else:
        assert how.startswith(NOT_RUN)


def test_the_pages_have_commands():
    """The rule that finds them does."""
    pages = set(COMMANDS.values())
    assert {"README.md", "data.md", "lens.md", "scaling.md", "benchmarks.md"} <= pages
    assert len(COMMANDS) > 40
