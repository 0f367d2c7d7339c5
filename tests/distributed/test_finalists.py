"""Finalists measured by all ranks of a job, over gloo, and failures of that."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.builders import (
    META,
    bag_config,
    bag_sharders,
    bags,
    make_header,
    make_planner,
    make_record,
    make_tables,
    shards_of,
    write_records,
)
from tests.distributed.ranks import ONE_NODE, Jobs, OfJob
from torchrec_neuroshard import SearchConfig

pytestmark = pytest.mark.distributed

SEARCH = SearchConfig(effort=0.1, restarts=2, beam_width=1, time_budget_seconds=2.0)
NUM_RECORDS = 8
COPIES = """
import os, shutil, sys
open({seen!r} + os.environ["RANK"], "a").write(os.environ["WORLD_SIZE"])
if os.environ["RANK"] == "0":
    os.mkdir(sys.argv[1] + "/bundle")
    shutil.copy({records!r}, sys.argv[1] + "/bundle/kernels.parquet")
"""
"""In place of measuring: records are there at once."""
DIES = "import os; os.abort()"
RANK_1_DIES = "import os; os.environ['RANK'] == '1' and os.abort()"


def plan(program: str) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "torchrec_neuroshard.training.first_launch.PROGRAM", ("-c", program)
        )
        planner = make_planner(
            dist.get_world_size(), measure_finalists=2, search=SEARCH
        )
        model = bags(*(bag_config(i, 500 * i + 100) for i in range(8)), device=META)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            sharding = planner.collective_plan(model, bag_sharders())
    assert planner.last_result is not None
    return {
        "shards": repr(sorted(shards_of(sharding).items())),
        "finalists": [str(f) for f in planner.last_result.finalists],
        "warnings": [w for w in (str(c.message) for c in caught) if "measuring" in w],
        "noted": " ".join(planner.last_result.warnings),
        "source": planner.last_result.predicted.compute_source,
    }


def copies(folder: Path, rank: int) -> str:
    """Return the program, of records that it writes first."""
    records = folder / f"finalists-{rank}.parquet"
    write_records(
        records,
        make_header(),
        [make_record(make_tables([16]), index=i) for i in range(NUM_RECORDS)],
    )
    return COPIES.format(seen=str(folder / "seen-"), records=str(records))


def rank_jobs(num_nodes: int, rank: int, folder: Path) -> Jobs:
    if num_nodes != ONE_NODE:
        return {}

    def measured() -> dict[str, Any]:
        found = plan(copies(folder, rank))
        return {**found, "seen": (folder / f"seen-{rank}").read_text()}

    return {
        "measured": measured,
        "dies": lambda: plan(DIES),
        "rank 1 dies": lambda: plan(RANK_1_DIES),
    }


def test_all_ranks_measure_and_agree(results: OfJob) -> None:
    first, second = results("measured")
    assert first["seen"] == second["seen"] == "2" * len(first["seen"]) != ""
    assert first["shards"] == second["shards"]
    assert first["finalists"] == second["finalists"] != []
    assert first["warnings"] == second["warnings"] == []
    assert "corrected by" in first["source"]


@pytest.mark.parametrize("name", ["dies", "rank 1 dies"])
def test_no_failure_reaches_the_job(results: OfJob, name: str) -> None:
    first, second = results(name)
    assert first["shards"] == second["shards"]
    assert first["finalists"] == [] and first["source"] == "analytic"
    (text,) = first["warnings"]
    assert "measuring finalists failed (" in text and text in first["noted"]
    (told,) = second["warnings"]
    assert "measuring failed on rank 1 (its process ended with code" in told
