"""Sweeps (python train.py -m): jobs, failures, signals, results, launchers, W&B's agents."""

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers import REPOSITORY, TEXT, TIMEOUT, TINY
from helpers.ranks import check_same_bytes
from helpers.refusals import printed_keys
from helpers.runs import changed_paths, contents, rows, run_command
from helpers.tally import in_campaign

import train
from clearhead.config import compose
from clearhead.config.application import hydra_main
from clearhead.config.stored import settings_of
from clearhead.errors import ConfigError
from clearhead.output import wandb_process
from clearhead.output.tracker import Tracker
from clearhead.run.signals import StopSignals
from scripts import compare

SHORT = [*TINY, "data.path=text.txt", "trainer.max_steps=2", "trainer.eval_every=1"]
SHORT += ["trainer.sample_tokens=0"]
run_in = functools.partial(run_command, train.main)


def sweep_in(folder, run, *arguments):
    """Runs a sweep whose jobs call run(config). Returns (exit code, out, err)."""
    return run_command(hydra_main(run), folder, "-m", "data.path=any", *arguments)


def log(config):
    """Writes the files of a run without validation."""
    folder = Path(config.runs_dir) / config.name
    folder.mkdir(parents=True)
    settings = config.model_dump(mode="json")
    (folder / "run.json").write_text(json.dumps({"settings": settings}))
    row = {"step": 2, "train/loss": 3.0, "train/tokens": 2}
    (folder / "metrics.jsonl").write_text(json.dumps(row))


def results_of(folder):
    """Returns (directory of the only sweep, results.json)."""
    (path,) = (folder / "runs" / "multirun").iterdir()
    return path, json.loads((path / "results.json").read_text())


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Returns (folder, code, out, err) of a sweep of four jobs; the first two diverge."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    return folder, *run_in(folder, "-m", *SHORT, "optimizer.lr=1e9,1e-2", "seed=1,2")


def test_a_failed_job_does_not_stop_the_others(swept):
    folder, code, _, err = swept
    path, found = results_of(folder)
    jobs = [json.loads((path / str(n) / "result.json").read_text()) for n in range(4)]
    assert found["jobs"] == jobs
    assert [job["run"] for job in jobs] == [f"runs/{path.name}_{n}" for n in range(4)]
    assert all((folder / job["run"] / "run.json").is_file() for job in jobs)
    assert (code, [job["exit_code"] for job in jobs]) == (4, [4, 4, 0, 0])
    for job in jobs[:2]:
        assert job["error"].startswith("optimizer.lr=1000000000.0: ")
        assert job["error"] in err


def test_results_are_a_table_and_json(swept):
    """scripts/compare finds the same runs."""
    folder, _, out, _ = swept
    _, found = results_of(folder)
    (row,) = [row for row in found["rows"] if row["settings"]["optimizer.lr"] == 0.01]
    files = [folder / "runs" / name / "validation.json" for name in row["runs"]]
    last = [json.loads(file.read_text())["loss"] for file in files]
    assert (row["values"], row["seeds"], found["metric"]) == (last, [1, 2], "val/loss")
    code, compared, _ = run_command(compare.main, folder)
    assert code == 0
    for table in (out, compared):
        assert f"| {sum(last) / 2:.4f} " in table


