"""Settings: accepted values, hints about unknown names, defaults, features of Hydra.

Invalid settings: test_problems.py.
"""

import itertools
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import hydra
import pytest
import yaml
from helpers import REPOSITORY, TINY
from helpers.ranks import check_same_bytes
from helpers.refusals import refused
from helpers.runs import train_in
from helpers.settings import settings
from hydra.core.global_hydra import GlobalHydra
from hydra.version import VersionBase
from packaging.version import Version

import attention
import train
from clearhead.config import Config, compose
from clearhead.config.application import VERSION, hydra_main, override
from clearhead.config.automatic import automatic_values
from clearhead.config.command_line import parse
from clearhead.config.schema import GROUPS, known_settings
from clearhead.config.stored import settings_of
from clearhead.config.validation import flat_fields, validate
from clearhead.config.yaml_files import (
    CONFIGS,
    default_values,
    defaults_and_meanings,
    flat,
)
from clearhead.errors import CheckpointError, ConfigError
from generate import GenerateConfig
from headlens import LensConfig
from model import ModelConfig
from scripts.compare import CompareConfig
from scripts.evaluate import EvaluateConfig
from scripts.export_hf import ExportConfig
from scripts.inspect_attention import InspectConfig
from scripts.plan import PlanConfig
from scripts.prepare_data import PrepareConfig

# unknown name=suggested setting, if any
MEANT = """
optimizer.lrs=optimizer.lr train.max_step=trainer.max_steps optimizer.beta=optimizer.betas
modle=model max_step=trainer.max_steps model.num_head=model.num_heads verbose= gamma=
"""


def test_hints_suggest_similar_settings():
    for key, _, setting in (text.partition("=") for text in MEANT.split()):
        with refused(ConfigError, key) as caught:
            compose([f"{key}=1"])
        hint = caught.value.problems[0].hint
        assert (setting in hint) if setting else not any(name in hint for name in known_settings())


def test_accepted_forms():
    given = ["model=gpt2-nano", "experiment=book", "lens=off", "optimizer.lr=3e-4", 'name="2026"']
    given += ["lens.prompts=[one prompt,another]", "data.path=[a.txt,b.txt]"]
    given += ["++trainer.max_steps=1e3", "trainer.compile=false", "wandb.group=null"]
    found = compose(given)
    assert (found.model.emb_dim, found.optimizer.lr, found.name) == (128, 3e-4, "2026")
    assert repr(found.trainer.max_steps) == "1000"
    assert found.lens.prompts == ["one prompt", "another"]
    assert found.data.path == ["a.txt", "b.txt"]
    assert (found.trainer.compile, found.wandb.group) == (False, None)
    assert (found.trainer.batch_size, found.lens.every) == (8, 0)  # experiment without lens
    text = compose(["data=text", "data.path=my text.txt", "model=gpt2-nano", "wandb=off"])
    assert text.data.max_length == text.model.context_length == 256
    assert (text.data.path, text.wandb.mode) == ("my text.txt", "disabled")


def test_settings_of_tests_are_those_that_hydra_composes():
    others = ["model=gpt2-nano", "data.max_length=64", "optimizer=muon", "name=a${seed}"]
    others += ["trainer.resume=must", "wandb=off", "wandb.tags=[a,b]", "trainer.max_steps=1e3"]
    for given in ([*TINY, "data.path=x.txt"], others):
        assert settings(*given) == compose(given)


def test_free_text():
    """train.py needs quotes where Hydra's grammar has another meaning; scripts need none."""
    texts = ("Hello, world", "a=b", "[INST", "it's", "{c}", "ü (1)", "\\", "a\\\\b", 'C:\\d "\\"')
    for text in texts:
        found = compose([override("trainer.sample_prompt", text)])
        assert found.trainer.sample_prompt == text
        assert parse(GenerateConfig, ["checkpoint=x", f"prompt= {text} "]).prompt == f" {text} "
    for text in ("007", "null", "true", "[a", "[]", "1e3", "@a: b", "* # ${", ""):
        found = parse(GenerateConfig, ['checkpoint="7"', f"prompt={text}", "top_k=null"])
        assert (found.checkpoint, found.prompt, found.top_k) == ("7", text, None)
    for text in ("7", "null", "[a", '"a'):
        assert [key for key, _ in problems_of(parse, GenerateConfig, [f"checkpoint={text}"])] == [
            "checkpoint"
        ]
    given = ["checkpoint=x", 'prompt=["1", "b"]', "compile=true", "ignore_end=true"]
    found = parse(GenerateConfig, given)
    assert (found.prompt, found.compile, found.ignore_end) == (["1", "b"], True, True)


