"""Bad input: for each mistake, the key that is named, the type of the error and its exit code.

Readers of texts have more kinds of bad input: tests/tokens/test_sources.py. How errors are worded
and printed: tests/test_messages.py.
"""

import contextlib
import dataclasses
import importlib
import math
import os
import shlex
import tracemalloc
import typing

import pytest
import torch
from helpers import TEXT, TINY
from helpers.refusals import not_waiting, printed_keys, refused
from helpers.settings import settings
from helpers.tally import tally

import generate
import train
from errors import ConfigError, DataError, OutOfMemoryError, RunDirectoryError
from scripts import attention_ladder, benchmark_data, inspect_attention, plan, prepare_data
from training.command import check_sweep, compose, parse
from training.config import CONFIGS, GROUPS, build
from training.yaml_check import check_folder

FAULT = "the bad-input table"


@pytest.fixture(autouse=True)
def no_endless_reading():
    """Reading a FIFO or a device that never ends is a failure."""
    with not_waiting(60):
        yield


def files_in(folder) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def check_each(function, mistakes, keys=()) -> None:
    """Each mistake alone is refused, with one problem. A mistake is one or several arguments; the
    key of the problem is that of the first, or as in keys."""
    for mistake in mistakes:
        arguments = mistake if isinstance(mistake, list) else [mistake]
        key = arguments[0].partition("=")[0].lstrip("+")
        tally(FAULT)
        try:
            with refused(ConfigError, dict(keys).get(arguments[0], key), exit_code=2):
                function(arguments)
        except (AssertionError, pytest.fail.Exception) as error:
            raise AssertionError(f"{str(arguments)[:200]}: {error}") from error


# --------------------------------------------------------------------------- settings: values

VALUES = {
    "wrong types": """optimizer.lr=abc optimizer.lr=[1] optimizer.betas=0.9 model.num_layers=1.5
        model.qkv_bias=1 model.emb_dim=null trainer.max_steps=1.5 seed=x seed={a:1} seed=
        wandb.alerts=often""",
    "ranges": """optimizer.lr=-1 optimizer.weight_decay=-1 optimizer.min_lr_ratio=2
        optimizer.decay_fraction=0 optimizer.eps=0 optimizer.betas=[0.9] model.num_layers=0
        model.dropout=1.5 data.val_fraction=1 data.stride=0 trainer.max_steps=0
        trainer.warmup_steps=-1 trainer.grad_clip=-1 trainer.batch_size=1e9
        trainer.sample_tokens=1e9 trainer.keep=0 lens.every=-1 lens.max_tokens=1 lens.frames=1
        parallel.timeout=0 parallel.timeout=1800 seed=-1 seed=99999999999999999999""",
    "choices": """optimizer.schedule=linear model.attention=flash model.attention= data.tokenizer=x
        data.endoftext=maybe trainer.precision=fp8 trainer.compile=maybe trainer.device=tpu
        trainer.resume=true trainer.resume= trainer.micro_batch_size=some wandb.mode=of
        wandb.log_model=true parallel.strategy=many trainer.on_nonfinite=maybe""",
    "empty": """data.path= name= data.val_path= data.text_key= trainer.init_from=
        wandb.project= wandb.name= wandb.group= wandb.notes= wandb.job_type= lens.prompts=['']
        wandb.tags=['']""",
    "names": """name=../x name=/etc/x name=.. name=. name=a/b name=a\\b name=a\0b name=-rf
        name=\udce9 data.path=a\0b data.path=\udce9 trainer.sample_prompt=\udce9
        wandb.project=team/a wandb.project=a#b""",
    "several settings": """model.num_heads=5 model.num_heads=100000000 model.attention=flex
        data.max_length=2048 model.vocab_size=1000 trainer.warmup_steps=121
        trainer.micro_batch_size=3 data.weights=[1,2] lens.layers=[12] model.emb_dim=12000000""",
}
LONG_VALUES = [
    *("name=a\nb", "name=a\n", "name=" + "a" * 129, "optimizer.lr=1" + "0" * 400),
    *(f"wandb.group={'g' * 129}", f"wandb.job_type={'j' * 65}", f"wandb.tags=[a,{'t' * 65}]"),
]
OTHERS = {"model.emb_dim=1000000007": "model.num_heads", "data.synthetic=induction": "data.path"}


def test_values():
    for mistakes in VALUES.values():
        check_each(lambda arguments: settings(*arguments), mistakes.split())
    check_each(lambda arguments: settings(*arguments), [*LONG_VALUES, *OTHERS], OTHERS)


