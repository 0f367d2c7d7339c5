"""NeuroShard's cost models (arXiv 2305.01868), trained by `benchmarks/papers`.

One net predicts compute. It encodes the 20 features of each table, adds up the
encodings of a rank's tables, and predicts forward + backward from the sum. Two nets per
number of ranks predict the all-to-all, one forward and one backward. They see the sum
of widths on every rank and return every rank's time. The forward net also sees when
each rank starts. All nets are trained on raw milliseconds.

The released nets know one batch size, 65,536. To predict a batch of `B` samples,
`pooling_factor` is the lookups divided by 65,536, and sums of widths are multiplied by
B / 65,536. Lookups and bytes are then right, and at 65,536 samples every input equals
the paper's.

The paper's features do not describe the batch size otherwise, the spread of bag
lengths, or features that share a table. Nor do they describe optimizer, weight type and
weighted lookups, and the training data has one kind of each. If several features read
a table, its pooling factor counts the lookups of all of them.

Shapes: `N` shards, `S` sets or samples, `F` = 20 features, `E` = 32 encoding values,
`W` ranks, `I` inputs of a comms net (2W forward, W backward).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from torchrec_neuroshard.bundles.descriptions import Description
from torchrec_neuroshard.bundles.folders import PRETRAINED
from torchrec_neuroshard.bundles.format import BundleFormat
from torchrec_neuroshard.errors import BundleMismatchError
from torchrec_neuroshard.measure.records import Fingerprint
from torchrec_neuroshard.papers.common import PAPER_BATCH_SIZE, layers
from torchrec_neuroshard.tables.access import NUM_COUNT_BINS
from torchrec_neuroshard.tables.table import TableConfig

Floats = npt.NDArray[np.float64]

PAPER_FEATURES: tuple[str, ...] = tuple(
    sorted(
        [*(f"bin_{j}" for j in range(NUM_COUNT_BINS)), "dim", "pooling_factor", "row"]
    )
)
"""Columns of the features. Names are sorted as strings: bin_10 is before bin_2.

`bin_j` is the share of distinct ids that occur 2**(j-1)+1 to 2**j times. `dim` is the
width, `pooling_factor` the mean lookups per sample, `row` the rows, at least 100."""

_MIN_ROWS = 100
_FORMAT_VERSION = 2


# Inputs of the nets.


def shard_features(
    tables: Iterable[TableConfig], batch_size: int
) -> npt.NDArray[np.float32]:
    """Return the paper's features of shards.

    Args:
        tables: Shards, or whole tables.
        batch_size: Samples over all ranks.

    Returns:
        `N x F` float32, columns in `PAPER_FEATURES` order, not standardised.
    """
    rows = []
    for table in tables:
        profile = table.profile_at(batch_size)
        distinct = max(profile.num_distinct, 1e-9)
        values = {
            f"bin_{j}": n / distinct for j, n in enumerate(profile.access_histogram)
        }
        values["dim"] = table.embedding_dim
        values["pooling_factor"] = profile.num_lookups / PAPER_BATCH_SIZE
        values["row"] = max(_MIN_ROWS, table.num_embeddings)
        rows.append([values[name] for name in PAPER_FEATURES])
    return np.array(rows, dtype=np.float32).reshape(-1, len(PAPER_FEATURES))


def columns_in_paper_batch(columns: npt.ArrayLike, batch_size: int) -> Floats:
    """Return sums of widths that move the same bytes at 65,536 samples."""
    scaled: Floats = np.asarray(columns, np.float64) * (batch_size / PAPER_BATCH_SIZE)
    return scaled


# The nets.


class ComputeNet(nn.Module):
    """Net for forward + backward of one fused kernel: 8,993 parameters."""

    mean_F: torch.Tensor
    std_F: torch.Tensor

    def __init__(self) -> None:
        """Make the layers; weights are random until trained or loaded."""
        super().__init__()
        self.register_buffer("mean_F", torch.zeros(len(PAPER_FEATURES)))
        self.register_buffer("std_F", torch.ones(len(PAPER_FEATURES)))
        self.encoder = layers([len(PAPER_FEATURES), 128, 32], relu_last=True)
        self.head = layers([32, 64, 1])

    def encode(self, features_NF: torch.Tensor) -> torch.Tensor:
        """Return the encodings of shards, `N x E`; a set's encoding is their sum."""
        encoded: torch.Tensor = self.encoder((features_NF - self.mean_F) / self.std_F)
        return encoded

    def cost(self, sums_SE: torch.Tensor) -> torch.Tensor:
        """Return milliseconds per set, `S`; can be negative, as in the paper."""
        cost: torch.Tensor = self.head(sums_SE)[:, 0]
        return cost


