"""Quantised collectives, repeated ids, batches of few samples, and padding ids."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import CommOp

from tests.builders import (
    GIB,
    FixedSearcher,
    cost_of,
    each,
    gpus,
    last_result,
    make_ebc,
    make_planner,
    make_tables,
    make_task,
    only,
    sequences,
    types_of,
)
from torchrec_neuroshard import rehearse, topology_for
from torchrec_neuroshard.costs.simulator import Simulator
from torchrec_neuroshard.costs.task import Placement, WireCodec
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.planner import kernels
from torchrec_neuroshard.tables.profile import (
    FeatureProfile,
    count_histogram,
    profile_ids,
    zipf_profile,
)
from torchrec_neuroshard.tables.sharding_types import SHARDING_TYPES
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel

BATCH = 512
PLAIN = WireCodec()


def bag_sharder(*kinds: str, ops: Any = None) -> Any:
    """Return a sharder that quantises collectives to these types."""
    registry: Any = None
    if kinds:
        config = QCommsConfig(*(CommType(kind) for kind in kinds))
        registry = get_qcomm_codecs_registry(config, ops, device=torch.device("cuda"))
    return EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry)


def planned(module: Any, sharder: Any, device: str = "cuda", **arguments: Any) -> Any:
    planner = make_planner(2, device, batch_size=BATCH, **arguments)
    return planner, planner.plan(module, [sharder])


# --- codecs ---


def phases(
    triples: Any = ((0, 32, 0), (1, 64, 1)), pooled: bool = True, **fields: Any
) -> Any:
    """The simulator; ids, forward and backward collectives of each rank [ms]."""
    task = make_task(make_tables([32, 64], pooled=pooled), 2, BATCH, **fields)
    simulator = Simulator(task, AnalyticCostModel(), AnalyticCommsModel())
    costs = simulator.evaluate(Placement.from_widths(2, triples, task))
    names = ("index_comms", "fwd_comms", "bwd_comms")
    return simulator, np.array([[getattr(r, n) for n in names] for r in costs.ranks])


def test_ranks_encode_their_shards_and_decode_their_samples() -> None:
    coding = WireCodec(encode_bytes=3.0, decode_bytes=5.0, launches=2.0)
    simulator, plain = phases()
    _, coded = phases(codecs=((coding, PLAIN), (coding, PLAIN)))
    _, coded_back = phases(codecs=((PLAIN, coding), (PLAIN, coding)))
    byte_ms, launch_ms = simulator.encoder.byte_ms, simulator.encoder.launch_ms[0]
    assert byte_ms > 0
    shards, samples = np.array([32, 64]) * BATCH, (32 + 64) * BATCH / 2
    there = (3 * shards + 5 * samples) * byte_ms + 2 * launch_ms
    back = (3 * samples + 5 * shards) * byte_ms + 2 * launch_ms
    np.testing.assert_allclose((coded - plain).T, [0 * there, there, 0 * there])
    np.testing.assert_allclose((coded_back - plain).T, [0 * back, 0 * back, back])


def test_sums_are_decoded_once() -> None:
    coding = WireCodec(encode_bytes=3.0, decode_bytes=5.0)
    triples = [(t, width, rank) for t, width in ((0, 32), (1, 64)) for rank in (0, 1)]
    rows: dict[str, Any] = {"triples": triples, "sharding_types": ("row_wise",) * 2}
    simulator, plain = phases(**rows)
    _, coded = phases(**rows, codecs=((coding, PLAIN), (coding, PLAIN)))
    # Of every rank all columns and all samples; of their sum a rank's own samples.
    expected = (96 * BATCH * 3 + 96 * BATCH / 2 * 5) * simulator.encoder.byte_ms
    assert (coded - plain)[0, 1] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("gb_per_s", "rows", "plain", "coded"),
    [(0.1, 400, "data_parallel", "column_wise"), (2.0, 200, "column_wise", "data_par")],
)
def test_a_codec_changes_the_plan(
    gb_per_s: float, rows: int, plain: str, coded: str
) -> None:
    """On slow links, the codec makes exchanges cheaper than replicas, else dearer."""
    for sharder, expected in (
        (bag_sharder(), plain),
        (bag_sharder("fp16", "fp16"), coded),
    ):
        comms_model = AnalyticCommsModel(gb_per_s)
        _, plan = planned(make_ebc([(rows, 128)]), sharder, comms_model=comms_model)
        assert plan.plan[""]["t0"].sharding_type.startswith(expected)


def test_half_the_bytes_take_the_time_of_half_the_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Coding aside; where bytes bound, that is half the time."""
    monkeypatch.setattr(kernels, "_priced", lambda codec: codec)

    def exchange_ms(batch_size: int, *kinds: str) -> float:
        planner = make_planner(
            topology=topology_for("h100", num_nodes=2, ranks_per_node=1),
            batch_size=batch_size,
            constraints=each(2, "table_wise"),
            comms_model=None,
            search=FixedSearcher([(0, 512, 0), (1, 512, 1)]),
        )
        planner.plan(make_ebc([(10_000, 512)] * 2), [bag_sharder(*kinds)])
        worst = planner.report().worst_ms
        return worst["fwd_comms"] + worst["bwd_comms"]

    coded, plain = exchange_ms(2**19, "fp16", "fp16"), exchange_ms(2**19)
    assert coded == pytest.approx(exchange_ms(2**18))
    assert coded == pytest.approx(plain / 2, rel=0.02)


