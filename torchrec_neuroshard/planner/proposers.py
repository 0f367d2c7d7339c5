"""What the partitioner is asked to place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrec.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    Proposer,
    ShardingOption,
    Topology,
)
from torchrec.distributed.types import ShardingType

from torchrec_neuroshard.planner.lowering import is_dense
from torchrec_neuroshard.planner.plan_costs import CostedPart
from torchrec_neuroshard.tables import COLUMN_MULTIPLE

__all__ = ["NeuroShardProposer"]

_TABLE_WISE = ShardingType.TABLE_WISE.value
_COLUMN_WISE = ShardingType.COLUMN_WISE.value


class NeuroShardProposer(CostedPart, Proposer):
    """Proposes one option per table; `NeuroShardPartitioner` does the search.

    A column-wise option in a proposal means that the table may be split, a table-wise
    one that it stays whole. Proposed are: every table as free as its constraints
    allow; where that mixes both kinds in one module, every table whole; and, when the
    first did not fit, the options of least memory for tables that are not searched.

    The arguments are those of `CostedPart`.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(topology, constraints, **kwargs)
        self._proposals: list[list[ShardingOption]] = []
        self._smallest: list[ShardingOption] | None = None

    def load(
        self, search_space: list[ShardingOption], enumerator: Enumerator | None = None
    ) -> None:
        """Prepare the proposals.

        Args:
            search_space: All options, with estimates.
            enumerator: Not needed.
        """
        del enumerator
        by_table: dict[str, list[ShardingOption]] = {}
        for option in search_space:
            by_table.setdefault(option.fqn, []).append(option)
        free: list[ShardingOption] = []
        whole: list[ShardingOption] = []
        smallest: list[ShardingOption] = []
        mixed: dict[str, set[str]] = {}
        for options in by_table.values():
            searched = {
                o.sharding_type: o for o in options if self.costs.reader.is_searched(o)
            }
            if not searched:
                free.append(min(options, key=_cost_order))
                whole.append(free[-1])
                smallest.append(min(options, key=_memory_order))
                continue
            split = searched.get(_COLUMN_WISE) if options[0].is_pooled else None
            free.append(split or searched.get(_TABLE_WISE) or searched[_COLUMN_WISE])
            whole.append(searched.get(_TABLE_WISE) or searched[_COLUMN_WISE])
            smallest.append(free[-1])
            mixed.setdefault(free[-1].path, set()).add(free[-1].sharding_type)
        self._proposals = [free]
        if any(len(types) > 1 for types in mixed.values()):
            self._proposals.append(whole)
        unlike = any(a is not b for a, b in zip(free, smallest, strict=True))
        self._smallest = smallest if unlike else None

    def propose(self) -> list[ShardingOption] | None:
        """Return the next proposal, None after the last one."""
        return self._proposals[0] if self._proposals else None

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Drop the proposal just tried; add the smallest one if it did not fit."""
        del plan, perf_rating, storage_constraint
        self._proposals = self._proposals[1:]
        if not partitionable and self._smallest is not None:
            self._proposals.append(self._smallest)
            self._smallest = None
        elif partitionable:
            self._smallest = None


def _cannot_run(option: ShardingOption) -> bool:
    """Fused kernels need widths that are multiples of four."""
    widths = (s.size[1] for s in option.shards)
    return not is_dense(option) and any(w % COLUMN_MULTIPLE for w in widths)


def _cost_order(option: ShardingOption) -> tuple[Any, ...]:
    cost = max(s.perf.total for s in option.shards)
    return (_cannot_run(option), cost, *_name_order(option))


def _memory_order(option: ShardingOption) -> tuple[Any, ...]:
    scarce = max(s.storage.hbm for s in option.shards)
    other = max(s.storage.ddr for s in option.shards)
    return (_cannot_run(option), scarce, other, *_name_order(option))


def _name_order(option: ShardingOption) -> tuple[Any, ...]:
    kind = option.sharding_type
    return kind != _TABLE_WISE, kind, option.compute_kernel
