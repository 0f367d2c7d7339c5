"""NeuroShard's own cost models (arXiv 2305.01868), trained by `benchmarks/papers`.

One net for compute: each table's 20 features are encoded, the encodings of a rank's
tables are summed, and a head gives forward + backward together. Two nets per number of
ranks for the all-to-all: they see every rank's sum of widths (forward also when each
rank starts) and give every rank's time. All are trained on raw milliseconds.

The released nets know one batch size, 65,536. Here a batch of `B` samples is put in
its terms: `pooling_factor` is the lookups over 65,536, and sums of widths are
multiplied by B / 65,536, so that lookups and bytes are right and at 65,536 samples
every input is the paper's. What the features leave out is left out here too: batch size
otherwise, bag-length spread, features that share a table; optimizer, weight type and
weighted lookups, of which one kind is trained on.

The pooling factor of a table read by several features counts the lookups of all of
them.

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

from torchrec_neuroshard.bundles.find import PRETRAINED
from torchrec_neuroshard.bundles.format import BundleFormat
from torchrec_neuroshard.errors import BundleMismatchError
from torchrec_neuroshard.measure.records import Fingerprint
from torchrec_neuroshard.papers.common import PAPER_BATCH_SIZE, layers
from torchrec_neuroshard.tables.access import NUM_COUNT_BINS
from torchrec_neuroshard.tables.table import TableConfig

__all__ = [
    "PAPER_FEATURES",
    "PAPER_WIDTHS",
    "CommsNets",
    "ComputeNet",
    "NeuroShardModels",
    "RankTimesNet",
    "columns_in_paper_batch",
    "load_models",
    "save_models",
    "shard_features",
    "shipped_models",
]

Floats = npt.NDArray[np.float64]

PAPER_WIDTHS = (128, 64, 32, 16, 8, 4)
"""That NeuroShard augments every table to: 856 tables become 5,136."""

PAPER_FEATURES: tuple[str, ...] = tuple(
    sorted(
        [*(f"bin_{j}" for j in range(NUM_COUNT_BINS)), "dim", "pooling_factor", "row"]
    )
)
"""Columns of the features: keys in the order of sorted strings, bin_10 before bin_2.

`bin_j` is the share of the distinct ids that occur 2**(j-1)+1 to 2**j times, `dim` the
width, `pooling_factor` the mean lookups per sample, `row` the rows, at least 100."""

_MIN_ROWS = 100
_FORMAT_VERSION = 2


# What the nets see.


def shard_features(
    tables: Iterable[TableConfig], batch_size: int
) -> npt.NDArray[np.float32]:
    """Return the paper's features of shards.

    Args:
        tables: Shards, or tables whole.
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
    """Return sums of widths that at 65,536 samples are as many bytes."""
    scaled: Floats = np.asarray(columns, np.float64) * (batch_size / PAPER_BATCH_SIZE)
    return scaled


# The nets.


class ComputeNet(nn.Module):
    """Forward + backward of one fused kernel over a set of shards: 8,993 parameters."""

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
        """Encode shards, `N x E`; a set's encoding is the sum."""
        encoded: torch.Tensor = self.encoder((features_NF - self.mean_F) / self.std_F)
        return encoded

    def cost(self, sums_SE: torch.Tensor) -> torch.Tensor:
        """Milliseconds of sets, `S`; unbounded below, as in the paper."""
        cost: torch.Tensor = self.head(sums_SE)[:, 0]
        return cost

    def forward(
        self, features_NF: torch.Tensor, set_ids_N: torch.Tensor, num_sets: int
    ) -> torch.Tensor:
        """Milliseconds of sets given by their shards, `S`."""
        encoded = self.encode(features_NF)
        sums = encoded.new_zeros(num_sets, encoded.shape[1])
        return self.cost(sums.index_add(0, set_ids_N, encoded))


