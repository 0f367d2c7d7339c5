"""`neuroshard train`: records in, bundle out."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from torchrec_neuroshard.cost_models import comms_training_cli
from torchrec_neuroshard.cost_models.bundle import BundleInfo, save_bundle
from torchrec_neuroshard.cost_models.card import Repeatability, compute_card
from torchrec_neuroshard.cost_models.training import (
    Evaluation,
    TrainConfig,
    as_cost_model,
    build_sets,
    evaluate,
    fit_linear,
    fit_stock,
    train,
    training_ranges,
)
from torchrec_neuroshard.errors import RecordError
from torchrec_neuroshard.record_store import read_records, record_kind
from torchrec_neuroshard.records import command_line, repeatability, steady_records

__all__ = ["add_arguments", "run", "train_bundle"]


def train_bundle(
    records: Sequence[Path],
    out: Path,
    name: str,
    config: TrainConfig,
    console: Console | None = None,
) -> list[Evaluation]:
    """Train on record files, judge on their held-out tables, write a bundle.

    Records that other work disturbed (`steady_records`) take part in neither.

    Args:
        records: Parquet files of one machine.
        out: Folder of the bundle.
        name: What the bundle is called.
        config: Sizes and rates.
        console: Where progress is printed.

    Returns:
        The learned model's and the yardsticks' errors.

    Raises:
        RecordError: Too few records, or none of held-out tables.
        RecordMismatchError: The files are of different machines.
    """
    console = console or Console()
    headers, all_records = read_records(records)
    steady = steady_records(all_records)
    num_disturbed = len(all_records) - len(steady)
    training = build_sets([r for r in steady if not r.held_out])
    held_out = [r for r in steady if r.held_out and r.repeat_of is None]
    if len(held_out) < 10:
        raise RecordError(
            f"{len(held_out)} sets of held-out tables are too few to judge a model; "
            f"{num_disturbed} records that other work disturbed were left out; measure "
            "more sets"
        )
    test = build_sets(held_out)
    console.print(
        f"{training.num_sets} sets to train on, {test.num_sets} of held-out tables; "
        f"{num_disturbed} records that other work disturbed are left out"
    )

    def report(epoch: int, loss: float, mape: float, tau: float) -> None:
        console.print(
            f"epoch {epoch + 1:4d}/{config.epochs}  loss {loss:.5f}  "
            f"validation: total error {mape:.2%}  tau {tau:.4f}"
        )

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        network = train(training, config, report)
    finally:
        torch.set_num_threads(threads)
    evaluations = [
        evaluate("learned", as_cost_model(network, training, name), test),
        evaluate("linear", fit_linear(training), test),
        evaluate("stock", fit_stock(training), test),
    ]
    command = command_line()
    info = BundleInfo(
        name=name,
        fingerprint=headers[0].fingerprint,
        reference_ms=headers[0].reference_ms,
        network={
            "num_members": config.num_members,
            "hidden": config.hidden,
            "latent": config.latent,
            "head_hidden": config.head_hidden,
        },
        ranges=training_ranges(training),
        trained_on={
            "num_training_sets": training.num_sets,
            "num_test_sets": test.num_sets,
            "num_disturbed": num_disturbed,
            "created": sorted({h.created[:10] for h in headers}),
            "seed": config.seed,
            "epochs": config.epochs,
            "commands": [*(h.command for h in headers), command],
        },
    )
    noise = Repeatability(tuple(repeatability(steady)))
    card = compute_card(info, noise, evaluations)
    save_bundle(out, network, info, card)
    for evaluation in evaluations:
        console.print(
            f"{evaluation.name}: forward {evaluation.fwd_mape:.2%}, backward "
            f"{evaluation.bwd_mape:.2%}, total {evaluation.total_mape:.2%} (median "
            f"{evaluation.total_median:.2%}), tau {evaluation.kendall_tau:.4f}"
        )
    console.print(noise.line())
    console.print(f"wrote {out}")
    return evaluations


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `neuroshard train`."""
    defaults = TrainConfig()
    parser.add_argument(
        "records", type=Path, nargs="+", help="Parquet files of 'collect'"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the bundle")
    parser.add_argument("--name", help="name of the bundle; default: the folder's")
    parser.add_argument("--epochs", type=int, default=defaults.epochs)
    parser.add_argument("--members", type=int, default=defaults.num_members)
    parser.add_argument("--batch-sets", type=int, default=defaults.batch_sets)
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    collectives = parser.add_argument_group("records of 'collect comms'")
    collectives.add_argument(
        "--test-world-sizes",
        type=int,
        nargs="+",
        default=[],
        help="numbers of ranks to test on and not to train on",
    )
    collectives.add_argument("--backend", help="what they must be measured over")


def run(args: argparse.Namespace) -> int:
    """Run `neuroshard train`."""
    if record_kind(args.records[0]) == "comms":
        return comms_training_cli.run(args)
    train_bundle(
        args.records,
        args.out,
        args.name or args.out.name,
        TrainConfig(
            epochs=args.epochs,
            num_members=args.members,
            batch_sets=args.batch_sets,
            learning_rate=args.learning_rate,
            seed=args.seed,
        ),
    )
    return 0
