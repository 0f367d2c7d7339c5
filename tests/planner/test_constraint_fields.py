"""Every field of TorchRec's `ParameterConstraints`, wherever it has to arrive."""

from __future__ import annotations

import dataclasses
from typing import Any

from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import BoundsCheckMode
from torchrec.modules.embedding_configs import DataType

from tests.builders import bag_sharders, entry_of, make_ebc, make_planner

IN_PLAN: dict[str, Any] = {
    "enforce_hbm": True,
    "stochastic_rounding": False,
    "bounds_check_mode": BoundsCheckMode.FATAL,
    "output_dtype": DataType.FP16,
}
"""Fields that `DistributedModelParallel` reads off the plan."""

OTHERS = """sharding_types compute_kernels min_partition pooling_factors num_poolings
batch_sizes is_weighted cache_params device_group key_value_params feature_names
use_virtual_table"""
"""Fields that the planner itself reads, or TorchRec's enumerator."""


def test_no_field_is_left_out() -> None:
    known = {f.name for f in dataclasses.fields(ParameterConstraints)}
    assert known <= {*OTHERS.split(), *IN_PLAN}


def test_settings_reach_the_plan() -> None:
    fields = [{}, *({name: value} for name, value in IN_PLAN.items())]
    constraints = {
        f"t{i}": ParameterConstraints(sharding_types=["table_wise"], **field)
        for i, field in enumerate(fields)
    }
    planner = make_planner(2, "cuda", constraints=constraints)
    plan = planner.plan(make_ebc([(1000, 64)] * len(fields)), bag_sharders())
    for i, field in enumerate(fields):
        entry = entry_of(plan, f"t{i}")
        assert {n: getattr(entry, n) for n in IN_PLAN} == dict.fromkeys(IN_PLAN) | field
    # TorchRec gives tables of unlike settings kernels of their own.
    assert planner.last_task is not None
    assert planner.last_task.num_groups == len(fields)
