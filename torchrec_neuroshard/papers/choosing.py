"""Lets a search that only places column shards plan tables with several ways.

A *way* is a sharding type with a kernel (see `ShardingTask`). `ChoosingSearcher` picks
one way for each table and places row-wise and replicated tables. The wrapped search
then places the tables in column shards, in the memory that is left.

Shapes: `T` entries of the task, one for each way; `W` ranks; `M` memories.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from torchrec_neuroshard.costs.simulator import Simulator
from torchrec_neuroshard.costs.task import ShardingTask
from torchrec_neuroshard.errors import InfeasibleError
from torchrec_neuroshard.papers.common import finish
from torchrec_neuroshard.search.base import Searcher, SearchResult
from torchrec_neuroshard.search.choices import Choices
from torchrec_neuroshard.search.construct import construct, placed
from torchrec_neuroshard.search.default import MAX_REPAIRS
from torchrec_neuroshard.search.feasibility import check_memory, pack
from torchrec_neuroshard.search.shards import (
    Floats,
    Ints,
    ShardBank,
    placement_from_widths,
)


class ChoosingSearcher(Searcher):
    """Picks each table's way; leaves the placement of column shards to another search.

    It takes the most promising choice (see `choices`) for which a placement is found.
    """

    takes_choices = True

    def __init__(self, searcher: Searcher) -> None:
        """Wrap the search that places column shards."""
        self._searcher = searcher
        self.name = searcher.name

    def search(self, task: ShardingTask, simulator: Simulator) -> SearchResult:
        """Find a placement.

        Raises:
            InfeasibleError: The tables do not fit.
            ConfigError: The search for column shards does not support the task.
        """
        start = time.monotonic()
        bank = ShardBank(simulator, merge=True)
        choices = Choices(bank)
        width_TW, found = self._first_that_fits(bank, choices)
        placement = placement_from_widths(width_TW, task)
        placement.check(task)
        evaluated = bank.num_evaluated + (found.num_evaluated if found else 0)
        result = finish(placement, simulator, start, evaluated)
        if found is None:
            return result
        return dataclasses.replace(result, notes=found.notes, fallback=found.fallback)

    def _first_that_fits(
        self, bank: ShardBank, choices: Choices
    ) -> tuple[Ints, SearchResult | None]:
        """Return a placement of the first choice that fits.

        Each choice that does not fit is changed a few times to use less memory. If none
        fits, an integer program packs the tables.

        Returns:
            `T x W` widths, and the wrapped search's result; None if it was not needed.

        Raises:
            InfeasibleError: No placement fits.
        """
        for first in (*choices.starts(math.inf), choices.smallest()):
            chosen = first
            for repair in range(MAX_REPAIRS):
                try:
                    return self._place(bank, chosen)
                except InfeasibleError:
                    chosen = choices.smaller(chosen, 2**repair)
        return pack(bank.simulator.task), None

    def _place(self, bank: ShardBank, chosen: Ints) -> tuple[Ints, SearchResult | None]:
        """Place row-wise and replicated tables, then the others by the wrapped search.

        Args:
            bank: The task's shards.
            chosen: The way of each table.

        Returns:
            The same as `_first_that_fits`.

        Raises:
            InfeasibleError: The chosen ways do not fit.
        """
        width_TW = bank.no_widths()
        blocks = chosen[~bank.moves_T[chosen]][None]
        if blocks.size:
            draft = construct(bank, blocks, np.ones_like(blocks))
            if not draft.fits_L[0]:
                raise InfeasibleError("row-wise and replicated tables do not fit")
            width_TW = next(placed(draft)).width_TW(0)
        taken = np.zeros(len(bank.leader_T), dtype=bool)
        taken[chosen[bank.moves_T[chosen]]] = True
        tables = np.flatnonzero(taken[bank.leader_T]).tolist()
        if not tables:
            return width_TW, None
        simulator = bank.simulator
        held, rank = np.nonzero(width_TW)
        free_MW = bank.caps_MW - bank.sizes_of_ranks(held, width_TW[held, rank], rank)
        task = _column_task(simulator.task, tables, free_MW, width_TW)
        found = self._searcher.search(task, simulator.for_task(task))
        placement = found.placement
        if task.host_memory_bytes:
            try:
                placement.check(task)
            except InfeasibleError:  # the search does not know host memory
                placement = placement_from_widths(pack(task), task)
        for shard in placement.shards:
            width_TW[tables[shard.table], shard.rank] += shard.width
        return width_TW, found


def _column_task(
    task: ShardingTask, tables: Sequence[int], free_MW: Floats, width_TW: Ints
) -> ShardingTask:
    """Return the task of the tables in column shards, after the others were placed.

    Args:
        task: The whole task.
        tables: The tables in column shards: the chosen entry of each.
        free_MW: Bytes that the placed tables leave free.
        width_TW: Widths of the placed tables.

    Raises:
        InfeasibleError: The placed tables leave some table no rank, or too little
            memory.
    """
    place = {t: i for i, t in enumerate(tables)}
    groups = sorted({task.groups[t] for t in tables})
    stages = sorted({task.stages[g] for g in groups})
    fields: dict[str, Any] = {
        name: tuple(getattr(task, name)[t] for t in tables)
        for name in (
            "tables",
            "fixed_bytes",
            "column_bytes",
            "host_fixed_bytes",
            "host_column_bytes",
            "min_widths",
            "max_shards",
            "sharding_types",
            "codecs",
            "repeats",
            "kernels",
            "places",
        )
    }
    closed: list[set[int]] = [set() for _ in tables]
    for members in task.apart:
        taken = np.flatnonzero(width_TW[list(members)].any(axis=0)).tolist()
        for t in members:
            if t in place:
                closed[place[t]].update(taken)
    if task.allowed_ranks or any(closed):
        every = range(task.world_size)
        allowed = [
            tuple(
                r for r in (task.allowed_ranks or ((),) * len(task.tables))[t] or every
            )
            for t in tables
        ]
        fields["allowed_ranks"] = tuple(
            tuple(r for r in ranks if r not in shut)
            for ranks, shut in zip(allowed, closed, strict=True)
        )
        for table, ranks in zip(fields["tables"], fields["allowed_ranks"], strict=True):
            if not ranks:  # an empty tuple would allow all ranks
                raise InfeasibleError(
                    f"table '{table.name}' has no rank left: row-wise or replicated "
                    "tables that it must be apart from are on every rank that it may "
                    "be on. Take it out of the set (apart), or allow those tables only "
                    "other sharding types"
                )
    for name in ("together", "apart"):
        sets = [tuple(place[t] for t in s if t in place) for s in getattr(task, name)]
        fields[name] = tuple(s for s in sets if len(s) > 1)
    names = "memory_bytes", "host_memory_bytes"
    for name, free_W in zip(names, free_MW.tolist(), strict=False):
        if getattr(task, name):
            fields[name] = tuple(int(max(0.0, free)) for free in free_W)
    part = dataclasses.replace(
        task,
        **fields,
        groups=tuple(groups.index(task.groups[t]) for t in tables),
        stages=tuple(stages.index(task.stages[g]) for g in groups),
        stage_names=tuple(task.stage_names[s] for s in stages),
        modules=tuple(task.modules[s] for s in stages),
        alternatives=(),
    )
    check_memory(part, is_part=True)
    return part
