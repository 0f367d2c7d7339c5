"""The gate's tasks: small seeded models, planned through the public interface.

Each task returns what it made under a few names: plans with their predicted costs, and
what else must not change unnoticed. Cost models go by name or are made here, so that no
task depends on the device at hand.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
)
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import CacheParams, ModuleSharder, ShardingPlan
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.optim import Adam, RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from harness.dlrm_tables import generate_dlrm_tables
from harness.tasks import (
    TaskConfig,
    power_of_two_widths,
    sample_tasks,
)
from papers.annealing import AnnealingSearcher
from papers.heuristics import (
    GREEDY_KEYS,
    CostGreedySearcher,
    GreedySearcher,
    RandomSearcher,
)
from papers.milp import MilpSearcher
from tests.builders import run_search
from torchrec_neuroshard import (
    NeuroShardPlanner,
    PlacementConstraints,
    SearchConfig,
    SearchResult,
    load_cost_model,
    profile_inputs,
)
from torchrec_neuroshard.bundles.find import load_comms_model
from torchrec_neuroshard.costs.simulator import PHASES, PredictedCosts, Simulator
from torchrec_neuroshard.costs.task import Placement, ShardingTask
from torchrec_neuroshard.errors import InfeasibleError
from torchrec_neuroshard.models.base import CommsModel, CostModel
from torchrec_neuroshard.models.card_physics import PhysicalConstants
from torchrec_neuroshard.models.collectives import BandwidthCommsModel
from torchrec_neuroshard.models.compute import PhysicalCostModel
from torchrec_neuroshard.papers.neuroshard import NeuroShardConfig, PaperSearcher
from torchrec_neuroshard.plans.plan_files import load_plan, save_plan
from torchrec_neuroshard.plans.replan import ReplanResult, replan
from torchrec_neuroshard.search import Searcher, make_searcher
from torchrec_neuroshard.tables.inputs import draw_batch
from torchrec_neuroshard.tables.mlperf import mlperf_dlrm_v2
from torchrec_neuroshard.tables.profile import zipf_profile
from torchrec_neuroshard.tables.table import TableConfig

Record = dict[str, Any]
Task = Callable[[], dict[str, Record]]

MIB, GIB = 2**20, 2**30
PLENTY = 1e6
"""Seconds: more than any search here takes on any machine."""
WHOLE = SearchConfig(time_budget_seconds=PLENTY, bound="thorough")
LIGHT = SearchConfig(time_budget_seconds=PLENTY, restarts=1)
"""What most tasks take: the same steps, fewer of them."""
EPYC = "cpu_epyc_zen5"

TABLE_WISE, COLUMN_WISE = "table_wise", "column_wise"
TABLE_COLUMN_WISE, DATA_PARALLEL = "table_column_wise", "data_parallel"
ROW_WISE, TABLE_ROW_WISE, GRID = "row_wise", "table_row_wise", "grid_shard"


# --- what is kept of a plan ---


def record_costs(costs: PredictedCosts) -> Record:
    return {
        "critical_path_ms": costs.critical_path_ms,
        "stages": [
            {
                "name": stage.name,
                **{p: [getattr(r, p) for r in stage.ranks] for p in PHASES},
            }
            for stage in costs.stages
        ],
    }


def record_plan(plan: ShardingPlan) -> Record:
    tables = {}
    for path, module in plan.plan.items():
        for name, sharding in module.items():
            spec = sharding.sharding_spec
            tables[f"{path}.{name}" if path else name] = {
                "sharding_type": sharding.sharding_type,
                "compute_kernel": sharding.compute_kernel,
                "ranks": sharding.ranks,
                # Data-parallel tables have no shards.
                "shards": [[*s.shard_offsets, *s.shard_sizes] for s in spec.shards]
                if spec
                else [],
            }
    return dict(sorted(tables.items()))


def record_planned(planner: NeuroShardPlanner, plan: ShardingPlan) -> Record:
    result = planner.last_result
    assert result is not None
    record: Record = {
        "plan": record_plan(plan),
        **record_costs(result.predicted),
        "lower_bound_ms": result.lower_bound_ms,
        "fallback": result.fallback is not None,
    }
    report = planner.report()
    record["used_bytes"] = [r.used_bytes for r in report.ranks]
    record["whole_ms"] = {s.table: s.whole_ms for s in report.splits}
    return record


def record_search(task: ShardingTask, result: SearchResult) -> Record:
    return {
        "plan": record_placement(task, result.placement),
        **record_costs(result.predicted),
        "lower_bound_ms": result.lower_bound_ms,
    }


def record_placement(task: ShardingTask, placement: Placement) -> Record:
    tables: Record = {table.name: {"ranks": [], "shards": []} for table in task.tables}
    for shard in sorted(placement.shards, key=lambda s: (s.table, s.offset)):
        table = task.tables[shard.table]
        tables[table.name]["ranks"].append(shard.rank)
        tables[table.name]["shards"].append(
            [0, shard.offset, table.num_embeddings, shard.width]
        )
    return tables


def record_replanned(result: ReplanResult) -> Record:
    return {
        "plan": record_plan(result.plan),
        **record_costs(result.after),
        "before_ms": result.before.critical_path_ms,
        "moves": [list(dataclasses.astuple(m)) for m in result.moves],
    }


# --- what is planned ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """One table of a model and what the planner is told of it."""

    rows: int
    dim: int
    ids: float = 1.0
    """Per sample."""
    types: Sequence[str] | None = None
    kernels: Sequence[str] | None = None
    min_partition: int | None = None
    num_features: int = 1
    data_type: DataType = DataType.FP32
    pooling: PoolingType = PoolingType.SUM
    cache: float | None = None
    """Part of the rows that the cache on the device holds."""


def draw_specs(count: int, seed: int, **settings: Any) -> list[Spec]:
    """Draw tables of a few thousand to a few million rows."""
    rng = np.random.default_rng(seed)
    drawn = [
        Spec(
            rows=int(10 ** rng.uniform(3, 6.5)),
            dim=int(rng.choice([8, 16, 32, 64, 128])),
            ids=float(np.round(10 ** rng.uniform(0, 1.7), 1)),
        )
        for _ in range(count)
    ]
    return [dataclasses.replace(spec, **settings) for spec in drawn]


def features_of(prefix: str, number: int, spec: Spec) -> list[str]:
    return [f"{prefix}f{number}_{i}" for i in range(spec.num_features)]


def fields_of(specs: Sequence[Spec], prefix: str) -> list[dict[str, Any]]:
    """What tables of bags and of sequences have in common."""
    return [
        {
            "name": f"{prefix}t{i}",
            "num_embeddings": s.rows,
            "embedding_dim": s.dim,
            "feature_names": features_of(prefix, i, s),
            "data_type": s.data_type,
        }
        for i, s in enumerate(specs)
    ]


def bags(
    specs: Sequence[Spec], prefix: str = "", weighted: bool = False
) -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(**fields, pooling=s.pooling)
        for fields, s in zip(fields_of(specs, prefix), specs, strict=True)
    ]
    return EmbeddingBagCollection(
        tables=tables, is_weighted=weighted, device=torch.device("meta")
    )


def sequences(specs: Sequence[Spec], prefix: str = "") -> EmbeddingCollection:
    tables = [EmbeddingConfig(**fields) for fields in fields_of(specs, prefix)]
    return EmbeddingCollection(tables=tables, device=torch.device("meta"))


def constraints_of(
    specs: Sequence[Spec], prefix: str = ""
) -> dict[str, ParameterConstraints]:
    return {
        f"{prefix}t{i}": ParameterConstraints(
            sharding_types=list(s.types) if s.types else None,
            compute_kernels=list(s.kernels) if s.kernels else None,
            min_partition=s.min_partition,
            pooling_factors=[s.ids / s.num_features] * s.num_features,
            cache_params=CacheParams(load_factor=s.cache) if s.cache else None,
        )
        for i, s in enumerate(specs)
    }


def cpus(world_size: int, **settings: Any) -> Topology:
    return Topology(world_size=world_size, compute_device="cpu", **settings)


def gpus(world_size: int, local_world_size: int, **settings: Any) -> Topology:
    """Make a topology whose bandwidths are given, so that no GPU is asked for them."""
    return Topology(
        world_size=world_size,
        local_world_size=local_world_size,
        compute_device="cuda",
        **{
            "hbm_cap": 80 * GIB,
            "hbm_mem_bw": 3.35e9,
            "intra_host_bw": 4.5e8,
            "inter_host_bw": 5e7,
            **settings,
        },
    )


def gpu_costs() -> CostModel:
    constants = PhysicalConstants(memory_gb_per_s=3350.0)
    return PhysicalCostModel(constants, name="gate", hardware="a GPU")


def make_planner(
    topology: Topology,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    **settings: Any,
) -> NeuroShardPlanner:
    return NeuroShardPlanner(
        topology,
        settings.pop("batch_size", 512),
        constraints=constraints,
        search=settings.pop("search", LIGHT),
        storage_reservation=FixedPercentageStorageReservation(percentage=0.1),
        stats=[],
        debug=False,
        **settings,
    )


def plan_specs(
    specs: Sequence[Spec],
    topology: Topology,
    *,
    model: nn.Module | None = None,
    optimizer: Any = RowWiseAdagrad,
    **settings: Any,
) -> Record:
    """Plan one collection of bags, or the model given."""
    model = with_optimizer(model or bags(specs), optimizer)
    planner = make_planner(topology, constraints_of(specs), **settings)
    return record_planned(planner, planner.plan(model, get_default_sharders()))


def with_optimizer(model: nn.Module, optimizer: Any = RowWiseAdagrad) -> nn.Module:
    apply_optimizer_in_backward(optimizer, model.parameters(), {"lr": 0.01})
    return model


class NoPlan(Searcher):
    """Finds that nothing fits."""

    name = "no plan"

    def search(self, task: ShardingTask, simulator: Simulator) -> SearchResult:
        raise InfeasibleError("nothing fits")


# --- the tasks ---


def column_splits() -> dict[str, Record]:
    """Free choice of splits on CPUs, by each bundle that ships."""
    specs = draw_specs(10, seed=1)
    specs[0] = Spec(rows=400_000, dim=256, ids=80.0)
    return {
        name: plan_specs(specs, cpus(4), cost_model=name, search=WHOLE)
        for name in ("cpu", "cpu_epyc", EPYC)
    }


def all_sharding_types() -> dict[str, Record]:
    """Every sharding type on two nodes of four GPUs; then a choice of types."""
    types = (
        TABLE_WISE,
        COLUMN_WISE,
        TABLE_COLUMN_WISE,
        ROW_WISE,
        TABLE_ROW_WISE,
        GRID,
        DATA_PARALLEL,
    )
    fixed = [
        spec
        for kind in types
        for spec in draw_specs(2, seed=3, types=[kind], dim=128, min_partition=32)
    ]
    # One table that is read a lot, and tiny ones.
    free = [
        Spec(rows=20_000_000, dim=128, ids=120.0, min_partition=128),
        *(Spec(rows=20 * (i + 1), dim=64, ids=1.0) for i in range(4)),
        *draw_specs(2, seed=3),
    ]
    return {
        name: plan_specs(specs, gpus(8, 4), cost_model=gpu_costs(), batch_size=4096)
        for name, specs in {"one type each": fixed, "any type": free}.items()
    }


def kernels() -> dict[str, Record]:
    """Fused, offloaded and dense kernels, each asked for; then a choice of them."""
    fixed = [
        Spec(rows=3_000_000, dim=64, ids=20.0, types=[TABLE_WISE], kernels=["fused"]),
        Spec(
            rows=2_000_000, dim=64, ids=2.0, types=[TABLE_WISE], kernels=["fused_uvm"]
        ),
        Spec(
            rows=5_000_000,
            dim=128,
            ids=10.0,
            types=[COLUMN_WISE],
            min_partition=64,
            kernels=["fused_uvm_caching"],
            cache=0.2,
        ),
        Spec(rows=900_000, dim=32, types=[ROW_WISE], kernels=["fused_uvm_caching"]),
        Spec(rows=10_000, dim=32, types=[DATA_PARALLEL], kernels=["dense"]),
        Spec(rows=800_000, dim=32, types=[TABLE_ROW_WISE], kernels=["fused"]),
    ]
    free = [Spec(rows=2_000_000, dim=64, ids=4.0, cache=0.2) for _ in range(4)]
    costs = gpu_costs()
    return {
        "asked for": plan_specs(fixed, gpus(4, 2), cost_model=costs),
        # Two tables fit on the devices.
        "any kernel": plan_specs(free, gpus(2, 2, hbm_cap=GIB), cost_model=costs),
    }


def sequence_embeddings() -> dict[str, Record]:
    """A collection of sequences: no two widths in one module."""
    found = {}
    for name, types in {"any type": None, "column-wise": [COLUMN_WISE]}.items():
        specs = draw_specs(6, seed=4, dim=64, types=types, min_partition=32)
        found[name] = plan_specs(
            specs, cpus(4), model=sequences(specs), cost_model="cpu_epyc"
        )
    return found


def several_modules() -> dict[str, Record]:
    """Bags, weighted bags and sequences in one model: three stages and more."""
    parts = {
        "a_": draw_specs(3, seed=5),
        "b_": draw_specs(3, seed=6),
        "c_": draw_specs(3, seed=7, dim=32),
    }
    model = nn.ModuleDict(
        {
            "plain": bags(parts["a_"], "a_"),
            "weighted": bags(parts["b_"], "b_", weighted=True),
            "sequences": sequences(parts["c_"], "c_"),
        }
    )
    constraints = {
        name: given
        for prefix, specs in parts.items()
        for name, given in constraints_of(specs, prefix).items()
    }
    found = {}
    for device, topology in {"cpu": cpus(4), "cuda": gpus(4, 4)}.items():
        planner = make_planner(
            topology, constraints, cost_model="cpu" if device == "cpu" else gpu_costs()
        )
        plan = planner.plan(with_optimizer(model), get_default_sharders())
        found[device] = record_planned(planner, plan)
    return found


def placement_rules() -> dict[str, Record]:
    """Pinned tables, tables together and apart, a rank without tables."""
    specs = draw_specs(8, seed=8)
    rules = PlacementConstraints(
        pin={"t0": [0, 1], "t1": [2]},
        together=[["t2", "t3"]],
        apart=[["t4", "t5", "t0"]],
        forbid_ranks=[3],
    )
    return {
        device: plan_specs(
            specs,
            topology,
            cost_model=EPYC if device == "cpu" else gpu_costs(),
            placement_constraints=rules,
        )
        for device, topology in {"cpu": cpus(4), "cuda": gpus(4, 2)}.items()
    }


def several_nodes() -> dict[str, Record]:
    """Two nodes of eight GPUs by the physical estimate of `cost_model="auto"`."""
    specs = draw_specs(14, seed=9)
    return {
        "two nodes": plan_specs(specs, gpus(16, 8), batch_size=2048, cost_model="auto"),
        "eight nodes": plan_specs(
            specs[:8], gpus(16, 2), batch_size=2048, cost_model="auto"
        ),
    }


def tight_memory() -> dict[str, Record]:
    """Little room beside the tables; some fit in pieces only, by columns or by rows."""
    columns = [Spec(rows=1_000_000, dim=128, ids=3.0), *draw_specs(5, seed=10)]
    rows = [Spec(rows=12_000_000, dim=8, ids=3.0), *draw_specs(3, seed=10)]
    cases = {
        "columns, cpu": (columns, cpus(4, ddr_cap=room(columns)), "cpu_epyc"),
        "columns, cuda": (columns, gpus(4, 4, hbm_cap=room(columns)), gpu_costs()),
        "rows, cuda": (rows, gpus(4, 4, hbm_cap=room(rows)), gpu_costs()),
    }
    return {
        # A light search ends 0.9 % apart where a CPU rounds otherwise.
        name: plan_specs(specs, topology, search=WHOLE, cost_model=costs)
        for name, (specs, topology, costs) in cases.items()
    }


def room(specs: Sequence[Spec]) -> int:
    """Memory of each of four ranks that is a little more than the tables need."""
    return int(sum(4 * s.rows * s.dim for s in specs) / 4 / 0.7)


def fallback() -> dict[str, Record]:
    """TorchRec's plan where the search finds none."""
    specs = draw_specs(3, seed=11, types=[TABLE_WISE, ROW_WISE])
    return {"only": plan_specs(specs, cpus(2), cost_model=EPYC, search=NoPlan())}


