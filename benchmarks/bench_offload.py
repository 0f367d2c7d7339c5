"""Models twice as large as the GPUs' memory: our plans beside TorchRec's scale-up.

    python benchmarks/bench_offload.py --out results/offload

writes `<out>.json` and `<out>.md` after every task; `--resume` goes on where an earlier
call stopped. Each task's tables, weights and optimizer, take twice what all GPUs have.

- ours: `NeuroShardPlanner(consider_stock=False)` chooses sharding type, kernel and
  `cache_load_factor` of every table;
- TorchRec's: `EmbeddingOffloadScaleupProposer`, which starts from small caches of all
  tables and grows them by constants. It gets what it asks for: the predicted misses of
  each table (`CacheStatistics`, from the same curves that ours uses), every setting of
  `SETTINGS`, each by TorchRec's estimates and by our costs, and our memory estimate.
  The best of these plans, by our costs, stands in the table.

All plans are priced by `planner.evaluate`. Nothing is trained: milliseconds are
predictions by the estimate for an H100. Seconds are the process's CPU time.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.proposers import EmbeddingOffloadScaleupProposer
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
)
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import CacheParams, CacheStatistics, ShardingPlan

from bench_search import make_job
from harness.provenance import describe_run, keep_rows, kept_rows
from torchrec_neuroshard import NeuroShardPlanner, TableConfig, topology_for
from torchrec_neuroshard.cost_models.row_cache import MissCurve
from torchrec_neuroshard.planner import NeuroShardEnumerator, NeuroShardPerfModel
from torchrec_neuroshard.planner.parts.shard_estimators import StorageEstimator
from torchrec_neuroshard.profiles import zipf_profile
from torchrec_neuroshard.workloads import mlperf_dlrm_v2

CARD = "h100"
RESERVED = 0.05
"""Share of the memory that no planner may fill."""
HOST_SHARE = 4.0
"""Memory of the hosts, relative to the tables."""
KINDS: dict[str, dict[str, Any]] = {
    "table-wise": {"sharding_types": ["table_wise"]},
    "column-wise": {"sharding_types": ["column_wise"], "min_partition": 32},
    "row-wise": {"sharding_types": ["row_wise"]},
    "any": {},
}
STARTS = (0.02, 0.1)
SETTINGS = tuple((kind, start) for kind in KINDS for start in STARTS)
"""Sharding types and the load factor that the proposer starts from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Tables and ranks."""

    name: str
    tables: tuple[TableConfig, ...]
    ranks: int
    batch_size: int
    """Samples per rank."""

    @property
    def table_bytes(self) -> float:
        """Weights and optimizer."""
        rowwise = self.tables[0].optimizer == "rowwise_adagrad"
        return float(
            sum(t.weight_bytes + 4 * rowwise * t.num_embeddings for t in self.tables)
        )

    def shared(self, **constraint: Any) -> dict[str, Any]:
        """Return the arguments that all planners get."""
        per_rank = self.table_bytes / 2 / self.ranks
        per_node = min(8, self.ranks)
        return {
            "topology": topology_for(
                CARD,
                num_nodes=self.ranks // per_node,
                ranks_per_node=per_node,
                memory_gb=per_rank / 1e9,
                host_memory_gb=HOST_SHARE
                * self.table_bytes
                * per_node
                / self.ranks
                / 1e9,
            ),
            "batch_size": self.batch_size,
            "storage_reservation": FixedPercentageStorageReservation(RESERVED),
            "constraints": {
                t.name: ParameterConstraints(
                    pooling_factors=[t.pooling_factor],
                    **{
                        n: f(self, t) if callable(f) else f
                        for n, f in constraint.items()
                    },
                )
                for t in self.tables
            },
            "stats": [],
            "debug": False,
        }

    def job(self) -> tuple[Any, Any]:
        """Return the model with its optimizer, and the sharders: what is planned."""
        return make_job(self.tables)


def make_tasks() -> Iterator[Task]:
    """Return ten tasks: drawn tables of many sizes and skews, and MLPerf's."""
    for seed in range(9):
        rng = np.random.default_rng([seed, 7])
        ranks = (4, 8, 16)[seed % 3]
        batch = int(rng.choice([1_024, 2_048, 4_096]))
        tables = []
        for number in range(int(rng.integers(12, 40))):
            rows = int(10 ** rng.uniform(5.5, 8.5))
            pooling = float(rng.choice([1, 2, 5, 20]))
            profile = zipf_profile(
                batch_size=batch * ranks,
                pooling_factor=pooling,
                num_embeddings=rows,
                exponent=float(rng.uniform(0.6, 1.2)),
            )
            tables.append(
                TableConfig(
                    name=f"t{number}",
                    num_embeddings=rows,
                    embedding_dim=int(rng.choice([32, 64, 128])),
                    pooling_factor=pooling,
                    profile=profile,
                    optimizer=("sgd", "rowwise_adagrad")[seed % 2],
                )
            )
        yield Task(
            name=f"drawn-{seed}", tables=tuple(tables), ranks=ranks, batch_size=batch
        )
    yield Task(
        name="mlperf-8", tables=tuple(mlperf_dlrm_v2()), ranks=8, batch_size=2_048
    )


