"""Reusable test kit: exact cost models, and contracts for models and searches.

A contract is a class of cases. Derive from it, say how the thing under test is made,
and pytest (or any runner) finds what breaks the interface's promises:

    class TestMySearcher(SearcherContract):
        def make_searcher(self, seed: int) -> Searcher:
            return MySearcher(seed)
"""

from torchrec_neuroshard.testing.analytic import AnalyticCommsModel, AnalyticCostModel
from torchrec_neuroshard.testing.comms_model_contract import CommsModelContract
from torchrec_neuroshard.testing.cost_model_contract import CostModelContract
from torchrec_neuroshard.testing.searcher_contract import SearcherContract

__all__ = [
    "AnalyticCommsModel",
    "AnalyticCostModel",
    "CommsModelContract",
    "CostModelContract",
    "SearcherContract",
]
