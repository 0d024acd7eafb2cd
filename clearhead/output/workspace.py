"""The saved view of a W&B project: heatmaps, attention page, statistics, loss and samples.

Importing this module needs the optional package wandb-workspaces. The functions wait for W&B's
server; callers set a timeout.
"""

from collections.abc import Iterable
from itertools import islice

import wandb
from wandb_workspaces.reports.v2 import LinePlot, MediaBrowser, WeavePanelSummaryTable
from wandb_workspaces.workspaces import Section, SectionLayoutSettings, Workspace

NAME = "clearhead"  # of the view
RECENT = 20  # the view has the panels of this many runs
HEATMAPS = ("attention/animation", "attention/heatmap/")


def logged_keys(entity: str | None, project: str) -> tuple[str, set[str]]:
    """Returns the entity (for None, the default entity of the API key) and the keys of recent runs.

    Raises ValueError if the project does not exist.
    """
    api = wandb.Api()
    entity = entity or api.default_entity
    runs = api.runs(f"{entity}/{project}", order="-created_at", per_page=RECENT, lazy=False)
    return entity, {key for run in islice(runs, RECENT) for key in dict(run.summary)}


def save_view(entity: str, project: str, keys: Iterable[str]) -> str:
    """Creates the view of a project, or replaces its sections; returns its URL.

    keys: what runs have logged. Sections with other names stay, after those of `sections`.
    """
    views = wandb.Api().reports(f"{entity}/{project}")
    views.variables["viewType"] = "project-view"  # W&B stores reports and saved views alike
    found = next((view.name for view in views if view.display_name == NAME), None)
    view = Workspace(entity=entity, project=project, name=NAME)
    if found:
        in_url = found.removeprefix("nw-").removesuffix("-v")
        view = Workspace.from_url(f"https://any.host/{entity}/{project}?nw={in_url}")
    ours = sections(keys)
    names = {section.name for section in ours}
    view.sections = ours + [section for section in view.sections if section.name not in names]
    return view.save().url


def sections(keys: Iterable[str]) -> list[Section]:
    """Returns the sections of the view, with panels for the keys that runs have logged."""
    keys = sorted(keys)
    statistics = sorted({key.split("/")[1] for key in keys if key.startswith("attention_layers/")})
    best = any(key.startswith("attention_best/") for key in keys)
    lines = [("largest of all heads", "^attention_best/")] * best
    lines += [(name, f"^attention_layers/{name}/L[0-9]+$") for name in statistics]
    lines = [LinePlot(title=title, x="train/tokens", metric_regex=regex) for title, regex in lines]
    metrics = [["train/loss", "val/loss"]]
    metrics += [[key] for key in keys if key.startswith("val/") and key != "val/loss"]
    panels = {  # (columns, rows) and panels of each section
        "heatmaps": (2, 2, [_media(key) for key in keys if key.startswith(HEATMAPS)]),
        "attention page": (1, 1, [_media("attention/timelapse")]),
        "heads": (1, 1, [WeavePanelSummaryTable(table_name="attention/table")]),
        "head statistics": (4, 2, lines),
        "loss": (3, 1, [_curves(*keys) for keys in metrics]),
        "samples": (1, 1, [_media("samples/text")]),
    }
    return [
        Section(
            name=name,
            panels=of_section,
            is_open=True,
            layout_settings=SectionLayoutSettings(columns=columns, rows=rows),
        )
        for name, (columns, rows, of_section) in panels.items()
    ]


def _curves(*keys: str) -> LinePlot:
    """Returns a panel for curves. The perplexity before the training is the vocabulary size."""
    log_y = keys == ("val/perplexity",)
    return LinePlot(title=keys[-1].partition("/")[2], x="train/tokens", y=list(keys), log_y=log_y)


def _media(key: str) -> MediaBrowser:
    """Returns a panel for images or pages. Without an axis it shows one step, and a step slider."""
    return MediaBrowser(title=key.partition("/")[2], media_keys=[key], num_columns=1)
