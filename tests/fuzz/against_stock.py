"""Random jobs for TorchRec's planner and ours.

    python -m tests.fuzz.against_stock 20000 1

What must hold of each: ours plans what TorchRec's does, within the memory there is and
at no more predicted milliseconds than TorchRec's plan by our own model; what neither
plans is refused for a reason that names a table, a rank or the setting at fault;
nothing is raised that is not documented, and all ends.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

from torch import nn
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.proposers import GridSearchProposer
from torchrec.distributed.planner.types import PlannerError, ShardingOption
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ShardingPlan

from tests.builders import analytic, cost_of
from tests.fuzz import cases
from tests.fuzz.campaign import Case, HangError, Outcome, limited, run
from torchrec_neuroshard.errors import NeuroShardError
from torchrec_neuroshard.planner import (
    NeuroShardEnumerator,
    NeuroShardPlanner,
    PlanFileError,
)
from torchrec_neuroshard.planner.costs.given_plans import PlanOptions
from torchrec_neuroshard.planner.costs.hedging import is_uncertain
from torchrec_neuroshard.planner.costs.memory import MemoryModel
from torchrec_neuroshard.planner.options.table_reader import (
    OFFLOADED_KERNELS,
    max_columns,
)
from torchrec_neuroshard.planner.parts.greedy import full_rank
from torchrec_neuroshard.planner.parts.torchrec_plan import (
    LEAST_STOCK_SECONDS,
    is_even,
)
from torchrec_neuroshard.search import SearchConfig
from torchrec_neuroshard.tables import COLUMN_MULTIPLE

SEARCH = SearchConfig(
    beam_width=1,
    num_candidates=4,
    effort=0.1,
    restarts=1,
    time_budget_seconds=1.0,
    exhaustive_limit=2_000,
)
STOCK_SECONDS = 2
"""TorchRec's own timeout, between proposals."""
STOCK_SHARE = 0.3 * LEAST_STOCK_SECONDS
"""What TorchRec's planner may take for its plan to be surely found as a candidate."""
HANG_SECONDS = 30.0
MOST_PROPOSALS = 10_000
"""Of TorchRec's grid search by default."""
TOLERANCE = 1e-6


def judge(case: Case) -> Outcome:
    """Plan a case both ways and compare."""
    most = case.get("most_proposals", MOST_PROPOSALS)
    with patch.object(GridSearchProposer.__init__, "__defaults__", (most,)):
        return _planned_twice(case)


def _planned_twice(case: Case) -> Outcome:
    try:
        module = cases.build_module(case)
        arguments = cases.planner_arguments(case)
        stock = EmbeddingShardingPlanner(**arguments, timeout_seconds=STOCK_SECONDS)
    except Exception as error:
        return f"not built: {type(error).__name__}: {error}"
    theirs: ShardingPlan | None = None
    refusal: Exception | None = None
    start = time.process_time()
    try:
        with limited(HANG_SECONDS):
            theirs = stock.plan(module, get_default_sharders())
    except Exception as error:
        refusal = error
    except HangError:
        refusal = TimeoutError("TorchRec's planner did not end")
    return _judge(case, module, theirs, refusal, time.process_time() - start)


def _judge(
    case: Case,
    module: nn.Module,
    theirs: ShardingPlan | None,
    refusal: Exception | None,
    stock_seconds: float,
) -> Outcome:
    plan: ShardingPlan | None = None
    failure: Exception | None = None
    try:
        with limited(HANG_SECONDS):
            planner = planner_of(case)
            plan = planner.plan(module, get_default_sharders())
    except HangError:
        return "failure, hangs"
    except Exception as error:
        failure = error
    if isinstance(failure, NeuroShardError | PlannerError):
        return _refused(case, module, theirs, failure)
    if failure is not None:
        # TorchRec's enumerator names tables that nothing is left for in such errors.
        tables = [t["name"] for m in case["modules"] for t in m["tables"]]
        named = any(name in str(failure) for name in tables)
        # What a part of TorchRec's raises goes through, in its planner as in ours.
        same = "proposer" in case["planner"] and str(failure) == str(refusal)
        if (named or same) and type(failure) is type(refusal):
            return f"both raise {type(failure).__name__}: {failure}"
        if named and isinstance(failure, RuntimeError):
            return _refused(case, module, theirs, failure)
        return f"failure, undocumented {type(failure).__name__}: {failure}"
    assert plan is not None
    if not plan.plan:
        same = theirs is not None and not theirs.plan
        return "both empty" if same else "failure, empty: an empty plan"
    try:
        result = planner.last_result
        assert result is not None
        if not 0 <= cost_of(planner) < float("inf"):
            return f"failure, no time: {cost_of(planner)} ms"
        planner.evaluate(plan, module, get_default_sharders())  # it is whole
    except PlanFileError as error:
        return f"failure, not whole: {error}"
    chosen = planner.get_selected_options()
    _memory_of(planner).attribute(chosen)
    full = full_rank(planner.reserve(module, get_default_sharders()), chosen)
    if full is not None:
        warned = any("out of memory ahead" in text for text in result.warnings)
        return f"{'warned' if warned else 'failure'}, over memory: rank {full}"
    if theirs is None:
        return "ours alone plans"
    outcome = _compare(planner, module, theirs)
    if outcome.startswith("failure, worse") and stock_seconds > STOCK_SHARE:
        return f"planned, TorchRec's takes longer: {outcome}"
    return outcome


