from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.builders import make_tables, make_task
from torchrec_neuroshard.bundles.find import load_cost_model
from torchrec_neuroshard.bundles.folders import pretrained_names
from torchrec_neuroshard.costs.simulator import PHASES, RankCosts, Simulator
from torchrec_neuroshard.costs.task import KernelFactors, Placement, WireCodec
from torchrec_neuroshard.hardware.cards import GPU_CARDS, card_named
from torchrec_neuroshard.models.base import CostModel, IdKernels
from torchrec_neuroshard.models.card_physics import PhysicalConstants
from torchrec_neuroshard.models.compute import PhysicalCostModel
from torchrec_neuroshard.models.published_links import published_comms_model
from torchrec_neuroshard.search.lanes import Lanes
from torchrec_neuroshard.search.shards import ShardBank
from torchrec_neuroshard.tables.features import table_features
from torchrec_neuroshard.tables.hot_rows import HotRows
from torchrec_neuroshard.tables.profile import FeatureProfile
from torchrec_neuroshard.testing.analytic import AnalyticCommsModel, AnalyticCostModel

Floats = npt.NDArray[np.float64]

BATCH = 1_000
PLAIN = make_tables([16, 8, 4], 500, [2.0, 5.0, 1.0])
TABLES = (*PLAIN[:2], dataclasses.replace(PLAIN[2], num_features=3, weighted=True))
LAUNCH, LOOKUP, BYTE = 0.5, 1_000.0, 10.0


def simulator(**fields: Any) -> Simulator:
    task = make_task(TABLES, 2, BATCH, **fields)
    model = AnalyticCostModel(launch_ms=LAUNCH, lookup_ns=LOOKUP, byte_ns=BYTE)
    return Simulator(task, model, AnalyticCommsModel(gb_per_s=0.001))


def forward(*shards: tuple[int, int]) -> float:
    """The analytic model by hand: (lookups, width) of the shards of one set."""
    if not shards:
        return 0.0
    return LAUNCH + sum(n * LOOKUP + n * w * 4 * BYTE for n, w in shards) * 1e-6


A, B, C = 2 * BATCH, 5 * BATCH, BATCH
"""Lookups of the three tables."""


def test_phases_by_hand() -> None:
    placement = Placement.from_widths(2, [(0, 12, 0), (0, 4, 1), (1, 8, 1), (2, 4, 0)])
    costs = simulator().evaluate(placement)
    expected = [forward((A, 12), (C, 4)), forward((A, 4), (B, 8))]
    for rank, fwd in zip(costs.ranks, expected, strict=True):
        assert rank.fwd_compute == pytest.approx(fwd)
        assert rank.bwd_compute == pytest.approx(2 * fwd)
    # 12 + 3 * 4 and 4 + 8 columns, half of the samples remote, 1 kB per ms.
    sent = np.array([24, 12]) * BATCH * 4 / 2 / 1_000
    received = np.full(2, 36 * BATCH * 4 / 2 / 2 / 1_000)
    comms = np.maximum(sent, received)
    for rank, ms in zip(costs.ranks, comms, strict=True):
        assert rank.fwd_comms == rank.bwd_comms == pytest.approx(ms)
    # Ids and lengths are 8 bytes each, weights 4; both shards of `a` get all its ids.
    a, b, c = (8 * n * BATCH for n in (2 + 1, 5 + 1, 1 + 3 + 0.5))
    index = np.maximum([(a + c) / 2, (a + b) / 2], (2 * a + b + c) / 4) / 1_000
    for rank, ms in zip(costs.ranks, index, strict=True):
        assert rank.index_comms == pytest.approx(ms)
    assert costs.critical_path_ms == pytest.approx(
        3 * max(expected) + 2 * float(comms.max()) + index.max()
    )
    assert costs.compute_source == costs.comms_source == "analytic"


class UncertainModel(AnalyticCostModel):
    """Short kernels are off by 30 %, others by 6 %."""

    def relative_uncertainty(self, sums_SE: Floats) -> Floats:
        short_S = self.predict_sums(sums_SE).sum(axis=1) < 6.0
        return np.where(short_S, 0.3, 0.06)


def test_a_rank_spreads_by_half_of_its_kernels_uncertainty() -> None:
    model = UncertainModel(launch_ms=LAUNCH, lookup_ns=LOOKUP, byte_ns=BYTE)
    task = make_task(TABLES, 3, BATCH, groups=(0, 1, 1), stages=(0, 0))
    placement = Placement.from_widths(3, [(0, 16, 0), (1, 8, 1), (2, 4, 0)])
    [stage] = Simulator(task, model, AnalyticCommsModel()).evaluate(placement).stages
    long_ms, short_ms = forward((A, 16)), forward((C, 4))
    mixed = (0.06 * long_ms + 0.3 * short_ms) / (long_ms + short_ms)
    assert stage.spread_W == pytest.approx((mixed / 2, 0.03, 0.0))
    assert stage.alike_W == (0, 1, 2)


