"""Turn a checkpoint into one for another plan.

`torch.distributed.checkpoint` by itself cuts weights and elementwise optimizer state
anew when it loads them. It cannot load what has another size or name in another plan:

- Row-wise state, such as row-wise Adagrad's, has one value per row of each column
  shard. Merged columns take the mean of their shards' values, weighted by width. Split
  columns take a copy.
- Counters have one value per shard.
- Data-parallel tables are trained by a dense optimizer, whose state has other names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torchrec.distributed.types import ShardingPlan

from torchrec_neuroshard.costs.placement_rules import listed
from torchrec_neuroshard.errors import check_kind
from torchrec_neuroshard.plans.checkpoint import Checkpoint, CheckpointWriter
from torchrec_neuroshard.plans.plan_json import torchrec_plan
from torchrec_neuroshard.plans.recut import Counter, Recut
from torchrec_neuroshard.plans.saved_tables import (
    SavedTable,
    Shards,
    StateConverter,
    find_tables,
)
from torchrec_neuroshard.plans.stored_plan import read_plan
from torchrec_neuroshard.progress import phase
from torchrec_neuroshard.report.plan_tables import num_moved
from torchrec_neuroshard.report.resharding import (
    COPY,
    EXACT,
    MEAN,
    NO_STATE,
    ReshardedTable,
    Resharding,
)

NUM_THREADS = 2
"""Tensors that are written at the same time. Each takes memory for its blocks."""


def reshard(
    checkpoint: str | Path,
    to: ShardingPlan | str | Path,
    out: str | Path | None = None,
    *,
    step: int | None = None,
) -> Resharding:
    """Turn a checkpoint into one for another plan, in a new folder.

    Weights, elementwise optimizer state (Adagrad, Adam, LAMB) and counters stay exactly
    the same. So does row-wise state (row-wise Adagrad, partial row-wise Adam) of tables
    whose columns are not cut otherwise. Merged columns take the mean of their shards'
    state, weighted by width; split columns take a copy of it. All other entries are
    copied bit for bit. This needs neither devices nor ranks.

    Args:
        checkpoint: Folder of `torch.distributed.checkpoint.save`, with the state of
            the `DistributedModelParallel` and of its optimizers.
        to: The plan, or a plan file.
        out: The new folder. None: nothing is written.
        step: Iterations trained, for the dense optimizer of tables that become
            data-parallel. None: those of its other parameters.

    Returns:
        What changes for each table; `print` shows it.

    Raises:
        CheckpointError: The checkpoint is damaged, incomplete or of another model, or
            the new folder cannot be written.
        ConfigError: A table's state cannot be converted.
        PlanFileError: The plan file cannot be used.
    """
    if not isinstance(to, ShardingPlan):
        check_kind("to", to, str, Path, ShardingPlan)
        to = torchrec_plan(read_plan(to))
    source = Checkpoint(Path(checkpoint))
    tables = find_tables(source, to)
    converter = StateConverter(source, tables, step)
    recuts = {table.full_name: [*converter.recuts(table)] for table in tables}
    made: list[Recut | Counter] = [r for found in recuts.values() for r in found]
    made += [counter for table in tables for counter in converter.counters(table)]
    replaced = {tensor.name for tensor in made}
    replaced |= {r.old_name for found in recuts.values() for r in found}
    replaced |= {e for t in tables if t.changes_optimizer for e in t.states}
    others = [index for index in source.places if index.fqn not in replaced]
    report = Resharding(
        checkpoint=str(checkpoint),
        out=None if out is None else str(out),
        tables=tuple(_described(t, recuts[t.full_name]) for t in tables),
        other_bytes=sum(source.places[index].length for index in others),
    )
    if out is None:
        return report
    entries = {index.fqn: source.entries[index.fqn] for index in others}
    paths = {name: source.paths[name] for name in entries}
    with (
        phase("resharding") as shown,
        CheckpointWriter(source, Path(out), shown) as writer,
        ThreadPoolExecutor(NUM_THREADS) as pool,
    ):
        written = pool.map(lambda tensor: tensor.write(source, writer), made)
        try:
            for index in others:
                writer.copy(index, index.fqn, source.rank(index))
            for tensor, entry in zip(made, written, strict=True):
                entries[tensor.name], paths[tensor.name] = entry, tensor.path
        except BaseException:
            writer.stop()
            pool.shutdown(cancel_futures=True)
            raise
        for name, path in converter.empty().items():
            writer.save(name, None, {}, 0)
            entries[name], paths[name] = BytesStorageMetadata(), path
        writer.finish(entries, paths)
    return report


def _described(table: SavedTable, recuts: Sequence[Recut]) -> ReshardedTable:
    """Return what changes for a table."""
    value_bytes = recuts[0].properties.dtype.itemsize
    fates = {fate for recut in recuts for fate in _fates(recut)}
    return ReshardedTable(
        table=table.full_name,
        before=_place(table.held),
        after=f"{table.sharding.sharding_type}, {_place(table.planned)}",
        weight_bytes=table.whole.size.numel() * value_bytes,
        moved_bytes=num_moved(table.held, table.planned) * value_bytes,
        state=", ".join(sorted(fates, reverse=True))
        or (EXACT if table.states else NO_STATE),
    )


def _place(shards: Shards) -> str:
    num_shards = len({(rank, box.columns) for rank, box in shards})
    count = f"{num_shards} shards" if num_shards > 1 else "whole"
    return f"{count} on {listed({rank for rank, _ in shards})}"


def _fates(recut: Recut) -> Iterator[str]:
    """Yield what becomes of row-wise state whose columns are cut otherwise."""
    for left, right in recut.layout.groups:
        old = [g for g in recut.old_layout.groups if g[0] < right and left < g[1]]
        if len(old) > 1:
            yield MEAN
        if old[0][0] < left or right < old[-1][1]:
            yield COPY
