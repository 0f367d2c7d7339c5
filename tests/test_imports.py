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
        if path != "hardware/device_types.py"
    ]


def test_only_one_module_asks_what_torchrec_has() -> None:
    assert not [
        f"{path}:{node.lineno}"
        for path, node in nodes()
        if isinstance(node, ast.Call)
        if ast.unparse(node.func) in ("hasattr", "inspect.signature")
        or (ast.unparse(node.func) == "getattr" and len(node.args) > 2)
        if path.startswith(("planner/", "phase_timer", "monitor"))
        if path != "planner/compat.py"
    ]


def test_only_one_module_knows_torchrecs_privates_and_releases() -> None:
    """Private names that are read off objects are found by ruff (SLF)."""
    assert not [
        f"{path}:{ast.unparse(node)}"
        for path, node in nodes()
        if is_private_import(node) or is_of_a_release(node)
        if path != "planner/compat.py"
    ]


def torchrec_names(node: ast.AST) -> list[str]:
    """Return the full names that an import takes from TorchRec."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in names if name.split(".")[0] == "torchrec"]


def is_private_import(node: ast.AST) -> bool:
    return any("._" in name for name in torchrec_names(node))


def is_of_a_release(node: ast.AST) -> bool:
    """Whether it asks for TorchRec's version, or for a module that it may not have."""
    if isinstance(node, ast.Try):
        return any(torchrec_names(n) for part in node.body for n in ast.walk(part))
    return isinstance(node, ast.Attribute) and (
        ast.unparse(node) == "torchrec.__version__"
    )
