"""Two ranks on paper GPUs, beside two on CPUs: equal losses, and TorchRec's streams."""

from __future__ import annotations

import itertools
import json
import logging
import multiprocessing
import os
import random
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.builders import CPU
from tests.paper_gpu.journals import replay
from tests.paper_gpu.pipelines import PIPELINES, journal_of, losses_on
from torchrec_neuroshard.costs.passes import COLLECTIVES, TIMED, StagePhases
from torchrec_neuroshard.costs.schedules import (
    DENSE,
    SCHEDULES,
    DenseMs,
    find_schedule,
)

WORLD_SIZE = 2
ROUNDING = 1e-6
"""Relative, of losses. Libraries add in another order where memory begins at another
place: to the bit on an AMD EPYC, on an Intel Xeon up to 7e-8 apart."""

Found = Sequence[dict[str, Any]]
"""What each rank found."""


def run_rank(rank: int, parts: Sequence[str], folder: Path) -> None:
    """Do some parts, and write what was found to FOLDER/RANK.json."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    places = {"RANK": rank, "LOCAL_RANK": rank}
    places |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), WORLD_SIZE)
    os.environ.update({name: str(value) for name, value in places.items()})
    gpu, stores = torch.device("cuda", rank), itertools.count()
    torch.cuda.set_device(gpu)

    def in_group(backend: str, action: Any) -> Any:
        store = f"file://{folder}/store{next(stores)}"
        dist.init_process_group(
            backend, init_method=store, rank=rank, world_size=WORLD_SIZE
        )
        found = action()
        dist.destroy_process_group()
        return found

    def journals() -> dict[str, list[str]]:
        return {
            f"{name} {order}": journal_of(
                name, gpu, lookups_first=order == "lookups first"
            )
            for name in PIPELINES
            for order in ("lookups last", "lookups first")
        }

    found: dict[str, Any] = {}
    if "losses" in parts:
        found["losses"] = in_group("nccl", lambda: losses_on(gpu))
        found["losses on CPUs"] = in_group("gloo", lambda: losses_on(CPU))
    if "journals" in parts:
        found["journals"] = in_group("nccl", journals)
    (folder / f"{rank}.json").write_text(json.dumps(found))


def run(folder: Path, *parts: str) -> Found:
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=run_rank, args=(rank, parts, folder))
        for rank in range(WORLD_SIZE)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * WORLD_SIZE
    return [json.loads(path.read_text()) for path in sorted(folder.glob("?.json"))]


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run(tmp_path_factory.mktemp("long"), "journals")


def test_a_plan_trains_as_on_cpus(tmp_path: Path) -> None:
    for found in run(tmp_path, "losses"):
        losses = found["losses"]
        assert losses == pytest.approx(found["losses on CPUs"], rel=ROUNDING)
        assert len(set(losses)) > 1


@pytest.mark.nightly
@pytest.mark.parametrize("lookups", ["lookups last", "lookups first"])
@pytest.mark.parametrize("name", [n for n in SCHEDULES if n != "none"])
def test_schedules_are_those_of_torchrecs_pipelines(
    long: Found, name: str, lookups: str
) -> None:
    journals = [found["journals"][f"{name} {lookups}"] for found in long]
    rng = random.Random(7)

    def some_ms(phases: Sequence[str]) -> dict[str, float]:
        return {p: rng.choice([0.0, rng.expovariate(0.3)]) for p in phases}

    for _ in range(12):
        common = some_ms([*COLLECTIVES, *DENSE])
        ranks = [some_ms([p for p in TIMED if p not in common]) for _ in journals]
        phase_ms = [{**common, **own} for own in ranks]
        dense = DenseMs(
            **{p: common[p] for p in DENSE}, lookups_first=lookups == "lookups first"
        )
        schedule = find_schedule(name, dense)
        for own in phase_ms:
            own["cache"] *= schedule.prefetches
        phases_CWS6 = np.array([[[[own[p] for p in TIMED]] for own in phase_ms]])
        (path_ms,) = schedule.path_ms(StagePhases.plain(phases_CWS6), dense)
        assert replay(journals, phase_ms) == pytest.approx(path_ms)
