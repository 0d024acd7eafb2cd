"""Fault injection in runs: kills, signals, loss of power, full disks, NaN and inf.

Each run resumes and ends with the same result as an undisturbed run, bit for bit. `make test` makes
a few trials of each fault, CAMPAIGN=1 hundreds. CAMPAIGN_KILLS=N sets the number of kills.
"""

import json
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from helpers.planted_faults import BALLAST, fill_up
from helpers.refusals import printed_keys, time_limit
from helpers.runs import contents
from helpers.tally import CAMPAIGN, campaign, tally
from helpers.trainings import (
    KINDS,
    STEP,
    STEPS,
    Faults,
    check_all_valid,
    check_same_result,
    interrupt,
    last_row,
    lose_power,
    newest_valid_step,
    printed_command,
    setting,
)

STOPPED = "SIGTERM, repeated SIGTERM, Ctrl-C, double Ctrl-C"  # name of the count
DISK = "ENOSPC, EIO, EACCES, short writes"


@pytest.fixture(scope="module")
def faults(server, tmp_path_factory):
    return Faults(server, tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("number", range(campaign("CAMPAIGN_KILLS", 1, 300)))
def test_a_killed_run_resumes_to_the_same_end(faults, number):
    """It is killed once or several times, at random moments or while a checkpoint is written."""
    chance = random.Random(number)
    kind = ("shards", "best", "plain", "accumulation")[number % 4]
    faults.undisturbed(kind)
    folder, every = faults.folder(), setting(kind, "trainer.save_every")
    kills, landed, latest = chance.choice([1, 1, 2, 3]), 0, faults.seconds[kind]
    while landed < kills:
        run = folder / "runs" / "run"
        before = newest_valid_step(run)
        (training,) = faults.start(folder, kind)
        if chance.random() < 0.3:
            with time_limit():
                while not any(run.glob("checkpoints/*.part")) and not training.has_ended(0.0005):
                    pass
            training.has_ended(chance.uniform(0, 0.02))
        else:
            training.has_ended(chance.uniform(0, latest))
        training.send(signal.SIGKILL)
        if training.wait() == 0:  # it had finished before
            if landed:
                break
            folder, latest = faults.folder(), latest / 2
            continue
        assert training.code == -signal.SIGKILL
        landed += 1
        check_all_valid(run)
        newest = newest_valid_step(run)
        assert (newest or 0) >= (before or 0)
        # At most one interval is lost, and the checkpoint that was being written in the background.
        # A checkpoint is complete before the next one starts, which is after the row of its step.
        assert (newest or 0) >= (last_row(run) - 1) // every * every - every
    faults.complete(folder, kind)
    tally("SIGKILL at a random moment, then resume, one process", landed)


@pytest.mark.parametrize(
    ("kind", "power"),
    [("three", True), ("end", False)]
    + [("three", False), ("ranks", False), ("ranks", True), ("end", True)] * CAMPAIGN,
)
def test_a_crash_at_each_point_of_saving_loses_nothing(faults, kind, power):
    """A kill before each disk operation, from the first one of the second checkpoint until the
    first checkpoint is removed; for "end", of the state that replaces that of the only checkpoint.
    power: all data that was not flushed (fsync) is lost too."""
    names = faults.operations(kind)
    stride = campaign("CAMPAIGN_APART", {"three": 16, "ranks": 25, "end": 5}[kind], 1)
    points = range(1 + stride // 2 if power else 1, len(names) + 1, stride)
    assert points
    for point in points:
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
                check_all_valid(run)
            assert newest_valid_step(run) in ((5,) if kind == "end" else (5, 10))
            faults.complete(folder, kind)
        except AssertionError as error:
            error.add_note(f"killed before {names[point - 1]}, {point} of {len(names)}, {folder}")
            raise
    fault = "loss of power" if power else "crash"
    tally(f"{fault} at each point inside saving and pruning (1 and 2 ranks)", len(points))


FIRST, MIDDLE, LAST = 5, 10, 20  # the checkpoints of a short run: every fifth step
INJECTED = {
    "fsync fails": {"what": "os.fsync", "code": "EIO"},
    "the folder's fsync fails": {"what": "os.fsync", "code": "EIO", "only": "/checkpoints"},
    "rename is denied": {"what": "os.replace", "code": "EACCES"},
    "no folder is made": {"what": "os.mkdir", "code": "ENOSPC"},
    "the second file fails": {"what": "save_file", "code": "EIO", "only": "/optimizer.safetensors"},
}
REAL = {
    "short writes": ("file_size_limit", {"size": 200_000}),
    "short writes of all files": ("file_size_limit", {"size": 3000}),
    "a full disk": ("full_disk", {"leave": 0}),
    "a nearly full disk": ("full_disk", {"leave": 200_000}),
}
DISK_FAULTS = [  # fault, first checkpoint that it affects, whether it is permanent
    (what, first, permanent)
    for what in (*INJECTED, *REAL)
    for first in (FIRST, MIDDLE, LAST)
    for permanent in (False, True)
    if not (what in REAL and first == LAST and not permanent)  # these faults end at a later step
]


@pytest.fixture
def small_disk(faults):
    """A folder for a run, in which runs/ is a separate 8 MB disk."""
    folder = faults.folder()
    (folder / "runs").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder / "runs")]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder / "runs")], check=True)


