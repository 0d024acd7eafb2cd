"""A run on Weights & Biases, and all that may go wrong with it. The only file that knows wandb.

Whatever becomes of W&B, the run goes on; a line on stderr tells. W&B works in a network, and in a
process of its own, which may be gone or stand still. So each call has a time to come back in, and
the run waits no longer: START_SECONDS for the server at the start, FINISH_SECONDS at the end
(MODEL_SECONDS where a model is uploaded), and ANSWER_SECONDS more where W&B's own process stands
still, which it does once, since it is then ended. What is where on the dashboard: docs/wandb.md.
"""

import contextlib
import json
import logging
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from training.reporting.report import sample_page
from training.reporting.timeout import NoAnswer, within

if TYPE_CHECKING:
    from lens import Snapshot

FILES_AT_MOST = 950  # of one run on W&B, which becomes slow beyond a thousand
MOST_SAMPLES = 40  # of them; the lens keeps to 900 and a few
START_SECONDS = 20  # for the server to answer; the run is recorded offline after that
ANSWER_SECONDS = 30  # for W&B's own process to start, or to answer; it is left out after that
FINISH_SECONDS = 60  # for the last uploads; WANDB_FINISH_TIMEOUT=600 gives a slow line longer
MODEL_SECONDS = 600  # the same when a model is among them: GPT-2 small has 0.5 GB
END_SECONDS = 5  # for W&B's own process to end, before it is made to
ALERT_SECONDS = 3600  # between two alerts of the same title
# The parts of W&B's own process that carry data, as its log names them.
CARRIERS = ("filestream:", "runfiles:", "runupserter:", "writer:", "fileTransfer:", "sender:")
MODES = ("auto", "online", "offline", "disabled")
LENGTHS = {"project": 128, "name": 128, "group": 128, "job_type": 64}  # characters W&B takes
TAG_LENGTH = 64
ON_DISK = "metrics are in metrics.jsonl"


@dataclass
class WandbConfig:
    """The run as Weights & Biases shows it."""

    mode: str = "auto"  # auto (online with an API key, else offline) | online | offline | disabled
    entity: str | None = None  # the team or user whose project it is; null: the key's own
    project: str = "clearhead"
    name: str | None = None  # null: the run's name
    group: str | None = None
    job_type: str = "train"
    tags: list[str] = field(default_factory=list)
    notes: str | None = None
    log_model: str | bool = False  # false | best | last: the model that is uploaded at the end
    alerts: bool = False  # true: a message when the loss diverges, or the run fails

    def problems(self) -> list[tuple[str, object, str, str]]:
        """The problems, as (key, value, reason, hint); empty when there are none."""
        found = []
        if self.mode not in MODES:
            found.append(("mode", self.mode, "no such mode", f"use one of {', '.join(MODES)}"))
        if not self.project:
            found.append(("project", self.project, "needs a name", "use wandb.project=clearhead"))
        elif bad := sorted(set(self.project) & set("/\\#?%:")):
            cause = f"W&B takes no {' '.join(bad)} in it"
            fix = "a team is named with wandb.entity=TEAM" if bad == ["/"] else "use - or _"
            found.append(("project", self.project, cause, fix))
        for key, most in LENGTHS.items():
            if len(getattr(self, key) or "") > most:
                cause = f"is longer than the {most} characters that W&B takes"
                fix = "say more in wandb.notes" if key != "project" else "use a shorter one"
                found.append((key, getattr(self, key), cause, fix))
        for tag in self.tags:
            if not tag.strip():
                found.append(("tags", repr(tag), "an empty tag", "use tags such as [a,b]"))
            elif len(tag) > TAG_LENGTH:
                cause = f"W&B takes tags of at most {TAG_LENGTH} characters"
                found.append(("tags", tag, cause, "say more in wandb.notes"))
        if self.log_model not in (False, "best", "last"):
            fix = "use best, last, or false for none"
            found.append(("log_model", self.log_model, "no such choice", fix))
        return found

    def wanted(self) -> str:
        """The mode; where it is left open, what the environment says."""
        return os.environ.get("WANDB_MODE", "auto") if self.mode == "auto" else self.mode

    def ignored(self) -> list[str]:
        """In words, what is asked for and will not be done, as W&B is off."""
        if self.wanted() != "disabled":
            return []
        asked = {"log_model": self.log_model, "alerts": self.alerts}
        return [
            f"wandb.{key}={str(value).lower()}: without effect, as W&B is off"
            for key, value in asked.items()
            if value
        ]


