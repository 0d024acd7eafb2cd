"""Settings and fixtures of all tests: no network, no W&B account, one thread, temporary folders."""

import contextlib
import functools
import getpass
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

# Must be set before torch or wandb is imported. One thread, because several processes run tests.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
if "CHECK_DEVICE" not in os.environ:  # of tests/campaign/gpu.py
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # tests need no GPU, also where torch cannot use one
# Compiled code of tests is not cached.
cache = f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
# No W&B account, and no variables of a launcher that may have started the tests.
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "TORCHELASTIC_")
for name in tuple(os.environ):
    if name.startswith(("WANDB_", *LAUNCHER)):
        del os.environ[name]
os.environ["WANDB_MODE"] = "disabled"

pytest.register_assert_rewrite("helpers")
sys.path.insert(0, str(Path(__file__).resolve().parent / "no_network"))
sys.modules.pop("sitecustomize", None)  # Debian's Python contains another one
import sitecustomize  # noqa: E402  blocks sockets, also in processes that tests start

assert sitecustomize.BLOCKED

from helpers import NO_NETWORK, REPOSITORY, TEXT, TIMEOUT, TINY  # noqa: E402

PAGE_TIMEOUT = 120_000  # milliseconds that a test of a page waits at most
# The slowest files run first, so that no process is left with a long one at the end. The three
# processes get them in turn: ranks and ranks_lost share a fork server, as do the files of W&B.
SLOWEST = ["ranks", "wandb_faults", "sweep", "ranks_lost", "wandb_pictures", "contributing"]
SLOWEST += ["kills", "page", "page_use", "page_reading", "page_story", "train"]


def pytest_collection_modifyitems(items):
    order = {f"test_{name}.py": place for place, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(SLOWEST)))


@pytest.fixture(scope="session", autouse=True)
def limits_of_wandb():
    from helpers.wandb_server import wait_long_for_wandb

    wait_long_for_wandb()


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """A fork server that starts trainings (helpers/trainings.py)."""
    from helpers.trainings import ForkServer

    with ForkServer(tmp_path_factory.mktemp("server")) as started:
        yield started


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """runs/run, a finished run with checkpoints of steps 2 and 4, next to its text.txt. Tests that
    change it make a copy."""
    from helpers.runs import train_in

    return train_in(tmp_path_factory.mktemp("trained"), "name=run")


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """runs/first, a finished run with an attention snapshot of each of its five steps."""
    from helpers.live import RUN
    from helpers.runs import train_in

    return train_in(tmp_path_factory.mktemp("finished"), "name=first", *RUN)


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def make_run(tmp_path, monkeypatch, text_file):
    """make_run(*overrides) -> a Run with a tiny model, in a temporary folder. tiny=False: only the
    overrides, without the settings of the tiny model."""
    monkeypatch.chdir(tmp_path)

    from helpers.settings import settings

    from clearhead.run.build import build_run

    def make(*overrides, tiny=True):
        for earlier in runs:  # as if their processes had ended
            earlier.closing.close()
        first = [*TINY, f"data.path={text_file}"] if tiny else []
        runs.append(build_run(settings(*first, *overrides)))
        return runs[-1]

    runs = []
    yield make
    for run in runs:
        with contextlib.suppress(SystemExit):  # raised if the test has stopped the run by a signal
            run.closing.close()


@pytest.fixture
def command(tmp_path):
    """Returns command("train.py", *arguments), which runs a script without network and caches."""

    def run(script, *arguments, **environment):
        home = tmp_path / "home"
        home.mkdir(exist_ok=True)
        env = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(home)}
        gpus = "CUDA_VISIBLE_DEVICES"
        if gpus in os.environ:  # no GPU for tests; that of the machine for tests/campaign/gpu.py
            env[gpus] = os.environ[gpus]
        env |= {"PYTHONPATH": f"{NO_NETWORK}{os.pathsep}{REPOSITORY}", "OMP_NUM_THREADS": "1"}
        module = ["-m", script] if not script.endswith(".py") else [str(REPOSITORY / script)]
        options = {"cwd": tmp_path, "env": env | environment, "stdin": subprocess.DEVNULL}
        options |= {"capture_output": True, "text": True, "timeout": TIMEOUT}
        return subprocess.run([sys.executable, *module, *arguments], **options)

    return run


