"""Train sequence models by several plans in turn, and compare predicted with measured.

    neuroshard collect compute --out kernels.jsonl
    torchrun --standalone --nproc-per-node 2 -m torchrec_neuroshard collect comms \\
        --backend gloo --out comms.jsonl
    neuroshard train kernels.jsonl comms.jsonl --out my_bundle
    torchrun --standalone --nproc-per-node 2 benchmarks/race_sequences.py \\
        --cost-model my_bundle --out benchmarks/results/sequences_gloo2_202611

Each model is an `EmbeddingCollection` of one width. Lengths follow Zipf's law, cut off
at a longest sample, and are the same for all features of some models. A step is lookup,
exchange and a gradient for each row, without dense layers, so its time is that of the
embeddings. Plans are trained from round to round in changing order, each with the same
batches, and no batch occurs twice.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    Topology,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from harness.models import OPTIMIZER_CLASSES
from harness.options import RunError, option
from harness.pages import table, write_page
from harness.planning import count_types
from harness.provenance import describe_run
from harness.ranks import Ranks, SpeedReference, machine_speeds, run_on_ranks
from harness.training_runs import take_turns
from torchrec_neuroshard import (
    NeuroShardPlanner,
    TableConfig,
    load_cost_model,
    profile_inputs,
)
from torchrec_neuroshard.costs.simulator import PredictedCosts
from torchrec_neuroshard.models.base import CostModel
from torchrec_neuroshard.models.compute import NeuralCostModel
from torchrec_neuroshard.tables.access import AccessDistribution, draw_ids

WARM_UP = 3
"""Untimed steps of a plan: the first ones write to fresh memory."""
OURS, LENGTHS, STOCK = "ours", "torchrec, lengths", "torchrec"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Options of the run: each field is an option with the same name."""

    out: str = option("", "path of the results, without suffix")
    cost_model: str = option("auto", "name or folder of a bundle")
    backend: str = option("auto", "nccl, gloo, or auto: nccl if there are GPUs")
    rounds: int = option(4, "rounds; each trains every plan", 2)
    steps: int = option(8, "timed steps of a plan in a round", 2)
    profiled: int = option(16, "batches of each rank that are profiled", 4)
    seed: int = option(0, "seed of tables and batches")
    models: int = option(6, "models to train", 1)

    def __post_init__(self) -> None:
        if not self.out:
            raise RunError("--out is missing")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """Tables of sequences, all of one width, and how they are read."""

    name: str
    rows: tuple[int, ...]
    width: int
    longest: tuple[int, ...]
    """Longest sample of each feature."""
    batch_size: int
    """Samples per rank."""
    zipf: float
    """Exponent of the lengths."""
    joined: bool
    """Whether all features of a sample have the same length."""
    optimizer: str = "rowwise_adagrad"

    @property
    def tables(self) -> list[TableConfig]:
        """The tables, which are named like their features."""
        return [
            TableConfig(
                name=f"t{i}",
                num_embeddings=rows,
                embedding_dim=self.width,
                pooled=False,
                optimizer=self.optimizer,
            )
            for i, rows in enumerate(self.rows)
        ]

    def draw(self, seed: Sequence[int]) -> KeyedJaggedTensor:
        """Return a batch of one rank."""
        rng = np.random.default_rng(list(seed))
        most = max(self.longest)
        shared = np.minimum(rng.zipf(self.zipf, self.batch_size), most)
        ids, lengths = [], []
        for rows, longest in zip(self.rows, self.longest, strict=True):
            own = rng.zipf(self.zipf, self.batch_size)
            length = np.minimum(shared if self.joined else own, longest)
            access = AccessDistribution.power_law(rows, 1.05)
            ids.append(draw_ids(rng, access, rows, int(length.sum())))
            lengths.append(length.astype(np.int64))
        return KeyedJaggedTensor.from_lengths_sync(
            keys=[f"t{i}" for i in range(len(self.rows))],
            values=torch.from_numpy(np.concatenate(ids)),
            lengths=torch.from_numpy(np.concatenate(lengths)),
        )


MODELS = (
    Model(
        name="items-and-actions",
        rows=(2_000_000, 100, 500_000),
        width=64,
        longest=(2_048, 2_048, 64),
        batch_size=32,
        zipf=1.2,
        joined=True,
    ),
    Model(
        name="four-histories",
        rows=(1_000_000, 400_000, 200_000, 100_000),
        width=64,
        longest=(512, 512, 512, 512),
        batch_size=64,
        zipf=1.3,
        joined=False,
    ),
    Model(
        name="one-huge",
        rows=(3_000_000, 1_000, 50_000),
        width=128,
        longest=(4_096, 16, 16),
        batch_size=32,
        zipf=1.2,
        joined=False,
        optimizer="sgd",
    ),
    Model(
        name="eight-short",
        rows=(500_000,) * 4 + (20_000,) * 4,
        width=32,
        longest=(100,) * 8,
        batch_size=256,
        zipf=1.5,
        joined=True,
    ),
    Model(
        name="wide",
        rows=(200_000, 100_000),
        width=256,
        longest=(256, 1_024),
        batch_size=32,
        zipf=1.3,
        joined=True,
        optimizer="sgd",
    ),
    Model(
        name="even-lengths",
        rows=(1_000_000, 300_000, 300_000),
        width=64,
        longest=(40, 40, 40),
        batch_size=128,
        zipf=1.01,
        joined=False,
    ),
)


