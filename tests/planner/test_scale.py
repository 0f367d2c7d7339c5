"""What keeps planning quick for thousands of tables on hundreds of ranks."""

from __future__ import annotations

import copy

import pytest
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import Topology

from tests.builders import analytic, bag_sharders, each, make_ebc
from torchrec_neuroshard.planner import NeuroShardEnumerator, PlanCosts
from torchrec_neuroshard.planner.options.spread_options import (
    SpreadOption,
    sample_shards,
)
from torchrec_neuroshard.planner.parts.search_space import MANY_TABLES, other_caches

NODE = Topology(64, "cuda", local_world_size=64)


@pytest.fixture
def costs() -> PlanCosts:
    return PlanCosts(NODE, **analytic())


@pytest.mark.parametrize("rows", [3, 1001])
def test_shards_are_listed_as_torchrec_would_when_they_are_read(
    costs: PlanCosts, rows: int
) -> None:
    enumerator = NeuroShardEnumerator(NODE, 64, costs=costs)
    ebc = make_ebc([(rows, 64), (500, 32)])
    options = enumerator.enumerate(ebc, bag_sharders())
    later = [o for o in options if isinstance(o, SpreadOption)]
    assert {o.sharding_type for o in later} == {"row_wise", "data_parallel"}
    assert not any(o.is_listed for o in later)
    stock = EmbeddingEnumerator(NODE, 64).enumerate(ebc, bag_sharders())
    theirs = {
        (o.name, o.sharding_type): [(s.size, s.offset) for s in o.shards] for o in stock
    }
    for option in later:
        samples = [(tuple(s.size), s.storage) for s in sample_shards(option)]
        assert option.num_shards == 64
        boxes = [(s.size, s.offset) for s in option.shards]
        assert boxes == theirs[option.name, option.sharding_type]
        listed = [(tuple(s.size), s.storage) for s in option.shards]
        assert list(dict.fromkeys(listed)) == samples
        assert option.is_listed and option.num_shards == 64


@pytest.mark.parametrize("num_tables", [2, 10_000])
def test_caches_of_other_sizes_list_no_shards(
    costs: PlanCosts, num_tables: int
) -> None:
    constraints = each(1, "row_wise", compute_kernels=["fused_uvm_caching"])
    enumerator = NeuroShardEnumerator(NODE, 64, constraints, costs=costs)
    ebc = make_ebc([(1_000_001, 64)])
    (option,) = enumerator.enumerate(ebc, bag_sharders())
    found = other_caches(option, NODE, costs.reader, num_tables)
    assert len(found) == (3 if num_tables > MANY_TABLES else 9)
    enumerator.populate_estimates(found)
    for other in (option, *found):
        assert isinstance(other, SpreadOption) and not other.is_listed
    # The smaller the cache, the less memory and the longer.
    sizes = [other.shards[0].storage.hbm for other in found]
    costs_ms = [other.shards[0].perf.total for other in found]
    assert sizes == sorted({*sizes}) and costs_ms == sorted(costs_ms, reverse=True)


def test_copies_of_options_can_be_changed(costs: PlanCosts) -> None:
    """TorchRec and this package change options, shards and perfs in place."""
    enumerator = NeuroShardEnumerator(NODE, 64, costs=costs)
    options = enumerator.enumerate(make_ebc([(1001, 64), (500, 32)]), bag_sharders())
    kept = enumerator.last_stored_search_space
    assert kept is not None
    assert list(map(hash, kept)) == list(map(hash, options))
    copied = copy.deepcopy(options)
    for option in copied:
        option.input_lengths.append(1.0)
        option.compute_kernel = "dense"
        for shard in option.shards:
            shard.rank = 1
            shard.perf.fwd_compute += 1.0
        option.shards.append(option.shards[0])
    assert list(map(hash, kept)) == list(map(hash, options))
    assert all(o.tensor is c.tensor for o, c in zip(options, copied, strict=True))
    assert [o.input_lengths for o in options] == [[1.0]] * len(options)
