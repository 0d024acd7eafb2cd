"""Sweeps: python train.py -m outlives a job that fails, and sums up at the end."""

import contextlib
import io
import json
import os
import random
import re
import shlex
import signal
from pathlib import Path

import pytest
import yaml
from helpers import REPOSITORY, TEXT, TINY
from helpers.runs import rows
from PIL import Image

import train
from errors import ConfigError, NotSavedError, OutOfMemoryError
from scripts import compare
from training import command, directory, sweep
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
DIVERGES = "optimizer.lr=1e9"


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


@pytest.fixture
def place(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path


def results_of(folder, name=None):
    """(The sweep's directory, its results as figures)."""
    found = sorted((folder / "multirun").iterdir())
    path = folder / "multirun" / name if name else found[-1]
    return path, json.loads((path / "results.json").read_text())


def again_of(err):
    """The commands that repeat the failed jobs."""
    lines = [line.strip() for line in err.splitlines() if line.startswith("    again: ")]
    return [shlex.split(line.removeprefix("again: ")) for line in lines]


# ------------------------------------------------------------------------------ jobs that fail


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """(folder, code, out, err) of a sweep of four jobs, of which the first two diverge."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    return folder, *run_in(folder, "-m", *SHORT, "optimizer.lr=1e9,1e-2", "seed=1,2")


def test_a_failing_job_is_told_and_the_next_begins(swept):
    folder, code, out, err = swept
    path, found = results_of(folder)
    assert code == 4
    begun = [line for line in out.splitlines() if line.startswith("job ")]
    assert begun == [
        f"job {number} of 4: optimizer.lr={lr} seed={seed}"
        for number, (lr, seed) in enumerate(
            [(10.0**9, 1), (10.0**9, 2), (0.01, 1), (0.01, 2)], start=1
        )
    ]
    told = [line for line in err.splitlines() if " failed: " in line]
    assert [line.split(" failed: ")[0] for line in told] == ["job 1 of 4", "job 2 of 4"]
    assert all("; use a smaller optimizer.lr, " in line for line in told)
    names = [f"{path.name}_lr-{lr}_seed-{seed}" for lr in (1e9, 0.01) for seed in (1, 2)]
    assert sorted(run.name for run in (folder / "runs").iterdir()) == sorted(names)
    assert [job["exit_code"] for job in found["jobs"]] == [4, 4, 0, 0]
    assert [job["run"] for job in found["jobs"]] == names
    assert all(job["error"].startswith("optimizer.lr=1000000000.0: ") for job in found["jobs"][:2])


def test_at_the_end_there_is_a_table_a_picture_and_what_failed(swept):
    folder, _, out, err = swept
    path, found = results_of(folder)
    (row,) = [row for row in found["rows"] if row["settings"] == {"optimizer.lr": 0.01}]
    last = [rows(folder / "runs" / name)[-1]["val/loss"] for name in row["runs"]]
    assert row["values"] == last
    assert row["seeds"] == [1, 2]
    assert found["metric"] == "val/loss"
    assert found["settings"]["trainer.batch_size"] == 8
    table = out[out.index("| lr ") : out.index("\n\nresults ")]
    assert f"| {sum(last) / 2:.4f}   | {min(last):.4f}–{max(last):.4f} |" in table.splitlines()[2]
    text = (path / "results.md").read_text()
    assert table in text
    assert "![the curves](results.png)" in text
    with Image.open(path / "results.png") as picture:
        assert picture.width > 600
    assert f"results          multirun/{path.name}/results.md  (also .json, .png)\n" in out
    assert "\n2 of 4 jobs failed:\n" in err
    assert text.count("; use a smaller optimizer.lr, ") == 2


def test_a_failed_job_can_be_repeated_alone(swept):
    folder, _, _, err = swept
    path, found = results_of(folder)
    commands = again_of(err)
    assert [shlex.join(words) for words in commands] == [
        job["again"] for job in found["jobs"] if "again" in job
    ]
    for seed, words in enumerate(commands, start=1):
        assert words[:2] == ["python", "train.py"]
        settings = compose(words[2:])
        assert (settings.optimizer.lr, settings.seed) == (1e9, seed)
        assert settings.name == f"{path.name}_lr-1000000000.0_seed-{seed}"
        assert settings.wandb.group == path.name
        assert settings.trainer.max_skips == 1


def test_a_job_is_what_it_would_be_alone(swept, place):
    """Whatever has failed before it: the same weights, and a group of the sweep's on W&B."""
    folder, *_ = swept
    path, found = results_of(folder)
    *_, job = found["jobs"]
    code, _, err = run_in(place, *SHORT, "optimizer.lr=1e-2", "seed=2", "name=alone")
    assert code == 0, err
    mine, alone = folder / "runs" / job["run"], place / "runs" / "alone"
    weights = [run / "checkpoints" / "last" / "model.safetensors" for run in (mine, alone)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    groups = [yaml.safe_load((run / "config.yaml").read_text())["wandb"] for run in (mine, alone)]
    assert [wandb["group"] for wandb in groups] == [path.name, None]


def test_the_runs_of_a_sweep_are_found_by_compare(swept):
    folder, *_ = swept
    code, out, err = run_in(folder, "plot=all.png", main=compare.main)
    assert code == 0
    assert out.splitlines()[2].startswith("| 2 ")
    assert "multirun" not in err
    with Image.open(folder / "all.png") as picture:
        assert picture.format == "PNG"


def sweep_of(folder, keys=(), count=None):
    """A sweep by itself, without the command that leads it through its jobs."""
    return sweep.Sweep(sweep.Plan(list(keys), count, Path(folder), True, 60), ["python"], [], [])


def test_every_kind_of_failure_is_outlived(tmp_path, capsys):
    made = sweep_of(tmp_path, ["seed"], 5)
    fails = [
        RuntimeError("broken\nmemory \x1b[31m"),
        OutOfMemoryError("trainer.micro_batch_size=8: too large; use 4"),
        MemoryError(),
        ConfigError([("a", 1, "is bad", "mend it"), ("b", 2, "is bad", "mend it")]),
    ]
    with made.job(0, ["seed=0"]):
        pass
    for seed, error in enumerate(fails, start=1):
        with made.job(seed, [f"seed={seed}"]):
            raise error
    assert [job.code for job in made.jobs] == [0, 4, 4, 4, 2]
    more = "; run again with debug=true for the traceback"
    assert capsys.readouterr().err.splitlines() == [
        f"job 2 of 5 failed: seed=1: RuntimeError: broken memory \\x1b[31m{more}",
        "job 3 of 5 failed: seed=2: trainer.micro_batch_size=8: too large; use 4",
        f"job 4 of 5 failed: seed=3: MemoryError: no further word{more}",
        "job 5 of 5 failed: seed=4: a=1: is bad; mend it; b=2: is bad; mend it",
    ]
    made.conclude()
    out, err = capsys.readouterr()
    assert "| runs |" not in out  # nothing was logged
    assert err.startswith("4 of 5 jobs failed:\n  job 2: seed=1: RuntimeError: ")
    assert made.exit_code == 4


def test_the_first_failure_gives_the_exit_code(place):
    paths = "data.path=nowhere.txt,text.txt"
    code, out, err = run_in(place, "-m", *SHORT[:-4], paths, "trainer.batch_size=7")
    assert code == 3
    first = "job 1 of 2 failed: data.path=nowhere.txt: no such file; "
    assert err.startswith(first)
    assert err.count("Traceback") == 0
    _, found = results_of(place)
    assert [job["exit_code"] for job in found["jobs"]] == [3, 0]
    assert "job 2 of 2: data.path=text.txt\n" in out


def test_with_debug_a_failure_has_its_traceback_and_the_sweep_goes_on(place, monkeypatch):
    def trains(trainer):
        raise RuntimeError(f"broken {trainer.settings.seed}")

    monkeypatch.setattr(train.Trainer, "train", trains)
    code, _, err = run_in(place, "-m", *SHORT, "seed=1,2", "debug=true")
    assert code == 4
    assert err.count("Traceback (most recent call last)") == 2
    assert "job 2 of 2 failed: seed=2: RuntimeError: broken 2" in err


def test_without_validation_the_training_loss_is_compared(place):
    """And a setting that makes no other run stands in the table too."""
    kernels = "model.attention=sdpa,explicit"
    code, out, err = run_in(place, "-m", *SHORT, "data.val_fraction=0", kernels, "model=gpt2-nano")
    assert (code, err) == (0, "")
    _, found = results_of(place)
    assert found["metric"] == "train/loss"
    assert [set(row["settings"]) for row in found["rows"]] == [{"model.attention"}] * 2
    assert "| attention |" in out
    assert "| train/loss |" in out


def test_results_that_cannot_be_written_are_a_line(place, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(sweep, "write_whole", full)
    code, out, err = run_in(place, "-m", *SHORT)
    assert code == 0
    assert "job 1 of 1\n" in out
    assert "results          " not in out
    assert "| runs |" in out
    path = next((place / "multirun").iterdir())
    for line in err.splitlines():
        assert line.startswith(f"multirun/{path.name}: results not written (OSError: [Errno 28]")


# -------------------------------------------------------------------------------------- signals


def test_a_stopped_sweep_goes_on_where_it_was(place, monkeypatch):
    """The job that ran is saved, the next one does not begin; the command that is told does what
    is left, and nothing when it is given once more."""
    arguments = ["-m", *SHORT, "optimizer.lr=1e-3,1e-2", "trainer.max_steps=3"]
    real = train.Trainer.step

    def step(trainer):
        if trainer.state.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "step", step)
        code, out, err = run_in(place, *arguments)
    assert code == 143
    assert "job 2" not in out
    stopped, last = err.splitlines()
    (path,) = (place / "multirun").iterdir()
    assert stopped == f"stopped by SIGTERM after step 2; saved in runs/{path.name}_lr-0.001"
    way = last.removeprefix("sweep: stopped; 0 of 2 jobs done; resume with: ")
    words = shlex.split(way)
    assert words == ["python", "train.py", *arguments, f"hydra.sweep.dir=multirun/{path.name}"]
    assert "| 1 (1 unfinished) |" in out
    code, out, err = run_in(place, *words[2:])
    assert (code, err) == (0, "")
    assert out.count("resumed after step 2\n") == 1
    runs = sorted((place / "runs").iterdir())
    assert [run.name for run in runs] == [f"{path.name}_lr-{lr}" for lr in ("0.001", "0.01")]
    assert [rows(run)[-1]["step"] for run in runs] == [3, 3]
    code, out, err = run_in(place, *words[2:])
    assert (code, err) == (0, "")
    assert out.count("finished already, after step 3") == 2


def test_a_signal_ends_the_sweep_even_where_the_job_then_fails(tmp_path, capsys):
    made = sweep_of(tmp_path)

    def job():
        with made.job(0, []), StopSignals(is_main=True, relayed=False) as signals:
            signals.phase = "training"
            os.kill(os.getpid(), signal.SIGTERM)
            raise NotSavedError("no space left")

    with pytest.raises(SystemExit) as stopped:
        job()
    made.conclude()
    assert (stopped.value.code, made.exit_code) == (143, 143)
    err = capsys.readouterr().err
    assert "\n1 job failed:\n  job 1: no space left\n" in err
    assert "\nsweep: stopped; 0 jobs done; resume with: " in err


def test_a_signal_between_two_jobs_ends_the_sweep(place, monkeypatch):
    monkeypatch.setattr(train.Trainer, "train", lambda trainer: None)
    real = sweep.Sweep._write

    def write(self, picture=False):
        if not picture:
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, picture)

    monkeypatch.setattr(sweep.Sweep, "_write", write)
    before = signal.getsignal(signal.SIGINT)
    code, out, err = run_in(place, "-m", *SHORT, "seed=1,2")
    assert code == 130
    assert "job 2" not in out
    assert err.startswith("sweep: stopped; 1 of 2 jobs done; resume with: python train.py -m ")
    assert signal.getsignal(signal.SIGINT) is before


# ---------------------------------------------------------------------------------------- names


def named(folder, keys, *jobs):
    """What the runs of a sweep's jobs are called."""
    made = sweep_of(folder, keys, len(jobs))
    for number, overrides in enumerate(jobs, start=1):
        made.jobs.append(sweep.Job(number, overrides, overrides))
        made.jobs[-1].name = made._name(made.jobs[-1])
    return [job.name for job in made.jobs]


def test_names_say_the_values_and_are_names():
    assert named("sweeps/my lr", ["optimizer.lr"], ["optimizer.lr=0.1"]) == ["my-lr_lr-0.1"]
    assert named("a", [], []) == ["a"]
    both = ["data.path", "trainer.path"]
    values = ["data.path=/tmp/ü b.txt", "+trainer.path='x'"]
    assert named("a", both, values) == ["a_data.path-tmp-b.txt_trainer.path-x"]
    for job in (["seed=1", "optimizer.lr=0.1"], ["optimizer.lr=0.1", "seed=1"]):
        assert named("a", ["seed", "optimizer.lr"], job) == ["a_lr-0.1_seed-1"]
    long = [[f"x={'v' * 300}{n}"] for n in (1, 2)]
    names = named("a", ["x"], *long)
    assert [name[-4:] for name in names] == ["vv_1", "vv_2"]
    assert max(map(len, names)) == 128
    assert named("a", ["x"], ["x=/b"], ["x=b"]) == ["a_x-b", "a_x-b_2"]
    assert named("...", ["x"], ["x=1"]) == ["sweep_x-1"]
    assert len(sweep_of("l" * 200).name) == LENGTHS["group"]
    names += [*named("..,", ["x"], ["x=="]), *named("=", ["x"], ["x=1"])]
    names += named("lr=1,2", ["x"], ["x=[1,2]"], ['x={a:"=,"}'])
    for name in names:
        assert compose([f"name={name}"]).name == name
    assert parse(compare.CompareConfig, [f"runs=[{','.join(names)}]"]).runs == names


def test_a_sweep_whose_runs_are_named_otherwise_is_not_continued(place):
    """Those of version 1: their jobs would be done again under other names."""
    earlier = place / "runs" / "mine_seed=1"
    earlier.mkdir(parents=True)
    (place / "multirun").mkdir()
    arguments = ["-m", *SHORT, "seed=1,2"]
    code, _, err = run_in(place, *arguments, "hydra.sweep.dir=multirun/mine")
    assert code == 2
    assert err.startswith("hydra.sweep.dir=multirun/mine: ")
    assert err.count("\n") == 1
    assert list((place / "runs").iterdir()) == [earlier]
    assert list((place / "multirun").iterdir()) == []


def test_what_a_sweep_says_of_its_folder_is_text(place):
    folder = "hydra.sweep.dir='multirun/a\x1b[31m'"
    code, out, err = run_in(place, "-m", *SHORT, DIVERGES, folder)
    assert code == 4
    assert "\x1b" not in out + err


def test_two_sweeps_of_one_second_have_folders_of_their_own(tmp_path, monkeypatch):
    plan = sweep.Plan([], 1, tmp_path / "multirun" / "2026", False, 60)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    made = [sweep.Sweep(plan, [], [], []) for _ in range(3)]
    for one in made:
        one.begin()
    assert [one.name for one in made] == ["2026", "2026_2", "2026_3"]


def test_torchrun_that_starts_anew_goes_on_with_its_sweep(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "_opened", [])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "this one")
    first = sweep.Sweep(sweep.Plan([], 1, tmp_path / "multirun" / "2026", False, 60), *3 * [[]])
    first.begin()
    again = sweep.Sweep(sweep.Plan([], 1, tmp_path / "multirun" / "2027", False, 60), *3 * [[]])
    again.begin()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    other = sweep.Sweep(sweep.Plan([], 1, tmp_path / "multirun" / "2028", False, 60), *3 * [[]])
    other.begin()
    assert [one.name for one in (first, again, other)] == ["2026", "2026", "2028"]


