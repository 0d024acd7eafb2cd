"""Sweeps (python train.py -m): jobs, failures, signals, results, names, and what is refused."""

import contextlib
import dataclasses
import io
import json
import os
import random
import re
import shlex
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from helpers import REPOSITORY, TEXT, TINY
from helpers.refusals import printed_keys, refused
from helpers.runs import rows
from helpers.settings import settings
from hydra.core.config_store import ConfigStore
from PIL import Image

import train
from errors import ConfigError, DataError, NotSavedError, OutOfMemoryError
from scripts import compare
from training import command, sweep
from training.command import check_sweep, compose, parse
from training.signals import StopSignals
from training.tracker import Tracker, last_wandb_id
from training.wandb_run import LENGTHS, WandbConfig

SHORT = (
    *TINY,
    "data.path=text.txt",
    "trainer.max_steps=2",
    "trainer.eval_every=1",
    "trainer.sample_tokens=0",
    "trainer.max_skips=1",
)


def run_in(folder, *arguments, main=train.main, name="train.py"):
    """(exit code, out, err) of a command in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(folder):
        patch.setattr("sys.argv", [name, *map(str, arguments)])
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main()
            except SystemExit as stopped:
                code = stopped.code
    return code, out.getvalue(), err.getvalue()


def sweep_in(folder, run, *arguments):
    """The same of a sweep each of whose jobs is run(settings)."""
    return run_in(folder, "-m", *arguments, main=command.command(run))


def log(settings, **metrics):
    """What a run of a job that learns nothing leaves."""
    folder = Path("runs") / settings.name
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"settings": dataclasses.asdict(settings)}))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 2, "train/loss": 3.0} | metrics))


def results_of(folder):
    """(The directory of the only sweep, results.json)."""
    (path,) = (folder / "multirun").iterdir()
    return path, json.loads((path / "results.json").read_text())


# ---------------------------------------------------------------------------------- real training


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """(folder, code, out, err) of a sweep of four jobs, of which the first two diverge."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    return folder, *run_in(folder, "-m", *SHORT, "optimizer.lr=1e9,1e-2", "seed=1,2")


def test_a_failed_job_does_not_end_the_sweep_and_can_be_repeated(swept):
    folder, code, _, err = swept
    path, found = results_of(folder)
    assert code == 4
    assert "Traceback" not in err
    names = [f"{path.name}_lr-{lr}_seed-{seed}" for lr in (1e9, 0.01) for seed in (1, 2)]
    assert sorted(run.name for run in (folder / "runs").iterdir()) == sorted(names)
    assert [(job["run"], job["exit_code"]) for job in found["jobs"]] == list(
        zip(names, (4, 4, 0, 0), strict=True)
    )
    for seed, job in enumerate(found["jobs"][:2], start=1):
        assert job["error"].startswith("optimizer.lr=1000000000.0: ")
        assert job["again"] in err
        assert job["again"] in (path / "results.md").read_text()
        words = shlex.split(job["again"])
        assert words[:2] == ["python", "train.py"]
        again = compose(words[2:])
        assert (again.optimizer.lr, again.seed, again.trainer.max_skips) == (1e9, seed, 1)
        assert (again.name, again.wandb.group) == (job["run"], path.name)


def test_results_are_a_table_figures_and_a_picture(swept):
    folder, _, out, _ = swept
    path, found = results_of(folder)
    (row,) = [row for row in found["rows"] if row["settings"] == {"optimizer.lr": 0.01}]
    last = [rows(folder / "runs" / name)[-1]["val/loss"] for name in row["runs"]]
    assert (row["values"], row["seeds"]) == (last, [1, 2])
    assert found["metric"] == "val/loss"
    assert found["settings"]["trainer.batch_size"] == 8
    (line,) = (line for line in out.splitlines() if f"| {sum(last) / 2:.4f} " in line)
    assert f"{min(last):.4f}–{max(last):.4f}" in line
    text = (path / "results.md").read_text()
    assert line in text
    assert "](results.png)" in text
    with Image.open(path / "results.png") as picture:
        assert picture.width > 600
    assert f"multirun/{path.name}/results.md" in out
    # scripts/compare finds the same runs.
    code, out, err = run_in(folder, "plot=all.png", main=compare.main)
    assert (code, "multirun" in err) == (0, False)
    assert f"| {sum(last) / 2:.4f} " in out
    with Image.open(folder / "all.png") as picture:
        assert picture.format == "PNG"


