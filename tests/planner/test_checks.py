"""Mistakes that everyone makes, and what they are told."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.types import PlannerError
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from tests.builders import bag_sharders, make_ebc, make_planner
from torchrec_neuroshard.errors import ConfigError, ProfileError, suggestion
from torchrec_neuroshard.planner.options.checks import (
    check_profiles,
    odd_batch_size,
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
        ({"pooling_factors": [math.nan]}, r"'t0': pooling_factors\[0\] is nan; give a"),
        ({"pooling_factors": [1.0, math.inf]}, r"'t0': pooling_factors\[1\] is inf"),
        ({"pooling_factors": [-3.0]}, r"'t0': pooling_factors\[0\] is -3.0"),
        ({"num_poolings": [math.nan]}, r"'t0': num_poolings\[0\] is nan"),
        ({"batch_sizes": [-1]}, r"'t0': batch_sizes\[0\] is -1"),
        ({"min_partition": -4}, "'t0': min_partition is -4; give the columns"),
        (
            {"pooling_factors": 20.0},
            r"'t0': pooling_factors is 20\.0, not a list; give",
        ),
        ({"sharding_types": "row_wise"}, r"sharding_types is 'row_.*\['row_wise'\]"),
    ],
)
def test_values_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_planner(2, "cuda", constraints=on_t0(**fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_partition": 0}, "'t0': min_partition=0 counts as not given"),
        ({"sharding_types": []}, "'t0': sharding_types is empty, which counts as not"),
        ({"compute_kernels": []}, "'t0': compute_kernels is empty"),
        ({"pooling_factors": [1.0, 3.0]}, "has 2 values for 1 feature; each feature"),
    ],
)
def test_what_torchrec_lets_pass(fields: dict[str, Any], message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        planner = make_planner(2, "cuda", constraints=on_t0(**fields))
        planner.plan(make_ebc(SIZES), bag_sharders())
    assert planner.last_result is not None
    assert any(re.search(message, text) for text in planner.last_result.warnings)


def test_misspelt_type_is_pointed_out_before_torchrec_gives_up() -> None:
    message = "lists 'colum_wise', which TorchRec does not have; did you mean 'column_w"
    with pytest.warns(UserWarning, match=message):
        planner = make_planner(
            2, "cuda", constraints=on_t0(sharding_types=["colum_wise"])
        )
    with pytest.raises(RuntimeError, match="No available sharding type"):
        planner.plan(make_ebc(SIZES), bag_sharders())


def test_things_of_another_kind_are_named() -> None:
    odd: Any = {"t0": {"pooling_factors": [3.0]}}
    for options, message in (
        ({"constraints": odd}, r"'t0' is a dict, \{'pool.* not a ParameterConstraints"),
        ({"constraints": ["t0"]}, "constraints is a list, .*: pass table -> Param"),
        ({"profiles": [3.0]}, "profiles is a list, .*: pass what profile_inputs"),
        ({"placement_constraints": odd}, "placement_constraints is a dict"),
        ({"topology": "h100"}, r"topology is a str, 'h100', .*: topology_for\("),
    ):
        arguments: Any = {"topology": Topology(2, compute_device="cuda"), **options}
        with pytest.raises(ConfigError, match=message):
            NeuroShardPlanner(**arguments)
    with pytest.raises(ConfigError, match="topology: the process has no process group"):
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


@pytest.mark.parametrize("size", [-1, math.nan, math.inf, "512", True])
def test_batch_sizes_that_cannot_be(size: Any) -> None:
    with pytest.raises(ConfigError, match=r"samples per rank, such as 512; got"):
        make_planner(2, "cuda", batch_size=size)


def test_odd_batch_sizes() -> None:
    assert odd_batch_size(None) == odd_batch_size(512) == ()
    assert "counts as not given" in odd_batch_size(0)[0]
    with pytest.warns(UserWarning, match=r"batch_size=1\.5 is no whole number"):
        planner = make_planner(2, "cuda", batch_size=1.5)
        planner.plan(make_ebc(SIZES), bag_sharders())


def test_check_profiles() -> None:
    profile = FeatureProfile(batch_size=1, num_lookups=1.0)
    model = nn.ModuleDict({"a": make_ebc([(10, 8)]), "b": nn.Linear(1, 1)})
    check_profiles(model, {"f0": profile})
    check_profiles(model, {})
    with pytest.raises(ProfileError, match=r"'f00', which no .* did you mean 'f0'\?"):
        check_profiles(model, {"f00": profile})
    with pytest.raises(ProfileError, match="the features are none"):
        check_profiles(nn.Linear(1, 1), {"x": profile})


def test_profile_of_another_type_is_named() -> None:
    odd: Any = {"f0": 3.0}
    planner = make_planner(2, "cuda", profiles=odd)
    with pytest.raises(ProfileError, match=r"\['f0'\] is a float, not a FeatureProf"):
        planner.plan(make_ebc(SIZES), bag_sharders())


def test_suggestions_name_each_thing_once() -> None:
    twice = suggestion("usr", ["user", "user", "item"], "tables")
    assert twice == "did you mean 'user'?"
    others = suggestion("xyz", ["user", "item"], "tables")
    assert others == "the tables are 'item', 'user'."
    many = suggestion("x", [str(n) for n in range(20)], "tables")
    assert many.endswith("'18', '19' and more.")
    assert suggestion("USER_ID", ["User_Id", "item"], "tables") == (
        "did you mean 'User_Id'?"
    )


def test_table_that_fits_nowhere_is_named_first() -> None:
    planner = make_planner(
        2, "cuda", topology_arguments={"hbm_cap": 2**30, "ddr_cap": 2**20}
    )
    with pytest.raises(PlannerError) as caught:
        planner.plan(make_ebc([(10**9, 64), (1000, 64)]), bag_sharders())
    first = str(caught.value).splitlines()[0]
    assert "table 't0'" in first and "num_embeddings=1000000000" in first
    assert "fits no rank" in first or "needs" in first
    assert "world_size" in first


def test_tables_in_host_memory_are_the_first_thing_said() -> None:
    planner = make_planner(
        2, "cuda", topology_arguments={"hbm_cap": 2**30, "ddr_cap": 2**40}
    )
    planner.plan(make_ebc([(10**8, 64), (1000, 64)]), bag_sharders())
    assert planner.last_result is not None
    first = planner.last_result.warnings[0]
    assert "1 of 2 tables are in the host's memory: 't0' (fused_uvm" in first
