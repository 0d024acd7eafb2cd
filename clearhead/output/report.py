"""What the page of a run shows besides its heads: losses, samples and settings; and the page.

    write_run_page(Path("runs/first"), state="finished")  # runs/first/run.html

Both are made from the files in the run directory, can be made at any time, and omit what is
missing. headlens/page/training.js draws what `training_data` returns.
"""

import itertools
import math
import re
import shlex
import statistics
import time
from html import escape
from pathlib import Path

from clearhead.checkpoint.run_directory import CONFIG_YAML, final_validation
from clearhead.config.stored import settings_of
from clearhead.config.yaml_files import flat
from clearhead.errors import sanitize
from clearhead.files import atomic_write, read_bounded, read_rows
from clearhead.output.charts import (
    KEYS,
    Points,
    charts,
    curves,
    finite,
    minimum_before_rise,
    number,
    points_of,
)
from clearhead.output.console import duration
from headlens import formatted, rounded

RUN_HTML = "run.html"
MAX_CONFIG = 2**20  # bytes; a larger file is ignored
ROWS = (*KEYS, "train/tokens", "train/mfu")  # of metrics.jsonl
# Keys of starts.jsonl, as the page calls them.
ENVIRONMENT = {
    "time": "started",
    "device": "device",
    "processor": "processor",
    "ranks": "ranks",
    "threads": "threads",
    "python": "Python",
    "torch": "PyTorch",
    "cuda": "CUDA",
    "numpy": "NumPy",
    "system": "system",
}


def write_run_page(folder: Path, state: str) -> Path:
    """Writes folder/run.html; returns its path. state: running, stopped or finished."""
    from headlens import folder_page  # imports torch, which the other functions do not need

    rows = read_rows(folder / "metrics.jsonl", *ROWS)
    training = training_data(folder, rows)
    max_steps = flat(settings_of(folder) or {}).get("trainer.max_steps")
    # The page stays as it is if the run is killed.
    now = f"training at {time.strftime('%Y-%m-%d %H:%M')}" if state == "running" else state
    training["state"] = progress(now, rows, max_steps)
    page = folder_page(
        folder / "attention",
        sanitize(folder.resolve().name),
        curves=curves(rows),
        training=training,
    )
    atomic_write(folder / RUN_HTML, page.encode("utf-8", "backslashreplace"))
    return folder / RUN_HTML


def training_data(folder: Path, rows: list[dict]) -> dict:
    """Returns losses, samples and settings of a run as texts. rows: of metrics.jsonl."""
    starts = read_rows(folder / "starts.jsonl")
    loss = validation_loss(folder, rows)
    samples = read_rows(folder / "samples.jsonl", "prompt", "text")
    return {
        "result": result(rows, loss),
        "facts": facts(rows, starts, loss),
        "charts": charts(rows, eval_windows(folder)),
        "samples": [sample(row) for row in reversed(samples)],
        "command": command(folder, starts),
        "environment": environment(starts),
        "settings": sanitize(config_yaml(folder)),
    }


def config_yaml(folder: Path) -> str:
    try:
        return read_bounded(folder / CONFIG_YAML, MAX_CONFIG).decode("utf-8", "replace")
    except OSError:
        return ""


def progress(state: str, rows: list[dict], max_steps: object) -> str:
    """Returns the state of a run in words: "running, step 120 of 400"."""
    if not rows:
        return f"{state}, before the first step was logged"
    step = rows[-1]["step"]
    of = f" of {max_steps:,}" if state != "finished" and isinstance(max_steps, int) else ""
    return f"{state}, step {step:,}{of}"


def eval_windows(folder: Path) -> str:
    """Returns on how many windows a validation during the training is, "" if that is unknown."""
    windows = flat(settings_of(folder) or {}).get("trainer.eval_windows")
    return f"on up to {windows:,} windows" if isinstance(windows, int) else ""


def validation_loss(folder: Path, rows: list[dict]) -> dict:
    """Returns the validation loss that the page names, {} without one: the lowest if it has risen
    since; else that of the validation at the end, which has more windows; else the last.

    {"loss", "step", "where": the step and the windows in words}, and if they are known "error"
    (standard error), "bits_per_byte", "accuracy", "risen": whether it has risen since.
    """
    if not (losses := finite(points_of(rows, "val/loss"))):
        return {}
    lowest = minimum_before_rise(losses)
    step, loss = lowest or losses[-1]
    found: dict = {"loss": loss, "step": step, "risen": lowest is not None}
    final = final_validation(folder, rows[-1]["step"])
    if not lowest and not math.isnan(at_end := number(final.get("loss"))):
        where = f"at the end, on {number(final.get('windows')):,.0f} windows"
        found |= {"loss": at_end, "where": where}
        others = {"error": final.get("loss_error")}
        others |= {key: final.get(key) for key in ("bits_per_byte", "accuracy")}
    else:
        found["where"] = ", ".join(filter(None, [f"at step {step:,}", eval_windows(folder)]))
        keys = ("bits_per_byte", "accuracy")
        others = {key: dict(points_of(rows, f"val/{key}")).get(step) for key in keys}
    others = {key: number(value) for key, value in others.items()}
    return found | {key: value for key, value in others.items() if not math.isnan(value)}


