"""Finds the rows that W&B lost when a run was killed, and reads them from the run directory.

W&B writes its record, and sends rows to the server, every 15 seconds. A killed process loses the
rows after that. In the run directory they are complete.
"""

import contextlib
import glob
import io
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from clearhead.files import read_rows

if TYPE_CHECKING:
    from clearhead.lens.snapshots import Snapshot

# In the run directory: the ids of W&B runs that have not ended, because the process was killed.
UNFINISHED = ".wandb_unfinished"
BLOCK, HEADER = 2**15, 7  # bytes
NON_FINITE = ("nan", "inf", "-inf")  # in metrics.jsonl


def first_missing_step(wandb: ModuleType, run, folder: Path) -> int | None:
    """Returns the step after the last one that W&B has, on the server or in offline records, and
    repairs what earlier processes of this run directory have left. None without such a record.

    It is the first step to log: W&B would drop rows of earlier steps, and `wandb sync` would give
    them, and all rows after them, other steps.
    """
    unfinished, own = folder / UNFINISHED, Path(run.dir).parent
    lines = unfinished.read_text(encoding="utf-8").splitlines() if unfinished.exists() else []
    killed = {line for line in lines if re.fullmatch(r"[\w.-]+", line)}
    unfinished.write_text("\n".join(killed | {run.id}), encoding="utf-8")
    last_steps = []
    for each in killed | {run.id}:
        for record in own.parent.glob(f"*run-*/run-{glob.escape(each)}.wandb"):
            if record.parent != own:
                step = repair(record, wandb.proto.wandb_internal_pb2.Record)
                last_steps += [step] if each == run.id else []
                if each == run.id in killed and not run.offline:
                    upload_again(run, record)
    if not run.offline:
        return run.starting_step
    return max(last_steps) + 1 if last_steps else None


def repair(file: Path, record_type: type) -> int:
    """Removes an incomplete entry from the end of a record; without a complete one of the run,
    renames the directory. `wandb sync` would stop there. Returns the last step, -1 without rows."""
    step, end, has_run = -1, 0, False
    with contextlib.suppress(Exception):  # a damaged entry
        for entry, position in entries(file.read_bytes()):
            record = record_type.FromString(entry)
            end, has_run = position, has_run or record.HasField("run")
            step = record.history.step.num if record.HasField("history") else step
    if has_run:
        os.truncate(file, end)
    else:
        file.parent.rename(file.parent.with_name(file.parent.name.replace("run-", "damaged-")))
    return step


def upload_again(run, record: Path) -> None:
    """Uploads the media files of an earlier process, because a kill may have stopped their upload.
    The server has the same content under these names, or nothing."""
    files = record.parent / "files"
    with contextlib.redirect_stderr(io.StringIO()):  # W&B prints a line for each file
        for file in (files / "media").rglob("*"):
            if file.is_file() and not file.is_symlink():
                run.save(str(file), base_path=str(files), policy="now", glob=False)


def rows_on_disk(
    folder: Path, first: int, last: int
) -> Iterator[tuple[int, dict, "Snapshot", dict | None]]:
    """Yields step, metrics, attention snapshot and sample of each row in a run directory from step
    `first`, without values of single heads. last: the last step of the run, the only one whose
    time-lapse is on disk."""
    from clearhead.lens.snapshots import Snapshot  # imports torch

    samples = {row["step"]: row for row in read_rows(folder / "samples.jsonl")}
    for row in read_rows(folder / "metrics.jsonl"):
        if (step := row.pop("step")) < first:
            continue
        metrics, snapshot = {}, Snapshot({}, {}, {})
        names = (f"step_{step:08d}", "timelapse")[: 1 + (step == last)]
        for key, value in row.items():
            file = folder / "attention" / Path(str(value)).name
            if not isinstance(value, str) or value in NON_FINITE:
                metrics[key] = float(value) if isinstance(value, str) else value
            elif file.name.startswith(names) and not file.is_symlink():
                kind = snapshot.pages if file.suffix == ".html" else snapshot.images
                kind[key] = file
        yield step, metrics, snapshot, samples.get(step)


def entries(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Yields each complete entry of a .wandb file and the position of its end.

    After a header, the format is that of LevelDB's logs: an entry is one or more chunks, none of
    which crosses a block; a chunk has a checksum, its length, its type and its content.
    https://github.com/google/leveldb/blob/main/doc/log_format.md
    """
    position, entry, last = HEADER, b"", (1, 4)  # types of an entry's last chunk
    while position + HEADER <= len(data):
        if BLOCK - position % BLOCK < HEADER:  # padding
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += HEADER + length
        if position > len(data) or not 1 <= kind <= 4:
            return
        entry += data[position - length : position]
        if kind in last:
            yield entry, position
            entry = b""
