"""Random jobs for TorchRec's planner and ours.

What must hold of each: ours plans what TorchRec's does, within the memory there is;
what neither plans is refused for a reason that names a table, a rank or the setting at
fault; nothing is raised that is not documented, and all ends. By our costs our plan
takes no longer than TorchRec's, unless the caller gives TorchRec's proposers: then the
default search does not run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from unittest.mock import patch

from torch import nn
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.proposers import GridSearchProposer
from torchrec.distributed.planner.types import PlannerError, ShardingOption
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ShardingPlan

from tests.builders import analytic, cost_of, last_result
from tests.fuzz import cases
from tests.fuzz.campaign import Case, HangError, Outcome, limited
from torchrec_neuroshard.errors import NeuroShardError, PlanFileError
from torchrec_neuroshard.planner import NeuroShardEnumerator, NeuroShardPlanner
from torchrec_neuroshard.planner.greedy import full_rank
from torchrec_neuroshard.planner.option_facts import is_even
from torchrec_neuroshard.planner.reader import TableReader
from torchrec_neuroshard.tables.table import COLUMN_MULTIPLE

STOCK_SECONDS = 2
"""Timeout of TorchRec's planner, checked between proposals."""
HANG_SECONDS = 30.0
MOST_PROPOSALS = 10_000
"""Default limit of TorchRec's grid search."""
TOLERANCE = 1e-6
UNTRAINED = (
    "before torchrec 1.9",
    "on CPUs",
    "on GPUs only",
    "over gloo",
    " MEAN",
    "BagCollection twice",
    "FBGEMM trains",
)
"""Words in errors about plans that TorchRec makes but does not train correctly."""
SHARDERS = get_default_sharders()
PlannerT = TypeVar("PlannerT", bound=EmbeddingShardingPlanner)


def judge(case: Case) -> Outcome:
    """Plan a case both ways and compare."""
    most = case.get("most_proposals", MOST_PROPOSALS)
    with patch.object(GridSearchProposer.__init__, "__defaults__", (most,)):
        try:
            module = cases.build_module(case)
            arguments = cases.planner_arguments(case)
            stock = EmbeddingShardingPlanner(**arguments, timeout_seconds=STOCK_SECONDS)
        except Exception as error:
            return f"not built: {type(error).__name__}: {error}"
        _, theirs, refusal = _planned(lambda: stock, module)
        planner, plan, failure = _planned(lambda: planner_of(case), module)
        if failure is not None:
            return _failed(case, module, theirs, refusal, failure)
        assert planner is not None and plan is not None
        if not plan.plan:
            same = theirs is not None and not theirs.plan
            return "both empty" if same else "failure, empty: an empty plan"
        return _compared(case, planner, module, plan, theirs)


def _planned(
    make: Callable[[], PlannerT], module: nn.Module
) -> tuple[PlannerT | None, ShardingPlan | None, BaseException | None]:
    try:
        with limited(HANG_SECONDS):
            planner = make()
            return planner, planner.plan(module, SHARDERS), None
    except (Exception, HangError) as error:
        return None, None, error


def _failed(
    case: Case,
    module: nn.Module,
    theirs: ShardingPlan | None,
    refusal: BaseException | None,
    failure: BaseException,
) -> Outcome:
    """Say whether our planner may raise this, where TorchRec's raised `refusal`."""
    text = f"{type(failure).__name__}: {' '.join(str(failure).split())[:600]}"
    if isinstance(failure, HangError):
        return "failure, hangs"
    # TorchRec's enumerator names tables that nothing is left for in such errors.
    tables = [t["name"] for m in case["modules"] for t in m["tables"]]
    is_named = any(name in text for name in tables)
    if not isinstance(failure, NeuroShardError | PlannerError):
        # What a part of TorchRec's raises goes through, in its planner as in ours.
        same = "proposer" in case["planner"] and str(failure) == str(refusal)
        if (is_named or same) and type(failure) is type(refusal):
            return f"both raise {text}"
        if not (is_named and isinstance(failure, RuntimeError)):
            return f"failure, undocumented {text}"
    if theirs is None:
        words = ["rank", "storage", *(m["path"] for m in case["modules"])]
        has_reason = is_named or any(word in text for word in words)
        return f"{'both refuse' if has_reason else 'failure, no reason'}: {text}"
    try:
        planner = planner_of(case)
        options = options_of(planner, module, theirs)
        obstacle = _obstacle(planner, module, options)
    except (NeuroShardError, RuntimeError) as unpriced:
        # The same error keeps plans from being priced: widths that kernels refuse.
        dims = [t["dim"] for m in case["modules"] for t in m["tables"]]
        reader = TableReader(cases.topology_of(case))
        most = reader.most_columns(in_fused_bags=True)
        is_odd = max(dims) > most or any(dim % COLUMN_MULTIPLE for dim in dims)
        never = any(map(_never_runs, case["constraints"].values()))
        untrained = any(words in str(failure) for words in UNTRAINED)
        known = never or ((is_odd or untrained) and str(unpriced) == str(failure))
        obstacle = "cannot run" if known else None
    if obstacle is not None:
        return f"refused, TorchRec's {obstacle}: {text}"
    return f"failure, refused: {text}"


