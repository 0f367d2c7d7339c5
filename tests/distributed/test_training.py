"""Plans at work: gloo ranks train sharded tables and are held to unsharded ones.

TorchRec's sharders offer row-wise, table-row-wise and grid sharding on GPUs alone, but
all of them run over gloo: the sharder here offers them.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.planner import ParameterConstraints
from torchrec.modules.embedding_configs import PoolingType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.builders import (
    CPU,
    Chosen,
    FixedSearcher,
    Triples,
    bag_config,
    bags,
    make_planner,
)
from tests.distributed.ranks import (
    NODE_SIZE,
    ONE_NODE,
    TWO_NODES,
    Jobs,
    OfJob,
    Results,
)
from tests.distributed.unsharded import (
    draw_batch,
    gap,
    shard_model,
    train_step,
    weights_gap,
    weights_of,
)
from torchrec_neuroshard.costs.task import Placement, ShardingTask
from torchrec_neuroshard.errors import InfeasibleError, PlacementError
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel

pytestmark = pytest.mark.distributed

LOCAL_BATCH = 6
LEARNING_RATE = 0.3
NUM_STEPS = 3


@dataclass(frozen=True)
class Case:
    """A model and the placement that its planner is told to take."""

    dims: Sequence[int]
    triples: Sequence[tuple[int, int, int]] | None
    """(table, width, rank); None: what the real search finds."""
    types: Sequence[str] = ()
    """Sharding types expected of t0, t1, ..."""
    only: dict[int, str] = field(default_factory=dict)
    """Tables that constraints allow one sharding type only."""
    features: dict[int, list[str]] = field(default_factory=dict)
    weighted: bool = False
    mean: Sequence[int] = ()
    """Tables with mean pooling: they cannot share a kernel with the others."""
    rates: dict[int, float] = field(default_factory=dict)
    """Learning rates unlike the others': such tables need a kernel of their own."""
    sequence: bool = False
    codec: bool = False
    """Whether the collectives are quantised to eight bits."""
    by_sharder: bool = False
    """Whether the sharder brings the optimizer, and not the tables."""
    num_nodes: int = ONE_NODE

    def features_of(self, table: int) -> list[str]:
        return self.features.get(table, [f"f{table}"])


TABLE, COLUMN, ROW = "table_wise", "column_wise", "row_wise"
REPLICAS, NODE_ROW, GRID = "data_parallel", "table_row_wise", "grid_shard"

CASES = {
    "k-way": Case(
        dims=(32, 16),
        triples=[(0, 16, 0), (0, 16, 1), (1, 8, 0), (1, 8, 1)],
        types=(COLUMN,) * 2,
        by_sharder=True,
    ),
    "uneven": Case(
        dims=(64, 32, 12, 8),
        triples=[
            (0, 48, 0),
            (0, 16, 1),
            (1, 12, 0),
            (1, 20, 1),
            (2, 12, 1),
            (3, 8, 1),
        ],
        types=(COLUMN, COLUMN, TABLE, TABLE),
        only={2: TABLE, 3: TABLE},
    ),
    "empty rank": Case(
        dims=(16, 8),
        triples=[(0, 16, 1), (1, 8, 1)],
        types=(TABLE,) * 2,
        only={0: TABLE, 1: TABLE},
    ),
    "weighted, shared feature": Case(
        dims=(32, 16, 8),
        triples=[(0, 8, 0), (0, 24, 1), (1, 16, 0)],
        types=(COLUMN, COLUMN, ROW),
        only={2: ROW},
        features={0: ["f0", "f2"], 1: ["f0"], 2: ["f0"]},
        weighted=True,
    ),
    "several kernels": Case(
        dims=(32, 16, 8),
        triples=[(0, 8, 0), (0, 24, 1), (1, 16, 0), (2, 8, 0)],
        types=(COLUMN,) * 3,
        mean=(1,),
        rates={2: 0.1},
    ),
    "search": Case(dims=(64, 48, 32, 16, 8), triples=None),
    "split sequences": Case(
        dims=(32, 32),
        triples=None,
        types=(COLUMN, COLUMN),
        features={0: ["f0", "f2", "f3"]},
        sequence=True,
    ),
    "split sequences beside others, and ranks without any": Case(
        dims=(8, 8, 8),
        triples=None,
        types=(COLUMN, TABLE, ROW),
        only={1: TABLE, 2: ROW},
        features={0: ["f0", "f3", "f4"]},
        sequence=True,
        num_nodes=TWO_NODES,
    ),
    "every kind on two nodes": Case(
        dims=(32, 16, 16, 8, 32),
        triples=[(0, 20, 0), (0, 12, 3)],
        types=(GRID, NODE_ROW, ROW, REPLICAS, COLUMN),
        only={0: GRID, 1: NODE_ROW, 2: ROW, 3: REPLICAS},
        num_nodes=TWO_NODES,
    ),
    "codec": Case(
        dims=(64, 32),
        triples=[(0, 64, 1), (1, 32, 0)],
        types=(TABLE,) * 2,
        codec=True,
    ),
}


