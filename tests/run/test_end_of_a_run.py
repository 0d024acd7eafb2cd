"""The lines about heads at the end of a run."""

import re
import shlex

import pytest
from helpers import TINY
from helpers.runs import rows

import train

RUN = [*TINY, "data.path=text.txt", "name=a", "lens=default", "lens.every=4"]
PRINTED = r"^attention heads .*: (\S*python\S* .*)$"


@pytest.mark.parametrize("limit", [(), ("trainer.max_minutes=9", "trainer.max_steps=4")])
def test_without_a_named_head_the_printed_command_trains_longer(
    in_process, tmp_path, text_file, limit
):
    code, out, _ = in_process(train.main, tmp_path, *RUN, *limit)
    assert code == 0
    (command,) = re.findall(PRINTED, out, re.MULTILINE)
    code, out, _ = in_process(train.main, tmp_path, *shlex.split(command)[2:])
    assert code == 0
    steps = [row["step"] for row in rows(tmp_path / "runs" / "a")]
    assert steps == sorted({*steps})
    assert steps[-1] == 8
    assert len(re.findall(PRINTED, out, re.MULTILINE)) == 1
