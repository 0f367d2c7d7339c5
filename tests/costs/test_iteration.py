"""Schedules, held to an iteration step by step (see `iteration`)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from tests.costs.iteration import Label, Modules, iteration_ms, some_ms, steps
from torchrec_neuroshard.costs.passes import PASSES, TIMED, StagePhases
from torchrec_neuroshard.costs.schedules import DENSE, DenseMs, find_schedule

_NODE = "table_row_wise"


def phases_of(modules: Modules, ranks: Sequence[Mapping[Label, float]]) -> StagePhases:
    """Return the drawn times as the phases of one node's ranks."""
    kinds = list(itertools.chain.from_iterable(modules))
    phases_WS6 = np.array(
        [
            [
                [own.get((p, s), 0.0) * (p != "cache") for p in TIMED]
                for s in range(len(kinds))
            ]
            for own in ranks
        ]
    )
    orders = ("fwd_order", "bwd_order")
    reorder = [[ranks[0][name, s] for name in orders] for s in range(len(kinds))]
    sent = [TIMED.index(name) for name in PASSES.values()]
    inside_S2 = phases_WS6[0][:, sent] * np.array([[kind == _NODE] for kind in kinds])
    phases_WS6[..., sent] -= inside_S2
    replicated_S = np.array([kind == "data_parallel" for kind in kinds])
    phases_WS6[:, replicated_S, TIMED.index("fwd_comms")] = 0.0
    numbers = np.repeat(range(len(modules)), [len(types) for types in modules])
    return StagePhases(
        phases_WS6[None],
        np.array([reorder]),
        replicated_S[None],
        tuple(numbers.tolist()),
        inside_CS2=inside_S2[None],
    )


def ratios(modules: Modules, name: str, lookups_first: bool) -> np.ndarray:
    """Return iterations by the schedule over iterations step by step."""
    rng = random.Random(3)
    pipelined = name == "train_sparse_dist"
    queued = list(steps(modules, pipelined=pipelined, lookups_first=lookups_first))
    kinds = list(itertools.chain.from_iterable(modules))
    found = []
    for _ in range(60):
        ranks = some_ms(rng, modules, 3)
        for s, kind in enumerate(kinds):
            if kind == _NODE:  # a collective of no time is none
                ms = {p: rng.expovariate(0.3) for p in PASSES.values()}
                for own, p in itertools.product(ranks, ms):
                    own[p, s] = ms[p]
        layers = {p: ranks[0][p, 0] for p in DENSE}
        dense = DenseMs(**layers, lookups_first=lookups_first)
        (ms_1,) = find_schedule(name, dense).path_ms(phases_of(modules, ranks), dense)
        found.append(ms_1 / iteration_ms(queued, ranks))
    return np.array(found)


@pytest.mark.parametrize("lookups_first", [False, True])
@pytest.mark.parametrize("name", ["train_base", "train_sparse_dist"])
@pytest.mark.parametrize(
    "modules",
    [
        [["row_wise", "table_wise"]],
        [["table_wise", "row_wise"], ["row_wise", "table_wise"]],
    ],
)
def test_schedules_run_types_and_modules_in_torchrecs_order(
    modules: Modules, name: str, lookups_first: bool
) -> None:
    np.testing.assert_allclose(ratios(modules, name, lookups_first), 1.0)


@pytest.mark.parametrize("types", [[_NODE, "row_wise"], ["table_wise", _NODE]])
def test_ranks_wait_for_collectives_inside_nodes(types: Sequence[str]) -> None:
    for lookups_first in (False, True):
        np.testing.assert_allclose(ratios([types], "train_base", lookups_first), 1.0)


@pytest.mark.parametrize("name", ["train_base", "train_sparse_dist"])
@pytest.mark.parametrize(
    ("modules", "most"),
    [
        ([["row_wise", "column_wise", "table_wise"]], 1.1),
        ([["table_wise", "column_wise"], ["column_wise", "table_wise"]], 1.1),
        ([["table_wise", "data_parallel", "row_wise"]], 1.3),
    ],
)
def test_reordering_and_replicas_are_hardly_ever_too_long(
    modules: Modules, name: str, most: float
) -> None:
    """Schedules let ranks meet between passes, which is rarely needed without."""
    found = ratios(modules, name, lookups_first=False)
    assert (found > 1 - 1e-9).all() and (found < most).all()
    assert (found < 1 + 1e-9).mean() > 0.8
