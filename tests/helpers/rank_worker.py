"""One rank of several that run many trainings one after the other, in the same processes.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... python tests/helpers/rank_worker.py scenarios.json

A process takes seconds to start and a tiny training none, so a launch has many: known_ranks.py
writes them down and starts the ranks. What a rank said during a scenario and its exit code are in
said/NAME.RANK.out, .err and .code, beside scenarios.json.
"""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import train
from training import checkpoint, command

RANK = int(os.environ["RANK"])


@contextlib.contextmanager
def redirected(to: Path):
    """stdout and stderr of the process, C++ and all, go to two files."""
    streams = {1: (sys.stdout, ".out"), 2: (sys.stderr, ".err")}
    kept = {number: os.dup(number) for number in streams}
    for number, (stream, suffix) in streams.items():
        stream.flush()
        file = os.open(f"{to}{suffix}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    try:
        yield
    finally:
        for number, (stream, _) in streams.items():
            stream.flush()
            os.dup2(kept[number], number)
            os.close(kept[number])


@contextlib.contextmanager
def replaced(owner, name: str, value):
    real = getattr(owner, name)
    setattr(owner, name, value(real))
    try:
        yield
    finally:
        setattr(owner, name, real)


def happens(what: str, rank: int, after: int | None = None, strategy: str | None = None):
    """On one rank something happens: a signal by its name, or an error, once `after` steps are
    done; without a number, where the data are loaded. strategy: only in such a run of a sweep."""

    def act():
        if what.startswith("SIG"):
            os.kill(os.getpid(), signal.Signals[what])
        else:
            raise RuntimeError(what)

    def step(real):
        def wrapper(trainer):
            here = strategy in (None, trainer.settings.parallel.strategy)
            if here and (RANK, trainer.state.step) == (rank, after):
                act()
            return real(trainer)

        return wrapper

    def load(real):
        return lambda settings: act() if rank == RANK else real(settings)

    if after is not None:
        return replaced(train.Trainer, "step", step)
    import data

    return replaced(data, "load_datasets", load)


@contextlib.contextmanager
def slow(seconds: float, rank: int = 0):
    """One rank takes its time for all that is not training."""
    import lens

    def late(real):
        def wrapper(*args, **options):
            time.sleep(seconds * (rank == RANK))
            return real(*args, **options)

        return wrapper

    with contextlib.ExitStack() as stack:
        for owner, name in [
            (train.Trainer, "validate"),
            (train.Trainer, "sample"),
            (train.Trainer, "open_run"),
            (train.Trainer, "write_report"),
            (checkpoint, "write"),
            (checkpoint, "load_parameters"),
            (lens.Lens, "_draw"),
        ]:
            stack.enter_context(replaced(owner, name, late))
        yield


@contextlib.contextmanager
def compiler(backend: str):
    """torch.compile with another backend than its own, which takes a minute."""
    import torch

    def with_backend(real):
        return lambda model, *args, **options: real(model, *args, backend=backend, **options)

    with replaced(torch, "compile", with_backend):
        yield


def no_memory(rank: int):
    """One rank's machine has no room for the copy of a checkpoint."""
    from training import fitting

    return replaced(fitting, "spare_memory", lambda real: lambda: 0 if rank == RANK else real())


SPECIAL = {"happens": happens, "slow": slow, "compiler": compiler, "no_memory": no_memory}


def run(folder: str, arguments: list[str]) -> int:
    """The command's exit code; {rank} in the folder and the arguments is this rank's number."""
    folder, *arguments = (text.replace("{rank}", str(RANK)) for text in (folder, *arguments))
    os.chdir(folder)
    sys.argv = ["train.py", *arguments]
    try:
        train.main()
    except SystemExit as stopped:
        return stopped.code
    return 0


def main() -> None:
    command.WAIT_FOR_RANK_0 = 0  # nobody ends the others here
    scenarios = Path(sys.argv[1])
    said = scenarios.parent / "said"
    for scenario in json.loads(scenarios.read_text(encoding="utf-8")):
        special = contextlib.nullcontext()
        for key in SPECIAL.keys() & scenario.keys():
            special = SPECIAL[key](**scenario[key])
        to = said / f"{scenario['name']}.{RANK}"
        with redirected(to), special:
            own = scenario.get("each", {}).get(str(RANK), [])
            code = run(scenario["folder"], [*scenario["arguments"], *own])
        Path(f"{to}.code").write_text(str(code), encoding="utf-8")
        if scenario.get("last"):
            sys.exit(code)


if __name__ == "__main__":
    main()