# ------------------------------------------------------------- settings: names, syntax, references

SYNTAX = {
    "unknown names": """modle=gpt2-small model=gpt2-smal lr=1 max_step=1 +model.typo=1
        ++model.num_head=1 data=../model/gpt2-nano =1 wandb.api_key=s3cret""",
    "references": """seed=${seed} seed=${sead} name=${ name=${model} seed=${oc.decode:1}
        seed=${nope:1} name=${oc.env:HOME} name='${oc.env:HOME}' wandb.tags=['${oc.env:HOME}']
        wandb.group=a${oc.env:HOME}""",
    "code": """+model._target_=os.system seed={_target_:os.system} wandb.tags=[{a:[{_target_:x}]}]
        +hydra.callbacks.x._target_=os.system +hydra.callbacks={x:{_target_:os.system}}
        hydra.launcher._target_=os.system hydra.sweeper._target_=os.system""",
    "Hydra's own": """hydra.ouput_subdir=x hydra.run.dir=x hydra.mode=MULTIRUN hydra.sweep.dir=x
        hydra/launcher=basic +hydra.job.env_set.KEY=v hydra.searchpath=[file:///tmp]""",
    "others": "model={emb_dim:3} data.path=[]",
}
# Whose problem has the whole argument as its key.
WHOLE = ["foo", "~data", "wandb.tags=[a,", "seed=1,2", "wandb.tags=a,b", "trainer.device=a(b"]
WHOLE += ["name=${oc.${x}:HOME}", "seed=" + "9" * 5000, "model=" + "{a:" * 300 + "1" + "}" * 300]
WHOLE += ["data.path=" + "[" * 500 + "]" * 500]
WITH_BLANKS = ["name=${ oc.env :HOME}"]
WITH_BLANKS += ["model.attention=" + "x" * 100_000, [f"seed={n}" for n in range(10_000)]]
KEYS = {text: text for text in WHOLE} | {
    "model@data=gpt2-nano": "model@data",
    "data=text": "data.path",
    "seed=0": "command line",  # the first of 10,000 settings
}


def test_names_and_syntax():
    for mistakes in SYNTAX.values():
        check_each(compose, mistakes.split())
    check_each(compose, WITH_BLANKS + list(KEYS)[:-1], KEYS)


SWEEPS = """seed=1,x | +model._target_=a seed=1,2 | hydra/launcher=evil seed=1,2
    | hydra.sweep.dir=${oc.env:HOME} | trainer.sample_prompt=${oc.env:A} | name=x seed=1,2
    | seed=range(1000000) | hydra.sweep.dirr=x seed=1,2"""


def test_sweeps():
    check_each(lambda given: check_sweep(given, None), [x.split() for x in SWEEPS.split("|")])


# The key is the option; these are (arguments, key).
OPTIONS = """--nonsense --seed=5 --config-path=x --config-name= --experimental-rerun=x.pickle
    --resolve --config-dir=nowhere --config-dir= trainer.resume=must"""
MODES = [
    (["--config-dir"], "command line"),
    (["--cfg", "nothing"], "command line"),
    (["--cfg", "job", "-m"], "--cfg --multirun"),
    ([""], "''"),
    *((way, "seed") for way in (["--info", "all", "seed=x"], ["-m", "seed=1,x"])),
    *(([*way, "+model._target_=x"], "model._target_") for way in (["--help"], ["--cfg", "job"])),
]


def test_options_and_modes_of_training(in_process, tmp_path):
    """The key is printed, nothing is computed and no file is left."""
    options = [([text], text.partition("=")[0]) for text in OPTIONS.split()]
    for arguments, key in options + MODES:
        tally(FAULT)
        code, out, err = in_process(train.main, tmp_path, *arguments)
        assert (code, out, printed_keys(err)) == (2, "", [key]), arguments
        assert files_in(tmp_path) == set(), arguments


def test_a_file_given_alone_is_named_as_one_word_of_the_shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my text.txt").touch()
    with refused(ConfigError, "my text.txt") as caught:
        compose(["my text.txt"])
    assert "data.path=my text.txt" in shlex.split(caught.value.hint.removesuffix("?"))


# --------------------------------------------------------------------------------------- numbers


