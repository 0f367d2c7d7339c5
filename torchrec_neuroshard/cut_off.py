"""Calls that end when their time is up, whatever they call.

Code of others may never return, and Python can stop no thread; what callers hand in can
often not be pickled for another process, and a process with threads or an accelerator
must not be forked. So such a call runs in a daemon thread of its own. When its time is
up it is not waited for any longer: an exception is raised at its next line of Python,
over and over until it ends, so that no loop goes on beside the caller. What sits in C
code, or catches everything, is left behind; nobody reads what it still finds.
"""

from __future__ import annotations

import contextvars
import ctypes
import math
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

__all__ = ["TimeIsUpError", "call_within"]

Result = TypeVar("Result")

STOP_SECONDS = 0.5
"""How long a call is told to stop."""
_POLL_SECONDS = 0.5
"""Between looks at the clock."""


class TimeIsUpError(Exception):
    """A call did not return in time."""


def call_within(
    seconds: float, function: Callable[..., Result], *args: Any, **kwargs: Any
) -> Result:
    """Call a function that may never return.

    It sees the caller's context variables, gradient mode and device.

    Args:
        seconds: What it may take; infinite: it is called here and now.
        function: Called with all other arguments.
        args: For it.
        kwargs: For it.

    Raises:
        TimeIsUpError: It has not returned in time, and what it does is of no use.
        BaseException: What it raised.
    """
    if math.isinf(seconds):
        return function(*args, **kwargs)
    end = time.monotonic() + seconds
    outcome: list[tuple[Result | None, BaseException | None]] = []
    adopt, context = _thread_state(), contextvars.copy_context()

    def work() -> None:
        try:
            adopt()
            outcome.append((context.run(function, *args, **kwargs), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while thread.is_alive() and (left := end - time.monotonic()) > 0:
            thread.join(min(left, _POLL_SECONDS))
    except BaseException:  # an interrupt is for whoever waits here
        _stop(thread)
        raise
    if not outcome:
        _stop(thread)
        raise TimeIsUpError
    result, error = outcome[0]
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def _thread_state() -> Callable[[], None]:
    """Return what makes another thread work as this one does."""
    torch = sys.modules.get("torch")
    if torch is None:
        return lambda: None
    with_gradients = torch.is_grad_enabled()
    kind = torch.accelerator.current_accelerator()
    module = None if kind is None else torch.get_device_module(kind)
    # A device that nothing has used yet must not be set up here.
    choose: Callable[[], None] | None = None
    if module is not None and module.is_initialized():
        choose = partial(module.set_device, module.current_device())

    def adopt() -> None:
        torch.set_grad_enabled(with_gradients)
        if choose is not None:
            choose()

    return adopt


def _stop(thread: threading.Thread) -> None:
    """Raise an exception in a thread until it ends, or seems not to."""
    end = time.monotonic() + STOP_SECONDS
    while thread.is_alive() and time.monotonic() < end:
        # Threads end without a word by this one.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
        )
        thread.join(0.02)
