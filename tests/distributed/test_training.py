"""Plans at work: gloo ranks train sharded tables and are held to unsharded ones.

TorchRec's sharders offer row-wise, table-row-wise and grid sharding on GPUs alone, but
all of them run over gloo: the sharder here offers them.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import ShardingPlan

from tests.builders import Chosen, FixedSearcher, Triples, make_planner
from tests.distributed.ranks import (
    NODE_SIZE,
    ONE_NODE,
    TWO_NODES,
    Jobs,
    OfJob,
    daily,
)
from tests.distributed.unsharded import draw_batch, local_parts, loss_of
from torchrec_neuroshard.errors import ConfigError, InfeasibleError, PlacementError
from torchrec_neuroshard.placement import Placement, ShardingTask
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
    whole: Sequence[int] = ()
    """Tables that constraints keep table-wise."""
    other: dict[int, str] = field(default_factory=dict)
    """Tables that constraints allow another sharding type only."""
    features: dict[int, list[str]] = field(default_factory=dict)
    weighted: bool = False
    mean: Sequence[int] = ()
    """Tables with mean pooling: they cannot share a kernel with the others."""
    rates: dict[int, float] = field(default_factory=dict)
    """Learning rates unlike the others': such tables need a kernel of their own."""
    sequence: bool = False
    distinct: bool = False
    """Whether repeated ids are sent and looked up once."""
    pipeline: str = ""
    """The pipeline of TorchRec's that trains; "": a plain loop."""
    num_nodes: int = ONE_NODE


TABLE, COLUMN, ROW = "table_wise", "column_wise", "row_wise"
REPLICAS, NODE_ROW, GRID = "data_parallel", "table_row_wise", "grid_shard"

CASES = {
    "k-way": Case(
        dims=(32, 16),
        triples=[(0, 16, 0), (0, 16, 1), (1, 8, 0), (1, 8, 1)],
        types=(COLUMN,) * 2,
    ),
    "uneven": Case(
        dims=(64, 32, 12, 8),
        triples=[
            (0, 48, 0),
            (0, 16, 1),
            (1, 12, 0),
            (1, 20, 1),
            (2, 12, 1),
            (3, 16, 1),
        ],
        types=(COLUMN, COLUMN, COLUMN, TABLE),
        whole=(3,),
    ),
    "empty rank": Case(
        dims=(16, 8), triples=[(0, 16, 1), (1, 8, 1)], types=(TABLE,) * 2, whole=(0, 1)
    ),
    "weighted, shared feature": Case(
        dims=(32, 16, 8),
        triples=[(0, 8, 0), (0, 24, 1), (1, 16, 0)],
        types=(COLUMN, COLUMN, ROW),
        other={2: ROW},
        features={0: ["f0", "f2"], 1: ["f0"], 2: ["f0"]},
        weighted=True,
    ),
    "mean and sum": Case(
        dims=(32, 16, 8),
        triples=[(0, 8, 0), (0, 24, 1), (1, 16, 0), (2, 8, 0)],
        types=(COLUMN,) * 3,
        mean=(1,),
    ),
    "two learning rates": Case(
        dims=(32, 16, 8),
        triples=[(0, 20, 0), (0, 12, 1), (1, 16, 0), (2, 8, 0)],
        types=(COLUMN,) * 3,
        rates={1: 0.1},
    ),
    "rows alone": Case(
        dims=(16, 32, 8),
        triples=None,
        types=(ROW,) * 3,
        other={i: ROW for i in range(3)},
        mean=(1,),
    ),
    "every kind": Case(
        dims=(16, 32, 8, 24),
        triples=[(0, 20, 0), (0, 12, 1), (1, 24, 1)],
        types=(ROW, COLUMN, REPLICAS, TABLE),
        other={0: ROW, 2: REPLICAS},
        whole=(3,),
    ),
    "search": Case(dims=(64, 48, 32, 16, 8), triples=None),
    "sequences": Case(
        dims=(16, 16),
        triples=[(0, 16, 1)],
        types=(ROW, TABLE),
        other={0: ROW},
        sequence=True,
    ),
    "grid": Case(
        dims=(32, 32, 16),
        triples=[(0, 16, 2)],
        types=(GRID, GRID, TABLE),
        other={0: GRID, 1: GRID},
        num_nodes=TWO_NODES,
    ),
    "every kind on two nodes": Case(
        dims=(32, 16, 16, 8, 32),
        triples=[(0, 20, 0), (0, 12, 3)],
        types=(GRID, NODE_ROW, ROW, REPLICAS, COLUMN),
        other={0: GRID, 1: NODE_ROW, 2: ROW, 3: REPLICAS},
        num_nodes=TWO_NODES,
    ),
    "distinct ids": Case(
        dims=(16, 16),
        triples=[(0, 16, 1)],
        types=(ROW, TABLE),
        other={0: ROW},
        features={0: ["f0", "f1"], 1: ["f2"]},
        sequence=True,
        distinct=True,
    ),
    **{
        pipeline: Case(
            dims=(32, 16, 8),
            triples=[(0, 20, 0), (0, 12, 1), (1, 16, 1)],
            types=(COLUMN, COLUMN, ROW),
            other={2: ROW},
            pipeline=pipeline,
        )
        for pipeline in ("TrainPipelineSemiSync", "TrainPipelineFusedSparseDist")
    },
}
DAILY = {
    *("failure", "subgroup"),
    *(name for name, case in CASES.items() if not (case.pipeline or case.distinct)),
}


