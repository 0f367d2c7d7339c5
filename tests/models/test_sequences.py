"""Unpooled kernels of CPUs: additive, scaled to a CPU, and apart from pooled ones."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest

from tests.builders import make_tables
from tests.models.test_compute import random_neural
from torchrec_neuroshard.bundles.fit_sequences import fit_sequences, predict
from torchrec_neuroshard.bundles.set_data import build_sets
from torchrec_neuroshard.costs.encoder import ShardEncoder
from torchrec_neuroshard.costs.simulator import Simulator
from torchrec_neuroshard.costs.task import Placement, ShardingTask
from torchrec_neuroshard.measure.records import CostRecord
from torchrec_neuroshard.models.compute import NeuralCostModel
from torchrec_neuroshard.models.sequences import (
    CPU_SEQUENCES,
    NUM_VALUES,
    OTHER_CPU_ERROR,
    SequenceKernels,
)
from torchrec_neuroshard.tables.features import table_features
from torchrec_neuroshard.tables.profile import zipf_profile
from torchrec_neuroshard.tables.table import TableConfig
from torchrec_neuroshard.testing import AnalyticCommsModel

BATCH = 64


def sequence(
    name: str, length: float, width: int = 64, **fields: object
) -> TableConfig:
    profile = zipf_profile(
        batch_size=BATCH, pooling_factor=length, num_embeddings=100_000
    )
    [table] = make_tables(
        [width], 100_000, [length], profile=profile, pooled=False, **fields
    )
    return dataclasses.replace(table, name=name)


def on_cpu(
    sequences: SequenceKernels | None = None, reference_ms: float = 12.0
) -> NeuralCostModel:
    model = random_neural()
    return NeuralCostModel(
        model.network,
        name="cpu",
        hardware="some CPU",
        ranges={},
        reference_ms=reference_ms,
        sequences=sequences,
    )


def features(tables: list[TableConfig]) -> npt.NDArray[np.float32]:
    return table_features(tables, BATCH)


def test_sets_of_sequences_take_a_launch_and_their_shards() -> None:
    model = on_cpu(
        dataclasses.replace(CPU_SEQUENCES, device="some CPU", reference_ms=12)
    )
    tables = [sequence("a", 10), sequence("b", 500), sequence("c", 2)]
    encoded = model.encode_sequences(features(tables))
    assert encoded.shape == (3, model.encoding_dim)
    assert not encoded[:, :-NUM_VALUES].any()
    one, both = model.predict_sums(np.stack([encoded[0], encoded.sum(axis=0)]))
    assert (both > one).all() and (one > 0).all()
    # The forward is additive beside its launch; the map of the backward is shared.
    alone = model.predict_sums(encoded)
    launch = CPU_SEQUENCES.constants[0]["launch"]
    assert both[0] == pytest.approx(alone[:, 0].sum() - 2 * launch)
    assert both[1] > alone[:, 1].sum() - 2 * CPU_SEQUENCES.constants[1]["launch"]
    assert (model.predict_sums(np.zeros((1, model.encoding_dim))) == 0).all()


def test_the_backward_takes_longer_for_distinct_ids_than_for_repeats() -> None:
    model = on_cpu()
    table = sequence("a", 200)
    assert table.profile is not None
    once = zipf_profile(
        batch_size=BATCH, pooling_factor=200, num_embeddings=10**8, exponent=0.0
    )
    apart = dataclasses.replace(table, profile=once)
    repeated, distinct = model.predict_sums(
        model.encode_sequences(features([table, apart]))
    )
    assert distinct[1] > 2 * repeated[1]


def test_pooled_shards_are_predicted_as_without_sequences() -> None:
    model, plain = on_cpu(), random_neural()
    pooled = features(list(make_tables([8, 64, 128], 10_000, [1.0, 3.0, 20.0])))
    sums = model.encode(pooled).sum(axis=0, keepdims=True)
    expected = plain.predict_sums(plain.encode(pooled).sum(axis=0, keepdims=True))
    assert model.predict_sums(sums) == pytest.approx(expected)
    assert not sums[:, -NUM_VALUES:].any()
    assert plain.sequences is None, "a GPU"
    one = features([sequence("a", 5)])
    assert plain.encode_sequences(one) == pytest.approx(plain.encode(one))


def test_times_of_another_cpu_are_scaled_and_uncertain() -> None:
    own = dataclasses.replace(CPU_SEQUENCES, device="some CPU")
    reference_ms = 4 * CPU_SEQUENCES.reference_ms
    one, found = features([sequence("a", 50)]), []
    for kernels in (own, None):
        model = on_cpu(kernels, reference_ms)
        encoded = model.encode_sequences(one)
        found.append((model.predict_sums(encoded), model.relative_uncertainty(encoded)))
    (own_ms, own_error), (other_ms, other_error) = found
    assert own_ms == pytest.approx(2 * other_ms)
    assert own_error == pytest.approx(CPU_SEQUENCES.error)
    assert other_error == pytest.approx(OTHER_CPU_ERROR)


def test_the_encoder_and_the_simulator_know_which_tables_are_pooled() -> None:
    model = on_cpu()
    table = sequence("a", 20)
    tables = (table, dataclasses.replace(table, name="b", pooled=True))
    encoder = ShardEncoder(model)
    parts = encoder.parts(tables, [10**5] * 2, [BATCH] * 2, [None] * 2)
    encoded = encoder.encoding(encoder.rows(parts, np.array([64, 64])))
    own = encoded[:, -NUM_VALUES:].any(axis=1).tolist()
    assert own == [True, False]
    task = ShardingTask(tables=tables, world_size=2, batch_size=BATCH, groups=(0, 1))
    simulator = Simulator(task, model, AnalyticCommsModel())
    placed = Placement.from_widths(2, [(0, 64, 0), (1, 64, 1)], task)
    first, second = simulator.evaluate(placed).ranks
    assert first.bwd_compute == pytest.approx(model.predict_sums(encoded)[0, 1])
    assert second.bwd_compute == pytest.approx(model.predict_sums(encoded)[1, 1])


def records_of(
    kernels: SequenceKernels, count: int, *, noise: float = 0.0
) -> list[CostRecord]:
    """Sets whose times are those of some constants, with noise."""
    rng, found = np.random.default_rng(3), []
    for index in range(count):
        width, pooled = int(rng.choice([16, 64, 256])), index % 4 == 3
        optimizer = str(rng.choice(["sgd", "rowwise_adagrad"]))
        tables = tuple(
            dataclasses.replace(
                sequence(
                    f"{index}/{i}",
                    float(rng.integers(1, 400)),
                    width,
                    optimizer=optimizer,
                ),
                pooled=pooled,
                data_type=str(rng.choice(["fp32", "fp16"])),
            )
            for i in range(int(rng.integers(1, 6)))
        )
        record = CostRecord(
            index=index,
            batch_size=BATCH,
            tables=tables,
            held_out=index % 3 == 0,
            fwd_ms=1.0,
            bwd_ms=1.0,
            num_passes=5,
            spread=0.0,
            reference_ms=1.0,
        )
        forward, backward = predict(kernels, build_sets([record]))[0]
        factor = float(np.exp(rng.normal(0, noise)))
        found.append(
            dataclasses.replace(
                record, fwd_ms=factor * float(forward), bwd_ms=factor * float(backward)
            )
        )
    return found


def test_constants_are_found_again() -> None:
    found = fit_sequences(records_of(CPU_SEQUENCES, 240), "x", 2.0)
    assert found is not None
    assert (found.device, found.reference_ms, found.num_sets) == ("x", 2.0, 120)
    assert found.error < 0.01
    noisy = fit_sequences(records_of(CPU_SEQUENCES, 240, noise=0.1), "x", 2.0)
    assert noisy is not None
    assert 0.04 < noisy.error < 0.15


def test_few_sets_scale_the_constants_of_another_cpu() -> None:
    forward, backward = CPU_SEQUENCES.constants
    own = dataclasses.replace(
        CPU_SEQUENCES,
        constants=(
            {name: 0.5 * value for name, value in forward.items()},
            {name: 3.0 * value for name, value in backward.items()},
        ),
    )
    found = fit_sequences(records_of(own, 24), "x", 2.0)
    assert found is not None
    assert (found.device, found.reference_ms, found.num_sets) == ("x", 2.0, 18)
    assert found.error < 0.001
    for mine, theirs in zip(found.constants, own.constants, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3)
    assert fit_sequences(records_of(own, 4), "x", 2.0) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_bytes": (1.0, float("nan"))},
        {"constants": ({"launch": -1.0}, {})},
        {"constants": ({"hops": 1.0}, {})},
    ],
)
def test_bad_constants_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"finite|unknown kinds of work"):
        dataclasses.replace(CPU_SEQUENCES, **fields)  # type: ignore[arg-type]
