"""Structure: imports go from upper layers to lower ones, heavy libraries are imported late."""

import ast
import functools

from helpers import REPOSITORY, SOURCES

# From the top to the bottom; a module imports only from layers below its own.
LAYERS = [
    ["train", "generate", "scripts"],
    ["training.command"],
    ["training.config"],
    ["training", "lens", "data", "decoding", "frozen"],
    ["model", "synthetic", "order", "tokens"],
    ["attention", "durable", "errors", "training.terminal"],
]
OURS = {name.split(".")[0] for layer in LAYERS for name in layer}
FOLDERS = ("training", "tokens", "lens", "scripts")
# Who may import a library.
USERS = {
    "wandb": {"training.wandb_run"},
    "hydra": {"training.command"},
    "omegaconf": {"training.command", "training.directory"},
    "matplotlib": {"lens.heatmap", "scripts.plots", "training.results"},
    "transformers": {"training.hf", "scripts.contenders"},
    "tiktoken": {"data", "tokens.tokenizers"},
    "gigatoken": {"tokens.encoding"},
    "huggingface_hub": {"training.hub"},
}
HEAVY = {"torch", "hydra", "omegaconf", "numpy", "wandb", "data", "model", "attention"}


def module_of(path):
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer(module):
    for n, names in enumerate(LAYERS):
        if module in names:
            return n
    return next(n for n, names in enumerate(LAYERS) if module.split(".")[0] in names)


@functools.cache
def parsed(path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports(path, top_level_only=False) -> list[tuple[int, str]]:
    """(line, module) of every import; without those that only type checkers see."""
    tree, found = parsed(path), []
    hidden = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            hidden |= {id(inner) for inner in ast.walk(node)}
    for node in tree.body if top_level_only else ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.append((node.lineno, alias.name))
        elif isinstance(node, ast.ImportFrom) and node.level:
            name = path.parent.name + (f".{node.module}" if node.module else "")
            found.append((node.lineno, name))
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                is_module = (REPOSITORY / (full.replace(".", "/") + ".py")).exists()
                found.append((node.lineno, full if is_module else node.module))
    return found


def roots(path, **options):
    return {name.split(".")[0] for _, name in imports(path, **options)}


def test_imports_go_to_lower_layers():
    """Inside a folder also to the same layer, never to a higher one."""
    assert len(SOURCES) > 50
    for path in SOURCES:
        own = module_of(path)
        for line, name in imports(path):
            root = name.split(".")[0]
            if root in OURS:
                inside = root == own.split(".")[0] and root in FOLDERS
                assert layer(name) >= layer(own) + (not inside), f"{path}:{line} imports {name}"


def test_each_library_is_imported_in_few_places():
    for package, allowed in USERS.items():
        assert {module_of(path) for path in SOURCES if package in roots(path)} <= allowed, package


def test_what_can_be_copied_out():
    """The model needs torch alone, the lens nothing else of ours."""
    standard = {"functools", "itertools", "math", "collections", "dataclasses"}
    for name in ("attention.py", "model.py"):
        assert roots(REPOSITORY / name) <= standard | {"torch", "attention"}
    for path in (REPOSITORY / "lens").glob("*.py"):
        assert not roots(path) & (OURS - {"lens"}), path


def test_commands_load_heavy_libraries_late():
    for name in ("train.py", "generate.py", "training/config.py", "training/command.py"):
        assert not roots(REPOSITORY / name, top_level_only=True) & HEAVY, name


def test_every_file_has_a_docstring():
    for path in SOURCES:
        assert ast.get_docstring(parsed(path)) or not parsed(path).body, path
