"""The report of a checkpoint that is turned into one for another plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchrec_neuroshard.costs.task import format_bytes
from torchrec_neuroshard.report.page import Report
from torchrec_neuroshard.report.sections import Grid, GridColumn, Section

EXACT, NO_STATE, MEAN, COPY = "exact", "none", "mean", "copy"
"""What becomes of a table's optimizer state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReshardedTable:
    """What changes for a table."""

    table: str
    before: str
    """Shards and ranks in the old checkpoint."""
    after: str
    """Sharding type, shards and ranks in the plan."""
    weight_bytes: int
    moved_bytes: int
    """Bytes of weights that ranks hold in the plan only."""
    state: str
    """What becomes of its optimizer state: "exact"; "none"; the "mean" of merged column
    shards; a "copy" in split ones; "mean, copy"."""

    @property
    def is_exact(self) -> bool:
        """Whether its optimizer goes on with exactly the same state."""
        return self.state in (EXACT, NO_STATE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Resharding(Report):
    """A checkpoint and one for another plan; `print` shows what changes."""

    checkpoint: str
    out: str | None
    """The new folder; None: nothing was written."""
    tables: tuple[ReshardedTable, ...]
    other_bytes: int
    """Bytes of the entries that do not belong to a table."""

    @property
    def is_exact(self) -> bool:
        """Whether all optimizers go on with exactly the same state."""
        return all(table.is_exact for table in self.tables)

    def sections(self) -> Sequence[Section]:
        """See `Report`."""
        moved, held = (
            format_bytes(sum(getattr(t, f"{kind}_bytes") for t in self.tables))
            for kind in ("moved", "weight")
        )
        num_odd = sum(not table.is_exact for table in self.tables)
        fate = "all weights and all optimizer state stay exactly the same"
        if num_odd:
            fate = (
                f"weights stay exactly the same; row-wise optimizer state of {num_odd} "
                "tables does not: merged column shards take its mean, weighted by "
                "width, and split ones a copy, which is right on average"
            )
        done = "nothing was written" if self.out is None else f"see '{self.out}'"
        lines = [
            f"{len(self.tables)} tables of '{self.checkpoint}' for this plan: {done}",
            f"the weights are {held}; {moved} are for ranks that did not hold them",
            f"{format_bytes(self.other_bytes)} of other entries are copied",
            fate,
        ]
        changed = [t for t in self.tables if t.moved_bytes or not t.is_exact]
        columns: list[GridColumn] = [
            ("GiB", "gib", lambda t: t.weight_bytes),
            ("GiB to move", "gib", lambda t: t.moved_bytes),
            ("table", "text", lambda t: t.table),
            ("before", "text", lambda t: t.before),
            ("after", "text", lambda t: t.after),
            ("state", "text", lambda t: t.state),
        ]
        rows = sorted(changed, key=lambda t: (t.is_exact, -t.moved_bytes))
        grid = Grid("tables", rows, columns, brief=8) if changed else None
        return [Section(lines=lines), Section(title="tables that change", grid=grid)]
