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
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrec.distributed.planner import ParameterConstraints

from harness.pages import table
from harness.planning import count_types
from harness.provenance import commit, now
from torchrec_neuroshard import NeuroShardPlanner, topology_for
from torchrec_neuroshard.commands.files import find_model
from torchrec_neuroshard.commands.inputs import GivenModel, made_model
from torchrec_neuroshard.files import json_text, read_json, write_whole

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"
DENSE_MS = 300.0
"""Dense layers of the predictions of a shuffler; only their share of a step counts."""


COMPARED = (
    "job | figure | published | predicted | predicted / published | source of the "
    "published figure"
)
PLANNED = "job | plan | tables | critical path | expected iteration"
EXPLAINED = """\
- **The exchange of rows** is predicted 15 % too long on both machines. The profiled
  rank serves 5.6 times its share, because padding is id 0 and the tables are sharded
  row-wise; its authors assume the size to be normal. MI355X is planned as MI350.
- **The exchange of ids** is predicted at 0.36 and 0.46 of the published time. 207 MB
  in 0.98 ms are 211 GB/s, a quarter of what the exchange of rows reaches on the same
  links. The published page does not say why, and neither can we.
- **Kernels** are those of the busiest rank, with the sorting of ids by rank, which
  the published sum may count elsewhere. The estimate takes an id as a bag of one,
  which is too long in [timings of kernels alone](sequences_202611.md), and does not
  know how often a batch of consecutive events repeats its ids.
- **The shuffler**: dense layers are taken in proportion to a rank's ids. Attention
  grows with the square of a sample's length; its kernels were not modelled. A gamma
  distribution stands for lengths of which 18 % are 1 and 17 % are 4,096.
- **HSTU's tables** are hash tables with a cache in that benchmark, so its kernels and
  exchanges are not compared. **DLRMv3** has no published times of training."""


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
    given = made_model(find_model(str(EXAMPLES / job.tables)))
    return {
        "job": {**dataclasses.asdict(job), "types": dict(job.types)},
        "theirs": plan_of(job, given, job.types),
        "ours": plan_of(job, given, {}),
    }


def predicted_of(figure: str, found: Mapping[str, Any]) -> float:
    """Return the prediction of a job's own plan for a published figure."""
    theirs = found["theirs"]
    if figure == "kernels":
        return float(theirs["kernels_ms"])
    if figure == "shuffler":
        return 1.0 / (1.0 - float(theirs["shuffler_saves"]))
    if figure == "hot_share":
        [share] = {re.findall(r"serves (\d+)%", note)[0] for note in theirs["notes"]}
        return int(share) / 100
    return float(theirs["worst_ms"][figure])


def page(data: Mapping[str, Any], published: Sequence[Mapping[str, Any]]) -> str:
    """Return the predictions beside what was published, as Markdown."""
    by_name = {found["job"]["name"]: found for found in data["jobs"]}
    known = {fact["job"] for fact in published}

    def own_plan(found: Mapping[str, Any]) -> str:
        return "its own types" if found["job"]["name"] in known else "all row-wise"

    compared = []
    for fact in published:
        predicted = predicted_of(fact["predicted"], by_name[fact["job"]])
        shown = f"{fact['value']:g}", f"{predicted:.2f}"
        ratio = f"{predicted / fact['value']:.2f}"
        compared.append((fact["job"], fact["figure"], *shown, ratio, fact["source"]))
    plans = [
        (
            found["job"]["name"],
            who,
            ", ".join(
                f"{count} {kind.partition('/')[0]}"
                for kind, count in found[key]["sharding_types"].items()
            ),
            f"{found[key]['critical_path_ms']:.2f}",
            f"{found[key]['iteration_ms']:.2f}",
        )
        for found in data["jobs"]
        for who, key in ((own_plan(found), "theirs"), ("ours", "ours"))
    ]
    texts = (
        "# Public jobs of generative recommenders",
        f"Predictions: `{data['command']}`, commit {data['commit']}, {data['date']}. "
        "They were committed before this page, and are not changed. Tables, lengths "
        "and padding are in `examples/`, with their sources. Nothing here was measured "
        "by this project.",
        "## Published beside predicted",
        table(COMPARED, compared),
        EXPLAINED,
        "## Plans",
        "Tables alone, without dense layers [ms]. *Its own types* are those that the "
        "job's authors state; those of DLRMv3 are not published.",
        table(PLANNED, plans),
    )
    return "\n\n".join(texts) + "\n"


def main() -> None:
    """Predict, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--predict", type=Path, help="write <path>.json")
    parser.add_argument("--page", type=Path, help="read <path>.json, write <path>.md")
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
    if args.page:
        data = read_json(args.page.with_suffix(".json"))
        text = page(data, read_json(HERE / "published" / "jobs.json"))
        write_whole(args.page.with_suffix(".md"), text.encode())


if __name__ == "__main__":
    main()
