"""Two rules of the source that no linter knows.

The layers of the package are contracts of import-linter in pyproject.toml.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1] / "torchrec_neuroshard"


def nodes() -> Iterator[tuple[str, ast.AST]]:
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            yield path.relative_to(ROOT).as_posix(), node


def test_accelerators_are_named_in_one_place() -> None:
    assert not [
        f"{path}:{node.lineno}"
        for path, node in nodes()
        if isinstance(node, ast.Constant) and node.value in ("cuda", "nccl")
        if path != "devices.py"
    ]


def test_only_one_module_asks_what_torchrec_has() -> None:
    assert not [
        f"{path}:{node.lineno}"
        for path, node in nodes()
        if isinstance(node, ast.Call)
        if ast.unparse(node.func) in ("hasattr", "inspect.signature")
        or (ast.unparse(node.func) == "getattr" and len(node.args) > 2)
        if path.startswith(("planner/", "phase_timer")) and path != "planner/compat.py"
    ]