def replanning() -> dict[str, Record]:
    """A plan under which all tables lie on one rank, mended by moving few bytes."""
    specs = draw_specs(7, seed=12, types=[COLUMN_WISE])
    model = with_optimizer(bags(specs), torch.optim.SGD)
    crowded = make_planner(
        cpus(3),
        constraints_of(specs),
        cost_model=EPYC,
        placement_constraints=PlacementConstraints(
            pin={f"t{i}": [0] for i in range(len(specs))}
        ),
    )
    plan = crowded.plan(model, get_default_sharders())
    planner = make_planner(cpus(3), constraints_of(specs), cost_model=EPYC)
    found = {}
    for name, budget in (("small budget", 8 * MIB), ("large budget", GIB)):
        found[name] = record_replanned(
            replan(
                plan,
                planner=planner,
                model=model,
                budget_bytes=budget,
                config=SearchConfig(time_budget_seconds=PLENTY, restarts=8),
            )
        )
    return found


def plan_files() -> dict[str, Record]:
    """A plan that was stored and taken back."""
    specs = draw_specs(5, seed=13)
    model = with_optimizer(bags(specs))

    def planner() -> NeuroShardPlanner:
        return make_planner(cpus(4), constraints_of(specs), cost_model=EPYC)

    first = planner()
    plan = first.plan(model, get_default_sharders())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        save_plan(plan, path, model=model, planner=first)
        taken = load_plan(path, model=model, planner=planner())
    return {
        "planned": record_planned(first, plan),
        "read": {"as planned": record_plan(taken) == record_plan(plan)},
    }