class RankTimesNet(nn.Module):
    """Net for the time of every rank in one all-to-all of `W` ranks."""

    mean_I: torch.Tensor
    std_I: torch.Tensor

    def __init__(self, num_inputs: int, world_size: int) -> None:
        """Make the layers.

        Args:
            num_inputs: Forward: `2W`, sums of widths and then start offsets in ms.
                Backward: `W`, sums of widths.
            world_size: Number of ranks, `W`.
        """
        super().__init__()
        self.register_buffer("mean_I", torch.zeros(num_inputs))
        self.register_buffer("std_I", torch.ones(num_inputs))
        self.layers = layers([num_inputs, 128, 64, 32, 16, world_size])

    def forward(self, inputs_SI: torch.Tensor) -> torch.Tensor:
        """Return milliseconds from each rank's start to its end, `S x W`."""
        out: torch.Tensor = self.layers((inputs_SI - self.mean_I) / self.std_I)
        return out


@dataclass(frozen=True, slots=True)
class CommsNets:
    """All-to-all nets for one number of ranks."""

    forward: RankTimesNet
    backward: RankTimesNet

    @classmethod
    def fresh(cls, world_size: int) -> CommsNets:
        """Return untrained nets."""
        return cls(
            RankTimesNet(2 * world_size, world_size),
            RankTimesNet(world_size, world_size),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class NetsInfo:
    """Description of saved nets."""

    format_version: int = _FORMAT_VERSION
    feature_names: tuple[str, ...] = PAPER_FEATURES
    batch_size: int = PAPER_BATCH_SIZE
    world_sizes: tuple[int, ...]
    fingerprint: Fingerprint
    """Hardware on which the compute records were measured."""
    trained_on: Mapping[str, Any]
    """Records, settings and reports behind the weights."""

    def __post_init__(self) -> None:
        if len(set(self.world_sizes)) < len(self.world_sizes):
            raise ValueError(f"world_sizes repeat themselves: {self.world_sizes!s:.60}")


@dataclass(frozen=True, kw_only=True, slots=True)
class NeuroShardModels:
    """NeuroShard's nets for one device."""

    info: NetsInfo
    compute: ComputeNet
    comms: Mapping[int, CommsNets]
    """World size -> nets, only for measured sizes."""


# Files: weights with statistics, a description, a card.


class AllNets(nn.ModuleDict):
    """Nets of all numbers of ranks, with the names in the weights file."""

    def __init__(self, compute: ComputeNet, comms: Mapping[int, CommsNets]) -> None:
        super().__init__({"compute": compute})
        self.compute, self.comms = compute, dict(comms)
        for world_size, pair in comms.items():
            self[f"forward_{world_size}"] = pair.forward
            self[f"backward_{world_size}"] = pair.backward


def _check(path: Path, data: Mapping[str, Any]) -> None:
    expected = (_FORMAT_VERSION, list(PAPER_FEATURES), PAPER_BATCH_SIZE)
    names = ("format_version", "feature_names", "batch_size")
    if tuple(data.get(name) for name in names) != expected:
        raise BundleMismatchError(
            f"{path} has version {data.get('format_version')} or other features; this "
            f"package reads version {_FORMAT_VERSION}. Train the nets again"
        )


FORMAT = BundleFormat(
    description=Description(
        info_type=NetsInfo,
        check=_check,
        info_name="neuroshard.json",
        missing="{folder} has no nets of NeuroShard: {file} is missing. Train them "
        "with benchmarks/papers/train.py",
    ),
    make_network=lambda info: AllNets(
        ComputeNet(), {w: CommsNets.fresh(w) for w in info.world_sizes}
    ),
)


def load_models(folder: str | Path) -> NeuroShardModels:
    """Return a folder's nets, after checking every file.

    Raises:
        BundleCorruptError: A file is missing, truncated or damaged.
        BundleMismatchError: The nets have another version or other features.
    """
    nets, info = FORMAT.load(folder)
    return NeuroShardModels(info=info, compute=nets.compute, comms=nets.comms)


def shipped_models(hardware: str) -> NeuroShardModels | None:
    """Return the nets shipped for a device; None if there are none."""
    for folder in filter(
        FORMAT.description.is_in, sorted((PRETRAINED / "neuroshard").glob("*"))
    ):
        if FORMAT.description.read_info(folder).fingerprint.device == hardware:
            return load_models(folder)
    return None
