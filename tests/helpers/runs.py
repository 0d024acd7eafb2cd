"""What tests of training look at in a run: its log, its weights."""

import json
from pathlib import Path

import torch


def rows(folder: Path) -> list[dict]:
    """The log."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(run) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in run.model.state_dict().items()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Bit for bit."""
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def stop_behind(run, step: int) -> None:
    """Trains to a checkpoint at this step and one step more, which is lost; then other random
    numbers are due."""
    run.look_up({})
    run.meter.start()
    while run.state.step < step:
        run.meter.add(*run.step())
        if run.is_due(run.settings.trainer.log_every):
            run.measure()
    run.save()
    run.finish_saving()
    run.step()
    torch.manual_seed(12345)
