"""Rows and pictures of a run arrive on W&B, at their step, byte for byte, also after SIGKILL.

Each trial is a run, offline or online, that is killed once or several times at a random moment and
resumed with the same command. An offline run is then uploaded with `wandb sync`, which may be
killed too. Only rows from before the last checkpoint of a killed process may be missing. The server
is that of helpers/wandb_server.py.
"""

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import TEXT, TIMEOUT, TINY
from helpers.ranks import environment
from helpers.runs import rows, wandb_records
from helpers.tally import campaign, tally
from helpers.trainings import STEP, ForkServer, interrupt
from helpers.wandb_server import WandbServer

STEPS = 12
RUN = [each for each in TINY if not each.startswith(("lens=", "wandb="))]
RUN += ["name=run", "data.path=text.txt", f"trainer.max_steps={STEPS}", "trainer.save_every=3"]
RUN += ["trainer.log_every=1", "trainer.eval_every=4", "trainer.sample_tokens=4"]
RUN += ["lens.every=2", "lens.prompts=[one two one,two]", "lens.repeat_length=0"]
WHEN = ("before", "after", "saved")  # saved: after a pending checkpoint
NOT_COMPARED = ("step", "train/tokens_per_second")  # W&B has the speed from before a kill


class Wandb:
    """A W&B server, and trainings and uploads that use it."""

    def __init__(self, server: WandbServer, trainings: ForkServer):
        self.server, self.trainings = server, trainings
        self.variables = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "k" * 40}
        self.variables["WANDB__SERVICE_WAIT"] = TIMEOUT

    def train(self, folder: Path, mode: str, chance: random.Random, fault: dict | None) -> int:
        """Starts a run or resumes it. Returns its exit code."""
        # Some rows are written and sent before the kill, and others are not.
        intervals = {
            "WANDB__TRANSACTION_LOG_FLUSH_INTERVAL": chance.choice([0, 0.1, 15]),
            "WANDB__FILE_STREAM_TRANSMIT_INTERVAL": chance.choice([1, 15]),
        }
        arguments = (*RUN, f"wandb={mode}")
        training = self.trainings.start(
            folder, *arguments, fault=fault, **self.variables, **intervals
        )
        code = training.wait()
        assert "W&B: " not in training.err
        return code

    def sync(self, folder: Path, kill: bool = False) -> None:
        """Uploads an offline run. kill: the upload is killed at its first file.

        Each part separately: `wandb sync` ends at the incomplete record of a killed process.
        """
        variables = environment(HOME=folder, **self.variables)
        for record in sorted((folder / "runs" / "run" / "wandb").glob("offline-run-*")):
            command = [sys.executable, "-m", "wandb", "sync", str(record)]
            with subprocess.Popen(
                command, cwd=folder, env=variables, stderr=subprocess.PIPE
            ) as process:
                if kill:
                    assert self.server.dropped.wait(TIMEOUT)
                    process.kill()
                process.communicate(timeout=TIMEOUT)
            if kill:
                return


@pytest.fixture(scope="module")
def wandb(server):
    with WandbServer() as of_wandb:
        yield Wandb(of_wandb, server)


def check_uploaded(run: Path, server: WandbServer, is_offline: bool) -> tuple[int, int]:
    """Checks the rows and pictures on the server, and that those after the last start are there.
    Returns the number of pictures and of rows."""
    name = json.loads((run / "checkpoints" / "last" / "state.json").read_text())["wandb_id"]
    uploaded = {
        path: each for path, each in server.files[name].items() if path.startswith("media/")
    }
    assert max(map(len, uploaded.values())) == 1  # no file has two contents
    on_disk = {row["step"]: row for row in rows(run)}
    on_server = [row for _, row in sorted(server.history[name].items())]
    steps = [row["_step"] for row in on_server]
    assert steps == sorted(set(steps) & on_disk.keys())
    resumed = json.loads((run / "starts.jsonl").read_text().splitlines()[-1])["step"]
    if resumed:
        assert set(steps) >= {step for step in on_disk if step > resumed}
    count = 0
    for row in on_server:
        for key, value in on_disk[row["_step"]].items():
            if not isinstance(value, list):
                assert key in NOT_COMPARED or row[key] == value
                continue
            shown = row[key]
            for path, file in zip(shown.get("filenames") or [shown["path"]], value, strict=True):
                assert f"_{row['_step']}_" in path
                if is_offline or row["_step"] > resumed:  # a kill may interrupt an upload
                    (content,) = uploaded[path]
                    assert content == (run / file).read_bytes()
                    count += 1
    return count, len(steps)


