"""Random damage to every kind of file that the package reads.

Each case damages one sound file and then reads and uses it in a process of its own,
which may take 5 s and 1 GiB beyond what it has. Either all is well, as with a card that
nobody parses or a digit of a time, or an error of this package says what is wrong.
Nothing that a file says is ever run.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import hashlib
import io
import json
import os
import pickle
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from tests.builders import (
    Nested,
    bag_sharders,
    make_comms_header,
    make_comms_record,
    make_ebc,
    make_header,
    make_planner,
    make_record,
    make_tables,
    write_records,
)
from tests.fuzz.campaign import Case, Outcome
from torchrec_neuroshard.bundles.find import load_cost_model
from torchrec_neuroshard.bundles.folders import PRETRAINED
from torchrec_neuroshard.commands.files import read_constraints, read_placement
from torchrec_neuroshard.commands.inputs import (
    build_model,
    given_constraints,
)
from torchrec_neuroshard.errors import NeuroShardError
from torchrec_neuroshard.measure.records import (
    CostRecord,
    repeatability,
    steady_records,
)
from torchrec_neuroshard.measure.store import read_comms_records, read_records
from torchrec_neuroshard.models.base import COLLECTIVES
from torchrec_neuroshard.papers.neuroshard_models import load_models
from torchrec_neuroshard.plans.plan_files import load_plan, save_plan
from torchrec_neuroshard.plans.stored_plan import read_plan
from torchrec_neuroshard.report.page import html_report
from torchrec_neuroshard.tables.features import ShardFeaturizer
from torchrec_neuroshard.tables.loaders import load_profiles, read_tables, save_profiles
from torchrec_neuroshard.tables.profile import zipf_profile

SECONDS = 5
"""Processor time of a case; it may wait twenty times as long on a shared machine."""
MORE_BYTES = 2**30
RUN_NAME = "was_run"
"""This file exists once a pickle has run code."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of file."""

    make: Callable[[Path], object]
    """Writes sound ones into a folder."""
    use: Callable[[Path], object]
    """Reads them from there, and does with them what users do."""


