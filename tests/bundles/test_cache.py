"""The cache of first launches: keys, whole bundles, other jobs, the command."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import multiprocessing
import os
import signal
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.builders import make_tables
from torchrec_neuroshard.bundles import cache
from torchrec_neuroshard.bundles.cache import CacheKey
from torchrec_neuroshard.bundles.folders import PRETRAINED
from torchrec_neuroshard.bundles.format import Bundle
from torchrec_neuroshard.cli import main
from torchrec_neuroshard.tables.features import table_features

BUNDLE = PRETRAINED / "cpu_epyc"
"""A bundle with models of kernels and collectives."""
CREATED = "2026-01-02T03:04:05+00:00"


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NEUROSHARD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make_key(**changes: Any) -> CacheKey:
    known = {"device": "A CPU (1/2)", "device_type": "cpu"}
    ranks = {"world_size": 2, "local_world_size": 2}
    tables = {"optimizers": ("sgd", "rowwise_adagrad"), "data_types": ("fp32",)}
    return CacheKey(**{**known, **ranks, **tables, **changes})


def store(key: CacheKey, created: str = CREATED) -> Path:
    return cache.store(BUNDLE, key, created=created, seconds=9.0)


def test_stored_bundles_are_found_and_load(root: Path) -> None:
    assert cache.find(make_key()) is None
    folder = store(make_key())
    assert folder.parent == root and folder.name.startswith("a-cpu-1-2-2x-")
    found = cache.find(make_key())
    assert found is not None and found.folder == folder
    assert (found.created, found.seconds, found.key) == (CREATED, 9.0, make_key())
    assert Bundle(folder).cost_model().hardware == Bundle(BUNDLE).cost_model().hardware
    assert [p.name for p in root.iterdir()] == [folder.name]
    # The newest matching bundle is used.
    for day in (2, 3, 1):
        store(make_key(optimizers=("sgd", f"lion{day}")), f"2026-11-0{day}")
    found = cache.find(make_key(optimizers=("sgd",)))
    assert found is not None and found.created == "2026-11-03"


def test_keys_cover_subsets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = make_key()
    assert "unknown" not in (key.torch, key.fbgemm, key.torchrec)
    assert key.covers(make_key(optimizers=("sgd",)))
    for changes in (
        {"optimizers": ("sgd", "adam")},
        {"data_types": ("fp32", "fp16")},
        {"device": "another CPU"},
        {"world_size": 4},
        {"local_world_size": 1},
    ):
        assert not key.covers(make_key(**changes))
    for older in ({"torchrec": "0.1"}, {"feature_version": key.feature_version - 1}):
        assert not dataclasses.replace(key, **older).covers(key)
    monkeypatch.setenv("FBGEMM_TBE_V2", "1")
    assert not key.covers(make_key())

    def version(name: str) -> str:
        if name in nightly:
            return nightly[name]
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", version)
    for package in ("torchrec-nightly", "fbgemm-gpu-nightly"):
        nightly = {package: "2026.11.1"}
        key = make_key()
        nightly = {package: "2026.11.2"}
        assert not key.covers(make_key())


def test_keys_know_the_shards() -> None:
    """Sizes may be off by a factor of two; then shards count as covered."""
    tables = make_tables([16, 64], rows=[1_000, 4_000])
    key = make_key(ranges=cache.compared_ranges(table_features(tables, 64)))
    store(key)
    lone = store(make_key(ranges=cache.compared_ranges(table_features(tables[:1], 64))))

    def found(
        widths: Sequence[int], rows: Sequence[int], batch_size: int = 64, **kind: Any
    ) -> str | None:
        shards = make_tables(widths, rows=rows, **kind)
        entry = cache.find(make_key(), table_features(shards, batch_size))
        return None if entry is None else entry.folder.name

    assert found([16, 64], [1_000, 4_000]) == key.name()
    assert found([16], [1_000]) in (lone.name, key.name())
    assert found([8, 128], [500, 8_000], 128) == key.name()
    for widths, rows, batch_size in (
        ([4, 132], [1_000, 4_000], 64),
        ([16, 64], [499, 8_001], 64),
        ([16, 64], [1_000, 4_000], 129),
        ([16, 64], [1_000, 4_000], 31),
    ):
        assert found(widths, rows, batch_size) is None
    assert found([16, 64], [1_000, 4_000], weighted=True) is None
    # Half of the shards suffice.
    assert found([64, 512], [4_000, 4_000]) == key.name()
    assert found([64, 512, 512], [4_000, 4_000, 4_000]) is None


def test_damaged_bundles_are_replaced() -> None:
    for name in ("key.json", "bundle.json"):
        folder = store(make_key())
        (folder / name).unlink()
        assert cache.entries() == [] and cache.find(make_key()) is None
    assert store(make_key()) == folder
    assert len(cache.entries()) == 1


def _store_often(number: int) -> None:
    for _ in range(5):
        store(make_key(), f"{number}")


def test_many_writers_leave_one_whole_bundle(root: Path) -> None:
    with ProcessPoolExecutor(4, multiprocessing.get_context("fork")) as writers:
        list(writers.map(_store_often, range(4)))
    (entry,) = cache.entries()
    Bundle(entry.folder).cost_model()
    assert [p.name for p in root.iterdir()] == [entry.folder.name]


def _hold_and_die() -> None:
    with cache.lock(make_key(), 0):
        os.kill(os.getpid(), signal.SIGKILL)


def test_one_job_at_a_time_has_the_lock() -> None:
    key = make_key()
    with cache.lock(key, 0):
        with pytest.raises(TimeoutError), cache.lock(key, 0):
            pass
        with cache.lock(make_key(world_size=4), 0):
            pass
    # The lock of a killed job is released.
    context = multiprocessing.get_context("fork")
    job = context.Process(target=_hold_and_die)
    job.start()
    job.join()
    with cache.lock(key, 0):
        pass


def test_a_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NEUROSHARD_CACHE", str(tmp_path / "file" / "cache"))
    with cache.lock(make_key(), 60):
        pass
    assert cache.entries() == []
    with pytest.raises(OSError, match="Not a directory"):
        store(make_key())


def test_command_lists_and_clears(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache"]) == 0
    folder = store(make_key())
    store(make_key(world_size=4))
    assert main(["cache", "list"]) == 0
    assert f"{folder.name}: 2 x A CPU (1/2)" in capsys.readouterr().out
    wrong: dict[str, Any] = {"reason": "too noisy", "created": CREATED, "seconds": 55.0}
    cache.reject(make_key(world_size=8), **wrong)
    assert len(cache.entries()) == 2 and len(cache.rejections()) == 1
    assert main(["cache", "list"]) == 0
    assert f"{CREATED}, 55 s; no bundle: too noisy" in capsys.readouterr().out
    # Of another version, which this one cannot read; and what is not ours.
    older = store(make_key(world_size=16))
    (older / "key.json").write_text("{}")
    others = root / "my_bundle", root / "notes.json"
    others[0].mkdir()
    others[1].touch()
    assert main(["cache", "clear"]) == 0
    assert "deleted 4 measurements" in capsys.readouterr().out
    assert cache.entries() == [] and cache.rejections() == []
    assert {*root.iterdir()} == {*others}
