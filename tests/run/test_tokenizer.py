"""data.tokenizer=bpe and DIR: which text it is trained on, where it is stored, and what uses it."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import TEXT, TINY
from helpers.refusals import printed_keys, refused, time_limit
from helpers.runs import assert_same, rows, run_command, train_in, train_past_checkpoint, weights
from helpers.texts import write_source
from safetensors.torch import load_file

import generate
import train
from clearhead.checkpoint.format import remove_optimizer
from clearhead.errors import CheckpointError, ConfigError, DataError
from clearhead.files import REPOSITORY
from clearhead.models.pretrained import load_pretrained
from clearhead.run import evaluation
from clearhead.tokens import END_OF_TEXT
from clearhead.tokens.encoding import encode_text
from clearhead.tokens.tokenizer import Sample, Tokenizer, get_tokenizer, train_tokenizer
from clearhead.tokens.tokenizer_json import load_tokenizer, to_json
from data import load_datasets
from scripts import compare, evaluate, export_hf, prepare_data
from scripts import train_tokenizer as command
from train import fit

GERMAN = "".join(
    f"Zeile {n}: Der größte Fuchs, Nummer {n * 7 % 13}, überspringt den Hund.\n" for n in range(60)
)
BPE = ("data.tokenizer=bpe", "model.vocab_size=null")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with runs/bpe on text.txt, de.txt, and the run exported to hf."""
    folder = tmp_path_factory.mktemp("tokenizers")
    (folder / "text.txt").write_text(TEXT + GERMAN, encoding="utf-8")
    (folder / "de.txt").write_text(GERMAN, encoding="utf-8")
    train_in(folder, *BPE, "data.val_fraction=0.5", "name=bpe")
    assert run_command(export_hf.main, folder, "checkpoint=runs/bpe", "out=hf")[0] == 0
    return folder


@pytest.fixture
def here(home, tmp_path, monkeypatch):
    """A copy of `home`, which is the working directory."""
    monkeypatch.chdir(shutil.copytree(home, tmp_path / "home", symlinks=True))


def own_tokenizer(text: str, vocab_size: int | None = None):
    sample = Sample()
    sample.add(text.encode())
    return train_tokenizer(sample, vocab_size)


def test_the_validation_text_is_not_read(home):
    """The second half is validation text. It has other words."""
    run, text = home / "runs" / "bpe", (TEXT + GERMAN).encode()
    middle = len(text) - int(len(text) * 0.5)
    expected = own_tokenizer(text[:middle].decode("utf-8", "ignore"))
    stored = load_tokenizer(str(run))
    assert stored.name == expected.name
    assert stored.name != own_tokenizer(text.decode()).name
    content = json.loads((run / "run.json").read_text())
    assert content["tokenizer"] == stored.name
    assert content["settings"]["model"]["vocab_size"] == stored.n_vocab
    tokens = load_file(run / "checkpoints/last/model.safetensors")["token_emb.weight"]
    assert len(tokens) == stored.n_vocab


def test_a_checkpoint_is_complete(here, tmp_path):
    """A copy of it generates the same text, also without its optimizer state; a change of its
    tokenizer is noticed."""
    copied = shutil.copytree("runs/bpe/checkpoints/last", tmp_path / "copied")
    shutil.copytree(copied, damaged := tmp_path / "damaged")
    remove_optimizer(copied)
    texts = []
    for source in ("runs/bpe", copied, "hf"):
        code, out, _ = run_command(
            generate.main, tmp_path / "home", f"checkpoint={source}", "prompt=Line 1:"
        )
        texts.append(out)
        assert code == 0
    assert texts[0] == texts[1] == texts[2]
    file = damaged / "tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8") + " ", encoding="utf-8")
    with refused(CheckpointError, "checkpoint", file):
        load_pretrained(damaged)
    file.unlink()
    with refused(CheckpointError, "checkpoint", file):
        load_pretrained(damaged)


