"""Texts that a user types into a page of scripts/view.py: what the server computes and refuses."""

import json
import shutil
import socket
import struct
import threading

import numpy as np
import pytest
import torch
from helpers import TIMEOUT
from helpers.foreign import byte_level_tokenizer, foreign_model
from helpers.live import ask, get, serving
from helpers.refusals import printed_keys

from clearhead.checkpoint.run_directory import lock_directory
from clearhead.models.pretrained import load_pretrained
from clearhead.output import live_typing
from clearhead.output.live import LiveRuns
from clearhead.output.live_typing import Cancelled, Refused, Typing
from headlens import Reader, capture, read_snapshot, score_parts
from scripts.view import main, measured

TEXT = "Line 3: the quick fox"
READ = {"text": TEXT, "step": 4}
PARTS = {"ids": [76, 105, 110, 101], "step": 4, "layer": 1, "head": 0, "query": 3, "key": 1}


@pytest.fixture
def home(tmp_path, finished):
    """A folder with runs/first, which has checkpoints of steps 2 and 4."""
    shutil.copytree(finished, tmp_path / "runs" / "first", symlinks=True)
    return tmp_path


@pytest.fixture
def server(home):
    with serving(home / "runs") as started:
        yield started


def headers_of(server, **changes):
    """Returns the headers of a page. changes: None removes one."""
    address = f"127.0.0.1:{server.server_port}"
    usual = {"Host": address, "X-Clearhead-Token": server.token}
    usual["Content-Type"] = "application/json"
    named = {name.replace("_", "-"): value for name, value in changes.items()}
    return {name: value for name, value in (usual | named).items() if value is not None}


def post(server, path, content, **headers):
    """Returns (status, headers, body) of the answer to a request of a page."""
    body = json.dumps(content).encode()
    return ask(server, "POST", path, body, headers_of(server, **headers))


def read(server, content, path="/run/first/read"):
    """Returns (the reading, its codes, its norms)."""
    status, headers, body = post(server, path, content)
    assert (status, headers["Content-Type"]) == (200, "application/octet-stream")
    (length,) = struct.unpack("<I", body[:4])
    found, rest = json.loads(body[4 : 4 + length]), np.frombuffer(body[4 + length :], np.uint8)
    tokens = len(found["ids"])
    of_head = tokens * (tokens + 1) // 2
    heads = len(rest) // (of_head + tokens * found["has_norms"])
    assert len(rest) == heads * (of_head + tokens * found["has_norms"])
    return found, rest[: heads * of_head].reshape(heads, -1), rest[heads * of_head :]


def reader_of(home, step):
    trained = load_pretrained(home / "runs" / "first" / "checkpoints" / f"step_{step:08d}")
    (last,) = (home / "runs" / "first" / "attention").glob("step_00000004.npz")
    prompts = read_snapshot(last).token_ids
    return trained.model, Reader(trained.model, trained.tokenizer, prompts, trained.window)


@pytest.mark.parametrize("step", [2, 4])
@pytest.mark.parametrize("off", [[], [0, 3]])
def test_it_reads_a_text_as_the_checkpoint_does(home, server, step, off):
    found, codes, norms = read(server, {"text": TEXT, "step": step, "off": off})
    model, reader = reader_of(home, step)
    expected = reader.read(TEXT, off=off)
    assert (codes == expected.codes.reshape(4, -1)).all()
    assert (norms == expected.norms.ravel()).all()
    assert found.pop("has_norms")
    assert found.pop("step") == step
    assert found == {
        **{key: getattr(expected, key) for key in found.keys() - {"likely", "next"}},
        "likely": vars(expected.likely),
        "next": vars(expected.next),
    }
    if not off:
        ids = torch.tensor(found["ids"])
        logits = model(ids[None])[0][0]
        losses = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
        np.testing.assert_allclose(found["losses"], losses.detach(), atol=1e-4)
        best = logits[-1].argsort(descending=True)[:40].tolist()
        assert found["next"]["ids"][:5] == best[:5]
    assert (
        read(server, {"ids": found["ids"], "step": step, "off": off})[0]["losses"]
        == (found["losses"])
    )