def build(model: Model, device: torch.device) -> torch.nn.ModuleDict:
    """Return the module with its optimizers; `device` may be meta."""
    collection = EmbeddingCollection(
        tables=[
            EmbeddingConfig(
                name=t.name,
                num_embeddings=t.num_embeddings,
                embedding_dim=t.embedding_dim,
                feature_names=[t.name],
            )
            for t in model.tables
        ],
        device=device,
    )
    kind = OPTIMIZER_CLASSES[model.optimizer]
    apply_optimizer_in_backward(kind, collection.parameters(), {"lr": 0.01})
    return torch.nn.ModuleDict({"sequences": collection})


@dataclasses.dataclass(kw_only=True, slots=True)
class Trial:
    """A plan and its measurements."""

    plan: ShardingPlan
    predicted: PredictedCosts
    as_bags_ms: float
    """Critical path if an id counts as a bag of one."""
    planning_s: float
    rounds: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def make_plans(model: Model, ranks: Ranks, config: RunConfig) -> dict[str, Trial]:
    """Return the plan of each planner, priced by ours; run it on one rank."""
    profiles = profile_inputs(
        model.draw((config.seed, rank, number))
        for rank in range(ranks.world_size)
        for number in range(config.profiled)
    )
    module, sharders = (
        build(model, torch.device("meta")),
        [EmbeddingCollectionSharder()],
    )
    constraints = {
        name: ParameterConstraints(pooling_factors=[profile.pooling_factor])
        for name, profile in profiles.items()
    }
    shared: dict[str, Any] = {"batch_size": model.batch_size}
    cost_model = load_cost_model(config.cost_model, device_type=ranks.device.type)
    as_bags = load_cost_model(config.cost_model, device_type=ranks.device.type)
    if isinstance(as_bags, NeuralCostModel):
        as_bags.sequences = None

    def ours(cost_model: CostModel = cost_model) -> NeuroShardPlanner:
        return NeuroShardPlanner(
            topology=Topology(**ranks.topology),
            profiles=profiles,
            cost_model=cost_model,
            comms_model=ranks.comms_model(config.cost_model),
            calibrate="never",
            **shared,
        )

    planners = {
        OURS: ours(),
        LENGTHS: EmbeddingShardingPlanner(
            topology=Topology(**ranks.topology), constraints=constraints, **shared
        ),
        STOCK: EmbeddingShardingPlanner(topology=Topology(**ranks.topology), **shared),
    }
    found = {}
    for name, planner in planners.items():
        start = time.perf_counter()
        plan = planner.plan(module, sharders)
        seconds = time.perf_counter() - start
        predicted, bags = (
            judge.costs.placed(judge.placed_options(plan, module, sharders)).predicted
            for judge in (ours(), ours(as_bags))
        )
        found[name] = Trial(
            plan=plan,
            predicted=predicted,
            as_bags_ms=bags.critical_path_ms,
            planning_s=seconds,
        )
    return found


def train(
    model: Model, trial: Trial, ranks: Ranks, batches: Sequence[KeyedJaggedTensor]
) -> list[float]:
    """Return the time of each step on this rank [ms]; the first are not timed."""
    module = build(model, torch.device("meta"))
    sharded = DistributedModelParallel(
        module,
        device=ranks.device,
        plan=trial.plan,
        sharders=[EmbeddingCollectionSharder()],
    )
    collection = sharded.module["sequences"]
    times = []
    for number, batch in enumerate(batches):
        dist.barrier(group=ranks.control)
        start = time.perf_counter()
        found = collection(batch)
        rows = torch.cat([jagged.values() for jagged in found.values()])
        torch.autograd.backward(rows, torch.full_like(rows, 1e-3))
        ranks.synchronize()
        if number >= WARM_UP:
            times.append((time.perf_counter() - start) * 1e3)
    del sharded, module, collection
    gc.collect()
    return times