def _never_runs(constraint: Mapping[str, Any]) -> bool:
    """Whether no plan can run with this constraint.

    FBGEMM makes no cache of no rows.
    """
    kernels = set(constraint.get("compute_kernels", ()))
    is_cached = "fused_uvm_caching" in kernels
    return is_cached and not constraint.get("cache_load_factor", 1.0)


def _compared(
    case: Case,
    planner: NeuroShardPlanner,
    module: nn.Module,
    plan: ShardingPlan,
    theirs: ShardingPlan | None,
) -> Outcome:
    """Check our plan, and compare its cost with that of TorchRec's."""
    result, cost = last_result(planner), cost_of(planner)
    if not 0 <= cost < float("inf"):
        return f"failure, no time: {cost} ms"
    try:
        planner.evaluate(plan, module, SHARDERS)  # it is whole
    except PlanFileError as error:
        return f"failure, not whole: {error}"
    full = _full_rank(planner, module, planner.get_selected_options())
    if full is not None:
        warned = any(note.severity == "error" for note in result.notes)
        return f"{'warned' if warned else 'failure'}, over memory: rank {full}"
    if theirs is None:
        return "ours alone plans"
    if result.lower_bound_ms > cost * (1 + TOLERANCE):
        return f"failure, bound: {result.lower_bound_ms} ms above {cost}"
    try:
        options = options_of(planner, module, theirs)
        known_ms = planner.costs.placed(options).predicted.critical_path_ms
        obstacle = _obstacle(planner, module, options)
    except Exception as error:
        return f"failure, pricing TorchRec's {type(error).__name__}: {error}"
    if obstacle is not None:
        return f"planned, TorchRec's {obstacle}"
    if cost > known_ms * (1 + TOLERANCE):
        figures = f"{cost:.6g} ms, TorchRec's {known_ms:.6g}"
        if "proposer" in case["planner"]:
            return f"planned, worse with the caller's proposer: {figures}"
        return f"failure, worse: {figures}"
    return "planned, no worse"


def _obstacle(
    planner: NeuroShardPlanner, module: nn.Module, options: list[ShardingOption]
) -> str | None:
    """Say why TorchRec's plan is not valid; None if it is."""
    faulty = planner.costs.reader.run_faults(options)
    if faulty or not is_even(options):
        return "cannot run"
    is_full = _full_rank(planner, module, options) is not None
    return "over memory" if is_full else None


def _full_rank(
    planner: NeuroShardPlanner, module: nn.Module, options: list[ShardingOption]
) -> int | None:
    enumerator = planner.enumerator
    assert isinstance(enumerator, NeuroShardEnumerator)
    assert enumerator.memory is not None
    enumerator.memory.attribute(options)
    return full_rank(planner.reserve(module, SHARDERS), options)


def planner_of(case: Case) -> NeuroShardPlanner:
    """Return our planner of a case."""
    cost_model = case["planner"].get("cost_model")
    models = {"cost_model": cost_model} if cost_model else analytic()
    return NeuroShardPlanner(**cases.planner_arguments(case), **models)


def options_of(
    planner: NeuroShardPlanner, module: Any, plan: ShardingPlan
) -> list[ShardingOption]:
    """Return a plan's options with our estimates."""
    return planner.placed_options(plan, module, SHARDERS)
