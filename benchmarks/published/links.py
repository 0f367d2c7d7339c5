"""Published tables of collectives, and the fit of the model's constants to them.

The constants are those of several nodes and of libraries other than NCCL. Those of NCCL
inside a node are fitted in `published.nccl`.
"""

from __future__ import annotations

import csv
import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from published.fitting import fit_logs, softened
from torchrec_neuroshard.hardware.cards import card_named
from torchrec_neuroshard.models.published_links import (
    Collective,
    CollectiveConstants,
    PublishedCommsModel,
    card_collectives,
)

Floats = npt.NDArray[np.float64]

DATA = Path(__file__).with_name("collectives.tsv")
_RINGS = ("reduce_scatter", "all_gather")
START: Mapping[str, float] = {
    "all_to_all_us": 12.0,
    "ring_us": 5.0,
    "between_nodes_us": 25.0,
    "library_us": 28.0,
    "intra_ramp_us": 4.0,
    "inter_ramp_us": 4.0,
}
"""Expected values. Each may be wrong by a factor of three."""


@dataclass(frozen=True)
class CollectiveRow:
    """One size in one published table."""

    source: str
    card: str
    collective: str
    ranks: int
    nodes: int
    num_bytes: float
    """Bytes of a rank's whole buffer."""
    time_ms: float

    @property
    def table(self) -> str:
        """Name of the table: one source's sizes of one collective."""
        return f"{self.source}, {self.collective}, {self.ranks} ranks"


def read_links(path: Path = DATA) -> list[CollectiveRow]:
    """Return the sizes that have a time and a known card."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    return [
        CollectiveRow(
            source=r["source"],
            card=r["card"],
            collective=r["collective"],
            ranks=int(r["ranks"]),
            nodes=int(r["nodes"]),
            num_bytes=float(r["bytes_per_rank"]),
            time_ms=float(r["time_us"]) * 1e-3,
        )
        for r in rows
        if r["card"] and r["time_us"] and r["collective"] in ("alltoall", *_RINGS)
    ]


def predict_links(
    rows: Sequence[CollectiveRow], shared: Mapping[str, float] | None = None
) -> Floats:
    """Return predicted times [ms], by the shipped constants or by `shared`."""
    return np.array([_predict(row, shared) for row in rows])


def _predict(row: CollectiveRow, shared: Mapping[str, float] | None) -> float:
    constants: CollectiveConstants = card_collectives(card_named(row.card))
    if shared is not None:
        other = shared["library_us"] if constants.library_us else 0.0
        fields = {**shared, "library_us": other}
        constants = dataclasses.replace(constants, launch_us=None, **fields)
    model = PublishedCommsModel(
        constants, world_size=row.ranks, local_world_size=row.ranks // row.nodes
    )
    kind: Collective = "ring" if row.collective in _RINGS else "all_to_all"
    return float(model.collective_ms(np.array([row.num_bytes]), kind)[0])


def fit_links(rows: Sequence[CollectiveRow]) -> dict[str, float]:
    """Return the constants that all nodes share, fitted with equal weight per table."""
    sizes = Counter(r.table for r in rows)
    weight = np.array([4.0 / np.sqrt(sizes[r.table]) for r in rows])
    measured = np.log([r.time_ms for r in rows])

    def residuals(shared: Mapping[str, float], moved: Floats) -> list[Floats]:
        off = np.log(predict_links(rows, shared)) - measured
        return [weight * softened(off), moved / np.log(3)]

    return fit_logs(START, residuals)


def table_left_out(rows: Sequence[CollectiveRow]) -> dict[CollectiveRow, float]:
    """Return predictions of each table by constants fitted to all other tables [ms]."""
    out: dict[CollectiveRow, float] = {}
    for table in sorted({r.table for r in rows}):
        shared = fit_links([r for r in rows if r.table != table])
        other = [r for r in rows if r.table == table]
        out.update(zip(other, predict_links(other, shared).tolist(), strict=True))
    return out
