"""Attacks: code in data files, markup in tokens, paths outside the run directory, secrets.

A successful attack would have an effect that the tests detect: a folder created by its code, a
script run in the browser, a file outside the run directory, a secret in a file or in the output.
"""

import contextlib
import io
import json
import os
import pickle
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from helpers import TINY
from helpers.models import tiny_model
from helpers.refusals import printed_keys
from helpers.runs import change_state, write_checksums
from helpers.settings import settings, train_main
from helpers.tally import tally
from helpers.texts import write_packed

import generate
import train
from clearhead.models.huggingface import to_hf
from clearhead.run.build import build_run
from scripts import inspect_attention
from train import fit

FAULT = "malicious pickle, _target_, markup in tokens, path escape, secret canaries"


@pytest.fixture
def folder(trained, tmp_path):
    """A folder with a text file and a tiny run."""
    shutil.copytree(trained.parents[1], tmp_path / "here", symlinks=True)
    return tmp_path / "here"


@pytest.fixture
def checkpoint(folder):
    return (folder / "runs" / "run" / "checkpoints" / "last").resolve()


def continued(*more):
    return [*TINY, "data.path=text.txt", "name=run", "trainer.max_steps=6", *more]


@pytest.fixture
def command_refused(in_process, folder):
    """command_refused(main, arguments, code) -> the stderr of a command, with one problem."""

    def check(main, arguments, expected):
        code, _, err = in_process(main, folder, *arguments)
        assert code == expected, err
        assert len(printed_keys(err)) == 1, err
        tally(FAULT)
        return err

    return check


@pytest.fixture
def mark(tmp_path):
    """The folder that a successful attack creates."""
    path = tmp_path / "mark"
    yield path
    assert not path.exists()


def pickles(mark: Path) -> list[bytes]:
    """A plain pickle, and the current and the old format of torch.save."""

    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(mark),)

    made = [pickle.dumps(Attack(), protocol) for protocol in (0, 2, 4)]
    for is_zip in (True, False):
        buffer = io.BytesIO()
        values = {"wte.weight": torch.zeros(3), "h.0.attn.bias": Attack()}
        torch.save(values, buffer, _use_new_zipfile_serialization=is_zip)
        made.append(buffer.getvalue())
    return made


def test_the_pickles_work(tmp_path):
    for raw in pickles(tmp_path / "mark"):
        with contextlib.suppress(RuntimeError):  # once it has run
            torch.load(io.BytesIO(raw), weights_only=False)
        (tmp_path / "mark").rmdir()


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_pickle_in_a_checkpoint(command_refused, checkpoint, mark, name):
    whole = f"checkpoint={checkpoint}"
    init = continued("name=new", f"trainer.init_from={checkpoint}")
    uses = [(train_main, continued(f"trainer.resume={checkpoint}"))]
    if name == "model.safetensors":
        uses += [(generate.main, [whole]), (inspect_attention.main, [whole]), (train_main, init)]
    for raw in pickles(mark)[1::2]:
        (checkpoint / name).write_bytes(raw)
        write_checksums(checkpoint)
        for main, arguments in uses:
            assert name in command_refused(main, arguments, 3)


def test_a_pickle_in_the_files_of_a_run_and_as_text(in_process, command_refused, folder, mark):
    for name in ("metrics.jsonl", "samples.jsonl", "config.yaml"):
        place = shutil.copytree(folder, folder.parent / name, symlinks=True)
        (place / "runs" / "run" / name).write_bytes(pickles(mark)[1] + b"\n")
        code, _, err = in_process(train_main, place, *continued())
        assert code == 0, (name, err)
        tally(FAULT)
    for name in ("a.txt", "a.jsonl", "a.parquet", "a.bin", "a.txt.gz"):
        write_packed(folder / name, pickles(mark)[1])
        command_refused(train_main, [*TINY, f"data.path={name}", "name=new"], 3)


@pytest.fixture
def evil(folder, mark, monkeypatch):
    """A module that could be imported, and must not be imported."""
    monkeypatch.syspath_prepend(folder)
    source = f"import os\nos.mkdir({str(mark)!r})\nclass Evil: pass\n"
    (folder / "evil.py").write_text(source)
    yield
    assert "evil" not in sys.modules


def test_code_in_the_settings_of_a_checkpoint(command_refused, checkpoint, evil):
    model = json.loads((checkpoint / "state.json").read_text())["settings"]["model"]
    for change in ({"_target_": "os.mkdir"}, {"attention": "evil:Evil"}):
        change_state(checkpoint, **{"settings.model": model | change})
        command_refused(generate.main, [f"checkpoint={checkpoint}"], 3)
    run = checkpoint.parent.parent
    content = json.loads((run / "run.json").read_text())
    content["settings"]["model"] = model | change
    (run / "run.json").write_text(json.dumps(content))
    command_refused(train_main, [f"trainer.resume={checkpoint}"], 3)


