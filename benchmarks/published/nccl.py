"""NVIDIA's tables of NCCL's collectives inside a node, and the fit to them.

`nccl.tsv` holds nccl-tests of 2, 4 and 8 GPUs; its first line names the source. GB200
and GB300 count as B200, because they have the same links. L40S are not in the fit,
because their links are those of one host. They check cards on PCIe, with the host's
bandwidths given.
"""

from __future__ import annotations

import csv
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from published.fitting import fit_logs
from torchrec_neuroshard.hardware.cards import card_named
from torchrec_neuroshard.models.published_links import (
    Collective,
    CollectiveConstants,
    PublishedCommsModel,
    card_collectives,
)

Floats = npt.NDArray[np.float64]

DATA = Path(__file__).with_name("nccl.tsv")
CARDS = {"gb200": "b200", "gb300": "b200", "l40s": "h100-pcie"}
"""Card of a table -> card of `GPU_CARDS`, if the names differ."""
_FAMILIES = {"h200": "h100"}
"""Card -> card with the same launch and step in the fit."""
FAMILIES = ("a100", "h100", "b200")
L40S_GB_PER_S = {2: 27.0, 4: 5.7, 8: 1.35}
"""Ranks -> `intra_gb_per_s` that gives the L40S's times of the largest sizes."""
COLLECTIVES: Mapping[str, Collective] = {
    "alltoall": "all_to_all",
    "all_gather": "ring",
    "reduce_scatter": "ring",
    "all_reduce": "all_reduce",
}
SHARED: Mapping[str, float] = {
    "intra_ramp_us": 3.0,
    "all_to_all_steps": 1.0,
    "plateau_us": 5.0,
    "plateau_kib": 20.0,
    "all_to_all_gain": 1.0,
    "ring_gain": 1.0,
    "all_reduce_gain": 1.0,
}
"""Constants of all cards, with the fit's first values."""


@dataclass(frozen=True, eq=False)
class NcclTable:
    """Sizes of one collective on one number of ranks."""

    shown: str
    """Card that was measured."""
    folder: str
    """NCCL's version as the source's folder says it."""
    nccl: str
    """NCCL's version as the rows say it."""
    dtype: str
    collective: str
    ranks: int
    run: str
    num_bytes: Floats
    """Bytes of a rank's whole buffer."""
    time_us: Floats

    @property
    def card(self) -> str:
        """The card of `GPU_CARDS` that predicts the table."""
        return CARDS.get(self.shown, self.shown)

    @property
    def family(self) -> str:
        """The card whose launch and step the table shares."""
        return _FAMILIES.get(self.card, self.card)

    def where(self, kept: npt.NDArray[np.bool_]) -> NcclTable:
        """Return the table with some of its sizes."""
        return dataclasses.replace(
            self, num_bytes=self.num_bytes[kept], time_us=self.time_us[kept]
        )


def read_nccl(path: Path = DATA) -> list[NcclTable]:
    """Return all runs; those of int8 are medians over runs."""
    lines = [n for n in path.read_text().splitlines() if not n.startswith("#")]
    tables = []
    for row in csv.DictReader(lines, delimiter="\t"):
        known = {float(k): float(v) for k, v in row.items() if k.isdigit() and v}
        tables.append(
            NcclTable(
                shown=row["card"],
                folder=row["folder"],
                nccl=row["nccl"],
                dtype=row["dtype"],
                collective=row["collective"],
                ranks=int(row["ranks"]),
                run=row["run"],
                num_bytes=np.array(list(known)),
                time_us=np.array(list(known.values())),
            )
        )
    return tables


def over_runs(tables: Sequence[NcclTable]) -> list[NcclTable]:
    """Return the medians over the runs of a folder."""
    runs: dict[tuple[object, ...], list[NcclTable]] = {}
    for t in tables:
        key = (t.shown, t.folder, t.dtype, t.collective, t.ranks)
        runs.setdefault(key, []).append(t)
    found = []
    for some in runs.values():
        times: dict[float, list[float]] = {}
        for t in some:
            for size, us in zip(t.num_bytes, t.time_us, strict=True):
                times.setdefault(float(size), []).append(float(us))
        found.append(
            dataclasses.replace(
                some[0],
                run="median",
                num_bytes=np.array(sorted(times)),
                time_us=np.array([np.median(times[n]) for n in sorted(times)]),
            )
        )
    return found


