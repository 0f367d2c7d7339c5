"""Notes on plans: narrow shards, hot ranks, unequal lengths, unknown optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchrec.distributed.planner.types import ShardingOption

from torchrec_neuroshard.costs.placement_rules import quoted
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.planner.option_facts import OPTIMIZERS, is_pooled, table_name
from torchrec_neuroshard.planner.plan_costs import ESTIMATED_COLUMNS, PlanCosts
from torchrec_neuroshard.planner.reader import DEFAULT_INPUTS, GIVEN_ONE, TableReader
from torchrec_neuroshard.report.parts import LengthReport
from torchrec_neuroshard.tables.hot_rows import hot_id_text
from torchrec_neuroshard.tables.sharding_types import SHARDING_TYPES
from torchrec_neuroshard.tables.table import is_skewed

HOT_RANK = 1.5
"""No note if no rank serves more than this multiple of the mean of a table's ranks."""
LEAST_SHARE = 0.05
"""No note on lengths if balanced samples save a smaller share of the iteration."""
MOST_HOT = 3
"""Tables with a hot rank that a note names: those with most lookups on it."""


def cautions(costs: PlanCosts, plan: Sequence[ShardingOption]) -> tuple[Note, ...]:
    """Return a note on narrow shards of a GPU plan that only an estimate recommends.

    Args:
        costs: The costs that priced the plan.
        plan: Placed options.
    """
    narrow = {
        table_name(o): min(int(s.size[1]) for s in o.shards)
        for o in plan
        if any(s.size[1] < min(ESTIMATED_COLUMNS, o.tensor.shape[1]) for s in o.shards)
    }
    is_estimate = costs.cost_model.error is not None
    if not narrow or not is_estimate or costs.topology.compute_device == "cpu":
        return ()
    text = (
        f"{quoted(list(narrow))}: shards of {min(narrow.values())} columns, but the "
        f"estimate was not checked below {ESTIMATED_COLUMNS}. Set "
        f"min_partition={ESTIMATED_COLUMNS} in the constraints to avoid them"
    )
    return (Note("unusual", text),)


def length_notes(lengths: LengthReport | None) -> tuple[Note, ...]:
    """Return a note if ranks lose much time because their samples differ in length."""
    if lengths is None or lengths.share < LEAST_SHARE:
        return ()
    text = (
        "lengths, not tables: ranks wait for those with longer samples, whatever the "
        f"plan. A shuffler that balances lengths would save {lengths.share:.0%} of the "
        "iteration"
    )
    return (Note("lengths", text),)


def hot_row_notes(
    plan: Iterable[ShardingOption], reader: TableReader
) -> tuple[Note, ...]:
    """Return a note on tables of which one rank serves most lookups.

    There are two: one on tables with a frequent id, such as padding, and one on others.

    Args:
        plan: Placed options.
        reader: Knows which ids are looked up.
    """
    found = [hot for option in plan if (hot := _hot_rank(option, reader))]
    found.sort(key=lambda hot: -hot.lookups)
    frequent = [hot for hot in found if hot.top is not None]
    uneven = [hot for hot in found if hot.top is None]
    return tuple(_hot_note(some) for some in (frequent, uneven) if some)


@dataclass(frozen=True, slots=True)
class _HotRank:
    """The rank that serves most lookups of a table."""

    table: str
    rank: int
    share: float
    even: float
    """Its share if lookups were even."""
    lookups: float
    """Lookups of a batch that it serves."""
    top: tuple[int, float] | None
    """A frequent id on it, and the id's share of the lookups; None: there is none."""

    def __str__(self) -> str:
        serves = f"rank {self.rank} serves {self.share:.0%} ({self.even:.0%} if even)"
        if self.top is None:
            return f"of '{self.table}', {serves}"
        return f"{hot_id_text(self.table, self.top)}, {serves}"


def _hot_note(hot: Sequence[_HotRank]) -> Note:
    told = "; ".join(map(str, hot[:MOST_HOT]))
    if (more := len(hot) - MOST_HOT) > 0:
        told += f"; and {more} more tables"
    what, way_out = "lookups are not spread over the rows", "Permute or hash the ids"
    if hot[0].top is not None:
        what = "one id has many of the lookups"
        way_out = "If it is padding, drop it from the inputs"
    text = f"{what}: {told}. {way_out}, or shard such tables column- or table-wise"
    return Note.on("hot-rows", [h.table for h in hot], text)


def _hot_rank(option: ShardingOption, reader: TableReader) -> _HotRank | None:
    """Return a table's hot rank; None without one."""
    kind = SHARDING_TYPES.get(str(option.sharding_type))
    if kind is None or not kind.splits_rows or not reader.has_cost(option):
        return None
    table, batch = reader.table(option), int(option.batch_size) * reader.world_size
    hot = table.profile and table.profile.hot_rows
    size = kind.block_size(reader.world_size, reader.node_size)
    rows, block = table.num_embeddings, option.shards[:size]
    if not hot or not is_skewed(table, kind.part_rows(rows, size), batch):
        return None
    first_N, rows_N = (
        [int(n[0]) for n in of]
        for of in zip(*((s.offset, s.size) for s in block), strict=True)
    )
    share_N = hot.shares(first_N, rows_N, rows)
    place = int(share_N.argmax())
    rank, share = int(block[place].rank), float(share_N[place])
    if share <= HOT_RANK / size:
        return None
    return _HotRank(
        table_name(option),
        rank,
        share,
        1 / size,
        share * table.pooling_factor * batch,
        hot.hot_id(first_N[place], rows_N[place]),
    )


def unknown_length_notes(
    options: Sequence[ShardingOption], reader: TableReader
) -> tuple[Note, ...]:
    """Return a note if nothing says how long a model's sequences are."""
    some = [o for o in options if reader.has_cost(o) and not is_pooled(o)]
    sources = {s for o in some for s in reader.inputs_from(o).values()}
    if not some or not sources <= {DEFAULT_INPUTS, GIVEN_ONE}:
        return ()
    names = quoted([table_name(o) for o in some])
    text = (
        f"nothing says how long the sequences of {names} are: they count with 1 id per "
        "sample. Give profiles=profile_inputs(batches), or pooling_factors in the "
        "constraints"
    )
    return (Note("unknown-lengths", text),)


def optimizer_notes(
    options: Iterable[ShardingOption], reader: TableReader
) -> tuple[Note, ...]:
    """Return notes on tables whose optimizer has a state of unknown size."""
    odd: dict[str, dict[str, None]] = {}
    for option in options:
        if (name := reader.optimizer_name(option)) not in OPTIMIZERS:
            odd.setdefault(name, {})[table_name(option)] = None
    texts = (
        f"tables {quoted([*tables])}: the state size of optimizer {name} is unknown; "
        "memory and time count as for Adam, with two values per weight"
        for name, tables in sorted(odd.items())
    )
    return tuple(Note("optimizer", text) for text in texts)
