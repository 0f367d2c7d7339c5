"""What a monitor makes of measured times, with costs that can be worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import ShardingPlan

from tests.builders import (
    FixedSearcher,
    Nested,
    bag_config,
    bag_sharders,
    bags,
    make_planner,
)
from torchrec_neuroshard.monitor.report import (
    Assessor,
    Measured,
    MonitorReport,
    Phases,
)
from torchrec_neuroshard.phase_timer import PhaseTimes
from torchrec_neuroshard.profiles import zipf_profile
from torchrec_neuroshard.simulator import PHASES
from torchrec_neuroshard.testing import AnalyticCostModel

COMPUTE = ("fwd_compute", "bwd_compute")
NUM_TABLES = 6
MODULE = "sparse.ebc"


class Job:
    """Six tables, some of them on rank 0, and what is predicted for them."""

    def __init__(self, on_first: int = 5) -> None:
        model = Nested(bags(*(bag_config(i) for i in range(NUM_TABLES))))
        triples = [(i, 32, int(i >= on_first)) for i in range(NUM_TABLES)]
        planner = make_planner(
            constraints={
                f"t{i}": ParameterConstraints(sharding_types=["table_wise"])
                for i in range(NUM_TABLES)
            },
            cost_model=AnalyticCostModel(launch_ms=0.0, byte_ns=10.0),
            search=FixedSearcher(triples),
        )
        self.plan: ShardingPlan = planner.plan(model, bag_sharders())
        self.assessor = Assessor(planner, model, bag_sharders())
        self.planned = Phases.of(self.assessor.planned(self.plan), {MODULE})

    def measured(self, factor: float, fixed_ms: float = 0.0) -> Measured:
        """Kernels of so many times what is predicted, and of a part that is fixed."""
        ranks = [
            {p: fixed_ms + factor * rank[p] for p in COMPUTE}
            for rank in self.planned.by_rank_ms
        ]
        critical = {p: max(r[p] for r in ranks) for p in COMPUTE}
        return Measured(
            iteration_ms=sum(critical.values()),
            modules=frozenset({MODULE}),
            critical_ms={**self.planned.critical_ms, **critical},
            by_rank_ms=tuple(ranks),
        )

    def assess(self, measured: Measured, seconds: float = 60.0) -> MonitorReport:
        return self.assessor.assess(
            self.plan, measured, last_iteration=1, seconds=seconds
        )


def test_fixed_part_of_kernels_is_no_factor() -> None:
    job = Job()
    ms = job.planned.by_rank_ms[0]["fwd_compute"]
    report = job.assess(job.measured(2.0, fixed_ms=3 * ms))
    assert report.factors["fwd_compute"] == pytest.approx(2.0)
    assert report.factors["fwd_comms"] == pytest.approx(1.0)
    # The largest difference is that of the rank that holds most.
    largest = report.differences[0]
    assert (largest.phase, largest.rank) == ("bwd_compute", 0)
    assert largest.measured_ms > largest.predicted_ms


def test_factors_are_at_most_measured_over_predicted() -> None:
    job = Job()
    ms = job.planned.by_rank_ms[1]["bwd_compute"]
    slow = job.measured(2.0, fixed_ms=-ms)  # as of a rank that is slow and holds more
    factor = sum(r["bwd_compute"] for r in slow.by_rank_ms) / sum(
        r["bwd_compute"] for r in job.planned.by_rank_ms
    )
    assert job.assess(slow).factors["bwd_compute"] == pytest.approx(factor)
    alike = dataclasses.replace(slow, by_rank_ms=slow.by_rank_ms[:1] * 2)
    other = Job()  # what is timed alike where more is predicted is held, not worth 0
    assert other.assess(alike).factors["fwd_compute"] == pytest.approx(0.2)


def test_a_disturbed_report_does_not_count() -> None:
    job = Job()
    for factor in (2.0, 2.5, 40.0):
        report = job.assess(job.measured(factor))
    assert [report.factors[p] for p in COMPUTE] == pytest.approx([2.5, 2.5])


def test_drift_is_priced_and_named() -> None:
    job = Job()
    job.assessor.profiles.update(
        (f"f{i}", zipf_profile(batch_size=64, pooling_factor=p, num_embeddings=1000))
        for i, p in enumerate((1.0, 50.0, 1.0, 8.0))
    )
    late = job.assess(job.measured(1.0), seconds=-1.0)  # no time to price it
    assert late.predicted == late.planned == job.planned and not late.factors
    report = job.assess(job.measured(1.0))
    assert report.planned == job.planned
    before, now = (
        p.critical_ms["fwd_compute"] for p in (job.planned, report.predicted)
    )
    assert now > 2 * before
    assert [d.table for d in report.drifts[:2]] == [f"{MODULE}.t1", f"{MODULE}.t3"]
    assert report.drifts[0].now.pooling_factor == pytest.approx(50.0)
    assert "largest drift: table 'sparse.ebc.t1'" in str(report)


def test_moves_are_searched_with_costs_as_measured() -> None:
    job = Job()
    job.assess(job.measured(2.0))
    result = job.assessor.replan(
        job.plan, budget_bytes=None, executable_only=True, config=None
    )
    before = Phases.of(result.before, {MODULE})
    assert before.critical_ms["bwd_compute"] == pytest.approx(
        2.0 * job.planned.critical_ms["bwd_compute"]
    )
    assert result.moves and result.after.critical_path_ms < (
        result.before.critical_path_ms
    )


def test_ranks_are_put_together() -> None:
    def step(forward_ms: float) -> list[PhaseTimes]:
        spans = {p: [(0.0, forward_ms / 1e3)] for p in PHASES}
        return [PhaseTimes("ebc", {**spans, "index_comms": []})]

    ranks = [[step(1.0), step(3.0), step(2.0)], [step(4.0), step(4.0), step(4.0)]]
    found = Measured.put_together(ranks, 20.0, one_clock=True)
    assert found.by_rank_ms[0]["fwd_compute"] == pytest.approx(2.0)
    assert found.critical_ms["fwd_compute"] == pytest.approx(4.0)
    assert "index_comms" not in found.critical_ms  # hidden by a pipeline
    assert found.rest_ms == pytest.approx(20.0 - 4 * 4.0)
