from __future__ import annotations

import json
from typing import Any

import pytest

from torchrec_neuroshard.errors import ProfileError, TableError
from torchrec_neuroshard.tables.profile import zipf_profile
from torchrec_neuroshard.tables.table import TableConfig, check_tables

PROFILE = zipf_profile(batch_size=64, pooling_factor=2.0, num_embeddings=100)


def table(**options: object) -> TableConfig:
    fields = {"name": "t", "num_embeddings": 100, "embedding_dim": 8, **options}
    return TableConfig(**fields)  # type: ignore[arg-type]


def test_column_shards_conserve_bytes() -> None:
    whole = table(embedding_dim=64, profile=PROFILE)
    shards = [whole.with_width(width) for width in (4, 12, 48)]
    assert sum(s.weight_bytes for s in shards) == whole.weight_bytes
    assert {s.profile for s in shards} == {PROFILE}
    with pytest.raises(TableError, match=r"multiple of 4 .*, got 5"):
        whole.with_width(5)


def test_json_round_trip() -> None:
    before = table(profile=PROFILE, weighted=True, data_type="fp16", optimizer="sgd")
    assert TableConfig.from_json(json.loads(json.dumps(before.to_json()))) == before
    coloured = {**before.to_json(), "colour": "red"}
    wrong: list[Any] = [{"name": "t"}, [], coloured, {"profile": 3}]
    for data in wrong:
        named = "invalid (table|feature profile)"
        with pytest.raises((TableError, ProfileError), match=named):
            TableConfig.from_json(data)


def test_profile_decides_the_lookups() -> None:
    with_profile = table(pooling_factor=7.0, profile=PROFILE)
    assert with_profile.profile_at(128).num_lookups == 256
    without = table(pooling_factor=7.0, weighted=True).profile_at(128)
    assert (without.num_lookups, without.weighted) == (896, True)
    assert 0 < without.num_distinct <= 100 + 1e-9


def test_table_names_must_differ() -> None:
    check_tables([table(), table(name="u")])
    with pytest.raises(TableError, match="no tables given; pass at least one"):
        check_tables([])
    with pytest.raises(TableError, match="'t' is given twice"):
        check_tables([table(), table()])
