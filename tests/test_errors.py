"""The error tree is the one that its docstring draws."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from torchrec_neuroshard import errors

CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and value.__module__ == errors.__name__
}


def drawn_tree() -> dict[str, tuple[str | None, str | None]]:
    """Name -> (parent, built-in class beside it), read from the docstring."""
    tree: dict[str, tuple[str | None, str | None]] = {}
    ancestors: list[str] = []
    pattern = r"^( *)- (\w+)(?: \((\w+)\))?"
    for indent, name, builtin in re.findall(pattern, errors.__doc__ or "", re.M):
        depth = len(indent) // 4
        del ancestors[depth:]
        tree[name] = (ancestors[-1] if ancestors else None, builtin or None)
        ancestors.append(name)
    return tree


def test_docstring_draws_every_class_and_no_other() -> None:
    assert set(drawn_tree()) == set(CLASSES)
    assert [*sorted(CLASSES), "suggestion"] == errors.__all__


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_class_has_the_bases_drawn(name: str) -> None:
    parent, builtin = drawn_tree()[name]
    bases = [base.__name__ for base in CLASSES[name].__bases__]
    assert bases == [base for base in (parent or "Exception", builtin) if base]


def test_of_a_long_text_the_middle_is_left_out() -> None:
    text = f"table 't': {'x' * 10**6} is none; the way out"
    short = text[:1000]
    kinds: list[Any] = list(CLASSES.values())
    for kind in kinds:
        shown = str(kind(text))
        assert len(shown) <= 4_000
        assert shown.startswith("table 't': xx")
        assert shown.endswith("xx is none; the way out")
        assert (str(kind(shown)), str(kind(short))) == (shown, short)
