"""Plants faults in a copy of the repository, one at a time, and checks that a test fails.

    python tests/mutations.py [NAME or AREA ...]

tests/mutations.toml has the faults, as code, and the tests of each area. Exits with code 1 if a
fault was not detected.
"""

import ast
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".*_cache")
TIMEOUT = 600  # seconds per test run; a fault that makes the tests hang counts as detected
AREAS = tomllib.loads((REPOSITORY / "tests" / "mutations.toml").read_text("utf-8"))


def _node(code: str) -> ast.AST:
    """Returns the expression or the statement."""
    (statement,) = ast.parse(code).body
    return statement.value if isinstance(statement, ast.Expr) else statement


def planted(fault: dict[str, str]) -> tuple[str, str]:
    """Returns the file, and its source with `before` replaced by `after` in the function `where`,
    such as "a.py: Class.method". Raises LookupError unless `before` occurs exactly once there."""
    file, function = fault["where"].split(": ")
    before, after = ast.dump(_node(fault["before"])), _node(fault["after"])
    tree = scope = ast.parse((REPOSITORY / file).read_text("utf-8"))
    for name in function.split("."):
        scope = next((n for n in scope.body if getattr(n, "name", "") == name), ast.Module([]))
    count = 0

    class Plant(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            nonlocal count
            if ast.dump(node) != before:
                return self.generic_visit(node)
            count += 1
            return after

    Plant().visit(scope)
    if count != 1:
        raise LookupError(f"{fault['name']!r}: found {count} times in {fault['where']}")
    return file, ast.unparse(tree)


def failing_test(copy: Path, tests: list[str]) -> str | None:
    """Runs tests. Returns the first one that fails, or None."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    options = {"cwd": copy, "env": os.environ | {"TMPDIR": str(copy.parent)}, "text": True}
    with tempfile.TemporaryFile("w+") as out:  # not a pipe: children of tests would hold it open
        try:
            run = subprocess.run(command, stdout=out, stderr=out, timeout=TIMEOUT, **options)
        except subprocess.TimeoutExpired:
            return "timed out"
        out.seek(0)
        output = out.read()
    if run.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {run.returncode}\n{output}")
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    return found[1] if run.returncode else None


def main(names: list[str]) -> None:
    wanted = {
        area: [f for f in values["faults"] if not names or {area, f["name"]} & {*names}]
        for area, values in AREAS.items()
    }
    for fault in itertools.chain(*wanted.values()):  # fail early if one cannot be planted
        planted(fault)
    undetected = []
    with tempfile.TemporaryDirectory() as home:
        copy = shutil.copytree(REPOSITORY, Path(home) / "copy", ignore=NOT_COPIED)
        for area, faults in wanted.items():
            tests = AREAS[area]["tests"]
            if faults and (test := failing_test(copy, tests)):
                sys.exit(f"{area}: {test} fails without a fault")
            for fault in faults:
                file, source = planted(fault)
                (copy / file).write_text(source, "utf-8")
                test = failing_test(copy, tests)
                shutil.copy2(REPOSITORY / file, copy / file)
                print(f"{area}: {fault['name']}: {test or 'NOT DETECTED'}", flush=True)
                undetected += [] if test else [fault["name"]]
    sys.exit(f"not detected: {', '.join(undetected)}" if undetected else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
