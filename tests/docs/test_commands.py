"""Commands in README.md and docs/: all settings are checked, and some commands of each kind run.

Commands are read from fenced blocks and from inline code in `backticks`. The settings of every
training are checked. The trainings of RUN and all commands of the scripts in SHORT are executed,
with short settings, in a folder that has the names of the pages: my.txt, runs/NAME, DIR, ...
"""

import importlib
import re
import shlex
import shutil

import pytest
from helpers import REPOSITORY, TEXT, TINY
from helpers.models import tiny_model
from helpers.runs import train_in
from helpers.texts import prepare, write_source

import train
from clearhead.models.huggingface import to_hf

FOLDERS = ("docs", "headlens", "headlens/docs")
PAGES = [page for folder in FOLDERS for page in sorted((REPOSITORY / folder).glob("*.md"))]
PAGES.insert(0, REPOSITORY / "README.md")
PROGRAMS = "python|torchrun|make|pip|wandb|sbatch|lm_eval|jupyter|git"
COMMAND = re.compile(rf"([A-Z_]+=\S+ )*({PROGRAMS})\s")

# Settings that make a training short. They override the settings of the command.
TRAINING = [setting for setting in TINY if not setting.startswith(("model=", "lens=", "wandb="))]
TRAINING += ["trainer.max_steps=2", "trainer.batch_size=2", "trainer.micro_batch_size=2"]
TRAINING += ["trainer.compile=false", "data.val_fraction=0.2", "wandb.mode=disabled"]
# Trainings that are executed: the first command that contains each of these texts.
RUN = ["data=shards", "data.weights", "experiment=induction", "trainer.resume=", "lens.every=20"]
# Settings that make the commands of a script short. All these commands are executed.
SHORT = {
    "generate.py": ["max_new_tokens=3"],
    "scripts.train_tokenizer": ["vocab_size=270"],
    "scripts.prepare_data": ["data.tokenizer=byte", "workers=1"],
    "scripts.inspect_attention": ["max_tokens=16", "repeat_length=0"],
    "scripts.evaluate": ["max_length=16", "stride=8"],
    "scripts.export_hf": [],
    "scripts.export_gguf": [],
    "scripts.compare": [],
    "scripts.compare_heads": [],
    "scripts.view": [],
    "scripts.plan": [],
    "scripts.runs": [],  # last, because it removes what the others read
}
# Not executed: they need other projects, minutes, hours, the network or an account.
ELSEWHERE = {"benchmarks.training", "benchmarks.generate", "benchmarks.gpu", "benchmarks.gpus"}
ELSEWHERE |= {"tests/mutations.py", "wandb", "lm_eval", "scripts.wandb_workspace"}

# Values for placeholders in the pages.
PLACEHOLDERS = {
    r"hub:[\w/-]+@\S+": "out/checkpoint-*",
    r"hub:[\w/-]+": "path/to/gpt2",
    r"(?<==)[BT]\b": "2",
    r"(?<=precision=)P\b": "fp32",
    r"(?<=dropout=)D\b": "0",
    r"\s\.\.\.(?=\s|$)": "",
}


def commands() -> list[str]:
    """Returns all different commands in the order of the pages."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        code = "\n".join(blocks).replace("\\\n", " ")
        for name, value in re.findall(r"^([A-Z_]+)=\"(.*)\"$", code, re.MULTILINE):
            code = code.replace(f"${name}", value)
        lines = [line.removeprefix("$ ") for line in code.splitlines()]
        prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
        lines += re.findall(r"`([^`\n]+)`", prose)
        found += [shlex.split(line, comments=True) for line in lines if COMMAND.match(line)]
    return list(dict.fromkeys(shlex.join(words) for words in found if len(words) > 1))


def arguments_of(kind: str) -> list[list[str]]:
    found = []
    for line in COMMANDS:
        for name, value in PLACEHOLDERS.items():
            line = re.sub(name, value, line)
        words = shlex.split(line)
        while words[0] in ("python", "-m") or re.match(r"[A-Z_]+=", words[0]):
            words.pop(0)
        if words.pop(0) == kind:
            found.append(words)
    return found


COMMANDS = commands()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    for name in ("my", "big", "tinyshakespeare", "wikitext-2", "books/a", "corpus/sample"):
        write_source(folder / f"{name}.txt", [TEXT])
    write_source(folder / "web" / "a.jsonl.gz", TEXT.splitlines())
    write_source(folder / "fineweb" / "a.parquet", TEXT.splitlines())
    for name in ("books", "code", "my-tokens"):
        prepare(folder / "my.txt", folder / name, tokenizer="byte")
    to_hf(tiny_model(vocab_size=257, context_length=32), folder / "path" / "to" / "gpt2")
    for name in ("DIR", "out/checkpoint-20", "out/checkpoint-300"):
        shutil.copytree(folder / "path" / "to" / "gpt2", folder / name)
    (folder / "prompts.txt").write_text("The bell\nThe fox\n")
    settings_page = (REPOSITORY / "docs" / "settings.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```yaml\n(.*?)^```", settings_page, re.DOTALL | re.MULTILINE)
    write_source(folder / "my-configs" / "experiment" / "mine.yaml", [example])
    run = train_in(folder, *TRAINING, "lens=default", "name=NAME")
    (folder / "runs" / "tutorial").symlink_to("NAME")
    shutil.copytree(run, folder / "runs" / "OLD", symlinks=True)
    shutil.copytree(run / "checkpoints" / "last", folder / "mine")
    return folder


def test_every_command_has_a_known_kind():
    assert len(COMMANDS) > 40
    kinds = {*SHORT, *ELSEWHERE, "train.py", "torchrun", "sbatch", "make", "pip"}
    assert sum(len(arguments_of(kind)) for kind in kinds) == len(COMMANDS), kinds
    targets = re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert {words[0] for words in arguments_of("make")} <= set(targets)


@pytest.mark.parametrize("part", RUN)
def test_trainings(home, in_process, part):
    words = next(w for w in arguments_of("train.py") if w[0] != "-m" and part in " ".join(w))
    short = TRAINING if "lens" in part else [*TRAINING, "lens.every=0"]
    code, _, err = in_process(train.main, home, *words, *short)
    assert code == 0, err


@pytest.mark.parametrize("script", SHORT)
def test_scripts(home, in_process, script):
    for words in arguments_of(script):
        if script == "scripts.view" and "write" not in " ".join(words):
            continue  # serves until it is stopped: tests/output/test_live.py starts it
        for word in words:  # neither is written a second time
            if word in ("out=my-tokens", "out=DIR", "out=my-model"):
                shutil.rmtree(home / word[4:], ignore_errors=True)
        main = importlib.import_module(script.removesuffix(".py")).main
        code, _, err = in_process(main, home, *words, *SHORT[script])
        assert code == 0, (words, err)