def test_the_parts_of_a_score_are_those_of_the_checkpoint(home, server):
    status, headers, body = post(server, "/run/first/parts", PARTS)
    assert (status, headers["Content-Type"]) == (200, "application/json; charset=utf-8")
    found, model = json.loads(body), reader_of(home, 4)[0]
    expected = score_parts(model, *(PARTS[key] for key in ("ids", "layer", "head", "query", "key")))
    assert found["sources"] == expected.sources
    assert found["score"] == pytest.approx(expected.score)
    assert found["mean"] == pytest.approx(expected.mean)
    for pair, other in zip(found["pairs"], expected.largest(), strict=True):
        assert pair == pytest.approx(other)
    without = json.loads(post(server, "/run/first/parts", PARTS | {"off": [1]})[2])
    assert without["score"] != found["score"]


def test_the_state_of_a_run_names_its_checkpoints(home, server):
    def typing():
        return json.loads(get(server, "/run/first/state.json")[2])["typing"]

    assert typing() == {"steps": [2, 4], "limit": 32}
    checkpoints = home / "runs" / "first" / "checkpoints"
    (checkpoints / "step_00000004").rename(home / "step_00000004")
    assert typing() == {"steps": [2], "limit": 32}
    assert post(server, "/run/first/read", READ)[0] == 404
    (home / "step_00000004").rename(checkpoints / "step_00000004")  # the run continues
    assert typing() == {"steps": [2, 4], "limit": 32}
    assert read(server, READ)[0]["step"] == 4
    checkpoints.rename(home / "elsewhere")
    assert typing() is None
    checkpoints.symlink_to(home / "elsewhere")
    assert typing() is None


