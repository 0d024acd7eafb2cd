"""Plants faults in a copy of the repository, one at a time, and checks that a test fails.

    python tests/mutations.py [NAME or AREA ...] [--list]

tests/mutations.toml has the faults and the tests of each area. The tests of an area must pass
without a fault. Exits with code 1 if a fault was not detected.
"""

import argparse
import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".*_cache")
TIMEOUT = 300  # seconds per test run; a fault that makes the tests hang counts as detected


@dataclass(frozen=True)
class Fault:
    """One change of the code."""

    area: str
    name: str
    file: str
    before: str  # the code to replace; must occur once
    after: str  # the new code
    where: str = ""  # the function or class, as Class.method; "": the complete file


AREAS = tomllib.loads((REPOSITORY / "tests" / "mutations.toml").read_text("utf-8"))
FAULTS = [Fault(area, **fault) for area, values in AREAS.items() for fault in values["faults"]]


def planted(source: str, fault: Fault) -> str:
    """Returns the source with the fault. Raises LookupError unless `before` occurs exactly once."""
    if not fault.file.endswith(".py"):  # text; white space is ignored
        pattern = r"\s*".join(map(re.escape, "".join(fault.before.split())))
        changed, count = re.subn(pattern, lambda _: fault.after, source)
    else:
        tree = scope = ast.parse(source)
        for name in filter(None, fault.where.split(".")):
            scope = next((n for n in scope.body if getattr(n, "name", "") == name), ast.Module([]))
        before, after = ast.parse(fault.before).body, ast.parse(fault.after).body
        if all(len(code) == 1 and isinstance(code[0], ast.Expr) for code in (before, after)):
            before, after = [before[0].value], [after[0].value]  # an expression at any position
        count = _replace(scope, before, after)
        changed = ast.unparse(tree)
    if count != 1:
        place = f"{fault.file} {fault.where}".strip()
        raise LookupError(f"{fault.name!r}: found {count} times in {place}: {fault.before!r}")
    return changed


def _replace(scope: ast.AST, before: list[ast.AST], after: list[ast.AST]) -> int:
    """Replaces the first occurrence of `before` by `after`. Returns the number of occurrences."""
    wanted, size, places = [ast.dump(node) for node in before], len(before), []
    for node in ast.walk(scope):
        for field, value in ast.iter_fields(node):
            nodes = value if isinstance(value, list) else [value]
            dumps = [ast.dump(item) if isinstance(item, ast.AST) else "" for item in nodes]
            starts = [n for n in range(len(nodes) - size + 1) if dumps[n : n + size] == wanted]
            places += [(node, field, value, start) for start in starts]
    for node, field, value, start in places[:1]:
        if isinstance(value, list):
            value[start : start + size] = after
        else:
            setattr(node, field, after[0])
    return len(places)


def failing_test(copy: Path, area: str) -> str | None:
    """Runs the tests of an area. Returns the first test that fails, or None."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    # With CI set, pytest prints complete differences of files, which takes minutes.
    environment = os.environ | {"TMPDIR": str(copy.parent), "CI": ""}
    with tempfile.TemporaryFile(
        "w+"
    ) as out:  # a pipe would wait for processes that tests leave running
        options = {"cwd": copy, "env": environment, "stdout": out, "stderr": subprocess.STDOUT}
        run = subprocess.Popen([*command, *AREAS[area]["tests"]], start_new_session=True, **options)
        try:
            code = run.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            return "timed out"
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
        out.seek(0)
        output = out.read()
    if code not in (0, 1):
        raise RuntimeError(f"{area}: pytest ended with {code}\n{output}")
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    return found[1] if code else None


def missed(copy: Path, area: str, faults: list[Fault]) -> list[str]:
    """Returns the faults of an area that no test detects. Prints a table row for each fault."""
    if first := failing_test(copy, area):
        raise RuntimeError(f"{area}: {first} fails without a fault")
    found = []
    for fault in faults:
        file, start = copy / fault.file, time.monotonic()
        file.write_text(planted(file.read_text("utf-8"), fault), "utf-8")
        test = failing_test(copy, area)
        shutil.copy2(REPOSITORY / fault.file, file)
        seconds = round(time.monotonic() - start, 1)
        print(f"| {area} | {fault.name} | {seconds} | {test or 'not detected'} |", flush=True)
        found += [fault.name] if test is None else []
    return found


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    known = {text for fault in FAULTS for text in (fault.area, fault.name)}
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"no such fault or area: {', '.join(unknown)}")
    wanted = set(options.names or known)
    faults = [fault for fault in FAULTS if wanted & {fault.area, fault.name}]
    if options.list:
        return print("\n".join(f"{fault.area}: {fault.name}" for fault in faults))
    for fault in faults:  # fail before any test runs if a fault cannot be planted
        planted((REPOSITORY / fault.file).read_text("utf-8"), fault)
    print("| area | fault | seconds | first test that fails |\n|---|---|---|---|", flush=True)
    undetected = []
    with tempfile.TemporaryDirectory() as home:
        copy = shutil.copytree(REPOSITORY, Path(home) / "copy", ignore=NOT_COPIED)
        for area in dict.fromkeys(fault.area for fault in faults):
            undetected += missed(copy, area, [fault for fault in faults if fault.area == area])
    sys.exit(f"not detected: {', '.join(undetected)}" if undetected else 0)


if __name__ == "__main__":
    main()
