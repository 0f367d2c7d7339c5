"""Lazy shards: listed and priced only when they are read.

With thousands of tables and hundreds of ranks, row-wise and data-parallel options have
millions of shards, and a plan needs only a few of them. The search also never needs the
cost of a single shard; only TorchRec's parts do.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

from torchrec.distributed.planner.types import Perf, Shard, ShardingOption

from torchrec_neuroshard.tables.sharding_types import SHARDING_TYPES

_Pricer = Callable[[Sequence[ShardingOption]], list[list[Perf]]]

_PRICED_AT_ONCE = 2**14
"""About this many shards are priced together when one of them is read."""


class SharedShard(Shard):
    """A shard whose copies share size, offset and storage, which never change.

    TorchRec copies all shards of a plan, including one per rank of replicated tables.
    """

    def __copy__(self) -> Self:
        new = type(self).__new__(type(self))
        new.__dict__.update(vars(self))
        return new

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Return a copy, without computing a cost that was not read yet."""
        new = copy.copy(self)
        if "perf" in vars(self):
            new.perf = copy.copy(self.perf)
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        return Shard, (self.size, self.offset, self.storage, self.perf, self.rank)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shard) and _fields(self) == _fields(other)

    __hash__ = Shard.__hash__


class PricedShard(SharedShard):
    """A shard that is priced when its `perf` is read.

    Args:
        shard: The shard without costs.
        price: Returns the shard's costs.
    """

    def __init__(self, shard: Shard, price: Callable[[], Perf]) -> None:
        self.__dict__.update(vars(shard))
        self.__dict__.pop("perf", None)
        self._price = price

    @property
    def perf(self) -> Perf | None:
        """The shard's costs if it were alone."""
        if "perf" not in vars(self):
            self.perf = copy.copy(self._price())
        perf: Perf | None = vars(self)["perf"]
        return perf

    @perf.setter
    def perf(self, perf: Perf | None) -> None:
        self.__dict__["perf"] = perf


def _fields(shard: Shard) -> tuple[Any, ...]:
    return shard.size, shard.offset, shard.storage, shard.perf, shard.rank


class SpreadOption(ShardingOption):
    """A row-wise or data-parallel option that lists its shards when they are read.

    Attributes:
        samples: One shard of each size, in the order of ranks. They hold the estimated
            memory until shards are read.
    """

    samples: tuple[Shard, ...]
    _world_size: int
    _price: Callable[[int], Perf] | None = None

    @classmethod
    def spread(cls, option: ShardingOption, world_size: int) -> SpreadOption:
        """Return an option listed for one rank, spread over `world_size` ranks."""
        new = cls.__new__(cls)
        new.__dict__.update(vars(option))
        del new.__dict__["shards"]
        new._world_size = world_size
        rows, width = (int(n) for n in new.tensor.shape)
        part = SHARDING_TYPES[new.sharding_type].part_rows(rows, world_size)
        ranks = (0, min(rows // part, world_size - 1), world_size - 1)
        sizes = dict.fromkeys(new._rows(rank)[1] for rank in ranks)
        new.samples = tuple(Shard(size=[n, width], offset=[0, 0]) for n in sizes)
        return new

    def __hash__(self) -> int:
        """Hash without listing shards; TorchRec compares proposals by hash."""
        if self.is_listed:
            return int(super().__hash__())
        return hash((self.fqn, self.sharding_type, self.compute_kernel))

    def _rows(self, rank: int) -> tuple[int, int]:
        """Return the first row on a rank and the number of its rows."""
        kind, rows = SHARDING_TYPES[self.sharding_type], int(self.tensor.shape[0])
        return kind.rows_at(rank, rows, self._world_size)

    @property
    def num_shards(self) -> int:
        """Number of shards, listed or not."""
        return len(self.shards) if self.is_listed else self._world_size

    @property
    def is_listed(self) -> bool:
        """Whether the shards have been read or set."""
        return "shards" in vars(self)

    @property
    def shards(self) -> list[Shard]:
        """The shards, with their estimates."""
        if not self.is_listed:
            shards, price = unpriced_shards(self), self._price
            self.shards = shards if price is None else _priced(shards, price)
        listed: list[Shard] = vars(self)["shards"]
        return listed

    @shards.setter
    def shards(self, shards: list[Shard]) -> None:
        self.__dict__["shards"] = shards
        self.samples, self._price = (), None


def sample_shards(option: ShardingOption) -> Sequence[Shard]:
    """Return some shards of an option, at least one of each size, first and last."""
    if isinstance(option, SpreadOption) and not option.is_listed:
        return option.samples
    shards: list[Shard] = option.shards
    return shards


def sampled(option: ShardingOption) -> ShardingOption:
    """Return an option, or a copy with only its `sample_shards`."""
    if not isinstance(option, SpreadOption) or option.is_listed:
        return option
    new = copy.copy(option)
    new.shards = list(option.samples)
    return new


def without_estimates(option: ShardingOption) -> ShardingOption:
    """Return a copy of an option whose shards have no estimates."""
    new = copy.copy(option)
    shards = [Shard(size=s.size, offset=s.offset) for s in sample_shards(option)]
    if isinstance(new, SpreadOption) and not new.is_listed:
        new.samples, new._price = tuple(shards), None
    else:
        new.shards = shards
    return new


def unpriced_shards(option: ShardingOption) -> list[Shard]:
    """Return an option's shards; those not read yet have no costs."""
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


def price_later(
    options: Sequence[ShardingOption], pricer: _Pricer, model: Callable[[], object]
) -> None:
    """Make options price their shards in batches, when a cost is first read.

    Args:
        options: Changed in place.
        pricer: Returns a `Perf` for each shard of each option.
        model: Returns the object that prices depend on. If it changes, costs that were
            not read yet are computed with the new one.
    """
    size = max(1, _PRICED_AT_ONCE // max((o.num_shards for o in options), default=1))
    for start in range(0, len(options), size):
        some = options[start : start + size]
        copies = [copy.copy(option) for option in some]
        together = _PricedTogether(copies, pricer, model)
        for number, option in enumerate(some):
            price = functools.partial(together.price, number)
            if isinstance(option, SpreadOption) and not option.is_listed:
                option._price = price
            else:
                option.shards = _priced(option.shards, price)


def _priced(shards: Sequence[Shard], price: Callable[[int], Perf]) -> list[Shard]:
    return [
        PricedShard(shard, functools.partial(price, place))
        for place, shard in enumerate(shards)
    ]


class _PricedTogether:
    """Prices options once per model and caches their shards' costs."""

    def __init__(
        self,
        options: Sequence[ShardingOption],
        pricer: _Pricer,
        model: Callable[[], object],
    ) -> None:
        self._options, self._pricer, self._model = options, pricer, model
        self._perfs: list[list[Perf]] = []
        self._priced_by: object = None

    def __deepcopy__(self, memo: dict[int, object]) -> _PricedTogether:
        return self  # copies of options cost the same

    def price(self, number: int, place: int) -> Perf:
        """Return the cost of one shard of one option."""
        if self._priced_by is not (model := self._model()):
            for option in self._options:
                option.shards = unpriced_shards(option)
            self._perfs, self._priced_by = self._pricer(self._options), model
        return self._perfs[number][place]
