"""What a monitor makes of measured times, with costs that can be worked out by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

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
from torchrec_neuroshard.monitor.assessment import (
    Assessor,
    Measured,
    MonitorReport,
    Offer,
)
from torchrec_neuroshard.monitor.move_times import MoveRates
from torchrec_neuroshard.profiles import zipf_profile
from torchrec_neuroshard.simulator import PHASES, PredictedCosts
from torchrec_neuroshard.testing import AnalyticCostModel

COMPUTE = ("fwd_compute", "bwd_compute")
RATES = MoveRates(fill_ms_per_byte=1e-6, send_ms_per_byte=2e-6)
NUM_TABLES = 6


class Job:
    """Six tables, five of them on rank 0, and what is predicted for them."""

    def __init__(self, on_first: int = 5, **settings: Any) -> None:
        self.model = Nested(bags(*(bag_config(i) for i in range(NUM_TABLES))))
        triples = [(i, 32, int(i >= on_first)) for i in range(NUM_TABLES)]
        planner = make_planner(
            constraints={
                f"t{i}": ParameterConstraints(sharding_types=["table_wise"])
                for i in range(NUM_TABLES)
            },
            cost_model=AnalyticCostModel(launch_ms=0.0, byte_ns=10.0),
            search=FixedSearcher(triples),
        )
        self.plan: ShardingPlan = planner.plan(self.model, bag_sharders())
        known: dict[str, Any] = {
            "min_gain": 0.0,
            "budget_bytes": 2**60,
            "horizon": 10_000,
            "rates": RATES,
        }
        self.assessor = Assessor(
            planner, self.model, bag_sharders(), **{**known, **settings}
        )

    @property
    def planned(self) -> PredictedCosts:
        return self.assessor.planned(self.plan)

    def measured(self, factor: float, fixed_ms: float = 0.0) -> Measured:
        """Kernels of so many times what is predicted, and of a part that is fixed."""
        ranks = [
            {p: fixed_ms + factor * getattr(r, p) for p in COMPUTE}
            for r in self.planned.ranks
        ]
        critical: dict[str, float] = {p: max(r[p] for r in ranks) for p in COMPUTE}
        for phase in set(PHASES) - set(COMPUTE):
            critical[phase] = max(getattr(r, phase) for r in self.planned.ranks)
        return Measured(
            iteration_ms=sum(critical.values()),
            modules=frozenset({"sparse.ebc"}),
            critical_ms=critical,
            by_rank_ms=tuple(ranks),
        )

    def assess(self, measured: Measured, seconds: float = 60.0) -> MonitorReport:
        return self.assessor.assess(
            self.plan, measured, last_iteration=1, seconds=seconds
        )

    def offered(self, measured: Measured) -> Offer:
        offer = self.assess(measured).offer
        assert offer is not None
        return offer


def test_fixed_part_of_kernels_is_not_saved_by_moves() -> None:
    plain, padded = Job(), Job()
    ms = plain.planned.ranks[0].fwd_compute
    saved = plain.offered(plain.measured(2.0))
    assert saved.saved_ms > 0
    report = padded.assess(padded.measured(2.0, fixed_ms=3 * ms))
    # What the report tells is measured over predicted; what it saves is not.
    assert report.factors["fwd_compute"] > 4.0
    assert report.offer is not None
    assert report.offer.saved_ms == pytest.approx(saved.saved_ms)


def test_kernels_that_start_below_nothing_are_not_believed() -> None:
    job, doubled = Job(), Job()
    ms = job.planned.ranks[1].bwd_compute
    doubled_ms = doubled.offered(doubled.measured(2.0)).saved_ms
    # As of a rank that is slow and holds more, too.
    slow = job.measured(2.0, fixed_ms=-ms)
    assert 0 < job.offered(slow).saved_ms < doubled_ms


def test_even_ranks_are_weighed_by_what_they_took() -> None:
    job = Job(on_first=3)
    report = job.assess(job.measured(2.0, fixed_ms=0.1))
    assert job.assessor.weights == report.factors
    assert report.factors["fwd_compute"] > 2.0 and report.offer is None


def test_uneven_ranks_say_more_than_even_ones_did() -> None:
    job = Job()
    measured = job.measured(2.0, fixed_ms=0.1)
    alike = dataclasses.replace(measured, by_rank_ms=measured.by_rank_ms[:1] * 2)
    for told in (measured, alike, alike):
        # What is timed alike where more is predicted is not worth nothing: it is held.
        job.assess(told, seconds=0.0)
    assert job.assessor.weights["fwd_compute"] == pytest.approx(0.2)
    job.assess(measured, seconds=0.0)
    job.assess(measured, seconds=0.0)
    assert job.assessor.weights["fwd_compute"] == pytest.approx(2.0)


def test_a_disturbed_report_does_not_count() -> None:
    job = Job()
    for factor in (2.0, 2.5, 40.0):
        report = job.assess(job.measured(factor), seconds=0.0)
    found: Mapping[str, float] = report.factors
    assert {p: found[p] for p in COMPUTE} == pytest.approx(dict.fromkeys(COMPUTE, 2.5))


def test_new_inputs_are_priced_without_listing_options_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That takes most of what a report may cost."""
    job = Job()
    planned = job.planned

    def refuse(*_: Any) -> Any:
        raise AssertionError("options of this plan are known")

    monkeypatch.setattr("torchrec_neuroshard.monitor.assessment.PlanOptions", refuse)
    job.assessor.profiles.update(
        (f"f{i}", zipf_profile(batch_size=64, pooling_factor=50.0, num_embeddings=1000))
        for i in range(NUM_TABLES)
    )
    report = job.assess(job.measured(1.0), seconds=60.0)
    assert report.planned is planned
    assert report.predicted.critical_path_ms > 2 * planned.critical_path_ms


