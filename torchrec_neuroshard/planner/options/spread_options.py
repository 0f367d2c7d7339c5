"""Options with a shard on every rank, which are listed when somebody looks.

Row-wise and data-parallel options of thousands of tables have millions of shards on
hundreds of ranks, of which a plan needs next to none.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence

from torchrec.distributed.planner.types import Perf, Shard, ShardingOption

from torchrec_neuroshard.planner.compat import SharingOption
from torchrec_neuroshard.sharding_types import SHARDING_TYPES

__all__ = [
    "SpreadOption",
    "price_later",
    "sample_shards",
    "unpriced_shards",
    "without_estimates",
]

_Pricer = Callable[[Sequence[ShardingOption]], list[list[Perf]]]

_PRICED_AT_ONCE = 2**14
"""Shards, about, that are priced together once one of them is looked at."""


class SpreadOption(SharingOption):
    """A row-wise or data-parallel option that lists its shards when they are read.

    Attributes:
        samples: A shard of each size, in the order of ranks: until shards are read,
            these carry what estimators know of their memory.
    """

    samples: tuple[Shard, ...]
    _world_size: int
    _perfs: Callable[[], Sequence[Perf]] | None = None

    @classmethod
    def spread(cls, option: ShardingOption, world_size: int) -> SpreadOption:
        """Return an option that was listed for one rank, spread over so many."""
        new = cls.of(option)
        del new.__dict__["shards"]
        new._world_size = world_size
        rows, width = (int(n) for n in new.tensor.shape)
        part = SHARDING_TYPES[new.sharding_type].part_rows(rows, world_size)
        ranks = (0, min(rows // part, world_size - 1), world_size - 1)
        sizes = dict.fromkeys(new._rows(rank)[1] for rank in ranks)
        new.samples = tuple(Shard(size=[n, width], offset=[0, 0]) for n in sizes)
        return new

    def __deepcopy__(self, memo: dict[int, object]) -> SpreadOption:
        """Copy the option; shards that nobody has read stay so."""
        new = super().__deepcopy__(memo)
        assert isinstance(new, SpreadOption)
        new.samples = tuple(map(copy.copy, self.samples))
        return new

    def __hash__(self) -> int:
        """Hash the option; TorchRec tells proposals apart so, and lists no shards."""
        if self.is_listed:
            return int(super().__hash__())
        return hash((self.fqn, self.sharding_type, self.compute_kernel))

    def _rows(self, rank: int) -> tuple[int, int]:
        """First row on a rank, and how many it has."""
        kind, rows = SHARDING_TYPES[self.sharding_type], int(self.tensor.shape[0])
        return kind.rows_at(rank, rows, self._world_size)

    @property
    def num_shards(self) -> int:
        """Shards, listed or not."""
        return len(self.shards) if self.is_listed else self._world_size

    @property
    def is_listed(self) -> bool:
        """Whether somebody has read the shards, or set them."""
        return "shards" in vars(self)

    @property
    def shards(self) -> list[Shard]:
        """The shards, with what estimators know of them."""
        if not self.is_listed:
            shards, perfs = unpriced_shards(self), self._perfs
            self.shards = shards
            if perfs is not None:
                for shard, perf in zip(shards, perfs(), strict=True):
                    shard.perf = copy.copy(perf)
        listed: list[Shard] = vars(self)["shards"]
        return listed

    @shards.setter
    def shards(self, shards: list[Shard]) -> None:
        self.__dict__["shards"] = shards
        self.samples, self._perfs = (), None


def sample_shards(option: ShardingOption) -> Sequence[Shard]:
    """Return shards of an option: of each size at least one, the first and the last."""
    if isinstance(option, SpreadOption) and not option.is_listed:
        return option.samples
    shards: list[Shard] = option.shards
    return shards


def without_estimates(option: ShardingOption) -> ShardingOption:
    """Return a copy of an option with shards that nobody has estimated."""
    new = copy.copy(option)
    shards = [Shard(size=s.size, offset=s.offset) for s in sample_shards(option)]
    if isinstance(new, SpreadOption) and not new.is_listed:
        new.samples, new._perfs = tuple(shards), None
    else:
        new.shards = shards
    return new


def unpriced_shards(option: ShardingOption) -> list[Shard]:
    """Return an option's shards, without costs where nobody has read them yet."""
    if not isinstance(option, SpreadOption) or option.is_listed:
        shards: list[Shard] = option.shards
        return shards
    by_rows = {int(s.size[0]): s for s in option.samples}
    found = []
    for rank in range(option.num_shards):
        first, rows = option._rows(rank)
        sample = by_rows[rows]
        found.append(Shard(sample.size, [first, 0], storage=sample.storage))
    return found


def price_later(options: Sequence[SpreadOption], pricer: _Pricer) -> None:
    """Let options be priced, some at a time, once shards of one are read.

    Args:
        options: Not listed yet; changed in place.
        pricer: Returns a `Perf` for each shard of each option.
    """
    size = max(1, _PRICED_AT_ONCE // max((o.num_shards for o in options), default=1))
    for start in range(0, len(options), size):
        some = options[start : start + size]
        together = _PricedTogether([copy.copy(option) for option in some], pricer)
        for number, option in enumerate(some):
            option._perfs = functools.partial(together.perfs, number)


class _PricedTogether:
    """Prices options once and remembers what their shards cost."""

    def __init__(self, options: Sequence[SpreadOption], pricer: _Pricer) -> None:
        self._options, self._pricer = options, pricer

    def __deepcopy__(self, memo: dict[int, object]) -> _PricedTogether:
        return self  # copies of options cost the same

    def perfs(self, number: int) -> list[Perf]:
        """What the shards of one of the options cost."""
        return self._all[number]

    @functools.cached_property
    def _all(self) -> list[list[Perf]]:
        for option in self._options:
            option.shards = unpriced_shards(option)
        return self._pricer(self._options)
