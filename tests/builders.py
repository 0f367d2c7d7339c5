"""What the tests build and read: tables, models, planners, tasks and plans.

Costs can be worked out by hand unless a caller passes other models: the defaults are
those of `torchrec_neuroshard.testing`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
)
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

from torchrec_neuroshard.bundles.set_data import build_sets
from torchrec_neuroshard.costs.simulator import PHASES, Simulator
from torchrec_neuroshard.costs.task import Placement, ShardingTask
from torchrec_neuroshard.measure.clock import PassCounts
from torchrec_neuroshard.measure.records import (
    CommsHeader,
    CommsRecord,
    CostRecord,
    Fingerprint,
    RunHeader,
)
from torchrec_neuroshard.measure.store import RecordStore
from torchrec_neuroshard.models.base import CommsModel, CostModel
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.planner import NeuroShardPlanner
from torchrec_neuroshard.planner.option_facts import (
    table_configs,
)
from torchrec_neuroshard.search import (
    NeuroShardSearcher,
    SearchConfig,
    Searcher,
    SearchResult,
)
from torchrec_neuroshard.tables.profile import zipf_profile
from torchrec_neuroshard.tables.table import TableConfig
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel

META, CPU = torch.device("meta"), torch.device("cpu")
MIB, GIB = 2**20, 2**30
QUICK = SearchConfig(
    effort=0.25, restarts=1, time_budget_seconds=60.0, bound="thorough"
)
"""A quick search: any valid plan, on any machine."""

Triples = Sequence[tuple[int, int, int]]
"""(table, width, rank) of each shard."""


ATTACHES_OPTIMIZERS = [
    pytest.mark.filterwarnings(f"ignore:{text}:DeprecationWarning")
    for text in (r"`torch\.jit\.\w+` is deprecated", "This API is deprecated")
]
"""Marks of tests that attach optimizers as TorchRec's users do: torch then warns about
its own modules."""


def printed_elsewhere(code: str, hash_seed: int) -> Any:
    """Run a program in another process; return the JSON that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env={
            **os.environ,  # a BLAS that is told its core type rounds by it
            "PYTHONHASHSEED": str(hash_seed),
            "PYTHONPATH": ":".join(p for p in sys.path if p),
        },
    )
    return json.loads(done.stdout)


def torchrun(num_ranks: int, *arguments: str, folder: Path | None = None) -> str:
    """Run ranks on this machine's CPUs, one thread each; return what they print."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    known = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        [*command, "--nproc-per-node", str(num_ranks), *arguments],
        cwd=folder,
        env={**os.environ, **known},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


# --- tables, tasks and searches, without TorchRec ---


def make_tables(
    widths: Sequence[int],
    rows: int | Sequence[int] = 1000,
    pooling: float | Sequence[float] = 1.0,
    **fields: Any,
) -> tuple[TableConfig, ...]:
    """Return tables t0, t1, ... of these widths; a single value holds for all."""
    count = len(widths)
    all_rows = [rows] * count if isinstance(rows, int) else rows
    all_pooling = [pooling] * count if isinstance(pooling, int | float) else pooling
    return tuple(
        TableConfig(
            name=f"t{i}",
            num_embeddings=n,
            embedding_dim=width,
            pooling_factor=p,
            **fields,
        )
        for i, (width, n, p) in enumerate(
            zip(widths, all_rows, all_pooling, strict=True)
        )
    )


def make_task(
    tables: Sequence[TableConfig],
    world_size: int = 2,
    batch_size: int = 1024,
    *,
    memory: int = 0,
    **fields: Any,
) -> ShardingTask:
    """Return a task. Each rank has `memory` bytes; 0 means no limit."""
    if memory:
        fields["memory_bytes"] = (memory,) * world_size
    return ShardingTask(
        tables=tuple(tables), world_size=world_size, batch_size=batch_size, **fields
    )


def draw_tables(
    rng: np.random.Generator,
    count: int,
    widths: Sequence[int],
    *,
    most_rows: int = 10**6,
    spread: float = 1.5,
) -> tuple[TableConfig, ...]:
    """Draw tables of at least 100 rows. Few of them get most of the lookups."""
    drawn = [
        (
            int(10 ** rng.uniform(2, np.log10(most_rows))),
            int(rng.choice(widths)),
            float(rng.lognormal(1.0, spread)),
        )
        for _ in range(count)
    ]
    rows, dims, pooling = zip(*drawn, strict=True)
    return make_tables(dims, rows, pooling)


def draw_memory(
    rng: np.random.Generator,
    tables: Sequence[TableConfig],
    world_size: int,
    *,
    total: float,
    evenness: float = 40.0,
) -> tuple[int, ...]:
    """Draw unequal memory per rank, `total` times the weights' bytes in all."""
    share = rng.dirichlet(np.full(world_size, evenness))
    size = total * sum(t.weight_bytes for t in tables)
    return tuple(int(size * s) for s in share)


