"""Predict public jobs of generative recommenders, and compare with what they published.

    python benchmarks/bench_jobs.py --predict benchmarks/results/jobs_202611
    python benchmarks/bench_jobs.py --page benchmarks/results/jobs_202611

The first command predicts each job's own plan and ours, from the tables in `examples/`,
and writes `<path>.json`. That file was committed before the second command existed, and
is not changed. The second command sets the predictions beside `published/jobs.json`.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrec.distributed.planner import ParameterConstraints

from harness.planning import count_types
from harness.provenance import commit, now
from torchrec_neuroshard import NeuroShardPlanner, topology_for
from torchrec_neuroshard.commands.inputs import GivenModel, read_model
from torchrec_neuroshard.files import json_text, write_whole

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"
DENSE_MS = 300.0
"""Dense layers of the predictions of a shuffler; only their share of a step counts."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A public job: its tables, devices and the sharding types that it ran with."""

    name: str
    tables: str
    card: str
    ranks: int
    batch_size: int
    types: Mapping[str, str]
    """Table -> sharding type of the job's own plan; "" is every other table."""


JOBS = (
    Job(
        name="Primus-DLRM on 8 B200",
        tables="primus_yambda.csv",
        card="b200",
        ranks=8,
        batch_size=1_024,
        types={"": "row_wise"},
    ),
    Job(
        name="Primus-DLRM on 8 MI355X",
        tables="primus_yambda.csv",
        card="mi350",
        ranks=8,
        batch_size=1_024,
        types={"": "row_wise"},
    ),
    Job(
        name="HSTU on 16 H100",
        tables="hstu.csv",
        card="h100",
        ranks=16,
        batch_size=32,
        types={"item": "row_wise", "user_id": "row_wise", "": "data_parallel"},
    ),
    Job(
        name="DLRMv3 on 8 B200",
        tables="dlrm_v3.csv",
        card="b200",
        ranks=8,
        batch_size=64,
        types={"": "row_wise"},
    ),
)


def plan_of(job: Job, given: GivenModel, types: Mapping[str, str]) -> dict[str, Any]:
    """Return the predictions of a plan with these types; without types, of ours."""
    constraints = dict(given.constraints)
    for config in (c for m in given.module.modules() for c in _configs(m)):
        name = config.name
        known = constraints.get(name) or ParameterConstraints()
        if kind := types.get(name, types.get("", "")):
            known = dataclasses.replace(known, sharding_types=[kind])
        constraints[name] = known
    found: dict[str, Any] = {}
    for dense_ms in (0.0, DENSE_MS):
        planner = NeuroShardPlanner(
            topology=topology_for(job.card, world_size=job.ranks),
            batch_size=job.batch_size,
            constraints=constraints,
            profiles=given.profiles,
            calibrate="never",
            dense_ms=dense_ms,
            debug=False,
            stats=[],
        )
        plan = planner.plan(given.module, given.sharders)
        report = planner.report()
        if dense_ms:
            found["shuffler_saves"] = report.lengths.share if report.lengths else 0.0
            continue
        stages = planner.last_result.predicted.stages if planner.last_result else ()
        ranks = report.ranks
        found |= {
            "sharding_types": count_types(plan),
            "critical_path_ms": report.critical_path_ms,
            "iteration_ms": report.iteration_ms,
            "p95_ms": report.lengths.p95_ms if report.lengths else None,
            "worst_ms": report.worst_ms,
            "kernels_ms": max(r.costs.fwd_compute + r.costs.bwd_compute for r in ranks),
            "stages": [s.name for s in stages],
            "notes": [
                n.text for n in report.notes if n.code in ("hot-rows", "lengths")
            ],
        }
    return found


def _configs(module: Any) -> Sequence[Any]:
    found: Sequence[Any] = getattr(module, "embedding_configs", list)()
    return found


def predict(job: Job) -> dict[str, Any]:
    """Return the predictions of a job's own plan, and of ours."""
    given = read_model(str(EXAMPLES / job.tables))
    return {
        "job": {**dataclasses.asdict(job), "types": dict(job.types)},
        "theirs": plan_of(job, given, job.types),
        "ours": plan_of(job, given, {}),
    }


def main() -> None:
    """Predict, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--predict", type=Path, help="write <path>.json")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if args.predict:
        jobs = [predict(job) for job in JOBS]
        data = {
            "command": f"python benchmarks/bench_jobs.py --predict {args.predict}",
            "commit": commit(),
            "date": now(),
            "jobs": jobs,
        }
        write_whole(args.predict.with_suffix(".json"), json_text(data))


if __name__ == "__main__":
    main()