# ------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["optimizer.lr="], "optimizer.lr=.*: must be a number"),
        (["seed=1,2,1,1"], "seed=1: stands there twice; give each value once$"),
        (["optimizer.lr=1e-3,0.001"], "optimizer.lr=0.001: stands there twice"),
        (["seed=range(100)", "optimizer.lr=range(1,101)"], "command line: stands for 10,000 runs"),
        (
            ["seed=interval(1,5)"],
            r"seed=interval\(1,5\): an interval is no list.*=optuna",
        ),
        (["seed=interval(-5,5)"], "seed=-5: must be from 0"),
        (["hydra.sweeper.params={seed:'1,2'}"], r"hydra.sweeper.params=.*: values stand elsewhere"),
        (["+hydra.sweeper.custom_search_space=os.system"], "hydra.sweeper.custom_search_space=os"),
        (["hydra/sweeper=optuna"], "hydra/sweeper=optuna: .* pip install hydra-optuna-sweeper$"),
        (["name=a,b", "seed=1,2"], "name=a: several runs cannot share one directory"),
        (["model=glob(*)"], r"model=glob\(\*\): a pattern is no list of values"),
        (["hydra.sweep.dir=a,b"], "hydra.sweep.dir: how to sweep is said once; give one value"),
        (["hydra.sweep.dir=text.txt"], "hydra.sweep.dir=text.txt: cannot be made .*; give another"),
    ],
)
def test_what_cannot_be_swept_is_refused_before_a_run(place, arguments, line):
    code, out, err = run_in(place, "-m", *SHORT, *arguments)
    assert code == 2
    assert out == ""
    assert err.count("\n") == (2 if line.startswith("name=") else 1)
    with pytest.raises(AssertionError, match=line):
        raise AssertionError(err.strip())
    assert [path.name for path in place.iterdir()] == ["text.txt"]


