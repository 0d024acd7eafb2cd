"""Faults of W&B: a run ends with exit code 0, all metrics on disk and a line on stderr.

Real processes with the real wandb and the server of helpers/wandb_server.py. CAMPAIGN=1 tests each
fault at each request.
"""

import base64
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import TIMEOUT
from helpers.ranks import environment
from helpers.runs import rows as logged
from helpers.tally import CAMPAIGN, in_campaign, tally
from helpers.trainings import ForkServer
from helpers.wandb_server import FAULTS, WandbServer

FAULT = "W&B unreachable, killed, disk full"
FAULT_OF_MODEL = "W&B's server fails over the upload of a model"
KEY = "k" * 40

# A run without a model: it logs rows while the W&B process gets a signal.
WORKER = """
import json, os, signal, subprocess, sys
from pathlib import Path
from clearhead.config.schema import WandbConfig
from helpers.wandb_server import wait_long_for_wandb
from clearhead.output import tracker, wandb_process

plan = json.loads(sys.argv[1])
wait_long_for_wandb()
for name, seconds in plan["seconds"].items():
    setattr(wandb_process, name, seconds)
config = WandbConfig.with_defaults(mode=plan["mode"])
made = tracker.Tracker(config, Path.cwd(), {"seed": 1}, plan["run_id"])
print(made.where())
pids = subprocess.run(["pgrep", "-P", str(os.getpid()), "wandb-core"], capture_output=True).stdout
Path("core.pid").write_bytes(pids)
for step in range(plan["first"], plan["rows"]):
    made.log({"train/loss": 1 / (step + 1), "note/text": 0.5}, step)
    if step == plan["step"]:
        wandb_process.CALL_SECONDS = plan["call_seconds"]
        os.kill(int(pids), getattr(signal, plan["signal"]))
        if plan["signal"] == "SIGKILL":
            os.waitid(os.P_PID, int(pids), os.WEXITED | os.WNOWAIT)
made.sync()
if plan["model"]:
    file = Path("model.safetensors")
    file.write_bytes(bytes(range(256)) * 4000)
    wandb_process.CALL_SECONDS = plan["call_seconds"]
    print(made.upload([file], ["best", "step_5"], {"step": 5}))
made.summary({"best_val_loss": 1.0})
made.finish(0)
"""


NO_FAULT = {"step": None, "signal": None, "model": False, "run_id": None, "first": 0}
NO_FAULT |= {"call_seconds": TIMEOUT, "seconds": {}}


class Worker:
    """worker(**plan) -> the lines on stderr of a run, after a check that all rows are on disk."""

    def __init__(self, processes: ForkServer, folder: Path):
        self.processes, self.out = processes, ""
        self.folder, self.home = folder / "my run", folder / "home"
        self.folder.mkdir()
        self.home.mkdir()

    def environment(self, **more: str) -> dict[str, str]:
        here = {"HOME": self.home, "TMPDIR": self.home, "WANDB__SERVICE_WAIT": TIMEOUT}
        return environment(**here | more)

    def __call__(self, server=None, rows=6, mode="online", variables=None, **plan):
        plan = NO_FAULT | {"rows": rows, "mode": mode} | plan
        address = {"WANDB_BASE_URL": server.url} if server else {}
        variables = self.environment(WANDB_API_KEY=KEY) | address | (variables or {})
        process = self.processes.start(self.folder, json.dumps(plan), code=WORKER, **variables)
        assert process.wait() == 0, process.err
        self.out = process.out
        assert [row["step"] for row in logged(self.folder)] == list(range(rows))
        for pid in (self.folder / "core.pid").read_text().split():
            with contextlib.suppress(ProcessLookupError):  # exists only if it was stopped
                os.kill(int(pid), signal.SIGKILL)
        return process.err.splitlines()

    def sync(self, server: WandbServer, *what: str) -> None:
        command = [sys.executable, "-m", "wandb", "sync", *what]
        variables = self.environment(WANDB_API_KEY=KEY, WANDB_BASE_URL=server.url)
        subprocess.run(command, cwd=self.folder, env=variables, timeout=TIMEOUT, check=True)


@pytest.fixture
def worker(server, tmp_path):
    return Worker(server, tmp_path)


