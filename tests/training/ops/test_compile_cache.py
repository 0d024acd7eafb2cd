"""The folder in which torch keeps compiled code, so that the next run need not compile."""

import os

import torch

from training.distributed.device import should_compile


def test_compiled_code_is_kept_for_the_next_run(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def cache(choice=True, **environment):
        """The folder that is chosen; None: torch chooses."""
        with monkeypatch.context() as patch:
            patch.delenv("TORCHINDUCTOR_CACHE_DIR")
            for name, value in environment.items():
                patch.setenv(name, str(value))
            assert should_compile(choice, torch.device("cpu"), 0.0) is (choice is True)
            return os.environ.get("TORCHINDUCTOR_CACHE_DIR")

    assert cache("auto") is None  # too short a run
    assert not list(tmp_path.iterdir())
    folder = tmp_path / ".cache" / "clearhead" / "inductor"
    assert cache() == str(folder)
    assert folder.is_dir()
    assert cache(TORCHINDUCTOR_CACHE_DIR="/chosen") == "/chosen"
    assert cache(WORLD_SIZE=8, LOCAL_WORLD_SIZE=8) is not None
    assert cache(WORLD_SIZE=16, LOCAL_WORLD_SIZE=8) is None
    (tmp_path / "file").write_text("no folder")
    assert cache(HOME=tmp_path / "file") is None