@pytest.mark.parametrize(
    ("what", "first", "permanent"), DISK_FAULTS[:: campaign("CAMPAIGN_APART", 11, 1)]
)
def test_a_run_with_disk_faults_keeps_its_checkpoints(faults, request, what, first, permanent):
    """Temporary fault: training continues, with the same result, unless the log cannot be written.
    Permanent fault: exit code 4. Then the same command completes the run after the fault is
    removed."""
    folder = request.getfixturevalue("small_disk") if "disk" in what else faults.folder()
    run = folder / "runs" / "run"
    failed = range(first, LAST + 1, 5) if permanent else [first] * (first < LAST)
    if what in INJECTED:
        steps = range(first, LAST + 1) if permanent else [first]
        # For the last checkpoint, a temporary fault must end before the second attempt.
        times = 1 if first == LAST and not permanent else None
        fault = {"failing": INJECTED[what] | {"steps": list(steps), "times": times}}
    else:
        name, how = REAL[what]
        fault = {name: how | {"before": first - 1, "until": None if permanent else first + 2}}
    (training,) = faults.start(folder, "short", fault=fault)
    code = training.wait()
    assert code == (4 if permanent else 0) or (what in REAL and code == 4), training.err
    assert "Traceback" not in training.err
    named = re.findall(r"^checkpoint=runs/run/checkpoints/step_(\d+)", training.err, re.MULTILINE)
    if what in INJECTED:
        assert sorted({*map(int, named)}) == list(failed)
    check_all_valid(run)
    if code:
        before = newest_valid_step(run)
        # If only the folder's fsync fails, the checkpoint is there, but not flushed.
        assert before == (first - 5 or None) or "folder's" in what
        (folder / BALLAST).unlink(missing_ok=True)
        faults.complete(folder, "short")
    else:
        check_same_result(run, faults.undisturbed("short"))
    tally(DISK)


def test_a_disk_that_is_full_at_the_start_is_refused(faults, small_disk):
    """For a run without and a run with checkpoints."""
    for killed in (False, True):
        if killed:
            faults.kill_at(small_disk, 14, "saved")
        before = newest_valid_step(small_disk / "runs" / "run")
        fill_up(small_disk / BALLAST)
        training = faults.run(small_disk, "short", code=2)
        assert printed_keys(training.err) == ["runs_dir"]
        (small_disk / BALLAST).unlink()
        assert newest_valid_step(small_disk / "runs" / "run") == before
    faults.complete(small_disk, "short")
    tally(DISK, 2)


STOPS = [  # signals in the order in which they are sent, and the exit code
    ([signal.SIGTERM] * 5, 143),
    ([signal.SIGINT], 130),
    ([signal.SIGTERM], 143),
    ([signal.SIGUSR1], 143),
    ([signal.SIGHUP], 143),
]


@pytest.mark.parametrize("number", range(campaign("CAMPAIGN_STOPS", 4, 100)))
def test_a_signal_stops_at_once_and_the_printed_command_resumes(faults, number):
    """At a random moment, also during a validation, a sample, an attention snapshot or a removal of
    heads, whose step is saved and whose results are not logged. All ranks get the signal."""
    chance, (sent, expected) = random.Random(number), STOPS[number % len(STOPS)]
    kinds = ("every step", "watched", "watched ranks", "watched ranks with shards")
    kind, folder = kinds[number % 4], faults.folder()
    whole, run = faults.undisturbed(kind), folder / "runs" / "run"
    parts = folder / "parts"
    trainings = faults.start(folder, kind, fault={"watch_parts": {"file": str(parts)}})
    trainings[0].has_ended(chance.uniform(0.2, 0.8) * faults.seconds[kind])
    part = parts.read_text().splitlines()[-1] if parts.exists() else "start"
    started = time.perf_counter()
    for each in sent:
        for training in trainings:
            training.send(each)
        trainings[0].has_ended(chance.choice([0, 0.01]))
    codes = {training.wait() for training in trainings}
    seconds = round(time.perf_counter() - started, 2)
    # A process that has just started, or is about to end, has no handlers.
    codes = {128 - code if code < 0 else code for code in codes}
    assert codes <= {expected, 0 if (run / "summary.json").exists() else expected}
    tally(f"{STOPPED}; stopped in: {part}, ranks: {len(trainings)}", seconds=seconds)
    err = trainings[0].err
    assert "Traceback" not in err
    check_all_valid(run)
    saved, command = newest_valid_step(run) or 0, KINDS[kind]
    if saved and "resume with" in err:
        program, command = printed_command(err)
        assert program == ("python" if len(trainings) == 1 else "torchrun --nproc_per_node=2")
    if len(trainings) > 1:
        faults.server.run_ranks(folder, *command)
    else:
        again = faults.server.start(folder, *command)
        assert again.wait() == 0, again.err
    check_same_result(run, whole, was_stopped=True)


