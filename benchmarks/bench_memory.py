"""Compare what ranks really allocate with what plans foretell.

Every case plans MLPerf DLRM-v2's tables for one sharding type and kernel, takes two
ranks of the plan, the fullest and the emptiest, and runs steps on each as on a
cluster: torch's allocator says what was allocated. Beside it stand this package's
estimate and TorchRec's formula, which it used before.

It needs CUDA builds of torch and fbgemm, and a GPU or, in its place, the runtime that
`benchmarks/memory/build.sh` builds, which allocates and computes nothing:

    LD_PRELOAD=... python -O benchmarks/bench_memory.py \
        --out benchmarks/results/memory_202611

`-O` there, since FBGEMM asserts what its kernels have computed. Writes `<out>.json`
and `<out>.md`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import shlex
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torchrec
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
)
from torchrec.distributed.types import (
    CacheParams,
    ModuleSharder,
    PipelineType,
    ShardingPlan,
)
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from harness.models import OPTIMIZER_CLASSES, build_collection
from harness.provenance import commit, now
from memory.one_rank import NODE, Bags, make_batch, measure
from torchrec_neuroshard import NeuroShardPlanner, SearchConfig, rehearse
from torchrec_neuroshard.planner.costs.given_plans import PlanOptions
from torchrec_neuroshard.planner.parts.shard_estimators import StorageEstimator
from torchrec_neuroshard.tables import TableConfig
from torchrec_neuroshard.workloads.inputs import feature_names
from torchrec_neuroshard.workloads.mlperf import mlperf_dlrm_v2

GIB = 2**30
PIPELINES = ("none", "train_sparse_dist", "train_prefetch_sparse_dist")
OFFLOADED = ("fused_uvm", "fused_uvm_caching")
ANY = "any"
"""Sharding types and kernels as the planner likes: MLPerf DLRM-v2 on `CARD`."""
CARD, ROOM = 80, 2000
"""GiB of a device: where the planner chooses, and where a case says what to do."""
GOOD = -0.02, 0.1
"""Errors of a peak foretold that are good enough."""
LONG, LONG_BATCH = 500, 2560
"""Ids of a long sequence, and samples of a batch with such ones."""
SMALL_ROWS = 100_000
"""Of the largest tables where every rank holds all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One sharding type and kernel in one world."""

    world_size: int
    sharding_type: str
    kernel: str = "fused"
    pipeline: str = "none"
    pooled: bool = True
    batch_size: int = 8192
    optimizer: str = "rowwise_adagrad"
    num_ids: int = 0
    """Of each sample and feature; 0: MLPerf's."""

    @property
    def kind(self) -> str:
        """What its tables give."""
        long = f" of {self.num_ids}" if self.num_ids else ""
        return f"{'bags' if self.pooled else 'sequences'}{long}"

    @property
    def tables(self) -> list[TableConfig]:
        """MLPerf's, with its ids per sample."""
        replicated = self.sharding_type == "data_parallel"
        tables = mlperf_dlrm_v2(max_rows=SMALL_ROWS if replicated else None)
        if not self.pooled:  # a few: every id has an output of its own
            tables = tuple(t for t in tables if t.pooling_factor <= 3)[:8]
        return [
            TableConfig(
                name=t.name,
                num_embeddings=t.num_embeddings,
                embedding_dim=t.embedding_dim,
                pooling_factor=float(self.num_ids or t.pooling_factor),
                optimizer=self.optimizer,
            )
            for t in tables
        ]


def cases(worlds: list[int]) -> Iterator[Case]:
    """All combinations that TorchRec can run."""
    types = ["table_wise", "column_wise", "row_wise", "table_row_wise", "grid_shard"]
    for pipeline, world_size in itertools.product(PIPELINES, worlds):
        common: dict[str, Any] = {"world_size": world_size, "pipeline": pipeline}
        for kind in types:
            if kind != "grid_shard" or world_size > NODE:
                yield Case(sharding_type=kind, **common)
        for kind, kernel in itertools.product(("table_wise", "row_wise"), OFFLOADED):
            yield Case(sharding_type=kind, kernel=kernel, **common)
        yield Case(sharding_type="data_parallel", kernel="dense", **common)
        for kind in ("table_wise", "column_wise", "row_wise"):
            yield Case(sharding_type=kind, pooled=False, **common)
            long: dict[str, Any] = {"batch_size": LONG_BATCH, "num_ids": LONG}
            yield Case(sharding_type=kind, pooled=False, **long, **common)
        yield Case(sharding_type="column_wise", optimizer="adam", **common)
        yield Case(sharding_type=ANY, kernel=ANY, **common)