def test_every_collective_with_codecs_has_torchrecs_name() -> None:
    ops = {
        op
        for kind in SHARDING_TYPES.values()
        for pooled in (True, False)
        for op in kind.comm_ops(pooled=pooled)
    }
    assert ops == {op.name for op in CommOp}
    assert not SHARDING_TYPES["data_parallel"].comm_ops(pooled=False)


def test_codecs_that_cannot_be_summed_are_refused() -> None:
    """Another sharding type is chosen if one is allowed."""
    sharder = bag_sharder("int8", "fp32")
    module = make_ebc([(1000, 64)])
    only_rows = each(1, "row_wise")
    text = "'int8' of POOLED_EMBEDDINGS_REDUCE_SCATTER: its values cannot be"
    with pytest.raises(ConfigError, match=text):
        planned(module, sharder, constraints=only_rows)
    _, plan = planned(module, sharder)
    assert plan.plan[""]["t0"].sharding_type in ("table_wise", "column_wise")
    ops = [CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL]
    elsewhere = bag_sharder("int8", "int8", ops=ops)
    planner, plan = planned(module, elsewhere, constraints=only_rows)
    assert plan.plan[""]["t0"].sharding_type == "row_wise"
    report = rehearse(module, plan, planner.topology, [sharder], batch_size=BATCH)
    assert "its values cannot be summed" in str(report)


def test_rows_of_int8_codecs_are_filled() -> None:
    """INT8 scales 32 values at once; a table that fills them only whole stays whole."""
    constraints = each(1, "table_wise", "column_wise")
    planner = make_planner(2, "cpu", batch_size=6, constraints=constraints)
    sharders = [bag_sharder("int8", "int8")]
    text = "rows of 32 values, which 6 x 24 columns do not fill"
    with pytest.raises(ConfigError, match=text):
        planner.plan(make_ebc([(1000, 24)]), sharders)
    sharding = planner.plan(make_ebc([(1000, 64)]), sharders).plan[""]["t0"]
    for shard in sharding.sharding_spec.shards:
        assert shard.shard_sizes[1] * 6 % 32 == 0


# --- repeated ids ---


