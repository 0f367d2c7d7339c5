"""Estimators of the cost and memory of single shards, for TorchRec's enumerator."""

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

from torchrec_neuroshard.planner.compat import torchrec_pipeline, with_optimizer
from torchrec_neuroshard.planner.memory import MemoryModel
from torchrec_neuroshard.planner.option_facts import (
    is_dense,
    is_quantised,
    note_sharders,
)
from torchrec_neuroshard.planner.plan_costs import CostedPart, LaunchedPerf
from torchrec_neuroshard.planner.reader import TableReader
from torchrec_neuroshard.planner.spread_options import price_later, sampled
from torchrec_neuroshard.planner.table_keys import ModuleConstraints

_STATE_CLASSES: Mapping[str, type[torch.optim.Optimizer]] = {
    "rowwise_adagrad": RowWiseAdagrad,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
}
"""Optimizer with state -> the class from which TorchRec derives the state's size."""


class NeuroShardEstimator(CostedPart, ShardEstimator):
    """Predicts the time of each option's shards as if its table were alone.

    Options are predicted in one batch when the `perf` of a shard is first read. That
    includes row shards, replicas and kernels that the cost model does not cover
    (`costs.kernels`). Options without a price (quantised tables, odd widths) keep
    TorchRec's estimate. It has no launch overhead, so the cost model's overhead of a
    kernel is added to make both comparable.

    For the arguments, see `CostedPart`.
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
                topology=topology, constraints=self._named, is_inference=is_inference
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
    """Estimates the memory of shards; on GPUs, as FBGEMM and TorchRec allocate it.

    The sum of a rank's estimates and `memory.common_bytes` is an upper bound of what
    the rank allocates; `memory.ranks` is exact. On CPUs, and for options that the cost
    model does not cover, the estimate is TorchRec's plus the state of every optimizer.
    TorchRec counts only optimizers set by `apply_optimizer_in_backward`. This class
    also counts those in a sharder's `fused_params` or a fused collection.

    Attributes:
        memory: The memory model of what ranks allocate.

    Args:
        topology: The devices to plan for.
        constraints: Table name -> TorchRec's constraints on the table.
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
        for option in () if self.memory.is_lenient else others:
            self.memory.add_id_maps(option)
        self.memory.estimate(known)

    def _with_optimizer(self, option: ShardingOption) -> ShardingOption:
        """Return a copy that names the optimizer for TorchRec and shares the shards."""
        state = _STATE_CLASSES.get(self._reader.optimizer(option))
        if state is None:
            return option
        return with_optimizer(option, state)


def _note_sharders(options: list[ShardingOption], *given: Any) -> None:
    """Record on the options the sharders that TorchRec passed to an estimator."""
    for sharders in given:
        if isinstance(sharders, Mapping):
            note_sharders(options, sharders)
