"""The table of bad input: what is wrong, how it is given, what is answered.

Every row is refused in one line on stderr, `key=value: cause; fix`, with the exit code of its kind
(2 configuration, 3 data or checkpoint, 4 while running), without a traceback, and leaves nothing
behind. Commands run in this process, so that a row takes tenths of a second; a few of each kind
run as processes of their own, as a user starts them.
"""

import contextlib
import dataclasses
import gzip
import importlib
import json
import math
import os
import re
import shlex
import signal
import typing

import pytest
import torch
from helpers import TEXT, TINY
from helpers.tally import tally

import generate
import train
from errors import ConfigError
from scripts import attention_ladder, benchmark_data, inspect_attention, plan, prepare_data
from training.command import compose
from training.config import GROUPS, build

LINE = re.compile(r"[^:;\s][^\n]*?: [^\n]+; [^\n]+")  # key...: cause; fix


@pytest.fixture(autouse=True)
def no_hanging():
    """What waits for a pipe, or for ever, is a failure and no endless test."""

    def too_long(*_):
        raise AssertionError("this takes for ever")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def inside(folder) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def check_line(code, err, expected_code, says):
    """One line of the right form and exit code that matches `says` from its beginning on."""
    tally("the bad-input table", 1)
    assert code == expected_code, err
    assert err.endswith("\n")
    assert len(err.splitlines()) == 1, err
    assert LINE.fullmatch(err[:-1]), err
    assert re.match(says, err), err
    assert err[:-1].isprintable()


@pytest.fixture
def refused(in_process, tmp_path):
    """refused(main, arguments, code, says): runs it in tmp_path, where it must leave nothing."""

    def check(main, arguments, code, says):
        before = inside(tmp_path)
        got, out, err = in_process(main, tmp_path, *arguments)
        check_line(got, err, code, says)
        assert out == "" or code == 3  # of two checkpoints the first may have been looked at
        assert inside(tmp_path) == before

    return check


# ---------------------------------------------------------------------------------- command line

