"""Misses of a cache of rows on the card, from a table's access and the cache's size.

For tables in the host's memory, FBGEMM caches rows on the card, in sets of 32 slots.
Each batch inserts the distinct rows that are missing. A miss is a distinct row of a
batch that is not in the cache when the batch arrives (FBGEMM's `num_unique_misses`).

Least recently used (LRU): a cache of `held` rows holds the rows of the last T batches,
where T batches have `held` distinct rows (the working set: P. J. Denning, 1968;
H. Che et al., "Hierarchical web caching systems", 2002). If a single batch has more
distinct rows, cached rows stay as long as every batch has them. Missing rows take the
other slots of their set in the order of their row numbers, which do not depend on
popularity. Least frequently used (LFU): in the long run, the cache holds the most
popular rows.

Sets: a row stays in its set as long as fewer than 32 newer (for LFU: more popular) rows
fall into the set. Their number is Poisson distributed. Therefore a set acts like a
fully associative cache whose size is multiplied by a gamma variate of mean 1 and shape
32; misses are averaged over it.

Shapes: `G` groups of ids of one rate, `L` sizes of caches, `K` states of one, `Q`
nodes, `U` rows' numbers.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
from scipy import special

from torchrec_neuroshard.tables.profile import RARE_RATES, FeatureProfile

Floats = npt.NDArray[np.float64]

ASSOCIATIVITY = 32
"""Slots per set."""
_NODES = 5
_MOST_BATCHES = 2.0**24
_PARTS = np.geomspace(1e-4, 2.0, 20)
"""Part of the rows, in the order of their numbers, that find a slot when a batch has
more rows than slots; above 1, all rows do except in unlucky sets."""
_NEVER = 1e-6
"""Probabilities per batch below this count as zero."""
_NUMBERS = (np.arange(16) + 0.5) / 16
"""Grid of row numbers, relative to the largest."""
_BATCHES = np.geomspace(1.0, _MOST_BATCHES, 97)


class MissCurve:
    """Misses of one table's cache, for any cache size.

    Attributes:
        num_distinct: Distinct rows of a batch.

    Args:
        profile: Profile of one batch.
        num_embeddings: Rows of the table.
        is_lfu: Whether the cache evicts the least frequently used rows instead of the
            least recently used ones.
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
        """Return for each state the rows that a cache holds and a batch's misses."""
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
        """Return the share of a batch's distinct rows that miss each cache, `L`.

        Args:
            load_factors_L: Slots of each cache, as a share of the table's rows.
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
        """Return the share of the rows that occur within some number of batches, `L`.

        Tables that share a cache hold about these shares of their rows in it, because a
        row of any table is evicted after the same number of batches without a lookup.

        Args:
            batches_L: Numbers of batches, at least one each.
        """
        absent_LG = np.exp(np.multiply.outer(np.asarray(batches_L), -self._rate_G))
        share_L: Floats = (1.0 - absent_LG) @ self._ids_G / self._rows
        return share_L


def _states(rate_G: Floats) -> tuple[Floats, Floats]:
    """Return, for each state and rate, the probabilities of holding and missing an id.

    Returns:
        Both `K x G`; the second is that a batch contains the id and misses it.
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
    """Return the probability that a missing row finds a slot, by its number, `K x U`.

    It finds one if rows with lower numbers take fewer slots than the set has.
    """
    lower_KU = ASSOCIATIVITY * np.divide.outer(1 / _PARTS, 1 / _NUMBERS)
    found_KU: Floats = special.pdtr(ASSOCIATIVITY - 1, lower_KU)
    return found_KU


@functools.cache
def _rare_states() -> tuple[Floats, Floats]:
    """Return the states of rare ids, whose rates all tables share."""
    return _states(RARE_RATES)


@functools.cache
def _gamma_nodes() -> tuple[Floats, Floats]:
    """Return nodes and weights that average over the sets' effective sizes."""
    nodes_Q, weights_Q = special.roots_genlaguerre(_NODES, ASSOCIATIVITY - 1.0)
    return nodes_Q / ASSOCIATIVITY, weights_Q / weights_Q.sum()
