"""Trainings with faults: functions that start them, and checks of their results.

A fork server starts a training (fork_server.py) and plants its faults (planted_faults.py). The
result is compared with an undisturbed run with the same settings in another folder.
"""

import contextlib
import itertools
import json
import os
import random
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from clearhead.checkpoint import format as checkpoint
from clearhead.checkpoint import listing
from helpers import REPOSITORY, TEXT, TIMEOUT, TINY
from helpers.ranks import environment, free_port, without_library_lines
from helpers.runs import rows
from helpers.tally import CAMPAIGN
from helpers.texts import prepare

STEP = "train.train_step"


def interrupt(*each: tuple) -> dict:
    """Returns the fault "interrupt" for tuples of (what, at, call, when); see planted_faults.py."""
    keys = ("what", "at", "call", "when")
    return {"interrupt": {"each": [dict(zip(keys, event, strict=False)) for event in each]}}


class ForkServer:
    """Starts trainings, and other code that needs their imports. A context manager that kills all
    remaining processes at its end."""

    def __init__(self, home: Path):
        self.home = home
        self.numbers = itertools.count()  # for the names of logs

    def __enter__(self) -> "ForkServer":
        self.process = subprocess.Popen(
            [sys.executable, REPOSITORY / "tests" / "helpers" / "fork_server.py"],
            env=environment(HOME=self.home),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._read() == {"ready": True}
        return self

    def __exit__(self, *_) -> None:
        self.process.stdin.close()
        assert self.process.wait(TIMEOUT) == 0
        self.process.stdout.close()

    def ask(self, **order) -> dict:
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> dict:
        ready, _, _ = select.select([self.process.stdout], [], [], TIMEOUT)
        line = self.process.stdout.readline() if ready else ""
        assert line, "the fork server has ended or does not respond"
        return json.loads(line)

    def start(
        self, folder: Path, *arguments: str, fault: dict | None = None, code: str = "", **more
    ) -> "Training":
        """Starts a training with these arguments, or code, in a folder. more: variables of its
        environment."""
        log = folder / f"log{next(self.numbers)}"
        values = {key: str(value) for key, value in more.items()}
        order = {"folder": str(folder), "arguments": arguments, "environment": values}
        order |= {"log": str(log), "fault": fault or {}, "code": code}
        return Training(self, self.ask(**order)["pid"], log)

    def start_ranks(
        self,
        folder: Path,
        *arguments: str,
        faults: Sequence[dict | None] = (None, None),
        each: Sequence[str] = (),
        **more,
    ) -> list["Training"]:
        """Starts one rank for each item of `faults`, without torchrun. each: one argument for each
        rank. {rank} in the folder and the arguments is replaced by the number of the rank."""
        more = {"LOCAL_WORLD_SIZE": len(faults), "WORLD_SIZE": len(faults)} | more
        more |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        trainings = []
        for rank, fault in enumerate(faults):
            texts = (str(folder), *arguments, *each[rank : rank + 1])
            where, *of_rank = [text.replace("{rank}", str(rank)) for text in texts]
            more |= {"RANK": rank, "LOCAL_RANK": rank % more["LOCAL_WORLD_SIZE"]}
            trainings.append(self.start(Path(where), *of_rank, fault=fault, **more))
        return trainings

    def run_ranks(
        self, folder: Path, *arguments: str, codes: Sequence[int] = (0, 0), **more
    ) -> list["Training"]:
        """Starts ranks and waits until they end. Checks their exit codes. A rank with another exit
        code ends all, which would wait for it."""
        trainings = self.start_ranks(folder, *arguments, **more)
        running = dict(enumerate(trainings))
        while running:
            for rank in [rank for rank, each in running.items() if each.has_ended(0.02)]:
                if running.pop(rank).wait() != codes[rank]:
                    for other in running.values():
                        other.send(signal.SIGKILL)
        found = [training.code for training in trainings]
        assert found == list(codes), [training.err for training in trainings]
        return trainings


class Training:
    """A training process."""

    def __init__(self, server: ForkServer, pid: int, log: Path):
        self.server = server
        self.pid = pid
        self.log = log
        self.code: int | None = None
        self._handle = os.pidfd_open(pid)

    def send(self, number: int) -> None:
        """Sends a signal, unless the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)

    def has_ended(self, within: float) -> bool:
        """Whether the process has ended, or ends within this number of seconds."""
        if self.code is not None:
            return True
        waiting = select.poll()
        waiting.register(self._handle, select.POLLIN)
        return bool(waiting.poll(within * 1000))

    def wait(self) -> int:
        """Waits until the process ends. Returns its exit code."""
        if self.code is None:
            if not self.has_ended(TIMEOUT):
                self.send(signal.SIGKILL)
                raise AssertionError(f"still running after {TIMEOUT} s:\n{self.err}")
            self.code = self.server.ask(wait=self.pid)["code"]
            os.close(self._handle)
        return self.code

    @property
    def err(self) -> str:
        """Its stderr without the lines of libraries."""
        path = Path(f"{self.log}.err")
        return without_library_lines(path.read_text(errors="replace")) if path.exists() else ""

    @property
    def out(self) -> str:
        return Path(f"{self.log}.out").read_text()


def printed_command(err: str) -> tuple[str, list[str]]:
    """Returns the last printed command: the launcher before train.py, and the arguments."""
    *_, found = re.findall(r"((?:python|torchrun) .*?)\S*train\.py (.*)$", err, re.MULTILINE)
    return found[0].strip(), shlex.split(found[1])


STEPS = 60 if CAMPAIGN else 30
RUN = (*TINY, "name=run", "data.path=text.txt", "model.dropout=0.2")
RUN += (f"trainer.max_steps={STEPS}", "trainer.eval_every=20", "trainer.save_every=5")
RUN += ("trainer.keep=2", "trainer.log_every=3")
# Three checkpoints with keep=1. The second is the best, because the learning rate
# becomes too large. (Two ranks have other dropout masks, so they need a smaller learning rate.)
THREE = (*RUN, "trainer.max_steps=15", "trainer.eval_every=5", "trainer.keep=1")
THREE += ("trainer.warmup_steps=14", "optimizer.lr=1.1")
# Evaluations take most of the time. Losses of step 2 are in the row of step 3.
WATCHED = (*RUN, "trainer.max_steps=8", "trainer.save_every=0", "trainer.log_every=3")
WATCHED += ("trainer.micro_batch_size=2", "trainer.eval_every=2", "trainer.sample_tokens=32")
WATCHED += ("lens=default", "lens.every=2", "lens.ablation=exact")
KINDS = {
    "plain": RUN,
    "accumulation": (*RUN, "trainer.micro_batch_size=2", "trainer.log_every=1"),
    "shards": ("data=shards", *RUN, "data.path=tokens", "data.val_fraction=0.2"),
    "best": (*RUN, "trainer.keep=1", "trainer.eval_every=4", "trainer.save_every=7"),
    "three": THREE,
    "ranks": (*THREE, "optimizer.lr=0.6", "parallel=ddp", "parallel.timeout=1000"),
    "end": (*RUN, "trainer.max_steps=5", "trainer.save_every=0", "trainer.eval_every=5"),
    "every step": (*RUN, "trainer.log_every=1", "trainer.sample_tokens=0", "trainer.save_every=0"),
    "watched": WATCHED,
    "watched ranks": (*WATCHED, "parallel=ddp", "parallel.timeout=1000"),
    "watched ranks with shards": (*WATCHED, "parallel=fsdp", "parallel.timeout=1000"),
    "short": (*RUN, "trainer.log_every=1", "trainer.max_steps=20"),
    "two ranks": (*RUN, "trainer.log_every=1", "trainer.max_steps=20", "parallel=ddp"),
}


def setting(kind: str, key: str) -> int:
    """Returns the last value of a setting in KINDS[kind]."""
    return int([a.partition("=")[2] for a in KINDS[kind] if a.startswith(f"{key}=")][-1])


class Faults:
    """A fork server, folders for runs, and the undisturbed run of each kind, run when needed."""

    def __init__(self, server: ForkServer, home: Path):
        self.server, self.home = server, home
        self.numbers = itertools.count()
        self.undisturbed_runs: dict[str, Path] = {}
        self.seconds: dict[str, float] = {}  # duration of the undisturbed runs
        self.names: dict[str, list[str]] = {}
        self.template = home / "texts"
        self.template.mkdir()
        text = self.template / "text.txt"
        text.write_text(TEXT, encoding="utf-8")
        prepare(text, self.template / "tokens", tokenizer="byte", shard_tokens=1500)

    def folder(self) -> Path:
        """Returns a new folder with the training data."""
        return Path(shutil.copytree(self.template, self.home / f"place{next(self.numbers)}"))

    def undisturbed(self, kind: str) -> Path:
        if kind not in self.undisturbed_runs:
            folder, started = self.folder(), time.perf_counter()
            self.run(folder, kind)
            self.undisturbed_runs[kind] = folder / "runs" / "run"
            self.seconds[kind] = time.perf_counter() - started
        return self.undisturbed_runs[kind]

    def operations(self, kind: str) -> list[str]:
        """Returns the disk operations of the saver for the second checkpoint (see Operations)."""
        if kind not in self.names:
            folder = self.folder()
            self.run(folder, kind, fault={"crash": {"names": str(folder / "names")}})
            run = folder / "runs" / "run"
            check_same_result(run, self.undisturbed(kind))
            best = "step_00000005" if kind == "end" else "step_00000010"
            assert (run / "checkpoints" / "best").resolve().name == best
            self.names[kind] = (folder / "names").read_text().splitlines()
        return self.names[kind]

    def start(self, folder: Path, kind: str, *more: str, fault=None) -> list[Training]:
        """Starts all ranks of a run. The fault is planted in rank 0."""
        arguments = (*KINDS[kind], *more)
        if "ranks" in kind:
            return self.server.start_ranks(folder, *arguments, faults=[fault, None])
        return [self.server.start(folder, *arguments, fault=fault)]

    def run(self, folder: Path, kind: str, *more: str, fault=None, code: int = 0) -> Training:
        """Runs all ranks to their end and checks their exit code. Returns rank 0."""
        trainings = self.start(folder, kind, *more, fault=fault)
        codes = {training.wait() for training in trainings}
        assert codes == {code}, [training.err for training in trainings]
        return trainings[0]

    def kill_at(self, folder: Path, call: int, when: str = "before") -> None:
        """Runs a short training that is killed at this call of train_step."""
        fault = interrupt(("SIGKILL", STEP, call, when))
        self.run(folder, "short", fault=fault, code=-signal.SIGKILL)

    def complete(self, folder: Path, kind: str, was_stopped: bool = False) -> None:
        """Reruns the command to its end. Checks that the result equals that of the undisturbed run
        and that every step after the newest checkpoint is computed once."""
        run, steps = folder / "runs" / "run", folder / f"steps{next(self.numbers)}"
        newest = newest_valid_step(run) or 0
        self.run(folder, kind, fault={"watch_parameters": {"file": str(steps)}})
        steps.touch()
        computed = [json.loads(line)[0] for line in steps.read_text().splitlines()]
        assert computed == list(range(newest + 1, setting(kind, "trainer.max_steps") + 1))
        check_same_result(run, self.undisturbed(kind), was_stopped)


def newest_valid_step(run: Path) -> int | None:
    """Returns the step of the newest valid checkpoint; None if there is none."""
    for folder in listing.list_checkpoints(run):
        with contextlib.suppress(checkpoint.DamagedCheckpointError):
            checkpoint.verify(folder)
            return listing.step_of(folder)
    return None


def check_all_valid(run: Path) -> None:
    """Checks that all checkpoints of a run are valid."""
    for folder in listing.list_checkpoints(run):
        checkpoint.verify(folder)


def has_one_state(run: Path) -> bool:
    """Returns whether the checksums of the newest checkpoint list no state that was replaced."""
    return (run / "checkpoints/last/SHA256SUMS").read_text().count("state.json") == 1


def last_row(run: Path) -> int:
    """Returns the last step in the log; 0 if it is empty. The last line may be incomplete."""
    log = run / "metrics.jsonl"
    whole = log.read_bytes().rpartition(b"\n")[0].split(b"\n") if log.exists() else []
    return json.loads(whole[-1])["step"] if whole and whole[-1] else 0


def result_of(run: Path) -> dict[str, object]:
    """Returns the parts of a run that are equal for equal settings, by name: the last and the best
    checkpoint without the names in the command, and the log without the speed."""
    found = {"metrics.jsonl": [row | {"train/tokens_per_second": None} for row in rows(run)]}
    for link in ("last", "best"):
        folder = run / "checkpoints" / link
        for name in ("model.safetensors", "optimizer.safetensors"):
            found[f"{link}/{name}"] = checkpoint.checksum(folder / name)
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        assert state.pop("wandb_id") is None
        del state["settings"]["name"], state["settings"]["trainer"]["resume"]
        found |= {link: os.readlink(folder), f"{link}/state.json": state}
    samples = run / "samples.jsonl"
    return found | {"samples.jsonl": samples.read_bytes() if samples.exists() else b""}


def check_same_result(run: Path, undisturbed: Path, was_stopped: bool = False) -> None:
    """Checks that two runs have the same checkpoints, byte for byte, and the same log.
    was_stopped: the run may have one more checkpoint, of the step at which it stopped."""
    folders = [run / "checkpoints", undisturbed / "checkpoints"]
    names, expected = [sorted(path.name for path in folder.iterdir()) for folder in folders]
    assert names == expected or (was_stopped and len(names) <= len(expected) + 1)
    mine, theirs = result_of(run), result_of(undisturbed)
    # Only the names: pytest would take minutes to compare long values.
    different = [name for name in theirs if mine[name] != theirs[name]]
    assert not different
    check_all_valid(run)
    assert has_one_state(run)
    assert not [path for path in run.rglob("*") if re.search(r"\.(part|damaged)", path.name)]


def lose_power(lost: Path, chance: random.Random) -> None:
    """Simulates a loss of power. Of file contents without fsync, a part is lost. Of name changes
    without fsync, a random subset is undone or, as with a journal, all after a random one."""
    record = json.loads(lost.read_text())
    for path, kept in record["files"].items():
        size = os.path.getsize(path)
        if size > kept:
            os.truncate(path, chance.choice([kept, kept + (size - kept) // 2]))
    names = record["names"]
    first, in_order = chance.randrange(len(names) + 1), chance.random() < 0.5
    for number, change in reversed(list(enumerate(names))):
        if number >= first if in_order else chance.random() < 0.5:
            undo(change)


def undo(change: dict) -> None:
    """Undoes a change of a name, if this is possible."""
    what, path = change["what"], Path(change["path"])
    with contextlib.suppress(OSError):
        if what in ("open", "symlink"):
            path.unlink()
        elif what == "mkdir":
            shutil.rmtree(path)
        elif what == "rmdir":
            path.mkdir()
        elif what == "rename" and not os.path.lexists(change["source"]):
            path.rename(change["source"])
        if change["old"] and not os.path.lexists(path):
            os.link(change["old"], path, follow_symlinks=False)