def test_the_same_kernels_are_found_in_each_stage() -> None:
    placement = Placement.from_widths(2, [(0, 8, 0), (0, 8, 1), (1, 8, 0), (2, 4, 1)])
    costs = simulator(groups=(0, 1, 1), stages=(0, 1)).evaluate(placement)
    assert [stage.alike_W for stage in costs.stages] == [(0, 0), (0, 1)]


def test_equal_ranks_are_expected_to_take_longer_than_the_critical_path() -> None:
    """Two kinds of kernels take the same time. Ranks of one kind err together."""
    model = UncertainModel(launch_ms=LAUNCH, lookup_ns=LOOKUP, byte_ns=BYTE)
    more = 5.0 * forward((1, 16)) - 4.0 * LAUNCH  # as long as 5 lookups of 16 columns
    more = (more - LAUNCH) / (forward((1, 4)) - LAUNCH)
    tables = make_tables([16, 4, 16, 4], 500, [5.0, more, 5.0, more])
    simulator = Simulator(make_task(tables, 4, BATCH), model, AnalyticCommsModel())
    apart = Placement.from_widths(4, [(0, 16, 0), (1, 4, 1), (2, 16, 2), (3, 4, 3)])
    costs = simulator.evaluate(apart)
    assert costs.stages[0].alike_W == (0, 1, 0, 1)
    assert costs.ranks[0].fwd_compute == pytest.approx(costs.ranks[1].fwd_compute)
    # 0.5642 is the expected maximum of two standard normal values.
    kernels_ms = costs.ranks[0].fwd_compute + costs.ranks[0].bwd_compute
    assert costs.expected_ms - costs.critical_path_ms == pytest.approx(
        0.5642 * 0.03 * kernels_ms, rel=1e-3
    )
    unknown = dataclasses.replace(costs.stages[0], spread_W=(), alike_W=())
    sure = dataclasses.replace(costs, stages=(unknown,))
    assert sure.expected_ms == sure.critical_path_ms == costs.critical_path_ms


def test_ranks_in_different_stages_work_side_by_side() -> None:
    placement = Placement.from_widths(2, [(0, 16, 0), (1, 8, 1), (2, 4, 1)])
    together = simulator(groups=(0, 1, 1)).evaluate(placement)
    apart = simulator(groups=(0, 1, 1), stages=(0, 1)).evaluate(placement)
    assert [s.name for s in apart.stages] == ["stage 0", "stage 1"]
    first, second = apart.stages
    for phase in ("fwd_compute", "bwd_compute"):
        for one, other in zip(together.ranks, apart.ranks, strict=True):
            assert getattr(one, phase) == pytest.approx(getattr(other, phase))
    ids, sent, returned = (
        [max(getattr(r, phase) for r in stage.ranks) for stage in (first, second)]
        for phase in ("index_comms", "fwd_comms", "bwd_comms")
    )
    kernels = {
        phase: (getattr(first.ranks[0], phase), getattr(second.ranks[1], phase))
        for phase in ("fwd_compute", "bwd_compute")
    }
    (f1, f2), (b1, b2) = kernels["fwd_compute"], kernels["bwd_compute"]
    # Rank 0 has only the first stage, rank 1 only the second.
    forward_ms = max(f1 + sum(sent), max(f1, f2) + sent[1])
    backward_ms = max(returned[1] + max(b1, b2), sum(returned) + b1)
    assert apart.critical_path_ms == pytest.approx(sum(ids) + forward_ms + backward_ms)
    # A module copies the outputs of two stages into one tensor.
    joined_ms = second.reorder_ms[0]
    assert joined_ms > 0 and first.reorder_ms == (0.0, 0.0)
    on_cpu = simulator(groups=(0, 1, 1), stages=(0, 1))
    on_cpu.cost_model.join = (1.0, 0.5)
    on_cpu = Simulator(on_cpu.task, on_cpu.cost_model, on_cpu.comms_model)
    _, second = on_cpu.evaluate(placement).stages
    assert second.reorder_ms[0] == joined_ms / 2
    # Forward passes of two modules add up, backward passes overlap.
    modules = simulator(groups=(0, 1, 1), stages=(0, 1), modules=(0, 1))
    assert modules.evaluate(placement).critical_path_ms == pytest.approx(
        sum(ids) + f1 + sent[0] + f2 + sent[1] - joined_ms + backward_ms
    )


