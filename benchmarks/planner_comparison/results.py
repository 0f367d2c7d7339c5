"""Files of results: `<out>.json.xz`.

The file describes the run and its tasks. For each planner of a task it has the status,
and the predicted and measured times of the plan's stages. All figures are computed
from these when the file is read.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness.pages import one_line
from planner_comparison.paired import COLLECTIVES, KERNELS, PATH
from torchrec_neuroshard.costs.timeline import chains
from torchrec_neuroshard.files import write_whole

_TIMES = ("predicted", "measured")
COLLECTIVE_TIMES = ("index_ms", "fwd_comms_ms", "bwd_comms_ms", "reduce_ms")
"""Times of a stage's collectives, in `plans.stage_times`."""


def at(out: Path, suffix: str) -> Path:
    """Return the path of a file of results."""
    return out.with_name(out.name + suffix)


def add_up(stages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a plan's figures by the timeline of `costs/timeline.py`.

    Args:
        stages: Times of the stages; see `plans.stage_times`.

    Returns:
        `critical_path_ms`: the exchange of ids, forward and backward, with what
        overlaps. `kernel_path_ms`: the split of ids, the slowest rank's forward kernels
        and the slowest rank's backward kernels, without collectives. `collectives_ms`:
        the sum of all collectives, hidden or not.
    """

    def values(name: str) -> Any:
        return np.array([s[name] for s in stages], dtype=np.float64).T

    forward_WS, backward_WS = values("fwd_ms"), values("bwd_ms")
    orders = values("fwd_order_ms"), values("bwd_order_ms")
    index, sent, returned, reduced = map(values, COLLECTIVE_TIMES)
    none = np.zeros_like(index)
    id_split_ms = sum(s.get("id_split_ms", 0.0) for s in stages)
    path_ms = (
        id_split_ms
        + index.sum()
        + chains(forward_WS, sent, orders[0]).ms
        + chains(backward_WS, returned, orders[1], reduced).ms
    )
    kernels_ms = id_split_ms + chains(forward_WS, none, orders[0]).ms
    kernels_ms += chains(backward_WS, none, orders[1]).ms
    return {
        PATH: float(path_ms),
        KERNELS: float(kernels_ms),
        COLLECTIVES: float((index + sent + returned + reduced).sum()),
        "stages": list(stages),
    }


def write_results(data: dict[str, Any], out: Path) -> None:
    """Write all results of a run; a file is never half written."""
    tasks = [
        {
            **task,
            "planners": {
                name: _rounded(
                    entry
                    | {n: {"stages": entry[n]["stages"]} for n in _TIMES if n in entry}
                )
                for name, entry in task["planners"].items()
            },
        }
        for task in data["tasks"]
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    text = one_line({**data, "tasks": tasks})
    write_whole(at(out, ".json.xz"), lzma.compress(text.encode()))


def _rounded(value: Any) -> Any:
    """Return JSON with numbers of four digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {key: _rounded(own) for key, own in value.items()}
    if isinstance(value, list):
        return [_rounded(own) for own in value]
    return value


def read_results(out: Path) -> dict[str, Any]:
    """Return the results that `write_results` wrote."""
    with lzma.open(at(out, ".json.xz")) as file:
        data: dict[str, Any] = json.load(file)
    for task in data["tasks"]:
        for entry in task["planners"].values():
            entry |= {n: add_up(entry[n]["stages"]) for n in _TIMES if n in entry}
    return data
