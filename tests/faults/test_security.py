"""Attacks: code in files that hold data, markup in tokens, paths that leave, secrets that stay.

Each attack would leave a mark if it got through: a folder that its code makes, a script that runs
in the browser, a file outside the run, a secret somewhere in what a run leaves behind.
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
from helpers.tally import tally

import generate
import train
from scripts import inspect_attention, prepare_data
from training.command import compose

FAULT = "malicious pickle, _target_, markup in tokens, path escape, secret canaries"


@pytest.fixture(autouse=True)
def counted():
    """Every test here is an attack."""
    tally(FAULT, 1)


@pytest.fixture(autouse=True)
def quiet_again():
    """Hydra's --info has every message logged, to the stderr of its time."""
    root = logging.getLogger()
    before = root.level, root.handlers[:]
    yield
    root.setLevel(before[0])
    root.handlers[:] = before[1]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A tiny trained run, to be copied."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    with contextlib.chdir(folder):
        trainer = train.Trainer(compose([*TINY, "data.path=text.txt", "name=run"]))
        trainer.train()
        trainer.console.close()
        trainer.tracker.finish()
    return folder


@pytest.fixture
def folder(trained, tmp_path):
    """A folder with a text and a run in it, which an attack may change."""
    shutil.copytree(trained, tmp_path / "here", symlinks=True)
    return tmp_path / "here"


@pytest.fixture
def checkpoint(folder):
    return (folder / "runs" / "run" / "checkpoints" / "last").resolve()


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    """A tiny Hugging Face directory."""
    from model import GPT, ModelConfig
    from training.hf import to_hf

    folder = tmp_path_factory.mktemp("hf")
    to_hf(GPT(ModelConfig(context_length=16, emb_dim=8, num_heads=2, num_layers=1)), folder)
    return folder


def with_right_sums(checkpoint: Path) -> None:
    """What attackers write, they can sum up as well."""
    sums = checkpoint / "SHA256SUMS"
    names = [line.split()[1] for line in sums.read_text().splitlines()]
    digests = [hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() for name in names]
    lines = [f"{digest}  {name}\n" for digest, name in zip(digests, names, strict=True)]
    sums.write_text("".join(lines))


def continued(*more):
    return [*TINY, "data.path=text.txt", "name=run", "trainer.max_steps=6", *more]


# ------------------------------------------------------------------------------------- pickle


@pytest.fixture
def mark(tmp_path):
    """The folder that code makes which should never run."""
    path = tmp_path / "mark"
    yield path
    assert not path.exists()


class Attack:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def as_pickle(mark: Path, protocol: int = 2) -> bytes:
    return pickle.dumps(Attack(mark), protocol)


