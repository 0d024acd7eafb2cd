"""Invalid input: key, error type and exit code of each problem.

Readers of texts have more kinds of bad input: tests/tokens/test_readers.py. How errors are worded
and printed: tests/test_messages.py.
"""

import functools
import math
import os
import shlex

import pytest
from helpers import TINY
from helpers.refusals import printed_keys, refused, time_limit
from helpers.settings import settings
from helpers.tally import tally

import generate
import train
from clearhead.config import Config, compose
from clearhead.config.command_line import parse
from clearhead.config.validation import validate
from clearhead.config.yaml_files import default_values, defaults_and_meanings
from clearhead.errors import ConfigError
from generate import GenerateConfig
from scripts import inspect_attention, prepare_data

FAULT = "the bad-input table"


@pytest.fixture(autouse=True)
def no_endless_reading():
    with time_limit():
        yield


def files_in(folder) -> set[str]:
    return {path.name for path in folder.rglob("*")}


def check_each(function, mistakes, keys=()) -> None:
    """Checks that each invalid input causes exactly one problem. An input is one or more arguments;
    the key of the problem is that of the first argument, or the one in `keys`."""
    for mistake in mistakes:
        arguments = mistake if isinstance(mistake, list) else [mistake]
        key = arguments[0].partition("=")[0].lstrip("+")
        tally(FAULT)
        try:
            with refused(ConfigError, dict(keys).get(arguments[0], key), exit_code=2):
                function(arguments)
        except (AssertionError, pytest.fail.Exception) as error:
            raise AssertionError(f"{str(arguments)[:200]}: {error}") from error


# Types; ranges; choices; empty text and names; rules between settings.
VALUES = """
optimizer.lr=abc optimizer.lr=[1] optimizer.betas=0.9 model.num_layers=1.5 model.qkv_bias=1
model.emb_dim=null seed=x seed={a:1} seed= wandb.log_model=often
optimizer.weight_decay=-1 optimizer.min_lr_ratio=2 optimizer.decay_fraction=0 optimizer.eps=0
optimizer.out_proj_lr_ratio=0
optimizer.betas=[0.9] model.num_layers=0 model.dropout=1.5 data.val_fraction=1 data.stride=0
name=2026 wandb.project=null lens.prompts=[a,1]
trainer.max_minutes=0 trainer.max_minutes=five
trainer.max_steps=0 trainer.warmup_steps=-1 trainer.batch_size=1e9 trainer.sample_tokens=1e9
trainer.threads=0 trainer.threads=1025
lens.max_percent=0 lens.max_percent=101
lens.max_tokens=1 lens.max_tokens=1025 lens.repeat_length=1 parallel.timeout=0
parallel.timeout=1800 seed=-1
seed=99999999999999999999
optimizer.schedule=linear model.attention=flash data.tokenizer=x data.synthetic=maybe
trainer.precision=fp8 trainer.compile=maybe trainer.device=tpu trainer.resume=true
trainer.micro_batch_size=some wandb.mode=of wandb.log_model=true parallel.strategy=many
data.path= name= data.val_path= wandb.project= lens.prompts=[''] name=../x name=.. name=-rf
wandb.project=team/a
model.num_heads=5 model.attention=flex data.max_length=2048
trainer.micro_batch_size=3 data.weights=[1,2]
data.synthetic=induction
"""
NO_PROMPTS = ["lens.prompts=[]", "lens.repeat_length=0"]
LONG_VALUES = ["name=" + "a" * 129, "optimizer.lr=1" + "0" * 400]
LONG_VALUES += [
    f"lens.prompts=[{','.join('a' * 21)}]",
    f"wandb.group={'g' * 129}",
    f"wandb.tags=[a,{'t' * 65}]",
]


def test_values():
    keys = {"data.synthetic=induction": "data.path"}
    check_each(lambda given: settings(*given), [*VALUES.split(), *LONG_VALUES, NO_PROMPTS], keys)
    settings(*NO_PROMPTS, "lens.every=0")