def test_the_last_word_on_a_key_counts():
    plan = check_sweep(["seed=1,2,3", "optimizer.lr=1e-3,1e-2", "seed=4"], None)
    assert (plan.keys, plan.count) == (["optimizer.lr"], 2)


def test_only_one_process_may_search(monkeypatch):
    """A sweeper that draws would draw other values on each rank; other launchers have processes of
    their own, which nobody would hear of."""
    from omegaconf import OmegaConf

    choices = {"hydra/sweeper": "optuna", "hydra/launcher": "joblib"}
    custom = {"n_trials": 3, "custom_search_space": "os.system", "direction": "maximize"}
    hydra = OmegaConf.create({"runtime": {"choices": choices}, "sweeper": custom})
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WANDB_RUN_ID", "abc")
    found = command._check_sweeper(hydra, [("seed", "interval(1,2)")])
    assert [problem[0] for problem in found] == [
        "hydra/launcher",
        "hydra/sweeper",
        "hydra.sweeper.direction",
        "WANDB_RUN_ID",
        "hydra.sweeper.custom_search_space",
    ]
    monkeypatch.delenv("RANK")  # nobody has launched several
    monkeypatch.delenv("WANDB_RUN_ID")
    assert len(command._check_sweeper(hydra, [])) == 3


def test_a_search_is_as_long_as_it_is_told_however_many_combinations_there_are(monkeypatch):
    monkeypatch.setattr(command, "MOST_OVERRIDES", 3)
    values = ["seed=1,2", "optimizer.lr=1e-3,1e-2"]
    with pytest.raises(ConfigError, match="stands for 4 runs"):
        check_sweep(values, None)
    with pytest.raises(ConfigError) as refused:
        check_sweep([*values, "hydra/sweeper=optuna"], None)
    assert [cause for _, _, cause, _ in refused.value.problems] == ["is not installed"]