def as_torch_saves(mark: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save({"weight": Attack(mark)}, buffer)
    return buffer.getvalue()


def test_the_pickles_bite(tmp_path):
    """Else the tests below would prove nothing."""
    pickle.loads(as_pickle(tmp_path / "a"))
    torch.load(io.BytesIO(as_torch_saves(tmp_path / "b")), weights_only=False)
    assert (tmp_path / "a").is_dir()
    assert (tmp_path / "b").is_dir()


def check_told(code, err, expected_code, says):
    assert code == expected_code, err
    assert len(err.splitlines()) == 1, err
    assert re.search(says, err), err
    assert "Traceback" not in err


IS_PICKLE = r"is a pickle, which could run code.*; convert it to safetensors"
MAKERS = {"pickle": as_pickle, "torch.save": as_torch_saves}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("use", ["generate", "init_from", "inspect", "resume"])
def test_a_pickle_as_weights(in_process, folder, checkpoint, mark, maker, use):
    (checkpoint / "model.safetensors").write_bytes(MAKERS[maker](mark))
    with_right_sums(checkpoint)
    main, arguments = {
        "generate": (generate.main, [f"checkpoint={checkpoint}"]),
        "inspect": (inspect_attention.main, [f"checkpoint={checkpoint}"]),
        "resume": (train.main, continued()),
        "init_from": (train.main, continued("name=new", f"trainer.init_from={checkpoint}")),
    }[use]
    code, _, err = in_process(main, folder, *arguments)
    check_told(code, err, 3, rf"model\.safetensors: {IS_PICKLE}")


@pytest.mark.parametrize("maker", MAKERS)
def test_a_pickle_as_moments(in_process, folder, checkpoint, mark, maker):
    (checkpoint / "optimizer.safetensors").write_bytes(MAKERS[maker](mark))
    with_right_sums(checkpoint)
    code, _, err = in_process(train.main, folder, *continued())
    check_told(code, err, 3, rf"optimizer\.safetensors: {IS_PICKLE}")


def test_an_old_pickle_as_weights(in_process, folder, checkpoint, mark):
    """Protocol 0 is plain text and has no first byte of its own."""
    (checkpoint / "model.safetensors").write_bytes(as_pickle(mark, protocol=0))
    with_right_sums(checkpoint)
    code, _, err = in_process(generate.main, folder, f"checkpoint={checkpoint}")
    check_told(code, err, 3, r"model\.safetensors: ")


def test_a_pickle_as_state(in_process, folder, checkpoint, mark):
    (checkpoint / "state.json").write_bytes(as_pickle(mark))
    with_right_sums(checkpoint)
    for main, arguments in (
        (generate.main, [f"checkpoint={checkpoint}"]),
        (train.main, continued("name=new", f"trainer.resume={checkpoint}")),
    ):
        code, _, err = in_process(main, folder, *arguments)
        check_told(code, err, 3, r"state\.json: ")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
@pytest.mark.parametrize("maker", MAKERS)
def test_a_pickle_in_a_hugging_face_directory(in_process, folder, hf, mark, maker, name):
    theirs = folder / "theirs"
    theirs.mkdir()
    (theirs / name).write_bytes(MAKERS[maker](mark))
    code, _, err = in_process(generate.main, folder, "checkpoint=theirs")
    check_told(code, err, 3, r"checkpoint=theirs: holds no checkpoint; ")
    shutil.copy(hf / "config.json", theirs)
    code, _, err = in_process(generate.main, folder, "checkpoint=theirs")
    check_told(code, err, 3, r"checkpoint=theirs/\S+: ")
    if not name.endswith(".pth"):
        assert re.search(rf"{re.escape(name)}: is a pickle, which could run code", err)


@pytest.mark.parametrize("protocol", [0, 1, 4])
def test_a_pickle_of_any_kind_as_old_weights(in_process, folder, hf, mark, protocol):
    theirs = folder / "theirs"
    theirs.mkdir()
    shutil.copy(hf / "config.json", theirs)
    for content in (as_pickle(mark, protocol), with_code_behind_weights(mark)):
        (theirs / "pytorch_model.bin").write_bytes(content)
        code, _, err = in_process(train.main, folder, *TINY, "trainer.init_from=theirs")
        check_told(code, err, 3, rf"pytorch_model\.bin: ({IS_PICKLE}|is unreadable)")
        assert "weights_only" not in err  # torch's own words tell how to run it


def with_code_behind_weights(mark: Path) -> bytes:
    """As torch wrote before 1.6, with all in order but one value."""
    buffer = io.BytesIO()
    values = {"wte.weight": torch.zeros(3), "h.0.attn.bias": Attack(mark)}
    torch.save(values, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


@pytest.mark.parametrize("beside", ["launch.json", "metrics.jsonl", "samples.jsonl", "config.yaml"])
def test_a_pickle_among_a_runs_records(in_process, folder, mark, beside):
    """They are read again when a run goes on, and for its report."""
    (folder / "runs" / "run" / beside).write_bytes(as_pickle(mark) + b"\n")
    code, _, err = in_process(train.main, folder, *continued())
    assert code in (0, 2, 3), err
    assert "Traceback" not in err


TEXT_NAMES = ["a.txt", "a.jsonl", "a.parquet", "a.bin", "a.txt.gz", "a.txt.zst", "a.jsonl.gz"]


@pytest.mark.parametrize("name", TEXT_NAMES)
def test_a_pickle_as_text_or_tokens(in_process, folder, mark, name):
    content = as_torch_saves(mark) if name == "a.bin" else as_pickle(mark)
    if name.endswith(".gz"):
        content = gzip.compress(content)
    (folder / name).write_bytes(content)
    arguments = [*TINY, f"data.path={name}", "name=new"]
    code, _, err = in_process(train.main, folder, *arguments)
    check_told(code, err, 3, r"data\.\w+=\S+: ")
    assert not (folder / "runs" / "new").exists()


@pytest.mark.parametrize("name", ["manifest.json", "shard_000000.bin.documents"])
def test_a_pickle_beside_tokens(in_process, folder, mark, name):
    """First what our own command makes, then that with one file replaced."""
    prepare = ["data.path=text.txt", "out=tokens", "data.tokenizer=byte", "workers=1"]
    assert in_process(prepare_data.main, folder, *prepare)[0] == 0
    target = folder / "tokens" / name
    if not target.is_file():
        target = next((folder / "tokens").glob("*documents*"))
    target.write_bytes(as_pickle(mark))
    wish = ["data=shards", "data.path=tokens", "data.within_documents=true", "name=new"]
    code, _, err = in_process(train.main, folder, *TINY, *wish, "data.val_fraction=0.2")
    check_told(code, err, 3, r"data\.path=\S+: ")


# ------------------------------------------------------------------------------------- _target_


def make(mark) -> str:
    return f"{{_target_: os.mkdir, _args_: ['{mark}']}}"


OVERRIDES = {
    "a setting": ["+model._target_=os.mkdir", "+model._args_=[{mark}]"],
    "a group's value": ["model={make}"],
    "a value": ["trainer.max_steps={make}"],
    "a list": ["wandb.tags=[{make}]"],
    "a callback": ["+hydra.callbacks.x={make}"],
    "callbacks": ["hydra.callbacks={{x:{make}}}"],
    "a launcher": ["hydra.launcher={make}"],
    "a launcher's key": ["hydra.launcher._target_=os.mkdir", "+hydra.launcher.path={mark}"],
    "a sweeper": ["hydra.sweeper={make}"],
    "a sweeper's key": ["hydra.sweeper._target_=os.mkdir", "+hydra.sweeper.path={mark}"],
    "a file of nobody": ["hydra/launcher=../../evil"],
    "loggers": ["+hydra.job_logging.handlers.x.()=os.mkdir"],
    "decoded": ["hydra.sweeper=${{oc.decode:'{make}'}}"],
    "created": ["hydra.launcher=${{oc.create:${{oc.decode:'{make}'}}}}"],
    "another package": ["model@hydra.launcher=gpt2-nano"],
    "a search path": ["hydra.searchpath=[file://{mark}]"],
}


@pytest.mark.parametrize("way", [[], ["-m"], ["--cfg", "job"], ["--help"], ["--info", "config"]])
@pytest.mark.parametrize("what", OVERRIDES)
def test_code_in_overrides(in_process, folder, mark, what, way):
    attack = [text.format(mark=mark, make=make(mark)) for text in OVERRIDES[what]]
    if way == ["-m"]:
        attack.append("seed=1,2")
    code, _, err = in_process(train.main, folder, *way, *attack)
    assert code == 2, err
    assert err
    assert "Traceback" not in err
    assert not (folder / "multirun").exists()


FILES = {
    "an experiment": ("experiment/mine.yaml", "# @package _global_\nmodel: {make}"),
    "a model": ("model/mine.yaml", "{make}"),
    "a callback": (
        "experiment/mine.yaml",
        "# @package _global_\nhydra: {{callbacks: {{x: {make}}}}}",
    ),
    "a package": ("experiment/mine.yaml", "# @package hydra\nsweeper: {make}"),
    "a launcher": ("hydra/launcher/mine.yaml", "{make}"),
    "a launcher by our name": ("hydra/launcher/basic.yaml", "{make}"),
    "loggers": ("hydra/job_logging/mine.yaml", "handlers: {{x: {{'()': os.mkdir, path: {mark}}}}}"),
    "Python's tag": ("experiment/mine.yaml", "name: !!python/object/apply:os.mkdir ['{mark}']"),
    "Python's name": ("experiment/mine.yaml", "name: !!python/name:os.mkdir"),
    "Python's module": ("experiment/mine.yaml", "name: !!python/module:antigravity"),
    "merged": ("experiment/mine.yaml", "x: &x {make}\nhydra: {{sweeper: {{<<: *x}}}}"),
    "decoded": ("experiment/mine.yaml", 'hydra: {{sweeper: "${{oc.decode:{make}}}"}}'),
    "outside": ("experiment/mine.yaml", "defaults: [../../evil]"),
}


@pytest.mark.parametrize("what", FILES)
def test_code_in_the_users_files(in_process, folder, mark, what):
    name, content = FILES[what]
    group = name.split("/")[0]
    path = folder / "mine" / name
    path.parent.mkdir(parents=True)
    header = "" if content.startswith("#") or group == "hydra" else "# @package _global_\n"
    path.write_text(header + content.format(mark=mark, make=make(mark)), encoding="utf-8")
    (folder / "evil.yaml").write_text(make(mark), encoding="utf-8")
    choice = [] if group == "hydra" else [f"{group}=mine"]
    for way in (choice, ["-m", "seed=1,2", *choice], ["--cfg", "all", *choice], ["--help"]):
        code, _, err = in_process(train.main, folder, "--config-dir=mine", *way)
        check_told(code, err, 2, "^--config-dir=mine")
    choice = ["hydra/launcher=mine"] if "launcher" in name else ["hydra/job_logging=mine"]
    code, _, err = in_process(train.main, folder, "--config-dir=mine", "-m", "seed=1,2", *choice)
    assert code == 2, err


EVIL = "import os\nos.mkdir({mark!r})\nclass Evil: pass\n"


@pytest.mark.parametrize(
    ("group", "key", "value"),
    [
        ("model", "_target_", "os.mkdir"),
        ("model", "attention", "evil:Evil"),
        ("model", "attention", "__class__"),
        ("data", "tokenizer", "evil.py"),
        ("data", "_target_", "os.mkdir"),
        ("optimizer", "_target_", "os.mkdir"),
        ("model", "trust_remote_code", True),
    ],
)
def test_code_in_the_settings_of_a_checkpoint(
    in_process, folder, checkpoint, mark, monkeypatch, group, key, value
):
    monkeypatch.syspath_prepend(folder)
    (folder / "evil.py").write_text(EVIL.format(mark=str(mark)))
    state = json.loads((checkpoint / "state.json").read_text())
    state["settings"][group][key] = value
    (checkpoint / "state.json").write_text(json.dumps(state))
    with_right_sums(checkpoint)
    for main, arguments in (
        (generate.main, [f"checkpoint={checkpoint}", "max_new_tokens=1"]),
        (train.main, continued("name=new", f"trainer.resume={checkpoint}")),
    ):
        code, _, err = in_process(main, folder, *arguments)
        # What is read of a group is checked; what nobody reads is nothing.
        built_of_it = group == "model" and main is generate.main
        assert code in ((2, 3) if built_of_it else (0, 2, 3)), err
        assert "Traceback" not in err
    assert "evil" not in sys.modules


@pytest.mark.parametrize(
    "more",
    [
        {"auto_map": {"AutoModelForCausalLM": "evil.Evil"}, "trust_remote_code": True},
        {"_target_": "os.mkdir", "_args_": ["mark"]},
        {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}},
        {"activation_function": "evil.Evil"},
        {"architectures": ["evil.Evil"], "custom_pipelines": {"x": {"impl": "evil.Evil"}}},
    ],
)
def test_code_in_a_hugging_face_directory(in_process, folder, hf, mark, monkeypatch, more):
    shutil.copytree(hf, folder / "theirs")
    monkeypatch.syspath_prepend(folder / "theirs")
    (folder / "theirs" / "evil.py").write_text(EVIL.format(mark=str(mark)))
    config = json.loads((hf / "config.json").read_text())
    (folder / "theirs" / "config.json").write_text(json.dumps(config | more))
    code, _, err = in_process(generate.main, folder, "checkpoint=theirs", "max_new_tokens=1")
    assert code == (3 if {"model_type", "activation_function"} & more.keys() else 0), err
    assert "Traceback" not in err
    assert "evil" not in sys.modules


# ---------------------------------------------------------------------------- our own sources

MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
MODULES |= {"runpy", "code", "codeop", "imp"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = re.compile(
    r"torch\.(load|save|hub\..*|package\..*|jit\.load)|os\.(system|popen|exec\w*|spawn\w*)"
    r"|yaml\.(load|load_all|unsafe_load|full_load|add_constructor)|(\w+\.)*instantiate"
    r"|pandas\.read_pickle|subprocess\.(getoutput|getstatusoutput)|importlib\.__import__"
)
# The one reader of old weights, with torch's own guard, word for word.
OLD_WEIGHTS = ("training/hf.py", "_read_old")
# Modules by name: from tables of our own.
IMPORTS_BY_NAME = {("training/config.py", "schema_of"), ("tokens/sources.py", "_needed")}


def findings(source: str, file: str = "") -> list[str]:
    """What in a source could run code that came as data."""
    tree, found = ast.parse(source), []
    function_of = {}
    for outer in ast.walk(tree):
        if isinstance(outer, ast.FunctionDef):
            function_of |= {id(inner): outer.name for inner in ast.walk(outer)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module] if (node.module or "").split(".")[0] in MODULES else []
            found += [a.name for a in node.names if a.name == "instantiate"]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            guard = [ast.unparse(w.value) for w in node.keywords if w.arg == "weights_only"]
            place = (file, function_of.get(id(node)))
            if (name, place, guard) == ("torch.load", OLD_WEIGHTS, ["True"]):
                continue
            if name in BUILTINS or CALLS.fullmatch(name):
                found.append(name)
            elif name.startswith("subprocess.") and isinstance(node.args[0], ast.JoinedStr):
                found.append(name)  # a command put together as text
            elif name.endswith("import_module") or name == "_needed":
                constant = isinstance(node.args[0], ast.Constant)
                if not constant and place not in IMPORTS_BY_NAME:
                    found.append(name)
            for word in node.keywords:
                value = ast.unparse(word.value)
                if (word.arg, value) in {("shell", "True"), ("allow_pickle", "True")}:
                    found.append(word.arg)
                if word.arg in ("weights_only", "trust_remote_code"):
                    found.append(word.arg)
                if word.arg == "Loader" and value != "yaml.SafeLoader":
                    found.append(value)
    return found


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle",
        "from pickle import loads",
        "eval('1')",
        "def f(): exec('1')",
        "__import__('os')",
        "torch.load(file)",
        "torch.save(x, file)",
        "os.system('ls')",
        "subprocess.run('ls', shell=True)",
        "subprocess.run(f'ls {x}')",
        "np.load(file, allow_pickle=True)",
        "yaml.load(file, Loader=yaml.Loader)",
        "yaml.parse(file, Loader=yaml.UnsafeLoader)",
        "hydra.utils.instantiate(config)",
        "from hydra.utils import instantiate",
        "importlib.import_module(name)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
    ],
)
def test_what_the_search_finds(planted):
    assert findings(planted)