def papers_searches() -> dict[str, Record]:
    """The papers' methods by name; NeuroShard's loops on the planner's costs, too."""
    specs = draw_specs(10, seed=14)
    searches: dict[str, str | Searcher] = {
        name: name for name in ("neuroshard", "autoshard", "dreamshard")
    }
    searches["neuroshard, shared costs"] = PaperSearcher(
        NeuroShardConfig(costs="shared")
    )
    return plan_by(searches, specs)


def greedy_searches() -> dict[str, Record]:
    """The greedies and random placement, which only benchmarks have."""
    greedies = [CostGreedySearcher(), *map(GreedySearcher, GREEDY_KEYS)]
    searches = {s.name: s for s in (RandomSearcher(), *greedies)}
    return plan_by(searches, draw_specs(10, seed=15))


def solvers() -> dict[str, Record]:
    """Integer programming and annealing, which only benchmarks have.

    HiGHS has a clock of its own and 20 s: it needs half a second here.
    """
    searches = {s.name: s for s in (MilpSearcher(), AnnealingSearcher())}
    return plan_by(searches, draw_specs(5, seed=16))


def plan_by(
    searches: Mapping[str, str | Searcher], specs: Sequence[Spec]
) -> dict[str, Record]:
    return {
        name: plan_specs(specs, cpus(4), cost_model=EPYC, search=search)
        for name, search in searches.items()
    }