MANY = [f"seed={n}" for n in range(10_000)]
CONFIGURATION = {
    # names
    "unknown key": ("model.num_head=1", r"model\.num_head=1: no such setting; did you mean"),
    "unknown key, added": ("+model.typo=1", r"model\.typo=1: no such setting"),
    "unknown group": ("modle=gpt2-small", r"modle=gpt2-small: no such setting; did you mean model"),
    "unknown choice": ("model=gpt3", r"model=gpt3: no such model; use one of"),
    "choice outside the folder": ("data=../model/gpt2-nano", r"data=\.\./model/gpt2-nano: no such"),
    "deleted": ("~trainer", r"~trainer: settings cannot be deleted"),
    "moved elsewhere": ("model@data=gpt2-nano", r"model@data=gpt2-nano: settings stay in their"),
    "texts without brackets": ("wandb.tags=a,b", r"wandb\.tags=a,b: .*; a list .*tags=\[a,b\]"),
    "half a list": ("wandb.tags=[a,", r"wandb\.tags=\[a,: .*; write a list without blanks"),
    "a file and no key": (__file__, r".*: is not of the form .*; did you mean data\.path=/"),
    "no setting at all": ("foo", r"foo: is not of the form key=value"),
    "nothing": ("", r"'': is not of the form key=value"),
    "no key": ("=1", r"=1: no such setting"),
    "a secret as a setting": ("wandb.api_key=s3cret", r"wandb\.api_key=\(not shown\): no such"),
    # types
    "text for a number": ("optimizer.lr=fast", r"optimizer\.lr=fast: must be a number"),
    "fraction for a count": ("model.num_layers=1.5", r"model\.num_layers=1\.5: must be a whole"),
    "number for a switch": ("model.qkv_bias=1", r"model\.qkv_bias=1: must be true or false"),
    "null for a number": ("model.emb_dim=null", r"model\.emb_dim=None|model\.emb_dim=null: must"),
    "list for a number": ("optimizer.lr=[1]", r"optimizer\.lr=\[1\]: must be a number"),
    "number for a list": ("optimizer.betas=0.9", r"optimizer\.betas=0\.9: must be a list"),
    "mapping for a number": ("seed={a:1}", r"seed=\{'a': 1\}: must be a whole number"),
    "mapping for a group": ("model={emb_dim:3}", r"model=\{emb_dim:3\}: no such model"),
    # values that are missing or empty
    "missing number": ("seed=", r"seed=: must be a whole number"),
    "missing choice": ("model.attention=", r"model\.attention=: no such attention kernel"),
    "missing text": ("data.path=", r"data\.path=: no text given"),
    "empty list": ("data.path=[]", r"data\.path=\[\]: no text given"),
    "empty name": ("name=", r"name=: becomes the folder"),
    "empty val_path": ("data.val_path=", r"data\.val_path=: is empty; use null"),
    "empty text_key": ("data.text_key=", r"data\.text_key=: is empty; use data\.text_key=text"),
    "empty init_from": ("trainer.init_from=", r"trainer\.init_from=: is empty; name a run"),
    "empty resume": ("trainer.resume=", r"trainer\.resume=: no such choice"),
    "empty project": ("wandb.project=", r"wandb\.project=: needs a name"),
    "empty W&B name": ("wandb.name=", r"wandb\.name=: is empty; use null"),
    "empty W&B group": ("wandb.group=", r"wandb\.group=: is empty; use null"),
    "empty W&B notes": ("wandb.notes=", r"wandb\.notes=: is empty; use null"),
    "empty W&B job type": ("wandb.job_type=", r"wandb\.job_type=: is empty; use wandb\.job_ty"),
    "empty prompt": ("lens.prompts=['']", r"lens\.prompts='': an empty prompt"),
    # names that would leave the run root, or that no file system takes
    "name with ..": ("name=../x", r"name=\.\./x: becomes the folder runs/<name>"),
    "absolute name": ("name=/etc/x", r"name=/etc/x: becomes the folder"),
    "name ..": ("name=..", r"name=\.\.: becomes the folder"),
    "name .": ("name=.", r"name=\.: becomes the folder"),
    "name of two folders": ("name=a/b", r"name=a/b: becomes the folder"),
    "name with a backslash": ("name=a\\b", r"name=a\\b: becomes the folder"),
    "name with NUL": ("name=a\0b", r"name=a\\x00b: becomes the folder"),
    "name of two lines": ("name=a\nb", r"name=a\\nb: becomes the folder"),
    "name that ends in a line": ("name=a\n", r"name=a\\n: becomes the folder"),
    "name of 300 characters": ("name=" + "a" * 300, r"name=a+: .* at most 128"),
    "name as an option": ("name=-rf", r"name=-rf: becomes the folder"),
    "name that is not UTF-8": ("name=\udce9", r"name=\\udce9: must be text"),
    "path that is not UTF-8": ("data.path=\udce9", r"data\.path=\\udce9: must be .*text"),
    "prompt that is not UTF-8": ("trainer.sample_prompt=\udce9", r"trainer\.sample_prompt=\\udce9"),
    "path with NUL": ("data.path=a\0b", r"data\.path=a\\x00b: no name has a zero character"),
    "control characters": ("trainer.device=\x1b[31mcpu", r"trainer\.device=\\x1b\[31mcpu: "),
    # more than is meant
    "number of 5,000 digits": ("seed=" + "9" * 5000, r"seed=9+\.\.\.: is not of the form"),
    "rate of 400 digits": ("optimizer.lr=1" + "0" * 400, r"optimizer\.lr=inf: must be a positive"),
    "300 brackets": ("model=" + "{a:" * 300 + "1" + "}" * 300, r"model=\{a:.*\.\.\.: "),
    "a list in 500 lists": ("data.path=" + "[" * 500 + "]" * 500, r"data\.path=\[+"),
    "text of 100 KB": ("model.attention=" + "x" * 100_000, r"model\.attention=x{20,400}\.\.\.: "),
    "10,000 settings": (MANY, r"command line: has 10,000 settings; put them in a file"),
    "several values for one run": ("seed=1,2", r"seed=1,2: several values for one run; -m"),
    # references
    "reference to itself": ("seed=${seed}", r"seed=\$\{seed\}: Recursive interpolation"),
    "reference to nothing": ("seed=${sead}", r"seed=\$\{sead\}: Interpolation key 'sead' not"),
    "reference without an end": ("name=${", r"name=\$\{: "),
    "reference to a group": ("name=${model}", r"name=\{'vocab_size'.*: must be text"),
    "the environment": ("name=${oc.env:HOME}", r"name=\$\{oc\.env:HOME\}: .*the environment holds"),
    "the environment, in quotes": ("name='${oc.env:HOME}'", r"name='\$\{oc\.env.*environment"),
    "the environment, with blanks": ("name=${ oc.env :HOME}", r"name=\$\{ oc\.env :HOME\}: "),
    "the environment, in a list": ("wandb.tags=['${oc.env:HOME}']", r"wandb\.tags=.*environment"),
    "the environment, inside": ("wandb.group=a${oc.env:HOME}", r"wandb\.group=.*environment"),
    "a resolver in pieces": ("name=${oc.${x}:HOME}", r"name=\$\{oc\.\$\{x\}:HOME\}: "),
    "decoding": ("seed=${oc.decode:1}", r"seed=\$\{oc\.decode:1\}: the reference .* is not for"),
    "a resolver of nobody": ("seed=${nope:1}", r"seed=\$\{nope:1\}: the reference"),
    # what does not fit together
    "heads": ("model.num_heads=5", r"model\.num_heads=5: emb_dim=768 cannot be split into 5"),
    "millions of heads": ("model.num_heads=100000000", r"model\.num_heads=100000000: emb_dim=768"),
    "window beyond the context": (
        "data.max_length=2048",
        r"data\.max_length=2048: the model reads",
    ),
    "vocabulary": ("model.vocab_size=1000", r"model\.vocab_size=1000: data\.tokenizer=gpt2 has"),
    "warmup beyond the end": ("trainer.warmup_steps=121", r"trainer\.warmup_steps=121: the run"),
    "micro-batch beyond the batch": ("trainer.micro_batch_size=3", r"trainer\.micro_batch_size=3"),
    "weights for nothing": (
        "data.weights=[1,2]",
        r"data\.weights=\[1\.0, 2\.0\]: data\.path has 1",
    ),
    "flex with dropout": ("model.attention=flex", r"model\.attention=flex: FlexAttention has no"),
    "layer that is not": ("lens.layers=[12]", r"lens\.layers=12: the model has layers 0 to 11"),
    "synthetic and a text": ("data.synthetic=induction", r"data\.path=.*: data\.synthetic makes"),
    "no machine holds it": ("model.emb_dim=12000000", r"model\.emb_dim=12000000: makes a model of"),
    "no memory holds it": ("trainer.batch_size=1e9", r"trainer\.batch_size=1000000000: no memory"),
    "nothing to resume": ("trainer.resume=must", r"trainer\.resume=must: there is nothing to"),
    # code, and what is Hydra's own
    "_target_": ("+model._target_=os.system", r"model\._target_=os\.system: names code to run"),
    "_target_ in a value": ("seed={_target_:os.system}", r"seed=.*: names code to run"),
    "_target_ deep in a value": ("wandb.tags=[{a:[{_target_:x}]}]", r"wandb\.tags=.*code to run"),
    "a callback": ("+hydra.callbacks.x._target_=os.system", r"hydra\.callbacks.*: names code to"),
    "callbacks": ("+hydra.callbacks={x:{_target_:os.system}}", r"hydra\.callbacks=.*code to run"),
    "a launcher's code": ("hydra.launcher._target_=os.system", r"hydra\.launcher.*code to run"),
    "a sweeper's code": ("hydra.sweeper._target_=os.system", r"hydra\.sweeper.*code to run"),
    "a launcher in one run": ("hydra/launcher=basic", r"hydra/launcher=basic: is of a sweep.*-m"),
    "a factory of loggers": ("+hydra.job_logging.x.()=os.system", r".*job_logging.*: "),
    "the environment of jobs": (
        "+hydra.job.env_set.KEY=v",
        r"hydra\.job\.env_set\.KEY=v: is Hydra",
    ),
    "Hydra's search path": ("hydra.searchpath=[file:///tmp]", r"hydra\.searchpath=.*: is Hydra's"),
    "Hydra's folder": ("hydra.run.dir=/tmp/x", r"hydra\.run\.dir=/tmp/x: is Hydra's own"),
    "Hydra's mode": ("hydra.mode=MULTIRUN", r"hydra\.mode=MULTIRUN: is Hydra's own"),
    "a package of Hydra's": ("experiment@hydra=laptop", r"experiment@hydra=laptop: settings stay"),
    # options
    "unknown option": ("--nonsense", r"--nonsense: no such option; see --help"),
    "setting with dashes": ("--seed=5", r"--seed: .* seed=5"),
    "option without its value": ("--config-dir", r"command line: .*expected one argument"),
    "choice of an option": (["--cfg", "nothing"], r"command line: .*invalid choice"),
    "other settings": ("--config-path=x", r"--config-path=x: is not supported; add your own"),
    "other settings, empty": ("--config-name=", r"--config-name=: is not supported"),
    "a pickled run": (
        "--experimental-rerun=x.pickle",
        r"--experimental-rerun=.*: is not supported",
    ),
    "options that exclude": (["--cfg", "job", "-m"], r"--cfg --multirun: are not for use together"),
    "option that does nothing": ("--resolve", r"--resolve: is for --cfg; add"),
    "no such folder": ("--config-dir=nowhere", r"--config-dir=nowhere: no such folder"),
    "no folder": ("--config-dir=", r"--config-dir=: no such folder"),
    # the other ways in
    "help with a mistake": (["--help", "+model._target_=x"], r"model\._target_=x: names code"),
    "--cfg with a mistake": (["--cfg", "job", "+model._target_=x"], r"model\._target_=x: names"),
    "--info with a mistake": (["--info", "all", "seed=x"], r"seed=x: must be a whole number"),
    "sweep with a mistake": (["-m", "seed=1,x"], r"seed=x: must be a whole number"),
    "sweep over code": (["-m", "+model._target_=a", "seed=1,2"], r"model\._target_=a: names code"),
    "sweep over a launcher": (["-m", "hydra.launcher._target_=a"], r"hydra\.launcher.*names code"),
    "sweep by nobody": (["-m", "hydra/launcher=evil", "seed=1,2"], r"hydra/launcher=evil: no such"),
    "sweep of jobs' environment": (["-m", "+hydra.job.env_set.A=1"], r"hydra\.job\.env_set\.A=1"),
    "sweep into the environment": (["-m", "hydra.sweep.dir=${oc.env:HOME}"], r"hydra\.sweep\.dir="),
    "sweep of the environment": (["-m", "trainer.sample_prompt=${oc.env:A}"], r"trainer\.sample_"),
    "sweep under one name": (["-m", "name=x", "seed=1,2"], r"name=x: several runs cannot share"),
    "sweep of a million runs": (["-m", "seed=range(1000000)"], r"seed: stands for more than 1,000"),
}


