"""Sweeps (python train.py -m): jobs, failures, signals, results, names, and what is refused."""

import dataclasses
import functools
import json
import os
import shlex
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from helpers import REPOSITORY, TEXT, TINY
from helpers.refusals import printed_keys, refused
from helpers.runs import rows, run_command
from helpers.settings import settings
from PIL import Image

import train
from errors import ConfigError
from scripts import compare
from training.config import command_line as command
from training.config import compose
from training.config.schema import WandbConfig
from training.reporting import sweep
from training.reporting.tracker import Tracker, last_wandb_id

LENGTHS = {"group": 128}
check_sweep = None
pytest.skip("sweeps become Hydra's multirun (issue 21)", allow_module_level=True)

SHORT = [*TINY, "data.path=text.txt", "trainer.max_steps=2", "trainer.eval_every=1"]
SHORT += ["trainer.sample_tokens=0", "trainer.max_skips=1"]
run_in = functools.partial(run_command, train.main)


def sweep_in(folder, run, *arguments):
    """(exit code, out, err) of a sweep each of whose jobs is run(settings)."""
    return run_command(command.command(run), folder, "-m", *arguments)


def log(settings):
    """What a run of a job that learns nothing leaves."""
    folder = Path("runs") / settings.name
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"settings": dataclasses.asdict(settings)}))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 2, "train/loss": 3.0}))


