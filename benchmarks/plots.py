"""Draws docs/benchmarks-speed.png: python -m benchmarks.plots [out=FILE.png]"""

import io
import json

from pydantic import Field

from clearhead.config.command_line import OutFile, ScriptConfig, settings_command, write_out
from clearhead.config.yaml_files import REPOSITORY

RESULTS = REPOSITORY / "benchmarks" / "results"
OURS, OTHERS = "#0b6e99", "#b8bfc6"
TITLES = {"shipped": "as shipped", "equalised": "equalised: bf16, compiled"}


class PlotsConfig(ScriptConfig):
    """python -m benchmarks.plots [KEY=VALUE ...]

    Draws the training speeds of docs/results.md, from the newest results of benchmarks.training in
    benchmarks/results.
    """

    out: OutFile = Field(
        str(REPOSITORY / "docs" / "benchmarks-speed.png"), description="PNG file to write"
    )


@settings_command(PlotsConfig)
def main(settings: PlotsConfig) -> None:
    newest = max(RESULTS.glob("20??-??-??-training-cpu.json"))
    write_out(settings.out, draw(json.loads(newest.read_text(encoding="utf-8"))))
    print(f"wrote {settings.out} from {newest.name}")


def draw(results: dict) -> bytes:
    """Returns a PNG: tokens per second of each implementation, as shipped and equalised."""
    import matplotlib.style
    from matplotlib.figure import Figure

    tables = {name: results["tables"][name]["rows"] for name in TITLES}
    heights = [len(rows) for rows in tables.values()]
    with matplotlib.style.context("seaborn-v0_8-whitegrid"):
        figure = Figure(figsize=(8, 0.42 * sum(heights) + 1.4), layout="constrained")
        axes = figure.subplots(len(tables), sharex=True, height_ratios=heights)
        for axis, (name, rows) in zip(axes, tables.items(), strict=True):
            rows = sorted(rows, key=lambda row: row["tokens_per_second"])
            bars = axis.barh(
                ["{name} ({precision})".format(**row).replace("ours", "clearhead") for row in rows],
                [row["tokens_per_second"] for row in rows],
                color=[OURS if row["project"] == "ours" else OTHERS for row in rows],
                height=0.66,
            )
            axis.bar_label(bars, fmt="{:,.0f}", padding=4)
            axis.set_title(TITLES[name], loc="left", fontsize=10, fontweight="bold")
            axis.grid(visible=False, axis="y")
            axis.margins(x=0.1)
        axes[-1].set_xlabel("tokens per second")
        settings = results["settings"]
        title = "{model}, {batch_size} x {length} tokens per step".format(**settings)
        title += f", {results['cores']} cores of {results['processor']}"
        figure.suptitle(title.replace("(R)", ""), fontsize=10, x=0.01, ha="left")
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=110, metadata={"Software": None})
    return image.getvalue()


if __name__ == "__main__":
    main()