BODY, BIG = json.dumps(READ).encode(), b"[" * 60_000
PATHS = """/run/first/read/ /run/first%2fread /run/../first/read /run/read /read
/run/first/../first/read /run/first/read%00 /run/first%0d%0aSet-Cookie:%20a=b/read /run/first/
/run/second/read /run/%2e%2e/read /run/first/write /run/first/state.json /model/read /"""
# name: (expected status, changes of the headers of a page, body). {port} and {token} are those of
# the server.
HOSTILE = {
    "another host": (403, {"Host": "evil.example"}, BODY),
    "a name that resolves to this machine": (403, {"Host": "evil.example:{port}"}, BODY),
    "a host that ends in a line break": (403, {"Host": "127.0.0.1:{port}\r\n evil.example"}, BODY),
    "no host": (403, {"Host": None}, BODY),
    "a second host": (403, {"hOst": "localhost"}, BODY),
    "no token": (403, {"X-Clearhead-Token": None}, BODY),
    "an empty token": (403, {"X-Clearhead-Token": ""}, BODY),
    "a wrong token": (403, {"X-Clearhead-Token": "{token}a"}, BODY),
    "a token with other letters": (403, {"X-Clearhead-Token": "\xe9" * 43}, BODY),
    "a form": (415, {"Content-Type": "text/plain"}, BODY),
    "a form with JSON": (415, {"Content-Type": "text/plain; application/json"}, BODY),
    "a form with fields": (415, {"Content-Type": "application/x-www-form-urlencoded"}, BODY),
    "no type": (415, {"Content-Type": None}, BODY),
    "no length": (411, {"Content-Length": None}, BODY),
    "a huge length": (413, {"Content-Length": str(2**40)}, BODY),
    "a length with many digits": (411, {"Content-Length": "1" * 5000}, BODY),
    "a large length": (413, {"Content-Length": str(2**16 + 1)}, BODY),
    "a negative length": (411, {"Content-Length": "-1"}, BODY),
    "a length with a sign": (411, {"Content-Length": "+4"}, BODY),
    "a length in other digits": (411, {"Content-Length": "٣"}, BODY),
    "chunks": (411, {"Content-Length": None, "Transfer-Encoding": "chunked"}, BODY),
    "nothing": (400, {}, b""),
    "no JSON": (400, {}, b"text"),
    "no UTF-8": (400, {}, b'{"text": "\xff", "step": 4}'),
    "deep JSON": (400, {}, BIG),
    "closed deep JSON": (400, {}, b"[" * 200 + b"]" * 200),
    "a list": (400, {}, b"[]"),
    "a number with many digits": (400, {}, b'{"text": "a", "step": ' + b"9" * 9000 + b"}"),
    **{
        name: (400, {}, json.dumps(READ | changes).encode())
        for name, changes in {
            "no text": {"text": None},
            "text and ids": {"ids": [1]},
            "no token of text": {"text": ""},
            "a number as text": {"text": 1},
            "a text as step": {"step": "4\r\nSet-Cookie: a=b"},
            "a bool as step": {"step": True},
            "NaN as step": {"step": float("nan")},
            "infinity as step": {"step": float("inf")},
            "a fraction as step": {"step": 4.0},
            "a negative step": {"step": -1},
            "a head that the model does not have": {"off": [4]},
            "a negative head": {"off": [-1]},
            "a bool as head": {"off": [True]},
            "heads as a number": {"off": 1},
            "many heads": {"off": [0] * 10_001},
            "another key": {"path": "/etc/passwd"},
            "no ids": {"text": None, "ids": []},
            "an id that the model does not have": {"text": None, "ids": [257]},
            "a huge id": {"text": None, "ids": [2**63]},
            "a negative id": {"text": None, "ids": [-1]},
            "a bool as id": {"text": None, "ids": [True]},
            "a text as id": {"text": None, "ids": ["1"]},
            "a list as id": {"text": None, "ids": [[1]]},
            "more ids than the model has positions": {"text": None, "ids": [1] * 33},
            "many ids": {"text": None, "ids": [1] * 20_000},
        }.items()
    },
    "another step": (404, {}, json.dumps(READ | {"step": 3}).encode()),
    "a path as step": (400, {}, json.dumps(READ | {"step": "../../secret"}).encode()),
    **{
        f"parts with {name}": (400, {"path": "/run/first/parts"}, json.dumps(PARTS | of).encode())
        for name, of in {
            "another layer": {"layer": 2},
            "another head": {"head": 2},
            "a query after the text": {"query": 4},
            "a key after the query": {"key": 3, "query": 2},
            "a bool": {"layer": True},
            "a text": {"text": TEXT},
            "a negative key": {"key": -1},
        }.items()
    },
    **{f"path {path}": (404, {"path": path}, BODY) for path in PATHS.split()},
    **{
        f"{method} {path}": (
            501 if method != "GET" else 404,
            {"method": method, "path": path},
            BODY,
        )
        for method in ("OPTIONS", "PUT", "HEAD", "GET")
        for path in ("/run/first/read", "/run/first/parts")
    },
    "preflight": (
        501,
        {
            "method": "OPTIONS",
            "Origin": "http://evil.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "x-clearhead-token,content-type",
        },
        BODY,
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_request_is_refused_in_one_line(home, server, name):
    expected, changes, body = HOSTILE[name]
    request = {"method": "POST", "path": "/run/first/read", "Connection": "close"}
    request |= headers_of(server) | {"Content-Length": str(len(body))} | changes
    first = f"{request.pop('method')} {request.pop('path')} HTTP/1.1"
    lines = [
        f"{key}: {value.format(port=server.server_port, token=server.token)}"
        for key, value in request.items()
        if value is not None
    ]
    head = "\r\n".join([first, *lines, "", ""])
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=TIMEOUT) as connection:
        connection.sendall(head.encode("utf-8" if "٣" in head else "latin-1") + body)
        answer = b"".join(iter(lambda: connection.recv(2**16), b""))
    answered, _, line = answer.partition(b"\r\n\r\n")
    assert int(answered.split()[1]) == expected
    assert line.count(b"\n") == 1
    assert len(line) < 400
    for unwanted in (b"Access-Control", b"Set-Cookie", b"Location"):
        assert unwanted not in answered
    if expected != 400:
        assert server.typing.readers == {}  # nothing was loaded
    found = json.loads(get(server, "/run/first/state.json")[2])
    assert found["typing"]["steps"] == [2, 4]
    assert not server.typing.lock.locked()


def test_only_its_own_pages_know_the_token_of_the_server(home, server):
    page = get(server, "/run/first/")[2].decode()
    assert f'"token": "{server.token}"' in page
    assert server.token not in get(server, "/", **{"Host": "localhost"})[2].decode()
    with serving(home / "runs") as other:
        assert other.token != server.token
        assert post(server, "/run/first/read", READ, X_Clearhead_Token=other.token)[0] == 403


def test_a_page_of_the_server_is_answered(server):
    status, headers, _ = post(server, "/run/first/read", READ)
    assert status == 200
    assert headers["Cache-Control"] == "no-store"
    assert headers["Content-Security-Policy"] == "default-src 'none'; frame-ancestors 'self'"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert not [name for name in headers if name.lower().startswith("access-control")]


def test_a_request_whose_connection_is_closed_lets_the_next_one_in(server, monkeypatch):
    monkeypatch.setattr(live_typing, "SECONDS", 120)
    started, ended, usual = threading.Event(), [], Reader.read

    def endless(reader, *arguments):
        monkeypatch.setattr(Reader, "read", usual)
        started.set()
        try:
            while True:
                reader.check()
        except Exception as error:
            ended.append(type(error))
            raise

    monkeypatch.setattr(Reader, "read", endless)
    body = json.dumps(READ)
    head = "".join(f"{key}: {value}\r\n" for key, value in headers_of(server).items())
    request = f"POST /run/first/read HTTP/1.1\r\n{head}Content-Length: {len(body)}\r\n\r\n{body}"
    with socket.create_connection(("127.0.0.1", server.server_port)) as connection:
        connection.sendall(request.encode())
        assert started.wait(TIMEOUT)
    assert read(server, READ)[0]["step"] == 4
    assert ended == [Cancelled]


def test_a_computation_ends_with_its_time(server, monkeypatch):
    ends = iter([0.0, 0.0, 0.0, 0.0, 100.0])
    monkeypatch.setattr("clearhead.output.live_typing.time.monotonic", lambda: next(ends, 100.0))
    status, _, line = post(server, "/run/first/read", READ)
    assert (status, line.count(b"\n")) == (503, 1)
    monkeypatch.undo()
    assert read(server, READ)[0]["step"] == 4


def test_a_request_that_waits_ends_with_its_connection_or_its_time(home, monkeypatch):
    run, typing, body = LiveRuns(home / "runs").find("first"), Typing(), json.dumps(READ).encode()
    ours, theirs = socket.socketpair()
    with typing.lock, ours:
        with theirs, monkeypatch.context() as patch:
            patch.setattr(live_typing, "SECONDS", 0)
            with pytest.raises(Refused) as refused:
                typing.answer(run, "read", body, ours, 1)
            assert refused.value.status == 503
        with pytest.raises(Cancelled):
            typing.answer(run, "read", body, ours, 1)
    assert typing.readers == {}


def test_a_run_or_a_checkpoint_may_be_removed_or_damaged_meanwhile(home, server):
    run = home / "runs" / "first"
    shutil.copytree(run, home / "runs" / "second", symlinks=True)
    assert read(server, READ)[0]["step"] == 4
    model = run / "checkpoints" / "step_00000004" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1])
    status, _, line = post(server, "/run/first/read", READ)
    assert (status, line.count(b"\n")) == (503, 1)
    model.unlink()
    model.symlink_to(home / "runs/second/checkpoints/step_00000004/model.safetensors")
    assert post(server, "/run/first/read", READ)[0] == 404
    assert read(server, READ | {"step": 2})[0]["step"] == 2
    shutil.rmtree(run)
    for step in (2, 4):
        status, _, line = post(server, "/run/first/read", READ | {"step": step})
        assert (status, line.count(b"\n")) == (404, 1)
    assert read(server, READ, "/run/second/read")[0]["step"] == 4


