"""The collector of collectives at work over gloo, and what a dead rank does to it."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.ranks import NODE_SIZE, TWO_NODES, Jobs, Results, message_of
from torchrec_neuroshard.measure.run_collectives import collect_comms
from torchrec_neuroshard.measure.settings import CommsConfig
from torchrec_neuroshard.measure.store import read_comms_records

pytestmark = pytest.mark.distributed

END_SECONDS = 600
"""Far more than needed, so that tests pass on busy machines."""

Ranks = list["subprocess.Popen[str]"]


def start(path: Path) -> Ranks:
    """Start three ranks as torchrun would."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-W", "error::FutureWarning", "-m"]
    command += ["torchrec_neuroshard", "collect", "comms", "--group-sizes", "2"]
    command += ["--out", str(path), "--max-bytes", "65536"]
    command += ["--sample-seconds", "0.01", "--num-samples", "100000"]
    environment = {**os.environ, "WORLD_SIZE": "3", "OMP_NUM_THREADS": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]


def ends(ranks: Ranks) -> list[tuple[int, str]]:
    """Return exit code and errors of every rank, without lines of progress."""
    outputs = [
        re.sub(r"^neuroshard: .*, \d+ s\n", "", text, flags=re.MULTILINE)
        for _, text in (r.communicate(timeout=END_SECONDS) for r in ranks)
    ]
    return [(r.returncode, text) for r, text in zip(ranks, outputs, strict=True)]


def collect_twice(path: Path) -> dict[str, Any]:
    """What every rank sees of a run, of the same run again and of another one."""
    config = CommsConfig(
        out=path / "c.jsonl",
        seed=11,
        sample_seconds=0.0,
        kernel_rounds=1,
        bytes_per_rank=(1024, 65536),
    )

    def collected(num_samples: int) -> Any:
        collect_comms(dataclasses.replace(config, num_samples=num_samples))
        dist.barrier()  # rank 0 has written the file
        [found] = read_comms_records([config.out])
        dist.barrier()
        return found

    header, first = collected(3)
    again, both = collected(6)
    other = dataclasses.replace(config, seed=12)
    return {
        "kept": again == header and both[:3] == first,
        "indices": [r.index for r in both],
        "groups": sorted({r.group for r in both}),
        "passes": min(r.num_passes for r in both),
        "transfer_ms": min(max(r.transfer_ms) for r in both),
        "speeds": [header.reference_ms, header.intra_gb_per_s, header.inter_gb_per_s],
        "refusal": message_of(lambda: collect_comms(other)),
    }


def rank_jobs(num_nodes: int, rank: int, folder: Path) -> Jobs:
    def collect() -> dict[str, Any]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RANK", str(rank))
            patch.setenv("WORLD_SIZE", str(num_nodes * NODE_SIZE))
            return collect_twice(folder)

    return {"collect": collect} if num_nodes == TWO_NODES else {}


def test_run_goes_on_where_it_stopped(ranks: Results) -> None:
    found = ranks(__name__, TWO_NODES, "collect")
    for seen in found:
        assert seen["kept"] and seen["indices"] == list(range(6))
        assert seen["passes"] >= 3 and seen["transfer_ms"] > 0
        assert min(seen["speeds"]) > 0
        assert len(seen["groups"]) > 1
    # All ranks end with the first one's error.
    assert all("seed: 11 against 12" in seen["refusal"] for seen in found)


@pytest.mark.nightly
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_records_are_kept_whatever_becomes_of_a_rank(
    tmp_path: Path, sent: signal.Signals, request: pytest.FixtureRequest
) -> None:
    path = tmp_path / "c.jsonl"
    ranks = start(path)
    for process in ranks:
        request.addfinalizer(process.communicate)
        request.addfinalizer(process.kill)
    while not path.exists() or path.read_text().count("\n") <= 21:  # two headers
        assert all(r.poll() is None for r in ranks), ends(ranks)
        time.sleep(0.1)
    ranks[1].send_signal(sent)
    if sent == signal.SIGTERM:  # all end together, between samples
        assert ends(ranks) == [(0, "")] * 3
    else:
        for rank in (0, 2):
            [(code, said)] = ends([ranks[rank]])
            assert code == 2 and f"rank {rank} stopped: " in said and str(path) in said
    [(header, kept)] = read_comms_records([path])
    assert len(kept) >= 20
    assert [r.index for r in kept] == list(range(len(kept)))
    assert header.sampling["groups"] == ["first 2", "world"]
    assert {(r.group, r.world_size) for r in kept} == {("first 2", 2), ("world", 3)}
