"""Random planning jobs, as plain data that can be written down and built.

A case is a dictionary: `modules`, `topology`, `constraints` and `planner`, each of the
arguments that differ from TorchRec's defaults. Cases that TorchRec cannot build are
left to the caller, which skips them.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.proposers import (
    DynamicProgrammingProposer,
    EmbeddingOffloadScaleupProposer,
    GreedyProposer,
    GridSearchProposer,
    UniformProposer,
)
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
)
from torchrec.distributed.planner.types import CustomTopologyData
from torchrec.distributed.types import CacheParams, ShardingType
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.optim import Adam, RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.quant.embedding_modules import (
    EmbeddingBagCollection as QuantEmbeddingBagCollection,
)

from tests.builders import META, bags
from tests.fuzz.campaign import Case, has_luck

TYPES = [t.value for t in ShardingType]
KERNELS = ["fused", "fused_uvm", "fused_uvm_caching", "dense", "quant", "key_value"]
WORLDS = [1, 2, 2, 2, 3, 4, 4, 8, 8, 16]
WIDTHS = [4, 8, 12, 16, 32, 64, 96, 128, 256, 1024]
PROPOSALS = 60
"""Limit of TorchRec's default grid search in a drawn case."""
PROPOSERS: dict[str, Callable[[], Any]] = {
    "greedy": GreedyProposer,
    "wide": lambda: GreedyProposer(use_depth=False),
    "grid": lambda: GridSearchProposer(max_proposals=200),
    "uniform": UniformProposer,
    "dynamic": DynamicProgrammingProposer,
    "scaleup": EmbeddingOffloadScaleupProposer,
}
OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": Adam, "rowwise": RowWiseAdagrad}

Options = dict[str, tuple[float, Callable[[], Any]]]
"""Name -> share of cases that give it, and a function that draws its value."""


def draw(rng: Random) -> Case:
    """Return a case of a few tables."""

    def chosen(options: Options) -> dict[str, Any]:
        given = options.items()
        return {n: value() for n, (share, value) in given if has_luck(rng, share)}

    def one(*values: Any) -> Any:
        return rng.choice(values)

    def some(values: list[str], most: int) -> list[str]:
        return rng.sample(values, rng.randint(1, most))

    def table(number: int) -> dict[str, Any]:
        features = [f"f{number}_{i}" for i in range(one(1, 1, 1, 1, 0, 2, 3))]
        if features and has_luck(rng, 0.15):
            features[0] = "shared"
        options: Options = {
            "data_type": (0.25, lambda: one("FP16", "BF16")),
            "mean": (0.2, lambda: True),
            "dim": (0.05, lambda: rng.randrange(1, 200)),
        }
        rows = int(10 ** rng.uniform(0, one(4, 7, 8, 12)))
        known = {"name": f"t{number}", "rows": rows, "dim": one(*WIDTHS)}
        return known | {"features": features} | chosen(options)

    def constraint(table: dict[str, Any]) -> dict[str, Any]:
        count = max(1, len(table["features"]))
        if has_luck(rng, 0.03):
            count = rng.randrange(4)

        def pooling() -> list[float]:
            return [round(10 ** rng.uniform(-1, 2), 3) for _ in range(count)]

        options: Options = {
            "sharding_types": (0.35, lambda: some(TYPES, 3)),
            "compute_kernels": (0.12, lambda: some(KERNELS, 2)),
            "min_partition": (0.25, lambda: one(1, 1, 3, 4, 8, 24, 32, 100, 4096)),
            "pooling_factors": (0.5 if count == 1 else 1.0, pooling),
            "batch_sizes": (0.1, lambda: [rng.randrange(2048)] * count),
            "is_weighted": (0.05, lambda: True),
            "cache_load_factor": (0.1, lambda: one(0.0, 0.1, 0.5, 1.0)),
            "enforce_hbm": (0.05, lambda: one(True, False)),
        }
        return chosen(options)

    world, modules, first = one(*WORLDS), list[dict[str, Any]](), 0
    for place in range(one(1, 1, 1, 2)):
        kind, count = one(*["ebc"] * 7, "ec", "ec", "quant"), one(1, 2, 3)
        tables = [table(number) for number in range(first, first + count)]
        if kind == "ec":
            tables = [t | {"dim": tables[0]["dim"]} for t in tables]
        modules.append({"kind": kind, "path": f"m{place}", "tables": tables})
        first += count
    every = [t for m in modules for t in m["tables"]]
    need = sum(4.0 * t["rows"] * t["dim"] for t in every) / world
    device = one("cuda", "cuda", "cpu")
    cap = "hbm_cap" if device == "cuda" else "ddr_cap"

    def memory() -> int:
        least: int = one(0, 10**8, 2 * 10**9)
        return least + int(need * 10 ** rng.uniform(-0.2, 1.5))

    divisors = [d for d in range(1, world + 1) if world % d == 0]
    topology: Options = {
        "local_world_size": (0.5, lambda: one(*divisors)),
        "ddr_cap": (0.2, memory),
        cap: (0.7, memory),
        "custom": (0.1, lambda: {cap: [memory() for _ in range(world)]}),
    }
    planner: Options = {
        "batch_size": (0.9, lambda: int(2 ** rng.uniform(0, 16))),
        "proposer": (0.3, lambda: [one(*PROPOSERS)]),
        "storage_reservation": (0.5, lambda: one(0.0, 0.0, 0.15, 0.6, 1.0)),
        "cost_model": (0.15, lambda: one("auto", "cpu")),
    }
    asked = {t["name"]: constraint(t) for t in every if has_luck(rng, 0.4)}
    case: Case = {
        "modules": modules,
        "topology": {"world_size": world, "compute_device": device} | chosen(topology),
        "constraints": asked,
        "planner": chosen(planner),
        "most_proposals": PROPOSALS,
    }
    return case | chosen({"optimizer": (0.2, lambda: one(*OPTIMIZERS))})


