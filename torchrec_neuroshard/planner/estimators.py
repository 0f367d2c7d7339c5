"""Costs and memory of single shards, for TorchRec's enumerator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torchrec.distributed.planner.shard_estimators import (
    EmbeddingPerfEstimator,
    EmbeddingStorageEstimator,
)
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    ShardEstimator,
    ShardingOption,
    Topology,
)
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torchrec_neuroshard.planner.compat import (
    torchrec_pipeline,
    with_optimizer,
)
from torchrec_neuroshard.planner.memory import MemoryModel
from torchrec_neuroshard.planner.option_facts import (
    is_dense,
    is_quantised,
    note_sharders,
)
from torchrec_neuroshard.planner.plan_costs import CostedPart, LaunchedPerf
from torchrec_neuroshard.planner.reader import (
    TableReader,
)
from torchrec_neuroshard.planner.spread_options import price_later, sampled
from torchrec_neuroshard.planner.table_keys import ModuleConstraints

__all__ = [
    "NeuroShardEstimator",
    "StorageEstimator",
]

_STATE_CLASSES: Mapping[str, type[torch.optim.Optimizer]] = {
    "rowwise_adagrad": RowWiseAdagrad,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
}
"""Optimizers that keep state -> the class by which TorchRec knows how much."""


class NeuroShardEstimator(CostedPart, ShardEstimator):
    """Predicts the shards of each option as if its table were alone.

    Options are predicted many at a time, row shards, replicas and kernels that no cost
    model holds (`costs.kernels`) included, once the `perf` of a shard is read. Options
    without a price (quantised tables, odd widths) keep TorchRec's estimate, which knows
    no launch overhead: what the cost model says any kernel costs is added to their
    compute, so that both can be compared.

    The arguments are those of `CostedPart`.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(topology, constraints, **kwargs)
        self._named = ModuleConstraints(constraints)
        self._stock, self._inference = (
            EmbeddingPerfEstimator(
                topology=topology,
                constraints=self._named,
                is_inference=is_inference,
            )
            for is_inference in (False, True)
        )

    def estimate(
        self, sharding_options: list[ShardingOption], *args: Any, **kwargs: Any
    ) -> None:
        """Set the `perf` of every shard.

        Args:
            sharding_options: Changed in place.
            args: TorchRec 1.6 passes the sharders here, by position.
            kwargs: Later releases pass their data by keyword.
        """
        _note_sharders(sharding_options, *args, *kwargs.values())
        self.costs.reader.share_facts(sharding_options)
        costed: list[ShardingOption] = []
        others: list[ShardingOption] = []
        for option in sharding_options:
            known = self.costs.reader.has_cost(option)
            (costed if known else others).append(option)
        price_later(costed, self.costs.single_perfs, lambda: self.costs.encoder)
        read_only = [o for o in others if is_quantised(o)]
        trained = [o for o in others if not is_quantised(o)]
        for stock, options in ((self._stock, trained), (self._inference, read_only)):
            for part in self._named.parts(options) if options else ():
                stock.estimate(part, *args, **kwargs)
        for option in others:
            forward, backward = self.costs.launch_ms(option)
            for shard in () if is_dense(option) else option.shards:
                shard.perf = LaunchedPerf(**vars(shard.perf))
                shard.perf.fwd_compute += forward
                shard.perf.bwd_compute += backward


class StorageEstimator(EmbeddingStorageEstimator):
    """What shards take of memory; of GPUs, as FBGEMM and TorchRec allocate it.

    Sums of its estimates, with `memory.common_bytes`, bound what ranks allocate from
    above; `memory.ranks` says it exactly. Of CPUs, and of options that the cost model
    has no price for, the estimate is TorchRec's with the state of every optimizer:
    TorchRec counts that of optimizers which `apply_optimizer_in_backward` sets; here,
    what a sharder's `fused_params` or a fused collection asks for counts as well.

    Attributes:
        memory: What ranks allocate.

    Args:
        topology: The devices to plan for.
        constraints: Table name -> TorchRec's constraints on it.
        reader: Knows the tables' optimizers.
        pipeline_type: As in TorchRec's estimator. None: no pipeline.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        *,
        reader: TableReader,
        pipeline_type: Any = None,
    ) -> None:
        given = {}
        if pipeline_type is not None:
            given["pipeline_type"] = torchrec_pipeline(pipeline_type)
        self._named = ModuleConstraints(constraints)
        super().__init__(topology=topology, constraints=self._named, **given)
        self._reader = reader
        self.memory = MemoryModel(reader, pipeline_type=pipeline_type)

    def estimate(
        self, sharding_options: list[ShardingOption], *args: Any, **kwargs: Any
    ) -> None:
        """Set the `storage` of every shard.

        Args:
            sharding_options: Changed in place.
            args: As in TorchRec.
            kwargs: As in TorchRec.
        """
        _note_sharders(sharding_options, *args, *kwargs.values())
        known: list[ShardingOption] = []
        others: list[ShardingOption] = []
        for option in sharding_options:
            (known if self.memory.knows(option) else others).append(option)
        others = list(map(sampled, others))
        if not self.memory.is_lenient:
            others = [self._with_optimizer(option) for option in others]
        for part in self._named.parts(others) if others else ():
            super().estimate(part, *args, **kwargs)
        self.memory.estimate(known)

    def _with_optimizer(self, option: ShardingOption) -> ShardingOption:
        """Name the optimizer where TorchRec looks for it; the shards are the same."""
        state = _STATE_CLASSES.get(self._reader.optimizer(option))
        if state is None:
            return option
        return with_optimizer(option, state)


def _note_sharders(options: list[ShardingOption], *given: Any) -> None:
    """Read the sharders that TorchRec gave an estimator."""
    for sharders in given:
        if isinstance(sharders, Mapping):
            note_sharders(options, sharders)