def test_distinct_ids_of_parts_agree_with_a_count() -> None:
    rng = np.random.default_rng(0)
    rows, parts, samples = 3_000, 4, 2_000
    ids = (rows * rng.random((parts, samples)) ** 3).astype(np.int64)
    counts = np.bincount(ids.reshape(-1), minlength=rows)
    whole = FeatureProfile(
        batch_size=parts * samples,
        num_lookups=parts * samples,
        access_histogram=count_histogram(counts),
    )
    found = whole.distinct_in_parts(parts, rows)
    each = [len(np.unique(part)) for part in ids]
    assert found.num_lookups == pytest.approx(sum(each), rel=0.02)
    assert found.num_distinct == pytest.approx(whole.num_distinct)
    held = np.bincount(np.concatenate([np.unique(part) for part in ids]))
    np.testing.assert_allclose(
        found.access_histogram[:3], count_histogram(held)[:3], rtol=0.15
    )
    assert not any(found.access_histogram[3:])  # in more than all parts


def test_only_distinct_ids_are_sent_and_looked_up() -> None:
    profile = zipf_profile(
        batch_size=2 * BATCH, pooling_factor=20.0, num_embeddings=10_000
    )
    module, profiles = sequences(64, 64, rows=10_000), {"sf0": profile, "sf1": profile}
    plain, once = (
        planned(module, EmbeddingCollectionSharder(**given), profiles=profiles)[0]
        for given in ({}, {"use_index_dedup": True})
    )
    table, other = (p.last_task.tables[0] for p in (once, plain))
    local = profile.at_batch_size(BATCH, 10_000)
    assert table.pooling_factor == pytest.approx(local.num_distinct / BATCH)
    assert table.num_outputs == pytest.approx(table.pooling_factor)
    assert table.pooling_factor < other.pooling_factor == 20.0
    assert once.last_task.repeats[0] == pytest.approx(20.0 / table.pooling_factor)
    moved, all_moved = (p.costs.simulator(p.last_task) for p in (once, plain))
    share = table.pooling_factor / 20.0
    whole = [p.price(np.array([0]), p.dims_T[:1]) for p in (moved, all_moved)]
    less, more = (priced.loads_N3 for priced in whole)
    # All lengths are sent, one for each sample; of each table only distinct ids.
    lengths = np.array([8.0 * 2 * BATCH, 0.0, 0.0])
    np.testing.assert_allclose(less - lengths, (more - lengths) * share)
    compute = [
        sum(r.fwd_compute + r.bwd_compute for r in p.last_result.predicted.ranks)
        for p in (once, plain)
    ]
    assert 0 < compute[0] < compute[1]


def test_removing_repeats_takes_time() -> None:
    simulator, plain = phases(pooled=False)
    _, thrice = phases(pooled=False, repeats=(3.0, 3.0))
    # A rank's own samples: half of those of both tables, one distinct id each.
    ids = 2 * BATCH / 2 * 3
    rows = (32 + 64) * BATCH / 2 * 4 * (1 + 3)
    expected = np.array([ids * 304, rows, rows]) * simulator.encoder.byte_ms
    np.testing.assert_allclose(thrice - plain, np.tile(expected, (2, 1)))


# --- batches of few samples ---


