"""Make bundles from records of kernels or collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jinja2
import numpy as np

from torchrec_neuroshard.bundles.choice import Choice
from torchrec_neuroshard.bundles.descriptions import (
    BundleInfo,
    CommsBundleInfo,
    save_comms_bundle,
)
from torchrec_neuroshard.bundles.find import shipped_bundles
from torchrec_neuroshard.bundles.fit import Candidate, fit_model
from torchrec_neuroshard.bundles.fit_collectives import (
    CommsCandidate,
    build_comms,
    fit_comms,
    named_coefficients,
)
from torchrec_neuroshard.bundles.fit_physics import best_factor
from torchrec_neuroshard.bundles.fit_sequences import fit_sequences
from torchrec_neuroshard.bundles.format import COMPUTE_BUNDLE, Bundle
from torchrec_neuroshard.bundles.set_data import SetData, build_sets, split_records
from torchrec_neuroshard.bundles.settings import TrainConfig
from torchrec_neuroshard.errors import ConfigError, RecordError
from torchrec_neuroshard.hardware.device_types import is_accelerator
from torchrec_neuroshard.measure.records import (
    CommsHeader,
    CommsRecord,
    CostRecord,
    RunHeader,
    command_line,
    repeatability,
    repeatability_line,
    steady_records,
)
from torchrec_neuroshard.measure.store import read_comms_records, read_records
from torchrec_neuroshard.models.sequences import SequenceKernels
from torchrec_neuroshard.progress import phase

_TEST_EVERY = 5
"""Of the training world sizes, one in this many collectives is kept for the test."""


def make_bundle(
    records: Sequence[Path],
    out: Path,
    name: str,
    config: TrainConfig,
    *,
    start: Bundle | Literal["nearest"] | None = None,
    others: Sequence[Sequence[Path]] = (),
    select: Callable[[Sequence[CostRecord]], list[CostRecord]] = steady_records,
) -> Choice[Candidate]:
    """Fit a cost model of kernels to one device's records and write a bundle.

    Records that other work disturbed are left out. The candidate with the lowest error
    on left-out sets is kept; the card shows its errors on held-out tables. `start`'s
    model of collectives is not copied, because it was measured on the other device.

    Args:
        records: Files of one machine.
        out: Folder of the bundle.
        name: Name of the bundle.
        config: Sizes and rates.
        start: Another device's bundle to start from, or "nearest": the shipped bundle
            of this device type that, times a factor, has the lowest error on the
            training sets.
        others: Files of other devices of this type, device by device, to learn from as
            well; only without `start`.
        select: Function that leaves out unwanted records.

    Raises:
        ConfigError: `out` is the bundle to start from.
        RecordError: There are too few records, or none of held-out tables.
        RecordMismatchError: The files of one device are of different machines.
        BundleCorruptError: `start` is damaged.
    """
    if isinstance(start, Bundle) and out.resolve() == start.folder.resolve():
        raise ConfigError(
            f"{out} is the bundle to start from; name another folder for the new one"
        )
    with phase("reading the records"):
        headers, measured = read_records(records)
        kept = select(measured)
        num_disturbed = len(measured) - len(kept)
        device_type = headers[0].fingerprint.device_type
        sequences = [r for r in kept if not r.tables[0].pooled]
        on_cpu = not is_accelerator(device_type)

        def parts(records: Sequence[CostRecord]) -> list[SetData]:
            # Sequences have kernels of their own on CPUs.
            own = [r for r in records if r.tables[0].pooled or not on_cpu]
            return [build_sets(part, device_type) for part in split_records(own)]

        try:
            data, test = parts(kept)
        except RecordError as error:
            raise RecordError(
                f"{error} ({num_disturbed} of {len(measured)} records were left "
                "out: other work disturbed them)"
            ) from error
        shared = [parts(select(read_records(f)[1]))[0] for f in others]
    if start == "nearest":
        start = _nearest(data)
    before = None if start is None else start.cost_model()
    with phase("fitting"):
        fitted = fit_model(data, test, config, start=before, others=shared)
    best, header = fitted.best, headers[0]
    from_bundle = None if start is None else start.compute
    info = BundleInfo(
        name=name,
        fingerprint=header.fingerprint,
        reference_ms=header.reference_ms,
        network=best.network.config,
        ranges=best.ranges,
        column_order_ms=_merge([h.column_order_ms for h in headers]),
        sequences=_unpooled(header, sequences, start) if on_cpu else None,
        num_sequence_sets=len(sequences),
        trained_on={
            "num_training_sets": data.num_sets,
            "num_test_sets": test.num_sets,
            "num_other_sets": sum(d.num_sets for d in shared),
            "num_disturbed": num_disturbed,
            "created": sorted({h.created[:10] for h in headers}),
            "commands": [*(h.command for h in headers), command_line()],
            "seed": config.seed,
            "epochs": config.epochs,
            "started_from": from_bundle and from_bundle.name,
            "kept": fitted.kept,
            "errors": fitted.errors,
            "left_out": data.left_out_text(),
        },
    )
    noise = repeatability_line(repeatability(kept), "set")
    card = _card("card", info=info, noise=noise, fitted=fitted, start=from_bundle)
    COMPUTE_BUNDLE.save(out, best.network, info, card)
    return fitted


def _unpooled(
    header: RunHeader, records: Sequence[CostRecord], start: Bundle | None
) -> SequenceKernels | None:
    """Return a CPU's unpooled kernels: fitted, those of `start`, or None."""
    device = header.fingerprint.device
    fitted = fit_sequences(records, device, header.reference_ms)
    if fitted is None and start is not None and start.compute is not None:
        return start.compute.sequences
    return fitted


