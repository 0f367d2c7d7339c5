"""Records of kernels or of collectives in, a bundle out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchrec_neuroshard.bundles.calibrate import (
    Calibration,
    CalibrationConfig,
    calibrate,
    split_records,
)
from torchrec_neuroshard.bundles.cards import (
    calibration_note,
    comms_card,
    compute_card,
)
from torchrec_neuroshard.bundles.find import bundle_folder, pretrained_names
from torchrec_neuroshard.bundles.fit import (
    MEAN_ERROR,
    Evaluation,
    SetData,
    TrainConfig,
    as_cost_model,
    build_sets,
    evaluate,
    fit_linear,
    score,
    train,
    training_ranges,
)
from torchrec_neuroshard.bundles.fit_collectives import (
    CommsEvaluation,
    CommsTrainConfig,
    build_comms,
    evaluate_comms,
    make_candidates,
)
from torchrec_neuroshard.bundles.format import (
    COMMS_BUNDLE,
    COMPUTE_BUNDLE,
    BundleInfo,
    CommsBundleInfo,
    load_bundle,
    save_comms_bundle,
)
from torchrec_neuroshard.bundles.training_loop import kept_line
from torchrec_neuroshard.errors import ConfigError, RecordError
from torchrec_neuroshard.measure.records import (
    CommsRecord,
    CostRecord,
    RunHeader,
    command_line,
    repeatability,
    repeatability_line,
    steady_records,
)
from torchrec_neuroshard.measure.store import (
    read_comms_records,
    read_records,
)
from torchrec_neuroshard.models.network import SetCostNetwork
from torchrec_neuroshard.progress import phase

__all__ = [
    "MeasuredSets",
    "calibrate_bundle",
    "source_folder",
    "train_bundle",
    "train_comms_bundle",
]

_TEST_EVERY = 5
"""Of the world sizes trained on, every so many records of collectives are kept for the
test."""


@dataclass(frozen=True, slots=True)
class MeasuredSets:
    """Measured sets of one device, split by table."""

    headers: Sequence[RunHeader]
    training: SetData
    test: SetData
    """Of held-out tables."""
    num_disturbed: int
    """Records left out, since other work disturbed them."""
    noise: str
    """How much sets measured again differ."""

    @classmethod
    def read(
        cls, files: Sequence[Path], select: Callable[..., list[CostRecord]]
    ) -> MeasuredSets:
        """Read files of one machine.

        Args:
            files: Parquet files.
            select: Leaves out records that do not count.

        Raises:
            RecordError: Too few records to train on, or to judge by.
            RecordMismatchError: The files are of different machines.
        """
        headers, records = read_records(files)
        kept = select(records)
        num_disturbed = len(records) - len(kept)
        try:
            training, test = map(build_sets, split_records(kept))
        except RecordError as error:
            raise RecordError(
                f"{error} ({num_disturbed} of {len(records)} records were left out: "
                "other work disturbed them)"
            ) from error
        noise = repeatability_line(repeatability(kept), "set")
        return cls(headers, training, test, num_disturbed, noise)

    def describe(
        self,
        name: str,
        network: SetCostNetwork,
        ranges: Mapping[str, tuple[float, float]],
        trained_on: Mapping[str, Any],
    ) -> BundleInfo:
        """Describe a network that was fitted to these sets.

        Args:
            name: What it is called.
            network: The network.
            ranges: Feature name -> smallest and largest value in training.
            trained_on: What else to tell of the training.
        """
        header = self.headers[0]
        return BundleInfo(
            name=name,
            fingerprint=header.fingerprint,
            reference_ms=header.reference_ms,
            network=network.config,
            ranges=ranges,
            trained_on={
                "num_training_sets": self.training.num_sets,
                "num_test_sets": self.test.num_sets,
                "num_disturbed": self.num_disturbed,
                "created": sorted({h.created[:10] for h in self.headers}),
                "commands": [*(h.command for h in self.headers), command_line()],
                **trained_on,
            },
        )


def train_bundle(
    records: Sequence[Path],
    out: Path,
    name: str,
    config: TrainConfig,
    say: Callable[[str], object] = print,
) -> list[Evaluation]:
    """Train on record files, judge on their held-out tables, write a bundle.

    Where a linear model errs less there than the ensemble, the bundle holds that one.
    Records that other work disturbed (`steady_records`) take part in neither.

    Args:
        records: Parquet files of one machine.
        out: Folder of the bundle.
        name: What the bundle is called.
        config: Sizes and rates.
        say: Prints a line.

    Returns:
        The learned model's and the yardsticks' errors.

    Raises:
        RecordError: Too few records, or none of held-out tables.
        RecordMismatchError: The files are of different machines.
    """
    with phase("reading the records"):
        sets = MeasuredSets.read(records, steady_records)
    training, test = sets.training, sets.test
    say(
        f"{training.num_sets} sets to train on, {test.num_sets} of held-out tables; "
        f"{sets.num_disturbed} records that other work disturbed are left out"
    )
    with phase("training"):
        networks = {
            "learned": train(training, config),
            "linear": fit_linear(training),
        }
    with phase("judging by held-out tables"):
        evaluations = [
            evaluate(n, as_cost_model(m, training, n), test)
            for n, m in networks.items()
        ]
    errors = {e.name: score(e) for e in evaluations}
    kept = min(errors, key=errors.__getitem__)
    verdict = kept_line(kept, errors, MEAN_ERROR)
    info = sets.describe(
        name,
        networks[kept],
        training_ranges(training),
        {"seed": config.seed, "epochs": config.epochs, "kept": kept},
    )
    card = compute_card(info, sets.noise, evaluations, verdict)
    COMPUTE_BUNDLE.save(out, networks[kept], info, card)
    for line in (*(e.line() for e in evaluations), verdict, sets.noise):
        say(line)
    say(f"wrote {out}")
    return evaluations


def train_comms_bundle(
    records: Sequence[Path],
    out: Path,
    name: str,
    config: CommsTrainConfig,
    *,
    test_world_sizes: Sequence[int] = (),
    before: Path | None = None,
    say: Callable[[str], object] = print,
) -> list[CommsEvaluation]:
    """Train on files of collectives, judge on others, write into a bundle.

    Kept is what errs least on the others: the trained net, plainer fits or, with
    `before`, that bundle's model as it is, rescaled or fine-tuned.

    Args:
        records: Files of one machine and backend; several world sizes, each in a run of
            its own or in one run (`--group-sizes`).
        out: Folder of the bundle; a compute model in it is kept.
        name: What the model is called.
        config: Steps and rates.
        test_world_sizes: World sizes that are only tested on.
        before: A bundle to start from, if it has collectives of this backend.
        say: Prints a line.

    Returns:
        The errors by world size and collective.

    Raises:
        RecordError: Too few records, or none of a world size.
        RecordMismatchError: The files are of different machines or backends.
    """
    with phase("reading the records"):
        files = read_comms_records(records)
    headers = [header for header, _ in files]
    _check_world_sizes({r.world_size for _, f in files for r in f}, test_world_sizes)
    training: list[CommsRecord] = []
    test: list[CommsRecord] = []
    for _, measured in files:
        for record in measured:
            kept_out = record.world_size in test_world_sizes
            source = record.index if record.repeat_of is None else record.repeat_of
            if not kept_out and source % _TEST_EVERY:
                training.append(record)
            elif record.repeat_of is None:
                test.append(record)
    intra = _typical([h.intra_gb_per_s for h in headers])
    inter = _typical([h.inter_gb_per_s for h in headers])
    training_data = build_comms(training, intra, inter)
    test_data = build_comms(test, intra, inter)
    say(f"{len(training)} collectives to train on, {len(test)} to test")

    init = None
    if before is not None and COMMS_BUNDLE.is_in(before):
        network, described = COMMS_BUNDLE.load(before)
        init = network if described.backend == headers[0].backend else None
    with phase("training"):
        found = make_candidates(training_data, test_data, config, init)
        network = found.network
        evaluations = evaluate_comms(network, training_data, test_data)
    sums = [float(sum(r.bytes_per_peer)) for r in training]
    info = CommsBundleInfo(
        name=name,
        fingerprint=headers[0].fingerprint,
        backend=headers[0].backend,
        hidden=network.hidden,
        intra_gb_per_s=intra,
        inter_gb_per_s=inter,
        world_sizes=tuple(sorted({r.world_size for r in training})),
        bytes_per_rank=(min(sums), max(sums)),
        compute_slowdown=_merge([h.compute_slowdown for h in headers]),
        column_order_ms_per_mb=_merge([h.column_order_ms_per_mb for h in headers]),
        compute_reference_ms=_typical([h.compute_reference_ms for h in headers]),
        trained_on={
            "num_training": len(training),
            "num_test": len(test),
            "created": sorted({h.created[:10] for h in headers}),
            "cores": headers[0].sampling.get("cores", "unknown"),
            "seed": config.seed,
            "steps": config.steps,
            "kept": found.kept,
            "commands": [*(h.command for h in headers), command_line()],
        },
    )
    differences = [d for _, measured in files for d in repeatability(measured)]
    noise = repeatability_line(differences, "collective")
    card = comms_card(info, noise, evaluations, found.verdict())
    save_comms_bundle(out, network, info, card)
    for e in evaluations:
        if e.collective == "all":
            say(
                f"{e.world_size} ranks ({'' if e.trained else 'not '}in training): "
                f"{e.line()}"
            )
    for line in (found.verdict(), noise, f"wrote {out}"):
        say(line)
    return evaluations


def _merge(
    files: Sequence[Mapping[str, tuple[float, float]]],
) -> dict[str, tuple[float, float]]:
    """Median over the files of each number of ranks."""
    found: dict[int, list[tuple[float, float]]] = {}
    for of_file in files:
        for count, values in of_file.items():
            found.setdefault(int(count), []).append(values)
    merged = {}
    for n in sorted(found):
        forward, backward = map(float, np.median(found[n], axis=0))
        merged[str(n)] = forward, backward
    return merged


def _check_world_sizes(known: set[int], test_world_sizes: Sequence[int]) -> None:
    absent = sorted(set(test_world_sizes) - known)
    if absent:
        raise RecordError(
            f"no records of world size {', '.join(map(str, absent))} to test on; the "
            f"files are of {', '.join(map(str, sorted(known)))}"
        )
    if known <= set(test_world_sizes):
        raise RecordError(
            "every world size is kept for the test; leave one to train on"
        )


def _typical(values: Sequence[float]) -> float:
    known = [v for v in values if v > 0]
    return float(np.median(known)) if known else 0.0


def source_folder(name: str | Path) -> Path:
    """Find the bundle to start from.

    Args:
        name: Name of a shipped bundle, or a bundle's folder.

    Raises:
        ConfigError: There is neither.
    """
    if (folder := bundle_folder(name)) is None:
        raise ConfigError(
            f"no bundle '{name}' to start from: it is neither a shipped one "
            f"({', '.join(pretrained_names()) or 'none'}) nor a folder made by "
            "'neuroshard train'"
        )
    return folder


def calibrate_bundle(
    source: Path,
    records: Sequence[Path],
    out: Path,
    name: str,
    config: CalibrationConfig,
    select: Callable[[Sequence[CostRecord]], list[CostRecord]] | None = None,
) -> tuple[Calibration, list[Evaluation]]:
    """Fine-tune a bundle on another device's records and write a new bundle.

    A model of collectives beside `source` is not taken over: it was measured there.

    Args:
        source: Folder of the bundle to start from.
        records: Files of compute records of one device.
        out: Folder of the new bundle.
        name: What it is called.
        config: Steps and rates.
        select: Leaves out records that do not count; None: `steady_records`.

    Returns:
        The calibration, and the errors that the card shows: of what was kept, of all
        candidates and of the yardsticks.

    Raises:
        ConfigError: `out` is the bundle to start from.
        RecordError: Too few records.
        RecordMismatchError: The files are of different devices.
        BundleCorruptError: `source` is damaged.
    """
    if out.resolve() == source.resolve():
        raise ConfigError(
            f"{out} is the bundle to start from; name another folder for the new one"
        )
    model, old = load_bundle(source), COMPUTE_BUNDLE.read_info(source)
    sets = MeasuredSets.read(records, select or steady_records)
    training, test = sets.training, sets.test
    found = calibrate(model, old.network, training, test, config)
    kept = found.candidates[found.kept]
    evaluations = [
        evaluate("learned", as_cost_model(kept.network, test, name), test),
        *(c.evaluation for c in found.candidates.values()),
    ]
    info = sets.describe(
        name,
        kept.network,
        kept.ranges,
        {
            "seed": config.seed,
            "steps": config.steps,
            "calibrated_from": {
                "name": old.name,
                "device": old.fingerprint.device,
                "num_training_sets": old.trained_on.get("num_training_sets"),
            },
            "kept": found.kept,
            "factors": list(found.factors_2),
            "errors": found.errors,
        },
    )
    note = calibration_note(old, found)
    card = compute_card(info, sets.noise, evaluations, note)
    COMPUTE_BUNDLE.save(out, kept.network, info, card)
    return found, evaluations