class OnCpus:
    """Offers on CPUs what TorchRec's sharder offers on GPUs."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        found: Any = super()
        return list(found.sharding_types("cuda"))


class BagSharder(OnCpus, EmbeddingBagCollectionSharder): ...


class SequenceSharder(OnCpus, EmbeddingCollectionSharder): ...


def build_model(case: Case) -> Any:
    torch.manual_seed(1)
    if case.sequence:
        return EmbeddingCollection(
            tables=[
                EmbeddingConfig(11 + i, dim, f"t{i}", feature_names=case.features_of(i))
                for i, dim in enumerate(case.dims)
            ]
        )
    tables = [
        bag_config(
            i,
            11 + i,
            dim,
            feature_names=case.features_of(i),
            pooling=PoolingType.MEAN if i in case.mean else PoolingType.SUM,
        )
        for i, dim in enumerate(case.dims)
    ]
    return bags(*tables, weighted=case.weighted, device=CPU)


def build_planner(case: Case, **arguments: Any) -> Any:
    def given(task: ShardingTask) -> Triples:
        triples = case.triples or ()
        try:
            Placement.from_widths(task.world_size, triples).check(task)
        except PlacementError as error:
            raise InfeasibleError(str(error)) from error
        return triples

    constraints = {
        f"t{i}": ParameterConstraints(
            sharding_types=[case.only[i]] if i in case.only else [TABLE, COLUMN],
            # A grid needs a column shard on each node.
            min_partition=16 if case.only.get(i) == GRID else None,
            pooling_factors=[1.0] * len(case.features_of(i)),
        )
        for i in range(len(case.dims))
    }
    return make_planner(
        dist.get_world_size(),
        topology_arguments={"local_world_size": NODE_SIZE},
        batch_size=LOCAL_BATCH,
        constraints=constraints,
        cost_model=AnalyticCostModel(launch_ms=0.0),
        comms_model=AnalyticCommsModel(100.0),
        search="default" if case.triples is None else FixedSearcher(given),
        **arguments,
    )


def outputs_of(model: nn.Module, batch: Any, case: Case) -> dict[str, torch.Tensor]:
    out = model(batch)
    if case.sequence:
        return {k: v.values() for k, v in out.items()}
    found: dict[str, torch.Tensor] = out.to_dict()
    return found


def kernels_of(sharded: Any) -> list[list[list[int]]]:
    """Local rows and widths in each fused kernel of this rank, sorted."""
    found = []
    for lookup in sharded._lookups:
        for kernel in getattr(lookup, "_emb_modules", ()):
            config = kernel.config
            if "Fused" in type(kernel).__name__:
                tables = config.embedding_tables
                found.append(sorted([t.local_rows, t.local_cols] for t in tables))
    return sorted(found)


def expected_kernels(planner: Any, plan: Sequence[Any]) -> Any:
    """What the costs take for each rank's kernels, how many stages there are, and the
    sharding types of those whose outputs are reordered; on the first rank."""
    options = [o for o in plan if planner.costs.reader.has_cost(o)]
    priced = planner.costs.price(options)
    fused = [o.compute_kernel != "dense" for o in options]
    kernels: list[dict[int, list[list[int]]]] = [
        {} for _ in range(dist.get_world_size())
    ]
    index_N = priced.table_N
    group_N = priced.simulator.groups_T[index_N]
    for index, group, shard in zip(index_N, group_N, priced.shards, strict=True):
        if fused[index]:
            held = kernels[shard.rank].setdefault(int(group), [])
            held.append([int(n) for n in shard.size])
    simulator = priced.simulator
    stages_T = simulator.stages_T
    columns_S = simulator.ordered_columns(
        priced.num_shards_T, simulator.columns_per_table
    )
    kind_of = {s: o.sharding_type for o, s in zip(options, stages_T, strict=True)}
    return (
        [sorted(map(sorted, k.values())) for k in kernels],
        len(priced.task.stage_names),
        [kind_of[stage] for stage in np.flatnonzero(columns_S)],
    )


def run_case(case: Case, rank: int) -> dict[str, Any]:
    """Plan, train and compare; runs on every rank."""
    arguments: dict[str, Any] = {}
    if case.codec:
        arguments["qcomm_codecs_registry"] = get_qcomm_codecs_registry(
            QCommsConfig(CommType.INT8, CommType.INT8)
        )
    if case.by_sharder:
        arguments["fused_params"] = {
            "optimizer": EmbOptimType.EXACT_SGD,
            "learning_rate": LEARNING_RATE,
        }
    sharders: list[Any] = [BagSharder(**arguments), SequenceSharder()]
    whole = build_model(case)
    model = copy.deepcopy(whole)
    for i, parameter in enumerate(() if case.by_sharder else model.parameters()):
        rate = case.rates.get(i, LEARNING_RATE)
        apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": rate})
    chosen = Chosen()
    planner = build_planner(case, callbacks=[chosen])
    plan = planner.collective_plan(model, sharders)
    assert planner.last_result.fallback is None, planner.last_result.fallback
    entries = plan.plan[""]
    sharded, start = shard_model(model, plan, sharders), weights_of(whole)
    # Not every table is trained in its kernel: data-parallel ones are not.
    replicas = {f"t{i}" for i, kind in case.only.items() if kind == REPLICAS}
    rest = [p for n, p in sharded.named_parameters() if n.split(".")[-2] in replicas]
    own_rates: list[dict[str, Any]] = [
        {"params": [p], "lr": case.rates.get(i, LEARNING_RATE)}
        for i, p in enumerate(whole.parameters())
    ]
    optimizer = torch.optim.SGD([{"params": rest}, *own_rates], lr=LEARNING_RATE)
    forward, world_size = 0.0, dist.get_world_size()
    keys = sorted({f for i in range(len(case.dims)) for f in case.features_of(i)})
    for step in range(NUM_STEPS):
        batches = [
            draw_batch(keys, LOCAL_BATCH, 11, 100 * step + r, weighted=case.weighted)
            for r in range(world_size)
        ]
        expected = [outputs_of(whole, b, case) for b in batches]
        got = outputs_of(sharded, batches[rank], case)
        off = train_step(got, expected, rank, optimizer, LOCAL_BATCH)
        forward = max(forward, *off.values())
    want = weights_of(whole)
    digest: list[Any] = [None] * world_size
    layout = expected_kernels(planner, chosen.options) if rank == 0 else None
    dist.all_gather_object(digest, (str(plan), repr(planner.last_result), layout))
    kernels, num_stages, ordered = digest[0][2]
    tables = sharded.module
    # TorchRec puts their outputs in order after the exchange.
    reordered = [
        tables._sharding_types[i]
        for i, output_dist in enumerate(tables._output_dists)
        if getattr(output_dist, "_callbacks", None)
    ]
    return {
        "forward": forward,
        "weights": weights_gap(sharded, want),
        "moved": min(gap(want[t], start[t]) for t in want),
        "types": [entries[f"t{i}"].sharding_type for i in range(len(case.dims))],
        "num_shards": Counter(s.table for s in planner.last_result.placement.shards),
        "same_everywhere": len({found[:2] for found in digest}) == 1,
        "kernels": [kernels_of(tables), kernels[rank]],
        "num_stages": [len(tables._output_dists), num_stages],
        "reordered": reordered,
        "expected_reordered": ordered,
    }


def run_subgroup(rank: int) -> dict[str, Any]:
    """A group whose first rank is not the first of all."""
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return {}
    planner = build_planner(CASES["search"])
    plan = planner.collective_plan(build_model(CASES["search"]), pg=group)
    return {"tables": sorted(plan.plan[""])}


def run_small_sequences() -> dict[str, Any]:
    """Train ten rows that hold their numbers; the planner may take any type."""
    config = EmbeddingConfig(
        num_embeddings=10, embedding_dim=4, name="t0", feature_names=["f0"]
    )
    model = EmbeddingCollection(tables=[config])
    with torch.no_grad():
        model.embeddings["t0"].weight.copy_(torch.arange(10.0)[:, None].expand(10, 4))
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 1.0})
    sharders: list[Any] = [EmbeddingCollectionSharder()]
    planner = make_planner(dist.get_world_size(), cost_model="cpu")
    plan = planner.collective_plan(model, sharders)
    sharded = shard_model(model, plan, sharders)
    batch = KeyedJaggedTensor(
        keys=["f0"],
        values=torch.tensor([1, 2, 3, 4]),
        lengths=torch.tensor([2, 0, 1, 1]),
    )
    before = sharded(batch)["f0"].values()
    torch.autograd.backward(before.sum())
    after = sharded(batch)["f0"].values()
    return {"before": before[:, 0].tolist(), "after": after[:, 0].tolist()}


class TwoNames(nn.Module):
    """Looks up two batches in one collection, which it has under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.users = bags(bag_config(0, 50, 8), bag_config(1, 30, 8), device=CPU)
        self.items = nn.ModuleList([self.users])

    def forward(self, users: Any, items: Any) -> torch.Tensor:
        first, second = self.users(users).values(), self.items[0](items).values()
        return torch.cat([first, second], dim=1)