def test_stages_run_in_the_order_of_their_first_tables() -> None:
    """A way that is not used has no place in it."""
    first, _, last = make_tables([16, 16, 8])
    ways: Any = {"alternatives": ((0, 1),), "groups": (0, 1, 0), "stages": (0, 1)}
    task = make_task((first, first, last), 2, BATCH, **ways)
    other = Simulator(task, AnalyticCostModel(), AnalyticCommsModel())
    names = {
        way: [s.name for s in other.evaluate(placement).stages]
        for way, placement in (
            (way, Placement.from_widths(2, [(way, 16, 0), (2, 8, 1)], task))
            for way in (0, 1)
        )
    }
    assert names == {0: ["stage 0", "stage 1"], 1: ["stage 1", "stage 0"]}


def test_passes_over_memory_in_order_take_its_bandwidth() -> None:
    """Optimizers of replicas, and codecs; looked-up rows are slower."""
    card = PhysicalConstants(memory_gb_per_s=2_000, efficiency=0.5)
    model = PhysicalCostModel(card, name="test", hardware="a test")

    def costs(**fields: Any) -> RankCosts:
        task = make_task(make_tables([64], 10**6), 1, 512, **fields)
        placement = Placement.from_widths(1, [(0, 64, 0)], task)
        return Simulator(task, model, AnalyticCommsModel()).evaluate(placement).ranks[0]

    plain, coded = WireCodec(), WireCodec(encode_bytes=3.0, decode_bytes=5.0)
    before = costs(kernels=(KernelFactors(),), codecs=((plain, plain),))
    after = costs(kernels=(KernelFactors(passes=9.0),), codecs=((coded, plain),))
    # Of 1,000 GB/s.
    update = after.bwd_compute - before.bwd_compute
    assert update == pytest.approx(9 * 4 * 64e6 * 1e-9)
    assert after.fwd_comms - before.fwd_comms == pytest.approx(8 * 64 * 512 * 1e-9)


def test_a_stage_without_tables_has_no_collectives() -> None:
    """Not even what it takes to begin one."""
    kinds = ("column_wise", "row_wise", "data_parallel", "row_wise")
    task = make_task(
        (*TABLES, dataclasses.replace(TABLES[0], name="d")),
        2,
        BATCH,
        groups=(0, 1, 2, 1),
        stages=(0, 1, 2),
        sharding_types=kinds,
    )
    links = published_comms_model(card_named("h100"), world_size=2, local_world_size=2)
    sim = Simulator(task, AnalyticCostModel(), links)
    loads = np.zeros((4, 2, 3, 3))
    for number, kind in enumerate((0, 1, 2), start=1):
        loads[number, :, kind] = 1.0
    used = sim.comms_costs(loads).any(axis=(1, 3))
    np.testing.assert_array_equal(used, [[0, 0, 0], *np.eye(3)])


def test_parts_of_huge_tables_are_priced_as_their_own() -> None:
    """Virtual tables may have so many rows that a few tables exceed 64 bits."""
    pooling = [1.0 + n for n in range(10)]
    tables = make_tables([8] * 10, 2**60, pooling)
    task = make_task(tables, 2, 1024, sharding_types=("row_wise",) * 10)
    simulator = Simulator(task, AnalyticCostModel(), AnalyticCommsModel())
    halves = simulator.price(np.arange(10), np.full(10, 8), np.full(10, 2**59))
    lookups = halves.encoding_NE[:, 1]
    assert lookups.tolist() == pytest.approx([512 * p for p in pooling])


UNKNOWN = "measure"
"""A CPU of which nothing was measured yet."""
DEVICES = sorted({*pretrained_names(), *GPU_CARDS})


def model_of(device: str) -> CostModel:
    kind = "cuda" if device in GPU_CARDS else "cpu"
    return load_cost_model(device, device_type=kind)


@pytest.mark.parametrize("device", DEVICES)
def test_every_device_states_an_uncertainty(device: str) -> None:
    model = model_of(device)
    tables = make_tables([8, 64, 512], [100, 10**5, 10**7], [1.0, 30.0, 200.0])
    sums = np.cumsum(model.encode(table_features(tables, 4096)), axis=0)
    assert (model.relative_uncertainty(sums) > 0.005).all()


@pytest.mark.parametrize("device", [*DEVICES, UNKNOWN])
@pytest.mark.filterwarnings("ignore:no cost model was measured")
def test_every_device_needs_time_to_reorder_columns(device: str) -> None:
    model = model_of(device)
    task = make_task(make_tables([64]), 4, BATCH)
    simulator = Simulator(task, model, AnalyticCommsModel())
    small, large = simulator.order_costs(np.array([[64.0], [64_000.0]]))[:, 0]
    # The bytes are read and written at 8 TB/s or slower.
    assert (small > 0).all() and (large > 2 * 64_000 * BATCH / 8e9).all()


