"""TorchRec's planner interfaces, implemented on learned costs.

From below: `compat` (TorchRec's privates and releases), `options` (what a table may
be), `costs` (what that takes), `launch` (what is measured when a job starts), `parts`
(what stands behind TorchRec's interfaces), `planners` and `provider` (the planner
itself).

Beside it only `phase_timer` imports torchrec.
"""

from torchrec_neuroshard.planner.constraints import PlacementConstraints
from torchrec_neuroshard.planner.costs.given_plans import PlanFileError
from torchrec_neuroshard.planner.costs.plan_costs import PlanCosts
from torchrec_neuroshard.planner.parts.enumerators import NeuroShardEnumerator
from torchrec_neuroshard.planner.parts.partitioners import NeuroShardPartitioner
from torchrec_neuroshard.planner.parts.perf_models import NeuroShardPerfModel
from torchrec_neuroshard.planner.parts.proposers import NeuroShardProposer
from torchrec_neuroshard.planner.parts.shard_estimators import NeuroShardEstimator
from torchrec_neuroshard.planner.planner import NeuroShardPlanner

__all__ = [
    "NeuroShardEnumerator",
    "NeuroShardEstimator",
    "NeuroShardPartitioner",
    "NeuroShardPerfModel",
    "NeuroShardPlanner",
    "NeuroShardProposer",
    "PlacementConstraints",
    "PlanCosts",
    "PlanFileError",
]
