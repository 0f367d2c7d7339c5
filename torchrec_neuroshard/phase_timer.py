"""Measure the phases of a sharded model in training, with the simulator's names.

    timer = PhaseTimer(model, device)  # the DistributedModelParallel
    ...                                # one iteration
    for module in timer.take():
        print(module.module, module.duration_ms("fwd_comms"))

`critical_times` and `embedding_ms` combine the times of several ranks. `InputSampler`
profiles the ids that enter the same modules.
"""

from __future__ import annotations

import contextlib
import math
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
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_neuroshard.costs.simulator import PHASES
from torchrec_neuroshard.errors import ConfigError, check_kind
from torchrec_neuroshard.hardware.device_types import is_accelerator
from torchrec_neuroshard.hardware.devices import accelerator, synchronize
from torchrec_neuroshard.sharded_model import lookups, wait_through
from torchrec_neuroshard.tables.profile import FeatureProfile, profile_ids

_KERNEL = "SplitTableBatchedEmbeddingBagsCodegen"
_KERNEL_NODES = ("SplitLookup", "SplitNoBagLookup")
_TIMED = (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)
_BOOT = Path("/proc/sys/kernel/random/boot_id")
"""Identifies this boot of the machine, whose processes share one monotonic clock."""


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """One rank's phases of one iteration in one sharded module.

    A span is a start and an end [s]. A phase has a span for each of its fused kernels,
    and none if it did not run.
    """

    module: str
    """Path of the sharded module."""
    spans: Mapping[str, Sequence[tuple[float, float]]]
    """Name of a phase in `PHASES` -> its spans."""
    clock: str = ""
    """Clock of the times. Different clocks have no common zero; with GPU events, each
    iteration has its own zero, too."""

    def duration_ms(self, phase: str) -> float:
        """Return the time that this rank spent in a phase, waiting included [ms]."""
        return sum(end - start for start, end in self.spans[phase]) * 1e3


_Spans = defaultdict[tuple[str, str], list[tuple[Any, Any]]]
"""Module and phase -> starts and ends, as `PhaseTimer._now` marks them."""


class PhaseTimer:
    """Hooks into the sharded embedding modules of a model and times their phases.

    - Index all-to-all: from the module's call until the ids are on their tables' ranks,
      including TorchRec's permutations.
    - Forward and backward compute: the fused kernels, timed at their calls and at their
      nodes in the autograd graph. The backward includes the fused optimizer.
    - Forward all-to-all: from the last kernel's end until the pooled output is there.
    - Backward all-to-all: from the arrival of the output's gradient until the first
      kernel's backward starts. The features of an `EmbeddingCollection` have a gradient
      each, and the last to arrive counts.

    A train pipeline sends a batch's ids one iteration earlier, so the index all-to-all
    has no span then. On a GPU, every timestamp waits for the device, which keeps phases
    from overlapping. To time whole iterations, use no timer. With `wait=False`,
    timestamps are events in the device's stream instead; phases then include the time
    between kernels.

    Attributes:
        enabled: Whether iterations are timed; change it only between iterations.
        num_kernels: Number of fused kernels on this rank.
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
            model: A model whose `EmbeddingBagCollection`s and `EmbeddingCollection`s
                are sharded.
            device: Device of this rank's tables.
            wait: Whether timestamps wait for a GPU.
            on_error: Called with an error in a hook; timing ends then. None raises the
                error inside the model's call.

        Raises:
            ConfigError: Nothing in the model is sharded.
        """
        check_kind("model", model, nn.Module)
        check_kind("device", device, torch.device)
        self._device, self._on_error = device, on_error
        self._uses_events = is_accelerator(device.type) and not wait
        self._clock = uuid.uuid4().hex if self._uses_events else _machine()
        self._paths: list[str] = []
        self._starts: dict[tuple[str, str], Any] = {}
        self._spans: _Spans = defaultdict(list)
        self._origin: Any = None
        self._ended: list[tuple[_Spans, Any]] = []
        self._hooks = contextlib.ExitStack()  # the last hook is removed first
        self.enabled = True
        self.num_kernels = 0
        for path, module in model.named_modules():
            if isinstance(module, _TIMED):
                self._paths.append(path)
                self._hook(module, path)
        if not self._paths:
            raise ConfigError(
                "the model has no sharded EmbeddingBagCollection or "
                "EmbeddingCollection to time; pass the DistributedModelParallel"
            )

    def take(self) -> list[PhaseTimes]:
        """Return the phases since the last call, one entry per sharded module."""
        self.end_iteration()
        return self.take_all()[-1]

    def end_iteration(self) -> None:
        """Store the phases since the last call for `take_all`, without waiting."""
        self._ended.append((self._spans, self._origin))
        self._starts, self._spans, self._origin = {}, defaultdict(list), None

    def take_all(self) -> list[list[PhaseTimes]]:
        """Return all stored iterations, each with one entry per sharded module.

        With `wait=False`, this waits for the last event.
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
        """Remove the hooks from the model."""
        self.enabled = False
        self._hooks.close()

    def _now(self) -> Any:
        if self._uses_events:
            device = accelerator(self._device.type)
            event: Any = device.Event(enable_timing=True)
            event.record(device.current_stream(self._device))
            # The iteration's first event is its zero: CUDA measures the time between
            # events as a float with 24 bits.
            self._origin = self._origin or event
            return event
        synchronize(self._device)
        return time.perf_counter()

    def _start(self, path: str, phase: str) -> None:
        self._starts[path, phase] = self._now()

    def _end(self, path: str, phase: str) -> None:
        start = self._starts.pop((path, phase), None)
        if start is not None:  # None if the phase started while timing was off
            self._spans[path, phase].append((start, self._now()))

    def _mark(self, action: Callable[..., None], *arguments: Any) -> None:
        """Call `action` if timing is enabled; `on_error` gets its errors."""
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
            # A train pipeline replaces `forward` by its own function.
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
        while node is not None and not any(n in node.name() for n in _KERNEL_NODES):
            node = node.next_functions[0][0] if node.next_functions else None
        if node is None:  # no gradients are computed
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
            if not isinstance(values, torch.Tensor):  # of each feature's sequences
                every = [feature.values() for feature in values]
            else:
                every = [values]
            for value in every:
                if value.requires_grad:
                    value.register_hook(
                        lambda _: self._mark(self._start, path, "bwd_comms")
                    )

        def timed(wait: Callable[[], Any]) -> Any:
            output = wait()
            self._mark(after, output)
            return output

        wait_through(awaitable, timed)


class InputSampler:
    """Copies ids on their way into a model's sharded modules.

    A kernel sees the batches of all W ranks. To profile that, each rank copies W of its
    own batches, but only for its share of the features. All ranks together then copy
    about as many ids as one rank's batch has.
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
            model: Model with the sharded modules.
            rank: This rank; it profiles every `world_size`-th feature.
            world_size: Number of ranks, and of batches per profile.
            on_error: Called with an error in a hook; must call `remove`.
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
        """Number of batches whose ids were sent, but that no kernel has seen yet.

        A train pipeline has such batches; a plain loop has none between iterations.
        """
        return max(self._num_under_way.values(), default=0)

    def profile(self, is_time_left: Callable[[], bool]) -> dict[str, FeatureProfile]:
        """Return profiles of the features with enough batches, while time is left."""
        profiles = {}
        for feature, held in [*self._batches.items()]:
            if len(held) < self._num_batches or not is_time_left():
                continue
            ids, lengths, weighted = zip(*self._batches.pop(feature), strict=True)
            synchronize(ids[0].device)  # the stream that sent the ids makes the copies
            joined = torch.cat(lengths).cpu().numpy()
            if len(joined):
                profiles[feature] = profile_ids(
                    torch.cat(ids).cpu().numpy(), joined, any(weighted)
                )
        return profiles

    def remove(self) -> None:
        """Remove the hooks from the model."""
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
                # Only afterwards has TorchRec counted the ids of each feature.
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
        if features.variable_stride_per_key():  # each feature has its own batch size
            return
        if number not in self._shares:
            known = {key for share in self._shares.values() for key in share}
            mine = sorted(features.keys())[self._rank :: self._world_size]
            # Skip features that another module reads, too.
            self._shares[number] = [key for key in mine if key not in known]
        weighted = features.weights_or_none() is not None
        for key in self._shares[number]:
            held = self._batches.setdefault(key, [])
            if len(held) < self._num_batches:
                ids = features[key]
                copies = ids.values().detach().clone(), ids.lengths().detach().clone()
                held.append((*copies, weighted))


