"""scripts/view.py: what its server answers, what it refuses, and the page that it writes."""

import http.client
import json
import os
import re
import shutil
import socket

import numpy as np
import pytest
from helpers import TIMEOUT, pages
from helpers.live import GrowingRun, get, live_command, serving
from helpers.refusals import printed_keys
from helpers.runs import contents

from clearhead.checkpoint.run_directory import lock_directory
from clearhead.output.live import LiveRuns
from headlens import read_snapshot, run_data
from scripts.view import main

SECRET = b"a secret outside of the runs"


@pytest.fixture
def home(tmp_path, finished):
    """A folder with runs/first, and with files that are not those of runs."""
    shutil.copytree(finished, tmp_path / "runs" / "first", symlinks=True)
    for path in ("secret.txt", "runs/.env", "runs/first/wandb/secret.txt", "runs/other/secret.txt"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(SECRET)
    return tmp_path


@pytest.fixture
def server(home):
    with serving(home / "runs") as started:
        yield started


def send(server, request: bytes):
    """Sends the bytes of a request. Returns all that the server answers until it hangs up."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=TIMEOUT) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(2**16), b""))


def of(server, path):
    """Returns the JSON at a path of the run."""
    status, _, content = get(server, f"/run/first/{path}")
    assert status == 200
    return json.loads(content)


HOST = b"Host: 127.0.0.1\r\n\r\n"
# "~" is /run/first/.
PATHS = r"""/../secret.txt /secret.txt //secret.txt /.env /runs/.env /run/ /run/../secret.txt
/run/%2e%2e/ /run/..%2fsecret.txt /run/.env /run/. /run/%2e/state.json /run/first%2f..%2ffirst/
/run/%2e%2e/runs.json ~../../secret.txt ~%2e%2e/%2e%2e/secret.txt ~..%5c..%5csecret.txt
~..\..\secret.txt ~%252e%252e/secret.txt ~state.json%00.txt ~frame/../../secret.json
~frame/%2e%2e%2f0.json ~frame/-1.json ~frame/٣.json ~frame/0.json%00 ~wandb/secret.txt
~checkpoints/last/model.safetensors ~run.json ~attention/ ~config.yaml ~run.html ~.lock /run/other/
/run/other/secret.txt /run/linked/ /run/linked/state.json /run/first%00/ /run/%ff%fe/ /run/pipe/
/%00""".replace("~", "/run/first/").split()
PATHS += [f"/run/first/frame/{'9' * 5000}.json", f"/run/{'a' * 300}/"]
HOSTILE = {
    "another host": b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    "another host at the right port": b"GET / HTTP/1.1\r\nHost: evil.example:8123\r\n\r\n",
    "a host that ends well": b"GET / HTTP/1.1\r\nHost: evil.example#localhost\r\n\r\n",
    "a host that starts well": b"GET / HTTP/1.1\r\nHost: localhost.evil.example\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "HTTP/1.0 without host": b"GET / HTTP/1.0\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nHost: localhost\r\n" + HOST.replace(b"127.0.0.1", b"evil"),
    "URI of another host": b"GET http://evil.example/ HTTP/1.1\r\n" + HOST,
    "URI of this host": b"GET http://localhost/runs.json HTTP/1.1\r\n" + HOST,
    "no HTTP/1": b"GET /run/first/state.json\r\n\r\n",
    "no HTTP/1 and no text": b"\x16\x03\x01\x00\xff" * 20,
    "a long path": b"GET /" + b"a" * 10_000 + b" HTTP/1.1\r\n" + HOST,
    # As long as the server reads: it resets a connection with more, so its answer may be lost.
    "a line without an end": b"GET /" + b"a" * (2**16 - 4),
    **{path: f"GET {path} HTTP/1.1\r\n".encode() + HOST for path in PATHS},
    **{
        method: f"{method} /run/first/state.json HTTP/1.1\r\nContent-Length: 4\r\n".encode()
        + HOST
        + b"text"
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "HEAD")
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_request_is_refused_in_one_line(home, server, name):
    (home / "elsewhere").mkdir()
    shutil.copy(home / "runs" / "first" / "run.json", home / "elsewhere" / "run.json")
    (home / "runs" / "linked").symlink_to(home / "elsewhere")
    os.mkfifo(home / "runs" / "pipe")
    before = contents(home / "runs" / "first")
    answer = send(server, HOSTILE[name])
    head, _, body = answer.partition(b"\r\n\r\n")
    if not name.startswith("no HTTP/1"):  # the answer to it has no head
        assert 400 <= int(head.split()[1]) < 600
    else:
        head, body = b"", answer
    assert body.count(b"\n") == 1
    assert len(body) < 400
    assert SECRET not in answer
    assert b"Location" not in head
    assert contents(home / "runs" / "first") == before
    assert get(server, "/")[0] == 200  # it still answers others


@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize(
    "name",
    ["samples.jsonl", "metrics.jsonl", "run.json", "attention/step_00000003.npz", "attention"],
)
def test_a_link_or_a_pipe_in_a_run_is_not_read(home, server, name, kind):
    path = home / "runs" / "first" / name
    path.rename(home / "moved")
    if kind == "link":
        path.symlink_to(home / "moved")
    else:
        os.mkfifo(path)
    status, _, content = get(server, "/run/first/state.json")
    if "attention" not in name:
        assert status == 404
    elif name == "attention":
        assert json.loads(content)["snapshots"] == ""
        assert get(server, "/run/first/data.json")[0] == 404
        assert get(server, "/run/first/head.png")[0] == 404
    else:
        assert get(server, "/run/first/frame/3.json")[0] == 404
        assert 3 not in [frame["step"] for frame in of(server, "data.json")["runs"][0]["frames"]]


def test_the_page_has_the_data_of_the_snapshots(home, server):
    snapshots = [*map(read_snapshot, sorted((home / "runs/first/attention").glob("*.npz")))]
    (run,) = of(server, "data.json")["runs"]
    expected = json.loads(json.dumps(run_data(snapshots)))
    assert [frame["step"] for frame in run["frames"]] == [0, 1, 2, 3, 4]
    for frame, content in zip(run["frames"], expected["frames"], strict=True):
        assert of(server, frame["address"]) == content
    for key in expected.keys() - {"frames", "curves", "history"}:
        assert run[key] == expected[key], key
    packed = [json.loads(pages.unpacked(each["history"])) for each in (run, expected)]
    assert packed[0]["steps"] == packed[1]["steps"] == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(*[each["values"]["entropy"] for each in packed], atol=1e-4)
    state = of(server, "state.json")
    assert (state["state"], state["done"]) == ("finished", None)
    found = of(server, "training.json")
    assert [step for step, _ in found["curves"]["validation loss"]] == [0, 2, 4]
    (written,) = re.findall(r'id="data">(.*?)</script>', (home / "runs/first/run.html").read_text())
    written = json.loads(written)["training"]
    assert "finished" in written.pop("state")
    assert found["training"] == written | {"command": found["training"]["command"]}
    status, headers, picture = get(server, "/run/first/head.png")
    assert (status, headers["Content-Type"], picture[:4]) == (200, "image/png", b"\x89PNG")


def test_versions_change_with_the_files_only(home, server):
    run = GrowingRun(home / "runs" / "first", home / "runs" / "second")

    def state():
        return json.loads(get(server, "/run/second/state.json")[2])

    def addresses():
        found = json.loads(get(server, "/run/second/data.json")[2])
        return {frame["step"]: frame["address"] for frame in found["runs"][0]["frames"]}

    assert state()["snapshots"] == ""
    assert get(server, "/run/second/data.json")[0] >= 400
    run.add(0, 1)
    first, two = state(), addresses()
    assert (state(), list(two)) == (first, [0, 1])
    status, headers, _ = get(server, "/run/second/state.json")
    again = {"If-None-Match": headers["ETag"]}
    assert get(server, "/run/second/state.json", **again)[::2] == (304, b"")
    run.add(2)
    status, _, content = get(server, "/run/second/state.json", **again)
    assert status == 200
    assert all(json.loads(content)[key] != first[key] for key in ("snapshots", "training", "text"))
    assert addresses().items() > two.items()
    run.remove_from(1)  # the run is resumed and writes the step again
    run.add(1)
    three = addresses()
    assert list(three) == [0, 1]
    assert three[0] == two[0]
    assert three[1] != two[1]
    shutil.rmtree(run.folder)
    assert get(server, "/run/second/state.json")[0] == 404


def test_the_list_has_the_newest_run_first_and_the_state_of_each(home, server):
    shutil.copytree(home / "runs" / "first", home / "runs" / "a <b>&", symlinks=True)
    start = home / "runs" / "a <b>&" / "starts.jsonl"
    row = json.loads(start.read_text().splitlines()[0])
    start.write_text(json.dumps(row | {"time": "2099-01-01T00:00:00+00:00"}) + "\n")

    def listed():
        rows = json.loads(get(server, "/runs.json")[2])["runs"]
        return [(row["name"], row["state"]) for row in rows]

    assert listed() == [("a <b>&", "finished"), ("first", "finished")]
    rows = json.loads(get(server, "/runs.json")[2])["runs"]
    assert get(server, f"/{rows[0]['address']}state.json")[0] == 200
    assert [step for step, _ in rows[1]["lines"]["validation"]] == [0, 2, 4]
    assert get(server, f"/{rows[0]['picture']}")[0] == 200
    loss = json.loads((home / "runs/first/validation.json").read_text())["loss"]
    assert rows[1]["losses"][1] == ["validation", f"{loss:.4f}"]
    with lock_directory(home / "runs" / "first"):
        assert listed()[1] == ("first", "running")
    (home / "runs" / "first" / "summary.json").unlink()
    assert listed()[1] == ("first", "stopped")
    assert LiveRuns(home / "nothing").rows()["runs"] == []


def test_a_run_can_lock_its_directory_while_the_server_looks_at_it(home, server):
    """The server tries the lock of a directory that is not locked once, not at each request."""
    runs = LiveRuns(home / "runs")
    assert runs.find("first").state()["state"] == "finished"
    tried = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clearhead.output.live.is_locked", lambda folder: bool(tried.append(1)))
        for _ in range(5):
            runs.find("first").state()
        assert tried == []
        (home / "runs" / "first" / ".lock").write_text("process 1\n")  # a run has started
        runs.find("first").state()
    assert tried == [1]


def test_only_pages_may_ask_the_server(home, server):
    for path in ("/", "/run/first/"):
        status, headers, content = get(server, path)
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        own = re.findall('Content-Security-Policy" content="(.*?)"', content.decode())
        policy = "; ".join([headers["Content-Security-Policy"], *own])
        assert {"default-src 'none'", "connect-src 'self'"} <= {*policy.split("; ")}


def test_the_command_serves_at_a_free_port_and_writes_nothing(home):
    (home / "runs" / "first" / ".lock").unlink(missing_ok=True)
    before = contents(home)
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        with live_command(home / "runs", port) as address:
            number = int(re.search(r":(\d+)/", address)[1])
            connection = http.client.HTTPConnection("127.0.0.1", number, timeout=TIMEOUT)
            connection.request("GET", "/run/first/data.json")
            assert len(json.loads(connection.getresponse().read())["runs"]) == 1
            connection.close()
        assert number != port
    assert contents(home) == before


def test_the_page_and_the_images_of_a_run_are_written_again(home, in_process):
    run, kinds = home / "runs" / "first", (".html", ".webp", ".png")
    made = [path for path in run.rglob("*") if path.suffix in kinds]
    before = {path: path.read_bytes() for path in made}
    for path in made:
        path.unlink()
    code, out, err = in_process(main, home, "write=runs/first")
    assert (code, err) == (0, "")
    assert "runs/first/run.html" in out.split()
    is_same = {path: path.read_bytes() for path in run.rglob("*") if path.suffix in kinds} == before
    assert is_same
    (run / "attention" / "step_00000001.npz").write_bytes(b"of another version")
    code, _, err = in_process(main, home, "write=runs/first")  # shows the others
    assert (code, err.count("step_00000001.npz"), err.count("\n")) == (0, 1, 1)
    code, _, err = in_process(main, home, "write=runs")
    assert (code, printed_keys(err)) == (3, ["write"])


@pytest.mark.parametrize("wrong", ["port=0", "port=http", "runs_dir=secret.txt", "runs=runs"])
def test_a_wrong_setting_is_refused(home, in_process, wrong):
    code, out, err = in_process(main, home, wrong)
    assert (code, out, printed_keys(err)) == (2, "", [wrong.partition("=")[0]])
