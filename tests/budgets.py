"""Compares the size of the code with limits. Part of `make lint`.

    python -m tests.budgets           prints the table; exits with 1 if a value is above its limit
    python -m tests.budgets --step    prints the files to read to follow one training step

Lines are physical lines of Python outside tests/. `target` is the size planned in the design.
`limit` is the maximum that `make lint` accepts. Lower a limit when the value falls. Raise it, in
the same commit, for a feature that is worth its lines.
"""

import argparse
import ast
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
TRUNK = ("train.py", "model.py", "attention.py", "data.py")
# The files whose functions compute or move data in one training step on a CPU, in the order of the
# calls. Not listed: the profiler, the metrics and the dataclass of the run.
STEP = (
    "train.py",
    "data.py",
    "tokens/windows.py",
    "training/distributed/strategy.py",
    "model.py",
    "attention.py",
    "training/ops/cpu.py",
    "training/ops/cross_entropy.py",
    "training/optim/optimizers.py",
)
Function = ast.FunctionDef | ast.AsyncFunctionDef
# name of the value: (target, limit)
BUDGETS = {
    "all": (12_500, 18_241),
    "train + model + attention + data": (1_200, 934),
    "command line, schema, validation": (600, 1_365),
    "largest file": (400, 400),
    "longest function": (60, 60),
    "imports inside functions": (40, 49),
    "files to follow one training step": (6, 9),
}


def source_files() -> list[str]:
    """Returns the Python files outside tests/ that git tracks or does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    names = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    found = [name for name in names.stdout.splitlines() if not name.startswith("tests/")]
    return sorted({name for name in found if (REPOSITORY / name).exists()})


def functions(tree: ast.Module) -> list[Function]:
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def length(function: Function) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def deferred_imports(tree: ast.Module) -> int:
    inside = {
        (node.lineno, node.col_offset)
        for function in functions(tree)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    return len(inside)


def measure(files: dict[str, str]) -> dict[str, tuple[int, str]]:
    """Returns each value of BUDGETS, with a detail such as the name of the largest file."""
    lines = {name: text.count("\n") for name, text in files.items()}
    trees = {name: ast.parse(text) for name, text in files.items()}
    bodies = [(length(f), f"{name}: {f.name}") for name in files for f in functions(trees[name])]
    imports = {name: deferred_imports(tree) for name, tree in trees.items()}
    checks = [size for size, name in bodies if name.endswith(": problems")]
    config = [size for name, size in lines.items() if name.startswith("training/config/")]
    step = [name for name in STEP if name in files]
    largest, most = max(lines, key=lines.__getitem__), max(imports, key=imports.__getitem__)
    return {
        "all": (sum(lines.values()), f"{len(lines)} files"),
        "train + model + attention + data": (sum(lines[name] for name in TRUNK), ""),
        "command line, schema, validation": (
            sum(config) + sum(checks),
            "training/config, problems",
        ),
        "largest file": (lines[largest], largest),
        "longest function": max(bodies),
        "imports inside functions": (sum(imports.values()), f"{imports[most]} in {most}"),
        "files to follow one training step": (
            len(step),
            f"{sum(lines[name] for name in step):,} lines",
        ),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--step", action="store_true", help="files of one training step")
    step = parser.parse_args().step
    files = {name: (REPOSITORY / name).read_text(encoding="utf-8") for name in source_files()}
    if step:
        for name in filter(files.__contains__, STEP):
            print(f"{files[name].count(chr(10)):6,}  {name}")
        return 0
    print(f"{'':36}{'now':>8}{'limit':>8}{'target':>8}")
    above = []
    for name, (value, detail) in measure(files).items():
        target, limit = BUDGETS[name]
        print(f"{name:36}{value:8,}{limit:8,}{target:8,}  {detail}")
        if value > limit:
            above.append(name)
    problems = [f"above the limit: {name}" for name in above]
    problems += [f"STEP names a file that does not exist: {n}" for n in STEP if n not in files]
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
