"""FBGEMM's fused table-batched embedding (TBE) over one table set, ready to be timed.

The only file that imports fbgemm_gpu. Shapes: `T` tables, `B` samples, `L` lookups.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy import special

from torchrec_neuroshard.errors import ConfigError, EnvironmentMismatchError
from torchrec_neuroshard.hardware.devices import (
    GPU,
    accelerator,
    cpu_name,
    is_accelerator,
)
from torchrec_neuroshard.measure.records import Fingerprint
from torchrec_neuroshard.tables.access import AccessDistribution, coprime_step
from torchrec_neuroshard.tables.table import MAX_CUDA_COLUMNS, TableConfig

try:
    import fbgemm_gpu
    from fbgemm_gpu.permute_pooled_embedding_modules_split import (
        PermutePooledEmbeddingsSplit,
    )
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
        BoundsCheckMode,
        EmbeddingLocation,
        PoolingMode,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )
except (ImportError, OSError) as error:
    raise EnvironmentMismatchError(
        f"measuring needs fbgemm_gpu, which does not import ({error}); run "
        "'neuroshard doctor' for the install recipe"
    ) from error

__all__ = [
    "BOUNDS_CHECK",
    "Arena",
    "FusedTables",
    "InputBatch",
    "InputDraws",
    "column_permutation",
    "device_fingerprint",
    "draw_inputs",
    "join_inputs",
    "permute_bags",
    "reserve_memory",
]

_OPTIMIZERS = {
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "sgd": EmbOptimType.EXACT_SGD,
    "adam": EmbOptimType.ADAM,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
}
_PRECISIONS = {"fp32": SparseType.FP32, "fp16": SparseType.FP16}
_LEARNING_RATE = 1e-6
"""Small, so that thousands of timed steps keep the weights in their usual range."""
_WEIGHT_BOUND = 0.05
"""Weights are drawn from both sides of 0: no denormals, no overflow in any layout."""
BOUNDS_CHECK = "warning"
"""How each forward checks ids: what FBGEMM does unless told, and TorchRec leaves it."""
_TAKES_HOST_BUFFERS = (
    "preallocated_host_buffers"
    in inspect.signature(SplitTableBatchedEmbeddingBagsCodegen).parameters
)
"""FBGEMM 1.6 has no such argument; its buffers are replaced afterwards."""
_FREE_SHARE = 0.9
"""Of a GPU's free memory, what weights may take: inputs and outputs need the rest."""


def device_fingerprint(device: torch.device, num_threads: int) -> Fingerprint:
    """Describe the device and libraries at hand."""
    name = cpu_name()
    if is_accelerator(device.type):
        name = accelerator(device.type).get_device_name(device)
    return Fingerprint(
        device=name,
        device_type=device.type,
        num_threads=num_threads,
        torch=torch.__version__,
        fbgemm=str(fbgemm_gpu.__version__),
    )


