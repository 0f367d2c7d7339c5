"""Checkpoints for other plans: values, state, names, and what is refused."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.checkpoints import (
    Cut,
    cut_rows,
    cut_weights,
    grid,
    plan_of,
    read_checkpoint,
    state_path,
    weight_key,
    write_checkpoint,
)
from torchrec_neuroshard import reshard
from torchrec_neuroshard.plans import recut

WHOLE: Cut = grid([10], [8], [1])
HALVES: Cut = grid([10], [4, 4], [0, 1])
ODD: Cut = grid([10], [4, 12, 8], [2, 0, 1])
ROWS: Cut = grid([5, 5], [8], [0, 1])
Entries = dict[tuple[str, ...], Any]


def draw(seed: int, *size: int) -> torch.Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(seed))


def expand(cut: Cut, seed: int) -> torch.Tensor:
    """Draw row-wise state: a value per row of each column shard, for all columns."""
    edges = sorted({(left, width) for _, (_, left, _, width) in cut})
    rows = sum(height for _, (_, left, height, _) in cut if left == 0)
    return torch.cat(
        [draw(seed + left, rows, 1).expand(rows, width) for left, width in edges], 1
    )


def mean_over(cut: Cut, values: torch.Tensor) -> torch.Tensor:
    """Return the mean over the columns of each shard, for all columns."""
    found = values.clone()
    for _, (_, left, _, width) in cut:
        part = values[:, left : left + width].double()
        found[:, left : left + width] = part.mean(dim=1, keepdim=True).float()
    return found


def entries_of(
    table: str, cut: Cut, *, elementwise: bool = False, seed: int = 0
) -> tuple[Entries, torch.Tensor, torch.Tensor]:
    """Return the entries of a table, its weights, and its state of `rows x columns`."""
    rows = sum(height for _, (_, left, height, _) in cut if left == 0)
    columns = sum(width for _, (top, _, _, width) in cut if top == 0)
    weights = draw(seed, rows, columns)
    state = draw(seed + 9, rows, columns) if elementwise else expand(cut, seed + 9)
    stored = cut_weights(cut, state) if elementwise else cut_rows(cut, state)
    found: Entries = {
        ("model", weight_key(table)): cut_weights(cut, weights),
        state_path(table, f"{table}.momentum1"): stored,
    }
    return found, weights, state


def state_of(folder: Path, table: str, name: str = "momentum1") -> torch.Tensor:
    found = read_checkpoint(folder)["optimizer"]["state"][weight_key(table)]
    values: torch.Tensor = found[f"{table}.{name}"]
    return values


def draw_parts(rng: random.Random, total: int, unit: int) -> list[int]:
    cuts = rng.sample(range(unit, total, unit), rng.randrange(min(4, total // unit)))
    edges = [0, *sorted(cuts), total]
    return [b - a for a, b in itertools.pairwise(edges)]


def draw_cut(rng: random.Random, rows: int, columns: int) -> Cut:
    ranks = rng.sample(range(16), 16)
    return grid(draw_parts(rng, rows, 1), draw_parts(rng, columns, 4), ranks)


@pytest.mark.parametrize("elementwise", [True, False])
@pytest.mark.parametrize("block_bytes", [recut.BLOCK_BYTES, 100])
def test_drawn_cuts_keep_weights_and_the_mean_of_row_wise_state(
    tmp_path: Path, elementwise: bool, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recut, "BLOCK_BYTES", block_bytes)
    rng = random.Random(block_bytes)
    for case in range(12):
        rows, columns = rng.randrange(2, 30), 4 * rng.randrange(1, 9)
        first, *others = (draw_cut(rng, rows, columns) for _ in range(3))
        folder = tmp_path / f"{case}"
        found, weights, state = entries_of(
            "t0", first, elementwise=elementwise, seed=case
        )
        write_checkpoint(folder, found)
        for i, cut in enumerate(others):
            out = tmp_path / f"{case}.{i}"
            report = reshard(folder, plan_of({"t0": cut}), out)
            read = read_checkpoint(out)
            assert torch.equal(read["model"][weight_key("t0")], weights)
            if not elementwise:
                state = mean_over(cut, state)
            shards = (cut_weights if elementwise else cut_rows)(cut, state)
            values = state_of(out, "t0")
            for _, offsets, part in shards:
                held = values[
                    tuple(
                        slice(at, at + n)
                        for at, n in zip(offsets, part.shape, strict=True)
                    )
                ]
                assert torch.allclose(held, part, rtol=2e-7, atol=0.0)
            assert report.tables[0].is_exact == (
                elementwise or {b[1::2] for _, b in cut} == {b[1::2] for _, b in first}
                if i == 0
                else report.tables[0].is_exact
            )
            metadata = FileSystemReader(out).read_metadata()
            for entry in metadata.state_dict_metadata.values():
                assert isinstance(entry, TensorStorageMetadata)
                stored = sum(chunk.sizes.numel() for chunk in entry.chunks)
                assert stored == entry.size.numel()
            folder = out