class RankTimesNet(nn.Module):
    """Time of every rank in one all-to-all of `W` ranks."""

    mean_I: torch.Tensor
    std_I: torch.Tensor

    def __init__(self, num_inputs: int, world_size: int) -> None:
        """Make the layers.

        Args:
            num_inputs: `2W` forward (sums of widths, then start offsets in ms), `W`
                backward (sums of widths).
            world_size: `W`.
        """
        super().__init__()
        self.register_buffer("mean_I", torch.zeros(num_inputs))
        self.register_buffer("std_I", torch.ones(num_inputs))
        self.layers = layers([num_inputs, 128, 64, 32, 16, world_size])

    def forward(self, inputs_SI: torch.Tensor) -> torch.Tensor:
        """Milliseconds from each rank's own start until it is through, `S x W`."""
        out: torch.Tensor = self.layers((inputs_SI - self.mean_I) / self.std_I)
        return out


@dataclass(frozen=True, slots=True)
class CommsNets:
    """The two nets of one number of ranks."""

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
class NeuroShardModels:
    """All nets of one kind of hardware."""

    fingerprint: Fingerprint
    """Where the compute records were measured."""
    compute: ComputeNet
    comms: Mapping[int, CommsNets]
    """World size -> nets; only the sizes that were measured."""
    trained_on: Mapping[str, Any]
    """Records, settings and reports behind the weights."""
    card: str = ""
    """What the card says, Markdown."""


# On disk: weights and statistics, a description, a card.


@dataclass(frozen=True, kw_only=True, slots=True)
class _Info:
    format_version: int = _FORMAT_VERSION
    feature_names: tuple[str, ...] = PAPER_FEATURES
    batch_size: int = PAPER_BATCH_SIZE
    world_sizes: tuple[int, ...]
    fingerprint: Fingerprint
    trained_on: Mapping[str, Any]

    def __post_init__(self) -> None:
        if len(set(self.world_sizes)) < len(self.world_sizes):
            raise ValueError(f"world_sizes repeat themselves: {self.world_sizes!s:.60}")


class _AllNets(nn.ModuleDict):
    """The nets of all numbers of ranks, named as in the file of weights."""

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
            f"{path} has version {data.get('format_version')} or other features than "
            f"this package, which reads version {_FORMAT_VERSION}; train again"
        )


_FORMAT = BundleFormat(
    info_type=_Info,
    make_network=lambda info: _AllNets(
        ComputeNet(), {w: CommsNets.fresh(w) for w in info.world_sizes}
    ),
    check=_check,
    info_name="neuroshard.json",
    missing="{folder} holds no nets of NeuroShard (no {file}); train them with "
    "benchmarks/papers/train.py",
)


def save_models(folder: str | Path, models: NeuroShardModels) -> None:
    """Write all nets into a folder; each file appears whole or not at all."""
    info = _Info(
        world_sizes=tuple(sorted(models.comms)),
        fingerprint=models.fingerprint,
        trained_on=dict(models.trained_on),
    )
    _FORMAT.save(folder, _AllNets(models.compute, models.comms), info, models.card)


def load_models(folder: str | Path) -> NeuroShardModels:
    """Load what `save_models` wrote and check all of it.

    Raises:
        BundleCorruptError: A file is missing, truncated or damaged.
        BundleMismatchError: It is of another version or other features.
    """
    nets, info = _FORMAT.load(folder)
    card = Path(folder) / _FORMAT.card_name
    return NeuroShardModels(
        fingerprint=info.fingerprint,
        compute=nets.compute,
        comms=nets.comms,
        trained_on=info.trained_on,
        card=card.read_text("utf-8", "replace") if card.is_file() else "",
    )


def shipped_models(hardware: str) -> NeuroShardModels | None:
    """Load the nets that come with the package for a device, if there are any."""
    for folder in filter(_FORMAT.is_in, sorted((PRETRAINED / "neuroshard").glob("*"))):
        if _FORMAT.read_info(folder).fingerprint.device == hardware:
            return load_models(folder)
    return None
