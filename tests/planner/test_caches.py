"""Row caches, tables in host memory, and maps from ids to rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from torch import nn
from torchrec import JaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.itep_embeddingbag import ITEPEmbeddingBagCollectionSharder
from torchrec.distributed.mc_embeddingbag import (
    ManagedCollisionEmbeddingBagCollectionSharder,
)
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import CacheAlgorithm, CacheParams
from torchrec.modules import mc_modules
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.itep_embedding_modules import ITEPEmbeddingBagCollection
from torchrec.modules.itep_modules import GenericITEPModule
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection

from tests.builders import (
    ATTACHES_OPTIMIZERS,
    GIB,
    META,
    MIB,
    FixedSearcher,
    analytic,
    bag_config,
    bag_sharders,
    bags,
    cost_of,
    each,
    entries_of,
    entry_of,
    gpus,
    last_result,
    make_ebc,
    make_planner,
    only,
)
from torchrec_neuroshard import NeuroShardPlanner, rehearse
from torchrec_neuroshard.bundles.find import load_cost_model
from torchrec_neuroshard.costs.task import ShardingTask
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.models.compute import PhysicalCostModel
from torchrec_neuroshard.planner import NeuroShardEnumerator, PlanCosts
from torchrec_neuroshard.planner.compat import torchrec_release
from torchrec_neuroshard.planner.option_facts import option_codecs
from torchrec_neuroshard.plans.plan_files import load_plan, save_plan
from torchrec_neuroshard.tables.features import table_features
from torchrec_neuroshard.tables.profile import profile_ids

pytestmark = [
    *ATTACHES_OPTIMIZERS,
    pytest.mark.filterwarnings("ignore:no cost model was measured"),
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning"),
]

CACHED = "fused_uvm_caching"
HBM = 512 * MIB
SIZES = [(2_000_000, 64), (1_500_000, 64), (3_000_000, 32), (400_000, 128)]
"""1.45 GiB of tables."""


def planner_of(constraints: Any = None) -> NeuroShardPlanner:
    return make_planner(
        topology=gpus(2, hbm_cap=HBM, ddr_cap=8 * GIB),
        batch_size=512,
        cost_model=load_cost_model("h100", device_type="cuda"),
        comms_model=None,
        constraints=constraints or each(len(SIZES), pooling_factors=[10.0]),
    )


def test_the_search_chooses_cache_sizes(tmp_path: Path) -> None:
    """Caches fill the memory left; evaluation, report and files show their sizes."""
    planner = planner_of()
    model = make_ebc(SIZES)
    plan = planner.plan(model, bag_sharders())
    cached = {n: e for n, e in entries_of(plan).items() if e.compute_kernel == CACHED}
    assert cached and all(0 < e.cache_params.load_factor < 1 for e in cached.values())
    used = np.zeros(2)
    for option in planner.get_selected_options():
        for shard in option.shards:
            used[shard.rank] += shard.storage.hbm
    assert (used <= HBM).all() and used.max() > 0.97 * HBM

    report = planner.report()
    for name, entry in cached.items():
        [host] = [t.host for t in report.tables if t.table == name]
        text = report.text(verbose=True)
        line = next(x for x in text.splitlines() if f" {name} " in x)
        assert host is not None and host.ms_per_iteration > 0
        assert host.rank_bytes and all(size > 0 for _, size in host.rank_bytes)
        assert f"{host.ms_per_iteration:.3f} ms per iteration" in line
        assert f"cache_load_factor {entry.cache_params.load_factor:.4g}" in line

    path = tmp_path / "plan.json"
    save_plan(plan, path, model=model, planner=planner)
    assert load_plan(path, model=model, planner=planner) == plan
    found = rehearse(model, plan, planner.topology, bag_sharders(), batch_size=512)
    assert sum(r.cache_bytes for r in found.ranks) > 0

    path_ms = planner.evaluate(plan, model, bag_sharders()).critical_path_ms
    assert path_ms == pytest.approx(cost_of(planner))
    next(iter(cached.values())).cache_params = CacheParams(load_factor=1e-3)
    slower = planner.evaluate(plan, model, bag_sharders())
    assert slower.critical_path_ms > path_ms


def test_an_unsplit_table_has_no_room_beside_grown_caches() -> None:
    """Caches fill both ranks, so half of the split table is all that it would free."""
    cached = each(2, "table_wise", compute_kernels=[CACHED], pooling_factors=[10.0])
    halves = only("t2", sharding_types=["column_wise"], compute_kernels=["fused"])

    def placed(task: ShardingTask) -> list[tuple[int, int, int]]:
        first, second, split = (ways[0] for ways in task.ways)
        return [(first, 64, 0), (second, 64, 1), (split, 32, 0), (split, 32, 1)]

    planner = make_planner(
        topology=gpus(2, hbm_cap=HBM, ddr_cap=8 * GIB),
        batch_size=512,
        cost_model=load_cost_model("h100", device_type="cuda"),
        comms_model=None,
        constraints=cached | halves,
        search=FixedSearcher(placed),
    )
    planner.plan(make_ebc([(9_000_000, 64)] * 2 + [(1_000_000, 64)]), bag_sharders())
    report = planner.report()
    assert all(r.used_bytes > 0.97 * (r.memory_bytes or 0) for r in report.ranks)
    [split] = report.splits
    assert split.table == "t2" and split.whole_rank is None
    assert "more than any rank has free" in split.line(report.critical_path_ms)


def test_given_cache_sizes_stay() -> None:
    given: dict[str, Any] = {"compute_kernels": [CACHED], "pooling_factors": [10.0]}
    asked = only("t1", cache_params=CacheParams(load_factor=0.2), **given)
    planner = planner_of(only(**given) | asked)
    sharder = EmbeddingBagCollectionSharder(fused_params={"cache_load_factor": 0.07})
    plan = planner.plan(make_ebc(SIZES), [sharder])
    assert entry_of(plan).cache_params is None  # the sharder's reaches the kernel
    assert entry_of(plan, "t1").cache_params.load_factor == 0.2
    found = {t.table: t.host for t in planner.report().tables}["t0"]
    assert found is not None and found.load_factor == 0.07


def test_caches_support_prefetching() -> None:
    """Otherwise TorchRec goes on training and only logs that results may be wrong."""
    ahead, plain = "train_prefetch_sparse_dist", "train_sparse_dist"
    module, limits = bags(bag_config(0, 1000, 64)), only(compute_kernels=[CACHED])
    unready, ready = (
        make_planner(
            topology=gpus(), pipeline_type=pipeline, dense_ms=1.0, constraints=limits
        ).plan(module, bag_sharders())
        for pipeline in (plain, ahead)
    )
    assert entry_of(ready).cache_params.prefetch_pipeline
    asks = EmbeddingBagCollectionSharder(fused_params={"prefetch_pipeline": True})
    for plan, sharders, pipeline, text in (
        (ready, bag_sharders(), ahead, "every rank can"),
        (unready, bag_sharders(), ahead, "'t0': train_prefetch_sparse_dist needs"),
        (unready, bag_sharders(), plain, "every rank can"),
        (unready, [asks], ahead, "every rank can"),
    ):
        given = module, plan, gpus(), sharders
        found = rehearse(*given, batch_size=64, pipeline_type=pipeline)
        assert text in str(found)
    for forbids in ({"prefetch_pipeline": False}, {"algorithm": CacheAlgorithm.LFU}):
        never = only(cache_params=CacheParams(**forbids))
        planner_of(never)
        with pytest.raises(ConfigError, match=r"t0.*train_prefetch_sparse_dist"):
            make_planner(topology=gpus(), constraints=never, pipeline_type=ahead)


# --- prices ---

SAMPLES = 65_536


def costs_and_option(kernel: str, ratio: float | None = None) -> tuple[PlanCosts, Any]:
    topology = gpus(2)
    constraints = only(
        sharding_types=["table_wise"],
        compute_kernels=[kernel],
        pooling_factors=[10.0],
        cache_params=None if ratio is None else CacheParams(load_factor=ratio),
    )
    model = load_cost_model("h100", device_type="cuda")
    costs = PlanCosts(topology, constraints, cost_model=model)
    enumerator = NeuroShardEnumerator(topology, SAMPLES, constraints, costs=costs)
    [option] = enumerator.enumerate(make_ebc([(2_000_000, 64)]), bag_sharders())
    return costs, option


def perf(kernel: str, ratio: float | None = None) -> Any:
    return costs_and_option(kernel, ratio)[1].shards[0].perf


def test_lookups_and_updates_use_the_link() -> None:
    costs, option = costs_and_option("fused_uvm")
    on_device, on_host = perf("fused"), option.shards[0].perf
    model = costs.cost_model
    assert isinstance(model, PhysicalCostModel)
    table = costs.reader.table(option)
    added = model.host_memory(table_features([table], 2 * SAMPLES), np.ones(1), None)[0]
    beside = (
        on_host.fwd_compute - on_device.fwd_compute,
        on_host.bwd_compute - on_device.bwd_compute,
    )
    np.testing.assert_allclose(beside, added)
    lookups = 2 * SAMPLES * 10 * 64 * 4 / (55.6e6 * model.constants.host_read)
    np.testing.assert_allclose(added[0], lookups, rtol=1e-3)
    # A cache spares the link, the more it holds.
    times = [perf("fused_uvm_caching", r).fwd_compute for r in (0.99, 0.3, 0.05)]
    assert on_device.fwd_compute < times[0] < times[1] < times[2]
    assert times[0] < on_host.fwd_compute


def test_half_precision_outputs_take_half_the_time() -> None:
    def outputs(tables: Any = (), fused: Any = None) -> tuple[Any, float]:
        limits = each(2, "table_wise")
        for name in tables:
            limits[name].output_dtype = DataType.FP16
        enumerator = NeuroShardEnumerator(gpus(2), SAMPLES, limits, **analytic())
        sharders: list[Any] = [EmbeddingBagCollectionSharder(fused_params=fused)]
        options = enumerator.enumerate(make_ebc([(1000, 64)] * 2), sharders)
        for option in options:
            option.shards[0].rank = 0
        assert enumerator.memory is not None
        wire_bytes = tuple(codec.wire_bytes for codec in option_codecs(options[0]))
        return wire_bytes, enumerator.memory.ranks(options)[0].activations

    wide, wide_bytes = outputs()
    assert wide == (4.0, 4.0)
    values = 2 * 64 * SAMPLES * 2  # of all samples; those of the own lie beside them
    for tables, fused, size in (
        (("t0", "t1"), None, 2.0),
        ((), {"output_dtype": SparseType.FP16}, 2.0),
        (("t0",), None, 4.0),  # TorchRec joins a module's outputs in the widest type
    ):
        found, found_bytes = outputs(tables, fused)
        assert found == (size, size)
        assert wide_bytes - found_bytes >= (4 - size) * values


# --- maps from ids to rows: managed collisions, and pruning while training ---


ROWS, PER_RANK, POOLING, INTERVAL = 1000, 64, 3.0, 5


def sorting(policy: Any, rows: int = ROWS) -> Any:
    return mc_modules.MCHManagedCollisionModule(
        zch_size=rows,
        device=META,
        eviction_policy=policy,
        eviction_interval=INTERVAL,
        buckets=2,
    )


def probing(evicts: bool) -> Any:
    # Importing these warns of a module of torch's.
    from torchrec.modules import hash_mc_evictions, hash_mc_modules

    name = hash_mc_evictions.HashZchEvictionPolicyName.LRU_EVICTION
    config = hash_mc_evictions.HashZchEvictionConfig(features=["f0"])
    return hash_mc_modules.HashZchManagedCollisionModule(
        zch_size=ROWS,
        device=META,
        total_num_buckets=2,
        eviction_policy_name=name if evicts else None,
        eviction_config=config if evicts else None,
    )


MAPS: dict[str, tuple[Callable[[], Any], int, int]] = {
    "LFU": (lambda: sorting(mc_modules.LFU_EvictionPolicy()), 24, 1),
    "LRU": (lambda: sorting(mc_modules.LRU_EvictionPolicy()), 24, 2),
    "distance": (lambda: sorting(mc_modules.DistanceLFU_EvictionPolicy()), 32, 2),
    "hash": (lambda: probing(False), 8, 0),
    "hash with eviction": (lambda: probing(True), 12, 0),
}
"""A map -> itself, its bytes per row, and the values that it keeps of each id."""


class OnCpus(ManagedCollisionEmbeddingBagCollectionSharder):
    """Offers row-wise sharding on CPUs as well."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return ["row_wise"]