def _compare(planner: NeuroShardPlanner, module: Any, theirs: ShardingPlan) -> Outcome:
    """Hold the cost of a plan against that of TorchRec's."""
    result = planner.last_result
    assert result is not None
    cost = cost_of(planner)
    if result.lower_bound_ms > cost * (1 + TOLERANCE):
        return f"failure, bound: {result.lower_bound_ms} ms above {cost}"
    try:
        options = options_of(planner, module, theirs)
        known = planner.costs.evaluate(planner.costs.lower(options))
        obstacle = _obstacle(planner, module, options)
    except Exception as error:
        return f"failure, pricing TorchRec's {type(error).__name__}: {error}"
    if obstacle is not None:
        return f"planned, TorchRec's {obstacle}"
    if any("not looked at" in w for w in result.warnings):
        return "planned, TorchRec's not looked at"
    if is_uncertain(planner.costs):
        return "planned, costs uncertain"
    if cost > known.critical_path_ms * (1 + TOLERANCE):
        return f"failure, worse: {cost:.6g} ms, TorchRec's {known.critical_path_ms:.6g}"
    return "planned, no worse"


def _refused(
    case: Case, module: nn.Module, theirs: ShardingPlan | None, error: Exception
) -> Outcome:
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
    if theirs is None:
        names = [t["name"] for m in case["modules"] for t in m["tables"]]
        words = [*names, "rank", "storage", *(m["path"] for m in case["modules"])]
        named = any(word in text for word in words)
        return f"{'both refuse' if named else 'failure, no reason'}: {text}"
    try:
        planner = planner_of(case)
        options = options_of(planner, module, theirs)
        obstacle = _obstacle(planner, module, options)
    except (NeuroShardError, RuntimeError) as unpriced:
        if any(map(_never_runs, case["constraints"].values())):
            return f"refused, TorchRec's cannot run: {text}"
        # The same error keeps plans from being priced: widths that kernels refuse.
        dims = [t["dim"] for m in case["modules"] for t in m["tables"]]
        most = max_columns(cases.topology_of(case))
        odd = max(dims) > most or any(dim % COLUMN_MULTIPLE for dim in dims)
        obstacle = "cannot run" if odd and str(unpriced) == str(error) else None
    if obstacle is not None:
        return f"refused, TorchRec's {obstacle}: {text}"
    return f"failure, refused: {text}"


def _never_runs(constraint: Mapping[str, Any]) -> bool:
    """Whether kernels would not do what is asked for, whatever plans say.

    FBGEMM makes no cache of no rows, and with `enforce_hbm` puts those on the device
    that TorchRec counts in the host's memory.
    """
    kernels = set(constraint.get("compute_kernels", ()))
    is_empty = "fused_uvm_caching" in kernels and not constraint.get(
        "cache_load_factor", 1.0
    )
    return is_empty or (
        bool(kernels)
        and kernels <= OFFLOADED_KERNELS
        and bool(constraint.get("enforce_hbm"))
    )


def _obstacle(
    planner: NeuroShardPlanner, module: Any, options: list[ShardingOption]
) -> str | None:
    """Say why a plan of TorchRec's is none, if so."""
    reader, topology = planner.costs.reader, planner.topology
    faulty = any(reader.run_fault(option, topology) for option in options)
    if faulty or not is_even(options):
        return "cannot run"
    _memory_of(planner).attribute(options)
    if full_rank(planner.reserve(module, get_default_sharders()), options) is not None:
        return "over memory"
    return None


def _memory_of(planner: NeuroShardPlanner) -> MemoryModel:
    enumerator = planner.enumerator
    assert isinstance(enumerator, NeuroShardEnumerator)
    assert enumerator.memory is not None
    return enumerator.memory


def planner_of(case: Case) -> NeuroShardPlanner:
    """Return our planner of a case, with a short search."""
    cost_model = case["planner"].get("cost_model")
    models = {"cost_model": cost_model} if cost_model else analytic()
    return NeuroShardPlanner(**cases.planner_arguments(case), **models, search=SEARCH)


def options_of(
    planner: NeuroShardPlanner, module: Any, plan: ShardingPlan
) -> list[ShardingOption]:
    """Return a plan's options with our estimates."""
    given = PlanOptions(
        module, get_default_sharders(), planner.enumerator, planner.costs
    )
    return given.of(plan)


if __name__ == "__main__":
    sys.exit(run(cases.draw, judge))
