"""What ranks allocate: against what FBGEMM allocates, and identities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fbgemm_gpu import split_table_batched_embeddings_ops_training as tbe
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import optim
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner.types import PlannerError, ShardingOption
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.builders import (
    ATTACHES_OPTIMIZERS,
    META,
    Nested,
    bag_sharders,
    gpus,
    keep_nothing_back,
    make_ebc,
    make_planner,
    only,
)
from torchrec_neuroshard.planner import NeuroShardEnumerator
from torchrec_neuroshard.planner.costs.memory import MemoryModel

GIB = 2**30
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
    kernel: str = "fused",
    kind: str = "row_wise",
    factors: tuple[float, ...] = (1.0, 20.0, 5.0),
    **settings: Any,
) -> tuple[Any, list[Any]]:
    """A plan for GPUs, and its options with what shards take."""
    module = make_ebc([(100_000, 64), (100_000, 128), (100_000, 32)])
    constraints = {
        f"t{i}": ParameterConstraints(
            sharding_types=[kind], compute_kernels=[kernel], pooling_factors=[p]
        )
        for i, p in enumerate(factors)
    }
    options: list[Any] = []

    def take(found: list[Any]) -> list[Any]:
        options[:] = found
        return found

    planner = make_planner(
        callbacks=[take],
        topology=gpus(4, hbm_cap=8 * GIB, ddr_cap=64 * GIB),
        constraints=constraints,
        batch_size=4096,
        storage_reservation=keep_nothing_back(),
        consider_stock=False,
        **settings,
    )
    fused_params = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
    sharder = EmbeddingBagCollectionSharder(fused_params=fused_params)
    planner.plan(module, [sharder])
    return planner, options


def memory_of(planner: Any) -> MemoryModel:
    enumerator = planner.enumerator
    assert isinstance(enumerator, NeuroShardEnumerator)
    assert enumerator.memory is not None
    return enumerator.memory


@pytest.mark.parametrize("kind", ["row_wise", "table_wise", "column_wise"])
@pytest.mark.parametrize("kernel", ["fused", "fused_uvm_caching"])
def test_shards_of_a_plan_add_up_to_what_ranks_take(kind: str, kernel: str) -> None:
    planner, options = planned(kernel, kind)
    ranks = memory_of(planner).ranks(options)
    for rank, found in enumerate(ranks):
        held = [s for o in options for s in o.shards if s.rank == rank]
        if held:
            total = sum(s.storage.hbm for s in held)
            assert total == pytest.approx(found.peak, abs=len(held))


@pytest.mark.parametrize("kind", ["row_wise", "table_wise", "column_wise"])
def test_what_the_search_counts_bounds_ranks_from_above(kind: str) -> None:
    planner, options = planned(kind=kind)
    memory = memory_of(planner)
    common = memory.common_bytes(options)
    used = [common] * 4
    for option, sizes in zip(options, memory.shard_bytes(options), strict=True):
        for shard in option.shards:
            used[shard.rank] += sizes[tuple(shard.size)][0]
    for bound, found in zip(used, memory.ranks(options), strict=True):
        assert bound >= found.peak


def test_row_wise_state_stays_on_the_device_whatever_the_kernel() -> None:
    planner, options = planned("fused_uvm")
    for found in memory_of(planner).ranks(options):
        rows = 3 * 25_000
        assert found.static.weights == 0
        assert found.static.total == found.static.optimizer == 4 * rows
    _, cached = planned("fused_uvm_caching")
    static = memory_of(planner).ranks(cached)[0].static
    slots = 25_000 * sum(o.cache_params.load_factor for o in cached)
    assert static.index_tables == pytest.approx(4 * rows + 16 * slots, rel=0.01)
    # The kernel's cache is as wide as its widest table.
    assert static.cache == pytest.approx(4 * 128 * slots, rel=0.01)


def kept_by(optimizer: Any, kernel: str = "fused", **params: Any) -> tuple[int, int]:
    """Bytes that 100 rows of 16 weights take at rest, on the device and in the host."""
    module = make_ebc([(100, 16)])
    fused_params = {"optimizer": optimizer, **params}
    if isinstance(optimizer, type):
        fused_params = {}
        for parameter in module.parameters():
            vars(parameter)["_optimizer_classes"] = [optimizer]
    limits = only(sharding_types=["table_wise"], compute_kernels=[kernel])
    planner = make_planner(2, "cuda", constraints=limits)
    sharder = EmbeddingBagCollectionSharder(fused_params=fused_params)
    [option] = planner.enumerator.enumerate(module, [sharder])
    [shard] = option.shards
    shard.rank = 0
    static = memory_of(planner).ranks([option])[0].static
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
@pytest.mark.parametrize("kernel", ["fused", "fused_uvm"])
def test_optimizers_keep_what_fbgemm_allocates(
    kernel: str, settings: dict[str, Any], count: int
) -> None:
    location = tbe.EmbeddingLocation.DEVICE
    if kernel == "fused_uvm":
        location = tbe.EmbeddingLocation.MANAGED
        count -= count > 1  # "none" is for devices alone
    names = ["weights", "momentum1", "momentum2", "prev_iter", "row_counter"]
    for optimizer in EmbOptimType:
        try:
            kernels = tbe.SplitTableBatchedEmbeddingBagsCodegen(
                [(100, 16, location, tbe.ComputeDevice.CUDA)],
                optimizer=optimizer,
                device=META,
                **settings,
            )
        except AssertionError:
            continue  # tables are not trained by that
        count -= 1
        tensors = dict(kernels.named_buffers()) | dict(kernels.named_parameters())
        held = [
            sum(
                t.numel() * t.element_size()
                for t in (tensors.get(f"{name}_{place}", NOTHING) for name in names)
                if t.numel() >= 100  # one value stands for a state that there is not
            )
            for place in ("dev", "uvm")
        ]
        classes = [c for c in CLASSES if optimizer_type_to_emb_opt_type(c) == optimizer]
        for name in (optimizer, *classes[: 0 if settings else None]):
            assert kept_by(name, kernel, **settings) == tuple(held), name
    assert count == 0


def test_an_optimizer_that_nobody_knows_is_named() -> None:
    module = make_ebc([(100, 16)])
    apply_optimizer_in_backward(torch.optim.AdamW, module.parameters(), {"lr": 0.1})
    planner = make_planner(2, constraints=only(sharding_types=["data_parallel"]))
    planner.plan(module, bag_sharders())
    assert planner.last_result is not None
    told = "table 't0': what optimizer AdamW keeps is not known"
    assert any(w.startswith(told) for w in planner.last_result.warnings)
    planner = make_planner(topology=gpus(hbm_cap=2**20, ddr_cap=2**20))
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType.SHAMPOO}
    )
    told = "table 't0': what optimizer SHAMPOO keeps is not known"
    with pytest.raises(PlannerError, match=f"table 't0' .* needs .*\n{told}"):
        planner.plan(make_ebc([(10**6, 64)]), [sharder])


def test_a_pipeline_holds_the_batches_that_it_prepares() -> None:
    planner, options = planned(factors=(50.0, 200.0, 50.0))
    plain = memory_of(planner).ranks(options)
    ahead = MemoryModel(
        planner.topology, planner.costs.reader, pipeline_type="train_sparse_dist"
    ).ranks(options)
    lookups, bags = 4096 * 300.0, 4096 * 3  # of a rank's own samples
    came = 3 * (8 * lookups + 4 * bags)
    sent = 8 * lookups + 4 * 4 * bags  # a length for each rank's part of a bag
    next_one = 8 * lookups + 4 * 4 * bags
    for before, after in zip(plain, ahead, strict=True):
        assert before.instant == after.instant == "kernel"
        grown = after.activations - before.activations
        assert grown == pytest.approx(came + sent + next_one)


def activations_without_shards(pipeline: str | None) -> float:
    """What a rank takes for its own samples; columns of two tables are on others."""
    module = make_ebc([(1000, 64), (1000, 64)])
    planner = make_planner(
        topology=gpus(5, hbm_cap=8 * GIB),
        constraints={
            f"t{i}": ParameterConstraints(
                sharding_types=["column_wise"], min_partition=32
            )
            for i in range(2)
        },
        batch_size=4096,
    )
    options: dict[str, ShardingOption] = {}
    for option in planner.enumerator.enumerate(module, bag_sharders()):
        if option.compute_kernel == "fused" and len(option.shards) == 2:
            options.setdefault(option.name, option)
    for rank, shard in enumerate(s for o in options.values() for s in o.shards):
        shard.rank = rank
    model = MemoryModel(planner.topology, planner.costs.reader, pipeline_type=pipeline)
    return model.ranks(list(options.values()))[4].activations


def test_a_plain_loop_holds_outputs_and_their_gradients_once() -> None:
    """Outputs beside what they came in as, gradients beside those by rank."""
    outputs = 4 * 4096 * (64 + 64)
    rounding = activations_without_shards(None) - 3 * outputs
    assert 0 <= rounding <= 2 << 20


def test_every_column_shard_is_sent_the_ids() -> None:
    plain, ahead, prefetched = (
        activations_without_shards(pipeline)
        for pipeline in (None, "train_sparse_dist", "train_prefetch_sparse_dist")
    )
    batch = (8 + 4) * 4096 * 2  # one id in each bag
    assert ahead - plain == 3 * batch + 2 * batch
    assert ahead - prefetched == 2 * batch


def test_a_callers_estimator_keeps_counting() -> None:
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator

    topology = gpus(2, hbm_cap=8 * GIB)
    theirs = EmbeddingEnumerator(topology, 512)
    kept: list[ShardingOption] = []

    def keep(options: list[ShardingOption]) -> list[ShardingOption]:
        kept.extend(options)
        return options

    planner = make_planner(topology=topology, enumerator=theirs, callbacks=[keep])
    planner.plan(make_ebc([(1000, 16), (1000, 32)]), bag_sharders())
    listed = {o.storage_hash(): o.shards for o in theirs.last_stored_search_space or ()}
    assert len(kept) == 2
    for option in kept:
        known = listed[option.storage_hash()]
        assert [s.storage for s in option.shards] == [s.storage for s in known]


def test_ranks_with_room_for_tables_but_not_for_outputs_are_full() -> None:
    module = Nested(make_ebc([(1000, 128)]))
    planner = make_planner(
        topology=gpus(2, hbm_cap=2**21),
        batch_size=65_536,
        storage_reservation=keep_nothing_back(),
    )
    with pytest.raises(PlannerError):
        planner.plan(module, bag_sharders())


def test_tables_make_room_for_what_replicas_take_beside_them() -> None:
    replicas = ParameterConstraints(sharding_types=["data_parallel"])
    planner = make_planner(
        topology=gpus(2, hbm_cap=9_250_000),
        constraints={"t0": replicas},
        batch_size=512,
    )
    planner.plan(make_ebc([(100, 128), (200_000, 16)]), bag_sharders())
    options = planner.get_selected_options()
    # By the bounds of single shards its rows would fit on the devices.
    assert [o.compute_kernel for o in options] == ["dense", "fused_uvm"]
    assert all(r.peak <= 9_250_000 for r in memory_of(planner).ranks(options))
    assert planner.last_result is not None and planner.last_result.fallback is None