def _outermost(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the sharded modules that are not part of another sharded module."""
    if isinstance(model, ShardedModule):
        yield model
        return
    for child in model.children():
        yield from _outermost(child)


def _replace(hooks: contextlib.ExitStack, module: Any, **functions: Any) -> None:
    """Replace a module's methods by functions until `hooks` is closed.

    A function that other code has wrapped meanwhile stays, and must call the original.
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
    """Return an identifier of the machine, whose processes share one clock."""
    return _BOOT.read_text().strip() if _BOOT.exists() else platform.node()


def _share_clock(ranks: Sequence[PhaseTimes]) -> bool:
    return len({times.clock for times in ranks}) == 1


def critical_times(by_rank: Sequence[Sequence[PhaseTimes]]) -> list[dict[str, float]]:
    """Return the time of each phase over all ranks, in one iteration.

    Compute takes as long as on the slowest rank. A collective takes from the last
    rank's arrival to the last rank's end, so that waiting for compute is not counted
    twice. Ranks on several machines, and GPUs timed by events (`wait=False`), share no
    clock: there a collective takes as long as on the rank that spends the least time in
    it, because that rank arrived last.

    Args:
        by_rank: Result of `PhaseTimer.take` on each rank.

    Returns:
        For each sharded module: phase -> milliseconds.
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
    """Return the time of the embeddings over all ranks, in one iteration [ms].

    In each sharded module, forward and backward last from the last rank's start to the
    last rank's end. Time in which modules overlap counts once. For ranks without a
    common clock, it is the sum of the phases of `critical_times`.

    Args:
        by_rank: Result of `PhaseTimer.take` on each rank.
    """
    if not all(map(_share_clock, zip(*by_rank, strict=True))):
        return sum(sum(phases.values()) for phases in critical_times(by_rank))
    passes = []
    for ranks in zip(*by_rank, strict=True):
        for half in (PHASES[:3], PHASES[3:]):
            spans = [[s for name in half for s in r.spans[name]] for r in ranks]
            begun = [s for s in spans if s]
            if begun:
                start = max(s[0][0] for s in begun)
                passes.append((start, max(s[-1][1] for s in begun)))
    total, last_end = 0.0, -math.inf
    for start, end in sorted(passes):
        total += max(0.0, end - max(start, last_end))
        last_end = max(last_end, end)
    return total * 1e3