def test_old_weights_are_read_in_one_place_and_in_one_way():
    def found(arguments, function="_read_old", file="training/hf.py"):
        return findings(f"def {function}(file): torch.load({arguments})", file)

    assert found("file, weights_only=True") == []
    for arguments in ("file", "file, weights_only=False", "file, weights_only=x", "file, **x"):
        assert found(arguments)
    assert found("file, weights_only=True", function="other")
    assert found("file, weights_only=True", file="training/checkpoint.py")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_nothing_of_ours_runs_data(path):
    name = path.relative_to(REPOSITORY).as_posix()
    assert findings(path.read_text(encoding="utf-8"), name) == []


def test_no_module_by_a_name_from_outside():
    """What training/config.py imports by name is in its own table."""
    from training.config import GROUPS

    for module, _ in GROUPS.values():
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
    text = json.dumps(mine)  # which YAML is, but for ${
    text = text.replace("${", "\\\\${")
    (files / "mine.yaml").write_text(f"# @package _global_\n{text}", encoding="utf-8")
    tiny = [text for text in TINY if text != "lens=off"]
    settings = [*tiny, "experiment=mine", f"data.path={name}", "name=run", "trainer.max_steps=2"]
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        trainer = train.Trainer(compose(settings, str(folder / "mine")))
        trainer.train()
        trainer.console.close()
        trainer.tracker.finish()
    return folder, printed.getvalue()


