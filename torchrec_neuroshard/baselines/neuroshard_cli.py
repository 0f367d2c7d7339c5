"""`neuroshard train-neuroshard`: record files in, NeuroShard's own nets and a card out.

Where the files hold few samples, `--label` has a cost model make more.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from scipy import stats

from torchrec_neuroshard.baselines.common import PAPER_BATCH_SIZE
from torchrec_neuroshard.baselines.neuroshard_models import (
    CommsNets,
    ComputeNet,
    NeuroShardModels,
    save_models,
)
from torchrec_neuroshard.baselines.neuroshard_training import (
    FitReport,
    PaperTrainConfig,
    comparable_records,
    draw_columns,
    fit_comms,
    fit_comms_to_model,
    fit_compute,
    fit_compute_to_model,
    is_pooled,
    measured_samples,
    predict_records,
    split_samples,
)
from torchrec_neuroshard.baselines.policy_cli import read_tables
from torchrec_neuroshard.cost_models.base import CommsModel, CostModel
from torchrec_neuroshard.cost_models.loading import load_comms_model, load_cost_model
from torchrec_neuroshard.errors import ConfigError, RecordMismatchError
from torchrec_neuroshard.features import ShardFeaturizer
from torchrec_neuroshard.files import check_folder, from_options
from torchrec_neuroshard.progress import phase
from torchrec_neuroshard.record_store import read_comms_records, read_records
from torchrec_neuroshard.records import CommsRecord, CostRecord, command_line
from torchrec_neuroshard.tables import TableConfig
from torchrec_neuroshard.workloads import cap_rows

__all__ = [
    "Errors",
    "Judgement",
    "PaperRun",
    "add_arguments",
    "paper_card",
    "run",
    "train_models",
]

Floats = npt.NDArray[np.float64]

_BATCH_SIZES = (1_024, 2_048, 4_096, 8_192)


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperRun:
    """One training run."""

    compute: tuple[Path, ...]
    """Files of `neuroshard collect compute`."""
    comms: tuple[Path, ...] = ()
    """Files of `neuroshard collect comms`, any numbers of ranks."""
    cost_model: str | None = None
    """What the nets are judged beside, as for `load_cost_model`."""
    label: bool = False
    """Train on what `cost_model` predicts, instead of on the records."""
    world_sizes: tuple[int, ...] = ()
    """Nets of collectives for these; empty is all that were measured."""
    batch_sizes: tuple[int, ...] = _BATCH_SIZES
    """Of labelled samples, over all ranks."""
    widths: tuple[int, ...] = ()
    """That each table is labelled at; empty is the paper's six."""
    num_samples: int = 100_000
    """Labelled samples for each net; the paper's most."""
    longest_offset_ms: float = 19.0
    """Between ranks' starts in labelled samples; the paper's."""
    mix_hardware: bool = False
    """Take collectives of another device than the kernels; the sums that the search
    makes of both are then of no machine."""
    recipe: PaperTrainConfig = dataclasses.field(default_factory=PaperTrainConfig)

    def __post_init__(self) -> None:
        if self.label and self.cost_model is None:
            raise ConfigError("labels come from a cost model: give --cost-model too")
        if not self.batch_sizes or min(*self.batch_sizes, self.num_samples) < 1:
            raise ConfigError(
                "batch_sizes and num_samples must be at least 1, got "
                f"{self.batch_sizes} and {self.num_samples}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Errors:
    """Of predictions against measured times."""

    mean: float
    """Of the absolute error relative to the measured time."""
    median: float
    kendall_tau: float
    """Not a number for fewer than two samples."""

    @classmethod
    def of(cls, predicted: Floats, measured: Floats) -> Errors:
        """Compare times of samples, `S` each [ms]."""
        error = np.abs(predicted / measured - 1)
        tau = stats.kendalltau(predicted, measured).statistic
        return cls(
            mean=float(error.mean()),
            median=float(np.median(error)),
            kendall_tau=float(tau),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """One net on measured samples that it was not trained on."""

    what: str
    num_samples: int
    errors: Errors
    """Of collectives, on the slowest rank's time."""
    others: Errors | None
    """The same of `PaperRun.cost_model`; None without one."""
    report: FitReport


def train_models(
    run: PaperRun, tables: Sequence[TableConfig], console: Console | None = None
) -> NeuroShardModels:
    """Train all nets for one machine, and judge them on its records.

    Sets of held-out tables only judge the compute net. Collectives that judge are the
    recipe's test samples, which labelled nets have not seen either.

    Args:
        run: What to do.
        tables: That labelled sets are drawn from.
        console: Where progress is printed.

    Raises:
        RecordError: A file cannot be read, or there are too few records.
        RecordMismatchError: The files are of different machines.
        ConfigError: The cost model has no collectives, and labels need them.
    """
    console = console or Console()
    with phase("reading the records"):
        headers, records = read_records(run.compute)
        files = read_comms_records(run.comms)
    device = headers[0].fingerprint.device
    devices = sorted({h.fingerprint.device for h, _ in files})
    if not run.mix_hardware and devices not in ([], [device]):
        raise RecordMismatchError(
            f"kernels were measured on {device}, collectives on {', '.join(devices)}; "
            "train on one machine's records or allow it by --mix-hardware"
        )
    collectives = [r for _, of_file in files for r in of_file]
    measured = sorted({r.world_size for r in collectives if is_pooled(r)})
    device_type = headers[0].fingerprint.device_type
    others = {w: _comms_model(run, w, device_type) for w in run.world_sizes or measured}
    with phase("training the net of kernels"):
        compute, judgement = _train_compute(run, tables, records, device_type)
    judgements = [judgement]
    console.print(_line(judgement))
    nets: dict[int, CommsNets] = {}
    for world_size, other in others.items():
        with phase(f"training the nets of {world_size} ranks"):
            nets[world_size], both = _train_comms(run, world_size, collectives, other)
        judgements += both
        for judgement in both:
            console.print(_line(judgement))
    trained_on = {
        "settings": dataclasses.asdict(run)
        | {n: [p.name for p in getattr(run, n)] for n in ("compute", "comms")},
        "judgements": [dataclasses.asdict(j) for j in judgements],
        "comms_devices": devices,
        "backends": sorted({h.backend for h, _ in files}),
        "commands": [h.command for h in [*headers, *(h for h, _ in files)]],
        "command": command_line(),
    }
    return NeuroShardModels(
        fingerprint=headers[0].fingerprint,
        compute=compute,
        comms=nets,
        trained_on=trained_on,
        card=paper_card(run, device, judgements, trained_on),
    )


def _train_compute(
    run: PaperRun,
    tables: Sequence[TableConfig],
    records: Sequence[CostRecord],
    device_type: str,
) -> tuple[ComputeNet, Judgement]:
    other = None
    if run.cost_model is not None:
        other = load_cost_model(run.cost_model, device_type=device_type)
    if run.label:
        assert other is not None
        net, report = fit_compute_to_model(
            other,
            tables,
            batch_sizes=run.batch_sizes,
            num_samples=run.num_samples,
            config=run.recipe,
            widths=run.widths,
        )
    else:
        net, report = fit_compute([r for r in records if not r.held_out], run.recipe)
    held_out = comparable_records(
        (r for r in records if r.held_out), run.recipe.optimizer
    )
    measured = np.array([r.total_ms for r in held_out])
    theirs = None if other is None else _predict_by(other, held_out)
    predicted = predict_records(net, held_out)
    return net, _judge("kernels", measured, predicted, theirs, report)


def _predict_by(cost_model: CostModel, records: Sequence[CostRecord]) -> Floats:
    """Forward + backward of measured sets by another model, `S` [ms]."""
    sums = np.zeros((len(records), cost_model.encoding_dim))
    for row, record in enumerate(records):
        widths = [t.embedding_dim for t in record.tables]
        featurizer = ShardFeaturizer(record.tables, record.batch_size)
        features = featurizer.features(np.arange(len(widths)), widths)
        sums[row] = cost_model.encode(features).sum(axis=0)
    total: Floats = cost_model.predict_sums(sums).sum(axis=1)
    return total


def _train_comms(
    run: PaperRun,
    world_size: int,
    records: Sequence[CommsRecord],
    other: CommsModel | None,
) -> tuple[CommsNets, list[Judgement]]:
    if run.label:
        assert other is not None
        nets, *reports = fit_comms_to_model(
            other,
            draw_columns,
            world_size=world_size,
            batch_sizes=run.batch_sizes,
            num_samples=run.num_samples,
            config=run.recipe,
            longest_offset_ms=run.longest_offset_ms,
        )
    else:
        nets, *reports = fit_comms(records, world_size, run.recipe)
    judgements = []
    for way, (name, net) in enumerate(
        (("forward", nets.forward), ("backward", nets.backward))
    ):
        samples = measured_samples(records, world_size, f"pooled_{name}")
        what = f"{name} all-to-all of {world_size} ranks"
        *_, test = split_samples(len(samples.target_SW), run.recipe, what)
        inputs = samples.inputs_SI[test]
        with torch.inference_mode():
            predicted = net(torch.from_numpy(inputs).float()).double().numpy()
        theirs = None
        if other is not None:
            columns, offsets = inputs[:, :world_size], inputs[:, world_size:]
            theirs = other.all_to_all(columns, PAPER_BATCH_SIZE)[..., way]
            if len(offsets.T):
                theirs = theirs + offsets.max(axis=1, keepdims=True) - offsets
            theirs = theirs.max(axis=1)
        slowest = samples.target_SW[test].max(axis=1)
        judgements.append(
            _judge(what, slowest, predicted.max(axis=1), theirs, reports[way])
        )
    return nets, judgements


def _comms_model(run: PaperRun, world_size: int, device_type: str) -> CommsModel | None:
    if run.cost_model is None:
        return None
    found = load_comms_model(
        run.cost_model,
        device_type=device_type,
        world_size=world_size,
        local_world_size=world_size,
        may_stand_in=False,
    )
    if found is None and run.label:
        raise ConfigError(
            f"cost model '{run.cost_model}' has no collectives to label with; train "
            "it on records of 'neuroshard collect comms' too"
        )
    return found


def _judge(
    what: str,
    measured: Floats,
    predicted: Floats,
    theirs: Floats | None,
    report: FitReport,
) -> Judgement:
    return Judgement(
        what=what,
        num_samples=len(measured),
        errors=Errors.of(predicted, measured),
        others=None if theirs is None else Errors.of(theirs, measured),
        report=report,
    )


def _line(judgement: Judgement) -> str:
    report = judgement.report
    return (
        f"{judgement.what}: {report.num_training} samples, best epoch "
        f"{report.best_epoch}, test error {report.test_mse**0.5:.3f} ms (root mean "
        f"square), of the mean {report.mean_test_mse**0.5:.3f} ms; measured: "
        f"{judgement.errors.mean:.1%} off on average"
    )


def paper_card(
    run: PaperRun,
    device: str,
    judgements: Sequence[Judgement],
    trained_on: Mapping[str, Any],
) -> str:
    """Write the card of NeuroShard's nets in Markdown."""
    recipe, other = run.recipe, run.cost_model or "-"
    labels = "measured"
    if run.label:
        labels = (
            f"predicted by `{other}`, for samples drawn by the paper's rules at "
            f"{', '.join(map(str, run.batch_sizes))} samples a batch"
        )
    lines = [
        "# NeuroShard's nets",
        "",
        "The cost models of NeuroShard (MLSys 2023, arXiv 2305.01868) for "
        '`search="neuroshard"`: forward + backward of one fused kernel, and one pair '
        "of nets of the all-to-all for each number of ranks.",
        "",
        "| | here | paper |",
        "| --- | --- | --- |",
        f"| device | {device} | NVIDIA GPUs |",
        f"| labels | {labels} | measured |",
        f"| samples of kernels | {judgements[0].report.num_training} | up to 80,000 |",
        "| samples of collectives | "
        f"{max((j.report.num_training for j in judgements[1:]), default=0)} at most | "
        "up to 80,000 |",
        f"| epochs | {recipe.epochs} | 1,000 |",
        f"| samples per step | {recipe.batch_samples} | 512 |",
        f"| longest offset between starts | {run.longest_offset_ms:g} ms | 19 ms |",
        f"| optimizer of the tables | {recipe.optimizer} | sgd |",
        f"| seed | {recipe.seed} | |",
        "",
        "## Error on measured samples that the nets were not trained on",
        "",
        "Absolute error relative to the measured time; tau is Kendall's. Kernels: sets "
        "of held-out tables. Collectives: the slowest rank, from its own start in the "
        f"forward one. `{other}` has seen most of these collectives in training.",
        "",
        f"| | samples | nets: mean | median | tau | `{other}`: mean | median | tau |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *(
            f"| {j.what} | {j.num_samples} | {_shown(j.errors)} | {_shown(j.others)} |"
            for j in judgements
        ),
        "",
        "## What the paper's inputs leave out, and how it is put in their terms",
        "",
        "- Batch size: pooling factors are lookups over 65,536, sums of widths are "
        "multiplied by the batch over 65,536.",
        "- Optimizer, weight type, weighted lookups, spread of bag lengths: one kind "
        "is trained on, whatever a task has.",
        "- Forward and backward are one number; fusion groups are one kernel each.",
        "- A rank's start in the forward all-to-all is taken from what it waited "
        "longer than the others.",
        "",
        "## Made by",
        "",
        *(f"- `{c}`" for c in [*trained_on["commands"], trained_on["command"]]),
    ]
    return "\n".join(lines)


def _shown(errors: Errors | None) -> str:
    if errors is None:
        return "- | - | -"
    return f"{errors.mean:.1%} | {errors.median:.1%} | {errors.kendall_tau:.3f}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `neuroshard train-neuroshard`."""
    recipe = PaperTrainConfig()
    parser.add_argument("--compute", type=Path, nargs="+", required=True)
    parser.add_argument("--comms", type=Path, nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True, help="folder")
    parser.add_argument("--cost-model", help="what to judge the nets beside")
    parser.add_argument(
        "--label", action="store_true", help="train on what --cost-model predicts"
    )
    parser.add_argument(
        "--tables",
        type=Path,
        help="JSON of table sets to label; default: generated like the DLRM dataset",
    )
    parser.add_argument(
        "--workload", nargs="*", default=[None], help="sets of --tables; default: all"
    )
    parser.add_argument("--world-sizes", type=int, nargs="*", default=[])
    parser.add_argument("--num-samples", type=int, default=100_000, help="to label")
    parser.add_argument(
        "--batch-sizes",
        type=int,
        nargs="+",
        default=_BATCH_SIZES,
        help="of labelled samples, over all ranks",
    )
    parser.add_argument("--max-rows", type=int, help="cut the tables to label to these")
    parser.add_argument(
        "--widths",
        type=int,
        nargs="*",
        default=[],
        help="of the tables to label; default: the paper's, 4 to 128",
    )
    parser.add_argument(
        "--longest-offset-ms", type=float, default=19.0, help="of labelled samples"
    )
    parser.add_argument("--epochs", type=int, default=recipe.epochs)
    parser.add_argument("--batch-samples", type=int, default=recipe.batch_samples)
    parser.add_argument("--optimizer", default=recipe.optimizer)
    parser.add_argument("--seed", type=int, default=recipe.seed)
    parser.add_argument(
        "--mix-hardware",
        action="store_true",
        help="take collectives of another device than the kernels",
    )


def run(args: argparse.Namespace) -> int:
    """Run `neuroshard train-neuroshard`."""
    check_folder(args.out)
    tables = tuple(
        table
        for workload in args.workload
        for table in read_tables(args.tables, workload, args.seed)[0]
    )
    if args.max_rows is not None:
        tables = tuple(cap_rows(t, args.max_rows) for t in tables)
    recipe = from_options(PaperTrainConfig, args)
    settings = from_options(PaperRun, args, recipe=recipe)
    save_models(args.out, train_models(settings, tables))
    return 0