def numeric_settings() -> dict[str, bool]:
    """key -> whether it is a list, of every setting that is a number or a list of numbers."""
    found = {"seed": False}
    for group, (module, name) in GROUPS.items():
        schema = getattr(importlib.import_module(module), name)
        for key, hint in typing.get_type_hints(schema).items():
            kinds = {hint, *typing.get_args(hint)}
            if kinds & {int, float, list[float], list[int]}:
                found[f"{group}.{key}"] = bool(kinds & {list[float], list[int]})
    assert len(found) >= 30
    return found


def test_no_setting_takes_a_number_that_means_nothing():
    """As values of Python, each alone; as text, all at once."""
    shipped = dataclasses.asdict(settings())
    keys = numeric_settings()
    bad = [math.nan, math.inf, -math.inf, -1, 10**30, -(10**30), 10**400]
    for key, is_list in keys.items():
        group, _, name = key.rpartition(".")
        for number in bad:
            tally(FAULT)
            value = [number] if is_list else number
            changed = {group: shipped[group] | {name: value}} if group else {name: value}
            found, problems = build(shipped | changed)
            assert found is None, f"{key}={str(number)[:20]}"
            assert {problem[0] for problem in problems} == {key}, f"{key}={str(number)[:20]}"
    for text in ("-1", "nan", "inf", "1e400", "1" + "0" * 30):
        typed = [f"{key}=[{text}]" if is_list else f"{key}={text}" for key, is_list in keys.items()]
        with pytest.raises(ConfigError) as caught:
            settings(*typed)
        assert {problem.key for problem in caught.value.problems} == keys.keys(), text


# ------------------------------------------------------------------------- the user's YAML files


def bomb(levels: int = 9) -> str:
    """10**levels values in a few lines."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(lines)


MINE = "experiment/mine.yaml"
# Refused before Hydra reads the files.
FILES = [
    (MINE, "seed: !!python/object/apply:os.system ['touch made']"),
    (MINE, "name: !!binary aGVsbG8="),
    (MINE, "name: !mine x"),
    (MINE, "model: !!python/dict {emb_dim: 8}"),
    (MINE, "model:\n  _target_: os.system"),
    (MINE, r'model: {"\x5ftarget_": os.system}'),
    (MINE, "name: &t _target_\nmodel: {*t : os.system}"),
    ("model/mine.yaml", "_target_: os.system"),
    ("hydra/launcher/x.yaml", "_target_: os.system"),
    ("hydra/job_logging/x.yaml", "handlers: {a: {(): b}}"),
    (MINE, bomb()),
    (MINE, "x: [" + "1," * 20_000 + "]"),
    (MINE, "model: &a\n  x: *a"),
    (MINE, "model: *a"),
    (MINE, "x: " + "[" * 1000 + "]" * 1000),
    (MINE, "name: ${oc.env:HOME}"),
    (MINE, "seed: ${oc.decode:1}"),
    (MINE, "model: [1, 2"),
    (MINE, "model:\n\temb_dim: 8"),
    (MINE, b"name: \xe9"),
    (MINE, b"\x00\x01\x02"),
    (MINE, "defaults: [../../outside]"),
    (MINE, "defaults: [//tmp/outside]"),
    ("model/gpt2-nano.yaml", "emb_dim: 8"),
    ("config.yaml", "seed: 1"),
    (MINE, os.mkfifo),
    (MINE, lambda path: path.symlink_to("/dev/zero")),
    (MINE, lambda path: path.touch() or os.truncate(path, 100 * 2**20)),
]
# Refused by Hydra or as settings: (content, key).
CONTENTS = [
    ("seed: 1\nseed: 2", "--config-dir"),
    ("seed: 1\n---\nseed: 2", "--config-dir"),
    ("name: ${name}", "--config-dir"),
    ("trainer:\n  max_step: 1", "trainer.max_step"),
    ("traner:\n  max_steps: 1", "traner"),
    ("optimizer: {lr: .nan}", "optimizer.lr"),
    ('data: {path: "a\\0b"}', "data.path"),
    ("hydra: {job: {env_set: {A: b}}}", "hydra.job"),
    ("hydra: {job_logging: {root: {level: DEBUG}}}", "hydra.job_logging"),
    ("just words", "just words"),
]


def put(folder, name, content):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if callable(content):
        content(path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(f"# @package _global_\n{content}", encoding="utf-8")


def test_files_of_settings_are_checked_before_hydra_reads_them(tmp_path):
    for number, (name, content) in enumerate(FILES):
        tally(FAULT)
        folder = tmp_path / str(number)
        put(folder, name, content)
        problems = check_folder(folder, CONFIGS)
        found = [(key, value) for key, value, *_ in problems]
        assert found == [("--config-dir", folder / name)], (name, str(content)[:200])
        if number == 4:
            with refused(ConfigError, "--config-dir", folder / name):
                compose([], str(folder))
    many = tmp_path / "many"
    many.mkdir()
    for number in range(1001):
        (many / f"{number}.yaml").touch()
    ((key, value, *_),) = check_folder(many, CONFIGS)
    assert (key, value) == ("--config-dir", many)


def test_contents_of_files_of_settings(tmp_path):
    for content, key in CONTENTS:
        put(tmp_path, MINE, content)
        tally(FAULT)
        with refused(ConfigError, key):
            compose(["experiment=mine"], str(tmp_path))


@pytest.mark.parametrize("arguments", [["--help"], ["--info", "all"], ["-m", "seed=1,2"]])
def test_files_of_settings_are_checked_in_every_mode(in_process, tmp_path, arguments):
    put(tmp_path, "hydra/launcher/x.yaml", "_target_: os.system")
    before = files_in(tmp_path)
    code, out, err = in_process(train.main, tmp_path, *arguments, f"--config-dir={tmp_path}")
    assert (code, out, printed_keys(err)) == (2, "", ["--config-dir"])
    assert files_in(tmp_path) == before


def test_what_files_of_settings_may_hold(tmp_path):
    """Anchors, references, circular links, blanks and quotes in the folder's name."""
    folder = tmp_path / """it's "mine", [all] {of} it\\"""
    put(folder, MINE, "defaults: [override /model: 'gpt2-nano']\ntrainer: &t {max_steps: 7}")
    put(folder, "data/mine.yaml", b"path: ../texts/a.txt\nmax_length: &n 16\nstride: *n")
    (folder / "round").symlink_to(folder)
    found = compose(["experiment=mine", "data=mine", "name=run-${seed}"], str(folder))
    assert found.trainer.max_steps == 7
    assert (found.model.emb_dim, found.data.stride, found.name) == (128, 16, "run-0")


