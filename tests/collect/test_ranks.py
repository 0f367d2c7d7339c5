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


@pytest.mark.parametrize(
    ("changes", "backend", "value"),
    [
        ({"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, "gloo", "got 1"),
        ({"LOCAL_WORLD_SIZE": "4"}, "gloo", r"local_world_size \(4\)"),
        ({}, "nccl", "0 for 3 ranks"),
    ],
)
def test_ranks_that_cannot_be(
    torchrun: pytest.MonkeyPatch, changes: dict[str, str], backend: str, value: str
) -> None:
    torchrun.setattr("torch.cuda.device_count", lambda: 0)
    for name, number in changes.items():
        torchrun.setenv(name, number)
    with pytest.raises(ConfigError, match=value):
        Ranks(backend, 5.0)
