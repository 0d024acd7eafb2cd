"""Whatever happens to W&B, a run ends well, with all its metrics on disk and one line about it.

Real processes with the real wandb, whose server stands in wandb_server.py. CAMPAIGN=1 tries every
fault at every place.
"""

import base64
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers import NO_NETWORK, REPOSITORY, TEXT, TINY
from helpers.tally import CAMPAIGN, in_campaign, tally
from helpers.wandb_server import FAULTS, WandbServer

from training.tracker import last_wandb_id

FAULT = "W&B unreachable, killed, disk full"
FAULT_OF_MODEL = "W&B's server fails over the upload of a model"
KEY = "k" * 40

# A run without torch: rows are logged, and meanwhile something happens to W&B's own process.
WORKER = """
import json, logging, os, signal, sys
from pathlib import Path
from training import tracker, wandb_run

plan = json.loads(sys.argv[1])
for name, seconds in plan["seconds"].items():
    setattr(wandb_run, name, seconds)
if core := plan["core"]:
    os.environ["WANDB_ERROR_REPORTING"] = "false"  # as the tracker does, before the first import
    import wandb.sdk.lib.service.service_process
    wandb.sdk.lib.service.service_process.get_core_path = lambda: core
config = wandb_run.WandbConfig(mode=plan["mode"], alerts=True)
made = tracker.Tracker(config, Path.cwd(), {"seed": 1}, plan["run_id"])
print(made.where())
wandb_run.ANSWER_SECONDS = plan["answer_seconds"]
for step in range(plan["rows"]):
    made.log({"train/loss": 1 / (step + 1), "note/text": 0.5}, step)
    if step != plan["step"]:
        continue
    if plan["signal"]:
        service = wandb_run._service()
        os.kill(service.pid, getattr(signal, plan["signal"]))
        if plan["signal"] == "SIGKILL":
            os.waitid(os.P_PID, service.pid, os.WEXITED | os.WNOWAIT)
    if plan["full_log"]:
        (handler,) = (x for x in logging.getLogger("wandb").handlers if hasattr(x, "stream"))
        handler.setStream(open("/dev/full", "w"))
made.sync()
if plan["model"]:
    made.alert("Loss spike", "the loss rose", "WARN")
    file = Path("model.safetensors")
    file.write_bytes(bytes(range(256)) * 4000)
    print(made.wandb.log_model([file], ["best", "step_5"], {"step": 5}))
made.summary({"best_val_loss": 1.0})
made.finish(0)
"""


NOTHING_HAPPENS = {"core": None, "step": None, "signal": None, "full_log": False}
NOTHING_HAPPENS |= {"model": False, "run_id": None, "answer_seconds": 20, "seconds": {}}