def results_of(folder):
    """(The directory of the only sweep, results.json)."""
    (path,) = (folder / "multirun").iterdir()
    return path, json.loads((path / "results.json").read_text())


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """(folder, code, out, err) of a sweep of four jobs, of which the first two diverge."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    return folder, *run_in(folder, "-m", *SHORT, "optimizer.lr=1e9,1e-2", "seed=1,2")


def test_a_failed_job_does_not_end_the_sweep_and_can_be_repeated(swept):
    folder, code, _, err = swept
    path, found = results_of(folder)
    names = [f"{path.name}_lr-{lr}_seed-{seed}" for lr in (1e9, 0.01) for seed in (1, 2)]
    assert sorted(run.name for run in (folder / "runs").iterdir()) == sorted(names)
    assert [job["run"] for job in found["jobs"]] == names
    assert (code, [job["exit_code"] for job in found["jobs"]]) == (4, [4, 4, 0, 0])
    for seed, job in enumerate(found["jobs"][:2], start=1):
        assert job["error"].startswith("optimizer.lr=1000000000.0: ")
        assert job["again"] in err
        assert job["again"] in (path / "results.md").read_text()
        python, script, *words = shlex.split(job["again"])
        assert (python, script) == ("python", "train.py")
        again = compose(words)
        assert (again.optimizer.lr, again.seed, again.trainer.max_skips) == (1e9, seed, 1)
        assert (again.name, again.wandb.group) == (job["run"], path.name)


def test_results_are_a_table_figures_and_a_picture(swept):
    """scripts/compare finds the same runs."""
    folder, _, out, _ = swept
    path, found = results_of(folder)
    (row,) = [row for row in found["rows"] if row["settings"] == {"optimizer.lr": 0.01}]
    last = [rows(folder / "runs" / name)[-1]["val/loss"] for name in row["runs"]]
    assert (row["values"], row["seeds"], found["metric"]) == (last, [1, 2], "val/loss")
    code, compared, _ = run_command(compare.main, folder, "plot=all.png")
    assert code == 0
    for table in (out, (path / "results.md").read_text(), compared):
        assert f"| {sum(last) / 2:.4f} " in table
    for picture in (path / "results.png", folder / "all.png"):
        with Image.open(picture) as opened:
            assert opened.width > 600


def test_a_job_after_failures_is_the_same_as_alone(swept, tmp_path, text_file):
    folder, *_ = swept
    _, found = results_of(folder)
    code, _, err = run_in(tmp_path, *SHORT, "optimizer.lr=1e-2", "seed=2", "name=alone")
    assert code == 0, err
    mine, alone = folder / "runs" / found["jobs"][-1]["run"], tmp_path / "runs" / "alone"
    weights = [run / "checkpoints" / "last" / "model.safetensors" for run in (mine, alone)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_stopped_sweep_is_resumed_by_the_printed_command(tmp_path, text_file, monkeypatch):
    """The running job is saved, and the next one does not begin before that."""
    arguments = ["-m", *SHORT, "optimizer.lr=1e-3,1e-2", "trainer.max_steps=3"]
    real = train.train_step

    def step(run):
        if run.state.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(run)

    with monkeypatch.context() as patch:
        patch.setattr(train, "train_step", step)
        code, _, err = run_in(tmp_path, *arguments)
    assert code == 143
    path, found = results_of(tmp_path)
    assert len(found["jobs"]) == len(found["rows"][0]["unfinished"]) == 1
    again = [*arguments, f"hydra.sweep.dir=multirun/{path.name}"]
    assert shlex.join(["python", "train.py", *again]) in err
    code, _, err = run_in(tmp_path, *again)
    assert (code, err) == (0, "")
    runs = sorted((tmp_path / "runs").iterdir())
    assert [run.name for run in runs] == [f"{path.name}_lr-{lr}" for lr in ("0.001", "0.01")]
    for run in runs:
        assert [row["step"] for row in rows(run) if "train/loss" in row] == [1, 2, 3]


def sweep_of(folder, keys=(), count=None):
    """A sweep without the command that leads it through its jobs."""
    return sweep.Sweep(sweep.Plan(list(keys), count, Path(folder), True), ["python"], [], [])


def test_the_first_failure_gives_the_exit_code(tmp_path):
    """The command that repeats a job has its settings. Control characters are escaped."""
    given = []

    def run(settings):
        given.append(settings)
        if settings.seed == 1:
            raise ConfigError([("a", 1, "is bad", "mend it"), ("b", 2, "is worse", "mend it")])
        if settings.seed == 2:
            raise RuntimeError("broken\nmemory")

    texts = ["data.path=my\\ text.txt", r"wandb.notes=a\,b", "wandb.name='[c]'", "wandb.group=12"]
    texts += ["""trainer.sample_prompt='"a" \\'b\\' {c}'""", "hydra.sweep.dir='multirun/a\x1b[31m'"]
    code, out, err = sweep_in(tmp_path, run, *texts, "seed=1,2,3", "debug=true")
    assert code == 2
    assert err.count("Traceback (most recent call last)") == 2
    assert "\x1b" not in out + err
    jobs = results_of(tmp_path)[1]["jobs"]
    assert [job["exit_code"] for job in jobs] == [2, 4, 0]
    assert jobs[0]["error"] == "a=1: is bad; mend it; b=2: is worse; mend it"
    assert "broken memory" in jobs[1]["error"]
    assert given[0].data.path == "my text.txt"
    assert compose(shlex.split(jobs[0]["again"])[2:]) == given[0]


def test_without_validation_the_training_loss_is_compared(tmp_path, monkeypatch):
    """Results that cannot be written are printed anyway."""
    kernels = "model.attention=sdpa,explicit"
    code, _, err = sweep_in(tmp_path, log, "data.path=a.txt", kernels, "model=gpt2-nano")
    assert (code, err) == (0, "")
    _, found = results_of(tmp_path)
    assert found["metric"] == "train/loss"
    assert [set(row["settings"]) for row in found["rows"]] == [{"model.attention"}] * 2

    def full(path, content):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(sweep, "atomic_write", full)
    code, out, err = sweep_in(tmp_path, log, "data.path=a.txt", "seed=1,2")
    assert code == 0
    assert "| 3.0000 " in out
    assert err


def named(folder, *jobs):
    """The names of the runs of a sweep's jobs."""
    made = sweep_of(folder, [text.partition("=")[0] for text in jobs[0]], len(jobs))
    for number, overrides in enumerate(jobs, start=1):
        made.jobs.append(sweep.Job(number, overrides, overrides))
        unnamed = SimpleNamespace(name=None, wandb=SimpleNamespace(group=None))
        made.settle(made.jobs[-1], unnamed)
        assert unnamed.wandb.group == made.name
    return [job.name for job in made.jobs]


