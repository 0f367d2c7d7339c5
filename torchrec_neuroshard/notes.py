"""Notes: what to know of a plan, with a code for programs and a text for people.

Whoever notices something makes the note. A plan's result and its report carry all of
them; text, JSON, page, warnings and exit codes read code and severity, never the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["NOTE_CODES", "SEVERITIES", "Note"]

NOTE_CODES: Mapping[str, str] = {
    "devices": "a figure of the devices, or the cost model, was not measured on them",
    "first-launch": "measuring at the first launch failed, or could not be kept",
    "dense-time": "a pipeline was given without the time of the other layers",
    "fallback": "TorchRec's own planner made the plan, since the search found none",
    "memory": "the plan needs more memory than a rank has, or may",
    "host-memory": "tables are in the host's memory",
    "out-of-range": "a shard is outside what the cost model was trained on",
    "stash": "tables have `stash_weights`: what the copies take, and what that frees",
    "optimizer": "tables have an optimizer whose state is not known",
    "unusual": "the plan looks unusual, and only an estimate recommends it",
    "constraints": "constraints do not fit the model's tables",
    "unsharded": "tables are in no plan, since no sharder takes their module",
    "search": "the search says something of its plan",
    "stored": "the plan file does not hold what the plan costs",
    "comparison": "two plans were made for different jobs, or by different means",
    "rehearsal": "the rehearsal did not check everything",
}
"""Code -> what it stands for."""

SEVERITIES = ("info", "warning", "error")
"""Nothing to do; worth a look; the plan will not run."""


@dataclass(frozen=True, slots=True)
class Note:
    """Something to know of a plan. `print` shows its severity and text.

    Raises:
        ValueError: There is no such code or severity.
    """

    code: str
    """One of `NOTE_CODES`."""
    text: str
    """A sentence without a full stop."""
    table: str | None = None
    """The table that it is about; None: several, or none."""
    severity: str = "warning"
    """One of `SEVERITIES`."""

    def __post_init__(self) -> None:
        if self.code not in NOTE_CODES:
            raise ValueError(f"no note has the code '{self.code:.60}'")
        if self.severity not in SEVERITIES:
            raise ValueError(f"no note has the severity '{self.severity:.60}'")

    def __str__(self) -> str:
        """Return it as a line of text."""
        return f"{self.severity}: {self.text}"
