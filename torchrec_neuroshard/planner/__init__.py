"""TorchRec's planner interfaces, implemented on learned costs.

`planner` tells how a plan comes to be. What stands behind TorchRec's interfaces has
TorchRec's names (`enumerator`, `estimators`, `proposer`, `partitioner`, `perf_model`);
below them are what plans cost (`plan_costs`, `placed`, `memory`, `kernels`), what a
table may be (`ways`, `reader`, `constraints`, `topology`) and TorchRec's privates and
releases (`compat`).
"""

from torchrec_neuroshard.planner.constraints import PlacementConstraints
from torchrec_neuroshard.planner.enumerator import NeuroShardEnumerator
from torchrec_neuroshard.planner.estimators import NeuroShardEstimator
from torchrec_neuroshard.planner.given_plans import PlanFileError
from torchrec_neuroshard.planner.partitioner import NeuroShardPartitioner
from torchrec_neuroshard.planner.perf_model import NeuroShardPerfModel
from torchrec_neuroshard.planner.plan_costs import PlanCosts
from torchrec_neuroshard.planner.planner import NeuroShardPlanner
from torchrec_neuroshard.planner.proposer import NeuroShardProposer

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
