"""Searches over ways to shard tables, column splits and ranks."""

from __future__ import annotations

import importlib

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.search.base import SearchConfig, Searcher, SearchResult
from torchrec_neuroshard.search.default import NeuroShardSearcher

__all__ = [
    "NeuroShardSearcher",
    "SearchConfig",
    "SearchResult",
    "Searcher",
    "make_searcher",
]

SEARCHES: dict[str, tuple[str, ...]] = {
    "default": ("search.default", "NeuroShardSearcher"),
    "annealing": ("baselines.annealing", "AnnealingSearcher"),
    "autoshard": ("baselines.autoshard", "AutoShardSearcher"),
    "dreamshard": ("baselines.dreamshard", "DreamShardSearcher"),
    "greedy-cost": ("baselines.heuristics", "CostGreedySearcher"),
    "greedy-dim": ("baselines.heuristics", "GreedySearcher", "dim"),
    "greedy-lookup": ("baselines.heuristics", "GreedySearcher", "lookup"),
    "greedy-size": ("baselines.heuristics", "GreedySearcher", "size"),
    "greedy-size-lookup": ("baselines.heuristics", "GreedySearcher", "size-lookup"),
    "milp": ("baselines.milp", "MilpSearcher"),
    "neuroshard": ("baselines.neuroshard", "PaperSearcher"),
    "random": ("baselines.heuristics", "RandomSearcher"),
}
"""Searches by name: module in this package, class and arguments. Imported when asked
for, since the baselines lie above this unit."""


def make_searcher(search: str | SearchConfig | Searcher) -> Searcher:
    """Return the search that a name, settings or a search itself stand for.

    Raises:
        ConfigError: The name is unknown.
    """
    if isinstance(search, Searcher):
        return search
    if isinstance(search, SearchConfig):
        return NeuroShardSearcher(search)
    if search not in SEARCHES:
        raise ConfigError(
            f"unknown search '{search}'; one of {', '.join(sorted(SEARCHES))}, or pass "
            "a SearchConfig or a Searcher"
        )
    module, name, *arguments = SEARCHES[search]
    package = __name__.partition(".")[0]
    made = getattr(importlib.import_module(f"{package}.{module}"), name)(*arguments)
    assert isinstance(made, Searcher)
    return made