def to_sync(line: str) -> list[str]:
    """Returns the arguments of the `wandb sync` command in a line."""
    return shlex.split(line.partition("wandb sync ")[2])


def ours(lines: list[str]) -> list[str]:
    """Returns the lines that are not printed by wandb itself."""
    return [line for line in lines if line.startswith("W&B: ")]


CANARIES = {
    "WANDB_API_KEY": "canarywandb" + 29 * "w",
    "HF_TOKEN": "hf_canaryhuggingface",
    "MY_PASSWORD": "canary-of-my-own",
}


def forms(secret: str) -> list[bytes]:
    """Returns a secret and its three encodings in base64, one for each offset."""
    found = [secret.encode()]
    for skipped in range(3):
        whole = secret.encode()[skipped:]
        found.append(base64.b64encode(whole[: len(whole) // 3 * 3]))
    return found


def test_an_offline_run_resumed_online_is_one_run(worker):
    """All data arrive and nothing is printed, so the server of these tests works without faults. No
    secret is recorded or sent, and no copy of the model is kept."""
    text = base64.b64encode(b"?" + CANARIES["HF_TOKEN"].encode() + b"??? and more")
    assert any(form in text for form in forms(CANARIES["HF_TOKEN"]))
    plan = {"model": True, "variables": CANARIES}
    with WandbServer() as server:
        assert worker(server, mode="offline", **plan) == []
        assert server.requests == []
        (record,) = (worker.folder / "wandb").glob("offline-run-*")
        known = record.name.split("-")[-1]  # offline-run-DATE-ID
        worker.sync(server, str(record))
        assert worker(server, run_id=known, first=6, rows=12, **plan) == []
        assert list((worker.folder / "wandb").glob(f"run-*-{known}"))
        address = f"{server.url}/me/clearhead/runs/{known}"
        assert worker.out.splitlines() == [address, f"model-{known}"]
        files = [path for path in worker.folder.parent.rglob("*") if path.is_file()]
        content = {path: path.read_bytes() for path in files}
        records = [path for path in files if path.suffix == ".wandb"]
        assert all(b"train/loss" in content[path] for path in records)
        content["what was sent"] = b"".join(body for _, body in server.requests)
        for name, secret in CANARIES.items():
            for where, some in content.items():
                assert not any(form in some for form in forms(secret)), f"{name} in {where}"
        assert max(path.stat().st_size for path in worker.home.rglob("*")) < 10**6
        assert {asked["name"] for asked in server.asked("upsertBucket(")} == {known}
        assert [row["_step"] for row in server.rows()] == list(range(12))
        models = [asked["input"] for asked in server.asked("createArtifact(")]
        assert [model["artifactCollectionName"] for model in models] == [f"model-{known}"] * 2
        aliases = [{alias["alias"] for alias in model["aliases"]} for model in models]
        assert aliases == [{"latest", "best", "step_5"}] * 2
        sent = [body for path, body in server.requests if path == "/store/model.safetensors"]
        assert sent == [bytes(range(256)) * 4000] * 2


@pytest.mark.parametrize("fault", FAULTS if CAMPAIGN else ["403"])
def test_a_server_that_fails_at_the_start_means_offline(worker, fault):
    with WandbServer(fault) as server:
        assert len(ours(worker(server, seconds={"START_SECONDS": 1}))) == 1
    assert to_sync(worker.out) == [f"{worker.folder}/wandb/offline-run-*"]
    (record,) = (worker.folder / "wandb").glob("offline-run-*/*.wandb")
    assert record.stat().st_size > 0
    tally(FAULT)


PLACES = ["upsertBucket", "file_stream", "createRunFiles"]  # last request with an answer
IN_THE_MIDDLE = [(fault, after) for fault in FAULTS for after in PLACES]
IN_SHORT = [("closed", "upsertBucket")]


@pytest.mark.parametrize(("fault", "after"), IN_THE_MIDDLE if CAMPAIGN else IN_SHORT)
def test_after_a_fault_in_the_middle_wandb_sync_uploads_the_rest(worker, fault, after):
    """The printed command uploads it. If the server refuses or sends invalid JSON, wandb stops
    immediately; it prints a warning only if the server refuses."""
    with WandbServer(fault, after) as server:
        lines = worker(server, variables={"WANDB_FINISH_TIMEOUT": "1"})
        assert server.failing
    printed = "\n".join([worker.out, *lines])  # out: if the server ends wandb, the run is offline
    assert "wandb sync" in printed or fault == "garbage"
    if ours(lines) and fault not in ("500", "429", "403", "404"):  # these end wandb's process
        (line,) = ours(lines)
        include, record = to_sync(line)
        with WandbServer() as server:
            worker.sync(server, include, record)
            assert [row["_step"] for row in server.rows()] == list(range(6))
    tally(FAULT)


MODEL = ["ArtifactType", "createArtifact(", "createArtifactFiles(", "commitArtifact("]


@pytest.mark.parametrize("after", MODEL if CAMPAIGN else MODEL[1:2])
@pytest.mark.parametrize("fault", ["403", "garbage", "hangs"] if CAMPAIGN else ["hangs"])
def test_a_model_that_is_not_uploaded_gives_the_command(worker, fault, after):
    """`wandb sync` would not upload the model."""
    with WandbServer(fault, after) as server:
        plan = {"model": True, "seconds": {"MODEL_SECONDS": 1}, "call_seconds": 2}
        lines = worker(server, variables={"WANDB_FINISH_TIMEOUT": "1"}, **plan)
        assert server.failing
    place = r"wandb artifact put --type model --name me/clearhead/model-\w+ \S"
    assert re.search(place, ours(lines)[0])
    tally(FAULT_OF_MODEL)


@pytest.mark.parametrize("mode", ["offline", "online"] if CAMPAIGN else ["offline"])
@pytest.mark.parametrize("step", range(6) if CAMPAIGN else [3])
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"] if CAMPAIGN else ["SIGSTOP"])
def test_wandb_killed_or_stopped_after_a_row(worker, name, step, mode):
    """The run waits for a stopped W&B process with a timeout, at its end and when Python exits.
    wandb itself would wait forever."""
    with WandbServer() as server:
        plan = {"step": step, "signal": name, "seconds": {"TEARDOWN_SECONDS": 1}, "call_seconds": 2}
        lines = worker(server, mode=mode, variables={"WANDB_FINISH_TIMEOUT": "1"}, **plan)
    assert len(ours(lines)) == 1
    tally(FAULT)


def test_an_invalid_key_means_offline_and_a_service_that_does_not_start_means_off(worker):
    (line,) = ours(worker(variables={"WANDB_API_KEY": "abc"}))
    assert "WANDB_API_KEY" in line
    assert to_sync(worker.out)
    (worker.folder / "metrics.jsonl").unlink()
    assert len(ours(worker(mode="offline", variables={"WANDB_SERVICE": "invalid"}))) == 1
    assert worker.out == "None\n"
    tally(FAULT, 2)


def test_a_terminal_is_never_asked_for_a_key(worker):
    """stdin, stdout and stderr are a terminal, on which wandb would ask and wait."""
    plan = NO_FAULT | {"rows": 2, "mode": "auto"}
    command = shlex.join([sys.executable, "-c", WORKER, json.dumps(plan)])
    keyboard = os.pipe()  # on which nothing is typed
    try:
        done = subprocess.run(
            ["script", "-qec", command, "/dev/null"],
            cwd=worker.folder,
            env=worker.environment(TERM="xterm", SHELL="/bin/sh"),
            stdin=keyboard[0],
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
    finally:
        for end in keyboard:
            os.close(end)
    assert done.returncode == 0
    notice, where = done.stdout.splitlines()
    assert "wandb=off" in notice  # the setting that avoids the notice
    assert to_sync(where)
    assert len(logged(worker.folder)) == 2
    tally(FAULT)


@in_campaign
@pytest.mark.parametrize("size", [60, 100, 150, 200, 300])
def test_a_full_disk_below_wandb(worker, size):
    disk = worker.folder / "wandb"
    disk.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(["mount", *options], capture_output=True).returncode:
        pytest.skip("only root can mount a small disk")
    try:
        worker(rows=size * 10, mode="offline")
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
    tally(FAULT)