class Planned:
    """A case's plan, and what is foretold of its ranks."""

    def __init__(self, case: Case) -> None:
        self.case = case
        tables = case.tables
        self.collection = collection(case)
        self.sharders: list[ModuleSharder[nn.Module]] = [
            EmbeddingBagCollectionSharder()
            if case.pooled
            else EmbeddingCollectionSharder()
        ]
        self.topology = Topology(
            world_size=case.world_size,
            local_world_size=min(NODE, case.world_size),
            compute_device="cuda",
            hbm_cap=(CARD if case.sharding_type == ANY else ROOM) * GIB,
            ddr_cap=2000 * GIB,
        )
        chosen: dict[str, Any] = {}
        if case.sharding_type != ANY:
            chosen["sharding_types"] = [case.sharding_type]
            chosen["compute_kernels"] = [case.kernel]
            chosen["min_partition"] = 32
        if case.kernel == "fused_uvm_caching" and "prefetch" in case.pipeline:
            chosen["cache_params"] = CacheParams(prefetch_pipeline=True)
        constraints = {
            t.name: ParameterConstraints(pooling_factors=[t.pooling_factor], **chosen)
            for t in tables
        }
        members = {p.value: p for p in PipelineType}
        pipeline = members[case.pipeline]
        self.planner = NeuroShardPlanner(
            topology=self.topology,
            batch_size=case.batch_size,
            constraints=constraints,
            search=SearchConfig(time_budget_seconds=3),
            consider_stock=False,
            storage_reservation=FixedPercentageStorageReservation(0.0),
            stats=[],
            pipeline_type=pipeline,
        )
        model = Bags(self.collection)
        self.plan: ShardingPlan = self.planner.plan(model, self.sharders)
        self.options = PlanOptions(
            model, self.sharders, self.planner.enumerator, self.planner.costs
        ).of(self.plan)
        self.memory = rehearse(
            model,
            self.plan,
            self.topology,
            self.sharders,
            batch_size=case.batch_size,
            constraints=constraints,
            pipeline_type=pipeline,
        ).ranks
        before = StorageEstimator(
            self.topology,
            constraints,
            reader=self.planner.costs.reader,
            pipeline_type=pipeline,
        )
        stock = EmbeddingStorageEstimator(
            self.topology, constraints, pipeline_type=pipeline
        )
        data = self.planner.enumerator._sharder_data_map
        self.before = [0.0] * case.world_size
        stock.estimate([before._with_optimizer(o) for o in self.options], data)
        for option in self.options:
            for shard in option.shards:
                self.before[shard.rank] += shard.storage.hbm

    def run(self, rank: int) -> dict[str, Any]:
        """Measure a rank."""
        case, found = self.case, self.memory[rank]
        lengths = {
            name: max(1, round(t.pooling_factor / t.num_features))
            for t in case.tables
            for name in feature_names(t)
        }
        measured = measure(
            collection(case),
            self.plan,
            self.sharders,
            make_batch(lengths, case.batch_size, weighted=False),
            rank=rank,
            world_size=case.world_size,
            pipeline=case.pipeline,
        )
        return {
            "world_size": case.world_size,
            "batch_size": case.batch_size,
            "sharding_type": case.sharding_type,
            "kernel": case.kernel,
            "pipeline": case.pipeline,
            "tables": case.kind,
            "optimizer": case.optimizer,
            "rank": rank,
            "measured_static": measured["static"],
            "measured_peak": measured["peak"],
            "foretold_static": found.static_bytes,
            "foretold_peak": found.peak_bytes,
            "instant": found.instant,
            "before": self.before[rank],
        }


def collection(case: Case) -> nn.Module:
    """The case's tables on "meta", with their optimizers."""
    if case.pooled:
        return build_collection(case.tables)
    module = EmbeddingCollection(
        tables=[
            EmbeddingConfig(
                name=t.name,
                num_embeddings=t.num_embeddings,
                embedding_dim=t.embedding_dim,
                feature_names=list(feature_names(t)),
            )
            for t in case.tables
        ],
        device=torch.device("meta"),
    )
    for parameter in module.parameters():
        chosen = OPTIMIZER_CLASSES[case.optimizer]
        apply_optimizer_in_backward(chosen, [parameter], {"lr": 0.1})
    return module


