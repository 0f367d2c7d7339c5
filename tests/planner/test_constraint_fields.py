"""Every field of TorchRec's `ParameterConstraints`, wherever it has to arrive."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import BoundsCheckMode
from torchrec.modules.embedding_configs import DataType

from tests.builders import bag_sharders, make_ebc, make_planner

IN_PLAN: dict[str, Any] = {
    "enforce_hbm": True,
    "stochastic_rounding": False,
    "bounds_check_mode": BoundsCheckMode.FATAL,
    "output_dtype": DataType.FP16,
}
"""Fields that `DistributedModelParallel` reads off the plan."""

SIZES = [(1000, 64)] * 2

TESTED_ELSEWHERE = {
    "sharding_types",
    "compute_kernels",
    "min_partition",
    "pooling_factors",
    "num_poolings",
    "batch_sizes",
    "is_weighted",
    "cache_params",
    "device_group",
    "key_value_params",
}
"""In the tests of edge cases: what they change is more than one value."""


def test_no_field_is_left_out() -> None:
    known = {f.name for f in dataclasses.fields(ParameterConstraints)}
    here = {"feature_names", "use_virtual_table", *IN_PLAN}
    assert known - {"use_virtual_table"} == (TESTED_ELSEWHERE | here) - {
        "use_virtual_table"
    }


@pytest.mark.parametrize("name", IN_PLAN)
def test_settings_reach_the_plan(name: str) -> None:
    whole = ["table_wise"]
    constraints = {
        "t0": ParameterConstraints(sharding_types=whole, **{name: IN_PLAN[name]}),
        "t1": ParameterConstraints(sharding_types=whole),
    }
    planner = make_planner(2, "cuda", constraints=constraints)
    entries = planner.plan(make_ebc(SIZES), bag_sharders()).plan[""]
    assert getattr(entries["t0"], name) == IN_PLAN[name]
    assert getattr(entries["t1"], name) is None
    # TorchRec gives tables of unlike settings kernels of their own.
    assert planner.last_task is not None and planner.last_task.num_groups == 2


def test_virtual_tables_go_through_torchrecs_path() -> None:
    if "use_virtual_table" not in {
        f.name for f in dataclasses.fields(ParameterConstraints)
    }:
        pytest.skip("this TorchRec has no virtual tables")
    constraints = {"t0": ParameterConstraints(use_virtual_table=True)}
    planner = make_planner(2, "cuda", constraints=constraints)
    assert set(planner.plan(make_ebc(SIZES), bag_sharders()).plan[""]) == {"t0", "t1"}