@pytest.mark.parametrize("what", CONFIGURATION)
def test_the_command_line(refused, what):
    arguments, says = CONFIGURATION[what]
    refused(train.main, [arguments] if isinstance(arguments, str) else arguments, 2, says)


# --------------------------------------------------------------------------------------- numbers


def numeric_settings() -> dict[str, object]:
    """key -> type of every setting that is a number, or a list of them."""
    found: dict[str, object] = {"seed": int}
    for group, (module, name) in GROUPS.items():
        schema = getattr(importlib.import_module(module), name)
        for key, hint in typing.get_type_hints(schema).items():
            kinds = {hint, *typing.get_args(hint)}
            if kinds & {int, float, list[float], list[int]}:
                found[f"{group}.{key}"] = hint
    return found


NOT_NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "1e400": float("1e400")}
NO_NUMBERS = NOT_NUMBERS | {"-1": -1, "10**30": 10**30, "-10**30": -(10**30), "10**400": 10**400}


@pytest.fixture(scope="module")
def shipped():
    return dataclasses.asdict(compose([]))


def with_setting(values: dict, key: str, value: object) -> dict:
    group, _, name = key.rpartition(".")
    return values | ({group: values[group] | {name: value}} if group else {name: value})


@pytest.mark.parametrize("what", NO_NUMBERS)
def test_every_number_is_checked(shipped, what):
    """No setting takes a number that means nothing; each is named, and nothing besides."""
    bad = NO_NUMBERS[what]
    keys = numeric_settings()
    assert len(keys) >= 30
    for key, hint in keys.items():
        tally("the bad-input table", 1)
        is_list = list in {typing.get_origin(h) for h in (hint, *typing.get_args(hint))}
        settings, problems = build(with_setting(shipped, key, [bad] if is_list else bad))
        assert settings is None, f"{key} takes {what}"
        assert {problem[0] for problem in problems} == {key}


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "1e400", "1" + "0" * 30])
def test_every_number_is_checked_at_the_door(text):
    """All at once, as typed: a line for each."""
    keys = numeric_settings()
    lists = {"optimizer.betas", "data.weights", "lens.layers"}
    typed = [f"{key}=[{text}]" if key in lists else f"{key}={text}" for key in keys]
    with pytest.raises(ConfigError) as caught:
        compose(typed)
    lines = str(caught.value).splitlines()
    assert all(map(LINE.fullmatch, lines))
    assert {line.partition("=")[0] for line in lines} == keys.keys()


# ------------------------------------------------------------------------- the user's YAML files


