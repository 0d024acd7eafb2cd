"""Serves the runs of a folder, and a model, to browsers on this machine.

    with LiveServer(Path("runs"), port=8000) as server:
        server.serve_forever()

These addresses exist; a name is one of a run, and never a path:

    /              the list of runs; /runs.json: its content
    /run/NAME/     the page of a run; state.json, training.json, data.json, frame/STEP.json: its
                   content, see output/live.py and headlens/live_snapshots.py; head.png: a picture;
                   read, parts (POST): what a checkpoint does on a text, see
                   output/live_typing.py
    /model/        the page of a model without a run; state.json, data.json, read, parts (POST)

The server writes nothing. It answers requests for a name of this machine only: a web page from
elsewhere can resolve its own name to 127.0.0.1 (DNS rebinding). Each answer to GET has an ETag, so
that an answer that has not changed is not sent again.
"""

import hashlib
import json
import os
import re
import secrets
import socketserver
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

import torch

from clearhead.errors import sanitize
from clearhead.output.live import LiveModel, LiveRun, LiveRuns
from clearhead.output.live_typing import REQUESTS, Cancelled, Refused, Typing, checked_length
from headlens import live_page

IDLE = 60  # seconds after which a connection without requests is closed
# Any port: a tunnel (ssh -L 9000:localhost:8000) may have another one.
HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.ASCII | re.IGNORECASE)
SAFETY = {
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}
STEP = re.compile(r"(\d{1,12})\.json", re.ASCII)


class Answer(NamedTuple):
    body: bytes
    kind: str = "application/json; charset=utf-8"
    policy: str = "default-src 'none'"  # Content-Security-Policy


class LiveServer(ThreadingHTTPServer):
    """Serves runs and a model on 127.0.0.1, at this port or, if it is in use, at a free one."""

    daemon_threads = True
    allow_reuse_address = os.name != "nt"  # Windows would share a port that is in use

    def __init__(self, folder: Path, port: int, model: LiveModel | None = None):
        self.runs, self.model = LiveRuns(folder), model
        self.threads = torch.get_num_threads()  # a training needs the cores more
        self.lock, self.typing, self.token = threading.Lock(), Typing(), secrets.token_urlsafe()
        try:
            super().__init__(("127.0.0.1", port), Handler)
        except OSError:
            super().__init__(("127.0.0.1", 0), Handler)

    def find(self, target: str) -> tuple[LiveRun | LiveModel | None, list[str]]:
        """Returns the run or model that a request target names, and the parts of the path below
        it; for another target None and all parts. Raises FileNotFoundError for an unknown run."""
        # Decoded after the split: a name with an encoded slash is not the name of a run.
        encoded = target.partition("?")[0].split("/")
        match parts := [os.fsdecode(unquote_to_bytes(part)) for part in encoded]:
            case ["", "run", name, *rest] if rest and (run := self.runs.find(name)):
                return run, rest
            case ["", "model", *rest] if rest and self.model:
                return self.model, rest
            case ["", "run", *_]:
                raise FileNotFoundError("no such page or run")
        return None, parts

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"

    def server_bind(self) -> None:
        # HTTPServer.server_bind also resolves the host name.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]

    def handle_error(self, request: object, client_address: object) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):  # the browser has closed the connection
            print(f"{type(error).__name__}: {error}", file=sys.stderr)