def test_code_in_a_hugging_face_directory(in_process, command_refused, folder, evil, mark):
    to_hf(tiny_model(vocab_size=50257, emb_dim=8, num_layers=1), folder / "hf")
    config = folder / "hf" / "config.json"
    plain = json.loads(config.read_text())
    changes = {"auto_map": {"AutoModelForCausalLM": "evil.Evil"}, "trust_remote_code": True}
    config.write_text(json.dumps(plain | changes))
    code, _, err = in_process(generate.main, folder, "checkpoint=hf", "max_new_tokens=1")
    assert (code, err) == (0, "")
    config.write_text(json.dumps(plain | {"activation_function": "evil.Evil"}))
    command_refused(generate.main, ["checkpoint=hf"], 3)
    config.write_text(json.dumps(plain))
    (folder / "hf" / "model.safetensors").unlink()
    for raw in pickles(mark):
        (folder / "hf" / "pytorch_model.bin").write_bytes(raw)
        err = command_refused(generate.main, ["checkpoint=hf"], 3)
        assert "pytorch_model.bin" in err
        assert "weights_only" not in err  # torch's message explains how to load it anyway


MARKUP = {
    "a script": "<script>window.hacked = 1</script>",
    "an end": "</script><script>window.hacked = 1</script>",
    "an image": "<img src=x onerror='window.hacked=1'>",
    "an address": "<a href='javascript:window.hacked=1'>x</a>",
    "a style": "</style><style>*{background:url(http://127.0.0.1:9/x)}</style>",
    "backwards": "user\u202etxt.exe\u2066",
    "line ends of scripts": "a\u2028window.hacked=1\u2029b",
    "a terminal's title": "\x1b]0;owned\x07 \x1b[2J \x9b31m \x08\x7f",
}
OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture(scope="module")
def marked_up(tmp_path_factory):
    """(folder, output) of a run with markup in its text, prompts and names."""
    folder = tmp_path_factory.mktemp("marked")
    name = "<img src=x onerror=window.hacked=1>\x1b[31m.txt"
    (folder / name).write_text("\n".join(MARKUP.values()) * 12, encoding="utf-8")
    given = settings(*TINY, f"data.path='{name}'", "name=run", "trainer.max_steps=2", "lens=often")
    prompts = [*MARKUP.values(), "../../../outside/x", "a\0b"]
    sample = "\n".join(MARKUP.values())
    given = given.with_values({"trainer.sample_prompt": sample, "lens.prompts": prompts})
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        fit(build_run(given))
    return folder, printed.getvalue()


def test_markup_is_shown_and_not_executed(marked_up, opened):
    """In each page of the run. `opened` fails on any request, dialog, error or console line."""
    folder, _ = marked_up
    pages = sorted((folder / "runs").rglob("*.html"))
    assert [path.name for path in pages] == ["play.html", "run.html"]
    for path in pages:
        page = opened(path, before="window.trap = 1")
        page.locator("html[data-ready='1']").wait_for()
        assert page.evaluate("[window.trap, window.hacked]") == [1, None]
        assert page.locator("img[src='x'], a[href^='javascript']").count() == 0
    page = opened(folder / "runs" / "run" / "run.html")
    words = page.evaluate("document.body.textContent")
    for what in ("a script", "an image", "a style"):
        assert MARKUP[what] in words, what
    # All files of the run are in its directory, whatever the prompts contain.
    assert [path.name for path in (folder / "runs").iterdir()] == ["run"]
    assert not (folder.parent / "outside").exists()
    tally(FAULT, len(MARKUP))


def test_control_characters(marked_up, in_process, folder, monkeypatch):
    """They are escaped on a terminal, and unchanged in a file."""
    _, printed = marked_up
    assert "\\x1b]0;owned" in printed
    assert not OBEYED.search(printed)
    prompt = MARKUP["a terminal's title"] + MARKUP["backwards"] + "\r\n"
    for is_terminal in (False, True):
        monkeypatch.setattr(type(sys.stdout), "isatty", lambda _, it=is_terminal: it, raising=False)
        arguments = ["checkpoint=runs/run", f"prompt={prompt}", "max_new_tokens=1"]
        code, out, _ = in_process(generate.main, folder, *arguments)
        assert code == 0
        assert out.startswith("\\x1b]0;owned\\x07" if is_terminal else prompt)
        assert bool(OBEYED.search(out)) is not is_terminal


def test_links_among_old_checkpoints_are_not_followed(in_process, folder):
    """Old checkpoints are removed; targets of links with the names of checkpoints are not."""
    precious = folder.parent / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    checkpoints = folder / "runs" / "run" / "checkpoints"
    for name in ("step_00000001", "step_00000001.part", "step_00000003"):
        (checkpoints / name).symlink_to(precious)
    code, _, err = in_process(train_main, folder, *continued("trainer.keep=1"))
    assert (code, printed_keys(err)) == (0, ["checkpoint"] * 2)  # one warning for each link
    assert (checkpoints / "last").resolve().name == "step_00000006"
    assert (precious / "thesis.txt").read_text() == "years of work"
    tally(FAULT)


SECRETS = {
    "WANDB_API_KEY": "canary0000000000000000000000000000wandb",
    "HF_TOKEN": "hf_canary1111111111111111111111",
    "MY_OWN_PASSWORD": "canary3333333333",
    "DATABASE_URL": "postgres://me:canary4444@host/db",
}


def test_no_secret_is_written_or_printed(in_process, tmp_path, text_file, monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    given = [*TINY, f"data.path={text_file}", "trainer.max_steps=2"]
    watched = ["lens=often", "lens.prompts=[a word]"]
    for expected, arguments in ((0, watched), (3, ["debug=true", "data.path=no"])):
        code, out, err = in_process(train.main, tmp_path, *given, *arguments)
        assert code == expected
        assert "canary" not in out + err
        for path in tmp_path.rglob("*"):
            assert "canary" not in path.name
            assert path.is_dir() or b"canary" not in path.read_bytes(), path
        tally(FAULT)
