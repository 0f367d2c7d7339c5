"""Read table sets from files; read and write profiles."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import io
import itertools
import re
import sys
from collections import Counter
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
from torchrec_neuroshard.tables.spellings import (
    check_fields,
    is_number_text,
    known_name,
    meant_field,
    read_value,
)
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
_FIELDS = (*(field.name for field in dataclasses.fields(TableConfig)), *_LENGTHS)
_REQUIRED = ("name", "num_embeddings", "embedding_dim")
_LISTS: Mapping[str, Sequence[str]] = {
    "num_embeddings": ("rows",),
    "embedding_dim": ("dim", "dims"),
    "pooling_factor": ("pooling", "lookups"),
}
"""Field of a table -> its names in a workload of parallel lists."""
_GROUPS: Mapping[str, Sequence[str]] = {
    "num_embeddings": ("rows",),
    "embedding_dim": ("dim",),
    "pooling_factor": ("hotness",),
}
"""Field of a table -> its name in a group of equal tables."""
_YAML_LINE = re.compile(r"-(\s|$)|---|[^,;\t]*:(\s|$)")
"""How a line of YAML begins."""


def read_document(path: str | Path) -> Any:
    """Read a YAML file if it ends in .yaml or .yml, else a JSON file.

    Raises:
        ConfigError: The file is missing or malformed, or PyYAML is missing.
    """
    is_yaml = Path(path).suffix.lower() in (".yaml", ".yml")
    return _parsed(_read_text(path), f"'{path}'", is_yaml)


def _parsed(text: str, shown: str, is_yaml: bool) -> Any:
    try:
        if is_yaml:
            return importlib.import_module("yaml").safe_load(text)
        return parse_json(text)
    except ImportError as error:
        raise ConfigError(
            f"cannot read {shown}: PyYAML is not installed. Run `pip install pyyaml`, "
            "or convert the file to JSON"
        ) from error
    except Exception as error:  # JSON's or YAML's
        reason = " ".join(str(error).split())
        kind = "YAML" if is_yaml else "JSON"
        raise ConfigError(f"{shown} cannot be read as {kind}: {reason}") from error


def _read_text(path: str | Path, *, may_be_piped: bool = False) -> str:
    """Return a file's text.

    Args:
        path: The file.
        may_be_piped: Whether "-" is standard input.

    Raises:
        ConfigError: The file cannot be read, or standard input holds nothing.
    """
    is_piped = may_be_piped and str(path) == "-"
    shown = _shown(path) if is_piped else f"'{path}'"
    try:
        if not is_piped:
            return Path(path).read_text(encoding="utf-8-sig")
        if sys.stdin is not None and not sys.stdin.isatty():
            text = sys.stdin.buffer.read().decode("utf-8-sig")
            if text.strip():
                return text
        raise ConfigError(
            "standard input holds no tables: pipe CSV, JSON or YAML into it, as in "
            "`neuroshard plan - < tables.csv`"
        )
    except OSError as error:
        raise ConfigError(f"cannot read {shown}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"cannot read {shown}: {error}. Save it as UTF-8 text"
        ) from error


def _shown(path: str | Path) -> str:
    return "standard input" if str(path) == "-" else f"'{path}'"


def _format(path: str | Path, text: str) -> str:
    """Return "csv", "json" or "yaml": a file's ending, or what standard input holds."""
    if str(path) != "-":
        kind = Path(path).suffix.lower()
        return {".csv": "csv", ".yaml": "yaml", ".yml": "yaml"}.get(kind, "json")
    if text.lstrip()[:1] in ("[", "{"):
        return "json"
    first = next(_content_lines(text), "")
    is_yaml = _YAML_LINE.match(first) or not re.search("[,;\t]", first)
    return "yaml" if is_yaml else "csv"


