"""Plans at work: two gloo ranks train sharded tables and are held to unsharded ones.

All cases run in one pair of processes, started once; each test reads its case.
"""

from __future__ import annotations

import copy
import json
import logging
import multiprocessing
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytestmark = pytest.mark.distributed

WORLD_SIZE = 2
LOCAL_BATCH = 6
LEARNING_RATE = 0.3
NUM_STEPS = 3
JOIN_SECONDS = 240
GROUP_TIMEOUT_SECONDS = 600
"""Longer than a rank may live: a rank that waits in vain fails the test."""


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


TABLE, COLUMN = "table_wise", "column_wise"

CASES = {
    "table-wise": Case(
        dims=(16, 32, 8),
        triples=[(0, 16, 0), (1, 32, 1), (2, 8, 0)],
        types=(TABLE,) * 3,
    ),
    "k-way": Case(
        dims=(32, 16),
        triples=[(0, 16, 0), (0, 16, 1), (1, 8, 0), (1, 8, 1)],
        types=(COLUMN,) * 2,
    ),
    "uneven": Case(
        dims=(64, 32, 12),
        triples=[(0, 48, 0), (0, 16, 1), (1, 12, 0), (1, 20, 1), (2, 12, 1)],
        types=(COLUMN,) * 3,
    ),
    "mixed": Case(
        dims=(32, 16, 64),
        triples=[(0, 20, 1), (0, 12, 0), (1, 16, 1), (2, 64, 0)],
        types=(COLUMN, TABLE, COLUMN),
        whole=(1,),
    ),
    "empty rank": Case(
        dims=(16, 8), triples=[(0, 16, 1), (1, 8, 1)], types=(TABLE,) * 2
    ),
    "weighted": Case(
        dims=(32, 16),
        triples=[(0, 24, 0), (0, 8, 1), (1, 16, 1)],
        types=(COLUMN,) * 2,
        weighted=True,
    ),
    "shared feature": Case(
        dims=(32, 16),
        triples=[(0, 8, 0), (0, 24, 1), (1, 16, 0)],
        types=(COLUMN,) * 2,
        features={0: ["f0", "f2"], 1: ["f0"]},
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
    "data-parallel": Case(
        dims=(32, 16),
        triples=[(0, 20, 0), (0, 12, 1)],
        types=(COLUMN, "data_parallel"),
        other={1: "data_parallel"},
    ),
    "search": Case(dims=(64, 48, 32, 16, 8), triples=None),
    "sequence": Case(
        dims=(16, 16),
        triples=[(0, 16, 1), (1, 16, 0)],
        types=(TABLE,) * 2,
        sequence=True,
    ),
}


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


def build_planner(case: Case) -> Any:
    from torchrec.distributed.planner import ParameterConstraints, Topology
    from torchrec.distributed.planner.storage_reservations import (
        FixedPercentageStorageReservation,
    )

    from torchrec_neuroshard.errors import InfeasibleError, PlacementError
    from torchrec_neuroshard.placement import Placement
    from torchrec_neuroshard.planner import NeuroShardPlanner
    from torchrec_neuroshard.search import Searcher, SearchResult
    from torchrec_neuroshard.simulator import Simulator
    from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel

    class FixedSearcher(Searcher):
        def search(self, task: Any, cost_model: Any, comms_model: Any) -> SearchResult:
            placement = Placement.from_widths(WORLD_SIZE, case.triples or ())
            try:
                placement.check(task)
            except PlacementError as error:
                raise InfeasibleError(str(error)) from error
            predicted = Simulator(task, cost_model, comms_model).evaluate(placement)
            return SearchResult(
                placement=placement,
                predicted=predicted,
                lower_bound_ms=0.0,
                gap=0.0,
                search_seconds=0.0,
                num_evaluated=1,
            )

    constraints = {
        f"t{i}": ParameterConstraints(
            sharding_types=[TABLE] if i in case.whole else [case.other[i]]
        )
        for i in {*case.whole, *case.other}
    }
    return NeuroShardPlanner(
        topology=Topology(world_size=WORLD_SIZE, compute_device="cpu"),
        batch_size=LOCAL_BATCH,
        constraints=constraints,
        cost_model=AnalyticCostModel(launch_ms=0.0),
        comms_model=AnalyticCommsModel(),
        search="default" if case.triples is None else FixedSearcher(),
        storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
        stats=[],
    )


def global_batch(case: Case, step: int) -> list[Any]:
    """One KeyedJaggedTensor per rank."""
    from torchrec import KeyedJaggedTensor

    generator = torch.Generator().manual_seed(100 + step)
    keys = sorted(
        {f for i in range(len(case.dims)) for f in case.features.get(i, [f"f{i}"])}
    )
    batches = []
    for _ in range(WORLD_SIZE):
        lengths = torch.randint(
            0, 4, (len(keys) * LOCAL_BATCH,), generator=generator, dtype=torch.int32
        )
        total = int(lengths.sum())
        values = torch.randint(0, 11, (total,), generator=generator)
        weights = torch.rand(total, generator=generator) if case.weighted else None
        batches.append(
            KeyedJaggedTensor(
                keys=keys, values=values, lengths=lengths, weights=weights
            )
        )
    return batches


def outputs_of(model: nn.Module, batch: Any, case: Case) -> dict[str, torch.Tensor]:
    out = model(batch)
    if case.sequence:
        return {k: v.values() for k, v in out.items()}
    found: dict[str, torch.Tensor] = out.to_dict()
    return found


def loss_of(outputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Every column of every output has a gradient of its own."""
    total = torch.zeros(())
    for key in sorted(outputs):
        value = outputs[key]
        scale = torch.linspace(0.5, 1.5, value.shape[1])
        total = total + (value.sin() * scale).sum()
    return total / LOCAL_BATCH


def local_parts(
    state: dict[str, Any], whole: dict[str, torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each shard on this rank, and the columns of the whole table that it holds."""
    found = []
    for key, value in state.items():
        table = whole[key]
        if hasattr(value, "local_shards"):
            for shard in value.local_shards():
                offset, width = shard.metadata.shard_offsets[1], shard.tensor.shape[1]
                found.append((shard.tensor, table[:, offset : offset + width]))
        else:
            found.append((value, table))
    return found


def kernels_of(sharded: Any) -> list[list[int]]:
    """Local widths in each fused kernel of this rank, sorted."""
    found = []
    for lookup in sharded._lookups:
        for kernel in getattr(lookup, "_emb_modules", ()):
            config = kernel.config
            if "Fused" in type(kernel).__name__:
                found.append(sorted(t.local_cols for t in config.embedding_tables))
    return sorted(found)


def expected_kernels(planner: Any, rank: int) -> list[list[int]]:
    """What the simulator takes for the fused kernels of a rank."""
    task = planner.last_task
    by_group: dict[int, list[int]] = {}
    for shard in planner.last_result.placement.shards:
        if shard.rank == rank:
            by_group.setdefault(task.groups[shard.table], []).append(shard.width)
    return sorted(sorted(widths) for widths in by_group.values())


def run_case(case: Case, rank: int) -> dict[str, Any]:
    """Plan, train and compare; runs on every rank."""
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.sharding_plan import get_default_sharders
    from torchrec.optim.apply_optimizer_in_backward import (
        apply_optimizer_in_backward,
    )

    whole = build_model(case)
    model = copy.deepcopy(whole)
    for i, parameter in enumerate(model.parameters()):
        rate = case.rates.get(i, LEARNING_RATE)
        apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": rate})
    planner = build_planner(case)
    plan = planner.collective_plan(model, get_default_sharders())
    sharded = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan, sharders=get_default_sharders()
    )
    # TorchRec starts from weights of its own.
    start = {k: v.detach().clone() for k, v in whole.state_dict().items()}
    with torch.no_grad():
        for shard, part in local_parts(sharded.state_dict(), start):
            shard.copy_(part)
    # Not every table is trained in its kernel: data-parallel ones are not.
    rest = [p for n, p in sharded.named_parameters() if "t1" in n] if case.other else []
    rest_optimizer = torch.optim.SGD(rest, lr=LEARNING_RATE) if rest else None
    optimizer = torch.optim.SGD(
        [
            {"params": [p], "lr": case.rates.get(i, LEARNING_RATE)}
            for i, p in enumerate(whole.parameters())
        ]
    )
    forward = 0.0
    for step in range(NUM_STEPS):
        batches = global_batch(case, step)
        expected = [outputs_of(whole, b, case) for b in batches]
        got = outputs_of(sharded, batches[rank], case)
        assert set(got) == set(expected[rank])
        for key, value in got.items():
            forward = max(forward, float((value - expected[rank][key]).abs().max()))
        optimizer.zero_grad()
        # Gradients are means over the ranks.
        torch.autograd.backward(torch.stack([loss_of(e) for e in expected]).mean())
        optimizer.step()
        if rest_optimizer is not None:
            rest_optimizer.zero_grad()
        torch.autograd.backward(loss_of(got))
        if rest_optimizer is not None:
            rest_optimizer.step()
    want = {k: v.detach() for k, v in whole.state_dict().items()}
    weights = max(
        (
            float((shard.detach() - part).abs().max())
            for shard, part in local_parts(sharded.state_dict(), want)
        ),
        default=0.0,
    )
    digest = [None] * WORLD_SIZE
    dist.all_gather_object(digest, (str(plan), repr(planner.last_result)))
    return {
        "forward": forward,
        "weights": weights,
        "moved": min(float((want[t] - start[t]).abs().max()) for t in want),
        "types": [plan.plan[""][f"t{i}"].sharding_type for i in range(len(case.dims))],
        "num_shards": Counter(
            t.name
            for s in planner.last_result.placement.shards
            for t in [planner.last_task.tables[s.table]]
        ),
        "same_everywhere": digest[0] == digest[1],
        "kernels": kernels_of(sharded.module),
        "expected_kernels": expected_kernels(planner, rank),
    }


def run_failure(rank: int) -> dict[str, Any]:
    """Rank 0 cannot plan; what does each rank see?"""
    from torchrec_neuroshard.errors import ConfigError
    from torchrec_neuroshard.testing import AnalyticCostModel

    class Refusing(AnalyticCostModel):
        def encode(self, features_NF: Any) -> Any:
            raise ConfigError(f"refused on rank {rank}")

    seen = {}
    planner = build_planner(CASES["table-wise"])
    planner.costs.cost_model = Refusing()
    try:
        planner.collective_plan(build_model(CASES["table-wise"]))
    except Exception as error:
        seen["known"] = f"{type(error).__name__}: {error}"

    class LocalError(Exception):
        """Cannot be pickled, as its class is not importable."""

    def fail(*_: Any) -> Any:
        raise LocalError("local trouble")

    planner.plan = fail
    try:
        planner.collective_plan(build_model(CASES["table-wise"]))
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


def rank_main(rank: int, folder: str) -> None:
    """Run every case on one rank; the results are left in the folder."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=GROUP_TIMEOUT_SECONDS),
    )
    jobs: dict[str, Callable[[], dict[str, Any]]] = {
        name: partial(run_case, case, rank) for name, case in CASES.items()
    }
    jobs["failure"] = lambda: run_failure(rank)
    jobs["subgroup"] = lambda: run_subgroup(rank)
    results: dict[str, Any] = {}
    for name, job in jobs.items():
        try:
            results[name] = job()
        except Exception:
            # The other rank may wait for this one: report and end both.
            results["error"] = f"in '{name}': {traceback.format_exc()}"
            break
        finally:
            Path(folder, f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of each rank, by case."""
    folder = tmp_path_factory.mktemp("ranks")
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=rank_main, args=(rank, str(folder)))
        for rank in range(WORLD_SIZE)
    ]
    deadline = time.monotonic() + JOIN_SECONDS
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    found = []
    for rank in range(WORLD_SIZE):
        path = folder / f"{rank}.json"
        found.append(json.loads(path.read_text()) if path.exists() else {})
    return found


