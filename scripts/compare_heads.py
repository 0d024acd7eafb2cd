"""Finds the heads that several runs have in common, for example runs with different seeds.

    python -m scripts.compare_heads runs='[runs/a,runs/b,runs/c]' out=heads.csv

Reads the snapshots of the runs (attention/step_*.npz), so no model runs. An item of `runs` may also
be one snapshot file: scripts.inspect_attention writes one for any model. Heads of the same layer
are matched by the similarity of their attention maps, on the prompts that all runs have
(headlens/docs/reading.md). Prints a table of the matched heads, and writes all heads as CSV.
"""

import itertools
import operator
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from clearhead.config.command_line import OutFile, ScriptConfig, settings_command, write_out
from clearhead.config.schema import Names
from clearhead.errors import DataError, refuse, sanitize
from clearhead.output.comparison import markdown_table, matching_paths
from headlens import formatted

MAX_ROWS = 40  # of the printed table; the CSV file has all
HINT = "give runs of one shape with the same prompts; to compare other models, write snapshots "
HINT += "with python -m scripts.inspect_attention checkpoint=MODEL out=FILE.npz"


class CompareHeadsConfig(ScriptConfig):
    """python -m scripts.compare_heads runs='[runs/a,runs/b]' [out=heads.csv]

    Prints and writes which heads several runs have in common.
    """

    runs: Names = Field(description="runs, or snapshot files (.npz): [A,B,...] or a glob pattern")
    out: OutFile = Field("heads.csv", pattern=r"(?i)\.csv$", description="CSV file to write")


@settings_command(CompareHeadsConfig)
def main(settings: CompareHeadsConfig) -> None:
    from headlens import as_csv, matched_heads

    items = [settings.runs] if isinstance(settings.runs, str) else settings.runs
    found = [matching_paths(item) or [Path(item)] for item in items]
    paths = [data_of(path) for of_item in found for path in of_item]
    if len(paths) < 2:
        refuse([("runs", " ".join(items), "fewer than two runs", "use runs='[A,B]'")])
    try:
        rows, names, mean = matched_heads(paths)
    except ValueError as error:
        raise DataError("runs", " ".join(items), str(error), HINT) from error
    write_out(settings.out, as_csv(rows).encode("utf-8", "replace"))
    print(sanitize(summary(rows, names)))
    of_pairs = [mean[pair] for pair in itertools.combinations(range(len(names)), 2)]
    ends = dict.fromkeys(map(formatted, (min(of_pairs), max(of_pairs))))
    print(f"mean similarity of two runs: {' to '.join(ends)}")
    print(sanitize(f"all heads: {settings.out}"))


def data_of(path: Path) -> Path:
    """Returns the folder with the snapshots of a run, or the path of a snapshot file."""
    if not path.exists():
        raise DataError("runs", path, "not found", "give run directories or snapshot files")
    return path / "attention" if path.is_dir() else path


def summary(rows: Sequence[dict], names: Sequence[str]) -> str:
    """Returns a table of the groups with heads of several runs, and the numbers of heads.

    rows: of matched_heads. names: of all runs."""
    groups = [list(found) for _, found in itertools.groupby(rows, operator.itemgetter("group"))]
    matched = [group for group in groups if len(group) > 1]
    in_all = sum(len(group) == len(names) for group in groups)
    alone = len(groups) - len(matched)
    counts = (
        f"heads that occur in each of the {len(names)} runs: {in_all}; without a match: {alone}"
    )
    shown = [cells(group, names) for group in matched[:MAX_ROWS]]
    return f"{markdown_table(shown)}\n\n{counts}" if shown else counts


def cells(group: Sequence[dict], names: Sequence[str]) -> dict[str, str]:
    """Returns a row of the printed table from the rows of a group."""
    of_runs = {row["run"]: f"H{row['head']} {formatted(row['similarity'])}" for row in group}
    return {
        "layer": f"L{group[0]['layer']}",
        "name": group[0]["group_title"],
        **{name: of_runs.get(name, "") for name in names},
        "stability": formatted(group[0]["stability"]),
    }


if __name__ == "__main__":
    main()
