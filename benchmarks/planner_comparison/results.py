"""Files of results: `<out>.json` and `<out>_plans.parquet`.

The JSON describes the run and its tasks. The Parquet file has one row per task and
planner: the status, and predicted and measured figures of the plan.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

__all__ = ["at", "read_results", "write_results"]


def at(out: Path, suffix: str) -> Path:
    """Return the path of a file of results."""
    return out.with_name(out.name + suffix)


def write_results(data: dict[str, Any], out: Path) -> None:
    """Write all results of a run; a file is never half written."""
    out.parent.mkdir(parents=True, exist_ok=True)
    tasks = [dict(task) for task in data["tasks"]]
    rows = [
        {"task": task["name"], "planner": name, **entry}
        for task in tasks
        for name, entry in task.pop("planners").items()
    ]
    table = pyarrow.Table.from_struct_array(pyarrow.array(rows))
    part = at(out, ".part")
    parquet.write_table(table, part, compression="zstd")
    part.replace(at(out, "_plans.parquet"))
    text = json.dumps({**data, "tasks": tasks}, indent=1)
    part.write_text(f"{text}\n", encoding="utf-8")
    part.replace(at(out, ".json"))


def read_results(out: Path) -> dict[str, Any]:
    """Return the results that `write_results` wrote, without fields that are None."""
    data: dict[str, Any] = json.loads(at(out, ".json").read_text(encoding="utf-8"))
    planners: dict[str, dict[str, Any]] = {t["name"]: {} for t in data["tasks"]}
    for row in parquet.read_table(at(out, "_plans.parquet")).to_pylist():
        task, name = row.pop("task"), row.pop("planner")
        if task in planners:  # rows can be newer than the JSON
            planners[task][name] = {k: v for k, v in row.items() if v is not None}
    for task in data["tasks"]:
        task["planners"] = planners[task["name"]]
    return data
