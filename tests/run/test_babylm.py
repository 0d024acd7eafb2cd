"""experiment=babylm: from a folder of texts to exported checkpoints at numbers of words."""

import json
import random
from itertools import pairwise

import pytest
from helpers.ranks import check_same_bytes

import train
from scripts.export_hf import main as export

FIRST, LAST = 2_000, 30_000  # the challenge: 1 million and 1 billion words
ARGUMENTS = (
    *("experiment=babylm", "data.path=texts", f"trainer.save_at_words=[{FIRST},{LAST}]"),
    *("data.vocab_size=1024", "data.max_length=64", "data.val_fraction=0", "model=gpt2-nano"),
    *("model.emb_dim=16", "model.num_heads=2", "model.num_layers=1", "model.context_length=128"),
    *("trainer.batch_size=8", "trainer.micro_batch_size=null", "trainer.sample_tokens=0"),
    *("trainer.keep=1", "trainer.save_every=7", "trainer.device=cpu", "lens=off", "wandb=off"),
)
# 1, 2, ..., 9 times each power of ten; the names are those of the challenge's scripts.
NAMES = {f"chck_{n / 1000:g}M": 1000 * n for n in (2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 30)}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with 1 MB of text in 20 files."""
    folder, rng = tmp_path_factory.mktemp("babylm"), random.Random(1)
    syllables = [a + b for a in "bdfgklmnprst" for b in ("a", "e", "i", "ou", "ä")]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(2000)]
    (folder / "texts").mkdir()
    for number in range(20):
        chosen = (rng.choice(words) + rng.choice([" ", " ", ", ", ".\n\n"]) for _ in range(7500))
        (folder / "texts" / f"{number}.txt").write_text("".join(chosen), encoding="utf-8")
    return folder


def test_from_texts_to_exported_checkpoints(home, in_process, monkeypatch):
    def die_at_step_40(run, step=train.train_step):
        if run.state.step == 40:
            raise RuntimeError("out of order")
        return step(run)

    with monkeypatch.context() as patch:
        patch.setattr(train, "train_step", die_at_step_40)
        assert in_process(train.main, home, *ARGUMENTS, "name=stopped")[0] != 0
    for name in ("stopped", "whole"):
        code, out, _ = in_process(train.main, home, *ARGUMENTS, f"name={name}")
        assert (code, "resuming after step" in out) == (0, name == "stopped")
        assert "trainer.max_steps" not in out  # the resumed run has no changed setting
    summary = (home / "runs" / "whole" / "summary.json").read_bytes()
    # Without the setting, the checkpoints would be removed.
    without = ("trainer.save_at_words=null", "trainer.max_steps=200", "name=whole")
    code, _, err = in_process(train.main, home, *ARGUMENTS, *without)
    assert (code, err.partition("=")[0]) == (2, "trainer.save_at_words")
    assert in_process(train.main, home, *ARGUMENTS, "name=whole")[0] == 0  # it has finished
    assert (home / "runs" / "whole" / "summary.json").read_bytes() == summary
    folder = home / "runs" / "whole" / "checkpoints"
    links = {path.name: path.resolve() for path in folder.iterdir() if path.is_symlink()}
    assert {*links} == {*NAMES, "last", "best"} - ({"best"} - {*links})
    assert links["chck_0.03M"] == links["last"]  # the run ends after the last number
    # No others are kept, and the stopped run has the same.
    steps = {path.name for path in folder.glob("step_*")}
    assert steps == {path.name for path in links.values()}
    check_same_bytes(home / "runs" / "stopped", home / "runs" / "whole")

    from transformers import AutoModelForCausalLM, AutoTokenizer

    for name in NAMES:
        checkpoint, out = f"checkpoint=runs/whole/checkpoints/{name}", f"out=exported/{name}"
        assert in_process(export, home, checkpoint, out)[0] == 0
    exported = home / "exported" / "chck_0.002M"
    tokenizer = AutoTokenizer.from_pretrained(exported)
    assert (tokenizer.pad_token_id, tokenizer.model_max_length) == (tokenizer.eos_token_id, 64)
    model = AutoModelForCausalLM.from_pretrained(exported)
    batch = tokenizer(["bada foumä", "bada"], padding="longest", return_tensors="pt")
    alone = model(**tokenizer("bada", return_tensors="pt")).logits[0]
    padded = model(**batch).logits[1, : len(alone)]
    assert alone.allclose(padded, atol=1e-5)

    texts = [path.read_text(encoding="utf-8") for path in (home / "texts").iterdir()]
    ids = tokenizer(texts)["input_ids"]
    per_token = sum(len(text.split()) for text in texts) / sum(1 + len(i) for i in ids)
    read = {}
    for name, wanted in NAMES.items():
        state = json.loads((links[name] / "state.json").read_text())
        read[name] = state["tokens"] * per_token
        assert wanted * 0.999 < read[name] < wanted + 1.001 * 8 * 64 * per_token
    assert all(a < b for a, b in pairwise(read.values()))


@pytest.mark.parametrize(
    ("data", "words"), [("induction", "[1e3,1e4]"), ("sample", "[1e4]"), ("sample", "[1e4,1e3]")]
)
def test_refused_settings(tmp_path, in_process, data, words):
    given = (f"data={data}", f"trainer.save_at_words={words}")
    code, _, err = in_process(train.main, tmp_path, *given)
    assert (code, err.partition("=")[0]) == (2, "trainer.save_at_words")


def test_a_text_without_words_is_refused(tmp_path, in_process):
    (tmp_path / "blank.txt").write_text(" \n" * 5000)
    given = (*ARGUMENTS, "data.path=blank.txt", "data.tokenizer=byte", "data.vocab_size=null")
    code, _, err = in_process(train.main, tmp_path, *given)
    assert (code, err.partition("=")[0]) == (2, "trainer.save_at_words")