def _content_lines(text: str) -> Iterator[str]:
    """Yield the lines that are neither empty nor comments."""
    return (line for line in text.splitlines() if line.strip()[:1] not in ("", "#"))


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
    that are 0. Numbers and types may be written as `spellings.read_value` reads them.

    Args:
        path: The file; its ending decides the format. "-" reads standard input, in any
            of the formats.
        workload: Name of a workload in the file; None takes the only one.

    Raises:
        ConfigError: There is no such file or workload.
        TableError: A value is missing or not allowed.
    """
    text, shown = _read_text(path, may_be_piped=True), _shown(path)
    if (kind := _format(path, text)) == "csv":
        entries = _csv_entries(text)
    else:
        data = _parsed(text, shown, kind == "yaml")
        if isinstance(data, Mapping) and "workloads" in data:
            return ReadTables(_chosen(path, _workloads(shown, data), workload))
        listed = data.get("tables") if isinstance(data, Mapping) else data
        if not isinstance(listed, list):
            raise _no_tables(shown)
        entries = ((f"table {n}", entry) for n, entry in enumerate(listed))
    if workload is not None:
        raise ConfigError(
            f"{shown} holds one set of tables and no workload named '{workload}': "
            f"leave ':{workload}' out"
        )
    tables, not_described = [], set()
    try:
        for where, entry in entries:
            table = _one_table(where, entry)
            tables.append(table)
            if table.profile is None and entry.get("pooling_factor") is None:
                not_described.add(table.name)
        if tables:
            check_tables(tables)
    except TableError as error:
        raise TableError(f"{shown}, {error}") from error
    if not tables:
        raise _no_tables(shown)
    return ReadTables(tuple(tables), frozenset(not_described))


def _no_tables(shown: str) -> TableError:
    return TableError(
        f"{shown} holds no tables: expected CSV with a heading and a line for each "
        "table; or a JSON or YAML list of objects with name, num_embeddings and "
        "embedding_dim, alone or as 'tables' or 'workloads' of an object"
    )


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
    if str(path) == "-":
        asked = "and a name can follow only a file's: save it as a file"
    if workload is not None:
        near = suggestion(workload, workloads, "workloads")
        asked = f"none is named '{workload:.60}'; {near}"
    raise ConfigError(f"{_shown(path)} holds {len(workloads)} workloads, {asked}")


def _csv_entries(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each table's place in the file and its fields; `#` begins a comment."""
    separator = max(",;\t", key=next(_content_lines(text), "").count)
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
            if not cells:
                continue
            if not fields:
                fields = _heading(where, cells, separator)
                continue
            if len(cells) > len(fields):
                raise TableError(
                    f"{where}: {len(cells)} values for {len(fields)} fields; write "
                    "numbers without separators, and names that hold one in quotes"
                )
            # Cells that are empty, null or missing at the line's end get defaults.
            given = {f: c for f, c in zip(fields, cells, strict=False) if c}
            nulls = [f for f, c in given.items() if c.lower() == "null" and f != "name"]
            yield where, {f: c for f, c in given.items() if f not in nulls}
    except csv.Error as error:
        message = f"line {rows.line_num}: {error}; is a quote left open?"
        raise TableError(message) from error


def _heading(where: str, cells: Sequence[str], separator: str) -> list[str]:
    """Return the fields that a CSV file's first line names, in any case.

    Raises:
        TableError: The line is no heading, or a field is unknown, missing or twice.
    """
    fields = [cell.lower() for cell in cells]
    has_number = any(map(is_number_text, cells))
    if not set(fields) & set(_FIELDS) and (
        has_number or not any(meant_field(cell, _FIELDS) for cell in cells)
    ):
        line = separator.join(cells)
        raise TableError(
            f"{where} is not a heading: {line!r:.100}. The first line names the "
            f"columns, such as {','.join(_FIELDS[:4])}; the fields are "
            f"{', '.join(_FIELDS)}"
        )
    if "" in fields:
        raise TableError(
            f"{where}: column {fields.index('') + 1} has no name; name it or leave it "
            "out (in pandas: to_csv(..., index=False))"
        )
    field, count = Counter(fields).most_common(1)[0]
    if count > 1:
        raise TableError(f"{where}, the heading: {field!r:.60} appears twice")
    try:
        check_fields(fields, _FIELDS, _REQUIRED)
    except TableError as error:
        raise TableError(f"{where}, the heading: {error}") from error
    return fields


