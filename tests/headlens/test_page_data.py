"""The data of a page: statistics of each prompt, predictions, norms and names of heads."""

import json

import numpy as np
import pytest
from helpers.loops import targets
from helpers.pages import HISTORY, PROMPTS, a_run, unpacked

from headlens import KINDS, STATISTICS, run_data
from headlens.heads import ALL_NAMES, NAMES, head_table
from headlens.recording import uniform_of


def test_details_of_a_frame():
    run, step = a_run(), 80
    (frame,) = [frame for frame in run.data["frames"] if frame["step"] == step]
    details, data = json.loads(unpacked(frame["details"])), run.frames[step]
    recorded, shown = data.details["predictions"], details.pop("predictions")
    assert details == {key: data.details[key] for key in details}
    assert shown["labels"] == recorded["tokens"]
    for prompt, of, was in zip(PROMPTS, shown["of_prompts"], recorded["of_prompts"], strict=True):
        assert (of["losses"], of["tokens"]) == (was["losses"], was["tokens"])
        likely = [[recorded["tokens"][token] for token in tokens] for tokens in of["tokens"]]
        for texts, hit, token in zip(likely, of["hits"], [*prompt.tokens[1:], None], strict=True):
            assert hit == (texts.index(token) if token in texts else -1)
    assert len(details["statistics"]) == len(shown["of_prompts"]) == 3
    assert unpacked(frame["weights"]) == b"".join(codes.tobytes() for codes in data.codes)
    assert unpacked(frame["norms"]) == b"".join(codes.tobytes() for codes in data.norms)


def test_losses_that_are_not_finite_are_omitted():
    """They are not JSON: a browser would show no page."""
    curves = {"validation loss": [(0, 2.5), (1, float("nan")), (2, float("inf")), (3, 1.5)]}
    found = run_data(list(a_run().frames.values())[-1:], curves=curves)["curves"]
    assert found == {"validation loss": [(0, 2.5), (3, 1.5)]}


def test_history_has_names_at_all_steps():
    """They are the names of the table of heads; also from which step on a head has its name."""
    run = a_run()
    history = json.loads(unpacked(run.data["history"]))
    assert history["name_steps"] == list(HISTORY)
    assert [name["key"] for name in run.data["names"]] == list(ALL_NAMES)
    for row in head_table(list(run.rows.values()), uniform_of(PROMPTS)):
        index = row["layer"] * run.data["heads"] + row["head"]
        names = [ALL_NAMES[of_heads[index]] for of_heads in history["names"]]
        assert names[-1] == row["name"]
        if row["name"]:
            since = HISTORY.index(row["since_step"])
            assert history["since"][-1][index] == since
            assert set(names[since:]) == {row["name"]}
            assert since == 0 or names[since - 1] != row["name"]
    assert len({name for of_heads in history["names"] for name in of_heads}) > 1
    for step, losses in zip(history["steps"], history["losses"], strict=True):
        for found, wanted in zip(losses, run.rows[step].losses, strict=True):
            np.testing.assert_allclose(found, wanted, atol=5e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_page_gets_all_about_a_name(name):
    """Also the key tokens to which its heads attend, by plain loops."""
    data = a_run().data
    (shown,) = [of for of in data["names"] if of["key"] == name]
    assert (shown["letter"], shown["colours"]) == (KINDS[name].letter, KINDS[name].colours)
    of_prompts = json.loads(unpacked(data["targets"]))
    for prompt, found in zip(PROMPTS, of_prompts, strict=True):
        wanted = targets(prompt.token_ids, prompt.tokens)
        for number in range(2, 9) if name == "offset" else [None]:
            of_queries = wanted["offset", number] if number else wanted[name]
            if prompt.period and STATISTICS[name].on == "texts":
                of_queries = None
            assert found.get(f"offset_{number}" if number else name) == of_queries