def search_settings() -> dict[str, Record]:
    """Another seed, less and no effort, no bound; and the tiny task."""
    specs = draw_specs(9, seed=17)
    settings: dict[str, Record] = {
        "seed": {"seed": 5},
        "effort": {"effort": 0.2, "restarts": 1},
        "bare": {"effort": 0.0},
        "bound": {"bound": "thorough"},
    }
    found = {
        name: plan_specs(
            specs,
            cpus(4),
            search=SearchConfig(time_budget_seconds=PLENTY, **given),
            cost_model="cpu_epyc",
        )
        for name, given in settings.items()
    }
    return found | {"tiny": plan_specs(specs[:2], cpus(2), cost_model="cpu_epyc")}


def profiles() -> dict[str, Record]:
    """Features known by batches, by a uniform profile, and by pooling factors alone."""
    specs = draw_specs(5, seed=18)
    tables = [
        TableConfig(
            name=features_of("", i, s)[0],
            num_embeddings=s.rows,
            embedding_dim=s.dim,
            pooling_factor=s.ids,
        )
        for i, s in enumerate(specs)
    ]
    seen = profile_inputs(
        jagged(draw_batch(tables[:3], 256, seed)) for seed in range(3)
    )
    even = zipf_profile(
        batch_size=1024,
        pooling_factor=specs[3].ids,
        num_embeddings=specs[3].rows,
        exponent=0.0,
    )
    return {
        "profiles": plan_specs(
            specs, cpus(4), cost_model=EPYC, profiles={**seen, tables[3].name: even}
        )
    }


