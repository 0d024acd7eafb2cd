"""The data of a page: statistics, predictions, norms and names of heads."""

import json

import numpy as np
import pytest
from helpers.pages import PROMPTS, a_run, unpacked

from headlens import run_data
from headlens.finding import findings
from headlens.heads import significances


def test_details_of_a_frame():
    run, step = a_run(), 80
    (frame,) = [frame for frame in run.data["frames"] if frame["step"] == step]
    details, data = json.loads(unpacked(frame["details"])), run.frames[step]
    recorded, shown = data.details["predictions"], details.pop("predictions")
    for key in details.keys() - {"heads"}:
        assert details[key] == data.details[key]
    assert details["heads"] == json.loads(json.dumps(findings(data)))
    assert shown["labels"] == recorded["tokens"]
    for prompt, of, was in zip(PROMPTS, shown["of_prompts"], recorded["of_prompts"], strict=True):
        assert (of["losses"], of["tokens"]) == (was["losses"], was["tokens"])
        likely = [[recorded["tokens"][token] for token in tokens] for tokens in of["tokens"]]
        for texts, hit, token in zip(likely, of["hits"], [*prompt.tokens[1:], None], strict=True):
            assert hit == (texts.index(token) if token in texts else -1)
    assert len(shown["of_prompts"]) == 3
    assert unpacked(frame["weights"]) == b"".join(codes.tobytes() for codes in data.codes)
    assert unpacked(frame["norms"]) == b"".join(codes.tobytes() for codes in data.norms)


def test_losses_that_are_not_finite_are_omitted():
    """They are not JSON: a browser would show no page."""
    curves = {"validation loss": [(0, 2.5), (1, float("nan")), (2, float("inf")), (3, 1.5)]}
    found = run_data(list(a_run().frames.values())[-1:], curves=curves)["curves"]
    assert found == {"validation loss": [(0, 2.5), (3, 1.5)]}


def test_significance_at_each_step():
    run = a_run()
    history = json.loads(unpacked(run.data["history"]))
    for step, found in zip(history["steps"], history["values"]["significance"], strict=True):
        wanted = significances(run.rows[step].values, run.snapshots[-1].uniform)
        assert found == pytest.approx(np.nanmax(wanted, axis=0).ravel(), abs=5e-5)
