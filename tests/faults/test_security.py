"""Attacks: code in data files, markup in tokens, paths outside the run directory, secrets.

An attack that succeeded would leave a mark: a folder made by its code, a script run in the
browser, a file outside the run directory, a secret in a file or in the output.
"""

import ast
import contextlib
import gzip
import hashlib
import io
import json
import logging
import os
import pickle
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from helpers import REPOSITORY, SOURCES, TEXT, TINY
from helpers.models import tiny_model
from helpers.refusals import printed_keys
from helpers.settings import settings
from helpers.tally import tally

import generate
import train
from scripts import inspect_attention, prepare_data
from training.command import compose
from training.config import GROUPS
from training.hf import to_hf

FAULT = "malicious pickle, _target_, markup in tokens, path escape, secret canaries"


@pytest.fixture(autouse=True)
def logging_restored():
    """Hydra's --info has every message logged to the stderr of that moment."""
    root = logging.getLogger()
    before = root.level, root.handlers[:]
    yield
    root.setLevel(before[0])
    root.handlers[:] = before[1]


def trained_run(found) -> None:
    trainer = train.Trainer(found)
    trainer.train()
    trainer.close(0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a text, its token file and a tiny run."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        trained_run(settings(*TINY, "data.path=text.txt", "name=run"))
        prepare = ["data.path=text.txt", "out=tokens", "data.tokenizer=byte", "workers=1"]
        patch.setattr("sys.argv", ["prepare_data", *prepare])
        prepare_data.main()
    return folder


@pytest.fixture
def folder(trained, tmp_path):
    """A copy of it, which an attack may change."""
    shutil.copytree(trained, tmp_path / "here", symlinks=True)
    return tmp_path / "here"


@pytest.fixture
def checkpoint(folder):
    return (folder / "runs" / "run" / "checkpoints" / "last").resolve()


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    """A tiny Hugging Face directory."""
    folder = tmp_path_factory.mktemp("hf")
    to_hf(tiny_model(vocab_size=50257, emb_dim=8, num_layers=1), folder)
    return folder


def update_checksums(checkpoint: Path) -> None:
    """An attacker can do this too."""
    sums = checkpoint / "SHA256SUMS"
    names = [line.split()[1] for line in sums.read_text().splitlines()]
    digests = [hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() for name in names]
    lines = [f"{digest}  {name}\n" for digest, name in zip(digests, names, strict=True)]
    sums.write_text("".join(lines))


def change_settings(checkpoint: Path, group: str, **changes) -> None:
    """Settings in state.json, with checksums to match."""
    state = json.loads((checkpoint / "state.json").read_text())
    (state["settings"][group] if group else state["settings"]).update(changes)
    (checkpoint / "state.json").write_text(json.dumps(state))
    update_checksums(checkpoint)


def continued(*more):
    return [*TINY, "data.path=text.txt", "name=run", "trainer.max_steps=6", *more]


def of_tokens(*more):
    wish = ["data=shards", "data.path=tokens", "data.within_documents=true", "name=new"]
    return [*TINY, *wish, "data.val_fraction=0.2", *more]


@pytest.fixture
def refused(in_process, folder):
    """refused(main, arguments, code) -> the stderr of a command that names one problem."""

    def check(main, arguments, expected):
        tally(FAULT)
        code, _, err = in_process(main, folder, *arguments)
        assert code == expected, err
        assert len(printed_keys(err)) == 1, err
        return err

    return check


# ------------------------------------------------------------------------------------- pickle


@pytest.fixture
def mark(tmp_path):
    """The folder made by the code of an attack."""
    path = tmp_path / "mark"
    yield path
    assert not path.exists()


class Attack:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def torch_saved(mark: Path, **options) -> bytes:
    buffer = io.BytesIO()
    values = {"wte.weight": torch.zeros(3), "h.0.attn.bias": Attack(mark)}
    torch.save(values, buffer, **options)
    return buffer.getvalue()


def pickles(mark: Path) -> list[bytes]:
    """Protocol 0 is plain text without a first byte of its own."""
    made = [pickle.dumps(Attack(mark), protocol) for protocol in (0, 1, 2, 4)]
    return [*made, torch_saved(mark), torch_saved(mark, _use_new_zipfile_serialization=False)]


def test_the_pickles_work(tmp_path):
    """Otherwise the tests below would prove nothing."""
    for number, raw in enumerate(pickles(tmp_path / "mark")):
        if number < 4:
            pickle.loads(raw)
        else:
            torch.load(io.BytesIO(raw), weights_only=False)
        (tmp_path / "mark").rmdir()


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_pickle_in_a_checkpoint(refused, checkpoint, mark, name):
    whole = f"checkpoint={checkpoint}"
    uses = [
        (train.main, continued()) if name != "state.json" else (generate.main, [whole]),
        (train.main, continued("name=new", f"trainer.resume={checkpoint}")),
    ]
    if name == "model.safetensors":
        uses += [(generate.main, [whole]), (inspect_attention.main, [whole])]
        uses += [(train.main, continued("name=new", f"trainer.init_from={checkpoint}"))]
    made = pickles(mark)
    for raw in made if name == "model.safetensors" else made[2::2]:
        (checkpoint / name).write_bytes(raw)
        update_checksums(checkpoint)
        for main, arguments in uses if raw == made[2] else uses[:1]:
            assert name in refused(main, arguments, 3)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_a_pickle_in_a_hugging_face_directory(refused, folder, hf, mark, name):
    theirs = folder / "theirs"
    theirs.mkdir()
    for raw in pickles(mark):
        (theirs / name).write_bytes(raw)
        refused(generate.main, ["checkpoint=theirs"], 3)
    shutil.copy(hf / "config.json", theirs)
    for raw in pickles(mark):
        (theirs / name).write_bytes(raw)
        err = refused(generate.main, ["checkpoint=theirs"], 3)
        assert name in err or name.endswith(".pth")
        assert "weights_only" not in err  # torch's message tells how to run it


@pytest.mark.parametrize("name", ["launch.json", "metrics.jsonl", "samples.jsonl", "config.yaml"])
def test_a_pickle_in_the_files_of_a_run(in_process, folder, mark, name):
    """They are read when a run continues, and for its report."""
    tally(FAULT)
    (folder / "runs" / "run" / name).write_bytes(pickles(mark)[2] + b"\n")
    code, _, err = in_process(train.main, folder, *continued())
    assert code in (0, 2, 3), err
    assert "Traceback" not in err


def test_a_pickle_as_text_or_tokens(refused, folder, mark):
    for name in ("a.txt", "a.jsonl", "a.parquet", "a.bin", "a.txt.gz", "a.txt.zst", "a.jsonl.gz"):
        raw = pickles(mark)[4 if name == "a.bin" else 2]
        (folder / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
        refused(train.main, [*TINY, f"data.path={name}", "name=new"], 3)
    assert not (folder / "runs" / "new").exists()
    documents = next((folder / "tokens").glob("*documents*"))
    for path in (documents, folder / "tokens" / "manifest.json"):
        path.write_bytes(pickles(mark)[2])
        refused(train.main, of_tokens(), 3)


# ------------------------------------------------------------------------------------- _target_


def call(mark) -> str:
    return f"{{_target_: os.mkdir, _args_: ['{mark}']}}"


OVERRIDES = """
+model._target_=os.mkdir +model._args_=[{mark}]
model={call}
trainer.max_steps={call}
wandb.tags=[{call}]
+hydra.callbacks.x={call}
hydra.callbacks={{x:{call}}}
hydra.launcher={call}
hydra.launcher._target_=os.mkdir +hydra.launcher.path={mark}
hydra.sweeper={call}
hydra.sweeper._target_=os.mkdir +hydra.sweeper.path={mark}
hydra/launcher=../../evil
+hydra.job_logging.handlers.x.()=os.mkdir
hydra.sweeper=${{oc.decode:'{call}'}}
hydra.launcher=${{oc.create:${{oc.decode:'{call}'}}}}
model@hydra.launcher=gpt2-nano
hydra.searchpath=[file://{mark}]
""".strip().splitlines()


WAYS = ["", "-m", "--cfg job", "--help", "--info config"]


@pytest.mark.parametrize("way", WAYS)
def test_code_in_overrides(in_process, folder, mark, way):
    """All in a sweep, which has use for some of Hydra's own settings; a part in other modes."""
    for text in OVERRIDES[:: {"": 2, "-m": 1}.get(way, 6)]:
        tally(FAULT)
        attack = [part.format(mark=mark, call=call(mark)) for part in re.split(r" (?=\+)", text)]
        code, _, err = in_process(train.main, folder, *way.split(), *attack)
        assert code == 2, (text, err)
        assert printed_keys(err), text
    assert not (folder / "multirun").exists()


FILES = {
    "experiment/mine.yaml": "# @package _global_\nhydra: {{callbacks: {{x: {call}}}}}",
    "hydra/launcher/mine.yaml": "{call}",
    "hydra/launcher/basic.yaml": "{call}",
    "hydra/job_logging/mine.yaml": "handlers: {{x: {{'()': os.mkdir, path: {mark}}}}}",
    "model/mine.yaml": "emb_dim: !!python/object/apply:os.mkdir ['{mark}']",
}


def test_code_in_files_of_settings(refused, folder, mark):
    """In every mode. What such files may hold: training/config/test_problems.py."""
    for name, content in FILES.items():
        path = folder / "mine" / name
        path.parent.mkdir(parents=True)
        path.write_text(content.format(mark=mark, call=call(mark)), encoding="utf-8")
        choice = name.removesuffix(".yaml").rpartition("/")[::2]
        for way in ([], ["-m", "seed=1,2"], ["--cfg", "all"], ["--help"]):
            arguments = [*way, "--config-dir=mine", *(["=".join(choice)] * (way != ["--help"]))]
            assert printed_keys(refused(train.main, arguments, 2)) == ["--config-dir"], name
        shutil.rmtree(folder / "mine")


EVIL = "import os\nos.mkdir({mark!r})\nclass Evil: pass\n"


@pytest.fixture
def evil(folder, mark, monkeypatch):
    """A module that could be imported and must not be."""
    monkeypatch.syspath_prepend(folder)
    (folder / "evil.py").write_text(EVIL.format(mark=str(mark)))
    yield
    assert "evil" not in sys.modules


@pytest.mark.parametrize(
    ("group", "key", "value"),
    [
        ("model", "_target_", "os.mkdir"),
        ("model", "attention", "evil:Evil"),
        ("model", "attention", "__class__"),
        ("data", "tokenizer", "evil.py"),
        ("optimizer", "_target_", "os.mkdir"),
    ],
)
def test_code_in_the_settings_of_a_checkpoint(
    in_process, folder, checkpoint, evil, group, key, value
):
    tally(FAULT)
    change_settings(checkpoint, group, **{key: value})
    for main, arguments in (
        (generate.main, [f"checkpoint={checkpoint}", "max_new_tokens=1"]),
        (train.main, continued("name=new", f"trainer.resume={checkpoint}")),
    ):
        code, _, err = in_process(main, folder, *arguments)
        # generate.py reads the model's settings and checks them; it does not read the others.
        assert code in ((2, 3) if group == "model" and main is generate.main else (0, 2, 3)), err
        assert "Traceback" not in err


def test_code_in_a_hugging_face_directory(in_process, folder, hf, evil, monkeypatch):
    theirs = Path(shutil.copytree(hf, folder / "theirs"))
    shutil.copy(folder / "evil.py", theirs)
    monkeypatch.syspath_prepend(theirs)
    config = json.loads((hf / "config.json").read_text())
    for expected, more in (
        (0, {"auto_map": {"AutoModelForCausalLM": "evil.Evil"}, "trust_remote_code": True}),
        (0, {"_target_": "os.mkdir", "_args_": ["mark"]}),
        (3, {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}),
        (3, {"activation_function": "evil.Evil"}),
        (0, {"architectures": ["evil.Evil"], "custom_pipelines": {"x": {"impl": "evil.Evil"}}}),
    ):
        tally(FAULT)
        (theirs / "config.json").write_text(json.dumps(config | more))
        arguments = ["checkpoint=theirs", "max_new_tokens=1"]
        code, _, err = in_process(generate.main, folder, *arguments)
        assert code == expected, (more, err)
        assert "Traceback" not in err


# ---------------------------------------------------------------------------- our own sources

FORBIDDEN = re.compile(
    r"""(import|from)\ (_?pickle|cPickle|dill|cloudpickle|marshal|shelve|joblib)\b.*
    | (import|from)\ (runpy|code|codeop|imp)\b.*
    | from\ .*\ import\ .*\binstantiate\b.* | (\w+\.)*instantiate\(.*
    | (eval|exec|compile|__import__|importlib\.__import__)\(.*
    | torch\.(load|save|hub\.\w+|package\.\w+|jit\.load)\(.*
    | os\.(system|popen|exec\w*|spawn\w*)\(.*
    | subprocess\.(getoutput\(|getstatusoutput\(|\w+\(f['"]).*
    | yaml\.(load|load_all|unsafe_load|full_load|add_constructor)\(.* | pandas\.read_pickle\(.*
    | (importlib\.import_module|import_module|_needed)\((?!').*
    | .*\b(shell|allow_pickle|trust_remote_code)=True.* | .*\bLoader=(?!yaml\.SafeLoader).*""",
    re.VERBOSE | re.DOTALL,
)
# Old weights with torch's own guard; modules by name from tables of our own.
ALLOWED = {
    "tokens/sources.py": {"importlib.import_module(module)"},
    "training/config.py": {"importlib.import_module(module)"},
    "training/hf.py": {"torch.load(file, map_location='cpu', weights_only=True, mmap=is_zip)"},
}


def findings(source: str) -> set[str]:
    """Imports and calls that could run code from data."""
    kinds = ast.Import | ast.ImportFrom | ast.Call
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    return {text for text in map(ast.unparse, nodes) if FORBIDDEN.fullmatch(text)}


PLANTED = """
import pickle
from pickle import loads
eval('1')
def f(): exec('1')
__import__('os')
torch.load(file)
torch.save(x, file)
os.system('ls')
subprocess.run('ls', shell=True)
subprocess.run(f'ls {x}')
np.load(file, allow_pickle=True)
yaml.load(file, Loader=yaml.Loader)
yaml.parse(file, Loader=yaml.UnsafeLoader)
hydra.utils.instantiate(config)
from hydra.utils import instantiate
importlib.import_module(name)
AutoModel.from_pretrained(x, trust_remote_code=True)
"""


def test_no_source_runs_data():
    for line in PLANTED.strip().splitlines():
        assert findings(line), line
    found = {}
    for path in SOURCES:
        if texts := findings(path.read_text(encoding="utf-8")):
            found[path.relative_to(REPOSITORY).as_posix()] = texts
    assert found == ALLOWED
    for module, _ in GROUPS.values():  # what training/config.py imports by name is ours
        place = REPOSITORY / module.replace(".", "/")
        assert place.is_dir() or place.with_suffix(".py").is_file()


# ------------------------------------------------------------------------------ markup in tokens

MARKUP = {
    "a script": "<script>window.hacked = 1</script>",
    "an end": "</script><script>window.hacked = 1</script>",
    "an image": "<img src=x onerror='window.hacked=1'>",
    "a drawing": "<svg/onload=window.hacked=1>",
    "an address": "<a href='javascript:window.hacked=1'>x</a>",
    "a comment": "--><!--<script>",
    "character data": "]]><![CDATA[<script>window.hacked=1</script>",
    "a template": "${window.hacked=1} {{7*7}} #{7*7}",
    "quotes": "\"' onmouseover=window.hacked=1 x='`",
    "a style": "</style><style>*{background:url(http://127.0.0.1:9/x)}</style>",
    "backwards": "user\u202etxt.exe\u2066",
    "line ends of scripts": "a\u2028window.hacked=1\u2029b",
    "a terminal's title": "\x1b]0;owned\x07 \x1b[2J \x9b31m \x08\x7f",
}
OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture(scope="module")
def marked_up(tmp_path_factory):
    """(folder, what was printed) of a run whose text, prompts and names are full of markup."""
    folder = tmp_path_factory.mktemp("marked")
    all_of_it = "\n".join(MARKUP.values())
    name = "<img src=x onerror=window.hacked=1>.txt"
    (folder / name).write_text((all_of_it + "\n") * 12, encoding="utf-8")
    files = folder / "mine" / "experiment"
    files.mkdir(parents=True)
    mine = {
        "trainer": {"sample_prompt": all_of_it},
        "lens": {
            "every": 2,
            "prompts": [*MARKUP.values(), "../../../outside/x", "/outside/y", "a\0b"],
            "repeated": 0,
        },
        "wandb": {"project": MARKUP["an image"][:40], "tags": [MARKUP["a script"]]},
    }
    text = json.dumps(mine)  # which is YAML, except for ${
    text = text.replace("${", "\\\\${")
    (files / "mine.yaml").write_text(f"# @package _global_\n{text}", encoding="utf-8")
    tiny = [text for text in TINY if text != "lens=off"]
    overrides = [*tiny, "experiment=mine", f"data.path={name}", "name=run", "trainer.max_steps=2"]
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        trained_run(compose(overrides, str(folder / "mine")))
    return folder, printed.getvalue()


def test_markup_is_shown_and_not_executed(marked_up, opened):
    """In every page of the run. `opened` fails on any request, dialog, error or console line."""
    folder, _ = marked_up
    pages = sorted((folder / "runs").rglob("*.html"))
    assert len(pages) >= 3  # report, time-lapse, at least one step
    tally(FAULT, len(MARKUP))
    for path in pages:
        page = opened(path, before="window.trap = 1")
        page.wait_for_function("document.readyState === 'complete'")
        assert page.evaluate("[window.trap, window.hacked]") == [1, None]
        assert page.locator("img[src='x'], svg[onload], a[href^='javascript']").count() == 0
    report = opened(folder / "runs" / "run" / "report.html")
    words = report.evaluate("document.body.textContent")
    for what in ("a script", "an image", "a style", "a comment"):
        assert MARKUP[what] in words, what


def test_markup_in_what_is_inspected(marked_up, opened, in_process):
    """The name of the run is in the title."""
    folder, _ = marked_up
    name = "<script>window.hacked=1<"
    shutil.copytree(folder / "runs" / "run", folder / name, symlinks=True)
    for text in (MARKUP["an end"], MARKUP["an image"]):
        arguments = [f"checkpoint={name}", f"text={text}", "out=page.html"]
        code, _, err = in_process(inspect_attention.main, folder, *arguments)
        assert (code, err) == (0, "")
        page = opened(folder / "page.html")
        assert page.evaluate("window.hacked") is None
        assert name in page.title()


def test_control_characters_in_samples_and_continuations(
    marked_up, in_process, folder, monkeypatch
):
    """A terminal gets them escaped; a file gets every byte."""
    _, printed = marked_up
    assert "\\x1b]0;owned" in printed
    assert not OBEYED.search(printed)
    prompt = MARKUP["a terminal's title"] + MARKUP["backwards"] + "\r\n"
    arguments = ["checkpoint=runs/run", f"prompt={prompt}", "max_new_tokens=1"]
    code, out, _ = in_process(generate.main, folder, *arguments)
    assert code == 0
    assert out.startswith(prompt)
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True, raising=False)
    code, out, _ = in_process(generate.main, folder, *arguments)
    assert code == 0
    assert out.startswith(
        "\\x1b]0;owned\\x07 \\x1b[2J \\x9b31m \\x08\\x7fuser\\u202etxt.exe\\u2066\n"
    )
    assert not OBEYED.search(out)


def test_control_characters_in_paths(refused):
    name = "x\x1b]0;owned\x07\x9b2J\nSecond line"
    for main, key in (
        (train.main, "data.path"),
        (train.main, "trainer.resume"),
        (generate.main, "checkpoint"),
        (inspect_attention.main, "checkpoint"),
    ):
        err = refused(main, [*(TINY if main is train.main else []), f"{key}={name}"], 3)
        assert not OBEYED.search(err)
        assert "\\x1b]0;owned" in err


# ----------------------------------------------------------------- paths outside the run directory


def test_prompts_are_no_paths(marked_up):
    """All that the run made is in its own directory."""
    folder, _ = marked_up
    assert not (folder.parent / "outside").exists()
    assert not Path("/outside").exists()
    outside = {p.name for p in folder.iterdir()} - {"runs", "mine", "page.html"}
    assert all(name.startswith("<") for name in outside)
    assert [p.name for p in (folder / "runs").iterdir()] == ["run"]


def test_a_manifest_that_names_other_files(refused, folder):
    path = folder / "tokens" / "manifest.json"
    manifest = json.loads(path.read_text())
    shard = manifest["shards"][0]
    # A whole shard, which has the checksums of the manifest.
    shutil.copy(folder / "tokens" / shard["file"], folder / "outside.bin")
    here = f"{folder}/outside.bin"
    for file in ("../outside.bin", here, "a/../../outside.bin", "a\0.bin", "..", "", "~/x.bin"):
        shard["file"] = file
        path.write_text(json.dumps(manifest))
        assert printed_keys(refused(train.main, of_tokens(), 3)) == ["data.path"], file


def test_a_name_outside_the_runs(refused, folder):
    before = sorted(folder.parent.rglob("*"))
    given = [[f"name={x}"] for x in ("..", "/tmp/outside", "a/../../outside", "run/../x")]
    for arguments in (*given, ["-m", "name=../outside,b"]):
        err = refused(train.main, [*TINY, "data.path=text.txt", *arguments], 2)
        assert printed_keys(err) == ["name"]
    assert sorted(folder.parent.rglob("*")) == before


def test_a_tensor_with_the_name_of_a_path(refused, folder, checkpoint):
    from safetensors.torch import load_file, save_file

    tensors = load_file(checkpoint / "model.safetensors")
    for name in ("../../outside", "/tmp/outside", "blocks.0/../../x"):
        save_file(tensors | {name: torch.zeros(1)}, checkpoint / "model.safetensors")
        update_checksums(checkpoint)
        before = sorted(folder.parent.rglob("*"))
        refused(generate.main, [f"checkpoint={checkpoint}"], 3)
        assert sorted(folder.parent.rglob("*")) == before


def test_a_checkpoint_that_names_another_folder(in_process, folder, checkpoint):
    """Where a run is, the command line says."""
    tally(FAULT)
    change_settings(checkpoint, "data", path="/etc/passwd")
    change_settings(checkpoint, "", name="../../outside")
    shutil.copytree(checkpoint, folder / "copied")
    arguments = continued("name=new", "trainer.resume=copied")
    code, _, err = in_process(train.main, folder, *arguments)
    assert code == 0, err
    assert sorted(p.name for p in (folder / "runs").iterdir()) == ["new", "run"]
    assert not (folder.parent / "outside").exists()


def test_links_among_old_checkpoints_are_not_followed(in_process, folder):
    """Old checkpoints are deleted; the targets of links with such names are not."""
    tally(FAULT)
    precious = folder.parent / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    for name in ("step_00000001", "step_00000001.part", "step_00000003"):
        (folder / "runs" / "run" / "checkpoints" / name).symlink_to(precious)
    in_process(train.main, folder, *continued("trainer.save_every=1", "trainer.keep=1"))
    assert (precious / "thesis.txt").read_text() == "years of work"


# ---------------------------------------------------------------------------------------- secrets

SECRETS = {
    "WANDB_API_KEY": "canary0000000000000000000000000000wandb",
    "HF_TOKEN": "hf_canary1111111111111111111111",
    "MY_OWN_PASSWORD": "canary3333333333",
    "DATABASE_URL": "postgres://me:canary4444@host/db",
}


def leaks(folder: Path, *outputs: str) -> list[str]:
    """Where a secret, or a part of one, is found."""
    found = [f"output: {text[:80]}" for text in outputs if "canary" in text]
    for path in sorted(folder.rglob("*")):
        if "canary" in path.name or (path.is_file() and b"canary" in path.read_bytes()):
            found.append(str(path))
    return found


@pytest.fixture
def secrets(monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


def test_the_search_for_secrets_finds_them(tmp_path):
    (tmp_path / "a").write_text(f"x{SECRETS['HF_TOKEN']}y")
    assert len(leaks(tmp_path, "canary0", "nothing")) == 2


@pytest.mark.parametrize("way", ["one run", "multirun", "failure", "--cfg", "--info", "--help"])
def test_no_secret_is_written_or_printed(in_process, tmp_path, text_file, secrets, way):
    tally(FAULT)
    arguments = [*TINY, f"data.path={text_file}", "trainer.max_steps=2"]
    arguments, expected = {
        "one run": ([*arguments, "lens=often", "lens.prompts=[a word]"], 0),
        "multirun": (["-m", *arguments, "seed=1,2"], 0),
        "failure": ([*arguments, "debug=true", "data.path=no"], 3),
        "--cfg": (["--cfg", "all", *arguments], 0),
        "--info": (["--info", "all", *arguments], 0),
        "--help": (["--help"], 0),
    }[way]
    code, out, err = in_process(train.main, tmp_path, *arguments)
    assert code == expected, err
    assert leaks(tmp_path, out, err) == []
    if way == "multirun":
        assert len(list((tmp_path / "runs").iterdir())) == 2
        assert list((tmp_path / "multirun").rglob("*.yaml"))


REFERENCES = """
name=${oc.env:MY_OWN_PASSWORD}
name='${oc.env:MY_OWN_PASSWORD}'
wandb.group=x-${oc.env:WANDB_API_KEY}-y
wandb.tags=["${oc.env:HF_TOKEN}"]
data.text_key=${oc.env:DATABASE_URL,none}
seed=${oc.decode:${oc.env:MY_OWN_PASSWORD}}
data.path=${oc.env:DATABASE_URL}
name=${oc.${oc.select:x,env}:MY_OWN_PASSWORD}
trainer.sample_prompt=${oc.env:HF_TOKEN}
lens.prompts=["${oc.env:HF_TOKEN}"]
""".strip().splitlines()


def test_no_setting_reads_a_secret(in_process, tmp_path, text_file, secrets):
    """In a run and one of the other modes each."""
    modes = [["-m", "seed=1,2"], ["--cfg", "all"], ["--cfg", "job", "--resolve"]]
    for number, reference in enumerate(REFERENCES):
        for way in ([], modes[number % 3]):
            tally(FAULT)
            base = [*TINY, f"data.path={text_file}", "trainer.max_steps=2"]
            given = [text for text in base if text.split("=")[0] != reference.split("=")[0]]
            code, out, err = in_process(train.main, tmp_path, *way, *given, reference)
            # A prompt is text: in a single run it is taken literally.
            assert code == 2 or (code == 0 and "prompt" in reference), (reference, err)
            assert leaks(tmp_path, out, err) == []


def test_no_file_of_settings_reads_a_secret(in_process, tmp_path, text_file, secrets):
    path = tmp_path / "mine" / "experiment" / "mine.yaml"
    path.parent.mkdir(parents=True)
    base = ["--config-dir=mine", "experiment=mine", *TINY, f"data.path={text_file}"]
    for key in ("name", "wandb.group", "hydra.sweep.dir", "trainer.sample_prompt"):
        tree = "${oc.env:MY_OWN_PASSWORD}"
        for part in reversed(key.split(".")):
            tree = {part: tree}
        path.write_text(f"# @package _global_\n{json.dumps(tree)}")
        for way in ([], ["-m"]):
            tally(FAULT)
            code, out, err = in_process(train.main, tmp_path, *way, *base)
            assert code == 2, err
            assert leaks(tmp_path, out, err) == []


def test_a_secret_given_as_a_setting_is_not_repeated(refused, tmp_path):
    for key in ("wandb.api_key", "api_key", "+hf_token", "wandb.password", "secret"):
        err = refused(train.main, [f"{key}={SECRETS['HF_TOKEN']}"], 2)
        assert leaks(tmp_path, err) == []