class Misses(CacheStatistics):  # type: ignore[misc]
    """What TorchRec is told of a table's cache: this package's prediction."""

    def __init__(self, curve: MissCurve) -> None:
        """Take a table's curve."""
        self._curve = curve

    @property
    def expected_lookups(self) -> float:
        """Distinct rows of a batch of all ranks."""
        return self._curve.num_distinct

    def expected_miss_rate(self, clf: float) -> float:
        """Share of them that a cache lacks."""
        return float(self._curve.misses([clf])[0])

    @property
    def cacheability(self) -> float:
        """Mean of the misses over all sizes: 0 where any cache would do."""
        return float(self._curve.misses(np.linspace(0.0, 1.0, 101)).mean())


def misses(task: Task, table: TableConfig) -> Misses:
    """Predict a table's misses."""
    profile = table.profile_at(task.batch_size * task.ranks)
    return Misses(MissCurve(profile, table.num_embeddings))


def our_planner(task: Task, **more: Any) -> NeuroShardPlanner:
    """Return the planner that plans, and that prices all plans."""
    return NeuroShardPlanner(
        **task.shared(),
        cost_model=CARD,
        profiles={t.name: t.profile for t in task.tables if t.profile is not None},
        consider_stock=False,
        **more,
    )


def tables_by_way(plan: ShardingPlan) -> dict[str, int]:
    """Count a plan's tables by sharding type, kernel and size of cache."""
    counts: Counter[str] = Counter()
    for module_plan in plan.plan.values():
        for sharding in module_plan.values():
            name = f"{sharding.sharding_type}/{sharding.compute_kernel}"
            counts[name] += 1
    return dict(sorted(counts.items()))


def judge(task: Task, rival_seconds: float) -> dict[str, Any]:
    """Plan a task by us and by TorchRec."""
    planner = our_planner(task)
    start = time.process_time()
    plan = planner.plan(*task.job())
    seconds = time.process_time() - start
    result = planner.last_result
    assert result is not None
    return {
        "name": task.name,
        "ranks": task.ranks,
        "batch_size": task.batch_size,
        "tables": len(task.tables),
        "gib": task.table_bytes / 2**30,
        "optimizer": task.tables[0].optimizer,
        "ms": planner.evaluate(plan, *task.job()).critical_path_ms,
        "bound_ms": result.lower_bound_ms,
        "seconds": seconds,
        "fallback": result.fallback,
        "ways": tables_by_way(plan),
        "torchrec": {
            f"{kind}, from {load}, {'our' if ours else 'its'} costs": rival(
                task, planner, kind, load, ours, rival_seconds
            )
            for kind, load in SETTINGS
            for ours in (False, True)
        },
    }


