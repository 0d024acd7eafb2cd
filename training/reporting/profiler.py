"""Where the time of a step goes (trainer.profile=true): a few steps, early in the run.

profile/step.txt        the phases of a step, the parts of its forward pass, the costliest operators
        trace.json.gz   every operator of these steps on a time line, for https://ui.perfetto.dev

The loop names its phases; hooks name the parts of the model. Both end with the last of these steps,
and the run goes on at full speed. Nothing of it changes what is computed.
"""

import contextlib
import gc
import gzip
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.profiler import record_function

from errors import visible
from files import atomic_write, clear, make_folder, rename, sync, temporary_name

if TYPE_CHECKING:
    from torch.profiler import profile

    from train import Trainer

FOLDER, TABLE, TRACE = "profile", "step.txt", "trace.json.gz"
STEPS = 3  # that are looked at
BEFORE = 4  # that warm up: memory, caches, threads, and last the profiler itself
OPERATORS = 20
PHASES = {
    "input": "waiting for input",
    "forward": "forward",
    "backward": "backward",
    "update": "clipping and optimizer",
    "other": "other",
}
PARTS = (  # of forward, in the order in which they come
    "embeddings",
    "norms",
    "attention projections",
    "attention kernel",
    "MLP",
    "dropout and residual sums",
    "loss with its gradient",
    "other",
)
UNDISTURBED = ("step", "")  # a whole step without the profiler
WIDTH = 44  # of an operator's name, and of its shapes


def profiler_of(run: "Trainer") -> "Profiler | NoProfiler":
    """What the loop tells its phases to; the main rank's steps stand for all."""
    steps = run.settings.trainer.max_steps - run.state.step
    if not run.settings.trainer.profile or not run.parallel.is_rank_0 or steps < 1:
        return NoProfiler()
    if steps == 1:
        run.notes.append("trainer.profile: a first step only warms up, and the run has no other")
        return NoProfiler()
    return Profiler(run, steps)