def history_of(run: Path) -> list[tuple[dict, Path]]:
    """Returns the rows in the records of an offline run, and the folders of their files."""
    found = []
    for part in sorted((run / "wandb").glob("offline-run-*")):
        (file,) = part.glob("run-*.wandb")
        records = wandb_records(file)
        rows = [record["history"]["item"] for record in records if record["type"] == "history"]
        found += [(row, part / "files") for row in rows]
    return found


def test_each_image_is_in_the_history_once_after_two_kills(wandb, tmp_path):
    """Each kill is two steps after a checkpoint: the resumed run computes and draws these steps
    again. The images of several prompts are a list."""
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    run = tmp_path / "runs" / "run"
    for step in (5, 8):
        file = tmp_path / f"step{step}"
        fault = {"wait_at": {"step": step, "file": str(file)}}
        training = wandb.trainings.start(tmp_path, *RUN, "wandb=offline", fault=fault)
        while not Path(f"{file}.reached").exists() or history_of(run)[-1][0]["_step"] < step:
            assert not training.has_ended(0.1), training.err
        training.send(signal.SIGKILL)
        assert training.wait() == -signal.SIGKILL
    assert wandb.train(tmp_path, "offline", random.Random(0), None) == 0

    on_disk = rows(run)
    history = history_of(run)
    assert [row["_step"] for row, _ in history] == [row["step"] for row in on_disk]
    for mine, (row, folder) in zip(on_disk, history, strict=True):
        images = {key: value for key, value in mine.items() if isinstance(value, list)}
        expected = {"attention/heads": 2, "attention/largest": 1}
        assert {key: len(value) for key, value in images.items()} == (
            expected if mine["step"] % 2 == 0 else {}
        )
        for key, files in images.items():
            paths = row.get(f"{key}.filenames") or [row[f"{key}.path"]]
            assert [(folder / path).read_bytes() for path in paths] == [
                (run / file).read_bytes() for file in files
            ]


@pytest.mark.parametrize("number", range(campaign("CAMPAIGN_PICTURES", 1, 50)))
def test_rows_and_pictures_arrive(wandb, tmp_path, number):
    chance, mode, server = random.Random(number), ("offline", "online")[number % 2], wandb.server
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    kills = (1, 1, 1, 1, 1, 2, 3)[number % 7]
    for _ in range(kills):
        place = (STEP, chance.randrange(STEPS // kills // 2, STEPS // kills), chance.choice(WHEN))
        fault = interrupt(("SIGKILL", *place))
        assert wandb.train(tmp_path, mode, chance, fault) == -signal.SIGKILL
    assert wandb.train(tmp_path, mode, chance, None) == 0
    if mode == "offline" and chance.random() < 0.5:
        server.dropped.clear()
        server.dropping = True
        wandb.sync(tmp_path, kill=True)
        server.dropping = False
    if mode == "offline":
        wandb.sync(tmp_path)
    pictures, steps = check_uploaded(tmp_path / "runs" / "run", server, mode == "offline")
    tally(f"W&B: kills of {mode} runs", kills)
    tally("W&B: pictures that arrive", pictures)
    tally("W&B: rows that arrive", steps)
