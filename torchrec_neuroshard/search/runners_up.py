"""Good plans beside the best one that differ from it where it counts.

Shapes: `T` tables, `W` ranks.
"""

from __future__ import annotations

from torchrec_neuroshard.search.refine import Plan
from torchrec_neuroshard.search.shards import Ints

__all__ = ["RunnersUp"]

FAR_PLAN = 0.05
"""How much worse than the best a plan may be that is handed over beside it."""
MOST_ALIKE = 0.5
"""Share of a plan's rank sets that another one may hold, too."""
MAX_KEPT = 256
"""Plans that are kept while a search runs."""


class RunnersUp:
    """Keeps the plans that a search comes by: of those decided alike, the best.

    What decides a plan are the sets of shards on the ranks that set its phases.
    """

    def __init__(self) -> None:
        """Start with none."""
        self._found: dict[frozenset[bytes], tuple[float, Ints]] = {}

    def keep(self, plan: Plan) -> None:
        """Note a plan."""
        key = _sets(plan.width_TW[:, plan.critical_ranks()])
        known = self._found.get(key)
        if known is None or plan.critical_ms < known[0]:
            self._found[key] = plan.critical_ms, plan.width_TW.copy()
        if len(self._found) > MAX_KEPT:
            del self._found[max(self._found, key=lambda k: self._found[k][0])]

    def different(self, best: Plan, count: int) -> list[Ints]:
        """Return widths of the best plan and of others, the best first.

        No rank set that decides one is in a plan before it, and at least half of its
        rank sets are in none of them.

        Args:
            best: The plan that the search found.
            count: Plans; fewer where the search came by no more that differ so.
        """
        chosen, held = [best.width_TW], [_sets(best.width_TW)]
        far_ms = best.critical_ms * (1 + FAR_PLAN)
        ranked = sorted(self._found.items(), key=lambda item: item[1][0])
        for deciding, (path_ms, width_TW) in ranked:
            if len(chosen) >= count or path_ms > far_ms:
                break
            own = _sets(width_TW)
            alike = max(len(own & other) for other in held)
            if alike <= MOST_ALIKE * len(own) and not any(deciding & o for o in held):
                chosen.append(width_TW)
                held.append(own)
        return chosen


def _sets(width_TR: Ints) -> frozenset[bytes]:
    """What each of some ranks holds."""
    return frozenset(row.tobytes() for row in width_TR.T)
