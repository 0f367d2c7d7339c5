"""Searches over column splits and ranks."""

from __future__ import annotations

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

SEARCHES: dict[str, type[NeuroShardSearcher]] = {"default": NeuroShardSearcher}
"""Searches by name."""


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
    return SEARCHES[search]()
