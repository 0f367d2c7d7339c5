"""Cases with tables: replicated ones, sequences, variable batches, weight types."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from harness.models import OPTIMIZER_CLASSES
from rank_kernels.shapes import USUAL, Case, Notes, Passes, Ranges, Shape, draw_shapes
from torchrec_neuroshard.measure.kernels import InputBatch
from torchrec_neuroshard.tables.table import TableConfig

_RATE = 1e-6
"""Learning rate; small, so that weights stay in their usual range."""


class Gradient:
    """One buffer of random gradients, for outputs of any shape."""

    def __init__(self, device: torch.device) -> None:
        self._values = torch.empty(0, device=device)

    def like(self, output: torch.Tensor) -> torch.Tensor:
        """Return the gradient of an output."""
        if len(self._values) < output.numel():
            self._values = torch.empty(output.numel() * 5 // 4, device=output.device)
            self._values.normal_(0.0, 0.01)
        return self._values[: output.numel()].view(output.shape)


def build(
    shape: Shape,
    device: torch.device,
    *,
    weights: str = "fp32",
    pooled: bool = True,
    location: EmbeddingLocation = EmbeddingLocation.DEVICE,
    optimizer: EmbOptimType = EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    **options: Any,
) -> SplitTableBatchedEmbeddingBagsCodegen:
    """Return a fused kernel with random weights."""
    compute = ComputeDevice.CUDA
    if device.type == "cpu":
        if location != EmbeddingLocation.DEVICE:
            raise RuntimeError("managed memory (UVM) needs a GPU")
        location, compute = EmbeddingLocation.HOST, ComputeDevice.CPU
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(t.num_embeddings, t.embedding_dim, location, compute) for t in shape.tables],
        optimizer=optimizer,
        weights_precision=SparseType(weights),
        output_dtype=SparseType.FP32,
        pooling_mode=PoolingMode.SUM if pooled else PoolingMode.NONE,
        learning_rate=_RATE,
        eps=1e-8,
        device=device,
        **options,
    )
    module.init_embedding_weights_uniform(-0.05, 0.05)
    return module


def fused(shape: Shape, device: torch.device, notes: Notes, **options: Any) -> Passes:
    """Yield passes of a fused kernel; see `build` for the options."""
    module, gradient = build(shape, device, **options), Gradient(device)
    for batch in shape.batches(device):
        yield (
            partial(module, batch.indices_L, batch.offsets),
            lambda output: torch.autograd.backward(output, gradient.like(output)),
        )


def dense(
    shape: Shape, device: torch.device, notes: Notes, optimizer: str = ""
) -> Passes:
    """Yield passes of replicated tables' kernel, with an optimizer over each table."""
    return replica_passes(shape.tables, shape.batches(device), device, optimizer)


def replica_passes(
    tables: Sequence[TableConfig],
    batches: Iterable[InputBatch],
    device: torch.device,
    optimizer: str = "",
) -> Passes:
    """Yield passes of replicated tables' kernel, without their all-reduce.

    Args:
        tables: Tables with one feature.
        batches: Batches of one rank, taken one at a time.
        device: CPU or CUDA device.
        optimizer: Runs over each table after the backward kernel. Empty: none.
    """
    shapes = [(t.num_embeddings, t.embedding_dim) for t in tables]
    module = DenseTableBatchedEmbeddingBagsCodegen(shapes, use_cpu=device.type == "cpu")
    gradient, step = Gradient(device), None
    # Views of the kernel's weights and gradient, as TorchRec makes them.
    sizes = [rows * width for rows, width in shapes]

    def views(flat: torch.Tensor) -> list[torch.Tensor]:
        parts = zip(torch.split(flat.detach(), sizes), shapes, strict=True)
        return [part.view(size) for part, size in parts]

    parameters = [torch.nn.Parameter(part) for part in views(module.weights)]
    if optimizer:
        step = OPTIMIZER_CLASSES[optimizer](parameters, lr=_RATE).step  # type: ignore[call-arg]

    def backward(output: torch.Tensor) -> None:
        torch.autograd.backward(output, gradient.like(output))
        if step is not None:
            for table, part in zip(parameters, views(module.weights.grad), strict=True):
                table.grad = part
            step()
        module.weights.grad = None

    for batch in batches:
        yield partial(module, batch.indices_L, batch.offsets), backward


def variable(shape: Shape, device: torch.device, notes: Notes) -> Passes:
    """Yield passes of a fused kernel whose features have batches of different sizes.

    Feature 0 has the whole batch, the next ones two thirds, a third, all, ...
    """
    module, gradient = build(shape, device), Gradient(device)
    sizes = [
        max(1, shape.batch_size * (3 - i % 3) // 3) for i in range(len(shape.tables))
    ]

    def draw(number: int) -> InputBatch:
        lengths, ids, whole = [], [], shape.draw(device, number)
        starts = whole.offsets[:: shape.batch_size].tolist()
        for i, size in enumerate(sizes):
            first = i * shape.batch_size
            own = whole.offsets[first : first + size + 1]
            lengths.append(own.diff())
            ids.append(whole.indices_L[starts[i] : int(own[-1])])
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        return InputBatch(
            torch.cat(ids), torch.cat([zero, *lengths]).cumsum(0), weights_L=None
        )

    for batch in itertools.cycle([draw(number) for number in range(2)]):
        yield (
            partial(
                module,
                batch.indices_L,
                batch.offsets,
                batch_size_per_feature_per_rank=[[size] for size in sizes],
            ),
            lambda output: torch.autograd.backward(output, gradient.like(output)),
        )


def dense_cases(quick: bool) -> Iterator[Case]:
    """Yield replicated tables, which see the batch of one rank."""
    ranges = Ranges(
        rows=(1e3, 1e6), batch_size=(1024, 32768), pooling=(1, 20), max_bytes=2**29
    )
    for shape in draw_shapes(20, ranges, quick):
        sgd = partial(fused, shape, optimizer=EmbOptimType.EXACT_SGD)
        yield shape.case("fused sgd", sgd)
        yield shape.case("no optimizer", partial(dense, shape))
        for optimizer in OPTIMIZER_CLASSES:
            yield shape.case(optimizer, partial(dense, shape, optimizer=optimizer))


def unpooled_cases(quick: bool) -> Iterator[Case]:
    """Yield tables of sequences of one width: few ids, and long histories."""
    bags = dataclasses.replace(USUAL, one_width=True)
    histories = dataclasses.replace(bags, batch_size=(16, 1_024), pooling=(50, 4_096))
    for ranges in (bags, histories):
        for shape in draw_shapes(20, ranges, quick):
            yield shape.case("fused", partial(fused, shape))
            yield shape.case("unpooled", partial(fused, shape, pooled=False))


def vbe_cases(quick: bool) -> Iterator[Case]:
    """Yield variable batches, and the same tables with the whole batch."""
    for shape in draw_shapes(15, dataclasses.replace(USUAL, num_tables=(3, 12)), quick):
        yield shape.case("fused", partial(fused, shape))
        yield shape.case("vbe", partial(variable, shape))


def weight_cases(quick: bool) -> Iterator[Case]:
    """Yield weight types; those that FBGEMM cannot train come back as errors."""
    for shape in draw_shapes(6, USUAL, quick):
        for weights in ("fp32", "fp16", "bf16", "int8"):
            yield shape.case(weights, partial(fused, shape, weights=weights))
