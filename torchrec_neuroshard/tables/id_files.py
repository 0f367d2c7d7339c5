"""How often the features of a data set look up which ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow
from pyarrow import compute, dataset

from torchrec_neuroshard.errors import ProfileError, suggestion
from torchrec_neuroshard.files import TOO_LARGE
from torchrec_neuroshard.progress import phase
from torchrec_neuroshard.tables.profile import FeatureProfile, profile_ids

__all__ = ["column_names", "profile_data"]

FORMATS = {".parquet": "parquet", ".csv": "csv", ".feather": "feather"}
Ints = npt.NDArray[np.int64]


def profile_data(
    path: Path, num_samples: int, features: Sequence[str] | None = None
) -> dict[str, FeatureProfile]:
    """Profile the first samples of a data set.

    Args:
        path: A file of `FORMATS`, or a folder of files of one of them.
        num_samples: Rows that are read.
        features: Columns; None: all that hold ids.

    Raises:
        ProfileError: There is no such data, a column is missing or holds no ids.
    """
    data = _open(path)
    known = data.schema.names
    if missing := [f for f in features or () if f not in known]:
        raise ProfileError(
            f"{path} has no column '{missing[0]}'; "
            + suggestion(missing[0], known, "columns")
        )
    found = (n for n in known if _holds_ids(data.schema.field(n)))
    wanted = list(dict.fromkeys(features or found))
    for name in wanted:
        if not _holds_ids(data.schema.field(name)):
            raise ProfileError(
                f"{path}, column '{name}': ids are integers or lists of integers, not "
                f"{data.schema.field(name).type}; turn its values into row numbers "
                "first, as the model does"
            )
    if not wanted:
        raise ProfileError(
            f"{path} has no column of integers or of lists of integers, but "
            + ", ".join(f"{f.name} ({f.type})" for f in data.schema)
        )
    try:
        with phase("reading the data"):
            table = data.head(num_samples, columns=wanted)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ProfileError(f"{path} cannot be read: {error}") from error
    if not table.num_rows:
        raise ProfileError(f"{path} has no rows")
    profiles: dict[str, FeatureProfile] = {}
    with phase("profiling") as shown:
        for name, ids, lengths in _features(path, table):
            shown.text = f"profiling {name}, {len(profiles)} of {len(wanted)} done"
            profiles[name] = profile_ids(ids, lengths)
    return profiles


def column_names(path: Path) -> list[str]:
    """Return the names of a data set's columns."""
    names: list[str] = _open(path).schema.names
    return names


def _open(path: Path) -> dataset.Dataset:
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else []
    first = next((f for f in files if f.suffix.lower() in FORMATS), path)
    if not first.is_file():
        raise ProfileError(f"there is no data at {path}")
    if first.suffix.lower() not in FORMATS:
        raise ProfileError(f"{path}: expected one of {', '.join(FORMATS)}")
    chosen = [str(f) for f in files if f.suffix == first.suffix] or str(path)
    try:
        return dataset.dataset(chosen, format=FORMATS[first.suffix.lower()])
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ProfileError(f"{path} cannot be read: {error}") from error


def _holds_ids(field: pyarrow.Field) -> bool:
    kind = field.type
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        kind = kind.value_type
    return bool(pyarrow.types.is_integer(kind))


def _features(path: Path, table: pyarrow.Table) -> Iterator[tuple[str, Ints, Ints]]:
    """Return the name, the ids and the ids per sample of each column."""
    for name in table.column_names:
        column = table[name].combine_chunks()
        if pyarrow.types.is_integer(column.type):
            lengths = np.asarray(column.is_valid(), dtype=np.int64)
            ids = column.drop_null()
        else:
            lengths = np.asarray(compute.list_value_length(column).fill_null(0))
            ids = compute.list_flatten(column)
            if ids.null_count:
                raise ProfileError(f"{path}, column '{name}': a list holds no value")
        values = np.asarray(ids)
        for odd in (values.min(), values.max()) if len(values) else ():
            if not 0 <= odd < TOO_LARGE:
                raise ProfileError(
                    f"{path}, column '{name}': ids are row numbers from 0, got {odd}; "
                    "turn them into such first, as the model does, or leave the column "
                    "out by --features"
                )
        yield name, values.astype(np.int64), lengths.astype(np.int64)
