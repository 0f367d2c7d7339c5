"""Mistakes that everyone makes, and what they are told."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import CacheAlgorithm, CacheParams
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from tests.builders import bag_sharders, make_ebc, make_planner, only
from torchrec_neuroshard.errors import ConfigError, ProfileError
from torchrec_neuroshard.planner.options.checks import check_profiles
from torchrec_neuroshard.planner.planners import NeuroShardPlanner
from torchrec_neuroshard.profiles import FeatureProfile

SIZES = [(1000, 64)] * 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pooling_factors": [1.0, math.nan]}, r"'t0': pooling_factors\[1\] is nan"),
        ({"num_poolings": [-3.0]}, r"'t0': num_poolings\[0\] is -3.0"),
        ({"min_partition": -4}, "'t0': min_partition is -4"),
        ({"sharding_types": "row_wise"}, "'t0': sharding_types is 'row_wise'"),
        ({"batch_sizes": [8, 8]}, "'t0': batch_sizes has 2 values"),
        ({"cache_params": CacheParams(load_factor=0.0)}, r"'t0'.*load_factor is 0\.0"),
        ({"cache_params": CacheParams(load_factor=1.0)}, r"'t0'.*load_factor is 1\.0"),
        ({"enforce_hbm": True}, "'t0'.*enforce_hbm is True"),
        (
            {
                "cache_params": CacheParams(
                    algorithm=CacheAlgorithm.LFU, prefetch_pipeline=True
                )
            },
            "'t0'.*LFU, and caches are loaded ahead",
        ),
    ],
)
def test_values_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    cached = {"compute_kernels": ["fused_uvm_caching"], **fields}
    with pytest.raises(ConfigError, match=message):
        make_planner(2, "cuda", constraints=only(**cached))


@pytest.mark.parametrize(
    ("name", "factors", "message"),
    [
        ("t0", [1.0, 3.0], "'t0': pooling_factors has 2 values for 1 feature"),
        ("t_0", [3.0], "table 't_0', which the model .* did you mean 't0'"),
    ],
)
def test_constraints_that_no_table_reads_are_pointed_out(
    name: str, factors: list[float], message: str
) -> None:
    constraints = only(name, pooling_factors=factors)
    planner = make_planner(2, "cuda", constraints=constraints)
    with pytest.warns(UserWarning, match=message):
        plan = planner.plan(make_ebc(SIZES), bag_sharders())
    assert set(plan.plan[""]) == {"t0", "t1"} and planner.last_result is not None
    with pytest.warns(UserWarning, match=message):
        report = planner.evaluate(plan, make_ebc(SIZES), bag_sharders())
    for warnings in (planner.last_result.warnings, report.warnings):
        assert any(re.search(message, text) for text in warnings)


def test_things_of_another_kind_are_named() -> None:
    odd: Any = {"t0": {"pooling_factors": [3.0]}}
    given: list[tuple[str, Any, str]] = [
        ("constraints", odd, "'t0' is a dict"),
        ("constraints", ["t0"], "constraints is a list"),
        ("profiles", [3.0], "profiles is a list"),
        ("placement_constraints", odd, "placement_constraints is a dict"),
        ("topology", "h100", "topology is a str, 'h100'"),
        *(("batch_size", size, "samples per rank") for size in (-1, math.nan, "512")),
    ]
    for name, value, message in given:
        with pytest.raises(ConfigError, match=message):
            make_planner(**{name: value})
    with pytest.raises(ConfigError, match="process group"):
        NeuroShardPlanner()
    planner, model = make_planner(2), make_ebc(SIZES)
    with pytest.raises(RuntimeError, match="init_process_group first, or plan"):
        planner.collective_plan(model)
    swapped: Any = bag_sharders()
    with pytest.raises(ConfigError, match="model is a list"):
        planner.plan(swapped, model)
    classes: Any = [EmbeddingBagCollectionSharder]
    with pytest.raises(ConfigError, match=r"sharders\[0\] is .* no sharder"):
        planner.plan(model, classes)


class MyCollection(EmbeddingBagCollection):
    """Another class than the sharder's."""


def test_tables_that_no_sharder_takes_are_named() -> None:
    model = nn.ModuleDict({"a": make_ebc(SIZES), "b": make_ebc([(9, 8)])})
    model["b"].__class__ = MyCollection
    message = "tables 't0' are in no plan.* class of module 'b', MyCollection"
    planner = make_planner(2, "cuda")
    with pytest.warns(UserWarning, match=message):
        plan = planner.plan(model, bag_sharders())
    assert set(plan.plan) == {"a"} and planner.last_result is not None
    assert any(re.search(message, text) for text in planner.last_result.warnings)


def test_check_profiles() -> None:
    profile = FeatureProfile(batch_size=1, num_lookups=1.0)
    model = nn.ModuleDict({"a": make_ebc([(10, 8)]), "b": nn.Linear(1, 1)})
    check_profiles(model, {"f0": profile})
    check_profiles(model, {})
    with pytest.raises(ProfileError, match=r"'f00', which no .* did you mean 'f0'\?"):
        check_profiles(model, {"f00": profile})
    odd: Any = {"f0": 3.0}
    with pytest.raises(ProfileError, match=r"\['f0'\] is a float"):
        check_profiles(model, odd)
