from __future__ import annotations

import dataclasses
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.measure import kernels
from torchrec_neuroshard.tables.access import AccessDistribution, draw_lengths
from torchrec_neuroshard.tables.profile import FeatureProfile, count_histogram
from torchrec_neuroshard.tables.table import OPTIMIZERS, TableConfig

CPU = torch.device("cpu")
BATCH = 32


ACCESS = (
    AccessDistribution.power_law(100, 1.0),
    AccessDistribution.power_law(40, 0.0),
    AccessDistribution.power_law(7, 1.2),
)


def make(
    rows: int,
    dim: int,
    access: AccessDistribution,
    mean: float,
    std: float,
    **more: Any,
) -> TableConfig:
    """Make a table that reads `mean` ids per sample from a distribution."""
    batch_size = more.pop("batch_size", BATCH)
    profile = FeatureProfile(
        batch_size=batch_size,
        num_lookups=batch_size * mean,
        pooling_std=std,
        access_histogram=access.histogram(batch_size * mean),
    )
    return TableConfig(
        name=str(rows), num_embeddings=rows, embedding_dim=dim, profile=profile, **more
    )


TABLES = (
    make(100, 12, ACCESS[0], 3.0, 2.0),
    make(40, 32, ACCESS[1], 2.0, 0.0, num_features=2),
    make(7, 4, ACCESS[2], 0.5, 0.0),
)
FEATURES = (0, 1, 1, 2)
"""Table of each feature."""


def variants(**changes: object) -> tuple[TableConfig, ...]:
    return tuple(dataclasses.replace(t, **changes) for t in TABLES)  # type: ignore[arg-type]


