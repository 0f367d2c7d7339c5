"""Learned and physical models of what sharded embeddings cost."""

from torchrec_neuroshard.cost_models.base import CommsModel, CostModel
from torchrec_neuroshard.cost_models.bundle import load_bundle
from torchrec_neuroshard.cost_models.comms import (
    BandwidthCommsModel,
    LearnedCommsModel,
)
from torchrec_neuroshard.cost_models.comms_published import (
    PublishedCommsModel,
    published_comms_model,
)
from torchrec_neuroshard.cost_models.compute import (
    ConcurrentCostModel,
    NeuralCostModel,
    PhysicalCostModel,
)
from torchrec_neuroshard.cost_models.loading import (
    load_comms_model,
    load_cost_model,
)

__all__ = [
    "BandwidthCommsModel",
    "CommsModel",
    "ConcurrentCostModel",
    "CostModel",
    "LearnedCommsModel",
    "NeuralCostModel",
    "PhysicalCostModel",
    "PublishedCommsModel",
    "load_bundle",
    "load_comms_model",
    "load_cost_model",
    "published_comms_model",
]
