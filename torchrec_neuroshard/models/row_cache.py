"""What a cache of rows on the card lacks, by how a table is accessed and its size.

FBGEMM keeps rows of tables in the host's memory in sets of 32 slots on the card, and
puts in, batch by batch, the distinct rows that it lacks. A miss is a distinct row of a
batch that is not there when the batch comes, as FBGEMM counts (`num_unique_misses`).

Least recently used (LRU): a cache of `held` rows has those of the last T batches, where
T batches have `held` distinct rows, and lacks what is older (the working set:
P. J. Denning, 1968; H. Che et al., "Hierarchical web caching systems", 2002). Where one
batch alone has more, those that are there stay as long as every batch has them, and
what is missing takes the other slots of its set in the order of the rows' numbers, by
which nobody tells how popular they are. Least frequently used (LFU): the cache comes to
have the most popular rows.

Sets: a row is there as long as fewer than 32 newer (more popular) ones fall into its
set. Their number is Poisson's, so that a set acts like a cache of all rows whose size
is off by a gamma variate of mean 1 and shape 32, over which misses are averaged.

Shapes: `G` groups of ids of one rate, `L` sizes of caches, `K` states of one, `Q`
nodes, `U` rows' numbers.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
from scipy import special

from torchrec_neuroshard.tables.profile import RARE_RATES, FeatureProfile

__all__ = ["ASSOCIATIVITY", "MissCurve"]

Floats = npt.NDArray[np.float64]

ASSOCIATIVITY = 32
"""Slots of a set."""
_NODES = 5
_MOST_BATCHES = 2.0**24
_PARTS = np.geomspace(1e-4, 2.0, 20)
"""Part of the rows, by their number, that find a slot where a batch has more of them
than there are slots; above 1, all but for unlucky sets."""
_NEVER = 1e-6
"""Less than this chance in a batch is none."""
_NUMBERS = (np.arange(16) + 0.5) / 16
"""Rows' numbers that are told apart, relative to the largest."""
_BATCHES = np.geomspace(1.0, _MOST_BATCHES, 97)


class MissCurve:
    """Misses of caches of any size, of one table.

    Attributes:
        num_distinct: Distinct rows of a batch.

    Args:
        profile: Access of one batch.
        num_embeddings: Rows of the table.
        is_lfu: Whether the least frequently used rows go, not the least recently used.
    """

    def __init__(
        self, profile: FeatureProfile, num_embeddings: int, *, is_lfu: bool = False
    ) -> None:
        ids_G, rate_G = profile.access_rates(num_embeddings)
        self._rows = num_embeddings
        self._ids_G, self._rate_G = ids_G, rate_G
        self._met_G = -np.expm1(-rate_G)
        self.num_distinct = float(ids_G @ self._met_G)
        if is_lfu:
            self._held_K = np.concatenate([[0.0], np.cumsum(ids_G)])
            self._missed_K = np.concatenate([[0.0], np.cumsum(ids_G * self._met_G)])
            self._missed_K = self.num_distinct - self._missed_K
        else:
            self._held_K, self._missed_K = self._lru()

    def _lru(self) -> tuple[Floats, Floats]:
        """Rows that a cache has, and those of a batch that it lacks, state by state."""
        place_G = np.searchsorted(RARE_RATES[:-1], self._rate_G)
        rare_G = RARE_RATES[place_G] == self._rate_G
        rare_ids = np.bincount(
            place_G[rare_G], self._ids_G[rare_G], minlength=len(RARE_RATES)
        )
        held_K, missed_K = (
            rare_KG @ rare_ids + own_KG @ self._ids_G[~rare_G]
            for rare_KG, own_KG in zip(
                _rare_states(), _states(self._rate_G[~rare_G]), strict=True
            )
        )
        held_K = np.maximum.accumulate(np.concatenate([[0.0], held_K]))
        return held_K, np.concatenate([[self.num_distinct], missed_K])

    def misses(self, load_factors_L: npt.ArrayLike) -> Floats:
        """Share of a batch's distinct rows that caches lack, `L`.

        Args:
            load_factors_L: Share of the table's rows that each has slots for.
        """
        load_L = np.asarray(load_factors_L, dtype=np.float64)
        if self.num_distinct <= 0:
            return np.zeros_like(load_L)
        nodes_Q, weights_Q = _gamma_nodes()
        held_LQ = np.multiply.outer(load_L * self._rows, nodes_Q)
        missed_LQ = np.interp(held_LQ, self._held_K, self._missed_K)
        missed_L: Floats = missed_LQ @ weights_Q / self.num_distinct
        return np.where(load_L >= 1.0, 0.0, np.clip(missed_L, 0.0, 1.0))

    def load_factors(self, batches_L: npt.ArrayLike) -> Floats:
        """Share of the rows that so many batches have between them, `L`.

        Tables that share a cache have about these parts of it: rows leave it once they
        were not met for some batches, whatever their table.

        Args:
            batches_L: Batches, at least one.
        """
        absent_LG = np.exp(np.multiply.outer(np.asarray(batches_L), -self._rate_G))
        share_L: Floats = (1.0 - absent_LG) @ self._ids_G / self._rows
        return share_L


def _states(rate_G: Floats) -> tuple[Floats, Floats]:
    """Chances, state by state, that a cache has an id of a rate, and that it lacks it.

    Returns:
        Both `K x G`; the second is of ids that a batch meets.
    """
    met_G = -np.expm1(-rate_G)
    found_KU1 = _found_slots()[..., None]
    leaves_KUG = 1.0 - met_G + met_G * found_KU1 + _NEVER
    there_KG = met_G * (found_KU1 / leaves_KUG).mean(axis=1)
    absent_KG = np.exp(-rate_G * _BATCHES[:, None])
    held_KG = np.concatenate([there_KG, 1.0 - absent_KG])
    return held_KG, met_G * (1.0 - held_KG)


@functools.cache
def _found_slots() -> Floats:
    """Chances that a missing row of some number finds a slot: `K x U`.

    It does where fewer than a set's slots go to rows of lower numbers.
    """
    lower_KU = ASSOCIATIVITY * np.divide.outer(1 / _PARTS, 1 / _NUMBERS)
    found_KU: Floats = special.pdtr(ASSOCIATIVITY - 1, lower_KU)
    return found_KU


@functools.cache
def _rare_states() -> tuple[Floats, Floats]:
    """Those of rare ids, whose rates all tables share."""
    return _states(RARE_RATES)


@functools.cache
def _gamma_nodes() -> tuple[Floats, Floats]:
    """Nodes and weights that average over the sizes that sets act like."""
    nodes_Q, weights_Q = special.roots_genlaguerre(_NODES, ASSOCIATIVITY - 1.0)
    return nodes_Q / ASSOCIATIVITY, weights_Q / weights_Q.sum()
