"""Hot rows: the share of a feature's lookups in each range of ids, and frequent ids.

Row-wise sharding gives each rank a range of ids. The ranks are asked evenly only if
the ids are: a padding id, or ids that were never hashed, load one rank most.

A profile does not know the rows of its table. So ranges have a power of two of ids,
such that at most `MAX_RANGES` hold all ids that were met. Ranges of two features can
then be added up exactly.

Shapes: `K` ranges, `N` row shards, `W` shards of a block, `X` frequent ids.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.errors import ProfileError, is_number

MAX_RANGES = 256
NUM_TOP_IDS = 16
HOT_SHARE = 0.2
"""An id with at least this share of a feature's lookups is worth a word."""
MIN_SKEW = 0.1
"""A block of row shards counts as even unless one shard gets a larger excess."""
_CHANCE = 4.0
"""Standard deviations of a shard's lookups that count as chance."""
ROUNDING = 1e-6
"""Shares that are known to be 1 may differ by this much."""

Floats = npt.NDArray[np.float64]


def hot_id_text(name: str, top: tuple[int, float]) -> str:
    """Return words on an id with a large share of a feature's or table's lookups."""
    row, share = top
    return f"id {row} is {share:.0%} of '{name}'"


@dataclass(frozen=True, kw_only=True, slots=True)
class HotRows:
    """Which ids the lookups of a feature, or of a table, ask for.

    Lookups that `range_shares` leave out are spread evenly over all rows.
    """

    range_size: int
    """Ids in each range, a power of two."""
    range_shares: tuple[float, ...]
    """Share of the lookups in ids 0 to `range_size` - 1, in the next ids, and so on; at
    most `MAX_RANGES` values. `top_ids` are included."""
    top_ids: tuple[tuple[int, float], ...] = ()
    """The most frequent ids and their shares of the lookups, most frequent first; at
    most `NUM_TOP_IDS`."""

    def __post_init__(self) -> None:
        size, shares = self.range_size, self.range_shares
        every = (*shares, *(share for _, share in self.top_ids))
        holds = (
            is_number(size, whole=True)
            and size >= 1
            and size & (size - 1) == 0
            and 1 <= len(shares) <= MAX_RANGES
            and len(self.top_ids) <= NUM_TOP_IDS
            and all(0 <= share <= 1 + ROUNDING for share in every)
            and sum(shares) <= 1 + ROUNDING
            and all(0 <= i < size * len(shares) for i, _ in self.top_ids)
            and len(dict(self.top_ids)) == len(self.top_ids)
        )
        if not holds:
            raise ProfileError(
                f"hot rows need a range_size that is a power of two, up to "
                f"{MAX_RANGES} range_shares and {NUM_TOP_IDS} different top_ids within "
                "the ranges, with shares that sum to at most 1; got "
                f"range_size={size}, {len(shares)} ranges with a sum of "
                f"{sum(shares):.6g}, "
                f"top_ids={self.top_ids}; profile the batches again"
            )

    @classmethod
    def padded(cls, share: float) -> HotRows:
        """Return hot rows of which only the share of padding, id 0, is known."""
        return cls(range_size=1, range_shares=(share,), top_ids=((0, share),))

    @classmethod
    def counted(
        cls, ids: npt.NDArray[np.integer[Any]], counts: npt.NDArray[np.integer[Any]]
    ) -> HotRows | None:
        """Count lookups by range; None without lookups or if an id is below 0.

        Args:
            ids: Distinct ids, rising.
            counts: Lookups of each.
        """
        if not len(ids) or ids[0] < 0:
            return None
        size = 1
        while int(ids[-1]) >= size * MAX_RANGES:
            size *= 2
        total = float(counts.sum())
        lookups_K = np.bincount((ids // size).astype(np.int64), counts)
        top = np.argsort(-counts, kind="stable")[:NUM_TOP_IDS]
        found = zip(ids[top].tolist(), (counts[top] / total).tolist(), strict=True)
        return cls(
            range_size=size,
            range_shares=tuple((lookups_K / total).tolist()),
            top_ids=tuple(found),
        )

    @classmethod
    def merged(cls, parts: Iterable[tuple[HotRows | None, float]]) -> HotRows | None:
        """Return the hot rows of features that read one table; None if none is known.

        Args:
            parts: Each feature's hot rows, and its lookups. Lookups of unknown ids
                count as even.
        """
        every = list(parts)
        total = sum(lookups for _, lookups in every)
        known = [(rows, lookups / total) for rows, lookups in every if rows and total]
        if not known:
            return None
        size = max(rows.range_size for rows, _ in known)
        shares_K = np.zeros(MAX_RANGES)
        top: dict[int, float] = defaultdict(float)
        for rows, weight in known:
            place_K = np.arange(len(rows.range_shares)) * rows.range_size // size
            np.add.at(shares_K, place_K, weight * np.array(rows.range_shares))
            for row, share in rows.top_ids:
                top[row] += weight * share
        used = int(np.flatnonzero(shares_K).max(initial=0)) + 1
        most = sorted(top.items(), key=lambda found: (-found[1], found[0]))
        return cls(
            range_size=size,
            range_shares=tuple(shares_K[:used].tolist()),
            top_ids=tuple(most[:NUM_TOP_IDS]),
        )

    def within(self, num_embeddings: int) -> HotRows | None:
        """Return self; None if an id is not a row of the table.

        Then the model maps ids to rows itself, so the ids do not say which rows are
        hot.
        """
        last = max(np.flatnonzero(self.range_shares).tolist(), default=0)
        is_outside = last * self.range_size >= num_embeddings
        is_outside |= any(row >= num_embeddings for row, _ in self.top_ids)
        return None if is_outside else self

    def with_top_shares(self, shares: Iterable[float]) -> HotRows:
        """Return hot rows with other shares of `top_ids`; other ids share the rest."""
        top = tuple(zip((row for row, _ in self.top_ids), shares, strict=True))
        others_K = self.others_K
        total, rest = sum(self.range_shares), float(others_K.sum())
        left = max(0.0, total - sum(share for _, share in top))
        shares_K = others_K * (left / rest) if rest > 0 else others_K
        for row, share in top:
            shares_K[row // self.range_size] += share
        return HotRows(
            range_size=self.range_size,
            range_shares=tuple(shares_K.tolist()),
            top_ids=tuple(sorted(top, key=lambda found: (-found[1], found[0]))),
        )

    @property
    def others_K(self) -> Floats:
        """Share of the lookups in each range, without `top_ids`, `K`."""
        others_K = np.array(self.range_shares)
        for row, share in self.top_ids:
            others_K[row // self.range_size] -= share
        floored: Floats = np.maximum(others_K, 0.0)
        return floored

    def hot_id(
        self, first: int = 0, rows: int | None = None
    ) -> tuple[int, float] | None:
        """Return the most frequent id among some rows, if it has `HOT_SHARE`.

        Args:
            first: First row.
            rows: Number of rows; None means all rows from there on.
        """
        end = math.inf if rows is None else first + rows
        own = (top for top in self.top_ids if first <= top[0] < end)
        found = next(own, None)
        return found if found and found[1] >= HOT_SHARE else None

    def top_within(self, first: int, rows: int) -> list[float]:
        """Return the shares of those `top_ids` that are among some rows."""
        return [s for row, s in self.top_ids if first <= row < first + rows]

    def shares(
        self, first_N: npt.ArrayLike, rows_N: npt.ArrayLike, num_embeddings: int
    ) -> Floats:
        """Return the share of the lookups in each row shard, `N`.

        `top_ids` count where they are. The other lookups of a range are in proportion
        to its rows.

        Args:
            first_N: First row of each shard.
            rows_N: Rows of each shard.
            num_embeddings: Rows of the table.
        """
        first_N = np.asarray(first_N, dtype=np.int64)
        end_N = first_N + np.asarray(rows_N, dtype=np.int64)
        edges, below, rest, top_X, top_share_X = _as_arrays(self)
        edges = np.minimum(edges, num_embeddings)
        share_N: Floats = np.interp(end_N, edges, below)
        share_N -= np.interp(first_N, edges, below)
        share_N += rest * (end_N - first_N) / num_embeddings
        own_NX = (first_N[:, None] <= top_X) & (top_X < end_N[:, None])
        share_N += own_NX @ top_share_X
        return share_N

    def block_shares(self, part_rows: int, num_embeddings: int) -> Floats:
        """Return the share of the lookups in each shard of a block that has rows, `W`.

        Args:
            part_rows: Rows of each shard; the last one may have fewer.
            num_embeddings: Rows of the table.
        """
        first_W = np.arange(0, num_embeddings, part_rows)
        rows_W = np.minimum(part_rows, num_embeddings - first_W)
        return self.shares(first_W, rows_W, num_embeddings)

    def is_skewed(
        self, part_rows: int, num_embeddings: int, num_lookups: float
    ) -> bool:
        """Whether a shard of a block gets more than even lookups, beyond chance.

        Args:
            part_rows: See `block_shares`.
            num_embeddings: Rows of the table.
            num_lookups: Lookups in a batch.
        """
        even = part_rows / num_embeddings
        if even >= 1 or num_lookups <= 0:
            return False
        excess = self.block_shares(part_rows, num_embeddings).max() / even - 1
        return bool(excess > MIN_SKEW + _CHANCE / math.sqrt(even * num_lookups))


@functools.lru_cache(maxsize=2**12)
def _as_arrays(
    hot: HotRows,
) -> tuple[Floats, Floats, float, npt.NDArray[np.int64], Floats]:
    """Return what all shards of a table need, cached.

    Returns:
        First id of each range, and the end of the last one, `K + 1`; share of the
        lookups below these ids, without `top_ids`, `K + 1`; share of the lookups that
        are even over all rows; `top_ids`, `X`; their shares, `X`.
    """
    others_K = hot.others_K
    return (
        np.arange(len(others_K) + 1, dtype=np.float64) * hot.range_size,
        np.concatenate([[0.0], np.cumsum(others_K)]),
        max(0.0, 1.0 - sum(hot.range_shares)),
        np.array([row for row, _ in hot.top_ids], dtype=np.int64),
        np.array([share for _, share in hot.top_ids], dtype=np.float64),
    )