def _one_table(where: str, entry: Any) -> TableConfig:
    """Read a table; null stands for a field's default.

    Raises:
        TableError: The entry is not a table; the message says where it is.
    """
    name = entry.get("name") if isinstance(entry, Mapping) else None
    lengths: dict[str, Any] = {}
    try:
        if isinstance(entry, Mapping):
            given = {str(f): value for f, value in entry.items() if value is not None}
            check_fields(list(given), _FIELDS, _REQUIRED)
            entry = {field: read_value(field, value) for field, value in given.items()}
            lengths = {n: entry.pop(n) for n in _LENGTHS if n in entry}
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
    return _workloads(f"'{path}'", read_document(path))


def _workloads(shown: str, data: Any) -> dict[str, tuple[TableConfig, ...]]:
    workloads = data.get("workloads") if isinstance(data, Mapping) else None
    if not isinstance(workloads, list):
        raise TableError(f"{shown} is not an object with a list 'workloads'")
    loaded: dict[str, tuple[TableConfig, ...]] = {}
    for number, workload in enumerate(workloads):
        if not isinstance(workload, Mapping):
            raise TableError(f"{shown}: workload {number} is not an object")
        name = str(workload.get("name", "unnamed"))
        if name in loaded:
            raise TableError(f"{shown}: two workloads are named '{name}'; rename one")
        try:
            loaded[name] = tuple(workload_tables(name, workload))
            check_tables(loaded[name])
        except TableError as error:
            raise TableError(f"{shown}: workload '{name:.60}': {error}") from error
        except (LookupError, TypeError, OverflowError, ValueError) as error:
            raise TableError(
                f"{shown}: workload '{name:.60}' cannot be read ({error!r:.200})"
            ) from error
    return loaded


def workload_tables(name: str, workload: Mapping[str, Any]) -> Iterator[TableConfig]:
    """Make the tables of one workload; see `load_json`.

    Raises:
        TableError: A field of a table, group or list is missing or has another name.
    """
    if "tables" in workload:
        for number, table in enumerate(workload["tables"]):
            yield _one_table(f"table {number}", table)
        return
    if "groups" in workload:
        published = _of_groups(workload["groups"])
    else:
        published = _of_lists(workload)
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


def _check_names(
    given: Mapping[str, Any], names: Mapping[str, Sequence[str]], *required: str
) -> None:
    """Refuse other names of fields; what has no such name may be a note.

    Args:
        given: A workload or group.
        names: Field of a table -> its names there.
        required: Names without a default.

    Raises:
        TableError: A name is another one or missing.
    """
    own = {name for each in names.values() for name in each}
    others = {str(n): names.get(known_name(str(n))) for n in given if n not in own}
    meant = {other: known for other, known in others.items() if known}
    quoted = {o: " or ".join(f"'{name}'" for name in n) for o, n in meant.items()}
    found = {*given, *itertools.chain.from_iterable(meant.values())}
    said = []
    if missing := [name for name in required if name not in found]:
        said.append(f"missing: {', '.join(missing)}")
    if meant:
        hints = [f"{known} for {other!r:.60}" for other, known in quoted.items()]
        said.append(f"did you mean {', '.join(hints)}?")
    if said:
        raise TableError("; ".join(said))


_Published = Iterator[tuple[int, int, int, FeatureProfile]]
"""For each table: rows, width, number of features and profile."""


def _of_lists(workload: Mapping[str, Any]) -> _Published:
    _check_names(workload, _LISTS, "rows")
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
        _check_names(group, _GROUPS, "num_tables", "rows", "dim", "hotness")
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