def page(result: dict[str, Any]) -> str:
    """The table, whole."""
    rows = result["rows"]
    lines = [
        "# Memory of ranks: allocated, and foretold",
        "",
        f"{result['device']}; torch {result['torch']}, torchrec {result['torchrec']}, "
        f"commit {result['commit']}, {result['date']}.",
        "",
        f"    {result['command']}",
        "",
        "Static and peak as torch's allocator counts them [GiB]; the error of the "
        "peak foretold by `rehearse`, and that of TorchRec's formula, used before. "
        f"`{ANY}`: MLPerf DLRM-v2 on cards of {CARD} GiB, planned with nothing given.",
        "",
        "| ranks | tables | sharding | kernel | pipeline | optimizer | rank | static "
        "| peak | foretold | error | before | error before |",
        "|---:|---|---|---|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        peak = r["measured_peak"]
        lines.append(
            f"| {r['world_size']} | {r['tables']} "
            f"| {r['sharding_type']} | {r['kernel']} "
            f"| {r['pipeline']} | {r['optimizer']} | {r['rank']} "
            f"| {r['measured_static'] / GIB:.3f} | {peak / GIB:.3f} "
            f"| {r['foretold_peak'] / GIB:.3f} | {r['foretold_peak'] / peak - 1:+.1%} "
            f"| {r['before'] / GIB:.3f} | {r['before'] / peak - 1:+.1%} |"
        )
    lines += ["", *summary(rows)]
    for failed in result["failed"]:
        lines.append(f"\nNot measured: {failed}")
    return "\n".join(lines) + "\n"


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Ranks foretold well, by pipeline and world."""
    low, high = GOOD
    title = f"within {low:+.0%} and {high:+.0%} of the peak"
    yield f"| pipeline | ranks | measured | {title} | error | before: {title} | error |"
    yield "|---|---:|---:|---:|---|---:|---|"
    keys = dict.fromkeys((r["pipeline"], r["world_size"]) for r in rows)
    for pipeline, world_size in (*keys, ("all", "all")):
        some = [
            r
            for r in rows
            if (r["pipeline"], r["world_size"]) == (pipeline, world_size)
        ]
        cells = []
        for name in ("foretold_peak", "before"):
            errors = [r[name] / r["measured_peak"] - 1 for r in some or rows]
            cells.append(str(sum(low <= e <= high for e in errors)))
            cells.append(f"{min(errors):+.1%} to {max(errors):+.1%}")
        cells = [pipeline, str(world_size), str(len(some or rows)), *cells]
        yield f"| {' | '.join(cells)} |"


def main() -> int:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 16, 128])
    parser.add_argument("--only", default="", help="sharding types, by comma")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    only = set(filter(None, args.only.split(",")))
    for case in cases(args.worlds):
        if only and case.sharding_type not in only:
            continue
        start = time.monotonic()
        try:
            planned = Planned(case)
            order = sorted(
                range(case.world_size), key=lambda r: planned.memory[r].peak_bytes
            )
            for rank in dict.fromkeys((order[-1], order[0])):
                rows.append(row := planned.run(rank))
                peak = row["measured_peak"]
                print(
                    f"{case.world_size:>4} {case.sharding_type:>15} {case.kernel:>17} "
                    f"{case.pipeline:>26} {case.kind:>16} "
                    f"{rank:>4} static {row['measured_static'] / GIB:8.3f} "
                    f"({row['foretold_static'] / GIB:8.3f}) peak {peak / GIB:8.3f} "
                    f"foretold {row['foretold_peak'] / peak - 1:+7.2%} "
                    f"{row['instant']:>8} before {row['before'] / peak - 1:+7.1%} "
                    f"{time.monotonic() - start:5.1f} s",
                    flush=True,
                )
        except Exception as error:
            failed.append(f"{case}: {type(error).__name__}: {error}"[:400])
            print("FAILED", failed[-1], flush=True)
        write(args.out, rows, failed)
    errors = [r["foretold_peak"] / r["measured_peak"] - 1 for r in rows]
    if errors:
        print(f"{len(errors)} ranks: {min(errors):+.2%} to {max(errors):+.2%}")
    return int(bool(failed) or not rows)


def write(out: Path | None, rows: list[dict[str, Any]], failed: list[str]) -> None:
    """Write what was measured so far."""
    result = {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "commit": commit(),
        "date": now(),
        "device": torch.cuda.get_device_properties(0).name,
        "torch": torch.__version__,
        "torchrec": torchrec.__version__,
        "rows": rows,
        "failed": failed,
    }
    if out:
        out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        out.with_suffix(".md").write_text(page(result))


if __name__ == "__main__":
    sys.exit(main())