def test_a_job_after_failures_is_the_same_as_alone(swept, tmp_path, text_file):
    folder, *_ = swept
    _, found = results_of(folder)
    code, _, err = run_in(tmp_path, *SHORT, "optimizer.lr=1e-2", "seed=2", "name=alone")
    assert code == 0, err
    mine, alone = folder / found["jobs"][-1]["run"], tmp_path / "runs" / "alone"
    weights = [run / "checkpoints" / "last" / "model.safetensors" for run in (mine, alone)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_job_can_be_repeated_alone(swept):
    folder, *_ = swept
    job = folder / results_of(folder)[1]["jobs"][-1]["run"]
    assert run_in(folder, f"from={job}", "name=again")[0] == 0
    check_same_bytes(job, folder / "runs" / "again")


def test_a_stopped_sweep_continues_in_its_folder(tmp_path, text_file, monkeypatch):
    """The running job saves a checkpoint, and no other job starts."""
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
    (folder,) = (tmp_path / "runs" / "multirun").iterdir()
    again = f"hydra.sweep.dir=runs/multirun/{folder.name}"
    assert again in err
    assert not (tmp_path / "runs" / f"{folder.name}_1").exists()
    code, _, err = run_in(tmp_path, *arguments, again)
    assert (code, err) == (0, "")
    for number in (0, 1):
        steps = rows(tmp_path / "runs" / f"{folder.name}_{number}")
        assert [row["step"] for row in steps if "train/loss" in row] == [1, 2, 3]


@pytest.mark.parametrize(("name", "again"), [("name=rates", "other"), ("name=null", "sweep")])
def test_a_sweep_with_other_values_does_not_continue_the_runs_of_another(
    tmp_path, text_file, name, again
):
    """Nor of a finished one. The same values are not trained again."""

    def sweep(folder, rate):
        found = run_in(
            tmp_path, "-m", *SHORT, f"optimizer.lr={rate}", name, f"hydra.sweep.dir={folder}"
        )
        (job,) = json.loads((tmp_path / folder / "results.json").read_text())["jobs"]
        return found[0], job["error"].partition("=")[0]

    assert sweep("sweep", 1e-3) == (0, "")
    (run,) = (tmp_path / "runs").iterdir()
    before = contents(run)
    assert sweep(again, 1e-2) == (2, "optimizer.lr")
    assert sweep(again, 1e-3) == (0, "")
    assert {*changed_paths(run, before)} <= {"run.html"}  # drawn again


def test_jobs_that_resume_a_path_are_refused(swept):
    folder, *_ = swept
    given = f"trainer.resume={results_of(folder)[1]['jobs'][-1]['run']}"
    code, _, err = run_in(folder, "-m", *SHORT, given, "seed=2", "hydra.sweep.dir=refused")
    assert (code, err.startswith(f"job 0 failed: {given}")) == (2, True)


@pytest.mark.parametrize("error", [None, RuntimeError("broken memory")])
def test_a_signal_after_the_last_step_stops_the_sweep(tmp_path, error):
    def run(config):
        with StopSignals() as signals:
            signals.phase = "finishing"
            os.kill(os.getpid(), signal.SIGTERM)
            if error:
                raise error

    assert sweep_in(tmp_path, run, "seed=1,2", "hydra.sweep.dir=sweep")[0] == 143
    assert [path.name for path in (tmp_path / "sweep").glob("[01]")] == ["0"]


def test_the_first_failure_gives_the_exit_code(tmp_path):
    """Control characters are escaped; debug=true prints the tracebacks."""

    def run(config):
        if config.seed == 1:
            raise ConfigError([("a", 1, "is bad", "fix it"), ("b", 2, "is worse", "fix it")])
        if config.seed == 2:
            raise RuntimeError("broken\n\x1b[31mmemory")
        log(config)

    code, out, err = sweep_in(tmp_path, run, "seed=1,2,3", "debug=true", "wandb.group=a\\,b")
    assert code == 2
    assert err.count("Traceback (most recent call last)") == 2
    assert "\x1b[31m" not in out
    jobs = results_of(tmp_path)[1]["jobs"]
    assert [job["exit_code"] for job in jobs] == [2, 4, 0]
    assert jobs[0]["error"] == "a=1: is bad; fix it\nb=2: is worse; fix it"


def test_values_that_do_not_fit_together_fail_their_job_alone(tmp_path):
    code, *_ = sweep_in(tmp_path, log, "model.emb_dim=128,96", "model.num_heads=64")
    jobs = results_of(tmp_path)[1]["jobs"]
    assert (code, [job["exit_code"] for job in jobs]) == (2, [0, 2])


def test_without_validation_the_training_loss_is_compared(tmp_path):
    kernels = "model.attention=sdpa,explicit"
    code, _, err = sweep_in(tmp_path, log, kernels, "model=gpt2-nano")
    assert (code, err) == (0, "")
    _, found = results_of(tmp_path)
    assert found["metric"] == "train/loss"
    kernels = [row["settings"]["model.attention"] for row in found["rows"]]
    assert sorted(kernels) == ["explicit", "sdpa"]


def test_a_swept_group_is_a_column_and_each_run_counts_once(tmp_path):
    """A job that is refused is not a run of the table, also if its run directory exists."""

    def run(config):
        log(config)
        if config.seed == 2:
            raise ConfigError([("name", config.name, "exists", "use another")])

    code, *_ = sweep_in(
        tmp_path, run, "optimizer=adamw,muon", "seed=1,2", "name=${optimizer.name}-${seed}"
    )
    rows = results_of(tmp_path)[1]["rows"]
    assert code == 2
    found = sorted((row["settings"]["optimizer.name"], row["runs"]) for row in rows)
    assert found == [("adamw", ["adamw-1_0"]), ("muon", ["muon-1_2"])]


def test_jobs_may_have_their_own_working_directory(tmp_path):
    assert sweep_in(tmp_path, log, "seed=1,2", "hydra.job.chdir=true")[0] == 0
    path, found = results_of(tmp_path)
    assert found["rows"][0]["seeds"] == [1, 2]
    runs = [path / str(n) / "runs" / f"{path.name}_{n}" for n in (0, 1)]
    assert [job["run"] for job in found["jobs"]] == [str(run) for run in runs]  # from any folder


def test_runs_are_named_after_the_sweeps_folder_and_grouped(tmp_path):
    configs = []
    for folder, name in {"sweeps/my lr": "my-lr", "a" * 254: "a" * 64}.items():
        directory = f"hydra.sweep.dir='{tmp_path / folder}'"
        assert sweep_in(tmp_path, configs.append, "seed=1", directory)[0] == 0
        config = configs.pop()
        assert (config.name, config.wandb.group) == (f"{name}_0", name)
    sweep_in(tmp_path, configs.append, "seed=1", "name=mine", "wandb.group=ours")
    assert (configs[0].name, configs[0].wandb.group) == ("mine_0", "ours")


def test_a_sweep_without_jobs_or_on_several_ranks_is_refused(tmp_path, monkeypatch):
    """The sweep of a file, too."""
    path = tmp_path / "mine" / "experiment" / "mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(
        "# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {params: {seed: '1,2'}}}"
    )
    of_file = ("--config-dir", "mine", "experiment=mine")
    assert run_in(tmp_path, "-m", "seed=range(5,1)")[0] == 2
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert printed_keys(run_in(tmp_path, *of_file)[2]) == ["WORLD_SIZE"]
    assert not list(tmp_path.glob("runs/*_0"))