def test_at_most_two_models_are_in_memory(home, server, monkeypatch):
    shutil.copytree(home / "runs" / "first", home / "runs" / "second", symlinks=True)
    loaded, load = [], live_typing.load_any
    monkeypatch.setattr(live_typing, "load_any", lambda path: loaded.append(path) or load(path))
    for step, path in ((2, "first"), (4, "first"), (2, "first"), (4, "second"), (2, "first")):
        read(server, READ | {"step": step}, f"/run/{path}/read")
        assert len(server.typing.readers) <= 2
    assert len(loaded) == 3
    read(server, READ)  # of the three, it was used the longest time ago
    assert len(loaded) == 4


def test_a_run_that_trains_keeps_the_other_cores(home, server, monkeypatch):
    shutil.copytree(home / "runs" / "first", home / "runs" / "second", symlinks=True)
    used = []
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    server.threads = 7
    read(server, READ)
    with lock_directory(home / "runs" / "second"):
        read(server, READ)
    assert used == [7, 1]


def test_heads_of_a_run_without_snapshots_cannot_be_off(home, server):
    shutil.rmtree(home / "runs" / "first" / "attention")
    assert read(server, READ)[0]["step"] == 4
    assert post(server, "/run/first/read", READ | {"off": [0]})[0] == 400


