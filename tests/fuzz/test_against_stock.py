"""Drawn cases, and the smallest of all that ever failed."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.fuzz import against_stock, cases
from tests.fuzz.campaign import Case, judge_drawn

pytestmark = pytest.mark.filterwarnings("ignore")


def table(**fields: Any) -> dict[str, Any]:
    return {"name": "t0", "rows": 1, "dim": 4, "features": ["f"], **fields}


def case(
    kind: str,
    tables: list[dict[str, Any]],
    topology: dict[str, Any],
    constraints: dict[str, Any] | None = None,
    second: list[dict[str, Any]] | None = None,
    **planner: Any,
) -> Case:
    modules = [tables, *([second] if second else [])]
    return {
        "modules": [
            {"kind": kind, "path": f"m{number}", "tables": own}
            for number, own in enumerate(modules)
        ],
        "topology": {"compute_device": "cuda", **topology},
        "constraints": constraints or {},
        "planner": planner,
    }


FOUND = {
    "a table that stays whole on many ranks was tried in all splits": case(
        "ec", [table(dim=64)], {"world_size": 16}
    ),
    "replicas alone, where all-reduces of nothing are priced": case(
        "ebc",
        [table(rows=190672, dim=4096), table(name="t1", rows=31, dim=4096)],
        {"world_size": 3, "compute_device": "cpu", "local_world_size": 1},
        {"t1": {"sharding_types": ["data_parallel"]}},
        cost_model="auto",
    ),
    "a plan of replicas, which kernels cannot hold in columns": case(
        "ebc", [table(dim=4096)], {"world_size": 2, "local_world_size": 1}
    ),
    "quantised rows carry their scale": case(
        "quant", [table(dim=12)], {"world_size": 1}
    ),
    "sequences whose ids a constraint gives weights cost two things": case(
        "ec",
        [table(rows=266847, dim=1024), table(name="t1", rows=1377, dim=1024)],
        {"world_size": 8, "compute_device": "cpu", "ddr_cap": 2 * 10**9},
        {"t1": {"sharding_types": ["column_wise"], "is_weighted": True}},
        batch_size=202,
    ),
    "sequences were not split by columns": case(
        "ec", [table(rows=3581839, dim=256)], {"world_size": 2}, batch_size=10231
    ),
    "replicas beside them made the split of sequences look needless": case(
        "ec",
        [table(rows=457, dim=256), table(name="t1", rows=10**6, dim=256)],
        {"world_size": 8},
        {
            "t0": {"compute_kernels": ["dense"], "pooling_factors": [8.0]},
            "t1": {"sharding_types": ["column_wise"]},
        },
    ),
    "a sequence that must stay whole was thought to be spread over the ranks": case(
        "ec",
        [
            table(rows=7890, dim=256, features=["f", "g", "h"], data_type="FP16"),
            table(name="t1", rows=10833620, dim=256, features=[]),
        ],
        {"world_size": 2},
        {"t0": {"sharding_types": ["table_wise"], "pooling_factors": [7.0, 1.0, 1.0]}},
        batch_size=7572,
    ),
    "a grid of several blocks on one node was no way of the search": case(
        "ebc",
        [table(rows=110939, dim=1024)],
        {"world_size": 2},
        {
            "t0": {
                "sharding_types": ["data_parallel", "grid_shard"],
                "pooling_factors": [30.0],
            }
        },
        batch_size=869,
    ),
    "a cache that TorchRec refuses was kept beside replicas": case(
        "ebc",
        [table(rows=12, dim=1024)],
        {"world_size": 16},
        {
            "t0": {
                "compute_kernels": ["fused_uvm_caching", "dense"],
                "cache_load_factor": 1.0,
            }
        },
    ),
    "a proposer that divides by the memory of devices that have none": case(
        "ebc",
        [table(rows=10**9, dim=64)],
        {"world_size": 2, "compute_device": "cpu"},
        proposer=["dynamic"],
    ),
    "a proposer that wants a cache of every table": case(
        "ebc",
        [table(rows=1000)],
        {"world_size": 2},
        {"t0": {"compute_kernels": ["fused_uvm_caching"]}},
        proposer=["scaleup"],
    ),
    "a cache of no rows, which no kernel in the device's memory has": case(
        "ebc", [table()], {"world_size": 2}, {"t0": {"cache_load_factor": 0.0}}
    ),
    "a kernel for rows on the host that must be on the device": case(
        "ebc",
        [table(rows=1000)],
        {"world_size": 1},
        {"t0": {"compute_kernels": ["fused_uvm"], "enforce_hbm": True}},
    ),
    "sequences of more ids than a table may have features": case(
        "ec",
        [table()],
        {"world_size": 2},
        {"t0": {"pooling_factors": [2e5]}},
        batch_size=1,
    ),
    "a kernel without a price was put on one rank, by its slowest shard": case(
        "ebc",
        [
            table(name="t2", rows=63904, dim=512),
            table(name="t3", rows=13653, dim=8, features=["g"]),
        ],
        {
            "world_size": 2,
            "local_world_size": 1,
            "hbm_cap": 12 * 10**15,
            "ddr_cap": 11 * 10**15,
        },
        {
            "t2": {
                "sharding_types": ["row_wise", "table_column_wise"],
                "compute_kernels": ["key_value"],
                "pooling_factors": [6.642],
            },
            "t4": {"sharding_types": ["data_parallel", "column_wise"]},
        },
        second=[
            table(name="t4", rows=2078, dim=512),
            table(name="t5", rows=109, dim=96, features=["g", "h"]),
            table(name="t6", rows=578772329031, dim=1024, features=["i", "j", "k"]),
        ],
        batch_size=589,
    ),
    "rows cut by unlike memory are no way of a search, which had no even ones": case(
        "ebc",
        [
            table(name="t1", rows=3, dim=256, features=["f", "g"]),
            table(name="t2", rows=358664, dim=1024, features=["h", "i"]),
        ],
        {
            "world_size": 4,
            "custom": {"hbm_cap": [887 * 10**12, 3237 * 10**12, 2313 * 10**12, 10**15]},
        },
        {
            "t1": {
                "sharding_types": ["table_wise", "row_wise"],
                "pooling_factors": [4.907, 0.75],
                "batch_sizes": [862, 862],
            }
        },
        batch_size=59,
    ),
    "columns that must stay in a node were not split, so replicas were left": case(
        "ebc",
        [table(rows=10**7, dim=256)],
        {"world_size": 4},
        {"t0": {"sharding_types": ["table_column_wise", "data_parallel"]}},
    ),
    "columns that must stay in a node were not split beside table_wise": case(
        "ebc",
        [table(rows=10**5, dim=256)],
        {"world_size": 4, "local_world_size": 2},
        {"t0": {"sharding_types": ["table_column_wise", "table_wise"]}},
        batch_size=8192,
    ),
    "what replicas beside another type take was in the bound of no shard": case(
        "ebc",
        [table(dim=64), table(name="t1", rows=1000, dim=12)],
        {"world_size": 1, "hbm_cap": 2_600_000},
        storage_reservation=0.0,
    ),
    "a quantised table too large to be whole forced rows upon the other": case(
        "quant",
        [table(rows=5, dim=64), table(name="t1", rows=6 * 10**10, features=["g"])],
        {"world_size": 8, "hbm_cap": 1_360_576_728_077},
        batch_size=663,
    ),
    "a quantised table took one option, whatever the other had to take": case(
        "quant",
        [
            table(rows=31_818_238, dim=128, features=["f", "g"]),
            table(name="t1", rows=4527, dim=16, features=["h"]),
        ],
        {"world_size": 8, "local_world_size": 8, "hbm_cap": 3_570_043_437},
        {"t0": {"sharding_types": ["row_wise"], "pooling_factors": [4.3, 11.1]}},
        batch_size=136,
    ),
    "columns of a quantised table shared no rank with the other table": case(
        "quant",
        [table(rows=3_763_052, dim=9), table(name="t1", rows=103, dim=1024)],
        {"world_size": 2},
        batch_size=30_764,
    ),
}
"""What was wrong -> the case."""


@pytest.fixture(autouse=True)
def quiet() -> Any:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("wrong", FOUND)
def test_what_was_found_is_mended(wrong: str) -> None:
    outcome = against_stock.judge(FOUND[wrong])
    bad = ("failure", "not built", "planned, worse")
    assert not outcome.startswith(bad), outcome


@pytest.mark.parametrize(
    "num_cases", [24, pytest.param(250, marks=pytest.mark.nightly)]
)
def test_drawn_jobs(num_cases: int) -> None:
    outcomes = judge_drawn(num_cases, cases.draw, against_stock.judge)
    assert sum(o == "planned, no worse" for o in outcomes) > len(outcomes) / 4
