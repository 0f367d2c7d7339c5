"""Fused kernels on the device: the CPU's to the bit, and Adam torch's."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch

with warnings.catch_warnings(action="ignore"):
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
        EmbeddingLocation,
        PoolingMode,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

pytestmark = pytest.mark.filterwarnings(
    r"ignore:[\s\S]*optimizer 'adam' is marked as:UserWarning"
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)
HOST, DEVICE, MANAGED, CACHED = (
    EmbeddingLocation.HOST,
    EmbeddingLocation.DEVICE,
    EmbeddingLocation.MANAGED,
    EmbeddingLocation.MANAGED_CACHING,
)
ROWS, BATCH_SIZE = 50, 6
OPTIMIZERS = [
    EmbOptimType.EXACT_SGD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    EmbOptimType.EXACT_ADAGRAD,
]
TYPES = [SparseType.FP32, SparseType.FP16]


def make(
    device: torch.device,
    locations: Sequence[Any],
    optimizer: Any,
    data_type: Any = SparseType.FP32,
) -> Any:
    compute = ComputeDevice.CPU if device == CPU else ComputeDevice.CUDA
    kernel = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, w, p, compute) for w, p in zip((8, 16, 4), locations, strict=True)],
        feature_table_map=[0, 1, 1, 2],
        optimizer=optimizer,
        weights_precision=data_type,
        output_dtype=SparseType.FP32,
        pooling_mode=PoolingMode.SUM,
        learning_rate=0.1,
        device=device,
    )
    generator = torch.Generator().manual_seed(5)
    for weights in kernel.split_embedding_weights():
        weights.data.copy_(torch.rand(weights.shape, generator=generator) - 0.5)
    return kernel


def train(kernel: Any, device: torch.device, weighted: bool) -> list[torch.Tensor]:
    """Outputs of three steps, and the weights after them."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for _ in range(3):
        lengths = torch.randint(0, 5, (4 * BATCH_SIZE,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        ids = torch.randint(0, ROWS, (int(offsets[-1]),), generator=generator)
        factors = torch.rand(len(ids), generator=generator) if weighted else None
        output = kernel(
            ids.to(device),
            offsets.to(device),
            per_sample_weights=None if factors is None else factors.to(device),
        )
        assert output.device == device
        grad = torch.rand(output.shape, generator=generator) - 0.5
        output.backward(grad.to(device))
        found.append(output.detach().cpu())
    kernel.flush()
    return [*found, *(w.detach().cpu() for w in kernel.split_embedding_weights())]


def placements() -> list[list[Any]]:
    return [[DEVICE] * 3, [MANAGED] * 3, [CACHED] * 3, [DEVICE, MANAGED, CACHED]]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("data_type", TYPES, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_kernels_do_what_the_cpus_do(
    optimizer: Any, data_type: Any, weighted: bool
) -> None:
    host = make(CPU, [HOST] * 3, optimizer, data_type)
    expected = train(host, CPU, weighted)
    for places in placements():
        found = train(make(GPU, places, optimizer, data_type), GPU, weighted)
        assert all(map(torch.equal, found, expected)), places


@pytest.mark.parametrize("weighted", [False, True])
def test_adam_is_what_torch_calls_adam(weighted: bool) -> None:
    kernels = [make(GPU, p, EmbOptimType.ADAM) for p in placements()]
    results = [train(kernel, GPU, weighted) for kernel in kernels]
    for other in results[1:]:
        assert all(map(torch.equal, other, results[0]))

    table = torch.nn.Embedding(ROWS, 8, sparse=True)
    kernel = make(GPU, [DEVICE] * 3, EmbOptimType.ADAM)
    first = kernel.split_embedding_weights()[0].detach().cpu().clone()
    table.weight.data.copy_(first)
    ids = torch.arange(10, 20)
    offsets = torch.cat([ids[:0], torch.arange(11), torch.full((30,), 10)])
    output = kernel(ids.to(GPU), offsets.to(GPU))  # one id a bag, of the first table
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
    output.sum().backward()
    table(ids).sum().backward()
    optimizer.step()  # type: ignore[no-untyped-call]
    trained = kernel.split_embedding_weights()[0].detach().cpu()
    assert not torch.equal(trained, first)
    assert torch.allclose(trained, table.weight, atol=1e-5)
