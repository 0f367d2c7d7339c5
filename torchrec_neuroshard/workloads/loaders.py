"""Table sets from files."""

from __future__ import annotations

import csv
import difflib
import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrec_neuroshard.errors import ConfigError, TableError
from torchrec_neuroshard.files import read_json
from torchrec_neuroshard.profiles import FeatureProfile, zipf_profile
from torchrec_neuroshard.tables import TableConfig, check_tables

__all__ = ["TABLE_FIELDS", "load_json", "load_tables", "read_document"]

PROFILE_BATCH_SIZE = 65_536
"""Batch that assumed profiles are stated at: the released DLRM dataset's."""

MOST_TABLES = 100_000
"""Of a workload of groups."""

TABLE_FIELDS: Mapping[str, str] = {
    "name": "a name",
    "num_embeddings": "a whole number",
    "embedding_dim": "a whole number",
    "pooling_factor": "a number",
    "num_features": "a whole number",
    "weighted": "true or false",
    "data_type": "a name",
    "optimizer": "a name",
    "profile": "an object",
}
"""Field of a table in a file -> what it holds; those of `TableConfig`."""
_REQUIRED = ("name", "num_embeddings", "embedding_dim")


def read_document(path: str | Path) -> Any:
    """Read a JSON file or, by its ending .yaml or .yml, a YAML file.

    Raises:
        ConfigError: The file is missing or damaged, or PyYAML is.
    """
    try:
        if Path(path).suffix in (".yaml", ".yml"):
            text = Path(path).read_text(encoding="utf-8")
            return importlib.import_module("yaml").safe_load(text)
        return read_json(path)
    except OSError as error:
        raise ConfigError(f"cannot read '{path}': {error.strerror}") from error
    except ImportError as error:
        raise ConfigError(
            f"cannot read '{path}': PyYAML is not installed. Run `pip install pyyaml`, "
            "or write the same as JSON"
        ) from error
    except Exception as error:  # of JSON, of YAML, of bytes that are no text
        reason = " ".join(str(error).split())
        raise ConfigError(f"'{path}' is damaged: {reason}") from error


def load_tables(
    path: str | Path, workload: str | None = None
) -> tuple[TableConfig, ...]:
    """Load the tables of a model from a file.

    JSON and YAML hold a list of tables, an object with such a list as `tables`, or one
    with `workloads` as `load_json` takes it; CSV a line for each table, below a line of
    fields. The fields of a table are those of `TableConfig`: `name`, `num_embeddings`
    and `embedding_dim`, and with defaults all others.

    Args:
        path: The file; its ending says what it is.
        workload: Which of several that the file holds. None: its only one.

    Raises:
        ConfigError: There is no such file or workload.
        TableError: A value is missing or cannot be.
    """
    if Path(path).suffix == ".csv":
        tables = list(_csv_tables(Path(path)))
    else:
        data = read_document(path)
        if isinstance(data, Mapping) and "workloads" in data:
            return _chosen(str(path), load_json(path), workload)
        entries = data.get("tables") if isinstance(data, Mapping) else data
        if not isinstance(entries, list):
            raise TableError(
                f"'{path}' holds no tables: expected a list of objects with "
                f"{', '.join(_REQUIRED)}, alone or as 'tables', or 'workloads'"
            )
        tables = [
            _one_table(f"'{path}', table {number}", entry)
            for number, entry in enumerate(entries)
        ]
    if workload is not None:
        raise ConfigError(
            f"'{path}' holds one set of tables, none of them named '{workload}': leave "
            f"':{workload}' out"
        )
    try:
        check_tables(tables)
    except TableError as error:
        raise TableError(f"'{path}': {error}") from error
    return tuple(tables)


def _chosen(
    path: str,
    workloads: Mapping[str, tuple[TableConfig, ...]],
    workload: str | None,
) -> tuple[TableConfig, ...]:
    if workload is None and len(workloads) == 1:
        return next(iter(workloads.values()))
    if workload is None or workload not in workloads:
        asked = "say which" if workload is None else f"none is named '{workload}'"
        raise ConfigError(
            f"'{path}' holds {len(workloads)} workloads, {asked}, as in "
            f"{path}:NAME; they are {', '.join(workloads)}"
        )
    return workloads[workload]


def _csv_tables(path: Path) -> Iterator[TableConfig]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read '{path}': {error}") from error
    rows = csv.DictReader(lines)
    try:
        for row in rows:
            where = f"'{path}', line {rows.line_num}"
            if None in row:
                raise TableError(f"{where}: more values than the first line has fields")
            # What is left empty, or out at a line's end, has its default.
            yield _one_table(where, {k: v for k, v in row.items() if v})
    except csv.Error as error:
        raise TableError(f"'{path}', line {rows.line_num}: {error}") from error


