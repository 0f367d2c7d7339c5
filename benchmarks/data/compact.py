"""Make this folder's record files from those of layout 1, which hold every raw pass.

    git worktree add /tmp/old eadbc3d
    python benchmarks/data/compact.py /tmp/old/benchmarks/data/compute_xeon.parquet \
        --out benchmarks/data/compute_xeon.parquet

Passes become their number and spread, and the figures of tables are rounded to 11
significant bits. Several files become one: records are numbered on, and times are in
the unit of the first file's reference.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from torchrec_neuroshard.collect.sampling import in_short_numbers
from torchrec_neuroshard.record_store import CommsStore, RecordStore
from torchrec_neuroshard.records import (
    SCHEMA_VERSION,
    CommsHeader,
    CommsRecord,
    CostRecord,
    RunHeader,
    relative_spread,
)
from torchrec_neuroshard.tables import TableConfig


def read_old(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the header and the records of a file of layout 1."""
    table = pq.read_table(path)
    header = json.loads(table.schema.metadata[b"neuroshard_header"])
    if header["schema_version"] != 1:
        raise SystemExit(f"{path} has layout {header['schema_version']}, not 1")
    return {**header, "schema_version": SCHEMA_VERSION}, table.to_pylist()


def cost_record(row: dict[str, Any], start: int, factor: float) -> CostRecord:
    """Return a record without its passes.

    Args:
        row: Of layout 1.
        start: Added to its number.
        factor: Brings its times to the unit of the first file.
    """
    forward, backward = row.pop("fwd_raw_ms"), row.pop("bwd_raw_ms")
    reference = row.pop("ref_raw_ms") or [1.0] * len(forward)
    total = [(f + b) / r for f, b, r in zip(forward, backward, reference, strict=True)]
    tables = []
    for data in row.pop("tables"):
        table = TableConfig.from_json(data)
        profile = table.profile
        assert profile is not None
        bare = dataclasses.replace(table, profile=None)
        tables.append(
            in_short_numbers(
                bare,
                profile.batch_size,
                profile.pooling_std,
                profile.access_histogram,
            )
        )
    source = row.pop("repeat_of")
    return CostRecord(
        index=start + row.pop("index"),
        repeat_of=None if source is None else start + source,
        tables=tuple(tables),
        fwd_ms=factor * row.pop("fwd_ms"),
        bwd_ms=factor * row.pop("bwd_ms"),
        num_passes=len(forward),
        spread=relative_spread(total),
        reference_ms=statistics.median(reference),
        **row,
    )


def compact_compute(paths: Sequence[Path], out: Path) -> None:
    """Write one file of fused kernels' records."""
    files = [read_old(path) for path in paths]
    first = files[0][0]
    if len(files) > 1:
        # No run can go on with it: no options are those of all files.
        first["sampling"] = {"files": [header["sampling"] for header, _ in files]}
        first["command"] = " && ".join(header["command"] for header, _ in files)
    with RecordStore(out, RunHeader.from_json(first)) as store:
        for header, rows in files:
            start = 1 + max(store.done, default=-1)
            factor = first["reference_ms"] / header["reference_ms"]
            for row in rows:
                store.append(cost_record(row, start, factor))


def compact_comms(path: Path, out: Path) -> None:
    """Write one file of collectives' records."""
    header, rows = read_old(path)
    with CommsStore(out, CommsHeader.from_json(header)) as store:
        for row in rows:
            arrival_PW = np.array(row.pop("arrival_raw_ms"))
            done_PW = np.array(row.pop("done_raw_ms"))
            taken_PW = np.maximum(done_PW - arrival_PW.max(axis=1, keepdims=True), 0)
            made = {
                **row,
                "num_passes": len(arrival_PW),
                "spread": relative_spread(taken_PW.max(axis=1).tolist()),
                "reference_ms": statistics.median(row.pop("ref_raw_ms")),
            }
            del made["ref_raw_ms"]
            store.append(CommsRecord.from_json(made))


def main() -> None:
    """Write the file that the options name."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", help="of layout 1")
    parser.add_argument("--out", type=Path, required=True, help="a new file")
    options = parser.parse_args()
    if options.out.exists():
        parser.error(f"{options.out} exists")
    if read_old(options.files[0])[0].get("kind") == "comms":
        compact_comms(*options.files, options.out)
    else:
        compact_compute(options.files, options.out)


if __name__ == "__main__":
    main()
