"""What the page of a run shows besides its heads: losses, samples and settings; and the page.

    write_run_page(Path("runs/first"), state="finished")  # runs/first/run.html

Both are made from the files in the run directory, can be made at any time, and omit what is
missing. headlens/page/training.js draws what `training_data` returns.
"""

import functools
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
    charts,
    curves,
    finite,
    minimum_before_rise,
    number,
    points_of,
)
from clearhead.output.console import duration
from headlens import rounded

RUN_HTML = "run.html"
MAX_CONFIG = 2**20  # bytes; a larger file is ignored
ROWS = (*KEYS, "train/tokens")  # of metrics.jsonl
WHOLE = "{:,.0f}".format
HITS = "how often the most likely next token is right, of the predictable tokens"
OVERLAP = "validation_text_in_training_text"  # in starts.jsonl, such as "about 12 %"
IN_TRAINING_TEXT = "of the validation text also occurs in the training text"
SHOWN_SAMPLES = 4  # evenly spaced; the page folds the others away
LOSS = functools.partial(rounded, digits=4)


def write_run_page(folder: Path, state: str) -> Path:
    """Writes folder/run.html; returns its path. state: running, stopped or finished."""
    atomic_write(folder / RUN_HTML, run_page(folder, state))
    return folder / RUN_HTML


def run_page(folder: Path, state: str, model: dict | None = None) -> bytes:
    """Returns the page of a run. model: see play.py."""
    from headlens import folder_page  # imports torch, which the other functions do not need

    rows = read_rows(folder / "metrics.jsonl", *ROWS)
    training = training_data(folder, rows)
    settings = flat(settings_of(folder) or {})
    # The page stays as it is if the run is killed.
    now = f"training at {time.strftime('%Y-%m-%d %H:%M')}" if state == "running" else state
    known = [subject(settings, read_rows(folder / "starts.jsonl"))]
    known += [progress(now, rows, settings.get("trainer.max_steps"))]
    training["state"] = " · ".join(filter(None, known))
    page = folder_page(
        folder / "attention",
        sanitize(folder.resolve().name),
        curves=curves(rows),
        training=training,
        model=model,
    )
    return page.encode("utf-8", "backslashreplace")


def training_data(folder: Path, rows: list[dict]) -> dict:
    """Returns losses, samples and settings of a run as texts. rows: of metrics.jsonl."""
    starts = read_rows(folder / "starts.jsonl")
    loss = validation_loss(folder, rows)
    samples = read_rows(folder / "samples.jsonl", "prompt", "text")
    apart = (len(samples) - 1) / (SHOWN_SAMPLES - 1)
    shown = {round(number * apart) for number in range(SHOWN_SAMPLES)}  # first and last, too
    return {
        "result": result(rows, loss),
        "facts": facts(rows, starts, loss),
        "charts": charts(rows, eval_windows(folder)),
        "samples": [
            sample(row) | {"is_shown": number in shown} for number, row in enumerate(samples)
        ],
        "command": sanitize(shlex.join(["python", "train.py", f"from={folder}"]), keep=""),
        "environment": environment(starts),
        "settings": sanitize(config_yaml(folder)),
    }


def config_yaml(folder: Path) -> str:
    try:
        return read_bounded(folder / CONFIG_YAML, MAX_CONFIG).decode("utf-8", "replace")
    except OSError:
        return ""


