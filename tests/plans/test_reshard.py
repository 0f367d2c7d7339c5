"""Checkpoints for other plans: values, state, names, and what is refused."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.builders import (
    FixedSearcher,
    Nested,
    bag_sharders,
    each,
    make_ebc,
    make_planner,
)
from tests.checkpoints import (
    MODULE,
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
from torchrec_neuroshard import reshard, save_plan
from torchrec_neuroshard.cli import main
from torchrec_neuroshard.errors import CheckpointError, ConfigError
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


def weights_of(folder: Path, table: str) -> torch.Tensor:
    values: torch.Tensor = read_checkpoint(folder)["model"][weight_key(table)]
    return values


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
    for case in range(8):
        rows, columns = rng.randrange(2, 30), 4 * rng.randrange(1, 9)
        first, *others = (draw_cut(rng, rows, columns) for _ in range(3))
        folder, before = tmp_path / f"{case}", first
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
            edges = [{box[1::2] for _, box in shards} for shards in (before, cut)]
            same = elementwise or edges[0] == edges[1]
            assert report.tables[0].is_exact == same
            metadata = FileSystemReader(out).read_metadata()
            for entry in metadata.state_dict_metadata.values():
                assert isinstance(entry, TensorStorageMetadata)
                stored = sum(chunk.sizes.numel() for chunk in entry.chunks)
                assert stored == entry.size.numel()
            folder, before = out, cut


def test_merge_of_split_is_the_identity(tmp_path: Path) -> None:
    found, weights, state = entries_of("t0", grid([10], [24], [3]))
    write_checkpoint(tmp_path / "0", found)
    split = reshard(tmp_path / "0", plan_of({"t0": ODD}), tmp_path / "1")
    rows = plan_of({"t0": grid([4, 6], [24], [0, 1])})
    merged = reshard(tmp_path / "1", rows, tmp_path / "2")
    assert torch.equal(weights_of(tmp_path / "2", "t0"), weights)
    assert torch.equal(state_of(tmp_path / "2", "t0"), state[:, 0])
    assert [split.tables[0].state, merged.tables[0].state] == ["copy", "mean"]
    assert not split.is_exact


def test_merged_columns_take_the_mean_weighted_by_width(tmp_path: Path) -> None:
    edges = zip([4, 12, 8], [1.0, 2.0, 4.0], strict=True)
    state = torch.cat([torch.full((10, width), v) for width, v in edges], dim=1)
    entries: Entries = {
        ("model", weight_key("t0")): cut_weights(ODD, draw(0, 10, 24)),
        state_path("t0", "t0.momentum1"): cut_rows(ODD, state),
    }
    write_checkpoint(tmp_path / "old", entries)
    cut = grid([10], [8, 16], [0, 1])
    report = reshard(tmp_path / "old", plan_of({"t0": cut}), tmp_path / "new")
    want = [(4 * 1.0 + 4 * 2.0) / 8] * 10 + [(8 * 2.0 + 8 * 4.0) / 16] * 10
    assert state_of(tmp_path / "new", "t0").tolist() == want
    assert report.tables[0].state == "mean, copy"


def stored_bytes(folder: Path, name: str) -> bytes:
    places = FileSystemReader(folder).read_metadata().storage_data
    [place] = (place for index, place in places.items() if index.fqn == name)
    data: bytes = (folder / place.relative_path).read_bytes()[place.offset :]
    return data[: place.length]


def test_other_entries_are_copied_bit_for_bit(tmp_path: Path) -> None:
    found, *_ = entries_of("t0", HALVES)
    found[("model", "dense.weight")] = [(1, (0, 0), draw(5, 3, 4).bfloat16())]
    key = "model", "unsharded.embedding_bags.t9.weight"
    found[key] = [(0, (0, 0), draw(6, 3, 4))]
    found[("epoch",)] = {"number": 3}
    write_checkpoint(tmp_path / "old", found)
    reshard(tmp_path / "old", plan_of({"t0": WHOLE}), tmp_path / "new")
    names = "model.dense.weight", "model.unsharded.embedding_bags.t9.weight", "epoch"
    old, new = (
        [stored_bytes(folder, name) for name in names]
        for folder in (tmp_path / "old", tmp_path / "new")
    )
    assert old == new and all(old)
    assert read_checkpoint(tmp_path / "new")["epoch"] == {"number": 3}


DENSE_LAYER: Entries = {
    ("optimizer", "state", "dense.weight", "step"): [(0, (), torch.tensor(7.0))],
    ("optimizer", "state", "dense.weight", "exp_avg"): [(0, (0,), draw(1, 4))],
}
FUSED_AND_DENSE: dict[str, tuple[dict[str, bool], dict[str, str]]] = {
    "Adagrad": ({"momentum1": True}, {"momentum1": "sum"}),
    "RowWiseAdagrad": ({"momentum1": False}, {"momentum1": "sum"}),
    "Adam": (
        {"momentum1": True, "exp_avg_sq": True},
        {"momentum1": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    ),
}


@pytest.mark.parametrize("optimizer", FUSED_AND_DENSE)
def test_dense_optimizers_have_their_own_names(tmp_path: Path, optimizer: str) -> None:
    states, names = FUSED_AND_DENSE[optimizer]
    values = {name: draw(4, 10, 8 if whole else 1) for name, whole in states.items()}
    entries: Entries = {("model", weight_key("t0")): cut_weights(ROWS, draw(9, 10, 8))}
    for name, value in values.items():
        cut = cut_weights if states[name] else cut_rows
        entries[state_path("t0", f"t0.{name}")] = cut(ROWS, value)
    entries |= DENSE_LAYER
    write_checkpoint(tmp_path / "fused", entries)
    reshard(tmp_path / "fused", plan_of({"t0": None}), tmp_path / "dense")
    found = read_checkpoint(tmp_path / "dense")["optimizer"]["state"][weight_key("t0")]
    assert found.pop("step") == torch.tensor(7.0)
    assert found.keys() == {*names.values()}
    assert all(torch.equal(found[names[n]], value) for n, value in values.items())
    report = reshard(tmp_path / "dense", plan_of({"t0": ROWS}), tmp_path / "again")
    found = read_checkpoint(tmp_path / "again")["optimizer"]["state"][weight_key("t0")]
    assert found.keys() == {f"t0.{name}" for name in values} and report.is_exact
    for name, value in values.items():
        want = value if states[name] else value[:, 0]
        assert torch.equal(found[f"t0.{name}"], want)


def test_steps_can_be_given(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "old", entries_of("t0", WHOLE)[0])
    plan = plan_of({"t0": None})
    with pytest.raises(ConfigError, match="becomes data-parallel, and no parameter of"):
        reshard(tmp_path / "old", plan)
    reshard(tmp_path / "old", plan, tmp_path / "new", step=12)
    found = read_checkpoint(tmp_path / "new")["optimizer"]["state"][weight_key("t0")]
    assert found["step"].tolist() == 12.0


def test_counters_have_a_value_for_each_shard(tmp_path: Path) -> None:
    found, *_ = entries_of("t0", HALVES)
    found[state_path("t0", "t0.iter")] = [
        (i, (i,), torch.tensor([5])) for i in range(2)
    ]
    write_checkpoint(tmp_path / "old", found)
    cut = grid([4, 3, 3], [8], [0, 1, 2])
    reshard(tmp_path / "old", plan_of({"t0": cut}), tmp_path / "new")
    assert state_of(tmp_path / "new", "t0", "iter").tolist() == [5, 5, 5]


def test_both_kinds_of_state_and_other_types(tmp_path: Path) -> None:
    """Partial row-wise Adam has both; weights are of half precision."""
    found, *_ = entries_of("t0", HALVES)
    weights, first = draw(1, 10, 8).half(), draw(2, 10, 8)
    found[("model", weight_key("t0"))] = cut_weights(HALVES, weights)
    found[state_path("t0", "t0.exp_avg_sq")] = found[state_path("t0", "t0.momentum1")]
    found[state_path("t0", "t0.momentum1")] = cut_weights(HALVES, first)
    counts = torch.arange(10).repeat(8, 1).T
    found[state_path("t0", "t0.row_counter")] = cut_rows(HALVES, counts)
    write_checkpoint(tmp_path / "old", found)
    reshard(tmp_path / "old", plan_of({"t0": ROWS}), tmp_path / "new")
    read = read_checkpoint(tmp_path / "new")
    assert torch.equal(read["model"][weight_key("t0")], weights)
    assert torch.equal(state_of(tmp_path / "new", "t0"), first)
    assert torch.equal(state_of(tmp_path / "new", "t0", "row_counter"), counts[:, 0])
    with pytest.raises(
        ConfigError, match="becomes data-parallel, but the state of its"
    ):
        reshard(tmp_path / "old", plan_of({"t0": None}), step=1)


def test_tables_are_found_in_any_dictionary(tmp_path: Path) -> None:
    """Saved without dictionaries inside; a deeper module has a table of that name."""
    entries: Entries = {}
    for prefix in ("wrapped.sparse.ebc", "other.sparse.ebc.inner"):
        key = f"{prefix}.embedding_bags.t0.weight"
        entries[(key,)] = cut_weights(HALVES, draw(len(prefix), 10, 8))
        entries[(f"{key}.t0.momentum1",)] = cut_rows(HALVES, expand(HALVES, 3))
    write_checkpoint(tmp_path / "old", entries)
    plan = plan_of({"t0": ROWS})
    plan.plan["sparse.ebc.inner"] = plan_of({"t0": HALVES}).plan[MODULE]
    report = reshard(tmp_path / "old", plan, tmp_path / "new")
    assert [t.state for t in report.tables] == ["mean", "exact"]
    found = read_checkpoint(tmp_path / "new")
    assert found["wrapped.sparse.ebc.embedding_bags.t0.weight.t0.momentum1"].shape == (
        10,
    )


def test_plain_sgd_has_an_empty_state(tmp_path: Path) -> None:
    """PyTorch asks for it where a rank has no shard of another table."""
    entries = {
        ("model", weight_key(t)): cut_weights(WHOLE, draw(1, 10, 8))
        for t in ("t0", "t1")
    }
    write_checkpoint(tmp_path / "old", entries | DENSE_LAYER)
    plan = plan_of({"t0": WHOLE, "t1": grid([10], [8], [0])})
    report = reshard(tmp_path / "old", plan, tmp_path / "new")
    states = read_checkpoint(tmp_path / "new")["optimizer"]["state"]
    assert states[weight_key("t0")] == states[weight_key("t1")] == {}
    assert [t.state for t in report.tables] == ["none", "none"]


def test_checksums_may_be_missing(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        found, weights, _ = entries_of("t0", HALVES)
        write_checkpoint(tmp_path / "old", found)
    finally:
        torch.serialization.set_crc32_options(True)
    reshard(tmp_path / "old", plan_of({"t0": WHOLE}), tmp_path / "new")
    assert torch.equal(weights_of(tmp_path / "new", "t0"), weights)


def spoil(folder: Path, at: int, file: str = "__1_0.distcp") -> None:
    data = bytearray((folder / file).read_bytes())
    data[at] ^= 1
    (folder / file).write_bytes(data)


def change_metadata(folder: Path, change: Callable[[Any], Any]) -> None:
    metadata = FileSystemReader(folder).read_metadata()
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def values_at(folder: Path, name: str) -> int:
    """Return where the values of an entry's last chunk begin in its file."""
    places = FileSystemReader(folder).read_metadata().storage_data
    [*_, place] = (p for index, p in places.items() if index.fqn.endswith(name))
    with (folder / place.relative_path).open("rb") as stream:
        data = stream.read()[place.offset :][: place.length]
    return int(place.offset + data.index(b"data/0") + 70)


