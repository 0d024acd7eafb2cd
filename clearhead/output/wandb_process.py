"""The W&B process: starting and ending a W&B run, and calls with a timeout, which may never return.

An error of W&B is a line on stderr. It never ends the training.
"""

import contextlib
import glob
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from types import ModuleType

from clearhead.config.application import is_in_sweep
from clearhead.config.schema import WandbConfig
from clearhead.errors import sanitize
from clearhead.files import REPOSITORY
from clearhead.output.console import in_thread
from headlens import define_wandb_metrics

START_SECONDS = 20  # for the server to answer; after that the run is recorded offline
CALL_SECONDS = 30  # for the W&B process to answer
FINISH_SECONDS = 60  # for the last uploads; WANDB_FINISH_TIMEOUT overrides it
FLUSH_SECONDS = 0.1  # between two writes to the record of a W&B run
MODEL_SECONDS = 600  # for the upload of the model, 0.5 GB for GPT-2 small
TEARDOWN_SECONDS = 5  # for the W&B process to end
X_AXIS = "train/tokens"  # of all curves, so that runs with other batch sizes can be compared
OF_WANDB_INIT = ("entity", "project", "group", "tags")


def define_metrics(run) -> None:
    """Defines how the dashboard and the summary show the metrics."""
    run.define_metric(X_AXIS)  # every row has it
    for section in ("train", "val"):
        run.define_metric(f"{section}/*", step_metric=X_AXIS)
    define_wandb_metrics(run, X_AXIS)
    for key in ("val/loss", "val/perplexity", "val/bits_per_byte"):
        run.define_metric(key, step_metric=X_AXIS, summary="min,last")
    run.define_metric("val/accuracy", step_metric=X_AXIS, summary="max,last")


def start_run(
    wandb: ModuleType,
    config: WandbConfig,
    folder: Path,
    settings: dict,
    run_id: str | None,
    is_shared: bool,
):
    """Starts the W&B run, offline if there is no API key or the server does not answer.

    is_shared: whether the user has another run open in this process, in a notebook. It is not
    changed: wandb.setup would change the settings of its session, and teardown would end it.
    """
    if is_in_sweep():  # its jobs are several runs
        os.environ.pop("WANDB_RUN_ID", None)
        os.environ.pop("WANDB_NAME", None)
    wandb_settings = wandb.Settings(
        reinit="create_new",
        console=os.environ.get("WANDB_CONSOLE") or "off",  # pyrefly: ignore
        quiet=True,
        show_info=False,
        git_root=str(REPOSITORY),
        init_timeout=START_SECONDS,
        finish_timeout=float(os.environ.get("WANDB_FINISH_TIMEOUT") or FINISH_SECONDS),
        finish_timeout_raises=True,
        # Images and pages as hard links to those of the run directory. A symbolic link would upload
        # a page that was written again since, or nothing if the run directory was cleaned up.
        allow_media_symlink=True,
        symlink=False,
        # A private setting. By default, a killed offline run loses the last 15 seconds.
        x_transaction_log_flush_interval=FLUSH_SECONDS,
    )
    if not is_shared:
        wandb.setup(wandb_settings)

    options = {key: getattr(config, key) for key in OF_WANDB_INIT}
    options |= {"name": os.environ.get("WANDB_NAME") or folder.name, "config": settings}
    # Without an id, W&B uses WANDB_RUN_ID, or a new one.
    options |= {"dir": str(folder), "id": run_id, "resume": "allow", "settings": wandb_settings}
    if config.mode != "offline":
        try:
            if wandb.login(prompt=False, verify=False):
                return wandb.init(mode="online", **options)
            say(
                "no API key found; this run is recorded offline. Log in with 'wandb login', "
                "or set wandb=off to disable W&B"
            )
        except Exception as error:
            say(f"the run could not start online ({cause(error)}); it is recorded offline")
            if not is_shared:
                teardown()  # after some server errors the W&B process ends
                wandb.setup(wandb_settings)
    return wandb.init(mode="offline", **options)


def next_step(run) -> int:
    """Returns the step after the last one that W&B has of a resumed run: on the server or, if it is
    offline, in the records of earlier processes of this run directory."""
    if not run.offline:
        return run.starting_step
    own = Path(run.dir).parent
    records = own.parent.glob(f"*run-*-{glob.escape(run.id)}")  # run-DATE-ID, offline-run-DATE-ID
    by_date = sorted(records, key=lambda path: path.name.removeprefix("offline-"), reverse=True)
    for record in by_date:
        if record != own:
            command = [sys.executable, "-m", "wandb", "leet", "inspect", "--summary", "--json"]
            done = subprocess.run([*command, str(record)], capture_output=True, check=True)
            if (step := json.loads(done.stdout)["step"]) is not None:
                return step + 1
    return 0


def teardown() -> None:
    """Ends the W&B process. Otherwise Python waits for it at exit without a timeout."""
    with contextlib.suppress(Exception):
        import wandb

        call_with_timeout(TEARDOWN_SECONDS, wandb.teardown)


def call_with_timeout(seconds: float, function: Callable):
    """Returns function(). Raises TimeoutError if it takes longer than `seconds`, and RuntimeError
    for its errors."""
    future = in_thread(function)
    if not wait([future], seconds).done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    if error := future.exception():
        raise RuntimeError(cause(error)) from error
    return future.result()


def cause(error: BaseException) -> str:
    """Returns the first line of a message; further lines are advice about W&B's settings."""
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__


def say(text: str) -> None:
    print(sanitize(f"W&B: {text}"), file=sys.stderr)