def search(
    task: ShardingTask,
    config: SearchConfig | None = None,
    cost_model: CostModel | None = None,
    comms_model: CommsModel | None = None,
) -> SearchResult:
    """Run the default search."""
    return run_search(NeuroShardSearcher(config), task, cost_model, comms_model)


def run_search(
    searcher: Searcher,
    task: ShardingTask,
    cost_model: CostModel | None = None,
    comms_model: CommsModel | None = None,
) -> SearchResult:
    """Run a search with these models; by default, the analytic ones."""
    simulator = Simulator(
        task, cost_model or AnalyticCostModel(), comms_model or AnalyticCommsModel()
    )
    return searcher.search(task, simulator)


def analytic() -> dict[str, Any]:
    """Return the analytic models as keywords of planners and their parts."""
    return {"cost_model": AnalyticCostModel(), "comms_model": AnalyticCommsModel()}


def result_of(
    task: ShardingTask, triples: Triples, simulator: Simulator
) -> SearchResult:
    """Return this placement as the result of a search."""
    placement = Placement.from_widths(task.world_size, triples, task)
    return SearchResult(
        placement=placement,
        predicted=simulator.evaluate(placement),
        lower_bound_ms=0.0,
        gap=math.inf,
        search_seconds=0.0,
        num_evaluated=1,
    )


class FixedSearcher(Searcher):
    """Returns given shards, or those that a function finds; keeps the tasks."""

    name = "fixed"

    def __init__(self, triples: Triples | Callable[[ShardingTask], Triples]) -> None:
        self.triples = triples
        self.tasks: list[ShardingTask] = []

    def search(self, task: ShardingTask, simulator: Simulator) -> SearchResult:
        self.tasks.append(task)
        triples = self.triples(task) if callable(self.triples) else self.triples
        found = result_of(task, triples, simulator)
        return dataclasses.replace(
            found,
            lower_bound_ms=0.5 * found.predicted.critical_path_ms,
            gap=1.0,
            search_seconds=0.25,
            num_evaluated=7,
            notes=(Note("search", "from the search"),),
        )


# --- records of measurements ---


ONE_PASS = PassCounts(
    min_passes=1, max_passes=1, time_budget_seconds=0.0, num_batches=1
)
"""One pass: tests need a record, not a good time."""


def make_fingerprint(device: str = "test device", **fields: Any) -> Fingerprint:
    known = {"device_type": "cpu", "num_threads": 1, "torch": "2", "fbgemm": "1"}
    return Fingerprint(device=device, **{**known, **fields})


def make_header(device: str = "test device", **fields: Any) -> RunHeader:
    """Return the header of a run that measured kernels."""
    known: dict[str, Any] = {
        "fingerprint": make_fingerprint(device),
        "reference_ms": 8.0,
        "seed": 0,
        "sampling": {},
        "command": "neuroshard collect compute",
        "created": "2026-01-01T00:00:00+00:00",
    }
    return RunHeader(**{**known, **fields})


def make_comms_header(
    world_size: int = 2,
    backend: str = "gloo",
    device: str = "test device",
    **fields: Any,
) -> CommsHeader:
    """Return the header of a run that measured collectives on one node."""
    plain = make_header(
        device, reference_ms=1.0, command="neuroshard collect comms", **fields
    )
    return CommsHeader(
        **{
            f.name: getattr(plain, f.name)
            for f in dataclasses.fields(RunHeader)
            if f.name != "kind"
        },
        backend=backend,
        world_size=world_size,
        local_world_size=world_size,
        intra_gb_per_s=2.0,
        inter_gb_per_s=0.0,
    )


