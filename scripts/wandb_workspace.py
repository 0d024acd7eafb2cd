"""Creates or updates the saved view "clearhead" of a W&B project: heatmaps first, then the rest.

    python -m scripts.wandb_workspace project=clearhead

Needs an API key (wandb login) and the package wandb-workspaces. The view has a panel for each key
that the latest runs of the project have logged. A second call replaces the sections of this
command and keeps all others. docs/wandb.md lists the sections.
"""

from collections.abc import Callable
from typing import Annotated, TypeVar

from pydantic import Field

from clearhead.config.command_line import ScriptConfig, settings_command
from clearhead.config.schema import NO_SEPARATORS, Label
from clearhead.config.yaml_files import default_values
from clearhead.errors import NO_VALUE, ConfigError, RunError, refuse
from clearhead.output.wandb_process import call_with_timeout, teardown

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
        from clearhead.output import workspace  # an optional package, and wandb takes 0.5 s
    except ImportError as error:
        hint = "pip install wandb-workspaces"
        raise ConfigError([("W&B", NO_VALUE, f"package missing ({error})", hint)]) from error
    workspace.wandb.setup(workspace.wandb.Settings(silent=True, mode="online"))
    if not ask(lambda: workspace.wandb.login(prompt=False, verify=False), settings.project):
        hint = "log in with 'wandb login', or set WANDB_API_KEY"
        refuse([("W&B", NO_VALUE, "no API key found", hint)])
    project = settings.project
    try:
        entity, keys = ask(lambda: workspace.logged_keys(settings.entity, project), project)
        if not any(key.startswith(workspace.HEATMAPS) for key in keys):
            hint = "start train.py with this wandb.project first"
            refuse([("project", project, f"no run of {entity} has logged heatmaps", hint)])
        print(ask(lambda: workspace.save_view(entity, project, keys), project))
    finally:
        teardown()


def ask(call: Callable[[], Result], project: str) -> Result:
    """Returns the result of a call to W&B. Raises RunError if W&B fails or does not answer."""
    try:
        return call_with_timeout(SECONDS, call)
    except Exception as error:
        hint = "check project, entity, API key and network"
        raise RunError("project", project, f"W&B failed ({error})", hint) from error


if __name__ == "__main__":
    main()
