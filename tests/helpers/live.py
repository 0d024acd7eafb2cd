"""A server of runs, and a run directory that grows step by step as that of a training does."""

import contextlib
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

from clearhead.output.live import LiveModel
from clearhead.output.live_server import LiveServer
from helpers import REPOSITORY, TIMEOUT

LOGS = ("metrics.jsonl", "attention/statistics.jsonl")
# A run with a snapshot at each of five steps.
RUN = ("lens=default", "lens.every=1", "lens.prompts=[the fox,a dog]", "lens.repeat_length=3")


@contextlib.contextmanager
def serving(folder: Path, port: int = 8123, model: LiveModel | None = None) -> Iterator[LiveServer]:
    """Serves the runs of a folder and a model, at this port or a free one."""
    with LiveServer(folder, port, model) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def live_command(folder: Path, port: int, *more: str) -> Iterator[str]:
    """Runs scripts.view until the end of the context. Yields its address. Unlike `serving`, its
    connections end with it. more: settings."""
    command = [sys.executable, "-m", "scripts.view", f"runs_dir={folder}", f"port={port}", *more]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as started:
        try:
            found = (re.search(r"http://\S+/", line) for line in started.stdout)
            yield next(filter(None, found))[0]
        finally:
            started.terminate()
            started.wait(TIMEOUT)


def get(server: LiveServer, path: str, **headers: str) -> tuple[int, Message, bytes]:
    """Returns (status, headers, content) of a request."""
    return ask(server, "GET", path, None, headers)


def ask(
    server: LiveServer, method: str, path: str, body: bytes | None, headers: dict[str, str]
) -> tuple[int, Message, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=TIMEOUT)
    with contextlib.closing(connection):
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()


class GrowingRun:
    """A copy of a finished run without its steps, which `add` writes as a training does."""

    def __init__(self, finished: Path, folder: Path):
        self.finished, self.folder = finished, folder
        (folder / "attention").mkdir(parents=True)
        for name in ("run.json", "config.yaml", "starts.jsonl"):
            shutil.copy(finished / name, folder / name)

    def add(self, *steps: int) -> None:
        """Writes the snapshots and the rows of these steps."""
        for step in steps:
            for name in LOGS:
                rows = (self.finished / name).read_text().splitlines(keepends=True)
                with open(self.folder / name, "a") as log:
                    log.writelines(row for row in rows if json.loads(row)["step"] == step)
            name = f"attention/step_{step:08d}.npz"
            shutil.copyfile(self.finished / name, self.folder / "part")
            os.replace(self.folder / "part", self.folder / name)

    def remove_from(self, step: int) -> None:
        """Removes this step and later ones, as a run that is resumed."""
        for name in LOGS:
            rows = (self.folder / name).read_text().splitlines(keepends=True)
            (self.folder / "part").write_text(
                "".join(row for row in rows if json.loads(row)["step"] < step)
            )
            os.replace(self.folder / "part", self.folder / name)
        for path in (self.folder / "attention").glob("step_*.npz"):
            if int(path.stem[5:]) >= step:
                path.unlink()
