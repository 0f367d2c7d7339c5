"""What is planned, and trains as unsharded tables do: module and sharding type.

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
from torchrec.distributed.pec_embedding import PECEmbeddingCollectionSharder
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.modules import mc_embedding_modules
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.modules.pec_embedding_modules import PECEmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.builders import (
    CPU,
    FixedSearcher,
    Triples,
    bags,
    fused_bags,
    make_planner,
)
from tests.distributed.ranks import NODE_SIZE, TWO_NODES, Jobs, Results
from tests.distributed.test_training import OnCpus
from tests.distributed.unsharded import draw_batch, gap, local_parts, loss_of
from torchrec_neuroshard.costs.task import ShardingTask

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
SPLIT = ("column_wise", "table_column_wise", "grid_shard")

LOCAL_BATCH, NUM_STEPS, NUM_ROWS, MAX_LENGTH = 8, 2, 12, 4
LEARNING_RATE = 0.3
WORLD_SIZE = TWO_NODES * NODE_SIZE

DOCUMENT = Path(__file__).parents[2] / "docs/support.md"
BEGIN, END = "<!-- made by make support-table -->", "<!-- end -->"

Outcomes = dict[str, dict[str, Any]]
"""Model -> sharding type -> what came of it on each rank, or an error."""


def table_type(name: str) -> str:
    """`part/type/number` is what tables are called."""
    return name.split("/")[1]


def bags_of(tables: Sequence[Any]) -> Any:
    return bags(*tables, device=CPU)


def weighted_bags(tables: Sequence[Any]) -> Any:
    return bags(*tables, weighted=True, device=CPU)


def sequences_of(tables: Sequence[Any]) -> Any:
    return EmbeddingCollection(tables=list(tables))


def prioritised(tables: Sequence[Any]) -> Any:
    return PECEmbeddingCollection(sequences_of(tables))


def own_optimizer_bags(tables: Sequence[Any]) -> Any:
    return fused_bags(*tables, device=CPU, rate=LEARNING_RATE)


def processed_bags(tables: Sequence[Any]) -> Any:
    lengths = {f: MAX_LENGTH for t in tables for f in t.feature_names}
    processor = PositionWeightedModuleCollection(lengths)
    for parameter in processor.parameters():
        parameter.data.copy_(torch.linspace(0.5, 1.5, MAX_LENGTH))
    return FeatureProcessedEmbeddingBagCollection(weighted_bags(tables), processor)


def managed(plain: Callable[[Sequence[Any]], Any], tables: Sequence[Any]) -> Any:
    inner = plain(tables)
    outer = getattr(mc_embedding_modules, f"ManagedCollision{type(inner).__name__}")
    modules = {
        t.name: MCHManagedCollisionModule(
            zch_size=t.num_embeddings,
            device=CPU,
            eviction_policy=DistanceLFU_EvictionPolicy(),
            eviction_interval=NUM_STEPS + 1,
            buckets=WORLD_SIZE,
        )
        for t in tables
    }
    collection = ManagedCollisionCollection(modules, embedding_configs=list(tables))
    return outer(inner, collection, return_remapped_features=True)


@dataclass(frozen=True)
class Part:
    """A kind of module, and the unsharded one that it is compared with."""

    kind: str
    build: Callable[[Sequence[Any]], Any]
    unsharded: Callable[[Sequence[Any]], Any]
    renumbers: bool = False
    """Whether the module chooses the rows of ids."""

    def tables(self, number: int, types: Sequence[str]) -> list[Any]:
        """Tables of those types that TorchRec has for the module."""
        offered = sharder_of(self.kind).sharding_types("cuda")
        pooled = self.unsharded is not sequences_of
        config = EmbeddingBagConfig if pooled else EmbeddingConfig
        return [
            config(
                name=(name := f"{number}/{kind}/{i}"),
                num_embeddings=NUM_ROWS,
                embedding_dim=32 if kind in SPLIT and pooled else 16,
                feature_names=[name],
            )
            for kind in types
            if kind in offered
            for i in range(WORLD_SIZE)  # what fails for one rank fails for all
        ]


@functools.cache
def sharder_of(kind: str) -> Any:
    """TorchRec's sharder, but offering on CPUs what it offers on GPUs."""
    base: Any = next(
        type(s)
        for s in (*get_default_sharders(), PECEmbeddingCollectionSharder())
        if s.module_type.__name__ == kind
    )

    class Sharder(OnCpus, base): ...

    return Sharder()