class BagSharder(EmbeddingBagCollectionSharder):
    """TorchRec's, but offering on CPUs what it offers on GPUs."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return list(super().sharding_types("cuda"))


class SequenceSharder(EmbeddingCollectionSharder):
    """The same of sequences."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return list(super().sharding_types("cuda"))


SHARDERS: list[Any] = [BagSharder(), SequenceSharder()]


class Pipelined(nn.Module):
    """What TorchRec's pipelines train: a loss, and the outputs beside it."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, batch: Any) -> Any:
        return loss_and_outputs(self.tables(batch))


@torch.fx.wrap
def loss_and_outputs(pooled: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    outputs = pooled.to_dict()
    return loss_of(outputs, LOCAL_BATCH), outputs


class HostStream(torch.cpu.Stream):
    """Does nothing; pipelines ask for its device."""

    device = torch.device("cpu")


def pipelined(
    case: Case, sharded: Any, batches: Sequence[Any]
) -> Iterator[dict[str, torch.Tensor]]:
    """Train by a pipeline; yield each batch's outputs."""
    from torchrec.distributed.train_pipeline import train_pipelines

    semi_sync = {"start_batch": 0} if "SemiSync" in case.pipeline else {}
    loop = getattr(train_pipelines, case.pipeline)(
        sharded, sharded.fused_optimizer, torch.device("cpu"), **semi_sync
    )
    # TorchRec makes streams for GPUs alone.
    loop._data_dist_stream, loop._stream_context = HostStream(), nullcontext
    queue = iter(batches)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "record_stream", lambda *_: None)
        for _ in batches:
            yield loop.progress(queue)


