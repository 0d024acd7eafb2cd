"""A small run in which heads get their names one after the other, for tests of the page."""

import functools
import math

import torch

from headlens import run_data
from headlens.recording import record
from helpers import pages
from helpers.pages import STEPS, text_of

PERIOD = 6


REPEATED = pages.prompt("2-repeated", ["<bos>", *2 * list("abcdef")], period=PERIOD)


SOME = pages.prompt("1-words", ["One", " two", ",", " three", " four", " five", " six", "."])


# head: its name and the step from which it has this name
PLANTED = {(0, 0): ("diagonal", 40), (0, 2): ("previous_token", 40), (1, 1): ("induction", 80)}


def planted(name, prompt):
    """Returns a map whose rows attend to the target of a name with a weight that differs by row."""
    size = len(prompt.tokens)
    weights = torch.ones(size, size).tril()
    for query in range(1, size):
        copies = query > prompt.period > 0
        key = {"diagonal": query, "previous_token": query - 1}.get(name)
        if name == "two to four back" and query > 3:
            key = query - 2 - query % 3
        if name == "induction" and copies:
            key = query - prompt.period + 1
        if name == "previous_token in words" and not prompt.period:
            key = query - 1
        if not prompt.period and query > 3:
            key = {"separator": 2, "segment_start": 3}.get(name, key)  # of SOME
        if key is not None:
            weights[query, key] = (60 if query == 9 else 20) * query
    return weights / weights.sum(-1, keepdim=True)


def story_run(stages, steps=STEPS, repeated=REPEATED, text=SOME):
    """Returns a run in which heads get names and the second copy becomes predictable. Without the
    heads of any name, all tokens are equally probable."""
    frames, prompts = {}, (text, repeated)
    for step in steps:

        def capture_attention(token_ids, capture, step=step):
            prompt = text if token_ids == text.token_ids else repeated
            for layer in range(2):
                names = [stages.get((layer, head), ("", 0)) for head in range(3)]
                maps = [planted(n if step >= since else "", prompt) for n, since in names]
                capture(layer, torch.stack(maps))
            logits = torch.zeros(len(token_ids), 20)
            if prompt.period and step >= 80:
                for position in range(PERIOD + 1, 2 * PERIOD):
                    logits[position, token_ids[position + 1]] = 9.0
            return logits

        run = pages.capturing(capture_attention)
        frame = frames[step] = record(run, prompts, step, run_name="story", token_bytes=text_of)
        names = {name for name, since in stages.values() if step >= since}
        frame.details["without"] = {name: equal(frame.details["predictions"]) for name in names}
    rows = {step: frame.row for step, frame in frames.items()}
    curves = {
        "training loss": [(step, 3 - step / 60) for step in range(0, 121, 20)],
        "validation accuracy": [(0, 0.0), (60, 0.25), (120, 1.0)],
    }
    data = list(frames.values())
    run = run_data(data, list(rows.values()), curves) | {"stage": 80}
    return pages.PageRun(run, {}, rows, frames, data)


def equal(predictions):
    """Returns predictions in which all of 20 tokens are equally probable."""
    of_prompts = [
        one
        | {
            "losses": [math.log(20)] * len(one["losses"]),
            "probabilities": [[0.05] * len(row) for row in one["probabilities"]],
        }
        for one in predictions["of_prompts"]
    ]
    return predictions | {"of_prompts": of_prompts}


@functools.cache
def a_story():
    return story_run(PLANTED)
