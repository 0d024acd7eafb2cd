"""The door: what is accepted, what is refused, and how it is said."""

import dataclasses
import gc
import importlib
import re
import subprocess
import sys

import pytest
import yaml
from helpers import REPOSITORY

from errors import ConfigError
from training.command import check_sweep, compose, parse
from training.command import command as command_of
from training.config import CONFIGS, GROUPS, PLAIN, TrainerConfig, coerce, fill, unknown_key
from training.other_names import OTHER_NAMES


def problems(*overrides):
    with pytest.raises(ConfigError) as caught:
        compose(list(overrides))
    return str(caught.value).splitlines()


# One line each: what is typed, what the answer begins with, what it must say.
REFUSED = [
    ("modle=gpt2-small", "modle=gpt2-small: ", "did you mean model?"),
    ("model=gpt2-smal", "model=gpt2-smal: ", "did you mean model=gpt2-small?"),
    ("model=llama", "model=llama: ", "gpt2-large, gpt2-medium, gpt2-nano, gpt2-small, gpt2-xl"),
    ("optimizer.lrr=1", "optimizer.lrr=1: ", "did you mean optimizer.lr?"),
    ("lr=1", "lr=1: ", "did you mean optimizer.lr?"),
    ("max_step=1", "max_step=1: ", "did you mean trainer.max_steps?"),
    ("+model.typo=1", "model.typo=1: ", "no such setting; model has vocab_size"),
    ("++model.num_head=1", "model.num_head=1: ", "did you mean model.num_heads?"),
    ("hydra.ouput_subdir=x", "hydra.ouput_subdir=x: ", "is Hydra's own"),
    ("hydra.run.dir=x", "hydra.run.dir=x: ", "is Hydra's own"),
    ("hydra.sweep.dir=x", "hydra.sweep.dir=x: ", "add -m"),
    ("optimizer.lr=abc", "optimizer.lr=abc: ", "must be a number"),
    ("optimizer.lr=-1", "optimizer.lr=-1.0: ", "must be a positive number"),
    ("optimizer.lr=nan", "optimizer.lr=nan: ", "must be a positive number"),
    ("optimizer.lr=inf", "optimizer.lr=inf: ", "must be a positive number"),
    ("optimizer.betas=[0.9]", "optimizer.betas=[0.9]: ", "two numbers"),
    ("optimizer.betas=0.9", "optimizer.betas=0.9: ", "a list of numbers"),
    ("optimizer.schedule=linear", "optimizer.schedule=linear: ", "wsd, cosine, constant"),
    ("optimizer.weight_decay=-1", "optimizer.weight_decay=-1.0: ", "must not be negative"),
    ("optimizer.min_lr_ratio=2", "optimizer.min_lr_ratio=2.0: ", "share"),
    ("optimizer.decay_fraction=0", "optimizer.decay_fraction=0.0: ", "share"),
    ("optimizer.eps=0", "optimizer.eps=0.0: ", "positive"),
    ("model.num_heads=5", "model.num_heads=5: ", "emb_dim=768 cannot be split into 5 equal heads"),
    ("model.num_layers=0", "model.num_layers=0: ", "at least 1"),
    ("model.dropout=1.5", "model.dropout=1.5: ", "probability"),
    ("model.emb_dim=null", "model.emb_dim=null: ", "whole number"),
    ("model.emb_dim=1.5", "model.emb_dim=1.5: ", "whole number"),
    ("model.qkv_bias=3", "model.qkv_bias=3: ", "true or false"),
    ("model.attention=flash", "model.attention=flash: ", "sdpa"),
    ("model.attention=flex", "model.attention=flex: ", "model.dropout=0"),
    ("data.max_length=2048", "data.max_length=2048: ", "model.context_length=1024"),
    ("data.tokenizer=word", "data.tokenizer=word: ", "gpt2 or byte"),
    ("data.val_fraction=1", "data.val_fraction=1.0: ", "share"),
    ("data.stride=0", "data.stride=0: ", "1 or more"),
    ("data.endoftext=maybe", "data.endoftext=maybe: ", "token or text"),
    ("data=text", "data.path=null: ", "set data.path=FILE"),
    ("model.vocab_size=1000", "model.vocab_size=1000: ", "data.tokenizer=gpt2 has 50257 ids"),
    ("trainer.max_steps=0", "trainer.max_steps=0: ", "at least 1"),
    ("trainer.max_steps=1.5", "trainer.max_steps=1.5: ", "whole number"),
    ("trainer.warmup_steps=1000", "trainer.warmup_steps=1000: ", "max_steps=120"),
    ("trainer.micro_batch_size=3", "trainer.micro_batch_size=3: ", "batch_size=2"),
    ("trainer.grad_clip=-1", "trainer.grad_clip=-1.0: ", "negative"),
    ("trainer.precision=fp8", "trainer.precision=fp8: ", "auto, fp32, bf16, fp16"),
    ("trainer.compile=maybe", "trainer.compile=maybe: ", "auto, true, false"),
    ("trainer.device=tpu", "trainer.device=tpu: ", "auto, cpu, cuda, mps"),
    ("trainer.resume=true", "trainer.resume=true: ", "auto, must, false or a path"),
    ("lens.every=-1", "lens.every=-1: ", "0 for no lens"),
    ("lens.max_tokens=1", "lens.max_tokens=1: ", "2 to 1024"),
    ("lens.frames=1", "lens.frames=1: ", "2 to 200"),
    ("lens.layers=[12]", "lens.layers=12: ", "layers 0 to 11"),
    ("lens.prompts=['']", "lens.prompts='': ", "empty prompt"),
    ("wandb.mode=of", "wandb.mode=of: ", "auto, online, offline, disabled"),
    ("wandb.project=''", "wandb.project=: ", "needs a name"),
    ("wandb.project=team/a", "wandb.project=team/a: ", "wandb.entity=TEAM"),
    ("wandb.project=a#b", "wandb.project=a#b: ", "W&B takes no # in it"),
    (f"wandb.group={'g' * 129}", "wandb.group=ggg", "longer than the 128 characters"),
    (f"wandb.job_type={'j' * 65}", "wandb.job_type=jjj", "longer than the 64 characters"),
    (f"wandb.tags=[a,{'t' * 65}]", "wandb.tags=ttt", "at most 64 characters"),
    ("wandb.tags=[a,' ']", "wandb.tags=' ': ", "an empty tag"),
    ("wandb.log_model=true", "wandb.log_model=true: ", "best, last, or false"),
    ("wandb.alerts=often", "wandb.alerts=often: ", "true or false"),
    ("parallel=many", "parallel=many: ", "no such parallel; use one of auto, ddp, fsdp, single"),
    ("parallel.strategy=many", "parallel.strategy=many: ", "no such strategy; use one of auto"),
    ("parallel.timeout=0", "parallel.timeout=0: ", "from 1 to below 1800"),
    ("parallel.timeout=1800", "parallel.timeout=1800: ", "from 1 to below 1800"),
    ("name=../escape", "name=../escape: ", "runs/<name>"),
    ("seed=x", "seed=x: ", "whole number"),
    ("~data", "~data", "cannot be deleted"),
    ("seed=-1", "seed=-1: ", "2^63"),
    ("seed=99999999999999999999", "seed=99999999999999999999: ", "2^63"),
    ("optimizer.lr=1,2", "optimizer.lr=1,2: ", "-m trains once for each"),
    ("trainer.device=a(b", "trainer.device=a(b: ", "quote the value"),
    ("model.emb_dim=1000000007", "model.num_heads=12: ", "such as 1"),
    ("model=gpt2", "model=gpt2: ", "use one of gpt2-large"),
    ("foo", "foo: ", "is not of the form key=value"),
    ("model={emb_dim:3}", "model={emb_dim:3}: ", "no such model"),
]