def distinct_ids(
    table_first_F: torch.Tensor,
    feature_first_F: torch.Tensor,
    offsets: torch.Tensor,
    indices: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """What FBGEMM's kernel, which is for GPUs alone, finds for each table.

    Returns:
        Lengths and offsets of bags that hold a table's distinct ids, those ids, and
        where among them each id is.
    """
    lengths = offsets.diff().view(len(feature_first_F) - 1, -1)
    base = table_first_F[:-1].repeat_interleave(lengths.sum(dim=1))
    linear, reverse = torch.unique(indices + base, return_inverse=True)
    found, distinct = torch.zeros_like(lengths), []
    for first, end in pairwise(sorted(set(feature_first_F.tolist()))):
        low, high = table_first_F[first], table_first_F[end]
        own = linear[(linear >= low) & (linear < high)] - low
        found[first, 0] = len(own)
        distinct.append(own)
    ends = torch.cat([found.new_zeros(1), found.flatten().cumsum(0)])
    return found.flatten(), ends, torch.cat(distinct), reverse


@functools.cache
def distinct_ids_on_cpus() -> Any:
    library: Any = torch.library.Library("fbgemm", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("jagged_unique_indices", distinct_ids, "CPU")
    return library


def build_model(case: Case) -> Any:
    from torchrec import (
        EmbeddingBagCollection,
        EmbeddingBagConfig,
        EmbeddingCollection,
        EmbeddingConfig,
    )
    from torchrec.modules.embedding_configs import PoolingType

    torch.manual_seed(1)
    shared: list[dict[str, Any]] = [
        {
            "name": f"t{i}",
            "num_embeddings": 11 + i,
            "embedding_dim": dim,
            "feature_names": case.features.get(i, [f"f{i}"]),
        }
        for i, dim in enumerate(case.dims)
    ]
    if case.sequence:
        return EmbeddingCollection(tables=[EmbeddingConfig(**s) for s in shared])
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                **s, pooling=PoolingType.MEAN if i in case.mean else PoolingType.SUM
            )
            for i, s in enumerate(shared)
        ],
        is_weighted=case.weighted,
    )


def types_for(case: Case, table: int) -> list[str]:
    if table in case.other:
        return [case.other[table]]
    if table in case.whole:
        return [TABLE]
    return [TABLE, COLUMN]


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
            sharding_types=types_for(case, i),
            # A grid needs a column shard on each node.
            min_partition=16 if case.other.get(i) == GRID else None,
            pooling_factors=[1.0] * len(case.features.get(i, [f"f{i}"])),
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


def global_batch(case: Case, step: int) -> list[Any]:
    """One KeyedJaggedTensor per rank."""
    generator = torch.Generator().manual_seed(100 + step)
    keys = sorted(
        {f for i in range(len(case.dims)) for f in case.features.get(i, [f"f{i}"])}
    )
    return [
        draw_batch(keys, LOCAL_BATCH, 11, generator, weighted=case.weighted)
        for _ in range(dist.get_world_size())
    ]


def outputs_of(model: nn.Module, batch: Any, case: Case) -> dict[str, torch.Tensor]:
    out = model(batch)
    if case.pipeline:
        return dict(out[1])
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


def expected_kernels(planner: Any, plan: Sequence[Any]) -> dict[str, Any]:
    """What the costs take for kernels and collectives, by rank; on the first one."""
    options = [o for o in plan if planner.costs.reader.has_cost(o)]
    priced = planner.costs.price(options)
    fused = [o.compute_kernel != "dense" for o in options]
    kernels: list[dict[int, list[list[int]]]] = [
        {} for _ in range(dist.get_world_size())
    ]
    index_N = priced.found.table_N
    group_N = priced.simulator.groups_T[index_N]
    for index, group, shard in zip(index_N, group_N, priced.found.shards, strict=True):
        if fused[index]:
            held = kernels[shard.rank].setdefault(int(group), [])
            held.append([int(n) for n in shard.size])
    return {
        "kernels": [sorted(map(sorted, k.values())) for k in kernels],
        "num_stages": len(priced.found.task.stage_names),
        "reordered": [
            next(
                o.sharding_type
                for o, s in zip(options, priced.simulator.stages_T, strict=True)
                if s == stage
            )
            for stage in np.flatnonzero(priced.ordered_columns())
        ],
    }


def reordered_types(sharded: Any) -> list[str]:
    """Sharding types whose outputs TorchRec puts in order after the exchange."""
    return [
        kind
        for kind, output_dist in zip(
            sharded._sharding_types, sharded._output_dists, strict=True
        )
        if getattr(output_dist, "_callbacks", None)
    ]