BAGS = Part("EmbeddingBagCollection", bags_of, bags_of)
WEIGHTED = Part("EmbeddingBagCollection", weighted_bags, weighted_bags)
SEQUENCES = Part("EmbeddingCollection", sequences_of, sequences_of)
ALONE = [
    Part("FeatureProcessedEmbeddingBagCollection", processed_bags, processed_bags),
    Part("FusedEmbeddingBagCollection", own_optimizer_bags, bags_of),
    SEQUENCES,
    Part("PECEmbeddingCollection", prioritised, sequences_of),
    *(
        Part(
            f"ManagedCollision{part.kind}",
            functools.partial(managed, part.build),
            part.unsharded,
            renumbers=True,
        )
        for part in (BAGS, SEQUENCES)
    ),
]
VARIABLE_BATCH = "EmbeddingBagCollection, variable batch"
MODELS = {
    "EmbeddingBagCollection": [BAGS],
    "EmbeddingBagCollection, weighted": [WEIGHTED],
    VARIABLE_BATCH: [BAGS],
    **{part.kind: [part] for part in ALONE},
    "three collections in one model": [BAGS, WEIGHTED, SEQUENCES],
}


class Model(nn.Module):
    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.read: list[Any] = []
        """The last batches, ids as their rows are numbered."""

    def forward(self, batches: Sequence[Any]) -> dict[str, torch.Tensor]:
        outputs: dict[str, torch.Tensor] = {}
        self.read = list(batches)
        for number, (part, batch) in enumerate(zip(self.parts, batches, strict=True)):
            out = part(batch)
            if isinstance(out, tuple):
                out, ids = out
                self.read[number] = KeyedJaggedTensor(
                    keys=ids.keys(), values=ids.values(), lengths=ids.lengths()
                )
            found = out.to_dict() if hasattr(out, "to_dict") else out
            for key in batch.keys():
                value = found[key]
                outputs[key] = value if torch.is_tensor(value) else value.values()
        return outputs


