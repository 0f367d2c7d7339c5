"""Measures the phases of a sharded model in training, as the simulator names them.

    timer = PhaseTimer(model, device)  # what DistributedModelParallel returned
    ...                                # one iteration
    for module in timer.take():
        print(module.module, module.duration_ms("fwd_comms"))

`critical_times` and `embedding_ms` put what several ranks took together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from torchrec_neuroshard.devices import synchronize
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.planner.compat import (
    lookups,
    num_output_collectives,
    wait_through,
)
from torchrec_neuroshard.simulator import PHASES

__all__ = ["PhaseTimer", "PhaseTimes", "critical_times", "embedding_ms"]

_KERNEL = "SplitTableBatchedEmbeddingBagsCodegen"
_KERNEL_NODE = "SplitLookup"


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """One rank's phases of one iteration in one sharded module.

    Each phase is a start and an end on the machine's monotonic clock [s]; several
    fused kernels of a phase are several spans. A phase that did not run has no span.
    """

    module: str
    """Path of the sharded module."""
    spans: Mapping[str, Sequence[tuple[float, float]]]
    """By the names of `PHASES`."""

    def duration_ms(self, phase: str) -> float:
        """Time that this rank spent in a phase, waiting for others included [ms]."""
        return sum(end - start for start, end in self.spans[phase]) * 1e3


@dataclass(slots=True)
class _Marks:
    starts: dict[str, float] = field(default_factory=dict)
    spans: dict[str, list[tuple[float, float]]] = field(
        default_factory=lambda: {name: [] for name in PHASES}
    )


class PhaseTimer:
    """Hooks into the sharded embedding modules of a model and times their phases.

    Index all-to-all: from the module's call until ids are on the ranks of their tables,
    TorchRec's permutations included. Forward and backward compute: the fused kernels,
    by their calls and by their nodes in the autograd graph (the optimizer is fused into
    the latter). Forward all-to-all: from the last kernel's end until the pooled output
    is there. Backward all-to-all: from the arrival of the output's gradient until the
    first kernel's backward pass starts.

    Under a train pipeline, which sends a batch's ids in the iteration before, the index
    all-to-all has no span. On a GPU every mark waits for the device, which keeps phases
    from overlapping: time whole iterations without a timer.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """Install the hooks.

        Args:
            model: A model whose `EmbeddingBagCollection`s are sharded.
            device: Where the rank's tables are.

        Raises:
            ConfigError: Nothing in the model is sharded.
        """
        self._device = device
        self._marks: dict[str, _Marks] = {}
        self.num_kernels = 0
        """Fused kernels on this rank."""
        self.num_collectives = 0
        """Pooled-output all-to-alls of one forward pass."""
        for path, module in model.named_modules():
            if isinstance(module, ShardedEmbeddingBagCollection):
                self._marks[path] = _Marks()
                self._hook(module, self._marks[path])
        if not self._marks:
            raise ConfigError(
                "the model has no sharded EmbeddingBagCollection to time; pass what "
                "DistributedModelParallel returned"
            )

    def take(self) -> list[PhaseTimes]:
        """Return the phases since the last call, a list over sharded modules."""
        taken = []
        for path, marks in self._marks.items():
            spans = {name: tuple(spans) for name, spans in marks.spans.items()}
            taken.append(PhaseTimes(path, spans))
            marks.spans = {name: [] for name in PHASES}
        return taken

    def _now(self) -> float:
        synchronize(self._device)
        return time.perf_counter()

    def _start(self, marks: _Marks, phase: str) -> None:
        marks.starts[phase] = self._now()

    def _end(self, marks: _Marks, phase: str) -> None:
        marks.spans[phase].append((marks.starts.pop(phase), self._now()))

    def _hook(self, module: Any, marks: _Marks) -> None:
        input_dist, compute = module.input_dist, module.compute_and_output_dist

        def timed_input_dist(*args: Any, **kwargs: Any) -> Any:
            if not _is_pipelined(module):
                self._start(marks, "index_comms")
            return input_dist(*args, **kwargs)

        def timed_compute(*args: Any, **kwargs: Any) -> Any:
            if "index_comms" in marks.starts:
                self._end(marks, "index_comms")
            output = compute(*args, **kwargs)
            self._time_output(output, marks)
            return output

        module.input_dist, module.compute_and_output_dist = (
            timed_input_dist,
            timed_compute,
        )
        self.num_collectives += num_output_collectives(module)
        for kernel in _fused_kernels(module):
            self.num_kernels += 1
            kernel.register_forward_pre_hook(
                lambda *_: self._start(marks, "fwd_compute")
            )
            kernel.register_forward_hook(
                lambda _module, _inputs, output: self._after_lookup(marks, output)
            )

    def _after_lookup(self, marks: _Marks, output: torch.Tensor) -> None:
        self._end(marks, "fwd_compute")
        node = _kernel_node(output)
        if node is None:  # no gradients are taken
            return

        def before(_grads: Any) -> None:
            if "bwd_comms" in marks.starts:
                self._end(marks, "bwd_comms")
            self._start(marks, "bwd_compute")

        node.register_prehook(before)
        node.register_hook(lambda *_: self._end(marks, "bwd_compute"))

    def _time_output(self, awaitable: Any, marks: _Marks) -> None:
        spans = marks.spans["fwd_compute"]
        marks.starts["fwd_comms"] = spans[-1][1] if spans else self._now()

        def timed(wait: Callable[[], Any]) -> Any:
            output = wait()
            self._end(marks, "fwd_comms")
            values = output.values()
            if values.requires_grad:
                values.register_hook(lambda _: self._start(marks, "bwd_comms"))
            return output

        wait_through(awaitable, timed)