def bomb(levels: int = 9) -> str:
    """A billion values in a few lines."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(lines)


HEAD = "# @package _global_\n"
MINE = "experiment/mine.yaml"
FILES = {
    "Python's tag": (MINE, "seed: !!python/object/apply:os.system ['touch made']", r"the tag .*os"),
    "binary tag": (MINE, "name: !!binary aGVsbG8=", r"the tag .*binary makes more of it"),
    "a tag of one's own": (MINE, "name: !mine x", r"the tag !mine"),
    "a tag on a mapping": (MINE, "model: !!python/dict {emb_dim: 8}", r"the tag "),
    "_target_": (MINE, "model:\n  _target_: os.system", r"line \d: _target_ names code to run"),
    "_target_ in quotes": (MINE, 'model: {"_target_": os.system}', r"line \d: _target_ names code"),
    "_target_ in escapes": (MINE, r'model: {"\x5ftarget_": os.system}', r"line \d: _target_ names"),
    "_target_ by an alias": (MINE, "name: &t _target_\nmodel: {*t : os.system}", r"line \d: _targ"),
    "_target_ of a callback": (
        MINE,
        "hydra: {callbacks: {x: {_target_: a}}}",
        r"line \d: _target_",
    ),
    "_target_ in a group": ("model/mine.yaml", "_target_: os.system", r"line \d: _target_ names"),
    "_target_ of a launcher": (
        "hydra/launcher/x.yaml",
        "_target_: os.system",
        r"line \d: _target_",
    ),
    "a factory of loggers": (
        "hydra/job_logging/x.yaml",
        "handlers: {a: {(): b}}",
        r"line \d: \(\)",
    ),
    "aliases without end": (MINE, bomb(), r"line \d+: stands for more than 10,000 values"),
    "many values": (MINE, "x: [" + "1," * 20_000 + "]", r"line \d: stands for more than 10,000"),
    "an alias of itself": (MINE, "model: &a\n  x: *a", r"line \d: \*a holds itself"),
    "an alias of nothing": (MINE, "model: *a", r"line \d: \*a stands for nothing"),
    "a thousand brackets": (MINE, "x: " + "[" * 1000 + "]" * 1000, r"line \d: is nested more than"),
    "the environment": (MINE, "name: ${oc.env:HOME}", r"line \d: settings are written down"),
    "decoding": (MINE, "seed: ${oc.decode:1}", r"line \d: the reference \$\{oc\.decode:"),
    "not YAML": (MINE, "model: [1, 2", r"line \d: is no YAML"),
    "tabs": (MINE, "model:\n\temb_dim: 8", r"line \d: is no YAML"),
    "a key twice": (MINE, "seed: 1\nseed: 2", r"found duplicate key seed; mend"),
    "two documents": (MINE, "seed: 1\n---\nseed: 2", r"but found another document; mend"),
    "not UTF-8": (MINE, b"name: \xe9", r"is not UTF-8 \(byte"),
    "binary": (MINE, b"\x00\x01\x02", r"is no YAML"),
    "a folder outside": (MINE, "defaults: [../../outside]", r"line \d: \S+ leaves the folder"),
    "an absolute folder": (MINE, "defaults: [//tmp/outside]", r"line \d: \S+ leaves the folder"),
    "hidden by one of ours": (
        "model/gpt2-nano.yaml",
        "emb_dim: 8",
        r"would never be read, as conf",
    ),
    "hidden config.yaml": ("config.yaml", "seed: 1", r"would never be read, as configs/config"),
}
KEYS_IN_FILES = {  # what the file itself has right, and the settings do not
    "unknown key": ("trainer:\n  max_step: 1", r"trainer\.max_step=1: no such setting; did you"),
    "unknown group": ("traner:\n  max_steps: 1", r"traner=.*: no such setting; did you mean"),
    "wrong type": ("seed: many", r"seed=many: must be a whole number"),
    "NaN": ("optimizer: {lr: .nan}", r"optimizer\.lr=nan: must be a positive number"),
    "infinite": ("trainer: {grad_clip: .inf}", r"trainer\.grad_clip=inf: must "),
    "path with NUL": ('data: {path: "a\\0b"}', r"data\.path=a\\x00b: no name has a zero"),
    "name of two lines": ("name: |\n  a\n  b", r"name=a\\nb: becomes the folder"),
    "name with ..": ("name: ../x", r"name=\.\./x: becomes the folder"),
    "the environment of jobs": ("hydra: {job: {env_set: {A: b}}}", r"hydra\.job: is Hydra's own"),
    "loggers": ("hydra: {job_logging: {root: {level: DEBUG}}}", r"hydra\.job_logging: is Hydra"),
    "Hydra's folder": ("hydra: {run: {dir: /tmp/x}}", r"hydra\.run: is Hydra's own"),
    "no mapping": ("just words", r"just words=null: no such setting"),
    "reference to itself": ("name: ${name}", r"--config-dir=.*: Recursive interpolation"),
}


@pytest.fixture
def folder_of(tmp_path):
    """folder_of(name, content) -> a folder for --config-dir with that file in it."""

    def make(name, content):
        path = tmp_path / "mine" / name
        path.parent.mkdir(parents=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(HEAD + content, encoding="utf-8")
        return tmp_path / "mine"

    return make


@pytest.mark.parametrize("what", FILES)
def test_the_users_files(refused, folder_of, what):
    name, content, says = FILES[what]
    arguments = [f"--config-dir={folder_of(name, content)}", "experiment=mine"]
    refused(train.main, arguments, 2, f"--config-dir=.*: {says}")


@pytest.mark.parametrize("what", KEYS_IN_FILES)
def test_settings_in_the_users_files(refused, folder_of, what):
    content, says = KEYS_IN_FILES[what]
    refused(train.main, [f"--config-dir={folder_of(MINE, content)}", "experiment=mine"], 2, says)


@pytest.mark.parametrize("arguments", [["--help"], ["--info", "all"], ["-m", "seed=1,2"]])
def test_the_users_files_are_checked_whatever_is_asked(refused, folder_of, arguments):
    folder = folder_of("hydra/launcher/x.yaml", "_target_: os.system")
    refused(train.main, [*arguments, f"--config-dir={folder}"], 2, r"--config-dir=.*names code to")


def test_files_that_are_none(refused, folder_of):
    folder = folder_of(MINE, "seed: 1")
    large = folder / "experiment" / "large.yaml"
    with open(large, "wb") as file:
        file.truncate(100 * 2**20)
    refused(
        train.main, [f"--config-dir={folder}"], 2, r"--config-dir=\S*large\.yaml: has more than"
    )
    large.unlink()
    os.mkfifo(large)
    refused(train.main, [f"--config-dir={folder}"], 2, r"--config-dir=\S*large\.yaml: is not a reg")
    large.unlink()
    large.symlink_to("/dev/zero")
    refused(train.main, [f"--config-dir={folder}"], 2, r"--config-dir=\S*large\.yaml: is not a reg")
    large.unlink()
    for number in range(1001):
        (folder / f"{number}.yaml").touch()
    refused(train.main, [f"--config-dir={folder}"], 2, r"--config-dir=\S*mine: has more than 1000")


def test_what_the_users_files_may_hold(folder_of):
    """Anchors, references, links in a circle, blanks and quotes in the folder's name."""
    folder = folder_of(MINE, "defaults: [override /model: 'gpt2-nano']\ntrainer: &t {max_steps: 7}")
    (folder / "round").symlink_to(folder)
    (folder / "data").mkdir()
    (folder / "data" / "mine.yaml").write_text(
        "path: ../texts/a.txt\nmax_length: &n 16\nstride: *n"
    )
    odd = folder.rename(folder.with_name("""it's "mine", [all] {of} it\\"""))
    overrides = ["experiment=mine", "data=mine", "name=run-${seed}"]
    settings = compose(overrides, str(odd))
    assert settings.trainer.max_steps == 7
    assert (settings.model.emb_dim, settings.data.stride, settings.name) == (128, 16, "run-0")