def pages_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.html"))


def test_markup_is_shown_and_never_obeyed(marked_up, opened):
    """In every page of the run. `opened` fails on any request, dialog, error or console line."""
    folder, _ = marked_up
    pages = pages_of(folder / "runs")
    assert len(pages) >= 3  # report, time-lapse, at least one step
    tally(FAULT, len(MARKUP) - 1)
    for path in pages:
        page = opened(path, before="window.trap = 1")
        page.wait_for_timeout(100)
        assert page.evaluate("[window.trap, window.hacked]") == [1, None]
        assert page.locator("img[src='x'], svg[onload], a[href^='javascript']").count() == 0
    report = opened(folder / "runs" / "run" / "report.html")
    words = report.evaluate("document.body.textContent")
    for what in ("a script", "an image", "a style", "a comment"):
        assert MARKUP[what] in words, what  # shown as what it is


def test_markup_in_what_is_inspected(marked_up, opened, in_process):
    """The name of a run becomes a title here."""
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


def test_no_terminal_is_told_what_to_do_by_a_sample(marked_up):
    """Neither the text nor a prompt, in what training prints."""
    _, printed = marked_up
    assert "sample: " in printed
    assert "\\x1b]0;owned" in printed
    assert not OBEYED.search(printed)


def test_no_terminal_is_told_what_to_do_by_a_model(in_process, folder, monkeypatch):
    """A terminal is shown what it would obey; a file gets every byte."""
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