# ------------------------------------------------------------------------------------------ texts


def content(raw):
    return lambda path: path.write_bytes(raw)


def link(target):
    return lambda path: path.symlink_to(target)


# (name of the file, what makes it)
TEXTS = {
    "missing": ("no.txt", lambda path: None),
    "folder without texts": ("folder", lambda path: path.mkdir()),
    "link to itself": ("loop.txt", link("loop.txt")),
    "empty": ("a.txt", content(b"")),
    "only a byte-order mark": ("a.txt", content(b"\xef\xbb\xbf")),
    "one token": ("a.txt", content(b"a")),
    "not UTF-8": ("a.txt", content(b"caf\xe9 " * 99)),
    "UTF-16": ("a.txt", content(TEXT.encode("utf-16"))),
    "FIFO": ("a.txt", os.mkfifo),
    "device": ("a.txt", link("/dev/zero")),
    "memory of the process": ("a.txt", link("/proc/self/mem")),
    "no gzip": ("a.txt.gz", content(b"text " * 99)),
    "xz": ("a.txt.xz", content(b"text " * 99)),
    "no Parquet": ("a.parquet", content(b"text " * 99)),
    "JSON of 9,999 levels": ("a.jsonl", content(b'{"a":' * 9999)),
    "half a token": ("a.bin", content(b"abc")),
    "ids out of range": ("a.bin", content(b"\xff\xff" * 999)),
    "900 MB of zeros": ("a.txt", lambda path: path.touch() or os.truncate(path, 9 * 10**8)),
}
TO_VALIDATE_ON = ("missing", "empty", "one token", "not UTF-8", "FIFO", "no gzip")


@pytest.mark.parametrize("setting", ["data.path", "data.val_path"])
def test_texts(trainer, tmp_path, setting):
    """Refused with the setting and the file, before a run directory is made."""
    for what in TEXTS if setting == "data.path" else TO_VALIDATE_ON:
        tally(FAULT)
        name, make = TEXTS[what]
        folder = tmp_path / what
        folder.mkdir()
        make(folder / name)
        with pytest.raises(DataError) as caught:
            trainer(f"{setting}={folder / name}")
        assert caught.value.exit_code == 3, what
        found = caught.value.key, str(caught.value.value)
        assert found in ((setting, f"{folder / name}"), ("data.val_fraction", "0.1")), what
    assert not (tmp_path / "runs").exists()


