"""Measure sets of tables as sharding plans hold them.

    python benchmarks/gpu/sets.py --tables real_tables.json --out sets.parquet \
        --seconds 90

`neuroshard collect compute` draws tables at random. Here, a workload is drawn first,
then some of its tables, ranks and a batch. Some tables are split by rows, expensive
ones by columns, and a greedy search places the shards by predicted cost. Each set is a
kernel of one rank. `neuroshard train` reads the file together with other files of the
same device. The same command continues a file.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import itertools
import logging
import math
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from torchrec_neuroshard.bundles.find import load_cost_model
from torchrec_neuroshard.errors import DeviceFailureError
from torchrec_neuroshard.files import to_fields
from torchrec_neuroshard.measure.clock import SetTimer
from torchrec_neuroshard.measure.kernels import BOUNDS_CHECK, device_fingerprint
from torchrec_neuroshard.measure.records import RunHeader
from torchrec_neuroshard.measure.run import measure
from torchrec_neuroshard.measure.sets import (
    SampledSet,
    SamplingConfig,
    is_held_out_table,
    part_of,
    repeated_index,
)
from torchrec_neuroshard.measure.store import RecordStore
from torchrec_neuroshard.models.base import CostModel
from torchrec_neuroshard.tables.features import table_features
from torchrec_neuroshard.tables.loaders import load_json
from torchrec_neuroshard.tables.mlperf import mlperf_dlrm_v2
from torchrec_neuroshard.tables.table import (
    COLUMN_MULTIPLE,
    DATA_TYPE_BYTES,
    TableConfig,
    row_shard,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.dlrm_tables import generate_dlrm_tables
from harness.tasks import PRODUCTION_WIDTHS, cap_rows
from planner_comparison.tasks import STATE_BYTES_PER_ROW, held_bytes

USUAL_SHARDS = (2, 8)
"""Fewest and most column shards of a rank, where the tables allow it."""
MOST_ROW_SETS = 2
"""Most kernels of row shards that are measured of one plan."""
DEVICE_FAILED = 3
"""Exit code if the device failed, and only a new process can use it."""
FEWEST_TABLES = 5
"""Workloads with fewer tables in a part are left out there."""
LOCAL_RANKS = 8
"""Ranks of a node: a table is split by rows over a node's ranks, or over all."""
Workloads = Mapping[str, Sequence[TableConfig]]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRanges:
    """Ranges of the plans; ranges are inclusive."""

    num_tables: tuple[int, int] = (10, 60)
    worlds: tuple[int, ...] = (4, 8, 16, 32, 64)
    batch_sizes: tuple[int, int] = (65_536, 1_048_576)
    """Samples over all ranks; powers of two."""
    row_wise_share: float = 0.7
    """Share of plans with tables that are split by rows."""
    fp16_share: float = 0.1
    sets_per_plan: int = 6
    """Most kernels of a plan that are measured, from the busiest to the idlest."""
    max_bytes: int = 24 * 2**30
    """Most bytes of a set, with the optimizer's state."""
    max_lookups: int = 100_000_000
    """Most lookups of a set."""


QUICK = PlanRanges(
    worlds=(4, 8), batch_sizes=(64, 256), max_bytes=2**21, max_lookups=3000
)
"""Ranges of a rehearsal."""


def load_workloads(path: Path | None) -> Workloads:
    """Return published tables by workload; without a file, generated ones."""
    if path is not None:
        return load_json(path)
    return {"dlrm": generate_dlrm_tables(seed=0), "mlperf": mlperf_dlrm_v2()}


