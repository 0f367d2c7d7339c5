"""Wrong values are refused by name at every public entry point."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchrec.distributed.planner import Topology
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_neuroshard
from tests.builders import make_ebc
from torchrec_neuroshard.errors import (
    ConfigError,
    NeuroShardError,
    PlanFileError,
    ProfileError,
    TableError,
)
from torchrec_neuroshard.planner import NeuroShardPlanner

ns: Any = torchrec_neuroshard  # wrong types on purpose
Given = Any
"""A planner `p` with its plan `plan` of the model `m`, and more."""
_Cases = dict[str, tuple[Callable[[Given], object], str]]
"""A call that fails, and what the error says."""


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Given:
    model, sharders = make_ebc([(100, 16), (200, 16)]), get_default_sharders()
    topology = Topology(2, "cpu")

    def planner(**changes: Any) -> NeuroShardPlanner:
        usual = {"topology": topology, "batch_size": 8, "calibrate": "never"}
        config = ns.SearchConfig(time_budget_seconds=0.1)
        settings: Any = {**usual, "search": config, "stats": [], **changes}
        return NeuroShardPlanner(**settings)

    found = SimpleNamespace(m=model, sharders=sharders, topology=topology)
    found.planner, found.p = planner, planner()
    found.plan = found.p.plan(model, sharders)
    found.folder = tmp_path_factory.mktemp("files")
    found.file = found.folder / "plan.json"
    ns.save_plan(found.plan, found.file, model=model, planner=found.p)
    return found


PLANNER: _Cases = {
    "cost_model=''": (lambda g: g.planner(cost_model=""), "unknown cost model ''"),
    "profiles": (
        lambda g: g.planner(profiles={"f0": 3}),
        "profile of feature 'f0' is a int, 3: pass a .*FeatureProfile",
    ),
    "evaluate": (lambda g: g.p.evaluate(None, g.m), "plan is a NoneType, .*ShardingPl"),
    "evaluate model": (lambda g: g.p.evaluate(g.plan, 3), "model is a int, 3: pass a"),
    "compare": (lambda g: g.p.compare(None, g.m), "plan is a NoneType, .*ShardingPlan"),
    "adopt": (lambda g: g.p.adopt({}, g.m), "plan is a dict, {}: pass a"),
    "adopt model": (lambda g: g.p.adopt(g.plan, None), "model is a NoneType"),
    "adopt sharders": (lambda g: g.p.adopt(g.plan, g.m, [3]), r"sharders\[0\] is 3"),
    "remember": (lambda g: g.p.remember(3), "model is a int, 3"),
    "relearned": (lambda g: g.p.relearned(None), "profiles is a NoneType, None"),
}
TOPOLOGY: _Cases = {
    **{
        f"memory_gb={value!r}": (
            partial(lambda value, g: ns.topology_for("h100", memory_gb=value), value),
            f"memory_gb must be above 0 and finite, got {value!r}",
        )
        for value in ("80", True, math.nan, -1)
    },
    "bytes": (
        lambda g: ns.topology_for("h100", memory_gb=80 * 2.0**30),
        "memory_gb is .*: give it in GB, not in bytes",
    ),
    "group of": (lambda g: ns.group_topology(None, 2), "topology is a NoneType"),
    "group": (
        lambda g: ns.group_topology(g.topology, 1.0),
        "sharding_group_size must be a whole number of at least 1, got 1.0",
    ),
    "sync_interval": (
        lambda g: ns.group_topology(g.topology, 1, sync_interval=0),
        "sync_interval must be a whole number of at least 1, got 0",
    ),
}
REHEARSE: _Cases = {
    **{
        f"batch_size={value!r}": (
            partial(lambda value, g: rehearse(g, batch_size=value), value),
            f"batch_size must be a whole number of at least 1, got {value!r}",
        )
        for value in ("x", 0, True, 2.5)
    },
    "model": (lambda g: rehearse(g, model=None), "model is a NoneType"),
    "plan": (lambda g: rehearse(g, plan=None), "plan is a NoneType.*ShardingPlan"),
    "topology": (lambda g: rehearse(g, topology="h100"), "topology is a str, 'h100'"),
    "sharders": (lambda g: rehearse(g, sharders=3), "sharders is 3: pass a list"),
    "constraints": (lambda g: rehearse(g, constraints=3), "constraints is a int, 3"),
    "profiles": (lambda g: rehearse(g, profiles=3), "profiles is a int, 3: pass a"),
}


def rehearse(given: Given, **changes: Any) -> object:
    usual = {"model": given.m, "plan": given.plan, "topology": given.topology}
    settings: Any = {**usual, "batch_size": 8, **changes}
    return ns.rehearse(**settings)


def replan(given: Given, **changes: Any) -> object:
    usual = {"current_plan": given.plan, "planner": given.p, "model": given.m}
    settings: Any = {**usual, "budget_bytes": 10, **changes}
    return ns.replan(**settings)


def save(given: Given, **changes: Any) -> None:
    usual = {"plan": given.plan, "path": given.folder / "b", "model": given.m}
    settings: Any = {**usual, "planner": given.p, **changes}
    ns.save_plan(**settings)


def load(given: Given, **changes: Any) -> object:
    settings: Any = {"path": given.file, "model": given.m, "planner": given.p}
    return ns.load_plan(**settings | changes)


PLANS: _Cases = {
    "replan plan": (lambda g: replan(g, current_plan=None), "plan is a NoneType"),
    "replan planner": (lambda g: replan(g, planner=None), "planner is a NoneType"),
    "replan model": (lambda g: replan(g, model=None), "model is a NoneType"),
    "replan sharders": (lambda g: replan(g, sharders=3), "sharders is 3: pass a list"),
    "replan config": (lambda g: replan(g, config=3), "config is a int, 3: .*SearchC"),
    **{
        f"budget_bytes={value!r}": (
            partial(lambda value, g: replan(g, budget_bytes=value), value),
            f"budget_bytes must be a number of at least 0, got {value!r}",
        )
        for value in ("x", -1, True, math.nan)
    },
    "apply_moves": (lambda g: ns.apply_moves(g.m), "needs the process group"),
    "save path": (lambda g: save(g, path=None), "path is a NoneType, None: pass a"),
    "save folder": (
        lambda g: save(g, path=g.folder / "none/a.json"),
        "cannot write '.*none/a.json': no folder",
    ),
    "save plan": (lambda g: save(g, plan=None), "plan is a NoneType, None: pass a"),
    "save model": (lambda g: save(g, model=None), "model is a NoneType"),
    "save planner": (lambda g: save(g, planner=3), "planner is a int, 3: pass a"),
    "load model": (lambda g: load(g, model=None), "model is a NoneType"),
    "load planner": (lambda g: load(g, planner=3), "planner is a int, 3: pass a"),
    "load sharders": (lambda g: load(g, sharders=3), "sharders is 3: pass a list"),
}
REPORTS: _Cases = {
    "plan": (
        lambda g: ns.write_html(g.plan, g.folder / "a"),
        "report is a ShardingPlan, .* pass a .*Report",
    ),
    "path": (lambda g: ns.write_html(g.p.report(), None), "path is a NoneType"),
    "folder": (
        lambda g: ns.write_html(g.p.report(), g.folder / "none/a"),
        "cannot write '.*none/a': no folder",
    ),
    "title": (
        lambda g: ns.write_html(g.p.report(), g.folder / "a", 3),
        "title is a int, 3: pass a str",
    ),
    "lines": (lambda g: ns.JsonLinesReporter(3), "path is a int, 3: pass a str or"),
    "timer": (
        lambda g: ns.PhaseTimer(None, torch.device("cpu")),
        "model is a NoneType",
    ),
    "timer device": (lambda g: ns.PhaseTimer(g.m, "cpu"), "device is a str, 'cpu'"),
}
COST_MODELS: _Cases = {
    "3": (lambda g: ns.load_cost_model(3), "cost_model is a int, 3"),
    "None": (lambda g: ns.load_cost_model(None), "cost_model is a NoneType"),
    "device": (
        lambda g: ns.load_cost_model("cpu", device_type="tpu"),
        "device_type must be one of cpu, cuda, got 'tpu'",
    ),
    "bandwidth": (
        lambda g: ns.load_cost_model("h100", device_type="cuda", hbm_gb_per_s=-1),
        "hbm_gb_per_s must be a finite number above 0, got -1",
    ),
    "card": (
        lambda g: ns.load_cost_model("h100", device_type="cuda", card="h100"),
        "card is a str, 'h100': pass a .*GpuCard",
    ),
}
SETTINGS: _Cases = {
    **{
        f"{name}={value!r}": (
            partial(lambda changes, g: ns.SearchConfig(**changes), {name: value}),
            f"{name} must be a .*number .*, got {value!r}",
        )
        for name, value in (
            ("time_budget_seconds", "x"),
            ("time_budget_seconds", True),
            ("time_budget_seconds", None),
            ("time_budget_seconds", math.nan),
            ("effort", "x"),
            ("effort", -1),
            ("restarts", 1.5),
            ("seed", -1),
            ("seed", "x"),
        )
    },
    "progress": (
        lambda g: ns.SearchConfig(progress=3),
        "progress must be a function, got 3",
    ),
    "DenseMs": (
        lambda g: ns.DenseMs(forward="x"),
        "dense_ms: forward must be a finite number of at least 0, got 'x'",
    ),
    "PaperSearcher": (lambda g: ns.PaperSearcher(3), "config is a int, 3: pass a"),
}
PROFILES: _Cases = {
    "float ids": (
        lambda g: ns.profile_inputs([bags(torch.tensor([1.0, 2.0]))]),
        "feature 'f0' of batch 0 has ids of type float32",
    ),
    **{
        f"batch_size={value!r}": (
            partial(
                lambda value, g: ns.FeatureProfile(batch_size=value, num_lookups=1),
                value,
            ),
            f"batch_size must be a whole number of at least 1, got {value!r}",
        )
        for value in ("x", 1.5, True, 0)
    },
    **{
        f"num_lookups={value!r}": (
            partial(
                lambda value, g: ns.FeatureProfile(batch_size=1, num_lookups=value),
                value,
            ),
            f"needs finite values of at least 0, got num_lookups={value}",
        )
        for value in ("x", None, -1, math.nan)
    },
    "histogram": (
        lambda g: ns.FeatureProfile(batch_size=1, num_lookups=1, access_histogram=3),
        "needs finite values of at least 0, .* access_histogram=3",
    ),
}
TABLES: _Cases = {
    **{
        f"{name}={value!r}": (
            partial(
                lambda changes, g: ns.TableConfig(
                    **{"name": "a", "num_embeddings": 8, "embedding_dim": 4, **changes}
                ),
                {name: value},
            ),
            rf"table '.*': {name} must be .*, got {value!r}",
        )
        for name, value in (
            ("name", 3),
            ("num_embeddings", "x"),
            ("num_embeddings", 1.5),
            ("num_embeddings", True),
            ("num_embeddings", math.nan),
            ("embedding_dim", "x"),
            ("embedding_dim", 10),
            ("pooling_factor", "x"),
            ("pooling_factor", math.inf),
            ("num_features", 0),
            ("num_features", 1.5),
            ("outputs_per_sample", "x"),
            ("profile", 3),
            ("data_type", "x"),
            ("optimizer", "lamb"),
        )
    },
}
GROUPS: dict[str, tuple[_Cases, type[NeuroShardError]]] = {
    "planner": (PLANNER, ConfigError),
    "topology": (TOPOLOGY, ConfigError),
    "rehearse": (REHEARSE, ConfigError),
    "plans": (PLANS, ConfigError),
    "reports": (REPORTS, ConfigError),
    "cost models": (COST_MODELS, ConfigError),
    "settings": (SETTINGS, ConfigError),
    "profiles": (PROFILES, ProfileError),
    "tables": (TABLES, TableError),
}


def bags(values: torch.Tensor) -> KeyedJaggedTensor:
    lengths = torch.ones(len(values), dtype=torch.int64)
    return KeyedJaggedTensor(keys=["f0"], values=values, lengths=lengths)


@pytest.mark.parametrize(
    ("call", "message", "error"),
    [
        pytest.param(call, message, error, id=f"{group}: {name}")
        for group, (cases, error) in GROUPS.items()
        for name, (call, message) in cases.items()
    ],
)
def test_a_wrong_value_is_refused_by_name(
    given: Given,
    call: Callable[[Given], object],
    message: str,
    error: type[NeuroShardError],
) -> None:
    with pytest.raises(error, match=message):
        call(given)


def test_an_unknown_argument_is_refused_in_our_name(given: Given) -> None:
    with pytest.raises(TypeError, match=r"NeuroShardPlanner .* 'batchsize'; did you "):
        given.planner(batchsize=3)


def test_a_plan_file_that_cannot_be_read_is_named(given: Given, tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match=r"cannot read .*none\.json': No such file"):
        load(given, path=tmp_path / "none.json")
