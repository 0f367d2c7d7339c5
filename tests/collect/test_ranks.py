"""What ranks refuse before any talks to another; `tests/distributed` has them talk."""

from __future__ import annotations

import pytest

from torchrec_neuroshard.collect.ranks import Ranks
from torchrec_neuroshard.errors import ConfigError


@pytest.mark.parametrize(
    ("changes", "backend", "value"),
    [
        ({"RANK": None}, "gloo", "RANK not set.*torchrun --nproc-per-node"),
        ({"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, "gloo", "got 1"),
        ({"LOCAL_WORLD_SIZE": "4"}, "gloo", r"local_world_size \(4\)"),
        ({}, "nccl", "0 for 3 ranks"),
    ],
)
def test_ranks_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str | None],
    backend: str,
    value: str,
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    rank_0_of_6 = {"RANK": "0", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "3"}
    for name, number in {**rank_0_of_6, **changes}.items():
        if number is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, number)
    with pytest.raises(ConfigError, match=value):
        Ranks(backend, 5.0)
