"""Train the nets and policies of the papers' methods, for searches of this package.

    cd benchmarks
    python -m papers.train nets --compute compute.parquet --comms comms.parquet \
        --out my_nets
    python -m papers.train policy --method dreamshard --cost-model my_bundle \
        --out my_policy

`nets` makes NeuroShard's nets from files of `neuroshard collect`, or, with `--label
MODEL`, from that cost model's predictions; the measured records then only judge.
`policy` makes a policy of DreamShard or AutoShard for a cost model: half of the tables
train it, the other half judge it. Both write weights, a description and a card.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.tasks import cap_rows
from papers import data, nets, policies
from papers.data import Floats, LabelConfig, PolicyTaskConfig
from papers.nets import FitReport, PaperTrainConfig
from torchrec_neuroshard.bundles.find import load_comms_model, load_cost_model
from torchrec_neuroshard.errors import ConfigError, NeuroShardError, RecordMismatchError
from torchrec_neuroshard.files import check_folder, from_options
from torchrec_neuroshard.hardware.devices import BACKENDS
from torchrec_neuroshard.measure.records import CommsRecord, CostRecord, command_line
from torchrec_neuroshard.measure.store import read_comms_records, read_records
from torchrec_neuroshard.models.base import CommsModel
from torchrec_neuroshard.models.collectives import BandwidthCommsModel
from torchrec_neuroshard.papers import heuristics
from torchrec_neuroshard.papers.neuroshard_models import (
    CommsNets,
    ComputeNet,
    NeuroShardModels,
    save_models,
)
from torchrec_neuroshard.papers.policies import Policy, PolicyInfo, save_policy


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    kinds = {"nets": (_add_nets, train_nets), "policy": (_add_policy, train_policy)}
    for name, (add, run) in kinds.items():
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        command.add_argument("--out", type=Path, required=True, help="folder")
        sets = "JSON of table sets; default: generated like the DLRM dataset"
        command.add_argument("--tables", type=Path, help=sets)
        command.add_argument("--workload", nargs="*", default=[], help="sets of it")
        command.add_argument("--seed", type=int, default=0)
        add(command)
    args = parser.parse_args(arguments)
    try:
        check_folder(args.out)
        args.run(args)
    except NeuroShardError as error:
        sys.exit(f"error: {error}")
    print(f"wrote {args.out}")


def _collectives(cost_model: str, device_type: str, world_size: int) -> CommsModel:
    """Return the measured or published collectives of one node's ranks."""
    found = load_comms_model(
        cost_model,
        device_type=device_type,
        world_size=world_size,
        local_world_size=world_size,
    )
    if found is None or "stands in" in found.source:
        raise ConfigError(f"no collectives were measured for '{cost_model}'")
    return found


# NeuroShard's nets.