def subject(settings: dict, starts: list[dict]) -> str:
    """Returns what a run trains: "GPT-2 with 842,752 parameters on my.txt", "" if it is unknown."""
    parameters = next((row.get("parameters") for row in starts), None)
    if not isinstance(parameters, int):
        return ""
    text = settings.get("data.path")
    text = Path(text).name if isinstance(text, str) else "generated sequences"
    return sanitize(f"GPT-2 with {parameters:,} parameters on {text}")


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

    {"loss", "step", "where": the step and the windows in words, "risen": whether it has risen
    since, "overlap": how much of the text is also in the training text, "" if little}, and if they
    are known "loss_error" (standard error), "bits_per_byte", "accuracy".
    """
    if not (losses := finite(points_of(rows, "val/loss"))):
        return {}
    lowest, found = minimum_before_rise(losses), final_validation(folder, rows[-1]["step"])
    step, loss = lowest or losses[-1]
    if lowest or math.isnan(number(found.get("loss"))):
        is_it = lambda row: row["step"] == step and number(row.get("val/loss")) == loss  # noqa: E731
        at_step = next(filter(is_it, rows))
        found = {key.removeprefix("val/"): value for key, value in at_step.items()}
        where = ", ".join(filter(None, [f"at step {step:,}", eval_windows(folder)]))
    else:
        where = f"at the end, on {number(found.get('windows')):,.0f} windows"
    keys = ("loss", "loss_error", "bits_per_byte", "accuracy")
    values = {key: number(found.get(key)) for key in keys}
    known = {key: value for key, value in values.items() if not math.isnan(value)}
    start = (read_rows(folder / "starts.jsonl") or [{}])[-1]
    overlap = sanitize(str(start.get(OVERLAP) or ""), keep="")
    return known | {"step": step, "where": where, "risen": lowest is not None, "overlap": overlap}


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
    bits = found.get("bits_per_byte")  # the unit that is the same with every tokenizer
    in_bits = f" ({rounded(bits, 3)} bits per byte)" if bits else ""
    text = f"The {name} loss {verb} {rounded(loss, 4)} nats per token{in_bits} after {step:,} steps"
    if first[1] > loss:
        text += f", down from {rounded(first[1], 4)}"
    if found.get("risen"):
        helps = "more text helps, maybe also a smaller model or dropout"
        text += f"; it has risen since (if the text was read several times, {helps})"
    if overlap := found.get("overlap"):
        text += f"; {overlap} {IN_TRAINING_TEXT}"
    return f"{text}."


def facts(rows: list[dict], starts: list[dict], found: dict) -> list[tuple[str, str, str]]:
    """Returns the main results: (name, value, note). found: of validation_loss."""

    def last(of: list[dict], key: str) -> float | None:
        return next((value for _, value in reversed(finite(points_of(of, key)))), None)

    note = f"± {rounded(found['loss_error'], 4)} " if "loss_error" in found else ""
    tokens, seconds = last(rows, "train/tokens"), None
    speeds = [value for _, value in finite(points_of(rows, "train/tokens_per_second"))]
    speed = statistics.median(speeds) if speeds else None
    if tokens and speed and speed > 0:
        seconds = min(tokens / speed, 1e9)
    table = (
        (
            "lowest validation loss" if found.get("risen") else "validation loss",
            found.get("loss"),
            LOSS,
            note + found.get("where", ""),
        ),
        ("bits per byte", found.get("bits_per_byte"), lambda bits: rounded(bits, 3), ""),
        ("accuracy", found.get("accuracy"), "{:.1%}".format, HITS),
        ("training loss", last(rows, "train/loss"), LOSS, "on the steps since the row before"),
        ("parameters", last(starts, "parameters"), WHOLE, ""),
        ("tokens trained on", tokens, WHOLE, ""),
        ("tokens per second", speed, WHOLE, "median"),
        ("training time", seconds, duration, "at this speed"),
    )
    return [(name, text(value), note) for name, value, text, note in table if value is not None]


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
        '<!doctype html><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\"><title>sample</title>"
        "<style>p { font: 1rem/1.5 sans-serif; white-space: pre-wrap; unicode-bidi: plaintext }"
        f"</style><p>step {shown['step']}</p><p><b>{shown['prompt']}</b>{shown['text']}</p>"
    )


def environment(starts: list[dict]) -> list[tuple[str, str]]:
    """Returns command, commit, machine and versions of the last start: (name, value)."""
    start = dict(starts[-1]) if starts else {}
    if start.pop("clean", None) is False:
        start["commit"] = f"{start.get('commit')}, with changes that are not committed"
    start |= {"starts": f"{len(starts)}: the run was resumed"} if len(starts) > 1 else {}
    return [
        (sanitize(key.replace("_", " "), keep=""), sanitize(str(value), keep=""))
        for key, value in start.items()
        if value is not None and key not in ("step", "parameters", OVERLAP)
    ]
