"""Caches of rows: sizes that the search chooses, what they cost, hosts' memory."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchrec import EmbeddingBagCollection
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import CacheAlgorithm, CacheParams, ShardingPlan

from tests.builders import (
    GIB,
    MIB,
    bag_config,
    bag_sharders,
    bags,
    cost_of,
    each,
    entries_of,
    entry_of,
    gpus,
    make_ebc,
    make_planner,
    only,
)
from torchrec_neuroshard import NeuroShardPlanner, rehearse
from torchrec_neuroshard.cost_models import load_cost_model
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.planner import (
    load_plan,
    save_plan,
)
from torchrec_neuroshard.planner.options.table_reader import OFFLOADED_KERNELS

pytestmark = pytest.mark.filterwarnings("ignore:no cost model was measured")

CACHED = "fused_uvm_caching"
HBM = 512 * MIB
SIZES = [(2_000_000, 64), (1_500_000, 64), (3_000_000, 32), (400_000, 128)]
"""1.45 GiB of tables."""


def model() -> EmbeddingBagCollection:
    return make_ebc(SIZES)


def planner_of(
    *, constraints: Any = None, pipeline_type: Any = None
) -> NeuroShardPlanner:
    return make_planner(
        topology=gpus(2, hbm_cap=HBM, ddr_cap=8 * GIB),
        batch_size=512,
        cost_model=load_cost_model("h100", device_type="cuda"),
        comms_model=None,
        pipeline_type=pipeline_type,
        constraints=constraints or each(len(SIZES), pooling_factors=[10.0]),
    )


@pytest.fixture(scope="module")
def both() -> tuple[NeuroShardPlanner, ShardingPlan]:
    """A planner that chooses sizes, and its plan."""
    planner = planner_of()
    return planner, planner.plan(model(), bag_sharders())


Both = tuple[NeuroShardPlanner, ShardingPlan]


def cached(plan: ShardingPlan) -> list[Any]:
    return [e for e in entries_of(plan).values() if e.compute_kernel == CACHED]


def test_sizes_fill_the_memory_that_is_left(both: Both) -> None:
    planner, plan = both
    loads = [e.cache_params.load_factor for e in cached(plan)]
    assert loads and all(0 < load < 1 for load in loads)
    used = np.zeros(2)
    for option in planner.get_selected_options():
        for shard in option.shards:
            used[shard.rank] += shard.storage.hbm
    assert (used <= HBM).all() and used.max() > 0.97 * HBM


@pytest.mark.one_release
def test_a_chosen_size_beats_torchrecs(both: Both) -> None:
    fixed = each(
        len(SIZES),
        compute_kernels=[CACHED],
        pooling_factors=[10.0],
        cache_params=CacheParams(load_factor=0.2),
    )
    given = planner_of(constraints=fixed)
    plan = given.plan(model(), bag_sharders())
    assert cost_of(both[0]) < cost_of(given)
    assert {e.cache_params.load_factor for e in cached(plan)} == {0.2}


def test_the_size_that_a_sharder_asks_for_stays() -> None:
    constraints = only(compute_kernels=[CACHED], pooling_factors=[10.0])
    sharder = EmbeddingBagCollectionSharder(fused_params={"cache_load_factor": 0.07})
    planner = planner_of(constraints=constraints)
    plan = planner.plan(model(), [sharder])
    assert entry_of(plan).cache_params is None  # the sharder's reaches the kernel
    found = {t.table: t.host for t in planner.report().tables}["t0"]
    assert found is not None and found.load_factor == 0.07


def test_evaluating_a_plan_reads_its_sizes(both: Both) -> None:
    planner, plan = both[0], copy.deepcopy(both[1])
    report = planner.evaluate(plan, model(), bag_sharders())
    assert report.critical_path_ms == pytest.approx(cost_of(planner))
    cached(plan)[0].cache_params = CacheParams(load_factor=1e-3)
    slower = planner.evaluate(plan, model(), bag_sharders())
    assert slower.critical_path_ms > report.critical_path_ms


def test_plan_files_keep_the_sizes(both: Both, tmp_path: Path) -> None:
    planner, plan = both
    path = tmp_path / "plan.json"
    save_plan(plan, path, model=model(), planner=planner)
    assert load_plan(path, model=model(), planner=planner) == plan
    found = rehearse(model(), plan, planner.topology, bag_sharders(), batch_size=512)
    assert sum(r.cache_bytes for r in found.ranks) > 0


def test_caches_are_made_ready_for_being_loaded_ahead() -> None:
    """Without it TorchRec trains on, and logs that results may be wrong."""
    ahead, module = "train_prefetch_sparse_dist", bags(bag_config(0, 1000, 64))
    plain = EmbeddingBagCollectionSharder()

    def plan_for(pipeline: str) -> ShardingPlan:
        planner = make_planner(
            topology=gpus(),
            pipeline_type=pipeline,
            dense_ms=1.0,
            constraints=only(compute_kernels=[CACHED]),
        )
        return planner.plan(module, [plain])

    def faults(plan: ShardingPlan, sharder: Any, pipeline: str) -> str:
        given = module, plan, gpus(), [sharder]
        return str(rehearse(*given, batch_size=64, pipeline_type=pipeline))

    unready = plan_for("train_sparse_dist")
    assert entry_of(plan_for(ahead)).cache_params.prefetch_pipeline
    assert "every rank can" in faults(plan_for(ahead), plain, ahead)
    assert "'t0': train_prefetch_sparse_dist needs" in faults(unready, plain, ahead)
    assert "every rank can" in faults(unready, plain, "train_sparse_dist")
    asks = EmbeddingBagCollectionSharder(fused_params={"prefetch_pipeline": True})
    assert "every rank can" in faults(unready, asks, ahead)


@pytest.mark.parametrize(
    "fields", [{"algorithm": CacheAlgorithm.LFU}, {"prefetch_pipeline": False}]
)
def test_caches_that_cannot_be_loaded_ahead(fields: Any) -> None:
    constraints = only(cache_params=CacheParams(**fields))
    planner_of(constraints=constraints)
    with pytest.raises(ConfigError, match=r"t0.*train_prefetch_sparse_dist"):
        planner_of(constraints=constraints, pipeline_type="train_prefetch_sparse_dist")


@pytest.mark.one_release
def test_the_report_says_what_host_memory_costs(both: Both) -> None:
    planner, plan = both
    report = planner.report()
    hosts = {t.table: t.host for t in report.tables if t.host}
    kernels = {n: e.compute_kernel for n, e in entries_of(plan).items()}
    assert set(hosts) == {n for n, k in kernels.items() if k in OFFLOADED_KERNELS}
    for name, host in hosts.items():
        assert host.ms_per_iteration > 0
        assert host.rank_bytes and all(size > 0 for _, size in host.rank_bytes)
        line = next(x for x in str(report).splitlines() if f" {name} (" in x)
        assert f"{host.ms_per_iteration:.3f} ms per iteration" in line
        if kernels[name] == CACHED:
            assert host.load_factor is not None and host.missed is not None
            assert f"cache_load_factor {host.load_factor:.4g}" in line
