"""The data of a page: statistics of each prompt, predictions, norms and names of heads."""

import json

import numpy as np
from helpers.pages import HISTORY, PROMPTS, VOCABULARY, a_run, unpacked

from clearhead.lens.heads import ALL_NAMES, head_table
from clearhead.lens.probe import uniform_values


def test_details_of_a_frame():
    run, step = a_run(), 80
    (frame,) = [frame for frame in run.data["frames"] if frame["step"] == step]
    details, true = json.loads(unpacked(frame["details"])), run.frames[step]
    for found, wanted in zip(details["statistics"], true.of_prompts, strict=True):
        for key, values in wanted.items():
            known = np.array(found[key], float)  # None becomes NaN
            np.testing.assert_allclose(known, values.ravel(), atol=5e-5, err_msg=key)
    predicted = details["predictions"]
    assert set(predicted["tokens"]) <= {f"<{token}>" for token in range(VOCABULARY)}
    for found, (wanted,) in zip(predicted["of_prompts"], true.predictions, strict=True):
        assert found["layers"] == []
        np.testing.assert_allclose(found["losses"], wanted.losses, atol=5e-5)
        np.testing.assert_allclose(found["probabilities"], wanted.probabilities, atol=5e-5)
        texts = [[predicted["tokens"][place] for place in row] for row in found["tokens"]]
        assert texts == [[f"<{token}>" for token in row] for row in wanted.token_ids]
    codes = np.frombuffer(unpacked(frame["norms"]), np.uint8)
    for prompt, norms, largest in zip(
        PROMPTS, true.value_norms, details["largest_norms"], strict=True
    ):
        raw, codes = np.split(codes, [norms.size])
        scales = np.array(largest).reshape(*norms.shape[:2], 1)
        found = (raw.reshape(norms.shape) / 255) ** 2 * scales
        np.testing.assert_allclose(found, norms, atol=0.01, err_msg=prompt.name)
    assert not len(codes)


def test_history_has_names_at_all_steps():
    """They are the names of the table of heads; also from which step on a head has its name."""
    run = a_run()
    history = json.loads(unpacked(run.data["history"]))
    assert history["name_steps"] == list(HISTORY)
    assert [name["key"] for name in run.data["names"]] == list(ALL_NAMES)
    for row in head_table(list(run.rows.values()), uniform_values(PROMPTS)):
        index = row["layer"] * run.data["heads"] + row["head"]
        names = [ALL_NAMES[of_heads[index]] for of_heads in history["names"]]
        assert names[-1] == row["name"]
        if row["name"]:
            since = HISTORY.index(row["since_step"])
            assert set(names[since:]) == {row["name"]}
            assert since == 0 or names[since - 1] != row["name"]
    assert len({name for of_heads in history["names"] for name in of_heads}) > 1
    for step, losses in zip(history["steps"], history["losses"], strict=True):
        for found, wanted in zip(losses, run.rows[step].losses, strict=True):
            np.testing.assert_allclose(found, wanted, atol=5e-5)