def run_two_names(rank: int) -> dict[str, Any]:
    """Train a step of a collection that is read twice."""
    torch.manual_seed(0)
    model = TwoNames()
    plain = copy.deepcopy(model)
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 1.0})
    sharders = [BagSharder()]
    planner = make_planner(dist.get_world_size())
    plan = planner.collective_plan(model, sharders)
    sharded = shard_model(model, plan, sharders)
    batches = [
        [draw_batch(["f0", "f1"], 6, 30, 2 * r + i) for i in (0, 1)] for r in (0, 1)
    ]
    out = sharded(*batches[rank])
    expected = [plain(*both) for both in batches]
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
    (off,) = train_step(
        {"out": out}, [{"out": e} for e in expected], rank, optimizer, 6
    ).values()
    whole = dict(plain.named_parameters())
    off = max(off, weights_gap(sharded, whole))
    paths = {path: sorted(tables) for path, tables in plan.plan.items()}
    return {
        "paths": paths,
        "off": off,
        "once": sharded.module.items[0] is sharded.module.users,
    }


def rank_jobs(num_nodes: int, rank: int, _: Path) -> Jobs:
    jobs: Jobs = {
        name: functools.partial(run_case, case, rank)
        for name, case in CASES.items()
        if case.num_nodes == num_nodes
    }
    if num_nodes == TWO_NODES:
        jobs["subgroup"] = lambda: run_subgroup(rank)
    else:
        jobs["small sequences"] = run_small_sequences
        jobs["two names"] = lambda: run_two_names(rank)
    return jobs


