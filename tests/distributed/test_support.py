"""What is planned, and trains as unsharded tables do: module and sharding type.

Two gloo ranks of one node, and four of two nodes, plan and train models with tables of
every sharding type that TorchRec's sharder of a module offers on GPUs. They hold
outputs and weights of each table to those of unsharded ones. The steps have bags of
none to three ids, bags of one id, and a rank without any id. Every other table has two
features. Where not all types can be trained together they are tried one by one, and
what the planner says is noted. The outcome stands in docs/support.md; `make
support-table` writes it. Every day, two ranks train what the planner may choose without
constraints.
"""

from __future__ import annotations

import copy
import dataclasses
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
from torchrec.distributed.embedding_tower_sharding import EmbeddingTowerSharder
from torchrec.distributed.itep_embeddingbag import ITEPEmbeddingBagCollectionSharder
from torchrec.distributed.pec_embedding import PECEmbeddingCollectionSharder
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.modules import mc_embedding_modules
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_tower import EmbeddingTower
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.itep_embedding_modules import ITEPEmbeddingBagCollection
from torchrec.modules.itep_modules import GenericITEPModule
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
from tests.distributed.ranks import NODE_SIZE, ONE_NODE, TWO_NODES, Jobs, Results
from tests.distributed.test_training import OnCpus
from tests.distributed.unsharded import draw_batch, gap, local_parts, train_step
from torchrec_neuroshard.costs.task import ShardingTask

pytestmark = pytest.mark.distributed

TYPES = (
    "table_wise",
    "column_wise",
    "table_column_wise",
    "row_wise",
    "table_row_wise",
    "grid_shard",
    "data_parallel",
)
UNASKED = "unasked"
"""Stands for a sharding type: the planner chooses, without constraints."""
SPLIT = ("column_wise", "table_column_wise", "grid_shard")

LOCAL_BATCH, NUM_ROWS, MAX_LENGTH = 8, 12, 4
LEARNING_RATE = 0.3
MANY, ONE, NONE = (0, 3), (1, 1), (0, 0)
"""Least and most ids of a bag."""
STEPS = ((MANY, MANY), (ONE, ONE), (NONE, MANY))
"""Ids of the first rank's bags, and of the others', in each step."""
MOST_RANKS = TWO_NODES * NODE_SIZE

DOCUMENT = Path(__file__).parents[2] / "docs/support.md"
BEGIN, END = "<!-- made by make support-table -->", "<!-- end -->"

NUM_WARM_UP = len(STEPS) + 1
"""Batches until managed ids keep their rows."""

Outcomes = dict[str, dict[str, Any]]
"""Model -> sharding type -> what came of it on each rank, or an error."""


SECOND = "+"
"""What a table's second feature has at its end."""


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


def pruned_bags(tables: Sequence[Any]) -> Any:
    rows = {t.name: 2 * NUM_ROWS for t in tables}
    return ITEPEmbeddingBagCollection(bags_of(tables), GenericITEPModule(rows))


class Joined(nn.Module):
    """What a tower computes from its tables."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, tables: Any) -> torch.Tensor:
        found: torch.Tensor = tables.values() * self.scale
        return found


def tower(tables: Sequence[Any]) -> Any:
    return EmbeddingTower(bags_of(tables), Joined())


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
            eviction_interval=NUM_WARM_UP,
            buckets=MOST_RANKS,
        )
        for t in tables
    }
    collection = ManagedCollisionCollection(modules, embedding_configs=list(tables))
    return outer(inner, collection, return_remapped_features=True)


@dataclass(frozen=True)
class Part:
    """A kind of module, and the unsharded module that it is compared with."""

    kind: str
    build: Callable[[Sequence[Any]], Any]
    unsharded: Callable[[Sequence[Any]], Any]
    renumbers: bool = False
    """Whether the module chooses the rows of ids."""
    pooling: PoolingType = PoolingType.SUM

    def tables(self, number: int, types: Sequence[str]) -> list[Any]:
        """Return tables of the types that TorchRec offers for the module."""
        offered = sharder_of(self.kind).sharding_types("cuda")
        pooled = self.unsharded is not sequences_of
        config = EmbeddingBagConfig if pooled else EmbeddingConfig
        return [
            config(
                name=(name := f"{number}/{kind}/{i}"),
                num_embeddings=NUM_ROWS,
                embedding_dim=32 if kind in (*SPLIT, UNASKED) and pooled else 16,
                feature_names=[name, name + SECOND][: 1 + i % 2],
                **({"pooling": self.pooling} if pooled else {}),
            )
            for kind in types
            if kind in (*offered, UNASKED)
            # What fails for one rank fails for all, and every way has a table.
            for i in range(2 * MOST_RANKS if kind == UNASKED else MOST_RANKS)
        ]


OTHER_SHARDERS: list[Any] = [
    PECEmbeddingCollectionSharder(),
    ITEPEmbeddingBagCollectionSharder(),
    EmbeddingTowerSharder(),
]
"""TorchRec's sharders that are not its default ones."""