ACCEPTED = {
    "byte-order mark": b"\xef\xbb\xbf" + TEXT.encode(),
    "CR LF": TEXT.replace("\n", "\r\n").encode(),
    "CR": TEXT.replace("\n", "\r").encode(),
    "control characters": (TEXT + "\x1b]0;title\x07\x7f\x85").encode(),
    "unusual characters": (TEXT + "\u202eabc\ufeff\u2028\U0010ffff\ufffd").encode(),
}


def test_unusual_texts_are_trained_on(trainer, tmp_path, capsys):
    for what, raw in ACCEPTED.items():
        tally(FAULT)
        (tmp_path / "a.txt").write_bytes(raw)
        run = trainer("data.path=a.txt", "trainer.max_steps=2", "trainer.resume=false")
        run.train()
        assert (run.folder / "metrics.jsonl").is_file(), what
    assert capsys.readouterr().err == ""


def test_one_long_line_takes_little_memory(trainer, tmp_path):
    """Two bytes per token and some blocks of text are held, however long the lines are."""
    trainer("name=first")  # what is loaded and allocated once
    size = 2**23
    (tmp_path / "a.txt").write_bytes(b"abcdefgh" * (size // 8))
    tracemalloc.start()
    try:
        trainer("data.path=a.txt", "name=second")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 4 * size


# ---------------------------------------------------------------------------- generate.py, scripts

GENERATION = """
    top_n=0.5 max_new_tokens=many max_new_tokens=0 max_new_tokens=1000000000000 num_samples=0
    max_new_tokens=1000000000000000000000000000000 temperature=-1 temperature=1e-40 temperature=nan
    temperature=inf temperature=1e400 top_k=0 top_k=-5 top_k=1.5 top_p=0 top_p=1.1 batch_size=0
    prompt=[] precision=fp8 compile=maybe seed=-1 seed=99999999999999999999 prompt=\udcff
    device=tpu seed=${oc.env:HOME}
"""


def test_settings_of_generation():
    def check(arguments):
        return parse(generate.GenerateConfig, arguments)

    mistakes = [*GENERATION.split(), "max_new_tokens=" + "9" * 5000, "Once upon"]
    check_each(check, [[text, "checkpoint=x"] for text in mistakes])
    missing = {"top_k=1": "checkpoint", "seed=" + "9" * 400: "checkpoint"}
    check_each(check, ["checkpoint=", *missing], missing)


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    """A tiny trained run."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    with contextlib.chdir(folder):
        trainer = train.Trainer(settings(*TINY, "data.path=text.txt", "name=run"))
        trainer.train()
        trainer.close(0)
    return folder / "runs" / "run"


# script: (the arguments that it needs, {exit code: mistakes}); the key is that of the mistake.
SCRIPTS = {
    generate: (
        "checkpoint={run}",
        {2: "precision=fp16 device=cuda", 3: "checkpoint=no checkpoint=. checkpoint=/dev/zero"},
    ),
    prepare_data: (
        "data.path=text.txt out=out",
        {
            2: """worker=1 out= out=text.txt workers=all workers=-1 workers=1000000 part=3/2
                shard_tokens=1e30 shard_tokens=nan engine=x check_every=0 part=1/"""
            + "9" * 5000,
            3: "data.path=no data.path=pipe",
        },
    ),
    inspect_attention: (
        "checkpoint={run}",
        {
            2: """txt=x max_tokens=x max_tokens=1 max_tokens=1e30 repeated=-1 device=tpu out=x.png
                out=text.txt/x.html text=\udcff""",
            3: "checkpoint=no compare=no",
        },
    ),
    benchmark_data: (
        "text=text.txt",
        {2: "repeat=1 text=no.txt text=pipe repeats=x repeats=0 --repeats=1"},
    ),
    attention_ladder: ("", {2: "steps=3 --steps"}),
}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_arguments_of_scripts(in_process, text_file, tmp_path, a_run, script):
    os.mkfifo(tmp_path / "pipe")
    needed, mistakes = SCRIPTS[script]
    before = files_in(tmp_path)
    for expected, mistake in [(code, text) for code in mistakes for text in mistakes[code].split()]:
        tally(FAULT)
        key = mistake.partition("=")[0]
        given = [x for x in needed.format(run=a_run).split() if not x.startswith(f"{key}=")]
        code, _, err = in_process(script.main, tmp_path, *given, mistake)
        assert code == expected, (mistake, err)
        if script is not attention_ladder:  # whose arguments argparse checks
            assert printed_keys(err) == [key], mistake
        assert files_in(tmp_path) == before, mistake


def test_missing_arguments_of_scripts(in_process, tmp_path):
    for script, arguments, key in (
        (prepare_data, ["out=out"], "data.path"),
        (prepare_data, ["data.path=text.txt"], "out"),
        (inspect_attention, [], "checkpoint"),
    ):
        code, out, err = in_process(script.main, tmp_path, *arguments)
        assert (code, out, printed_keys(err)) == (2, "", [key])


def test_a_path_that_is_nearly_right(in_process, a_run):
    """The run's name alone, one with a typing error, the folder of its checkpoints."""
    for given, meant in (
        ("run", "runs/run"),
        ("runs/runn", "runs/run"),
        ("runs/run/checkpoints", "runs/run/checkpoints/last"),
    ):
        code, _, err = in_process(generate.main, a_run.parent.parent, f"checkpoint={given}")
        assert (code, printed_keys(err)) == (3, ["checkpoint"])
        assert err.endswith(f" {meant}?\n")


PROMPTS = {
    "empty": "",
    "longer than the context": "word " * 2000,
    "with NUL": "a\0b",
    "only the end-of-text token": "<|endoftext|>",
    "like a reference": "${oc.env:HOME} [a, {b} 'c",
    "of every plane": "é 漢 \U0001f642 \U0010ffff",
}


def test_unusual_prompts_are_continued(in_process, a_run, tmp_path):
    for what, prompt in PROMPTS.items():
        tally(FAULT)
        arguments = [f"checkpoint={a_run}", f"prompt={prompt}", "max_new_tokens=2"]
        code, out, err = in_process(generate.main, tmp_path, *arguments)
        assert code == 0, what
        assert out.startswith(prompt), what
        assert printed_keys(err) == ["prompt"] * (what == "longer than the context"), what


def test_help(in_process, tmp_path):
    scripts = (generate, attention_ladder, benchmark_data, inspect_attention, plan, prepare_data)
    for script in scripts:
        for flag in ("--help", "-h"):
            code, out, err = in_process(script.main, tmp_path, flag)
            assert (code, err) == (0, ""), script
            assert f"python {'-m ' * (script is not generate)}{script.__name__}" in out
    assert files_in(tmp_path) == set()


# ------------------------------------------------------------------------------------ the machine


def test_devices_and_precisions_that_are_missing(trainer, monkeypatch):
    with refused(ConfigError, "trainer.precision", "fp16"):
        trainer("trainer.precision=fp16")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refused(ConfigError, "trainer.device", "cuda"):
        trainer("trainer.device=cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: False)
    with refused(ConfigError, "trainer.precision", "bf16"):
        trainer("trainer.device=cuda", "trainer.precision=bf16")


def test_more_ranks_than_gpus(trainer, monkeypatch):
    numbers = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3}
    for name, value in {**numbers, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}.items():
        monkeypatch.setenv(name, str(value))
    with refused(ConfigError, "trainer.batch_size", 8):
        trainer()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with refused(ConfigError, "trainer.device", "cuda"):
        trainer("trainer.device=cuda", "trainer.batch_size=6")


def test_a_run_directory_that_cannot_be_made(trainer, tmp_path):
    (tmp_path / "runs").write_text("a file")
    for more in ([], ["name=run"]):
        with pytest.raises(RunDirectoryError):
            trainer(*more)


def test_out_of_memory_leaves_a_report(trainer, monkeypatch):
    run = trainer("name=run")
    forward = run.model.forward

    def full(*args, **kwargs):
        if run.model.training:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 TiB")
        return forward(*args, **kwargs)

    monkeypatch.setattr(run.model, "forward", full)
    with refused(OutOfMemoryError, "trainer.micro_batch_size", exit_code=4):
        run.train()
    run.close(4)
    assert (run.folder / "report.html").is_file()


def test_bytes_that_are_not_utf8_as_a_shell_passes_them(command, tmp_path):
    for script, arguments, key in (
        ("train.py", [*TINY, b"data.path=caf\xe9.txt"], "data.path"),
        ("generate.py", ["checkpoint=no", b"prompt=\xff"], "prompt"),
    ):
        done = command(script, *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert printed_keys(done.stderr) == [key]
        assert done.stderr[:-1].isprintable()
    assert files_in(tmp_path) == {"home"}