def test_names_of_runs_hold_the_values_and_are_valid():
    assert named("sweeps/my lr", ["optimizer.lr=0.1"]) == ["my-lr_lr-0.1"]
    assert named("a", ["data.path=/tmp/ü b.txt"]) == ["a_path-tmp-b.txt"]
    assert named("a", ["seed=1", "optimizer.lr=0.1"]) == ["a_lr-0.1_seed-1"]
    names = named("a", *[[f"x={'v' * 300}{n}"] for n in (1, 2)])
    assert max(map(len, names)) == 128
    names += named("a", ["x=/b"], ["x=b"])
    assert len(set(names)) == 4
    assert len(sweep_of("l" * 200).name) == LENGTHS["group"]
    names += [*named("...", ["x=1"]), *named("lr=1,2", ["x=[1,2]"])]
    for name in names:
        assert settings("data.path=a.txt", f"name={name}").name == name


def test_the_sweeps_directory_is_new(tmp_path):
    """Two sweeps may begin in the same second."""

    def begin(name):
        made = sweep.Sweep(sweep.Plan([], 1, tmp_path / name, False), [], [], [])
        made.begin()
        return made.name

    assert [begin("2025") for _ in range(3)] == ["2025", "2025_2", "2025_3"]


REFUSED = [
    (["optimizer.lr=1e-3,0.001"], ["optimizer.lr"]),
    (["seed=interval(-5,5)"], ["seed"]),
    (["hydra.sweeper.params={seed:'1,2'}"], ["hydra.sweeper.params"]),
    (["+hydra.sweeper.custom_search_space=os.system"], ["hydra.sweeper.custom_search_space"]),
    (["hydra/sweeper=optuna"], ["hydra/sweeper"]),
    (["name=a,b", "seed=1,2"], ["name", "name"]),
    (["model=glob(*)"], ["model=glob(*)"]),
]


def test_sweeps_that_are_refused(tmp_path, text_file, monkeypatch):
    for arguments, keys in REFUSED:
        with pytest.raises(ConfigError) as caught:
            check_sweep(["data.path=text.txt", *arguments], None)
        assert [problem.key for problem in caught.value.problems] == keys, arguments
    # A file; a sweep of version 1, whose runs would be run again under other names.
    (tmp_path / "runs" / "mine_seed=1").mkdir(parents=True)
    for directory in ("text.txt", "multirun/mine"):
        arguments = ["data.path=text.txt", "seed=1,2", f"hydra.sweep.dir={directory}"]
        code, out, err = sweep_in(tmp_path, log, *arguments)
        assert (code, out, printed_keys(err)) == (2, "", ["hydra.sweep.dir"])
        assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "text.txt"]
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "many")
    with refused(ConfigError, "WORLD_SIZE", "many"):
        check_sweep(["data.path=a"], None)


def test_the_agents_command_composes(swept):
    """Filled in by W&B's own code, with the last of each parameter's values."""
    from wandb.sdk.launch.sweeps import utils

    agent = yaml.safe_load((REPOSITORY / "scripts" / "wandb_sweep.yaml").read_text())
    values = {
        key: {"value": how["max"] if "max" in how else how["values"][-1]}
        for key, how in agent["parameters"].items()
    }
    arguments = utils.create_sweep_command_args({"args": values})
    words, filled = utils.make_launch_sweep_entrypoint(arguments, list(agent["command"]))
    composed = compose([*words[words.index("${program}") + 1 :], *filled])
    assert composed.optimizer.lr == agent["parameters"]["optimizer.lr"]["max"]
    assert (composed.seed, composed.model.dropout) == (2, 0.2)
    assert (REPOSITORY / agent["program"]).is_file()
    folder, *_ = swept
    run = results_of(folder)[1]["jobs"][-1]["run"]
    assert agent["metric"]["name"] in rows(folder / "runs" / run)[-1]


def test_the_agents_trial_is_the_run(tmp_path, monkeypatch):
    """The agent gives each trial its id on W&B in the environment, and waits for that one."""
    monkeypatch.setenv("WANDB_SWEEP_ID", "thesweep")
    monkeypatch.setenv("WANDB_RUN_ID", "thetrial")
    tracker = Tracker(
        WandbConfig.with_defaults(mode="offline"), tmp_path, {"optimizer": {"lr": 1e-3}}
    )
    try:
        assert (tracker.run_id, tracker.wandb.run.sweep_id) == ("thetrial", "thesweep")
    finally:
        tracker.finish()
    assert last_wandb_id(tmp_path) == "thetrial"
