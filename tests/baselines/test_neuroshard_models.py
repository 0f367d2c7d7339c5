"""NeuroShard's nets: their inputs by hand, their training on what was measured."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from torchrec_neuroshard.baselines import neuroshard_models
from torchrec_neuroshard.baselines.neuroshard_models import (
    PAPER_FEATURES,
    CommsNets,
    ComputeNet,
    FitReport,
    NeuroShardModels,
    PaperTrainConfig,
    augment_tables,
    columns_in_paper_batch,
    comparable_records,
    fit_comms,
    fit_comms_to_model,
    fit_compute,
    load_models,
    place_at_random_level,
    predict_records,
    save_models,
    shard_features,
    train_models,
)
from torchrec_neuroshard.collect.store import (
    CommsStore,
    RecordStore,
    read_comms_records,
    read_header,
    read_records,
)
from torchrec_neuroshard.errors import (
    BundleCorruptError,
    BundleMismatchError,
    ConfigError,
    FeatureSchemaError,
    RecordError,
    RecordMismatchError,
)
from torchrec_neuroshard.profiles import FeatureProfile
from torchrec_neuroshard.records import (
    CommsHeader,
    CommsRecord,
    CostRecord,
    Fingerprint,
    RunHeader,
)
from torchrec_neuroshard.tables import TableConfig
from torchrec_neuroshard.testing import AnalyticCommsModel

DATA = Path(__file__).parents[2] / "benchmarks" / "data"
COLLECTIVES = DATA / "comms_gloo_epyc.parquet"
QUICK = PaperTrainConfig(epochs=2, batch_samples=64)


def num_parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def test_nets_are_as_large_as_the_paper_s() -> None:
    assert num_parameters(ComputeNet()) == 8_993
    assert num_parameters(CommsNets.fresh(4).forward) == 12_084
    # 4 inputs less of 128 weights each.
    assert num_parameters(CommsNets.fresh(4).backward) == 12_084 - 4 * 128


def test_features_are_in_the_order_of_sorted_names() -> None:
    assert PAPER_FEATURES == (
        *("bin_0", "bin_1"),
        *(f"bin_{j}" for j in range(10, 17)),
        *(f"bin_{j}" for j in range(2, 10)),
        *("dim", "pooling_factor", "row"),
    )


def small_table(rows: int = 50, batch_size: int = 4) -> TableConfig:
    # Ids: two once, one twice, one four times: 8 lookups, 4 distinct.
    profile = FeatureProfile(
        batch_size=batch_size,
        num_lookups=8,
        access_histogram=(2.0, 1.0, 1.0, *(0.0,) * 14),
    )
    return TableConfig(name="t", num_embeddings=rows, embedding_dim=8, profile=profile)


def test_features_by_hand() -> None:
    row = shard_features([small_table()], 4)[0]
    expected = {"bin_0": 0.5, "bin_1": 0.25, "bin_2": 0.25, "dim": 8.0, "row": 100.0}
    for name, value in zip(PAPER_FEATURES, row.tolist(), strict=True):
        if name == "pooling_factor":
            assert value == pytest.approx(8 / 65_536)
        else:
            assert value == expected.get(name, 0.0), name
    assert shard_features([small_table(rows=7_000)], 4)[0, -1] == 7_000


def test_at_the_paper_s_batch_inputs_are_the_paper_s() -> None:
    table = TableConfig(
        name="t", num_embeddings=10**6, embedding_dim=8, pooling_factor=2.5
    )
    features = shard_features([table], 65_536)[0]
    assert features[PAPER_FEATURES.index("pooling_factor")] == pytest.approx(2.5)
    np.testing.assert_array_equal(columns_in_paper_batch([40, 8], 65_536), [40, 8])
    np.testing.assert_array_equal(columns_in_paper_batch([40, 8], 16_384), [10, 2])
    assert features[: len(PAPER_FEATURES) - 3].sum() == pytest.approx(1.0, rel=1e-5)


def test_augmentation_is_six_widths_a_table() -> None:
    tables = [dataclasses.replace(small_table(), name=f"t{i}") for i in range(3)]
    widths = [t.embedding_dim for t in augment_tables(tables)]
    assert widths == [128, 64, 32, 16, 8, 4] * 3
    assert [t.embedding_dim for t in augment_tables(tables[:1], 24)] == [24, 12]
    with pytest.raises(ConfigError, match="multiple of 4, got 18"):
        augment_tables(tables, 18)


class Level(np.random.Generator):
    """Draws one number for everything from 0 to 1."""

    level = 0.0

    def random(self, *args: object, **kwargs: object) -> float:  # type: ignore[override]
        return self.level


def test_placement_by_level() -> None:
    # Level 0: never random. 8 | 4, 4 joins 4, 2 goes to the first of two equals.
    held = place_at_random_level(Level(np.random.PCG64(0)), [2, 4, 8, 4], 2)
    assert held.tolist() == [10, 8]
    rng = np.random.default_rng(0)
    drawn = np.array([place_at_random_level(rng, [4] * 8, 4) for _ in range(200)])
    assert (drawn.sum(axis=1) == 32).all()
    assert drawn.max() > 16 and (drawn == 8).all(axis=1).any()


def test_a_set_is_the_sum_of_its_shards() -> None:
    net = ComputeNet()
    features = torch.rand(6, 20)
    ids = torch.tensor([0, 0, 0, 1, 1, 2])
    costs = net(features, ids, 4)
    turned = net(features.flip(0), ids.flip(0), 4)
    torch.testing.assert_close(costs, turned)
    empty = net.cost(torch.zeros(1, 32))
    torch.testing.assert_close(costs[3:], empty)
    with pytest.raises(FeatureSchemaError, match="takes 20 features, got 19"):
        net.encode(features[:, :19])


# Training on what was measured.


@pytest.fixture(scope="module")
def measured() -> list[CostRecord]:
    return read_records([DATA / "compute_cpu.parquet"])[1]


def test_trained_on_measured_sets_it_beats_their_mean(
    measured: list[CostRecord],
) -> None:
    held_out = comparable_records((r for r in measured if r.held_out), "sgd")
    training = [r for r in measured if not r.held_out]
    config = PaperTrainConfig(epochs=30, batch_samples=128)
    net, report = fit_compute(training, config)
    sets = comparable_records(training, "sgd")
    parts = (report.num_training, report.num_validation, report.num_test)
    assert sum(parts) == len(sets)
    assert parts[1:] == (len(sets) // 10, len(sets) // 10)
    assert report.test_mse < 0.3 * report.mean_test_mse
    cost = np.array([r.total_ms for r in held_out])
    error = np.square(predict_records(net, held_out) - cost).mean()
    of_mean = np.square(np.mean([r.total_ms for r in sets]) - cost).mean()
    assert error < 0.3 * of_mean


def test_statistics_are_those_of_the_augmented_tables(
    measured: list[CostRecord],
) -> None:
    records = comparable_records(measured, "sgd")[:40]
    net, _ = fit_compute(records, QUICK)
    every = np.concatenate(
        [shard_features(augment_tables(r.tables), r.batch_size) for r in records]
    ).astype(np.float64)
    np.testing.assert_allclose(net.mean_F, every.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(net.std_F, every.std(axis=0) + 1e-6, rtol=1e-5)


def test_same_seed_same_weights(measured: list[CostRecord]) -> None:
    records = comparable_records(measured, "rowwise_adagrad")[:40]
    config = dataclasses.replace(QUICK, optimizer="rowwise_adagrad")
    nets = [fit_compute(records, config)[0] for _ in range(2)]
    other = fit_compute(records, dataclasses.replace(config, seed=1))[0]
    first, second, third = (predict_records(n, records) for n in (*nets, other))
    np.testing.assert_array_equal(first, second)
    assert (first != third).all()


def test_only_sets_of_the_kind_asked_for_are_trained_on(
    measured: list[CostRecord],
) -> None:
    chosen = comparable_records(measured, "sgd")
    assert {t.optimizer for r in chosen for t in r.tables} == {"sgd"}
    assert {t.data_type for r in chosen for t in r.tables} == {"fp32"}
    assert not any(t.weighted or r.repeat_of for r in chosen for t in r.tables)
    assert 1_000 < len(chosen) < len(measured) / 2


def test_too_few_records_are_named(measured: list[CostRecord]) -> None:
    few = comparable_records(measured, "sgd")[:2]
    with pytest.raises(RecordError, match="2 sets with sgd, fp32 are too few"):
        fit_compute(few, QUICK)
    with pytest.raises(RecordError, match="0 samples of the forward all-to-all of 5"):
        fit_comms([], 5, QUICK)


def collective(
    index: int,
    columns: Sequence[float],
    wait: Sequence[float],
    transfer: Sequence[float],
    name: str = "pooled_forward",
    repeat_of: int | None = None,
) -> CommsRecord:
    """All ranks send to each other what `columns` of 65,536 samples are."""
    world_size = len(columns)
    arrival = tuple(max(wait) - w for w in wait)
    return CommsRecord(
        index=index,
        repeat_of=repeat_of,
        collective=name,
        world_size=world_size,
        local_world_size=world_size,
        bytes_per_peer=tuple(int(c * 4 * 65_536 / world_size) for c in columns),
        delay_ms=arrival,
        arrival_raw_ms=(arrival,),
        done_raw_ms=(tuple(max(arrival) + t for t in transfer),),
        ref_raw_ms=(1.0,),
        wait_ms=tuple(wait),
        transfer_ms=tuple(transfer),
    )


def test_forward_samples_run_from_a_rank_s_own_start() -> None:
    records = [
        collective(0, [16, 48], [3.0, 0.0], [5.0, 6.0]),
        collective(1, [16, 48], [0.0, 0.0], [5.0, 6.0], repeat_of=0),
        collective(2, [16, 48, 8], [0.0] * 3, [1.0] * 3),
        collective(3, [32, 8], [0.0, 0.0], [7.0, 8.0], "pooled_backward"),
        collective(4, [32, 8], [2.0, 0.0], [7.0, 8.0], "pooled_backward"),
    ]
    forward = neuroshard_models._measured_samples(records, 2, "pooled_forward")
    # Columns, then when each rank starts after the first: rank 0 waits 3 ms for 1.
    np.testing.assert_allclose(forward.inputs_SI, [[16, 48, 0, 3]])
    np.testing.assert_allclose(forward.target_SW, [[8, 6]])
    backward = neuroshard_models._measured_samples(records, 2, "pooled_backward")
    np.testing.assert_allclose(backward.inputs_SI, [[32, 8]])
    np.testing.assert_allclose(backward.target_SW, [[7, 8]])


def comms_records(world_size: int, count: int, seed: int = 0) -> list[CommsRecord]:
    """Times that grow with a rank's columns and with the wait."""
    rng = np.random.default_rng(seed)
    records = []
    for index in range(count):
        columns = rng.integers(1, 200, world_size)
        wait = rng.uniform(0, 10, world_size) * (index % 2)
        wait[rng.integers(world_size)] = 0.0
        transfer = (1 + 0.1 * columns).tolist()
        name = ("pooled_backward", "pooled_forward")[index % 2]
        records.append(
            collective(index, columns.tolist(), wait.tolist(), transfer, name)
        )
    return records