class Handler(BaseHTTPRequestHandler):
    server: LiveServer
    protocol_version = "HTTP/1.1"
    timeout = IDLE

    def do_GET(self) -> None:
        answer = self.answer(self.found)
        if answer is None:
            return
        etag = f'"{hashlib.sha256(answer.body).hexdigest()[:32]}"'
        headers = {"ETag": etag, "Cache-Control": "no-cache"}
        if self.headers.get("If-None-Match") == etag:
            self.send(HTTPStatus.NOT_MODIFIED, headers | policy(answer))
        else:
            headers |= policy(answer) | {"Content-Type": answer.kind}
            self.send(HTTPStatus.OK, headers, answer.body)

    def do_POST(self) -> None:
        if answer := self.answer(self.computed):
            headers = {"Cache-Control": "no-store", "Content-Type": answer.kind}
            self.send(HTTPStatus.OK, headers | policy(answer), answer.body)

    def answer(self, answer_to: Callable[[], Answer]) -> Answer | None:
        """Returns answer_to(). After an error, sends one line, returns None."""
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or not HOST.fullmatch(hosts[0].strip()):
            reason = "use http://127.0.0.1 or http://localhost"
            return self.send_error(HTTPStatus.FORBIDDEN, reason)
        try:
            return answer_to()
        except Refused as error:
            return self.send_error(error.status, str(error))
        except Cancelled:
            self.close_connection = True
        except FileNotFoundError as error:
            return self.send_error(HTTPStatus.NOT_FOUND, str(error))
        except (OSError, ValueError) as error:  # another process has just replaced a file
            return self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, str(error))

    def found(self) -> Answer:
        """Returns what is at the path of the request."""
        with self.server.lock:  # the files are read by one thread at a time
            run, parts = self.server.find(self.path)
            match run:
                case LiveRun():
                    return answer_of_run(run, self.server.token, *parts)
                case LiveModel():
                    return answer_of_model(run, self.server.token, *parts)
            return answer_of_list(self.server.runs, *parts)

    def computed(self) -> Answer:
        """Returns what a checkpoint does on the text in the body of the request."""
        length = checked_length(self.headers, self.server.token)
        with self.server.lock:
            run, parts = self.server.find(self.path)
            threads = 1 if self.server.runs.are_running() else self.server.threads
        if run is None or len(parts) != 1 or parts[0] not in REQUESTS:
            raise FileNotFoundError("no such page")
        body = self.rfile.read(length)
        return Answer(*self.server.typing.answer(run, parts[0], body, self.connection, threads))

    def send(self, status: int, headers: dict[str, str], body: bytes | None = None) -> None:
        self.send_response_only(status)
        if body is not None:
            headers["Content-Length"] = str(len(body))
        for name, value in (headers | SAFETY).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body or b"")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Sends one line of text. Also called by the base class, for a request that is not HTTP."""
        text = " ".join((message or HTTPStatus(code).phrase).split())
        body = f"{text[:300]}\n".encode("utf-8", "backslashreplace")
        self.close_connection = True
        headers = {"Content-Type": "text/plain; charset=utf-8", "Connection": "close"}
        self.send(code, headers, body)

    def log_message(self, *_: object) -> None:
        """Prints nothing for a request."""


def policy(answer: Answer) -> dict[str, str]:
    return {"Content-Security-Policy": f"{answer.policy}; frame-ancestors 'self'"}


def answer_of_list(runs: LiveRuns, *parts: str) -> Answer:
    """Returns the answer to a path that is not of a run. Raises FileNotFoundError."""
    match parts:
        case ["", ""]:
            return as_page("runs", ["runs"])
        case ["", "runs.json"]:
            return Answer(json.dumps(runs.rows()).encode())
    raise FileNotFoundError("no such page or run")


def answer_of_run(run: LiveRun, token: str, *parts: str) -> Answer:
    """Returns the answer to a path below /run/NAME/. Raises FileNotFoundError."""
    match parts:
        case [""]:
            heads = ["heads"] * (run.has_snapshots or run.settings.get("lens.every") != 0)
            tabs = ["runs", *heads, "training", "settings"]
            return as_page(sanitize(run.folder.name), tabs, token)
        case ["state.json"]:
            return Answer(json.dumps(run.state()).encode())
        case ["training.json"]:
            return Answer(run.training)
        case ["data.json"] if run.has_snapshots:
            return Answer(run.snapshots.data())
        case ["frame", name] if run.has_snapshots and (found := STEP.fullmatch(name)):
            return Answer(run.snapshots.frame(int(found[1])))
        case ["head.png"] if run.has_snapshots:
            return Answer(run.snapshots.picture(), "image/png")
    raise FileNotFoundError("no such page")


def answer_of_model(model: LiveModel, token: str, *parts: str) -> Answer:
    """Returns the answer to a path below /model/. Raises FileNotFoundError."""
    match parts:
        case [""]:
            return as_page(sanitize(model.name), ["heads"], token)
        case ["state.json"]:
            return Answer(json.dumps(model.state()).encode())
        case ["data.json"]:
            return Answer(model.data)
    raise FileNotFoundError("no such page")


def as_page(title: str, tabs: list[str], token: str = "") -> Answer:
    """Returns the page, which asks this server for its content and contains its own policy."""
    page = live_page(title, tabs, token).encode("utf-8", "replace")
    return Answer(page, "text/html; charset=utf-8", "base-uri 'none'")