def test_a_job_after_failures_is_the_same_as_alone(swept, tmp_path, text_file):
    """The same weights; only the group on W&B is the sweep's."""
    folder, *_ = swept
    path, found = results_of(folder)
    code, _, err = run_in(tmp_path, *SHORT, "optimizer.lr=1e-2", "seed=2", "name=alone")
    assert code == 0, err
    mine, alone = folder / "runs" / found["jobs"][-1]["run"], tmp_path / "runs" / "alone"
    weights = [run / "checkpoints" / "last" / "model.safetensors" for run in (mine, alone)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    groups = [yaml.safe_load((run / "config.yaml").read_text())["wandb"] for run in (mine, alone)]
    assert [wandb["group"] for wandb in groups] == [path.name, None]


def test_a_stopped_sweep_is_resumed_by_the_printed_command(tmp_path, text_file, monkeypatch):
    """The running job is saved, and the next one does not begin before that."""
    arguments = ["-m", *SHORT, "optimizer.lr=1e-3,1e-2", "trainer.max_steps=3"]
    real = train.Trainer.step

    def step(trainer):
        if trainer.state.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "step", step)
        code, _, err = run_in(tmp_path, *arguments)
    assert code == 143
    path, found = results_of(tmp_path)
    assert len(found["jobs"]) == 1
    assert len(found["rows"][0]["unfinished"]) == 1
    words = shlex.split(err.splitlines()[-1])
    words = words[words.index("python") :]
    assert words == ["python", "train.py", *arguments, f"hydra.sweep.dir=multirun/{path.name}"]
    code, _, err = run_in(tmp_path, *words[2:])
    assert (code, err) == (0, "")
    runs = sorted((tmp_path / "runs").iterdir())
    assert [run.name for run in runs] == [f"{path.name}_lr-{lr}" for lr in ("0.001", "0.01")]
    assert [[row["step"] for row in rows(run) if "train/loss" in row] for run in runs] == [
        [1, 2, 3],
        [1, 2, 3],
    ]


# --------------------------------------------------------------------- what a job may come to


def sweep_of(folder, keys=(), count=None):
    """A sweep without the command that leads it through its jobs."""
    return sweep.Sweep(sweep.Plan(list(keys), count, Path(folder), True, 60), ["python"], [], [])


def test_every_kind_of_error_is_kept_as_one_line(tmp_path, capsys):
    made = sweep_of(tmp_path, ["seed"], 5)
    errors = [
        RuntimeError("broken\nmemory \x1b[31m"),
        OutOfMemoryError("trainer.micro_batch_size", 8, "too large", "use 4"),
        MemoryError(),
        ConfigError([("a", 1, "is bad", "mend it"), ("b", 2, "is worse", "mend it")]),
    ]
    with made.job(0, ["seed=0"]):
        pass
    for seed, error in enumerate(errors, start=1):
        with made.job(seed, [f"seed={seed}"]):
            raise error
    assert [job.code for job in made.jobs] == [0, 4, 4, 4, 2]
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].count("broken memory \\x1b[31m") == 1
    assert lines[1].endswith("trainer.micro_batch_size=8: too large; use 4")
    assert "MemoryError" in lines[2]
    assert lines[3].endswith("a=1: is bad; mend it; b=2: is worse; mend it")
    assert [f"seed={seed}" in line for seed, line in enumerate(lines, start=1)] == 4 * [True]
    made.conclude()
    out, err = capsys.readouterr()
    assert "| runs |" not in out  # nothing was logged
    assert all(job.line in err for job in made.failed)
    assert made.exit_code == 4


def test_the_first_failure_gives_the_exit_code(tmp_path):
    """With debug=true each has its traceback."""

    def run(settings):
        if settings.seed == 1:
            raise DataError("data.path", "a.txt", "is empty", "use another")
        if settings.seed == 2:
            raise RuntimeError("broken")

    code, _, err = sweep_in(tmp_path, run, "data.path=a.txt", "seed=1,2,3", "debug=true")
    assert code == 3
    assert err.count("Traceback (most recent call last)") == 2
    _, found = results_of(tmp_path)
    assert [job["exit_code"] for job in found["jobs"]] == [3, 4, 0]


