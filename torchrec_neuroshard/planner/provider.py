"""This package's planner behind TorchRec's planning API (since 1.9).

    provider = NeuroShardPlannerProvider()
    orchestrator = DryRunOrchestrator(DefaultPlannerExecutor(provider))
    dry_run.cli.main(["--sku-list=h100,h200", "--world-size=16"], orchestrator)

TorchRec's executor asks the provider for a topology, a storage reservation and a
planner, runs that, and reads costs and memory off its selected options.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrec.distributed.planner.types import StorageReservation, Topology

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.hardware.cards import GPU_CARDS, find_card
from torchrec_neuroshard.hardware.devices import GPU
from torchrec_neuroshard.models.base import CostModel
from torchrec_neuroshard.planner.compat import (
    PlannerProviderBase,
    has_planning_api,
    requested_parts,
    sku_overrides,
    torchrec_version,
    with_bandwidths,
)
from torchrec_neuroshard.planner.planner import NeuroShardPlanner
from torchrec_neuroshard.planner.topology import GB_PER_S

__all__ = ["NeuroShardPlannerProvider"]

_PLANNED_VARIANTS = ("UNSET", "OSS")


class NeuroShardPlannerProvider(PlannerProviderBase):
    """Builds a `NeuroShardPlanner` for each SKU that TorchRec's planning API asks for.

    A SKU that is a card's name ("h100", or as torch prints it) is planned for with the
    card's figures and costs where the request says nothing else. The topology and the
    storage reservation are TorchRec's; per-SKU overrides of a dry run, which TorchRec
    leaves to others, are kept. What a request's `planner_config` asks for of TorchRec's
    parts (proposer, partitioner, performance model) stands in for this package's.

    Args:
        cost_models: SKU -> the planner's `cost_model`. SKUs left out: "auto", or the
            card that they name.
        arguments: Others of `NeuroShardPlanner`, for every SKU; they win over the
            request's.

    Raises:
        ConfigError: This release of TorchRec has no such API.
    """

    def __init__(
        self,
        cost_models: Mapping[str, str | Path | CostModel] | None = None,
        **arguments: Any,
    ) -> None:
        if not has_planning_api():
            raise ConfigError(
                f"torchrec {torchrec_version()} has no PlannerProvider (since 1.9): "
                "install torchrec 1.9.2, or plan with NeuroShardPlanner, which takes "
                "what the request holds as arguments"
            )
        models = (cost_models or {}).items()
        self._cost_models = {sku: {"cost_model": model} for sku, model in models}
        self._arguments = arguments

    def build_topology(self, sku: str, request: Any, ctx: Any) -> Topology:
        """Return TorchRec's topology of a request, with the SKU's overrides.

        Args:
            sku: What is planned for.
            request: TorchRec's `ShardingPlanRequest`.
            ctx: TorchRec's `PlannerSessionContext`.
        """
        memory = sku_overrides(request, sku)
        links_gb_per_s = {n: memory.pop(n) for n in [*memory] if n.endswith("_bw")}
        request = dataclasses.replace(request, **memory)
        topology: Topology = super().build_topology(sku, request, ctx)
        links = {n: value / GB_PER_S for n, value in links_gb_per_s.items()}
        return with_bandwidths(topology, links) if links else topology

    def build_planner(
        self,
        sku: str,
        *,
        topology: Topology,
        storage_reservation: StorageReservation,
        ctx: Any,
    ) -> NeuroShardPlanner:
        """Return the planner of a request.

        Args:
            sku: What is planned for.
            topology: As `build_topology` returned it.
            storage_reservation: What to keep free.
            ctx: TorchRec's `PlannerSessionContext`.

        Raises:
            ConfigError: The request is for another kind of planner.
        """
        request = ctx.request
        config = request.planner_config
        variant = config.planner_variant.name
        if variant not in _PLANNED_VARIANTS:
            raise ConfigError(
                f"planner_variant {variant} is another planner's; for this one give "
                f"{' or '.join(_PLANNED_VARIANTS)}"
            )
        found = find_card(sku) or GPU_CARDS.get(sku.lower())
        card = found if topology.compute_device == GPU else None
        planner = NeuroShardPlanner(
            **{
                "topology": topology,
                "batch_size": request.batch_size,
                "storage_reservation": storage_reservation,
                "constraints": request.constraints,
                "stats": ctx.stats,
                "debug": config.debug,
                "timeout_seconds": config.timeout_seconds,
                "pipeline_type": config.pipeline_type,
                "cost_model": card.name if card else "auto",
                **requested_parts(self, request, topology),
                **self._arguments,
                **self._cost_models.get(sku, {}),
            }
        )
        figures = planner.costs.devices.figures.values()
        ctx.hw_source[sku] = "; ".join(f"{f.name} {f} ({f.basis})" for f in figures)
        return planner