def case_results(results: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    found = []
    for rank, by_case in enumerate(results):
        assert name in by_case, (
            f"rank {rank} has no result for '{name}': it stopped "
            f"{by_case.get('error', 'without a word')}"
        )
        found.append(by_case[name])
    return found


@pytest.mark.parametrize("name", CASES)
def test_training_equals_unsharded_training(
    results: list[dict[str, Any]], name: str
) -> None:
    for result in case_results(results, name):
        assert result["forward"] < 1e-5
        assert result["weights"] < 1e-5
        assert result["moved"] > 1e-2  # the steps did something


@pytest.mark.parametrize("name", CASES)
def test_simulated_kernels_are_the_real_ones(
    results: list[dict[str, Any]], name: str
) -> None:
    for result in case_results(results, name):
        assert result["kernels"] == result["expected_kernels"]
    assert any(r["kernels"] for r in case_results(results, name))


@pytest.mark.parametrize("name", CASES)
def test_every_rank_has_the_same_plan(results: list[dict[str, Any]], name: str) -> None:
    assert all(r["same_everywhere"] for r in case_results(results, name))


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.types])
def test_sharding_types(results: list[dict[str, Any]], name: str) -> None:
    for result in case_results(results, name):
        assert result["types"] == list(CASES[name].types)


def test_search_splits_a_table(results: list[dict[str, Any]]) -> None:
    # Otherwise its case would train nothing that "table-wise" does not.
    assert max(case_results(results, "search")[0]["num_shards"].values()) == 2


def test_an_error_on_rank_0_reaches_all_ranks(results: list[dict[str, Any]]) -> None:
    first, second = case_results(results, "failure")
    assert first["known"] == second["known"] == "ConfigError: refused on rank 0"
    assert first["local"] == "LocalError: local trouble"
    assert second["local"] == (
        "RuntimeError: planning failed on rank 0: LocalError: local trouble"
    )


def test_group_with_another_first_rank(results: list[dict[str, Any]]) -> None:
    assert case_results(results, "subgroup")[1]["tables"] == [
        f"t{i}" for i in range(len(CASES["search"].dims))
    ]