def race(model: Model, config: RunConfig, ranks: Ranks) -> dict[str, Any]:
    """Train all plans of a model and return the results."""
    reference = SpeedReference(ranks)
    trials: dict[str, Trial] = ranks.on_first(lambda: make_plans(model, ranks, config))
    for number in range(config.rounds):
        seed = config.seed, ranks.rank
        first = config.profiled + number * (config.steps + WARM_UP)
        batches = [
            model.draw((*seed, first + i)).to(ranks.device)
            for i in range(config.steps + WARM_UP)
        ]
        for name in take_turns(list(trials), number):
            read = reference.read()
            mine = train(model, trials[name], ranks, batches)
            every = ranks.gather((mine, read))
            step_ms = [
                max(by_rank) for by_rank in zip(*(m for m, _ in every), strict=True)
            ]
            trials[name].rounds.append(
                {"step_ms": step_ms, "reference_ms": [r for _, r in every]}
            )
    nominal = load_cost_model(
        config.cost_model, device_type=ranks.device.type
    ).reference_ms
    slow = ranks.comms_model(config.cost_model).compute_slowdown
    nominal *= reference.slowdown(slow) if nominal else 1.0
    speeds = machine_speeds([t.rounds for t in trials.values()], nominal)
    return {
        "model": dataclasses.asdict(model),
        "speeds": speeds,
        "plans": {name: entry(trial, speeds) for name, trial in trials.items()},
    }


def entry(trial: Trial, speeds: Sequence[float]) -> dict[str, Any]:
    """Return the predictions and measurements of a plan, in the cost model's time."""
    scaled = [
        ms * speed
        for found, speed in zip(trial.rounds, speeds, strict=True)
        for ms in found["step_ms"]
    ]
    predicted = trial.predicted
    return {
        "sharding_types": count_types(trial.plan),
        "planning_seconds": trial.planning_s,
        "as_bags_ms": trial.as_bags_ms,
        "critical_path_ms": predicted.critical_path_ms,
        "expected_ms": predicted.expected_ms,
        "p95_ms": float(np.quantile(predicted.drawn_ms(), 0.95)),
        "mean_ms": statistics.mean(scaled),
        "measured_p95_ms": float(np.quantile(scaled, 0.95)),
        "round_means_ms": [
            statistics.mean(found["step_ms"]) * speed
            for found, speed in zip(trial.rounds, speeds, strict=True)
        ],
        "phases_ms": {
            name: max(getattr(rank, name) for rank in predicted.ranks)
            for name in predicted.ranks[0].to_json()
        },
        "rounds": trial.rounds,
    }


def rows_of(results: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return a line for each plan."""
    rows: list[tuple[str, ...]] = []
    for found in results:
        best = min(p["mean_ms"] for n, p in found["plans"].items() if n != OURS)
        for name, plan in found["plans"].items():
            paired = np.array(plan["round_means_ms"]) / np.min(
                [p["round_means_ms"] for n, p in found["plans"].items() if n != OURS],
                axis=0,
            )
            rows.append(
                (
                    found["model"]["name"],
                    name,
                    ", ".join(
                        f"{n} {k.partition('/')[0]}"
                        for k, n in plan["sharding_types"].items()
                    ),
                    f"{plan['as_bags_ms']:.1f}",
                    f"{plan['critical_path_ms']:.1f}",
                    f"{plan['expected_ms']:.1f}",
                    f"{plan['mean_ms']:.1f}",
                    f"{plan['expected_ms'] / plan['mean_ms']:.2f}",
                    f"{plan['p95_ms']:.1f}",
                    f"{plan['measured_p95_ms']:.1f}",
                    f"{plan['mean_ms'] / best:.2f} "
                    f"({paired.min():.2f} to {paired.max():.2f})",
                )
            )
    return rows


HEAD = (
    "model | plan | tables | as bags of one id | critical path | expected | measured "
    "mean | expected / measured | p95 | measured p95 | over TorchRec's better plan "
    "(rounds)"
)


def run(config: RunConfig, ranks: Ranks) -> None:
    """Race all models; write the page after each."""
    warnings.simplefilter("ignore")
    results: list[dict[str, Any]] = []
    for model in MODELS[: config.models]:
        results.append(race(model, config, ranks))
        if ranks.rank:
            continue
        data = {**describe_run(ranks.device, "torchrun"), "results": results}
        write_page(Path(config.out), data, page(data))
        print(table(HEAD, rows_of(results)), flush=True)


def page(data: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    texts = (
        "# Sequence models on real ranks",
        f"`{data['command']}`, commit {data['commit']}, {data['date']}, "
        f"{data['hardware']['device']}",
        "Steps of `EmbeddingCollection`s: lookup, exchange, and a gradient for each "
        "row. *expected* is the mean over drawn batches whose lengths differ, "
        "*critical path* the step of the mean batch; *as bags of one id* prices "
        "lookups like pooled ones. Times are milliseconds of the "
        "cost model's machine. The last column has the means of the rounds, paired. "
        "`my_bundle` is a cost model that was fitted to this machine; it is not "
        "committed.",
        table(HEAD, rows_of(data["results"])),
    )
    return "\n\n".join(texts) + "\n"


if __name__ == "__main__":
    sys.exit(
        run_on_ranks(
            RunConfig, None, __doc__, lambda config: Ranks(config.backend), run
        )
    )
