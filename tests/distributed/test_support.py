"""What is planned, and trains as unsharded tables do: module, sharding type, kernel.

Four gloo ranks in two nodes plan and train models with tables of every sharding type
that TorchRec's sharder of a module offers on GPUs, two steps long, and hold outputs and
weights of each table to those of unsharded ones. Where not all of them can be trained
together they are tried type by type, and what TorchRec then says is noted. The outcome
stands in docs/support.md; `make support-table` writes it.
"""

from __future__ import annotations

import copy
import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import (
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import (
    FeatureProcessedEmbeddingBagCollectionSharder,
)
from torchrec.distributed.fused_embeddingbag import FusedEmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import (
    ManagedCollisionEmbeddingBagCollectionSharder,
)
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.modules import mc_embedding_modules
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.builders import (
    CPU,
    FixedSearcher,
    Triples,
    bags,
    fused_bags,
    make_planner,
    managed_collisions,
)
from tests.distributed.ranks import NODE_SIZE, TWO_NODES, Jobs, Results
from tests.distributed.test_training import OnCpus
from tests.distributed.unsharded import gap, local_parts, loss_of
from torchrec_neuroshard.placement import ShardingTask

pytestmark = [pytest.mark.distributed, pytest.mark.nightly]

TYPES = (
    "table_wise",
    "column_wise",
    "table_column_wise",
    "row_wise",
    "table_row_wise",
    "grid_shard",
    "data_parallel",
)
KERNELS = ("fused", "dense", "fused_uvm", "fused_uvm_caching")
SPLIT = ("column_wise", "table_column_wise", "grid_shard")

LOCAL_BATCH, NUM_STEPS, NUM_ROWS, MAX_LENGTH = 8, 2, 12, 4
LEARNING_RATE = 0.3
WORLD_SIZE = TWO_NODES * NODE_SIZE
TABLES_PER_TYPE = WORLD_SIZE
"""So that what fails where a table is placed fails on every rank."""

DOCUMENT = Path(__file__).parents[2] / "docs/support.md"
BEGIN, END = "<!-- made by make support-table -->", "<!-- end -->"
NOTE_LENGTH = 160

Table = dict[str, Any]
Outcomes = dict[tuple[str, str], dict[str, Any]]
"""Model and kernel -> sharding type -> the worst that came of it on any rank."""


def table_type(name: str) -> str:
    """`part/type/number` is what tables are called."""
    return name.split("/")[1]


def tables_of(part: str, types: Sequence[str], pooled: bool) -> list[Table]:
    return [
        {
            "name": f"{part}/{kind}/{i}",
            "num_embeddings": NUM_ROWS,
            "embedding_dim": 32 if kind in SPLIT and pooled else 16,
            "feature_names": [f"{part}/{kind}/{i}"],
        }
        for kind in types
        for i in range(TABLES_PER_TYPE)
    ]


def bags_of(tables: Sequence[Table], weighted: bool = False) -> Any:
    configs = [EmbeddingBagConfig(**t) for t in tables]
    return bags(*configs, weighted=weighted, device=CPU)


def sequences_of(tables: Sequence[Table]) -> Any:
    return EmbeddingCollection(tables=[EmbeddingConfig(**t) for t in tables])


def own_optimizer_bags(tables: Sequence[Table]) -> Any:
    configs = [EmbeddingBagConfig(**t) for t in tables]
    return fused_bags(*configs, device=CPU, rate=LEARNING_RATE)


def processed_bags(tables: Sequence[Table]) -> Any:
    lengths = {f: MAX_LENGTH for t in tables for f in t["feature_names"]}
    processor = PositionWeightedModuleCollection(lengths)
    for parameter in processor.parameters():
        parameter.data.copy_(torch.linspace(0.5, 1.5, MAX_LENGTH))
    return FeatureProcessedEmbeddingBagCollection(bags_of(tables, True), processor)


def remapped(inner: Any, configs: Sequence[Any]) -> Any:
    outer = getattr(mc_embedding_modules, f"ManagedCollision{type(inner).__name__}")
    modules = managed_collisions(configs, WORLD_SIZE, NUM_STEPS + 1)
    return outer(inner, modules, return_remapped_features=True)


def managed_bags(tables: Sequence[Table]) -> Any:
    inner = bags_of(tables)
    return remapped(inner, inner.embedding_bag_configs())


def managed_sequences(tables: Sequence[Table]) -> Any:
    inner = sequences_of(tables)
    return remapped(inner, inner.embedding_configs())


@dataclass(frozen=True)
class Part:
    """A kind of module."""

    build: Callable[[Sequence[Table]], Any]
    sharder: type
    unsharded: Callable[[Sequence[Table]], Any] | None = None
    """What it is compared with, where not with itself."""
    pooled: bool = True
    weighted: bool = False
    renumbers: bool = False
    """Whether the module chooses the rows of ids."""
    own_optimizer: bool = False
    """Whether the module brings its optimizer."""


EBC = Part(bags_of, EmbeddingBagCollectionSharder)
WEIGHTED = Part(
    functools.partial(bags_of, weighted=True),
    EmbeddingBagCollectionSharder,
    weighted=True,
)
EC = Part(sequences_of, EmbeddingCollectionSharder, pooled=False)

MODELS: dict[str, dict[str, Part]] = {
    "EmbeddingBagCollection": {"bags": EBC},
    "EmbeddingBagCollection, weighted": {"bags": WEIGHTED},
    "EmbeddingBagCollection, variable batch": {"bags": EBC},
    "FeatureProcessedEmbeddingBagCollection": {
        "bags": Part(processed_bags, FeatureProcessedEmbeddingBagCollectionSharder)
    },
    "FusedEmbeddingBagCollection": {
        "bags": Part(
            own_optimizer_bags,
            FusedEmbeddingBagCollectionSharder,
            unsharded=bags_of,
            own_optimizer=True,
        )
    },
    "EmbeddingCollection": {"sequences": EC},
    "ManagedCollisionEmbeddingBagCollection": {
        "bags": Part(
            managed_bags,
            ManagedCollisionEmbeddingBagCollectionSharder,
            unsharded=bags_of,
            renumbers=True,
        )
    },
    "ManagedCollisionEmbeddingCollection": {
        "sequences": Part(
            managed_sequences,
            ManagedCollisionEmbeddingCollectionSharder,
            unsharded=sequences_of,
            pooled=False,
            renumbers=True,
        )
    },
    "three collections in one model": {"bags": EBC, "more": WEIGHTED, "sequences": EC},
}
VARIABLE_BATCH = "EmbeddingBagCollection, variable batch"


class Model(nn.Module):
    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)
        self.remapped: dict[str, Any] = {}
        """Features as their rows are numbered, of parts that collide ids."""

    def forward(self, batches: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        outputs: dict[str, torch.Tensor] = {}
        for name, part in self.parts.items():
            out = part(batches[name])
            if isinstance(out, tuple):
                out, ids = out
                self.remapped[name] = KeyedJaggedTensor(
                    keys=ids.keys(), values=ids.values(), lengths=ids.lengths()
                )
            found = out.to_dict() if hasattr(out, "to_dict") else out
            for key in batches[name].keys():
                value = found[key]
                outputs[key] = value if torch.is_tensor(value) else value.values()
        return outputs


@functools.cache
def offering(base: Any) -> Any:
    """TorchRec's sharder, but offering on CPUs what it offers on GPUs."""

    class Sharder(OnCpus, base):
        def compute_kernels(self, kind: str, compute_device_type: str) -> list[str]:
            return list(super().compute_kernels(kind, "cuda"))

    return Sharder()


def in_turn(task: ShardingTask) -> Triples:
    """Whole tables, and halves of those that may be split, on one rank each."""
    triples = []
    for i, table in enumerate(task.tables):
        width, first = table.embedding_dim, int(table.name.split("/")[-1])
        halves = 2 if task.min_widths[i] <= width // 2 else 1
        for half in range(halves):
            triples.append((i, width // halves, (first + half) % task.world_size))
    return triples


def planner_of(names: Sequence[str], kernel: str, varying: bool) -> Any:
    # TorchRec knows tables in the host's memory for GPUs alone.
    device = "cuda" if "uvm" in kernel else "cpu"
    return make_planner(
        topology=Topology(WORLD_SIZE, device, local_world_size=NODE_SIZE),
        batch_size=LOCAL_BATCH,
        constraints={
            name: ParameterConstraints(
                sharding_types=[table_type(name)],
                compute_kernels=[kernel],
                min_partition=16 if table_type(name) in SPLIT else None,
                batch_sizes=[(1 + LOCAL_BATCH) // 2] if varying else None,
            )
            for name in names
        },
        search=FixedSearcher(in_turn),
    )


def batches_of(
    keys: Sequence[str], seed: int, *, weighted: bool, varying: bool
) -> list[tuple[Any, Any]]:
    """For each rank, what it is fed, and the same with every sample in full."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, count: int) -> torch.Tensor:
        return torch.randint(low, high, (count,), generator=generator)

    pairs = []
    for _ in range(WORLD_SIZE):
        samples = [
            int(draw(1, LOCAL_BATCH + 1, 1)) if varying else LOCAL_BATCH for _ in keys
        ]
        lengths = [draw(0, MAX_LENGTH, n) for n in samples]
        values = [draw(0, NUM_ROWS, int(n.sum())) for n in lengths]
        weights = [torch.rand(len(v), generator=generator) for v in values]
        # The sample of each feature that a sample of the batch has.
        chosen = [
            draw(0, n, LOCAL_BATCH) if varying else torch.arange(n) for n in samples
        ]

        def in_full(
            parts: Sequence[torch.Tensor],
            lengths: Sequence[torch.Tensor] = lengths,
            chosen: Sequence[torch.Tensor] = chosen,
        ) -> torch.Tensor:
            bags = [
                torch.split(p, n.tolist()) for p, n in zip(parts, lengths, strict=True)
            ]
            each = zip(bags, chosen, strict=True)
            return torch.cat([own[i] for own, order in each for i in order.tolist()])

        full = KeyedJaggedTensor(
            keys=list(keys),
            values=in_full(values),
            weights=in_full(weights) if weighted else None,
            lengths=torch.cat([n[i] for n, i in zip(lengths, chosen, strict=True)]),
        )
        if not varying:
            pairs.append((full, full))
            continue
        fed = KeyedJaggedTensor(
            keys=list(keys),
            values=torch.cat(values),
            weights=torch.cat(weights) if weighted else None,
            lengths=torch.cat(lengths),
            stride_per_key_per_rank=[[n] for n in samples],
            inverse_indices=(list(keys), torch.stack(chosen)),
        )
        pairs.append((fed, full))
    return pairs


def by_table(state: Mapping[str, Any]) -> dict[str, Any]:
    return {k.split(".")[-2]: v for k, v in state.items() if k.endswith(".weight")}


def train(
    model: str, kernel: str, types: Sequence[str], rank: int, done: list[str]
) -> dict[str, Any]:
    """Plan, train and compare; returns the largest gaps of each type's tables."""
    torch.manual_seed(1)
    parts = MODELS[model]
    sharders = {p.sharder: offering(p.sharder) for p in parts.values()}
    tables = {
        name: tables_of(
            name,
            [t for t in types if is_offered(sharders[p.sharder], t, kernel)],
            p.pooled,
        )
        for name, p in parts.items()
    }
    names = [t["name"] for group in tables.values() for t in group]
    unsharded = Model(
        {n: (p.unsharded or p.build)(tables[n]) for n, p in parts.items()}
    )
    original = Model({n: p.build(tables[n]) for n, p in parts.items()})
    own_optimizer = any(p.own_optimizer for p in parts.values())
    if not own_optimizer:
        apply_optimizer_in_backward(
            torch.optim.SGD, table_weights(original), {"lr": LEARNING_RATE}
        )

    def draw(seed: int) -> dict[str, list[tuple[Any, Any]]]:
        return {
            name: batches_of(
                [t["name"] for t in tables[name]],
                seed,
                weighted=part.weighted,
                varying=model == VARIABLE_BATCH,
            )
            for name, part in parts.items()
        }

    planner = planner_of(names, kernel, model == VARIABLE_BATCH)
    plan = on_cpu(planner.collective_plan(original, list(sharders.values())))
    done.append("planned")
    placed = {n: s for m in plan.plan.values() for n, s in m.items()}
    sharded = DistributedModelParallel(
        original, device=CPU, plan=plan, sharders=list(sharders.values())
    )
    for seed in range((NUM_STEPS + 1) * any(p.renumbers for p in parts.values())):
        # Ids get rows of their own now, and keep them for the steps that follow.
        with torch.no_grad():
            sharded({n: batches[rank][0] for n, batches in draw(seed).items()})
    start = copy.deepcopy(by_table(unsharded.state_dict()))
    with torch.no_grad():
        for _, shard, part in local_parts(by_table(sharded.state_dict()), start):
            shard.copy_(part)
    # Replicas are trained outside of any kernel.
    replicas = [] if own_optimizer else table_weights(sharded, "data_parallel")
    optimizer = torch.optim.SGD(
        [*table_weights(unsharded), *replicas], lr=LEARNING_RATE
    )
    forward = dict.fromkeys(names, 0.0)
    for step in range(NUM_STEPS):
        pair = draw(100 + step)
        outputs = sharded({n: of_rank[rank][0] for n, of_rank in pair.items()})
        full = {n: of_rank[rank][1] for n, of_rank in pair.items()}
        fed: list[Any] = [None] * WORLD_SIZE
        dist.all_gather_object(fed, full | sharded.module.remapped)
        expected = [unsharded(of_rank) for of_rank in fed]
        for key, value in outputs.items():
            forward[key] = max(forward[key], gap(value, expected[rank][key]))
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(outputs, LOCAL_BATCH))
        # Gradients are means over the ranks.
        losses = [loss_of(e, LOCAL_BATCH) for e in expected]
        torch.autograd.backward(torch.stack(losses).mean())
        optimizer.step()
    want = {k: v.detach() for k, v in by_table(unsharded.state_dict()).items()}
    weights = dict.fromkeys(names, 0.0)
    for key, shard, part in local_parts(by_table(sharded.state_dict()), want):
        weights[key] = max(weights[key], gap(shard, part))
    return {
        kind: {
            "forward": max(forward[n] for n in of_type),
            "weights": max(weights[n] for n in of_type),
            "moved": min(gap(want[n], start[n]) for n in of_type),
            "placed": sorted(
                {(placed[n].sharding_type, placed[n].compute_kernel) for n in of_type}
            ),
        }
        for kind in types
        if (of_type := [n for n in names if table_type(n) == kind])
    }


def on_cpu(plan: Any) -> Any:
    """Return the plan, its tables on CPUs."""
    for module_plan in plan.plan.values():
        for sharding in module_plan.values():
            for shard in getattr(sharding.sharding_spec, "shards", ()):
                place = shard.placement
                shard.placement = type(place)(f"rank:{place.rank()}/cpu")
    return plan


def table_weights(module: nn.Module, kind: str = "") -> list[nn.Parameter]:
    named = module.named_parameters()
    return [p for n, p in named if n.endswith(".weight") and f"/{kind}" in n]


def is_offered(sharder: Any, kind: str, kernel: str) -> bool:
    return kind in sharder.sharding_types("cuda") and kernel in sharder.compute_kernels(
        kind, "cuda"
    )


def attempt(
    model: str, kernel: str, types: Sequence[str], rank: int
) -> tuple[dict[str, Any], str]:
    """What came of the types' tables, and the first rank's error, if there is one."""
    found: dict[str, Any] = {}
    done: list[str] = []
    error = ""
    try:
        found = train(model, kernel, types, rank, done)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    errors = [""] * WORLD_SIZE
    dist.all_gather_object(errors, error)
    error = next(filter(None, errors), "")
    if error:
        found = {kind: {"planned": bool(done), "error": error} for kind in types}
    return found, error


def run_model(model: str, kernel: str, rank: int) -> dict[str, Any]:
    """Train all types at once; where that fails, one after another."""
    types = offered_types(model, kernel)
    found, error = attempt(model, kernel, types, rank)
    if error and len(types) > 1:
        for kind in types:
            found |= attempt(model, kernel, [kind], rank)[0]
    return found


def offered_types(model: str, kernel: str) -> list[str]:
    """Sharding types that TorchRec has for some part of the model, with a kernel."""
    sharders = [offering(part.sharder) for part in MODELS[model].values()]
    return [t for t in TYPES if any(is_offered(s, t, kernel) for s in sharders)]


def rank_jobs(num_nodes: int, rank: int, _: Path) -> Jobs:
    if num_nodes != TWO_NODES:
        return {}
    return {
        f"{model}: {kernel}": functools.partial(run_model, model, kernel, rank)
        for model in MODELS
        for kernel in KERNELS
        if offered_types(model, kernel)
    }


@pytest.fixture(scope="module")
def outcomes(ranks: Results) -> Outcomes:
    return {
        (model, kernel): merged(ranks(__name__, TWO_NODES, f"{model}: {kernel}"))
        for model in MODELS
        for kernel in KERNELS
        if offered_types(model, kernel)
    }


def merged(of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first = of_ranks[0]
    return {
        kind: outcome
        if "error" in outcome
        else {
            "forward": max(r[kind]["forward"] for r in of_ranks),
            "weights": max(r[kind]["weights"] for r in of_ranks),
            "moved": min(r[kind]["moved"] for r in of_ranks),
            "placed": outcome["placed"],
        }
        for kind, outcome in first.items()
    }


def test_trained_tables_equal_unsharded_ones(outcomes: Outcomes) -> None:
    trained = 0
    for (model, kernel), by_type in outcomes.items():
        for kind, outcome in by_type.items():
            if "error" in outcome:
                continue
            case = f"{model}, {kernel}, {kind}: {outcome}"
            assert outcome["placed"] == [[kind, kernel]], case
            assert outcome["forward"] < 1e-5 and outcome["weights"] < 1e-5, case
            assert outcome["moved"] > 1e-2, case  # the steps did something
            trained += 1
    assert trained > 50


def rendered(outcomes: Outcomes) -> str:
    """The table, with the errors below it."""
    notes: dict[str, int] = {}

    def cell(outcome: Mapping[str, Any] | None) -> str:
        if outcome is None:
            return "–"
        if "error" not in outcome:
            return "trained"
        found = re.sub(r"\b\d+", "N", outcome["error"]).replace("`", "'")
        text = " ".join(found.split())[:NOTE_LENGTH]
        word = "planned" if outcome["planned"] else "refused"
        return f"{word} [{notes.setdefault(text, len(notes) + 1)}]"

    lines = [
        f"| module | kernel | {' | '.join(t.replace('_', '-') for t in TYPES)} |",
        f"| --- | --- |{' --- |' * len(TYPES)}",
    ]
    for (model, kernel), by_type in outcomes.items():
        cells = [cell(by_type.get(kind)) for kind in TYPES]
        lines.append(f"| {model} | `{kernel}` | {' | '.join(cells)} |")
    lines.append("")
    lines += [f"{number}. `{text}`" for text, number in notes.items()]
    return "\n".join(lines)


def test_table_in_the_documentation_is_what_ran(outcomes: Outcomes) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    shown, tail = rest.split(END)
    found = f"\n{rendered(outcomes)}\n"
    if "WRITE_SUPPORT_TABLE" in os.environ:
        DOCUMENT.write_text(head + BEGIN + found + END + tail, encoding="utf-8")
        return
    assert shown == found, "the table is out of date: make support-table"