def jagged(
    batch: Mapping[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]],
) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_lengths_sync(
        keys=list(batch),
        values=torch.from_numpy(np.concatenate([ids for ids, _ in batch.values()])),
        lengths=torch.from_numpy(np.concatenate([n for _, n in batch.values()])),
    )


def kinds_of_tables() -> dict[str, Record]:
    """Shared features, half precision, mean pooling and other optimizers."""
    specs = [
        Spec(rows=200_000, dim=64, ids=30.0, num_features=3),
        Spec(rows=900_000, dim=32, ids=5.0, data_type=DataType.FP16),
        Spec(rows=50_000, dim=128, ids=12.0, pooling=PoolingType.MEAN),
        Spec(rows=3_000_000, dim=16, ids=2.0, num_features=2),
        Spec(rows=1_000, dim=16, ids=1.0, pooling=PoolingType.MEAN),
    ]
    found = {
        name: plan_specs(specs, gpus(4, 4), optimizer=optimizer, cost_model=gpu_costs())
        for name, optimizer in {"sgd": torch.optim.SGD, "adam": Adam}.items()
    }
    found["weighted"] = plan_specs(
        specs[:4],
        cpus(4),
        model=bags(specs[:4], weighted=True),
        optimizer=torch.optim.SGD,
        cost_model="cpu_epyc",
    )
    return found