def test_a_launch_that_lacks_something_is_told(place, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "many")
    code, _, err = run_in(place, "-m", *SHORT)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("WORLD_SIZE=many: is no number, and a launcher sets it")


def test_free_text_is_the_same_in_the_command_that_repeats_a_job():
    texts = [
        "data.path=my\\ text.txt",
        r"wandb.notes=a\,b",
        "wandb.name='[c]'",
        """trainer.sample_prompt='"a" \\'b\\' ${c}'""".replace("$", ""),
        "wandb.group=12",
    ]
    alone = [command._as_typed(text) for text in texts]
    assert alone[0] == "data.path=my text.txt"
    assert compose(alone) == compose(texts, sweeping=True)


def test_values_in_any_order_are_in_the_same_order_on_all_ranks(place):
    orders = set()
    for seed in (1, 2):
        random.seed(seed)
        _, out, _ = run_in(place, "-m", "seed=shuffle(range(0,3))", main=command.command(print))
        orders.add(tuple(line for line in out.splitlines() if line.startswith("job ")))
    assert len(orders) == 1


# ------------------------------------------------------------------------------- a sweep of W&B's

AGENT = yaml.safe_load((REPOSITORY / "scripts" / "wandb_sweep.yaml").read_text())


def test_the_agents_command_is_one_of_ours(swept):
    """Filled in by W&B's own code, with both ends or all values of each parameter; every name is
    that of a setting, or composing refuses it."""
    from wandb.sdk.launch.sweeps import utils

    folder, *_ = swept
    for end in ("min", "max"):
        values = {
            key: {"value": how[end] if end in how else how["values"][-1]}
            for key, how in AGENT["parameters"].items()
        }
        arguments = utils.create_sweep_command_args({"args": values})
        command, filled = utils.make_launch_sweep_entrypoint(arguments, list(AGENT["command"]))
        at = command.index("${program}")
        assert command[:at] == ["${env}", "torchrun", "--standalone", "--nproc_per_node=1"]
        settings = compose([*command[at + 1 :], *filled])
        assert settings.optimizer.lr == AGENT["parameters"]["optimizer.lr"][end]
        assert (settings.seed, settings.model.dropout) == (2, 0.2)
    assert (REPOSITORY / AGENT["program"]).is_file()
    _, found = results_of(folder)
    assert AGENT["metric"]["name"] in rows(folder / "runs" / found["jobs"][-1]["run"])[-1]