def test_comms_nets_learn_what_every_rank_takes() -> None:
    config = PaperTrainConfig(epochs=100, batch_samples=64)
    nets, forward, backward = fit_comms(comms_records(3, 800), 3, config)
    assert num_parameters(nets.forward) > num_parameters(nets.backward)
    assert forward.test_mse < 0.1 * forward.mean_test_mse
    assert backward.test_mse < 0.1 * backward.mean_test_mse


@pytest.mark.skipif(not COLLECTIVES.exists(), reason="no measured collectives")
def test_measured_collectives_are_told_better_than_by_their_mean() -> None:
    records = read_comms_records([COLLECTIVES])[0][1]
    ratios = []
    for seed in range(3):  # few samples to judge by: other splits, too
        config = PaperTrainConfig(epochs=60, batch_samples=32, seed=seed)
        _, forward, backward = fit_comms(records, 4, config)
        ratios.append([r.test_mse / r.mean_test_mse for r in (forward, backward)])
    assert (np.median(ratios, axis=0) < 0.9).all()


def imitate(config: PaperTrainConfig) -> tuple[CommsNets, FitReport, FitReport]:
    return fit_comms_to_model(
        AnalyticCommsModel(gb_per_s=0.1),
        [128, 64, 64, 32, 32, 16, 8, 8, 4],
        world_size=4,
        batch_size=8_192,
        num_samples=600,
        config=config,
    )


