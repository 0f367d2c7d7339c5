"""What a monitor makes of measured times, with costs that can be worked out by hand."""

from __future__ import annotations

import pytest
from torchrec.distributed.types import ShardingPlan

from tests.builders import (
    FixedSearcher,
    Nested,
    bag_config,
    bag_sharders,
    bags,
    each,
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
MODULE = "sparse.ebc"


class Job:
    """Six tables, five of them on rank 0, and what is predicted for them."""

    def __init__(self) -> None:
        model = Nested(bags(*map(bag_config, range(6))))
        triples = [(i, 32, int(i == 5)) for i in range(6)]
        planner = make_planner(
            constraints=each(6, "table_wise"),
            cost_model=AnalyticCostModel(launch_ms=0.0, byte_ns=10.0),
            search=FixedSearcher(triples),
        )
        self.plan: ShardingPlan = planner.plan(model, bag_sharders())
        self.assessor = Assessor(planner, model, bag_sharders())
        self.planned = Phases.of(self.assessor.planned(self.plan), {MODULE})

    def measured(self, factor: float) -> Measured:
        """Kernels of so many times what is predicted."""
        ranks = [{p: factor * r[p] for p in COMPUTE} for r in self.planned.by_rank_ms]
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


def test_drift_is_priced_and_named() -> None:
    job = Job()
    job.assessor.profiles.update(
        (f"f{i}", zipf_profile(batch_size=64, pooling_factor=p, num_embeddings=1000))
        for i, p in enumerate((1.0, 50.0, 1.0, 8.0))
    )
    late = job.assess(job.measured(1.0), seconds=-1.0)  # no time to price it
    assert late.predicted == late.planned == job.planned
    largest = job.assess(job.measured(2.0), seconds=-1.0).differences[0]
    assert (largest.phase, largest.rank) == ("bwd_compute", 0)
    assert largest.measured_ms > largest.predicted_ms
    report = job.assess(job.measured(1.0))
    assert report.planned == job.planned
    before, now = (
        p.critical_ms["fwd_compute"] for p in (job.planned, report.predicted)
    )
    assert now > 2 * before
    assert [d.table for d in report.drifts[:2]] == [f"{MODULE}.t1", f"{MODULE}.t3"]
    assert report.drifts[0].now.pooling_factor == pytest.approx(50.0)
    assert "largest drift: table 'sparse.ebc.t1'" in str(report)
    # Moves are searched for the inputs of now.
    result = job.assessor.replan(
        job.plan, budget_bytes=None, executable_only=True, config=None
    )
    assert Phases.of(result.before, {MODULE}) == report.predicted
    assert result.moves
    assert result.after.critical_path_ms < result.before.critical_path_ms


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
