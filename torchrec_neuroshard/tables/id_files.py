"""Profile the features of a data set, from Parquet, CSV or Feather files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow
from pyarrow import compute, dataset

from torchrec_neuroshard.errors import ProfileError, suggestion
from torchrec_neuroshard.files import TOO_LARGE
from torchrec_neuroshard.progress import phase
from torchrec_neuroshard.tables.profile import FeatureProfile, profile_ids

FORMATS = {".parquet": "parquet", ".csv": "csv", ".feather": "feather"}
Ints = npt.NDArray[np.int64]


def profile_data(
    path: Path, num_samples: int, features: Sequence[str] | None = None
) -> tuple[dict[str, FeatureProfile], list[str]]:
    """Profile the first samples of a data set.

    Args:
        path: A file in one of `FORMATS`, or a folder of files in one format.
        num_samples: Rows to read.
        features: Columns to profile; None takes all columns that hold ids.

    Returns:
        Profile of each feature, and the columns that were left out.

    Raises:
        ProfileError: There is no such data, or a column is missing or holds no ids.
    """
    data = _open(path)
    known = {field.name: field.type for field in data.schema}
    of_ids = [name for name, kind in known.items() if _is_of_ids(kind)]
    wanted = list(dict.fromkeys(features or of_ids))
    for name in wanted:
        if name not in known:
            near = suggestion(name, known, "columns")
            raise ProfileError(f"{path} has no column '{name}'; {near}")
        if not _is_of_ids(known[name]):
            raise ProfileError(
                f"{path}, column '{name}': ids must be integers or lists of integers, "
                f"got {known[name]}; convert them to row numbers first, as the model "
                "does"
            )
    if not wanted:
        raise ProfileError(
            f"{path} has no column of integers or lists of integers; its columns are "
            + ", ".join(f"{name} ({kind})" for name, kind in known.items())
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
        for name in wanted:
            shown.text = f"profiling {name}, {len(profiles)} of {len(wanted)} done"
            where = f"{path}, column '{name}'"
            profiles[name] = profile_ids(*_ids(where, table[name].combine_chunks()))
    return profiles, [name for name in known if name not in profiles]


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


def _is_list(kind: pyarrow.DataType) -> bool:
    return bool(pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind))


def _is_of_ids(kind: pyarrow.DataType) -> bool:
    value = kind.value_type if _is_list(kind) else kind
    return bool(pyarrow.types.is_integer(value))


def _ids(where: str, column: pyarrow.Array) -> tuple[Ints, Ints]:
    """Return a column's ids and the number of ids of each sample."""
    if _is_list(column.type):
        lengths = compute.list_value_length(column).fill_null(0)
        ids = compute.list_flatten(column)
        if ids.null_count:
            raise ProfileError(f"{where}: a list holds a null; remove it")
    else:
        lengths, ids = column.is_valid(), column.drop_null()
    values = np.asarray(ids)
    for odd in (values.min(), values.max()) if len(values) else ():
        if not 0 <= odd < TOO_LARGE:
            raise ProfileError(
                f"{where}: ids must be row numbers from 0, got {odd}; convert them "
                "first, as the model does, or choose other columns with --features"
            )
    return values.astype(np.int64), np.asarray(lengths).astype(np.int64)
