"""Collectives of plans, measured among processes of this machine.

The processes stay for all tasks. A visit to a collective makes its
buffers, runs it once untimed and then a few times: from the last rank's start until the
last rank is through. Visits go round all collectives of a task, so that the machine's
drift meets all plans alike.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import socket
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import numpy as np
import torch

from planner_comparison.plans import Collective
from torchrec_neuroshard.collect.collectives import CollectiveRunner
from torchrec_neuroshard.collect.ranks import Ranks
from torchrec_neuroshard.collect.timing import keep_freed_memory

_START_MARGIN_S = 1e-3
"""From the agreement on a start to the start, so that all ranks know of it."""
_TIMEOUT_S = 120.0
_SEED = 0


class RankGroup:
    """Processes that run collectives when told to."""

    def __init__(self, world_size: int) -> None:
        """Start them; they use gloo, one thread each."""
        self.world_size = world_size
        context = multiprocessing.get_context("spawn")
        port = _free_port()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments = (rank, world_size, port, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def measure(
        self, collectives: Sequence[Collective], rounds: int, passes: int
    ) -> dict[Collective, float]:
        """Time collectives; medians by the clock [ms]."""
        job = (list(collectives), rounds, passes)
        for pipe in self._pipes:
            pipe.send(job)
        answers = [self._receive(pipe) for pipe in self._pipes]
        return answers[0]

    def _receive(self, pipe: Connection) -> dict[Collective, float]:
        while not pipe.poll(1.0):
            if not all(p.is_alive() for p in self._processes):
                raise RuntimeError("a process that measures collectives has died")
        answer: dict[Collective, float] | str = pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(f"measuring collectives failed: {answer}")
        return answer

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.terminate()


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def _serve(rank: int, world_size: int, port: int, pipe: Connection) -> None:
    """Run jobs until told to end."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    keep_freed_memory()
    ranks = Ranks("gloo", _TIMEOUT_S)
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        while (job := pipe.recv()) is not None:
            try:
                pipe.send(_measure(ranks, *job))
            except RuntimeError as error:
                pipe.send(f"rank {rank}: {error}")
                break
    ranks.close()


def _measure(
    ranks: Ranks, collectives: Sequence[Collective], rounds: int, passes: int
) -> dict[Collective, float]:
    taken: dict[Collective, list[float]] = {c: [] for c in collectives}
    order = list(collectives)
    shuffle = random.Random(_SEED)  # the same on all ranks
    for _ in range(rounds):
        shuffle.shuffle(order)
        for collective in order:
            runner = CollectiveRunner(
                collective.kind,
                collective.bytes_per_peer,
                collective.batch_size,
                collective.lengths_share,
                process_group=None,
                rank=ranks.rank,
                device=ranks.device,
            )
            runner.run()
            for _ in range(passes):
                taken[collective].append(_time(ranks, runner))
    return {c: statistics.median(ms) for c, ms in taken.items()}


def _time(ranks: Ranks, runner: CollectiveRunner) -> float:
    """Start together; from the last start to the last end [ms], on every rank."""
    (now,) = ranks.agree([ranks.clock()])
    begin = now + _START_MARGIN_S
    time.sleep(max(0.0, begin - ranks.clock()))
    arrival = ranks.clock()
    runner.run()
    done = ranks.clock()
    arrival_W, done_W = ranks.gather(np.array([arrival, done]))
    return float(done_W.max() - arrival_W.max()) * 1e3
