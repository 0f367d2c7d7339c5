"""First launches: drawn sets, repeated measurements, and results that are kept."""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import os
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology

from tests.builders import (
    CPU,
    META,
    bag_config,
    bag_sharders,
    bags,
    costed,
    draw_records,
    each,
    make_header,
    make_planner,
    make_tables,
    write_records,
)
from torchrec_neuroshard.bundles import cache, measure_job
from torchrec_neuroshard.bundles.find import load_cost_model, physical_estimate
from torchrec_neuroshard.bundles.folders import PRETRAINED
from torchrec_neuroshard.bundles.format import Bundle
from torchrec_neuroshard.errors import ConfigError, NeuroShardError
from torchrec_neuroshard.files import from_fields, to_fields
from torchrec_neuroshard.hardware import devices
from torchrec_neuroshard.measure.ranks import served_store
from torchrec_neuroshard.measure.records import Measurement
from torchrec_neuroshard.measure.sets import SampledSet
from torchrec_neuroshard.models.compute import PhysicalCostModel
from torchrec_neuroshard.planner import first_launch as launches
from torchrec_neuroshard.planner.enumerator import NeuroShardEnumerator
from torchrec_neuroshard.planner.first_launch import FirstLaunch
from torchrec_neuroshard.planner.topology import topology_for
from torchrec_neuroshard.tables.table import DATA_TYPE_BYTES, row_shard

SHARDS = make_tables([16, 8, 16, 64, 32], rows=[500, 500, 900, 10**8, 100])
REQUEST = measure_job.LaunchRequest(
    shards=SHARDS,
    kernels=(0, 0, 0, 1, 1),
    tables=(0, 0, 1, 2, 3),
    row_kernels=(),
    plan_ranks=2,
    batch_size=128,
    device_type="cpu",
    world_size=2,
    local_world_size=2,
    seconds=1.0,
)
"""Four tables in two kernels; one table is whole or split in half."""


def test_sets_are_of_one_kernel_hold_a_table_once_and_fit() -> None:
    request, most = REQUEST, 2**22
    assert from_fields(measure_job.LaunchRequest, to_fields(request)) == request
    seen: set[str] = set()
    for index in range(60):
        drawn = measure_job.draw_launch_set(request, index, most)
        assert drawn == measure_job.draw_launch_set(request, index, most)
        names = [t.name.partition("#")[0] for t in drawn.tables]
        places = [[s.name for s in SHARDS].index(n) for n in names]
        assert len({request.kernels[p] for p in places}) == 1
        # Column parts of a table may share a rank in plans.
        halves = sum(SHARDS[p].embedding_dim == 8 for p in places)
        assert len({request.tables[p] for p in places}) >= len(places) - (halves == 2)
        assert 0 < len(places)
        held = sum(
            t.num_embeddings * t.embedding_dim * DATA_TYPE_BYTES[t.data_type]
            for t in drawn.tables
        )
        assert held <= most
        for table, place in zip(drawn.tables, places, strict=True):
            shard = SHARDS[place]
            # A table that is too large loses rows, not lookups.
            assert table.num_embeddings <= shard.num_embeddings
            wanted = shard.profile_at(request.batch_size).num_lookups
            assert table.profile_at(request.batch_size).num_lookups == wanted
            if shard.num_embeddings == 10**8:  # its optimizer has almost no state
                assert table.num_embeddings == most // 4 // (64 * 4)
        seen.update(names)
    assert seen == {t.name for t in SHARDS}


def test_cpus_measure_sequences_and_the_same_sets_pooled() -> None:
    """Both models of a CPU get sets to fit to and sets to test on."""
    rows = dataclasses.replace(SHARDS[0], pooled=False)
    request = dataclasses.replace(
        REQUEST, shards=(rows, *SHARDS[1:]), kernels=(0, 1, 1, 1, 1)
    )
    for device, expected in (("cpu", {True, False}), ("cuda", {False})):
        asked = dataclasses.replace(request, device_type=device)
        sets = [measure_job.draw_launch_set(asked, i, 2**22) for i in range(300)]
        found = {
            (s.held_out, s.tables[0].pooled)
            for s in sets
            if s.tables[0].name.startswith("t0#")
        }
        assert found == set(itertools.product([True, False], expected))


