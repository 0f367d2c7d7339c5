"""What a first launch brings on a machine that no bundle is known for.

Gloo ranks plan the same tables by the bundle of another kind of CPU, by the physical
estimate, and by what their first launch measures; then once more, from the cache. Sets
of other seeds than the launch's and the kernels of all plans, rank after rank in
rounds, are measured by this process alone afterwards.

    python benchmarks/bench_first_launch.py --ranks 2 --seconds 40 \
        --out benchmarks/results/first_launch_gloo2_202611

Run it where no shipped bundle was measured on this machine: on one that has its own,
in a copy of the project without that folder of `pretrained/`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology

from harness.provenance import commit, now
from torchrec_neuroshard.collect.timing import SetTimer
from torchrec_neuroshard.cost_models import cache, load_bundle
from torchrec_neuroshard.cost_models.compute import NeuralCostModel
from torchrec_neuroshard.cost_models.loading import physical_estimate, pretrained_names
from torchrec_neuroshard.devices import cpu_name
from torchrec_neuroshard.features import table_features
from torchrec_neuroshard.planner import NeuroShardPlanner
from torchrec_neuroshard.planner.launch.first_launch import FirstLaunch
from torchrec_neuroshard.tables import TableConfig
from torchrec_neuroshard.training.compute import best_factor
from torchrec_neuroshard.training.first_launch import LaunchRequest, draw_launch_set

LOCAL_BATCH, NUM_TABLES, NUM_TEST_SETS, ROUNDS = 1024, 24, 24, 5
TEST_ROUNDS = 3
ARENA_BYTES = 2**30
FOREIGN, PHYSICAL, FIRST, SECOND = "foreign", "physical", "first launch", "second"


def tables() -> list[EmbeddingBagConfig]:
    rng = np.random.default_rng(7)
    return [
        EmbeddingBagConfig(
            name=f"t{i}",
            num_embeddings=int(10 ** rng.uniform(2, 6)),
            embedding_dim=int(rng.choice([16, 32, 64, 128])),
            feature_names=[f"f{i}"],
        )
        for i in range(NUM_TABLES)
    ]


def constraints() -> dict[str, ParameterConstraints]:
    """Columns alone, so that a rank's kernel is known by its columns."""
    rng = np.random.default_rng(8)
    return {
        f"t{i}": ParameterConstraints(
            sharding_types=["table_wise", "column_wise"],
            pooling_factors=[float(np.exp(rng.uniform(0, np.log(30))))],
        )
        for i in range(NUM_TABLES)
    }


def planner(world_size: int, cost_model: str, calibrate: Any) -> NeuroShardPlanner:
    return NeuroShardPlanner(
        topology=Topology(world_size=world_size, compute_device="cpu"),
        batch_size=LOCAL_BATCH,
        constraints=constraints(),
        cost_model=cost_model,
        calibrate=calibrate,
        consider_stock=False,
        debug=False,
    )


