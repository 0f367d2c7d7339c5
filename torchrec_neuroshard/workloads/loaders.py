"""Table sets from files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrec_neuroshard.errors import TableError
from torchrec_neuroshard.profiles import FeatureProfile, zipf_profile
from torchrec_neuroshard.tables import TableConfig, check_tables

__all__ = ["load_json"]

PROFILE_BATCH_SIZE = 65_536
"""Batch that assumed profiles are stated at: the released DLRM dataset's."""


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
        data = json.loads(Path(path).read_text(encoding="utf-8"))
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
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise TableError(
                f"{path}: workload '{name}' cannot be read ({error!r})"
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
        for _ in range(int(group["num_tables"])):
            profile = zipf_profile(
                batch_size=PROFILE_BATCH_SIZE,
                pooling_factor=lookups,
                num_embeddings=int(group["rows"]),
            )
            yield TableConfig(
                name=f"{name}/{number}",
                num_embeddings=int(group["rows"]),
                embedding_dim=_width(group["dim"]),
                pooling_factor=lookups,
                num_features=len(per_feature) if per_feature else 1,
                profile=profile,
            )
            number += 1
