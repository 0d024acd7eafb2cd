"""Creates or updates the saved view "clearhead" of a W&B project: heads first, then the rest.

    python -m scripts.wandb_workspace project=clearhead

Needs an API key (wandb login) and the package wandb-workspaces. The view has a panel for each key
that the latest runs of the project have logged. A second call replaces the sections of this
command and keeps all others. docs/wandb.md lists the sections.
"""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Annotated, TypeVar

from pydantic import Field

from clearhead.config.command_line import ScriptConfig, settings_command
from clearhead.config.schema import NO_SEPARATORS, Label
from clearhead.config.yaml_files import default_values
from clearhead.errors import NO_VALUE, RunError, refuse
from clearhead.output.wandb_process import call_with_timeout, teardown

if TYPE_CHECKING:  # wandb takes 0.5 s, and wandb_workspaces is an optional package
    from wandb_workspaces.workspaces import Section

NAME = "clearhead"  # of the view
RECENT = 20  # the view has the panels of this many runs
IMAGES = ("attention/largest", "attention/heads", "attention/animation")
SECONDS = 30  # for the answers of W&B's server
WandbName = Annotated[Label, Field(pattern=NO_SEPARATORS)]
DEFAULTS = default_values()["wandb"]  # with WANDB_PROJECT and WANDB_ENTITY
Result = TypeVar("Result")


class WorkspaceConfig(ScriptConfig):
    """python -m scripts.wandb_workspace [project=PROJECT] [entity=ENTITY]"""

    project: WandbName = Field(DEFAULTS["project"], description="W&B project")
    entity: WandbName | None = Field(
        DEFAULTS["entity"], description="W&B team or user; null: the default entity of the API key"
    )


@settings_command(WorkspaceConfig)
def main(settings: WorkspaceConfig) -> None:
    try:
        import wandb
        import wandb_workspaces  # noqa: F401
    except ImportError as error:
        hint = "pip install wandb-workspaces"
        refuse([("W&B", NO_VALUE, f"package missing ({error})", hint)])
    wandb.setup(wandb.Settings(silent=True, mode="online"))
    project = settings.project
    if not ask(lambda: wandb.login(prompt=False, verify=False), project):
        hint = "log in with 'wandb login', or set WANDB_API_KEY"
        refuse([("W&B", NO_VALUE, "no API key found", hint)])
    try:
        entity, keys = ask(lambda: logged_keys(settings.entity, project), project)
        if not keys & {*IMAGES}:
            hint = "start train.py with this wandb.project first"
            refuse([("project", project, f"no run of {entity} has logged heads", hint)])
        print(ask(lambda: save_view(entity, project, keys), project))
    finally:
        teardown()


def ask(call: Callable[[], Result], project: str) -> Result:
    """Returns the result of a call to W&B. Raises RunError if W&B fails or does not answer."""
    try:
        return call_with_timeout(SECONDS, call)
    except Exception as error:
        hint = "check project, entity, API key and network"
        raise RunError("project", project, f"W&B failed ({error})", hint) from error


def logged_keys(entity: str | None, project: str) -> tuple[str, set[str]]:
    """Returns the entity (for None, the default entity of the API key) and the keys of recent runs.

    Raises ValueError if the project does not exist.
    """
    import wandb

    api = wandb.Api()
    entity = entity or api.default_entity
    runs = api.runs(f"{entity}/{project}", order="-created_at", per_page=RECENT, lazy=False)
    return entity, {key for run in islice(runs, RECENT) for key in dict(run.summary)}


def save_view(entity: str, project: str, keys: Iterable[str]) -> str:
    """Creates the view of a project, or replaces its sections; returns its URL.

    keys: what runs have logged. Sections with other names stay, after those of `sections`.
    """
    import wandb
    from wandb_workspaces.workspaces import Workspace

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


def sections(keys: Iterable[str]) -> list["Section"]:
    """Returns the sections of the view, with panels for the keys that runs have logged."""
    from wandb_workspaces.reports.v2 import LinePlot, MediaBrowser, WeavePanelSummaryTable
    from wandb_workspaces.workspaces import Section, SectionLayoutSettings

    def media(key: str) -> MediaBrowser:
        """A panel for images or pages. Without an axis it shows one step, and a step slider."""
        return MediaBrowser(title=key.partition("/")[2], media_keys=[key], num_columns=1)

    def curves(*keys: str) -> LinePlot:
        """A panel for curves. The perplexity before the training is the vocabulary size."""
        title, log_y = keys[-1].partition("/")[2], keys == ("val/perplexity",)
        return LinePlot(title=title, x="train/tokens", y=list(keys), log_y=log_y)

    keys = sorted(keys)
    statistics = sorted({key.split("/")[1] for key in keys if key.startswith("attention_layers/")})
    of_all = {"attention_names": "heads with a name", "attention_best": "largest of all heads"}
    lines = [
        (title, f"^{section}/")
        for section, title in of_all.items()
        if any(key.startswith(f"{section}/") for key in keys)
    ]
    lines += [(name, f"^attention_layers/{name}/L[0-9]+$") for name in statistics]
    lines = [LinePlot(title=title, x="train/tokens", metric_regex=regex) for title, regex in lines]
    metrics = [["train/loss", "val/loss"]]
    metrics += [[key] for key in keys if key.startswith("val/") and key != "val/loss"]
    panels = {  # (columns, rows) and panels of each section
        "heads": (3, 1, [media(key) for key in IMAGES if key in keys]),
        "page": (1, 1, [media("attention/page")]),
        "table of heads": (1, 1, [WeavePanelSummaryTable(table_name="attention/table")]),
        "head statistics": (4, 2, lines),
        "loss": (3, 1, [curves(*keys) for keys in metrics]),
        "samples": (1, 1, [media("samples/text")]),
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


if __name__ == "__main__":
    main()
