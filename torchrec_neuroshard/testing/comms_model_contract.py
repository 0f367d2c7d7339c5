"""Test cases that every `CommsModel` must pass.

Shapes: `C` candidates, `W` ranks; a last axis of 2 is forward and backward.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.models.base import CommsModel
from torchrec_neuroshard.testing.cases import expect_close

Floats = npt.NDArray[np.float64]

_BATCH_SIZE = 4096
_TWO_WAY = ("all_to_all", "row_wise")
"""Collectives that take columns and return forward and backward. Others take bytes."""
_ALIKE = ("row_wise", "all_reduce")
"""Collectives in which every rank has the same amount of data."""


class CommsModelContract(ABC):
    """Test cases that every model of collectives must pass.

    Derive a class named `Test...` for pytest, or call the `test_` methods.
    """

    tolerance: float = 1e-6
    """Relative difference allowed for rounding."""
    idle_ms: float = 10.0
    """Maximum time of a collective without data."""
    groups: tuple[tuple[int, int], ...] = ((1, 1), (2, 2), (8, 8), (8, 4))
    """Groups to test: ranks, and ranks per node."""

    @abstractmethod
    def make_comms_model(self, world_size: int, local_world_size: int) -> CommsModel:
        """Return the model under test for one group of ranks."""

    def _cases(
        self,
    ) -> Iterator[tuple[str, Callable[[Floats], Floats], Floats, int]]:
        """Yield a title, a call, its `C x W` amounts and the ranks per node."""
        rng = np.random.default_rng(0)
        for world_size, local in self.groups:
            model = self.make_comms_model(world_size, local)
            columns_CW = np.round(10 ** rng.uniform(0, 3, size=(6, world_size)))
            columns_CW[0] = 64.0
            columns_CW[1, 0] = 0.0
            for name in ("all_to_all", "index_all_to_all", "row_wise", "all_reduce"):
                ask, amounts = getattr(model, name), columns_CW
                if name in _ALIKE:
                    amounts = np.repeat(columns_CW[:, -1:], world_size, axis=1)
                if name in _TWO_WAY:
                    ask = functools.partial(ask, batch_size=_BATCH_SIZE)
                else:
                    amounts = amounts * _BATCH_SIZE
                yield (
                    f"{name} of {world_size} ranks, {local} per node",
                    ask,
                    amounts,
                    local,
                )

    def test_shapes(self) -> None:
        """Results are `C x W x 2` for all_to_all and row_wise, `C x W` otherwise."""
        for what, ask, columns_CW, _ in self._cases():
            last = (2,) if what.startswith(_TWO_WAY) else ()
            for rows in (columns_CW, columns_CW[:1]):
                found, wanted = ask(rows).shape, (*rows.shape, *last)
                assert found == wanted, f"{what}: shape {found}, not {wanted}"

    def test_times_are_finite_and_not_negative(self) -> None:
        """This holds for uneven amounts, for no data and for much data."""
        for what, ask, columns_CW, _ in self._cases():
            for rows in (columns_CW, 0 * columns_CW, 1e6 * columns_CW):
                ms = ask(rows)
                fine = np.isfinite(ms) & (ms >= 0)
                assert fine.all(), f"{what}: negative or infinite times, {ms[~fine]} ms"

    def test_nothing_to_send_takes_next_to_no_time(self) -> None:
        """A collective without data takes a latency at most."""
        for what, ask, columns_CW, _ in self._cases():
            idle, busy = ask(0 * columns_CW), ask(columns_CW)
            assert (idle <= self.idle_ms).all(), (
                f"{what}: no data takes {idle.max()} ms, more than {self.idle_ms}"
            )
            assert (idle <= busy * (1 + self.tolerance)).all(), (
                f"{what}: no data takes longer than some data"
            )

    def test_more_bytes_do_not_take_less_time(self) -> None:
        """More bytes on all ranks, or on one, never shorten the collective."""
        slack = 1 - self.tolerance
        for what, ask, columns_CW, _ in self._cases():
            before = ask(columns_CW)
            for factor in (1.1, 2.0, 10.0, 1000.0, 1e6):
                after = ask(columns_CW * factor)
                assert (after >= before * slack).all(), (
                    f"{what}: a rank ends sooner with more bytes on all ranks"
                )
                before = after
            if what.startswith(_ALIKE):
                continue
            slowest = ask(columns_CW).max(axis=1)
            for factor in (1.1, 2.0, 10.0, 1000.0):
                one = columns_CW.copy()
                one[:, 0] = factor * (columns_CW[:, 0] + 1)
                after = ask(one).max(axis=1)
                assert (after >= slowest * slack).all(), (
                    f"{what}: the collective ends sooner with more bytes on one rank"
                )
                slowest = after

    def test_ranks_are_interchangeable(self) -> None:
        """If ranks of a node, or whole nodes, are swapped, so are their times."""
        rng = np.random.default_rng(1)
        for what, ask, columns_CW, local in self._cases():
            nodes = np.arange(columns_CW.shape[1]).reshape(-1, local)
            inside = np.concatenate([rng.permutation(node) for node in nodes])
            across = rng.permutation(nodes).reshape(-1)
            for order in (inside, across):
                expect_close(
                    ask(columns_CW[:, order]),
                    ask(columns_CW)[:, order],
                    self.tolerance,
                    f"{what}: ranks in another order",
                )

    def test_other_candidates_of_a_call_do_not_matter(self) -> None:
        """One call for many candidates gives the same as a call for each."""
        for what, ask, columns_CW, _ in self._cases():
            alone = np.concatenate([ask(row[None]) for row in columns_CW])
            expect_close(alone, ask(columns_CW), self.tolerance, f"{what}: one by one")

    def test_predictions_repeat(self) -> None:
        """A second call, or another model made the same way, gives the same times."""
        for (what, ask, columns_CW, _), (_, other, _, _) in zip(
            self._cases(), self._cases(), strict=True
        ):
            first = ask(columns_CW)
            for again in (ask(columns_CW), other(columns_CW)):
                assert np.array_equal(first, again), (
                    f"{what}: a second call with the same bytes gives another time"
                )

    def test_arguments_are_left_alone(self) -> None:
        """The model does not write to its argument."""
        for what, ask, columns_CW, _ in self._cases():
            kept = columns_CW.copy()
            ask(columns_CW)
            assert (columns_CW == kept).all(), f"{what} changed its argument"

    def test_says_what_it_rests_on(self) -> None:
        """The source is not empty, since reports print it beside the times."""
        source = self.make_comms_model(*self.groups[0]).source
        assert isinstance(source, str) and source.strip(), (
            f"source is {source!r}; say what the predictions are based on"
        )
