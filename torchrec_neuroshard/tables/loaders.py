"""Read table sets from files; read and write profiles."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchrec_neuroshard.errors import (
    ConfigError,
    NeuroShardError,
    ProfileError,
    TableError,
    is_number,
    suggestion,
)
from torchrec_neuroshard.files import (
    json_text,
    parse_json,
    read_fields,
    write_whole,
)
from torchrec_neuroshard.tables.hot_rows import HotRows
from torchrec_neuroshard.tables.profile import FeatureProfile, zipf_profile
from torchrec_neuroshard.tables.table import (
    COLUMN_MULTIPLE,
    TableConfig,
    check_tables,
)

PROFILE_BATCH_SIZE = 65_536
"""Batch size of assumed profiles; the released DLRM dataset's."""

MOST_TABLES = 100_000
"""Most tables of a published workload: a mistyped number must not fill the memory."""

_LENGTHS = ("length_p95", "length_max", "padding_share")
"""Fields of a table that describe its samples, instead of a profile."""
_TEXT = ("name", "data_type", "optimizer")
"""Fields that stay text even if they look like numbers."""


def read_document(path: str | Path) -> Any:
    """Read a YAML file if it ends in .yaml or .yml, else a JSON file.

    Raises:
        ConfigError: The file is missing or malformed, or PyYAML is missing.
    """
    text, is_yaml = _read_text(path), Path(path).suffix.lower() in (".yaml", ".yml")
    try:
        if is_yaml:
            return importlib.import_module("yaml").safe_load(text)
        return parse_json(text)
    except ImportError as error:
        raise ConfigError(
            f"cannot read '{path}': PyYAML is not installed. Run `pip install pyyaml`, "
            "or convert the file to JSON"
        ) from error
    except Exception as error:  # JSON's or YAML's
        reason = " ".join(str(error).split())
        kind = "YAML" if is_yaml else "JSON"
        raise ConfigError(f"'{path}' cannot be read as {kind}: {reason}") from error


def _read_text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read '{path}': {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"cannot read '{path}': {error}. Save it as UTF-8 text"
        ) from error


def save_profiles(profiles: Mapping[str, FeatureProfile], path: str | Path) -> None:
    """Write profiles to a JSON file, by feature name."""
    write_whole(path, json_text({n: p.to_json() for n, p in profiles.items()}))


def load_profiles(path: str | Path) -> dict[str, FeatureProfile]:
    """Read what `save_profiles` wrote.

    Raises:
        ConfigError: The file cannot be read.
        ProfileError: An entry is not a profile.
    """
    data = read_document(path)
    if not isinstance(data, Mapping):
        raise ProfileError(
            f"'{path}' holds no profiles: expected a JSON object of features, as "
            "`neuroshard profile` and save_profiles write it"
        )
    found = {}
    for name, entry in data.items():
        try:
            what = "feature profile"
            found[name] = read_fields(FeatureProfile, entry, ProfileError, what)
        except ProfileError as error:
            raise ProfileError(f"'{path}', feature '{name}': {error}") from error
    return found


class ReadTables(NamedTuple):
    """Tables that were read from a file."""

    tables: tuple[TableConfig, ...]
    not_described: frozenset[str] = frozenset()
    """Names of tables without a pooling factor or profile; they get 1 id per sample."""


def read_tables(path: str | Path, workload: str | None = None) -> ReadTables:
    """Read the tables of a model from a file.

    A JSON or YAML file holds a list of tables, an object with such a list as `tables`,
    or an object with `workloads` (see `load_json`). A CSV file holds a header line and
    then a line for each table, separated by commas, semicolons or tabs. The fields are
    those of `TableConfig`: `name`, `num_embeddings` and `embedding_dim` are required,
    all others have defaults. `length_p95` and `length_max` describe lengths of samples,
    per feature; see `FeatureProfile.of_lengths`. `padding_share` is the share of ids
    that are 0.

    Args:
        path: The file; its ending decides the format.
        workload: Name of a workload in the file; None takes the only one.

    Raises:
        ConfigError: There is no such file or workload.
        TableError: A value is missing or not allowed.
    """
    if Path(path).suffix.lower() == ".csv":
        entries = _csv_entries(_read_text(path))
    else:
        data = read_document(path)
        if isinstance(data, Mapping) and "workloads" in data:
            return ReadTables(_chosen(path, load_json(path), workload))
        listed = data.get("tables") if isinstance(data, Mapping) else data
        if not isinstance(listed, list):
            raise TableError(
                f"'{path}' holds no tables: expected a list of objects with name, "
                "num_embeddings and embedding_dim, or an object with 'tables' or "
                "'workloads'"
            )
        entries = ((f"table {n}", entry) for n, entry in enumerate(listed))
    if workload is not None:
        raise ConfigError(
            f"'{path}' holds one set of tables and no workload named '{workload}': "
            f"leave ':{workload}' out"
        )
    tables, not_described = [], set()
    try:
        for where, entry in entries:
            table = _one_table(where, entry)
            tables.append(table)
            if table.profile is None and entry.get("pooling_factor") is None:
                not_described.add(table.name)
        check_tables(tables)
    except TableError as error:
        raise TableError(f"'{path}', {error}") from error
    return ReadTables(tuple(tables), frozenset(not_described))


