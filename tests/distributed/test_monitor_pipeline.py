"""A train pipeline that is watched, and moved under once it has run dry."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.ranks import ONE_NODE, Jobs, OfJob
from tests.distributed.test_monitor import run_drift

pytestmark = [pytest.mark.distributed, pytest.mark.nightly]


class Pipelined:
    """TorchRec's train pipeline."""

    def __init__(self, sharded: Any, batches: Iterator[Any]) -> None:
        from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

        dense = torch.optim.SGD(sharded.module.dense.parameters(), lr=0.01)
        self.batches = batches
        self._pipeline = TrainPipelineSparseDist(sharded, dense, torch.device("cpu"))

    def progress(self) -> torch.Tensor:
        found: torch.Tensor = self._pipeline.progress(self.batches)
        return found


def rank_jobs(num_nodes: int, rank: int, _: Path) -> Jobs:
    return (
        {"drift": lambda: run_drift(rank, Pipelined)} if num_nodes == ONE_NODE else {}
    )


def test_full_pipeline_is_not_moved_under(results: OfJob) -> None:
    for rank in results("drift"):
        assert not rank["early"]["applied"] and rank["early"]["bytes"] > 0
        assert rank["early"]["reason"].startswith("a train pipeline has batches under")
        assert rank["done"]["applied"] and rank["is_on"]
        assert rank["gap"] < 1e-5 and rank["learned"] > 1e-2
    assert "index_comms" not in results("drift")[0]["last"]["phases"]