# Arguments: the key of the problem. "hydra" is the key of Hydra's own messages; that of an argument
# which Hydra cannot read is the complete argument.
NAMES = {
    "modle=gpt2-small": "modle",
    "max_step=1": "max_step",
    "+model.typo=1": "model.typo",
    "++model.num_head=1": "model.num_head",
    "+optimizer._target_=os.system": "optimizer._target_",
    "hydra.ouput=x": "hydra.ouput",
    "~seed": "seed",
    "data=text": "data.path",
    "data.path=[]": "data.path",
    "model={emb_dim:3}": "model.num_heads",
    "model=gpt2-smal": "model",
    "data=mine.txt": "data",
    "hydra/launcher=none": "hydra/launcher",
    "wandb=null": "hydra",
    "+seed=1": "hydra",
    "=1": "hydra",
    "seed=1,2": "hydra",
    "seed=${sead}": "hydra",
    "name=${model}": "name",
    "name=a\0b": "name",
    "name=a\nb": "name",
    "seed=a(b": "seed",
    **{text: text for text in ("foo", "", "wandb.tags=[a,", 'wandb.group="a', "name={a}.txt")},
}


def test_names_and_syntax():
    for argument, key in NAMES.items():
        tally(FAULT)
        with refused(ConfigError, key, exit_code=2):
            compose([argument])


def test_hints_about_quotes_are_arguments():
    """With them, the value is a text. An argument without = has no key."""
    script = functools.partial(parse, GenerateConfig)
    for read, given, wrong, key in (
        (compose, "name={a}.txt", "name={a}.txt", "name"),
        (script, "checkpoint=[a", "checkpoint", "checkpoint"),
    ):
        with refused(ConfigError, wrong) as caught:
            read([given])
        found = read([shlex.split(caught.value.problems[0].hint)[-1]])
        assert getattr(found, key) == "TEXT"
    with refused(ConfigError, "foo") as caught:
        compose(["foo"])
    assert "foo=" not in str(caught.value)


def test_unknown_choices_list_the_existing_ones():
    with refused(ConfigError, "wandb", "disabled") as caught:
        compose(["wandb=disabled"])
    assert "default, off, offline, online" in caught.value.problems[0].hint


# Arguments: key; None: Hydra prints its own usage.
OPTIONS = {
    "--seed=5": None,
    "--config-name=none": "hydra",
    "--config-dir=nowhere": "hydra",
    "--experimental-rerun=x.pickle": "hydra",
    "--cfg job -m": "hydra",
    "-m seed=1,2 hydra.launcher.n_jobs=2": "hydra.launcher.n_jobs",
    "trainer.resume=must": "trainer.resume",
}


def test_options_and_modes_of_training(in_process, tmp_path):
    for arguments, key in OPTIONS.items():
        tally(FAULT)
        code, out, err = in_process(train.main, tmp_path, *arguments.split())
        assert (code, out) == (2, ""), arguments
        assert key is None or printed_keys(err) == [key], arguments
        assert files_in(tmp_path) == set(), arguments


def test_numeric_settings_reject_invalid_numbers():
    shipped = default_values()
    numeric = {
        key: isinstance(value, list)
        for key, (value, _) in defaults_and_meanings().items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    numeric |= dict.fromkeys(["optimizer.betas", "data.weights"], True)
    nullable = "data.stride optimizer.matrix_lr trainer.micro_batch_size trainer.warmup_steps"
    nullable += " trainer.max_minutes trainer.max_steps"
    nullable += " trainer.eval_every trainer.eval_windows trainer.log_every lens.every"
    numeric |= dict.fromkeys(nullable.split(), False)
    assert len(numeric) >= 30
    for key, is_list in numeric.items():
        group, _, name = key.rpartition(".")
        for number in (math.nan, math.inf, -math.inf, -1, 10**30, -(10**30), 10**400, True):
            tally(FAULT)
            value = [number] if is_list else number
            changed = {group: shipped[group] | {name: value}} if group else {name: value}
            found, problems = validate(Config, shipped | changed)
            assert found is None, f"{key}={str(number)[:20]}"
            assert {problem[0] for problem in problems} == {key}, f"{key}={str(number)[:20]}"


# Content of a user's YAML file after the line "# @package _global_", and the key of the problem.
# Errors of YAML have Hydra's key and name the file.
CONTENTS = {
    "traner:\n  max_steps: 1": "traner",
    "seed: 1\ntrainer:\n  keep: 1\n  max_step: 3": "trainer.max_step",
    "trainer.max_steps: 5": "trainer.max_steps",
    "optimizer: {lr: .nan}": "optimizer.lr",
    "model:\n  num_heads: 7": "model.num_heads",
    b"trainer: {keep: 1}": "experiment",  # without the line "# @package _global_"
    "model: {_target_: os.mkdir}": "model._target_",
    "seed: 1\nmodel: gpt2-nano": "model",
    "defaults:\n  - override /model: mine": "model.num_head",  # in mine.yaml of this group
    "seed: 1\nseed: 2": "hydra",
    "name: a\nseed: ${sead}": "hydra",
    "model: [1, 2\nseed: 1": "hydra",
    "seed: !!python/object/apply:os.mkdir [made]": "hydra",
    "name: a\nseed: ${sead": "hydra",
    b"seed: 1\nname: \xe9": "hydra",
    "name: \ud83d": "hydra",  # half of a character
    "defaults:\n  - override /modle: gpt2-nano": "hydra",
    "defaults:\n  - override /wandb: off": "hydra",  # a boolean
}


def test_files_of_settings(tmp_path, monkeypatch):
    """YAML tags create no objects."""
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "mine", "model/mine.yaml", b"defaults: [gpt2-nano]\nnum_head: 3")
    for content, key in CONTENTS.items():
        put(tmp_path / "mine", "experiment/mine.yaml", content)
        tally(FAULT)
        with refused(ConfigError, key):
            compose([f"hydra.searchpath=[file://{tmp_path}/mine]", "experiment=mine"])
    assert not (tmp_path / "made").exists()


