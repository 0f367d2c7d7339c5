"""Searches over sharding types, kernels, column splits and ranks."""

from __future__ import annotations

import importlib
import inspect

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
    "default": ("search.default", "NeuroShardSearcher"),
    "autoshard": ("papers.autoshard", "AutoShardSearcher"),
    "dreamshard": ("papers.dreamshard", "DreamShardSearcher"),
    "neuroshard": ("papers.neuroshard", "PaperSearcher"),
}
"""Name -> module in this package and class. They are imported on request,
since `papers` is a layer above this one."""


def make_searcher(search: str | SearchConfig | Searcher) -> Searcher:
    """Return the search for a name, for settings, or a given search itself.

    Raises:
        ConfigError: The name is unknown, or the search takes other arguments than
            `Searcher.search`.
    """
    if isinstance(search, Searcher):
        try:
            inspect.signature(search.search).bind(None, None)
        except TypeError as error:
            raise ConfigError(
                f"search '{search.name}' takes other arguments than (task, simulator): "
                f"declare {type(search).__name__}.search(self, task, simulator). "
                "simulator.cost_model and simulator.comms_model are the models"
            ) from error
        return search
    if isinstance(search, SearchConfig):
        return NeuroShardSearcher(search)
    if search not in SEARCHES:
        raise ConfigError(
            f"unknown search '{search}'; one of {', '.join(sorted(SEARCHES))}, or pass "
            "a SearchConfig or a Searcher"
        )
    module, name = SEARCHES[search]
    package = __name__.partition(".")[0]
    made = getattr(importlib.import_module(f"{package}.{module}"), name)()
    assert isinstance(made, Searcher)
    return made
