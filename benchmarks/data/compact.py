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
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from torchrec_neuroshard.collect.sampling import in_short_numbers
from torchrec_neuroshard.collect.timing import Measurement
from torchrec_neuroshard.record_store import CommsStore, RecordStore, read_records
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


def cost_record(row: dict[str, Any]) -> CostRecord:
    """Return a record of layout 1 without its passes."""
    measured = Measurement(
        *(tuple(row.pop(name)) for name in ("fwd_raw_ms", "bwd_raw_ms", "ref_raw_ms")),
        *(row.pop(name) for name in ("fwd_ms", "bwd_ms")),
    )
    tables = []
    for table in map(TableConfig.from_json, row.pop("tables")):
        profile = table.profile
        assert profile is not None
        tables.append(
            in_short_numbers(
                dataclasses.replace(table, profile=None),
                profile.batch_size,
                profile.pooling_std,
                profile.access_histogram,
            )
        )
    return CostRecord(tables=tuple(tables), **measured.for_record(), **row)


def write(path: Path, header: dict[str, Any], records: Iterable[CostRecord]) -> None:
    """Write a file of fused kernels' records."""
    with RecordStore(path, RunHeader.from_json(header)) as store:
        for record in records:
            store.append(record)


def compact_compute(paths: Sequence[Path], out: Path) -> None:
    """Write one file of fused kernels' records."""
    headers = []
    with tempfile.TemporaryDirectory() as folder:
        parts = [Path(folder) / f"{number}.parquet" for number in range(len(paths))]
        for path, part in zip(paths, parts, strict=True):
            header, rows = read_old(path)
            headers.append(header)
            write(part, header, map(cost_record, rows))
        _, records = read_records(parts)
    joined = headers[0]
    if len(headers) > 1:
        # No run can go on with it: no options are those of all files.
        joined["sampling"] = {"files": [header["sampling"] for header in headers]}
        joined["command"] = " && ".join(header["command"] for header in headers)
    write(out, joined, records)


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
