"""TorchRec's planner interfaces, implemented on learned costs.

`planner` has the whole story of a plan. The parts behind TorchRec's interfaces have
TorchRec's names (`enumerator`, `estimators`, `proposer`, `partitioner`, `perf_model`).
Below them are the costs of plans (`plan_costs`, `placed`, `memory`, `kernels`), the
description of tables and devices (`ways`, `reader`, `constraints`, `topology`), and
TorchRec's private attributes and releases (`compat`).
"""

from torchrec_neuroshard.costs.placement_constraints import PlacementConstraints
from torchrec_neuroshard.planner.enumerator import NeuroShardEnumerator
from torchrec_neuroshard.planner.estimators import NeuroShardEstimator
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
]