class NoProfiler:
    """Takes everything and does nothing."""

    def step(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def phase(self, name: str) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def input(self, batches: Iterator) -> Iterator:
        return batches


class Profiler:
    """Watches some steps of a run, writes down what it saw, and leaves the run.

    steps: how many the run has. Of a long one the fifth to the seventh are looked at, of a short
    one the last, but never the first.
    """

    def __init__(self, run: "Trainer", steps: int):
        count = min(STEPS, steps - 1)
        self.run = run
        self.last = run.state.step + min(steps, BEFORE + count)
        self.first = self.last - count + 1
        self.begun = run.state.step + 1  # warms up
        self.undisturbed = range(self.begun + 1, self.first - 1)
        self.stopwatch = Stopwatch(run.parallel.device)
        self.torch_profiler: profile | None = None
        self.watching = self.looks_for_garbage = False
        self.hooks = []
        self.names: set[str] = set()  # of what is no operator
        run.opened.callback(self.close)  # of a run that ends before
        if run.compiled and run.parallel.device.type == "cpu":
            with run.never_in_the_way("profile: without the names of kernels"):
                from torch._inductor import config

                config.cpp.enable_kernel_profile = True

    # ------------------------------------------------------------------- what the loop tells it

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around a whole step."""
        number = self.run.state.step + 1
        with self.out_of_the_way():
            self.before(number)
        watched = None
        if self.watching:
            watched = ("other", "")
        elif number in self.undisturbed:
            watched = UNDISTURBED
        if watched:
            self.stopwatch.enter(watched)
        yield
        if watched:
            self.stopwatch.leave()
        if self.run.profiler is self:  # it has not failed
            with self.out_of_the_way():
                self.after(number)

    def phase(self, name: str) -> contextlib.AbstractContextManager:
        """Around a part of a step, one of PHASES."""
        return self.named((name, ""), PHASES[name]) if self.watching else contextlib.nullcontext()

    def input(self, batches: Iterator) -> Iterator:
        """The same batches; the wait for each is a phase."""
        return self.waited_for(batches) if self.watching else batches

    # ------------------------------------------------------------------------- what it does then

    def before(self, number: int) -> None:
        if number == self.first - 1:
            # torch's profiler has much to do when it begins, so its first step is left out.
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it tells stderr of itself
            steps = torch.profiler.schedule(wait=0, warmup=1, active=self.last - number, repeat=1)
            self.torch_profiler = torch.profiler.profile(schedule=steps, record_shapes=True)
            self.torch_profiler.start()
            # Python looks for garbage when many objects have come: here, the profiler's. That takes
            # as long as a small step, and inside of one it would look like a part of it.
            self.looks_for_garbage = gc.isenabled()
            gc.disable()
        if number == self.first and not self.run.compiled:
            self.hook_parts()
        self.watching = number >= self.first

    def after(self, number: int) -> None:
        if number >= self.first - 1:
            self.stopwatch.synchronize()
            self.torch_profiler.step()
        if number == self.last:
            self.unhook()
            self.write(self.torch_profiler)
            self.close()

    @contextlib.contextmanager
    def out_of_the_way(self) -> Iterator[None]:
        """What happens inside is no training time; what fails inside ends the profile only."""
        failed = True
        with self.run.meter.paused(), self.run.never_in_the_way("profile: failed, and is off"):
            yield
            failed = False
        if failed:
            self.close()

    def close(self) -> None:
        """Leaves the run as if there had never been a profiler."""
        self.run.profiler = NoProfiler()
        self.watching = False
        self.unhook()
        if self.looks_for_garbage:
            gc.enable()
        torch_profiler, self.torch_profiler = self.torch_profiler, None
        if torch_profiler:
            with contextlib.suppress(Exception):  # it may never have started
                torch_profiler.stop()

    @contextlib.contextmanager
    def named(self, owner: tuple[str, str], name: str) -> Iterator[None]:
        """Around what has a name, on the stopwatch and in the trace."""
        self.names.add(name)
        self.stopwatch.enter(owner)
        try:
            with record_function(name):
                yield
        finally:
            self.stopwatch.leave()

    def waited_for(self, batches: Iterator) -> Iterator:
        while True:
            with self.phase("input"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    # ---------------------------------------------------------------------- the parts of a model

    def hook_parts(self) -> None:
        """Hooks before and after each module that is a part of its own."""
        model = self.run.model
        self.hook(model, "model", "embeddings")  # until its first block, which is another part
        for number, block in enumerate(model.blocks):
            name = f"blocks.{number}"
            self.hook(block, name, "dropout and residual sums")
            self.hook(block.attn_norm, f"{name}.attn_norm", "norms")
            self.hook(block.attn, f"{name}.attn", "attention kernel")  # but for its matrices
            for matrix in ("W_query", "W_key", "W_value", "out_proj"):
                module = getattr(block.attn, matrix)
                self.hook(module, f"{name}.attn.{matrix}", "attention projections")
            self.hook(block.mlp_norm, f"{name}.mlp_norm", "norms")
            self.hook(block.mlp, f"{name}.mlp", "MLP")
        self.hook(model.final_norm, "final_norm", "norms", then="loss with its gradient")

    def hook(self, module: torch.nn.Module, name: str, part: str, then: str | None = None) -> None:
        """then: the part that the module around it is from there on."""
        open_ranges = []

        def before(*_) -> None:
            # Not when backward computes a block again.
            if self.stopwatch.owner()[0] == "forward":
                self.names.add(name)
                open_ranges.append(record_function(name))
                open_ranges[-1].__enter__()
                self.stopwatch.enter(("forward", part))

        def after(*_) -> None:
            if open_ranges:
                self.stopwatch.leave(("forward", then) if then else None)
                open_ranges.pop().__exit__(None, None, None)

        self.hooks += [
            module.register_forward_pre_hook(before),
            module.register_forward_hook(after),
        ]

    def unhook(self) -> None:
        while self.hooks:
            self.hooks.pop().remove()

    # ------------------------------------------------------------------------------ what it tells

    def write(self, torch_profiler: "profile") -> None:
        """Both files, and the table's beginning on the console."""
        run, folder = self.run, self.run.folder / FOLDER
        milliseconds = {owner: 1000 * s for owner, s in self.stopwatch.seconds().items()}
        plain = milliseconds.pop(UNDISTURBED, None)
        count = self.last - self.first + 1
        steps = {owner: total / count for owner, total in milliseconds.items()}
        head = [self.title(), self.speed(sum(steps.values()), plain)]
        phases = phase_lines(steps)
        parts = part_lines(steps) if not run.compiled else [COMPILED]
        shares = self.operators(torch_profiler)
        lines = [*head, "", *phases, "", *parts, "", *operator_lines(shares, count, steps)]
        make_folder(folder)
        clear(folder)
        atomic_write(folder / TABLE, ("\n".join(lines) + "\n").encode())
        write_trace(torch_profiler, folder / TRACE)
        for line in [*head[1:], *phases[1:], *costliest_parts(steps)]:
            run.console.print(line)
        run.console.print(f"more of it in {folder / TABLE}; the trace is for ui.perfetto.dev")

    def operators(self, torch_profiler: "profile") -> list[tuple[str, str, int, float]]:
        """(name, shapes, calls, milliseconds) of each, the costliest first: its own time, without
        that of others that it calls. On a GPU the device's; compiled, that of its kernels."""
        on_gpu = self.run.parallel.device.type == "cuda"
        clock = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        place = "CUDA" if on_gpu and self.run.compiled else "CPU"
        found = []
        for event in torch_profiler.key_averages(group_by_input_shape=True):
            ours = event.key in self.names or event.key.startswith("ProfilerStep")
            ours |= on_gpu and event.is_user_annotation  # which has the time of what is inside
            if event.device_type.name == place and not ours and (spent := getattr(event, clock)):
                given = (str(shape).replace(" ", "") for shape in event.input_shapes if shape)
                found.append((event.key, " ".join(given), event.count, spent / 1000))
        return sorted(found, key=lambda operator: -operator[-1])

    def title(self) -> str:
        """What was computed, and on what."""
        run, settings = self.run, self.run.settings
        where = f"{run.parallel.describe()}{', compiled' if run.compiled else ''}"
        size = f"{settings.trainer.batch_size} windows of {settings.data.max_length} tokens"
        micro = f"{run.micro_batch_size} at once"
        return f"{run.model.num_parameters():,} parameters {where}; {size} a step, {micro}"

    def speed(self, step: float, plain: float | None) -> str:
        """How long a step took, with the profiler and without."""
        one = self.first == self.last
        which = f"step {self.last}" if one else f"steps {self.first} to {self.last}"
        line = f"profile of {which}: {step:.1f} ms a step"
        if plain is not None:
            line += f"; {plain / len(self.undisturbed):.1f} ms before, without the profiler"
        return line


class Stopwatch:
    """Shares time out: at each moment it belongs to whoever entered last and has not left.

    On a GPU it is the device's own time: a mark is an event in its queue, which it notes when it
    gets there, so that nobody has to wait.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.inside: list[tuple[str, str]] = []
        self.marks: list[tuple[tuple[str, str], object]] = []  # (whose time it is, from when on)

    def owner(self) -> tuple[str, str]:
        return self.inside[-1] if self.inside else ("", "")

    def enter(self, owner: tuple[str, str]) -> None:
        self.inside.append(owner)
        self.mark()

    def leave(self, then: tuple[str, str] | None = None) -> None:
        """then: who takes over from the one who has entered before."""
        self.inside.pop()
        if then:
            self.inside[-1] = then
        self.mark()

    def mark(self) -> None:
        if self.device.type == "cuda":
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            if self.device.type == "mps":
                torch.mps.synchronize()
            now = time.perf_counter()
        self.marks.append((self.owner(), now))

    def synchronize(self) -> None:
        """Waits for the device; unlike Parallel.synchronize for no other rank."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self) -> Counter[tuple[str, str]]:
        """Each one's time. The device has to be done with it."""
        found = Counter()
        for (owner, start), (_, end) in zip(self.marks, self.marks[1:], strict=False):
            if owner != ("", ""):
                on_gpu = self.device.type == "cuda"
                found[owner] += start.elapsed_time(end) / 1000 if on_gpu else end - start
        return found


# ----------------------------------------------------------------------------------- the tables

COMPILED = "The model is compiled: what its parts have become, the operators' names tell."


def row(name: str, milliseconds: float, whole: float) -> str:
    return f"  {name:<26} {milliseconds:>10.2f} ms {milliseconds / whole:>7.1%}"


def phase_lines(steps: dict[tuple[str, str], float]) -> list[str]:
    """steps: each owner's milliseconds of a step."""
    whole, of_phase = sum(steps.values()), Counter()
    for (phase, _), milliseconds in steps.items():
        of_phase[phase] += milliseconds
    return ["A step", *(row(PHASES[name], of_phase[name], whole) for name in PHASES)]


def part_lines(steps: dict[tuple[str, str], float]) -> list[str]:
    whole = sum(steps.values())
    found = {part: steps.get(("forward", part), 0.0) for part in PARTS}
    found["other"] += steps.get(("forward", ""), 0.0)
    lines = [row(part, milliseconds, whole) for part, milliseconds in found.items()]
    return ["Its forward pass, by the parts of the model", *lines]


def costliest_parts(steps: dict[tuple[str, str], float], most: int = 3) -> list[str]:
    """In one line; none where the parts are not known."""
    of_forward = {part: ms for (phase, part), ms in steps.items() if phase == "forward" and part}
    parts = sorted(of_forward, key=of_forward.get, reverse=True)[:most]
    words = (f"{part} {of_forward[part] / sum(steps.values()):.1%}" for part in parts)
    return [f"  most of forward, as shares of the step: {', '.join(words)}"] if parts else []


def operator_lines(found: list[tuple], count: int, steps: dict) -> list[str]:
    """found: as `operators` tells, of `count` steps."""
    whole = sum(steps.values())
    lines = [
        f"The {min(OPERATORS, len(found))} costliest operators, each without those that it calls",
        f"  {'':<{WIDTH}} {'calls':>6} {'ms':>10} {'':>7}  shapes of what goes in",
    ]
    for name, shapes, calls, milliseconds in found[:OPERATORS]:
        each = milliseconds / count
        lines.append(
            f"  {cut(visible(name, keep='')):<{WIDTH}} {calls / count:>6.0f} {each:>10.2f} "
            f"{each / whole:>7.1%}  {cut(shapes)}".rstrip()
        )
    return lines


def cut(text: str) -> str:
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."


def write_trace(torch_profiler: "profile", path: Path) -> None:
    plain, packed = temporary_name(path.with_suffix("")), temporary_name(path)
    try:
        torch_profiler.export_chrome_trace(str(plain))
        with open(plain, "rb") as source, gzip.open(packed, "wb", compresslevel=5) as target:
            shutil.copyfileobj(source, target)
        sync(packed)
        rename(packed, path)
    finally:
        plain.unlink(missing_ok=True)
        packed.unlink(missing_ok=True)
