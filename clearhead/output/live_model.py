"""What a page shows of a model without a run: its heads, measured once, and typed texts."""

from dataclasses import dataclass
from typing import Any

from clearhead.output.live_typing import Checkpoint
from headlens import Reader, SnapshotData, live_data


@dataclass
class LiveModel:
    """A model: a checkpoint, or a model of transformers."""

    name: str
    path: str  # directory or hub:NAME
    window: int  # maximum number of tokens
    snapshot: SnapshotData
    run: dict[str, Any]  # its page, see headlens.run_data

    def __post_init__(self):
        self.data = live_data(self.run, snapshots=self.name)

    def state(self) -> dict:
        """Returns what the page asks for, as LiveRun.state."""
        steps, limit = list(self.checkpoints()), min(self.window, Reader.MOST)
        known = {"state": "finished", "text": "", "done": None, "training": ""}
        return known | {"snapshots": self.name, "typing": {"steps": steps, "limit": limit}}

    def checkpoints(self) -> dict[int, Checkpoint]:
        return {self.snapshot.step: Checkpoint(self.path, ())}

    def prompts(self) -> list[list[int]]:
        return self.snapshot.token_ids