def make_record(
    tables: Sequence[TableConfig],
    fwd_ms: float = 1.0,
    bwd_ms: float = 2.0,
    **fields: Any,
) -> CostRecord:
    """Return the record of a set: one pass forward, one backward."""
    known: dict[str, Any] = {
        "index": 0,
        "batch_size": 16,
        "tables": tuple(tables),
        "fwd_ms": fwd_ms,
        "bwd_ms": bwd_ms,
        "num_passes": 1,
        "spread": 0.0,
    }
    return CostRecord(**{**known, **fields})


def make_comms_record(
    collective: str = "pooled_forward",
    bytes_per_peer: Sequence[int] = (1024, 0),
    transfer_ms: Sequence[float] = (0.5, 1.0),
    **fields: Any,
) -> CommsRecord:
    """Return the record of a collective of one node's ranks, measured twice."""
    known: dict[str, Any] = {
        "index": 0,
        "world_size": len(bytes_per_peer),
        "local_world_size": len(bytes_per_peer),
        "num_passes": 2,
        "spread": 0.25,
        "reference_ms": 1.0,
    }
    return CommsRecord(
        collective=collective,
        bytes_per_peer=tuple(bytes_per_peer),
        transfer_ms=tuple(map(float, transfer_ms)),
        **{**known, **fields},
    )


def draw_records(
    count: int,
    seed: int,
    per_lookup: Callable[[TableConfig], float] = lambda t: t.embedding_dim**0.7,
    *,
    factor: float = 1.0,
    max_tables: int = 7,
    max_dim: int = 32,
) -> list[CostRecord]:
    """Return sets of a made-up device on which wide rows cost less than their bytes.

    Every fourth set is held out.
    """
    rng = np.random.default_rng(seed)
    records = []
    for index in range(count):
        batch_size, tables = int(rng.integers(512, 4096)), []
        for i in range(int(rng.integers(1, max_tables + 1))):
            rows, pooling = int(rng.integers(10, 10**6)), float(rng.uniform(1, 30))
            profile = zipf_profile(
                batch_size=batch_size, pooling_factor=pooling, num_embeddings=rows
            )
            table = TableConfig(
                name=f"{index}/{i}",
                num_embeddings=rows,
                embedding_dim=4 * int(rng.integers(1, max_dim + 1)),
                pooling_factor=pooling,
                profile=profile,
            )
            tables.append(table)
        lookups = sum(t.pooling_factor * per_lookup(t) for t in tables)
        cost = float(factor * (0.05 + 1e-6 * batch_size * lookups))
        known = {"index": index, "held_out": index % 4 == 0, "batch_size": batch_size}
        records.append(make_record(tables, cost, 2.5 * cost, **known))
    return records


def costed(records: list[CostRecord], model: CostModel) -> list[CostRecord]:
    """Replace measured times by a model's predictions."""
    data = build_sets(records)
    costs = model.predict_sets(data.features_NF, data.set_ids_N, data.num_sets)
    return [
        dataclasses.replace(record, fwd_ms=forward, bwd_ms=backward)
        for record, (forward, backward) in zip(records, costs.tolist(), strict=True)
    ]


def write_records(
    path: Path, header: RunHeader, records: Iterable[CostRecord | CommsRecord]
) -> Path:
    """Write a finished record file, of kernels or collectives like its header."""
    with RecordStore(path, header) as store:
        for record in records:
            store.append(record)
    return path


# --- TorchRec's tables, models and sharders ---


def bag_config(
    number: int = 0, rows: int = 1000, dim: int = 32, **arguments: Any
) -> EmbeddingBagConfig:
    """Return table t0, t1, ... of feature f0, f1, ..."""
    return EmbeddingBagConfig(
        **{
            "name": f"t{number}",
            "num_embeddings": rows,
            "embedding_dim": dim,
            "feature_names": [f"f{number}"],
            **arguments,
        }
    )


