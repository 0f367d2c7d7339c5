"""Overlap of compute and collectives in profiler traces of training jobs.

It reads Chrome traces of `torch.profiler`. The time of a collective includes the wait
for slower ranks. Forward passes are held to the timeline (`costs/timeline.py`): the
rank's own lookups and exchanges in, the time from the first to the last of them out.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from torchrec_neuroshard.costs.timeline import Inside, pass_ms

__all__ = ["ForwardPass", "Overlaps", "forward_passes", "overlaps", "read_trace"]

Event = Mapping[str, Any]
Overlaps = dict[tuple[int, str], list[float]]
"""Stream and kind of collective -> share of each one's time with compute."""

_WORDS = ("all2all", "alltoall", "kjt", "reduce")
"""Words in the names of regions that launch collectives."""
_RUNTIMES = ("cuda_runtime", "cuda_driver")
_KINDS = {
    "embedding_codegen_forward": "k",
    "embedding_backward": "b",
    "reduce_scatter_base_bw": "",
    "reduce_scatter_base": "i",
    "alltoall_fwd": "x",
}
"""Words in the name of a kernel or of its region -> lookup, update, reduce-scatter
inside a node, exchange; backward collectives are left out."""


class ForwardPass(NamedTuple):
    """A forward pass [us]."""

    measured: float
    """From the first lookup's start to the last exchange's end."""
    timeline: float
    """By TorchRec's order, with each kernel's own time."""
    waiting: float
    """The sum of all lookups and exchanges."""


def read_trace(path: Path) -> list[Event]:
    """Return the spans of a trace; the file may be compressed."""
    opened = gzip.open(path) if path.suffix == ".gz" else path.open("rb")
    with opened as file:
        return [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]


def overlaps(spans: Sequence[Event]) -> Overlaps:
    """Return the share of each collective's time with kernels on the busiest stream."""
    kernels = [e for e in spans if e.get("cat") == "kernel"]
    streams = Counter(e["args"]["stream"] for e in kernels)
    busiest = streams.most_common(1)[0][0]
    compute = [
        (e["ts"], e["ts"] + e["dur"]) for e in kernels if e["args"]["stream"] == busiest
    ]
    launches = {e["args"]["correlation"]: e for e in spans if e.get("cat") in _RUNTIMES}
    regions = [e for e in spans if e.get("cat") == "user_annotation"]
    found: Overlaps = defaultdict(list)
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


def forward_passes(spans: Sequence[Event]) -> list[ForwardPass]:
    """Return the forward passes in which each lookup has its exchange."""
    kernels = sorted(
        (e for e in spans if e.get("cat") == "kernel"), key=lambda e: float(e["ts"])
    )
    launches = {e["args"]["correlation"]: e for e in spans if e.get("cat") in _RUNTIMES}
    regions = [e for e in spans if e.get("cat") == "user_annotation"]
    held: list[tuple[str, Event]] = []
    for kernel in kernels:
        name = kernel["name"].lower()
        if "nccl" in name and (launch := launches.get(kernel["args"]["correlation"])):
            name = " ".join(_around(launch, regions))
        kind = next((kind for word, kind in _KINDS.items() if word in name), "")
        held += [(kind, kernel)] if kind else []
    found = []
    for match in re.finditer("(ki?x){2,}", "".join(kind for kind, _ in held)):
        events = held[slice(*match.span())]
        lookups, sent, inside = (
            np.array([float(e["dur"]) for kind, e in events if kind == name])
            for name in "kxi"
        )
        ends = [float(e["ts"] + e["dur"]) for kind, e in events if kind == "x"]
        waits = Inside(inside, 1) if len(inside) else None
        found.append(
            ForwardPass(
                measured=max(ends) - float(events[0][1]["ts"]),
                timeline=float(pass_ms(lookups[None], sent, inside=waits)),
                waiting=float(lookups.sum() + sent.sum() + inside.sum()),
            )
        )
    return found


def _around(launch: Event, regions: Sequence[Event]) -> list[str]:
    """Return the names of the regions around a launch, the outer ones first."""
    inside = [
        r
        for r in regions
        if r["tid"] == launch["tid"] and 0 <= launch["ts"] - r["ts"] < r["dur"]
    ]
    return [r["name"] for r in sorted(inside, key=lambda r: float(r["ts"]))]