def test_few_samples_make_few_outputs() -> None:
    found = []
    for sizes in (None, [BATCH // 4]):
        limits = each(1, "table_wise", pooling_factors=[4.0], batch_sizes=sizes)
        planner, _ = planned(make_ebc([(1000, 64)]), bag_sharder(), constraints=limits)
        [table] = planner.last_task.tables
        found.append((table.num_outputs, table.pooling_factor, cost_of(planner)))
    (outputs, lookups, cost), less = found
    assert (outputs, *less[:2]) == (1, 0.25, lookups / 4)
    assert 0 < less[2] < cost
    # A profile of variable batches tells the same.
    seen = FeatureProfile(batch_size=100, num_lookups=400.0, batch_share=0.25)
    planner, _ = planned(
        make_ebc([(1000, 64)]),
        bag_sharder(),
        constraints=each(1, "table_wise"),
        profiles={"f0": seen},
    )
    [table] = planner.last_task.tables
    assert (table.num_outputs, table.pooling_factor) == less[:2]


# --- a padding id that gets most lookups ---


RANKS, ROWS, PER_RANK, LENGTH = 4, 100_000, 64, 50


def profile_of(share: float, hot: int = 0, rows: int = ROWS) -> FeatureProfile:
    """A batch of all ranks in which one id has a share of the lookups."""
    rng = np.random.default_rng(7)
    ids = rng.integers(0, rows, RANKS * PER_RANK * LENGTH)
    ids[: round(share * len(ids))] = hot
    return profile_ids(rng.permutation(ids), np.full(RANKS * PER_RANK, LENGTH))


def planner_of(profiles: dict[str, FeatureProfile], *kinds: str, **fields: Any) -> Any:
    arguments: dict[str, Any] = {
        "cost_model": AnalyticCostModel(launch_ms=0.001),
        "comms_model": AnalyticCommsModel(),
        "constraints": each(2, *kinds) if kinds else None,
        "profiles": profiles,
        "batch_size": PER_RANK,
        "topology": gpus(RANKS, hbm_cap=GIB),
    }
    return make_planner(**(arguments | fields))


def hot_notes(planner: Any) -> list[str]:
    return [n.text for n in last_result(planner).notes if n.code == "hot-rows"]


def test_a_forced_row_wise_plan_names_its_hot_rank() -> None:
    profile = profile_of(0.62)
    planner = planner_of({"f0": profile, "f1": profile_of(0.0)}, "row_wise")
    planner.plan(make_ebc([(ROWS, 64)] * 2), get_default_sharders())
    forward = [r.fwd_compute for r in last_result(planner).predicted.ranks]
    assert int(np.argmax(forward)) == 0
    assert forward[0] > 1.8 * max(forward[1:])
    [text] = hot_notes(planner)
    assert text.startswith(
        "one id has many of the lookups: id 0 is 62% of 't0', rank 0 serves 7"
    )
    assert "drop it from the inputs, or shard such tables column- or" in text
    assert f"warning: {text[:50]}" in str(planner.report())


def test_tables_with_a_hot_rank_share_a_note() -> None:
    """Of five padded tables and one with few rows, notes name at most three."""
    profiles = {f"f{i}": profile_of(0.9 - 0.1 * i) for i in range(5)}
    profiles["f5"] = profile_of(0.0, rows=ROWS // 4)
    limits = each(6, "row_wise")
    planner = planner_of(profiles, constraints=limits)
    planner.plan(make_ebc([(ROWS, 64)] * 6), get_default_sharders())
    padded, uneven = hot_notes(planner)
    assert padded.count("id 0 is") == 3 and "id 0 is 90% of 't0', rank 0 " in padded
    assert "; and 2 more tables. If it is padding, " in padded
    assert uneven.startswith("lookups are not spread over the rows: of 't5', rank ")


def test_ids_of_few_rows_are_named_without_a_padding_id() -> None:
    few = profile_of(0.0, rows=ROWS // 4)
    planner = planner_of({"f0": few, "f1": profile_of(0.0)}, "row_wise")
    planner.plan(make_ebc([(ROWS, 64)] * 2), get_default_sharders())
    [text] = hot_notes(planner)
    assert text.startswith("lookups are not spread over the rows: of 't0', rank 0 ")
    assert "Permute or hash the ids" in text


@pytest.mark.parametrize("knows", [True, False])
def test_a_plan_by_itself_avoids_row_wise_for_a_padded_table(knows: bool) -> None:
    """Every column shard gets all ids, so without ranges row-wise looks cheaper."""
    profile = profile_of(0.7)
    if not knows:
        profile = dataclasses.replace(profile, hot_rows=None)
    planner = planner_of({"f0": profile}, constraints=None)
    module = make_ebc([(ROWS, 64)])
    plan = planner.plan(module, get_default_sharders())
    assert types_of(plan)["t0"] == ("column_wise" if knows else "row_wise")
    assert hot_notes(planner) == []
    if knows:
        forced = planner_of(
            {"f0": profile}, constraints=only(sharding_types=["row_wise"])
        )
        forced.plan(module, get_default_sharders())
        assert cost_of(forced) > 1.2 * cost_of(planner)


def test_sequences_send_the_outputs_of_the_hot_rank() -> None:
    costs = []
    for profile in (profile_of(0.62), profile_of(0.0)):
        planner = planner_of(
            {"sf0": profile},
            constraints=only("s0", sharding_types=["row_wise"]),
            comms_model=AnalyticCommsModel(gb_per_s=0.01),
            cost_model=AnalyticCostModel(0.001, 0.0, 0.0),
        )
        planner.plan(sequences(64, rows=ROWS), get_default_sharders())
        [stage] = last_result(planner).predicted.stages
        costs.append(max(r.fwd_comms for r in stage.ranks))
    assert costs[0] == pytest.approx(costs[1] * 4 * (0.62 + 0.38 / 4), rel=0.05)


def test_memory_counts_the_lookups_of_each_rank() -> None:
    held = []
    for profile in (profile_of(0.62), profile_of(0.0)):
        profiles = {"f0": profile, "f1": profile_of(0.0)}
        planner = planner_of(profiles, "row_wise", batch_size=4096)
        planner.plan(make_ebc([(ROWS, 64)] * 2), get_default_sharders())
        ranks = planner.enumerator.memory.ranks(planner.get_selected_options())
        held.append([rank.activations for rank in ranks])
    hot, even = held
    assert hot[0] > 1.2 * even[0]
    assert max(hot[1:]) < even[0]
    assert len(set(even)) == 1


def test_ids_that_the_model_maps_to_rows_count_as_even() -> None:
    outside = profile_of(0.62, rows=ROWS * 1_000)
    planner = planner_of({"f0": outside, "f1": profile_of(0.0)}, "row_wise")
    planner.plan(make_ebc([(ROWS, 64)] * 2), get_default_sharders())
    forward = [r.fwd_compute for r in last_result(planner).predicted.ranks]
    assert forward == pytest.approx([forward[0]] * RANKS)
    assert hot_notes(planner) == []


class Reordering(AnalyticCostModel):
    """Reordering columns takes a time per byte."""

    order_ns = 0.0

    def column_order(self, bytes_N: Any) -> Any:
        return np.stack([bytes_N * self.order_ns * 1e-6] * 2, axis=-1)


@pytest.mark.parametrize(
    ("order_ns", "types", "expected"),
    [
        (0.0, ("table_wise", "column_wise"), "column_wise"),
        (5.0, ("table_wise", "column_wise"), "table_wise"),
        (5.0, ("column_wise",), "column_wise"),
    ],
)
def test_tables_beside_a_split_one_are_not_reordered_if_that_is_shorter(
    order_ns: float, types: tuple[str, ...], expected: str
) -> None:
    """A split table's type has its own kernel and exchange, but reorders columns."""
    cost_model = Reordering()
    cost_model.order_ns = order_ns
    planner = make_planner(
        cost_model=cost_model,
        batch_size=BATCH,
        constraints=each(3, *types),
        search=FixedSearcher([(0, 32, 0), (0, 32, 1), (1, 64, 0), (2, 64, 1)]),
    )
    plan = planner.plan(make_ebc([(1_000, 64)] * 3), [bag_sharder()])
    found = [sharding.sharding_type for sharding in plan.plan[""].values()]
    assert found == ["column_wise", expected, expected]
    reordered = 64 if expected == "table_wise" else 192
    stages = last_result(planner).predicted.stages
    orders = [order for stage in stages for order in stage.reorder_ms]
    of_columns = reordered * BATCH * 4 * order_ns * 1e-6
    assert max(orders) == pytest.approx(of_columns, abs=0.02)
