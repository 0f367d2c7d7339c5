"""Table sets from files."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchrec_neuroshard.errors import ConfigError, TableError, suggestion
from torchrec_neuroshard.files import parse_json, read_json
from torchrec_neuroshard.tables.profile import FeatureProfile, zipf_profile
from torchrec_neuroshard.tables.table import TableConfig, check_tables

__all__ = [
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

_REQUIRED = ("name", "num_embeddings", "embedding_dim")
_TEXT = ("name", "data_type", "optimizer")
"""Fields that are text, whatever they look like."""


def read_document(path: str | Path) -> Any:
    """Read a JSON file or, by its ending .yaml or .yml, a YAML file.

    Raises:
        ConfigError: The file is missing or not of its kind, or PyYAML is missing.
    """
    is_yaml = Path(path).suffix.lower() in (".yaml", ".yml")
    try:
        if is_yaml:
            yaml = importlib.import_module("yaml")
            return yaml.safe_load(Path(path).read_text(encoding="utf-8-sig"))
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


def _csv_entries(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
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
        if len(set(fields)) < len(fields):
            raise TableError(f"{where}: a field stands twice in {', '.join(fields)}")
        for values in rows:
            cells = [value.strip() for value in values]
            where = f"'{path}', line {rows.line_num}"
            if any(cells[len(fields) :]):
                raise TableError(
                    f"{where}: {len(cells)} values for {len(fields)} fields; write "
                    "numbers without separators, and names that hold one in quotes"
                )
            # What is left empty, or out at a line's end, has its default.
            given = zip(fields, cells, strict=False)
            found = {field: _cell(field, cell) for field, cell in given if cell}
            if found:
                yield where, found
    except csv.Error as error:
        raise TableError(
            f"'{path}', line {rows.line_num}: {error}; is a quote left open?"
        ) from error


def _cell(field: str, text: str) -> Any:
    """Return what a cell holds: a number, true or false, or text."""
    if field in _TEXT:
        return text
    try:
        return parse_json(text.lower())
    except ValueError:
        return text


def _one_table(where: str, entry: Any) -> TableConfig:
    """Read a table, in which null stands for a default.

    Raises:
        TableError: It is none; says where, and the way out.
    """
    if isinstance(entry, Mapping):
        entry = {field: value for field, value in entry.items() if value is not None}
    try:
        table = TableConfig.from_json(entry)
    except TableError as error:
        name = entry.get("name") if isinstance(entry, Mapping) else None
        named = f"table {name!r:.60}: " if isinstance(name, str) else ""
        raise TableError(f"{where}: {named}{error}") from error
    # Such names would move a terminal's cursor.
    if not table.name.strip() or any(
        ord(c) < 32 or 127 <= ord(c) < 160 for c in table.name
    ):
        raise TableError(
            f"{where}: name must be text without control characters, got "
            f"{table.name!r:.60}"
        )
    if table.profile is not None and "pooling_factor" not in entry:
        factor = table.profile.pooling_factor
        table = dataclasses.replace(table, pooling_factor=factor)
    return table


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
