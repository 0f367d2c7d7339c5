"""Models of collectives: bandwidths by hand, and what holds for any coefficients."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.hardware.cards import GPU_CARDS
from torchrec_neuroshard.models.base import COLLECTIVES
from torchrec_neuroshard.models.card_physics import PhysicalConstants
from torchrec_neuroshard.models.collective_terms import TERM_NAMES, collective_terms
from torchrec_neuroshard.models.collectives import (
    BandwidthCommsModel,
    MeasuredCommsModel,
)
from torchrec_neuroshard.models.published_links import (
    PublishedCommsModel,
    published_comms_model,
)

H100 = GPU_CARDS["h100"]


def model(world: int = 4, local: int = 4, intra: float = 100.0) -> BandwidthCommsModel:
    return BandwidthCommsModel(
        world_size=world,
        local_world_size=local,
        intra_gb_per_s=intra,
        inter_gb_per_s=10.0,
    )


def published(world: int = 8, **links: float) -> PublishedCommsModel:
    return published_comms_model(H100, world_size=world, local_world_size=8, **links)


def test_other_collectives_move_the_bytes_of_an_all_to_all() -> None:
    """4 ranks, 100 GB/s: a rank sends three quarters of its bytes."""
    per_byte = 0.75 / 100e6
    ms = model().all_to_all(np.array([[128.0, 0.0, 0.0, 0.0]]), 1000)
    # A rank without columns still receives.
    sent = 1000 * 4 * per_byte * np.array([128, 32, 32, 32])
    np.testing.assert_allclose(ms[0, :, 0], sent)
    sent_to = np.array([[1e6, 2e6, 0.0, 5e6]])
    busiest = np.maximum(sent_to, sent_to.sum() / 4)
    np.testing.assert_allclose(model().index_all_to_all(sent_to), busiest * per_byte)
    scatter_gather = model().row_wise(np.full((1, 4), 16.0), 1000)
    np.testing.assert_allclose(scatter_gather, 16 * 1000 * 4 * per_byte)
    reduced = model().all_reduce(np.full((1, 4), 8e6))
    np.testing.assert_allclose(reduced, 2 * 8e6 * per_byte)
    # Between nodes over the slow link.
    ms = model(world=8, local=4).all_to_all(np.full((1, 8), 64.0), 1000)
    expected = 64 * 1000 * 4 * ((3 / 8) / 100e6 + (4 / 8) / 10e6)
    np.testing.assert_allclose(ms, expected)


def ms(start: float, moved: float, ramp: float) -> float:
    """Return start, transfer and ramp [us] as milliseconds."""
    return (start + moved + 2 * math.sqrt(ramp * moved)) / 1e3


@pytest.mark.parametrize("ranks", [2, 8, 16])
def test_published_tables_by_hand(ranks: int) -> None:
    """NCCL inside a node of H100: launch, steps, transfer, ramp, plateau [us]."""
    sent, columns = 1024 * 65536 * 4, np.full((1, ranks), 1024.0)
    for bandwidth in (370.0, 185.0):
        one = published_comms_model(
            H100,
            world_size=ranks,
            local_world_size=ranks,
            intra_gb_per_s=bandwidth,
        )
        moved = sent * (ranks - 1) / (ranks - 0.5) / (bandwidth * 1e3)
        steps = 0.6 + min(math.log2(ranks), 3)
        plateau = 3.1 * sent / (sent + ranks * 11.5 * 1024)
        expected = ms(4.42 + steps * 0.84, moved / 1.045, 2.7) + plateau / 1e3
        np.testing.assert_allclose(one.all_to_all(columns, 65536), expected)
        steps = min(ranks - 1, 7)
        expected = ms(4.42 + steps * 0.84, moved / 1.035, 2.7)
        np.testing.assert_allclose(one.row_wise(columns, 65536), expected)
        expected = ms(4.42 + 2 * steps * 0.84, 2 * moved / 1.175, 2.7)
        reduced = one.all_reduce(np.full((1, ranks), sent))
        np.testing.assert_allclose(reduced, expected)


def test_published_links_by_hand() -> None:
    """RCCL, and several nodes: start, transfer and ramp [us]."""
    two, amd = published(16), GPU_CARDS["mi300x"]
    one = published_comms_model(amd, world_size=8, local_world_size=8)
    assert two.source == "published links of h100, not measured"
    assert published(intra_gb_per_s=1.0).source == "given links of h100, not measured"
    sent = 1024 * 65536 * 4

    columns, moved = np.full((1, 8), 1024.0), sent * 7 / 8 / 336e3
    expected = ms(11.6 + 23.6, moved, 2.7)
    np.testing.assert_allclose(one.all_to_all(columns, 65536), expected)
    ring = ms(11.6 + 23.6 + 5.1, moved, 2.7)
    np.testing.assert_allclose(one.row_wise(columns, 65536), ring)
    np.testing.assert_allclose(one.all_reduce(np.full((1, 8), sent)), 2 * ring)

    # An all-to-all uses each rank's own share of the network, a ring all shares.
    columns, moved = np.full((1, 16), 1024.0), sent * 15 / 16
    expected = ms(11.6 + 25.7, moved / 2 / 35e3, 4.0)
    np.testing.assert_allclose(two.all_to_all(columns, 65536), expected)
    expected = ms(11.6 + 5.1 + 25.7, moved / min(370e3, 8 * 35e3), 4.0)
    np.testing.assert_allclose(two.row_wise(columns, 65536), expected)


# Measured models, with any coefficients


LINKS = (2.0, 0.5)


def random_coefficients() -> np.ndarray:
    shape = len(COLLECTIVES), len(TERM_NAMES)
    return np.random.default_rng(0).lognormal(size=shape)


def measured(world: int = 4, local: int = 4, **settings: Any) -> MeasuredCommsModel:
    return MeasuredCommsModel(
        random_coefficients(),
        world_size=world,
        local_world_size=local,
        **{"measured_gb_per_s": LINKS, **settings},
    )


def test_terms_by_hand() -> None:
    """Three ranks of one node; all sizes are in the first segment."""

    def terms(collective: str, local: int, *sizes: float) -> dict[str, Any]:
        found = collective_terms(collective, np.array([sizes]), local, *LINKS)[0]
        return dict(zip(TERM_NAMES, found.T, strict=True))

    def sizes(found: dict[str, Any], name: str) -> list[float]:
        return list(found[f"{name}_0"] * LINKS[0] * 1e6)

    one = terms("pooled_forward", 3, 100.0, 200.0, 0.0)
    assert sizes(one, "sent") == pytest.approx([200, 400, 0])
    assert sizes(one, "received") == pytest.approx([200, 100, 300])
    assert sizes(one, "most_sent") == pytest.approx([400] * 3)
    assert sizes(one, "most_received") == pytest.approx([300] * 3)
    assert sizes(one, "total") == pytest.approx([600] * 3)
    assert one["peers"] == pytest.approx(2)
    # Two ranks send to two peers each; each rank receives from its senders.
    assert one["messages"] == pytest.approx([2 + 1, 2 + 1, 2])
    assert one["mean_messages"] == pytest.approx(8 / 3)
    back = terms("pooled_backward", 3, 100.0, 200.0, 0.0)
    for side, other in (("sent", "received"), ("most_received", "most_sent")):
        assert sizes(back, side) == sizes(one, other)
    # Two nodes of two ranks; links between nodes are four times slower.
    two = terms("pooled_forward", 2, 100.0, 200.0, 0.0, 50.0)
    assert sizes(two, "sent") == pytest.approx([900, 1800, 0, 450])
    assert sizes(two, "received") == pytest.approx([400, 300, 1250, 1200])


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize(("world", "local"), [(3, 3), (8, 2), (4, 1)])
def test_prediction_is_terms_times_coefficients(
    collective: str, world: int, local: int
) -> None:
    rng = np.random.default_rng(world)
    bytes_CW = 1e9 ** rng.uniform(0.3, 1, (5, world))
    bytes_CW[rng.random((5, world)) < 0.2] = 0.0
    terms = collective_terms(collective, bytes_CW, local, *LINKS)
    expected = terms @ random_coefficients()[COLLECTIVES.index(collective)]
    expected[bytes_CW.sum(axis=1) == 0] = 0
    np.testing.assert_allclose(
        measured(world, local).predict(collective, bytes_CW), expected, rtol=1e-9
    )


def test_columns_and_samples_become_bytes_per_peer() -> None:
    """96 samples over 4 ranks: 24 of each, of 4 bytes per column."""
    model, columns = measured(), np.array([[8.0, 0.0, 64.0, 4.0]])
    bytes_CW = columns * 24 * 4
    pooled, row_wise = model.all_to_all(columns, 96), model.row_wise(columns, 96)
    found = {
        "pooled_forward": pooled[..., 0],
        "pooled_backward": pooled[..., 1],
        "reduce_scatter": row_wise[..., 0],
        "all_gather": row_wise[..., 1],
        "index": model.index_all_to_all(bytes_CW * 4),
        "all_reduce": model.all_reduce(bytes_CW * 4),
    }
    assert set(found) == set(COLLECTIVES)
    for collective, ms in found.items():
        np.testing.assert_allclose(ms, model.predict(collective, bytes_CW))
    slow, slower = (
        measured(4, 2, inter_gb_per_s=inter).all_to_all(columns, 4096)
        for inter in (1.0, 0.1)
    )
    assert (slower > slow).all()


@pytest.mark.parametrize(
    ("local", "expected"), [(2, (1.4, 1.6)), (3, (1.9, 1.8)), (8, (4.4, 2.8))]
)
def test_slowdown_follows_the_ranks_of_a_node(
    local: int, expected: tuple[float, float]
) -> None:
    slowdowns = {1: (1.0, 1.0), 2: (1.4, 1.6), 4: (2.4, 2.0)}
    model = measured(8 * local, local, slowdowns=slowdowns)
    assert model.compute_slowdown == pytest.approx(expected)
    assert measured().compute_slowdown == (1.0, 1.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: model(6, 4), r"world_size \(6\) must be a multiple"),
        (lambda: model(intra=0.0), "bandwidths must be above 0"),
        (lambda: published(intra_gb_per_s=0.0), "bandwidths must be above 0"),
        (lambda: PhysicalConstants(memory_gb_per_s=0), "must be above 0 GB/s, got 0"),
        (lambda: measured(4, 2, measured_gb_per_s=(2.0, 0.0)), "0.0 between nodes;"),
        (
            lambda: measured().all_to_all(np.ones((1, 3)), 64),
            "4 ranks, got values of 3",
        ),
    ],
)
def test_bad_ranks_and_bandwidths(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
