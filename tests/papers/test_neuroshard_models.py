"""NeuroShard's nets: inputs worked out by hand, and their files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from papers.nets import save_models
from tests.builders import make_fingerprint, make_tables
from torchrec_neuroshard.errors import (
    BundleCorruptError,
    BundleMismatchError,
)
from torchrec_neuroshard.papers.neuroshard_models import (
    PAPER_FEATURES,
    CommsNets,
    ComputeNet,
    NetsInfo,
    NeuroShardModels,
    columns_in_paper_batch,
    load_models,
    shard_features,
)
from torchrec_neuroshard.tables.profile import FeatureProfile


def test_nets_have_the_papers_sizes() -> None:
    nets = CommsNets.fresh(4)
    found = [
        sum(p.numel() for p in net.parameters())
        for net in (ComputeNet(), nets.forward, nets.backward)
    ]
    # Four inputs fewer, with 128 weights each.
    assert found == [8_993, 12_084, 12_084 - 4 * 128]


def test_features_by_hand() -> None:
    # Two ids occur once, one twice, one four times: 8 lookups, 4 distinct ids.
    profile = FeatureProfile(
        batch_size=4,
        num_lookups=8,
        access_histogram=(2.0, 1.0, 1.0, *(0.0,) * 14),
    )
    (table,) = make_tables([8], 50, profile=profile)
    row = shard_features([table], 4)[0]
    expected = {"bin_0": 0.5, "bin_1": 0.25, "bin_2": 0.25, "dim": 8.0, "row": 100.0}
    expected["pooling_factor"] = 8 / 65_536
    for name, value in zip(PAPER_FEATURES, row.tolist(), strict=True):
        assert value == pytest.approx(expected.get(name, 0.0)), name
    larger = dataclasses.replace(table, num_embeddings=7_000)
    assert shard_features([larger], 4)[0, -1] == 7_000
    # Columns are sorted as strings.
    assert PAPER_FEATURES[1:4] == ("bin_1", "bin_10", "bin_11")
    # At the paper's batch size, inputs are the paper's.
    (row,) = shard_features(make_tables([8], 10**6, 2.5), 65_536)
    assert row[PAPER_FEATURES.index("pooling_factor")] == pytest.approx(2.5)
    np.testing.assert_array_equal(columns_in_paper_batch([40, 8], 65_536), [40, 8])
    np.testing.assert_array_equal(columns_in_paper_batch([40, 8], 16_384), [10, 2])


def test_saved_models_load_and_faults_on_disk_are_named(
    tmp_path: Path,
) -> None:
    with pytest.raises(BundleCorruptError, match=r"neuroshard\.json is missing"):
        load_models(tmp_path)
    compute = ComputeNet()
    compute.mean_F.fill_(3.0)
    models = NeuroShardModels(
        info=NetsInfo(
            world_sizes=(2, 20), fingerprint=make_fingerprint("some cpu"), trained_on={}
        ),
        compute=compute,
        comms={2: CommsNets.fresh(2), 20: CommsNets.fresh(20)},
    )
    save_models(tmp_path, models, "# A card")
    loaded = load_models(tmp_path)
    assert torch.equal(loaded.compute.mean_F, compute.mean_F)
    assert loaded.info == models.info
    assert list(loaded.comms) == [2, 20]
    assert (tmp_path / "CARD.md").read_text() == "# A card\n"
    info = json.loads((tmp_path / "neuroshard.json").read_text())
    for change, error, text in (
        ({"format_version": 99}, BundleMismatchError, "version 99"),
        ({"feature_names": ["dim"]}, BundleMismatchError, "other features"),
        ({"world_sizes": [2, 4]}, BundleCorruptError, "this bundle's network"),
    ):
        (tmp_path / "neuroshard.json").write_text(json.dumps({**info, **change}))
        with pytest.raises(error, match=text):
            load_models(tmp_path)