@pytest.mark.parametrize("kind", ["run", "llama"])
def test_a_model_without_a_run_has_a_page(home, monkeypatch, kind):
    monkeypatch.chdir(home)
    path, step = "runs/first", 4
    if kind == "llama":
        path, step = "llama", 0
        foreign_model("llama", vocab_size=320).save_pretrained(path)
        byte_level_tokenizer().save_pretrained(path)
    live_model = measured(path)
    with serving(home / "nothing", model=live_model) as server:
        page = get(server, "/model/")[2].decode()
        assert f'"tabs": ["heads"], "token": "{server.token}"' in page
        state = json.loads(get(server, "/model/state.json")[2])
        assert state["typing"] == {"steps": [step], "limit": 32 if kind == "run" else 64}
        data = json.loads(get(server, "/model/data.json")[2])
        assert data["snapshots"] == state["snapshots"] != ""
        assert [frame["step"] for frame in data["runs"][0]["frames"]] == [step]
        found, codes, _ = read(server, {"text": TEXT, "step": step}, "/model/read")
        without = read(server, {"text": TEXT, "step": step, "off": [0, 1]}, "/model/read")[0]
        assert found["losses"] != without["losses"]
        weights = capture(foreign_model("llama", vocab_size=320), found["ids"]).layers[0].weights
        if kind == "llama":
            cells = weights[0][:, *np.tril_indices(len(found["ids"]))].numpy()
            assert np.abs((codes[:4] / 255) ** 2 - cells).max() <= 1 / 255
        assert post(server, "/model/parts", PARTS | {"step": step})[0] == 200
        for wrong in ("/model", "/model/frame/0.json", "/model/training.json", "/run/model/"):
            assert get(server, wrong)[0] == 404


@pytest.mark.parametrize("wrong", ["model=runs", "model=nothing"])
def test_a_model_that_cannot_be_read_is_refused(home, in_process, wrong):
    code, _, err = in_process(main, home, wrong)
    assert (code, printed_keys(err)) == (3, ["model"])
