"""The interactive page of attention heads: one self-contained HTML file.

    html = page_html([run_data(snapshots, rows)], title="my run")

assemble.py joins index.html, style.css and the JavaScript modules of this folder. The data is
JSON in a block that the browser does not execute; weights are one byte each, then compressed. The
Content-Security-Policy of the page forbids other scripts and all network requests. The data format
is described at the top of index.html.
"""

import base64
import dataclasses
import functools
import html
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ..assemble import assemble_html
from ..connected import Lines
from ..finding import (
    between_layers,
    events,
    findings,
    kind_title,
    opening,
    removed_heads,
    statuses,
    subject,
)
from ..heads import ALL_NAMES, KINDS, NAMES, significances
from ..heatmap import VIRIDIS
from ..history import Row, copying_step, evenly_spaced, json_values
from ..prompts import LABEL_RULES, Prompt, labels_of, signs_of, spaced, texts_of, visible
from ..rounding import DIGITS
from ..snapshot_data import SnapshotData
from ..statistics import STATISTICS
from ..story import story

VERSION = 6
MAX_HISTORY = 60  # maximum number of steps in the charts, in addition to the steps of the frames
TRAINER_CURVES = {"loss": "training loss", "eval_loss": "validation loss"}
# Of the scripts.
CONSTANTS = {"__VIRIDIS__": VIRIDIS, "__DIGITS__": json.dumps(DIGITS)}
CONSTANTS |= {"__LABELS__": json.dumps(LABEL_RULES)}


def run_data(
    snapshots: Sequence[SnapshotData],
    history: Sequence[Row] = (),
    curves: Mapping[str, list] | None = None,
    frames: Sequence[dict] | None = None,
    opening_prompt: int | None = None,
) -> dict:
    """Returns the data of one run.

    snapshots: with the same prompts, in the order of their steps. history: the statistics of all
    snapshots; without it, those of `snapshots`. curves: losses and accuracies of the training,
    {name: [(step, value)]}; NaN and inf are omitted. frames: instead of those of `snapshots`, see
    live_snapshots.py. opening_prompt: the prompt with which the page opens, by default that on
    which the head that tells most is clearest.
    """
    frames = frames or [frame_data(snapshot) for snapshot in snapshots]
    last = snapshots[-1]
    layers, heads = shape = last.row.names.shape
    history = [row for row in history if row.names.shape == shape] or [s.row for s in snapshots]
    steps = [frame["step"] for frame in frames]
    return {
        "name": visible(last.run),
        "layers": layers,
        "numbers": last.row.layers,
        "between": between_layers(last),
        "proof": last.proof,
        "heads": heads,
        "prompts": [
            {
                "name": prompt.name,
                "text": prompt.text,
                "title": prompt.title,
                "tokens": prompt.tokens[: prompt.shown],
                "texts": prompt.texts,
                "labels": prompt.labels[: prompt.shown],
                "signs": signs_of(prompt.tokens[: prompt.shown]),
                "truncated": prompt.truncated,
                "period": prompt.period,
            }
            for prompt in last.prompts
        ],
        "statistics": [
            {
                "key": key,
                "title": s.title,
                "description": s.description,
                "uniform": last.uniform[key],
                "is_name": key in NAMES,
                "named_from": KINDS[key].named_from if key in KINDS else None,
            }
            for key, s in STATISTICS.items()
            if key != "learned_sink" or any(np.isfinite(row.values[key]).any() for row in history)
        ],
        "names": [
            {"key": name} | dataclasses.asdict(KINDS[name]) | {"title": kind_title(name)}
            if name in KINDS
            else {"key": name}
            for name in ALL_NAMES
        ],
        "heads_at": _packed_json(
            [
                status | {"subject": subject(last, status, step if len(history) > 1 else None)}
                for step, status in zip(steps, statuses(history, steps), strict=True)
            ]
        ),
        "events": events(history),
        "opening": opening(last, opening_prompt),
        "text_name": last.contexts.text_name if last.contexts else "",
        "text": _text(last.contexts.tokens) if last.contexts else None,
        "history": _history(history, last.uniform, steps),
        # Trainer also logs losses that are NaN, which JSON does not have.
        "curves": {
            name: [(step, value) for step, value in points if math.isfinite(value)]
            for name, points in (curves or {}).items()
        },
        "stage": copying_step(last.prompts, history),
        "frames": list(frames),
        "removed": removed_heads(last.ablation, last.row) if last.ablation else None,
        "story": _packed_json(story(last, steps, history, curves)),
    }


def frame_data(snapshot: SnapshotData) -> dict:
    """Returns the attention and predictions of one step."""
    details = snapshot.details | {"heads": findings(snapshot)}
    for key in ("statistics", "model"):  # of each prompt; of the run
        details.pop(key, None)
    if predictions := details.get("predictions"):
        details["predictions"] = _predictions(predictions, snapshot.prompts)
    if without := details.get("without"):
        details["without"] = {
            name: _predictions(found, snapshot.prompts) | {"attention": found.get("attention")}
            for name, found in without.items()
        }
    if contexts := snapshot.contexts:
        ranges = Lines(contexts.tokens).ranges
        found = np.concatenate([contexts.cells, contexts.codes[..., None]], axis=-1)
        cells = [
            [[[*cell, *ranges(*cell[:3])] for cell in kind if cell[0] >= 0] for kind in of_head]
            for of_head in found.reshape(-1, *found.shape[2:]).tolist()
        ]
        details |= {"contexts": cells, "pairs": contexts.pairs}
    data = {"step": snapshot.step, "details": _packed_json(details)}
    for key, arrays in (("weights", snapshot.codes), ("norms", snapshot.norms)):
        if arrays:
            data[key] = _packed(b"".join(array.tobytes() for array in arrays))
    return data


