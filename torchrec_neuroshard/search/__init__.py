"""Searches over sharding types, kernels, column splits and ranks.

`NeuroShardSearcher` and `make_searcher` are loaded on first use. Reports and the
command line need only the interface.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrec_neuroshard.search.base import (
    SEARCHES,
    SearchConfig,
    Searcher,
    SearchResult,
)

if TYPE_CHECKING:
    from torchrec_neuroshard.search.default import NeuroShardSearcher, make_searcher

__all__ = [
    "SEARCHES",
    "NeuroShardSearcher",
    "SearchConfig",
    "SearchResult",
    "Searcher",
    "make_searcher",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torchrec_neuroshard.search import default

    return getattr(default, name)
