"""Table sets from files."""

from __future__ import annotations

import csv
import importlib
import io
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchrec_neuroshard.errors import ConfigError, TableError, suggestion
from torchrec_neuroshard.files import read_json
from torchrec_neuroshard.profiles import FeatureProfile, zipf_profile
from torchrec_neuroshard.tables import TableConfig, check_tables

__all__ = [
    "TABLE_FIELDS",
    "ReadTables",
    "load_json",
    "load_tables",
    "read_document",
    "read_tables",
]

PROFILE_BATCH_SIZE = 65_536
"""Batch that assumed profiles are stated at: the released DLRM dataset's."""

MOST_TABLES = 100_000
"""Of a workload of groups."""

TABLE_FIELDS: Mapping[str, str] = {
    "name": "text without control characters",
    "num_embeddings": "a whole number, in digits alone",
    "embedding_dim": "a whole number, in digits alone",
    "pooling_factor": "a finite number, such as 2.5",
    "num_features": "a whole number, in digits alone",
    "outputs_per_sample": "a finite number, such as 2.5",
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
        ConfigError: The file is missing or not of its kind, or PyYAML is missing.
    """
    is_yaml = Path(path).suffix.lower() in (".yaml", ".yml")
    try:
        if is_yaml:
            return _parse_yaml(Path(path).read_text(encoding="utf-8-sig"))
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
        kind = "YAML" if is_yaml else "JSON"
        raise ConfigError(f"'{path}' cannot be read as {kind}: {reason}") from error


def _parse_yaml(text: str) -> Any:
    """Parse YAML of plain data, in which no name stands twice in an object."""
    yaml = importlib.import_module("yaml")
    nodes, seen = [yaml.compose(text, Loader=yaml.SafeLoader)], set()
    while nodes:
        node = nodes.pop()
        if id(node) in seen:  # of an alias
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            counted = Counter(str(name.value) for name, _ in node.value)
            for name, count in counted.most_common(1):
                if count > 1:
                    raise ValueError(f"'{name:.60}' stands twice in one object")
            nodes += [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value
    return yaml.safe_load(text)


def load_tables(
    path: str | Path, workload: str | None = None
) -> tuple[TableConfig, ...]:
    """Load the tables of a model from a file.

    JSON and YAML hold a list of tables, an object with such a list as `tables`, or one
    with `workloads` as `load_json` takes it; CSV a line for each table, below a line of
    fields, with commas, semicolons or tabulators between them. The fields of a table
    are those of `TableConfig`: `name`, `num_embeddings` and `embedding_dim`, and with
    defaults all others.

    Args:
        path: The file; its ending says what it is.
        workload: Which of several that the file holds. None: its only one.

    Raises:
        ConfigError: There is no such file or workload.
        TableError: A value is missing or cannot be.
    """
    return read_tables(path, workload).tables


class ReadTables(NamedTuple):
    """The tables of a file."""

    tables: tuple[TableConfig, ...]
    not_described: frozenset[str] = frozenset()
    """Names of those without a pooling factor or a profile: 1 id per sample."""


def read_tables(path: str | Path, workload: str | None = None) -> ReadTables:
    """Load tables as `load_tables` does, and say which have no pooling factor."""
    if Path(path).suffix.lower() == ".csv":
        found = list(_csv_entries(Path(path)))
    else:
        data = read_document(path)
        if isinstance(data, Mapping) and "workloads" in data:
            return ReadTables(_chosen(str(path), load_json(path), workload))
        entries = data.get("tables") if isinstance(data, Mapping) else data
        if not isinstance(entries, list):
            raise TableError(
                f"'{path}' holds no tables: expected a list of objects with "
                f"{', '.join(_REQUIRED)}, alone or as 'tables', or 'workloads'"
            )
        found = [(f"'{path}', table {n}", entry) for n, entry in enumerate(entries)]
    tables = [_one_table(where, entry) for where, entry in found]
    if workload is not None:
        raise ConfigError(
            f"'{path}' holds one set of tables, none of them named '{workload}': leave "
            f"':{workload}' out"
        )
    try:
        check_tables(tables)
    except TableError as error:
        raise TableError(f"'{path}': {error}") from error
    described = ("pooling_factor", "profile")
    return ReadTables(
        tuple(tables),
        frozenset(
            table.name
            for table, (_, entry) in zip(tables, found, strict=True)
            if all(entry.get(field) is None for field in described)
        ),
    )


def _chosen(
    path: str,
    workloads: Mapping[str, tuple[TableConfig, ...]],
    workload: str | None,
) -> tuple[TableConfig, ...]:
    if workload is None and len(workloads) == 1:
        return next(iter(workloads.values()))
    if workload is None or workload not in workloads:
        asked = f"say which, as in {path}:NAME; they are " + ", ".join(workloads)
        if workload is not None:
            asked = f"none is named '{workload:.60}'; "
            asked += suggestion(workload, workloads, "workloads")
        raise ConfigError(f"'{path}' holds {len(workloads)} workloads, {asked}")
    return workloads[workload]


def _csv_entries(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield where a table is in the file, and its fields."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read '{path}': {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"cannot read '{path}': {error}. Save it as text of UTF-8"
        ) from error
    separator = max(",;\t", key=text.partition("\n")[0].count)
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        fields = [field.strip() for field in next(rows, [])]
        while fields and not fields[-1]:  # separators at the line's end
            fields.pop()
        where = f"'{path}', line 1"
        if not fields:
            raise TableError(
                f"{where}: no tables given; expected the fields' names, such as "
                f"{', '.join(_REQUIRED)}, and below a line for each table"
            )
        _check_fields(where, fields)
        for values in rows:
            cells = [value.strip() for value in values]
            where = f"'{path}', line {rows.line_num}"
            if any(cells[len(fields) :]):
                raise TableError(
                    f"{where}: {len(cells)} values for {len(fields)} fields; write "
                    "numbers without separators, and names that hold one in quotes"
                )
            # What is left empty, or out at a line's end, has its default.
            found = {k: v for k, v in zip(fields, cells, strict=False) if v}
            if found:
                yield where, found
    except csv.Error as error:
        raise TableError(
            f"'{path}', line {rows.line_num}: {error}; is a quote left open?"
        ) from error


def _check_fields(where: str, fields: Iterable[Any]) -> None:
    """Check that fields of a table are known, each once.

    Raises:
        TableError: One is not.
    """
    seen = set()
    for field in fields:
        if field not in TABLE_FIELDS:
            raise TableError(
                f"{where}: unknown field {field!r:.60}; "
                + suggestion(str(field), TABLE_FIELDS, "fields")
            )
        if field in seen:
            raise TableError(f"{where}: field '{field}' stands twice")
        seen.add(field)


def _one_table(where: str, entry: Any) -> TableConfig:
    """Read a table whose values may be text.

    Raises:
        TableError: It is none; says where, and the way out.
    """
    if not isinstance(entry, Mapping):
        raise TableError(f"{where}: expected an object, got {entry!r:.40}")
    _check_fields(where, entry)
    given = {field: value for field, value in entry.items() if value is not None}
    for field in _REQUIRED:
        if field not in given:
            raise TableError(f"{where}: field '{field}' is missing")
    values = {f: _READ[TABLE_FIELDS[f]](value) for f, value in given.items()}
    named = f"{where}: table '{given['name']!s:.100}'"
    for field, value in values.items():
        if value is None:
            raise TableError(
                f"{where if field == 'name' else named}: {field} must be "
                f"{TABLE_FIELDS[field]}, got {given[field]!r:.60}"
            )
    try:
        if "profile" in values:
            profile = FeatureProfile.from_json(values["profile"])
            values["profile"] = profile
            values.setdefault("pooling_factor", profile.pooling_factor)
        return TableConfig(**values)
    except ValueError as error:
        raise TableError(f"{where}: {error}") from error


def _name(value: Any) -> str | None:
    """Text that a terminal shows as it is."""
    known = isinstance(value, str | int) and not isinstance(value, bool)
    text = str(value) if known else ""
    shown = all(ord(c) >= 32 and not 127 <= ord(c) < 160 for c in text)
    return text if text.strip() and shown else None


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _whole(value: Any) -> int | None:
    number = _number(value)
    return int(number) if number is not None and number == int(number) else None


_READ: Mapping[str, Callable[[Any], Any]] = {
    "text without control characters": _name,
    "a name": _name,
    "a whole number, in digits alone": _whole,
    "a finite number, such as 2.5": _number,
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
        for number, table in enumerate(workload["tables"]):
            yield _one_table(f"table {number}", table)
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