PARTS = ("start", "build_model", "build_state", "create_directory")


@pytest.mark.parametrize("part", range(0, len(PARTS), campaign("CAMPAIGN_APART", 5, 1)))
def test_a_signal_during_the_start_changes_nothing(faults, part):
    """For a new run and a resumed run."""
    folder = faults.folder()
    run, name = folder / "runs" / "run", ("SIGTERM", "SIGINT", "SIGUSR1")[part % 3]
    stopped = interrupt((name, f"clearhead.run.build.{PARTS[part]}", 1, "after"))
    for resumes in (False, True):
        if resumes:
            faults.kill_at(folder, 14, "saved")
        before = contents(run / "checkpoints")
        code = 130 if name == "SIGINT" else 143
        training = faults.run(folder, "short", fault=stopped, code=code)
        assert len(training.err.splitlines()) == 1
        assert contents(run / "checkpoints") == before
        assert run.is_dir() == (resumes or PARTS[part] == "create_directory")
    faults.complete(folder, "short")
    tally(STOPPED, 2)


@pytest.mark.parametrize(
    ("name", "code"), [("SIGKILL", -signal.SIGKILL)] + [("SIGTERM", 143)] * CAMPAIGN
)
def test_a_start_that_is_stopped_leaves_no_files(faults, name, code):
    """Stopped while a small file is written: settings of a new run, log of a resumed run."""
    folder = faults.folder()
    for resumes, call in [(False, 1), (True, 1), (False, 2)]:
        if resumes:
            faults.kill_at(folder, 14, "saved")
        faults.run(
            folder, "short", fault=interrupt((name, "clearhead.files.rename", call)), code=code
        )
    faults.complete(folder, "short")
    if name == "SIGTERM":
        tally(STOPPED, 3)


@pytest.mark.parametrize("number", range(campaign("CAMPAIGN_STOPS", 1, 10)))
def test_a_second_interrupt_ends_immediately_and_loses_nothing(faults, number):
    """It comes while the checkpoint of the first interrupt is written, which is not completed."""
    step, folder = random.Random(number).randrange(1, STEPS - 1), faults.folder()
    run = folder / "runs" / "run"
    each = [
        ("SIGINT", STEP, step + 1),
        ("SIGINT", "clearhead.checkpoint.format.save_file", 1, "held"),
    ]
    training = faults.run(folder, "every step", fault=interrupt(*each), code=130)
    assert "Traceback" not in training.err
    check_all_valid(run)
    assert newest_valid_step(run) != step + 1
    faults.complete(folder, "every step", was_stopped=True)
    tally(STOPPED)


@pytest.mark.parametrize("rank", [0, 1] if CAMPAIGN else [1])
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(faults, rank):
    """Parameters and optimizer state do not change."""
    steps, folder = [4, 7], faults.folder()
    files = [folder / f"watched{each}" for each in range(2)]
    wrong = [{"watch_parameters": {"file": str(file)}} for file in files]
    wrong[rank]["infinite_loss"] = {"steps": steps}
    faults.server.run_ranks(folder, *KINDS["two ranks"], faults=wrong)
    seen = [json.loads(line) for line in files[0].read_text().splitlines()]
    assert [step for step, before, after in seen if before == after] == steps
    assert files[0].read_text() == files[1].read_text()
    tally("NaN", len(steps))


def test_one_process_at_a_time_writes_a_run(faults):
    """The second process is refused and does not affect the first. A killed one has no lock."""
    for ends in ("killed", "finished")[: 1 + CAMPAIGN]:
        folder, proceed = faults.folder(), faults.home / ends
        waiting = {"wait_at": {"step": 8, "file": str(proceed)}}
        (first,) = faults.start(folder, "short", fault=waiting)
        with time_limit():
            while not Path(f"{proceed}.reached").exists():
                assert not first.has_ended(0.01), first.err
        second = faults.run(folder, "short", code=2)
        assert printed_keys(second.err) == ["name"]
        assert str(first.pid) in second.err
        if ends == "killed":
            first.send(signal.SIGKILL)
            assert first.wait() == -signal.SIGKILL
        else:
            proceed.touch()
            assert first.wait() == 0, first.err
        faults.complete(folder, "short")
    tally("locks", 2)
