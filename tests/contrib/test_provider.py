"""This package's planner behind TorchRec's planning API (since 1.9)."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints

from tests.builders import (
    QUICK,
    analytic,
    bags,
    cost_of,
    entries_of,
    make_planner,
)
from torchrec_neuroshard import JsonLinesReporter, NeuroShardPlannerProvider
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.planner import NeuroShardPlanner
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel

SEAM = importlib.util.find_spec("torchrec.distributed.planner.provider") is not None
needs_seam = pytest.mark.skipif(not SEAM, reason="TorchRec's planning API is of 1.9")
QUICKLY: dict[str, Any] = {"search": QUICK}
ANALYTIC: dict[str, Any] = {**analytic(), **QUICKLY}


def dry_run(
    provider: Any, skus: list[str], reporter: Any = None, **fields: Any
) -> tuple[Any, Any]:
    """Return results by SKU, and TorchRec's context."""
    from torchrec.distributed.planner.dry_run import DryRunOrchestrator, DryRunRequest
    from torchrec.distributed.planner.executor import DefaultPlannerExecutor
    from torchrec.distributed.planner.types import PlannerSessionContext

    request = DryRunRequest(
        **{
            "model": bags(),
            "sharders": [EmbeddingBagCollectionSharder()],
            "sku_list": skus,
            "training_framework": "apf",
            "world_size": 4,
            "local_world_size": 2,
            "batch_size": 64,
            **fields,
        }
    )
    ctx = PlannerSessionContext(request=request, results={})
    orchestrator = DryRunOrchestrator(DefaultPlannerExecutor(provider), reporter)
    return orchestrator.plan(request, ctx), ctx


@pytest.mark.skipif(SEAM, reason="this TorchRec has the planning API")
def test_releases_without_the_api_say_so() -> None:
    with pytest.raises(
        ConfigError, match=r"1\..* has no PlannerProvider \(since 1.9\)"
    ):
        NeuroShardPlannerProvider()


@needs_seam
def test_unified_planner_returns_our_plan_with_its_costs() -> None:
    provider = NeuroShardPlannerProvider(**ANALYTIC)
    results, ctx = dry_run(provider, ["a", "b"], capture_search_space=True)
    own = make_planner(topology=ctx.topology_cache["a", 4, 2])
    plan = own.plan(bags(), [EmbeddingBagCollectionSharder()])
    for sku in ("a", "b"):
        result = results[sku]
        assert result.success, result.planner_failure_reason
        assert str(entries_of(result.sharding_plan)) == str(entries_of(plan))
        assert len(result.sharding_options) == 3
        assert result.estimated_max_hbm_bytes > 0
        # TorchRec's critical path knows no order of collectives.
        assert result.critical_path_ms == pytest.approx(cost_of(own), rel=0.2)
        assert len(ctx.search_space[sku]) >= 3


@needs_seam
@pytest.mark.parametrize("stock", [False, True])
def test_reporters_write_the_predictions_of_each_sku(
    stock: bool, tmp_path: Path
) -> None:
    from torchrec.distributed.planner.provider import DefaultPlannerProvider
    from torchrec.distributed.planner.reporter import PlanReporter

    path = tmp_path / "plans.jsonl"
    reporter = JsonLinesReporter(path)
    assert isinstance(reporter, PlanReporter)
    provider = Kept(**ANALYTIC)
    results, _ = dry_run(
        DefaultPlannerProvider() if stock else provider, ["a", "b"], reporter
    )
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["plan"] for line in lines] == ["a", "b"]
    for line in lines:
        assert max(line["used_bytes"]) == results[line["plan"]].estimated_max_hbm_bytes
        assert len(line["memory_bytes"]) == 4
        by_rank = [sum(ms) for ms in zip(*line["phases_ms"].values(), strict=True)]
        assert max(by_rank) == pytest.approx(results[line["plan"]].max_rank_perf)
    for line, planner in zip(lines, provider.built, strict=not stock):
        predicted = [rank.costs.fwd_compute for rank in planner.report().ranks]
        assert line["phases_ms"]["fwd_compute"] == pytest.approx(predicted)


