"""Greedy placement in many lanes at once: each table goes where it costs least.

A *lane* is one placement. A draft is a set of unfinished lanes. It keeps each rank's
phases as sums of the shards' costs, which are exact enough for placing. A draft starts
empty, or from lanes with some pieces removed.

Shapes: see `lanes`; `Q` tables that are placed at a time, one for each of some lanes;
`4` phases of a stage: forward, backward, exchange of ids, exchange of outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from torchrec_neuroshard.search.lanes import Changes, Lanes, most_lanes
from torchrec_neuroshard.search.shards import (
    Bools,
    Floats,
    Ints,
    ShardBank,
    spread_out,
)
from torchrec_neuroshard.tables.table import COLUMN_MULTIPLE

GATHERED, GATHERED_TABLES = 4, 1_000
"""Most lanes whose wide tables are gathered on fewer ranks, and most tables of these
lanes together."""
START_SHARES: tuple[float, ...] = (np.inf, 1.1, 0.85, 0.7, 0.5, 0.35, 0.2)
"""Starts: each table is split until no shard costs more than this share of an average
rank's time."""
SQUARINGS = 3
"""A shard goes to the rank where it adds least to the phases' eighth powers, which are
three squarings."""
TIE = 1e-9
"""Weight of a rank's whole load. It breaks ties between equally cheap ranks."""
LEAST_MS = 1e-9