NAMES = ["小説.txt", "~/x.txt", "#x.txt", "7 #x", "a #b.txt", "a;b", "a(b.txt", "a (1).txt", "é:b"]
NAMES += ["it's", "a=b", "a: b.txt", "*.txt", "&x", "!x", "@x", "%x", "1.txt", "- x", "x{1}"]
NAMES += ["a\\b é", 'é"\\']


@pytest.mark.parametrize("name", NAMES)
def test_a_value_without_syntax_is_a_text(in_process, tmp_path, name):
    """In Python, scripts and train.py."""
    runs = []
    read = hydra_main(lambda config: runs.append(config) or 0.0)
    assert compose([f"data.path={name}", f"data.val_path={name}"]).data.val_path == name
    for given in ([f"data.path={name}"], ["-m", f"data.path={name}", "seed=1,2"]):
        in_process(read, tmp_path, *given)
        assert {run.data.path for run in runs} == {name}
        runs.clear()
    assert parse(PrepareConfig, [f"data.path={name}", "out=x"]).data.path == name


def test_values_that_hydra_reads_keep_their_meaning():
    path, given = "data.path=é", ["wandb.tags=[a,1e3,true]", "wandb.group=a,b", "wandb.group=[a"]
    assert compose([path, "wandb.tags=['a,b',c]", 'name="1"']).wandb.tags == ["a,b", "c"]
    assert compose([path, "seed=7", "wandb.group=${name}", "name=a\\,b"]).wandb.group == "a,b"
    for text in (*given, "name=1e3", 'wandb.group="a', "wandb.group={a}.é", "seed=é"):
        with pytest.raises(ConfigError):
            compose([path, text])
    assert [key for key, _ in problems_of(compose, ["data.path=é\udcff.txt"])] == ["data.path"]
    assert parse(CompareConfig, ["runs=[a,'b c']"]).runs == ["a", "b c"]


def problems_of(read, *given) -> list[tuple[str, str]]:
    """(key, value) of each problem."""
    with pytest.raises(ConfigError) as caught:
        read(*given)
    return [(problem.key, problem.value) for problem in caught.value.problems]


def test_every_problem_is_listed():
    given = ["seed=x", "optimizer.lr=-1", "model.num_heads=5", "name=a/b"]
    given += ["trainer.max_steps=0", "+data.typo=1"]
    found = [key for key, _ in problems_of(compose, given)]
    assert sorted(found) == sorted(text.partition("=")[0].lstrip("+") for text in given)
    # Hydra finds unknown names first.
    found = problems_of(compose, ["optimizer.lrr=1", "seed=x", "trainer.max_step=5"])
    assert found == [("optimizer.lrr", "1"), ("trainer.max_step", "5")]
    found = problems_of(parse, GenerateConfig, ["promt=x", "temperature=-1", "checkpoint=y"])
    assert found == [("promt", "x"), ("temperature", -1)]
    # Types are checked before the stored settings are read.
    given = ["trainer.resume=runs/none", "trainer.max_steps=abc", "optimizer.lr=[1]"]
    assert problems_of(compose, given) == [("optimizer.lr", [1]), ("trainer.max_steps", "abc")]


