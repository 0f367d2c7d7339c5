"""What ranks refuse before any talks to another; `tests/distributed` has them talk."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchrec_neuroshard.cli import main
from torchrec_neuroshard.collect.ranks import Ranks
from torchrec_neuroshard.errors import ConfigError


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of rank 0 of six."""
    for name, value in (("RANK", 0), ("WORLD_SIZE", 6), ("LOCAL_WORLD_SIZE", 3)):
        monkeypatch.setenv(name, str(value))
    return monkeypatch


def test_needs_torchrun(
    torchrun: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torchrun.delenv("RANK")
    assert main(["collect", "comms", "--out", str(tmp_path / "c.parquet")]) == 2
    printed = capsys.readouterr().err
    assert "RANK not set" in printed
    assert "torchrun --nproc-per-node" in printed


def test_needs_two_ranks(torchrun: pytest.MonkeyPatch) -> None:
    torchrun.setenv("WORLD_SIZE", "1")
    torchrun.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="at least 2 ranks, got 1"):
        Ranks("gloo", 5.0)


def test_nodes_must_be_alike(torchrun: pytest.MonkeyPatch) -> None:
    torchrun.setenv("LOCAL_WORLD_SIZE", "4")
    message = r"world_size \(6\) must be a multiple of local_world_size \(4\)"
    with pytest.raises(ConfigError, match=message):
        Ranks("gloo", 5.0)


def test_nccl_needs_devices(torchrun: pytest.MonkeyPatch) -> None:
    torchrun.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ConfigError, match="this node has 0 for 3 ranks"):
        Ranks("nccl", 5.0)
