"""Training on shards is training on the texts, step for step; mixed, moved, damaged or changed.

Needs no network.
"""

import shlex

import numpy as np
import pytest
from helpers import TEXT, TINY
from helpers.refusals import check_refusal
from helpers.runs import assert_same, rows, stop_behind, weights
from helpers.texts import prepare, write_collection, write_source

from errors import DataError
from tokens import END_OF_TEXT
from tokens.shards import HEADER_BYTES
from tokens.stream import BLOCK_BYTES


def log(run) -> list[dict]:
    """All figures but the speed."""
    speed = "train/tokens_per_second"
    return [{k: v for k, v in row.items() if k != speed} for row in rows(run.folder)]


TEXTS = {
    "one": [("txt", [TEXT])],
    "marked": [("txt", [TEXT.replace("3 jumps", f"3 jumps{END_OF_TEXT}")])],
    "several": [
        ("txt", [TEXT[:1500]]),
        ("jsonl", [TEXT[1000:1400], "short", TEXT[1400:2200], ""]),
        ("parquet", [TEXT[2200:2300], TEXT[2300:]]),
    ],
}


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("name", list(TEXTS))
def test_training_on_shards_is_training_on_the_text(trainer, tmp_path, name, within):
    """Step for step, in every figure but the speed; the shards are many, and cut documents."""
    path = write_collection(tmp_path / "texts", TEXTS[name])
    manifest = prepare(path, tmp_path / "out", tokenizer="byte", shard_tokens=300)
    assert len(manifest["shards"]) > 5
    settings = [f"data.within_documents={within}", "trainer.max_steps=6", "data.val_fraction=0.2"]
    direct = trainer(f"data.path={path}", *settings)
    direct.train()
    shards = trainer("data=shards", f"data.path={tmp_path / 'out'}", *TINY, *settings)
    assert len(shards.train_set) == len(direct.train_set)
    assert len(shards.val_set) == len(direct.val_set)
    shards.train()
    assert [row["step"] for row in log(shards)] == list(range(7))
    assert log(shards) == log(direct)
    assert_same(weights(shards), weights(direct))


def test_the_command_that_is_recommended_works(command, tmp_path, text_file):
    arguments = [f"data.path={text_file}", "out=out", "data.tokenizer=byte", "shard_tokens=900"]
    told = command("scripts.prepare_data", *arguments).stdout.splitlines()[-1]
    told = shlex.split(told.removeprefix("train on them: "))
    assert told[:2] == ["python", "train.py"]
    tiny = [s for s in TINY if s != "data.tokenizer=byte"]
    done = command("train.py", *told[2:], *tiny, "data.val_fraction=0.1", "name=a")
    assert done.returncode == 0, done.stderr
    assert "run directory    runs/a" in done.stdout


@pytest.fixture
def mixture(tmp_path):
    """Two folders of shards, and their weights, as overrides."""
    for name, text in (("a", TEXT), ("b", TEXT.upper()[:2000])):
        path = write_source(tmp_path / f"{name}.txt", [text])
        prepare(path, tmp_path / name, tokenizer="byte", shard_tokens=700)
    return [f"data.path=[{tmp_path}/a,{tmp_path}/b]", "data.weights=[0.7,0.3]"]


def test_a_mixture_of_shards_is_one_of_the_texts(trainer, tmp_path, mixture):
    settings = ["trainer.max_steps=6", mixture[1]]
    shards = trainer(mixture[0], *settings)
    shards.train()
    direct = trainer(f"data.path=[{tmp_path}/a.txt,{tmp_path}/b.txt]", *settings)
    direct.train()
    assert log(shards) == log(direct)
    drawn = [w for step in range(10) for w in shards.feed.order.windows(step)]
    share = np.mean(np.array(drawn) < shards.train_set.sizes[0])
    assert share == pytest.approx(0.7, abs=0.02)


def test_a_mixture_goes_on_bit_for_bit(trainer, mixture):
    settings = [*mixture, "model.dropout=0.2", "trainer.max_steps=6", "trainer.save_every=3"]
    whole = trainer("name=whole", *settings)
    whole.train()
    half = trainer("name=half", *settings)
    stop_behind(half, 3)
    rest = trainer("name=half", *settings)
    assert rest.state.step == 3
    rest.train()
    assert_same(weights(rest), weights(whole))
    wanted = {row["step"]: row for row in log(whole) if row["step"] > 3}
    assert {row["step"]: row for row in log(rest) if row["step"] > 3} == wanted


LONG = (
    "The ferry bell at the top of the steps rang twice, and nobody came.\n" * 35_000
)  # two blocks


@pytest.fixture
def stopped(trainer, tmp_path):
    """A run on shards of two blocks of checksums, stopped at step 2; stopped(path) goes on."""
    path = write_source(tmp_path / "long.txt", [LONG])
    prepare(path, tmp_path / "out", tokenizer="byte")
    assert (tmp_path / "out" / "shard_00000_00.bin").stat().st_size > BLOCK_BYTES

    def go_on(path, *overrides):
        run = trainer(f"data.path={path}", "name=a", "trainer.eval_windows=2", *overrides)
        run.train()
        return run

    go_on(tmp_path / "out", "trainer.max_steps=2")
    return go_on


@pytest.mark.parametrize("place", [HEADER_BYTES + 2, BLOCK_BYTES, BLOCK_BYTES + 1000])
def test_a_damaged_shard_is_found_before_the_run_goes_on(stopped, tmp_path, place):
    shard = tmp_path / "out" / "shard_00000_00.bin"
    with open(shard, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    log = tmp_path / "runs" / "a" / "metrics.jsonl"
    before = log.read_bytes()
    with pytest.raises(DataError) as caught:
        stopped(tmp_path / "out", "trainer.max_steps=4")
    block = place // BLOCK_BYTES * BLOCK_BYTES
    size = min(BLOCK_BYTES, shard.stat().st_size - block)
    cause = f"checksum mismatch in the {size} bytes from byte {block} on (manifest.json)"
    check_refusal(caught.value, f"data.path={shard}", cause, "prepare or copy it anew")
    assert log.read_bytes() == before


@pytest.mark.parametrize("block", [0, 1])
def test_shards_of_a_changed_text_are_refused(stopped, tmp_path, block):
    place = 100 if block == 0 else len(LONG) - 100
    changed = LONG[:place] + "X" + LONG[place + 1 :]
    path = write_source(tmp_path / "changed.txt", [changed])
    prepare(path, tmp_path / "new", tokenizer="byte")
    with pytest.raises(DataError) as caught:
        stopped(tmp_path / "new", "trainer.max_steps=4")
    cause = f"shard_00000_00.bin is another from byte {block * BLOCK_BYTES} on than the one that "
    cause += "the checkpoint was trained on"
    check_refusal(caught.value, f"data.path={tmp_path}/new", cause, "restore the data")


def test_shards_of_another_number_are_refused(stopped, tmp_path):
    prepare(tmp_path / "long.txt", tmp_path / "new", tokenizer="byte", shard_tokens=1_000_000)
    with pytest.raises(DataError, match="than the one that the checkpoint was trained on"):
        stopped(tmp_path / "new", "trainer.max_steps=4")


def test_moved_shards_go_on(stopped, tmp_path):
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    run = stopped(tmp_path / "elsewhere", "trainer.max_steps=4")
    assert [row["step"] for row in log(run)] == [0, 1, 2, 3, 4]
