"""The saved view on W&B: a local server stores views, and wandb-workspaces reads them back."""

import json
import re

import pytest
from helpers.refusals import printed_keys
from helpers.wandb_server import WandbServer

from headlens import KINDS, STATISTICS
from scripts import wandb_workspace

IMAGES = ["attention/largest", "attention/heads"]
KEY = "k" * 40
PAGES = ["attention/page"]
SUMMARY = dict.fromkeys([*IMAGES, *PAGES, "train/loss", "val/loss", "val/perplexity"], 1.0)
SUMMARY |= {f"attention_{what}/{key}": 0.5 for key in KINDS for what in ("best", "names")}
SUMMARY |= {f"attention_layers/{key}/L{n:02d}": 0.5 for key in STATISTICS for n in range(2)}


class Server(WandbServer):
    """Has a project whose runs have the given summaries, and stores its saved views."""

    def __init__(self, *summaries: dict, fault: str = ""):
        self.summaries, self.views_fault = summaries, fault
        self.views: dict[str, dict] = {}  # by id
        super().__init__()

    def answer(self, path: str, body: bytes) -> dict:
        if path != "/graphql":
            return super().answer(path, body)
        asked = json.loads(body)
        given, query = asked.get("variables") or {}, asked["query"]
        if "query Runs(" in query:
            texts = map(json.dumps, self.summaries)
            runs = [{"name": "r", "config": "{}", "summaryMetrics": text} for text in texts]
            return {"data": {"project": self.page("runs", runs) if runs else None}}
        if "allViews(" in query:
            assert given["viewType"] == "project-view"
            if self.views_fault == "hangs":
                self.ended.wait()
            name = given.get("viewName")
            views = [view for view in self.views.values() if name in (None, view["name"])]
            return {"data": {"project": self.page("allViews", views)}}
        if "upsertView(" in query:
            view = {key: given[key] for key in ("name", "displayName", "spec")}
            view["id"] = given.get("id") or f"view{len(self.views)}"
            self.views[view["id"]] = view
            return {"data": {"upsertView": {"view": view, "inserted": "id" not in given}}}
        return super().answer(path, body)

    def page(self, key: str, nodes: list[dict]) -> dict:
        edges = [{"node": node, "cursor": str(n)} for n, node in enumerate(nodes)]
        return {key: {"edges": edges, "pageInfo": {"hasNextPage": False}}}


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


def test_the_view_is_created_once_and_then_updated(call, online, capsys):
    from wandb_workspaces.workspaces import Section, Workspace

    with Server(SUMMARY, {"attention/animation": 1.0}) as server:
        code, address, err = call(server, "project=mine")
        assert (code, err, len(server.views)) == (0, "", 1)
        (first,) = server.views.values()
        online(server)
        view = Workspace.from_url(address.strip())
        assert [view.entity, view.project] == ["me", "mine"]
        images, page, table, statistics, loss, samples = view.sections
        shown = [panel.media_keys for panel in images.panels + page.panels + samples.panels]
        keys = [*IMAGES, "attention/animation", *PAGES, "samples/text"]
        assert shown == [[key] for key in keys]
        assert [panel.table_name for panel in table.panels] == ["attention/table"]
        curves = [[metric.name for metric in panel.y] for panel in loss.panels]
        assert curves == [["train/loss", "val/loss"], ["val/perplexity"]]
        layers = [key for key in SUMMARY if key.startswith("attention_layers/")]
        of_all = [
            [key for key in SUMMARY if key.startswith(f"attention_{what}/")]
            for what in ("best", "names")
        ]
        drawn = [
            [key for key in SUMMARY if re.search(panel.metric_regex, key)]
            for panel in statistics.panels
        ]
        of_layers = [layers[n : n + 2] for n in range(0, len(layers), 2)]
        assert sorted(drawn) == sorted([*of_all, *of_layers])
        axes = {panel.x.name for panel in statistics.panels + loss.panels}
        assert axes == {"train/tokens"}

        # The user adds a section and removes the panels of another; the command adds them again.
        images.panels = []
        view.sections = [Section(name="my own", panels=loss.panels), *view.sections]
        view.runset_settings.query = "mine"
        view.save()
        capsys.readouterr()  # the library reports the address
        assert call(server, "project=mine", "entity=me") == (0, address, "")
        (second,) = server.views.values()
        online(server)
        view = Workspace.from_url(address.strip())
    assert first["name"] == second["name"]
    assert (view.sections[-1].name, view.runset_settings.query) == ("my own", "mine")
    before, after = [
        [(section["name"], len(section["panels"])) for section in sections_of(stored)]
        for stored in (first, second)
    ]
    assert after == [*before, ("my own", 2)]


def sections_of(view: dict) -> list[dict]:
    return json.loads(view["spec"])["section"]["panelBankConfig"]["sections"]


@pytest.mark.parametrize(
    ("summaries", "fault", "key", "code", "printed"),
    [
        ([SUMMARY], "", "", 2, "W&B"),
        ([], "", KEY, 4, "project"),
        ([SUMMARY], "hangs", KEY, 4, "project"),
    ],
)
def test_a_failure_is_one_line(monkeypatch, call, summaries, fault, key, code, printed):
    if fault == "hangs":
        monkeypatch.setattr(wandb_workspace, "SECONDS", 1)
    with Server(*summaries, fault=fault) as server:
        found, out, err = call(server, key=key)
        assert server.views == {}
    assert (found, out, printed_keys(err)) == (code, "", [printed])