def _add_nets(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--compute", type=Path, nargs="+", required=True)
    parser.add_argument("--comms", type=Path, nargs="*", default=[])
    parser.add_argument("--world-sizes", type=int, nargs="*", help="default: measured")
    parser.add_argument("--epochs", type=int, default=PaperTrainConfig().epochs)
    parser.add_argument("--optimizer", default="sgd", help="of the tables")
    parser.add_argument("--label", metavar="MODEL", help="name or folder")
    labels = parser.add_argument_group("samples that --label draws")
    drawn = LabelConfig()
    labels.add_argument("--num-samples", type=int, default=drawn.num_samples)
    for name in ("batch_sizes", "widths"):
        option, default = f"--{name.replace('_', '-')}", getattr(drawn, name)
        labels.add_argument(option, type=int, nargs="+", default=default)
    longest = drawn.longest_offset_ms
    labels.add_argument("--longest-offset-ms", type=float, default=longest)
    labels.add_argument("--max-rows", type=int, help="cut the tables to these")


def train_nets(args: argparse.Namespace) -> None:
    """Train NeuroShard's nets for one machine, judge them and write them."""
    recipe = from_options(PaperTrainConfig, args)
    drawn = from_options(LabelConfig, args)
    headers, records = read_records(args.compute)
    files = read_comms_records(args.comms)
    collectives = [r for _, of_file in files for r in of_file]
    here = headers[0].fingerprint
    if others := {h.fingerprint.device for h, _ in files} - {here.device}:
        theirs = ", ".join(sorted(others))
        raise RecordMismatchError(
            f"kernels were measured on {here.device}, collectives on {theirs}"
        )
    kind = here.device_type
    compute, judgement = _train_kernels(args, recipe, drawn, records, kind)
    comms, judgements = dict[int, CommsNets](), [judgement]
    measured = sorted({r.world_size for r in collectives if data.is_pooled(r)})
    for size in args.world_sizes or measured:
        trained = _train_collectives(args, recipe, drawn, size, collectives, kind)
        comms[size] = trained[0]
        judgements += trained[1]
    trained_on = {
        "settings": {
            "label": args.label,
            "drawn": dataclasses.asdict(drawn),
            "recipe": dataclasses.asdict(recipe),
        },
        "judgements": judgements,
        "commands": [h.command for h in [*headers, *(h for h, _ in files)]],
        "command": command_line(),
    }
    models = NeuroShardModels(
        fingerprint=here,
        compute=compute,
        comms=comms,
        trained_on=trained_on,
        card=nets_card(here.device, trained_on),
    )
    save_models(args.out, models)


def _train_kernels(
    args: argparse.Namespace,
    recipe: PaperTrainConfig,
    drawn: LabelConfig,
    records: Sequence[CostRecord],
    device_type: str,
) -> tuple[ComputeNet, dict[str, Any]]:
    """Train on sets of the kind asked for; sets of held-out tables judge."""
    known = data.comparable_records(records, recipe.optimizer)
    if args.label is None:
        sets = data.measured_sets([r for r in known if not r.held_out])
    else:
        tables = data.read_tables(args.tables, args.workload, args.seed)
        if args.max_rows is not None:
            tables = tuple(cap_rows(t, args.max_rows) for t in tables)
        own = [dataclasses.replace(t, optimizer=recipe.optimizer) for t in tables]
        model = load_cost_model(args.label, device_type=device_type)
        sets = data.label_sets(model, own, drawn)
    net, report = nets.fit_compute(sets, recipe, drawn.widths)
    judges = [r for r in known if r.held_out]
    real = np.array([r.total_ms for r in judges])
    return net, _judge("kernels", real, nets.predict_records(net, judges), report)


def _train_collectives(
    args: argparse.Namespace,
    recipe: PaperTrainConfig,
    drawn: LabelConfig,
    world_size: int,
    records: Sequence[CommsRecord],
    device_type: str,
) -> tuple[CommsNets, list[dict[str, Any]]]:
    """Train the nets of a number of ranks; the recipe's test samples judge.

    Nets that a model taught have not seen these either.
    """
    measured = samples = data.measured_samples(records, world_size, drawn)
    if args.label is not None:
        model = _collectives(args.label, device_type, world_size)
        samples = data.label_placements(model, world_size, drawn)
    pair, *reports = nets.fit_comms(*samples, recipe)
    judgements = []
    ways = zip(("forward", "backward"), measured, reports, strict=True)
    for way, real, report in ways:
        what = f"{way} all-to-all of {world_size} ranks"
        *_, test = nets.split_samples(len(real.target_SW), recipe.seed, what)
        with torch.inference_mode():
            inputs = torch.from_numpy(real.inputs_SI[test]).float()
            times: Floats = getattr(pair, way)(inputs).double().numpy()
        slowest = real.target_SW[test].max(axis=1)
        judgements.append(_judge(what, slowest, times.max(axis=1), report))
    return pair, judgements


def _judge(
    what: str, measured: Floats, predicted: Floats, report: FitReport
) -> dict[str, Any]:
    """Return a net's relative errors on samples that it was not trained on."""
    error = np.abs(predicted / measured - 1)
    print(f"{what}: {error.mean():.1%} off what was measured; {report}", flush=True)
    return {
        "what": what,
        "num_samples": len(measured),
        "errors": {"mean": float(error.mean()), "median": float(np.median(error))},
        "report": dataclasses.asdict(report),
    }


def nets_card(device: str, trained_on: Mapping[str, Any]) -> str:
    """Write the card of NeuroShard's nets in Markdown."""
    settings, recipe = trained_on["settings"], trained_on["settings"]["recipe"]
    labels = f"predicted by `{settings['label']}`" if settings["label"] else "measured"
    rows = [
        f"| {j['what']} | {j['num_samples']} | {j['errors']['mean']:.1%} | "
        f"{j['errors']['median']:.1%} | {j['report']['num_training']} |"
        for j in trained_on["judgements"]
    ]
    return f"""# NeuroShard's nets

The cost models of NeuroShard (MLSys 2023, arXiv 2305.01868) for `search="neuroshard"`:
forward + backward of one fused kernel, and one pair of nets of the all-to-all for each
number of ranks.

| | here | paper |
| --- | --- | --- |
| device | {device} | NVIDIA GPUs |
| labels | {labels} | measured |
| epochs | {recipe["epochs"]} | 1,000 |
| samples per step | {recipe["batch_samples"]} | 512 |
| optimizer of the tables | {recipe["optimizer"]} | sgd |
| seed | {recipe["seed"]} | |

## Error on measured samples that the nets were not trained on

Absolute error relative to the measured time. Kernels: sets of held-out tables.
Collectives: the slowest rank, from its own start in the forward one. The paper trained
each net on up to 80,000 samples.

| | samples | mean | median | trained on |
| --- | --- | --- | --- | --- |
{_lines(rows)}

## Made by

{_lines(f"- `{c}`" for c in [*trained_on["commands"], trained_on["command"]])}
"""


# Policies.


def _add_policy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--method", choices=policies.METHODS, required=True)
    parser.add_argument("--cost-model", required=True, help="name or folder")
    parser.add_argument("--device-type", choices=tuple(BACKENDS), default="cpu")
    links = "bandwidth of links, in place of the cost model's collectives"
    parser.add_argument("--gb-per-s", type=float, help=links)
    setting = "a setting of the method, such as iterations=30; default: the paper's"
    parser.add_argument("--set", type=_setting, nargs="*", default=[], help=setting)
    parser.add_argument("--num-tasks", type=int, default=200, help="half as many judge")
    for name, default in dataclasses.asdict(PolicyTaskConfig()).items():
        if name != "seed":
            kind = str if name == "optimizers" else int
            option = f"--{name.replace('_', '-')}"
            parser.add_argument(option, type=kind, nargs="+", default=default)


def _setting(text: str) -> tuple[str, float]:
    """Read NAME=NUMBER; whole numbers stay whole."""
    name, _, value = text.partition("=")
    return name, float(value) if set(value) & set(".e") else int(value)


def train_policy(args: argparse.Namespace) -> None:
    """Train a policy on half of the tables, judge it on the other half, write it."""
    method = policies.METHODS[args.method]
    try:
        config = method.config_type(**{"seed": args.seed, **dict(args.set)})
    except TypeError as error:
        raise ConfigError(f"{args.method}: {error}") from error
    model, device_type = args.cost_model, args.device_type

    def collectives(world_size: int) -> CommsModel:
        """Return those of the bandwidth given, else of the cost model's device."""
        if args.gb_per_s is None:
            return _collectives(model, device_type, world_size)
        return BandwidthCommsModel(
            world_size=world_size,
            local_world_size=world_size,
            intra_gb_per_s=args.gb_per_s,
            inter_gb_per_s=args.gb_per_s,
            source=f"{args.gb_per_s:g} GB/s assumed, not measured",
        )

    kernels = load_cost_model(model, device_type=device_type)
    costs = policies.SimulatedPlans(kernels, collectives)
    # A table that no sample reads costs nothing, wherever it is: it teaches nothing.
    tables = data.read_tables(args.tables, args.workload, args.seed)
    read = [t for t in tables if t.pooling_factor > 0]
    training, test = data.split_tables(read, args.seed)
    drawn = from_options(PolicyTaskConfig, args)
    tasks = data.sample_policy_tasks(training, drawn, args.num_tasks)
    trainer = method(tasks, costs, config)

    def report(iteration: int, figures: Mapping[str, float]) -> None:
        text = "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
        print(f"{iteration + 1} of {config.iterations}: {text}", flush=True)

    start = time.process_time()
    trainer.train(report)
    ranges = {
        "num_tables": [len(t.tables) for t in tasks],
        "world_size": [t.world_size for t in tasks],
        "batch_size": [t.batch_size for t in tasks],
    }
    info = PolicyInfo(
        method=args.method,
        name=args.out.name,
        hardware=kernels.hardware,
        ranges={k: (float(min(v)), float(max(v))) for k, v in ranges.items()},
        trained_on={
            "tables": args.tables.name if args.tables else "generated like DLRM's",
            "num_tables": len(read),
            "settings": {"tasks": dataclasses.asdict(drawn)},
            "method": dataclasses.asdict(config),
            "compute_source": kernels.source,
            "comms_source": collectives(max(drawn.world_sizes)).source,
            "command": command_line(),
            "training_seconds": round(time.process_time() - start, 1),
        },
    )
    policy = Policy(trainer.net.eval(), info)
    judges = data.sample_policy_tasks(test, drawn, max(1, args.num_tasks // 2))
    greedies = [heuristics.GreedySearcher(key) for key in heuristics.GREEDY_KEYS]
    others = [heuristics.RandomSearcher(), *greedies, heuristics.CostGreedySearcher()]
    found = policies.compare(method.searcher_type(policy), others, judges, costs)
    save_policy(args.out, policy, policy_card(info, found))


def policy_card(info: PolicyInfo, found: Sequence[policies.Comparison]) -> str:
    """Write the card of a placement policy in Markdown."""
    told, method = info.trained_on, policies.METHODS[info.method]
    paper = method.config_type()
    settings = [
        f"| {k} | {v} | {getattr(paper, k)} |" for k, v in told["method"].items()
    ]
    rows = [
        f"| {c.name} | {c.change:+.1%} | {c.low:+.1%} to {c.high:+.1%} | "
        f"{c.num_pairs} | {c.num_infeasible} | {c.num_lost} |"
        for c in found
    ]
    return f"""# Placement policy `{info.name}`

{method.paper}: places whole tables, one after another.

| | |
| --- | --- |
| costs of | {info.hardware} ({told["compute_source"]}) |
| collectives | {told["comms_source"]} |
| tables | {told["num_tables"]} ({told["tables"]}); half train, the others judge |

Training and judging rest on predicted costs; no plan was measured.

## Settings, beside the paper's released code

| | here | paper |
| --- | --- | --- |
{_lines(settings)}

## On tasks of tables never seen in training

Change of the predicted iteration time against each yardstick's, in pairs: mean and 95 %
bootstrap interval (below 0: the policy is quicker). `greedy-cost` is not of the papers:
largest predicted cost first, on the rank with the least. The last columns count tasks
that only one of the two can place.

| against | change | 95 % interval | tasks | policy alone | yardstick alone |
| --- | --- | --- | --- | --- | --- |
{_lines(rows)}

## Made by

- `{told["command"]}`
"""


def _lines(rows: Iterable[str]) -> str:
    return "\n".join(rows)


if __name__ == "__main__":
    main()