def test_without_validation_the_training_loss_is_compared(tmp_path):
    """A setting that does not change what is learned has its rows, since the sweep varies it."""
    kernels = "model.attention=sdpa,explicit"
    code, out, err = sweep_in(tmp_path, log, "data.path=a.txt", kernels, "model=gpt2-nano")
    assert (code, err) == (0, "")
    _, found = results_of(tmp_path)
    assert found["metric"] == "train/loss"
    assert [set(row["settings"]) for row in found["rows"]] == [{"model.attention"}] * 2
    assert "| attention |" in out


def test_results_that_cannot_be_written_do_not_end_the_sweep(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(sweep, "write_whole", full)
    code, out, err = sweep_in(tmp_path, log, "data.path=a.txt", "seed=1,2")
    assert code == 0
    assert "| 3.0000 " in out
    assert all("No space left" in line for line in err.splitlines())
    assert err


def test_a_signal_during_a_job_that_fails_ends_the_sweep(tmp_path, capsys):
    made = sweep_of(tmp_path)

    def job():
        with made.job(0, []), StopSignals(is_main=True, relayed=False) as signals:
            signals.phase = "training"
            os.kill(os.getpid(), signal.SIGTERM)
            raise NotSavedError("checkpoint", "last", "no space left", "make room")

    with pytest.raises(SystemExit) as stopped:
        job()
    made.conclude()
    assert (stopped.value.code, made.exit_code) == (143, 143)
    assert made.failed[0].line.startswith("checkpoint=last: ")
    assert made.failed[0].line in capsys.readouterr().err


def test_a_signal_between_two_jobs_ends_the_sweep(tmp_path, monkeypatch):
    real = sweep.write_whole

    def write(path, content):
        if path.name == "results.json":
            os.kill(os.getpid(), signal.SIGINT)
        return real(path, content)

    monkeypatch.setattr(sweep, "write_whole", write)
    before = signal.getsignal(signal.SIGINT)
    code, _, err = sweep_in(tmp_path, lambda _: None, "data.path=a.txt", "seed=1,2")
    assert code == 130
    (path,) = (tmp_path / "multirun").iterdir()
    assert err.splitlines()[-1].endswith(f"seed=1,2 hydra.sweep.dir=multirun/{path.name}")
    assert signal.getsignal(signal.SIGINT) is before


def test_shuffled_values_are_in_the_same_order_on_all_ranks(tmp_path):
    orders = []
    for seed in (1, 2):
        random.seed(seed)
        seen = []
        arguments = ["data.path=a.txt", "seed=shuffle(range(0,3))"]
        sweep_in(tmp_path, lambda settings, seen=seen: seen.append(settings.seed), *arguments)
        orders.append(seen)
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == [0, 1, 2]


def test_free_text_is_the_same_in_the_command_that_repeats_a_job(tmp_path):
    """Control characters of the sweep's folder are escaped wherever they are printed."""
    given = []

    def fail(settings):
        given.append(settings)
        raise RuntimeError("broken")

    texts = [
        "data.path=my\\ text.txt",
        r"wandb.notes=a\,b",
        "wandb.name='[c]'",
        """trainer.sample_prompt='"a" \\'b\\' {c}'""",
        "wandb.group=12",
        "hydra.sweep.dir='multirun/a\x1b[31m'",
    ]
    code, out, err = sweep_in(tmp_path, fail, *texts)
    assert code == 4
    assert "\x1b" not in out + err
    (job,) = results_of(tmp_path)[1]["jobs"]
    assert given[0].data.path == "my text.txt"
    assert compose(shlex.split(job["again"])[2:]) == given[0]


# ---------------------------------------------------------------------------- names and folders


def named(folder, keys, *jobs):
    """The names of the runs of a sweep's jobs."""
    made = sweep_of(folder, keys, len(jobs))
    for number, overrides in enumerate(jobs, start=1):
        made.jobs.append(sweep.Job(number, overrides, overrides))
        unnamed = SimpleNamespace(name=None, wandb=SimpleNamespace(group=None))
        made.settle(made.jobs[-1], unnamed)
        assert unnamed.wandb.group == made.name
    return [job.name for job in made.jobs]


def test_names_of_runs_hold_the_values_and_are_valid():
    assert named("sweeps/my lr", ["optimizer.lr"], ["optimizer.lr=0.1"]) == ["my-lr_lr-0.1"]
    assert named("a", [], []) == ["a"]
    values = ["data.path=/tmp/ü b.txt", "+trainer.path='x'"]
    assert named("a", ["data.path", "trainer.path"], values) == [
        "a_data.path-tmp-b.txt_trainer.path-x"
    ]
    for job in (["seed=1", "optimizer.lr=0.1"], ["optimizer.lr=0.1", "seed=1"]):
        assert named("a", ["seed", "optimizer.lr"], job) == ["a_lr-0.1_seed-1"]
    names = named("a", ["x"], *[[f"x={'v' * 300}{n}"] for n in (1, 2)])
    assert len(set(names)) == 2
    assert max(map(len, names)) == 128
    names += named("a", ["x"], ["x=/b"], ["x=b"])
    assert len(set(names)) == 4
    assert len(sweep_of("l" * 200).name) == LENGTHS["group"]
    names += [*named("...", ["x"], ["x=1"]), *named("..,", ["x"], ["x=="])]
    names += [*named("=", ["x"], ["x=1"]), *named("lr=1,2", ["x"], ["x=[1,2]"], ['x={a:"=,"}'])]
    for name in names:
        assert settings("data.path=a.txt", f"name={name}").name == name
    assert parse(compare.CompareConfig, [f"runs=[{','.join(names)}]"]).runs == names


def test_a_sweep_of_version_1_is_not_continued(tmp_path):
    """Its runs have other names, so that its jobs would be run again."""
    earlier = tmp_path / "runs" / "mine_seed=1"
    earlier.mkdir(parents=True)
    arguments = ["data.path=a.txt", "seed=1,2", "hydra.sweep.dir=multirun/mine"]
    code, _, err = sweep_in(tmp_path, log, *arguments)
    assert (code, printed_keys(err)) == (2, ["hydra.sweep.dir"])
    assert list((tmp_path / "runs").iterdir()) == [earlier]
    assert not (tmp_path / "multirun").exists()


def test_the_sweeps_directory_is_new_unless_torchrun_restarts(tmp_path, monkeypatch):
    """Two sweeps may begin in the same second."""

    def begin(name):
        made = sweep.Sweep(sweep.Plan([], 1, tmp_path / name, False, 60), [], [], [])
        made.begin()
        return made.name

    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert [begin("2025") for _ in range(3)] == ["2025", "2025_2", "2025_3"]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    assert [begin("2026"), begin("2027")] == ["2026", "2026"]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    assert begin("2028") == "2028"


# ------------------------------------------------------------------------------------ bad input

REFUSED = [
    (["optimizer.lr="], [("optimizer.lr", "")]),
    (["seed=1,2,1,1"], [("seed", "1")]),
    (["optimizer.lr=1e-3,0.001"], [("optimizer.lr", "0.001")]),
    (["seed=range(100)", "optimizer.lr=range(1,101)"], [("command line", None)]),
    (["seed=interval(1,5)"], [("seed", "interval(1,5)")]),
    (["seed=interval(-5,5)"], [("seed", "-5")]),
    (["hydra.sweeper.params={seed:'1,2'}"], [("hydra.sweeper.params", None)]),
    (
        ["+hydra.sweeper.custom_search_space=os.system"],
        [("hydra.sweeper.custom_search_space", None)],
    ),
    (["hydra/sweeper=optuna"], [("hydra/sweeper", "optuna")]),
    (["name=a,b", "seed=1,2"], [("name", "a"), ("name", "b")]),
    (["model=glob(*)"], [("model=glob(*)", None)]),
    (["hydra.sweep.dir=a,b"], [("hydra.sweep.dir", None)]),
]


def test_sweeps_that_are_refused(tmp_path, text_file):
    for arguments, expected in REFUSED:
        with pytest.raises(ConfigError) as caught:
            check_sweep(["data.path=text.txt", *arguments], None)
        found = [(problem.key, problem.value) for problem in caught.value.problems]
        assert [key for key, _ in found] == [key for key, _ in expected], arguments
        for (_, value), (_, wanted) in zip(found, expected, strict=True):
            assert wanted is None or str(value) == wanted, arguments
    for argument in ("seed=1,-1", "hydra.sweep.dir=text.txt"):  # before the first job
        code, out, err = sweep_in(tmp_path, log, "data.path=text.txt", argument)
        assert (code, out, printed_keys(err)) == (2, "", [argument.partition("=")[0]])
        assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_the_last_value_of_a_key_counts():
    plan = check_sweep(["data.path=a", "seed=1,2,3", "optimizer.lr=1e-3,1e-2", "seed=4"], None)
    assert (plan.keys, plan.count) == (["optimizer.lr"], 2)


def test_a_sweeper_that_draws_is_one_process_in_one_direction(monkeypatch, request):
    """On several ranks each would draw other values. How many jobs there are is the sweeper's
    choice, not the number of combinations."""
    monkeypatch.setattr(command, "MOST_OVERRIDES", 5)
    values = ["data.path=a", "seed=1,2,3", "optimizer.lr=1e-3,1e-2"]
    with refused(ConfigError, "command line"):
        check_sweep(values, None)
    compose(values[:1])  # registers Hydra's own sweeper and launcher
    more = {"custom_search_space": "os.system", "direction": "maximize"}
    ConfigStore.instance().store(
        "optuna", {"_target_": "x", "n_trials": 3, **more}, "hydra/sweeper"
    )
    ConfigStore.instance().store("joblib", {"_target_": "y"}, "hydra/launcher")
    for group, name in (("sweeper", "optuna.yaml"), ("launcher", "joblib.yaml")):
        nodes = ConfigStore.instance().repo["hydra"][group]
        request.addfinalizer(lambda nodes=nodes, name=name: nodes.pop(name))

    def keys():
        with pytest.raises(ConfigError) as caught:
            check_sweep([*values, "hydra/sweeper=optuna", "hydra/launcher=joblib"], None)
        return [problem.key for problem in caught.value.problems]

    last = "hydra.sweeper.custom_search_space"
    assert keys() == ["hydra/launcher", "hydra.sweeper.direction", last]
    launch = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "WANDB_RUN_ID": "abc"}
    for name, value in (launch | {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    more = ["hydra/sweeper", "hydra.sweeper.direction", "WANDB_RUN_ID"]
    assert keys() == ["hydra/launcher", *more, last]


def test_an_incomplete_launch_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "many")
    with refused(ConfigError, "WORLD_SIZE", "many"):
        check_sweep(["data.path=a"], None)


# ------------------------------------------------------------------------------- a sweep of W&B's

AGENT = yaml.safe_load((REPOSITORY / "scripts" / "wandb_sweep.yaml").read_text())


def test_the_agents_command_composes(swept):
    """Filled in by W&B's own code, with both ends or all values of each parameter."""
    from wandb.sdk.launch.sweeps import utils

    folder, *_ = swept
    for end in ("min", "max"):
        values = {
            key: {"value": how[end] if end in how else how["values"][-1]}
            for key, how in AGENT["parameters"].items()
        }
        arguments = utils.create_sweep_command_args({"args": values})
        words, filled = utils.make_launch_sweep_entrypoint(arguments, list(AGENT["command"]))
        at = words.index("${program}")
        assert words[:at] == ["${env}", "torchrun", "--standalone", "--nproc_per_node=1"]
        composed = compose([*words[at + 1 :], *filled])
        assert composed.optimizer.lr == AGENT["parameters"]["optimizer.lr"][end]
        assert (composed.seed, composed.model.dropout) == (2, 0.2)
    assert (REPOSITORY / AGENT["program"]).is_file()
    _, found = results_of(folder)
    assert AGENT["metric"]["name"] in rows(folder / "runs" / found["jobs"][-1]["run"])[-1]


def test_the_agents_trial_is_the_run(tmp_path, monkeypatch):
    """The agent gives each trial its id on W&B in the environment, and waits for that one."""
    monkeypatch.setenv("WANDB_SWEEP_ID", "thesweep")
    monkeypatch.setenv("WANDB_RUN_ID", "thetrial")
    tracker = Tracker(WandbConfig(mode="offline"), tmp_path, {"optimizer": {"lr": 1e-3}})
    try:
        assert (tracker.run_id, tracker.wandb.run.sweep_id) == ("thetrial", "thesweep")
    finally:
        tracker.finish()
    assert last_wandb_id(tmp_path) == "thetrial"


def test_links_of_docs_sweeps():
    page = (REPOSITORY / "docs" / "sweeps.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", page):
        assert (REPOSITORY / "docs" / target).exists(), target
