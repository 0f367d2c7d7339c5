"""Options as a sharding task, and a placed plan as arrays that are priced once.

`reader` decides which options the cost model covers.

Shapes: `N` shards, `W` ranks, `S` stages, `T` options.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import Perf, Shard, ShardingOption

from torchrec_neuroshard.costs.simulator import (
    PHASES,
    PredictedCosts,
    PricedShards,
    RankCosts,
    Simulator,
    StageCosts,
)
from torchrec_neuroshard.costs.task import ColumnShard, Placement, ShardingTask
from torchrec_neuroshard.models.base import RangeWarning
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.planner.compat import kernel_settings
from torchrec_neuroshard.planner.groups import whole_nodes
from torchrec_neuroshard.planner.kernels import (
    is_estimated,
    kernel_factors,
    load_factor,
    priced_codecs,
)
from torchrec_neuroshard.planner.option_facts import (
    has_cache,
    is_fused,
    loads_ahead,
    reads_host,
    table_name,
)
from torchrec_neuroshard.planner.reader import TableReader
from torchrec_neuroshard.planner.ways import Ways, ways_of
from torchrec_neuroshard.report.coverage import (
    UNCOSTED,
    Reason,
    describe_source,
    extrapolation_notes,
)
from torchrec_neuroshard.report.parts import Bottleneck, HostTable

if TYPE_CHECKING:
    from torchrec_neuroshard.planner.plan_costs import PlanCosts

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_FUSED = EmbeddingComputeKernel.FUSED.value


def fusion_key(
    option: ShardingOption, reader: TableReader, sharding_type: str
) -> tuple[Any, ...]:
    """Return the key of the fused kernel that runs the option's shards.

    TorchRec fuses tables of one module and sharding type if weight type, pooling,
    optimizer, kernel and kernel parameters agree. Rows may be on the device or host.
    """
    return (
        option.path,
        sharding_type,
        reader.facts(option).kernel,
        kernel_settings(option),
        _cache_key(option),
        _FUSED if is_fused(option) else option.compute_kernel,
    )


def _cache_key(option: ShardingOption) -> tuple[Any, ...]:
    """Return the cache settings by which TorchRec separates kernels.

    Neither the location of a table nor its cached share matters. With prefetching,
    every width has its own kernel.
    """
    params = option.cache_params
    if params is None:
        return ()
    names = ("algorithm", "reserved_memory", "precision", "prefetch_pipeline")
    values = ((name, getattr(params, name)) for name in names)
    key = tuple((name, repr(value)) for name, value in values if value is not None)
    if not (has_cache(option) and loads_ahead(option)):
        return key
    return (*key, *sorted({int(s.size[1]) for s in option.shards}))


def stage_name(path: str, sharding_type: str) -> str:
    """Return the name of the stage for a module's tables of one sharding type."""
    return f"{path or 'model'} ({sharding_type})"


def task_of(
    ways: Ways, reader: TableReader, places: Sequence[int] | None = None, **limits: Any
) -> ShardingTask:
    """Return a task of these ways to shard tables.

    Groups and stages are numbered in the order of rows. A module's tables of one
    sharding type share a stage.

    Args:
        ways: Ways with a cost; several may be of one table.
        reader: Describes their tables and the devices.
        places: Place of each row's table in the model. None: the order of rows.
        limits: The task's fields on memory, splits and ranks. None: no limits.
    """
    places = places or range(ways.num_rows)
    in_order = ways.take(np.argsort(places, kind="stable"))
    paths = dict.fromkeys(ways.kinds[k].path for k in _in_order(in_order.kind_R))
    modules = {path: number for number, path in enumerate(paths)}
    groups: dict[tuple[Any, ...], int] = {}
    stages: dict[tuple[Any, ...], int] = {}
    group_K, facts_K = {}, {}
    for number in _in_order(ways.kind_R):
        kind = ways.kinds[number]
        key = fusion_key(kind, reader, kind.sharding_type)
        group_K[number] = groups.setdefault(key, len(groups))
        stages.setdefault(key[:2], len(stages))
        cached = has_cache(kind)
        facts_K[number] = (
            kind.sharding_type,
            priced_codecs(kind),
            None if cached else kernel_factors(kind, reader),
            cached,
        )
    kind_R, table_R = ways.kind_R.tolist(), ways.table_R.tolist()
    tables_T = {t: reader.table(ways.tables[t]) for t in set(table_R)}
    repeats_T = {t: reader.repeats(ways.tables[t]) for t in tables_T}
    rows: dict[str, list[int]] = {}
    for row, table in enumerate(table_R):
        rows.setdefault(tables_T[table].name, []).append(row)
    types, codecs, kernels, cached_R = zip(
        *(facts_K[kind] for kind in kind_R), strict=True
    )
    if any(cached_R):  # a cache's misses depend on the table
        kernels = tuple(
            kernel_factors(ways.option(row), reader) if cached else kernel
            for row, (kernel, cached) in enumerate(zip(kernels, cached_R, strict=True))
        )
    world_size, local_size = reader.world_size, reader.topology.local_world_size
    return ShardingTask(
        tables=tuple(tables_T[t] for t in table_R),
        world_size=world_size,
        batch_size=int(ways.tables[table_R[0]].batch_size) * world_size,
        local_world_size=whole_nodes(world_size, local_size),
        node_size=reader.node_size,
        groups=tuple(group_K[kind] for kind in kind_R),
        stages=tuple(stages[key[:2]] for key in groups),
        stage_names=tuple(stage_name(path, kind) for path, kind in stages),
        modules=tuple(modules[path] for path, _ in stages),
        places=tuple(places),
        alternatives=tuple(map(tuple, rows.values())),
        codecs=codecs,
        repeats=tuple(repeats_T[t] for t in table_R),
        kernels=kernels,
        **{"sharding_types": types, **limits},
    )


