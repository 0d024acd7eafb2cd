"""Imports: files that can be copied, no cycles, and large libraries only when they are needed."""

import ast
import graphlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

from helpers import REPOSITORY

import headlens

COMMANDS = ["generate"]  # train.py: test_config.py
COMMANDS += [f"scripts.{path.stem}" for path in sorted((REPOSITORY / "scripts").glob("[a-z]*.py"))]
MISSPELT = """
import runpy, sys
for name in sys.argv[1:]:
    sys.argv = [name, "modle=gpt2-small"]
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as exit:
        heavy = {"torch", "wandb", "matplotlib", "transformers"} & sys.modules.keys()
        print(name, exit.code, *sorted(heavy))
"""
COPIED = """
import attention, model, torch
import headlens
headlens.Lens, headlens.write_page, headlens.draw_figure
gpt = model.GPT(model.ModelConfig(17, 8, 16, 2, 2))
print(tuple(gpt(torch.zeros(1, 8, dtype=torch.long))[0].shape))
"""

ONE_STEP = """
import sys, torch
from model import model_without_values
from train import train_step
from clearhead.config import compose
from clearhead.run.build import build_run
with build_run(compose(sys.argv[1:])) as run:
    train_step(run)
    model_without_values(run.model.config)  # as when a checkpoint is loaded
print("torch._dynamo" in sys.modules)
"""


def run_python(code: str, folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


def test_a_misspelt_key_is_answered_without_heavy_libraries():
    out = run_python(MISSPELT, REPOSITORY, *COMMANDS)
    assert out.splitlines() == [f"{name} 2" for name in COMMANDS]


def test_a_step_without_compilation_does_not_import_the_compiler(tmp_path):
    """The import of torch._dynamo takes a second."""
    sizes = ["model=gpt2-nano", "model.emb_dim=8", "trainer.batch_size=2", "data.max_length=8"]
    options = ["optimizer=muon", "trainer.device=cpu", "wandb=off", "lens=off"]
    out = run_python(ONE_STEP, REPOSITORY, f"runs_dir={tmp_path}", *sizes, *options)
    assert out.splitlines()[-1] == "False"


def test_attention_model_and_lens_can_be_copied_out(tmp_path):
    """attention.py and model.py need only torch; the lens needs no other package of ours."""
    for name in ("attention.py", "model.py"):
        shutil.copy(REPOSITORY / name, tmp_path)
        tree = ast.parse((REPOSITORY / name).read_text(encoding="utf-8"))
        names = [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
        names += [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
        roots = {name.split(".")[0] for name in names} - sys.stdlib_module_names
        assert roots <= {"torch", "attention"}
    shutil.copytree(REPOSITORY / "headlens", tmp_path / "headlens")
    assert run_python(COPIED, tmp_path).strip() == "(1, 8, 17)"


def test_no_file_imports_itself_through_others(tmp_path):
    command = [sys.executable, "-m", "tach", "map", "-o", str(tmp_path / "map.json")]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    graph = json.loads((tmp_path / "map.json").read_text())
    assert "train.py" in list(graphlib.TopologicalSorter(graph).static_order())


OF_HEADLENS = ("headlens/", "tests/headlens/", "tests/helpers/pages.py", "tests/helpers/stories.py")
OF_HEADLENS += ("tests/helpers/families.py", "tests/output/test_report.py")  # builds snapshots


def test_other_code_imports_public_names_of_headlens_only():
    for file in sorted(REPOSITORY.rglob("[a-z]*.py")):
        path = file.relative_to(REPOSITORY).as_posix()
        if path.startswith((".", "runs/", *OF_HEADLENS)):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found = [alias.name for alias in node.names if alias.name.startswith("headlens.")]
                assert found == [], path
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headlens"):
                names = {alias.name for alias in node.names}
                assert node.module in ("headlens", "headlens.trainer"), (path, node.module)
                assert node.module != "headlens" or names <= {*headlens.__all__}, path


def test_public_names_of_headlens_exist():
    assert all(getattr(headlens, name) is not None for name in headlens.__all__)
