"""The folder in which torch keeps compiled code, so that the next run need not compile."""

import os

import pytest
import torch

from training import device as devices


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """cache(**environment) -> the folder that is chosen; None: torch chooses."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def where(choice=True, **environment):
        with monkeypatch.context() as patch:
            patch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # so that it is gone afterwards
            patch.delenv("TORCHINDUCTOR_CACHE_DIR")
            for name, value in environment.items():
                patch.setenv(name, str(value))
            assert devices.should_compile(choice, torch.device("cpu"), 0.0) is (choice is True)
            return os.environ.get("TORCHINDUCTOR_CACHE_DIR")

    return where


def test_compiled_code_is_kept_for_the_next_run(cache, tmp_path):
    assert cache(False) is None
    assert cache("auto") is None  # too short a run
    assert not list(tmp_path.iterdir())
    assert cache() == str(tmp_path / ".cache" / "clearhead" / "inductor")
    assert (tmp_path / ".cache" / "clearhead" / "inductor").is_dir()
    elsewhere = str(tmp_path / "elsewhere")
    assert cache(XDG_CACHE_HOME=elsewhere) == f"{elsewhere}/clearhead/inductor"
    assert cache(TORCHINDUCTOR_CACHE_DIR="/chosen") == "/chosen"
    assert cache(WORLD_SIZE=8, LOCAL_WORLD_SIZE=8) is not None
    assert cache(WORLD_SIZE=16, LOCAL_WORLD_SIZE=8) is None
    (tmp_path / "file").write_text("no folder")
    assert cache(XDG_CACHE_HOME=tmp_path / "file") is None