class Kept(NeuroShardPlannerProvider):
    """A provider that keeps its planners."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.built: list[NeuroShardPlanner] = []

    def build_planner(self, *args: Any, **kwargs: Any) -> NeuroShardPlanner:
        self.built.append(super().build_planner(*args, **kwargs))
        return self.built[-1]


@needs_seam
@pytest.mark.filterwarnings("ignore:no cost model was measured")
@pytest.mark.filterwarnings("ignore:the topology does not set")
def test_dry_run_command_plans_cards_by_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from torchrec.distributed.planner.dry_run import DryRunOrchestrator, cli
    from torchrec.distributed.planner.executor import DefaultPlannerExecutor

    provider = Kept(**QUICKLY)
    orchestrator = DryRunOrchestrator(DefaultPlannerExecutor(provider))
    arguments = ["--sku-list=h100,h200", "--world-size=2", "--num-tables=3"]
    assert cli.main(arguments, orchestrator) == 0
    shown = capsys.readouterr().out
    assert "[OK] h100" in shown and "[OK] h200" in shown
    cards = [planner.costs.devices.card for planner in provider.built]
    assert [card.name for card in cards if card] == ["h100", "h200"]


@needs_seam
def test_settings_of_a_request_reach_the_planner() -> None:
    from torchrec.distributed.planner.proposers import UniformProposer
    from torchrec.distributed.planner.types import PlannerConfig

    provider = Kept(
        {"GRANDTETON": AnalyticCostModel()}, comms_model=AnalyticCommsModel(), **QUICKLY
    )
    results, ctx = dry_run(
        provider,
        ["GRANDTETON"],
        hbm_gb=3.0,
        constraints={"t1": ParameterConstraints(sharding_types=["row_wise"])},
        planner_config=PlannerConfig(
            proposer_type="uniform", pipeline_type="train_sparse_dist"
        ),
    )
    # TorchRec counts gibibytes.
    assert "memory of a rank 3.221 GB (given)" in ctx.hw_source["GRANDTETON"]
    plan = entries_of(results["GRANDTETON"].sharding_plan)
    assert plan["t1"].sharding_type == "row_wise"
    [planner] = provider.built
    assert [type(p) for p in vars(planner)["_proposers"]] == [UniformProposer]
    assert planner.costs.schedule.name == "train_sparse_dist"


@needs_seam
@pytest.mark.filterwarnings("ignore:no cost model was measured")
def test_memory_of_a_request_may_equal_torchrecs_default() -> None:
    """An H100 has 80 GB, but the request asks for 32 GiB and sets no bandwidth."""
    from torchrec.distributed.planner.dry_run.types import SkuOverride

    provider = Kept(comms_model=AnalyticCommsModel(), **QUICKLY)
    overrides: Any = {"per_sku_overrides": {"h100": SkuOverride(hbm_gb=32.0)}}
    for fields in ({"hbm_gb": 32.0}, overrides):
        with pytest.warns(UserWarning, match="topology does not set hbm_mem_bw, hbm_t"):
            _, ctx = dry_run(provider, ["h100"], **fields)
        assert "memory of a rank 34.36 GB (given)" in ctx.hw_source["h100"]


@needs_seam
def test_a_failure_concerns_only_its_sku() -> None:
    from torchrec.distributed.planner.types import PlannerConfig, PlannerVariant

    provider = NeuroShardPlannerProvider(**ANALYTIC)
    other = PlannerConfig(planner_variant=PlannerVariant.LINEAR_PROGRAMMING)
    results, _ = dry_run(provider, ["a"], planner_config=other)
    assert not results["a"].success
    assert "asks for another planner" in results["a"].planner_failure_reason
    provider = NeuroShardPlannerProvider(**ANALYTIC, strict_memory=True)
    results, _ = dry_run(provider, ["a"], hbm_gb=0.0001)
    assert not results["a"].success
    assert "Lower batch_size (64)" in results["a"].planner_failure_reason
    assert results["a"].planner_error_type is not None