class PlanSets:
    """Draws sets; equal seeds and cost models give equal sets."""

    def __init__(
        self, workloads: Workloads, model: CostModel, ranges: PlanRanges, seed: int = 0
    ) -> None:
        """Split each workload into training, validation and test tables.

        Args:
            workloads: Tables by workload.
            model: Predicts the cost of shards, for placing them.
            ranges: Ranges of the plans.
            seed: Seed of the plans.
        """
        self._model, self._ranges, self._seed = model, ranges, seed
        self._pools: dict[str, list[list[TableConfig]]] = {}
        for tables in workloads.values():
            parts: dict[str, list[TableConfig]] = {}
            for table in tables:
                if table.pooling_factor > 0:
                    parts.setdefault(_part(table), []).append(table)
            for part, own in parts.items():
                if len(own) >= FEWEST_TABLES:
                    self._pools.setdefault(part, []).append(own)

    def __iter__(self) -> Iterator[SampledSet]:
        """Yield sets without end, some of them again as repeats."""
        usual = SamplingConfig()
        drawn: list[SampledSet] = []
        for number in itertools.count():
            for new in self.draw_plan(number):
                index = len(drawn)
                again = repeated_index(index, usual.repeat_every, usual.repeat_lag)
                if again is not None:
                    new = drawn[again]
                drawn.append(dataclasses.replace(new, index=index, repeat_of=again))
                yield drawn[-1]

    def draw_plan(self, number: int) -> list[SampledSet]:
        """Return kernels of plan number `number`; their indices are all 0."""
        rng = np.random.default_rng([self._seed, number])
        usual = SamplingConfig()
        part = part_of(rng.random(), (usual.held_out_sets, usual.validation_sets))
        pools = self._pools.get(part) or self._pools["train"]
        pool = pools[rng.integers(len(pools))]
        tables = self._choose(rng, pool)
        world = self._draw_world(rng, len(tables))
        batch_size = self._draw_batch(rng, tables, world)
        split, rest = self._draw_row_wise(rng, tables)
        shards, world = self._split_columns(rng, rest, world, batch_size)
        by_rows = _row_kernels(rng, split, world, batch_size)
        by_rows = self._spread(by_rows, MOST_ROW_SETS, batch_size)
        count = self._ranges.sets_per_plan - len(by_rows)
        by_columns = self._place(rng, shards, world, batch_size)
        by_columns = self._spread(by_columns, count, batch_size)
        found = []
        for i, kernel in enumerate([*by_columns, *by_rows]):
            named = tuple(
                dataclasses.replace(
                    t, name=f"{t.name}#{k}", profile=t.profile_at(batch_size)
                )
                for k, t in enumerate(kernel)
            )
            found.append(
                SampledSet(
                    index=0,
                    seed=(self._seed, number, i),
                    held_out=part == "test",
                    validation=part == "validation",
                    batch_size=batch_size,
                    tables=named,
                )
            )
        return found

    def _choose(
        self, rng: np.random.Generator, pool: Sequence[TableConfig]
    ) -> list[TableConfig]:
        """Return tables of a workload, with one optimizer and weight type."""
        ranges = self._ranges
        count = min(int(rng.integers(*ranges.num_tables, endpoint=True)), len(pool))
        optimizer = str(rng.choice(list(STATE_BYTES_PER_ROW)))
        data_type = "fp16" if rng.random() < ranges.fp16_share else "fp32"
        widths = rng.choice(["published", "one", "any"])
        one = int(rng.choice(PRODUCTION_WIDTHS))
        chosen = []
        for i in rng.choice(len(pool), count, replace=False):
            table = pool[i]
            if widths != "published":
                any_width = int(rng.choice(PRODUCTION_WIDTHS))
                table = table.with_width(one if widths == "one" else any_width)
            row_bytes = table.embedding_dim * DATA_TYPE_BYTES[data_type]
            # Several of the largest tables fit into a set.
            most = ranges.max_bytes // 4 // (row_bytes + STATE_BYTES_PER_ROW[optimizer])
            table = cap_rows(table, max(most, 1))
            chosen.append(
                dataclasses.replace(table, optimizer=optimizer, data_type=data_type)
            )
        return chosen

    def _draw_world(self, rng: np.random.Generator, num_tables: int) -> int:
        """Return a number of ranks with at most 8 whole tables each."""
        worlds = self._ranges.worlds
        fitting = [w for w in worlds if num_tables / w <= USUAL_SHARDS[1]]
        return int(rng.choice(fitting or worlds[-1:]))

    def _draw_batch(
        self, rng: np.random.Generator, tables: Sequence[TableConfig], world: int
    ) -> int:
        """Return the samples of all ranks, fewer if ranks had too many lookups."""
        low, high = (round(math.log2(b)) for b in self._ranges.batch_sizes)
        power = int(rng.integers(low, high + 1))
        lookups = sum(t.pooling_factor for t in tables) / world
        while lookups * 2**power > self._ranges.max_lookups and power > low:
            power -= 1
        return 1 << power

    def _draw_row_wise(
        self, rng: np.random.Generator, tables: list[TableConfig]
    ) -> tuple[list[TableConfig], list[TableConfig]]:
        """Return the tables that are split by rows, and the others."""
        if rng.random() >= self._ranges.row_wise_share:
            return [], tables
        most = min(USUAL_SHARDS[1], max(1, len(tables) // 3))
        count = int(rng.integers(1, most, endpoint=True))
        # Large tables are split by rows more often than small ones.
        keys = [rng.random() * math.log(t.num_embeddings + 1) for t in tables]
        order = sorted(range(len(tables)), key=lambda i: -keys[i])
        chosen = set(order[:count])
        rest = [t for i, t in enumerate(tables) if i not in chosen]
        return [tables[i] for i in order[:count]], rest

    def _split_columns(
        self,
        rng: np.random.Generator,
        tables: Sequence[TableConfig],
        world: int,
        batch_size: int,
    ) -> tuple[list[TableConfig], int]:
        """Return shards, and the ranks that they fill.

        The most expensive shard is halved until it is cheap enough for balanced ranks,
        and ranks can get the drawn number of shards.
        """
        wanted = int(rng.integers(*USUAL_SHARDS, endpoint=True))
        narrowest = int(rng.choice([COLUMN_MULTIPLE, 8, 16, 32]))
        costs = self._costs(tables, batch_size)
        heap = [(-c, i, t) for i, (c, t) in enumerate(zip(costs, tables, strict=True))]
        heapq.heapify(heap)
        numbers = itertools.count(len(heap))
        cheap = rng.uniform(0.3, 1.0) * sum(costs) / world
        done: list[TableConfig] = []
        while heap:
            cost, _, table = heapq.heappop(heap)
            count = len(done) + len(heap) + 1
            enough, full = count >= wanted * world, count >= USUAL_SHARDS[1] * world
            half = table.embedding_dim // 2
            if half < narrowest or half % COLUMN_MULTIPLE:
                done.append(table)
            elif full or (enough and -cost <= cheap):
                done += [table, *(t for *_, t in heap)]
                break
            else:
                for _ in range(2):
                    # A shard's cost falls less than its width.
                    item = (0.6 * cost, next(numbers), table.with_width(half))
                    heapq.heappush(heap, item)
        while len(done) < wanted * world and world > min(self._ranges.worlds):
            world //= 2
        return done, world

    def _place(
        self,
        rng: np.random.Generator,
        shards: Sequence[TableConfig],
        world: int,
        batch_size: int,
    ) -> list[list[TableConfig]]:
        """Return the kernels of all ranks.

        Each shard goes to the rank that has the lowest cost so far, and the most
        expensive first. TorchRec runs whole tables and column shards in two kernels, or
        in one if all of them are column-wise.
        """
        costs = self._costs(shards, batch_size)
        whole_apart = rng.random() < 0.25
        names = [t.name for t in shards]
        ranks = [(0.0, rank) for rank in range(world)]
        kernels: dict[tuple[int, bool], list[TableConfig]] = {}
        for i in sorted(range(len(shards)), key=lambda i: -costs[i]):
            cost, rank = heapq.heappop(ranks)
            apart = whole_apart and names.count(names[i]) == 1
            kernels.setdefault((rank, apart), []).append(shards[i])
            heapq.heappush(ranks, (cost + costs[i], rank))
        return list(kernels.values())

    def _spread(
        self, kernels: Sequence[Sequence[TableConfig]], count: int, batch_size: int
    ) -> list[list[TableConfig]]:
        """Return up to `count` different kernels, from the busiest to the idlest."""
        fitting = (fit(kernel, self._ranges, batch_size) for kernel in kernels)
        by_content = {frozenset(Counter(k).items()): k for k in fitting if k}
        different = sorted(by_content.values(), key=gathered_columns, reverse=True)
        count = min(count, len(different))
        places = np.linspace(0, len(different) - 1, count).round().astype(int)
        return [different[i] for i in places]

    def _costs(self, tables: Sequence[TableConfig], batch_size: int) -> list[float]:
        """Return the predicted time of each table alone [ms]."""
        sums = self._model.encode(table_features(tables, batch_size))
        costs: list[float] = self._model.predict_sums(sums).sum(axis=1).tolist()
        return costs


def _part(table: TableConfig) -> str:
    """Return the part of a table, the same as in `SetSampler`."""
    usual = SamplingConfig()
    test = usual.held_out_share
    if is_held_out_table(table.name, test):
        return "test"
    either = is_held_out_table(table.name, test + usual.validation_share)
    return "validation" if either else "train"


def _row_kernels(
    rng: np.random.Generator, tables: Sequence[TableConfig], world: int, batch_size: int
) -> list[list[TableConfig]]:
    """Return the kernels of tables that are split by rows, over all ranks or a node.

    All ranks of a node have equal kernels.
    """
    over = world if rng.random() < 0.5 else min(LOCAL_RANKS, world)
    kernels: list[list[TableConfig]] = [[] for _ in range(world // over)]
    for i, table in enumerate(tables):
        rows = -(-table.num_embeddings // over)
        kernels[i % len(kernels)].append(row_shard(table, rows, batch_size))
    return [kernel for kernel in kernels if kernel]


def gathered_columns(tables: Sequence[TableConfig]) -> float:
    """Return the values that a sample's lookups read."""
    return sum(t.pooling_factor * t.embedding_dim for t in tables)


def fit(
    kernel: Sequence[TableConfig], ranges: PlanRanges, batch_size: int
) -> list[TableConfig]:
    """Return the first tables of a kernel that the device has room for."""
    kept: list[TableConfig] = []
    for table in kernel:
        more = [*kept, table]
        lookups = batch_size * sum(t.pooling_factor for t in more)
        if (
            sum(map(held_bytes, more)) <= ranges.max_bytes
            and lookups <= ranges.max_lookups
        ):
            kept = more
    return kept


def measure_sets(args: argparse.Namespace, ranges: PlanRanges, until: float) -> int:
    """Measure until the time is over; return 3 if the device failed."""
    device = torch.device(args.device)
    torch.set_num_threads(1)
    model = load_cost_model(args.bundle, device_type=device.type)
    timer = SetTimer(
        device, ranges.max_bytes, time_budget_seconds=0.0 if args.quick else None
    )
    header = RunHeader(
        fingerprint=device_fingerprint(device, 1),
        reference_ms=timer.reference_ms,
        seed=args.seed,
        sampling={"as_in_plans": True, "cost_model": model.name, **to_fields(ranges)},
        bounds_check=BOUNDS_CHECK,
    )
    sets = PlanSets(load_workloads(args.tables), model, ranges, args.seed)
    with RecordStore(args.out, header) as store:
        known = {*store.done, *map(int, store.header.failed)}
        new = (drawn for drawn in sets if drawn.index not in known)
        todo = itertools.islice(new, args.num_sets)
        try:
            left_out = measure(todo, timer, store.append, until=until)
        except DeviceFailureError as error:
            text, index = error.args
            store.note_failure(index, text)
            print(f"set {index}: the device failed: {text}")
            return DEVICE_FAILED
    for index, why in left_out.items():
        print(f"set {index} was left out: {why}")
    print(f"{len(store.records)} sets")
    return 0


def main() -> int:
    """Measure the sets; return 3 if the device failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tables", type=Path, help="JSON of published table sets")
    parser.add_argument("--bundle", default="auto", help="cost model for the plans")
    parser.add_argument("--seed", type=int, default=0, help="other sets by each seed")
    parser.add_argument("--num-sets", type=int, help="most sets to measure")
    parser.add_argument("--seconds", type=float, default=90.0, help="time limit")
    parser.add_argument("--quick", action="store_true", help="dry run, small sizes")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    until = time.monotonic() + args.seconds
    ranges = PlanRanges()
    most = SamplingConfig.for_device(torch.device(args.device))
    ranges = dataclasses.replace(
        ranges,
        max_bytes=min(ranges.max_bytes, most.max_weight_bytes),
        max_lookups=min(ranges.max_lookups, most.max_lookups),
    )
    return measure_sets(args, QUICK if args.quick else ranges, until)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    sys.exit(main())