def test_imitated_model_is_told_better_than_by_its_mean() -> None:
    _, forward, backward = imitate(PaperTrainConfig(epochs=60, batch_samples=32))
    assert forward.test_mse < 0.4 * forward.mean_test_mse
    assert backward.test_mse < 0.1 * backward.mean_test_mse


def test_imitation_is_the_same_for_the_same_seed() -> None:
    assert imitate(QUICK)[1:] == imitate(QUICK)[1:]
    assert imitate(QUICK)[1:] != imitate(dataclasses.replace(QUICK, seed=1))[1:]


# On disk.

HERE = Fingerprint(
    device="some cpu", device_type="cpu", num_threads=1, torch="2.13", fbgemm="1.8"
)


def some_models() -> NeuroShardModels:
    compute = ComputeNet()
    compute.mean_F.fill_(3.0)
    return NeuroShardModels(
        fingerprint=HERE,
        compute=compute,
        comms={2: CommsNets.fresh(2), 20: CommsNets.fresh(20)},
        trained_on={"reports": {}},
    )


def outputs(models: NeuroShardModels) -> list[npt.NDArray[np.float32]]:
    inputs = torch.arange(40.0)[None]
    with torch.no_grad():
        return [
            models.compute(inputs[:, :20], torch.tensor([0]), 1).numpy(),
            *(n.forward(inputs[:, : 2 * w]).numpy() for w, n in models.comms.items()),
            *(n.backward(inputs[:, :w]).numpy() for w, n in models.comms.items()),
        ]


