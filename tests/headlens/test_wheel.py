"""The wheel: the lens alone, with its page files and without imports of the other rooms."""

import ast
import shutil
import subprocess
import sys
import tomllib
import zipfile

from helpers import REPOSITORY

LENS = REPOSITORY / "headlens"
REQUIRED = {"torch", "numpy", "PIL", "matplotlib"}
OPTIONAL = {"scipy", "transformers", "wandb", "IPython"}  # imported where they are used only
WHOLE = {"trainer.py": {"transformers"}}  # which no other file imports


def packages(nodes) -> set[str]:
    """Returns the top-level packages that the import statements among these nodes name."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def test_the_lens_imports_its_requirements_and_itself_only():
    for file in LENS.rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        nodes = list(ast.walk(tree))
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        inside = {id(node) for function in functions for node in ast.walk(function)}
        allowed = REQUIRED | sys.stdlib_module_names
        assert packages(nodes) <= allowed | OPTIONAL, file
        at_import = packages(node for node in nodes if id(node) not in inside)
        assert at_import <= allowed | WHOLE.get(file.name, set()), file
        depth = len(file.relative_to(LENS).parts)  # "..." in page/ would leave the folder
        levels = [node.level for node in nodes if isinstance(node, ast.ImportFrom)]
        assert max(levels, default=0) <= depth, file


def test_the_wheel_contains_the_lens_alone(tmp_path):
    shutil.copytree(LENS, tmp_path / "headlens", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(REPOSITORY / name, tmp_path)
    command = [sys.executable, "-m", "pip", "wheel", "-q", ".", "--no-deps", "--no-build-isolation"]
    subprocess.run(command, cwd=tmp_path, check=True)
    (wheel,) = tmp_path.glob("headlens-*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    copied = (tmp_path / "headlens").rglob("*")
    code = {path for path in copied if path.suffix in (".py", ".html", ".css", ".js")}
    code.add(tmp_path / "headlens" / "README.md")
    assert names == {path.relative_to(tmp_path).as_posix() for path in code}


def test_the_wheel_and_a_clone_require_the_same_versions():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    files = ("requirements.txt", "requirements-extra.txt")
    text = "\n".join((REPOSITORY / name).read_text(encoding="utf-8") for name in files)
    assert set(project["dependencies"]) <= {
        line.partition(" #")[0].strip() for line in text.splitlines()
    }
