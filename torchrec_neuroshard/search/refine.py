"""Local improvement of a placement: moves, swaps, re-splits and un-splits.

A placement is a `T x W` matrix of widths. One step transfers columns of a table from
one rank to another: all of a shard's columns (a move; a join, that is an un-split,
where the other rank already holds the table) or some (a split or an uneven re-split).
A swap is two such transfers. Shapes: `K` candidates, `T` tables, `W` ranks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.search.base import SearchConfig
from torchrec_neuroshard.search.shards import Floats, Ints, ShardBank, sum_by
from torchrec_neuroshard.tables import COLUMN_MULTIPLE

__all__ = ["Plan", "refine"]

NUM_TARGETS = 12
"""Ranks tried as the other side of a transfer: the least loaded ones."""
NUM_EXACT = 32
"""Candidates of a step whose cost is evaluated exactly, best approximations first."""
SPREAD_WEIGHT = 0.02
"""Weight of the spread of the loads beside the critical path: lets a step pay that
relieves one of several equally critical ranks."""
SPREAD_POWER = 6
MIN_GAIN = 1e-7
"""Relative improvement below which a step does not count."""


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Up to two transfers each: (table, columns) from `source` to `target` and back."""

    source_K: Ints
    target_K: Ints
    table_K: Ints
    columns_K: Ints
    back_table_K: Ints
    """-1 where nothing comes back."""
    back_columns_K: Ints

    def pick(self, index: Ints) -> _Candidates:
        return _Candidates(
            self.source_K[index],
            self.target_K[index],
            self.table_K[index],
            self.columns_K[index],
            self.back_table_K[index],
            self.back_columns_K[index],
        )

    def __len__(self) -> int:
        return len(self.source_K)

    @staticmethod
    def join(first: _Candidates, second: _Candidates) -> _Candidates:
        return _Candidates(
            *(
                np.concatenate([getattr(first, name), getattr(second, name)])
                for name in _Candidates.__slots__
            )
        )