def _text(windows: Sequence[Sequence[str]]) -> str:
    """Returns the windows of a text, packed."""
    texts, labels = [texts_of(spaced(w)) for w in windows], [labels_of(w) for w in windows]
    signs = signs_of([token for window in windows for token in window])
    return _packed_json({"texts": texts, "labels": labels, "signs": signs})


def _predictions(found: dict, prompts: Sequence[Prompt]) -> dict:
    """Returns the predictions of a snapshot with labels and, at each position, the place of the
    true next token among the most likely ones, or -1. found: see recording.py."""
    texts = found["tokens"]

    def with_hits(of_prompt: dict, tokens: Sequence[str]) -> dict:
        hits = [
            next((n for n, token in enumerate(likely) if texts[token] == following), -1)
            for likely, following in zip(of_prompt["tokens"], [*tokens[1:], None], strict=False)
        ]
        # Never 0: it has four decimals in the snapshot.
        chances = [[p or 1e-5 for p in likely] for likely in of_prompt["probabilities"]]
        return of_prompt | {"hits": hits, "probabilities": chances}

    of_prompts = zip(found["of_prompts"], prompts, strict=True)
    return {
        "labels": [labels_of([text])[0] for text in texts],
        "of_prompts": [with_hits(found, p.tokens[: p.shown]) for found, p in of_prompts],
    }


def _significance(values: Mapping[str, np.ndarray], uniform: Mapping) -> list:
    """Returns the significance of each head: the largest of all names. For JSON."""
    found = np.nan_to_num(significances(values, uniform), nan=-np.inf)
    return json_values(found.max(0).ravel())


def _history(rows: Sequence[Row], uniform: Mapping, included: Sequence[int]) -> str:
    """Returns the statistics at some steps, packed. included: these steps too."""
    kept = {*included, *(row.step for row in evenly_spaced(list(rows), MAX_HISTORY))}
    charted = [row for row in rows if row.step in kept]
    values = {key: [json_values(row.values[key].ravel()) for row in charted] for key in STATISTICS}
    values["significance"] = [_significance(row.values, uniform) for row in charted]
    errors = [{key: json_values(e.ravel()) for key, e in row.errors.items()} for row in charted]
    steps = [row.step for row in charted]
    return _packed_json({"steps": steps, "values": values, "errors": errors})


def trainer_curves(log: Sequence[dict]) -> dict[str, list[tuple[int, float]]]:
    """Returns the argument `curves` of run_data from the log_history of transformers' Trainer."""
    found = {
        name: [(row["step"], row[key]) for row in log if key in row]
        for key, name in TRAINER_CURVES.items()
    }
    return {name: points for name, points in found.items() if points}


def page_html(
    runs: Sequence[dict], title: str, training: dict | None = None, model: dict | None = None
) -> str:
    """Returns the page as HTML, for one run, for two runs to compare, or for `training` alone.
    runs: of run_data. training: losses, samples and settings, as training.js describes them. model:
    that of the run, into which people type, as embedded.js describes it."""
    content = {"version": VERSION, "runs": list(runs), "training": training}
    return _filled(content | ({"model": model} if model else {}), title)


def live_page(title: str, tabs: Sequence[str], token: str = "") -> str:
    """Returns the page for a server that sends its data (live_snapshots.py), also while the run
    trains. tabs: "runs", "heads", "training", "settings"; the list of runs has the first only, a
    model without a run the second. token: a page that sends a text proves with it that it is one of
    this server. Its Content-Security-Policy allows requests to this server."""
    content = {"version": VERSION, "live": True, "tabs": tabs, "token": token}
    return _filled(content, title, is_live=True)


def live_data(run: dict, snapshots: str) -> bytes:
    """Returns the JSON that a live page loads. run: of run_data. snapshots: their version."""
    return json.dumps({"version": VERSION, "runs": [run], "snapshots": snapshots}).encode()


def _filled(content: dict, title: str, is_live: bool = False) -> str:
    data = json.dumps(content)
    for character in "<>&":  # so that no text can end the data block
        data = data.replace(character, f"\\u{ord(character):04x}")
    before, after = _template(is_live)
    return before.replace("__TITLE__", html.escape(title)) + data + after


def _packed_json(value: object) -> str:
    return _packed(json.dumps(value).encode())


def _packed(raw: bytes) -> str:
    return base64.b64encode(zlib.compress(raw, 6)).decode()


@functools.cache
def _template(is_live: bool) -> tuple[str, str]:
    """Returns the HTML before the data and after the data, without a title."""
    html = assemble_html(Path(__file__).parent / "index.html", CONSTANTS)
    if is_live:
        html = html.replace("img-src data:", "img-src data: 'self'; connect-src 'self'", 1)
    before, after = html.split("__DATA__")
    return before, after
