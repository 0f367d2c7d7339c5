"""Keys of constraints: a table's name, or its module's path and name.

A key may include the module, as "path.to.module/table" or "path.to.module.table". Such
a key stands for that module's table only, and wins over the bare name.
"""

from __future__ import annotations

from collections.abc import Collection

from torchrec_neuroshard.errors import suggestion


def table_keys(path: str, name: str) -> tuple[str, ...]:
    """Return the keys that stand for a table, the most specific first.

    Args:
        path: The module's path as in `named_modules()`; "" is the model itself.
        name: The table's name.
    """
    return (f"{path}/{name}", f"{path}.{name}", name) if path else (name,)


def unknown_table(verb: str, key: str, known: Collection[str]) -> str:
    """Return an error text for a key without a table, with similar names.

    Args:
        verb: "name" or "names".
        key: The unknown key.
        known: The keys of the model's tables.
    """
    alike = [other for other in known if separator(other) == separator(key)]
    near = suggestion(key, alike or known, "tables")
    return f"{verb} table '{key:.60}', which the model does not have; {near}"


def separator(key: str) -> str:
    """Return the mark between path and name in a key; "" for a bare name."""
    return next((mark for mark in "/." if mark in key), "")
