"""Training on shards gives the same results as training on the text files."""

import json
import shlex

import pytest
from helpers import TEXT, TINY
from helpers.refusals import refused
from helpers.runs import (
    assert_same,
    change_state,
    repeatable_rows,
    rows,
    train_past_checkpoint,
    weights,
)
from helpers.texts import prepare, write_collection, write_source

from clearhead.checkpoint.format import FORMAT
from clearhead.errors import DataError
from clearhead.tokens import END_OF_TEXT
from scripts.prepare_data import main as prepare_main
from train import fit
from train import main as train_main

TEXTS = [("txt", [TEXT[:1500]]), ("jsonl", [TEXT[1000:1400], END_OF_TEXT, TEXT[1400:2200], ""])]
TEXTS += [("parquet", [TEXT[2200:2300], TEXT[2300:]])]


@pytest.mark.parametrize("within", [False, True])
def test_training_on_shards_equals_training_on_the_text(make_run, tmp_path, within):
    """All metrics except speed are equal, also with shards that end within documents."""
    path = write_collection(tmp_path / "texts", TEXTS)
    manifest = prepare(path, tmp_path / "out", tokenizer="byte", shard_tokens=300)
    assert len(manifest["shards"]) > 5
    settings = [f"data.within_documents={within}", "data.val_fraction=0.2"]
    direct = make_run(f"data.path={path}", *settings)
    fit(direct)
    shards = make_run("data=shards", f"data.path={tmp_path / 'out'}", *TINY, *settings)
    fit(shards)
    assert repeatable_rows(shards.directory) == repeatable_rows(direct.directory)
    assert_same(weights(shards), weights(direct))


def test_printed_command_trains_on_the_shards(in_process, tmp_path, text_file):
    arguments = [f"data.path={text_file}", "out=out", "data.tokenizer=byte", "workers=1"]
    printed = in_process(prepare_main, tmp_path, *arguments)[1]
    words = shlex.split(printed[printed.rindex("python ") :])
    tiny = [s for s in TINY if s != "data.tokenizer=byte"]
    tiny += ["data.val_fraction=0.1", "name=a"]
    code, _, errors = in_process(train_main, tmp_path, *words[2:], *tiny)
    assert code == 0, errors
    assert rows(tmp_path / "runs" / "a")[-1]["step"] == 4


def test_mixture_of_shards_equals_the_mixture_of_texts(make_run, tmp_path):
    for name, text in (("a", TEXT), ("b", TEXT.upper()[:2000])):
        path = write_source(tmp_path / f"{name}.txt", [text])
        prepare(path, tmp_path / name, tokenizer="byte", shard_tokens=700)
    settings = ["data.weights=[0.7,0.3]", "model.dropout=0.2"]
    shards = [f"data.path=[{tmp_path}/a,{tmp_path}/b]", *settings]
    whole = make_run("name=whole", *shards)
    fit(whole)
    direct = make_run(f"data.path=[{tmp_path}/a.txt,{tmp_path}/b.txt]", *settings)
    fit(direct)
    assert repeatable_rows(whole.directory) == repeatable_rows(direct.directory)

    train_past_checkpoint(make_run("name=half", *shards), 2)
    (folder,) = (tmp_path / "runs" / "half" / "checkpoints").glob("step_*2")
    data = json.loads((folder / "state.json").read_text())["data"]
    change_state(folder, data=[[name, [checksum]] for name, checksum in data], format=3)
    with refused(DataError, "data.weights", [0.7, 0.3], 3):  # version 3 had another order
        make_run("name=half", *shards)
    change_state(folder, data=data, format=FORMAT)
    rest = make_run("name=half", *shards)
    assert rest.state.step == 2
    fit(rest)
    assert_same(weights(rest), weights(whole))
