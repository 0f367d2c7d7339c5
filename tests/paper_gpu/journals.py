"""Replays what pipelines queued on streams (see `pipelines`), with times for phases.

Phases are known by the operators that only they launch, stages by the notes before
them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

_PERIOD = 6
"""Batches after which every pipeline is where it was: ways span one to three."""
_LABELS = {
    "fbgemm::split_embedding_codegen_forward_unweighted_pt2_wrapper": "fwd_compute",
    "fbgemm::split_embedding_backward_codegen_rowwise_adagrad_unweighted_pt2_wrapper": (
        "bwd_compute"
    ),
    "fbgemm::dense_embedding_codegen_lookup_function": "fwd_compute",
    "fbgemm::lru_cache_populate": "cache",
    "aten::sigmoid": "lower_forward",
    "aten::tanh": "forward",
    "aten::tanh_backward": "backward",
    "aten::sigmoid_backward": "lower_backward",
}
_ON_THREAD = {
    ("c10d::alltoall_base_", "host"): "fwd_comms",
    ("c10d::alltoall_base_", "engine"): "bwd_comms",
    ("c10d::_reduce_scatter_base_", "host"): "fwd_comms",
    ("c10d::_allgather_base_", "engine"): "bwd_comms",
    ("fbgemm::permute_pooled_embs", "host"): "fwd_order",
    ("fbgemm::permute_pooled_embs", "engine"): "bwd_order",
    # A dense kernel's gradients; their kernel is launched by none of torch's operators.
    ("aten::zero_", "engine"): "bwd_compute",
}
_DENSE = ("lower_forward", "forward", "backward", "lower_backward")
_DENSE_PARAMETERS = 4

Label = tuple[str, int]
"""A phase and its stage; dense phases are of stage 0."""
_NONE: Label = ("", 0)


@dataclass
class _Rank:
    """One rank's streams while its journal is replayed; times are in ms."""

    journal: Sequence[str]
    phase_ms: Mapping[Label, float]
    collective_ms: float = 0.0
    """When the last collective ended."""
    _seen: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    _stages: dict[str, int | None] = field(default_factory=dict)
    """Stage of each thread's next launches; None in the dense layers."""

    def _label(self, name: str, kind: str, thread: str) -> Label:
        """Phase and stage of a launch, `_NONE` for what belongs to no phase."""
        if name == "c10d::alltoall_base_" and kind == "ints":
            return self._ids()
        if (name, kind, thread) == ("aten::add", "floats", "host"):
            self._seen["adds"] += 1
            last = self._seen["adds"] % _DENSE_PARAMETERS == 0
            return ("optimizer", 0) if last else _NONE
        stage = self._stages.get(thread)
        if name == "c10d::allreduce_" and kind == "floats":
            return ("all_reduce", 0) if stage is None else ("bwd_comms", stage)
        phase = _LABELS.get(name) or _ON_THREAD.get((name, thread), "")
        if phase in _DENSE:
            self._stages[thread] = None
        return phase, 0 if phase in _DENSE else stage or 0

    def _ids(self) -> Label:
        """Label the second of a stage's two exchanges, which sends values."""
        self._seen["ints"] += 1
        stages = sorted(
            stage for phase, stage in self.phase_ms if phase == "index_comms"
        )
        if self._seen["ints"] != 2:  # splits and lengths
            return _NONE
        return "index_comms", stages[(self._seen["ids"] - 1) % len(stages)]

    def steps(self) -> Iterator[tuple[Label, str, float]]:
        """Go from one collective to the next: label, group, when the rank is ready."""
        streams: defaultdict[str, float] = defaultdict(float)
        events: dict[str, float] = {}
        host_ms = reduced_ms = 0.0
        group = ""
        for line in self.journal:
            what, *words = line.split()
            if what == "launch":
                name, stream, kind, thread = words
                if thread == "host":  # DDP waits once the engine is done
                    streams["0"] = max(streams["0"], reduced_ms)
                start_ms = max(streams[stream], host_ms)
                label = self._label(name, kind, thread)
                if not name.startswith("c10d::"):
                    streams[stream] = start_ms + self.phase_ms.get(label, 0.0)
                    continue
                yield label, group, start_ms
                group = ""
                if name == "c10d::allreduce_":
                    reduced_ms = self.collective_ms
            elif what == "group":
                (group,) = words
            elif what == "stage":
                self._stages[words[1]] = int(words[0])
            elif what == "ids":
                self._seen["ids"] += 1
                self._seen["ints"] = 0
            elif what == "issued":
                events[words[0]] = self.collective_ms
            elif what == "record":
                events[words[0]] = max(streams[words[1]], host_ms)
            elif what == "block":
                streams[words[1]] = max(streams[words[1]], events[words[0]])
            elif what == "wait":
                streams[words[0]] = max(streams[words[0]], streams[words[1]])
            elif what == "host":
                host_ms = max(host_ms, streams[words[0]])


def replay(
    journals: Sequence[Sequence[str]], phase_ms: Sequence[Mapping[Label, float]]
) -> float:
    """Return how long a batch takes in the steady state, by what ranks queued [ms].

    Streams run what they hold in order. Each process group runs its collectives one by
    one on a stream of its own, and a collective waits for all ranks. Launches cost
    nothing, and the host waits where it did.

    Args:
        journals: Of each rank.
        phase_ms: Of each rank: what its launches of each phase and stage take.
    """
    ranks = [_Rank(lines, ms) for lines, ms in zip(journals, phase_ms, strict=True)]
    queues: defaultdict[str, float] = defaultdict(float)
    ends: list[float] = []
    for steps in zip(*(rank.steps() for rank in ranks), strict=True):
        ((label, group),) = {step[:2] for step in steps}
        start_ms = max(queues[group], *(ready for _, _, ready in steps))
        queues[group] = start_ms + ranks[0].phase_ms.get(label, 0.0)
        for rank in ranks:
            rank.collective_ms = queues[group]
        if label == ("all_reduce", 0):
            ends.append(queues[group])
    # Two periods at the end: an iteration may return to its place after two batches.
    return (ends[-3] - ends[-3 - _PERIOD]) / _PERIOD
