"""Kernels and collectives of profiler traces of training jobs, beside predictions.

Reads Chrome traces as `torch.profiler` writes them, of jobs with fused embedding
kernels, and says which collectives compute ran beside. Shapes come from the operators
in the trace. Of each kernel the shortest of the iterations counts, since a collective
also waits for its slowest rank.
"""

from __future__ import annotations

import gzip
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from published.fitting import FORWARD_GAP_US
from torchrec_neuroshard.cost_models.comms_published import (
    PublishedCommsModel,
    card_collectives,
)
from torchrec_neuroshard.cost_models.loading import card_constants
from torchrec_neuroshard.cost_models.physical import STEP_POWER, shard_times
from torchrec_neuroshard.features import table_features
from torchrec_neuroshard.gpu_cards import GpuCard, find_card
from torchrec_neuroshard.profiles import uniform_profile
from torchrec_neuroshard.tables import TableConfig

__all__ = ["Overlaps", "TraceLine", "read_trace"]

Event = Mapping[str, Any]

_LOOKUP = "fbgemm::split_embedding_codegen_lookup"
_LOOKUP_BACKWARD = "torch::autograd::CppNode<SplitLookupFunction"
_WEIGHTS, _TABLES, _IDS, _OFFSETS, _LOOKUP_WEIGHTS, _ROWS = 1, 5, 11, 12, 14, 20
"""Inputs of the lookup: weights, tables, ids, offsets, their weights, state per row."""
_TYPE_BYTES = {"float": 4, "long int": 8, "long": 8, "int": 4, "c10::Half": 2}
_GPUS_PER_NODE = 8
_COLLECTIVES = ("all2all", "alltoall", "kjt", "reduce")
"""Words in the names of the regions that collectives are launched in."""

Overlaps = dict[tuple[int, str], list[float]]
"""Stream and kind of collective -> share of each one's time that compute ran beside.
A collective's time holds the wait for slower ranks."""


@dataclass(frozen=True)
class TraceLine:
    """One quantity of a trace."""

    name: str
    predicted_ms: float
    measured_ms: float
    """Shortest of the iterations."""
    count: int
    """Times that it is in the trace."""


def read_trace(path: Path) -> tuple[str, list[TraceLine], Overlaps]:
    """Read a trace; return its title, its lines, kernels first, and its overlaps.

    Raises:
        ValueError: The card is not in the table of cards.
    """
    opened = gzip.open(path) if path.suffix == ".gz" else path.open("rb")
    with opened as file:
        data = json.load(file)
    device = data["deviceProperties"][0]["name"]
    card = find_card(device)
    if card is None:
        raise ValueError(f"{path}: no published figures of {device}")
    ranks = int(data["distributedInfo"]["world_size"])
    trace = _Trace(data["traceEvents"])
    title = f"{path.name}: rank {data['distributedInfo']['rank']} of {ranks}, {device}"
    lines = [*_kernels(trace, card), *_collectives(trace, card, ranks)]
    return title, lines, _overlaps(trace)


class _Trace:
    """Events by kind, and the operators around each kernel's launch."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.kernels: list[Event] = []
        self.operators: list[Event] = []
        self._launch: dict[Any, Event] = {}
        self._around: dict[Any, list[Event]] = defaultdict(list)
        for event in events:
            kind = event.get("cat")
            if kind == "kernel":
                self.kernels.append(event)
            elif kind == "cuda_runtime":
                self._launch[event["args"].get("correlation")] = event
            elif kind in ("cpu_op", "user_annotation"):
                self.operators.append(event)
                if kind == "user_annotation" or event["name"].startswith("c10d::"):
                    self._around[event["tid"]].append(event)
        self.kernels.sort(key=lambda e: e["ts"])

    def around(self, kernel: Event) -> Iterator[Event]:
        """Annotations and collective operators around a kernel's launch."""
        launch = self._launch.get(kernel["args"].get("correlation"))
        if launch is not None:
            for event in self._around[launch["tid"]]:
                if event["ts"] <= launch["ts"] <= event["ts"] + event["dur"]:
                    yield event

    def shapes(self, name: str) -> list[list[list[int]]]:
        """Input shapes of the operators whose names begin so."""
        found = [e for e in self.operators if e["name"].startswith(name)]
        dims = [e["args"].get("Input Dims", e["args"].get("Input dims")) for e in found]
        return [d for d in dims if d]