def bags(
    *tables: EmbeddingBagConfig, weighted: bool = False, device: torch.device = META
) -> EmbeddingBagCollection:
    """Return the given tables, or three equal ones."""
    return EmbeddingBagCollection(
        tables=list(tables or map(bag_config, range(3))),
        device=device,
        is_weighted=weighted,
    )


def make_ebc(
    sizes: Sequence[tuple[int, int]],
    *,
    weighted: bool = False,
    prefix: str = "",
    features: dict[int, list[str]] | None = None,
    data_types: dict[int, DataType] | None = None,
    poolings: dict[int, PoolingType] | None = None,
) -> EmbeddingBagCollection:
    """Return a collection of tables with these rows and widths.

    The dictionaries hold values by table number.
    """
    tables = [
        bag_config(
            i,
            rows,
            dim,
            name=f"{prefix}t{i}",
            feature_names=(features or {}).get(i, [f"{prefix}f{i}"]),
            data_type=(data_types or {}).get(i, DataType.FP32),
            pooling=(poolings or {}).get(i, PoolingType.SUM),
        )
        for i, (rows, dim) in enumerate(sizes)
    ]
    return bags(*tables, weighted=weighted)


def sequences(*dims: int, rows: int = 1000, prefix: str = "s") -> EmbeddingCollection:
    """Return sequence tables s0, s1, ... of these widths."""
    return EmbeddingCollection(
        tables=[
            EmbeddingConfig(
                name=f"{prefix}{i}",
                num_embeddings=rows,
                embedding_dim=dim,
                feature_names=[f"{prefix}f{i}"],
            )
            for i, dim in enumerate(dims)
        ],
        device=META,
    )


def fused_bags(
    *tables: EmbeddingBagConfig, device: torch.device = META, rate: float = 0.1
) -> FusedEmbeddingBagCollection:
    """Return bags with their own optimizer; by default, of three tables."""
    return FusedEmbeddingBagCollection(
        tables=list(tables or map(bag_config, range(3))),
        optimizer_type=torch.optim.SGD,
        optimizer_kwargs={"lr": rate},
        device=device,
    )


class Nested(nn.Module):
    """A model with bags at `sparse.ebc` and a dense layer."""

    def __init__(self, ebc: nn.Module) -> None:
        super().__init__()
        self.sparse = nn.ModuleDict({"ebc": ebc})
        self.dense = nn.Linear(4, 1)


def bag_sharders() -> list[EmbeddingBagCollectionSharder]:
    return [EmbeddingBagCollectionSharder()]


def only(name: str = "t0", **arguments: Any) -> dict[str, ParameterConstraints]:
    """Return constraints on one table."""
    return {name: ParameterConstraints(**arguments)}


def each(count: int, *kinds: str, **arguments: Any) -> dict[str, ParameterConstraints]:
    """Return the same constraints for t0, t1, ...; of these sharding types, if any."""
    if kinds:
        arguments["sharding_types"] = list(kinds)
    return {f"t{i}": ParameterConstraints(**arguments) for i in range(count)}


def by_table(**values: Sequence[Any]) -> dict[str, ParameterConstraints]:
    """Return constraints for t0, t1, ...: each field has a value per table."""
    rows = zip(*values.values(), strict=True)
    return {
        f"t{i}": ParameterConstraints(**dict(zip(values, row, strict=True)))
        for i, row in enumerate(rows)
    }


# --- planners ---


def gpus(
    world_size: int = 2, local_world_size: int | None = None, **settings: Any
) -> Topology:
    return Topology(
        world_size=world_size,
        local_world_size=local_world_size,
        compute_device="cuda",
        **settings,
    )


def keep_nothing_back() -> FixedPercentageStorageReservation:
    return FixedPercentageStorageReservation(percentage=0.0)


def make_planner(
    world_size: int = 2,
    compute_device: str = "cpu",
    **arguments: Any,
) -> NeuroShardPlanner:
    """Return a planner with a quick search.

    `topology` replaces the topology, `topology_arguments` are keywords of it.
    """
    topology = arguments.pop("topology", None) or Topology(
        world_size=world_size,
        compute_device=compute_device,
        **arguments.pop("topology_arguments", {}),
    )
    defaults: dict[str, Any] = {
        "batch_size": 64,
        **analytic(),
        "search": QUICK,
        "storage_reservation": keep_nothing_back(),
        "stats": [],
        "debug": False,
    }
    return NeuroShardPlanner(topology=topology, **(defaults | arguments))


