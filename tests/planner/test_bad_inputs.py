"""Bad inputs of each entry point: the error, and the words that matter in it.

Other files of this folder have those that need models of their own; the other public
functions stand in `tests/test_bad_input.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.proposers import UniformProposer
from torchrec.distributed.planner.types import PlannerError, Topology
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import CacheParams, ShardingType

from tests.builders import (
    MIB,
    analytic,
    bag_config,
    bags,
    by_table,
    each,
    gpus,
    make_ebc,
    make_planner,
    only,
    sequences,
)
from torchrec_neuroshard import NeuroShardPlanner, PlacementConstraints
from torchrec_neuroshard.errors import ConfigError, ProfileError
from torchrec_neuroshard.planner import (
    NeuroShardEnumerator,
    NeuroShardEstimator,
    NeuroShardPartitioner,
    NeuroShardPerfModel,
    NeuroShardProposer,
)
from torchrec_neuroshard.tables.profile import FeatureProfile
from torchrec_neuroshard.testing import AnalyticCostModel

PARTS: tuple[Callable[..., Any], ...] = (
    NeuroShardEnumerator,
    NeuroShardEstimator,
    NeuroShardPartitioner,
    NeuroShardPerfModel,
    NeuroShardProposer,
)


def make_part(kind: Callable[..., Any], **given: Any) -> Any:
    return kind(**{"topology": gpus(), **analytic(), **given})


CONSTRAINTS: list[tuple[dict[str, Any], str]] = [
    ({"sharding_types": ["rowwise"]}, "'rowwise'.*'row_wise'"),
    ({"sharding_types": "row_wise"}, "sharding_types is 'row_wise'"),
    ({"sharding_types": [ShardingType.ROW_WISE]}, "<ShardingType.ROW_WISE"),
    ({"sharding_types": [None]}, "sharding_types has None"),
    ({"compute_kernels": ["fuse"]}, "'fuse', .*'fused'"),
    ({"compute_kernels": "fused"}, r"'fused'.*\['fused'\]"),
    ({"min_partition": 0}, "min_partition is 0"),
    ({"min_partition": 2.5}, "min_partition is 2.5"),
    ({"min_partition": True}, "min_partition is True"),
    ({"min_partition": "8"}, "min_partition is '8'"),
    ({"pooling_factors": [1.0, math.nan]}, "pooling_factors has nan"),
    ({"pooling_factors": [None]}, "pooling_factors has None"),
    ({"pooling_factors": None}, "pooling_factors is None; pass a list"),
    ({"pooling_factors": {"f0": 1.0}}, "pooling_factors is {.*}; pass a list"),
    ({"num_poolings": [math.inf]}, "num_poolings has inf"),
    ({"batch_sizes": [-1]}, "batch_sizes has -1"),
    ({"feature_names": "f0"}, r"feature_names is 'f0'.*\['f0'\]"),
    ({"cache_params": 3}, "cache_params is 3; .*CacheParams"),
    ({"cache_params": CacheParams(load_factor="a")}, "load_factor 'a'"),
    ({"bounds_check_mode": 1}, "bounds_check_mode is 1; .*BoundsCheckMode"),
    ({"output_dtype": torch.float16}, "output_dtype is torch.float16; .*DataType"),
    ({"device_group": 3}, "device_group is 3"),
    ({"key_value_params": 3}, "key_value_params is 3; .*KeyValueParams"),
    ({"enforce_hbm": "no"}, "enforce_hbm is 'no'; pass True or False"),
]


@pytest.mark.parametrize(("fields", "told"), CONSTRAINTS)
def test_constraints_of_a_table(fields: dict[str, Any], told: str) -> None:
    refused = pytest.raises(ConfigError, match=f"constraints of table 't0': .*{told}")
    with refused:
        make_planner(topology=gpus(), constraints=only(**fields))
    for part in PARTS:
        with refused:
            make_part(part, constraints=only(**fields))


SHARED: list[tuple[dict[str, Any], str]] = [
    ({"topology": "h100"}, "topology is a str, 'h100'"),
    ({"constraints": ["t0"]}, "constraints is a list"),
    ({"constraints": {"t0": {}}}, "constraints of table 't0' is a dict"),
    ({"constraints": {3: None}}, "a table's name in constraints is a int, 3"),
    ({"cost_model": 3}, "cost_model is 3: pass 'auto'"),
    ({"cost_model": "h10"}, "unknown cost model 'h10'"),
    ({"comms_model": 3}, "comms_model is a int, 3"),
    ({"profiles": [3.0]}, "profiles is a list"),
]
"""Arguments of the planner and of every part."""
OF_PARTS: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    *((part, *case) for case in SHARED for part in PARTS),
    *(
        (NeuroShardEnumerator, {"batch_size": size}, "batch_size is ")
        for size in (0, True, 2.5, "64", None)
    ),
    *(
        (part, {"placement": {"t0": [0]}}, "placement is a dict")
        for part in (NeuroShardEnumerator, NeuroShardPartitioner, NeuroShardProposer)
    ),
    *((part, {"costs": 3}, "costs is a int, 3") for part in PARTS[1:]),
]


@pytest.mark.parametrize(("part", "given", "told"), OF_PARTS)
def test_arguments_of_a_part(
    part: Callable[..., Any], given: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        make_part(part, **given)


PLANNER: list[tuple[dict[str, Any], str]] = [
    *SHARED,
    ({"batch_size": "512"}, "batch_size is a str, '512'"),
    ({"batch_size": 0}, "batch_size is 0: .* from 1"),
    ({"batch_size": True}, "batch_size is True"),
    ({"batch_size": math.nan}, "batch_size is nan"),
    ({"batch_size": 10**30}, "batch_size is 1000.* to 2,147,483,647"),
    ({"calibrate": True}, "calibrate must .* True"),
    ({"calibrate": None}, "calibrate must .* None"),
    ({"dense_ms": "x"}, "dense_ms must .* 'x'"),
    ({"dense_ms": math.nan}, "dense_ms must .* nan"),
    ({"dense_ms": -3.0}, "dense_ms"),
    ({"pipeline_type": "often"}, "pipeline_type 'often' is unknown"),
    ({"search": 3}, "3"),
    ({"stash_bytes": "1e9"}, "stash_bytes is a str, '1e9'"),
    ({"timeout_seconds": "60"}, "timeout_seconds must .* '60'"),
    ({"timeout_seconds": -1}, "timeout_seconds must .* -1"),
    ({"placement_constraints": {"t0": [0]}}, "placement_constraints is a dict"),
]


@pytest.mark.parametrize(("given", "told"), PLANNER)
def test_arguments_of_the_planner(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make_planner(**{"topology": gpus(), **given})


class Broken(AnalyticCostModel):
    """Predicts one value for all tables."""

    name = "broken"

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def predict_sums(self, sums_SE: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.full((len(sums_SE), 2), self.value)


CPUS = Topology(2, "cpu")
NO_RANKS = PlacementConstraints(forbid_ranks=[0, 1])
NO_RANK = "forbid_ranks leave no rank for table 't0'"
WIDE = {"module": make_ebc([(1000, 4096)])}
NARROW = {"module": make_ebc([(1000, 1)]), "constraints": each(1, "table_wise")}
TOO_WIDE = r"table 't0' \(embedding_dim=4096\).*(2,048|1,024)"


def pinned(kind: str, *ranks: int) -> dict[str, Any]:
    """A table of one sharding type that may be on these of four ranks."""
    return {
        "topology": gpus(4, 2),
        "constraints": only(sharding_types=[kind]),
        "placement_constraints": PlacementConstraints(pin={"t0": ranks}),
    }


def no_cache(load: float) -> dict[str, Any]:
    params, kernels = CacheParams(load_factor=load), ["fused_uvm_caching"]
    return {"constraints": only(cache_params=params, compute_kernels=kernels)}


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"module": None}, "model is a NoneType"),
    ({"module": [bags()]}, "model is a list"),
    ({"sharders": None}, "sharders is None: pass a list"),
    ({"sharders": get_default_sharders()[0]}, "sharders is <.*: pass a list"),
    ({"sharders": [EmbeddingCollectionSharder]}, r"sharders\[0\] is .* not a sharder"),
    ({"placement_constraints": NO_RANKS}, NO_RANK),
    ({"placement_constraints": NO_RANKS, "topology": CPUS}, NO_RANK),
    (
        {"placement_constraints": NO_RANKS, "partitioner": GreedyPerfPartitioner()},
        NO_RANK,
    ),
    ({"placement_constraints": NO_RANKS, "proposer": UniformProposer()}, NO_RANK),
    (pinned("row_wise", 1), "'t0' may only be sharded row_wise, "),
    (pinned("data_parallel", 1), "'t0' may only be sharded data_parallel, "),
    (pinned("table_row_wise", 1, 2), "'t0' may only be sharded table_row_wise, "),
    (no_cache(0.0), "'t0'.* above 0 and below 1, got 0"),
    (no_cache(1.0), "'t0'.* above 0 and below 1, got 1"),
    ({"cost_model": Broken(math.nan)}, "'broken' predicts .*nan.* for t0"),
    ({"cost_model": Broken(-1.0)}, "'broken' predicts .*-1.* for t0"),
    ({**WIDE, "constraints": each(1, "table_wise", "row_wise")}, TOO_WIDE),
    ({**WIDE, "constraints": each(1, "column_wise", min_partition=4096)}, TOO_WIDE),
    # However large the table.
    ({"module": make_ebc([(2**31, 6)])}, r"\(embedding_dim=6\).* 4, got 6\. Pad embed"),
    (NARROW, r"got 1\. Pad embedding_dim \(1\)$"),
    ({**NARROW, "topology": CPUS}, r"got 1\. Pad .*, or allow data_parallel$"),
    (
        {**NARROW, "module": sequences(2, prefix="t"), "topology": CPUS},
        r"got 2\. Pad embedding_dim \(2\)$",
    ),
]


def too_large(rows: int, topology: Topology) -> tuple[dict[str, Any], str]:
    module = bags(bag_config(0, rows, 128))
    told = rf"'t0' \(num_embeddings={rows}, embedding_dim=128, fp32\) needs \d"
    return {"module": module, "topology": topology}, told


UNPLANNED: list[tuple[dict[str, Any], str]] = [
    too_large(3, gpus(hbm_cap=73, ddr_cap=73)),
    too_large(3, Topology(2, "cpu", ddr_cap=73)),
    too_large(2 * 10**9, CPUS),  # 1 TB
    too_large(2**52, gpus()),
    ({"topology": gpus(hbm_cap=2 * MIB), "batch_size": 65_536}, "t0"),  # its outputs
    (
        # TorchRec's proposers know no common width, nor does its own planner.
        {
            "module": sequences(64, 64, prefix="t"),
            "constraints": by_table(
                sharding_types=[["column_wise"]] * 2, min_partition=[16, 32]
            ),
            "proposer": UniformProposer(),
        },
        "one module into different widths",
    ),
]
CASES: list[tuple[type[Exception], dict[str, Any], str]] = [
    *((ConfigError, *case) for case in MISTAKES),
    *((PlannerError, *case) for case in UNPLANNED),
    (
        ProfileError,
        {"profiles": {"f00": FeatureProfile(batch_size=1, num_lookups=1.0)}},
        "'f00', which no .* did you mean 'f0'",
    ),
]


# NumPy warns where infinities are subtracted, before the error tells why.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(("error", "given", "told"), CASES)
def test_what_is_not_planned(
    error: type[Exception], given: dict[str, Any], told: str
) -> None:
    settings = {"topology": gpus(), **given}
    module = settings.pop("module", bags())
    sharders = settings.pop("sharders", get_default_sharders())
    planner = make_planner(**settings)
    with pytest.raises(error, match=told):
        planner.plan(module, sharders)
    assert planner.last_result is None


def test_ranks_are_needed_by_tables_and_by_collective_plans() -> None:
    planner = make_planner(topology=gpus(), placement_constraints=NO_RANKS)
    assert planner.plan(nn.Linear(2, 2), get_default_sharders()).plan == {}
    with pytest.raises(RuntimeError, match="init_process_group first, or call plan"):
        planner.collective_plan(bags())
    with pytest.raises(ConfigError, match="process group"):
        NeuroShardPlanner()
