"""The pictures of docs/benchmarks.md, from the figures in benchmarks/results.

    python -m benchmarks.plots [out=FOLDER]

Of each kind of figures the newest file is drawn: *-others-cpu.json (benchmarks/training.py) and
*-muon-NAME.json, *-muon-sweep-NAME.json (scripts/compare).
"""

import json
import math
import statistics
from pathlib import Path

from pydantic import DirectoryPath, Field

from training.config.command_line import ScriptConfig, settings_command

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "benchmarks" / "results"
OURS, OTHERS = "#0b6e99", "#b8bfc6"
COLOURS = {"adamw": "#c2571a", "muon": OURS}
NAMES = {"adamw": "AdamW", "muon": "Muon"}
INK = "#24292f"
STYLE = {
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#e6e8eb",
    "legend.frameon": False,
}


class PlotsConfig(ScriptConfig):
    """python -m benchmarks.plots [KEY=VALUE ...]

    Draws the pictures of docs/benchmarks.md from the figures in benchmarks/results.
    """

    out: DirectoryPath = Field(str(REPOSITORY / "docs"), description="the folder to write them to")


@settings_command(PlotsConfig)
def main(settings: PlotsConfig) -> None:
    plt = pyplot()
    muon, sweeps = (
        {name: newest(f"{kind}-{name}") for name in ("nano", "medium")}
        for kind in ("muon", "muon-sweep")
    )
    figures = {
        "benchmarks-speed.png": speed(plt, newest("others-cpu")),
        "benchmarks-muon.png": learning(plt, muon, sweeps),
    }
    for name, figure in figures.items():
        path = Path(settings.out) / name
        figure.savefig(path, dpi=110, metadata={"Software": None})
        print(f"{path} ({path.stat().st_size / 1000:.0f} kB)")


def newest(what: str) -> dict:
    """The figures of one kind whose file is dated last."""
    file = max(RESULTS.glob(f"20??-??-??-{what}.json"))
    return json.loads(file.read_text(encoding="utf-8"))


def pyplot():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(STYLE)
    return plt


def speed(plt, others: dict):
    """Tokens per second of each implementation, as shipped and equalised."""
    tables = {name: others["tables"][name]["rows"] for name in ("shipped", "equalised")}
    titles = {"shipped": "as shipped", "equalised": "equalised: bf16, compiled"}
    heights = [len(rows) for rows in tables.values()]
    figure, axes = plt.subplots(
        len(tables), 1, figsize=(8, 0.42 * sum(heights) + 1.4), sharex=True, layout="constrained",
        height_ratios=heights,
    )  # fmt: skip
    for axis, (name, rows) in zip(axes, tables.items(), strict=True):
        rows = sorted(rows, key=lambda row: row["tokens_per_second"])
        values = [row["tokens_per_second"] for row in rows]
        labels = [described(row) for row in rows]
        colours = [OURS if row["project"] == "ours" else OTHERS for row in rows]
        bars = axis.barh(labels, values, color=colours, height=0.66)
        axis.bar_label(bars, [f"{value:,.0f}" for value in values], padding=4, color=INK)
        axis.set_title(titles[name], loc="left", fontsize=10, fontweight="bold")
        axis.grid(axis="x")
        axis.tick_params(length=0)
        axis.spines["left"].set_visible(False)
        axis.margins(x=0.1)
    settings = others["settings"]
    axes[-1].set_xlabel("tokens per second")
    figure.suptitle(
        f"{settings['model']}, {settings['batch_size']} x {settings['length']} tokens a step, "
        f"{others['cores']} cores of {others['processor']}".replace("(R)", ""),
        fontsize=10, x=0.01, ha="left",
    )  # fmt: skip
    return figure


def described(row: dict) -> str:
    if row["project"] != "ours" and "bf16" not in row["name"] and row["precision"] == "fp32":
        return f"{row['name']} (fp32)"
    return row["name"]


def learning(plt, muon: dict, muon_sweep: dict):
    """Validation loss over tokens, three seeds each, and at the end over the learning rate."""
    figure, axes = plt.subplots(2, len(muon), figsize=(9, 7), layout="constrained")
    for (upper, lower), name in zip(axes.T, muon, strict=True):
        curves(upper, muon[name])
        upper.set_title(title(muon[name], name), loc="left", fontsize=10, fontweight="bold")
        sweep(lower, muon_sweep[name])
    axes[0][0].set_ylabel("validation loss, nats per byte")
    axes[1][0].set_ylabel("validation loss at the end")
    return figure


def optimizer_of(row: dict, shared: dict) -> str:
    return row["settings"].get("optimizer.name") or shared["optimizer.name"]


def title(found: dict, name: str) -> str:
    shape = found["settings"]
    return f"{name}: {shape['model.num_layers']} layers of width {shape['model.emb_dim']}"


def curves(axis, found: dict) -> None:
    final = {}
    for row in found["rows"]:
        optimizer = optimizer_of(row, found["settings"])
        final[optimizer] = row["mean"]
        for index, points in enumerate(row["curves"]):
            tokens, values = zip(*points, strict=True)
            label = f"{NAMES[optimizer]}, {len(row['curves'])} seeds" if index == 0 else None
            millions = [count / 1e6 for count in tokens]
            axis.plot(millions, values, color=COLOURS[optimizer], lw=1.2, label=label)
    goal = final["adamw"]
    axis.axhline(goal, color=COLOURS["adamw"], lw=0.8, ls=":")
    axis.set_ylim(top=goal + 0.9)
    axis.set_xlim(left=0)
    axis.set_xlabel("million tokens")
    axis.grid()
    axis.legend(loc="upper right")


def sweep(axis, found: dict) -> None:
    """For each learning rate the best of what else was swept."""
    best: dict[str, dict[float, float]] = {}
    tokens = {}
    for row in found["rows"]:
        rate, values = row["settings"]["optimizer.lr"], row["values"]
        optimizer = optimizer_of(row, found["settings"])
        tokens[optimizer] = row["tokens"]
        of = best.setdefault(optimizer, {})
        of[rate] = min(of.get(rate, float("inf")), statistics.fmean(values))
    for optimizer, of in sorted(best.items()):
        rates = sorted(of)
        losses = [of[rate] for rate in rates]
        label = f"{NAMES[optimizer]}, {tokens[optimizer] / 1e6:.2f} M tokens"
        axis.plot(rates, losses, "o-", color=COLOURS[optimizer], lw=1.2, ms=4, label=label)
    axis.set_xscale("log", base=2)
    rates = [rate for of in best.values() for rate in of]
    doublings = math.ceil(math.log2(max(rates) / min(rates)) - 0.01)
    ticks = [min(rates) * 2**n for n in range(doublings + 1)]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_xlabel("learning rate")
    axis.grid()
    axis.legend()


if __name__ == "__main__":
    main()