def _in_order(numbers: Ints) -> list[int]:
    """Return the different numbers, in the order in which they first appear."""
    return list(dict.fromkeys(numbers.tolist()))


@dataclass(frozen=True, slots=True)
class PricedOptions:
    """Options with a cost as arrays, and the prices of their shards."""

    options: tuple[ShardingOption, ...]
    simulator: Simulator
    """The simulator of a task whose tables are the options, in order."""
    table_N: Ints
    """Option of each shard."""
    place_N: Ints
    """Number of each shard within its option."""
    width_N: Ints
    """Columns of each shard."""
    rows_N: Ints
    """Rows of each shard."""
    first_N: Ints
    """First row of each shard."""
    rank_N: Ints
    """Rank of each shard, -1 if it has none. TorchRec's planning loop resets the ranks
    of options, so they are read at once."""
    prices: PricedShards

    @classmethod
    def of(
        cls,
        options: Sequence[ShardingOption],
        costs: PlanCosts,
        places: Sequence[int] | None = None,
    ) -> PricedOptions:
        """Price options, with or without ranks."""
        simulator = costs.simulator(task_of(ways_of(options), costs.reader, places))
        counts = [len(o.shards) for o in options]
        size_N2 = np.array([s.size for o in options for s in o.shards], dtype=np.int64)
        first_N = np.array(
            [s.offset[0] for o in options for s in o.shards], dtype=np.int64
        )
        rank = [-1 if s.rank is None else s.rank for o in options for s in o.shards]
        table_N = np.repeat(np.arange(len(options)), counts)
        rows_N, width_N = size_N2.T
        return cls(
            options=tuple(options),
            simulator=simulator,
            table_N=table_N,
            place_N=np.concatenate([np.arange(n) for n in counts]),
            width_N=width_N,
            rows_N=rows_N,
            first_N=first_N,
            rank_N=np.array(rank, dtype=np.int64),
            prices=simulator.price(table_N, width_N, rows_N, first_N),
        )

    @property
    def task(self) -> ShardingTask:
        """The task, whose tables are the options."""
        return self.simulator.task

    @property
    def shards(self) -> list[Shard]:
        """TorchRec's records of the shards."""
        return [shard for option in self.options for shard in option.shards]

    @property
    def num_shards_T(self) -> Ints:
        """Number of column parts of each option's table."""
        count: Ints = np.bincount(
            self.table_N[self.first_N == 0], minlength=len(self.options)
        )
        return count

    def predicted(self) -> PredictedCosts:
        """Return the predicted costs of an iteration, for placed options."""
        return self.simulator.predict(self.prices, self.rank_N, self.num_shards_T)

    def single_perfs(self) -> list[Perf]:
        """Return the cost of each shard as if its table were alone.

        Shards that TorchRec places independently are alone on their rank. Shards that
        span a node or all ranks are predicted together.
        """
        size_T = np.array([self.task.block_size(t) for t in range(len(self.options))])
        rank_N = self.place_N % size_T[self.table_N]
        block_N = np.cumsum(rank_N == 0) - 1
        comms_N3 = self.simulator.single_comms(
            self.table_N, self.prices.loads_N3, rank_N, block_N
        )
        return _perfs(self.simulator.single_compute(self.prices), comms_N3)

    def attributed(self) -> tuple[Floats, Floats]:
        """Return each placed shard's part of its rank's costs.

        A shard's part of a set is proportional to its cost alone.

        Returns:
            `N x 2` [ms]: forward, loading of caches included, and backward; `N x 3`
            [ms]: index exchange, collectives forward and backward.
        """
        simulator, prices, rank_N = self.simulator, self.prices, self.rank_N
        loads = simulator.add_up(prices, rank_N)
        alone = simulator.single_compute(prices) - prices.extra_N2
        fused_WG2 = simulator.compute_costs(loads.sums_CWGE)
        group_N = rank_N * self.task.num_groups + simulator.groups_T[self.table_N]
        compute_N2 = prices.extra_N2 + _share(alone, group_N, fused_WG2.reshape(-1, 2))
        comms_WS3, _ = simulator.collectives(loads, self.num_shards_T)
        index_N, columns_N, gradients_N = prices.loads_N3.T
        weights = np.stack([index_N, columns_N, columns_N + gradients_N], axis=1)
        stage_N = rank_N * self.task.num_stages + simulator.stages_T[self.table_N]
        return compute_N2, _share(weights, stage_N, comms_WS3.reshape(-1, 3))


