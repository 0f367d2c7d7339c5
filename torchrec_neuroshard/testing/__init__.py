"""Test kit for your own cost models and searches.

A contract is a class of test cases that every implementation of an interface must pass.
Derive from it and say how your object is made. Pytest, or any other runner, then runs
the cases:

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