class CountedKernels(AnalyticCostModel):
    """A millisecond an id to bucketise, 7 a bag and rank, 3 a bag to move, 1e-3 a byte
    to reorder."""

    ids = IdKernels(pooled_ns=1e6, sequence_ns=5e6, rank_bag_ns=7e6, permute_bag_ns=3e6)

    def column_order(self, bytes_N: Floats) -> Floats:
        return np.stack([bytes_N * 1e-3, bytes_N * 2e-3], axis=-1)


def test_rows_of_row_wise_sequences_return_to_their_order() -> None:
    """Ranks gather the rows of their own 32 samples, and scatter the gradients."""
    [table] = make_tables([8], 100, [4.0], pooled=False)
    moved_ms = 32 * 4 * 8 * 4 * 1e-3
    for kind, pooled, factor in (
        ("row_wise", False, 1.0),
        ("row_wise", True, 0.0),
        ("table_wise", False, 0.0),
    ):
        read = dataclasses.replace(table, pooled=pooled)
        task = make_task([read], 2, 64, sharding_types=(kind,))
        ranks = (0, 1) if kind == "row_wise" else (1,)
        placement = Placement.from_widths(2, [(0, 8, rank) for rank in ranks], task)
        simulator = Simulator(task, CountedKernels(), AnalyticCommsModel())
        costs = simulator.evaluate(placement)
        forward, backward = costs.stages[0].reorder_ms
        assert forward == pytest.approx(factor * moved_ms)
        assert backward == pytest.approx(factor * 1.6 * 2 * moved_ms)
        # The search counts the same.
        width_TW = np.zeros((1, 2), dtype=np.int64)
        width_TW[0, ranks] = 8
        [ms] = Lanes.of(ShardBank(simulator), [width_TW]).critical_L
        assert ms == pytest.approx(costs.critical_path_ms)


def test_kernels_beside_lookups_by_hand() -> None:
    """One table of each kind; 64 samples, two features, four ids a sample."""
    tables = make_tables([8] * 3, 100, [4.0] * 3, num_features=2)
    kinds = ("row_wise", "table_wise", "data_parallel")
    each = (0, 1, 2)
    task = make_task(tables, 2, 64, groups=each, stages=each, sharding_types=kinds)
    shards = [(0, 8, 0), (0, 8, 1), (1, 8, 1), (2, 8, 0), (2, 8, 1)]
    placement = Placement.from_widths(2, shards, task)

    def costs(model: AnalyticCostModel, *, has_copies: bool) -> Floats:
        comms = AnalyticCommsModel()
        comms.has_copies = has_copies
        stages = Simulator(task, model, comms).evaluate(placement).stages
        ranks = [[[getattr(r, p) for p in PHASES] for r in s.ranks] for s in stages]
        return np.array(ranks)

    free = costs(AnalyticCostModel(), has_copies=True)
    measured = costs(CountedKernels(), has_copies=True) - free
    # Each rank sorts half of 256 ids in 64 bags, for two ranks; nothing else is added.
    bucketised = np.zeros((3, 2, 5))
    bucketised[0, :, 1] = 128 + 7 * 64 * 2
    assert measured == pytest.approx(bucketised)
    # 128 bags arrive per shard; 32 samples of a rank have 16 columns.
    copied = bucketised.copy()
    copied[0, :, 1] += 3 * 128
    copied[1, 1, 1] += 3 * 128
    copied[1, :, 2] += 32 * 16 * 4 * 1e-3
    copied[1, :, 3] += 32 * 16 * 4 * 2e-3
    linked = costs(CountedKernels(), has_copies=False) - free
    assert linked == pytest.approx(copied)


def test_ids_of_sequences_and_of_hot_rows_by_hand() -> None:
    """Half of the rows get 90 % of the lookups, but all ranks have as many samples."""
    hot = HotRows(range_size=64, range_shares=(0.9, 0.1))
    profile = FeatureProfile(
        batch_size=64, num_lookups=256, access_histogram=(*[10.0] * 5, *[0.0] * 12)
    )
    profile = dataclasses.replace(profile, hot_rows=hot)
    [table] = make_tables([8], 128, [4.0], num_features=4, profile=profile)
    comms = AnalyticCommsModel()
    comms.has_copies = False
    for pooled, sorted_ms in ((True, 1), (False, 5)):
        read = dataclasses.replace(table, pooled=pooled)
        task = make_task([read], 2, 64, sharding_types=("row_wise",))
        placement = Placement.from_widths(2, [(0, 8, 0), (0, 8, 1)], task)
        sums = []
        for model in (CountedKernels(), AnalyticCostModel()):
            [stage] = Simulator(task, model, comms).evaluate(placement).stages
            sums.append(np.array([r.fwd_compute for r in stage.ranks]))
        # 128 own ids in 128 own bags, for two ranks, and 256 bags that arrive.
        expected = sorted_ms * 128 + 7 * 128 * 2 + 3 * 256
        assert sums[0] - sums[1] == pytest.approx([expected] * 2)
