"""Which of several plans to take where costs were not measured.

An estimate is off, and a plan that is the best by it may lose to TorchRec's on the real
card. So the card is drawn many times, as it may be by the estimate's known error, and
every plan is priced under all draws. Of the plans that are hardly ever worse than
TorchRec's own, the one with the least expected time is taken.

Shapes: `C` plans, `K` draws.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torchrec.distributed.planner.types import ShardingOption, Topology

from torchrec_neuroshard.cost_models import CommsModel, CostModel
from torchrec_neuroshard.placement import format_bytes
from torchrec_neuroshard.placement_rules import quoted
from torchrec_neuroshard.planner.costs.plan_costs import ESTIMATED_COLUMNS, PlanCosts
from torchrec_neuroshard.planner.options.table_reader import table_name
from torchrec_neuroshard.report import Robustness

__all__ = [
    "cautions",
    "choose_plan",
    "draw_paths",
    "draw_truths",
    "is_uncertain",
    "robustness",
]

Floats = npt.NDArray[np.float64]

NUM_DRAWS = 64
"""Of the card. The share of draws in which a plan is worse is known within 3 % then."""
SEED = 0
TABLE_STD = 0.25
"""Standard deviation of the logarithm of a factor on each table's kernels: how far the
published timings of one card are off from what its own factors make of the estimate
(0.25 of 130 timings of six cards, left out: "tables" among the spreads of
`benchmarks/results/published_202611.json`)."""
TOLERANCE = 0.02
"""How much longer than TorchRec's plan does not count as worse, and how much faster a
plan has to be for each of its `cautions`. Assumed."""
CONFIDENCE = 0.95
"""Share of the draws in which a plan must not be worse."""
FULLEST = 3.0
"""Times the mean memory that the fullest rank may hold without a caution."""
LEAST_FILLED = 0.05
"""Share of a rank's memory below which its filling is of no account."""


def is_uncertain(costs: PlanCosts) -> bool:
    """Whether kernels are priced by an estimate whose error is known."""
    return costs.cost_model.error is not None


def draw_truths(costs: PlanCosts) -> list[tuple[CostModel, CommsModel]]:
    """Draw what kernels and collectives may really take.

    Args:
        costs: Estimates with a known error (`is_uncertain`).
    """
    error = costs.cost_model.error
    assert error is not None, "what was measured is not drawn"
    return [
        (costs.cost_model.under(factors), costs.comms_model.under(factors))
        for factors in error.draw(NUM_DRAWS, SEED)
    ]


def draw_paths(costs: PlanCosts, plans: Sequence[Sequence[ShardingOption]]) -> Floats:
    """Price plans under every draw: `K x C` [ms].

    Args:
        costs: Estimates with a known error (`is_uncertain`).
        plans: Placed options of each plan.
    """
    return costs.paths_under(plans, draw_truths(costs), TABLE_STD, SEED)


def cautions(
    costs: PlanCosts, plan: Sequence[ShardingOption], topology: Topology
) -> tuple[str, ...]:
    """Say what is unusual about a GPU plan that only an estimate recommends.

    Args:
        costs: What the plan was priced by.
        plan: Placed options, with estimates of memory.
        topology: Devices with the memory that is left for shards.
    """
    if not is_uncertain(costs) or topology.compute_device == "cpu":
        return ()
    texts = []
    narrow = {
        table_name(o): min(int(s.size[1]) for s in o.shards)
        for o in plan
        if any(s.size[1] < min(ESTIMATED_COLUMNS, o.tensor.shape[1]) for s in o.shards)
    }
    if narrow:
        texts.append(
            f"{quoted(list(narrow))}: shards of {min(narrow.values())} columns, where "
            f"the estimate is unchecked below {ESTIMATED_COLUMNS}. min_partition="
            f"{ESTIMATED_COLUMNS} in the constraints avoids that"
        )
    used_W = np.zeros(int(topology.world_size))
    for shard in (s for o in plan for s in o.shards):
        used_W[int(shard.rank)] += shard.storage.hbm if shard.storage else 0
    fullest, mean = int(used_W.argmax()), float(used_W.mean())
    room = topology.devices[fullest].storage.hbm
    if used_W[fullest] > max(FULLEST * mean, LEAST_FILLED * room):
        texts.append(
            f"rank {fullest} holds {format_bytes(used_W[fullest])}, "
            f"{used_W[fullest] / mean:.1f} times the mean of all ranks: the estimate "
            "finds that fastest, and memory does not count as long as it suffices"
        )
    return tuple(texts)


def choose_plan(
    paths_KC: Floats, reference: int | None, cautions_C: Sequence[int] | None = None
) -> int:
    """Choose the plan with the least expected time of those that do no harm.

    Args:
        paths_KC: Critical path of each plan in each draw [ms].
        reference: TorchRec's plan; None: there is none to compare with.
        cautions_C: How many `cautions` each plan has; each has to be worth `TOLERANCE`
            of the expected time. None: none.
    """
    expected_C = paths_KC.mean(axis=0)
    if cautions_C is not None:
        expected_C = expected_C * (1 + TOLERANCE * np.asarray(cautions_C))
    if reference is not None:
        worse_KC = paths_KC > (1 + TOLERANCE) * paths_KC[:, [reference]]
        harmless_C = worse_KC.mean(axis=0) <= 1 - CONFIDENCE
        expected_C = np.where(harmless_C, expected_C, np.inf)
    return int(expected_C.argmin())


def robustness(paths_KC: Floats, chosen: int, reference: int | None) -> Robustness:
    """Say how the chosen plan does in the draws.

    Args:
        paths_KC: Critical path of each plan in each draw [ms].
        chosen: The plan taken.
        reference: TorchRec's plan; None: there is none to compare with.
    """
    path_K = paths_KC[:, chosen]
    ratio_K = None if reference is None else path_K / paths_KC[:, reference]
    return Robustness(
        num_draws=len(path_K),
        num_plans=paths_KC.shape[1],
        mean_ms=float(path_K.mean()),
        std_ms=float(path_K.std()),
        mean_ratio=None if ratio_K is None else float(ratio_K.mean()),
        worst_ratio=None if ratio_K is None else float(ratio_K.max()),
    )