class WandbRun:
    """A run on W&B, or nothing that takes the same calls. None of them fails, or waits for ever.

    settings: the whole resolved configuration as plain values, shown on the dashboard.
    run_id: the id of the run to continue, or None for a new one. files: that it has already.
    """

    def __init__(
        self,
        config: WandbConfig,
        folder: Path,
        settings: dict,
        run_id: str | None = None,
        files: int = 0,
    ):
        self.alerts = config.alerts
        self.files_left = FILES_AT_MOST - files
        trainer = settings.get("trainer", {})
        self.last_step = trainer.get("max_steps")
        self.sample_every = _sample_every(self.last_step or 0, trainer.get("eval_every") or 0)
        self.finish_timeout = _finish_timeout(config)
        self.put_model = ""  # the command that uploads the model of an online run once more
        self.run = _start(config, folder, settings, run_id)
        # Hidden: a thousand curves would bury the others. A panel of one's own can show any.
        self._do(lambda run: run.define_metric("attention_heads/*", hidden=True))

    @property
    def id(self) -> str | None:
        """The run's id; None when W&B is off."""
        return self.run.id if self.run else None

    def where(self) -> str | None:
        """What to open or do to see the dashboard."""
        if self.run is None:
            return None
        if self.run.offline:
            folder = shlex.quote(str(_recorded_in(self.run).parent))
            return f"offline; to upload it: wandb sync {folder}/offline-run-*"
        return self.run.url

    def log(
        self,
        metrics: dict[str, float],
        step: int,
        snapshot: "Snapshot | None" = None,
        sample: dict | None = None,
    ) -> None:
        """A row. Once for each step, in order: W&B drops one that comes later for an earlier."""
        if self.run is not None:
            media = self._media(step, snapshot, sample)
            self._do(lambda run: run.log(metrics | media, step=step))

    def _media(
        self, step: int, snapshot: "Snapshot | None", sample: dict | None
    ) -> dict[str, object]:
        """An attention snapshot and a sample in W&B's types. What cannot be converted is skipped
        with a message; it is on disk anyway."""
        import wandb

        media, pictures, pages, tables, histograms = {}, {}, {}, {}, {}
        if snapshot:
            media, histograms = dict(snapshot.heads), snapshot.histograms
            pictures, pages, tables = snapshot.pictures, snapshot.pages, snapshot.tables
        if len(pictures) + len(pages) > self.files_left:
            # A run made longer and longer: the time-lapse has what matters, and comes rarely.
            pictures = {}
            pages = {key: path for key, path in pages.items() if key == "attention/timelapse"}
        self.files_left -= len(pictures) + len(pages)
        try:
            media |= {key: wandb.Image(str(path)) for key, path in pictures.items()}
            # inject=False: by default W&B would add a stylesheet from its server to the page.
            media |= {key: wandb.Html(str(path), inject=False) for key, path in pages.items()}
            for key, (columns, rows) in tables.items():
                media[key] = wandb.Table(columns=list(columns), data=[list(row) for row in rows])
            if sample and self.files_left > 0 and self._shows_sample(step):
                self.files_left -= 1
                page = sample_page(sample)
                media["samples/text"] = wandb.Html(page, inject=False, data_is_not_path=True)
            # The last ones: of a head whose statistics are nan there is none.
            media |= {key: wandb.Histogram(values) for key, values in histograms.items()}
        except Exception as error:
            print(f"W&B: a picture or page was left out ({_one_line(error)})", file=sys.stderr)
        return media

    def _shows_sample(self, step: int) -> bool:
        """Whether this one is among the few of a long run that are shown, as the last one is."""
        return step % self.sample_every == 0 or step == self.last_step

    def summary(self, values: dict[str, float]) -> None:
        """What the run came to, shown in the dashboard's table of runs."""
        self._do(lambda run: run.summary.update(values))

    def alert(self, title: str, text: str, level: str) -> None:
        """A message to whoever wants them of W&B (WARN or ERROR), where alerts are wished."""
        if self.alerts:
            self._do(lambda run: run.alert(title, text, level, wait_duration=ALERT_SECONDS))

    def log_model(self, files: list[Path], aliases: list[str], facts: dict) -> str | None:
        """A version of the run's model, uploaded while the run ends; its name, None without one.

        The parameters are uploaded from where they are and must stay there until then: a copy would
        be another 0.5 GB of GPT-2 small, in the user's home. Of the small files W&B makes one.
        """
        if (run := self.run) is None:
            return None
        import wandb

        name = f"model-{run.id}"
        if not run.offline:
            place = f"{run.entity}/{run.project}/{name}"
            folder = shlex.quote(str(files[0].parent))
            self.put_model = f"wandb artifact put --type model --name {place} {folder}"
        try:
            artifact = wandb.Artifact(name, type="model", metadata=facts)
            for file in files:
                # skip_cache: else W&B would keep another copy of what it has uploaded.
                policy = "immutable" if file.suffix == ".safetensors" else "mutable"
                artifact.add_file(str(file.resolve()), policy=policy, skip_cache=True)
            within(ANSWER_SECONDS, lambda: run.log_artifact(artifact, aliases=aliases))
        except NoAnswer as error:  # of the server; until that comes, W&B would not end either
            self.run = None
            self._left_out(NotRecorded(str(error)), run)
            _end_service(END_SECONDS)
            return None
        except Exception as error:
            cause, by_hand = _one_line(error), self._by_hand()
            print(f"W&B: the model was not uploaded ({cause}){by_hand}", file=sys.stderr)
            self.put_model = ""
            return None
        return name

    def finish(self, exit_code: int = 0) -> None:
        """Ends the run; W&B marks it as failed when the code is not 0."""
        run = self.run
        self._do(lambda run: run.finish(exit_code=exit_code), seconds=self._finish_seconds())
        if self.run is not None:  # else its end was seen to when it was left out
            _end_service(END_SECONDS)
            if found := _first_error(run):
                self._left_out(NotRecorded(found), run)
        self.run = None

    def _finish_seconds(self) -> float:
        """How long finish() may take: the uploads, of which an offline run has none, and an
        answer."""
        offline = self.run is None or self.run.offline
        return ANSWER_SECONDS + (0 if offline else self.finish_timeout)

    def _do(self, action: Callable, seconds: float | None = None) -> None:
        """Does something with the W&B run; when it fails, says so once and goes on without."""
        run = self.run
        if run is None:
            return
        try:
            within(seconds or ANSWER_SECONDS, lambda: action(run))
        except Exception as error:
            self.run = None
            self._left_out(_cause(error), run)
            _end_service(0 if isinstance(error, NoAnswer) else END_SECONDS)
        except BaseException:  # a second Ctrl-C: nothing of W&B may wait at exit
            self.run = None
            _end_service(0)
            raise

    def _left_out(self, error: Exception, run) -> None:
        """The one line about it, with what to do when the run is on disk."""
        cause = _one_line(error)
        if isinstance(error, TimeoutError):
            cause = f"the server did not take it within {self.finish_timeout:g} s"
        if isinstance(error, NotRecorded | TimeoutError) and not run.offline:
            folder = shlex.quote(str(_recorded_in(run)))
            later = f"wandb sync --include-online {folder}{self._by_hand()}"
            what = f"not all was uploaded ({cause}); to do it later: {later}"
        elif isinstance(error, NotRecorded):
            what = f"its record has gaps, {ON_DISK} ({cause})"
        else:
            what = f"left out, {ON_DISK} ({cause}){self._by_hand()}"
        print(f"W&B: {what}", file=sys.stderr)

    def _by_hand(self) -> str:
        """How to upload the model, where it has not gone up and wandb sync would not do it."""
        return f"; the model by hand: {self.put_model}" if self.put_model else ""


