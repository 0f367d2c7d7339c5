"""Plan fixed tasks and compare plans and predicted milliseconds with stored ones.

    make gate                               # all tasks, minutes on one core
    make gate GATE_ARGS="kernels mlperf"    # these alone
    make gate GATE_ARGS=--write             # renew tests/gate/plans.json

A change that means to leave plans alone must leave all of this alone; one that means to
change them renews the file, and the differences printed here belong into its message.

Nothing may end by time, else a slow machine would find other plans. The default search
gets a million seconds and ends by its steps. Other limits cannot all be raised (those
of named searches, of TorchRec's own planner), so the clock runs a thousand times slower
here: it is replaced before anything else is imported. One thread; no GPU is seen.

Floating point differs between kinds of CPU and between releases of NumPy, SciPy,
PyTorch and TorchRec. On the CPU and the releases of the stored file all must be equal,
and numbers agree to 1e-9. Elsewhere the comparison is loose, and says so. Where a plan
is the same, milliseconds must agree to 1e-4 and lower bounds, which follow the search's
path, to 15 %. Where a search came to another plan, only its critical path counts, to
1e-3, and the plan is named without being a failure.

With OPENBLAS_CORETYPE=SkylakeX, Nehalem and Prescott on an AMD EPYC (26/2), whose own
kernels are Haswell's, predictions of equal plans differed by up to 2e-7 and one lower
bound by 1.8 %; 6 of 59 outcomes were other plans, with critical paths equal to 1e-6.
On an Intel Xeon (6/167) one lower bound differs by 11 %, and critical paths of other
plans by up to 8e-4.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

STORED = Path(__file__).with_name("plans.json")
SLOWER = 1000.0
SAME, ALMOST_SAME, OTHER_PLAN, OTHER_BOUND = 1e-9, 1e-4, 1e-3, 0.15
"""Relative: on the stored machine; elsewhere; there, critical paths of other plans;
there, lower bounds."""
RELEASES = ("numpy", "scipy", "torch", "torchrec")
PATH, BOUND = "critical_path_ms", "lower_bound_ms"

Outcomes = dict[str, dict[str, dict[str, Any]]]
"""Task -> variant -> what was planned."""


def slow_clock() -> None:
    """Let no time limit be reached."""
    for name in ("monotonic", "perf_counter", "time"):
        setattr(time, name, _slowed(getattr(time, name)))


def _slowed(clock: Callable[[], float]) -> Callable[[], float]:
    start = clock()
    return lambda: start + (clock() - start) / SLOWER


def machine() -> dict[str, Any]:
    """Say what floating point depends on."""
    from torchrec_neuroshard.hardware.devices import cpu_name

    releases = {name: importlib.metadata.version(name) for name in RELEASES}
    return {"cpu": cpu_name(), **releases}


def run(names: Sequence[str]) -> Outcomes:
    """Plan the tasks, all or those named."""
    tasks = importlib.import_module("tests.gate.tasks").TASKS
    unknown = [name for name in names if name not in tasks]
    if unknown:
        raise SystemExit(f"no task {unknown}; there are {', '.join(tasks)}")
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    found: Outcomes = {}
    for name in names or tasks:
        # As JSON has it, so that tuples are lists and keys are strings.
        found[name] = json.loads(json.dumps(tasks[name]()))
    return found


def as_text(machine: Mapping[str, Any], outcomes: Outcomes) -> str:
    """Write JSON with a line for each thing of a variant, which diffs show well."""
    tasks = []
    for task, variants in outcomes.items():
        parts = []
        for variant, record in variants.items():
            lines = ",\n".join(
                f"{json.dumps(k)}: {json.dumps(record[k])}" for k in record
            )
            parts.append(f"{json.dumps(variant)}: {{\n{lines}\n}}")
        tasks.append(f"{json.dumps(task)}: {{\n" + ",\n".join(parts) + "\n}")
    inside = ",\n".join(tasks)
    return f'{{"machine": {json.dumps(machine)},\n"tasks": {{\n{inside}\n}}}}\n'


def compare(stored: Outcomes, found: Outcomes, *, exact: bool) -> Iterator[str]:
    """Say what differs; lines that start with "note:" are no failures."""
    for task in sorted({*stored, *found}):
        old, new = stored.get(task, {}), found.get(task, {})
        for variant in sorted({*old, *new}):
            where = f"{task}, {variant}"
            if variant not in new:
                yield f"{where}: stored, but not planned any more"
            elif variant not in old:
                yield f"{where}: planned, but not stored"
            elif exact or _same_plan(old[variant], new[variant]):
                lines = _differences(
                    old[variant], new[variant], SAME if exact else ALMOST_SAME
                )
                texts = [f"{where}: {line}" for line in lines]
                if texts and PATH in old[variant]:
                    texts.append(f"{where}: {_change(old[variant], new[variant])}")
                yield from texts
            else:
                change = _change(old[variant], new[variant])
                far = PATH not in old[variant] or not _close(
                    old[variant][PATH], new[variant].get(PATH, math.nan), OTHER_PLAN
                )
                yield f"{'' if far else 'note: '}{where}: another plan, {change}"


def _same_plan(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return all(old.get(key) == new.get(key) for key in ("plan", "fallback", "moves"))


def _change(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Say how predicted milliseconds changed."""
    before, after = old.get(PATH), new.get(PATH)
    if before is None or after is None:
        return f"critical path {before} -> {after}"
    return f"critical path {before:.6g} -> {after:.6g} ms ({after / before - 1:+.4%})"