def run_case(case: Case, rank: int) -> dict[str, Any]:
    """Plan, train and compare; runs on every rank."""
    from torchrec.distributed import DistributedModelParallel
    from torchrec.optim.apply_optimizer_in_backward import (
        apply_optimizer_in_backward,
    )

    whole = build_model(case)
    sharders = SHARDERS
    if case.distinct:
        distinct_ids_on_cpus()
        sharders = [SequenceSharder(use_index_dedup=True)]
    model = copy.deepcopy(whole)
    for i, parameter in enumerate(model.parameters()):
        rate = case.rates.get(i, LEARNING_RATE)
        apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": rate})
    chosen = Chosen()
    planner = build_planner(case, callbacks=[chosen])
    plan = planner.collective_plan(model, sharders)
    entries = plan.plan[""]
    if case.pipeline:
        plan = ShardingPlan({"tables": entries})
        model, whole = Pipelined(model), Pipelined(whole)
    sharded = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan, sharders=sharders
    )
    # TorchRec starts from weights of its own.
    start = {k: v.detach().clone() for k, v in whole.state_dict().items()}
    with torch.no_grad():
        for _, shard, part in local_parts(sharded.state_dict(), start):
            shard.copy_(part)
    # Not every table is trained in its kernel: data-parallel ones are not.
    replicas = {f"t{i}" for i, kind in case.other.items() if kind == REPLICAS}
    rest = [p for n, p in sharded.named_parameters() if n.split(".")[-2] in replicas]
    rest_optimizer = torch.optim.SGD(rest, lr=LEARNING_RATE) if rest else None
    optimizer = torch.optim.SGD(
        [
            {"params": [p], "lr": case.rates.get(i, LEARNING_RATE)}
            for i, p in enumerate(whole.parameters())
        ]
    )
    forward = 0.0
    steps = [global_batch(case, step) for step in range(NUM_STEPS)]
    loop = pipelined(case, sharded, [batches[rank] for batches in steps])
    ahead: list[dict[str, torch.Tensor]] | None = None
    for step, batches in enumerate(steps):
        expected = ahead or [outputs_of(whole, b, case) for b in batches]
        got = next(loop) if case.pipeline else outputs_of(sharded, batches[rank], case)
        if "SemiSync" in case.pipeline and step + 1 < NUM_STEPS:
            # Rows are looked up before the update of the batch before.
            ahead = [outputs_of(whole, b, case) for b in steps[step + 1]]
        assert set(got) == set(expected[rank])
        for key, value in got.items():
            forward = max(forward, float((value - expected[rank][key]).abs().max()))
        optimizer.zero_grad()
        # Gradients are means over the ranks.
        torch.autograd.backward(
            torch.stack([loss_of(e, LOCAL_BATCH) for e in expected]).mean()
        )
        optimizer.step()
        if rest_optimizer is not None:
            rest_optimizer.zero_grad()
        if not case.pipeline:
            torch.autograd.backward(loss_of(got, LOCAL_BATCH))
        if rest_optimizer is not None:
            rest_optimizer.step()
    tables = sharded.module.tables if case.pipeline else sharded.module
    want = {k: v.detach() for k, v in whole.state_dict().items()}
    weights = max(
        (
            float((shard.detach() - part).abs().max())
            for _, shard, part in local_parts(sharded.state_dict(), want)
        ),
        default=0.0,
    )
    digest = [None] * dist.get_world_size()
    dist.all_gather_object(digest, (str(plan), repr(planner.last_result)))
    layout = expected_kernels(planner, chosen.options) if rank == 0 else None
    sent: list[Any] = [layout]
    dist.broadcast_object_list(sent, 0)
    (layout,) = sent
    return {
        "forward": forward,
        "weights": weights,
        "moved": min(float((want[t] - start[t]).abs().max()) for t in want),
        "types": [entries[f"t{i}"].sharding_type for i in range(len(case.dims))],
        "num_shards": Counter(s.table for s in planner.last_result.placement.shards),
        "same_everywhere": len(set(digest)) == 1,
        "kernels": kernels_of(tables),
        "expected_kernels": layout["kernels"][rank],
        "num_collectives": len(tables._output_dists),
        "num_stages": layout["num_stages"],
        "reordered": [] if case.sequence else reordered_types(tables),
        "expected_reordered": layout["reordered"],
    }


