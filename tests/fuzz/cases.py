"""Random planning jobs, as plain data that can be written down, shrunk and built.

A case is a dictionary: `modules`, `topology`, `constraints` and `planner`, each of the
arguments that differ from TorchRec's defaults. Cases that TorchRec cannot build are
left to the caller, which skips them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, EmbeddingConfig
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
    HeuristicalStorageReservation,
)
from torchrec.distributed.planner.types import CustomTopologyData
from torchrec.distributed.types import CacheParams, ShardingType
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
)
from torchrec.optim import Adam, RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.quant.embedding_modules import (
    EmbeddingBagCollection as QuantEmbeddingBagCollection,
)

from tests.builders import META, bag_config, bags, managed_collisions

Case = dict[str, Any]

TYPES = [t.value for t in ShardingType]
KERNELS = ["fused", "fused_uvm", "fused_uvm_caching", "dense", "quant", "key_value"]
WIDTHS = [4, 8, 12, 16, 32, 64, 96, 128, 256, 512, 1024, 4096]
SMALL_SHARE = 0.9
"""Of all cases; each other one takes as long as ten of these."""
SMALL_WORLDS, SMALL_WIDTHS = [1, 2, 2, 2, 3, 4, 4, 8], WIDTHS[:7]
SMALL_PROPOSALS = 60
"""Most that TorchRec's default grid search may make in a small case."""
PROPOSERS: dict[str, Callable[[], Any]] = {
    "greedy": GreedyProposer,
    "wide": lambda: GreedyProposer(use_depth=False),
    "grid": lambda: GridSearchProposer(max_proposals=200),
    "uniform": UniformProposer,
    "dynamic": DynamicProgrammingProposer,
    "scaleup": EmbeddingOffloadScaleupProposer,
}
RESERVATIONS: dict[str, Callable[[float], Any]] = {
    "fixed": FixedPercentageStorageReservation,
    "heuristic": HeuristicalStorageReservation,
}
OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": Adam, "rowwise": RowWiseAdagrad}


