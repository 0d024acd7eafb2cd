"""Settings: what is accepted, the hints about unknown names, defaults, sweeps, the command.

What is refused: test_problems.py.
"""

import dataclasses
import gc
import itertools
import re
import subprocess
import sys

import pytest
import yaml
from helpers import REPOSITORY

import train
from errors import ConfigError
from generate import GenerateConfig
from training.config.command_line import check_sweep, command, compose, parse
from training.config.other_names import OTHER_NAMES
from training.config.schema import (
    CONFIGS,
    GROUPS,
    PLAIN,
    TrainerConfig,
    coerce,
    schema_of,
    unknown_key,
)


def suggested(known, key) -> set[str]:
    """The settings among `known` that the hint about an unknown key names."""
    hint = unknown_key(key, "1", known).hint
    return {name for name in known if re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", hint)}


@pytest.fixture(scope="module")
def of_training() -> list[str]:
    fields = [f"{group}.{f.name}" for group in GROUPS for f in dataclasses.fields(schema_of(group))]
    return [*PLAIN, *GROUPS, *fields]


# What is typed=what is suggested, if anything.
MEANT = """
optimizer.learning_rate=optimizer.lr trainer.epochs=trainer.max_steps block_size=data.max_length
wandb_project=wandb.project train.max_step=trainer.max_steps optimizer.beta=optimizer.betas
modle=model max_step=trainer.max_steps model.num_head=model.num_heads verbose= gamma=
"""


def test_hints_name_the_setting_that_was_meant(of_training):
    for key, _, setting in (text.partition("=") for text in MEANT.split()):
        found = suggested(of_training, key)
        assert (setting in found) if setting else (found == set()), key


def test_names_of_other_projects_lead_to_settings_that_exist(of_training):
    from scripts.plan import PlanConfig

    others = ([f.name for f in dataclasses.fields(c)] for c in (GenerateConfig, PlanConfig))
    commands = [of_training, *others]
    for setting, names, remark in OTHER_NAMES:
        named = set(re.findall(r"[a-z]+\.[a-z_]+", remark)) - {"train.py"}
        assert named <= set(of_training)
        (known, *_) = (keys for keys in commands if setting in keys)
        for name in names.split():
            assert name not in known
            assert setting in suggested(known, name), name


def test_accepted_forms():
    given = ["model=gpt2-nano", "+experiment=laptop", "lens=off", "optimizer.lr=3e-4", "name=2026"]
    given += ["lens.prompts=[one prompt,another]", "data.path=[a.txt,b.txt]"]
    given += ["++trainer.max_steps=1e3", "trainer.compile=false", "wandb.group=null"]
    found = compose(given)
    assert (found.model.emb_dim, found.optimizer.lr, found.name) == (128, 3e-4, "2026")
    assert repr(found.trainer.max_steps) == "1000"
    assert found.lens.prompts == ["one prompt", "another"]
    assert found.data.path == ["a.txt", "b.txt"]
    assert (found.trainer.compile, found.wandb.group) == (False, None)
    assert (found.trainer.batch_size, found.lens.every) == (8, 0)  # of the experiment, without lens
    text = compose(["data=text", "data.path=x.txt", "model=gpt2-nano", "wandb=off"])
    assert text.data.max_length == text.model.context_length == 256
    assert text.wandb.mode == "disabled"


FREE_TEXTS = ["Hello, world, so he ran", "a=b", "[INST", "1e3", "it's", 'say "x"', "{c}", "ü (1)"]
FREE_TEXTS += ["\\", '\\"', "a\\\\b \\\\", "cost ${x} ${", "\\${oc.env:HOME}", "\\\\${seed}"]


def test_free_text_is_taken_as_typed():
    for text in FREE_TEXTS:
        found = compose([f"trainer.sample_prompt={text}", f"lens.prompts={text}"])
        assert found.trainer.sample_prompt == text
        assert found.lens.prompts == [text]
        found = parse(GenerateConfig, ["checkpoint=x", f"prompt= {text} ", "top_k=null"])
        assert (found.prompt, found.top_k) == (f" {text} ", None)


def test_types_are_checked_strictly():
    for value, hint in [(True, int), (1, bool), ("1", int), (1.5, int), ([1, "x"], list[float])]:
        with pytest.raises(TypeError):
            coerce(value, hint)
    assert coerce(True, str | bool) is True
    assert coerce("auto", str | bool) == "auto"


def problems_of(read, *given) -> list[tuple[str, str]]:
    """(key, value) of each problem."""
    with pytest.raises(ConfigError) as caught:
        read(*given)
    return [(problem.key, problem.value) for problem in caught.value.problems]


def test_every_problem_is_listed():
    given = ["optimizer.lrr=1", "seed=x", "optimizer.lr=-1", "model.num_heads=5", "name=a\nb"]
    given += ["trainer.max_steps=0"]
    found = [key for key, _ in problems_of(compose, given)]
    assert sorted(found) == sorted(text.partition("=")[0] for text in given)
    found = problems_of(parse, GenerateConfig, ["promt=x", "temperature=-1", "checkpoint=y"])
    assert found == [("promt", "x"), ("temperature", -1)]
    # Types are checked before the run to resume is read.
    given = ["trainer.resume=runs/none", "trainer.max_steps=abc", "optimizer.lr=[1]"]
    assert problems_of(compose, given) == [("trainer.max_steps", "abc"), ("optimizer.lr", [1])]
    # Of a sweep before its first job.
    given = ["optimizer.lr=1e-3,abc", "seed=1,x", "optimizer.lrr=1"]
    found = problems_of(check_sweep, given, None)
    assert sorted(found) == [("optimizer.lr", "abc"), ("optimizer.lrr", "1"), ("seed", "x")]


def test_yaml_files_and_dataclasses_have_the_same_settings_and_defaults():
    shipped = {"model": "gpt2-small", "data": "sample", "optimizer": "adamw", "parallel": "auto"}
    for group in GROUPS:
        path = CONFIGS / group / f"{shipped.get(group, 'default')}.yaml"
        values = yaml.safe_load(path.read_text())
        if group == "data":
            values["path"] = None  # the sample's
        assert list(values.items()) == list(vars(schema_of(group)()).items())


def test_every_shipped_choice_is_valid():
    names = {group: sorted(p.stem for p in (CONFIGS / group).glob("*.yaml")) for group in GROUPS}
    names["lens"].remove("induction")  # its layer and head are those of experiment=induction
    for choices in itertools.zip_longest(*names.values(), fillvalue=None):
        chosen = [f"{group}={name}" for group, name in zip(names, choices, strict=True) if name]
        if not {"data=induction", "data=sample"} & set(chosen):
            chosen.append("data.path=x.txt")
        compose(chosen)
    for path in (CONFIGS / "experiment").glob("*.yaml"):
        extra = {"shakespeare-cpu": ["data.path=x.txt"], "finetune": ["trainer.init_from=x"]}
        compose([f"experiment={path.stem}", *extra.get(path.stem, [])])


def test_a_mistake_is_answered_without_torch_and_leaves_no_file(tmp_path):
    """In a process of its own, which lists what it imports."""
    given = [sys.executable, "-X", "importtime", REPOSITORY / "train.py", "optimizer.lr=abc"]
    done = subprocess.run(given, cwd=tmp_path, capture_output=True, text=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert (done.returncode, "hydra" in imported, "torch" in imported) == (2, True, False)
    assert list(tmp_path.iterdir()) == []


def test_garbage_collection_is_on_in_a_run(in_process, tmp_path):
    """A command starts without it."""
    found = []
    start = command(lambda settings: found.append(gc.isenabled()))
    gc.disable()
    try:
        assert in_process(start, tmp_path, "lens=off")[0] == 0
    finally:
        gc.enable()
    assert found == [True]


def test_cfg_prints_the_settings(in_process, tmp_path):
    """In any order; Hydra itself wants its options first."""
    code, out, err = in_process(train.main, tmp_path, "seed=7", "--cfg", "job", "name=x")
    assert (code, err) == (0, "")
    shown = yaml.safe_load(out)
    assert (shown["seed"], shown["name"]) == (7, "x")


def chosen(before=None, **values):
    trainer = TrainerConfig(**values)
    trainer.choose(before or {})
    return trainer.warmup_steps, trainer.eval_every, trainer.eval_windows, trainer.log_every


def test_settings_that_are_null_follow_the_length_of_the_run():
    assert chosen(max_steps=1) == (0, 40, 8, 1)
    assert chosen(max_steps=120) == (24, 40, 8, 1)
    assert chosen(max_steps=2000) == (200, 200, 8, 4)
    assert chosen(max_steps=10**6, batch_size=512) == (2000, 1000, 400, 2000)
    assert chosen(max_steps=2000, eval_every=0, batch_size=4) == (200, 0, 160, 4)
    assert chosen(max_steps=2000, warmup_steps=0, eval_every=7, eval_windows=3) == (0, 7, 3, 4)
    # A run that is made longer keeps its settings.
    before = {"warmup_steps": 12, "eval_every": 40, "eval_windows": 100, "log_every": 1}
    assert chosen(before, max_steps=5000, eval_windows=9) == (12, 40, 9, 1)
    assert chosen({"eval_every": None}, max_steps=120) == (24, 40, 8, 1)
