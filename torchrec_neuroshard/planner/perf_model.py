"""The performance model: rates whole plans by the time of an iteration."""

from __future__ import annotations

from torchrec.distributed.planner.types import PerfModel, ShardingOption

from torchrec_neuroshard.planner.plan_costs import CostedPart


class NeuroShardPerfModel(CostedPart, PerfModel):
    """Rates a plan by the critical path of one iteration.

    For the arguments, see `CostedPart`.
    """

    def rate(self, plan: list[ShardingOption]) -> float:
        """Return the predicted milliseconds of one iteration; lower is better.

        Raises:
            ConfigError: The cost model predicts something that is not a time.
        """
        return self.costs.placed(plan).predicted.critical_path_ms
