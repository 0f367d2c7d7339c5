"""What a plan file holds: the plan, the job that it was made for, and its report.

Nothing here needs torch or TorchRec; `plan_json.torchrec_plan` makes TorchRec's plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrec_neuroshard.costs.placement_rules import quoted
from torchrec_neuroshard.costs.simulator import PHASES, RankCosts
from torchrec_neuroshard.errors import PlanFileError
from torchrec_neuroshard.files import from_fields, read_json
from torchrec_neuroshard.models.rank_groups import ShardingGroup
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.report import PlanComparison, PlanReport
from torchrec_neuroshard.report.parts import TableReport, rank_reports
from torchrec_neuroshard.report.plan_tables import (
    PlanTable,
    Shardings,
    TableSharding,
    check_shards,
    plan_tables,
    table_moves,
)

PLAN_SCHEMA_VERSION = 1
"""Version of the file format. Files of other versions are refused."""

PLAN_FORMAT = "torchrec_neuroshard.plan"
_DECIDES_COSTS = ("compute_device", "hardware", "cost_model", "pipeline_type")
_DECIDES_SAMPLES = ("world_size", "batch_size")
WHERE = ("in the file", "here")
_UNKNOWN = (None, "")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFingerprint:
    """The job that a plan was made for."""

    tables: tuple[PlanTable, ...]
    """Tables of the modules that the plan shards, sorted."""
    unsharded: tuple[str, ...] = ()
    """Tables of the model that are not in the plan."""
    world_size: int
    local_world_size: int
    compute_device: str
    memory_bytes: tuple[int, ...]
    """Memory of each rank for fused tables."""
    host_memory_bytes: tuple[int, ...] | None = None
    """Host memory of each rank. None: unknown, or the ranks run on the host."""
    sharding_group: ShardingGroup | None = None
    """The sharding group that the ranks form. None: they are all ranks, or unknown."""
    batch_size: int | None = None
    """Samples per rank. None: unknown."""
    cost_model: str | None = None
    """Name of the cost model. None: unknown, or planned without one."""
    hardware: str | None = None
    """The hardware that the cost model predicts."""
    pipeline_type: str | None = None
    """Train pipeline, "none" for a plain loop. None: unknown."""
    pooling_factors: Mapping[str, float] | None = None
    """Full table name -> ids per sample. None: unknown."""
    batch_sizes: Mapping[str, tuple[float, ...]] | None = None
    """Full table name -> samples per rank of each feature, for tables whose features
    have their own batch sizes. None: no table has, or unknown."""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Package -> version."""

    @property
    def torchrec(self) -> str:
        """Version of TorchRec; "" if unknown."""
        return self.versions.get("torchrec", "")

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "host_memory_bytes"):
            sizes = getattr(self, name)
            if sizes is not None and len(sizes) != self.world_size:
                raise ValueError(f"{name} has {len(sizes)} values, not one per rank")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPlan:
    """The contents of a plan file."""

    path: str
    """The file."""
    shardings: Shardings
    fingerprint: PlanFingerprint
    shown: Mapping[str, Any] | None
    """The planner's report as stored. None: the file has none."""

    @property
    def made_for(self) -> str:
        """The job that the plan was made for, as a sentence without a full stop."""
        made = self.fingerprint
        batch = "unknown" if made.batch_size is None else f"{made.batch_size:,}"
        return (
            f"made for {made.world_size} ranks, {made.local_world_size} per node "
            f"({made.compute_device}); samples per rank: {batch}; cost model: "
            f"{made.cost_model or 'unknown'} ({made.hardware or 'unknown'}); by "
            f"torchrec_neuroshard {made.versions.get('torchrec_neuroshard', '?')}, "
            f"torchrec {made.torchrec or '?'}"
        )

    def report(self) -> PlanReport:
        """Return the report stored with the plan, without new predictions.

        If the file has no report that this version can read, costs are NaN, memory
        counts only weights, and a note says so.
        """
        made, num_ranks = self.fingerprint, self.fingerprint.world_size
        tables = plan_tables(self.shardings, made.tables, num_ranks)
        try:
            report = from_fields(PlanReport, self.shown)
            is_whole = len(report.ranks) == num_ranks
            if is_whole and _places(report.tables) == _places(tables):
                return report
        except (TypeError, ValueError):
            pass
        costs = [RankCosts(*[0.0] * len(PHASES))] * num_ranks
        text = (
            "the plan file has no costs that this version can read; memory counts only "
            "weights"
        )
        return PlanReport(
            critical_path_ms=math.nan,
            num_tables=len(tables),
            ranks=rank_reports(tables, costs, made.memory_bytes),
            tables=tuple(sorted(tables, key=lambda t: -t.used_bytes)),
            notes=(Note("stored", text),),
        )

    def compared_to(self, other: StoredPlan, names: tuple[str, str]) -> PlanComparison:
        """Compare with another stored plan: moved tables and saved time.

        Args:
            other: The second plan.
            names: Names of this plan and the other in the comparison.

        Raises:
            PlanFileError: The plans are of different tables.
        """
        made = first, second = self.fingerprint, other.fingerprint
        if first.tables != second.tables:
            odd = min(t.full_name for t in {*first.tables} ^ {*second.tables})
            raise PlanFileError(
                f"'{names[0]}' and '{names[1]}' are plans of different tables: "
                f"'{odd}' is not the same in both. Compare plans of the same model"
            )
        where = f"in '{names[0]}'", f"in '{names[1]}'"
        obstacles = [*differences(first, second, _DECIDES_COSTS, where)]
        ids, other_ids = (m.pooling_factors or {} for m in made)
        if odd_ids := [t for t, n in ids.items() if other_ids.get(t, n) != n]:
            obstacles.append(f"ids per sample differ for {quoted(odd_ids)}")
        reports = a, b = self.report(), other.report()
        dense_ms = [r.schedule.dense_ms if r.schedule else 0.0 for r in reports]
        if dense_ms[0] != dense_ms[1]:
            values = zip(dense_ms, where, strict=True)
            told = " and ".join(f"{ms:.3f} ms {place}" for ms, place in values)
            obstacles.append(f"other layers take {told}")
        sizes = [*differences(first, second, _DECIDES_SAMPLES, where)]
        effect = "so an iteration trains another number of samples"
        if None in (a.num_samples, b.num_samples):
            obstacles, sizes = [*obstacles, *sizes], []
        elif a.num_samples == b.num_samples:
            effect = "but an iteration trains as many samples in both"
        notes = [f"{text}, so the costs are not comparable" for text in obstacles]
        return PlanComparison(
            first_name=names[0],
            first=a,
            second_name=names[1],
            second=b,
            moves=table_moves(
                self.shardings,
                other.shardings,
                first.tables,
                (first.world_size, second.world_size),
            ),
            notes=(
                *(Note("comparison", text) for text in notes),
                *(
                    Note("comparison", f"{text}, {effect}", severity="info")
                    for text in sizes
                ),
            ),
            obstacles=tuple(obstacles),
        )