class Worker:
    """worker(**plan) -> its lines on stderr, after a run that ended well with all rows."""

    def __init__(self, folder: Path):
        self.folder = folder / "run"
        self.folder.mkdir()
        self.home = folder / "home"
        self.home.mkdir()
        self.out = ""

    def environment(self, **more: str) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "TMPDIR": str(self.home),
            "PYTHONPATH": f"{REPOSITORY / 'tests' / 'no_network'}{os.pathsep}{REPOSITORY}",
            **more,
        }

    def __call__(self, rows=6, mode="online", seconds=None, environment=None, **plan):
        plan = NOTHING_HAPPENS | {"rows": rows, "mode": mode, "seconds": seconds or {}} | plan
        done = subprocess.run(
            [sys.executable, "-c", WORKER, json.dumps(plan)],
            cwd=self.folder,
            env=self.environment(**{"WANDB_API_KEY": KEY} | (environment or {})),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert [row["step"] for row in logged(self.folder)] == list(range(rows))
        self.out = done.stdout
        return done.stderr.splitlines()

    def sync(self, server: WandbServer, *what: str) -> subprocess.CompletedProcess:
        """wandb sync, to a server that may be another one now."""
        return subprocess.run(
            [sys.executable, "-m", "wandb", "sync", *what],
            cwd=self.folder,
            env=self.environment(WANDB_API_KEY=KEY, WANDB_BASE_URL=server.url),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )


@pytest.fixture
def worker(tmp_path):
    return Worker(tmp_path)


def logged(folder: Path) -> list[dict]:
    content = (folder / "metrics.jsonl").read_bytes()
    assert content.endswith(b"\n")
    return [json.loads(line) for line in content.splitlines()]


def test_with_a_server_that_is_well_everything_arrives_and_nothing_is_said(worker):
    """The server of these tests is one: else its faults would prove nothing."""
    with WandbServer() as server:
        assert worker(model=True, environment={"WANDB_BASE_URL": server.url}) == []
        assert [row["_step"] for row in server.rows()] == list(range(6))
        address, model = worker.out.splitlines()
        assert address.startswith(f"{server.url}/me/clearhead/runs/")
        assert model == f"model-{address.rpartition('/')[2]}"
        (alert,) = server.asked("notifyScriptableRunAlert")
        assert (alert["title"], alert["severity"]) == ("Loss spike", "WARN")
        (artifact,) = server.asked("createArtifact(")
        assert artifact["input"]["artifactCollectionName"] == model
        assert artifact["input"]["artifactTypeName"] == "model"
        aliases = {alias["alias"] for alias in artifact["input"]["aliases"]}
        assert aliases == {"latest", "best", "step_5"}
        sent = dict(server.requests)["/store/model.safetensors"]
        assert sent == (worker.folder / "model.safetensors").read_bytes()
        assert server.asked("commitArtifact(") == [{"artifactID": "a"}]
    assert max(path.stat().st_size for path in worker.home.rglob("*")) < 10**6  # no copy is kept


# ------------------------------------------------------------------------------- the server


@pytest.mark.parametrize("fault", FAULTS if CAMPAIGN else ["closed", "hangs"])
def test_a_server_that_fails_at_the_start_means_offline(worker, fault):
    tally(FAULT)
    with WandbServer(fault) as server:
        address = {"WANDB_BASE_URL": server.url}
        (line,) = worker(environment=address, seconds={"START_SECONDS": 1})
    if fault == "empty":  # it lets wandb start, whose own process then breaks down
        assert line.startswith("W&B: left out, metrics are in metrics.jsonl (its process ended")
        return
    assert re.fullmatch(r"W&B: not reached \(.+\); recorded offline instead", line)
    assert "wandb sync" in worker.out
    (record,) = (worker.folder / "wandb").glob("offline-run-*/*.wandb")
    assert record.stat().st_size > 0


ARTIFACT = ["ArtifactType", "createArtifact(", "createArtifactFiles(", "commitArtifact("]
PLACES = ["upsertBucket", "file_stream", "createRunFiles"]  # what is answered last


@pytest.mark.parametrize(
    ("fault", "after"),
    # An empty answer is what a healthy server gives to uploads.
    [(fault, after) for fault in FAULTS if fault != "empty" for after in PLACES]
    + [("empty", "upsertBucket")]
    if CAMPAIGN
    else [
        ("closed", "upsertBucket"),
        ("hangs", "file_stream"),
        ("garbage", "createRunFiles"),
    ],
)
def test_a_server_that_fails_in_the_middle_is_told_with_the_way_to_upload_later(
    worker, fault, after
):
    """wandb itself waits for a day, or gives up and says nothing."""
    tally(FAULT)
    gives_up = fault in ("403", "404", "garbage", "empty")
    with WandbServer(fault, after) as server:
        address = {"WANDB_BASE_URL": server.url}
        (line,) = worker(environment=address, seconds={} if gives_up else {"FINISH_SECONDS": 1})
        assert server.failing
    if fault == "empty":
        assert line.startswith("W&B: left out") or "not all was uploaded" in line
        return  # wandb breaks down over it, or does not
    assert line.startswith("W&B: not all was uploaded (")
    assert gives_up or "(the server did not take it within 1 s)" in line
    record = line.partition("wandb sync --include-online ")[2]
    assert list((worker.folder / record).glob("*.wandb"))


@pytest.mark.parametrize("fault", ["resets", "403", "garbage"] if CAMPAIGN else ["403"])
def test_what_was_not_uploaded_is_uploaded_by_the_command_that_the_line_tells(worker, fault):
    tally(FAULT)
    with WandbServer(fault, after="upsertBucket") as server:
        address = {"WANDB_BASE_URL": server.url}
        (line,) = worker(rows=20, environment=address, seconds={"FINISH_SECONDS": 1})
    with WandbServer() as server:
        done = worker.sync(server, *line.partition("to do it later: wandb sync ")[2].split())
        assert done.returncode == 0, done.stderr
        assert [row["_step"] for row in server.rows()] == list(range(20))


@pytest.mark.parametrize(
    ("fault", "after"),
    [(fault, place) for fault in ("403", "garbage", "hangs") for place in ARTIFACT]
    if CAMPAIGN
    else [("403", "ArtifactType"), ("hangs", "createArtifact(")],
)
def test_a_server_that_fails_over_the_model_is_told_and_the_rest_is_there(worker, fault, after):
    tally(FAULT_OF_MODEL)
    with WandbServer(fault, after) as server:
        seconds = {} if fault != "hangs" else {"FINISH_SECONDS": 1, "ANSWER_SECONDS": 2}
        address = {"WANDB_BASE_URL": server.url}
        lines = worker(model=True, environment=address, seconds=seconds, answer_seconds=3)
        assert server.failing
    if (fault, after) == ("hangs", "ArtifactType"):  # wandb's process waits for it, beyond its time
        assert lines[-1].startswith("W&B: left out, metrics are in metrics.jsonl (no answer within")
    else:
        assert lines[-1].startswith("W&B: not all was uploaded (")
        assert "; to do it later: wandb sync --include-online " in lines[-1]
    assert all(line.startswith("W&B: the model was not uploaded (") for line in lines[:-1])
    assert re.search(
        r"by hand: wandb artifact put --type model --name me/clearhead/model-\w+ \S", lines[0]
    )


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_a_run_that_goes_on_is_the_same_run_there(worker, mode):
    with WandbServer() as server:
        address = {"WANDB_BASE_URL": server.url}
        assert worker(mode=mode, model=True, environment=address) == []
        (worker.folder / "metrics.jsonl").unlink()
        known = last_wandb_id(worker.folder)
        assert worker(mode=mode, model=True, environment=address, run_id=known) == []
        records = sorted((worker.folder / "wandb").glob("*run-*-*"))
        if mode == "offline":
            assert server.requests == []
            assert max(path.stat().st_size for path in worker.home.rglob("*")) < 10**6  # no copy
            assert worker.sync(server, *map(str, records)).returncode == 0
        assert {record.name.rpartition("-")[2] for record in records} == {known}
        assert {asked["name"] for asked in server.asked("upsertBucket(")} == {known}
        models = [asked["input"] for asked in server.asked("createArtifact(")]
        assert {model["artifactCollectionName"] for model in models} == {f"model-{known}"}
        sent = [path for path, _ in server.requests if path.endswith("model.safetensors")]
        assert len(sent) == len(models) == 2


# ---------------------------------------------------------------------- wandb's own process


@pytest.mark.parametrize("mode", ["offline", "online"] if CAMPAIGN else ["offline"])
@pytest.mark.parametrize("step", range(6) if CAMPAIGN else [3])
def test_wandb_killed_after_a_row(worker, step, mode):
    tally(FAULT)
    with WandbServer() as server:
        address = {"WANDB_BASE_URL": server.url}
        lines = worker(mode=mode, step=step, signal="SIGKILL", environment=address)
    assert lines == ["W&B: left out, metrics are in metrics.jsonl (its process ended with code -9)"]


@pytest.mark.parametrize("mode", ["offline", "online"] if CAMPAIGN else ["offline"])
@pytest.mark.parametrize("step", range(6) if CAMPAIGN else [2])
def test_wandb_that_stands_still_is_not_waited_for(worker, step, mode):
    """At the end, and when Python exits: wandb itself would wait for ever."""
    tally(FAULT)
    with WandbServer() as server:
        lines = worker(
            mode=mode,
            step=step,
            signal="SIGSTOP",
            environment={"WANDB_BASE_URL": server.url},
            seconds={"FINISH_SECONDS": 1},
            answer_seconds=2,
        )
    bound = 2 if mode == "offline" else 3
    assert lines == [f"W&B: left out, metrics are in metrics.jsonl (no answer within {bound} s)"]


@in_campaign
def test_wandb_that_stands_still_holds_up_one_row_only(worker):
    """What it does not read fills the pipe to it, and then the next row would wait for ever."""
    tally(FAULT)
    lines = worker(
        rows=1500,
        mode="offline",
        step=1,
        signal="SIGSTOP",
        answer_seconds=2,
    )
    assert lines == ["W&B: left out, metrics are in metrics.jsonl (no answer within 2 s)"]


@pytest.mark.parametrize("script", ["exit 3", "exec sleep 30", None] if CAMPAIGN else ["exit 3"])
def test_wandb_that_does_not_start(worker, script):
    """It ends at once, does nothing, or is not there."""
    tally(FAULT)
    core = worker.home / "wandb-core"
    if script:
        core.write_text(f"#!/bin/sh\n{script}\n")
        core.chmod(0o755)
    (line,) = worker(mode="offline", core=str(core), seconds={"ANSWER_SECONDS": 2})
    assert line.startswith("W&B: left out, metrics are in metrics.jsonl (")


# ----------------------------------------------------------------------------- keys, folders


def test_a_terminal_is_never_asked_for_a_key(worker):
    """With a terminal on all sides: wandb would ask there, and wait."""
    tally(FAULT)
    ours, theirs = pty.openpty()
    plan = NOTHING_HAPPENS | {"rows": 2, "mode": "online"}
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, json.dumps(plan)],
        cwd=worker.folder,
        env=worker.environment(TERM="xterm"),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    said = []

    def listen() -> None:
        try:
            while some := os.read(ours, 4096):
                said.append(some)
        except OSError:  # the other end is closed
            return

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        listener.join(10)
        os.close(ours)
    notice, where = b"".join(said).decode().splitlines()
    assert notice.startswith("W&B: no API key found, so this run is recorded offline")
    assert where.startswith("offline; to upload it: wandb sync ")
    assert len(logged(worker.folder)) == 2


