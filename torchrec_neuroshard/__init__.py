"""Plan TorchRec embedding shards with measured times of kernels and collectives.

Importing this package is cheap: it loads neither torch nor torchrec, and changes no
global state. Each public name is loaded from its module on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from torchrec_neuroshard.errors import NeuroShardError

if TYPE_CHECKING:
    from torchrec_neuroshard.bundles.find import load_cost_model
    from torchrec_neuroshard.contrib.provider import NeuroShardPlannerProvider
    from torchrec_neuroshard.costs.placement_constraints import PlacementConstraints
    from torchrec_neuroshard.costs.schedules import DenseMs
    from torchrec_neuroshard.costs.task import Placement
    from torchrec_neuroshard.monitor import PlanMonitor
    from torchrec_neuroshard.papers.neuroshard import PaperSearcher
    from torchrec_neuroshard.phase_timer import PhaseTimer
    from torchrec_neuroshard.planner.groups import group_topology
    from torchrec_neuroshard.planner.planner import NeuroShardPlanner
    from torchrec_neuroshard.planner.topology import topology_for
    from torchrec_neuroshard.plans.plan_files import load_plan, save_plan
    from torchrec_neuroshard.plans.rehearse import rehearse
    from torchrec_neuroshard.plans.replan import apply_moves, replan
    from torchrec_neuroshard.plans.reshard import reshard
    from torchrec_neuroshard.report.page import write_html
    from torchrec_neuroshard.reporters import JsonLinesReporter
    from torchrec_neuroshard.search.base import SearchConfig, SearchResult
    from torchrec_neuroshard.tables.profile import FeatureProfile, profile_inputs
    from torchrec_neuroshard.tables.table import TableConfig

__version__ = "0.3.0.dev0"

__all__ = [
    "DenseMs",
    "FeatureProfile",
    "JsonLinesReporter",
    "NeuroShardError",
    "NeuroShardPlanner",
    "NeuroShardPlannerProvider",
    "PaperSearcher",
    "PhaseTimer",
    "Placement",
    "PlacementConstraints",
    "PlanMonitor",
    "SearchConfig",
    "SearchResult",
    "TableConfig",
    "__version__",
    "apply_moves",
    "group_topology",
    "load_cost_model",
    "load_plan",
    "profile_inputs",
    "rehearse",
    "replan",
    "reshard",
    "save_plan",
    "topology_for",
    "write_html",
]

_LOCATIONS = {
    "DenseMs": "torchrec_neuroshard.costs.schedules",
    "FeatureProfile": "torchrec_neuroshard.tables.profile",
    "JsonLinesReporter": "torchrec_neuroshard.reporters",
    "NeuroShardPlanner": "torchrec_neuroshard.planner.planner",
    "NeuroShardPlannerProvider": "torchrec_neuroshard.contrib.provider",
    "PaperSearcher": "torchrec_neuroshard.papers.neuroshard",
    "PhaseTimer": "torchrec_neuroshard.phase_timer",
    "Placement": "torchrec_neuroshard.costs.task",
    "PlacementConstraints": "torchrec_neuroshard.costs.placement_constraints",
    "PlanMonitor": "torchrec_neuroshard.monitor",
    "SearchConfig": "torchrec_neuroshard.search.base",
    "SearchResult": "torchrec_neuroshard.search.base",
    "TableConfig": "torchrec_neuroshard.tables.table",
    "apply_moves": "torchrec_neuroshard.plans.replan",
    "group_topology": "torchrec_neuroshard.planner.groups",
    "load_cost_model": "torchrec_neuroshard.bundles.find",
    "load_plan": "torchrec_neuroshard.plans.plan_files",
    "profile_inputs": "torchrec_neuroshard.tables.profile",
    "rehearse": "torchrec_neuroshard.plans.rehearse",
    "replan": "torchrec_neuroshard.plans.replan",
    "reshard": "torchrec_neuroshard.plans.reshard",
    "save_plan": "torchrec_neuroshard.plans.plan_files",
    "topology_for": "torchrec_neuroshard.planner.topology",
    "write_html": "torchrec_neuroshard.report.page",
}


def __getattr__(name: str) -> object:
    if name not in _LOCATIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value: object = getattr(importlib.import_module(_LOCATIONS[name]), name)
    except NeuroShardError:
        raise
    except Exception as error:
        # A mismatched fbgemm raises OSError, RuntimeError or AttributeError.
        from torchrec_neuroshard.hardware.doctor import explain_failure

        explained = explain_failure(f"{__name__}.{name}", error)
        if explained is None:
            raise
        raise explained from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
