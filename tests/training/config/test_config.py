"""Settings: what is accepted, the hints about unknown names, defaults, sweeps, the command.

What is refused: test_problems.py.
"""

import dataclasses
import gc
import re
import subprocess
import sys

import pytest
import yaml
from helpers import REPOSITORY
from helpers.refusals import printed_keys, refused
from helpers.settings import settings

import train
from errors import ConfigError
from generate import GenerateConfig
from training.command import check_sweep, command, compose, parse
from training.config import CONFIGS, GROUPS, PLAIN, TrainerConfig, coerce, schema_of, unknown_key
from training.other_names import OTHER_NAMES


def problem_keys(*overrides, **options) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        compose(list(overrides), **options)
    return [problem.key for problem in caught.value.problems]


# ------------------------------------------------------------------------------------------ hints


def suggested(known, key) -> set[str]:
    """The settings among `known` that the hint about an unknown key names."""
    hint = unknown_key(key, "1", known).hint
    if hint.startswith(key.rpartition(".")[0] + " has "):  # a list of the group's settings
        return set()
    return {name for name in known if re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", hint)}


@pytest.fixture(scope="module")
def of_training() -> list[str]:
    """All keys of a training command."""
    fields = [f"{group}.{f.name}" for group in GROUPS for f in dataclasses.fields(schema_of(group))]
    return [*PLAIN, *GROUPS, *fields]


# What is typed=what is suggested, if anything.
MEANT = """
optimizer.learning_rate=optimizer.lr trainer.epochs=trainer.max_steps model.layers=model.num_layers
block_size=data.max_length gradient_accumulation_steps=trainer.micro_batch_size out_dir=name
min_lr=optimizer.min_lr_ratio wandb_project=wandb.project train.max_step=trainer.max_steps
optimizer.beta=optimizer.betas optimiser.eps=optimizer.eps modle=model optimizer.lrr=optimizer.lr
max_step=trainer.max_steps model.num_head=model.num_heads trainer.gpus_per= trainer.verbose=
trainer.patience= optimizer.gamma= trainer.ema=
"""


def test_hints_name_the_setting_that_was_meant(of_training):
    for key, _, setting in (text.partition("=") for text in MEANT.split()):
        found = suggested(of_training, key)
        assert (setting in found) if setting else (found == set()), key


def test_names_of_other_projects_lead_to_settings_that_exist(of_training):
    from scripts.plan import PlanConfig

    of_generate, of_plan = (
        [f.name for f in dataclasses.fields(c)] for c in (GenerateConfig, PlanConfig)
    )
    for setting, names, remark in OTHER_NAMES:
        named = set(re.findall(r"[a-z]+\.[a-z_]+", remark)) - {"train.py"}
        assert named <= set(of_training)
        (known, *_) = (keys for keys in (of_training, of_generate, of_plan) if setting in keys)
        for name in names.split():
            assert name not in known
            assert setting in suggested(known, name), name
    assert suggested(of_generate, "num_tokens") == {"max_new_tokens"}


def test_the_value_in_a_hint_is_accepted():
    """As a shell passes it on."""
    for wrong in ("optimizer.betas=0.9", "lens.layers=3", "wandb.tags=a", "trainer.keep=0"):
        with refused(ConfigError, wrong.partition("=")[0]) as caught:
            settings(wrong)
        (value,) = re.findall(r"(?:use|such as) (\S+)", caught.value.hint)
        settings(f"{caught.value.key}={value}")


# --------------------------------------------------------------------------------------- accepted


def test_accepted_forms():
    found = compose(
        [
            "model=gpt2-nano",
            "+experiment=laptop",
            "optimizer.lr=3e-4",
            "++trainer.max_steps=1e3",
            "lens.prompts=[one prompt,another]",
            "data.path=[a.txt,b.txt]",
            "name=2026",
            "trainer.compile=false",
            "trainer.sample_prompt='a, b'",
            "wandb.group=null",
        ]
    )
    assert (found.model.emb_dim, found.optimizer.lr, found.name) == (128, 3e-4, "2026")
    assert found.trainer.max_steps == 1000
    assert isinstance(found.trainer.max_steps, int)
    assert found.lens.prompts == ["one prompt", "another"]
    assert found.data.path == ["a.txt", "b.txt"]
    assert found.trainer.compile is False
    assert found.trainer.batch_size == 8  # of the experiment
    assert (found.trainer.sample_prompt, found.wandb.group) == ("a, b", None)


def test_choices_of_groups_and_references():
    for experiment in ("laptop", "induction"):
        assert compose([f"experiment={experiment}", "trainer.max_steps=10"]).lens.every > 0
        assert compose([f"experiment={experiment}", "lens=off"]).lens.every == 0
    assert compose(["wandb=off"]).wandb.mode == "disabled"
    text = compose(["data=text", "data.path=x.txt", "model=gpt2-nano"])
    assert text.data.max_length == text.model.context_length == 256


FREE_TEXTS = [
    *("Hello, world, so he ran", "a=b", "[INST", "2026_11", "1e3", "it's", 'say "x"', "{c}"),
    *(
        "ü (1)",
        "a\\b",
        "\\",
        '\\"',
        "a\\\\b \\\\",
        "cost ${x} ${",
        "\\${oc.env:HOME}",
        "\\\\${seed}",
    ),
]


def test_free_text_is_taken_as_typed():
    """In both commands; a text of lens.prompts is a list of one."""
    for text in FREE_TEXTS:
        found = compose([f"trainer.sample_prompt={text}", f"lens.prompts={text}"])
        assert found.trainer.sample_prompt == text
        assert found.lens.prompts == [text]
        arguments = ["checkpoint=x", f"prompt= {text} ", "top_k=null"]
        found = parse(GenerateConfig, arguments)
        assert (found.prompt, found.top_k) == (f" {text} ", None)


def test_own_config_folder(tmp_path):
    (tmp_path / "experiment").mkdir()
    path = tmp_path / "experiment" / "mine.yaml"
    path.write_text("# @package _global_\noptimizer:\n  lr: 0.125\n")
    assert compose(["experiment=mine"], config_dir=str(tmp_path)).optimizer.lr == 0.125
    assert problem_keys("experiment=mine") == ["experiment"]


def test_types_are_checked_strictly():
    for value, hint in [(True, int), (1, bool), ("1", int), (1.5, int), ([1, "x"], list[float])]:
        with pytest.raises(TypeError):
            coerce(value, hint)
    assert coerce(None, int | None) is None
    assert coerce(True, str | bool) is True
    assert coerce("auto", str | bool) == "auto"


def test_every_problem_is_listed():
    keys = ["optimizer.lrr", "model.num_heads", "optimizer.lr", "name", "seed"]
    given = ["optimizer.lrr=1", "model.num_heads=5", "optimizer.lr=-1", "seed=x", "name=a\nb"]
    assert sorted(problem_keys(*given)) == sorted(keys)
    with pytest.raises(ConfigError) as caught:
        parse(GenerateConfig, ["promt=x", "temperature=-1", "checkpoint=y"])
    assert [problem.key for problem in caught.value.problems] == ["promt", "temperature"]


def test_types_are_checked_before_the_run_to_resume_is_read():
    given = ["trainer.resume=runs/none", "trainer.max_steps=abc", "optimizer.lr=[1]"]
    assert problem_keys(*given) == ["trainer.max_steps", "optimizer.lr"]
    assert compose(["trainer.resume=runs/none", "model.num_heads=5"]).overrides is not None


# ---------------------------------------------------------------------------------- shipped files


def test_yaml_files_and_dataclasses_have_the_same_settings_and_defaults():
    shipped = {"model": "gpt2-small", "data": "sample", "optimizer": "adamw", "parallel": "auto"}
    for group in GROUPS:
        path = CONFIGS / group / f"{shipped.get(group, 'default')}.yaml"
        values = yaml.safe_load(path.read_text())
        if group == "data":
            values["path"] = None  # the sample's
        defaults = vars(schema_of(group)())
        assert list(values) == list(defaults)
        assert values == defaults


def test_every_shipped_choice_is_valid_and_runs_no_code():
    for path in CONFIGS.glob("*/*.yaml"):
        assert "_target_" not in path.read_text()
        needs = path.stem in ("text", "shards", "shakespeare-cpu")
        extra = ["data.path=x.txt"] if needs else []
        extra += ["trainer.init_from=x"] if path.stem == "finetune" else []
        compose([f"{path.parent.name}={path.stem}", *extra])


# ----------------------------------------------------------------------------------------- sweeps


def test_a_sweep_is_checked_before_its_first_job():
    own = ["hydra.sweep.dir=sweeps", "hydra/launcher=basic", "hydra.sweeper.max_batch_size=2"]
    plan = check_sweep(["optimizer.lr=1e-3,3e-4", "seed=1,2", "model=gpt2-nano", *own], None)
    assert (plan.keys, plan.count) == (["optimizer.lr", "seed"], 4)
    assert check_sweep(["name=one,two"], None).count == 2
    given = ["model=gpt2-nano", "optimizer.lr=1e-3,abc", "seed=1,x", "optimizer.lrr=1"]
    with pytest.raises(ConfigError) as caught:
        check_sweep(given, None)
    found = {(problem.key, problem.value) for problem in caught.value.problems}
    assert found == {("optimizer.lr", "abc"), ("optimizer.lrr", "1"), ("seed", "x")}


# ------------------------------------------------------------------------------------ the command


def test_a_mistake_is_answered_without_torch_and_leaves_no_file(tmp_path):
    """In a process of its own."""
    code = (
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); import train\n"
        "for text in ('modle=gpt2-small', 'optimizer.lr=abc'):\n"
        "    sys.argv = ['train.py', text]\n"
        "    try: train.main()\n"
        "    except SystemExit as stop: assert stop.code == 2 and 'torch' not in sys.modules\n"
        "    else: raise AssertionError\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert done.stdout == ""
    assert printed_keys(done.stderr) == ["modle", "optimizer.lr"]
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


def test_help_and_cfg(in_process, tmp_path):
    code, out, _ = in_process(train.main, tmp_path, "--help")
    assert code == 0
    assert "gpt2-nano" in out
    assert "max_steps: 120" in out
    for typed in (["--cfg", "job", "seed=7"], ["seed=7", "--cfg", "job"]):  # in any order
        code, out, err = in_process(train.main, tmp_path, *typed, "name=x", "optimizer.lr=0.5")
        assert (code, err) == (0, "")
        shown = yaml.safe_load(out)
        assert (shown["seed"], shown["name"], shown["optimizer"]["lr"]) == (7, "x", 0.5)


# --------------------------------------------------------------------- settings that follow others


def chosen(before=None, **values):
    trainer = TrainerConfig(**values)
    trainer.choose(before or {})
    return trainer.warmup_steps, trainer.eval_every, trainer.eval_windows, trainer.log_every


def test_settings_that_are_null_follow_the_length_of_the_run():
    assert chosen(max_steps=1) == (0, 40, 8, 1)
    assert chosen(max_steps=20) == (4, 40, 8, 1)
    assert chosen(max_steps=120) == (24, 40, 8, 1)
    assert chosen(max_steps=400) == (40, 40, 8, 1)
    assert chosen(max_steps=2000) == (200, 200, 8, 4)
    assert chosen(max_steps=10**6, batch_size=512) == (2000, 1000, 400, 2000)
    assert chosen(max_steps=2000, eval_every=0, batch_size=4) == (200, 0, 160, 4)
    given = {"warmup_steps": 0, "eval_every": 7, "eval_windows": 3}
    assert chosen(max_steps=2000, **given) == (0, 7, 3, 4)


def test_a_run_that_is_made_longer_keeps_its_settings():
    before = {"warmup_steps": 12, "eval_every": 40, "eval_windows": 100, "log_every": 1}
    assert chosen(before, max_steps=5000) == (12, 40, 100, 1)
    assert chosen(before, max_steps=5000, eval_windows=9) == (12, 40, 9, 1)
    assert chosen({"eval_every": None}, max_steps=120) == (24, 40, 8, 1)