def _one_table(where: str, entry: Any) -> TableConfig:
    """Read a table whose values may be text.

    Raises:
        TableError: It is none; says where, and the way out.
    """
    if not isinstance(entry, Mapping):
        raise TableError(f"{where}: expected an object, got {entry!r:.40}")
    for field in entry:
        if field not in TABLE_FIELDS:
            near = difflib.get_close_matches(str(field)[:60], TABLE_FIELDS, n=1)
            meant = f"did you mean '{near[0]}'? " if near else ""
            raise TableError(
                f"{where}: unknown field '{field!s:.60}'; {meant}The fields are "
                f"{', '.join(TABLE_FIELDS)}"
            )
    for field in _REQUIRED:
        if field not in entry:
            raise TableError(f"{where}: field '{field}' is missing")
    values = {
        field: _READ[TABLE_FIELDS[field]](value)
        for field, value in entry.items()
        if value is not None
    }
    for field, value in values.items():
        if value is None:
            raise TableError(
                f"{where}: {field} must be {TABLE_FIELDS[field]}, got "
                f"{entry[field]!r:.60}"
            )
    try:
        if "profile" in values:
            profile = FeatureProfile.from_json(values["profile"])
            values["profile"] = profile
            values.setdefault("pooling_factor", profile.pooling_factor)
        return TableConfig(**values)
    except ValueError as error:
        raise TableError(f"{where}: {error}") from error


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _whole(value: Any) -> int | None:
    number = _number(value)
    return int(number) if number is not None and number == int(number) else None


_READ: Mapping[str, Callable[[Any], Any]] = {
    "a name": lambda value: str(value) if isinstance(value, str | int) else None,
    "a whole number": _whole,
    "a number": _number,
    "true or false": lambda value: {"true": True, "false": False}.get(
        str(value).lower()
    ),
    "an object": lambda value: value if isinstance(value, Mapping) else None,
}
"""What a field holds -> how it is read; None where a value is none of that."""


def load_json(path: str | Path) -> dict[str, tuple[TableConfig, ...]]:
    """Load named table sets.

    The file holds `{"workloads": [{"name": ..., ...}, ...]}`. A workload gives its
    tables in one of three ways: as `tables`, a list of `TableConfig.to_json()`; as
    parallel lists `rows` with `pooling` or (`lookups`, `count_hist`, `batch_size`) and
    an optional `dim` or `dims`; or as `groups` of equal tables (`num_tables`, `rows`,
    `dim`, `hotness`). Widths that are missing are 64; a workload without lookups reads
    one id per sample.

    Returns:
        Workload name -> its tables, in the file's order.

    Raises:
        TableError: The file is not such a file, or a table's value is out of range.
    """
    try:
        data = read_json(path)
        workloads = data["workloads"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TableError(
            f"{path} is not a table file ({error!r}); expected a JSON object with a "
            "list 'workloads'"
        ) from error
    if not isinstance(workloads, list):
        raise TableError(f"{path}: 'workloads' must be a list, got {workloads!r:.40}")
    loaded: dict[str, tuple[TableConfig, ...]] = {}
    for number, workload in enumerate(workloads):
        if not isinstance(workload, dict):
            raise TableError(f"{path}: workload {number} is not an object")
        name = str(workload.get("name", "unnamed"))
        if name in loaded:
            raise TableError(f"{path}: two workloads are named '{name}'; rename one")
        try:
            loaded[name] = tuple(_tables(name, workload))
            check_tables(loaded[name])
        except (LookupError, TypeError, OverflowError, ValueError) as error:
            raise TableError(
                f"{path}: workload '{name:.60}' cannot be read ({error!r:.200})"
            ) from error
    return loaded


def _tables(name: str, workload: Mapping[str, Any]) -> Iterable[TableConfig]:
    if "tables" in workload:
        for table in workload["tables"]:
            yield TableConfig.from_json(table)
    elif "groups" in workload:
        yield from _group_tables(name, workload["groups"])
    else:
        yield from _column_tables(name, workload)


def _width(dim: int) -> int:
    """Round a published width up to the multiple of 4 that kernels need."""
    return max(4, -(-int(dim) // 4) * 4)


def _column_tables(name: str, workload: Mapping[str, Any]) -> Iterable[TableConfig]:
    rows = workload["rows"]
    dims = workload.get("dims", [workload.get("dim", 64)] * len(rows))
    batch_size = int(workload.get("batch_size", PROFILE_BATCH_SIZE))
    for i, num_embeddings in enumerate(rows):
        if "count_hist" in workload:
            profile = FeatureProfile(
                batch_size=batch_size,
                num_lookups=float(workload["lookups"][i]),
                access_histogram=tuple(map(float, workload["count_hist"][i])),
            )
        else:
            pooling = workload["pooling"][i] if "pooling" in workload else 1.0
            profile = zipf_profile(
                batch_size=PROFILE_BATCH_SIZE,
                pooling_factor=float(pooling),
                num_embeddings=int(num_embeddings),
            )
        yield TableConfig(
            name=f"{name}/{i}",
            num_embeddings=int(num_embeddings),
            embedding_dim=_width(dims[i]),
            pooling_factor=profile.pooling_factor,
            profile=profile,
        )


def _group_tables(
    name: str, groups: Sequence[Mapping[str, Any]]
) -> Iterable[TableConfig]:
    number = 0
    for group in groups:
        hotness = group["hotness"]
        per_feature = [float(h) for h in hotness] if isinstance(hotness, list) else None
        lookups = sum(per_feature) if per_feature else float(hotness)
        rows, count = int(group["rows"]), int(group["num_tables"])
        if number + count > MOST_TABLES:
            raise TableError(f"num_tables adds up to more than {MOST_TABLES:,}")
        profile = zipf_profile(
            batch_size=PROFILE_BATCH_SIZE,
            pooling_factor=lookups,
            num_embeddings=rows,
        )
        for _ in range(count):
            yield TableConfig(
                name=f"{name}/{number}",
                num_embeddings=rows,
                embedding_dim=_width(group["dim"]),
                pooling_factor=lookups,
                num_features=len(per_feature) if per_feature else 1,
                profile=profile,
            )
            number += 1
