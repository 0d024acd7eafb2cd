"""Compares training runs: a table with one row for each combination of settings.

    python train.py -m optimizer=adamw,muon optimizer.lr=3e-3,1e-2 seed=0,1,2
    python -m scripts.compare runs='runs/*' metric=val/bits_per_byte

Runs that differ only in their seed are one row, with the mean and its standard error. Settings that
differ are columns. The row with the best metric is first. A line below the table says if texts or
tokenizers differ: then losses are not comparable; val/bits_per_byte is comparable between
tokenizers. A metric of the heads is compared in the same way: metric=attention_best/induction.
Reads run.json and metrics.jsonl of each run.
"""

from pydantic import Field

from clearhead.config.command_line import OutFile, ScriptConfig, settings_command, write_out
from clearhead.config.schema import Name, Names
from clearhead.errors import refuse
from clearhead.output.comparison import matching_paths, read_all, summarize, table

SWEEPS = "multirun"  # folder of the sweep directories in runs_dir


class CompareConfig(ScriptConfig):
    """python -m scripts.compare runs='runs/*' [metric=METRIC] [out=FILE.json]

    Prints a table: one row for each combination of settings, averaged over seeds, best first.
    """

    runs: Names = Field("runs/*", description="run directories: a glob pattern, or [A,B,...]")
    metric: Name = Field("val/loss", description="metric of metrics.jsonl to compare")
    out: OutFile = Field("", description="JSON file for the results")


@settings_command(CompareConfig)
def main(settings: CompareConfig) -> None:
    patterns = [settings.runs] if isinstance(settings.runs, str) else settings.runs
    found = {pattern: matching_paths(pattern) for pattern in patterns}
    hint = "use runs='runs/*' in the directory in which train.py was started"
    missing = [name for name, paths in found.items() if not paths]
    refuse([("runs", name, "directory not found", hint) for name in missing])
    folders = dict.fromkeys(path for paths in found.values() for path in paths if path.is_dir())
    runs = read_all([folder for folder in folders if folder.name != SWEEPS], settings.metric)
    if not runs:
        reason, hint = "no run has this metric", "use a number of metrics.jsonl, such as val/loss"
        refuse([("metric", settings.metric, reason, hint)])
    rows = summarize(runs, settings.metric)
    print(table(rows, settings.metric))
    if settings.out:
        write_out(settings.out, {"metric": settings.metric, "rows": rows})


if __name__ == "__main__":
    main()