def draw(rng: np.random.Generator) -> Case:
    """Return a case; most are small, a few have hundreds of ranks."""
    is_small = rng.random() < SMALL_SHARE
    worlds = [1, 2, 2, 2, 3, 4, 4, 4, 6, 8, 8, 16, 32, 64, 256]
    world = int(rng.choice(SMALL_WORLDS if is_small else worlds))
    most = 4 if is_small else 10 if world <= 8 else 5 if world <= 32 else 2
    modules: list[dict[str, Any]] = []
    count = 0
    for place in range(int(rng.choice([1, 1, 1, 2, 2 if is_small else 3]))):
        size = int(rng.integers(1, max(2, most // 2) + 1))
        widths = SMALL_WIDTHS if is_small else WIDTHS
        module = _draw_module(rng, place, count, size, widths)
        if module["kind"] == "mc":
            module["buckets"] = world
        count += len(module["tables"])
        modules.append(module)
    tables = [t for m in modules for t in m["tables"]]
    case: Case = {
        "modules": modules,
        "topology": _draw_topology(rng, world, tables),
        "constraints": {
            t["name"]: found
            for t in tables
            if rng.random() < 0.4 and (found := _draw_constraint(rng, t))
        },
        "planner": _draw_planner(rng),
    }
    if is_small:
        case["most_proposals"] = SMALL_PROPOSALS
    if rng.random() < 0.2:
        case["optimizer"] = str(rng.choice(list(OPTIMIZERS)))
    return case


def _draw_module(
    rng: np.random.Generator, place: int, first: int, size: int, widths: list[int]
) -> dict[str, Any]:
    kinds = ["ebc"] * 11 + ["ec"] * 4 + ["mc", "quant"]
    kind = str(rng.choice(kinds))
    tables: list[dict[str, Any]] = []
    repeats = place > 0 and rng.random() < 0.1
    for number in range(first, first + size):
        name = f"t{number}"
        if repeats:
            name = f"t{number - first}"  # as in the first module
        most = rng.choice([1, 1, 1, 1, 0, 2, 3])
        least = 1 if kind == "mc" else 0
        features = [f"f{number}_{i}" for i in range(max(least, most))]
        if features and rng.random() < 0.15:
            features[0] = "shared"
        table: dict[str, Any] = {
            "name": name,
            "rows": int(10 ** rng.uniform(0, rng.choice([4, 7, 8, 12]))),
            "dim": int(rng.choice(widths)),
            "features": features,
        }
        if rng.random() < 0.05:
            table["dim"] = int(rng.integers(1, widths[-1] + 1))
        if rng.random() < 0.25:
            table["data_type"] = str(rng.choice(["FP16", "BF16"]))
        if rng.random() < 0.2:
            table["mean"] = True
        if kind == "mc":
            table["rows"] = 256 * int(rng.integers(1, 4))
        tables.append(table)
    if kind == "ec":
        for table in tables:
            table["dim"] = tables[0]["dim"]
    path = str(rng.choice(["m", "deep.down.m", "list.0"])) + str(place)
    module: dict[str, Any] = {"kind": kind, "path": path, "tables": tables}
    if rng.random() < 0.15:
        module["weighted"] = True
    return module


def _draw_topology(
    rng: np.random.Generator, world: int, tables: list[dict[str, Any]]
) -> dict[str, Any]:
    device = str(rng.choice(["cuda", "cuda", "cpu"]))
    found: dict[str, Any] = {"world_size": world, "compute_device": device}
    # PyTorch names no more than 128 devices of a node.
    divisors = [d for d in range(1, min(world, 128) + 1) if world % d == 0]
    if rng.random() < 0.5 or world > 128:
        found["local_world_size"] = int(rng.choice(divisors))
        nodes = world // found["local_world_size"]
        if rng.random() < 0.3:
            pods = [d for d in range(1, nodes + 1) if nodes % d == 0]
            found["pod_size"] = int(rng.choice(pods))
    need = sum(4.0 * t["rows"] * t["dim"] for t in tables) / world
    cap = "hbm_cap" if device == "cuda" else "ddr_cap"
    if rng.random() < 0.7:
        found[cap] = int(need * 10 ** rng.uniform(-0.5, 1.5)) + int(
            rng.choice([0, 10**8, 2 * 10**9, 2 * 10**9])
        )
        if rng.random() < 0.15:
            share = rng.uniform(0.2, 1.5, world)
            found["custom"] = {cap: [int(found[cap] * s) for s in share]}
    elif device == "cuda" and rng.random() < 0.5:
        found[cap] = int(need * 10) + 2 * 10**9
    if device == "cuda" and rng.random() < 0.2:
        found["ddr_cap"] = int(need * 10 ** rng.uniform(-0.7, 1.3))
    if rng.random() < 0.05:
        found["ssd_cap"] = int(need * 10 ** rng.uniform(-0.7, 1.3))
    return found


def _draw_constraint(rng: np.random.Generator, table: dict[str, Any]) -> dict[str, Any]:
    num = max(1, len(table["features"]))
    found: dict[str, Any] = {}

    def maybe(share: float, name: str, value: Callable[[], Any]) -> None:
        if rng.random() < share:
            found[name] = value()

    def some(values: list[str], most: int) -> list[str]:
        count = int(rng.integers(1, most + 1))
        return [str(v) for v in rng.choice(values, count, replace=False)]

    count = num if rng.random() < 0.97 else int(rng.integers(0, 4))
    maybe(0.35, "sharding_types", lambda: some(TYPES, 3))
    maybe(0.12, "compute_kernels", lambda: some(KERNELS, 2))
    maybe(
        0.25,
        "min_partition",
        lambda: int(rng.choice([0, 1, 3, 4, 8, 16, 24, 32, 64, 100, 128, 4096])),
    )
    maybe(
        0.5 if num == 1 else 1.0,
        "pooling_factors",
        lambda: [float(round(v, 3)) for v in rng.lognormal(1, 1.5, count)],
    )
    if "pooling_factors" in found or rng.random() < 0.1:
        maybe(0.2, "num_poolings", lambda: [float(rng.integers(0, 4))] * count)
        maybe(0.2, "batch_sizes", lambda: [int(rng.integers(0, 2048))] * count)
    maybe(0.05, "is_weighted", lambda: True)
    maybe(0.1, "cache_load_factor", lambda: float(rng.choice([0.0, 0.1, 0.5, 1.0])))
    maybe(0.05, "enforce_hbm", lambda: bool(rng.integers(2)))
    maybe(0.1, "output_dtype", lambda: str(rng.choice(["FP16", "FP32", "BF16"])))
    maybe(0.03, "use_virtual_table", lambda: True)
    return found


def _draw_planner(rng: np.random.Generator) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if rng.random() < 0.9:
        found["batch_size"] = int(2 ** rng.uniform(0, 16))
    if rng.random() < 0.3:
        count = int(rng.choice([1, 1, 2]))
        found["proposer"] = [str(p) for p in rng.choice(list(PROPOSERS), count)]
    if rng.random() < 0.5:
        kind = str(rng.choice(["fixed", "fixed", "fixed", "heuristic"]))
        share = float(rng.choice([0.0, 0.0, 0.0, 0.15, 0.15, 0.15, 0.6, 1.0]))
        found["storage_reservation"] = [kind, share]
    if rng.random() < 0.15:
        found["cost_model"] = str(rng.choice(["auto", "cpu"]))
    return found


def topology_of(case: Case) -> Topology:
    """Return the devices of a case."""
    given = dict(case["topology"])
    custom = given.pop("custom", None)
    if custom is not None:
        given["custom_topology_data"] = CustomTopologyData(custom, given["world_size"])
    return Topology(**given)


def constraints_of(case: Case) -> dict[str, ParameterConstraints] | None:
    """Return what a case says of its tables."""
    known = {f.name for f in dataclasses.fields(ParameterConstraints)}
    found = {}
    for name, given in case["constraints"].items():
        fields = {k: v for k, v in given.items() if k in known}
        if "cache_load_factor" in given:
            fields["cache_params"] = CacheParams(load_factor=given["cache_load_factor"])
        if "output_dtype" in fields:
            fields["output_dtype"] = DataType[fields["output_dtype"]]
        found[name] = ParameterConstraints(**fields)
    return found or None


def planner_arguments(case: Case) -> dict[str, Any]:
    """Return arguments of TorchRec's planner, with parts of their own."""
    given = dict(case["planner"])
    given.pop("cost_model", None)
    found: dict[str, Any] = {
        "topology": topology_of(case),
        "constraints": constraints_of(case),
        "stats": [],
        "debug": False,
    }
    for name, value in given.items():
        if name == "proposer":
            value = [PROPOSERS[v]() for v in value]
        elif name == "storage_reservation":
            value = RESERVATIONS[value[0]](value[1])
        found[name] = value
    return found


def build_module(case: Case) -> nn.Module:
    """Return the model of a case; its weights are on no device."""
    root = nn.Module()
    for spec in case["modules"]:
        module: nn.Module = _build(spec)
        _attach(root, spec["path"], module)
    if "optimizer" in case:
        kind = OPTIMIZERS[case["optimizer"]]
        apply_optimizer_in_backward(kind, root.parameters(), {"lr": 0.1})
    return root


def _attach(root: nn.Module, path: str, module: nn.Module) -> None:
    *parents, name = path.split(".")
    for part in parents:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    root.add_module(name, module)


def _build(spec: dict[str, Any]) -> Any:
    kind, weighted = spec["kind"], bool(spec.get("weighted"))
    if kind == "ec":
        return EmbeddingCollection(
            tables=[
                EmbeddingConfig(
                    name=t["name"],
                    num_embeddings=t["rows"],
                    embedding_dim=t["dim"],
                    feature_names=t["features"],
                    data_type=DataType[t.get("data_type", "FP32")],
                )
                for t in spec["tables"]
            ],
            device=META,
        )
    tables = [
        bag_config(
            0,
            t["rows"],
            t["dim"],
            name=t["name"],
            feature_names=t["features"],
            data_type=DataType[t.get("data_type", "FP32")],
            pooling=PoolingType.MEAN if t.get("mean") else PoolingType.SUM,
        )
        for t in spec["tables"]
    ]
    if kind == "quant":
        for table in tables:
            table.data_type = DataType.INT8
        return QuantEmbeddingBagCollection(tables, weighted, META)
    ebc: EmbeddingBagCollection = bags(*tables, weighted=weighted)
    if kind == "mc":
        return ManagedCollisionEmbeddingBagCollection(
            ebc, managed_collisions(tables, spec.get("buckets", 1))
        )
    return ebc