# ------------------------------------------------------------------------------------------ data


def a_folder(path):
    path.mkdir()


def a_pipe(path):
    os.mkfifo(path)


def a_loop(path):
    path.symlink_to(path.name)


def a_link_to(target):
    return lambda path: path.symlink_to(target)


def bytes_of(content):
    return lambda path: path.write_bytes(content)


def sparse(size):
    def make(path):
        with open(path, "wb") as file:
            file.truncate(size)

    return make


# what: (name of the file, what makes it, what is said of it)
TEXTS = {
    "missing": ("no.txt", lambda path: None, r"no such file; check the path"),
    "a folder without texts": ("folder", a_folder, r"no \*\.txt, .* file in this folder"),
    "a link to itself": ("loop.txt", a_loop, r"no such file; "),
    "empty": ("a.txt", bytes_of(b""), r"the file is empty; "),
    "a byte-order mark alone": ("a.txt", bytes_of(b"\xef\xbb\xbf"), r".*(empty|tokens)"),
    "one token": ("a.txt", bytes_of(b"a"), r".*tokens, and a window needs 33"),
    "shorter than a window": ("a.txt", bytes_of(b"a word"), r"7 tokens, and a window needs 33"),
    "binary": ("a.txt", bytes_of(bytes(range(256))), r"binary \(a zero byte at byte 0\)"),
    "NUL": ("a.txt", bytes_of(b"text\0" * 99), r"binary \(a zero byte at byte 4\)"),
    "not UTF-8": ("a.txt", bytes_of(b"caf\xe9 " * 99), r"not UTF-8 \(0xe9 at byte 3\)"),
    "UTF-8 cut off": (
        "a.txt",
        bytes_of(b"text " * 99 + b"\xc3"),
        r"not UTF-8 \(0xc3 at byte 495\)",
    ),
    "UTF-16": ("a.txt", bytes_of(TEXT.encode("utf-16")), r"UTF-16, not UTF-8"),
    "a pipe": ("a.txt", a_pipe, r"not a regular file; give a text file"),
    "a device": ("a.txt", a_link_to("/dev/zero"), r"not a regular file; give a text file"),
    "a terminal": ("a.txt", a_link_to("/dev/tty"), r"not a regular file; give a text file"),
    "the process's memory": ("a.txt", a_link_to("/proc/self/mem"), r"cannot be read \(.*Input/out"),
    "no gzip": ("a.txt.gz", bytes_of(b"text " * 99), r"cannot be read \(Not a gzipped file"),
    "gzip cut off": ("a.txt.gz", bytes_of(gzip.compress(TEXT.encode())[:-20]), r"cannot be read"),
    "gzip by another name": (
        "a.txt",
        bytes_of(gzip.compress(b"text")),
        r"a gzip archive, not text",
    ),
    "no zstd": ("a.txt.zst", bytes_of(b"text " * 99), r"cannot be read \("),
    "xz": ("a.txt.xz", bytes_of(b"text " * 99), r"this kind of compression is not read"),
    "no Parquet": ("a.parquet", bytes_of(b"text " * 99), r"cannot be read \("),
    "no JSON": ("a.jsonl", bytes_of(b"text\n" * 99), r"the line at byte 0 is not JSON"),
    "JSON without a text": ("a.jsonl", bytes_of(b'{"a":1}\n'), r".* has no text under 'text'"),
    "JSON in an array": (
        "a.jsonl",
        bytes_of(b'[{"text":"a"}]'),
        r".*begins an array, not an object",
    ),
    "a thousand brackets": ("a.jsonl", bytes_of(b'{"a":' * 9999), r".* is not JSON"),
    "no tokens": ("a.bin", bytes_of(b""), r".*"),
    "half a token": ("a.bin", bytes_of(b"abc"), r".*"),
    "ids of no token": ("a.bin", bytes_of(b"\xff\xff" * 999), r".*"),
    "zeros, nearly a gigabyte": ("a.txt", sparse(9 * 10**8), r"binary \(a zero byte at byte 0\)"),
}


@pytest.mark.parametrize("what", TEXTS)
def test_the_text(refused, tmp_path, what):
    name, make, says = TEXTS[what]
    make(tmp_path / name)
    refused(train.main, [*TINY, f"data.path={name}"], 3, rf"data\.(path|val_fraction)=\S+: {says}")


@pytest.mark.parametrize(
    "what", ["missing", "empty", "one token", "not UTF-8", "a pipe", "a device", "no gzip"]
)
def test_the_text_to_validate_on(refused, tmp_path, text_file, what):
    name, make, says = TEXTS[what]
    make(tmp_path / name)
    says = says.replace(r"tokens, and a window needs 33", "tokens to validate on")
    arguments = [*TINY, f"data.path={text_file}", f"data.val_path={name}"]
    refused(train.main, arguments, 3, rf"data\.val_path={re.escape(name)}: {says}")


def test_a_text_that_may_not_be_read(refused, text_file, monkeypatch):
    """Permissions mean nothing to root, so the refusal is the test's own."""

    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tokens.sources.open", denied, raising=False)
    says = r"data\.path=\S+: cannot be read \(Permission denied\); check its permissions"
    refused(train.main, [*TINY, f"data.path={text_file}"], 3, says)