def test_a_key_that_cannot_be_one_means_offline(worker):
    tally(FAULT)
    (line,) = worker(environment={"WANDB_API_KEY": "abc"})
    assert line.startswith("W&B: not reached (WANDB_API_KEY invalid")
    assert "wandb sync" in worker.out


def test_a_file_where_wandb_wants_a_folder(worker):
    tally(FAULT)
    (worker.folder / "wandb").write_text("in the way")
    (line,) = worker(mode="offline")
    assert line.startswith("W&B: left out, metrics are in metrics.jsonl ([Errno 20] Not a dir")


@pytest.fixture
def small_disk(tmp_path):
    """small_disk(bytes) -> a folder on a disk of that size; a part of memory, which root can do."""
    mounted = []

    def make(size: int) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        if os.geteuid() or subprocess.run(["mount", *options], capture_output=True).returncode:
            pytest.skip("only root can mount a small disk")
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> None:
    with open(folder / "filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


@pytest.mark.parametrize("size", [60, 100, 150, 200, 300] if CAMPAIGN else [60])
def test_a_full_disk_below_wandb(worker, small_disk, size):
    """wandb says nothing of it: what is missing is seen when the run is uploaded."""
    tally(FAULT)
    (worker.folder / "wandb").symlink_to(small_disk(size * 1024))
    (line,) = worker(rows=size * 10, mode="offline")
    assert line.startswith("W&B: its record has gaps, metrics are in metrics.jsonl (")
    assert "no space left on device" in line or "its log breaks off" in line


@in_campaign
def test_a_disk_that_is_full_before_wandb_starts(worker, small_disk):
    tally(FAULT)
    disk = small_disk(100 * 1024)
    fill(disk)
    (worker.folder / "wandb").symlink_to(disk)
    (line,) = worker(mode="offline")
    assert line.startswith("W&B: left out, metrics are in metrics.jsonl (")
    assert "No space left on device" in line


@in_campaign
def test_wandbs_own_log_on_a_full_disk_leaves_no_trace_on_stderr(worker):
    tally(FAULT)
    lines = worker(mode="offline", step=1, full_log=True)
    assert lines == [
        "W&B: left out, metrics are in metrics.jsonl ([Errno 28] No space left on device)"
    ]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_is_not_writable(worker):
    tally(FAULT)
    (worker.folder / "wandb").mkdir(mode=0o500)
    (line,) = worker(mode="offline")
    assert line.startswith("W&B: left out, metrics are in metrics.jsonl (")


# ------------------------------------------------------------------------------ whole runs


def train(folder: Path, *overrides: str, **environment: str) -> subprocess.Popen:
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    settings = [setting for setting in TINY if not setting.startswith("wandb")]
    settings += [f"data.path={folder / 'text.txt'}", "name=run", "trainer.max_steps=30"]
    settings += ["trainer.eval_every=30", "trainer.sample_tokens=0"]
    home = folder / "home"
    home.mkdir()
    return subprocess.Popen(
        [sys.executable, str(REPOSITORY / "train.py"), *settings, *overrides],
        cwd=folder,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "TMPDIR": str(home),
            "PYTHONPATH": str(NO_NETWORK),
            "OMP_NUM_THREADS": "1",
            "WANDB_API_KEY": KEY,
            "WANDB_FINISH_TIMEOUT": "2",
            **environment,
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended_well(process: subprocess.Popen, folder: Path) -> list[str]:
    """The lines on stderr of a run that has everything a run has."""
    try:
        out, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    run = folder / "runs" / "run"
    assert [row["step"] for row in logged(run)] == list(range(31))
    assert (run / "checkpoints" / "last" / "model.safetensors").is_file()
    assert (run / "report.html").is_file()
    assert "more text " in out
    return errors.splitlines()


@in_campaign
def test_a_whole_run_whose_server_goes_in_the_middle(tmp_path):
    tally(FAULT)
    with WandbServer("resets", after="file_stream") as server:
        (line,) = ended_well(train(tmp_path, WANDB_BASE_URL=server.url), tmp_path)
    assert line.startswith("W&B: not all was uploaded (the server did not take it within 2 s)")


def test_a_whole_run_whose_wandb_is_killed_in_the_middle(tmp_path):
    """As soon as it has uploaded something."""
    tally(FAULT)
    with WandbServer() as server:
        process = train(tmp_path, WANDB_BASE_URL=server.url)
        server.wait_for("file_stream", 60)
        listed = subprocess.run(
            ["ps", "-o", "pid=,comm=", "--ppid", str(process.pid)], capture_output=True, text=True
        ).stdout
        (core,) = re.findall(r"(\d+) wandb-core", listed)
        os.kill(int(core), signal.SIGKILL)
        (line,) = ended_well(process, tmp_path)
    assert line == "W&B: left out, metrics are in metrics.jsonl (its process ended with code -9)"


# ---------------------------------------------------------------------------------- secrets

CANARIES = {
    "WANDB_API_KEY": "canarywandb" + 29 * "w",
    "HF_TOKEN": "hf_canaryhuggingface",
    "AWS_SECRET_ACCESS_KEY": "canary/aws+secret",
    "GITHUB_TOKEN": "ghp_canarygithub",
    "MY_PASSWORD": "canary-of-my-own",
}


def forms(secret: str) -> list[bytes]:
    """A secret as it would show: as it is, and what base64 makes of it wherever it stands."""
    found = [secret.encode()]
    for skipped in range(3):  # it codes three bytes at a time, which begin somewhere in the secret
        whole = secret.encode()[skipped:]
        found.append(base64.b64encode(whole[: len(whole) // 3 * 3]))
    return found


def test_secrets_are_found_in_base64_too():
    for before in range(4):
        text = base64.b64encode(b"?" * before + CANARIES["HF_TOKEN"].encode() + b"??? and more")
        assert sum(form in text for form in forms(CANARIES["HF_TOKEN"])) == 1


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_no_secret_of_the_environment_is_recorded_or_uploaded(worker, mode):
    with WandbServer() as server:
        worker(mode=mode, environment={"WANDB_BASE_URL": server.url, **CANARIES})
        sent = b"".join(body for _, body in server.requests)
        if mode == "online":
            assert b"train/loss" in sent
    files = [path for path in worker.folder.parent.rglob("*") if path.is_file()]
    (record,) = (path for path in files if path.suffix == ".wandb")
    assert b"train/loss" in record.read_bytes()
    for name, secret in CANARIES.items():
        for form in forms(secret):
            assert form not in sent, name
            for path in files:
                assert form not in path.read_bytes(), f"{name} in {path}"
