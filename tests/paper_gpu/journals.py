"""Replays what pipelines queued on streams (see `pipelines`), with times for phases.

Phases are known by the operators that only they launch.
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
    "fbgemm::lru_cache_populate": "cache",
    "aten::sigmoid": "lower_forward",
    "aten::tanh": "forward",
    "aten::tanh_backward": "backward",
    "aten::sigmoid_backward": "lower_backward",
}
_DENSE_PARAMETERS = 4


@dataclass
class _Rank:
    """One rank's streams while its journal is replayed; times are in ms."""

    journal: Sequence[str]
    phase_ms: Mapping[str, float]
    collective_ms: float = 0.0
    """When the last collective ended."""
    _seen: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))

    def _label(self, name: str, kind: str, thread: str) -> str:
        """Phase of a launch, empty for what belongs to none."""
        if name == "c10d::alltoall_base_" and kind == "ints":
            # Splits, lengths, values: the last ones are what takes time.
            self._seen["ints"] += 1
            return "" if self._seen["ints"] % 3 else "index_comms"
        if name == "c10d::alltoall_base_":
            return "fwd_comms" if thread == "host" else "bwd_comms"
        if name == "c10d::allreduce_" and kind == "floats":
            return "all_reduce"
        if (name, kind, thread) == ("aten::add", "floats", "host"):
            self._seen["adds"] += 1
            last = self._seen["adds"] % _DENSE_PARAMETERS == 0
            return "optimizer" if last else ""
        return _LABELS.get(name, "")

    def steps(self) -> Iterator[tuple[str, float]]:
        """Go from one collective to the next: its phase, and when the rank is ready."""
        streams: defaultdict[str, float] = defaultdict(float)
        events: dict[str, float] = {}
        host_ms = reduced_ms = 0.0
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
                yield label, start_ms
                if "reduce" in name:
                    reduced_ms = self.collective_ms
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
    journals: Sequence[Sequence[str]], phase_ms: Sequence[Mapping[str, float]]
) -> float:
    """Return how long a batch takes in the steady state, by what ranks queued [ms].

    Streams run what they hold in order, collectives run one by one on a stream of their
    own and wait for all ranks, launches cost nothing, and the host waits where it did.

    Args:
        journals: Of each rank.
        phase_ms: Of each rank: what its launches of each phase take.
    """
    ranks = [_Rank(lines, ms) for lines, ms in zip(journals, phase_ms, strict=True)]
    queue_ms = 0.0
    ends: list[float] = []
    for steps in zip(*(rank.steps() for rank in ranks), strict=True):
        (name,) = {name for name, _ in steps}
        queue_ms = max(queue_ms, *(ready for _, ready in steps))
        queue_ms += ranks[0].phase_ms.get(name, 0.0)
        for rank in ranks:
            rank.collective_ms = queue_ms
        if name == "bwd_comms":
            ends.append(queue_ms)
    # Two periods at the end: an iteration may return to its place after two batches.
    return (ends[-3] - ends[-3 - _PERIOD]) / _PERIOD
