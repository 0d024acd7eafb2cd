"""Structure: heavy libraries are imported in few places and late, and what can be copied out."""

import ast
import functools
import sys

from helpers import REPOSITORY, SOURCES

OURS = {"attention", "benchmarks", "data", "errors", "files", "generate", "inference", "interop"}
OURS |= {"model", "scripts", "tokens", "train", "training"}
# Who may import a library.
USERS = {
    "wandb": {"training.reporting.wandb_run"},
    "hydra": {"training.config.command_line"},
    "matplotlib": {"lens.heatmap", "benchmarks.plots", "training.reporting.comparison"},
    "transformers": {"benchmarks.implementations"},
    "tiktoken": {"data", "tokens.tokenizers"},
    "huggingface_hub": {"interop.hub"},
}
HEAVY = {"torch", "hydra", "omegaconf", "numpy", "wandb", "data", "model", "attention"}


def module_of(path):
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


@functools.cache
def imports(path, top_level_only=False) -> set[str]:
    """Without those that only type checkers see."""
    tree, found = ast.parse(path.read_text(encoding="utf-8")), set()
    ifs = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    hidden = [node for node in ifs if "TYPE_CHECKING" in ast.unparse(node.test)]
    hidden = {id(inner) for node in hidden for inner in ast.walk(node)}
    for node in tree.body if top_level_only else ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:  # others stay in the folder
            for full in (f"{node.module}.{alias.name}" for alias in node.names):
                is_module = (REPOSITORY / (full.replace(".", "/") + ".py")).exists()
                found.add(full if is_module else node.module)
    return found


def roots(path, **options):
    return {name.split(".")[0] for name in imports(path, **options)}


def test_heavy_and_optional_libraries_are_imported_in_few_places_and_late():
    for package, allowed in USERS.items():
        assert {module_of(path) for path in SOURCES if package in roots(path)} == allowed, package
    for name in ("train", "generate", "training/config/schema", "training/config/command_line"):
        assert not roots(REPOSITORY / f"{name}.py", top_level_only=True) & HEAVY, name


def test_what_can_be_copied_out():
    """The model needs torch alone, the lens nothing else of ours."""
    for name in ("attention.py", "model.py"):
        assert roots(REPOSITORY / name) - sys.stdlib_module_names <= {"torch", "attention"}
    for path in (REPOSITORY / "lens").rglob("*.py"):
        assert not roots(path) & OURS, path
