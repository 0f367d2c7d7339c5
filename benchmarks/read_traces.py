"""Says of profiler traces of real jobs which collectives compute ran beside.

    python benchmarks/read_traces.py TRACE.json.gz ...

For each kind of collective: its stream, how often it ran, and the share of its time
during which a kernel of the busiest stream ran. A collective's time holds its waiting
for slower ranks. `docs/pipelines.md` quotes two traces of facebookresearch's
HolisticTraceAnalysis (f4d0062, tests/data).
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_WORDS = ("all2all", "alltoall", "kjt", "reduce")
_RUNTIMES = ("cuda_runtime", "cuda_driver")


def overlaps(events: Sequence[dict[str, Any]]) -> dict[tuple[int, str], list[float]]:
    """Stream and kind of collective -> the share of each that compute ran beside."""
    spans = [e for e in events if e.get("ph") == "X"]
    kernels = [e for e in spans if e.get("cat") == "kernel"]
    streams = Counter(e["args"]["stream"] for e in kernels)
    busiest = streams.most_common(1)[0][0]
    compute = [
        (e["ts"], e["ts"] + e["dur"]) for e in kernels if e["args"]["stream"] == busiest
    ]
    launches = {e["args"]["correlation"]: e for e in spans if e.get("cat") in _RUNTIMES}
    regions = [e for e in spans if e.get("cat") == "user_annotation"]
    found: dict[tuple[int, str], list[float]] = defaultdict(list)
    for kernel in sorted(kernels, key=lambda e: float(e["ts"])):
        if "nccl" not in kernel["name"].lower():
            continue
        launch = launches.get(kernel["args"]["correlation"])
        names = [] if launch is None else _around(launch, regions)
        kind = " > ".join([n for n in names if any(w in n for w in _WORDS)][-2:])
        start, end = kernel["ts"], kernel["ts"] + kernel["dur"]
        beside = sum(max(0.0, min(end, b) - max(start, a)) for a, b in compute)
        key = kernel["args"]["stream"], kind or "launched before the trace"
        found[key].append(beside / max(kernel["dur"], 1.0))
    return found


def _around(launch: dict[str, Any], regions: Sequence[dict[str, Any]]) -> list[str]:
    """Names of the regions that a launch is in, the outer ones first."""
    inside = [
        r
        for r in regions
        if r["tid"] == launch["tid"] and 0 <= launch["ts"] - r["ts"] < r["dur"]
    ]
    return [r["name"] for r in sorted(inside, key=lambda r: float(r["ts"]))]


def main() -> None:
    """Print a line for each stream and kind of collective of each trace."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path)
    for path in parser.parse_args().traces:
        print(path.name)
        with gzip.open(path, "rt", encoding="utf-8") as file:
            found = overlaps(json.load(file)["traceEvents"])
        for (stream, kind), shares in found.items():
            texts = " ".join(f"{share:.0%}" for share in shares)
            print(f"  stream {stream}, {len(shares)} x {kind}: {texts}")


if __name__ == "__main__":
    main()
