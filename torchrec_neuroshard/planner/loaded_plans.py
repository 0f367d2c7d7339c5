"""Load plans from TorchRec's storage, also with shards that are not listed.

`stored_options` says what TorchRec stores.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torch import nn
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.types import Enumerator, PlanLoader, ShardingOption
from torchrec.distributed.types import ModuleSharder

from torchrec_neuroshard.planner.compat import planner_part, set_planner_part
from torchrec_neuroshard.planner.enumerator import NeuroShardEnumerator
from torchrec_neuroshard.planner.plan_costs import PlanCosts
from torchrec_neuroshard.planner.stored_options import (
    by_table,
    kind_of,
    like,
    unplaced,
    with_shards,
)
from torchrec_neuroshard.planner.table_keys import constraint_on


class LoadsPlans(EmbeddingShardingPlanner):
    """A planner that loads its own plans, whatever the search chose."""

    costs: PlanCosts
    plan_loader: PlanLoader | None
    _loaded: Mapping[str, ShardingOption] = {}
    """Full table name -> its option in the plan that was loaded, if one was."""

    @property
    def last_model(self) -> tuple[nn.Module, list[ModuleSharder[Any]]] | None:
        """The model planned last, without weights, and its sharders."""
        raise NotImplementedError

    def hash_planner_context_inputs(self) -> int:
        """Return a hash of what plans depend on; see `EmbeddingShardingPlanner`."""
        with self._hashing_the_listing():
            return int(super().hash_planner_context_inputs())

    def hash_planner_context_inputs_str(self) -> str:
        """Return a hash of what plans depend on; see `EmbeddingShardingPlanner`."""
        with self._hashing_the_listing():
            return str(super().hash_planner_context_inputs_str())

    @contextlib.contextmanager
    def _hashing_the_listing(self) -> Iterator[None]:
        """Let TorchRec hash what was listed before a plan was made.

        A planner that loads the plan has listed nothing else. What the plan chose, its
        ranks, and memory by TorchRec's count must not change the hash.
        """
        enumerator = planner_part(self, "enumerator")
        if isinstance(enumerator, NeuroShardEnumerator):
            if not enumerator.first_listed and self.last_model is not None:
                enumerator.enumerate(*self.last_model)  # the search listed less
            listed = [*map(unplaced, enumerator.first_listed or enumerator.listed)]
            stand_in = SimpleNamespace(last_stored_search_space=listed or None)
            set_planner_part(self, "enumerator", stand_in)
        try:
            yield
        finally:
            set_planner_part(self, "enumerator", enumerator)

    @contextlib.contextmanager
    def _loading(self) -> Iterator[None]:
        """Let TorchRec find the tables of a loaded plan among the listed options."""
        given, self._loaded = self.plan_loader, {}
        if given is not None:
            onto = _OntoTables(given, planner_part(self, "enumerator"), self.costs)
            self.plan_loader, self._loaded = onto, onto.plan
        try:
            yield
        finally:
            self.plan_loader = given

    def _take_loaded(self, options: list[ShardingOption]) -> list[ShardingOption]:
        """Return the loaded plan, if there is one; TorchRec's first callback."""
        return [self._loaded.get(option.fqn, option) for option in options]


class _OntoTables(PlanLoader):
    """A plan loader whose options TorchRec finds among the listed ones.

    Each loaded option has the key of some listed option of its table. TorchRec then
    passes these to `LoadsPlans._take_loaded`, which returns the loaded plan.
    """

    def __init__(
        self, inner: PlanLoader, enumerator: Enumerator, costs: PlanCosts
    ) -> None:
        self._inner, self._enumerator, self._reader = inner, enumerator, costs.reader
        self.plan: dict[str, ShardingOption] = {}

    def __getattr__(self, name: str) -> Any:
        """Return what TorchRec's interface leaves out, for example `get_plan_id`."""
        return getattr(self._inner, name)

    def plan_context_hash(self) -> str | None:
        found: str | None = self._inner.plan_context_hash()
        return found

    def load(self) -> dict[int, ShardingOption] | None:
        loaded: dict[int, ShardingOption] | None = self._inner.load()
        listing: Any = self._enumerator
        tables = by_table(listing.last_stored_search_space or ())
        found: dict[int, ShardingOption] = {}
        for key, option in (loaded or {}).items():
            own = tables.get(option.fqn, [])
            listed = next((o for o in own if o.storage_hash() == key), None)
            if listed is not None:
                self.plan[option.fqn] = with_shards(listed, option)
            elif own and option.storage_hash() == key and self._may_have(own, option):
                self.plan[option.fqn] = like(own, option)
            is_known = option.fqn in self.plan
            found[own[0].storage_hash() if is_known else key] = option
        return None if loaded is None else found

    def _may_have(
        self, listed: Sequence[ShardingOption], option: ShardingOption
    ) -> bool:
        """Whether a table may be sharded like an option that is not listed."""
        if any(kind_of(o) == kind_of(option) for o in listed):
            return True
        path, name = listed[0].path, listed[0].name
        known = constraint_on(self._reader.constraints, path, name)
        types, kernels = (
            (known.sharding_types, known.compute_kernels) if known else (None, None)
        )
        return (
            option.sharding_type in (types or [option.sharding_type])
            and option.compute_kernel in (kernels or [option.compute_kernel])
            and not self._reader.run_fault(like(listed, option))
        )
