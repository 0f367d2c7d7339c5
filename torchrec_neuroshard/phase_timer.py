"""Measures the phases of a sharded model in training, as the simulator names them.

    timer = PhaseTimer(model, device)  # what DistributedModelParallel returned
    ...                                # one iteration
    for module in timer.take():
        print(module.module, module.duration_ms("fwd_comms"))

`critical_times` and `embedding_ms` put what several ranks took together.
`InputSampler` profiles the ids that enter the same modules.
"""

from __future__ import annotations

import contextlib
import platform
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_neuroshard.costs.simulator import PHASES
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.hardware.devices import (
    accelerator,
    is_accelerator,
    synchronize,
)
from torchrec_neuroshard.planner.compat import lookups, wait_through
from torchrec_neuroshard.tables.profile import FeatureProfile, profile_ids

__all__ = [
    "InputSampler",
    "PhaseTimer",
    "PhaseTimes",
    "critical_times",
    "embedding_ms",
]

_KERNEL = "SplitTableBatchedEmbeddingBagsCodegen"
_KERNEL_NODE = "SplitLookup"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
"""Names this boot of the machine. Its processes share one monotonic clock."""


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """One rank's phases of one iteration in one sharded module.

    Each phase is a start and an end [s]; several fused kernels of a phase are several
    spans. A phase that did not run has no span.
    """

    module: str
    """Path of the sharded module."""
    spans: Mapping[str, Sequence[tuple[float, float]]]
    """By the names of `PHASES`."""
    clock: str = ""
    """What read the times. Times of different clocks have no common zero, nor have
    iterations that are timed by events."""

    def duration_ms(self, phase: str) -> float:
        """Time that this rank spent in a phase, waiting for others included [ms]."""
        return sum(end - start for start, end in self.spans[phase]) * 1e3


