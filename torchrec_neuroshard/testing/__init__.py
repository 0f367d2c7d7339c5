"""Reusable test kit: an exact cost model and contract cases."""

from torchrec_neuroshard.testing.analytic import AnalyticCommsModel, AnalyticCostModel

__all__ = ["AnalyticCommsModel", "AnalyticCostModel"]
