"""Nothing is lost: runs that are killed, stopped, cut off from power, short of room or fed with
bad numbers come to the same end, to the byte, as runs that nobody disturbed.

A few trials of each kind here; CAMPAIGN=1 makes hundreds, as does CAMPAIGN_KILLS=N of kills.
"""

import json
import os
import random
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
from helpers.planted_faults import BALLAST, fill_up
from helpers.runs import rows
from helpers.tally import tally
from helpers.trainings import (
    KINDS,
    STEPS,
    Faults,
    ForkServer,
    campaign,
    check_all_whole,
    check_same_end,
    last_row,
    lose_power,
    setting,
    tally_seconds,
    usable,
)


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    home = tmp_path_factory.mktemp("faults")
    with ForkServer(home) as server:
        yield Faults(server, home)


# ---------------------------------------------------------------------------------------- kills


def wait_until_saving(training, run) -> None:
    """Until a checkpoint is in the making, or the run has ended."""
    while not training.has_ended(0.0005):
        if any(run.glob("checkpoints/*.part")):
            return


@pytest.mark.parametrize("number", range(campaign("CAMPAIGN_KILLS", 10, 300)))
def test_a_run_that_is_killed_comes_to_the_same_end(faults, number):
    """At random moments of its life, some while a checkpoint is written, once or several times."""
    chance = random.Random(number)
    kind = ("plain", "accumulating", "shards", "best")[number % 4]
    whole, folder = faults.whole(kind), faults.folder()
    run, every = folder / "runs" / "run", setting(kind, "trainer.save_every")
    kills, landed = chance.choice([1, 1, 2, 3]), 0
    while landed < kills:
        before = usable(run)
        (training,) = faults.start(folder, kind)
        if chance.random() < 0.3:
            wait_until_saving(training, run)
            training.has_ended(chance.uniform(0, 0.02))
        else:
            training.has_ended(chance.uniform(0, whole.seconds))
        training.send(signal.SIGKILL)
        if training.wait() == 0:  # it was faster
            break
        assert training.code == -signal.SIGKILL
        landed += 1
        check_all_whole(run)
        newest = usable(run)
        assert (newest or 0) >= (before or 0)
        # One interval, and the checkpoint that is written while training goes on: it has to be
        # there before the next is begun, which is after the row of that step.
        assert (newest or 0) >= (last_row(run) - 1) // every * every - every
    faults.complete(folder, kind)
    tally("SIGKILL at a random moment, then resume, one process", landed)


# ------------------------------------------------------------------------------ points of saving

GROUPS = 3  # of crashes, for as many processes as may test


def crash_at(faults, kind: str, point: int, power: bool, where: str) -> None:
    folder = faults.folder()
    run, lost = folder / "runs" / "run", folder / "lost"
    crash = {"crash": {"at": point, "lost": str(lost) if power else None}}
    main, *others = faults.start(folder, kind, fault=crash)
    try:
        assert main.wait() == -signal.SIGKILL
        assert [other.wait() for other in others] == [4] * len(others)
        if power:
            lose_power(lost, random.Random(point))
        else:
            check_all_whole(run)
        assert usable(run) in (5, 10)
        faults.complete(folder, kind)
    except AssertionError as error:
        error.add_note(f"it ended before {where}, in {folder}")
        raise