class Plan:
    """A placement with its running sums and costs."""

    def __init__(self, bank: ShardBank, width_TW: Ints) -> None:
        """Evaluate a placement."""
        self.bank = bank
        self.width_TW = width_TW.copy()
        task = bank.task
        table, rank = np.nonzero(width_TW)
        width = width_TW[table, rank]
        num_groups = task.num_groups
        self.sums_WGE: Floats = sum_by(
            rank * num_groups + bank.groups_T[table],
            bank.encoding(bank.rows(table, width)),
            task.world_size * num_groups,
        ).reshape(task.world_size, num_groups, -1)
        self.columns_W: Floats = np.bincount(
            rank, weights=bank.columns(table, width), minlength=task.world_size
        )
        self.bytes_W: Floats = np.bincount(
            rank, weights=bank.bytes(table, width), minlength=task.world_size
        )
        self.count_WG: Ints = np.zeros((task.world_size, num_groups), dtype=np.int64)
        np.add.at(self.count_WG, (rank, bank.groups_T[table]), 1)
        self.shards_T: Ints = (width_TW > 0).sum(axis=1)
        self.compute_WG2: Floats = self._predict(
            self.sums_WGE.reshape(task.world_size * num_groups, -1),
            self.count_WG.reshape(-1),
        ).reshape(task.world_size, num_groups, 2)
        self._summarise()

    def _predict(self, sums_SE: Floats, count_S: Ints) -> Floats:
        held = np.flatnonzero(count_S)
        costs = np.zeros((len(sums_SE), 2))
        if len(held):
            costs[held] = self.bank.predict(sums_SE[held])
        return costs

    def _summarise(self) -> None:
        bank = self.bank
        self.compute_W2: Floats = self.compute_WG2.sum(axis=1)
        comms = bank.simulator.comms_model.all_to_all(
            self.columns_W[None], bank.task.batch_size
        )[0]
        self.comms_ms = float(comms.max(axis=0).sum())
        self.critical_ms = float(self.compute_W2.max(axis=0).sum()) + self.comms_ms
        comms_W = self.columns_W * bank.comms_per_column_2.sum()
        self.phases_W3: Floats = np.concatenate(
            [self.compute_W2, comms_W[:, None]], axis=1
        )
        self.loads_W: Floats = self.phases_W3.sum(axis=1)
        self.unit = max(float(self.loads_W.mean()), 1e-12)
        spread = ((self.loads_W / self.unit) ** SPREAD_POWER).mean()
        self.score = self.critical_ms + SPREAD_WEIGHT * self.unit * float(spread)

    def copy(self) -> Plan:
        """Return a plan that can be changed on its own."""
        other = object.__new__(Plan)
        for name, value in vars(self).items():
            is_array = isinstance(value, np.ndarray)
            setattr(other, name, value.copy() if is_array else value)
        return other

    # Candidates.

    def _legal_width(self, table_K: Ints, width_K: Ints) -> npt.NDArray[np.bool_]:
        """Whether a shard may be this wide; 0 is no shard."""
        task = self.bank.task
        narrowest = np.asarray(task.min_widths)[table_K]
        whole = width_K == self.bank.dims_T[table_K]
        legal: npt.NDArray[np.bool_] = (width_K == 0) | whole | (width_K >= narrowest)
        return legal

    def transfers(self, source: int, num_targets: int = NUM_TARGETS) -> _Candidates:
        """List the transfers off one rank to the least loaded ranks and the joins."""
        bank, task = self.bank, self.bank.task
        tables = np.flatnonzero(self.width_TW[:, source])
        loads = self.loads_W.copy()
        loads[source] = np.inf
        targets = np.argsort(loads, kind="stable")[: min(num_targets, len(loads) - 1)]
        table, target = (
            a.reshape(-1) for a in np.meshgrid(tables, targets, indexing="ij")
        )
        joined = np.nonzero(self.width_TW[tables] > 0)
        keep = (joined[1] != source) & ~np.isin(joined[1], targets)
        table = np.concatenate([table, tables[joined[0][keep]]])
        target = np.concatenate([target, joined[1][keep]])
        width = self.width_TW[table, source]
        options = [width]
        if task.uneven:
            # Halves and thirds, and the share that evens out the two ranks.
            cost = bank.approximate_costs(bank.rows(table, width)).sum(axis=1)
            excess = (self.loads_W[source] - self.loads_W[target]) / 2
            ideal = width * np.clip(excess / np.maximum(cost, 1e-12), 0.0, 1.0)
            down = np.floor(ideal / COLUMN_MULTIPLE).astype(np.int64) * COLUMN_MULTIPLE
            half = width // (2 * COLUMN_MULTIPLE) * COLUMN_MULTIPLE
            narrow = np.asarray(task.min_widths)[table]
            narrow = -(-narrow // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
            options += [half, down, down + COLUMN_MULTIPLE, narrow]
        num = len(table)
        columns = np.concatenate(options)
        table, target = np.tile(table, len(options)), np.tile(target, len(options))
        width = np.tile(width, len(options))
        other = self.width_TW[table, target]
        after, grown = width - columns, other + columns
        shards = self.shards_T[table] - (after == 0) + (other == 0)
        legal = (columns > 0) & (after >= 0)
        legal &= self._legal_width(table, np.maximum(after, 0))
        legal &= self._legal_width(table, grown)
        legal &= shards <= np.maximum(1, np.asarray(task.max_shards)[table])
        if not task.uneven:
            # All shards of a table keep one width: only moves to a rank without it.
            legal &= (other == 0) & (after == 0)
        legal &= (
            self.bytes_W[target] - bank.bytes(table, other) + bank.bytes(table, grown)
            <= bank.caps_W[target]
        )
        key = (table * task.world_size + target) * (
            int(bank.dims_T.max()) + 1
        ) + columns
        first = np.zeros(len(key), dtype=bool)
        first[np.unique(key, return_index=True)[1]] = True
        index = np.flatnonzero(legal & first)
        assert num * len(options) == len(key)
        none = np.full(len(index), -1, dtype=np.int64)
        return _Candidates(
            np.full(len(index), source, dtype=np.int64),
            target[index],
            table[index],
            columns[index],
            none,
            np.zeros_like(none),
        )

    def swaps(self, source: int, num_targets: int = NUM_TARGETS) -> _Candidates:
        """List the exchanges of whole shards between one rank and less loaded ones."""
        bank = self.bank
        loads = self.loads_W.copy()
        loads[source] = np.inf
        targets = np.argsort(loads, kind="stable")[: min(num_targets, len(loads) - 1)]
        mine = np.flatnonzero(self.width_TW[:, source])
        theirs, column = np.nonzero(self.width_TW[:, targets])
        rank = targets[column]
        table = np.repeat(mine, len(theirs))
        back, target = np.tile(theirs, len(mine)), np.tile(rank, len(mine))
        columns = self.width_TW[table, source]
        back_columns = self.width_TW[back, target]
        legal = (self.width_TW[table, target] == 0) & (self.width_TW[back, source] == 0)
        size, back_size = bank.bytes(table, columns), bank.bytes(back, back_columns)
        legal &= self.bytes_W[target] - back_size + size <= bank.caps_W[target]
        legal &= self.bytes_W[source] - size + back_size <= bank.caps_W[source]
        index = np.flatnonzero(legal)
        return _Candidates(
            np.full(len(index), source, dtype=np.int64),
            target[index],
            table[index],
            columns[index],
            back[index],
            back_columns[index],
        )

    # Scores.

    def _scale(self, table_K: Ints, old_K: Ints, new_K: Ints) -> Floats:
        """Approximate change of a rank's phases as a shard changes width, `K x 3`."""
        bank = self.bank
        known = np.where(old_K > 0, old_K, bank.dims_T[table_K])
        cost = bank.approximate_costs(bank.rows(table_K, known))
        change: Floats = cost * ((new_K - old_K) / known)[:, None]
        return change

    def approximate(self, candidates: _Candidates) -> Floats:
        """Score candidates by the additive approximation: lower is better."""
        c = candidates
        gone, came = (
            self.width_TW[c.table_K, c.source_K],
            self.width_TW[c.table_K, c.target_K],
        )
        cost = self._scale(c.table_K, gone, gone - c.columns_K)
        source = self.phases_W3[c.source_K] + cost
        gain = np.where((came > 0)[:, None], self._scale(c.table_K, came, came), 0.0)
        target = self.phases_W3[c.target_K] - cost + gain
        swapped = c.back_table_K >= 0
        if swapped.any():
            back = self._scale(
                c.back_table_K[swapped],
                c.back_columns_K[swapped],
                np.zeros_like(c.back_columns_K[swapped]),
            )
            target[swapped] += back
            source[swapped] -= back
        return self._worst(c, source, target) + self._spread(c, source, target)

    def _worst(self, c: _Candidates, source_KP: Floats, target_KP: Floats) -> Floats:
        """Sum of the phases' maxima after a change of two ranks."""
        worst = np.maximum(source_KP, target_KP)
        phases_WP = self.phases_W3[:, : worst.shape[1]]
        order = np.argsort(-phases_WP, axis=0, kind="stable")[:3]
        for phase in range(worst.shape[1]):
            # The largest value among the ranks that do not change.
            rest = np.zeros(len(c))
            for rank in order[::-1, phase]:
                other = (c.source_K != rank) & (c.target_K != rank)
                rest[other] = phases_WP[rank, phase]
            worst[:, phase] = np.maximum(worst[:, phase], rest)
        total: Floats = worst.sum(axis=1)
        return total

    def _spread(self, c: _Candidates, source_K3: Floats, target_K3: Floats) -> Floats:
        powers = (self.loads_W / self.unit) ** SPREAD_POWER
        changed = (
            powers.sum()
            - powers[c.source_K]
            - powers[c.target_K]
            + (source_K3.sum(axis=1) / self.unit) ** SPREAD_POWER
            + (target_K3.sum(axis=1) / self.unit) ** SPREAD_POWER
        )
        weighted: Floats = SPREAD_WEIGHT * self.unit * changed / len(powers)
        return weighted

    def _changed_sums(self, c: _Candidates) -> tuple[Floats, Ints]:
        """Sums and counts of source and target after each candidate."""
        bank = self.bank
        pair_K2 = np.stack([c.source_K, c.target_K], axis=1)
        sums = self.sums_WGE[pair_K2]
        count = self.count_WG[pair_K2]
        steps = (
            (0, c.source_K, c.table_K, -c.columns_K),
            (1, c.target_K, c.table_K, c.columns_K),
            (0, c.source_K, c.back_table_K, c.back_columns_K),
            (1, c.target_K, c.back_table_K, -c.back_columns_K),
        )
        pairs = []
        for side, rank, table, columns in steps:
            index = np.flatnonzero(table >= 0)
            old = self.width_TW[table[index], rank[index]]
            pairs.append((side, index, table[index], old, old + columns[index]))
        # One batch for all widths not met before.
        bank.rows(
            np.concatenate([np.tile(p[2], 2) for p in pairs]),
            np.concatenate(
                [
                    np.concatenate(
                        [np.where(w > 0, w, bank.dims_T[p[2]]) for w in p[3:]]
                    )
                    for p in pairs
                ]
            ),
        )
        for side, index, table, old, new in pairs:
            group = bank.groups_T[table]
            for width, sign in ((old, -1), (new, 1)):
                held = np.flatnonzero(width > 0)
                rows = bank.rows(table[held], width[held])
                sums[index[held], side, group[held]] += sign * bank.encoding(rows)
                count[index[held], side, group[held]] += sign
        return sums, count

    def evaluate(self, candidates: _Candidates) -> tuple[Floats, Floats]:
        """Score candidates exactly.

        Returns:
            `K` scores and `K` critical paths [ms].
        """
        c, bank = candidates, self.bank
        num = len(c)
        sums, count = self._changed_sums(c)
        compute = (
            self._predict(sums.reshape(-1, sums.shape[-1]), count.reshape(-1))
            .reshape(num, 2, -1, 2)
            .sum(axis=2)
        )
        shifted = bank.columns(c.table_K, c.columns_K) - np.where(
            c.back_table_K >= 0, bank.columns(c.back_table_K, c.back_columns_K), 0.0
        )
        columns = np.repeat(self.columns_W[None], num, axis=0)
        line = np.arange(num)
        columns[line, c.source_K] -= shifted
        columns[line, c.target_K] += shifted
        comms = bank.simulator.comms_model.all_to_all(columns, bank.task.batch_size)
        comms_ms = comms.max(axis=1).sum(axis=1)
        slope = bank.comms_per_column_2.sum()
        source = np.append(
            compute[:, 0], columns[line, c.source_K, None] * slope, axis=1
        )
        target = np.append(
            compute[:, 1], columns[line, c.target_K, None] * slope, axis=1
        )
        critical = self._worst(c, compute[:, 0], compute[:, 1]) + comms_ms
        return critical + self._spread(c, source, target), critical

    def apply(self, candidates: _Candidates, k: int) -> None:
        """Make one candidate's change."""
        c = candidates.pick(np.array([k]))
        source, target = int(c.source_K[0]), int(c.target_K[0])
        table, back = int(c.table_K[0]), int(c.back_table_K[0])
        sums, count = self._changed_sums(c)
        self.sums_WGE[[source, target]] = sums[0]
        self.count_WG[[source, target]] = count[0]
        self.width_TW[table, source] -= c.columns_K[0]
        self.width_TW[table, target] += c.columns_K[0]
        if back >= 0:
            self.width_TW[back, source] += c.back_columns_K[0]
            self.width_TW[back, target] -= c.back_columns_K[0]
        bank = self.bank
        for rank in (source, target):
            held = np.flatnonzero(self.width_TW[:, rank])
            width = self.width_TW[held, rank]
            self.columns_W[rank] = bank.columns(held, width).sum()
            self.bytes_W[rank] = bank.bytes(held, width).sum()
            # Recomputed, so that rounding does not pile up over many steps.
            self.sums_WGE[rank] = sum_by(
                bank.groups_T[held],
                bank.encoding(bank.rows(held, width)),
                self.sums_WGE.shape[1],
            )
        for changed in {table, back} - {-1}:
            self.shards_T[changed] = (self.width_TW[changed] > 0).sum()
        pair = [source, target]
        shape = self.compute_WG2[pair].shape
        self.compute_WG2[pair] = self._predict(
            self.sums_WGE[pair].reshape(-1, self.sums_WGE.shape[-1]),
            self.count_WG[pair].reshape(-1),
        ).reshape(shape)
        self._summarise()

    def critical_ranks(self) -> list[int]:
        """Ranks that set a phase: forward, backward or collectives, and the total."""
        worst = [*self.phases_W3.argmax(axis=0).tolist(), int(self.loads_W.argmax())]
        return list(dict.fromkeys(worst))


def _descend(plan: Plan, deadline: float) -> None:
    """Take the best step off the critical ranks until none pays."""
    while time.monotonic() < deadline:
        found = None
        for rank in plan.critical_ranks():
            for kind in (plan.transfers, plan.swaps):
                more = kind(rank)
                found = more if found is None else _Candidates.join(found, more)
        assert found is not None
        if not len(found):
            return
        rough = plan.approximate(found)
        best = np.argsort(rough, kind="stable")[:NUM_EXACT]
        some = found.pick(best)
        score, _ = plan.evaluate(some)
        k = int(score.argmin())
        if score[k] >= plan.score * (1 - MIN_GAIN):
            return
        before = plan.score
        plan.apply(some, k)
        if plan.score >= before:
            return


def _kick(plan: Plan, rng: np.random.Generator) -> None:
    """Disturb a plan by a few random transfers and swaps off its critical ranks."""
    for _ in range(int(rng.integers(1, 4))):
        ranks = plan.critical_ranks()
        rank = int(rng.integers(plan.bank.task.world_size))
        source = ranks[int(rng.integers(len(ranks)))] if rng.random() < 0.5 else rank
        every = plan.bank.task.world_size
        found = _Candidates.join(
            plan.transfers(source, every), plan.swaps(source, every)
        )
        if len(found):
            plan.apply(found, int(rng.integers(len(found))))


def refine(
    bank: ShardBank, width_TW: Ints, config: SearchConfig, deadline: float
) -> tuple[Ints, float]:
    """Improve a placement by steepest descent, restarted from disturbed optima.

    Args:
        bank: The task's shards.
        width_TW: Columns of each table on each rank.
        config: Restarts and seed.
        deadline: `time.monotonic()` after which the best so far is returned.

    Returns:
        The widths, never worse than those given, and their critical path [ms].
    """
    plan = Plan(bank, width_TW)
    best, best_ms = width_TW, plan.critical_ms
    if bank.task.world_size < 2:
        return best, best_ms
    rng = np.random.default_rng(config.seed)
    _descend(plan, deadline)
    if plan.critical_ms < best_ms:
        best, best_ms = plan.width_TW.copy(), plan.critical_ms
    base = plan
    misses = 0
    while misses < config.restarts and time.monotonic() < deadline:
        trial = base.copy()
        _kick(trial, rng)
        _descend(trial, deadline)
        misses += 1
        if trial.critical_ms < best_ms * (1 - MIN_GAIN):
            best, best_ms = trial.width_TW.copy(), trial.critical_ms
            misses = 0
        if trial.score <= base.score:
            base = trial
    return best, best_ms
