"""Two ranks over NCCL: what their pipelines queue, and what a plan of ours trains.

The order of phases is that of `schedules` and `iteration`: replayed with random times,
iterations take as long as these say.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from tests.costs.iteration import Label, iteration_ms, some_ms, steps
from tests.paper_gpu.build import needs_paper_gpus, run_inside
from tests.paper_gpu.journals import replay
from tests.paper_gpu.pipelines import CASES, LOOKUPS, MODULES, ONE_TYPE, PIPELINES, Case
from torchrec_neuroshard.costs.passes import TIMED, StagePhases
from torchrec_neuroshard.costs.schedules import DENSE, DenseMs, find_schedule

pytestmark = [pytest.mark.nightly, needs_paper_gpus]

ROUNDING = 1e-6
"""Relative, of losses. Libraries add in another order where memory begins at another
place: to the bit on an AMD EPYC, on an Intel Xeon up to 7e-8 apart."""

Found = Sequence[Mapping[str, Any]]
"""What each rank found."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("ranks")
    run_inside("tests.paper_gpu.pipelines:run_ranks", str(folder))
    return [json.loads(path.read_text()) for path in sorted(folder.glob("?.json"))]


def journals_of(found: Found, case: Case) -> list[list[str]]:
    return [own["journals"][CASES.index(case)] for own in found]


def test_a_plan_trains_as_on_cpus(found: Found) -> None:
    for own in found:
        losses = own["losses on cuda"]
        assert losses == pytest.approx(own["losses on cpu"], rel=ROUNDING)
        assert len(set(losses)) > 1


@pytest.mark.parametrize("lookups", LOOKUPS)
@pytest.mark.parametrize("name", PIPELINES)
def test_schedules_are_those_of_torchrecs_pipelines(
    found: Found, name: str, lookups: str
) -> None:
    journals = journals_of(found, ("one type", name, lookups))
    rng = random.Random(7)
    for _ in range(12):
        ranks = some_ms(rng, ONE_TYPE)
        dense = DenseMs(
            **{p: ranks[0][p, 0] for p in DENSE},
            lookups_first=lookups == "lookups first",
        )
        schedule = find_schedule(name, dense)
        for own in ranks:
            own["cache", 0] *= schedule.prefetches
        phases_CWS6 = np.array([[[[own[p, 0] for p in TIMED]] for own in ranks]])
        (path_ms,) = schedule.path_ms(StagePhases.plain(phases_CWS6), dense)
        assert replay(journals, ranks) == pytest.approx(path_ms)


@pytest.mark.parametrize("case", [case for case in CASES if case[0] != "one type"])
def test_torchrec_runs_types_and_modules_in_our_order(found: Found, case: Case) -> None:
    journals = journals_of(found, case)
    modules, pipeline, lookups = case
    queued = list(
        steps(
            MODULES[modules],
            pipelined=pipeline == "train_sparse_dist",
            lookups_first=lookups == "lookups first",
        )
    )
    rng = random.Random(3)
    shares = []
    for _ in range(12):
        ranks = some_ms(rng, MODULES[modules])
        replayed = replay(journals, ranks)
        assert replayed == pytest.approx(iteration_ms(queued, ranks))
        shares.append(replayed / with_waits(ranks))
    # If all ranks waited between types, iterations would take much longer.
    assert min(shares) < 0.8


def with_waits(ranks: Sequence[Mapping[Label, float]]) -> float:
    """Sum each stage's phases on the slowest rank."""
    return sum(max(own[label] for own in ranks) for label in ranks[0])