@pytest.fixture
def in_process(monkeypatch, capsys):
    """in_process(main, folder, *arguments) -> (exit code, out, err) of a command that runs in this
    process. This is faster, and patches of the test apply to the command."""

    def run(main, folder, *arguments):
        monkeypatch.chdir(folder)
        monkeypatch.setattr("sys.argv", [main.__module__, *map(str, arguments)])
        code, handlers = 0, logging.root.handlers[:]
        try:
            main()
        except SystemExit as stopped:
            code = stopped.code
        logging.root.handlers[:] = (
            handlers  # some of Hydra's options add one, for the output of now
        )
        if hydra := sys.modules.get("hydra.core.hydra_config"):
            hydra.HydraConfig.instance().cfg = None  # as in a process that has not run a command
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="session")
def browser():
    """A Chromium that is installed on the machine; nothing is downloaded."""
    from playwright.sync_api import expect, sync_playwright

    # The shell has no window, and takes half the time.
    names = ("chromium-headless-shell", "chromium", "google-chrome")
    chromium = next(filter(None, map(shutil.which, names)), None)
    if chromium is None and not os.environ.get("CI"):
        pytest.skip("this machine has no Chromium; on Debian: apt install chromium-headless-shell")
    quiet = ["--no-sandbox", "--disable-background-networking", "--disable-component-update"]
    expect.set_options(timeout=PAGE_TIMEOUT)
    with sync_playwright() as started:
        options = {"executable_path": chromium, "args": quiet, "timeout": 1000 * TIMEOUT}
        launched = started.chromium.launch(**options)
        yield launched
        launched.close()


@pytest.fixture(scope="session")
def window(browser):
    """window(**options) -> a browser window, reused by later tests with the same options."""

    @functools.cache
    def make(options):
        context = browser.new_context(**json.loads(options))
        context.set_default_timeout(PAGE_TIMEOUT)
        return context

    return lambda **options: make(json.dumps(options, sort_keys=True))


@pytest.fixture
def opened(window):
    """opened(page.html, fragment) -> the page in a browser. `before` runs before its scripts. Fails
    when the page loaded or was refused a resource, when a script failed, or when the page wrote to
    the console."""
    pages, wrong, fetched, allowed = [], [], [], set()

    def dismiss(dialog):
        wrong.append("dialog")
        dialog.dismiss()

    def open_page(path, fragment="", before="", **options):
        page = window(**options).new_page()
        pages.append(page)
        if before:
            page.add_init_script(before)
        address = path.resolve().as_uri()
        page.on("console", lambda message: wrong.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("dialog", dismiss)
        page.on("request", lambda request: fetched.append(request.url))
        page.goto(address + fragment)
        allowed.update({address, path.with_name("page.html").resolve().as_uri()})  # also in a frame
        return page

    yield open_page
    for page in pages:
        page.close()
    assert wrong == []
    assert set(fetched) <= allowed


@pytest.fixture
def write(tmp_path):
    """write(run, ...) -> the path of a page with these runs (see helpers/pages.py)."""
    from headlens import page_html

    def to_file(*runs, title="attention", name="page.html"):
        path = tmp_path / name
        path.write_text(page_html([run.data for run in runs], title), encoding="utf-8")
        return path

    return to_file


@pytest.fixture
def shown(write, opened):
    """shown(run, ...) -> a page with these runs in a browser, after its first view is drawn and all
    frames are decoded. So a change of the step is visible at once, also on a busy machine. Other
    tests check what happens while frames are decoded. No head is enlarged, unless `fragment` says
    so. frame: (width, height) of a frame that contains the page, as on a dashboard; returns the
    frame."""
    from helpers.pages import DECODE_ALL, a_run, ready

    def show(*runs, fragment="#head=none", title="attention", frame=None, **options):
        path = write(*runs or (a_run(),), title=title)
        if "view=" not in fragment:  # these tests are of the screen of all heads
            fragment = f"{fragment}&view=all" if len(fragment) > 1 else "#view=all"
        if frame:
            host, (width, height) = path.with_name("host.html"), frame
            source = f'src="{path.name}{fragment}" width="{width}" height="{height}"'
            host.write_text(f'<!doctype html><iframe style="border: 0" {source}></iframe>')
            opened_page = opened(host, **options).frames[1]
        else:
            opened_page = opened(path, fragment, **options)
        ready(opened_page)
        opened_page.evaluate(DECODE_ALL)
        opened_page.evaluate("() => window.lens.update()")  # draws the charts of all steps
        return opened_page

    return show