def mlperf() -> dict[str, Record]:
    """MLPerf DLRM-v2, its rows cut, on eight CPU ranks and on eight GPUs."""
    specs = [
        Spec(
            rows=min(t.num_embeddings, 2_000_000),
            dim=t.embedding_dim,
            ids=t.pooling_factor,
            types=[TABLE_WISE, COLUMN_WISE],
        )
        for t in mlperf_dlrm_v2()
    ]
    return {
        device: plan_specs(
            specs, topology, cost_model=EPYC if device == "cpu" else gpu_costs()
        )
        for device, topology in {"cpu": cpus(8), "cuda": gpus(8, 8)}.items()
    }


def library_searches() -> dict[str, Record]:
    """Searches on bare sharding tasks: no planner, no TorchRec."""
    tables = generate_dlrm_tables(seed=3)
    config = TaskConfig(
        world_size=4,
        batch_size=2048,
        num_tables=10,
        widths=power_of_two_widths(128),
        seed=19,
    )
    plain = sample_tasks(tables, config, 1)[0]
    size = sum(t.weight_bytes for t in plain.tables)
    ruled = dataclasses.replace(
        plain,
        memory_bytes=(int(0.4 * size),) * 4,
        uneven=False,
        groups=(0,) * 5 + (1,) * 5,
        stages=(0, 1),
        stage_names=("first", "second"),
        allowed_ranks=((0, 1),) + ((),) * 9,
        together=((1, 2),),
        apart=((3, 4, 5),),
    )
    cases: dict[str, tuple[ShardingTask, str | SearchConfig | Searcher]] = {
        "default": (plain, WHOLE),
        "default, rules": (ruled, WHOLE),
        "greedy-cost": (plain, CostGreedySearcher()),
        "neuroshard": (plain, "neuroshard"),
    }
    models = load_cost_model(EPYC), epyc_collectives()
    return {
        name: record_search(task, run_search(make_searcher(given), task, *models))
        for name, (task, given) in cases.items()
    }


