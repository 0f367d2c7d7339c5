"""A rank dies or fails while the first rank sends a value to all ranks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.builders import bag_sharders, bags, gpus, make_planner, only
from torchrec_neuroshard.errors import ConfigError, RankFailureError
from torchrec_neuroshard.exchange import from_first
from torchrec_neuroshard.planner.compat import POD_VARIABLES

pytestmark = pytest.mark.filterwarnings("ignore")

WORLD_SIZE, WAITS_SECONDS, ENDS_SECONDS = 3, 10.0, 60.0


def _join(rank: int, folder: Path) -> dist.ProcessGroup:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=WAITS_SECONDS),
    )
    dist.barrier()
    group = dist.group.WORLD
    assert group is not None
    return group


def _dying(rank: int, folder: Path, dead: int) -> None:
    group = _join(rank, folder)
    if rank == dead:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankFailureError) as caught:
        from_first({"from": rank}, group, "planned")
    (folder / f"{rank}").write_text(str(caught.value))
    os._exit(0)  # the group of a dead rank may be long in ending


def _podless(rank: int, folder: Path, wrong: int) -> None:
    group = _join(rank, folder)
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    os.environ.update({name: "2" if rank != wrong else "1" for name in POD_VARIABLES})
    kinds = only(sharding_types=["table_row_wise"])
    topology = gpus(4, 1, pod_size=2)
    planner = make_planner(topology=topology, constraints=kinds)
    with pytest.raises(ConfigError) as caught:
        planner.collective_plan(bags(), bag_sharders(), group)
    (folder / f"{rank}").write_text(str(caught.value))
    os._exit(0)


def _told(run: Callable[..., None], folder: Path, one: int) -> dict[int, str]:
    """Run a function on all ranks; return the text that each rank wrote."""
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=run, args=(rank, folder, one))
        for rank in range(WORLD_SIZE)
    ]
    for process in ranks:
        process.start()
    end = time.monotonic() + ENDS_SECONDS
    for process in ranks:
        process.join(max(0.1, end - time.monotonic()))
        process.kill()
        process.join()
    return {int(p.name): p.read_text() for p in folder.glob("[0-9]")}


@pytest.mark.parametrize("dead", [1, pytest.param(0, marks=pytest.mark.nightly)])
def test_all_other_ranks_stop(tmp_path: Path, dead: int) -> None:
    told = _told(_dying, tmp_path, dead)
    assert told.keys() == set(range(WORLD_SIZE)) - {dead}
    for text in told.values():
        assert "a rank died or timed out" in text, text


def test_wrong_pods_of_one_rank_are_an_error_on_all_ranks(tmp_path: Path) -> None:
    told = _told(_podless, tmp_path, 1)
    assert told.keys() == set(range(WORLD_SIZE))
    for text in told.values():
        assert text.startswith("rank 1: table 't0' is planned in pods of 2 ranks")