def managed(ids: nn.Module, rows: int = ROWS, dim: int = 32) -> Any:
    inner = bags(bag_config(rows=rows, dim=dim))
    collection = mc_modules.ManagedCollisionCollection(
        {"t0": ids}, inner.embedding_bag_configs()
    )
    return ManagedCollisionEmbeddingBagCollection(inner, collection)


def row_planner(topology: Topology, kind: str, **arguments: Any) -> Any:
    limits = only(
        pooling_factors=[POOLING], sharding_types=[kind], compute_kernels=["fused"]
    )
    return make_planner(
        topology=topology, constraints=limits, batch_size=PER_RANK, **arguments
    )


@pytest.mark.skipif(
    torchrec_release() < (1, 8), reason="TorchRec shares buckets evenly since 1.8"
)
def test_buckets_that_ranks_cannot_share_are_refused() -> None:
    model = nn.ModuleDict({"mc": managed(MAPS["LFU"][0]())})
    sharders = [ManagedCollisionEmbeddingBagCollectionSharder()]
    message = "table 'mc.t0': the 3 ranks cannot share .* a multiple of 3 buckets"
    with pytest.raises(ConfigError, match=message):
        row_planner(gpus(3), "row_wise").plan(model, sharders)


class NoMap(nn.Module):
    def output_size(self) -> int:
        return ROWS

    def buckets(self) -> int:
        return 2