def test_the_agents_trial_is_the_run(tmp_path, monkeypatch):
    """The agent gives each trial its id on W&B, in the environment, and waits for that one. Of
    several ranks the main one alone has a tracker."""
    monkeypatch.setenv("WANDB_SWEEP_ID", "thesweep")
    monkeypatch.setenv("WANDB_RUN_ID", "thetrial")
    tracker = Tracker(WandbConfig(mode="offline"), tmp_path, {"optimizer": {"lr": 1e-3}})
    try:
        assert (tracker.run_id, tracker.wandb.run.sweep_id) == ("thetrial", "thesweep")
    finally:
        tracker.finish()
    assert last_wandb_id(tmp_path) == "thetrial"


# ----------------------------------------------------------------------------------- the page


def test_every_command_of_the_page_is_valid():
    page = (REPOSITORY / "docs" / "sweeps.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    lines = [shlex.split(line) for block in blocks for line in block.splitlines()]
    counts = []
    for words in lines:
        if "train.py" in words:
            overrides = words[words.index("-m") + 1 :]
            if "hydra/sweeper=optuna" in overrides:  # installed for tests/campaign/extras.py alone
                overrides = [text for text in overrides if "sweeper" not in text]
                overrides[-1] = "optimizer.lr=1e-4,1e-2"
            counts.append(check_sweep(overrides, None).count)
        elif "scripts.compare" in words:
            assert parse(compare.CompareConfig, words[3:]).plot == "all.png"
    assert counts == [9, 9, 4, 2]
    for target in re.findall(r"\]\(([^)#]+)\)", page):
        assert (REPOSITORY / "docs" / target).exists(), target
