"""The timeline of an iteration, held to cases that were worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from torchrec_neuroshard.costs.timeline import Inside, chains


def array(*values: object) -> np.ndarray:
    return np.array(values, dtype=np.float64)


NONE = array(0, 0)


def test_ranks_do_not_wait_between_stages() -> None:
    """Rank 0 has all of stage 1, rank 1 all of stage 2: they work side by side."""
    crossed, together = array([3, 0], [0, 3]), array([3, 3], [0, 0])
    assert chains(crossed, NONE).ms == 3
    assert chains(together, NONE).ms == 6


def test_exchanges_hide_behind_kernels() -> None:
    kernels = array([2, 5], [1, 4])
    # Forward: stage 1 is looked up at 2 and exchanged at 6, stage 2 looked up at 7.
    # Backward: gradients of stage 2 arrive at 1 and are used at 6, of stage 1 at 5.
    assert chains(kernels, array(4, 1)).ms == 8
    # Forward: the exchanges end at 12 and 13. Backward: those of stage 1 arrive at 11.
    assert chains(kernels, array(10, 1)).ms == 13
    # Forward: the exchanges end at 3 and 11. Backward: those of stage 2 arrive at 4.
    assert chains(kernels, array(1, 4)).ms == 11


def test_columns_are_reordered_next_to_the_exchange() -> None:
    # Forward: exchanges end at 6 and 10. Stage 1 is reordered from 7 to 8, stage 2 from
    # 10. Backward: stage 2 is reordered at 2 and exchanged at 5, stage 1 reordered at 3
    # and exchanged at 9. Stage 2's kernel ends at 10, stage 1's at 12.
    assert chains(array([2, 5]), array(4, 3), array(1, 2)).ms == 12


def test_replicas_are_reduced_after_their_kernels() -> None:
    kernels = array([2, 5], [1, 4])
    # Stage 2 holds replicas, whose kernels end at 5 and are reduced until 8. Stage 1's
    # gradients are there at 1, its kernels end at 7.
    assert chains(kernels, array(1, 0), reductions_S=array(0, 3)).ms == 8
    # Exchanges of gradients hold the link until 9.
    assert chains(kernels, array(9, 0), reductions_S=array(0, 3)).ms == 12


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_a_pass_is_the_longest_chain(lead: tuple[int, ...]) -> None:
    """The formula of the module's docstring, for random times of many candidates."""
    rng = np.random.default_rng(len(lead))
    ranks, stages = 4, 5
    kernels = rng.exponential(size=(*lead, ranks, stages))
    exchanges = rng.exponential(size=(*lead, stages))
    busiest = kernels.cumsum(axis=-1).max(axis=-2)
    later = exchanges[..., ::-1].cumsum(axis=-1)[..., ::-1]
    expected = (busiest + later).max(axis=-1)
    assert chains(kernels, exchanges).ms == pytest.approx(expected)


def test_ranks_of_a_node_wait_for_collectives_inside_it() -> None:
    """Rank 0 looks up one stage, rank 1 the next; the first stage's is in the node."""
    kernels = array([3, 0], [0, 3])
    [alone] = chains(kernels, NONE, inside=Inside(array(1, 0), 1)).ms[None]
    [met] = chains(kernels, NONE, inside=Inside(array(1, 0), 2)).ms[None]
    assert (alone, met) == (4, 7)
    # The last stage's collective delays only its own exchange.
    assert chains(kernels, array(0, 2), inside=Inside(array(0, 1), 2)).ms == 6
