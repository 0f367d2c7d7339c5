"""Importing the package is light; its names are loaded when first used."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import torchrec_neuroshard
from torchrec_neuroshard.errors import EnvironmentMismatchError


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("torchrec_neuroshard", "torch torchrec fbgemm_gpu numpy scipy pyarrow"),
        ("torchrec_neuroshard.testing", "pytest _pytest torchrec fbgemm_gpu"),
    ],
)
def test_import_loads_no_framework(module: str, heavy: str) -> None:
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"
        f"import {module}\n"
        "print(*sorted({m.partition('.')[0] for m in set(sys.modules) - before}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert "torchrec_neuroshard" in loaded and not loaded & set(heavy.split())


def test_public_names_are_loaded_when_first_used() -> None:
    assert set(torchrec_neuroshard.__all__) <= set(dir(torchrec_neuroshard))
    for name in torchrec_neuroshard.__all__:
        value = getattr(torchrec_neuroshard, name)
        assert name in vars(torchrec_neuroshard), "not kept for the next use"
        if name != "__version__":
            assert value is getattr(importlib.import_module(value.__module__), name)
    with pytest.raises(AttributeError, match=r"'torchrec_neuroshard'.*'nonsense'"):
        torchrec_neuroshard.nonsense  # noqa: B018


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        ("import torchrec.distributed", EnvironmentMismatchError, "PlanMonitor needs"),
        ("import nobody_wrote_it", ModuleNotFoundError, "nobody_wrote_it"),
    ],
)
def test_a_missing_framework_alone_names_the_doctor(
    code: str,
    error: type[Exception],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    module = "torchrec_neuroshard.monitor"
    assert torchrec_neuroshard.PlanMonitor.__module__.startswith(module)
    monkeypatch.delattr(torchrec_neuroshard, "PlanMonitor")
    monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "torchrec.distributed", None)
    path = [str(tmp_path), *torchrec_neuroshard.__path__]
    monkeypatch.setattr(torchrec_neuroshard, "__path__", path)
    (tmp_path / "monitor.py").write_text(code)
    with pytest.raises(error, match=message) as raised:
        torchrec_neuroshard.PlanMonitor  # noqa: B018
    assert ("doctor`" in str(raised.value)) == (error is EnvironmentMismatchError)