@pytest.mark.parametrize(
    ("main", "key"),
    [
        (train.main, "data.path"),
        (train.main, "trainer.resume"),
        (generate.main, "checkpoint"),
        (inspect_attention.main, "checkpoint"),
    ],
)
def test_no_terminal_is_told_what_to_do_by_a_path(in_process, folder, main, key):
    name = "x\x1b]0;owned\x07\x9b2J\nSecond line"
    code, _, err = in_process(main, folder, *(TINY if main is train.main else []), f"{key}={name}")
    assert code == 3, err
    assert not OBEYED.search(err)
    assert len(err.splitlines()) == 1
    assert "\\x1b]0;owned" in err


# ----------------------------------------------------------------------------- paths that leave


def test_prompts_are_no_paths(marked_up):
    """All that the run made is in its own directory."""
    folder, _ = marked_up
    assert not (folder.parent / "outside").exists()
    assert not Path("/outside").exists()
    outside = {p.name for p in folder.iterdir()} - {"runs", "mine", "page.html"}
    assert all(name.startswith("<") for name in outside)
    assert [p.name for p in (folder / "runs").iterdir()] == ["run"]


@pytest.mark.parametrize(
    "file",
    ["../outside.bin", "/tmp/outside.bin", "a/../../outside.bin", "a\0.bin", "..", "", "~/x.bin"],
)
def test_a_manifest_that_leaves_its_folder(in_process, folder, file):
    prepare = ["data.path=text.txt", "out=tokens", "data.tokenizer=byte", "workers=1"]
    assert in_process(prepare_data.main, folder, *prepare)[0] == 0
    manifest = json.loads((folder / "tokens" / "manifest.json").read_text())
    shard = folder / "tokens" / manifest["shards"][0]["file"]
    shutil.copy(shard, folder / "outside.bin")  # whole, and what the checksums say
    manifest["shards"][0]["file"] = file
    (folder / "tokens" / "manifest.json").write_text(json.dumps(manifest))
    wish = ["data=shards", "data.path=tokens", "data.val_fraction=0.2", "name=new"]
    code, _, err = in_process(train.main, folder, *TINY, *wish)
    check_told(code, err, 3, r"data\.path=tokens/manifest\.json: ")


