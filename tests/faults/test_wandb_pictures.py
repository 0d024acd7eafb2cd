"""Every picture of a run arrives on W&B, at its step, byte for byte, also after SIGKILL.

Each trial is a run, offline or online, that is killed once or several times at a random moment and
resumed with the same command. An offline run is then uploaded with `wandb sync`, which may be
killed too. The server is that of helpers/wandb_server.py.
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
from helpers.runs import rows
from helpers.tally import campaign, tally
from helpers.trainings import STEP, ForkServer, interrupt
from helpers.wandb_server import WandbServer

STEPS = 12
RUN = [each for each in TINY if not each.startswith(("lens=", "wandb="))]
RUN += ["name=run", "data.path=text.txt", f"trainer.max_steps={STEPS}", "trainer.save_every=3"]
RUN += ["trainer.log_every=1", "trainer.eval_every=4", "trainer.sample_tokens=4"]
RUN += ["lens.every=2", "lens.prompts=[one two one]", "lens.repeat_length=0"]
FILES = (".png", ".html", ".webp")
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
        # Some rows are written and sent before the kill, and others are not. If the server drops
        # files, the rows that name them are sent.
        sent = [1] if self.server.dropping else [1, 15]
        intervals = {
            "WANDB__TRANSACTION_LOG_FLUSH_INTERVAL": chance.choice([0, 0.1, 15]),
            "WANDB__FILE_STREAM_TRANSMIT_INTERVAL": chance.choice(sent),
        }
        arguments = (*RUN, f"wandb={mode}")
        training = self.trainings.start(
            folder, *arguments, fault=fault, **self.variables, **intervals
        )
        code = training.wait()
        assert "W&B: " not in training.err
        return code

    def sync(self, folder: Path, kill: bool = False) -> None:
        """Uploads an offline run. kill: the upload is killed at its first file."""
        records = sorted(map(str, (folder / "runs" / "run" / "wandb").glob("offline-run-*")))
        command = [sys.executable, "-m", "wandb", "sync", *records]
        variables = environment(HOME=folder, **self.variables)
        with subprocess.Popen(
            command, cwd=folder, env=variables, stderr=subprocess.PIPE
        ) as process:
            if kill:
                assert self.server.dropped.wait(TIMEOUT)
                process.kill()
            _, err = process.communicate(timeout=TIMEOUT)
        assert b"ERROR" not in err, err.decode()


@pytest.fixture(scope="module")
def wandb(tmp_path_factory):
    with WandbServer() as server, ForkServer(tmp_path_factory.mktemp("home")) as trainings:
        yield Wandb(server, trainings)


def check_uploaded(run: Path, server: WandbServer) -> tuple[int, int]:
    """Checks that each row and each picture of a run directory is on the server. Returns the number
    of pictures and of rows."""
    checkpoint = run / "checkpoints" / "last" / "state.json"
    name = json.loads(checkpoint.read_text())["wandb_id"]
    uploaded = {
        path: each for path, each in server.files[name].items() if path.startswith("media/")
    }
    on_server = [row for _, row in sorted(server.history[name].items())]
    on_disk = rows(run)
    assert [row["_step"] for row in on_server] == [row["step"] for row in on_disk]
    assert max(map(len, uploaded.values())) == 1  # no file has two contents
    pictures = set()
    for row, on_disk_row in zip(on_server, on_disk, strict=True):
        for key, value in on_disk_row.items():
            if not str(value).endswith(FILES):
                assert key in NOT_COMPARED or row[key] == value
            elif "timelapse" not in key or row["_step"] == STEPS:  # written again at later steps
                path = row[key]["path"]
                assert f"_{row['_step']}_" in path
                (content,) = uploaded[path]
                assert content == (run / value).read_bytes()
                pictures.add(run / value)
    # The grid of all heads is not uploaded; its variant for a panel is.
    grids = {Path(str(path).replace("_panel.png", ".png")) for path in pictures}
    assert pictures | grids == {
        path for path in (run / "attention").iterdir() if path.suffix in FILES
    }
    return len(pictures), len(on_disk)


@pytest.mark.parametrize("number", range(campaign("CAMPAIGN_PICTURES", 2, 50)))
def test_every_picture_arrives(wandb, tmp_path, number):
    chance, mode, server = random.Random(number), ("offline", "online")[number % 2], wandb.server
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    kills, interrupted = (1, 1, 1, 1, 1, 2, 3)[number % 7], chance.random() < 0.5
    for kill in range(kills):
        server.dropping = interrupted
        place = (STEP, chance.randrange(1, STEPS // kills), chance.choice(WHEN))
        if number % 4 > 1 and kill == kills - 1:
            place = ("clearhead.run.run.Run.finish", 1, "after")  # after the last checkpoint
        fault = interrupt(("SIGKILL", *place))
        assert wandb.train(tmp_path, mode, chance, fault) == -signal.SIGKILL
    server.dropping = False
    assert wandb.train(tmp_path, mode, chance, None) == 0
    if mode == "offline" and interrupted:
        server.dropped.clear()
        server.dropping = True
        wandb.sync(tmp_path, kill=True)
        server.dropping = False
    if mode == "offline":
        wandb.sync(tmp_path)
    pictures, steps = check_uploaded(tmp_path / "runs" / "run", server)
    tally(f"W&B: kills of {mode} runs", kills)
    tally("W&B: pictures that arrive", pictures)
    tally("W&B: rows that arrive", steps)
