"""The saved view on W&B: a local server stores views, and wandb-workspaces reads them back."""

import json
import re

import pytest
from helpers.refusals import printed_keys
from helpers.wandb_server import WandbServer

from headlens import KINDS
from scripts import wandb_workspace

IMAGES = ["attention/largest", "attention/heads"]
KEY = "k" * 40
LOGGED = [f"attention_{what}/{key}" for key in KINDS for what in ("best", "names")]


class Server(WandbServer):
    """Stores saved views. fault: "refuses"."""

    def __init__(self, fault: str = ""):
        self.views_fault = fault
        self.views: list[dict] = []
        super().__init__()

    def answer(self, path: str, body: bytes) -> dict:
        asked = json.loads(body) if path == "/graphql" else {"query": ""}
        given, query = asked.get("variables") or {}, asked["query"]
        if "allViews(" in query:
            edges = [{"node": view, "cursor": ""} for view in self.views]
            views = {"edges": edges, "pageInfo": {"hasNextPage": False}}
            return {"data": {"project": {"allViews": views}}}
        if "upsertView(" in query:
            if self.views_fault:
                return {"errors": [{"message": "no such project"}]}
            view = {key: given[key] for key in ("name", "displayName", "spec")} | {"id": "view0"}
            self.views.append(view)
            return {"data": {"upsertView": {"view": view, "inserted": True}}}
        return super().answer(path, body)


@pytest.fixture
def online(monkeypatch, tmp_path):
    """online(server): from now on, wandb uses this server."""
    import wandb

    def use(server: WandbServer, key: str = KEY) -> None:
        for name, value in {"BASE_URL": server.url, "API_KEY": key, "DIR": tmp_path}.items():
            monkeypatch.setenv(f"WANDB_{name}", str(value))
        monkeypatch.setenv("HOME", str(tmp_path))  # no ~/.netrc
        wandb.teardown()

    yield use
    wandb.teardown()


@pytest.fixture
def call(online, in_process, tmp_path):
    """call(server, *arguments) -> (exit code, stdout, stderr) of the command."""

    def run(server: WandbServer, *arguments: str, key: str = KEY) -> tuple[int, str, str]:
        online(server, key)
        return in_process(wandb_workspace.main, tmp_path, *arguments)

    return run


def test_the_view_has_a_panel_for_what_runs_log(call, online):
    from wandb_workspaces.workspaces import Workspace

    with Server() as server:
        code, address, err = call(server, "project=mine")
        assert (code, err, len(server.views)) == (0, "", 1)
        online(server)
        view = Workspace.from_url(address.strip())
    assert [view.entity, view.project] == ["me", "mine"]
    images, page, table, statistics, loss, samples = view.sections
    shown = [panel.media_keys for panel in images.panels + page.panels + samples.panels]
    assert shown == [[key] for key in [*IMAGES, "attention/page", "samples/text"]]
    assert [panel.table_name for panel in table.panels] == ["attention/table"]
    curves = [[metric.name for metric in panel.y] for panel in loss.panels]
    assert curves == [["train/loss", "val/loss"], ["val/bits_per_byte"], ["val/accuracy"]]
    drawn = [
        [key for key in LOGGED if re.search(panel.metric_regex, key)] for panel in statistics.panels
    ]
    assert sorted(key for keys in drawn for key in keys) == sorted(LOGGED)
    axes = {panel.x.name for panel in statistics.panels + loss.panels}
    assert axes == {"train/tokens"}


@pytest.mark.parametrize(
    ("fault", "key", "code", "printed"),
    [("", "", 2, "W&B"), ("refuses", KEY, 4, "project")],
)
def test_a_failure_is_one_line(call, fault, key, code, printed):
    with Server(fault) as server:
        found, out, err = call(server, key=key)
        assert server.views == []
    assert (found, out, printed_keys(err)) == (code, "", [printed])