@pytest.mark.parametrize(
    "name", ["..", "../outside", "/tmp/outside", "a/../../outside", "run/../x"]
)
def test_a_name_that_leaves_the_runs(in_process, folder, name):
    before = sorted(folder.parent.rglob("*"))
    for arguments in ([f"name={name}"], ["-m", f"name={name},b"]):
        settings = [*TINY, "data.path=text.txt", *arguments]
        code, _, err = in_process(train.main, folder, *settings)
        check_told(code, err, 2, r"name=\S+: becomes the folder runs/<name>")
    assert sorted(folder.parent.rglob("*")) == before


@pytest.mark.parametrize("name", ["../../outside", "/tmp/outside", "blocks.0/../../x"])
def test_a_tensor_with_the_name_of_a_path(in_process, folder, checkpoint, name):
    from safetensors.torch import load_file, save_file

    tensors = load_file(checkpoint / "model.safetensors")
    save_file(tensors | {name: torch.zeros(1)}, checkpoint / "model.safetensors")
    with_right_sums(checkpoint)
    before = sorted(folder.parent.rglob("*"))
    code, _, err = in_process(generate.main, folder, f"checkpoint={checkpoint}")
    check_told(code, err, 3, r"unknown tensor")
    assert sorted(folder.parent.rglob("*")) == before


