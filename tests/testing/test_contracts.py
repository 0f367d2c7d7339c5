"""Shipped models and searches pass the contracts; deliberately broken ones fail."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from papers.annealing import AnnealingConfig, AnnealingSearcher
from papers.heuristics import (
    GreedySearcher,
)
from papers.milp import MilpConfig, MilpSearcher
from tests.builders import result_of
from tests.search.exhaustive import ExhaustiveSearcher
from torchrec_neuroshard.bundles.descriptions import COMMS_BUNDLE, COMPUTE_DESCRIPTION
from torchrec_neuroshard.bundles.find import load_cost_model
from torchrec_neuroshard.bundles.folders import PRETRAINED, pretrained_names
from torchrec_neuroshard.bundles.format import Bundle
from torchrec_neuroshard.costs.simulator import Simulator
from torchrec_neuroshard.costs.task import ColumnShard, Placement, ShardingTask
from torchrec_neuroshard.errors import InfeasibleError
from torchrec_neuroshard.hardware.cards import GPU_CARDS
from torchrec_neuroshard.models.adjusted import AdjustedCostModel, RelievedCommsModel
from torchrec_neuroshard.models.base import (
    CommsModel,
    CostModel,
    RangeWarning,
)
from torchrec_neuroshard.models.card_physics import PhysicalConstants
from torchrec_neuroshard.models.collectives import (
    BandwidthCommsModel,
)
from torchrec_neuroshard.models.compute import PhysicalCostModel
from torchrec_neuroshard.models.published_links import published_comms_model
from torchrec_neuroshard.papers.autoshard import AutoShardSearcher
from torchrec_neuroshard.papers.dreamshard import DreamShardSearcher
from torchrec_neuroshard.papers.neuroshard import NeuroShardConfig, PaperSearcher
from torchrec_neuroshard.search import (
    SEARCHES,
    NeuroShardSearcher,
    SearchConfig,
    Searcher,
    SearchResult,
)
from torchrec_neuroshard.tables.features import FEATURE_NAMES
from torchrec_neuroshard.testing import (
    AnalyticCommsModel,
    AnalyticCostModel,
    CommsModelContract,
    CostModelContract,
    SearcherContract,
)

Features = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]

# Shipped models and searches: name -> how it is made, and settings of the contract.

COST_MODELS: dict[str, Callable[[], CostModel]] = {
    "analytic": AnalyticCostModel,
    "scaled": lambda: AdjustedCostModel(AnalyticCostModel(), np.diag((0.5, 3.0))),
    "physical": lambda: PhysicalCostModel(
        PhysicalConstants(memory_gb_per_s=2000.0), name="physical", hardware="a GPU"
    ),
}

COMMS_MODELS: dict[str, Callable[..., CommsModel]] = {
    "analytic": lambda **ranks: AnalyticCommsModel(),
    "relieved": lambda **ranks: RelievedCommsModel(
        AnalyticCommsModel(), {"index_comms": 0.01, "bwd_comms": 0.02}
    ),
    "bandwidth": lambda **ranks: BandwidthCommsModel(
        **ranks, intra_gb_per_s=300.0, inter_gb_per_s=25.0
    ),
    "published": lambda **ranks: published_comms_model(GPU_CARDS["h100"], **ranks),
}


def bundle_comms(folder: Path, **ranks: int) -> CommsModel:
    info = COMMS_BUNDLE.read_info(folder)
    compute = COMPUTE_DESCRIPTION.find_info(folder)
    # If only one node was measured, the bandwidth between nodes must be given.
    inter = info.inter_gb_per_s or 1.0
    return Bundle(folder).comms_model(compute=compute, inter_gb_per_s=inter, **ranks)


def default(seed: int, **settings: Any) -> Searcher:
    return NeuroShardSearcher(
        SearchConfig(seed=seed, effort=0.1, time_budget_seconds=600.0, **settings)
    )


def annealing(seed: int, **settings: Any) -> Searcher:
    return AnnealingSearcher(AnnealingConfig(seed=seed, **settings))


WHOLE = {"splits_tables": False}
NIGHTLY = {"pytestmark": [pytest.mark.nightly]}
"""Settings of slow searches that a quicker one of the same kind covers."""
SEARCHERS: dict[str, tuple[Callable[[int], Searcher], dict[str, Any]]] = {
    "default": (default, {}),
    "exhaustive": (lambda seed: ExhaustiveSearcher(), {"num_tables": 4}),
    "greedy-size": (lambda seed: GreedySearcher("size"), WHOLE),
    # It stops at a gap, not at a time, so every run ends the same way.
    "milp": (lambda seed: MilpSearcher(MilpConfig(relative_gap=0.2)), {}),
    "annealing": (functools.partial(annealing, chains=4, steps=100), {}),
    # The high cap lets it find a plan for every task.
    "paper": (
        lambda seed: PaperSearcher(NeuroShardConfig(caps=(1.0, 1.5, 1e9))),
        NIGHTLY,
    ),
    "autoshard": (lambda seed: AutoShardSearcher(), WHOLE),
    "dreamshard": (lambda seed: DreamShardSearcher(), WHOLE),
}


def derive(contract: type[Any], name: str, make: Any, **attributes: Any) -> type[Any]:
    """Return a test class that derives from a contract."""
    (maker,) = contract.__abstractmethods__
    method = {maker: lambda self, *arguments: make(*arguments)}
    return type(f"Test{contract.__name__}_{name}", (contract,), method | attributes)


def hold(contract: type, name: str, make: Any, **attributes: Any) -> None:
    kind = derive(contract, name, make, **attributes)
    globals()[kind.__name__] = kind


def of_ranks(make: Callable[..., CommsModel]) -> Callable[[int, int], CommsModel]:
    return lambda world, local: make(world_size=world, local_world_size=local)


for name, made in COST_MODELS.items():
    hold(CostModelContract, name, made)
for name in pretrained_names():
    # Nets encode in single precision.
    settings = {"tolerance": 1e-4, "has_ranges": True}
    device_type = COMPUTE_DESCRIPTION.read_info(
        PRETRAINED / name
    ).fingerprint.device_type
    bundle = functools.partial(load_cost_model, name, device_type=device_type)
    hold(CostModelContract, name, bundle, **settings)
for name, comms in COMMS_MODELS.items():
    hold(CommsModelContract, name, of_ranks(comms))
for folder in filter(COMMS_BUNDLE.is_in, sorted(PRETRAINED.iterdir())):
    shipped = functools.partial(bundle_comms, folder)
    hold(CommsModelContract, folder.name, of_ranks(shipped))
for name, (search, attributes) in SEARCHERS.items():
    hold(SearcherContract, name, search, **attributes)


def test_every_registered_search_is_held_to_the_contract() -> None:
    held = {type(make(0)).__name__ for make, _ in SEARCHERS.values()}
    assert {class_name for _, class_name in SEARCHES.values()} <= held


# Deliberately broken: contract case -> an implementation that it must catch.


def contract_cases(contract: type) -> set[str]:
    return {n for n, _ in inspect.getmembers(contract) if n.startswith("test_")}


RNG = np.random.default_rng(0)


def bent(base: type, method: str, bend: Callable[..., Any]) -> type[Any]:
    """Return a model whose method passes its result through `bend`."""

    def call(self: Any, first: Any, *rest: Any, **named: Any) -> Any:
        return bend(getattr(base, method)(self, first, *rest, **named), first)

    return type("Broken", (base,), {method: call})


broken_cost = functools.partial(bent, AnalyticCostModel)
broken_sums = functools.partial(broken_cost, "predict_sums")
broken_comms = functools.partial(bent, AnalyticCommsModel, "all_to_all")


def nameless(base: type, source: str) -> type[Any]:
    return type("Nameless", (base,), {"source": source})


def any_columns(self: CostModel, features_NF: Features) -> Floats:
    return np.ones((len(features_NF), self.encoding_dim))


def warns_of_another_shard(_: Any, features_NF: Features) -> list[RangeWarning]:
    rows = features_NF[:, FEATURE_NAMES.index("log2_rows")]
    return [
        RangeWarning(0, "log2_rows", float(value), 0.0, 20.0)
        for value in rows[rows > 20.0]
    ]


def written_to(costs: Floats, arguments: Floats) -> Floats:
    arguments += 1.0
    return costs


BROKEN_COST_MODELS: dict[str, tuple[type[CostModel], str]] = {
    "test_more_columns_do_not_take_less_time_to_reorder": (
        broken_cost("column_order", lambda ms_N2, bytes_N: ms_N2 - bytes_N[:, None]),
        r"column_order of \[1",
    ),
    "test_encodings_have_the_stated_shape": (
        broken_cost("encode", lambda sums, features: sums[:, :2]),
        "encode: shape",
    ),
    "test_times_are_finite_and_not_negative": (
        broken_sums(lambda costs, sums: costs - 0.05),
        "negative or infinite: .*-0.0",
    ),
    "test_empty_set_is_free": (
        broken_sums(lambda costs, sums: costs + 0.01),
        r"the empty set takes \[0\.01",
    ),
    "test_order_of_shards_does_not_matter": (
        broken_cost("predict_sets", lambda costs, f_NF: costs + f_NF[0].max()),
        "another order",
    ),
    "test_sets_are_sums_of_encodings": (
        broken_cost("predict_sets", lambda costs, features: 1.1 * costs),
        "against predict_sets",
    ),
    # Times are relative to the largest set of the call.
    "test_other_sets_of_a_call_do_not_matter": (
        broken_sums(lambda costs, sums: costs / max(costs.max(initial=0.0), 1e-9)),
        "beside other sets",
    ),
    "test_wrong_number_of_features_is_refused": (
        type("AnyColumns", (AnalyticCostModel,), {"encode": any_columns}),
        "no FeatureSchemaError was raised",
    ),
    "test_predictions_repeat": (
        broken_sums(lambda costs, sums: costs * RNG.uniform(1.0, 1.1)),
        "the same sets gives other times",
    ),
    "test_arguments_are_left_alone": (broken_sums(written_to), "changed the sums"),
    "test_uncertainty_is_a_share": (
        broken_cost("relative_uncertainty", lambda _, sums: np.full(len(sums), -0.1)),
        "uncertainties of",
    ),
    "test_range_warnings_name_shard_and_feature": (
        broken_cost("range_warnings", warns_of_another_shard),
        r"a warning says that \(0, 'log2_rows'\)",
    ),
    # It fails without rows.
    "test_no_shards_at_all": (
        broken_cost("encode", lambda sums, f_NF: sums * float(f_NF.max() > 0)),
        "zero-size array",
    ),
    "test_says_what_it_rests_on": (nameless(AnalyticCostModel, ""), "source is ''"),
}


@pytest.mark.parametrize("case", sorted(contract_cases(CostModelContract)))
def test_cost_model_contract_catches(case: str) -> None:
    broken, message = BROKEN_COST_MODELS[case]
    contract = derive(CostModelContract, "broken", broken)
    with pytest.raises((AssertionError, ValueError), match=message):
        getattr(contract(), case)()


def test_silence_about_ranges_is_caught() -> None:
    silent = derive(CostModelContract, "silent", AnalyticCostModel, has_ranges=True)
    with pytest.raises(AssertionError, match="there is no warning"):
        silent().test_range_warnings_name_shard_and_feature()


def not_a_number(ms_CW2: Floats, columns_CW: Floats) -> Floats:
    with np.errstate(invalid="ignore"):
        return ms_CW2 * (columns_CW / columns_CW)[..., None]


def relieved_by_another(ms_CW2: Floats, columns_CW: Floats) -> Floats:
    """Return times that fall if the busiest rank sends more."""
    peak_C = (columns_CW.max(axis=1) + 1.0) / (columns_CW.mean(axis=1) + 1.0)
    bent: Floats = ms_CW2 / peak_C[:, None, None] ** 3
    return bent


def first_rank_is_slower(ms_CW2: Floats, columns_CW: Floats) -> Floats:
    slower = np.where(np.arange(columns_CW.shape[1]) == 0, 2.0, 1.0)
    return ms_CW2 * slower[:, None]


BROKEN_COMMS_MODELS: dict[str, tuple[type[CommsModel], str]] = {
    "test_shapes": (broken_comms(lambda ms, columns: ms[..., :1]), "all_to_all.*shape"),
    "test_times_are_finite_and_not_negative": (broken_comms(not_a_number), "nan"),
    "test_nothing_to_send_takes_next_to_no_time": (
        broken_comms(lambda ms, columns: ms + 60.0),
        "no data takes",
    ),
    "test_more_bytes_do_not_take_less_time": (
        broken_comms(relieved_by_another),
        "more bytes on one rank",
    ),
    "test_ranks_are_interchangeable": (
        broken_comms(first_rank_is_slower),
        "in another order",
    ),
    "test_other_candidates_of_a_call_do_not_matter": (
        broken_comms(lambda ms, columns: ms * len(columns)),
        "one by one",
    ),
    "test_predictions_repeat": (
        broken_comms(lambda ms, columns: ms * RNG.uniform(1.0, 1.1)),
        "the same bytes gives another time",
    ),
    "test_arguments_are_left_alone": (
        broken_comms(written_to),
        "changed its argument",
    ),
    "test_says_what_it_rests_on": (nameless(AnalyticCommsModel, " "), "source is ' '"),
}


@pytest.mark.parametrize("case", sorted(contract_cases(CommsModelContract)))
def test_comms_model_contract_catches(case: str) -> None:
    broken, message = BROKEN_COMMS_MODELS[case]
    contract = derive(CommsModelContract, "broken", lambda *_: broken())
    with pytest.raises(AssertionError, match=message):
        getattr(contract(), case)()


Spoil = Callable[[SearchResult, Simulator], SearchResult]


class BrokenSearcher(GreedySearcher):
    """A greedy search that ignores memory and spoils its result."""

    def __init__(self, spoil: Spoil, name: str) -> None:
        super().__init__("lookup")
        self.spoil, self.name = spoil, name

    def search(self, task: ShardingTask, simulator: Simulator) -> SearchResult:
        free = dataclasses.replace(task, memory_bytes=())
        result = super().search(free, simulator.for_task(free))
        return self.spoil(result, simulator)


def other_shards(
    result: SearchResult, shards: Sequence[ColumnShard], ranks: int
) -> SearchResult:
    return dataclasses.replace(result, placement=Placement(ranks, tuple(shards)))


def loses_columns(result: SearchResult, simulator: Simulator) -> SearchResult:
    *rest, widest = sorted(result.placement.shards, key=lambda s: s.width)
    less = dataclasses.replace(widest, width=widest.width - 4)
    return other_shards(result, [*rest, less], simulator.task.world_size)


def forgets_empty_ranks(result: SearchResult, simulator: Simulator) -> SearchResult:
    shards = result.placement.shards
    return other_shards(result, shards, 1 + max(s.rank for s in shards))


def placed(simulator: Simulator, triples: list[tuple[int, int, int]]) -> SearchResult:
    return result_of(simulator.task, triples, simulator)


def splits_evenly(result: SearchResult, simulator: Simulator) -> SearchResult:
    """Return a plan with all tables over all ranks, against the rules."""
    triples = []
    for i, table in enumerate(simulator.task.tables):
        units, extra = divmod(table.embedding_dim // 4, simulator.task.world_size)
        widths = [4 * (units + (r < extra)) for r in range(simulator.task.world_size)]
        triples += [(i, width, r) for r, width in enumerate(widths) if width]
    return placed(simulator, triples)


def at_random(result: SearchResult, simulator: Simulator) -> SearchResult:
    """Return a plan drawn by Python's global generator."""
    ranks = range(simulator.task.world_size)
    tables = enumerate(simulator.task.tables)
    triples = [(i, t.embedding_dim, random.choice(ranks)) for i, t in tables]
    return placed(simulator, triples)


