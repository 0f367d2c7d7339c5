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
FEW_SETS, NUM_FOLDS = 200, 5
"""With fewer training sets, cross-validation in this many folds chooses the model."""


@dataclass(frozen=True, slots=True)
class SetData:
    """Measured sets as arrays."""

    device_type: str
    features_NF: npt.NDArray[np.float32]
    set_ids_N: npt.NDArray[np.int64]
    """Set of each shard; sorted."""
    costs_S2: Floats
    """Measured forward and backward [ms]."""
    for_validation_S: npt.NDArray[np.bool_]
    """Whether a set was drawn for validation; always False in older records."""
    workload_S: npt.NDArray[np.str_]
    """Workload of most of a set's tables: their names up to the first slash."""
    plan_S: npt.NDArray[np.int64]
    """Plan of which a set is one rank's; -1 for other sets."""

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
            self.for_validation_S[sets],
            self.workload_S[sets],
            self.plan_S[sets],
        )

    @property
    def has_validation(self) -> bool:
        """Whether enough sets were drawn for validation."""
        return int(self.for_validation_S.sum()) >= MIN_SETS

    def left_out_text(self) -> str:
        """Return which sets `splits` leaves out, in words."""
        if self.has_validation:
            return "sets of other tables, drawn for validation"
        if self.num_sets < FEW_SETS:
            return f"each training set once ({NUM_FOLDS}-fold cross-validation)"
        return "random training sets, which were left out"

    def splits(
        self, rng: np.random.Generator, share: float
    ) -> list[tuple[SetData, SetData]]:
        """Return pairs of sets to train on and left-out sets to judge by.

        Sets that were drawn for validation are left out, because no training set has
        tables of their kinds. Without them, random sets are left out: a share of many
        sets, or each of fewer than `FEW_SETS` once.

        Raises:
            RecordError: There are too few sets.
        """
        random = rng.permutation(self.num_sets)
        if self.has_validation:
            left_out = [np.flatnonzero(self.for_validation_S)]
        elif self.num_sets < FEW_SETS:
            left_out = np.array_split(random, min(NUM_FOLDS, self.num_sets))
        else:
            left_out = [random[: max(1, int(self.num_sets * share))]]
        if any(len(sets) == self.num_sets for sets in left_out):
            raise RecordError(
                f"{self.num_sets} sets are too few to train on; measure more"
            )
        every = np.arange(self.num_sets)
        return [
            (self.select(np.setdiff1d(every, sets)), self.select(np.sort(sets)))
            for sets in left_out
        ]


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
    names = [[t.name.partition("/")[0] for t in r.tables] for r in records]
    return SetData(
        device_type,
        np.concatenate([table_features(r.tables, r.batch_size) for r in records]),
        np.repeat(np.arange(len(records)), [len(r.tables) for r in records]),
        np.array([[r.fwd_ms, r.bwd_ms] for r in records]),
        np.array([r.validation for r in records]),
        np.array([Counter(of_set).most_common(1)[0][0] for of_set in names]),
        np.array([-1 if r.plan is None else r.plan for r in records]),
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
