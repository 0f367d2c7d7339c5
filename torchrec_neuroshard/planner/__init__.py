"""TorchRec's planner interfaces, implemented on learned costs.

Beside it only `phase_timer` imports torchrec.
"""

from torchrec_neuroshard.planner.constraints import PlacementConstraints
from torchrec_neuroshard.planner.costs import PlanCosts
from torchrec_neuroshard.planner.enumerators import NeuroShardEnumerator
from torchrec_neuroshard.planner.given_plans import PlanFileError
from torchrec_neuroshard.planner.hardware_config import hardware_perf_config
from torchrec_neuroshard.planner.partitioners import NeuroShardPartitioner
from torchrec_neuroshard.planner.perf_models import NeuroShardPerfModel
from torchrec_neuroshard.planner.plan_conversion import (
    PlanPlacement,
    placement_from_plan,
)
from torchrec_neuroshard.planner.plan_files import (
    NeuroShardPlanLoader,
    PlanFingerprint,
    PlanMismatch,
    PlanMismatchError,
    StalePlanWarning,
    StoredPlan,
    load_plan,
    read_plan,
    save_plan,
)
from torchrec_neuroshard.planner.planners import NeuroShardPlanner
from torchrec_neuroshard.planner.proposers import NeuroShardProposer
from torchrec_neuroshard.planner.replan import (
    Move,
    ReplanConfig,
    ReplanResult,
    apply_moves,
    replan,
)
from torchrec_neuroshard.planner.shard_estimators import NeuroShardEstimator

__all__ = [
    "Move",
    "NeuroShardEnumerator",
    "NeuroShardEstimator",
    "NeuroShardPartitioner",
    "NeuroShardPerfModel",
    "NeuroShardPlanLoader",
    "NeuroShardPlanner",
    "NeuroShardProposer",
    "PlacementConstraints",
    "PlanCosts",
    "PlanFileError",
    "PlanFingerprint",
    "PlanMismatch",
    "PlanMismatchError",
    "PlanPlacement",
    "ReplanConfig",
    "ReplanResult",
    "StalePlanWarning",
    "StoredPlan",
    "apply_moves",
    "hardware_perf_config",
    "load_plan",
    "placement_from_plan",
    "read_plan",
    "replan",
    "save_plan",
]
