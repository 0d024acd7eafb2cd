"""training/hub.py against a server of this machine that answers as the hub does. No other network.

huggingface_hub reads its environment once, when it is imported: what it has read is replaced.
"""

import http.server
import json
import sys
import threading

import pytest
import torch
from huggingface_hub import constants

from errors import CheckpointError
from model import GPT, ModelConfig
from training import hub
from training.hf import hf_tensors, load_reader, to_hf

SHA = "0123456789abcdef0123456789abcdef01234567"


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
        if isinstance(folder, int):
            return self.say(folder, {"error": "something"}, {"X-Error-Code": "Other"})
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
        thread = threading.Thread(target=started.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield started
        started.shutdown()
        thread.join()


@pytest.fixture
def new_process(server, tmp_path, monkeypatch):
    """new_process(offline=False): what a new process knows of the hub, and of what it fetched."""

    def begin(offline=False):
        address = f"http://127.0.0.1:{server.server_port}"
        template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        hub._fetched.cache_clear()
        server.asked.clear()

    yield begin
    hub._fetched.cache_clear()


@pytest.fixture
def model(server, tmp_path):
    """A model that the hub has twice: some/model with safetensors and more, old with an old file
    alone."""
    torch.manual_seed(0)
    model = GPT(ModelConfig(257, 16, 8, 2, 1))
    to_hf(model, tmp_path / "safe")
    to_hf(model, tmp_path / "old")
    (tmp_path / "safe" / "pytorch_model.bin").write_bytes(b"not to be fetched")
    (tmp_path / "safe" / "flax_model.msgpack").write_bytes(b"nor this")
    (tmp_path / "old" / "model.safetensors").unlink()
    torch.save(hf_tensors(model), tmp_path / "old" / "pytorch_model.bin")
    server.models = {"some/model": tmp_path / "safe", "old": tmp_path / "old"}
    return model


def check_is(model, name):
    reader = load_reader(name)
    assert (reader.tokenizer_name, reader.window) == ("byte", 16)
    theirs = reader.model.state_dict()
    assert all(torch.equal(theirs[key], value) for key, value in model.state_dict().items())


def check_refused(name, says):
    with pytest.raises(CheckpointError) as caught:
        load_reader(name, "trainer.init_from")
    message = str(caught.value)
    assert message.startswith(f"trainer.init_from={name}: {says}")
    assert "; " in message
    assert len(message.splitlines()) == 1


def test_a_model_is_fetched_once(server, model, new_process, capfd):
    new_process()
    check_is(model, "hub:some/model")
    asked = [path for _, path in server.asked]
    fetched = {path.rpartition("/")[2] for path in asked if "/resolve/" in path}
    assert fetched == {"config.json", "model.safetensors"}
    check_is(model, "hub:some/model")
    assert len(server.asked) == len(asked)
    new_process()
    check_is(model, "hub:some/model")
    assert not any("/resolve/" in path for _, path in server.asked)  # it is in the cache
    assert capfd.readouterr().err == ""


def test_an_old_file_is_fetched_where_there_is_no_other(server, model, new_process):
    new_process()
    check_is(model, "hub:old")
    fetched = {path.rpartition("/")[2] for _, path in server.asked if "/resolve/" in path}
    assert fetched == {"config.json", "pytorch_model.bin"}


def test_what_is_of_no_use_is_not_fetched(server, model, new_process):
    """Of another kind of model nothing but the few lines that say so."""
    config = server.models["some/model"] / "config.json"
    config.write_text(config.read_text().replace('"gpt2"', '"bert"'))
    new_process()
    with pytest.raises(CheckpointError, match=r"model_type is 'bert', and our model computes"):
        load_reader("hub:some/model")
    fetched = {path.rpartition("/")[2] for _, path in server.asked if "/resolve/" in path}
    assert fetched == {"config.json"}


def test_offline_there_is_what_was_fetched_before(server, model, new_process, capfd):
    new_process()
    for name in ("hub:some/model", "hub:old"):
        check_is(model, name)
    new_process(offline=True)
    for name in ("hub:some/model", "hub:old"):
        check_is(model, name)
    says = "the hub is not reached (HF_HUB_OFFLINE is set), and it is not in the cache; fetch it"
    check_refused("hub:new/one", says)
    assert server.asked == []
    assert capfd.readouterr().err == ""


def test_why_a_model_cannot_be_had(server, new_process, monkeypatch):
    server.models = {"my/gated": "gated", "my/closed": 401, "my/broken": 400}
    new_process()
    check_refused("hub:no/such", "no such model on the hub, or a private one; check the name")
    check_refused("hub:my/gated", "is gated: its owner has to let you in; ask for access")
    check_refused("hub:my/closed", "the hub answers with 401; set HF_TOKEN")
    check_refused("hub:my/broken", "the hub is not reached (no useful answer), and it is not in")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody answers
    check_refused(
        "hub:some/model", "the hub is not reached (no useful answer), and it is not in the"
    )


@pytest.mark.parametrize("name", ["", "a/b/c", "../x", "a/..", "a b", "http://x/y", "a/", "é"])
def test_what_is_no_name(name):
    with pytest.raises(CheckpointError, match="is no name of a model; such as hub:") as caught:
        hub.fetch(f"hub:{name}", "trainer.init_from")
    assert str(caught.value).startswith(f"trainer.init_from=hub:{name}: ")


def test_without_the_library_the_command_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match="needs huggingface_hub; pip install hugg"):
        hub.fetch("hub:not/cached")