def _shipped(name: str, *files: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        for file in files:
            shutil.copy(PRETRAINED / name / file, folder)

    return make


def _use_kernels(folder: Path) -> None:
    model = load_cost_model(folder, device_type="cpu")
    features = ShardFeaturizer(make_tables([32, 8], [1000, 50]), 256).features(
        np.array([0, 1]), np.array([32, 8])
    )
    found = model.predict_sets(features, np.array([0, 1]), 2)
    assert np.isfinite(found).all() and (found >= 0).all(), f"predicts {found}"


@functools.cache
def some_records() -> tuple[CostRecord, ...]:
    """Return measured sets of one table each."""
    return tuple(
        make_record(make_tables([8], profile=_profile(1000)), 1.0 + index, index=index)
        for index in range(5)
    )


def _comms_records(folder: Path) -> None:
    records = [
        make_comms_record(COLLECTIVES[index], (64, 128), (1.0, 2.0), index=index)
        for index in range(4)
    ]
    write_records(folder / "r.jsonl", make_comms_header(), records)


def _use_records(folder: Path) -> None:
    headers, records = read_records([folder / "r.jsonl"])
    headers[0].check_same_run(headers[0], "here")
    steady_records(records)
    repeatability(records)
    for record in records:
        ShardFeaturizer(record.tables, record.batch_size)


def _use_comms_records(folder: Path) -> None:
    [(header, records)] = read_comms_records([folder / "r.jsonl"])
    header.check_same_run(header, "here")
    repeatability(records)


def _model() -> Nested:
    return Nested(make_ebc([(100, 32), (50, 16), (30, 8)]))


def make_plan(folder: Path) -> None:
    planner, model = make_planner(), _model()
    plan = planner.plan(model, bag_sharders())
    save_plan(plan, folder / "plan.json", model=model, planner=planner)


def _use_plan(folder: Path) -> None:
    path = folder / "plan.json"
    stored = read_plan(path)
    str(stored.made_for)
    report = stored.report()
    html_report(report)
    str(report)
    str(stored.compared_to(read_plan(path), ("a", "b")))
    load_plan(path, model=_model(), planner=make_planner())


def _tables_csv(folder: Path) -> None:
    names = "name,num_embeddings,embedding_dim,pooling_factor,num_features,weighted"
    (folder / "t.csv").write_text(f"{names}\na,1000,32,2.5,1,\nb,50,8,1,2,true\n")


def _tables_as_written(folder: Path) -> None:
    names = "Name,Num_Embeddings,embedding_dim,weighted,data_type"
    (folder / "t.csv").write_text(
        f'# by hand\n{names}\na,"1,000",32.0,yes,torch.float32\nb,5e1,8,0,half\n'
    )


def _profile(rows: int) -> Any:
    return zipf_profile(batch_size=512, pooling_factor=2.0, num_embeddings=rows)


def _tables_json(folder: Path) -> None:
    tables = [
        dataclasses.replace(t, profile=_profile(t.num_embeddings)).to_json()
        for t in make_tables([32, 8], [1000, 50])
    ]
    (folder / "t.json").write_text(json.dumps({"tables": tables}))


def _workloads(folder: Path) -> None:
    histogram = list(_profile(1000).access_histogram)
    counted = {"batch_size": 512, "lookups": [900.0], "count_hist": [histogram]}
    groups = [{"num_tables": 2, "rows": 100, "dim": 16, "hotness": [1, 2]}]
    workloads = [
        {"name": "a", "rows": [1000, 50], "dims": [32, 8], "pooling": [2, 1.5]},
        {"name": "b", "rows": [1000], **counted},
        {"name": "c", "groups": groups},
        {"name": "d", "tables": [t.to_json() for t in make_tables([32])]},
    ]
    (folder / "t.json").write_text(json.dumps({"workloads": workloads}))


def _use_tables(name: str, workload: str | None = None) -> Callable[[Path], None]:
    def use(folder: Path) -> None:
        tables = read_tables(folder / name, workload).tables
        ShardFeaturizer(tables, 4096).features(
            np.arange(len(tables)), np.array([t.embedding_dim for t in tables])
        )
        build_model(tables)

    return use


def _use_standard_input(folder: Path) -> None:
    path = folder / "t.csv"
    piped = path.read_bytes() if path.is_file() else b""
    sys.stdin = io.TextIOWrapper(io.BytesIO(piped))
    _use_tables("-")(Path())


def _use_profiles(folder: Path) -> None:
    for profile in load_profiles(folder / "p.json").values():
        profile.at_batch_size(4096, 1000).at_batch_size(16)


def _constraints(folder: Path) -> None:
    found: dict[str, Any] = {
        "*": {"sharding_types": ["column_wise", "table_wise"], "min_partition": 8},
        "t0": {"compute_kernels": ["fused"], "pooling_factors": [2.0]},
        "t1": {"enforce_hbm": True, "cache_load_factor": 0.5, "batch_sizes": [4]},
    }
    (folder / "c.json").write_text(json.dumps(found))
    found = {"pin": {"t0": [0, 1]}, "together": [["t1", "t2"]], "forbid_ranks": [3]}
    (folder / "w.json").write_text(json.dumps(found))


def _use_constraints(folder: Path) -> None:
    model = build_model(make_tables([32, 16, 8], [100, 50, 30]))
    names = [f"m.{name}" for name in ("t0", "t1", "t2")]
    given_constraints(read_constraints(folder / "c.json"), model)
    read_placement(folder / "w.json").rules(names, 4)


KINDS: dict[str, Kind] = {
    "kernels": Kind(
        _shipped("cpu_epyc_zen5", "bundle.json", "weights.safetensors"), _use_kernels
    ),
    "original": Kind(
        _shipped(
            "neuroshard/cpu_epyc_zen5",
            *("neuroshard.json", "weights.safetensors", "CARD.md"),
        ),
        load_models,
    ),
    "compute records": Kind(
        lambda folder: write_records(folder / "r.jsonl", make_header(), some_records()),
        _use_records,
    ),
    "comms records": Kind(_comms_records, _use_comms_records),
    "plan": Kind(make_plan, _use_plan),
    "tables, csv": Kind(_tables_csv, _use_tables("t.csv")),
    "tables, standard input": Kind(_tables_as_written, _use_standard_input),
    "tables, json": Kind(_tables_json, _use_tables("t.json")),
    "workloads": Kind(_workloads, _use_tables("t.json", "b")),
    "profiles": Kind(
        lambda folder: save_profiles({"f": _profile(100)}, folder / "p.json"),
        _use_profiles,
    ),
    "constraints": Kind(_constraints, _use_constraints),
}


_HOLDER = tempfile.TemporaryDirectory(prefix="sound-")


@functools.cache
def sound_files() -> Path:
    """Return a folder with sound files of each kind; the process's end removes it."""
    for name, kind in KINDS.items():
        folder = Path(_HOLDER.name, name)
        folder.mkdir()
        kind.make(folder)
    return Path(_HOLDER.name)


# Damage.

WAYS = ("bytes", "bytes", "weights", "whole", *["edit"] * 6)
WHOLE = ("gone", "empty", "folder", "other", "pickle", "deep")
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 3, 0.5, -0.0, 10**9, 2**31, 2**63, 2**64, 10**30, 1e308),
    *(float("nan"), float("inf"), -float("inf"), "", "x", "1", "nan", "../../etc"),
    *("<script>alert(1)</script>", "\x1b]0;x\x07", "\ud800", "\0", "é" * 5000),
    *([], {}, [[]], [None], [1, 2], {"a": 1}, {"": None}, [1e400], [{}], "y" * 10**6),
    *([0] * 10**5, 10**4200, json.loads("[" * 200 + "]" * 200)),
)
UNWRITABLE = (
    *(OSError, LookupError, TypeError, ValueError),
    *(OverflowError, RecursionError),
)
"""What edits raise for files that are damaged already, or values no file can hold."""