def test_a_run_with_the_settings_of_another(in_process, tmp_path):
    """A new run, whose command line has priority."""
    first = train_in(tmp_path, 'name="a=1"', "trainer.warmup_steps=0", "wandb.tags=[x]")
    source = 'from="runs/a=1"'
    code, _, err = in_process(train.main, tmp_path, source, "name=again", "trainer.device=cpu")
    assert (code, err) == (0, "")
    check_same_bytes(first, tmp_path / "runs" / "again")
    before = flat(settings_of(first))
    now = flat(compose([source, "seed=1"]).model_dump())
    assert {key for key, value in now.items() if value != before[key]} == {
        *("name", "seed", "trainer.device")
    }
    longer = compose([source, "trainer.max_steps=900", "trainer.log_every=null"]).trainer
    assert (longer.warmup_steps, longer.eval_every, longer.log_every) == (0, 2, None)
    with refused(ConfigError, "model.num_heads", 5):
        compose([source, "model.num_heads=5"])
    with refused(ConfigError, "experiment"):
        compose([source, "experiment=book"])
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies" / "small.yaml").write_text("# @package _global_\nseed: 9\n")
    with refused(ConfigError, "studies"):
        compose([source, f"hydra.searchpath=[file://{tmp_path}]", "+studies=small"])
    with refused(ConfigError, "trainer.resume"):
        compose([source, "trainer.resume=runs/b"])
    with refused(CheckpointError, "from", "runs/none", exit_code=3):
        compose(["from=runs/none"])


def test_every_setting_has_a_default_and_a_description():
    """For training in configs/, for scripts in their schema."""
    found = defaults_and_meanings()
    assert set(found) == set(known_settings()) - {*GROUPS, "experiment"}
    assert [key for key, (_, meaning) in found.items() if not meaning] == []
    assert validate(Config, default_values())[1] == []
    scripts = [GenerateConfig, PlanConfig, CompareConfig, EvaluateConfig, ExportConfig]
    for schema in (*scripts, InspectConfig, PrepareConfig):
        assert [key for key, f in flat_fields(schema).items() if not f.description] == []


def test_configs_and_components_have_the_same_defaults():
    defaults = default_values()
    of_tokenizer = {"vocab_size": None}  # 50,257 for gpt2
    assert vars(ModelConfig()) | of_tokenizer == defaults["model"]
    assert vars(LensConfig()) == defaults["lens"]
    _, meaning = defaults_and_meanings()["model.attention"]
    assert {*meaning.partition(": ")[2].split(" | ")} == {*attention.KERNELS}


def test_every_shipped_choice_is_valid():
    names = {group: sorted(p.stem for p in (CONFIGS / group).glob("*.yaml")) for group in GROUPS}
    names["lens"].remove("induction")  # its layer and head are those of experiment=induction
    for choices in itertools.zip_longest(*names.values(), fillvalue=None):
        chosen = [f"{group}={name}" for group, name in zip(names, choices, strict=True) if name]
        if not {"data=induction", "data=sample"} & set(chosen):
            chosen.append("data.path=x.txt")
        compose(chosen)
    for path in (CONFIGS / "experiment").glob("*.yaml"):
        extra = {"finetune": ["trainer.init_from=x"], "babylm": ["data.path=x.txt"]}
        compose([f"experiment={path.stem}", "trainer.max_steps=1", *extra.get(path.stem, [])])


@pytest.mark.parametrize(("arguments", "code"), [("optimizer.lr=abc", 2), ("-sc query=bash", 0)])
def test_errors_and_completions_are_printed_without_torch(tmp_path, arguments, code):
    """Runs a separate process that lists its imports. It creates no file."""
    given = [sys.executable, "-X", "importtime", REPOSITORY / "train.py", *arguments.split()]
    environment = os.environ | {"COMP_LINE": "python train.py seed=1 trainer.max_"}
    done = subprocess.run(given, cwd=tmp_path, capture_output=True, text=True, env=environment)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert (done.returncode, "hydra" in imported) == (code, True)
    assert imported.isdisjoint({"torch", "wandb", "matplotlib"})
    assert done.stdout == ("" if code else "trainer.max_minutes= trainer.max_steps=\n")
    assert list(tmp_path.iterdir()) == []


def test_help_shows_every_setting_with_its_meaning(in_process, tmp_path):
    code, out, err = in_process(train.main, tmp_path, "--help", "optimizer.lr=0.125")
    assert (code, err) == (0, "")
    for key, (_, meaning) in defaults_and_meanings().items():
        assert re.search(rf"^ *{re.escape(key)} +{re.escape(meaning)}", out, re.MULTILINE), key
    assert "[0.125]" in out