def _sample_every(last_step: int, eval_every: int) -> int:
    """Steps between samples that are shown: of a long run not every validation's is."""
    return max(1, eval_every * math.ceil(last_step / max(1, eval_every) / MOST_SAMPLES))


def _start(config: WandbConfig, folder: Path, settings: dict, run_id: str | None):
    """The W&B run, or None. What goes wrong there is a line on stderr, never a lost run."""
    if (mode := config.wanted()) == "disabled":
        return None
    # Else W&B reports on itself to its makers, for offline runs too, and is waited for at exit.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ["WANDB_SILENT"] = "true"  # what is to be said is said here
    logging.raiseExceptions = False  # else each line of its log is a traceback on a full disk
    try:
        import wandb

        options = {
            "entity": config.entity,
            "project": config.project,
            "name": config.name or folder.name,
            "group": config.group,
            "job_type": config.job_type,
            "tags": config.tags,
            "notes": config.notes,
            "dir": str(folder),
            "config": settings,
            "id": run_id,
            "resume": "allow" if run_id else None,
            "settings": wandb.Settings(
                console="off",
                x_service_wait=ANSWER_SECONDS,
                disable_git=True,
                save_code=False,
                init_timeout=START_SECONDS,
                finish_timeout=_finish_timeout(config),
                finish_timeout_raises=True,
            ),
        }

        def start(mode: str, seconds: float):
            with _on_its_own():
                return within(seconds, lambda: wandb.init(mode=mode, **options))

        if mode != "offline":
            try:
                if wandb.login(prompt=False, verify=False):
                    return start("online", START_SECONDS + 2 * ANSWER_SECONDS)
                print(
                    "W&B: no API key found, so this run is recorded offline "
                    "(wandb login, then wandb sync; wandb=off for none)",
                    file=sys.stderr,
                )
            except NoAnswer:
                raise
            except Exception as error:
                cause = _one_line(error)
                print(f"W&B: not reached ({cause}); recorded offline instead", file=sys.stderr)
        return start("offline", 2 * ANSWER_SECONDS)
    except Exception as error:
        print(f"W&B: left out, {ON_DISK} ({_one_line(error)})", file=sys.stderr)
        _end_service(0 if isinstance(error, NoAnswer) else END_SECONDS)
        return None
    except BaseException:
        _end_service(0)
        raise


