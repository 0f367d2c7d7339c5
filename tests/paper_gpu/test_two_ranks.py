"""Two ranks on paper GPUs, beside two on CPUs: equal losses, and TorchRec's streams."""

from __future__ import annotations

import json
import multiprocessing
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.paper_gpu.journals import replay
from tests.paper_gpu.two_ranks import WORLD_SIZE, run_rank
from torchrec_neuroshard.schedules import (
    COLLECTIVES,
    DENSE,
    SCHEDULES,
    TIMED,
    DenseMs,
    find_schedule,
)

ROUNDING = 1e-6
"""Relative, of losses. Libraries add in another order where memory begins at another
place: to the bit on an AMD EPYC, on an Intel Xeon up to 7e-8 apart."""

Found = Sequence[dict[str, Any]]
"""What each rank found."""


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
        (path_ms,) = schedule.path_ms(phases_CWS6, dense)
        assert replay(journals, phase_ms) == pytest.approx(path_ms)