def topology_of(case: Case) -> Topology:
    """Return the devices of a case."""
    given = dict(case["topology"])
    custom = given.pop("custom", None)
    if custom is not None:
        given["custom_topology_data"] = CustomTopologyData(custom, given["world_size"])
    return Topology(**given)


def planner_arguments(case: Case) -> dict[str, Any]:
    """Return arguments of TorchRec's planner, with parts of their own."""
    constraints = {}
    for name, given in case["constraints"].items():
        fields = dict(given)
        cached = fields.pop("cache_load_factor", None)
        if cached is not None:
            fields["cache_params"] = CacheParams(load_factor=cached)
        constraints[name] = ParameterConstraints(**fields)
    found: dict[str, Any] = {
        "topology": topology_of(case),
        "constraints": constraints or None,
        "stats": [],
        "debug": False,
        **case["planner"],
    }
    found.pop("cost_model", None)
    if "proposer" in found:
        found["proposer"] = [PROPOSERS[name]() for name in found["proposer"]]
    if "storage_reservation" in found:
        share = found["storage_reservation"]
        found["storage_reservation"] = FixedPercentageStorageReservation(share)
    return found


def build_module(case: Case) -> nn.Module:
    """Return the model of a case; its weights are on no device."""
    root = nn.Module()
    for spec in case["modules"]:
        root.add_module(spec["path"], _build(spec["kind"], spec["tables"]))
    if "optimizer" in case:
        kind = OPTIMIZERS[case["optimizer"]]
        apply_optimizer_in_backward(kind, root.parameters(), {"lr": 0.1})
    return root


def _build(kind: str, tables: list[dict[str, Any]]) -> Any:
    fields: list[dict[str, Any]] = [
        {
            "name": t["name"],
            "num_embeddings": t["rows"],
            "embedding_dim": t["dim"],
            "feature_names": t["features"],
            "data_type": DataType[t.get("data_type", "FP32")],
        }
        for t in tables
    ]
    if kind == "ec":
        sequences = [EmbeddingConfig(**known) for known in fields]
        return EmbeddingCollection(tables=sequences, device=META)
    poolings = [PoolingType.MEAN if t.get("mean") else PoolingType.SUM for t in tables]
    pooled = [
        EmbeddingBagConfig(**known, pooling=pooling)
        for known, pooling in zip(fields, poolings, strict=True)
    ]
    if kind == "quant":
        for config in pooled:
            config.data_type = DataType.INT8
        return QuantEmbeddingBagCollection(pooled, False, META)
    return bags(*pooled)
