"""scripts/export_hf.py: transformers loads what it writes, with equal logits and token ids.

Nothing is fetched: the models are made here.
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
from helpers.refusals import printed_keys
from helpers.settings import settings as run_settings
from helpers.tally import CAMPAIGN
from helpers.texts import FRAGMENTS
from hypothesis import example, given, settings
from hypothesis import strategies as st

from decoding import Sampling
from decoding import generate as decode
from model import GPT, ModelConfig
from scripts.export_hf import main
from training import export
from training.hf import load_any, load_reader, to_hf

FILES = {"config.json", "generation_config.json", "model.safetensors", "README.md"}
FILES |= {"tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a run, of twice as many positions as it learns, and GPT-2's vocabulary in a
    model without biases, as a Hugging Face directory; both exported, as `bytes` and `words`."""
    folder = tmp_path_factory.mktemp("export")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        from train import Trainer

        changes = ["data.path=text.txt", "name=one", "model.context_length=64"]
        run = Trainer(run_settings(*TINY, *changes, "model.qkv_bias=false"))
        run.train()
        run.close(0)
        torch.manual_seed(1)
        to_hf(GPT(ModelConfig(50257, 48, 8, 2, 1)), folder / "gpt2")
        for source, out in (("runs/one", "bytes"), ("gpt2", "words")):
            patch.setattr("sys.argv", ["x", f"checkpoint={source}", f"out={out}"])
            main()
    signal.signal(signal.SIGTERM, before)
    return folder


@pytest.fixture
def run(in_process, home):
    """run(*arguments) -> (exit code, out, err), in `home`, in this process."""
    before = signal.getsignal(signal.SIGTERM)
    yield functools.partial(in_process, main, home)
    signal.signal(signal.SIGTERM, before)


# --- What transformers makes of it ---------------------------------------------------------------


def test_logits_are_equal(home):
    import transformers  # in the tests that need it, for it takes seconds

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
def test_ids_are_tiktokens(home, name):
    import transformers
    from tokenizers import Tokenizer  # for those who do without transformers

    theirs = transformers.AutoTokenizer.from_pretrained(home / name)
    plain = Tokenizer.from_file(str(home / name / "tokenizer.json"))
    ours = load_reader(home / name).tokenizer
    assert len(theirs) == ours.n_vocab
    assert theirs.eos_token_id == theirs.bos_token_id == ours.eot_token
    assert theirs("a<|endoftext|>b")["input_ids"].count(ours.eot_token) == 1

    @settings(max_examples=150 if CAMPAIGN else 40, deadline=None, derandomize=True)
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
def test_pipeline_generates_our_tokens(home, name, capfd):
    import transformers

    transformers.logging.set_verbosity_warning()
    generate = transformers.pipeline("text-generation", model=str(home / name), device="cpu")
    (found,) = generate("The quick fox", max_new_tokens=5, do_sample=False)
    reader = load_reader(home / name)
    ids = reader.tokenizer.encode("The quick fox")
    tokens = [token for (token,) in decode(reader.model, [ids], 5, Sampling(temperature=0))]
    assert found["generated_text"] == "The quick fox" + reader.tokenizer.decode(tokens)
    assert generate.tokenizer.model_max_length == reader.window
    assert "pad_token_id" not in capfd.readouterr().err  # which transformers warns about


# --- What we make of it --------------------------------------------------------------------------


def test_files_and_what_we_read_back(home, tmp_path):
    words = {"vocab.json", "merges.txt"}
    for name, files in (("bytes", FILES), ("words", FILES | words)):
        assert {file.name for file in (home / name).iterdir()} == files
        assert len({file.stat().st_mode for file in (home / name).iterdir()}) == 1
        reader, out = load_reader(home / name), tmp_path / name
        before = (home / name / "model.safetensors").read_bytes()
        to_hf(reader.model, out)
        assert (out / "model.safetensors").read_bytes() == before
        export.write(reader, out)  # and again
        assert (out / "model.safetensors").read_bytes() == before
    theirs, ours = load_reader(home / "bytes"), load_reader(home / "runs" / "one")
    assert (theirs.tokenizer_name, theirs.window) == (ours.tokenizer_name, ours.window)
    assert (theirs.window, theirs.model.config.context_length) == (32, 64)
    said = json.loads((home / "bytes" / "config.json").read_text())
    assert said["clearhead"] == {"tokenizer": "byte", "window": 32, "qkv_bias": False}
    assert theirs.model.config.qkv_bias  # zeros, as GPT-2 always has some


# --- The model card ------------------------------------------------------------------------------


def front_matter(card):
    _, head, body = card.split("---\n", 2)
    return yaml.safe_load(head), body


def table(body):
    """The rows of the card's table: name -> value."""
    rows = [line.split("|") for line in body.splitlines() if line.startswith("|")]
    assert all(len(row) == 4 for row in rows)
    return {row[1].strip(): row[2].strip() for row in rows}


