"""The run that torchrun restarts: torchrun's store keeps its directory.

torchrun --max-restarts=N starts all ranks again after one has died, with the same command. A run
without `name=` would then begin in a new directory. With one process there is no such record: give
`name=` to a run that must survive, and also under Slurm and on several machines, where torchrun
itself may be started again.
"""

import datetime
import os

import torch.distributed as dist

from training.distributed.launch import rank_count

KEY = "clearhead/run"


def restarted_run() -> str | None:
    """The directory of the run that these ranks began before torchrun restarted them."""
    store = _agent_store()
    return store.get(KEY).decode() if store and store.check([KEY]) else None


def remember_run(directory: str) -> None:
    """Stores the directory of the run for a restart by torchrun."""
    if store := _agent_store():
        store.set(KEY, directory)


def _agent_store() -> dist.Store | None:
    """torchrun's own store, which it keeps over restarts; None without torchrun."""
    if rank_count() == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    limit = datetime.timedelta(seconds=30)
    return dist.TCPStore(address, port, is_master=False, timeout=limit)