_Spans = defaultdict[tuple[str, str], list[tuple[Any, Any]]]
"""Module and phase -> starts and ends, as `PhaseTimer._now` marks them."""


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
    from overlapping: time whole iterations without a timer, or let marks be events in
    the device's stream (`wait=False`), which then hold what lies between kernels, too.

    Attributes:
        enabled: Whether iterations are timed; change it between two of them.
        num_kernels: Fused kernels on this rank.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        wait: bool = True,
        on_error: Callable[[Exception], None] | None = None,
    ) -> None:
        """Install the hooks.

        Args:
            model: A model whose `EmbeddingBagCollection`s are sharded.
            device: Where the rank's tables are.
            wait: Whether marks wait for a GPU.
            on_error: Called with what goes wrong in a hook, after which nothing more is
                timed. None: it is raised where the model calls the hook.

        Raises:
            ConfigError: Nothing in the model is sharded.
        """
        self._device, self._on_error = device, on_error
        self._uses_events = is_accelerator(device.type) and not wait
        self._clock = uuid.uuid4().hex if self._uses_events else _machine()
        self._paths: list[str] = []
        self._starts: dict[tuple[str, str], Any] = {}
        self._spans: _Spans = defaultdict(list)
        self._origin: Any = None
        self._ended: list[tuple[_Spans, Any]] = []
        self._hooks = contextlib.ExitStack()  # the last to come is the first to go
        self.enabled = True
        self.num_kernels = 0
        for path, module in model.named_modules():
            if isinstance(module, ShardedEmbeddingBagCollection):
                self._paths.append(path)
                self._hook(module, path)
        if not self._paths:
            raise ConfigError(
                "the model has no sharded EmbeddingBagCollection to time; pass what "
                "DistributedModelParallel returned"
            )

    def take(self) -> list[PhaseTimes]:
        """Return the phases since the last call, a list over sharded modules."""
        self.end_iteration()
        return self.take_all()[-1]

    def end_iteration(self) -> None:
        """Keep the phases since the last call for `take_all`; waits for nothing."""
        self._ended.append((self._spans, self._origin))
        self._starts, self._spans, self._origin = {}, defaultdict(list), None

    def take_all(self) -> list[list[PhaseTimes]]:
        """Return the iterations that were ended, each a list over sharded modules.

        Where marks are events, it waits for the last of them.
        """
        ended, self._ended = self._ended, []
        return [
            [self._times(path, spans, origin) for path in self._paths]
            for spans, origin in ended
        ]

    def _times(self, path: str, spans: _Spans, origin: Any) -> PhaseTimes:
        def seconds(mark: Any) -> float:
            if not self._uses_events:
                return float(mark)
            mark.synchronize()
            return float(origin.elapsed_time(mark)) / 1e3

        times = {
            phase: [(seconds(start), seconds(end)) for start, end in spans[path, phase]]
            for phase in PHASES
        }
        return PhaseTimes(path, times, self._clock)

    def remove(self) -> None:
        """Take the hooks out of the model."""
        self.enabled = False
        self._hooks.close()

    def _now(self) -> Any:
        if self._uses_events:
            device = accelerator(self._device.type)
            event: Any = device.Event(enable_timing=True)
            event.record(device.current_stream(self._device))
            # An event of this iteration: CUDA tells time between events in 24 bits.
            self._origin = self._origin or event
            return event
        synchronize(self._device)
        return time.perf_counter()

    def _start(self, path: str, phase: str) -> None:
        self._starts[path, phase] = self._now()

    def _end(self, path: str, phase: str) -> None:
        start = self._starts.pop((path, phase), None)
        if start is not None:  # else it is in an iteration that was not timed
            self._spans[path, phase].append((start, self._now()))

    def _mark(self, action: Callable[..., None], *arguments: Any) -> None:
        """Do something if enabled; what goes wrong in it is told to `on_error`."""
        if not self.enabled:
            return
        try:
            action(*arguments)
        except Exception as error:
            if self._on_error is None:
                raise
            self.enabled = False
            self._on_error(error)

    def _hook(self, module: Any, path: str) -> None:
        input_dist, compute = module.input_dist, module.compute_and_output_dist

        def timed_input_dist(*args: Any, **kwargs: Any) -> Any:
            # A train pipeline has put a call of its own in the place of `forward`.
            if "forward" not in vars(module):
                self._mark(self._start, path, "index_comms")
            return input_dist(*args, **kwargs)

        def timed_compute(*args: Any, **kwargs: Any) -> Any:
            self._mark(self._end, path, "index_comms")
            output = compute(*args, **kwargs)
            self._mark(self._time_output, path, output)
            return output

        _replace(
            self._hooks,
            module,
            input_dist=timed_input_dist,
            compute_and_output_dist=timed_compute,
        )
        for lookup in lookups(module):
            for kernel in lookup.modules():
                if type(kernel).__name__ == _KERNEL:
                    self.num_kernels += 1
                    self._hook_kernel(kernel, path)

    def _hook_kernel(self, kernel: nn.Module, path: str) -> None:
        def before(*_: Any) -> None:
            self._mark(self._start, path, "fwd_compute")

        def after(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
            self._mark(self._after_lookup, path, output)

        self._hooks.callback(kernel.register_forward_pre_hook(before).remove)
        self._hooks.callback(kernel.register_forward_hook(after).remove)

    def _after_lookup(self, path: str, output: torch.Tensor) -> None:
        self._end(path, "fwd_compute")
        node: Any = output.grad_fn
        while node is not None and _KERNEL_NODE not in node.name():
            node = node.next_functions[0][0] if node.next_functions else None
        if node is None:  # no gradients are taken
            return

        def begin(_gradients: Any) -> None:
            self._mark(self._end, path, "bwd_comms")
            self._mark(self._start, path, "bwd_compute")

        node.register_prehook(begin)
        node.register_hook(lambda *_: self._mark(self._end, path, "bwd_compute"))

    def _time_output(self, path: str, awaitable: Any) -> None:
        spans = self._spans[path, "fwd_compute"]
        self._starts[path, "fwd_comms"] = spans[-1][1] if spans else self._now()

        def after(output: Any) -> None:
            self._end(path, "fwd_comms")
            values = output.values()
            if values.requires_grad:
                values.register_hook(
                    lambda _: self._mark(self._start, path, "bwd_comms")
                )

        def timed(wait: Callable[[], Any]) -> Any:
            output = wait()
            self._mark(after, output)
            return output

        wait_through(awaitable, timed)


class InputSampler:
    """Takes copies of ids on their way into a model's sharded modules.

    A kernel sees the batch of all ranks. In place of it each rank takes as many of its
    own batches as there are ranks, of its share of the features alone, so that all
    ranks together count the ids of about one batch of one rank.
    """

    def __init__(
        self,
        model: nn.Module,
        rank: int,
        world_size: int,
        on_error: Callable[[Exception], None],
    ) -> None:
        """Install the hooks.

        Args:
            model: What holds the sharded modules.
            rank: This rank, which profiles each `world_size`-th feature.
            world_size: All ranks, and how many batches make a profile.
            on_error: Called with what goes wrong in a hook; it calls `remove`.
        """
        self._rank, self._world_size = rank, world_size
        self._num_batches = world_size
        self._num_under_way: Counter[int] = Counter()
        self._shares: dict[int, list[str]] = {}
        self._batches: dict[str, list[tuple[torch.Tensor, torch.Tensor, bool]]] = {}
        self._hooks = contextlib.ExitStack()
        for number, module in enumerate(_outermost(model)):
            self._hook(module, number, on_error)

    @property
    def num_under_way(self) -> int:
        """Batches whose ids were sent and that no kernel has seen yet.

        A train pipeline has some; a plain loop has none between iterations.
        """
        return max(self._num_under_way.values(), default=0)

    def profile(self, is_time_left: Callable[[], bool]) -> dict[str, FeatureProfile]:
        """Return profiles of features that have their batches, while there is time."""
        profiles = {}
        for feature, held in [*self._batches.items()]:
            if len(held) < self._num_batches or not is_time_left():
                continue
            ids, lengths, weighted = zip(*self._batches.pop(feature), strict=True)
            synchronize(ids[0].device)  # copies are made in the stream that sent ids
            joined = torch.cat(lengths).cpu().numpy()
            if len(joined):
                profiles[feature] = profile_ids(
                    torch.cat(ids).cpu().numpy(), joined, any(weighted)
                )
        return profiles

    def remove(self) -> None:
        """Take the hooks out of the model."""
        self._num_batches = 0
        self._hooks.close()

    def _hook(
        self, module: Any, number: int, on_error: Callable[[Exception], None]
    ) -> None:
        input_dist, compute = module.input_dist, module.compute_and_output_dist

        def seen_input_dist(ctx: Any, *inputs: Any, **named: Any) -> Any:
            sent = input_dist(ctx, *inputs, **named)
            self._num_under_way[number] += 1
            try:
                # Afterwards, when TorchRec has counted the ids of each feature.
                self._see(number, *inputs[:1])
            except Exception as error:
                on_error(error)
            return sent

        def seen_compute(*args: Any, **kwargs: Any) -> Any:
            self._num_under_way[number] -= 1
            return compute(*args, **kwargs)

        _replace(
            self._hooks,
            module,
            input_dist=seen_input_dist,
            compute_and_output_dist=seen_compute,
        )

    def _see(self, number: int, features: Any = None) -> None:
        """Copy this rank's share of a batch that enters a module."""
        if not isinstance(features, KeyedJaggedTensor):
            return
        if features.variable_stride_per_key():  # features have batches of their own
            return
        if number not in self._shares:
            known = {key for share in self._shares.values() for key in share}
            mine = sorted(features.keys())[self._rank :: self._world_size]
            # Another module may read the same ids.
            self._shares[number] = [key for key in mine if key not in known]
        weighted = features.weights_or_none() is not None
        for key in self._shares[number]:
            held = self._batches.setdefault(key, [])
            if len(held) < self._num_batches:
                ids = features[key]
                copies = ids.values().detach().clone(), ids.lengths().detach().clone()
                held.append((*copies, weighted))


def _outermost(model: nn.Module) -> Iterator[nn.Module]:
    """Sharded modules that are not part of another one."""
    if isinstance(model, ShardedModule):
        yield model
        return
    for child in model.children():
        yield from _outermost(child)


def _replace(hooks: contextlib.ExitStack, module: Any, **functions: Any) -> None:
    """Put functions in the place of a module's methods, until `hooks` is closed.

    A function that somebody has wrapped in turn stays, and must then hand through.
    """

    def restore(name: str, function: Any, before: Any) -> None:
        if vars(module).get(name) is function:
            delattr(module, name)
            if before is not None:
                setattr(module, name, before)

    for name, function in functions.items():
        hooks.callback(restore, name, function, vars(module).get(name))
        setattr(module, name, function)


def _machine() -> str:
    """Name the machine, whose processes share one clock."""
    return _BOOT.read_text().strip() if _BOOT.exists() else platform.node()


def _share_clock(ranks: Sequence[PhaseTimes]) -> bool:
    return len({times.clock for times in ranks}) == 1


def critical_times(by_rank: Sequence[Sequence[PhaseTimes]]) -> list[dict[str, float]]:
    """What each phase of one iteration took over all ranks.

    Compute takes as long as on the slowest rank. A collective takes from the last
    rank's arrival to the last rank's end, so that waiting for compute is not counted
    twice. Ranks on several machines, and GPUs timed by events (`wait=False`), share no
    clock: there a collective takes as long as on the rank that spends least in it,
    which arrived last.

    Args:
        by_rank: What `PhaseTimer.take` returned on each rank.

    Returns:
        Phase -> milliseconds, for each sharded module.
    """
    totals = []
    for ranks in zip(*by_rank, strict=True):
        phases = {}
        for phase in PHASES:
            taken_ms = [r.duration_ms(phase) for r in ranks]
            if phase.endswith("compute"):
                phases[phase] = max(taken_ms)
            elif not _share_clock(ranks):
                phases[phase] = min(taken_ms)
            else:
                spans = [s for r in ranks for s in r.spans[phase]]
                start = max((s[0] for s in spans), default=0.0)
                end = max((s[1] for s in spans), default=0.0)
                phases[phase] = (end - start) * 1e3
        totals.append(phases)
    return totals


def embedding_ms(by_rank: Sequence[Sequence[PhaseTimes]]) -> float:
    """What one iteration's embedding part took over all ranks [ms].

    From the last rank's start to the last rank's end, forward and backward, added up
    over sharded modules. Of ranks without a common clock: the phases of
    `critical_times`, added up.

    Args:
        by_rank: What `PhaseTimer.take` returned on each rank.
    """
    if not all(map(_share_clock, zip(*by_rank, strict=True))):
        return sum(sum(phases.values()) for phases in critical_times(by_rank))
    total = 0.0
    for ranks in zip(*by_rank, strict=True):
        for half in (PHASES[:3], PHASES[3:]):
            spans = [[s for name in half for s in r.spans[name]] for r in ranks]
            begun = [s for s in spans if s]
            if begun:
                start = max(s[0][0] for s in begun)
                total += (max(s[-1][1] for s in begun) - start) * 1e3
    return total