class Arena:
    """Memory that all table sets view one after the other.

    On a CPU the first touch of fresh pages costs more than the kernels do, so weights
    and optimizer state are cut from buffers that were touched once. On a GPU
    `reserve_memory` does the same.
    """

    def __init__(self, device: torch.device, weight_bytes: int) -> None:
        """Start without buffers; each is allocated when it is first asked for.

        Args:
            device: Where the sets will live.
            weight_bytes: Most weight bytes of a set.
        """
        self.device = device
        self.weight_bytes = weight_bytes
        self._buffers: dict[str, torch.Tensor] = {}
        self._filled: dict[str, tuple[torch.dtype, int]] = {}

    def view(self, role: str, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return the first `numel` elements of the buffer for `role`, as `dtype`.

        All types share the buffer's bytes. What was not filled as this type since it
        last served another is filled now.
        """
        num_bytes = numel * dtype.itemsize
        buffer = self._buffers.get(role)
        if buffer is None or len(buffer) < num_bytes:
            self._buffers.pop(role, None)
            self._filled.pop(role, None)
            # Full size at once: pages that are never touched cost nothing, but a
            # buffer that grows leaves holes in the heap, up to many times its size.
            buffer = torch.empty(
                max(num_bytes, self.weight_bytes),
                dtype=torch.uint8,
                device=self.device,
            )
            self._buffers[role] = buffer
        last_dtype, num_filled = self._filled.get(role, (dtype, 0))
        if last_dtype != dtype:
            num_filled = 0
        values = buffer[:num_bytes].view(dtype)
        if num_filled < numel:
            fresh = values[num_filled:]
            if role == "weights":
                fresh.uniform_(-_WEIGHT_BOUND, _WEIGHT_BOUND)
            else:
                fresh.fill_(0.1)
        self._filled[role] = (dtype, max(num_filled, numel))
        return values


def reserve_memory(device: torch.device, num_bytes: int) -> None:
    """Take the memory of all sets from a GPU once.

    The caching allocator keeps the block that is freed here and cuts every later set
    from it; without, sets of different sizes leave holes that the next one does not
    fit in.

    Args:
        device: CUDA device.
        num_bytes: Most bytes of weights and optimizer state of a set.

    Raises:
        ConfigError: The device has not that much free memory.
    """
    free, _ = accelerator(device.type).mem_get_info(device)
    if num_bytes > _FREE_SHARE * free:
        raise ConfigError(
            f"sets of up to {num_bytes / 2**30:.1f} GiB were asked for, {device} has "
            f"{free / 2**30:.1f} GiB free and inputs need some; lower --max-gib to "
            f"{_FREE_SHARE * free / 2**30:.0f} or less"
        )
    torch.empty(num_bytes, dtype=torch.uint8, device=device)


def column_permutation(
    widths: Sequence[int], device: torch.device
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what TorchRec does to the pooled outputs of column-wise tables.

    Args:
        widths: Columns of each part.
        device: Where the outputs are.

    Returns:
        A differentiable function that puts the parts into reverse order.
    """
    order = list(reversed(range(len(widths))))
    permute = PermutePooledEmbeddingsSplit(list(widths), order, device=device)

    def run(pooled_BD: torch.Tensor) -> torch.Tensor:
        permuted: torch.Tensor = permute(pooled_BD)
        return permuted

    return run


def permute_bags(
    order_T: torch.Tensor, lengths_TB: torch.Tensor, ids_L: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put the features of a jagged batch in another order, as TorchRec does.

    Args:
        order_T: Feature that comes first, second, ..., int32.
        lengths_TB: Ids of each bag.
        ids_L: Bag after bag.

    Returns:
        Lengths and ids in the new order.
    """
    lengths, ids, _ = torch.ops.fbgemm.permute_2D_sparse_data(
        order_T, lengths_TB, ids_L, None, None
    )
    return lengths, ids


@dataclass(frozen=True, slots=True)
class InputBatch:
    """Input of one pass."""

    indices_L: torch.Tensor
    offsets: torch.Tensor
    """`T * B + 1` int64."""
    weights_L: torch.Tensor | None


class InputDraws:
    """Draws batches for one table set, the lookups of all features at once.

    Hot ids are the same in every batch of a set: they depend on the tables only.
    Shapes: `F` features, `G` groups of equally likely ids of all features.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        access: Sequence[AccessDistribution],
        batch_size: int,
        device: torch.device,
    ) -> None:
        """Prepare what all batches have in common.

        Args:
            tables: Shards, each with a profile at `batch_size`.
            access: How the ids of each are drawn.
            batch_size: Samples.
            device: Where the tensors are made.
        """
        self._batch_size, self._device = batch_size, device
        self._weighted = any(t.weighted for t in tables)
        lengths, groups = [], []
        for table, distribution in zip(tables, access, strict=True):
            profile = table.profile_at(batch_size)
            mean = profile.pooling_factor / table.num_features
            cumulative = length_distribution(mean, profile.pooling_std)
            lengths += [cumulative] * table.num_features
            groups += [_id_groups(distribution, table)] * table.num_features
        self._num_features = len(lengths)
        self._lengths = _Choices(lengths, device)
        self._groups = _Choices([g.upper for g in groups], device)
        values = np.concatenate([g.values for g in groups], axis=1)
        self._rank_at_0_G, self._ids_per_share_G = torch.from_numpy(values).to(device)
        rows = np.concatenate([g.rows for g in groups], axis=1)
        self._rows_G, self._step_G, self._shift_G = torch.from_numpy(rows).to(device)

    def draw(self, seed: Sequence[int]) -> InputBatch:
        """Draw one batch; the draws differ with the seed."""
        device, batch_size = self._device, self._batch_size
        generator = torch.Generator(device=device)
        draw = int(np.random.default_rng(list(seed)).integers(2**62))
        generator.manual_seed(draw)

        def uniform(count: int) -> torch.Tensor:
            return torch.rand(
                count, generator=generator, device=device, dtype=torch.float64
            )

        feature = torch.arange(self._num_features, device=device)
        bags = self._num_features * batch_size
        of_bag = feature.repeat_interleave(batch_size, output_size=bags)
        lengths = self._lengths.pick(uniform(bags), of_bag)
        lengths -= self._lengths.first.index_select(0, of_bag)
        offsets = torch.zeros(bags + 1, dtype=torch.int64, device=device)
        torch.cumsum(lengths, 0, out=offsets[1:])
        count = int(offsets[-1])  # the only wait for the device
        per_feature = offsets[::batch_size].diff()
        of_lookup = feature.repeat_interleave(per_feature, output_size=count)
        draws = uniform(count)
        group = self._groups.pick(draws, of_lookup)
        draws *= self._ids_per_share_G.index_select(0, group)
        draws += self._rank_at_0_G.index_select(0, group)
        # Hot ids lie anywhere in the table: a fixed permutation of the rows.
        ids = draws.long().clamp_(min=0)
        ids *= self._step_G.index_select(0, group)
        ids += self._shift_G.index_select(0, group)
        ids %= self._rows_G.index_select(0, group)
        weights = (
            torch.rand(count, generator=generator, device=device)
            if self._weighted
            else None
        )
        return InputBatch(ids, offsets, weights)


class _Choices:
    """One discrete distribution per feature, picked from for many draws at once."""

    def __init__(
        self, cumulative: Sequence[npt.NDArray[np.float64]], device: torch.device
    ) -> None:
        """Lay the cumulative probabilities of all features one after the other."""
        bounds = np.concatenate([c + f for f, c in enumerate(cumulative)])
        ends = np.cumsum([len(c) for c in cumulative])
        self._bounds = torch.from_numpy(bounds).to(device)
        self._last = torch.from_numpy(ends - 1).to(device)
        self.first = torch.from_numpy(ends - [len(c) for c in cumulative]).to(device)
        """Index of each feature's first bound, `F`."""

    def pick(self, draws: torch.Tensor, feature: torch.Tensor) -> torch.Tensor:
        """Return where each draw (0 to 1) falls among its feature's."""
        found = torch.bucketize(draws + feature, self._bounds, right=True)
        return torch.minimum(found, self._last.index_select(0, feature))


@dataclass(frozen=True, slots=True)
class _IdGroups:
    """An `AccessDistribution` as arrays, `G` groups."""

    upper: npt.NDArray[np.float64]
    """Cumulative share of the lookups, `G`."""
    values: npt.NDArray[np.float64]
    """`2 x G`: intercept and slope of an id's rank over the draw (0 to 1) that picks
    it."""
    rows: npt.NDArray[np.int64]
    """`3 x G`: rows of the table, step and shift of their permutation."""


def _id_groups(distribution: AccessDistribution, table: TableConfig) -> _IdGroups:
    share = np.asarray(distribution.share)
    num_ids = np.asarray(distribution.num_ids)
    upper = np.cumsum(share)
    below = upper - share
    upper[-1] = 1.0
    ids_per_share = num_ids / share
    rank_at_0 = np.cumsum(num_ids) - num_ids - below * ids_per_share
    rows = table.num_embeddings
    permutation = np.array([rows, coprime_step(rows), rows // 3])
    return _IdGroups(
        upper,
        np.stack([rank_at_0, ids_per_share]),
        permutation[:, None].repeat(len(share), axis=1),
    )


def draw_inputs(
    tables: Sequence[TableConfig],
    access: Sequence[AccessDistribution],
    batch_size: int,
    seed: Sequence[int],
    device: torch.device,
) -> InputBatch:
    """Draw the ids that one batch reads; see `InputDraws`."""
    return InputDraws(tables, access, batch_size, device).draw(seed)


def join_inputs(batches: Sequence[InputBatch]) -> InputBatch:
    """Put inputs of the same samples together, one table's features after another's.

    Args:
        batches: Of kernels that hold other tables; with weights all or none.
    """
    weights = [b.weights_L for b in batches if b.weights_L is not None]
    ends = itertools.accumulate((len(b.indices_L) for b in batches), initial=0)
    return InputBatch(
        torch.cat([b.indices_L for b in batches]),
        torch.cat(
            [
                batches[0].offsets[:1],
                *(b.offsets[1:] + e for b, e in zip(batches, ends, strict=False)),
            ]
        ),
        torch.cat(weights) if weights else None,
    )


@functools.lru_cache(maxsize=4096)
def length_distribution(mean: float, std: float) -> npt.NDArray[np.float64]:
    """Return how likely a bag is to hold at most 0, 1, 2, ... ids.

    The same distributions as `access.draw_lengths`, cut off where next to nothing is
    left.

    Args:
        mean: Mean length.
        std: Standard deviation; 0 gives equal lengths, up to that of a Poisson
            distribution that one, above it a negative binomial one.
    """
    variance = std**2
    if variance <= 0:
        whole = int(mean)
        steps = np.zeros(whole + 2)
        steps[whole:] = (1.0 - (mean - whole), 1.0)
        return steps
    longest = int(mean + 20 * max(std, math.sqrt(mean))) + 20
    lengths = np.arange(longest + 1, dtype=np.float64)
    if variance <= mean * 1.05:
        cumulative = special.pdtr(lengths, mean)
    else:
        success = mean / variance
        cumulative = special.betainc(
            mean * success / (1 - success), lengths + 1, success
        )
    cumulative[-1] = 1.0
    return np.asarray(cumulative, dtype=np.float64)


def _check_for_gpu(
    tables: Sequence[TableConfig], optimizer: str, data_type: str
) -> None:
    """Refuse what FBGEMM's CUDA kernels fail on at the first pass.

    Raises:
        ConfigError: Too wide a table, or Adam over other weights than fp32.
    """
    if optimizer == "adam" and data_type != "fp32":
        raise ConfigError(
            f"cuda kernels for adam over {data_type} weights fail in FBGEMM 1.8; use "
            "fp32 or another optimizer"
        )
    for table in tables:
        if table.embedding_dim > MAX_CUDA_COLUMNS:
            raise ConfigError(
                f"table '{table.name}' has {table.embedding_dim:,} columns, cuda "
                f"kernels take at most {MAX_CUDA_COLUMNS:,}; split it by columns"
            )


class FusedTables:
    """One fused TBE that holds a table set."""

    def __init__(
        self,
        tables: Sequence[TableConfig],
        device: torch.device,
        arena: Arena | None = None,
        bounds_check: str = BOUNDS_CHECK,
    ) -> None:
        """Build the kernel over the arena's memory.

        Args:
            tables: Shards; all of one optimizer, weight type and weightedness.
            device: CPU or CUDA device.
            arena: Memory to view (CPU only); None allocates.
            bounds_check: How each forward checks ids, `warning` or `none`.

        Raises:
            ConfigError: The set mixes optimizers, types or weighted lookups, or the
                device's kernels lack one of them, or a table's width.
        """
        kinds = {(t.optimizer, t.data_type, t.weighted) for t in tables}
        if len(kinds) != 1:
            raise ConfigError(
                "one fused kernel has one optimizer, weight type and weighting, got "
                f"{sorted(kinds)}"
            )
        optimizer, data_type, _ = kinds.pop()
        if data_type not in _PRECISIONS or (
            device.type == "cpu" and optimizer == "adam"
        ):
            raise ConfigError(
                f"{device.type} kernels for {optimizer} over {data_type} weights "
                "cannot be measured; use fp32 or fp16 and, on a CPU, not adam"
            )
        if device.type == GPU:
            _check_for_gpu(tables, optimizer, data_type)
        dtype = torch.float32 if data_type == "fp32" else torch.float16
        on_cpu = device.type == "cpu"
        options: dict[str, Any] = {}
        buffers: dict[str, torch.Tensor] = {}
        if on_cpu and arena is not None:
            weights = sum(t.num_embeddings * t.embedding_dim for t in tables)
            rows = sum(t.num_embeddings for t in tables)
            buffers["weights"] = arena.view("weights", dtype, weights)
            if optimizer == "rowwise_adagrad":
                buffers["momentum1"] = arena.view("momentum", torch.float32, rows)
            elif optimizer == "adagrad":
                buffers["momentum1"] = arena.view("momentum", torch.float32, weights)
            if _TAKES_HOST_BUFFERS:
                options["preallocated_host_buffers"] = buffers
        location = EmbeddingLocation.HOST if on_cpu else EmbeddingLocation.DEVICE
        compute = ComputeDevice.CPU if on_cpu else ComputeDevice.CUDA
        feature_table_map = [
            i for i, t in enumerate(tables) for _ in range(t.num_features)
        ]
        logging.disable(logging.INFO)
        try:
            self.module = SplitTableBatchedEmbeddingBagsCodegen(
                [
                    (t.num_embeddings, t.embedding_dim, location, compute)
                    for t in tables
                ],
                feature_table_map=feature_table_map,
                optimizer=_OPTIMIZERS[optimizer],
                weights_precision=_PRECISIONS[data_type],
                output_dtype=SparseType.FP32,
                pooling_mode=PoolingMode.SUM,
                bounds_check_mode=BoundsCheckMode[bounds_check.upper()],
                learning_rate=_LEARNING_RATE,
                eps=1e-8,
                device=device,
                **options,
            )
        finally:
            logging.disable(logging.NOTSET)
        if not _TAKES_HOST_BUFFERS:
            for role, buffer in buffers.items():
                getattr(self.module, f"{role}_host").data = buffer
        if not on_cpu:
            self.module.weights_dev.data.uniform_(-_WEIGHT_BOUND, _WEIGHT_BOUND)
        self.output_dim = sum(t.embedding_dim * t.num_features for t in tables)

    def forward(self, batch: InputBatch) -> torch.Tensor:
        """Return the `B x D` pooled embeddings."""
        output: torch.Tensor = self.module(
            batch.indices_L, batch.offsets, per_sample_weights=batch.weights_L
        )
        return output

    def split_weights(self) -> list[torch.Tensor]:
        """Each table's weights, viewed."""
        weights: list[torch.Tensor] = self.module.split_embedding_weights()
        return weights
