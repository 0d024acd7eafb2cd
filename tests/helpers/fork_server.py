"""Starts trainings by forking a process that has already imported all modules. A fork takes
milliseconds; the imports of torch take seconds.

    python tests/helpers/fork_server.py

Each line of stdin is a request. Each request has a response on stdout. Both are JSON:

    {"folder": ..., "arguments": [...], "environment": {...}, "log": ..., "fault": {...},
     "code": ...}
                        -> {"pid": 123}: train_main (settings.py) runs in the folder with these
                           arguments; its stdout is in log.out, its stderr in log.err.
                           With code, this Python code runs instead
    {"wait": 123}       -> {"code": 143} after the process has ended; -9 after SIGKILL

The keys of `fault` are names of FAULTS in planted_faults.py. The client is ForkServer in
trainings.py. When stdin is closed, running processes are killed.
"""

import atexit
import contextlib
import importlib
import json
import os
import signal
import sys
import tempfile
import threading
import traceback

from clearhead.config import command_line
from clearhead.errors import ClearheadError
from clearhead.run.signals import exit_on_stop_signals
from helpers import REPOSITORY, SOURCES, TINY
from helpers.planted_faults import plant
from helpers.settings import settings, train_main
from helpers.wandb_server import wait_long_for_wandb

# Modules that training imports inside functions.
PARTS = """
    numpy.ctypeslib numpy.random rich._emoji_codes torch._dynamo
    torch._functorch.config torch._inductor.utils torch.distributed torch.distributed.fsdp
    torch.onnx
"""


def import_everything() -> None:
    """Imports all modules of a training. No thread may start, because a fork loses threads."""
    sources = [path.relative_to(REPOSITORY).with_suffix("") for path in SOURCES]
    ours = [".".join(path.parts) for path in sources if path.parts[0] == "clearhead"]
    ours.remove("clearhead.compute.cross_entropy_kernel")  # imports Triton, only used on a GPU
    for name in [*ours, *PARTS.split()]:
        importlib.import_module(name)
    wait_long_for_wandb()
    settings(*TINY)  # imports Hydra's grammar
    assert len(os.listdir("/proc/self/task")) == 1


def run(order: dict) -> int:
    """Runs a training or code in this process. Returns its exit code."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    exit_on_stop_signals()
    os.environ.update(order["environment"])
    tempfile.tempdir = None  # it is read from TMPDIR again
    os.chdir(order["folder"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, suffix in ((1, ".out"), (2, ".err")):
        log = os.open(order["log"] + suffix, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, number)
    os.closerange(3, 256)  # file descriptors of the server and its other children
    sys.stdout.reconfigure(line_buffering=True)
    command_line.WAIT_FOR_RANK_0 = 0  # there is no launcher that ends the other ranks
    sys.argv = ["train.py", *order["arguments"]]
    code = 0
    try:
        plant(order["fault"])
        if order["code"]:
            exec(order["code"], {"__name__": "__main__"})
        else:
            train_main()
    except SystemExit as stopped:
        code = stopped.code or 0
    except BaseException:  # as Python does
        traceback.print_exc()
        code = 1
    with contextlib.suppress(Exception):
        threading._shutdown()  # waits for threads, as Python does at exit
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import_everything()
    children = set()

    def answer(**values) -> None:
        print(json.dumps(values), file=answers, flush=True)

    answer(ready=True)
    for line in sys.stdin:
        order = json.loads(line)
        if number := order.get("wait"):
            _, status = os.waitpid(number, 0)
            children.discard(number)
            answer(code=os.waitstatus_to_exitcode(status))
            continue
        with contextlib.suppress(ClearheadError):
            settings(*order["arguments"])  # composes once for all forks with these choices
        sys.stderr.flush()
        if (number := os.fork()) == 0:
            code = 1
            try:
                code = run(order)
            finally:
                os._exit(code)
        children.add(number)
        answer(pid=number)
    for number in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


if __name__ == "__main__":
    main()
