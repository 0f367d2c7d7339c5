"""What layouts would cost on balanced ranks: which switches promise to pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import ShardingType

from torchrec_neuroshard.planner.costs import PlanCosts
from torchrec_neuroshard.planner.plan_conversion import fusion_key

__all__ = ["IdealCosts", "Layout"]

_TABLE_WISE = ShardingType.TABLE_WISE.value

Layout = tuple[int, ...]
"""Which of its options each table takes."""


class IdealCosts:
    """What layouts would cost if every rank had an equal share of everything.

    A layout with a table that must stay whole costs no less than that table.
    """

    def __init__(
        self, costs: PlanCosts, tables: Sequence[Sequence[ShardingOption]]
    ) -> None:
        """Price all options that the cost model has a price for."""
        self._costs = costs
        self._world_size = costs.topology.world_size
        costed = [o for options in tables for o in options if costs.reader.is_costed(o)]
        parts = dict(zip(map(id, costed), self._price(costed), strict=True))
        self._parts = [[parts.get(id(o)) for o in options] for options in tables]

    def _price(self, options: Sequence[ShardingOption]) -> list[_Part]:
        if not options:
            return []
        priced = self._costs.price(options)
        simulator = priced.simulator
        self._simulator = simulator
        alone = simulator.single_compute(priced.shards)
        encoding_NE = simulator.encoder.encoding(priced.shards.row_N)
        ends = np.cumsum([len(o.shards) for o in options])
        parts = []
        for index, (option, end) in enumerate(zip(options, ends.tolist(), strict=True)):
            own = slice(end - len(option.shards), end)
            unsplit = option.sharding_type == _TABLE_WISE or not option.is_pooled
            parts.append(
                _Part(
                    key=fusion_key(option, self._costs.reader, option.sharding_type),
                    stage=int(simulator.stages_T[index]),
                    encoding=encoding_NE[own].sum(axis=0) / self._world_size,
                    extra=priced.shards.extra_N2[own].sum(axis=0) / self._world_size,
                    loads=priced.shards.loads_N3[own].sum(axis=0) / self._world_size,
                    floor=alone[own].max(axis=0) if unsplit else np.zeros(2),
                )
            )
        return parts

    def cost(self, layout: Layout) -> float | None:
        """Milliseconds of an iteration; None where a table has no price."""
        parts = [p[c] for p, c in zip(self._parts, layout, strict=True)]
        kernels: dict[tuple[Any, ...], list[_Part]] = {}
        stages: dict[tuple[Any, ...], list[_Part]] = {}
        for part in parts:
            if part is None:
                return None
            kernels.setdefault(part.key, []).append(part)
            stages.setdefault(part.key[:2], []).append(part)
        model = self._costs.cost_model
        sums = np.stack(
            [np.sum([p.encoding for p in held], axis=0) for held in kernels.values()]
        )
        compute = model.predict_sums(sums)
        launch = np.array(self._costs.launch_ms())
        total = 0.0
        for cost, held in zip(compute, kernels.values(), strict=True):
            balanced = cost + np.sum([p.extra for p in held], axis=0)
            # Part of a table on the average rank is a kernel on some rank.
            floors = np.stack([launch, *(p.floor for p in held)])
            total += float(np.maximum(balanced, floors.max(axis=0)).sum())
        for held in stages.values():
            mean = np.sum([p.loads for p in held], axis=0)
            loads = np.tile(mean, (1, self._world_size, 1))
            comms = self._simulator.stage_comms(held[0].stage, loads)
            total += float(comms[0].max(axis=0).sum())
        return total


@dataclass(frozen=True, slots=True)
class _Part:
    """What an option adds to the average rank."""

    key: tuple[Any, ...]
    stage: int
    encoding: npt.NDArray[np.float64]
    extra: npt.NDArray[np.float64]
    loads: npt.NDArray[np.float64]
    floor: npt.NDArray[np.float64]
    """Forward and backward of what cannot be spread over ranks."""
