"""The physical estimate: bytes, reuse, host memory, cards, and its error."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import make_tables
from torchrec_neuroshard.bundles.find import physical_estimate
from torchrec_neuroshard.hardware.cards import GPU_CARDS
from torchrec_neuroshard.models.card_physics import PhysicalConstants, host_memory_ms
from torchrec_neuroshard.models.compute import PhysicalCostModel
from torchrec_neuroshard.models.estimate_error import CHECKED_CARDS, EstimateError
from torchrec_neuroshard.tables.features import FEATURE_NAMES, table_features
from torchrec_neuroshard.tables.profile import zipf_profile
from torchrec_neuroshard.tables.table import TableConfig

pytestmark = pytest.mark.filterwarnings("ignore:no cost model was measured")

BATCH = 4_096
BYTES_ONLY = PhysicalConstants(
    memory_gb_per_s=1_000.0,
    cache_mib=0.0,
    efficiency=1.0,
    forward_launch_us=0.0,
    backward_launch_us=0.0,
    sort_pass_us=0.0,
    weight_gradient_us=0.0,
    forward_step_us=0.0,
    backward_step_us=0.0,
    bag_ns=0.0,
    lookup_thread_ns=0.0,
    sort_bag_ns=0.0,
    sort_ns=0.0,
    update_thread_ns=0.0,
    hot_row_ns=0.0,
    adam_ns=0.0,
    weight_gradient_ns=0.0,
)


def skewed(exponent: float, **changes: object) -> TableConfig:
    rows = 1_000_000
    profile = zipf_profile(
        batch_size=BATCH, pooling_factor=20.0, num_embeddings=rows, exponent=exponent
    )
    (table,) = make_tables([128], rows, 20.0, profile=profile, **changes)
    return table


def features(*tables: TableConfig) -> npt.NDArray[np.float32]:
    return table_features(tables, BATCH)


def times(
    values_NF: npt.NDArray[np.float32], constants: PhysicalConstants
) -> npt.NDArray[np.float64]:
    """Return forward and backward of the shards as one set [ms]."""
    model = PhysicalCostModel(constants, name="a card", hardware="a card")
    sets = model.predict_sets(values_NF, np.zeros(len(values_NF), np.int64), 1)
    together: npt.NDArray[np.float64] = sets[0]
    return together


def column(values_NF: npt.NDArray[np.float32], name: str) -> npt.NDArray[np.float64]:
    return values_NF[:, FEATURE_NAMES.index(name)].astype(np.float64)


def test_looked_up_bytes_move_unless_a_cache_holds_their_rows() -> None:
    table = features(skewed(1.05))
    moved = (
        column(table, "lookup_bytes")
        + column(table, "output_bytes")
        + 8 * column(table, "num_lookups")
        + 8 * column(table, "num_bags")
    )
    forward = times(table, BYTES_ONLY)[0]
    np.testing.assert_allclose(forward, moved / 1e9, rtol=1e-4)

    def spared(exponent: float, cache_mib: float) -> float:
        """Return the share of the looked-up bytes that a cache saves."""
        table = features(skewed(exponent))
        cached = dataclasses.replace(BYTES_ONLY, cache_mib=cache_mib)
        less = [times(table, c)[0] for c in (BYTES_ONLY, cached)]
        return float((less[0] - less[1]) * 1e9 / column(table, "lookup_bytes")[0])

    # The cache holds the table: each row is read once.
    once = column(table, "distinct_bytes") / column(table, "lookup_bytes")
    np.testing.assert_allclose(spared(1.05, 1e6), 1 - once, rtol=1e-4)
    # It holds a thirtieth of the table: the hottest rows fill it first.
    assert spared(0.0, 16) < 0.05 < 0.3 < spared(1.05, 16) < spared(1.4, 16)


@st.composite
def drawn_table(draw: st.DrawFn) -> TableConfig:
    rows = draw(st.integers(1, 10**8))
    pooling = draw(st.floats(0.01, 200.0))
    return TableConfig(
        name="t",
        num_embeddings=rows,
        embedding_dim=4 * draw(st.integers(1, 256)),
        pooling_factor=pooling,
        profile=zipf_profile(
            batch_size=draw(st.integers(1, 2**17)),
            pooling_factor=pooling,
            num_embeddings=rows,
            exponent=draw(st.floats(0.0, 1.5)),
        ),
        data_type=draw(st.sampled_from(["fp32", "fp16"])),
        optimizer=draw(st.sampled_from(["sgd", "rowwise_adagrad", "adagrad", "adam"])),
        weighted=draw(st.booleans()),
    )


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    tables=st.lists(drawn_table(), min_size=1, max_size=8),
    batch=st.integers(1, 2**17),
    missed=st.floats(0.0, 1.0),
)
def test_no_set_is_faster_than_its_bytes(
    tables: list[TableConfig], batch: int, missed: float
) -> None:
    values = table_features(tables, batch)
    rows, outputs = column(values, "distinct_bytes"), column(values, "output_bytes")
    bags = column(values, "num_bags")
    # Only bags with ids read a gradient.
    gradients = np.minimum(outputs, outputs / bags * column(values, "num_lookups"))
    ids = 8 * column(values, "num_lookups")
    state = 8 * column(values, "num_distinct") * 2 ** column(values, "log2_width")
    state *= column(values, "is_adagrad") + 2 * column(values, "is_adam")
    together = np.zeros(len(tables), np.int64)
    for card in GPU_CARDS.values():
        model = physical_estimate("cuda", None, card)
        bytes_per_ms = card.hbm_gb_per_s.value * 1e6
        forward, backward = model.predict_sets(values, together, 1)[0]
        assert forward >= (rows + outputs + ids).sum() / bytes_per_ms
        assert backward >= (gradients + ids + 2 * rows + state).sum() / bytes_per_ms
        # The link carries the same bytes the other way at the same time.
        bytes_per_ms = card.host_gb_per_s.value * 1e6
        links = np.full(len(tables), card.host_gb_per_s.value)
        forward_N, backward_N = model.host_memory(values, links, None).T
        assert (forward_N >= rows / bytes_per_ms).all()
        assert (backward_N >= (rows + state / 2) / bytes_per_ms).all()
        missed_N = np.full(len(tables), missed)
        forward_N, backward_N = model.host_memory(values, links, missed_N).T
        assert (forward_N >= missed * rows / bytes_per_ms).all()
        assert (backward_N >= state / 2 / bytes_per_ms).all()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    tables=st.lists(drawn_table(), min_size=2, max_size=8),
    batch=st.integers(1, 2**17),
)
def test_another_table_never_makes_a_set_faster(
    tables: list[TableConfig], batch: int
) -> None:
    values = table_features(tables, batch)
    for card in GPU_CARDS.values():
        model = physical_estimate("cuda", None, card)
        sums = np.cumsum(model.encode(values), axis=0)
        costs = model.predict_sums(sums)
        assert (np.diff(costs, axis=0) >= -1e-12 * costs[:-1]).all()
        least = model.additive[0] + sums @ model.additive[1:]
        assert (costs >= least * (1 - 1e-12)).all()


def test_narrow_tables_take_longer_next_to_a_wide_one() -> None:
    card = PhysicalConstants(sort_ns=0.0, sort_bag_ns=0.0, sort_pass_us=0.0)
    narrow = features(*make_tables([16] * 8, 10**5, 20.0))
    wide = features(*make_tables([256], 10**5, 1.0))
    apart = times(narrow, card) + times(wide, card)
    launches = 1e-3 * np.array([card.forward_launch_us, card.backward_launch_us])
    together = times(np.concatenate([narrow, wide]), card)
    assert (together > 1.5 * (apart - launches)).all()


def test_state_of_the_optimizer_is_read_and_written() -> None:
    def backward(optimizer: str) -> float:
        table = features(skewed(0.0, optimizer=optimizer, data_type="fp16"))
        return float(times(table, BYTES_ONLY)[1])

    distinct = float(column(features(skewed(0.0)), "num_distinct")[0])
    state = 2 * 4 * 128 * distinct / 1e9  # fp32 beside fp16 weights
    sectors = 2 * 32 * distinct / 1e9
    wanted = {
        "adagrad": state + sectors,
        "adam": 2 * (state + sectors),
        "rowwise_adagrad": sectors,
    }
    for optimizer, ms in wanted.items():
        assert backward(optimizer) - backward("sgd") == pytest.approx(ms, rel=1e-3)


def test_rows_in_host_memory_cost_lookups_and_updates() -> None:
    constants = PhysicalConstants(memory_gb_per_s=3_350.0, host_gb_per_s=55.6)
    table = features(skewed(1.05, optimizer="sgd"))
    forward, backward = host_memory_ms(table, constants, 55.6)[0]
    read, written = 55.6e6 * constants.host_read, 55.6e6 * constants.host_update
    np.testing.assert_allclose(forward, column(table, "lookup_bytes")[0] / read)
    updated = 2 * column(table, "distinct_bytes")[0]
    np.testing.assert_allclose(backward, updated / written)
    none = host_memory_ms(table, constants, 55.6, np.zeros(1))[0]
    some = host_memory_ms(table, constants, 55.6, np.full(1, 0.5))[0]
    assert none[0] < some[0] < forward
    assert none[1] == some[1] == 0  # sgd has no state, and rows are on the card


def test_errors_say_what_was_checked() -> None:
    assert str(EstimateError(card="mi300x")).endswith("never checked on this card")
    assert "on this card, forward 33% and backward 15%" in str(
        EstimateError(card="a100-40gb")
    )
    # The other cards' errors exclude the card's own.
    worst = max(CHECKED_CARDS, key=lambda c: CHECKED_CARDS[c].backward_error or 0)
    own, error = CHECKED_CARDS[worst], EstimateError(card=worst)
    assert own is error.checked and own.backward_error is not None
    assert error.backward < own.backward_error