class PlacedPlan:
    """A plan whose shards have ranks, as arrays, priced once.

    Shards of one table on one rank stay separate, as TorchRec runs them.

    Attributes:
        costed: The options with a cost, priced; column shards in fused kernels come
            first. None: no option has a cost.
        stock: The other options, which count TorchRec's estimate in their shards.

    Args:
        plan: Placed options, one per table.
        costs: Prices plans.
    """

    def __init__(self, plan: Sequence[ShardingOption], costs: PlanCosts) -> None:
        reader = costs.reader
        columns: list[int] = []
        others: list[int] = []
        stock: list[int] = []
        for place, option in enumerate(plan):
            if reader.is_column_sharded(option):
                columns.append(place)
            else:
                (others if reader.has_cost(option) else stock).append(place)
        self._costs, self._costed_at, self._stock_at = costs, [*columns, *others], stock
        self._num_columns = len(columns)
        self.stock = [plan[place] for place in stock]
        shards = [s for option in self.stock for s in option.shards]
        self._stock_rank_N = np.array([s.rank for s in shards], dtype=np.int64)
        self._stock_phases_N6 = np.array([stock_phases(s.perf) for s in shards])
        costed = [plan[place] for place in self._costed_at]
        self.costed = (
            PricedOptions.of(costed, costs, self._costed_at) if costed else None
        )

    @functools.cached_property
    def task(self) -> ShardingTask | None:
        """The tables of `placement`, in its order; None if there are none.

        The task describes the plan, so it has no limits on memory and widths.
        """
        if self.costed is None or not self._num_columns:
            return None
        if self._num_columns == len(self.costed.options):
            return self.costed.task
        return task_of(
            ways_of(self.costed.options[: self._num_columns]), self._costs.reader
        )

    @functools.cached_property
    def placement(self) -> Placement:
        """The column shards in fused kernels on devices."""
        shards: list[ColumnShard] = []
        if (costed := self.costed) is not None:
            shards = [
                ColumnShard(table, int(shard.offset[1]), width, rank)
                for table, shard, width, rank in zip(
                    costed.table_N.tolist(),
                    costed.shards,
                    costed.width_N.tolist(),
                    costed.rank_N.tolist(),
                    strict=True,
                )
                if table < self._num_columns
            ]
        return Placement(self._costs.reader.world_size, tuple(sorted(shards)))

    @functools.cached_property
    def predicted(self) -> PredictedCosts:
        """Predicted costs of one iteration."""
        costs, costed = self._costs, self.costed
        stages: list[StageCosts] = []
        uncertainty, lengths = 0.0, None
        if costed is not None:
            found = costed.predicted()
            stages += found.stages
            uncertainty, lengths = found.uncertainty, found.lengths
        if self.stock:
            phases_W6 = np.zeros((costs.reader.world_size, len(PHASES) + 1))
            np.add.at(phases_W6, self._stock_rank_N, self._stock_phases_N6)
            ranks = tuple(RankCosts(*row) for row in phases_W6.tolist())
            module = max((s.module for s in stages), default=-1) + 1
            name = "others (TorchRec's estimate)"
            stages.append(StageCosts(name, ranks, module=module))
            lengths = lengths and lengths.with_another_stage()
        return PredictedCosts(
            stages=tuple(stages),
            uncertainty=uncertainty,
            compute_source=describe_source(costs.cost_model, self._reasons),
            comms_source=costs.comms_model.source,
            compute_errors=costs.cost_model.errors,
            comms_error=costs.comms_model.error,
            schedule=costs.schedule,
            dense=costs.dense,
            overlaps=costs.comms_model.overlaps,
            node_size=costs.reader.node_size,
            lengths=lengths,
        )

    @functools.cached_property
    def _reasons(self) -> list[Reason | None]:
        """Why measurements do not cover a table; those with a cost come first."""
        reasons: list[Reason | None] = [UNCOSTED] * len(self.stock)
        if (costed := self.costed) is None:
            return reasons
        model = self._costs.cost_model
        outside: dict[int, list[RangeWarning]] = {}
        features = costed.simulator.shard_features(
            costed.table_N, costed.width_N, costed.rows_N, costed.first_N
        )
        for warning in model.range_warnings(features):
            table = int(costed.table_N[warning.shard])
            outside.setdefault(table, []).append(warning)
        found = (
            Reason.of(
                table,
                outside.get(place, ()),
                model.source,
                kernel=option.compute_kernel if is_estimated(option) else None,
                covers=table.pooled or model.measures_sequences,
            )
            for place, (option, table) in enumerate(
                zip(costed.options, costed.task.tables, strict=True)
            )
        )
        return [*found, *reasons]

    @functools.cached_property
    def _attributed(self) -> tuple[Floats, Floats]:
        assert self.costed is not None, "some option has a price"
        return self.costed.attributed()

    def attribute(self, plan: Sequence[ShardingOption]) -> None:
        """Divide each rank's cost among its shards, in place.

        Afterwards the `Perf` of a rank's shards add up to the cost of the set, and
        TorchRec's own sums over shards (its stats, its default performance model)
        agree. A shard's part is proportional to its cost alone. `Perf` has no field for
        the index all-to-all, so it counts in `fwd_comms`.

        Args:
            plan: The plan, or a copy of it.
        """
        if self.costed is None:
            return
        shards = [s for place in self._costed_at for s in plan[place].shards]
        for shard, perf in zip(shards, _perfs(*self._attributed), strict=True):
            shard.perf = perf

    def on_path(self) -> tuple[list[list[float]], Bottleneck | None]:
        """Return each shard's part of the critical path, and the bottleneck.

        A shard counts in the phases on the path (`PredictedCosts.parts`), on the rank
        that counts. Time that overlaps with something longer does not count.

        Returns:
            For each option of the plan, the parts of its shards [ms]; and the phase
            that takes most of the path, with its rank and table. None: nothing takes
            time.
        """
        stages = self.predicted.stages
        phases_N5 = self._stock_phases_N6.reshape(-1, len(PHASES) + 1)[:, :-1]
        rank_N = self._stock_rank_N
        stage_N = np.full(len(rank_N), len(stages) - 1, dtype=np.int64)
        if (costed := self.costed) is not None:
            compute_N2, comms_N3 = self._attributed
            own_N5 = np.column_stack(
                [comms_N3[:, 0], compute_N2[:, 0], comms_N3[:, 1:], compute_N2[:, 1]]
            )
            phases_N5 = np.concatenate([own_N5, phases_N5])
            rank_N = np.concatenate([costed.rank_N, rank_N])
            number = {stage.name: n for n, stage in enumerate(stages)}
            number_S = np.array([number[name] for name in costed.task.stage_names])
            own_N = number_S[costed.simulator.stages_T[costed.table_N]]
            stage_N = np.concatenate([own_N, stage_N])
        options = [*(costed.options if costed else ()), *self.stock]
        found: list[list[float]] = [[] for _ in options]
        if not len(rank_N):
            return found, None
        phases_WS5 = self.predicted.phases_WS6[..., : len(PHASES)]
        path_WS5 = np.zeros_like(phases_WS5)
        for part in self.predicted.parts:
            if part.stage >= 0:  # loading caches counts in fwd_compute
                phase = "fwd_compute" if part.phase == "cache" else part.phase
                path_WS5[part.rank, part.stage, PHASES.index(phase)] += part.ms
        share_WS5 = np.zeros_like(path_WS5)
        np.divide(path_WS5, phases_WS5, out=share_WS5, where=phases_WS5 > 0)
        part_N5 = phases_N5 * share_WS5[rank_N, stage_N]
        counts = [len(option.shards) for option in options]
        ends = np.cumsum(counts)[:-1]
        parts = np.split(part_N5.sum(axis=1), ends)
        for place, own in zip([*self._costed_at, *self._stock_at], parts, strict=True):
            found[place] = own.tolist()
        at = int(path_WS5.sum(axis=(0, 1)).argmax())
        table_ms = [float(own.sum()) for own in np.split(part_N5[:, at], ends)]
        most = int(np.argmax(table_ms))
        if not table_ms[most] > 0:
            return found, None
        return found, Bottleneck(
            table=table_name(options[most]),
            rank=int(path_WS5[..., at].sum(axis=1).argmax()),
            phase=PHASES[at],
            phase_ms=float(path_WS5[..., at].sum()),
            table_ms=table_ms[most],
        )

    def host_tables(self, plan: Sequence[ShardingOption]) -> dict[str, HostTable]:
        """Return name -> time and memory of each table in host memory.

        Args:
            plan: The plan, or a copy of it, with estimates of memory.
        """
        if (costed := self.costed) is None:
            return {}
        ms_TW = np.zeros((len(costed.options), self._costs.reader.world_size))
        where = costed.table_N, costed.rank_N
        np.add.at(ms_TW, where, costed.prices.host_N2.sum(axis=1))
        found = {}
        for place, factors, ms in zip(
            self._costed_at,
            costed.task.kernels,
            ms_TW.max(axis=1).tolist(),
            strict=True,
        ):
            option = plan[place]
            if not reads_host(option):
                continue
            assert factors is not None and factors.host is not None
            held: Counter[int] = Counter()
            for shard in option.shards:
                held[int(shard.rank)] += shard.storage.ddr if shard.storage else 0
            missed = factors.host.missed
            found[table_name(option)] = HostTable(
                ms_per_iteration=ms,
                rank_bytes=tuple(sorted(held.items())),
                load_factor=None if missed is None else load_factor(option),
                missed=missed,
            )
        return found

    def range_notes(self) -> tuple[Note, ...]:
        """Return notes on tables outside the cost model's training range."""
        if (costed := self.costed) is None:
            return ()
        alone_N2 = costed.simulator.single_compute(costed.prices)
        work_N2 = np.maximum(alone_N2 - self._costs.launch_ms(), 0.0)
        ms_T = np.zeros(len(costed.options))
        np.add.at(ms_T, costed.table_N, work_N2.sum(axis=1))
        names = [*map(table_name, costed.options)]
        return extrapolation_notes(names, self._reasons, ms_T)