class Counted:
    """How often a job's assessor searches."""

    def __init__(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds: list[float] = []
        look = job.assessor.look

        def counted(*args: Any, seconds: float, **kwargs: Any) -> Offer | None:
            self.seconds.append(seconds)
            return look(*args, seconds=seconds, **kwargs)

        monkeypatch.setattr(job.assessor, "look", counted)


def test_search_waits_for_time_and_for_more_to_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job()
    searches = Counted(job, monkeypatch)
    measured = job.measured(1.0)
    assert job.assess(measured, seconds=0.0).offer is None and not searches.seconds
    offer = job.offered(measured)
    assert "(found in " in str(offer) and offer.search_ms > 0
    # However much time there is, training is not held up for long.
    assert searches.seconds == [1.0]
    assert job.assess(measured).offer is offer and len(searches.seconds) == 1
    assert job.assess(job.measured(3.0)).offer is offer and len(searches.seconds) == 1
    job.assessor.follow(offer, 0.1)  # as if moved: the plan is looked at anew
    job.assess(measured)
    assert len(searches.seconds) == 2


def test_search_in_vain_is_repeated_with_far_more_time_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(horizon=1e-9)
    searches = Counted(job, monkeypatch)
    for seconds, count in ((0.3, 1), (0.35, 1), (60.0, 2), (60.0, 2)):
        assert job.assess(job.measured(1.0), seconds=seconds).offer is None
        assert len(searches.seconds) == count


def test_even_plan_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(on_first=3)
    searches = Counted(job, monkeypatch)
    assert job.assess(job.measured(1.0)).offer is None and not searches.seconds


def test_what_pays_too_late_is_not_offered() -> None:
    late = MoveRates(fill_ms_per_byte=0.0, send_ms_per_byte=1.0)
    for horizon, is_told in ((10.0, False), (1e12, True)):
        job = Job(rates=late, horizon=horizon)
        assert (job.assess(job.measured(1.0)).offer is not None) == is_told
        found = job.assessor.look(job.plan, 0.0, seconds=1.0)
        assert found is not None and found.break_even > 10  # when asked


def test_moves_take_what_builds_and_sends_take() -> None:
    job = Job()
    result = job.offered(job.measured(1.0)).result
    slow = MoveRates(fill_ms_per_byte=1e-6, send_ms_per_byte=5e-6)
    more_ms = slow.predict_ms(result) - RATES.predict_ms(result)
    assert more_ms == pytest.approx(3e-6 * result.moved_bytes)
    slow = MoveRates(fill_ms_per_byte=4e-6, send_ms_per_byte=2e-6)
    more_ms = slow.predict_ms(result) - RATES.predict_ms(result)
    # The fuller rank builds all it holds, moved or not: 3 of 6 tables of 1000 x 32.
    assert more_ms == pytest.approx(3e-6 * 3 * 1000 * 32 * 4)
    assert RATES.predict_ms(result) > RATES.send_ms_per_byte * result.moved_bytes


def test_moves_teach_what_the_next_ones_take() -> None:
    job = Job()
    offer = job.offered(job.measured(1.0))
    job.assessor.follow(offer, seconds=0.5)
    again = job.offered(job.measured(1.0))
    assert again.result.moves == offer.result.moves
    assert again.move_ms == pytest.approx(500.0)
    job.assessor.follow(again, seconds=1.0)
    assert job.offered(job.measured(1.0)).move_ms == pytest.approx(1000.0)
