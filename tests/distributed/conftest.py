"""The ranks' results, for all tests of this folder."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.distributed.ranks import ONE_NODE, OfJob, Results, run_ranks


@pytest.fixture(scope="session")
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Results:
    """Return what each rank returned for a job of a module."""
    items = request.session.items
    is_nightly = any(item.get_closest_marker("nightly") for item in items)
    collected = [getattr(item, "module", None) for item in items]
    modules = sorted(
        {m.__name__ for m in collected if m is not None and hasattr(m, "rank_jobs")}
    )

    @functools.cache
    def of_group(num_nodes: int) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("ranks")
        return run_ranks(num_nodes, modules, folder, is_nightly)

    def read(module: str, num_nodes: int, job: str) -> list[dict[str, Any]]:
        found = []
        for rank, results in enumerate(of_group(num_nodes)):
            by_job = results.get(module, {})
            assert job in by_job, (
                f"rank {rank} has no result for '{job}': it stopped "
                f"{results.get('error', 'without a word')}"
            )
            found.append(by_job[job])
        return found

    return read


@pytest.fixture
def results(request: pytest.FixtureRequest, ranks: Results) -> OfJob:
    """What each rank returned for a job of the test's own module.

    It ran on one node, unless the module or its case of that name says otherwise.
    """

    def of_job(job: str) -> list[dict[str, Any]]:
        default = getattr(request.module, "NUM_NODES", ONE_NODE)
        case = getattr(request.module, "CASES", {}).get(job)
        num_nodes = getattr(case, "num_nodes", default)
        return ranks(request.module.__name__, num_nodes, job)

    return of_job
