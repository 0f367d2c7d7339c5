"""The collector of collectives at work over gloo, and what a dead rank does to it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from torchrec_neuroshard.record_store import journal_path, read_comms_records
from torchrec_neuroshard.records import CommsHeader, CommsRecord

pytestmark = pytest.mark.distributed

END_SECONDS = 600
"""Far more than is needed, so that no busy machine fails."""
NUM_KEPT = 20

Ranks = list["subprocess.Popen[str]"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Launcher:
    """Starts one process per rank, as torchrun would."""

    def __init__(self) -> None:
        self.started: Ranks = []

    def __call__(
        self, arguments: Sequence[str], world_size: int, local_world_size: int = 0
    ) -> Ranks:
        port = free_port()
        ranks = []
        for rank in range(world_size):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(local_world_size or world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            }
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-W", "error::FutureWarning", *arguments],
                    env=environment,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        self.started += ranks
        return ranks

    def collect(
        self, out: Path, world_size: int, *options: str, local_world_size: int = 0
    ) -> Ranks:
        arguments = ["-m", "torchrec_neuroshard", "collect", "comms", "--out", str(out)]
        small = ["--max-bytes", "65536", "--sample-seconds", "0.01"]
        return self([*arguments, *small, *options], world_size, local_world_size)

    def stop(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def launch() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    launcher.stop()


def ends(ranks: Ranks) -> list[tuple[int, str]]:
    """Exit code and errors of every rank; lines that say how far it is are none."""
    outputs = [
        re.sub(r"^neuroshard: .*, \d+ s\n", "", text, flags=re.MULTILINE)
        for _, text in (r.communicate(timeout=END_SECONDS) for r in ranks)
    ]
    return [(r.returncode, text) for r, text in zip(ranks, outputs, strict=True)]


def read(path: Path) -> tuple[CommsHeader, list[CommsRecord]]:
    [(header, records)] = read_comms_records([path])
    return header, records


def test_run_goes_on_where_it_stopped(launch: Launcher, tmp_path: Path) -> None:
    path = tmp_path / "c.parquet"
    options = ["--seed", "11", "--num-samples"]
    assert ends(launch.collect(path, 2, *options, "12")) == [(0, "")] * 2
    header, first = read(path)
    assert (header.backend, header.world_size, header.local_world_size) == (
        "gloo",
        2,
        2,
    )
    assert header.reference_ms > 0
    assert header.intra_gb_per_s > 0
    assert header.inter_gb_per_s == 0
    assert [r.index for r in first] == list(range(12))
    for record in first:
        assert record.num_passes >= 3 and record.reference_ms > 0
        assert max(record.transfer_ms) > 0

    assert ends(launch.collect(path, 2, *options, "24")) == [(0, "")] * 2
    again, both = read(path)
    assert again == header
    assert both[:12] == first
    assert [r.index for r in both] == list(range(24))

    # Another group of ranks must not add to it: one rank says so, all of them end.
    others = ends(launch.collect(path, 3, *options, "30"))
    assert [code for code, _ in others] == [2, 2, 2]
    assert "holds records of world_size 2, 3 was asked for" in others[0][1]
    assert [text for _, text in others[1:]] == ["", ""]
    assert read(path) == (again, both)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "odd", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "stalls"]
)
def test_odd_rank_is_named_and_records_of_all_groups_are_kept(
    launch: Launcher, tmp_path: Path, odd: signal.Signals
) -> None:
    path = tmp_path / "c.parquet"
    options = ["--num-samples", "100000", "--timeout", "10", "--seed", "3"]
    ranks = launch.collect(path, 3, *options, "--group-sizes", "2")
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline:
        journal = journal_path(path)
        if journal.exists() and journal.read_text().count("\n") > NUM_KEPT:
            break
        assert all(r.poll() is None for r in ranks), ends(ranks)
        time.sleep(0.1)
    ranks[1].send_signal(odd)
    first, last = ends([ranks[0], ranks[2]])
    ranks[1].kill()
    assert first[0] == 2
    assert f"rank 1 ({socket.gethostname()}, process {ranks[1].pid})" in first[1]
    assert "died or fell silent" in first[1]
    assert last == (2, "")
    assert not journal_path(path).exists()  # rank 0 folded it
    header, kept = read(path)
    assert len(kept) >= NUM_KEPT
    assert [r.index for r in kept] == list(range(len(kept)))
    assert header.world_size == 3
    assert header.sampling["groups"] == ["first 2", "world"]
    assert {(r.group, r.world_size) for r in kept} == {("first 2", 2), ("world", 3)}
    for record in kept:
        assert len(record.bytes_per_peer) == record.world_size
        assert len(record.transfer_ms) == record.world_size
        assert max(record.transfer_ms) > 0 and record.reference_ms > 0


@pytest.mark.nightly
def test_interruption_ends_the_run_between_samples(
    launch: Launcher, tmp_path: Path
) -> None:
    path = tmp_path / "c.parquet"
    ranks = launch.collect(path, 4, "--num-samples", "100000", local_world_size=2)
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline:
        journal = journal_path(path)
        if journal.exists() and journal.read_text().count("\n") >= 25:
            break
        assert all(r.poll() is None for r in ranks), ends(ranks)
        time.sleep(0.1)
    ranks[2].send_signal(signal.SIGTERM)
    assert ends(ranks) == [(0, "")] * 4
    header, records = read(path)

    # Two nodes of two ranks: also the groups inside and across them were measured.
    assert (header.world_size, header.local_world_size) == (4, 2)
    assert header.inter_gb_per_s > 0
    groups = {(r.group, r.world_size, r.local_world_size) for r in records}
    assert groups == {("world", 4, 2), ("local", 2, 2), ("cross", 2, 1)}