def test_settings_are_composed_inside_another_hydra_application():
    with hydra.initialize_config_dir(str(CONFIGS), **VERSION):
        assert compose(["data.path=any", "seed=3"]).seed == 3
        assert hydra.compose("config", ["seed=4"]).seed == 4


def test_the_hydra_of_a_program_stays_as_it_is():
    """Also after errors, in threads, and if the program keeps the objects of Hydra."""
    before, version = GlobalHydra.instance(), VersionBase.instance()
    hydra.initialize_config_dir(str(CONFIGS), **VERSION)
    theirs, version.version_base = before.hydra, Version("1.2")
    try:
        with pytest.raises(ConfigError):
            compose(["model=none"])
        with ThreadPoolExecutor(4) as threads:
            found = threads.map(lambda seed: compose([f"seed={seed}"]).seed, range(12))
            assert [*found] == [*range(12)]
        assert (GlobalHydra.instance() is before, before.hydra is theirs) == (True, True)
        assert version.getbase() == Version("1.2")
    finally:
        before.clear()


@pytest.mark.parametrize("arguments", [["generate.py", "--help"], ["-m", "scripts.plan", "--help"]])
def test_a_closed_stdout_is_no_error(arguments):
    """As with `| head`."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


MINE = """# @package _global_
defaults: [override /model: gpt2-nano]
trainer: {max_steps: 7}
name: run-${seed}
"""
CALLBACK = """
from pathlib import Path
from hydra.experimental.callback import Callback

class Note(Callback):
    def on_job_end(self, config, job_return, **_):
        Path("note").write_text(f"{job_return.status.name} {config.seed}")
"""


def test_features_of_hydra(in_process, tmp_path, monkeypatch):
    folder = tmp_path / """it's "mine", [all] {of} it"""
    (folder / "experiment").mkdir(parents=True)
    (folder / "experiment" / "mine.yaml").write_text(MINE)
    (folder / "studies").mkdir()
    (folder / "studies" / "small.yaml").write_text("# @package _global_\ndata: {max_length: 16}\n")
    (folder / "whole.yaml").write_text("defaults: [config, studies: none, _self_]\nseed: 5\n")
    (folder / "studies" / "none.yaml").write_text("")
    monkeypatch.setenv("WHERE", "texts/a.txt")

    def shown(*arguments):
        code, out, err = in_process(train.main, tmp_path, *arguments, "--cfg", "job", "--resolve")
        assert (code, err) == (0, ""), arguments
        return yaml.safe_load(out)

    config_dir = ("--config-dir", str(folder))
    mine = shown(*config_dir, "experiment=mine")
    assert (mine["trainer"]["max_steps"], mine["model"]["emb_dim"]) == (7, 128)
    assert mine["name"] == "run-0"
    assert shown(*config_dir, "+studies=small")["data"]["max_length"] == 16
    whole = shown(*config_dir, "--config-name", "whole", "studies=small")
    assert (whole["seed"], whole["data"]["max_length"]) == (5, 16)
    (tmp_path / "plain").symlink_to(folder)
    path = f"hydra.searchpath=[file://{tmp_path}/plain]"
    assert shown("seed=7", path, "+studies=small")["data"]["max_length"] == 16
    code, out, _ = in_process(train.main, tmp_path, "--help", *config_dir)
    choices = {words[0]: words[1:] for words in map(str.split, out.splitlines()) if words}
    assert (code, choices["studies:"]) == (0, ["none,", "small"])
    assert {"induction,", "mine"} <= set(choices["experiment:"])
    assert shown("data.path=${oc.env:WHERE}")["data"]["path"] == "texts/a.txt"
    for option in (["--info", "searchpath"], ["--hydra-help"], ["--version"]):
        code, out, err = in_process(train.main, tmp_path, *option)
        assert (code, err, bool(out)) == (0, "", True), option