def run_failure(rank: int) -> dict[str, Any]:
    """Rank 0 cannot plan; what does each rank see?"""

    class Refusing(AnalyticCostModel):
        def encode(self, features_NF: Any) -> Any:
            raise ConfigError(f"refused on rank {rank}")

    seen = {}
    planner = build_planner(CASES["k-way"])
    planner.costs.cost_model = Refusing()
    try:
        planner.collective_plan(build_model(CASES["k-way"]))
    except Exception as error:
        seen["known"] = f"{type(error).__name__}: {error}"

    class LocalError(Exception):
        """Cannot be pickled, as its class is not importable."""

    def fail(*_: Any) -> Any:
        raise LocalError("local trouble")

    planner.plan = fail
    try:
        planner.collective_plan(build_model(CASES["k-way"]))
    except Exception as error:
        seen["local"] = f"{type(error).__name__}: {error}"
    # Both ranks are still in step.
    dist.barrier()
    return seen


def run_subgroup(rank: int) -> dict[str, Any]:
    """A group whose first rank is not the first of all."""
    group = dist.new_group([1])
    if rank == 0:
        return {}
    planner = build_planner(CASES["search"])
    plan = planner.collective_plan(build_model(CASES["search"]), pg=group)
    return {"tables": sorted(plan.plan[""])}


def rank_jobs(num_nodes: int, rank: int, _: Path) -> Jobs:
    jobs: Jobs = {
        name: functools.partial(run_case, case, rank)
        for name, case in CASES.items()
        if case.num_nodes == num_nodes
    }
    if num_nodes == ONE_NODE:
        jobs["failure"] = lambda: run_failure(rank)
        jobs["subgroup"] = lambda: run_subgroup(rank)
    return jobs


@pytest.mark.parametrize("name", daily(CASES, DAILY))
def test_training_equals_unsharded_training(results: OfJob, name: str) -> None:
    for result in results(name):
        assert result["types"] == list(CASES[name].types or result["types"])
        assert result["same_everywhere"]
        assert result["forward"] < 1e-5
        assert result["weights"] < 1e-5
        assert result["moved"] > 1e-2  # the steps did something


@pytest.mark.parametrize("name", daily(CASES, DAILY))
def test_simulated_kernels_are_the_real_ones(results: OfJob, name: str) -> None:
    for result in results(name):
        assert result["kernels"] == result["expected_kernels"]
        assert result["num_collectives"] == result["num_stages"]
        assert set(result["reordered"]) <= set(result["expected_reordered"])
    assert any(r["kernels"] for r in results(name))


@pytest.mark.parametrize(("name", "kind"), [("k-way", COLUMN), ("grid", GRID)])
def test_outputs_of_split_tables_are_put_in_order(
    results: OfJob, name: str, kind: str
) -> None:
    for result in results(name):
        assert result["reordered"] == result["expected_reordered"] == [kind]


def test_search_splits_a_table(results: OfJob) -> None:
    # Otherwise its case would train whole tables alone.
    assert max(results("search")[0]["num_shards"].values()) == 2


def test_an_error_on_rank_0_reaches_all_ranks(results: OfJob) -> None:
    first, second = results("failure")
    assert first["known"] == second["known"] == "ConfigError: refused on rank 0"
    assert first["local"] == "LocalError: local trouble"
    assert second["local"] == (
        "RuntimeError: planning failed on rank 0: LocalError: local trouble"
    )


def test_group_with_another_first_rank(results: OfJob) -> None:
    assert results("subgroup")[1]["tables"] == [
        f"t{i}" for i in range(len(CASES["search"].dims))
    ]
