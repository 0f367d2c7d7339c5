"""Tables whose times do not come from the cost model's measurements, in words.

A table is *extrapolated* if the measured kernel runs on other sizes or weights, and
*estimated* if another kernel runs, whose time is derived from the measured one's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.models.base import CostModel, RangeWarning
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.tables.features import FEATURE_NAMES, NUM_TOTALS
from torchrec_neuroshard.tables.table import TableConfig

LEAST_SHARE = 0.01
"""Tables that together take a smaller share of the kernels' time get no warning."""

_MEASURED = CostModel.source
_EXTRAPOLATED, _ESTIMATED = "extrapolated", "estimated"
_KINDS: Mapping[str, str] = {
    "is_half": "{0.data_type} weights",
    "is_rowwise_adagrad": "optimizer {0.optimizer}",
    "is_adagrad": "optimizer {0.optimizer}",
    "is_adam": "optimizer {0.optimizer}",
    "log2_batch": "batch",
    "log2_rows": "rows",
    "log2_width": "columns",
    "log2_pooling": "ids per bag",
    "log2_reuse": "lookups per row",
    "is_weighted": "lookup weights",
    "is_shared": "features per table",
}
"""Feature -> its name in reports. The first one outside its range is a table's reason:
the others mostly follow from it."""
_SIZES = {*FEATURE_NAMES[:NUM_TOTALS], "log2_rows", "log2_width", "log2_pooling"}
"""Features that are small if a table is small."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why the time of a table is not covered by measurements."""

    way: str
    """"extrapolated" or "estimated"."""
    kind: str
    """A few words, such as "batch"."""
    outside: RangeWarning | None = None
    """The value outside its range, if that is the reason."""

    @property
    def is_small(self) -> bool:
        """Whether the table is smaller than all measured ones."""
        found = self.outside
        return found is not None and found.feature in _SIZES and _is_below(found)

    @classmethod
    def of(
        cls,
        table: TableConfig,
        outside: Iterable[RangeWarning],
        source: str,
        *,
        kernel: str | None,
        covers: bool,
    ) -> Reason | None:
        """Return why measurements do not cover a table; None if they do.

        Args:
            table: A table with a cost.
            outside: The features of its shards that are outside their ranges.
            source: The cost model's source.
            kernel: Its kernel, if another one was measured; None: it was measured.
            covers: Whether rows are pooled, or sequences were measured, too.
        """
        if kernel is not None:
            return cls(_ESTIMATED, f"kernel {kernel}")
        if source == _MEASURED and not covers:
            return cls(_ESTIMATED, "sequences")
        first = min(outside, key=_order, default=None)
        if first is None:
            return None
        kind = _KINDS.get(first.feature, first.feature.replace("_", " "))
        return cls(_EXTRAPOLATED, kind.format(table), first)


UNCOSTED = Reason(_ESTIMATED, "TorchRec's estimate")
"""The reason of tables that only TorchRec's estimate covers."""


def _is_below(warning: RangeWarning) -> bool:
    return warning.value < warning.low


def _order(warning: RangeWarning) -> tuple[int, float]:
    """Return the sort key by which the first warning names a table's reason."""
    name, value = warning.feature, warning.value
    place = [*_KINDS].index(name) if name in _KINDS else len(_KINDS)
    return place, -max(warning.low - value, value - warning.high)


def describe_source(model: CostModel, reasons: Sequence[Reason | None]) -> str:
    """Return the source of kernel times in words.

    Args:
        model: The cost model.
        reasons: For each table why it is not covered, or None.
    """
    found = Counter(
        (reason.way, reason.kind) for reason in reasons if reason is not None
    )
    source = model.source
    if not found:
        return source
    total = len(reasons)
    lead = f"{source}; of {total} tables"
    if source == _MEASURED:
        lead = f"measured for {total - found.total()} of {total} tables"
    parts = [lead]
    for way in (_EXTRAPOLATED, _ESTIMATED):
        kinds = {kind: n for (w, kind), n in found.most_common() if w == way}
        if kinds:
            parts.append(f"{sum(kinds.values())} {way} ({', '.join(kinds)})")
    return ", ".join(parts)


def extrapolation_notes(
    tables: Sequence[str],
    reasons: Sequence[Reason | None],
    ms_T: npt.NDArray[np.float64],
) -> tuple[Note, ...]:
    """Return a note for each kind of extrapolation that takes noticeable time.

    Tables smaller than all measured ones, for example of 3 rows, count in no note.

    Args:
        tables: The plan's tables with a cost.
        reasons: For each table, as in `describe_source`.
        ms_T: Kernel time of each table, without launches.
    """
    groups: dict[tuple[str, bool], dict[int, RangeWarning | None]] = {}
    for place, reason in enumerate(reasons):
        if reason is not None and reason.way == _EXTRAPOLATED and not reason.is_small:
            side = reason.outside is not None and _is_below(reason.outside)
            groups.setdefault((reason.kind, side), {})[place] = reason.outside
    notes = []
    for (kind, _), found in groups.items():
        places = [*found]
        if ms_T[places].sum() < LEAST_SHARE * ms_T.sum():
            continue
        told = _told(kind, [w for w in found.values() if w is not None])
        verb = "is" if len(places) == 1 else "are"
        text = (
            f"{len(places)} of {len(reasons)} tables {verb} outside what the cost "
            f"model measured: {told}; predictions there are extrapolated"
        )
        notes.append(Note.on("out-of-range", [tables[p] for p in places], text))
    return tuple(notes)


def _told(kind: str, outside: Sequence[RangeWarning]) -> str:
    """Return a kind with its values and their range, in words."""
    if not outside or outside[0].feature.startswith("is_"):
        return kind
    first, values = outside[0], {w.value for w in outside}
    worst, several = max(values), "up to "
    limit = f"up to {_shown(first.feature, first.high)}"
    if _is_below(first):
        worst, several = min(values), "down to "
        limit = f"from {_shown(first.feature, first.low)}"
    several *= len(values) > 1
    return f"{kind} {several}{_shown(first.feature, worst)}, measured {limit}"


def _shown(feature: str, value: float) -> str:
    """Return a feature's value as text; powers of 2 are multiplied out."""
    if feature.startswith("log2_"):
        value = 2.0**value
    if not value.is_integer():
        value = float(f"{value:.{6 if value >= 1 else 2}g}")
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.6g}"