@pytest.mark.parametrize("name", CASES)
def test_training_and_its_kernels_are_as_expected(results: OfJob, name: str) -> None:
    case = CASES[name]
    for result in results(name):
        assert result["types"] == list(case.types or result["types"])
        assert result["same_everywhere"]
        # As unsharded, but for what the codec rounds.
        allowed = 1e-1 if case.codec else 1e-5
        assert result["forward"] < allowed and result["weights"] < allowed
        assert not case.codec or result["forward"] > 1e-7
        assert result["moved"] > 1e-2  # the steps did something
        for found, expected in (result["kernels"], result["num_stages"]):
            assert found == expected
        assert set(result["reordered"]) <= set(result["expected_reordered"])
    assert any(r["kernels"][0] for r in results(name))


def test_split_tables_are_put_in_order_and_search_splits_one(results: OfJob) -> None:
    for result in results("k-way"):
        assert result["reordered"] == result["expected_reordered"] == [COLUMN]
    # Otherwise the search's case would train whole tables alone.
    assert max(results("search")[0]["num_shards"].values()) == 2


def test_small_sequence_tables_are_looked_up_row_by_row(ranks: Results) -> None:
    """FBGEMM's dense kernel for CPUs would pool them, and train other rows."""
    for result in ranks(__name__, ONE_NODE, "small sequences"):
        assert result["before"] == [1, 2, 3, 4]
        assert result["after"] == [0, 1, 2, 3]  # gradients are means over the ranks


def test_a_collection_under_two_names_is_sharded_and_trained_once(
    ranks: Results,
) -> None:
    for result in ranks(__name__, ONE_NODE, "two names"):
        assert result["paths"] == {"users": ["t0", "t1"], "items.0": ["t0", "t1"]}
        assert result["once"] and result["off"] < 1e-5


def test_group_with_another_first_rank(ranks: Results) -> None:
    tables = [f"t{i}" for i in range(len(CASES["search"].dims))]
    found = ranks(__name__, TWO_NODES, "subgroup")
    assert found == [{}, {"tables": tables}, {}, {"tables": tables}]