def rival(
    task: Task,
    planner: NeuroShardPlanner,
    kind: str,
    load: float,
    by_our_costs: bool,
    most_seconds: float,
) -> dict[str, Any]:
    """Plan by TorchRec's scale-up proposer, and price the plan."""
    shared = task.shared(
        compute_kernels=["fused_uvm_caching"],
        cache_params=lambda t, c: CacheParams(load_factor=load, stats=misses(t, c)),
        **KINDS[kind],
    )
    topology, constraints = shared["topology"], shared["constraints"]
    storage = StorageEstimator(topology, constraints, reader=planner.costs.reader)
    enumerator = EmbeddingEnumerator(
        topology,
        task.batch_size,
        constraints,
        [EmbeddingPerfEstimator(topology, constraints), storage],
    )
    rated: dict[str, Any] = {}
    if by_our_costs:
        enumerator = NeuroShardEnumerator(
            topology, task.batch_size, constraints, costs=planner.costs
        )
        rated["performance_model"] = NeuroShardPerfModel(
            topology, constraints, costs=planner.costs
        )
    start = time.process_time()
    before = signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_REAL, 2 * most_seconds)
    try:
        plan = EmbeddingShardingPlanner(
            **shared,
            **rated,
            enumerator=enumerator,
            proposer=EmbeddingOffloadScaleupProposer(),
            timeout_seconds=max(1, round(most_seconds)),
        ).plan(*task.job())
    except (PlannerError, TimeoutError) as error:
        return {"failed": " ".join(f"{type(error).__name__}: {error}".split())[:120]}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return {
        "ms": planner.evaluate(plan, *task.job()).critical_path_ms,
        "seconds": time.process_time() - start,
        "ways": tables_by_way(plan),
    }


def _stop(*_: Any) -> None:
    raise TimeoutError("not done in time")


def page(settings: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """The results as a page."""
    lines = [
        "| task | commit | ranks | tables | GiB | ours ms | scale-up's best ms "
        "| its settings | ours / its | bound ms | `plan()` CPU s "
        "| our tables by type and kernel |",
        "|---" * 12 + "|",
    ]
    ratios = []
    for row in rows:
        plans = [(r["ms"], n) for n, r in row["torchrec"].items() if "ms" in r]
        best_ms, name = min(plans, default=(float("inf"), "no plan"))
        ratios.append(row["ms"] / best_ms)
        cells = [row["name"], row["commit"], row["ranks"], row["tables"]]
        cells += [f"{row['gib']:.0f}"]
        cells += [f"{row['ms']:.4g}", f"{best_ms:.4g}", name, f"{ratios[-1]:.3f}"]
        cells += [f"{row['bound_ms']:.4g}", f"{row['seconds']:.1f}"]
        cells += [", ".join(f"{n} {k}" for k, n in row["ways"].items())]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(
        (
            "# Models twice as large as the GPUs' memory, predicted\n",
            str(__doc__),
            f"Ours is shorter on {sum(r < 1 for r in ratios)} of {len(rows)} tasks; "
            f"ours / scale-up's: median {np.median(ratios):.3f}, {min(ratios):.3f} to "
            f"{max(ratios):.3f}.\n",
            *lines,
            f"\n```json\n{json.dumps(settings, indent=1)}\n```\n",
        )
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan the tasks."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--rival-seconds", type=float, default=30.0, help="of a plan")
    parser.add_argument("--only", default="", help="names of tasks, by commas")
    parser.add_argument("--resume", action="store_true", help="keep what <out> has")
    parser.add_argument("--out", type=Path, help="path without suffix")
    options = parser.parse_args(arguments)
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    settings = {
        **describe_run(),
        "rival_seconds": options.rival_seconds,
        "reserved_share": RESERVED,
        "host_share": HOST_SHARE,
        "settings": SETTINGS,
    }
    rows = kept_rows(options.out, resume=options.resume)
    known = {row["name"] for row in rows}
    wanted = set(filter(None, options.only.split(",")))
    for task in make_tasks():
        if task.name in known or (wanted and task.name not in wanted):
            continue
        row = {"commit": settings["commit"], **judge(task, options.rival_seconds)}
        rows.append(row)
        print(json.dumps(rows[-1]), flush=True)
        keep_rows(options.out, settings, rows, page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
