from __future__ import annotations

import gzip
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from torchrec_neuroshard.errors import ConfigError, TableError
from torchrec_neuroshard.tables import TableConfig
from torchrec_neuroshard.workloads.dlrm_dataset import (
    DLRM_BATCH_SIZE,
    DLRM_LOOKUP_SHARES,
    DLRM_NUM_DISTINCT,
    DLRM_NUM_LOOKUPS,
    generate_dlrm_tables,
    load_dlrm_dataset,
)

DISTINCT_SHARES = [0.473, 0.152, 0.139, 0.112, 0.072, 0.032, 0.011, 0.005, 0.002, 0.001]
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


@pytest.fixture(scope="module", params=[0, 5])
def generated(request: pytest.FixtureRequest) -> tuple[TableConfig, ...]:
    return generate_dlrm_tables(seed=request.param)


def column(tables: tuple[TableConfig, ...], name: str) -> np.ndarray:
    return np.array([getattr(t.profile, name) for t in tables], dtype=np.float64)


def test_totals_are_the_published_ones(generated: tuple[TableConfig, ...]) -> None:
    assert len(generated) == 856
    assert sum(t.profile.num_lookups for t in generated if t.profile) == (
        DLRM_NUM_LOOKUPS
    )
    distinct = column(generated, "num_distinct")
    assert distinct.sum() == pytest.approx(DLRM_NUM_DISTINCT, rel=1e-6)
    rows = np.array([t.num_embeddings for t in generated])
    assert (distinct <= rows * (1 + 1e-9)).all()
    assert rows.mean() == pytest.approx(4_107_472, rel=0.01)


def test_shares_per_count_bin_are_the_published_ones(
    generated: tuple[TableConfig, ...],
) -> None:
    histogram_TC = column(generated, "access_histogram")
    count_TC = np.array([t.profile.bin_mean_counts() for t in generated if t.profile])
    lookups_C = (histogram_TC * count_TC).sum(axis=0)
    assert lookups_C.sum() == pytest.approx(DLRM_NUM_LOOKUPS, rel=1e-6)
    np.testing.assert_allclose(
        lookups_C / lookups_C.sum(), DLRM_LOOKUP_SHARES, atol=0.01
    )
    distinct_C = histogram_TC.sum(axis=0) / histogram_TC.sum()
    np.testing.assert_allclose(distinct_C, DISTINCT_SHARES + [0] * 7, atol=0.01)


def test_quantiles_are_near_the_published_ones(
    generated: tuple[TableConfig, ...],
) -> None:
    rows = np.array([t.num_embeddings for t in generated])
    np.testing.assert_allclose(
        np.quantile(rows, QUANTILES),
        [100, 29_648, 5_865_012, 5_999_903, 6_618_930, 12_543_670],
        rtol=0.06,
    )
    pooling = column(generated, "pooling_factor")
    np.testing.assert_allclose(
        np.quantile(pooling, QUANTILES), [0.03, 1.0, 4.57, 17.9, 77.3, 193.1], rtol=0.06
    )
    assert (pooling == 0).sum() == 36
    assert (pooling == 1).sum() == 107
    top = np.sort(pooling)[::-1].cumsum() / pooling.sum()
    np.testing.assert_allclose(top[[9, 49, 99]], [0.10, 0.37, 0.55], atol=0.02)
    read = pooling > 0
    reuse = pooling[read] * DLRM_BATCH_SIZE / column(generated, "num_distinct")[read]
    np.testing.assert_allclose(
        np.quantile(reuse, QUANTILES[:-1]), [1.6, 6.2, 12, 180, 16_384], rtol=0.4
    )
    correlation = np.corrcoef(
        np.log(rows), np.log(np.maximum(pooling, 1 / DLRM_BATCH_SIZE))
    )[0, 1]
    assert correlation == pytest.approx(0.49, abs=0.05)


def test_seed_decides_the_tables() -> None:
    first, other = generate_dlrm_tables(seed=3), generate_dlrm_tables(seed=4)
    assert first == generate_dlrm_tables(seed=3)
    assert [t.num_embeddings for t in first] != [t.num_embeddings for t in other]


def test_generator_refuses_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="seed must be at least 0"):
        generate_dlrm_tables(seed=-1)
    with pytest.raises(TableError, match="multiple of 4"):
        generate_dlrm_tables(embedding_dim=6)