def test_a_checkpoint_that_names_another_folder(in_process, folder, checkpoint):
    """Where a run is, is what its user says, never what is written in it."""
    state = json.loads((checkpoint / "state.json").read_text())
    state["settings"]["name"] = "../../outside"
    state["settings"]["data"]["path"] = "/etc/passwd"
    (checkpoint / "state.json").write_text(json.dumps(state))
    with_right_sums(checkpoint)
    shutil.copytree(checkpoint, folder / "copied")
    arguments = continued("name=new", "trainer.resume=copied")
    code, _, err = in_process(train.main, folder, *arguments)
    assert code == 0, err
    assert sorted(p.name for p in (folder / "runs").iterdir()) == ["new", "run"]
    assert not (folder.parent / "outside").exists()


@pytest.mark.parametrize("link", ["step_00000001", "step_00000001.part", "step_00000003"])
def test_old_checkpoints_that_lead_elsewhere_are_not_emptied(in_process, folder, link):
    """Older checkpoints are deleted; what such a name leads to is not."""
    precious = folder.parent / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    (folder / "runs" / "run" / "checkpoints" / link).symlink_to(precious)
    in_process(train.main, folder, *continued("trainer.save_every=1", "trainer.keep=1"))
    assert (precious / "thesis.txt").read_text() == "years of work"