def _differences(old: Any, new: Any, tolerance: float, at: str = "") -> Iterator[str]:
    """Walk through two records side by side."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            inner = f"{at}.{key}" if at else key
            if key not in new:
                yield f"{inner}: {_short(old[key])} -> gone"
            elif key not in old:
                yield f"{inner}: none -> {_short(new[key])}"
            else:
                bound = key == BOUND and tolerance > SAME
                yield from _differences(
                    old[key], new[key], OTHER_BOUND if bound else tolerance, inner
                )
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from _differences(before, after, tolerance, f"{at}[{i}]")
    elif isinstance(old, float) or isinstance(new, float):
        numbers = isinstance(old, int | float) and isinstance(new, int | float)
        if not (numbers and _close(old, new, tolerance)):
            change = f" ({new / old - 1:+.2e})" if numbers and old else ""
            yield f"{at}: {old} -> {new}{change}"
    elif old != new:
        yield f"{at}: {_short(old)} -> {_short(new)}"


def _close(old: float, new: float, tolerance: float) -> bool:
    return math.isclose(old, new, rel_tol=tolerance, abs_tol=1e-12)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; the exit code."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
    )
    parser.add_argument("tasks", nargs="*", help="names; none: all of them")
    parser.add_argument("--write", action="store_true", help="renew the stored file")
    options = parser.parse_args(arguments)
    if options.write and options.tasks:
        parser.error("--write renews all tasks: name none")
    # Physical estimates must not look at a GPU; threads would add in another order.
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    os.environ |= {"MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    started = time.monotonic()
    slow_clock()
    here, found = machine(), run(options.tasks)
    seconds = (time.monotonic() - started) * SLOWER
    if options.write:
        STORED.write_text(as_text(here, found), encoding="utf-8")
        print(f"wrote {STORED}: {len(found)} tasks in {seconds:.0f} s")
        return 0
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    wanted = options.tasks or stored["tasks"]
    tasks = {n: t for n, t in stored["tasks"].items() if n in wanted}
    exact = stored["machine"] == here
    lines = list(compare(tasks, found, exact=exact))
    failures = [line for line in lines if not line.startswith("note: ")]
    print("\n".join(lines))
    if not exact:
        print(f"other machine: stored {stored['machine']}, here {here}")
    print(
        f"{len(found)} tasks in {seconds:.0f} s, {'exact' if exact else 'loose'}: "
        f"{len(failures)} differences"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