def test_directories_and_callbacks_of_hydra(in_process, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("some text " * 100)
    (tmp_path / "mycallbacks.py").write_text(CALLBACK)
    monkeypatch.syspath_prepend(tmp_path)
    tiny = [*TINY, "data.path=text.txt", "trainer.max_steps=2", "trainer.sample_tokens=0"]
    given = [*tiny, "name=a", "hydra.run.dir=out/${seed}", "hydra.output_subdir=hydra"]
    given += ["+hydra.callbacks.note._target_=mycallbacks.Note"]
    code, _, err = in_process(train.main, tmp_path, *given)
    assert code == 0, err
    assert (tmp_path / "note").read_text() == "COMPLETED 0"
    saved = yaml.safe_load((tmp_path / "out" / "0" / "hydra" / "config.yaml").read_text())
    assert saved["name"] == "a"
    (tmp_path / "note").unlink()
    seen = []
    run = hydra_main(lambda config: seen.append(config))
    given += ["+hydra.job.env_set.SEEN=here", "wandb.group=${oc.env:SEEN,unset}"]
    code, *_ = in_process(run, tmp_path, *given)
    assert (code, seen[0].name, seen[0].wandb.group) == (0, "a", "here")


def chosen(on_gpu=False, **values):
    config = settings(*(f"trainer.{key}={value}" for key, value in values.items()))
    trainer = config.with_values(automatic_values(config, on_gpu, epoch=None)).trainer
    return trainer.warmup_steps, trainer.eval_every, trainer.eval_windows, trainer.log_every


def test_automatic_settings_depend_on_the_length_of_the_run():
    assert chosen(max_steps=1) == (0, 40, 8, 1)
    assert chosen(max_steps=120) == (24, 40, 8, 1)
    assert chosen(max_steps=2000) == (200, 200, 8, 4)
    assert chosen(max_steps=10**6, batch_size=512) == (2000, 1000, 400, 2000)
    assert chosen(max_steps=2000, eval_every=0, batch_size=4) == (200, 0, 160, 4)
    assert chosen(max_steps=2000, warmup_steps=0, eval_every=7, eval_windows=3) == (0, 7, 3, 4)
    assert [chosen(True, max_steps=steps)[-1] for steps in (1, 5000, 10**4)] == [10, 10, 20]


def test_environment_variables_of_wandb(monkeypatch):
    """They are defaults. An empty variable counts as unset; an invalid one is reported."""
    for name in ("PROJECT", "TAGS", "RUN_GROUP", "MODE"):
        monkeypatch.setenv(f"WANDB_{name}", "")
    unset = compose(["data.path=any"]).wandb
    assert (unset.project, unset.tags) == ("clearhead", [])
    for name, value in {"PROJECT": "heads", "TAGS": "a,b"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    found = compose(["data.path=any", "wandb.tags=[c]"]).wandb
    assert (found.project, found.tags, found.mode) == ("heads", ["c"], "auto")
    assert compose(["data.path=any"]).wandb.tags == ["a", "b"]
    monkeypatch.setenv("WANDB_MODE", "online")
    assert compose(["data.path=any"]).wandb.mode == "online"
    monkeypatch.setenv("WANDB_PROJECT", "a/b")
    monkeypatch.setenv("WANDB_MODE", "dryrun")
    with pytest.raises(ConfigError) as error:
        compose(["data.path=any"])
    assert {problem.key for problem in error.value.problems} == {"wandb.mode", "wandb.project"}
    compose(["data.path=any", "wandb=online", "wandb.project=c"])  # the variables do not count


def test_a_choice_of_wandb_changes_the_mode_of_a_resumed_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stored = default_values() | {"data": default_values()["data"] | {"path": "none"}}
    stored["wandb"] |= {"mode": "offline", "project": "heads", "tags": ["a"]}
    (tmp_path / "runs/a").mkdir(parents=True)
    (tmp_path / "runs/a/run.json").write_text(json.dumps({"settings": stored}))
    kept, changed = ("wandb.log_model=best", "heads"), ("wandb.project=clearhead", "clearhead")
    for given, project in (kept, changed):
        config = compose(["trainer.resume=runs/a", "wandb=online", given])
        assert (config.name, config.runs_dir) == ("a", "runs")
        wandb = config.wandb
        assert (wandb.mode, wandb.project, wandb.tags) == ("online", project, ["a"])
    stored["wandb"]["mode"] = "auto"  # the variable decides at each start
    (tmp_path / "runs/a/run.json").write_text(json.dumps({"settings": stored}))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert compose(["trainer.resume=runs/a"]).wandb.mode == "disabled"
