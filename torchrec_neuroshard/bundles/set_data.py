"""Measured sets as arrays, split into training, validation and test.

Shapes: `N` shards, `S` sets, `F` features.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.errors import RecordError
from torchrec_neuroshard.measure.records import CostRecord
from torchrec_neuroshard.tables.features import table_features

Floats = npt.NDArray[np.float64]

MIN_SETS = 10
"""Fewest training sets, and fewest test sets of held-out tables."""


@dataclass(frozen=True, slots=True)
class SetData:
    """Measured sets as arrays."""

    device_type: str
    features_NF: npt.NDArray[np.float32]
    set_ids_N: npt.NDArray[np.int64]
    """Set of each shard; sorted."""
    costs_S2: Floats
    """Measured forward and backward [ms]."""
    is_new_S: npt.NDArray[np.bool_]
    """Whether a set's tables are in no other set."""
    validates_S: npt.NDArray[np.bool_]
    """Whether a set was drawn for validation; always False in older records."""

    @property
    def num_sets(self) -> int:
        """Number of sets."""
        return len(self.costs_S2)

    def sum_shards(self, values_NX: Floats) -> Floats:
        """Return the sum of the shards' values in each set, `S x X`."""
        sums_SX = np.zeros((self.num_sets, values_NX.shape[1]))
        np.add.at(sums_SX, self.set_ids_N, values_NX)
        return sums_SX

    def select(self, sets: npt.NDArray[np.int64]) -> SetData:
        """Return the data of some sets, in the given order."""
        rows, ids = rows_of(self.set_ids_N, sets)
        return SetData(
            self.device_type,
            self.features_NF[rows],
            ids,
            self.costs_S2[sets],
            self.is_new_S[sets],
            self.validates_S[sets],
        )

    def split(self, rng: np.random.Generator, share: float) -> tuple[SetData, SetData]:
        """Return training and validation sets.

        Like the test, validation should use tables that training has not seen. It gets
        the sets that were drawn for it, else sets whose tables are in no other set. If
        there are too few of both, it gets random sets.
        """
        count = max(1, int(self.num_sets * share))
        held_out = rng.permutation(self.num_sets)[:count]
        new = rng.permutation(np.flatnonzero(self.is_new_S))
        if len(new) >= count:
            held_out = new[:count]
        if self.validates_S.sum() >= MIN_SETS:
            held_out = np.flatnonzero(self.validates_S)
        others = np.setdiff1d(np.arange(self.num_sets), held_out)
        if not len(others):
            raise RecordError(
                f"{self.num_sets} sets are too few to train on; measure more"
            )
        return self.select(others), self.select(held_out)


def rows_of(
    set_ids_N: npt.NDArray[np.int64], sets: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the shards of some sets, and each shard's index among these sets."""
    first, last = (np.searchsorted(set_ids_N, sets, side) for side in ("left", "right"))
    rows = np.concatenate([np.arange(f, n) for f, n in zip(first, last, strict=True)])
    return rows, np.repeat(np.arange(len(sets)), last - first)


def build_sets(records: Sequence[CostRecord], device_type: str = "cpu") -> SetData:
    """Convert records into arrays.

    Args:
        records: Records of one device.
        device_type: Type of the device.

    Raises:
        RecordError: There are no records, or a time is not above 0.
    """
    if not records:
        raise RecordError("no records to train on; run 'neuroshard collect compute'")
    for record in records:
        if not (record.fwd_ms > 0 and record.bwd_ms > 0):
            raise RecordError(
                f"record {record.index} has times {record.fwd_ms}, {record.bwd_ms} ms; "
                "times must be above 0"
            )
    tables = [{t.name.partition("#")[0] for t in r.tables} for r in records]
    uses = Counter(name for names in tables for name in names)
    return SetData(
        device_type,
        np.concatenate([table_features(r.tables, r.batch_size) for r in records]),
        np.repeat(np.arange(len(records)), [len(r.tables) for r in records]),
        np.array([[r.fwd_ms, r.bwd_ms] for r in records]),
        np.array([max(uses[name] for name in names) == 1 for names in tables]),
        np.array([r.validation for r in records]),
    )


def split_records(
    records: Sequence[CostRecord],
) -> tuple[list[CostRecord], list[CostRecord]]:
    """Split measured sets by table.

    `neuroshard collect` decides the split by table name. All runs hold out the same
    tables, so a bundle that was trained on another run has not seen them either.

    Returns:
        Sets to train on, and sets that consist of held-out tables.

    Raises:
        RecordError: There are fewer than `MIN_SETS` of either.
    """
    training = [r for r in records if not r.held_out]
    held_out = [r for r in records if r.held_out and r.repeat_of is None]
    if min(len(training), len(held_out)) < MIN_SETS:
        raise RecordError(
            f"a model needs {MIN_SETS} sets to train on and {MIN_SETS} sets of "
            f"held-out tables to test on, got {len(training)} and {len(held_out)}; "
            "measure more sets"
        )
    return training, held_out
