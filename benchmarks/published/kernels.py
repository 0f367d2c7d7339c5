"""Timings of fused kernels, published and our own, with their tables and features.

`kernels.tsv` has one row per timing, copied as a fact from the source in the row. `use`
says whether the timing is compared with models, or why it is not. If a source gives the
sum over several tables (`sum 90837` rows), the tables are assumed to be equal. If it
gives no distinct ids, their expected number under its distribution is used.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.bundles.find import card_constants
from torchrec_neuroshard.hardware.cards import card_named
from torchrec_neuroshard.measure.records import steady_records
from torchrec_neuroshard.measure.store import read_records
from torchrec_neuroshard.models.card_physics import PhysicalConstants
from torchrec_neuroshard.models.row_cache import MissCurve
from torchrec_neuroshard.tables.features import (
    FEATURE_NAMES,
    ShardFeaturizer,
    table_features,
)
from torchrec_neuroshard.tables.profile import FeatureProfile, zipf_profile
from torchrec_neuroshard.tables.table import TableConfig

DATA = Path(__file__).with_name("kernels.tsv")
MEASURED = Path(__file__).parents[1] / "data" / "compute_h200.jsonl.xz"
_OUTPUT = FEATURE_NAMES.index("output_bytes")
_OPTIMIZERS = {"adagrad (element-wise)": "adagrad", "": "sgd", "none": "sgd"}
_META_H100_GB_PER_S = 2_400.0
"""Peak memory bandwidth of the H100 with 96 GB, as stated by the source."""


@dataclass(frozen=True, eq=False)
class KernelRow:
    """One timing and its workload."""

    source: str
    card: str
    phase: str
    """Timed kernels: `forward`, `backward`, parts of the backward, or both."""
    location: str
    """`device`, `managed (UVM)` or `managed_caching`."""
    optimizer: str
    status: str
    time_ms: float
    tables: tuple[TableConfig, ...]
    batches: tuple[int, ...]
    """Samples that each table's kernel sees."""
    cache_ratio: float
    """Share of the rows that a cache holds; NaN without one."""
    half_outputs: bool

    @property
    def is_forward(self) -> bool:
        """Whether only the forward kernel was timed."""
        return self.phase == "forward"

    @property
    def has_forward(self) -> bool:
        """Whether the timing includes the forward kernel."""
        return "forward" in self.phase

    @property
    def has_backward(self) -> bool:
        """Whether the timing includes backward kernels."""
        return "backward" in self.phase

    @functools.cached_property
    def features(self) -> npt.NDArray[np.float32]:
        """Features of the tables, `T x F`."""
        featurizer = ShardFeaturizer([], 1)
        featurizer.add(self.tables, self.batches)
        widths = [t.embedding_dim for t in self.tables]
        features = featurizer.features(np.arange(len(widths)), widths)
        if self.half_outputs:
            features[:, _OUTPUT] /= 2
        return features

    @functools.cached_property
    def missed(self) -> npt.NDArray[np.float64]:
        """Share of each table's distinct rows that its cache misses, `T`."""
        if not self.cache_ratio > 0:
            return np.ones(len(self.tables))
        curves = [
            MissCurve(t.profile_at(b), t.num_embeddings)
            for t, b in zip(self.tables, self.batches, strict=True)
        ]
        return np.concatenate([c.misses([self.cache_ratio]) for c in curves])


@dataclass(frozen=True, eq=False)
class MeasuredSets:
    """Table sets that were measured on a card."""

    card: str
    features: npt.NDArray[np.float32]
    """Features of all tables, `T x F`."""
    first: npt.NDArray[np.int64]
    """First row of each set, `S`."""
    times_ms: npt.NDArray[np.float64]
    """Forward and backward, `S x 2`."""


def read_measured(every: int = 1) -> MeasuredSets:
    """Return the sets measured on an H200, or every so many-th of them."""
    records = steady_records(read_records([MEASURED])[1])[::every]
    sizes = [len(r.tables) for r in records]
    return MeasuredSets(
        card="h200",
        features=np.concatenate(
            [table_features(r.tables, r.batch_size) for r in records]
        ),
        first=np.cumsum([0, *sizes[:-1]]),
        times_ms=np.array([[r.fwd_ms, r.bwd_ms] for r in records]),
    )


def family(card: str) -> str:
    """Return a card's chip. Cards of one chip are left out of fits together."""
    return {"a100-40gb": "a100", "h100-96gb": "h100"}.get(card, card)


@functools.cache
def device_constants(card: str) -> PhysicalConstants:
    """Return the physical constants of a row's card."""
    if card == "h100-96gb":
        constants = card_constants(card_named("h100"))
        return dataclasses.replace(constants, memory_gb_per_s=_META_H100_GB_PER_S)
    return card_constants(card_named(card))


def read_kernels(path: Path = DATA) -> list[KernelRow]:
    """Return the timings whose `use` is "used"."""
    with path.open(newline="") as file:
        rows = [r for r in csv.DictReader(file, delimiter="\t") if r["use"] == "used"]
    return [_parse(row) for row in rows]


def _values(text: str, count: int) -> list[float]:
    found = [float(v) for v in text.split(",")]
    return found if len(found) == count else found * count


def _rows(text: str, count: int) -> list[int]:
    if text.startswith("sum"):
        return [max(1, int(float(text.removeprefix("sum")) / count))] * count
    if "-" in text:  # drawn evenly between two numbers
        low, high = (float(v) for v in text.split("-"))
        return [int((low + high) / 2)] * count
    return [int(v) for v in _values(text, count)]


def _parse(row: dict[str, str]) -> KernelRow:
    count = int(row["tables"])
    pooling = float(row["pooling"].split()[0])
    skewed = "zipf" in row["ids"] or "pow" in row["ids"]
    exponent = float(row["ids"].replace("-", " ").split()[-1]) if skewed else 0.0
    batches = [int(v) for v in _values(row["batch"], count)]
    tables = []
    for number, (num_rows, width, batch) in enumerate(
        zip(
            _rows(row["rows"], count),
            _values(row["width"], count),
            batches,
            strict=True,
        )
    ):
        profile = zipf_profile(
            batch_size=batch,
            pooling_factor=pooling,
            num_embeddings=num_rows,
            exponent=exponent,
        )
        if row["distinct"]:
            profile = _with_distinct(profile, float(row["distinct"]) / count)
        tables.append(
            TableConfig(
                name=f"t{number}",
                num_embeddings=num_rows,
                embedding_dim=int(-(-width // 4) * 4),
                pooling_factor=pooling,
                profile=profile,
                weighted="_weighted" in row["op"],
                data_type=row["weights"],
                optimizer=_OPTIMIZERS.get(row["optimizer"], row["optimizer"]),
            )
        )
    return KernelRow(
        source=row["source"],
        card=row["card"],
        phase=row["phase"],
        location=row["location"],
        optimizer=row["optimizer"],
        status=row["status"],
        time_ms=float(row["time_us"]) * 1e-3,
        tables=tuple(tables),
        batches=tuple(batches),
        cache_ratio=float(row["cache_ratio"] or "nan"),
        half_outputs=row["op"].startswith("batch_index_select"),
    )


def _with_distinct(profile: FeatureProfile, distinct: float) -> FeatureProfile:
    share = distinct / profile.num_distinct
    histogram: Sequence[float] = profile.access_histogram
    return dataclasses.replace(
        profile, access_histogram=tuple(n * share for n in histogram)
    )
