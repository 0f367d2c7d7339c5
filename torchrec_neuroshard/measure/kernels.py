"""FBGEMM's fused table-batched embedding (TBE) with a table set, ready to be timed.

This is the only file that imports fbgemm_gpu.

Shapes: `T` tables, `B` samples, `L` lookups.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from torchrec_neuroshard.errors import ConfigError, EnvironmentMismatchError
from torchrec_neuroshard.hardware.device_types import GPU, is_accelerator
from torchrec_neuroshard.hardware.devices import accelerator, cpu_name
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
        f"measuring needs fbgemm_gpu, but importing it failed ({error}); run "
        "'neuroshard doctor' to see how to install it"
    ) from error

_OPTIMIZERS = {
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "sgd": EmbOptimType.EXACT_SGD,
    "adam": EmbOptimType.ADAM,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
}
_PRECISIONS = {"fp32": SparseType.FP32, "fp16": SparseType.FP16}
_LEARNING_RATE = 1e-6
"""Small, so that weights stay in their usual range over thousands of timed steps."""
_WEIGHT_BOUND = 0.05
"""Weights are drawn between minus and plus this: no denormals, no overflow."""
_DRAWN_WEIGHTS = 2**22
"""Drawn weights of a CPU; the others repeat them."""
BOUNDS_CHECK = "warning"
"""How each forward checks ids: FBGEMM's default, which TorchRec keeps."""
_TAKES_HOST_BUFFERS = (
    "preallocated_host_buffers"
    in inspect.signature(SplitTableBatchedEmbeddingBagsCodegen).parameters
)
"""FBGEMM 1.6 lacks this argument; there, buffers are replaced afterwards."""
_FREE_SHARE = 0.9
"""Share of a GPU's free memory for weights; inputs and outputs need the rest."""


