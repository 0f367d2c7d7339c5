"""The expected time of an iteration: known maxima of normal values, and limits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from scipy import integrate, stats

from torchrec_neuroshard.costs.expected import alike_rows, drawn_phases, draws
from torchrec_neuroshard.costs.passes import TIMED

Floats = npt.NDArray[np.float64]

FORWARD, SENT = TIMED.index("fwd_compute"), TIMED.index("fwd_comms")


def slowest(phases_DWS6: Floats) -> Floats:
    """The slowest rank of each phase and stage, added up."""
    total: Floats = phases_DWS6.max(axis=1).sum(axis=(1, 2))
    return total


def largest(count: int) -> float:
    """Expected maximum of independent standard normal values."""

    def part(x: float) -> float:
        density = count * stats.norm.pdf(x) * stats.norm.cdf(x) ** (count - 1)
        return float(x * density)

    return float(integrate.quad(part, -9.0, 9.0)[0])


def expected_ms(
    path: Callable[[Floats], Floats],
    phases_WS6: Floats,
    spread_WS: Floats,
    alike_WS: npt.NDArray[np.int64],
) -> float:
    """The mean of a path over the draws."""
    return float(path(drawn_phases(phases_WS6, spread_WS, alike_WS)).mean())


def expected(
    phases_WS6: Floats, spread: float, alike_W: list[int] | None = None
) -> float:
    """The expected iteration if all kernels differ, or those with another number."""
    num_ranks, num_stages, _ = phases_WS6.shape
    alike_WS = np.array([alike_W or range(num_ranks)] * num_stages).T
    return expected_ms(slowest, phases_WS6, np.full(alike_WS.shape, spread), alike_WS)


def phases(kernels_W: list[float], name: str = "fwd_compute") -> Floats:
    """Phases of one stage that has only one phase."""
    found = np.zeros((len(kernels_W), 1, 6))
    found[:, 0, TIMED.index(name)] = kernels_W
    return found


@pytest.mark.parametrize("name", ["fwd_compute", "bwd_compute"])
@pytest.mark.parametrize("num_ranks", [2, 3, 8, 16, 64, 128])
def test_equal_ranks_take_the_expected_maximum(num_ranks: int, name: str) -> None:
    found = expected(phases([5.0] * num_ranks, name), 0.02)
    assert (found / 5.0 - 1) / 0.02 == pytest.approx(largest(num_ranks), abs=0.01)


def test_equal_ranks_among_faster_ones_do_so_nearly() -> None:
    """Nothing is adjusted to this case. Other draws give up to 0.04 deviations more."""
    found = expected(phases([5.0] * 8 + [1.0] * 24), 0.02)
    assert (found / 5.0 - 1) / 0.02 == pytest.approx(largest(8), abs=0.06)


def test_only_kernels_err() -> None:
    for name in set(TIMED) - {"fwd_compute", "bwd_compute"}:
        assert expected(phases([5.0] * 4, name), 0.1) == pytest.approx(5.0)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_passes_and_stages_err_independently(num_stages: int) -> None:
    """A rank's kernels of 1 ms: forward and backward, or forward in two stages.

    With the same errors, the joint maximum would be that of one kernel of 2 ms.
    """

    def joined(phases_DWS6: Floats) -> Floats:
        longest: Floats = phases_DWS6.sum(axis=(2, 3)).max(axis=1)
        return longest

    found_WS6 = phases([1.0] * 4).repeat(num_stages, axis=1)
    if num_stages == 1:
        found_WS6 += phases([1.0] * 4, "bwd_compute")
    alike_WS = np.arange(4)[:, None].repeat(num_stages, axis=1)
    found = expected_ms(joined, found_WS6, np.full((4, num_stages), 0.02), alike_WS)
    assert (found - 2) / 0.02 == pytest.approx(2**0.5 * largest(4), abs=0.15)


def test_the_same_kernels_err_together() -> None:
    equal = phases([5.0] * 8)
    assert expected(equal, 0.02, [0] * 8) == pytest.approx(5.0, rel=1e-9)
    slow = phases([5.0, 5.0, 1.0, 1.0])
    assert expected(slow, 0.02, [0, 0, 1, 1]) == pytest.approx(5.0, rel=1e-9)
    assert expected(slow, 0.02, [0, 1, 0, 1]) > 5.01
    pairs = expected(equal, 0.02, [0, 1, 2, 3] * 2)
    assert (pairs / 5.0 - 1) / 0.02 == pytest.approx(largest(4), abs=0.01)


def test_nearly_equal_rows_are_alike() -> None:
    rows = np.array([[1e6, 1e-3], [2e6, 1e-3], [1e6, 0.99e-3], [1e6, 0.9e-3]])
    assert alike_rows(rows).tolist() == [0, 1, 0, 2]
    assert alike_rows(np.zeros((3, 2))).tolist() == [0, 0, 0]
    assert alike_rows(np.zeros((3, 0))).tolist() == [0, 0, 0]


def test_without_spread_it_is_the_path() -> None:
    random = np.random.default_rng(1).exponential(size=(4, 3, 6))
    assert expected(random, 0.0) == pytest.approx(slowest(random[None])[0])


def test_one_rank_takes_its_mean() -> None:
    random = np.random.default_rng(2).exponential(size=(1, 3, 6))
    found = expected(random, 0.1)
    assert found == pytest.approx(random.sum(), rel=1e-12)


def test_a_rank_far_above_the_others_takes_its_mean() -> None:
    found = expected(phases([5.0, *[3.0] * 15]), 0.02)
    assert found == pytest.approx(5.0, rel=1e-9)


def test_more_spread_never_takes_less() -> None:
    random = np.random.default_rng(3).uniform(1.0, 1.2, size=(8, 3, 6))
    found = [
        expected(random, spread) for spread in (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
    ]
    assert found == sorted(found)
    assert found[0] < found[1]
    assert found[-1] == found[-2]  # the most that is drawn


def test_draws_are_standard_normal_and_the_same_again() -> None:
    first = draws(12).copy()
    draws.cache_clear()
    np.testing.assert_array_equal(first, draws(12))
    np.testing.assert_allclose(first.mean(axis=0), 0.0, atol=1e-12)
    np.testing.assert_allclose(first.std(axis=0), 1.0, atol=0.05)
    assert (1 + 0.2 * draws(512)).min() > 0
