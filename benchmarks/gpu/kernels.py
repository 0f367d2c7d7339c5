"""Time kernels of a rank whose costs are estimates so far.

    python benchmarks/gpu/kernels.py --out kernels.parquet --seconds 90
    python benchmarks/gpu/kernels.py --out uvm.parquet --seconds 50 --kinds uvm

Each case is a row of the file: its shape as JSON, bytes or lookups, and the median
forward and backward by the collector's timer. Variants of a kind read the same ids.
A case that fails has its error instead of times.

| kind | variants | forward, backward |
| --- | --- | --- |
| copy | | a copy in the device's memory, none |
| column_order | parts of 16 or 128 columns | TorchRec's reordering of split tables |
| row_order | | gather of rows, scatter of gradients |
| bucketize | pooled, sequence | ids by row shard, none |
| permute | | bags of all ranks by table, none |
| dense | fused sgd, no optimizer, each optimizer | lookup, gradients and optimizer |
| unpooled | fused, unpooled | lookup, update |
| codecs | fp16, bf16, int8 | encode, decode |
| vbe | fused, vbe | lookup, update |
| weights | fp32, fp16, bf16, int8 | lookup, update |
| uvm | device, managed, LRU and LFU caches | lookup with loading of rows, update |

The file is written after each case. The same command continues a file.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from torchrec_neuroshard.files import write_whole
from torchrec_neuroshard.hardware.devices import free_cached_memory
from torchrec_neuroshard.measure.clock import DeviceClock, PassCounts, SetTimer
from torchrec_neuroshard.measure.kernels import device_fingerprint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rank_kernels import exchanges, host_memory, tables
from rank_kernels.shapes import Case, Notes

RESERVED_BYTES = 2 * 2**30
"""Memory that is allocated once on a GPU, for most cases' tables."""
QUICK_PASSES = PassCounts(
    min_passes=2, max_passes=2, time_budget_seconds=0.0, num_batches=2
)
DEVICE_FAILED = 3
"""Exit code if the device failed, and only a new process can use it."""

KINDS: Mapping[str, Callable[[bool], Iterator[Case]]] = {
    "copy": exchanges.copy_cases,
    "column_order": exchanges.column_order_cases,
    "row_order": exchanges.row_order_cases,
    "bucketize": exchanges.bucketize_cases,
    "permute": exchanges.permute_cases,
    "dense": tables.dense_cases,
    "unpooled": tables.unpooled_cases,
    "codecs": exchanges.codec_cases,
    "vbe": tables.vbe_cases,
    "weights": tables.weight_cases,
    "uvm": host_memory.uvm_cases,
}
"""In the order of time: what few plans need comes last."""
USUAL_KINDS = tuple(kind for kind in KINDS if kind != "uvm")


SCHEMA = pa.schema(
    [
        ("kind", pa.string()),
        ("variant", pa.string()),
        ("shape", pa.string()),
        ("unit", pa.string()),
        ("amount", pa.float64()),
        ("fwd_ms", pa.float64()),
        ("bwd_ms", pa.float64()),
        ("num_passes", pa.int64()),
        ("spread", pa.float64()),
        ("flushes", pa.int64()),
        ("notes", pa.string()),
        ("error", pa.string()),
    ]
)


def write(path: Path, rows: Sequence[Mapping[str, Any]], about: Any) -> None:
    """Write all rows; the file is never half written."""
    file = io.BytesIO()
    schema = SCHEMA.with_metadata({"about": json.dumps(about)})
    pq.write_table(pa.Table.from_pylist(list(rows), schema), file, compression="zstd")
    write_whole(path, file.getvalue())


def row_of(kind: str, case: Case) -> dict[str, Any]:
    """Return a case's row without results."""
    return {
        "kind": kind,
        "variant": case.variant,
        "shape": json.dumps(case.shape),
        "unit": case.unit,
        "amount": float(case.amount),
    }


def time_case(case: Case, timer: SetTimer) -> dict[str, Any]:
    """Return a case's times, or its error."""
    notes: Notes = {}
    clock = timer.clock
    try:
        found = timer.measure_passes(case.passes(timer.device, notes))
        counted = {name: count() for name, count in notes.items()}
        return {
            "fwd_ms": found.fwd_ms,
            "bwd_ms": found.bwd_ms if case.has_backward else None,
            "num_passes": found.num_passes,
            "spread": found.spread,
            # Far more than 32: the host was too slow to keep the device busy.
            "flushes": clock.repeats if isinstance(clock, DeviceClock) else None,
            "notes": json.dumps(counted) if counted else None,
        }
    except Exception as error:  # one case's fault must not hide the others
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def time_kinds(args: argparse.Namespace, until: float) -> int:
    """Time all cases that the file lacks; return the exit code."""
    device = torch.device(args.device)
    timer = SetTimer(
        device, RESERVED_BYTES, counts=QUICK_PASSES if args.quick else None
    )
    about = {
        "hardware": dataclasses.asdict(device_fingerprint(device, 1)),
        "options": {k: str(v) for k, v in vars(args).items()},
        "reference_ms": timer.reference_ms,
    }
    rows = pq.read_table(args.out).to_pylist() if args.out.exists() else []
    done = {(r["kind"], r["variant"], r["shape"]) for r in rows}
    for kind in args.kinds:
        start, first = time.monotonic(), len(rows)
        for case in KINDS[kind](args.quick):
            row = row_of(kind, case)
            if (row["kind"], row["variant"], row["shape"]) in done:
                continue
            if time.monotonic() >= until:
                tell(kind, rows[first:], time.monotonic() - start)
                print(f"the time is up in '{kind}'", flush=True)
                return 0
            row |= time_case(case, timer)
            rows.append(row)
            write(args.out, rows, about)
            error = row.get("error", "").lower()
            if "cuda error" in error:
                print(f"{kind}, {case.variant}: the device failed: {error}", flush=True)
                return DEVICE_FAILED
            if "out of memory" in error:
                free_cached_memory(device)
        tell(kind, rows[first:], time.monotonic() - start)
    return 0


def tell(kind: str, rows: Sequence[Mapping[str, Any]], seconds: float) -> None:
    """Print what was timed, and each different error once."""
    timed = [r["fwd_ms"] for r in rows if r.get("error") is None]
    middle = f", forward {statistics.median(timed):.3f} ms" if timed else ""
    print(f"{kind}: {len(timed)} of {len(rows)} cases in {seconds:.1f} s{middle}")
    errors = {(r["variant"], r["error"]): None for r in rows if r.get("error")}
    for variant, error in errors:
        print(f"  {variant}: {error.splitlines()[0]}")
    sys.stdout.flush()


def main() -> int:
    """Time the kinds; return 3 if the device failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=USUAL_KINDS)
    parser.add_argument("--seconds", type=float, default=90.0, help="time limit")
    parser.add_argument("--quick", action="store_true", help="dry run, small sizes")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    until = time.monotonic() + args.seconds
    torch.set_num_threads(1)
    return time_kinds(args, until)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    sys.exit(main())