def example_tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three tables and four samples; the last table is never read."""
    lengths = torch.tensor([[2, 0, 3, 1], [1, 1, 1, 1], [0, 0, 0, 0]])
    indices = torch.tensor([5, 5, 500, 5, 7, 7, 1, 2, 3, 3])
    offsets = torch.cat(
        [torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)]
    )
    return indices.int(), offsets, lengths.int()


def save(path: Path, data: object) -> Path:
    torch.save(data, path)
    return path


def zipped(path: Path) -> Path:
    packed = path.with_name(path.name + ".gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    return packed


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("legacy", [False, True])
def test_file_gives_exact_profiles(tmp_path: Path, pack: bool, legacy: bool) -> None:
    path = tmp_path / "fbgemm_t3_bs4.pt"
    torch.save(example_tensors(), path, _use_new_zipfile_serialization=not legacy)
    tables = load_dlrm_dataset(zipped(path) if pack else path, embedding_dim=32)
    assert [t.name for t in tables] == [f"fbgemm_t3_bs4/{i}" for i in range(3)]
    assert [t.num_embeddings for t in tables] == [501, 100, 100]
    assert [t.pooling_factor for t in tables] == [1.5, 1.0, 0.0]
    assert {t.embedding_dim for t in tables} == {32}
    first, second, third = (t.profile for t in tables)
    assert first is not None and second is not None and third is not None
    # 500 once, 7 twice, 5 three times; then 1 and 2 once, 3 twice.
    assert list(first.access_histogram) == [1, 1, 1, *[0] * 14]
    assert list(second.access_histogram) == [2, 1, *[0] * 15]
    assert list(third.access_histogram) == [0] * 17
    assert [p.batch_size for p in (first, second, third)] == [4, 4, 4]
    assert [p.num_lookups for p in (first, second, third)] == [6, 4, 0]
    assert first.pooling_std == pytest.approx(math.sqrt(1.25))
    assert second.pooling_std == 0


def test_list_is_as_good_as_tuple(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt", list(example_tensors()))
    assert len(load_dlrm_dataset(path)) == 3


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"none\.pt cannot be read"):
        load_dlrm_dataset(tmp_path / "none.pt")


def test_lfs_pointer_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "a.pt.gz"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(TableError, match="git lfs pull"):
        load_dlrm_dataset(path)


@pytest.mark.parametrize("keep", [30, 0.5, 0.98])
def test_truncated_files_are_refused(tmp_path: Path, keep: float) -> None:
    whole = save(tmp_path / "a.pt", example_tensors())
    packed = zipped(whole)
    for path in (whole, packed):
        data = path.read_bytes()
        path.write_bytes(data[: int(keep if keep > 1 else keep * len(data))])
        with pytest.raises(TableError, match="truncated"):
            load_dlrm_dataset(path)


def test_damaged_gzip_is_refused(tmp_path: Path) -> None:
    packed = zipped(save(tmp_path / "a.pt", example_tensors()))
    data = bytearray(packed.read_bytes())
    data[len(data) // 2] ^= 0xFF
    packed.write_bytes(data)
    with pytest.raises(TableError, match="damaged or truncated"):
        load_dlrm_dataset(packed)


def test_foreign_bytes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"not a tensor in sight")
    with pytest.raises(TableError, match=r"not a file of torch\.save"):
        load_dlrm_dataset(path)


class Payload:
    """An object that only unsafe loading would build."""


def test_code_in_the_file_is_not_run(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt", (Payload(),))
    with pytest.raises(TableError, match=r"not a file of torch\.save"):
        load_dlrm_dataset(path)


def broken(which: int, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    tensors = list(example_tensors())
    tensors[which] = value
    return tuple(tensors)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"indices": torch.zeros(1)}, "holds a dict"),
        (example_tensors()[:2], "2 items"),
        (broken(0, torch.zeros(10)), "three integer tensors"),
        (broken(2, torch.ones(12, dtype=torch.int32)), "three integer tensors"),
        (broken(1, torch.arange(5)), "need 13 offsets, and at least one; got 5"),
        (broken(1, torch.arange(13)), "offsets run from 0 to 12"),
        (broken(2, torch.ones(3, 4, dtype=torch.int32)), "table a/0 disagree"),
        (broken(0, -example_tensors()[0]), "table a/0 has the negative index -500"),
    ],
)
def test_other_contents_are_refused(tmp_path: Path, data: object, message: str) -> None:
    with pytest.raises(TableError, match=message):
        load_dlrm_dataset(save(tmp_path / "a.pt", data))