@pytest.mark.parametrize(("override", "begins", "says"), REFUSED, ids=[r[0] for r in REFUSED])
def test_refused_in_one_line(override, begins, says):
    lines = problems(override)
    assert len(lines) == 1
    assert lines[0].startswith(begins)
    assert says in lines[0]


def suggested(known, key):
    """The settings among `known` that the hint about an unknown key names, in its group or not."""
    fix = unknown_key(key, "1", known)[3]
    if fix.startswith(key.rpartition(".")[0] + " has "):  # a list of the group's settings
        return set()
    return {name for name in known if re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", fix)}


@pytest.fixture(scope="module")
def of_training():
    """All keys of a training command."""
    return [*PLAIN, *GROUPS, *(f"{g}.{f.name}" for g in GROUPS for f in fields_of(g))]


def fields_of(group):
    module, name = GROUPS[group]
    return dataclasses.fields(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize(
    ("key", "setting"),
    [
        ("optimizer.learning_rate", "optimizer.lr"),
        ("trainer.epochs", "trainer.max_steps"),
        ("num_train_epochs", "trainer.max_steps"),
        ("model.layers", "model.num_layers"),
        ("block_size", "data.max_length"),
        ("gradient_accumulation_steps", "trainer.micro_batch_size"),
        ("min_lr", "optimizer.min_lr_ratio"),
        ("bf16", "trainer.precision"),
        ("wandb_project", "wandb.project"),
        ("out_dir", "name"),
        ("train.max_step", "trainer.max_steps"),
        ("optimizer.beta", "optimizer.betas"),
        ("optimiser.eps", "optimizer.eps"),
    ],
)
def test_a_hint_names_the_setting_that_was_meant(of_training, key, setting):
    assert setting in suggested(of_training, key)


@pytest.mark.parametrize(
    "key",
    ["trainer.gpus_per", "trainer.verbose", "trainer.patience", "optimizer.gamma", "trainer.ema"],
)
def test_a_hint_names_nothing_when_nothing_is_alike(of_training, key):
    assert suggested(of_training, key) == set()


@pytest.mark.parametrize(
    "wrong",
    [
        "optimizer.betas=0.9",
        "lens.layers=3",
        "wandb.tags=a",
        "trainer.keep=0",
        "model.num_layers=0",
    ],
)
def test_the_value_that_a_hint_gives_is_accepted_as_a_shell_passes_it(wrong):
    with pytest.raises(ConfigError) as caught:
        compose([wrong])
    ((key, _, _, fix),) = caught.value.problems
    (value,) = re.findall(r"(?:use|such as) (\S+)", fix)
    compose([f"{key}={value}"])


def test_names_of_other_projects_lead_to_settings_that_exist(of_training):
    from generate import GenerateConfig
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
            assert setting in suggested(known, name)
    assert suggested(of_generate, "num_tokens") == {"max_new_tokens"}


def test_every_problem_is_listed():
    lines = problems("optimizer.lrr=1", "model.num_heads=5", "optimizer.lr=-1", "seed=x")
    assert [line.split("=")[0] for line in lines] == [
        "optimizer.lrr",
        "model.num_heads",
        "optimizer.lr",
        "seed",
    ]


def test_accepted_forms():
    settings = compose(
        [
            "model=gpt2-nano",
            "+experiment=laptop",
            "optimizer.lr=3e-4",
            "++trainer.max_steps=1e3",
            "lens.prompts=[one prompt,another]",
            "data.path=[a.txt,b.txt]",
            "name=2026",
            "trainer.compile=false",
        ]
    )
    assert settings.model.emb_dim == 128
    assert settings.optimizer.lr == 3e-4
    assert settings.trainer.max_steps == 1000
    assert isinstance(settings.trainer.max_steps, int)
    assert settings.lens.prompts == ["one prompt", "another"]
    assert settings.data.path == ["a.txt", "b.txt"]
    assert settings.name == "2026"
    assert settings.trainer.compile is False
    assert settings.trainer.batch_size == 8  # from the experiment


def test_group_choices_and_interpolation():
    assert compose(["lens=off"]).lens.every == 0
    for experiment in ("laptop", "induction"):
        assert compose([f"experiment={experiment}"]).lens.every > 0
        assert compose([f"experiment={experiment}", "lens=off"]).lens.every == 0
        assert compose([f"experiment={experiment}", "trainer.max_steps=10"])
    assert compose(["wandb=off"]).wandb.mode == "disabled"
    text = compose(["data=text", "data.path=x.txt", "model=gpt2-nano"])
    assert text.data.max_length == text.model.context_length == 256


def test_the_runs_of_a_sweep_need_names_of_their_own():
    with pytest.raises(ConfigError, match="name=one: several runs cannot share one directory"):
        check_sweep(["name=one", "seed=1,2"], None)
    check_sweep(["name=one,two", "optimizer.lr=1e-3"], None)


def test_a_bare_prompt_is_one_prompt():
    prompts = compose(["lens.prompts=The dog bit the man, so he ran"]).lens.prompts
    assert prompts == ["The dog bit the man, so he ran"]


def test_a_sweep_is_checked_before_its_first_job():
    check_sweep(["optimizer.lr=1e-3,3e-4", "seed=1,2", "model=gpt2-nano,gpt2-small"], None)
    with pytest.raises(ConfigError) as caught:
        check_sweep(
            ["model=gpt2-nano", "optimizer.lr=1e-3,abc", "seed=1,x", "optimizer.lrr=1"], None
        )
    lines = str(caught.value).splitlines()
    assert sorted(line.split(":")[0] for line in lines) == [
        "optimizer.lr=abc",
        "optimizer.lrr=1",
        "seed=x",
    ]


def test_a_sweep_may_tell_hydra_what_is_its_own():
    own = ["hydra.sweep.dir=sweeps", "hydra/launcher=basic", "hydra.sweeper.max_batch_size=2"]
    check_sweep(["seed=1,2", *own], None)
    with pytest.raises(ConfigError, match=r"hydra\.sweep\.dirr=x: no such setting; did you mean"):
        check_sweep(["seed=1,2", "hydra.sweep.dirr=x"], None)
    with pytest.raises(ConfigError, match=r"hydra/launcher=nope: no such hydra/launcher; use one"):
        check_sweep(["seed=1,2", "hydra/launcher=nope"], None)


def test_own_config_folder(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\noptimizer:\n  lr: 0.125\n"
    )
    assert compose(["experiment=mine"], config_dir=str(tmp_path)).optimizer.lr == 0.125
    assert "no such experiment" in problems("experiment=mine")[0]


@pytest.mark.parametrize("group", GROUPS)
def test_yaml_files_and_dataclasses_name_the_same_settings_with_the_same_defaults(group):
    module, name = GROUPS[group]
    schema = getattr(importlib.import_module(module), name)
    shipped = {"model": "gpt2-small", "data": "sample", "optimizer": "adamw", "parallel": "auto"}
    default = shipped.get(group, "default")
    values = yaml.safe_load((CONFIGS / group / f"{default}.yaml").read_text())
    fields = {field.name: getattr(schema(), field.name) for field in dataclasses.fields(schema)}
    if group == "data":
        values["path"] = None  # the sample's
    assert list(values) == list(fields)
    assert values == fields


def test_every_shipped_choice_is_valid():
    for path in CONFIGS.glob("*/*.yaml"):
        needs = path.stem in ("text", "shards", "shakespeare-cpu")
        extra = ["data.path=x.txt"] if needs else []
        extra += ["trainer.init_from=x"] if path.stem == "finetune" else []
        compose([f"{path.parent.name}={path.stem}", *extra])


def test_a_missing_config_folder_is_named():
    with pytest.raises(ConfigError, match="--config-dir=nowhere: no such folder"):
        compose([], config_dir="nowhere")


def test_no_instantiation_from_configuration():
    assert "names code to run" in problems("+model._target_=os.system")[0]
    for path in CONFIGS.rglob("*.yaml"):
        assert "_target_" not in path.read_text()


def test_coerce_is_strict():
    for value, hint in [(True, int), (1, bool), ("1", int), (1.5, int), ([1, "x"], list[float])]:
        with pytest.raises(TypeError):
            coerce(value, hint)
    assert coerce(None, int | None) is None
    assert coerce(True, str | bool) is True
    assert coerce("auto", str | bool) == "auto"


TYPED_AS_TEXT = [
    "Hello, world",
    "a=b",
    "[INST",
    "2026_11",
    "1e3",
    "it's",
    'say "x"',
    "{c}",
    "ü (1)",
    "a\\b",
    "\\",
    '\\"',
    "a\\\\b \\\\",
    "cost ${x} ${",
    "\\${oc.env:HOME}",
    "\\\\${seed}",
]


@pytest.mark.parametrize("text", TYPED_AS_TEXT)
def test_free_text_is_taken_as_typed(text):
    from generate import GenerateConfig

    settings = compose([f"trainer.sample_prompt={text}", f"lens.prompts={text}"])
    assert settings.trainer.sample_prompt == text
    assert settings.lens.prompts == [text]
    assert parse(GenerateConfig, ["checkpoint=x", f"prompt= {text} "]).prompt == f" {text} "


def test_free_text_may_be_quoted_null_or_a_list():
    settings = compose(["trainer.sample_prompt='a, b'", "wandb.group=null", "data.path=[a,b]"])
    assert settings.trainer.sample_prompt == "a, b"
    assert settings.wandb.group is None
    assert settings.data.path == ["a", "b"]


def test_small_commands_are_checked_alike():
    from generate import GenerateConfig

    settings = parse(GenerateConfig, ["checkpoint=runs/x", "prompt=Say: a=b, {c} [d", "top_k=null"])
    assert settings.prompt == "Say: a=b, {c} [d"
    assert settings.top_k is None
    with pytest.raises(ConfigError) as caught:
        parse(GenerateConfig, ["promt=x", "temperature=-1", "checkpoint=y"])
    text = str(caught.value)
    assert "promt=x: no such setting; did you mean prompt?" in text
    assert "temperature=-1.0: must be 0" in text
    assert fill(GenerateConfig, {})[1][0][:1] == ("checkpoint",)


# --------------------------------------------------------------------- as a user meets it


def test_a_mistyped_key_is_answered_without_torch_and_leaves_nothing(command, tmp_path):
    done = command("train.py", "modle=gpt2-small")
    assert done.returncode == 2
    assert done.stderr == "modle=gpt2-small: no such setting; did you mean model?\n"
    assert done.stdout == ""
    assert sorted(p.name for p in tmp_path.iterdir()) == ["home"]

    code = (
        "import sys; sys.argv = ['train.py', 'optimizer.lr=abc']; import train\n"
        "try: train.main()\n"
        "except SystemExit as stop: assert stop.code == 2 and 'torch' not in sys.modules\n"
        "else: raise AssertionError"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True, capture_output=True)


def test_a_run_looks_for_garbage_which_its_start_did_not(in_process, tmp_path):
    looks = []
    start = command_of(lambda settings: looks.append(gc.isenabled()))
    gc.disable()
    try:
        assert in_process(start, tmp_path, "lens=off")[0] == 0
        assert gc.isenabled()
    finally:
        gc.enable()
    assert looks == [True]


def test_help_and_show(command):
    shown = command("train.py", "--help")
    assert shown.returncode == 0
    assert "gpt2-nano" in shown.stdout
    assert "max_steps: 120" in shown.stdout
    shown = command("train.py", "--cfg", "job", "optimizer.lr=0.5")
    assert shown.returncode == 0
    assert yaml.safe_load(shown.stdout)["optimizer"]["lr"] == 0.5
    assert "the text to continue" in command("generate.py", "--help").stdout


@pytest.mark.parametrize(
    "arguments", [["--nonsense"], ["--config-path=x"], ["--cfg", "job", "x=1"]]
)
def test_options_are_checked_too(command, arguments):
    done = command("train.py", *arguments)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


def test_options_may_stand_anywhere(in_process, tmp_path):
    from train import main

    for typed in (["--cfg", "job", "seed=7"], ["seed=7", "--cfg", "job"]):
        code, out, err = in_process(main, tmp_path, *typed, "name=x")
        assert (code, err) == (0, "")
        assert (yaml.safe_load(out)["seed"], yaml.safe_load(out)["name"]) == (7, "x")


# --------------------------------------------------------------------------- what is left open


def chosen(before=None, **settings):
    trainer = TrainerConfig(**settings)
    trainer.choose(before or {})
    return trainer.warmup_steps, trainer.eval_every, trainer.eval_windows, trainer.log_every


def test_types_are_checked_before_a_run_is_read_to_resume_it():
    with pytest.raises(ConfigError) as error:
        compose(["trainer.resume=runs/none", "trainer.max_steps=abc", "optimizer.lr=[1]"])
    keys = [key for key, *_ in error.value.problems]
    assert keys == ["trainer.max_steps", "optimizer.lr"]
    assert compose(["trainer.resume=runs/none", "model.num_heads=5"]).overrides is not None


def test_warmup_and_validation_left_open_follow_the_length_of_the_run():
    assert chosen(max_steps=1) == (0, 40, 8, 1)
    assert chosen(max_steps=20) == (4, 40, 8, 1)
    assert chosen(max_steps=120) == (24, 40, 8, 1)
    assert chosen(max_steps=400) == (40, 40, 8, 1)
    assert chosen(max_steps=2000) == (200, 200, 8, 4)
    assert chosen(max_steps=10**6, batch_size=512) == (2000, 1000, 400, 2000)
    assert chosen(max_steps=2000, eval_every=0, batch_size=4) == (200, 0, 160, 4)
    given = {"warmup_steps": 0, "eval_every": 7, "eval_windows": 3}
    assert chosen(max_steps=2000, **given) == (0, 7, 3, 4)


def test_a_run_made_longer_keeps_what_it_had():
    before = {"warmup_steps": 12, "eval_every": 40, "eval_windows": 100, "log_every": 1}
    assert chosen(before, max_steps=5000) == (12, 40, 100, 1)
    assert chosen(before, max_steps=5000, eval_windows=9) == (12, 40, 9, 1)
    assert chosen({"eval_every": None}, max_steps=120) == (24, 40, 8, 1)