class Draft:
    """Unfinished lanes: the loads of their ranks so far, and the pieces placed."""

    def __init__(
        self, bank: ShardBank, num_lanes: int, *, by_size: bool = False
    ) -> None:
        """Start with empty ranks.

        Args:
            bank: The task's shards.
            num_lanes: Number of placements that are built side by side.
            by_size: Balance memory instead of time.
        """
        task = bank.task
        shape = (num_lanes, task.world_size)
        self.bank, self._by_size = bank, by_size
        self.phases_LWS4: Floats = np.zeros((*shape, task.num_stages, 4))
        self._load_LW: Floats = np.zeros(shape)
        self.unit_LS4: Floats = np.repeat(bank.unit_phases_S4[None], num_lanes, axis=0)
        self._bytes_MLW: Floats = np.zeros((len(bank.caps_MW), *shape))
        sets = bank.rules.num_sets + 1
        self._occupants_LAW: Floats = np.zeros((num_lanes, sets, shape[1]))
        self._splits_on = True
        self.fits_L: Bools = np.ones(num_lanes, dtype=bool)
        """False for lanes in which a table found no room."""
        self._from_Q: Ints = np.arange(num_lanes)
        none = np.zeros(0, dtype=np.int64)
        self._gone: tuple[Ints, Ints, Ints, Ints] = (none,) * 4
        self._placed: list[tuple[Ints, Ints, Ints, Ints]] = []

    @classmethod
    def of(cls, lanes: Lanes, from_Q: Ints, gone_N: Ints, piece_N: Ints) -> Draft:
        """Start from lanes with some pieces removed.

        Args:
            lanes: Finished lanes.
            from_Q: The lane that each lane of the draft starts from.
            gone_N: The draft's lane of each removed piece.
            piece_N: Index of that piece in `lanes`.
        """
        draft = cls(lanes.bank, 0)
        draft._splits_on = False  # splitting here makes plans up to 3 % worse
        draft.phases_LWS4 = lanes.phases_LWS4[from_Q]
        draft._load_LW = np.zeros(draft.phases_LWS4.shape[:2])
        draft.unit_LS4 = np.maximum(draft.phases_LWS4.mean(axis=1), LEAST_MS)
        draft._bytes_MLW = lanes.bytes_MLW[:, from_Q]
        draft._occupants_LAW = lanes.occupants_LAW[from_Q]
        draft.fits_L = np.ones(len(from_Q), dtype=bool)
        draft._from_Q = from_Q
        draft._gone = (
            gone_N,
            lanes.table_N[piece_N],
            lanes.rank_N[piece_N],
            lanes.width_N[piece_N],
        )
        draft._add(*draft._gone, sign=-1)
        np.maximum(draft.phases_LWS4, 0.0, out=draft.phases_LWS4)
        draft._load_LW = draft.phases_LWS4.sum(axis=(2, 3))
        return draft

    def _add(
        self, lane_N: Ints, table_N: Ints, rank_N: Ints, width_N: Ints, sign: int
    ) -> None:
        bank = self.bank
        if (bank.block_T[table_N] > 1).any():
            place, offset = spread_out(bank.block_T[table_N])
            lane_N, table_N, width_N = lane_N[place], table_N[place], width_N[place]
            rank_N = rank_N[place] + offset
        offset_T4, slope_T4 = bank.stage_affine
        ms_N4 = offset_T4[table_N] + slope_T4[table_N] * width_N[:, None]
        sizes_MN = bank.sizes(table_N, width_N)
        where = lane_N, rank_N, bank.stages_T[table_N]
        sums: list[tuple[Floats, tuple[Ints, ...], Floats]]
        sums = [(self.phases_LWS4, where, ms_N4)]
        sums += [(self._load_LW, where[:2], ms_N4.sum(axis=1))]
        sums += [
            (used_LW, where[:2], size_N)
            for used_LW, size_N in zip(self._bytes_MLW, sizes_MN, strict=True)
        ]
        for total, at, values in sums:
            if sign > 0:  # a placed table has each rank of a lane at most once
                total[at] += values
            else:
                np.subtract.at(total, at, values)
        if bank.rules.num_sets:
            for sets_N in bank.rules.sets_TK[table_N].T:
                np.add.at(self._occupants_LAW, (lane_N, sets_N, rank_N), sign)
            self._occupants_LAW[:, -1] = 0

    def _open(
        self, lane_Q: Ints, table_Q: Ints, width_Q: Ints, open_QW: Bools | None
    ) -> Bools:
        """Return which ranks may take a shard, `Q x W`."""
        bank, rules = self.bank, self.bank.rules
        used_MQW = self._with_shards(lane_Q, table_Q, width_Q)
        room_QW: Bools = np.all(used_MQW <= bank.caps_MW[:, None], axis=0)
        if open_QW is not None:
            room_QW &= open_QW
        if rules.allowed_TW is not None:
            room_QW &= rules.allowed_TW[table_Q]
        if rules.num_sets:
            others = self._occupants_LAW[lane_Q[:, None], rules.sets_TK[table_Q]]
            room_QW &= (others <= 0).all(axis=1)
        return room_QW

    def _prices(
        self, lane_Q: Ints, table_Q: Ints, width_Q: Ints, noise_QW: Floats | None
    ) -> Floats:
        """Return what a shard adds to the powers of its stage's phases, `Q x W`."""
        bank = self.bank
        offset_T4, slope_T4 = bank.stage_affine
        stage_Q = bank.stages_T[table_Q]
        ms_Q4 = offset_T4[table_Q] + slope_T4[table_Q] * width_Q[:, None]
        unit_Q14 = self.unit_LS4[lane_Q, stage_Q][:, None]
        now = self.phases_LWS4[lane_Q, :, stage_Q] / unit_Q14
        if noise_QW is not None:
            now = now * noise_QW[..., None]
        new = now + ms_Q4[:, None] / unit_Q14
        for _ in range(SQUARINGS):
            now, new = now * now, new * new
        added: Floats = np.einsum("qwp,qp->qw", new - now, unit_Q14[:, 0])
        return added + TIE * self._load_LW[lane_Q]

    def _with_shards(self, lane_Q: Ints, table_Q: Ints, width_Q: Ints) -> Floats:
        """Return the memory that ranks use with a shard, `M x Q x W` bytes."""
        sizes_MQ = self.bank.sizes(table_Q, width_Q)
        used_MQW: Floats = self._bytes_MLW[:, lane_Q] + sizes_MQ[:, :, None]
        return used_MQW

    def place(
        self,
        lane_Q: Ints,
        table_Q: Ints,
        count_Q: Ints,
        noise_QW: Floats | None = None,
        skew_Q: Ints | None = None,
        open_QW: Bools | None = None,
    ) -> None:
        """Place one table in each of some lanes, its shards on different ranks.

        In a draft that started empty, a table without room is split further. A lane
        without room for it is marked in `fits_L`.

        Args:
            lane_Q: Lanes, each at most once.
            table_Q: The table's way.
            count_Q: Number of column shards, as even as possible.
            noise_QW: Factors on the ranks' loads; None means 1.
            skew_Q: Columns of the first shard beyond an even share; None means 0.
            open_QW: Ranks that may take the table; None means all.
        """
        bank = self.bank
        if skew_Q is None:
            skew_Q = np.zeros_like(lane_Q)
        moves_Q = bank.moves_T[table_Q]
        count_Q = np.where(moves_Q, count_Q, bank.num_blocks_T[table_Q])
        units_Q = (bank.dims_T[table_Q] - skew_Q) // COLUMN_MULTIPLE
        whole_Q = np.minimum(bank.narrowest_T[table_Q], bank.dims_T[table_Q])
        # The remainder makes some shards four columns wider.
        narrow_Q = np.where(moves_Q, units_Q // count_Q * COLUMN_MULTIPLE, whole_Q)
        num_wide_Q = np.where(moves_Q, units_Q % count_Q, 0)
        width_Q = narrow_Q + COLUMN_MULTIPLE * (num_wide_Q > 0)
        if self._by_size:
            # How full a rank is, by its fullest memory.
            caps_MW = np.maximum(bank.caps_MW, 1.0)
            used_MQW = self._with_shards(lane_Q, table_Q, width_Q)
            price = (used_MQW / caps_MW[:, None]).max(axis=0)
        else:
            price = self._prices(lane_Q, table_Q, width_Q, noise_QW)
        room_QW = self._open(lane_Q, table_Q, width_Q, open_QW)
        price = np.where(room_QW, price, np.inf)
        size_Q = bank.block_T[table_Q]
        for size in {*size_Q.tolist()} - {1}:
            # The first rank of a block stands for it, at the price of the dearest rank.
            own = np.flatnonzero(size_Q == size)
            block_price = price[own].reshape(len(own), -1, size).max(axis=2)
            price[own] = np.inf
            price[own, ::size] = block_price
        odd = np.flatnonzero(skew_Q)
        if len(odd):
            # The wider first shard goes to the cheapest rank that has room for it.
            wide = width_Q[odd] + skew_Q[odd]
            room_QW = self._open(lane_Q[odd], table_Q[odd], wide, None)
            wide_price = np.where(room_QW, price[odd], np.inf)
            first = wide_price.argmin(axis=1)
            full = ~np.isfinite(wide_price[np.arange(len(odd)), first])
            self.fits_L[lane_Q[odd[full]]] = False
            price[odd, first] = -1.0
        line_N, nth_N = spread_out(count_Q)
        most = int(count_Q.max())
        if most == 1:
            rank_N = price.argmin(axis=1)
        else:
            chosen = np.argsort(price, axis=1, kind="stable")[:, :most]
            rank_N = chosen[line_N, np.minimum(nth_N, chosen.shape[1] - 1)]
        failed = (nth_N >= price.shape[1]) | ~np.isfinite(price[line_N, rank_N])
        if failed.any():
            bad = np.unique(line_N[failed])
            placed = ~np.isin(line_N, bad)
            line_N, nth_N, rank_N = line_N[placed], nth_N[placed], rank_N[placed]
            more = bank.enough_splits(table_Q[bad], count_Q[bad] + 1)
            again = (more > count_Q[bad]) & self.fits_L[lane_Q[bad]] & self._splits_on
            self.fits_L[lane_Q[bad[~again]]] = False
            bad, more = bad[again], more[again]
            if len(bad):
                noise, some = (
                    None if a is None else a[bad] for a in (noise_QW, open_QW)
                )
                self.place(lane_Q[bad], table_Q[bad], more, noise, open_QW=some)
        width_N = narrow_Q[line_N] + COLUMN_MULTIPLE * (nth_N < num_wide_Q[line_N])
        width_N += skew_Q[line_N] * (nth_N == 0)
        pieces = lane_Q[line_N], table_Q[line_N], rank_N, width_N
        self._add(*pieces, sign=1)
        self._placed.append(pieces)

    def changes(self) -> tuple[Changes, Ints]:
        """Return the removed and placed pieces, and the lanes where all found room."""
        good = np.flatnonzero(self.fits_L)
        parts = [self._gone, *self._placed]
        lane, table, rank, width = (np.concatenate(p) for p in zip(*parts, strict=True))
        sign = np.ones(len(lane), dtype=np.int64)
        sign[: len(self._gone[0])] = -1
        every = Changes(lane, table, rank, width, sign, self._from_Q)
        return every.pick(good), good


def placed(draft: Draft) -> Iterator[Lanes]:
    """Yield the finished lanes of a draft, as many at once as memory allows."""
    c, good = draft.changes()
    most = most_lanes(draft.bank)
    for start in range(0, len(good), most):
        some = np.arange(start, min(start + most, len(good)))
        own = c.pick(some)
        pieces = own.cand_N, own.table_N, own.rank_N, own.width_N
        yield Lanes.placed(draft.bank, len(some), *pieces)


def construct(
    bank: ShardBank,
    ways_LT: Ints,
    count_LT: Ints,
    *,
    by_size: bool = False,
    wide: tuple[Bools, Bools] | None = None,
) -> Draft:
    """Place all tables: fixed ones first, then the least free, then the costliest.

    Args:
        bank: The task's shards.
        ways_LT: The way of each table, in each lane.
        count_LT: The number of its column shards.
        by_size: Balance memory instead of time, large shards first.
        wide: Tables that are placed on some ranks only, before others, `L x T`, and
            these ranks, `L x W`.
    """
    num_lanes, num_tables = ways_LT.shape
    whole = ways_LT.reshape(-1), bank.dims_T[ways_LT].reshape(-1)
    each = bank.scarcest(bank.sizes(*whole)) if by_size else bank.total_ms(*whole)
    each_LT = each.reshape(ways_LT.shape) / count_LT
    free_LT = bank.rules.freedom(ways_LT.reshape(-1)).reshape(ways_LT.shape)
    wide_LT, ranks_LW = wide or (np.zeros_like(ways_LT, dtype=bool), None)
    order_LT = np.lexsort((-each_LT, ~wide_LT, free_LT, bank.moves_T[ways_LT]))
    draft = Draft(bank, num_lanes, by_size=by_size)
    lane_L = np.arange(num_lanes)
    for n in range(num_tables):
        at_L = order_LT[:, n]
        open_LW = None
        if ranks_LW is not None:
            open_LW = ranks_LW | ~wide_LT[lane_L, at_L, None]
        now = ways_LT[lane_L, at_L], count_LT[lane_L, at_L]
        draft.place(lane_L, *now, open_QW=open_LW)
    return draft


def gathered(lanes: Lanes) -> Draft | None:
    """Place the tables of lanes again, the wide ones on fewer ranks.

    A kernel takes as many threads for each row as its widest table needs. So one wide
    table slows down all narrower ones of its rank. Each lane is tried with every
    width, and with three numbers of ranks that take shards wider than that.

    Args:
        lanes: Placements, the most promising first; see `GATHERED`.

    Returns:
        The draft; None if all shards are equally wide.
    """
    bank, num_ranks = lanes.bank, lanes.bank.task.world_size
    found: list[tuple[Ints, Ints, Bools, Bools]] = []
    most = min(GATHERED, GATHERED_TABLES // len(bank.task.ways))
    for lane in range(min(lanes.num_lanes, most)):
        way_T = np.flatnonzero(lanes.pieces_LT[lane])
        moves_T = bank.moves_T[way_T]
        count_T = np.where(moves_T, lanes.pieces_LT[lane, way_T], 1)
        width_T = -(-bank.dims_T[way_T] // count_T)
        cost_T = bank.total_ms(way_T, bank.dims_T[way_T]) * bank.block_T[way_T]
        for width in np.unique(width_T[moves_T])[:-1]:
            wide_T = moves_T & (width_T > width)
            share = float(cost_T[wide_T].sum() / max(cost_T.sum(), LEAST_MS))
            for count in (round(share * num_ranks) + n for n in (-1, 0, 1)):
                if 0 < count < num_ranks:
                    spaced = np.arange(count) * num_ranks // count  # on all nodes
                    ranks_W = np.isin(np.arange(num_ranks), spaced)
                    found.append((way_T, count_T, wide_T, ranks_W))
    if not found:
        return None
    ways_LT, count_LT, wide_LT, ranks_LW = map(np.stack, zip(*found, strict=True))
    return construct(bank, ways_LT, count_LT, wide=(wide_LT, ranks_LW))


def starts(bank: ShardBank, choices: Sequence[Ints]) -> tuple[Ints, Ints]:
    """Return the starts: choices of ways with several numbers of shards.

    Args:
        bank: The task's shards.
        choices: Ways of all tables, one array per choice.

    Returns:
        Ways, and numbers of column shards, of each table: `L x T` each. Duplicates are
        removed.
    """
    needed_T = bank.needed_shards_T
    found: dict[bytes, tuple[Ints, Ints]] = {}
    for ways in choices:
        cost = bank.total_ms(ways, bank.dims_T[ways])
        rank_ms = float((cost * bank.block_T[ways]).sum()) / bank.task.world_size
        for share in START_SHARES:
            wanted = cost / max(share * rank_ms, LEAST_MS)
            count = bank.enough_splits(ways, np.maximum(wanted, needed_T[ways]))
            found.setdefault(ways.tobytes() + count.tobytes(), (ways, count))
    ways_LT, count_LT = (np.stack(p) for p in zip(*found.values(), strict=True))
    return ways_LT, count_LT
