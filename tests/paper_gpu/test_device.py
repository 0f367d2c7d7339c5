"""The paper GPU itself: what CUDA refuses it refuses, what CUDA counts it counts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

ops: Any = torch.ops.paper_cuda
FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def small_card() -> Iterator[int]:
    """A card of 1 MiB."""
    before = ops.capacity()
    ops.set_capacity(2**20)
    yield 2**20
    ops.set_capacity(before)


def test_a_device_without_a_number_is_the_current_one() -> None:
    torch.cuda.set_device(1)
    assert torch.empty(1, device="cuda").device == SECOND
    with torch.cuda.device(2):
        assert torch.cuda.current_device() == 2
        assert torch.zeros(3).cuda().device.index == 2
    assert torch.cuda.current_device() == 1


def test_values_are_the_cpus() -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(64, 32, generator=generator)
    there = values.to(SECOND)
    works: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x @ x.t(),
        lambda x: x[3:7, ::2].contiguous(),
        lambda x: x.view(32, 64).sum(1).sort().values,
        lambda x: torch.cat([x, x[:1]]).cumsum(0),
        lambda x: x[x > 0],
    ]
    for work in works:
        result = work(there)
        assert result.device == SECOND
        assert torch.equal(result.cpu(), work(values))


def test_gradients_stay_on_their_device() -> None:
    layer = torch.nn.Linear(8, 4).to(SECOND)
    layer(torch.ones(2, 8, device=SECOND)).square().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.device == SECOND


@pytest.mark.parametrize("other", ["cpu", "cuda:0"])
def test_operands_on_two_devices_are_refused(other: str) -> None:
    with pytest.raises(RuntimeError, match="same device, but found at least two"):
        torch.ones(2, device=SECOND) + torch.ones(2, device=other)
    with pytest.raises(RuntimeError, match="same device, but found at least two"):
        torch.cat([torch.ones(2, device=SECOND), torch.ones(2, device=other)])
    with pytest.raises(RuntimeError, match="same device, but found at least two"):
        torch.ones(2, 2, device=SECOND) @ torch.ones(2, 2, device=other)
    assert (torch.ones(2, device=SECOND) + torch.tensor(1.0)).device == SECOND


def test_a_device_that_is_not_there_is_refused() -> None:
    missing = torch.cuda.device_count()
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.cuda.set_device(missing)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.empty(1, device=f"cuda:{missing}")
    assert torch.cuda.current_device() == 0


def test_memory_that_nobody_wrote_is_not_zero() -> None:
    assert torch.empty(100, device=FIRST).isnan().all()


def test_bytes_are_counted_on_their_device() -> None:
    base = torch.cuda.memory_allocated(SECOND), torch.cuda.memory_allocated(FIRST)
    torch.cuda.reset_peak_memory_stats(SECOND)
    one = torch.empty(1, device=SECOND)
    many = torch.empty(1000, device=SECOND)
    view = many[10:]
    assert torch.cuda.memory_allocated(SECOND) - base[0] == 512 + 4096
    del many
    assert torch.cuda.memory_allocated(SECOND) - base[0] == 512 + 4096  # the view's
    del one, view
    gc.collect()
    assert torch.cuda.memory_allocated(SECOND) == base[0]
    assert torch.cuda.max_memory_allocated(SECOND) - base[0] == 512 + 4096
    assert torch.cuda.memory_allocated(FIRST) == base[1]
    torch.cuda.reset_peak_memory_stats(SECOND)
    assert torch.cuda.max_memory_allocated(SECOND) == base[0]


def test_peaks_show_what_an_operator_took_in_between() -> None:
    values = torch.ones(1000, device=SECOND)
    torch.cuda.reset_peak_memory_stats(SECOND)
    base = torch.cuda.memory_allocated(SECOND)
    values = (values * 2) + 1  # the product is gone, its bytes were there
    assert torch.cuda.max_memory_allocated(SECOND) - base == 2 * 4096


def test_a_full_card_says_so(small_card: int) -> None:
    held = torch.empty(small_card // 2, dtype=torch.uint8, device=SECOND)
    free, total = torch.cuda.mem_get_info(SECOND)
    assert (free, total) == (small_card // 2, small_card)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        torch.empty(small_card // 2 + 1, dtype=torch.uint8, device=SECOND)
    assert torch.empty(small_card, dtype=torch.uint8, device=FIRST).is_cuda
    del held
    assert torch.empty(small_card, dtype=torch.uint8, device=SECOND).is_cuda


def test_memory_of_other_processes_is_not_free(small_card: int) -> None:
    ops.set_foreign(1, small_card // 4)
    try:
        assert torch.cuda.mem_get_info(SECOND)[0] == 3 * small_card // 4
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(small_card, dtype=torch.uint8, device=SECOND)
    finally:
        ops.set_foreign(1, 0)


def test_managed_memory_is_not_the_cards(small_card: int) -> None:
    import fbgemm_gpu  # noqa: F401

    prototype = torch.zeros(1, device=SECOND)
    base = torch.cuda.memory_allocated(SECOND)
    managed = torch.ops.fbgemm.new_unified_tensor(prototype, [4 * small_card], False)
    assert managed.device == SECOND and managed.numel() == 4 * small_card
    assert torch.cuda.memory_allocated(SECOND) == base
    assert ops.managed(1) >= 16 * small_card
    del managed
    assert ops.managed(1) == 0


def test_a_generator_draws_on_its_device() -> None:
    generator = torch.Generator(device=SECOND).manual_seed(5)
    assert generator.device == SECOND
    draws = torch.rand(4, device=SECOND, generator=generator)
    expected = torch.rand(4, generator=torch.Generator().manual_seed(5))
    assert torch.equal(draws.cpu(), expected)
    with pytest.raises(RuntimeError, match="'cuda' device type for generator"):
        torch.empty(4, device=SECOND).uniform_(generator=torch.Generator())
    with pytest.raises(RuntimeError, match="'cpu' device type for generator"):
        torch.rand(4, generator=generator)


def test_one_seed_starts_all_devices() -> None:
    torch.manual_seed(7)
    first = torch.rand(3, device=SECOND)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3, device=SECOND), first)
    with torch.random.fork_rng(devices=[1]):
        torch.rand(3, device=SECOND)
    assert not torch.equal(torch.rand(3, device=SECOND), first)


def test_streams_belong_to_a_device() -> None:
    assert torch.cuda.current_stream(SECOND).device == SECOND
    mine: Any = torch.cuda.Stream(SECOND)  # type: ignore[no-untyped-call]
    assert mine != torch.cuda.current_stream(SECOND)
    with torch.cuda.stream(mine):
        assert torch.cuda.current_device() == 1
        assert torch.cuda.current_stream() == mine
        assert torch.cuda.current_stream(FIRST).device == FIRST
    assert torch.cuda.current_device() == 0
    assert torch.cuda.current_stream(SECOND) != mine


def test_events_belong_to_the_current_device() -> None:
    def timed() -> Any:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    here, there, end = timed(), timed(), timed()
    here.record()
    with torch.cuda.device(1):
        there.record()
        torch.ones(3, device=SECOND).add_(1)
        end.record()
    assert not end.query()
    with pytest.raises(RuntimeError, match="not ready"):
        there.elapsed_time(end)
    end.synchronize()
    assert end.query() and there.elapsed_time(end) >= 0
    assert end.launches > there.launches
    with pytest.raises(RuntimeError, match="invalid resource handle"):
        here.elapsed_time(end)


def test_pinned_memory_is_known() -> None:
    pinned = torch.ones(100).pin_memory()
    assert pinned.is_pinned() and pinned.device.type == "cpu"
    assert not torch.ones(100).is_pinned()
    assert pinned.to(SECOND, non_blocking=True).sum() == 100