def stock_planner(topology: Topology, **arguments: Any) -> EmbeddingShardingPlanner:
    """Return TorchRec's planner with `make_planner`'s settings."""
    defaults: dict[str, Any] = {
        "batch_size": 64,
        "storage_reservation": keep_nothing_back(),
        "stats": [],
        "debug": False,
    }
    return EmbeddingShardingPlanner(topology=topology, **(defaults | arguments))


class Chosen:
    """A planner's callback that keeps the chosen options."""

    def __init__(self) -> None:
        self.options: list[ShardingOption] = []

    def __call__(self, options: list[ShardingOption]) -> list[ShardingOption]:
        self.options = options
        return options


# --- what is read of a plan ---


def entries_of(plan: ShardingPlan) -> dict[str, Any]:
    """Return full table name -> how the table is sharded."""
    return {
        f"{path}.{name}" if path else name: sharding
        for path, module_plan in plan.plan.items()
        for name, sharding in module_plan.items()
    }


def entry_of(plan: ShardingPlan, name: str = "t0") -> Any:
    """Return how the first table of this name is sharded, in any module."""
    return next(m[name] for m in plan.plan.values() if name in m)


def shards_of(plan: ShardingPlan) -> dict[str, list[tuple[int, int, int]]]:
    """Return table -> (offset, width, rank) of each shard, sorted by offset."""
    return {
        name: sorted(
            (m.shard_offsets[1], m.shard_sizes[1], r)
            for m, r in zip(sharding.sharding_spec.shards, sharding.ranks, strict=True)
        )
        for name, sharding in entries_of(plan).items()
    }


def types_of(plan: ShardingPlan) -> dict[str, str]:
    """Return table -> sharding type."""
    return {name: s.sharding_type for name, s in entries_of(plan).items()}


def last_result(planner: NeuroShardPlanner) -> SearchResult:
    """Return the result of the planner's last plan, which must exist."""
    assert planner.last_result is not None
    return planner.last_result


def last_task(planner: NeuroShardPlanner) -> ShardingTask:
    """Return the task of the planner's last plan, which must exist."""
    assert planner.last_task is not None
    return planner.last_task


def cost_of(planner: NeuroShardPlanner) -> float:
    """Return the critical path of the last plan [ms]."""
    return last_result(planner).predicted.critical_path_ms


def check_result(planner: NeuroShardPlanner) -> None:
    """Check that the result places all columns and adds up its ranks' phases."""
    result, task = last_result(planner), last_task(planner)
    result.placement.check(task)
    waiting_ms = sum(
        max(getattr(r, phase) for r in stage.ranks)
        for stage in result.predicted.stages
        for phase in PHASES
    )
    # Several stages overlap.
    least_ms = waiting_ms if len(result.predicted.stages) == 1 else 0.0
    assert least_ms * (1 - 1e-9) <= cost_of(planner) <= waiting_ms * (1 + 1e-9)
    assert result.lower_bound_ms <= cost_of(planner)


def check_plan(plan: ShardingPlan, module: nn.Module, world_size: int) -> None:
    """Check that each value of each planned table is placed once, on a known rank."""
    for path, module_plan in plan.plan.items():
        tables = table_configs(module.get_submodule(path))
        sizes = {t.name: (t.num_embeddings, t.embedding_dim) for t in tables}
        for name, sharding in module_plan.items():
            assert all(0 <= r < world_size for r in sharding.ranks)
            if sharding.sharding_type == "data_parallel":
                assert sorted(sharding.ranks) == list(range(world_size))
                continue
            held = np.zeros(sizes[name], dtype=np.int8)
            shards = sharding.sharding_spec.shards
            assert len(shards) == len(sharding.ranks)
            for meta, rank in zip(shards, sharding.ranks, strict=True):
                (row, column), (rows, width) = meta.shard_offsets, meta.shard_sizes
                held[row : row + rows, column : column + width] += 1
                assert meta.placement.rank() == rank
            assert (held == 1).all(), f"{path}.{name}"
