"""Prompts that are not given are passages of the validation text, and stay those of the run."""

import json
import re

import numpy as np
import pytest
from helpers import TEXT, TINY
from helpers.refusals import refused
from helpers.runs import change_state
from helpers.settings import settings
from helpers.texts import prepare

import train
from clearhead.checkpoint import format as checkpoint
from clearhead.config import compose
from clearhead.config.stored import settings_of
from clearhead.errors import CheckpointError
from clearhead.run.lens_runner import choose_prompts
from clearhead.tokens.token_stream import TokenStream
from clearhead.tokens.tokenizer import get_tokenizer
from data import GPTDatasetV1
from headlens import DEFAULT_PROMPTS, read_snapshot

JAPANESE = "".join(
    f"美咲は{n}番目の鐘を鳴らした。源蔵は川を見て、川は待てと言ったと答えた。" for n in range(60)
)
OTHER = "".join(
    f"Street {n}: a slow horse with load {n * 5 % 11} walks under the bridge.\n" for n in range(60)
)


def prompts_of(config) -> list[str]:
    """All prompts: those of the lens, and that of the samples."""
    return [*config.lens.prompts, config.trainer.sample_prompt]


def check_prompts(config, text: str, limit: int = 32) -> None:
    """Checks that the prompts are parts of this text, and not longer than a window."""
    tokenizer = get_tokenizer(config.data.tokenizer)
    prompts = config.lens.prompts
    assert 1 <= len(set(prompts)) == len(prompts) <= 3
    assert prompts[0].startswith(config.trainer.sample_prompt)
    for prompt in prompts_of(config):
        assert prompt in text
        assert 0 < len(tokenizer.encode_ordinary(prompt)) <= limit


TEXTS = {"one line": TEXT.replace("\n", " "), "Japanese": JAPANESE}
# Other data: settings, and the text of the prompts. The validation text of TEXT is its last part.
HELD_BACK = TEXT[len(TEXT) * 3 // 4 :]
OTHERS = {
    "documents": (["data.path=rows.jsonl", "data.within_documents=true"], HELD_BACK),
    "val_path": (["data.path=train.txt", "data.val_path=other.txt"], OTHER),
    "shards": (["data.path=out"], OTHER),
    "mixture": (["data.path=[text.txt,other.txt]", "data.weights=[1,3]"], TEXT + OTHER),
    "without validation": (["data.path=other.txt", "data.val_fraction=0"], OTHER),
    "gpt2": (["data.path=other.txt", "data.tokenizer=gpt2", "model.vocab_size=50257"], OTHER),
}


@pytest.mark.parametrize("kind", ["text", *TEXTS, *OTHERS])
def test_prompts_are_passages_of_the_validation_text(make_run, tmp_path, kind):
    text = TEXTS.get(kind, TEXT)
    (tmp_path / "train.txt").write_text(text, encoding="utf-8")
    (tmp_path / "other.txt").write_text(OTHER, encoding="utf-8")
    rows = [json.dumps({"text": line}) for line in (OTHER + TEXT).splitlines()]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    manifest = prepare(tmp_path / "other.txt", tmp_path / "out", tokenizer="byte", shard_tokens=700)
    assert len(manifest["shards"]) > 3
    given, text = OTHERS.get(kind, (["data.path=train.txt"], text[len(text) * 3 // 4 :]))
    run = make_run(*given)
    check_prompts(run.config, text)
    assert settings_of(run.directory)["lens"]["prompts"] == run.config.lens.prompts
    assert make_run(*given).config.lens.prompts == run.config.lens.prompts


def test_generated_sequences_have_prompts(make_run):
    tiny = [text for text in TINY if text != "data.tokenizer=byte"]
    config = make_run(*tiny, "data=induction", "data.max_length=32", tiny=False).config
    for prompt in config.lens.prompts:
        assert re.fullmatch("[A-Za-z0-9]{31}", prompt)
        assert prompt[:15] == prompt[16:]


def test_given_prompts_are_kept(make_run):
    given = ["lens.prompts=[one, two words]", "trainer.sample_prompt=''"]
    assert prompts_of(make_run(*given).config) == ["one", "two words", ""]
    assert make_run("lens.prompts=[one]").config.trainer.sample_prompt in TEXT
    assert make_run("lens=induction", "lens.repeat_length=5").config.lens.prompts == []


def test_data_without_visible_text_have_the_prompts_of_the_lens():
    tokenizer = get_tokenizer("byte")
    for ids in ([256] * 99, [0] * 99, [0xFF] * 99, [0xE3] * 99):
        dataset = GPTDatasetV1(TokenStream([np.array(ids, np.uint16)], 257, 256), None, 32, 32)
        found = choose_prompts(dataset, tokenizer, 32)
        assert found == {"lens.prompts": [*DEFAULT_PROMPTS], "trainer.sample_prompt": ""}
    text = GPTDatasetV1("日本語の文。" * 99, get_tokenizer("byte"), 32, 32)
    assert choose_prompts(text, tokenizer, 2)["lens.prompts"] == [*DEFAULT_PROMPTS]  # no letter


def test_a_resumed_run_keeps_its_prompts(make_run, tmp_path):
    """The time-lapse needs equal prompts."""
    given = ("name=a", "lens=default", "lens.every=2", "lens.repeat_length=0")
    run = make_run(*given)
    train.fit(run)
    before = prompts_of(run.config)
    longer = "trainer.max_steps=6"
    for overrides in (("trainer.resume=runs/a", longer, "lens=often"), (*given, longer)):
        again = make_run(*overrides, tiny=overrides[0] == "name=a")
        assert prompts_of(again.config) == before
    train.fit(again)
    steps = sorted((again.directory / "attention").glob("*.npz"))
    assert len(steps) == 4
    texts = [[p.text for p in read_snapshot(path).prompts] for path in steps]
    assert texts == [before[:-1]] * 4
    rows = (again.directory / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert {json.loads(row)["prompt"] for row in rows} == {before[-1]}
    given = (*given, "trainer.max_steps=8", "lens.prompts=[new]")
    assert make_run(*given).config.lens.prompts == ["new"]  # on the command line


def test_damaged_prompts_of_a_checkpoint_are_refused(make_run):
    run = make_run("name=a")
    train.fit(run)
    changes = {"lens.prompts": [3, None], "trainer.sample_prompt": ["a"]}
    for path in (run.directory / "checkpoints").glob(f"*/{checkpoint.STATE}"):
        change_state(path.parent, **{f"settings.{key}": value for key, value in changes.items()})
    with refused(CheckpointError, "checkpoint", exit_code=3):
        make_run("name=a", "trainer.max_steps=6")


def test_a_new_run_with_the_settings_of_another_has_prompts_of_its_own_text(make_run, tmp_path):
    run = make_run("name=a", "lens=default")
    config = run.config
    run.closing.close()
    (tmp_path / "other.txt").write_text(OTHER, encoding="utf-8")
    assert prompts_of(compose(["from=runs/a", "seed=1"])) == prompts_of(config)
    check_prompts(make_run("from=runs/a", "data.path=other.txt", tiny=False).config, OTHER)
    make_run("name=b", "lens=induction", "lens.repeat_length=5").closing.close()
    assert compose(["from=runs/b", "data.path=other.txt"]).lens.prompts == []
    assert settings("lens.prompts=null").lens.prompts is None