class NotRecorded(Exception):
    """W&B has not kept everything that it was given."""


def _finish_timeout(config: WandbConfig) -> float:
    """For how long W&B tries to upload the rest at the end, in seconds."""
    try:
        return float(os.environ["WANDB_FINISH_TIMEOUT"])
    except (KeyError, ValueError):
        return MODEL_SECONDS if config.log_model else FINISH_SECONDS


def _end_service(seconds: float) -> None:
    """Ends W&B's own process, which has so many seconds for it, and then none: without this it
    is waited for when Python exits, however long that takes."""
    if "wandb" not in sys.modules:
        return
    import wandb

    service = _service()
    if service and not seconds:
        service.kill()
    with contextlib.suppress(Exception):
        within(seconds or END_SECONDS, wandb.teardown)
    if service:
        service.kill()
        service.wait()


def _service() -> subprocess.Popen | None:
    """W&B's own process. The library has no name for it that is made for others."""
    from wandb.sdk import wandb_setup

    found = wandb_setup._singleton
    for name in ("_connection", "_proc", "_process"):
        found = getattr(found, name, None)
    return found


@contextlib.contextmanager
def _on_its_own():
    """A process that is started meanwhile has neither stdout nor stderr of ours: W&B's would show
    traces of its stack, and hold the pipe to `tee` open if it outlived us."""
    sys.stdout.flush()
    sys.stderr.flush()
    ours, nowhere = {number: os.dup(number) for number in (1, 2)}, os.open(os.devnull, os.O_WRONLY)
    try:
        for number in ours:
            os.dup2(nowhere, number)
        yield
    finally:
        for number, was in ours.items():
            os.dup2(was, number)
            os.close(was)
        os.close(nowhere)


def _recorded_in(run) -> Path:
    """The folder of a W&B run: below the run's own, or a temporary one if that failed."""
    return Path(run.dir).parent


def _first_error(run) -> str | None:
    """What went wrong in W&B's own process, by its log: it gives up on a server that refuses and
    on a disk that is full, and says nothing of it to anyone."""
    try:
        lines = (_recorded_in(run) / "logs" / "debug-internal.log").read_bytes().splitlines()
    except OSError as error:
        return str(error)
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            return "its log breaks off"
        level, message, task, cause = (
            str(entry.get(key, "")) if isinstance(entry, dict) else ""
            for key in ("level", "msg", "task", "error")
        )
        lost = message.startswith(CARRIERS) or "UploadTask" in task
        if level.startswith("ERROR") and lost:
            return f"{message} {cause}"
    return None


def _cause(error: Exception) -> Exception:
    """The error, or what is behind it when W&B's own process is gone."""
    service = _service()
    if service and not isinstance(error, NoAnswer | TimeoutError):
        with contextlib.suppress(subprocess.TimeoutExpired):  # its connection ends before it does
            return RuntimeError(f"its process ended with code {service.wait(1)}")
    return error


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())[:300] or type(error).__name__
    return text.partition(" Consider increasing the init_timeout")[0]