def test_card_has_the_figures_of_the_run(home):
    head, body = front_matter((home / "bytes" / "README.md").read_text())
    assert head["library_name"] == "transformers"
    assert head["pipeline_tag"] == "text-generation"
    assert "license" not in head
    rows = [json.loads(r) for r in (home / "runs/one/metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if "val/loss" in row][-1]
    assert last["step"] == 4
    assert "\n# one\n" in body
    found = table(body)
    assert found["`data.path`"] == "text.txt"
    assert found["`trainer.batch_size`"] == "8"
    figures = {"4", "1,024", "32", "64", f"{last['val/loss']:.4g}"}
    assert figures | {f"{last['val/bits_per_byte']:.4g}"} <= set(found.values())


def test_examples_run(home, capsys):
    """Of the card, and of docs/models.md."""
    docs = (REPOSITORY / "docs" / "models.md").read_text(encoding="utf-8")
    card = (home / "bytes" / "README.md").read_text(encoding="utf-8")
    for text, place in ((card, "PATH/OF/THIS/FOLDER"), (docs, "my-model")):
        blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        (code,) = [block for block in blocks if f'model="{place}"' in block]
        folder = home / ("bytes" if text is card else "words")
        exec(code.replace(place, str(folder)))
        assert capsys.readouterr().out.startswith("The")


def test_card_escapes_what_comes_from_the_run(home, tmp_path, run):
    """In a copy of the run: its folder, its settings and its log are what an attacker wrote."""
    evil = "WWW.h.i <img src=x onerror=i(1)>`a`|b|\n# c\x1b]0;d\x07\u202e[e](http://f)_g_ *h* &lt;"
    source = tmp_path / "runs" / "-- `x` <b> |"
    shutil.copytree(home / "runs" / "one", source, symlinks=True)
    folder = (source / "checkpoints" / "last").resolve()
    (folder / "SHA256SUMS").unlink()
    state = json.loads((folder / "state.json").read_text())
    state["format"] = 2  # the format before there were sums
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
    names = set(table(body))
    assert {"`data.path`", "`trainer.batch_size`", "`optimizer.schedule`"} <= names
    assert not names & {"`optimizer.name`", "`optimizer.lr`"}


def test_card_names_the_initial_weights(home):
    reader = load_reader(home / "runs" / "one")
    source = reader.state.settings["trainer"]
    source["init_from"] = "hub:openai-community/gpt2"
    head, body = front_matter(export.model_card(reader))
    assert head["base_model"] == "openai-community/gpt2"
    assert "openai-community/gpt2" in body.replace("&#45;", "-")
    source["init_from"] = "/home/me/folder"
    head, body = front_matter(export.model_card(reader))
    assert "base_model" not in head
    assert "folder" in body
    assert "/home/me" not in body


# --- The command ---------------------------------------------------------------------------------


def test_best_checkpoint_into_new_folders(run, home, tmp_path):
    best = home / "runs" / "one" / "checkpoints" / "best"
    out = tmp_path / "made/for/it"
    code, told, err = run(f"checkpoint={best}", f"out={out}")
    assert (code, err) == (0, "")
    assert str(out) in told
    assert {file.name for file in out.iterdir()} == FILES
    assert [file.name for file in out.parent.iterdir()] == ["it"]


def test_names_are_escaped_and_an_empty_folder_will_do(run, home):
    strange = home / "a\x1b[31m"
    strange.symlink_to(home / "runs" / "one")
    (home / "a\x1b[31m.made").mkdir()
    code, out, err = run(f"checkpoint={strange}", f"out={strange}.made/")
    assert code == 0
    assert (home / "a\x1b[31m.made" / "tokenizer.json").is_file()
    assert "\x1b" not in out + err
    code, out, _ = run("--help")
    assert code == 0
    assert {"checkpoint", "out"} <= set(re.findall(r"\w+", out))


def test_bad_out(run, home, tmp_path, in_process):
    (home / "link").symlink_to(tmp_path)
    (home / "nowhere-link").symlink_to(tmp_path / "gone")
    outs = ["", ".", "gpt2", "..", "text.txt", "link", "link/", "nowhere-link"]
    outs += ["text.txt/a/b", "nowhere-link/a"]
    before = sorted(home.rglob("*"))
    for out in outs:
        code, told, err = run("checkpoint=runs/one", f"out={out}")
        assert (code, told, printed_keys(err)) == (2, "", ["out"]), out
        assert err.startswith(f"out={out}: ")
        assert sorted(home.rglob("*")) == before
    here = tmp_path / "here"  # the current folder is not replaced, even when empty
    here.mkdir()
    code, _, err = in_process(main, here, "checkpoint=x", "out=.")
    assert (code, printed_keys(err)) == (2, ["out"])
    code, _, err = run("checkpoint=", "out=.", "qkv=1")  # every problem at once
    assert (code, printed_keys(err)) == (2, ["qkv", "checkpoint", "out"])


def test_bad_checkpoint(run, tmp_path):
    for checkpoint in ("nowhere", "text.txt", "no/such", "bytes/README.md"):
        code, _, err = run(f"checkpoint={checkpoint}", f"out={tmp_path / 'out'}")
        assert (code, printed_keys(err)) == (3, ["checkpoint"]), checkpoint
        assert err.startswith(f"checkpoint={checkpoint}: ")
        assert not (tmp_path / "out").exists()


def raises(error):
    raise error


STOPS = {  # how an export is stopped, and its exit code
    "SIGTERM": (lambda: os.kill(os.getpid(), signal.SIGTERM), 143),
    "Ctrl-C": (lambda: raises(KeyboardInterrupt()), 130),
    "full disk": (lambda: raises(OSError(28, "No space left on device")), 2),
}


def test_stopped_halfway_leaves_nothing(run, tmp_path, monkeypatch):
    for what, (stop, code) in STOPS.items():

        def model_card(reader, stop=stop):
            assert len(list(tmp_path.glob("out.part-*/*"))) >= 5
            stop()
            return "not reached"

        monkeypatch.setattr(export, "model_card", model_card)
        found, _, err = run("checkpoint=runs/one", f"out={tmp_path / 'out'}")
        assert found == code, what
        assert "Traceback" not in err
        assert list(tmp_path.iterdir()) == []
