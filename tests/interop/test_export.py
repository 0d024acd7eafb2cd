"""scripts/export_hf.py: what it writes is what transformers loads, with equal logits and ids.

Nothing is fetched: the models are made on the spot.
"""

import functools
import json
import os
import re
import shutil
import signal

import pytest
import torch
import yaml
from helpers import REPOSITORY, TEXT, TINY
from helpers.texts import FRAGMENTS
from hypothesis import example, given, settings
from hypothesis import strategies as st

from decoding import Sampling
from decoding import generate as decode
from model import GPT, ModelConfig
from scripts.export_hf import main
from training import export
from training.hf import load_any, load_reader, to_hf

COMMAND = "scripts.export_hf"
FILES = {"config.json", "generation_config.json", "model.safetensors", "README.md"}
FILES |= {"tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def transformers():
    """Imported here and not above: it takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        import transformers

        yield transformers


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a run, of twice as many positions as it learns, and GPT-2's vocabulary in a
    model without biases, as a Hugging Face directory; both exported, as `bytes` and `words`."""
    folder = tmp_path_factory.mktemp("export")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        from train import Trainer
        from training.command import compose

        settings = ["data.path=text.txt", "name=one", "model.context_length=64"]
        run = Trainer(compose([*TINY, *settings, "model.qkv_bias=false"]))
        run.train()
        run.close(0)
        torch.manual_seed(1)
        to_hf(GPT(ModelConfig(50257, 48, 8, 2, 1)), folder / "gpt2")
        for source, out in (("runs/one", "bytes"), ("gpt2", "words")):
            patch.setattr("sys.argv", ["x", f"checkpoint={source}", f"out={out}"])
            before = signal.getsignal(signal.SIGTERM)
            main()
            signal.signal(signal.SIGTERM, before)
    return folder


@pytest.fixture
def run(in_process, home):
    """run(*arguments) -> (exit code, out, err), in `home`, in this process."""
    before = signal.getsignal(signal.SIGTERM)
    yield functools.partial(in_process, main, home)
    signal.signal(signal.SIGTERM, before)


def test_names_reach_the_terminal_as_text(run, home):
    strange = home / "a\x1b[31m"
    strange.symlink_to(home / "runs" / "one")
    code, out, err = run(f"checkpoint={strange}", f"out={strange}.made")
    assert code == 0
    assert "\x1b" not in out + err


# --- What transformers makes of it ---------------------------------------------------------------


def test_equal_logits(transformers, home):
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        home / "bytes", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ours, _ = load_any(home / "runs" / "one")
    ids = torch.randint(257, (2, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, _ = ours(ids)
        logits = theirs.eval()(ids).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


characters = st.characters(exclude_categories=["Cs"])
mixes = st.lists(st.sampled_from(FRAGMENTS) | st.text(characters, max_size=4), max_size=20)


@pytest.mark.parametrize("name", ["words", "bytes"])
def test_ids_are_tiktokens(transformers, home, name):
    from tokenizers import Tokenizer  # for those who do without transformers

    theirs = transformers.AutoTokenizer.from_pretrained(home / name)
    plain = Tokenizer.from_file(str(home / name / "tokenizer.json"))
    ours = load_reader(home / name).tokenizer
    assert len(theirs) == ours.n_vocab
    assert theirs.eos_token_id == theirs.bos_token_id == ours.eot_token
    assert theirs("a<|endoftext|>b")["input_ids"].count(ours.eot_token) == 1

    @settings(max_examples=150, deadline=None, derandomize=True)
    @example(["It's", " we'll", "  DON'T", "\t\t\n \n", "1234½", "_" * 9, "\x00\x7f\xad"])
    @example(["<|endoftext|>", " <|endoftext|> <|endoftext|", "<|endoftext|>\n"])
    @given(mixes)
    def check(parts):
        text = "".join(parts)
        ids = ours.encode(text, allowed_special="all")
        assert theirs(text)["input_ids"] == plain.encode(text).ids == ids
        assert theirs.decode(ids) == plain.decode(ids, skip_special_tokens=False) == text

    check()


@pytest.mark.parametrize("name", ["words", "bytes"])
def test_a_pipeline_writes_text(transformers, home, name, capfd):
    transformers.logging.set_verbosity_warning()
    generate = transformers.pipeline("text-generation", model=str(home / name), device="cpu")
    (found,) = generate("The quick fox", max_new_tokens=5, do_sample=False)
    assert found["generated_text"].startswith("The quick fox")
    reader = load_reader(home / name)
    ids = reader.tokenizer.encode("The quick fox")
    greedy = Sampling(temperature=0)
    tokens = [token for (token,) in decode(reader.model, [ids], 5, greedy)]
    assert found["generated_text"] == "The quick fox" + reader.tokenizer.decode(tokens)
    assert generate.tokenizer.model_max_length == reader.window
    assert "pad_token_id" not in capfd.readouterr().err


# --- What we make of it --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["words", "bytes"])
def test_there_and_back_the_bytes_are_the_same(home, name, tmp_path):
    reader = load_reader(home / name)
    to_hf(reader.model, tmp_path)
    before = (home / name / "model.safetensors").read_bytes()
    assert (tmp_path / "model.safetensors").read_bytes() == before
    export.write(reader, tmp_path)  # and again
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_tokenizer_and_window_are_known_again(home):
    theirs, ours = load_reader(home / "bytes"), load_reader(home / "runs" / "one")
    assert (theirs.tokenizer_name, theirs.window) == (ours.tokenizer_name, ours.window)
    assert (theirs.window, theirs.model.config.context_length) == (32, 64)
    said = json.loads((home / "bytes" / "config.json").read_text())
    assert said["clearhead"] == {"tokenizer": "byte", "window": 32, "qkv_bias": False}
    assert theirs.model.config.qkv_bias  # zeros, as GPT-2 always has some


def test_the_files(home):
    assert {file.name for file in (home / "bytes").iterdir()} == FILES
    words = {"vocab.json", "merges.txt"}
    assert {file.name for file in (home / "words").iterdir()} == FILES | words
    modes = {file.stat().st_mode for file in (home / "words").iterdir()}
    assert len(modes) == 1


# --- The model card ------------------------------------------------------------------------------


def front_matter(card):
    _, head, body = card.split("---\n", 2)
    return yaml.safe_load(head), body


def test_the_card_has_the_runs_figures(home):
    head, body = front_matter((home / "bytes" / "README.md").read_text())
    assert head["library_name"] == "transformers"
    assert head["pipeline_tag"] == "text-generation"
    assert "license" not in head
    rows = [json.loads(r) for r in (home / "runs/one/metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if "val/loss" in row][-1]
    assert last["step"] == 4
    for line in (
        "# one",
        "| steps | 4 |",
        "| tokens trained on | 1,024 |",
        "| learned positions | 32 |",
        f"| validation loss (nats per token) | {last['val/loss']:.4g} |",
        f"| bits per byte | {last['val/bits_per_byte']:.4g} |",
        "| `data.path` | text.txt |",
        "| `trainer.batch_size` | 8 |",
    ):
        assert f"\n{line}\n" in body
    assert "32 positions of 64" in body
    assert "no biases" in body


def test_the_examples_run(transformers, home, capsys):
    """Of the card, and of docs/models.md."""
    docs = (REPOSITORY / "docs" / "models.md").read_text(encoding="utf-8")
    card = (home / "bytes" / "README.md").read_text(encoding="utf-8")
    for text, place in ((card, "PATH/OF/THIS/FOLDER"), (docs, "my-model")):
        blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        (code,) = [block for block in blocks if f'model="{place}"' in block]
        folder = home / ("bytes" if text is card else "words")
        exec(code.replace(place, str(folder)))
        assert capsys.readouterr().out.startswith("The")


def test_what_comes_from_a_run_is_no_markup(home, tmp_path, run):
    """In a copy of the run: its folder, its settings and its log are what an attacker wrote."""
    evil = "WWW.h.i <img src=x onerror=i(1)>`a`|b|\n# c\x1b]0;d\x07\u202e[e](http://f)_g_ *h* &lt;"
    source = tmp_path / "runs" / "-- `x` <b> |"
    shutil.copytree(home / "runs" / "one", source, symlinks=True)
    folder = (source / "checkpoints" / "last").resolve()
    (folder / "SHA256SUMS").unlink()
    state = json.loads((folder / "state.json").read_text())
    state["format"] = 2  # of before there were sums
    state["settings"]["data"]["path"] = [evil, f"/secret/place/{evil}"]
    state["settings"]["trainer"] |= {"init_from": "hub:a/b\nlicense: mine", "batch_size": evil}
    state["settings"]["optimizer"] |= {"name": {"<b>": 1}, "lr": float("nan"), "schedule": evil * 9}
    (folder / "state.json").write_text(json.dumps(state))
    metrics = {"step": 4, "val/loss": 1.0, "val/bits_per_byte": evil}
    (source / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    code, _, err = run(f"checkpoint={folder}", f"out={tmp_path / 'out'}")
    assert (code, err) == (0, "")
    card = (tmp_path / "out" / "README.md").read_text()
    head, body = front_matter(card)
    assert set(head) == {"library_name", "pipeline_tag", "tags"}
    assert not re.search("[<\x00-\x09\x0b-\x1f\x7f\u202e]", card)
    assert not re.search("&#(27|8238);", card)  # nor by a reference
    assert not re.search(r"(?i)www\.", card)  # which GitHub's Markdown makes a link of
    assert "secret" not in card
    assert card.count("```") == 2
    rows = [line for line in body.splitlines() if line.startswith("|")]
    assert all(row.count("|") == 3 for row in rows)
    names = {"`data.path`", "`trainer.batch_size`", "`optimizer.schedule`", "bits per byte"}
    assert names <= {row.split(" | ")[0].removeprefix("| ") for row in rows}
    assert "optimizer.name" not in body
    assert "optimizer.lr" not in body


def test_the_weights_that_a_run_began_with_are_named(home):
    reader = load_reader(home / "runs" / "one")
    reader.state.settings["trainer"]["init_from"] = "hub:openai-community/gpt2"
    head, body = front_matter(export.model_card(reader))
    assert head["base_model"] == "openai-community/gpt2"
    assert "began with the weights of hub&#58;openai&#45;community/gpt2" in body.replace(
        "-", "&#45;"
    )
    reader.state.settings["trainer"]["init_from"] = "/home/me/folder"
    head, body = front_matter(export.model_card(reader))
    assert "base_model" not in head
    assert "began with the weights of folder." in body


# --- The command ---------------------------------------------------------------------------------


def test_as_a_command(command, home, tmp_path):
    """The best checkpoint, into folders that are made for it."""
    best = home / "runs" / "one" / "checkpoints" / "best"
    done = command(COMMAND, f"checkpoint={best}", "out=made/for/it")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("made/for/it: 6 files, ")
    assert {file.name for file in (tmp_path / "made/for/it").iterdir()} == FILES
    assert [file.name for file in (tmp_path / "made/for").iterdir()] == ["it"]


def test_an_empty_folder_will_do(run, home, tmp_path):
    (tmp_path / "empty").mkdir()
    assert run("checkpoint=gpt2", f"out={tmp_path}/empty/")[0] == 0
    assert (tmp_path / "empty" / "tokenizer.json").is_file()


REFUSED = {
    "": "is empty",
    ".": "is where you stand",
    "gpt2": "holds something already",
    "..": "holds something already",
    "text.txt": "is a file",
    "link": "is a link",
    "link/": "is a link",
    "nowhere-link": "is a link",
    "text.txt/a/b": "/text.txt is no folder",
    "nowhere-link/a": "nowhere-link is no folder",
}


@pytest.mark.parametrize("out", REFUSED)
def test_an_out_that_cannot_be(run, home, tmp_path, out):
    for name, target in (("link", tmp_path), ("nowhere-link", tmp_path / "gone")):
        if not (home / name).is_symlink():
            (home / name).symlink_to(target)
    before = sorted(home.rglob("*"))
    code, told, err = run("checkpoint=runs/one", f"out={out}")
    assert (code, told) == (2, "")
    assert re.fullmatch(rf"out={re.escape(out)}: .*; give a folder that is not there yet\n", err)
    assert REFUSED[out] in err
    assert sorted(home.rglob("*")) == before


def test_an_empty_place_to_stand_is_not_replaced(run, tmp_path, in_process):
    (tmp_path / "here").mkdir()
    code, _, err = in_process(main, tmp_path / "here", "checkpoint=x", "out=.")
    assert (code, err) == (2, "out=.: is where you stand; give a folder that is not there yet\n")


def test_every_problem_at_once(run):
    code, _, err = run("checkpoint=", "out=.", "qkv=1")
    assert code == 2
    assert [line.partition("=")[0] for line in err.splitlines()] == ["qkv", "checkpoint", "out"]


@pytest.mark.parametrize("checkpoint", ["nowhere", "text.txt", "no/such", "bytes/README.md"])
def test_no_checkpoint(run, home, tmp_path, checkpoint):
    code, _, err = run(f"checkpoint={checkpoint}", f"out={tmp_path / 'out'}")
    assert code == 3
    assert err.startswith(f"checkpoint={checkpoint}: ")
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def stopped_by_signal():
    os.kill(os.getpid(), signal.SIGTERM)


def stopped_by_hand():
    raise KeyboardInterrupt


def stopped_by_the_disk():
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("stop", "code", "says"),
    [
        (stopped_by_signal, 143, ""),
        (stopped_by_hand, 130, ""),
        (stopped_by_the_disk, 2, "cannot be written (No space left on device); make room"),
    ],
)
def test_stopped_half_way_nothing_is_left(run, home, tmp_path, monkeypatch, stop, code, says):
    def model_card(reader):
        assert len(list(tmp_path.glob("out.part-*/*"))) >= 5
        stop()
        return "not reached"

    monkeypatch.setattr(export, "model_card", model_card)
    found, _, err = run("checkpoint=runs/one", f"out={tmp_path / 'out'}")
    assert found == code
    assert says in err
    assert list(tmp_path.iterdir()) == []


def test_help(command):
    done = command(COMMAND, "--help")
    assert done.returncode == 0
    assert "checkpoint" in done.stdout
    assert "out" in done.stdout
