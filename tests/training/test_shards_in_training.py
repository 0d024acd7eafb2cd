"""Training on shards gives the same numbers as training on the texts; mixtures of shards, moved,
damaged and changed shards.

Needs no network.
"""

import shlex

import numpy as np
import pytest
from helpers import TEXT, TINY
from helpers.refusals import refused
from helpers.runs import assert_same, rows, stop_behind, weights
from helpers.texts import prepare, write_collection, write_source

from errors import DataError
from scripts.prepare_data import main as prepare_main
from tokens import END_OF_TEXT
from tokens.shards import HEADER_BYTES
from tokens.stream import BLOCK_BYTES
from train import main as train_main


def log(run) -> list[dict]:
    """The rows of metrics.jsonl without the speed."""
    speed = "train/tokens_per_second"
    return [{k: v for k, v in row.items() if k != speed} for row in rows(run.folder)]


MARKED = TEXT.replace("3 jumps", f"3 jumps{END_OF_TEXT}")
TEXTS = [("txt", [TEXT[:1500]]), ("jsonl", [TEXT[1000:1400], "short", MARKED[1400:2200], ""])]
TEXTS += [("parquet", [TEXT[2200:2300], TEXT[2300:]])]


@pytest.mark.parametrize("texts", [[("txt", [MARKED])], TEXTS], ids=["one", "several"])
@pytest.mark.parametrize("within", [False, True])
def test_training_on_shards_equals_training_on_the_text(trainer, tmp_path, texts, within):
    """In every number of every step but the speed, with shards that end within documents."""
    path = write_collection(tmp_path / "texts", texts)
    manifest = prepare(path, tmp_path / "out", tokenizer="byte", shard_tokens=300)
    assert len(manifest["shards"]) > 5
    settings = [f"data.within_documents={within}", "data.val_fraction=0.2"]
    direct = trainer(f"data.path={path}", *settings)
    direct.train()
    shards = trainer("data=shards", f"data.path={tmp_path / 'out'}", *TINY, *settings)
    assert len(shards.train_set) == len(direct.train_set)
    assert len(shards.val_set) == len(direct.val_set)
    shards.train()
    assert [row["step"] for row in log(shards)] == list(range(5))
    assert log(shards) == log(direct)
    assert_same(weights(shards), weights(direct))


def test_printed_command_trains_on_the_shards(in_process, tmp_path, text_file):
    arguments = [
        f"data.path={text_file}",
        "out=out",
        "data.tokenizer=byte",
        "shard_tokens=900",
        "workers=1",
    ]
    printed = in_process(prepare_main, tmp_path, *arguments)[1].splitlines()[-1]
    words = shlex.split(printed[printed.index("python ") :])
    assert words[:2] == ["python", "train.py"]
    tiny = [s for s in TINY if s != "data.tokenizer=byte"]
    code, _, errors = in_process(
        train_main, tmp_path, *words[2:], *tiny, "data.val_fraction=0.1", "name=a"
    )
    assert code == 0, errors
    assert rows(tmp_path / "runs" / "a")[-1]["step"] == 4


def test_mixture_of_shards_equals_the_mixture_of_texts(trainer, tmp_path):
    """And a resumed run equals one that was not interrupted."""
    for name, text in (("a", TEXT), ("b", TEXT.upper()[:2000])):
        path = write_source(tmp_path / f"{name}.txt", [text])
        prepare(path, tmp_path / name, tokenizer="byte", shard_tokens=700)
    settings = ["data.weights=[0.7,0.3]", "model.dropout=0.2", "trainer.save_every=2"]
    shards = [f"data.path=[{tmp_path}/a,{tmp_path}/b]", *settings]
    whole = trainer("name=whole", *shards)
    whole.train()
    drawn = [w for step in range(10) for w in whole.feed.order.windows(step)]
    share = np.mean(np.array(drawn) < whole.train_set.sizes[0])
    assert share == pytest.approx(0.7, abs=0.02)

    direct = trainer(f"data.path=[{tmp_path}/a.txt,{tmp_path}/b.txt]", *settings)
    direct.train()
    assert log(whole) == log(direct)

    stop_behind(trainer("name=half", *shards), 2)
    rest = trainer("name=half", *shards)
    assert rest.state.step == 2
    rest.train()
    assert_same(weights(rest), weights(whole))
    assert [row for row in log(rest) if row["step"] > 2] == log(whole)[3:]


LINE = "The ferry bell at the top of the steps rang twice, and nobody came.\n"
LONG = LINE * (BLOCK_BYTES // 2 // len(LINE) + 500)  # tokens of two blocks


def test_resume_with_moved_damaged_or_changed_shards(trainer, tmp_path, subtests):
    """Shards of two blocks of checksums. Moved ones are the same. Damaged and changed ones are
    refused before the run goes on."""
    path = write_source(tmp_path / "long.txt", [LONG])
    prepare(path, tmp_path / "out", tokenizer="byte")

    def train(folder, steps):
        settings = [f"trainer.max_steps={steps}", "trainer.eval_windows=2", "name=a"]
        run = trainer(f"data.path={folder}", *settings)
        run.train()
        return run

    train(tmp_path / "out", 2)
    metrics = tmp_path / "runs" / "a" / "metrics.jsonl"
    before = metrics.read_bytes()
    shard = tmp_path / "out" / "shard_00000_00.bin"
    whole = shard.read_bytes()
    assert BLOCK_BYTES < len(whole) < 2 * BLOCK_BYTES
    for place in (HEADER_BYTES + 2, BLOCK_BYTES, BLOCK_BYTES + 1000):
        block = place // BLOCK_BYTES * BLOCK_BYTES
        shard.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with subtests.test(place=place):
            with refused(DataError, "data.path", shard, 3) as caught:
                train(tmp_path / "out", 4)
            size = min(BLOCK_BYTES, len(whole) - block)
            assert f" {size} bytes from byte {block} " in caught.value.reason
    shard.write_bytes(whole)

    changes = [("first block", {100: "X"}, {}), ("last block", {len(LONG) - 100: "X"}, {})]
    changes += [("number of shards", {}, {"shard_tokens": 1_000_000})]
    for number, (change, letters, recipe) in enumerate(changes):
        text = list(LONG)
        for place, letter in letters.items():
            text[place] = letter
        changed = write_source(tmp_path / f"{number}.txt", ["".join(text)])
        prepare(changed, tmp_path / f"{number}", tokenizer="byte", **recipe)
        path = tmp_path / f"{number}"
        with subtests.test(change), refused(DataError, "data.path", path, 3) as caught:
            train(path, 4)
        assert "shard_00000_00.bin" in caught.value.reason
        assert number != 1 or f"{BLOCK_BYTES}" in caught.value.reason
    assert metrics.read_bytes() == before

    (tmp_path / "out").rename(tmp_path / "elsewhere")
    run = train(tmp_path / "elsewhere", 4)
    assert [row["step"] for row in log(run)] == [0, 1, 2, 3, 4]
