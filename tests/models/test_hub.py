"""hub:NAME (models/pretrained.py) against a server of this machine that answers as the hub does.
No other network.

huggingface_hub reads its environment once, when it is imported: what it has read is replaced.
"""

import http.server
import json
import threading

import pytest
from helpers.models import tiny_model
from helpers.ranks import free_port
from helpers.refusals import refused
from helpers.runs import assert_same
from huggingface_hub import constants

from clearhead.errors import CheckpointError
from clearhead.models.foreign import series
from clearhead.models.huggingface import to_hf
from clearhead.models.pretrained import load_pretrained

SHA = "0123456789abcdef0123456789abcdef01234567"


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.path)
        path = self.path.partition("?")[0].removeprefix("/api/models/").strip("/")
        name = next((n for n in self.server.models if path.startswith(f"{n}/")), None)
        if name is None:
            return self.say(404, {}, {"X-Error-Code": "RepoNotFound"})
        folder, rest = self.server.models[name], path.removeprefix(f"{name}/")
        if folder == "gated":
            return self.say(403, {}, {"X-Error-Code": "GatedRepo"})
        if rest == "refs":
            refs = {kind: [] for kind in ("branches", "tags", "converts")}
            for kind, ref in self.server.refs:
                path = "heads" if kind == "branches" else kind
                about = {"name": ref, "ref": f"refs/{path}/{ref}", "targetCommit": SHA}
                refs[kind].append(about)
            return self.say(200, refs)
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
        more = {"X-Repo-Commit": SHA, "Content-Length": str(len(content))}
        for key, value in (dict(headers) | more).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as started:
        started.models = {}  # name -> folder or "gated"
        started.asked = []  # the path of each request
        started.refs = []  # branches and tags of each model
        threading.Thread(target=started.serve_forever, args=(0.01,), daemon=True).start()
        yield started
        started.shutdown()


@pytest.fixture
def new_process(server, tmp_path, monkeypatch):
    """new_process(offline=False): forgets the state of huggingface_hub, as in a new process."""

    def begin(offline=False):
        address = f"http://127.0.0.1:{server.server_port}"
        template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        server.asked.clear()

    return begin


@pytest.fixture
def model(server, tmp_path):
    """A model on the hub, some/model, with safetensors and other files."""
    model = tiny_model(vocab_size=257, context_length=16)
    to_hf(model, tmp_path / "safe")
    (tmp_path / "safe" / "pytorch_model.bin").write_bytes(b"not to be downloaded")
    server.models = {"some/model": tmp_path / "safe"}
    return model


def check_is(model, name):
    pretrained = load_pretrained(name)
    assert (pretrained.tokenizer.name, pretrained.window) == ("byte", 16)
    assert_same(pretrained.model.state_dict(), model.state_dict())


def downloaded(server):
    """Returns the names of the downloaded files."""
    return {path.rpartition("/")[2] for path in server.asked if "/resolve/" in path}


def error_of(name):
    with refused(CheckpointError, "trainer.init_from", name) as caught:
        load_pretrained(name, "trainer.init_from")
    return caught.value


def test_downloaded_once_and_cached(server, model, new_process):
    new_process()
    check_is(model, "hub:some/model")
    assert downloaded(server) == {"config.json", "model.safetensors"}
    new_process()
    check_is(model, "hub:some/model")
    assert downloaded(server) == set()  # it is in the cache
    new_process(offline=True)
    check_is(model, "hub:some/model")
    error_of("hub:new/one")
    assert server.asked == []


def test_a_revision(server, model, new_process):
    new_process()
    check_is(model, "hub:some/model@step512")
    assert downloaded(server) == {"config.json", "model.safetensors"}
    assert any(path.endswith("/revision/step512") for path in server.asked)
    assert not any("main" in path for path in server.asked)
    for name in ("hub:some/model@", "hub:some/model@../x", "hub:some/model@a b"):
        error_of(name)


def test_revisions_of_a_list_and_of_a_pattern(server, model, new_process):
    new_process()
    name = "hub:some/model"
    assert series(f"{name}@step512,step8") == [(8, f"{name}@step8"), (512, f"{name}@step512")]
    assert server.asked == []
    server.refs = [("branches", "main"), ("branches", "step16"), ("tags", "step4")]
    assert series(f"{name}@step*") == [(4, f"{name}@step4"), (16, f"{name}@step16")]
    for wrong in (f"{name}@other*", f"{name}@main", name, "hub:no/such@step*"):
        with refused(CheckpointError, "checkpoints"):
            series(wrong)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_another_tokenizer_or_kind_of_model_is_refused(server, model, new_process, kind):
    """Weights of another kind of model are not downloaded."""
    folder = server.models["some/model"]
    tokenizer, config = folder / "tokenizer.json", folder / "config.json"
    tokenizer.write_text(json.dumps({"model": {"type": "WordPiece"}}), encoding="utf-8")
    config.write_text(config.read_text().replace('"gpt2"', f'"{kind}"'))
    new_process()
    with refused(CheckpointError, "checkpoint") as caught:
        load_pretrained("hub:some/model")
    assert {"bert": "bert", "gpt2": "WordPiece"}[kind] in caught.value.reason
    if kind == "bert":
        assert downloaded(server) == {"config.json"}


def test_bad_names_and_answers_of_the_hub(server, new_process, monkeypatch):
    server.models = {"my/gated": "gated"}
    new_process()
    for name in ("", "a/b/c", "../x", "http://x/y"):
        error_of(f"hub:{name}")
    assert server.asked == []
    for name in ("no/such", "my/gated"):
        error_of(f"hub:{name}")
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    error_of("hub:some/model")