def all_on_one_rank(result: SearchResult, simulator: Simulator) -> SearchResult:
    tables = enumerate(simulator.task.tables)
    return placed(simulator, [(i, t.embedding_dim, 0) for i, t in tables])


def guesses_costs(result: SearchResult, simulator: Simulator) -> SearchResult:
    other = all_on_one_rank(result, simulator)
    return dataclasses.replace(result, predicted=other.predicted)


def optimistic_bound(result: SearchResult, simulator: Simulator) -> SearchResult:
    """Return a result whose bound is its own plan's cost, and whose gap is not."""
    bound = result.predicted.critical_path_ms
    return dataclasses.replace(result, lower_bound_ms=bound, gap=0.1)


def says_nothing(result: SearchResult, simulator: Simulator) -> SearchResult:
    raise InfeasibleError("no plan")


BROKEN_SEARCHES: dict[str, tuple[Spoil, str]] = {
    "test_every_column_is_placed_once": (loses_columns, "columns placed"),
    "test_one_rank_takes_all_tables": (loses_columns, "columns placed"),
    "test_more_ranks_than_tables": (
        forgets_empty_ranks,
        "is for 2 ranks, the task has 6",
    ),
    "test_memory_is_kept": (all_on_one_rank, "rank 0 holds"),
    "test_a_table_larger_than_a_rank": (says_nothing, "no plan"),
    "test_a_table_that_fits_nowhere_is_named": (says_nothing, "does not name 'giant'"),
    "test_a_total_that_does_not_fit_is_told": (says_nothing, "neither a table nor"),
    "test_limits_on_splits_are_kept": (splits_evenly, "widths are multiples of 4"),
    "test_random_rules_are_kept": (splits_evenly, "3 shards, at most 2"),
    "test_result_agrees_with_the_simulator": (guesses_costs, "against the simulator"),
    "test_result_is_filled_in": (
        optimistic_bound,
        "against the predicted",
    ),
    "test_bound_holds": (optimistic_bound, "the best plan takes"),
    "test_same_seed_gives_the_same_plan": (at_random, "different plans"),
    "test_has_a_name": (all_on_one_rank, "give the class a name"),
}


@pytest.mark.parametrize("case", sorted(contract_cases(SearcherContract)))
def test_searcher_contract_catches(case: str) -> None:
    spoil, message = BROKEN_SEARCHES[case]
    name = Searcher.name if case == "test_has_a_name" else "broken"
    contract = derive(
        SearcherContract, "broken", lambda seed: BrokenSearcher(spoil, name)
    )
    with pytest.raises((AssertionError, InfeasibleError), match=message):
        getattr(contract(), case)()
