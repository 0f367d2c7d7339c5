"""Searches over column splits and ranks."""

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

SEARCHES: dict[str, tuple[str, str]] = {
    "default": ("torchrec_neuroshard.search.default", "NeuroShardSearcher"),
    "autoshard": ("torchrec_neuroshard.baselines.autoshard", "AutoShardSearcher"),
    "dreamshard": ("torchrec_neuroshard.baselines.dreamshard", "DreamShardSearcher"),
    "neuroshard": ("torchrec_neuroshard.baselines.neuroshard", "PaperSearcher"),
}
"""Searches by name: module and class. Imported when asked for, since the baselines lie
above this unit."""


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
    module, name = SEARCHES[search]
    searcher: Searcher = getattr(importlib.import_module(module), name)()
    return searcher
