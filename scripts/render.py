"""Makes the attention page and images of a run, and report.html, again from its data.

    python -m scripts.render run=runs/NAME

For example after a change of the page. The data is attention/step_*.npz, attention/statistics.jsonl
and metrics.jsonl; no model runs.
"""

from pathlib import Path

from pydantic import Field

from clearhead.config.command_line import ScriptConfig, settings_command
from clearhead.errors import DataError, sanitize


class RenderConfig(ScriptConfig):
    """python -m scripts.render run=runs/NAME

    Makes the attention page and images of a run, and report.html, again from its data.
    """

    run: str = Field(description="run directory")


@settings_command(RenderConfig)
def main(settings: RenderConfig) -> None:
    from clearhead.checkpoint.run_directory import attention_page
    from clearhead.config.stored import settings_of
    from clearhead.files import read_rows
    from clearhead.output.charts import CURVES, curves
    from clearhead.output.report import write_report
    from headlens import render_run

    folder = Path(settings.run)
    stored = settings_of(folder)
    if stored is None:
        raise DataError("run", settings.run, "not a run directory", "give runs/NAME")
    frames = stored["lens"]["frames"]
    try:
        rows = read_rows(folder / "metrics.jsonl", *CURVES)
        render_run(folder / "attention", frames, curves(rows))
    except ValueError as error:
        hint = "remove the file, or use the version of clearhead that wrote it"
        raise DataError("run", settings.run, str(error), hint) from error
    if page := attention_page(folder):
        print(sanitize(f"attention page   {page}"))
    print(sanitize(f"report           {write_report(folder)}"))


if __name__ == "__main__":
    main()
