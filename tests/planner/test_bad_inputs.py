"""Bad inputs of each entry point, and what users are told.

Those of `topology_for`, `profile_inputs` and `PlacementConstraints` stand in the files
on these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.proposers import UniformProposer
from torchrec.distributed.planner.types import PlannerError, Topology
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import CacheParams, ShardingType

from tests.builders import analytic, bag_config, bags, gpus, make_planner, only
from torchrec_neuroshard import PlacementConstraints
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.planner import (
    NeuroShardEnumerator,
    NeuroShardEstimator,
    NeuroShardPartitioner,
    NeuroShardPerfModel,
    NeuroShardProposer,
)

PARTS: tuple[Callable[..., Any], ...] = (
    NeuroShardEnumerator,
    NeuroShardEstimator,
    NeuroShardPartitioner,
    NeuroShardPerfModel,
    NeuroShardProposer,
)


def make_part(kind: Callable[..., Any], **given: Any) -> Any:
    return kind(**{"topology": gpus(), **analytic(), **given})


def cpus(memory: int | None = None) -> Topology:
    return Topology(2, "cpu", ddr_cap=memory)


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"sharding_types": ["rowwise"]}, "has 'rowwise'.*know; did you mean 'row_wise'"),
    ({"sharding_types": ["row_wise", "row"]}, "sharding_types has 'row', which"),
    ({"sharding_types": [ShardingType.ROW_WISE]}, "has <ShardingType.ROW_WISE.*which"),
    ({"sharding_types": [None]}, "sharding_types has None, which"),
    ({"compute_kernels": ["fuse"]}, "has 'fuse', .*did you mean 'fused'"),
    ({"compute_kernels": "fused"}, r"compute_kernels is 'fused'.*pass \['fused'\]"),
    ({"min_partition": 0}, "min_partition is 0; pass .* at least 1"),
    ({"min_partition": -1}, "min_partition is -1"),
    ({"min_partition": 2.5}, "min_partition is 2.5"),
    ({"min_partition": True}, "min_partition is True"),
    ({"min_partition": "8"}, "min_partition is '8'"),
    ({"pooling_factors": [math.nan]}, "pooling_factors has nan"),
    ({"pooling_factors": [-1.0]}, "pooling_factors has -1.0"),
    ({"pooling_factors": ["3"]}, "pooling_factors has '3'"),
    ({"pooling_factors": [None]}, "pooling_factors has None"),
    ({"pooling_factors": None}, "pooling_factors is None; pass a list"),
    ({"pooling_factors": {"f0": 1.0}}, "pooling_factors is {.*}; pass a list"),
    ({"num_poolings": [math.inf]}, "num_poolings has inf"),
    ({"batch_sizes": [-1]}, "batch_sizes has -1"),
    ({"batch_sizes": ["x"]}, "batch_sizes has 'x'"),
    ({"feature_names": "f0"}, r"feature_names is 'f0'.*pass \['f0'\]"),
    ({"cache_params": 3}, "cache_params is 3; pass a .*CacheParams"),
    ({"cache_params": CacheParams(load_factor="a")}, "has load_factor 'a'"),
    ({"bounds_check_mode": 1}, "bounds_check_mode is 1; pass a .*BoundsCheckMode"),
    ({"output_dtype": torch.float16}, "output_dtype is torch.float16; .*DataType"),
    ({"device_group": 3}, "device_group is 3; pass a builtins.str"),
    ({"key_value_params": 3}, "key_value_params is 3; pass a .*KeyValueParams"),
    ({"enforce_hbm": "no"}, "enforce_hbm is 'no'; pass True or False"),
    ({"is_weighted": "no"}, "is_weighted is 'no'; pass True or False"),
]


@pytest.mark.parametrize(("fields", "message"), FIELDS)
def test_a_constraint_names_the_table_and_the_field(
    fields: dict[str, Any], message: str
) -> None:
    limits = only(**fields)
    with pytest.raises(ConfigError, match=f"constraints of table 't0': .*{message}"):
        make_planner(topology=gpus(), constraints=limits)
    for part in PARTS:
        with pytest.raises(ConfigError, match=f"'t0': .*{message}"):
            make_part(part, constraints=limits)


SHARED: list[tuple[dict[str, Any], str]] = [
    ({"topology": "h100"}, "topology is a str, 'h100'"),
    ({"constraints": ["t0"]}, "constraints is a list"),
    ({"constraints": {"t0": {}}}, "constraints of table 't0' is a dict"),
    ({"constraints": {3: None}}, "a table's name in constraints is a int, 3"),
    ({"cost_model": 3}, "cost_model is 3: pass 'auto'"),
    ({"cost_model": None}, "cost_model is None: pass 'auto'"),
    ({"cost_model": "h10"}, "unknown cost model 'h10'"),
    ({"comms_model": 3}, "comms_model is a int, 3"),
    ({"profiles": [3.0]}, "profiles is a list"),
]


@pytest.mark.parametrize(("given", "message"), SHARED)
def test_arguments_that_all_parts_take(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_planner(**given)
    for part in PARTS:
        with pytest.raises(ConfigError, match=message):
            make_part(part, **given)


PLANNERS: list[tuple[dict[str, Any], str]] = [
    ({"batch_size": "512"}, "batch_size is a str, '512'"),
    ({"batch_size": -5}, "batch_size is -5: .* whole number from 1"),
    ({"batch_size": 0}, "batch_size is 0:"),
    ({"batch_size": True}, "batch_size is True:"),
    ({"batch_size": 2.5}, "batch_size is 2.5:"),
    ({"batch_size": math.nan}, "batch_size is nan:"),
    ({"batch_size": math.inf}, "batch_size is inf:"),
    ({"batch_size": 10**30}, "batch_size is 1000.*: .* to 2,147,483,647"),
    ({"calibrate": True}, "calibrate must be .* got True"),
    ({"calibrate": None}, "calibrate must be .* got None"),
    ({"dense_ms": "x"}, "dense_ms must be .* got 'x'"),
    ({"dense_ms": math.nan}, "dense_ms must be .* got nan"),
    ({"pipeline_type": "often"}, "'often'"),
    ({"search": 3}, "3"),
    ({"stash_bytes": "1e9"}, "stash_bytes is a str, '1e9'"),
    ({"timeout_seconds": "60"}, "timeout_seconds must be .* got '60'"),
    ({"timeout_seconds": -1}, "timeout_seconds must be .* above 0, got -1"),
    ({"placement_constraints": {"t0": [0]}}, "placement_constraints is a dict"),
]


@pytest.mark.parametrize(("given", "message"), PLANNERS)
def test_the_planners_own_arguments(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_planner(topology=gpus(), **given)


def test_arguments_of_single_parts() -> None:
    for size in (-5, 0, True, 2.5, "64", None):
        with pytest.raises(ConfigError, match="batch_size is "):
            make_part(NeuroShardEnumerator, batch_size=size)
    odd: Any = {"t0": [0]}
    placed = NeuroShardEnumerator, NeuroShardPartitioner, NeuroShardProposer
    for part in placed:
        with pytest.raises(ConfigError, match="placement is a dict"):
            make_part(part, placement=odd)
    for other in PARTS[1:]:
        with pytest.raises(ConfigError, match="costs is a int, 3"):
            make_part(other, costs=3)


def test_models_and_sharders_that_are_none() -> None:
    planner, model = make_planner(topology=gpus()), bags()
    sharders = get_default_sharders()
    odd: list[tuple[Any, Any, str]] = [
        (None, sharders, "model is a NoneType"),
        ([model], sharders, "model is a list"),
        (model, None, "sharders is None: pass a list"),
        (model, sharders[0], "sharders is <.*: pass a list"),
        (model, "x", r"sharders\[0\] is 'x', not a sharder"),
    ]
    for module, given, message in odd:
        with pytest.raises(ConfigError, match=message):
            planner.plan(module, given)


@pytest.mark.parametrize("topology", [gpus(), cpus()], ids=["gpus", "cpus"])
@pytest.mark.parametrize(
    "parts",
    [{}, {"partitioner": GreedyPerfPartitioner()}, {"proposer": UniformProposer()}],
    ids=["own", "partitioner", "proposer"],
)
def test_all_ranks_forbidden(topology: Topology, parts: Mapping[str, Any]) -> None:
    none = PlacementConstraints(forbid_ranks=[0, 1])
    planner = make_planner(topology=topology, placement_constraints=none, **parts)
    with pytest.raises(ConfigError, match="forbid_ranks leave no rank for table 't0'"):
        planner.plan(bags(), get_default_sharders())
    assert planner.plan(nn.Linear(2, 2), get_default_sharders()).plan == {}


@pytest.mark.parametrize(
    ("topology", "rows"),
    [
        (gpus(hbm_cap=73, ddr_cap=73), 3),
        (cpus(73), 3),
        (gpus(), 2 * 10**9),  # 1 TB
        (cpus(), 2 * 10**9),
        (gpus(), 2**52),
        (gpus(hbm_cap=1, ddr_cap=1), 1000),
    ],
)
def test_a_table_that_fits_nowhere_is_named_with_its_size(
    topology: Topology, rows: int
) -> None:
    model = bags(bag_config(0, rows, 128))
    planner = make_planner(topology=topology)
    told = rf"table 't0' \(num_embeddings={rows}, embedding_dim=128, fp32\) needs \d"
    with pytest.raises(PlannerError, match=told):
        planner.plan(model, get_default_sharders())
