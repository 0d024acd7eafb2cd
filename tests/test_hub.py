"""training/hub.py against a server of this machine that answers as the hub does.

In processes of their own: huggingface_hub reads its environment once. No other network.
"""

import http.server
import json
import os
import subprocess
import sys
import threading

import pytest
import torch
from conftest import REPOSITORY

from model import GPT, ModelConfig
from training import hub
from training.checkpoint import CheckpointError
from training.hf import hf_tensors, to_hf

SHA = "0123456789abcdef0123456789abcdef01234567"
# Prints for each argument what load_reader makes of it; --twice: asks a second time first.
LOAD = """
import json, sys
from training.checkpoint import CheckpointError
from training.hf import load_reader
for name in sys.argv[1:]:
    try:
        reader = load_reader(name, "trainer.init_from")
        again = load_reader(name).model.state_dict()
        same = all(bool((again[k] == v).all()) for k, v in reader.model.state_dict().items())
        print(json.dumps([reader.tokenizer_name, reader.window, same]))
    except CheckpointError as error:
        print(json.dumps(str(error)))
"""


class Hub(http.server.ThreadingHTTPServer):
    """models: name -> folder, "gated" or a status. asked: (method, path) of each request."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.models, self.asked = {}, []


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append((self.command, self.path))
        path = self.path.partition("?")[0].removeprefix("/api/models/").strip("/")
        name = next((n for n in self.server.models if path.startswith(f"{n}/")), None)
        if name is None:
            return self.say(404, {"error": "none"}, {"X-Error-Code": "RepoNotFound"})
        folder, rest = self.server.models[name], path.removeprefix(f"{name}/")
        if folder == "gated":
            return self.say(403, {"error": "ask"}, {"X-Error-Code": "GatedRepo"})
        if folder == 401:
            return self.say(401, {"error": "who are you"}, {"X-Error-Code": "Other"})
        if rest.startswith("revision/"):
            siblings = [{"rfilename": file.name} for file in folder.iterdir()]
            return self.say(200, {"id": name, "sha": SHA, "siblings": siblings})
        if rest.startswith("tree/"):
            files = [(file.name, file.stat().st_size) for file in folder.iterdir()]
            rows = [{"type": "file", "path": f, "size": s, "oid": f"{f}-1"} for f, s in files]
            return self.say(200, rows)
        file = folder / rest.rpartition("/")[2]
        return self.say(200, file.read_bytes(), {"ETag": f'"{file.name}-1"'})

    do_HEAD = do_GET

    def say(self, status, body, headers=()):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for key, value in dict(headers).items():
            self.send_header(key, value)
        self.send_header("X-Repo-Commit", SHA)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with Hub() as started:
        thread = threading.Thread(target=started.serve_forever, daemon=True)
        thread.start()
        yield started
        started.shutdown()
        thread.join()


def load(folder, *names, **environment):
    """What a new process says of each name, and what it writes to stderr."""
    path = os.pathsep.join([str(REPOSITORY / "tests" / "no_network"), str(REPOSITORY)])
    given = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": path}
    given |= {"HF_HOME": str(folder / "hf"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *names],
        env=given | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_a_model_of_the_hub(server, tmp_path):
    """What is fetched of it, what is said where that fails, and that it is there offline."""
    torch.manual_seed(0)
    model = GPT(ModelConfig(257, 16, 8, 2, 1))
    to_hf(model, tmp_path / "safe")
    to_hf(model, tmp_path / "old")
    (tmp_path / "safe" / "pytorch_model.bin").write_bytes(b"not to be fetched")
    (tmp_path / "safe" / "flax_model.msgpack").write_bytes(b"nor this")
    (tmp_path / "old" / "model.safetensors").unlink()
    weights = hf_tensors(model)
    torch.save(weights, tmp_path / "old" / "pytorch_model.bin")
    server.models = {"some/model": tmp_path / "safe", "old": tmp_path / "old"}
    server.models |= {"my/gated": "gated", "my/closed": 401}
    address = f"http://127.0.0.1:{server.server_port}"

    names = ["hub:some/model", "hub:old", "hub:no/such", "hub:my/gated", "hub:my/closed"]
    (safe, old, *refused), err = load(tmp_path, *names, HF_ENDPOINT=address)
    assert safe == old == ["byte", 16, True]
    assert err == ""
    for name, message, says in zip(
        names[2:],
        refused,
        [
            "no such model on the hub, or a private one; check the name",
            "is gated: its owner has to let you in; ask for access",
            "the hub answers with 401; ",
        ],
        strict=True,
    ):
        assert message.startswith(f"trainer.init_from={name}: {says}")
        assert len(message.splitlines()) == 1
    asked = [path for _, path in server.asked]
    assert sum("some/model/revision" in path for path in asked) == 1  # once for both readings
    fetched = {path.rpartition("/")[2] for method, path in server.asked if method == "GET"}
    assert {"config.json", "model.safetensors", "pytorch_model.bin"} <= fetched
    assert not any("some/model" in p and p.endswith((".bin", ".msgpack")) for p in asked)

    server.asked.clear()
    names = ["hub:some/model", "hub:old", "hub:new/one"]
    found, err = load(tmp_path, *names, HF_ENDPOINT=address, HF_HUB_OFFLINE="1")
    assert found[:2] == [["byte", 16, True]] * 2
    says = "the hub is not reached (HF_HUB_OFFLINE is set), and it is not in the cache; fetch"
    assert found[2].startswith(f"trainer.init_from=hub:new/one: {says}")
    assert server.asked == []
    assert err == ""


@pytest.mark.parametrize("name", ["", "a/b/c", "../x", "a/..", "a b", "http://x/y", "a/", "é"])
def test_what_is_no_name(name):
    with pytest.raises(CheckpointError, match="is no name of a model; such as hub:") as caught:
        hub.fetch(f"hub:{name}", "trainer.init_from")
    assert str(caught.value).startswith(f"trainer.init_from=hub:{name}: ")


def test_without_the_library_the_command_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match="needs huggingface_hub; pip install hugg"):
        hub.fetch("hub:not/cached")