# ------------------------------------------------------------------------------- secret canaries

SECRETS = {
    "WANDB_API_KEY": "canary0000000000000000000000000000wandb",
    "HF_TOKEN": "hf_canary1111111111111111111111",
    "AWS_SECRET_ACCESS_KEY": "canary2222222222222222aws",
    "MY_OWN_PASSWORD": "canary3333333333",
    "DATABASE_URL": "postgres://me:canary4444@host/db",
}


def leaks(folder: Path, *outputs: str) -> list[str]:
    """Where a secret, or a good part of one, is found."""
    found = [f"said: {text[:80]}" for text in outputs if "canary" in text]
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
def test_no_secret_is_written_or_said(in_process, tmp_path, text_file, secrets, way):
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


REFERENCES = [
    "name=${oc.env:MY_OWN_PASSWORD}",
    "name='${oc.env:MY_OWN_PASSWORD}'",
    "wandb.group=x-${oc.env:WANDB_API_KEY}-y",
    'wandb.tags=["${oc.env:HF_TOKEN}"]',
    "trainer.sample_prompt=${oc.env:HF_TOKEN}",
    'lens.prompts=["${oc.env:HF_TOKEN}"]',
    "data.text_key=${oc.env:DATABASE_URL,none}",
    "seed=${oc.decode:${oc.env:MY_OWN_PASSWORD}}",
    "data.path=${oc.env:DATABASE_URL}",
    "name=${oc.${oc.select:x,env}:MY_OWN_PASSWORD}",
]


@pytest.mark.parametrize("reference", REFERENCES)
def test_no_setting_fetches_a_secret(in_process, tmp_path, text_file, secrets, reference):
    base = [*TINY, f"data.path={text_file}", "trainer.max_steps=2"]
    for way in ([], ["-m", "seed=1,2"], ["--cfg", "all"], ["--cfg", "job", "--resolve"]):
        given = [text for text in base if text.split("=")[0] != reference.split("=")[0]]
        code, out, err = in_process(train.main, tmp_path, *way, *given, reference)
        # A prompt is text: in one run it says what it says.
        assert code == 2 or (code == 0 and "prompt" in reference), err
        assert leaks(tmp_path, out, err) == []


@pytest.mark.parametrize("key", ["name", "wandb.group", "hydra.sweep.dir", "trainer.sample_prompt"])
def test_no_file_of_settings_fetches_a_secret(in_process, tmp_path, text_file, secrets, key):
    tree = "${oc.env:MY_OWN_PASSWORD}"
    for part in reversed(key.split(".")):
        tree = {part: tree}
    path = tmp_path / "mine" / "experiment" / "mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(f"# @package _global_\n{json.dumps(tree)}")
    base = ["--config-dir=mine", "experiment=mine", *TINY, f"data.path={text_file}"]
    for way in ([], ["-m", "seed=1,2"], ["--cfg", "all"]):
        code, out, err = in_process(train.main, tmp_path, *way, *base)
        assert code == 2, err
        assert leaks(tmp_path, out, err) == []


def test_a_secret_given_as_a_setting_is_not_repeated(in_process, tmp_path):
    for key in ("wandb.api_key", "api_key", "+hf_token", "wandb.password", "secret"):
        code, out, err = in_process(train.main, tmp_path, f"{key}={SECRETS['HF_TOKEN']}")
        check_told(code, err, 2, r"=\(not shown\): ")
        assert leaks(tmp_path, out, err) == []


def test_no_secret_as_a_user_starts_it(command, tmp_path, text_file):
    done = command("train.py", *TINY, f"data.path={text_file}", "name=run", **SECRETS)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "run" / "config.yaml").is_file()
    assert leaks(tmp_path, done.stdout, done.stderr) == []