def test_files_of_others_are_left_alone(tmp_path):
    """Also files of a sweep in a subfolder. Earlier results of this sweep are removed."""
    others = {tmp_path / "other" / "result.json": b"{", tmp_path / "result.json": b'{"job": 0}'}
    for path, content in others.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    for seeds in ("seed=1,2", "seed=1"):
        code, _, err = sweep_in(tmp_path, lambda config: None, seeds, "hydra.sweep.dir=.")
        assert (code, err) == (0, "")
        jobs = json.loads((tmp_path / "results.json").read_text())["jobs"]
        assert [job["overrides"][-1] for job in jobs] == seeds.replace(",", " seed=").split()
    assert {path: path.read_bytes() for path in others} == others


@in_campaign
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_launchers_of_hydra(tmp_path, text_file, launcher):
    """Each job runs in a separate process, started outside the repository."""
    pytest.importorskip(f"hydra_plugins.hydra_{launcher.partition('_')[0]}_launcher")
    arguments = [*SHORT, "optimizer.lr=1e9,1e-2", f"hydra/launcher={launcher}"]
    arguments += ["hydra.launcher.n_jobs=1"] * (launcher == "joblib")
    command = [sys.executable, str(REPOSITORY / "train.py"), "-m", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT)
    _, found = results_of(tmp_path)
    assert done.returncode == 4, done.stderr
    assert [job["exit_code"] for job in found["jobs"]] == [4, 0]
    assert [row["settings"]["optimizer.lr"] for row in found["rows"]] == [0.01]
    assert found["jobs"][0]["error"] in done.stderr


def test_the_agents_command_trains(tmp_path, text_file):
    """W&B's code fills in the last value of each parameter. The run is in this process."""
    from wandb.sdk.launch.sweeps import utils

    agent = yaml.safe_load((REPOSITORY / "scripts" / "wandb_sweep.yaml").read_text())
    values = {
        key: {"value": how["max"] if "max" in how else how["values"][-1]}
        for key, how in agent["parameters"].items()
    }
    arguments = utils.create_sweep_command_args({"args": values})
    words, filled = utils.make_launch_sweep_entrypoint(arguments, list(agent["command"]))
    assert (REPOSITORY / agent["program"]).is_file()
    given = [*words[words.index("${program}") + 1 :], *filled]
    small = [text for text in SHORT if text.partition("=")[0] not in {*agent["parameters"]}]
    code, _, err = run_in(tmp_path, *given, *small, "name=trial")
    assert code == 0, err
    run = tmp_path / "runs" / "trial"
    used = settings_of(run)
    assert used["optimizer"]["lr"] == agent["parameters"]["optimizer.lr"]["max"]
    assert (used["seed"], used["model"]["dropout"]) == (2, 0.2)
    assert agent["metric"]["name"] in rows(run)[-1]


def test_the_agents_trial_is_the_run(tmp_path, monkeypatch):
    """The agent sets the W&B run id of each trial in the environment and waits for that run."""
    monkeypatch.setenv("WANDB_SWEEP_ID", "thesweep")
    monkeypatch.setenv("WANDB_RUN_ID", "thetrial")
    config = compose(["data.path=any", "wandb=offline"])
    for in_hydra_sweep in (False, True):  # whose jobs are several runs
        monkeypatch.setattr(wandb_process, "is_in_sweep", lambda found=in_hydra_sweep: found)
        tracker = Tracker(config.wandb, tmp_path, {"optimizer": {"lr": 1e-3}})
        try:
            assert (tracker.run_id == "thetrial") != in_hydra_sweep
            assert tracker.run.sweep_id == "thesweep"
        finally:
            tracker.finish()