def in_turn(task: ShardingTask) -> Triples:
    """Whole tables, and halves of those that may be split, on one rank each."""
    triples = []
    for ways in task.ways:
        table = task.tables[ways[0]]
        width, first = table.embedding_dim, int(table.name.split("/")[-1])
        ranks = task.rules.ranks(ways[0])  # table-column-wise ones are for a node
        halves = 2 if task.min_widths[ways[0]] <= width // 2 else 1
        for half in range(halves):
            rank = ranks[(first + half) % len(ranks)]
            triples.append((ways[0], width // halves, rank))
    return triples


def kernel_of(kind: str) -> str:
    return "dense" if kind == "data_parallel" else "fused"


def varied(batch: KeyedJaggedTensor, rank: int) -> KeyedJaggedTensor:
    """The first samples of each feature, one to all, which the others repeat."""
    keys, parts = batch.keys(), batch.to_dict()
    counts = [1 + (i + rank) % LOCAL_BATCH for i in range(len(keys))]
    lengths = [parts[k].lengths()[:n] for k, n in zip(keys, counts, strict=True)]
    values = [
        parts[k].values()[: int(n.sum())] for k, n in zip(keys, lengths, strict=True)
    ]
    repeats = torch.stack([torch.arange(LOCAL_BATCH) % n for n in counts])
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.cat(values),
        lengths=torch.cat(lengths),
        stride_per_key_per_rank=[[n] for n in counts],
        inverse_indices=(keys, repeats),
    )


def by_table(state: Mapping[str, Any]) -> dict[str, Any]:
    return {k.split(".")[-2]: v for k, v in state.items() if k.endswith(".weight")}


def table_weights(module: nn.Module, kind: str = "") -> list[nn.Parameter]:
    named = module.named_parameters()
    return [p for n, p in named if n.endswith(".weight") and f"/{kind}" in n]


def train(
    model: str, types: Sequence[str], rank: int, done: list[str]
) -> dict[str, Any]:
    """Plan, train and compare; returns the largest gaps of each type's tables."""
    torch.manual_seed(1)
    parts, varying = MODELS[model], model == VARIABLE_BATCH
    sharders = [sharder_of(kind) for kind in sorted({p.kind for p in parts})]
    tables = [p.tables(n, types) for n, p in enumerate(parts)]
    names = [t.name for of_part in tables for t in of_part]
    unsharded, original = (
        Model([build(t) for build, t in zip(builds, tables, strict=True)])
        for builds in ([p.unsharded for p in parts], [p.build for p in parts])
    )
    own_optimizer = any(p.build is own_optimizer_bags for p in parts)
    if not own_optimizer:
        apply_optimizer_in_backward(
            torch.optim.SGD, table_weights(original), {"lr": LEARNING_RATE}
        )

    def draw(seed: int) -> list[Any]:
        found = [
            draw_batch(
                [t.name for t in of_part],
                LOCAL_BATCH,
                NUM_ROWS,
                WORLD_SIZE * seed + rank,
                weighted=part.unsharded is weighted_bags,
            )
            for part, of_part in zip(parts, tables, strict=True)
        ]
        return [varied(batch, rank) for batch in found] if varying else found

    planner = make_planner(
        WORLD_SIZE,
        topology_arguments={"local_world_size": NODE_SIZE},
        batch_size=LOCAL_BATCH,
        constraints={
            name: ParameterConstraints(
                sharding_types=[kind := table_type(name)],
                compute_kernels=[kernel_of(kind)],
                min_partition=16 if kind in SPLIT else None,
                batch_sizes=[(1 + LOCAL_BATCH) // 2] if varying else None,
            )
            for name in names
        },
        search=FixedSearcher(in_turn),
    )
    plan = planner.collective_plan(original, sharders)
    done.append("planned")
    placed = {
        n: (s.sharding_type, s.compute_kernel)
        for m in plan.plan.values()
        for n, s in m.items()
    }
    sharded = DistributedModelParallel(
        original, device=CPU, plan=plan, sharders=sharders
    )
    for seed in range((NUM_STEPS + 1) * any(p.renumbers for p in parts)):
        # Ids get rows of their own now, and keep them for the steps that follow.
        with torch.no_grad():
            sharded(draw(seed))
    start = copy.deepcopy(by_table(unsharded.state_dict()))
    with torch.no_grad():
        for _, shard, part in local_parts(by_table(sharded.state_dict()), start):
            shard.copy_(part)
    # Replicas are trained outside of any kernel.
    replicas = [] if own_optimizer else table_weights(sharded, "data_parallel")
    optimizer = torch.optim.SGD(
        [*table_weights(unsharded), *replicas], lr=LEARNING_RATE
    )
    off = dict.fromkeys(names, 0.0)
    for step in range(NUM_STEPS):
        outputs = sharded(draw(100 + step))
        fed: list[Any] = [None] * WORLD_SIZE
        dist.all_gather_object(fed, sharded.module.read)
        expected = [unsharded(of_rank) for of_rank in fed]
        for key, value in outputs.items():
            off[key] = max(off[key], gap(value, expected[rank][key]))
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(outputs, LOCAL_BATCH))
        # Gradients are means over the ranks.
        losses = [loss_of(e, LOCAL_BATCH) for e in expected]
        torch.autograd.backward(torch.stack(losses).mean())
        optimizer.step()
    want = {k: v.detach() for k, v in by_table(unsharded.state_dict()).items()}
    for key, shard, part in local_parts(by_table(sharded.state_dict()), want):
        off[key] = max(off[key], gap(shard, part))
    return {
        kind: {
            "off": max(off[n] for n in of_type),
            "moved": min(gap(want[n], start[n]) for n in of_type),
            "placed": sorted({placed[n] for n in of_type}),
        }
        for kind in types
        if (of_type := [n for n in names if table_type(n) == kind])
    }


def attempt(model: str, types: Sequence[str], rank: int) -> dict[str, Any]:
    """What came of the types' tables on all ranks, or the first rank's error."""
    done: list[str] = []
    found: Any
    try:
        found = train(model, types, rank, done)
    except Exception as caught:
        found = f"{'planned' if done else 'refused'} {type(caught).__name__}: {caught}"
    of_ranks: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(of_ranks, found)
    errors = [f for f in of_ranks if isinstance(f, str)]
    return {k: errors[0] if errors else [f[k] for f in of_ranks] for k in types}


def run_model(model: str, rank: int) -> dict[str, Any]:
    """Train all types of a kernel at once; where that fails, one by one."""
    outcomes: dict[str, Any] = {}
    offered = [sharder_of(p.kind).sharding_types("cuda") for p in MODELS[model]]
    for kernel in ("fused", "dense"):
        of_kernel = [t for t in TYPES if kernel_of(t) == kernel]
        if types := [t for t in of_kernel if any(t in o for o in offered)]:
            outcomes |= attempt(model, types, rank)
            if isinstance(outcomes[types[0]], str) and len(types) > 1:
                for kind in types:
                    outcomes |= attempt(model, [kind], rank)
    return outcomes


def rank_jobs(num_nodes: int, rank: int, _: Path) -> Jobs:
    if num_nodes != TWO_NODES:
        return {}
    return {model: functools.partial(run_model, model, rank) for model in MODELS}


@pytest.fixture(scope="module")
def outcomes(ranks: Results) -> Outcomes:
    return {model: ranks(__name__, TWO_NODES, model)[0] for model in MODELS}


def test_trained_tables_equal_unsharded_ones(outcomes: Outcomes) -> None:
    trained = 0
    for model, by_type in outcomes.items():
        for kind, found in by_type.items():
            case = f"{model}, {kind}: {found}"
            for of_rank in () if isinstance(found, str) else found:
                assert of_rank["placed"] == [[kind, kernel_of(kind)]], case
                assert of_rank["off"] < 1e-5, case
                assert of_rank["moved"] > 1e-2, case  # the steps did something
                trained += 1
    assert trained > 30 * WORLD_SIZE


def test_table_in_the_documentation_is_what_ran(outcomes: Outcomes) -> None:
    """The table, with the errors below it."""
    notes: dict[str, int] = {}

    def cell(found: Any) -> str:
        if not isinstance(found, str):
            return "trained" if found else "–"
        word, _, error = found.partition(" ")
        words = re.sub(r"\b\d+", "N", error).replace("`", "'").split()
        text = " ".join(words)[:160]
        return f"{word} [{notes.setdefault(text, len(notes) + 1)}]"

    lines = [
        f"| module | {' | '.join(t.replace('_', '-') for t in TYPES)} |",
        f"| --- |{' --- |' * len(TYPES)}",
    ]
    for model, by_type in outcomes.items():
        cells = [cell(by_type.get(kind)) for kind in TYPES]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    lines.append("")
    lines += [f"{number}. `{text}`" for text, number in notes.items()]
    text = DOCUMENT.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    shown, tail = rest.split(END)
    found = "\n".join(["", *lines, ""])
    if "WRITE_SUPPORT_TABLE" in os.environ:
        DOCUMENT.write_text(head + BEGIN + found + END + tail, encoding="utf-8")
        return
    assert shown == found, "the table is out of date: make support-table"
