"""Other ways to place tables, behind the same interface as the searches."""

from torchrec_neuroshard.baselines.heuristics import (
    HEURISTICS,
    HeuristicSearcher,
    make_heuristic,
)

__all__ = ["HEURISTICS", "HeuristicSearcher", "make_heuristic"]