def result(rows: list[dict], found: dict) -> str:
    """Returns the loss in a sentence, "" without one. found: of validation_loss."""
    training = finite(points_of(rows, "train/loss"))
    if found:
        first = finite(points_of(rows, "val/loss"))[0]
        name, step, loss = "validation", found["step"], found["loss"]
    elif training:
        first, (step, loss), name = training[0], training[-1], "training"
    else:
        return ""
    verb = "was lowest at" if found.get("risen") else "is"
    text = f"The {name} loss {verb} {rounded(loss, 4)} nats per token after {step:,} steps"
    if first[1] > loss:
        text += f", down from {rounded(first[1], 4)}"
    return f"{text}; {risen_since(step)}." if found.get("risen") else f"{text}."


def risen_since(step: int) -> str:
    """Returns what a user should know about a validation loss that has risen since this step."""
    helps = "more text helps, maybe also a smaller model or dropout"
    repeated = f"if the text was read several times, {helps}"
    return f"the validation loss has risen since step {step:,} ({repeated})"


def facts(rows: list[dict], starts: list[dict], found: dict) -> list[tuple[str, str, str]]:
    """Returns the main results: (name, value, note). found: of validation_loss."""

    def known(key: str) -> Points:
        return finite(points_of(rows, key))

    shown = []
    if found:
        error = f"± {rounded(found['error'], 4)} " if "error" in found else ""
        name = "lowest validation loss" if found["risen"] else "validation loss"
        shown.append((name, rounded(found["loss"], 4), error + found["where"]))
        if "bits_per_byte" in found:
            shown.append(
                (
                    "bits per byte",
                    rounded(found["bits_per_byte"], 3),
                    "the same loss, per byte of text",
                )
            )
        if "accuracy" in found:
            value = f"{found['accuracy']:.1%}"  # as in the chart
            shown.append(("accuracy", value, "of the tokens that can be predicted"))
        elif 0 <= found["loss"] < 100:
            value = formatted(math.exp(found["loss"]))
            shown.append(("perplexity", value, "e to the power of this loss"))
    if train := known("train/loss"):
        note = f"at step {train[-1][0]:,}, on the steps since the last row"
        shown.append(("training loss", rounded(train[-1][1], 4), note))
    for _, parameters in finite(points_of(starts, "parameters"))[-1:]:
        shown.append(("parameters", f"{parameters:,.0f}", ""))
    tokens, speeds = known("train/tokens"), known("train/tokens_per_second")
    if tokens:
        shown.append(("tokens trained on", f"{tokens[-1][1]:,.0f}", ""))
    if speeds:
        shown.append(("training time", training_time(tokens, dict(speeds)), "steps only"))
        median = statistics.median(value for _, value in speeds)
        shown.append(("tokens per second", f"{median:,.0f}", "median"))
    if shares := [value for _, value in known("train/mfu")]:
        shown.append(("FLOPs utilisation", f"{statistics.median(shares):.1%}", "median"))
    return shown


def training_time(tokens: Points, speeds: dict[int, float]) -> str:
    """Returns the time of all training steps. tokens: in total, at each step with a row; rows of
    validations and attention snapshots have no speed."""
    known = [(step, count) for step, count in tokens if speeds.get(step, 0) > 0]
    seconds = sum(
        (after - before) / speeds[step]
        for (_, before), (step, after) in itertools.pairwise([(0, 0.0), *known])
    )
    return duration(min(seconds, 1e9))


def sample(row: dict) -> dict[str, str]:
    """Returns a row of samples.jsonl; its text does not begin with the prompt."""
    prompt, text = (sanitize(str(row.get(key, ""))) for key in ("prompt", "text"))
    if not text.startswith(prompt):
        prompt = ""
    text = re.sub(r"\n\s*\n\s*\n", "\n\n", text[len(prompt) :].rstrip())  # no tall empty box
    return {"step": f"{row['step']:,}", "prompt": prompt, "text": text}


def sample_page(row: dict) -> str:
    """Returns a row of samples.jsonl as a page without scripts, for the W&B dashboard."""
    shown = {key: escape(value) for key, value in sample(row).items()}
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>sample</title>'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\"><style>:root { color-scheme: light dark } body { margin: 1em; "
        "max-width: 42rem; font: 1rem/1.5 system-ui, sans-serif } p { white-space: pre-wrap; "
        "overflow-wrap: anywhere; unicode-bidi: plaintext }</style>"
        f"<p>step {shown['step']}</p><p><b>{shown['prompt']}</b>{shown['text']}</p></html>"
    )


def command(folder: Path, starts: list[dict]) -> str:
    """Returns the command that trains the same run again, with another name: as it was typed, or
    with the settings of the run directory if it was part of a sweep or of another program."""
    typed = starts[0].get("command") if starts else None
    try:
        words = shlex.split(typed) if isinstance(typed, str) else []
    except ValueError:
        words = []
    is_typed = any(Path(word).name == "train.py" for word in words)
    if not is_typed or {"-m", "--multirun"} & {*words} or any("resume=" in w for w in words):
        words = ["python", "train.py", f"from={folder}"]
    return sanitize(shlex.join(word for word in words if not word.startswith("name=")), keep="")


def environment(starts: list[dict]) -> list[tuple[str, str]]:
    """Returns commit, machine and versions of the last start: (name, value)."""
    start = dict(starts[-1]) if starts else {}
    start["time"] = str(start.get("time", ""))[:16].replace("T", " ")
    shown = []
    if commit := start.get("commit"):
        changed = {False: ", with changes that are not committed"}.get(start.get("clean"), "")
        shown.append(("commit", f"{commit}{changed}"))
    shown += [(name, start[key]) for key, name in ENVIRONMENT.items() if start.get(key)]
    shown += [("starts", f"{len(starts)}: the run was resumed")] * (len(starts) > 1)
    return [(name, sanitize(str(value), keep="")) for name, value in shown]