def looked_up(batch: kernels.InputBatch, weights: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of each bag's rows, feature after feature."""
    found = []
    for feature, table in enumerate(FEATURES):
        offsets = batch.offsets[feature * BATCH : (feature + 1) * BATCH + 1]
        ids = batch.indices_L[offsets[0] : offsets[-1]]
        rows = weights[table][ids]
        if batch.weights_L is not None:
            rows = rows * batch.weights_L[offsets[0] : offsets[-1], None]
        bag = torch.repeat_interleave(torch.arange(BATCH), offsets.diff())
        found.append(torch.zeros(BATCH, rows.shape[1]).index_add(0, bag, rows))
    return torch.cat(found, dim=1)


@pytest.mark.parametrize(
    ("weighted", "data_type"), [(False, "fp32"), (True, "fp16"), (True, "fp32")]
)
def test_passes_match_torch(weighted: bool, data_type: str) -> None:
    tables = variants(weighted=weighted, data_type=data_type, optimizer="sgd")
    memory = kernels.Arena(1 << 16) if weighted else None
    kernel = kernels.FusedTables(tables, CPU, memory)
    weights = kernel.module.split_embedding_weights()
    assert [tuple(w.shape) for w in weights] == [(100, 12), (40, 32), (7, 4)]
    dtype = torch.float32 if data_type == "fp32" else torch.float16
    assert {w.dtype for w in weights} == {dtype}
    for w in weights:
        w.data.uniform_(-1, 1)
    copies = [w.detach().float().requires_grad_() for w in weights]
    batch = kernels.draw_inputs(tables, ACCESS, BATCH, (1,), CPU)
    assert (batch.weights_L is not None) == weighted
    output, expected = kernel.forward(batch), looked_up(batch, copies)
    assert output.shape == (BATCH, kernel.output_dim)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    # The learning rate is small; these gradients give steps of order one.
    grad = torch.randn(BATCH, kernel.output_dim) * 1e6
    torch.autograd.backward([output, expected], [grad, grad])
    torch.optim.SGD(copies, lr=1e-6).step()
    error = 1e-4 if data_type == "fp32" else 0.05
    for w, copy in zip(kernel.module.split_embedding_weights(), copies, strict=True):
        torch.testing.assert_close(
            w.detach().float(), copy.detach(), rtol=error / 10, atol=error
        )


def test_rows_that_are_not_pooled_match_torch() -> None:
    tables = tuple(
        dataclasses.replace(t, embedding_dim=8)
        for t in variants(weighted=False, optimizer="sgd", pooled=False)
    )
    kernel = kernels.FusedTables(tables, CPU)
    weights = kernel.module.split_embedding_weights()
    for w in weights:
        w.data.uniform_(-1, 1)
    copies = [w.detach().clone().requires_grad_() for w in weights]
    batch = kernels.draw_inputs(tables, ACCESS, BATCH, (1,), CPU)
    output = kernel.forward(batch)
    num_ids = [
        batch.offsets[feature * BATCH : (feature + 1) * BATCH + 1]
        for feature in range(len(FEATURES))
    ]
    expected = torch.cat(
        [
            copies[table][batch.indices_L[offsets[0] : offsets[-1]]]
            for table, offsets in zip(FEATURES, num_ids, strict=True)
        ]
    )
    assert output.shape == (kernel.num_outputs(batch), kernel.output_dim)
    torch.testing.assert_close(output, expected)
    grad = torch.randn_like(output) * 1e6
    torch.autograd.backward([output, expected], [grad, grad])
    torch.optim.SGD(copies, lr=1e-6).step()
    for w, copy in zip(weights, copies, strict=True):
        torch.testing.assert_close(w, copy.detach(), rtol=1e-4, atol=1e-4)


def test_ids_are_checked_as_in_training() -> None:
    table = variants()[0]
    beyond = torch.tensor([table.num_embeddings + 3])
    batch = kernels.InputBatch(beyond.clone(), torch.tensor([0, 1]), None)
    with pytest.raises(RuntimeError):
        kernels.FusedTables([table], CPU, bounds_check="none").forward(batch)
    kernel = kernels.FusedTables([table], CPU, bounds_check="warning")
    # FBGEMM reads row 0 instead.
    assert torch.equal(
        kernel.forward(batch)[0], kernel.module.split_embedding_weights()[0][0]
    )


def test_types_share_the_arena_and_find_usual_values() -> None:
    memory = kernels.Arena(1 << 16)
    first = memory.view("weights", torch.float32, 50)
    for dtype, numel in (
        (torch.float16, 3_000),
        (torch.float32, 100),
        (torch.float32, 1_500),
        (torch.float16, 10),
    ):
        values = memory.view("weights", dtype, numel)
        assert (values.dtype, values.numel()) == (dtype, numel)
        assert values.data_ptr() == first.data_ptr()
        assert float(values.min()) < 0 < float(values.max())
        assert 1e-3 < float(values.abs().max()) <= 0.051
    state = memory.view("momentum1", torch.float32, 100)
    assert state.data_ptr() != first.data_ptr()
    torch.testing.assert_close(state, torch.full((100,), 0.1))


def test_kernels_that_do_not_exist_are_refused() -> None:
    for tables, value in (
        (variants(optimizer="adam"), "adam"),
        (variants(data_type="int8"), "int8"),
    ):
        with pytest.raises(ConfigError, match=value):
            kernels.FusedTables(tables, CPU)


def test_fbgemm_without_preallocated_buffers_uses_the_arena_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FBGEMM 1.6 raises TypeError for the argument."""
    build: Any = vars(kernels)["SplitTableBatchedEmbeddingBagsCodegen"]

    def without(specs: Any, **options: Any) -> Any:
        assert "preallocated_host_buffers" not in options
        return build(specs, **options)

    monkeypatch.setattr(kernels, "SplitTableBatchedEmbeddingBagsCodegen", without)
    monkeypatch.setattr(kernels, "_TAKES_HOST_BUFFERS", False)
    memory = kernels.Arena(1 << 16)
    weights = kernels.FusedTables(TABLES, CPU, memory).module.split_embedding_weights()
    assert [tuple(w.shape) for w in weights] == [(100, 12), (40, 32), (7, 4)]
    held = memory.view("weights", torch.float32, 1)
    assert weights[0].data_ptr() == held.data_ptr()


# A GPU's code paths, on a CPU


@pytest.mark.parametrize(("mean", "std"), [(2.3, 0.0), (7.0, 2.6), (5.0, 9.0)])
def test_inputs_follow_their_profile(mean: float, std: float) -> None:
    count, rows = 40_000, 5_000
    access = AccessDistribution.power_law(rows, 1.05)
    table = make(rows, 4, access, mean, std, batch_size=count)
    first, same, other = (
        kernels.draw_inputs([table], [access], count, (1, seed), CPU)
        for seed in (2, 2, 3)
    )
    assert torch.equal(first.indices_L, same.indices_L)
    assert not torch.equal(first.offsets, other.offsets)
    # Lengths have NumPy's distribution.
    there = first.offsets.diff().numpy()
    here = draw_lengths(np.random.default_rng(1), mean, std, count)
    assert there.mean() == pytest.approx(here.mean(), abs=6 * here.std() / count**0.5)
    assert there.std() == pytest.approx(here.std(), rel=0.05)
    quantiles = (0.1, 0.5, 0.9)
    assert np.quantile(there, quantiles) == pytest.approx(
        np.quantile(here, quantiles), abs=1
    )
    ids = first.indices_L.numpy()
    assert 0 <= ids.min() and ids.max() < rows
    _, counts = np.unique(ids, return_counts=True)
    expected = np.array(access.histogram(len(ids)))
    noise = 4 * np.sqrt(np.maximum(expected, 1))
    assert (np.abs(np.array(count_histogram(counts)) - expected) <= noise).all()


def test_memory_is_reserved_once_within_the_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = SimpleNamespace(mem_get_info=lambda _: (2**30, 2**31))
    monkeypatch.setattr(
        "torchrec_neuroshard.measure.kernels.accelerator", lambda _: device
    )
    taken: list[int] = []
    empty = torch.empty

    def take(size: int, **options: Any) -> torch.Tensor:
        taken.append(size)
        return empty(0, **options)

    monkeypatch.setattr("torch.empty", take)
    kernels.reserve_memory(CPU, 900_000_000)
    with pytest.raises(ConfigError, match=r"1\.0 GiB free.*lower --max-gib to 1 or"):
        kernels.reserve_memory(CPU, 2**30)
    assert taken == [900_000_000]


@pytest.mark.parametrize("data_type", ["fp32", "fp16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_gpu_kernels_have_the_counted_state(optimizer: str, data_type: str) -> None:
    """The "meta" device takes the same path as a GPU up to the launch."""
    tables = variants(optimizer=optimizer, data_type=data_type)
    kernel = kernels.FusedTables(tables, torch.device("meta"))
    module = kernel.module
    assert not module.use_cpu
    dtype = torch.float32 if data_type == "fp32" else torch.float16
    assert module.weights_dev.dtype == dtype
    weights = 100 * 12 + 40 * 32 + 7 * 4
    assert module.weights_dev.numel() == weights
    state = sum(
        buffer.numel() * buffer.element_size()
        for name, buffer in module.named_buffers()
        if name in ("momentum1_dev", "momentum2_dev") and buffer.numel() > 1
    )
    per_row = 4 * (100 + 40 + 7) if optimizer == "rowwise_adagrad" else 0
    assert state == {"adam": 8, "adagrad": 4}.get(optimizer, 0) * weights + per_row
    # fp16 weights are rounded like TorchRec's.
    assert module.stochastic_rounding
    released = weakref.ref(module)
    del kernel, module
    assert released() is None  # at once: the next set needs the memory
