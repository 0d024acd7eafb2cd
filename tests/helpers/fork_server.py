"""Starts trainings by forking from a process that has loaded everything: a start takes some
milliseconds so, where Python and torch take seconds. For tests that start hundreds.

    python tests/helpers/fork_server.py

Each line of stdin is an order, and has an answer on stdout, both JSON:

    {"folder": ..., "arguments": [...], "environment": {...}, "log": ..., "fault": {...}}
                        -> {"pid": 123}: `train.py arguments` runs in that folder, its words in log
    {"wait": 123}       -> {"code": 143}, once it has ended; -9 for one that SIGKILL ended
    {"compose": [...]}  -> {}: arguments that will come often; Hydra's grammar is quicker then

A fault is what goes wrong inside of a training, by the names of FAULTS in planted_faults.py. The
client's side is in known_faults.py. When stdin ends, everything that still runs is killed.
"""

import atexit
import contextlib
import importlib
import json
import os
import signal
import sys
import threading
import traceback

import train
from helpers.planted_faults import plant
from training import command
from training.signals import end_quietly

# What a training imports when it comes to it.
PARTS = """
    data lens model tokens.shards tokens.tokenizers
    training.checkpoint training.console training.device training.directory training.feed
    training.fitting training.guard training.meter training.optim training.parallel
    training.profiling training.ranks training.report training.resume training.rows
    training.saving training.tracker training.validation training.wandb_run
    numpy.ctypeslib numpy.random rich._emoji_codes torch._dynamo torch._functorch.config
    torch._inductor.utils torch.distributed torch.onnx
"""


def load_everything() -> None:
    """Nothing of it may start a thread, of which a fork would have but the shadow."""
    for name in PARTS.split():
        importlib.import_module(name)
    from omegaconf import OmegaConf

    from tokens import tokenizers

    settings = command.compose(["lens=off", "wandb=off", "data.tokenizer=byte"])
    OmegaConf.to_yaml(OmegaConf.create({"step": settings.trainer.max_steps}))
    tokenizers.get_tokenizer("byte")
    assert threading.active_count() == 1
    assert len(os.listdir("/proc/self/task")) == 1


def run(order: dict) -> int:
    """A training in this very process, as Python would run it; its exit code."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end_quietly()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, file in ((0, nothing), (1, log), (2, log)):
        os.dup2(file, number)
    os.closerange(3, 256)  # the server's own, and its other children's
    sys.stdout.reconfigure(line_buffering=True)
    command.WAIT_FOR_RANK_0 = 0  # nobody ends the others here
    sys.argv = ["train.py", *order["arguments"]]
    code = 0
    try:
        plant(order["fault"])
        train.main()
    except SystemExit as stopped:
        code = stopped.code or 0
    except BaseException:  # as Python does
        traceback.print_exc()
        code = 1
    with contextlib.suppress(Exception):
        threading._shutdown()  # waits for what still works, as Python does
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    load_everything()
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
        if "compose" in order:
            command.compose(order["compose"])
            answer()
            continue
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
