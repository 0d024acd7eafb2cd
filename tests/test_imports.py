"""How the house is built: imports go down only, heavy ones wait, and nothing forbidden is in it."""

import ast
import re

import pytest
from helpers import REPOSITORY, SOURCES

# From the top floor to the ground; a module imports only from floors below its own.
FLOORS = [
    ["train", "generate", "scripts"],
    ["training.command"],
    ["training.config"],
    ["training", "lens", "data", "decoding", "frozen"],
    ["model", "synthetic", "order", "tokens"],
    ["attention", "durable", "errors", "training.terminal"],
]
OURS = {"train", "generate", "scripts", "training", "lens", "data", "tokens", "order", "durable"}
OURS |= {"errors", "synthetic", "model", "attention", "decoding", "frozen"}


def module_of(path):
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor(module):
    for n, names in enumerate(FLOORS):
        if module in names:
            return n
    return next(n for n, names in enumerate(FLOORS) if module.split(".")[0] in names)


def imports(path, top_level_only=False):
    """(line, module) of every import; names that only type checkers see are left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    hidden = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            hidden |= {id(inner) for inner in ast.walk(node)}
    for node in tree.body if top_level_only else ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield node.lineno, path.parent.name + (f".{node.module}" if node.module else "")
                continue
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                is_module = (REPOSITORY / (full.replace(".", "/") + ".py")).exists()
                yield node.lineno, full if is_module else node.module


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_imports_go_down_only(path):
    own = module_of(path)
    for line, name in imports(path):
        root = name.split(".")[0]
        if root not in OURS:
            continue
        if root == own.split(".")[0] and root in ("training", "tokens", "lens", "scripts"):
            # Inside a folder anything goes, except that nothing below knows the door.
            assert floor(name) >= floor(own), f"{path.name}:{line}"
            continue
        assert floor(name) > floor(own), f"{path.name}:{line} imports {name} from above or beside"


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("wandb", {"training.wandb_run"}),
        ("hydra", {"training.command"}),
        ("omegaconf", {"training.command", "training.directory"}),
        ("matplotlib", {"lens.heatmap", "scripts.plots", "training.results"}),
        ("transformers", {"training.hf", "scripts.contenders"}),
        ("tiktoken", {"data", "tokens.tokenizers"}),
        ("gigatoken", {"tokens.encoding"}),
        ("huggingface_hub", {"training.hub"}),
        ("pickle", set()),
    ],
)
def test_each_library_is_known_in_one_place(package, allowed):
    users = {
        module_of(p) for p in SOURCES if any(n.split(".")[0] == package for _, n in imports(p))
    }
    assert users <= allowed


def test_the_ground_floor_needs_torch_alone():
    standard = {"functools", "itertools", "math", "collections", "dataclasses"}
    for name in ("attention", "model"):
        roots = {n.split(".")[0] for _, n in imports(REPOSITORY / f"{name}.py")}
        assert roots <= standard | {"torch", "attention"}


def test_the_lens_can_be_copied_out():
    for path in (REPOSITORY / "lens").glob("*.py"):
        assert not {n.split(".")[0] for _, n in imports(path)} & (OURS - {"lens"})


@pytest.mark.parametrize(
    "name", ["train.py", "generate.py", "training/config.py", "training/command.py"]
)
def test_the_door_is_light(name):
    """What stands at the top of these files loads neither torch nor hydra."""
    heavy = {"torch", "hydra", "omegaconf", "numpy", "wandb", "data", "model", "attention"}
    roots = {n.split(".")[0] for _, n in imports(REPOSITORY / name, top_level_only=True)}
    assert not roots & heavy


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_no_pickle_and_no_unsafe_load(path):
    text = path.read_text(encoding="utf-8")
    if module_of(path) == "training.hf":  # of old weights; see tests/faults/test_security.py
        text = text.replace("torch.load(", "", 1)
    assert not re.search(r"torch\.(load|save)\(|\bexec\(|[^.]\beval\(", text)


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_every_file_says_what_it_is(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree) or not tree.body
