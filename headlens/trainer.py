"""LensCallback: attention snapshots of a training with transformers' Trainer.

    Trainer(..., processing_class=tokenizer, callbacks=[LensCallback(text=validation_text)])

Only this module needs transformers, 5.5 or newer.
"""

import functools
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerState

from .config import LensConfig
from .dashboard import define_wandb_metrics, wandb_values
from .lens import Lens, Snapshot
from .page import trainer_curves

MAX_CONTEXT = 1024  # tokens; the weights of all heads grow with its square


class LensCallback(TrainerCallback):
    """Takes snapshots before the first step, at each interval and after the last step.

    tokenizer: of the model; None: the processing_class of the Trainer. config: settings of the
    lens. on_snapshot(snapshot, step): logs a snapshot; by default it is logged to W&B if report_to
    contains it. options: those of Lens, such as text and vocabulary. Without them the folder is
    attention in output_dir, the run name that of the arguments, and context_length that of the
    model, at most 1,024.

    The main process takes the snapshots, and the training is the same as without. An error of the
    first snapshot ends the training before its first step; a later one is a line on stderr. Raises
    TypeError for an option that Lens does not have, and, when training begins, ValueError with
    FSDP, DeepSpeed ZeRO-3 and tensor parallelism, where the main process does not have the weights.
    """

    def __init__(
        self,
        tokenizer: Any = None,
        config: LensConfig | None = None,
        on_snapshot: Callable[[Snapshot, int], None] | None = None,
        **options: Any,
    ):
        self.tokenizer, self.config = tokenizer, config or LensConfig()
        inspect.signature(Lens).bind_partial(tokenizer, self.config, **options)
        self.on_snapshot, self.options = on_snapshot, options
        self.lens: Lens | None = None  # of the main process, from the beginning of the training

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        model: nn.Module = kwargs["model"]
        if args.fsdp or _is_sharded(model):
            reason = "each process has a part of the weights; use scripts.inspect_attention"
            what = "with FSDP, DeepSpeed ZeRO-3 or tensor parallelism"
            raise ValueError(f"LensCallback: {what}, {reason} checkpoints=")
        if not state.is_world_process_zero:
            return
        if args.report_to and "wandb" in args.report_to and not self.on_snapshot:
            self.on_snapshot = log_to_wandb
        positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        output = Path(args.output_dir)
        options: dict[str, Any] = {
            "context_length": min(positions or MAX_CONTEXT, MAX_CONTEXT),
            "folder": output / "attention",
            "run_name": args.run_name or output.resolve().name,
            "max_steps": state.max_steps,
        }
        options |= self.options
        if (tokenizer := self.tokenizer or kwargs.get("processing_class")) is None:
            missing = "Trainer has no processing_class; give the tokenizer of the model"
            raise ValueError(f"LensCallback: {missing}, LensCallback(tokenizer)")
        self.lens = Lens(tokenizer, self.config, **options)
        if self.lens.due(state.global_step):
            self._snapshot(model, state)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.lens and state.global_step < self.lens.max_steps:
            self._try(kwargs["model"], state)

    def _try(self, model: nn.Module, state: TrainerState) -> None:
        assert self.lens
        if not self.lens.due(state.global_step):
            return
        try:
            self._snapshot(model, state)
        except Exception as error:  # such as a full disk; the training continues
            line = f"{type(error).__name__}: {error}".splitlines()[0]
            what = f"lens: the snapshot of step {state.global_step} failed"
            print(f"{what} ({line})", file=sys.stderr)

    def on_log(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Takes the last snapshot, also of a training that was stopped early. Trainer logs its run
        time after the last loss, and before it loads the best model again."""
        if self.lens and "train_runtime" in kwargs["logs"]:
            self.lens.max_steps = state.global_step
            self._try(kwargs["model"], state)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Prints the names of heads and where the page is."""
        if self.lens and self.lens.last:
            lines = self.lens.most_significant_heads() or ["no head has a name"]
            for line in lines + self.lens.skipped_snapshots():
                print(f"attention heads  {line}")
            print(f"attention page   {self.lens.folder / 'page.html'}")

    def _snapshot(self, model: nn.Module, state: TrainerState) -> None:
        assert self.lens
        curves = functools.partial(trainer_curves, state.log_history)
        snapshot = self.lens.snapshot(model, state.global_step, curves)
        if snapshot and self.on_snapshot:
            self.on_snapshot(snapshot, state.global_step)


def _is_sharded(model: nn.Module) -> bool:
    """Whether a process has only a part of the weights. Its snapshot would wait forever for the
    others."""
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("true", "1"):  # accelerate launch
        return True
    marks = ("ds_id", "device_mesh")  # of ZeRO-3; of a DTensor: FSDP2 and tensor parallelism
    return any(hasattr(weight, mark) for weight in model.parameters() for mark in marks)


def log_to_wandb(snapshot: Snapshot, step: int) -> None:
    """Logs a snapshot to the current run of W&B, with the keys of a run of clearhead."""
    import wandb  # pyrefly: ignore[missing-import]

    if wandb.run is None:
        return
    define_wandb_metrics(wandb.run, "train/global_step")
    values = wandb_values(snapshot, lambda line: print(f"W&B: {line}", file=sys.stderr))
    # The x-axis of transformers' W&B callback
    wandb.run.log(snapshot.metrics | values | {"train/global_step": step})
