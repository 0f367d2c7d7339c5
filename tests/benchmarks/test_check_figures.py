"""Figures of README and documentation are what the committed data give."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

check_figures = import_module("check_figures")
ROOT = check_figures.ROOT


def test_documents_say_what_the_data_give() -> None:
    assert check_figures.differences() == []


def test_a_changed_figure_is_found_and_renewed(
    tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [*check_figures.DOCUMENTS, "benchmarks/results/planners_202611.md"]
    names.append(str(check_figures.at(check_figures.RACE, ".md").relative_to(ROOT)))
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for data in (check_figures.COMPARISON, check_figures.RACE):
        source = check_figures.at(data, ".json.xz")
        shutil.copy(source, tmp_path / source.relative_to(ROOT))
    results = tmp_path / check_figures.COMPARISON.relative_to(ROOT)
    pictures = tmp_path / check_figures.PICTURES.relative_to(ROOT)
    monkeypatch.setattr(check_figures, "ROOT", tmp_path)
    monkeypatch.setattr(check_figures, "PAGES", {results: pictures})
    race = tmp_path / check_figures.RACE.relative_to(ROOT)
    monkeypatch.setattr(check_figures, "RACE", race)
    monkeypatch.setattr(check_figures, "PICTURES", pictures)
    document, row = tmp_path / "docs/comparison.md", "| TorchRec, best practice | "
    text = document.read_text(encoding="utf-8")
    document.write_text(text.replace(f"{row}0", f"{row}9"), encoding="utf-8")
    with pytest.raises(SystemExit):
        check_figures.main([])
    said = "differs from the data: docs/comparison.md: over-rivals\n"
    assert capsys.readouterr().out == said
    check_figures.main(["--write"])
    assert len(list(pictures.glob("*.png"))) == 4
    assert document.read_text(encoding="utf-8") == text
    assert check_figures.differences() == []