@pytest.mark.parametrize("group", range(GROUPS))
@pytest.mark.parametrize("power", [False, True], ids=["crash", "power"])
@pytest.mark.parametrize("kind", ["three", "ranks"])
def test_a_run_that_ends_inside_saving_goes_on(faults, kind, power, group):
    """Before each operation on the disk, from the second checkpoint's first to the end of the
    first one, which is the only other. power: and what the disk was not asked to keep is lost."""
    names = faults.operations(kind)
    apart = campaign("CAMPAIGN_APART", 4 if kind == "three" else 12, 1)
    points = list(range(1 + (power and apart // 2), len(names) + 1, apart))[group::GROUPS]
    assert points
    for point in points:
        crash_at(faults, kind, point, power, f"{names[point - 1]}, {point} of {len(names)}")
    fault = "loss of power" if power else "crash"
    tally(f"{fault} at each point inside saving and pruning (1 and 2 ranks)", len(points))


# ------------------------------------------------------------------------------------- the disk

FIRST, MIDDLE, LAST = 5, 10, 20  # the checkpoints of a short run: every fifth step
INJECTED = {
    "fsync fails": ({"what": "os.fsync", "code": "EIO"}, "Input/output error"),
    "the folder's fsync fails": (
        {"what": "os.fsync", "code": "EIO", "only": "/checkpoints"},
        "Input/output",
    ),
    "rename is denied": ({"what": "os.replace", "code": "EACCES"}, "Permission denied"),
    "no folder is made": ({"what": "os.mkdir", "code": "ENOSPC"}, "No space left on device"),
    "no file is made": ({"what": "save_file", "code": "ENOSPC"}, "No space left on device"),
    "the second file fails": (
        {"what": "save_file", "code": "EIO", "only": "/optimizer.safetensors"},
        "Input/output error",
    ),
}
REAL = {
    "short writes": ({"little_room": {"size": 200_000}}, "File too large"),
    "short writes of all files": ({"little_room": {"size": 3000}}, "File too large"),
    "a full disk": ({"full_disk": {"leave": 0}}, "No space left on device"),
    "a nearly full disk": ({"full_disk": {"leave": 200_000}}, "No space left on device"),
    "a sealed folder": ({"shell": {}}, "Operation not permitted|Permission denied"),
}
SEAL = ("chattr +i", "chattr -i") if os.geteuid() == 0 else ("chmod a-w", "chmod u+w")


def disk_faults() -> list:
    """(what, from which checkpoint on, whether for good): all, or some that have each of them."""
    every = [
        (what, first, for_good)
        for what in (*INJECTED, *REAL)
        for first in (FIRST, MIDDLE, LAST)
        for for_good in (False, True)
        # There is no later step at which it could end.
        if not (what in REAL and first == LAST and not for_good)
        if not (what == "a sealed folder" and first == FIRST)  # there is none yet
    ]
    some = every[:: -(-len(every) // 8)]
    return every if campaign("CAMPAIGN_DISK", 0, 1) else some


@pytest.fixture
def small_disk(faults):
    """A folder to run in whose runs/ is a disk of its own, of 8 MB."""
    folder = faults.folder()
    (folder / "runs").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder / "runs")]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("may not mount a disk here")
    yield folder
    subprocess.run(["umount", str(folder / "runs")], check=True)


def not_saved(said: str, step: int, cause: str) -> list[str]:
    """The lines on a checkpoint that was not written, with where, why and the room on the disk."""
    where = re.escape(f"checkpoint=runs/run/checkpoints/step_{step:08d}: could not be written (")
    line = rf"{where}.*(?:{cause}).*, [0-9.,]+ [MG]B free on its disk\); make room there: .*"
    return [found for found in said.splitlines() if re.fullmatch(line, found)]


@pytest.mark.parametrize(("what", "first", "for_good"), disk_faults())
def test_a_run_short_of_disk_goes_on_or_ends_with_the_last_checkpoint(
    faults, request, what, first, for_good
):
    """What is saved stays; for a while: training goes on to the same end. For good: it ends with
    4, and the same command comes to the same end when there is room again."""
    on_disk = "disk" in what
    folder = request.getfixturevalue("small_disk") if on_disk else faults.folder()
    run = folder / "runs" / "run"
    if what in INJECTED:
        how, cause = INJECTED[what]
        steps = range(first, LAST + 1) if for_good else [first]
        # At the end there is only the second try.
        times = 1 if first == LAST and not for_good else None
        fault = {"failing": how | {"steps": list(steps), "times": times}}
    else:
        ((name, how),), cause = REAL[what][0].items(), REAL[what][1]
        if name == "shell":
            how = {"commands": [f"{command} runs/run/checkpoints" for command in SEAL]}
        fault = {name: how | {"before": first - 1, "until": None if for_good else first + 2}}
    failed = range(first, LAST + 1, 5) if for_good else [first] * (first < LAST)
    (training,) = faults.start(folder, "short", fault=fault)
    try:
        code = training.wait()
    finally:
        if "sealed" in what:
            subprocess.run([*SEAL[1].split(), run / "checkpoints"], check=True)
    said = training.said
    assert "Traceback" not in said
    for step in (5, 10, 15, 20):
        lines = not_saved(said, step, cause)
        assert len(lines) == (step in failed), said
        ends_it = for_good and step == LAST
        assert all(line.endswith("; training goes on") != ends_it for line in lines)
    assert len(re.findall("^checkpoint=", said, re.MULTILINE)) == len(failed), said
    check_all_whole(run)
    if for_good:
        assert code == 4, said
        before = usable(run)
        assert before == (first - 5 or None) or "folder's" in what  # there, but for how long
        (folder / BALLAST).unlink(missing_ok=True)
        faults.complete(folder, "short")
    else:
        assert code == 0, said
        check_same_end(run, faults.whole("short").run)
    tally("ENOSPC, EIO, EACCES, short writes")


def test_a_disk_that_is_full_at_the_start_ends_it_in_one_line(faults, small_disk):
    """Of a run that has checkpoints, and of one that has nothing."""
    killed = {"signals": {"each": [{"name": "SIGKILL", "step": 13, "when": "saved"}]}}
    for fault in (None, killed):
        if fault:
            (training,) = faults.start(small_disk, "short", fault=fault)
            assert training.wait() == -signal.SIGKILL
        before = usable(small_disk / "runs" / "run")
        fill_up(small_disk / BALLAST)
        (training,) = faults.start(small_disk, "short")
        assert training.wait() == 2
        (line,) = training.said.splitlines()
        assert re.match(r"name=run: \S+ cannot be written \(No space left on device\); ", line)
        (small_disk / BALLAST).unlink()
        assert usable(small_disk / "runs" / "run") == before
    faults.complete(small_disk, "short")
    tally("ENOSPC, EIO, EACCES, short writes", 2)


# --------------------------------------------------------------------------------------- signals

STOPS = {  # what is sent, one after the other, and the exit code
    "SIGTERM": ([signal.SIGTERM], 143),
    "SIGUSR1": ([signal.SIGUSR1], 143),
    "SIGTERM five times": ([signal.SIGTERM] * 5, 143),
    "Ctrl-C": ([signal.SIGINT], 130),
}
WITHIN = 10  # seconds that a stop may take, in the campaign


def as_shell(code: int) -> int:
    """What a shell says of an exit code: 143 of a process that SIGTERM ended."""
    return 128 - code if code < 0 else code


@pytest.mark.parametrize("number", range(campaign("CAMPAIGN_STOPS", 6, 40)))
def test_a_run_that_is_told_to_stop_saves_this_step_and_goes_on_from_it(faults, number):
    """At a random moment of its life; by the very command that it names when it stops."""
    chance, what = random.Random(number), list(STOPS)[number % len(STOPS)]
    sent, expected = STOPS[what]
    whole, folder = faults.whole("every step"), faults.folder()
    run = folder / "runs" / "run"
    (training,) = faults.start(folder, "every step")
    training.has_ended(chance.uniform(0, whole.seconds))
    started = time.perf_counter()
    for each in sent:
        training.send(each)
        training.has_ended(chance.choice([0, 0.01]))
    code, said = as_shell(training.wait()), training.said
    seconds = time.perf_counter() - started
    tally_seconds("the slowest stop", seconds)
    assert "Traceback" not in said
    assert not campaign("CAMPAIGN_STOPS", 0, 1) or seconds < WITHIN
    check_all_whole(run)
    name = sent[0].name
    stops = [line for line in said.splitlines() if line.startswith("stopped by ")]
    if code == 0 or last_row(run) == STEPS:  # it came after the last step
        assert code in (0, expected)
        assert usable(run) == STEPS
        command = KINDS["every step"]
    elif not stops or stops == [f"stopped by {name} before the first step"]:
        assert code == expected
        assert last_row(run) == 0
        command = KINDS["every step"]
    else:
        assert code == expected
        (line,) = stops
        assert said.endswith(line + "\n")
        step = usable(run)
        assert step == last_row(run) == rows(run)[-1]["step"]
        words = f"stopped by {name} after step {step}; saved in runs/run; resume with: "
        assert line.startswith(words)
        python, train, *command = shlex.split(line.removeprefix(words))
        assert (python, train) == ("python", "train.py")
    again = faults.server.run(folder, *command)
    assert again.code == 0, again.said
    check_same_end(run, whole.run, was_stopped=True)
    tally("SIGTERM, repeated SIGTERM, Ctrl-C, double Ctrl-C")


@pytest.mark.parametrize("part", range(0, 5, campaign("CAMPAIGN_APART", 4, 1)))
def test_a_run_that_is_told_to_stop_while_it_starts_says_so_in_a_line(faults, part):
    """A new one, and one that goes on; whatever is being built."""
    folder = faults.folder()
    run, name = folder / "runs" / "run", ("SIGTERM", "SIGINT", "SIGUSR1")[part % 3]
    stopped = {"signals": {"each": [{"name": name, "step": part, "when": "starting"}]}}
    killed = {"signals": {"each": [{"name": "SIGKILL", "step": 13, "when": "saved"}]}}
    for fault in (None, killed):
        if fault:
            (training,) = faults.start(folder, "short", fault=fault)
            assert training.wait() == -signal.SIGKILL
        before = inside(run / "checkpoints")
        (training,) = faults.start(folder, "short", fault=stopped)
        assert training.wait() == (130 if name == "SIGINT" else 143)
        assert training.said == f"stopped by {name} before the first step\n"
        assert inside(run / "checkpoints") == before
        assert run.is_dir() == (fault is not None or part == 4)
    faults.complete(folder, "short")
    tally("SIGTERM, repeated SIGTERM, Ctrl-C, double Ctrl-C", 2)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_a_start_that_is_cut_off_leaves_nothing_behind(faults, name):
    """While a small file is written: the settings of a new run; of one that goes on, the log."""
    folder = faults.folder()
    for after, number in [(None, 0), (13, 0), (None, 1)]:
        if after:
            each = [{"name": "SIGKILL", "step": after, "when": "saved"}]
            (training,) = faults.start(folder, "short", fault={"signals": {"each": each}})
            assert training.wait() == -signal.SIGKILL
        each = [{"name": name, "step": number, "when": "writing"}]
        (training,) = faults.start(folder, "short", fault={"signals": {"each": each}})
        assert training.wait() == (143 if name == "SIGTERM" else -signal.SIGKILL)
    faults.complete(folder, "short")
    tally("SIGTERM, repeated SIGTERM, Ctrl-C, double Ctrl-C", 3 * (name == "SIGTERM"))


@pytest.mark.parametrize("number", range(campaign("CAMPAIGN_STOPS", 2, 10)))
def test_a_second_interrupt_leaves_at_once_and_harms_nothing(faults, number):
    """Right after the first, at a random moment, or in the midst of the checkpoint for it."""
    chance, folder = random.Random(number), faults.folder()
    run = folder / "runs" / "run"
    if number % 2:
        step = chance.randrange(1, STEPS - 1)
        each = [{"name": "SIGINT", "step": step, "when": "step"}]
        each += [{"name": "SIGINT", "step": step + 1, "when": "saving"}]
        (training,) = faults.start(folder, "every step", fault={"signals": {"each": each}})
    else:
        (training,) = faults.start(folder, "every step")
        rows_before = chance.randrange(STEPS // 2)
        training.until(lambda: last_row(run) >= rows_before and (run / "metrics.jsonl").exists())
        training.send(signal.SIGINT)
        training.until(lambda: "once more to stop at once" in training.said)
        training.send(signal.SIGINT)
    assert training.wait() == 130, training.said
    assert "Traceback" not in training.said
    check_all_whole(run)
    faults.complete(folder, "every step", was_stopped=True)
    tally("SIGTERM, repeated SIGTERM, Ctrl-C, double Ctrl-C")


# ----------------------------------------------------------------------------------- bad numbers


def watched(folder: Path, rank: str = "") -> dict[int, tuple[str, str]]:
    """What the parameters and moments were before and after each step."""
    lines = (folder / f"watched{rank}").read_text().splitlines()
    return {step: (before, after) for step, before, after in map(json.loads, lines)}


def bad(folder: Path, steps: list[int], value: str, rank: int = 0) -> dict:
    """The fault, and that parameters are watched."""
    loss = {"steps": steps, "value": value, "rank": rank}
    return {"bad_loss": loss, "watch_parameters": {"file": str(folder / "watched")}}


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_step_whose_loss_is_no_number_changes_nothing_and_is_counted(faults, value):
    """Bit for bit; a run that is killed and goes on has counted the same."""
    steps, folder, other = [3, 8, 9, 13], faults.folder(), faults.folder()
    (training,) = faults.start(folder, "short", fault=bad(folder, steps, value))
    assert training.wait() == 0, training.said
    seen = watched(folder)
    assert [step for step, (before, after) in seen.items() if before == after] == steps
    counts = {r["step"]: r.get("train/skipped_steps") for r in rows(folder / "runs" / "run")}
    assert counts == {0: None} | {s: sum(b <= s for b in steps) for s in range(1, 21)}

    killed = {"signals": {"each": [{"name": "SIGKILL", "step": 11, "when": "step"}]}}
    (training,) = faults.start(other, "short", fault=bad(other, steps, value) | killed)
    assert training.wait() == -signal.SIGKILL
    (training,) = faults.start(other, "short", fault=bad(other, steps, value))
    assert training.wait() == 0, training.said
    check_same_end(other / "runs" / "run", folder / "runs" / "run")
    tally("NaN", len(steps))


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_leave_out_a_step_that_is_bad_on_one(faults, rank):
    steps, folder = [4, 7], faults.folder()
    arguments = KINDS["two ranks"]
    wrong = [bad(folder, steps, value="inf", rank=rank)] * 2
    trainings = faults.server.start_ranks(folder, *arguments, faults=wrong)
    assert [training.wait() for training in trainings] == [0, 0], trainings[0].said
    seen = watched(folder, "0")
    assert seen == watched(folder, "1")
    assert [step for step, (before, after) in seen.items() if before == after] == steps
    tally("NaN", len(steps))


@pytest.mark.parametrize(
    ("setting", "steps", "at", "why"),
    [
        ("trainer.max_skips=3", [2, 6, 7, 8, 9], 8, "3 in a row"),
        ("trainer.on_nonfinite=stop", [6], 6, "on_nonfinite"),
    ],
)
def test_too_many_bad_steps_end_the_run_with_the_checkpoint_before(faults, setting, steps, at, why):
    folder = faults.folder()
    run, steps_before = folder / "runs" / "run", [s for s in steps if s < 6]
    (training,) = faults.start(folder, "short", setting, fault=bad(folder, steps, "nan"))
    assert training.wait() == 4
    assert "Traceback" not in training.said
    *_, line = training.said.splitlines()
    assert re.match(rf"optimizer\.lr=0\.0003: .* step 6 is no finite number \({why}\); ", line)
    assert line.endswith("; the checkpoint of step 5 is intact")
    assert usable(run) == 5
    check_all_whole(run)
    seen = watched(folder)
    unchanged = [step for step, (before, after) in seen.items() if before == after]
    assert unchanged == [*steps_before, *range(6, at + 1)]
    assert max(seen) == at
    # With numbers again it goes on, and leaves out no more than it has.
    if not steps_before:
        faults.complete(folder, "short")
    else:
        (training,) = faults.start(folder, "short")
        assert training.wait() == 0, training.said
    assert rows(run)[-1]["train/skipped_steps"] == len(steps_before)
    tally("NaN", at - 5)


# ------------------------------------------------------------------------------- one at a time


def inside(folder: Path) -> dict[str, bytes]:
    """All there is in a folder, and what it holds."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
    }


def test_one_run_at_a_time_in_a_directory(faults):
    """The second is refused, the first not disturbed; one that was killed is in nobody's way."""
    folder, go_on = faults.folder(), faults.home / "go on"
    waiting = {"wait_at": {"step": 8, "file": str(go_on)}}
    (first,) = faults.start(folder, "short", fault=waiting)
    first.until(Path(f"{go_on}.reached").exists)
    (second,) = faults.start(folder, "short")
    assert second.wait() == 2
    words = r"name=run: runs/run is being written by another process \(process (\d+) on \S+\); .*\n"
    assert int(re.fullmatch(words, second.said)[1]) == first.pid
    go_on.touch()
    assert first.wait() == 0, first.said
    check_same_end(folder / "runs" / "run", faults.whole("short").run)

    killed = faults.folder()
    go_on.unlink()
    Path(f"{go_on}.reached").unlink()
    (third,) = faults.start(killed, "short", fault=waiting)
    third.until(Path(f"{go_on}.reached").exists)
    assert third.send(signal.SIGKILL) in (True, False)
    assert third.wait() == -signal.SIGKILL
    faults.complete(killed, "short")
    tally("locks", 2)


def test_a_directory_that_holds_something_else_is_left_as_it_is(faults):
    """Another run that came to no checkpoint, and files that are no run's."""
    folder, foreign = faults.folder(), faults.folder()
    early = {"signals": {"each": [{"name": "SIGKILL", "step": 2, "when": "step"}]}}
    (training,) = faults.start(folder, "short", fault=early)
    assert training.wait() == -signal.SIGKILL
    (foreign / "runs" / "run").mkdir(parents=True)
    (foreign / "runs" / "run" / "thesis.txt").write_text("all of it")
    for place, more, says in [
        (folder, ["seed=7"], r"seed=7: runs/run was trained with 0, and has no checkpoint; "),
        (foreign, [], r"name=run: runs/run holds something else than a run; "),
    ]:
        before = inside(place / "runs")
        (training,) = faults.start(place, "short", *more)
        assert training.wait() == 2, training.said
        assert re.match(says, training.said), training.said
        assert len(training.said.splitlines()) == 1
        after = inside(place / "runs")
        assert {k: v for k, v in after.items() if ".lock" not in k} == {
            k: v for k, v in before.items() if ".lock" not in k
        }
        assert set(after) == set(before)
    faults.complete(folder, "short")
    tally("locks", 2)
