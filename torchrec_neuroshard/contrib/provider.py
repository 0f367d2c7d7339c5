"""A planner provider for TorchRec's planning API (since 1.9).

    provider = NeuroShardPlannerProvider()
    orchestrator = DryRunOrchestrator(DefaultPlannerExecutor(provider))
    dry_run.cli.main(["--sku-list=h100,h200", "--world-size=16"], orchestrator)

TorchRec's executor asks the provider for a topology, a storage reservation and a
planner, runs the planner, and reads costs and memory from its selected options.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrec.distributed.planner.types import StorageReservation, Topology

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.hardware.cards import GPU_CARDS, find_card
from torchrec_neuroshard.hardware.device_types import GPU
from torchrec_neuroshard.models.base import CostModel
from torchrec_neuroshard.planner.compat import (
    PlannerProviderBase,
    torchrec_version,
    with_bandwidths,
)
from torchrec_neuroshard.planner.planner import NeuroShardPlanner
from torchrec_neuroshard.planner.topology import GB_PER_S

_PLANNED_VARIANTS = ("UNSET", "OSS")


class NeuroShardPlannerProvider(PlannerProviderBase):
    """Builds a `NeuroShardPlanner` for each SKU of a TorchRec planning request.

    If a SKU names a card ("h100", or torch's name of the device), the planner uses the
    card's figures and costs, unless the request sets them. Topology and storage
    reservation are TorchRec's, with the per-SKU overrides of a dry run, which TorchRec
    does not apply itself. A proposer, partitioner or performance model in the request's
    `planner_config` replaces this package's.

    Args:
        cost_models: SKU -> the planner's `cost_model`. Other SKUs use the card that
            they name, or "auto".
        arguments: Other arguments of `NeuroShardPlanner` for every SKU. They win over
            the request's.

    Raises:
        ConfigError: The installed TorchRec has no planning API.
    """

    def __init__(
        self,
        cost_models: Mapping[str, str | Path | CostModel] | None = None,
        **arguments: Any,
    ) -> None:
        if PlannerProviderBase is object:
            raise ConfigError(
                f"torchrec {torchrec_version()} has no PlannerProvider (since 1.9): "
                "install torchrec 1.9.2, or call NeuroShardPlanner with the values of "
                "the request"
            )
        models = (cost_models or {}).items()
        self._cost_models = {sku: {"cost_model": model} for sku, model in models}
        self._arguments = arguments

    def build_topology(self, sku: str, request: Any, ctx: Any) -> Topology:
        """Return TorchRec's topology for a request, with the SKU's overrides.

        Args:
            sku: The SKU to plan for.
            request: TorchRec's `ShardingPlanRequest`.
            ctx: TorchRec's `PlannerSessionContext`.
        """
        memory = _overrides(request, sku)
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
        """Return the planner for a request.

        Args:
            sku: The SKU to plan for.
            topology: The result of `build_topology`.
            storage_reservation: The memory to keep free.
            ctx: TorchRec's `PlannerSessionContext`.

        Raises:
            ConfigError: The request asks for another kind of planner.
        """
        request = ctx.request
        config = request.planner_config
        variant = config.planner_variant.name
        if variant not in _PLANNED_VARIANTS:
            raise ConfigError(
                f"planner_variant {variant} asks for another planner; set "
                f"{' or '.join(_PLANNED_VARIANTS)} to use this one"
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
                **self._requested_parts(config, request, topology),
                **self._arguments,
                **self._cost_models.get(sku, {}),
            }
        )
        figures = planner.costs.devices.figures.values()
        ctx.hw_source[sku] = "; ".join(f"{f.name} {f} ({f.basis})" for f in figures)
        return planner

    def _requested_parts(
        self, config: Any, request: Any, topology: Topology
    ) -> dict[str, Any]:
        """Return argument -> the part of TorchRec that a request asks for."""
        parts = {
            "proposer": self._build_proposer(config, request.local_world_size),
            "partitioner": self._build_partitioner(config),
            "performance_model": self._build_performance_model(config, topology),
        }
        return {name: part for name, part in parts.items() if part is not None}


def _overrides(request: Any, sku: str) -> dict[str, float]:
    """Return field -> a dry run's value for one SKU; {} for other requests.

    Memory has the request's field names, links those of `Topology` (in GB/s).
    """
    override = (getattr(request, "per_sku_overrides", None) or {}).get(sku)
    values = dataclasses.asdict(override) if override else {}
    return {name: value for name, value in values.items() if value is not None}