ACCEPTED = {
    "byte-order mark": b"\xef\xbb\xbf" + TEXT.encode(),
    "line ends of Windows": TEXT.replace("\n", "\r\n").encode(),
    "line ends of old Macs": TEXT.replace("\n", "\r").encode(),
    "no line end": TEXT.replace("\n", " ").encode(),
    "control characters": (TEXT + "\x1b]0;title\x07\x7f\x85").encode(),
    "all of Unicode's oddities": (TEXT + "\u202eabc\ufeff\u2028\U0010ffff\ufffd").encode(),
}


@pytest.mark.parametrize("what", ACCEPTED)
def test_texts_that_are_odd_and_in_order(in_process, tmp_path, what):
    tally("the bad-input table", 1)
    (tmp_path / "a.txt").write_bytes(ACCEPTED[what])
    arguments = [*TINY, "data.path=a.txt", "trainer.max_steps=2", "name=run"]
    code, _, err = in_process(train.main, tmp_path, *arguments)
    assert (code, err) == (0, "")
    assert (tmp_path / "runs" / "run" / "metrics.jsonl").is_file()


def test_one_endless_line_takes_little_memory(in_process, tmp_path):
    """Of text, two bytes a token and some blocks are held, however long its lines are."""
    import tracemalloc

    size = 2**23
    (tmp_path / "a.txt").write_bytes(b"abcdefgh" * (size // 8))
    arguments = [*TINY, "data.path=a.txt", "trainer.max_steps=2", "name=run"]
    tracemalloc.start()
    try:
        code, _, err = in_process(train.main, tmp_path, *arguments)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (code, err) == (0, "")
    assert most < 4 * size


# ------------------------------------------------------------------------------- text from a model


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    """A tiny trained run."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    with contextlib.chdir(folder):
        trainer = train.Trainer(compose([*TINY, "data.path=text.txt", "name=run"]))
        trainer.train()
        trainer.tracker.finish()
    return folder / "runs" / "run"


def test_a_file_that_was_given_alone_is_named_as_one_word(tmp_path, in_process):
    path = tmp_path / "my text.txt"
    path.touch()
    code, _, err = in_process(train.main, tmp_path, path)
    assert code == 2
    assert f"data.path={path}" in shlex.split(err.strip().removesuffix("?"))


GENERATION = {
    "unknown key": ("top_n=0.5", 2, r"top_n=0\.5: no such setting; did you mean top_"),
    "no key": ("Once upon", 2, r"Once upon: is not of the form key=value"),
    "wrong type": ("max_new_tokens=many", 2, r"max_new_tokens=many: must be a whole number"),
    "no tokens": ("max_new_tokens=0", 2, r"max_new_tokens=0: must be from 1 to 1,000,000"),
    "negative tokens": ("max_new_tokens=-1", 2, r"max_new_tokens=-1: must be from 1"),
    "endless": ("max_new_tokens=1000000000000", 2, r"max_new_tokens=1000000000000: must be from 1"),
    "10**30 tokens": ("max_new_tokens=1" + "0" * 30, 2, r"max_new_tokens=10{30}: is too large"),
    "5,000 digits": ("max_new_tokens=" + "9" * 5000, 2, r"max_new_tokens=9+\.\.\.: must be a"),
    "no samples": ("num_samples=0", 2, r"num_samples=0: must be from 1"),
    "cold": ("temperature=-1", 2, r"temperature=-1\.0: must be 0 .*, or from 0\.001"),
    "almost cold": ("temperature=1e-40", 2, r"temperature=1e-40: must be 0"),
    "NaN": ("temperature=nan", 2, r"temperature=nan: must be 0"),
    "infinite": ("temperature=inf", 2, r"temperature=inf: must be 0"),
    "1e400": ("temperature=1e400", 2, r"temperature=inf: must be 0"),
    "no choice": ("top_k=0", 2, r"top_k=0: must be at least 1"),
    "negative choice": ("top_k=-5", 2, r"top_k=-5: must be at least 1"),
    "half a choice": ("top_k=1.5", 2, r"top_k=1\.5: must be a whole number"),
    "no share": ("top_p=0", 2, r"top_p=0\.0: must be above 0"),
    "more than all": ("top_p=1.1", 2, r"top_p=1\.1: must be above 0, and at most 1"),
    "no texts at once": ("batch_size=0", 2, r"batch_size=0: must be from 1"),
    "a list of no prompts": ("prompt=[]", 2, r"prompt=\[\]: is a list of none"),
    "unknown precision": ("precision=fp8", 2, r"precision=fp8: no such precision; use one of"),
    "fp16 on a CPU": ("precision=fp16", 2, r"precision=fp16: half precision needs a GPU"),
    "compiled somehow": ("compile=maybe", 2, r"compile=maybe: no such choice; use one of auto"),
    "negative seed": ("seed=-1", 2, r"seed=-1: must be from 0"),
    "large seed": ("seed=99999999999999999999", 2, r"seed=9+: must be from 0"),
    "prompt that is not UTF-8": ("prompt=\udcff", 2, r"prompt=\\udcff: must be text in UTF-8"),
    "unknown device": ("device=tpu", 2, r"device=tpu: no such device"),
    "absent device": ("device=cuda", 2, r"device=cuda: this machine .* has none"),
    "environment": ("seed=${oc.env:HOME}", 2, r"seed=\$\{oc\.env:HOME\}: must be a whole number"),
    "empty checkpoint": ("checkpoint=", 2, r"checkpoint=: is empty"),
    "no checkpoint": ("checkpoint=nowhere", 3, r"checkpoint=nowhere: no such directory"),
    "a folder that is none": ("checkpoint=.", 3, r"checkpoint=\.: holds no checkpoint"),
    "a device for a checkpoint": ("checkpoint=/dev/zero", 3, r"checkpoint=/dev/zero: holds no"),
}


@pytest.mark.parametrize("what", GENERATION)
def test_generation(refused, a_run, what):
    argument, code, says = GENERATION[what]
    given = [argument] if argument.startswith("checkpoint=") else [f"checkpoint={a_run}", argument]
    refused(generate.main, given, code, says)


@pytest.mark.parametrize("given", [[], ["seed=" + "9" * 400]])  # more than a float can hold
def test_generation_without_a_checkpoint(refused, given):
    refused(generate.main, given, 2, r"checkpoint: missing; give it as checkpoint=")


def test_a_run_nearly_named(in_process, a_run):
    """By its name alone, by one with a letter amiss, by the folder of its checkpoints."""
    for given, meant in (
        ("run", "runs/run"),
        ("runs/runn", "runs/run"),
        ("runs/run/checkpoints", "runs/run/checkpoints/last"),
    ):
        code, _, err = in_process(generate.main, a_run.parent.parent, f"checkpoint={given}")
        assert code == 3
        assert err.endswith(f"; did you mean {meant}?\n")


PROMPTS = {
    "empty": "",
    "longer than the model reads": "word " * 2000,
    "with NUL": "a\0b",
    "of the end alone": "<|endoftext|>",
    "not a reference": "${oc.env:HOME} [a, {b} 'c",
    "every plane": "é 漢 \U0001f642 \U0010ffff",
}


@pytest.mark.parametrize("what", PROMPTS)
def test_prompts_that_are_odd_and_in_order(in_process, a_run, tmp_path, what):
    tally("the bad-input table", 1)
    arguments = [f"checkpoint={a_run}", f"prompt={PROMPTS[what]}", "max_new_tokens=2"]
    code, out, err = in_process(generate.main, tmp_path, *arguments)
    is_long = what == "longer than the model reads"
    note = "prompt: has 10,000 tokens, and the model reads 32; its beginning is not read\n"
    assert (code, err) == (0, note * is_long)
    assert out.startswith(PROMPTS[what])


# ------------------------------------------------------------------------------------ the machine


def test_no_gpu(refused, text_file, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = [*TINY, f"data.path={text_file}", "trainer.device=cuda"]
    refused(train.main, arguments, 2, r"trainer\.device=cuda: this machine .* has none; use")


def test_half_precision_without_a_gpu(refused, text_file):
    arguments = [*TINY, f"data.path={text_file}", "trainer.precision=fp16"]
    refused(train.main, arguments, 2, r"trainer\.precision=fp16: half precision needs a GPU")


def test_a_gpu_without_bf16(refused, text_file, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: False)
    wish = ["trainer.device=cuda", "trainer.precision=bf16"]
    arguments = [*TINY, f"data.path={text_file}", *wish]
    refused(train.main, arguments, 2, r"trainer\.precision=bf16: this GPU has no bf16; use")


@pytest.fixture
def rank_0_of_3(monkeypatch):
    numbers = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3}
    for name, value in {**numbers, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}.items():
        monkeypatch.setenv(name, str(value))


def test_too_few_gpus(refused, text_file, monkeypatch, rank_0_of_3):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    wish = ["trainer.device=cuda", "trainer.batch_size=6"]
    arguments = [*TINY, f"data.path={text_file}", *wish]
    refused(train.main, arguments, 2, r"trainer\.device=cuda: 3 processes on a machine with 2")


def test_a_batch_that_the_ranks_cannot_share(refused, text_file, rank_0_of_3):
    arguments = [*TINY, f"data.path={text_file}"]
    refused(train.main, arguments, 2, r"trainer\.batch_size=8: .*3 ranks.*; use")


def test_one_process_where_several_are_meant(refused, text_file):
    arguments = [*TINY, f"data.path={text_file}", "parallel=ddp"]
    refused(train.main, arguments, 2, r"parallel=ddp: started as one process, without torchrun; ")


def test_a_run_directory_that_cannot_be_made(refused, text_file, tmp_path):
    (tmp_path / "runs").write_text("a file")
    for more in ([], ["name=run"]):
        arguments = [*TINY, f"data.path={text_file}", *more]
        refused(train.main, arguments, 2, r"(name=|runs/)\S*: .*cannot be written")


def test_out_of_memory(in_process, tmp_path, text_file, monkeypatch):
    from model import GPT

    forward = GPT.forward

    def full(self, *args, **kwargs):
        if self.training:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 TiB")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(GPT, "forward", full)
    arguments = [*TINY, f"data.path={text_file}", "name=run"]
    code, _, err = in_process(train.main, tmp_path, *arguments)
    check_line(code, err, 4, r"trainer\.(micro_batch|batch)_size=\S+: .*memory.*; use")
    assert (tmp_path / "runs" / "run" / "report.html").is_file()


# ---------------------------------------------------------------------------------------- scripts

PREPARE = ["data.path=text.txt", "out=out"]
SCRIPTS = {
    "prepare: unknown key": (prepare_data, [*PREPARE, "worker=1"], 2, r"worker=1: no such setting"),
    "prepare: nothing": (prepare_data, ["out=out"], 2, r"data\.path: missing; give it as"),
    "prepare: no folder": (prepare_data, ["data.path=text.txt"], 2, r"out: missing; give it as"),
    "prepare: empty folder": (prepare_data, [*PREPARE, "out="], 2, r"out=: no folder given"),
    "prepare: a file": (prepare_data, [*PREPARE, "out=text.txt"], 2, r"out=text\.txt: is a file"),
    "prepare: no text": (prepare_data, [*PREPARE, "data.path=no"], 3, r"data\.path=no: no such"),
    "prepare: a pipe": (prepare_data, [*PREPARE, "data.path=pipe"], 3, r"data\.path=pipe: not a"),
    "prepare: type": (prepare_data, [*PREPARE, "workers=all"], 2, r"workers=all: must be a whole"),
    "prepare: negative": (prepare_data, [*PREPARE, "workers=-1"], 2, r"workers=-1: must "),
    "prepare: too many": (prepare_data, [*PREPARE, "workers=1000000"], 2, r"workers=1000000: "),
    "prepare: part": (prepare_data, [*PREPARE, "part=3/2"], 2, r"part=3/2: is to be i/n"),
    "prepare: large part": (prepare_data, [*PREPARE, "part=1/" + "9" * 5000], 2, r"part=1/9+"),
    "prepare: shard": (prepare_data, [*PREPARE, "shard_tokens=1e30"], 2, r"shard_tokens=\d+: "),
    "prepare: NaN": (prepare_data, [*PREPARE, "shard_tokens=nan"], 2, r"shard_tokens=nan: must be"),
    "prepare: engine": (prepare_data, [*PREPARE, "engine=x"], 2, r"engine=x: no such engine"),
    "prepare: check": (prepare_data, [*PREPARE, "check_every=0"], 2, r"check_every=0: must be"),
    "inspect: unknown key": (inspect_attention, ["{run}", "txt=x"], 2, r"txt=x: no such setting"),
    "inspect: nothing": (inspect_attention, [], 2, r"checkpoint: missing; give it as"),
    "inspect: missing": (inspect_attention, ["checkpoint=no"], 3, r"checkpoint=no: no such dir"),
    "inspect: second": (inspect_attention, ["{run}", "compare=no"], 3, r"compare=no: no such dir"),
    "inspect: type": (inspect_attention, ["{run}", "max_tokens=x"], 2, r"max_tokens=x: must be a"),
    "inspect: range": (inspect_attention, ["{run}", "max_tokens=1"], 2, r"max_tokens=1: the lens"),
    "inspect: huge": (inspect_attention, ["{run}", "max_tokens=1e30"], 2, r"max_tokens=\d+: "),
    "inspect: repeated": (inspect_attention, ["{run}", "repeated=-1"], 2, r"repeated=-1: is from"),
    "inspect: device": (inspect_attention, ["{run}", "device=tpu"], 2, r"device=tpu: no such dev"),
    "inspect: page": (inspect_attention, ["{run}", "out=x.png"], 2, r"out=x\.png: is to be a page"),
    "inspect: place": (inspect_attention, ["{run}", "out=text.txt/x.html"], 2, r"out=text\.txt/x"),
    "inspect: not UTF-8": (
        inspect_attention,
        ["{run}", "text=\udcff"],
        2,
        r"text=\\udcff: must be",
    ),
    "plan: unknown key": (
        plan,
        ["device=2"],
        2,
        r"device=2: no such setting; did you mean devices",
    ),
    "plan: of training": (plan, ["modle=gpt2-xl"], 2, r"modle=gpt2-xl: no such setting"),
    "plan: type": (plan, ["devices=some"], 2, r"devices=some: must be a whole number"),
    "plan: none": (plan, ["devices=0"], 2, r"devices=0: must be at least 1"),
    "plan: huge": (plan, ["devices=1" + "0" * 30], 2, r"devices=10+: is too large"),
    "plan: kind": (plan, ["kind=h10"], 2, r"kind=h10: no such kind of device; did you mean"),
    "plan: NaN": (plan, ["tokens=nan"], 2, r"tokens=nan: must be more than 0"),
    "plan: infinite": (plan, ["price=inf"], 2, r"price=inf: must not be negative|price=inf: must"),
    "plan: place": (plan, ["out=no/plan.json"], 2, r"out=no/plan\.json: no such folder"),
    "plan: code": (plan, ["+model._target_=os.system"], 2, r"model\._target_=os\.system: names"),
    "benchmark: dashes": (benchmark_data, ["text=text.txt", "--repeats=1"], 2, r"--repeats: "),
    "plan: option": (plan, ["--devices"], 2, r"--devices: no such option"),
    "benchmark: unknown": (benchmark_data, ["text=text.txt", "repeat=1"], 2, r"repeat=1: no such"),
    "benchmark: missing": (benchmark_data, ["text=no.txt"], 2, r"text=no\.txt: no such file"),
    "benchmark: a pipe": (benchmark_data, ["text=pipe"], 2, r"text=pipe: no such file"),
    "benchmark: type": (benchmark_data, ["text=text.txt", "repeats=x"], 2, r"repeats=x: must be"),
    "benchmark: none": (
        benchmark_data,
        ["text=text.txt", "repeats=0"],
        2,
        r"repeats=0: must be at",
    ),
    "ladder: an argument": (attention_ladder, ["steps=3"], 2, r"unrecognized arguments: steps=3; "),
    "ladder: an option": (attention_ladder, ["--steps"], 2, r"unrecognized arguments: --steps; "),
}


@pytest.mark.parametrize("what", SCRIPTS)
def test_scripts(refused, text_file, tmp_path, a_run, what):
    script, arguments, code, says = SCRIPTS[what]
    os.mkfifo(tmp_path / "pipe")
    arguments = [text.replace("{run}", f"checkpoint={a_run}") for text in arguments]
    refused(script.main, arguments, code, says)


@pytest.mark.parametrize(
    "main",
    [
        generate.main,
        *(
            s.main
            for s in (attention_ladder, benchmark_data, inspect_attention, plan, prepare_data)
        ),
    ],
    ids=lambda main: main.__module__,
)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help(in_process, tmp_path, main, flag):
    code, out, err = in_process(main, tmp_path, flag)
    assert (code, err) == (0, "")
    assert "python " in out
    assert inside(tmp_path) == set()


# ------------------------------------------------------------------- as processes of their own


@pytest.mark.parametrize(
    ("script", "arguments", "code", "says"),
    [
        ("train.py", ["trainer.device=\x1b[31m", "debug=false"], 2, r"trainer\.device=\\x1b\[31m"),
        ("train.py", [*TINY, b"data.path=caf\xe9.txt"], 2, r"data\.path=caf\\udce9\.txt: must be"),
        ("generate.py", ["checkpoint=no", b"prompt=\xff"], 2, r"prompt=\\udcff: must be text"),
    ],
)
def test_as_a_user_starts_it(command, tmp_path, script, arguments, code, says):
    done = command(script, *arguments)
    check_line(done.returncode, done.stderr, code, says)
    assert done.stdout == ""
    assert inside(tmp_path) == {"home"}


def test_a_traceback_on_request_only(command):
    done = command("train.py", "optimizer.lr=-1", "debug=true")
    assert done.returncode == 2
    assert "Traceback" in done.stderr


def test_what_is_made_of_broken_settings_is_nothing(tmp_path):
    """A form that each problem has, also of several at once."""
    with pytest.raises(ConfigError) as caught:
        compose(["optimizer.lrr=1", "model.num_heads=5", "name=a\nb", "seed=x"])
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert all(map(LINE.fullmatch, lines))
    assert json.dumps(lines)
