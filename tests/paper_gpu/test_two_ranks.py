"""Two ranks on paper GPUs, beside two on CPUs: equal losses, and TorchRec's streams."""

from __future__ import annotations

import itertools
import json
import logging
import multiprocessing
import os
import random
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.builders import CPU
from tests.costs.iteration import Label, Modules, iteration_ms, some_ms, steps
from tests.paper_gpu.journals import replay
from tests.paper_gpu.pipelines import ONE_TYPE, PIPELINES, journal_of, losses_on
from torchrec_neuroshard.costs.passes import TIMED, StagePhases
from torchrec_neuroshard.costs.schedules import DENSE, DenseMs, find_schedule

WORLD_SIZE = 2
ROUNDING = 1e-6
"""Relative, of losses. Libraries add in another order where memory begins at another
place: to the bit on an AMD EPYC, on an Intel Xeon up to 7e-8 apart."""

MODULES: dict[str, Modules] = {
    "one type": ONE_TYPE,
    "one module": [["row_wise", "column_wise", "table_wise"]],
    "two modules": [["table_wise", "column_wise"], ["column_wise", "table_wise"]],
    "all types": [
        ["table_wise", "data_parallel", "column_wise"],
        ["table_row_wise", "row_wise"],
    ],
}
Case = tuple[str, str, str]
"""Modules, pipeline, and whether the model calls them first or last."""
LOOKUPS = ("lookups last", "lookups first")
QUICK: Case = ("all types", "train_base", "lookups last")
SHORT: list[Case] = [QUICK]
LONG: list[Case] = [
    *(("one type", name, lookups) for name in PIPELINES for lookups in LOOKUPS),
    *itertools.product(
        ("one module", "two modules", "all types"),
        ("train_base", "train_sparse_dist"),
        LOOKUPS,
    ),
]

Found = Sequence[dict[str, Any]]
"""What each rank found."""


def run_rank(rank: int, cases: Sequence[Case], losses: bool, folder: Path) -> None:
    """Record cases, or train; write what was found to FOLDER/RANK.json."""
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

    def journals() -> list[tuple[Case, list[str]]]:
        return [
            (
                (modules, pipeline, lookups),
                journal_of(
                    pipeline,
                    gpu,
                    lookups_first=lookups == "lookups first",
                    modules=MODULES[modules],
                ),
            )
            for modules, pipeline, lookups in cases
        ]

    found: dict[str, Any] = {}
    if losses:
        found["losses"] = in_group("nccl", lambda: losses_on(gpu))
        found["losses on CPUs"] = in_group("gloo", lambda: losses_on(CPU))
    if cases:
        found["journals"] = in_group("nccl", journals)
    (folder / f"{rank}.json").write_text(json.dumps(found))


def run(folder: Path, cases: Sequence[Case] = (), *, losses: bool = False) -> Found:
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=run_rank, args=(rank, cases, losses, folder))
        for rank in range(WORLD_SIZE)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * WORLD_SIZE
    return [json.loads(path.read_text()) for path in sorted(folder.glob("?.json"))]


Journals = Mapping[Case, Sequence[Sequence[str]]]
"""Case -> the journal of each rank."""


def record(folder: Path, cases: Sequence[Case]) -> Journals:
    ranks = [dict(map(_case, found["journals"])) for found in run(folder, cases)]
    return {case: [journals[case] for journals in ranks] for case in cases}


def _case(found: Any) -> tuple[Case, list[str]]:
    case, journal = found
    return tuple(case), journal


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Journals:
    return record(tmp_path_factory.mktemp("short"), SHORT)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Journals:
    return record(tmp_path_factory.mktemp("long"), LONG)


def test_a_plan_trains_as_on_cpus(tmp_path: Path) -> None:
    for found in run(tmp_path, losses=True):
        losses = found["losses"]
        assert losses == pytest.approx(found["losses on CPUs"], rel=ROUNDING)
        assert len(set(losses)) > 1


@pytest.mark.nightly
@pytest.mark.parametrize("lookups", LOOKUPS)
@pytest.mark.parametrize("name", PIPELINES)
def test_schedules_are_those_of_torchrecs_pipelines(
    long: Journals, name: str, lookups: str
) -> None:
    journals = long["one type", name, lookups]
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


def test_torchrec_runs_types_and_modules_in_our_order(short: Journals) -> None:
    check_steps(QUICK, short[QUICK])


@pytest.mark.nightly
@pytest.mark.parametrize("case", [case for case in LONG if case[0] != "one type"])
def test_torchrec_always_runs_types_and_modules_in_our_order(
    long: Journals, case: Case
) -> None:
    check_steps(case, long[case])


def check_steps(case: Case, journals: Sequence[Sequence[str]]) -> None:
    """Check that iterations take as long as by `steps`, whatever a phase takes."""
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
        found = replay(journals, ranks)
        assert found == pytest.approx(iteration_ms(queued, ranks))
        shares.append(found / with_waits(ranks))
    # If all ranks waited between types, iterations would take much longer.
    assert min(shares) < 0.8


def with_waits(ranks: Sequence[Mapping[Label, float]]) -> float:
    """Sum each stage's phases on the slowest rank."""
    return sum(max(own[label] for own in ranks) for label in ranks[0])