def put(folder, name, content):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if not isinstance(content, bytes):
        content = f"# @package _global_\n{content}".encode("utf-8", "surrogatepass")
    path.write_bytes(content)


GENERATION = """
max_new_tokens=many max_new_tokens=0 max_new_tokens=1000000000000 num_samples=0 temperature=-1
temperature=nan temperature=1e400 top_n=0.5 top_k=0 top_k=1.5 top_p=0 top_p=1.1
batch_size=0 precision=fp8 compile=maybe seed=-1 seed=${oc.env:HOME} prompt=\udcff
device=tpu
"""


def test_settings_of_generation():
    mistakes = [*GENERATION.split(), "max_new_tokens=" + "9" * 5000, "Once upon"]
    mistakes = [*([text, "checkpoint=x"] for text in mistakes), "checkpoint=", "top_k=1"]
    check_each(lambda given: parse(GenerateConfig, given), mistakes, {"top_k=1": "checkpoint"})


# (script, exit code, key, arguments)
SCRIPTS = [
    (generate, 2, "device", "checkpoint={run} device=cuda"),
    *((generate, 3, "checkpoint", f"checkpoint={x}") for x in ("none", ".", "/dev/zero")),
    (prepare_data, 2, "data.path", "out=out"),
    (prepare_data, 2, "out", "data.path=text.txt"),
    (prepare_data, 2, "workers", "data.path=text.txt out=out workers=all"),
    (prepare_data, 3, "data.path", "data.path=pipe out=out"),
    (inspect_attention, 2, "out", "checkpoint={run} out=text.txt/x.html"),
]


def test_arguments_of_scripts(in_process, text_file, tmp_path, trained):
    os.mkfifo(tmp_path / "pipe")
    before = files_in(tmp_path)
    for script, expected, key, arguments in SCRIPTS:
        tally(FAULT)
        code, _, err = in_process(script.main, tmp_path, *arguments.format(run=trained).split())
        assert (code, printed_keys(err)) == (expected, [key]), arguments
        assert files_in(tmp_path) == before, arguments


def test_unusual_prompts_are_continued(in_process, trained, tmp_path):
    for prompt in ("", "word " * 2000, "a\0b", "${oc.env:HOME} [a, {b} 'c", "é 漢 \U0001f642"):
        tally(FAULT)
        arguments = [f"checkpoint={trained}", f"prompt={prompt}", "max_new_tokens=2"]
        code, out, err = in_process(generate.main, tmp_path, *arguments)
        assert code == 0, prompt
        assert out.startswith(prompt), prompt
        assert printed_keys(err) == (["prompt"] if prompt.startswith("word") else []), prompt


def test_bytes_that_are_not_utf8_as_a_shell_passes_them(command):
    done = command("train.py", *TINY, b"data.path=caf\xe9.txt")
    assert (done.returncode, done.stdout, printed_keys(done.stderr)) == (2, "", ["data.path"])
    assert done.stderr[:-1].isprintable()