def test_a_resumed_run_continues_with_its_tokenizer(make_run, tmp_path):
    """It equals a run that was not interrupted, and does not need the text that the tokenizer was
    trained on: the checkpoint has it."""
    settings = [*BPE, "trainer.max_steps=6"]
    whole = make_run(*settings, "name=whole")
    fit(whole)
    train_past_checkpoint(make_run(*settings, "name=half"), 2)
    (tmp_path / "runs/half/tokenizer.json").unlink()
    rest = make_run(*settings, "name=half")
    assert rest.state.step == 2
    fit(rest)
    assert_same(weights(rest), weights(whole))
    assert rows(rest.directory)[-1]["val/loss"] == rows(whole.directory)[-1]["val/loss"]


def test_special_tokens_have_one_meaning_everywhere(make_run, tmp_path, monkeypatch, capsys):
    """In the training text, in samples and in the export. The end of a text has its own name, so
    <|endoftext|> is text."""
    ranks = get_tokenizer("byte").ranks
    chat = Tokenizer(ranks, "gpt2", {"<user>": 256, "</s>": 257, "a b": 258}, end="</s>")
    own = tmp_path / "chat"
    own.mkdir()
    (own / "tokenizer.json").write_bytes(to_json(chat))
    text = "<user>hi a bee</s><|endoftext|>" * 40
    expected = [256, *b"hi ", 258, *b"ee", 257, *END_OF_TEXT.encode()]
    Path("chat.txt").write_text(text)
    import transformers

    continued = []
    generated = evaluation.generate
    monkeypatch.setattr(
        evaluation, "generate", lambda *a, **k: continued.append(a[1]) or generated(*a, **k)
    )
    settings = ["data.tokenizer=chat", "model.vocab_size=null", "data.path=chat.txt", "name=chat"]
    run = make_run(*settings, 'trainer.sample_prompt="<user>a b"')
    capsys.readouterr()
    data = load_datasets(run.config.data, run.evaluator.tokenizer)
    (note,) = [note for note in data.notes if "<user> (" in note]
    assert "a b (" in note
    assert "</s>" not in note
    tokens = data.train.tokens.gather(np.array([0]), 2 * len(expected) + 1)[0].tolist()
    assert tokens == [257, *expected, *expected]
    fit(run)
    assert continued[0] == [[256, 258]]
    assert run_command(export_hf.main, tmp_path, "checkpoint=runs/chat", "out=hf")[0] == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert theirs(text)["input_ids"] == expected * 40
    assert {theirs.eos_token, theirs.pad_token, theirs.bos_token} == {"</s>"}
    for source in ("hf", "runs/chat"):
        found = load_pretrained(tmp_path / source).tokenizer
        assert (found.name, found.eot_token) == (chat.name, 257)


def test_a_run_has_its_own_copy_and_accepts_no_other_tokenizer(make_run, here):
    """It may be given by another path, and a new run needs no other directory."""
    shutil.copytree("hf", "mine")
    shutil.copytree("hf", "moved")
    own = ["model.vocab_size=null", "name=mine"]
    fit(make_run("data.tokenizer=mine", *own))
    longer = [*own, "trainer.max_steps=5"]
    file = Path("mine/tokenizer.json")
    content = json.loads(file.read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(content), encoding="utf-8")
    with refused(DataError, "data.tokenizer", "mine", exit_code=3):
        make_run("data.tokenizer=mine", *longer)
    with refused(ConfigError, "data.tokenizer", "byte", exit_code=2):
        make_run("data.tokenizer=byte", *longer)
    shutil.rmtree("mine")
    fit(make_run("data.tokenizer=moved", *longer))
    shutil.rmtree("moved")
    fit(make_run("trainer.resume=runs/mine", "trainer.max_steps=6", tiny=False))
    assert rows(Path("runs/mine"))[-1]["step"] == 6
    new = make_run("from=runs/mine", "data.path=de.txt", "name=new", "wandb=off", tiny=False)
    assert new.evaluator.tokenizer.name == load_tokenizer("hf").name


def test_a_stored_tokenizer_is_used(make_run, here):
    """That of a run, of a checkpoint and of an export are equal; weights need the same one."""
    names = set()
    for source in ("runs/bpe", "runs/bpe/checkpoints/last", "hf", "hf/tokenizer.json"):
        run = make_run(f"data.tokenizer={source}", "model.vocab_size=null", "data.path=de.txt")
        names.add(run.evaluator.tokenizer.name)
    assert names == {load_tokenizer("runs/bpe").name}
    own = ["trainer.init_from=runs/bpe", "data.path=de.txt", "model.vocab_size=null"]
    fresh = make_run(*own, "data.tokenizer=runs/bpe").model.token_emb.weight
    assert torch.equal(fresh, load_pretrained("runs/bpe").model.token_emb.weight)
    with refused(ConfigError, "data.tokenizer", "bpe") as caught:  # trained on another text
        make_run(*own, "data.tokenizer=bpe")
    assert "data.tokenizer=" in caught.value.hint


