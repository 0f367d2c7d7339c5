"""Predicted iterations as Chrome traces, to be opened in Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchrec_neuroshard.files import write_whole
from torchrec_neuroshard.simulator import PHASES, PredictedCosts

__all__ = ["chrome_trace", "write_chrome_trace"]

_FORWARD, _BACKWARD = PHASES[:3], PHASES[3:]


def _schedule(predicted: PredictedCosts) -> Iterator[tuple[int, str]]:
    """Stage and phase, in the order in which ranks run them."""
    numbers = range(len(predicted.stages))
    yield from ((stage, phase) for stage in numbers for phase in _FORWARD)
    yield from ((stage, phase) for stage in reversed(numbers) for phase in _BACKWARD)


def chrome_trace(predicted: PredictedCosts) -> dict[str, Any]:
    """Lay a predicted iteration out in time.

    Every rank is a process of the trace, with what it does (compute or collectives) on
    one track and its waiting for the slowest rank on another. Stages stand in the order
    of the tables, backward passes visit them in reverse order; the dense part, which no
    plan changes, is left out. Phases stand one after another, also under a pipeline.

    Args:
        predicted: What `Simulator.evaluate` or a search returned.

    Returns:
        An object of the Trace Event Format; times in microseconds. The last event ends
        at the critical path, where nothing overlaps and there is no dense part.
    """
    events: list[dict[str, Any]] = []
    for rank in range(len(predicted.stages[0].ranks)):
        for name, arguments in (
            ("process_name", {"name": f"rank {rank}"}),
            ("process_sort_index", {"sort_index": rank}),
        ):
            events.append({"ph": "M", "pid": rank, "name": name, "args": arguments})
        for track, title in enumerate(("compute and collectives", "waiting")):
            events.append(
                {
                    "ph": "M",
                    "pid": rank,
                    "tid": track,
                    "name": "thread_name",
                    "args": {"name": title},
                }
            )
    start_ms = 0.0
    for number, phase in _schedule(predicted):
        stage = predicted.stages[number]
        costs = [float(getattr(r, phase)) for r in stage.ranks]
        longest = max(costs)
        for rank, cost in enumerate(costs):
            for track, title, begin, length in (
                (0, phase, start_ms, cost),
                (1, f"wait in {phase}", start_ms + cost, longest - cost),
            ):
                if length > 0:
                    events.append(
                        {
                            "ph": "X",
                            "pid": rank,
                            "tid": track,
                            "name": title,
                            "cat": "comms" if phase.endswith("comms") else "compute",
                            "ts": begin * 1e3,
                            "dur": length * 1e3,
                            "args": {"stage": stage.name},
                        }
                    )
        start_ms += longest
    return {
        "displayTimeUnit": "ms",
        "traceEvents": events,
        "otherData": {
            "pipeline_type": predicted.schedule.name,
            "critical_path_ms": predicted.critical_path_ms,
            "compute": predicted.compute_source,
            "comms": predicted.comms_source,
        },
    }


def write_chrome_trace(predicted: PredictedCosts, path: str | Path) -> None:
    """Write `chrome_trace` to a file that ui.perfetto.dev opens."""
    write_whole(path, json.dumps(chrome_trace(predicted)) + "\n")