def device_fingerprint(device: torch.device, num_threads: int) -> Fingerprint:
    """Return the fingerprint of this process's device and libraries."""
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
    """CPU memory that all table sets use, one after the other.

    The first touch of fresh pages costs more than the kernels. Therefore weights and
    optimizer state are slices of buffers that were touched before. On a GPU,
    `reserve_memory` has the same purpose.
    """

    def __init__(self, weight_bytes: int) -> None:
        """Start without buffers; each is allocated at its first use.

        Args:
            weight_bytes: Most weight bytes of a set.
        """
        self.weight_bytes = weight_bytes
        self._buffers: dict[str, torch.Tensor] = {}
        self._filled: dict[str, tuple[torch.dtype, int]] = {}

    def buffers(
        self, tables: Sequence[TableConfig], optimizer: str, data_type: str
    ) -> dict[str, torch.Tensor]:
        """Return the buffers for weights and state of FBGEMM's kernel."""
        num_weights = sum(t.num_embeddings * t.embedding_dim for t in tables)
        num_states = {
            "rowwise_adagrad": sum(t.num_embeddings for t in tables),
            "adagrad": num_weights,
        }
        dtype = _PRECISIONS[data_type].as_dtype()
        found = {"weights": self.view("weights", dtype, num_weights)}
        if optimizer in num_states:
            size = num_states[optimizer]
            found["momentum1"] = self.view("momentum1", torch.float32, size)
        return found

    def view(self, role: str, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return the first `numel` elements of the buffer for `role`, as `dtype`.

        All types share the buffer's bytes. Elements are filled with values now, unless
        they were already filled since the buffer got this type.
        """
        num_bytes = numel * dtype.itemsize
        buffer = self._buffers.get(role)
        if buffer is None or len(buffer) < num_bytes:
            self._buffers.pop(role, None)
            self._filled.pop(role, None)
            # Allocate the full size at once: untouched pages cost nothing, but a
            # growing buffer leaves holes in the heap, up to many times its size.
            size = max(num_bytes, self.weight_bytes)
            buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
            self._buffers[role] = buffer
        last_dtype, num_filled = self._filled.get(role, (dtype, 0))
        if last_dtype != dtype:
            num_filled = 0
        values = buffer[:num_bytes].view(dtype)
        if num_filled < numel:
            fresh = values[num_filled:]
            if role == "weights":
                _fill_with_weights(fresh)
            else:
                fresh.fill_(0.1)
        self._filled[role] = (dtype, max(num_filled, numel))
        return values


def _fill_with_weights(values: torch.Tensor) -> None:
    """Fill with random weights, repeated: copying is ten times as fast as drawing."""
    drawn = values[:_DRAWN_WEIGHTS].uniform_(-_WEIGHT_BOUND, _WEIGHT_BOUND)
    for start in range(_DRAWN_WEIGHTS, len(values), _DRAWN_WEIGHTS):
        part = values[start : start + _DRAWN_WEIGHTS]
        part.copy_(drawn[: len(part)])


def reserve_memory(device: torch.device, num_bytes: int) -> None:
    """Allocate the memory of the largest set on a GPU once, and free it.

    The caching allocator keeps the block and splits it for every later set. Otherwise
    sets of different sizes would leave holes too small for the next set.

    Args:
        device: CUDA device.
        num_bytes: Most bytes of weights and optimizer state of a set.

    Raises:
        ConfigError: The device has too little free memory.
    """
    free, _ = accelerator(device.type).mem_get_info(device)
    if num_bytes > _FREE_SHARE * free:
        raise ConfigError(
            f"sets may have up to {num_bytes / 2**30:.1f} GiB, but {device} has "
            f"{free / 2**30:.1f} GiB free and inputs need some of it; lower --max-gib "
            f"to {_FREE_SHARE * free / 2**30:.0f} or less"
        )
    torch.empty(num_bytes, dtype=torch.uint8, device=device)


def column_permutation(
    widths: Sequence[int], device: torch.device
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return TorchRec's permutation of column-wise tables' pooled outputs.

    Args:
        widths: Columns of each part.
        device: Device of the outputs.

    Returns:
        A differentiable function that reverses the order of the parts.
    """
    order = list(reversed(range(len(widths))))
    permute: Callable[[torch.Tensor], torch.Tensor] = PermutePooledEmbeddingsSplit(
        list(widths), order, device=device
    )
    return permute


@dataclass(frozen=True, slots=True)
class InputBatch:
    """Input of one pass."""

    indices_L: torch.Tensor
    offsets: torch.Tensor
    """`T * B + 1` int64."""
    weights_L: torch.Tensor | None


def draw_inputs(
    tables: Sequence[TableConfig],
    access: Sequence[AccessDistribution],
    batch_size: int,
    seed: Sequence[int],
    device: torch.device,
) -> InputBatch:
    """Draw the input of one batch, on the device.

    Lengths and ids have the same distributions as in `access.draw_lengths` and
    `access.draw_ids`. Those use NumPy, which would take minutes for a GPU's largest
    sets.

    Args:
        tables: Shards, each with a profile at `batch_size`.
        access: Distribution of each shard's ids.
        batch_size: Samples.
        seed: Seed of the batch; equal seeds give equal batches.
        device: Device of the tensors.
    """
    generator = torch.Generator(device=device)
    generator.manual_seed(int(np.random.default_rng(list(seed)).integers(2**62)))
    lengths = [_draw_lengths(table, batch_size, generator) for table in tables]
    counts = torch.stack([own.sum() for own in lengths]).tolist()  # waits for a GPU
    ids = [
        _draw_ids(distribution, table.num_embeddings, count, generator)
        for table, distribution, count in zip(tables, access, counts, strict=True)
    ]
    weights = None
    if any(t.weighted for t in tables):
        weights = torch.rand(sum(counts), generator=generator, device=device)
    before_first = torch.zeros(1, dtype=torch.int64, device=device)
    offsets = torch.cat([before_first, *lengths]).cumsum(0)
    return InputBatch(torch.cat(ids), offsets, weights)


def _draw_lengths(
    table: TableConfig, batch_size: int, generator: torch.Generator
) -> torch.Tensor:
    """Draw the bag lengths of all features of a table, int64."""
    profile = table.profile_at(batch_size)
    mean = profile.pooling_factor / table.num_features
    variance = profile.pooling_std**2
    count = table.num_features * batch_size
    means = torch.full((count,), mean, dtype=torch.float64, device=generator.device)
    if variance <= 0:
        return means.add_(_uniform(count, generator)).long()
    if variance > mean * 1.05:
        # A negative binomial is a Poisson distribution with a gamma-distributed mean.
        # torch's public Gamma takes no generator.
        scale = variance / mean - 1
        gamma = torch._standard_gamma  # noqa: SLF001
        means = gamma(means / scale, generator=generator) * scale
    return torch.poisson(means, generator=generator).long()


def _uniform(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(
        count, generator=generator, device=generator.device, dtype=torch.float64
    )


def _draw_ids(
    access: AccessDistribution,
    num_embeddings: int,
    count: int,
    generator: torch.Generator,
) -> torch.Tensor:
    """Draw `L` ids of a table, int64.

    Within a group (`G` of them), an id's rank is linear in the draw that picks it.
    """
    share_G, num_ids_G = np.asarray(access.share), np.asarray(access.num_ids)
    upper_G = share_G.cumsum()
    slope_G = num_ids_G / share_G
    start_G = num_ids_G.cumsum() - num_ids_G - (upper_G - share_G) * slope_G
    upper_G[-1] = 1.0
    upper, slope, start = torch.from_numpy(np.stack([upper_G, slope_G, start_G])).to(
        generator.device
    )
    ranks = _uniform(count, generator)
    group = torch.bucketize(ranks, upper, right=True)
    ranks *= slope.index_select(0, group)
    ranks += start.index_select(0, group)
    # A fixed permutation of the rows spreads hot ids over the table.
    ids = ranks.long().clamp_(0, num_embeddings - 1)
    ids *= coprime_step(num_embeddings)
    ids += num_embeddings // 3
    return ids.remainder_(num_embeddings)


class FusedTables:
    """One fused TBE with a table set."""

    def __init__(
        self,
        tables: Sequence[TableConfig],
        device: torch.device,
        arena: Arena | None = None,
        bounds_check: str = BOUNDS_CHECK,
    ) -> None:
        """Build the kernel over the arena's memory.

        Args:
            tables: Shards with the same optimizer and weight type, all weighted or all
                not, all pooled or all not. The latter have one width.
            device: CPU or CUDA device.
            arena: Memory to use (CPU only); None allocates.
            bounds_check: How each forward checks ids, `warning` or `none`.

        Raises:
            ConfigError: The device's kernels do not support the optimizer, the weight
                type or a table's width.
        """
        kinds = {
            (t.optimizer, t.data_type, t.weighted, t.pooled or t.embedding_dim)
            for t in tables
        }
        assert len(kinds) == 1, f"one fused kernel for tables of several kinds: {kinds}"
        [(optimizer, data_type, _, _)] = kinds
        self.pooled = tables[0].pooled
        on_cpu, on_gpu = device.type == "cpu", device.type == GPU
        has_adam = not on_cpu and not (on_gpu and data_type != "fp32")
        if data_type not in _PRECISIONS or (optimizer == "adam" and not has_adam):
            raise ConfigError(
                f"{device.type} kernels for {optimizer} with {data_type} weights "
                "cannot be measured; use fp32 or fp16 weights, and adam only with fp32 "
                "on a GPU"
            )
        widest = max(tables, key=lambda table: table.embedding_dim)
        if on_gpu and widest.embedding_dim > MAX_CUDA_COLUMNS:
            raise ConfigError(
                f"table '{widest.name}' has {widest.embedding_dim:,} columns, but CUDA "
                f"kernels take at most {MAX_CUDA_COLUMNS:,}; split it by columns"
            )
        self.device = device
        self.num_features = sum(t.num_features for t in tables)
        self.output_dim = tables[0].embedding_dim
        if self.pooled:
            self.output_dim = sum(t.embedding_dim * t.num_features for t in tables)
        buffers = {} if arena is None else arena.buffers(tables, optimizer, data_type)
        options = {"preallocated_host_buffers": buffers} if buffers else {}
        location = EmbeddingLocation.HOST if on_cpu else EmbeddingLocation.DEVICE
        compute = ComputeDevice.CPU if on_cpu else ComputeDevice.CUDA
        self.module = SplitTableBatchedEmbeddingBagsCodegen(
            [(t.num_embeddings, t.embedding_dim, location, compute) for t in tables],
            feature_table_map=[
                i for i, t in enumerate(tables) for _ in range(t.num_features)
            ],
            optimizer=_OPTIMIZERS[optimizer],
            weights_precision=_PRECISIONS[data_type],
            output_dtype=SparseType.FP32,
            pooling_mode=PoolingMode.SUM if self.pooled else PoolingMode.NONE,
            bounds_check_mode=BoundsCheckMode[bounds_check.upper()],
            learning_rate=_LEARNING_RATE,
            eps=1e-8,
            device=device,
            **(options if _TAKES_HOST_BUFFERS else {}),
        )
        if not _TAKES_HOST_BUFFERS:
            for role, buffer in buffers.items():
                getattr(self.module, f"{role}_host").data = buffer
        if not on_cpu:
            self.module.weights_dev.data.uniform_(-_WEIGHT_BOUND, _WEIGHT_BOUND)

    def forward(self, batch: InputBatch) -> torch.Tensor:
        """Return the embeddings, `B x D`; `L x D` if they are not pooled."""
        output: torch.Tensor = self.module(
            batch.indices_L, batch.offsets, per_sample_weights=batch.weights_L
        )
        return output

    def num_outputs(self, batch: InputBatch) -> int:
        """Return the rows of the output: samples, or ids that are not pooled."""
        if not self.pooled:
            return len(batch.indices_L)
        return (len(batch.offsets) - 1) // self.num_features
