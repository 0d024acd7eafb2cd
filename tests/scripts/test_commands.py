"""Every command in README.md and docs/: settings are checked, a few commands of each kind are run.

The commands are read from the fenced blocks and from what stands in `backticks`. The arguments of
every training are checked; those of `RUN` and all scripts of SHORT are run, with short settings, in
one folder where the names that the pages use exist: my.txt, runs/NAME, DIR and the rest.
"""

import importlib
import io
import re
import shlex
import shutil

import pytest
import torch
from helpers import REPOSITORY, TEXT, TINY
from helpers.settings import settings
from helpers.texts import prepare, write_source

import train
from model import GPT, ModelConfig
from training.command import check_sweep, compose
from training.hf import to_hf

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
PROGRAMS = "python|torchrun|make|pip|wandb|sbatch|lm_eval|jupyter|git"

# What makes a training short; overrides the values of the command.
TRAINING = [setting for setting in TINY if not setting.startswith(("model=", "lens=", "wandb="))]
TRAINING += ["trainer.max_steps=2", "trainer.batch_size=2", "trainer.micro_batch_size=2"]
TRAINING += ["trainer.compile=false", "data.val_fraction=0.2", "wandb.mode=disabled"]
# Trainings that are run: the first command in which each of these stands.
RUN = ["data=shards", "data.weights", "experiment=induction", "trainer.resume=", "lens.every=20"]
# What makes the commands of a script short. All of them are run.
SHORT = {
    "generate.py": ["max_new_tokens=3"],
    "scripts.prepare_data": ["data.tokenizer=byte", "workers=1"],
    "scripts.inspect_attention": ["max_tokens=16", "repeated=0"],
    "scripts.evaluate": ["max_length=16", "stride=8"],
    "scripts.export_hf": [],
    "scripts.compare": [],
    "scripts.plan": [],
    "scripts.attention_ladder": [],
    "scripts.plots": ["out=."],
}
# Not run: they need other projects, minutes, hours, the network or an account.
ELSEWHERE = {"scripts.benchmark", "scripts.benchmark_data", "scripts.benchmark_generate"}
ELSEWHERE |= {"tests/mutations.py", "wandb", "lm_eval"}
REFUSED = re.compile(r"modle=|num_heads=5$|optuna")  # see test_readme.py, campaign/extras.py

# Names in the pages that stand for something, and what stands for them here.
STANDS_FOR = {
    r"hub:[\w/-]+": "path/to/gpt2",
    r"(?<==)[BTPD](?=\s|$)": "2",
    r"trainer\.precision=2": "trainer.precision=fp32",
    r"model\.dropout=2": "model.dropout=0",
    r"\s\.\.\.(?=\s|$)": "",
    r"lens\.layers=\[0,11\]": "lens.layers=[0,1]",
}


def is_command(line: str) -> bool:
    return re.match(rf"(\$ )?([A-Z_]+=\S+ )*({PROGRAMS})\s", line) is not None


def commands() -> dict[str, str]:
    """command line -> the first page with it, in the order of the pages."""
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
            words = shlex.split(line.removeprefix("$ "), comments=True) if is_command(line) else []
            if words:
                found.setdefault(shlex.join(words), page.name)
        prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
        for line in re.findall(r"`([^`\n]+)`", prose):
            if is_command(line) and len(words := shlex.split(line)) > 1:
                found.setdefault(shlex.join(words), page.name)
    return found


def arguments_of(kind: str) -> list[list[str]]:
    """The arguments of all commands of a program, script or module."""
    found = []
    for line in COMMANDS:
        for name, here in STANDS_FOR.items():
            line = re.sub(name, here, line)
        words = shlex.split(line)
        while re.match(r"[A-Z_]+=", words[0]):
            words = words[1:]
        words = words[1:] if words[0] == "python" else words
        words = words[1:] if words[0] == "-m" else words
        if words[0] == kind:
            found.append(words[1:])
    return found


COMMANDS = commands()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    texts = ("my", "big", "tinyshakespeare", "wikitext-2", "books/a", "books/b")
    for name in (f"{text}.txt" for text in texts):
        write_source(folder / name, [TEXT])
    write_source(folder / "corpus" / "sample.txt", [TEXT])
    write_source(folder / "web" / "a.jsonl.gz", TEXT.splitlines())
    write_source(folder / "fineweb" / "a.parquet", TEXT.splitlines())
    for name in ("books", "code", "my-tokens"):
        prepare(folder / "my.txt", folder / name, tokenizer="byte")
    torch.manual_seed(1)
    to_hf(GPT(ModelConfig(257, 32, 32, 2, 2, dropout=0.0)), folder / "path" / "to" / "gpt2")
    shutil.copytree(folder / "path" / "to" / "gpt2", folder / "DIR")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        given = ["model=gpt2-nano", "data.path=my.txt", *TRAINING, "name=NAME", "lens.every=0"]
        run = train.Trainer(settings(*given))
        run.train()
        run.close(0)
    (folder / "runs" / "tutorial").symlink_to("NAME")
    shutil.copytree(folder / "runs" / "NAME" / "checkpoints" / "last", folder / "mine")
    return folder


def test_every_command_is_of_a_kind_that_is_checked():
    assert len(COMMANDS) > 40
    kinds = {*SHORT, *ELSEWHERE, "train.py", "torchrun", "sbatch", "make", "pip"}
    assert sum(len(arguments_of(kind)) for kind in kinds) == len(COMMANDS), kinds
    targets = re.findall(r"^(\w+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert {words[0] for words in arguments_of("make")} <= set(targets)


def test_settings_of_every_training(home, monkeypatch):
    from torch.distributed.run import get_args_parser

    monkeypatch.chdir(home)
    given = arguments_of("train.py")
    for words in arguments_of("torchrun"):
        given.append(get_args_parser().parse_args(words).training_script_args)
    given += [words[words.index("scripts/slurm.sh") + 1 :] for words in arguments_of("sbatch")]
    for words in given:
        if REFUSED.search(" ".join(words)) or words == ["--help"]:
            continue
        if words[:1] == ["-m"]:
            check_sweep(words[1:], None)
        else:
            compose(words)


@pytest.mark.parametrize("part", RUN)
def test_trainings(home, in_process, part):
    words = next(w for w in arguments_of("train.py") if w[0] != "-m" and part in " ".join(w))
    short = TRAINING if "lens" in part else [*TRAINING, "lens.every=0"]
    code, _, err = in_process(train.main, home, *words, *short)
    assert code == 0, err


@pytest.mark.parametrize("script", SHORT)
def test_scripts(home, in_process, monkeypatch, script):
    for words in arguments_of(script):
        monkeypatch.setattr("sys.stdin", io.StringIO("The bell\n"))  # of interactive=true
        for word in words:  # neither is written a second time
            if word in ("out=my-tokens", "out=DIR", "out=my-model"):
                shutil.rmtree(home / word[4:], ignore_errors=True)
        main = importlib.import_module(script.removesuffix(".py")).main
        code, _, err = in_process(main, home, *words, *SHORT[script])
        assert code == 0, (words, err)
