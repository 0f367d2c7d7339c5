"""Mistakes that everyone makes, and what they are told."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from tests.builders import bag_sharders, make_ebc, make_planner
from torchrec_neuroshard.errors import ConfigError, ProfileError
from torchrec_neuroshard.planner.options.checks import (
    check_profiles,
    unmatched_constraints,
)
from torchrec_neuroshard.planner.planners import NeuroShardPlanner
from torchrec_neuroshard.profiles import FeatureProfile

SIZES = [(1000, 64)] * 2


def on_t0(**fields: Any) -> dict[str, ParameterConstraints]:
    return {"t0": ParameterConstraints(**fields)}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pooling_factors": [math.nan]}, r"'t0': pooling_factors\[0\] is nan"),
        ({"pooling_factors": [1.0, math.inf]}, r"'t0': pooling_factors\[1\] is inf"),
        ({"num_poolings": [-3.0]}, r"'t0': num_poolings\[0\] is -3.0"),
        ({"min_partition": -4}, "'t0': min_partition is -4"),
        ({"pooling_factors": 20.0}, r"'t0': pooling_factors is 20\.0"),
        ({"sharding_types": "row_wise"}, "'t0': sharding_types is 'row_wise'"),
        ({"batch_sizes": [8, 8]}, "'t0': batch_sizes has 2 values"),
    ],
)
def test_values_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_planner(2, "cuda", constraints=on_t0(**fields))


def test_pooling_factors_of_other_features_are_pointed_out() -> None:
    message = "'t0': pooling_factors has 2 values for 1 feature"
    planner = make_planner(2, "cuda", constraints=on_t0(pooling_factors=[1.0, 3.0]))
    with pytest.warns(UserWarning, match=message):
        planner.plan(make_ebc(SIZES), bag_sharders())
    assert planner.last_result is not None
    assert any(message in text for text in planner.last_result.warnings)


def test_misspelt_type_is_pointed_out_before_torchrec_gives_up() -> None:
    message = "lists 'colum_wise', .*; did you mean 'column_w"
    with pytest.warns(UserWarning, match=message):
        planner = make_planner(
            2, "cuda", constraints=on_t0(sharding_types=["colum_wise"])
        )
    with pytest.raises(RuntimeError, match="No available sharding type"):
        planner.plan(make_ebc(SIZES), bag_sharders())


def test_things_of_another_kind_are_named() -> None:
    odd: Any = {"t0": {"pooling_factors": [3.0]}}
    for options, message in (
        ({"constraints": odd}, r"'t0' is a dict"),
        ({"constraints": ["t0"]}, "constraints is a list"),
        ({"profiles": [3.0]}, "profiles is a list"),
        ({"placement_constraints": odd}, "placement_constraints is a dict"),
        ({"topology": "h100"}, "topology is a str, 'h100'"),
    ):
        arguments: Any = {"topology": Topology(2, compute_device="cuda"), **options}
        with pytest.raises(ConfigError, match=message):
            NeuroShardPlanner(**arguments)
    with pytest.raises(ConfigError, match="process group"):
        NeuroShardPlanner()
    planner = make_planner(2, "cuda")
    swapped: Any = bag_sharders()
    with pytest.raises(ConfigError, match=r"model is a list, .* not a Module"):
        planner.plan(swapped, make_ebc(SIZES))
    for sharders in ([EmbeddingBagCollectionSharder], [None]):
        with pytest.raises(
            ConfigError, match=r"sharders\[0\] is .* no sharder: pass ob"
        ):
            planner.plan(make_ebc(SIZES), sharders)


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


def test_constraints_of_a_table_that_is_not_there() -> None:
    constraints = {"t_0": ParameterConstraints(pooling_factors=[3.0])}
    planner = make_planner(2, "cuda", constraints=constraints)
    message = "name table 't_0', which the model does not have; did you mean 't0'"
    with pytest.warns(UserWarning, match=message):
        plan = planner.plan(make_ebc(SIZES), bag_sharders())
    assert set(plan.plan[""]) == {"t0", "t1"}
    with pytest.warns(UserWarning, match=message):
        report = planner.evaluate(plan, make_ebc(SIZES), bag_sharders())
    assert any(re.search(message, text) for text in report.warnings)


def test_tables_of_one_name_and_several_numbers_of_features() -> None:
    """Constraints mean all of them: none is said to be missing."""
    model = nn.ModuleDict({"a": make_ebc([(10, 8)]), "b": make_ebc([(10, 8)])})
    assert unmatched_constraints(model, on_t0(pooling_factors=[2.0])) == ()


@pytest.mark.parametrize("size", [-1, math.nan, "512"])
def test_batch_sizes_that_cannot_be(size: Any) -> None:
    with pytest.raises(ConfigError, match=r"samples per rank, such as 512; got"):
        make_planner(2, "cuda", batch_size=size)


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
