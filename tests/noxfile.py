"""Test environments: `make matrix` runs a reduced test suite with the oldest and the newest
supported torch on each Python that this machine has, then lists the results.

    make matrix
    make matrix ARGS="-p 3.12 -k oldest"    # one environment
    make matrix ARGS="-s newest"            # the newest version of every package

uv installs the packages and shares their files between the environments.
"""

import re
from pathlib import Path

import nox

REPOSITORY = Path(__file__).parents[1]
nox.options.envdir = f"{REPOSITORY}/.venv/nox"
nox.options.default_venv_backend = "uv"
nox.options.download_python = "never"
nox.options.sessions = ["matrix"]

PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
# What depends on the versions of torch, Python and Hydra: operators, compiler, optimizers,
# checkpoints, command line. One or two minutes on two cores.
TESTS = [
    "tests/test_attention.py",
    "tests/test_data_loader.py",
    "tests/test_model.py",
    "tests/models",
    "tests/docs/test_readme.py",
    "tests/checkpoint",
    "tests/config/test_config.py",
    "tests/compute",
]


def requirements(*names: str) -> str:
    return "".join((REPOSITORY / f"{name}.txt").read_text(encoding="utf-8") for name in names)


def run_tests(session: nox.Session) -> None:
    session.run("python", "-c", "import sys, torch; print(sys.version, torch.__version__)")
    parallel = ["-n", "2", "--dist", "loadfile"]
    session.run("python", "-m", "pytest", *parallel, *(session.posargs or TESTS))


@nox.session(python=PYTHONS)
@nox.parametrize("torch", ["oldest", "newest"])
def matrix(session: nox.Session, torch: str) -> None:
    """A reduced test suite with the oldest or the newest torch of requirements.txt."""
    session.chdir(REPOSITORY)
    (oldest,) = re.findall(r"^torch>=([\d.]+),<", requirements("requirements"), re.MULTILINE)
    version = {"oldest": f"torch=={oldest}.*", "newest": "torch"}[torch]
    session.install("-r", "requirements-dev.txt", version)
    run_tests(session)


@nox.session
def newest(session: nox.Session) -> None:
    """The same tests with the newest version of every package, also above the upper bounds."""
    session.chdir(REPOSITORY)
    lines = requirements("requirements", "requirements-extra", "requirements-dev")
    session.install("--upgrade", *re.findall(r"^[\w-]+(?=[=<>])", lines, re.MULTILINE))
    run_tests(session)
