"""Notes: facts worth knowing about a plan, with a code for programs and a text.

The code that notices something makes the note. A plan's result and report carry all
notes. Terminal output, JSON, HTML page, warnings and exit codes depend on a note's code
and severity, never on its text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NOTE_CODES: Mapping[str, str] = {
    "devices": "device figures or the cost model were not measured on these devices",
    "first-launch": "the first launch's measurement failed or could not be stored",
    "dense-time": "a pipeline was given without the time of the dense layers",
    "fallback": "TorchRec's own planner made the plan because the search found none",
    "memory": "the plan needs, or may need, more memory than a rank has",
    "host-memory": "tables are in the host's memory",
    "out-of-range": "tables are outside what the cost model measured",
    "stash": "tables have `stash_weights`: memory that the copies take and free",
    "optimizer": "tables have an optimizer whose state size is unknown",
    "hot-rows": "one rank serves most lookups of a table that is split by rows",
    "unknown-lengths": "nothing says how long the model's sequences are",
    "lengths": "ranks wait for those with longer samples, whatever the plan",
    "unusual": "the plan looks unusual, and only an estimate recommends it",
    "constraints": "constraints do not match the model's tables",
    "unsharded": "tables are not sharded because no sharder takes their module, or "
    "their `device_group` is another",
    "search": "the search reports something about its plan",
    "stored": "the plan file does not hold the plan's costs",
    "comparison": "two plans were made for different jobs, or by different means",
    "cannot-run": "a table fails on these devices, or trains wrongly",
    "rehearsal": "the rehearsal did not check everything",
}
"""Code -> meaning."""

SEVERITIES = ("info", "warning", "error")
"""info: nothing to do; warning: worth a look; error: the plan will not run."""


@dataclass(frozen=True, slots=True)
class Note:
    """A fact worth knowing about a plan. `print` shows its severity and text.

    Raises:
        ValueError: There is no such code or severity.
    """

    code: str
    """A key of `NOTE_CODES`."""
    text: str
    """A sentence without a full stop."""
    table: str | None = None
    """The table that the note is about; None for several tables or none."""
    severity: str = "warning"
    """One of `SEVERITIES`."""

    @classmethod
    def on(
        cls, code: str, tables: Sequence[str], text: str, severity: str = "warning"
    ) -> Note:
        """Return a note on these tables, of which a single one is its `table`."""
        return cls(code, text, tables[0] if len(tables) == 1 else None, severity)

    def __post_init__(self) -> None:
        if self.code not in NOTE_CODES:
            raise ValueError(f"no note has the code '{self.code:.60}'")
        if self.severity not in SEVERITIES:
            raise ValueError(f"no note has the severity '{self.severity:.60}'")

    def __str__(self) -> str:
        """Return the note as a line of text."""
        return f"{self.severity}: {self.text}"