def _lookups(trace: _Trace) -> list[tuple[list[TableConfig], int]]:
    """Tables and samples of each lookup of an iteration, at the mean of its ids."""
    widths: dict[int, int] = {}
    for shape in trace.shapes(_LOOKUP_BACKWARD):
        samples, columns = shape[0]
        widths.setdefault(columns, samples)
    calls: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for dims in trace.shapes(_LOOKUP):
        tables, bags = dims[_TABLES][0], dims[_OFFSETS][0] - 1
        weighted = int(bool(dims[_LOOKUP_WEIGHTS]))
        key = (tables, dims[_ROWS][0], dims[_WEIGHTS][0], bags, weighted)
        calls[key].append(dims[_IDS][0])
    found = []
    for (tables, rows, _, bags, weighted), ids in calls.items():
        samples = bags // tables
        columns = min(
            (c for c, s in widths.items() if s == samples),
            key=lambda c: abs(math.log(c / (tables * 72))),
        )
        each = max(1, rows // tables)
        pooling = float(np.mean(ids)) / bags
        table = TableConfig(
            name="t",
            num_embeddings=each,
            embedding_dim=max(4, round(columns / tables / 4) * 4),
            pooling_factor=pooling,
            weighted=bool(weighted),
            profile=uniform_profile(
                batch_size=samples, pooling_factor=pooling, num_embeddings=each
            ),
        )
        found.append(([table] * tables, samples))
    return found


def _kernels(trace: _Trace, card: GpuCard) -> list[TraceLine]:
    c = card_constants(card)
    lookups = _lookups(trace)
    forward = backward = gradient = 0.0
    for tables, samples in lookups:
        times = shard_times(table_features(tables, samples), c)
        steps = float(times.steps.sum()) ** (1 / STEP_POWER)
        fixed = c.forward_launch_us - FORWARD_GAP_US + c.bag_step_us * steps
        forward += float(times.forward.sum()) + 1e-3 * fixed
        backward += float((times.sort + times.update).sum())
        backward += 1e-3 * c.backward_launch_us
        gradient += float(times.weight_gradient.sum())
    wanted: list[tuple[str, float, Callable[[str], bool]]] = [
        ("forward kernels", forward, lambda n: "codegen_forward" in n),
        (
            "backward kernels, sort included",
            backward,
            lambda n: "RadixSort" in n or "embedding_backward_codegen" in n,
        ),
        ("gradient of lookups' weights", gradient, lambda n: "grad_indice" in n),
        ("bounds check", 0.0, lambda n: "bounds_check" in n),
    ]
    per_step = len(lookups)
    steps_seen = sum("codegen_forward" in k["name"] for k in trace.kernels) // per_step
    lines = []
    for name, predicted, chosen in wanted:
        times_us = [k["dur"] for k in trace.kernels if chosen(k["name"])]
        size = len(times_us) // steps_seen
        if size == 0:
            continue
        tail = times_us[len(times_us) - size * steps_seen :]
        sums = np.array(tail).reshape(steps_seen, size).sum(axis=1)
        lines.append(TraceLine(name, predicted, float(sums.min()) / 1e3, steps_seen))
    return lines


def _collectives(trace: _Trace, card: GpuCard, ranks: int) -> list[TraceLine]:
    pooled = {
        samples: sum(t.embedding_dim for t in tables)
        for tables, samples in _lookups(trace)
    }
    own_bytes = 4.0 * sum(samples * width for samples, width in pooled.items())
    found: dict[tuple[str, int, int, bool, int], list[tuple[float, float]]] = (
        defaultdict(list)
    )
    for kernel in trace.kernels:
        if "nccl" not in kernel["name"].lower():
            continue
        events = list(trace.around(kernel))
        labels = [e["name"].strip("# ") for e in events if "##" in e["name"]]
        label = labels[-1] if labels else ""
        shaped = [e for e in events if e["name"].startswith("c10d::")]
        if shaped:
            dims = shaped[-1]["args"].get("Input Dims")
            kinds = shaped[-1]["args"].get("Input type", [])
            what = _shaped(label, dims, kinds, ranks)
        else:
            what = _by_label(label, own_bytes, ranks)
        if what is not None:
            num_bytes, size, local, ring = what
            # Ids differ from batch to batch: sizes that are nearly alike are one line.
            key = (label, size, local, ring, round(2 * math.log2(num_bytes)))
            found[key].append((num_bytes, kernel["dur"] / 1e3))
    lines = []
    for (label, size, local, ring, _), seen in found.items():
        model = PublishedCommsModel(
            card_collectives(card), world_size=size, local_world_size=local
        )
        num_bytes = float(np.mean([b for b, _ in seen]))
        ms = float(model.collective_ms(np.array([num_bytes]), ring=ring)[0])
        name = f"{label}: {num_bytes / 1e6:,.1f} MB among {size} ranks"
        name += "" if size == local else f" on {size // local} nodes"
        lines.append(TraceLine(name, ms, min(t for _, t in seen), len(seen)))
    return lines


def _overlaps(trace: _Trace) -> Overlaps:
    streams = Counter(k["args"]["stream"] for k in trace.kernels)
    busiest = streams.most_common(1)[0][0]
    compute = [
        (k["ts"], k["ts"] + k["dur"])
        for k in trace.kernels
        if k["args"]["stream"] == busiest
    ]
    found: Overlaps = defaultdict(list)
    for kernel in trace.kernels:
        if "nccl" not in kernel["name"].lower():
            continue
        around = sorted(trace.around(kernel), key=lambda e: float(e["ts"]))
        names = [e["name"] for e in around if e["cat"] == "user_annotation"]
        kind = " > ".join([n for n in names if any(w in n for w in _COLLECTIVES)][-2:])
        start, end = kernel["ts"], kernel["ts"] + kernel["dur"]
        beside = sum(max(0.0, min(end, b) - max(start, a)) for a, b in compute)
        key = kernel["args"]["stream"], kind or "launched before the trace"
        found[key].append(beside / max(kernel["dur"], 1.0))
    return found


def _shaped(
    label: str, dims: Sequence[Sequence[int]], kinds: Sequence[str], ranks: int
) -> tuple[float, int, int, bool] | None:
    """Bytes of a rank's buffer, ranks, ranks per node, and whether it is a ring."""
    sizes = [math.prod(d) for d in dims[:2] if d]
    if len(sizes) < 2 or not max(sizes):
        return None
    width = _TYPE_BYTES.get(kinds[0] if kinds else "float", 4)
    if "reduce_scatter" in label:
        group = max(sizes) // min(sizes)
        return float(max(sizes) * width), group, min(group, _GPUS_PER_NODE), True
    if "alltoall" in label:
        # After a reduce-scatter inside nodes, ranks of one number in their nodes.
        nodes = max(1, ranks // _GPUS_PER_NODE)
        group, local = (nodes, 1) if nodes > 1 else (ranks, ranks)
        return float(max(sizes) * width), group, local, False
    if "values" in label or "lengths" in label:
        return float(max(sizes) * width), ranks, min(ranks, _GPUS_PER_NODE), False
    return None


def _by_label(
    label: str, own_bytes: float, ranks: int
) -> tuple[float, int, int, bool] | None:
    """The same where operators have no shapes: outputs of this rank's tables."""
    if "alltoall_fwd" in label or "alltoall_bwd" in label:
        return own_bytes, ranks, min(ranks, _GPUS_PER_NODE), False
    return None