def _nearest(data: SetData) -> Bundle | None:
    """Return the shipped bundle of a device type that fits sets best, times a factor.

    Returns:
        The bundle; None if no bundle is of this type.
    """

    def error(bundle: Bundle) -> float:
        model = bundle.cost_model()
        predicted = model.predict_sets(data.features_NF, data.set_ids_N, data.num_sets)
        factors = list(map(best_factor, predicted.T, data.costs_S2.T))
        return float(np.abs(np.log(predicted * factors / data.costs_S2)).mean())

    return min(shipped_bundles(data.device_type), key=error, default=None)


def make_comms_bundle(
    records: Sequence[Path],
    out: Path,
    name: str,
    *,
    test_world_sizes: Sequence[int] = (),
    before: Bundle | None = None,
) -> Choice[CommsCandidate]:
    """Fit a model of collectives to records and write it into a bundle.

    Some records are kept for the test, whose errors are only reported. The candidate
    with the lowest error in cross-validation is kept: a fit to the training records
    alone or, with `before`, that bundle's model as it is, rescaled or refitted.

    Args:
        records: Files of one machine and backend. World sizes may come from separate
            runs or from one run (`--group-sizes`).
        out: Folder of the bundle; a compute model in it is kept.
        name: Name of the model.
        test_world_sizes: World sizes that are only tested.
        before: A bundle to start from, with collectives of this backend.

    Raises:
        RecordError: There are too few records, or none of a world size.
        RecordMismatchError: The files are of different machines or backends.
    """
    with phase("reading the records"):
        files = read_comms_records(records)
    headers = [header for header, _ in files]
    training, test = _split_collectives(files, test_world_sizes)
    intra = _typical([h.intra_gb_per_s for h in headers])
    inter = _typical([h.inter_gb_per_s for h in headers])
    start = before.comms if before else None
    found = fit_comms(
        build_comms(training, intra, inter),
        build_comms(test, intra, inter),
        start.table() if start else None,
    )
    sums = [float(sum(r.bytes_per_peer)) for r in training]
    info = CommsBundleInfo(
        name=name,
        fingerprint=headers[0].fingerprint,
        backend=headers[0].backend,
        coefficients=named_coefficients(found.best.coefficients_LK),
        intra_gb_per_s=intra,
        inter_gb_per_s=inter,
        world_sizes=tuple(sorted({r.world_size for r in training})),
        bytes_per_rank=(min(sums), max(sums)),
        compute_slowdown=_merge([h.compute_slowdown for h in headers]),
        compute_reference_ms=_typical([h.compute_reference_ms for h in headers]),
        trained_on={
            "num_training": len(training),
            "num_test": len(test),
            "created": sorted({h.created[:10] for h in headers}),
            "cores": headers[0].sampling.get("cores", "unknown"),
            "kept": found.kept,
            "errors": found.errors,
            "started_from": start and start.name,
            "commands": [*(h.command for h in headers), command_line()],
        },
    )
    differences = [d for _, measured in files for d in repeatability(measured)]
    noise = repeatability_line(differences, "collective")
    card = _card("comms_card", info=info, noise=noise, fitted=found)
    save_comms_bundle(out, info, card)
    return found


def _card(template: str, **values: Any) -> str:
    """Return a card: its template, filled in."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["share"] = "{:.1%}".format
    return environment.get_template(f"{template}.md.j2").render(values)


def _merge(
    files: Sequence[Mapping[str, tuple[float, float]]],
) -> dict[str, tuple[float, float]]:
    """Return the median over the files for each key, a number."""
    merged = {}
    for count in sorted({n for of_file in files for n in of_file}, key=int):
        values = [of_file[count] for of_file in files if count in of_file]
        forward, backward = map(float, np.median(values, axis=0))
        merged[count] = forward, backward
    return merged


def _split_collectives(
    files: Sequence[tuple[CommsHeader, Sequence[CommsRecord]]],
    test_world_sizes: Sequence[int],
) -> tuple[list[CommsRecord], list[CommsRecord]]:
    """Return the records to train on and the records to test on.

    Raises:
        RecordError: There are no records of a world size, or none to train on.
    """
    records = [record for _, measured in files for record in measured]
    known, kept_out = {r.world_size for r in records}, set(test_world_sizes)
    if absent := sorted(kept_out - known):
        raise RecordError(
            f"no records of world size {', '.join(map(str, absent))} to test on; the "
            f"files hold {', '.join(map(str, sorted(known)))}"
        )
    if known <= kept_out:
        raise RecordError(
            "every world size is kept for the test; leave one to train on"
        )
    training: list[CommsRecord] = []
    test: list[CommsRecord] = []
    for record in records:
        source = record.index if record.repeat_of is None else record.repeat_of
        if record.world_size not in kept_out and source % _TEST_EVERY:
            training.append(record)
        elif record.repeat_of is None:
            test.append(record)
    return training, test


def _typical(values: Sequence[float]) -> float:
    known = [v for v in values if v > 0]
    return float(np.median(known)) if known else 0.0