def draw(rng: Random) -> Case:
    """Choose a file and what is done to it."""
    kind = rng.choice(list(KINDS))
    files = sorted(p.name for p in (sound_files() / kind).iterdir())
    damage = [
        {"way": rng.choice(WAYS), "seed": rng.randrange(2**32)}
        for _ in range(rng.randint(1, 2))
    ]
    # A checksum says that bytes are damaged; whoever wrote the file can write that too.
    sealed = rng.choice([False, True])
    return {"kind": kind, "file": rng.choice(files), "damage": damage, "sealed": sealed}


class _Evil:
    """Pickle payload: creates a file if anything unpickles it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (self.path, "w"))


def apply(case: Case, folder: Path) -> None:
    """Damage a copy of the sound files."""
    path = folder / case["file"]
    for damage in case["damage"]:
        if not path.is_file():
            continue
        rng = np.random.default_rng(damage["seed"])
        if damage["way"] == "bytes":
            path.write_bytes(_damaged_bytes(path.read_bytes(), rng))
        elif damage["way"] == "whole":
            _replace_file(path, str(rng.choice(WHOLE)), rng)
        elif path.suffix == ".safetensors":
            _edit_weights(path, rng)
        else:
            with contextlib.suppress(*UNWRITABLE):
                _edit(path, rng)
    description = next(folder.glob("*.json"), None)
    if case["sealed"] and path.suffix == ".safetensors" and path.is_file():
        with contextlib.suppress(Exception):
            assert description is not None
            data = json.loads(description.read_text())
            data["weights_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
            description.write_text(json.dumps(data))


def _damaged_bytes(data: bytes, rng: np.random.Generator) -> bytes:
    """Overwrite bytes at a place, perhaps by a large count, or cut the file."""
    held = bytearray(data or b"\0")
    at = int(rng.integers(len(held)))
    if rng.random() < 0.5:  # where formats keep what matters
        near = int(rng.integers(min(len(held), 256)))
        at = near if rng.random() < 0.5 else len(held) - 1 - near
    size = int(rng.choice([1, 1, 8, 64, len(held)]))
    counts = [2**62, 2**40, 2**31, 255, *rng.integers(2**62, size=4).tolist()]
    new = int(rng.choice(counts)).to_bytes(8, "little")
    held[at : at + size] = b"" if size == len(held) else new[:size]
    return bytes(held)


def _replace_file(path: Path, way: str, rng: np.random.Generator) -> None:
    path.unlink()
    if way == "folder":
        path.mkdir()
    elif way == "empty":
        path.touch()
    elif way == "other":
        files = sorted(p for p in sound_files().rglob("*") if p.is_file())
        shutil.copy(files[int(rng.integers(len(files)))], path)
    elif way == "pickle":
        evil = [_Evil(str(path.parent / RUN_NAME))]
        if rng.random() < 0.5:
            torch.save(evil, path)
        else:
            path.write_bytes(pickle.dumps(evil))
    elif way == "deep":
        depth = int(rng.choice([500, 10**4, 10**6]))
        opened, closed = ("[", "]") if rng.random() < 0.5 else ('{"a":', "}")
        path.write_text(opened * depth + "1" + closed * depth + "\n")


def _edit(path: Path, rng: np.random.Generator) -> None:
    """Change a value of a document, a line or a table."""
    text = path.read_text()
    if path.suffix == ".csv":
        cells = [line.split(",") for line in text.splitlines()]
        _change(cells, rng)
        lines = [",".join(str(c).replace("\n", " ") for c in row) for row in cells]
    else:
        is_whole = path.suffix == ".json"
        documents = [json.loads(t) for t in ([text] if is_whole else text.splitlines())]
        _change(documents, rng)
        lines = [json.dumps(d) for d in documents]
    path.write_text("\n".join(lines) + "\n", errors="replace")


def _change(data: list[Any] | dict[str, Any], rng: np.random.Generator) -> None:
    """Replace, leave out or add a value anywhere in a document."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        keys = node if isinstance(node, dict) else range(len(node))
        for key in keys:
            # Long lists of numbers would be all that is ever met.
            if not isinstance(key, int) or key < 4:
                places.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    walk(data)
    node, key = places[int(rng.integers(len(places)))]
    value = copy.deepcopy(VALUES[int(rng.integers(len(VALUES)))])
    way = rng.random()
    if way < 0.6:
        node[key] = value
    elif way < 0.8:
        del node[key]
    elif isinstance(node, dict):
        node[str(rng.choice(["extra", "", "__class__", "name", "a" * 10**5]))] = value
    else:
        node.append(value)


