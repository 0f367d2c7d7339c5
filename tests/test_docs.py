"""The pages: what their code imports is there, and what can run does."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torchrec_neuroshard.cost_models import CostModel
from torchrec_neuroshard.testing import CostModelContract

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def blocks(page: Path) -> list[str]:
    """Python code of a page."""
    text = page.read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def imported(code: str) -> Iterator[tuple[str, str]]:
    """Module and name of what code imports of this package."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and "torchrec_neuroshard" in str(
            node.module
        ):
            yield from ((str(node.module), alias.name) for alias in node.names)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_what_pages_import_is_there(page: Path) -> None:
    for code in blocks(page):
        for module, name in imported(code):
            assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


@pytest.mark.parametrize("page", ["plans", "methods"])
def test_pages_import_what_they_use(page: str) -> None:
    """Names of this package, in a block or one above it."""
    known: set[str] = set()
    for code in blocks(ROOT / "docs" / f"{page}.md"):
        known |= {name for _, name in imported(code)}
        used = {n.id for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Name)}
        ours = {n for n in used if re.match(r"NeuroShard|Paper", n)}
        ours |= used & {"apply_moves", "load_plan", "profile_inputs", "replan"}
        assert ours <= known


class TestModelFromNothing(CostModelContract):
    """The cost model that docs/extending.md writes from nothing."""

    def make_cost_model(self) -> CostModel:
        names: dict[str, Any] = {}
        [code] = [c for c in blocks(ROOT / "docs/extending.md") if "BytesAlone" in c]
        exec(code, names)
        made = names["BytesAlone"]()
        assert isinstance(made, CostModel)
        return made