def test_saved_models_predict_the_same(tmp_path: Path) -> None:
    models = some_models()
    save_models(tmp_path, models)
    loaded = load_models(tmp_path)
    for before, after in zip(outputs(models), outputs(loaded), strict=True):
        np.testing.assert_array_equal(before, after)
    assert loaded.fingerprint == HERE
    assert list(loaded.comms) == [2, 20]


def test_what_is_wrong_on_disk_is_named(tmp_path: Path) -> None:
    with pytest.raises(BundleCorruptError, match=r"no neuroshard\.json"):
        load_models(tmp_path)
    save_models(tmp_path, some_models())
    info = json.loads((tmp_path / "neuroshard.json").read_text())
    for change, error, text in (
        ({"format_version": 99}, BundleMismatchError, "version 99"),
        ({"feature_names": ["dim"]}, BundleMismatchError, "other features"),
        ({"world_sizes": [2, 20, 4]}, BundleCorruptError, "does not hold the nets"),
        ({"weights_sha256": "0" * 64}, BundleCorruptError, "damaged"),
    ):
        (tmp_path / "neuroshard.json").write_text(json.dumps({**info, **change}))
        with pytest.raises(error, match=text):
            load_models(tmp_path)


def test_weights_that_are_not_numbers_are_refused(tmp_path: Path) -> None:
    models = some_models()
    models.compute.std_F.fill_(float("nan"))
    save_models(tmp_path, models)
    with pytest.raises(BundleCorruptError, match="is not finite"):
        load_models(tmp_path)


def write_comms(path: Path, device: str) -> None:
    run = {
        "reference_ms": 1.0,
        "seed": 0,
        "sampling": {},
        "command": "neuroshard collect comms",
        "created": "2026-01-01",
    }
    header = CommsHeader(
        fingerprint=dataclasses.replace(HERE, device=device),
        backend="gloo",
        world_size=3,
        local_world_size=3,
        intra_gb_per_s=1.0,
        inter_gb_per_s=0.0,
        **run,  # type: ignore[arg-type]
    )
    records = comms_records(2, 40) + comms_records(3, 40)  # groups of one run
    with CommsStore(path, header) as store:
        for index, record in enumerate(records):
            store.append(dataclasses.replace(record, index=index))


def test_trained_from_files_and_saved(
    tmp_path: Path, measured: list[CostRecord]
) -> None:
    kernels, comms = tmp_path / "compute.parquet", tmp_path / "comms.parquet"
    header = read_header(DATA / "compute_cpu.parquet")
    assert isinstance(header, RunHeader)
    with RecordStore(kernels, header) as store:
        for record in measured[:100]:
            store.append(record)
    write_comms(comms, header.fingerprint.device)
    out = tmp_path / "out"
    files = ["--compute", str(kernels), "--comms", str(comms), "--out", str(out)]
    assert neuroshard_models.main([*files, "--epochs", "2"]) == 0
    loaded = load_models(out)
    assert list(loaded.comms) == [2, 3]
    assert loaded.fingerprint == header.fingerprint
    reports = loaded.trained_on["reports"]
    assert set(reports) == {
        "compute",
        *(f"comms {w} {way}" for w in (2, 3) for way in ("forward", "backward")),
    }
    assert 0 < reports["compute"]["held_out_mape"]
    assert loaded.trained_on["recipe"]["epochs"] == 2
    write_comms(tmp_path / "other.parquet", "another cpu")
    with pytest.raises(RecordMismatchError, match="collectives on another cpu"):
        train_models([kernels], [tmp_path / "other.parquet"], QUICK)
    mixed = train_models(
        [kernels], [tmp_path / "other.parquet"], QUICK, mix_hardware=True
    )
    assert mixed.trained_on["comms_devices"] == ["another cpu"]


def test_bad_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="epochs"):
        PaperTrainConfig(epochs=0)
    with pytest.raises(ConfigError, match="validation_share"):
        PaperTrainConfig(validation_share=0.6, test_share=0.4)
    with pytest.raises(ConfigError, match="unknown optimizer 'lion'; one of"):
        PaperTrainConfig(optimizer="lion")