def _perfs(compute_N2: Floats, comms_N3: Floats) -> list[Perf]:
    """Return TorchRec's record of each shard's costs; see `attributed`."""
    return [
        Perf(
            fwd_compute=forward,
            fwd_comms=index + fwd_comms,
            bwd_compute=backward,
            bwd_comms=bwd_comms,
        )
        for (forward, backward), (index, fwd_comms, bwd_comms) in zip(
            compute_N2.tolist(), comms_N3.tolist(), strict=True
        )
    ]


def stock_phases(perf: Perf) -> tuple[float, ...]:
    """Return TorchRec's estimate as phases, and the cache loading in the second."""
    return (
        0.0,
        perf.fwd_compute + perf.prefetch_compute,
        perf.fwd_comms,
        perf.bwd_comms,
        perf.bwd_compute,
        perf.prefetch_compute,
    )


def _share(weights_NP: Floats, set_N: Ints, totals_SP: Floats) -> Floats:
    """Return each set's totals, divided among its members by their weights."""
    sums = np.zeros_like(totals_SP)
    counts = np.zeros(len(totals_SP))
    np.add.at(sums, set_N, weights_NP)
    np.add.at(counts, set_N, 1.0)
    equal = 1 / counts[set_N]
    known = sums[set_N]
    share = np.where(
        known > 0, weights_NP / np.where(known > 0, known, 1), equal[:, None]
    )
    out: Floats = share * totals_SP[set_N]
    return out