def rank_main(rank: int, world_size: int, folder: str, args: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )
    found: dict[str, Any] = {}
    for name, cost_model, calibrate in (
        (FOREIGN, args.foreign, "auto"),
        (PHYSICAL, "auto", "never"),
        (FIRST, "measure", args.seconds),
        (SECOND, "measure", args.seconds),
    ):
        model = EmbeddingBagCollection(tables=tables(), device=torch.device("meta"))
        mine = planner(world_size, cost_model, calibrate)
        start = time.perf_counter()
        mine.collective_plan(model, [EmbeddingBagCollectionSharder()], dist.group.WORLD)
        seconds = time.perf_counter() - start
        result, task = mine.last_result, mine.last_task
        assert result is not None and task is not None
        ranks: list[list[Any]] = [[] for _ in range(world_size)]
        for table in range(len(task.tables)):
            for shard in result.placement.table_shards(table):
                part = task.tables[table].with_width(shard.width)
                ranks[shard.rank].append(part.to_json())
        found[name] = {
            "source": mine.costs.cost_model.source,
            "collectives": mine.costs.comms_model.source,
            "seconds_before_planning": seconds - sum(mine.last_seconds.values()),
            "predicted_ms": result.predicted.critical_path_ms,
            "warnings": [w for w in result.warnings if "first launch" in w],
            "ranks": ranks,
        }
    if rank == 0:
        Path(folder, "plans.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def request_of(world_size: int) -> LaunchRequest:
    mine = planner(world_size, "measure", 1.0)
    model = EmbeddingBagCollection(tables=tables(), device=torch.device("meta"))
    options = mine.enumerator.enumerate(model, [EmbeddingBagCollectionSharder()])
    launch = FirstLaunch(mine.costs, "measure", 1.0, constraints())
    return launch.request(options, world_size)


def measured(timer: SetTimer, shards: Any, seed: int, batch_size: int) -> list[float]:
    """Forward and backward [ms], and how much the passes disagree."""
    shards = [
        TableConfig.from_json(
            {**t.to_json(), "profile": t.profile_at(batch_size).to_json()}
        )
        for t in shards
    ]
    one = timer.measure(shards, None, batch_size, (seed,))
    totals = np.add(one.fwd_raw_ms, one.bwd_raw_ms) / one.ref_raw_ms
    spread = np.median(np.abs(totals / np.median(totals) - 1))
    return [one.fwd_ms, one.bwd_ms, float(spread)]


def steadiest(rounds_RS3: Any) -> Any:
    """Forward and backward of each set in the round that was disturbed least."""
    rounds_RS3 = np.asarray(rounds_RS3)
    best_S = rounds_RS3[..., 2].argmin(axis=0)
    return rounds_RS3[best_S, np.arange(rounds_RS3.shape[1]), :2]


def errors(timer: SetTimer, models: dict[str, Any], world_size: int) -> Any:
    """Errors on sets drawn as a launch draws them, by seeds that none used."""
    request = request_of(world_size)
    request = LaunchRequest.from_json({**request.to_json(), "seed": 1})
    batch_size = request.batch_size
    sets = [draw_launch_set(request, i, ARENA_BYTES) for i in range(NUM_TEST_SETS)]
    rounds = np.array(
        [
            [measured(timer, s, i, batch_size) for i, s in enumerate(sets)]
            for _ in range(TEST_ROUNDS)
        ]
    )
    found = steadiest(rounds)
    totals = rounds[..., :2].sum(axis=2)
    noise = float(np.abs(totals / np.median(totals, axis=0) - 1).mean())
    features = np.concatenate([table_features(s, batch_size) for s in sets])
    ids = np.repeat(np.arange(len(sets)), [len(s) for s in sets])
    rows = {}
    for name, model in models.items():
        predicted = model.predict_sets(features, ids, len(sets))
        if name == FIRST:
            # The unit is the reference set's speed then; this is its speed now.
            assert isinstance(model, NeuralCostModel)
            predicted = predicted * timer.reference_ms / model.reference_ms
        scaled = predicted * [
            best_factor(p, m) for p, m in zip(predicted.T, found.T, strict=True)
        ]
        total, best, truth = (v.sum(axis=1) for v in (predicted, scaled, found))
        rows[name] = {
            "total_mape": float(np.abs(total / truth - 1).mean()),
            "total_mape_with_best_factors": float(np.abs(best / truth - 1).mean()),
        }
    return {
        "num_sets": len(sets),
        "noise": noise,
        "measured_ms": rounds.tolist(),
        "models": rows,
    }


def kernels(timer: SetTimer, plans: dict[str, Any], world_size: int) -> dict[str, Any]:
    """Slowest rank's forward plus slowest rank's backward, by the steadiest rounds."""
    times: dict[str, list[Any]] = {n: [] for n in plans if n != SECOND}
    for number in range(ROUNDS):
        first = number % len(times)
        for name in [*times][first:] + [*times][:first]:
            ranks = [
                measured(
                    timer,
                    [TableConfig.from_json(t) for t in shards],
                    100 + number,
                    LOCAL_BATCH * world_size,
                )
                for shards in plans[name]["ranks"]
                if shards
            ]
            times[name].append(ranks)
    return {
        name: {
            "ms": float(steadiest(rounds).max(axis=0).sum()),
            "median_ms": statistics.median(
                float(np.max(ranks, axis=0)[:2].sum()) for ranks in rounds
            ),
            "rounds": rounds,
        }
        for name, rounds in times.items()
    }


def report(data: dict[str, Any]) -> str:
    lines = [
        f"# First launch of {data['ranks']} gloo ranks on {data['machine']}",
        "",
        "| costs by | error on held-out sets | with its best factors | before planning "
        "[s] | kernels of the plan, measured [ms] | median of rounds [ms] |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in (FOREIGN, PHYSICAL, FIRST, SECOND):
        judged = data["errors"]["models"].get(name)
        shown = (
            f"{judged['total_mape']:.1%} | {judged['total_mape_with_best_factors']:.1%}"
            if judged
            else "as above | as above"
            if name == SECOND and data["card"]
            else "not kept | not kept"
        )
        plan = data["kernels"].get(name)
        ms = f"{plan['ms']:.2f} | {plan['median_ms']:.2f}" if plan else "- | -"
        seconds = data["plans"][name]["seconds_before_planning"]
        lines.append(f"| {name} | {shown} | {seconds:.2f} | {ms} |")
    lines += [
        "",
        f"Mean absolute error of forward + backward over {data['errors']['num_sets']} "
        f"sets, each as in the steadiest of {TEST_ROUNDS} rounds, which differ from "
        f"their medians by {data['errors']['noise']:.1%} on average; `foreign` is the "
        f"bundle `{data['foreign']}`. Kernels: slowest rank's forward and slowest "
        f"rank's backward, each rank alone and as in the steadiest of {ROUNDS} rounds, "
        "all of them in the JSON file. "
        f"{os.cpu_count()} cores, load {data['load'][0]:.1f} before and "
        f"{data['load'][1]:.1f} after.",
        "",
        *(w for n in (FIRST, SECOND) for w in data["plans"][n]["warnings"]),
        f"Command: `{data['command']}` (budget {data['seconds']:g} s). Commit "
        f"{data['commit']}, {data['created']}, torch {torch.__version__}.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--foreign", default="cpu", help="bundle of another CPU")
    parser.add_argument("--out", type=Path, required=True, help="path without suffix")
    args = parser.parse_args()
    own = [n for n in pretrained_names() if _device(n) == cpu_name()]
    if own:
        parser.error(f"bundle '{own[0]}' was measured here; see --help")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["NEUROSHARD_CACHE"] = f"{folder}/cache"
        mp.spawn(rank_main, (args.ranks, folder, args), nprocs=args.ranks)
        plans = json.loads(Path(folder, "plans.json").read_text())
        models: dict[str, Any] = {
            FOREIGN: load_bundle(Path(_folder(args.foreign))),
            PHYSICAL: physical_estimate("cpu"),
        }
        kept = cache.entries()  # none: what was measured was too noisy
        if kept:
            models[FIRST] = load_bundle(kept[0].folder)
        timer = SetTimer(torch.device("cpu"), ARENA_BYTES, budget_seconds=0.3)
        data = {
            "command": " ".join(map(shlex.quote, ["python", *sys.argv])),
            "created": now(),
            "commit": commit(),
            "machine": cpu_name(),
            "ranks": args.ranks,
            "seconds": args.seconds,
            "foreign": args.foreign,
            "plans": plans,
            "errors": errors(timer, models, args.ranks),
            "kernels": kernels(timer, plans, args.ranks),
            "card": (kept[0].folder / "CARD.md").read_text() if kept else None,
            "load": [load, os.getloadavg()[0]],
        }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(report(data))
    print(report(data))


def _folder(name: str) -> Path:
    from torchrec_neuroshard.cost_models.loading import bundle_folder

    folder = bundle_folder(name)
    assert folder is not None, name
    return folder


def _device(name: str) -> str:
    return load_bundle(_folder(name)).hardware


if __name__ == "__main__":
    main()
