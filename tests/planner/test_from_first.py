"""A rank dies while the first rank sends a value to all ranks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from torchrec_neuroshard.errors import RankFailureError
from torchrec_neuroshard.planner.first_launch import from_first

pytestmark = pytest.mark.filterwarnings("ignore")

WORLD_SIZE, WAITS_SECONDS, ENDS_SECONDS = 3, 10.0, 60.0


def _rank(rank: int, dead: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=WAITS_SECONDS),
    )
    dist.barrier()
    if rank == dead:
        os.kill(os.getpid(), signal.SIGKILL)
    group = dist.group.WORLD
    assert group is not None
    with pytest.raises(RankFailureError) as caught:
        from_first({"from": rank}, group, "planned")
    (folder / f"{rank}").write_text(str(caught.value))
    os._exit(0)  # the group of a dead rank may be long in ending


@pytest.mark.parametrize("dead", [1, pytest.param(0, marks=pytest.mark.nightly)])
def test_all_other_ranks_stop(tmp_path: Path, dead: int) -> None:
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_rank, args=(rank, dead, tmp_path))
        for rank in range(WORLD_SIZE)
    ]
    for process in ranks:
        process.start()
    end = time.monotonic() + ENDS_SECONDS
    for process in ranks:
        process.join(max(0.1, end - time.monotonic()))
        process.kill()
        process.join()
    told = {int(p.name): p.read_text() for p in tmp_path.glob("[0-9]")}
    assert told.keys() == set(range(WORLD_SIZE)) - {dead}
    for text in told.values():
        assert "a rank died or timed out" in text, text
