"""Errors shorten long texts from unknown authors."""

from __future__ import annotations

import ast
from pathlib import Path

import torchrec_neuroshard
from torchrec_neuroshard import errors
from torchrec_neuroshard.errors import ConfigError, NeuroShardError


def test_long_texts_lose_their_middle() -> None:
    shown = str(ConfigError(f"table 't': {'x' * 10**6} is none; the way out"))
    assert len(shown) <= 4_000
    assert shown.startswith("table 't': xx")
    assert shown.endswith("xx is none; the way out")
    assert str(NeuroShardError(shown)) == shown


def test_every_public_error_is_in_one_place() -> None:
    """And the tree at the top of the module names it."""
    found = {
        node.name: path.name
        for path in Path(torchrec_neuroshard.__path__[0]).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        and {getattr(base, "id", "") for base in node.bases} & {*vars(errors)} - {"Any"}
    }
    assert {name for name, file in found.items() if file != "errors.py"} == {
        "ExchangeError"  # between exchange and the planner
    }
    assert errors.__doc__ is not None
    for name in vars(errors):
        assert not name.endswith(("Error", "Warning")) or name in errors.__doc__
