"""Train the papers' nets and policies for the searches of this package.

    cd benchmarks
    python -m papers.train nets --compute compute.jsonl --comms comms.jsonl \
        --out my_nets
    python -m papers.train policy --method dreamshard --cost-model my_bundle \
        --out my_policy

`nets` trains NeuroShard's nets on files of `neuroshard collect`. With `--label MODEL`
it trains on that cost model's predictions, and the measured records only test the nets.
`policy` trains a DreamShard or AutoShard policy for a cost model, on half of the
tables, and tests it on the other half. Both write weights, a description and a card.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.options import add_option
from harness.tasks import cap_rows
from papers import data, heuristics, nets, policies
from papers.data import Floats, LabelConfig, PolicyTaskConfig
from papers.nets import FitReport, PaperTrainConfig
from torchrec_neuroshard.bundles.find import load_comms_model, load_cost_model
from torchrec_neuroshard.errors import ConfigError, NeuroShardError, RecordMismatchError
from torchrec_neuroshard.files import check_folder, from_options
from torchrec_neuroshard.hardware.device_types import BACKENDS
from torchrec_neuroshard.measure.records import CommsRecord, CostRecord, command_line
from torchrec_neuroshard.measure.store import read_comms_records, read_records
from torchrec_neuroshard.models.base import CommsModel
from torchrec_neuroshard.models.collectives import BandwidthCommsModel
from torchrec_neuroshard.papers.neuroshard_models import (
    CommsNets,
    ComputeNet,
    NetsInfo,
    NeuroShardModels,
)
from torchrec_neuroshard.papers.policies import Policy, PolicyInfo


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    kinds = {"nets": (_add_nets, train_nets), "policy": (_add_policy, train_policy)}
    for name, (add, run) in kinds.items():
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        own = functools.partial(add_option, command)
        own("out", ..., "folder to write to", Path)
        sets = "JSON of table sets (default: generated like the DLRM dataset)"
        own("tables", None, sets, Path)
        own("workload", [], "sets to use (default: all)", str, nargs="*")
        own("seed", 0, "random seed")
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
    add = functools.partial(add_option, parser)
    add("compute", ..., "files of kernels", Path, nargs="+")
    add("comms", [], "files of collectives", Path, nargs="*")
    sizes = "numbers of ranks (default: those in --comms)"
    add("world_sizes", None, sizes, int, nargs="*")
    add("epochs", PaperTrainConfig().epochs, "passes over the training samples")
    add("optimizer", "sgd", "optimizer of the tables")
    label = "cost model to train on, by name or folder (default: measurements)"
    add("label", None, label, str, metavar="MODEL")
    group, drawn = parser.add_argument_group("random samples of --label"), LabelConfig()
    add = functools.partial(add_option, group)
    add("num_samples", drawn.num_samples, "number of samples")
    add("batch_sizes", drawn.batch_sizes, "samples over all ranks", int, nargs="+")
    add("widths", drawn.widths, "widths of the tables", int, nargs="+")
    add("longest_offset_ms", drawn.longest_offset_ms, "longest start offset of a rank")
    add("max_rows", None, "most rows of a table", int)


def train_nets(args: argparse.Namespace) -> None:
    """Train NeuroShard's nets for one machine, test them and write them."""
    recipe = from_options(PaperTrainConfig, args)
    drawn = from_options(LabelConfig, args)
    headers, records = read_records(args.compute)
    files = read_comms_records(args.comms)
    collectives = [r for _, of_file in files for r in of_file]
    here = headers[0].fingerprint
    if others := {h.fingerprint.device for h, _ in files} - {here.device}:
        theirs = ", ".join(sorted(others))
        raise RecordMismatchError(
            f"kernels were measured on {here.device}, but collectives on {theirs}; "
            "pass files of one device"
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
    sizes = tuple(sorted(comms))
    info = NetsInfo(world_sizes=sizes, fingerprint=here, trained_on=trained_on)
    models = NeuroShardModels(info=info, compute=compute, comms=comms)
    nets.save_models(args.out, models, nets_card(here.device, trained_on))


def _train_kernels(
    args: argparse.Namespace,
    recipe: PaperTrainConfig,
    drawn: LabelConfig,
    records: Sequence[CostRecord],
    device_type: str,
) -> tuple[ComputeNet, dict[str, Any]]:
    """Train on measured or labelled sets and test on sets of held-out tables."""
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
    """Train the nets of one number of ranks and test them on measured test samples.

    Nets trained on a model's predictions have not seen the test samples either.
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
    """Return a net's relative errors on test samples."""
    error = np.abs(predicted / measured - 1)
    print(
        f"{what}: mean error {error.mean():.1%} on measured samples; {report}",
        flush=True,
    )
    return {
        "what": what,
        "num_samples": len(measured),
        "errors": {"mean": float(error.mean()), "median": float(np.median(error))},
        "report": dataclasses.asdict(report),
    }


def nets_card(device: str, trained_on: Mapping[str, Any]) -> str:
    """Return the card of NeuroShard's nets in Markdown."""
    settings, recipe = trained_on["settings"], trained_on["settings"]["recipe"]
    labels = f"predicted by `{settings['label']}`" if settings["label"] else "measured"
    rows = [
        f"| {j['what']} | {j['num_samples']} | {j['errors']['mean']:.1%} | "
        f"{j['errors']['median']:.1%} | {j['report']['num_training']} |"
        for j in trained_on["judgements"]
    ]
    return f"""# NeuroShard's nets

The cost models of NeuroShard (MLSys 2023, arXiv 2305.01868) for `search="neuroshard"`.
One net predicts forward + backward of a fused kernel. For each number of ranks, a pair
of nets predicts the all-to-alls.

| | here | paper |
| --- | --- | --- |
| device | {device} | NVIDIA GPUs |
| labels | {labels} | measured |
| epochs | {recipe["epochs"]} | 1,000 |
| samples per step | {recipe["batch_samples"]} | 512 |
| optimizer of the tables | {recipe["optimizer"]} | sgd |
| seed | {recipe["seed"]} | |

## Error on measured samples outside the training data

The error is |predicted / measured - 1|. Kernels: sets of held-out tables. Collectives:
the slowest rank; in the forward all-to-all, from that rank's start. The paper trained
each net on up to 80,000 samples.

| | samples | mean | median | trained on |
| --- | --- | --- | --- | --- |
{_lines(rows)}

## Made by

{_lines(f"- `{c}`" for c in [*trained_on["commands"], trained_on["command"]])}
"""


# Policies.


def _add_policy(parser: argparse.ArgumentParser) -> None:
    add = functools.partial(add_option, parser)
    add("method", ..., "method of the policy", str, choices=policies.METHODS)
    add("cost_model", ..., "a bundle's name or its folder", str)
    add("device_type", "cpu", "its device type", choices=tuple(BACKENDS))
    links = "bandwidth of links, instead of the cost model's collectives"
    add("gb_per_s", None, links, float)
    setting = "settings of the method, e.g. iterations=30 (default: the paper's)"
    add("set", [], setting, _setting, nargs="*")
    add("num_tasks", 200, "training tasks; half as many test tasks are added")
    for name, default in dataclasses.asdict(PolicyTaskConfig()).items():
        if name != "seed":
            kind = str if name == "optimizers" else int
            text = "as in PolicyTaskConfig"
            add(name, default, text, kind, nargs="+")


def _setting(text: str) -> tuple[str, float]:
    """Return the name and number of NAME=NUMBER; whole numbers stay integers."""
    name, _, value = text.partition("=")
    return name, float(value) if set(value) & set(".e") else int(value)


def train_policy(args: argparse.Namespace) -> None:
    """Train a policy on half of the tables, test it on the other half, write it."""
    method = policies.METHODS[args.method]
    try:
        config = method.config_type(**{"seed": args.seed, **dict(args.set)})
    except TypeError as error:
        raise ConfigError(f"{args.method}: {error}") from error
    model, device_type = args.cost_model, args.device_type

    def collectives(world_size: int) -> CommsModel:
        """Return collectives of --gb-per-s, or else of the cost model's device."""
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
    # Tables that no sample reads cost nothing on any rank, so they are left out.
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
    policies.save_policy(args.out, policy, policy_card(info, found))


def policy_card(info: PolicyInfo, found: Sequence[policies.Comparison]) -> str:
    """Return the card of a placement policy in Markdown."""
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

{method.paper}: it places whole tables, one after another.

| | |
| --- | --- |
| costs of | {info.hardware} ({told["compute_source"]}) |
| collectives | {told["comms_source"]} |
| tables | {told["num_tables"]} ({told["tables"]}); half train, half test |

Training and test use predicted costs. No plan was measured.

## Settings, compared with the paper's code

| | here | paper |
| --- | --- | --- |
{_lines(settings)}

## Test on held-out tables

Mean change of the predicted iteration time against each baseline, task by task, and its
95 % bootstrap interval (below 0: the policy is faster). `greedy-cost` is not in the
papers: it places the table with the largest predicted cost first, on the rank with the
least. The last columns count tasks that only one of the two can place.

| baseline | change | 95 % interval | tasks | policy only | baseline only |
| --- | --- | --- | --- | --- | --- |
{_lines(rows)}

## Made by

- `{told["command"]}`
"""


def _lines(rows: Iterable[str]) -> str:
    return "\n".join(rows)


if __name__ == "__main__":
    main()