def constants_of(
    table: NcclTable, fitted: Mapping[str, float] | None = None
) -> CollectiveConstants:
    """Return the constants that predict a table: the shipped or the fitted ones."""
    constants = card_collectives(card_named(table.card))
    if table.shown == "l40s":
        given = L40S_GB_PER_S[table.ranks]
        constants = dataclasses.replace(constants, intra_gb_per_s=given)
    if fitted is None:
        return constants
    family = f"{table.family} "
    own = {n.removeprefix(family): v for n, v in fitted.items() if family in n}
    shared = {name: fitted[name] for name in SHARED}
    return dataclasses.replace(constants, **own, **shared)


def shipped_starts() -> dict[str, float]:
    """Return launch and step of each family, by the names of the fit."""
    return {
        f"{family} {name}": getattr(card_collectives(card_named(family)), name)
        for family in FAMILIES
        for name in ("launch_us", "step_us")
    }


def without_tables(constants: CollectiveConstants) -> CollectiveConstants:
    """Return the constants as fitted to one page of 8 B200, without these tables."""
    return dataclasses.replace(constants, launch_us=None, library_us=0.0)


def predict_nccl(table: NcclTable, constants: CollectiveConstants) -> Floats:
    """Return predicted times of a table's sizes [us]."""
    model = PublishedCommsModel(
        constants, world_size=table.ranks, local_world_size=table.ranks
    )
    return 1e3 * model.collective_ms(table.num_bytes, COLLECTIVES[table.collective])


def log_ratios(table: NcclTable, predicted_us: Floats) -> Floats:
    """Return log(predicted / measured) of a table's sizes."""
    logs: Floats = np.log(predicted_us / table.time_us)
    return logs


def fit_nccl(tables: Sequence[NcclTable]) -> dict[str, float]:
    """Return the constants fitted to log ratios; families have the same weight.

    A family without tables gets the geometric mean of the others' launch and step.
    """
    tables = [t for t in tables if t.family in FAMILIES]
    families = sorted({t.family for t in tables})
    own = {f"{f} launch_us": 6.0 for f in families}
    own |= {f"{f} step_us": 1.0 for f in families}
    counts = Counter(t.family for t in tables for _ in t.num_bytes)
    weights = [np.sqrt(1000 / counts[t.family]) for t in tables]

    def residuals(fitted: Mapping[str, float], _: Floats) -> list[Floats]:
        return [
            weight * log_ratios(t, predict_nccl(t, constants_of(t, fitted)))
            for t, weight in zip(tables, weights, strict=True)
        ]

    fitted = fit_logs({**SHARED, **own}, residuals, loss="soft_l1", f_scale=0.1)
    for name in ("launch_us", "step_us"):
        mean = np.exp(np.mean([np.log(fitted[f"{f} {name}"]) for f in families]))
        for family in set(FAMILIES) - set(families):
            fitted[f"{family} {name}"] = float(mean)
    return fitted


def left_out_nccl(
    tables: Sequence[NcclTable], key: Callable[[NcclTable], object]
) -> list[tuple[NcclTable, Floats]]:
    """Return each table with its prediction from a fit to tables of other keys [us]."""
    found = []
    for value in sorted({key(t) for t in tables}, key=str):
        fitted = fit_nccl([t for t in tables if key(t) != value])
        some = [t for t in tables if key(t) == value]
        found += [(t, predict_nccl(t, constants_of(t, fitted))) for t in some]
    return found


def sizes_left_out(tables: Sequence[NcclTable]) -> list[tuple[NcclTable, Floats]]:
    """Return every other size with its prediction from a fit to the others [us]."""

    def half(table: NcclTable, odd: int) -> NcclTable:
        return table.where(np.log2(table.num_bytes).astype(int) % 2 == odd)

    fitted = fit_nccl([half(t, 0) for t in tables])
    others = [half(t, 1) for t in tables]
    return [(t, predict_nccl(t, constants_of(t, fitted))) for t in others]