def _places(tables: Iterable[TableReport]) -> dict[str, Any]:
    """Return table -> its sharding, and the rank and size of each shard."""
    return {
        t.table: [
            t.place,
            *((s.rank, s.num_embeddings, s.embedding_dim) for s in t.shards),
        ]
        for t in tables
    }


def differences(
    first: Any, second: Any, fields: Iterable[str], where: Sequence[str] = WHERE
) -> Iterator[str]:
    """Yield the fields that differ, if both values are known.

    Args:
        first: A dataclass.
        second: Another one of the same kind.
        fields: Names of fields.
        where: Where the first and the second come from.
    """
    for field in fields:
        a, b = getattr(first, field), getattr(second, field)
        if a != b and a not in _UNKNOWN and b not in _UNKNOWN:
            yield f"{field} is {_show(a)} {where[0]} and {_show(b)} {where[1]}"


def _show(value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    if len(value) > 1 and len(set(value)) == 1:
        return f"{len(value)} x {value[0]}"
    return ", ".join(map(str, value)) or "none"


@contextlib.contextmanager
def refusing_damage(path: str | Path) -> Iterator[None]:
    """Raise `PlanFileError` for what a damaged plan file makes fail inside."""
    try:
        yield
    except OSError as error:
        raise PlanFileError(
            f"cannot read the plan file '{path}': {error.strerror}. Name a file from "
            "save_plan or 'neuroshard plan --out'"
        ) from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason: object = error if isinstance(error, ValueError) else repr(error)
        if isinstance(error, json.JSONDecodeError):
            reason = "it holds no JSON"
        raise PlanFileError(
            f"'{path}' is not a plan file, or is damaged: {reason!s:.500}. Use a file "
            "from save_plan or 'neuroshard plan --out', or make a new plan"
        ) from error


def read_plan(path: str | Path) -> StoredPlan:
    """Return the contents of a plan file, whatever job it was made for.

    Raises:
        PlanFileError: The file is missing, damaged, or of another version.
    """
    with refusing_damage(path):
        data = read_json(path)
        if not isinstance(data, dict) or data.get("format") != PLAN_FORMAT:
            raise PlanFileError(f"its format is not '{PLAN_FORMAT}'")
        if data["schema"] != PLAN_SCHEMA_VERSION:
            raise PlanFileError(
                f"its schema is {data['schema']!r}, but this version reads "
                f"{PLAN_SCHEMA_VERSION}"
            )
        fields = {f.name for f in dataclasses.fields(PlanFingerprint)}
        made_for = {k: v for k, v in data["fingerprint"].items() if k in fields}
        fingerprint = from_fields(PlanFingerprint, made_for)
        shardings = {
            module: {name: TableSharding.from_json(t) for name, t in tables.items()}
            for module, tables in data["plan"].items()
        }
        check_shards(shardings, fingerprint.tables, fingerprint.world_size)
    return StoredPlan(
        path=str(path),
        shardings=shardings,
        fingerprint=fingerprint,
        shown=data.get("report"),
    )