def _edit_weights(path: Path, rng: np.random.Generator) -> None:
    """Write other weights into a file that stays well-formed."""
    data = bytearray(path.read_bytes())
    count = min(64, len(data)) // 4 * 4
    values = np.frombuffer(data, dtype=np.uint8)[-count:].view(np.float32)
    values[:] = float(rng.choice([np.nan, np.inf, 1e38, 0.0, -5.0]))
    path.write_bytes(data)


# Judging.


def judge(case: Case) -> Outcome:
    """Damage, read and use a file; return the outcome."""
    with tempfile.TemporaryDirectory(prefix="damaged-") as name:
        folder = Path(name, "files")
        shutil.copytree(sound_files() / case["kind"], folder)
        apply(case, folder)
        outcome = in_child(lambda: use(case["kind"], folder))
        if (folder / RUN_NAME).exists():
            return f"failure, {case['kind']} runs code"
    if outcome.startswith("failure"):
        return f"{outcome} [{case['kind']}]"
    return outcome


def use(kind: str, folder: Path) -> Outcome:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    room = pages * resource.getpagesize() + MORE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    try:
        KINDS[kind].use(folder)
    except NeuroShardError as error:
        if not 0 < len(str(error).strip()) <= 5000:
            return f"failure, a reason of {len(str(error)):,} characters"
        return f"refused, {type(error).__name__}: {error}"
    except BaseException as error:
        (*_, place) = traceback.extract_tb(error.__traceback__)
        where = f"{Path(place.filename).name}:{place.lineno}"
        return f"failure, {type(error).__name__} at {where}: {str(error)[:200]}"
    return "used"


def in_child(work: Callable[[], Outcome]) -> Outcome:
    """Return what work returns in a process of its own, or how that ended."""
    reading, writing = os.pipe()
    gc.collect()  # what earlier tests left may not be freed in a child
    process = os.fork()
    if not process:
        gc.freeze()
        status = 1
        try:
            os.close(reading)
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            signal.setitimer(signal.ITIMER_REAL, 20 * SECONDS)
            # What libraries say of damaged files is not for this terminal.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            os.write(writing, work().encode(errors="replace")[:4000])
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        return f"failure, {signal.Signals(os.WTERMSIG(status)).name}"
    return said or "failure, ends the process"
