"""Predicted memory of ranks, compared with what FBGEMM allocates."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from fbgemm_gpu import split_table_batched_embeddings_ops_training as tbe
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import optim
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
)
from torchrec.distributed.planner.types import PlannerError, Storage
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.builders import (
    ATTACHES_OPTIMIZERS,
    GIB,
    META,
    MIB,
    FixedSearcher,
    bag_sharders,
    by_table,
    cost_of,
    each,
    gpus,
    last_result,
    make_ebc,
    make_planner,
    only,
    sequences,
)
from torchrec_neuroshard.files import from_fields, to_fields
from torchrec_neuroshard.planner.memory import MemoryModel
from torchrec_neuroshard.planner.partitioner import may_mix
from torchrec_neuroshard.planner.ways import ways_of
from torchrec_neuroshard.report import PlanReport
from torchrec_neuroshard.report.parts import MEMORY_PARTS

CLASSES = [
    torch.optim.SGD,
    torch.optim.Adagrad,
    optim.Adam,
    optim.LAMB,
    optim.LarsSGD,
    optim.PartialRowWiseAdam,
    optim.PartialRowWiseLAMB,
    optim.RowWiseAdagrad,
]

pytestmark = ATTACHES_OPTIMIZERS


def planned(
    kernel: str, kind: str = "row_wise", **arguments: Any
) -> tuple[Any, list[Any]]:
    """Return a plan for GPUs, and its options with the memory of shards."""
    module = make_ebc([(100_000, 64), (100_000, 128), (100_000, 32)])
    constraints = by_table(
        sharding_types=[[kind]] * 3,
        compute_kernels=[[kernel]] * 3,
        pooling_factors=[[1.0], [20.0], [5.0]],
    )
    planner = make_planner(
        topology=gpus(4, hbm_cap=8 * GIB, ddr_cap=64 * GIB),
        constraints=constraints,
        batch_size=4096,
        **arguments,
    )
    fused_params = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
    sharder = EmbeddingBagCollectionSharder(fused_params=fused_params)
    planner.plan(module, [sharder])
    return planner, planner.get_selected_options()


def test_a_proposal_counts_what_replicas_need_beside_them() -> None:
    kinds = ["table_wise", "data_parallel", "table_wise"]
    planner = make_planner(
        topology=gpus(4, hbm_cap=8 * GIB, ddr_cap=64 * GIB),
        constraints=by_table(sharding_types=[[kind] for kind in kinds]),
        batch_size=4096,
    )
    module = make_ebc([(100_000, 64), (100, 128), (100_000, 32)])
    planner.plan(module, [EmbeddingBagCollectionSharder()])
    options, memory = planner.get_selected_options(), planner.enumerator.memory
    assert [option.sharding_type for option in options] == kinds
    ways = ways_of(options)
    mixed = may_mix(ways, [[0], [1], [2]])
    assert mixed == {options[0].path}
    assert may_mix(ways, [[0], [], [2]]) == may_mix(ways, [[1]]) == set()
    with memory.at_peak(options):
        placed = memory.common_bytes(options, placed=True)
        assert memory.common_bytes(options) < placed
        assert memory.common_bytes(options, mixed=mixed) == placed


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("fused", "row_wise"),
        ("fused", "column_wise"),
        ("fused_uvm_caching", "table_wise"),
    ],
)
def test_shards_add_up_to_ranks_and_the_search_counts_no_less(
    kernel: str, kind: str
) -> None:
    planner, options = planned(kernel, kind)
    memory = planner.enumerator.memory
    bounds = [memory.common_bytes(options)] * 4
    held: list[list[float]] = [[] for _ in bounds]
    shards = [(n, s) for n, o in enumerate(options) for s in o.shards]
    bytes_N2 = memory.shard_bytes(
        ways_of(options),
        [n for n, _ in shards],
        *zip(*(s.size for _, s in shards), strict=True),
    )
    for (_, shard), bound in zip(shards, bytes_N2[:, 0].tolist(), strict=True):
        held[shard.rank].append(shard.storage.hbm)
        bounds[shard.rank] += bound
    for own, bound, found in zip(held, bounds, memory.ranks(options), strict=True):
        assert bound >= found.peak
        if own:
            assert sum(own) == pytest.approx(found.peak, abs=len(own))


@pytest.mark.parametrize(
    ("kernel", "kind", "filled"),
    [
        ("fused", "row_wise", {"weights", "optimizer", "step"}),
        ("fused_uvm_caching", "table_wise", {"optimizer", "caches", "step"}),
        ("dense", "data_parallel", {"weights", "step"}),
    ],
)
def test_a_report_splits_all_memory_that_a_rank_uses(
    kernel: str, kind: str, filled: set[str]
) -> None:
    reserve = FixedPercentageStorageReservation(0.25)
    planner, _ = planned(kernel, kind, storage_reservation=reserve)
    report = planner.report()
    for rank in report.ranks:
        assert sum(rank.parts_bytes.values()) == pytest.approx(rank.used_bytes)
    used = max(report.ranks, key=lambda rank: rank.used_bytes).parts_bytes
    assert {part for part, size in used.items() if size} == filled
    assert used.keys() <= MEMORY_PARTS.keys()
    sizes = {(rank.memory_bytes, rank.device_bytes) for rank in report.ranks}
    assert sizes == {(6 * GIB, 8 * GIB)}
    again = from_fields(PlanReport, json.loads(json.dumps(to_fields(report))))
    kept = [[(r.parts_bytes, r.device_bytes) for r in x.ranks] for x in (again, report)]
    assert kept[0] == kept[1]


def test_storage_that_torchrec_estimates_is_not_split() -> None:
    planner, options = planned("fused")
    memory = planner.enumerator.memory
    whole = memory.parts(options)
    options[0].shards[0].storage += Storage(hbm=GIB, ddr=0)
    first, *others = memory.parts(options)
    used = sum(whole[0].values()) + GIB
    assert first == {"unsplit": pytest.approx(used)} and others == whole[1:]
    with memory.lenient():
        parts = memory.parts(options)
    assert {p for part in parts for p, size in part.items() if size} == {"unsplit"}
    assert sum(parts[0].values()) == pytest.approx(used)


def test_a_rank_is_overfilled_by_a_byte() -> None:
    planner, options = planned("fused")
    memory = planner.enumerator.memory
    most = max(found.peak for found in memory.ranks(options))
    assert memory.overflow(options, gpus(4, hbm_cap=most)) is None
    text = memory.overflow(options, gpus(4, hbm_cap=most - 1))
    assert text is not None and "1 bytes too little" in text


@pytest.mark.parametrize("pooled", [True, False])
def test_kernels_sort_while_gradients_of_outputs_exist(pooled: bool) -> None:
    topology, module = gpus(2, hbm_cap=8 * GIB), make_ebc([(1000, 64)])
    sharders: list[Any] = bag_sharders()
    if not pooled:
        module, sharders = sequences(4, prefix="t"), [EmbeddingCollectionSharder()]
    limits = only(sharding_types=["table_wise"], pooling_factors=[50.0])
    planner: Any = make_planner(topology=topology, constraints=limits, batch_size=4096)
    planner.plan(module, sharders)
    options = planner.get_selected_options()
    found = planner.enumerator.memory.ranks(options)[options[0].shards[0].rank]
    bags = 2 * 4096
    lookups = 50 * bags
    # Ids, offsets, gradients, what sorting takes; the allocator's rounding.
    expected = 8 * lookups + 8 * bags + 4 * 64 * bags + 40 * lookups
    if not pooled:  # lengths come and go back
        expected = 8 * lookups + (8 + 2 * 4) * bags + 4 * 4 * lookups + 48 * lookups
    assert found.instant == "kernel"
    assert found.activations == expected + 2 * MIB


def test_row_wise_state_stays_on_the_device_whatever_the_kernel() -> None:
    planner, options = planned("fused_uvm")
    for found in planner.enumerator.memory.ranks(options):
        rows = 3 * 25_000
        assert found.static.weights == 0
        assert found.static.total == found.static.optimizer == 4 * rows
    _, cached = planned("fused_uvm_caching")
    static = planner.enumerator.memory.ranks(cached)[0].static
    slots = 25_000 * sum(o.cache_params.load_factor for o in cached)
    assert static.index_tables == pytest.approx(4 * rows + 16 * slots, rel=0.01)
    # The kernel's cache is as wide as its widest table.
    assert static.cache == pytest.approx(4 * 128 * slots, rel=0.01)


def kept_by(
    optimizer: Any, kernel: str = "fused", enforce: bool | None = None, **params: Any
) -> tuple[int, int]:
    """Return the bytes at rest of 100 rows of 16 weights, on device and host."""
    module = make_ebc([(100, 16)])
    fused_params = {"optimizer": optimizer, **params}
    if isinstance(optimizer, type):
        fused_params = {}
        for parameter in module.parameters():
            vars(parameter)["_optimizer_classes"] = [optimizer]
    limits = only(
        sharding_types=["table_wise"], compute_kernels=[kernel], enforce_hbm=enforce
    )
    planner: Any = make_planner(2, "cuda", constraints=limits)
    sharder = EmbeddingBagCollectionSharder(fused_params=fused_params)
    [option] = planner.enumerator.enumerate(module, [sharder])
    [shard] = option.shards
    shard.rank = 0
    static = planner.enumerator.memory.ranks([option])[0].static
    return int(static.total), int(shard.storage.ddr)


COUNTERS = {
    "weight_decay_mode": tbe.WeightDecayMode.COWCLIP,
    "cowclip_regularization": tbe.CowClipDefinition(),
}
NOTHING = torch.empty(0)
CORRECTION = {"extra_optimizer_config": tbe.UserEnabledConfigDefinition(True)}


@pytest.mark.parametrize(
    ("settings", "count"), [({}, 11), (COUNTERS, 11), (CORRECTION, 1)]
)
@pytest.mark.parametrize("kernel", ["fused", "fused_uvm", "enforced"])
def test_optimizer_state_is_what_fbgemm_allocates(
    kernel: str, settings: dict[str, Any], count: int
) -> None:
    location, enforce = tbe.EmbeddingLocation.DEVICE, kernel == "enforced"
    kernel = "fused_uvm" if enforce else kernel
    if kernel == "fused_uvm":
        location = tbe.EmbeddingLocation.MANAGED
        count -= count > 1  # "none" is for devices alone
    count += count > 1 and hasattr(EmbOptimType, "ROWWISE_RMSPROP_AR")
    names = ["weights", "momentum1", "momentum2", "prev_iter", "row_counter"]
    for optimizer in EmbOptimType:
        try:
            kernels = tbe.SplitTableBatchedEmbeddingBagsCodegen(
                [(100, 16, location, tbe.ComputeDevice.CUDA)],
                optimizer=optimizer,
                device=META,
                enforce_hbm=enforce,
                **settings,
            )
        except AssertionError:
            continue  # tables are not trained by that
        count -= 1
        tensors = dict(kernels.named_buffers()) | dict(kernels.named_parameters())
        # One value stands for a state that there is not.
        sizes = {
            f"{name}_{place}": tensor.numel() * tensor.element_size()
            for name in names
            for place in ("dev", "uvm")
            if (tensor := tensors.get(f"{name}_{place}", NOTHING)).numel() >= 100
        }
        host = sum(sizes.get(name, 0) for name in kernels._uvm_tensors_log)
        held = sum(sizes.values()) - host, host
        classes = [c for c in CLASSES if optimizer_type_to_emb_opt_type(c) == optimizer]
        for name in (optimizer, *classes[: 0 if settings else None]):
            assert kept_by(name, kernel, enforce or None, **settings) == held, name
            if enforce and name == optimizer:
                shared = {**settings, "enforce_hbm": True}
                assert kept_by(name, kernel, **shared) == held, name
                # A constraint goes before the sharder's parameter.
                assert kept_by(name, kernel, False, **shared) != held, name
    assert count == 0


@pytest.mark.parametrize("kernel", ["fused_uvm", "fused_uvm_caching"])
def test_rows_that_must_be_on_the_device_are_counted_there(kernel: str) -> None:
    """FBGEMM keeps the cache beside them."""
    limits = only(compute_kernels=[kernel], enforce_hbm=True)
    module = make_ebc([(1_000_000, 64)])

    def plan(hbm_mib: int, **settings: Any) -> Any:
        planner: Any = make_planner(
            topology=gpus(1, hbm_cap=hbm_mib * MIB, ddr_cap=GIB),
            constraints=limits,
            strict_memory=True,
            **settings,
        )
        planner.plan(module, bag_sharders())
        return planner

    planner = plan(400)
    [table] = planner.report().tables
    [option] = planner.get_selected_options()
    assert table.host is None and option.shards[0].storage.ddr == 0
    assert not any(n.code == "host-memory" for n in last_result(planner).notes)
    assert planner.memory.ranks([option])[0].static.weights == 4 * 64 * 1_000_000
    with pytest.raises(PlannerError, match="t0"):
        plan(240)


def test_an_unknown_optimizer_is_noted() -> None:
    module = make_ebc([(100, 16)])
    apply_optimizer_in_backward(torch.optim.AdamW, module.parameters(), {"lr": 0.1})
    planner = make_planner(2, constraints=only(sharding_types=["data_parallel"]))
    planner.plan(module, bag_sharders())
    told = "tables 't0': the state size of optimizer AdamW is unknown"
    [note] = [n for n in last_result(planner).notes if n.code == "optimizer"]
    assert note.text.startswith(told)
    planner = make_planner(topology=gpus(hbm_cap=2**20, ddr_cap=2**20))
    fused_params = {"optimizer": EmbOptimType.SHAMPOO}
    sharder = EmbeddingBagCollectionSharder(fused_params=fused_params)
    told = "tables 't0': the state size of optimizer SHAMPOO is unknown"
    with pytest.raises(PlannerError, match=f"table 't0' .* needs .*\n{told}"):
        planner.plan(make_ebc([(10**6, 64)]), [sharder])


def test_a_rank_counts_its_outputs_and_ids_of_column_shards() -> None:
    """Columns of two tables are on other ranks; the rank has only its own samples."""
    planner = make_planner(
        topology=gpus(5, hbm_cap=8 * GIB),
        constraints=each(2, "column_wise", min_partition=32),
        batch_size=4096,
        search=FixedSearcher([(n // 2, 32, n) for n in range(4)]),
    )
    planner.plan(make_ebc([(1000, 64)] * 2), bag_sharders())
    options = planner.get_selected_options()
    plain, ahead, prefetched = (
        MemoryModel(planner.costs.reader, pipeline_type=pipeline)
        .ranks(options)[4]
        .activations
        for pipeline in (None, "train_sparse_dist", "train_prefetch_sparse_dist")
    )
    # Outputs beside what they came in as, gradients beside those by rank.
    assert plain == 3 * 4 * 4096 * (64 + 64) + 2 * MIB
    batch = (8 + 4) * 4096 * 2  # one id in each bag
    assert ahead - plain == 3 * batch + 2 * batch
    assert ahead - prefetched == 2 * batch


def ranks_of(
    module: nn.Module, world_size: int, hbm_cap: int, ddr_cap: int, **arguments: Any
) -> tuple[list[Any], Any]:
    """The memory of each rank of the search's own plan, and the planner."""
    planner: Any = make_planner(
        topology=gpus(world_size, hbm_cap=hbm_cap, ddr_cap=ddr_cap),
        batch_size=4096,
        strict_memory=True,
        **arguments,
    )
    planner.plan(module, bag_sharders())
    assert last_result(planner).fallback is None
    return planner.memory.ranks(planner.get_selected_options()), planner


