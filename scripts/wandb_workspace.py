"""Creates the saved view "clearhead" of a W&B project: heads first, then the rest.

    python -m scripts.wandb_workspace project=clearhead

Needs an API key (wandb login) and the package wandb-workspaces. Each call creates a view.
docs/wandb.md lists its sections.
"""

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from clearhead.config.command_line import ScriptConfig, settings_command
from clearhead.config.schema import NO_SEPARATORS, Label
from clearhead.config.yaml_files import default_values
from clearhead.errors import NO_VALUE, RunError, refuse
from clearhead.output.wandb_process import cause

if TYPE_CHECKING:  # wandb takes 0.5 s, and wandb_workspaces is an optional package
    from wandb_workspaces.workspaces import Section

IMAGES = ("attention/largest", "attention/heads")
LOSSES = (("train/loss", "val/loss"), ("val/bits_per_byte",), ("val/accuracy",))
OF_ALL = {"attention_names": "heads with a name", "attention_best": "largest of all heads"}
WandbName = Annotated[Label, Field(pattern=NO_SEPARATORS)]
DEFAULTS = default_values()["wandb"]  # with WANDB_PROJECT and WANDB_ENTITY


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
    if not wandb.login(prompt=False, verify=False):
        hint = "log in with 'wandb login', or set WANDB_API_KEY"
        refuse([("W&B", NO_VALUE, "no API key found", hint)])
    try:
        print(create_view(settings.entity, settings.project))
    except Exception as error:  # of the server; it has many types
        reason, hint = f"W&B failed ({cause(error)})", "check project, entity, API key and network"
        raise RunError("project", settings.project, reason, hint) from error


def create_view(entity: str | None, project: str) -> str:
    """Creates the view of a project; returns its URL."""
    import wandb
    from wandb_workspaces.workspaces import Workspace

    entity = entity or wandb.Api().default_entity
    view = Workspace(entity=entity, project=project, name="clearhead", sections=sections())
    return view.save().url


def sections() -> list["Section"]:
    from wandb_workspaces.reports.v2 import LinePlot, MediaBrowser, WeavePanelSummaryTable
    from wandb_workspaces.workspaces import Section, SectionLayoutSettings

    def media(key: str) -> MediaBrowser:
        """A panel for images or pages. Without an axis it shows one step, and a step slider."""
        return MediaBrowser(title=key.partition("/")[2], media_keys=[key], num_columns=1)

    def curves(title: str, **shown) -> LinePlot:
        return LinePlot(title=title, x="train/tokens", **shown)

    of_all = [curves(title, metric_regex=f"^{section}/") for section, title in OF_ALL.items()]
    losses = [curves(keys[-1].partition("/")[2], y=[*keys]) for keys in LOSSES]
    panels = {  # columns and panels of each section
        "heads": (3, [media(key) for key in IMAGES]),
        "page": (1, [media("attention/page")]),
        "table of heads": (1, [WeavePanelSummaryTable(table_name="attention/table")]),
        "head statistics": (2, of_all),
        "loss": (3, losses),
        "samples": (1, [media("samples/text")]),
    }
    return [
        Section(
            name=name,
            panels=of_section,
            is_open=True,
            layout_settings=SectionLayoutSettings(columns=columns, rows=1),
        )
        for name, (columns, of_section) in panels.items()
    ]


if __name__ == "__main__":
    main()