def test_a_directory_may_contain_a_built_in_tokenizer(make_run, here, in_process):
    """Its checkpoints and token files are complete too."""
    Path("bytes").mkdir()
    Path("bytes/tokenizer.json").write_bytes(to_json(get_tokenizer("byte")))
    fit(make_run(own := "data.tokenizer=bytes", "name=own"))
    prepared = ("data.path=de.txt", "out=tokens", own, "workers=1")
    assert in_process(prepare_data.main, Path.cwd(), *prepared)[0] == 0
    shutil.rmtree("bytes")
    assert load_pretrained("runs/own").tokenizer is get_tokenizer("byte")
    assert load_tokenizer("tokens") is get_tokenizer("byte")
    again = make_run("trainer.resume=runs/own", "trainer.max_steps=7", tiny=False)
    assert again.evaluator.tokenizer is get_tokenizer("byte")


def test_a_new_text_has_a_new_vocabulary(make_run, here):
    """`from` and a sweep use the settings of a run, not its vocabulary."""
    run = make_run("from=runs/bpe", "data.path=de.txt", "wandb=off", tiny=False)
    expected = own_tokenizer(GERMAN[: len(GERMAN) // 2])
    assert abs(run.config.model.vocab_size - expected.n_vocab) < 20
    assert run.config.model.vocab_size != load_tokenizer("runs/bpe").n_vocab
    smaller = make_run(*BPE, "data.vocab_size=270", "name=small")
    assert smaller.config.model.vocab_size == smaller.evaluator.tokenizer.n_vocab == 270
    padded = make_run("data.tokenizer=bpe", "data.vocab_size=270", "model.vocab_size=320")
    assert padded.model.token_emb.weight.shape[0] == 320


def test_mistakes_are_one_line_and_leave_nothing(here, in_process, tmp_path):
    folder = tmp_path / "home"
    shutil.rmtree(folder / "runs")
    (folder / "empty.txt").write_text("", encoding="utf-8")
    (folder / "words").mkdir()
    (folder / "words/tokenizer.json").write_text('{"model": {"type": "WordPiece"}}')
    prepared = ("data.path=text.txt", "out=tokens", "data.tokenizer=byte", "workers=1")
    assert in_process(prepare_data.main, folder, *prepared)[0] == 0
    tiny = [s for s in TINY if s != "model.vocab_size=257"]
    cases = [
        (2, "data.tokenizer", ["data.tokenizer=gtp2"]),
        (2, "data.vocab_size", ["data.tokenizer=bpe", "data.vocab_size=65537"]),
        (2, "data.vocab_size", ["data.tokenizer=bpe", "data.vocab_size=257"]),
        (2, "data.vocab_size", ["data.tokenizer=byte", "data.vocab_size=300"]),
        (2, "model.vocab_size", ["data.tokenizer=byte", "model.vocab_size=256"]),
        (2, "model.vocab_size", ["data.tokenizer=hf", "model.vocab_size=258"]),
        (3, "data.vocab_size", ["data.tokenizer=bpe", "data.vocab_size=5000"]),
        (3, "data.path", ["data.tokenizer=bpe", "data.path=empty.txt"]),
        (3, "data.path", ["data.tokenizer=bpe", "data.path=tokens"]),
        (3, "data.tokenizer", ["data.tokenizer=words"]),
        (3, "data.tokenizer", ["data.tokenizer=tokens"]),
        (3, "data.tokenizer", ["data.tokenizer=hf", "data.path=tokens"]),
    ]
    for expected, key, settings in cases:
        code, _, errors = in_process(train.main, folder, *tiny, "data.path=text.txt", *settings)
        assert (code, printed_keys(errors)) == (expected, [key]), (settings, errors)
        assert not (folder / "runs").exists()


def test_the_validation_text_is_the_same_with_every_tokenizer(here, in_process, tmp_path):
    """So bits per byte compare tokenizers: in `evaluate`, and in one table of `compare`."""
    folder, sizes = tmp_path / "home", {}
    train_in(folder, "data.val_fraction=0.5", "name=bytes")
    for name in ("bpe", "bytes"):
        out = f"out={name}.json"
        source = (f"checkpoint=runs/{name}", "data.path=text.txt", "split=val", out)
        assert in_process(evaluate.main, folder, *source)[0] == 0
        found = json.loads((folder / f"{name}.json").read_text())
        sizes[found["tokenizer"]] = found["bytes"]
    assert len(sizes) == 2
    a, b = sizes.values()
    assert abs(a - b) <= 64  # bytes of a token, or of the first one, which has no prediction
    notes = {}
    for metric in ("val/loss", "val/bits_per_byte"):
        given = ("runs=[runs/bpe,runs/bytes]", f"metric={metric}")
        code, out, errors = in_process(compare.main, folder, *given)
        assert code == 0, errors
        notes[metric] = [line for line in out.splitlines() if line and line[0] != "|"]
    assert (len(notes["val/loss"]), len(notes["val/bits_per_byte"])) == (1, 0)


# SIGINT is enabled because pytest may ignore it, as background processes do.
COMMAND = """import ctypes, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from clearhead.tokens import tokenizer
mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
def train(*_):
    print("training", file=sys.stderr, flush=True)
    return [libc.pthread_mutex_lock(mutex) for _ in range(2)]
tokenizer.train_tokenizer = train
sys.argv[:] = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("number", "expected", "arguments"),
    [
        (signal.SIGINT, 130, ["scripts.train_tokenizer", "out=mine"]),
        (signal.SIGTERM, 143, ["train", *BPE, "wandb=off"]),
    ],
)
def test_the_training_of_a_tokenizer_is_stopped(tmp_path, number, expected, arguments):
    """Here it never ends: a thread that locks a mutex twice waits for itself."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    command = [sys.executable, "-c", COMMAND, *arguments, f"data.path={text}"]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, cwd=tmp_path, env=env) as process:
        try:
            with time_limit():
                assert process.stderr.readline()
                process.send_signal(number)
                assert process.wait() == expected
        finally:
            process.kill()
    assert [*tmp_path.iterdir()] == [text]


def test_one_command_for_large_texts(here, in_process, tmp_path):
    """Its tokenizer is that of the texts; token files made with it have the ids of the text."""
    folder = tmp_path / "home"
    write_source(folder / "texts/a.jsonl.gz", [GERMAN, "", TEXT])
    arguments = ("data.path=texts", "vocab_size=280", "out=mine")
    code, out, errors = in_process(command.main, folder, *arguments)
    assert (code, errors) == (0, "")
    assert "280" in out
    mine = load_tokenizer("mine")
    assert mine.name == own_tokenizer(GERMAN + TEXT, 280).name
    prepared = ("data.path=de.txt", "out=tokens", "data.tokenizer=mine", "workers=1")
    assert in_process(prepare_data.main, folder, *prepared)[0] == 0
    assert json.loads((folder / "tokens/manifest.json").read_text())["vocab_size"] == 280
    shutil.rmtree("mine")  # the token files have a copy
    tiny = [s for s in TINY if not s.startswith(("model.vocab_size", "data.tokenizer"))]
    tiny += ["data=shards", "data.path=tokens", "data.tokenizer=tokens", "data.val_fraction=0.4"]
    assert in_process(train.main, folder, *tiny, "name=shards")[0] == 0
    stored = load_tokenizer("runs/shards")
    assert stored.name == mine.name
    ids = np.fromfile(folder / "tokens/shard_00000_00.bin", np.uint16)[512:]
    assert ids.tolist() == [stored.eot_token, *encode_text(GERMAN, mine).tolist()]
    for key, value in (("out", "hf"), ("vocab_size", "5000"), ("vocab_size", "70000")):
        given = dict(argument.split("=", 1) for argument in arguments) | {"out": "new", key: value}
        code, _, errors = in_process(command.main, folder, *map("=".join, given.items()))
        assert (code in (2, 3), printed_keys(errors)) == (True, [key]), errors
        assert not (folder / "new").exists()