def held_on_a_rank(ids: Any) -> int:
    """Bytes of half of a map, as `DistributedModelParallel` builds and fills it."""
    half = ids.rebuild_with_output_id_range(
        (0, ROWS // 2), output_segments=[0, ROWS // 2, ROWS], device=META
    )
    every = dict([*half.named_parameters(), *half.named_buffers()]).values()
    tensors = [t for t in every if len(t) == ROWS // 2]
    if hasattr(half, "_init_history_buffers"):
        before = {name for name, _ in half.named_buffers()}
        count = int(POOLING * PER_RANK)
        batch = JaggedTensor(torch.zeros(count), lengths=torch.tensor([count]))
        half._init_history_buffers({"f0": batch})
        tensors += [t for name, t in half.named_buffers() if name not in before]
        tensors.append(half._history_accumulator)
    return sum(t.nbytes for t in tensors)


@pytest.mark.parametrize("kind", MAPS)
def test_maps_of_managed_collisions_are_counted(kind: str) -> None:
    build, per_row, num_kept = MAPS[kind]
    held = held_on_a_rank(build())
    kept = num_kept * INTERVAL * 1.25 * 8 * POOLING * PER_RANK
    assert held == per_row * ROWS / 2 + kept
    planner = row_planner(gpus(2), "row_wise")
    planner.plan(managed(build()), [OnCpus()])
    for found in planner.memory.ranks(planner.get_selected_options()):
        assert found.static.id_maps == held
    on_cpus = row_planner(Topology(2, "cpu"), "row_wise")
    [counted], [others] = (
        {
            shard.storage.ddr
            for option in on_cpus.enumerator.enumerate(managed(ids), [OnCpus()])
            for shard in option.shards
        }
        for ids in (build(), NoMap())
    )
    assert counted - others == held


def test_a_map_that_does_not_fit_is_refused() -> None:
    """Weights of 8 MB and a map of 12 MB are on each rank."""
    rows = 10**6
    ids = sorting(mc_modules.LFU_EvictionPolicy(), rows)
    planner = row_planner(gpus(2, hbm_cap=18 * MIB), "row_wise", strict_memory=True)
    with pytest.raises(PlannerError, match="t0"):
        planner.plan(managed(ids, rows, 4), [OnCpus()])
    planner = row_planner(gpus(2, hbm_cap=24 * MIB), "row_wise", strict_memory=True)
    planner.plan(managed(ids, rows, 4), [OnCpus()])


@pytest.mark.parametrize(
    ("kind", "parts"), [("row_wise", 2), ("table_wise", 1), ("column_wise", 1)]
)
def test_rows_of_unpruned_tables_are_counted(kind: str, parts: int) -> None:
    """TorchRec keeps 8 bytes of address and 4 of use per row before pruning."""
    unpruned = 5 * ROWS
    pruning = GenericITEPModule({"t0": unpruned, "t1": ROWS})
    pruning.current_device = META
    pruning.create_itep_buffers(unpruned // parts, [0, unpruned // parts], ["t0"], [1])
    held = pruning.address_lookup.nbytes + pruning.row_util.nbytes
    inner = bags(bag_config(0), bag_config(1))
    planner = row_planner(gpus(2), kind)
    module = ITEPEmbeddingBagCollection(inner, pruning)
    planner.plan(module, [ITEPEmbeddingBagCollectionSharder()])
    options = planner.get_selected_options()
    shards = {shard.rank for shard in options[0].shards}
    for rank, found in enumerate(planner.memory.ranks(options)):
        assert found.static.id_maps == held * (rank in shards)


def test_ids_that_a_map_turns_into_rows_count_as_even() -> None:
    ids, lengths = np.zeros(PER_RANK * 2 * 4, dtype=np.int64), np.full(PER_RANK * 2, 4)
    profiles = {"f0": profile_ids(ids, lengths)}
    found = []
    for model, sharder in (
        (managed(MAPS["LFU"][0]()), OnCpus()),
        (bags(bag_config(rows=ROWS)), EmbeddingBagCollectionSharder()),
    ):
        planner = row_planner(gpus(2), "row_wise", profiles=profiles)
        planner.plan(model, [sharder])
        first, second = last_result(planner).predicted.ranks
        found.append(first.fwd_compute == pytest.approx(second.fwd_compute))
    assert found == [True, False]