def test_sets_of_plans_are_balanced_and_have_all_row_shards() -> None:
    """Tables that are in no other kernel are in every plan."""
    whole = make_tables([64] * 12, rows=[1_000 * (i + 1) for i in range(12)])
    halves = [t.with_width(32) for t in whole]
    by_rows = [row_shard(t, t.num_embeddings // 4, 512) for t in whole[:4]]
    request = dataclasses.replace(
        REQUEST,
        shards=(*whole, *halves, *by_rows),
        kernels=(0,) * 24 + (1,) * 4,
        tables=(*range(12), *range(12), *range(4)),
        row_kernels=(1,),
        plan_ranks=4,
        batch_size=512,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure_job, "PLAN_SHARE", 1.0)
        sets = [measure_job.draw_launch_set(request, i, 2**30) for i in range(200)]
    by_kernel: dict[bool, list[SampledSet]] = {True: [], False: []}
    for drawn in sets:
        kinds = {t.profile is not None and t.pooling_factor < 1 for t in drawn.tables}
        (is_row_wise,) = kinds
        by_kernel[is_row_wise].append(drawn)
    rows, columns = by_kernel[True], by_kernel[False]
    assert len(rows) > 10 < len(columns)
    assert {len(s.tables) for s in rows} == {1, 2, 3, 4}
    # 64 columns each of 8 to 12 tables, on 4 ranks.
    widths = [sum(t.embedding_dim for t in s.tables) for s in columns]
    assert 2 * 64 <= np.mean(widths) <= 3 * 64
    assert 64 <= min(widths) and max(widths) <= 6 * 64
    assert {t.embedding_dim for s in columns for t in s.tables} == {32, 64}


def test_drawn_shards_are_the_searchs_options() -> None:
    constraints = {
        "t0": ParameterConstraints(sharding_types=["table_wise"]),
        "t1": ParameterConstraints(
            sharding_types=["column_wise"], min_partition=32, pooling_factors=[7.0]
        ),
        "t2": ParameterConstraints(sharding_types=["row_wise"]),
    }
    planner = make_planner(cost_model="cpu", comms_model=None, constraints=constraints)
    model = bags(*(bag_config(i, 1000, 64) for i in range(3)), device=META)

    class Sharder(EmbeddingBagCollectionSharder):
        def sharding_types(self, compute_device_type: str) -> list[str]:
            return list(super().sharding_types("cuda"))

    options = planner.enumerator.enumerate(model, [Sharder()])
    launch = FirstLaunch(planner.costs, "measure", 3.0)
    request = launch.request(options, 2)
    found = {(t.name[-2:], t.num_embeddings, t.embedding_dim) for t in request.shards}
    columns = {("t0", 1000, 64), ("t1", 1000, 64), ("t1", 1000, 32)}
    assert found == {*columns, ("t2", 500, 64)}
    assert request.batch_size == 2 * 64 and request.seconds == 3.0
    assert 7.0 in {t.pooling_factor for t in request.shards}
    # Row shards run in their own kernel.
    whole = np.array([t.num_embeddings == 1000 for t in request.shards])
    kernels = np.array(request.kernels)
    assert not set(kernels[whole]) & set(kernels[~whole])
    assert set(request.row_kernels) == set(kernels[~whole])
    assert request.plan_ranks == 2


def test_without_measuring_the_estimate_is_used_with_a_warning() -> None:
    planner = make_planner(cost_model="measure", comms_model=None, calibrate="never")
    model = bags(bag_config(0, 100, 16), device=META)
    with pytest.warns(UserWarning, match="calibrate='never' forbids measuring, and"):
        planner.plan(model, bag_sharders())
    assert "not measured" in planner.costs.cost_model.source
    assert planner.last_result is not None
    assert any("the cache has no bundle" in w for w in planner.last_result.warnings)
    settings: list[tuple[str, Any, str]] = [
        ("auto", "often", "must be 'auto', 'never' or a number of seconds"),
        ("auto", -1.0, "must be 'auto', 'never' or a number of seconds"),
        ("cpu", 5.0, "needs cost_model 'auto' or 'measure', got 'cpu'"),
    ]
    for cost_model, calibrate, message in settings:
        with pytest.raises(ConfigError, match=message):
            FirstLaunch(planner.costs, cost_model, calibrate)
    assert FirstLaunch(planner.costs, "auto", 0).seconds == 0.0


def test_the_estimate_before_measuring_has_the_topologys_bandwidths() -> None:
    model = load_cost_model(
        "measure", device_type="cuda", hbm_gb_per_s=1_000.0, host_gb_per_s=7.0
    )
    assert isinstance(model, PhysicalCostModel)
    found = model.constants
    assert (found.memory_gb_per_s, found.host_gb_per_s) == (1_000.0, 7.0)


@pytest.mark.filterwarnings("ignore:no cost model was measured")
def test_bundles_of_other_devices_are_no_reason_to_list_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor to warn, unless the planner was told to measure; then once."""
    monkeypatch.setenv("NEUROSHARD_CACHE", str(tmp_path / "cache"))
    key = cache.CacheKey(
        device="another",
        device_type="cuda",
        world_size=2,
        local_world_size=2,
        optimizers=("sgd",),
        data_types=("fp32",),
    )
    cache.store(SHIPPED, key, created="2026-01-01T00:00:00+00:00", seconds=1.0)
    assert cache.entries()
    listed, listings = NeuroShardEnumerator.enumerate, []

    def note(*given: Any, **named: Any) -> Any:
        listings.append(given)
        return listed(*given, **named)

    monkeypatch.setattr(NeuroShardEnumerator, "enumerate", note)
    monkeypatch.setattr(launches, "current_device_name", {"cpu": "one"}.get)
    model, card = bags(bag_config(0, 100, 16), device=META), topology_for("h100")
    for topology in (Topology(2, "cpu"), card):
        planner = make_planner(topology=topology, cost_model="auto", comms_model=None)
        notes = planner.costs.notes
        for _ in range(2):
            planner.plan(model, bag_sharders())
        assert planner.costs.notes == notes
    assert len(listings) == 4
    planner = make_planner(topology=card, cost_model="measure", comms_model=None)
    notes = planner.costs.notes
    with pytest.warns(UserWarning, match="failed .this machine has no cuda device"):
        planner.plan(model, bag_sharders())
    planner.plan(model, bag_sharders())
    assert len(planner.costs.notes) == len(notes) + 1
    assert len(listings) == 6


def test_disturbed_sets_are_measured_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other work disturbs some sets a number of times."""
    disturbed, seen = {3: 1, 5: 2, 8: 1000}, Counter[int]()

    def measure(sampled: SampledSet, meanwhile: Any) -> Measurement:
        index = sampled.index
        seen[index] += 1
        is_noisy = seen[index] <= disturbed.get(index, 0)
        ms, spread = (2.0, 0.5) if is_noisy else (1.0, 0.0)
        return Measurement(
            fwd_ms=ms, bwd_ms=ms, num_passes=3, spread=spread, reference_ms=1.0
        )

    timer = SimpleNamespace(reference_ms=1.0, measure=measure)
    order_ms = {"1024": (1.0, 2.0)}
    monkeypatch.setattr(measure_job, "SetTimer", lambda *_, **__: timer)
    monkeypatch.setattr(measure_job, "measure_column_order", lambda *_: order_ms)
    monkeypatch.setattr("time.monotonic", lambda: float(seen.total()))
    kept, ordered, reference_ms = measure_job.measure_mine(
        REQUEST, None, torch.device("cpu"), 60
    )
    assert (ordered, reference_ms) == (order_ms, 1.0)
    assert [r.index for r in kept if r.spread > 0.1] == [8]
    assert seen[3] == 2 and seen[5] == 3 and 3 < seen[8] < 10
    # Undisturbed sets are measured once, and all time is used.
    assert {seen[r.index] for r in kept} - {2, 3, seen[8]} == {1}
    assert seen.total() == 60 and len(kept) > 50


def test_a_ranks_sets_are_compared_with_its_own_usual_reference(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rank 1 has a slow host and far memory, and disturbs one of its sets."""
    usual_ms = {0: 1.04, 1: 2.6}
    nominal_ms = {0: 1.0, 1: 1.5}
    found: dict[int, Any] = {}
    for rank in range(2):

        def measured(sampled: SampledSet, _: Any, rank: int = rank) -> Measurement:
            slow = 2.0 if sampled.index == 9 else 1.0
            return Measurement(
                fwd_ms=1.0,
                bwd_ms=1.0,
                num_passes=3,
                spread=0.0,
                reference_ms=usual_ms[rank] * slow,
            )

        timer = SimpleNamespace(reference_ms=nominal_ms[rank], measure=measured)
        monkeypatch.setattr(measure_job, "SetTimer", lambda *_, t=timer, **__: t)
        monkeypatch.setattr(measure_job, "measure_column_order", lambda *_: {})
        ranks: Any = SimpleNamespace(rank=rank, world_size=2)
        found[rank] = measure_job.measure_mine(REQUEST, ranks, CPU, 0.0)
    both: Any = SimpleNamespace(
        turn=lambda: (0, 1),
        agree=lambda values: values,
        gather_objects=lambda mine: [found[0], found[1]],
        rank=0,
        world_size=2,
    )
    records, _, unit_ms = measure_job._measure_kernels(REQUEST, both, CPU, 0.0)
    assert {r.index for r in records} == set(range(20)) and unit_ms == 1.0
    bundle = shutil.copytree(SHIPPED, tmp_path / "found")
    header = make_header(reference_ms=unit_ms)
    write_records(bundle / measure_job.KERNELS_NAME, header, records)
    verdict = measure_job.judge(bundle, physical_estimate("cpu"))
    assert verdict is not None
    assert (verdict.num_sets, verdict.num_disturbed) == (20, 1)


@pytest.mark.parametrize("size", range(1, 9))
def test_each_rank_measures_sets_of_both_kinds(size: int) -> None:
    drawn = [
        list(itertools.islice(measure_job.rank_indices(rank, size), 30))
        for rank in range(size)
    ]
    assert sorted(itertools.chain(*drawn)) == list(range(30 * size))
    # Together, the fewest sets of each rank are the first ones.
    least = -(-20 // size)
    firsts = {index for mine in drawn for index in mine[:least]}
    assert firsts == set(range(least * size))
    for mine in drawn:
        for divisor in (2, 5):  # of held-out sets
            assert {index % divisor == 0 for index in mine} == {True, False}


SLEEPS = "import time; time.sleep(600)"


def ends_of_ranks(folder: Path, request: measure_job.LaunchRequest) -> list[str]:
    """Let two ranks take part; return how each ended, within the time limit."""

    def end(rank: int, port: int) -> str:
        mine = folder / f"{rank}"
        mine.mkdir()
        member = measure_job.Member(rank=rank, address="127.0.0.1", port=port)
        try:
            measure_job.take_part(request, member, mine)
        except NeuroShardError as error:
            return str(error)
        return "done"

    begin = time.monotonic()
    with served_store("127.0.0.1") as port, ThreadPoolExecutor(2) as ranks:
        ends = list(ranks.map(end, range(2), [port] * 2))
    assert time.monotonic() - begin < request.limit_seconds / 2
    return ends


@pytest.mark.parametrize("failing", [0, 1])
def test_if_one_rank_fails_all_end(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = f"""
import os, sys
if os.environ["RANK"] == "{failing}":
    sys.exit(7)
{SLEEPS}"""
    monkeypatch.setattr(measure_job, "PROGRAM", ("-c", fails))
    reason = "its process exited with code 7"
    wanted = [f"rank {failing} failed: {reason}"] * 2
    wanted[failing] = reason
    assert ends_of_ranks(tmp_path, REQUEST) == wanted


def test_a_rank_without_a_device_ends_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def own_device(device_type: str, local_rank: int) -> torch.device:
        if local_rank == 0:
            return torch.device("cuda", 0)
        raise ConfigError("local rank 1 has no CUDA device")

    monkeypatch.setattr(measure_job, "own_device", own_device)
    monkeypatch.setattr(measure_job, "PROGRAM", ("-c", SLEEPS))
    request = dataclasses.replace(REQUEST, device_type="cuda")
    reason = "local rank 1 has no CUDA device"
    assert ends_of_ranks(tmp_path, request) == [f"rank 1 failed: {reason}", reason]


def test_each_process_measures_its_ranks_own_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank's process may see its own device alone, or have made it current."""
    told = "import os; open(os.environ['LOCAL_RANK'], 'w').close()"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure_job, "PROGRAM", ("-c", told))
    sizes: dict[str, Any] = {"world_size": 4, "local_world_size": 4}
    request = dataclasses.replace(REQUEST, device_type="cuda", **sizes)
    for count, current, rank, local_rank, own in (
        (1, 0, 3, None, 0),
        (4, 2, 1, None, 2),
        (4, 0, 1, None, 1),
        (4, 0, 1, "3", 3),
    ):
        module = SimpleNamespace(
            is_available=lambda: True,
            device_count=lambda count=count: count,
            current_device=lambda current=current: current,
        )
        monkeypatch.setattr(devices, "accelerator", lambda _, module=module: module)
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        if local_rank is not None:
            monkeypatch.setenv("LOCAL_RANK", local_rank)
        with served_store("127.0.0.1") as port:
            member = measure_job.Member(rank=rank, address="127.0.0.1", port=port)
            measure_job.take_part(request, member, tmp_path)
        Path(str(own)).unlink()


def _take_part(folder: Path, stderr: int) -> None:
    os.dup2(stderr, 2)
    alone: dict[str, Any] = {"world_size": 1, "local_world_size": 1}
    request = dataclasses.replace(REQUEST, **alone, seconds=30.0)
    measure_job.take_part(request, measure_job.Member(rank=0), folder)


def test_the_process_ends_with_its_job(tmp_path: Path) -> None:
    """It holds the other end of the pipe as long as it lives."""
    told, stderr = os.pipe()
    context = multiprocessing.get_context("fork")
    job = context.Process(target=_take_part, args=(tmp_path, stderr))
    job.start()
    os.close(stderr)
    with open(told, encoding="utf-8") as lines:
        assert "first launch on this device" in next(lines)
        job.kill()
        job.join()
        begin = time.monotonic()
        lines.read()
    assert time.monotonic() - begin < 10.0


SHIPPED = PRETRAINED / "cpu_epyc"
COPIES = """
import shutil, sys
shutil.copytree(sys.argv[2], sys.argv[1] + "/bundle")
with open(sys.argv[2] + ".count", "a") as file:
    file.write("x")
"""
"""Replaces the measurement."""
COPIES_SHIPPED = f"""
import shutil, sys
shutil.copytree({str(SHIPPED)!r}, sys.argv[1] + "/bundle")
"""


@pytest.mark.parametrize(
    ("truth", "noisy", "said"),
    [
        ("bundle", 4, None),
        ("bundle", 20, "other work disturbed 20 of 40 sets"),
        ("estimate", 0, "other work disturbed 0 of 40 sets"),
    ],
)
def test_bad_measurements_are_not_kept(
    truth: str,
    noisy: int,
    said: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = (
        Bundle(SHIPPED).cost_model() if truth == "bundle" else physical_estimate("cpu")
    )
    bundle = shutil.copytree(SHIPPED, tmp_path / "found")
    records = [
        dataclasses.replace(
            r, held_out=r.index % 2 == 0, spread=0.5 if r.index < noisy else 0.0
        )
        for r in costed(draw_records(40, 0, max_tables=4, max_dim=16), model)
    ]
    write_records(bundle / measure_job.KERNELS_NAME, make_header(), records)
    monkeypatch.setenv("NEUROSHARD_CACHE", str(tmp_path / "cache"))
    program = COPIES.replace("sys.argv[2]", repr(str(bundle)))
    monkeypatch.setattr(measure_job, "PROGRAM", ("-c", program))
    for launch in range(2):
        planner = make_planner(1, cost_model="measure", comms_model=None, calibrate=1.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            planner.plan(bags(bag_config(0, 100, 16), device=META), bag_sharders())
        texts = [t for t in map(str, (w.message for w in caught)) if "first l" in t]
        measured = len(Path(f"{bundle}.count").read_text())
        is_measured = "not measured" not in planner.costs.cost_model.source
        assert is_measured == (truth == "bundle")
        assert planner.last_result is not None
        if said is None:
            assert not texts and measured == 1 and len(cache.entries()) == 1
            continue
        (text,) = texts
        assert measured == launch + 1 and not cache.entries()
        assert said in text and "The next launch measures again" in text
        (entry,) = cache.rejections()
        assert said in entry.reason
        # Both errors on held-out sets.
        assert text.count("%") == 2 and text in planner.last_result.warnings


GPU_NAME = "Unheard-of GPU"


class Launches:
    """Launches of one rank with a GPU, whose measuring copies a shipped bundle."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        patch.setenv("NEUROSHARD_CACHE", str(folder / "cache"))
        names = {"cpu": "one", "cuda": GPU_NAME}
        patch.setattr(launches, "current_device_name", names.get)
        patch.setattr(launches, "group_timeout_seconds", lambda _: 1e6)
        patch.setattr(measure_job, "own_device", lambda *_: torch.device("cuda", 0))
        self.plans = True
        """Whether launches plan; planning takes most of the time."""
        self._counted, self._patch = folder / "count", patch
        self._counted.write_text("")
        self.measure_by(COPIES_SHIPPED)

    def measure_by(self, program: str) -> None:
        """Replace the measuring process."""
        count = f"open({str(self._counted)!r}, 'a').write('x')\n"
        self._patch.setattr(measure_job, "PROGRAM", ("-c", count + program))

    def launch(
        self, tables: Sequence[Any], calibrate: Any = "auto", batch_size: int = 64
    ) -> Launched:
        """Launch as a new job would; return what it measured, used and told."""
        topology = Topology(1, "cuda", hbm_cap=2**40)
        before = len(self._counted.read_text())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            planner = make_planner(
                topology=topology,
                cost_model="auto",
                comms_model=None,
                calibrate=calibrate,
                batch_size=batch_size,
                constraints=each(6, "table_wise", compute_kernels=["fused"]),
            )
            model, sharders = bags(*tables, device=META), bag_sharders()
            pg: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
            options = partial(planner.enumerator.enumerate, model, sharders)
            FirstLaunch(planner.costs, "auto", calibrate).on_all_ranks(options, pg)
            result = None
            if self.plans:
                planner.plan(model, sharders)
                result = planner.last_result
        return Launched(
            measured=len(self._counted.read_text()) - before,
            is_estimated="not measured" in planner.costs.cost_model.source,
            told=[t for t in map(str, (w.message for w in caught)) if "launch" in t],
            outside=[
                note.text
                for note in (result.notes if result else ())
                if note.code == "out-of-range"
            ],
        )


class Launched(NamedTuple):
    """What came of a launch."""

    measured: int
    is_estimated: bool
    told: list[str]
    outside: list[str]


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launches:
    return Launches(tmp_path, monkeypatch)


TABLES = [bag_config(i, 10_000 * 2**i, 64) for i in range(5)]


def test_the_cache_knows_the_tables(gpu: Launches) -> None:
    first, again = gpu.launch(TABLES), gpu.launch(TABLES)
    assert (first.measured, again.measured) == (1, 0)
    for launched in (first, again, gpu.launch(TABLES[1:])):
        assert not launched.is_estimated and not launched.told
        assert launched.outside == []
    # A small change is no reason to measure, but the plan says so.
    for launched in (
        gpu.launch([*TABLES, bag_config(5, 10_000_000, 64)]),
        gpu.launch(TABLES, batch_size=128),
    ):
        assert not launched.measured and not launched.is_estimated
        (text,) = launched.outside
        assert "outside what the cost model measured" in text
    # Another model is measured, and both stay.
    other = [bag_config(i, 100 + i, 8) for i in range(5)]
    assert [gpu.launch(other).measured, gpu.launch(other).measured] == [1, 0]
    assert gpu.launch(TABLES).measured == 0 and len(cache.entries()) == 2


@pytest.mark.parametrize(
    "program", ["import sys; sys.exit(7)", "disturbed"], ids=["fails", "disturbed"]
)
def test_what_failed_is_not_measured_at_every_launch(
    program: str, gpu: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "its process exited with code 7"
    if program == "disturbed":
        verdict = measure_job.LaunchVerdict(
            num_sets=40, num_disturbed=20, error=0.1, estimate_error=0.2
        )
        monkeypatch.setattr(measure_job, "judge", lambda *_: verdict)
        why = "other work disturbed 20 of 40 sets"
    else:
        gpu.measure_by(program)
    gpu.plans = False
    first = gpu.launch(TABLES)
    assert first.measured == 1 and why in " ".join(first.told)
    (entry,) = cache.rejections()
    assert why in entry.reason and entry.key.device == GPU_NAME
    for _ in range(2):
        later = gpu.launch(TABLES)
        assert later.measured == 0 and later.is_estimated
        (text,) = later.told
        assert why in text and entry.created in text
        assert "'neuroshard cache clear'" in text and "calibrate=60" in text
    # Of another model, nothing is known.
    assert gpu.launch([bag_config(0, 100, 8)]).measured == 1
    # The ways to measure again.
    assert gpu.launch(TABLES, calibrate=1.0).measured == 1
    assert cache.clear() == 2
    assert gpu.launch(TABLES).measured == 1
    (entry,) = cache.rejections()
    cache.reject(entry.key, reason="long ago", created="2026-01-01", seconds=1.0)
    assert gpu.launch(TABLES).measured == 1
    # A bundle counts more than an earlier failure.
    gpu.measure_by(COPIES_SHIPPED)
    monkeypatch.setattr(measure_job, "judge", lambda *_: None)
    assert gpu.launch(TABLES, calibrate=1.0).measured == 1
    last = gpu.launch(TABLES)
    assert last.measured == 0 and not last.is_estimated and not last.told


@pytest.mark.filterwarnings("ignore:no cost model was measured")
def test_a_bundle_of_one_rank_of_several_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEUROSHARD_CACHE", str(tmp_path / "cache"))
    program = COPIES_SHIPPED
    monkeypatch.setattr(measure_job, "PROGRAM", ("-c", program))
    planner = make_planner(2, cost_model="measure", comms_model=None, calibrate=1.0)
    with pytest.warns(UserWarning, match=r"measures on one rank alone. collective_p"):
        planner.plan(bags(bag_config(0, 100, 16), device=META), bag_sharders())
    assert not cache.entries()
