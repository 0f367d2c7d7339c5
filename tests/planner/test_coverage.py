"""Reports say which tables' kernels were measured, and what is estimated."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import Topology
from torchrec.modules.embedding_configs import DataType

from tests.builders import (
    bag_sharders,
    by_table,
    each,
    last_result,
    make_ebc,
    make_planner,
    sequences,
    shards_of,
)
from torchrec_neuroshard import NeuroShardPlanner, topology_for
from torchrec_neuroshard.bundles.find import load_cost_model
from torchrec_neuroshard.models.estimate_error import EstimateError
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.report import html_report
from torchrec_neuroshard.search import SearchConfig, SearchResult

SIX = [(10_000 * n, 64) for n in range(1, 7)]
OUTSIDE = "outside what the cost model measured"
FAR = "predictions there are extrapolated"


def planned(
    card: str,
    sizes: list[tuple[int, int]],
    batch_size: int = 1024,
    types: dict[int, DataType] | None = None,
    **constraints: Any,
) -> tuple[str, tuple[Note, ...]]:
    """Plan for four ranks by measured kernels; return their source and the notes."""
    costs: dict[str, Any] = {"cost_model": "cpu"}
    if card != "cpu":
        costs = {"topology": topology_for(card, ranks_per_node=4), "cost_model": "auto"}
    limits: dict[str, Any] = {"pooling_factors": [[10.0]] * len(sizes)} | constraints
    planner = make_planner(
        4,
        batch_size=batch_size,
        constraints=by_table(**limits),
        search=SearchConfig(effort=0.0),
        **costs,
    )
    planner.plan(make_ebc(sizes, data_types=types), bag_sharders())
    result = last_result(planner)
    notes = tuple(note for note in result.notes if note.code == "out-of-range")
    return measured_source(result), notes


def measured_source(result: SearchResult) -> str:
    """The source of kernel times, whose error the measured model knows."""
    errors = result.predicted.compute_errors
    assert errors is not None and 0.03 < errors[0] == errors[1] < 0.055
    return result.predicted.compute_source


@pytest.mark.parametrize("card", ["cpu", "h200"])
def test_tables_and_batches_like_the_measured_ones(card: str) -> None:
    types = {0: DataType.FP16}
    assert planned(card, SIX, types=types) == ("measured", ())


@pytest.mark.parametrize(
    ("card", "batch_size", "told"),
    [
        ("h200", 65_536, "batch 262,144, measured up to 65,536"),
        ("h200", 256, "batch 1,024, measured from 2,048"),
        ("cpu", 8_192, "batch 32,768, measured up to 16,384"),
    ],
)
def test_batches_outside_the_range(card: str, batch_size: int, told: str) -> None:
    found = planned(
        card, SIX, batch_size, sharding_types=[["table_wise", "row_wise"]] * 6
    )
    text = f"6 of 6 tables are {OUTSIDE}: {told}; {FAR}"
    note = Note("out-of-range", text)
    assert found == ("measured for 0 of 6 tables, 6 extrapolated (batch)", (note,))


def test_kernels_that_were_not_measured() -> None:
    kinds = [["data_parallel"]] * 2 + [["table_wise"]] * 4
    kernels = [["dense"]] * 2 + [["fused"]] * 3 + [["fused_uvm"]]
    found = planned("h200", SIX, sharding_types=kinds, compute_kernels=kernels)
    assert found == (
        "measured for 3 of 6 tables, 3 estimated (kernel dense, kernel fused_uvm)",
        (),
    )


def test_optimizers_that_were_not_measured() -> None:
    """The bundle of CPUs holds Adagrad only row by row."""
    constraints = each(2, "table_wise", pooling_factors=[10.0])
    planner = make_planner(cost_model="cpu", batch_size=512, constraints=constraints)
    ebc, optimizer = make_ebc(SIX[:2]), {"optimizer": EmbOptimType.EXACT_ADAGRAD}
    planner.plan(ebc, [EmbeddingBagCollectionSharder(fused_params=optimizer)])
    found = last_result(planner)
    told = f"2 of 2 tables are {OUTSIDE}: optimizer adagrad; {FAR}"
    assert Note("out-of-range", told) in found.notes
    source = "measured for 0 of 2 tables, 2 extrapolated (optimizer adagrad)"
    assert measured_source(found) == source


def test_sequences_are_not_measured() -> None:
    planner = make_planner(2, batch_size=512, cost_model="cpu", constraints={})
    planner.plan(sequences(64, 64, rows=100_000), [EmbeddingCollectionSharder()])
    result = last_result(planner)
    source = "measured for 0 of 2 tables, 2 estimated (sequences)"
    assert measured_source(result) == source


def test_only_tables_that_take_time_cause_a_warning() -> None:
    """Tables of 3 rows are smaller than all measured ones, and one is hardly read."""
    pooling = [[10.0]] * 6 + [[1.0]] * 2 + [[0.001]]
    sizes = [*SIX, (3, 64), (3, 64), (200_000_000, 4)]
    source = "measured for 6 of 9 tables, 3 extrapolated (rows)"
    limits: dict[str, Any] = {"sharding_types": [["table_wise"]] * 9}
    found = planned("h200", sizes, pooling_factors=pooling, **limits)
    assert found == (source, ())
    pooling[8] = [10.0]
    told = "rows 200,000,000, measured up to 100,000,000"
    note = Note("out-of-range", f"1 of 9 tables is {OUTSIDE}: {told}; {FAR}", "t8")
    found = planned("h200", sizes, pooling_factors=pooling, **limits)
    assert found == (source, (note,))
    sizes[7] = (150_000_000, 64)
    told = "rows up to 200,000,000, measured up to 100,000,000"
    note = Note("out-of-range", f"2 of 9 tables are {OUTSIDE}: {told}; {FAR}")
    found = planned("h200", sizes, pooling_factors=pooling, **limits)
    assert found == (source, (note,))


# --- plans with estimated costs, and the notes on them ---


def estimated(topology: Topology | None = None, **arguments: Any) -> NeuroShardPlanner:
    """Return a planner for cards without measurements."""
    topology = topology or topology_for("h100", num_nodes=2, ranks_per_node=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the result holds them, too
        model = load_cost_model("h100", device_type="cuda")
        model.error = EstimateError(card="h100")
        return make_planner(
            topology=topology,
            batch_size=256,
            cost_model=model,
            comms_model=None,
            **arguments,
        )


@pytest.mark.one_release
@pytest.mark.parametrize("least", [None, 8])
def test_estimates_split_no_table_below_32_columns_unless_told(
    least: int | None,
) -> None:
    """Narrower splits save time only by the estimate, since none was measured."""
    planner = estimated(
        topology_for("h100", num_nodes=4, ranks_per_node=4),
        constraints=each(3, "column_wise", min_partition=least, pooling_factors=[80.0]),
    )
    plan = planner.plan(
        make_ebc([(1_000, 128), (1_000, 96), (500, 16)]), bag_sharders()
    )
    narrowest = min(width for _, width, _ in shards_of(plan)["t0"])
    assert narrowest == 32 if least is None else 8 <= narrowest < 32
    cautioned = [n for n in last_result(planner).notes if n.code == "unusual"]
    assert len(cautioned) == (narrowest < 32)


@pytest.mark.one_release
def test_the_plan_shows_the_error_of_an_estimate() -> None:
    planner = estimated()
    planner.plan(make_ebc([(200_000, 64), (50_000, 32), (500, 64)]), bag_sharders())
    report = planner.report()
    assert 0.1 < report.uncertainty == last_result(planner).predicted.uncertainty < 0.2
    stated = f"standard deviation of {report.uncertainty:.1%}"
    for text in (report.text(verbose=True), html_report(report)):
        assert stated in text and "nets" not in text


@pytest.mark.one_release
def test_the_plan_shows_the_expected_iteration() -> None:
    planner = estimated(
        topology_for("h100", num_nodes=1, ranks_per_node=4),
        constraints=each(4, "table_wise"),
    )
    tables = [(50_000, 64), (60_000, 60), (70_000, 56), (80_000, 52)]
    planner.plan(make_ebc(tables), bag_sharders())
    report, predicted = planner.report(), last_result(planner).predicted
    assert report.iteration_ms == pytest.approx(predicted.expected_ms)
    assert report.critical_path_ms == predicted.critical_path_ms
    assert 1.005 < report.iteration_ms / report.critical_path_ms < 1.1
    assert report.error is not None
    whole = f"iteration {predicted.expected_ms:.3f} ms +-{report.error:.0%}: "
    assert str(report).startswith(whole)