def epyc_collectives() -> CommsModel:
    comms = load_comms_model(EPYC, device_type="cpu", world_size=4, local_world_size=4)
    assert comms is not None
    return comms


def estimates() -> dict[str, Record]:
    """Plans by the physical estimate of a GPU that nothing is known of."""
    types = [TABLE_WISE, COLUMN_WISE, ROW_WISE, DATA_PARALLEL]
    cases = {
        "one node": (draw_specs(6, seed=20, types=types), gpus(4, 4)),
        "two nodes": (draw_specs(6, seed=21), gpus(4, 2)),
    }
    return {
        name: plan_specs(specs, topology, cost_model="auto", batch_size=2048)
        for name, (specs, topology) in cases.items()
    }


def foreign_enumerators() -> dict[str, Record]:
    """TorchRec's enumerator, which alone has the constraints, and a caller's own."""
    specs = draw_specs(6, seed=22, types=[TABLE_WISE, COLUMN_WISE], min_partition=16)
    topology, constraints = cpus(2), constraints_of(specs)
    kinds: dict[str, tuple[type[EmbeddingEnumerator], bool]] = {
        "torchrec's": (EmbeddingEnumerator, False),
        "a caller's": (WholeTables, True),
    }
    planned = {}
    for name, (kind, told) in kinds.items():
        model = with_optimizer(bags(specs))
        planner = make_planner(
            topology,
            constraints if told else None,
            cost_model=EPYC,
            enumerator=kind(topology, batch_size=512, constraints=constraints),
        )
        plan = planner.plan(model, get_default_sharders())
        planned[name] = record_planned(planner, plan)
    return planned


class WholeTables(EmbeddingEnumerator):
    """Lists no option with more than one shard."""

    def enumerate(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> list[ShardingOption]:
        listed: list[ShardingOption] = super().enumerate(module, sharders)
        return [option for option in listed if option.num_shards == 1]


def simulator() -> dict[str, Record]:
    """Placements drawn by chance, priced by every bundle and the physical estimate."""
    tables = mlperf_dlrm_v2()[:12] + generate_dlrm_tables(seed=4)[:12]
    rng = np.random.default_rng(20)
    task = ShardingTask(
        tables=tables,
        world_size=4,
        batch_size=2048,
        groups=(0,) * 12 + (1,) * 12,
        stages=(0, 1),
    )
    triples: list[tuple[int, int, int]] = []
    for i, table in enumerate(tables):
        parts = int(rng.choice([1, 2])) if table.embedding_dim > 4 else 1
        ranks = rng.permutation(4)[:parts]
        triples += [(i, table.embedding_dim // parts, int(r)) for r in ranks]
    placement = Placement.from_widths(4, triples)
    links = BandwidthCommsModel(
        world_size=4, local_world_size=2, intra_gb_per_s=300.0, inter_gb_per_s=25.0
    )
    models: Iterable[tuple[str, CostModel, CommsModel]] = (
        ("cpu", load_cost_model("cpu"), links),
        ("cpu_epyc", load_cost_model("cpu_epyc"), links),
        (EPYC, load_cost_model(EPYC), epyc_collectives()),
        ("physical", gpu_costs(), links),
    )
    return {
        name: record_costs(Simulator(task, costs, comms).evaluate(placement))
        for name, costs, comms in models
    }


TASKS: dict[str, Task] = {
    task.__name__: task
    for task in (
        column_splits,
        all_sharding_types,
        kernels,
        sequence_embeddings,
        several_modules,
        placement_rules,
        several_nodes,
        tight_memory,
        fallback,
        replanning,
        plan_files,
        papers_searches,
        greedy_searches,
        solvers,
        search_settings,
        profiles,
        kinds_of_tables,
        mlperf,
        library_searches,
        estimates,
        foreign_enumerators,
        simulator,
    )
}