def test_a_plan_is_found_down_to_the_memory_that_it_needs() -> None:
    """Bounds of shards add up to 1.5 times the peak, and ids of all splits count."""
    module = make_ebc([(20_000, 512)] * 8)
    limits = each(
        8, min_partition=32, pooling_factors=[20.0], compute_kernels=["fused"]
    )

    def planned(hbm_cap: int) -> tuple[float, float]:
        ranks, planner = ranks_of(
            module,
            4,
            hbm_cap,
            GIB,
            constraints=limits,
            pipeline_type="train_sparse_dist",
        )
        return max(found.peak for found in ranks), cost_of(planner)

    most, free_ms = planned(8 * GIB)
    assert planned(int(most) + 64) == (most, free_ms)


def test_kernels_of_several_modules_need_passing_memory_one_after_another() -> None:
    """Each sorts the same number of ids; a rank has memory for one of them."""
    names = [f"m{i}" for i in range(4)]
    module = nn.ModuleDict({n: make_ebc([(1000, 8)], prefix=n) for n in names})
    limit = ParameterConstraints(
        pooling_factors=[400.0],
        sharding_types=["table_wise"],
        compute_kernels=["fused"],
    )

    def planned(hbm_cap: int) -> Any:
        limits = {f"{n}t0": limit for n in names}
        [found], _ = ranks_of(module, 1, hbm_cap, MIB, constraints=limits)
        return found

    found = planned(8 * GIB)
    assert found.num_kernels == 4 and found.instant == "kernel"
    sorting = 40 * 400 * 4096
    assert planned(int(found.peak) + 64) == found
    assert found.peak < 4 * (sorting + 8 * 400 * 4096)


def test_a_plan_that_overfills_a_rank_is_searched_again_with_less_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tables of one module may need more memory together than their bounds say."""
    counted = MemoryModel.shard_bytes

    def half(memory: MemoryModel, *shards: Any) -> Any:
        return counted(memory, *shards) / (2, 1)

    monkeypatch.setattr(MemoryModel, "shard_bytes", half)
    module = make_ebc([(100_000, 64), (100_000, 128), (100_000, 32), (100_000, 64)])
    constraints = by_table(
        sharding_types=[["column_wise"]] * 4,
        compute_kernels=[["fused", "fused_uvm"]] * 4,
        pooling_factors=[[1.0], [20.0], [5.0], [8.0]],
    )

    def peak(hbm_cap: int) -> float:
        ranks, _ = ranks_of(module, 2, hbm_cap, 64 * GIB, constraints=constraints)
        return float(max(found.peak for found in ranks))

    most = int(peak(8 * GIB))
    assert peak(int(0.9 * most)) <= 0.9 * most
