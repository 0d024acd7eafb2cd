"""A local W&B server that supports an online run until it fails with a given fault.

with WandbServer(fault="hangs", after="upsertBucket") as server:
    ... WANDB_BASE_URL=server.url ...
"""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote, unquote

from clearhead.output import wandb_process
from helpers import TIMEOUT

STATUS = {"500": 500, "429": 429, "403": 403, "404": 404}
# Connections are refused, get no response or are reset; the response is a status code, or no JSON.
FAULTS = ("closed", "hangs", "resets", *STATUS, "garbage")

ARTIFACT = {"__typename": "Artifact", "id": "a", "state": "COMMITTED", "digest": "d", "size": 1}
ARTIFACT |= {"artifactType": {"name": "model"}, "tags": [], "fileCount": 1, "createdAt": "now"}
ARTIFACT |= {"ttlDurationSeconds": 0, "ttlIsInherited": False}
ARTIFACT["artifactSequence"] = {"name": "m", "project": None}
ARTIFACT |= dict.fromkeys(("versionIndex", "description", "metadata", "historyStep"))
ARTIFACT |= dict.fromkeys(("commitHash", "updatedAt"))


def wait_long_for_wandb() -> None:
    """Raises the time limits of calls of W&B, which a slow machine would reach without a fault."""
    for name in ("START_SECONDS", "CALL_SECONDS", "FINISH_SECONDS"):
        setattr(wandb_process, name, TIMEOUT)


class WandbServer:
    """Fails with `fault` after a request that contains `after`; "": from the start."""

    def __init__(self, fault: str = "", after: str = ""):
        self.fault, self.after = fault, after
        self.failing = bool(fault) and not after
        self.requests: list[tuple[str, bytes]] = []  # path and body of each request
        self.history: dict[str, dict[int, dict]] = {}  # by run: the rows, by line number
        self.files: dict[str, dict[str, set[bytes]]] = {}  # by run and name: uploaded contents
        self.dropping = False  # whether uploads of files and rows are interrupted
        self.dropped = threading.Event()  # after the first one
        self.ended = threading.Event()
        self.thread: threading.Thread | None = None
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # clients may disconnect at any time
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        if self.failing and fault == "closed":
            self.server.socket.close()
        else:
            self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
            self.thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.ended.set()
        if self.thread:
            self.server.shutdown()
            self.thread.join()
        self.server.server_close()

    def rows(self) -> list[dict]:
        """The rows of history of all runs."""
        return [row for lines in self.history.values() for _, row in sorted(lines.items())]

    def store(self, path: str, body: bytes) -> None:
        """Stores rows, at their line numbers, and files of runs."""
        if path.endswith("/file_stream"):
            history = json.loads(body).get("files", {}).get("wandb-history.jsonl", {})
            lines = self.history.setdefault(path.split("/")[-2], {})
            for number, line in enumerate(history.get("content", []), history.get("offset", 0)):
                lines[number] = json.loads(line)
        elif path.startswith("/store/runs/"):
            run, name = unquote(path.removeprefix("/store/runs/")).split("/", 1)
            self.files.setdefault(run, {}).setdefault(name, set()).add(body)

    def resume_status(self, run: str) -> dict | None:
        """What a client needs to resume a run; None if the run does not exist."""
        if run not in self.history:
            return None
        rows = [row for _, row in sorted(self.history[run].items())]
        last = {key: rows[-1][key] for key in ("_step", "_runtime")} if rows else {}
        found = {"id": "b", "name": run, "historyLineCount": len(rows), "tags": []}
        found |= {"summaryMetrics": json.dumps(last), "historyTail": json.dumps([json.dumps(last)])}
        found |= {"wandbConfig": '{"t": 1}', "config": "{}", "eventsTail": "[]"}
        return found | {"eventsLineCount": 0, "logLineCount": 0}

    def answer(self, path: str, body: bytes) -> dict:
        """What a healthy server says, where a run depends on it."""
        self.store(path, body)
        if path != "/graphql":
            return {}
        asked = json.loads(body)
        given, query, data = asked.get("variables") or {}, asked["query"], {}
        if "upsertBucket" in query:
            project = {"id": "p", "name": "clearhead", "entity": {"id": "e", "name": "me"}}
            bucket = {"id": "b", "name": given["name"], "config": "{}", "project": project}
            data = {"upsertBucket": {"bucket": bucket, "inserted": True}}
        elif "createRunFiles" in query:
            place = f"{self.url}/store/runs/{given['run']}"
            files = [{"name": x, "uploadUrl": f"{place}/{quote(x)}"} for x in given["files"]]
            data = {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        elif "query RunResumeStatus" in query:
            data = {
                "model": {
                    "id": "p",
                    "name": "clearhead",
                    "bucket": self.resume_status(given["name"]),
                }
            }
        elif "viewer {" in query:
            data = {"viewer": {"id": "u", "entity": "me", "flags": "{}", "teams": {"edges": []}}}
        elif "query ArtifactType" in query:
            data = {"project": None}
        elif "createArtifact(" in query:
            made = {"id": "a", "state": "PENDING", "artifactSequence": {"latestArtifact": None}}
            data = {"createArtifact": {"artifact": made}}
        elif "createArtifactManifest(" in query:
            file = {"id": "f", "uploadUrl": f"{self.url}/store/manifest", "uploadHeaders": []}
            data = {"createArtifactManifest": {"artifactManifest": {"id": "m", "file": file}}}
        elif "createArtifactFiles(" in query:
            names = [file["name"] for file in given["input"]["artifactFiles"]]
            edges = [{"node": self.place(name)} for name in names]
            data = {"createArtifactFiles": {"files": {"edges": edges}}}
        elif "commitArtifact(" in query:
            data = {"commitArtifact": {"artifact": {"id": "a", "digest": "d"}}}
        elif "query ArtifactByID" in query:
            data = {"artifact": ARTIFACT}
        return {"data": data}

    def place(self, name: str) -> dict:
        address = {"uploadUrl": f"{self.url}/store/{name}", "uploadHeaders": []}
        return address | {"storagePath": name, "uploadMultipartUrls": None, "artifact": {"id": "a"}}

    def asked(self, part: str) -> list[dict]:
        """Returns the variables of each GraphQL request that contains this text."""
        bodies = [json.loads(body) for path, body in list(self.requests) if path == "/graphql"]
        return [body.get("variables") or {} for body in bodies if part in body["query"]]

    def handler(outer) -> type:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_) -> None: ...

            def handle_request(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                if len(body := self.rfile.read(length)) < length:
                    return  # the client was killed
                if outer.failing:
                    return self.fail()
                # No row may arrive: W&B would give those of the next upload other steps.
                is_file = self.path.startswith("/store/runs/")
                if outer.dropping and (is_file or self.path.endswith("/file_stream")):
                    if is_file:
                        outer.dropped.set()
                    self.close_connection = True
                    return
                outer.requests.append((self.path, body))
                self.send(200, json.dumps(outer.answer(self.path, body)).encode())
                if outer.fault and outer.after.encode() in self.path.encode() + body:
                    outer.failing = True
                    self.close_connection = True
                    if outer.fault == "closed":
                        outer.server.shutdown()
                        outer.server.socket.close()

            do_GET = do_POST = do_PUT = handle_request

            def fail(self) -> None:
                self.close_connection = True
                if outer.fault == "hangs":
                    outer.ended.wait()
                elif outer.fault in ("resets", "closed"):
                    self.connection.shutdown(socket.SHUT_RDWR)
                else:
                    self.send(STATUS.get(outer.fault, 200), b"<html>\xff\x00{{{")

            def send(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        return Handler