def _chosen(
    path: str | Path,
    workloads: Mapping[str, tuple[TableConfig, ...]],
    workload: str | None,
) -> tuple[TableConfig, ...]:
    if workload is None and len(workloads) == 1:
        return next(iter(workloads.values()))
    if workload is not None and workload in workloads:
        return workloads[workload]
    asked = f"choose one with {path}:NAME; they are {', '.join(workloads)}"
    if workload is not None:
        near = suggestion(workload, workloads, "workloads")
        asked = f"none is named '{workload:.60}'; {near}"
    raise ConfigError(f"'{path}' holds {len(workloads)} workloads, {asked}")


def _csv_entries(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each table's place in the file and its fields; `#` begins a comment."""
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    separator = max(",;\t", key=next(lines, "").count)
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    fields: list[str] = []
    try:
        for values in rows:
            where = f"line {rows.line_num}"
            cells = [value.strip() for value in values]
            if cells and cells[0].startswith("#"):
                continue
            while cells and not cells[-1]:  # separators at the line's end
                cells.pop()
            fields = fields or cells
            if len(set(fields)) < len(fields):
                raise TableError(
                    f"{where}: a field appears twice in {', '.join(fields)}"
                )
            if len(cells) > len(fields):
                raise TableError(
                    f"{where}: {len(cells)} values for {len(fields)} fields; write "
                    "numbers without separators, and names that hold one in quotes"
                )
            # Empty cells, and cells missing at the line's end, get defaults.
            if cells and cells is not fields:
                given = zip(fields, cells, strict=False)
                yield where, {f: _cell(f, cell) for f, cell in given if cell}
    except csv.Error as error:
        message = f"line {rows.line_num}: {error}; is a quote left open?"
        raise TableError(message) from error


def _cell(field: str, text: str) -> Any:
    """Return a cell's value: a number, true or false, or text."""
    if field in _TEXT:
        return text
    try:
        return parse_json(text.lower())
    except ValueError:
        return text


def _one_table(where: str, entry: Any) -> TableConfig:
    """Read a table; null stands for a field's default.

    Raises:
        TableError: The entry is not a table; the message says where it is.
    """
    name = entry.get("name") if isinstance(entry, Mapping) else None
    lengths: dict[str, Any] = {}
    if isinstance(entry, Mapping):
        entry = {field: value for field, value in entry.items() if value is not None}
        lengths = {n: entry.pop(n) for n in _LENGTHS if n in entry}
    try:
        table = TableConfig.from_json(entry)
        if lengths:
            table = _with_lengths(table, **lengths)
    except NeuroShardError as error:
        said = str(error)
        if isinstance(name, str) and not said.startswith("table '"):
            said = f"table {name!r:.60}: {said}"
        raise TableError(f"{where}: {said}") from error
    # Control characters would move a terminal's cursor.
    if not table.name.strip() or re.search(r"[\x00-\x1f\x7f-\x9f]", table.name):
        raise TableError(
            f"{where}: name must be text without control characters, got "
            f"{table.name!r:.60}"
        )
    if table.profile is not None and "pooling_factor" not in entry:
        factor = table.profile.pooling_factor
        table = dataclasses.replace(table, pooling_factor=factor)
    return table


def _with_lengths(
    table: TableConfig,
    length_p95: Any = None,
    length_max: Any = None,
    padding_share: Any = None,
) -> TableConfig:
    """Return a table whose profile has these lengths; all features have the same.

    Raises:
        ProfileError: The lengths contradict each other or the pooling factor.
        TableError: A figure is missing, or the table has a profile.
    """
    if table.profile is not None or (length_max is not None and length_p95 is None):
        raise TableError(
            f"table '{table.name:.100}': {', '.join(_LENGTHS)} replace a profile, and "
            "length_max needs length_p95; leave one out"
        )
    count, mean = table.num_features, table.pooling_factor
    profile = FeatureProfile(batch_size=1, num_lookups=mean)
    if length_p95 is not None:
        one = FeatureProfile.of_lengths(mean / count, length_p95, length_max)
        profile = dataclasses.replace(
            one, num_lookups=mean, common_std=count * one.common_std
        )
    if padding_share is not None:
        if not (is_number(padding_share) and 0 <= padding_share <= 1):
            raise TableError(
                f"table '{table.name:.100}': padding_share must be 0 to 1, got "
                f"{padding_share!r:.60}"
            )
        profile = dataclasses.replace(profile, hot_rows=HotRows.padded(padding_share))
    return dataclasses.replace(table, profile=profile)


def load_json(path: str | Path) -> dict[str, tuple[TableConfig, ...]]:
    """Load named table sets.

    The file holds `{"workloads": [{"name": ..., ...}, ...]}`. A workload describes its
    tables in one of three ways:

    - `tables`: a list of `TableConfig.to_json()`;
    - parallel lists: `rows`, with `pooling` or (`lookups`, `count_hist`,
      `batch_size`), and optionally `dim` or `dims`;
    - `groups` of equal tables (`num_tables`, `rows`, `dim`, `hotness`).

    Missing widths are 64; a workload without lookups reads one id per sample.

    Returns:
        Workload name -> its tables, in the file's order.

    Raises:
        ConfigError: The file cannot be read.
        TableError: The file holds no workloads, or a table's value is out of range.
    """
    data = read_document(path)
    workloads = data.get("workloads") if isinstance(data, Mapping) else None
    if not isinstance(workloads, list):
        raise TableError(f"'{path}' is not an object with a list 'workloads'")
    loaded: dict[str, tuple[TableConfig, ...]] = {}
    for number, workload in enumerate(workloads):
        if not isinstance(workload, Mapping):
            raise TableError(f"{path}: workload {number} is not an object")
        name = str(workload.get("name", "unnamed"))
        if name in loaded:
            raise TableError(f"{path}: two workloads are named '{name}'; rename one")
        try:
            loaded[name] = tuple(workload_tables(name, workload))
            check_tables(loaded[name])
        except (LookupError, TypeError, OverflowError, ValueError) as error:
            raise TableError(
                f"{path}: workload '{name:.60}' cannot be read ({error!r:.200})"
            ) from error
    return loaded


def workload_tables(name: str, workload: Mapping[str, Any]) -> Iterator[TableConfig]:
    """Make the tables of one workload; see `load_json`."""
    if "tables" in workload:
        for number, table in enumerate(workload["tables"]):
            yield _one_table(f"table {number}", table)
        return
    groups = "groups" in workload
    published = _of_groups(workload["groups"]) if groups else _of_lists(workload)
    for number, (rows, dim, num_features, profile) in enumerate(published):
        if number == MOST_TABLES:
            raise TableError(f"a workload has at most {MOST_TABLES:,} tables")
        yield TableConfig(
            name=f"{name}/{number}",
            num_embeddings=rows,
            # Kernels need multiples of 4: published widths are rounded up.
            embedding_dim=max(1, -(-dim // COLUMN_MULTIPLE)) * COLUMN_MULTIPLE,
            pooling_factor=profile.pooling_factor,
            num_features=num_features,
            profile=profile,
        )


_Published = Iterator[tuple[int, int, int, FeatureProfile]]
"""For each table: rows, width, number of features and profile."""


def _of_lists(workload: Mapping[str, Any]) -> _Published:
    all_rows = workload["rows"]
    pooling = workload.get("pooling", [1.0] * len(all_rows))
    dims = workload.get("dims", [workload.get("dim", 64)] * len(all_rows))
    for i, rows in enumerate(map(int, all_rows)):
        if "count_hist" in workload:
            profile = FeatureProfile(
                batch_size=int(workload.get("batch_size", PROFILE_BATCH_SIZE)),
                num_lookups=float(workload["lookups"][i]),
                access_histogram=tuple(map(float, workload["count_hist"][i])),
            )
        else:
            profile = _assumed(float(pooling[i]), rows)
        yield rows, int(dims[i]), 1, profile


def _of_groups(groups: Sequence[Mapping[str, Any]]) -> _Published:
    for group in groups:
        hotness, rows = group["hotness"], int(group["rows"])
        per_feature = hotness if isinstance(hotness, list) and hotness else [hotness]
        profile = _assumed(sum(map(float, per_feature)), rows)
        for _ in range(int(group["num_tables"])):
            yield rows, int(group["dim"]), len(per_feature), profile


def _assumed(pooling_factor: float, rows: int) -> FeatureProfile:
    return zipf_profile(
        batch_size=PROFILE_BATCH_SIZE,
        pooling_factor=pooling_factor,
        num_embeddings=rows,
    )