def _is_pipelined(module: nn.Module) -> bool:
    """Whether a train pipeline has put a call of its own in the place of `forward`."""
    return "forward" in vars(module)


def _fused_kernels(module: Any) -> Iterator[nn.Module]:
    for lookup in lookups(module):
        for part in lookup.modules():
            if type(part).__name__ == _KERNEL:
                yield part


def _kernel_node(output: torch.Tensor) -> Any:
    """The fused kernel's node in the autograd graph of its output."""
    node: Any = output.grad_fn
    while node is not None and _KERNEL_NODE not in node.name():
        node = node.next_functions[0][0] if node.next_functions else None
    return node


def critical_times(
    by_rank: Sequence[Sequence[PhaseTimes]], *, one_clock: bool = True
) -> list[dict[str, float]]:
    """What each phase of one iteration took over all ranks.

    Compute takes as long as on the slowest rank. A collective takes from the last
    rank's arrival to the last rank's end, so that waiting for compute is not counted
    twice.

    Args:
        by_rank: What `PhaseTimer.take` returned on each rank.
        one_clock: Whether all ranks are on one machine. Else a collective is taken to
            be as long as on the rank that spends least in it, which arrived last.

    Returns:
        Phase -> milliseconds, for each sharded module.
    """
    totals = []
    for ranks in zip(*by_rank, strict=True):
        phases = {}
        for phase in PHASES:
            if phase.endswith("compute"):
                phases[phase] = max(r.duration_ms(phase) for r in ranks)
                continue
            if not one_clock:
                phases[phase] = min(r.duration_ms(phase) for r in ranks)
                continue
            spans = [s for r in ranks for s in r.spans[phase]]
            start = max((s[0] for s in spans), default=0.0)
            end = max((s[1] for s in spans), default=0.0)
            phases[phase] = (end - start) * 1e3
        totals.append(phases)
    return totals


def embedding_ms(by_rank: Sequence[Sequence[PhaseTimes]]) -> float:
    """What one iteration's embedding part took over all ranks [ms].

    From the last rank's start to the last rank's end, forward and backward, added up
    over sharded modules. All ranks must share one clock.

    Args:
        by_rank: What `PhaseTimer.take` returned on each rank.
    """
    total = 0.0
    for ranks in zip(*by_rank, strict=True):
        for half in (PHASES[:3], PHASES[3:]):
            spans = [[s for name in half for s in r.spans[name]] for r in ranks]
            begun = [s for s in spans if s]
            if begun:
                start = max(s[0][0] for s in begun)
                total += (max(s[-1][1] for s in begun) - start) * 1e3
    return total
