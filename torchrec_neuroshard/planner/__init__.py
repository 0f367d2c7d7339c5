"""TorchRec's planner interfaces, implemented on learned costs.

Nothing outside this subpackage imports torchrec.
"""

from torchrec_neuroshard.planner.enumerators import NeuroShardEnumerator
from torchrec_neuroshard.planner.lowering import PlanPlacement, placement_from_plan
from torchrec_neuroshard.planner.partitioners import NeuroShardPartitioner
from torchrec_neuroshard.planner.perf_models import NeuroShardPerfModel
from torchrec_neuroshard.planner.plan_costs import PlanCosts
from torchrec_neuroshard.planner.planners import NeuroShardPlanner
from torchrec_neuroshard.planner.proposers import NeuroShardProposer
from torchrec_neuroshard.planner.shard_estimators import NeuroShardEstimator

__all__ = [
    "NeuroShardEnumerator",
    "NeuroShardEstimator",
    "NeuroShardPartitioner",
    "NeuroShardPerfModel",
    "NeuroShardPlanner",
    "NeuroShardProposer",
    "PlanCosts",
    "PlanPlacement",
    "placement_from_plan",
]