Fault = tuple[Callable[[Path], object], dict[str, Cut | None], str]
FAULTS: dict[str, Fault] = {
    "no checkpoint": (
        lambda folder: (folder / ".metadata").unlink(),
        {"t0": WHOLE},
        "'.*old' holds no checkpoint that can be read: .*Name a folder",
    ),
    "damaged metadata": (
        lambda folder: (folder / ".metadata").write_bytes(b"no pickle"),
        {"t0": WHOLE},
        "'.*old' holds no checkpoint that can be read: UnpicklingError",
    ),
    "a file is missing": (
        lambda folder: (folder / "__1_0.distcp").unlink(),
        {"t0": WHOLE},
        r"t0\.weight' cannot be read: the file '.*__1_0.distcp' of rank 1 is missing",
    ),
    "a file ends early": (
        lambda folder: os.truncate(folder / "__1_0.distcp", 1500),
        {"t0": WHOLE},
        r"'.*t0\..*' cannot be read: the file '.*__1_0.distcp' of rank 1 ends early",
    ),
    "other bits in a table": (
        lambda folder: spoil(folder, values_at(folder, "t0.weight")),
        {"t0": WHOLE},
        r"'model.*t0\.weight' cannot be read: the file '.*__1_0.distcp' of rank 1 is "
        "damaged .*its checksum is another",
    ),
    "other bits in what is copied": (
        lambda folder: spoil(folder, values_at(folder, "dense.weight")),
        {"t0": WHOLE},
        r"'model\.dense\.weight' cannot be read: the file '.*__1_0.distcp' of rank 1 "
        "is damaged .*its checksum is another",
    ),
    "no data of a chunk": (
        lambda folder: change_metadata(
            folder, lambda m: m.storage_data.pop(next(iter(m.storage_data)))
        ),
        {"t0": WHOLE},
        "'model.*t0.weight' cannot be read: the checkpoint '.*' lacks its chunk at",
    ),
    "a shard is missing": (
        lambda folder: change_metadata(
            folder,
            lambda m: m.state_dict_metadata[f"model.{weight_key('t0')}"].chunks.pop(),
        ),
        {"t0": WHOLE},
        "table 'sparse.ebc.t0': the checkpoint '.*' lacks shards of it",
    ),
    "written by an extension": (
        lambda folder: change_metadata(
            folder,
            lambda m: [
                vars(place).update(transform_descriptors=["zstd"])
                for place in m.storage_data.values()
            ],
        ),
        {"t0": WHOLE},
        "an extension wrote it, such as compression",
    ),
    "another size": (
        lambda folder: None,
        {"t0": grid([11], [8], [0])},
        "not of the model in '.*old': table 'sparse.ebc.t0'.*10 rows and 8 columns",
    ),
    "a table too many in the plan": (
        lambda folder: None,
        {"t0": WHOLE, "t1": WHOLE},
        "table 'sparse.ebc.t1' is in the plan, but its weights are not in the",
    ),
    "a table too few in the plan": (
        lambda folder: None,
        {"t1": WHOLE},
        "table 'sparse.ebc.t0' is in the checkpoint '.*', but not in the plan",
    ),
    "state of another size": (
        lambda folder: change_metadata(
            folder,
            lambda m: setattr(
                m.state_dict_metadata[".".join(state_path("t0", "t0.momentum1"))],
                "size",
                torch.Size([30]),
            ),
        ),
        {"t0": WHOLE},
        r"' has size \[30\], but .* 'sparse.ebc.t0' needs \[10, 8\] or \[20\]",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_names_table_rank_and_file_and_nothing_is_written(
    tmp_path: Path, name: str
) -> None:
    spoil_it, cuts, message = FAULTS[name]
    found, *_ = entries_of("t0", HALVES)
    found[("model", "dense.weight")] = [(1, (0, 0), draw(5, 3, 4))]
    write_checkpoint(tmp_path / "old", found)
    spoil_it(tmp_path / "old")
    with pytest.raises(CheckpointError, match=message):
        reshard(tmp_path / "old", plan_of(cuts), tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_what_cannot_be_converted_is_refused(tmp_path: Path) -> None:
    found, *_ = entries_of("t0", WHOLE)
    maps = "model", f"{MODULE}._managed_collision_modules.t0._sorted_ids"
    write_checkpoint(tmp_path / "ids", found | {maps: [(0, (0,), draw(1, 10))]})
    with pytest.raises(ConfigError, match="its managed collision module maps ids"):
        reshard(tmp_path / "ids", plan_of({"t0": ROWS}))
    assert reshard(tmp_path / "ids", plan_of({"t0": WHOLE})).is_exact
    apart = {("dense", *path[1:]): entry for path, entry in DENSE_LAYER.items()}
    write_checkpoint(tmp_path / "apart", found | apart)
    with pytest.raises(ConfigError, match=r"several: dense\.state, optim"):
        reshard(tmp_path / "apart", plan_of({"t0": None}))
    with pytest.raises(ConfigError, match="its kernel is key_value"):
        reshard(tmp_path / "apart", plan_of({"t0": WHOLE}, kernel="key_value"))
    with pytest.raises(CheckpointError, match=r"'.*ids' exists\. Name a new"):
        reshard(tmp_path / "apart", plan_of({"t0": WHOLE}), tmp_path / "ids")
    with pytest.raises(ConfigError, match="to is a int, 3: pass a str or"):
        reshard(tmp_path / "apart", 3)


def test_the_command_says_what_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, sharders = Nested(make_ebc([(10, 8)])), bag_sharders()
    planner = make_planner(
        search=FixedSearcher([(0, 8, 0)]), constraints=each(1, "table_wise")
    )
    plan = planner.plan(model, sharders)
    save_plan(plan, tmp_path / "plan.json", model=model, planner=planner)
    write_checkpoint(tmp_path / "old", entries_of("t0", HALVES)[0])
    command = ["reshard", str(tmp_path / "old"), "--to", str(tmp_path / "plan.json")]
    assert main(command) == 2
    assert "pass the new folder as --out, or --dry-run" in capsys.readouterr().err
    files = ["--json", str(tmp_path / "report.json")]
    assert main([*command, "--dry-run", *files]) == 0
    shown = capsys.readouterr().out
    assert "1 tables of" in shown and "nothing was written" in shown
    assert (
        "sparse.ebc.t0  2 shards on ranks 0-1  table_wise, whole on rank 0  mean"
        in shown
    )
    table = json.loads((tmp_path / "report.json").read_text())["tables"][0]
    assert (table["weight_bytes"], table["moved_bytes"]) == (320, 160)
    assert not (tmp_path / "new").exists()
    assert main([*command, "--out", str(tmp_path / "new")]) == 0
    assert f"wrote {tmp_path / 'new'}" in capsys.readouterr().out
    assert state_of(tmp_path / "new", "t0").shape == (10,)
