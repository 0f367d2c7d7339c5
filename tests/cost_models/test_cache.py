"""The cache of first launches: keys, whole bundles, other jobs, the command."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from torchrec_neuroshard.cli import main
from torchrec_neuroshard.cost_models import cache, load_bundle
from torchrec_neuroshard.cost_models.cache import CacheKey
from torchrec_neuroshard.cost_models.loading import bundle_folder

CREATED = "2026-01-02T03:04:05+00:00"


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NEUROSHARD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def bundle() -> Path:
    """One of kernels and collectives."""
    folder = bundle_folder("cpu_epyc")
    assert folder is not None
    return folder


def make_key(**changes: Any) -> CacheKey:
    known: dict[str, Any] = {
        "device": "A CPU (1/2)",
        "device_type": "cpu",
        "world_size": 2,
        "local_world_size": 2,
        "optimizers": ("sgd", "rowwise_adagrad"),
        "data_types": ("fp32",),
    }
    return CacheKey.here(**{**known, **changes})


def store(bundle: Path, key: CacheKey, seconds: float = 9.0) -> Path:
    return cache.store(bundle, key, created=CREATED, seconds=seconds)


def test_what_was_stored_is_found_and_loads(bundle: Path, root: Path) -> None:
    assert cache.find(make_key()) is None
    folder = store(bundle, make_key())
    assert folder.parent == root and folder.name.startswith("a-cpu-1-2-2x-")
    found = cache.find(make_key())
    assert found is not None and found.folder == folder
    assert (found.created, found.seconds, found.key) == (CREATED, 9.0, make_key())
    assert load_bundle(folder).hardware == load_bundle(bundle).hardware
    assert [p.name for p in root.iterdir()] == [folder.name]


@pytest.mark.parametrize(
    ("changes", "serves"),
    [
        ({"optimizers": ("sgd",)}, True),
        ({"optimizers": ("sgd", "adam")}, False),
        ({"data_types": ("fp32", "fp16")}, False),
        ({"device": "another CPU"}, False),
        ({"world_size": 4}, False),
        ({"local_world_size": 1}, False),
    ],
)
def test_a_bundle_serves_what_it_was_measured_for(
    bundle: Path, changes: dict[str, Any], serves: bool
) -> None:
    store(bundle, make_key())
    assert (cache.find(make_key(**changes)) is not None) == serves


def test_the_newest_of_those_that_serve_is_taken(bundle: Path) -> None:
    for day in ("02", "03", "01"):
        key = make_key(optimizers=("sgd", {"01": "adam"}.get(day, f"lion{day}")))
        created = f"2026-11-{day}T00:00:00+00:00"
        cache.store(bundle, key, created=created, seconds=9.0)
    found = cache.find(make_key(optimizers=("sgd",)))
    assert found is not None and found.created.startswith("2026-11-03")


def test_releases_gates_and_features_are_part_of_the_key(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = make_key()
    assert "unknown" not in (key.torch, key.fbgemm, key.torchrec)
    for changes in ({"torchrec": "0.1"}, {"feature_version": key.feature_version - 1}):
        store(bundle, dataclasses.replace(key, **changes))
    assert cache.find(key) is None
    store(bundle, key)
    assert cache.find(key) is not None
    monkeypatch.setenv("FBGEMM_TBE_V2", "1")
    assert cache.find(make_key()) is None


@pytest.mark.parametrize("package", ["torchrec", "fbgemm"])
def test_nightly_releases_are_told_apart(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name in (f"{package}-nightly", "fbgemm-gpu-nightly"):
            return today
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", version)
    today = "2026.11.1"
    key = make_key()
    today = "2026.11.2"
    assert not key.covers(make_key())


@pytest.mark.parametrize("name", ["key.json", "bundle.json"])
def test_damage_is_not_found_and_gives_way(bundle: Path, name: str) -> None:
    folder = store(bundle, make_key())
    (folder / name).unlink()
    assert cache.entries() == [] and cache.find(make_key()) is None
    assert store(bundle, make_key()) == folder
    assert len(cache.entries()) == 1


def _store_often(bundle: str, number: int) -> None:
    for _ in range(5):
        store(Path(bundle), make_key(), float(number))


def test_many_writers_leave_one_whole_bundle(bundle: Path, root: Path) -> None:
    with ProcessPoolExecutor(4, multiprocessing.get_context("fork")) as writers:
        list(writers.map(_store_often, [str(bundle)] * 4, range(4)))
    (entry,) = cache.entries()
    load_bundle(entry.folder)
    assert [p.name for p in root.iterdir()] == [entry.folder.name]


def test_one_job_at_a_time_has_the_lock(root: Path) -> None:
    key = make_key()
    with cache.lock(key, 60) as mine:
        assert mine and cache.is_locked(key)
        with cache.lock(key, 60) as second:
            assert not second
        with cache.lock(make_key(world_size=4), 60) as other:
            assert other
        # One whose job never came back counts no more.
        (lock,) = root.iterdir()
        os.utime(lock, (1, 1))
        with cache.lock(key, 60) as after:
            assert after
    assert not cache.is_locked(key)


def test_a_cache_that_cannot_be_written(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NEUROSHARD_CACHE", str(tmp_path / "file" / "cache"))
    with cache.lock(make_key(), 60) as mine:
        assert mine
    assert cache.entries() == []
    with pytest.raises(OSError, match="Not a directory"):
        store(bundle, make_key())


def test_command_lists_and_clears(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache"]) == 0
    folder = store(bundle, make_key())
    store(bundle, make_key(world_size=4))
    assert main(["cache", "list"]) == 0
    assert f"{folder.name}: 2 x A CPU (1/2)" in capsys.readouterr().out
    assert main(["cache", "clear"]) == 0
    assert cache.entries() == []