@functools.cache
def sharder_of(kind: str) -> Any:
    """TorchRec's sharder, but offering on CPUs what it offers on GPUs."""
    base: Any = next(
        type(s)
        for s in (*get_default_sharders(), *OTHER_SHARDERS)
        if s.module_type.__name__ == kind
    )

    class Sharder(OnCpus, base): ...

    return Sharder()


BAGS = Part("EmbeddingBagCollection", bags_of, bags_of)
MEANS = dataclasses.replace(BAGS, pooling=PoolingType.MEAN)
WEIGHTED = Part("EmbeddingBagCollection", weighted_bags, weighted_bags)
SEQUENCES = Part("EmbeddingCollection", sequences_of, sequences_of)
PROCESSED = Part(
    "FeatureProcessedEmbeddingBagCollection", processed_bags, processed_bags
)
FUSED = Part("FusedEmbeddingBagCollection", own_optimizer_bags, bags_of)
ALONE = [
    PROCESSED,
    FUSED,
    Part("ITEPEmbeddingBagCollection", pruned_bags, bags_of),
    Part("EmbeddingTower", tower, tower),
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
VARIABLE = ", variable batch"
MODELS = {
    "EmbeddingBagCollection": [BAGS],
    "EmbeddingBagCollection, mean": [MEANS],
    "EmbeddingBagCollection, weighted": [WEIGHTED],
    **{part.kind: [part] for part in ALONE},
    "three collections in one model": [BAGS, WEIGHTED, SEQUENCES],
    "EmbeddingBagCollection" + VARIABLE: [BAGS],
    "EmbeddingBagCollection, mean" + VARIABLE: [MEANS],
    "EmbeddingBagCollection, weighted" + VARIABLE: [WEIGHTED],
    **{part.kind + VARIABLE: [part] for part in (PROCESSED, FUSED, SEQUENCES)},
}


class Model(nn.Module):
    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.read: list[Any] = []
        """The last batches, with ids mapped to rows."""

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


class InTurn(FixedSearcher):
    """Takes each way in turn, on each rank or node in turn."""

    takes_choices = True

    def __init__(self) -> None:
        super().__init__(self.placed)

    def placed(self, task: ShardingTask) -> Triples:
        """Return all shards; tables that may be split are halved."""
        triples = []
        for ways in task.ways:
            number = int(task.tables[ways[0]].name.split("/")[-1])
            way, first = ways[number % len(ways)], number // len(ways)
            size = task.block_size(way)
            width, least = task.tables[way].embedding_dim, task.min_widths[way]
            part = max(least, width // 2) if size == 1 else least
            ranks = task.rules.ranks(way)  # table-column-wise ones are for a node
            for block in range(width // part):
                start = size * (first + block) % len(ranks)
                triples += [(way, part, r) for r in ranks[start : start + size]]
        return triples


def kernel_of(kind: str) -> str:
    return "dense" if kind == "data_parallel" else "fused"


def limits_of(kind: str) -> dict[str, Any]:
    """Return constraints to one sharding type, or to none for `UNASKED`."""
    limits: dict[str, Any] = {"min_partition": 16} if kind in SPLIT else {}
    if kind != UNASKED:
        limits |= {"sharding_types": [kind], "compute_kernels": [kernel_of(kind)]}
    return limits


def varied(batch: KeyedJaggedTensor, rank: int) -> KeyedJaggedTensor:
    """Keep the first samples of each feature; the other samples repeat them."""
    keys, parts = batch.keys(), batch.to_dict()
    counts = [1 + (i + rank) % LOCAL_BATCH for i in range(len(keys))]
    lengths = [parts[k].lengths()[:n] for k, n in zip(keys, counts, strict=True)]
    totals = [(k, int(n.sum())) for k, n in zip(keys, lengths, strict=True)]
    weights = batch.weights_or_none() is not None
    repeats = torch.stack([torch.arange(LOCAL_BATCH) % n for n in counts])
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.cat([parts[k].values()[:n] for k, n in totals]),
        lengths=torch.cat(lengths),
        weights=torch.cat([parts[k].weights()[:n] for k, n in totals])
        if weights
        else None,
        stride_per_key_per_rank=[[n] for n in counts],
        inverse_indices=(keys, repeats),
    )


def whole(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return the batch with the repeated samples of each feature written out."""
    if not batch.variable_stride_per_key():
        return batch
    keys, repeats = batch.inverse_indices()
    values, lengths, weights = [], [], []
    for key, jagged in batch.to_dict().items():
        rows, has = repeats[keys.index(key)].tolist(), jagged.weights_or_none()
        bounds = jagged.offsets().tolist()
        picked = [torch.arange(bounds[r], bounds[r + 1]) for r in rows]
        values.append(jagged.values()[torch.cat(picked)])
        lengths.append(jagged.lengths()[rows])
        if has is not None:
            weights.append(has[torch.cat(picked)])
    return KeyedJaggedTensor(
        keys=batch.keys(),
        values=torch.cat(values),
        lengths=torch.cat(lengths),
        weights=torch.cat(weights) if weights else None,
    )


def by_table(state: Mapping[str, Any]) -> dict[str, Any]:
    return {k.split(".")[-2]: v for k, v in state.items() if k.endswith(".weight")}


def table_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    named = module.named_parameters()
    return {n.split(".")[-2]: p for n, p in named if n.endswith(".weight")}


def train(
    model: str, types: Sequence[str], rank: int, done: list[str]
) -> dict[str, Any]:
    """Plan, train and compare; returns the largest gaps of each type's tables."""
    torch.manual_seed(1)
    parts, varying = MODELS[model], model.endswith(VARIABLE)
    sharders = [sharder_of(kind) for kind in sorted({p.kind for p in parts})]
    tables = [p.tables(n, types) for n, p in enumerate(parts)]
    names = [t.name for of_part in tables for t in of_part]
    features = {t.name: len(t.feature_names) for of_part in tables for t in of_part}
    world_size = dist.get_world_size()
    unsharded, original = (
        Model([build(t) for build, t in zip(builds, tables, strict=True)])
        for builds in ([p.unsharded for p in parts], [p.build for p in parts])
    )
    own_optimizer = any(p.build is own_optimizer_bags for p in parts)
    if not own_optimizer:
        apply_optimizer_in_backward(
            torch.optim.SGD, table_weights(original).values(), {"lr": LEARNING_RATE}
        )

    def draw(seed: int, num_ids: tuple[int, int] = MANY) -> list[Any]:
        found = [
            draw_batch(
                [f for t in of_part for f in t.feature_names],
                LOCAL_BATCH,
                NUM_ROWS,
                world_size * seed + rank,
                weighted=part.unsharded is weighted_bags,
                num_ids=num_ids,
            )
            for part, of_part in zip(parts, tables, strict=True)
        ]
        return [varied(batch, rank) for batch in found] if varying else found

    planner = make_planner(
        world_size,
        topology_arguments={"local_world_size": NODE_SIZE},
        batch_size=LOCAL_BATCH,
        constraints={
            name: ParameterConstraints(
                **limits_of(table_type(name)),
                batch_sizes=[(1 + LOCAL_BATCH) // 2] * count if varying else None,
                pooling_factors=[1.0] * count,
            )
            for name, count in features.items()
        },
        search=InTurn(),
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
    for seed in range(NUM_WARM_UP * any(p.renumbers for p in parts)):
        # Ids get rows of their own now, and keep them for the steps that follow.
        with torch.no_grad():
            sharded(draw(seed))
    start = copy.deepcopy(by_table(unsharded.state_dict()))
    with torch.no_grad():
        for _, shard, part in local_parts(by_table(sharded.state_dict()), start):
            shard.copy_(part)
    # Replicas are trained outside of any kernel.
    copied = {name for name, (kind, _) in placed.items() if kind == "data_parallel"}
    replicas = [p for n, p in table_weights(sharded).items() if n in copied]
    optimizer = torch.optim.SGD(
        [*table_weights(unsharded).values(), *replicas], lr=LEARNING_RATE
    )
    off = dict.fromkeys(names, 0.0)
    for step, num_ids in enumerate(STEPS):
        outputs = sharded(draw(100 + step, num_ids[min(rank, 1)]))
        fed: list[Any] = [None] * world_size
        dist.all_gather_object(fed, [whole(b) for b in sharded.module.read])
        expected = [unsharded(of_rank) for of_rank in fed]
        gaps = train_step(outputs, expected, rank, optimizer, LOCAL_BATCH)
        for key, value in gaps.items():
            table = key.removesuffix(SECOND)
            off[table] = max(off[table], value)
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
    of_ranks: list[Any] = [None] * dist.get_world_size()
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


DAILY = [f"{UNASKED} {ONE_NODE} {model}" for model in MODELS]


def rank_jobs(num_nodes: int, rank: int, _: Path) -> Jobs:
    jobs: Jobs = {}
    for model in MODELS:
        jobs[model] = functools.partial(run_model, model, rank)
        unasked = functools.partial(attempt, model, [UNASKED], rank)
        jobs[f"{UNASKED} {num_nodes} {model}"] = unasked
    return jobs


ON_GPUS_ALONE = {
    "ITEPEmbeddingBagCollection": "on GPUs only",
    "EmbeddingTower": "on GPUs only",
    "EmbeddingCollection" + VARIABLE: "need one batch size",
}
"""Models that CPUs do not train -> what the planner says."""
BY_COLUMNS, REPLICAS = ("column_wise", "fused"), ("data_parallel", "dense")
BY_ROWS, WHOLE = ("row_wise", "fused"), ("table_wise", "fused")
CHOSEN = {
    "EmbeddingBagCollection": {BY_COLUMNS, REPLICAS, BY_ROWS},
    "EmbeddingBagCollection, mean": {BY_COLUMNS, REPLICAS},
    "FusedEmbeddingBagCollection": {BY_COLUMNS, BY_ROWS},
    "EmbeddingCollection": {WHOLE, BY_ROWS},
    "three collections in one model": {BY_COLUMNS, REPLICAS, BY_ROWS, WHOLE},
    "EmbeddingBagCollection" + VARIABLE: {BY_COLUMNS},
}
"""Some models -> all that the planner may choose for them in one node of CPUs."""


@pytest.mark.parametrize(
    "num_nodes", [ONE_NODE, pytest.param(TWO_NODES, marks=pytest.mark.nightly)]
)
def test_what_is_chosen_without_constraints_trains(
    ranks: Results, num_nodes: int
) -> None:
    """Every way that the search may take, all of them in one module."""
    for model in MODELS:
        found = ranks(__name__, num_nodes, f"{UNASKED} {num_nodes} {model}")[0][UNASKED]
        if text := ON_GPUS_ALONE.get(model):
            assert found.startswith("refused ConfigError") and text in found, found
            continue
        check_trained(found, f"{model}: {found}")
        placed = {tuple(kind) for kind in found[0]["placed"]}
        expected = CHOSEN.get(model, placed)
        if num_nodes == ONE_NODE:
            assert placed == expected, model
        else:  # the types of several nodes as well
            assert placed >= expected, model


def check_trained(found: Any, case: str) -> None:
    assert not isinstance(found, str), case
    for of_rank in found:
        assert of_rank["off"] < 1e-5, case
        assert of_rank["moved"] > 1e-2, case  # the steps did something


@pytest.fixture(scope="module", params=[ONE_NODE, TWO_NODES])
def outcomes(ranks: Results, request: pytest.FixtureRequest) -> Outcomes:
    return {model: ranks(__name__, request.param, model)[0] for model in MODELS}


@pytest.mark.nightly
def test_trained_tables_equal_unsharded_ones(outcomes: Outcomes) -> None:
    """What is planned is trained as well."""
    trained = 0
    for model, by_type in outcomes.items():
        for kind, found in by_type.items():
            case = f"{model}, {kind}: {found}"
            if isinstance(found, str):
                assert found.startswith("refused ConfigError"), case
                continue
            assert all(r["placed"] == [[kind, kernel_of(kind)]] for r in found), case
            check_trained(found, case)
            trained += 1
    assert trained > 50


@pytest.mark.nightly
def test_table_in_the_documentation_is_what_ran(outcomes: Outcomes) -> None:
    """The page holds the table, and the errors below it."""
    notes: dict[str, int] = {}

    def cell(found: Any) -> str:
        if not isinstance(found, str):
            return "trained" if found else "–"
        word, _, error = found.partition(" ")
        text = re.sub(r"\b\d+", "N", error.partition(": ")[2]).replace("`", "'")
        text = re.sub(r"^table '\S+' \(embedding_dim=N\): ", "", text)
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
