"""Importing the package is light; its names are loaded when first used."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import torchrec_neuroshard
from torchrec_neuroshard.errors import EnvironmentMismatchError

ROOT = Path(torchrec_neuroshard.__file__).parents[1]


@pytest.fixture
def lazy_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """File in the place of the module that has `PlanMonitor`."""
    module = "torchrec_neuroshard.monitor"
    assert torchrec_neuroshard.PlanMonitor.__module__.startswith(module)
    monkeypatch.delattr(torchrec_neuroshard, "PlanMonitor")
    monkeypatch.delitem(sys.modules, module)
    path = [str(tmp_path), *torchrec_neuroshard.__path__]
    monkeypatch.setattr(torchrec_neuroshard, "__path__", path)
    return tmp_path / "monitor.py"


def test_import_loads_no_framework() -> None:
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "import torchrec_neuroshard\n"
        "print(*sorted({m.partition('.')[0] for m in set(sys.modules) - before}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    heavy = {"torch", "torchrec", "fbgemm_gpu", "numpy", "scipy", "pyarrow", "rich"}
    loaded = set(done.stdout.split())
    assert "torchrec_neuroshard" in loaded
    assert not heavy & loaded


def test_public_names_are_those_promised() -> None:
    assert torchrec_neuroshard.__all__ == [
        "DenseMs",
        "FeatureProfile",
        "NeuroShardError",
        "NeuroShardPlanner",
        "NeuroShardPlannerProvider",
        "PaperSearcher",
        "PhaseTimer",
        "Placement",
        "PlacementConstraints",
        "PlanMonitor",
        "SearchConfig",
        "SearchResult",
        "TableConfig",
        "__version__",
        "apply_moves",
        "group_topology",
        "load_cost_model",
        "load_plan",
        "profile_inputs",
        "rehearse",
        "replan",
        "save_plan",
        "topology_for",
        "write_html",
    ]


@pytest.mark.parametrize("name", torchrec_neuroshard.__all__)
def test_public_name_is_that_of_its_module(name: str) -> None:
    value = getattr(torchrec_neuroshard, name)
    assert name in vars(torchrec_neuroshard), "not kept for the next use"
    if name != "__version__":
        assert value is getattr(importlib.import_module(value.__module__), name)


def test_dir_shows_names_not_loaded_yet() -> None:
    assert set(torchrec_neuroshard.__all__) <= set(dir(torchrec_neuroshard))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'torchrec_neuroshard'.*'nonsense'"):
        torchrec_neuroshard.nonsense  # noqa: B018


@pytest.mark.parametrize("framework", ["torch", "fbgemm_gpu", "torchrec.distributed"])
def test_missing_framework_names_the_doctor(
    framework: str, lazy_name: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, framework, None)
    lazy_name.write_text(f"import {framework}\n")
    with pytest.raises(
        EnvironmentMismatchError,
        match=rf"torchrec_neuroshard\.PlanMonitor needs .*{framework}.*doctor`",
    ):
        torchrec_neuroshard.PlanMonitor  # noqa: B018


def test_our_own_import_fault_stays_what_it_is(lazy_name: Path) -> None:
    lazy_name.write_text("import a_module_that_nobody_wrote\n")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_nobody_wrote"):
        torchrec_neuroshard.PlanMonitor  # noqa: B018


def test_package_error_passes_unchanged(lazy_name: Path) -> None:
    lazy_name.write_text(
        "from torchrec_neuroshard.errors import BundleError\n"
        "raise BundleError('as it was')\n"
    )
    with pytest.raises(ValueError, match=r"^as it was$"):
        torchrec_neuroshard.PlanMonitor  # noqa: B018
